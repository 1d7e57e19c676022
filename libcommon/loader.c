/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a unit is made. All pieces of a load are known before the first is read, in the same order
 * on every member, which fixes the wire. Rows of gate and of up go in step, since they share
 * panels, and a panel takes memory until it has all its rows.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "err.h"
#include "loader.h"
#include "log.h"
#include "mem.h"
#include "quant.h"

#define PIECE_BYTES (1u << 20)
/*
 * Of a copy: a tensor read whole is held against its hash, and the first and last LZ4 block of a
 * piece may be unpacked twice.
 */
#define PIECE_COPY  (8u << 20)
#define ALIGN       64
#define HELPERS_MAX 64
#define AHEAD_BYTES (256u << 20)

enum load_state { WAITING, READING, GATHERING, GATHERED, FILLING, READY };

/* Rows of one source, held by one member. */
struct part {
	size_t which; /* weight of the unit */
	const struct weight_source *source;
	int64_t index;     /* matrix, counted from the first of the block */
	int64_t row, rows; /* of the matrix */
	int64_t from;      /* row of the source's entry */
	int member;        /* -1 = not gathered */
	uint64_t wire;     /* where its bytes lie there */
	uint64_t scales;   /* and its scales */
};

/* Where the scales of a member's pieces lie on the wire. */
struct stretch {
	uint64_t at, bytes;
};

struct load {
	struct load *next;
	struct unit *u;
	int64_t first, n; /* matrices of an experts unit, else 0 and 1 */
	bool *chosen;     /* [count of the unit], NULL = all */
	enum load_state state;
	struct weight *weight; /* [u->n], taken by loader_take */
	struct part *piece;
	size_t npieces, cap;
	size_t at; /* next piece of READING or FILLING */
	int busy;  /* threads that have a piece */
	char *wire;
	uint64_t wire_bytes;
	struct stretch *scales; /* [members] */
	char **strips;          /* [members] host copies of them, if the wire is not the host's */
	uint64_t *len, total, own; /* bytes of each part, of all, and before this rank's */
	struct comm_request request;
	bool started;
};

/* A tensor's part that stays in host memory. */
struct held {
	char *p;
	enum { HELD_NOT, HELD_READING, HELD } state;
};

struct loader {
	struct weights *w;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t turn;
	bool ending;
	struct load *loads; /* in the order they were asked for */
	struct held *held;  /* [entries of the stage]; NULL = nothing stays there */
	bool apart;         /* the wire is device memory */
	char *wire;         /* of the load before: pages that need not be cleared again */
	uint64_t wire_bytes;
	uint64_t read;
	double making, gathering; /* seconds; under lock */
	struct err err; /* the first failure; nothing goes on after it */
};

/* ---- pieces ---------------------------------------------------------------------------------- */

static uint64_t row_bytes(const struct bound *b, const struct weight_source *src)
{
	if (src->quant)
		return quant_row_bytes(src->quant, b->shape.cols);
	return (uint64_t)b->shape.cols * dtype_size(src->entry->dtype);
}

static int rank_in(const struct unit *u)
{
	return u->group ? u->group->rank : 0;
}

/* Every matrix has the same number of sources, in the order of its rows. */
static const struct weight_source *source_at(const struct bound *b, int64_t matrix, int64_t row)
{
	size_t each = b->nsources / (size_t)b->count;
	const struct weight_source *src = b->source + (size_t)matrix * each;

	while (row >= src->row0 + src->rows)
		src++;
	return src;
}

