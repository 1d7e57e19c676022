/* SPDX-License-Identifier: Apache-2.0 */
/*
 * number: runs of numbers in vectors of 16, whatever the vector unit is. No function here looks at
 * an address or a neighbour: element i of the result depends on element i of the operands, and sums
 * run in 16 fixed lanes counted from the start of the run. Intrinsics stand only where a compiler
 * does not find the instruction by itself; but for vec_fma each variant computes the same bits.
 */
#ifndef DSPARK_NUMBER_H
#define DSPARK_NUMBER_H

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "backend.h"

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t vec_bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t vec_half __attribute__((vector_size(2 * LANES)));

#define vec_load(v, p)  memcpy(&(v), p, sizeof(v))
#define vec_store(p, v) memcpy(p, &(v), sizeof(v))

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

static inline float lanes_sum(const float lane[LANES])
{
	float s[LANES];

	memcpy(s, lane, sizeof s);
	for (int step = LANES / 2; step; step /= 2)
		for (int i = 0; i < step; i++)
			s[i] += s[i + step];
	return s[0];
}

/* Vectors are passed by pointer: their size as arguments depends on the vector unit. */
static inline void vec_set(vec *v, float x)
{
	for (int l = 0; l < LANES; l++)
		(*v)[l] = x;
}

/* v = v > w ? v : w, so w where one is NaN. */
static inline void vec_max(vec *v, const vec *w)
{
#ifdef __AVX512F__
	*v = (vec)_mm512_max_ps((__m512)*v, (__m512)*w);
#else
	for (int l = 0; l < LANES; l++)
		(*v)[l] = (*v)[l] > (*w)[l] ? (*v)[l] : (*w)[l];
#endif
}

/* The greatest of numbers of which none is NaN. */
static inline float vec_greatest(const vec *v)
{
#ifdef __AVX512F__
	return _mm512_reduce_max_ps((__m512)*v);
#else
	float s[LANES];

	vec_store(s, *v);
	for (int step = LANES / 2; step; step /= 2)
		for (int i = 0; i < step; i++)
			s[i] = s[i] > s[i + step] ? s[i] : s[i + step];
	return s[0];
#endif
}

/* Bits of a number that is no NaN, in its order; both zeros are the same. Above 0. */
static inline uint32_t ordered_bits(float x)
{
	uint32_t u = bits_from_float(x + 0.0f);

	return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/*
 * Of the first n of LANES numbers, none NaN, those whose ordered bits are above `least`, and
 * id + their place, one behind the other. Writes LANES of both; returns how many count.
 */
static inline int vec_offer(uint32_t *bits, int32_t *ids, const float *x, int32_t id, int n,
			    uint32_t least)
{
#ifdef __AVX512F__
	__m512i u = _mm512_castps_si512(_mm512_add_ps(_mm512_loadu_ps(x), _mm512_setzero_ps()));
	__m512i sign = _mm512_srai_epi32(u, 31),
		o = _mm512_xor_si512(u, _mm512_or_si512(sign, _mm512_set1_epi32(INT32_MIN)));
	__m512i at = _mm512_add_epi32(_mm512_set1_epi32(id),
				      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
							13, 14, 15));
	__mmask16 above = _mm512_cmpgt_epu32_mask(o, _mm512_set1_epi32((int)least)) &
			  (__mmask16)((1u << n) - 1);

	_mm512_storeu_si512(bits, _mm512_maskz_compress_epi32(above, o));
	_mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(above, at));
	return __builtin_popcount(above);
#else
	int count = 0;

	for (int i = 0; i < n; i++) {
		bits[count] = ordered_bits(x[i]);
		ids[count] = id + i;
		count += bits[count] > least;
	}
	return count;
#endif
}

/*
 * Of n numbers from `bits` and their ids those that are not below `least`, one behind the other.
 * Reads and writes LANES of both; `to` may lie before `from` or be it.
 */
