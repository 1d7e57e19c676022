/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every product of a model beside oneDNN's own on the same numbers, in turns. Weights of one shape
 * are one product. A gated product is measured with its activation, which oneDNN's lacks. Experts
 * are measured as the verb that the model calls, which also gathers, activates and sums, against
 * two packed products for each expert with the rows routed to it.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mem.h"
#include "rig.h"
#include "yardstick.h"

#define TARGET 0.85

struct shape {
	char name[96];
	struct weight w; /* without handle */
};

struct list {
	struct weight_walk walk; /* first */
	struct shape *shape;
	size_t n, cap;
	double peak, ours, theirs; /* GFLOP/s; seconds of one product of each shape */
};

/* The names of the parts without what is around them: "q_proj+k_proj+v_proj". */
static void label(char *out, size_t size, const struct weight_spec *s)
{
	size_t at = 0;

	*out = '\0';
	for (int i = 0; i < s->nparts; i++) {
		const char *end = strrchr(s->part[i].name, '.'), *begin = end;

		if (!end || strcmp(end, ".weight"))
			begin = end = s->part[i].name + strlen(s->part[i].name);
		while (begin > s->part[i].name && begin[-1] != '.')
			begin--;
		at += (size_t)snprintf(out + at, size - at, "%s%.*s", i ? "+" : "",
				       (int)(end - begin), begin);
		if (at >= size)
			return;
	}
}

static int note(struct weight_walk *walk, const struct weight_spec *s, struct err *e)
{
	struct list *l = (struct list *)walk;
	struct shape *x;

	*s->field = (struct weight){ .count = s->count,
				     .rows = s->rows,
				     .cols = s->cols,
				     .use = s->use,
				     .unit = s->kind,
				     .stored = DT_BF16 };
	if ((s->use != USE_PRODUCT && s->use != USE_GATED) || s->unit == UNIT_EXPORT)
		return 0;
	for (size_t i = 0; i < l->n; i++)
		if (l->shape[i].w.count == s->count && l->shape[i].w.rows == s->rows &&
		    l->shape[i].w.cols == s->cols && l->shape[i].w.unit == s->kind)
			return 0;
	if (mem_grow(&l->shape, &l->cap, l->n + 1, sizeof *l->shape, e))
		return -1;
	x = &l->shape[l->n++];
	label(x->name, sizeof x->name, s);
	x->w = *s->field;
	if (s->count == 1)
		x->w.use = USE_PRODUCT; /* the product alone */
	return 0;
}

/* The bf16 numbers of a matrix as another dtype; released with free. */
static void *as_dtype(const uint16_t *bf16, int64_t n, enum dtype d, struct err *e)
{
	void *p = mem_aligned((size_t)n * dtype_size(d), e);

	if (p)
		dtype_convert(p, d, bf16, DT_BF16, (size_t)n);
	return p;
}

static uint16_t *noise(int64_t n, float deviation, uint64_t seed, struct err *e)
{
	uint16_t *p = mem_aligned((size_t)n * sizeof *p, e);

	if (p)
		rig_noise(p, n, 0, deviation, seed);
	return p;
}

static struct tensor on_device(struct rig *r, enum dtype d, int64_t rows, int64_t cols,
			       struct err *e)
{
	return (struct tensor){ r->dev.be->alloc(&r->dev, (size_t)(rows * cols) * dtype_size(d), e),
				d, rows, cols, cols };
}

static void announce(const struct rig *r, struct list *l, const char *name, const struct outcome *o,
		     double flops, json_t *more)
{
	double ours = flops / o->ours / 1e9, theirs = flops / o->theirs / 1e9;
	char text[160];

	if (r->o->table) {
		snprintf(text, sizeof text, "%s %.0f of %.0f GFLOP/s", name, ours, theirs);
		rig_result(r->o, "products", text, o->ratio, "ratio", BOUND_AT_LEAST, TARGET, more);
	} else {
		json_object_update_new(more,
				       json_pack("{s:f, s:f, s:f, s:f, s:I, s:i}", "gflops", ours,
						 "onednn_gflops", theirs, "least", o->least, "most",
						 o->most, "pairs", (json_int_t)r->o->repeats,
						 "threads", r->dev.threads));
		rig_result(r->o, "products", name, o->ratio, "ratio", BOUND_AT_LEAST, TARGET, more);
	}
	if (theirs > l->peak)
		l->peak = theirs;
}

/* ---- one product ----------------------------------------------------------------------------- */

struct product_run {
	struct rig *r;
	struct weight w;
	struct tensor x, out;
	struct yardstick *y;
};

static const struct act silu = { .kind = ACT_SILU };

