/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keys: the table, and spelling. A section of its own where the reference reads the key; what a
 * kind means is in keys.h.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdio.h>
#include <string.h>

#include "err.h"
#include "keys.h"

static const struct key keys[] = {
	{ "dist_env", "backend", KEY_TEXT },
	{ "dist_env", "timeout_minutes", KEY_VALUE },

	{ "distributed", "strategy", KEY_TEXT },
	{ "distributed", "tp_size", KEY_VALUE },
	{ "distributed", "pp_size", KEY_VALUE },
	{ "distributed", "cp_size", KEY_VALUE },
	{ "distributed", "ep_size", KEY_VALUE },
	{ "distributed", "dp_replicate_size", KEY_VALUE },
	{ "distributed", "moe", KEY_VALUE },
	{ "distributed", "mp_policy", KEY_VALUE },
	{ "distributed", "offload_policy", KEY_VALUE },
	{ "distributed", "reshard_after_forward", KEY_VALUE },
	{ "distributed", "dp_size", KEY_TRAINING },
	{ "distributed", "defer_fsdp_grad_sync", KEY_TRAINING },
	{ "distributed", "activation_checkpointing", KEY_TRAINING },
	{ "distributed", "activation_checkpointing_scope", KEY_TRAINING },
	{ "distributed", "pipeline", KEY_TRAINING },
	{ "distributed", "multimodal", KEY_TRAINING },
	{ "distributed", "patch_is_packed_sequence", KEY_TRAINING },
	{ "distributed", "sequence_parallel", KEY_TUNING },
	{ "distributed", "tp_plan", KEY_TUNING },
	{ "distributed", "autocast_dtype", KEY_TUNING },
	{ "distributed", "enable_async_tensor_parallel", KEY_TUNING },
	{ "distributed", "enable_compile", KEY_TUNING },
	{ "distributed", "enable_fsdp2_prefetch", KEY_TUNING },
	{ "distributed", "fsdp2_backward_prefetch_depth", KEY_TUNING },
	{ "distributed", "fsdp2_forward_prefetch_depth", KEY_TUNING },

	{ "recipe_args", "target_model_name_or_path", KEY_TEXT },
	{ "recipe_args", "train_data_path", KEY_PATHS },
	{ "recipe_args", "train_split", KEY_TEXT },
	{ "recipe_args", "seq_length", KEY_VALUE },
	{ "recipe_args", "micro_batch_size", KEY_VALUE },
	{ "recipe_args", "num_workers", KEY_VALUE },
	{ "recipe_args", "shuffle_seed", KEY_VALUE },
	{ "recipe_args", "trust_remote_code", KEY_VALUE },
	{ "recipe_args", "cache_output_dir", KEY_TEXT },
	{ "recipe_args", "cache_dtype", KEY_TEXT },
	{ "recipe_args", "cache_shard_size", KEY_VALUE },
	{ "recipe_args", "target_layer_ids", KEY_VALUE },
	{ "recipe_args", "draft_num_hidden_layers", KEY_VALUE },
	{ "recipe_args", "chat_template", KEY_TEXT },
	{ "recipe_args", "mask_reasoning_content", KEY_VALUE },
	{ "recipe_args", "mask_generation_prompt", KEY_VALUE },
	{ "recipe_args", "target_num_hidden_layers", KEY_VALUE },
	{ "recipe_args", "target_force_hf", KEY_VALUE },
	{ "recipe_args", "target_attn_backend", KEY_TUNING },
	{ "recipe_args", "target_attn_implementation", KEY_TUNING },
	{ "recipe_args", "target_dispatcher", KEY_TUNING },
	{ "recipe_args", "target_experts", KEY_TUNING },
	{ "recipe_args", "target_enable_fsdp_optimizations", KEY_TUNING },
	{ "recipe_args", "shard_dense_target", KEY_TUNING },
	{ "recipe_args", "attention_backend", KEY_TRAINING },
	{ "recipe_args", "block_size", KEY_TRAINING },
	{ "recipe_args", "cached_target_path", KEY_TRAINING },
	{ "recipe_args", "ce_loss_alpha", KEY_TRAINING },
	{ "recipe_args", "ckpt_every_steps", KEY_TRAINING },
	{ "recipe_args", "confidence_head_alpha", KEY_TRAINING },
	{ "recipe_args", "confidence_head_stop_gradient", KEY_TRAINING },
	{ "recipe_args", "confidence_head_with_markov", KEY_TRAINING },
	{ "recipe_args", "freeze_embeddings", KEY_TRAINING },
	{ "recipe_args", "grad_accumulation_steps", KEY_TRAINING },
	{ "recipe_args", "l1_loss_alpha", KEY_TRAINING },
	{ "recipe_args", "log_every_steps", KEY_TRAINING },
	{ "recipe_args", "loss_decay_gamma", KEY_TRAINING },
	{ "recipe_args", "markov_head_type", KEY_TRAINING },
	{ "recipe_args", "markov_rank", KEY_TRAINING },
	{ "recipe_args", "mask_token_id", KEY_TRAINING },
	{ "recipe_args", "max_grad_norm", KEY_TRAINING },
	{ "recipe_args", "multimodal", KEY_TRAINING },
	{ "recipe_args", "num_anchors", KEY_TRAINING },
	{ "recipe_args", "num_epochs", KEY_TRAINING },
	{ "recipe_args", "output_dir", KEY_TRAINING },
	{ "recipe_args", "packed_sequence_size", KEY_TRAINING },
	{ "recipe_args", "save_checkpoint_every_epoch", KEY_TRAINING },
	{ "recipe_args", "val_data_path", KEY_TRAINING },
	{ "recipe_args", "val_split", KEY_TRAINING },
};

