/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recipes: values, overrides, variables, refusals, where the target is, template hashes, default
 * layers.
 */
#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "digest.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "literal.h"
#include "log.h"
#include "mem.h"
#include "recipe.h"
#include "tap.h"
#include "text.h"

static char dir[] = "/tmp/dspark-recipe.XXXXXX";

static void put(const char *name, const char *text)
{
	FILE *f = fopen(name, "w");

	if (!f || fputs(text, f) < 0 || fclose(f))
		ok(false, "cannot write %s", name);
}

/* ---- literals -------------------------------------------------------------------------------- */

static const struct {
	const char *text, *json;
} literals[] = {
	{ "none", "null" },
	{ "None", "null" },
	{ "true", "true" },
	{ "False", "false" },
	{ "TRUE", "\"TRUE\"" },
	{ "null", "\"null\"" },
	{ "1", "1" },
	{ "-1", "-1" },
	{ "- 1", "-1" },
	{ "+1", "1" },
	{ "--1", "\"--1\"" },
	{ "00", "0" },
	{ "007", "\"007\"" },
	{ "1_000", "1000" },
	{ "1__0", "\"1__0\"" },
	{ "1_", "\"1_\"" },
	{ "0x1F", "31" },
	{ "-0x10", "-16" },
	{ "0o17", "15" },
	{ "0b101", "5" },
	{ "0x", "\"0x\"" },
	{ "0b2", "\"0b2\"" },
	{ "1.5", "1.5" },
	{ ".5", "0.5" },
	{ "5.", "5.0" },
	{ ".", "\".\"" },
	{ "1e3", "1000.0" },
	{ "1e", "\"1e\"" },
	{ ".e3", "\".e3\"" },
	{ "1e400", "\"1e400\"" },
	{ "1.5.2", "\"1.5.2\"" },
	{ "3j", "\"3j\"" },
	{ "9223372036854775807", "9223372036854775807" },
	{ "9223372036854775808", "\"9223372036854775808\"" },
	{ " 5", "5" },
	{ "5 # five", "5" },
	{ "5 6", "\"5 6\"" },
	{ "", "\"\"" },
	{ " ", "\" \"" },
	{ "[1, 2,]", "[1,2]" },
	{ "[1 2]", "\"[1 2]\"" },
	{ "[,]", "\"[,]\"" },
	{ "[]", "[]" },
	{ "[1,\n [2]]", "[1,[2]]" },
	{ "[1", "\"[1\"" },
	{ "1,2", "[1,2]" },
	{ "1,", "[1]" },
	{ ",", "\",\"" },
	{ "(1)", "1" },
	{ "(1,)", "[1]" },
	{ "(1, 2)", "[1,2]" },
	{ "()", "[]" },
	{ "(1", "\"(1\"" },
	{ "{}", "{}" },
	{ "{'a': [1, None]}", "{\"a\":[1,null]}" },
	{ "{'a'}", "\"{'a'}\"" },
	{ "{1: 2}", "\"{1: 2}\"" },
	{ "'a b'", "\"a b\"" },
	{ "\"it's\"", "\"it's\"" },
	{ "'a' \"b\"", "\"ab\"" },
	{ "'a", "\"'a\"" },
	{ "u'x'", "\"x\"" },
	{ "r'\\n'", "\"\\\\n\"" },
	{ "b'x'", "\"b'x'\"" },
	{ "'''a'b'''", "\"a'b\"" },
	{ "'\\x41\\u00e9\\101\\q\\''", "\"A\303\251A\\\\q'\"" },
	{ "'\\ud800'", "\"'\\\\ud800'\"" },
	{ "'\\U0001F600'", "\"\360\237\230\200\"" },
	{ "train[:10]", "\"train[:10]\"" },
	{ "Nonesuch", "\"Nonesuch\"" },
	{ "[None, True]", "[null,true]" },
	{ "rows.jsonl", "\"rows.jsonl\"" },
	{ "bf16", "\"bf16\"" },
	{ "-True", "\"-True\"" },
	{ "{{ x }}", "\"{{ x }}\"" },
};

