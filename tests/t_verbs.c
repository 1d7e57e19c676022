/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every verb of every backend against ref on odd sizes, ref against values known otherwise, and
 * what verbs refuse.
 */
#include <malloc.h>
#include <pthread.h>

#include "bed.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

/* The device under test and the oracle. */
static struct device dut, ref;

/* F32 results differ by the order of sums; results stored as bf16 by one rounding. */
#define F32_BOUND 3e-6
#define BF16_BOUND 8e-3

static double bound_of(enum dtype stored)
{
	return stored == DT_BF16 ? BF16_BOUND : F32_BOUND;
}

static double most(const float *p, int64_t n)
{
	double m = 0;

	for (int64_t i = 0; i < n; i++)
		m = fabs((double)p[i]) > m ? fabs((double)p[i]) : m;
	return m;
}

/*
 * Compares two results and their guards, and drops them. `bound` is relative to the largest number.
 */
static void same(struct tensor got, struct tensor want, double bound, const char *what)
{
	float *g = bed_floats(&dut, got), *w = bed_floats(&ref, want);
	int64_t n = got.rows * got.cols;

	is_int(bed_differ(g, w, n, 0, bound * (1 + most(w, n))), 0, "%s", what);
	if (got.ld > got.cols)
		ok(bed_guards(&dut, got), "%s: nothing outside its columns", what);
	free(g);
	free(w);
	bed_drop(&dut, got);
	bed_drop(&ref, want);
}

static const char *label(const char *verb, const char *fmt, ...)
{
	static char s[256];
	int n = snprintf(s, sizeof s, "%s %s %s ", dut.be->name, dtype_recipe_name(dut.compute),
			 verb);
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(s + n, sizeof s - (size_t)n, fmt, ap);
	va_end(ap);
	return s;
}

/* A tensor and a weight on both devices. */
struct both {
	struct tensor dut, ref;
};

static struct both both_tensor(enum dtype type, int64_t rows, int64_t cols, int64_t pad,
			       const float *values)
{
	return (struct both){ bed_tensor(&dut, type, rows, cols, pad, values),
			      bed_tensor(&ref, type, rows, cols, pad, values) };
}

static struct both both_random(enum dtype type, int64_t rows, int64_t cols, int64_t pad)
{
	float *v = bed_numbers(rows * cols);
	struct both b = both_tensor(type, rows, cols, pad, v);

	free(v);
	return b;
}

static struct both both_ints(int64_t rows, int64_t cols, const int32_t *v)
{
	return (struct both){ bed_ints(&dut, rows, cols, v), bed_ints(&ref, rows, cols, v) };
}

static void both_drop(struct both b)
{
	bed_drop(&dut, b.dut);
	bed_drop(&ref, b.ref);
}

struct pair {
	struct weight dut, ref;
};

static void pair_make(struct pair *p, enum weight_use use, enum weight_unit unit, enum dtype stored,
		      int64_t count, int64_t rows, int64_t cols)
{
	float *v = bed_numbers(count * rows * cols);

	bed_weight(&dut, &p->dut, use, unit, stored, count, rows, cols, v);
	bed_weight(&ref, &p->ref, use, unit, stored, count, rows, cols, v);
	free(v);
}

static void pair_drop(struct pair *p)
{
	dut.be->weight_free(&dut, &p->dut);
	ref.be->weight_free(&ref, &p->ref);
}

static const enum dtype types[] = { DT_F32, DT_BF16 };

static const struct act acts[] = {
	{ .kind = ACT_SILU },
	{ .kind = ACT_SILU_CLAMP, .limit = 0.5f },
	{ .kind = ACT_GELU_TANH },
	{ .kind = ACT_SITU, .beta = 0.7f, .linear = 0 },
	{ .kind = ACT_SITU, .beta = 1.7f, .linear = 2.5f },
};

static void one_matmul(int64_t T, int64_t N, int64_t K, int variant)
{
	enum dtype in = types[variant & 1], out = types[variant >> 1 & 1],
		   stored = variant & 16 ? DT_F16 : DT_BF16;
	enum weight_unit unit = variant & 32 ? WEIGHT_FP32 : WEIGHT_BULK;
	bool add = variant & 4, bias = variant & 8;
	struct both x = both_random(in, T, K, variant & 64 ? 3 : 0),
		    y = both_random(out, T, N, variant & 128 ? 5 : 0);
	struct pair w, b;

	pair_make(&w, USE_PRODUCT, unit, stored, 1, N, K);
	pair_make(&b, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, N, 1);
	dut.be->matmul(&dut, y.dut, x.dut, &w.dut, bias ? &b.dut : NULL, add);
	ref.be->matmul(&ref, y.ref, x.ref, &w.ref, bias ? &b.ref : NULL, add);
	same(y.dut, y.ref, bound_of(out),
	     label("matmul", "%d x %d x %d variant %d", (int)T, (int)N, (int)K, variant));
	both_drop(x);
	pair_drop(&w);
	pair_drop(&b);
}

static void test_matmul(void)
{
	static const int64_t rows[] = { 0, 1, 2, 255, 256, 257 };
	static const int64_t sizes[][2] = { { 1, 1 },    { 3, 5 },     { 17, 33 },  { 64, 64 },
					    { 100, 72 }, { 300, 130 }, { 513, 48 }, { 32, 192 } };
	int variant = 0;

	for (int i = 0; i < COUNT(rows); i++)
		for (int k = 0; k < COUNT(sizes); k++, variant = (variant + 37) % 256)
			one_matmul(rows[i], sizes[k][0], sizes[k][1], variant);
	for (variant = 0; variant < 256; variant += 3)
		one_matmul(7, 70, 64, variant);
	/* K in several blocks */
	for (variant = 0; variant < 256; variant += 23)
		one_matmul(65, 70, 3100 * (1 + (variant & 3)), variant);
	/* and several tiles to a group, which there are where BF16 is expanded */
	if (dut.compute == DT_BF16)
		one_matmul(513, 200, 3100, 0);
}

