/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipe: from the YAML tree to a struct. Every value goes the way it goes in the reference:
 * variables are expanded, the text is read as a literal, and only then does a key look at its type.
 * Texts (paths, templates) are kept as they are written: a directory called 2024 is no number.
 *
 * Only the three sections that are read are kept. The others belong to training, and may hold
 * secrets that no record should repeat.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "digest.h"
#include "err.h"
#include "file.h"
#include "hub.h"
#include "json.h"
#include "keys.h"
#include "literal.h"
#include "log.h"
#include "mem.h"
#include "recipe.h"
#include "text.h"
#include "variables.h"
#include "yaml.h"

/* ---- overrides ------------------------------------------------------------------------------- */

/* The text of a string value as what its key takes. */
static json_t *typed(const char *s, enum key_kind kind, struct err *e)
{
	json_t *v = literal_parse(s, e);

	if (!v || (kind != KEY_TEXT && kind != KEY_PATHS) || json_is_string(v) || json_is_null(v) ||
	    (kind == KEY_PATHS && json_is_array(v)))
		return v;
	json_decref(v);
	return json_string(s);
}

static enum key_kind path_kind(const char *section, const char *rest)
{
	const struct key *k = keys_find(section, rest);

	return k ? k->kind : KEY_VALUE;
}

static int out_of_memory(struct err *e)
{
	return err_fail(e, "out of memory: cannot hold a recipe");
}

/*
 * Walks to the object that holds the last name of the path, putting objects where something else or
 * nothing is.
 */
static int override_apply(json_t *tree, const char *text, struct err *e)
{
	const char *value = strchr(text, '=') + 1;
	char *path = mem_printf(e, "%.*s", (int)(value - 1 - text), text);
	char *name = path, *dot;
	json_t *node = tree, *v;
	int rc = -1;

	if (!path)
		return -1;
	dot = strchr(path, '.');
	v = typed(value, dot ? (*dot = '\0', path_kind(path, dot + 1)) : KEY_VALUE, e);
	if (dot)
		*dot = '.';
	if (!v)
		goto out;
	while ((dot = strchr(name, '.'))) {
		json_t *next;

		*dot = '\0';
		next = json_object_get(node, name);
		if (!json_is_object(next)) {
			if (json_object_set_new(node, name, json_object())) {
				json_decref(v);
				out_of_memory(e);
				goto out;
			}
			next = json_object_get(node, name);
		}
		node = next;
		name = dot + 1;
	}
	rc = json_object_set_new(node, name, v) ? out_of_memory(e) : 0;
out:
	free(path);
	return rc;
}

/* "--a.b" with a dot in its name. */
static bool is_dotted(const char *arg)
{
	size_t n;

	if (strncmp(arg, "--", 2))
		return false;
	n = strcspn(arg + 2, "=");
	return memchr(arg + 2, '.', n) != NULL;
}

int recipe_take_overrides(int *argc, char **argv, char ***out, struct err *e)
{
	int kept = 1, n = 0, i = 1;

	*out = mem_calloc((size_t)*argc + 1, sizeof **out, e);
	if (!*out)
		return -1;
	while (i < *argc && strcmp(argv[i], "--")) {
		const char *name = argv[i] + 2;

		if (!is_dotted(argv[i])) {
			argv[kept++] = argv[i++];
			continue;
		}
		if (strchr(name, '='))
			(*out)[n] = mem_strdup(name, e);
		else if (i + 1 < *argc && strncmp(argv[i + 1], "--", 2))
			(*out)[n] = mem_printf(e, "%s=%s", name, argv[++i]);
		else
			(*out)[n] = mem_printf(e, "%s=True", name);
		if (!(*out)[n++])
			return -1;
		i++;
	}
	while (i < *argc)
		argv[kept++] = argv[i++];
	argv[kept] = NULL;
	*argc = kept;
	return n;
}

/* ---- the tree -------------------------------------------------------------------------------- */

static json_t *resolve_string(const char *s, enum key_kind kind, struct err *e)
{
	struct text t = TEXT_INIT;
	json_t *v = NULL;

	if (!strchr(s, '$'))
		return typed(s, kind, e);
	if (!variables_expand(&t, s, e))
		v = typed(t.s ? t.s : "", kind, e);
	text_release(&t);
	return v;
}

static json_t *resolve(const json_t *v, enum key_kind kind, struct err *e);

