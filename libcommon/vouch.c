/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vouch: dspark.json is written by hand, line by line, so that its bytes are fixed and its last
 * line can seal the others.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "file.h"
#include "json.h"
#include "text.h"
#include "vouch.h"

#ifndef PACKAGE_VERSION
#define PACKAGE_VERSION "unknown"
#endif

#define FORMAT        "dspark-cache"
#define VERSION       1
#define SIZE_MAX_JSON ((size_t)1 << 30)
#define SEAL          "  \"xxh3_128\": \""
#define SEAL_END      "\"\n}\n"

int vouch_text(struct text *out, const struct identity *id, const json_t *files,
	       const char *manifest, struct err *e)
{
	char seal[DIGEST_HEX];
	const char *name, *comma = "";
	json_t *f;

	text_printf(out, "{\n  \"format\": \"" FORMAT "\",\n  \"version\": %d,\n  \"identity\": ",
		    VERSION);
	json_python(out, id->json, -1, true);
	text_printf(out, ",\n  \"identity_xxh3_128\": \"%s\",\n", id->digest);
	if (files) {
		text_add(out, "  \"files\": {");
		json_object_foreach((json_t *)files, name, f)
		{
			text_printf(out, "%s\n    \"%s\": ", comma, name);
			json_python(out, f, -1, false);
			comma = ",";
		}
		text_printf(out,
			    "\n  },\n  \"manifest_xxh3_128\": \"%s\",\n  \"program\": "
			    "\"dspark " PACKAGE_VERSION "\",\n",
			    manifest);
	}
	if (text_ok(out, e))
		return -1;
	digest_xxh3(seal, out->s, out->len);
	text_printf(out, SEAL "%s" SEAL_END, seal);
	return text_ok(out, e);
}

static bool is_sealed(const struct text *t)
{
	const size_t tail = strlen(SEAL) + DIGEST_HEX - 1 + strlen(SEAL_END);
	char seal[DIGEST_HEX];
	const char *p;

	if (t->len < tail)
		return false;
	p = t->s + t->len - tail;
	digest_xxh3(seal, t->s, t->len - tail);
	return !memcmp(p, SEAL, strlen(SEAL)) && !memcmp(p + strlen(SEAL), seal, DIGEST_HEX - 1) &&
	       !memcmp(p + strlen(SEAL) + DIGEST_HEX - 1, SEAL_END, strlen(SEAL_END));
}

static int parse(struct vouch *v, const struct text *t, const char *path, struct err *e)
{
	const char *format, *digest;
	int64_t version;

	v->json = json_parse(t->s, t->len, path, e);
	if (!v->json || json_str(v->json, path, "format", &format, e) ||
	    json_int(v->json, path, "version", &version, e))
		return -1;
	if (strcmp(format, FORMAT) || version != VERSION)
		return err_refuse(e,
				  "'%s' has format '%s' version %lld, not '" FORMAT "' version %d",
				  path, format, (long long)version, VERSION);
	v->identity.json = json_incref(json_object_get(v->json, "identity"));
	if (!json_is_object(v->identity.json))
		return err_refuse(e, "'%s' has no identity", path);
	if (json_str(v->json, path, "identity_xxh3_128", &digest, e) ||
	    identity_finish(&v->identity, e) ||
	    json_str_or(v->json, path, "manifest_xxh3_128", NULL, &v->manifest, e) ||
	    json_str_or(v->json, path, "program", NULL, &v->program, e))
		return -1;
	v->files = json_object_get(v->json, "files");
	if (strcmp(digest, v->identity.digest) ||
	    (v->files && (!json_is_object(v->files) || !v->manifest)))
		return err_refuse(e, "'%s' contradicts itself: it was not written by dspark", path);
	return 0;
}

int vouch_read(struct vouch *v, const char *dir, struct err *e)
{
	char *path = file_join(dir, "dspark.json", e);
	struct text t = TEXT_INIT;
	int rc = -1;

	*v = (struct vouch){ 0 };
	if (!path)
		goto out;
	if (!file_exists(path)) {
		rc = 0;
		goto out;
	}
	if (file_read_all(path, SIZE_MAX_JSON, &t, e))
		goto out;
	if (!is_sealed(&t)) {
		err_refuse(e,
			   "'%s' is damaged: its bytes are not those its last member "
			   "vouches for; move it and manifest.json "
			   "away and run it again (good shards are kept)",
			   path);
		goto out;
	}
	rc = parse(v, &t, path, e);
out:
	if (rc)
		vouch_release(v);
	text_release(&t);
	free(path);
	return rc;
}

void vouch_release(struct vouch *v)
{
	json_decref(v->json);
	identity_release(&v->identity);
	*v = (struct vouch){ 0 };
}
