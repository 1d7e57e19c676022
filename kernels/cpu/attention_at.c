/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over chosen keys: one query with all heads of a kv head at a time, BLOCK keys of its
 * list after the other. Their rows are fetched once for all heads:
 *
 *	rows = keys [BLOCK, width]      scores = rows q^T  [BLOCK, heads]  F32, heads rounded up
 *	                                p = 2^(scores - max), turned round: [heads, BLOCK]
 *	sums = sums * 2^(old max - max) + p v
 *
 * Lanes are heads, so that a head's bits depend on its own numbers. Rounding, maximum and sums are
 * as in attention.c.
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

#define BLOCK  256
#define HEADS  128	/* most heads at a time */
#define LOG2_E 1.44269504f
#define LEAST  -3.0e38f
#define PAD    32

struct job {
	struct device *d;
	struct tensor out, q, k, v, keys;
	const struct attention *a;
	const struct product *qk, *pv;
	enum dtype operand;
	float scale;
	int64_t group, heads, parts; /* heads of a kv head; of a tile, rounded up; its tiles */
	bool within;                 /* values are the first columns of the keys */
	int64_t strip;               /* columns of values that are packed together, 0 = unknown */
	const struct piece *piece;
};

/* A thread's memory. */
struct desk {
	/* operands: [heads, width], [BLOCK, width], [BLOCK, value], [heads, BLOCK] */
	char *q, *rows, *values, *p;
	char *packed_q, *packed_v, *strips;
	float *scores, *pv, *sums; /* [BLOCK, heads], [heads, value], [heads, value] */
	float *max, *total, *fade; /* [heads] */
	char *scratch;
	struct call qk, pv_call;
};

/* A query's keys under way. */
struct task {
	int64_t token;		/* of q and out */
	int kv;
	int64_t head, heads;	/* first query head, number */
	const int32_t *key;
	int64_t n;
};

static size_t desk_at(const struct job *j, char *p, struct desk *w)
{
	size_t size = dtype_size(j->operand), heads = (size_t)j->heads;
	size_t bytes[] = {
		heads * (size_t)j->qk->K * size,
		BLOCK * (size_t)j->qk->K * size,
		BLOCK * (size_t)j->pv->N * size,
		heads * BLOCK * size,
		j->qk->packed_bytes,
		j->pv->packed_bytes,
		BLOCK * (size_t)j->pv->N * size,
		BLOCK * heads * sizeof(float),
		heads * (size_t)j->pv->N * sizeof(float),
		heads * (size_t)j->pv->N * sizeof(float),
		heads * sizeof(float),
		heads * sizeof(float),
		heads * sizeof(float),
		j->qk->scratch_bytes > j->pv->scratch_bytes ? j->qk->scratch_bytes
							    : j->pv->scratch_bytes,
	};
	size_t off[sizeof bytes / sizeof *bytes + 1] = { 0 };

	for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
		off[i + 1] = off[i] + whole_lines(bytes[i]);
	if (p)
		*w = (struct desk){ .q = p,
				    .rows = p + off[1],
				    .values = p + off[2],
				    .p = p + off[3],
				    .packed_q = p + off[4],
				    .packed_v = p + off[5],
				    .strips = p + off[6],
				    .scores = (float *)(p + off[7]),
				    .pv = (float *)(p + off[8]),
				    .sums = (float *)(p + off[9]),
				    .max = (float *)(p + off[10]),
				    .total = (float *)(p + off[11]),
				    .fade = (float *)(p + off[12]),
				    .scratch = p + off[13] };
	return off[sizeof bytes / sizeof *bytes];
}

static int load_query(const struct job *j, const struct task *t, const struct desk *w,
		      struct err *e)
{
	size_t pitch = (size_t)j->qk->K * dtype_size(j->operand);
	const struct weight *sink = j->a->sink;

