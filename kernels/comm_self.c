/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transport without a wire: one process that is the whole world (collectives are copies), or
 * one rank of a told world that has nobody to talk to (collectives are refused unless the world is
 * 1).
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "kernels.h"
#include "mem.h"

static int alone(const struct comm *c, struct err *e)
{
	if (c->world == 1)
		return 0;
	return err_refuse(e, "ranks of this run are not connected: start them with mpirun, or plan "
			     "a target that needs no exchange");
}

static void self_close(struct comm *c)
{
	memset(c, 0, sizeof *c);
}

static void self_abort(struct comm *c, int code)
{
	(void)c;
	(void)code;
}

static int self_barrier(struct comm *c, struct err *e)
{
	return alone(c, e);
}

static int self_allreduce(struct comm *c, int64_t *v, int n, enum comm_op op, struct err *e)
{
	(void)v;
	(void)n;
	(void)op;
	return alone(c, e);
}

static int self_bcast(struct comm *c, void *buf, uint64_t bytes, int root, struct err *e)
{
	(void)buf;
	(void)bytes;
	(void)root;
	return alone(c, e);
}

static int self_gather(struct comm *c, const void *buf, uint64_t bytes, int root, char **out,
		       uint64_t *len, struct err *e)
{
	(void)root;
	if (alone(c, e))
		return -1;
	out[0] = mem_calloc(bytes, 1, e);
	if (!out[0])
		return -1;
	if (bytes)
		memcpy(out[0], buf, bytes);
	len[0] = bytes;
	return 0;
}

static int self_allgather_start(struct comm *c, struct comm_request *r, void *out,
				const uint64_t *len, const void *in, struct err *e)
{
	r->state = NULL;
	if (alone(c, e))
		return -1;
	if (len[0] && out != in)
		memcpy(out, in, len[0]);
	return 0;
}

static int self_allgather_end(struct comm *c, struct comm_request *r, bool wait, bool *done,
			      struct err *e)
{
	(void)r;
	(void)wait;
	*done = true;
	return alone(c, e);
}

static int self_alltoallv(struct comm *c, void *out, const int64_t *out_rows, const void *in,
			  const int64_t *in_rows, uint64_t row, struct err *e)
{
	if (alone(c, e))
		return -1;
	if (out_rows[0] != in_rows[0])
		return err_fail(e, "rank 0 expects %lld rows from itself but sends %lld",
				(long long)out_rows[0], (long long)in_rows[0]);
	if (in_rows[0] && row)
		memcpy(out, in, (uint64_t)in_rows[0] * row);
	return 0;
}

static int self_split(struct comm *c, struct comm *out, int colour, int key, struct err *e)
{
	(void)colour;
	(void)key;
	if (alone(c, e))
		return -1;
	*out = *c;
	return 0;
}

#define VERBS                                                                              \
	.name = "self", .close = self_close, .abort = self_abort, .barrier = self_barrier, \
	.allreduce = self_allreduce, .bcast = self_bcast, .gather = self_gather,           \
	.allgather_start = self_allgather_start, .allgather_end = self_allgather_end,      \
	.alltoallv = self_alltoallv, .split = self_split

static const struct transport self = { .collective = true, VERBS };
static const struct transport told = { .collective = false, VERBS };

void comm_self_open(struct comm *c)
{
	*c = (struct comm){ .t = &self, .world = 1, .local_size = 1 };
}

void comm_told_open(struct comm *c, int rank, int world, int local_rank, int local_size)
{
	*c = (struct comm){ .t = world == 1 ? &self : &told, .rank = rank, .world = world,
			    .local_rank = local_rank, .local_size = local_size,
			    .started = "--rank" };
}
