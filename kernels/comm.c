/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which transport a run uses: asked for by name, or found from what the launcher left in the
 * environment.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "kernels.h"

uint64_t comm_cut = (uint64_t)1 << 30;

#ifdef HAVE_MPI
static const bool have_mpi = true;
#else
static const bool have_mpi = false;

int comm_mpi_open(struct comm *c, int *argc, char ***argv, struct err *e)
{
	(void)c;
	(void)argc;
	(void)argv;
	return err_refuse(e, "transport 'mpi' is not in this build of dspark: build it with "
			     "--with-mpi, or start ranks with --rank");
}
#endif

/* A number >= 0 from the environment: 1 if there, 0 if unset or empty, -1 if it is no number. */
static int env_number(const char *name, int *out, struct err *e)
{
	const char *s = getenv(name);
	char *end;
	long v;

	if (!s || !*s)
		return 0;
	errno = 0;
	v = strtol(s, &end, 10);
	if (errno || *end || v < 0 || v > INT_MAX)
		return err_refuse(e, "environment variable %s='%s' is not a number", name, s);
	*out = (int)v;
	return 1;
}

/* How a launcher names what it tells its processes. */
struct launcher {
	const char *name, *rank, *world, *local_rank, *local_size;
};

static const struct launcher torchrun = { "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK",
					  "LOCAL_WORLD_SIZE" };
static const struct launcher slurm = { "a Slurm step", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
				       "SLURM_LOCALID", NULL };
static const struct launcher mpi[] = {
	{ "an MPI launcher", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
	  "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE" },
	{ "an MPI launcher", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
	  "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE" },
	{ "an MPI launcher", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS" },
};

/* Tasks of a Slurm step on this node, from "4(x2),3" and the node's number; 0 where unknown. */
static int slurm_local_size(void)
{
	const char *s = getenv("SLURM_STEP_TASKS_PER_NODE"), *node = getenv("SLURM_NODEID");
	long left = node ? strtol(node, NULL, 10) : 0;

	if (!s)
		s = getenv("SLURM_TASKS_PER_NODE");
	while (s && *s) {
		char *end;
		long n = strtol(s, &end, 10), times = 1;

		if (end == s)
			return 0;
		if (end[0] == '(' && end[1] == 'x') {
			times = strtol(end + 2, &end, 10);
			end += *end == ')';
		}
		if (left < times)
			return n > 0 && n < INT_MAX ? (int)n : 0;
		left -= times;
		s = end + (*end == ',');
	}
	return 0;
}

/* 1 and the ranks in *c if launcher `l` started this process, 0 if not. */
static int told_by(const struct launcher *l, struct comm *c, struct err *e)
{
	int rank = 0, world = 0, local_rank = 0, local_size = 0, r, w;

	w = env_number(l->world, &world, e);
	r = w == 1 ? env_number(l->rank, &rank, e) : 0;
	if (w < 0 || r < 0)
		return -1;
	if (!w || !r)
		return 0;
	if (world < 1 || rank >= world)
		return err_refuse(e, "%s=%d and %s=%d do not name a rank of a world", l->rank, rank,
				  l->world, world);
	if (env_number(l->local_rank, &local_rank, e) < 0 ||
	    (l->local_size && env_number(l->local_size, &local_size, e) < 0))
		return -1;
	if (!l->local_size)
		local_size = slurm_local_size();
	comm_told_open(c, rank, world, local_rank,
		       local_size > local_rank ? local_size : local_rank + 1);
	c->started = l->name;
	return 1;
}

int comm_connected(const struct comm *c, struct err *e)
{
	if (c->world == 1 || c->t->collective)
		return 0;
	return err_refuse(e,
			  "ranks started by %s cannot exchange weights and tokens in this build of "
			  "dspark: start them with mpirun%s",
			  c->started, have_mpi ? "" : " and a build --with-mpi");
}

static bool mpi_launched(void)
{
	static const char *const names[] = {
		"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK",
		"MPI_LOCALNRANKS"
	};
	size_t i;

	for (i = 0; i < sizeof names / sizeof names[0]; i++)
		if (getenv(names[i]))
			return true;
	return false;
}

static int open_launched(struct comm *c, int *argc, char ***argv, struct err *e)
{
	size_t i;

	if (have_mpi)
		return comm_mpi_open(c, argc, argv, e);
	for (i = 0; i < sizeof mpi / sizeof mpi[0]; i++) {
		int r = told_by(&mpi[i], c, e);

		if (r)
			return r < 0 ? -1 : 0;
	}
	return err_refuse(e, "an MPI launcher started this process, but this build of dspark has "
			     "no MPI: build it with --with-mpi, or give --rank");
}

static int open_auto(struct comm *c, int *argc, char ***argv, struct err *e)
{
	int steps = 0, r = told_by(&torchrun, c, e);

	if (r)
		return r < 0 ? -1 : 0;
	if (mpi_launched())
		return open_launched(c, argc, argv, e);
	if (env_number(slurm.world, &steps, e) < 0)
		return -1;
	if (steps > 1) {
		r = told_by(&slurm, c, e);
		if (r)
			return r < 0 ? -1 : 0;
	}
	comm_self_open(c);
	return 0;
}

int comm_open(struct comm *c, const char *name, int rank, int *argc, char ***argv, struct err *e)
{
	memset(c, 0, sizeof *c);
	if (rank >= 0) {
		if (strcmp(name, "auto") && strcmp(name, "self"))
			return err_usage(
				e,
				"--rank names a rank without communication: it excludes --comm %s",
				name);
		comm_told_open(c, rank, 0, 0, 1);
		return 0;
	}
	if (!strcmp(name, "auto"))
		return open_auto(c, argc, argv, e);
	if (!strcmp(name, "mpi"))
		return comm_mpi_open(c, argc, argv, e);
	if (!strcmp(name, "nccl"))
		return err_refuse(
			e,
			"transport 'nccl' is not in this build of dspark, use auto, self or mpi");
	if (strcmp(name, "self"))
		return err_usage(e, "transport '%s' is unknown, use auto, self, mpi or nccl", name);
	comm_self_open(c);
	return 0;
}
