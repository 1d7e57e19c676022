/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The choice of keys. Scores of as many queries as the workspace holds, all their keys beside each
 * other; then for each query, by a block of its own, the score of the last key that is taken, digit
 * by digit, and the keys in the order of their positions.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "tiles.cuh"

#define WARPS	4	/* queries that share a tile of keys; a warp goes on to further ones */
#define ROUNDS	8	/* queries of a warp */
#define THREADS 256
#define DIGITS	256	/* values of a digit */

struct job {
	struct view keys, q, k, w;
	float *scores;		/* [queries, pitch] */
	int64_t pitch;
	int64_t begin, first;	/* token and position of the first query */
	int64_t queries;
	int64_t kv_begin, kv_count;
	int heads, width, cols;	/* cols: width in whole 64s */
	enum dtype operand;
	bool fast_k;
};

/* Keys that query i sees. */
__device__ static inline int64_t seen_by(const struct job &j, int64_t i)
{
	int64_t end = j.first + i + 1;

	return end < j.kv_count ? end : j.kv_count;
}

/* NaN is the smallest. */
__device__ static inline float as_score(float f)
{
	return isnan(f) ? -INFINITY : f;
}

/* ---- scores ---------------------------------------------------------------------------------- */

/* An A fragment of 16 heads of a query, straight from its row of q. */
__device__ static inline void load_heads(uint32_t a[4], const struct job &j, int64_t token, int h0,
					 int c0)
{
	int lane = (int)threadIdx.x % WARP;

	for (int i = 0; i < 4; i++) {
		int h = h0 + lane / 4 + i % 2 * 8, c = c0 + 2 * (lane % 4) + i / 2 * 8;
		const struct strip s = { j.q, (int64_t)h * j.width, h < j.heads ? j.width : 0,
					 false };

		a[i] = two_numbers(s, token, c);
	}
}

/* sums[n] += over heads of weight * max(score, 0), for a lane's two keys of every 8. */
__device__ static void score_heads(const struct job &j, const uint16_t *k, int64_t token, int h0,
				   float sums[KEYS / 8][2])
{
	int lane = (int)threadIdx.x % WARP;
	float s[KEYS / 8][4], weight[2];

	for (int i = 0; i < 2; i++) {
		int h = h0 + lane / 4 + 8 * i;

		weight[i] = h < j.heads ? view_get(j.w, token, h) : 0;
	}
	for (int n = 0; n < KEYS / 8; n++)
		for (int i = 0; i < 4; i++)
			s[n][i] = 0;
	for (int u = 0; u < j.cols / UNIT; u += 2) {
		uint32_t a[4];

		load_heads(a, j, token, h0, u * UNIT);
#pragma unroll
		for (int n = 0; n < KEYS / 8; n += 2) {
			uint32_t b[4];

			load_b(b, k, n * 8, u, j.cols);
			mma_bf16(s[n], a, b);
			mma_bf16(s[n + 1], a, b + 2);
		}
	}
#pragma unroll
	for (int n = 0; n < KEYS / 8; n++)
		for (int i = 0; i < 4; i++)
			if (h0 + lane / 4 + i / 2 * 8 < j.heads)
				sums[n][i % 2] += weight[i / 2] * (s[n][i] > 0 ? s[n][i] : 0.0f);
}

/* A tile of keys a block along x, WARPS * ROUNDS queries along y. */
__global__ static void __launch_bounds__(WARPS *WARP) score_keys(struct job j)
{
	CUDA_SHARED(shared);
	uint16_t *k = (uint16_t *)shared;
	int64_t key = blockIdx.x * (int64_t)KEYS, q0 = blockIdx.y * (int64_t)(WARPS * ROUNDS),
		last = min(q0 + WARPS * ROUNDS, j.queries) - 1;
	int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
	const struct strip s = { j.k, 0, j.width, j.fast_k };

	if (key >= seen_by(j, last))
		return;
	load_tile(k, KEYS, j.cols, s, j.kv_begin + key, j.kv_count - key);
	copy_async_commit();
	copy_async_wait<0>();
	__syncthreads();
	for (int64_t i = q0 + warp; i <= last; i += WARPS) {
		float sums[KEYS / 8][2];

		for (int n = 0; n < KEYS / 8; n++)
			sums[n][0] = sums[n][1] = 0;
		for (int h = 0; h < j.heads; h += 16)
			score_heads(j, k, j.begin + i, h, sums);
#pragma unroll
		for (int n = 0; n < KEYS / 8; n++)
			for (int c = 0; c < 2; c++) {
				float f = sums[n][c];
				int64_t at = key + n * 8 + 2 * (lane % 4) + c;

				for (int by = 4; by < WARP; by *= 2)
					f += __shfl_xor_sync(ALL_LANES, f, by);
				if (lane < 4 && at < j.kv_count)
					j.scores[i * j.pitch + at] = as_score(f);
			}
	}
}

/* In F32: a thread a key, a block a query. */
__global__ static void __launch_bounds__(THREADS) score_keys_plainly(struct job j)
{
	int64_t i = blockIdx.y, token = j.begin + i,
		key = blockIdx.x * (int64_t)THREADS + threadIdx.x;
	float sum = 0;

	if (key >= seen_by(j, i))
		return;
	for (int h = 0; h < j.heads; h++) {
		float dot = 0;

		for (int c = 0; c < j.width; c++)
			dot += round_operand(view_get(j.q, token, (int64_t)h * j.width + c),
					     j.operand) *
			       round_operand(view_get(j.k, j.kv_begin + key, c), j.operand);
		sum += view_get(j.w, token, h) * (dot > 0 ? dot : 0.0f);
	}
	j.scores[i * j.pitch + key] = as_score(sum);
}