static inline int vec_keep(uint32_t *to, int32_t *to_ids, const uint32_t *from, const int32_t *ids,
			   int n, uint32_t least)
{
#ifdef __AVX512F__
	__m512i b = _mm512_loadu_si512(from), i = _mm512_loadu_si512(ids);
	__mmask16 stays = _mm512_cmpge_epu32_mask(b, _mm512_set1_epi32((int)least)) &
			  (__mmask16)((1u << n) - 1);

	_mm512_storeu_si512(to, _mm512_maskz_compress_epi32(stays, b));
	_mm512_storeu_si512(to_ids, _mm512_maskz_compress_epi32(stays, i));
	return __builtin_popcount(stays);
#else
	int count = 0;

	for (int i = 0; i < n; i++) {
		uint32_t b = from[i];

		to[count] = b;
		to_ids[count] = ids[i];
		count += b >= least;
	}
	return count;
#endif
}

/* Pairs half a vector apart first: the order of lanes_sum. */
static inline float vec_sum(const vec *v)
{
#ifdef __AVX512F__
	return _mm512_reduce_add_ps((__m512)*v);
#else
	float s[LANES];

	vec_store(s, *v);
	return lanes_sum(s);
#endif
}

static inline void vec_from_bf16(vec *v, const uint16_t *p)
{
	vec_half h;

	vec_load(h, p);
	*v = (vec)(__builtin_convertvector(h, vec_bits) << 16);
}

static inline void vec_upper_half(uint16_t *p, const vec_bits *u)
{
#ifdef __AVX512F__
	_mm256_storeu_si256((__m256i *)p,
			    _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)*u, 16)));
#else
	vec_half h = __builtin_convertvector(*u >> 16, vec_half);

	vec_store(p, h);
#endif
}

/*
 * Numbers of codes in F8_E4M3. With its exponent's last four bits as they are, a code is a half
 * 2^8 too small, subnormals too; without halves, 2^-6 is put below subnormals and taken away again.
 */
static inline void vec_from_e4m3(vec *v, const uint8_t *p)
{
#ifdef __AVX512F__
	__m256i h = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
	__m512 f;

	h = _mm256_and_si256(_mm256_srai_epi16(h, 1), _mm256_set1_epi16((short)0xbf80));
	f = _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
	*v = (vec)_mm512_mask_mov_ps(
		f, _mm512_cmp_ps_mask(_mm512_abs_ps(f), _mm512_set1_ps(480.0f), _CMP_EQ_OQ),
		_mm512_set1_ps(__builtin_nanf("")));
#else
	typedef uint8_t vec_bytes __attribute__((vector_size(LANES)));
	vec_bytes b;
	vec_bits u, a, small, is_small, is_nan;

	vec_load(b, p);
	u = __builtin_convertvector(b, vec_bits);
	a = u & 0x7f;
	is_small = (vec_bits)(a < 8);
	is_nan = (vec_bits)(a == 0x7f);
	small = (vec_bits)((vec)(((a & 7) << 20) + (121u << 23)) - 0x1p-6f);
	a = (((a << 20) + (120u << 23)) & ~is_small) | (small & is_small);
	*v = (vec)(a | (is_nan & 0x7fc00000u) | (u & 0x80) << 24);
#endif
}

/*
 * Numbers of 32 codes of half a byte, v[0] of the low halves: as E2M1, or as integers in two's
 * complement.
 */
static inline __attribute__((always_inline)) void vec_from_halves(vec v[2], const uint8_t *p,
								    bool e2m1)
{
#ifdef __AVX512F__
	const __m512 table = e2m1 ? _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1,
						   -1.5f, -2, -3, -4, -6)
				  : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3,
						   -2, -1);
	__m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));

	/* the lowest four bits of a lane choose */
	v[0] = (vec)_mm512_permutexvar_ps(c, table);
	v[1] = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(c, 4), table);