static int our_product(void *ctx, struct err *e)
{
	struct product_run *p = ctx;

	if (p->w.use == USE_GATED)
		p->r->dev.be->matmul_gate(&p->r->dev, p->out, p->x, &p->w, &silu);
	else
		p->r->dev.be->matmul(&p->r->dev, p->out, p->x, &p->w, NULL, false);
	return p->r->dev.be->sync(&p->r->dev, e);
}

static int their_product(void *ctx, struct err *e)
{
	return yardstick_run(((struct product_run *)ctx)->y, e);
}

/* What oneDNN left, [rows, N], as a gated product of ours leaves it: [rows, N/2]. */
static void gated(float *b, int64_t rows, int64_t N)
{
	for (int64_t t = 0; t < rows; t++)
		for (int64_t i = 0; i < N / 2; i++) {
			float g = b[t * N + i], u = b[t * N + N / 2 + i];

			b[t * (N / 2) + i] = g / (1 + expf(-g)) * u;
		}
}

/* A ratio of two that compute different things would say nothing. */
static int compare(struct product_run *p, const void *dst, const char *name, struct err *e)
{
	int64_t n = p->out.rows * p->out.cols, wide = p->out.rows * p->w.rows;
	float *a = mem_aligned((size_t)n * sizeof *a, e),
	      *b = mem_aligned((size_t)wide * sizeof *b, e);
	double off = 0, all = 0;
	int rc = -1;

	if (!a || !b)
		goto out;
	p->r->dev.be->store(&p->r->dev, a, DT_F32, p->out.cols, p->out);
	if (p->r->dev.be->sync(&p->r->dev, e))
		goto out;
	dtype_convert(b, DT_F32, dst, p->out.dtype, (size_t)wide);
	if (p->w.use == USE_GATED)
		gated(b, p->out.rows, p->w.rows);
	for (int64_t i = 0; i < n; i++) {
		off += (double)(a[i] - b[i]) * (double)(a[i] - b[i]);
		all += (double)b[i] * (double)b[i];
	}
	rc = all > 0 && sqrt(off / all) < 0.01
		     ? 0
		     : err_fail(e, "%s: ours and oneDNN's differ by %g of %g rms", name,
				sqrt(off / (double)n), sqrt(all / (double)n));
out:
	free(a);
	free(b);
	return rc;
}

static int one_product(struct rig *r, struct list *l, const struct shape *s, enum dtype out,
		       struct err *e)
{
	int64_t M = r->o->tokens, N = s->w.rows, K = s->w.cols;
	enum dtype in = s->w.unit == WEIGHT_FP32 ? DT_F32 : r->o->compute;
	struct product_run p = { .r = r, .w = s->w };
	uint16_t *x = noise(M * K, 1, 1, e), *w = noise(N * K, 1 / sqrtf((float)K), 2, e);
	void *xs = x ? as_dtype(x, M * K, in, e) : NULL, *ws = w ? as_dtype(w, N * K, in, e) : NULL;
	void *dst = mem_aligned((size_t)(M * N) * dtype_size(out), e);
	struct outcome o;
	char name[160];
	int rc = -1;

	if (!xs || !ws || !dst)
		goto out;
	p.x = on_device(r, in, M, K, e);
	p.out = p.x.p ? on_device(r, out, M, s->w.use == USE_GATED ? N / 2 : N, e) : p.x;
	if (!p.out.p || rig_weight(r, &p.w, w, e))
		goto out;
	r->dev.be->upload(&r->dev, p.x, xs);
	p.y = yardstick_new(in, out, M, N, K, xs, ws, dst, r->dev.threads, e);
	snprintf(name, sizeof name, "%s%s, %s to %s, %lld x %lld x %lld", s->name,
		 s->w.use == USE_GATED ? " with silu" : "", dtype_recipe_name(in),
		 dtype_recipe_name(out), (long long)M, (long long)N, (long long)K);
	if (!p.y ||
	    contest_run(&(struct contest){ our_product, their_product, &p }, (int)r->o->repeats, &o,
			e) ||
	    compare(&p, dst, name, e))
		goto out;
	announce(r, l, name, &o, 2.0 * (double)M * (double)N * (double)K, json_object());
	l->ours += o.ours;
	l->theirs += o.theirs;
	rc = 0;
out:
	yardstick_free(p.y);
	r->dev.be->weight_free(&r->dev, &p.w);
	r->dev.be->free(&r->dev, p.x.p);
	r->dev.be->free(&r->dev, p.out.p);
	free(x);
	free(w);
	free(xs);
	free(ws);
	free(dst);
	return rc;
}

/* ---- the experts of a layer ------------------------------------------------------------------ */

struct experts_run {
	struct rig *r;
	struct routing route;
	struct experts ex;
	struct weight gate_up, down;
	struct tensor x, ids, weights, sum;
	int64_t *rows;        /* [E] tokens of each expert */
	struct yardstick **y; /* [2E] */
	void *in, *mid, *out; /* oneDNN's: [T*k,H], [T*k,2I], [T*k,H]; NULL rows */
};

