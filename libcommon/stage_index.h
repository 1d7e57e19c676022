/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage_index: the text form of a stage's head and indexes.
 *
 *	stage.json
 *	{"format":"dspark-stage","version":1,"key":"...","form":"copy","shares":2,
 *	"checkpoint":"/models/x","files":[			by reference only
 *	{"name":"model.safetensors","size":12,"mtime_ns":34}
 *	],
 *	"xxh3_128":"..."}
 *
 *	index-SSSSS.jsonl		one line a tensor; file, size and xxh3_128 in copies,
 *					blocks in LZ4 only
 *	{"format":"dspark-stage-index","version":1,"key":"...","form":"copy","share":0,
 *	 "tensors":9,"bytes":99,"file":"rank-00000.safetensors","size":123}
 *	{"name":"...","dtype":"BF16","shape":[8,4],"row":0,"rows":8,"file":0,"begin":72,
 *	 "end":136,"xxh3_128":"...","blocks":[61]}
 *	{"xxh3_128":"..."}
 *
 * Both end with a hash of all bytes before `"xxh3_128"` of the last line (in an index: before its
 * brace, too: of all lines but the last).
 */
#ifndef DSPARK_STAGE_INDEX_H
#define DSPARK_STAGE_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "checkpoint.h"
#include "digest.h"
#include "stage.h"
#include "text.h"

struct err;

struct stage_head {
	char key[DIGEST_HEX], digest[DIGEST_HEX];
	enum stage_form form;
	int shares;
	char *checkpoint;		/* absolute; NULL in copies */
	size_t nfiles;
	struct checkpoint_file *file;	/* name, size, mtime_ns */
};

/* 0 read, 1 there is no stage.json, -1 refused (damaged, another format or version). */
int stage_head_read(struct stage_head *h, const char *dir, struct err *e);
int stage_head_parse(struct stage_head *h, const struct text *t, const char *what, struct err *e);
/* also sets h->digest */
int stage_head_text(struct text *out, struct stage_head *h, struct err *e);
void stage_head_release(struct stage_head *h);

/* Where a tensor's bytes lie, beside its entry. */
struct stage_place {
	char hash[DIGEST_HEX];		/* of the held bytes, decoded; "" by reference */
	size_t nblocks;			/* LZ4 */
	uint64_t *block;		/* [nblocks + 1] offsets in the file */
};

struct stage_index {
	char key[DIGEST_HEX];
	enum stage_form form;
	int share;
	char *file;			/* of a copy, its name in the stage; NULL by reference */
	uint64_t size;			/* of that file */
	size_t n, cap;
	struct entry *entry;
	struct stage_place *place;
	void **chunk;			/* arena of names, shapes and tables */
	size_t nchunks, capchunks, left;
	char *next;
};

int stage_index_name(char **path, const char *dir, int share, struct err *e);
int stage_index_read(struct stage_index *x, const char *path, struct err *e);
int stage_index_parse(struct stage_index *x, const struct text *t, const char *what, struct err *e);
int stage_index_text(struct text *out, const struct stage_index *x, struct err *e);
/* borrows name and shape */
int stage_index_add(struct stage_index *x, const struct entry *t, struct err *e);
/* makes tensor i's table, zeroed */
int stage_index_blocks(struct stage_index *x, size_t i, size_t n, struct err *e);
uint64_t stage_index_bytes(const struct stage_index *x);			/* held, decoded */
void stage_index_release(struct stage_index *x);

#endif
