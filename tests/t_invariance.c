/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bits of a row: alone, in any company, at any place, with 1, 2, 3 and 8 threads, under every
 * instruction set, they are the same. This is what makes a cache independent of world, windows and
 * resume.
 */
#include "bed.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))
#define MASTER 520		/* rows to draw from: two tiles and a bit */
#define K_IN 192
#define WIDE 448
#define EXPERTS 6
#define SLOTS 2

static const int threads[] = { 1, 2, 3, 8 };

/* What an operation needs on one device. */
struct bench {
	struct device d;
	struct weight matrix, gated, odd, bias, norm, freq;
	struct weight gate_up, down;			/* all experts */
	struct weight gate_up_half[2], down_half[2];	/* the same in two blocks */
};

/* Rows of the master set that stand together, in order. */
struct company {
	const char *name;
	int64_t n;
	int64_t row[MASTER];
};

struct op {
	const char *name;
	int64_t cols;		/* of the result */
	enum dtype out;
	void (*run)(struct bench *b, struct tensor out, struct tensor x, const struct company *c);
	bool f32;		/* takes only F32 */
};

static float *master;			/* [MASTER, K_IN] */
static float *old;			/* [MASTER, WIDE] what `add` adds to */

static void run_matmul(struct bench *b, struct tensor out, struct tensor x, const struct company *c)
{
	(void)c;
	b->d.be->matmul(&b->d, out, x, &b->matrix, NULL, false);
}

static void run_matmul_add(struct bench *b, struct tensor out, struct tensor x,
			   const struct company *c)
{
	(void)c;
	b->d.be->matmul(&b->d, out, x, &b->matrix, &b->bias, true);
}

/* Sizes that are no multiple of anything, from a view into wider rows. */
static void run_matmul_odd(struct bench *b, struct tensor out, struct tensor x,
			   const struct company *c)
{
	(void)c;
	b->d.be->matmul(&b->d, out, tensor_cols(x, 3, 77), &b->odd, NULL, false);
}

static void run_norm(struct bench *b, struct tensor out, struct tensor x, const struct company *c)
{
	(void)c;
	b->d.be->norm(&b->d, out, x, &b->norm, 1e-6f, 48);
}

static void run_rope(struct bench *b, struct tensor out, struct tensor x, const struct company *c)
{
	struct rope r = { .width = 40, .scale = 1, .freq = &b->freq };
	int32_t pos[MASTER];
	struct tensor p;

	for (int64_t i = 0; i < c->n; i++)
		pos[i] = (int32_t)(c->row[i] * 13);
	p = bed_ints(&b->d, c->n, 1, pos);
	b->d.be->norm(&b->d, out, x, NULL, 1, K_IN);
	b->d.be->rope(&b->d, out, 4, NULL, 0, &r, p);
	bed_drop(&b->d, p);
}

static void run_gate(struct bench *b, struct tensor out, struct tensor x, const struct company *c)
{
	(void)c;
	b->d.be->gate(&b->d, out, x, &(struct act){ .kind = ACT_GELU_TANH });
}

static void run_matmul_gate(struct bench *b, struct tensor out, struct tensor x,
			    const struct company *c)
{
	(void)c;
	b->d.be->matmul_gate(&b->d, out, tensor_cols(x, 0, K_IN), &b->gated,
			     &(struct act){ .kind = ACT_SILU });
}

static void run_add(struct bench *b, struct tensor out, struct tensor x, const struct company *c)
{
	(void)c;
	b->d.be->add(&b->d, out, tensor_cols(x, 5, out.cols));
}

static void run_route(struct bench *b, struct tensor out, struct tensor x, const struct company *c)
{
	struct router r = { .experts = 100,
			    .k = 5,
			    .score = SCORE_SIGMOID,
			    .groups = 10,
			    .groups_kept = 4,
			    .renormalise = true,
			    .scale = 1 };
	struct tensor ids = bed_tensor(&b->d, DT_I32, c->n, 5, 0, NULL);

	b->d.be->route(&b->d, ids, out, tensor_cols(x, 0, 100), &r);
	bed_drop(&b->d, ids);
}

