/* SPDX-License-Identifier: Apache-2.0 */
/*
 * yaml: libyaml's events built into a jansson tree, scalars resolved as PyYAML's SafeLoader
 * resolves them.
 *
 * Events, because libyaml's document loader forgets whether a scalar carried a tag. An alias is a
 * deep copy, so that later changes in one place stay there; copies are counted against bombs of
 * nested aliases. A reference into its own anchor has no finite tree and is refused, as are the
 * infinities and NaN, which jansson cannot hold.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <yaml.h>

#include "err.h"
#include "file.h"
#include "mem.h"
#include "text.h"
#include "yaml.h"

#define FILE_MAX   ((size_t)64 << 20)
#define DEPTH_MAX  256
#define COPIES_MAX 100000
#define TAG        "tag:yaml.org,2002:"

struct anchor {
	char *name;
	char *text;    /* of a scalar, as written: an alias may be a key; else NULL */
	json_t *value; /* NULL while it is being read */
};

struct loader {
	yaml_parser_t parser;
	const char *what;
	struct anchor *anchor;
	size_t n, cap;
	size_t copies;
	int depth;
};

/* Matching by hand: each skips what it matches and says whether it did. */

static bool one_of(const char **s, const char *set)
{
	if (!**s || !strchr(set, **s))
		return false;
	(*s)++;
	return true;
}

static bool some_of(const char **s, const char *set)
{
	size_t n = strspn(*s, set);

	*s += n;
	return n > 0;
}

/* (:[0-5]?[0-9])+ */
static bool sixties(const char **s)
{
	bool any = false;

	while ((*s)[0] == ':' && (*s)[1] >= '0' && (*s)[1] <= '9') {
		bool two = (*s)[1] <= '5' && (*s)[2] >= '0' && (*s)[2] <= '9';

		*s += two ? 3 : 2;
		any = true;
	}
	return any;
}

#define DIGITS "0123456789"

static bool is_int(const char *s)
{
	one_of(&s, "+-");
	if (s[0] == '0' && s[1] == 'b')
		return s += 2, some_of(&s, "01_") && !*s;
	if (s[0] == '0' && s[1] == 'x')
		return s += 2, some_of(&s, DIGITS "abcdefABCDEF_") && !*s;
	if (one_of(&s, "0")) {
		some_of(&s, "01234567_");
		return !*s;
	}
	if (!one_of(&s, "123456789"))
		return false;
	some_of(&s, DIGITS "_");
	sixties(&s);
	return !*s;
}

static bool is_float(const char *s)
{
	bool sign = one_of(&s, "+-"), base60;

	if (!strcmp(s, ".inf") || !strcmp(s, ".Inf") || !strcmp(s, ".INF"))
		return true;
	if (!sign && (!strcmp(s, ".nan") || !strcmp(s, ".NaN") || !strcmp(s, ".NAN")))
		return true;
	if (one_of(&s, DIGITS)) {
		some_of(&s, DIGITS "_");
		base60 = sixties(&s);
		if (!one_of(&s, "."))
			return false;
		some_of(&s, DIGITS "_");
		if (base60)
			return !*s;
	} else if (sign || !one_of(&s, ".") || !one_of(&s, DIGITS)) {
		return false;
	} else {
		some_of(&s, DIGITS "_");
	}
	if (one_of(&s, "eE") && (!one_of(&s, "+-") || !some_of(&s, DIGITS)))
		return false;
	return !*s;
}

/*
 * 1 true, 0 false, -1 neither; in lower case, capitalised or upper case, or (any_case) as an
 * explicit !!bool has it.
 */
static int bool_of(const char *s, bool any_case)
{
	static const char *const words[][3] = {
		/* false, true, false, ... */
		{ "no", "No", "NO" },       { "yes", "Yes", "YES" }, { "false", "False", "FALSE" },
		{ "true", "True", "TRUE" }, { "off", "Off", "OFF" }, { "on", "On", "ON" },
	};
	int i, j;

	for (i = 0; i < 6; i++)
		for (j = 0; j < 3; j++)
			if (!strcmp(s, words[i][j]) || (any_case && !strcasecmp(s, words[i][j])))
				return i % 2;
	return -1;
}

