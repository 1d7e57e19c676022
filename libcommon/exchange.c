/* SPDX-License-Identifier: Apache-2.0 */
/* exchange: what goes where is decided on the host, rows are moved by verbs and the transport. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "err.h"
#include "exchange.h"
#include "log.h"
#include "mem.h"

/* Rows that fill the tiles of an expert. */
#define TILE_ROWS 128

/* What a row needs besides its numbers. */
struct exchange_slot {
	int32_t expert;
	float weight;
};

/* Tokens [first, first + n) of a chunk in one round. */
struct round {
	struct exchange *x;
	struct chunk *c;
	const struct routing *r;
	int64_t first, n;
	int64_t sent, came; /* rows */
};

int64_t exchange_rows(int64_t chunk_tokens, int64_t experts, int64_t k, int ep)
{
	int64_t each = ep > 0 ? experts / ep : 0, least, rows;

	if (ep < 2 || each < 1)
		return 0;
	least = ep * (k < each ? k : each);
	rows = 2 * chunk_tokens > TILE_ROWS * each ? 2 * chunk_tokens : TILE_ROWS * each;
	return rows > least ? rows : least;
}

uint64_t exchange_bytes(const struct routing *most, int64_t rows, enum dtype compute)
{
	uint64_t row = 2 * (uint64_t)most->in * dtype_size(compute) +
		       2 * (uint64_t)most->out * sizeof(float) + 8 * sizeof(int32_t) +
		       2 * sizeof(struct exchange_slot);

	return (uint64_t)rows * row;
}

/* ---- memory ---------------------------------------------------------------------------------- */

void exchange_release(struct exchange *x)
{
	void *device[] = { x->index, x->sent, x->came, x->ids, x->weights, x->out, x->back,
			   x->place, x->sent_ids, x->sent_weights };
	void *host[] = { x->host_ids,  x->host_place, x->host_index, x->host_weights, x->slot_sent,
			 x->slot_came, x->matrix,     x->mine,	     x->send,	      x->receive,
			 x->stage_in,  x->stage_out };

	for (size_t i = 0; x->dev && i < sizeof device / sizeof *device; i++)
		x->dev->be->free(x->dev, device[i]);
	for (size_t i = 0; i < sizeof host / sizeof *host; i++)
		free(host[i]);
	memset(x, 0, sizeof *x);
}

static int device_memory(struct exchange *x, struct err *e)
{
	size_t rows = (size_t)x->rows, in = rows * (size_t)x->most.in * dtype_size(x->dev->compute),
	       out = rows * (size_t)x->most.out * sizeof(float),
	       slots = x->way == EXCHANGE_DEVICE ? rows * sizeof(int32_t) : 0;
	struct {
		void **p;
		size_t bytes;
	} want[] = {
		{ &x->index, rows * sizeof(int32_t) }, { &x->ids, rows * sizeof(int32_t) },
		{ &x->weights, rows * sizeof(float) }, { &x->place, rows * sizeof(int32_t) },
		{ &x->sent, in },		       { &x->came, in },
		{ &x->out, out },		       { &x->back, out },
		{ &x->sent_ids, slots },	       { &x->sent_weights, slots },
	};

	for (size_t i = 0; i < sizeof want / sizeof *want; i++)
		if (want[i].bytes && !(*want[i].p = x->dev->be->alloc(x->dev, want[i].bytes, e)))
			return -1;
	return 0;
}

static int host_memory(struct exchange *x, struct err *e)
{
	size_t rows = (size_t)x->rows, n = (size_t)x->ep->world;

	x->host_ids = mem_calloc(rows, sizeof *x->host_ids, e);
	x->host_place = mem_calloc(rows, sizeof *x->host_place, e);
	x->host_index = mem_calloc(rows, sizeof *x->host_index, e);
	x->host_weights = mem_calloc(rows, sizeof *x->host_weights, e);
	x->slot_sent = mem_calloc(rows, sizeof *x->slot_sent, e);
	x->slot_came = mem_calloc(rows, sizeof *x->slot_came, e);
	x->matrix = mem_calloc(n * (n + 1), sizeof *x->matrix, e);
	x->mine = mem_calloc(n * (n + 1), sizeof *x->mine, e);
	x->send = mem_calloc(n, sizeof *x->send, e);
	x->receive = mem_calloc(n, sizeof *x->receive, e);
	if (x->way == EXCHANGE_STAGED) {
		size_t row = (size_t)x->most.in * dtype_size(x->dev->compute),
		       result = (size_t)x->most.out * sizeof(float);

		x->stage_in = mem_aligned(rows * (row > result ? row : result), e);
		x->stage_out = mem_aligned(rows * (row > result ? row : result), e);
	}
	return e->code ? -1 : 0;
}