/* Ids of two slots a token, ascending; in some tokens the second expert is held elsewhere. */
static void draw_slots(const struct company *c, int32_t *id, float *weight)
{
	for (int64_t i = 0; i < c->n; i++) {
		int32_t a = (int32_t)(c->row[i] % EXPERTS), e = (int32_t)(c->row[i] / 7 % EXPERTS);

		id[i * SLOTS] = a < e ? a : e;
		id[i * SLOTS + 1] = a < e ? e : a == e ? EXPERTS : a;
		weight[i * SLOTS] = 0.25f + (float)(c->row[i] % 5);
		weight[i * SLOTS + 1] = 0.75f;
	}
}

static void experts(struct bench *b, struct tensor out, struct tensor x, const struct company *c,
		    bool halves, bool after)
{
	struct experts ex = { .first = 0,
			      .count = EXPERTS,
			      .gate_up = &b->gate_up,
			      .down = &b->down,
			      .act = { .kind = ACT_SILU },
			      .weight_after_down = after };
	int32_t id[MASTER * SLOTS];
	float weight[MASTER * SLOTS];
	struct tensor ids, weights;

	draw_slots(c, id, weight);
	ids = bed_ints(&b->d, c->n, SLOTS, id);
	weights = bed_tensor(&b->d, DT_F32, c->n, SLOTS, 0, weight);
	for (int h = 0; h < (halves ? 2 : 1); h++) {
		if (halves) {
			ex.first = h * EXPERTS / 2;
			ex.count = EXPERTS / 2;
			ex.gate_up = &b->gate_up_half[h];
			ex.down = &b->down_half[h];
		}
		b->d.be->experts(&b->d, out, x, ids, weights, &ex, h);
	}
	bed_drop(&b->d, ids);
	bed_drop(&b->d, weights);
}

static void run_experts(struct bench *b, struct tensor out, struct tensor x,
			const struct company *c)
{
	experts(b, out, x, c, false, false);
}

/*
 * Blocks of experts one after the other, in every company but the master's, must give what one call
 * gives.
 */
static void run_experts_in_blocks(struct bench *b, struct tensor out, struct tensor x,
				  const struct company *c)
{
	experts(b, out, x, c, strcmp(c->name, "master"), true);
}

#define PARTS 3

/*
 * Slots of a token are rows of the master set that depend on its own alone; where they lie depends
 * on the company. Some slots are nothing.
 */
static void combine(struct bench *b, struct tensor out, const struct company *c, bool weighted,
		    bool add)
{
	int64_t n = c->n;
	int32_t index[MASTER * PARTS];
	float weight[MASTER * PARTS], *parts = bed_numbers(n * PARTS * K_IN);
	struct tensor y, places, weights;

	for (int64_t i = 0; i < n * PARTS; i++) {
		int64_t row = c->row[i / PARTS], s = i % PARTS, at = s * n + (n - 1 - i / PARTS);

		index[i] = (row + s) % 4 ? (int32_t)at : -1;
		weight[i] = 0.1f + (float)(row % 7) * (float)(s + 1);
		memcpy(parts + at * K_IN, master + (row * 5 + s * 77) % MASTER * K_IN,
		       K_IN * sizeof *parts);
	}
	y = bed_tensor(&b->d, DT_F32, n * PARTS, K_IN, 3, parts);
	places = bed_ints(&b->d, n, PARTS, index);
	weights = bed_tensor(&b->d, DT_F32, n, PARTS, 0, weight);
	b->d.be->combine(&b->d, out, y, places, weighted ? weights : (struct tensor){ 0 }, add);
	free(parts);
	bed_drop(&b->d, y);
	bed_drop(&b->d, places);
	bed_drop(&b->d, weights);
}

static void run_combine(struct bench *b, struct tensor out, struct tensor x,
			const struct company *c)
{
	(void)x;
	combine(b, out, c, false, false);
}

