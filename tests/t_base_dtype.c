/* SPDX-License-Identifier: Apache-2.0 */
/* dtype: every half, every tie between two neighbours, and the loops against the scalars. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <stdlib.h>

#include "dtype.h"
#include "tap.h"

static float f32_of(uint32_t u)
{
	float f;

	memcpy(&f, &u, sizeof f);
	return f;
}

/* The value of a half by its definition. */
static double value_f16(uint16_t h)
{
	int exponent = h >> 10 & 31, mantissa = h & 1023;
	double v = exponent == 31 ? (mantissa ? NAN : INFINITY)
		   : exponent     ? ldexp(1024 + mantissa, exponent - 25)
				  : ldexp(mantissa, -24);

	return h & 0x8000 ? -v : v;
}

static void test_f16_codes(void)
{
	int bad_value = 0, bad_back = 0, bad_nan = 0;
	unsigned h;

	for (h = 0; h < 65536; h++) {
		float f = dtype_f16_to_f32((uint16_t)h);
		double want = value_f16((uint16_t)h);
		uint16_t back = dtype_f32_to_f16(f);

		if (isnan(want)) {
			bad_nan += !isnan(f) || back != (h | 0x200) || !signbit(f) != !(h & 0x8000);
			continue;
		}
		bad_value += f != want || !signbit(f) != !(h & 0x8000);
		bad_back += back != h;
	}
	is_int(bad_value, 0, "each of the 65536 halves has its value");
	is_int(bad_back, 0, "each half comes back");
	is_int(bad_nan, 0, "each NaN stays one, quiet, with its sign and payload");
}

/*
 * Between each two neighbours: the middle goes to the even one, a step to either side to the nearer
 * one.
 */
static void test_ties(const char *name, unsigned infinity, double (*value)(uint16_t),
		      uint16_t (*round)(float))
{
	int bad = 0;
	unsigned h;

	for (h = 0; h < infinity; h++) {
		double up = h + 1 == infinity ? 2 * value((uint16_t)h) - value((uint16_t)(h - 1))
					      : value((uint16_t)(h + 1));
		float middle = (float)((value((uint16_t)h) + up) / 2);
		uint16_t even = (uint16_t)(h & 1 ? h + 1 : h), next = (uint16_t)(h + 1);

		bad += round(middle) != even;
		bad += round(nextafterf(middle, 0)) != h;
		bad += round(nextafterf(middle, INFINITY)) != next;
		bad += round(-middle) != (even | 0x8000);
	}
	is_int(bad, 0, "%s rounds to nearest, ties to even, up to infinity", name);
}

static double value_bf16(uint16_t h)
{
	return f32_of((uint32_t)h << 16);
}

static void test_edges(void)
{
	static const struct {
		float f;
		uint16_t f16, bf16;
	} t[] = {
		{ 0, 0, 0 },
		{ -0.0f, 0x8000, 0x8000 },
		{ 1, 0x3c00, 0x3f80 },
		{ -2, 0xc000, 0xc000 },
		{ 65504, 0x7bff, 0x4780 },
		{ 65519.996f, 0x7bff, 0x4780 },
		{ 65520, 0x7c00, 0x4780 },
		{ 3e38f, 0x7c00, 0x7f62 },
		{ 3.4028235e38f, 0x7c00, 0x7f80 },
		{ INFINITY, 0x7c00, 0x7f80 },
		{ -INFINITY, 0xfc00, 0xff80 },
		{ 0x1p-24f, 1, 0x3380 },
		{ 0x1p-25f, 0, 0x3300 },
		{ 0x1.000002p-25f, 1, 0x3300 },
		{ 0x1.8p-24f, 2, 0x33c0 },
		{ 0x1p-14f, 0x400, 0x3880 },
		{ 0x1.ff8p-15f, 0x3ff, 0x3880 },
		{ 1e-45f, 0, 0 },
		{ 0x1p-133f, 0, 1 },
		{ 1.0009766f, 0x3c01, 0x3f80 },
		{ 1.00390625f, 0x3c04, 0x3f80 },
		{ 1.01171875f, 0x3c0c, 0x3f82 },
	};
	size_t i;

	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		is_int(dtype_f32_to_f16(t[i].f), t[i].f16, "%a as F16", t[i].f);
		is_int(dtype_f32_to_bf16(t[i].f), t[i].bf16, "%a as BF16", t[i].f);
	}
	ok(isnan(dtype_bf16_to_f32(dtype_f32_to_bf16(f32_of(0x7f800001)))),
	   "a NaN with low bits only stays one in BF16");
	ok(isnan(dtype_f16_to_f32(dtype_f32_to_f16(f32_of(0xff800001)))),
	   "a NaN with low bits only stays one in F16");
}

#define N 1021

