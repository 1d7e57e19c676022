/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels: the two tables of this folder, opened by name. Only dspark-forward and the tests link
 * them.
 *
 * Sources, what they need, and what decides whether they are built:
 *	backend.c comm.c comm_self.c rendezvous.c session.c watchdog.c ref/ *.c	-lm; always
 *	cpu/ *.c	HAVE_ONEDNN: -ldnnl and OpenMP
 *	cuda/ *.cu	HAVE_CUDA: nvcc and libcudart_static; for tests also the host's C++ compiler
 *	comm_mpi.c	HAVE_MPI: the flags of mpicc
 *	comm_nccl.c nccl_*.c	HAVE_NCCL: the headers of CUDA and NCCL; libnccl.so.2 when it runs
 *
 * All but comm_mpi.c are compiled with -ffp-contract=off (a fused product in one loop and not in
 * another would make a row's bits depend on its place), -fno-trapping-math and -fno-math-errno (or
 * no loop with a comparison is vectorised; no value changes).
 */
#ifndef DSPARK_KERNELS_H
#define DSPARK_KERNELS_H

#include <stdbool.h>

#include "backend.h"
#include "comm.h"

/* Opens device `d` with the backend called `name`: "ref", "cpu" or "cuda". */
int backend_open(struct device *d, const char *name, const struct device_options *o, struct err *e);

/* Names of the backends in this build, NULL-ended. */
const char *const *backend_names(void);

/*
 * Opens the ranks of this run. `name` is auto, self, mpi or nccl; `rank` the one told by --rank,
 * else -1; then the world is not known, and the caller sets c->world once it has read the plan.
 * `auto` takes the first that applies: --rank; torchrun (RANK, WORLD_SIZE, LOCAL_RANK); an MPI
 * launcher; a Slurm step of several tasks; else one process. Where no transport connects the ranks,
 * c->t->collective is false, and c->started says what started them. argc and argv as main got them,
 * or NULL.
 *
 * Of `nccl` it finds rank and world from any of these launchers, without a word to MPI; then the
 * caller sets how waiting ends, and calls comm_connect_nccl.
 */
int comm_open(struct comm *c, const char *name, int rank, int *argc, char ***argv, struct err *e);

bool comm_has_nccl(void);	/* in this build */

/*
 * Connects what comm_open left told. All ranks see the directory `dir`, which is made if it is
 * missing; `plan` is the plan's digest.
 */
int comm_connect_nccl(struct comm *c, const char *dir, const char *plan, struct err *e);

/*
 * Refuses ranks that are not connected unless they are one, c->world being known: for plans whose
 * ranks depend on each other. Says how to start them.
 */
int comm_connected(const struct comm *c, struct err *e);

/*
 * Transports as comm_open's helpers. `told`: this process is rank `rank` of `world`, with nobody to
 * talk to.
 */
void comm_self_open(struct comm *c);
void comm_told_open(struct comm *c, int rank, int world, int local_rank, int local_size);
int comm_mpi_open(struct comm *c, int *argc, char ***argv, struct err *e);

/* Largest single transfer in bytes, 1 GiB; tests make it small to reach the cuts. At least 1. */
extern uint64_t comm_cut;

extern const struct backend backend_ref, backend_cpu, backend_cuda;

#endif