static void one_matmul_gate(int64_t T, int64_t I, int64_t K, int variant)
{
	enum dtype in = types[variant & 1], out = types[variant >> 1 & 1];
	enum weight_unit unit = variant & 4 ? WEIGHT_FP32 : WEIGHT_BULK;
	struct act act = acts[variant % COUNT(acts)];
	struct both x = both_random(in, T, K, variant & 8 ? 3 : 0),
		    y = both_tensor(out, T, I, variant & 16 ? 5 : 0, NULL);
	struct pair w;

	pair_make(&w, USE_GATED, unit, DT_BF16, 1, 2 * I, K);
	dut.be->matmul_gate(&dut, y.dut, x.dut, &w.dut, &act);
	ref.be->matmul_gate(&ref, y.ref, x.ref, &w.ref, &act);
	/* an activation may end what a long sum in F32 has lost at a limit smaller than the sum */
	same(y.dut, y.ref, bound_of(out) * (K > 1000 ? 4 : 1),
	     label("matmul_gate", "%d x %d x %d variant %d", (int)T, (int)I, (int)K, variant));
	both_drop(x);
	pair_drop(&w);
}

static void test_matmul_gate(void)
{
	static const int64_t rows[] = { 0, 1, 63, 65, 200 };
	static const int64_t sizes[][2] = { { 1, 1 },	 { 3, 5 },    { 31, 33 },  { 32, 64 },
					    { 100, 72 }, { 160, 130 }, { 257, 48 }, { 96, 192 } };
	int variant = 0;

	for (int i = 0; i < COUNT(rows); i++)
		for (int k = 0; k < COUNT(sizes); k++, variant = (variant + 37) % 256)
			one_matmul_gate(rows[i], sizes[k][0], sizes[k][1], variant);
	for (variant = 0; variant < 4; variant++)
		one_matmul_gate(65, 70, 4200 * (1 + (variant & 1)), variant);
}

static void test_norm(void)
{
	static const int64_t widths[] = { 1, 7, 16, 33, 128, 600, 1025 };

	for (int i = 0; i < COUNT(widths); i++)
		for (int v = 0; v < 8; v++) {
			int64_t T = v == 3 ? 0 : 1 + 128 * (v & 2), runs = 1 + 2 * (v & 1),
				width = widths[i];
			enum dtype in = types[v & 1], out = types[v >> 2];
			struct both x = both_random(in, T, runs * width, v),
				    y = both_tensor(out, T, runs * width, 3, NULL);
			struct pair w;

			pair_make(&w, USE_VECTOR, WEIGHT_BULK, DT_F32, 1, width, 1);
			dut.be->norm(&dut, y.dut, x.dut, v & 1 ? &w.dut : NULL, 1e-6f, width);
			ref.be->norm(&ref, y.ref, x.ref, v & 1 ? &w.ref : NULL, 1e-6f, width);
			same(y.dut, y.ref, bound_of(out),
			     label("norm", "%d runs of %d, variant %d", (int)runs, (int)width, v));
			dut.be->norm(&dut, x.dut, x.dut, &w.dut, 1e-5f, width);
			ref.be->norm(&ref, x.ref, x.ref, &w.ref, 1e-5f, width);
			same(x.dut, x.ref, bound_of(in),
			     label("norm", "in place, %d runs of %d, variant %d", (int)runs,
				   (int)width, v));
			pair_drop(&w);
		}
}

static void test_rope(void)
{
	static const struct {
		int heads, head, offset, width;
	} shapes[] = { { 1, 2, 0, 2 },
		       { 3, 16, 0, 16 },
		       { 2, 40, 8, 24 },
		       { 1, 130, 2, 128 },
		       { 2, 1100, 0, 1100 } };
	int32_t pos[300], far[300];

	for (int i = 0; i < COUNT(pos); i++) {
		pos[i] = i * 37 % 5000;
		far[i] = pos[i] * 1000;	/* angles on both sides of 10^6 */
	}
	for (int i = 0; i < COUNT(shapes); i++)
		for (int v = 0; v < 32; v++) {
			int64_t T = v & 8 ? 257 : v & 1;
			struct both x = both_random(types[v & 1], T,
						    shapes[i].heads * shapes[i].head, 2),
				    p = both_ints(T, 1, v & 4 ? pos : far);
			struct rope r = { .offset = shapes[i].offset,
					  .width = shapes[i].width,
					  .scale = v & 2 ? 1.25f : 1,
					  .layout = v & 4 ? ROPE_PAIR : ROPE_HALF,
					  .inverse = v & 2 };
			struct rope s = r;
			struct pair freq, norm;

			pair_make(&freq, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, r.width / 2, 1);
			pair_make(&norm, USE_VECTOR, WEIGHT_BULK, DT_BF16, 1, shapes[i].head, 1);
			r.freq = &freq.dut;
			s.freq = &freq.ref;
			dut.be->rope(&dut, x.dut, shapes[i].heads, v & 16 ? &norm.dut : NULL, 1e-6f,
				     &r, p.dut);
			ref.be->rope(&ref, x.ref, shapes[i].heads, v & 16 ? &norm.ref : NULL, 1e-6f,
				     &s, p.ref);
			same(x.dut, x.ref, bound_of(types[v & 1]),
			     label("rope", "%d heads of %d, variant %d", shapes[i].heads,
				   shapes[i].head, v));
			both_drop(p);
			pair_drop(&freq);
			pair_drop(&norm);
		}
}

