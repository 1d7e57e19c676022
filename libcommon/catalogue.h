/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalogue: tensors by name and where their bytes lie, whoever holds them.
 */
#ifndef DSPARK_CATALOGUE_H
#define DSPARK_CATALOGUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dtype.h"

struct err;

/* How ranks divide the rows of a weight. */
enum shard {
	SHARD_WHOLE,	/* on every rank */
	/* FSDP: rank r of n holds rows [r*c, min((r+1)*c, rows)), c = ceil(rows/n) */
	SHARD_ROWS,
	SHARD_EXPERT,	/* E/ep consecutive experts; with ep < world ROWS over the ep_shard group */
	SHARD_TABLE,	/* read by row id, never gathered */
};

/* A tensor's place. ndim -1: an estimate knows only its name. */
struct entry {
	const char *name;
	enum dtype dtype;
	int ndim;
	const int64_t *shape;		/* of the whole tensor, also where only a slice is held */
	int file;			/* index into the holder's files */
	uint64_t begin, end;		/* bytes in that file */
	int64_t row0, rows;	/* rows of the first dimension that are held: [row0, row0 + rows) */
};

/* Anything in which tensors are looked up by name: a checkpoint or a stage. */
struct catalogue {
	/* NULL if absent. */
	const struct entry *(*find)(const struct catalogue *c, const char *name);
	const char *path;		/* for messages */
	bool staged;			/* holds derived tensors; elsewhere they have no sources */
	/* an estimate: what is absent or unknown counts as BF16 (FP32 weights: F32, RAW: I64) */
	bool partial;
};

/* Open hash over the names of an array of entries. */
struct entry_index {
	uint32_t *bucket;		/* entry number + 1, 0 = free */
	size_t n;			/* power of two */
};

/* -1 with *twice set to the second of two entries of one name (or NULL: no memory). */
int entry_index_build(struct entry_index *x, const struct entry *entry, size_t n,
		      const struct entry **twice, struct err *e);
const struct entry *entry_index_find(const struct entry_index *x, const struct entry *entry,
				     const char *name);
void entry_index_release(struct entry_index *x);

/*
 * Rows of an entry as weight_source counts them: all dimensions but the last ([n]: n; scalar: 1),
 * and the bytes of one.
 */
int64_t entry_rows(const struct entry *t);
uint64_t entry_row_bytes(const struct entry *t);

#endif