	for (int64_t h = 0; h < j->heads; h++) {
		float first = LEAST;

		if (h < t->heads)
			operand_row(w->q + (size_t)h * pitch, j->operand, j->d->compute,
				    ref_at(j->q, t->token, (t->head + h) * j->a->width), j->q.dtype,
				    j->a->width, j->qk->K);
		else
			memset(w->q + (size_t)h * pitch, 0, pitch);
		if (sink && h < t->heads)
			first = ref_vector(sink)[t->head + h] * LOG2_E;
		w->max[h] = first < LEAST ? LEAST : first;
		w->total[h] = sink ? 1 : 0;
	}
	memset(w->sums, 0, (size_t)(j->heads * j->pv->N) * sizeof(float));
	return onednn_pack(j->qk, w->packed_q, w->q, w->scratch, e);
}

/* Rows of a block's keys as operands, zeros behind the last. */
static void fetch(const struct job *j, struct tensor from, int64_t c0, int64_t width,
		  const struct task *t, int64_t first, char *to, int64_t padded)
{
	size_t pitch = (size_t)padded * dtype_size(j->operand);

	for (int64_t i = 0; i < BLOCK; i++)
		if (first + i < t->n)
			operand_row(to + (size_t)i * pitch, j->operand, j->d->compute,
				    ref_at(from, j->piece->kv_begin + t->key[first + i], c0),
				    from.dtype, width, padded);
		else
			memset(to + (size_t)i * pitch, 0, pitch);
}

/*
 * oneDNN reads values in strips of columns, row by row, in BF16 two rows side by side: written so
 * at once they need not be put in order by it. `values` has `pitch` numbers from row to row; what
 * lies behind the values makes columns that nobody reads.
 */
static void pack_strips(const struct job *j, const char *values, int64_t pitch, int64_t strip,
			char *packed)
{
	float *to = (float *)packed;
	uint32_t *pairs = (uint32_t *)packed;

	for (int64_t c = 0; c < j->pv->N; c += strip)
		for (int64_t i = 0; i < BLOCK && j->operand == DT_F32; i++, to += strip)
			memcpy(to, (const float *)values + i * pitch + c,
			       (size_t)strip * sizeof *to);
	for (int64_t c = 0; c < j->pv->N; c += strip)
		for (int64_t i = 0; i < BLOCK && j->operand != DT_F32; i += 2, pairs += strip) {
			const uint16_t *a = (const uint16_t *)values + i * pitch + c,
				       *b = a + pitch;

			for (int64_t k = 0; k < strip; k++)
				pairs[k] = a[k] | (uint32_t)b[k] << 16;
		}
}

/* Whether it does: held against what oneDNN makes of numbers that are all different in a strip. */
static int64_t find_strip(const struct job *j, const struct desk *w, struct err *e)
{
	static const int64_t strips[] = { 64, 48, 32, 16 };
	const struct product *x = j->pv;
	size_t bytes = (size_t)(BLOCK * x->N) * dtype_size(j->operand);

	for (int64_t i = 0; i < BLOCK * x->N; i++)
		if (j->operand == DT_F32)
			((float *)w->values)[i] = (float)i;
		else
			((uint16_t *)w->values)[i] = (uint16_t)(i % 0x7f7f);
	if (x->packed_bytes != bytes || onednn_pack(x, w->packed_v, w->values, w->scratch, e))
		return 0;
	for (size_t s = 0; s < sizeof strips / sizeof *strips; s++) {
		if (x->N % strips[s])
			continue;
		pack_strips(j, w->values, x->N, strips[s], w->strips);
		if (!memcmp(w->strips, w->packed_v, bytes))
			return strips[s];
	}
	return 0;
}

static int pack_values(const struct job *j, const struct task *t, int64_t first,
		       const struct desk *w, struct err *e)
{
	int64_t pitch = j->within && j->strip ? j->qk->K : j->pv->N;
	const char *values = j->within && j->strip ? w->rows : w->values;

	if (values == w->values)
		fetch(j, j->v, t->kv * j->a->value_width, j->a->value_width, t, first, w->values,
		      j->pv->N);
	if (!j->strip)
		return onednn_pack(j->pv, w->packed_v, w->values, w->scratch, e);
	pack_strips(j, values, pitch, j->strip, w->packed_v);
	return 0;
}