/* Rows from `row` of a matrix on that one piece takes, at most `most`. */
static struct part piece_at(const struct load *x, size_t which, int64_t matrix, int64_t row,
			     int64_t most)
{
	const struct bound *b = x->u->bound[which];
	const struct weight_source *src = source_at(b, matrix, row);
	bool plain = b->weights->stage->form == STAGE_REFERENCE || b->members > 1;
	int64_t slice = (int64_t)((plain ? PIECE_BYTES : PIECE_COPY) / row_bytes(b, src)),
		n = src->row0 + src->rows - row;
	struct part p = { .which = which,
			   .source = src,
			   .index = matrix - x->first,
			   .row = row,
			   .from = src->from + row - src->row0,
			   .member = -1 };

	slice = slice < 1 ? 1 : slice;
	n = n < most ? n : most;
	n = n < slice ? n : slice;
	if (b->members > 1) {
		int64_t at = matrix * b->shape.rows + row, all = b->count * b->shape.rows,
			each = all / b->members + (all % b->members != 0), left;

		p.member = (int)(at / each);
		left = (p.member + 1) * each - at;
		n = n < left ? n : left;
	}
	p.rows = n;
	return p;
}

static int put(struct load *x, const struct part *p, struct err *e)
{
	if (mem_grow(&x->piece, &x->cap, x->npieces + 1, sizeof *x->piece, e))
		return -1;
	x->piece[x->npieces++] = *p;
	return 0;
}

static int cut_matrix(struct load *x, size_t which, int64_t matrix, struct err *e)
{
	const struct weight *f = &x->u->bound[which]->shape;
	bool gated = f->use == USE_GATED;
	int64_t rows = gated ? f->rows / 2 : f->rows;
	struct part p, up;

	for (int64_t r = 0; r < rows; r += p.rows) {
		p = piece_at(x, which, matrix, r, rows - r);
		if (gated) {
			up = piece_at(x, which, matrix, rows + r, p.rows);
			p.rows = up.rows;
		}
		if (put(x, &p, e) || (gated && put(x, &up, e)))
			return -1;
	}
	return 0;
}

static int cut(struct load *x, struct err *e)
{
	for (size_t i = 0; i < x->u->n; i++) {
		const struct bound *b = x->u->bound[i];
		int64_t end = b->count > 1 ? x->first + x->n : b->count;

		for (int64_t m = b->count > 1 ? x->first : 0; m < end && !b->data; m++)
			if ((!x->chosen || b->shard != SHARD_EXPERT || x->chosen[m]) &&
			    cut_matrix(x, i, m, e))
				return -1;
	}
	return 0;
}

/* Of the piece's rows alone; with the room up to its scales, which may be read where they lie. */
static uint64_t data_bytes(const struct load *x, const struct part *p)
{
	return (uint64_t)p->rows * row_bytes(x->u->bound[p->which], p->source);
}

static uint64_t scales_at(const struct load *x, const struct part *p)
{
	return (data_bytes(x, p) + ALIGN - 1) / ALIGN * ALIGN;
}

/* The rows of its tensor's grid that a piece needs. */
static int64_t first_strip(const struct part *p)
{
	return weight_grid_row(p->source, p->from);
}

static int64_t strips(const struct part *p)
{
	return weight_grid_row(p->source, p->from + p->rows - 1) - first_strip(p) + 1;
}

static uint64_t scale_bytes(const struct part *p)
{
	const struct entry *scale = p->source->scale;

	return scale ? (uint64_t)strips(p) * entry_row_bytes(scale) : 0;
}

/* Of a piece by itself: its scales stand behind its rows. */
static uint64_t piece_bytes(const struct load *x, const struct part *p)
{
	return scales_at(x, p) + scale_bytes(p);
}

/* Pieces of gate and up go in step: either may end where the other has to. */
uint64_t loader_scale_bytes(uint64_t grids, uint64_t strip, uint64_t bytes, int members)
{
	uint64_t pieces = 2 * (bytes / PIECE_BYTES + WEIGHT_PARTS + (uint64_t)members);

	return grids + pieces * (2 * strip + ALIGN);
}

static void *wire_alloc(struct loader *l, uint64_t bytes, struct err *e)
{
	struct device *d = l->w->dev;

	return l->apart ? d->be->alloc(d, bytes, e) : mem_aligned(bytes, e);
}

