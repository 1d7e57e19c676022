/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention by blocks of BLOCK keys, counted from position 0 of the row of data, with a running
 * maximum and sum for each query. K and V of every block are packed once per kv head, a batch of
 * rows of data and heads at a time; then tiles of ROWS rows, queries x query heads of one kv head,
 * go over the blocks they can see:
 *
 *	               block 0   block 1   block 2        scores = q k^T     [ROWS, BLOCK]  F32
 *	tile of        [  all  ] [  all  ] [ diagonal ]   p = 2^(scores - max), 0 where not visible
 *	queries                                           sums = sums * 2^(old max - max) + p v
 *
 * Scores and their maximum are multiples of ln 2: a power of 2 costs less than one of e.
 *
 * A row's bits depend on the blocks it sees and on nothing else of its tile: it skips a block of
 * which it sees no key.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "cache_scan.h"
#include "cpu.h"
#include "mem.h"
#include "number.h"

#define ROWS        128
#define BLOCK       128
#define LOG2_E      1.44269504f
#define LEAST       -3.0e38f   /* the maximum of nothing: below all scores, and finite */
#define PAD         32         /* head widths are rounded up to this */
#define PAIRS_BYTES (32 << 20) /* of packed keys and values at a time, unless one pair has more */

struct job {
	struct device *d;
	struct tensor out, q, k, v;
	const struct attention *a;
	const struct product *qk, *pv;
	enum dtype operand, rounded;
	float scale;          /* of scores, to multiples of ln 2 */
	int64_t group, heads; /* query heads of a kv head, and of them in a tile */
	const struct piece *piece;
	struct pair *pair; /* of the batch */
	int64_t pairs, blocks;
	struct tile *tile;
	int64_t tiles;
};

/* The keys of a piece in one kv head: as blocks, counted over the batch. */
struct pair {
	int piece, kv;
	int64_t first_block;
};

struct tile {
	int piece;
	int64_t first_block;    /* of its pair */
	int head, heads;        /* first query head and number */
	int64_t query, queries; /* within the piece */
};

/* A thread's memory for one tile. */
struct desk {
	char *q, *p;               /* [ROWS, width] and [ROWS, BLOCK] operands */
	float *scores, *pv, *sums; /* [ROWS, BLOCK], [ROWS, value], [ROWS, value] */
	float *max, *total;        /* [ROWS] of the blocks so far */
	float *next, *sum, *fade;  /* [ROWS] of the block under way */
	bool *sees;                /* [ROWS] */
	char *scratch;
	struct call qk, pv_call;
};

#define LINE 64

static size_t block_bytes(const struct job *j)
{
	return j->qk->packed_bytes + j->pv->packed_bytes + LINE;
}

/* Packed K of a block of the batch, V behind it, then whether V lacks anything (leave_out). */
static char *block_at(const struct job *j, int64_t block)
{
	return cpu_of(j->d)->shared.p + (size_t)block * block_bytes(j);
}

static int64_t blocks_of(const struct piece *p)
{
	return (p->kv_count + BLOCK - 1) / BLOCK;
}

/* n numbers as operand, zeros up to `width`. */
static void operand(const struct job *j, char *dst, const void *src, enum dtype from, int64_t n,
		    int64_t width)
{
	size_t size = dtype_size(j->operand);

	if (j->operand == DT_F32) {
		run_load((float *)dst, src, from, n);
		run_round((float *)dst, from == DT_BF16 ? DT_F32 : j->rounded, n);
	} else if (from == DT_F32) {
		run_save(dst, DT_BF16, src, n);
	} else {
		dtype_convert(dst, DT_BF16, src, from, (size_t)n);
	}
	memset(dst + (size_t)n * size, 0, (size_t)(width - n) * size);
}

static bool *lacking(const struct job *j, char *block)
{
	return (bool *)(block + j->qk->packed_bytes + j->pv->packed_bytes);
}

static float number_at(const struct job *j, const void *operands, int64_t i)
{
	return j->operand == DT_F32 ? ((const float *)operands)[i]
				    : dtype_bf16_to_f32(((const uint16_t *)operands)[i]);
}

/*
 * Values that are not finite would reach queries that do not see their key: 0 times NaN is NaN.
 * They are 0 in the product, and add_left_out brings them to who sees them. True if there are any.
 */
