/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routed experts. The slots of the chunk are sorted by expert and cut into tiles of TILE rows of
 * one expert; blocks of tiles go through four steps with all threads in each:
 *
 *	gather rows of x -> gate_up and activation -> down -> add to the tokens, in slot order
 *
 * A token's ids ascend and so do the experts of successive blocks: adding block by block is adding
 * in slot order. combine is the last step alone, on rows that came from elsewhere.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "mem.h"
#include "number.h"

#define TILE  TILE_ROWS(TILE_SMALL)
#define TILES 16 /* of a block, at least */

struct tile {
	int64_t index;       /* expert, counted from the first held */
	int64_t first, rows; /* of `order` */
};

struct job {
	struct device *d;
	struct tensor sum, x, ids, weights;
	const struct experts *ex;
	const struct packed *gate_up, *down;
	int64_t *order; /* slots t*k+s sorted by expert */
	/* [T*k] tile row of a slot: tile * TILE + row, -1 = expert not held */
	int64_t *where;
	struct tile *tile;
	int64_t tiles;
	int64_t *group, groups; /* [groups + 1] first tiles within the block, of one expert each */
	int64_t most;           /* tiles of a group */
	char *in, *act;         /* [block tiles, TILE, K] operands of gate_up, of down */
	float *out;             /* [block tiles, TILE, Hout] */
};

/* The held expert of a slot, counted from the first, or -1. */
static int64_t held(const struct job *j, int64_t slot)
{
	int64_t i = ref_id(j->ids, slot / j->ids.cols, slot % j->ids.cols) - j->ex->first;

	return i >= 0 && i < j->ex->count ? i : -1;
}

static int check_order(const struct job *j, struct err *e)
{
	for (int64_t t = 0; t < j->ids.rows; t++)
		for (int64_t s = 1; s < j->ids.cols; s++)
			if (ref_id(j->ids, t, s) < ref_id(j->ids, t, s - 1))
				return err_refuse(e, "expert ids of token %lld do not ascend",
						  (long long)t);
	return 0;
}

/* Counting sort of the slots by expert, then tiles. start has count + 1 zeroed elements. */
static void sort_slots(struct job *j, int64_t *start)
{
	int64_t slots = j->ids.rows * j->ids.cols, n = 0;

	for (int64_t i = 0; i < slots; i++)
		if (held(j, i) >= 0)
			start[held(j, i) + 1]++;
	for (int64_t x = 0; x < j->ex->count; x++) {
		for (int64_t i = 0; i < start[x + 1]; i += TILE) {
			int64_t left = start[x + 1] - i;

			j->tile[j->tiles++] = (struct tile){ x, n + i, left < TILE ? left : TILE };
		}
		n += start[x + 1];
		start[x + 1] = n;
	}
	for (int64_t i = 0; i < slots; i++)
		if (held(j, i) >= 0)
			j->order[start[held(j, i)]++] = i;
		else
			j->where[i] = -1;
	for (int64_t t = 0; t < j->tiles; t++)
		for (int64_t i = 0; i < j->tile[t].rows; i++)
			j->where[j->order[j->tile[t].first + i]] = t * TILE + i;
}

/* Row i of a tile of the block: its slot, or -1 below the last. */
static int64_t slot_of(const struct job *j, int64_t tile, int64_t i)
{
	return i < j->tile[tile].rows ? j->order[j->tile[tile].first + i] : -1;
}

static void gather_row(const struct job *j, int64_t tile, int64_t i, char *dst)
{
	int64_t slot = slot_of(j, tile, i);

	cpu_tile_row(j->gate_up, TILE_SMALL, dst, i,
		     slot < 0 ? NULL : ref_at(j->x, slot / j->ids.cols, 0), j->x.dtype,
		     slot < 0 ? 0 : j->x.cols);
}

/* The only addition of slots in this file: experts and combine give the same bits. */
static void add_slot(float *restrict sum, const float *restrict y, float weight, int64_t n)
{
	for (int64_t c = 0; c < n; c++)
		sum[c] += y[c] * weight;
}

static void add_token(const struct job *j, int64_t t, int64_t first, int64_t n)
{
	int64_t cols = j->sum.cols, k = j->ids.cols;
	float *sum = ref_at(j->sum, t, 0);

	for (int64_t s = 0; s < k; s++) {
		int64_t row = j->where[t * k + s] - first * TILE;
		float weight = j->ex->weight_after_down ? ref_get(j->weights, t, s) : 1;

		if (row >= 0 && row < n * TILE)
			add_slot(sum, j->out + row * cols, weight, cols);
	}
}

