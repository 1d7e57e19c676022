/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The choice of keys. ref looks at all scores of a query at once; what it takes is fixed by their
 * order and by that of the positions, so that other backends may go over the keys as they like.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <stdlib.h>

#include "mem.h"
#include "ref.h"

struct scored {
	float score;
	int32_t key;
};

static int better_first(const void *a, const void *b)
{
	const struct scored *x = a, *y = b;

	if (x->score != y->score)
		return x->score > y->score ? -1 : 1;
	return x->key < y->key ? -1 : x->key > y->key;
}

static int lower_first(const void *a, const void *b)
{
	int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;

	return x < y ? -1 : x > y;
}

static float score(const struct device *d, struct tensor q, struct tensor k, struct tensor w,
		   int64_t t, int64_t key)
{
	double sum = 0;

	for (int64_t h = 0; h < w.cols; h++) {
		double dot = 0;

		for (int64_t c = 0; c < k.cols; c++)
			dot += (double)ref_round(ref_get(q, t, h * k.cols + c), d->compute) *
			       ref_round(ref_get(k, key, c), d->compute);
		sum += ref_get(w, t, h) * (dot > 0 ? dot : 0);
	}
	return isnan(sum) ? -INFINITY : (float)sum;
}

/* Of n scored keys. */
static void take(struct tensor keys, int64_t t, struct scored *s, int64_t n)
{
	int32_t *to = ref_at(keys, t, 0);
	int64_t taken = n < keys.cols ? n : keys.cols;

	qsort(s, (size_t)n, sizeof *s, better_first);
	for (int64_t i = 0; i < keys.cols; i++)
		to[i] = i < taken ? s[i].key : -1;
	qsort(to, (size_t)taken, sizeof *to, lower_first);
}

void ref_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
		struct tensor w, const struct piece *pieces, int n)
{
	for (const struct piece *p = pieces; p < pieces + n && ref_good(d); p++) {
		struct scored *s = mem_calloc((size_t)p->kv_count + 1, sizeof *s, &d->err);

		for (int64_t i = 0; i < p->count && s; i++) {
			int64_t end = p->first + i + 1 < p->kv_count ? p->first + i + 1
								     : p->kv_count;

			for (int64_t j = 0; j < end; j++)
				s[j] = (struct scored){ score(d, q, k, w, p->begin + i,
							      p->kv_begin + j),
							(int32_t)j };
			take(keys, p->begin + i, s, end);
		}
		free(s);
	}
}
