/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session: one rank of a run, from what it reads to its published shards and their records.
 *
 * It opens, in this order, the ranks' connection, the run, rows and stage, groups of ranks once all
 * agree on the plan, the device and the cache, then runs the forward over the shards of its range
 * that are not published yet. The run and the records go to stdout: of connected ranks only rank 0
 * reads stdin and writes stdout.
 */
#ifndef DSPARK_SESSION_H
#define DSPARK_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "cache.h"
#include "capture.h"
#include "err.h"
#include "forward.h"
#include "kernels.h"
#include "log.h"
#include "plan.h"
#include "record.h"
#include "stage.h"
#include "text.h"
#include "tokens.h"
#include "watchdog.h"
#include "weights.h"

struct session_options {
	const char *run;		/* a file; NULL or "-" is stdin */
	const char *stage;		/* NULL = the one that the run names */
	const char *comm;		/* "auto", "self", "mpi", "nccl" */
	int64_t rank;			/* --rank, -1 = found by `comm` */
	enum progress_style progress;
	enum nonfinite nonfinite;
};

/* Records go out as they come, or are kept until rank 0 can gather them. */
struct session_output {
	FILE *out;			/* NULL: keep */
	struct text kept;
	struct err err;		/* the first failed write; published shards do not depend on it */
};

struct session {
	const struct session_options *o;
	struct comm comm;
	bool nccl;		/* that is to connect the ranks, or has */
	/*
	 * Where ranks depend on each other (plan_lockstep): those among which rows and experts are
	 * cut, and those that hold all experts between them; `t` NULL where it is this rank alone.
	 */
	struct comm rows, experts, ep;
	struct watchdog dog;
	struct run run;
	struct plan plan;
	struct target target;
	struct tokens tokens;
	struct stage stage;
	struct device dev;
	struct weights weights;
	struct cache cache;
	struct capture capture;
	struct forward forward;
	struct session_output output;
	bool *done;			/* [shards] */
	int64_t left;			/* shards of this rank still to do */
	double start;
};

#define SESSION_INIT { .tokens = TOKENS_INIT, .cache = CACHE_INIT }

/*
 * Does all of it on a SESSION_INIT. argc and argv are main's, for MPI. EXIT_REFUSED where shards
 * were set aside as *.bad. A stdout that fails does not stop the work: EXIT_FAILED at its end.
 */
int session_run(struct session *s, const struct session_options *o, int *argc, char ***argv,
		struct err *e);

/* Other ranks wait for this one: if it fails, session_end must be told. */
bool session_has_peers(const struct session *s);

/*
 * Releases everything. With a `code` other than 0 it then ends the peers, and with them this
 * process, with that code: what is to be said must have been said. Legal on SESSION_INIT.
 */
void session_end(struct session *s, int code);

#endif
