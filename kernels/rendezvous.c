/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client of a network file system may not see a new file for up to a minute, unless it changes
 * the directory itself: who waits writes its own file again, now and then. That also helps where
 * somebody has swept the directory.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "digest.h"
#include "err.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "rendezvous.h"

#define NAME_SHOWN 64
#define AGAIN_FIRST 1.0
#define AGAIN_MOST 5.0

/* What stands in files; all of one machine's byte order, since NCCL's ids are, too. */
struct hello {
	char magic[8];
	unsigned char number[RENDEZVOUS_NUMBER];
};

/* Behind it [world] numbers. */
struct answer {
	char magic[8];
	unsigned char stamp[RENDEZVOUS_NUMBER];
	unsigned char bytes[RENDEZVOUS_BYTES];
};

struct farewell {
	char magic[8];
	int32_t rank;
};

#define HELLO "dspkhel1"
#define ANSWER "dspkans1"
#define FAREWELL "dspkend1"

static char *start_path(const struct rendezvous *r, int rank, struct err *e)
{
	return mem_printf(e, "%s/.nccl.%s.tmp.start.%d.0", r->dir, r->name, rank);
}

static char *end_path(const struct rendezvous *r, struct err *e)
{
	char hex[2 * RENDEZVOUS_NUMBER + 1];

	for (int i = 0; i < RENDEZVOUS_NUMBER; i++)
		snprintf(hex + 2 * i, 3, "%02x", r->stamp[i]);
	return mem_printf(e, "%s/.nccl.%s.tmp.%s.0.0", r->dir, r->name, hex);
}

/* Up to n bytes of a file: how many there are, or -1 where there is none that can be read. */
static ssize_t read_file(const char *path, void *buf, size_t n)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
	struct stat st;
	ssize_t got = -1;

	if (fd < 0)
		return -1;
	if (!fstat(fd, &st) && S_ISREG(st.st_mode))
		got = pread(fd, buf, n, 0);
	close(fd);
	return got;
}

static int write_own(struct rendezvous *r, const void *buf, size_t n, struct err *e)
{
	char *path = start_path(r, r->rank, e);
	int rc = path ? file_publish(path, r->rank, buf, n, e) : -1;

	free(path);
	r->written = r->written || !rc;
	r->when = log_seconds();
	r->next = r->next > 0 ? 2 * r->next : AGAIN_FIRST;
	if (r->next > AGAIN_MOST)
		r->next = AGAIN_MOST;
	return rc;
}

static int draw(unsigned char *number, struct err *e)
{
	if (getrandom(number, RENDEZVOUS_NUMBER, 0) != RENDEZVOUS_NUMBER)
		return err_errno(e, "cannot draw a random number");
	number[0] |= 1; /* none is zero */
	return 0;
}

/* Readable as far as that goes; a digest of all of it keeps names apart. */
static char *file_name(const char *name, struct err *e)
{
	char shown[NAME_SHOWN + 1], hex[DIGEST_HEX];
	size_t n = 0;

	for (const char *s = name; *s && n < NAME_SHOWN; s++)
		shown[n++] = isalnum((unsigned char)*s) || strchr("._-", *s) ? *s : '_';
	shown[n] = '\0';
	digest_xxh3(hex, name, strlen(name));
	return mem_printf(e, "%s-%.16s", shown, hex);
}

static int say_hello(struct rendezvous *r, struct err *e)
{
	struct hello h = { .magic = HELLO };

	memcpy(h.number, r->number, sizeof h.number);
	return write_own(r, &h, sizeof h, e);
}

int rendezvous_open(struct rendezvous *r, const char *dir, const char *name, int rank, int world,
		    const void *bytes, struct err *e)
{
	*r = (struct rendezvous){ .rank = rank, .world = world };
	r->dir = mem_strdup(dir, e);
	r->name = file_name(name, e);
	if (!rank)
		r->seen = mem_calloc((size_t)world, RENDEZVOUS_NUMBER, e);
	if (e->code || file_mkdir_p(dir, e) || draw(r->number, e))
		return -1;
	if (rank)
		return say_hello(r, e);
	memcpy(r->stamp, r->number, sizeof r->stamp);
	memcpy(r->bytes, bytes, sizeof r->bytes);
	return 0;
}

/* ---- rank 0 ---------------------------------------------------------------------------------- */

static unsigned char *seen(const struct rendezvous *r, int rank)
{
	return r->seen + (size_t)rank * RENDEZVOUS_NUMBER;
}

/* Whether one has shown up since, or shown up anew. */
static int look_around(struct rendezvous *r, bool *news, struct err *e)
{
	for (int i = 1; i < r->world; i++) {
		char *path = start_path(r, i, e);
		struct hello h;

		if (!path)
			return -1;
		if (read_file(path, &h, sizeof h) == sizeof h &&
		    !memcmp(h.magic, HELLO, sizeof h.magic) &&
		    memcmp(h.number, seen(r, i), sizeof h.number)) {
			memcpy(seen(r, i), h.number, sizeof h.number);
			*news = true;
		}
		free(path);
	}
	return 0;
}

