/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_lock: DIR/.dspark.lock, two bytes locked by open-file description.
 *
 *	byte 0	exclusive, waiting: somebody opens or closes the cache
 *	byte 1	shared: a rank lives; exclusive: merge or verify --discard works alone
 *
 * The file holds the digest of the plan whose ranks live and is empty when nobody runs. Where the
 * file system has no locks one warning says so, everything succeeds, and the file stays empty.
 */
#ifndef DSPARK_CACHE_LOCK_H
#define DSPARK_CACHE_LOCK_H

#include <signal.h>
#include <stdbool.h>

struct err;

/*
 * How waiting for byte 0 ends, apart from getting it; EXIT_FAILED each. Who holds it may be a rank
 * that has stopped for good.
 */
struct cache_patience {
	double seconds; /* 0 = for ever, whatever `stop` says */
	const volatile sig_atomic_t *stop; /* nonzero there ends it; may be NULL */
};

struct cache_lock {
	int fd; /* -1 = nothing held */
	char *path;
	bool works; /* the file system has locks */
	bool alone; /* nobody else lived when it was taken */
	struct cache_patience patience;
};

#define CACHE_LOCK_INIT { .fd = -1 }

/*
 * Takes byte 0 and then byte 1: shared as a rank of `plan`, or exclusively where plan is NULL. Both
 * are held on success; refuses another living plan by name, merge while a rank lives, and ranks
 * while merge works. Everything but l->patience is set anew.
 */
int cache_lock_begin(struct cache_lock *l, const char *dir, const char *plan, struct err *e);
void cache_lock_opened(struct cache_lock *l); /* gives byte 0 back */
/* Byte 0 once more, waiting, until cache_lock_opened. Succeeds where there are no locks. */
int cache_lock_again(struct cache_lock *l, struct err *e);
/* The last one alive empties the file. Legal when nothing is held. */
void cache_lock_end(struct cache_lock *l);

#endif
