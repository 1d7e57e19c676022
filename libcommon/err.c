/* SPDX-License-Identifier: Apache-2.0 */
/*
 * err: the first sentence is kept, later ones are dropped; nothing here allocates, so memory
 * exhaustion can be reported.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "err.h"

static void err_set(struct err *e, int code, const char *fmt, va_list ap)
{
	if (e->code)
		return;
	e->code = code;
	vsnprintf(e->text, sizeof e->text, fmt, ap);
}

int err_refuse(struct err *e, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	err_set(e, EXIT_REFUSED, fmt, ap);
	va_end(ap);
	return -1;
}

int err_usage(struct err *e, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	err_set(e, EXIT_USAGE, fmt, ap);
	va_end(ap);
	return -1;
}

int err_fail(struct err *e, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	err_set(e, EXIT_FAILED, fmt, ap);
	va_end(ap);
	return -1;
}

/*
 * The reason is what a reader must not miss: a sentence too long to hold it gives up its own tail.
 */
static void err_set_errno(struct err *e, int code, int number, const char *fmt, va_list ap)
{
	const char *reason;
	size_t len, room;

	if (e->code)
		return;
	err_set(e, code, fmt, ap);
	reason = strerror(number);
	len = strlen(e->text);
	room = sizeof e->text - 1 - strnlen(reason, 128) - 2;
	if (len > room)
		len = room;
	snprintf(e->text + len, sizeof e->text - len, ": %s", reason);
}

/* errno survives, for callers that look at it too. */
int err_errno(struct err *e, const char *fmt, ...)
{
	int number = errno;
	va_list ap;

	va_start(ap, fmt);
	err_set_errno(e, EXIT_FAILED, number, fmt, ap);
	va_end(ap);
	errno = number;
	return -1;
}

static int input_code(int number)
{
	switch (number) {
	case ENOENT:
	case ENOTDIR:
	case EISDIR:
	case EACCES:
	case EPERM:
	case ELOOP:
	case ENAMETOOLONG:
	case ENXIO:
	case ENODEV:
		return EXIT_REFUSED;
	default:
		return EXIT_FAILED;
	}
}

int err_input(struct err *e, const char *fmt, ...)
{
	int number = errno;
	va_list ap;

	va_start(ap, fmt);
	err_set_errno(e, input_code(number), number, fmt, ap);
	va_end(ap);
	errno = number;
	return -1;
}

int err_context(struct err *e, const char *fmt, ...)
{
	char old[ERR_TEXT];
	va_list ap;
	size_t len;

	if (!e->code)
		return -1;
	memcpy(old, e->text, sizeof old);
	va_start(ap, fmt);
	vsnprintf(e->text, sizeof e->text, fmt, ap);
	va_end(ap);
	len = strlen(e->text);
	snprintf(e->text + len, sizeof e->text - len, ": %s", old);
	return -1;
}