static void wire_free(struct loader *l, char *wire)
{
	if (l->apart)
		l->w->dev->be->free(l->w->dev, wire);
	else
		free(wire);
}

/* Only the loader's thread has the buffer that waits. */
static int take_wire(struct loader *l, struct load *x, struct err *e)
{
	if (l->wire_bytes >= x->total && l->wire) {
		x->wire = l->wire;
		x->wire_bytes = l->wire_bytes;
	} else {
		wire_free(l, l->wire);
		x->wire = wire_alloc(l, x->total, e);
		x->wire_bytes = x->total;
	}
	l->wire = NULL;
	return x->wire ? 0 : -1;
}

static void give_wire(struct loader *l, struct load *x)
{
	l->wire = x->wire;
	l->wire_bytes = x->wire_bytes;
	x->wire = NULL;
}

/* A member's part: first what its rows are, then their scales. */
static void lay_part(struct load *x, int member)
{
	uint64_t begin = x->total;

	for (size_t i = 0; i < x->npieces; i++) {
		if (x->piece[i].member != member)
			continue;
		x->piece[i].wire = x->total;
		x->total += scales_at(x, &x->piece[i]);
	}
	x->scales[member].at = x->total;
	for (size_t i = 0; i < x->npieces; i++) {
		if (x->piece[i].member != member)
			continue;
		x->piece[i].scales = x->total;
		x->total += scale_bytes(&x->piece[i]);
	}
	x->scales[member].bytes = x->total - x->scales[member].at;
	x->total = (x->total + ALIGN - 1) / ALIGN * ALIGN;
	x->len[member] = x->total - begin;
}

static int lay_wire(struct loader *l, struct load *x, struct err *e)
{
	int n = x->u->members;

	x->len = mem_calloc((size_t)n, sizeof *x->len, e);
	x->scales = mem_calloc((size_t)n, sizeof *x->scales, e);
	if (!x->len || !x->scales)
		return -1;
	for (int m = 0; m < n; m++) {
		if (m == rank_in(x->u))
			x->own = x->total;
		lay_part(x, m);
	}
	return take_wire(l, x, e);
}

/* ---- bytes of a piece ------------------------------------------------------------------------ */

static uint64_t entry_offset(const struct load *x, const struct part *p)
{
	return (uint64_t)(p->from - p->source->entry->row0) *
	       row_bytes(x->u->bound[p->which], p->source);
}

/* The whole of a tensor's part, read by whoever asks first; others wait. */
static int hold(struct loader *l, const struct entry *t, struct held *h, struct err *e)
{
	uint64_t bytes = stage_bytes(t);
	char *p = NULL;

	pthread_mutex_lock(&l->lock);
	while (h->state == HELD_READING && !l->err.code)
		pthread_cond_wait(&l->turn, &l->lock);
	if (h->state == HELD || l->err.code) {
		if (l->err.code)
			*e = l->err;
		pthread_mutex_unlock(&l->lock);
		return e->code ? -1 : 0;
	}
	h->state = HELD_READING;
	pthread_mutex_unlock(&l->lock);
	p = mem_aligned(bytes, e);
	if (p && stage_read(l->w->stage, t, p, 0, bytes, e)) {
		free(p);
		p = NULL;
	}
	pthread_mutex_lock(&l->lock);
	h->p = p;
	h->state = p ? HELD : HELD_NOT;
	l->read += p ? bytes : 0;
	if (!p && !l->err.code)
		l->err = *e;
	pthread_cond_broadcast(&l->turn);
	pthread_mutex_unlock(&l->lock);
	return p ? 0 : -1;
}

