/* SPDX-License-Identifier: Apache-2.0 */
/*
 * geometry: the numbers that fix the size and layout of every file of a cache, and nothing else
 * about it.
 *
 *	shard of n rows:  header | input_ids i64 [n,S] | loss_mask i64 [n,S] |
 *			  target_hidden_states [n,S,L*H] | target_last_hidden_states [n,S,H]
 *
 * The header's length depends on n and the shapes alone, so all full shards have one size.
 */
#ifndef DSPARK_GEOMETRY_H
#define DSPARK_GEOMETRY_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "dtype.h"
#include "safetensors.h"

struct err;

struct geometry {
	int64_t rows, seq_length, shard_size; /* N, S, rows of a full shard */
	int64_t hidden;                       /* H */
	int nids;                             /* L captured layers */
	int64_t vocab;                        /* V */
	enum dtype dtype;                     /* of the states and target weights */
	int64_t pad_token_id;                 /* -1 = unknown (a reference cache) */
};

/* The tensors of a shard, in file order. */
enum shard_tensor { SHARD_IDS, SHARD_MASK, SHARD_STATES, SHARD_LAST, SHARD_TENSORS };
const char *shard_tensor_name(enum shard_tensor t);

/*
 * Refuses numbers no cache can have: sizes below one (rows: below zero), a dtype other than F32,
 * BF16, F16, more than 1,000,000 shards (names have six digits and the reference reads no other), a
 * header over 100 MB, a file over 2^63 bytes. The functions below want a geometry that passed.
 * `what` begins the sentence.
 */
int geometry_check(const struct geometry *g, const char *what, struct err *e);

/* From an identity's members (identity.h), checked. */
int geometry_read(struct geometry *g, const json_t *identity, const char *what, struct err *e);

int64_t geometry_shards(const struct geometry *g); /* ceil(N / shard_size) */
int64_t geometry_shard_rows(const struct geometry *g, int64_t shard);

/* Bytes of one position. */
uint64_t geometry_token_bytes(const struct geometry *g, enum shard_tensor t);

/* Name, dtype and shape of a shard's tensors for n rows; begin and end with the data at `data`. */
void geometry_tensors(const struct geometry *g, int64_t n, uint64_t data,
		      struct st_tensor t[SHARD_TENSORS]);

/* Of a shard of n rows: bytes before the data, a multiple of 4096; exact size of the file. */
uint64_t geometry_header(const struct geometry *g, int64_t n);
uint64_t geometry_shard_bytes(const struct geometry *g, int64_t n);
uint64_t geometry_target_weights(const struct geometry *g); /* exact size of the file */

/*
 * Upper bound of the bytes really allocated, in blocks of `block`, for a shard of n rows whose real
 * lengths sum to `tokens`. What du says lies below it by at most 2 blocks a row and tensor. Without
 * holes (`sparse` false) it is the full size in blocks.
 */
uint64_t geometry_allocated(const struct geometry *g, int64_t n, int64_t tokens, uint64_t block,
			    bool sparse);

#endif
