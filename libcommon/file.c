/* SPDX-License-Identifier: Apache-2.0 */
/*
 * file: reads, writes, atomic publication, locks and space.
 *
 * Living temporaries stand in a table of atomic pointers that file_abort_all only reads. An owner
 * empties its slot first, then waits until no file_abort_all that may have seen the pointer is
 * running, and frees it then: the handler may interrupt any thread at any point, and never meets a
 * freed path or an unregistered file.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "mem.h"
#include "text.h"

#define IO_MAX ((size_t)1 << 30)

/* What a direct write must be made of; below DIRECT_LEAST the page cache is the better place. */
#define PAGE         4096u
#define DIRECT_ALIGN 512u
#define DIRECT_LEAST ((size_t)256 << 10)
#define BOUNCE       ((size_t)1 << 20)

#define SLOTS  256

static _Atomic(char *) live[SLOTS];
static atomic_bool aborted; /* the process is about to end: no new files */
static atomic_int aborting; /* file_abort_all is running now */
static pthread_mutex_t live_lock =
	PTHREAD_MUTEX_INITIALIZER; /* between owners; file_abort_all takes no lock */

int file_open(const char *path, struct err *e)
{
	struct stat st;
	int fd;

	/* O_NONBLOCK: a FIFO without a writer must be refused, not waited for */
	do
		fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	while (fd < 0 && errno == EINTR);
	if (fd < 0)
		return err_input(e, "cannot open '%s'", path);
	if (fstat(fd, &st)) {
		err_input(e, "cannot open '%s'", path);
		goto fail;
	}
	if (S_ISDIR(st.st_mode)) {
		errno = EISDIR;
		err_input(e, "cannot open '%s'", path);
		goto fail;
	}
	if (!S_ISREG(st.st_mode)) {
		err_refuse(e, "cannot open '%s': not a regular file", path);
		goto fail;
	}
	return fd;
fail:
	close(fd);
	return -1;
}

static ssize_t read_some(int fd, void *buf, size_t n)
{
	ssize_t got;

	do
		got = read(fd, buf, n < IO_MAX ? n : IO_MAX);
	while (got < 0 && errno == EINTR);
	return got;
}

int file_read_fd(int fd, const char *name, size_t max, struct text *out, struct err *e)
{
	char buf[1 << 16];
	ssize_t got;

	text_clear(out);
	while ((got = read_some(fd, buf, sizeof buf)) > 0) {
		if ((size_t)got > max - out->len)
			return err_refuse(e, "'%s' is larger than %zu bytes", name, max);
		text_addn(out, buf, (size_t)got);
		if (text_ok(out, e))
			return err_context(e, "cannot read '%s'", name);
	}
	if (got < 0)
		return err_input(e, "cannot read '%s'", name);
	text_addn(out, "", 0);
	return text_ok(out, e);
}

int file_read_all(const char *path, size_t max, struct text *out, struct err *e)
{
	int fd = file_open(path, e), rc;

	if (fd < 0)
		return -1;
	rc = file_read_fd(fd, path, max, out, e);
	close(fd);
	return rc;
}

int file_read_stream(const char *path, size_t max, struct text *out, struct err *e)
{
	int fd, rc;

	do
		fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
	while (fd < 0 && errno == EINTR);
	if (fd < 0)
		return err_input(e, "cannot open '%s'", path);
	rc = file_read_fd(fd, path, max, out, e);
	close(fd);
	return rc;
}

int file_pread(int fd, const char *path, void *buf, size_t n, uint64_t off, struct err *e)
{
	char *p = buf;

	if (off > INT64_MAX || n > INT64_MAX - off)
		return err_refuse(e,
				  "'%s' cannot be read at byte %" PRIu64 ": no file is that long",
				  path, off);
	while (n) {
		ssize_t got = pread(fd, p, n < IO_MAX ? n : IO_MAX, (off_t)off);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return err_input(e, "cannot read '%s' at byte %" PRIu64, path, off);
		if (!got)
			return err_refuse(e,
					  "'%s' ends early: %zu more bytes wanted at byte %" PRIu64,
					  path, n, off);
		p += got;
		n -= (size_t)got;
		off += (uint64_t)got;
	}
	return 0;
}

