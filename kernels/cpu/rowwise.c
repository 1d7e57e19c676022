/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Verbs that work row by row: threads share out rows, each row is done in runs of RUN numbers
 * counted from its start.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <omp.h>
#include <string.h>

#include "cpu.h"
#include "number.h"

#define RUN 512

static inline int64_t run_at(int64_t c, int64_t n)
{
	return n - c < RUN ? n - c : RUN;
}

void cpu_upload(struct device *d, struct tensor out, const void *src)
{
	size_t row = (size_t)out.cols * dtype_size(out.dtype);

	if (!ref_good(d))
		return;
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < out.rows; t++)
		memcpy(ref_at(out, t, 0), (const char *)src + (size_t)t * row, row);
}

static void convert(void *dst, enum dtype to, const void *src, enum dtype from, int64_t n)
{
	if (to == from)
		memcpy(dst, src, (size_t)n * dtype_size(to));
	else if (to == DT_F32)
		run_load(dst, src, from, n);
	else if (from == DT_F32)
		run_save(dst, to, src, n);
	else
		dtype_convert(dst, to, src, from, (size_t)n);
}

void cpu_store(struct device *d, void *dst, enum dtype to, int64_t dst_ld, struct tensor x)
{
	if (!ref_good(d))
		return;
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < x.rows; t++)
		convert((char *)dst + (size_t)(t * dst_ld) * dtype_size(to), to, ref_at(x, t, 0),
			x.dtype, x.cols);
}

/* Each row is a call of ref's verb, which is a copy; threads share the rows out. */
void cpu_rows(struct device *d, struct tensor out, const struct weight *table, struct tensor ids)
{
	if (!ref_good(d))
		return;
#pragma omp parallel num_threads(d->threads)
	{
		struct device mine = *d;

#pragma omp for schedule(static)
		for (int64_t t = 0; t < out.rows; t++)
			ref_rows(&mine, tensor_rows(out, t, 1), table, tensor_rows(ids, t, 1));
		if (mine.err.code)
			cpu_fail(d, &mine.err);
	}
}

static float sum_of_squares(const char *x, enum dtype d, int64_t width)
{
	float lane[LANES] = { 0 }, x32[RUN];

	for (int64_t c = 0; c < width; c += RUN) {
		int64_t n = run_at(c, width), whole = n / LANES * LANES;

		run_load(x32, x + (size_t)c * dtype_size(d), d, n);
		for (int64_t i = 0; i < whole; i += LANES)
			for (int l = 0; l < LANES; l++)
				lane[l] += x32[i + l] * x32[i + l];
		for (int64_t i = whole; i < n; i++)
			lane[i - whole] += x32[i] * x32[i];
	}
	return lanes_sum(lane);
}

static void norm_one(struct tensor out, struct tensor x, int64_t t, int64_t c0, const float *w,
		     float eps, int64_t width)
{
	const char *from = ref_at(x, t, c0);
	char *to = ref_at(out, t, c0);
	float r = 1.0f / sqrtf(sum_of_squares(from, x.dtype, width) / (float)width + eps), x32[RUN];

	for (int64_t c = 0; c < width; c += RUN) {
		int64_t n = run_at(c, width);

		run_load(x32, from + (size_t)c * dtype_size(x.dtype), x.dtype, n);
		for (int64_t i = 0; i < n; i++)
			x32[i] *= r;
		for (int64_t i = 0; w && i < n; i++)
			x32[i] *= w[c + i];
		run_save(to + (size_t)c * dtype_size(out.dtype), out.dtype, x32, n);
	}
}

void cpu_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
	      float eps, int64_t width)
{
	const float *v = w ? ref_vector(w) : NULL;

	if (!ref_good(d))
		return;
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < x.rows; t++)
		for (int64_t c = 0; c + width <= x.cols; c += width)
			norm_one(out, x, t, c, v, eps, width);
}

/* One head of one token, half split: pairs lie half apart. */
static void rotate_half(struct tensor x, int64_t t, int64_t c0, int64_t half, const float *cosine,
			const float *sine)
{
	float a[RUN], b[RUN], ra[RUN], rb[RUN];

	for (int64_t c = 0; c < half; c += RUN) {
		int64_t n = run_at(c, half);

		run_load(a, ref_at(x, t, c0 + c), x.dtype, n);
		run_load(b, ref_at(x, t, c0 + half + c), x.dtype, n);
		for (int64_t i = 0; i < n; i++) {
			ra[i] = a[i] * cosine[c + i] - b[i] * sine[c + i];
			rb[i] = b[i] * cosine[c + i] + a[i] * sine[c + i];
		}
		run_save(ref_at(x, t, c0 + c), x.dtype, ra, n);
		run_save(ref_at(x, t, c0 + half + c), x.dtype, rb, n);
	}
}

static void rotate_pairs(struct tensor x, int64_t t, int64_t c0, int64_t half, const float *cosine,
			 const float *sine)
{
	float a[RUN];

	for (int64_t c = 0; c < half; c += RUN / 2) {
		int64_t n = half - c < RUN / 2 ? half - c : RUN / 2;

		run_load(a, ref_at(x, t, c0 + 2 * c), x.dtype, 2 * n);
		for (int64_t i = 0; i < n; i++) {
			float u = a[2 * i], v = a[2 * i + 1];

			a[2 * i] = u * cosine[c + i] - v * sine[c + i];
			a[2 * i + 1] = v * cosine[c + i] + u * sine[c + i];
		}
		run_save(ref_at(x, t, c0 + 2 * c), x.dtype, a, 2 * n);
	}
}