/* Names of Python classes and functions are for the reference: neither variables nor literals. */
static bool is_python_name(const char *key)
{
	size_t n = strlen(key);

	return !strcmp(key, "_target_") || (n >= 3 && !strcmp(key + n - 3, "_fn"));
}

static json_t *resolve_object(const json_t *o, struct err *e)
{
	json_t *out = json_object(), *v;
	const char *key;

	json_object_foreach((json_t *)o, key, v) {
		json_t *r = is_python_name(key) ? json_incref(v) : resolve(v, KEY_VALUE, e);

		if (r && json_object_set_new(out, key, r) == 0)
			continue;
		json_decref(out);
		err_context(e, "'%s'", key);
		return NULL;
	}
	return out;
}

static json_t *resolve_array(const json_t *list, enum key_kind kind, struct err *e)
{
	json_t *out = json_array();

	for (size_t i = 0; out && i < json_array_size(list); i++) {
		json_t *r =
			resolve(json_array_get(list, i), kind == KEY_PATHS ? KEY_TEXT : kind, e);

		if (!r || json_array_append_new(out, r)) {
			json_decref(out);
			return NULL;
		}
	}
	return out;
}

/* New reference, or NULL. */
static json_t *resolve(const json_t *v, enum key_kind kind, struct err *e)
{
	json_t *out;

	if (json_is_object(v))
		out = resolve_object(v, e);
	else if (json_is_array(v))
		out = resolve_array(v, kind, e);
	else if (json_is_string(v))
		out = resolve_string(json_string_value(v), kind, e);
	else if (json_is_integer(v) && (kind == KEY_TEXT || kind == KEY_PATHS))
		out = json_sprintf("%" JSON_INTEGER_FORMAT, json_integer_value(v));
	else
		out = json_incref((json_t *)v);
	if (!out)
		out_of_memory(e);
	return out;
}

/* One section of the file, resolved, into the tree. Absent or null is an empty one. */
static int take_section(json_t *tree, const char *name, const json_t *have, struct err *e)
{
	json_t *out = json_object(), *v;
	const char *key;
	int rc = -1;

	if (!out)
		return out_of_memory(e);
	if (have && !json_is_null(have) && !json_is_object(have)) {
		err_refuse(e, "%s must be a mapping of keys to values", name);
		goto out;
	}
	json_object_foreach((json_t *)have, key, v) {
		json_t *r = resolve(v, path_kind(name, key), e);

		if (!r) {
			err_context(e, "%s.%s", name, key);
			goto out;
		}
		if (json_object_set_new(out, key, r)) {
			out_of_memory(e);
			goto out;
		}
	}
	rc = json_object_set(tree, name, out) ? out_of_memory(e) : 0;
out:
	json_decref(out);
	return rc;
}

/* A misspelt section would be read as none at all. */
static void warn_sections(const char *path, const json_t *file)
{
	const char *key, *near;
	json_t *v;

	json_object_foreach((json_t *)file, key, v) {
		near = keys_section(key) ? NULL : keys_nearest(NULL, key);
		if (near)
			log_warn("'%s': unknown section '%s' is ignored; did you mean '%s'?", path,
				 key, near);
	}
}

static json_t *read_tree(const char *path, const char *const *overrides, int n, struct err *e)
{
	json_t *file = yaml_read(path, e), *tree = NULL;

	if (!file)
		return NULL;
	if (!json_is_object(file)) {
		err_refuse(e, "not a recipe: it must be a mapping with the section recipe_args");
		goto bad;
	}
	for (int i = 0; i < n; i++) {
		if (override_apply(file, overrides[i], e))
			goto bad;
	}
	tree = json_object();
	for (const char *const *s = keys_sections; *s; s++) {
		if (take_section(tree, *s, json_object_get(file, *s), e))
			goto bad;
	}
	warn_sections(path, file);
	json_decref(file);
	return tree;
bad:
	json_decref(file);
	json_decref(tree);
	return NULL;
}

static void warn_unknown(const char *path, const char *section, const char *key)
{
	const char *near = keys_nearest(section, key);

	if (near)
		log_warn("'%s': unknown key '%s.%s' is ignored; did you mean '%s'?", path, section,
			 key, near);
	else
		log_warn("'%s': unknown key '%s.%s' is ignored", path, section, key);
}

