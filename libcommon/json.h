/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json: jansson, wrapped thinly. Objects keep their order; duplicate keys, invalid UTF-8, NUL in
 * strings and trailing text are refused with file, line and column. Integers beyond 64 bits become
 * reals. Getters return borrowed references.
 */
#ifndef DSPARK_JSON_H
#define DSPARK_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct err;
struct text;

/* New reference, or NULL; `what` names the source in messages. */
json_t *json_read(const char *path, size_t max, struct err *e);
json_t *json_parse(const char *s, size_t n, const char *what, struct err *e);

/*
 * Typed members of `o` (called `what` in messages). Absent or null: the _or forms give `def`, the
 * others refuse. A member of another type is refused by both. Whole-number floats (1.0) count as
 * integers.
 */
int json_str(const json_t *o, const char *what, const char *key, const char **out, struct err *e);
int json_str_or(const json_t *o, const char *what, const char *key, const char *def,
		const char **out, struct err *e);
int json_int(const json_t *o, const char *what, const char *key, int64_t *out, struct err *e);
int json_int_or(const json_t *o, const char *what, const char *key, int64_t def, int64_t *out,
		struct err *e);
int json_real_or(const json_t *o, const char *what, const char *key, double def, double *out,
		 struct err *e);
int json_bool_or(const json_t *o, const char *what, const char *key, bool def, bool *out,
		 struct err *e);
bool json_has(const json_t *o, const char *key);		/* present and not null */

/*
 * The bytes of Python's json.dump: indent < 0 gives the compact one-line form with ", " and ": ";
 * ASCII only (\uxxxx, lower case, surrogate pairs), reals as Python's repr, keys sorted if `sort`.
 * No final newline.
 */
void json_python(struct text *out, const json_t *v, int indent, bool sort);

/*
 * Python's repr of a string, list, number, bool or None: what str(list) gives in the manifest's
 * train_data_path.
 */
void json_python_repr(struct text *out, const json_t *v);

/* One line without spaces, members in their order: the form of records. */
void json_line(struct text *out, const json_t *v);

/* A string in double quotes, escaped as in json_line. */
void json_quote(struct text *out, const char *s);

#endif
