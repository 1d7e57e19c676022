/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_diff: two caches, field by field and over their real positions value by value. Shard sizes
 * and dtypes may differ; rows, lengths and shapes must not, or only the fields are compared. Where
 * a cache does not know its row lengths the other's count.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "cache_view.h"
#include "err.h"
#include "mem.h"
#include "parallel.h"
#include "text.h"

#define PIECE ((int64_t)1 << 18) /* elements in hand */
#define EXTRA 3                  /* slots behind the layers: last state, ids, mask */

/* Of one layer, or of ids or mask, over the rows of one shard of A. */
struct distance {
	double max, squares, scale; /* largest |a-b|, sum of (a-b)^2 and of b^2 */
	int64_t n, differ, row, position;
};

struct diff {
	struct cache_view a, b;
	struct distance *d; /* [shards of A, L + EXTRA] */
	int64_t *unread;    /* [shards of A]: rows that one of the two lacks */
	int64_t *lengths;   /* [shards of A]: rows of unequal real length */
};

static void note(struct distance *d, double a, double b, int64_t row, int64_t position)
{
	double delta = a == b || (isnan(a) && isnan(b)) ? 0 : fabs(a - b);

	if (isnan(delta))
		delta = INFINITY;
	d->n++;
	d->squares += delta * delta;
	d->scale += isnan(b) ? 0 : b * b;
	if (delta == 0)
		return;
	d->differ++;
	if (delta > d->max) {
		d->max = delta;
		d->row = row;
		d->position = position;
	}
}

static void merge(struct distance *to, const struct distance *d)
{
	if (d->max > to->max) {
		to->max = d->max;
		to->row = d->row;
		to->position = d->position;
	}
	to->squares += d->squares;
	to->scale += d->scale;
	to->n += d->n;
	to->differ += d->differ;
}

/* ---- rows ---------------------------------------------------------------- */

/* A row in both caches. */
struct pair {
	struct diff *k;
	struct shard_head a, b;
	int64_t at_b; /* shard of B that is open, -1 = none */
	int64_t row, in_a, in_b, length;
	void *raw; /* PIECE elements of 8 bytes */
	float *x, *y;
};

static int read_floats(const struct pair *p, const struct shard_head *h, const struct geometry *g,
		       int64_t in, enum shard_tensor t, int64_t first, int64_t n, float *out,
		       struct err *e)
{
	if (shard_read(h, g, t, in, first, n, p->raw, e))
		return -1;
	dtype_convert(out, DT_F32, p->raw, g->dtype,
		      (size_t)n * (geometry_token_bytes(g, t) / dtype_size(g->dtype)));
	return 0;
}

static int diff_states(struct pair *p, enum shard_tensor t, struct distance *d, struct err *e)
{
	const struct geometry *g = &p->k->a.g;
	int64_t layers = t == SHARD_STATES ? g->nids : 1, width = layers * g->hidden,
		step = PIECE / width ? PIECE / width : 1, i, n, j;

	for (i = 0; i < p->length; i += n) {
		n = p->length - i < step ? p->length - i : step;
		if (read_floats(p, &p->a, g, p->in_a, t, i, n, p->x, e) ||
		    read_floats(p, &p->b, &p->k->b.g, p->in_b, t, i, n, p->y, e))
			return -1;
		for (j = 0; j < n * width; j++)
			note(&d[j / g->hidden % layers], p->x[j], p->y[j], p->row, i + j / width);
	}
	return 0;
}

static int diff_integers(struct pair *p, enum shard_tensor t, struct distance *d, struct err *e)
{
	int64_t *x = mem_calloc((size_t)p->length, sizeof *x, e),
		*y = mem_calloc((size_t)p->length, sizeof *y, e), i;
	int rc = -1;

	if (x && y && !shard_read(&p->a, &p->k->a.g, t, p->in_a, 0, p->length, x, e) &&
	    !shard_read(&p->b, &p->k->b.g, t, p->in_b, 0, p->length, y, e)) {
		for (i = 0; i < p->length; i++)
			note(d, (double)x[i], (double)y[i], p->row, i);
		rc = 0;
	}
	free(x);
	free(y);
	return rc;
}