static void run_combine_weighted(struct bench *b, struct tensor out, struct tensor x,
				 const struct company *c)
{
	(void)x;
	combine(b, out, c, true, true);
}

static const struct op ops[] = {
	{ "matmul", WIDE, DT_F32, run_matmul, false },
	{ "matmul to bf16", WIDE, DT_BF16, run_matmul, false },
	{ "matmul with bias, added", WIDE, DT_F32, run_matmul_add, false },
	{ "matmul of odd sizes", 131, DT_F32, run_matmul_odd, true },
	{ "norm", K_IN, DT_F32, run_norm, false },
	{ "rope", K_IN, DT_F32, run_rope, false },
	{ "gate", K_IN / 2, DT_F32, run_gate, false },
	{ "matmul_gate", WIDE / 2, DT_BF16, run_matmul_gate, false },
	{ "add", 150, DT_F32, run_add, false },
	{ "route", 5, DT_F32, run_route, true },
	{ "experts", K_IN, DT_F32, run_experts, false },
	{ "experts in blocks", K_IN, DT_F32, run_experts_in_blocks, false },
	{ "combine", K_IN, DT_F32, run_combine, false },
	{ "combine with weights, added", K_IN, DT_F32, run_combine_weighted, false },
};

static void open_bench(struct bench *b, enum dtype compute, int nthreads)
{
	uint64_t state = bed_state;
	struct device *d = &b->d;
	float *v = bed_numbers(EXPERTS * WIDE * K_IN);

	bed_open(d, "cpu", compute, nthreads);
	bed_weight(d, &b->matrix, USE_PRODUCT, WEIGHT_BULK, DT_BF16, 1, WIDE, K_IN, v);
	bed_weight(d, &b->gated, USE_GATED, WEIGHT_BULK, DT_BF16, 1, WIDE / 2 * 2, K_IN, v + 3);
	bed_weight(d, &b->odd, USE_PRODUCT, WEIGHT_FP32, DT_F32, 1, 131, 77, v + 5);
	bed_weight(d, &b->bias, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, WIDE, 1, v + 9);
	bed_weight(d, &b->norm, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, 48, 1, v + 17);
	bed_weight(d, &b->freq, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, 20, 1, v + 33);
	bed_weight(d, &b->gate_up, USE_GATED, WEIGHT_BULK, DT_BF16, EXPERTS, 2 * 72, K_IN, v);
	bed_weight(d, &b->down, USE_PRODUCT, WEIGHT_BULK, DT_BF16, EXPERTS, K_IN, 72, v + 100);
	for (int h = 0; h < 2; h++) {
		int64_t first = h * EXPERTS / 2;

		bed_weight(d, &b->gate_up_half[h], USE_GATED, WEIGHT_BULK, DT_BF16, EXPERTS / 2,
			   2 * 72, K_IN, v + first * 2 * 72 * K_IN);
		bed_weight(d, &b->down_half[h], USE_PRODUCT, WEIGHT_BULK, DT_BF16, EXPERTS / 2,
			   K_IN, 72, v + 100 + first * K_IN * 72);
	}
	free(v);
	bed_state = state;	/* every bench has the same weights */
}

static void close_bench(struct bench *b)
{
	struct weight *w[] = { &b->matrix,
			       &b->gated,
			       &b->odd,
			       &b->bias,
			       &b->norm,
			       &b->freq,
			       &b->gate_up,
			       &b->down,
			       &b->gate_up_half[0],
			       &b->gate_up_half[1],
			       &b->down_half[0],
			       &b->down_half[1] };

	for (int i = 0; i < COUNT(w); i++)
		b->d.be->weight_free(&b->d, w[i]);
	b->d.be->close(&b->d);
}

