/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward of one window as forward.c runs it, on a backend whose verbs are timed: cpu verbs
 * have done their work when they return. What passes between verbs is counted too, so that the
 * shares add up to the whole.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"
#include "log.h"
#include "mem.h"
#include "recipe.h"
#include "rig.h"

#define DRAFT_LAYERS 5

/* ---- verbs with a clock ---------------------------------------------------------------------- */

enum verb {
	ROWS,
	MATMUL,
	NORM,
	ROPE,
	ATTENTION,
	GATE,
	ADD,
	ROUTE,
	EXPERTS,
	PICK,
	COMBINE,
	CHOOSE,
	ATTENTION_AT,
	COPY,
	STORE,
	VERBS
};

static const char *const verb_name[VERBS] = {
	"rows", "matmul", "norm",    "rope", "attention", "gate",
	"add",	"route",  "experts", "pick", "combine",	  "choose",
	"attention_at", "copy", "store",
};

static struct {
	const struct backend *be;
	double seconds[VERBS], flops[VERBS];
	int64_t calls[VERBS];
} timed;

static void count(enum verb v, double seconds, double flops)
{
	timed.seconds[v] += seconds;
	timed.flops[v] += flops;
	timed.calls[v]++;
}

static double product_flops(int64_t rows, const struct weight *w)
{
	return 2.0 * (double)rows * (double)w->rows * (double)w->cols;
}

static double experts_flops(struct tensor ids, const struct experts *ex)
{
	int64_t slots = ids.rows * ids.cols;

	return product_flops(slots, ex->gate_up) + product_flops(slots, ex->down);
}

/* Each visible pair of a query and a key once: a product with k, one with v. */
static double attention_flops(const struct attention *a, const struct piece *pieces, int n)
{
	double seen = 0;

	for (int i = 0; i < n; i++)
		for (int64_t j = 0; j < pieces[i].count; j++) {
			int64_t keys = pieces[i].first + j + 1;

			seen += (double)(a->window && keys > a->window ? a->window : keys);
		}
	return 2 * seen * a->heads * (a->width + a->value_width);
}

/* Each key up to a query's own, in each head. */
static double choose_flops(struct tensor q, const struct piece *pieces, int n)
{
	double seen = 0;

	for (int i = 0; i < n; i++)
		seen += (double)pieces[i].count *
			((double)pieces[i].first + (double)(pieces[i].count + 1) / 2);
	return 2 * seen * (double)q.cols;
}

static double attention_at_flops(struct tensor keys, const struct attention *a,
				 const struct piece *pieces, int n)
{
	double seen = 0;

	for (int i = 0; i < n; i++)
		for (int64_t j = 0; j < pieces[i].count; j++) {
			int64_t all = pieces[i].first + j + 1;

			seen += (double)(all < keys.cols ? all : keys.cols);
		}
	return 2 * seen * a->heads * (a->width + a->value_width);
}

#define TIMED(verb, slot, flops, parameters, arguments) \
	static void timed_##verb parameters             \
	{                                               \
		double start = log_seconds(), seconds;  \
                                                        \
		timed.be->verb arguments;               \
		seconds = log_seconds() - start;        \
		count(slot, seconds, flops);            \
	}

TIMED(store, STORE, 0, (struct device * d, void *dst, enum dtype to, int64_t ld, struct tensor x),
      (d, dst, to, ld, x))
TIMED(rows, ROWS, 0,
      (struct device * d, struct tensor out, const struct weight *w, struct tensor ids),
      (d, out, w, ids))
TIMED(matmul, MATMUL, product_flops(x.rows, w),
      (struct device * d, struct tensor out, struct tensor x, const struct weight *w,
       const struct weight *bias, bool add),
      (d, out, x, w, bias, add))
TIMED(norm, NORM, 0,
      (struct device * d, struct tensor out, struct tensor x, const struct weight *w, float eps,
       int64_t width),
      (d, out, x, w, eps, width))