static void test_gate_and_add(void)
{
	static const int64_t widths[] = { 1, 5, 16, 100, 513, 1030 };

	for (int i = 0; i < COUNT(widths); i++)
		for (int a = 0; a < COUNT(acts); a++) {
			int v = i + a;
			int64_t T = v % 4 ? 1 + 100 * (v % 3) : 0, n = 2 * T * widths[i];
			float *values = bed_numbers(n);
			struct both x, y = both_tensor(types[v & 1], T, widths[i], 1, NULL);

			for (int64_t k = 0; k < n; k++)
				values[k] *= k % 3 ? 8 : 100;
			x = both_tensor(types[v >> 1 & 1], T, 2 * widths[i], 2, values);
			dut.be->gate(&dut, y.dut, x.dut, &acts[a]);
			ref.be->gate(&ref, y.ref, x.ref, &acts[a]);
			same(y.dut, y.ref, bound_of(y.dut.dtype),
			     label("gate", "act %d, %d columns", a, (int)widths[i]));
			dut.be->add(&dut, tensor_cols(x.dut, 0, widths[i]),
				    tensor_cols(x.dut, widths[i], widths[i]));
			ref.be->add(&ref, tensor_cols(x.ref, 0, widths[i]),
				    tensor_cols(x.ref, widths[i], widths[i]));
			same(x.dut, x.ref, 0, label("add", "%d columns", (int)widths[i]));
			free(values);
		}
}

static void one_route(const struct router *shape, int v)
{
	int64_t T = v % 7 == 6 ? 0 : 1 + 30 * (v % 7), n = T * shape->experts;
	struct router r = *shape, s;
	struct both logits = both_random(DT_F32, T, r.experts, v & 3),
		    w = both_tensor(DT_F32, T, r.k, 0, NULL);
	struct both ids = { bed_tensor(&dut, DT_I32, T, r.k, 0, NULL),
			    bed_tensor(&ref, DT_I32, T, r.k, 0, NULL) };
	int32_t *a, *b;
	struct pair bias;

	(void)n;
	pair_make(&bias, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, r.experts, 1);
	s = r;
	r.bias = v & 1 ? &bias.dut : NULL;
	s.bias = v & 1 ? &bias.ref : NULL;
	dut.be->route(&dut, ids.dut, w.dut, logits.dut, &r);
	ref.be->route(&ref, ids.ref, w.ref, logits.ref, &s);
	a = bed_bytes(&dut, ids.dut);
	b = bed_bytes(&ref, ids.ref);
	ok(!memcmp(a, b, (size_t)(T * r.k) * sizeof *a), "%s",
	   label("route", "ids, %d of %d, variant %d", r.k, r.experts, v));
	same(w.dut, w.ref, F32_BOUND,
	     label("route", "weights, %d of %d, variant %d", r.k, r.experts, v));
	free(a);
	free(b);
	both_drop(logits);
	both_drop(ids);
	pair_drop(&bias);
}

static void test_route(void)
{
	static const struct router shapes[] = {
		{ .experts = 1, .k = 1 },
		{ .experts = 8, .k = 2 },
		{ .experts = 12, .k = 5, .groups = 3, .groups_kept = 2 },
		{ .experts = 64, .k = 6, .groups = 8, .groups_kept = 3, .dropped = -INFINITY },
		{ .experts = 6, .k = 6, .groups = 6, .groups_kept = 1 },
	};
	int v = 0;

	for (int i = 0; i < COUNT(shapes); i++)
		for (int score = SCORE_SOFTMAX; score <= SCORE_SQRT_SOFTPLUS; score++)
			for (int k = 0; k < 4; k++, v++) {
				struct router r = shapes[i];

				r.score = (enum router_score)score;
				r.renormalise = k & 1;
				r.weigh_choice = k & 2 && !isinf(r.dropped);
				r.scale = k & 2 ? 2.5f : 1;
				one_route(&r, v);
			}
}

/* k different experts a token, ascending; a few tokens with none of those held. */
static void draw_ids(int32_t *ids, int64_t T, int k, int experts)
{
	for (int64_t t = 0; t < T; t++)
		for (int s = 0, e = 0; s < k; e++) {
			int left = experts - e, need = k - s;

			if (need >= left || bed_random() * 0.5f + 0.5f < (float)need / (float)left)
				ids[t * k + s++] = e;
		}
}

static void one_experts(int64_t T, int64_t hidden, int64_t I, int experts, int first, int count,
			int v)
{
	int k = experts < 3 ? experts : 3;
	struct both x = both_random(types[v & 1], T, hidden, v & 2 ? 4 : 0),
		    sum = both_random(DT_F32, T, hidden + 3, v & 4 ? 1 : 0);
	struct both w = both_random(DT_F32, T, k, 0), ids;
	int32_t *choice = malloc((size_t)(T * k + 1) * sizeof *choice);
	struct pair up, down;
	struct experts ex = { .first = first,
			      .count = count,
			      .act = acts[v % COUNT(acts)],
			      .weight_after_down = v & 8 },
		       rx;

	draw_ids(choice, T, k, experts);
	ids = both_ints(T, k, choice);
	pair_make(&up, USE_GATED, WEIGHT_BULK, DT_BF16, count, 2 * I, hidden);
	pair_make(&down, USE_PRODUCT, WEIGHT_BULK, DT_BF16, count, hidden + 3, I);
	rx = ex;
	ex.gate_up = &up.dut;
	ex.down = &down.dut;
	rx.gate_up = &up.ref;
	rx.down = &down.ref;
	dut.be->experts(&dut, sum.dut, x.dut, ids.dut, w.dut, &ex, v & 16);
	ref.be->experts(&ref, sum.ref, x.ref, ids.ref, w.ref, &rx, v & 16);
	same(sum.dut, sum.ref, bound_of(dut.compute),
	     label("experts", "%d tokens, %d of %d, variant %d", (int)T, count, experts, v));
	free(choice);
	both_drop(x);
	both_drop(w);
	both_drop(ids);
	pair_drop(&up);
	pair_drop(&down);
}