static bool leave_out(const struct job *j, char *row, int64_t n)
{
	size_t size = dtype_size(j->operand);
	bool zero;

	if (scan_finite(row, (size_t)n * size, j->operand, &zero))
		return false;
	for (int64_t c = 0; c < n; c++)
		if (!isfinite(number_at(j, row, c)))
			memset(row + (size_t)c * size, 0, size);
	return true;
}

/*
 * Block b of a piece, one kv head: rows as operands, zeros behind the last key, then packed. `work`
 * has room for one block of rows.
 */
static int pack_one(const struct job *j, const struct piece *p, int64_t b, int kv, char *to,
		    char *work, char *scratch, bool value, bool *lacks, struct err *e)
{
	const struct product *x = value ? j->pv : j->qk;
	struct tensor t = value ? j->v : j->k;
	int64_t width = value ? j->a->value_width : j->a->width, padded = value ? x->N : x->K,
		left = p->kv_count - b * BLOCK;
	size_t pitch = (size_t)padded * dtype_size(j->operand);

	*lacks = false;
	for (int64_t i = 0; i < BLOCK; i++) {
		char *row = work + (size_t)i * pitch;

		if (i < left)
			operand(j, row, ref_at(t, p->kv_begin + b * BLOCK + i, kv * width), t.dtype,
				width, padded);
		else
			memset(row, 0, pitch);
		if (value && leave_out(j, row, width))
			*lacks = true;
	}
	return onednn_pack(x, to, work, scratch, e);
}

static void load_queries(const struct job *j, const struct tile *t, const struct desk *w)
{
	const struct piece *p = &j->piece[t->piece];
	size_t pitch = (size_t)j->qk->K * dtype_size(j->operand);

	for (int64_t r = 0; r < ROWS; r++) {
		int64_t query = t->query + r / t->heads, head = t->head + r % t->heads;
		const struct weight *sink = j->a->sink;
		float first = LEAST;

		if (r < t->queries * t->heads)
			operand(j, w->q + (size_t)r * pitch,
				ref_at(j->q, p->begin + query, head * j->a->width), j->q.dtype,
				j->a->width, j->qk->K);
		else
			memset(w->q + (size_t)r * pitch, 0, pitch);
		if (sink && r < t->queries * t->heads)
			first = ref_vector(sink)[head] * LOG2_E;
		w->max[r] = first < LEAST ? LEAST : first;
		w->total[r] = sink ? 1 : 0;
	}
	memset(w->sums, 0, (size_t)(ROWS * j->pv->N) * sizeof(float));
}

#define VECS (BLOCK / LANES)

/* s = scores * scale where the row sees the key, -inf elsewhere. */
static void visible(vec s[VECS], const float *scores, int64_t lo, int64_t hi, float scale)
{
	float edge[BLOCK];

	for (int i = 0; i < VECS; i++) {
		vec_load(s[i], scores + i * LANES);
		s[i] *= scale;
	}
	if (lo == 0 && hi == BLOCK)
		return;
	memcpy(edge, s, sizeof edge);
	for (int64_t i = 0; i < lo; i++)
		edge[i] = -INFINITY;
	for (int64_t i = hi; i < BLOCK; i++)
		edge[i] = -INFINITY;
	memcpy(s, edge, sizeof edge);
}

/*
 * Scores of a row that sees keys [lo, hi) of the block become probabilities p[BLOCK] relative to
 * the new maximum, as operands; returns their sum. A NaN is no maximum, but it is its own
 * probability and so reaches the sums.
 */
static float probabilities(const struct job *j, const float *scores, char *p, int64_t lo,
			   int64_t hi, float *max)
{
	vec s[VECS], most, sum = { 0 };
	uint16_t *half = (uint16_t *)p;
	float total;

	visible(s, scores, lo, hi, j->scale);
	vec_set(&most, *max);
	for (int i = 0; i < VECS; i++) {
		vec higher = s[i];

		vec_max(&higher, &most);
		most = higher;
	}
	*max = vec_greatest(&most);
	for (int i = 0; i < VECS; i++) {
		s[i] -= *max;
		vec_exp2_or_zero(&s[i]);
		sum += s[i];
	}
	total = vec_sum(&sum);
	for (int i = 0; i < VECS; i++)
		if (j->operand == DT_F32)
			vec_store((float *)p + i * LANES, s[i]);
		else if (total == total)
			vec_number_to_bf16(half + i * LANES, &s[i]);
		else
			vec_to_bf16(half + i * LANES, &s[i]);
	if (j->operand == DT_F32)
		run_round((float *)p, j->rounded, BLOCK);
	return total;
}

