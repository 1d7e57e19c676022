/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The NCCL transport: ranks with a GPU each. The library is opened when the first connection is.
 *
 * Communicators never block (ncclConfig_t.blocking = 0): a call of NCCL says what is to be done, a
 * thread of NCCL connects peers and puts kernels into the stream, and ncclCommGetAsyncError tells
 * when that has happened. Only then may the communicator be called again, or anything be put behind
 * it in the stream. Every wait here therefore asks for both, the communicator's state and an event
 * of its stream, between sleeps, so that it hears a signal, an error and the end of its time.
 *
 * Each communicator has a stream. Two of them may be under way in another order on another rank,
 * since an all-gather begins when its rank has read its part: one stream for all could then never
 * end. For the same reason starting an all-gather does not wait until peers are connected.
 *
 * All-gathers of equal parts are NCCL's own, all others a group of broadcasts: along a ring each
 * part enters a node once, where sends from each to each would bring it once for every rank there.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <cuda_runtime.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "comm_nccl.h"
#include "err.h"
#include "file.h"
#include "kernels.h"
#include "log.h"
#include "mem.h"
#include "nccl_comm.h"
#include "watchdog.h"

/* Waiting: at first without sleep, then with sleeps from the shortest to the longest (ns). */
#define AWAKE 200e-6
#define SLEEP_SHORTEST 5000L
#define SLEEP_LONGEST 2000000L
#define LOOK_EVERY 0.5		/* seconds between looks for ranks that have failed */
#define CLOSE_MOST 60.0		/* seconds that peers may take to close */
#define ABORT_MOST 10		/* and this rank to give up what is under way */

static const struct transport transport;

int nccl_cuda(cudaError_t rc, const char *what, struct err *e)
{
	if (rc == cudaSuccess)
		return 0;
	cudaGetLastError();
	return err_fail(e, "%s failed in CUDA: %s", what, cudaGetErrorString(rc));
}

static int said(const struct comm *c, ncclResult_t r, const char *what, struct err *e)
{
	const char *last;

	if (r == ncclSuccess || r == ncclInProgress)
		return 0;
	last = nccl.GetLastError(of(c) ? of(c)->comm : NULL);
	return err_fail(e, "%s failed in NCCL: %s%s%s", what, nccl.GetErrorString(r),
			last && *last ? ": " : "", last ? last : "");
}

int nccl_called(const struct comm *c, ncclResult_t r, const char *what, struct err *e)
{
	watchdog_leave(c->dog);
	return said(c, r, what, e);
}

/* 1: the communicator may be called, 0: it is still at its last call, -1: it has failed. */
static int is_ready(struct comm *c, const char *what, struct err *e)
{
	ncclResult_t state = ncclSuccess;

	if (CALL(c, nccl.CommGetAsyncError(of(c)->comm, &state), what, e) ||
	    said(c, state, what, e))
		return -1;
	return state != ncclInProgress;
}

static int has_passed(cudaEvent_t event, const char *what, struct err *e)
{
	cudaError_t rc = cudaEventQuery(event);

	if (rc != cudaErrorNotReady)
		return nccl_cuda(rc, what, e) ? -1 : 1;
	cudaGetLastError(); /* it is kept as an error, which it is not */
	return 0;
}

/* ---- waiting --------------------------------------------------------------------------------- */

struct wait nccl_wait_for(const char *what)
{
	double now = log_seconds();

	return (struct wait){ what, now, now, now, 0, { 0, SLEEP_SHORTEST } };
}

static int too_long(const struct wait *w, struct err *e)
{
	double age = w->last - w->begun;
	char begun[48] = "";

	if (age > w->waited + 0.1)
		snprintf(begun, sizeof begun, " begun %.*f s ago", age < 10, age);
	return err_fail(e,
			"waited %.*f s for %s%s: look at the other ranks, and give the same "
			"command again or plan with a larger dist_env.timeout_minutes",
			w->waited < 10, w->waited, w->what, begun);
}

/* What NCCL notices late or never: ranks that have said that they end. */
static int look_for_failed(struct process *p, const struct wait *w, struct err *e)
{
	int rank;

	if (!p || !p->meeting.name || w->last - p->looked < LOOK_EVERY)
		return 0;
	p->looked = w->last;
	rank = rendezvous_failed(&p->meeting);
	if (rank < 0)
		return 0;
	return err_fail(e, "rank %d has failed, while this one waited for %s: what it says is the "
			   "cause; the same command goes on", rank, w->what);
}

