/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache: the directory that training reads: what it holds, opening it for writing, and what merge,
 * verify, show and diff know.
 *
 *	manifest.json			the reference's names and shapes
 *	target_weights.safetensors
 *	shard-%06d.safetensors
 *	dspark.json			identity; after merge also sizes and hashes (vouch.h)
 *	.dspark.lock			who opens, who lives (cache_lock.h); empty when nobody runs
 *
 * dspark.json is written before manifest.json, so a manifest.json alone is the reference's.
 */
#ifndef DSPARK_CACHE_H
#define DSPARK_CACHE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "cache_lock.h"
#include "digest.h"
#include "geometry.h"
#include "identity.h"
#include "shard.h"

struct err;

/* What a directory holds, from dspark.json or (a reference cache) manifest.json. */
struct cache_state {
	bool exists;      /* one of the two is there */
	bool foreign;     /* manifest.json without dspark.json */
	bool complete;    /* manifest.json says so */
	json_t *identity; /* {"manifest": ...} alone if foreign; NULL if nothing exists */
};

/*
 * A missing directory or an empty one is no error. Refuses a damaged dspark.json or manifest.json.
 */
int cache_inspect(struct cache_state *s, const char *dir, struct err *e);
void cache_state_release(struct cache_state *s);

/*
 * Shards of `identity` (digest) already published in `dir`, by header and size only: sets
 * done[shard], true or false, and *count. A missing directory holds none.
 */
int cache_done(const char *dir, const struct geometry *g, const char *identity, bool *done,
	       int64_t *count, struct err *e);

/*
 * Calls `visit` for each directory entry named shard-DDDDDD.safetensors. A missing directory has
 * none; visit's failure ends the walk.
 */
int cache_each_shard(const char *dir, int (*visit)(void *ctx, int64_t shard, struct err *e),
		     void *ctx, struct err *e);

/*
 * Refuses a directory that holds another cache (all differing fields), the reference's, or, where
 * no manifest says whose they are, shards of another identity. A missing directory is good.
 */
int cache_check(const char *dir, const struct geometry *g, const struct identity *id,
		struct err *e);

/* ---- writing ---------------------------------------------------------------- */

struct cache {
	char *dir;
	struct geometry g;
	char identity[DIGEST_HEX];
	int rank;
	struct cache_lock lock; /* byte 1 is held shared until cache_close */
};

#define CACHE_INIT { .lock = CACHE_LOCK_INIT }

/*
 * Streams the rows of embedding (0) and head (1) in any float dtype for target_weights: rows [row0,
 * row0+n) into buf as F32 [n,H].
 */
struct cache_weights {
	int (*read)(void *ctx, int which, int64_t row0, int64_t n, float *buf, struct err *e);
	void *ctx;
};

/*
 * Opens `dir` for writing: creates it; under the lock refuses a reference cache, another cache (all
 * differing fields) and another living plan, sweeps temporaries that no living rank owns, writes
 * dspark.json, manifest.json (complete: false) and target_weights where absent or not of this
 * identity. `plan` is the plan's digest. `work` false (this rank will publish nothing) leaves a
 * cache that is there as it is: complete stays complete. `w` NULL leaves target_weights to
 * cache_open_weights or others. On failure nothing is held. *c is a CACHE_INIT, c->lock.patience
 * apart.
 */
int cache_open(struct cache *c, const char *dir, const struct geometry *g,
	       const struct identity *id, const char *plan, int rank, bool work,
	       const struct cache_weights *w, struct err *e);
/*
 * target_weights, where absent or not of this identity, into an open cache, under the lock: for who
 * has better things to do while it is written. Any thread, one at a time.
 */
int cache_open_weights(struct cache *c, const struct cache_weights *w, struct err *e);
/* Releases the lock; the last one alive empties it. Legal on CACHE_INIT and after a failed open. */
void cache_close(struct cache *c);

/* Writes `name` in `dir` atomically unless its bytes are these already (its mtime stays then). */
int cache_put(const char *dir, const char *name, int rank, const char *buf, size_t n,
	      struct err *e);

/* ---- dspark-manifest ---------------------------------------------------------------- */

/*
 * Each prints its result to stdout and returns 0, or -1 with EXIT_REFUSED (incomplete, damaged,
 * different) or EXIT_FAILED.
 */
int cache_merge(const char *dir, struct err *e);
struct verify_options {
	bool logits;  /* also recompute sampled rows' logits from the last states and lm_head */
	bool discard; /* rename bad files to *.bad and clear `complete` */
};
int cache_verify(const char *dir, const struct verify_options *o, struct err *e);
int cache_show(const char *dir, bool stats, struct err *e);
int cache_diff(const char *a, const char *b, struct err *e);

#endif
