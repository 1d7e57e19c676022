/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What choosing keys is worth: the first layer of a target whose queries see index_topk keys each,
 * beside the same layer with an index_topk as large as the row, so that they see all. Both run the
 * model's own code on one row of data and take turns.
 *
 * Of the verbs that dominate long rows a part runs, and the whole is reckoned from it: of
 * attention some heads, which are alike; of choose and attention_at, which come TOKEN_TILE queries
 * at a time, tiles evenly over the row. Their seconds are multiplied by all arithmetic / arithmetic
 * that ran.
 *
 * Multiplications for each key up to the query: the indexer ih id (GLM-5.2: 32 x 128 = 4,096),
 * attention heads (nope + rope + value) (64 x 512 = 32,768); for each chosen key heads (2 latent +
 * rope) (64 x 1,088 = 69,632). With 8 heads instead of 64 the indexer alone multiplies as often as
 * attention over all keys, and nothing can be won: targets hold where it does half of that at most.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "log.h"
#include "mem.h"
#include "rig.h"

#define TILES 8	    /* of choose and attention_at that run, where there are so many */
#define WHOLE 4096  /* tokens of a row up to which all heads run; of longer ones fewer */
#define EVEN  16384 /* from so many tokens on choosing must pay */
#define HALF  32768 /* and take 0.6 of the time at most */

/* ---- a device that does a part of the work --------------------------------------------------- */

enum part { CHOOSE, ATTENTION, REST, PARTS };

static struct {
	const struct backend *be;
	int64_t every, part;  /* of so many tiles one runs; of so many heads one */
	int heads;	      /* of attention */
	int64_t index, each;  /* multiplications for a key: of the indexer, of attention over all */
	double seconds[PARTS], all[PARTS], ran[PARTS]; /* of what ran; arithmetic */
	bool counts;		     /* what attention_at is given: */
	int64_t queries, keys, most; /* most keys of a query */
} some;

static void account(enum part part, double all, double ran, double start)
{
	some.all[part] += all;
	some.ran[part] += ran;
	some.seconds[part] += log_seconds() - start;
}

static bool runs(const struct piece *p)
{
	return p->first / TOKEN_TILE % some.every == some.every / 2;
}

/* Keys up to their own of n queries from position `first` on, `most` where there are more. */
static double keys_of(int64_t first, int64_t n, int64_t most)
{
	double sum = 0;

	for (int64_t i = first + 1; i <= first + n; i++)
		sum += (double)(i < most ? i : most);
	return sum;
}

/* Queries that see all their keys need no scores. */
static double choose_work(int64_t take, const struct piece *p)
{
	int64_t skip = take - p->first;

	skip = skip < 0 ? 0 : skip < p->count ? skip : p->count;
	return keys_of(p->first + skip, p->count - skip, INT64_MAX);
}

static void some_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
			struct tensor w, const struct piece *pieces, int n)
{
	some.index = q.cols;
	for (const struct piece *p = pieces; p < pieces + n; p++) {
		double start = log_seconds(), work = choose_work(keys.cols, p);

		if (runs(p))
			some.be->choose(d, keys, q, k, w, p, 1);
		account(CHOOSE, work, runs(p) ? work : 0, start);
	}
}

static void count_keys(struct tensor keys, const struct piece *p)
{
	for (int64_t t = p->begin; t < p->begin + p->count; t++) {
		const int32_t *key = (const int32_t *)keys.p + t * keys.ld;
		int64_t n = 0;

		for (int64_t i = 0; i < keys.cols; i++)
			n += key[i] >= 0;
		some.queries++;
		some.keys += n;
		some.most = n > some.most ? n : some.most;
	}
}

static void some_attention_at(struct device *d, struct tensor out, struct tensor q, struct tensor k,
			      struct tensor v, struct tensor keys, const struct attention *a,
			      const struct piece *pieces, int n)
{
	some.heads = a->heads;
	for (const struct piece *p = pieces; p < pieces + n; p++) {
		double work = keys_of(p->first, p->count, keys.cols), start;

		if (runs(p) && some.counts)
			count_keys(keys, p);
		start = log_seconds();
		if (runs(p))
			some.be->attention_at(d, out, q, k, v, keys, a, p, 1);
		account(ATTENTION, work, runs(p) ? work : 0, start);
	}
}

static void some_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
			   struct tensor v, const struct attention *a, const struct piece *pieces,
			   int n)
{
	struct attention few = *a;
	double start = log_seconds();

	some.heads = a->heads;
	some.each = (int64_t)a->heads * (a->width + a->value_width);
	few.kv_heads = a->kv_heads / (int)some.part > 1 ? a->kv_heads / (int)some.part : 1;
	few.heads = few.kv_heads * (a->heads / a->kv_heads);
	some.be->attention(d, out, q, k, v, &few, pieces, n);
	account(ATTENTION, a->heads, few.heads, start);
}

