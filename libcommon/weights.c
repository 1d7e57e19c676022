/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Binding and filling. After weights_open no name is looked up again: every bound weight knows its
 * sources as stage entries.
 *
 * A unit is filled in slices of rows that stay in a core's cache between reading and converting.
 * All threads share the slices of all its weights, so that a model of small weights too is read,
 * widened and packed by every core; what the next layer needs is asked of the disk meanwhile.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "log.h"
#include "mem.h"
#include "weights.h"

#define SLICE_BYTES (1u << 20)
/*
 * Of a copy: a tensor read whole is held against its hash, and the first and last LZ4 block of a
 * slice may be unpacked twice.
 */
#define SLICE_COPY (8u << 20)
#define FILL_THREADS_MAX 64
#define AHEAD_BYTES (256u << 20)

struct bound {
	struct weight *field;
	enum unit_kind unit;
	int layer;
	const void *data;		/* known without reading, of field->stored */
	struct weight_source *source;
	size_t nsources, cap;
	bool present;
};

struct binder {
	struct weight_walk walk;
	struct weights *w;
};

/* ---- binding --------------------------------------------------------------------------------- */

static int add_source(void *ctx, const struct weight_source *src, struct err *e)
{
	struct bound *b = ctx;

	if (mem_grow(&b->source, &b->cap, b->nsources + 1, sizeof *b->source, e))
		return -1;
	b->source[b->nsources++] = *src;
	return 0;
}

static int bind(struct weight_walk *walk, const struct weight_spec *s, struct err *e)
{
	struct weights *w = ((struct binder *)walk)->w;
	struct weight_storage storage;
	struct bound *b;

	if (mem_grow(&w->bound, &w->cap, w->n + 1, sizeof *w->bound, e))
		return -1;
	b = &w->bound[w->n++];
	memset(b, 0, sizeof *b);
	b->field = s->field;
	b->unit = s->unit;
	b->layer = s->layer;
	b->data = s->data;
	memset(s->field, 0, sizeof *s->field);
	s->field->count = s->count;
	s->field->rows = s->rows;
	s->field->cols = s->cols;
	s->field->use = s->use;
	s->field->unit = s->kind;
	if (weight_resolve(s, &w->stage->catalogue, &storage, add_source, b, e))
		return -1;
	s->field->stored = storage.stored;
	s->field->quant = storage.quant;
	if (storage.stored == DT_NONE)
		s->field->count = 0;
	return 0;
}

int weights_open(struct weights *w, struct target *t, struct stage *s, struct device *d,
		 struct err *e)
{
	struct binder b = { { bind }, w };

	memset(w, 0, sizeof *w);
	w->target = t;
	w->stage = s;
	w->dev = d;
	if (t->model->weights(t, &b.walk, e)) {
		weights_release(w);
		return -1;
	}
	return 0;
}

void weights_release(struct weights *w)
{
	for (size_t i = 0; i < w->n; i++) {
		if (w->bound[i].present)
			w->dev->be->weight_free(w->dev, w->bound[i].field);
		free(w->bound[i].source);
	}
	free(w->bound);
	memset(w, 0, sizeof *w);
}

/* ---- filling --------------------------------------------------------------------------------- */

/* The slices of a unit's weights, handed out to threads one after another. */
struct filler {
	struct weights *w;
	struct bound **todo;		/* [n] */
	size_t n;
	pthread_mutex_t lock;
	size_t at, source;		/* the next slice: weight, source and its first row */
	size_t step;			/* sources after `source`, of those that go in step */
	int64_t row;
	uint64_t read;
	struct err err;
};

struct slice {
	const struct bound *b;
	const struct weight_source *src;
	int64_t row0, rows;		/* within the source */
};

static int64_t slice_rows(const struct weights *w, const struct weight_source *src, int64_t cols)
{
	int64_t row = cols * (int64_t)dtype_size(src->entry->dtype);
	int64_t n = (w->stage->form == STAGE_REFERENCE ? SLICE_BYTES : SLICE_COPY) / row;

	return n < 1 ? 1 : n;
}