static void test_experts(void)
{
	static const int64_t rows[] = { 0, 1, 2, 63, 64, 65, 257 };
	int v = 0;

	for (int i = 0; i < COUNT(rows); i++, v += 5) {
		one_experts(rows[i], 20, 9, 5, 0, 5, v);
		one_experts(rows[i], 64, 130, 4, 1, 2, v + 3);
		one_experts(rows[i], 33, 16, 1, 0, 1, v + 12);
	}
	one_experts(10, 16, 16, 40, 38, 2, 25);
	/* K of down in several blocks, groups of several tiles */
	one_experts(150, 20, 4200, 2, 0, 2, 0);
	one_experts(150, 20, 4200, 2, 0, 2, 8);
	/* results too wide for a workspace to hold all slots of */
	one_experts(93, 1000, 16, 4, 0, 4, 5);
	one_experts(93, 1000, 16, 4, 1, 2, 26);
}

/*
 * Rows of data of these lengths one behind the other; with `split` only the later part of each
 * row's queries, as context parallelism cuts them.
 */
static int make_pieces(struct piece *p, const int64_t *lengths, int n, bool split, int64_t *queries,
		       int64_t *keys)
{
	*queries = *keys = 0;
	for (int i = 0; i < n; i++) {
		int64_t first = split ? lengths[i] / 3 : 0;

		p[i] = (struct piece){ *queries, lengths[i] - first, first, lengths[i],
				       *keys,    lengths[i] };
		*queries += lengths[i] - first;
		*keys += lengths[i];
	}
	return n;
}

static void one_attention(int heads, int kv_heads, int width, int value, int64_t window, int v)
{
	static const int64_t lengths[] = { 1, 2, 0, 127, 128, 129, 300 };
	struct piece pieces[COUNT(lengths)];
	int64_t nq, nk;
	int n = make_pieces(pieces, lengths,
			    v & 8         ? 0
			    : heads > 100 ? 4
					  : COUNT(lengths),
			    v & 1, &nq, &nk);
	enum dtype t = types[v >> 1 & 1];
	struct both q = both_random(t, nq, heads * width, v & 3),
		    k = both_random(t, nk, kv_heads * width, 1);
	struct both val = both_random(t, nk, kv_heads * value, 0),
		    out = both_tensor(t, nq, heads * value, 2, NULL);
	struct attention a = { heads, kv_heads, width, value, 1.3f, window, NULL }, b = a;
	float *sinks = bed_numbers(heads);
	struct pair sink;

	for (int i = 0; v & 16 && i < heads; i += 2)
		sinks[i] = -INFINITY;
	bed_weight(&dut, &sink.dut, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, heads, 1, sinks);
	bed_weight(&ref, &sink.ref, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, heads, 1, sinks);
	free(sinks);
	a.sink = v & 4 ? &sink.dut : NULL;
	b.sink = v & 4 ? &sink.ref : NULL;
	dut.be->attention(&dut, out.dut, q.dut, k.dut, val.dut, &a, pieces, n);
	ref.be->attention(&ref, out.ref, q.ref, k.ref, val.ref, &b, pieces, n);
	same(out.dut, out.ref, bound_of(dut.compute == DT_BF16 ? DT_BF16 : t),
	     label("attention", "%d/%d heads of %d/%d, window %d, variant %d", heads, kv_heads,
		   width, value, (int)window, v));
	both_drop(q);
	both_drop(k);
	both_drop(val);
	pair_drop(&sink);
}

static void test_attention(void)
{
	static const int shapes[][4] = { { 1, 1, 1, 1 },   { 4, 2, 16, 16 }, { 6, 2, 24, 8 },
					 { 8, 1, 32, 64 }, { 5, 5, 33, 20 }, { 2, 1, 128, 192 },
					 { 130, 1, 4, 3 } };
	static const int64_t windows[] = { 0, 1, 5, 128, 200 };
	int v = 0;

	for (int i = 0; i < COUNT(shapes); i++)
		for (int w = 0; w < COUNT(windows); w += 1 + i / 3, v = (v + 1) % 8)
			one_attention(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3],
				      windows[w], v);
	one_attention(2, 2, 16, 16, 0, 8);
	/* some heads' sinks are -inf: no sink, also for rows that see nothing of a tile's block */
	one_attention(3, 1, 16, 16, 0, 4 + 16);
	one_attention(3, 1, 16, 16, 5, 4 + 16);
}

static void test_rows_and_store(void)
{
	static const enum dtype stored[] = { DT_F32, DT_BF16, DT_F16 };
	int32_t id[257];

	for (int i = 0; i < COUNT(id); i++)
		id[i] = i * 7 % 50;
	for (int v = 0; v < 12; v++) {
		int64_t T = v == 5 ? 0 : v & 1 ? 257 : 2;
		struct both ids = both_ints(T, 1, id),
			    out = both_tensor(types[v & 1], T, 33, 3, NULL);
		enum dtype to = (const enum dtype[]){ DT_F32, DT_BF16, DT_F16 }[v % 3];
		struct tensor got = { malloc((size_t)(T * 40 + 1) * 4), to, T, 33, 40 },
			      want = { malloc((size_t)(T * 40 + 1) * 4), to, T, 33, 40 };
		struct pair table;
		struct err e = ERR_INIT;

		memset(got.p, GUARD, (size_t)(T * 40) * 4);
		memset(want.p, GUARD, (size_t)(T * 40) * 4);
		pair_make(&table, USE_TABLE, v & 2 ? WEIGHT_BULK : WEIGHT_FP32, stored[v % 3], 1,
			  50, 33);
		dut.be->rows(&dut, out.dut, &table.dut, ids.dut);
		ref.be->rows(&ref, out.ref, &table.ref, ids.ref);
		dut.be->store(&dut, got.p, to, 40, out.dut);
		ref.be->store(&ref, want.p, to, 40, out.ref);
		ok(!dut.be->sync(&dut, &e) &&
			   !memcmp(got.p, want.p, (size_t)(T * 40) * dtype_size(to)),
		   "%s", label("store", "as %s", dtype_name(to)));
		same(out.dut, out.ref, 0,
		     label("rows", "of %s, variant %d", dtype_name(stored[v % 3]), v));
		free(got.p);
		free(want.p);
		both_drop(ids);
		pair_drop(&table);
	}
}

