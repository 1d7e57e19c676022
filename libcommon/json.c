/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json: strict reading, typed members, and three spellings on output.
 *
 * jansson writes neither Python's reals nor its separators and escapes, so values are written here.
 * NUL inside a string is refused (jansson's default): strings are C strings everywhere else.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "file.h"
#include "json.h"
#include "json_escape.h"
#include "mem.h"
#include "text.h"

json_t *json_read(const char *path, size_t max, struct err *e)
{
	struct text t = TEXT_INIT;
	json_t *v = NULL;

	if (!file_read_all(path, max, &t, e))
		v = json_parse(t.s, t.len, path, e);
	text_release(&t);
	return v;
}

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* Is the number at `s` an integer that 64 bits do not hold? `next` follows its digits. */
static bool is_wide(const char *s, size_t digits, char next)
{
	char copy[32];

	if (next == '.' || next == 'e' || next == 'E')
		return false;
	if (digits >= sizeof copy)
		return true;
	memcpy(copy, s, digits);
	copy[digits] = '\0';
	errno = 0;
	strtoll(copy, NULL, 10);
	return errno == ERANGE;
}

/*
 * Integers beyond 64 bits (transformers writes model_max_length as 10^30) get ".0" and so become
 * reals. Text in strings is left alone.
 */
static void widen_integers(struct text *out, const char *s, size_t n)
{
	bool in_string = false;
	size_t i = 0;

	while (i < n) {
		size_t start = i;

		if (in_string || !(is_digit(s[i]) || s[i] == '-')) {
			if (s[i] == '"')
				in_string = !in_string;
			i += in_string && s[i] == '\\' && i + 1 < n ? 2 : 1;
			text_addn(out, s + start, i - start);
			continue;
		}
		for (i++; i < n && is_digit(s[i]);)
			i++;
		text_addn(out, s + start, i - start);
		if (is_wide(s + start, i - start, i < n ? s[i] : '\0'))
			text_add(out, ".0");
		for (start = i; i < n && s[i] && strchr("0123456789.eE+-", s[i]);)
			i++;
		text_addn(out, s + start, i - start);
	}
}

/*
 * jansson has no code for lack of memory in the middle of a value; malloc leaves ENOMEM, and after
 * it nothing else.
 */
static json_t *parse(const char *s, size_t n, json_error_t *why)
{
	errno = 0;
	return json_loadb(s, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, why);
}

json_t *json_parse(const char *s, size_t n, const char *what, struct err *e)
{
	struct text wide = TEXT_INIT;
	json_error_t why;
	json_t *v = parse(n ? s : "", n, &why);

	if (!v && json_error_code(&why) == json_error_numeric_overflow) {
		widen_integers(&wide, s, n);
		if (wide.failed)
			errno = ENOMEM;
		else
			v = parse(wide.s, wide.len, &why);
		text_release(&wide);
	}
	if (v)
		return v;
	if (errno == ENOMEM)
		err_fail(e, "out of memory: cannot hold '%s'", what);
	else if (why.line > 0)
		err_refuse(e, "'%s' is not valid JSON: line %d, column %d: %s", what, why.line,
			   why.column, why.text);
	else
		err_refuse(e, "'%s' is not valid JSON: %s", what, why.text);
	return NULL;
}

static const char *type_name(const json_t *v)
{
	switch (json_typeof(v)) {
	case JSON_OBJECT:
		return "an object";
	case JSON_ARRAY:
		return "a list";
	case JSON_STRING:
		return "a string";
	case JSON_INTEGER:
		return "an integer";
	case JSON_REAL:
		return "a number with a fraction";
	case JSON_TRUE:
	case JSON_FALSE:
		return "a boolean";
	default:
		return "null";
	}
}

/* The member, or NULL where it is absent or null. */
static const json_t *member(const json_t *o, const char *key)
{
	const json_t *v = json_object_get(o, key);

	return json_is_null(v) ? NULL : v;
}

bool json_has(const json_t *o, const char *key)
{
	return member(o, key) != NULL;
}

static int missing(const char *what, const char *key, struct err *e)
{
	return err_refuse(e, "%s: '%s' is missing", what, key);
}

static int wrong_type(const char *what, const char *key, const char *want, const json_t *v,
		      struct err *e)
{
	return err_refuse(e, "%s: '%s' must be %s, not %s", what, key, want, type_name(v));
}

int json_str_or(const json_t *o, const char *what, const char *key, const char *def,
		const char **out, struct err *e)
{
	const json_t *v = member(o, key);

	if (v && !json_is_string(v))
		return wrong_type(what, key, "a string", v, e);
	*out = v ? json_string_value(v) : def;
	return 0;
}

int json_str(const json_t *o, const char *what, const char *key, const char **out, struct err *e)
{
	return member(o, key) ? json_str_or(o, what, key, NULL, out, e) : missing(what, key, e);
}

/* Whole and within 64 bits: 2^63 itself is the first real that is not. */
static bool whole(double d)
{
	return d >= -0x1p63 && d < 0x1p63 && d == trunc(d);
}

int json_int_or(const json_t *o, const char *what, const char *key, int64_t def, int64_t *out,
		struct err *e)
{
	const json_t *v = member(o, key);

	if (!v)
		*out = def;
	else if (json_is_integer(v))
		*out = json_integer_value(v);
	else if (json_is_real(v) && whole(json_real_value(v)))
		*out = (int64_t)json_real_value(v);
	else if (json_is_real(v) && json_real_value(v) == trunc(json_real_value(v)))
		return err_refuse(e, "%s: '%s' is too large", what, key);
	else
		return wrong_type(what, key, "an integer", v, e);
	return 0;
}

int json_int(const json_t *o, const char *what, const char *key, int64_t *out, struct err *e)
{
	return member(o, key) ? json_int_or(o, what, key, 0, out, e) : missing(what, key, e);
}

int json_real_or(const json_t *o, const char *what, const char *key, double def, double *out,
		 struct err *e)
{
	const json_t *v = member(o, key);

	if (v && !json_is_number(v))
		return wrong_type(what, key, "a number", v, e);
	*out = v ? json_number_value(v) : def;
	return 0;
}

int json_bool_or(const json_t *o, const char *what, const char *key, bool def, bool *out,
		 struct err *e)
{
	const json_t *v = member(o, key);

	if (v && !json_is_boolean(v))
		return wrong_type(what, key, "true or false", v, e);
	*out = v ? json_is_true(v) : def;
	return 0;
}

/* The code point at *s of valid UTF-8, moving *s behind it. */
static uint32_t next_point(const unsigned char **s)
{
	const unsigned char *p = *s;
	int more = p[0] < 0x80 ? 0 : p[0] < 0xe0 ? 1 : p[0] < 0xf0 ? 2 : 3;
	uint32_t c = more ? p[0] & (0x3fu >> more) : p[0];
	int i;

	for (i = 1; i <= more; i++)
		c = c << 6 | (p[i] & 0x3f);
	*s += more + 1;
	return c;
}

static void add_unit(struct text *out, unsigned unit)
{
	text_printf(out, "\\u%04x", unit);
}

/* The two characters of a short escape, or NULL. */
static const char *short_escape(uint32_t c)
{
	switch (c) {
	case '"':
		return "\\\"";
	case '\\':
		return "\\\\";
	case '\n':
		return "\\n";
	case '\r':
		return "\\r";
	case '\t':
		return "\\t";
	case '\b':
		return "\\b";
	case '\f':
		return "\\f";
	default:
		return NULL;
	}
}

/*
 * `ascii`: everything outside printable ASCII is escaped, as Python does by default; else only what
 * JSON demands.
 */
static void add_string(struct text *out, const char *s, bool ascii)
{
	const unsigned char *p = (const unsigned char *)s, *run = p;

	text_add(out, "\"");
	while (*p) {
		const unsigned char *at = p;
		uint32_t c = next_point(&p);
		const char *esc = short_escape(c);

		if (!esc && c >= 0x20 && (!ascii || c < 0x7f))
			continue;
		text_addn(out, run, (size_t)(at - run));
		run = p;
		if (esc) {
			text_add(out, esc);
		} else if (c < 0x10000) {
			add_unit(out, c);
		} else {
			add_unit(out, 0xd800 + ((c - 0x10000) >> 10));
			add_unit(out, 0xdc00 + ((c - 0x10000) & 0x3ff));
		}
	}
	text_addn(out, run, (size_t)(p - run));
	text_add(out, "\"");
}

/*
 * The fewest digits that read back as `d` (> 0), nearest to it among those; *point is the decimal
 * point's place before them. The correctly rounded n digits are tried first; next to a power of
 * two, where the gap below is half the gap above, the neighbour further out may read back where
 * they do not.
 */
static size_t shortest(double d, char digits[20], int *point)
{
	char s[40];
	int n, step;

	for (n = 1; n <= 17; n++) {
		uint64_t m = 0;
		int exponent, i;

		snprintf(s, sizeof s, "%.*e", n - 1, d);
		exponent = atoi(strchr(s, 'e') + 1) - (n - 1);
		for (i = 0; s[i] != 'e'; i++)
			if (s[i] != '.')
				m = m * 10 + (uint64_t)(s[i] - '0');
		for (step = 0; step < 3; step++) {
			uint64_t k = m + (step == 1) - (step == 2);

			snprintf(s, sizeof s, "%" PRIu64 "e%d", k, exponent);
			if (strtod(s, NULL) == d) {
				size_t len = (size_t)snprintf(digits, 20, "%" PRIu64, k);

				*point = exponent + (int)len;
				while (len > 1 && digits[len - 1] == '0')
					len--;
				return len;
			}
		}
	}
	*point = 0;
	return 0; /* 17 digits always read back */
}

/* Python's repr of a float: 1e-05 and 1e+16 are the first with exponents on their sides. */
static void add_real(struct text *out, double d)
{
	char digits[20];
	size_t n;
	int point, i;

	if (signbit(d))
		text_add(out, "-");
	d = fabs(d);
	if (d == 0) {
		text_add(out, "0.0");
		return;
	}
	n = shortest(d, digits, &point);
	if (point > 16 || point < -3) {
		text_addn(out, digits, 1);
		if (n > 1)
			text_add(out, ".");
		text_addn(out, digits + 1, n - 1);
		text_printf(out, "e%c%02d", point > 0 ? '+' : '-', abs(point - 1));
	} else if (point <= 0) {
		text_add(out, "0.");
		for (i = point; i < 0; i++)
			text_add(out, "0");
		text_addn(out, digits, n);
	} else if ((size_t)point >= n) {
		text_addn(out, digits, n);
		for (i = (int)n; i < point; i++)
			text_add(out, "0");
		text_add(out, ".0");
	} else {
		text_addn(out, digits, (size_t)point);
		text_add(out, ".");
		text_addn(out, digits + point, n - (size_t)point);
	}
}

/* How a spelling differs from the others; `repr` is Python's repr, the rest are JSON. */
struct style {
	const char *comma, *colon;
	int indent; /* < 0: one line */
	bool ascii, sort, repr;
};

static void add_value(struct text *out, const json_t *v, const struct style *style, int depth);

static bool is_printable(uint32_t c)
{
	size_t lo = 0, hi = sizeof not_printable / sizeof not_printable[0];

	if (c < 0x7f)
		return c >= 0x20;
	while (lo < hi) {
		size_t mid = (lo + hi) / 2;

		if (c > not_printable[mid].last)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo == sizeof not_printable / sizeof not_printable[0] || c < not_printable[lo].first;
}

static void add_repr_string(struct text *out, const char *s)
{
	const unsigned char *p = (const unsigned char *)s;
	char quote = strchr(s, '\'') && !strchr(s, '"') ? '"' : '\'';

	text_addn(out, &quote, 1);
	while (*p) {
		const unsigned char *at = p;
		uint32_t c = next_point(&p);

		if (c == '\\' || c == (uint32_t)quote)
			text_printf(out, "\\%c", (int)c);
		else if (c == '\n' || c == '\r' || c == '\t')
			text_add(out, short_escape(c));
		else if (is_printable(c))
			text_addn(out, at, (size_t)(p - at));
		else if (c < 0x100)
			text_printf(out, "\\x%02x", c);
		else if (c < 0x10000)
			add_unit(out, c);
		else
			text_printf(out, "\\U%08x", c);
	}
	text_addn(out, &quote, 1);
}

static void add_text(struct text *out, const char *s, const struct style *style)
{
	if (style->repr)
		add_repr_string(out, s);
	else
		add_string(out, s, style->ascii);
}

static void new_line(struct text *out, const struct style *style, int depth)
{
	if (style->indent < 0)
		return;
	text_add(out, "\n");
	text_pad(out, ' ', out->len + (size_t)style->indent * (size_t)depth);
}

/* In front of item number `i`. */
static void separate(struct text *out, size_t i, const struct style *style, int depth)
{
	if (i)
		text_add(out, style->comma);
	new_line(out, style, depth);
}

static void add_array(struct text *out, const json_t *v, const struct style *style, int depth)
{
	size_t i, n = json_array_size(v);

	text_add(out, "[");
	for (i = 0; i < n; i++) {
		separate(out, i, style, depth + 1);
		add_value(out, json_array_get(v, i), style, depth + 1);
	}
	if (n)
		new_line(out, style, depth);
	text_add(out, "]");
}

struct pair {
	const char *key;
	const json_t *value;
};

/* Byte order of UTF-8 is the order of code points, which is Python's. */
static int by_key(const void *a, const void *b)
{
	return strcmp(((const struct pair *)a)->key, ((const struct pair *)b)->key);
}

static void add_pair(struct text *out, size_t i, const struct pair *p, const struct style *style,
		     int depth)
{
	separate(out, i, style, depth + 1);
	add_text(out, p->key, style);
	text_add(out, style->colon);
	add_value(out, p->value, style, depth + 1);
}

static void add_sorted(struct text *out, const json_t *v, const struct style *style, int depth)
{
	struct pair *pairs = calloc(json_object_size(v) + 1, sizeof *pairs);
	const char *key;
	json_t *value;
	size_t n = 0, i;

	if (!pairs) {
		out->failed = true;
		return;
	}
	json_object_foreach((json_t *)v, key, value) pairs[n++] = (struct pair){ key, value };
	qsort(pairs, n, sizeof *pairs, by_key);
	for (i = 0; i < n; i++)
		add_pair(out, i, &pairs[i], style, depth);
	free(pairs);
}

static void add_object(struct text *out, const json_t *v, const struct style *style, int depth)
{
	const char *key;
	json_t *value;
	size_t i = 0;

	text_add(out, "{");
	if (style->sort)
		add_sorted(out, v, style, depth);
	else
		json_object_foreach((json_t *)v, key, value)
			add_pair(out, i++, &(struct pair){ key, value }, style, depth);
	if (json_object_size(v))
		new_line(out, style, depth);
	text_add(out, "}");
}

static void add_value(struct text *out, const json_t *v, const struct style *style, int depth)
{
	switch (json_typeof(v)) {
	case JSON_OBJECT:
		add_object(out, v, style, depth);
		break;
	case JSON_ARRAY:
		add_array(out, v, style, depth);
		break;
	case JSON_STRING:
		add_text(out, json_string_value(v), style);
		break;
	case JSON_INTEGER:
		text_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
		break;
	case JSON_REAL:
		add_real(out, json_real_value(v));
		break;
	case JSON_TRUE:
		text_add(out, style->repr ? "True" : "true");
		break;
	case JSON_FALSE:
		text_add(out, style->repr ? "False" : "false");
		break;
	default:
		text_add(out, style->repr ? "None" : "null");
	}
}

void json_python(struct text *out, const json_t *v, int indent, bool sort)
{
	struct style style = { .comma = indent < 0 ? ", " : ",",
			       .colon = ": ",
			       .indent = indent,
			       .ascii = true,
			       .sort = sort };

	add_value(out, v, &style, 0);
}

void json_python_repr(struct text *out, const json_t *v)
{
	static const struct style style = {
		.comma = ", ", .colon = ": ", .indent = -1, .repr = true
	};

	add_value(out, v, &style, 0);
}

void json_line(struct text *out, const json_t *v)
{
	static const struct style style = { .comma = ",", .colon = ":", .indent = -1 };

	add_value(out, v, &style, 0);
}

void json_quote(struct text *out, const char *s)
{
	add_string(out, s, false);
}
