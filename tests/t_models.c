/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Models keep their contract: they never look into tensor memory, and they ask for no more scratch
 * than was planned. The ref backend runs behind a guard that makes all device memory unreadable
 * except while a verb runs; a model that peeks dies here.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cache.h"
#include "checkpoint.h"
#include "err.h"
#include "forward.h"
#include "kernels.h"
#include "layout.h"
#include "mem.h"
#include "recipe.h"
#include "model.h"
#include "stage.h"
#include "tap.h"
#include "tokens.h"

/* ---- the guard ------------------------------------------------------------------------------- */

#define REGIONS 64

static struct {
	void *p;
	size_t bytes;
} region[REGIONS];


static void protect(int how)
{
	for (int i = 0; i < REGIONS; i++)
		if (region[i].p)
			mprotect(region[i].p, region[i].bytes, how);
}

static void *guard_alloc(struct device *d, size_t bytes, struct err *e)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE), n = (bytes + page) / page * page;
	void *p = mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)d;
	for (int i = 0; i < REGIONS && p != MAP_FAILED; i++)
		if (!region[i].p) {
			region[i].p = p;
			region[i].bytes = n;
			return p;
		}
	err_fail(e, "no room for a guarded region");
	return NULL;
}

static void guard_free(struct device *d, void *p)
{
	(void)d;
	for (int i = 0; p && i < REGIONS; i++)
		if (region[i].p == p) {
			munmap(p, region[i].bytes);
			region[i].p = NULL;
		}
}

#define OPEN protect(PROT_READ | PROT_WRITE)
#define CLOSE protect(PROT_NONE)

static void guard_upload(struct device *d, struct tensor out, const void *src)
{
	OPEN;
	backend_ref.upload(d, out, src);
	CLOSE;
}

static void guard_store(struct device *d, void *dst, enum dtype to, int64_t ld, struct tensor x)
{
	OPEN;
	backend_ref.store(d, dst, to, ld, x);
	CLOSE;
}

static void guard_rows(struct device *d, struct tensor out, const struct weight *w,
		       struct tensor ids)
{
	OPEN;
	backend_ref.rows(d, out, w, ids);
	CLOSE;
}

static void guard_matmul(struct device *d, struct tensor out, struct tensor x,
			 const struct weight *w, const struct weight *bias, bool add)
{
	OPEN;
	backend_ref.matmul(d, out, x, w, bias, add);
	CLOSE;
}

static void guard_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		       float eps, int64_t width)
{
	OPEN;
	backend_ref.norm(d, out, x, w, eps, width);
	CLOSE;
}

static void guard_rope(struct device *d, struct tensor x, int heads, const struct weight *norm,
		       float eps, const struct rope *r, struct tensor pos)
{
	OPEN;
	backend_ref.rope(d, x, heads, norm, eps, r, pos);
	CLOSE;
}

static void guard_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
			    struct tensor v, const struct attention *a, const struct piece *pieces,
			    int n)
{
	OPEN;
	backend_ref.attention(d, out, q, k, v, a, pieces, n);
	CLOSE;
}

static void guard_layer_norm(struct device *d, struct tensor out, struct tensor x,
			     const struct weight *w, const struct weight *bias, float eps,
			     int64_t width)
{
	OPEN;
	backend_ref.layer_norm(d, out, x, w, bias, eps, width);
	CLOSE;
}

static void guard_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
			 struct tensor w, const struct piece *pieces, int n)
{
	OPEN;
	backend_ref.choose(d, keys, q, k, w, pieces, n);
	CLOSE;
}

static void guard_attention_at(struct device *d, struct tensor out, struct tensor q,
			       struct tensor k, struct tensor v, struct tensor keys,
			       const struct attention *a, const struct piece *pieces, int n)
{
	OPEN;
	backend_ref.attention_at(d, out, q, k, v, keys, a, pieces, n);
	CLOSE;
}

static void guard_product(struct device *d, struct tensor out, struct tensor x, struct tensor y,
			  const struct grouped *g)
{
	OPEN;
	backend_ref.product(d, out, x, y, g);
	CLOSE;
}

static void guard_copy(struct device *d, struct tensor out, int64_t out_step, struct tensor x,
		       int64_t x_step, int64_t width, int n)
{
	OPEN;
	backend_ref.copy(d, out, out_step, x, x_step, width, n);
	CLOSE;
}

static void guard_gate(struct device *d, struct tensor out, struct tensor x, const struct act *a)
{
	OPEN;
	backend_ref.gate(d, out, x, a);
	CLOSE;
}

