/* SPDX-License-Identifier: Apache-2.0 */
/*
 * capture: from the states of a window to published shards, behind the compute.
 *
 * Two buffers of captured states go round: the forward fills one while a thread hashes and writes
 * the other. Rows arrive in ascending order, so one shard is open at a time, while a second thread
 * publishes the one before, and memory is bounded by the window, never by a shard.
 */
#ifndef DSPARK_CAPTURE_H
#define DSPARK_CAPTURE_H

#include <jansson.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend.h"
#include "cache.h"

struct err;
struct tokens;

enum nonfinite { NONFINITE_STOP, NONFINITE_QUARANTINE };

/*
 * The states of one window: [tokens, L*H] and [tokens, H] in the cache dtype, rows of the data set
 * one after another without padding.
 */
struct capture_buffer {
	void *states, *last;
	int64_t first, n;		/* rows */
	int state;			/* private */
};

struct capture {
	const struct cache *cache;
	const struct tokens *tokens;
	const int64_t *ids;		/* layer ids, for messages */
	enum nonfinite nonfinite;
	/*
	 * Both are called by the publishing thread: begin (may be NULL) once before any shard is
	 * published, its failure is the capture's; published with each `shard` record (a reference
	 * is given).
	 */
	int (*begin)(void *ctx, struct err *e);
	void (*published)(void *ctx, json_t *record);
	void *ctx;
	bool spill;			/* the buffers lie in files (spill.h) */
	struct device *dev;		/* that stores to the buffers; NULL: of host memory */

	struct capture_buffer buffer[2];
	size_t states_bytes, last_bytes;	/* of one */
	pthread_t thread, publisher;
	pthread_mutex_t lock;
	pthread_cond_t turn;
	bool started, ending;
	bool pinned;			/* the buffers are, for dev */
	bool written;			/* the writing thread has ended */
	struct err *err;		/* of either thread, under lock */
	struct shard_writer *writer;	/* the open shard: the writing thread's own */
	struct shard_writer *whole;	/* full, not published yet; under lock */
	int next;			/* buffer the forward fills next */

	/* For the summary; while the threads run, under lock. */
	double busy, waited;	/* seconds the threads worked, and the forward waited for them */
	uint64_t bytes;
	int64_t shards, quarantined;
};

/*
 * Allocates two buffers of `window` tokens and starts the threads. The options above `buffer` are
 * set by the caller before.
 */
int capture_open(struct capture *c, int64_t window, struct err *e);

/*
 * The buffer to fill for rows [first, first + n): waits until one is free; -1 when a thread has
 * failed (its error is given).
 */
int capture_take(struct capture *c, int64_t first, int64_t n, struct capture_buffer **b,
		 struct err *e);
/* Hands it to the writing thread. */
void capture_give(struct capture *c, struct capture_buffer *b);

/*
 * Waits for everything handed over and for what `begin` started, ends the threads, gives the first
 * error of theirs. The open shard, if rows are missing, is dropped.
 */
int capture_close(struct capture *c, struct err *e);
/*
 * Ends the threads after the current window, `begin` and whole shards, which are published still;
 * drops the open shard. Legal on a zeroed or closed capture.
 */
void capture_abort(struct capture *c);

/* Bytes published so far; from any thread between open and close. */
uint64_t capture_bytes(struct capture *c);

#endif