static int our_experts(void *ctx, struct err *e)
{
	struct experts_run *x = ctx;

	x->r->dev.be->experts(&x->r->dev, x->sum, x->x, x->ids, x->weights, &x->ex, false);
	return x->r->dev.be->sync(&x->r->dev, e);
}

static int their_experts(void *ctx, struct err *e)
{
	struct experts_run *x = ctx;

	for (int64_t i = 0; i < 2 * x->route.experts; i++)
		if (x->y[i] && yardstick_run(x->y[i], e))
			return -1;
	return 0;
}

/* k of E at random for each token, ascending. Counts them. */
static void draw(struct experts_run *x, int32_t *ids)
{
	int64_t E = x->route.experts, k = x->route.k, T = x->ids.rows;
	uint64_t s = 88172645463325252u;

	for (int64_t t = 0; t < T; t++)
		for (int64_t e = 0, got = 0; e < E && got < k; e++) {
			s ^= s << 13;
			s ^= s >> 7;
			s ^= s << 17;
			if ((int64_t)((s >> 33) % (uint64_t)(E - e)) >= k - got)
				continue;
			ids[t * k + got++] = (int32_t)e;
			x->rows[e]++;
		}
}

/* The layer's own description of its experts: its code runs on the device that only measures. */
static bool find_experts(struct rig *r, struct experts *ex, struct routing *route)
{
	struct device d = { .be = &backend_measure, .compute = r->o->compute };
	struct target *t = &r->target;
	struct piece piece = { .count = 1, .length = 1, .kv_count = 1 };
	struct chunk c = { .dev = &d,
			   .tokens = 1,
			   .keys = 1,
			   .npieces = 1,
			   .piece = &piece,
			   .ids = { NULL, DT_I32, 1, 1, 1 },
			   .pos = { NULL, DT_I32, 1, 1, 1 } };

	for (int i = 0; i < t->ncarry; i++)
		c.carry[i] = carry_view(&t->carry[i], NULL, 0, 1, r->o->compute);
	for (int layer = 0; layer < t->layers; layer++) {
		if (!t->model->routed || !t->model->routed(t, layer, route))
			continue;
		routed_room(&c, route);
		t->model->layer(t, layer, &c);
		*ex = c.routed.experts;
		return true;
	}
	return false;
}

static int experts_inputs(struct experts_run *x, struct err *e)
{
	int64_t T = x->r->o->tokens, k = x->route.k, H = x->route.in;
	struct device *d = &x->r->dev;
	int32_t *ids = mem_calloc((size_t)(T * k), sizeof *ids, e);
	float *weights = mem_calloc((size_t)(T * k), sizeof *weights, e);
	uint16_t *numbers = noise(T * H, 1, 3, e);
	void *xs = numbers ? as_dtype(numbers, T * H, x->r->o->compute, e) : NULL;
	int rc = -1;

	x->rows = mem_calloc((size_t)x->route.experts, sizeof *x->rows, e);
	x->x = on_device(x->r, x->r->o->compute, T, H, e);
	x->ids = x->x.p ? on_device(x->r, DT_I32, T, k, e) : x->x;
	x->weights = x->ids.p ? on_device(x->r, DT_F32, T, k, e) : x->ids;
	x->sum = x->weights.p ? on_device(x->r, DT_F32, T, x->route.out, e) : x->weights;
	if (!ids || !weights || !xs || !x->rows || !x->sum.p)
		goto out;
	draw(x, ids);
	for (int64_t i = 0; i < T * k; i++)
		weights[i] = 1 / (float)k;
	d->be->upload(d, x->x, xs);
	d->be->upload(d, x->ids, ids);
	d->be->upload(d, x->weights, weights);
	rc = d->be->sync(d, e);
out:
	free(ids);
	free(weights);
	free(numbers);
	free(xs);
	return rc;
}

