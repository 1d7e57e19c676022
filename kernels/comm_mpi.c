/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The MPI transport (MPI 3, FUNNELED). Every wait is a nonblocking operation that is tested and
 * slept on, so that ranks which wait for slower ones use no CPU, hear a signal and know when it is
 * enough; transfers are cut at comm_cut bytes, since counts are int and implementations have limits
 * of their own.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "err.h"
#include "kernels.h"
#include "log.h"
#include "mem.h"
#include "watchdog.h"

/*
 * A rank tests TRIES times before it sleeps, AWAKE times between sleeps that grow from the shortest
 * to the longest (ns). Often only tests move the data, a piece at a time: one that takes MOVED
 * seconds more than usual found some, and there will be more.
 */
#define TRIES 64
#define AWAKE 4
#define SLEEP_SHORTEST 2000L
#define SLEEP_LONGEST 5000000L
#define MOVED 4e-6

/* An all-gather under way lets other exchanges pass. */
#define TAG 7
#define TAG_ALLGATHER 8

struct mpi {
	MPI_Comm comm;
	bool world;	/* close also finalises MPI */
};

static const struct transport transport;

static MPI_Comm comm_of(const struct comm *c)
{
	return ((const struct mpi *)c->state)->comm;
}

static int check(int rc, const char *what, struct err *e)
{
	char text[MPI_MAX_ERROR_STRING] = "";
	int len = 0;

	if (rc == MPI_SUCCESS)
		return 0;
	MPI_Error_string(rc, text, &len);
	return err_fail(e, "%s failed in MPI: %s", what, text);
}

static int called(const struct comm *c, int rc, const char *what, struct err *e)
{
	watchdog_leave(c->dog);
	return check(rc, what, e);
}

/* A call of MPI, which may never come back, as part of `what`. 0 or -1. */
#define CALL(c, call, what, e) (watchdog_enter((c)->dog, what), called(c, call, what, e))

/* ---- waiting --------------------------------------------------------------------------------- */

#define EVERYBODY -1

/* An operation of MPI under way. */
struct request {
	MPI_Request r;
	int peer;		/* EVERYBODY: a collective, which does not say whom it waits for */
};

/* What is waited for together. */
struct flight {
	const char *what;	/* "an all-gather" */
	struct request *r;
	size_t n, cap;
	size_t landed;		/* the first that have ended */
	double start;
};

static void flight_release(struct flight *f)
{
	free(f->r);
	f->r = NULL;
	f->n = f->cap = f->landed = 0;
}

/* The rank here of one of the world, which is how users know it; MPI_UNDEFINED if it has none. */
static int rank_here(const struct comm *c, int known)
{
	MPI_Group here, all;
	int rank = MPI_UNDEFINED;

	MPI_Comm_group(comm_of(c), &here);
	MPI_Comm_group(MPI_COMM_WORLD, &all);
	MPI_Group_translate_ranks(all, 1, &known, here, &rank);
	MPI_Group_free(&here);
	MPI_Group_free(&all);
	return rank;
}

static bool awaits(const struct flight *f, int peer)
{
	for (size_t i = f->landed; i < f->n; i++)
		if (f->r[i].peer == peer)
			return true;
	return false;
}