static void test_literals(void)
{
	char deep[400] = "", longer[1200];
	struct err e = ERR_INIT;
	json_t *v;

	for (size_t i = 0; i < sizeof literals / sizeof literals[0]; i++) {
		struct text t = TEXT_INIT;

		v = literal_parse(literals[i].text, &e);
		json_line(&t, v);
		is_str(t.s, literals[i].json, "literal %zu", i);
		json_decref(v);
		text_release(&t);
	}
	memset(deep, '[', 200);
	memset(deep + 200, ']', 199);
	v = literal_parse(deep, &e);
	ok(json_is_string(v), "brackets too deep are a text");
	json_decref(v);
	memset(longer, ' ', sizeof longer);
	strcpy(longer + 1100, "5");
	v = literal_parse(longer, &e);
	ok(json_is_string(v), "what is longer than 1,000 bytes is a text");
	json_decref(v);
	ok(!literal_parse("\377", &e) && e.code == EXIT_REFUSED, "invalid UTF-8 is refused");
}

/* ---- recipes that are read ------------------------------------------------------------------- */

#define HEAD "recipe_args:\n  target_model_name_or_path: model\n  train_data_path: rows.jsonl\n"
#define BASE HEAD "  seq_length: 64\n  cache_output_dir: out\n"

static int read_one(struct recipe *r, const char *yaml, const char *override, struct err *e)
{
	const char *list[] = { override };

	*e = (struct err)ERR_INIT;
	put("r.yaml", yaml);
	return recipe_read(r, "r.yaml", list, override != NULL, e);
}

static void test_defaults(void)
{
	struct recipe r;
	struct err e;

	if (!ok(!read_one(&r, BASE, NULL, &e), "the smallest recipe %s", e.text))
		return;
	is_str(r.target_dir, "model", "target_dir");
	is_str(r.train_data_path, "rows.jsonl", "train_data_path");
	is_str(r.train_split, NULL, "train_split");
	is_str(r.chat_template, NULL, "chat_template");
	is_str(r.backend, NULL, "backend");
	is_int(r.micro_batch_size, 1, "micro_batch_size");
	is_int(r.cache_shard_size, 256, "cache_shard_size");
	is_int(r.shuffle_seed, 42, "shuffle_seed");
	is_int(r.draft_num_hidden_layers, 5, "draft_num_hidden_layers");
	is_int(r.target_num_hidden_layers, 0, "target_num_hidden_layers");
	is_int(r.cache_dtype, DT_BF16, "cache_dtype");
	is_int(r.n_layer_ids, 0, "layer ids");
	ok(!r.mask_reasoning_content && !r.mask_generation_prompt && !r.trust_remote_code &&
		   !r.target_force_hf,
	   "flags are off");
	ok(r.cp_size == 1 && r.ep_size == 1 && r.dp_replicate_size == 1 &&
		   r.reshard_after_forward && !r.offload,
	   "mesh");
	ok(r.timeout_minutes == 30, "timeout");
	recipe_release(&r);
	recipe_release(&r);
	ok(!r.path, "released twice");
}

static void test_values(void)
{
	struct recipe r;
	struct err e;

	if (!ok(!read_one(&r,
			  "dist_env:\n  backend: gloo\n  timeout_minutes: 2.5\n"
			  "distributed:\n  strategy: fsdp2\n  tp_size:\n  pp_size: 0\n  cp_size: "
			  "2\n  ep_size: '4'\n  dp_replicate_size: null\n"
			  "  offload_policy: {}\n  moe:\n    reshard_after_forward: false\n"
			  "wandb:\n  key: $DSPARK_SURELY_UNSET\n" BASE
			  "  micro_batch_size: 4.0\n  cache_shard_size: 8\n  cache_dtype: fp16\n  "
			  "target_layer_ids: [-1, 0, '3']\n"
			  "  train_split: train[:10]\n  shuffle_seed: -7\n  "
			  "mask_reasoning_content: yes\n  mask_generation_prompt: 1\n"
			  "  target_num_hidden_layers: 2\n  target_force_hf: true\n  "
			  "draft_num_hidden_layers: 3\n  num_workers: 2\n"
			  "  target_attn_backend: sdpa\n",
			  NULL, &e),
		"all keys %s", e.text))
		return;
	is_str(r.backend, "gloo", "backend");
	ok(r.timeout_minutes == 2.5, "timeout");
	is_str(r.strategy, "fsdp2", "strategy");
	is_int(r.cp_size, 2, "cp_size");
	is_int(r.ep_size, 4, "a quoted number is a number");
	ok(r.offload && !r.reshard_after_forward, "policies");
	is_int(r.micro_batch_size, 4, "4.0 is 4");
	is_int(r.cache_dtype, DT_F16, "cache_dtype");
	ok(r.n_layer_ids == 3 && r.layer_ids[0] == -1 && r.layer_ids[1] == 0 && r.layer_ids[2] == 3,
	   "layer ids");
	is_str(r.train_split, "train[:10]", "train_split");
	is_int(r.shuffle_seed, -7, "shuffle_seed");
	ok(r.mask_reasoning_content && r.mask_generation_prompt && r.target_force_hf, "flags");
	is_int(r.target_num_hidden_layers, 2, "target_num_hidden_layers");
	is_int((int64_t)json_object_size(r.tree), 3, "three sections are kept");
	ok(!json_object_get(r.tree, "wandb"), "other sections are neither kept nor expanded");
	recipe_release(&r);
}

