/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_view: a cache as merge, verify, show and diff read it, ours or the reference's. Nothing is
 * locked or changed.
 */
#ifndef DSPARK_CACHE_VIEW_H
#define DSPARK_CACHE_VIEW_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "geometry.h"
#include "shard.h"
#include "vouch.h"

struct err;
struct text;

struct cache_view {
	char *dir;
	struct vouch vouch; /* empty if foreign */
	bool foreign, complete;
	json_t *identity;   /* {"manifest": ...} alone if foreign */
	const char *digest; /* of the identity; NULL if foreign */
	struct geometry g;
	int64_t shards;
	bool *present;               /* [shards]: a file of that name is there */
	int64_t strangers, stranger; /* shard names beyond the last, and one of them */
};

/* Refuses a directory without cache and everything cache_inspect and geometry_check refuse. */
int cache_view_open(struct cache_view *v, const char *dir, struct err *e);
void cache_view_release(struct cache_view *v);

/* Opens a shard's header with what the cache knows of it. */
int cache_view_shard(const struct cache_view *v, int64_t shard, struct shard_head *h,
		     struct err *e);
int cache_view_weights(const struct cache_view *v, struct weights_head *h, struct err *e);

/* The set members of flag [n] as "12-40, 77", and how many; after 40 intervals "...". */
int64_t cache_intervals(struct text *out, const bool *flag, int64_t n);

#endif
