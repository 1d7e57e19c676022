/* SPDX-License-Identifier: Apache-2.0 */
/* Layer norm and copies of columns; threads share out the rows. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <omp.h>
#include <string.h>

#include "cpu.h"
#include "number.h"

static float sum_of(const float *x, int64_t n)
{
	vec sum = { 0 }, v;
	float rest[LANES] = { 0 };
	int64_t c = 0;

	for (; c + LANES <= n; c += LANES) {
		vec_load(v, x + c);
		sum += v;
	}
	memcpy(rest, x + c, (size_t)(n - c) * sizeof *x);
	vec_load(v, rest);
	sum += v;
	return vec_sum(&sum);
}

static float squares_of(const float *x, int64_t n)
{
	vec sum = { 0 }, v;
	float rest[LANES] = { 0 };
	int64_t c = 0;

	for (; c + LANES <= n; c += LANES) {
		vec_load(v, x + c);
		sum += v * v;
	}
	memcpy(rest, x + c, (size_t)(n - c) * sizeof *x);
	vec_load(v, rest);
	sum += v * v;
	return vec_sum(&sum);
}

/* The mean goes first: what is left of a large one would be lost in the sum of squares. */
static void norm_run(struct tensor out, struct tensor x, int64_t t, int64_t c0, const float *w,
		     const float *bias, float eps, int64_t width, float *work)
{
	float mean, r;

	run_load(work, ref_at(x, t, c0), x.dtype, width);
	mean = sum_of(work, width) / (float)width;
	for (int64_t c = 0; c < width; c++)
		work[c] -= mean;
	r = 1.0f / sqrtf(squares_of(work, width) / (float)width + eps);
	for (int64_t c = 0; c < width; c++)
		work[c] = work[c] * r * w[c] + bias[c];
	run_save(ref_at(out, t, c0), out.dtype, work, width);
}

void cpu_layer_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		    const struct weight *bias, float eps, int64_t width)
{
	if (!ref_good(d) || !x.rows || !cpu_own(d, (size_t)width * sizeof(float)))
		return;
#pragma omp parallel num_threads(d->threads)
	{
		float *work = (float *)cpu_of(d)->own[omp_get_thread_num()].p;

#pragma omp for schedule(static)
		for (int64_t t = 0; t < x.rows; t++)
			for (int64_t c = 0; c + width <= x.cols; c += width)
				norm_run(out, x, t, c, ref_vector(w), ref_vector(bias), eps, width,
					 work);
	}
}

void cpu_copy(struct device *d, struct tensor out, int64_t out_step, struct tensor x,
	      int64_t x_step, int64_t width, int n)
{
	if (!ref_good(d))
		return;
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < out.rows; t++)
		for (int i = 0; i < n; i++)
			run_convert(ref_at(out, t, i * out_step), out.dtype,
				    ref_at(x, t, i * x_step),
				 x.dtype, width);
}