/* The bytes of op's result on a company whose rows are operands of dtype `in`. */
static char *result(struct bench *b, const struct op *op, const struct company *c, enum dtype in)
{
	float *x = bed_numbers(c->n * K_IN), *y = bed_numbers(c->n * op->cols);
	struct tensor tx, ty;
	char *out;

	for (int64_t i = 0; i < c->n; i++) {
		memcpy(x + i * K_IN, master + c->row[i] * K_IN, K_IN * sizeof *x);
		memcpy(y + i * op->cols, old + c->row[i] * WIDE, (size_t)op->cols * sizeof *y);
	}
	tx = bed_tensor(&b->d, in, c->n, K_IN, 0, x);
	ty = bed_tensor(&b->d, op->out, c->n, op->cols, 0, y);
	op->run(b, ty, tx, c);
	out = bed_bytes(&b->d, ty);
	bed_drop(&b->d, tx);
	bed_drop(&b->d, ty);
	free(x);
	free(y);
	return out;
}

static struct company companies[16];
static int ncompanies;

static struct company *company(const char *name)
{
	struct company *c = &companies[ncompanies++];

	c->name = name;
	c->n = 0;
	return c;
}

static void make_companies(void)
{
	static const int64_t alone[] = { 0, 1, 100, 255, 256, 257, MASTER - 1 };
	struct company *c = company("master");

	for (c->n = 0; c->n < MASTER; c->n++)
		c->row[c->n] = c->n;
	c = company("reversed");
	for (; c->n < MASTER; c->n++)
		c->row[c->n] = MASTER - 1 - c->n;
	c = company("shifted by 37");
	for (; c->n < MASTER; c->n++)
		c->row[c->n] = (c->n + 37) % MASTER;
	c = company("300 drawn");
	for (; c->n < 300; c->n++)
		c->row[c->n] = (int64_t)((bed_random() + 1) / 2 * (MASTER - 1));
	c = company("257 of the middle");
	for (; c->n < 257; c->n++)
		c->row[c->n] = 130 + c->n;
	for (int i = 0; i < COUNT(alone); i++) {
		c = company("one alone");
		c->row[c->n++] = alone[i];
	}
}

static void test_op(struct bench *b, const struct op *op, enum dtype in)
{
	char *want = result(&b[0], op, &companies[0], in), what[160];
	size_t row = (size_t)op->cols * dtype_size(op->out);

	for (int t = 0; t < COUNT(threads); t++)
		for (int k = 0; k < ncompanies - 5 * (t > 1);
		     k++) { /* a row alone has no use for many threads */
			const struct company *c = &companies[k];
			char *got = result(&b[t], op, c, in);
			int bad = 0;

			for (int64_t i = 0; i < c->n; i++)
				bad += memcmp(got + (size_t)i * row, want + (size_t)c->row[i] * row,
					      row) != 0;
			snprintf(what, sizeof what, "%s %s of %s: %s, %d threads",
				 dtype_recipe_name(b->d.compute), op->name, dtype_name(in), c->name,
				 threads[t]);
			is_int(bad, 0, "%s", what);
			free(got);
		}
	free(want);
}

/* ---- attention: a row of data alone, between others, and cut into pieces of queries ---------- */

#define LENGTH 290

struct shape {
	int heads, kv_heads, width;
	int64_t window;
	bool sink;
};

/*
 * Queries [first, first + count) of the row under test, with `before` tokens of another row in
 * front and `behind` behind.
 */
