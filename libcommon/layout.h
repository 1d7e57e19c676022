/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout: recipe + target + rows -> plan. All arithmetic of dspark-plan: captured ids, identity,
 * file sizes, memory of a rank (budget.h) and the residency that fits it, ranges.
 */
#ifndef DSPARK_LAYOUT_H
#define DSPARK_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "model.h"
#include "plan.h"

struct err;
struct recipe;
struct tokens;
struct checkpoint;

/*
 * Defaults of --window-tokens: where weights stay or are gathered, and where they are streamed, for
 * which a larger window makes fewer readings.
 */
#define LAYOUT_WINDOW_TOKENS 4096
#define LAYOUT_WINDOW_STREAMED 16384
#define LAYOUT_CHUNK_TOKENS 2048

/*
 * The same for devices with memory of their own, which want more rows at a time; windows are halved
 * down to LAYOUT_DEVICE_LEAST where the memory asks for it.
 */
#define LAYOUT_DEVICE_TOKENS 16384
#define LAYOUT_DEVICE_STREAMED 65536
#define LAYOUT_DEVICE_LEAST 2048
#define LAYOUT_DEVICE_CHUNK 8192

enum balance { BALANCE_TOKENS, BALANCE_SHARDS };

struct layout_options {
	int64_t world;			/* 0 = ep_size, else 1 */
	enum balance balance;
	const char *device;		/* "auto", "cpu", "cuda" */
	enum dtype compute;		/* DT_NONE = auto */
	int weights;			/* an enum residency, -1 = auto */
	/* of a rank, of its device where that has memory of its own; 0 = no bound */
	uint64_t memory;
	int64_t window_tokens;		/* 0 = default */
	bool force;			/* warn instead of refusing what does not fit */
};

/*
 * Fills p. `t` NULL or a partial checkpoint gives an estimate. `tokens_path` is as the user wrote
 * it. `template_sha` is the recipe's own template's, "" where none can be found. Refuses everything
 * that can be refused from these (DESIGN section 1, dspark-plan); a cache_output_dir that holds
 * another cache is refused with all differing fields.
 */
int layout_plan(struct plan *p, const struct recipe *r, struct target *target,
		const struct checkpoint *c, const struct tokens *t, const char *tokens_path,
		const char *template_sha, const struct layout_options *o, struct err *e);

/*
 * The `host` record: cwd, host name, free bytes, shards present. Call after layout_plan. New
 * reference or NULL.
 */
json_t *layout_host(const struct plan *p, const struct recipe *r, struct err *e);

#endif
