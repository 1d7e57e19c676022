/* SPDX-License-Identifier: Apache-2.0 */
/* dspark-forward: runs one rank of a staged plan and publishes its shards. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cli.h"
#include "err.h"
#include "file.h"
#include "forward.h"
#include "json.h"
#include "kernels.h"
#include "log.h"
#include "mem.h"
#include "text.h"
#include "tokens.h"

static const char usage[] =
"usage: dspark-forward [-s STAGE] [--rank R] [--comm auto|self|mpi|nccl] [--progress auto|bar|line|json]\n"
"                      [--nonfinite stop|quarantine] [RUN]\n"
"\n"
"Runs the target over this rank's rows and writes the cache. RUN is the output of dspark-load; - or none is standard input.\n"
"\n"
"  -s, --stage STAGE     take the weights from this stage instead of the one the run names\n"
"      --rank R          run rank R of the plan, without talking to the others\n"
"      --comm HOW        how ranks are connected; auto finds torchrun, MPI launchers and Slurm\n"
"      --progress STYLE  auto (a bar on a terminal, else a line a minute), bar, line or json\n"
"      --nonfinite HOW   at a state that is NaN or infinite: stop (default), or set its shard aside and go on\n"
"  -h, --help            show this help\n"
"  -V, --version         show the version\n"
"  -q, --quiet           only errors\n"
"  -v, --verbose         say more\n";

enum { OPT_RANK = 256, OPT_COMM, OPT_PROGRESS, OPT_NONFINITE };

static const struct option longopts[] = {
	{ "stage", required_argument, NULL, 's' },
	{ "rank", required_argument, NULL, OPT_RANK },
	{ "comm", required_argument, NULL, OPT_COMM },
	{ "progress", required_argument, NULL, OPT_PROGRESS },
	{ "nonfinite", required_argument, NULL, OPT_NONFINITE },
	CLI_COMMON_LONG
};

static const char *const comms[] = { "auto", "self", "mpi", "nccl", NULL };
static const char *const nonfinites[] = { "stop", "quarantine", NULL };

struct options {
	const char *stage, *run, *comm;
	int64_t rank;
	enum progress_style progress;
	enum nonfinite nonfinite;
};

static int parse(struct cli *cli, struct options *o, int argc, char **argv, struct err *e)
{
	int ch, choice;

	while ((ch = getopt_long(argc, argv, "s:" CLI_COMMON_SHORT, longopts, NULL)) != -1) {
		int rc = 0;

		switch (ch) {
		case 's':
			o->stage = optarg;
			break;
		case OPT_RANK:
			rc = cli_int("--rank", optarg, 0, 1 << 20, &o->rank, e);
			break;
		case OPT_COMM:
			rc = cli_choice("--comm", optarg, comms, &choice, e);
			o->comm = rc ? o->comm : comms[choice];
			break;
		case OPT_PROGRESS:
			if (progress_style(optarg, &o->progress))
				rc = err_usage(
					e, "--progress '%s' is not one of auto, bar, line, json",
					optarg);
			break;
		case OPT_NONFINITE:
			rc = cli_choice("--nonfinite", optarg, nonfinites, &choice, e);
			o->nonfinite = !rc && choice ? NONFINITE_QUARANTINE : NONFINITE_STOP;
			break;
		default:
			rc = cli_common(cli, ch, argv, e);
		}
		if (rc || cli->done)
			return rc;
	}
	o->run = argv[optind];
	if (o->run && argv[optind + 1])
		return err_usage(e, "unexpected operand '%s': give one run", argv[optind + 1]);
	return 0;
}

/* The first signal ends the run at the next chunk of a layer, the second at once. */
static void on_signal(int sig)
{
	(void)sig;
	if (forward_stop) {
		file_abort_all();
		_exit(EXIT_FAILED);
	}
	forward_stop = 1;
}

static void arm_signals(void)
{
	static const int ends[] = { SIGINT, SIGTERM, SIGHUP };
	struct sigaction old, act = { .sa_handler = on_signal, .sa_flags = SA_RESTART };

	for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
		if (!sigaction(ends[i], NULL, &old) && old.sa_handler != SIG_IGN)
			sigaction(ends[i], &act, NULL);
	signal(SIGPIPE, SIG_IGN);
}

/* ---- records --------------------------------------------------------------------------------- */

