/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The machinery around models: choosing the family, building specs, finding their tensors. Knows no
 * family by name but the one it must refuse.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "json.h"
#include "mem.h"
#include "model.h"
#include "text.h"

static const struct model *find_model(const char *type)
{
	for (const struct model *const *m = models; *m; m++)
		for (const char *const *t = (*m)->types; *t; t++)
			if (!strcmp(*t, type))
				return *m;
	return NULL;
}

static int refuse_type(const char *dir, const char *type, struct err *e)
{
	struct text known = TEXT_INIT;

	if (!strncmp(type, "minimax_m3", strlen("minimax_m3")))
		return err_refuse(e,
				  "target '%s' is MiniMax M3 (model_type '%s'), a multimodal "
				  "model: the cache is text-only; "
				  "choose a text target",
				  dir, type);
	for (const struct model *const *m = models; *m; m++)
		for (const char *const *t = (*m)->types; *t; t++)
			text_printf(&known, "%s%s", known.len ? ", " : "", *t);
	err_refuse(e,
		   "target '%s' has model_type '%s', which this version does not support (it "
		   "supports %s)",
		   dir, type, known.s ? known.s : "none");
	text_release(&known);
	return -1;
}

int target_open(struct target *t, const char *dir, const json_t *config,
		const struct target_options *o, struct err *e)
{
	const char *type;

	memset(t, 0, sizeof *t);
	if (json_str(config, "config.json", "model_type", &type, e))
		return err_context(e, "target '%s'", dir);
	t->model = find_model(type);
	if (!t->model)
		return refuse_type(dir, type, e);
	t->type = mem_strdup(type, e);
	if (!t->type || t->model->config(t, config, o, e)) {
		err_context(e, "target '%s'", dir);
		target_release(t);
		return -1;
	}
	return 0;
}

void target_release(struct target *t)
{
	if (t->model && t->model->release)
		t->model->release(t);
	free(t->type);
	memset(t, 0, sizeof *t);
}

/* ---- specs ----------------------------------------------------------------------------------- */

static void part_vadd(struct weight_spec *s, int64_t rows, const char *fmt, va_list ap)
{
	struct weight_part *p = &s->part[s->nparts++];

	vsnprintf(p->name, sizeof p->name, fmt, ap);
	p->rows = rows;
}

void weight_part_add(struct weight_spec *s, int64_t rows, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	part_vadd(s, rows, fmt, ap);
	va_end(ap);
	s->rows += rows;
}

struct weight_spec weight_matrix(struct weight *field, enum unit_kind unit, int layer, int64_t rows,
				 int64_t cols, const char *fmt, ...)
{
	struct weight_spec s = {
		.field = field,
		.unit = unit,
		.layer = layer,
		.count = 1,
		.rows = rows,
		.cols = cols,
		.use = USE_PRODUCT,
		.kind = WEIGHT_BULK,
		.shard = SHARD_ROWS,
	};
	va_list ap;

	va_start(ap, fmt);
	part_vadd(&s, rows, fmt, ap);
	va_end(ap);
	return s;
}

struct weight_spec weight_vector(struct weight *field, enum unit_kind unit, int layer, int64_t n,
				 const char *fmt, ...)
{
	struct weight_spec s = {
		.field = field,
		.unit = unit,
		.layer = layer,
		.count = 1,
		.rows = n,
		.cols = 1,
		.vector = true,
		.use = USE_VECTOR,
		.kind = WEIGHT_BULK,
		.shard = SHARD_ROWS,
	};
	va_list ap;

	va_start(ap, fmt);
	part_vadd(&s, n, fmt, ap);
	va_end(ap);
	return s;
}

/* ---- finding tensors ------------------------------------------------------------------------- */

struct resolver {
	const struct weight_spec *spec;
	const struct catalogue *catalogue;
	struct weight_storage *out;
	int found, absent;		/* parts */
	int (*each)(void *ctx, const struct weight_source *src, struct err *e);
	void *ctx;
};

static int expand(char out[WEIGHT_NAME + 16], const char *name, int64_t expert)
{
	const char *at = strstr(name, "{e}");

	if (!at)
		return snprintf(out, WEIGHT_NAME + 16, "%s", name);
	return snprintf(out, WEIGHT_NAME + 16, "%.*s%lld%s", (int)(at - name), name,
			(long long)expert, at + 3);
}

