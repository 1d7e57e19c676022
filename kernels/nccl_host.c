/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What NCCL's transport does with host memory: small, and by way of scratch on both sides. Copies
 * are to and from pinned memory, as others would make the stream's waiting this thread's.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "kernels.h"
#include "mem.h"
#include "nccl_comm.h"
#include "watchdog.h"

static int up(struct comm *c, const void *from, size_t at, size_t bytes, const char *what,
	      struct err *e)
{
	struct nccl *n = of(c);

	memcpy(n->host + at, from, bytes);
	return nccl_cuda(cudaMemcpyAsync(n->device + at, n->host + at, bytes,
					 cudaMemcpyHostToDevice, n->stream),
			 what, e);
}

/* Behind what is in the stream: into n->host, once wait_stream has come back. */
static int down(struct comm *c, size_t at, size_t bytes, const char *what, struct err *e)
{
	struct nccl *n = of(c);

	return nccl_cuda(cudaMemcpyAsync(n->host + at, n->device + at, bytes,
					 cudaMemcpyDeviceToHost, n->stream),
			 what, e);
}

static int reduce(struct comm *c, int64_t *v, size_t n, ncclRedOp_t op, const char *what,
		  struct err *e)
{
	struct nccl *x = of(c);
	struct wait w = nccl_wait_for(what);
	size_t bytes = n * sizeof *v;

	if (nccl_give_all(c, &w, e) || up(c, v, 0, bytes, what, e) ||
	    CALL(c, nccl.AllReduce(x->device, x->device, n, ncclInt64, op, x->comm, x->stream),
		 what, e) ||
	    nccl_wait_ready(c, &w, e) || down(c, 0, bytes, what, e) || nccl_wait_stream(c, &w, e))
		return -1;
	memcpy(v, x->host, bytes);
	return 0;
}

int nccl_allreduce(struct comm *c, int64_t *v, int n, enum comm_op op, struct err *e)
{
	static const ncclRedOp_t ops[] = { [COMM_MAX] = ncclMax,
					   [COMM_MIN] = ncclMin,
					   [COMM_SUM] = ncclSum };
	const size_t most = NCCL_SCRATCH / sizeof *v;
	size_t left = (size_t)n, now;

	for (; left; v += now, left -= now) {
		now = left < most ? left : most;
		if (reduce(c, v, now, ops[op], "a reduction", e))
			return -1;
	}
	return 0;
}

int nccl_barrier(struct comm *c, struct err *e)
{
	int64_t one = 1;

	return reduce(c, &one, 1, ncclSum, "a barrier", e);
}

int nccl_bcast(struct comm *c, void *buf, uint64_t bytes, int root, struct err *e)
{
	struct nccl *n = of(c);
	struct wait w = nccl_wait_for("a broadcast");
	size_t most = comm_cut < NCCL_SCRATCH ? comm_cut : NCCL_SCRATCH, now;
	char *p = buf;

	for (; bytes; p += now, bytes -= now) {
		now = bytes < most ? bytes : most;
		if (nccl_give_all(c, &w, e) || (c->rank == root && up(c, p, 0, now, w.what, e)) ||
		    CALL(c,
			 nccl.Broadcast(n->device, n->device, now, ncclChar, root, n->comm,
					n->stream),
			 w.what, e) ||
		    nccl_wait_ready(c, &w, e) ||
		    (c->rank != root && down(c, 0, now, w.what, e)) || nccl_wait_stream(c, &w, e))
			return -1;
		if (c->rank != root)
			memcpy(p, n->host, now);
	}
	return 0;
}

/* ---- everything to one ----------------------------------------------------------------------- */

/* Scratch is cut into one room for each rank. */
static size_t gather_room(const struct comm *c)
{
	size_t room = NCCL_SCRATCH / (size_t)c->world / 64 * 64;

	return comm_cut < room ? comm_cut : room;
}

static int send_piece(struct comm *c, struct wait *w, const char *p, size_t bytes, int root,
		      struct err *e)
{
	struct nccl *n = of(c);