static void test_paths(void)
{
	struct recipe r;
	struct err e;

	put("2024", "");
	if (ok(!read_one(&r, HEAD "  seq_length: 8\n  cache_output_dir: 2024\n",
			 "recipe_args.train_data_path=['a', \"b's\"]", &e),
	       "paths %s", e.text)) {
		is_str(r.cache_output_dir, "2024", "a number as a path is a text");
		is_str(r.train_data_path, "['a', \"b's\"]",
		       "a list is written as Python writes it");
		recipe_release(&r);
	}
	if (ok(!read_one(&r, BASE, "recipe_args.train_data_path=1e3", &e), "number-like path %s",
	       e.text)) {
		is_str(r.train_data_path, "1e3", "an override keeps the spelling of a path");
		recipe_release(&r);
	}
	if (ok(!read_one(&r, BASE, "recipe_args.train_data_path='1'", &e), "quoted path %s",
	       e.text)) {
		is_str(r.train_data_path, "1", "quotes of an override are not part of a path");
		recipe_release(&r);
	}
	if (ok(!read_one(&r, BASE "  train_split: train\n", "recipe_args.train_split=None", &e),
	       "none %s", e.text)) {
		is_str(r.train_split, NULL, "None empties a key");
		recipe_release(&r);
	}
}

static void test_overrides(void)
{
	const char *list[] = { "recipe_args.seq_length=512",
			       "recipe_args.target_layer_ids=1,2",
			       "distributed.moe.reshard_after_forward=False",
			       "recipe_args.cache_dtype=fp32",
			       "recipe_args.seq_length=0x100",
			       "wandb.enable=true" };
	struct recipe r;
	struct err e = ERR_INIT;

	put("r.yaml", BASE);
	if (ok(!recipe_read(&r, "r.yaml", list, 6, &e), "overrides %s", e.text)) {
		is_int(r.seq_length, 256, "the last override wins");
		is_int(r.n_layer_ids, 2, "a tuple without parentheses");
		is_int(r.cache_dtype, DT_F32, "cache_dtype");
		ok(!r.reshard_after_forward, "a section is made where there is none");
		recipe_release(&r);
	}
	if (ok(!read_one(&r, "recipe_args: {target_model_name_or_path: model, seq_length: 1}\n",
			 "recipe_args.cache_output_dir=x", &e) ||
		       strstr(e.text, "recipe_args.train_data_path is missing"),
	       "other checks still run: %s", e.text))
		recipe_release(&r);
}

static void test_take(void)
{
	char *argv[] = { "prog",   "-c",
			 "r.yaml", "--recipe_args.seq_length",
			 "-1",     "--a.b=c=d",
			 "--x.y",  "--set",
			 "k.l=1",  "--config=a.b",
			 "--p.q",  "--",
			 "--r.s",  NULL };
	int argc = 13, n;
	struct err e = ERR_INIT;
	char **out;

	n = recipe_take_overrides(&argc, argv, &out, &e);
	if (is_int(n, 4, "four overrides")) {
		is_str(out[0], "recipe_args.seq_length=-1", "a value may begin with one dash");
		is_str(out[1], "a.b=c=d", "only the first = counts");
		is_str(out[2], "x.y=True", "no value is True");
		is_str(out[3], "p.q=True", "-- is no value");
	}
	is_int(argc, 8, "the rest stays");
	is_str(argv[3], "--set", "--set stays");
	is_str(argv[5], "--config=a.b", "a dot in the value does not count");
	is_str(argv[7], "--r.s", "what follows -- stays");
	is_str(argv[8], NULL, "argv ends with NULL");
	for (int i = 0; i < n; i++)
		free(out[i]);
	free(out);
}

/* ---- recipes that are refused ---------------------------------------------------------------- */

