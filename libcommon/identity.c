/* SPDX-License-Identifier: Apache-2.0 */
/* identity: digest, comparison and the manifest text of what decides a cache's bytes. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "identity.h"
#include "json.h"
#include "text.h"

int identity_finish(struct identity *id, struct err *e)
{
	char *s = json_dumps(id->json, JSON_COMPACT | JSON_SORT_KEYS | JSON_ENSURE_ASCII);

	if (!s)
		return err_fail(e, "out of memory for the identity of a cache");
	digest_xxh3(id->digest, s, strlen(s));
	free(s);
	return 0;
}

void identity_release(struct identity *id)
{
	json_decref(id->json);
	*id = (struct identity){ 0 };
}

static bool is_ignored(const char *key)
{
	return !strcmp(key, "format_version") || !strcmp(key, "complete");
}

static const json_t *member(const json_t *o, const char *key)
{
	const json_t *v = json_object_get(o, key);

	if (!v && !strncmp(key, "mask_", 5))
		return json_false();
	return v;
}

static bool is_same(const json_t *a, const json_t *b)
{
	return a == b || (a && b && json_equal(a, b));
}

static void add_value(struct text *out, const json_t *v)
{
	if (v)
		json_python(out, v, -1, true);
	else
		text_add(out, "absent");
}

static int by_name(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The keys of both objects, sorted, doubles possible. NULL when out of memory. */
static const char **keys_of(const json_t *a, const json_t *b, size_t *n)
{
	const char **key = malloc((json_object_size(a) + json_object_size(b) + 1) * sizeof *key),
		   *k;
	json_t *v;

	*n = 0;
	if (!key)
		return NULL;
	json_object_foreach((json_t *)a, k, v) key[(*n)++] = k;
	json_object_foreach((json_t *)b, k, v) key[(*n)++] = k;
	qsort(key, *n, sizeof *key, by_name);
	return key;
}

static void compare(struct text *out, const json_t *have, const json_t *want, const char *skip)
{
	size_t n, i;
	const char **key = keys_of(have, want, &n);

	if (!key) {
		out->failed = true;
		return;
	}
	for (i = 0; i < n; i++) {
		const json_t *a = member(have, key[i]), *b = member(want, key[i]);

		if ((i && !strcmp(key[i], key[i - 1])) || is_ignored(key[i]) ||
		    (skip && !strcmp(key[i], skip)) || is_same(a, b))
			continue;
		if (out->len)
			text_add(out, "\n");
		text_printf(out, "%s: ", key[i]);
		add_value(out, a);
		text_add(out, " -> ");
		add_value(out, b);
	}
	free(key);
}

void identity_differences(struct text *out, const json_t *have, const json_t *want)
{
	compare(out, json_object_get(have, "manifest"), json_object_get(want, "manifest"), NULL);
	if (json_object_size(have) > 1 && json_object_size(want) > 1)
		compare(out, have, want, "manifest");
}

int identity_manifest(struct text *out, const json_t *identity, bool complete, struct err *e)
{
	json_t *m = json_copy(json_object_get(identity, "manifest"));
	int rc = -1;

	if (!m || json_object_set_new(m, "complete", json_boolean(complete)) ||
	    (!json_object_get(m, "format_version") &&
	     json_object_set_new(m, "format_version", json_integer(1)))) {
		err_fail(e, "out of memory for a manifest");
		goto out;
	}
	json_python(out, m, 2, true);
	rc = text_ok(out, e);
out:
	json_decref(m);
	return rc;
}
