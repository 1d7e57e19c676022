/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiles: rows of tensors as bf16 operands in shared memory, and what attention, its sparse form
 * and choosing have in common.
 *
 * A tile has rows of whole 64s of numbers. Its 16-byte units are swizzled, unit u of row r lies at
 * u ^ (r % 8): eight rows that load_matrix reads at one unit, and a row that is written, meet all
 * banks once.
 */
#ifndef DSPARK_CUDA_TILES_CUH
#define DSPARK_CUDA_TILES_CUH

#include "number.cuh"

#define UNIT	8	/* bf16 numbers of 16 bytes */
#define LOG2_E	1.44269504f
#define KEYS	64	/* of a tile */

__device__ static inline int tile_at(int row, int unit, int width)
{
	return row * width + ((unit ^ (row & 7)) * UNIT);
}

/* Columns [col, col + n) of some rows of a tensor, in 16-byte units where `fast`. */
struct strip {
	struct view x;
	int64_t col;
	int n;			/* that exist; others are 0 */
	bool fast;
};

/* Whether units of these columns can be copied as they are, for any multiple of `step` columns. */
static inline bool units_of(struct tensor t, int64_t step)
{
	return t.dtype == DT_BF16 && (uintptr_t)t.p % 16 == 0 && t.ld % UNIT == 0 &&
	       step % UNIT == 0;
}

__device__ static inline uint32_t two_numbers(const struct strip &s, int64_t row, int c)
{
	float low = c < s.n ? view_get(s.x, row, s.col + c) : 0,
	      high = c + 1 < s.n ? view_get(s.x, row, s.col + c + 1) : 0;

	return pack_bf16(low, high);
}

/* Unit u of row `row` (negative: none, zeros) to its place; asynchronous where it can be. */
__device__ static inline void load_unit(uint16_t *tile, int at_row, int u, int width,
					const struct strip &s, int64_t row)
{
	uint16_t *to = tile + tile_at(at_row, u, width);

	if (s.fast) {
		bool there = row >= 0 && u * UNIT < s.n;

		copy_async(to,
			   (const uint16_t *)s.x.p + (there ? row * s.x.ld + s.col + u * UNIT : 0),
			   there ? 16 : 0);
	} else {
		uint4 v = make_uint4(0, 0, 0, 0);

		if (row >= 0) {
			v.x = two_numbers(s, row, u * UNIT);
			v.y = two_numbers(s, row, u * UNIT + 2);
			v.z = two_numbers(s, row, u * UNIT + 4);
			v.w = two_numbers(s, row, u * UNIT + 6);
		}
		*(uint4 *)to = v;
	}
}

/* `rows` rows from `first` on, zeros from the n-th, by all threads of the block. */
__device__ static inline void load_tile(uint16_t *tile, int rows, int width, const struct strip &s,
					int64_t first, int64_t n)
{
	int units = width / UNIT;

	for (int i = (int)threadIdx.x; i < rows * units; i += (int)blockDim.x) {
		int r = i / units;

		load_unit(tile, r, i % units, width, s, r < n ? first + r : -1);
	}
}

/* Rows named by a list, relative to `base`; zeros from the n-th. */
__device__ static inline void load_listed(uint16_t *tile, int rows, int width,
					  const struct strip &s, const int32_t *list, int n,
					  int64_t base)
{
	int units = width / UNIT;

	for (int i = (int)threadIdx.x; i < rows * units; i += (int)blockDim.x) {
		int r = i / units;

		load_unit(tile, r, i % units, width, s, r < n ? base + list[r] : -1);
	}
}

/* A fragment: 16 rows from r0, 16 columns from unit u. */
__device__ static inline void load_a(uint32_t a[4], const uint16_t *tile, int r0, int u, int width)
{
	int i = (int)threadIdx.x % WARP;

	load_matrix(a, tile + tile_at(r0 + i % 16, u + i / 16, width));
}

/* B fragments of 16 rows from r0 as columns, sums along 16 columns from unit u. */
__device__ static inline void load_b(uint32_t b[4], const uint16_t *tile, int r0, int u, int width)
{
	int i = (int)threadIdx.x % WARP;

	load_matrix(b, tile + tile_at(r0 + i / 16 * 8 + i % 8, u + i / 8 % 2, width));
}

/* B fragments of 16 columns from unit u, sums along 16 rows from r0. */
__device__ static inline void load_b_across(uint32_t b[4], const uint16_t *tile, int r0, int u,
					    int width)
{
	int i = (int)threadIdx.x % WARP;

	load_matrix_transposed(b, tile + tile_at(r0 + i % 16, u + i / 16, width));
}

/* Over the four lanes that have a row of a result. */
__device__ static inline float row_max(float f)
{
	f = fmaxf(f, __shfl_xor_sync(ALL_LANES, f, 1));
	return fmaxf(f, __shfl_xor_sync(ALL_LANES, f, 2));
}

__device__ static inline float row_sum(float f)
{
	f += __shfl_xor_sync(ALL_LANES, f, 1);
	return f + __shfl_xor_sync(ALL_LANES, f, 2);
}

/* Nothing seen yet: a maximum that is no number to subtract from. */
__device__ static inline float base_of(float max)
{
	return max == -INFINITY ? 0.0f : max;
}

/*
 * The factor that ends a row: of the sums so far, with maximum `max` in powers of 2, and the sink's
 * logit if there is one. A row that sees nothing is 0.
 */
__device__ static inline float end_factor(float max, float sum, const float *sink, int head)
{
	float last = sink ? sink[head] * LOG2_E : -INFINITY, top = fmaxf(max, last),
	      all = sum * exp2f(max - base_of(top)) +
		    (sink ? exp2f(last - base_of(top)) : 0.0f);

	return all == 0 ? 0.0f : exp2f(max - base_of(top)) / all;
}

#endif
