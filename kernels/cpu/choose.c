/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The choice of keys. A tile is as many queries as fill ROWS rows with their heads; it goes over
 * the row's keys a block of BLOCK at a time, counted from position 0:
 *
 *	scores = q k^T [ROWS, BLOCK]    sums[query, key] = sum over heads of w * max(score, 0)
 *
 * Each query keeps up to twice the keys it takes. When these are full the better half stays, and
 * what does not exceed the worst of them need not be looked at again. Candidates stand in the order
 * of their positions all the time.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <omp.h>
#include <string.h>

#include "cpu.h"
#include "number.h"
#include "operand.h"

#define ROWS  128
#define BLOCK 128
#define PAD   32
#define VECS  (BLOCK / LANES)
#define RANKS (8 << 20) /* bytes of a tile's candidates, unless one query has more */

struct job {
	struct device *d;
	struct tensor keys, q, k, w;
	const struct product *qk;
	const struct piece *piece;
	int64_t heads, parts;  /* of a query in a tile; tiles of its heads, 1 but where > ROWS */
	int64_t queries;       /* of a tile */
	int64_t take;          /* keys of a query */
};

/*
 * Candidates of a query. `rank` orders by score, then lower position first: the larger the better,
 * and no two are the same.
 */
struct candidates {
	uint64_t *rank; /* [2 take + BLOCK], by position */
	int64_t n;
	float worst; /* of those that are kept, once there have been too many */
	bool full;
};

struct desk {
	char *q;		/* [parts][ROWS, width] operands */
	float *scores, *sums;	/* [ROWS, BLOCK], [queries, BLOCK] */
	uint64_t *rank, *work;	/* [queries, 2 take + BLOCK], [2 take + BLOCK] */
	struct candidates *c;	/* [queries] */
	char *scratch;
};

static int64_t room_of(const struct job *j)
{
	return 2 * j->take + BLOCK;
}

static size_t desk_at(const struct job *j, char *p, struct desk *w)
{
	const struct product *x = j->qk;
	int64_t high = j->parts * ROWS > BLOCK ? j->parts * ROWS : BLOCK;
	size_t bytes[] = {
		(size_t)(high * x->K) * dtype_size(x->operand),
		ROWS * BLOCK * sizeof(float),
		(size_t)(j->queries * BLOCK) * sizeof(float),
		(size_t)(j->queries * room_of(j)) * sizeof(uint64_t),
		(size_t)room_of(j) * sizeof(uint64_t),
		(size_t)j->queries * sizeof(struct candidates),
		x->scratch_bytes,
	};
	size_t off[sizeof bytes / sizeof *bytes + 1] = { 0 };

	for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
		off[i + 1] = off[i] + whole_lines(bytes[i]);
	if (p)
		*w = (struct desk){ p,
				    (float *)(p + off[1]),
				    (float *)(p + off[2]),
				    (uint64_t *)(p + off[3]),
				    (uint64_t *)(p + off[4]),
				    (struct candidates *)(p + off[5]),
				    p + off[6] };
	return off[sizeof bytes / sizeof *bytes];
}

/* ---- candidates ------------------------------------------------------------------------------ */

/* Bits of a number that is no NaN, in its order; both zeros are the same. */
static uint32_t ordered(float score)
{
	uint32_t u = bits_from_float(score + 0.0f);

	return u & 0x80000000u ? ~u : u | 0x80000000u;
}

static float score_of(uint64_t rank)
{
	uint32_t u = (uint32_t)(rank >> 32);

	return float_from_bits(u & 0x80000000u ? u & 0x7fffffffu : ~u);
}

static int32_t key_of(uint64_t rank)
{
	return (int32_t)~(uint32_t)rank;
}

static uint64_t median(uint64_t a, uint64_t b, uint64_t c)
{
	uint64_t low = a < b ? a : b, high = a < b ? b : a;

	return c < low ? low : c > high ? high : c;
}

/* The k-th largest of n different numbers, which change places. */
static uint64_t kth_largest(uint64_t *v, int64_t n, int64_t k)
{
	int64_t lo = 0, hi = n - 1, at = k - 1;

	while (lo < hi) {
		uint64_t pivot = median(v[lo], v[lo + (hi - lo) / 2], v[hi]);
		int64_t i = lo, j = hi;

		while (i <= j) {
			while (v[i] > pivot)
				i++;
			while (v[j] < pivot)
				j--;
			if (i <= j) {
				uint64_t t = v[i];

				v[i++] = v[j];
				v[j--] = t;
			}
		}
		if (at <= j)
			hi = j;
		else if (at >= i)
			lo = i;
		else
			break;
	}
	return v[at];
}