/* The loop of each pair against one element at a time through F32. */
static void test_convert(enum dtype from, enum dtype to)
{
	static unsigned char src[N * 8], dst[N * 8 + 8];
	size_t size = dtype_size(to), i, bad = 0;

	for (i = 0; i < N; i++) {
		uint16_t h = (uint16_t)(i * 64 + 17);
		double d = value_f16(h);
		float f = (float)d;

		if (from == DT_F64)
			memcpy(src + 8 * i, &d, 8);
		else if (from == DT_F32)
			memcpy(src + 4 * i, &f, 4);
		else
			memcpy(src + 2 * i, &h, 2);
	}
	memset(dst, 0xa5, sizeof dst);
	dtype_convert(dst, to, src, from, N);
	for (i = 0; i < N; i++) {
		uint16_t h = (uint16_t)(i * 64 + 17), got, want;
		float f = from == DT_BF16 ? dtype_bf16_to_f32(h) : (float)value_f16(h), g;

		memcpy(&g, dst + size * i, size == 4 ? 4 : 2);
		memcpy(&got, dst + size * i, 2);
		want = to == DT_BF16 ? dtype_f32_to_bf16(f) : dtype_f32_to_f16(f);
		if (to == from && from == DT_BF16)
			want = h;
		if (isnan(f))
			bad += to == DT_F32   ? !isnan(g)
			       : to == DT_F16 ? !isnan(dtype_f16_to_f32(got))
					      : !isnan(dtype_bf16_to_f32(got));
		else
			bad += to == DT_F32 ? memcmp(&f, &g, 4) != 0 : got != want;
	}
	for (i = size * N; i < size * N + 8; i++)
		bad += dst[i] != 0xa5;
	is_int((int64_t)bad, 0, "%d elements from %s to %s", N, dtype_name(from), dtype_name(to));
}

/* Values just beside a tie, closer than F32 can see. */
static void test_double_rounding(void)
{
	const double tie = 1 + 0x1p-8, over = 1 + 0x1p-8 + 0x1p-50, under = 1 + 0x3p-8 - 0x1p-50;
	const double half_tie = 1 + 0x1p-11, half_over = 1 + 0x1p-11 + 0x1p-50;
	uint16_t h;

	dtype_convert(&h, DT_BF16, &tie, DT_F64, 1);
	is_int(h, 0x3f80, "F64 to BF16: a tie goes to even");
	dtype_convert(&h, DT_BF16, &over, DT_F64, 1);
	is_int(h, 0x3f81, "F64 to BF16: rounded once, up");
	dtype_convert(&h, DT_BF16, &under, DT_F64, 1);
	is_int(h, 0x3f81, "F64 to BF16: rounded once, down");
	dtype_convert(&h, DT_F16, &half_tie, DT_F64, 1);
	is_int(h, 0x3c00, "F64 to F16: a tie goes to even");
	dtype_convert(&h, DT_F16, &half_over, DT_F64, 1);
	is_int(h, 0x3c01, "F64 to F16: rounded once");
	dtype_convert(&h, DT_F16, &(double){ -1e300 }, DT_F64, 1);
	is_int(h, 0xfc00, "F64 to F16: overflow is infinity");
	dtype_convert(&h, DT_BF16, &(double){ 1e-300 }, DT_F64, 1);
	is_int(h, 0, "F64 to BF16: underflow is zero");
}

static void test_names(void)
{
	static const struct {
		const char *name;
		enum dtype dtype;
	} t[] = {
		{ "fp32", DT_F32 },   { "float32", DT_F32 },   { "torch.float32", DT_F32 },
		{ "bf16", DT_BF16 },  { "bfloat16", DT_BF16 }, { "torch.bfloat16", DT_BF16 },
		{ "fp16", DT_F16 },   { "float16", DT_F16 },   { "half", DT_F16 },
		{ "fp8", DT_NONE },   { "", DT_NONE },         { "bf1", DT_NONE },
		{ "bf166", DT_NONE },
	};
	size_t i;
	int d;

	for (d = DT_NONE + 1; d < DT_COUNT; d++)
		is_int(dtype_from_name(dtype_name((enum dtype)d)), d, "%s names itself",
		       dtype_name((enum dtype)d));
	is_int(dtype_from_name("F4"), DT_NONE, "F4 is unknown");
	is_int(dtype_from_name("none"), DT_NONE, "\"none\" is no dtype");
	for (i = 0; i < sizeof t / sizeof t[0]; i++)
		is_int(dtype_from_recipe(t[i].name), t[i].dtype, "recipe spelling '%s'", t[i].name);
	is_str(dtype_recipe_name(DT_F16), "fp16", "F16 in a recipe");
}

int main(void)
{
	static const enum dtype types[] = { DT_F32, DT_BF16, DT_F16, DT_F64 };
	size_t i, j;

	test_f16_codes();
	test_ties("F16", 0x7c00, value_f16, dtype_f32_to_f16);
	test_ties("BF16", 0x7f80, value_bf16, dtype_f32_to_bf16);
	test_edges();
	for (i = 0; i < 4; i++)
		for (j = 0; j < 3; j++)
			test_convert(types[i], types[j]);
	test_double_rounding();
	test_names();
	return tap_end();
}
