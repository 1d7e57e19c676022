/* SPDX-License-Identifier: Apache-2.0 */
/* packed: numbers of packed weights (struct quant, quant.h) in device code. */
#ifndef DSPARK_CUDA_PACKED_CUH
#define DSPARK_CUDA_PACKED_CUH

#include "number.cuh"

extern "C" {
#include "quant.h"
}

/* A packed weight as kernels take it. */
struct packed {
	const unsigned char *scales;	/* of the first matrix */
	int64_t row_bytes;	/* of codes */
	int64_t chunk, scale_row;
	int64_t block_cols;
	enum quant_code code;
	enum dtype scale;
	bool zero_is_zero;
	bool straight;		/* 16 numbers from a multiple of 16 on: one load, one scale */
};

static inline struct packed packed_of(const struct weight *w)
{
	const struct cuda_weight *h = cuda_weight_of(w);
	struct packed p = {};

	p.scales = h->scales;
	p.row_bytes = (int64_t)quant_row_bytes(w->quant, w->cols);
	p.chunk = (int64_t)h->chunk;
	p.scale_row = (int64_t)h->scale_row;
	p.block_cols = w->quant->block_cols;
	p.code = w->quant->code;
	p.scale = w->quant->scale;
	p.zero_is_zero = w->quant->zero_scale_is_zero;
	p.straight = p.row_bytes % 16 == 0 && w->cols % 16 == 0 && p.block_cols % 16 == 0;
	return p;
}

/* The row of scales of a row of a matrix whose scales begin at p; NULL where it was not filled. */
__device__ static inline const unsigned char *scale_row(const struct packed &q,
							const unsigned char *p, int64_t row)
{
	const unsigned char *chunk = p + row / 64 * q.chunk;
	int slot = chunk[row % 64];

	return slot ? chunk + 64 + (slot - 1) * q.scale_row : NULL;
}

__device__ static inline float scale_number(const struct packed &q, const unsigned char *scales,
					    int64_t block)
{
	unsigned byte;

	if (!scales)
		return 0;
	if (q.scale == DT_F32 || q.scale == DT_BF16 || q.scale == DT_F16)
		return load_number((const char *)scales, q.scale, block);
	byte = scales[block];
	if (byte == 255)
		return __uint_as_float(0x7fc00000);
	if (!byte)
		return q.zero_is_zero ? 0 : __uint_as_float(0x00400000);
	return __uint_as_float(byte << 23);
}

/*
 * The number of a code, exact. The bits of e4m3 and e2m1 are those of F32 with another bias, which
 * a product makes good, also of what is subnormal.
 */
template <enum quant_code kind> __device__ static inline float code_number(unsigned c)
{
	if (kind == CODE_INT4)
		return (float)((int)(c & 15) - 8);
	if (kind == CODE_MXFP4)
		return __uint_as_float((c & 7) << 22 | (c & 8) << 28) *
		       __uint_as_float(253u << 23);	/* 2^126 */
	if ((c & 127) == 127)
		return __uint_as_float(0x7fc00000);
	return __uint_as_float((c & 127) << 20 | (c & 128) << 24) *
	       __uint_as_float(247u << 23);	/* 2^120 */
}

/* Number `col` of a row of codes, and its row of scales. */
__device__ static inline float packed_number(const struct packed &q, const unsigned char *codes,
					     const unsigned char *scales, int64_t col)
{
	float scale = scale_number(q, scales, col / q.block_cols);

	if (q.code == CODE_F8_E4M3)
		return code_number<CODE_F8_E4M3>(codes[col]) * scale;
	if (q.code == CODE_MXFP4)
		return code_number<CODE_MXFP4>(codes[col / 2] >> (col % 2 ? 4 : 0)) * scale;
	return code_number<CODE_INT4>(codes[col / 2] >> (col % 2 ? 4 : 0)) * scale;
}

/* N = 16 or 8 codes of a row from a multiple of N on, where they lie straight. */
template <int N>
__device__ static inline void load_codes(uint32_t c[4], const struct packed &q,
					 const unsigned char *codes, int64_t col)
{
	const unsigned char *p = codes + (q.code == CODE_F8_E4M3 ? col : col / 2);

	if (q.code == CODE_F8_E4M3 && N == 16) {
		uint4 v = *(const uint4 *)p;

		c[0] = v.x, c[1] = v.y, c[2] = v.z, c[3] = v.w;
	} else if (q.code == CODE_F8_E4M3 || N == 16) {
		uint2 v = *(const uint2 *)p;

		c[0] = v.x, c[1] = v.y;
	} else {
		c[0] = *(const uint32_t *)p;
	}
}

template <enum quant_code kind, int N>
__device__ static inline void expand_codes(float f[N], const uint32_t c[4], float scale)
{
	constexpr int bits = kind == CODE_F8_E4M3 ? 8 : 4, each = 32 / bits;

#pragma unroll
	for (int i = 0; i < N; i++)
		f[i] = code_number<kind>(c[i / each] >> i % each * bits &
					 ((1u << bits) - 1)) * scale;
}

template <int N>
__device__ static inline void expand_codes(float f[N], const uint32_t c[4], float scale,
					   enum quant_code kind)
{
	switch (kind) {
	case CODE_F8_E4M3:
		expand_codes<CODE_F8_E4M3, N>(f, c, scale);
		break;
	case CODE_MXFP4:
		expand_codes<CODE_MXFP4, N>(f, c, scale);
		break;
	default:	/* CODE_INT4 */
		expand_codes<CODE_INT4, N>(f, c, scale);
		break;
	}
}

/* Numbers to 16 bytes of operands: 8 of BF16, 4 of F32. */
__device__ static inline uint4 pack_operands(const float *f, uint16_t)
{
	return make_uint4(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]),
			  pack_bf16(f[6], f[7]));
}

__device__ static inline uint4 pack_operands(const float *f, float)
{
	return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
			  __float_as_uint(f[3]));
}

#endif
