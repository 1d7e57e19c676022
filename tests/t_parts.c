/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What work in parts needs of every backend: experts split over ranks add up to the bytes of one
 * call, tables outside device memory give the bytes of those inside, matrices that nobody needs
 * take no memory, and no tokens are no work.
 */
#include <pthread.h>

#include "bed.h"
#include "exchange.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static struct device dut;

static const enum dtype types[] = { DT_F32, DT_BF16 };
static const int threads[] = { 1, 3 };

static const char *label(const char *fmt, ...)
{
	static char s[256];
	int n = snprintf(s, sizeof s, "%s %s, %d threads: ", dut.be->name,
			 dtype_recipe_name(dut.compute), dut.threads);
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(s + n, sizeof s - (size_t)n, fmt, ap);
	va_end(ap);
	return s;
}

/* From 0 to n - 1. */
static int32_t draw(int64_t n)
{
	return (int32_t)((bed_random() * 0.5f + 0.5f) * 0.999f * (float)n);
}

static void *room(size_t bytes)
{
	struct err e = { 1, "no memory" };

	return bed_must(calloc(bytes + 1, 1), &e);
}

/* The device has failed with a sentence that holds `text`, and works again. */
static void fails(const char *text, const char *what)
{
	struct err e = ERR_INIT;

	ok(dut.be->sync(&dut, &e) == -1 && e.code == EXIT_REFUSED && strstr(e.text, text), "%s",
	   label("%s: %s", what, e.text));
	dut.err = (struct err)ERR_INIT;
}

/* ---- pick ------------------------------------------------------------------------------------ */

static void one_pick(enum dtype type, int64_t rows, int64_t n, int64_t cols)
{
	size_t size = dtype_size(type), row = (size_t)cols * size;
	unsigned char *x = room((size_t)rows * row), *got;
	int32_t *from = room((size_t)n * sizeof *from);
	struct tensor tx = bed_tensor(&dut, type, rows, cols, 3, NULL),
		      out = bed_tensor(&dut, type, n, cols, 5, NULL), index;
	int wrong = 0;

	for (size_t i = 0; i < (size_t)rows * row; i++)
		x[i] = (unsigned char)draw(256);
	for (int64_t i = 0; i < n; i++)
		from[i] = draw(rows);
	index = bed_ints(&dut, n, 1, from);
	dut.be->upload(&dut, tx, x);
	dut.be->pick(&dut, out, tx, index);
	got = bed_bytes(&dut, out);
	for (int64_t i = 0; i < n; i++)
		wrong += memcmp(got + (size_t)i * row, x + (size_t)from[i] * row, row) != 0;
	is_int(wrong, 0, "%s",
	       label("pick %d of %d rows of %d %s", (int)n, (int)rows, (int)cols,
		     dtype_name(type)));
	ok(bed_guards(&dut, out), "%s", label("pick: nothing outside its columns"));
	free(x);
	free(from);
	free(got);
	bed_drop(&dut, tx);
	bed_drop(&dut, out);
	bed_drop(&dut, index);
}

static void test_pick(void)
{
	static const int64_t shapes[][3] = {
		{ 5, 0, 3 }, { 1, 1, 1 }, { 7, 33, 5 }, { 40, 257, 67 }
	};
	static const int32_t outside[] = { 4, -1, 1 << 30 };

	for (int type = DT_NONE + 1; type < DT_COUNT; type++)
		for (int i = 0; i < COUNT(shapes); i++)
			one_pick((enum dtype)type, shapes[i][0], shapes[i][1], shapes[i][2]);
	for (int i = 0; i < COUNT(outside); i++) {
		struct tensor x = bed_tensor(&dut, DT_BF16, 4, 6, 0, NULL),
			      out = bed_tensor(&dut, DT_BF16, 3, 6, 0, NULL),
			      index = bed_ints(&dut, 3, 1, (int32_t[]){ 0, outside[i], 3 });

		dut.be->pick(&dut, out, x, index);
		fails("cannot be picked", "pick of a row that is not there");
		bed_drop(&dut, x);
		bed_drop(&dut, out);
		bed_drop(&dut, index);
	}
}

/* ---- combine --------------------------------------------------------------------------------- */

