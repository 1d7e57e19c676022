/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vouch: dspark.json, the file that vouches for a cache. One member a line:
 *
 *	format, version, identity, identity_xxh3_128	from the first opening on
 *	files, manifest_xxh3_128, program		from merge on: size and header hash of each
 *							shard and of target_weights, hash of
 *							manifest.json with "complete": true,
 *							the version that merged
 *	xxh3_128					last: hash of all bytes before its line
 */
#ifndef DSPARK_VOUCH_H
#define DSPARK_VOUCH_H

#include <jansson.h>
#include <stdint.h>

#include "digest.h"
#include "identity.h"

struct err;
struct text;

struct vouch {
	json_t *json; /* the whole file; NULL: there is none */
	struct identity identity;
	json_t *files; /* borrowed: {NAME: {"size", "header_xxh3_128"}}; NULL before merge */
	const char *manifest, *program; /* borrowed; NULL before merge */
};

/*
 * Reads DIR/dspark.json. A missing file is no error. Refuses another format or version and every
 * byte that is not as it was written.
 */
int vouch_read(struct vouch *v, const char *dir, struct err *e);
void vouch_release(struct vouch *v);

/* The file's bytes; `files` NULL: as before merge (manifest is unused). */
int vouch_text(struct text *out, const struct identity *id, const json_t *files,
	       const char *manifest, struct err *e);

#endif