#else
	typedef uint8_t vec_bytes __attribute__((vector_size(LANES)));
	typedef int32_t vec_int __attribute__((vector_size(4 * LANES)));
	vec_bytes b;
	vec_bits u;

	vec_load(b, p);
	u = __builtin_convertvector(b, vec_bits);
	for (int h = 0; h < 2; h++, u >>= 4) {
		vec_bits a = u & 7, is_small = (vec_bits)(a < 2), small;

		if (!e2m1) {
			v[h] = __builtin_convertvector((vec_int)(u << 28) >> 28, vec);
			continue;
		}
		/* 1 is put below 0 and 0.5 and taken away again */
		small = (vec_bits)((vec)((a << 22) + (127u << 23)) - 1.0f);
		a = (((a << 22) + (126u << 23)) & ~is_small) | (small & is_small);
		v[h] = (vec)(a | (u & 8) << 28);
	}
#endif
}

/* Rounds to nearest, ties to even; a NaN stays one. */
static inline void vec_to_bf16(uint16_t *p, const vec *v)
{
	vec_bits u = (vec_bits)*v, nan = (vec_bits)(*v != *v), r = u + 0x7fff + ((u >> 16) & 1);

#ifdef __AVX512F__
	r = (vec_bits)_mm512_mask_mov_epi32(
		(__m512i)r, _mm512_cmp_ps_mask((__m512)*v, (__m512)*v, _CMP_UNORD_Q),
		(__m512i)(u | 0x400000));
	(void)nan;
#else
	r = (r & ~nan) | ((u | 0x400000) & nan);
#endif
	vec_upper_half(p, &r);
}

/* The same of numbers of which none is NaN. */
static inline void vec_number_to_bf16(uint16_t *p, const vec *v)
{
	vec_bits u = (vec_bits)*v, r = u + 0x7fff + ((u >> 16) & 1);

	vec_upper_half(p, &r);
}

#ifdef __AVX512F__
/* Lanes of two vectors whose numbers differ in bit h change places with those of the other. */
#define TURN_LO(l, h) ((l) & (h) ? LANES + (l) - (h) : (l))
#define TURN_HI(l, h) ((l) & (h) ? LANES + (l) : (l) + (h))
#define TURN_ALL(t, h)                                                                          \
	t(0, h), t(1, h), t(2, h), t(3, h), t(4, h), t(5, h), t(6, h), t(7, h), t(8, h),        \
		t(9, h), t(10, h), t(11, h), t(12, h), t(13, h), t(14, h), t(15, h)
#define TURN_STEP(m, h)                                                                         \
	for (int i = 0; i < LANES; i++)                                                         \
		if (!(i & (h))) {                                                               \
			vec_bits a = m[i], b = m[i + (h)];                                      \
                                                                                                \
			m[i] = __builtin_shufflevector(a, b, TURN_ALL(TURN_LO, h));             \
			m[i + (h)] = __builtin_shufflevector(a, b, TURN_ALL(TURN_HI, h));       \
		}
#endif

/* m[i][j] becomes m[j][i]. */
static inline void vec_turn(vec_bits m[LANES])
{
#ifdef __AVX512F__
	TURN_STEP(m, 8)
	TURN_STEP(m, 4)
	TURN_STEP(m, 2)
	TURN_STEP(m, 1)
#else
	uint32_t t[LANES][LANES], u[LANES][LANES];

	memcpy(t, m, sizeof t);
	for (int i = 0; i < LANES; i++)
		for (int j = 0; j < LANES; j++)
			u[i][j] = t[j][i];
	memcpy(m, u, sizeof u);
#endif
}