/* A group under way. */
struct group {
	const struct job *j;
	int64_t block, first; /* the block's first tile; the group's, within the block */
};

/*
 * Columns of the activation, with the slot's weight unless that comes later, as operands of down.
 */
static void activate(void *ctx, int64_t tile, int64_t panel, void *tile_sums)
{
	const struct group *g = ctx;
	const struct job *j = g->j;
	const struct packed *up = j->gate_up, *down = j->down;
	int64_t pitch = cpu_panel_width(up, panel), half = pitch / 2, c0 = panel * up->width / 2,
		n = down->K - c0 < half ? down->K - c0 : half;
	char *to =
		j->act + (size_t)((g->first + tile) * TILE * down->K) * dtype_size(down->operand);
	float a[PANEL_MOST], *sums = tile_sums;

	/* gate and up are padded to half as much as K of down */
	if (panel == up->panels - 1 && c0 + n < down->K)
		memset(a + n, 0, (size_t)(down->K - c0 - n) * sizeof *a);
	for (int64_t i = 0; i < TILE; i++, sums += pitch) {
		int64_t slot = slot_of(j, g->block + g->first + tile, i);
		float weight = 1;

		if (slot >= 0 && !j->ex->weight_after_down)
			weight = ref_get(j->weights, slot / j->ids.cols, slot % j->ids.cols);
		cpu_act_row(a, sums, sums + half, &j->ex->act, n);
		for (int64_t c = 0; c < n; c++)
			a[c] *= weight;
		cpu_tile_columns(down, TILE_SMALL, to, i, c0, a,
				 panel == up->panels - 1 ? down->K - c0 : n);
	}
}

static void place(void *ctx, int64_t tile, int64_t panel, void *sums)
{
	const struct group *g = ctx;
	const struct job *j = g->j;
	int64_t c0 = panel * j->down->width, pitch = cpu_panel_width(j->down, panel),
		cols = j->sum.cols, n = cols - c0 < pitch ? cols - c0 : pitch;
	float *out = j->out + (g->first + tile) * TILE * cols + c0;

	for (int64_t i = 0; i < TILE; i++)
		memcpy(out + i * cols, (float *)sums + i * pitch, (size_t)n * sizeof *out);
}

/*
 * The block's rows x the weights of each group's expert. Threads take the panels of a group in
 * turn.
 */
static void products(const struct job *j, const struct packed *w, int64_t block, const char *rows,
		     tile_done *done, char *own, struct err *e)
{
	size_t pitch = (size_t)(TILE * w->K) * dtype_size(w->operand);
	struct bench b = cpu_bench(w, TILE_SMALL, j->most, own);

#pragma omp for schedule(dynamic)
	for (int64_t task = 0; task < j->groups * w->panels; task++) {
		const int64_t *at = &j->group[task / w->panels];
		struct group g = { j, block, at[0] };

		if (!e->code)
			cpu_panel(&b, j->tile[block + at[0]].index, task % w->panels,
				  rows + (size_t)at[0] * pitch, at[1] - at[0], done, &g, e);
	}
	cpu_bench_end(&b);
}

/* Cuts tiles [first, first + n) into groups of one expert each, of at most j->most tiles. */
static void cut_groups(struct job *j, int64_t first, int64_t n)
{
	j->groups = 0;
	for (int64_t i = 0; i < n; i++) {
		int64_t begin = j->groups ? j->group[j->groups - 1] : 0;

		if (!j->groups || i - begin == j->most ||
		    j->tile[first + i].index != j->tile[first + begin].index)
			j->group[j->groups++] = i;
	}
	j->group[j->groups] = n;
}

/* Tiles [first, first + n) through all steps. */
static void run(struct job *j, int64_t first, int64_t n)
{
	size_t in = (size_t)(TILE * j->gate_up->K) * dtype_size(j->gate_up->operand);

	cut_groups(j, first, n);
#pragma omp parallel num_threads(j->d->threads)
	{
		char *own = cpu_of(j->d)->own[omp_get_thread_num()].p;
		struct err e = ERR_INIT;

#pragma omp for schedule(static)
		for (int64_t i = 0; i < n * TILE; i++)
			gather_row(j, first + i / TILE, i % TILE, j->in + (size_t)(i / TILE) * in);
		products(j, j->gate_up, first, j->in, activate, own, &e);
		products(j, j->down, first, j->act, place, own, &e);
#pragma omp for schedule(static)
		for (int64_t t = 0; t < j->x.rows; t++)
			if (!e.code)
				add_token(j, t, first, n);
		if (e.code)
			cpu_fail(j->d, &e);
	}
}

