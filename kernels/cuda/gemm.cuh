/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm: a tile of 128 x 128 sums of products of rows, by a block of 256 threads.
 *
 * Operands go through shared memory in steps of 64 bytes a row (32 numbers of BF16, 16 of F32), in
 * a ring of 4 steps: asynchronous copies of step s + 3 are under way while step s is multiplied.
 * Rows lie 80 bytes apart, so that 8 rows at the same place touch all 32 banks once: neither
 * ldmatrix nor the loads of F32 meet in a bank. 80 KiB a block leave room for two where a
 * multiprocessor has 164 KiB (8.0) or more, as do 128 registers a thread.
 *
 * BF16: 8 warps, 2 by 4; each makes 64 x 32 sums with mma.m16n8k16. A warp's rows are every other
 * run of 16, so that both halves have work where a tile is not full, and runs without rows are left
 * out. F32: each thread makes 8 x 8 sums with fma alone.
 *
 * A packed weight is expanded on its way: its codes are loaded before a step is multiplied and
 * written as operands after it.
 */
#ifndef DSPARK_CUDA_GEMM_CUH
#define DSPARK_CUDA_GEMM_CUH

#include "packed.cuh"

#define TILE		128
#define TILE_THREADS	256
#define TILE_STAGES	4
#define TILE_STEP	64	/* bytes of a row in a step */
#define TILE_PITCH	80
#define TILE_SIDE	(TILE * TILE_PITCH)
#define TILE_SHARED	((size_t)TILE_STAGES * 2 * TILE_SIDE)

template <typename T> __device__ static constexpr int step_numbers(void)
{
	return TILE_STEP / (int)sizeof(T);
}

/*
 * Rows of operands. Thread i brings 16 bytes, number i % 4 of a step, of rows i / 4 and 64 + i / 4.
 */
template <typename T> struct side {
	const T *row[2];	/* NULL = no such row: zeros */
	int64_t k_step;		/* from one number of a row to the next */
	bool whole;		/* rows begin on 16 bytes and have no gaps: asynchronous copies */
};

/* Global memory to name where nothing is read: an asynchronous copy wants such an address. */
__device__ static const uint4 nothing = {};

template <typename T>
__device__ static inline void bring(char *to, const struct side<T> &s, int k0, int k)
{
	constexpr int n = 16 / (int)sizeof(T);
	int at = k0 + (int)threadIdx.x % 4 * n;
	int left = k - at >= n ? n : k - at > 0 ? k - at : 0;

	to += threadIdx.x / 4 * TILE_PITCH + threadIdx.x % 4 * 16;
#pragma unroll
	for (int i = 0; i < 2; i++, to += TILE / 2 * TILE_PITCH) {
		int have = s.row[i] ? left : 0;

		if (s.whole) {
			copy_async(to, have ? (const void *)(s.row[i] + at) : &nothing,
				   have * (int)sizeof(T));
			continue;
		}
#pragma unroll 1
		for (int j = 0; j < n; j++)
			((T *)to)[j] = j < have ? s.row[i][(at + j) * s.k_step] : T(0);
	}
}

/* Rows of a packed weight. Thread i expands half i % 2 of a step of row i / 2. */
struct packed_side {
	const struct packed &q;
	const unsigned char *codes;	/* of the row; NULL = no such row: zeros */
	const unsigned char *scales;
};

struct codes {
	uint32_t c[4];
	float scale;
};

template <typename T>
__device__ static inline void fetch(struct codes *c, const struct packed_side &s, int k0,
				    int k)
{
	constexpr int n = step_numbers<T>() / 2;
	int at = k0 + (int)threadIdx.x % 2 * n;

	c->scale = 0;
	c->c[0] = c->c[1] = c->c[2] = c->c[3] = 0;
	if (!s.q.straight || !s.codes || at >= k)
		return;
	load_codes<n>(c->c, s.q, s.codes, at);
	c->scale = scale_number(s.q, s.scales, at / s.q.block_cols);
}

