/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The verbs of sparse attention: the choice of keys, attention over what was chosen, products of
 * tensors, layer norm, copies. Every backend against ref on odd sizes, ref against values known
 * otherwise, and a row's bits in any company, with any number of threads, under each instruction
 * set.
 */
#include <signal.h>
#include <sys/mman.h>

#include "bed.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))
#define F32_BOUND 3e-6
#define BF16_BOUND 8e-3

static struct device dut, ref;
static const enum dtype types[] = { DT_F32, DT_BF16 };
static const int threads[] = { 1, 2, 3, 8 };

static const char *label(const char *fmt, ...)
{
	static char s[256];
	int n = snprintf(s, sizeof s, "%s %s ", dut.be->name, dtype_recipe_name(dut.compute));
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(s + n, sizeof s - (size_t)n, fmt, ap);
	va_end(ap);
	return s;
}

static double bound_of(enum dtype stored)
{
	return stored == DT_BF16 || dut.compute == DT_BF16 ? BF16_BOUND : F32_BOUND;
}

/* A tensor on both devices. */
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

static void both_drop(struct both b)
{
	bed_drop(&dut, b.dut);
	bed_drop(&ref, b.ref);
}

/* Compares two results and their guards, and drops them. */
static void same(struct both b, double bound, const char *what)
{
	float *g = bed_floats(&dut, b.dut), *w = bed_floats(&ref, b.ref);
	int64_t n = b.dut.rows * b.dut.cols;
	double most = 0;

	for (int64_t i = 0; i < n; i++)
		most = fabs((double)w[i]) > most ? fabs((double)w[i]) : most;
	is_int(bed_differ(g, w, n, 0, bound * (1 + most)), 0, "%s", what);
	if (b.dut.ld > b.dut.cols)
		ok(bed_guards(&dut, b.dut), "%s: nothing outside its columns", what);
	free(g);
	free(w);
	both_drop(b);
}

static void same_ints(struct both b, const char *what)
{
	int32_t *g = bed_bytes(&dut, b.dut), *w = bed_bytes(&ref, b.ref);

	ok(!memcmp(g, w, (size_t)(b.dut.rows * b.dut.cols) * sizeof *g), "%s", what);
	free(g);
	free(w);
	both_drop(b);
}

/* Whole numbers from -most to most: sums are exact in every order, and often equal. */
static float *small_numbers(int64_t n, int most)
{
	float *v = bed_numbers(n);

	for (int64_t i = 0; i < n; i++)
		v[i] = roundf(v[i] * (float)most);
	return v;
}

/* ---- row by row ------------------------------------------------------------------------------ */

static void test_layer_norm(void)
{
	static const int64_t widths[] = { 1, 7, 16, 33, 128, 600 };

	for (int i = 0; i < COUNT(widths); i++)
		for (int v = 0; v < 8; v++) {
			int64_t T = v == 3 ? 0 : 1 + 40 * (v & 2), runs = 1 + 2 * (v & 1),
				n = widths[i];
			float *w = bed_numbers(n), *b = bed_numbers(n),
			      *x = bed_numbers(T * runs * n);
			struct weight dw, db, rw, rb;
			struct both from, to;

			for (int64_t k = 0; k < T * runs * n; k++)
				x[k] += v & 4 ? 32 : 0;
			from = both_tensor(v & 1 ? DT_BF16 : DT_F32, T, runs * n, 2, x);
			to = both_tensor(v & 2 ? DT_BF16 : DT_F32, T, runs * n, 3, NULL);
			bed_weight(&dut, &dw, USE_VECTOR, WEIGHT_BULK, DT_BF16, 1, n, 1, w);
			bed_weight(&dut, &db, USE_VECTOR, WEIGHT_BULK, DT_BF16, 1, n, 1, b);
			bed_weight(&ref, &rw, USE_VECTOR, WEIGHT_BULK, DT_BF16, 1, n, 1, w);
			bed_weight(&ref, &rb, USE_VECTOR, WEIGHT_BULK, DT_BF16, 1, n, 1, b);
			dut.be->layer_norm(&dut, to.dut, from.dut, &dw, &db, 1e-6f, n);
			ref.be->layer_norm(&ref, to.ref, from.ref, &rw, &rb, 1e-6f, n);
			/* of nearly equal numbers little is left behind the mean */
			same(to, v & 2 ? BF16_BOUND : v & 4 ? 2e-4 : 2e-5,
			     label("layer_norm, %d runs of %d, variant %d", (int)runs, (int)n, v));
			dut.be->layer_norm(&dut, from.dut, from.dut, &dw, &db, 1e-2f, n);
			ref.be->layer_norm(&ref, from.ref, from.ref, &rw, &rb, 1e-2f, n);
			same(from, v & 1 ? BF16_BOUND : v & 4 ? 2e-4 : 2e-5,
			     label("layer_norm in place, %d runs of %d, variant %d", (int)runs,
				   (int)n, v));
			dut.be->weight_free(&dut, &dw);
			dut.be->weight_free(&dut, &db);
			ref.be->weight_free(&ref, &rw);
			ref.be->weight_free(&ref, &rb);
			free(w);
			free(b);
			free(x);
		}
}