/* Records go out as they come, or are kept until rank 0 can gather them. */
struct output {
	FILE *out;			/* NULL: keep */
	struct text kept;
	struct err err;		/* the first failed write; published shards do not depend on it */
};

static void put_record(void *ctx, json_t *rec)
{
	struct output *o = ctx;

	if (o->out) {
		if (!o->err.code && (record_write(o->out, rec, &o->err) || fflush(o->out)))
			err_errno(&o->err, "cannot write standard output");
	} else {
		json_line(&o->kept, rec);
		text_add(&o->kept, "\n");
	}
	json_decref(rec);
}

static int gather_records(struct comm *c, const struct run *run, struct output *o, struct err *e)
{
	char **out = NULL;
	uint64_t *len = NULL;
	int rc = -1;

	if (c->rank == 0) {
		out = mem_calloc((size_t)c->world, sizeof *out, e);
		len = mem_calloc((size_t)c->world, sizeof *len, e);
		if (!out || !len)
			goto out;
	}
	if (text_ok(&o->kept, e) || c->t->gather(c, o->kept.s, o->kept.len, 0, out, len, e))
		goto out;
	if (c->rank == 0) {
		if (run_copy(stdout, run, e))
			goto out;
		for (int r = 0; r < c->world; r++)
			if (len[r] && fwrite(out[r], 1, len[r], stdout) != len[r]) {
				err_errno(e, "cannot write standard output");
				goto out;
			}
	}
	rc = 0;
out:
	for (int r = 0; out && r < c->world; r++)
		free(out[r]);
	free(out);
	free(len);
	return rc;
}

/* ---- one rank -------------------------------------------------------------------------------- */

struct session {
	const struct options *o;
	struct comm comm;
	struct run run;
	struct plan plan;
	struct target target;
	struct tokens tokens;
	struct stage stage;
	struct device dev;
	struct weights weights;
	struct cache cache;
	struct capture capture;
	struct forward forward;
	struct output output;
	bool *done;			/* [shards] */
	int64_t left;			/* shards of this rank still to do */
	double start;
};

static bool connected(const struct session *s)
{
	return s->comm.world > 1 && s->comm.t->collective;
}

/* A file is read by every rank; of connected ranks only rank 0 has a standard input. */
static int read_run(struct session *s, struct err *e)
{
	struct text line = TEXT_INIT;
	uint64_t len = 0;
	char *buf = NULL;
	int rc = -1;

	if (!connected(s) || (s->o->run && strcmp(s->o->run, "-")))
		return run_read(&s->run, s->o->run, e);
	if (s->comm.rank == 0) {
		if (run_read(&s->run, s->o->run, e))
			goto out;
		for (size_t i = 0; i < s->run.n; i++) {
			json_line(&line, s->run.record[i]);
			text_add(&line, "\n");
		}
		if (text_ok(&line, e))
			goto out;
		len = line.len;
	}
	if (s->comm.t->bcast(&s->comm, &len, sizeof len, 0, e))
		goto out;
	buf = s->comm.rank ? mem_calloc(len + 1, 1, e) : line.s;
	if ((len && !buf) || s->comm.t->bcast(&s->comm, buf, len, 0, e))
		goto out;
	rc = s->comm.rank ? run_parse(&s->run, buf, len, "standard input of rank 0", e) : 0;
out:
	if (s->comm.rank)
		free(buf);
	text_release(&line);
	return rc;
}

static int check_world(struct session *s, struct err *e)
{
	struct comm *c = &s->comm;

	if (s->o->rank >= 0 && !c->t->collective)
		c->world = s->plan.world;
	if (c->world != s->plan.world)
		return err_refuse(e,
				  "the plan is for %d ranks, but %d run: start it as `mpirun -n %d "
				  "dspark-forward`, run each with --rank 0..%d, or plan "
				  "again with --world %d",
				  s->plan.world, c->world, s->plan.world, s->plan.world - 1,
				  c->world);
	if (c->rank >= c->world)
		return err_refuse(e, "--rank %d is outside the plan's %d ranks", c->rank, c->world);
	if (s->plan.sharded && c->world > 1 && !c->t->collective)
		return err_refuse(e, "this target is shared between the ranks, which must be "
				     "connected: start it under mpirun");
	log_rank(c->rank, c->world);
	return 0;
}

