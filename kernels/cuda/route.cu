/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of experts: a warp a token, scores in shared memory. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "number.cuh"

#define WARPS 4	/* tokens that a block has at once */

struct route_job {
	struct view ids, weights, logits;
	const float *bias;
	int experts, k, groups, groups_kept;
	enum router_score score;
	float dropped, scale;
	bool weigh_choice, renormalise;
};

/* Scores in double, as ref: they are few, and near ties then fall alike. */
__device__ static inline double plain_score(double x, enum router_score kind)
{
	if (kind == SCORE_SIGMOID)
		return 1 / (1 + exp(-x));
	return sqrt(x > 20 ? x : log1p(exp(x)));
}

__device__ static inline double warp_sum_double(double f)
{
	for (int i = WARP / 2; i; i /= 2)
		f += __shfl_xor_sync(ALL_LANES, f, i);
	return f;
}

__device__ static void score_experts(const struct route_job &j, float *s, const float *logits,
				     int lane)
{
	float max = -INFINITY;
	double sum = 0;

	if (j.score != SCORE_SOFTMAX) {
		for (int e = lane; e < j.experts; e += WARP)
			s[e] = (float)plain_score(logits[e], j.score);
		return;
	}
	for (int e = lane; e < j.experts; e += WARP)
		max = logits[e] > max ? logits[e] : max;
	max = warp_max(max);
	for (int e = lane; e < j.experts; e += WARP)
		sum += exp((double)logits[e] - max);
	sum = warp_sum_double(sum);
	for (int e = lane; e < j.experts; e += WARP)
		s[e] = (float)(exp((double)logits[e] - max) / sum);
}

/* Whether a number comes before another: the larger, ties to the lower place, NaN last. */
__device__ static inline bool before(float a, int i, float b, int j)
{
	if (j < 0 || i < 0)
		return i >= 0;
	if (isnan(a) != isnan(b))
		return isnan(b);
	return a > b || (a == b && i < j) || (isnan(a) && i < j);
}

/* Place of the largest of v[0..n) that is not taken, in every lane. */
__device__ static int largest(const float *v, int n, const unsigned char *taken, int lane)
{
	float best = 0;
	int at = -1;

	for (int i = lane; i < n; i += WARP)
		if (!taken[i] && before(v[i], i, best, at)) {
			best = v[i];
			at = i;
		}
	for (int by = WARP / 2; by; by /= 2) {
		float other = __shfl_xor_sync(ALL_LANES, best, by);
		int there = __shfl_xor_sync(ALL_LANES, at, by);

		if (before(other, there, best, at)) {
			best = other;
			at = there;
		}
	}
	return at;
}

/* Marks the k largest. */
__device__ static void take_largest(const float *v, int n, int k, unsigned char *taken, int lane)
{
	for (int i = lane; i < n; i += WARP)
		taken[i] = 0;
	__syncwarp();
	for (int i = 0; i < k; i++) {
		int at = largest(v, n, taken, lane);

		if (!lane)
			taken[at] = 1;
		__syncwarp();
	}
}

__device__ static inline float sum_of_two_best(const float *c, int n)
{
	float first = -INFINITY, second = -INFINITY;

	for (int i = 0; i < n; i++) {
		if (c[i] > first) {
			second = first;
			first = c[i];
		} else if (c[i] > second) {
			second = c[i];
		}
	}
	return n > 1 ? first + second : first;
}

/* `best` and `kept` have room for a number a group. */
__device__ static void drop_groups(const struct route_job &j, float *c, float *best,
				   unsigned char *kept, int lane)
{
	int size = j.experts / j.groups;

	for (int g = lane; g < j.groups; g += WARP)
		best[g] = sum_of_two_best(c + g * size, size);
	__syncwarp();
	take_largest(best, j.groups, j.groups_kept, kept, lane);
	for (int e = lane; e < size * j.groups; e += WARP)
		if (!kept[e / size])
			c[e] = j.dropped;
	__syncwarp();
}

/* Ids in ascending order; the weights' sum runs in that order, too. */
__device__ static void save_choice(const struct route_job &j, int64_t t, const float *from,
				   const unsigned char *taken)
{
	int32_t *ids = (int32_t *)j.ids.p + t * j.ids.ld;
	float *weights = (float *)j.weights.p + t * j.weights.ld;
	double sum = 1e-20;
	int n = 0;

	for (int e = 0; e < j.experts; e++)
		if (taken[e]) {
			ids[n++] = e;
			sum += from[e];
		}
	for (int i = 0; i < j.k; i++) {
		double w = from[ids[i]];

		weights[i] = (float)((j.renormalise ? w / sum : w) * j.scale);
	}
}

/* Bytes of shared memory of a token: scores, choices, groups; two kinds of marks. */
static size_t room_of(const struct router *r)
{
	size_t e = (size_t)r->experts, g = (size_t)(r->groups > 1 ? r->groups : 0);

	return (e * 2 + g) * sizeof(float) + ((e + g + 15) & ~(size_t)15);
}

__global__ static void __launch_bounds__(WARPS *WARP, 4) route_tokens(struct route_job j, size_t room)
{
	CUDA_SHARED(shared);
	int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
	int groups = j.groups > 1 ? j.groups : 0;
	float *s = (float *)(shared + (size_t)warp * room), *c = s + j.experts,
	      *best = c + j.experts;
	unsigned char *taken = (unsigned char *)(best + groups), *kept = taken + j.experts;

	for (int64_t t = blockIdx.x * (int64_t)WARPS + warp; t < j.logits.rows;
	     t += gridDim.x * (int64_t)WARPS) {
		score_experts(j, s, (const float *)j.logits.p + t * j.logits.ld, lane);
		for (int e = lane; e < j.experts; e += WARP)
			c[e] = j.bias ? s[e] + j.bias[e] : s[e];
		__syncwarp();
		if (groups)
			drop_groups(j, c, best, kept, lane);
		take_largest(c, j.experts, j.k, taken, lane);
		if (!lane)
			save_choice(j, t, j.weigh_choice ? c : s, taken);
		__syncwarp();
	}
}

void cuda_route(struct device *d, struct tensor ids, struct tensor weights, struct tensor logits,
		const struct router *r)
{
	struct route_job j = {};
	size_t room = (room_of(r) + 15) & ~(size_t)15;

	if (!cuda_good(d) || !logits.rows)
		return;
	j.ids = view_of(ids);
	j.weights = view_of(weights);
	j.logits = view_of(logits);
	j.bias = r->bias ? cuda_vector(r->bias) : NULL;
	j.experts = r->experts;
	j.k = r->k;
	j.groups = r->groups;
	j.groups_kept = r->groups_kept;
	j.score = r->score;
	j.dropped = r->dropped;
	j.scale = r->scale;
	j.weigh_choice = r->weigh_choice;
	j.renormalise = r->renormalise;
	cuda_launch(d, cuda_of(d)->compute,
		    logits.rows < WARPS * 65535 ? cuda_blocks(logits.rows, WARPS) : 65535,
		    WARPS * WARP, WARPS * room, route_tokens, j, room);
}