static bool is_null(const char *s)
{
	return !*s || !strcmp(s, "~") || !strcmp(s, "null") || !strcmp(s, "Null") ||
	       !strcmp(s, "NULL");
}

static json_t *no_memory(struct err *e)
{
	err_fail(e, "out of memory: cannot hold a YAML value");
	return NULL;
}

static json_t *not_a(const char *s, const char *kind, struct err *e)
{
	err_refuse(e, "'%s' is not %s", s, kind);
	return NULL;
}

static int digit_of(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : 16;
}

/*
 * Digits into *out; decimal ones may be parts between colons that count 60 each. False where
 * anything else stands, or 64 bits do not hold it.
 */
static bool digits_of(const char *s, int base, uint64_t *out)
{
	uint64_t sum = 0, part = 0;
	bool any = false;

	for (;; s++) {
		int digit = digit_of(*s);

		if (digit < base) {
			if (__builtin_mul_overflow(part, (uint64_t)base, &part) ||
			    __builtin_add_overflow(part, (uint64_t)digit, &part))
				return false;
			any = true;
			continue;
		}
		if (!any || (*s && (*s != ':' || base != 10)) ||
		    __builtin_mul_overflow(sum, 60, &sum) ||
		    __builtin_add_overflow(sum, part, &sum))
			return false;
		*out = sum;
		if (!*s)
			return true;
		part = 0;
		any = false;
	}
}

/* A copy without underscores, as Python's constructors take it. */
static char *compact(const char *s, struct err *e)
{
	char *copy = mem_strdup(s, e), *to = copy;

	for (; copy && *s; s++)
		if (*s != '_')
			*to++ = *s;
	if (copy)
		*to = '\0';
	return copy;
}

static json_t *make_int(const char *s, struct err *e)
{
	char *copy = compact(s, e), *p = copy;
	bool negative, good;
	uint64_t u = 0;
	json_t *v;

	if (!copy)
		return NULL;
	negative = *p == '-';
	p += *p == '-' || *p == '+';
	if (p[0] == '0' && p[1] == 'b')
		good = digits_of(p + 2, 2, &u);
	else if (p[0] == '0' && p[1] == 'x')
		good = digits_of(p + 2, 16, &u);
	else
		good = digits_of(p, p[0] == '0' && p[1] ? 8 : 10, &u);
	free(copy);
	if (!good || u > (uint64_t)INT64_MAX + negative)
		return not_a(s, "an integer of 64 bits", e);
	v = json_integer(negative ? (json_int_t)(0 - u) : (json_int_t)u);
	return v ? v : no_memory(e);
}

/* Parts between colons are summed from the last on, in Python's order of rounding. */
static bool sixty_sum(char *s, double *out)
{
	double base = 1, sum = 0;
	char *colon, *end;

	do {
		colon = strrchr(s, ':');
		sum += strtod(colon ? colon + 1 : s, &end) * base;
		if (*end || end == (colon ? colon + 1 : s))
			return false;
		base *= 60;
		if (colon)
			*colon = '\0';
	} while (colon);
	*out = sum;
	return true;
}

static json_t *make_float(const char *s, struct err *e)
{
	char *copy = compact(s, e), *p = copy;
	double d = 0, sign;
	bool good;
	json_t *v;

	if (!copy)
		return NULL;
	sign = *p == '-' ? -1 : 1;
	p += *p == '-' || *p == '+';
	good = strspn(p, DIGITS ".:eE+-") == strlen(p) && sixty_sum(p, &d) && isfinite(d);
	free(copy);
	if (!good)
		return not_a(s, "a finite number", e);
	v = json_real(sign * d);
	return v ? v : no_memory(e);
}