/* Each product and each sum rounded to F32, in slot order. */
static void expect_combined(float *sum, const float *y, const int32_t *index, const float *weights,
			    int64_t T, int64_t k, int64_t n)
{
	for (int64_t t = 0; t < T; t++)
		for (int64_t s = 0; s < k; s++)
			for (int64_t c = 0; index[t * k + s] >= 0 && c < n; c++) {
				volatile float part = y[index[t * k + s] * n + c];

				if (weights)
					part = part * weights[t * k + s];
				sum[t * n + c] += part;
			}
}

/* A third of the slots, and all of token 1, are nothing. */
static void one_combine(int64_t T, int64_t k, int64_t n, int64_t rows, int v)
{
	bool add = v & 1, weighted = v & 2;
	float *old = bed_numbers(T * n), *y = bed_numbers(rows * n), *w = bed_numbers(T * k), *got;
	int32_t *index = room((size_t)(T * k) * sizeof *index);
	struct tensor sum = bed_tensor(&dut, DT_F32, T, n, v & 4 ? 3 : 0, old),
		      ty, tw, ti;

	for (int64_t i = 0; i < rows * n; i++)
		y[i] = bed_random();	/* all digits of F32 */
	for (int64_t i = 0; i < T * k; i++)
		w[i] = bed_random();
	for (int64_t i = 0; i < T * k; i++)
		index[i] = rows && i / k != 1 && draw(3) ? draw(rows) : -1 - draw(9);
	ty = bed_tensor(&dut, DT_F32, rows, n, v & 4 ? 0 : 2, y);
	tw = bed_tensor(&dut, DT_F32, T, k, v & 4, w);
	ti = bed_ints(&dut, T, k, index);
	dut.be->combine(&dut, sum, ty, ti, weighted ? tw : (struct tensor){ 0 }, add);
	got = bed_bytes(&dut, sum);
	if (!add)
		memset(old, 0, (size_t)(T * n) * sizeof *old);
	expect_combined(old, y, index, weighted ? w : NULL, T, k, n);
	ok(!memcmp(got, old, (size_t)(T * n) * sizeof *got), "%s",
	   label("combine %d tokens, %d slots of %d, variant %d", (int)T, (int)k, (int)n, v));
	ok(bed_guards(&dut, sum), "%s", label("combine: nothing outside its columns"));
	free(old);
	free(y);
	free(w);
	free(got);
	free(index);
	bed_drop(&dut, sum);
	bed_drop(&dut, ty);
	bed_drop(&dut, ti);
	bed_drop(&dut, tw);
}

static void test_combine(void)
{
	static const int64_t shapes[][4] = {	/* tokens, slots, columns, rows of y */
		{ 0, 2, 5, 3 },	    { 1, 1, 1, 1 },   { 2, 5, 16, 9 },
		{ 65, 3, 33, 70 }, { 7, 2, 20, 0 }, { 130, 8, 601, 999 },
	};
	static const int32_t outside[] = { 4, 1 << 30 };

	for (int i = 0; i < COUNT(shapes); i++)
		for (int v = 0; v < 8; v++)
			one_combine(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], v);
	for (int i = 0; i < COUNT(outside); i++) {
		struct tensor y = bed_tensor(&dut, DT_F32, 4, 6, 0, NULL),
			      sum = bed_tensor(&dut, DT_F32, 1, 6, 0, NULL), none = { 0 },
			      index = bed_ints(&dut, 1, 3, (int32_t[]){ 0, outside[i], -1 });

		dut.be->combine(&dut, sum, y, index, none, false);
		fails("of which there are 4", "combine of a part that is not there");
		bed_drop(&dut, y);
		bed_drop(&dut, sum);
		bed_drop(&dut, index);
	}
}

/* ---- experts over ranks ---------------------------------------------------------------------- */

#define E 8			/* experts; in `cold` ones no token is interested */
#define IS_COLD(e) ((e) == 4 || (e) == 5)

/* A layer of routed experts and tokens that have chosen. */
struct layer {
	int64_t T, k, hidden, I, N;
	float *x, *weights, *old;	/* [T, hidden], [T, k], [T, N] */
	int32_t *ids;			/* [T, k]; E is nobody's expert */
	float *gate_up, *down;		/* [E, 2I, hidden], [E, N, I] */
	enum dtype in;
	bool after, add;
	struct act act;
};

static struct layer make_layer(int64_t T, int64_t k, int64_t hidden, int64_t I, int64_t N, int v)
{
	struct layer l = { .T = T, .k = k, .hidden = hidden, .I = I, .N = N,
			   .in = types[v & 1], .after = v & 2, .add = v & 4,
			   .act = { .kind = v & 1 ? ACT_GELU_TANH : ACT_SILU } };

