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

#include "catalogue.h"
#include "digest.h"

struct err;

struct checkpoint_file {
	char *name;			/* relative to the directory, without a slash */
	uint64_t size, data;		/* bytes: of the file; before its tensors */
	int64_t mtime_ns;
	bool missing;			/* only with `estimate` */
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

#endif