/* Bytes [off, off + n) of what is held of an entry. */
static int fetch_bytes(struct loader *l, const struct load *x, const struct part *p,
		       const struct entry *t, uint64_t off, uint64_t n, char *to, struct err *e)
{
	if (l->held && p->member >= 0 && !x->u->stays) {
		struct held *h = &l->held[t - l->w->stage->entry];

		if (hold(l, t, h, e))
			return -1;
		memcpy(to, h->p + off, n);
		return 0;
	}
	if (stage_read(l->w->stage, t, to, off, n, e))
		return -1;
	pthread_mutex_lock(&l->lock);
	l->read += n;
	pthread_mutex_unlock(&l->lock);
	return 0;
}

static int fetch(struct loader *l, const struct load *x, const struct part *p, char *to,
		 char *scales, struct err *e)
{
	const struct entry *scale = p->source->scale;
	uint64_t strip = scale ? entry_row_bytes(scale) : 0;

	if (fetch_bytes(l, x, p, p->source->entry, entry_offset(x, p), data_bytes(x, p), to, e))
		return -1;
	return scale ? fetch_bytes(l, x, p, scale, (uint64_t)(first_strip(p) - scale->row0) * strip,
				   scale_bytes(p), scales, e)
		     : 0;
}

/* A thread's room: for pieces that pass through, and for what is made of them. */
struct room {
	char *p;
	size_t size;
};

static char *room_for(struct room *r, size_t n, struct err *e)
{
	if (n > r->size) {
		free(r->p);
		r->p = mem_aligned(n, e);
		r->size = r->p ? n : 0;
	}
	return r->p;
}

/* Of those of a piece, the scales of its row i. */
static const char *scales_of(const struct part *p, const char *scales, int64_t i)
{
	int64_t strip = weight_grid_row(p->source, p->from + i) - first_strip(p);

	return scales + (uint64_t)strip * entry_row_bytes(p->source->scale);
}

/* Codes stay codes where all of the weight is packed alike, else they become numbers here. */
static int fill_packed(struct loader *l, const struct load *x, const struct part *p,
		       const char *from, const char *scales, struct room *made, struct err *e)
{
	struct device *d = l->w->dev;
	struct weight *w = &x->weight[p->which];
	const struct quant *q = p->source->quant;
	uint64_t codes = row_bytes(x->u->bound[p->which], p->source),
		 strip = entry_row_bytes(p->source->scale),
		 each = w->quant ? strip : (uint64_t)w->cols * sizeof(float);
	char *to = room_for(made, (size_t)p->rows * each, e);

	for (int64_t i = 0; to && i < p->rows; i++) {
		const char *own = scales_of(p, scales, i);

		if (w->quant)
			memcpy(to + (uint64_t)i * each, own, strip);
		else
			quant_values((float *)(to + (uint64_t)i * each), q,
				     from + (uint64_t)i * codes, own, w->cols);
	}
	if (!to)
		return -1;
	if (w->quant)
		return d->be->weight_fill(d, w, p->index, p->row, p->rows, from, w->stored, to, e);
	return d->be->weight_fill(d, w, p->index, p->row, p->rows, to, DT_F32, NULL, e);
}

static int fill(struct loader *l, struct load *x, const struct part *p, const char *from,
		const char *scales, struct room *made, struct err *e)
{
	struct device *d = l->w->dev;

	if (p->source->quant)
		return fill_packed(l, x, p, from, scales, made, e);
	return d->be->weight_fill(d, &x->weight[p->which], p->index, p->row, p->rows, from,
				  p->source->entry->dtype, NULL, e);
}

/* ---- threads at work ------------------------------------------------------------------------- */

static struct part *next_piece(struct load *x)
{
	while (x->at < x->npieces) {
		struct part *p = &x->piece[x->at++];

		if (x->state == FILLING || p->member == rank_in(x->u))
			return p;
	}
	return NULL;
}

/* Onto a wire that is the device's. */
static int send_piece(struct loader *l, struct load *x, const struct part *p, const char *from,
		      struct err *e)
{
	struct device *d = l->w->dev;