	l.x = bed_numbers(T * hidden);
	l.weights = bed_numbers(T * k);
	l.old = bed_numbers(T * N);
	l.gate_up = bed_numbers(E * 2 * I * hidden);
	l.down = bed_numbers(E * N * I);
	l.ids = room((size_t)(T * k) * sizeof *l.ids);
	for (int64_t i = 0; i < T * k; i++)
		l.weights[i] = bed_random();	/* all digits of F32 */
	for (int64_t t = 0; t < T; t++)
		for (int64_t s = 0, e = draw(2); s < k; e++) {
			int64_t left = E + 1 - e - (e <= 4 ? 2 : e == 5);

			if (!IS_COLD(e) && (left <= k - s || draw(left) < k - s))
				l.ids[t * k + s++] = (int32_t)e;
		}
	return l;
}

static void drop_layer(struct layer *l)
{
	free(l->x);
	free(l->weights);
	free(l->old);
	free(l->gate_up);
	free(l->down);
	free(l->ids);
}

/*
 * A weight of matrices [first, first + count) of `values`, of which those that `chosen` does not
 * mark are never filled.
 */
static void some_matrices(struct weight *w, enum weight_use use, int64_t first, int64_t count,
			  int64_t rows, int64_t cols, const float *values, const bool *chosen)
{
	struct err e = ERR_INIT;

	*w = (struct weight){ .count = count, .rows = rows, .cols = cols, .use = use,
			      .stored = DT_F32 };
	bed_check(dut.be->weight_alloc(&dut, w, &e), &e);
	for (int64_t i = 0; i < count; i++)
		if (chosen[first + i])
			bed_check(dut.be->weight_fill(&dut, w, i, 0, rows,
						      values + (first + i) * rows * cols, DT_F32,
						      NULL, &e),
				  &e);
	bed_check(dut.be->weight_ready(&dut, w, &e), &e);
}

/* Experts [first, first + count) of the layer on rows of x, each with its k ids. */
static void run_experts(const struct layer *l, struct tensor sum, struct tensor x,
			struct tensor ids, struct tensor weights, int64_t first, int64_t count,
			const bool *chosen, bool add)
{
	struct weight up, down;
	struct experts ex = { .first = first, .count = count, .gate_up = &up, .down = &down,
			      .act = l->act, .weight_after_down = l->after };

	some_matrices(&up, USE_GATED, first, count, 2 * l->I, l->hidden, l->gate_up, chosen);
	some_matrices(&down, USE_PRODUCT, first, count, l->N, l->I, l->down, chosen);
	dut.be->experts(&dut, sum, x, ids, weights, &ex, add);
	dut.be->weight_free(&dut, &up);
	dut.be->weight_free(&dut, &down);
}

static void *at_once(const struct layer *l)
{
	static const bool all[E] = { true, true, true, true, true, true, true, true };
	struct tensor sum = bed_tensor(&dut, DT_F32, l->T, l->N, 0, l->old),
		      x = bed_tensor(&dut, l->in, l->T, l->hidden, 0, l->x),
		      ids = bed_ints(&dut, l->T, l->k, l->ids),
		      weights = bed_tensor(&dut, DT_F32, l->T, l->k, 0, l->weights);
	void *bytes;

	run_experts(l, sum, x, ids, weights, 0, E, all, l->add);
	bytes = bed_bytes(&dut, sum);
	bed_drop(&dut, sum);
	bed_drop(&dut, x);
	bed_drop(&dut, ids);
	bed_drop(&dut, weights);
	return bytes;
}

/* What reaches one rank: a row for each slot with an expert of its own. */
struct parcel {
	int64_t n;
	int32_t *token, *id;		/* [n] */
	float *weight;			/* [n] */
	bool chosen[E];
};

/* Odd ranks get their slots last token first; index[slot] = row of y. */
static struct parcel pack(const struct layer *l, int64_t first, int64_t count, bool backwards,
			  int64_t base, int32_t *index)
{
	int64_t slots = l->T * l->k;
	struct parcel p = { .token = room((size_t)slots * sizeof *p.token),
			    .id = room((size_t)slots * sizeof *p.id),
			    .weight = room((size_t)slots * sizeof *p.weight) };

	for (int64_t i = 0; i < slots; i++) {
		int64_t slot = backwards ? slots - 1 - i : i, id = l->ids[slot];

		if (id < first || id >= first + count)
			continue;
		index[slot] = (int32_t)(base + p.n);
		p.token[p.n] = (int32_t)(slot / l->k);
		p.id[p.n] = (int32_t)id;
		p.weight[p.n] = l->after ? 1 : l->weights[slot];
		p.chosen[id] = true;
		p.n++;
	}
	return p;
}

