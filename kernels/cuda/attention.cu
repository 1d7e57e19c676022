/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over the keys of a row, never more than a tile of scores at a time.
 *
 * In bf16 (heads up to 256 wide) a block has 16 queries of one head a warp, and goes through the
 * keys by tiles of 64 (32 where heads are wide and registers few): scores by mma, the softmax's maximum and sum in registers, probabilities
 * from the scores' registers straight into the second product. Keys of the next tile arrive while
 * the values of this one are used, values while scores are made (the scheme of FlashAttention-2,
 * arXiv 2307.08691). In F32, and for wider heads, a warp has a query, and its lanes a key each.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>

#include "tiles.cuh"

extern "C" {
#include "mem.h"
}

/* Some queries of a piece. */
struct item {
	int64_t token;		/* of q and out */
	int64_t position;	/* of the first */
	int64_t key;		/* token of k and v that is position 0 */
	int64_t keys;		/* that exist */
	int n, pad;
};

struct job {
	struct view out, q, k, v;
	const struct item *item;
	const float *sink;
	int heads, group;	/* query heads; of them to a kv head */
	int width, value;
	float scale;
	int64_t window;		/* 0 = none */
	bool fast_q, fast_k, fast_v;
};

/* First key that some query of an item may see, down to a whole tile; the last one and one. */
__device__ static inline int64_t first_key(const struct job &j, const struct item &it, int tile)
{
	int64_t first = j.window ? it.position - j.window + 1 : 0;

	return first > 0 ? first / tile * tile : 0;
}

__device__ static inline int64_t end_key(const struct item &it)
{
	int64_t end = it.position + it.n;

	return end < it.keys ? end : it.keys;
}

__device__ static inline bool is_seen(const struct job &j, const struct item &it, int query,
				      int64_t key)
{
	int64_t back = it.position + query - key;

	return back >= 0 && key < it.keys && (!j.window || back < j.window);
}

/* ---- tensor cores ---------------------------------------------------------------------------- */

/* Scores of 16 queries and a tile of keys, in powers of 2: four numbers for every 8 keys. */
template <int width, int keys>
__device__ static inline void make_scores(float s[keys / 8][4], const uint16_t *q, int r0,
					  const uint16_t *k, float scale)
{
	for (int n = 0; n < keys / 8; n++)
		for (int i = 0; i < 4; i++)
			s[n][i] = 0;
#pragma unroll
	for (int u = 0; u < width / UNIT; u += 2) {
		uint32_t a[4];

		load_a(a, q, r0, u, width);
#pragma unroll
		for (int n = 0; n < keys / 8; n += 2) {
			uint32_t b[4];

			load_b(b, k, n * 8, u, width);
			mma_bf16(s[n], a, b);
			mma_bf16(s[n + 1], a, b + 2);
		}
	}
#pragma unroll
	for (int n = 0; n < keys / 8; n++)
		for (int i = 0; i < 4; i++)
			s[n][i] *= scale;
}

/* What a lane's two queries do not see does not count. */
template <int keys>
__device__ static inline void hide(const struct job &j, const struct item &it, int query,
				   int64_t key, float s[keys / 8][4])
{
	int c = 2 * ((int)threadIdx.x % 4);

#pragma unroll
	for (int n = 0; n < keys / 8; n++)
		for (int i = 0; i < 4; i++)
			if (!is_seen(j, it, query + i / 2 * 8, key + n * 8 + c + i % 2))
				s[n][i] = -INFINITY;
}

/* Scores become weights below the new maximum; what was summed before fades. */
template <int value, int keys>
__device__ static inline void soften(float s[keys / 8][4], float o[value / 8][4], float max[2],
				     float sum[2])
{
#pragma unroll
	for (int h = 0; h < 2; h++) {
		float top = max[h], base, fade, part = 0;

		for (int n = 0; n < keys / 8; n++)
			top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
		top = row_max(top);
		base = base_of(top);
		fade = exp2f(max[h] - base);
		max[h] = top;
		for (int n = 0; n < keys / 8; n++)
			for (int i = 2 * h; i < 2 * h + 2; i++) {
				s[n][i] = exp2f(s[n][i] - base);
				part += s[n][i];
			}
		sum[h] = sum[h] * fade + part;
		for (int n = 0; n < value / 8; n++) {
			o[n][2 * h] *= fade;
			o[n][2 * h + 1] *= fade;
		}
	}
}

