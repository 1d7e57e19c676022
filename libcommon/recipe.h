/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipe: the reference's YAML, its keys, defaults and refusals, and the overrides of the command
 * line.
 *
 * What is refused here needs no model: tp_size/pp_size > 1, cache_shard_size not a multiple of
 * micro_batch_size, a bad cache_dtype, missing required keys, layer ids not strictly increasing.
 * Keys that only tune the reference's own kernels are reported once as having no effect.
 */
#ifndef DSPARK_RECIPE_H
#define DSPARK_RECIPE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "dtype.h"

struct err;

struct recipe {
	char *path;			/* of the file */

	/*
	 * dist_env, distributed and recipe_args, each an object: overrides applied, variables
	 * expanded, values as literals, paths as written. Other sections are left out: they are
	 * training's and may hold secrets.
	 */
	json_t *tree;

	char *target;			/* target_model_name_or_path as written */
	char *target_dir;		/* the directory it stands for (hub.h) */
	char *train_data_path;		/* as the manifest writes it: a list is Python's repr */
	char *train_split;		/* NULL = null */
	char *cache_output_dir;		/* as written */
	char *chat_template;		/* as written, NULL = none */
	char *backend;			/* dist_env.backend, NULL = absent */
	char *strategy;			/* distributed.strategy, NULL = absent */

	int64_t seq_length, micro_batch_size, shuffle_seed, cache_shard_size;
	int64_t draft_num_hidden_layers, target_num_hidden_layers;	/* the latter 0 = all */
	enum dtype cache_dtype;		/* DT_F32, DT_BF16, DT_F16 */
	int64_t *layer_ids;		/* target_layer_ids; n_layer_ids = 0: the default rule */
	int n_layer_ids;
	bool mask_reasoning_content, mask_generation_prompt, trust_remote_code, target_force_hf;

	int64_t cp_size, ep_size, dp_replicate_size;
	bool reshard_after_forward;	/* distributed.moe's, else distributed's, else true */
	bool offload;			/* distributed.offload_policy is set */
	double timeout_minutes;
};

/*
 * Reads `path`, applies `overrides` in order (each "dotted.key=value", value as literal.h says),
 * expands variables (variables.h), reads texts as literals, checks in the reference's order, and
 * finds the target (hub.h). Empty values are the defaults, but required keys; mesh sizes of 0 are
 * 1. An override whose section or key is unknown is EXIT_USAGE with the nearest known spelling,
 * before the file is read; in the file it is a warning. On failure nothing is held.
 */
int recipe_read(struct recipe *r, const char *path, const char *const *overrides, int n,
		struct err *e);
void recipe_release(struct recipe *r);

/*
 * The reference's override spelling: moves every "--a.b value" and "--a.b=value" (a dot in the
 * name) before a "--" out of argv into `out` as "a.b=value", so that getopt never sees them; a
 * value does not begin with "--", and without one the override is "a.b=True". Returns how many, or
 * -1; *out is a malloc'ed, NULL-ended list of malloc'ed strings in both cases, or NULL.
 */
int recipe_take_overrides(int *argc, char **argv, char ***out, struct err *e);

/*
 * The SHA-256 of the effective chat template: recipe_args.chat_template (a template if it contains
 * "{%" or "{{", else the file of that name or, if that is a JSON object with a chat_template, this
 * member, else the text itself), else the target's chat_template.jinja, else chat_template in its
 * tokenizer_config.json. Files are read as Python reads text: CR LF is LF. *sha is "" where there
 * is no template; *tokenizer says whether tokenizer files exist at all. Refuses several named
 * templates, of which the manifest cannot record one hash.
 */
int recipe_template(const struct recipe *r, char sha[65], bool *tokenizer, struct err *e);

/*
 * The default layer ids for n features of a target with `layers` layers: malloc'ed, *count filled;
 * evenly spread and rounded half to even: 1 .. layers - 1. Refuses layers < 2.
 */
int64_t *recipe_default_layers(int64_t draft_layers, int64_t layers, int *count, struct err *e);

#endif