/* One rank's rows of y; the number of them. */
static int64_t one_rank(const struct layer *l, struct tensor x, struct tensor y, int64_t base,
			int rank, int ranks, int32_t *index)
{
	int64_t first = (int64_t)rank * E / ranks, count = (int64_t)(rank + 1) * E / ranks - first;
	struct parcel p = pack(l, first, count, rank & 1, base, index);
	struct tensor rows = bed_tensor(&dut, l->in, p.n, l->hidden, 0, NULL),
		      token = bed_ints(&dut, p.n, 1, p.token), id = bed_ints(&dut, p.n, 1, p.id),
		      weight = bed_tensor(&dut, DT_F32, p.n, 1, 0, p.weight);

	dut.be->pick(&dut, rows, x, token);
	run_experts(l, tensor_rows(y, base, p.n), rows, id, weight, first, count, p.chosen, false);
	free(p.token);
	free(p.id);
	free(p.weight);
	bed_drop(&dut, rows);
	bed_drop(&dut, token);
	bed_drop(&dut, id);
	bed_drop(&dut, weight);
	return p.n;
}

/* The same over ranks; *idle counts those without a slot. */
static void *over_ranks(const struct layer *l, int ranks, int *idle)
{
	int64_t slots = l->T * l->k, base = 0;
	int32_t *index = room((size_t)slots * sizeof *index);
	struct tensor x = bed_tensor(&dut, l->in, l->T, l->hidden, 0, l->x),
		      y = bed_tensor(&dut, DT_F32, slots, l->N, 0, NULL),
		      sum = bed_tensor(&dut, DT_F32, l->T, l->N, 0, l->old), weights, places;
	void *bytes;

	for (int64_t i = 0; i < slots; i++)
		index[i] = -1;
	for (int r = 0; r < ranks; r++) {
		int64_t n = one_rank(l, x, y, base, r, ranks, index);

		*idle += !n;
		base += n;
	}
	places = bed_ints(&dut, l->T, l->k, index);
	weights = bed_tensor(&dut, DT_F32, l->T, l->k, 0, l->weights);
	dut.be->combine(&dut, sum, tensor_rows(y, 0, base), places,
			l->after ? weights : (struct tensor){ 0 }, l->add);
	bytes = bed_bytes(&dut, sum);
	free(index);
	bed_drop(&dut, x);
	bed_drop(&dut, y);
	bed_drop(&dut, sum);
	bed_drop(&dut, weights);
	bed_drop(&dut, places);
	return bytes;
}

static void one_split(int64_t T, int64_t k, int64_t hidden, int64_t I, int64_t N, int v)
{
	static const int ranks[] = { 1, 2, 4 };
	struct layer l = make_layer(T, k, hidden, I, N, v);
	void *want = at_once(&l);

	for (int r = 0; r < COUNT(ranks); r++) {
		int idle = 0;
		void *got = over_ranks(&l, ranks[r], &idle);

		ok(!memcmp(got, want, (size_t)(T * N) * sizeof(float)), "%s",
		   label("experts of %d tokens, %d slots, variant %d, over %d ranks", (int)T,
			 (int)k, v, ranks[r]));
		if (ranks[r] == 4)
			ok(idle > 0, "%s", label("%d ranks of 4 had no slots", idle));
		free(got);
	}
	free(want);
	drop_layer(&l);
}

static void test_split(void)
{
	for (int v = 0; v < 8; v++) {
		one_split(1, 1, 5, 3, 7, v);
		one_split(7, 3, 40, 24, 33, v);
		one_split(66, 5, 70, 72, 100, v);
	}
	one_split(0, 2, 16, 16, 16, 0);
	one_split(9, 2, 20, 3200, 18, 2);	/* K of down in several blocks */
}

/* ---- tables behind a reader ------------------------------------------------------------------ */

struct source {
	const char *data;	/* the table as stored */
	size_t row;
	pthread_t caller;
	int calls, fail_at;
	int64_t most;
	bool elsewhere;		/* asked from another thread */
};