static const struct {
	const char *yaml, *override;
	int code;
	const char *says;
} refused[] = {
	{ BASE "distributed:\n  tp_size: 2\n", NULL, 1, "distributed.tp_size is 2" },
	{ "distributed:\n  tp_size: 1\n  pp_size: 4\n", NULL, 1, "distributed.pp_size is 4" },
	{ BASE, "distributed.tp_size=-1", 1, "tp_size and pp_size to 1" },
	{ BASE "distributed:\n  ep_size: -2\n", NULL, 1, "distributed.ep_size must be at least 0" },
	{ BASE "distributed:\n  ep_size: many\n", NULL, 1,
	  "distributed.ep_size must be a whole number, not \"many\"" },
	{ BASE "distributed: 5\n", NULL, 1, "distributed must be a mapping" },
	{ BASE "distributed:\n  moe: 5\n", NULL, 1, "distributed.moe must be a mapping" },
	{ BASE "dist_env:\n  timeout_minutes: 0\n", NULL, 1, "dist_env.timeout_minutes" },
	{ "- 1\n", NULL, 1, "not a recipe" },
	{ "", NULL, 1, "not a recipe" },
	{ "recipe_args:\n", NULL, 1, "recipe_args is missing" },
	{ "recipe_args:\n  seq_length: 5\n", NULL, 1,
	  "recipe_args.target_model_name_or_path is missing" },
	{ HEAD, NULL, 1, "recipe_args.seq_length is missing" },
	{ HEAD "  seq_length:\n", NULL, 1, "recipe_args.seq_length is missing" },
	{ HEAD "  seq_length: 0\n", NULL, 1, "recipe_args.seq_length must be at least 1, not 0" },
	{ HEAD "  seq_length: 2.5\n", NULL, 1,
	  "recipe_args.seq_length must be a whole number, not 2.5" },
	{ HEAD "  seq_length: true\n", NULL, 1,
	  "recipe_args.seq_length must be a whole number, not true" },
	{ HEAD "  seq_length: 3000000000\n", NULL, 1, "31 bits" },
	{ HEAD "  seq_length: 5\n", NULL, 1, "recipe_args.cache_output_dir is missing" },
	{ HEAD "  seq_length: 5\n  cache_output_dir: ''\n", NULL, 1,
	  "recipe_args.cache_output_dir is missing" },
	{ HEAD "  seq_length: 5\n  cache_output_dir: [a]\n", NULL, 1,
	  "recipe_args.cache_output_dir must be a text, not [\"a\"]" },
	{ BASE "  cache_dtype: float32\n", NULL, 1,
	  "recipe_args.cache_dtype is 'float32': use bf16, fp16 or fp32" },
	{ BASE "  cache_shard_size: 0\n", NULL, 1,
	  "recipe_args.cache_shard_size must be at least 1" },
	{ BASE "  micro_batch_size: 0\n", NULL, 1,
	  "recipe_args.micro_batch_size must be at least 1" },
	{ BASE "  cache_shard_size: 10\n  micro_batch_size: 4\n", NULL, 1,
	  "set cache_shard_size to 12" },
	{ BASE "  target_layer_ids: [0, 0]\n", NULL, 1, "0 follows 0" },
	{ BASE "  target_layer_ids: [5, 1]\n", NULL, 1, "must increase strictly" },
	{ BASE "  target_layer_ids: [-2, 1]\n", NULL, 1, "has -2" },
	{ BASE "  target_layer_ids: [a]\n", NULL, 1, "must be a list of layer numbers" },
	{ BASE "  target_layer_ids: 3\n", NULL, 1, "must be a list of layer numbers" },
	{ BASE "  target_num_hidden_layers: 0\n", NULL, 1,
	  "recipe_args.target_num_hidden_layers must be at least 1" },
	{ BASE "  mask_reasoning_content: maybe\n", NULL, 1, "must be true or false" },
	{ BASE, "recipe_args.train_data_path=[]", 1, "empty list" },
	{ BASE, "recipe_args.train_data_path=[{}]", 1, "a text or a list of texts" },
	{ BASE, "recipe_args.train_data_path=None", 1, "recipe_args.train_data_path is missing" },
	{ BASE "  train_split: $DSPARK_SURELY_UNSET\n", NULL, 1, "recipe_args.train_split" },
	{ BASE "  train_split: ${DSPARK_SURELY_UNSET}\n", NULL, 1,
	  "'DSPARK_SURELY_UNSET' is not set" },
	{ BASE, "recipe_args.target_model_name_or_path=r.yaml", 1, "is a file" },
	{ BASE, "recipe_args.target_model_name_or_path=/no/such", 1, "neither a directory" },
	{ BASE, "recipe_args.target_model_name_or_path=org/unknown", 1,
	  "nothing is downloaded here" },
	{ BASE, "recipe_args.seq_lenght=5", 2, "did you mean 'recipe_args.seq_length'?" },
	{ BASE, "recipe_args.zzzzzzzz=5", 2, "unknown key 'recipe_args.zzzzzzzz'" },
	{ BASE, "distributed.ep_sizes=5", 2, "did you mean 'distributed.ep_size'" },
	{ BASE, "recipe_arg.seq_length=5", 2,
	  "unknown section 'recipe_arg': did you mean 'recipe_args'?" },
	{ BASE, "seq_length=5", 2, "unknown section 'seq_length'" },
	{ BASE, "recipe_args=5", 2, "is a section" },
	{ BASE, "recipe_args.seq_length", 2, "write SECTION.KEY=VALUE" },
	{ BASE, "=5", 2, "write SECTION.KEY=VALUE" },
	{ BASE, "", 2, "write SECTION.KEY=VALUE" },
	{ BASE, "recipe_args.=5", 2, "write SECTION.KEY=VALUE" },
	{ BASE, "recipe_args..seq_length=5", 2, "write SECTION.KEY=VALUE" },
	{ BASE,
	  "recipe_args."
	  "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	  "aaaaaaaaa=5",
	  2, "unknown key" },
};

