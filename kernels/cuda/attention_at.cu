/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over chosen keys. A block has one query, and 64 of the heads that share a kv head: the
 * chosen rows are fetched once for all of them.
 *
 * In bf16, 8 warps: warp w has 16 of the heads (w % 4) and half of the keys of a tile for the
 * scores, then half of the columns of the values. Scores pass through shared memory in between.
 * Columns of values beyond 512 are another block's. In F32 a warp has a head, and its lanes a key
 * each.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "tiles.cuh"

#define HEADS	   64	/* of a block */
#define WARPS	   8
#define VALUES	   512	/* most columns of a block */
#define PART	   (VALUES / 2 / 8)	/* runs of 8 columns of a warp */
#define TILE	   32	/* keys at a time */
#define SCORES	   (TILE + 1)

struct job {
	struct view out, q, k, v, keys;
	const float *sink;
	int heads, group, kv_heads;
	int width, value;
	float scale;
	int64_t begin, kv_begin, kv_count;	/* of the piece */
	struct cuda_fault *fault;
	enum dtype operand;
	/* tiles in shared memory: columns of keys, and of a block's values, in whole 64s */
	int key_cols, value_cols, parts;
	bool inside;		/* values are the first columns of keys: one tile serves both */
	bool fast_k, fast_v;
};

/*
 * How many keys a list names: 0 and a report where one is no key or they do not ascend, as
 * ref_keys_of. All threads of the block take part.
 */
__device__ static int64_t count_keys(const struct job &j, const int32_t *list)
{
	__shared__ unsigned first_end;	/* place of the first negative one */
	int64_t end;
	bool bad = false;

	__syncthreads();
	if (!threadIdx.x)
		first_end = (unsigned)j.keys.cols;
	__syncthreads();
	for (int64_t i = threadIdx.x; i < j.keys.cols; i += blockDim.x)
		if (list[i] < 0)
			atomicMin(&first_end, (unsigned)i);
	__syncthreads();
	end = first_end;
	for (int64_t i = threadIdx.x; i < end; i += blockDim.x)
		if (list[i] >= j.kv_count || (i && list[i] <= list[i - 1])) {
			report_fault(j.fault, FAULT_KEY, list[i], j.kv_count);
			bad = true;
		}
	return __syncthreads_or(bad) ? 0 : end;
}

/* What a block of either kind is about. */
struct task {
	int64_t token;
	int kv, head, heads;	/* first of its query heads, and their number */
	int part;		/* of the values' columns */
};

__device__ static inline struct task task_of(const struct job &j, int most)
{
	int blocks = (j.group + most - 1) / most;
	struct task t;

	t.token = j.begin + blockIdx.x;
	t.kv = (int)blockIdx.y / blocks;
	t.head = t.kv * j.group + (int)blockIdx.y % blocks * most;
	t.heads = min(most, (t.kv + 1) * j.group - t.head);
	t.part = (int)blockIdx.z;
	return t;
}

/* ---- tensor cores ---------------------------------------------------------------------------- */

/* 16 heads and 16 keys of a tile, in powers of 2, to shared memory. */
__device__ static void score_tile(const struct job &j, const uint16_t *q, const uint16_t *k,
				  float *scores, int n)
{
	int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, r0 = warp % 4 * 16,
	    k0 = warp / 4 * 16;
	float s[2][4] = {};

	for (int u = 0; u < j.key_cols / UNIT; u += 2) {
		uint32_t a[4], b[4];

		load_a(a, q, r0, u, j.key_cols);
		load_b(b, k, k0, u, j.key_cols);
		mma_bf16(s[0], a, b);
		mma_bf16(s[1], a, b + 2);
	}
	for (int m = 0; m < 2; m++)
		for (int i = 0; i < 4; i++) {
			int key = k0 + m * 8 + 2 * (lane % 4) + i % 2;

			scores[(r0 + lane / 4 + i / 2 * 8) * SCORES + key] =
				key < n ? s[m][i] * j.scale * LOG2_E : -INFINITY;
		}
}