static json_t *make_string(const char *s, size_t n, struct err *e)
{
	json_t *v;

	errno = 0;
	v = json_stringn(s, n);
	if (v)
		return v;
	if (errno == ENOMEM)
		return no_memory(e);
	err_refuse(e, "the text is not valid UTF-8");
	return NULL;
}

json_t *yaml_scalar(const char *s, struct err *e)
{
	int b = bool_of(s, false);

	if (is_null(s))
		return json_null();
	if (b >= 0)
		return json_boolean(b);
	if (is_float(s))
		return make_float(s, e);
	if (is_int(s))
		return make_int(s, e);
	if (!strcmp(s, "=") || !strcmp(s, "<<"))
		return not_a(s, "a value: put it in quotes", e);
	return make_string(s, strlen(s), e);
}

/* A scalar with an explicit tag. */
static json_t *tagged_scalar(const char *tag, const char *s, size_t n, struct err *e)
{
	const char *type = !strncmp(tag, TAG, strlen(TAG)) ? tag + strlen(TAG) : "";
	int b;

	if (!strcmp(type, "str"))
		return make_string(s, n, e);
	if (!strcmp(type, "int"))
		return make_int(s, e);
	if (!strcmp(type, "float"))
		return make_float(s, e);
	if (!strcmp(type, "null"))
		return json_null();
	if (!strcmp(type, "bool")) {
		b = bool_of(s, true);
		return b < 0 ? not_a(s, "a boolean", e) : json_boolean(b);
	}
	err_refuse(e, "the tag '%s' is not supported", tag);
	return NULL;
}

/* The sentence in `e`, if any, gets its place. Returns -1 for its callers' NULL. */
static int at_mark(const struct loader *l, yaml_mark_t mark, struct err *e)
{
	return err_context(e, "'%s', line %zu, column %zu", l->what, mark.line + 1,
			   mark.column + 1);
}

static json_t *refuse(const struct loader *l, yaml_mark_t mark, const char *problem, struct err *e)
{
	err_refuse(e, "%s", problem);
	at_mark(l, mark, e);
	return NULL;
}

static int next(struct loader *l, yaml_event_t *ev, struct err *e)
{
	const yaml_parser_t *p = &l->parser;

	if (yaml_parser_parse(&l->parser, ev))
		return 0;
	if (p->error == YAML_MEMORY_ERROR)
		return err_fail(e, "out of memory: cannot read '%s'", l->what);
	if (p->error == YAML_READER_ERROR)
		return err_refuse(e, "'%s' is not valid YAML: byte %zu: %s", l->what,
				  p->problem_offset, p->problem);
	return err_refuse(e, "'%s' is not valid YAML: line %zu, column %zu: %s", l->what,
			  p->problem_mark.line + 1, p->problem_mark.column + 1,
			  p->problem ? p->problem : "syntax error");
}

static int next_type(struct loader *l, yaml_event_type_t *type, yaml_mark_t *mark, struct err *e)
{
	yaml_event_t ev;

	if (next(l, &ev, e))
		return -1;
	*type = ev.type;
	*mark = ev.start_mark;
	yaml_event_delete(&ev);
	return 0;
}

static size_t count(const json_t *v)
{
	const char *key;
	json_t *item;
	size_t i, n = 1;

	if (json_is_array(v))
		json_array_foreach(v, i, item) n += count(item);
	else if (json_is_object(v))
		json_object_foreach((json_t *)v, key, item) n += count(item);
	return n;
}

static struct anchor *find_anchor(const struct loader *l, const char *name)
{
	size_t i;

	for (i = 0; i < l->n; i++)
		if (!strcmp(l->anchor[i].name, name))
			return &l->anchor[i];
	return NULL;
}