TIMED(rope, ROPE, 0,
      (struct device * d, struct tensor x, int heads, const struct weight *norm, float eps,
       const struct rope *r, struct tensor pos),
      (d, x, heads, norm, eps, r, pos))
TIMED(attention, ATTENTION, attention_flops(a, pieces, n),
      (struct device * d, struct tensor out, struct tensor q, struct tensor k, struct tensor v,
       const struct attention *a, const struct piece *pieces, int n),
      (d, out, q, k, v, a, pieces, n))
TIMED(gate, GATE, 0, (struct device * d, struct tensor out, struct tensor x, const struct act *a),
      (d, out, x, a))
TIMED(matmul_gate, MATMUL, product_flops(x.rows, w),
      (struct device * d, struct tensor out, struct tensor x, const struct weight *w,
       const struct act *a),
      (d, out, x, w, a))
TIMED(add, ADD, 0, (struct device * d, struct tensor x, struct tensor y), (d, x, y))
TIMED(route, ROUTE, 0,
      (struct device * d, struct tensor ids, struct tensor weights, struct tensor logits,
       const struct router *r),
      (d, ids, weights, logits, r))
TIMED(experts, EXPERTS, experts_flops(ids, ex),
      (struct device * d, struct tensor sum, struct tensor x, struct tensor ids,
       struct tensor weights, const struct experts *ex, bool add),
      (d, sum, x, ids, weights, ex, add))

TIMED(pick, PICK, 0, (struct device * d, struct tensor out, struct tensor x, struct tensor index),
      (d, out, x, index))
TIMED(combine, COMBINE, 0,
      (struct device * d, struct tensor sum, struct tensor y, struct tensor index,
       struct tensor weights, bool add),
      (d, sum, y, index, weights, add))

TIMED(layer_norm, NORM, 0,
      (struct device * d, struct tensor out, struct tensor x, const struct weight *w,
       const struct weight *bias, float eps, int64_t width),
      (d, out, x, w, bias, eps, width))
TIMED(choose, CHOOSE, choose_flops(q, pieces, n),
      (struct device * d, struct tensor keys, struct tensor q, struct tensor k, struct tensor w,
       const struct piece *pieces, int n),
      (d, keys, q, k, w, pieces, n))
TIMED(attention_at, ATTENTION_AT, attention_at_flops(keys, a, pieces, n),
      (struct device * d, struct tensor out, struct tensor q, struct tensor k, struct tensor v,
       struct tensor keys, const struct attention *a, const struct piece *pieces, int n),
      (d, out, q, k, v, keys, a, pieces, n))
TIMED(product, MATMUL, 2.0 * (double)out.rows * g->groups * (double)g->n * (double)g->k,
      (struct device * d, struct tensor out, struct tensor x, struct tensor y,
       const struct grouped *g),
      (d, out, x, y, g))
TIMED(copy, COPY, 0,
      (struct device * d, struct tensor out, int64_t out_step, struct tensor x, int64_t x_step,
       int64_t width, int n),
      (d, out, out_step, x, x_step, width, n))

/* host_memory, open, close, sync, alloc, free, upload, the four of weights, and the last five */
#define UNTIMED 16

static int with_clock(struct backend *out, const struct backend *be, struct err *e)
{
	const void *const *now = (const void *const *)out, *const *then = (const void *const *)be;
	size_t same = 0;

	timed.be = be;
	*out = *be;
	out->name = "timed";
	out->store = timed_store;
	out->rows = timed_rows;
	out->matmul = timed_matmul;
	out->matmul_gate = timed_matmul_gate;
	out->norm = timed_norm;
	out->rope = timed_rope;
	out->attention = timed_attention;
	out->layer_norm = timed_layer_norm;
	out->choose = timed_choose;
	out->attention_at = timed_attention_at;
	out->product = timed_product;
	out->copy = timed_copy;
	out->gate = timed_gate;
	out->add = timed_add;
	out->route = timed_route;
	out->experts = timed_experts;
	out->pick = timed_pick;
	out->combine = timed_combine;
	for (size_t i = 0; i < sizeof *out / sizeof *now; i++)
		same += now[i] == then[i];
	return same == UNTIMED ? 0 : err_fail(e, "a verb has no clock: profile.c must know it");
}

