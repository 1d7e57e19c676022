/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two threads do what may be slow. One hashes and writes rows, the other waits for the disk: while
 * a shard is fsynced and published the next one is written. The forward only waits when both
 * buffers are full, the writing thread when a second shard is full before the first is on disk.
 *
 *	forward -> buffer[2] -> thread: rows to c->writer -> c->whole -> publisher
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "cache_scan.h"
#include "capture.h"
#include "err.h"
#include "log.h"
#include "mem.h"
#include "spill.h"
#include "tokens.h"

enum { BUFFER_FREE, BUFFER_FILLING, BUFFER_READY };

/* ---- rows to shards -------------------------------------------------------------------------- */

/* Names the first bad state of a row: layer id and position. */
static int refuse_row(const struct capture *c, int64_t row, const char *states, const char *last,
		      int64_t len, struct err *e)
{
	const struct geometry *g = &c->cache->g;
	size_t h = (size_t)g->hidden, size = dtype_size(g->dtype);
	const char *hint =
		g->dtype == DT_F16
			? " (fp16 ends at 65504: recipe_args.cache_dtype: bf16 may hold it)"
			: "";

	for (int64_t t = 0; t < len; t++)
		for (int i = 0; i <= g->nids; i++) {
			const char *p = i < g->nids ? states + (size_t)(t * g->nids + i) * h * size
						    : last + (size_t)t * h * size;
			bool zero;

			if (scan_finite(p, h * size, g->dtype, &zero))
				continue;
			if (i < g->nids)
				return err_refuse(e,
						  "row %lld, position %lld: layer id %lld is not "
						  "finite%s; nothing of its shard is published",
						  (long long)row, (long long)t,
						  (long long)c->ids[i], hint);
			return err_refuse(e,
					  "row %lld, position %lld: the last hidden state is not "
					  "finite%s; nothing of its shard is published",
					  (long long)row, (long long)t, hint);
		}
	return err_refuse(e, "row %lld has a state that is not finite", (long long)row);
}

static int finish_shard(struct capture *c, struct shard_writer *w, struct err *e)
{
	int64_t index = w->index, rows = w->rows;
	bool bad = w->nonfinite;
	uint64_t bytes;
	json_t *rec;

	if ((bad && shard_mark_bad(w, e)) || shard_publish(w, &bytes, e))
		return -1;
	pthread_mutex_lock(&c->lock);
	c->bytes += bytes;
	c->quarantined += bad;
	c->shards += !bad;
	pthread_mutex_unlock(&c->lock);
	if (bad)
		log_warn("shard %lld has states that are not finite: kept as "
			 "shard-%06lld.safetensors.bad",
			 (long long)index, (long long)index);
	rec = json_pack("{s:s, s:i, s:I, s:I, s:I, s:b}",
			"record", "shard", "rank", c->cache->rank, "shard", (json_int_t)index,
			"rows", (json_int_t)rows, "bytes", (json_int_t)bytes, "finite", !bad);
	if (!rec)
		return err_fail(e, "out of memory");
	c->published(c->ctx, rec);
	return 0;
}

/* Gives the open shard, all its rows written, to the publishing thread once that has no other. */
static int hand_over(struct capture *c, struct err *e)
{
	struct shard_writer *next = mem_calloc(1, sizeof *next, e);

	if (!next)
		return -1;
	pthread_mutex_lock(&c->lock);
	while (c->whole)
		pthread_cond_wait(&c->turn, &c->lock);
	c->whole = c->writer;
	c->writer = next;
	pthread_cond_broadcast(&c->turn);
	pthread_mutex_unlock(&c->lock);
	return 0;
}

static int write_row(struct capture *c, int64_t row, const int32_t *ids, const uint8_t *mask,
		     const char *states, const char *last, struct err *e)
{
	int64_t shard = row / c->cache->g.shard_size, len = tokens_length(c->tokens, row);
	struct shard_writer *w = c->writer;

	if ((row % c->cache->g.shard_size == 0 && shard_begin(w, c->cache, shard, e)) ||
	    shard_row(w, row - shard * c->cache->g.shard_size, ids, mask, len, states, last, e))
		return -1;
	if (w->nonfinite && c->nonfinite == NONFINITE_STOP)
		return refuse_row(c, row, states, last, len, e);
	return w->written == w->rows ? hand_over(c, e) : 0;
}

