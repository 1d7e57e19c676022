/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keys: which keys a recipe may have, and what becomes of them. Data of recipe.c and of its checks.
 */
#ifndef DSPARK_KEYS_H
#define DSPARK_KEYS_H

#include <stdbool.h>
#include <stddef.h>

struct err;

enum key_kind {
	KEY_TEXT,		/* as written */
	KEY_PATHS,		/* as written, or a list of such texts */
	KEY_VALUE,		/* whatever literal it is */
	KEY_TUNING,		/* legal; tunes the reference's own kernels, and is reported */
	KEY_TRAINING,		/* legal; read by the training that uses the cache */
};

struct key {
	const char *section, *name;
	enum key_kind kind;
};

/* The sections that are read, NULL-ended. */
extern const char *const keys_sections[];

/* NULL if the section has no such key. */
const struct key *keys_find(const char *section, const char *name);

/* True for the sections that are read and for those that only training reads. */
bool keys_section(const char *name);

/*
 * The known spelling nearest to `name` in a section (NULL: among the sections that are read), or
 * NULL if none is near.
 */
const char *keys_nearest(const char *section, const char *name);

/*
 * Checks the name in "section.key[.more]=value" before any file is read; EXIT_USAGE with the
 * nearest known spelling.
 */
int keys_check(const char *override, struct err *e);

#endif