/* ---- the window ------------------------------------------------------------------------------ */

struct window {
	struct rig *r;
	int64_t tokens, chunk_most;
	void *carry[CARRY_MAX]; /* device, `tokens` each */
	int32_t *ids, *pos;     /* device [tokens] */
	char *scratch;          /* device, NULL = only measured */
	uint64_t scratch_bytes;
	struct piece *piece; /* [rows] each from the start of its chunk */
	int64_t *layer_id;   /* [nids] what is captured */
	struct tap *tap;
	int nids;
	char *states, *last; /* host [tokens, nids * H], [tokens, H] in the compute dtype */
};

static void window_release(struct window *w)
{
	struct device *d = &w->r->dev;

	for (int i = 0; i < CARRY_MAX; i++)
		d->be->free(d, w->carry[i]);
	d->be->free(d, w->ids);
	d->be->free(d, w->pos);
	d->be->free(d, w->scratch);
	free(w->piece);
	free(w->layer_id);
	free(w->tap);
	free(w->states);
	free(w->last);
}

static void capture(struct window *w, struct chunk *c, int64_t begin, enum tap_phase phase,
		    int layer)
{
	struct target *t = &w->r->target;
	enum dtype to = w->r->o->compute;
	int64_t ld = w->nids * t->hidden;

	for (int i = 0; i < w->nids; i++) {
		uint64_t mark = scratch_mark(c);

		if (w->tap[i].phase != phase ||
		    ((phase == TAP_PRE || phase == TAP_LAYER) && w->tap[i].layer != layer))
			continue;
		c->dev->be->store(c->dev,
				  w->states + (size_t)(begin * ld + i * t->hidden) * dtype_size(to),
				  to, ld, t->model->captured(t, w->layer_id[i], c));
		scratch_release(c, mark);
	}
	if (phase == TAP_FINAL)
		c->dev->be->store(c->dev, w->last + (size_t)(begin * t->hidden) * dtype_size(to),
				  to, t->hidden, c->result);
}

static void run_layer(struct window *w, struct chunk *c, int64_t begin, int layer)
{
	struct target *t = &w->r->target;
	struct routing r;
	uint64_t mark;

	if (t->model->pre) {
		t->model->pre(t, layer, c);
		capture(w, c, begin, TAP_PRE, layer);
		c->scratch.used = 0;
	}
	if (!t->model->routed || !t->model->routed(t, layer, &r)) {
		t->model->layer(t, layer, c);
	} else {
		routed_room(c, &r);
		mark = scratch_mark(c);
		t->model->layer(t, layer, c);
		scratch_release(c, mark);
		c->routed.experts.first = 0;
		c->routed.experts.count = r.experts;
		c->dev->be->experts(c->dev, c->routed.sum, c->routed.input, c->routed.ids,
				    c->routed.weights, &c->routed.experts, false);
		t->model->finish(t, layer, c);
	}
	c->scratch.used = 0;
	capture(w, c, begin, TAP_LAYER, layer);
}

/* Unit -1 is the embedding, `layers` the end; a chunk is whole rows. */
static void run_unit(struct window *w, struct chunk *c, int64_t begin, int unit)
{
	struct target *t = &w->r->target;

	if (unit < 0) {
		t->model->embed(t, c);
		capture(w, c, begin, TAP_EMBED, -1);
	} else if (unit < t->layers) {
		run_layer(w, c, begin, unit);
	} else {
		t->model->final(t, c);
		capture(w, c, begin, TAP_FINAL, -1);
	}
}

