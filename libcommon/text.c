/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text: once an append fails, later ones do nothing, so that a string with a hole in it never looks
 * whole.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "text.h"

void text_release(struct text *t)
{
	free(t->s);
	*t = (struct text)TEXT_INIT;
}

void text_clear(struct text *t)
{
	t->len = 0;
	t->failed = false;
	if (t->s)
		t->s[0] = '\0';
}

/* Room for n more bytes and the NUL. */
static bool text_room(struct text *t, size_t n)
{
	size_t need, cap;
	char *s;

	if (t->failed)
		return false;
	if (__builtin_add_overflow(t->len, n, &need) || need > SIZE_MAX / 4)
		goto fail;
	if (need < t->cap)
		return true;
	cap = t->cap + t->cap / 2;
	if (cap < need + 1)
		cap = need + 1;
	if (cap < 64)
		cap = 64;
	s = realloc(t->s, cap);
	if (!s)
		goto fail;
	t->s = s;
	t->cap = cap;
	return true;
fail:
	t->failed = true;
	return false;
}

void text_addn(struct text *t, const void *s, size_t n)
{
	if (!text_room(t, n))
		return;
	if (n)
		memcpy(t->s + t->len, s, n);
	t->len += n;
	t->s[t->len] = '\0';
}

void text_add(struct text *t, const char *s)
{
	text_addn(t, s, strlen(s));
}

void text_printf(struct text *t, const char *fmt, ...)
{
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(NULL, 0, fmt, ap);
	va_end(ap);
	if (n < 0)
		t->failed = true;
	if (!text_room(t, n < 0 ? 0 : (size_t)n))
		return;
	va_start(ap, fmt);
	vsnprintf(t->s + t->len, (size_t)n + 1, fmt, ap);
	va_end(ap);
	t->len += (size_t)n;
}

void text_pad(struct text *t, char c, size_t len)
{
	if (len <= t->len || !text_room(t, len - t->len))
		return;
	memset(t->s + t->len, c, len - t->len);
	t->len = len;
	t->s[len] = '\0';
}

int text_ok(const struct text *t, struct err *e)
{
	return t->failed ? err_fail(e, "out of memory: cannot grow a text of %zu bytes", t->len)
			 : 0;
}

/* Three figures; the limits are where rounding would give a fourth. */
void text_bytes(struct text *t, double bytes)
{
	static const char *const unit[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
	size_t u = 0;

	if (bytes < 1023.5) {
		text_printf(t, "%.0f B", bytes);
		return;
	}
	while (bytes >= 1023.5 && u + 1 < sizeof unit / sizeof unit[0]) {
		bytes /= 1024;
		u++;
	}
	text_printf(t, "%.*f %s", bytes < 9.995 ? 2 : bytes < 99.95 ? 1 : 0, bytes, unit[u]);
}