static void test_copy(void)
{
	static const struct {
		int64_t width, out_step, x_step;
		int n;
	} shapes[] = { { 1, 1, 1, 1 }, { 5, 9, 7, 3 }, { 24, 40, 56, 4 }, { 16, 40, 0, 4 },
		       { 33, 33, 33, 2 }, { 64, 64, 0, 1 } };

	for (int i = 0; i < COUNT(shapes); i++)
		for (int v = 0; v < 4; v++) {
			int64_t T = v == 1 ? 0 : 1 + 30 * v, width = shapes[i].width,
				out = (shapes[i].n - 1) * shapes[i].out_step + width,
				in = (shapes[i].n - 1) * shapes[i].x_step + width;
			float *old = bed_numbers(T * out);
			struct both x = both_random(types[v & 1], T, in, 1),
				    y = both_tensor(types[v >> 1], T, out, 3, old);

			dut.be->copy(&dut, y.dut, shapes[i].out_step, x.dut, shapes[i].x_step,
				     width, shapes[i].n);
			ref.be->copy(&ref, y.ref, shapes[i].out_step, x.ref, shapes[i].x_step,
				     width, shapes[i].n);
			same(y, 0, label("copy, shape %d, variant %d", i, v));
			both_drop(x);
			free(old);
		}
}

/* ---- products -------------------------------------------------------------------------------- */

static void one_product(int64_t T, const struct grouped *g, int v)
{
	int64_t out = (g->groups - 1) * g->out_step + g->n, in = (g->groups - 1) * g->x_step + g->k,
		wide = (g->groups - 1) * g->y_step + (g->across ? g->n : g->k);
	float *old = bed_numbers(T * out);
	struct both x = both_random(types[v & 1], T, in, 2),
		    y = both_random(types[v >> 1 & 1], g->across ? g->k : g->n, wide, 1),
		    z = both_tensor(types[v >> 2 & 1], T, out, 3, old);

	dut.be->product(&dut, z.dut, x.dut, y.dut, g);
	ref.be->product(&ref, z.ref, x.ref, y.ref, g);
	same(z, z.dut.dtype == DT_BF16 ? BF16_BOUND : F32_BOUND,
	     label("product, %d x %d x %d of %d groups, variant %d", (int)T, (int)g->n, (int)g->k,
		   g->groups, v));
	both_drop(x);
	both_drop(y);
	free(old);
}

static void test_product(void)
{
	static const struct grouped shapes[] = {
		{ 1, 1, 1, 1, 1, 1, false },	    { 3, 32, 24, 40, 40, 56, false },
		{ 3, 26, 28, 26, 28, 46, true },    { 2, 300, 33, 310, 40, 64, false },
		{ 2, 257, 65, 257, 65, 300, true }, { 4, 5, 200, 9, 200, 211, true },
	};
	static const int64_t rows[] = { 0, 1, 127, 130 };

	for (int i = 0; i < COUNT(shapes); i++)
		for (int v = 0; v < 8; v++)
			one_product(rows[(i + v) % COUNT(rows)], &shapes[i], v);
}

/* ---- the choice ------------------------------------------------------------------------------ */

/*
 * Rows of data of these lengths one behind the other; of the last only the queries from `first` on
 * are there.
 */