	if (d->be->move(d, x->wire + p->wire, from, data_bytes(x, p), e))
		return -1;
	return p->source->scale ? d->be->move(d, x->wire + p->scales, from + scales_at(x, p),
					      scale_bytes(p), e)
				: 0;
}

/* From the wire. Where that is the device's, codes that become numbers come to the host again. */
static int fill_gathered(struct loader *l, struct load *x, const struct part *p,
			 struct room room[2], struct err *e)
{
	struct device *d = l->w->dev;
	const char *from = x->wire + p->wire, *scales = x->wire + p->scales;
	char *codes;

	if (!l->apart)
		return fill(l, x, p, from, scales, &room[1], e);
	if (p->source->scale)
		scales = x->strips[p->member] + (p->scales - x->scales[p->member].at);
	if (!p->source->quant || x->weight[p->which].quant)
		return fill(l, x, p, from, scales, &room[1], e);
	codes = room_for(&room[0], data_bytes(x, p), e);
	if (!codes || d->be->move(d, codes, from, data_bytes(x, p), e))
		return -1;
	return fill(l, x, p, codes, scales, &room[1], e);
}

static int one_piece(struct loader *l, struct load *x, const struct part *p, bool filling,
		     struct room room[2], struct err *e)
{
	char *to;

	if (!filling && !l->apart)
		return fetch(l, x, p, x->wire + p->wire, x->wire + p->scales, e);
	if (filling && p->member >= 0)
		return fill_gathered(l, x, p, room, e);
	to = room_for(&room[0], piece_bytes(x, p), e);
	if (!to || fetch(l, x, p, to, to + scales_at(x, p), e))
		return -1;
	return filling ? fill(l, x, p, to, to + scales_at(x, p), &room[1], e)
		       : send_piece(l, x, p, to, e);
}

/* Takes pieces of the load's present state until none is left. */
static void work(struct loader *l, struct load *x)
{
	struct room room[2] = { { NULL, 0 }, { NULL, 0 } };
	enum load_state state;
	struct part *p;

	pthread_mutex_lock(&l->lock);
	state = x->state;
	while ((state == READING || state == FILLING) && x->state == state && !l->err.code &&
	       !l->ending && (p = next_piece(x))) {
		struct err e = ERR_INIT;

		x->busy++;
		pthread_mutex_unlock(&l->lock);
		one_piece(l, x, p, state == FILLING, room, &e);
		pthread_mutex_lock(&l->lock);
		if (e.code && !l->err.code)
			l->err = e;
		if (!--x->busy)
			pthread_cond_broadcast(&l->turn);
	}
	pthread_mutex_unlock(&l->lock);
	free(room[0].p);
	free(room[1].p);
}

struct helper {
	struct loader *l;
	struct load *x;
	pthread_t thread;
};

static void *help(void *arg)
{
	struct helper *h = arg;

	work(h->l, h->x);
	return NULL;
}

/*
 * The caller has nothing else to do: as many threads as the device has, the loader's among them.
 * Fewer than wanted are slower, not wrong.
 */
static void work_with_all(struct loader *l, struct load *x)
{
	struct helper h[HELPERS_MAX];
	int want = l->w->dev->threads - 2, n = 0;
	size_t left;

	pthread_mutex_lock(&l->lock);
	left = x->npieces - x->at;
	pthread_mutex_unlock(&l->lock);
	want = want < HELPERS_MAX ? want : HELPERS_MAX;
	for (; n < want && (size_t)n + 1 < left; n++) {
		h[n] = (struct helper){ .l = l, .x = x };
		if (pthread_create(&h[n].thread, NULL, help, &h[n]))
			break;
	}
	if (l->w->dev->threads > 1)
		work(l, x);
	while (n > 0)
		pthread_join(h[--n].thread, NULL);
}

/* ---- the loader's thread --------------------------------------------------------------------- */

