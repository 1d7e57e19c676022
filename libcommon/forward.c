/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop. It owns what outlives a layer (carry, ids, positions of a window) and the scratch of a
 * chunk, both in device memory and as large as the plan says; models own nothing.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "forward.h"
#include "mem.h"
#include "tokens.h"

volatile sig_atomic_t forward_stop;

/* One chunk of the window: its place in the window and its rows as pieces. */
struct part {
	int64_t first, n;		/* rows */
	int64_t begin, tokens;		/* of the window */
	struct piece *piece;		/* [n] */
};

struct window {
	struct forward *f;
	void *carry[CARRY_MAX];		/* device, window_most tokens each */
	int32_t *ids, *pos;		/* device [window_most] */
	void *scratch;			/* device */
	int32_t *host;			/* [window_most], for uploads */
	struct piece *piece;		/* [rows of the window] */
	size_t piece_cap;
	struct part *part;
	size_t nparts, part_cap;
	struct capture_buffer *out;
	struct tap *tap;		/* [nids] */
	struct progress bar;
};

/* ---- memory ---------------------------------------------------------------------------------- */

static void window_release(struct window *w)
{
	struct device *d = w->f->dev;

	for (int i = 0; i < CARRY_MAX; i++)
		d->be->free(d, w->carry[i]);
	d->be->free(d, w->ids);
	d->be->free(d, w->pos);
	d->be->free(d, w->scratch);
	free(w->host);
	free(w->piece);
	free(w->part);
	free(w->tap);
}

static int window_alloc(struct window *w, struct forward *f, struct err *e)
{
	struct device *d = f->dev;
	size_t most = (size_t)f->plan->window_most;

	memset(w, 0, sizeof *w);
	w->f = f;
	for (int i = 0; i < f->target->ncarry; i++) {
		w->carry[i] = d->be->alloc(
			d, carry_bytes(&f->target->carry[i], f->plan->window_most, d->compute), e);
		if (!w->carry[i])
			return -1;
	}
	w->ids = d->be->alloc(d, most * sizeof *w->ids, e);
	w->pos = w->ids ? d->be->alloc(d, most * sizeof *w->pos, e) : NULL;
	w->scratch = w->pos ? d->be->alloc(d, f->plan->scratch_bytes, e) : NULL;
	w->host = w->scratch ? mem_calloc(most, sizeof *w->host, e) : NULL;
	w->tap = w->host ? mem_calloc((size_t)f->plan->g.nids, sizeof *w->tap, e) : NULL;
	if (!w->tap)
		return -1;
	for (int i = 0; i < f->plan->g.nids; i++)
		if (f->target->model->tap(f->target, f->plan->ids[i], &w->tap[i], e))
			return -1;
	return 0;
}

/* ---- cutting a window into chunks ------------------------------------------------------------ */

static int add_part(struct window *w, int64_t first, int64_t n, int64_t begin, struct err *e)
{
	const struct tokens *t = w->f->tokens;
	struct part *p;
	int64_t at = 0;

	if (mem_grow(&w->part, &w->part_cap, w->nparts + 1, sizeof *w->part, e))
		return -1;
	p = &w->part[w->nparts++];
	*p = (struct part){ first, n, begin, t->offset[first + n] - t->offset[first], NULL };
	for (int64_t i = 0; i < n; i++) {
		int64_t len = tokens_length(t, first + i);

		w->piece[first - w->out->first + i] = (struct piece){ at, len, 0, len, at, len };
		at += len;
	}
	return 0;
}

static int upload_rows(struct window *w, struct err *e)
{
	const struct tokens *t = w->f->tokens;
	struct device *d = w->f->dev;
	int64_t first = w->out->first, n = w->out->n,
		total = t->offset[first + n] - t->offset[first];
	struct tensor ids = { w->ids, DT_I32, total, 1, 1 }, pos = { w->pos, DT_I32, total, 1, 1 };

	if (tokens_rows(t, first, n, w->host, NULL, e))
		return -1;
	d->be->upload(d, ids, w->host);
	for (int64_t i = 0, at = 0; i < n; i++)
		for (int64_t p = 0; p < tokens_length(t, first + i); p++)
			w->host[at++] = (int32_t)p;
	d->be->upload(d, pos, w->host);
	return 0;
}