static int lay_out(struct piece *p, const int64_t *length, int n, int64_t first)
{
	int64_t q = 0, k = 0;

	for (int i = 0; i < n; i++) {
		int64_t from = i == n - 1 ? first : 0;

		p[i] = (struct piece){ q, length[i] - from, from, length[i], k, length[i] };
		q += length[i] - from;
		k += length[i];
	}
	return n;
}

static int64_t queries_of(const struct piece *p, int n)
{
	return n ? p[n - 1].begin + p[n - 1].count : 0;
}

static int64_t keys_of(const struct piece *p, int n)
{
	return n ? p[n - 1].kv_begin + p[n - 1].kv_count : 0;
}

static void one_choice(const int64_t *length, int rows, int64_t first, int heads, int64_t width,
		       int64_t take, int v)
{
	struct piece p[4];
	int n = lay_out(p, length, rows, first);
	int64_t T = queries_of(p, n), K = keys_of(p, n);
	float *q = small_numbers(T * heads * width, 2), *k = small_numbers(K * width, 2),
	      *w = small_numbers(T * heads, 3);
	struct both tq = both_tensor(types[v & 1], T, heads * width, 1, q),
		    tk = both_tensor(types[v >> 1 & 1], K, width, 3, k),
		    tw = both_tensor(DT_F32, T, heads, 1, w),
		    keys = { bed_tensor(&dut, DT_I32, T, take, 0, NULL),
			     bed_tensor(&ref, DT_I32, T, take, 0, NULL) };

	dut.be->choose(&dut, keys.dut, tq.dut, tk.dut, tw.dut, p, n);
	ref.be->choose(&ref, keys.ref, tq.ref, tk.ref, tw.ref, p, n);
	same_ints(keys, label("choose %d of %d keys, %d heads of %d, variant %d", (int)take,
			      (int)length[rows - 1], heads, (int)width, v));
	both_drop(tq);
	both_drop(tk);
	both_drop(tw);
	free(q);
	free(k);
	free(w);
}

static void test_choose(void)
{
	static const int64_t lengths[][3] = { { 5, 44, 37 }, { 1, 300, 131 }, { 128, 129, 640 } };
	static const int64_t takes[] = { 1, 6, 33, 130 };
	int v = 0;

	for (int i = 0; i < COUNT(lengths); i++)
		for (int t = 0; t < COUNT(takes); t++, v++) {
			one_choice(lengths[i], 3, 0, 4, 16, takes[t], v);
			one_choice(lengths[i], 3, lengths[i][2] / 2, 3, 30, takes[t], v + 1);
		}
	one_choice(lengths[2], 3, 600, 1, 8, 7, 1);
	one_choice(lengths[1], 2, 250, 300, 12, 20, 2); /* more heads than a tile has rows */
	one_choice(lengths[1], 1, 1, 2, 8, 4, 0);
}

static void is_choice(struct tensor keys, const int32_t *want, int n, const char *what)
{
	int32_t *got = bed_bytes(&dut, keys);

	ok(!memcmp(got, want, (size_t)n * sizeof *got), "%s", label("choose: %s", what));
	free(got);
}

/* One head of one channel: scores are max(q k, 0) w. */
static void test_known_choice(void)
{
	const float k[] = { 1, 3, -1, 3, 2, 3 }, up = 1, down = -1;
	struct piece p = { 0, 1, 5, 6, 0, 6 };
	struct tensor tk = bed_tensor(&dut, DT_F32, 6, 1, 0, k),
		      one = bed_tensor(&dut, DT_F32, 1, 1, 0, &up),
		      minus = bed_tensor(&dut, DT_F32, 1, 1, 0, &down),
		      keys = bed_tensor(&dut, DT_I32, 1, 3, 0, NULL), two = keys;

	two.cols = two.ld = 2;
	dut.be->choose(&dut, two, one, tk, one, &p, 1);
	is_choice(two, (const int32_t[]){ 1, 3 }, 2, "a tie goes to the lower position");
	dut.be->choose(&dut, keys, one, tk, minus, &p, 1);
	is_choice(keys, (const int32_t[]){ 0, 2, 4 }, 3, "negative weights, and 0 above them");
	p.first = 1;
	dut.be->choose(&dut, keys, one, tk, one, &p, 1);
	is_choice(keys, (const int32_t[]){ 0, 1, -1 }, 3, "none behind the query, -1 at the end");
	bed_drop(&dut, tk);
	bed_drop(&dut, one);
	bed_drop(&dut, minus);
	bed_drop(&dut, keys);
}

