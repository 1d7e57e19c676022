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
#include <unistd.h>

#include "comm_nccl.h"
#include "err.h"
#include "kernels.h"
#include "text.h"

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

#ifdef HAVE_NCCL
static const bool have_nccl = true;
#else
static const bool have_nccl = false;

int comm_nccl_open(struct comm *c, const struct nccl_place *place, struct err *e)
{
	(void)c;
	(void)place;
	return err_refuse(e, "transport 'nccl' is not in this build of dspark, use auto, self or "
			     "mpi");
}
#endif

bool comm_has_nccl(void)
{
	return have_nccl;
}

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

/*
 * How a launcher names what it tells its processes. `start`: what tells one start from the next,
 * the same for all ranks; not of Slurm where mpirun starts some ranks through it and others not.
 */
struct launcher {
	const char *name, *rank, *world, *local_rank, *local_size;
	const char *start[6];
};

static const struct launcher torchrun = {
	"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
	{ "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT" }
};
static const struct launcher slurm = {
	"a Slurm step", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL,
	{ "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT" }
};
static const struct launcher mpi[] = {
	{ "an MPI launcher", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
	  "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
	  { "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid" } },
	{ "an MPI launcher", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
	  "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", { "PMI_JOBID" } },
	{ "an MPI launcher", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
	  { "PMI_JOBID" } },
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
			  "ranks started by %s cannot exchange weights and tokens this way: start "
			  "them with mpirun%s, or plan for CUDA and dist_env.backend nccl%s",
			  c->started, have_mpi ? "" : " and a build --with-mpi",
			  have_nccl ? "" : " in a build that has it");
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

/* Ranks as NCCL's transport wants them: told, and connected by comm_connect_nccl. */
static int open_told(struct comm *c, struct err *e)
{
	int steps = 0, r = told_by(&torchrun, c, e);
	size_t i;

	for (i = 0; !r && i < sizeof mpi / sizeof mpi[0]; i++)
		r = told_by(&mpi[i], c, e);
	if (!r)
		r = env_number(slurm.world, &steps, e) < 0 ? -1 : 0;
	if (!r && steps > 1)
		r = told_by(&slurm, c, e);
	if (!r)
		comm_self_open(c);
	return r < 0 ? -1 : 0;
}

static void add_start(struct text *t, const struct launcher *l, const struct comm *c)
{
	const char *value;

	for (size_t i = 0; i < sizeof l->start / sizeof *l->start && l->start[i]; i++) {
		value = getenv(l->start[i]);
		if (c->started && !strcmp(c->started, l->name) && value && *value)
			text_printf(t, "%s.", value);
	}
}

/* Ranks of one host say which: other starts may name themselves alike on others. */
static int name_start(struct text *t, const struct comm *c, const char *plan, struct err *e)
{
	char host[256] = "";

	add_start(t, &torchrun, c);
	add_start(t, &slurm, c);
	for (size_t i = 0; i < sizeof mpi / sizeof mpi[0]; i++)
		add_start(t, &mpi[i], c);
	if (c->local_size == c->world)
		gethostname(host, sizeof host - 1);
	text_printf(t, "%d.%.16s.%s", c->world, plan, host);
	return text_ok(t, e);
}

int comm_connect_nccl(struct comm *c, const char *dir, const char *plan, struct err *e)
{
	struct text name = TEXT_INIT;
	struct nccl_place place = {
		.dir = dir, .timeout = c->timeout, .stop = c->stop, .dog = c->dog
	};
	int rc = name_start(&name, c, plan, e);

	place.name = name.s;
	if (!rc)
		rc = comm_nccl_open(c, &place, e);
	text_release(&name);
	return rc;
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
		return have_nccl ? open_told(c, e) : comm_nccl_open(c, NULL, e);
	if (strcmp(name, "self"))
		return err_usage(e, "transport '%s' is unknown, use auto, self, mpi or nccl", name);
	comm_self_open(c);
	return 0;
}