/* Of a lane's two heads the new maximum and sum, and how what was before fades. */
__device__ static inline void turn_scores(float *scores, float max[2], float sum[2], float fade[2],
					  uint32_t a[TILE / 16][4])
{
	int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP,
	    r = warp % 4 * 16 + lane / 4, c = 2 * (lane % 4);

	for (int h = 0; h < 2; h++) {
		const float *s = scores + (r + 8 * h) * SCORES;
		float top = max[h], base;

		for (int m = 0; m < TILE / 8; m++)
			top = fmaxf(top, fmaxf(s[m * 8 + c], s[m * 8 + c + 1]));
		top = row_max(top);
		base = base_of(top);
		fade[h] = exp2f(max[h] - base);
		max[h] = top;
		sum[h] *= fade[h];
		for (int m = 0; m < TILE / 8; m++) {
			float x = exp2f(s[m * 8 + c] - base), y = exp2f(s[m * 8 + c + 1] - base);

			sum[h] += x + y;
			a[m / 2][m % 2 * 2 + h] = pack_bf16(x, y);
		}
	}
}

__device__ static inline void add_part(float o[PART][4], const uint32_t a[TILE / 16][4],
				       const float fade[2], const uint16_t *v, int u0, int width)
{
#pragma unroll
	for (int n = 0; n < PART; n += 2) {
		for (int i = 0; i < 4; i++) {
			o[n][i] *= fade[i / 2];
			o[n + 1][i] *= fade[i / 2];
		}
		if (u0 + n >= width / UNIT)
			continue;
		for (int k = 0; k < TILE / 16; k++) {
			uint32_t b[4];

			load_b_across(b, v, k * 16, u0 + n, width);
			mma_bf16(o[n], a[k], b);
			mma_bf16(o[n + 1], a[k], b + 2);
		}
	}
}

__device__ static void save_heads(const struct job &j, const struct task &t, float o[PART][4],
				  const float max[2], const float sum[2], int col)
{
	int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
	int64_t end = (int64_t)(t.part + 1) * VALUES < j.value ? (t.part + 1) * VALUES : j.value;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		int r = warp % 4 * 16 + lane / 4 + 8 * h;
		float f = end_factor(max[h], row_sum(sum[h]), j.sink,
				     t.head + (r < t.heads ? r : 0));

		for (int n = 0; n < PART; n++)
			for (int i = 0; i < 2; i++) {
				int64_t c = col + n * 8 + 2 * (lane % 4) + i;

				if (r < t.heads && c < end)
					view_set(j.out, t.token,
						 (int64_t)(t.head + r) * j.value + c,
						 o[n][2 * h + i] * f);
			}
	}
}

/* Queries lie head by head in one row of q: each is a row of a tile here. */
__device__ static void load_heads(const struct job &j, const struct task &t, uint16_t *q)
{
	int units = j.key_cols / UNIT;

	for (int i = (int)threadIdx.x; i < HEADS * units; i += WARPS * WARP) {
		int r = i / units, u = i % units;
		const struct strip s = { j.q, (int64_t)(t.head + r) * j.width, j.width, false };

		load_unit(q, r, u, j.key_cols, s, r < t.heads ? t.token : -1);
	}
}

__device__ static void load_rows(const struct job &j, const struct task &t, uint16_t *k,
				 uint16_t *v, const int32_t *list, int n)
{
	const struct strip sk = { j.k, (int64_t)t.kv * j.width, j.width, j.fast_k },
			   sv = { j.v, (int64_t)t.kv * j.value + t.part * VALUES,
				  min(VALUES, j.value - t.part * VALUES), j.fast_v };

	load_listed(k, TILE, j.key_cols, sk, list, n, j.kv_begin);
	if (!j.inside)
		load_listed(v, TILE, j.value_cols, sv, list, n, j.kv_begin);
	copy_async_commit();
}

