/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of columns: layer norm, and copies from one place to another. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>

#include "ref.h"

static void norm_run(struct tensor out, struct tensor x, int64_t t, int64_t c0, const float *w,
		     const float *bias, float eps, int64_t width)
{
	double mean = 0, sum = 0, r;

	for (int64_t c = 0; c < width; c++)
		mean += ref_get(x, t, c0 + c);
	mean /= (double)width;
	for (int64_t c = 0; c < width; c++) {
		double v = ref_get(x, t, c0 + c) - mean;

		sum += v * v;
	}
	r = 1 / sqrt(sum / (double)width + eps);
	for (int64_t c = 0; c < width; c++)
		ref_set(out, t, c0 + c,
			(float)((ref_get(x, t, c0 + c) - mean) * r * w[c] + bias[c]));
}

void ref_layer_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		    const struct weight *bias, float eps, int64_t width)
{
	if (!ref_good(d))
		return;
	for (int64_t t = 0; t < x.rows; t++)
		for (int64_t c = 0; c + width <= x.cols; c += width)
			norm_run(out, x, t, c, ref_vector(w), ref_vector(bias), eps, width);
}

void ref_copy(struct device *d, struct tensor out, int64_t out_step, struct tensor x,
	      int64_t x_step, int64_t width, int n)
{
	if (!ref_good(d))
		return;
	for (int64_t t = 0; t < out.rows; t++)
		for (int i = 0; i < n; i++)
			dtype_convert(ref_at(out, t, i * out_step), out.dtype,
				      ref_at(x, t, i * x_step), x.dtype, (size_t)width);
}