static void test_refusals(void)
{
	struct recipe r;
	struct err e;

	for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
		int rc = read_one(&r, refused[i].yaml, refused[i].override, &e);

		ok(rc == -1 && e.code == refused[i].code && strstr(e.text, refused[i].says),
		   "refused with \"%s\"", refused[i].says);
		if (rc != -1 || e.code != refused[i].code || !strstr(e.text, refused[i].says))
			printf("# rc %d, code %d: %s\n", rc, e.code, e.text);
		if (!rc)
			recipe_release(&r);
	}
	e = (struct err)ERR_INIT;
	ok(recipe_read(&r, "no-such.yaml", NULL, 0, &e) && e.code == EXIT_REFUSED &&
		   strstr(e.text, "no-such.yaml"),
	   "a missing file: %s", e.text);
	ok(read_one(&r, "a: [\n", NULL, &e) && e.code == EXIT_REFUSED, "broken YAML: %s", e.text);
}

/*
 * The reference looks at the axes before everything else, at the cache's settings before data and
 * layers.
 */
static void test_order(void)
{
	struct recipe r;
	struct err e;

	ok(read_one(&r, "distributed:\n  pp_size: 2\nrecipe_args:\n  cache_dtype: x\n", NULL, &e) &&
		   strstr(e.text, "pp_size"),
	   "axes first");
	ok(read_one(&r,
		    "recipe_args:\n  target_model_name_or_path: absent\n  seq_length: 1\n  "
		    "cache_dtype: x\n",
		    NULL, &e) &&
		   strstr(e.text, "cache_output_dir"),
	   "output directory before dtype");
	ok(read_one(&r, BASE "  cache_dtype: x\n  cache_shard_size: -1\n", NULL, &e) &&
		   strstr(e.text, "cache_dtype"),
	   "dtype before shard size");
	ok(read_one(&r,
		    BASE
		    "  cache_shard_size: 3\n  micro_batch_size: 2\n  target_layer_ids: [2, 1]\n",
		    NULL, &e) &&
		   strstr(e.text, "cache_shard_size"),
	   "shard size before layers");
}

/* ---- variables ------------------------------------------------------------------------------- */

static const struct {
	const char *text, *value;
} variables[] = {
	{ "$DSPARK_A", "alpha" },
	{ "x-${DSPARK_A}-y", "x-alpha-y" },
	{ "${DSPARK_A,other}", "alpha" },
	{ "${DSPARK_NONE,other}", "other" },
	{ "${ DSPARK_NONE , a b }", "a b" },
	{ "${oc.env:DSPARK_A}", "alpha" },
	{ "${oc.env:DSPARK_NONE,d}", "d" },
	{ "${oc.env: DSPARK_A }", "alpha" },
	{ "${DSPARK_NONE,}", "" },
	{ "${DSPARK_NONE,a,b}", "a,b" },
	{ "$DSPARK_A/$DSPARK_B", "alpha/beta" },
	{ "$DSPARK_INNER", "$DSPARK_A" },
	{ "${DSPARK_INNER}", "alpha" },
	{ "a$", "a$" },
	{ "$5", "$5" },
	{ "${}", "${}" },
	{ "${open", "${open" },
	{ "$$DSPARK_A", "$alpha" },
	{ "$DSPARK_A.", "alpha." },
	{ "${DSPARK_EMPTY,x}", "" },
	{ "${DSPARK_NONE,$DSPARK_A}", "alpha" },
};