template <int value, int keys>
__device__ static inline void add_values(float o[value / 8][4], const float s[keys / 8][4],
					 const uint16_t *v)
{
#pragma unroll
	for (int k = 0; k < keys / 16; k++) {
		uint32_t a[4] = { pack_bf16(s[2 * k][0], s[2 * k][1]),
				  pack_bf16(s[2 * k][2], s[2 * k][3]),
				  pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]),
				  pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3]) };

#pragma unroll
		for (int n = 0; n < value / 8; n += 2) {
			uint32_t b[4];

			load_b_across(b, v, k * 16, n, value);
			mma_bf16(o[n], a, b);
			mma_bf16(o[n + 1], a, b + 2);
		}
	}
}

/* Whether what this thread has loaded of a tile of values holds a number that is not finite. */
__device__ static inline bool has_odd(const uint16_t *v, int rows, int width)
{
	int units = width / UNIT;
	bool odd = false;

	for (int i = (int)threadIdx.x; i < rows * units; i += (int)blockDim.x)
		for (int c = 0; c < UNIT; c++)
			odd |= (v[tile_at(i / units, i % units, width) + c] & 0x7f80) == 0x7f80;
	return odd;
}

/* As add_values where NaN or infinities must not reach, times 0, who does not see them. */
template <int value, int keys>
__device__ static void add_values_seen(float o[value / 8][4], const float s[keys / 8][4],
				       const uint16_t *v, const struct job &j,
				       const struct item &it, int query, int64_t key)
{
	int lane = (int)threadIdx.x % WARP, c = 2 * (lane % 4);

#pragma unroll
	for (int m = 0; m < keys / 8; m++)
#pragma unroll 1
		for (int k = 0; k < 8; k++)
			for (int h = 0; h < 2; h++) {
				float p = k % 2 ? s[m][2 * h + 1] : s[m][2 * h];

				p = __shfl_sync(ALL_LANES, p, lane / 4 * 4 + k / 2);
				if (!is_seen(j, it, query + 8 * h, key + 8 * m + k))
					continue;
				p = bf16_to_float(float_to_bf16(p));
#pragma unroll
				for (int n = 0; n < value / 8; n++)
					for (int i = 0; i < 2; i++)
						o[n][2 * h + i] +=
							p * bf16_to_float(v[tile_at(8 * m + k, n,
										    value) +
									    c + i]);
			}
}

template <int value>
__device__ static inline void save_queries(const struct job &j, const struct item &it, int head,
					   int query, const float o[value / 8][4],
					   const float max[2], const float sum[2])
{
	int c = 2 * ((int)threadIdx.x % 4);

#pragma unroll
	for (int h = 0; h < 2; h++) {
		float f = end_factor(max[h], row_sum(sum[h]), j.sink, head);
		int64_t row = it.token + query + 8 * h;

		for (int n = 0; n < value / 8; n++)
			for (int i = 0; i < 2; i++)
				if (query + 8 * h < it.n && n * 8 + c + i < j.value)
					view_set(j.out, row,
						 (int64_t)head * j.value + n * 8 + c + i,
						 o[n][2 * h + i] * f);
	}
}

template <int width, int value, int keys, int warps>
__global__ static void __launch_bounds__(warps *WARP, width > 64 ? 8 / warps : 3)
	attend(struct job j)
{
	CUDA_SHARED(shared);
	uint16_t *q = (uint16_t *)shared, *k = q + warps * 16 * width, *v = k + keys * width;
	const struct item it = j.item[blockIdx.x];
	int head = (int)blockIdx.y, kv = head / j.group, warp = (int)threadIdx.x / WARP,
	    query = warp * 16 + (int)threadIdx.x % WARP / 4;
	const struct strip sq = { j.q, (int64_t)head * j.width, j.width, j.fast_q },
			   sk = { j.k, (int64_t)kv * j.width, j.width, j.fast_k },
			   sv = { j.v, (int64_t)kv * j.value, j.value, j.fast_v };
	int64_t end = end_key(it), key = first_key(j, it, keys);
	bool edge, odd;
	float s[keys / 8][4], o[value / 8][4], max[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 };

	for (int n = 0; n < value / 8; n++)
		for (int i = 0; i < 4; i++)
			o[n][i] = 0;
	load_tile(q, warps * 16, width, sq, it.token, it.n);
	load_tile(k, keys, width, sk, it.key + key, end - key);
	copy_async_commit();
	for (; key < end; key += keys) {
		copy_async_wait<0>();
		__syncthreads();	/* the keys are there, and the values before are used */
		load_tile(v, keys, value, sv, it.key + key, end - key);
		copy_async_commit();
		make_scores<width, keys>(s, q, warp * 16, k, j.scale * LOG2_E);
		/* all queries see all of a tile, but of those at the ends */
		edge = key + keys > it.position + 1 || key + keys > it.keys ||
		       (j.window && it.position + it.n - 1 - key >= j.window);
		if (edge)
			hide<keys>(j, it, query, key, s);
		soften<value, keys>(s, o, max, sum);
		copy_async_wait<0>();
		/* the values are there, and the keys are used */
		odd = __syncthreads_or(edge && has_odd(v, keys, value));
		if (key + keys < end)
			load_tile(k, keys, width, sk, it.key + key + keys, end - key - keys);
		copy_async_commit();
		if (odd)
			add_values_seen<value, keys>(o, s, v, j, it, query, key);
		else
			add_values<value, keys>(o, s, v);
	}
	copy_async_wait<0>();
	save_queries<value>(j, it, head, query, o, max, sum);
}