/* Says once what of the recipe is not used. */
static void report_keys(const char *path, const json_t *tree)
{
	struct text idle = TEXT_INIT, training = TEXT_INIT;
	const char *section, *name;
	json_t *o, *v;

	json_object_foreach((json_t *)tree, section, o) {
		json_object_foreach(o, name, v) {
			const struct key *k = keys_find(section, name);
			struct text *t = k && k->kind == KEY_TUNING ? &idle : &training;

			if (!k)
				warn_unknown(path, section, name);
			else if (k->kind >= KEY_TUNING)
				text_printf(t, "%s%s.%s", t->len ? ", " : "", section, name);
		}
	}
	if (idle.len && !idle.failed)
		log_info("'%s': without effect here (they tune the kernels of the reference): %s",
			 path, idle.s);
	if (training.len && !training.failed)
		log_debug("'%s': left to training: %s", path, training.s);
	text_release(&idle);
	text_release(&training);
}

/* ---- values ---------------------------------------------------------------------------------- */

struct section {
	const char *name;
	const json_t *o;
};

static int wrong(const struct section *s, const char *key, const json_t *v, const char *want,
		 struct err *e)
{
	struct text t = TEXT_INIT;

	json_line(&t, v);
	err_refuse(e, "%s.%s must be %s, not %.200s", s->name, key, want, t.s ? t.s : "that");
	text_release(&t);
	return -1;
}

/* An integer, or a real without fraction. */
static bool whole_number(const json_t *v, int64_t *out)
{
	double d = json_real_value(v);

	if (json_is_integer(v)) {
		*out = json_integer_value(v);
		return true;
	}
	if (!json_is_real(v) || d != floor(d) || fabs(d) > 0x1p53)
		return false;
	*out = (int64_t)d;
	return true;
}

/* Absent and empty leave *out as it is. */
static int get_int(const struct section *s, const char *key, int64_t min, int64_t *out,
		   struct err *e)
{
	const json_t *v = json_object_get(s->o, key);
	int64_t n;

	if (!v || json_is_null(v))
		return 0;
	if (!whole_number(v, &n))
		return wrong(s, key, v, "a whole number", e);
	if (n < min)
		return err_refuse(e, "%s.%s must be at least %" PRId64 ", not %" PRId64, s->name,
				  key, min, n);
	*out = n;
	return 0;
}

#define MOST_RANKS (1 << 20)

/* Sizes of a mesh: absent, empty and 0 are 1. */
static int get_size(const struct section *s, const char *key, int64_t min, int64_t *out,
		    struct err *e)
{
	*out = 1;
	if (get_int(s, key, min, out, e))
		return -1;
	if (*out > MOST_RANKS)
		return err_refuse(e, "%s.%s is %" PRId64 ": no run has more than %d ranks", s->name,
				  key, *out, MOST_RANKS);
	if (*out == 0)
		*out = 1;
	return 0;
}

static int get_bool(const struct section *s, const char *key, bool *out, struct err *e)
{
	const json_t *v = json_object_get(s->o, key);
	int64_t n;

	if (!v || json_is_null(v))
		return 0;
	if (json_is_boolean(v))
		*out = json_is_true(v);
	else if (whole_number(v, &n) && (n == 0 || n == 1))
		*out = n;
	else
		return wrong(s, key, v, "true or false", e);
	return 0;
}

/* NULL where absent or empty. */
static int get_text(const struct section *s, const char *key, char **out, struct err *e)
{
	const json_t *v = json_object_get(s->o, key);

	if (!v || json_is_null(v))
		return 0;
	if (!json_is_string(v))
		return wrong(s, key, v, "a text", e);
	*out = mem_strdup(json_string_value(v), e);
	return *out ? 0 : -1;
}

/* As get_text for what no run can do without. */
static int need_text(const struct section *s, const char *key, char **out, const char *remedy,
		     struct err *e)
{
	if (get_text(s, key, out, e))
		return -1;
	if (!*out || !**out)
		return err_refuse(e, "%s.%s is missing: %s", s->name, key, remedy);
	return 0;
}

static int get_minutes(const struct section *s, double *out, struct err *e)
{
	const json_t *v = json_object_get(s->o, "timeout_minutes");

	if (!v || json_is_null(v))
		return 0;
	if (!json_is_number(v) || !(json_number_value(v) > 0))
		return wrong(s, "timeout_minutes", v, "a number of minutes above 0", e);
	*out = json_number_value(v);
	return 0;
}

