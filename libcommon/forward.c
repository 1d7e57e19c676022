/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop. It owns what outlives a layer (carry, ids, positions of a window) and the scratch of a
 * chunk, both in device memory and as large as the plan says; models own nothing.
 *
 * Where ranks depend on each other all run the same windows, units and blocks, with empty chunks
 * where they have no rows. Routed experts that do not stay in memory split a layer in three: all
 * chunks up to the router, then the experts that somebody chose, block by block over all chunks,
 * then the rest of the layer.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "err.h"
#include "exchange.h"
#include "forward.h"
#include "mem.h"
#include "spill.h"
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
	/*
	 * of layers that are split, device, window_most tokens: input, ids, weights and sum of
	 * their experts
	 */
	void *routed[4];
	struct experts experts;		/* of the layer under way */
	bool *chosen;			/* [experts of this rank] by some token of the window */
	int64_t *votes;			/* [experts] */
	struct exchange exchange;
	int32_t *ids, *pos;		/* device [window_most] */
	void *scratch;			/* device */
	int32_t *host;			/* [host_ids], for ids up and down */
	struct piece *piece;		/* [rows of the window] */
	size_t piece_cap;
	struct part *part;
	size_t nparts, part_cap;
	struct capture_buffer *out;
	struct tap *tap;		/* [nids] */
	bool next;			/* another window follows, on some rank */
	struct progress bar;
};

/* ---- memory ---------------------------------------------------------------------------------- */

static int wait_for_device(const struct window *w, struct err *e)
{
	struct device *d = w->f->dev;
	double start = log_seconds();
	int rc = d->be->sync(d, e);

	w->f->waiting += log_seconds() - start;
	return rc;
}

/* What a window holds lies in device memory, or where the plan says. */
static void *room(const struct forward *f, size_t bytes, struct err *e)
{
	return f->plan->spill ? spill_map(bytes, e) : f->dev->be->alloc(f->dev, bytes, e);
}

static void give_room(const struct forward *f, void *p, size_t bytes)
{
	if (f->plan->spill)
		spill_unmap(p, bytes);
	else
		f->dev->be->free(f->dev, p);
}

static size_t carry_room(const struct forward *f, int i)
{
	return carry_bytes(&f->target->carry[i], f->plan->window_most, f->dev->compute);
}

static void window_release(struct window *w)
{
	struct device *d = w->f->dev;
	size_t bytes[4];
	struct routing r;

	for (int i = 0; i < w->f->target->ncarry; i++)
		give_room(w->f, w->carry[i], carry_room(w->f, i));
	routing_most(w->f->target, &r);
	routed_bytes(bytes, &r, w->f->plan->window_most, d->compute);
	for (int i = 0; i < 4; i++)
		give_room(w->f, w->routed[i], bytes[i]);
	exchange_release(&w->exchange);
	d->be->free(d, w->ids);
	d->be->free(d, w->pos);
	d->be->free(d, w->scratch);
	free(w->host);
	free(w->piece);
	free(w->part);
	free(w->tap);
	free(w->chosen);
	free(w->votes);
}

static bool routes(const struct forward *f, int layer, struct routing *r)
{
	return f->target->model->routed && f->target->model->routed(f->target, layer, r);
}

static bool is_split(const struct forward *f, int layer)
{
	struct routing r;

	return routes(f, layer, &r) && !weights_stay(f->weights, UNIT_EXPERTS, layer);
}

/* Room for the routed tensors of a window, and for what travels. */
static int alloc_routed(struct window *w, struct err *e)
{
	struct forward *f = w->f;
	struct device *d = f->dev;
	struct routing r;
	bool split = false;
	size_t bytes[4];

	if (!routing_most(f->target, &r))
		return 0;
	for (int i = 0; i < f->target->layers; i++)
		split = split || is_split(f, i);
	routed_bytes(bytes, &r, f->plan->window_most, d->compute);
	for (int i = 0; split && i < 4; i++)
		if (!(w->routed[i] = room(f, bytes[i], e)))
			return -1;
	w->chosen = mem_calloc((size_t)r.experts, sizeof *w->chosen, e);
	w->votes = mem_calloc((size_t)r.experts, sizeof *w->votes, e);
	if (!w->chosen || !w->votes)
		return -1;
	return f->ep ? exchange_open(&w->exchange, d, f->ep, &r, f->plan->exchange_rows, e) : 0;
}