static int set_state(struct loader *l, struct load *x, enum load_state state)
{
	int rc;

	pthread_mutex_lock(&l->lock);
	x->state = state;
	x->at = 0;
	pthread_cond_broadcast(&l->turn);
	rc = l->err.code || l->ending ? -1 : 0;
	pthread_mutex_unlock(&l->lock);
	return rc;
}

static int all_pieces(struct loader *l, struct load *x, enum load_state state)
{
	int rc;

	if (set_state(l, x, state))
		return -1;
	work(l, x);
	pthread_mutex_lock(&l->lock);
	while (x->busy)
		pthread_cond_wait(&l->turn, &l->lock);
	rc = l->err.code || l->ending ? -1 : 0;
	pthread_mutex_unlock(&l->lock);
	return rc;
}

/* Starts what will be read on its way from the disk, as far as that is worth its memory. */
static void ask_ahead(struct loader *l, const struct load *x)
{
	uint64_t left = AHEAD_BYTES;

	for (size_t i = 0; i < x->npieces && left; i++) {
		const struct part *p = &x->piece[i];
		uint64_t n = data_bytes(x, p);

		if (p->member >= 0 && (p->member != rank_in(x->u) || l->held))
			continue;
		n = n < left ? n : left;
		stage_ahead(l->w->stage, p->source->entry, entry_offset(x, p), n);
		left -= n;
	}
}

/* All scales: whoever fills weights gets theirs row by row, from host memory. */
static int fetch_strips(struct loader *l, struct load *x, struct err *e)
{
	struct device *d = l->w->dev;

	x->strips = mem_calloc((size_t)x->u->members, sizeof *x->strips, e);
	for (int m = 0; x->strips && m < x->u->members; m++) {
		const struct stretch *s = &x->scales[m];

		x->strips[m] = s->bytes ? mem_aligned(s->bytes, e) : NULL;
		if (s->bytes &&
		    (!x->strips[m] || d->be->move(d, x->strips[m], x->wire + s->at, s->bytes, e)))
			return -1;
	}
	return x->strips ? 0 : -1;
}

static int gather(struct loader *l, struct load *x, struct err *e)
{
	double start;
	int rc;

	if (lay_wire(l, x, e) || all_pieces(l, x, READING) || set_state(l, x, GATHERING))
		return -1;
	start = log_seconds();
	pthread_mutex_lock(&l->lock);
	while (x->state == GATHERING && !l->err.code && !l->ending)
		pthread_cond_wait(&l->turn, &l->lock);
	rc = x->state == GATHERED ? 0 : -1;
	l->gathering += log_seconds() - start;
	l->making -= log_seconds() - start;
	pthread_mutex_unlock(&l->lock);
	return rc || !l->apart ? rc : fetch_strips(l, x, e);
}

static int alloc_weights(struct loader *l, struct load *x, struct err *e)
{
	struct device *d = l->w->dev;

	for (size_t i = 0; i < x->u->n; i++) {
		const struct bound *b = x->u->bound[i];
		struct weight w = b->shape;

		w.count = b->count > 1 ? x->n : b->count;
		if (d->be->weight_alloc(d, &w, e))
			return -1;
		x->weight[i] = w;
		if (b->data && d->be->weight_fill(d, &x->weight[i], 0, 0, w.rows, b->data, w.stored,
						  NULL, e))
			return -1;
	}
	return 0;
}

static int run(struct loader *l, struct load *x, struct err *e)
{
	struct device *d = l->w->dev;

	if (cut(x, e))
		return -1;
	ask_ahead(l, x);
	if ((x->u->group && gather(l, x, e)) || alloc_weights(l, x, e) || all_pieces(l, x, FILLING))
		return -1;
	for (size_t i = 0; i < x->u->n; i++)
		if (d->be->weight_ready(d, &x->weight[i], e))
			return -1;
	if (x->wire)
		give_wire(l, x);
	return set_state(l, x, READY);
}

