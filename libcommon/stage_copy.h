/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage_copy: a share's tensors as one file of the stage, raw or packed: written from the
 * checkpoint, or found there and verified.
 */
#ifndef DSPARK_STAGE_COPY_H
#define DSPARK_STAGE_COPY_H

#include <stdint.h>

#include "checkpoint.h"
#include "log.h"
#include "stage_index.h"

struct err;

struct stage_copier {
	const char *dir;
	const struct checkpoint *checkpoint;
	int *fd;			/* of its files and the derived one, opened on demand */
	char *buf;			/* one piece */
	struct packer *packer;		/* LZ4 */
	struct progress *progress;	/* NULL = none */
	uint64_t done;			/* bytes of shares that were written or verified */
};

int stage_copier_open(struct stage_copier *k, const char *dir, const struct checkpoint *c,
		      struct progress *p, struct err *e);
void stage_copier_release(struct stage_copier *k);

/*
 * `x` lists the share with its places in the checkpoint. On success the entries' places, hashes and
 * tables, x->file and x->size are those of the copy; otherwise x is as it was. keep: 0 a whole copy
 * is there and all its bytes are right, 1 there is none or it does not fit (a warning says why), -1
 * failed.
 */
int stage_copy_keep(struct stage_copier *k, struct stage_index *x, struct err *e);
int stage_copy_make(struct stage_copier *k, struct stage_index *x, struct err *e);

#endif