template <typename T>
__device__ static inline void put(char *to, const struct codes *c, const struct packed_side &s,
				  int k0, int k)
{
	constexpr int n = step_numbers<T>() / 2, each = 16 / (int)sizeof(T);
	int at = k0 + (int)threadIdx.x % 2 * n;

	to += threadIdx.x / 2 * TILE_PITCH + threadIdx.x % 2 * 32;
	if (s.q.straight) {
		float f[n];

		expand_codes<n>(f, c->c, c->scale, s.q.code);
		*(uint4 *)to = pack_operands(f, T());
		*(uint4 *)(to + 16) = pack_operands(f + each, T());
		return;
	}
#pragma unroll 1
	for (int j = 0; j < n; j++, at++)
		save_number(to, sizeof(T) == 2 ? DT_BF16 : DT_F32, j,
			    s.codes && at < k ? packed_number(s.q, s.codes, s.scales, at) : 0);
}

/* ---- one step -------------------------------------------------------------------------------- */

/* `live` runs of 16 rows of this warp's have rows. */
__device__ static inline void multiply(float acc[64], const char *a, const char *b, int live,
				       uint16_t)
{
	int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
	const char *ap = a + (warp % 2 * 16 + lane % 16) * TILE_PITCH + lane / 16 * 16;
	const char *bp = b + (warp / 2 * 32 + lane / 16 * 8 + lane % 8) * TILE_PITCH +
			 lane / 8 % 2 * 16;

	if (!live)
		return;
#pragma unroll
	for (int k = 0; k < 2; k++) {
		uint32_t y[8];

		load_matrix(y, bp + k * 32);
		load_matrix(y + 4, bp + 16 * TILE_PITCH + k * 32);
#pragma unroll
		for (int i = 0; i < 4; i++) {
			uint32_t x[4];

			if (i >= live)
				break;
			load_matrix(x, ap + i * 32 * TILE_PITCH + k * 32);
#pragma unroll
			for (int j = 0; j < 4; j++)
				mma_bf16(acc + (i * 4 + j) * 4, x, y + 2 * j);
		}
	}
}

__device__ static inline void multiply(float acc[64], const char *a, const char *b, int, float)
{
	const char *ap = a + threadIdx.x / 16 * TILE_PITCH, *bp = b + threadIdx.x % 16 * TILE_PITCH;

#pragma unroll 1
	for (int k = 0; k < TILE_STEP; k += 16) {
		float4 y[8];

#pragma unroll
		for (int j = 0; j < 8; j++)
			y[j] = *(const float4 *)(bp + j * 16 * TILE_PITCH + k);
#pragma unroll
		for (int i = 0; i < 8; i++) {
			float4 x = *(const float4 *)(ap + i * 16 * TILE_PITCH + k);

#pragma unroll
			for (int j = 0; j < 8; j++) {
				float *s = acc + i * 8 + j;

				*s = fmaf(x.x, y[j].x, *s);
				*s = fmaf(x.y, y[j].y, *s);
				*s = fmaf(x.z, y[j].z, *s);
				*s = fmaf(x.w, y[j].w, *s);
			}
		}
	}
}

/* ---- where a thread's 8 x 8 sums are in the tile --------------------------------------------- */

__device__ static inline int sum_row(int r, uint16_t)
{
	int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

	return (r / 2 * 2 + warp % 2) * 16 + r % 2 * 8 + lane / 4;
}

__device__ static inline int sum_col(int c, uint16_t)
{
	int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

	return warp / 2 * 32 + c / 2 * 8 + lane % 4 * 2 + c % 2;
}

__device__ static inline constexpr int sum_at(int r, int c, uint16_t)
{
	return (r / 2 * 4 + c / 2) * 4 + r % 2 * 2 + c % 2;
}

