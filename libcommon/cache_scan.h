/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_scan: every byte of a shard or of target weights, read once, judged and hashed. What is
 * wrong becomes lines of text.
 */
#ifndef DSPARK_CACHE_SCAN_H
#define DSPARK_CACHE_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cache_view.h"
#include "text.h"

struct err;

/* What was found in one file: "row 3: ..." one a line; from the ninth on only counted. */
struct faults {
	struct text text;
	int64_t n;
};

void faults_add(struct faults *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void faults_release(struct faults *f);

/* Are all floats finite? *zero: are all of them +-0? `d` is F32, BF16 or F16. */
bool scan_finite(const void *p, size_t bytes, enum dtype d, bool *zero);

/*
 * Reads shard `i` in pieces of a few MiB: ids in [0,V), mask 0 or 1, states finite; with hashes
 * also each row's hash, pads (ids the pad id, mask and states zero) and no real position all zero
 * (the embedding output excepted: a token may have a zero embedding); without them the supervised
 * positions must not be zero. `header` is the header's hash where it could be read. `read` (may be
 * NULL) is told bytes as they pass. -1 only where scanning itself fails.
 */
int cache_scan_shard(const struct cache_view *v, int64_t i, struct faults *f,
		     char header[DIGEST_HEX], void (*read)(void *ctx, uint64_t bytes), void *ctx,
		     struct err *e);
int cache_scan_weights(const struct cache_view *v, struct faults *f, char header[DIGEST_HEX],
		       struct err *e);

#endif