static void test_variables(void)
{
	struct recipe r;
	struct err e;

	setenv("DSPARK_A", "alpha", 1);
	setenv("DSPARK_B", "beta", 1);
	setenv("DSPARK_INNER", "$DSPARK_A", 1);
	setenv("DSPARK_EMPTY", "", 1);
	setenv("DSPARK_N", "128", 1);
	for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
		char *yaml = mem_printf(&e, BASE "  train_split: '%s'\n", variables[i].text);

		if (ok(!read_one(&r, yaml, NULL, &e), "%s %s", variables[i].text, e.text)) {
			is_str(r.train_split, variables[i].value, "%s", variables[i].text);
			recipe_release(&r);
		}
		free(yaml);
	}
	if (ok(!read_one(&r, BASE, "recipe_args.seq_length=${DSPARK_N}", &e), "in an override %s",
	       e.text)) {
		is_int(r.seq_length, 128, "a variable's text is a literal too");
		recipe_release(&r);
	}
}

/* ---- the target ------------------------------------------------------------------------------ */

static void test_hub(void)
{
	static const char *const places[][2] = { { "HF_HUB_CACHE", "hub" },
						 { "HF_HOME", "." },
						 { "XDG_CACHE_HOME", "cache" },
						 { "HOME", "home" } };
	struct recipe r;
	struct err e = ERR_INIT;

	file_mkdir_p("hub/models--org--tiny/refs", &e);
	file_mkdir_p("hub/models--org--tiny/snapshots/abc123", &e);
	file_mkdir_p("hub/models--plain/refs", &e);
	file_mkdir_p("cache/huggingface", &e);
	file_mkdir_p("home/.cache/huggingface", &e);
	ok(!symlink("../../hub", "cache/huggingface/hub") &&
		   !symlink("../../../hub", "home/.cache/huggingface/hub"),
	   "caches");
	put("hub/models--org--tiny/refs/main", "abc123\n");
	put("hub/models--plain/refs/main", "0123");
	unsetenv("HUGGINGFACE_HUB_CACHE");
	for (int i = 0; i < 4; i++)
		unsetenv(places[i][0]);
	for (int i = 3; i >= 0; i--) {
		setenv(places[i][0], places[i][1], 1);
		if (ok(!read_one(&r, BASE, "recipe_args.target_model_name_or_path=org/tiny", &e),
		       "by %s %s", places[i][0], e.text)) {
			is_str(r.target, "org/tiny", "the name stays as written");
			ok(strstr(r.target_dir, "models--org--tiny/snapshots/abc123") != NULL, "%s",
			   r.target_dir);
			recipe_release(&r);
		}
	}
	ok(read_one(&r, BASE, "recipe_args.target_model_name_or_path=plain", &e) &&
		   strstr(e.text, "snapshot"),
	   "snapshot missing: %s", e.text);
	put("hub/models--plain/refs/main", "../../x");
	ok(read_one(&r, BASE, "recipe_args.target_model_name_or_path=plain", &e) &&
		   strstr(e.text, "names no snapshot"),
	   "bad ref: %s", e.text);
	ok(unlink("hub/models--plain/refs/main") == 0 &&
		   read_one(&r, BASE, "recipe_args.target_model_name_or_path=plain", &e),
	   "no ref: %s", e.text);
}

/* ---- templates ------------------------------------------------------------------------------- */

static void is_template(const char *chat_template, const char *want, const char *what)
{
	char sha[SHA256_HEX], hash[SHA256_HEX] = "";
	struct recipe r = { .target_dir = "model", .chat_template = (char *)chat_template };
	struct err e = ERR_INIT;
	bool tokenizer;

	if (want)
		digest_sha256(hash, want, strlen(want));
	if (recipe_template(&r, sha, &tokenizer, &e))
		ok(false, "%s: %s", what, e.text);
	else
		is_str(sha, hash, "%s", what);
}