/* Of LANES heads: the block's n scores to probabilities relative to the new maximum. */
static void soften(const struct job *j, float *scores, int64_t n, float *max, float *total,
		   float *fade)
{
	int64_t pitch = j->heads;
	vec most, sum = { 0 }, old, before;

	vec_load(most, max);
	old = most;
	for (int64_t i = 0; i < n; i++) {
		vec s;

		vec_load(s, scores + i * pitch);
		s *= j->scale;
		vec_store(scores + i * pitch, s);
		vec_max(&s, &most);
		most = s;
	}
	for (int64_t i = 0; i < n; i++) {
		vec s;

		vec_load(s, scores + i * pitch);
		s -= most;
		vec_exp2_or_zero(&s);
		sum += s;
		vec_store(scores + i * pitch, s);
	}
	old -= most;
	vec_exp2_or_zero(&old);
	vec_load(before, total);
	before = before * old + sum;
	vec_store(max, most);
	vec_store(total, before);
	vec_store(fade, old);
}

/* Of LANES heads the operands for a key, as F32; 0 from key n on. */
static void key_operand(const struct job *j, const float *scores, int64_t key, int64_t n,
			int64_t h0, vec_bits *to)
{
	uint16_t half[LANES];
	vec v = { 0 };

	if (key < n)
		vec_load(v, scores + key * j->heads + h0);
	if (j->d->compute == DT_BF16) {
		vec_to_bf16(half, &v);
		vec_from_bf16(&v, half);
	}
	*to = (vec_bits)v;
}

/* [BLOCK, heads] F32 to [heads, BLOCK] operands, zeros from key n on. */
static void turn(const struct job *j, const float *scores, int64_t n, char *p)
{
	size_t size = dtype_size(j->operand), pitch = BLOCK * size;
	int64_t pair = j->operand == DT_F32 ? 1 : 2;

	for (int64_t h0 = 0; h0 < j->heads; h0 += LANES)
		for (int64_t i = 0; i < BLOCK; i += pair * LANES) {
			vec_bits m[LANES];

			for (int64_t l = 0; l < LANES; l++) {
				vec_bits next;

				key_operand(j, scores, i + l * pair, n, h0, &m[l]);
				if (pair == 1)
					continue;
				key_operand(j, scores, i + l * pair + 1, n, h0, &next);
				m[l] = m[l] >> 16 | next;
			}
			vec_turn(m);
			for (int l = 0; l < LANES; l++)
				vec_store(p + (size_t)(h0 + l) * pitch + (size_t)i * size, m[l]);
		}
}

static void accumulate(const struct job *j, const struct task *t, const struct desk *w)
{
	int64_t width = j->pv->N;

	for (int64_t h = 0; h < t->heads; h++) {
		float *sums = w->sums + h * width, fade = w->fade[h];
		const float *pv = w->pv + h * width;

		for (int64_t c = 0; c < width; c++)
			sums[c] = sums[c] * fade + pv[c];
	}
}

static int one_block(const struct job *j, const struct task *t, int64_t first, struct desk *w,
		     struct err *e)
{
	int64_t left = t->n - first, n = left < BLOCK ? left : BLOCK;

	fetch(j, j->k, t->kv * j->a->width, j->a->width, t, first, w->rows, j->qk->K);
	if (onednn_run(&w->qk, w->scores, w->rows, w->packed_q, w->scratch, e))
		return -1;
	for (int64_t h = 0; h < j->heads; h += LANES)
		soften(j, w->scores + h, n, w->max + h, w->total + h, w->fade + h);
	turn(j, w->scores, n, w->p);
	if (pack_values(j, t, first, w, e) ||
	    onednn_run(&w->pv_call, w->pv, w->p, w->packed_v, w->scratch, e))
		return -1;
	accumulate(j, t, w);
	return 0;
}