void cpu_rope(struct device *d, struct tensor x, int heads, const struct rope *r, struct tensor pos)
{
	int64_t head = x.cols / heads, half = r->width / 2;
	const float *freq = ref_vector(r->freq);

	if (!ref_good(d) || !cpu_own(d, 2 * (size_t)half * sizeof(float)))
		return;
#pragma omp parallel num_threads(d->threads)
	{
		float *cosine = (float *)cpu_of(d)->own[omp_get_thread_num()].p,
		      *sine = cosine + half;

#pragma omp for schedule(static)
		for (int64_t t = 0; t < x.rows; t++) {
			float position = (float)ref_id(pos, t, 0);

			for (int64_t j = 0; j < half; j++) {
				float angle = position * freq[j];

				cosine[j] = cosf(angle) * r->scale;
				sine[j] = sinf(r->inverse ? -angle : angle) * r->scale;
			}
			for (int64_t h = 0; h < heads; h++)
				if (r->layout == ROPE_HALF)
					rotate_half(x, t, h * head + r->offset, half, cosine, sine);
				else
					rotate_pairs(x, t, h * head + r->offset, half, cosine,
						     sine);
		}
	}
}

/* a[i] = act(g[i], u[i]); NaN passes the limits, as in ref. */
static void act_run(float *a, const float *g, const float *u, const struct act *act, int64_t n)
{
	float limit = act->limit, beta = act->beta, linear = act->linear;

	switch (act->kind) {
	case ACT_SILU:
		for (int64_t i = 0; i < n; i++)
			a[i] = g[i] * sigmoid_of(g[i]) * u[i];
		break;
	case ACT_SILU_CLAMP:
		for (int64_t i = 0; i < n; i++) {
			float gi = g[i] > limit ? limit : g[i], ui = u[i] > limit ? limit : u[i];

			ui = ui < -limit ? -limit : ui;
			a[i] = gi * sigmoid_of(gi) * ui;
		}
		break;
	case ACT_GELU_TANH:
		for (int64_t i = 0; i < n; i++)
			a[i] = 0.5f * g[i] *
			       (1.0f +
				tanh_of(0.797884561f * (g[i] + 0.044715f * g[i] * g[i] * g[i]))) *
			       u[i];
		break;
	case ACT_SITU:
		for (int64_t i = 0; i < n; i++)
			a[i] = beta * tanh_of(g[i] / beta) * sigmoid_of(g[i]) *
			       (linear != 0 ? linear * tanh_of(u[i] / linear) : u[i]);
	}
}

void cpu_act_row(float *a, const void *g, const void *u, enum dtype d, const struct act *act,
		 int64_t n)
{
	float g32[RUN], u32[RUN];

	for (int64_t c = 0; c < n; c += RUN) {
		int64_t m = run_at(c, n);

		run_load(g32, (const char *)g + (size_t)c * dtype_size(d), d, m);
		run_load(u32, (const char *)u + (size_t)c * dtype_size(d), d, m);
		act_run(a + c, g32, u32, act, m);
	}
}

void cpu_gate(struct device *d, struct tensor out, struct tensor x, const struct act *a)
{
	int64_t half = x.cols / 2;

	if (!ref_good(d))
		return;
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < x.rows; t++) {
		float a32[RUN];

		for (int64_t c = 0; c < half; c += RUN) {
			cpu_act_row(a32, ref_at(x, t, c), ref_at(x, t, half + c), x.dtype, a,
				    run_at(c, half));
			run_save(ref_at(out, t, c), out.dtype, a32, run_at(c, half));
		}
	}
}

void cpu_add(struct device *d, struct tensor x, struct tensor y)
{
	if (!ref_good(d))
		return;
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < x.rows; t++) {
		float x32[RUN], y32[RUN];

		for (int64_t c = 0; c < x.cols; c += RUN) {
			int64_t n = run_at(c, x.cols);

			run_load(x32, ref_at(x, t, c), x.dtype, n);
			run_load(y32, ref_at(y, t, c), y.dtype, n);
			for (int64_t i = 0; i < n; i++)
				x32[i] += y32[i];
			run_save(ref_at(x, t, c), x.dtype, x32, n);
		}
	}
}

void cpu_route(struct device *d, struct tensor ids, struct tensor weights, struct tensor logits,
	       const struct router *r)
{
	if (!ref_good(d) || !cpu_own(d, 2 * (size_t)r->experts * sizeof(float)))
		return;
#pragma omp parallel num_threads(d->threads)
	{
		float *work = (float *)cpu_of(d)->own[omp_get_thread_num()].p;

#pragma omp for schedule(static)
		for (int64_t t = 0; t < logits.rows; t++)
			ref_route_row(ref_at(ids, t, 0), ref_at(weights, t, 0),
				      ref_at(logits, t, 0), r, work);
	}
}
