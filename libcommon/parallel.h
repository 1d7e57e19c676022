/* SPDX-License-Identifier: Apache-2.0 */
/* parallel: the same work over many indices on a few threads. */
#ifndef DSPARK_PARALLEL_H
#define DSPARK_PARALLEL_H

#include <stdint.h>

struct err;

/*
 * Calls work(ctx, i, e) once for each i in [0, n), in any order, on up to `threads` threads (the
 * caller's among them). The first failure ends the hand-out of indices and is the result. Fewer
 * threads than asked for are no failure.
 */
int parallel_each(int64_t n, int threads, int (*work)(void *ctx, int64_t i, struct err *e),
		  void *ctx, struct err *e);

/* Threads that keep a disk and the hashing busy: the processors online, at least 2, at most 16. */
int parallel_threads(void);

#endif
