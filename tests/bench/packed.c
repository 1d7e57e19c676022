/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of packed weights beside the same of plain ones: each dense shape of a model, and some
 * of its experts with EACH rows for one. Codes and numbers are random; t_quant.c looks at results.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mem.h"
#include "quant.h"
#include "rig.h"

#define LEAST	0.8 /* of the speed of plain weights */
#define EXPERTS 8
#define EACH	512
#define SHAPES	16

static const struct {
	const char *name;
	struct quant q;
	double most; /* of the memory of BF16 */
} layouts[] = {
	{ "FP8", { CODE_F8_E4M3, 128, 128, DT_F32, NULL, NULL, false }, 0.55 },
	{ "MXFP4", { CODE_MXFP4, 1, 32, DT_U8, NULL, NULL, false }, 0.3 },
	{ "INT4", { CODE_INT4, 1, 128, DT_BF16, NULL, NULL, false }, 0.3 },
};

struct shapes {
	struct weight_walk walk; /* first */
	struct weight dense[SHAPES], gate_up, down; /* without handles; count 0 = no experts */
	int n;
};

static int note(struct weight_walk *walk, const struct weight_spec *s, struct err *e)
{
	struct shapes *x = (struct shapes *)walk;
	struct weight w = { .count = s->count, .rows = s->rows, .cols = s->cols, .use = s->use,
			    .unit = s->kind, .stored = DT_BF16 };

	(void)e;
	*s->field = w;
	if ((s->use != USE_PRODUCT && s->use != USE_GATED) || s->kind != WEIGHT_BULK ||
	    s->unit == UNIT_EXPORT)
		return 0;
	if (s->count > 1) {
		*(s->use == USE_GATED ? &x->gate_up : &x->down) = w;
		return 0;
	}
	for (int i = 0; i < x->n; i++)
		if (x->dense[i].rows == w.rows && x->dense[i].cols == w.cols)
			return 0;
	if (x->n < SHAPES)
		x->dense[x->n++] = w;
	return 0;
}

/* ---- weights --------------------------------------------------------------------------------- */

static int fill_plain(struct rig *r, struct weight *w, struct err *e)
{
	int64_t n = w->rows * w->cols;
	uint16_t *p = mem_aligned((size_t)n * sizeof *p, e);
	int rc;

	if (!p)
		return -1;
	rig_noise(p, n, 0, 1 / sqrtf((float)w->cols), 7);
	rc = rig_weight(r, w, p, e);
	free(p);
	return rc;
}

/* Scales are 1 but for their exponent, codes random without NaN. */
static int fill_packed(struct rig *r, struct weight *w, struct err *e)
{
	const struct quant *q = w->quant;
	size_t codes = (size_t)w->rows * quant_row_bytes(q, w->cols),
	       scales = (size_t)(w->rows * quant_blocks(q, w->cols));
	unsigned char *c = mem_aligned(codes, e),
		      *s = c ? mem_aligned(scales * dtype_size(q->scale), e) : NULL;
	const float one = 1;
	int rc = s && !r->dev.be->weight_alloc(&r->dev, w, e) ? 0 : -1;
	uint32_t x = 1;

	for (size_t i = 0; !rc && i < codes; i++) {
		x = x * 1664525 + 1013904223;
		c[i] = (unsigned char)(x >> 24);
		c[i] -= (c[i] & 127) == 127;
	}
	for (size_t i = 0; !rc && i < scales; i++)
		if (q->scale == DT_U8)
			s[i] = 127;
		else
			dtype_convert(s + i * dtype_size(q->scale), q->scale, &one, DT_F32, 1);
	for (int64_t i = 0; !rc && i < w->count; i++)
		rc = r->dev.be->weight_fill(&r->dev, w, i, 0, w->rows, c, w->stored, s, e);
	if (!rc)
		rc = r->dev.be->weight_ready(&r->dev, w, e);
	free(c);
	free(s);
	return rc;
}

struct pair {
	struct weight packed, plain;
};

static int pair_fill(struct rig *r, struct pair *p, const struct weight *w, const struct quant *q,
		     struct err *e)
{
	p->packed = p->plain = *w;
	p->packed.quant = q;
	p->packed.stored = quant_stored(q);
	return fill_packed(r, &p->packed, e) || fill_plain(r, &p->plain, e) ? -1 : 0;
}

static void pair_drop(struct rig *r, struct pair *p)
{
	r->dev.be->weight_free(&r->dev, &p->packed);
	r->dev.be->weight_free(&r->dev, &p->plain);
}

/* ---- contests -------------------------------------------------------------------------------- */

struct run {
	struct rig *r;
	struct pair a, b; /* of experts gate_up and down, else a alone */
	struct tensor x, out, ids, weights;
	int64_t experts;
};

static int once(struct run *x, bool packed, struct err *e)
{
	static const struct act silu = { .kind = ACT_SILU };
	const struct backend *be = x->r->dev.be;
	const struct weight *w = packed ? &x->a.packed : &x->a.plain;
	struct experts ex = { .gate_up = w,
			      .down = packed ? &x->b.packed : &x->b.plain,
			      .count = x->experts,
			      .act = silu };

	if (x->experts)
		be->experts(&x->r->dev, x->out, x->x, x->ids, x->weights, &ex, false);
	else if (w->use == USE_GATED)
		be->matmul_gate(&x->r->dev, x->out, x->x, w, &silu);
	else
		be->matmul(&x->r->dev, x->out, x->x, w, NULL, false);
	return be->sync(&x->r->dev, e);
}