/* The keys [*begin, *end) of the piece that a query sees. */
static void range_of(const struct job *j, const struct piece *p, int64_t query, int64_t *begin,
		     int64_t *end)
{
	*end = p->first + query + 1;
	*begin = j->a->window && *end > j->a->window ? *end - j->a->window : 0;
	if (*end > p->kv_count)
		*end = p->kv_count;
}

/* What earlier sums fade by, and the new totals, from the new maxima and the sums of the block. */
static void fade_rows(const struct desk *w)
{
	for (int64_t r = 0; r < ROWS; r += LANES) {
		vec fade, max, total, sum;

		vec_load(fade, w->max + r);
		vec_load(max, w->next + r);
		vec_load(total, w->total + r);
		vec_load(sum, w->sum + r);
		fade -= max;
		vec_exp2_or_zero(&fade);
		total = total * fade + sum;
		vec_store(w->fade + r, fade);
		vec_store(w->max + r, max);
		vec_store(w->total + r, total);
	}
}

/* The block's scores of all rows of a tile to the operand p. */
static void soften(const struct job *j, const struct tile *t, int64_t b, const struct desk *w)
{
	const struct piece *p = &j->piece[t->piece];
	size_t pitch = BLOCK * dtype_size(j->operand);

	for (int64_t r = 0; r < ROWS; r++) {
		int64_t lo, hi;

		range_of(j, p, t->query + r / t->heads, &lo, &hi);
		lo = lo > b * BLOCK ? lo - b * BLOCK : 0;
		hi = hi - b * BLOCK < BLOCK ? hi - b * BLOCK : BLOCK;
		w->next[r] = w->max[r];
		w->sum[r] = 0;
		w->sees[r] = r < t->queries * t->heads && lo < hi;
		if (w->sees[r])
			w->sum[r] = probabilities(j, w->scores + r * BLOCK,
						  w->p + (size_t)r * pitch, lo, hi, &w->next[r]);
		else
			memset(w->p + (size_t)r * pitch, 0, pitch);
	}
	fade_rows(w);
}

static void accumulate(const struct job *j, const struct desk *w)
{
	int64_t width = j->pv->N;

	for (int64_t r = 0; r < ROWS; r++) {
		float *sums = w->sums + r * width, fade = w->fade[r];
		const float *pv = w->pv + r * width;

		if (!w->sees[r])
			continue;
		for (int64_t c = 0; c < width; c++)
			sums[c] = sums[c] * fade + pv[c];
	}
}

/* A value that leave_out took, times its probability to the queries that see its key. */
static void add_value(const struct job *j, const struct tile *t, int64_t key, int64_t c,
		      float value, const struct desk *w)
{
	for (int64_t r = 0; r < t->queries * t->heads; r++) {
		int64_t lo, hi;

		range_of(j, &j->piece[t->piece], t->query + r / t->heads, &lo, &hi);
		if (key >= lo && key < hi)
			w->pv[r * j->pv->N + c] +=
				value * number_at(j, w->p, r * BLOCK + key % BLOCK);
	}
}

static void add_left_out(const struct job *j, const struct tile *t, int64_t b, const struct desk *w)
{
	const struct piece *p = &j->piece[t->piece];
	int64_t width = j->a->value_width, first = t->head / j->group * width;

	for (int64_t key = b * BLOCK; key < (b + 1) * BLOCK && key < p->kv_count; key++)
		for (int64_t c = 0; c < width; c++) {
			float value = ref_round(ref_get(j->v, p->kv_begin + key, first + c),
						j->rounded);

			if (!isfinite(value))
				add_value(j, t, key, c, value, w);
		}
}

/* Nothing above LEAST: no key at all, or scores that are not finite. */
static float of_nothing(const struct job *j, const struct piece *p, int64_t query)
{
	int64_t begin, end;

	range_of(j, p, query, &begin, &end);
	return begin < end ? NAN : 0.0f;
}

