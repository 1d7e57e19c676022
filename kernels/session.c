/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank, step by step. Everything that can be refused is refused before the cache is opened;
 * what is opened is released in reverse by session_end, wherever a step failed.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "cache_view.h"
#include "exchange.h"
#include "file.h"
#include "json.h"
#include "mem.h"
#include "session.h"

/* ---- records --------------------------------------------------------------------------------- */

static void put_record(struct session_output *o, json_t *rec)
{
	if (o->out) {
		if (!o->err.code && (record_write(o->out, rec, &o->err) || fflush(o->out)))
			err_errno(&o->err, "cannot write standard output");
	} else {
		json_line(&o->kept, rec);
		text_add(&o->kept, "\n");
	}
	json_decref(rec);
}

static int gather_records(struct comm *c, const struct run *run, struct session_output *o,
			  struct err *e)
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
		bool bad = false;

		if (run_copy(stdout, run, e))
			goto out;
		for (int r = 0; r < c->world; r++)
			bad = bad || (len[r] && fwrite(out[r], 1, len[r], stdout) != len[r]);
		if (bad || fflush(stdout)) {
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

bool session_has_peers(const struct session *s)
{
	return s->comm.t && s->comm.world > 1 && s->comm.t->collective;
}

/* What the recipe's dist_env.backend says; NULL = nothing. */
static const char *recipe_backend(const struct plan *p)
{
	const json_t *env = json_object_get(p->recipe, "dist_env");

	return json_string_value(json_object_get(env, "backend"));
}

/*
 * auto connects by NCCL what has to exchange memory of GPUs, unless the recipe names another way.
 * Ranks of one plan must come to the same end here.
 */
static bool wants_nccl(const struct session *s, bool planned)
{
	const char *backend = planned ? recipe_backend(&s->plan) : NULL;

	if (strcmp(s->o->comm, "auto"))
		return !strcmp(s->o->comm, "nccl");
	return planned && comm_has_nccl() && s->o->rank < 0 && s->plan.world > 1 &&
	       !strcmp(s->plan.device, "cuda") && plan_lockstep(&s->plan) &&
	       !(backend && (!strcmp(backend, "gloo") || !strcmp(backend, "mpi")));
}

/* From here on a signal ends waiting for other ranks. */
static int connect_ranks(struct session *s, bool planned, int *argc, char ***argv, struct err *e)
{
	int rc;

	s->nccl = wants_nccl(s, planned);
	watchdog_enter(&s->dog, "connecting the ranks");
	rc = comm_open(&s->comm, s->nccl ? "nccl" : s->o->comm, (int)s->o->rank, argc, argv, e);
	watchdog_leave(&s->dog);
	s->comm.stop = &forward_stop;
	return rc;
}

/* A file is read by every rank; of connected ranks only rank 0 has a standard input. */
static int read_run(struct session *s, struct err *e)
{
	struct text line = TEXT_INIT;
	uint64_t len = 0;
	char *buf = NULL;
	int rc = -1;

	if (!session_has_peers(s) || (s->o->run && strcmp(s->o->run, "-")))
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

static int read_plan(struct session *s, struct err *e)
{
	return read_run(s, e) || plan_read(&s->plan, &s->run, e) ? -1 : 0;
}

/* Told ranks, of whom each has read the plan: it says where they can meet. */
static int join_nccl(struct session *s, struct err *e)
{
	char *dir;
	int rc;

	if (strcmp(s->plan.device, "cuda"))
		return err_refuse(e,
				  "--comm nccl connects GPUs, but the plan is for device '%s': use "
				  "--comm auto or mpi, or plan with --device cuda",
				  s->plan.device);
	if (s->comm.world == 1)
		return 0;
	dir = plan_path(&s->plan, s->plan.cache_dir, e);
	s->comm.timeout = s->plan.timeout_minutes * 60;
	s->comm.dog = &s->dog;
	rc = dir ? comm_connect_nccl(&s->comm, dir, s->plan.digest, e) : -1;
	free(dir);
	if (!plan_lockstep(&s->plan))
		s->comm.timeout = 0; /* others may have hours to go */
	return rc;
}

static int check_world(struct session *s, struct err *e)
{
	struct comm *c = &s->comm;

	if (s->o->rank >= 0 && !c->t->collective)
		c->world = s->plan.world;
	if (c->world != s->plan.world) {
		char alone[64] = "";

		if (!plan_lockstep(&s->plan))
			snprintf(alone, sizeof alone, ", run each with --rank 0..%d",
				 s->plan.world - 1);
		return err_refuse(e,
				  "the plan is for %d ranks, but %d run: start it as `mpirun -n %d "
				  "dspark-forward`%s, or plan again with --world %d",
				  s->plan.world, c->world, s->plan.world, alone, c->world);
	}
	if (c->rank >= c->world)
		return err_refuse(e, "--rank %d is outside the plan's %d ranks", c->rank, c->world);
	log_rank(c->rank, c->world);
	if (s->nccl && join_nccl(s, e))
		return -1;
	if (!s->nccl && !c->t->collective && c->world > 1 && wants_nccl(s, true))
		return err_refuse(e, "NCCL connects these ranks, but only where each reads the run "
				     "from a file: give RUN");
	if (plan_lockstep(&s->plan) && comm_connected(c, e))
		return err_context(e, "the plan has weights %s and ep_size %d",
				   residency_name(s->plan.residency), s->plan.ep);
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

/* What memory is made for: a plan that says less than its own rules would be overrun. */
static int check_sizes(const struct session *s, struct err *e)
{
	const struct plan *p = &s->plan;
	struct stage_mesh m = stage_mesh(p);
	struct routing most;
	int64_t longest = 1;
	int shares;

	if (stage_shares(&m, &shares, e))
		return -1;
	for (int64_t i = 0; i < s->tokens.rows; i++)
		if (tokens_length(&s->tokens, i) > longest)
			longest = tokens_length(&s->tokens, i);
	routing_most(&s->target, &most);
	if (p->window_most < p->window_tokens || p->window_most < longest ||
	    p->chunk_most < p->chunk_tokens || p->chunk_most < longest ||
	    p->exchange_rows < exchange_rows(1, most.experts, most.k, p->ep))
		return err_refuse(e,
				  "%s: the plan's windows, chunks or rounds are smaller than its "
				  "rows need: run dspark-plan again",
				  s->run.name);
	return 0;
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
	rc = check_sizes(s, e) ? -1 : open_stage(s, e);
out:
	free(tokens);
	return rc;
}

/* A device with memory of its own: whether it has as much as was planned, before it is filled. */
static int check_device(struct session *s, struct err *e)
{
	uint64_t need = plan_rank_bytes(&s->plan) - DEVICE_OWN_BYTES, left, all;
	struct text want = TEXT_INIT, have = TEXT_INIT, most = TEXT_INIT;
	int rc;

	if (s->dev.be->host_memory)
		return 0;
	if (s->plan.spill)
		return err_refuse(e,
				  "%s: the plan's windows lie in files, which device '%s' does not "
				  "reach: run dspark-plan again",
				  s->run.name, s->plan.device);
	if (s->dev.be->room(&s->dev, &left, &all, e))
		return -1;
	if (need <= left)
		return 0;
	text_bytes(&want, (double)need);
	text_bytes(&have, (double)left);
	text_bytes(&most, (double)all);
	rc = need > all ? err_refuse(e,
				     "the plan needs %s of the device beside what CUDA takes, but "
				     "the device has %s: plan again with --memory %lluM, or more "
				     "ranks",
				     want.s, most.s, (unsigned long long)(all >> 20))
			: err_fail(e,
				   "the plan needs %s of the device beside what CUDA takes, but %s "
				   "of its %s are free: wait until others have ended, or plan "
				   "again with --memory %lluM",
				   want.s, have.s, most.s,
				   (unsigned long long)((left + DEVICE_OWN_BYTES) >> 20));
	text_release(&want);
	text_release(&have);
	text_release(&most);
	return rc;
}

static int open_device(struct session *s, struct err *e)
{
	struct device_options d = { s->plan.compute, 0, s->comm.local_rank, s->comm.local_size };
	struct weights_options w = { .residency = s->plan.residency,
				     .keep = s->plan.keep,
				     .mesh = stage_mesh(&s->plan),
				     .rank = s->comm.rank,
				     .rows = &s->rows,
				     .experts = &s->experts };

	if (backend_open(&s->dev, s->plan.device, &d, e) || check_device(s, e))
		return -1;
	return weights_open(&s->weights, &s->target, &s->stage, &s->dev, &w, e);
}

static int start_dog(struct session *s, struct err *e)
{
	if (s->dog.started || !plan_lockstep(&s->plan))
		return 0;
	return watchdog_start(&s->dog, s->plan.timeout_minutes * 60, file_abort_all, e);
}

/* Ranks that depend on each other give up one that is silent for too long. */
static int bound_waiting(struct session *s, struct err *e)
{
	double seconds = s->plan.timeout_minutes * 60;

	if (!plan_lockstep(&s->plan))
		return 0;
	s->comm.timeout = seconds;
	s->comm.dog = &s->dog;
	s->cache.lock.patience = (struct cache_patience){ seconds, &forward_stop };
	return start_dog(s, e);
}

/*
 * Every rank must hold the same plan and stage, before what the plan says is done together; told
 * ranks see to it by the lock and the stage's key.
 */
static int agree(struct session *s, struct err *e)
{
	int64_t most[2], least[2];

	if (!session_has_peers(s))
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

static int open_groups(struct session *s, struct err *e)
{
	struct stage_mesh m = stage_mesh(&s->plan);
	struct comm *c = &s->comm;
	int n = stage_members(&m, SHARD_ROWS), same = stage_members(&m, SHARD_EXPERT);

	if (!plan_lockstep(&s->plan))
		return 0;
	if (n > 1 && c->t->split(c, &s->rows, c->rank / n, c->rank, e))
		return -1;
	if (same > 1 &&
	    c->t->split(c, &s->experts, c->rank / n * m.ep + c->rank % m.ep, c->rank, e))
		return -1;
	return m.ep > 1 ? c->t->split(c, &s->ep, c->rank / m.ep, c->rank, e) : 0;
}

static int read_rows(void *ctx, int which, int64_t row0, int64_t n, float *buf, struct err *e)
{
	return weights_rows(ctx, which ? UNIT_EXPORT : UNIT_EMBED, row0, n, buf, e);
}

/*
 * A plan leaves out what was published when it was made. If that has gone since, no rank would
 * make it again, however often this run is started.
 */
static int check_cover(const struct session *s, const char *dir, struct err *e)
{
	int64_t shards = geometry_shards(&s->plan.g), count;
	bool *gone = mem_calloc((size_t)shards, sizeof *gone, e);
	struct text list = TEXT_INIT;
	int rc = gone ? 0 : -1;

	for (int64_t n = 0; gone && n < shards; n++)
		gone[n] = !s->done[n];
	for (int r = 0; gone && r < s->plan.world; r++)
		for (int i = 0; i < s->plan.range[r].nintervals; i++)
			for (int64_t n = s->plan.range[r].shards[i][0];
			     n < s->plan.range[r].shards[i][1]; n++)
				gone[n] = false;
	count = gone ? cache_intervals(&list, gone, shards) : 0;
	if (count)
		rc = err_refuse(e,
				"'%s' has lost what was published when the plan was made, shard%s "
				"%s: run dspark-plan again",
				dir, count == 1 ? "" : "s", list.s ? list.s : "?");
	text_release(&list);
	free(gone);
	return rc;
}

static void put_shard(void *ctx, json_t *rec)
{
	put_record(&((struct session *)ctx)->output, rec);
}

/* A rank with rows to do begins them while its capture writes target_weights. */
static int write_target_weights(void *ctx, struct err *e)
{
	struct session *s = ctx;
	struct cache_weights w = { read_rows, &s->weights };

	return cache_open_weights(&s->cache, &w, e);
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
	    cache_done(dir, &s->plan.g, s->plan.identity.digest, s->done, &count, e) ||
	    check_cover(s, dir, e))
		goto out;
	for (int i = 0; i < r->nintervals; i++)
		for (int64_t n = r->shards[i][0]; n < r->shards[i][1]; n++)
			s->left += !s->done[n];
	rc = cache_open(&s->cache, dir, &s->plan.g, &s->plan.identity, s->plan.digest, s->comm.rank,
			s->left > 0, s->left ? NULL : &w, e);
out:
	free(dir);
	return rc;
}

/*
 * How long each part was at work, beside the others. What a device does not tell is as long as the
 * forward had nothing else to do.
 */
static json_t *busy_json(struct session *s, double compute)
{
	struct device_times t = { .compute = compute };
	double gathering;

	weights_times(&s->weights, &t.upload, &gathering);
	if (s->dev.be->times)
		s->dev.be->times(&s->dev, &t);
	return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f}", "compute", t.compute, "upload", t.upload,
			 "gather", gathering, "exchange", s->forward.exchanging,
			 "download", t.download, "writer", s->capture.busy);
}

static void summarise(struct session *s)
{
	const struct forward *f = &s->forward;
	const struct capture *c = &s->capture;
	double compute = f->seconds - f->acquiring - f->exchanging - c->waited;
	struct rusage usage;

	getrusage(RUSAGE_SELF, &usage);
	put_record(&s->output, json_pack("{s:s, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, "
		"s:{s:f, s:f, s:f, s:f, s:f, s:f, s:f}, s:o, s:{s:I, s:I}, s:{s:s, s:i, s:s}}",
		"record", "summary", "rank", s->comm.rank, "rows", (json_int_t)f->rows,
		"tokens", (json_int_t)f->tokens_done,
		"windows", (json_int_t)f->windows, "shards", (json_int_t)c->shards,
		"bytes", (json_int_t)c->bytes,
		"weights_read", (json_int_t)weights_read(&s->weights),
		"seconds", log_seconds() - s->start,
		"tokens_per_second", f->seconds > 0 ? (double)f->tokens_done / f->seconds : 0.0,
		"time", "start", f->began > 0 ? f->began - s->start : 0.0,
		"weights", f->acquiring, "exchange", f->exchanging,
		"compute", compute > 0 ? compute : 0.0,
		"waiting_for_device", f->waiting,
		"waiting_for_writer", c->waited, "writer", c->busy,
		"busy", busy_json(s, compute > 0 ? compute : 0.0),
		"memory", "weights", (json_int_t)s->weights.most,
		"peak", (json_int_t)usage.ru_maxrss * 1024,
		"device", "backend", s->dev.be->name, "threads", s->dev.threads,
		"compute_dtype", dtype_recipe_name(s->dev.compute)));
	if (f->rows)
		log_info("%lld rows, %lld tokens in %.1f s (%.0f tokens/s), %lld shards published",
			 (long long)f->rows, (long long)f->tokens_done, f->seconds,
			 f->seconds > 0 ? (double)f->tokens_done / f->seconds : 0.0,
			 (long long)c->shards);
	else
		log_info("%s", plan_lockstep(&s->plan)
				       ? "no rows of its own to do"
				       : "nothing to do: every shard of this rank is published");
}

static int compute(struct session *s, struct err *e)
{
	bool lockstep = plan_lockstep(&s->plan);
	int rc;

	s->capture = (struct capture){ .cache = &s->cache,
				       .tokens = &s->tokens,
				       .ids = s->plan.ids,
				       .nonfinite = s->o->nonfinite,
				       .begin = write_target_weights,
				       .published = put_shard,
				       .ctx = s,
				       .spill = s->plan.spill,
				       .dev = &s->dev };
	s->forward = (struct forward){ .plan = &s->plan,
				       .range = &s->plan.range[s->comm.rank],
				       .tokens = &s->tokens,
				       .target = &s->target,
				       .dev = &s->dev,
				       .weights = &s->weights,
				       .capture = &s->capture,
				       .progress = s->o->progress,
				       .world = lockstep ? &s->comm : NULL,
				       .ep = s->ep.t ? &s->ep : NULL };
	if (s->left || lockstep) {
		if (s->left && capture_open(&s->capture, s->plan.window_most, e))
			return -1;
		rc = forward_run(&s->forward, s->done, e);
		if ((s->left && capture_close(&s->capture, e)) || rc)
			return -1;
	}
	summarise(s);
	return 0;
}

/* A rank that ends with an error ends the others: not before all of them are done. */
static int report(struct session *s, struct err *e)
{
	if (!session_has_peers(s))
		return 0;
	return gather_records(&s->comm, &s->run, &s->output, e) ? -1
								: s->comm.t->barrier(&s->comm, e);
}

static int judge(const struct session *s, struct err *e)
{
	if (!s->capture.quarantined)
		return 0;
	return err_refuse(e,
			  "%lld shards hold states that are not finite; they are kept as *.bad, "
			  "the others are published",
			  (long long)s->capture.quarantined);
}

static int publish(struct session *s, struct err *e)
{
	int rc;

	if (!session_has_peers(s)) {
		s->output.out = stdout;
		if (run_copy(stdout, &s->run, &s->output.err) || fflush(stdout))
			err_errno(&s->output.err, "cannot write standard output");
	}
	rc = compute(s, e);
	cache_close(&s->cache);
	if (!rc && !report(s, e))
		judge(s, e);
	if (s->output.err.code && !e->code)
		*e = s->output.err;
	return e->code ? -1 : 0;
}

int session_run(struct session *s, const struct session_options *o, int *argc, char ***argv,
		struct err *e)
{
	bool file = o->run && strcmp(o->run, "-"), planned;
	struct err connecting = ERR_INIT;

	s->o = o;
	s->start = log_seconds();
	/*
	 * A file tells in time for how long ranks may wait for each other. Who cannot read it is
	 * connected all the same: its failure ends the others.
	 */
	planned = file && !read_plan(s, e);
	if (planned)
		start_dog(s, e);
	if (connect_ranks(s, planned, argc, argv, &connecting) && !e->code)
		*e = connecting;
	if (s->nccl && !file && s->comm.world > 1)
		err_usage(e, "ranks that NCCL connects each read the run: give RUN, a file");
	if (e->code || (!file && read_plan(s, e)) || check_world(s, e) || open_inputs(s, e) ||
	    bound_waiting(s, e) || agree(s, e) || open_groups(s, e) || open_device(s, e) ||
	    open_cache(s, e))
		return -1;
	return publish(s, e);
}

void session_end(struct session *s, int code)
{
	struct comm *group[] = { &s->ep, &s->experts, &s->rows };

	capture_abort(&s->capture);
	/* it may be the lock that this rank waited for, and others wait for its end */
	if (code && s->cache.lock.patience.seconds > 0)
		s->cache.lock.patience.seconds = 0.001;
	cache_close(&s->cache);
	/* before memory goes that transfers under way may still write to */
	if (code && session_has_peers(s))
		s->comm.t->abort(&s->comm, code);
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
	for (size_t i = 0; i < sizeof group / sizeof *group; i++)
		if (group[i]->t)
			group[i]->t->close(group[i]);
	if (s->comm.t)
		s->comm.t->close(&s->comm);
	watchdog_stop(&s->dog);
	*s = (struct session)SESSION_INIT;
}
