/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Binding and filling. After weights_open no name is looked up again: every bound weight knows its
 * sources as stage entries.
 *
 * A weight is filled in slices of about 8 MiB of rows. A few threads share the slices of a weight:
 * reading (page cache or disk) and converting take turns on one core each, and a whole model is
 * read at the speed of the machine, not of one core.
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

#define SLICE_BYTES (8u << 20)
#define FILL_THREADS_MAX 8

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

/* The slices of one weight, handed out to threads one after another. */
struct filler {
	struct weights *w;
	struct bound *b;
	pthread_mutex_t lock;
	size_t source;			/* the next slice: source and its first row */
	int64_t row;
	uint64_t read;
	struct err err;
};

struct slice {
	const struct weight_source *src;
	int64_t row0, rows;		/* within the source */
};

static int64_t slice_rows(const struct weight_source *src, int64_t cols)
{
	int64_t row = cols * (int64_t)dtype_size(src->entry->dtype), n = SLICE_BYTES / row;

	return n < 1 ? 1 : n;
}

static bool next_slice(struct filler *f, struct slice *out)
{
	bool more = false;

	pthread_mutex_lock(&f->lock);
	if (!f->err.code && f->source < f->b->nsources) {
		out->src = &f->b->source[f->source];
		out->row0 = f->row;
		out->rows = slice_rows(out->src, f->b->field->cols);
		if (out->rows > out->src->rows - f->row)
			out->rows = out->src->rows - f->row;
		f->row += out->rows;
		if (f->row >= out->src->rows) {
			f->source++;
			f->row = 0;
		}
		more = true;
	}
	pthread_mutex_unlock(&f->lock);
	return more;
}

static int fill_slice(struct filler *f, const struct slice *s, void *buf, struct err *e)
{
	struct weights *w = f->w;
	const struct entry *t = s->src->entry;
	uint64_t row = (uint64_t)f->b->field->cols * dtype_size(t->dtype);
	uint64_t off = (uint64_t)(s->src->from + s->row0 - t->row0) * row;

	if (stage_read(w->stage, t, buf, off, (uint64_t)s->rows * row, e))
		return -1;
	return w->dev->be->weight_fill(w->dev, f->b->field, s->src->index, s->src->row0 + s->row0,
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
			(size_t)(s.rows * f->b->field->cols) * dtype_size(s.src->entry->dtype);

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

static int fill(struct weights *w, struct bound *b, struct err *e)
{
	struct filler f = { .w = w, .b = b, .lock = PTHREAD_MUTEX_INITIALIZER };
	pthread_t thread[FILL_THREADS_MAX];
	int want = w->dev->threads, n = 0;
	uint64_t slices = stored_bytes(b) / SLICE_BYTES;

	if (b->data)
		return w->dev->be->weight_fill(w->dev, b->field, 0, 0, b->field->rows, b->data,
					       b->field->stored, NULL, e);
	if (want > FILL_THREADS_MAX)
		want = FILL_THREADS_MAX;
	/* this thread is the last of them; fewer are slower, not wrong */
	for (; n < want - 1 && (uint64_t)n < slices; n++)
		if (pthread_create(&thread[n], NULL, fill_thread, &f))
			break;
	fill_thread(&f);
	while (n > 0)
		pthread_join(thread[--n], NULL);
	w->read += f.read;
	if (f.err.code && !e->code)
		*e = f.err;
	return f.err.code ? -1 : 0;
}

static int load(struct weights *w, struct bound *b, struct err *e)
{
	const struct backend *be = w->dev->be;

	if (!b->field->count)
		return 0;
	if (be->weight_alloc(w->dev, b->field, e))
		return -1;
	b->present = true;
	if (fill(w, b, e) || be->weight_ready(w->dev, b->field, e))
		return -1;
	w->bytes += weight_bytes(b->field, w->dev->compute);
	return 0;
}

int weights_acquire(struct weights *w, enum unit_kind kind, int layer, struct err *e)
{
	double start = log_seconds();
	int rc = 0;

	for (size_t i = 0; i < w->n && !rc; i++) {
		struct bound *b = &w->bound[i];

		if (b->unit == kind && b->layer == layer && !b->present)
			rc = load(w, b, e);
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
