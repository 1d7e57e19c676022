/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage: what each rank holds of the weights, as byte extents in files: the checkpoint's own (by
 * reference) or copies made for node-local disks. Ranks that hold the same share: rank r reads
 * share r % shares; ranks that each need everything have one.
 *
 *	STAGE/stage.json		head (stage_index.h): form, key, shares; by reference the
 *					checkpoint's files with size and mtime
 *	STAGE/index-SSSSS.jsonl		share S's tensors: name, dtype, shape, rows held, place
 *	STAGE/rank-SSSSS.safetensors	with --copy: its tensors and their XXH3-128
 *	STAGE/rank-SSSSS.lz4		with --copy=lz4: independently decodable blocks (pack.h),
 *					their table in the index
 *	STAGE/derived.safetensors	tensors that the model makes at staging (model.h, derive);
 *					every share may name it
 *	STAGE/.dspark.lock		byte 0: a living dspark-load; byte 1 + S: who makes share S
 *
 * The head does not depend on which shares were made where: nodes that stage their own --ranks
 * write the same one.
 */
#ifndef DSPARK_STAGE_H
#define DSPARK_STAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "catalogue.h"
#include "digest.h"

struct checkpoint;
struct err;
struct plan;
struct target;

enum stage_form { STAGE_REFERENCE, STAGE_COPY, STAGE_LZ4, STAGE_FORMS };
const char *stage_form_name(enum stage_form f);		/* "reference", "copy", "lz4" */

/*
 * How ranks divide the weights (DESIGN section 5). Experts always belong to ep_index, where rank =
 * ep_shard * ep + ep_index. With `cut` (weights that are gathered) all else is divided over shard
 * groups of n = world / replicate consecutive ranks, and experts over those of a group that have
 * the same ep_index.
 */
struct stage_mesh {
	int world, ep, replicate;
	bool cut;
};

/* The mesh of a plan. */
struct stage_mesh stage_mesh(const struct plan *p);

/*
 * Distinct shares: ep, or with `cut` the larger of n and ep. Refuses a mesh in which neither of n
 * and ep divides the other, or ep does not divide the world.
 */
int stage_shares(const struct stage_mesh *m, int *shares, struct err *e);

/* Ranks among which a weight is cut: 1, n or n / ep. */
int stage_members(const struct stage_mesh *m, enum shard shard);

/*
 * The rows that share `share` holds of a weight [count, rows, cols], counted through the stack of
 * count * rows: [*first, *first + *n), possibly none. WHOLE, TABLE: all. ROWS: all, or cut over the
 * n of the shard group. EXPERT: the stack of the count / ep experts of its ep_index, or that cut
 * over the n / ep of the group that hold the same (a share may begin and end inside an expert). A
 * cut of D over m gives c = ceil(D / m) to each.
 */
void stage_share(const struct stage_mesh *m, int share, enum shard shard, int64_t count,
		 int64_t rows, int64_t *first, int64_t *n);

/*
 * Key of the stage that a plan needs: XXH3-128 over everything that decides what a share holds.
 * The world counts only where weights are cut: other stages serve every world. `layers` is
 * target_num_hidden_layers (0 = all), `derived` what stage_derived gives.
 */
void stage_key(char hex[DIGEST_HEX], const char *weights_identity, const struct stage_mesh *m,
	       int64_t layers, bool force_hf, const char *derived);

/*
 * Digest of what the model derives from other files of the model directory, "" where it derives
 * nothing.
 */
int stage_derived(char hex[DIGEST_HEX], struct target *t, const char *dir, struct err *e);

/* ---- making ---------------------------------------------------------------------------------- */

struct stage_options {
	enum stage_form form;		/* REFERENCE also takes a fitting copy for good */
	const bool *ranks;		/* [plan->world], NULL = all */
	bool progress;
};

struct stage_made {
	enum stage_form form;
	char digest[DIGEST_HEX];	/* of the head */
	int shares, done;		/* all; those that `ranks` asks for */
	uint64_t bytes;			/* held by the latter */
	bool reused;			/* nothing had to be written */
};

/*
 * Makes the stage of `plan` in `dir`: walks the target's weights over the checkpoint, takes each
 * share, and writes head, indexes and copies, each atomically. What is there and fits is kept:
 * indexes are compared, copies read and hashed; a damaged one is made again (with a warning).
 * Refuses a directory inside the checkpoint, and a copy of another key or form, which only its user
 * deletes; a stage by reference holds nothing of value and is replaced. Memory: one index and a few
 * MiB of buffers.
 */
int stage_make(const char *dir, const struct plan *plan, struct target *t,
	       const struct checkpoint *c, const struct stage_options *o, struct stage_made *made,
	       struct err *e);

/* ---- reading --------------------------------------------------------------------------------- */

struct stage {
	/* first: this rank's tensors by name; experts of other ranks are not listed */
	struct catalogue catalogue;
	char *dir;
	enum stage_form form;
	char key[DIGEST_HEX], digest[DIGEST_HEX];	/* digest: of the head */
	int shares, share;
	size_t nfiles;
	char **file;			/* paths */
	int *fd;			/* opened on demand, -1 = not open */
	size_t nentries;
	const struct entry *entry;	/* in the order of use */
	struct stage_state *state;
};

/*
 * The share of rank `rank`: reads head and index, checks their hashes, `key` (of the plan) and each
 * file's size, by reference also its mtime. Release after failure is legal.
 */
int stage_open(struct stage *s, const char *dir, const char *key, int rank, struct err *e);
void stage_release(struct stage *s);

/* Bytes held of an entry, decoded: rows * bytes of a row. */
uint64_t stage_bytes(const struct entry *t);

/*
 * Bytes [off, off + n) of an entry's held bytes, decoded; byte 0 is the first of row entry->row0.
 * Thread-safe. A damaged LZ4 block, and a damaged copied tensor when all of it is read at once, is
 * refused; so is what no hash judges once its file has another size or mtime than at stage_open.
 * LZ4 blocks are decoded anew in each call: read in large pieces.
 */
int stage_read(struct stage *s, const struct entry *entry, void *buf, uint64_t off, uint64_t n,
	       struct err *e);

/* These bytes will be read soon: the kernel may fetch them meanwhile. */
void stage_ahead(struct stage *s, const struct entry *entry, uint64_t off, uint64_t n);

#endif