/* ---- any number, any width ------------------------------------------------------------------- */

#define PLAIN_WARPS 8

/*
 * A query a warp. Keys and values of a tile of 32 lie in shared memory as F32, keys one word apart
 * from whole 32s: lanes read different keys.
 */
template <int parts>
__global__ static void __launch_bounds__(PLAIN_WARPS *WARP) attend_plainly(struct job j,
									   enum dtype operand)
{
	CUDA_SHARED(shared);
	int head = (int)blockIdx.y, kv = head / j.group, warp = (int)threadIdx.x / WARP,
	    lane = (int)threadIdx.x % WARP, pitch = j.width + 1 - j.width % 2;
	float *q = (float *)shared, *k = q + PLAIN_WARPS * j.width, *v = k + WARP * pitch;
	const struct item it = j.item[blockIdx.x];
	int64_t end = end_key(it);
	float o[parts], max = -INFINITY, sum = 0;

	for (int i = 0; i < parts; i++)
		o[i] = 0;
	for (int i = (int)threadIdx.x; i < PLAIN_WARPS * j.width; i += PLAIN_WARPS * WARP)
		q[i] = i / j.width < it.n
			       ? round_operand(view_get(j.q, it.token + i / j.width,
							(int64_t)head * j.width + i % j.width),
					       operand)
			       : 0;
	for (int64_t key = first_key(j, it, WARP); key < end; key += WARP) {
		int n = end - key < WARP ? (int)(end - key) : WARP;
		float s = 0, top, base, fade, p;

		__syncthreads();
		for (int i = (int)threadIdx.x; i < n * j.width; i += PLAIN_WARPS * WARP)
			k[i / j.width * pitch + i % j.width] =
				round_operand(view_get(j.k, it.key + key + i / j.width,
						       (int64_t)kv * j.width + i % j.width),
					      operand);
		for (int i = (int)threadIdx.x; i < n * j.value; i += PLAIN_WARPS * WARP)
			v[i] = round_operand(view_get(j.v, it.key + key + i / j.value,
						      (int64_t)kv * j.value + i % j.value),
					     operand);
		__syncthreads();
		for (int c = 0; lane < n && c < j.width; c++)
			s += q[warp * j.width + c] * k[lane * pitch + c];
		s = lane < n && warp < it.n && is_seen(j, it, warp, key + lane)
			    ? s * j.scale * LOG2_E
			    : -INFINITY;
		top = fmaxf(max, warp_max(s));
		base = base_of(top);
		fade = exp2f(max - base);
		max = top;
		p = exp2f(s - base);
		sum = sum * fade + p;
		for (int i = 0; i < parts; i++)
			o[i] *= fade;
		for (int l = 0; l < n; l++) {
			float weight = __shfl_sync(ALL_LANES, p, l);
			/* 0 times what is not finite would reach who does not see it */
			bool seen = warp < it.n && is_seen(j, it, warp, key + l);

			for (int i = 0; seen && i < parts; i++)
				if (i * WARP + lane < j.value)
					o[i] += weight * v[l * j.value + i * WARP + lane];
		}
	}
	sum = end_factor(max, warp_sum(sum), j.sink, head);
	for (int i = 0; i < parts; i++)
		if (warp < it.n && i * WARP + lane < j.value)
			view_set(j.out, it.token + warp,
				 (int64_t)head * j.value + i * WARP + lane, o[i] * sum);
}

/* ---- the work -------------------------------------------------------------------------------- */