static void guard_matmul_gate(struct device *d, struct tensor out, struct tensor x,
			      const struct weight *w, const struct act *a)
{
	OPEN;
	backend_ref.matmul_gate(d, out, x, w, a);
	CLOSE;
}

static void guard_add(struct device *d, struct tensor x, struct tensor y)
{
	OPEN;
	backend_ref.add(d, x, y);
	CLOSE;
}

static void guard_route(struct device *d, struct tensor ids, struct tensor weights,
			struct tensor logits, const struct router *r)
{
	OPEN;
	backend_ref.route(d, ids, weights, logits, r);
	CLOSE;
}

static void guard_experts(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
			  struct tensor weights, const struct experts *ex, bool add)
{
	OPEN;
	backend_ref.experts(d, sum, x, ids, weights, ex, add);
	CLOSE;
}

static void guard_pick(struct device *d, struct tensor out, struct tensor x, struct tensor index)
{
	OPEN;
	backend_ref.pick(d, out, x, index);
	CLOSE;
}

static void guard_combine(struct device *d, struct tensor sum, struct tensor y,
			  struct tensor index, struct tensor weights, bool add)
{
	OPEN;
	backend_ref.combine(d, sum, y, index, weights, add);
	CLOSE;
}

static struct backend guard(void)
{
	struct backend b = backend_ref;

	b.name = "guard";
	b.host_memory = false;
	b.alloc = guard_alloc;
	b.free = guard_free;
	b.upload = guard_upload;
	b.store = guard_store;
	b.rows = guard_rows;
	b.matmul = guard_matmul;
	b.norm = guard_norm;
	b.rope = guard_rope;
	b.attention = guard_attention;
	b.layer_norm = guard_layer_norm;
	b.choose = guard_choose;
	b.attention_at = guard_attention_at;
	b.product = guard_product;
	b.copy = guard_copy;
	b.gate = guard_gate;
	b.matmul_gate = guard_matmul_gate;
	b.add = guard_add;
	b.route = guard_route;
	b.experts = guard_experts;
	b.pick = guard_pick;
	b.combine = guard_combine;
	return b;
}

/*
 * A verb that neither backend table knows would slip past the guard: every member must be the
 * guard's or harmless by design.
 */
static void count_verbs(void)
{
	struct backend b = guard();
	const void *const *now = (const void *const *)&b, *const *then =
								  (const void *const *)&backend_ref;
	size_t same = 0;

	for (size_t i = 0; i < sizeof b / sizeof *now; i++)
		same += now[i] == then[i];
	is_int((int64_t)same, 12,
	       "all but open, close, sync, the four of weights and what ref has not are guarded");
}

/* ---- one case -------------------------------------------------------------------------------- */

struct world {
	struct recipe recipe;
	struct checkpoint checkpoint;
	struct target target;
	struct tokens tokens;
	struct plan plan;
	struct stage stage;
	struct device dev;
	struct weights weights;
	struct cache cache;
	struct capture capture;
	struct forward forward;
	bool *done;
};

static void drop_record(void *ctx, json_t *rec)
{
	++*(int *)ctx;
	json_decref(rec);
}

static int open_all(struct world *w, const char *out, enum dtype compute, enum residency r,
		    struct err *e)
{
	struct layout_options lo = {
		.device = "cpu", .weights = (int)r, .compute = compute, .window_tokens = 24
	};
	struct device_options po = { compute, 1, 0, 1 };
	struct target_options to = { 0 };
	struct stage_options so = { 0 };
	struct stage_made made;
	char *set = mem_printf(e, "recipe_args.cache_output_dir=%s/cache", out),
	     *dir = mem_printf(e, "%s/stage", out);
	int rc = -1;

	if (!set || !dir ||
	    recipe_read(&w->recipe, "recipe.yaml", (const char *const *)&set, 1, e) ||
	    checkpoint_open(&w->checkpoint, w->recipe.target_dir, false, e))
		goto out;
	to.force_hf = w->recipe.target_force_hf;
	if (target_open(&w->target, w->recipe.target_dir, w->checkpoint.config, &to, e) ||
	    tokens_open(&w->tokens, "tokens.safetensors", e) ||
	    layout_plan(&w->plan, &w->recipe, &w->target, &w->checkpoint, &w->tokens,
			"tokens.safetensors", "", &lo, e))
		goto out;
	if (r == WEIGHTS_STREAM)
		w->plan.block_experts = 1;	/* one is made while the one before computes */
	if (stage_make(dir, &w->plan, &w->target, &w->checkpoint, &so, &made, e) ||
	    stage_open(&w->stage, dir, w->plan.stage_key, 0, e) ||
	    backend_open(&w->dev, "ref", &po, e))
		goto out;
	rc = 0;
out:
	free(set);
	free(dir);
	return rc;
}