static struct weight wide_weight(struct device *d, enum weight_use use, enum weight_unit unit,
				 int64_t rows, int64_t cols, const double *v)
{
	struct weight w = { .count = 1,
			    .rows = rows,
			    .cols = cols,
			    .use = use,
			    .unit = unit,
			    .stored = DT_F64 };
	struct err e = ERR_INIT;

	bed_check(d->be->weight_alloc(d, &w, &e) ||
			  d->be->weight_fill(d, &w, 0, 0, rows, v, DT_F64, NULL, &e) ||
			  d->be->weight_ready(d, &w, &e),
		  &e);
	return w;
}

/* A table and a vector of F64: rounded to what they become once, ties by what F32 has not. */
static void test_wide(void)
{
	static const enum dtype out_types[] = { DT_F32, DT_BF16, DT_F16 };
	double v[4 * 9];
	int32_t id[] = { 3, 0, 1, 2 };
	struct both ids = both_ints(4, 1, id), x = both_random(DT_F32, 4, 9, 0);
	struct device *d[] = { &dut, &ref };
	struct weight table[2], vector[2];

	for (int i = 0; i < COUNT(v); i++) {
		double tie = ldexp(1, i % 3 ? -8 : -11), rest = ldexp(i % 2 ? 1 : -1, -40);

		v[i] = (i % 5 ? 1 : -3) * (1 + (i & 8) * tie / 4 + tie + (i % 7 ? rest : 0));
	}
	for (int unit = WEIGHT_BULK; unit <= WEIGHT_FP32; unit++) {
		for (int i = 0; i < 2; i++) {
			table[i] = wide_weight(d[i], USE_TABLE, unit, 4, 9, v);
			vector[i] = wide_weight(d[i], USE_VECTOR, unit, 9, 1, v);
		}
		for (int k = 0; k < COUNT(out_types); k++) {
			struct both out = both_tensor(out_types[k], 4, 9, 1, NULL);

			dut.be->rows(&dut, out.dut, &table[0], ids.dut);
			ref.be->rows(&ref, out.ref, &table[1], ids.ref);
			same(out.dut, out.ref, 0,
			     label("rows", "of F64 as %s, unit %d", dtype_name(out_types[k]),
				   unit));
		}
		dut.be->norm(&dut, x.dut, x.dut, &vector[0], 1e-6f, 9);
		ref.be->norm(&ref, x.ref, x.ref, &vector[1], 1e-6f, 9);
		for (int i = 0; i < 2; i++) {
			d[i]->be->weight_free(d[i], &table[i]);
			d[i]->be->weight_free(d[i], &vector[i]);
		}
	}
	same(x.dut, x.ref, F32_BOUND, label("norm", "by F64"));
	both_drop(ids);
}

static void test_raw_table(void)
{
	int64_t table[5][3];
	int32_t id[] = { 4, 0, 4 };
	struct weight w = { .count = 1,
			    .rows = 5,
			    .cols = 3,
			    .use = USE_RAW,
			    .unit = WEIGHT_RAW,
			    .stored = DT_I64 };
	struct tensor ids = bed_ints(&dut, 3, 1, id), out = bed_tensor(&dut, DT_I64, 3, 3, 0, NULL);
	struct err e = ERR_INIT;
	int64_t *got;

	for (int i = 0; i < 15; i++)
		table[i / 3][i % 3] = (int64_t)i << 40;
	bed_check(dut.be->weight_alloc(&dut, &w, &e) ||
			  dut.be->weight_fill(&dut, &w, 0, 0, 5, table, DT_I64, NULL, &e) ||
			  dut.be->weight_ready(&dut, &w, &e),
		  &e);
	dut.be->rows(&dut, out, &w, ids);
	got = bed_bytes(&dut, out);
	ok(!memcmp(got, table[4], 24) && !memcmp(got + 3, table[0], 24) &&
		   !memcmp(got + 6, table[4], 24),
	   "%s", label("rows", "of integers"));
	free(got);
	bed_drop(&dut, ids);
	bed_drop(&dut, out);
	dut.be->weight_free(&dut, &w);
}

/* Several ids a token give their rows side by side, and integers take the type of the result. */
static void test_rows_beside(void)
{
	int64_t table[4][2] = { { 0, 1 }, { 10, 11 }, { 20, 21 }, { 30, -31 } };
	int32_t id[] = { 3, 1, 0, 2, 2, 3 },
		want[] = { 30, -31, 10, 11, 0, 1, 20, 21, 20, 21, 30, -31 };
	struct weight w = { .count = 1,
			    .rows = 4,
			    .cols = 2,
			    .use = USE_RAW,
			    .unit = WEIGHT_RAW,
			    .stored = DT_I64 };
	struct tensor ids = bed_ints(&dut, 2, 3, id), out = bed_tensor(&dut, DT_I32, 2, 6, 0, NULL);
	struct err e = ERR_INIT;
	int32_t *got;

	bed_check(dut.be->weight_alloc(&dut, &w, &e) ||
			  dut.be->weight_fill(&dut, &w, 0, 0, 4, table, DT_I64, NULL, &e) ||
			  dut.be->weight_ready(&dut, &w, &e),
		  &e);
	dut.be->rows(&dut, out, &w, ids);
	got = bed_bytes(&dut, out);
	ok(!memcmp(got, want, sizeof want), "%s", label("rows", "three ids a token, I64 to I32"));
	free(got);
	bed_drop(&dut, ids);
	bed_drop(&dut, out);
	dut.be->weight_free(&dut, &w);
}

