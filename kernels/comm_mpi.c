/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The MPI transport (MPI 3, FUNNELED). Every wait is a nonblocking operation that is tested and
 * slept on, so that ranks which wait for slower ones use no CPU; transfers are cut at comm_cut
 * bytes, since counts are int and implementations have limits of their own.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <mpi.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "err.h"
#include "kernels.h"
#include "mem.h"

/*
 * Longest sleeps between two tests: where peers are awaited, and where our own data moves and only
 * tests move it.
 */
#define SLEEP_PEERS 5000000L
#define SLEEP_DATA 100000L
#define TAG 7

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
	return err_fail(e, "MPI cannot %s: %s", what, text);
}

/*
 * Tests one request after the other until all are done; the first tests follow one another, then
 * sleeps grow up to `longest` ns.
 */
static int wait_all(MPI_Request *r, int n, long longest, const char *what, struct err *e)
{
	struct timespec pause = { 0, 2000 };
	int i = 0, done, tries = 0;
	MPI_Status status;

	while (i < n) {
		if (check(MPI_Test(&r[i], &done, &status), what, e))
			return -1;
		i += done != 0;
		if (done || ++tries < 64)
			continue;
		nanosleep(&pause, NULL);
		pause.tv_nsec += pause.tv_nsec / 4;
		if (pause.tv_nsec > longest)
			pause.tv_nsec = longest;
	}
	return 0;
}

static void mpi_close(struct comm *c)
{
	struct mpi *m = c->state;

	if (m) {
		MPI_Comm_free(&m->comm);
		if (m->world)
			MPI_Finalize();
		free(m);
	}
	memset(c, 0, sizeof *c);
}

static void mpi_abort(struct comm *c, int code)
{
	(void)c;
	MPI_Abort(MPI_COMM_WORLD, code);
}

static int mpi_barrier(struct comm *c, struct err *e)
{
	MPI_Request r;

	if (check(MPI_Ibarrier(comm_of(c), &r), "start a barrier", e))
		return -1;
	return wait_all(&r, 1, SLEEP_PEERS, "finish a barrier", e);
}

static int mpi_allreduce(struct comm *c, int64_t *v, int n, enum comm_op op, struct err *e)
{
	MPI_Op ops[] = { [COMM_MAX] = MPI_MAX, [COMM_MIN] = MPI_MIN, [COMM_SUM] = MPI_SUM };
	MPI_Request r;

	if (check(MPI_Iallreduce(MPI_IN_PLACE, v, n, MPI_INT64_T, ops[op], comm_of(c), &r),
		  "start a reduction", e))
		return -1;
	return wait_all(&r, 1, SLEEP_PEERS, "finish a reduction", e);
}

static int cut_at(uint64_t left)
{
	return (int)(left < comm_cut ? left : comm_cut);
}

static int mpi_bcast(struct comm *c, void *buf, uint64_t bytes, int root, struct err *e)
{
	uint64_t off;
	MPI_Request r;

	for (off = 0; off < bytes; off += (uint64_t)cut_at(bytes - off))
		if (check(MPI_Ibcast((char *)buf + off, cut_at(bytes - off), MPI_BYTE, root,
				     comm_of(c), &r),
			  "start a broadcast", e) ||
		    wait_all(&r, 1, off ? SLEEP_DATA : SLEEP_PEERS, "finish a broadcast", e))
			return -1;
	return 0;
}

/* A list of point-to-point requests in flight. */
struct flight {
	MPI_Request *r;
	size_t n, cap;
};

static MPI_Request *flight_add(struct flight *f, struct err *e)
{
	if (mem_grow(&f->r, &f->cap, f->n + 1, sizeof *f->r, e))
		return NULL;
	f->r[f->n] = MPI_REQUEST_NULL;
	return &f->r[f->n++];
}

static int flight_send(struct flight *f, struct comm *c, const char *p, uint64_t bytes, int peer,
		       struct err *e)
{
	uint64_t off;

	for (off = 0; off < bytes; off += (uint64_t)cut_at(bytes - off)) {
		MPI_Request *r = flight_add(f, e);

		if (!r || check(MPI_Isend(p + off, cut_at(bytes - off), MPI_BYTE, peer, TAG,
					  comm_of(c), r),
				"send", e))
			return -1;
	}
	return 0;
}