/* ---- the choice ------------------------------------------------------------------------------ */

/* Bits of a number that is no NaN, in its order; both zeros are the same. */
__device__ static inline uint32_t ordered(float f)
{
	uint32_t u = __float_as_uint(f + 0.0f);

	return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/*
 * The take-th largest of n scores; *equal: how many of those that equal it are taken. A digit at a
 * time, counted among those that have the digits before in common with it.
 */
__device__ static uint32_t last_taken(const float *score, int64_t n, int64_t take, int64_t *equal)
{
	__shared__ unsigned count[DIGITS];
	__shared__ unsigned digit, left;
	uint32_t found = 0, mask = 0;

	for (int shift = 24; shift >= 0; shift -= 8) {
		for (int i = (int)threadIdx.x; i < DIGITS; i += THREADS)
			count[i] = 0;
		__syncthreads();
		for (int64_t i = threadIdx.x; i < n; i += THREADS) {
			uint32_t o = ordered(score[i]);

			if ((o & mask) == found)
				atomicAdd(&count[o >> shift & (DIGITS - 1)], 1u);
		}
		__syncthreads();
		if (!threadIdx.x) {
			unsigned k = (unsigned)take, at = DIGITS - 1;

			for (; count[at] < k; at--)
				k -= count[at];
			digit = at;
			left = k;
		}
		__syncthreads();
		found |= digit << shift;
		mask |= (uint32_t)(DIGITS - 1) << shift;
		take = left;
		__syncthreads();
	}
	*equal = take;
	return found;
}

/* How many threads before this one say yes, and in all; every thread of the block takes part. */
__device__ static int count_before(bool yes, int *all)
{
	__shared__ int of_warp[THREADS / WARP];
	int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, before = 0;
	unsigned votes = __ballot_sync(ALL_LANES, yes);

	__syncthreads();
	if (!lane)
		of_warp[warp] = __popc(votes);
	__syncthreads();
	*all = 0;
	for (int i = 0; i < THREADS / WARP; i++) {
		before += i < warp ? of_warp[i] : 0;
		*all += of_warp[i];
	}
	return before + __popc(votes & ((1u << lane) - 1));
}

__global__ static void __launch_bounds__(THREADS) take_keys(struct job j)
{
	int64_t i = blockIdx.x, n = seen_by(j, i), take = j.keys.cols, equal = 0, at = 0;
	int32_t *to = (int32_t *)j.keys.p + (j.begin + i) * j.keys.ld;
	const float *score = j.scores + i * j.pitch;
	uint32_t last;

	if (n <= take) {
		for (int64_t c = threadIdx.x; c < take; c += THREADS)
			to[c] = c < n ? (int32_t)c : -1;
		return;
	}
	last = last_taken(score, n, take, &equal);
	for (int64_t c0 = 0; c0 < n; c0 += THREADS) {
		int64_t c = c0 + threadIdx.x;
		uint32_t o = c < n ? ordered(score[c]) : 0;
		int same, taken, place = count_before(c < n && o == last, &same);
		bool mine = c < n && (o > last || (o == last && place < equal));

		equal -= min(equal, (int64_t)same);
		place = count_before(mine, &taken);
		if (mine)
			to[at + place] = (int32_t)c;
		at += taken;
	}
}

/* ---- the verb -------------------------------------------------------------------------------- */

/* Queries [at, at + n) of a piece. */
static void choose_some(struct device *d, struct job *j, const struct piece *p, int64_t at,
			int64_t n)
{
	cudaStream_t s = cuda_of(d)->compute;
	int64_t keys = p->first + at + n < p->kv_count ? p->first + at + n : p->kv_count;

	j->begin = p->begin + at;
	j->first = p->first + at;
	j->queries = n;
	if (keys > j->keys.cols && j->operand == DT_BF16)
		cuda_launch(d, s,
			    dim3(cuda_blocks(keys, KEYS), cuda_blocks(n, WARPS * ROUNDS)),
			    WARPS * WARP, KEYS * (size_t)j->cols * sizeof(uint16_t), score_keys,
			    *j);
	else if (keys > j->keys.cols)
		cuda_launch(d, s, dim3(cuda_blocks(keys, THREADS), (unsigned)n), THREADS, 0,
			    score_keys_plainly, *j);
	cuda_launch(d, s, (unsigned)n, THREADS, 0, take_keys, *j);
}

void cuda_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
		 struct tensor w, const struct piece *pieces, int n)
{
	struct job j = {};

	if (!cuda_good(d))
		return;
	j.keys = view_of(keys);
	j.q = view_of(q);
	j.k = view_of(k);
	j.w = view_of(w);
	j.scores = (float *)cuda_of(d)->work;
	j.heads = (int)w.cols;
	j.width = (int)k.cols;
	j.cols = (j.width + 63) / 64 * 64;
	j.operand = d->compute;
	j.fast_k = units_of(k, UNIT);
	for (const struct piece *p = pieces; p < pieces + n; p++) {
		int64_t most;

		j.pitch = p->kv_count;
		j.kv_begin = p->kv_begin;
		j.kv_count = p->kv_count;
		most = p->kv_count ? (int64_t)(CUDA_WORK / sizeof(float)) / p->kv_count : p->count;
		if (!most) {
			err_refuse(&d->err, "a row of %lld keys is longer than CUDA kernels take",
				   (long long)p->kv_count);
			return;
		}
		most = most < 65535 ? most : 65535;
		for (int64_t i = 0; i < p->count; i += most)
			choose_some(d, &j, p, i, p->count - i < most ? p->count - i : most);
	}
}