static struct load *under_way(const struct loader *l)
{
	struct load *x = l->loads;

	while (x && x->state == READY)
		x = x->next;
	return x;
}

static void *loads(void *arg)
{
	struct loader *l = arg;

	pthread_mutex_lock(&l->lock);
	while (!l->ending && !l->err.code) {
		struct load *x = under_way(l);
		struct err e = ERR_INIT;
		double start;

		if (!x) {
			pthread_cond_wait(&l->turn, &l->lock);
			continue;
		}
		pthread_mutex_unlock(&l->lock);
		start = log_seconds();
		run(l, x, &e);
		pthread_mutex_lock(&l->lock);
		l->making += log_seconds() - start;
		if (e.code && !l->err.code)
			l->err = e;
		pthread_cond_broadcast(&l->turn);
	}
	pthread_mutex_unlock(&l->lock);
	return NULL;
}

/* ---- the caller's side ----------------------------------------------------------------------- */

/* Its transport takes the device's own memory, and no other. */
static bool on_device(const struct comm *c)
{
	return c && c->t && c->t->device_buffers;
}

int loader_open(struct loader **out, struct weights *w, struct err *e)
{
	struct loader *l = mem_calloc(1, sizeof *l, e);
	int rc;

	if (!l)
		return -1;
	l->w = w;
	l->apart = !w->dev->be->host_memory &&
		   (on_device(w->o.rows) || on_device(w->o.experts));
	if (w->o.residency == WEIGHTS_GATHER && !w->o.keep) {
		l->held = mem_calloc(w->stage->nentries, sizeof *l->held, e);
		if (!l->held) {
			free(l);
			return -1;
		}
	}
	pthread_mutex_init(&l->lock, NULL);
	pthread_cond_init(&l->turn, NULL);
	rc = pthread_create(&l->thread, NULL, loads, l);
	if (rc) {
		pthread_mutex_destroy(&l->lock);
		pthread_cond_destroy(&l->turn);
		free(l->held);
		free(l);
		return err_fail(e, "cannot start the loading thread: %s", strerror(rc));
	}
	*out = l;
	return 0;
}

/* What the transport still works on is left to it: its owner aborts. */
static void load_free(struct loader *l, struct load *x)
{
	struct device *d = l->w->dev;

	for (size_t i = 0; x->weight && i < x->u->n; i++)
		d->be->weight_free(d, &x->weight[i]);
	if (!x->request.state)
		wire_free(l, x->wire);
	for (int m = 0; x->strips && m < x->u->members; m++)
		free(x->strips[m]);
	free(x->strips);
	free(x->scales);
	free(x->weight);
	free(x->piece);
	free(x->len);
	free(x->chosen);
	free(x);
}

void loader_free(struct loader *l)
{
	if (!l)
		return;
	pthread_mutex_lock(&l->lock);
	l->ending = true;
	pthread_cond_broadcast(&l->turn);
	pthread_mutex_unlock(&l->lock);
	pthread_join(l->thread, NULL);
	for (struct load *x = l->loads, *next; x; x = next) {
		next = x->next;
		load_free(l, x);
	}
	for (size_t i = 0; l->held && i < l->w->stage->nentries; i++)
		free(l->held[i].p);
	free(l->held);
	wire_free(l, l->wire);
	pthread_mutex_destroy(&l->lock);
	pthread_cond_destroy(&l->turn);
	free(l);
}

static int64_t experts_of(const struct unit *u)
{
	int64_t n = 1;

	for (size_t i = 0; i < u->n; i++)
		n = u->bound[i]->count > n ? u->bound[i]->count : n;
	return n;
}

int loader_want(struct loader *l, struct unit *u, const struct expert_block *b, struct load **out,
		struct err *e)
{
	int64_t all = experts_of(u), first = b ? b->first : 0, n = b && b->n ? b->n : all;
	struct load *x, **at = &l->loads;

