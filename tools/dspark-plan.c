/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dspark-plan: recipe, target and rows to a plan on stdout. Everything that can be refused is
 * refused here.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint.h"
#include "cli.h"
#include "err.h"
#include "layout.h"
#include "log.h"
#include "mem.h"
#include "recipe.h"
#include "text.h"
#include "tokens.h"

static const char usage[] =
"usage: dspark-plan -c RECIPE [--set KEY=VALUE]... [-t TOKENS] [--world N]\n"
"                   [--balance tokens|shards] [--device auto|cpu|cuda]\n"
"                   [--compute-dtype auto|fp32|bf16]\n"
"                   [--weights auto|resident|gather|stream|gather,stream]\n"
"                   [--memory SIZE] [--window-tokens N] [-f]\n"
"\n"
"Decides what each rank does and how big everything becomes, and writes it as a plan to\n"
"standard output.\n"
"\n"
"  -c, --config RECIPE       the recipe (YAML)\n"
"      --set KEY=VALUE       override a recipe key, e.g. recipe_args.seq_length=512;\n"
"                            also --recipe_args.seq_length 512\n"
"  -t, --tokens TOKENS       the rows, from dspark-tokenize; without it the plan is an estimate\n"
"      --world N             ranks; default: the recipe's ep_size\n"
"      --balance HOW         share rows by real tokens (default) or by shards, as the reference\n"
"      --device DEVICE       auto, cpu or cuda\n"
"      --compute-dtype TYPE  auto (fp32 on a CPU, bf16 on CUDA), fp32 or bf16\n"
"      --weights HOW         where each rank takes the weights from\n"
"      --memory SIZE         memory one rank may use, on CUDA that of its device; SIZE is bytes,\n"
"                            or K M G T (powers of 1024)\n"
"      --window-tokens N     tokens between two readings of the weights\n"
"  -f, --force               warn instead of refusing what fits neither disk nor memory\n"
"  -h, --help                show this help\n"
"  -V, --version             show the version\n"
"  -q, --quiet               only errors\n"
"  -v, --verbose             say more\n";

enum {
	OPT_SET = 256,
	OPT_WORLD,
	OPT_BALANCE,
	OPT_DEVICE,
	OPT_COMPUTE,
	OPT_WEIGHTS,
	OPT_MEMORY,
	OPT_WINDOW
};

static const struct option longopts[] = {
	{ "config", required_argument, NULL, 'c' },
	{ "set", required_argument, NULL, OPT_SET },
	{ "tokens", required_argument, NULL, 't' },
	{ "world", required_argument, NULL, OPT_WORLD },
	{ "balance", required_argument, NULL, OPT_BALANCE },
	{ "device", required_argument, NULL, OPT_DEVICE },
	{ "compute-dtype", required_argument, NULL, OPT_COMPUTE },
	{ "weights", required_argument, NULL, OPT_WEIGHTS },
	{ "memory", required_argument, NULL, OPT_MEMORY },
	{ "window-tokens", required_argument, NULL, OPT_WINDOW },
	{ "force", no_argument, NULL, 'f' },
	CLI_COMMON_LONG
};

static const char *const balances[] = { "tokens", "shards", NULL };
static const char *const devices[] = { "auto", "cpu", "cuda", NULL };
static const char *const computes[] = { "auto", "fp32", "bf16", NULL };
static const char *const weights[] = {
	"auto", "resident", "gather", "stream", "gather,stream", NULL
};
static const enum dtype compute_dtypes[] = { DT_NONE, DT_F32, DT_BF16 };

struct options {
	const char *recipe, *tokens;
	char **set;			/* overrides in order: the spelling with dots, then --set */
	size_t nset, cap;
	struct layout_options layout;
};

static int add_set(struct options *o, const char *value, struct err *e)
{
	char *copy;

	if (!strchr(value, '=') || value[0] == '=')
		return err_usage(e, "--set '%s' is not KEY=VALUE", value);
	copy = mem_strdup(value, e);
	if (!copy || mem_grow(&o->set, &o->cap, o->nset + 1, sizeof *o->set, e)) {
		free(copy);
		return -1;
	}
	o->set[o->nset++] = copy;
	return 0;
}