/* A query whose weight is NaN chooses, and nothing outside its keys. */
static void test_nan_choice(void)
{
	const float w[] = { NAN, 1 };
	struct piece p = { 0, 2, 8, 10, 0, 10 };
	struct both q = both_random(DT_F32, 2, 4, 0), k = both_random(DT_F32, 10, 4, 0),
		    tw = both_tensor(DT_F32, 2, 1, 0, w),
		    keys = { bed_tensor(&dut, DT_I32, 2, 3, 0, NULL),
			     bed_tensor(&ref, DT_I32, 2, 3, 0, NULL) };

	dut.be->choose(&dut, keys.dut, q.dut, k.dut, tw.dut, &p, 1);
	ref.be->choose(&ref, keys.ref, q.ref, k.ref, tw.ref, &p, 1);
	is_choice(keys.dut, (const int32_t[]){ 0, 1, 2 }, 3, "NaN is the smallest");
	same_ints(keys, label("choose, NaN beside numbers"));
	both_drop(q);
	both_drop(k);
	both_drop(tw);
}

/* ---- attention over it ----------------------------------------------------------------------- */

/* `take` or fewer different keys of those up to each query's own; some queries have none. */
static int32_t *draw_keys(const struct piece *p, int n, int64_t take)
{
	struct err e = { 1, "no memory" };
	int64_t T = queries_of(p, n);
	int32_t *key = bed_must(malloc((size_t)(T * take + 1) * sizeof *key), &e), *at = key;

	for (int i = 0; i < n; i++)
		for (int64_t t = 0; t < p[i].count; t++, at += take) {
			int64_t seen = p[i].first + t + 1, m = 0,
				want = t % 7 == 3 ? 0 : t % 5 == 2 ? take / 2 : take;

			for (int64_t j = 0; j < seen && m < want; j++)
				if ((bed_random() + 1) / 2 * (float)(seen - j) < (float)(want - m))
					at[m++] = (int32_t)j;
			while (m < take)
				at[m++] = -1;
		}
	return key;
}

struct shape {
	int heads, kv_heads, width, value;
	bool within, sink;
};

static void one_attention(const int64_t *length, int rows, int64_t first, int64_t take,
			  const struct shape *s, int v)
{
	struct piece p[4];
	int n = lay_out(p, length, rows, first);
	int64_t T = queries_of(p, n), K = keys_of(p, n);
	int32_t *key = draw_keys(p, n, take);
	float *sinks = bed_numbers(s->heads);
	struct both q = both_random(types[v & 1], T, s->heads * s->width, 1),
		    k = both_random(types[v >> 1 & 1], K, s->kv_heads * s->width, 2),
		    other = both_random(types[v >> 2 & 1], K, s->kv_heads * s->value, 1),
		    out = both_tensor(types[v & 1], T, s->heads * s->value, 3, NULL),
		    keys = { bed_ints(&dut, T, take, key), bed_ints(&ref, T, take, key) };
	struct both val = { s->within ? tensor_cols(k.dut, 0, s->value) : other.dut,
			    s->within ? tensor_cols(k.ref, 0, s->value) : other.ref };
	struct weight dw, rw;
	struct attention a = { s->heads, s->kv_heads, s->width, s->value, 0.4f, 0, NULL }, b = a;

	bed_weight(&dut, &dw, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, s->heads, 1, sinks);
	bed_weight(&ref, &rw, USE_VECTOR, WEIGHT_FP32, DT_F32, 1, s->heads, 1, sinks);
	a.sink = s->sink ? &dw : NULL;
	b.sink = s->sink ? &rw : NULL;
	dut.be->attention_at(&dut, out.dut, q.dut, k.dut, val.dut, keys.dut, &a, p, n);
	ref.be->attention_at(&ref, out.ref, q.ref, k.ref, val.ref, keys.ref, &b, p, n);
	same(out, bound_of(out.dut.dtype),
	     label("attention_at, %d of %d keys, %d/%d heads of %d, %d, variant %d", (int)take,
		   (int)length[rows - 1], s->heads, s->kv_heads, s->width, s->value, v));
	dut.be->weight_free(&dut, &dw);
	ref.be->weight_free(&ref, &rw);
	both_drop(q);
	both_drop(k);
	both_drop(other);
	both_drop(keys);
	free(key);
	free(sinks);
}

