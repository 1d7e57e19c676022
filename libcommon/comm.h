/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm: ranks and collectives. Interface only; kernels/comm_*.c implement it (self, mpi, nccl),
 * kernels/comm.c opens one by name.
 *
 * All calls of a communicator come from the thread that opened it, in the same order on every rank.
 * Waiting ranks sleep or yield. After a failure a rank calls `abort`, so that no peer waits for
 * ever: nothing else of the communicator is usable, and buffers of what was under way are still
 * the transport's. Counts are in rows of `row` bytes; transfers are cut at 1 GiB. Buffers are host
 * memory unless the transport says `device_buffers`.
 */
#ifndef DSPARK_COMM_H
#define DSPARK_COMM_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;
struct comm;
struct watchdog;

enum comm_op { COMM_MAX, COMM_MIN, COMM_SUM };

/* An all-gather under way. */
struct comm_request {
	void *state;			/* the transport's; NULL = ended */
};

struct transport {
	const char *name;		/* "self", "mpi", "nccl" */
	/*
	 * false: ranks are told, not connected (--rank, torchrun without NCCL); collectives of
	 * world > 1 are refused
	 */
	bool collective;
	bool device_buffers;		/* all-gather and alltoallv take device memory */

	void (*close)(struct comm *c);
	void (*abort)(struct comm *c, int code);	/* ends every rank; may not return */
	int (*barrier)(struct comm *c, struct err *e);
	/* in place */
	int (*allreduce)(struct comm *c, int64_t *v, int n, enum comm_op op, struct err *e);
	int (*bcast)(struct comm *c, void *buf, uint64_t bytes, int root, struct err *e);
	/*
	 * Root receives every rank's bytes: out[world] malloc'ed buffers, len[world]; NULL
	 * elsewhere.
	 */
	int (*gather)(struct comm *c, const void *buf, uint64_t bytes, int root, char **out,
		      uint64_t *len, struct err *e);
	/*
	 * All-gather of parts of any length, 0 too: rank i gives len[i] bytes, and out receives the
	 * parts in rank order without gaps. len[world] is the same on every rank and may go when
	 * the call returns; `in` may be this rank's own part of out. The buffers belong to the
	 * transport until the all-gather has ended. Several may be under way, other calls between
	 * them: starts are in the same order on every rank, ends in any.
	 */
	int (*allgather_start)(struct comm *c, struct comm_request *r, void *out,
			       const uint64_t *len, const void *in, struct err *e);
	/*
	 * Makes progress; with `wait` until the end, sleeping. *done: ended, r may be used again.
	 * Without `wait` it neither stops nor times out.
	 */
	int (*allgather_end)(struct comm *c, struct comm_request *r, bool wait, bool *done,
			     struct err *e);
	/* Rows to and from each rank, consecutive in rank order. */
	int (*alltoallv)(struct comm *c, void *out, const int64_t *out_rows, const void *in,
			 const int64_t *in_rows, uint64_t row, struct err *e);
	/* Ranks of one colour, ordered by key, form `out`, closed by close. */
	int (*split)(struct comm *c, struct comm *out, int colour, int key, struct err *e);
};

struct comm {
	const struct transport *t;
	int rank, world;
	int local_rank, local_size;	/* on this host; 0 and 1 where unknown */
	const char *started;		/* what started ranks that are not connected, else NULL */
	/*
	 * How waiting ends, apart from success; EXIT_FAILED each. Set by whoever opened the
	 * communicator, and handed on by split. A process that was stopped did not wait.
	 */
	double timeout;			/* seconds that one wait may last; 0 = for ever */
	const volatile sig_atomic_t *stop;	/* nonzero there ends a wait; may be NULL */
	struct watchdog *dog;		/* ends calls that never come back; NULL = nobody does */
	void *state;
};

#endif
