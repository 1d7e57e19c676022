/* SPDX-License-Identifier: Apache-2.0 */
/*
 * literal: a recursive descent over one expression. A function returns NULL where the text is no
 * literal; the caller then takes the text as a string, so no message is needed and nothing here can
 * refuse.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "literal.h"
#include "text.h"

#define LITERAL_BYTES 1000 /* the reference evaluates nothing longer */
#define LITERAL_DEPTH 90   /* Python's own parser gives up near 100 */

struct reader {
	const char *s;
	int depth;
};

static json_t *read_value(struct reader *r);

/* Comments are white space, and inside brackets line ends too. */
static void skip_space(struct reader *r)
{
	for (;;) {
		r->s += strspn(r->s, r->depth ? " \t\f\r\n" : " \t\f");
		if (*r->s != '#')
			return;
		r->s += strcspn(r->s, "\n");
	}
}

static bool accept(struct reader *r, char c)
{
	skip_space(r);
	if (*r->s != c)
		return false;
	r->s++;
	return true;
}

static bool is_digit(char c, int base)
{
	int v = c >= '0' && c <= '9'   ? c - '0'
		: c >= 'a' && c <= 'f' ? c - 'a' + 10
		: c >= 'A' && c <= 'F' ? c - 'A' + 10
				       : 99;

	return v < base;
}

static bool is_name(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
	       c == '_' || (c & 0x80);
}

/*
 * Digits with single underscores between them, copied to `out` without. Returns how many digits, or
 * -1.
 */
static int read_digits(struct reader *r, int base, struct text *out)
{
	int n = 0;

	while (is_digit(*r->s, base) || (*r->s == '_' && n && is_digit(r->s[1], base))) {
		if (*r->s != '_') {
			text_addn(out, r->s, 1);
			n++;
		}
		r->s++;
	}
	return *r->s == '_' ? -1 : n;
}

static json_t *integer(const struct text *digits, int base)
{
	char *end;
	long long v;

	errno = 0;
	v = strtoll(digits->s, &end, base);
	return errno || *end ? NULL : json_integer(v);
}

static json_t *real(const struct text *digits)
{
	char *end;
	double v = strtod(digits->s, &end);

	return *end || !isfinite(v) ? NULL : json_real(v);
}

static int prefix_base(const char *s)
{
	if (s[0] != '0')
		return 10;
	switch (s[1]) {
	case 'x':
	case 'X':
		return 16;
	case 'o':
	case 'O':
		return 8;
	case 'b':
	case 'B':
		return 2;
	default:
		return 10;
	}
}

/*
 * The fraction and exponent of a real, after its whole digits. False if there is neither, or no
 * legal one.
 */
static bool read_fraction(struct reader *r, int whole, struct text *out, bool *bad)
{
	bool found = false;
	int n = 0;

	*bad = false;
	if (*r->s == '.') {
		r->s++;
		text_add(out, ".");
		n = read_digits(r, 10, out);
		*bad = n < 0 || (!n && !whole);
		found = true;
	}
	if (!*bad && (*r->s == 'e' || *r->s == 'E') && (whole || n > 0)) {
		r->s++;
		text_add(out, "e");
		if (*r->s == '+' || *r->s == '-')
			text_addn(out, r->s++, 1);
		*bad = read_digits(r, 10, out) <= 0;
		found = true;
	}
	return found;
}

static json_t *read_number(struct reader *r, bool negative)
{
	struct text digits = TEXT_INIT;
	json_t *v = NULL;
	int base = prefix_base(r->s), n;
	size_t start;
	bool bad;

	text_add(&digits, negative ? "-" : "");
	start = digits.len;
	if (base != 10) {
		r->s += 2;
		r->s += *r->s == '_';
		if (read_digits(r, base, &digits) > 0 && !digits.failed)
			v = integer(&digits, base);
		goto out;
	}
	n = read_digits(r, 10, &digits);
	if (n < 0)
		goto out;
	if (read_fraction(r, n, &digits, &bad)) {
		if (!bad && !digits.failed)
			v = real(&digits);
	} else if (n > 0 && !digits.failed) {
		bool zeros = strspn(digits.s + start, "0") == (size_t)n;

		if (n == 1 || digits.s[start] != '0' || zeros) /* 007 is no number */
			v = integer(&digits, 10);
	}
out:
	text_release(&digits);
	if (v && is_name(*r->s)) {
		json_decref(v);
		v = NULL;
	}
	return v;
}