static const char *anchor_of(const yaml_event_t *ev)
{
	switch (ev->type) {
	case YAML_SCALAR_EVENT:
		return (const char *)ev->data.scalar.anchor;
	case YAML_SEQUENCE_START_EVENT:
		return (const char *)ev->data.sequence_start.anchor;
	case YAML_MAPPING_START_EVENT:
		return (const char *)ev->data.mapping_start.anchor;
	default:
		return NULL;
	}
}

/* Opens the anchor of a node; *at is its index, or SIZE_MAX where there is none. */
static int open_anchor(struct loader *l, const yaml_event_t *ev, size_t *at, struct err *e)
{
	const char *name = anchor_of(ev);
	struct anchor a = { 0 };

	*at = SIZE_MAX;
	if (!name)
		return 0;
	if (find_anchor(l, name)) {
		refuse(l, ev->start_mark, "an anchor of this name was given before", e);
		return -1;
	}
	if (mem_grow(&l->anchor, &l->cap, l->n + 1, sizeof *l->anchor, e))
		return -1;
	a.name = mem_strdup(name, e);
	if (a.name && ev->type == YAML_SCALAR_EVENT)
		a.text = mem_strdup((const char *)ev->data.scalar.value, e);
	if (!a.name || (ev->type == YAML_SCALAR_EVENT && !a.text)) {
		free(a.name);
		return -1;
	}
	*at = l->n;
	l->anchor[l->n++] = a;
	return 0;
}

static const struct anchor *target(const struct loader *l, const yaml_event_t *ev, struct err *e)
{
	const struct anchor *a = find_anchor(l, (const char *)ev->data.alias.anchor);

	if (!a)
		refuse(l, ev->start_mark, "the alias names no anchor", e);
	else if (!a->value)
		refuse(l, ev->start_mark, "the alias stands inside its own anchor", e);
	else
		return a;
	return NULL;
}

static json_t *copy_alias(struct loader *l, const yaml_event_t *ev, struct err *e)
{
	const struct anchor *a = target(l, ev, e);
	json_t *v;

	if (!a)
		return NULL;
	l->copies += count(a->value);
	if (l->copies > COPIES_MAX)
		return refuse(l, ev->start_mark, "aliases expand to more than 100,000 nodes", e);
	v = json_deep_copy(a->value);
	return v ? v : no_memory(e);
}

static json_t *load_node(struct loader *l, const yaml_event_t *ev, struct err *e);

/* The next node; the event that ends a collection gives NULL without an error. */
static json_t *load_next(struct loader *l, yaml_event_type_t end, bool *ended, struct err *e)
{
	yaml_event_t ev;
	json_t *v = NULL;

	*ended = false;
	if (next(l, &ev, e))
		return NULL;
	if (ev.type == end)
		*ended = true;
	else
		v = load_node(l, &ev, e);
	yaml_event_delete(&ev);
	return v;
}

static bool tag_is(const yaml_char_t *tag, const char *type)
{
	return !tag || !strcmp((const char *)tag, "!") ||
	       (!strncmp((const char *)tag, TAG, strlen(TAG)) &&
		!strcmp((const char *)tag + strlen(TAG), type));
}

static json_t *load_sequence(struct loader *l, const yaml_event_t *ev, struct err *e)
{
	json_t *list, *v;
	bool ended;

	if (!tag_is(ev->data.sequence_start.tag, "seq"))
		return refuse(l, ev->start_mark, "the tag of this list is not supported", e);
	list = json_array();
	if (!list)
		return no_memory(e);
	while ((v = load_next(l, YAML_SEQUENCE_END_EVENT, &ended, e))) {
		if (json_array_append_new(list, v)) {
			no_memory(e);
			break;
		}
	}
	if (ended)
		return list;
	json_decref(list);
	return NULL;
}

struct key {
	char *text;
	bool merge;
};

static bool has_nul(const yaml_event_t *ev)
{
	return memchr(ev->data.scalar.value, '\0', ev->data.scalar.length) != NULL;
}