static int run_packed(void *ctx, struct err *e)
{
	return once(ctx, true, e);
}

static int run_plain(void *ctx, struct err *e)
{
	return once(ctx, false, e);
}

/* On the device, of random numbers, ones, or i / each. */
static int make(struct rig *r, struct tensor *t, enum dtype d, int64_t rows, int64_t cols,
		int64_t each, struct err *e)
{
	int64_t n = rows * cols;
	float *f = mem_calloc((size_t)n, sizeof *f, e);
	int32_t *i32 = (int32_t *)f;

	*t = (struct tensor){ NULL, d, rows, cols, cols };
	t->p = f ? r->dev.be->alloc(&r->dev, (size_t)n * dtype_size(d), e) : NULL;
	for (int64_t i = 0; t->p && i < n; i++)
		if (d == DT_I32)
			i32[i] = (int32_t)(i / each);
		else
			f[i] = each ? 1 : (float)(i * 7919 % 2048) / 1024 - 1;
	if (t->p && d == DT_BF16)
		dtype_convert(f, d, f, DT_F32, (size_t)n);
	if (t->p)
		r->dev.be->upload(&r->dev, *t, f);
	free(f);
	return t->p ? 0 : -1;
}

static int compete(struct run *x, const char *what, int layout, uint64_t packed, uint64_t plain,
		   struct err *e)
{
	const struct rig_options *o = x->r->o;
	char name[160];
	struct outcome won;

	if (contest_run(&(struct contest){ run_packed, run_plain, x }, (int)o->repeats, &won, e))
		return -1;
	snprintf(name, sizeof name, "%s, %s, speed", layouts[layout].name, what);
	rig_result(o, "packed", name, won.ratio, "ratio", BOUND_AT_LEAST, LEAST,
		   json_pack("{s:f, s:f, s:i}", "least", won.least, "most", won.most, "threads",
			     x->r->dev.threads));
	snprintf(name, sizeof name, "%s, %s, memory", layouts[layout].name, what);
	rig_result(o, "packed", name, (double)packed / (double)plain, "ratio", BOUND_AT_MOST,
		   layouts[layout].most, NULL);
	return 0;
}

static void run_drop(struct run *x)
{
	struct device *d = &x->r->dev;

	pair_drop(x->r, &x->a);
	pair_drop(x->r, &x->b);
	d->be->free(d, x->x.p);
	d->be->free(d, x->out.p);
	d->be->free(d, x->ids.p);
	d->be->free(d, x->weights.p);
}

static int dense(struct rig *r, const struct weight *w, int layout, struct err *e)
{
	struct run x = { .r = r };
	int64_t T = r->o->tokens, out = w->use == USE_GATED ? w->rows / 2 : w->rows;
	enum dtype d = r->o->compute;
	char name[80];
	int rc = -1;

	snprintf(name, sizeof name, "%s, %lld x %lld x %lld", dtype_recipe_name(d), (long long)T,
		 (long long)w->rows, (long long)w->cols);
	if (!make(r, &x.x, d, T, w->cols, 0, e) && !make(r, &x.out, d, T, out, 0, e) &&
	    !pair_fill(r, &x.a, w, &layouts[layout].q, e))
		rc = compete(&x, name, layout, weight_bytes(&x.a.packed, DT_BF16),
			     weight_bytes(&x.a.plain, DT_BF16), e);
	run_drop(&x);
	return rc;
}

static uint64_t both(const struct weight *a, const struct weight *b)
{
	return weight_bytes(a, DT_BF16) + weight_bytes(b, DT_BF16);
}

static int experts(struct rig *r, const struct shapes *s, int layout, struct err *e)
{
	struct run x = { .r = r };
	struct weight up = s->gate_up, down = s->down;
	enum dtype d = r->o->compute;
	int64_t T, n = up.count < EXPERTS ? up.count : EXPERTS;
	char name[80];
	int rc = -1;

	x.experts = up.count = down.count = n;
	T = n * EACH;
	snprintf(name, sizeof name, "%s, %lld experts of %d x %lld x %lld", dtype_recipe_name(d),
		 (long long)n, EACH, (long long)up.rows, (long long)up.cols);
	if (!make(r, &x.x, d, T, up.cols, 0, e) && !make(r, &x.out, DT_F32, T, down.rows, 0, e) &&
	    !make(r, &x.ids, DT_I32, T, 1, EACH, e) && !make(r, &x.weights, DT_F32, T, 1, 1, e) &&
	    !pair_fill(r, &x.a, &up, &layouts[layout].q, e) &&
	    !pair_fill(r, &x.b, &down, &layouts[layout].q, e))
		rc = compete(&x, name, layout,
			     both(&x.a.packed, &x.b.packed), both(&x.a.plain, &x.b.plain), e);
	run_drop(&x);
	return rc;
}

int packed(const struct rig_options *o, struct err *e)
{
	struct shapes s = { .walk = { note } };
	struct rig r;
	int rc = rig_open(&r, o, e) || r.target.model->weights(&r.target, &s.walk, e) ? -1 : 0;

	for (int k = 0; !rc && k < (int)(sizeof layouts / sizeof *layouts); k++) {
		for (int i = 0; !rc && i < s.n; i++)
			rc = dense(&r, &s.dense[i], k, e);
		if (!rc && s.gate_up.count)
			rc = experts(&r, &s, k, e);
	}
	rig_release(&r);
	return rc;
}
