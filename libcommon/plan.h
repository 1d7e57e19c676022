/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan: what each rank does and how big all becomes, as data and as records (`plan`, `host`,
 * `range`).
 *
 * Windows and chunks are fixed by a rule, not listed: a rank's rows in order, cut before the row
 * that would exceed window_tokens (chunk_tokens); a row longer than that is alone. Everything is
 * derived from the tokens file's row offsets and the numbers here.
 */
#ifndef DSPARK_PLAN_H
#define DSPARK_PLAN_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "dtype.h"
#include "geometry.h"
#include "identity.h"
#include "record.h"

struct err;
struct tokens;

#define PLAN_VERSION 2

/* Raised whenever results change. */
#define PLAN_NUMERICS 2

enum residency {
	WEIGHTS_RESIDENT,
	WEIGHTS_GATHER,
	WEIGHTS_STREAM,
	WEIGHTS_GATHER_STREAM,
	WEIGHTS_COUNT
};
/* "resident", "gather", "stream", "gather,stream" */
const char *residency_name(enum residency r);

/* Tensors of a checkpoint, or some of them; 0 in an estimate that does not know them. */
struct plan_tensors {
	int64_t tensors, parameters;	/* parameters: of used weights alone, without scales */
	uint64_t bytes;
};

/*
 * Memory of ranks [first, last] under a residency: `total` of the five before it. `own` is what a
 * device with memory of its own needs for itself, 0 for others; there buffers are 0, and shares of
 * weights that are gathered (host_held), what is on its way (host_working) and the buffers
 * (host_buffers) lie in host memory.
 */
struct plan_memory {
	enum residency residency;
	int first, last;
	uint64_t held, working, activations, buffers, own, total;
	uint64_t host_held, host_working, host_buffers;
};

struct plan_range {
	int rank;
	int64_t (*shards)[2];		/* intervals [first, end), ascending */
	int nintervals;
	int64_t nshards, rows, tokens, windows;
};

struct plan {
	int version, world;
	bool runnable;			/* false: an estimate */
	/* XXH3-128 of the plan record without this member and of the ranges */
	char digest[DIGEST_HEX];
	json_t *recipe;			/* resolved, paths as written */
	/*
	 * the target's config.json, so that forward needs nothing of the checkpoint but the stage
	 */
	json_t *config;
	char *tokens;			/* path as written; NULL in an estimate */
	char *target_dir, *cache_dir;	/* as written */
	struct geometry g;
	int64_t *ids;			/* [g.nids] captured layers */
	struct identity identity;
	char weights[DIGEST_HEX], stage_key[DIGEST_HEX];
	enum dtype compute;
	char *device;			/* "cpu", "cuda" */
	enum residency residency;
	bool force_hf;
	/* the ranks of a shard group hold parts of the weights (stage.h): gathered residencies */
	bool cut;
	bool keep;			/* what was gathered stays */
	bool spill;			/* carry and captured states lie in files in TMPDIR */
	int64_t block_experts;		/* of a block, where blocks come and go; 0 = all */
	int64_t exchange_rows;		/* rows of a rank in a round of exchange.h; 0 = none */
	int64_t target_layers;		/* target_num_hidden_layers, 0 = all */
	int ep, cp, replicate;
	int64_t window_tokens, chunk_tokens;	/* the cutting rule */
	/* tokens of the largest window and chunk: the rule's number or the longest row */
	int64_t window_most, chunk_most;
	int64_t longest;		/* tokens of the longest row; not read back */
	double timeout_minutes;
	char *balance;			/* "tokens", "shards" */

	/* Bytes of the cache, and of the memory of one rank. */
	uint64_t shard_bytes, last_shard_bytes, target_weights_bytes, total_bytes, allocated_bytes;
	uint64_t weight_bytes, scratch_bytes, carry_bytes, exchange_bytes, capture_bytes;
	uint64_t host_weight_bytes;	/* in host memory beside a device with memory of its own */
	/* All, and those that are read; `unused` is a pattern of the others' names or NULL. */
	struct plan_tensors checkpoint, used;
	char *unused;
	struct plan_memory *memory;	/* [nmemory] of every residency; not read back */
	size_t nmemory, memory_cap;

	struct plan_range *range;	/* [world]; NULL in an estimate */

	/* From the `host` record: where the plan was made. */
	char *cwd;			/* relative paths start there */
	/*
	 * directory that target_dir stands for when it is a name in the Hugging Face cache, else
	 * NULL
	 */
	char *target_found;
};

/*
 * Fills p from a run; refuses a run without plan, fewer ranges than its world, an estimate, another
 * version, a digest that does not match.
 */
int plan_read(struct plan *p, const struct run *r, struct err *e);

/*
 * Computes the digest and writes the plan record, `host` (a reference is not taken) and one range a
 * rank.
 */
int plan_write(FILE *out, struct plan *p, json_t *host, struct err *e);
void plan_release(struct plan *p);

/* A path of the plan as seen from here: absolute, or joined to the plan's cwd. malloc'ed. */
char *plan_path(const struct plan *p, const char *path, struct err *e);
char *plan_target(const struct plan *p, struct err *e);		/* the model directory, likewise */

/* The plan's device has memory of its own; captured states and shares lie in host memory. */
bool plan_apart(const struct plan *p);

/* Memory of a rank, of its device where that has its own: what is spilled is not counted. */
uint64_t plan_rank_bytes(const struct plan *p);
/* Host memory of a rank beside a device with memory of its own, else 0. */
uint64_t plan_host_bytes(const struct plan *p);

/* Ranks depend on each other: all have to run, connected, in step. */
bool plan_lockstep(const struct plan *p);

/* Windows of a rank's range, walked in order. A window never crosses an interval's end. */
struct plan_cursor {
	const struct plan *plan;
	const struct plan_range *range;
	const struct tokens *tokens;
	int interval;
	int64_t row;			/* next row of that interval, -1 = its start */
};
void plan_windows(struct plan_cursor *c, const struct plan *p, const struct plan_range *range,
		  const struct tokens *t);
/* The next window: rows [*first, *first + *n). False at the end. */
bool plan_next_window(struct plan_cursor *c, int64_t *first, int64_t *n);
/* How many rows from `first`, at most n and at least one, stay within `tokens` tokens. */
int64_t plan_fit(const struct tokens *t, int64_t first, int64_t n, int64_t tokens);

#endif