static const struct shape shapes[] = { { 4, 1, 48, 32, true, false },
				       { 8, 1, 576, 512, true, true },
				       { 3, 3, 20, 26, false, true },
				       { 6, 2, 33, 17, false, false },
				       { 130, 1, 24, 16, true, false } };

static void test_attention_at(void)
{
	static const int64_t lengths[3] = { 7, 44, 150 };

	for (int i = 0; i < COUNT(shapes); i++) {
		int v = i * 3;

		one_attention(lengths, 1, 0, 5, &shapes[i], v);
		one_attention(lengths, 2, 30, 6, &shapes[i], v + 1);
		one_attention(lengths, 3, 120, 140, &shapes[i], v + 2);
	}
}

/* All keys chosen is attention over all keys. */
static void test_all_chosen(void)
{
	struct piece p = { 0, 150, 0, 150, 0, 150 };
	struct attention a = { 2, 1, 40, 24, 0.3f, 0, NULL };
	static int32_t key[150 * 150];
	struct both q = both_random(DT_F32, 150, 80, 0), k = both_random(DT_F32, 150, 40, 0),
		    out = both_tensor(DT_F32, 150, 48, 1, NULL);
	struct tensor keys;

	for (int t = 0; t < 150; t++)
		for (int j = 0; j < 150; j++)
			key[t * 150 + j] = j <= t ? j : -1;
	keys = bed_ints(&dut, 150, 150, key);
	dut.be->attention_at(&dut, out.dut, q.dut, k.dut, tensor_cols(k.dut, 0, 24), keys, &a, &p,
			     1);
	ref.be->attention(&ref, out.ref, q.ref, k.ref, tensor_cols(k.ref, 0, 24), &a, &p, 1);
	same(out, bound_of(DT_F32), label("attention_at with all keys is attention"));
	both_drop(q);
	both_drop(k);
	bed_drop(&dut, keys);
}

static void refused(const int32_t *key, const char *what)
{
	struct piece p = { 0, 1, 3, 4, 0, 4 };
	struct attention a = { 1, 1, 8, 8, 1, 0, NULL };
	struct tensor q = bed_tensor(&dut, DT_F32, 1, 8, 0, NULL),
		      k = bed_tensor(&dut, DT_F32, 4, 8, 0, NULL), keys = bed_ints(&dut, 1, 2, key);
	struct err e = ERR_INIT;

	dut.be->attention_at(&dut, q, q, k, k, keys, &a, &p, 1);
	ok(dut.be->sync(&dut, &e) && strstr(e.text, "out of its place"), "%s",
	   label("attention_at refuses %s", what));
	dut.err = (struct err)ERR_INIT;
	bed_drop(&dut, q);
	bed_drop(&dut, k);
	bed_drop(&dut, keys);
}

/*
 * Keys that were not chosen cannot be read: each lies on a page of its own, and all but the chosen
 * ones of the query are closed. A verb that touches another dies.
 */
#define PAGE_KEYS 300
#define PAGE_TAKE 40

static void on_fault(int sig)
{
	static const char text[] = "not ok - attention_at read a key that was not chosen\n";

	(void)sig;
	(void)!write(STDOUT_FILENO, text, sizeof text - 1);
	_exit(1);
}