static int write_window(struct capture *c, const struct capture_buffer *b, struct err *e)
{
	const struct geometry *g = &c->cache->g;
	int64_t base = c->tokens->offset[b->first],
		total = c->tokens->offset[b->first + b->n] - base;
	int32_t *ids = mem_calloc((size_t)total, sizeof *ids, e);
	uint8_t *mask = mem_calloc((size_t)total, 1, e);
	size_t position = (size_t)g->hidden * dtype_size(g->dtype);
	int rc = -1;

	if (!ids || !mask || tokens_rows(c->tokens, b->first, b->n, ids, mask, e))
		goto out;
	for (int64_t i = 0; i < b->n; i++) {
		int64_t at = c->tokens->offset[b->first + i] - base;

		if (write_row(c, b->first + i, ids + at, mask + at,
			      (char *)b->states + (size_t)at * position * (size_t)g->nids,
			      (char *)b->last + (size_t)at * position, e))
			goto out;
	}
	rc = 0;
out:
	free(ids);
	free(mask);
	return rc;
}

/* ---- the threads ----------------------------------------------------------------------------- */

static void work_done(struct capture *c, const struct err *e, double start)
{
	c->busy += log_seconds() - start;
	if (e->code && !c->err->code)
		*c->err = *e;
	pthread_cond_broadcast(&c->turn);
}

