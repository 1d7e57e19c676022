/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_comm: what the sources of the NCCL transport share, and nobody else. */
#ifndef DSPARK_NCCL_COMM_H
#define DSPARK_NCCL_COMM_H

#include <cuda_runtime.h>
#include <time.h>

#include "comm.h"
#include "nccl_library.h"
#include "rendezvous.h"

#define NCCL_SCRATCH ((size_t)1 << 20)	/* for what lies in host memory, on both sides */

/* What the communicators of a process share; goes with the last of them. */
struct process {
	struct rendezvous meeting;	/* .name NULL: none */
	int ordinal;			/* of the device */
	struct nccl *first;
	bool failed;			/* abort was called */
	double looked;			/* for ranks that have failed, at that time */
};

struct nccl {
	struct process *process;
	struct nccl *next;
	ncclComm_t comm;		/* NULL: not yet, or aborted */
	cudaStream_t stream;
	cudaEvent_t event;		/* of what is waited for now */
	char *host, *device;		/* NCCL_SCRATCH bytes each, the first pinned */
	struct gather *gathers;		/* all-gathers under way, in order */
};

/* An all-gather under way, in rounds of at most comm_cut bytes of each part. */
struct gather {
	struct gather *next;
	char *out;
	const char *in;
	uint64_t *len, most, at;	/* [world]; the longest; where the next round begins */
	bool equal, given;		/* given: the stream has all of it, and the event */
	cudaEvent_t event;
	double start;
};

static inline struct nccl *of(const struct comm *c)
{
	return c->state;
}

/* What a call came back with: 0, or -1 with `e` set. */
int nccl_cuda(cudaError_t rc, const char *what, struct err *e);
int nccl_called(const struct comm *c, ncclResult_t r, const char *what, struct err *e);

/* A call of NCCL, which may never come back, as part of `what`. 0 or -1. */
#define CALL(c, call, what, e) (watchdog_enter((c)->dog, what), nccl_called(c, call, what, e))

int nccl_group_end(struct comm *c, int rc, const char *what, struct err *e);

struct wait {
	const char *what;		/* "an all-gather" */
	double begun;			/* what is waited for, which may be before the wait */
	double start, last, waited;	/* seconds */
	struct timespec pause;
};

struct wait nccl_wait_for(const char *what);
/* Until the communicator may be called again: what it was given is in the stream. */
int nccl_wait_ready(struct comm *c, struct wait *w, struct err *e);
/* The same after all-gathers that have only begun; to be called before anything else is. */
int nccl_give_all(struct comm *c, struct wait *w, struct err *e);
/* Until the stream has done all that is in it. */
int nccl_wait_stream(struct comm *c, struct wait *w, struct err *e);

/* Of struct transport. */
int nccl_barrier(struct comm *c, struct err *e);
int nccl_allreduce(struct comm *c, int64_t *v, int n, enum comm_op op, struct err *e);
int nccl_bcast(struct comm *c, void *buf, uint64_t bytes, int root, struct err *e);
int nccl_gather(struct comm *c, const void *buf, uint64_t bytes, int root, char **out,
		uint64_t *len, struct err *e);

#endif