static int flight_receive(struct flight *f, struct comm *c, char *p, uint64_t bytes, int peer,
			  struct err *e)
{
	uint64_t off;

	for (off = 0; off < bytes; off += (uint64_t)cut_at(bytes - off)) {
		MPI_Request *r = flight_add(f, e);

		if (!r || check(MPI_Irecv(p + off, cut_at(bytes - off), MPI_BYTE, peer, TAG,
					  comm_of(c), r),
				"receive", e))
			return -1;
	}
	return 0;
}

static int flight_land(struct flight *f, long longest, struct err *e)
{
	int rc = f->n ? wait_all(f->r, (int)f->n, longest, "exchange data", e) : 0;

	free(f->r);
	memset(f, 0, sizeof *f);
	return rc;
}

static int mpi_gather(struct comm *c, const void *buf, uint64_t bytes, int root, char **out,
		      uint64_t *len, struct err *e)
{
	struct flight f = { NULL, 0, 0 };
	MPI_Request r;
	int i, rc = 0;

	if (check(MPI_Igather(&bytes, 1, MPI_UINT64_T, len, 1, MPI_UINT64_T, root, comm_of(c), &r),
		  "start a gather", e) ||
	    wait_all(&r, 1, SLEEP_PEERS, "finish a gather", e))
		return -1;
	if (c->rank != root)
		return flight_send(&f, c, buf, bytes, root, e) ? -1
							       : flight_land(&f, SLEEP_PEERS, e);
	memset(out, 0, (size_t)c->world * sizeof *out);
	for (i = 0; i < c->world && !rc; i++) {
		out[i] = mem_calloc(len[i], 1, e);
		rc = out[i] ? 0 : -1;
	}
	for (i = 0; i < c->world && !rc; i++)
		if (i != root)
			rc = flight_receive(&f, c, out[i], len[i], i, e);
	if (!rc && bytes)
		memcpy(out[root], buf, bytes);
	if (!rc)
		return flight_land(&f, SLEEP_DATA, e);
	/* buffers stay: a receive in flight may still write to them until the caller aborts */
	free(f.r);
	return -1;
}

/*
 * One cut of an all-gather: n bytes at `off` of each part. The receive type's extent is a whole
 * part, so that cuts of all ranks fall into place; MPI keeps a freed type as long as an operation
 * uses it.
 */
static int allgather_cut(struct comm *c, MPI_Request *r, char *out, const char *in, uint64_t bytes,
			 uint64_t off, int n, struct err *e)
{
	bool in_place = in == out + (uint64_t)c->rank * bytes;
	MPI_Datatype run, part;
	int rc;

	if (check(MPI_Type_contiguous(n, MPI_BYTE, &run), "make a type", e))
		return -1;
	rc = check(MPI_Type_create_resized(run, 0, (MPI_Aint)bytes, &part), "make a type", e);
	MPI_Type_free(&run);
	if (rc)
		return -1;
	rc = check(MPI_Type_commit(&part), "make a type", e);
	if (!rc)
		rc = check(MPI_Iallgather(in_place ? MPI_IN_PLACE : in + off, n, MPI_BYTE,
					  out + off, 1, part, comm_of(c), r),
			   "start an all-gather", e);
	MPI_Type_free(&part);
	return rc;
}

static int mpi_allgather_start(struct comm *c, struct comm_request *r, void *out, const void *in,
			       uint64_t bytes, struct err *e)
{
	struct flight *f = r->state = mem_calloc(1, sizeof *f, e);
	uint64_t off;

	if (!f)
		return -1;
	for (off = 0; off < bytes; off += (uint64_t)cut_at(bytes - off)) {
		MPI_Request *one = flight_add(f, e);

		if (!one || allgather_cut(c, one, out, in, bytes, off, cut_at(bytes - off), e))
			/* cuts in flight die with the communicator: the caller aborts it */
			return -1;
	}
	return 0;
}

/* Cuts end in any order, but all have to. */
static int flight_test(struct flight *f, bool *done, struct err *e)
{
	int one;

	*done = true;
	for (size_t i = 0; i < f->n; i++) {
		if (check(MPI_Test(&f->r[i], &one, MPI_STATUS_IGNORE), "finish an all-gather", e))
			return -1;
		*done = *done && one;
	}
	return 0;
}