/* The real length: the smaller where both know it, the known one where one does. */
static int64_t common_length(const struct pair *p, int64_t *unequal)
{
	int64_t a = p->a.row_tokens ? p->a.row_tokens[p->in_a] : 0,
		b = p->b.row_tokens ? p->b.row_tokens[p->in_b] : 0;

	if (a && b) {
		*unequal += a != b;
		return a < b ? a : b;
	}
	return a ? a : b ? b : p->k->a.g.seq_length;
}

static int open_b(struct pair *p, int64_t shard, struct err *e)
{
	if (p->at_b == shard)
		return 0;
	shard_head_release(&p->b);
	p->at_b = -1;
	if (cache_view_shard(&p->k->b, shard, &p->b, e))
		return -1;
	p->at_b = shard;
	return 0;
}

static int diff_row(struct pair *p, int64_t shard, int64_t r, struct err *e)
{
	struct diff *k = p->k;
	struct distance *d = k->d + shard * (k->a.g.nids + EXTRA);
	int64_t in = shard * k->a.g.shard_size + r, shard_b = in / k->b.g.shard_size;

	if (!k->b.present[shard_b]) {
		k->unread[shard]++;
		return 0;
	}
	if (open_b(p, shard_b, e))
		return -1;
	p->row = in;
	p->in_a = r;
	p->in_b = in % k->b.g.shard_size;
	p->length = common_length(p, &k->lengths[shard]);
	return diff_states(p, SHARD_STATES, d, e) ||
			       diff_states(p, SHARD_LAST, d + k->a.g.nids, e) ||
			       diff_integers(p, SHARD_IDS, d + k->a.g.nids + 1, e) ||
			       diff_integers(p, SHARD_MASK, d + k->a.g.nids + 2, e)
		       ? -1
		       : 0;
}

static int diff_shard(void *ctx, int64_t i, struct err *e)
{
	struct diff *k = ctx;
	struct pair p = { .k = k, .a = SHARD_HEAD_INIT, .b = SHARD_HEAD_INIT, .at_b = -1 };
	int64_t width = k->a.g.hidden * k->a.g.nids, most = PIECE > width ? PIECE : width, r,
		rows = geometry_shard_rows(&k->a.g, i);
	int rc = -1;

	if (!k->a.present[i]) {
		k->unread[i] = rows;
		return 0;
	}
	p.raw = mem_aligned((size_t)most * 8, e);
	p.x = mem_aligned((size_t)most * sizeof *p.x, e);
	p.y = mem_aligned((size_t)most * sizeof *p.y, e);
	if (!p.raw || !p.x || !p.y || cache_view_shard(&k->a, i, &p.a, e))
		goto out;
	for (r = rc = 0; r < rows && !rc; r++)
		rc = diff_row(&p, i, r, e);
out:
	shard_head_release(&p.a);
	shard_head_release(&p.b);
	free(p.raw);
	free(p.x);
	free(p.y);
	return rc;
}

/* ---- target weights ---------------------------------------------------------------- */

static int diff_matrix(const struct diff *k, const struct weights_head *a,
		       const struct weights_head *b, int which, struct distance *d, struct err *e)
{
	const struct geometry *ga = &k->a.g, *gb = &k->b.g;
	int64_t total = ga->vocab * ga->hidden, i, j, n;
	void *raw = mem_aligned((size_t)PIECE * 4, e);
	float *x = mem_aligned((size_t)PIECE * sizeof *x, e),
	      *y = mem_aligned((size_t)PIECE * sizeof *y, e);
	int rc = raw && x && y ? 0 : -1;

	for (i = 0; i < total && !rc; i += n) {
		size_t sa = dtype_size(ga->dtype), sb = dtype_size(gb->dtype);

		n = total - i < PIECE ? total - i : PIECE;
		rc = safetensors_read(&a->file, a->tensor[which], raw, (uint64_t)i * sa,
				      (size_t)n * sa, e);
		if (!rc)
			dtype_convert(x, DT_F32, raw, ga->dtype, (size_t)n);
		rc = rc || safetensors_read(&b->file, b->tensor[which], raw, (uint64_t)i * sb,
					    (size_t)n * sb, e)
			     ? -1
			     : 0;
		if (!rc)
			dtype_convert(y, DT_F32, raw, gb->dtype, (size_t)n);
		for (j = 0; j < n && !rc; j++)
			note(d, x[j], y[j], (i + j) / ga->hidden, (i + j) % ga->hidden);
	}
	free(raw);
	free(x);
	free(y);
	return rc;
}

/* ---- result ---------------------------------------------------------------- */

