/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forward: the layer loop of one rank, the same for every model, backend and transport.
 *
 *	for each window of rows, for each unit (embed | layer 0 | ... | layer L-1 | final), once:
 *		acquire it and ask for the next; for each chunk of the window: the model's verbs,
 *		then what is captured there goes to the window's buffer
 */
#ifndef DSPARK_FORWARD_H
#define DSPARK_FORWARD_H

#include <signal.h>
#include <stdint.h>

#include "capture.h"
#include "log.h"
#include "model.h"
#include "plan.h"
#include "weights.h"

struct comm;
struct err;
struct tokens;

/* Set by a signal handler; the forward ends at the next chunk of a layer with EXIT_FAILED. */
extern volatile sig_atomic_t forward_stop;

struct forward {
	const struct plan *plan;
	const struct plan_range *range;		/* this rank's */
	const struct tokens *tokens;
	struct target *target;
	struct device *dev;
	struct weights *weights;
	struct capture *capture;	/* open where this rank has rows to do */
	enum progress_style progress;
	/*
	 * All ranks, where they depend on each other, else NULL: each of them has to run. Those
	 * that hold the experts between them, NULL = this rank holds all.
	 */
	struct comm *world, *ep;

	/*
	 * For the summary: seconds, of which acquiring, exchanging and waiting for the device; when
	 * layer 0 began first (log_seconds, 0 = never).
	 */
	double seconds, acquiring, exchanging, waiting, began;
	int64_t rows, tokens_done, windows;
};

/*
 * Runs every window of the range that holds rows not yet published (`done` [shards], true =
 * published: skipped).
 */
int forward_run(struct forward *f, const bool *done, struct err *e);

#endif