/* Leaves the best `take`. */
static void prune(struct candidates *c, int64_t take, uint64_t *work)
{
	uint64_t least;
	int64_t n = 0;

	if (c->n <= take)
		return;
	memcpy(work, c->rank, (size_t)c->n * sizeof *work);
	least = kth_largest(work, c->n, take);
	for (int64_t i = 0; i < c->n; i++)
		if (c->rank[i] >= least)
			c->rank[n++] = c->rank[i];
	c->n = n;
	c->worst = score_of(least);
	c->full = true;
}

/* Keys [first, first + n) with their sums. A later key has to be better than the worst. */
static void offer(struct candidates *c, const float *sums, int64_t first, int64_t n)
{
	for (int64_t i = 0; i < n; i += LANES) {
		int64_t end = i + LANES < n ? i + LANES : n;
		vec v;

		vec_load(v, sums + i);
		if (c->full && vec_greatest(&v) <= c->worst)
			continue;
		for (int64_t at = i; at < end; at++)
			if (!c->full || sums[at] > c->worst)
				c->rank[c->n++] = (uint64_t)ordered(sums[at]) << 32 |
						  ~(uint32_t)(first + at);
	}
}

/* ---- a tile ---------------------------------------------------------------------------------- */

static void load_queries(const struct job *j, int64_t query, int64_t n, const struct desk *w)
{
	const struct product *x = j->qk;
	size_t pitch = (size_t)x->K * dtype_size(x->operand);
	int64_t used = j->parts > 1 ? j->w.cols : n * j->heads;

	for (int64_t r = 0; r < j->parts * ROWS; r++) {
		char *row = w->q + (size_t)r * pitch;

		if (r < used)
			operand_row(row, x->operand, j->d->compute,
				    ref_at(j->q, j->piece->begin + query + r / j->w.cols,
					   r % j->w.cols * j->k.cols),
				    j->q.dtype, j->k.cols, x->K);
		else
			memset(row, 0, pitch);
	}
	for (int64_t i = 0; i < n; i++)
		w->c[i] = (struct candidates){ .rank = w->rank + i * room_of(j) };
}

/* sums[BLOCK] += over heads of weight * max(score, 0), in their order. NaN is no score. */
static void add_heads(float *sums, const float *scores, const float *weight, int64_t heads)
{
	vec sum[VECS], zero = { 0 };

	memcpy(sum, sums, sizeof sum);
	for (int64_t h = 0; h < heads; h++, scores += BLOCK)
		for (int i = 0; i < VECS; i++) {
			vec s;

			vec_load(s, scores + i * LANES);
			vec_max(&s, &zero);
			sum[i] += s * weight[h];
		}
	memcpy(sums, sum, sizeof sum);
}

static void no_nan(float *sums)
{
	for (int64_t i = 0; i < BLOCK; i++)
		sums[i] = sums[i] == sums[i] ? sums[i] : -INFINITY;
}

static int block_sums(const struct job *j, int64_t query, int64_t n, const char *keys,
		      const struct desk *w, struct call *c, struct err *e)
{
	size_t tile = (size_t)(ROWS * j->qk->K) * dtype_size(j->qk->operand);

	memset(w->sums, 0, (size_t)(j->queries * BLOCK) * sizeof(float));
	for (int64_t part = 0; part < j->parts; part++) {
		int64_t h0 = part * ROWS, left = j->w.cols - h0,
			heads = left < j->heads ? left : j->heads;

		if (onednn_run(c, w->scores, w->q + (size_t)part * tile, keys, w->scratch, e))
			return -1;
		for (int64_t i = 0; i < n; i++)
			add_heads(w->sums + i * BLOCK, w->scores + i * heads * BLOCK,
				  ref_at(j->w, j->piece->begin + query + i, h0), heads);
	}
	for (int64_t i = 0; i < n; i++)
		no_nan(w->sums + i * BLOCK);
	return 0;
}

/* Keys that a query may take: those up to its own position. */
static int64_t seen_by(const struct job *j, int64_t query)
{
	int64_t end = j->piece->first + query + 1;

	return end < j->piece->kv_count ? end : j->piece->kv_count;
}