static int run_all(struct world *w, const struct backend *be, int *published, struct err *e)
{
	struct weights_options wo = { .residency = w->plan.residency,
				      .mesh = stage_mesh(&w->plan) };

	w->dev.be = be;
	w->dev.threads = 3;	/* the loader takes what ref leaves idle */
	w->done = mem_calloc((size_t)geometry_shards(&w->plan.g), sizeof *w->done, e);
	if (!w->done || weights_open(&w->weights, &w->target, &w->stage, &w->dev, &wo, e) ||
	    cache_open(&w->cache, w->plan.cache_dir, &w->plan.g, &w->plan.identity, w->plan.digest,
		       0, true, NULL, e))
		return -1;
	w->capture = (struct capture){ .cache = &w->cache,
				       .tokens = &w->tokens,
				       .ids = w->plan.ids,
				       .published = drop_record,
				       .ctx = published };
	w->forward = (struct forward){ .plan = &w->plan,
				       .range = w->plan.range,
				       .tokens = &w->tokens,
				       .target = &w->target,
				       .dev = &w->dev,
				       .weights = &w->weights,
				       .capture = &w->capture,
				       .progress = PROGRESS_NONE };
	if (capture_open(&w->capture, w->plan.window_most, e) ||
	    forward_run(&w->forward, w->done, e))
		return -1;
	return capture_close(&w->capture, e);
}

static void release_all(struct world *w)
{
	capture_abort(&w->capture);
	cache_close(&w->cache);
	if (w->dev.be) {
		weights_release(&w->weights);
		w->dev.be->close(&w->dev);
	}
	stage_release(&w->stage);
	tokens_release(&w->tokens);
	plan_release(&w->plan);
	target_release(&w->target);
	checkpoint_release(&w->checkpoint);
	recipe_release(&w->recipe);
	free(w->done);
}

static void one_case(const char *name, const char *out, enum dtype compute, enum residency r)
{
	struct world w = { .tokens = TOKENS_INIT, .cache = CACHE_INIT };
	struct backend be = guard();
	struct err e = ERR_INIT;
	int published = 0;

	if (!ok(!open_all(&w, out, compute, r, &e), "%s, %s, %s: opens", name,
		dtype_recipe_name(compute), residency_name(r)))
		printf("# %s\n", e.text);
	else if (!ok(!run_all(&w, &be, &published, &e), "%s, %s: runs behind the guard", name,
		     dtype_recipe_name(compute)))
		printf("# %s\n", e.text);
	else
		is_int(published, geometry_shards(&w.plan.g), "%s, %s: shards", name,
		       dtype_recipe_name(compute));
	release_all(&w);
}

static void on_fault(int sig)
{
	static const char text[] = "not ok - a model touched tensor memory outside a verb\n";

	(void)sig;
	(void)!write(STDOUT_FILENO, text, sizeof text - 1);
	_exit(1);
}

int main(void)
{
	static const char *const cases[] = { "qwen3-sliding-v5", "qwen3-untied-bias-yarn",
					     "qwen3moe-mixed-v5", "qwen3moe-norm",
					     "glm52-bf16", "glm5-halfsplit-groups",
					     "glm52-fp8" };
	const char *top = getenv("top_srcdir");
	char out[] = "/tmp/dspark-models.XXXXXX", path[4096];

	log_level(-1);
	signal(SIGSEGV, on_fault);
	count_verbs();
	if (!top || !mkdtemp(out))
		return 99;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
		for (int n = 0; n < 4; n++) {
			enum residency r = n / 2 ? WEIGHTS_STREAM : WEIGHTS_RESIDENT;
			char dir[64];

			snprintf(path, sizeof path, "%s/tests/data/golden/%s", top, cases[i]);
			snprintf(dir, sizeof dir, "%s/%zu%d", out, i, n);
			if (!ok(!chdir(path), "%s is there", cases[i]))
				continue;
			one_case(cases[i], dir, n % 2 ? DT_BF16 : DT_F32, r);
		}
	if (chdir("/") == 0) {
		snprintf(path, sizeof path, "rm -rf '%s'", out);
		if (system(path))
			return 99;
	}
	return tap_end();
}
