/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of experts. All CPU backends use this row function, so that near ties fall alike. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <stdlib.h>

#include "mem.h"
#include "ref.h"

static double softplus(double x)
{
	return x > 20 ? x : log1p(exp(x));
}

static void scores(float *s, const float *logits, int n, enum router_score kind)
{
	double max = -INFINITY, sum = 0;

	for (int e = 0; e < n && kind == SCORE_SOFTMAX; e++)
		max = logits[e] > max ? logits[e] : max;
	for (int e = 0; e < n && kind == SCORE_SOFTMAX; e++)
		sum += exp(logits[e] - max);
	for (int e = 0; e < n; e++) {
		double x = logits[e];

		s[e] = (float)(kind == SCORE_SOFTMAX ? exp(x - max) / sum :
			       kind == SCORE_SIGMOID ? 1 / (1 + exp(-x)) : sqrt(softplus(x)));
	}
}

/*
 * Index of the largest of v[0..n) that `taken` does not mark, ties to the lowest; NaN only where
 * nothing else is left.
 */
static int largest(const float *v, int n, const unsigned char *taken)
{
	int best = -1;

	for (int i = 0; i < n; i++)
		if (!taken[i] && (best < 0 || v[i] > v[best] || (isnan(v[best]) && !isnan(v[i]))))
			best = i;
	return best;
}

static float sum_of_two_best(const float *c, int n)
{
	float first = -INFINITY, second = -INFINITY;

	for (int i = 0; i < n; i++) {
		if (c[i] > first) {
			second = first;
			first = c[i];
		} else if (c[i] > second) {
			second = c[i];
		}
	}
	return n > 1 ? first + second : first;
}

static void drop_groups(float *c, const struct router *r)
{
	int size = r->experts / r->groups;
	float best[r->groups];
	unsigned char kept[r->groups];

	for (int g = 0; g < r->groups; g++) {
		best[g] = sum_of_two_best(c + g * size, size);
		kept[g] = 0;
	}
	for (int i = 0; i < r->groups_kept; i++)
		kept[largest(best, r->groups, kept)] = 1;
	for (int e = 0; e < size * r->groups; e++)
		if (!kept[e / size])
			c[e] = r->dropped;
}

/* Weights of the chosen, which already stand in ascending order; their sum runs in that order. */
static void weigh(float *weights, const int32_t *ids, const float *from, const struct router *r)
{
	double sum = 1e-20;

	for (int i = 0; i < r->k; i++)
		sum += from[ids[i]];
	for (int i = 0; i < r->k; i++)
		weights[i] =
			(float)((r->renormalise ? from[ids[i]] / sum : from[ids[i]]) * r->scale);
}

void ref_route_row(int32_t *ids, float *weights, const float *logits, const struct router *r,
		   float *work)
{
	float *s = work, *c = work + r->experts;
	unsigned char taken[r->experts];
	int n = 0;

	scores(s, logits, r->experts, r->score);
	for (int e = 0; e < r->experts; e++) {
		c[e] = r->bias ? s[e] + ref_vector(r->bias)[e] : s[e];
		taken[e] = 0;
	}
	if (r->groups > 1)
		drop_groups(c, r);
	for (int i = 0; i < r->k; i++)
		taken[largest(c, r->experts, taken)] = 1;
	for (int e = 0; e < r->experts; e++)
		if (taken[e])
			ids[n++] = e;
	weigh(weights, ids, r->weigh_choice ? c : s, r);
}

void ref_route(struct device *d, struct tensor ids, struct tensor weights, struct tensor logits,
	       const struct router *r)
{
	float *work;

	if (!ref_good(d))
		return;
	work = mem_calloc(2 * (size_t)r->experts, sizeof *work, &d->err);
	if (!work)
		return;
	for (int64_t t = 0; t < logits.rows; t++)
		ref_route_row(ref_at(ids, t, 0), ref_at(weights, t, 0), ref_at(logits, t, 0), r,
			      work);
	free(work);
}