static void shape_text(struct text *out, const int64_t *shape, int n)
{
	text_add(out, "[");
	for (int i = 0; i < n; i++)
		text_printf(out, "%s%lld", i ? ", " : "", (long long)shape[i]);
	text_add(out, "]");
}

static int wrong_shape(const struct resolver *r, const struct entry *t, const int64_t *want, int n,
		       struct err *e)
{
	struct text have = TEXT_INIT, need = TEXT_INIT;

	shape_text(&have, t->shape, t->ndim);
	shape_text(&need, want, n);
	err_refuse(e, "tensor '%s' of '%s' has shape %s, but config.json asks for %s", t->name,
		   r->catalogue->path, have.s ? have.s : "?", need.s ? need.s : "?");
	text_release(&have);
	text_release(&need);
	return -1;
}

/*
 * Does the shape begin with `want` and have `cols` elements in what follows? Sizes of 1 among the
 * columns are free ([n,1,4] is [n,4]).
 */
static bool has_shape(const struct entry *t, const int64_t *want, int n, int64_t cols, bool vector)
{
	int64_t rest = 1;

	if (t->ndim < n || (vector && t->ndim != n))
		return false;
	for (int i = 0; i < n; i++)
		if (t->shape[i] != want[i])
			return false;
	for (int i = n; i < t->ndim; i++)
		rest *= t->shape[i];
	return rest == cols;
}

/* A part is [rows, cols]; a fused tensor [count, rows, cols] or [count * rows, cols]. */
static int check_shape(const struct resolver *r, const struct entry *t, bool fused, int64_t rows,
		       struct err *e)
{
	const struct weight_spec *s = r->spec;
	int64_t flat[2] = { fused ? s->count * rows : rows, s->cols },
		stack[3] = { s->count, rows, s->cols };

	if (t->ndim < 0 || has_shape(t, flat, 1, s->cols, s->vector) ||
	    (fused && has_shape(t, stack, 2, s->cols, s->vector)))
		return 0;
	if (fused && s->count > 1)
		return wrong_shape(r, t, stack, s->vector ? 2 : 3, e);
	return wrong_shape(r, t, flat, s->vector ? 1 : 2, e);
}

/* How one tensor is stored. */
struct layout {
	enum dtype stored;
	const struct quant *quant; /* NULL = plain */
	const struct entry *scale;
};

/* What is stored in one layout stays so; else, and where dtypes differ, it becomes the widest. */
static void take_layout(const struct resolver *r, const struct layout *l)
{
	struct weight_storage *out = r->out;

	if (out->stored == DT_NONE)
		*out = (struct weight_storage){ l->stored, l->quant };
	else if (out->stored != l->stored || out->quant != l->quant)
		*out = (struct weight_storage){ r->spec->kind == WEIGHT_RAW ? DT_I64 : DT_F32,
						NULL };
}

static bool is_packed(enum dtype d)
{
	return d == DT_F8_E4M3 || d == DT_F8_E5M2 || d == DT_I8 || d == DT_U8;
}

/* "X.weight" with another end; false where a name has no such end. */
static bool scale_name(char out[WEIGHT_NAME + 32], const char *name, const struct quant *q)
{
	size_t n = strlen(name), end = strlen(".weight");

	if (n < end || strcmp(name + n - end, ".weight"))
		return false;
	snprintf(out, WEIGHT_NAME + 32, "%.*s%s", (int)(n - end), name, q->scale_suffix);
	return true;
}