/* Room for a block of n tiles in the shared memory, and each thread's own. */
static bool make_room(struct job *j, int64_t n)
{
	size_t rows = (size_t)n * TILE,
	       a = whole_lines(rows * (size_t)j->gate_up->K * dtype_size(j->gate_up->operand));
	size_t b = whole_lines(rows * (size_t)j->down->K * dtype_size(j->down->operand));
	size_t o = whole_lines(rows * (size_t)j->sum.cols * sizeof(float));
	size_t up = cpu_bench_bytes(j->gate_up, TILE_SMALL, j->most),
	       down = cpu_bench_bytes(j->down, TILE_SMALL, j->most);

	if (!cpu_shared(j->d, a + b + o) || !cpu_own(j->d, up > down ? up : down))
		return false;
	j->in = cpu_of(j->d)->shared.p;
	j->act = j->in + a;
	j->out = (float *)(j->act + b);
	return true;
}

static void clear(struct device *d, struct tensor sum)
{
#pragma omp parallel for num_threads(d->threads) schedule(static)
	for (int64_t t = 0; t < sum.rows; t++)
		memset(ref_at(sum, t, 0), 0, (size_t)sum.cols * sizeof(float));
}

void cpu_experts(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
		 struct tensor weights, const struct experts *ex, bool add)
{
	struct job j = { .d = d,
			 .sum = sum,
			 .x = x,
			 .ids = ids,
			 .weights = weights,
			 .ex = ex,
			 .gate_up = packed_of(ex->gate_up),
			 .down = packed_of(ex->down) };
	int64_t slots = x.rows * ids.cols, block, *start;

	if (!ref_good(d) || !x.rows || check_order(&j, &d->err))
		return;
	if (!add)
		clear(d, sum);
	j.order = mem_calloc((size_t)slots, sizeof *j.order, &d->err);
	j.where = mem_calloc((size_t)slots, sizeof *j.where, &d->err);
	j.tile = mem_calloc((size_t)(slots / TILE + ex->count), sizeof *j.tile, &d->err);
	start = mem_calloc((size_t)ex->count + 1, sizeof *start, &d->err);
	j.group = mem_calloc((size_t)(slots / TILE + ex->count) + 1, sizeof *j.group, &d->err);
	j.most = cpu_group(j.gate_up, TILE_SMALL) < cpu_group(j.down, TILE_SMALL)
			 ? cpu_group(j.gate_up, TILE_SMALL)
			 : cpu_group(j.down, TILE_SMALL);
	if (ref_good(d)) {
		sort_slots(&j, start);
		block = (4 * d->threads + j.gate_up->panels - 1) / j.gate_up->panels;
		block = block > TILES ? block : TILES;
		block = block < j.tiles ? block : j.tiles;
		for (int64_t t = 0; t < j.tiles && ref_good(d) && make_room(&j, block); t += block)
			run(&j, t, j.tiles - t < block ? j.tiles - t : block);
	}
	free(j.order);
	free(j.where);
	free(j.tile);
	free(j.group);
	free(start);
}

static void combine_token(struct tensor sum, struct tensor y, struct tensor index,
			  struct tensor weights, int64_t t, struct err *e)
{
	for (int64_t s = 0; s < index.cols; s++) {
		int64_t row = ref_slot_row(index, t, s, y.rows, e);

		if (row >= 0)
			add_slot(ref_at(sum, t, 0), ref_at(y, row, 0),
				 weights.p ? ref_get(weights, t, s) : 1, sum.cols);
	}
}

void cpu_combine(struct device *d, struct tensor sum, struct tensor y, struct tensor index,
		 struct tensor weights, bool add)
{
	if (!ref_good(d))
		return;
	if (!add)
		clear(d, sum);
#pragma omp parallel num_threads(d->threads)
	{
		struct err e = ERR_INIT;

#pragma omp for schedule(static)
		for (int64_t t = 0; t < sum.rows; t++)
			combine_token(sum, y, index, weights, t, &e);
		if (e.code)
			cpu_fail(d, &e);
	}
}
