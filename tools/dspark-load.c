/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dspark-load: a filter over a run that makes the stage its plan needs and appends the `stage`
 * record.
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
#include "file.h"
#include "log.h"
#include "mem.h"
#include "model.h"
#include "plan.h"
#include "record.h"
#include "stage.h"

static const char usage[] =
"usage: dspark-load [-s STAGE] [--copy[=raw|lz4]] [--ranks LIST] [RUN]\n"
"\n"
"Stages the target's weights: writes down which bytes of which file each rank needs, or\n"
"copies them. RUN is the output of dspark-plan; - or none is standard input. The run goes to\n"
"standard output, with one record more.\n"
"\n"
"  -s, --stage STAGE         the stage's directory; default: cache_output_dir.stage\n"
"      --copy[=raw|lz4]      copy the weights, as to a disk of this node; raw (default) or packed\n"
"      --ranks LIST          only for these ranks, e.g. 0-3,7\n"
"  -h, --help                show this help\n"
"  -V, --version             show the version\n"
"  -q, --quiet               only errors\n"
"  -v, --verbose             say more\n";

enum { OPT_COPY = 256, OPT_RANKS };

static const struct option longopts[] = {
	{ "stage", required_argument, NULL, 's' },
	{ "copy", optional_argument, NULL, OPT_COPY },
	{ "ranks", required_argument, NULL, OPT_RANKS },
	CLI_COMMON_LONG
};

static const char *const copies[] = { "raw", "lz4", NULL };

struct options {
	const char *stage, *ranks, *run;
	enum stage_form form;
};

static int parse(struct cli *cli, struct options *o, int argc, char **argv, struct err *e)
{
	int ch, choice = 0;

	while ((ch = getopt_long(argc, argv, "s:" CLI_COMMON_SHORT, longopts, NULL)) != -1) {
		if (ch == 's') {
			o->stage = optarg;
		} else if (ch == OPT_RANKS) {
			o->ranks = optarg;
		} else if (ch == OPT_COPY) {
			if (optarg && cli_choice("--copy", optarg, copies, &choice, e))
				return -1;
			o->form = choice ? STAGE_LZ4 : STAGE_COPY;
		} else if (cli_common(cli, ch, argv, e)) {
			return -1;
		}
		if (cli->done)
			return 0;
	}
	o->run = argv[optind];
	if (optind + 1 < argc)
		return err_usage(e, "unexpected operand '%s'", argv[optind + 1]);
	return o->stage && !*o->stage ? err_usage(e, "-s needs the name of a directory") : 0;
}

/* "0-3,7" to flags; NULL without error where there is no list. */
static bool *parse_ranks(const char *list, int world, struct err *e)
{
	bool *ranks = list ? mem_calloc((size_t)world, sizeof *ranks, e) : NULL;
	const char *p = list;

	while (ranks && p) {
		char *end;
		long first = strtol(p, &end, 10), last = first;
		bool digits = *p >= '0' && *p <= '9';

		if (digits && *end == '-') {
			p = end + 1;
			digits = *p >= '0' && *p <= '9';
			last = strtol(p, &end, 10);
		}
		if (!digits || (*end && *end != ',') || first > last || last >= world) {
			err_usage(e, "--ranks '%s' is no list of ranks from 0 to %d, like 0-3,7",
				  list, world - 1);
			free(ranks);
			return NULL;
		}
		memset(ranks + first, true, (size_t)(last - first + 1));
		p = *end ? end + 1 : NULL;
	}
	return ranks;
}

/*
 * Absolute, since forward may run elsewhere: a path given here starts here, the default where the
 * plan's paths do.
 */
static char *stage_path(const struct options *o, const struct plan *p, struct err *e)
{
	char *dir, *cwd = NULL, *path;
	size_t n;

	if (!o->stage) {
		dir = plan_path(p, p->cache_dir, e);
		for (n = dir ? strlen(dir) : 0; n > 1 && dir[n - 1] == '/'; n--)
			dir[n - 1] = '\0';
		path = dir ? mem_printf(e, "%s.stage", dir) : NULL;
		free(dir);
		return path;
	}
	if (o->stage[0] != '/' && !(cwd = getcwd(NULL, 0))) {
		err_errno(e, "cannot find the working directory");
		return NULL;
	}
	path = file_join(cwd ? cwd : "", o->stage, e);
	free(cwd);
	return path;
}

static int append(const struct run *run, const char *path, const struct plan *p,
		  const struct stage_made *m, struct err *e)
{
	json_t *rec = json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:I}",
				"record", "stage", "path", path,
				"form", stage_form_name(m->form), "key", p->stage_key,
				"digest", m->digest,
				"shares", m->shares, "made", m->done,
				"bytes", (json_int_t)m->bytes);
	int rc = rec ? 0 : err_refuse(e, "the stage's path '%s' is not valid UTF-8", path);

	if (!rc)
		rc = run_copy(stdout, run, e);
	if (!rc)
		rc = record_write(stdout, rec, e);
	json_decref(rec);
	return rc;
}

static int open_checkpoint(struct checkpoint *c, const struct plan *p, struct err *e)
{
	char *dir = plan_target(p, e), hex[DIGEST_HEX];
	int rc = dir ? checkpoint_open(c, dir, false, e) : -1;

	if (!rc)
		rc = checkpoint_identity(c, hex, e);
	if (!rc && strcmp(hex, p->weights))
		rc = err_refuse(e,
				"the checkpoint '%s' is not the one that was planned: run "
				"dspark-plan again",
				dir);
	free(dir);
	return rc;
}

static int load(const struct options *o, struct err *e)
{
	struct run run = { 0 };
	struct plan p = { 0 };
	struct checkpoint c = { 0 };
	struct target t = { 0 };
	struct stage_made made;
	struct stage_options so = { o->form, NULL, true };
	bool *ranks = NULL;
	char *path = NULL;
	int rc = -1;

	if (run_read(&run, o->run, e) || plan_read(&p, &run, e))
		goto out;
	so.ranks = ranks = parse_ranks(o->ranks, p.world, e);
	if (e->code || open_checkpoint(&c, &p, e) ||
	    target_open(&t, c.dir, c.config,
			&(struct target_options){ p.force_hf, p.target_layers, p.g.seq_length }, e))
		goto out;
	path = stage_path(o, &p, e);
	if (!path || stage_make(path, &p, &t, &c, &so, &made, e))
		goto out;
	log_debug("'%s': %s", path, made.reused ? "fits, nothing was written" : "staged");
	rc = append(&run, path, &p, &made, e);
out:
	free(path);
	free(ranks);
	target_release(&t);
	checkpoint_release(&c);
	plan_release(&p);
	run_release(&run);
	return rc;
}

int main(int argc, char **argv)
{
	struct options o = { .form = STAGE_REFERENCE };
	struct err e = ERR_INIT;
	struct cli cli;

	cli_begin(&cli, "dspark-load", usage);
	if (!parse(&cli, &o, argc, argv, &e) && !cli.done)
		load(&o, &e);
	return cli_end(&cli, &e);
}
