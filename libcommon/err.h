/* SPDX-License-Identifier: Apache-2.0 */
/*
 * err: how a failure travels from where it happens to the tool that prints it.
 *
 * Every function that can fail returns 0, or -1 with a sentence in `e`. The first error wins: a
 * second err_* on the same struct changes nothing, so cleanup code may fail without hiding the
 * cause. Only tools print and exit.
 */
#ifndef DSPARK_ERR_H
#define DSPARK_ERR_H

#include <stdarg.h>

enum exit_code {
	EXIT_DONE = 0,		/* all done */
	/* what was read is refused or differs; the same command would say so again */
	EXIT_REFUSED = 1,
	EXIT_USAGE = 2,		/* the command line is wrong */
	/* system call, space, memory, device, peer, signal: trying again may succeed */
	EXIT_FAILED = 3,
};

#define ERR_TEXT 2048

struct err {
	int code;		/* 0 = no error yet, else an exit_code */
	char text[ERR_TEXT];	/* lower case, what failed first, subject in quotes, no full stop */
};

#define ERR_INIT { 0, "" }

/* Each returns -1 for `return err_refuse(e, ...)`. A sentence too long for `text` is cut. */
int err_refuse(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int err_usage(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int err_fail(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* EXIT_FAILED with ": strerror(errno)" appended; for system calls on what we write. */
int err_errno(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/*
 * As err_errno for an input that cannot be opened or read: EXIT_REFUSED where the same command
 * would fail again (ENOENT, ENOTDIR, EISDIR, EACCES, EPERM, ELOOP, ENAMETOOLONG), else EXIT_FAILED.
 */
int err_input(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Puts "CONTEXT: " in front of an error already set. Returns -1. */
int err_context(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
