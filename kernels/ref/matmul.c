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

void ref_matmul(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		const struct weight *bias, bool add)
{
	const struct ref_weight *h = ref_of(w);
	size_t row = (size_t)w->cols * dtype_size(h->dtype);
	float *xr;	/* [K], a row of x as operand */

	if (!ref_good(d))
		return;
	xr = mem_calloc((size_t)w->cols, sizeof *xr, &d->err);
	if (!xr)
		return;
	for (int64_t t = 0; t < x.rows; t++) {
		for (int64_t c = 0; c < w->cols; c++)
			xr[c] = ref_round(ref_get(x, t, c), h->dtype);
		for (int64_t n = 0; n < w->rows; n++) {
			double sum = dot(xr, h->data + (size_t)n * row, h->dtype, w->cols);

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
	const struct ref_weight *h = ref_of(w);
	size_t row = (size_t)w->cols * dtype_size(h->dtype);
	int64_t I = w->rows / 2;
	float *xr;	/* [K], a row of x as operand */

	if (!ref_good(d))
		return;
	xr = mem_calloc((size_t)w->cols, sizeof *xr, &d->err);
	if (!xr)
		return;
	for (int64_t t = 0; t < x.rows; t++) {
		for (int64_t c = 0; c < w->cols; c++)
			xr[c] = ref_round(ref_get(x, t, c), h->dtype);
		for (int64_t n = 0; n < I; n++) {
			const char *gate = h->data + (size_t)n * row,
				   *up = h->data + (size_t)(I + n) * row;

			ref_set(out, t, n,
				ref_act(a, (float)dot(xr, gate, h->dtype, w->cols),
					(float)dot(xr, up, h->dtype, w->cols)));
		}
	}
	free(xr);
}