__global__ static void __launch_bounds__(WARPS *WARP) attend_chosen(struct job j)
{
	CUDA_SHARED(shared);
	const struct task t = task_of(j, HEADS);
	const int32_t *list = (const int32_t *)j.keys.p + t.token * j.keys.ld;
	int buffer = TILE * (j.key_cols + (j.inside ? 0 : j.value_cols)),
	    u0 = (int)threadIdx.x / WARP / 4 * PART, width = j.inside ? j.key_cols : j.value_cols,
	    shift = j.inside ? t.part * VALUES / UNIT : 0;
	uint16_t *q = (uint16_t *)shared, *rows = q + HEADS * j.key_cols;
	float *scores = (float *)(rows + 2 * buffer), o[PART][4], max[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 };
	int64_t n = count_keys(j, list);

	for (int i = 0; i < PART; i++)
		for (int c = 0; c < 4; c++)
			o[i][c] = 0;
	load_heads(j, t, q);
	load_rows(j, t, rows, rows + TILE * j.key_cols, list, (int)min(n, (int64_t)TILE));
	for (int64_t i = 0; i < n; i += TILE) {
		uint16_t *k = rows + i / TILE % 2 * buffer,
			 *next = rows + (i / TILE + 1) % 2 * buffer;
		int64_t left = n - i - TILE;
		uint32_t a[TILE / 16][4];
		float fade[2];

		/* into the buffer that the round before has used */
		load_rows(j, t, next, next + TILE * j.key_cols, list + i + TILE,
			  left < 0 ? 0 : (int)min(left, (int64_t)TILE));
		copy_async_wait<1>();
		__syncthreads();
		score_tile(j, q, k, scores, (int)min(n - i, (int64_t)TILE));
		__syncthreads();
		turn_scores(scores, max, sum, fade, a);
		add_part(o, a, fade, j.inside ? k : k + TILE * j.key_cols, shift + u0, width);
		__syncthreads();
	}
	copy_async_wait<0>();
	save_heads(j, t, o, max, sum, t.part * VALUES + u0 * UNIT);
}

/* ---- any number ------------------------------------------------------------------------------ */

#define PLAIN_PARTS 16	/* columns of a lane: 512 of a block */

/* A warp a head; a tile of WARP rows of keys, then of values, as F32, a word apart from 32s. */
__global__ static void __launch_bounds__(WARPS *WARP) attend_chosen_plainly(struct job j)
{
	CUDA_SHARED(shared);
	const struct task t = task_of(j, WARPS);
	const int32_t *list = (const int32_t *)j.keys.p + t.token * j.keys.ld;
	int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP,
	    pitch = j.width + 1 - j.width % 2, first = t.part * VALUES,
	    cols = min(VALUES, j.value - first);
	float *q = (float *)shared, *k = q + WARPS * j.width, *v = k + WARP * pitch;
	float o[PLAIN_PARTS], max = -INFINITY, sum = 0;
	int64_t all = count_keys(j, list);

	for (int i = 0; i < PLAIN_PARTS; i++)
		o[i] = 0;
	for (int i = (int)threadIdx.x; i < t.heads * j.width; i += WARPS * WARP)
		q[i] = round_operand(view_get(j.q, t.token, (int64_t)t.head * j.width + i),
				     j.operand);
	for (int64_t at = 0; at < all; at += WARP) {
		int n = (int)min(all - at, (int64_t)WARP);
		float s = 0, top, base, fade, p;

		__syncthreads();
		for (int i = (int)threadIdx.x; i < n * j.width; i += WARPS * WARP)
			k[i / j.width * pitch + i % j.width] = round_operand(
				view_get(j.k, j.kv_begin + list[at + i / j.width],
					 (int64_t)t.kv * j.width + i % j.width),
				j.operand);
		for (int i = (int)threadIdx.x; i < n * cols; i += WARPS * WARP)
			v[i] = round_operand(view_get(j.v, j.kv_begin + list[at + i / cols],
						      (int64_t)t.kv * j.value + first + i % cols),
					     j.operand);
		__syncthreads();
		for (int c = 0; warp < t.heads && lane < n && c < j.width; c++)
			s += q[warp * j.width + c] * k[lane * pitch + c];
		s = lane < n ? s * j.scale * LOG2_E : -INFINITY;
		top = fmaxf(max, warp_max(s));
		base = base_of(top);
		fade = exp2f(max - base);
		max = top;
		p = exp2f(s - base);
		sum = sum * fade + p;
		for (int i = 0; i < PLAIN_PARTS; i++)
			o[i] *= fade;
		for (int l = 0; l < n; l++) {
			float weight = __shfl_sync(ALL_LANES, p, l);

			for (int i = 0; i < PLAIN_PARTS; i++)
				if (i * WARP + lane < cols)
					o[i] += weight * v[l * cols + i * WARP + lane];
		}
	}
	if (warp >= t.heads)
		return;
	sum = end_factor(max, warp_sum(sum), j.sink, t.head + warp);
	for (int i = 0; i < PLAIN_PARTS; i++)
		if (i * WARP + lane < cols)
			view_set(j.out, t.token,
				 (int64_t)(t.head + warp) * j.value + first + i * WARP + lane,
				 o[i] * sum);
}

