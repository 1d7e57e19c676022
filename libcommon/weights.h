/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights: the target's weights on a device, unit by unit: which are there, since when, and where
 * they come from (DESIGN section 5).
 *
 *	resident	a unit is read when it is first acquired, and stays
 *	stream		it is read for every window and goes when the window is done with it
 *	gather		each rank keeps its share in host memory; the ranks of a group exchange
 *			the parts of a unit for every window
 *	gather,stream	the same with the share read for every window
 *
 * What is always needed, small units (the final norm) and whole units of one rank (its experts
 * under gather) stay. Tables are read by row where they are not resident. Units are made by a
 * thread of their own behind the compute (loader.h); collectives are the caller's.
 */
#ifndef DSPARK_WEIGHTS_H
#define DSPARK_WEIGHTS_H

#include <stdint.h>

#include "model.h"
#include "plan.h"
#include "stage.h"

struct comm;
struct err;
struct loader;

/* One weight of the walk and its places in the stage. */
struct bound {
	struct weights *weights;
	struct weight *field;		/* the caller's thread has it for itself */
	struct weight shape;		/* as described, without a handle; never changes */
	enum unit_kind unit;
	int layer;
	enum shard shard;
	int64_t count;			/* of the stack that this rank's ep_index has */
	const void *data;		/* known without reading, of field->stored */
	struct weight_source *source;	/* in the order of the stack's rows */
	size_t nsources, cap;
	int members;			/* ranks that hold its rows between them */
	struct table_reader reader;
};

/* The weights that come and go together. */
struct unit {
	enum unit_kind kind;
	int layer;
	struct bound **bound;		/* [n] */
	size_t n, cap;
	bool stays, present;
	/* ranks of the group that gathers it, their number and this rank's; NULL = not gathered */
	struct comm *group;
	int members;
};

/* Consecutive experts of an experts unit, counted from the first of this rank's. */
struct expert_block {
	int64_t first, n;		/* n = 0: all */
	const bool *chosen;		/* [count of the unit], NULL = all: others are not read */
};

struct weights_options {
	enum residency residency;
	bool keep;			/* gathered units stay */
	struct stage_mesh mesh;
	int rank;
	/* ranks among which rows and experts are cut, where they are (stage_members > 1) */
	struct comm *rows, *experts;
};

struct weights {
	struct target *target;
	struct device *dev;
	struct stage *stage;
	struct weights_options o;
	size_t n, cap;
	struct bound **bound;		/* in walk order */
	size_t nunits, cap_units;
	struct unit *unit;
	struct loader *loader;
	uint64_t bytes, most;		/* in device memory now, and at most */
	double seconds;			/* that weights_acquire took */
};

/*
 * Walks the target's weights and finds every one of this rank's in the stage; reads nothing yet.
 * The target's weight fields are described, not filled.
 */
int weights_open(struct weights *w, struct target *t, struct stage *s, struct device *d,
		 const struct weights_options *o, struct err *e);
void weights_release(struct weights *w);

/*
 * The rule by which a unit of weights cut over `members` ranks stays once it has been acquired,
 * also for budgets; and whether that of this run does, which a unit without weights does.
 */
bool weights_unit_stays(enum unit_kind kind, enum residency r, bool keep, int members);
bool weights_stay(const struct weights *w, enum unit_kind kind, int layer);

/*
 * Asks for a unit, or a block of one, that will be acquired: it is made meanwhile. Units are made,
 * and gathered, in the order in which they are asked for, the same on every rank of a group. `b`
 * NULL = all of it.
 */
int weights_want(struct weights *w, enum unit_kind kind, int layer, const struct expert_block *b,
		 struct err *e);

/*
 * Makes a unit's weights usable; of experts, the block: their fields then hold b->n matrices.
 * Layers without experts have an empty experts unit.
 */
int weights_acquire(struct weights *w, enum unit_kind kind, int layer,
		    const struct expert_block *b, struct err *e);

/* Ends the use of what was acquired last of the unit. Does nothing to what stays. */
void weights_done(struct weights *w, enum unit_kind kind, int layer);

/* Moves a gather on; to be called between chunks. */
int weights_poll(struct weights *w, struct err *e);

/* As loader_times. */
void weights_times(const struct weights *w, double *making, double *gathering);

/* Bytes read from the stage so far. */
uint64_t weights_read(const struct weights *w);

/*
 * Rows [row0, row0 + n) of the embedding (UNIT_EMBED's table) or the head (UNIT_EXPORT) as F32,
 * rounded to the compute dtype as the model would hold them: what target_weights stores.
 */
int weights_rows(struct weights *w, enum unit_kind kind, int64_t row0, int64_t n, float *out,
		 struct err *e);

#endif