/*
 * Sources that are read in step from `source` on: rows of gate and of up share panels, and a panel
 * takes memory until it has all its rows.
 */
static size_t in_step(const struct bound *b, size_t source)
{
	const struct weight_source *gate = &b->source[source], *up = gate + 1;

	if (b->field->use != USE_GATED || source + 1 == b->nsources)
		return 1;
	return gate->index == up->index && gate->rows == up->rows &&
			       gate->entry->dtype == up->entry->dtype
		       ? 2
		       : 1;
}

static void take_slice(struct filler *f, struct slice *out)
{
	const struct bound *b = f->todo[f->at];
	const struct weight_source *src = &b->source[f->source + f->step];
	int64_t n = slice_rows(f->w, src, b->field->cols), left = src->rows - f->row;
	size_t together = in_step(b, f->source);

	*out = (struct slice){ b, src, f->row, n < left ? n : left };
	if (++f->step < together)
		return;
	f->step = 0;
	f->row += out->rows;
	if (f->row < src->rows)
		return;
	f->row = 0;
	f->source += together;
	if (f->source < b->nsources)
		return;
	f->source = 0;
	f->at++;
}

static bool next_slice(struct filler *f, struct slice *out)
{
	bool more;

	pthread_mutex_lock(&f->lock);
	more = !f->err.code && f->at < f->n;
	if (more)
		take_slice(f, out);
	pthread_mutex_unlock(&f->lock);
	return more;
}

static int fill_slice(struct filler *f, const struct slice *s, void *buf, struct err *e)
{
	struct weights *w = f->w;
	const struct entry *t = s->src->entry;
	uint64_t row = (uint64_t)s->b->field->cols * dtype_size(t->dtype);
	uint64_t off = (uint64_t)(s->src->from + s->row0 - t->row0) * row;

	if (stage_read(w->stage, t, buf, off, (uint64_t)s->rows * row, e))
		return -1;
	return w->dev->be->weight_fill(w->dev, s->b->field, s->src->index, s->src->row0 + s->row0,
				       s->rows, buf, t->dtype, NULL, e);
}

static void *fill_thread(void *arg)
{
	struct filler *f = arg;
	struct err e = ERR_INIT;
	struct slice s;
	void *buf = NULL;
	size_t cap = 0;
	uint64_t read = 0;

	while (!e.code && next_slice(f, &s)) {
		size_t bytes =
			(size_t)(s.rows * s.b->field->cols) * dtype_size(s.src->entry->dtype);

		if (bytes > cap) {
			free(buf);
			buf = mem_aligned(bytes, &e);
			cap = buf ? bytes : 0;
		}
		if (buf && !fill_slice(f, &s, buf, &e))
			read += bytes;
	}
	free(buf);
	pthread_mutex_lock(&f->lock);
	f->read += read;
	if (e.code && !f->err.code)
		f->err = e;
	pthread_mutex_unlock(&f->lock);
	return NULL;
}

static uint64_t stored_bytes(const struct bound *b)
{
	uint64_t n = 0;

	for (size_t i = 0; i < b->nsources; i++)
		n += (uint64_t)(b->source[i].rows * b->field->cols) *
		     dtype_size(b->source[i].entry->dtype);
	return n;
}

/* This thread is the last of them; fewer than wanted are slower, not wrong. */
static int fill(struct filler *f, struct err *e)
{
	pthread_t thread[FILL_THREADS_MAX];
	int want = f->w->dev->threads, n = 0;
	uint64_t bytes = 0;

	for (size_t i = 0; i < f->n; i++)
		bytes += stored_bytes(f->todo[i]);
	if (want > FILL_THREADS_MAX)
		want = FILL_THREADS_MAX;
	for (; n < want - 1 && (uint64_t)n < bytes / SLICE_BYTES; n++)
		if (pthread_create(&thread[n], NULL, fill_thread, f))
			break;
	fill_thread(f);
	while (n > 0)
		pthread_join(thread[--n], NULL);
	f->w->read += f->read;
	if (f->err.code && !e->code)
		*e = f->err;
	return f->err.code ? -1 : 0;
}