static void no_template(const char *chat_template, const char *says)
{
	struct recipe r = { .target_dir = "model", .chat_template = (char *)chat_template };
	char sha[SHA256_HEX];
	struct err e = ERR_INIT;
	bool tokenizer;

	ok(recipe_template(&r, sha, &tokenizer, &e) && e.code == EXIT_REFUSED &&
		   strstr(e.text, says),
	   "refused: %s", e.text);
}

static void test_templates(void)
{
	struct recipe r = { .target_dir = "model" };
	char sha[SHA256_HEX];
	struct err e = ERR_INIT;
	bool tokenizer = true;

	ok(!recipe_template(&r, sha, &tokenizer, &e) && !tokenizer && !*sha, "no tokenizer");
	put("model/tokenizer.json", "{}");
	ok(!recipe_template(&r, sha, &tokenizer, &e) && tokenizer && !*sha,
	   "a tokenizer without template");
	put("model/tokenizer_config.json", "{\"chat_template\": null}");
	is_template(NULL, NULL, "null is none");
	put("model/tokenizer_config.json", "{\"chat_template\": \"{{ a }}\\r\\n\"}");
	is_template(NULL, "{{ a }}\r\n", "tokenizer_config.json");
	put("model/chat_template.jinja", "x\r\ny\rz\n\303\251");
	is_template(NULL, "x\ny\nz\n\303\251",
		    "chat_template.jinja comes first, its lines end as Python's");
	put("model/chat_template.jinja", "\377");
	no_template(NULL, "not valid UTF-8");
	unlink("model/chat_template.jinja");
	put("model/tokenizer_config.json",
	    "{\"chat_template\": [{\"name\": \"default\", \"template\": \"x\"}]}");
	no_template(NULL, "several named");
	is_template("{% x %}", "{% x %}", "the recipe's own, though the tokenizer's are named");
	put("model/tokenizer_config.json", "{");
	no_template(NULL, "not valid JSON");
	put("model/tokenizer_config.json", "{}");
	file_mkdir_p("model/additional_chat_templates", &e);
	is_template(NULL, NULL, "an empty directory of named ones");
	put("model/additional_chat_templates/tools.jinja", "x");
	no_template(NULL, "several named");

	put("t.jinja", "plain\r\n");
	put("t.json", "{\"chat_template\": \"inside\", \"chat_template\": \"last\"}");
	put("o.json", "{\"other\": 1}");
	put("l.json", "[\"chat_template\"]");
	put("b.json", "{\"chat_template\": ");
	put("n.json", "{\"chat_template\": [1]}");
	is_template("t.jinja", "plain\n", "a file's text");
	is_template("t.json", "last", "a JSON file's member");
	is_template("o.json", "{\"other\": 1}", "a JSON file without it");
	is_template("l.json", "[\"chat_template\"]", "a JSON file that is no object");
	is_template("b.json", "{\"chat_template\": ", "broken JSON");
	is_template("no-such.jinja", "no-such.jinja", "no file: the text itself");
	no_template("n.json", "is not a text");
	no_template("model", "is a directory");
	no_template("", "is empty");
}

/* Every run of a text case: its template and the hash that the reference recorded. */
static void golden_text(const char *name)
{
	struct err e = ERR_INIT;
	json_t *c = json_read("case.json", 1 << 24, &e), *runs = json_object_get(c, "runs");

	for (size_t i = 0; i < json_array_size(runs); i++) {
		const json_t *run = json_array_get(runs, i), *o = json_object_get(run, "options");
		const char *sha = json_string_value(json_object_get(run, "chat_template_sha256"));
		struct recipe r = { .target_dir = "tokenizer",
				    .chat_template = (char *)json_string_value(
					    json_object_get(o, "chat_template")) };
		char have[SHA256_HEX];
		bool tokenizer;
		int rc;

		e = (struct err)ERR_INIT;
		rc = recipe_template(&r, have, &tokenizer, &e);
		if (sha && strlen(sha) == SHA256_HEX - 1)
			is_str(rc ? e.text : have, sha, "%s run %zu", name, i);
		else if (sha)
			ok(rc && strstr(e.text, "several named"), "%s run %zu: %s", name, i,
			   e.text);
		else if (!strcmp(name, "text-no-template"))
			ok(!rc && !*have && tokenizer, "%s: no template", name);
	}
	json_decref(c);
}