static inline void run_load(float *dst, const void *src, enum dtype d, int64_t n)
{
	const uint16_t *h = src;
	int64_t i = 0;

	if (d == DT_F32) {
		memcpy(dst, src, (size_t)n * sizeof *dst);
	} else if (d == DT_BF16) {
		for (vec v; i + LANES <= n; i += LANES) {
			vec_from_bf16(&v, h + i);
			vec_store(dst + i, v);
		}
		for (; i < n; i++)
			dst[i] = dtype_bf16_to_f32(h[i]);
	} else {
		dtype_convert(dst, DT_F32, src, d, (size_t)n);
	}
}

static inline void run_save(void *dst, enum dtype d, const float *src, int64_t n)
{
	uint16_t *h = dst;
	int64_t i = 0;

	if (d == DT_F32) {
		memcpy(dst, src, (size_t)n * sizeof *src);
	} else if (d == DT_BF16) {
		for (vec v; i + LANES <= n; i += LANES) {
			vec_load(v, src + i);
			vec_to_bf16(h + i, &v);
		}
		for (; i < n; i++)
			h[i] = dtype_f32_to_bf16(src[i]);
	} else {
		dtype_convert(dst, d, src, DT_F32, (size_t)n);
	}
}

static inline void run_convert(void *dst, enum dtype to, const void *src, enum dtype from,
			       int64_t n)
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

/*
 * memcpy past the caches, whole lines of dst at least: large results need not be read before they
 * are written. Other threads see it after run_stream_end by this one.
 */
static inline void run_stream(void *dst, const void *src, size_t n)
{
#ifdef __x86_64__
	char *to = dst;
	const char *from = src;
	size_t head = -(uintptr_t)to % 64;

	head = head < n ? head : n;
	memcpy(to, from, head);
	for (to += head, from += head, n -= head; n >= 64; to += 64, from += 64, n -= 64) {
#ifdef __AVX512F__
		_mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
#else
		for (int i = 0; i < 64; i += 16)
			_mm_stream_si128((void *)(to + i),
					 _mm_loadu_si128((const void *)(from + i)));
#endif
	}
	memcpy(to, from, n);
#else
	memcpy(dst, src, n);
#endif
}

static inline void run_stream_end(void)
{
#ifdef __x86_64__
	_mm_sfence();
#endif
}

static inline void run_round(float *x, enum dtype d, int64_t n)
{
	for (int64_t i = 0; i < n && d == DT_BF16; i++)
		x[i] = dtype_bf16_to_f32(dtype_f32_to_bf16(x[i]));
}

/*
 * e^x within 2 ulp between -80 and 80, limited there; NaN stays. 2^n times a polynomial on [-ln2/2,
 * ln2/2]. Limits nearer to those of the format would make subnormal numbers in what callers do
 * next, which cost a hundred cycles each.
 */
static inline float exp_limited(float x)
{
	const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
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

/* x = x * y + z, rounded once where the machine can. */
static inline void vec_fma(vec *x, const vec *y, float z)
{
#ifdef __AVX512F__
	*x = (vec)_mm512_fmadd_ps((__m512)*x, (__m512)*y, _mm512_set1_ps(z));
#else
	*x = *x * *y + z;
#endif
}

/* 2^x within 2 ulp for x <= 0, 0 from -126.5 down; NaN stays. */
static inline void vec_exp2_or_zero(vec *x)
{
	/* Adding it rounds to an integer and leaves the biased exponent in the lowest bits. */
	const float magic = 12582912.0f + 127.0f;
	vec t, n, p;
	vec_bits power;

	vec_set(&t, -127.0f);
	vec_max(&t, x);
	n = t + magic;
	power = (vec_bits)n << 23;
	t -= n - magic;
	p = t * 1.5353362e-4f + 1.3398875e-3f;
	vec_fma(&p, &t, 9.618437e-3f);
	vec_fma(&p, &t, 5.5503324e-2f);
	vec_fma(&p, &t, 2.4022648e-1f);
	vec_fma(&p, &t, 6.931472e-1f);
	vec_fma(&p, &t, 1.0f);
	*x = p * (vec)power;
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