static int read_source(void *ctx, const int32_t *ids, int64_t n, void *dst, struct err *e)
{
	struct source *s = ctx;

	s->elsewhere |= !pthread_equal(s->caller, pthread_self());
	s->most = n > s->most ? n : s->most;
	if (++s->calls == s->fail_at)
		return err_refuse(e, "the table's file has ended");
	for (int64_t i = 0; i < n; i++)
		memcpy((char *)dst + (size_t)i * s->row, s->data + (size_t)ids[i] * s->row, s->row);
	return 0;
}

struct table {
	int64_t rows, cols;
	struct weight inside, outside;
	struct table_reader reader;
	struct source source;
	char *data;
};

static void open_table(struct table *t, enum dtype stored, enum weight_unit unit, int64_t rows,
		       int64_t cols)
{
	size_t size = dtype_size(stored), n = (size_t)(rows * cols);
	struct err e = ERR_INIT;

	*t = (struct table){ .rows = rows, .cols = cols, .data = room(n * size) };
	for (size_t i = 0; i < n; i++) {
		float f = bed_random();

		if (dtype_is_float(stored))
			dtype_convert(t->data + i * size, stored, &f, DT_F32, 1);
		else
			memcpy(t->data + i * size, &(int64_t){ (int32_t)(f * 2e9f) }, size);
	}
	t->inside = (struct weight){ .count = 1, .rows = rows, .cols = cols,
				     .use = unit == WEIGHT_RAW ? USE_RAW : USE_TABLE,
				     .unit = unit, .stored = stored };
	t->outside = t->inside;
	t->source = (struct source){ .data = t->data, .row = (size_t)cols * size,
				     .caller = pthread_self() };
	t->reader = (struct table_reader){ read_source, &t->source };
	t->outside.reader = &t->reader;
	bed_check(dut.be->weight_alloc(&dut, &t->inside, &e) ||
			  dut.be->weight_fill(&dut, &t->inside, 0, 0, rows, t->data, stored, NULL,
					      &e) ||
			  dut.be->weight_ready(&dut, &t->inside, &e),
		  &e);
}

static void close_table(struct table *t)
{
	dut.be->weight_free(&dut, &t->inside);
	dut.be->weight_free(&dut, &t->outside);
	free(t->data);
}

/* ids [T,k] as columns of a wider tensor. */
static struct tensor draw_ids(int64_t T, int64_t k, int64_t rows)
{
	int32_t *v = room((size_t)(T * (k + 2)) * sizeof *v);
	struct tensor t;

	for (int64_t i = 0; i < T * (k + 2); i++)
		v[i] = draw(rows);
	t = bed_ints(&dut, T, k + 2, v);
	free(v);
	return t;
}

static void one_reader(enum dtype stored, enum weight_unit unit, enum dtype to, int64_t rows,
		       int64_t cols, int64_t T, int64_t k)
{
	struct tensor all = draw_ids(T, k, rows), ids = tensor_cols(all, 1, k),
		      in = bed_tensor(&dut, to, T, k * cols, 3, NULL),
		      out = bed_tensor(&dut, to, T, k * cols, 3, NULL);
	int64_t row = cols * (int64_t)dtype_size(stored), most = (1 << 20) / row;
	struct table t;
	char *a, *b;

	open_table(&t, stored, unit, rows, cols);
	dut.be->rows(&dut, in, &t.inside, ids);
	dut.be->rows(&dut, out, &t.outside, ids);
	a = bed_bytes(&dut, in);
	b = bed_bytes(&dut, out);
	ok(!memcmp(a, b, (size_t)(T * k * cols) * dtype_size(to)) && bed_guards(&dut, out), "%s",
	   label("reader of %d x %d %s, unit %d, %d x %d ids, to %s", (int)rows, (int)cols,
		 dtype_name(stored), unit, (int)T, (int)k, dtype_name(to)));
	ok(t.source.most <= (most ? most : 1) && !t.source.elsewhere &&
		   (t.source.calls > 1) == (T * k > (most ? most : 1)) &&
		   (t.source.calls > 0) == (T > 0) && !weight_bytes(&t.outside, dut.compute),
	   "%s", label("%d blocks of at most %d rows", t.source.calls, (int)t.source.most));
	free(a);
	free(b);
	close_table(&t);
	bed_drop(&dut, all);
	bed_drop(&dut, in);
	bed_drop(&dut, out);
}