/* NaN in one row reaches that row of the result and no other, and a comparison with it fails. */
static void test_nan(void)
{
	float *v = bed_numbers(9 * 40), *g, *p = bed_numbers(9 * 40);
	struct tensor x, y = bed_tensor(&dut, DT_F32, 9, 70, 0, NULL);
	struct weight w;
	float *m = bed_numbers(70 * 40);
	int nans = 0, others = 0;

	v[4 * 40 + 3] = NAN;
	x = bed_tensor(&dut, DT_F32, 9, 40, 0, v);
	bed_weight(&dut, &w, USE_PRODUCT, WEIGHT_BULK, DT_F32, 1, 70, 40, m);
	dut.be->matmul(&dut, y, x, &w, NULL, false);
	g = bed_floats(&dut, y);
	for (int i = 0; i < 9 * 70; i++)
		*(i / 70 == 4 ? &nans : &others) += isnan(g[i]) != 0;
	ok(nans == 70 && !others, "%s", label("matmul", "NaN stays in its row"));
	ok(bed_differ(g, g, 9 * 70, 1, 1e30) == 70, "NaN differs from everything");
	free(g);
	dut.be->norm(&dut, x, x, NULL, 1e-6f, 40);
	g = bed_floats(&dut, x);
	for (int i = nans = others = 0; i < 9 * 40; i++)
		*(i / 40 == 4 ? &nans : &others) += isnan(g[i]) != 0;
	ok(nans == 40 && !others, "%s", label("norm", "NaN stays in its row"));
	for (int a = 0; a < COUNT(acts); a++) {
		struct tensor out = bed_tensor(&dut, DT_F32, 9, 20, 0, NULL),
			      in = bed_tensor(&dut, DT_F32, 9, 40, 0, v);

		dut.be->gate(&dut, out, in, &acts[a]);
		free(g);
		g = bed_floats(&dut, out);
		ok(isnan(g[4 * 20 + 3]), "%s", label("gate", "act %d keeps NaN", a));
		bed_drop(&dut, out);
		bed_drop(&dut, in);
	}
	free(v);
	free(g);
	free(p);
	free(m);
	bed_drop(&dut, x);
	bed_drop(&dut, y);
	dut.be->weight_free(&dut, &w);
}

/*
 * One value of key 130 that is not finite: it reaches the queries that ref says it does, of those
 * beside them in a tile and of the other kv head and row of data none.
 */
static void test_nan_value(float bad, int64_t window)
{
	struct piece pieces[] = { { 0, 200, 0, 200, 0, 200 }, { 200, 140, 0, 140, 200, 140 } };
	struct attention a = { 4, 2, 24, 24, 1, window, NULL };
	float *v = bed_numbers(340 * 48), *got, *want;
	struct both q = both_random(DT_F32, 340, 96, 0), k = both_random(DT_F32, 340, 48, 0), val,
		    out = both_tensor(DT_F32, 340, 96, 0, NULL);
	int wrong = 0, reached = 0;

	v[130 * 48 + 25] = bad;
	val = both_tensor(DT_F32, 340, 48, 0, v);
	dut.be->attention(&dut, out.dut, q.dut, k.dut, val.dut, &a, pieces, 2);
	ref.be->attention(&ref, out.ref, q.ref, k.ref, val.ref, &a, pieces, 2);
	got = bed_floats(&dut, out.dut);
	want = bed_floats(&ref, out.ref);
	for (int i = 0; i < 340 * 96; i++) {
		reached += !isfinite(want[i]);
		wrong += !isfinite(got[i]) != !isfinite(want[i]);
	}
	ok(reached == (window ? 2 * window : 2 * 70) && !wrong, "%s",
	   label("attention", "%f among the values reaches who sees it, window %d", (double)bad,
		 (int)window));
	free(got);
	free(want);
	free(v);
	both_drop(q);
	both_drop(k);
	both_drop(val);
	both_drop(out);
}

/* A NaN among the keys, and a NaN router logit. */
static void test_nan_further(void)
{
	float *v = bed_numbers(200 * 16), *g, *c = bed_numbers(8);
	struct piece piece = { 0, 200, 0, 200, 0, 200 };
	struct attention a = { 1, 1, 16, 16, 1, 0, NULL };
	struct tensor q, k, out = bed_tensor(&dut, DT_F32, 200, 16, 0, NULL), logits, ids, w;
	struct router r = {
		.experts = 8, .k = 3, .score = SCORE_SOFTMAX, .renormalise = true, .scale = 1
	};
	int32_t *id;

	q = bed_tensor(&dut, DT_F32, 200, 16, 0, v);
	v[130 * 16] = NAN;
	k = bed_tensor(&dut, DT_F32, 200, 16, 0, v);
	dut.be->attention(&dut, out, q, k, q, &a, &piece, 1);
	g = bed_floats(&dut, out);
	ok(!isnan(g[127 * 16]) && isnan(g[130 * 16]) && isnan(g[199 * 16 + 15]), "%s",
	   label("attention", "NaN key reaches who sees it"));
	c[2] = NAN;
	logits = bed_tensor(&dut, DT_F32, 1, 8, 0, c);
	ids = bed_tensor(&dut, DT_I32, 1, 3, 0, NULL);
	w = bed_tensor(&dut, DT_F32, 1, 3, 0, NULL);
	dut.be->route(&dut, ids, w, logits, &r);
	free(g);
	g = bed_floats(&dut, w);
	id = bed_bytes(&dut, ids);
	ok(isnan(g[0]) && id[0] >= 0 && id[0] < id[1] && id[1] < id[2] && id[2] < 8, "%s",
	   label("route", "NaN logits give NaN weights and legal ids"));
	free(g);
	free(c);
	free(v);
	free(id);
	bed_drop(&dut, q);
	bed_drop(&dut, k);
	bed_drop(&dut, out);
	bed_drop(&dut, logits);
	bed_drop(&dut, ids);
	bed_drop(&dut, w);
}

