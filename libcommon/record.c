/* SPDX-License-Identifier: Apache-2.0 */
/*
 * record: a run is read whole before anything acts on it, so that a filter never works on half a
 * plan.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "json.h"
#include "mem.h"
#include "record.h"
#include "text.h"

#define RUN_MAX ((size_t)4 << 30)

static const char *kind_of(const json_t *rec)
{
	return json_string_value(json_object_get(rec, "record"));
}

static int add_line(struct run *r, const char *s, size_t n, size_t number, struct err *e)
{
	struct err why = ERR_INIT;
	json_t *rec;

	if (mem_grow(&r->record, &r->cap, r->n + 1, sizeof *r->record, e))
		return -1;
	rec = json_parse(s, n, r->name, &why);
	if (!rec && why.code == EXIT_REFUSED)
		return err_refuse(
			e, "'%s', line %zu: not a record: every line must be one JSON object",
			r->name, number);
	if (!rec)
		return err_fail(e, "%s", why.text);
	if (!kind_of(rec)) {
		json_decref(rec);
		return err_refuse(e, "'%s', line %zu: not an object with a \"record\" string",
				  r->name, number);
	}
	r->record[r->n++] = rec;
	return 0;
}

int run_parse(struct run *r, const char *s, size_t n, const char *name, struct err *e)
{
	size_t number = 1;

	*r = (struct run){ 0 };
	r->name = mem_strdup(name, e);
	if (!r->name)
		return -1;
	while (n) {
		const char *end = memchr(s, '\n', n);
		size_t len = end ? (size_t)(end - s) : n;

		if (add_line(r, s, len, number++, e)) {
			run_release(r);
			return -1;
		}
		len += end != NULL;
		s += len;
		n -= len;
	}
	return 0;
}

int run_read(struct run *r, const char *path, struct err *e)
{
	bool is_stdin = !path || !strcmp(path, "-");
	const char *name = is_stdin ? "standard input" : path;
	struct text t = TEXT_INIT;
	int rc;

	*r = (struct run){ 0 };
	if (is_stdin && isatty(STDIN_FILENO))
		return err_usage(e, "no RUN given and standard input is a terminal");
	rc = is_stdin ? file_read_fd(STDIN_FILENO, name, RUN_MAX, &t, e)
		      : file_read_stream(path, RUN_MAX, &t, e);
	if (!rc)
		rc = run_parse(r, t.s, t.len, name, e);
	text_release(&t);
	return rc;
}

void run_release(struct run *r)
{
	size_t i;

	for (i = 0; i < r->n; i++)
		json_decref(r->record[i]);
	free(r->record);
	free(r->name);
	*r = (struct run){ 0 };
}

json_t *run_next(const struct run *r, const char *kind, size_t *at)
{
	while (*at < r->n) {
		json_t *rec = r->record[(*at)++];

		if (!strcmp(kind_of(rec), kind))
			return rec;
	}
	return NULL;
}

json_t *run_last(const struct run *r, const char *kind)
{
	size_t i;

	for (i = r->n; i; i--)
		if (!strcmp(kind_of(r->record[i - 1]), kind))
			return r->record[i - 1];
	return NULL;
}

static int put(FILE *out, const json_t *rec, struct err *e)
{
	struct text t = TEXT_INIT;
	int rc;

	json_line(&t, rec);
	text_add(&t, "\n");
	rc = text_ok(&t, e);
	if (!rc && fwrite(t.s, 1, t.len, out) != t.len)
		rc = err_errno(e, "cannot write a record to %s",
			       out == stdout ? "standard output" : "its file");
	text_release(&t);
	return rc;
}

/* Flushed at once: the record of a shard must not wait in a buffer for hours. */
int record_write(FILE *out, const json_t *rec, struct err *e)
{
	if (put(out, rec, e))
		return -1;
	return fflush(out) ? err_errno(e, "cannot write a record to %s",
				       out == stdout ? "standard output" : "its file")
			   : 0;
}

int run_copy(FILE *out, const struct run *r, struct err *e)
{
	size_t i;

	for (i = 0; i < r->n; i++)
		if (put(out, r->record[i], e))
			return -1;
	return 0;
}