static struct chunk open_chunk(struct window *w, struct device *d, int64_t begin, int64_t tokens)
{
	int64_t length = w->r->o->length;
	struct chunk c = {
		.dev = d,
		.tokens = tokens,
		.keys = tokens,
		.npieces = (int)(tokens / length),
		.piece = w->piece,
		.ids = { w->ids + begin, DT_I32, tokens, 1, 1 },
		.pos = { w->pos + begin, DT_I32, tokens, 1, 1 },
		.scratch = { w->scratch, w->scratch_bytes, 0, 0 },
	};

	for (int i = 0; i < w->r->target.ncarry; i++)
		c.carry[i] = carry_view(&w->r->target.carry[i], w->carry[i], begin, tokens,
					w->r->o->compute);
	return c;
}

static int run_window(struct window *w, struct device *d, struct err *e)
{
	for (int unit = -1; unit <= w->r->target.layers; unit++)
		for (int64_t at = 0; at < w->tokens; at += w->chunk_most) {
			int64_t left = w->tokens - at;
			struct chunk c =
				open_chunk(w, d, at, left < w->chunk_most ? left : w->chunk_most);

			run_unit(w, &c, at, unit);
		}
	return d->be->sync(d, e);
}

static void no_store(struct device *d, void *dst, enum dtype to, int64_t ld, struct tensor x)
{
	(void)d, (void)dst, (void)to, (void)ld, (void)x;
}

/* As the plan does it: the model's own code on a device whose verbs do nothing. */
static uint64_t measure_scratch(struct window *w)
{
	struct backend be = backend_measure;
	struct device d = { .be = &be, .compute = w->r->o->compute };
	uint64_t peak = 0;

	be.store = no_store;
	for (int unit = -1; unit <= w->r->target.layers; unit++) {
		struct chunk c = open_chunk(w, &d, 0, w->chunk_most);

		run_unit(w, &c, 0, unit);
		if (c.scratch.peak > peak)
			peak = c.scratch.peak;
	}
	return peak;
}

/* What a recipe would take by default; the only layer where there is one. */
static int choose_layers(struct window *w, struct err *e)
{
	struct target *t = &w->r->target;
	int64_t n = t->layers - 1 < DRAFT_LAYERS ? t->layers - 1 : DRAFT_LAYERS;

	w->nids = 1;
	w->layer_id = n ? recipe_default_layers(n, t->layers, &w->nids, e)
			: mem_calloc(1, sizeof *w->layer_id, e);
	w->tap = w->layer_id ? mem_calloc((size_t)w->nids, sizeof *w->tap, e) : NULL;
	if (!w->tap)
		return -1;
	for (int i = 0; i < w->nids; i++)
		if (t->model->tap(t, w->layer_id[i], &w->tap[i], e))
			return -1;
	return 0;
}

static int upload_rows(struct window *w, struct err *e)
{
	struct device *d = &w->r->dev;
	int64_t length = w->r->o->length, vocab = w->r->target.vocab;
	int32_t *host = mem_calloc((size_t)w->tokens, sizeof *host, e);

	if (!host)
		return -1;
	for (int64_t i = 0; i < w->tokens; i++)
		host[i] = (int32_t)(i * 7919 % vocab);
	d->be->upload(d, (struct tensor){ w->ids, DT_I32, w->tokens, 1, 1 }, host);
	for (int64_t i = 0; i < w->tokens; i++)
		host[i] = (int32_t)(i % length);
	d->be->upload(d, (struct tensor){ w->pos, DT_I32, w->tokens, 1, 1 }, host);
	free(host);
	for (int64_t i = 0; i < w->tokens / length; i++)
		w->piece[i] = (struct piece){ i * length, length, 0, length, i * length, length };
	return d->be->sync(d, e);
}