static void save_rows(const struct job *j, const struct tile *t, const struct desk *w)
{
	const struct piece *p = &j->piece[t->piece];

	for (int64_t r = 0; r < t->queries * t->heads; r++) {
		int64_t width = j->a->value_width, query = t->query + r / t->heads,
			head = t->head + r % t->heads;
		float *sums = w->sums + r * j->pv->N, total = w->total[r],
		      nothing = total == 0 ? of_nothing(j, p, query) : 0;

		for (int64_t c = 0; c < width; c++)
			sums[c] = total == 0 ? nothing : sums[c] / total;
		run_save(ref_at(j->out, p->begin + query, head * width), j->out.dtype, sums, width);
	}
}

static int one_tile(const struct job *j, const struct tile *t, struct desk *w, struct err *e)
{
	const struct piece *p = &j->piece[t->piece];
	int64_t from = p->first + t->query,
		end = from + t->queries < p->kv_count ? from + t->queries : p->kv_count;
	int64_t b = j->a->window && from + 1 > j->a->window ? (from + 1 - j->a->window) / BLOCK : 0;

	load_queries(j, t, w);
	for (; b * BLOCK < end; b++) {
		char *k = block_at(j, t->first_block + b), *v = k + j->qk->packed_bytes;

		if (onednn_run(&w->qk, w->scores, w->q, k, w->scratch, e))
			return -1;
		soften(j, t, b, w);
		if (onednn_run(&w->pv_call, w->pv, w->p, v, w->scratch, e))
			return -1;
		if (*lacking(j, k))
			add_left_out(j, t, b, w);
		accumulate(j, w);
	}
	save_rows(j, t, w);
	return 0;
}

/*
 * Cuts a desk out of p, or only measures with p NULL. The packing step uses q as its block of rows,
 * which has room for the wider of keys and values.
 */
static size_t desk_at(const struct job *j, char *p, struct desk *w)
{
	size_t scratch = j->qk->scratch_bytes > j->pv->scratch_bytes ? j->qk->scratch_bytes
								     : j->pv->scratch_bytes;
	size_t size = dtype_size(j->operand),
	       widest = (size_t)(j->qk->K > j->pv->N ? j->qk->K : j->pv->N);
	size_t bytes[] = {
		ROWS * widest * size,
		ROWS * BLOCK * size,
		ROWS * BLOCK * sizeof(float),
		ROWS * (size_t)j->pv->N * sizeof(float),
		ROWS * (size_t)j->pv->N * sizeof(float),
		ROWS * sizeof(float),
		ROWS * sizeof(float),
		ROWS * sizeof(float),
		ROWS * sizeof(float),
		ROWS * sizeof(float),
		ROWS * sizeof(bool),
		scratch,
	};
	size_t off[sizeof bytes / sizeof bytes[0] + 1] = { 0 };

	for (size_t i = 0; i < sizeof bytes / sizeof bytes[0]; i++)
		off[i + 1] = off[i] + whole_lines(bytes[i]);
	if (p)
		*w = (struct desk){ .q = p,
				    .p = p + off[1],
				    .scores = (float *)(p + off[2]),
				    .pv = (float *)(p + off[3]),
				    .sums = (float *)(p + off[4]),
				    .max = (float *)(p + off[5]),
				    .total = (float *)(p + off[6]),
				    .next = (float *)(p + off[7]),
				    .sum = (float *)(p + off[8]),
				    .fade = (float *)(p + off[9]),
				    .sees = (bool *)(p + off[10]),
				    .scratch = p + off[11] };
	return off[sizeof bytes / sizeof bytes[0]];
}

/* The tiles of a pair: its query heads, several to a tile, by its queries. */
static int add_tiles(struct job *j, const struct pair *pair, size_t *cap, struct err *e)
{
	int64_t each = ROWS / j->heads, end = (pair->kv + 1) * j->group,
		queries = j->piece[pair->piece].count;

	for (int64_t head = end - j->group; head < end; head += j->heads)
		for (int64_t q = 0; q < queries; q += each) {
			int64_t heads = end - head < j->heads ? end - head : j->heads,
				n = queries - q < each ? queries - q : each;

			if (mem_grow(&j->tile, cap, (size_t)j->tiles + 1, sizeof *j->tile, e))
				return -1;
			j->tile[j->tiles++] = (struct tile){ pair->piece, pair->first_block,
							     (int)head,   (int)heads,
							     q,           n };
		}
	return 0;
}

