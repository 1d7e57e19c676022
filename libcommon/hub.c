/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hub: the cache's layout.
 *
 *	models--ORG--NAME/refs/main		the commit
 *	models--ORG--NAME/snapshots/COMMIT/	its files, as links
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "file.h"
#include "hub.h"
#include "mem.h"
#include "text.h"

static const char *variable(const char *name)
{
	const char *v = getenv(name);

	return v && *v ? v : NULL;
}

/* The directory of the local Hugging Face cache, by its own rules. */
static char *hub_directory(struct err *e)
{
	const char *v;

	if ((v = variable("HF_HUB_CACHE")) || (v = variable("HUGGINGFACE_HUB_CACHE")))
		return mem_strdup(v, e);
	if ((v = variable("HF_HOME")))
		return mem_printf(e, "%s/hub", v);
	if ((v = variable("XDG_CACHE_HOME")))
		return mem_printf(e, "%s/huggingface/hub", v);
	v = variable("HOME");
	return mem_printf(e, "%s/.cache/huggingface/hub", v ? v : "~");
}

/* NAME or ORG/NAME of letters, digits, '.', '_', '-'. */
static bool is_model_name(const char *s)
{
	int slashes = 0;

	if (!isalnum((unsigned char)*s))
		return false;
	for (; *s; s++) {
		if (*s == '/' && s[1] && !slashes)
			slashes++;
		else if (!isalnum((unsigned char)*s) && !strchr("._-", *s))
			return false;
	}
	return true;
}

static int not_found(const char *name, const char *hub, struct err *e)
{
	return err_refuse(e, "'%s' is neither a directory nor a model in the local Hugging Face "
			  "cache '%s': name a directory, or download the model into that cache "
			  "first (nothing is downloaded here)", name, hub);
}

/* The commit that refs/main of a cached model names. */
static int read_commit(struct text *commit, const char *model, struct err *e)
{
	char *ref = mem_printf(e, "%s/refs/main", model);
	int rc = -1;

	if (!ref || file_read_all(ref, 4096, commit, e))
		goto out;
	while (commit->len && isspace((unsigned char)commit->s[commit->len - 1]))
		commit->s[--commit->len] = '\0';
	if (commit->len && strspn(commit->s, "0123456789abcdefABCDEF") == commit->len)
		rc = 0;
	else
		err_refuse(e, "'%s' names no snapshot: download the model again", ref);
out:
	free(ref);
	return rc;
}

static int find_snapshot(char **dir, const char *name, const char *hub, struct err *e)
{
	const char *slash = strchr(name, '/');
	struct text commit = TEXT_INIT;
	char *model;
	int rc = -1;

	model = slash ? mem_printf(e, "%s/models--%.*s--%s", hub, (int)(slash - name), name,
				   slash + 1)
		      : mem_printf(e, "%s/models--%s", hub, name);
	if (!model)
		return -1;
	if (!file_is_dir(model)) {
		not_found(name, hub, e);
		goto out;
	}
	if (read_commit(&commit, model, e))
		goto out;
	*dir = mem_printf(e, "%s/snapshots/%s", model, commit.s);
	if (*dir && !file_is_dir(*dir))
		err_refuse(e, "the snapshot '%s' is missing: download '%s' again", *dir, name);
	else if (*dir)
		rc = 0;
out:
	if (rc) {
		free(*dir);
		*dir = NULL;
	}
	text_release(&commit);
	free(model);
	return rc;
}

int hub_find(char **dir, const char *name, struct err *e)
{
	char *hub;
	int rc;

	*dir = NULL;
	if (file_is_dir(name)) {
		*dir = mem_strdup(name, e);
		return *dir ? 0 : -1;
	}
	if (file_exists(name))
		return err_refuse(e, "'%s' is a file: name the directory that holds config.json",
				  name);
	hub = hub_directory(e);
	if (!hub)
		return -1;
	rc = is_model_name(name) ? find_snapshot(dir, name, hub, e) : not_found(name, hub, e);
	free(hub);
	return rc;
}