/* ---- the verb -------------------------------------------------------------------------------- */

static int whole(int n)
{
	return (n + 63) / 64 * 64;
}

static size_t tensor_bytes(const struct job *j)
{
	return (size_t)(HEADS * j->key_cols +
			2 * TILE * (j->key_cols + (j->inside ? 0 : j->value_cols))) *
		       sizeof(uint16_t) +
	       HEADS * SCORES * sizeof(float);
}

static size_t plain_bytes(const struct job *j)
{
	int pitch = j->width + 1 - j->width % 2, cols = j->value < VALUES ? j->value : VALUES;

	return (size_t)(WARPS * j->width + WARP * (pitch + cols)) * sizeof(float);
}

static void start(struct device *d, struct job *j, const struct piece *p)
{
	bool plain = j->operand == DT_F32;
	int most = plain ? WARPS : HEADS;
	size_t shared = plain ? plain_bytes(j) : tensor_bytes(j);
	dim3 grid((unsigned)p->count,
		  (unsigned)(j->kv_heads * ((j->group + most - 1) / most)), (unsigned)j->parts);

	if (shared > cuda_of(d)->shared_most) {
		err_refuse(&d->err, "attention heads of %d and %d are wider than CUDA kernels take",
			   j->width, j->value);
		return;
	}
	j->begin = p->begin;
	j->kv_begin = p->kv_begin;
	j->kv_count = p->kv_count;
	cuda_launch(d, cuda_of(d)->compute, grid, WARPS * WARP, shared,
		    plain ? attend_chosen_plainly : attend_chosen, *j);
}

void cuda_attention_at(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		       struct tensor v, struct tensor keys, const struct attention *a,
		       const struct piece *pieces, int n)
{
	struct job j = {};

	if (!cuda_good(d) || !out.rows)
		return;
	j.out = view_of(out);
	j.q = view_of(q);
	j.k = view_of(k);
	j.v = view_of(v);
	j.keys = view_of(keys);
	j.sink = a->sink ? cuda_vector(a->sink) : NULL;
	j.heads = a->heads;
	j.kv_heads = a->kv_heads;
	j.group = a->heads / a->kv_heads;
	j.width = a->width;
	j.value = a->value_width;
	j.scale = a->scale;
	j.fault = cuda_of(d)->fault;
	j.operand = d->compute;
	j.key_cols = whole(a->width);
	j.value_cols = whole(a->value_width < VALUES ? a->value_width : VALUES);
	j.parts = (a->value_width + VALUES - 1) / VALUES;
	j.inside = a->kv_heads == 1 && v.p == k.p && v.ld == k.ld && v.dtype == k.dtype &&
		   a->value_width <= a->width;
	j.fast_k = units_of(k, a->width);
	j.fast_v = units_of(v, a->value_width);
	for (const struct piece *p = pieces; p < pieces + n; p++)
		if (p->count)
			start(d, &j, p);
}
