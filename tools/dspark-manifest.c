/* SPDX-License-Identifier: Apache-2.0 */
/* dspark-manifest: completes, verifies, shows and compares caches. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "cli.h"
#include "err.h"
#include "log.h"
#include "plan.h"
#include "record.h"

static const char usage[] =
	"usage: dspark-manifest merge [DIR]\n"
	"   or: dspark-manifest verify [--logits] [--discard] DIR...\n"
	"   or: dspark-manifest show [--stats] DIR\n"
	"   or: dspark-manifest diff DIR1 DIR2\n"
	"\n"
	"merge reads every shard's header once and marks the cache complete; without DIR it is\n"
	"the one that the run on standard input names. verify reads every byte. show describes\n"
	"a cache, diff compares two; both also read the reference's caches.\n"
	"\n"
	"      --logits    verify: recompute logits of sampled positions\n"
	"      --discard   verify: rename bad files to *.bad, so that running again mends\n"
	"      --stats     show: statistics of the states and row lengths\n"
	"  -q, --quiet     no progress and no warnings\n"
	"  -v, --verbose   say more\n"
	"  -h, --help      print this text\n"
	"  -V, --version   print the version\n";

struct options {
	struct verify_options verify;
	bool stats;
	int n; /* operands: command, then directories */
	char **operand;
};

static int parse(struct cli *c, struct options *o, int argc, char **argv, struct err *e)
{
	static const struct option table[] = { { "logits", no_argument, NULL, 'l' },
					       { "discard", no_argument, NULL, 'd' },
					       { "stats", no_argument, NULL, 's' },
					       CLI_COMMON_LONG };
	int ch;

	while ((ch = getopt_long(argc, argv, CLI_COMMON_SHORT, table, NULL)) != -1) {
		if (ch == 'l')
			o->verify.logits = true;
		else if (ch == 'd')
			o->verify.discard = true;
		else if (ch == 's')
			o->stats = true;
		else if (cli_common(c, ch, argv, e))
			return -1;
		if (c->done)
			return 0;
	}
	o->n = argc - optind;
	o->operand = argv + optind;
	return o->n ? 0 : err_usage(e, "say what to do: merge, verify, show or diff");
}

static int merge(const struct options *o, struct err *e)
{
	struct run run = { 0 };
	struct plan plan = { 0 };
	char *dir = NULL;
	int rc = -1;

	if (o->n > 2)
		return err_usage(e, "merge takes one directory, not %d", o->n - 1);
	if (o->n == 2)
		return cache_merge(o->operand[1], e);
	if (run_read(&run, NULL, e) || plan_read(&plan, &run, e))
		goto out;
	dir = plan_path(&plan, plan.cache_dir, e);
	if (dir)
		rc = cache_merge(dir, e);
out:
	free(dir);
	plan_release(&plan);
	run_release(&run);
	return rc;
}

/*
 * Every directory is looked at; the last failure is left to cli_end, which gives the worst exit
 * code.
 */
static int verify(const struct options *o, struct err *e)
{
	struct err one;
	int i;

	if (o->n < 2)
		return err_usage(e, "verify needs a directory");
	for (i = 1; i < o->n; i++) {
		one = (struct err)ERR_INIT;
		if (!cache_verify(o->operand[i], &o->verify, &one))
			continue;
		if (e->code)
			log_error("%s", e->text);
		one.code = one.code > e->code ? one.code : e->code;
		*e = one;
	}
	return e->code ? -1 : 0;
}

static int show(const struct options *o, struct err *e)
{
	return o->n == 2 ? cache_show(o->operand[1], o->stats, e)
			 : err_usage(e, "show takes one directory");
}

static int diff(const struct options *o, struct err *e)
{
	return o->n == 3 ? cache_diff(o->operand[1], o->operand[2], e)
			 : err_usage(e, "diff takes two directories");
}

static int dispatch(const struct options *o, struct err *e)
{
	const char *what = o->operand[0];

	if ((o->verify.logits || o->verify.discard) && strcmp(what, "verify"))
		return err_usage(e, "--logits and --discard belong to verify");
	if (o->stats && strcmp(what, "show"))
		return err_usage(e, "--stats belongs to show");
	if (!strcmp(what, "merge"))
		return merge(o, e);
	if (!strcmp(what, "verify"))
		return verify(o, e);
	if (!strcmp(what, "show"))
		return show(o, e);
	if (!strcmp(what, "diff"))
		return diff(o, e);
	return err_usage(e, "'%s' is not one of merge, verify, show, diff", what);
}

int main(int argc, char **argv)
{
	struct options o = { 0 };
	struct err e = ERR_INIT;
	struct cli c;

	cli_begin(&c, "dspark-manifest", usage);
	if (!parse(&c, &o, argc, argv, &e) && !c.done)
		dispatch(&o, &e);
	return cli_end(&c, &e);
}
