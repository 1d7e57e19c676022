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

void cpu_store(struct device *d, void *dst, enum dtype to, int64_t dst_ld, struct tensor x)
{
	if (!ref_good(d))
		return;
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < x.rows; t++)
		run_convert((char *)dst + (size_t)(t * dst_ld) * dtype_size(to), to,
			    ref_at(x, t, 0),
			x.dtype, x.cols);
}

/*
 * Each row is a call of ref's verb, which is a copy; threads share the rows out. A reader is asked
 * by this thread alone, in blocks.
 */
void cpu_rows(struct device *d, struct tensor out, const struct weight *table, struct tensor ids)
{
	if (!ref_good(d))
		return;
	if (table->reader) {
		ref_rows(d, out, table, ids);
		return;
	}
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

void cpu_pick(struct device *d, struct tensor out, struct tensor x, struct tensor index)
{
	if (!ref_good(d))
		return;
#pragma omp parallel num_threads(d->threads)
	{
		struct device mine = *d;

#pragma omp for schedule(static)
		for (int64_t i = 0; i < out.rows; i++)
			ref_pick(&mine, tensor_rows(out, i, 1), x, tensor_rows(index, i, 1));
		if (mine.err.code)
			cpu_fail(d, &mine.err);
	}
}

#define NORM_RUN 4096 /* numbers of a row that are loaded once for both passes */

/* Sums in 4 x LANES lanes. */
static void add_squares(vec sum[4], const float *x, int64_t n)
{
	float rest[4 * LANES] = { 0 };
	int64_t c = 0;

	for (; c + 4 * LANES <= n; c += 4 * LANES)
		for (int i = 0; i < 4; i++) {
			vec v;

			vec_load(v, x + c + i * LANES);
			sum[i] += v * v;
		}
	if (c == n)
		return;
	memcpy(rest, x + c, (size_t)(n - c) * sizeof *x);
	for (int i = 0; i < 4; i++) {
		vec v;

		vec_load(v, rest + i * LANES);
		sum[i] += v * v;
	}
}

static float norm_factor(vec sum[4], int64_t n, float eps)
{
	sum[0] += sum[1];
	sum[2] += sum[3];
	sum[0] += sum[2];
	return 1.0f / sqrtf(vec_sum(&sum[0]) / (float)n + eps);
}

static void norm_run(char *to, enum dtype d, float *x, const float *w, float r, int64_t n)
{
	for (int64_t i = 0; i < n; i++)
		x[i] *= r;
	for (int64_t i = 0; w && i < n; i++)
		x[i] *= w[i];
	run_save(to, d, x, n);
}

static void norm_one(struct tensor out, struct tensor x, int64_t t, int64_t c0, const float *w,
		     float eps, int64_t width)
{
	const char *from = ref_at(x, t, c0);
	char *to = ref_at(out, t, c0);
	size_t in = dtype_size(x.dtype), size = dtype_size(out.dtype);
	float x32[NORM_RUN], r;
	vec sum[4] = { { 0 } };

	for (int64_t c = 0; c < width; c += NORM_RUN) {
		int64_t n = width - c < NORM_RUN ? width - c : NORM_RUN;

		run_load(x32, from + (size_t)c * in, x.dtype, n);
		add_squares(sum, x32, n);
	}
	r = norm_factor(sum, width, eps);
	if (width <= NORM_RUN) {
		norm_run(to, out.dtype, x32, w, r, width);
		return;
	}
	for (int64_t c = 0; c < width; c += NORM_RUN) {
		int64_t n = width - c < NORM_RUN ? width - c : NORM_RUN;

		run_load(x32, from + (size_t)c * in, x.dtype, n);
		norm_run(to + (size_t)c * size, out.dtype, x32, w ? w + c : NULL, r, n);
	}
}

void cpu_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
	      float eps, int64_t width)
{
	const float *v = w && x.rows ? ref_vector(w) : NULL;

	if (!ref_good(d))
		return;
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < x.rows; t++)
		for (int64_t c = 0; c + width <= x.cols; c += width)
			norm_one(out, x, t, c, v, eps, width);
}

/* Pairs lie half apart. */
static void rotate_half(float *restrict x, int64_t half, const float *restrict cosine,
			const float *restrict sine)
{
	float *restrict y = x + half;

	for (int64_t i = 0; i < half; i++) {
		float a = x[i], b = y[i];

		x[i] = a * cosine[i] - b * sine[i];
		y[i] = b * cosine[i] + a * sine[i];
	}
}

static void rotate_pairs(float *restrict x, int64_t half, const float *restrict cosine,
			 const float *restrict sine)
{
	for (int64_t i = 0; i < half; i++) {
		float a = x[2 * i], b = x[2 * i + 1];

		x[2 * i] = a * cosine[i] - b * sine[i];
		x[2 * i + 1] = b * cosine[i] + a * sine[i];
	}
}

