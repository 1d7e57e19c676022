/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ptx: single machine instructions: conversions, matrix fragments of a warp, asynchronous copies to
 * shared memory. The emulator of tests/cuda has its own, which do the same.
 *
 * Fragments are those of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): with g = lane
 * / 4 and c = lane % 4, A is row-major 16 x 16, a[0] the numbers (g, 2c..2c+1), a[1] (g+8, 2c..),
 * a[2] (g, 2c+8..), a[3] (g+8, 2c+8..); B is 16 x 8 column by column, b[0] (2c..2c+1, g), b[1]
 * (2c+8.., g); D is 16 x 8, d[0..1] (g, 2c..2c+1), d[2..3] (g+8, 2c..). The lower half of a register
 * is the lower index.
 */
#ifndef DSPARK_CUDA_PTX_CUH
#define DSPARK_CUDA_PTX_CUH

#include <stdint.h>

#ifdef CUDA_EMULATED
#include <ptx_emulated.h>
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define CUDA_SHARED(name) extern __shared__ __align__(128) char name[]

__device__ static inline float bf16_to_float(uint16_t h)
{
	return __uint_as_float((uint32_t)h << 16);
}

/* To nearest, ties to even; NaN stays NaN. */
__device__ static inline uint16_t float_to_bf16(float f)
{
	return __bfloat16_as_ushort(__float2bfloat16_rn(f));
}

__device__ static inline float f16_to_float(uint16_t h)
{
	return __half2float(__ushort_as_half(h));
}

__device__ static inline uint16_t float_to_f16(float f)
{
	return __half_as_ushort(__float2half_rn(f));
}

/* Two numbers as bf16, `low` in the lower half. */
__device__ static inline uint32_t pack_bf16(float low, float high)
{
	return (uint32_t)float_to_bf16(low) | (uint32_t)float_to_bf16(high) << 16;
}

/* d += a b; all 32 lanes take part. */
__device__ static inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
		     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
		     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/*
 * Four 8 x 8 matrices of 16-bit numbers from shared memory: lane i names row i % 8 of matrix i / 8
 * (16 bytes, on a 16-byte boundary); r[j] is matrix j's (lane / 4, 2 (lane % 4)..), or of its
 * transpose.
 */
__device__ static inline void load_matrix(uint32_t r[4], const void *row)
{
	uint32_t at = (uint32_t)__cvta_generic_to_shared(row);

	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
		     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
		     : "r"(at)
		     : "memory");
}

__device__ static inline void load_matrix_transposed(uint32_t r[4], const void *row)
{
	uint32_t at = (uint32_t)__cvta_generic_to_shared(row);

	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
		     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
		     : "r"(at)
		     : "memory");
}

/*
 * 16 bytes from global to shared memory, both on a 16-byte boundary, behind the thread's back; with
 * `bytes` < 16 the rest becomes 0, and with 0 nothing is read.
 */
__device__ static inline void copy_async(void *shared, const void *global, int bytes)
{
	uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);

	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
		     :
		     : "r"(at), "l"(global), "r"(bytes)
		     : "memory");
}

/* Ends a group of copies of this thread; waits until at most `pending` groups are under way. */
__device__ static inline void copy_async_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int pending> __device__ static inline void copy_async_wait(void)
{
	asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#endif /* CUDA_EMULATED */

#endif