static char *attend(struct bench *b, const struct shape *s, const float *q, const float *k,
		    int64_t first, int64_t count, int64_t before, int64_t behind)
{
	int64_t wq = s->heads * s->width, wk = s->kv_heads * s->width, nq = before + count + behind,
		nk = before + LENGTH + behind;
	float *mq = bed_numbers(nq * wq), *mk = bed_numbers(nk * wk);
	struct piece p[] = { { 0, before, 0, before, 0, before },
			     { before, count, first, LENGTH, before, LENGTH },
			     { before + count, behind, 0, behind, before + LENGTH, behind } };
	struct attention a = { s->heads,
			       s->kv_heads,
			       s->width,
			       s->width,
			       0.7f,
			       s->window,
			       s->sink ? &b->bias : NULL };
	struct tensor tq, tk, out;
	char *all, *mine;
	size_t row;

	memcpy(mq + before * wq, q + first * wq, (size_t)(count * wq) * sizeof *q);
	memcpy(mk + before * wk, k, (size_t)(LENGTH * wk) * sizeof *k);
	tq = bed_tensor(&b->d, b->d.compute, nq, wq, 3, mq);
	tk = bed_tensor(&b->d, b->d.compute, nk, wk, 5, mk);
	out = bed_tensor(&b->d, DT_F32, nq, wq, 1, NULL);
	b->d.be->attention(&b->d, out, tq, tk, tk, &a, p, 3);
	all = bed_bytes(&b->d, out);
	row = (size_t)wq * sizeof(float);
	mine = bed_must(malloc((size_t)count * row), &b->d.err);
	memcpy(mine, all + (size_t)before * row, (size_t)count * row);
	free(all);
	free(mq);
	free(mk);
	bed_drop(&b->d, tq);
	bed_drop(&b->d, tk);
	bed_drop(&b->d, out);
	return mine;
}

static void test_attention(struct bench *b, const struct shape *s)
{
	static const int64_t cuts[][4] = {
		/* first, count, before, behind */
		{ 0, LENGTH, 0, 0 }, { 0, LENGTH, 1, 200 },   { 0, LENGTH, 131, 0 },
		{ 0, 1, 0, 0 },      { 127, 2, 40, 3 },       { 128, 1, 0, 0 },
		{ 100, 150, 64, 9 }, { LENGTH - 1, 1, 7, 0 },
	};
	float *q = bed_numbers(LENGTH * s->heads * s->width),
	      *k = bed_numbers(LENGTH * s->kv_heads * s->width);
	size_t row = (size_t)(s->heads * s->width) * sizeof(float);
	char *want = attend(&b[0], s, q, k, 0, LENGTH, 0, 0);

	for (int t = 0; t < COUNT(threads); t++)
		for (int i = 0; i < COUNT(cuts); i++) {
			const int64_t *c = cuts[i];
			char *got = attend(&b[t], s, q, k, c[0], c[1], c[2], c[3]);

			ok(!memcmp(got, want + (size_t)c[0] * row, (size_t)c[1] * row),
			   "%s attention, %d/%d heads, window %d, sink %d: queries %d+%d between "
			   "%d and %d tokens, %d threads",
			   dtype_recipe_name(b->d.compute), s->heads, s->kv_heads, (int)s->window,
			   s->sink, (int)c[0], (int)c[1], (int)c[2], (int)c[3], threads[t]);
			free(got);
		}
	free(q);
	free(k);
	free(want);
}

int main(int argc, char **argv)
{
	static const enum dtype types[] = { DT_F32, DT_BF16 };
	static const struct shape shapes[] = { { 4, 2, 32, 0, false },
					       { 6, 1, 40, 100, true },
					       { 3, 3, 64, 1, false },
					       { 8, 4, 16, 129, true } };
	struct bench b[COUNT(threads)];

	(void)argc;
	if (!backend_names()[1]) {
		tap_skip("this build has no cpu backend");
		return tap_end();
	}
	master = bed_numbers(MASTER * K_IN);
	old = bed_numbers(MASTER * WIDE);
	make_companies();
	for (int c = 0; c < 2; c++) {
		for (int t = 0; t < COUNT(threads); t++)
			open_bench(&b[t], types[c], threads[t]);
		for (int i = 0; i < COUNT(ops); i++)
			test_op(b, &ops[i], types[(i + c) % 2 && !ops[i].f32]);
		for (int i = 0; i < COUNT(shapes); i++)
			test_attention(b, &shapes[i]);
		for (int t = 0; t < COUNT(threads); t++)
			close_bench(&b[t]);
	}
	free(master);
	free(old);
	bed_each_isa(argv[0]);
	return tap_end();
}