static int open_stage(struct session *s, struct err *e)
{
	const json_t *rec = run_last(&s->run, "stage");
	const char *dir = s->o->stage;
	char *path;
	int rc;

	if (!dir && !rec)
		return err_refuse(e, "%s: no stage record: run dspark-load first, or give -s STAGE",
				  s->run.name);
	if (!dir && json_str(rec, "the stage record", "path", &dir, e))
		return -1;
	path = s->o->stage ? mem_strdup(dir, e) : plan_path(&s->plan, dir, e);
	rc = path ? stage_open(&s->stage, path, s->plan.stage_key, s->comm.rank, e) : -1;
	free(path);
	return rc;
}

static int open_inputs(struct session *s, struct err *e)
{
	struct target_options to = { s->plan.force_hf, s->plan.target_layers,
				     s->plan.g.seq_length };
	char *tokens = plan_path(&s->plan, s->plan.tokens, e);
	const char *want;
	int rc = -1;

	if (!tokens || target_open(&s->target, s->plan.target_dir, s->plan.config, &to, e) ||
	    tokens_open(&s->tokens, tokens, e) ||
	    json_str(s->plan.identity.json, "the plan's identity", "rows_xxh3_128", &want, e))
		goto out;
	if (strcmp(want, s->tokens.rows_xxh3) || s->tokens.rows != s->plan.g.rows) {
		err_refuse(e, "'%s' is not the tokens file that was planned: run dspark-plan again",
			   tokens);
		goto out;
	}
	rc = open_stage(s, e);
out:
	free(tokens);
	return rc;
}

static int open_device(struct session *s, struct err *e)
{
	struct device_options d = { s->plan.compute, 0, s->comm.local_rank, s->comm.local_size };

	if (backend_open(&s->dev, s->plan.device, &d, e))
		return -1;
	return weights_open(&s->weights, &s->target, &s->stage, &s->dev, e);
}

static int read_rows(void *ctx, int which, int64_t row0, int64_t n, float *buf, struct err *e)
{
	return weights_rows(ctx, which ? UNIT_EXPORT : UNIT_EMBED, row0, n, buf, e);
}

static int open_cache(struct session *s, struct err *e)
{
	struct cache_weights w = { read_rows, &s->weights };
	const struct plan_range *r = &s->plan.range[s->comm.rank];
	char *dir = plan_path(&s->plan, s->plan.cache_dir, e);
	int64_t count;
	int rc = -1;

	s->done = mem_calloc((size_t)geometry_shards(&s->plan.g), sizeof *s->done, e);
	if (!dir || !s->done ||
	    cache_done(dir, &s->plan.g, s->plan.identity.digest, s->done, &count, e))
		goto out;
	for (int i = 0; i < r->nintervals; i++)
		for (int64_t n = r->shards[i][0]; n < r->shards[i][1]; n++)
			s->left += !s->done[n];
	rc = cache_open(&s->cache, dir, &s->plan.g, &s->plan.identity, s->plan.digest, s->comm.rank,
			s->left > 0, &w, e);
out:
	free(dir);
	return rc;
}

/*
 * Every rank must hold the same plan and stage; told ranks see to it by the lock and the stage's
 * key.
 */
static int agree(struct session *s, struct err *e)
{
	int64_t most[2], least[2];

	if (!connected(s))
		return 0;
	for (int i = 0; i < 2; i++) {
		char hex[16] = "";

		memcpy(hex, i ? s->stage.key : s->plan.digest, 15);	/* 60 bits of the digest */
		most[i] = least[i] = strtoll(hex, NULL, 16);
	}
	if (s->comm.t->allreduce(&s->comm, most, 2, COMM_MAX, e) ||
	    s->comm.t->allreduce(&s->comm, least, 2, COMM_MIN, e))
		return -1;
	if (most[0] != least[0] || most[1] != least[1])
		return err_refuse(e, "the ranks read different %s: give all of them the same run",
				  most[0] != least[0] ? "plans" : "stages");
	return 0;
}