/* What stands in the answer's place is ours, nothing, or of somebody who is still at it. */
static int check_alone(struct rendezvous *r, bool *gone, struct err *e)
{
	struct answer a;
	char *path = start_path(r, 0, e);
	ssize_t n = path ? read_file(path, &a, sizeof a) : -1;

	free(path);
	if (e->code)
		return -1;
	*gone = n != sizeof a;
	if (*gone || !memcmp(a.stamp, r->stamp, sizeof a.stamp))
		return 0;
	return err_fail(e,
			"another run with the same name ('%s') connects its ranks in '%s' at the "
			"same time: start one of them after the other",
			r->name, r->dir);
}

static int write_answer(struct rendezvous *r, struct err *e)
{
	size_t all = (size_t)r->world * RENDEZVOUS_NUMBER;
	struct answer a = { .magic = ANSWER };
	char *buf = mem_calloc(1, sizeof a + all, e);
	int rc;

	if (!buf)
		return -1;
	memcpy(a.stamp, r->stamp, sizeof a.stamp);
	memcpy(a.bytes, r->bytes, sizeof a.bytes);
	memcpy(buf, &a, sizeof a);
	memcpy(buf + sizeof a, r->seen, all);
	rc = write_own(r, buf, sizeof a + all, e);
	free(buf);
	return rc;
}

static int look_as_first(struct rendezvous *r, struct err *e)
{
	bool news = false, gone = true;

	if ((r->written && check_alone(r, &gone, e)) || look_around(r, &news, e))
		return -1;
	return news || gone || log_seconds() - r->when > r->next ? write_answer(r, e) : 0;
}

int rendezvous_missing(const struct rendezvous *r, char *list, size_t room)
{
	static const unsigned char none[RENDEZVOUS_NUMBER];
	size_t len = 0;
	int n = 0;

	*list = '\0';
	for (int i = 1; i < r->world && r->seen; i++) {
		if (memcmp(seen(r, i), none, sizeof none))
			continue;
		if (len + 16 < room)
			len += (size_t)snprintf(list + len, room - len, "%s%d", n ? ", " : "", i);
		else if (list[len - 1] != '.')
			len += (size_t)snprintf(list + len, room - len, ", ...");
		n++;
	}
	return n;
}

/* ---- the others ------------------------------------------------------------------------------ */

static int take_answer(struct rendezvous *r, bool *got, struct err *e)
{
	size_t n = sizeof(struct answer) + (size_t)r->world * RENDEZVOUS_NUMBER;
	char *path = start_path(r, 0, e), *buf = mem_calloc(n + 1, 1, e);
	struct answer a;

	if (path && buf && read_file(path, buf, n + 1) == (ssize_t)n) {
		memcpy(&a, buf, sizeof a);
		*got = !memcmp(a.magic, ANSWER, sizeof a.magic) &&
		       !memcmp(buf + sizeof a + (size_t)r->rank * RENDEZVOUS_NUMBER, r->number,
			       sizeof r->number);
	}
	if (*got) {
		memcpy(r->stamp, a.stamp, sizeof r->stamp);
		memcpy(r->bytes, a.bytes, sizeof r->bytes);
	}
	free(path);
	free(buf);
	return e->code ? -1 : 0;
}

int rendezvous_look(struct rendezvous *r, bool *got, struct err *e)
{
	*got = !r->rank;
	if (!r->rank)
		return look_as_first(r, e);
	if (take_answer(r, got, e))
		return -1;
	return !*got && log_seconds() - r->when > r->next ? say_hello(r, e) : 0;
}

/* ---- the end --------------------------------------------------------------------------------- */

/* Not what another rank 0 of the same name has put in its place. */
static bool is_own(const struct rendezvous *r, const char *path)
{
	unsigned char own[8 + RENDEZVOUS_NUMBER]; /* a hello, or the beginning of an answer */

	return read_file(path, own, sizeof own) == sizeof own &&
	       !memcmp(own + 8, r->number, RENDEZVOUS_NUMBER);
}

void rendezvous_done(struct rendezvous *r)
{
	struct err e = ERR_INIT;
	char *path = r->written ? start_path(r, r->rank, &e) : NULL;

	if (path && is_own(r, path))
		unlink(path);
	free(path);
	r->written = false;
}

void rendezvous_fail(struct rendezvous *r)
{
	struct farewell f = { .magic = FAREWELL, .rank = r->rank };
	struct err e = ERR_INIT;
	char *path = end_path(r, &e);

	/* the first one is the cause */
	if (path && rendezvous_failed(r) < 0)
		file_publish(path, r->rank, &f, sizeof f, &e);
	free(path);
}

int rendezvous_failed(const struct rendezvous *r)
{
	struct farewell f = { .rank = -1 };
	struct err e = ERR_INIT;
	char *path = end_path(r, &e);
	bool there = path && read_file(path, &f, sizeof f) == sizeof f &&
		     !memcmp(f.magic, FAREWELL, sizeof f.magic);

	free(path);
	return there ? f.rank : -1;
}

void rendezvous_release(struct rendezvous *r)
{
	if (r->name)
		rendezvous_done(r);
	free(r->dir);
	free(r->name);
	free(r->seen);
	memset(r, 0, sizeof *r);
}
