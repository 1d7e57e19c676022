/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Binding, and which unit is where. After weights_open no name is looked up again: every bound
 * weight knows its sources as stage entries.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "err.h"
#include "loader.h"
#include "log.h"
#include "mem.h"
#include "weights.h"

/* Rows of a table that are read at once. */
#define TABLE_BYTES (1u << 20)

/* ---- binding --------------------------------------------------------------------------------- */

static bool is_table(const struct bound *b)
{
	return b->shard == SHARD_TABLE && !b->data;
}

static int add_source(void *ctx, const struct weight_source *src, struct err *e)
{
	struct bound *b = ctx;

	if (mem_grow(&b->source, &b->cap, b->nsources + 1, sizeof *b->source, e))
		return -1;
	b->source[b->nsources++] = *src;
	return 0;
}

static struct unit *find_unit(const struct weights *w, enum unit_kind kind, int layer)
{
	for (size_t i = 0; i < w->nunits; i++)
		if (w->unit[i].kind == kind && w->unit[i].layer == layer)
			return &w->unit[i];
	return NULL;
}

static int join_unit(struct weights *w, struct bound *b, struct err *e)
{
	struct unit *u = find_unit(w, b->unit, b->layer);

	if (!u) {
		if (mem_grow(&w->unit, &w->cap_units, w->nunits + 1, sizeof *w->unit, e))
			return -1;
		u = &w->unit[w->nunits++];
		*u = (struct unit){ .kind = b->unit, .layer = b->layer, .members = 1 };
	}
	if (mem_grow(&u->bound, &u->cap, u->n + 1, sizeof *u->bound, e))
		return -1;
	u->bound[u->n++] = b;
	if (b->members == 1)
		return 0;
	if (u->members > 1 && u->members != b->members)
		return err_fail(e, "a unit mixes weights cut over %d and %d ranks", u->members,
				b->members);
	u->members = b->members;
	u->group = b->shard == SHARD_EXPERT ? w->o.experts : w->o.rows;
	return 0;
}

static int read_rows(void *ctx, const int32_t *ids, int64_t n, void *dst, struct err *e);

static void describe(struct bound *b, const struct weight_spec *s, const struct weights *w)
{
	*s->field = (struct weight){
		.count = b->count, .rows = s->rows, .cols = s->cols, .use = s->use, .unit = s->kind
	};
	if (is_table(b) && w->o.residency != WEIGHTS_RESIDENT) {
		b->reader = (struct table_reader){ read_rows, b };
		s->field->reader = &b->reader;
	}
}

struct binder {
	struct weight_walk walk;
	struct weights *w;
};

static int bind(struct weight_walk *walk, const struct weight_spec *spec, struct err *e)
{
	struct weights *w = ((struct binder *)walk)->w;
	struct weight_spec s = *spec;
	struct weight_storage storage;
	struct bound *b;

	if (mem_grow(&w->bound, &w->cap, w->n + 1, sizeof *w->bound, e) ||
	    !(b = w->bound[w->n] = mem_calloc(1, sizeof *b, e)))
		return -1;
	w->n++;
	if (s.shard == SHARD_EXPERT && w->o.mesh.ep > 1) {
		s.held = s.count / w->o.mesh.ep;
		s.first = w->o.rank % w->o.mesh.ep * s.held;
	}
	*b = (struct bound){ .weights = w,
			     .field = s.field,
			     .unit = s.unit,
			     .layer = s.layer,
			     .shard = s.shard,
			     .count = s.held ? s.held : s.count,
			     .data = s.data,
			     .members = s.data || s.unit == UNIT_EXPORT
						? 1
						: stage_members(&w->o.mesh, s.shard) };
	describe(b, &s, w);
	if (weight_resolve(&s, &w->stage->catalogue, &storage, add_source, b, e))
		return -1;
	s.field->stored = storage.stored;
	s.field->quant = storage.quant;
	if (storage.stored == DT_NONE)
		b->count = s.field->count = 0;
	b->shape = *s.field;
	return s.unit == UNIT_EXPORT || s.field->reader || !b->count ? 0 : join_unit(w, b, e);
}