/*
 * Of two sizes that are cut here by nothing, both are named, as a user who sets one usually has set
 * the other.
 */
static int refuse_axes(const struct section *s, struct err *e)
{
	int64_t tp, pp;

	if (get_size(s, "tp_size", INT64_MIN, &tp, e) || get_size(s, "pp_size", INT64_MIN, &pp, e))
		return -1;
	if (tp == 1 && pp == 1)
		return 0;
	return err_refuse(e, "distributed.%s is %" PRId64 ": a target is not cut by tensors or "
			  "stages, because every rank runs rows of its own; set tp_size and "
			  "pp_size to 1; dspark-plan --weights gather and ep_size share a large "
			  "target",
			  tp != 1 ? "tp_size" : "pp_size", tp != 1 ? tp : pp);
}

static int read_mesh(struct recipe *r, const struct section *s, struct err *e)
{
	static const char *const known[] = { "fsdp2", "megatron_fsdp", "megatron-fsdp", "mfsdp",
					     "ddp" };
	const json_t *moe = json_object_get(s->o, "moe");
	struct section ms = { "distributed.moe", moe };
	bool found = false;

	if (get_text(s, "strategy", &r->strategy, e) || get_size(s, "cp_size", 0, &r->cp_size, e) ||
	    get_size(s, "ep_size", 0, &r->ep_size, e) ||
	    get_size(s, "dp_replicate_size", 0, &r->dp_replicate_size, e))
		return -1;
	for (size_t i = 0; r->strategy && i < sizeof known / sizeof known[0]; i++)
		found = found || !strcasecmp(known[i], r->strategy);
	if (r->strategy && !found)
		log_warn("'%s': distributed.strategy '%s' is unknown; gathered weights are cut as "
			 "fsdp2 does it", r->path, r->strategy);
	if (moe && !json_is_null(moe) && !json_is_object(moe))
		return wrong(s, "moe", moe, "a mapping of keys to values", e);
	r->reshard_after_forward = true;
	if (get_bool(s, "reshard_after_forward", &r->reshard_after_forward, e) ||
	    get_bool(&ms, "reshard_after_forward", &r->reshard_after_forward, e))
		return -1;
	r->offload = json_has(s->o, "offload_policy") &&
		     !json_is_false(json_object_get(s->o, "offload_policy"));
	return 0;
}

/* ---- recipe_args ----------------------------------------------------------------------------- */

static int read_dtype(struct recipe *r, const struct section *s, struct err *e)
{
	static const struct {
		const char *name;
		enum dtype dtype;
	} known[] = { { "bf16", DT_BF16 }, { "fp16", DT_F16 }, { "fp32", DT_F32 } };
	char *name = NULL;

	r->cache_dtype = DT_BF16;
	if (get_text(s, "cache_dtype", &name, e))
		return -1;
	if (name)
		r->cache_dtype = DT_NONE;
	for (size_t i = 0; name && i < 3; i++) {
		if (!strcmp(name, known[i].name))
			r->cache_dtype = known[i].dtype;
	}
	if (r->cache_dtype == DT_NONE)
		err_refuse(e, "recipe_args.cache_dtype is '%s': use bf16, fp16 or fp32", name);
	free(name);
	return r->cache_dtype == DT_NONE ? -1 : 0;
}

/* Of micro_batch_size, from cache_shard_size on; the batch itself where that is beyond int64_t. */
static int64_t next_multiple(const struct recipe *r)
{
	int64_t n = mem_mul(r->cache_shard_size / r->micro_batch_size + 1, r->micro_batch_size);

	return n > 0 ? n : r->micro_batch_size;
}

static int read_cache(struct recipe *r, const struct section *s, struct err *e)
{
	r->micro_batch_size = 1;
	r->cache_shard_size = 256;
	if (get_int(s, "micro_batch_size", 1, &r->micro_batch_size, e) ||
	    need_text(s, "cache_output_dir", &r->cache_output_dir,
		      "name the directory where the cache goes", e) ||
	    read_dtype(r, s, e) || get_int(s, "cache_shard_size", 1, &r->cache_shard_size, e))
		return -1;
	if (r->cache_shard_size % r->micro_batch_size)
		return err_refuse(e, "recipe_args.cache_shard_size is %" PRId64 ", no multiple of "
				  "micro_batch_size, %" PRId64 ": set cache_shard_size to %" PRId64
				  ", or micro_batch_size to 1", r->cache_shard_size,
				  r->micro_batch_size, next_multiple(r));
	return 0;
}