/* After a look that found nothing: sleeps, or says why that would be for nothing. */
static int wait_more(const struct comm *c, struct wait *w, struct process *p, struct err *e)
{
	double now = log_seconds(), step = now - w->last;

	w->last = now;
	w->waited += step < 1 ? step : 1; /* more: the process was stopped */
	if (c->stop && *c->stop)
		return err_fail(e, "stopped by a signal while waiting for other ranks; published "
				   "shards are safe, the same command goes on");
	if (c->timeout > 0 && w->waited > c->timeout)
		return too_long(w, e);
	if (look_for_failed(p, w, e))
		return -1;
	if (now - w->start < AWAKE) {
		sched_yield();
		return 0;
	}
	nanosleep(&w->pause, NULL);
	w->pause.tv_nsec += w->pause.tv_nsec / 8;
	if (w->pause.tv_nsec > SLEEP_LONGEST)
		w->pause.tv_nsec = SLEEP_LONGEST;
	return 0;
}

int nccl_wait_ready(struct comm *c, struct wait *w, struct err *e)
{
	int r;

	while (!(r = is_ready(c, w->what, e)))
		if (wait_more(c, w, of(c)->process, e))
			return -1;
	return r < 0 ? -1 : 0;
}

/* Until the stream has passed `event`; NCCL is asked, too, or its errors would never be heard. */
static int wait_event(struct comm *c, struct wait *w, cudaEvent_t event, struct err *e)
{
	int r;

	while (!(r = has_passed(event, w->what, e)))
		if (is_ready(c, w->what, e) < 0 || wait_more(c, w, of(c)->process, e))
			return -1;
	return r < 0 ? -1 : 0;
}

int nccl_wait_stream(struct comm *c, struct wait *w, struct err *e)
{
	struct nccl *n = of(c);

	return nccl_wait_ready(c, w, e) ||
			       nccl_cuda(cudaEventRecord(n->event, n->stream), w->what, e) ||
			       wait_event(c, w, n->event, e)
		       ? -1
		       : 0;
}

/* ---- all-gathers ----------------------------------------------------------------------------- */

int nccl_group_end(struct comm *c, int rc, const char *what, struct err *e)
{
	return CALL(c, nccl.GroupEnd(), what, e) || rc ? -1 : 0;
}

/* The parts' bytes from g->at on, of those that have any there. */
static int broadcast_parts(struct comm *c, struct gather *g, const char *what, struct err *e)
{
	struct nccl *n = of(c);
	char *part = g->out;
	int rc = CALL(c, nccl.GroupStart(), what, e);

	if (rc)
		return -1;
	for (int i = 0; i < c->world && !rc; part += g->len[i++]) {
		uint64_t left = g->len[i] > g->at ? g->len[i] - g->at : 0;
		char *to = part + g->at;

		if (left)
			rc = CALL(c,
				  nccl.Broadcast(i == c->rank ? g->in + g->at : to, to,
						 left < comm_cut ? left : comm_cut, ncclChar, i,
						 n->comm, n->stream),
				  what, e);
	}
	return nccl_group_end(c, rc, what, e);
}

static int next_round(struct comm *c, struct gather *g, const char *what, struct err *e)
{
	struct nccl *n = of(c);
	int rc = g->equal ? CALL(c,
				 nccl.AllGather(g->in, g->out, g->most, ncclChar, n->comm,
						n->stream),
				 what, e)
			  : broadcast_parts(c, g, what, e);

	g->at += g->equal ? g->most : comm_cut;
	return rc;
}

/* Gives NCCL as much as it takes now: 1 = it has everything, 0 = not yet, -1. */
static int give(struct comm *c, const char *what, struct err *e)
{
	struct gather *g = of(c)->gathers;
	int r = is_ready(c, what, e);

	while (r > 0 && g) {
		if (g->at < g->most) {
			r = next_round(c, g, what, e) ? -1 : is_ready(c, what, e);
			continue;
		}
		if (!g->given && nccl_cuda(cudaEventRecord(g->event, of(c)->stream), what, e))
			return -1;
		g->given = true;
		g = g->next;
	}
	return r;
}

/* Until the communicator may be called for something else. */
int nccl_give_all(struct comm *c, struct wait *w, struct err *e)
{
	int r;

	if (nccl_cuda(cudaSetDevice(of(c)->process->ordinal), w->what, e))
		return -1;
	while (!(r = give(c, w->what, e)))
		if (wait_more(c, w, of(c)->process, e))
			return -1;
	return r < 0 ? -1 : 0;
}