static void add_utf8(struct text *t, uint32_t c)
{
	char b[4];
	int n;

	if (c < 0x80) {
		b[0] = (char)c;
		n = 1;
	} else if (c < 0x800) {
		b[0] = (char)(0xc0 | c >> 6);
		n = 2;
	} else if (c < 0x10000) {
		b[0] = (char)(0xe0 | c >> 12);
		n = 3;
	} else {
		b[0] = (char)(0xf0 | c >> 18);
		n = 4;
	}
	for (int i = 1; i < n; i++)
		b[i] = (char)(0x80 | (c >> 6 * (n - 1 - i) & 0x3f));
	text_addn(t, b, (size_t)n);
}

/*
 * `digits` hexadecimal digits as a character; surrogates and what is beyond Unicode have no UTF-8.
 */
static bool read_hex(struct reader *r, int digits, struct text *out)
{
	uint32_t c = 0;

	for (int i = 0; i < digits; i++, r->s++) {
		if (!is_digit(*r->s, 16))
			return false;
		c = c << 4 | (uint32_t)(*r->s <= '9' ? *r->s - '0' : (*r->s | 0x20) - 'a' + 10);
	}
	if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
		return false;
	add_utf8(out, c);
	return true;
}

static void read_octal(struct reader *r, struct text *out)
{
	uint32_t c = 0;

	for (int i = 0; i < 3 && is_digit(*r->s, 8); i++, r->s++)
		c = c << 3 | (uint32_t)(*r->s - '0');
	add_utf8(out, c);
}

/*
 * After a backslash. False for what Python would refuse, and for \N{...}, which needs the names of
 * Unicode.
 */
static bool read_escape(struct reader *r, struct text *out)
{
	static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
	const char *p;
	char c = *r->s;

	if (!c)
		return false;
	if (is_digit(c, 8)) {
		read_octal(r, out);
		return true;
	}
	r->s++;
	p = strchr(from, c);
	if (p) {
		text_addn(out, to + (p - from), 1);
		return true;
	}
	switch (c) {
	case '\n':
		return true;
	case 'x':
		return read_hex(r, 2, out);
	case 'u':
		return read_hex(r, 4, out);
	case 'U':
		return read_hex(r, 8, out);
	case 'N':
		return false;
	default:
		text_add(out, "\\"); /* an unknown escape stands for itself */
		text_addn(out, &c, 1);
		return true;
	}
}

/* One quoted string, appended to `out`. */
static bool read_quoted(struct reader *r, bool raw, struct text *out)
{
	char quote = *r->s;
	bool triple = r->s[1] == quote && r->s[2] == quote;

	r->s += triple ? 3 : 1;
	for (;;) {
		if (!*r->s || (!triple && *r->s == '\n'))
			return false;
		if (*r->s == quote && (!triple || (r->s[1] == quote && r->s[2] == quote)))
			break;
		if (*r->s != '\\') {
			text_addn(out, r->s++, 1);
		} else if (raw) {
			if (!r->s[1])
				return false;
			text_addn(out, r->s, 2);
			r->s += 2;
		} else {
			r->s++;
			if (!read_escape(r, out))
				return false;
		}
	}
	r->s += triple ? 3 : 1;
	return true;
}

static bool at_string(const char *s, bool *raw)
{
	size_t n = *s == 'r' || *s == 'R' || *s == 'u' || *s == 'U';

	*raw = *s == 'r' || *s == 'R';
	return s[n] == '\'' || s[n] == '"';
}

/* Strings next to each other are one. */
static json_t *read_string(struct reader *r)
{
	struct text t = TEXT_INIT;
	json_t *v = NULL;
	bool raw;

	while (at_string(r->s, &raw)) {
		r->s += *r->s != '\'' && *r->s != '"';
		if (!read_quoted(r, raw, &t))
			goto out;
		skip_space(r);
	}
	if (!t.failed && !(t.s && strlen(t.s) != t.len)) /* texts with NUL are beyond C strings */
		v = json_stringn(t.s ? t.s : "", t.len);
out:
	text_release(&t);
	return v;
}

/*
 * The rest of a sequence up to `close`; `first` (stolen) is already read, or NULL. A trailing comma
 * is legal after an element.
 */