int file_pwrite(int fd, const char *path, const void *buf, size_t n, uint64_t off, struct err *e)
{
	const char *p = buf;

	if (off > INT64_MAX || n > INT64_MAX - off)
		return err_fail(e, "cannot write '%s' at byte %" PRIu64 ": no file is that long",
				path, off);
	while (n) {
		ssize_t put = pwrite(fd, p, n < IO_MAX ? n : IO_MAX, (off_t)off);

		if (put < 0 && errno == EINTR)
			continue;
		if (put <= 0) {
			if (!put)
				errno = ENOSPC;
			return err_errno(e, "cannot write '%s' at byte %" PRIu64, path, off);
		}
		p += put;
		n -= (size_t)put;
		off += (uint64_t)put;
	}
	return 0;
}

int file_size(const char *path, uint64_t *size, int64_t *mtime_ns, struct err *e)
{
	struct stat st;

	if (stat(path, &st))
		return err_input(e, "cannot look at '%s'", path);
	if (!S_ISREG(st.st_mode))
		return err_refuse(e, "'%s' is not a regular file", path);
	*size = (uint64_t)st.st_size;
	if (mtime_ns)
		*mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
	return 0;
}

/* What may not be looked at is there for all we know: opening it will say why it cannot be read. */
bool file_exists(const char *path)
{
	struct stat st;

	return !stat(path, &st) || errno == EACCES || errno == ELOOP || errno == EIO;
}

bool file_is_dir(const char *path)
{
	struct stat st;

	return !stat(path, &st) && S_ISDIR(st.st_mode);
}

static int make_dir(const char *path, struct err *e)
{
	int number = mkdir(path, 0777) ? errno : 0;

	if (!number || (number == EEXIST && file_is_dir(path)))
		return 0;
	errno = number == EEXIST ? ENOTDIR : number;
	return err_errno(e, "cannot make directory '%s'", path);
}

int file_mkdir_p(const char *path, struct err *e)
{
	char *copy, *p;
	int rc = 0;

	if (file_is_dir(path))
		return 0;
	copy = mem_strdup(path, e);
	if (!copy)
		return -1;
	for (p = copy + 1; *copy && !rc && (p = strchr(p, '/')); p++) {
		*p = '\0';
		if (!file_is_dir(copy))
			rc = make_dir(copy, e);
		*p = '/';
	}
	if (!rc)
		rc = make_dir(copy, e);
	free(copy);
	return rc;
}

char *file_join(const char *dir, const char *name, struct err *e)
{
	size_t len = strlen(dir);

	if (name[0] == '/' || !len)
		return mem_strdup(name, e);
	return mem_printf(e, "%s%s%s", dir, dir[len - 1] == '/' ? "" : "/", name);
}

/* The directory part of `path`, "." where there is none. */
static char *parent_of(const char *path, struct err *e)
{
	size_t len = strlen(path);

	while (len > 1 && path[len - 1] == '/')
		len--;
	while (len && path[len - 1] != '/')
		len--;
	while (len > 1 && path[len - 1] == '/')
		len--;
	return len ? mem_printf(e, "%.*s", (int)len, path) : mem_strdup(".", e);
}

/*
 * The host part of temporaries' names: what the kernel calls us, with nothing that could end the
 * part or leave the directory.
 */
static void host_name(char host[HOST_NAME_MAX + 1])
{
	struct utsname u;
	char *p;

	snprintf(host, HOST_NAME_MAX + 1, "%s", uname(&u) ? "localhost" : u.nodename);
	for (p = host; *p; p++)
		if (!isalnum((unsigned char)*p) && *p != '-' && *p != '.')
			*p = '_';
}

