/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels/cuda/ptx.cuh has as machine instructions, for the emulator. */
#ifndef DSPARK_TESTS_PTX_EMULATED_H
#define DSPARK_TESTS_PTX_EMULATED_H

#include <cuda_runtime.h>

extern "C" {
#include "dtype.h"
}

#define CUDA_SHARED(name) char *name = emulated_shared

static inline float bf16_to_float(uint16_t h) { return dtype_bf16_to_f32(h); }
static inline uint16_t float_to_bf16(float f) { return dtype_f32_to_bf16(f); }
static inline float f16_to_float(uint16_t h) { return dtype_f16_to_f32(h); }
static inline uint16_t float_to_f16(float f) { return dtype_f32_to_f16(f); }

static inline uint32_t pack_bf16(float low, float high)
{
	return (uint32_t)float_to_bf16(low) | (uint32_t)float_to_bf16(high) << 16;
}

static inline float emulated_half(uint32_t r, int i)
{
	return bf16_to_float((uint16_t)(r >> 16 * i));
}

static inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
	uint32_t mine[6] = { a[0], a[1], a[2], a[3], b[0], b[1] };
	const char *all = emulated_exchange(0xffffffffu, mine, sizeof mine);
	int g = emulated_lane() / 4, c = emulated_lane() % 4;

	for (int i = 0; i < 4; i++) {
		int half = i / 2, col = 2 * c + i % 2;

		for (int k = 0; k < 16; k++) {
			/* (row, k) of A: lane g * 4 + k % 8 / 2; (k, col) of B: col * 4 + .. */
			const uint32_t *x = (const uint32_t *)(all + 64 * (g * 4 + k % 8 / 2));
			const uint32_t *y = (const uint32_t *)(all + 64 * (col * 4 + k % 8 / 2));

			d[i] += emulated_half(x[half + k / 8 * 2], k % 2) *
				emulated_half(y[4 + k / 8], k % 2);
		}
	}
}

static inline void emulated_matrix(uint32_t r[4], const void *row, bool transposed)
{
	const char *all = emulated_exchange(0xffffffffu, &row, sizeof row);
	int lane = emulated_lane();

	if ((uintptr_t)row % 16)
		abort();
	for (int j = 0; j < 4; j++) {
		uint16_t half[2];

		for (int i = 0; i < 2; i++) {
			int at[2] = { lane / 4, 2 * (lane % 4) + i };
			const uint16_t *p;

			memcpy(&p, all + 64 * (8 * j + at[transposed ? 1 : 0]), sizeof p);
			half[i] = p[at[transposed ? 0 : 1]];
		}
		r[j] = (uint32_t)half[0] | (uint32_t)half[1] << 16;
	}
	__syncwarp();	/* who goes on may write where others still read: the instruction is one */
}

static inline void load_matrix(uint32_t r[4], const void *row) { emulated_matrix(r, row, false); }
static inline void load_matrix_transposed(uint32_t r[4], const void *row)
{
	emulated_matrix(r, row, true);
}

/* They happen when they are waited for. */
void emulated_copy(void *shared, const void *global, int bytes);
void emulated_copy_commit(void);
void emulated_copy_wait(int pending);

static inline void copy_async(void *shared, const void *global, int bytes)
{
	if ((uintptr_t)shared % 16 || (bytes && (uintptr_t)global % 16) || bytes < 0 || bytes > 16)
		abort();
	emulated_copy(shared, global, bytes);
}

static inline void copy_async_commit(void) { emulated_copy_commit(); }
template <int pending> static inline void copy_async_wait(void) { emulated_copy_wait(pending); }

#endif