static void gather_free(struct nccl *n, struct gather *g)
{
	struct gather **at = &n->gathers;

	while (*at && *at != g)
		at = &(*at)->next;
	if (*at)
		*at = g->next;
	if (g->event)
		cudaEventDestroy(g->event);
	free(g->len);
	free(g);
}

static struct gather *gather_make(struct comm *c, void *out, const uint64_t *len, const void *in,
				  struct err *e)
{
	struct gather *g = mem_calloc(1, sizeof *g, e);

	if (!g)
		return NULL;
	*g = (struct gather){ .out = out, .in = in, .equal = true, .start = log_seconds() };
	g->len = mem_calloc((size_t)c->world, sizeof *len, e);
	if (!g->len ||
	    nccl_cuda(cudaEventCreateWithFlags(&g->event, cudaEventDisableTiming), "an event", e)) {
		gather_free(of(c), g);
		return NULL;
	}
	for (int i = 0; i < c->world; i++) {
		g->len[i] = len[i];
		g->most = len[i] > g->most ? len[i] : g->most;
		g->equal = g->equal && len[i] == len[0] && len[i] <= comm_cut;
	}
	return g;
}

#define GATHER "an all-gather"

static int nccl_allgather_start(struct comm *c, struct comm_request *r, void *out,
				const uint64_t *len, const void *in, struct err *e)
{
	struct gather *g, **end = &of(c)->gathers;

	r->state = NULL;
	if (nccl_cuda(cudaSetDevice(of(c)->process->ordinal), GATHER, e))
		return -1;
	g = gather_make(c, out, len, in, e);
	if (!g)
		return -1;
	while (*end)
		end = &(*end)->next;
	*end = g;
	r->state = g;
	/* where it fails, what has begun is the transport's until abort */
	return give(c, GATHER, e) < 0 ? -1 : 0;
}

static int gather_wait(struct comm *c, struct gather *g, struct err *e)
{
	struct wait w = nccl_wait_for(GATHER);

	w.begun = g->start;
	return nccl_give_all(c, &w, e) || wait_event(c, &w, g->event, e) ? -1 : 0;
}

static int nccl_allgather_end(struct comm *c, struct comm_request *r, bool wait, bool *done,
			      struct err *e)
{
	struct gather *g = r->state;
	int ended = -1;

	*done = true;
	if (!g)
		return 0;
	if (wait)
		ended = gather_wait(c, g, e) ? -1 : 1;
	else if (!nccl_cuda(cudaSetDevice(of(c)->process->ordinal), GATHER, e) &&
		 give(c, GATHER, e) >= 0)
		ended = g->given ? has_passed(g->event, GATHER, e) : 0;
	*done = ended > 0;
	if (ended > 0) {
		gather_free(of(c), g);
		r->state = NULL;
	}
	return ended < 0 ? -1 : 0;
}

/* ---- rows from each to each ------------------------------------------------------------------ */

/* Rows from or to a peer, as bytes. */
struct span {
	char *p;
	uint64_t bytes;
};

static struct span span_of(const void *p, const int64_t *rows, int rank, uint64_t row)
{
	uint64_t before = 0;

	for (int i = 0; i < rank; i++)
		before += (uint64_t)rows[i];
	return (struct span){ (char *)p + before * row, (uint64_t)rows[rank] * row };
}

static uint64_t cut(uint64_t bytes, uint64_t at)
{
	return bytes <= at ? 0 : bytes - at < comm_cut ? bytes - at : comm_cut;
}

struct exchanged {
	void *out;
	const void *in;
	const int64_t *out_rows, *in_rows;
	uint64_t row;
};

/*
 * Bytes [at, at + comm_cut) of what each pair has for each other: both sides of a pair have them
 * in the same round. *more: there are bytes behind them.
 */
static int exchange_round(struct comm *c, const struct exchanged *x, uint64_t at, bool *more,
			  const char *what, struct err *e)
{
	struct nccl *n = of(c);
	int rc = 0;

	if (CALL(c, nccl.GroupStart(), what, e))
		return -1;
	for (int i = 1; i < c->world && !rc; i++) {
		int from = (c->rank - i + c->world) % c->world, to = (c->rank + i) % c->world;
		struct span r = span_of(x->out, x->out_rows, from, x->row),
			    s = span_of(x->in, x->in_rows, to, x->row);

		*more = *more || (r.bytes > at && r.bytes - at > comm_cut) ||
			(s.bytes > at && s.bytes - at > comm_cut);
		if (cut(s.bytes, at))
			rc = CALL(c,
				  nccl.Send(s.p + at, cut(s.bytes, at), ncclChar, to, n->comm,
					    n->stream),
				  what, e);
		if (!rc && cut(r.bytes, at))
			rc = CALL(c,
				  nccl.Recv(r.p + at, cut(r.bytes, at), ncclChar, from, n->comm,
					    n->stream),
				  what, e);
	}
	return nccl_group_end(c, rc, what, e);
}