#define NKEYS (sizeof keys / sizeof keys[0])

const char *const keys_sections[] = { "dist_env", "distributed", "recipe_args", NULL };

/* What a recipe may have for other programs. */
static const char *const other_sections[] = {
	"recipe",     "wandb",   "mlflow", "comet",    "optimizer", "lr_scheduler",
	"checkpoint", "compile", "fp8",    "peft",     "dataset",   "val_dataset",
	"dataloader", "seed",    "slurm",  "launcher", "ci",        NULL,
};

const struct key *keys_find(const char *section, const char *name)
{
	for (size_t i = 0; i < NKEYS; i++) {
		if (!strcmp(keys[i].section, section) && !strcmp(keys[i].name, name))
			return &keys[i];
	}
	return NULL;
}

static bool listed(const char *const *list, const char *name)
{
	while (*list && strcmp(*list, name))
		list++;
	return *list != NULL;
}

bool keys_section(const char *name)
{
	return listed(keys_sections, name) || listed(other_sections, name);
}

#define SPELLING 80

/* How many letters have to be changed, added or dropped; long texts are far from everything. */
static size_t edit_distance(const char *a, const char *b)
{
	size_t row[SPELLING + 1], na = strlen(a), nb = strlen(b);

	if (na > SPELLING || nb > SPELLING)
		return SPELLING;
	for (size_t j = 0; j <= nb; j++)
		row[j] = j;
	for (size_t i = 1; i <= na; i++) {
		size_t diagonal = row[0];

		row[0] = i;
		for (size_t j = 1; j <= nb; j++) {
			size_t best = diagonal + (a[i - 1] != b[j - 1]);

			diagonal = row[j];
			best = best <= row[j] + 1 ? best : row[j] + 1;
			row[j] = best <= row[j - 1] + 1 ? best : row[j - 1] + 1;
		}
	}
	return row[nb];
}

const char *keys_nearest(const char *section, const char *name)
{
	size_t best = strlen(name) / 3 + 2, n = section ? NKEYS : 3;
	const char *found = NULL;

	for (size_t i = 0; i < n; i++) {
		const char *known = section ? keys[i].name : keys_sections[i];
		size_t d;

		if (section && strcmp(keys[i].section, section))
			continue;
		d = edit_distance(name, known);
		if (d < best) {
			best = d;
			found = known;
		}
	}
	return found;
}

static int usage_unknown(const char *what, const char *prefix, const char *name, const char *near,
			 struct err *e)
{
	if (near)
		return err_usage(e, "unknown %s '%s%s': did you mean '%s%s'?", what, prefix, name,
				 prefix, near);
	return err_usage(e, "unknown %s '%s%s': dspark-recipe(5) lists the keys that a recipe may "
			 "have", what, prefix, name);
}

int keys_check(const char *text, struct err *e)
{
	char section[SPELLING + 1], name[SPELLING + 1], prefix[SPELLING + 2];
	size_t whole = strcspn(text, "="), n = strcspn(text, ".="), m;
	const char *rest;

	if (!text[whole] || !n || text[whole - 1] == '.' || memmem(text, whole, "..", 2))
		return err_usage(e, "'%s' is no override: write SECTION.KEY=VALUE, as "
				 "recipe_args.seq_length=512", text);
	if (n > SPELLING)
		return err_usage(e, "'%.*s' is no section of a recipe: use dist_env, distributed "
				 "or recipe_args", (int)n, text);
	snprintf(section, sizeof section, "%.*s", (int)n, text);
	if (!keys_section(section))
		return usage_unknown("section", "", section, keys_nearest(NULL, section), e);
	if (!listed(keys_sections, section))
		return 0;
	if (n == whole)
		return err_usage(e, "'%s' is a section: name one of its keys, as %s.KEY=VALUE",
				 section, section);
	rest = text + n + 1;
	m = strcspn(rest, ".=");
	snprintf(prefix, sizeof prefix, "%s.", section);
	if (m > SPELLING)
		return err_usage(e, "unknown key '%s%.*s': dspark-recipe(5) lists the keys that a "
				 "recipe may have", prefix, (int)m, rest);
	snprintf(name, sizeof name, "%.*s", (int)m, rest);
	if (!keys_find(section, name))
		return usage_unknown("key", prefix, name, keys_nearest(section, name), e);
	return 0;
}