static int mpi_allgather_end(struct comm *c, struct comm_request *r, bool wait, bool *done,
			     struct err *e)
{
	struct flight *f = r->state;

	(void)c;
	*done = true;
	if (!f)
		return 0;
	if (wait ? flight_land(f, SLEEP_DATA, e) : flight_test(f, done, e))
		return -1;
	if (*done) {
		free(f->r);
		free(f);
		r->state = NULL;
	}
	return 0;
}

static int mpi_allgather(struct comm *c, void *out, const void *in, uint64_t bytes, struct err *e)
{
	struct comm_request r;
	bool done;

	return mpi_allgather_start(c, &r, out, in, bytes, e)
		       ? -1
		       : mpi_allgather_end(c, &r, true, &done, e);
}

static uint64_t offset_of(const int64_t *rows, int rank, uint64_t row)
{
	uint64_t n = 0;

	for (int i = 0; i < rank; i++)
		n += (uint64_t)rows[i];
	return n * row;
}

/*
 * Receives are posted before sends, each rank beginning with its next neighbour so that no rank is
 * everybody's first.
 */
static int mpi_alltoallv(struct comm *c, void *out, const int64_t *out_rows, const void *in,
			 const int64_t *in_rows, uint64_t row, struct err *e)
{
	struct flight f = { NULL, 0, 0 };
	int i, rc = 0;

	if (out_rows[c->rank] != in_rows[c->rank])
		return err_fail(e, "rank %d expects %lld rows from itself but sends %lld", c->rank,
				(long long)out_rows[c->rank], (long long)in_rows[c->rank]);
	for (i = 1; i < c->world && !rc; i++) {
		int peer = (c->rank - i + c->world) % c->world;

		rc = flight_receive(&f, c, (char *)out + offset_of(out_rows, peer, row),
				    (uint64_t)out_rows[peer] * row, peer, e);
	}
	for (i = 1; i < c->world && !rc; i++) {
		int peer = (c->rank + i) % c->world;

		rc = flight_send(&f, c, (const char *)in + offset_of(in_rows, peer, row),
				 (uint64_t)in_rows[peer] * row, peer, e);
	}
	if (!rc && in_rows[c->rank] && row)
		memcpy((char *)out + offset_of(out_rows, c->rank, row),
		       (const char *)in + offset_of(in_rows, c->rank, row),
		       (uint64_t)in_rows[c->rank] * row);
	if (rc) {
		/* requests in flight die with the communicator: the caller aborts it */
		free(f.r);
		return -1;
	}
	return flight_land(&f, SLEEP_DATA, e);
}

/* Fills *c around `comm`, which it owns from here on even when it fails. */
static int adopt(struct comm *c, MPI_Comm comm, struct err *e)
{
	struct mpi *m = mem_calloc(1, sizeof *m, e);
	MPI_Comm host = MPI_COMM_NULL;
	int rc;

	if (!m) {
		MPI_Comm_free(&comm);
		return -1;
	}
	m->comm = comm;
	*c = (struct comm){ .t = &transport, .state = m, .local_size = 1 };
	rc = check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "set an error handler", e) ||
	     check(MPI_Comm_rank(comm, &c->rank), "tell the rank", e) ||
	     check(MPI_Comm_size(comm, &c->world), "tell the world", e) ||
	     check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, c->rank, MPI_INFO_NULL, &host),
		   "find ranks on this host", e) ||
	     check(MPI_Comm_rank(host, &c->local_rank), "tell the local rank", e) ||
	     check(MPI_Comm_size(host, &c->local_size), "count ranks on this host", e);
	if (host != MPI_COMM_NULL)
		MPI_Comm_free(&host);
	if (rc)
		mpi_close(c);
	return rc ? -1 : 0;
}

static int mpi_split(struct comm *c, struct comm *out, int colour, int key, struct err *e)
{
	MPI_Comm comm;

	if (check(MPI_Comm_split(comm_of(c), colour, key, &comm), "split a communicator", e))
		return -1;
	return adopt(out, comm, e);
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
	.allgather = mpi_allgather,
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
	MPI_Comm comm;

	if (init(argc, argv, e))
		return -1;
	MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
	if (check(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "duplicate the world", e) ||
	    adopt(c, comm, e)) {
		MPI_Finalize();
		return -1;
	}
	((struct mpi *)c->state)->world = true;
	return 0;
}