__device__ static inline int sum_row(int r, float) { return (int)threadIdx.x / 16 + 16 * r; }
__device__ static inline int sum_col(int c, float) { return (int)threadIdx.x % 16 + 16 * c; }
__device__ static inline constexpr int sum_at(int r, int c, float) { return r * 8 + c; }

/*
 * Gate and up rows of a weight lie in turn in a tile, in runs as long as a thread has both of:
 * which row of 2 I is row i of the tile whose first gate row is `first`; -1 where there is none.
 */
template <typename T> __device__ static inline int64_t gated_row(int64_t first, int i, int64_t half)
{
	constexpr int run = sizeof(T) == 2 ? 8 : 16;
	int64_t at = first + i / (2 * run) * run + i % run;

	return at >= half ? -1 : i / run % 2 ? half + at : at;
}

/* The column of a gate's sum among the 64 results of such a tile; `c` and its up's in a thread. */
template <typename T> __device__ static inline int gated_col(int col)
{
	constexpr int run = sizeof(T) == 2 ? 8 : 16;

	return col / (2 * run) * run + col % run;
}

template <typename T> __device__ static inline constexpr int gate_of(int i)
{
	return sizeof(T) == 2 ? i / 2 * 4 + i % 2 : i * 2;
}

template <typename T> __device__ static inline constexpr int up_of(int i)
{
	return sizeof(T) == 2 ? i / 2 * 4 + 2 + i % 2 : i * 2 + 1;
}

/* ---- a tile ---------------------------------------------------------------------------------- */

template <typename T>
__device__ static inline void bring_weight(char *to, const struct side<T> &s, struct codes *,
					   int k0, int k)
{
	bring<T>(to, s, k0, k);
}

template <typename T>
__device__ static inline void bring_weight(char *, const struct packed_side &s, struct codes *c,
					   int k0, int k)
{
	fetch<T>(c, s, k0, k);
}

template <typename T>
__device__ static inline void put_weight(char *, const struct side<T> &, const struct codes *,
					 int, int)
{
}

template <typename T>
__device__ static inline void put_weight(char *to, const struct packed_side &s,
					 const struct codes *c, int k0, int k)
{
	put<T>(to, c, s, k0, k);
}

/* acc = the sums over k of a tile of which the first `rows` rows are there. */
template <typename T, typename W>
__device__ static inline void tile_product(float acc[64], char *shared, const struct side<T> &x,
					   const W &w, int k, int rows)
{
	constexpr int step = step_numbers<T>();
	int steps = (k + step - 1) / step;
	int live = (rows + 31 - (int)threadIdx.x / WARP % 2 * 16) / 32;
	struct codes c = {};

#pragma unroll
	for (int i = 0; i < 64; i++)
		acc[i] = 0;
#pragma unroll 1
	for (int t = 0; t < TILE_STAGES - 1; t++) {
		char *to = shared + t * 2 * TILE_SIDE;

		if (t < steps) {
			bring<T>(to, x, t * step, k);
			bring_weight<T>(to + TILE_SIDE, w, &c, t * step, k);
			put_weight<T>(to + TILE_SIDE, w, &c, t * step, k);
		}
		copy_async_commit();
	}
#pragma unroll 1
	for (int t = 0; t < steps; t++) {
		int next = t + TILE_STAGES - 1;
		char *at = shared + t % TILE_STAGES * 2 * TILE_SIDE,
		     *to = shared + next % TILE_STAGES * 2 * TILE_SIDE;

		copy_async_wait<TILE_STAGES - 2>();
		__syncthreads();
		if (next < steps) {
			bring<T>(to, x, next * step, k);
			bring_weight<T>(to + TILE_SIDE, w, &c, next * step, k);
		}
		copy_async_commit();
		multiply(acc, at, at + TILE_SIDE, live, T());
		if (next < steps)
			put_weight<T>(to + TILE_SIDE, w, &c, next * step, k);
	}
	copy_async_wait<0>();
}

#endif
