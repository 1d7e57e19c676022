/* SPDX-License-Identifier: Apache-2.0 */
/*
 * number: runs of numbers as the compiler vectorises them. No function here looks at an address or
 * a neighbour: element i of the result depends on element i of the operands, and sums run in 16
 * fixed lanes counted from the start of the run.
 */
#ifndef DSPARK_NUMBER_H
#define DSPARK_NUMBER_H

#include <stdint.h>
#include <string.h>

#include "backend.h"

#define LANES 16

static inline float float_from_bits(uint32_t u)
{
	float f;

	memcpy(&f, &u, sizeof f);
	return f;
}

static inline uint32_t bits_from_float(float f)
{
	uint32_t u;

	memcpy(&u, &f, sizeof u);
	return u;
}

static inline void run_load(float *dst, const void *src, enum dtype d, int64_t n)
{
	const uint16_t *h = src;

	if (d == DT_F32)
		memcpy(dst, src, (size_t)n * sizeof *dst);
	else if (d == DT_BF16)
		for (int64_t i = 0; i < n; i++)
			dst[i] = dtype_bf16_to_f32(h[i]);
	else
		dtype_convert(dst, DT_F32, src, d, (size_t)n);
}

static inline void run_save(void *dst, enum dtype d, const float *src, int64_t n)
{
	uint16_t *h = dst;

	if (d == DT_F32)
		memcpy(dst, src, (size_t)n * sizeof *src);
	else if (d == DT_BF16)
		for (int64_t i = 0; i < n; i++)
			h[i] = dtype_f32_to_bf16(src[i]);
	else
		dtype_convert(dst, d, src, DT_F32, (size_t)n);
}

static inline void run_round(float *x, enum dtype d, int64_t n)
{
	for (int64_t i = 0; i < n && d == DT_BF16; i++)
		x[i] = dtype_bf16_to_f32(dtype_f32_to_bf16(x[i]));
}

static inline float lanes_sum(const float lane[LANES])
{
	float s[LANES];

	memcpy(s, lane, sizeof s);
	for (int step = LANES / 2; step; step /= 2)
		for (int i = 0; i < step; i++)
			s[i] += s[i + step];
	return s[0];
}

/*
 * e^x within 2 ulp between -80 and 80, limited there; NaN stays. 2^n times a polynomial on [-ln2/2,
 * ln2/2]. Limits nearer to those of the format would make subnormal numbers in what callers do
 * next, which cost a hundred cycles each.
 */
static inline float exp_limited(float x)
{
	const float magic = 12582912.0f;	/* 1.5 * 2^23: adding it rounds to an integer */
	float n, r, p;
	uint32_t power;

	x = x < -80.0f ? -80.0f : x;
	x = x > 80.0f ? 80.0f : x;
	n = x * 1.44269504f + magic;
	power = (bits_from_float(n) << 23) + 0x3f800000u;
	n -= magic;
	r = x - n * 0.693359375f + n * 2.12194440e-4f;
	p = 1.9875691500e-4f;
	p = p * r + 1.3981999507e-3f;
	p = p * r + 8.3334519073e-3f;
	p = p * r + 4.1665795894e-2f;
	p = p * r + 1.6666665459e-1f;
	p = p * r + 5.0000001201e-1f;
	return (p * r * r + r + 1.0f) * float_from_bits(power);
}

/* e^x for softmax, where what is far below the largest is nothing. */
static inline float exp_or_zero(float x)
{
	float y = exp_limited(x);

	return x < -80.0f ? 0.0f : y;
}

static inline float sigmoid_of(float x)
{
	return 1.0f / (1.0f + exp_limited(-x));
}

/* Near 0 a polynomial, since 1 - 2/(e^2x + 1) would lose the small digits. */
static inline float tanh_of(float x)
{
	float z = x * x, p = -5.70498872745e-3f, far = 1.0f - 2.0f / (exp_limited(2.0f * x) + 1.0f);

	p = p * z + 2.06390887954e-2f;
	p = p * z - 5.37397155531e-2f;
	p = p * z + 1.33314422036e-1f;
	p = p * z - 3.33332819422e-1f;
	return z < 0.390625f ? x + x * z * p : far;
}

#endif
