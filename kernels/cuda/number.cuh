/* SPDX-License-Identifier: Apache-2.0 */
/*
 * number: numbers of any dtype in device code, gates, sums over warps and blocks, reports of bad
 * data.
 */
#ifndef DSPARK_CUDA_NUMBER_CUH
#define DSPARK_CUDA_NUMBER_CUH

#include "cuda.h"
#include "ptx.cuh"

#define WARP 32
#define ALL_LANES 0xffffffffu

/* A view of device memory as kernels take it, by value. */
struct view {
	char *p;
	enum dtype dtype;
	int64_t rows, cols, ld;
};

static inline struct view view_of(struct tensor t)
{
	return (struct view){ (char *)t.p, t.dtype, t.rows, t.cols, t.ld };
}

__device__ static inline float load_number(const char *p, enum dtype d, int64_t i)
{
	switch (d) {
	case DT_F32:
		return ((const float *)p)[i];
	case DT_BF16:
		return bf16_to_float(((const uint16_t *)p)[i]);
	default:
		return f16_to_float(((const uint16_t *)p)[i]);
	}
}

/*
 * An element of a checkpoint, F64 too, as the float that becomes `to` with one rounding: towards it
 * F64 is rounded to odd, so that the second rounding, to fewer bits, is as good as the only one.
 */
__device__ static inline float load_stored(const char *p, enum dtype d, int64_t i, enum dtype to)
{
	double number;
	float f;

	if (d != DT_F64)
		return load_number(p, d, i);
	number = ((const double *)p)[i];
	f = (float)number;
	if (to == DT_F32 || isnan(f) || (double)f == number)
		return f;
	return __uint_as_float((__float_as_uint(f) - (fabs((double)f) > fabs(number))) | 1);
}

__device__ static inline void save_number(char *p, enum dtype d, int64_t i, float f)
{
	switch (d) {
	case DT_F32:
		((float *)p)[i] = f;
		break;
	case DT_BF16:
		((uint16_t *)p)[i] = float_to_bf16(f);
		break;
	default:
		((uint16_t *)p)[i] = float_to_f16(f);
	}
}

__device__ static inline float view_get(const struct view &v, int64_t row, int64_t col)
{
	return load_number(v.p, v.dtype, row * v.ld + col);
}

__device__ static inline void view_set(const struct view &v, int64_t row, int64_t col, float f)
{
	save_number(v.p, v.dtype, row * v.ld + col, f);
}

__device__ static inline int32_t view_id(const struct view &v, int64_t row, int64_t col)
{
	return ((const int32_t *)v.p)[row * v.ld + col];
}

/* f as an operand of a product in dtype d. */
__device__ static inline float round_operand(float f, enum dtype d)
{
	return d == DT_BF16 ? bf16_to_float(float_to_bf16(f)) : f;
}

/* act(g, u) of backend.h. */
__device__ static inline float act_number(const struct act &a, float g, float u)
{
	switch (a.kind) {
	case ACT_SILU:
		return g / (1.0f + expf(-g)) * u;
	case ACT_SILU_CLAMP:
		/* not by fminf, which would end a NaN */
		g = g > a.limit ? a.limit : g;
		u = u > a.limit ? a.limit : u < -a.limit ? -a.limit : u;
		return g / (1.0f + expf(-g)) * u;
	case ACT_GELU_TANH:
		return 0.5f * g *
		       (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g))) * u;
	default:
		u = a.linear != 0 ? a.linear * tanhf(u / a.linear) : u;
		return a.beta * tanhf(g / a.beta) / (1.0f + expf(-g)) * u;
	}
}

__device__ static inline float warp_sum(float f)
{
	for (int i = WARP / 2; i; i /= 2)
		f += __shfl_xor_sync(ALL_LANES, f, i);
	return f;
}

__device__ static inline float warp_max(float f)
{
	for (int i = WARP / 2; i; i /= 2)
		f = fmaxf(f, __shfl_xor_sync(ALL_LANES, f, i));
	return f;
}

/* The sum over a block of whole warps, in every thread; `room` has one float a warp. */
__device__ static inline float block_sum(float f, float *room)
{
	int warps = (int)blockDim.x / WARP;
	float all = 0;

	f = warp_sum(f);
	__syncthreads();	/* room may still be read from the sum before */
	if (threadIdx.x % WARP == 0)
		room[threadIdx.x / WARP] = f;
	__syncthreads();
	for (int i = 0; i < warps; i++)
		all += room[i];
	return all;
}

/* The first report is kept. */
__device__ static inline void report_fault(struct cuda_fault *f, enum cuda_fault_kind kind,
					   long long a, long long b, int c = 0)
{
	if (atomicCAS(&f->kind, (int)FAULT_NONE, (int)kind) == (int)FAULT_NONE) {
		f->a = a;
		f->b = b;
		f->c = c;
	}
}

#endif
