/* SPDX-License-Identifier: Apache-2.0 */
/* Token-wise arithmetic: gated activations and addition. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>

#include "ref.h"

static double sigmoid(double x)
{
	return 1 / (1 + exp(-x));
}

/* NaN passes through both, which fmin and fmax would not let it. */
static double at_most(double x, double limit)
{
	return x > limit ? limit : x;
}

static double at_least(double x, double limit)
{
	return x < limit ? limit : x;
}

static double gelu_tanh(double g)
{
	/* sqrt(2 / pi) */
	return 0.5 * g * (1 + tanh(0.79788456080286535588 * (g + 0.044715 * g * g * g)));
}

float ref_act(const struct act *a, float gate, float up)
{
	double g = gate, u = up, beta = a->beta, linear = a->linear, limit = a->limit;

	switch (a->kind) {
	case ACT_SILU:
		return (float)(g * sigmoid(g) * u);
	case ACT_SILU_CLAMP:
		g = at_most(g, limit);
		return (float)(g * sigmoid(g) * at_least(at_most(u, limit), -limit));
	case ACT_GELU_TANH:
		return (float)(gelu_tanh(g) * u);
	case ACT_SITU:
		break;
	}
	return (float)(beta * tanh(g / beta) * sigmoid(g) *
		       (linear != 0 ? linear * tanh(u / linear) : u));
}

void ref_gate(struct device *d, struct tensor out, struct tensor x, const struct act *a)
{
	int64_t half = x.cols / 2;

	if (!ref_good(d))
		return;
	for (int64_t t = 0; t < x.rows; t++)
		for (int64_t c = 0; c < half; c++)
			ref_set(out, t, c, ref_act(a, ref_get(x, t, c), ref_get(x, t, half + c)));
}

void ref_add(struct device *d, struct tensor x, struct tensor y)
{
	if (!ref_good(d))
		return;
	for (int64_t t = 0; t < x.rows; t++)
		for (int64_t c = 0; c < x.cols; c++)
			ref_set(x, t, c, ref_get(x, t, c) + ref_get(y, t, c));
}
