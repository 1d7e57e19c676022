/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokens: a tokens.safetensors (DESIGN section 2): ragged ids and masks of N rows. Only the row
 * offsets are kept in memory.
 */
#ifndef DSPARK_TOKENS_H
#define DSPARK_TOKENS_H

#include <stdbool.h>
#include <stdint.h>

#include "safetensors.h"
#include "digest.h"

struct err;

struct tokens {
	struct safetensors file;
	const struct st_tensor *ids, *mask;	/* i32 [T], u8 [T] */
	int64_t rows, total;			/* N, T */
	int64_t *offset;			/* [N+1]; row i is [offset[i], offset[i+1]) */
	int64_t seq_length, pad_token_id, shuffle_seed;
	const char *template_sha256, *train_data_path, *train_split /* NULL = null */;
	const char *rows_xxh3, *tokenizer_xxh3;	/* the latter "" where unknown */
	bool mask_reasoning_content, mask_generation_prompt;
	char *split_text;			/* owns train_split */
};

#define TOKENS_INIT { .file = SAFETENSORS_INIT }

/*
 * Opens and checks format, version, tensors, metadata, offsets (0 first, ascending, T last, rows of
 * 1..seq_length tokens). O(rows) memory. A row without tokens is refused: nothing could be computed
 * for it, and the reference would only cache states of its padding. Zero rows are legal, as is
 * another tensor beside the three.
 */
int tokens_open(struct tokens *t, const char *path, struct err *e);
void tokens_release(struct tokens *t);

static inline int64_t tokens_length(const struct tokens *t, int64_t row)
{
	return t->offset[row + 1] - t->offset[row];
}

/* ids and mask of rows [first, first+n), one after another; either may be NULL. */
int tokens_rows(const struct tokens *t, int64_t first, int64_t n, int32_t *ids, uint8_t *mask,
		struct err *e);

/*
 * Reads the file once, in pieces: ids and pad_token_id in [0, vocab), mask 0 or 1, rows_xxh3_128.
 * Names the first bad row and position, from 0.
 */
int tokens_verify(const struct tokens *t, int64_t vocab, struct err *e);

/*
 * Refuses (listing all differences) tokens whose seq_length, data path, split, seed or masks are
 * not the recipe's.
 */
struct recipe;
int tokens_match(const struct tokens *t, const struct recipe *r, struct err *e);

#endif
