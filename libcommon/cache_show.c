/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_show: a cache described for people. Headers are read in parallel, states only with --stats;
 * sums are kept per shard and added in order, so that the figures do not depend on threads.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cache.h"
#include "cache_view.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "mem.h"
#include "parallel.h"
#include "text.h"

#define PIECE   ((size_t)1 << 20)
#define READERS 8

/* Of one layer over the positions of one shard. */
struct figures {
	double sum, squares, min, max;
	int64_t n, odd; /* finite values, others */
};

struct show {
	struct cache_view v;
	bool *missing, *bad;     /* [shards] */
	int64_t *tokens;         /* [shards]; 0 = unknown */
	int64_t *length;         /* [rows], with stats; 0 = unknown */
	struct figures *figures; /* [shards, L + 1], with stats */
	struct text *why;        /* [shards]: of a bad header */
};

static void line(const char *name, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void line(const char *name, const char *fmt, ...)
{
	va_list ap;

	printf("  %-26s ", name);
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	printf("\n");
}

/* ---- reading ---------------------------------------------------------------- */

static void figures_add(struct figures *f, const float *x, int64_t n)
{
	int64_t i;

	for (i = 0; i < n; i++) {
		double v = x[i];

		if (!isfinite(v)) {
			f->odd++;
			continue;
		}
		f->sum += v;
		f->squares += v * v;
		f->min = f->n && f->min < v ? f->min : v;
		f->max = f->n && f->max > v ? f->max : v;
		f->n++;
	}
}

static void figures_merge(struct figures *to, const struct figures *f)
{
	if (f->n) {
		to->min = to->n && to->min < f->min ? to->min : f->min;
		to->max = to->n && to->max > f->max ? to->max : f->max;
	}
	to->sum += f->sum;
	to->squares += f->squares;
	to->n += f->n;
	to->odd += f->odd;
}

/* All real positions of one row of one tensor; `layers` figures from f on. */
static int row_figures(const struct show *s, const struct shard_head *h, enum shard_tensor k,
		       int64_t row, int64_t length, struct figures *f, struct err *e)
{
	const struct geometry *g = &s->v.g;
	size_t width = geometry_token_bytes(g, k);
	int64_t step = width < PIECE ? (int64_t)(PIECE / width) : 1,
		layers = k == SHARD_STATES ? g->nids : 1;
	void *raw = mem_aligned((size_t)step * width, e);
	float *x = mem_aligned((size_t)(step * layers * g->hidden) * sizeof *x, e);
	int64_t i, n, p;
	int rc = raw && x ? 0 : -1;

	for (i = 0; i < length && !rc; i += n) {
		n = length - i < step ? length - i : step;
		rc = shard_read(h, g, k, row, i, n, raw, e);
		if (rc)
			break;
		dtype_convert(x, DT_F32, raw, g->dtype, (size_t)(n * layers * g->hidden));
		for (p = 0; p < n * layers; p++)
			figures_add(&f[p % layers], x + p * g->hidden, g->hidden);
	}
	free(raw);
	free(x);
	return rc;
}

static int shard_figures(struct show *s, const struct shard_head *h, int64_t shard, struct err *e)
{
	struct figures *f = s->figures + shard * (s->v.g.nids + 1);
	int64_t r, length;

	for (r = 0; r < h->rows; r++) {
		length = h->row_tokens ? h->row_tokens[r] : s->v.g.seq_length;
		s->length[shard * s->v.g.shard_size + r] = h->row_tokens ? length : 0;
		if (row_figures(s, h, SHARD_STATES, r, length, f, e) ||
		    row_figures(s, h, SHARD_LAST, r, length, f + s->v.g.nids, e))
			return -1;
	}
	return 0;
}

static int look(void *ctx, int64_t i, struct err *e)
{
	struct show *s = ctx;
	struct shard_head h = SHARD_HEAD_INIT;
	struct err why = ERR_INIT;
	int64_t r;
	int rc = 0;

	s->missing[i] = !s->v.present[i];
	if (s->missing[i])
		return 0;
	s->bad[i] = cache_view_shard(&s->v, i, &h, &why);
	if (s->bad[i]) {
		text_add(&s->why[i], why.text);
		return text_ok(&s->why[i], e);
	}
	for (r = 0; h.row_tokens && r < h.rows; r++)
		s->tokens[i] += h.row_tokens[r];
	if (s->figures)
		rc = shard_figures(s, &h, i, e);
	shard_head_release(&h);
	return rc;
}

/* ---- printing ---------------------------------------------------------------- */

static int print_members(const json_t *o, struct err *e)
{
	struct text t = TEXT_INIT;
	const char *key;
	json_t *v;
	int rc = 0;

	json_object_foreach((json_t *)o, key, v)
	{
		if (json_is_object(v))
			continue;
		text_clear(&t);
		json_python(&t, v, -1, true);
		rc = text_ok(&t, e);
		if (rc)
			break;
		line(key, "%s", json_is_string(v) ? json_string_value(v) : t.s);
	}
	text_release(&t);
	return rc;
}

/* Length and allocated bytes of one file; nothing if it is not there. */
static void add_size(const char *path, uint64_t *size, uint64_t *disk)
{
	struct stat st;

	if (!path || stat(path, &st))
		return;
	*size += (uint64_t)st.st_size;
	*disk += (uint64_t)st.st_blocks * 512;
}

static int print_sizes(const struct show *s, struct err *e)
{
	static const char *const other[] = { "manifest.json", "dspark.json",
					     "target_weights.safetensors" };
	uint64_t size = 0, disk = 0;
	struct text t = TEXT_INIT;
	int64_t i;
	char *path;
	int rc;

	for (i = 0; i < 3; i++) {
		path = file_join(s->v.dir, other[i], e);
		add_size(path, &size, &disk);
		free(path);
	}
	for (i = 0; i < s->v.shards; i++) {
		path = s->missing[i] ? NULL : shard_path(s->v.dir, i, e);
		add_size(path, &size, &disk);
		free(path);
	}
	text_bytes(&t, (double)size);
	text_add(&t, " in files, ");
	text_bytes(&t, (double)disk);
	text_add(&t, " on disk");
	rc = text_ok(&t, e);
	if (!rc)
		line("size", "%s", t.s);
	text_release(&t);
	return rc;
}

static int print_set(const char *name, const bool *flag, int64_t n, struct err *e)
{
	struct text t = TEXT_INIT;
	int64_t count = cache_intervals(&t, flag, n);
	int rc = text_ok(&t, e);

	if (!rc && count)
		line(name, "%s (%lld of %lld)", t.s, (long long)count, (long long)n);
	text_release(&t);
	return rc;
}

static int print_shards(const struct show *s, struct err *e)
{
	const struct geometry *g = &s->v.g;
	int64_t i, tokens = 0, rows = 0, present = 0;

	for (i = 0; i < s->v.shards; i++) {
		bool there = !s->missing[i] && !s->bad[i];

		present += there;
		rows += there ? geometry_shard_rows(g, i) : 0;
		tokens += s->tokens[i];
	}
	line("shards", "%lld of %lld", (long long)present, (long long)s->v.shards);
	if (print_set("missing shards", s->missing, s->v.shards, e) ||
	    print_set("bad shards", s->bad, s->v.shards, e))
		return -1;
	for (i = 0; i < s->v.shards; i++)
		if (s->bad[i])
			line("", "%s", s->why[i].s);
	if (s->v.foreign)
		line("tokens", "%lld positions; real lengths are not recorded",
		     (long long)(rows * g->seq_length));
	else if (rows)
		line("tokens", "%lld real of %lld positions (%.1f%%)", (long long)tokens,
		     (long long)(rows * g->seq_length),
		     100.0 * (double)tokens / (double)(rows * g->seq_length));
	return 0;
}

static void print_figures(const char *name, const struct figures *f)
{
	double n = f->n ? (double)f->n : 1,
	       absmax = fabs(f->min) > fabs(f->max) ? fabs(f->min) : fabs(f->max);

	printf("  %-12s %12.5g %12.5g %12.5g %12.5g %12.5g", name, f->sum / n, sqrt(f->squares / n),
	       f->min, f->max, absmax);
	if (f->odd)
		printf("   %lld not finite", (long long)f->odd);
	printf("\n");
}

static int by_length(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

/* Rows of shards that are not there count 0 and stand first. */
static void print_lengths(int64_t *length, int64_t rows)
{
	int64_t first = 0, i, n;
	double sum = 0;

	qsort(length, (size_t)rows, sizeof *length, by_length);
	while (first < rows && !length[first])
		first++;
	n = rows - first;
	for (i = first; i < rows; i++)
		sum += (double)length[i];
	length += first;
	if (n)
		line("row lengths",
		     "min %lld, 10%% %lld, 50%% %lld, 90%% %lld, max %lld, mean "
		     "%.1f",
		     (long long)length[0], (long long)length[(n - 1) / 10],
		     (long long)length[(n - 1) / 2], (long long)length[(n - 1) * 9 / 10],
		     (long long)length[n - 1], sum / (double)n);
}

static void print_stats(const struct show *s)
{
	const json_t *ids =
		json_object_get(json_object_get(s->v.identity, "manifest"), "target_layer_ids");
	int64_t i, l, layers = s->v.g.nids + 1;
	char name[32];

	print_lengths(s->length, s->v.g.rows);
	printf("  %-12s %12s %12s %12s %12s %12s\n", "states", "mean", "rms", "min", "max",
	       "abs max");
	for (l = 0; l < layers; l++) {
		struct figures sum = { 0 };

		for (i = 0; i < s->v.shards; i++)
			figures_merge(&sum, &s->figures[i * layers + l]);
		snprintf(name, sizeof name, "layer %lld",
			 (long long)json_integer_value(json_array_get(ids, (size_t)l)));
		print_figures(l + 1 < layers ? name : "last", &sum);
	}
}

static int show_begin(struct show *s, const char *dir, bool stats, struct err *e)
{
	size_t n;

	if (cache_view_open(&s->v, dir, e))
		return -1;
	n = (size_t)s->v.shards;
	s->missing = mem_calloc(n, sizeof *s->missing, e);
	s->bad = mem_calloc(n, sizeof *s->bad, e);
	s->tokens = mem_calloc(n, sizeof *s->tokens, e);
	s->why = mem_calloc(n, sizeof *s->why, e);
	if (stats) {
		s->length = mem_calloc((size_t)s->v.g.rows, sizeof *s->length, e);
		s->figures = mem_calloc(n * (size_t)(s->v.g.nids + 1), sizeof *s->figures, e);
		if (!s->length || !s->figures)
			return -1;
	}
	return s->missing && s->bad && s->tokens && s->why ? 0 : -1;
}

int cache_show(const char *dir, bool stats, struct err *e)
{
	struct show s = { 0 };
	int64_t i;
	int rc = -1;

	if (show_begin(&s, dir, stats, e) || parallel_each(s.v.shards, READERS, look, &s, e))
		goto out;
	printf("%s: %s, %s\n", dir, s.v.complete ? "complete" : "not complete",
	       s.v.foreign         ? "not written by dspark"
	       : s.v.vouch.program ? s.v.vouch.program
				   : "not merged yet");
	if (print_members(json_object_get(s.v.identity, "manifest"), e) ||
	    print_members(s.v.identity, e))
		goto out;
	if (!s.v.foreign)
		line("identity", "%s", s.v.digest);
	if (print_shards(&s, e) || print_sizes(&s, e))
		goto out;
	if (stats)
		print_stats(&s);
	rc = 0;
out:
	for (i = 0; s.why && i < s.v.shards; i++)
		text_release(&s.why[i]);
	free(s.missing);
	free(s.bad);
	free(s.tokens);
	free(s.length);
	free(s.figures);
	free(s.why);
	cache_view_release(&s.v);
	return rc;
}