static int parse_one(struct options *o, int ch, struct err *e)
{
	int choice = 0;

	switch (ch) {
	case 'c':
		o->recipe = optarg;
		return 0;
	case 't':
		o->tokens = optarg;
		return 0;
	case 'f':
		o->layout.force = true;
		return 0;
	case OPT_SET:
		return add_set(o, optarg, e);
	case OPT_WORLD:
		return cli_int("--world", optarg, 1, 1 << 20, &o->layout.world, e);
	case OPT_BALANCE:
		if (cli_choice("--balance", optarg, balances, &choice, e))
			return -1;
		o->layout.balance = choice ? BALANCE_SHARDS : BALANCE_TOKENS;
		return 0;
	case OPT_DEVICE:
		if (cli_choice("--device", optarg, devices, &choice, e))
			return -1;
		o->layout.device = devices[choice];
		return 0;
	case OPT_COMPUTE:
		if (cli_choice("--compute-dtype", optarg, computes, &choice, e))
			return -1;
		o->layout.compute = compute_dtypes[choice];
		return 0;
	case OPT_WEIGHTS:
		if (cli_choice("--weights", optarg, weights, &choice, e))
			return -1;
		o->layout.weights = choice - 1;
		return 0;
	case OPT_MEMORY:
		if (cli_size("--memory", optarg, &o->layout.memory, e))
			return -1;
		return o->layout.memory ? 0 : err_usage(e, "option '--memory': 0 holds nothing");
	default:
		return cli_int("--window-tokens", optarg, 1, INT32_MAX, &o->layout.window_tokens,
			       e);
	}
}

static int parse(struct cli *cli, struct options *o, int argc, char **argv, struct err *e)
{
	int n = recipe_take_overrides(&argc, argv, &o->set, e), ch;

	if (n < 0)
		return -1;
	o->nset = o->cap = (size_t)n;
	while ((ch = getopt_long(argc, argv, "c:t:f" CLI_COMMON_SHORT, longopts, NULL)) != -1) {
		if (strchr("ctf", ch) || ch >= OPT_SET ? parse_one(o, ch, e)
						       : cli_common(cli, ch, argv, e))
			return -1;
		if (cli->done)
			return 0;
	}
	if (optind < argc)
		return err_usage(e, "unexpected operand '%s'", argv[optind]);
	if (!o->recipe)
		return err_usage(e, "no recipe: give -c RECIPE");
	return 0;
}

static void say_size(const char *what, uint64_t bytes)
{
	struct text t = TEXT_INIT;

	text_bytes(&t, (double)bytes);
	log_info("%s: %s (%llu bytes)", what, t.s ? t.s : "?", (unsigned long long)bytes);
	text_release(&t);
}

/* What a rank needs under each residency, the chosen one marked. */
static void explain_memory(const struct plan *p)
{
	bool apart = plan_apart(p);

	log_debug("  %-14s %11s %10s %10s %11s %10s %10s%s", "weights", "ranks", "held", "working",
		  "activations", apart ? "own" : "buffers", "total",
		  apart ? ", and in host memory" : "");
	for (size_t i = 0; i < p->nmemory; i++) {
		const struct plan_memory *m = &p->memory[i];
		const uint64_t bytes[] = { m->held,
					   m->working,
					   m->activations,
					   m->buffers + m->own,
					   m->total,
					   m->host_held + m->host_working + m->host_buffers };
		struct text t[6] = { TEXT_INIT, TEXT_INIT, TEXT_INIT,
				     TEXT_INIT, TEXT_INIT, TEXT_INIT };
		char ranks[32];

		snprintf(ranks, sizeof ranks, m->first == m->last ? "%d" : "%d-%d", m->first,
			 m->last);
		for (int k = 0; k < 6; k++)
			text_bytes(&t[k], (double)bytes[k]);
		log_debug("%c %-14s %11s %10s %10s %11s %10s %10s%s%s",
			  m->residency == p->residency ? '*' : ' ', residency_name(m->residency),
			  ranks, t[0].s, t[1].s, t[2].s, t[3].s, t[4].s, apart ? ", " : "",
			  apart ? t[5].s : "");
		for (int k = 0; k < 6; k++)
			text_release(&t[k]);
	}
}

/* A target that is larger than the machine runs all the same: streamed, or in parts. */
static void explain_smaller(const struct plan *p)
{
	const struct plan_memory *least = NULL;
	struct text t = TEXT_INIT;

	for (size_t i = 0; i < p->nmemory; i++)
		if (!least || p->memory[i].total < least->total)
			least = &p->memory[i];
	if (!least || least->total >= plan_rank_bytes(p) / 2)
		return;
	text_bytes(&t, (double)least->total);
	log_info("%s weights need %s: --memory SIZE takes what fits",
		 residency_name(least->residency), t.s ? t.s : "?");
	text_release(&t);
}