static int window_open(struct window *w, struct rig *r, int64_t rows, struct err *e)
{
	struct device *d = &r->dev;
	int64_t length = r->o->length, in_chunk = LAYOUT_CHUNK_TOKENS / length;
	size_t row = (size_t)r->target.hidden * dtype_size(r->o->compute), bytes;

	memset(w, 0, sizeof *w);
	w->r = r;
	w->tokens = rows * length;
	w->chunk_most = (in_chunk < 1 ? 1 : in_chunk < rows ? in_chunk : rows) * length;
	bytes = (size_t)w->tokens * sizeof *w->ids;
	if (choose_layers(w, e))
		return -1;
	for (int i = 0; i < r->target.ncarry; i++) {
		w->carry[i] = d->be->alloc(
			d, carry_bytes(&r->target.carry[i], w->tokens, r->o->compute), e);
		if (!w->carry[i])
			return -1;
	}
	w->ids = d->be->alloc(d, bytes, e);
	w->pos = w->ids ? d->be->alloc(d, bytes, e) : NULL;
	w->piece = w->pos ? mem_calloc((size_t)rows, sizeof *w->piece, e) : NULL;
	w->states = w->piece ? mem_calloc((size_t)(w->tokens * w->nids), row, e) : NULL;
	w->last = w->states ? mem_calloc((size_t)w->tokens, row, e) : NULL;
	if (!w->last || upload_rows(w, e))
		return -1;
	w->scratch_bytes = measure_scratch(w);
	w->scratch = d->be->alloc(d, w->scratch_bytes, e);
	return w->scratch ? 0 : -1;
}

/* ---- what comes out -------------------------------------------------------------------------- */

struct sheet {
	double total[PAIRS_MOST], seconds[VERBS][PAIRS_MOST];
};

/* Medians of the passes, and from them what is asked for. */
struct shares {
	double total, seconds[VERBS], products, attention, rest;
	double products_flops, attention_flops; /* per second */
};

static int measure(struct window *w, struct sheet *s, struct err *e)
{
	if (run_window(w, &w->r->dev, e)) /* the first makes what the others find */
		return -1;
	for (int i = 0; i < w->r->o->repeats; i++) {
		double start = log_seconds();

		memset(timed.seconds, 0, sizeof timed.seconds);
		memset(timed.flops, 0, sizeof timed.flops);
		memset(timed.calls, 0, sizeof timed.calls);
		if (run_window(w, &w->r->dev, e))
			return -1;
		s->total[i] = log_seconds() - start;
		for (int v = 0; v < VERBS; v++)
			s->seconds[v][i] = timed.seconds[v];
	}
	return 0;
}

static struct shares summarise(struct sheet *s, int n)
{
	struct shares x = { .total = rig_median(s->total, n) };

	for (int v = 0; v < VERBS; v++)
		x.seconds[v] = rig_median(s->seconds[v], n);
	x.products = x.seconds[MATMUL] + x.seconds[EXPERTS];
	x.attention = x.seconds[ATTENTION] + x.seconds[ATTENTION_AT] + x.seconds[CHOOSE];
	x.rest = x.total - x.products - x.attention;
	x.products_flops = (timed.flops[MATMUL] + timed.flops[EXPERTS]) / x.products;
	x.attention_flops = (timed.flops[ATTENTION] + timed.flops[ATTENTION_AT] +
			     timed.flops[CHOOSE]) /
			    x.attention;
	return x;
}

static void print_verbs(const struct window *w, const struct shares *x)
{
	double between = x->total;

	printf("%lld rows of %lld tokens, %lld layers, %s, %d threads: %.3f s, %.0f tokens/s\n",
	       (long long)(w->tokens / w->r->o->length), (long long)w->r->o->length,
	       (long long)w->r->target.layers, dtype_recipe_name(w->r->o->compute),
	       w->r->dev.threads, x->total, (double)w->tokens / x->total);
	printf("%-12s %7s %10s %7s %10s\n", "verb", "calls", "seconds", "share", "GFLOP/s");
	for (int v = 0; v < VERBS; v++) {
		between -= x->seconds[v];
		if (!timed.calls[v])
			continue;
		printf("%-12s %7lld %10.4f %6.1f%%", verb_name[v], (long long)timed.calls[v],
		       x->seconds[v], 100 * x->seconds[v] / x->total);
		if (timed.flops[v] > 0)
			printf(" %10.1f", timed.flops[v] / x->seconds[v] / 1e9);
		printf("\n");
	}
	printf("%-12s %7s %10.4f %6.1f%%\n", "between", "", between, 100 * between / x->total);
}