/* How a head's shape is run: queries of a block, its threads and shared memory, the kernel. */
struct form {
	int queries;
	unsigned threads;
	size_t shared;
	void (*kernel)(struct job);
	void (*plain)(struct job, enum dtype);
};

template <int width, int value, int keys, int warps>
static struct form tensor_form(void)
{
	struct form f = {};

	f.queries = warps * 16;
	f.threads = warps * WARP;
	f.shared = (size_t)(warps * 16 * width + keys * (width + value)) * sizeof(uint16_t);
	f.kernel = attend<width, value, keys, warps>;
	return f;
}

static struct form plain_form(const struct attention *a)
{
	size_t pitch = (size_t)a->width + 1 - (size_t)a->width % 2;
	struct form f = {};

	f.queries = PLAIN_WARPS;
	f.threads = PLAIN_WARPS * WARP;
	f.shared = (PLAIN_WARPS * (size_t)a->width + WARP * (pitch + (size_t)a->value_width)) *
		   sizeof(float);
	f.plain = a->value_width <= 64	  ? attend_plainly<2>
		  : a->value_width <= 128 ? attend_plainly<4>
		  : a->value_width <= 256 ? attend_plainly<8>
					  : attend_plainly<32>;
	return f;
}

/* Heads that lie between are padded with zeros; a block's memory fits two on a multiprocessor. */
static struct form choose_form(const struct device *d, const struct attention *a)
{
	int w = a->width, v = a->value_width;

	if (d->compute != DT_BF16 || w > 256 || v > 256)
		return plain_form(a);
	if (w <= 64 && v <= 64)
		return tensor_form<64, 64, 64, 4>();
	if (w <= 128 && v <= 128)
		return tensor_form<128, 128, 64, 8>();
	if (w <= 192 && v <= 128)
		return tensor_form<192, 128, 64, 4>();
	return tensor_form<256, 256, 32, 4>();
}

static void start(struct device *d, struct job *j, const struct form *f, const struct item *items,
		  int64_t n)
{
	j->item = (const struct item *)cuda_arguments(d, items, (size_t)n * sizeof *items);
	if (!j->item)
		return;
	if (f->kernel)
		cuda_launch(d, cuda_of(d)->compute, dim3((unsigned)n, (unsigned)j->heads),
			    f->threads, f->shared, f->kernel, *j);
	else
		cuda_launch(d, cuda_of(d)->compute, dim3((unsigned)n, (unsigned)j->heads),
			    f->threads, f->shared, f->plain, *j, d->compute);
}

/* Blocks start in the order of their items: of a piece the last queries, which see most, first. */
static void start_pieces(struct device *d, struct job *j, const struct form *f,
			 const struct piece *pieces, int n)
{
	int64_t most = (int64_t)(CUDA_ARGUMENTS / sizeof(struct item)), count = 0;
	struct item *item = (struct item *)mem_calloc((size_t)most, sizeof *item, &d->err);

	for (const struct piece *p = pieces; item && p < pieces + n; p++)
		for (int64_t i = (p->count - 1) / f->queries; p->count && i >= 0; i--) {
			int64_t at = i * f->queries, left = p->count - at;

			item[count++] = { p->begin + at, p->first + at, p->kv_begin, p->kv_count,
					  left < f->queries ? (int)left : f->queries, 0 };
			if (count < most)
				continue;
			start(d, j, f, item, count);
			count = 0;
		}
	if (count)
		start(d, j, f, item, count);
	free(item);
}

void cuda_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		    struct tensor v, const struct attention *a, const struct piece *pieces, int n)
{
	struct form f = choose_form(d, a);
	struct job j = {};

	if (!cuda_good(d) || !out.rows)
		return;
	if (f.shared > cuda_of(d)->shared_most || a->value_width > 1024) {
		err_refuse(&d->err, "attention heads of %d and %d are wider than CUDA kernels take",
			   a->width, a->value_width);
		return;
	}
	j.out = view_of(out);
	j.q = view_of(q);
	j.k = view_of(k);
	j.v = view_of(v);
	j.sink = a->sink ? cuda_vector(a->sink) : NULL;
	j.heads = a->heads;
	j.group = a->heads / a->kv_heads;
	j.width = a->width;
	j.value = a->value_width;
	j.scale = a->scale;
	j.window = a->window;
	j.fast_q = units_of(q, a->width);
	j.fast_k = units_of(k, a->width);
	j.fast_v = units_of(v, a->value_width);
	start_pieces(d, &j, &f, pieces, n);
}