	return nccl_give_all(c, w, e) || up(c, p, 0, bytes, w->what, e) ||
			       CALL(c,
				    nccl.Send(n->device, bytes, ncclChar, root, n->comm, n->stream),
				    w->what, e) ||
			       nccl_wait_stream(c, w, e)
		       ? -1
		       : 0;
}

/* `size` bytes from each rank that has any left behind `at`; they lie a room apart in n->host. */
static int receive_pieces(struct comm *c, struct wait *w, const uint64_t *len, uint64_t at,
			  size_t room, struct err *e)
{
	struct nccl *n = of(c);
	int rc = 0;

	if (nccl_give_all(c, w, e) || CALL(c, nccl.GroupStart(), w->what, e))
		return -1;
	for (int i = 0; i < c->world && !rc; i++) {
		uint64_t left = i != c->rank && len[i] > at ? len[i] - at : 0;

		if (left)
			rc = CALL(c,
				  nccl.Recv(n->device + (size_t)i * room,
					    left < room ? left : room, ncclChar, i, n->comm,
					    n->stream),
				  w->what, e);
	}
	return nccl_group_end(c, rc, w->what, e) || nccl_wait_ready(c, w, e) ||
			       down(c, 0, (size_t)c->world * room, w->what, e) ||
			       nccl_wait_stream(c, w, e)
		       ? -1
		       : 0;
}

static int receive_lengths(struct comm *c, struct wait *w, uint64_t *len, struct err *e)
{
	uint64_t *each = mem_calloc((size_t)c->world, sizeof *each, e);
	size_t room = 64;
	int rc = -1;

	for (int i = 0; each && i < c->world; i++)
		each[i] = sizeof *len;
	if (each && (size_t)c->world * room > NCCL_SCRATCH)
		err_fail(e, "a gather of %d ranks is more than NCCL's transport was made for",
			 c->world);
	else if (each && !receive_pieces(c, w, each, 0, room, e)) {
		for (int i = 0; i < c->world; i++)
			if (i != c->rank)
				memcpy(&len[i], of(c)->host + (size_t)i * room, sizeof *len);
		rc = 0;
	}
	free(each);
	return rc;
}

static int receive_all(struct comm *c, struct wait *w, char **out, const uint64_t *len,
		       struct err *e)
{
	size_t room = gather_room(c);
	uint64_t most = 0;

	for (int i = 0; i < c->world; i++)
		if (i != c->rank && len[i] > most)
			most = len[i];
	for (uint64_t at = 0; at < most; at += room) {
		if (receive_pieces(c, w, len, at, room, e))
			return -1;
		for (int i = 0; i < c->world; i++) {
			uint64_t left = i != c->rank && len[i] > at ? len[i] - at : 0;

			memcpy(out[i] + at, of(c)->host + (size_t)i * room,
			       left < room ? left : room);
		}
	}
	return 0;
}

static int send_all(struct comm *c, struct wait *w, const char *buf, uint64_t bytes, int root,
		    struct err *e)
{
	size_t room = gather_room(c);

	if (send_piece(c, w, (const char *)&bytes, sizeof bytes, root, e))
		return -1;
	for (uint64_t at = 0; at < bytes; at += room)
		if (send_piece(c, w, buf + at, bytes - at < room ? bytes - at : room, root, e))
			return -1;
	return 0;
}

int nccl_gather(struct comm *c, const void *buf, uint64_t bytes, int root, char **out,
		       uint64_t *len, struct err *e)
{
	struct wait w = nccl_wait_for("a gather");

	if (c->rank != root)
		return send_all(c, &w, buf, bytes, root, e);
	memset(out, 0, (size_t)c->world * sizeof *out);
	len[root] = bytes;
	if (receive_lengths(c, &w, len, e))
		return -1;
	for (int i = 0; i < c->world; i++)
		if (!(out[i] = mem_calloc(len[i], 1, e)))
			return -1;
	if (bytes)
		memcpy(out[root], buf, bytes);
	return receive_all(c, &w, out, len, e);
}