static int nccl_alltoallv(struct comm *c, void *out, const int64_t *out_rows, const void *in,
			  const int64_t *in_rows, uint64_t row, struct err *e)
{
	struct exchanged x = { out, in, out_rows, in_rows, row };
	struct wait w = nccl_wait_for("an exchange of rows");
	struct span to = span_of(out, out_rows, c->rank, row),
		    from = span_of(in, in_rows, c->rank, row);
	bool more = true;

	if (to.bytes != from.bytes || out_rows[c->rank] != in_rows[c->rank])
		return err_fail(e, "rank %d expects %lld rows from itself but sends %lld", c->rank,
				(long long)out_rows[c->rank], (long long)in_rows[c->rank]);
	if (nccl_give_all(c, &w, e))
		return -1;
	if (to.bytes && nccl_cuda(cudaMemcpyAsync(to.p, from.p, to.bytes, cudaMemcpyDeviceToDevice,
					     of(c)->stream),
			     w.what, e))
		return -1;
	for (uint64_t at = 0; more; at += comm_cut) {
		more = false;
		if (exchange_round(c, &x, at, &more, w.what, e) || nccl_wait_ready(c, &w, e))
			return -1;
	}
	return nccl_wait_stream(c, &w, e);
}

/* ---- the end --------------------------------------------------------------------------------- */

static void unlink_of(struct nccl *n)
{
	struct nccl **at = &n->process->first;

	while (*at != n)
		at = &(*at)->next;
	*at = n->next;
}

static void nccl_free(struct nccl *n)
{
	struct process *p = n->process;

	while (n->gathers)
		gather_free(n, n->gathers);
	if (n->event)
		cudaEventDestroy(n->event);
	if (n->stream)
		cudaStreamDestroy(n->stream);
	if (n->host)
		cudaFreeHost(n->host);
	cudaFree(n->device);
	unlink_of(n);
	free(n);
	if (p->first)
		return;
	rendezvous_release(&p->meeting);
	free(p);
}

/* The last words of a communicator that has done its work, for which peers are needed, too. */
static int finalise(struct comm *c)
{
	struct wait w = nccl_wait_for("the end of a connection");
	struct err e = ERR_INIT;

	c->timeout = c->timeout > 0 && c->timeout < CLOSE_MOST ? c->timeout : CLOSE_MOST;
	c->stop = NULL;
	return nccl_give_all(c, &w, &e) || nccl_wait_stream(c, &w, &e) ||
			       CALL(c, nccl.CommFinalize(of(c)->comm), w.what, &e) ||
			       nccl_wait_ready(c, &w, &e)
		       ? -1
		       : 0;
}

static void nccl_close(struct comm *c)
{
	struct nccl *n = of(c);
	struct watchdog *dog = c->dog;
	bool well;

	if (!n)
		return;
	well = n->comm && !n->process->failed && !finalise(c);
	watchdog_enter(dog, "the end of a connection");
	if (n->comm) {
		if (well)
			nccl.CommDestroy(n->comm);
		else
			nccl.CommAbort(n->comm);
	}
	nccl_free(n);
	watchdog_leave(dog);
	memset(c, 0, sizeof *c);
}

static void *abort_all(void *arg)
{
	struct process *p = arg;

	cudaSetDevice(p->ordinal);
	for (struct nccl *n = p->first; n; n = n->next) {
		ncclComm_t comm = __atomic_exchange_n(&n->comm, NULL, __ATOMIC_ACQ_REL);

		if (comm)
			nccl.CommAbort(comm);
		if (n->stream)
			cudaStreamSynchronize(n->stream);
	}
	return NULL;
}

/*
 * The others are told by the directory; what runs on this device is ended, so that memory may go.
 * Where that takes too long the process ends at once: its launcher ends the others.
 */
