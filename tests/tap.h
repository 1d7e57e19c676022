/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tap: test programs print "ok N - what" or "not ok N - what" a test and end with "1..N".
 *
 *	int main(void)
 *	{
 *		ok(x > 0, "x is %d", x);
 *		is_int(f(), 3, "f");
 *		is_str(s, "abc", "s");
 *		return tap_end();
 *	}
 *
 * One source file a program. tap_end returns 1 if a test failed or none ran.
 */
#ifndef DSPARK_TAP_H
#define DSPARK_TAP_H

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int tap_n, tap_failed;

__attribute__((format(printf, 4, 0)))
static inline bool tap_result(bool good, const char *file, int line, const char *fmt, va_list ap)
{
	printf("%sok %d - ", good ? "" : "not ", ++tap_n);
	vprintf(fmt, ap);
	printf("\n");
	if (!good) {
		tap_failed++;
		printf("# at %s:%d\n", file, line);
	}
	fflush(stdout);
	return good;
}

__attribute__((format(printf, 4, 5)))
static inline bool tap_ok(bool good, const char *file, int line, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	tap_result(good, file, line, fmt, ap);
	va_end(ap);
	return good;
}

__attribute__((format(printf, 5, 6))) static inline bool
tap_is_int(int64_t got, int64_t want, const char *file, int line, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	tap_result(got == want, file, line, fmt, ap);
	va_end(ap);
	if (got != want)
		printf("# got %" PRId64 ", want %" PRId64 "\n", got, want);
	return got == want;
}

__attribute__((format(printf, 5, 6))) static inline bool
tap_is_str(const char *got, const char *want, const char *file, int line, const char *fmt, ...)
{
	bool good = got && want ? !strcmp(got, want) : got == want;
	va_list ap;

	va_start(ap, fmt);
	tap_result(good, file, line, fmt, ap);
	va_end(ap);
	if (!good)
		printf("# got  '%s'\n# want '%s'\n", got ? got : "(null)", want ? want : "(null)");
	return good;
}

/* Each returns whether the test passed. */
#define ok(cond, ...) tap_ok(cond, __FILE__, __LINE__, __VA_ARGS__)
#define is_int(got, want, ...) tap_is_int(got, want, __FILE__, __LINE__, __VA_ARGS__)
#define is_str(got, want, ...) tap_is_str(got, want, __FILE__, __LINE__, __VA_ARGS__)

static inline void tap_skip(const char *why)
{
	printf("ok %d # SKIP %s\n", ++tap_n, why);
}

static inline int tap_end(void)
{
	printf("1..%d\n", tap_n);
	if (tap_failed)
		printf("# %d of %d failed\n", tap_failed, tap_n);
	return tap_failed || !tap_n || fflush(stdout) ? 1 : 0;
}

#endif