static const char *last_part(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

/* Is a temporary of this path, or (in_any_dir) of this name alone, in the table? */
static bool is_live(const char *path, bool in_any_dir)
{
	bool found = false;
	int i;

	pthread_mutex_lock(&live_lock);
	for (i = 0; i < SLOTS && !found; i++) {
		const char *p = atomic_load(&live[i]);

		found = p && !strcmp(in_any_dir ? last_part(p) : p, path);
	}
	pthread_mutex_unlock(&live_lock);
	return found;
}

/* Puts a copy of `path` into the table. */
static int slot_take(const char *path, struct err *e)
{
	char *copy = mem_strdup(path, e);
	int i;

	if (!copy)
		return -1;
	pthread_mutex_lock(&live_lock);
	for (i = 0; i < SLOTS; i++) {
		char *none = NULL;

		if (atomic_compare_exchange_strong(&live[i], &none, copy))
			break;
	}
	pthread_mutex_unlock(&live_lock);
	if (i < SLOTS)
		return i;
	free(copy);
	return err_fail(e, "cannot create '%s': more than %d unfinished files", path, SLOTS);
}

static void slot_free(int slot)
{
	char *p;

	pthread_mutex_lock(&live_lock);
	p = atomic_exchange(&live[slot], NULL);
	while (atomic_load(&aborting))
		sched_yield();
	free(p);
	pthread_mutex_unlock(&live_lock);
}

static char *tmp_name(const char *path, int rank, struct err *e)
{
	const char *name = last_part(path);
	char host[HOST_NAME_MAX + 1];

	host_name(host);
	return mem_printf(e, "%.*s.%s.tmp.%s.%d.%ld", (int)(name - path), path, name, host, rank,
			  (long)getpid());
}

static void new_release(struct file_new *f)
{
	if (f->slot >= 0)
		slot_free(f->slot);
	free(f->tmp);
	free(f->path);
	free(f->bounce);
	*f = (struct file_new)FILE_NEW_INIT;
}

/*
 * A file of this name that is not in our table was left by an earlier process with our host, rank
 * and number (containers count from 1).
 */
static int create(const char *tmp)
{
	int tries, fd = -1;

	for (tries = 0; tries < 3 && fd < 0; tries++) {
		fd = open(tmp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
		if (fd < 0 && errno == EEXIST && unlink(tmp))
			break;
		if (fd < 0 && errno != EEXIST && errno != EINTR)
			break;
	}
	return fd;
}

static int new_create(struct file_new *f, struct err *e)
{
	if (is_live(f->tmp, false))
		return err_fail(e, "cannot create '%s': this process is writing it already",
				f->tmp);
	f->slot = slot_take(f->tmp, e);
	if (f->slot < 0)
		return -1;
	if (!atomic_load(&aborted)) {
		f->fd = create(f->tmp);
		if (f->fd < 0)
			return err_errno(e, "cannot create '%s'", f->tmp);
	}
	if (!atomic_load(&aborted))
		return 0;
	if (f->fd >= 0)
		unlink(f->tmp); /* file_abort_all may have looked before the file was there */
	return err_fail(e, "cannot create '%s': interrupted", f->tmp);
}

int file_new_open(struct file_new *f, const char *path, int rank, struct err *e)
{
	struct stat st;

	*f = (struct file_new)FILE_NEW_INIT;
	if (!*path || path[strlen(path) - 1] == '/')
		return err_refuse(e, "cannot create '%s': not a file name", path);
	if (!stat(path, &st) && !S_ISREG(st.st_mode))
		return err_refuse(e, "cannot replace '%s': not a regular file", path);
	f->path = mem_strdup(path, e);
	f->tmp = f->path ? tmp_name(path, rank, e) : NULL;
	if (f->tmp && !new_create(f, e))
		return 0;
	if (f->fd >= 0)
		close(f->fd);
	new_release(f);
	return -1;
}

/*
 * NFS repeats a request whose answer was lost: the second try finds the name gone because the first
 * succeeded.
 */
static int rename_over(const struct file_new *f)
{
	struct stat ours, target;

	if (!rename(f->tmp, f->path))
		return 0;
	if (errno != ENOENT)
		return -1;
	if (!fstat(f->fd, &ours) && !stat(f->path, &target) && ours.st_dev == target.st_dev &&
	    ours.st_ino == target.st_ino)
		return 0;
	errno = ENOENT;
	return -1;
}

static int fsync_retry(int fd)
{
	int rc;

	do
		rc = fsync(fd);
	while (rc && errno == EINTR);
	return rc;
}

int file_new_publish(struct file_new *f, struct err *e)
{
	char *dir = parent_of(f->path, e);
	int rc = -1;

	if (!dir)
		goto out;
	if (fsync_retry(f->fd)) {
		err_errno(e, "cannot write '%s' to disk", f->tmp);
		goto out;
	}
	if (rename_over(f)) {
		err_errno(e, "cannot rename '%s' to '%s'", f->tmp, f->path);
		goto out;
	}
	rc = file_fsync_dir(dir, e);
	close(f->fd);
	new_release(f);
out:
	free(dir);
	file_new_abort(f);
	return rc;
}

/* Writeback starts at once: publish then waits for the last bytes only. */
static int write_cached(struct file_new *f, const char *p, size_t n, uint64_t off, struct err *e)
{
	if (file_pwrite(f->fd, f->tmp, p, n, off, e))
		return -1;
	if (n >= DIRECT_LEAST)
		sync_file_range(f->fd, (off_t)off, (off_t)n, SYNC_FILE_RANGE_WRITE);
	return 0;
}

static bool set_direct(const struct file_new *f, bool on)
{
	int flags = fcntl(f->fd, F_GETFL);

	return flags >= 0 && !fcntl(f->fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT);
}

/* At most n bytes where they lie, or in the bounce buffer if a disk cannot fetch them there. */
static const char *fetchable(struct file_new *f, const char *p, size_t *n, struct err *e)
{
	if (!((uintptr_t)p % DIRECT_ALIGN)) {
		*n = *n < IO_MAX ? *n : IO_MAX;
		return p;
	}
	if (!f->bounce && !(f->bounce = mem_aligned(BOUNCE + PAGE, e)))
		return NULL;
	*n = *n < BOUNCE ? *n : BOUNCE;
	return memcpy(f->bounce + (-(uintptr_t)f->bounce % PAGE), p, *n);
}

/*
 * Whole pages. EINVAL is how file systems say that they cannot, or not from such memory; a write
 * cut short (a full disk) leaves a rest that is no whole pages: both go on through the cache,
 * which tells what is really wrong.
 */
static int write_direct(struct file_new *f, const char *p, size_t n, uint64_t off, struct err *e)
{
	bool on = !f->cached && set_direct(f, true);
	const char *from = p;
	ssize_t put = 0;

	f->cached = !on;
	while (on && n && put % PAGE == 0) {
		size_t k = n;

		from = fetchable(f, p, &k, e);
		if (!from)
			break;
		put = pwrite(f->fd, from, k, (off_t)off);
		if (put < 0 && errno == EINTR) {
			put = 0;
			continue;
		}
		if (put <= 0) {
			f->cached = put < 0 && errno == EINVAL;
			break;
		}
		p += put;
		n -= (size_t)put;
		off += (uint64_t)put;
	}
	if (on)
		set_direct(f, false);
	if (!from)
		return -1;
	return n ? write_cached(f, p, n, off, e) : 0;
}

int file_new_write(struct file_new *f, const void *buf, size_t n, uint64_t off, struct err *e)
{
	const char *p = buf;
	size_t head = -off % PAGE, body;

	if (f->cached || n < head + DIRECT_LEAST || off > INT64_MAX || n > INT64_MAX - off)
		return write_cached(f, p, n, off, e);
	body = (n - head) / PAGE * PAGE;
	if ((head && file_pwrite(f->fd, f->tmp, p, head, off, e)) ||
	    write_direct(f, p + head, body, off + head, e))
		return -1;
	n -= head + body;
	return n ? file_pwrite(f->fd, f->tmp, p + head + body, n, off + head + body, e) : 0;
}

void file_new_abort(struct file_new *f)
{
	if (!f->tmp) {
		free(f->path);
		*f = (struct file_new)FILE_NEW_INIT;
		return;
	}
	if (f->fd >= 0)
		close(f->fd);
	unlink(f->tmp);
	new_release(f);
}

void file_abort_all(void)
{
	int saved = errno, i;

	atomic_store(&aborted, true);
	atomic_fetch_add(&aborting, 1);
	for (i = 0; i < SLOTS; i++) {
		const char *p = atomic_load(&live[i]);

		if (p)
			unlink(p);
	}
	atomic_fetch_sub(&aborting, 1);
	errno = saved;
}

/* Digits at the end of name[0, *len) behind a dot: cut off and returned, or -1. */
static long cut_number(const char *name, size_t *len)
{
	size_t end = *len, i = end;

	while (i && isdigit((unsigned char)name[i - 1]))
		i--;
	if (i == end || !i || name[i - 1] != '.' || end - i > 10)
		return -1;
	*len = i - 1;
	return strtol(name + i, NULL, 10);
}

/* Is `name` a temporary? If it is of this host, its process is in *pid, else 0. */
static bool is_temporary(const char *name, const char *host, long *pid)
{
	size_t len = strlen(name), tail;
	char ours[HOST_NAME_MAX + 8];
	long number;

	*pid = 0;
	number = name[0] == '.' ? cut_number(name, &len) : -1;
	if (number < 0 || cut_number(name, &len) < 0 || !memmem(name + 1, len - 1, ".tmp.", 5))
		return false;
	tail = (size_t)snprintf(ours, sizeof ours, ".tmp.%s", host);
	if (len > tail && !memcmp(name + len - tail, ours, tail))
		*pid = number;
	return true;
}

/* A number of ours that is not in the table belonged to somebody before us. */
static bool is_gone(long pid)
{
	return pid == (long)getpid() || (kill((pid_t)pid, 0) && errno == ESRCH);
}

int file_sweep(const char *dir, bool all, struct err *e)
{
	char host[HOST_NAME_MAX + 1];
	struct dirent *ent;
	int rc = 0;
	DIR *d = opendir(dir);

	if (!d)
		return err_input(e, "cannot open directory '%s'", dir);
	host_name(host);
	while (!rc && (errno = 0, ent = readdir(d))) {
		long pid;

		if (!is_temporary(ent->d_name, host, &pid) || is_live(ent->d_name, true))
			continue;
		if (!all && (pid <= 0 || !is_gone(pid)))
			continue;
		if (unlinkat(dirfd(d), ent->d_name, 0) && errno != ENOENT)
			rc = err_errno(e, "cannot remove '%s/%s'", dir, ent->d_name);
	}
	if (!rc && errno)
		rc = err_input(e, "cannot read directory '%s'", dir);
	closedir(d);
	return rc;
}

int file_publish(const char *path, int rank, const void *buf, size_t n, struct err *e)
{
	struct file_new f;

	if (file_new_open(&f, path, rank, e))
		return -1;
	if (file_pwrite(f.fd, f.tmp, buf, n, 0, e)) {
		file_new_abort(&f);
		return -1;
	}
	return file_new_publish(&f, e);
}

int file_fsync_dir(const char *dir, struct err *e)
{
	int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc = 0;

	if (fd < 0)
		return err_errno(e, "cannot open directory '%s'", dir);
	if (fsync_retry(fd) && errno != EINVAL)
		rc = err_errno(e, "cannot write directory '%s' to disk", dir);
	close(fd);
	return rc;
}

int file_lock(int fd, const char *path, off_t byte, enum file_lock how, bool wait, struct err *e)
{
	static const short type[] = {
		[FILE_UNLOCK] = F_UNLCK, [FILE_SHARED] = F_RDLCK, [FILE_EXCLUSIVE] = F_WRLCK
	};
	struct flock lock = {
		.l_type = type[how], .l_whence = SEEK_SET, .l_start = byte, .l_len = 1
	};
	int rc;

	do
		rc = fcntl(fd, wait ? F_OFD_SETLKW : F_OFD_SETLK, &lock);
	while (rc && errno == EINTR);
	if (!rc)
		return 0;
	if (!wait && (errno == EAGAIN || errno == EACCES))
		return 1;
	return err_errno(e, "cannot lock '%s'", path);
}

/*
 * One byte behind a megabyte of hole: does the file take less than half of it? Unknown counts as
 * yes.
 */
static bool keeps_holes(int fd)
{
	const off_t hole = 1 << 20;
	struct stat st;

	if (ftruncate(fd, hole) || pwrite(fd, "", 1, hole - 1) != 1 || fsync_retry(fd) ||
	    fstat(fd, &st))
		return true;
	return st.st_blocks * 512 < hole / 2;
}

static bool probe_sparse(const char *dir)
{
	int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	struct file_new f = FILE_NEW_INIT;
	struct err e = ERR_INIT;
	bool sparse = true;
	char *path;

	if (fd >= 0) {
		sparse = keeps_holes(fd);
		close(fd);
		return sparse;
	}
	path = errno == EOPNOTSUPP || errno == EISDIR ? file_join(dir, "dspark-probe", &e) : NULL;
	if (path && !file_new_open(&f, path, 0, &e))
		sparse = keeps_holes(f.fd);
	file_new_abort(&f);
	free(path);
	return sparse;
}

int file_space(const char *path, struct file_space *s, struct err *e)
{
	char *at = mem_strdup(path, e), *up;
	struct statvfs fs;
	int rc = -1;

	while (at && statvfs(at, &fs)) {
		if (errno != ENOENT || !strcmp(at, ".") || !strcmp(at, "/")) {
			err_errno(e, "cannot find the file system of '%s'", path);
			goto out;
		}
		up = parent_of(at, e);
		free(at);
		at = up;
	}
	if (!at)
		goto out;
	s->block = fs.f_frsize ? fs.f_frsize : fs.f_bsize;
	s->free = (uint64_t)fs.f_bavail * s->block;
	s->sparse = probe_sparse(at);
	rc = 0;
out:
	free(at);
	return rc;
}