/* Packs both products of each expert for the rows it got, oneDNN's way, and ours. */
static int experts_weights(struct experts_run *x, struct err *e)
{
	enum dtype d = x->r->o->compute;
	int64_t slots = x->r->o->tokens * x->route.k, H = x->route.in, out = x->route.out,
		wide = x->gate_up.rows, I = x->down.cols;
	uint16_t *gu = noise(wide * H, 1 / sqrtf((float)H), 4, e),
		 *dn = noise(out * I, 1 / sqrtf((float)I), 5, e), *in = noise(slots * H, 1, 6, e);
	void *gus = gu ? as_dtype(gu, wide * H, d, e) : NULL,
	     *dns = dn ? as_dtype(dn, out * I, d, e) : NULL;
	size_t size = dtype_size(d);
	int rc = -1;

	x->in = in ? as_dtype(in, slots * H, d, e) : NULL;
	x->mid = mem_calloc((size_t)(slots * wide), size, e);
	x->out = mem_calloc((size_t)(slots * out), sizeof(float), e);
	x->y = mem_calloc((size_t)(2 * x->route.experts), sizeof(struct yardstick *), e);
	if (!gus || !dns || !x->in || !x->mid || !x->out || !x->y ||
	    rig_weight(x->r, &x->gate_up, gu, e) || rig_weight(x->r, &x->down, dn, e))
		goto out;
	rc = 0;
	for (int64_t i = 0, at = 0; i < x->route.experts && !rc; at += x->rows[i++]) {
		int64_t n = x->rows[i], threads = x->r->dev.threads;
		char *mid = (char *)x->mid + (size_t)(at * wide) * size;

		if (!n)
			continue;
		x->y[2 * i] =
			yardstick_new(d, d, n, wide, H, (char *)x->in + (size_t)(at * H) * size,
				      gus, mid, (int)threads, e);
		x->y[2 * i + 1] =
			x->y[2 * i] ? yardstick_new(d, DT_F32, n, out, I, mid, dns,
						    (float *)x->out + at * out, (int)threads, e)
				    : NULL;
		rc = x->y[2 * i + 1] ? 0 : -1;
	}
out:
	free(gu);
	free(dn);
	free(in);
	free(gus);
	free(dns);
	return rc;
}

static void experts_release(struct experts_run *x)
{
	struct device *d = &x->r->dev;

	for (int64_t i = 0; x->y && i < 2 * x->route.experts; i++)
		yardstick_free(x->y[i]);
	d->be->weight_free(d, &x->gate_up);
	d->be->weight_free(d, &x->down);
	d->be->free(d, x->x.p);
	d->be->free(d, x->ids.p);
	d->be->free(d, x->weights.p);
	d->be->free(d, x->sum.p);
	free(x->y);
	free(x->rows);
	free(x->in);
	free(x->mid);
	free(x->out);
}

static int one_layer_of_experts(struct rig *r, struct list *l, struct err *e)
{
	struct experts_run x = { .r = r };
	struct outcome o;
	char name[160];
	int rc = -1;

	if (!find_experts(r, &x.ex, &x.route))
		return 0;
	x.gate_up = *x.ex.gate_up;
	x.down = *x.ex.down;
	x.ex.gate_up = &x.gate_up;
	x.ex.down = &x.down;
	x.ex.first = 0;
	x.ex.count = x.route.experts;
	if (experts_inputs(&x, e) || experts_weights(&x, e) ||
	    contest_run(&(struct contest){ our_experts, their_experts, &x }, (int)r->o->repeats, &o,
			e))
		goto out;
	snprintf(name, sizeof name, "experts, %s, %lld x %lld of %lld, %lld x %lld",
		 dtype_recipe_name(r->o->compute), (long long)r->o->tokens, (long long)x.route.k,
		 (long long)x.route.experts, (long long)x.gate_up.rows, (long long)x.gate_up.cols);
	announce(r, l, name, &o,
		 2.0 * (double)(r->o->tokens * x.route.k) *
			 (double)(x.gate_up.rows * x.gate_up.cols + x.down.rows * x.down.cols),
		 json_object());
	rc = 0;
out:
	experts_release(&x);
	return rc;
}

/* ---- all of a model -------------------------------------------------------------------------- */

static int each_shape(struct rig *r, struct list *l, struct err *e)
{
	for (size_t i = 0; i < l->n; i++) {
		const struct shape *s = &l->shape[i];

		if (s->w.count > 1)
			continue;
		if (one_product(r, l, s, DT_F32, e))
			return -1;
		if (s->w.unit != WEIGHT_FP32 && r->o->compute != DT_F32 &&
		    one_product(r, l, s, r->o->compute, e))
			return -1;
	}
	return one_layer_of_experts(r, l, e);
}

static void conclude(const struct rig *r, const struct list *l)
{
	const char *dtype = dtype_recipe_name(r->o->compute);
	char name[96];

	snprintf(name, sizeof name, "all matmul shapes once, %s", dtype);
	rig_result(r->o, "products", name, l->theirs / l->ours, "ratio", BOUND_AT_LEAST, TARGET,
		   NULL);
	snprintf(name, sizeof name, "peak of oneDNN %s, %s", yardstick_version(), dtype);
	rig_result(r->o, "products", name, l->peak, "GFLOP/s", BOUND_NONE, 0, NULL);
}

int products(const struct rig_options *o, struct err *e)
{
	struct list l = { .walk = { note } };
	struct rig r;
	int rc = -1;

	if (rig_open(&r, o, e) || r.target.model->weights(&r.target, &l.walk, e) ||
	    each_shape(&r, &l, e))
		goto out;
	conclude(&r, &l);
	rc = 0;
out:
	free(l.shape);
	rig_release(&r);
	return rc;
}