/* Room for a weight; true where it is to be filled from the stage. */
static bool begin(struct weights *w, struct bound *b, struct err *e)
{
	const struct backend *be = w->dev->be;

	if (be->weight_alloc(w->dev, b->field, e))
		return false;
	b->present = true;
	if (b->data)
		be->weight_fill(w->dev, b->field, 0, 0, b->field->rows, b->data, b->field->stored,
				NULL, e);
	return !b->data;
}

static bool belongs(const struct bound *b, enum unit_kind kind, int layer)
{
	return b->unit == kind && b->layer == layer && !b->present && b->field->count;
}

static int load(struct weights *w, enum unit_kind kind, int layer, struct err *e)
{
	struct filler f = { .w = w, .lock = PTHREAD_MUTEX_INITIALIZER };
	struct bound **all = mem_calloc(w->n, 2 * sizeof *all, e);
	size_t n = 0;
	int rc = -1;

	f.todo = all ? all + w->n : NULL;
	for (size_t i = 0; all && i < w->n; i++)
		if (belongs(&w->bound[i], kind, layer))
			all[n++] = &w->bound[i];
	for (size_t i = 0; i < n && !e->code; i++)
		if (begin(w, all[i], e) && all[i]->nsources)
			f.todo[f.n++] = all[i];
	if (!all || e->code || fill(&f, e))
		goto out;
	for (size_t i = 0; i < n; i++) {
		if (w->dev->be->weight_ready(w->dev, all[i]->field, e))
			goto out;
		w->bytes += weight_bytes(all[i]->field, w->dev->compute);
	}
	rc = 0;
out:
	free(all);
	return rc;
}

/* What the next layer needs starts on its way from the disk, as far as that is worth its memory. */
static void ask_ahead(struct weights *w, int layer)
{
	uint64_t left = AHEAD_BYTES;

	for (size_t i = 0; i < w->n && left; i++) {
		const struct bound *b = &w->bound[i];

		for (size_t k = 0; b->layer == layer && !b->present && k < b->nsources; k++) {
			const struct weight_source *src = &b->source[k];
			uint64_t row = (uint64_t)b->field->cols * dtype_size(src->entry->dtype);
			uint64_t n = (uint64_t)src->rows * row;

			n = n < left ? n : left;
			stage_ahead(w->stage, src->entry,
				    (uint64_t)(src->from - src->entry->row0) * row, n);
			left -= n;
		}
	}
}

int weights_acquire(struct weights *w, enum unit_kind kind, int layer, struct err *e)
{
	double start = log_seconds();
	int rc = 0;

	for (size_t i = 0; i < w->n; i++)
		if (belongs(&w->bound[i], kind, layer)) {
			rc = load(w, kind, layer, e);
			ask_ahead(w, layer + 1);
			break;
		}
	w->seconds += log_seconds() - start;
	return rc;
}

/* ---- target weights -------------------------------------------------------------------------- */

static struct bound *find_table(struct weights *w, enum unit_kind kind)
{
	for (size_t i = 0; i < w->n; i++)
		if (w->bound[i].unit == kind)
			return &w->bound[i];
	return NULL;
}

int weights_rows(struct weights *w, enum unit_kind kind, int64_t row0, int64_t n, float *out,
		 struct err *e)
{
	struct bound *b = find_table(w, kind);
	const struct weight_source *src = b && b->nsources == 1 ? b->source : NULL;
	int64_t cols = b ? b->field->cols : 0;
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
	if (!rc && w->dev->compute == DT_BF16 && b->field->unit == WEIGHT_BULK &&
	    src->entry->dtype != DT_BF16)
		for (size_t i = 0; i < count; i++)
			out[i] = dtype_bf16_to_f32(dtype_f32_to_bf16(out[i]));
	return rc;
}