/*
 * Packs all blocks of the batch, then runs its tiles, the long ones, which lie at the end of each
 * pair, first.
 */
static void run(const struct job *j)
{
#pragma omp parallel num_threads(j->d->threads)
	{
		const struct pair *pair = j->pair;
		struct err e = ERR_INIT;
		struct desk w;

		desk_at(j, cpu_of(j->d)->own[omp_get_thread_num()].p, &w);
		if (!onednn_begin(&w.qk, j->qk, &e))
			onednn_begin(&w.pv_call, j->pv, &e);
#pragma omp for schedule(static)
		for (int64_t block = 0; block < j->blocks; block++) {
			char *to = block_at(j, block);
			const struct piece *p;

			while (pair + 1 < j->pair + j->pairs && block >= pair[1].first_block)
				pair++;
			p = &j->piece[pair->piece];
			if (!e.code && !pack_one(j, p, block - pair->first_block, pair->kv, to, w.q,
						 w.scratch, false, lacking(j, to), &e))
				pack_one(j, p, block - pair->first_block, pair->kv,
					 to + j->qk->packed_bytes, w.q, w.scratch, true,
					 lacking(j, to), &e);
		}
#pragma omp for schedule(dynamic)
		for (int64_t i = 0; i < j->tiles; i++)
			if (!e.code)
				one_tile(j, &j->tile[j->tiles - 1 - i], &w, &e);
		onednn_end(&w.qk);
		onednn_end(&w.pv_call);
		if (e.code)
			cpu_fail(j->d, &e);
	}
}

static void run_batch(struct job *j)
{
	if (j->tiles && cpu_shared(j->d, (size_t)j->blocks * block_bytes(j)))
		run(j);
	j->pairs = j->blocks = j->tiles = 0;
}

/* Pairs in batches that fit PAIRS_BYTES, each at least one pair. */
static void all_pairs(struct job *j, int n, size_t *cap)
{
	int64_t most = PAIRS_BYTES / (int64_t)block_bytes(j);

	for (int i = 0; i < n; i++)
		for (int kv = 0; kv < j->a->kv_heads && ref_good(j->d); kv++) {
			int64_t blocks = blocks_of(&j->piece[i]);

			if (j->pairs && j->blocks + blocks > most)
				run_batch(j);
			j->pair[j->pairs] = (struct pair){ i, kv, j->blocks };
			if (add_tiles(j, &j->pair[j->pairs++], cap, &j->d->err))
				return;
			j->blocks += blocks;
		}
	if (ref_good(j->d))
		run_batch(j);
}

void cpu_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		   struct tensor v, const struct attention *a, const struct piece *pieces, int n)
{
	struct cpu *c = cpu_of(d);
	struct job j = { .d = d,
			 .out = out,
			 .q = q,
			 .k = k,
			 .v = v,
			 .a = a,
			 .rounded = d->compute,
			 .piece = pieces };
	enum dtype operand = c->bf16 ? d->compute : DT_F32;
	struct product qk = { .operand = operand,
			      .result = DT_F32,
			      .M = ROWS,
			      .N = BLOCK,
			      .K = round_up(a->width, PAD),
			      .ld = round_up(a->width, PAD),
			      .order = ORDER_NK },
		       pv = { .operand = operand,
			      .result = DT_F32,
			      .M = ROWS,
			      .N = round_up(a->value_width, PAD),
			      .K = BLOCK,
			      .ld = BLOCK,
			      .order = ORDER_KN };
	size_t cap = 0;

	if (!ref_good(d))
		return;
	j.operand = operand;
	j.scale = a->scale * LOG2_E;
	j.group = a->heads / a->kv_heads;
	j.heads = j.group < ROWS ? j.group : ROWS;
	j.qk = onednn_product(c->dnn, &qk, &d->err);
	j.pv = onednn_product(c->dnn, &pv, &d->err);
	j.pair = mem_calloc((size_t)n * (size_t)a->kv_heads + 1, sizeof *j.pair, &d->err);
	if (ref_good(d) && cpu_own(d, desk_at(&j, NULL, NULL)))
		all_pairs(&j, n, &cap);
	free(j.pair);
	free(j.tile);
}
