/* SPDX-License-Identifier: Apache-2.0 */
/*
 * file: whole reads and writes, files that appear complete or not at all, and locks.
 *
 * Single system calls are cut at 1 GiB; EINTR is retried. All descriptors are close-on-exec.
 */
#ifndef DSPARK_FILE_H
#define DSPARK_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct err;
struct text;

/* Opens for reading, regular files only (err_input otherwise). Returns the descriptor or -1. */
int file_open(const char *path, struct err *e);

/*
 * All that is left to read into `out` (cleared first, never NULL afterwards). Refuses more than
 * `max` bytes. `name` is for the message. file_read_all takes regular files only: in a directory
 * of ours a FIFO would be waited for without end. file_read_stream takes what a user names, a pipe
 * too.
 */
int file_read_fd(int fd, const char *name, size_t max, struct text *out, struct err *e);
int file_read_all(const char *path, size_t max, struct text *out, struct err *e);
int file_read_stream(const char *path, size_t max, struct text *out, struct err *e);

/* Exactly n bytes at `off`; a short file is refused ("ends early"). `path` is for the message. */
int file_pread(int fd, const char *path, void *buf, size_t n, uint64_t off, struct err *e);
int file_pwrite(int fd, const char *path, const void *buf, size_t n, uint64_t off, struct err *e);

/* Of a regular file; mtime_ns may be NULL. */
int file_size(const char *path, uint64_t *size, int64_t *mtime_ns, struct err *e);
bool file_exists(const char *path);			/* follows links; true where barred */
bool file_is_dir(const char *path);
int file_mkdir_p(const char *path, struct err *e);	/* 0777 less umask; existing is success */
/* `name` alone if absolute */
char *file_join(const char *dir, const char *name, struct err *e);

/*
 * A file that appears whole: written as DIR/.NAME.tmp.HOST.RANK.PID (O_EXCL), then fsync, rename,
 * fsync of DIR. file_new_abort on a zeroed or published struct does nothing. file_abort_all is
 * async-signal-safe and for a process about to end: it removes the living temporaries of all
 * threads, and new ones are refused from then on.
 */
struct file_new {
	int fd;			/* -1 when closed */
	char *tmp, *path;
	int slot;		/* index in the table file_abort_all walks, -1 = none */
	bool cached;		/* the file system wants the page cache between itself and us */
	char *bounce;		/* for bytes that lie in memory where no disk can fetch them */
};

#define FILE_NEW_INIT { .fd = -1, .slot = -1 }

int file_new_open(struct file_new *f, const char *path, int rank, struct err *e);
int file_new_publish(struct file_new *f, struct err *e);
void file_new_abort(struct file_new *f);
void file_abort_all(void);

/*
 * file_pwrite for megabytes that nobody reads soon: whole pages go straight to the disk where the
 * file system allows it, so that they cost no copy, push nothing out of the page cache and leave
 * the fsync of publish nothing to do; the rest goes through the cache, and on its way to the disk
 * at once. Fastest where `buf` and `off` are multiples of 4096. One thread at a time.
 */
int file_new_write(struct file_new *f, const void *buf, size_t n, uint64_t off, struct err *e);

/*
 * Removes DIR/.*.tmp.HOST.RANK.PID of this host whose process is gone. With `all` (a lock says that
 * nobody else writes here) every .*.tmp.*, also of other hosts, of processes that died but were not
 * waited for, and of numbers that other programs have now. Our own open files stay.
 */
int file_sweep(const char *dir, bool all, struct err *e);

/* Writes `n` bytes to `path` by file_new_*. */
int file_publish(const char *path, int rank, const void *buf, size_t n, struct err *e);

int file_fsync_dir(const char *dir, struct err *e);	/* EINVAL (some NFS) is no error */

/*
 * Open-file-description locks on one byte. Returns 0 held, 1 held by somebody else (only with wait
 * = false), -1 failed; where the file system has no locks the answer is -1 with EXIT_FAILED and
 * errno ENOLCK, EOPNOTSUPP or EINVAL.
 */
enum file_lock { FILE_UNLOCK, FILE_SHARED, FILE_EXCLUSIVE };
int file_lock(int fd, const char *path, off_t byte, enum file_lock how, bool wait, struct err *e);

/*
 * File system of `path` (its nearest existing parent): free bytes for this user, block size,
 * whether it keeps holes.
 */
struct file_space {
	uint64_t free, block;
	bool sparse;
};
int file_space(const char *path, struct file_space *s, struct err *e);

#endif