/* ALWAYS, the final norm and what is not a table of EMBED are needed by every window, and small. */
bool weights_unit_stays(enum unit_kind kind, enum residency r, bool keep, int members)
{
	bool large = kind == UNIT_LAYER || kind == UNIT_EXPERTS;

	return !large || r == WEIGHTS_RESIDENT || (r == WEIGHTS_GATHER && (keep || members == 1));
}

int weights_open(struct weights *w, struct target *t, struct stage *s, struct device *d,
		 const struct weights_options *o, struct err *e)
{
	struct binder b = { { bind }, w };

	*w = (struct weights){ .target = t, .stage = s, .dev = d, .o = *o };
	if (t->model->weights(t, &b.walk, e) || loader_open(&w->loader, w, e)) {
		weights_release(w);
		return -1;
	}
	for (size_t i = 0; i < w->nunits; i++) {
		struct unit *u = &w->unit[i];

		u->stays = weights_unit_stays(u->kind, o->residency, o->keep, u->members);
	}
	return 0;
}

static void drop(struct weights *w, struct unit *u)
{
	for (size_t i = 0; i < u->n && u->present; i++) {
		w->bytes -= weight_bytes(u->bound[i]->field, w->dev->compute);
		w->dev->be->weight_free(w->dev, u->bound[i]->field);
	}
	u->present = false;
}

void weights_release(struct weights *w)
{
	loader_free(w->loader);
	for (size_t i = 0; i < w->nunits; i++) {
		drop(w, &w->unit[i]);
		free(w->unit[i].bound);
	}
	for (size_t i = 0; i < w->n; i++) {
		free(w->bound[i]->source);
		free(w->bound[i]);
	}
	free(w->unit);
	free(w->bound);
	memset(w, 0, sizeof *w);
}

/* ---- units ----------------------------------------------------------------------------------- */

bool weights_stay(const struct weights *w, enum unit_kind kind, int layer)
{
	const struct unit *u = find_unit(w, kind, layer);

	return !u || u->stays;
}

int weights_want(struct weights *w, enum unit_kind kind, int layer, const struct expert_block *b,
		 struct err *e)
{
	struct unit *u = find_unit(w, kind, layer);
	struct load *load;

	return u && !(u->stays && u->present) ? loader_want(w->loader, u, b, &load, e) : 0;
}

int weights_acquire(struct weights *w, enum unit_kind kind, int layer,
		    const struct expert_block *b, struct err *e)
{
	struct unit *u = find_unit(w, kind, layer);
	double start = log_seconds();
	struct load *load;
	int rc = -1;

	if (!u || u->present)
		return 0;
	if (!loader_want(w->loader, u, b, &load, e) && !loader_take(w->loader, load, e)) {
		u->present = true;
		for (size_t i = 0; i < u->n; i++)
			w->bytes += weight_bytes(u->bound[i]->field, w->dev->compute);
		w->most = w->bytes > w->most ? w->bytes : w->most;
		rc = 0;
	}
	w->seconds += log_seconds() - start;
	return rc;
}

void weights_done(struct weights *w, enum unit_kind kind, int layer)
{
	struct unit *u = find_unit(w, kind, layer);

	if (u && !u->stays)
		drop(w, u);
}

int weights_poll(struct weights *w, struct err *e)
{
	return loader_poll(w->loader, e);
}

void weights_times(const struct weights *w, double *making, double *gathering)
{
	loader_times(w->loader, making, gathering);
}

uint64_t weights_read(const struct weights *w)
{
	return w->loader ? loader_read(w->loader) : 0;
}

/* ---- tables ---------------------------------------------------------------------------------- */

struct wanted {
	int32_t id;
	int64_t at; /* place in the caller's rows */
};

static int by_id(const void *a, const void *b)
{
	const struct wanted *x = a, *y = b;

	return (x->id > y->id) - (x->id < y->id);
}