static void nccl_abort(struct comm *c, int code)
{
	struct process *p = of(c)->process;
	struct timespec until;
	pthread_t thread;

	p->failed = true;
	if (p->meeting.name)
		rendezvous_fail(&p->meeting);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += ABORT_MOST;
	watchdog_enter(c->dog, "ending the other ranks");
	if (pthread_create(&thread, NULL, abort_all, p))
		abort_all(p);
	else if (pthread_timedjoin_np(thread, NULL, &until)) {
		file_abort_all();
		_exit(code);
	}
	watchdog_leave(c->dog);
}

/* ---- opening --------------------------------------------------------------------------------- */

/* A communicator of `like`'s process, without NCCL's own part. */
static struct nccl *nccl_make(struct process *p, struct err *e)
{
	struct nccl *n = mem_calloc(1, sizeof *n, e);

	if (!n)
		return NULL;
	n->process = p;
	n->next = p->first;
	p->first = n;
	if (nccl_cuda(cudaSetDevice(p->ordinal), "the device", e) ||
	    nccl_cuda(cudaStreamCreateWithFlags(&n->stream, cudaStreamNonBlocking), "a stream",
		      e) ||
	    nccl_cuda(cudaEventCreateWithFlags(&n->event, cudaEventDisableTiming), "an event", e) ||
	    nccl_cuda(cudaHostAlloc((void **)&n->host, NCCL_SCRATCH, cudaHostAllocDefault),
		      "pinned host memory", e) ||
	    nccl_cuda(cudaMalloc((void **)&n->device, NCCL_SCRATCH), "device memory", e))
		return NULL; /* its process has it */
	memset(n->host, 0, NCCL_SCRATCH);
	return n;
}

static int split_off(struct comm *c, struct comm *out, int colour, int key, struct wait *w,
		     struct err *e)
{
	struct nccl *child = nccl_make(of(c)->process, e);

	/* NULL: like its parent. NCCL's own thread fills child->comm. */
	if (!child ||
	    CALL(c, nccl.CommSplit(of(c)->comm, colour, key, &child->comm, NULL), w->what, e) ||
	    nccl_wait_ready(c, w, e))
		return -1;
	out->state = child;
	if (!__atomic_load_n(&child->comm, __ATOMIC_ACQUIRE))
		return err_fail(e, "%s failed in NCCL: there is none", w->what);
	return nccl_wait_ready(out, w, e) ||
			       CALL(out, nccl.CommUserRank(child->comm, &out->rank), w->what, e) ||
			       CALL(out, nccl.CommCount(child->comm, &out->world), w->what, e)
		       ? -1
		       : 0;
}

/* Nothing may be under way in the parent; what failed goes with it. */
static int nccl_split(struct comm *c, struct comm *out, int colour, int key, struct err *e)
{
	struct wait w = nccl_wait_for("a new connection");
	struct comm made = { .t = &transport, .local_size = 1, .timeout = c->timeout,
			     .stop = c->stop, .dog = c->dog };

	if (nccl_give_all(c, &w, e) || nccl_wait_stream(c, &w, e) ||
	    split_off(c, &made, colour, key, &w, e))
		return -1;
	*out = made;
	return 0;
}

static const struct transport transport = {
	.name = "nccl",
	.collective = true,
	.device_buffers = true,
	.close = nccl_close,
	.abort = nccl_abort,
	.barrier = nccl_barrier,
	.allreduce = nccl_allreduce,
	.bcast = nccl_bcast,
	.gather = nccl_gather,
	.allgather_start = nccl_allgather_start,
	.allgather_end = nccl_allgather_end,
	.alltoallv = nccl_alltoallv,
	.split = nccl_split,
};

/* As the device is chosen in kernels/cuda, but no two ranks may share one. */
static int choose_device(struct process *p, const struct comm *c, struct err *e)
{
	int n = 0;
	cudaError_t rc = cudaGetDeviceCount(&n);

	if (rc != cudaSuccess || n < 1) {
		cudaGetLastError();
		return err_refuse(e,
				  "NCCL connects GPUs, but this process sees none (CUDA says "
				  "'%s'): run it on machines that have them, or plan with "
				  "--device cpu",
				  cudaGetErrorString(rc == cudaSuccess ? cudaErrorNoDevice : rc));
	}
	if (n > 1 && c->local_size > n)
		return err_refuse(e,
				  "there are %d ranks on this host but %d GPUs, and NCCL needs "
				  "one for each rank: start fewer ranks on a host, and plan for "
				  "as many",
				  c->local_size, n);
	p->ordinal = c->local_rank % n;
	return nccl_cuda(cudaSetDevice(p->ordinal), "the device", e);
}

