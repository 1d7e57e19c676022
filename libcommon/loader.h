/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loader: makes units of weights behind the compute.
 *
 * One thread takes the loads in the order in which they were asked for. A load goes through
 *
 *	WAITING -> READING -> GATHERING -> FILLING -> READY
 *
 * reading this rank's part of a gathered unit into the wire buffer, having it exchanged by the
 * caller's thread, and filling device memory from the wire and the stage. What is not gathered goes
 * from WAITING to FILLING. Reading and filling are cut into pieces of rows that stay in a core's
 * cache; a caller that has to wait takes pieces too, with all threads of the device.
 *
 * The wire holds the parts of the members one behind the other, each the pieces of the rows that
 * the member holds, as stored, in the order of the walk. Behind the pieces stand the rows of the
 * tensors' grids that they need, piece by piece: who receives codes needs no grid of his own.
 *
 * The wire is the device's memory where the transport takes that (device_buffers) and it is not the
 * host's: parts go there piece by piece, the weights are filled from it, and only grids come back.
 */
#ifndef DSPARK_LOADER_H
#define DSPARK_LOADER_H

#include "weights.h"

struct load;

int loader_open(struct loader **l, struct weights *w, struct err *e);
void loader_free(struct loader *l);		/* may be NULL; ends what is under way */

/* As weights_want; the block's `chosen` is copied. *load may be compared, not looked into. */
int loader_want(struct loader *l, struct unit *u, const struct expert_block *b, struct load **load,
		struct err *e);

/*
 * Waits until the load is ready and moves its weights into the fields of its unit, which are then
 * to be freed by the caller. On success the load is gone.
 */
int loader_take(struct loader *l, struct load *load, struct err *e);

/* Starts or moves on the gather of the load under way. */
int loader_poll(struct loader *l, struct err *e);

/*
 * What the scales of a packed matrix take on the wire at most: its grids once, and a row of one
 * (`strip` bytes) more at both ends of each piece of its `bytes` of codes, and gaps.
 */
uint64_t loader_scale_bytes(uint64_t grids, uint64_t strip, uint64_t bytes, int members);

/* Seconds that units were read and filled, and that they waited for a gather to end. */
void loader_times(struct loader *l, double *making, double *gathering);

uint64_t loader_read(struct loader *l);		/* bytes from the stage so far */

#endif