static int window_begin(struct window *w, int64_t first, int64_t n, struct err *e)
{
	const struct tokens *t = w->f->tokens;

	if (capture_take(w->f->capture, first, n, &w->out, e) ||
	    mem_grow(&w->piece, &w->piece_cap, (size_t)n, sizeof *w->piece, e))
		return -1;
	w->nparts = 0;
	for (int64_t i = 0; i < n;) {
		int64_t k = plan_fit(t, first + i, n - i, w->f->plan->chunk_tokens);

		if (add_part(w, first + i, k, t->offset[first + i] - t->offset[first], e))
			return -1;
		i += k;
	}
	for (size_t i = 0; i < w->nparts; i++)
		w->part[i].piece = w->piece + (w->part[i].first - first);
	return upload_rows(w, e);
}

/* ---- a chunk --------------------------------------------------------------------------------- */

static struct chunk open_chunk(struct window *w, const struct part *p)
{
	struct forward *f = w->f;
	struct chunk c = {
		.dev = f->dev,
		.tokens = p->tokens,
		.keys = p->tokens,
		.npieces = (int)p->n,
		.piece = p->piece,
		.ids = { w->ids + p->begin, DT_I32, p->tokens, 1, 1 },
		.pos = { w->pos + p->begin, DT_I32, p->tokens, 1, 1 },
		.scratch = { w->scratch, f->plan->scratch_bytes, 0, 0 },
	};

	for (int i = 0; i < f->target->ncarry; i++)
		c.carry[i] = carry_view(&f->target->carry[i], w->carry[i], p->begin, p->tokens,
					f->dev->compute);
	return c;
}

static void store_rows(struct window *w, const struct part *p, struct tensor x, void *base,
		       int64_t ld, int64_t col)
{
	const struct geometry *g = &w->f->plan->g;
	char *dst = (char *)base + (size_t)(p->begin * ld + col) * dtype_size(g->dtype);

	w->f->dev->be->store(w->f->dev, dst, g->dtype, ld, x);
}

static void capture_ids(struct window *w, const struct part *p, struct chunk *c,
			enum tap_phase phase, int layer)
{
	const struct geometry *g = &w->f->plan->g;

	for (int i = 0; i < g->nids; i++) {
		uint64_t mark = scratch_mark(c);

		if (w->tap[i].phase != phase ||
		    ((phase == TAP_PRE || phase == TAP_LAYER) && w->tap[i].layer != layer))
			continue;
		store_rows(w, p, w->f->target->model->captured(w->f->target, w->f->plan->ids[i], c),
			   w->out->states, g->nids * g->hidden, i * g->hidden);
		scratch_release(c, mark);
	}
	if (phase == TAP_FINAL)
		store_rows(w, p, c->result, w->out->last, g->hidden, 0);
}

static void run_embed(struct window *w, const struct part *p)
{
	struct chunk c = open_chunk(w, p);

	w->f->target->model->embed(w->f->target, &c);
	capture_ids(w, p, &c, TAP_EMBED, -1);
}

/* The layer up to the router, all its experts, and what follows. */
static void run_routed(struct target *t, int layer, const struct routing *r, struct chunk *c)
{
	struct routed *x = &c->routed;
	uint64_t mark;

	routed_room(c, r);
	mark = scratch_mark(c);
	t->model->layer(t, layer, c);
	scratch_release(c, mark);
	x->experts.first = 0;
	x->experts.count = r->experts;
	c->dev->be->experts(c->dev, x->sum, x->input, x->ids, x->weights, &x->experts, false);
	t->model->finish(t, layer, c);
}

static void run_layer(struct window *w, const struct part *p, int layer)
{
	struct target *t = w->f->target;
	struct chunk c = open_chunk(w, p);
	struct routing r;

	if (t->model->pre) {
		t->model->pre(t, layer, &c);
		capture_ids(w, p, &c, TAP_PRE, layer);
		c.scratch.used = 0;
	}
	if (t->model->routed && t->model->routed(t, layer, &r))
		run_routed(t, layer, &r, &c);
	else
		t->model->layer(t, layer, &c);
	c.scratch.used = 0;
	capture_ids(w, p, &c, TAP_LAYER, layer);
}

static void run_final(struct window *w, const struct part *p)
{
	struct chunk c = open_chunk(w, p);

	w->f->target->model->final(w->f->target, &c);
	capture_ids(w, p, &c, TAP_FINAL, -1);
}