/* Numbers of layers, strictly increasing; their upper bound is the model's to check. */
static int read_layer_ids(struct recipe *r, const struct section *s, struct err *e)
{
	const json_t *v = json_object_get(s->o, "target_layer_ids");
	size_t n = json_array_size(v);

	if (!v || json_is_null(v))
		return 0;
	if (!json_is_array(v) || n > INT32_MAX)
		return wrong(s, "target_layer_ids", v, "a list of layer numbers, as [1, 9, 18]", e);
	if (!n)
		return 0;
	r->layer_ids = mem_calloc(n, sizeof *r->layer_ids, e);
	if (!r->layer_ids)
		return -1;
	for (size_t i = 0; i < n; i++) {
		if (!whole_number(json_array_get(v, i), &r->layer_ids[i]))
			return wrong(s, "target_layer_ids", v,
				     "a list of layer numbers, as [1, 9, 18]", e);
		if (r->layer_ids[i] < -1)
			return err_refuse(e,
					  "recipe_args.target_layer_ids has %" PRId64
					  ": layers count from 0, and -1 is the embedding output",
					  r->layer_ids[i]);
		if (i && r->layer_ids[i] <= r->layer_ids[i - 1])
			return err_refuse(e, "recipe_args.target_layer_ids must increase strictly, "
					  "but %" PRId64 " follows %" PRId64 ": sort the list and "
					  "name each layer once", r->layer_ids[i],
					  r->layer_ids[i - 1]);
	}
	r->n_layer_ids = (int)n;
	return 0;
}

/* As the manifest writes it: str() of a text or of a list of texts. */
static int read_data_path(struct recipe *r, const struct section *s, struct err *e)
{
	const json_t *v = json_object_get(s->o, "train_data_path");
	struct text repr = TEXT_INIT;
	int rc = -1;

	if (!json_is_array(v))
		return need_text(s, "train_data_path", &r->train_data_path,
				 "name the file of chat rows, or a list of files", e);
	if (!json_array_size(v))
		return err_refuse(e, "recipe_args.train_data_path is an empty list: name the files "
				  "of chat rows");
	for (size_t i = 0; i < json_array_size(v); i++) {
		if (!json_is_string(json_array_get(v, i)))
			return wrong(s, "train_data_path", v, "a text or a list of texts", e);
	}
	json_python_repr(&repr, v);
	if (!text_ok(&repr, e)) {
		r->train_data_path = mem_strdup(repr.s, e);
		rc = r->train_data_path ? 0 : -1;
	}
	text_release(&repr);
	return rc;
}

static int read_target(struct recipe *r, const struct section *s, struct err *e)
{
	if (get_bool(s, "trust_remote_code", &r->trust_remote_code, e) ||
	    need_text(s, "target_model_name_or_path", &r->target,
		      "name the directory of the target, or a model in the local cache", e) ||
	    get_int(s, "seq_length", 1, &r->seq_length, e))
		return -1;
	if (!r->seq_length)
		return err_refuse(e, "recipe_args.seq_length is missing: give the number of tokens "
				  "that a row may have");
	if (r->seq_length > INT32_MAX)
		return err_refuse(e,
				  "recipe_args.seq_length is %" PRId64
				  ": positions have 31 bits, give at most %d",
				  r->seq_length, INT32_MAX);
	return 0;
}

static int read_args(struct recipe *r, const struct section *s, struct err *e)
{
	int64_t workers = 0;

	r->draft_num_hidden_layers = 5;
	r->shuffle_seed = 42;
	if (!json_object_size(s->o))
		return err_refuse(e, "recipe_args is missing: a recipe names target, data and "
				  "cache there");
	if (read_target(r, s, e) || read_cache(r, s, e) ||
	    get_int(s, "target_num_hidden_layers", 1, &r->target_num_hidden_layers, e) ||
	    get_bool(s, "target_force_hf", &r->target_force_hf, e) ||
	    get_text(s, "chat_template", &r->chat_template, e) ||
	    get_int(s, "draft_num_hidden_layers", INT64_MIN, &r->draft_num_hidden_layers, e) ||
	    read_layer_ids(r, s, e) || get_text(s, "train_split", &r->train_split, e) ||
	    get_int(s, "shuffle_seed", INT64_MIN, &r->shuffle_seed, e) ||
	    get_bool(s, "mask_reasoning_content", &r->mask_reasoning_content, e) ||
	    get_bool(s, "mask_generation_prompt", &r->mask_generation_prompt, e) ||
	    read_data_path(r, s, e))
		return -1;
	return get_int(s, "num_workers", 0, &workers, e);
}