static json_t *verbs_json(const struct shares *x)
{
	json_t *all = json_object();

	for (int v = 0; v < VERBS; v++)
		json_object_set_new(
			all, verb_name[v],
			json_pack("{s:I, s:f, s:f}", "calls", (json_int_t)timed.calls[v], "seconds",
				  x->seconds[v], "gflops",
				  x->seconds[v] > 0 ? timed.flops[v] / x->seconds[v] / 1e9 : 0.0));
	return all;
}

static json_t *shape_json(const struct window *w)
{
	return json_pack("{s:s, s:I, s:I, s:I, s:i}", "dtype", dtype_recipe_name(w->r->o->compute),
			 "length", (json_int_t)w->r->o->length, "rows",
			 (json_int_t)(w->tokens / w->r->o->length), "layers",
			 (json_int_t)w->r->target.layers, "threads", w->r->dev.threads);
}

/* The targets hold for long rows; shorter ones are shown beside them. */
static void report(const struct window *w, const struct shares *x)
{
	const struct rig_options *o = w->r->o;
	const char *dtype = dtype_recipe_name(o->compute);
	bool bf16 = o->compute == DT_BF16;
	json_t *more = shape_json(w);
	char name[96];

	if (o->table)
		print_verbs(w, x);
	json_object_set_new(more, "seconds", json_real(x->total));
	json_object_set_new(more, "verbs", verbs_json(x));
	snprintf(name, sizeof name, "%s, S = %lld", dtype, (long long)o->length);
	rig_result(o, "profile", name, (double)w->tokens / x->total, "tokens/s", BOUND_NONE, 0,
		   more);
	snprintf(name, sizeof name, "%s, S = %lld, products", dtype, (long long)o->length);
	rig_result(o, "profile", name, x->products / x->total, "share", BOUND_NONE, 0,
		   json_pack("{s:f}", "gflops", x->products_flops / 1e9));
	snprintf(name, sizeof name, "%s, S = %lld, attention", dtype, (long long)o->length);
	rig_result(o, "profile", name, x->attention / x->total, "share", BOUND_NONE, 0,
		   json_pack("{s:f}", "gflops", x->attention_flops / 1e9));
	snprintf(name, sizeof name, "%s, S = %lld, rest", dtype, (long long)o->length);
	rig_result(o, "profile", name, x->rest / x->total, "share", BOUND_AT_MOST,
		   bf16 ? 0.15 : 0.10, NULL);
	snprintf(name, sizeof name, "%s, S = %lld, attention / products", dtype,
		 (long long)o->length);
	rig_result(o, "profile", name, x->attention_flops / x->products_flops, "flop/s",
		   o->length >= 4096 ? BOUND_AT_LEAST : BOUND_NONE, bf16 ? 0.35 : 0.5, NULL);
}

int profile(const struct rig_options *o, struct err *e)
{
	int64_t rows = o->rows ? o->rows : LAYOUT_WINDOW_TOKENS / o->length;
	struct sheet *s = mem_calloc(1, sizeof *s, e);
	struct window w = { 0 };
	struct backend be;
	struct shares x;
	struct rig r;
	int rc = -1;

	if (rig_open(&r, o, e) || !s)
		goto out;
	if (with_clock(&be, r.dev.be, e))
		goto out;
	r.dev.be = &be;
	if (rig_fill(&r, e) || window_open(&w, &r, rows < 1 ? 1 : rows, e) || measure(&w, s, e))
		goto out;
	x = summarise(s, (int)o->repeats);
	report(&w, &x);
	rc = 0;
out:
	if (w.r)
		window_release(&w);
	rig_release(&r);
	free(s);
	return rc;
}