static struct backend some_backend(const struct backend *be, int64_t length)
{
	struct backend b = *be;
	int64_t tiles = (length + TOKEN_TILE - 1) / TOKEN_TILE;

	memset(&some, 0, sizeof some);
	some.be = be;
	some.every = tiles > TILES ? tiles / TILES : 1;
	some.part = length > WHOLE ? length / WHOLE : 1;
	b.name = "some";
	b.choose = some_choose;
	b.attention_at = some_attention_at;
	b.attention = some_attention;
	return b;
}

/* ---- a layer on a row ------------------------------------------------------------------------ */

/* Choosing, or not. */
struct side {
	struct rig rig;
	struct rig_options o;
	struct chunk chunk;
	double seconds[PARTS][PAIRS_MOST], total[PAIRS_MOST];
	struct {
		int64_t most;
		double mean;
	} keys;
};

struct match {
	struct side side[2];
	struct piece row;
	struct backend be;
	int64_t index, each; /* as in `some` */
	void *ids, *pos, *scratch, *carry[CARRY_MAX];
};

static uint64_t measure_layer(const struct side *s)
{
	struct device d = { .be = &backend_measure, .compute = s->o.compute };
	struct target t = s->rig.target;
	struct chunk c = s->chunk;

	c.dev = &d;
	t.model->layer(&t, 0, &c);
	return c.scratch.peak;
}

static void *room(struct match *m, size_t bytes, struct err *e)
{
	struct device *d = &m->side[0].rig.dev;

	return d->be->alloc(d, bytes, e);
}

static int upload_row(struct match *m, struct err *e)
{
	struct side *s = &m->side[0];
	struct device *d = &s->rig.dev;
	int64_t n = s->o.length;
	int32_t *host = mem_calloc((size_t)n, sizeof *host, e);

	if (!host)
		return -1;
	for (int64_t i = 0; i < n; i++)
		host[i] = (int32_t)(i * 7919 % s->rig.target.vocab);
	d->be->upload(d, (struct tensor){ m->ids, DT_I32, n, 1, 1 }, host);
	for (int64_t i = 0; i < n; i++)
		host[i] = (int32_t)i;
	d->be->upload(d, (struct tensor){ m->pos, DT_I32, n, 1, 1 }, host);
	free(host);
	return d->be->sync(d, e);
}

/* The side that chooses has all carry; the other shares it but for what it never looks at. */
static int side_open(struct match *m, struct side *s, int64_t topk, const struct rig_options *o,
		     struct err *e)
{
	struct target *t = &s->rig.target;
	struct routing r;

	s->o = *o;
	s->o.layers = 1;
	s->o.topk = topk;
	if (rig_open(&s->rig, &s->o, e) || rig_fill(&s->rig, e))
		return -1;
	if (t->model->routed && t->model->routed(t, 0, &r))
		return err_refuse(e, "layer 0 of '%s' has routed experts", o->config);
	for (int i = 0; i < t->ncarry && !topk; i++) {
		m->carry[i] = room(m, carry_bytes(&t->carry[i], o->length, o->compute), e);
		if (!m->carry[i])
			return -1;
	}
	s->chunk = (struct chunk){
		.dev = &s->rig.dev,
		.tokens = o->length,
		.keys = o->length,
		.npieces = 1,
		.piece = &m->row,
		.ids = { m->ids, DT_I32, o->length, 1, 1 },
		.pos = { m->pos, DT_I32, o->length, 1, 1 },
	};
	for (int i = 0; i < t->ncarry; i++)
		s->chunk.carry[i] = carry_view(&t->carry[i], topk && i ? NULL : m->carry[i], 0,
					       o->length, o->compute);
	return 0;
}

static int match_open(struct match *m, const struct rig_options *o, struct err *e)
{
	size_t bytes = (size_t)o->length * sizeof(int32_t);
	uint64_t most = 0;

	m->row = (struct piece){ 0, o->length, 0, o->length, 0, o->length };
	for (int i = 0; i < 2; i++)
		if (side_open(m, &m->side[i], i ? o->length : 0, o, e))
			return -1;
	m->ids = room(m, bytes, e);
	m->pos = m->ids ? room(m, bytes, e) : NULL;
	if (!m->pos || upload_row(m, e))
		return -1;
	for (int i = 0; i < 2; i++) {
		uint64_t need = measure_layer(&m->side[i]);

		most = need > most ? need : most;
	}
	m->scratch = room(m, most, e);
	for (int i = 0; i < 2; i++) {
		m->side[i].chunk.ids.p = m->ids;
		m->side[i].chunk.pos.p = m->pos;
		m->side[i].chunk.scratch = (struct arena){ m->scratch, most, 0, 0 };
	}
	return m->scratch ? 0 : -1;
}