static int find_target(struct recipe *r, struct err *e)
{
	return hub_find(&r->target_dir, r->target, e)
		       ? err_context(e, "recipe_args.target_model_name_or_path")
		       : 0;
}

int recipe_read(struct recipe *r, const char *path, const char *const *overrides, int n,
		struct err *e)
{
	struct section env = { "dist_env", NULL }, mesh = { "distributed", NULL },
		       args = { "recipe_args", NULL };

	*r = (struct recipe){ .timeout_minutes = 30 };
	for (int i = 0; i < n; i++) {
		if (keys_check(overrides[i], e))
			return -1;
	}
	r->path = mem_strdup(path, e);
	if (!r->path)
		return -1;
	r->tree = read_tree(path, overrides, n, e);
	if (!r->tree)
		goto bad;
	report_keys(path, r->tree);
	env.o = json_object_get(r->tree, env.name);
	mesh.o = json_object_get(r->tree, mesh.name);
	args.o = json_object_get(r->tree, args.name);
	if (refuse_axes(&mesh, e) || get_text(&env, "backend", &r->backend, e) ||
	    get_minutes(&env, &r->timeout_minutes, e) || read_mesh(r, &mesh, e) ||
	    read_args(r, &args, e) || find_target(r, e))
		goto bad;
	return 0;
bad:
	recipe_release(r);
	return strstr(e->text, path) ? -1 : err_context(e, "'%s'", path);
}

void recipe_release(struct recipe *r)
{
	free(r->path);
	json_decref(r->tree);
	free(r->target);
	free(r->target_dir);
	free(r->train_data_path);
	free(r->train_split);
	free(r->cache_output_dir);
	free(r->chat_template);
	free(r->backend);
	free(r->strategy);
	free(r->layer_ids);
	*r = (struct recipe){ 0 };
}

/* ---- the chat template ----------------------------------------------------------------------- */

#define TEMPLATE_BYTES (16 << 20)

/* A text file as Python reads it: UTF-8, CR LF and CR become LF. */
static int read_lines(const char *path, struct text *out, struct err *e)
{
	struct text raw = TEXT_INIT;
	json_t *utf8 = NULL;
	int rc = -1;

	if (file_read_stream(path, TEMPLATE_BYTES, &raw, e))
		goto out;
	utf8 = json_stringn(raw.len ? raw.s : "", raw.len);
	if (!utf8) {
		err_refuse(e, "'%s' is not valid UTF-8: save it as such", path);
		goto out;
	}
	for (size_t i = 0; i < raw.len; i++) {
		if (raw.s[i] != '\r')
			text_addn(out, raw.s + i, 1);
		else if (raw.s[i + 1] != '\n')
			text_add(out, "\n");
	}
	rc = text_ok(out, e);
out:
	json_decref(utf8);
	text_release(&raw);
	return rc;
}

/*
 * A file of JSON with a chat_template is as good as that template; every other text is the template
 * itself.
 */
static int template_file(const char *path, struct text *out, struct err *e)
{
	json_t *json, *member;
	int rc = 0;

	if (file_is_dir(path))
		return err_refuse(e, "recipe_args.chat_template: '%s' is a directory: name a file",
				  path);
	if (read_lines(path, out, e))
		return -1;
	json = json_loadb(out->len ? out->s : "", out->len, JSON_DECODE_ANY, NULL);
	member = json_object_get(json, "chat_template");
	if (json_is_string(member)) {
		text_clear(out);
		text_addn(out, json_string_value(member), json_string_length(member));
	} else if (member) {
		rc = err_refuse(e, "recipe_args.chat_template: the chat_template in '%s' is not a "
				"text: name a file with one template", path);
	}
	json_decref(json);
	return rc ? rc : text_ok(out, e);
}

