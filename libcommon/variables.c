/* SPDX-License-Identifier: Apache-2.0 */
/* variables: the reference's two passes, braces first. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "mem.h"
#include "text.h"
#include "variables.h"

static void trim(const char **s, size_t *n)
{
	while (*n && isspace((unsigned char)**s)) {
		(*s)++;
		(*n)--;
	}
	while (*n && isspace((unsigned char)(*s)[*n - 1]))
		(*n)--;
}

/* Appends the value of variable s[0..n), else the default (NULL = none). */
static int add_variable(struct text *out, const char *s, size_t n, const char *def, size_t ndef,
			struct err *e)
{
	char *name = mem_printf(e, "%.*s", (int)n, s);
	const char *value;
	int rc = 0;

	if (!name)
		return -1;
	value = getenv(name);
	if (value)
		text_add(out, value);
	else if (def)
		text_addn(out, def, ndef);
	else
		rc = err_refuse(
			e,
			"the environment variable '%s' is not set: set it, or write ${%s,default}",
			name, name);
	free(name);
	return rc;
}

/* ${VAR}, ${VAR,default}, ${oc.env:VAR}, ${oc.env:VAR,default}. */
static int expand_braces(struct text *out, const char *s, struct err *e)
{
	static const char old[] = "oc.env:";

	while (*s) {
		size_t n = strcspn(s, "$"), size, ndef = 0;
		const char *name, *def = NULL, *comma;

		text_addn(out, s, n);
		s += n;
		if (!*s)
			break;
		size = s[1] == '{' ? strcspn(s + 2, "}") : 0;
		if (!size || !s[2 + size]) {
			text_addn(out, s++, 1);
			continue;
		}
		name = s + 2;
		s = name + size + 1;
		trim(&name, &size);
		if (size >= sizeof old - 1 && !memcmp(name, old, sizeof old - 1)) {
			name += sizeof old - 1;
			size -= sizeof old - 1;
			trim(&name, &size);
		}
		comma = memchr(name, ',', size);
		if (comma) {
			def = comma + 1;
			ndef = size - (size_t)(def - name);
			size = (size_t)(comma - name);
			trim(&def, &ndef);
			trim(&name, &size);
		}
		if (add_variable(out, name, size, def, ndef, e))
			return -1;
	}
	return 0;
}

/*
 * Length of the name at s: words of letters, digits and _ with dots between them, the first not
 * beginning with a digit.
 */
static size_t variable_name(const char *s)
{
	static const char word[] =
		"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789";
	size_t n = isdigit((unsigned char)*s) ? 0 : strspn(s, word);

	while (n && s[n] == '.' && strspn(s + n + 1, word))
		n += 1 + strspn(s + n + 1, word);
	return n;
}

/* $VAR; as in the reference also in what the braces gave. */
static int expand_plain(struct text *out, const char *s, struct err *e)
{
	while (*s) {
		size_t n = strcspn(s, "$"), name;

		text_addn(out, s, n);
		s += n;
		if (!*s)
			break;
		name = variable_name(s + 1);
		if (!name)
			text_add(out, "$");
		else if (add_variable(out, s + 1, name, NULL, 0, e))
			return -1;
		s += 1 + name;
	}
	return 0;
}

int variables_expand(struct text *out, const char *s, struct err *e)
{
	struct text braces = TEXT_INIT;
	int rc = -1;

	if (!expand_braces(&braces, s, e) && !text_ok(&braces, e) &&
	    !expand_plain(out, braces.s ? braces.s : "", e))
		rc = text_ok(out, e);
	text_release(&braces);
	return rc;
}
