/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint: a model directory: config.json, its safetensors files and the name -> place index
 * over all of them.
 *
 * Only headers are read, no descriptor stays open. Which files count:
 *	model.safetensors.index.json	the files its weight_map names; it decides which
 *					file holds a name, other names are ignored
 *	else model.safetensors		that file alone
 *	else *.safetensors		all of them; a name that occurs twice is refused
 */
#ifndef DSPARK_CHECKPOINT_H
#define DSPARK_CHECKPOINT_H

#include <jansson.h>
#include <stdbool.h>

#include "digest.h"
#include "model.h"

struct err;

struct checkpoint_file {
	char *name;			/* relative to the directory, without a slash */
	uint64_t size, data;		/* bytes: of the file; before its tensors */
	int64_t mtime_ns;
	bool missing;			/* only with `estimate` */
};

/* Open hash over the names of an array of entries. */
struct entry_index {
	uint32_t *bucket;		/* entry number + 1, 0 = free */
	size_t n;			/* power of two */
};

struct checkpoint {
	/* first: find is O(1); entries hold whole tensors, `file` indexes `file` below */
	struct catalogue catalogue;
	char *dir;
	json_t *config;			/* config.json, an object */
	size_t nfiles;
	struct checkpoint_file *file;	/* ascending bytes of the name */
	bool partial;			/* some file is missing: see checkpoint_open */
	size_t nentries;
	struct entry *entry;
	struct entry_index index;
	void **block;			/* [nfiles] shapes, and names without an index */
	char *names;			/* of an index */
};

/*
 * Refuses a missing or malformed config.json, index or safetensors file, an index that names a
 * missing file or a tensor its file does not hold, and PyTorch .bin files. With `estimate` missing
 * files only set `partial`: their tensors are found by name (where an index names them) with dtype
 * DT_NONE, ndim -1 and no bytes.
 */
int checkpoint_open(struct checkpoint *c, const char *dir, bool estimate, struct err *e);
void checkpoint_release(struct checkpoint *c);

/*
 * Which weights these are: XXH3-128 over
 *	u64 length of config.json, its bytes, u64 number of files, and for each file in order
 *	u64 size | header: bytes [0, data) | blocks of the n = size - data bytes behind it: all of
 *	them where n <= 64 * 4096, else 4096 bytes at data + k * (n - 4096) / 63 (rounded
 *	down) for k = 0..63
 * with all u64 little-endian. Names and times do not enter. Refused for a partial checkpoint.
 */
int checkpoint_identity(const struct checkpoint *c, char hex[DIGEST_HEX], struct err *e);

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