static int check_grid(const struct resolver *r, const struct entry *t, int64_t rows,
		      const struct layout *l, struct err *e)
{
	const struct quant *q = l->quant;
	int64_t want[] = { (rows + q->block_rows - 1) / q->block_rows,
			   (r->spec->cols + q->block_cols - 1) / q->block_cols };
	struct text have = TEXT_INIT, need = TEXT_INIT;

	if (l->scale->ndim < 0 || (l->scale->ndim == 2 && l->scale->shape[0] == want[0] &&
				   l->scale->shape[1] == want[1]))
		return 0;
	shape_text(&have, l->scale->shape, l->scale->ndim);
	shape_text(&need, want, 2);
	err_refuse(e,
		   "scales '%s' of '%s' have shape %s, but blocks of %d x %d, as config.json says, "
		   "give '%s' a grid of %s",
		   l->scale->name, r->catalogue->path, have.s ? have.s : "?", q->block_rows,
		   q->block_cols, t->name, need.s ? need.s : "?");
	text_release(&have);
	text_release(&need);
	return -1;
}

/*
 * The layout among the spec's whose scales stand beside tensor `t`: of a tensor that an estimate
 * knows by name alone, their presence makes it packed.
 */
static int find_scales(const struct resolver *r, const struct entry *t, struct layout *l,
		       struct err *e)
{
	const struct quant *const *q = r->spec->quants;
	const struct entry *other = NULL;
	char name[WEIGHT_NAME + 32];

	for (; q && *q && !l->scale; q++) {
		const struct entry *s;

		if (!scale_name(name, t->name, *q) ||
		    !(s = r->catalogue->find(r->catalogue, name)))
			continue;
		other = s;
		if (s->ndim < 0 || s->dtype == (*q)->scale)
			*l = (struct layout){ DT_F8_E4M3, *q, s };
	}
	if (other && !l->scale)
		return err_refuse(e, "scales '%s' of '%s' are stored as %s, which cannot be scales",
				  other->name, r->catalogue->path, dtype_name(other->dtype));
	return 0;
}

static int refuse_packed(const struct resolver *r, const struct entry *t, bool fused,
			 struct err *e)
{
	const struct quant *const *q = r->spec->quants;
	char name[WEIGHT_NAME + 32];
	const char *why = fused ? "packed experts have to be one tensor each" :
		       !q || !*q
			       ? "config.json does not say how (quantization_config), or this "
				 "version has it plain only"
			       : "only F8_E4M3 with scales is read";

	if (!fused && q && *q && t->dtype == DT_F8_E4M3 && scale_name(name, t->name, *q))
		return err_refuse(e,
				  "tensor '%s' of '%s' is stored as %s, but its scales '%s' are "
				  "missing",
				  t->name, r->catalogue->path, dtype_name(t->dtype), name);
	return err_refuse(e, "tensor '%s' of '%s' is stored as %s, packed (quantised): %s; "
			  "use the BF16 checkpoint",
			  t->name, r->catalogue->path, dtype_name(t->dtype), why);
}

/* `rows` that the tensor has by itself. */
static int check_dtype(struct resolver *r, const struct entry *t, bool fused, int64_t rows,
		       struct layout *l, struct err *e)
{
	bool raw = r->spec->kind == WEIGHT_RAW, known = t->ndim >= 0;

	*l = (struct layout){ known ? t->dtype : DT_NONE, NULL, NULL };
	if (!fused && find_scales(r, t, l, e))
		return -1;
	if (l->scale && known && t->dtype != DT_F8_E4M3)
		return err_refuse(e,
				  "tensor '%s' of '%s' is stored as %s, but has scales '%s' as if "
				  "it were packed in F8_E4M3",
				  t->name, r->catalogue->path, dtype_name(t->dtype),
				  l->scale->name);
	if (l->scale) {
		if (check_grid(r, t, rows, l, e))
			return -1;
		take_layout(r, l);
		return 0;
	}
	if (!known)
		return 0;
	if (raw ? t->dtype == DT_I64 || t->dtype == DT_I32
		: t->dtype == DT_F32 || t->dtype == DT_BF16 || t->dtype == DT_F16) {
		take_layout(r, l);
		return 0;
	}
	if (is_packed(t->dtype))
		return refuse_packed(r, t, fused, e);
	return err_refuse(e, "tensor '%s' of '%s' is stored as %s, which cannot be a %s weight",
			  t->name, r->catalogue->path, dtype_name(t->dtype),
			  raw ? "integer" : "floating-point");
}