static size_t heap(void)
{
	struct mallinfo2 m = mallinfo2();

	return m.uordblks + m.hblkhd;
}

#define COPIES 8
#define HEAP_NOISE 16384	/* freed pieces that the allocator still counts */

/*
 * Copies of a weight, after a first one with which comes what is made once for all of them, on a
 * device of its own: an older one would hand out memory that it kept.
 */
static void one_weight_bytes(enum weight_use use, enum weight_unit unit, int64_t count,
			     int64_t rows, int64_t cols)
{
	float *v = bed_numbers(count * rows * cols);
	struct weight w[1 + COPIES];
	size_t before = 0, each;
	uint64_t most_bytes;
	bool left = false;
	struct device old = dut;

	bed_open(&dut, old.be->name, old.compute, 2);
	for (int i = 0; i <= COPIES; i++) {
		bed_weight(&dut, &w[i], use, unit, DT_BF16, count, rows, cols, v);
		before = i ? before : heap();
	}
	each = (heap() - before) / COPIES;
	most_bytes = weight_bytes(&w[0], dut.compute);
	ok(each <= most_bytes + HEAP_NOISE / COPIES, "%s",
	   label("weight", "use %d of %d x %d x %d takes %zu of %llu bytes", use, (int)count,
		 (int)rows, (int)cols, each, (unsigned long long)most_bytes));
	for (int i = 0; i <= COPIES; i++) {
		dut.be->weight_free(&dut, &w[i]);
		dut.be->weight_free(&dut, &w[i]);
		left |= w[i].handle != NULL;
	}
	ok(!left, "%s", label("weight_free", "leaves no handle and may come twice"));
	dut.be->close(&dut);
	dut = old;
	free(v);
}

static void test_weight_bytes(void)
{
	static const int64_t shapes[][3] = {
		{ 1, 1, 1 }, { 1, 65, 3 }, { 5, 100, 129 }, { 3, 320, 64 }, { 1, 700, 333 }
	};

	for (int use = USE_PRODUCT; use <= USE_TABLE; use++)
		for (int i = 0; i < COUNT(shapes); i++)
			for (int unit = WEIGHT_BULK; unit <= WEIGHT_FP32; unit++)
				one_weight_bytes(use, unit, use <= USE_GATED ? shapes[i][0] : 1,
						 shapes[i][1] * (use == USE_GATED ? 2 : 1),
						 shapes[i][2]);
}

struct filler {
	struct weight *w;
	const float *values;
	int first;
	bool failed;
};

static void *fill_rows(void *p)
{
	struct filler *f = p;
	struct err e = ERR_INIT;

	for (int64_t row = f->first; row < f->w->rows; row += 4)
		f->failed |=
			dut.be->weight_fill(&dut, f->w, 0, row, 1, f->values + row * f->w->cols,
					    DT_F32, NULL, &e) != 0;
	return NULL;
}

/* Four threads, each every fourth row. */
static void test_fill_from_threads(void)
{
	float *v = bed_numbers(600 * 70), *x = bed_numbers(3 * 70);
	struct weight w = { .count = 1,
			    .rows = 600,
			    .cols = 70,
			    .use = USE_PRODUCT,
			    .stored = DT_F32 },
		      rw;
	struct both y = both_tensor(DT_F32, 3, 600, 0, NULL), in = both_tensor(DT_F32, 3, 70, 0, x);
	struct filler f[4];
	pthread_t thread[4];
	bool failed = false;
	struct err e = ERR_INIT;

	bed_check(dut.be->weight_alloc(&dut, &w, &e), &e);
	for (int i = 0; i < 4; i++) {
		f[i] = (struct filler){ &w, v, i, false };
		failed |= pthread_create(&thread[i], NULL, fill_rows, &f[i]) != 0;
	}
	for (int i = 0; i < 4; i++) {
		pthread_join(thread[i], NULL);
		failed |= f[i].failed;
	}
	bed_check(dut.be->weight_ready(&dut, &w, &e), &e);
	bed_weight(&ref, &rw, USE_PRODUCT, WEIGHT_BULK, DT_F32, 1, 600, 70, v);
	dut.be->matmul(&dut, y.dut, in.dut, &w, NULL, false);
	ref.be->matmul(&ref, y.ref, in.ref, &rw, NULL, false);
	ok(!failed, "%s", label("weight_fill", "from four threads"));
	same(y.dut, y.ref, F32_BOUND, label("weight_fill", "from four threads, product"));
	both_drop(in);
	dut.be->weight_free(&dut, &w);
	ref.be->weight_free(&ref, &rw);
	free(v);
	free(x);
}

static void test_refusals(void)
{
	float v[4] = { 0 };
	int32_t bad[] = { 1, 2, -1 };
	struct weight w = { .count = 1,
			    .rows = 2,
			    .cols = 2,
			    .use = USE_PRODUCT,
			    .stored = DT_F32 },
		      table;
	struct tensor ids, out;
	struct err e = ERR_INIT;

	bed_check(dut.be->weight_alloc(&dut, &w, &e), &e);
	ok(dut.be->weight_fill(&dut, &w, 0, 1, 2, v, DT_F32, NULL, &e) == -1, "%s",
	   label("weight_fill", "refuses rows outside"));
	e = (struct err)ERR_INIT;
	ok(dut.be->weight_fill(&dut, &w, 0, 0, 2, v, DT_I32, NULL, &e) == -1 &&
		   e.code == EXIT_REFUSED,
	   "%s", label("weight_fill", "refuses integers as numbers"));
	dut.be->weight_free(&dut, &w);
	bed_weight(&dut, &table, USE_TABLE, WEIGHT_BULK, DT_F32, 1, 2, 2, v);
	ids = bed_ints(&dut, 3, 1, bad);
	out = bed_tensor(&dut, DT_F32, 3, 2, 0, NULL);
	dut.be->rows(&dut, out, &table, ids);
	dut.be->norm(&dut, out, out, NULL, 1, 2);
	e = (struct err)ERR_INIT;
	ok(dut.be->sync(&dut, &e) == -1 && strstr(e.text, "outside a table"), "%s",
	   label("rows", "an id outside the table is kept: %s", e.text));
	bed_drop(&dut, ids);
	bed_drop(&dut, out);
	dut.be->weight_free(&dut, &table);
	dut.err = (struct err)ERR_INIT;
}

