/* SPDX-License-Identifier: Apache-2.0 */
/*
 * identity: everything that decides a byte of a cache (DESIGN section 2), as one JSON object.
 *
 *	{ "manifest": { manifest.json's fields without "complete" }, "pad_token_id": 0,
 *	  "rows_xxh3_128": "...", ... }
 *
 * Members beside `manifest` and `pad_token_id` are only compared, never interpreted here.
 */
#ifndef DSPARK_IDENTITY_H
#define DSPARK_IDENTITY_H

#include <jansson.h>
#include <stdbool.h>

#include "digest.h"

struct err;
struct text;

struct identity {
	json_t *json;            /* owned */
	char digest[DIGEST_HEX]; /* XXH3-128 of its compact form with sorted keys */
};

int identity_finish(struct identity *id, struct err *e); /* digest from json */
void identity_release(struct identity *id);

/*
 * All fields that differ, one a line "field: old -> new", sorted; manifest fields stand without
 * prefix. `format_version` and `complete` are ignored, mask_* missing from a manifest are false (as
 * in the reference). Where one side is nothing but a manifest (a reference cache) only manifests
 * are compared. Empty text: the same.
 */
void identity_differences(struct text *out, const json_t *have, const json_t *want);

/*
 * The bytes of manifest.json: the identity's manifest with `complete`, as Python's
 * json.dump(indent=2, sort_keys=True).
 */
int identity_manifest(struct text *out, const json_t *identity, bool complete, struct err *e);

#endif