int exchange_open(struct exchange *x, struct device *d, struct comm *ep, const struct routing *most,
		  int64_t rows, struct err *e)
{
	*x = (struct exchange){ .dev = d, .ep = ep, .most = *most, .rows = rows };
	x->round = rows / most->k;
	if (d->be->host_memory && ep->t->device_buffers)
		return err_refuse(e, "transport '%s' cannot reach the memory of device '%s'",
				  ep->t->name, d->be->name);
	if (!d->be->host_memory)
		x->way = ep->t->device_buffers ? EXCHANGE_DEVICE : EXCHANGE_STAGED;
	return device_memory(x, e) || host_memory(x, e) ? -1 : 0;
}

/* ---- how many rows go where ------------------------------------------------------------------ */

static int owner(const struct round *o, int32_t expert)
{
	return (int)(expert / (o->r->experts / o->x->ep->world));
}

static int fetch_choices(const struct round *o, struct err *e)
{
	struct exchange *x = o->x;
	struct device *d = x->dev;

	d->be->store(d, x->host_ids, DT_I32, o->r->k,
		     tensor_rows(o->c->routed.ids, o->first, o->n));
	d->be->store(d, x->host_weights, DT_F32, o->r->k,
		     tensor_rows(o->c->routed.weights, o->first, o->n));
	return d->be->sync(d, e);
}

static int travel(struct exchange *x, void *out, const int64_t *out_rows, const void *in,
		  const int64_t *in_rows, uint64_t row, struct err *e)
{
	double start = log_seconds();
	int rc = x->ep->t->alltoallv(x->ep, out, out_rows, in, in_rows, row, e);

	x->seconds += log_seconds() - start;
	return rc;
}

/* Where alltoallv takes no host memory, all counts are a sum: each rank adds its own. */
static int sum_up(struct exchange *x, struct err *e)
{
	int n = x->ep->world;
	size_t all = (size_t)(n * (n + 1)) * sizeof *x->matrix;
	double start = log_seconds();
	int rc;

	memset(x->matrix, 0, all);
	memcpy(x->matrix + x->ep->rank * (n + 1), x->mine, (size_t)(n + 1) * sizeof *x->mine);
	rc = x->ep->t->allreduce(x->ep, x->matrix, n * (n + 1), COMM_SUM, e);
	x->seconds += log_seconds() - start;
	return rc;
}

static int tell_all(struct exchange *x, struct err *e)
{
	int n = x->ep->world;
	size_t row = (size_t)(n + 1) * sizeof *x->mine;

	if (x->way == EXCHANGE_DEVICE)
		return sum_up(x, e);
	for (int i = 1; i < n; i++)
		memcpy(x->mine + i * (n + 1), x->mine, row);
	for (int i = 0; i < n; i++)
		x->send[i] = x->receive[i] = 1;
	return travel(x, x->matrix, x->receive, x->mine, x->send, row, e);
}

static bool fits(const struct exchange *x)
{
	int n = x->ep->world;

	for (int to = 0; to < n; to++) {
		int64_t rows = 0;

		for (int from = 0; from < n; from++)
			rows += x->matrix[from * (n + 1) + to];
		if (rows > x->rows)
			return false;
	}
	return true;
}

/* Tokens of any rank that are in the round or behind it. */
static int64_t still_to_do(const struct exchange *x)
{
	int n = x->ep->world;
	int64_t most = 0;

	for (int from = 0; from < n; from++)
		most = x->matrix[from * (n + 1) + n] > most ? x->matrix[from * (n + 1) + n] : most;
	return most;
}

/* The largest next round that fits every rank; *left = 0 where no rank has tokens left. */
static int agree(struct round *o, int64_t *left, struct err *e)
{
	struct exchange *x = o->x;
	int n = x->ep->world;

	for (;; x->round /= 2) {
		o->n = o->c->tokens - o->first < x->round ? o->c->tokens - o->first : x->round;
		if (fetch_choices(o, e))
			return -1;
		memset(x->mine, 0, (size_t)(n + 1) * sizeof *x->mine);
		for (int64_t i = 0; i < o->n * o->r->k; i++)
			x->mine[owner(o, x->host_ids[i])]++;
		x->mine[n] = o->c->tokens - o->first;
		if (tell_all(x, e))
			return -1;
		*left = still_to_do(x);
		if (fits(x))
			break;
	}
	o->sent = o->came = 0;
	for (int i = 0; i < n; i++) {
		x->send[i] = x->matrix[x->ep->rank * (n + 1) + i];
		x->receive[i] = x->matrix[i * (n + 1) + x->ep->rank];
		o->sent += x->send[i];
		o->came += x->receive[i];
	}
	return 0;
}

/* ---- a round --------------------------------------------------------------------------------- */

/* Rows to send: by destination, then by token and slot; host_place says where a slot's row lies. */
static void order_slots(struct round *o)
{
	struct exchange *x = o->x;
	int64_t at = 0;

	for (int to = 0; to < x->ep->world; to++)
		for (int64_t i = 0; i < o->n * o->r->k; i++) {
			if (owner(o, x->host_ids[i]) != to)
				continue;
			x->host_place[i] = (int32_t)at;
			x->host_index[at] = (int32_t)(i / o->r->k);
			x->slot_sent[at++] = (struct exchange_slot){
				x->host_ids[i],
				o->c->routed.experts.weight_after_down ? 1 : x->host_weights[i]
			};
		}
}