static int scalar_key(struct loader *l, const yaml_event_t *ev, struct key *k, struct err *e)
{
	const char *s = (const char *)ev->data.scalar.value;
	json_t *v;

	if (has_nul(ev)) {
		refuse(l, ev->start_mark, "the key contains a NUL character", e);
		return -1;
	}
	if (ev->data.scalar.anchor ||
	    ev->data.scalar.tag) { /* only then can the value matter, or be wrong */
		v = load_node(l, ev, e);
		if (!v)
			return -1;
		json_decref(v);
	}
	k->merge = ev->data.scalar.plain_implicit && !strcmp(s, "<<");
	k->text = mem_strdup(s, e);
	return k->text ? 0 : -1;
}

static int alias_key(struct loader *l, const yaml_event_t *ev, struct key *k, struct err *e)
{
	const struct anchor *a = target(l, ev, e);

	if (!a)
		return -1;
	if (!a->text) {
		refuse(l, ev->start_mark, "a key must be a scalar", e);
		return -1;
	}
	k->text = mem_strdup(a->text, e);
	return k->text ? 0 : -1;
}

/* k->text stays NULL where the mapping ends. */
static int load_key(struct loader *l, struct key *k, yaml_mark_t *mark, struct err *e)
{
	yaml_event_t ev;
	int rc = 0;

	*k = (struct key){ 0 };
	if (next(l, &ev, e))
		return -1;
	*mark = ev.start_mark;
	if (ev.type == YAML_SCALAR_EVENT) {
		rc = scalar_key(l, &ev, k, e);
	} else if (ev.type == YAML_ALIAS_EVENT) {
		rc = alias_key(l, &ev, k, e);
	} else if (ev.type != YAML_MAPPING_END_EVENT) {
		refuse(l, ev.start_mark, "a key must be a scalar", e);
		rc = -1;
	}
	yaml_event_delete(&ev);
	return rc;
}

static int update(json_t *into, const json_t *from, struct err *e)
{
	if (!json_object_update(into, (json_t *)from))
		return 0;
	no_memory(e);
	return -1;
}

/* The value of "<<": a mapping, or a list of them of which the first wins. */
static int add_merge(const struct loader *l, json_t *into, const json_t *v, yaml_mark_t mark,
		     struct err *e)
{
	size_t i, n = json_array_size(v);
	bool good = json_is_array(v);

	if (json_is_object(v))
		return update(into, v, e);
	for (i = 0; i < n && good; i++)
		good = json_is_object(json_array_get(v, i));
	if (!good) {
		refuse(l, mark, "'<<' wants a mapping or a list of mappings", e);
		return -1;
	}
	for (i = n; i; i--)
		if (update(into, json_array_get(v, i - 1), e))
			return -1;
	return 0;
}

/* One key and value, into `own` or, for "<<", `merged`. Returns 1 at the end of the mapping. */
static int load_pair(struct loader *l, json_t *own, json_t *merged, struct err *e)
{
	yaml_mark_t mark;
	struct key k;
	bool ended;
	json_t *v;
	int rc = -1;

	if (load_key(l, &k, &mark, e))
		return -1;
	if (!k.text)
		return 1;
	v = load_next(l, YAML_NO_EVENT, &ended, e);
	if (v && k.merge)
		rc = add_merge(l, merged, v, mark, e);
	else if (v && json_object_set(own, k.text, v))
		no_memory(e);
	else if (v)
		rc = 0;
	json_decref(v);
	free(k.text);
	return rc;
}

/* Merged keys stand first and are overridden by own ones, as in PyYAML. */
static json_t *load_mapping(struct loader *l, const yaml_event_t *ev, struct err *e)
{
	json_t *own, *merged;
	int rc = -1;

	if (!tag_is(ev->data.mapping_start.tag, "map"))
		return refuse(l, ev->start_mark, "the tag of this mapping is not supported", e);
	own = json_object();
	merged = json_object();
	if (!own || !merged) {
		no_memory(e);
		goto out;
	}
	do
		rc = load_pair(l, own, merged, e);
	while (!rc);
	if (rc == 1 && update(merged, own, e))
		rc = -1;
out:
	json_decref(own);
	if (rc == 1)
		return merged;
	json_decref(merged);
	return NULL;
}

