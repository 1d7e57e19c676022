/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products. Operands are rounded to the operand dtype; the sum, bias and addition are exact
 * to one F32 rounding.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>

#include "mem.h"
#include "ref.h"

static double dot(const float *x, const char *w, enum dtype d, int64_t n)
{
	double sum = 0;

	if (d == DT_BF16)
		for (int64_t i = 0; i < n; i++)
			sum += (double)x[i] * dtype_bf16_to_f32(((const uint16_t *)w)[i]);
	else
		for (int64_t i = 0; i < n; i++)
			sum += (double)x[i] * ((const float *)w)[i];
	return sum;
}

/* Row t of x as operands of w, [K]. */
static void load_row(float *xr, struct tensor x, int64_t t, const struct weight *w)
{
	for (int64_t c = 0; c < w->cols; c++)
		xr[c] = ref_round(ref_get(x, t, c), ref_of(w)->dtype);
}

/* xr has room to make a row of the weight behind it. */
static double times_row(float *xr, const struct weight *w, int64_t n)
{
	return dot(xr, ref_operands(w, 0, n, xr + w->cols), ref_of(w)->dtype, w->cols);
}

void ref_matmul(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		const struct weight *bias, bool add)
{
	float *xr = ref_good(d) ? mem_calloc((size_t)w->cols * 3, sizeof *xr, &d->err) : NULL;

	for (int64_t t = 0; t < x.rows && xr; t++) {
		load_row(xr, x, t, w);
		for (int64_t n = 0; n < w->rows; n++) {
			double sum = times_row(xr, w, n);

			if (bias)
				sum += ref_vector(bias)[n];
			if (add)
				sum += ref_get(out, t, n);
			ref_set(out, t, n, (float)sum);
		}
	}
	free(xr);
}

void ref_matmul_gate(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		     const struct act *a)
{
	float *xr = ref_good(d) ? mem_calloc((size_t)w->cols * 3, sizeof *xr, &d->err) : NULL;
	int64_t I = w->rows / 2;

	for (int64_t t = 0; t < x.rows && xr; t++) {
		load_row(xr, x, t, w);
		for (int64_t n = 0; n < I; n++)
			ref_set(out, t, n,
				ref_act(a, (float)times_row(xr, w, n),
					(float)times_row(xr, w, I + n)));
	}
	free(xr);
}
