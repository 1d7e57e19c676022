/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The choice of keys. A tile is as many queries as fill ROWS rows with their heads; it goes over
 * the row's keys a block of BLOCK at a time, counted from position 0:
 *
 *	scores = q k^T [ROWS, BLOCK]    sums[query, key] = sum over heads of w * max(score, 0)
 *
 * Each query keeps up to twice the keys it takes. When these are full the better half stays, and
 * what does not exceed the worst of them need not be looked at again. Candidates stand in the order
 * of their positions all the time, so that of equal ones the first are the lower.
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

#define ROWS  256
#define BLOCK 128
#define PAD   32
#define VECS  (BLOCK / LANES)
#define HELD  (8 << 20) /* bytes of a tile's candidates, unless one query has more */
#define DIGIT 11        /* bits of a score that are looked at together */

struct job {
	struct device *d;
	struct tensor keys, q, k, w;
	const struct product *qk;
	const struct piece *piece;
	int64_t heads, parts;  /* of a query in a tile; tiles of its heads, 1 but where > ROWS */
	int64_t queries;       /* of a tile */
	int64_t take;          /* keys of a query */
};

/* Of a query, by position. Scores are kept as numbers whose order is theirs. */
struct candidates {
	uint32_t *score; /* [2 take + BLOCK + LANES] */
	int32_t *key;
	int64_t n;
	uint32_t worst; /* what is not above it cannot be chosen: 0, below all scores, at first */
};

struct desk {
	char *q;		/* [parts][ROWS, width] operands */
	float *scores, *sums;	/* [ROWS, BLOCK], [queries, BLOCK] */
	uint32_t *score, *work; /* of a query's candidates: [queries, room], [room] */
	int32_t *key;
	struct candidates *c;	/* [queries] */
	char *scratch;
};

/* A vector is stored whole where some of it is offered. */
static int64_t room_of(const struct job *j)
{
	return 2 * j->take + BLOCK + LANES;
}

static size_t desk_at(const struct job *j, char *p, struct desk *w)
{
	const struct product *x = j->qk;
	int64_t high = j->parts * ROWS > BLOCK ? j->parts * ROWS : BLOCK;
	size_t bytes[] = {
		(size_t)(high * x->K) * dtype_size(x->operand),
		ROWS * BLOCK * sizeof(float),
		(size_t)(j->queries * BLOCK) * sizeof(float),
		(size_t)(j->queries * room_of(j)) * sizeof(uint32_t),
		(size_t)room_of(j) * sizeof(uint32_t),
		(size_t)(j->queries * room_of(j)) * sizeof(int32_t),
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
				    (uint32_t *)(p + off[3]),
				    (uint32_t *)(p + off[4]),
				    (int32_t *)(p + off[5]),
				    (struct candidates *)(p + off[6]),
				    p + off[7] };
	return off[sizeof bytes / sizeof *bytes];
}

/* ---- candidates ------------------------------------------------------------------------------ */

/*
 * The k-th largest of n numbers, which are lost: digit by digit, of those alone that have the
 * digits before in common with it.
 */
static uint32_t kth_largest(uint32_t *v, int64_t n, int64_t k)
{
	for (int shift = 32 - DIGIT;; shift = shift > DIGIT ? shift - DIGIT : 0) {
		uint32_t count[1 << DIGIT] = { 0 }, digit = (1 << DIGIT) - 1;
		int64_t same = 0;

		for (int64_t i = 0; i < n; i++)
			count[v[i] >> shift & ((1 << DIGIT) - 1)]++;
		for (; count[digit] < k; digit--)
			k -= count[digit];
		for (int64_t i = 0; i < n; i++) {
			v[same] = v[i];
			same += (v[i] >> shift & ((1 << DIGIT) - 1)) == digit;
		}
		n = same;
		if (!shift || n == 1)
			return v[0];
	}
}

/* Leaves the first of those that equal the worst, so that there are `take` in all. */
static void drop_equal(struct candidates *c, int64_t take)
{
	int64_t n = 0, equal = take;

	for (int64_t i = 0; i < c->n; i++)
		equal -= c->score[i] > c->worst;
	for (int64_t i = 0; i < c->n; i++) {
		bool is_equal = c->score[i] == c->worst;

		c->score[n] = c->score[i];
		c->key[n] = c->key[i];
		n += !is_equal | (equal > 0);
		equal -= is_equal;
	}
	c->n = n;
}

/* Leaves the best `take`. */
static void prune(struct candidates *c, int64_t take, uint32_t *work)
{
	int64_t n = 0;

	if (c->n <= take)
		return;
	memcpy(work, c->score, (size_t)c->n * sizeof *work);
	c->worst = kth_largest(work, c->n, take);
	for (int64_t i = 0; i < c->n; i += LANES)
		n += vec_keep(c->score + n, c->key + n, c->score + i, c->key + i,
			      c->n - i < LANES ? (int)(c->n - i) : LANES, c->worst);
	c->n = n;
	if (n > take)
		drop_equal(c, take);
}

/* Keys [first, first + n) with their sums. A later key has to be better than the worst. */
static void offer(struct candidates *c, const float *sums, int64_t first, int64_t n)
{
	for (int64_t i = 0; i < n; i += LANES)
		c->n += vec_offer(c->score + c->n, c->key + c->n, sums + i, (int32_t)(first + i),
				  n - i < LANES ? (int)(n - i) : LANES, c->worst);
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
		w->c[i] = (struct candidates){ w->score + i * room_of(j),
					       w->key + i * room_of(j), 0, 0 };
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

static void save(const struct job *j, int64_t query, struct candidates *c, uint32_t *work)
{
	int32_t *to = ref_at(j->keys, j->piece->begin + query, 0);
	int64_t seen = seen_by(j, query);

	if (seen > j->take)
		prune(c, j->take, work);
	for (int64_t i = 0; i < j->take; i++)
		to[i] = seen > j->take ? c->key[i] : i < seen ? (int32_t)i : -1;
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
	j.queries = HELD / (room_of(&j) * (int64_t)(sizeof(uint32_t) + sizeof(int32_t)));
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