static void test_untouched(void)
{
	struct attention a = { 3, 1, 40, 32, 0.4f, 0, NULL };
	int64_t page = sysconf(_SC_PAGESIZE), ld = page / (int64_t)dtype_size(dut.compute);
	size_t bytes = (size_t)(PAGE_KEYS * page);
	char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct err e = { 1, "no pages" };
	struct tensor k = { bed_must(p == MAP_FAILED ? NULL : p, &e), dut.compute, PAGE_KEYS, 40,
			    ld };
	struct piece whole = { 0, PAGE_KEYS, 0, PAGE_KEYS, 0, PAGE_KEYS };
	int32_t *key = draw_keys(&whole, 1, PAGE_TAKE);
	struct tensor keys = bed_ints(&dut, PAGE_KEYS, PAGE_TAKE, key),
		      q = bed_tensor(&dut, dut.compute, PAGE_KEYS, 120, 0, NULL),
		      open = bed_tensor(&dut, DT_F32, PAGE_KEYS, 96, 0, NULL),
		      shut = bed_tensor(&dut, DT_F32, PAGE_KEYS, 96, 0, NULL);
	float *numbers = bed_numbers(PAGE_KEYS * 120);
	void (*before)(int) = signal(SIGSEGV, on_fault);
	float *want, *got;

	for (int64_t i = 0; i < PAGE_KEYS * 120; i++)
		dtype_convert((char *)q.p + (size_t)i * dtype_size(q.dtype), q.dtype, &numbers[i],
			      DT_F32, 1);
	for (int64_t i = 0; i < PAGE_KEYS; i++)
		dtype_convert(p + i * page, k.dtype, numbers + i * 40, DT_F32, 40);
	dut.be->attention_at(&dut, open, q, k, tensor_cols(k, 0, 32), keys, &a, &whole, 1);
	for (int64_t t = 0; t < PAGE_KEYS; t += 23) {
		struct piece one = { t, 1, t, PAGE_KEYS, 0, PAGE_KEYS };

		mprotect(p, bytes, PROT_NONE);
		for (int64_t i = 0; i < PAGE_TAKE && key[t * PAGE_TAKE + i] >= 0; i++)
			mprotect(p + key[t * PAGE_TAKE + i] * page, (size_t)page, PROT_READ);
		dut.be->attention_at(&dut, shut, q, k, tensor_cols(k, 0, 32), keys, &a, &one, 1);
		got = bed_floats(&dut, tensor_rows(shut, t, 1));
		want = bed_floats(&dut, tensor_rows(open, t, 1));
		ok(!memcmp(got, want, 96 * sizeof *got), "%s",
		   label("attention_at, query %d reads what was chosen, nothing else", (int)t));
		free(got);
		free(want);
	}
	signal(SIGSEGV, before);
	munmap(p, bytes);
	bed_drop(&dut, keys);
	bed_drop(&dut, q);
	bed_drop(&dut, open);
	bed_drop(&dut, shut);
	free(key);
	free(numbers);
}

/* ---- a row's bits ---------------------------------------------------------------------------- */

#define LENGTH 290
#define TAKE 33

struct bits {
	int32_t *keys;
	float *out;
};

/* Queries [first, first + count) of a row between others: choice and attention over it. */
static struct bits attend(struct device *d, const float *q, const float *k, const float *w,
			  int64_t first, int64_t count, int64_t before, int64_t behind)
{
	enum { HEADS = 5, WIDTH = 40 };
	int64_t nq = before + count + behind, nk = before + LENGTH + behind;
	float *mq = bed_numbers(nq * HEADS * WIDTH), *mk = bed_numbers(nk * WIDTH),
	      *mw = bed_numbers(nq * HEADS);
	struct piece p[] = { { 0, before, 0, before, 0, before },
			     { before, count, first, LENGTH, before, LENGTH },
			     { before + count, behind, 0, behind, before + LENGTH, behind } };
	struct attention a = { HEADS, 1, WIDTH, WIDTH - 8, 0.7f, 0, NULL };
	struct tensor tq, tk, tw, keys = bed_tensor(d, DT_I32, nq, TAKE, 0, NULL),
				  out = bed_tensor(d, DT_F32, nq, HEADS * (WIDTH - 8), 0, NULL);
	struct bits b;

	memcpy(mq + before * HEADS * WIDTH, q + first * HEADS * WIDTH,
	       (size_t)(count * HEADS * WIDTH) * sizeof *q);
	memcpy(mk + before * WIDTH, k, LENGTH * WIDTH * sizeof *k);
	memcpy(mw + before * HEADS, w + first * HEADS, (size_t)(count * HEADS) * sizeof *w);
	tq = bed_tensor(d, d->compute, nq, HEADS * WIDTH, 3, mq);
	tk = bed_tensor(d, d->compute, nk, WIDTH, 5, mk);
	tw = bed_tensor(d, DT_F32, nq, HEADS, 0, mw);
	d->be->choose(d, keys, tq, tk, tw, p, 3);
	d->be->attention_at(d, out, tq, tk, tensor_cols(tk, 0, WIDTH - 8), keys, &a, p, 3);
	b.keys = bed_bytes(d, tensor_rows(keys, before, count));
	b.out = bed_bytes(d, tensor_rows(out, before, count));
	free(mq);
	free(mk);
	free(mw);
	bed_drop(d, tq);
	bed_drop(d, tk);
	bed_drop(d, tw);
	bed_drop(d, keys);
	bed_drop(d, out);
	return b;
}

