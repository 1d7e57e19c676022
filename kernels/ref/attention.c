/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention of each query head over the keys of its own row of data. q, k and v are rounded
 * to the compute dtype; ref keeps the probabilities exact, faster backends may round the
 * unnormalised ones to the compute dtype.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <stdlib.h>

#include "mem.h"
#include "ref.h"

struct query {
	struct tensor q, k, v;
	const struct attention *a;
	enum dtype compute;
	int head;
	int64_t token;		/* of q and out */
	int64_t key;		/* token of the first visible key */
	int64_t n;		/* visible keys */
	double *p;		/* [n] */
};

static double score(const struct query *s, int64_t key)
{
	int64_t w = s->a->width, kv = s->head / (s->a->heads / s->a->kv_heads);
	double sum = 0;

	for (int64_t c = 0; c < w; c++)
		sum += (double)ref_round(ref_get(s->q, s->token, s->head * w + c), s->compute) *
		       ref_round(ref_get(s->k, key, kv * w + c), s->compute);
	return sum * s->a->scale;
}

/* Fills p with the probabilities; the sink, if any, only takes its part of the denominator. */
void ref_softmax(double *p, int64_t n, const float *sink)
{
	double max = sink ? *sink : -INFINITY, sum;

	for (int64_t j = 0; j < n; j++)
		max = p[j] > max ? p[j] : max;
	sum = sink ? exp(*sink - max) : 0;
	for (int64_t j = 0; j < n; j++)
		sum += p[j] = exp(p[j] - max);
	for (int64_t j = 0; j < n; j++)
		p[j] /= sum;
}

static void softmax(const struct query *s)
{
	for (int64_t j = 0; j < s->n; j++)
		s->p[j] = score(s, s->key + j);
	ref_softmax(s->p, s->n, s->a->sink ? &ref_vector(s->a->sink)[s->head] : NULL);
}

static void one_query(const struct query *s, struct tensor out)
{
	int64_t w = s->a->value_width, kv = s->head / (s->a->heads / s->a->kv_heads);

	softmax(s);
	for (int64_t c = 0; c < w; c++) {
		double sum = 0;

		for (int64_t j = 0; j < s->n; j++)
			sum += s->p[j] *
			       ref_round(ref_get(s->v, s->key + j, kv * w + c), s->compute);
		ref_set(out, s->token, s->head * w + c, (float)sum);
	}
}

static void one_piece(struct query *s, struct tensor out, const struct piece *piece)
{
	for (int64_t i = 0; i < piece->count; i++) {
		int64_t end = piece->first + i + 1,
			begin = s->a->window && end > s->a->window ? end - s->a->window : 0;

		if (end > piece->kv_count)
			end = piece->kv_count;
		s->token = piece->begin + i;
		s->key = piece->kv_begin + begin;
		s->n = end > begin ? end - begin : 0;
		for (s->head = 0; s->head < s->a->heads; s->head++)
			one_query(s, out);
	}
}

void ref_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		   struct tensor v, const struct attention *a, const struct piece *pieces, int n)
{
	struct query s = { .q = q, .k = k, .v = v, .a = a, .compute = d->compute };

	if (!ref_good(d))
		return;
	for (int i = 0; i < n && ref_good(d); i++) {
		s.p = mem_calloc((size_t)pieces[i].kv_count, sizeof *s.p, &d->err);
		if (s.p)
			one_piece(&s, out, &pieces[i]);
		free(s.p);
	}
}
