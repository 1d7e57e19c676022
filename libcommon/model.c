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
#include "quant.h"
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

/* [count, in, out], as some frameworks keep experts. */
static bool is_transposed(const struct entry *t, const int64_t want[3])
{
	return t->ndim == 3 && t->shape[0] == want[0] && t->shape[1] == want[2] &&
	       t->shape[2] == want[1];
}

/*
 * A part is [rows, cols]; a fused tensor [count, rows, cols] or [count * rows, cols]. Of codes that
 * lie several in an element, `cols` are elements.
 */
static int check_shape(const struct resolver *r, const struct entry *t, bool fused, int64_t rows,
		       int64_t cols, struct err *e)
{
	const struct weight_spec *s = r->spec;
	int64_t flat[2] = { fused ? s->count * rows : rows, cols },
		stack[3] = { s->count, rows, cols };

	if (t->ndim < 0 || has_shape(t, flat, 1, cols, s->vector) ||
	    (fused && has_shape(t, stack, 2, cols, s->vector)))
		return 0;
	if (fused && is_transposed(t, stack))
		return err_refuse(e,
				  "tensor '%s' of '%s' is transposed: its experts are [in, out], "
				  "and this version reads them as [out, in] only",
				  t->name, r->catalogue->path);
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

/* ---- packed tensors -------------------------------------------------------------------------- */

#define PACKED_NAME (WEIGHT_NAME + 48)

/* "X.weight" with another end; of a fused tensor's name X and what the end has after ".weight". */
static const char *packed_name(char out[PACKED_NAME], const char *name, const char *suffix)
{
	size_t n = strlen(name), end = strlen(".weight");

	if (n >= end && !strcmp(name + n - end, ".weight"))
		n -= end;
	else if (!strncmp(suffix, ".weight", end))
		suffix += end;
	snprintf(out, PACKED_NAME, "%.*s%s", (int)n, name, suffix);
	return out;
}

static const struct entry *beside(const struct resolver *r, const char *name, const char *suffix)
{
	char other[PACKED_NAME];

	return r->catalogue->find(r->catalogue, packed_name(other, name, suffix));
}

static bool is_packed(enum dtype d)
{
	return d == DT_F8_E4M3 || d == DT_F8_E5M2 || d == DT_I8 || d == DT_U8;
}

/* Of a part, or of each matrix of a fused tensor. */
static int64_t grid_rows(const struct quant *q, int64_t rows)
{
	return (rows + q->block_rows - 1) / q->block_rows;
}

/*
 * Gate and up of a fused tensor that are less than a block high: each has one of its own
 * (transformers keeps two rows of scales then).
 */
static bool in_halves(const struct resolver *r, const struct quant *q, bool fused, int64_t rows)
{
	return fused && r->spec->use == USE_GATED && rows / 2 <= q->block_rows;
}

static bool fits_grid(const struct resolver *r, const struct entry *scale, const struct quant *q,
		      bool fused, int64_t rows)
{
	int64_t high = in_halves(r, q, fused, rows) ? 2 : grid_rows(q, rows),
		wide = quant_blocks(q, r->spec->cols), stack[] = { r->spec->count, high };

	if (scale->ndim < 0 || (!fused && scale->ndim != 2))
		return scale->ndim < 0;
	return (fused && has_shape(scale, stack, 2, wide, false)) ||
	       ((!fused || r->spec->count == 1) && has_shape(scale, &high, 1, wide, false));
}

static int wrong_grid(const struct resolver *r, const struct entry *t, const struct entry *scale,
		      const struct quant *q, bool fused, int64_t rows, struct err *e)
{
	int64_t want[] = { r->spec->count,
			   in_halves(r, q, fused, rows) ? 2 : grid_rows(q, rows),
			   quant_blocks(q, r->spec->cols) };
	struct text have = TEXT_INIT, need = TEXT_INIT;
	bool all = q->block_cols == QUANT_ALL_COLS;

	shape_text(&have, scale->shape, scale->ndim);
	shape_text(&need, want + !fused, fused ? 3 : 2);
	err_refuse(e,
		   "scales '%s' of '%s' have shape %s, but blocks of %d x %lld, as config.json "
		   "says, give '%s' a grid of %s",
		   scale->name, r->catalogue->path, have.s ? have.s : "?", q->block_rows,
		   (long long)(all ? r->spec->cols : q->block_cols), t->name,
		   need.s ? need.s : "?");
	text_release(&have);
	text_release(&need);
	return -1;
}

/* Two layouts whose grids of this tensor look alike and cut its columns elsewhere. */
static bool differ(const struct quant *a, const struct quant *b, int64_t cols)
{
	return a->block_cols != b->block_cols && quant_blocks(a, cols) > 1;
}

/*
 * The layout among the spec's in which the codes `t` of the weight `name` are stored, whose scales
 * stand beside them; `apart`: codes have a name of their own. Of a tensor that an estimate knows by
 * name alone, the presence of scales makes it packed.
 */
static int find_layout(const struct resolver *r, const struct entry *t, const char *name,
		       bool apart, bool fused, int64_t rows, struct layout *l, struct err *e)
{
	const struct quant *const *q = r->spec->quants, *close = NULL;
	const struct entry *scale = NULL;

	for (; q && *q; q++) {
		const struct entry *s;

		if (!(*q)->codes_suffix == apart || !(s = beside(r, name, (*q)->scale_suffix)))
			continue;
		scale = s;
		if ((s->ndim >= 0 && s->dtype != (*q)->scale) ||
		    (t->ndim >= 0 && !quant_stores(*q, t->dtype)))
			continue;
		close = *q;
		if (!fits_grid(r, s, *q, fused, rows))
			continue;
		if (!l->quant)
			*l = (struct layout){ quant_stored(*q), *q, s };
		else if (t->ndim >= 0 && differ(l->quant, *q, r->spec->cols))
			return err_refuse(e,
					  "scales '%s' of '%s' may belong to groups of %d or of %d "
					  "columns, both in config.json: which is not supported",
					  s->name, r->catalogue->path, l->quant->block_cols,
					  (*q)->block_cols);
	}
	if (l->quant || !scale)
		return 0;
	if (close)
		return wrong_grid(r, t, scale, close, fused, rows, e);
	if (is_packed(t->dtype) || apart)
		return err_refuse(e,
				  "tensor '%s' of '%s' is stored as %s and its scales '%s' as %s, "
				  "which is none of the layouts that config.json names",
				  t->name, r->catalogue->path, dtype_name(t->dtype), scale->name,
				  dtype_name(scale->dtype));
	return err_refuse(e,
			  "tensor '%s' of '%s' is stored as %s, but has scales '%s' as if it were "
			  "packed",
			  t->name, r->catalogue->path, dtype_name(t->dtype), scale->name);
}

/* What would change the numbers beside the scales. */
static int refuse_more(const struct resolver *r, const char *name, struct err *e)
{
	static const char *const suffix[] = { ".weight_zero_point", ".weight_g_idx",
					      ".weight_global_scale" };

	for (size_t i = 0; i < sizeof suffix / sizeof *suffix; i++) {
		const struct entry *t = beside(r, name, suffix[i]);

		if (t)
			return err_refuse(e,
					  "tensor '%s' of '%s' stands beside packed codes: zero "
					  "points, orders of columns and scales of scales are not "
					  "supported",
					  t->name, r->catalogue->path);
	}
	return 0;
}

static int refuse_packed(const struct resolver *r, const struct entry *t, const char *name,
			 struct err *e)
{
	const struct quant *const *q = r->spec->quants;
	char scale[PACKED_NAME];

	for (; q && *q; q++)
		if (quant_stores(*q, t->dtype) && !beside(r, name, (*q)->scale_suffix))
			return err_refuse(
				e,
				"tensor '%s' of '%s' is stored as %s, but its scales '%s' are "
				"missing",
				t->name, r->catalogue->path, dtype_name(t->dtype),
				packed_name(scale, name, (*q)->scale_suffix));
	return err_refuse(e,
			  "tensor '%s' of '%s' is stored as %s, packed (quantised): config.json "
			  "does not say how (quantization_config), or this version has it plain "
			  "only; use the BF16 checkpoint",
			  t->name, r->catalogue->path, dtype_name(t->dtype));
}

/*
 * Tensor `t` of the weight `name`: its layout, its shape, its place in the weight's storage. `rows`
 * that it has by itself; `apart` as in find_layout.
 */
static int check_tensor(struct resolver *r, const struct entry *t, const char *name, bool apart,
			bool fused, int64_t rows, struct layout *l, struct err *e)
{
	bool raw = r->spec->kind == WEIGHT_RAW, known = t->ndim >= 0;
	int64_t cols = r->spec->cols;

	*l = (struct layout){ known ? t->dtype : DT_NONE, NULL, NULL };
	if (find_layout(r, t, name, apart, fused, rows, l, e))
		return -1;
	if (!l->quant && (apart || (known && is_packed(t->dtype))))
		return refuse_packed(r, t, name, e);
	if (l->quant && refuse_more(r, name, e))
		return -1;
	if (check_shape(r, t, fused, rows, l->quant ? quant_row_elements(l->quant, cols) : cols, e))
		return -1;
	if (l->quant) {
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
	return err_refuse(e, "tensor '%s' of '%s' is stored as %s, which cannot be a %s weight",
			  t->name, r->catalogue->path, dtype_name(t->dtype),
			  raw ? "integer" : "floating-point");
}

int64_t weight_grid_row(const struct weight_source *s, int64_t row)
{
	return s->grid0 + (row - s->block0) / s->quant->block_rows;
}

int64_t weight_grid_rows(const struct weight_source *s)
{
	return weight_grid_row(s, s->from + s->rows - 1) - weight_grid_row(s, s->from) + 1;
}

/* A name of the weight under which it stands plain, or packed under the name of its codes. */
static const struct entry *find_either(const struct resolver *r, const char *name, bool *apart,
				       struct err *e)
{
	const struct quant *const *q = r->spec->quants;
	const struct entry *t = r->catalogue->find(r->catalogue, name), *codes = NULL;

	for (; q && *q && !codes; q++)
		if ((*q)->codes_suffix)
			codes = beside(r, name, (*q)->codes_suffix);
	*apart = codes;
	if (t && codes)
		err_refuse(e, "tensors '%s' and '%s' of '%s' are the same weight, plain and packed",
			   t->name, codes->name, r->catalogue->path);
	return codes ? codes : t;
}

/* NULL with `e` set, or where there is none; `name` is the weight's. */
static const struct entry *find_part(const struct resolver *r, const struct weight_part *p,
				     int64_t index, char name[], bool *apart, struct err *e)
{
	const struct entry *t;
	char alt[WEIGHT_NAME + 16];

	expand(name, p->name, index);
	t = find_either(r, name, apart, e);
	if (t || !p->alt[0])
		return t;
	expand(alt, p->alt, index);
	t = find_either(r, alt, apart, e);
	if (t)
		memcpy(name, alt, sizeof alt);
	return t;
}

static int64_t held(const struct weight_spec *s)
{
	return s->held ? s->held : s->count;
}

/* Codes that nothing in config.json explains may stand there. */
static int missing(const struct resolver *r, const char *name, struct err *e)
{
	static const char *const suffix[] = { ".weight_packed", ".qweight" };

	for (size_t i = 0; i < sizeof suffix / sizeof *suffix; i++) {
		const struct entry *t = beside(r, name, suffix[i]);

		if (t)
			return refuse_packed(r, t, name, e);
	}
	return err_refuse(e, "tensor '%s' is missing from '%s'", name, r->catalogue->path);
}

static int resolve_part(struct resolver *r, const struct weight_part *p, int64_t index,
			int64_t row0, struct err *e)
{
	char name[WEIGHT_NAME + 16];
	bool apart;
	const struct entry *t = find_part(r, p, r->spec->first + index, name, &apart, e);
	struct weight_source src = { .entry = t, .index = index, .row0 = row0, .rows = p->rows };
	struct layout l;

	if (e->code)
		return -1;
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
	if (check_tensor(r, t, name, apart, false, p->rows, &l, e))
		return -1;
	src.scale = l.scale;
	src.quant = l.quant;
	return r->each ? r->each(r->ctx, &src, e) : 0;
}

/* Blocks begin anew with each matrix; where gate and up have a row of the grid each, with both. */
static int give_fused(const struct resolver *r, const struct entry *t, const struct layout *l,
		      int64_t i, struct err *e)
{
	const struct weight_spec *s = r->spec;
	bool halves = l->quant && in_halves(r, l->quant, true, s->rows);
	int64_t first = s->first + i, each = halves ? s->rows / 2 : s->rows;
	struct weight_source src = { .entry = t,
				     .scale = l->scale,
				     .quant = l->quant,
				     .index = i,
				     .rows = each,
				     .from = first * s->rows };

	src.block0 = src.from;
	src.grid0 = !l->quant ? 0 : first * (halves ? 2 : grid_rows(l->quant, s->rows));
	for (; src.row0 < s->rows; src.row0 += each, src.from += each) {
		if (r->each && r->each(r->ctx, &src, e))
			return -1;
		src.block0 += halves ? each : 0;
		src.grid0 += halves;
	}
	return 0;
}

/* One block of scales that belongs to gate and to up is meant by nobody. */
static int refuse_across(const struct resolver *r, const struct entry *t, const struct layout *l,
			 struct err *e)
{
	const struct weight_spec *s = r->spec;

	if (!l->quant || s->use != USE_GATED || in_halves(r, l->quant, true, s->rows) ||
	    s->rows / 2 % l->quant->block_rows == 0)
		return 0;
	return err_refuse(e,
			  "scales '%s' of '%s': blocks of %d rows do not end where gate ends in "
			  "'%s' (%lld rows): packed experts of such sizes have to be one tensor "
			  "each",
			  l->scale->name, r->catalogue->path, l->quant->block_rows, t->name,
			  (long long)(s->rows / 2));
}

static int resolve_fused(struct resolver *r, const struct entry *t, struct err *e)
{
	const struct weight_spec *s = r->spec;
	struct layout l;

	if (check_tensor(r, t, s->fused, false, true, s->rows, &l, e) ||
	    refuse_across(r, t, &l, e))
		return -1;
	for (int64_t i = 0; i < held(s); i++)
		if (give_fused(r, t, &l, i, e))
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
		return (struct weight_storage){ quant_stored(s->quants[0]), s->quants[0] };
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