/* Where the ids that one reading serves end: neighbours, or in LZ4 blocks what lies in one. */
static int64_t run_end(const struct bound *b, const struct wanted *x, int64_t i, int64_t n,
		       uint64_t row)
{
	int64_t most = (int64_t)(TABLE_BYTES / row), gap = 1, end = i + 1;

	if (b->weights->stage->form == STAGE_LZ4)
		gap = most;
	while (end < n && x[end].id - x[end - 1].id <= gap && x[end].id - x[i].id < most)
		end++;
	return end;
}

static int read_run(struct bound *b, const struct wanted *x, int64_t n, char *buf, char *dst,
		    uint64_t row, struct err *e)
{
	const struct weight_source *src = b->source;
	int64_t first = x[0].id, rows = x[n - 1].id - first + 1;

	if (stage_read(b->weights->stage, src->entry, buf,
		       (uint64_t)(src->from + first - src->entry->row0) * row,
		       (uint64_t)rows * row, e))
		return -1;
	for (int64_t i = 0; i < n; i++)
		memcpy(dst + (uint64_t)x[i].at * row, buf + (uint64_t)(x[i].id - first) * row, row);
	return 0;
}

/* The reader of a table that is not resident: rows in ascending order, each once where it lies. */
static int read_rows(void *ctx, const int32_t *ids, int64_t n, void *dst, struct err *e)
{
	struct bound *b = ctx;
	uint64_t row = (uint64_t)b->shape.cols * dtype_size(b->shape.stored);
	struct wanted *x = mem_calloc((size_t)n, sizeof *x, e);
	char *buf = mem_aligned(TABLE_BYTES > row ? TABLE_BYTES : row, e);
	int rc = x && buf ? 0 : -1;

	if (!rc && b->nsources != 1)
		rc = err_refuse(e, "a table that is read by row must be one tensor");
	for (int64_t i = 0; !rc && i < n; i++)
		x[i] = (struct wanted){ ids[i], i };
	if (!rc)
		qsort(x, (size_t)n, sizeof *x, by_id);
	for (int64_t i = 0, end; !rc && i < n; i = end) {
		end = run_end(b, x, i, n, row);
		rc = read_run(b, x + i, end - i, buf, dst, row, e);
	}
	free(x);
	free(buf);
	return rc;
}

/* ---- target weights -------------------------------------------------------------------------- */

static struct bound *find_table(struct weights *w, enum unit_kind kind)
{
	for (size_t i = 0; i < w->n; i++)
		if (w->bound[i]->unit == kind)
			return w->bound[i];
	return NULL;
}

int weights_rows(struct weights *w, enum unit_kind kind, int64_t row0, int64_t n, float *out,
		 struct err *e)
{
	struct bound *b = find_table(w, kind);
	const struct weight_source *src = b && b->nsources == 1 ? b->source : NULL;
	int64_t cols = b ? b->shape.cols : 0;
	size_t count = (size_t)(n * cols), size = src ? dtype_size(src->entry->dtype) : 0;
	void *raw;
	int rc;

	if (!src)
		return err_refuse(e,
				  "the target's %s is not one tensor, as target_weights needs it",
				  kind == UNIT_EXPORT ? "output head" : "embedding");
	raw = mem_aligned(count * size, e);
	if (!raw)
		return -1;
	rc = stage_read(w->stage, src->entry, raw,
			(uint64_t)((src->from + row0 - src->entry->row0) * cols) * size,
			count * size, e);
	if (!rc)
		dtype_convert(out, DT_F32, raw, src->entry->dtype, count);
	free(raw);
	if (!rc && w->dev->compute == DT_BF16 && b->shape.unit == WEIGHT_BULK &&
	    src->entry->dtype != DT_BF16)
		for (size_t i = 0; i < count; i++)
			out[i] = dtype_bf16_to_f32(dtype_f32_to_bf16(out[i]));
	return rc;
}