/* ref itself against values from outside. */
static void test_known(void)
{
	static const struct {
		struct act act;
		float g, u, want;
	} known[] = {
		{ { .kind = ACT_SILU }, 1, 2, 1.4621172f },
		{ { .kind = ACT_SILU_CLAMP, .limit = 1 }, 3, -5, -0.7310586f },
		{ { .kind = ACT_GELU_TANH }, 1, 1, 0.8411920f },
		{ { .kind = ACT_SITU, .beta = 2, .linear = 0 }, 1, 1, 0.6756694f },
		{ { .kind = ACT_SITU, .beta = 2, .linear = 3 }, 1, 1, 0.6517090f },
	};
	float one = 0, p = 1e-4f, x[4] = { 3, 4, 0, 0 }, logits[4] = { 0, 2, 2, 1 }, *g;
	struct tensor t;
	struct router r = {
		.experts = 4, .k = 2, .score = SCORE_SOFTMAX, .renormalise = true, .scale = 2
	};
	struct tensor ids = bed_tensor(&dut, DT_I32, 1, 2, 0, NULL),
		      w = bed_tensor(&dut, DT_F32, 1, 2, 0, NULL);
	int32_t *id;

	for (int i = 0; i < COUNT(known); i++) {
		float in[2] = { known[i].g, known[i].u };
		struct tensor a = bed_tensor(&dut, DT_F32, 1, 2, 0, in),
			      b = bed_tensor(&dut, DT_F32, 1, 1, 0, &one);

		dut.be->gate(&dut, b, a, &known[i].act);
		g = bed_floats(&dut, b);
		is_int(bed_differ(g, &known[i].want, 1, 1e-6, 0), 0, "%s",
		       label("gate", "known value %d: %.8f", i, (double)*g));
		free(g);
		bed_drop(&dut, a);
		bed_drop(&dut, b);
	}
	t = bed_tensor(&dut, DT_F32, 1, 4, 0, x);
	dut.be->norm(&dut, t, t, NULL, 0, 4);
	g = bed_floats(&dut, t);
	is_int(bed_differ(g, (const float[]){ 1.2f, 1.6f, 0, 0 }, 4, 1e-6, 0), 0, "%s",
	       label("norm", "known value"));
	free(g);
	bed_drop(&dut, t);
	t = bed_tensor(&dut, DT_F32, 1, 4, 0, logits);
	dut.be->route(&dut, ids, w, t, &r);
	g = bed_floats(&dut, w);
	id = bed_bytes(&dut, ids);
	ok(id[0] == 1 && id[1] == 2 && fabsf(g[0] - 1) < 1e-6f && fabsf(g[1] - 1) < 1e-6f, "%s",
	   label("route", "known choice"));
	free(g);
	free(id);
	r.k = 1;
	ids.cols = w.cols = 1;
	dut.be->route(&dut, ids, w, t, &r);
	id = bed_bytes(&dut, ids);
	is_int(*id, 1, "%s", label("route", "a tie goes to the lowest id"));
	free(id);
	bed_drop(&dut, t);
	bed_drop(&dut, ids);
	bed_drop(&dut, w);
	t = bed_tensor(&dut, DT_F32, 1, 2, 0, (const float[]){ p, 1 });
	dut.be->gate(&dut, tensor_cols(t, 0, 1), t, &(struct act){ .kind = ACT_SITU, .beta = 1 });
	g = bed_floats(&dut, t);
	is_int(bed_differ(g, &(float){ 5.0002500e-5f }, 1, 1e-5, 0), 0, "%s",
	       label("gate", "small tanh keeps its digits"));
	free(g);
	bed_drop(&dut, t);
}

/*
 * Verbs that oneDNN has a part in, and those it has none in, which no instruction set forced on it
 * can change.
 */
static void test_products(void)
{
	test_matmul();
	test_matmul_gate();
	test_experts();
	test_attention();
}

static void test_rowwise(void)
{
	test_rows_and_store();
	test_wide();
	test_norm();
	test_rope();
	test_gate_and_add();
	test_route();
}

int main(int argc, char **argv)
{
	(void)argc;
	for (const char *const *name = bed_backends(); *name; name++)
		for (int c = 0; c < COUNT(types); c++) {
			bool itself = !strcmp(*name, "ref");

			if (itself && bed_forced_isa())
				continue;
			bed_open(&dut, *name, types[c], 2);
			bed_open(&ref, "ref", types[c], 1);
			test_known();
			test_raw_table();
			test_rows_beside();
			test_nan();
			test_nan_further();
			test_nan_value(NAN, 0);
			test_nan_value(INFINITY, 0);
			test_nan_value(-INFINITY, 17);
			test_weight_bytes();
			test_fill_from_threads();
			test_refusals();
			if (!itself)
				test_products();
			if (!itself && !bed_forced_isa())
				test_rowwise();
			dut.be->close(&dut);
			ref.be->close(&ref);
		}
	if (backend_names()[1])
		bed_each_isa(argv[0]);
	return tap_end();
}