static int give(const struct resolver *r, const struct entry *t, const struct layout *l,
		int64_t index, int64_t row0, int64_t rows, int64_t from, struct err *e)
{
	struct weight_source src = { .entry = t,
				     .scale = l->scale,
				     .quant = l->quant,
				     .index = index,
				     .row0 = row0,
				     .rows = rows,
				     .from = from };

	return r->each ? r->each(r->ctx, &src, e) : 0;
}

static const struct entry *find_part(const struct resolver *r, const struct weight_part *p,
				     int64_t index, char name[])
{
	const struct entry *t;
	char alt[WEIGHT_NAME + 16];

	expand(name, p->name, index);
	t = r->catalogue->find(r->catalogue, name);
	if (t || !p->alt[0])
		return t;
	expand(alt, p->alt, index);
	return r->catalogue->find(r->catalogue, alt);
}

static int64_t held(const struct weight_spec *s)
{
	return s->held ? s->held : s->count;
}

static int missing(const struct resolver *r, const char *name, struct err *e)
{
	return err_refuse(e, "tensor '%s' is missing from '%s'", name, r->catalogue->path);
}

static int resolve_part(struct resolver *r, const struct weight_part *p, int64_t index,
			int64_t row0, struct err *e)
{
	char name[WEIGHT_NAME + 16];
	const struct entry *t = find_part(r, p, r->spec->first + index, name);
	struct layout l;

	if (!t) {
		r->absent++;
		if (r->catalogue->partial || (r->spec->optional && !r->found))
			return 0;
		return missing(r, name, e);
	}
	if (r->spec->optional && r->absent && !r->catalogue->partial)
		return err_refuse(
			e,
			"tensor '%s' of '%s' stands alone: others of the same weight are missing",
			name, r->catalogue->path);
	r->found++;
	if (check_shape(r, t, false, p->rows, e) || check_dtype(r, t, false, p->rows, &l, e))
		return -1;
	return give(r, t, &l, index, row0, p->rows, 0, e);
}

static int resolve_fused(struct resolver *r, const struct entry *t, struct err *e)
{
	const struct weight_spec *s = r->spec;
	struct layout l;

	if (check_shape(r, t, true, s->rows, e) || check_dtype(r, t, true, s->rows, &l, e))
		return -1;
	for (int64_t i = 0; i < held(s); i++)
		if (give(r, t, &l, i, 0, s->rows, (s->first + i) * s->rows, e))
			return -1;
	return 0;
}

static int resolve_parts(struct resolver *r, struct err *e)
{
	const struct weight_spec *s = r->spec;

	for (int64_t i = 0; i < held(s); i++) {
		int64_t row0 = 0;

		for (int p = 0; p < s->nparts; row0 += s->part[p++].rows)
			if (resolve_part(r, &s->part[p], i, row0, e))
				return -1;
	}
	return 0;
}

/*
 * An estimate takes what it cannot see for what is published: packed as config.json says, or BF16,
 * but FP32 and integer weights as they must be.
 */
static struct weight_storage usual_storage(const struct weight_spec *s)
{
	if (s->quants && s->quants[0])
		return (struct weight_storage){ DT_F8_E4M3, s->quants[0] };
	return (struct weight_storage){ s->kind == WEIGHT_RAW     ? DT_I64
					: s->kind == WEIGHT_FP32 ? DT_F32
								 : DT_BF16,
					NULL };
}

int weight_resolve(const struct weight_spec *s, const struct catalogue *c,
		   struct weight_storage *out,
		   int (*each)(void *ctx, const struct weight_source *src, struct err *e),
		   void *ctx, struct err *e)
{
	struct resolver r = { s, c, out, 0, 0, each, ctx };
	const struct entry *fused = s->fused[0] ? c->find(c, s->fused) : NULL;

	*out = (struct weight_storage){ DT_NONE, NULL };
	if (s->data) {
		out->stored = s->data_dtype;
		return 0;
	}
	if (s->derived && !c->staged) {
		*out = usual_storage(s);
		return 0;
	}
	if (fused ? resolve_fused(&r, fused, e) : resolve_parts(&r, e))
		return -1;
	if (!fused && !s->nparts && !s->optional && !c->partial)
		return missing(&r, s->fused, e);
	if (out->stored == DT_NONE && c->partial && !s->optional)
		*out = usual_storage(s);
	return 0;
}