static void save(const struct job *j, int64_t query, struct candidates *c, uint64_t *work)
{
	int32_t *to = ref_at(j->keys, j->piece->begin + query, 0);
	int64_t seen = seen_by(j, query);

	if (seen > j->take)
		prune(c, j->take, work);
	for (int64_t i = 0; i < j->take; i++)
		to[i] = seen > j->take ? key_of(c->rank[i]) : i < seen ? (int32_t)i : -1;
}

static int one_tile(const struct job *j, int64_t query, const struct desk *w, struct call *c,
		    struct err *e)
{
	int64_t left = j->piece->count - query, n = left < j->queries ? left : j->queries,
		end = seen_by(j, query + n - 1);

	load_queries(j, query, n, w);
	for (int64_t b = 0; b * BLOCK < end && end > j->take; b++) {
		const char *keys = cpu_of(j->d)->shared.p + (size_t)b * j->qk->packed_bytes;

		if (block_sums(j, query, n, keys, w, c, e))
			return -1;
		for (int64_t i = 0; i < n; i++) {
			int64_t seen = seen_by(j, query + i) - b * BLOCK;

			if (seen > 0)
				offer(&w->c[i], w->sums + i * BLOCK, b * BLOCK,
				      seen < BLOCK ? seen : BLOCK);
			if (w->c[i].n >= 2 * j->take)
				prune(&w->c[i], j->take, w->work);
		}
	}
	for (int64_t i = 0; i < n; i++)
		save(j, query + i, &w->c[i], w->work);
	return 0;
}

static int pack_block(const struct job *j, int64_t b, const struct desk *w, struct err *e)
{
	const struct product *x = j->qk;
	size_t pitch = (size_t)x->K * dtype_size(x->operand);

	for (int64_t i = 0; i < BLOCK; i++)
		if (b * BLOCK + i < j->piece->kv_count)
			operand_row(w->q + (size_t)i * pitch, x->operand, j->d->compute,
				    ref_at(j->k, j->piece->kv_begin + b * BLOCK + i, 0), j->k.dtype,
				    j->k.cols, x->K);
		else
			memset(w->q + (size_t)i * pitch, 0, pitch);
	return onednn_pack(x, cpu_of(j->d)->shared.p + (size_t)b * x->packed_bytes, w->q,
			   w->scratch, e);
}

/* Packs the keys of the piece, then runs its tiles, the long ones first. */
static void run(const struct job *j, int64_t blocks)
{
	int64_t tiles = (j->piece->count + j->queries - 1) / j->queries;

#pragma omp parallel num_threads(j->d->threads)
	{
		struct err e = ERR_INIT;
		struct call c = { 0 };
		struct desk w = { 0 };

		desk_at(j, cpu_of(j->d)->own[omp_get_thread_num()].p, &w);
		onednn_begin(&c, j->qk, &e);
#pragma omp for schedule(static)
		for (int64_t b = 0; b < blocks; b++)
			if (!e.code)
				pack_block(j, b, &w, &e);
#pragma omp for schedule(dynamic)
		for (int64_t i = 0; i < tiles; i++)
			if (!e.code)
				one_tile(j, (tiles - 1 - i) * j->queries, &w, &c, &e);
		onednn_end(&c);
		if (e.code)
			cpu_fail(j->d, &e);
	}
}

void cpu_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
		struct tensor w, const struct piece *pieces, int n)
{
	struct job j = { .d = d, .keys = keys, .q = q, .k = k, .w = w, .take = keys.cols };
	int64_t width = round_up(k.cols, PAD);
	struct product want = { .operand = operand_of(d),
				.result = DT_F32,
				.M = ROWS,
				.N = BLOCK,
				.K = width,
				.ld = width,
				.order = ORDER_NK };

	if (!ref_good(d) || !q.rows)
		return;
	j.heads = w.cols < ROWS ? w.cols : ROWS;
	j.parts = (w.cols + ROWS - 1) / ROWS;
	j.queries = RANKS / (room_of(&j) * (int64_t)sizeof(uint64_t));
	j.queries = j.queries < 1 ? 1 : j.queries < ROWS / j.heads ? j.queries : ROWS / j.heads;
	j.qk = onednn_product(cpu_of(d)->dnn, &want, &d->err);
	if (!j.qk || !cpu_own(d, desk_at(&j, NULL, NULL)))
		return;
	for (j.piece = pieces; j.piece < pieces + n && ref_good(d); j.piece++) {
		int64_t blocks = j.piece->count ? (seen_by(&j, j.piece->count - 1) + BLOCK - 1) /
							  BLOCK
						: 0;

		if (cpu_shared(d, (size_t)blocks * j.qk->packed_bytes))
			run(&j, blocks);
	}
}