static void *write_windows(void *arg)
{
	struct capture *c = arg;
	int at = 0;

	pthread_mutex_lock(&c->lock);
	for (;; at ^= 1) {
		struct capture_buffer *b = &c->buffer[at];
		struct err e = ERR_INIT;
		double start;

		while (b->state != BUFFER_READY && !c->ending)
			pthread_cond_wait(&c->turn, &c->lock);
		if (b->state != BUFFER_READY || c->err->code)
			break;
		pthread_mutex_unlock(&c->lock);
		start = log_seconds();
		write_window(c, b, &e);
		pthread_mutex_lock(&c->lock);
		b->state = BUFFER_FREE;
		work_done(c, &e, start);
	}
	c->written = true;
	pthread_cond_broadcast(&c->turn);
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

/* A shard that was handed over is whole: it is published whatever has happened to others. */
static void *publish_shards(void *arg)
{
	struct capture *c = arg;
	struct err e = ERR_INIT;
	double start = log_seconds();

	if (c->begin)
		c->begin(c->ctx, &e);
	pthread_mutex_lock(&c->lock);
	work_done(c, &e, start);
	for (;;) {
		struct shard_writer *w;

		while (!c->whole && !c->written)
			pthread_cond_wait(&c->turn, &c->lock);
		w = c->whole;
		if (!w)
			break;
		pthread_mutex_unlock(&c->lock);
		start = log_seconds();
		e = (struct err)ERR_INIT;
		finish_shard(c, w, &e);
		shard_abort(w);
		free(w);
		pthread_mutex_lock(&c->lock);
		c->whole = NULL;
		work_done(c, &e, start);
	}
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

/* From here on mem_aligned gives pages that nothing else has a part of. */
#define APART ((size_t)4 << 20)

static bool may_pin(const struct capture *c)
{
	return c->dev && c->dev->be->pin && !c->spill;
}

static void *room(const struct capture *c, size_t bytes, struct err *e)
{
	if (may_pin(c))
		bytes = (bytes / APART + 1) * APART;
	return c->spill ? spill_map(bytes, e) : mem_aligned(bytes, e);
}

static void give_room(const struct capture *c, void *p, size_t bytes)
{
	if (c->spill)
		spill_unmap(p, bytes);
	else
		free(p);
}

/* The first `n` of the buffers' four parts are pinned. */
static void unpin(struct capture *c, int n)
{
	for (int i = 0; i < n; i++)
		c->dev->be->unpin(c->dev,
				  i % 2 ? c->buffer[i / 2].last : c->buffer[i / 2].states);
}

/* Without pages that stay where they are copies are slower, and the device waits for them. */
static void pin(struct capture *c)
{
	struct err e = ERR_INIT;
	int n = 0;

	while (n < 4 && !c->dev->be->pin(c->dev,
					 n % 2 ? c->buffer[n / 2].last : c->buffer[n / 2].states,
					 n % 2 ? c->last_bytes : c->states_bytes, &e))
		n++;
	c->pinned = n == 4;
	if (c->pinned)
		return;
	unpin(c, n);
	log_warn("the buffers of captured states are not pinned, which makes the device wait for "
		 "them: %s",
		 e.text);
}

static void release(struct capture *c)
{
	if (c->pinned)
		unpin(c, 4);
	c->pinned = false;
	for (int i = 0; i < 2; i++) {
		give_room(c, c->buffer[i].states, c->states_bytes);
		give_room(c, c->buffer[i].last, c->last_bytes);
	}
	if (c->writer)
		shard_abort(c->writer);
	free(c->writer);
	free(c->err);
	memset(c->buffer, 0, sizeof c->buffer);
	c->writer = NULL;
	c->err = NULL;
}

static void end_threads(struct capture *c, bool now)
{
	pthread_mutex_lock(&c->lock);
	c->ending = true;
	if (now && !c->err->code)
		c->err->code = EXIT_FAILED;
	pthread_cond_broadcast(&c->turn);
	pthread_mutex_unlock(&c->lock);
	pthread_join(c->thread, NULL);
	if (c->started)
		pthread_join(c->publisher, NULL);
	pthread_mutex_destroy(&c->lock);
	pthread_cond_destroy(&c->turn);
	c->started = false;
}

static int start_threads(struct capture *c, struct err *e)
{
	int rc;

	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->turn, NULL);
	rc = pthread_create(&c->thread, NULL, write_windows, c);
	if (!rc) {
		rc = pthread_create(&c->publisher, NULL, publish_shards, c);
		c->started = !rc;
		if (rc)
			end_threads(c, true);
	} else {
		pthread_mutex_destroy(&c->lock);
		pthread_cond_destroy(&c->turn);
	}
	return rc ? err_fail(e, "cannot start the writing threads: %s", strerror(rc)) : 0;
}

int capture_open(struct capture *c, int64_t window, struct err *e)
{
	const struct geometry *g = &c->cache->g;
	size_t last = (size_t)window * (size_t)g->hidden * dtype_size(g->dtype);

	c->err = mem_calloc(1, sizeof *c->err, e);
	c->writer = mem_calloc(1, sizeof *c->writer, e);
	if (!c->err || !c->writer)
		goto bad;
	c->states_bytes = last * (size_t)g->nids;
	c->last_bytes = last;
	for (int i = 0; i < 2; i++) {
		c->buffer[i].states = room(c, c->states_bytes, e);
		c->buffer[i].last = room(c, c->last_bytes, e);
		if (!c->buffer[i].states || !c->buffer[i].last)
			goto bad;
	}
	if (may_pin(c))
		pin(c);
	if (!start_threads(c, e))
		return 0;
bad:
	release(c);
	return -1;
}

int capture_take(struct capture *c, int64_t first, int64_t n, struct capture_buffer **b,
		 struct err *e)
{
	struct capture_buffer *next = &c->buffer[c->next];
	double start = log_seconds();
	int rc = 0;

	pthread_mutex_lock(&c->lock);
	while (next->state != BUFFER_FREE && !c->err->code)
		pthread_cond_wait(&c->turn, &c->lock);
	if (c->err->code) {
		if (!e->code)
			*e = *c->err;
		rc = -1;
	} else {
		next->state = BUFFER_FILLING;
		next->first = first;
		next->n = n;
		c->next ^= 1;
		*b = next;
	}
	pthread_mutex_unlock(&c->lock);
	c->waited += log_seconds() - start;
	return rc;
}

void capture_give(struct capture *c, struct capture_buffer *b)
{
	pthread_mutex_lock(&c->lock);
	b->state = BUFFER_READY;
	pthread_cond_broadcast(&c->turn);
	pthread_mutex_unlock(&c->lock);
}

int capture_close(struct capture *c, struct err *e)
{
	double start = log_seconds();
	int rc = 0;

	if (!c->started)
		return 0;
	end_threads(c, false);
	c->waited += log_seconds() - start;
	if (c->err->code) {
		if (!e->code)
			*e = *c->err;
		rc = -1;
	}
	release(c);
	return rc;
}

void capture_abort(struct capture *c)
{
	if (c->started)
		end_threads(c, true);
	release(c);
}

uint64_t capture_bytes(struct capture *c)
{
	uint64_t bytes;

	pthread_mutex_lock(&c->lock);
	bytes = c->bytes;
	pthread_mutex_unlock(&c->lock);
	return bytes;
}