/*
 * Cosine and sine of x, |x| <= FAR, rounded from double: reduced by multiples of pi/2 in two parts,
 * of which the first has 33 bits, so that its products are exact; then Taylor's series.
 */
#define FAR 1.0e6f

static inline void cosine_sine(double x, float *cosine, float *sine)
{
	const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer */
	double n = x * 0.63661977236758134308 + magic, r, z, s, c;
	int64_t quarter;

	memcpy(&quarter, &n, sizeof quarter);
	n -= magic;
	r = x - n * 1.57079632673412561417e+00 - n * 6.07710050650619224932e-11;
	z = r * r;
	s = r +
	    r * z *
		    (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 +
						      z * (1.0 / 362880 - z * (1.0 / 39916800)))));
	c = 1 + z * (-0.5 +
		     z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 - z * (1.0 / 3628800)))));
	*sine = (float)(quarter & 1 ? c : s);
	*cosine = (float)(quarter & 1 ? s : c);
	*sine = quarter & 2 ? -*sine : *sine;
	*cosine = (quarter + 1) & 2 ? -*cosine : *cosine;
}

/* Of all angles position * freq[j], times the scale. */
static void angles(float *cosine, float *sine, const struct rope *r, float position)
{
	const float *freq = ref_vector(r->freq);
	int64_t half = r->width / 2;
	float sign = r->inverse ? -r->scale : r->scale, most = 0;

	for (int64_t j = 0; j < half; j++)
		most = fabsf(freq[j]) > most ? fabsf(freq[j]) : most;
	if (position * most <= FAR) {
		for (int64_t j = 0; j < half; j++)
			cosine_sine(position * freq[j], &cosine[j], &sine[j]);
	} else {
		for (int64_t j = 0; j < half; j++) {
			cosine[j] = cosf(position * freq[j]);
			sine[j] = sinf(position * freq[j]);
		}
	}
	for (int64_t j = 0; j < half; j++) {
		cosine[j] *= r->scale;
		sine[j] *= sign;
	}
}

/* A head's numbers times 1 / their root mean square times w. */
static void norm_head(float *restrict x, const float *restrict w, float eps, int64_t n)
{
	vec sum[4] = { { 0 } };
	float r;

	add_squares(sum, x, n);
	r = norm_factor(sum, n, eps);
	for (int64_t i = 0; i < n; i++)
		x[i] = x[i] * r * w[i];
}

/* Without a norm the channels that are not rotated stay as they are. */
static void rope_head(struct tensor x, int64_t t, int64_t c0, int64_t head, const float *norm,
		      float eps, const struct rope *r, const float *cosine, const float *sine,
		      float *work)
{
	int64_t first = norm ? 0 : r->offset, n = norm ? head : r->width;
	void *p = ref_at(x, t, c0 + first);
	float *turned = work + r->offset - first;

	run_load(work, p, x.dtype, n);
	if (norm)
		norm_head(work, norm, eps, n);
	if (r->layout == ROPE_HALF)
		rotate_half(turned, r->width / 2, cosine, sine);
	else
		rotate_pairs(turned, r->width / 2, cosine, sine);
	run_save(p, x.dtype, work, n);
}

void cpu_rope(struct device *d, struct tensor x, int heads, const struct weight *norm, float eps,
	      const struct rope *r, struct tensor pos)
{
	int64_t head = x.cols / heads, half = r->width / 2;
	const float *w = norm && x.rows ? ref_vector(norm) : NULL;

	if (!ref_good(d) || !cpu_own(d, (size_t)(2 * half + head) * sizeof(float)))
		return;
#pragma omp parallel num_threads(d->threads)
	{
		float *cosine = (float *)cpu_of(d)->own[omp_get_thread_num()].p,
		      *sine = cosine + half;

#pragma omp for schedule(static)
		for (int64_t t = 0; t < x.rows; t++) {
			angles(cosine, sine, r, (float)ref_id(pos, t, 0));
			for (int64_t c0 = 0; c0 < x.cols; c0 += head)
				rope_head(x, t, c0, head, w, eps, r, cosine, sine, sine + half);
		}
	}
}

/* NaN passes the limits, as in ref. */
void cpu_act_row(float *restrict a, const float *restrict g, const float *restrict u,
		 const struct act *act, int64_t n)
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

void cpu_gate(struct device *d, struct tensor out, struct tensor x, const struct act *a)
{
	int64_t half = x.cols / 2;

	if (!ref_good(d))
		return;
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < x.rows; t++) {
		float a32[RUN], g[RUN], u[RUN];

		for (int64_t c = 0; c < half; c += RUN) {
			int64_t n = run_at(c, half);

			run_load(g, ref_at(x, t, c), x.dtype, n);
			run_load(u, ref_at(x, t, half + c), x.dtype, n);
			cpu_act_row(a32, g, u, a, n);
			run_save(ref_at(out, t, c), out.dtype, a32, n);
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