static void golden_recipe(const char *name)
{
	struct err e = ERR_INIT;
	char sha[SHA256_HEX];
	struct recipe r;
	bool tokenizer;

	if (!ok(!recipe_read(&r, "recipe.yaml", NULL, 0, &e), "%s %s", name, e.text))
		return;
	if (!strncmp(name, "e2e-", 4) &&
	    ok(!recipe_template(&r, sha, &tokenizer, &e), "template of %s %s", name, e.text)) {
		json_t *m = json_read("expected/manifest.json", 1 << 20, &e);

		is_str(sha, json_string_value(json_object_get(m, "chat_template_sha256")),
		       "template of %s", name);
		is_str(r.train_data_path, json_string_value(json_object_get(m, "train_data_path")),
		       "data of %s", name);
		is_str(r.train_split, json_string_value(json_object_get(m, "train_split")),
		       "split of %s", name);
		json_decref(m);
	}
	recipe_release(&r);
}

static void test_golden(const char *cases)
{
	char here[4096];
	struct dirent **list;
	int n = scandir(cases, &list, NULL, alphasort);

	if (n <= 0 || !getcwd(here, sizeof here)) {
		tap_skip("no golden cases");
		return;
	}
	for (int i = 0; i < n; i++) {
		struct err e = ERR_INIT;
		char *path = mem_printf(&e, "%s/%s", cases, list[i]->d_name);

		if (list[i]->d_name[0] != '.' && path && !chdir(path)) {
			if (!strncmp(list[i]->d_name, "text-", 5))
				golden_text(list[i]->d_name);
			else if (file_exists("recipe.yaml"))
				golden_recipe(list[i]->d_name);
			ok(!chdir(here), "back");
		}
		free(path);
		free(list[i]);
	}
	free(list);
}

/* ---- default layers -------------------------------------------------------------------------- */

static const struct {
	int64_t draft, layers;
	const char *ids;
} defaults[] = {
	{ 5, 8, "1 2 4 6 7" },
	{ 5, 28, "1 8 14 20 27" },
	{ 5, 36, "1 10 18 26 35" },
	{ 5, 93, "1 24 46 69 92" },
	{ 5, 27, "1 7 14 20 26" },
	{ 5, 60, "1 16 30 44 59" },
	{ 3, 78, "1 39 77" },
	{ 5, 49, "1 13 24 36 48" },
	{ 4, 6, "1 2 4 5" },
	{ 5, 48, "1 12 24 36 47" },
	{ 1, 10, "9" },
	{ 0, 10, "9" },
	{ -3, 10, "9" },
	{ 5, 2, "1" },
	{ 5, 3, "1 2" },
	{ 99, 6, "1 2 3 4 5" },
	{ INT64_MAX, 4, "1 2 3" },
	{ 3, 6, "1 3 5" },
	{ 2, 40, "1 39" },
};

static void test_default_layers(void)
{
	struct err e = ERR_INIT;
	int n;

	for (size_t i = 0; i < sizeof defaults / sizeof defaults[0]; i++) {
		int64_t *ids = recipe_default_layers(defaults[i].draft, defaults[i].layers, &n, &e);
		struct text t = TEXT_INIT;

		for (int j = 0; ids && j < n; j++)
			text_printf(&t, "%s%" PRId64, j ? " " : "", ids[j]);
		is_str(t.s, defaults[i].ids, "%" PRId64 " of %" PRId64, defaults[i].draft,
		       defaults[i].layers);
		text_release(&t);
		free(ids);
	}
	ok(!recipe_default_layers(5, 1, &n, &e) && e.code == EXIT_REFUSED, "one layer: %s", e.text);
}

int main(void)
{
	const char *source = getenv("top_srcdir"), *golden = getenv("GOLDEN");
	char *here = realpath(source ? source : ".", NULL), *cases = NULL, *command = NULL;
	struct err e = ERR_INIT;

	log_program("t_recipe");
	log_level(-1);
	cases = golden && *golden ? mem_strdup(golden, &e)
				  : mem_printf(&e, "%s/tests/data/golden", here ? here : ".");
	if (!mkdtemp(dir) || chdir(dir) || mkdir("model", 0777)) {
		perror(dir);
		return 99;
	}
	test_literals();
	test_defaults();
	test_values();
	test_paths();
	test_overrides();
	test_take();
	test_refusals();
	test_order();
	test_variables();
	test_hub();
	test_templates();
	test_golden(cases);
	test_default_layers();
	command = mem_printf(&e, "rm -rf '%s'", dir);
	if (chdir("/") || !command || system(command))
		printf("# cannot remove %s\n", dir);
	free(command);
	free(cases);
	free(here);
	return tap_end();
}