/* "1, 3" into `list`; returns how many they are, 0 if that is not known. */
static int silent_peers(const struct comm *c, struct flight *f, char *list, size_t room)
{
	size_t len = 0;
	int done, n = 0, world = 0;

	*list = '\0';
	for (size_t i = f->landed; i < f->n; i++)
		if (MPI_Test(&f->r[i].r, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done)
			f->r[i].peer = EVERYBODY;
	MPI_Comm_size(MPI_COMM_WORLD, &world);
	for (int known = 0; known < world; known++) {
		int peer = rank_here(c, known);

		if (peer == MPI_UNDEFINED || !awaits(f, peer))
			continue;
		if (len + 16 < room)
			len += (size_t)snprintf(list + len, room - len, "%s%d", n ? ", " : "",
						known);
		else if (list[len - 1] != '.')
			len += (size_t)snprintf(list + len, room - len, ", ...");
		n++;
	}
	return n;
}

static int too_long(const struct comm *c, struct flight *f, double waited, struct err *e)
{
	double age = log_seconds() - f->start;
	char list[128], who[192] = "", begun[48] = "";
	int n;

	watchdog_enter(c->dog, f->what);
	n = silent_peers(c, f, list, sizeof list);
	watchdog_leave(c->dog);
	if (n)
		snprintf(who, sizeof who, ", and rank%s %s %s not answered", n == 1 ? "" : "s",
			 list, n == 1 ? "has" : "have");
	if (age > waited + 0.1)
		snprintf(begun, sizeof begun, " begun %.*f s ago", age < 10, age);
	return err_fail(e,
			"waited %.*f s for %s%s%s: look at %s, and give the same command again or "
			"plan with a larger dist_env.timeout_minutes",
			waited < 10, waited, f->what, begun, who,
			n == 1 ? "that rank" : n ? "those ranks" : "the other ranks");
}

static int patience(const struct comm *c, struct flight *f, double waited, struct err *e)
{
	if (c->stop && *c->stop)
		return err_fail(e, "stopped by a signal while waiting for other ranks; published "
				   "shards are safe, the same command goes on");
	if (c->timeout > 0 && waited > c->timeout)
		return too_long(c, f, waited, e);
	return 0;
}

/* How a rank waits: how often it tests before the next sleep, and for how long it sleeps then. */
struct rhythm {
	struct timespec pause;
	int idle;		/* tests that found nothing */
	bool slept;		/* just now; the first test then takes long anyway */
	double usual;		/* seconds of a test, about: much varies with the machine */
	double last, waited;	/* seconds */
};

/* Of this thread: tests may yield to other processes, or lose the processor, for any time. */
static double busy_seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* `took`: the last test, in busy seconds. */
static void rhythm_tested(struct rhythm *y, double took, bool done)
{
	double now = log_seconds(), step = now - y->last, slow = MOVED + 2 * y->usual;
	bool moved = done || took > (y->slept ? 3 * slow : slow);

	y->last = now;
	y->waited += step < 1 ? step : 1; /* more: the process was stopped */
	if (!y->slept)
		y->usual += moved ? MOVED / 64 : (took - y->usual) / 16;
	if (moved)
		y->pause.tv_nsec -= y->pause.tv_nsec / (y->slept ? 8 : 2);
	y->idle = moved ? 0 : y->idle + 1;
	y->slept = false;
}

static void rhythm_sleep(struct rhythm *y)
{
	nanosleep(&y->pause, NULL);
	y->pause.tv_nsec += y->pause.tv_nsec / 8 + 500;
	if (y->pause.tv_nsec > SLEEP_LONGEST)
		y->pause.tv_nsec = SLEEP_LONGEST;
	y->slept = true;
	y->idle = TRIES - AWAKE;
}

static int flight_wait(struct comm *c, struct flight *f, struct err *e)
{
	struct rhythm y = { .pause = { 0, SLEEP_SHORTEST }, .last = log_seconds() };

	while (f->landed < f->n) {
		double began = busy_seconds();
		int done;

		if (CALL(c, MPI_Test(&f->r[f->landed].r, &done, MPI_STATUS_IGNORE), f->what, e))
			return -1;
		f->landed += done != 0;
		rhythm_tested(&y, busy_seconds() - began, done);
		if (!done && patience(c, f, y.waited, e))
			return -1;
		if (y.idle >= TRIES)
			rhythm_sleep(&y);
	}
	return 0;
}

/* As many tests as a waiting rank makes before it sleeps. */
static int flight_poll(struct comm *c, struct flight *f, struct err *e)
{
	int one;

	for (int tries = 0; f->landed < f->n && tries < TRIES; tries++) {
		if (CALL(c, MPI_Test(&f->r[f->landed].r, &one, MPI_STATUS_IGNORE), f->what, e))
			return -1;
		f->landed += one != 0;
	}
	return 0;
}

/* Waits for what was put on the way, `rc` telling whether all was. */
static int flight_land(struct comm *c, struct flight *f, int rc, struct err *e)
{
	if (!rc)
		rc = flight_wait(c, f, e);
	flight_release(f);
	return rc;
}

/* One collective operation; `rc` and `r` as its start left them. */
static int land_one(struct comm *c, MPI_Request r, int rc, const char *what, struct err *e)
{
	struct request one = { r, EVERYBODY };
	struct flight f = { .what = what, .r = &one, .n = 1, .start = log_seconds() };

	return rc ? -1 : flight_wait(c, &f, e);
}

/* ---- collectives ----------------------------------------------------------------------------- */

static void mpi_close(struct comm *c)
{
	struct mpi *m = c->state;

	watchdog_enter(c->dog, "the end of a connection");
	if (m) {
		MPI_Comm_free(&m->comm);
		if (m->world)
			MPI_Finalize();
		free(m);
	}
	watchdog_leave(c->dog);
	memset(c, 0, sizeof *c);
}

static void mpi_abort(struct comm *c, int code)
{
	watchdog_enter(c->dog, "ending the other ranks");
	MPI_Abort(MPI_COMM_WORLD, code);
	watchdog_leave(c->dog);
}

static int mpi_barrier(struct comm *c, struct err *e)
{
	MPI_Request r = MPI_REQUEST_NULL;
	int rc = CALL(c, MPI_Ibarrier(comm_of(c), &r), "a barrier", e);

	return land_one(c, r, rc, "a barrier", e);
}

static int mpi_allreduce(struct comm *c, int64_t *v, int n, enum comm_op op, struct err *e)
{
	MPI_Op ops[] = { [COMM_MAX] = MPI_MAX, [COMM_MIN] = MPI_MIN, [COMM_SUM] = MPI_SUM };
	MPI_Request r = MPI_REQUEST_NULL;
	int rc = CALL(c, MPI_Iallreduce(MPI_IN_PLACE, v, n, MPI_INT64_T, ops[op], comm_of(c), &r),
		      "a reduction", e);

	return land_one(c, r, rc, "a reduction", e);
}

static int cut_at(uint64_t left)
{
	return (int)(left < comm_cut ? left : comm_cut);
}

static int mpi_bcast(struct comm *c, void *buf, uint64_t bytes, int root, struct err *e)
{
	char *p = buf;
	int n, rc = 0;

	for (; bytes && !rc; p += n, bytes -= (uint64_t)n) {
		MPI_Request r = MPI_REQUEST_NULL;

		n = cut_at(bytes);
		rc = CALL(c, MPI_Ibcast(p, n, MPI_BYTE, root, comm_of(c), &r), "a broadcast", e);
		rc = land_one(c, r, rc, "a broadcast", e);
	}
	return rc;
}

/* ---- from rank to rank ----------------------------------------------------------------------- */

static MPI_Request *flight_add(struct flight *f, int peer, struct err *e)
{
	if (mem_grow(&f->r, &f->cap, f->n + 1, sizeof *f->r, e))
		return NULL;
	f->r[f->n] = (struct request){ MPI_REQUEST_NULL, peer };
	return &f->r[f->n++].r;
}

static int flight_send(struct flight *f, struct comm *c, const char *p, uint64_t bytes, int peer,
		       int tag, struct err *e)
{
	uint64_t off;

	for (off = 0; off < bytes; off += (uint64_t)cut_at(bytes - off)) {
		MPI_Request *r = flight_add(f, peer, e);

		if (!r || CALL(c,
			       MPI_Isend(p + off, cut_at(bytes - off), MPI_BYTE, peer, tag,
					 comm_of(c), r),
			       f->what, e))
			return -1;
	}
	return 0;
}

static int flight_receive(struct flight *f, struct comm *c, char *p, uint64_t bytes, int peer,
			  int tag, struct err *e)
{
	uint64_t off;

	for (off = 0; off < bytes; off += (uint64_t)cut_at(bytes - off)) {
		MPI_Request *r = flight_add(f, peer, e);

		if (!r || CALL(c,
			       MPI_Irecv(p + off, cut_at(bytes - off), MPI_BYTE, peer, tag,
					 comm_of(c), r),
			       f->what, e))
			return -1;
	}
	return 0;
}

static int send_to_root(struct comm *c, const void *buf, uint64_t bytes, int root, struct err *e)
{
	struct flight f = { .what = "a gather", .start = log_seconds() };
	int rc = flight_send(&f, c, (const char *)&bytes, sizeof bytes, root, TAG, e) ||
				 flight_send(&f, c, buf, bytes, root, TAG, e)
			 ? -1
			 : 0;

	return flight_land(c, &f, rc, e);
}

static int receive_lengths(struct comm *c, uint64_t *len, struct err *e)
{
	struct flight f = { .what = "a gather", .start = log_seconds() };
	int rc = 0;

	for (int i = 0; i < c->world && !rc; i++)
		if (i != c->rank)
			rc = flight_receive(&f, c, (char *)&len[i], sizeof len[i], i, TAG, e);
	return flight_land(c, &f, rc, e);
}

/* Buffers stay where it fails: a receive in flight may still write to them. */
static int mpi_gather(struct comm *c, const void *buf, uint64_t bytes, int root, char **out,
		      uint64_t *len, struct err *e)
{
	struct flight f = { .what = "a gather", .start = log_seconds() };
	int i, rc = 0;

	if (c->rank != root)
		return send_to_root(c, buf, bytes, root, e);
	memset(out, 0, (size_t)c->world * sizeof *out);
	len[root] = bytes;
	if (receive_lengths(c, len, e))
		return -1;
	for (i = 0; i < c->world && !rc; i++) {
		out[i] = mem_calloc(len[i], 1, e);
		rc = out[i] ? 0 : -1;
	}
	for (i = 0; i < c->world && !rc; i++)
		if (i != root)
			rc = flight_receive(&f, c, out[i], len[i], i, TAG, e);
	if (!rc && bytes)
		memcpy(out[root], buf, bytes);
	return flight_land(c, &f, rc, e);
}

static uint64_t sum_of(const uint64_t *len, int n)
{
	uint64_t sum = 0;

	for (int i = 0; i < n; i++)
		sum += len[i];
	return sum;
}

/*
 * Receives are posted before sends, each rank beginning with its next neighbour so that no rank is
 * everybody's first.
 */
static int allgather_post(struct comm *c, struct flight *f, char *out, const uint64_t *len,
			  const char *in, struct err *e)
{
	char *mine = out + sum_of(len, c->rank);
	int i, rc = 0;

	for (i = 1; i < c->world && !rc; i++) {
		int peer = (c->rank - i + c->world) % c->world;

		rc = flight_receive(f, c, out + sum_of(len, peer), len[peer], peer, TAG_ALLGATHER,
				    e);
	}
	for (i = 1; i < c->world && !rc; i++)
		rc = flight_send(f, c, in, len[c->rank], (c->rank + i) % c->world, TAG_ALLGATHER,
				 e);
	if (!rc && len[c->rank] && in != mine)
		memcpy(mine, in, len[c->rank]);
	return rc;
}

static void allgather_release(struct comm_request *r)
{
	struct flight *f = r->state;

	flight_release(f);
	free(f);
	r->state = NULL;
}

static int mpi_allgather_start(struct comm *c, struct comm_request *r, void *out,
			       const uint64_t *len, const void *in, struct err *e)
{
	struct flight *f = r->state = mem_calloc(1, sizeof *f, e);

	if (!f)
		return -1;
	f->what = "an all-gather";
	f->start = log_seconds();
	if (!allgather_post(c, f, out, len, in, e))
		return 0;
	allgather_release(r);
	return -1;
}

static int mpi_allgather_end(struct comm *c, struct comm_request *r, bool wait, bool *done,
			     struct err *e)
{
	struct flight *f = r->state;
	int rc;

	*done = true;
	if (!f)
		return 0;
	rc = wait ? flight_wait(c, f, e) : flight_poll(c, f, e);
	*done = f->landed == f->n;
	if (rc || *done)
		allgather_release(r);
	return rc;
}

static uint64_t offset_of(const int64_t *rows, int rank, uint64_t row)
{
	uint64_t n = 0;

	for (int i = 0; i < rank; i++)
		n += (uint64_t)rows[i];
	return n * row;
}

/* Posted as those of an all-gather. */
static int mpi_alltoallv(struct comm *c, void *out, const int64_t *out_rows, const void *in,
			 const int64_t *in_rows, uint64_t row, struct err *e)
{
	struct flight f = { .what = "an exchange of rows", .start = log_seconds() };
	int i, rc = 0;

	if (out_rows[c->rank] != in_rows[c->rank])
		return err_fail(e, "rank %d expects %lld rows from itself but sends %lld", c->rank,
				(long long)out_rows[c->rank], (long long)in_rows[c->rank]);
	for (i = 1; i < c->world && !rc; i++) {
		int peer = (c->rank - i + c->world) % c->world;

		rc = flight_receive(&f, c, (char *)out + offset_of(out_rows, peer, row),
				    (uint64_t)out_rows[peer] * row, peer, TAG, e);
	}
	for (i = 1; i < c->world && !rc; i++) {
		int peer = (c->rank + i) % c->world;

		rc = flight_send(&f, c, (const char *)in + offset_of(in_rows, peer, row),
				 (uint64_t)in_rows[peer] * row, peer, TAG, e);
	}
	if (!rc && in_rows[c->rank] && row)
		memcpy((char *)out + offset_of(out_rows, c->rank, row),
		       (const char *)in + offset_of(in_rows, c->rank, row),
		       (uint64_t)in_rows[c->rank] * row);
	return flight_land(c, &f, rc, e);
}

/* ---- opening --------------------------------------------------------------------------------- */

#define OPENING "a new connection"

/* Fills *c around `comm`, which it owns from here on even when it fails; waits as `like` does. */
static int adopt(struct comm *c, const struct comm *like, MPI_Comm comm, struct err *e)
{
	struct mpi *m = mem_calloc(1, sizeof *m, e);
	MPI_Comm host = MPI_COMM_NULL;
	int rc;

	if (!m) {
		MPI_Comm_free(&comm);
		return -1;
	}
	m->comm = comm;
	*c = (struct comm){ .t = &transport, .state = m, .local_size = 1,
			    .timeout = like->timeout, .stop = like->stop, .dog = like->dog };
	rc = check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), OPENING, e) ||
	     check(MPI_Comm_rank(comm, &c->rank), OPENING, e) ||
	     check(MPI_Comm_size(comm, &c->world), OPENING, e) ||
	     CALL(c,
		  MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, c->rank, MPI_INFO_NULL, &host),
		  OPENING, e) ||
	     check(MPI_Comm_rank(host, &c->local_rank), OPENING, e) ||
	     check(MPI_Comm_size(host, &c->local_size), OPENING, e);
	if (host != MPI_COMM_NULL)
		MPI_Comm_free(&host);
	if (rc)
		mpi_close(c);
	return rc ? -1 : 0;
}