/* ---- carry ----------------------------------------------------------------------------------- */

uint64_t carry_bytes(const struct carry_spec *s, int64_t tokens, enum dtype compute)
{
	return ((uint64_t)tokens / (uint64_t)s->ratio + 1) * (uint64_t)s->width *
	       dtype_size(s->dtype == DT_NONE ? compute : s->dtype);
}

/*
 * Entry rows of a chunk that begins at `begin` start at ceil(begin / ratio): the pieces before it
 * hold at most floor(begin / ratio) whole groups, so views of neighbouring chunks never overlap.
 */
struct tensor carry_view(const struct carry_spec *s, void *base, int64_t begin, int64_t tokens,
			 enum dtype compute)
{
	struct tensor all = { base, s->dtype == DT_NONE ? compute : s->dtype, tokens / s->ratio,
			      s->width, s->width };

	return tensor_rows(all, (begin + s->ratio - 1) / s->ratio, tokens / s->ratio);
}

struct tensor chunk_keys(struct chunk *c, struct tensor x)
{
	/* plans with cp_size > 1 are refused in this version: a chunk is whole rows */
	(void)c;
	return x;
}

/* ---- scratch --------------------------------------------------------------------------------- */

struct tensor scratch(struct chunk *c, enum dtype dtype, int64_t rows, int64_t cols)
{
	struct arena *a = &c->scratch;
	uint64_t bytes = ((uint64_t)rows * (uint64_t)cols * dtype_size(dtype) + 63) & ~(uint64_t)63;
	struct tensor t = { NULL, dtype, rows, cols, cols };

	if (a->base) {
		if (a->used + bytes > a->size) {
			err_fail(&c->dev->err,
				 "a chunk of %lld tokens needs more scratch memory than the %llu "
				 "bytes planned",
				 (long long)c->tokens, (unsigned long long)a->size);
			/*
			 * verbs may touch what lies there until the failure is seen: never outside
			 */
			t.p = a->base;
			t.rows = 0;
			return t;
		}
		t.p = a->base + a->used;
	}
	a->used += bytes;
	if (a->used > a->peak)
		a->peak = a->used;
	return t;
}

void routed_room(struct chunk *c, const struct routing *r)
{
	struct routed *x = &c->routed;

	x->input = scratch(c, c->dev->compute, c->tokens, r->in);
	x->ids = scratch(c, DT_I32, c->tokens, r->k);
	x->weights = scratch(c, DT_F32, c->tokens, r->k);
	x->sum = scratch(c, DT_F32, c->tokens, r->out);
}

void routed_views(struct routed *x, void *const array[4], const struct routing *r, int64_t begin,
		  int64_t tokens, enum dtype compute)
{
	const int64_t cols[] = { r->in, r->k, r->k, r->out };
	const enum dtype dtypes[] = { compute, DT_I32, DT_F32, DT_F32 };
	struct tensor *to[] = { &x->input, &x->ids, &x->weights, &x->sum };

	for (int i = 0; i < 4; i++)
		*to[i] = tensor_rows(
			(struct tensor){ array[i], dtypes[i], tokens, cols[i], cols[i] }, begin,
			tokens);
}

void routed_bytes(size_t bytes[4], const struct routing *r, int64_t tokens, enum dtype compute)
{
	bytes[0] = (size_t)(tokens * r->in) * dtype_size(compute);
	bytes[1] = (size_t)(tokens * r->k) * sizeof(int32_t);
	bytes[2] = (size_t)(tokens * r->k) * sizeof(float);
	bytes[3] = (size_t)(tokens * r->out) * sizeof(float);
}

static int64_t larger(int64_t a, int64_t b)
{
	return a > b ? a : b;
}

bool routing_most(const struct target *t, struct routing *most)
{
	struct routing r;

	*most = (struct routing){ 0 };
	for (int i = 0; t->model->routed && i < t->layers; i++)
		if (t->model->routed(t, i, &r))
			*most = (struct routing){ larger(most->experts, r.experts),
						  larger(most->k, r.k), larger(most->in, r.in),
						  larger(most->out, r.out) };
	return most->experts > 0;
}
