/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rig: what the measurements of kernels share: a target without a checkpoint, pairs of runs that
 * take turns, and results as JSON lines or as a table.
 */
#ifndef DSPARK_RIG_H
#define DSPARK_RIG_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "err.h"
#include "kernels.h"
#include "model.h"

#define PAIRS_MOST 99

struct rig_options {
	const char *config;  /* a config.json */
	const char *backend; /* "cpu", "ref" */
	enum dtype compute;
	int64_t layers;       /* 0 = as in the config */
	int64_t topk;         /* keys a query sees, 0 = as in the config */
	int64_t length, rows; /* tokens of a row; profile: rows, 0 = a window of them */
	int64_t tokens;       /* products: rows of x */
	int64_t repeats;      /* measured passes, or pairs */
	int64_t threads;      /* 0 = as dspark-forward chooses */
	bool table;
};

struct noise {
	float mean, deviation;
	uint16_t *p; /* NULL = none yet */
};

#define NOISES 16

struct rig {
	const struct rig_options *o;
	struct target target;
	struct device dev;
	struct weight **held; /* [n] in device memory */
	size_t n, cap;
	int64_t weight_bytes; /* as planned */
	struct noise noise[NOISES];
	double filling; /* seconds: making room, converting and packing */
};

/* The target of o->config and a device for it. Release a zeroed or opened rig. */
int rig_open(struct rig *r, const struct rig_options *o, struct err *e);
void rig_release(struct rig *r);

/*
 * Describes every weight of the walk and fills those that the forward keeps in device memory with
 * random numbers, about as large as trained ones.
 */
int rig_fill(struct rig *r, struct err *e);

/* `w` as it describes itself, each matrix from the same bf16 numbers; for weight_free. */
int rig_weight(struct rig *r, struct weight *w, const uint16_t *numbers, struct err *e);

/* n uniform numbers around `mean` with this standard deviation; the same for the same seed. */
void rig_noise(uint16_t *bf16, int64_t n, float mean, float deviation, uint64_t seed);

/* Of n numbers, which it sorts. */
double rig_median(double *x, int n);

/* Two ways to do the same; each call does it once. */
struct contest {
	int (*ours)(void *ctx, struct err *e);
	int (*theirs)(void *ctx, struct err *e);
	void *ctx;
};

/* Medians: seconds of one call; theirs / ours of each pair, with the least and the largest. */
struct outcome {
	double ours, theirs;
	double ratio, least, most;
};

/*
 * `pairs` (at most PAIRS_MOST) alternated pairs after one that does not count. Who begins changes
 * from pair to pair; a short call is repeated until it fills a sample.
 */
int contest_run(const struct contest *c, int pairs, struct outcome *o, struct err *e);

enum bound { BOUND_NONE, BOUND_AT_LEAST, BOUND_AT_MOST };

/*
 * Puts a result on stdout: a JSON line of part, name, value, unit, bound, target, whether it holds
 * and the members of `more` (stolen, may be NULL), or a line of a table.
 */
void rig_result(const struct rig_options *o, const char *part, const char *name, double value,
		const char *unit, enum bound bound, double target, json_t *more);

/* How long weights take from host memory to where products want them. */
int pack(const struct rig_options *o, struct err *e);

/* Where the time of a forward goes. */
int profile(const struct rig_options *o, struct err *e);

/* The backend's products beside oneDNN's own. */
int products(const struct rig_options *o, struct err *e);

/* A layer whose queries see chosen keys beside the same one with all keys. */
int sparse(const struct rig_options *o, struct err *e);

/* Products of packed weights beside the same of plain ones. */
int packed(const struct rig_options *o, struct err *e);

#endif
