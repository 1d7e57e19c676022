/* SPDX-License-Identifier: Apache-2.0 */
/* comm_nccl: how ranks that a launcher has told who they are come to NCCL. */
#ifndef DSPARK_COMM_NCCL_H
#define DSPARK_COMM_NCCL_H

#include <signal.h>

struct comm;
struct err;
struct watchdog;

struct nccl_place {
	/*
	 * Where rank 0's id is handed over (rendezvous.h), and which start this is. Not looked at
	 * where NCCL_COMM_ID says the same to all, or one rank is all.
	 */
	const char *dir, *name;
	double timeout;			/* as in struct comm, from here on */
	const volatile sig_atomic_t *stop;
	struct watchdog *dog;
};

/* Connects *c, which knows its rank, world and place on the host, and becomes NCCL's. */
int comm_nccl_open(struct comm *c, const struct nccl_place *place, struct err *e);

#endif
