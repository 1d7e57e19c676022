/* SPDX-License-Identifier: Apache-2.0 */
/*
 * budget: the memory of a rank under each residency, known without a device.
 *
 * Memory is not estimated by formulas that could drift from the models: weights are summed over the
 * model's own walk, and scratch is what the model's own layers ask for when they run on a device
 * whose verbs do nothing.
 */
#ifndef DSPARK_BUDGET_H
#define DSPARK_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

#include "model.h"
#include "plan.h"
#include "stage.h"

struct checkpoint;
struct err;
struct budget_weight;

struct budget {
	struct target *target;
	enum dtype compute;
	struct budget_weight *weight;	/* in walk order */
	size_t n, cap;
	struct routing most;		/* experts 0: no layer routes */
	bool *reads;			/* [entries of the checkpoint] that the walk reads */
	struct plan_tensors checkpoint, used;
	char *unused;			/* a pattern of the others' names, or NULL */
};

/* How a rank's weights are kept. */
struct budget_choice {
	enum residency residency;
	struct stage_mesh mesh;		/* its `cut` is the residency's */
	bool keep;
	int64_t block;			/* experts of a block, 0 = all of the rank's */
	bool apart;			/* the device has memory of its own */
};

struct budget_weights {
	/* in memory all the time; units that come and go, with what their gathering takes */
	uint64_t held, working;
	/* of a device with memory of its own: what of both lies in host memory instead */
	uint64_t host_held, host_working;
	/* the largest unit that comes and goes, bytes on the device */
	enum unit_kind kind;
	int layer;
	uint64_t largest;
};

/* Walks the weights; the walk also describes the target's weights. `c` may be partial. */
int budget_open(struct budget *b, struct target *t, const struct checkpoint *c,
		enum dtype compute, struct err *e);
void budget_release(struct budget *b);

/* Of share `share`; share 0 has the most of everything. */
void budget_weights(const struct budget *b, const struct budget_choice *c, int share,
		    struct budget_weights *out);

/* Whether some layer's experts come and go under a choice: the layer is split (forward.c). */
bool budget_splits(const struct budget *b, const struct budget_choice *c);

/* What a chunk takes at most in any unit, captures included. */
uint64_t budget_scratch(const struct budget *b, const int64_t *ids, int nids, int64_t tokens,
			bool split);

/* What a window takes: carry, ids and positions, and the routed tensors of split layers. */
uint64_t budget_carry(const struct budget *b, int64_t tokens, bool split);

/* Experts of a block where nobody asks for less: an eighth of the layer's, or 256 MiB of them. */
int64_t budget_block(const struct budget *b, const struct budget_choice *c);

#endif
