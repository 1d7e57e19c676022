/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dtype: names, sizes and conversions. Choices between results are masks, not branches: a compiler
 * that keeps the order of floating-point traps does not vectorise an addition under a condition.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <strings.h>

#include "dtype.h"

#if defined __GNUC__ && !defined __clang__
#pragma GCC optimize("O3")	/* at -O2 gcc vectorises only loops of known length */
#endif

static const struct {
	const char *name;
	size_t size;
} types[DT_COUNT] = {
	[DT_NONE] = { "none", 0 },
	[DT_F32] = { "F32", 4 },
	[DT_BF16] = { "BF16", 2 },
	[DT_F16] = { "F16", 2 },
	[DT_F64] = { "F64", 8 },
	[DT_I64] = { "I64", 8 },
	[DT_I32] = { "I32", 4 },
	[DT_I16] = { "I16", 2 },
	[DT_I8] = { "I8", 1 },
	[DT_U8] = { "U8", 1 },
	[DT_BOOL] = { "BOOL", 1 },
	[DT_F8_E4M3] = { "F8_E4M3", 1 },
	[DT_F8_E5M2] = { "F8_E5M2", 1 },
	[DT_F8_E8M0] = { "F8_E8M0", 1 },
};

const char *dtype_name(enum dtype d)
{
	return types[d].name;
}

enum dtype dtype_from_name(const char *name)
{
	int d;

	for (d = DT_NONE + 1; d < DT_COUNT; d++)
		if (!strcmp(types[d].name, name))
			return (enum dtype)d;
	return DT_NONE;
}

size_t dtype_size(enum dtype d)
{
	return types[d].size;
}

bool dtype_is_float(enum dtype d)
{
	return d == DT_F32 || d == DT_BF16 || d == DT_F16 || d == DT_F64;
}

enum dtype dtype_from_recipe(const char *name)
{
	static const struct {
		const char *name;
		enum dtype dtype;
	} known[] = {
		{ "fp32", DT_F32 }, { "float32", DT_F32 }, { "float", DT_F32 },
		{ "bf16", DT_BF16 }, { "bfloat16", DT_BF16 },
		{ "fp16", DT_F16 }, { "float16", DT_F16 }, { "half", DT_F16 },
		{ "fp64", DT_F64 }, { "float64", DT_F64 }, { "double", DT_F64 },
	};
	size_t i;

	if (!strncasecmp(name, "torch.", 6))
		name += 6;
	for (i = 0; i < sizeof known / sizeof known[0]; i++)
		if (!strcasecmp(known[i].name, name))
			return known[i].dtype;
	return DT_NONE;
}

const char *dtype_recipe_name(enum dtype d)
{
	switch (d) {
	case DT_F32:
		return "fp32";
	case DT_BF16:
		return "bf16";
	case DT_F16:
		return "fp16";
	case DT_F64:
		return "fp64";
	default:
		return types[d].name;
	}
}

static inline uint32_t bits_of(float f)
{
	uint32_t u;

	memcpy(&u, &f, sizeof u);
	return u;
}

static inline float float_of(uint32_t u)
{
	float f;

	memcpy(&f, &u, sizeof f);
	return f;
}

static inline uint32_t choose(uint32_t condition, uint32_t yes, uint32_t no)
{
	uint32_t mask = 0 - condition;

	return (yes & mask) | (no & ~mask);
}

/*
 * A normal half needs its exponent rebiased; infinity and NaN the float's top exponent. A
 * subnormal's mantissa is put behind 2^-14, which is then subtracted: exact, and right even where
 * the processor flushes subnormals.
 */
static inline float f16_to_f32(uint16_t h)
{
	const uint32_t magic = 113u << 23;
	uint32_t u = (uint32_t)(h & 0x7fff) << 13;
	uint32_t normal = u + ((127u - 15) << 23);
	uint32_t small = bits_of(float_of(normal + (1u << 23)) - float_of(magic));
	uint32_t special = u | 0x7f800000u | choose(u > 0x7c00u << 13, 0x400000u, 0);

	u = choose(u >= 0x7c00u << 13, special, choose(u < 0x400u << 13, small, normal));
	return float_of(u | (uint32_t)(h & 0x8000) << 16);
}