static struct tensor rows_at(void *p, enum dtype d, int64_t rows, int64_t cols)
{
	return (struct tensor){ p, d, rows, cols, cols };
}

/* Rows of device memory, once all before them is done. Both have `cols` columns. */
static int travel_rows(struct exchange *x, struct tensor out, const int64_t *out_rows,
		       struct tensor in, const int64_t *in_rows, struct err *e)
{
	struct device *d = x->dev;
	uint64_t row = (uint64_t)in.cols * dtype_size(in.dtype);

	if (x->way == EXCHANGE_STAGED)
		d->be->store(d, x->stage_in, in.dtype, in.cols, in);
	if (d->be->sync(d, e))
		return -1;
	if (x->way != EXCHANGE_STAGED)
		return travel(x, out.p, out_rows, in.p, in_rows, row, e);
	if (travel(x, x->stage_out, out_rows, x->stage_in, in_rows, row, e))
		return -1;
	d->be->upload(d, out, x->stage_out);
	return 0;
}

/* Experts and weights of rows that travel in device memory: one after the other. */
static int send_slots(struct round *o, struct err *e)
{
	struct exchange *x = o->x;
	struct device *d = x->dev;

	for (int64_t i = 0; i < o->sent; i++) {
		x->host_index[i] = x->slot_sent[i].expert;
		x->host_weights[i] = x->slot_sent[i].weight;
	}
	d->be->upload(d, rows_at(x->sent_ids, DT_I32, o->sent, 1), x->host_index);
	d->be->upload(d, rows_at(x->sent_weights, DT_F32, o->sent, 1), x->host_weights);
	return d->be->sync(d, e) ||
			       travel(x, x->ids, x->receive, x->sent_ids, x->send,
				      sizeof(int32_t), e) ||
			       travel(x, x->weights, x->receive, x->sent_weights, x->send,
				      sizeof(float), e)
		       ? -1
		       : 0;
}

static int send_rows(struct round *o, struct err *e)
{
	struct exchange *x = o->x;
	struct device *d = x->dev;
	struct tensor index = rows_at(x->index, DT_I32, o->sent, 1),
		      sent = rows_at(x->sent, d->compute, o->sent, o->r->in);

	order_slots(o);
	d->be->upload(d, index, x->host_index);
	d->be->pick(d, sent, tensor_rows(o->c->routed.input, o->first, o->n), index);
	if (travel_rows(x, rows_at(x->came, d->compute, o->came, o->r->in), x->receive, sent,
			x->send, e))
		return -1;
	if (x->way == EXCHANGE_DEVICE)
		return send_slots(o, e);
	if (travel(x, x->slot_came, x->receive, x->slot_sent, x->send, sizeof *x->slot_sent, e))
		return -1;
	for (int64_t i = 0; i < o->came; i++) {
		x->host_index[i] = x->slot_came[i].expert;
		x->host_weights[i] = x->slot_came[i].weight;
	}
	d->be->upload(d, rows_at(x->ids, DT_I32, o->came, 1), x->host_index);
	d->be->upload(d, rows_at(x->weights, DT_F32, o->came, 1), x->host_weights);
	return 0;
}

static int run_round(struct round *o, struct err *e)
{
	struct exchange *x = o->x;
	struct device *d = x->dev;
	struct routed *t = &o->c->routed;
	struct tensor place = rows_at(x->place, DT_I32, o->n, o->r->k),
		      weights = tensor_rows(t->weights, o->first, o->n);

	if (send_rows(o, e))
		return -1;
	d->be->experts(d, rows_at(x->out, DT_F32, o->came, o->r->out),
		       rows_at(x->came, d->compute, o->came, o->r->in),
		       rows_at(x->ids, DT_I32, o->came, 1),
		       rows_at(x->weights, DT_F32, o->came, 1), &t->experts, false);
	if (travel_rows(x, rows_at(x->back, DT_F32, o->sent, o->r->out), x->send,
			rows_at(x->out, DT_F32, o->came, o->r->out), x->receive, e))
		return -1;
	if (!t->experts.weight_after_down)
		weights.p = NULL;
	d->be->upload(d, place, x->host_place);
	d->be->combine(d, tensor_rows(t->sum, o->first, o->n),
		       rows_at(x->back, DT_F32, o->sent, o->r->out), place, weights, false);
	return d->be->sync(d, e);
}

int exchange_experts(struct exchange *x, struct chunk *c, const struct routing *r, struct err *e)
{
	struct round o = { .x = x, .c = c, .r = r };
	int64_t left;

	c->routed.experts.count = r->experts / x->ep->world;
	c->routed.experts.first = x->ep->rank * c->routed.experts.count;
	for (;;) {
		if (agree(&o, &left, e))
			return -1;
		if (!left)
			return 0;
		if (run_round(&o, e))
			return -1;
		o.first += o.n;
		if (2 * x->round <= x->rows / x->most.k)
			x->round *= 2;
	}
}