static void save(const struct job *j, const struct task *t, const struct desk *w)
{
	int64_t width = j->a->value_width;

	for (int64_t h = 0; h < t->heads; h++) {
		float *sums = w->sums + h * j->pv->N, total = w->total[h],
		      nothing = t->n ? NAN : 0.0f;

		for (int64_t c = 0; c < width; c++)
			sums[c] = total == 0 ? nothing : sums[c] / total;
		run_convert(w->pv, j->out.dtype, sums, DT_F32, width);
		run_stream(ref_at(j->out, t->token, (t->head + h) * width), w->pv,
			   (size_t)width * dtype_size(j->out.dtype));
	}
	run_stream_end();
}

/* Number i of the tiles of a piece: a query, a kv head, a part of its heads. */
static int one_task(const struct job *j, int64_t i, struct desk *w, struct err *e)
{
	int64_t each = j->a->kv_heads * j->parts, part = i % j->parts, left;
	struct task t = { .token = j->piece->begin + i / each, .kv = (int)(i % each / j->parts) };

	left = j->group - part * HEADS;
	t.heads = left < HEADS ? left : HEADS;
	t.head = t.kv * j->group + part * HEADS;
	t.key = ref_at(j->keys, t.token, 0);
	t.n = ref_keys_of(j->keys, t.token, j->piece, e);
	if (t.n < 0 || load_query(j, &t, w, e))
		return -1;
	for (int64_t first = 0; first < t.n; first += BLOCK)
		if (one_block(j, &t, first, w, e))
			return -1;
	save(j, &t, w);
	return 0;
}

static void run(const struct job *j)
{
	int64_t tasks = j->piece->count * j->a->kv_heads * j->parts;

#pragma omp parallel num_threads(j->d->threads)
	{
		struct err e = ERR_INIT;
		struct desk w = { .q = NULL };

		desk_at(j, cpu_of(j->d)->own[omp_get_thread_num()].p, &w);
		if (!onednn_begin(&w.qk, j->qk, &e))
			onednn_begin(&w.pv_call, j->pv, &e);
#pragma omp for schedule(dynamic)
		for (int64_t i = 0; i < tasks; i++)
			if (!e.code)
				one_task(j, i, &w, &e);
		onednn_end(&w.qk);
		onednn_end(&w.pv_call);
		if (e.code)
			cpu_fail(j->d, &e);
	}
}

void cpu_attention_at(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		      struct tensor v, struct tensor keys, const struct attention *a,
		      const struct piece *pieces, int n)
{
	struct cpu *c = cpu_of(d);
	struct job j = { .d = d, .out = out, .q = q, .k = k, .v = v, .keys = keys, .a = a };
	struct product qk = { .result = DT_F32,
			      .M = BLOCK,
			      .K = round_up(a->width, PAD),
			      .ld = round_up(a->width, PAD),
			      .order = ORDER_NK },
		       pv = { .result = DT_F32,
			      .N = round_up(a->value_width, PAD),
			      .K = BLOCK,
			      .ld = BLOCK,
			      .order = ORDER_KN };

	struct desk w;

	if (!ref_good(d) || !q.rows)
		return;
	j.operand = qk.operand = pv.operand = operand_of(d);
	j.scale = a->scale * LOG2_E;
	j.group = a->heads / a->kv_heads;
	j.parts = (j.group + HEADS - 1) / HEADS;
	j.heads = round_up(j.group < HEADS ? j.group : HEADS, LANES);
	j.within = v.p == k.p && v.ld == k.ld && v.dtype == k.dtype && a->kv_heads == 1 &&
		   a->value_width <= a->width;
	qk.N = pv.M = j.heads;
	j.qk = onednn_product(c->dnn, &qk, &d->err);
	j.pv = j.qk ? onednn_product(c->dnn, &pv, &d->err) : NULL;
	if (!j.pv || !cpu_own(d, desk_at(&j, NULL, NULL)))
		return;
	desk_at(&j, c->own[0].p, &w);
	j.strip = find_strip(&j, &w, &d->err);
	for (j.piece = pieces; j.piece < pieces + n && ref_good(d); j.piece++)
		run(&j);
}