static void test_bits(enum dtype compute)
{
	static const int64_t cuts[][4] = {
		/* first, count, before, behind */
		{ 0, LENGTH, 1, 200 }, { 0, LENGTH, 131, 0 }, { 0, 1, 0, 0 },
		{ 127, 2, 40, 3 },     { 100, 150, 64, 9 },   { LENGTH - 1, 1, 7, 0 },
	};
	float *q = bed_numbers(LENGTH * 200), *k = bed_numbers(LENGTH * 40),
	      *w = bed_numbers(LENGTH * 5);
	struct bits want = { NULL, NULL };

	for (int t = 0; t < COUNT(threads); t++) {
		struct device d;

		bed_open(&d, "cpu", compute, threads[t]);
		if (!t)
			want = attend(&d, q, k, w, 0, LENGTH, 0, 0);
		for (int i = 0; i < COUNT(cuts); i++) {
			const int64_t *c = cuts[i];
			struct bits got = attend(&d, q, k, w, c[0], c[1], c[2], c[3]);

			ok(!memcmp(got.keys, want.keys + c[0] * TAKE,
				   (size_t)(c[1] * TAKE) * sizeof *got.keys) &&
				   !memcmp(got.out, want.out + c[0] * 160,
					   (size_t)(c[1] * 160) * sizeof *got.out),
			   "%s: queries %d+%d between %d and %d tokens, %d threads",
			   dtype_recipe_name(compute), (int)c[0], (int)c[1], (int)c[2], (int)c[3],
			   threads[t]);
			free(got.keys);
			free(got.out);
		}
		d.be->close(&d);
	}
	free(want.keys);
	free(want.out);
	free(q);
	free(k);
	free(w);
}

/* Rows of x in two groups, all of them and some alone. */
static void test_product_bits(enum dtype compute)
{
	static const int64_t first[] = { 0, 1, 100, 127, 128, 259 };
	struct grouped g = { 2, 300, 40, 300, 40, 50, false };
	float *x = bed_numbers(260 * 80), *y = bed_numbers(300 * 90), *want = NULL;

	for (int t = 0; t < COUNT(threads); t++) {
		struct device d;

		bed_open(&d, "cpu", compute, threads[t]);
		for (int i = 0; i < COUNT(first); i++) {
			int64_t n = 260 - first[i];
			struct tensor tx = bed_tensor(&d, compute, n, 80, 3, x + first[i] * 80),
				      ty = bed_tensor(&d, compute, 300, 90, 0, y),
				      out = bed_tensor(&d, DT_F32, n, 600, 0, NULL);
			float *got;

			d.be->product(&d, out, tx, ty, &g);
			got = bed_bytes(&d, out);
			if (!want)
				want = got;
			ok(!memcmp(got, want + first[i] * 600, (size_t)(n * 600) * sizeof *got),
			   "%s product from row %d, %d threads", dtype_recipe_name(compute),
			   (int)first[i], threads[t]);
			if (got != want)
				free(got);
			bed_drop(&d, tx);
			bed_drop(&d, ty);
			bed_drop(&d, out);
		}
		d.be->close(&d);
	}
	free(want);
	free(x);
	free(y);
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
			test_known_choice();
			test_nan_choice();
			test_all_chosen();
			if (dut.be->host_memory)
				test_untouched();
			refused((const int32_t[]){ 0, 4 }, "a key behind the row");
			refused((const int32_t[]){ 2, 1 }, "keys that do not ascend");
			if (!itself) {
				test_choose();
				test_attention_at();
				test_product();
				test_layer_norm();
				test_copy();
				test_bits(types[c]);
				test_product_bits(types[c]);
			}
			dut.be->close(&dut);
			ref.be->close(&ref);
		}
	if (backend_names()[1])
		bed_each_isa(argv[0]);
	return tap_end();
}