/* ---- a window -------------------------------------------------------------------------------- */

/* After each chunk of a unit: a failed verb or a signal ends the run there. */
static int pause_point(struct window *w, struct err *e)
{
	if (w->f->dev->err.code)
		return w->f->dev->be->sync(w->f->dev, e);
	if (forward_stop)
		return err_fail(
			e,
			"stopped by a signal; published shards are safe, the same command goes on");
	return 0;
}

static int acquire(struct window *w, enum unit_kind kind, int layer, struct err *e)
{
	double start = log_seconds();
	int rc = weights_acquire(w->f->weights, kind, layer, e);

	w->f->acquiring += log_seconds() - start;
	return rc;
}

/* Rows count as done in proportion to the layers they have passed; `rows` of the window have. */
static void show_progress(struct window *w, int64_t rows)
{
	struct forward *f = w->f;

	progress_update(&w->bar, f->rows + rows, f->tokens_done,
			(int64_t)capture_bytes(f->capture));
}

static int window_layers(struct window *w, struct err *e)
{
	for (int layer = 0; layer < w->f->target->layers; layer++) {
		if (acquire(w, UNIT_LAYER, layer, e) || acquire(w, UNIT_EXPERTS, layer, e))
			return -1;
		if (w->f->began <= 0)
			w->f->began = log_seconds();
		for (size_t i = 0; i < w->nparts; i++) {
			run_layer(w, &w->part[i], layer);
			if (pause_point(w, e))
				return -1;
		}
		show_progress(w, w->out->n * (layer + 1) / (w->f->target->layers + 1));
	}
	return 0;
}

static int run_window(struct window *w, int64_t first, int64_t n, struct err *e)
{
	struct forward *f = w->f;

	if (window_begin(w, first, n, e) || acquire(w, UNIT_ALWAYS, -1, e) ||
	    acquire(w, UNIT_EMBED, -1, e))
		return -1;
	for (size_t i = 0; i < w->nparts; i++)
		run_embed(w, &w->part[i]);
	if (pause_point(w, e) || window_layers(w, e) || acquire(w, UNIT_FINAL, -1, e))
		return -1;
	for (size_t i = 0; i < w->nparts; i++)
		run_final(w, &w->part[i]);
	if (f->dev->be->sync(f->dev, e))
		return -1;
	capture_give(f->capture, w->out);
	f->rows += n;
	f->tokens_done += f->tokens->offset[first + n] - f->tokens->offset[first];
	f->windows++;
	show_progress(w, 0);
	return 0;
}

/*
 * Cuts published shards out of a window: calls run_window for each run of rows that is still to do.
 */
static int run_todo(struct window *w, int64_t first, int64_t n, const bool *done, struct err *e)
{
	int64_t size = w->f->plan->g.shard_size, end = first + n;

	while (first < end) {
		int64_t stop = first;

		while (stop < end && !done[stop / size])
			stop = (stop / size + 1) * size < end ? (stop / size + 1) * size : end;
		if (stop > first && run_window(w, first, stop - first, e))
			return -1;
		first = stop;
		while (first < end && done[first / size])
			first = (first / size + 1) * size;
	}
	return 0;
}

static int64_t rows_to_do(const struct forward *f, const bool *done)
{
	const struct plan_range *r = f->range;
	int64_t rows = 0;

	for (int i = 0; i < r->nintervals; i++)
		for (int64_t s = r->shards[i][0]; s < r->shards[i][1]; s++)
			rows += done[s] ? 0 : geometry_shard_rows(&f->plan->g, s);
	return rows;
}

int forward_run(struct forward *f, const bool *done, struct err *e)
{
	double start = log_seconds();
	struct plan_cursor cursor;
	struct window w;
	int64_t first, n;
	int rc = -1;

	if (window_alloc(&w, f, e))
		goto out;
	progress_begin(&w.bar, f->progress, "rows", rows_to_do(f, done));
	plan_windows(&cursor, f->plan, f->range, f->tokens);
	for (rc = 0; !rc && plan_next_window(&cursor, &first, &n);)
		rc = run_todo(&w, first, n, done, e);
	progress_end(&w.bar);
out:
	if (f->dev->be->sync(f->dev, e))
		rc = -1;
	window_release(&w);
	f->seconds = log_seconds() - start;
	return rc;
}
