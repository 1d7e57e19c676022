/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights: the target's weights on a device, unit by unit: which are there, since when, and where
 * they come from.
 *
 * Resident: a unit is read from the stage when it is first acquired and stays, so the first layers
 * run while later ones are still on disk.
 */
#ifndef DSPARK_WEIGHTS_H
#define DSPARK_WEIGHTS_H

#include <stdint.h>

#include "model.h"
#include "stage.h"

struct err;

struct bound;		/* one weight of the walk and its places in the stage */

struct weights {
	struct target *target;
	struct device *dev;
	struct stage *stage;
	size_t n, cap;
	struct bound *bound;		/* in walk order */
	uint64_t bytes;			/* in device memory */
	double seconds;			/* spent reading and packing */
	uint64_t read;			/* bytes read from the stage */
};

/*
 * Walks the target's weights and finds every one in the stage; reads nothing yet. The target's
 * weight fields are described, not filled.
 */
int weights_open(struct weights *w, struct target *t, struct stage *s, struct device *d,
		 struct err *e);

/* Makes a unit's weights usable. Layers without experts have an empty experts unit. */
int weights_acquire(struct weights *w, enum unit_kind kind, int layer, struct err *e);
void weights_release(struct weights *w);

/*
 * Rows [row0, row0 + n) of the embedding (UNIT_EMBED's table) or the head (UNIT_EXPORT) as F32,
 * rounded to the compute dtype as the model would hold them: what target_weights stores.
 */
int weights_rows(struct weights *w, enum unit_kind kind, int64_t row0, int64_t n, float *out,
		 struct err *e);

#endif
