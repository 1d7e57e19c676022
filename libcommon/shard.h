/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard: one shard file being written, and the headers of shards and target weights that are read.
 *
 * __metadata__ (strings; `identity` is the first member of the header):
 *	identity		digest of the cache's identity
 *	row_tokens		real length of each row, comma-separated
 *	xxh3_128.NAME		for each tensor one XXH3-128 per row over the bytes of its real
 *				positions, comma-separated; in target_weights over the whole tensor
 */
#ifndef DSPARK_SHARD_H
#define DSPARK_SHARD_H

#include <stdbool.h>
#include <stdint.h>

#include "digest.h"
#include "file.h"
#include "geometry.h"
#include "safetensors.h"

struct cache;
struct err;

/* DIR/shard-%06d.safetensors, malloc'ed. */
char *shard_path(const char *dir, int64_t index, struct err *e);

/*
 * Is the file published with this identity, size and header length? One open, fstat and pread;
 * false on any error.
 */
bool shard_is_done(const char *path, uint64_t size, uint64_t header, const char *identity);

/*
 * One shard being written: its temporary is sized by ftruncate; rows come in any order, each once,
 * and are hashed and judged as they come; padded positions of the states are never written (holes),
 * ids are padded with pad_token_id, the mask with 0. One thread at a time. Any failure leaves a
 * writer that can only be aborted; aborting a zeroed or published one does nothing.
 */
struct shard_writer {
	struct file_new file;
	const struct cache *cache;
	int64_t index, rows, written;
	struct st_tensor tensor[SHARD_TENSORS];
	int64_t *row_tokens;                     /* [rows]; 0 = not written yet */
	char (*hash)[SHARD_TENSORS][DIGEST_HEX]; /* [rows] */
	int64_t *line;                           /* [S]: a padded row of ids or mask */
	struct digest *digest;
	bool nonfinite;                          /* a row came with a NaN or an infinity */
};

int shard_begin(struct shard_writer *w, const struct cache *c, int64_t index, struct err *e);
/* ids, mask [len], states [len, L*H] and last [len, H] in the cache dtype; 1 <= len <= S. */
int shard_row(struct shard_writer *w, int64_t row, const int32_t *ids, const uint8_t *mask,
	      int64_t len, const void *states, const void *last, struct err *e);
/*
 * publish will name the file shard-%06d.safetensors.bad (.N.bad where that is taken), which no
 * reader takes for a shard.
 */
int shard_mark_bad(struct shard_writer *w, struct err *e);
/*
 * Writes the header, fsyncs, renames. Refuses while rows are missing. *bytes (may be NULL): the
 * file's size.
 */
int shard_publish(struct shard_writer *w, uint64_t *bytes, struct err *e);
void shard_abort(struct shard_writer *w);

/* The header of a published shard. */
struct shard_head {
	struct safetensors file; /* open */
	int64_t rows;
	const struct st_tensor *tensor[SHARD_TENSORS];
	int64_t *row_tokens;             /* [rows]; NULL: the reference wrote it */
	const char *hash[SHARD_TENSORS]; /* row r's 32 digits start at 33 * r */
	char header_xxh3[DIGEST_HEX];
};

#define SHARD_HEAD_INIT { .file = SAFETENSORS_INIT }

/*
 * Opens a shard of n rows and checks names, dtypes and shapes; with `identity` also layout, size,
 * identity, lengths and the form of the hashes. Only the header is read.
 */
int shard_head_open(struct shard_head *h, const char *path, const struct geometry *g, int64_t n,
		    const char *identity, struct err *e);
void shard_head_release(struct shard_head *h);

/* Positions [first, first + n) of a row of tensor t. Threads may share a head. */
int shard_read(const struct shard_head *h, const struct geometry *g, enum shard_tensor t,
	       int64_t row, int64_t first, int64_t n, void *buf, struct err *e);

/*
 * The first position of the row from `first` on that may hold bytes other than zero: those before
 * it are a hole of the file and need no reading. S if there is none; `first` where the file system
 * cannot tell.
 */
int64_t shard_skip_hole(const struct shard_head *h, const struct geometry *g, enum shard_tensor t,
			int64_t row, int64_t first);

/* The header of a target_weights.safetensors, checked in the same way (`hash` is NULL without
 * `identity`). */
struct weights_head {
	struct safetensors file;           /* open */
	const struct st_tensor *tensor[2]; /* embed_tokens.weight, lm_head.weight: [V,H] */
	const char *hash[2];
	char header_xxh3[DIGEST_HEX];
};

#define WEIGHTS_HEAD_INIT { .file = SAFETENSORS_INIT }

const char *weights_name(int which);
int weights_head_open(struct weights_head *h, const char *path, const struct geometry *g,
		      const char *identity, struct err *e);
void weights_head_release(struct weights_head *h);

#endif