/* MPI's split neither sleeps nor ends while a rank is missing: ranks meet before it. */
static int mpi_split(struct comm *c, struct comm *out, int colour, int key, struct err *e)
{
	MPI_Comm comm;

	if (mpi_barrier(c, e) ||
	    CALL(c, MPI_Comm_split(comm_of(c), colour, key, &comm), OPENING, e))
		return -1;
	return adopt(out, c, comm, e);
}

static const struct transport transport = {
	.name = "mpi",
	.collective = true,
	.close = mpi_close,
	.abort = mpi_abort,
	.barrier = mpi_barrier,
	.allreduce = mpi_allreduce,
	.bcast = mpi_bcast,
	.gather = mpi_gather,
	.allgather_start = mpi_allgather_start,
	.allgather_end = mpi_allgather_end,
	.alltoallv = mpi_alltoallv,
	.split = mpi_split,
};

/* What the program does about these signals is its own affair, whatever an MPI library installs. */
static const int ours[] = { SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGQUIT, SIGUSR1, SIGUSR2 };
#define OURS (sizeof ours / sizeof ours[0])

static int init(int *argc, char ***argv, struct err *e)
{
	struct sigaction kept[OURS];
	int provided = MPI_THREAD_SINGLE, rc;
	size_t i;

	for (i = 0; i < OURS; i++)
		sigaction(ours[i], NULL, &kept[i]);
	rc = MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
	for (i = 0; i < OURS; i++)
		sigaction(ours[i], &kept[i], NULL);
	if (rc != MPI_SUCCESS)
		return err_fail(e, "MPI cannot start (code %d)", rc);
	if (provided < MPI_THREAD_FUNNELED) {
		MPI_Finalize();
		return err_refuse(
			e, "this MPI library supports no threads (MPI_THREAD_FUNNELED is needed)");
	}
	return 0;
}

int comm_mpi_open(struct comm *c, int *argc, char ***argv, struct err *e)
{
	static const struct comm patient;
	MPI_Comm comm;

	if (init(argc, argv, e))
		return -1;
	MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
	if (check(MPI_Comm_dup(MPI_COMM_WORLD, &comm), OPENING, e) ||
	    adopt(c, &patient, comm, e)) {
		MPI_Finalize();
		return -1;
	}
	((struct mpi *)c->state)->world = true;
	return 0;
}