static int template_recipe(const char *s, struct text *out, struct err *e)
{
	if (!*s)
		return err_refuse(e, "recipe_args.chat_template is empty: give a template or the "
				  "name of its file, or leave the key out");
	if (!strstr(s, "{%") && !strstr(s, "{{") && file_exists(s))
		return template_file(s, out, e);
	text_add(out, s);
	return text_ok(out, e);
}

static int named_templates(const char *where, struct err *e)
{
	return err_refuse(e, "'%s' holds several named chat templates: say in "
			  "recipe_args.chat_template which one is meant", where);
}

/* Templates with names beside the default one. */
static int refuse_additional(const char *target, struct err *e)
{
	char *path = file_join(target, "additional_chat_templates", e);
	struct dirent *d;
	DIR *dir;
	int rc = 0;

	if (!path)
		return -1;
	dir = opendir(path);
	while (dir && !rc && (d = readdir(dir))) {
		size_t n = strlen(d->d_name);

		if (n >= 6 && !strcmp(d->d_name + n - 6, ".jinja"))
			rc = named_templates(path, e);
	}
	if (dir)
		closedir(dir);
	free(path);
	return rc;
}

/* What the tokenizer's own files say; *found is left false where they say nothing. */
static int template_tokenizer(const char *target, struct text *out, bool *found, struct err *e)
{
	char *jinja = file_join(target, "chat_template.jinja", e),
	     *path = file_join(target, "tokenizer_config.json", e);
	json_t *config = NULL, *v;
	int rc = -1;

	if (!jinja || !path || refuse_additional(target, e))
		goto out;
	if (file_exists(jinja)) {
		*found = true;
		rc = read_lines(jinja, out, e);
		goto out;
	}
	rc = 0;
	if (!file_exists(path))
		goto out;
	config = json_read(path, TEMPLATE_BYTES, e);
	v = json_object_get(config, "chat_template");
	if (!config)
		rc = -1;
	else if (json_is_string(v)) {
		*found = true;
		text_addn(out, json_string_value(v), json_string_length(v));
		rc = text_ok(out, e);
	} else if (v && !json_is_null(v)) {
		rc = named_templates(path, e);
	}
out:
	json_decref(config);
	free(jinja);
	free(path);
	return rc;
}

static int have_tokenizer(const char *target, bool *have, struct err *e)
{
	static const char *const files[] = {
		"tokenizer.json",  "tokenizer_config.json",
		"tokenizer.model", "tiktoken.model",
		"vocab.json",      "vocab.txt",
		"spiece.model",    "chat_template.jinja",
	};

	*have = false;
	for (size_t i = 0; i < sizeof files / sizeof files[0] && !*have; i++) {
		char *path = file_join(target, files[i], e);

		if (!path)
			return -1;
		*have = file_exists(path);
		free(path);
	}
	return 0;
}

int recipe_template(const struct recipe *r, char sha[65], bool *tokenizer, struct err *e)
{
	struct text t = TEXT_INIT;
	bool found = r->chat_template != NULL;
	int rc = -1;

	sha[0] = '\0';
	if (have_tokenizer(r->target_dir, tokenizer, e))
		return -1;
	if (r->chat_template ? template_recipe(r->chat_template, &t, e)
			     : template_tokenizer(r->target_dir, &t, &found, e))
		goto out;
	if (found)
		digest_sha256(sha, t.s ? t.s : "", t.len);
	rc = 0;
out:
	text_release(&t);
	return rc;
}

int64_t *recipe_default_layers(int64_t draft_layers, int64_t layers, int *count, struct err *e)
{
	int64_t last = layers - 1, n, *ids;
	double step;

	if (layers < 2) {
		err_refuse(e, "a target of %" PRId64 " layers has no default target_layer_ids: "
			   "set recipe_args.target_layer_ids", layers);
		return NULL;
	}
	n = draft_layers < 1 ? 1 : draft_layers < last ? draft_layers : last;
	ids = mem_calloc((size_t)n, sizeof *ids, e);
	if (!ids)
		return NULL;
	*count = 0;
	step = n > 1 ? (double)(last - 1) / (double)(n - 1) : 0;
	for (int64_t i = 0; i < n; i++) {
		/* nearbyint rounds halves to even, as Python's round does */
		int64_t id = n > 1 ? (int64_t)nearbyint(1 + (double)i * step) : last;

		if (!*count || id > ids[*count - 1])
			ids[(*count)++] = id;
	}
	return ids;
}