static json_t *read_sequence(struct reader *r, char close, json_t *first)
{
	json_t *list = json_array(), *v = first;

	if (first ? json_array_append_new(list, first) : !list)
		goto bad;
	if (!first && accept(r, close))
		return list;
	if (first && !accept(r, ','))
		goto bad;
	while (!accept(r, close)) {
		v = read_value(r);
		if (!v || json_array_append_new(list, v))
			goto bad;
		if (accept(r, close))
			return list;
		if (!accept(r, ','))
			goto bad;
	}
	return list;
bad:
	json_decref(list);
	return NULL;
}

static json_t *read_dict(struct reader *r)
{
	json_t *dict = json_object(), *k = NULL, *v;

	while (dict && !accept(r, '}')) {
		k = read_value(r);
		if (!json_is_string(k) || !accept(r, ':'))
			goto bad;
		v = read_value(r);
		if (!v ||
		    json_object_setn_new(dict, json_string_value(k), json_string_length(k), v))
			goto bad;
		json_decref(k);
		k = NULL;
		if (accept(r, '}'))
			return dict;
		if (!accept(r, ','))
			goto bad;
	}
	return dict;
bad:
	json_decref(k);
	json_decref(dict);
	return NULL;
}

/* (x) is x, (x,) a tuple. */
static json_t *read_parens(struct reader *r)
{
	json_t *v;

	if (accept(r, ')'))
		return json_array();
	v = read_value(r);
	if (!v || accept(r, ')'))
		return v;
	return read_sequence(r, ')', v);
}

static json_t *read_word(struct reader *r)
{
	static const struct {
		const char *name;
		size_t len;
	} words[] = { { "None", 4 }, { "True", 4 }, { "False", 5 } };

	for (size_t i = 0; i < 3; i++) {
		if (strncmp(r->s, words[i].name, words[i].len) || is_name(r->s[words[i].len]))
			continue;
		r->s += words[i].len;
		return i == 0 ? json_null() : json_boolean(i == 1);
	}
	return NULL;
}

static json_t *read_bracket(struct reader *r)
{
	json_t *v;
	char c = *r->s++;

	if (++r->depth > LITERAL_DEPTH)
		return NULL;
	v = c == '[' ? read_sequence(r, ']', NULL) : c == '{' ? read_dict(r) : read_parens(r);
	r->depth--;
	return v;
}

static json_t *read_value(struct reader *r)
{
	bool raw, sign;

	skip_space(r);
	if (*r->s && strchr("[{(", *r->s))
		return read_bracket(r);
	if (at_string(r->s, &raw))
		return read_string(r);
	sign = *r->s == '-' || *r->s == '+';
	if (sign || *r->s == '.' || is_digit(*r->s, 10)) {
		bool negative = *r->s == '-';

		r->s += sign;
		skip_space(r);
		return read_number(r, negative);
	}
	return read_word(r);
}

/* Only line ends are left. */
static bool at_end(struct reader *r)
{
	skip_space(r);
	return !r->s[strspn(r->s, "\r\n")];
}

/* One value, or values with commas between them: a tuple without its parentheses. */
static json_t *read_expression(const char *s)
{
	struct reader r = { s + strspn(s, " \t"), 0 };
	json_t *v, *list = NULL;

	r.s += strspn(r.s, "\r\n");
	v = read_value(&r);
	if (!v || at_end(&r))
		return v;
	list = *r.s == ',' ? json_array() : NULL;
	if (!list || json_array_append(list, v))
		goto bad;
	while (accept(&r, ',') && !at_end(&r)) {
		json_t *next = read_value(&r);

		if (!next || json_array_append_new(list, next))
			goto bad;
	}
	if (!at_end(&r))
		goto bad;
	json_decref(v);
	return list;
bad:
	json_decref(v);
	json_decref(list);
	return NULL;
}

json_t *literal_parse(const char *s, struct err *e)
{
	static const char *const words[] = { "none", "None", "true", "True", "false", "False" };
	json_t *v = NULL;

	for (size_t i = 0; i < 6; i++) {
		if (!strcmp(s, words[i]))
			return i < 2 ? json_null() : json_boolean(i < 4);
	}
	if (strlen(s) <= LITERAL_BYTES)
		v = read_expression(s);
	if (v)
		return v;
	v = json_string(s);
	if (!v)
		err_refuse(e, "a value is not valid UTF-8");
	return v;
}