static void summarise(struct session *s)
{
	const struct forward *f = &s->forward;
	const struct capture *c = &s->capture;
	double compute = f->seconds - f->acquiring - c->waited;
	struct rusage usage;

	getrusage(RUSAGE_SELF, &usage);
	put_record(&s->output, json_pack("{s:s, s:i, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:{s:f, "
		"s:f, s:f, s:f}, s:{s:I, s:I}, s:{s:s, s:i, s:s}}",
		"record", "summary", "rank", s->comm.rank, "rows", (json_int_t)f->rows,
		"tokens", (json_int_t)f->tokens_done,
		"windows", (json_int_t)f->windows, "shards", (json_int_t)c->shards,
		"bytes", (json_int_t)c->bytes,
		"seconds", log_seconds() - s->start,
		"tokens_per_second", f->seconds > 0 ? (double)f->tokens_done / f->seconds : 0.0,
		"time", "weights", f->acquiring, "compute", compute > 0 ? compute : 0.0,
		"waiting_for_writer", c->waited, "writer", c->busy,
		"memory", "weights", (json_int_t)s->weights.bytes,
		"peak", (json_int_t)usage.ru_maxrss * 1024,
		"device", "backend", s->dev.be->name, "threads", s->dev.threads,
		"compute_dtype", dtype_recipe_name(s->dev.compute)));
	if (f->rows)
		log_info("%lld rows, %lld tokens in %.1f s (%.0f tokens/s), %lld shards published",
			 (long long)f->rows, (long long)f->tokens_done, f->seconds,
			 f->seconds > 0 ? (double)f->tokens_done / f->seconds : 0.0,
			 (long long)c->shards);
	else
		log_info("nothing to do: every shard of this rank is published");
}

static int compute(struct session *s, struct err *e)
{
	int rc;

	s->capture = (struct capture){ .cache = &s->cache,
				       .tokens = &s->tokens,
				       .ids = s->plan.ids,
				       .nonfinite = s->o->nonfinite,
				       .published = put_record,
				       .ctx = &s->output };
	s->forward = (struct forward){ .plan = &s->plan,
				       .range = &s->plan.range[s->comm.rank],
				       .tokens = &s->tokens,
				       .target = &s->target,
				       .dev = &s->dev,
				       .weights = &s->weights,
				       .capture = &s->capture,
				       .progress = s->o->progress };
	if (s->left) {
		if (capture_open(&s->capture, s->plan.window_most, e))
			return -1;
		rc = forward_run(&s->forward, s->done, e);
		if (capture_close(&s->capture, e) || rc)
			return -1;
	}
	summarise(s);
	if (s->capture.quarantined)
		return err_refuse(e,
				  "%lld shards hold states that are not finite; they are kept as "
				  "*.bad, the others are published",
				  (long long)s->capture.quarantined);
	return 0;
}

static int work(struct session *s, int *argc, char ***argv, struct err *e)
{
	int rc;

	if (comm_open(&s->comm, s->o->comm, (int)s->o->rank, 0, true, argc, argv, e) ||
	    read_run(s, e) || plan_read(&s->plan, &s->run, e) || check_world(s, e) ||
	    open_inputs(s, e) || open_device(s, e) || agree(s, e) || open_cache(s, e))
		return -1;
	if (!connected(s)) {
		s->output.out = stdout;
		if (run_copy(stdout, &s->run, &s->output.err) || fflush(stdout))
			err_errno(&s->output.err, "cannot write standard output");
	}
	rc = compute(s, e);
	cache_close(&s->cache);
	if (s->output.err.code && !e->code)
		*e = s->output.err;
	if (rc || !connected(s))
		return rc;
	return gather_records(&s->comm, &s->run, &s->output, e);
}

static void session_release(struct session *s)
{
	capture_abort(&s->capture);
	cache_close(&s->cache);
	if (s->dev.be) {
		weights_release(&s->weights);
		s->dev.be->close(&s->dev);
	}
	stage_release(&s->stage);
	tokens_release(&s->tokens);
	target_release(&s->target);
	plan_release(&s->plan);
	run_release(&s->run);
	text_release(&s->output.kept);
	free(s->done);
}

int main(int argc, char **argv)
{
	struct options o = { .comm = "auto", .rank = -1 };
	struct session s = {
		.o = &o, .tokens = TOKENS_INIT, .cache = CACHE_INIT, .start = log_seconds()
	};
	struct err e = ERR_INIT;
	struct cli cli;

	cli_begin(&cli, "dspark-forward", usage);
	if (!parse(&cli, &o, argc, argv, &e) && !cli.done) {
		arm_signals();
		work(&s, &argc, &argv, &e);
		session_release(&s);
		if (e.code && s.comm.t && connected(&s)) {
			log_error("%s", e.text);
			s.comm.t->abort(&s.comm, e.code);
		}
		if (s.comm.t)
			s.comm.t->close(&s.comm);
	}
	return cli_end(&cli, &e);
}
