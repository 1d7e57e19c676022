/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base_cat MODE: reads standard input, writes what a base module makes of it; exit 1 and a sentence
 * where it refuses. For tests that compare with Python.
 *
 *	json INDENT | json-sorted INDENT | repr | line	a JSON value, written back
 *	yaml		a YAML document, as sorted JSON
 *	scalars		each line a plain YAML scalar, each answer a line: JSON, or "refused"
 *	reprs		each line a JSON value, each answer a line: Python's repr
 *	xxh3 | sha256	a digest
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "digest.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "text.h"
#include "yaml.h"

static int add(struct text *out, const char *mode, int indent, json_t *v)
{
	if (!v)
		return -1;
	if (!strcmp(mode, "repr"))
		json_python_repr(out, v);
	else if (!strcmp(mode, "line"))
		json_line(out, v);
	else
		json_python(out, v, indent, strcmp(mode, "json") != 0);
	json_decref(v);
	return 0;
}

static void lines(struct text *out, const char *mode, char *s)
{
	char *end;

	for (; (end = strchr(s, '\n')); s = end + 1) {
		struct err e = ERR_INIT;
		json_t *v;

		*end = '\0';
		v = *mode == 's' ? yaml_scalar(s, &e)
				 : json_parse(s, (size_t)(end - s), "line", &e);
		if (add(out, *mode == 's' ? "yaml" : "repr", -1, v))
			text_add(out, "refused");
		text_add(out, "\n");
	}
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	int indent = argc > 2 ? atoi(argv[2]) : -1, rc = 0;
	struct text in = TEXT_INIT, out = TEXT_INIT;
	struct err e = ERR_INIT;
	char hex[SHA256_HEX];

	if (file_read_fd(STDIN_FILENO, "standard input", (size_t)1 << 30, &in, &e))
		rc = -1;
	else if (!strcmp(mode, "scalars") || !strcmp(mode, "reprs"))
		lines(&out, mode, in.s);
	else if (!strcmp(mode, "yaml"))
		rc = add(&out, mode, indent, yaml_parse(in.s, in.len, "input", &e));
	else if (!strcmp(mode, "xxh3"))
		digest_xxh3(hex, in.s, in.len), text_add(&out, hex);
	else if (!strcmp(mode, "sha256"))
		digest_sha256(hex, in.s, in.len), text_add(&out, hex);
	else
		rc = add(&out, mode, indent, json_parse(in.s, in.len, "input", &e));
	if (!rc && !text_ok(&out, &e))
		fwrite(out.s, 1, out.len, stdout);
	if (e.code)
		fprintf(stderr, "%s\n", e.text);
	text_release(&in);
	text_release(&out);
	return e.code;
}