/* Tensors that nothing of the target reads. */
static void explain_unused(const struct plan *p)
{
	struct text t = TEXT_INIT;

	if (!p->unused)
		return;
	text_bytes(&t, (double)(p->checkpoint.bytes - p->used.bytes));
	log_info("%lld of the checkpoint's %lld tensors, %s (%llu of %llu bytes), are not used: "
		 "'%s'",
		 (long long)(p->checkpoint.tensors - p->used.tensors),
		 (long long)p->checkpoint.tensors, t.s ? t.s : "?",
		 (unsigned long long)(p->checkpoint.bytes - p->used.bytes),
		 (unsigned long long)p->checkpoint.bytes, p->unused);
	text_release(&t);
}

static void explain(const struct plan *p)
{
	uint64_t token = 0;
	int64_t shards = 0;

	if (!p->runnable)
		log_info("this is an estimate: a plan that can run needs -t TOKENS%s",
			 p->weights[0] ? "" : " and the whole checkpoint");
	for (int i = 0; p->range && i < p->world; i++)
		shards += p->range[i].nshards;
	if (p->range)
		log_info("%lld rows in %lld shards, %lld still to do, for %d rank%s",
			 (long long)p->g.rows, (long long)geometry_shards(&p->g), (long long)shards,
			 p->world, p->world == 1 ? "" : "s");
	for (int t = 0; t < SHARD_TENSORS; t++)
		token += geometry_token_bytes(&p->g, t);
	say_size("a token on disk", token);
	say_size("a full shard", p->shard_bytes);
	if (p->range)
		say_size("on disk at most", p->allocated_bytes);
	say_size(plan_apart(p) ? "device memory of a rank" : "memory of a rank",
		 plan_rank_bytes(p));
	if (plan_apart(p))
		say_size("host memory of a rank", plan_host_bytes(p));
	explain_memory(p);
	explain_smaller(p);
	explain_unused(p);
	log_info("computed in %s on device '%s'", dtype_recipe_name(p->compute), p->device);
	for (int i = 0; p->range && i < p->world; i++)
		log_debug("rank %d: %lld shards, %lld rows, %lld tokens, %lld windows", i,
			  (long long)p->range[i].nshards, (long long)p->range[i].rows,
			  (long long)p->range[i].tokens, (long long)p->range[i].windows);
}

static int make_plan(const struct options *o, struct err *e)
{
	struct recipe r = { 0 };
	struct checkpoint c = { 0 };
	struct target target = { 0 };
	struct tokens t = TOKENS_INIT;
	struct plan p = { 0 };
	struct target_options to;
	json_t *host = NULL;
	char sha[65] = "";
	bool tokenizer = false;
	int rc = -1;

	if (recipe_read(&r, o->recipe, (const char *const *)o->set, (int)o->nset, e) ||
	    checkpoint_open(&c, r.target_dir, !o->tokens, e))
		goto out;
	to = (struct target_options){ r.target_force_hf, r.target_num_hidden_layers, r.seq_length };
	if (target_open(&target, r.target_dir, c.config, &to, e) ||
	    recipe_template(&r, sha, &tokenizer, e))
		goto out;
	if (!o->tokens && tokenizer && !sha[0]) {
		err_refuse(e, "target '%s' has no chat template: set recipe_args.chat_template",
			   r.target);
		goto out;
	}
	if (o->tokens && tokens_open(&t, o->tokens, e))
		goto out;
	if (layout_plan(&p, &r, &target, &c, o->tokens ? &t : NULL, o->tokens, sha, &o->layout, e))
		goto out;
	host = layout_host(&p, &r, e);
	if (!host || plan_write(stdout, &p, host, e))
		goto out;
	explain(&p);
	rc = 0;
out:
	json_decref(host);
	plan_release(&p);
	tokens_release(&t);
	target_release(&target);
	checkpoint_release(&c);
	recipe_release(&r);
	return rc;
}

int main(int argc, char **argv)
{
	struct options o = { .layout = { .device = "auto", .weights = -1 } };
	struct err e = ERR_INIT;
	struct cli cli;

	cli_begin(&cli, "dspark-plan", usage);
	if (!parse(&cli, &o, argc, argv, &e) && !cli.done)
		make_plan(&o, &e);
	for (size_t i = 0; i < o.nset; i++)
		free(o.set[i]);
	free(o.set);
	return cli_end(&cli, &e);
}