static void test_reader_fails(void)
{
	struct tensor out = bed_tensor(&dut, DT_F32, 3, 300000, 0, NULL),
		      good = bed_ints(&dut, 3, 1, (int32_t[]){ 0, 2, 1 }),
		      bad = bed_ints(&dut, 3, 1, (int32_t[]){ 0, 1, 3 }),
		      negative = bed_ints(&dut, 3, 1, (int32_t[]){ -1, 1, 2 });
	struct table t;

	open_table(&t, DT_F32, WEIGHT_FP32, 3, 300000);
	dut.be->rows(&dut, out, &t.outside, bad);
	fails("outside a table of 3", "reader");
	dut.be->rows(&dut, out, &t.outside, negative);
	fails("outside a table of 3", "reader");
	is_int(t.source.calls, 0, "%s", label("a reader is not asked for rows that are not there"));
	t.source.fail_at = 2;
	dut.be->rows(&dut, out, &t.outside, good);
	fails("the table's file has ended", "reader");
	is_int(t.source.calls, 2, "%s", label("a reader that failed is not asked again"));
	t.outside.stored = DT_F8_E4M3;
	dut.be->rows(&dut, out, &t.outside, good);
	fails("cannot be used as numbers", "reader");
	close_table(&t);
	bed_drop(&dut, out);
	bed_drop(&dut, good);
	bed_drop(&dut, bad);
	bed_drop(&dut, negative);
}

static void test_reader(void)
{
	static const enum dtype stored[] = { DT_F32, DT_BF16, DT_F16 };
	static const int64_t shapes[][4] = {	/* rows, cols, T, k */
		{ 50, 33, 0, 2 }, { 50, 33, 1, 1 }, { 50, 33, 65, 3 },
		{ 5, 70000, 7, 2 }, { 4, 600000, 3, 1 },
	};

	for (int s = 0; s < COUNT(stored); s++)
		for (int i = 0; i < COUNT(shapes); i++)
			for (int v = 0; v < (shapes[i][1] > 100 ? 1 : 4); v++)
				one_reader(stored[s], v & 2 ? WEIGHT_FP32 : WEIGHT_BULK,
					   types[v & 1], shapes[i][0], shapes[i][1], shapes[i][2],
					   shapes[i][3]);
	one_reader(DT_I64, WEIGHT_RAW, DT_I64, 9, 3, 30, 2);
	one_reader(DT_I64, WEIGHT_RAW, DT_I32, 9, 3, 30, 2);
	one_reader(DT_I32, WEIGHT_RAW, DT_I64, 9, 3, 30, 2);
	test_reader_fails();
}

/* ---- weights filled in part ------------------------------------------------------------------ */

/* Rows that are missing in a matrix of which others were filled are zero. */
static void test_missing_rows(void)
{
	int64_t rows = 700, cols = 70, filled = 3;
	float *v = bed_numbers(rows * cols), *x = bed_numbers(2 * cols), *got;
	struct weight w = { .count = 1, .rows = rows, .cols = cols, .use = USE_PRODUCT,
			    .stored = DT_F32 };
	struct tensor tx = bed_tensor(&dut, DT_F32, 2, cols, 0, x),
		      y = bed_tensor(&dut, DT_F32, 2, rows, 0, NULL);
	int wrong = 0, zeros = 0;
	struct err e = ERR_INIT;

	bed_check(dut.be->weight_alloc(&dut, &w, &e) ||
			  dut.be->weight_fill(&dut, &w, 0, 100, filled, v, DT_F32, NULL, &e) ||
			  dut.be->weight_ready(&dut, &w, &e),
		  &e);
	dut.be->matmul(&dut, y, tx, &w, NULL, false);
	got = bed_floats(&dut, y);
	for (int64_t i = 0; i < 2 * rows; i++) {
		bool missing = i % rows < 100 || i % rows >= 100 + filled;

		wrong += missing && got[i] != 0;
		zeros += !missing && got[i] == 0;
	}
	ok(!wrong && zeros < 2, "%s", label("rows that nobody filled are zero"));
	free(v);
	free(x);
	free(got);
	bed_drop(&dut, tx);
	bed_drop(&dut, y);
	dut.be->weight_free(&dut, &w);
}

/* Bytes of this process, all it has asked for or those in memory, -1 = the system does not say. */
static int64_t process_bytes(bool in_memory)
{
	FILE *f = fopen("/proc/self/statm", "r");
	long long all, pages = -1;

	if (f && fscanf(f, "%lld %lld", &all, &pages) != 2)
		pages = -1;
	if (f)
		fclose(f);
	return pages < 0 ? -1 : (int64_t)(in_memory ? pages : all) * sysconf(_SC_PAGESIZE);
}