/* A window's, or what one token chose. */
static int64_t host_ids(const struct forward *f)
{
	struct routing r;

	routing_most(f->target, &r);
	return f->plan->window_most > r.k ? f->plan->window_most : r.k;
}

static int window_alloc(struct window *w, struct forward *f, struct err *e)
{
	struct device *d = f->dev;
	size_t most = (size_t)f->plan->window_most;

	memset(w, 0, sizeof *w);
	w->f = f;
	for (int i = 0; i < f->target->ncarry; i++) {
		w->carry[i] = room(f, carry_room(f, i), e);
		if (!w->carry[i])
			return -1;
	}
	w->ids = d->be->alloc(d, most * sizeof *w->ids, e);
	w->pos = w->ids ? d->be->alloc(d, most * sizeof *w->pos, e) : NULL;
	w->scratch = w->pos ? d->be->alloc(d, f->plan->scratch_bytes, e) : NULL;
	w->host = w->scratch ? mem_calloc((size_t)host_ids(f), sizeof *w->host, e) : NULL;
	w->tap = w->host ? mem_calloc((size_t)f->plan->g.nids, sizeof *w->tap, e) : NULL;
	if (!w->tap || alloc_routed(w, e))
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

/* Chunks without tokens up to `parts` of them: other ranks have that many. */
static int add_empty(struct window *w, int64_t parts, struct err *e)
{
	while ((int64_t)w->nparts < parts) {
		if (mem_grow(&w->part, &w->part_cap, w->nparts + 1, sizeof *w->part, e))
			return -1;
		w->part[w->nparts++] = (struct part){ 0 };
	}
	return 0;
}

static int64_t count_parts(const struct forward *f, int64_t first, int64_t n)
{
	int64_t parts = 0;

	for (int64_t i = 0; i < n; parts++)
		i += plan_fit(f->tokens, first + i, n - i, f->plan->chunk_tokens);
	return parts;
}

static int window_begin(struct window *w, int64_t first, int64_t n, int64_t parts, struct err *e)
{
	const struct tokens *t = w->f->tokens;

	w->nparts = 0;
	if (!n)
		return add_empty(w, parts, e);
	if (capture_take(w->f->capture, first, n, &w->out, e) ||
	    mem_grow(&w->piece, &w->piece_cap, (size_t)n, sizeof *w->piece, e))
		return -1;
	for (int64_t i = 0; i < n;) {
		int64_t k = plan_fit(t, first + i, n - i, w->f->plan->chunk_tokens);

		if (add_part(w, first + i, k, t->offset[first + i] - t->offset[first], e))
			return -1;
		i += k;
	}
	for (size_t i = 0; i < w->nparts; i++)
		w->part[i].piece = w->piece + (w->part[i].first - first);
	return upload_rows(w, e) || add_empty(w, parts, e) ? -1 : 0;
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

/* Up to and with the router, or the whole of a dense layer; `c` has its routed tensors. */
static void run_front(struct window *w, const struct part *p, int layer, struct chunk *c)
{
	struct target *t = w->f->target;
	uint64_t mark = scratch_mark(c);

	if (t->model->pre) {
		t->model->pre(t, layer, c);
		if (p->tokens)
			capture_ids(w, p, c, TAP_PRE, layer);
		scratch_release(c, mark);
	}
	t->model->layer(t, layer, c);
	scratch_release(c, mark);
}

/* The experts' part of a chunk: those of this rank, or of all with what travels. */
static int run_experts(struct window *w, struct chunk *c, const struct routing *r,
		       const struct expert_block *b, bool add, struct err *e)
{
	struct routed *x = &c->routed;

	if (w->f->ep)
		return exchange_experts(&w->exchange, c, r, e);
	x->experts.first = b ? b->first : 0;
	x->experts.count = b ? b->n : r->experts;
	c->dev->be->experts(c->dev, x->sum, x->input, x->ids, x->weights, &x->experts, add);
	return 0;
}

static int run_layer(struct window *w, const struct part *p, int layer, struct err *e)
{
	struct target *t = w->f->target;
	struct chunk c = open_chunk(w, p);
	struct routing r;

	if (routes(w->f, layer, &r)) {
		routed_room(&c, &r);
		run_front(w, p, layer, &c);
		if (run_experts(w, &c, &r, NULL, false, e))
			return -1;
		t->model->finish(t, layer, &c);
	} else {
		run_front(w, p, layer, &c);
	}
	c.scratch.used = 0;
	if (p->tokens)
		capture_ids(w, p, &c, TAP_LAYER, layer);
	return 0;
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
	if (weights_poll(w->f->weights, e))
		return -1;
	if (w->f->dev->err.code)
		return wait_for_device(w, e);
	if (forward_stop)
		return err_fail(
			e,
			"stopped by a signal; published shards are safe, the same command goes on");
	return 0;
}

static int acquire_block(struct window *w, enum unit_kind kind, int layer,
			 const struct expert_block *b, struct err *e)
{
	double start = log_seconds();
	int rc = weights_acquire(w->f->weights, kind, layer, b, e);

	w->f->acquiring += log_seconds() - start;
	return rc;
}

static int acquire(struct window *w, enum unit_kind kind, int layer, struct err *e)
{
	return acquire_block(w, kind, layer, NULL, e);
}

/* A layer's units, and what comes after them is asked for. Blocks of experts have to be chosen. */
static int acquire_layer(struct window *w, int layer, struct err *e)
{
	struct forward *f = w->f;
	int after = layer + 1 < f->target->layers ? layer + 1 : 0;

	if (acquire(w, UNIT_LAYER, layer, e) ||
	    (!is_split(f, layer) && acquire(w, UNIT_EXPERTS, layer, e)))
		return -1;
	if (!after && !w->next)
		return 0;
	if (weights_want(f->weights, UNIT_LAYER, after, NULL, e))
		return -1;
	return is_split(f, after) ? 0 : weights_want(f->weights, UNIT_EXPERTS, after, NULL, e);
}

/*
 * Verbs may run later: what comes and goes is released when they are done, or the loader would fill
 * a device's memory with what they have not come to.
 */
static int let_go(struct window *w, enum unit_kind kind, int layer, struct err *e)
{
	if (!weights_stay(w->f->weights, kind, layer) && wait_for_device(w, e))
		return -1;
	weights_done(w->f->weights, kind, layer);
	return 0;
}

/* Rows count as done in proportion to the layers they have passed; `rows` of the window have. */
static void show_progress(struct window *w, int64_t rows)
{
	struct forward *f = w->f;

	progress_update(&w->bar, f->rows + rows, f->tokens_done,
			(int64_t)capture_bytes(f->capture));
}

/* ---- a layer in three ------------------------------------------------------------------------ */

static struct chunk open_split(struct window *w, const struct part *p, const struct routing *r)
{
	struct chunk c = open_chunk(w, p);
	struct routed *x = &c.routed;

	routed_views(x, w->routed, r, p->begin, p->tokens, w->f->dev->compute);
	x->experts = w->experts;
	return c;
}

static int vote(struct window *w, const struct chunk *c, struct err *e)
{
	struct device *d = w->f->dev;
	int64_t k = c->routed.ids.cols;

	for (int64_t t = 0, n; t < c->tokens; t += n) {
		n = host_ids(w->f) / k;
		n = n < c->tokens - t ? n : c->tokens - t;
		d->be->store(d, w->host, DT_I32, k, tensor_rows(c->routed.ids, t, n));
		if (wait_for_device(w, e))
			return -1;
		for (int64_t i = 0; i < n * k; i++)
			w->votes[w->host[i]] = 1;
	}
	return 0;
}

/* The experts of this rank that some token of some rank's window chose. */
static int choose(struct window *w, const struct routing *r, struct err *e)
{
	struct forward *f = w->f;
	int ep = f->ep ? f->ep->world : 1, index = f->ep ? f->ep->rank : 0;
	int64_t each = r->experts / ep;

	if (f->world &&
	    f->world->t->allreduce(f->world, w->votes, (int)r->experts, COMM_MAX, e))
		return -1;
	for (int64_t i = 0; i < each; i++)
		w->chosen[i] = w->votes[index * each + i];
	return 0;
}

/* The next block from *first on that holds a chosen expert, from its first to its last. */
static bool next_block(const struct window *w, int64_t each, int64_t *first,
		       struct expert_block *b)
{
	int64_t most = w->f->plan->block_experts;

	while (*first < each && !w->chosen[*first])
		++*first;
	if (*first == each)
		return false;
	most = most && !w->f->ep && most < each - *first ? most : each - *first;
	*b = (struct expert_block){ *first, most, w->chosen };
	while (!w->chosen[b->first + b->n - 1])
		b->n--;
	*first += most;
	/* with all experts in one block their numbers are those of the exchange */
	if (w->f->ep)
		*b = (struct expert_block){ 0, each, w->chosen };
	return true;
}

static int run_block(struct window *w, const struct routing *r, const struct expert_block *b,
		     bool add, struct err *e)
{
	for (size_t i = 0; i < w->nparts; i++) {
		struct chunk c = open_split(w, &w->part[i], r);

		if (run_experts(w, &c, r, b, add, e) || pause_point(w, e))
			return -1;
	}
	return 0;
}

/* Each block is asked for while the one before computes; exchanging ranks join without any, too. */
static int run_blocks(struct window *w, int layer, const struct routing *r, struct err *e)
{
	struct weights *weights = w->f->weights;
	int64_t each = r->experts / (w->f->ep ? w->f->ep->world : 1), at = 0;
	struct expert_block b, next;
	bool more = next_block(w, each, &at, &b), add = false;

	if (!more && w->f->ep)
		return run_block(w, r, &b, false, e);
	while (more) {
		if (acquire_block(w, UNIT_EXPERTS, layer, &b, e))
			return -1;
		more = next_block(w, each, &at, &next);
		if ((more && weights_want(weights, UNIT_EXPERTS, layer, &next, e)) ||
		    run_block(w, r, &b, add, e) || let_go(w, UNIT_EXPERTS, layer, e))
			return -1;
		b = next;
		add = true;
	}
	return 0;
}

static int run_split(struct window *w, int layer, const struct routing *r, struct err *e)
{
	struct target *t = w->f->target;

	memset(w->votes, 0, (size_t)r->experts * sizeof *w->votes);
	for (size_t i = 0; i < w->nparts; i++) {
		struct chunk c = open_split(w, &w->part[i], r);

		run_front(w, &w->part[i], layer, &c);
		w->experts = c.routed.experts;
		if (vote(w, &c, e) || pause_point(w, e))
			return -1;
	}
	if (choose(w, r, e) || run_blocks(w, layer, r, e))
		return -1;
	for (size_t i = 0; i < w->nparts; i++) {
		struct chunk c = open_split(w, &w->part[i], r);

		t->model->finish(t, layer, &c);
		c.scratch.used = 0;
		if (w->part[i].tokens)
			capture_ids(w, &w->part[i], &c, TAP_LAYER, layer);
		if (pause_point(w, e))
			return -1;
	}
	return 0;
}

static int window_layers(struct window *w, struct err *e)
{
	struct forward *f = w->f;

	for (int layer = 0; layer < f->target->layers; layer++) {
		struct routing r;

		if (acquire_layer(w, layer, e))
			return -1;
		if (f->began <= 0)
			f->began = log_seconds();
		if (is_split(f, layer)) {
			routes(f, layer, &r);
			if (run_split(w, layer, &r, e))
				return -1;
		}
		for (size_t i = 0; i < w->nparts && !is_split(f, layer); i++)
			if (run_layer(w, &w->part[i], layer, e) || pause_point(w, e))
				return -1;
		if (let_go(w, UNIT_EXPERTS, layer, e) || let_go(w, UNIT_LAYER, layer, e))
			return -1;
		if (w->out)
			show_progress(w, w->out->n * (layer + 1) / (f->target->layers + 1));
	}
	return 0;
}

/* n rows from `first` on, none where only other ranks have a window; `parts` chunks. */
static int run_window(struct window *w, int64_t first, int64_t n, int64_t parts, struct err *e)
{
	struct forward *f = w->f;

	w->out = NULL;
	if (window_begin(w, first, n, parts, e) || acquire(w, UNIT_ALWAYS, -1, e) ||
	    acquire(w, UNIT_EMBED, -1, e))
		return -1;
	for (size_t i = 0; i < w->nparts; i++)
		if (w->part[i].tokens)
			run_embed(w, &w->part[i]);
	if (pause_point(w, e) || window_layers(w, e) || acquire(w, UNIT_FINAL, -1, e))
		return -1;
	for (size_t i = 0; i < w->nparts; i++)
		if (w->part[i].tokens)
			run_final(w, &w->part[i]);
	if (wait_for_device(w, e))
		return -1;
	if (!n)
		return 0;
	capture_give(f->capture, w->out);
	f->rows += n;
	f->tokens_done += f->tokens->offset[first + n] - f->tokens->offset[first];
	f->windows++;
	show_progress(w, 0);
	return 0;
}

/* The runs of rows that are still to do: windows, with published shards cut out. */
struct runs {
	struct plan_cursor cursor;
	const struct forward *f;
	const bool *done;
	int64_t first, end;		/* of the window */
};

static bool next_run(struct runs *r, int64_t *first, int64_t *n)
{
	int64_t size = r->f->plan->g.shard_size, stop;

	do {
		while (r->first < r->end && r->done[r->first / size])
			r->first = (r->first / size + 1) * size;
		if (r->first < r->end)
			break;
	} while (plan_next_window(&r->cursor, &r->first, n) && (r->end = r->first + *n));
	if (r->first >= r->end)
		return false;
	for (stop = r->first; stop < r->end && !r->done[stop / size];)
		stop = (stop / size + 1) * size < r->end ? (stop / size + 1) * size : r->end;
	*first = r->first;
	*n = stop - r->first;
	r->first = stop;
	return true;
}

/* What this rank has to do next, then what any rank has. */
struct step {
	int64_t have, next, parts;
};

static int agree_on_step(struct forward *f, struct step *s, struct err *e)
{
	int64_t v[3] = { s->have, s->next, s->parts };

	if (f->world && f->world->t->allreduce(f->world, v, 3, COMM_MAX, e))
		return -1;
	*s = (struct step){ v[0], v[1], v[2] };
	return 0;
}

static int run_all(struct window *w, struct runs *r, struct err *e)
{
	int64_t first = 0, n = 0, after = 0, count = 0;
	bool have = next_run(r, &first, &n);

	for (;; first = after, n = count) {
		bool more = have && next_run(r, &after, &count);
		struct step s = { have, more, have ? count_parts(w->f, first, n) : 0 };

		if (agree_on_step(w->f, &s, e))
			return -1;
		if (!s.have)
			return 0;
		w->next = s.next;
		if (run_window(w, first, have ? n : 0, s.parts, e))
			return -1;
		have = more;
	}
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
	struct runs runs = { .f = f, .done = done };
	struct window w;
	int rc = -1;

	if (window_alloc(&w, f, e))
		goto out;
	progress_begin(&w.bar, f->progress, "rows", rows_to_do(f, done));
	plan_windows(&runs.cursor, f->plan, f->range, f->tokens);
	rc = run_all(&w, &runs, e);
	progress_end(&w.bar);
	f->exchanging = w.exchange.seconds;
out:
	if (f->dev->be->sync(f->dev, e))
		rc = -1;
	window_release(&w);
	f->seconds = log_seconds() - start;
	return rc;
}