static json_t *load_scalar(struct loader *l, const yaml_event_t *ev, struct err *e)
{
	const char *s = (const char *)ev->data.scalar.value,
		   *tag = (const char *)ev->data.scalar.tag;
	size_t n = ev->data.scalar.length;
	struct err why = ERR_INIT;
	json_t *v;

	if (has_nul(ev))
		return refuse(l, ev->start_mark, "the text contains a NUL character", e);
	if (ev->data.scalar.plain_implicit)
		v = yaml_scalar(s, &why);
	else if (tag)
		v = tagged_scalar(tag, s, n, &why);
	else
		v = make_string(s, n, &why);
	if (!v) {
		at_mark(l, ev->start_mark, &why);
		if (why.code == EXIT_REFUSED)
			err_refuse(e, "%s", why.text);
		else
			err_fail(e, "%s", why.text);
	}
	return v;
}

static json_t *load_node(struct loader *l, const yaml_event_t *ev, struct err *e)
{
	json_t *v = NULL;
	size_t at;

	if (ev->type == YAML_ALIAS_EVENT)
		return copy_alias(l, ev, e);
	if (open_anchor(l, ev, &at, e))
		return NULL;
	if (l->depth == DEPTH_MAX)
		return refuse(l, ev->start_mark, "nested too deeply", e);
	l->depth++;
	if (ev->type == YAML_SCALAR_EVENT)
		v = load_scalar(l, ev, e);
	else if (ev->type == YAML_SEQUENCE_START_EVENT)
		v = load_sequence(l, ev, e);
	else if (ev->type == YAML_MAPPING_START_EVENT)
		v = load_mapping(l, ev, e);
	else
		refuse(l, ev->start_mark, "a value is missing", e);
	l->depth--;
	if (v && at != SIZE_MAX)
		l->anchor[at].value = json_incref(v);
	return v;
}

/* STREAM-START, then either STREAM-END or DOCUMENT-START, node, DOCUMENT-END, STREAM-END. */
static json_t *load_stream(struct loader *l, struct err *e)
{
	yaml_event_type_t type;
	json_t *v = NULL;
	yaml_mark_t mark;
	bool ended;

	if (next_type(l, &type, &mark, e) || next_type(l, &type, &mark, e))
		return NULL;
	if (type == YAML_STREAM_END_EVENT)
		return json_null();
	v = load_next(l, YAML_NO_EVENT, &ended, e);
	if (!v)
		return NULL;
	if (next_type(l, &type, &mark, e) || next_type(l, &type, &mark, e))
		goto fail;
	if (type == YAML_STREAM_END_EVENT)
		return v;
	refuse(l, mark, "more than one document", e);
fail:
	json_decref(v);
	return NULL;
}

json_t *yaml_parse(const char *s, size_t n, const char *what, struct err *e)
{
	struct loader l = { .what = what };
	json_t *v;
	size_t i;

	if (!yaml_parser_initialize(&l.parser))
		return no_memory(e);
	yaml_parser_set_input_string(&l.parser, (const unsigned char *)s, n);
	v = load_stream(&l, e);
	for (i = 0; i < l.n; i++) {
		free(l.anchor[i].name);
		free(l.anchor[i].text);
		json_decref(l.anchor[i].value);
	}
	free(l.anchor);
	yaml_parser_delete(&l.parser);
	return v;
}

json_t *yaml_read(const char *path, struct err *e)
{
	struct text t = TEXT_INIT;
	json_t *v = NULL;

	if (!file_read_stream(path, FILE_MAX, &t, e))
		v = yaml_parse(t.s, t.len, path, e);
	text_release(&t);
	return v;
}
