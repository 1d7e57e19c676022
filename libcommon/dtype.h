/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dtype: number formats of files and tensors, and exact conversion between the floating ones (round
 * to nearest, ties to even).
 */
#ifndef DSPARK_DTYPE_H
#define DSPARK_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum dtype {
	DT_NONE,
	DT_F32, DT_BF16, DT_F16, DT_F64,
	DT_I64, DT_I32, DT_I16, DT_I8, DT_U8, DT_BOOL,
	DT_F8_E4M3, DT_F8_E5M2, DT_F8_E8M0,
	DT_COUNT
};

const char *dtype_name(enum dtype d);			/* the safetensors spelling: "BF16" */
enum dtype dtype_from_name(const char *name);		/* DT_NONE if unknown */
size_t dtype_size(enum dtype d);			/* bytes per element */
bool dtype_is_float(enum dtype d);			/* F32, BF16, F16, F64 */

/*
 * Recipe spellings fp32|float32, bf16|bfloat16, fp16|float16 (and the reference's others) -> dtype;
 * DT_NONE if unknown.
 */
enum dtype dtype_from_recipe(const char *name);
const char *dtype_recipe_name(enum dtype d);	/* "fp32", "bf16", "fp16", as in manifests */

/*
 * n elements from `src` to `dst`, either any of F32, BF16, F16 (src also F64). NaN stays NaN
 * (quiet), overflow to infinity. dst and src must not overlap unless equal with equal element
 * sizes.
 */
void dtype_convert(void *dst, enum dtype to, const void *src, enum dtype from, size_t n);

static inline float dtype_bf16_to_f32(uint16_t h)
{
	uint32_t u = (uint32_t)h << 16;
	float f;

	memcpy(&f, &u, sizeof f);
	return f;
}

static inline uint16_t dtype_f32_to_bf16(float f)
{
	uint32_t u;

	memcpy(&u, &f, sizeof u);
	if ((u & 0x7fffffffu) > 0x7f800000u)
		return (uint16_t)(u >> 16 | 0x40);
	return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/*
 * 1 sign, 4 exponent, 3 mantissa bits, bias 7, subnormal down to 2^-9, no infinity; 0x7F and 0xFF
 * are NaN.
 */
static inline float dtype_f8_e4m3_to_f32(uint8_t c)
{
	uint32_t a = c & 0x7f, u = (a << 20) + (120u << 23);
	float f;

	if (a == 0x7f)
		u = 0x7fc00000u;
	memcpy(&f, &u, sizeof f);
	if (a < 8)
		f = (float)a * 0x1p-9f;
	return c & 0x80 ? -f : f;
}

/* 2^(c - 127); 255 is NaN. */
static inline float dtype_f8_e8m0_to_f32(uint8_t c)
{
	uint32_t u = c == 255 ? 0x7fc00000u : c ? (uint32_t)c << 23 : 0x400000u;
	float f;

	memcpy(&f, &u, sizeof f);
	return f;
}

float dtype_f16_to_f32(uint16_t h);
uint16_t dtype_f32_to_f16(float f);

#endif
