/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scales: the scales of a packed weight in host memory, for all CPU backends. Rows of one block
 * have the same ones, which are kept once for every 64 rows of the weight.
 */
#ifndef DSPARK_SCALES_H
#define DSPARK_SCALES_H

#include <pthread.h>

#include "backend.h"

struct ref_scales {
	pthread_mutex_t lock;		/* of data while it is filled */
	int64_t chunks;			/* runs of 64 rows that a matrix has */
	int64_t slots;			/* different rows that one may have */
	size_t row, chunk;		/* bytes of a row of scales; of what 64 rows have */
	/* [count][chunks]: a byte a row, 1 + its slot (0 = never filled), then the slots */
	unsigned char *data;
};

/* Of w->quant; release only after a success. */
int ref_scales_init(struct ref_scales *s, const struct weight *w, struct err *e);
void ref_scales_release(struct ref_scales *s);

/* As weight_fill; refuses more different rows than there are slots. Thread-safe. */
int ref_scales_put(struct ref_scales *s, int64_t index, int64_t row0, int64_t n,
		   const void *scales, struct err *e);

/* The scales of a row, NULL where it was never filled. Not while others put. */
const void *ref_scales_row(const struct ref_scales *s, int64_t index, int64_t row);

#endif