static void match_release(struct match *m)
{
	struct device *d = &m->side[0].rig.dev;

	if (d->be) {
		for (int i = 0; i < CARRY_MAX; i++)
			d->be->free(d, m->carry[i]);
		d->be->free(d, m->ids);
		d->be->free(d, m->pos);
		d->be->free(d, m->scratch);
	}
	for (int i = 0; i < 2; i++)
		rig_release(&m->side[i].rig);
}

/* Pass -1 does not count, but counts keys. */
static int run_side(struct match *m, struct side *s, int pass, struct err *e)
{
	struct target *t = &s->rig.target;
	struct device *d = &s->rig.dev;
	const struct backend *be = d->be;
	int at = pass < 0 ? 0 : pass;
	double start, total;

	t->model->embed(t, &s->chunk);
	m->be = some_backend(be, s->o.length);
	some.counts = pass < 0;
	d->be = &m->be;
	start = log_seconds();
	t->model->layer(t, 0, &s->chunk);
	total = log_seconds() - start;
	d->be = be;
	s->chunk.scratch.used = 0;
	total -= some.seconds[CHOOSE] + some.seconds[ATTENTION];
	s->total[at] = s->seconds[REST][at] = total;
	for (int part = 0; part < REST; part++) {
		double all = some.ran[part] > 0 ? some.all[part] / some.ran[part] : 1;

		s->seconds[part][at] = some.seconds[part] * all;
		s->total[at] += s->seconds[part][at];
	}
	m->index = some.index ? some.index : m->index;
	m->each = some.each ? some.each : m->each;
	if (some.queries) {
		s->keys.most = some.most;
		s->keys.mean = (double)some.keys / (double)some.queries;
	}
	return be->sync(d, e);
}

/* ---- what comes out -------------------------------------------------------------------------- */

static json_t *side_json(struct side *s, int pairs)
{
	json_t *x = json_pack("{s:f, s:f, s:f, s:f}", "seconds", rig_median(s->total, pairs),
			      "choose", rig_median(s->seconds[CHOOSE], pairs), "attention",
			      rig_median(s->seconds[ATTENTION], pairs), "rest",
			      rig_median(s->seconds[REST], pairs));

	if (s->keys.most)
		json_object_update_new(x, json_pack("{s:I, s:f}", "most_keys",
						    (json_int_t)s->keys.most, "mean_keys",
						    s->keys.mean));
	return x;
}

static void print_side(const char *name, const json_t *x)
{
	static const char *const keys[] = { "seconds", "choose", "attention", "rest", "mean_keys" };

	printf("  %-7s", name);
	for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
		if (json_object_get(x, keys[i]))
			printf(" %s %.4g", keys[i], json_number_value(json_object_get(x, keys[i])));
	printf("\n");
}

static void report(struct match *m, const struct rig_options *o)
{
	const char *dtype = dtype_recipe_name(o->compute);
	bool pays = o->length >= EVEN && 2 * m->index <= m->each;
	double ratio[PAIRS_MOST];
	json_t *more, *chosen, *all;
	int n = (int)o->repeats;
	char name[96];

	for (int i = 0; i < n; i++)
		ratio[i] = m->side[0].total[i] / m->side[1].total[i];
	chosen = side_json(&m->side[0], n);
	all = side_json(&m->side[1], n);
	if (o->table) {
		print_side("chosen", chosen);
		print_side("all", all);
	}
	more = json_pack("{s:s, s:I, s:i, s:i, s:i, s:o, s:o}", "dtype", dtype, "length",
			 (json_int_t)o->length, "heads", some.heads, "threads",
			 m->side[0].rig.dev.threads, "pairs", n, "chosen", chosen, "all", all);
	snprintf(name, sizeof name, "%s, %d heads, S = %lld: chosen keys / all", dtype, some.heads,
		 (long long)o->length);
	rig_result(o, "sparse", name, rig_median(ratio, n), "ratio",
		   pays ? BOUND_AT_MOST : BOUND_NONE, o->length >= HALF ? 0.6 : 1,
		   more);
}

int sparse(const struct rig_options *o, struct err *e)
{
	struct match *m = mem_calloc(1, sizeof *m, e);
	int rc = -1;

	if (!m || match_open(m, o, e))
		goto out;
	for (int i = -1; i < o->repeats; i++) /* the first pair makes what later ones find */
		for (int k = 0; k < 2; k++)
			if (run_side(m, &m->side[(i + 1 + k) % 2], i, e))
				goto out;
	report(m, o);
	rc = 0;
out:
	if (m)
		match_release(m);
	free(m);
	return rc;
}