/* Tools that check memory write all of it themselves. */
static bool memory_is_watched(void)
{
	const char *preload = getenv("LD_PRELOAD");

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
	return true;
#endif
	return preload && strstr(preload, "vgpreload");
}

/* Memory that freed weights left behind would be counted, too. */
static void forget_weights(void)
{
	const char *name = dut.be->name;
	enum dtype compute = dut.compute;
	int n = dut.threads;

	dut.be->close(&dut);
	bed_open(&dut, name, compute, n);
}

#define MATRICES 32
#define WIDE 1024
#define DEEP 1024

/*
 * Two matrices of many are filled and used: memory grows by theirs, and by a huge page on either
 * side of each.
 */
static void test_untouched(enum weight_use use)
{
	float *v = bed_numbers(WIDE * DEEP);
	struct weight w = { .count = MATRICES, .rows = WIDE, .cols = DEEP, .use = use,
			    .stored = DT_F32, .unit = WEIGHT_FP32 };
	int64_t matrix = WIDE * DEEP * (int64_t)sizeof *v, before, after;
	struct err e = ERR_INIT;

	forget_weights();
	before = process_bytes(true);
	bed_check(dut.be->weight_alloc(&dut, &w, &e), &e);
	for (int i = 3; i < MATRICES; i += 20)
		bed_check(dut.be->weight_fill(&dut, &w, i, 0, WIDE, v, DT_F32, NULL, &e), &e);
	bed_check(dut.be->weight_ready(&dut, &w, &e), &e);
	after = process_bytes(true);
	if (before < 0 || memory_is_watched() || !dut.be->host_memory)
		tap_skip("resident memory says nothing here");
	else
		ok(after - before > matrix && after - before < MATRICES / 2 * matrix, "%s",
		   label("2 of %d matrices of %d KB, use %d, take %d KB", MATRICES,
			 (int)(matrix >> 10), use, (int)((after - before) >> 10)));
	dut.be->weight_free(&dut, &w);
	free(v);
}

/* A device may free behind its verbs. */
static void let_go(struct weight *w)
{
	struct err e = ERR_INIT;

	dut.be->weight_free(&dut, w);
	bed_check(dut.be->sync(&dut, &e), &e);
}

/*
 * A weight takes the memory of one that went, which had it from a larger one: nobody holds more
 * than twice what is needed.
 */
static void test_handed_on(void)
{
	static const bool all = true;
	int64_t most = 8 * DEEP, least = 2 * DEEP, before, after;
	float *v = bed_numbers(most * DEEP);
	struct weight large, small;
	uint64_t bytes;

	forget_weights();
	before = process_bytes(true);
	some_matrices(&large, USE_PRODUCT, 0, 1, most, DEEP, v, &all);
	let_go(&large);
	some_matrices(&small, USE_PRODUCT, 0, 1, 2 * least, DEEP, v, &all);
	let_go(&small);
	some_matrices(&small, USE_PRODUCT, 0, 1, least, DEEP, v, &all);
	some_matrices(&large, USE_PRODUCT, 0, 1, most, DEEP, v, &all);
	after = process_bytes(true);
	bytes = weight_bytes(&large, dut.compute) + 2 * weight_bytes(&small, dut.compute);
	if (before < 0 || memory_is_watched())
		tap_skip("resident memory says nothing here");
	else
		ok(after - before < (int64_t)bytes + (4 << 20), "%s",
		   label("memory that was handed on, %d KB for at most %d",
			 (int)((after - before) >> 10), (int)(bytes >> 10)));
	dut.be->weight_free(&dut, &large);
	dut.be->weight_free(&dut, &small);
	free(v);
}

/* ---- what an exchange takes ------------------------------------------------------------------ */

