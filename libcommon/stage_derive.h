/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage_derive: the tensors that a model makes at staging, as a file of the stage that all shares
 * take them from.
 */
#ifndef DSPARK_STAGE_DERIVE_H
#define DSPARK_STAGE_DERIVE_H

#include "digest.h"
#include "model.h"
#include "text.h"

struct err;

#define STAGE_DERIVED "derived.safetensors"

struct stage_derivation {
	char digest[DIGEST_HEX];	/* "" where the model derives nothing */
	size_t n, cap;
	/* whole tensors of the file, which is number `file` of the holder */
	struct entry *entry;
	struct text data, bytes;	/* of the tensors; the whole file */
};

/* Runs the model's derive, if it has one. Keeps all tensors in memory: they are small. */
int stage_derive(struct stage_derivation *d, struct target *t, const char *dir, int file,
		 struct err *e);
const struct entry *stage_derivation_find(const struct stage_derivation *d, const char *name);
void stage_derivation_release(struct stage_derivation *d);

#endif