/*
 * From 2^-14 on, an integer addition of half a unit in the last place (less one where that place is
 * even) rounds. Below, adding 0.5 makes the float adder round at the half's last subnormal bit.
 */
static inline uint16_t f32_to_f16(float f)
{
	uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffffu;
	uint32_t is_small = a < 113u << 23;
	uint32_t small = bits_of(float_of(choose(is_small, a, 0)) + 0.5f) - bits_of(0.5f);
	uint32_t normal = (a + 0xfff + (a >> 13 & 1) - ((127u - 15) << 23)) >> 13;
	uint32_t special = choose(a > 0x7f800000u, 0x7e00 | (a >> 13 & 0x3ff), 0x7c00);

	small = choose(is_small, small, normal);
	return (uint16_t)(sign | choose(a >= 0x47800000u, special, small));
}

float dtype_f16_to_f32(uint16_t h)
{
	return f16_to_f32(h);
}

uint16_t dtype_f32_to_f16(float f)
{
	return f32_to_f16(f);
}

/*
 * F64 goes through F32 rounded to odd, not to nearest: the sticky last bit keeps the second
 * rounding, to BF16 or F16, equal to a single one. For F32 itself the cast is the answer.
 */
static inline float f64_to_f32_odd(double d)
{
	float f = (float)d;
	uint32_t u = bits_of(f);
	double back = (double)f;
	bool exact = back == d || d != d;
	bool away = (back < 0 ? -back : back) > (d < 0 ? -d : d);

	if (exact)
		return f;
	return float_of((u - away) | 1);
}

#define AS_IS(x) (x)
#define LOOP(name, from_t, to_t, load, store) \
	static void name(void *dst, const void *src, size_t n) \
	{ \
		const from_t *s = src; \
		to_t *d = dst; \
		size_t i; \
\
		for (i = 0; i < n; i++) \
			d[i] = store(load(s[i])); \
	}

LOOP(f32_bf16, float, uint16_t, AS_IS, dtype_f32_to_bf16)
LOOP(f32_f16, float, uint16_t, AS_IS, f32_to_f16)
LOOP(bf16_f32, uint16_t, float, dtype_bf16_to_f32, AS_IS)
LOOP(bf16_f16, uint16_t, uint16_t, dtype_bf16_to_f32, f32_to_f16)
LOOP(f16_f32, uint16_t, float, f16_to_f32, AS_IS)
LOOP(f16_bf16, uint16_t, uint16_t, f16_to_f32, dtype_f32_to_bf16)
LOOP(f64_f32, double, float, (float), AS_IS)
LOOP(f64_bf16, double, uint16_t, f64_to_f32_odd, dtype_f32_to_bf16)
LOOP(f64_f16, double, uint16_t, f64_to_f32_odd, f32_to_f16)

void dtype_convert(void *dst, enum dtype to, const void *src, enum dtype from, size_t n)
{
	static void (*const table[DT_COUNT][DT_COUNT])(void *dst, const void *src, size_t n) = {
		[DT_F32] = { [DT_BF16] = f32_bf16, [DT_F16] = f32_f16 },
		[DT_BF16] = { [DT_F32] = bf16_f32, [DT_F16] = bf16_f16 },
		[DT_F16] = { [DT_F32] = f16_f32, [DT_BF16] = f16_bf16 },
		[DT_F64] = { [DT_F32] = f64_f32, [DT_BF16] = f64_bf16, [DT_F16] = f64_f16 },
	};

	if (to == from) {
		if (n)
			memmove(dst, src, n * types[from].size);
		return;
	}
	table[from][to](dst, src, n);
}
