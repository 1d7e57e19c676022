/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over keys that were chosen, as attention.c does it over all. */
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
	int64_t token;      /* of q and out */
	int64_t first;      /* row of k and v that is position 0 */
	const int32_t *key; /* [n] */
	int64_t n;
	double *p; /* [n] */
};

int64_t ref_keys_of(struct tensor keys, int64_t t, const struct piece *p, struct err *e)
{
	const int32_t *key = ref_at(keys, t, 0);
	int64_t n = 0;

	for (; n < keys.cols && key[n] >= 0; n++)
		if (key[n] >= p->kv_count || (n && key[n] <= key[n - 1])) {
			err_refuse(e, "key %d of a row of %lld is out of its place", key[n],
				   (long long)p->kv_count);
			return -1;
		}
	return n;
}

static double score(const struct query *s, int64_t j)
{
	int64_t w = s->a->width, kv = s->head / (s->a->heads / s->a->kv_heads);
	double sum = 0;

	for (int64_t c = 0; c < w; c++)
		sum += (double)ref_round(ref_get(s->q, s->token, s->head * w + c), s->compute) *
		       ref_round(ref_get(s->k, s->first + s->key[j], kv * w + c), s->compute);
	return sum * s->a->scale;
}

static void softmax(const struct query *s)
{
	for (int64_t j = 0; j < s->n; j++)
		s->p[j] = score(s, j);
	ref_softmax(s->p, s->n, s->a->sink ? &ref_vector(s->a->sink)[s->head] : NULL);
}

static void one_head(const struct query *s, struct tensor out)
{
	int64_t w = s->a->value_width, kv = s->head / (s->a->heads / s->a->kv_heads);

	softmax(s);
	for (int64_t c = 0; c < w; c++) {
		double sum = 0;

		for (int64_t j = 0; j < s->n; j++)
			sum += s->p[j] * ref_round(ref_get(s->v, s->first + s->key[j], kv * w + c),
						   s->compute);
		ref_set(out, s->token, s->head * w + c, (float)sum);
	}
}

void ref_attention_at(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		      struct tensor v, struct tensor keys, const struct attention *a,
		      const struct piece *pieces, int n)
{
	struct query s = { .q = q, .k = k, .v = v, .a = a, .compute = d->compute };

	if (ref_good(d))
		s.p = mem_calloc((size_t)keys.cols + 1, sizeof *s.p, &d->err);
	for (const struct piece *p = pieces; p < pieces + n; p++)
		for (int64_t i = 0; i < p->count && ref_good(d); i++) {
			s.token = p->begin + i;
			s.first = p->kv_begin;
			s.key = ref_at(keys, s.token, 0);
			s.n = ref_keys_of(keys, s.token, p, &d->err);
			for (s.head = 0; s.head < a->heads && s.n >= 0; s.head++)
				one_head(&s, out);
		}
	free(s.p);
}
