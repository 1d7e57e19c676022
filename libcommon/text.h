/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text: a growing NUL-terminated string. A failed append is remembered: check text_ok once at the
 * end.
 */
#ifndef DSPARK_TEXT_H
#define DSPARK_TEXT_H

#include <stdbool.h>
#include <stddef.h>

struct err;

struct text {
	char *s;		/* NULL until the first append */
	size_t len, cap;
	bool failed;
};

#define TEXT_INIT { 0 }

void text_release(struct text *t);
void text_clear(struct text *t);			/* keeps the allocation */
void text_add(struct text *t, const char *s);
void text_addn(struct text *t, const void *s, size_t n);
void text_printf(struct text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void text_pad(struct text *t, char c, size_t len);	/* appends c until the length is `len` */
int text_ok(const struct text *t, struct err *e);	/* -1 if any append ran out of memory */

/* "1.50 GiB", "12.0 MiB", "17 B": for people only. */
void text_bytes(struct text *t, double bytes);

#endif