	pthread_mutex_lock(&l->lock);
	while (*at && !((*at)->u == u && (*at)->first == first && (*at)->n == n))
		at = &(*at)->next;
	x = *at;
	pthread_mutex_unlock(&l->lock);
	*out = x;
	if (x)
		return 0;
	x = mem_calloc(1, sizeof *x, e);
	if (!x)
		return -1;
	*x = (struct load){ .u = u, .first = first, .n = n };
	x->weight = mem_calloc(u->n, sizeof *x->weight, e);
	if (x->weight && b && b->chosen) {
		x->chosen = mem_calloc((size_t)all, sizeof *x->chosen, e);
		if (x->chosen)
			memcpy(x->chosen, b->chosen, (size_t)all * sizeof *x->chosen);
	}
	if (e->code) {
		load_free(l, x);
		return -1;
	}
	pthread_mutex_lock(&l->lock);
	*at = x;
	pthread_cond_broadcast(&l->turn);
	pthread_mutex_unlock(&l->lock);
	*out = x;
	return 0;
}

/* Only the caller's thread takes part in collectives. */
static int exchange(struct loader *l, struct load *x, bool wait, struct err *e)
{
	struct comm *c = x->u->group;
	bool done = false;

	if (!x->started &&
	    c->t->allgather_start(c, &x->request, x->wire, x->len, x->wire + x->own, e))
		return -1;
	x->started = true;
	if (c->t->allgather_end(c, &x->request, wait, &done, e))
		return -1;
	if (done)
		set_state(l, x, GATHERED);
	return 0;
}

int loader_poll(struct loader *l, struct err *e)
{
	struct load *x;
	bool gathers;

	pthread_mutex_lock(&l->lock);
	x = under_way(l);
	gathers = x && x->state == GATHERING;
	if (l->err.code && !e->code)
		*e = l->err;
	pthread_mutex_unlock(&l->lock);
	if (e->code)
		return -1;
	return gathers ? exchange(l, x, false, e) : 0;
}

/* With the lock: lets the load under way come nearer its end by what the caller can do. */
static int advance(struct loader *l, struct err *e)
{
	struct load *x = under_way(l);
	enum load_state state = x->state;
	int rc = 0;

	pthread_mutex_unlock(&l->lock);
	if (state == GATHERING)
		rc = exchange(l, x, true, e);
	else if (state == READING || state == FILLING)
		work_with_all(l, x);
	pthread_mutex_lock(&l->lock);
	while (!rc && state != GATHERING && x->state == state && !l->err.code)
		pthread_cond_wait(&l->turn, &l->lock);
	return rc;
}

static void take_out(struct loader *l, struct load *load)
{
	struct load **at = &l->loads;

	while (*at != load)
		at = &(*at)->next;
	*at = load->next;
}

int loader_take(struct loader *l, struct load *load, struct err *e)
{
	int rc = 0;

	pthread_mutex_lock(&l->lock);
	while (!rc && load->state != READY && !l->err.code)
		rc = advance(l, e);
	if (load->state != READY) {
		/* the load stays in the list: the loader may still be at it */
		if (!e->code)
			*e = l->err;
		pthread_mutex_unlock(&l->lock);
		return -1;
	}
	take_out(l, load);
	pthread_mutex_unlock(&l->lock);
	for (size_t i = 0; i < load->u->n; i++) {
		*load->u->bound[i]->field = load->weight[i];
		load->weight[i].handle = NULL;
	}
	load_free(l, load);
	return 0;
}

void loader_times(struct loader *l, double *making, double *gathering)
{
	pthread_mutex_lock(&l->lock);
	*making = l->making;
	*gathering = l->gathering;
	pthread_mutex_unlock(&l->lock);
}

uint64_t loader_read(struct loader *l)
{
	uint64_t n;

	pthread_mutex_lock(&l->lock);
	n = l->read;
	pthread_mutex_unlock(&l->lock);
	return n;
}