/* Of rows so small that what accompanies a row counts. An allocator may add 2 MiB to each array. */
static void test_exchange_bytes(void)
{
	const struct routing most = { .experts = 8, .k = 2, .in = 1, .out = 1 };
	const int64_t rows = 1 << 22, arrays = 16;
	struct exchange x = { 0 };
	struct err e = ERR_INIT;
	int64_t before, after, want = (int64_t)exchange_bytes(&most, rows, dut.compute);
	/* rows that go by the host's memory, which a device's plan does not count */
	int64_t staged = dut.be->host_memory ? 0 : 2 * rows * (int64_t)sizeof(float);
	struct comm c;

	comm_self_open(&c);
	before = process_bytes(false);
	bed_check(exchange_open(&x, &dut, &c, &most, rows, &e), &e);
	after = process_bytes(false);
	exchange_release(&x);
	if (before < 0 || memory_is_watched())
		tap_skip("memory says nothing here");
	else
		ok(after - before >= want &&
			   after - before < want + staged + arrays * (2 << 20) + (1 << 20),
		   "%s",
		   label("an exchange takes %d KB, %d are counted", (int)((after - before) >> 10),
			 (int)(want >> 10)));
}

/* ---- no tokens ------------------------------------------------------------------------------- */

/* Every verb on nothing, with weights that are not in memory: nothing is read, nothing written. */
static void test_nothing(void)
{
	unsigned char *guard = room(64), same[64];
	struct weight w = { .count = 4, .rows = 8, .cols = 8, .use = USE_GATED, .stored = DT_F32 },
		      v = { .count = 1, .rows = 8, .cols = 1, .use = USE_VECTOR, .stored = DT_F32 },
		      t = { .count = 1, .rows = 8, .cols = 8, .use = USE_TABLE, .stored = DT_F32 };
	struct act act = { .kind = ACT_SILU };
	struct rope r = { .width = 4, .scale = 1, .freq = &v };
	struct router router = { .experts = 8, .k = 2, .bias = &v };
	struct experts ex = { .count = 4, .gate_up = &w, .down = &w, .act = act };
	struct attention a = { 2, 2, 4, 4, 1, 0, &v };
	struct piece piece = { 0 };
	struct err e = ERR_INIT;

	memset(guard, GUARD, 64);
	memset(same, GUARD, 64);
	for (int p = 0; p < 2; p++) {
		struct tensor x = { p ? guard : NULL, DT_F32, 0, 8, 8 }, y = x,
			      i = { p ? guard : NULL, DT_I32, 0, 2, 2 }, one = i,
			      s = { p ? guard : NULL, DT_F32, 0, 2, 2 };

		one.cols = one.ld = 1;
		dut.be->upload(&dut, x, guard);
		dut.be->store(&dut, guard, DT_F32, 8, x);
		dut.be->rows(&dut, y, &t, one);
		dut.be->matmul(&dut, y, x, &w, &v, p);
		dut.be->matmul_gate(&dut, tensor_cols(y, 0, 4), x, &w, &act);
		dut.be->norm(&dut, y, x, &v, 1e-6f, 8);
		dut.be->rope(&dut, x, 2, p ? &v : NULL, 1e-6f, &r, one);
		dut.be->attention(&dut, y, x, x, x, &a, &piece, p);
		dut.be->gate(&dut, tensor_cols(y, 0, 4), x, &act);
		dut.be->add(&dut, y, x);
		dut.be->route(&dut, i, s, x, &router);
		dut.be->experts(&dut, y, x, i, s, &ex, p);
		dut.be->pick(&dut, y, x, one);
		dut.be->combine(&dut, y, x, i, s, p);
	}
	ok(!dut.be->sync(&dut, &e) && !memcmp(guard, same, 64), "%s",
	   label("no verb minds having nothing to do: %s", e.text));
	free(guard);
}

int main(int argc, char **argv)
{
	(void)argc;
	for (const char *const *name = bed_backends(); *name; name++)
		for (int i = 0; i < COUNT(types) * COUNT(threads); i++) {
			bool itself = !strcmp(*name, "ref");

			if (itself && (bed_forced_isa() || i % COUNT(threads)))
				continue;
			bed_open(&dut, *name, types[i / COUNT(threads)],
				 threads[i % COUNT(threads)]);
			ok(dut.be->host_memory == !!strcmp(*name, "cuda"), "%s",
			   label("whose its memory is"));
			test_combine();
			test_split();
			test_missing_rows();
			test_nothing();
			if (!bed_forced_isa()) {
				test_pick();
				test_reader();
				test_untouched(USE_GATED);
				test_untouched(USE_PRODUCT);
				test_handed_on();
				test_exchange_bytes();
			}
			dut.be->close(&dut);
		}
	ok(!backend_measure.host_memory, "the device that only measures has no memory");
	if (backend_names()[1])
		bed_each_isa(argv[0]);
	return tap_end();
}