static bool print(const char *name, const struct distance *d, const char *row, const char *position)
{
	double n = d->n ? (double)d->n : 1;

	if (!d->differ) {
		printf("%s: same\n", name);
		return false;
	}
	printf("%s: %lld of %lld values differ, max abs %.6g (%s %lld %s "
	       "%lld), rms %.6g, relative %.6g\n",
	       name, (long long)d->differ, (long long)d->n, d->max, row, (long long)d->row,
	       position, (long long)d->position, sqrt(d->squares / n),
	       d->scale > 0 ? sqrt(d->squares / d->scale) : INFINITY);
	return true;
}

static int diff_weights(const struct diff *k, bool *differ, struct err *e)
{
	struct weights_head a = WEIGHTS_HEAD_INIT, b = WEIGHTS_HEAD_INIT;
	int rc = -1, i;

	if (cache_view_weights(&k->a, &a, e) || cache_view_weights(&k->b, &b, e))
		goto out;
	for (i = 0; i < 2; i++) {
		struct distance d = { 0 };

		if (diff_matrix(k, &a, &b, i, &d, e))
			goto out;
		*differ |= print(weights_name(i), &d, "row", "column");
	}
	rc = 0;
out:
	weights_head_release(&a);
	weights_head_release(&b);
	return rc;
}

static void print_rows(const struct diff *k, bool *differ)
{
	const json_t *ids =
		json_object_get(json_object_get(k->a.identity, "manifest"), "target_layer_ids");
	int64_t i, l, layers = k->a.g.nids, unread = 0, lengths = 0;
	char name[48];

	for (l = 0; l < layers + EXTRA; l++) {
		struct distance sum = { 0 };

		for (i = 0; i < k->a.shards; i++)
			merge(&sum, &k->d[i * (layers + EXTRA) + l]);
		snprintf(name, sizeof name, "target_hidden_states layer %lld",
			 (long long)json_integer_value(json_array_get(ids, (size_t)l)));
		*differ |= print(l < layers        ? name
				 : l == layers     ? "target_last_hidden_states"
				 : l == layers + 1 ? "input_ids"
						   : "loss_mask",
				 &sum, "row", "position");
	}
	for (i = 0; i < k->a.shards; i++) {
		unread += k->unread[i];
		lengths += k->lengths[i];
	}
	if (lengths)
		printf("real lengths of %lld rows differ\n", (long long)lengths);
	if (unread)
		printf("%lld rows are missing in one of the two and were not "
		       "compared\n",
		       (long long)unread);
	*differ |= lengths || unread;
}

static int diff_values(struct diff *k, bool *differ, struct err *e)
{
	const struct geometry *a = &k->a.g, *b = &k->b.g;
	size_t n = (size_t)k->a.shards;

	if (a->rows != b->rows || a->seq_length != b->seq_length || a->hidden != b->hidden ||
	    a->nids != b->nids || a->vocab != b->vocab) {
		printf("shapes differ: values are not compared\n");
		*differ = true;
		return 0;
	}
	k->d = mem_calloc(n * (size_t)(a->nids + EXTRA), sizeof *k->d, e);
	k->unread = mem_calloc(n, sizeof *k->unread, e);
	k->lengths = mem_calloc(n, sizeof *k->lengths, e);
	if (!k->d || !k->unread || !k->lengths ||
	    parallel_each(k->a.shards, parallel_threads(), diff_shard, k, e))
		return -1;
	print_rows(k, differ);
	return diff_weights(k, differ, e);
}

int cache_diff(const char *a, const char *b, struct err *e)
{
	struct diff k = { 0 };
	struct text fields = TEXT_INIT;
	bool differ = false;
	int rc = -1;

	if (cache_view_open(&k.a, a, e) || cache_view_open(&k.b, b, e))
		goto out;
	identity_differences(&fields, k.a.identity, k.b.identity);
	if (text_ok(&fields, e))
		goto out;
	if (fields.len) {
		printf("%s\n", fields.s);
		differ = true;
	}
	if (diff_values(&k, &differ, e))
		goto out;
	rc = differ ? err_refuse(e, "'%s' and '%s' differ", a, b) : 0;
out:
	text_release(&fields);
	free(k.d);
	free(k.unread);
	free(k.lengths);
	cache_view_release(&k.a);
	cache_view_release(&k.b);
	return rc;
}