static int missed(const struct process *p, struct err *e)
{
	char list[128];
	int n = p->meeting.name ? rendezvous_missing(&p->meeting, list, sizeof list) : 0;

	if (!p->meeting.name)
		return -1;
	if (p->meeting.rank)
		return err_context(e, "rank 0 has not been found in '%s'", p->meeting.dir);
	return n ? err_context(e, "rank%s %s %s not shown up in '%s'", n == 1 ? "" : "s", list,
			       n == 1 ? "has" : "have", p->meeting.dir)
		 : -1;
}

#define MEETING "the connection of all ranks"

/* Rank 0's id, from where all know it, or through the directory. */
static int find_id(struct comm *c, struct process *p, const struct nccl_place *place,
		   ncclUniqueId *id, struct wait *w, struct err *e)
{
	bool everywhere = getenv("NCCL_COMM_ID") && *getenv("NCCL_COMM_ID");
	bool got = c->rank == 0 || everywhere;

	_Static_assert(sizeof *id == RENDEZVOUS_BYTES, "what NCCL's ids take");
	if (got && CALL(c, nccl.GetUniqueId(id), MEETING, e))
		return -1;
	if (everywhere || c->world == 1)
		return 0;
	if (rendezvous_open(&p->meeting, place->dir, place->name, c->rank, c->world,
			    c->rank ? NULL : id, e))
		return -1;
	while (!got) {
		if (rendezvous_look(&p->meeting, &got, e))
			return -1;
		if (!got && wait_more(c, w, NULL, e))
			return missed(p, e);
	}
	memcpy(id, p->meeting.bytes, sizeof *id);
	return 0;
}

/* NCCL comes together in a thread of its own; rank 0 answers those who come late. */
static int come_together(struct comm *c, struct wait *w, struct err *e)
{
	struct rendezvous *m = &of(c)->process->meeting;
	double looked = 0;
	int r;

	while (!(r = is_ready(c, MEETING, e))) {
		bool got;

		if (m->name && !c->rank && w->last - looked > 0.02) {
			looked = w->last;
			if (rendezvous_look(m, &got, e))
				return -1;
		}
		if (wait_more(c, w, NULL, e))
			return c->rank ? -1 : missed(of(c)->process, e);
	}
	if (r > 0 && m->name)
		rendezvous_done(m);
	return r < 0 ? -1 : 0;
}

static int connect_all(struct comm *c, struct process *p, const struct nccl_place *place,
		       struct err *e)
{
	struct wait w = nccl_wait_for(MEETING);
	ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
	ncclUniqueId id;
	struct nccl *n;

	memset(&id, 0, sizeof id);
	config.blocking = 0;
	if (choose_device(p, c, e) || !(n = nccl_make(p, e)) ||
	    find_id(c, p, place, &id, &w, e))
		return -1;
	c->state = n;
	if (CALL(c, nccl.CommInitRankConfig(&n->comm, c->world, id, c->rank, &config), MEETING, e))
		return -1;
	return come_together(c, &w, e);
}

/* What the failed attempt leaves. */
static void give_up(struct process *p)
{
	p->failed = true;
	abort_all(p);
	while (p->first && p->first->next)
		nccl_free(p->first->next);
	if (p->first) {
		nccl_free(p->first);
	} else {
		rendezvous_release(&p->meeting);
		free(p);
	}
}

int comm_nccl_open(struct comm *c, const struct nccl_place *place, struct err *e)
{
	struct process *p = NULL;
	struct comm made = { .t = &transport,
			     .rank = c->rank,
			     .world = c->world,
			     .local_rank = c->local_rank,
			     .local_size = c->local_size,
			     .timeout = place->timeout,
			     .stop = place->stop,
			     .dog = place->dog };

	/*
	 * A kernel that is loaded when it first runs may wait for the whole device, and so for one
	 * of NCCL's that waits for a peer which waits for this rank.
	 */
	setenv("CUDA_MODULE_LOADING", "EAGER", 0);
	/* nor may streams that have nothing to do with each other share a queue of the device */
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
	/* here waiting is bounded, and rank 0 hands out its id while it connects */
	setenv("NCCL_COMM_BLOCKING", "0", 1);
	if (nccl_open(e) || !(p = mem_calloc(1, sizeof *p, e)))
		return -1;
	if (connect_all(&made, p, place, e)) {
		give_up(p);
		return -1;
	}
	if (c->t)
		c->t->close(c);
	*c = made;
	return 0;
}
