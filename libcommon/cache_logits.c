/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_logits: the head is streamed once past all sampled states; each keeps a running maximum and
 * sum of exponentials.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <stdlib.h>

#include "cache_logits.h"
#include "digest.h"
#include "err.h"
#include "mem.h"
#include "parallel.h"
#include "text.h"

#define ROWS      16
#define POSITIONS 4                  /* of a row */
#define BLOCK     ((int64_t)1 << 20) /* elements of the head in hand */
#define LANES     8

struct sample {
	int64_t row, position;
	int64_t next; /* the token that follows */
	float *state; /* [H] */
	double max, sum, target;
	int64_t best;
};

struct logits {
	const struct cache_view *v;
	struct sample sample[ROWS * POSITIONS];
	int n;
	float *head; /* [rows in hand, H] */
	int64_t row0, rows;
};

/*
 * Positions of one row, evenly spread; a reference cache does not say where a row ends, its mask
 * says where it must still go on.
 */
static int take_row(struct logits *l, int64_t row, struct err *e)
{
	const struct geometry *g = &l->v->g;
	int64_t at = row % g->shard_size, length, last = 0, i, k, seq = g->seq_length;
	struct shard_head h = SHARD_HEAD_INIT;
	int64_t *ids = mem_calloc((size_t)seq, sizeof *ids, e),
		*mask = mem_calloc((size_t)seq, sizeof *mask, e);
	void *raw = mem_aligned(geometry_token_bytes(g, SHARD_LAST), e);
	int rc = -1;

	if (!ids || !mask || !raw || cache_view_shard(l->v, row / g->shard_size, &h, e) ||
	    shard_read(&h, g, SHARD_IDS, at, 0, seq, ids, e) ||
	    shard_read(&h, g, SHARD_MASK, at, 0, seq, mask, e))
		goto out;
	for (i = 0; i < seq; i++)
		last = mask[i] ? i + 1 : last;
	length = h.row_tokens ? h.row_tokens[at] : last;
	for (k = 0; k < POSITIONS && k < length - 1; k++) {
		struct sample *s = &l->sample[l->n];
		int64_t count = length - 1 < POSITIONS ? length - 1 : POSITIONS;

		*s = (struct sample){ .row = row,
				      .position = (2 * k + 1) * (length - 1) / (2 * count),
				      .max = -INFINITY };
		s->next = ids[s->position + 1];
		s->state = mem_aligned((size_t)g->hidden * sizeof(float), e);
		if (!s->state)
			goto out;
		l->n++;
		if (shard_read(&h, g, SHARD_LAST, at, s->position, 1, raw, e))
			goto out;
		dtype_convert(s->state, DT_F32, raw, g->dtype, (size_t)g->hidden);
	}
	rc = 0;
out:
	shard_head_release(&h);
	free(ids);
	free(mask);
	free(raw);
	return rc;
}

static float dot(const float *a, const float *b, int64_t n)
{
	float lane[LANES] = { 0 }, sum = 0;
	int64_t i;
	int k;

	for (i = 0; i + LANES <= n; i += LANES)
		for (k = 0; k < LANES; k++)
			lane[k] += a[i + k] * b[i + k];
	for (; i < n; i++)
		sum += a[i] * b[i];
	for (k = 0; k < LANES; k++)
		sum += lane[k];
	return sum;
}

/* One sample against the rows of the head in hand. */
static int advance(void *ctx, int64_t i, struct err *e)
{
	struct logits *l = ctx;
	struct sample *s = &l->sample[i];
	int64_t hidden = l->v->g.hidden, r;

	for (r = 0; r < l->rows; r++) {
		double x = dot(l->head + r * hidden, s->state, hidden);

		if (!isfinite(x))
			return err_refuse(e,
					  "row %lld position %lld: the logit of token %lld is not "
					  "finite",
					  (long long)s->row, (long long)s->position,
					  (long long)(l->row0 + r));
		if (x > s->max) {
			s->sum *= exp(s->max - x);
			s->max = x;
			s->best = l->row0 + r;
		}
		s->sum += exp(x - s->max);
		if (l->row0 + r == s->next)
			s->target = x;
	}
	return 0;
}

static int stream_head(struct logits *l, struct err *e)
{
	const struct geometry *g = &l->v->g;
	int64_t step = BLOCK / g->hidden ? BLOCK / g->hidden : 1;
	size_t row = (size_t)g->hidden * dtype_size(g->dtype);
	struct weights_head h = WEIGHTS_HEAD_INIT;
	void *raw = mem_aligned((size_t)step * row, e);
	int rc = -1;

	l->head = mem_aligned((size_t)(step * g->hidden) * sizeof(float), e);
	if (!raw || !l->head || cache_view_weights(l->v, &h, e))
		goto out;
	for (l->row0 = 0; l->row0 < g->vocab; l->row0 += l->rows) {
		l->rows = g->vocab - l->row0 < step ? g->vocab - l->row0 : step;
		if (safetensors_read(&h.file, h.tensor[1], raw, (uint64_t)l->row0 * row,
				     (size_t)l->rows * row, e))
			goto out;
		dtype_convert(l->head, DT_F32, raw, g->dtype, (size_t)(l->rows * g->hidden));
		if (parallel_each(l->n, parallel_threads(), advance, l, e))
			goto out;
	}
	rc = 0;
out:
	weights_head_release(&h);
	free(raw);
	return rc;
}

static void conclude(const struct logits *l, struct text *out)
{
	double loss = 0;
	int right = 0, i;

	for (i = 0; i < l->n; i++) {
		const struct sample *s = &l->sample[i];

		loss += s->max + log(s->sum) - s->target;
		right += s->best == s->next;
	}
	if (l->n)
		text_printf(out,
			    "logits of %d sampled positions are finite: mean "
			    "next-token loss %.3f (ln V = %.3f), arg max right "
			    "in %.0f%%",
			    l->n, loss / l->n, log((double)l->v->g.vocab), 100.0 * right / l->n);
	else
		text_add(out, "no position with a next token to compute logits for");
}

int cache_logits(const struct cache_view *v, struct text *out, struct err *e)
{
	struct logits *l = mem_calloc(1, sizeof *l, e);
	int64_t rows = v->g.rows < ROWS ? v->g.rows : ROWS, k;
	int rc = -1;

	if (!l)
		return -1;
	l->v = v;
	for (k = 0; k < rows; k++)
		if (take_row(l, (2 * k + 1) * v->g.rows / (2 * rows), e))
			goto out;
	if (l->n && stream_head(l, e))
		goto out;
	conclude(l, out);
	rc = text_ok(out, e);
out:
	while (l->n)
		free(l->sample[--l->n].state);
	free(l->head);
	free(l);
	return rc;
}
