/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_lock: who may open a cache, and who lives in it. All changes of byte 1 and of the file's
 * text happen under byte 0.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cache_lock.h"
#include "err.h"
#include "file.h"
#include "log.h"

#define PLAN_NAME 64 /* a digest, with room */

enum { OPENING, LIVING }; /* the two bytes */

/* Between two tries of who does not wait for ever (ns). */
#define PAUSE_SHORTEST 500000L
#define PAUSE_LONGEST  50000000L

static int lock_open(struct cache_lock *l, const char *dir, struct err *e)
{
	l->path = file_join(dir, ".dspark.lock", e);
	if (!l->path)
		return -1;
	do
		l->fd = open(l->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
	while (l->fd < 0 && errno == EINTR);
	return l->fd < 0 ? err_input(e, "cannot open '%s'", l->path) : 0;
}

/* Byte 0, for as long as there is patience. */
static int lock_opening(const struct cache_lock *l, struct err *e)
{
	const struct cache_patience *p = &l->patience;
	struct timespec pause = { 0, PAUSE_SHORTEST };
	double start = log_seconds(), waited;
	int rc;

	while ((rc = file_lock(l->fd, l->path, OPENING, FILE_EXCLUSIVE, p->seconds <= 0, e)) > 0) {
		waited = log_seconds() - start;
		if (p->stop && *p->stop)
			return err_fail(e,
					"stopped by a signal while waiting for the lock '%s'; "
					"published shards are safe, the same command goes on",
					l->path);
		if (waited > p->seconds)
			return err_fail(e,
					"waited %.*f s for the lock '%s', held by another rank "
					"that opens or closes the cache: look at the other ranks, "
					"and give the same command again or plan with a larger "
					"dist_env.timeout_minutes",
					waited < 10, waited, l->path);
		nanosleep(&pause, NULL);
		if (pause.tv_nsec < PAUSE_LONGEST)
			pause.tv_nsec *= 2;
	}
	return rc;
}

static bool has_no_locks(int number)
{
	return number == ENOLCK || number == EOPNOTSUPP || number == ENOSYS || number == EINVAL;
}

/* Byte 0. The answer of the file system decides whether there are locks at all. */
static int lock_enter(struct cache_lock *l, struct err *e)
{
	struct err local = ERR_INIT;

	errno = 0;
	l->works = !lock_opening(l, &local);
	if (l->works)
		return 0;
	if (!has_no_locks(errno))
		return err_fail(e, "%s", local.text);
	log_warn("%s: without locks nothing keeps two different runs out of "
		 "one directory",
		 local.text);
	return 0;
}

static void read_plan(const struct cache_lock *l, char plan[PLAN_NAME])
{
	ssize_t n = pread(l->fd, plan, PLAN_NAME - 1, 0);

	plan[n < 0 ? 0 : n] = '\0';
	plan[strcspn(plan, "\n")] = '\0';
}

static int write_plan(const struct cache_lock *l, const char *plan, struct err *e)
{
	if (ftruncate(l->fd, 0))
		return err_errno(e, "cannot write '%s'", l->path);
	if (!plan)
		return 0;
	return file_pwrite(l->fd, l->path, plan, strlen(plan), 0, e) ||
	       file_pwrite(l->fd, l->path, "\n", 1, strlen(plan), e);
}

static int refuse(const struct cache_lock *l, const char *dir, const char *living, const char *plan,
		  struct err *e)
{
	if (!*living)
		return err_refuse(e,
				  "'%s' is being merged or mended by another process: wait "
				  "for it ('%s')",
				  dir, l->path);
	if (!plan)
		return err_refuse(e,
				  "'%s' is being written by ranks of plan %s: wait until "
				  "they end ('%s')",
				  dir, living, l->path);
	return err_refuse(e,
			  "'%s' is being written by ranks of another plan, %s (this "
			  "one is %s): wait until they end ('%s')",
			  dir, living, plan, l->path);
}

static int lock_join(struct cache_lock *l, const char *dir, const char *plan, struct err *e)
{
	char living[PLAN_NAME];
	int rc = file_lock(l->fd, l->path, LIVING, FILE_EXCLUSIVE, false, e);

	if (rc < 0)
		return -1;
	l->alone = !rc;
	if (l->alone) {
		if (write_plan(l, plan, e))
			return -1;
		return plan ? file_lock(l->fd, l->path, LIVING, FILE_SHARED, false, e) : 0;
	}
	read_plan(l, living);
	if (!plan || strcmp(living, plan))
		return refuse(l, dir, living, plan, e);
	rc = file_lock(l->fd, l->path, LIVING, FILE_SHARED, false, e);
	return rc > 0 ? refuse(l, dir, "", plan, e) : rc;
}

int cache_lock_begin(struct cache_lock *l, const char *dir, const char *plan, struct err *e)
{
	*l = (struct cache_lock){ .fd = -1, .patience = l->patience };
	if (lock_open(l, dir, e) || lock_enter(l, e) || (l->works && lock_join(l, dir, plan, e))) {
		cache_lock_end(l);
		return -1;
	}
	return 0;
}

void cache_lock_opened(struct cache_lock *l)
{
	struct err ignored = ERR_INIT;

	if (l->works)
		file_lock(l->fd, l->path, OPENING, FILE_UNLOCK, false, &ignored);
}

int cache_lock_again(struct cache_lock *l, struct err *e)
{
	return l->works ? lock_opening(l, e) : 0;
}

/*
 * Two ranks that end at once: the first finds the second alive and leaves under byte 0, the second
 * finds itself alone.
 */
void cache_lock_end(struct cache_lock *l)
{
	struct err ignored = ERR_INIT;

	if (l->fd >= 0 && l->works &&
	    !lock_opening(l, &ignored) &&
	    !file_lock(l->fd, l->path, LIVING, FILE_EXCLUSIVE, false, &ignored) &&
	    ftruncate(l->fd, 0))
		log_debug("cannot empty '%s'", l->path);
	if (l->fd >= 0)
		close(l->fd);
	free(l->path);
	*l = (struct cache_lock)CACHE_LOCK_INIT;
}
