/* SPDX-License-Identifier: Apache-2.0 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "log.h"
#include "mem.h"
#include "parallel.h"
#include "rig.h"
#include "text.h"

#define CONFIG_BYTES (16u << 20)
#define SLICE        (4 << 20) /* numbers that one thread makes and packs at a time */
#define SAMPLE       0.03      /* seconds of one side of a pair, at least */

/* ---- the target ------------------------------------------------------------------------------ */

/* Fewer layers than the config says; their types are cut to the same length. */
static void cut_layers(json_t *config, int64_t layers)
{
	json_t *types = json_object_get(config, "layer_types");

	json_object_set_new(config, "num_hidden_layers", json_integer(layers));
	while (json_array_size(types) > (size_t)layers)
		json_array_remove(types, json_array_size(types) - 1);
}

int rig_open(struct rig *r, const struct rig_options *o, struct err *e)
{
	struct target_options to = { .seq_length = o->length };
	struct device_options po = { o->compute, (int)o->threads, 0, 1 };
	json_t *config = json_read(o->config, CONFIG_BYTES, e);
	int rc;

	memset(r, 0, sizeof *r);
	r->o = o;
	if (!config)
		return -1;
	if (o->layers)
		cut_layers(config, o->layers);
	if (o->topk)
		json_object_set_new(config, "index_topk", json_integer(o->topk));
	rc = target_open(&r->target, o->config, config, &to, e) ||
	     backend_open(&r->dev, o->backend, &po, e);
	json_decref(config);
	return rc ? -1 : 0;
}

void rig_release(struct rig *r)
{
	for (size_t i = 0; i < r->n; i++)
		r->dev.be->weight_free(&r->dev, r->held[i]);
	free(r->held);
	for (int i = 0; i < NOISES; i++)
		free(r->noise[i].p);
	if (r->dev.be)
		r->dev.be->close(&r->dev);
	target_release(&r->target);
	memset(r, 0, sizeof *r);
}

/* ---- weights --------------------------------------------------------------------------------- */

void rig_noise(uint16_t *bf16, int64_t n, float mean, float deviation, uint64_t seed)
{
	uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u;
	float half = deviation * 1.7320508f;

	for (int64_t i = 0; i < n; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		bf16[i] = dtype_f32_to_bf16(mean + half * (float)(int32_t)(x >> 32) * 0x1p-31f);
	}
}

static int hold(struct rig *r, struct weight *w, struct err *e)
{
	if (mem_grow(&r->held, &r->cap, r->n + 1, sizeof *r->held, e) ||
	    r->dev.be->weight_alloc(&r->dev, w, e))
		return -1;
	r->held[r->n++] = w;
	r->weight_bytes += (int64_t)weight_bytes(w, r->dev.compute);
	return 0;
}

int rig_weight(struct rig *r, struct weight *w, const uint16_t *numbers, struct err *e)
{
	w->stored = DT_BF16;
	if (r->dev.be->weight_alloc(&r->dev, w, e))
		return -1;
	for (int64_t i = 0; i < w->count; i++)
		if (r->dev.be->weight_fill(&r->dev, w, i, 0, w->rows, numbers, DT_BF16, NULL, e))
			return -1;
	return r->dev.be->weight_ready(&r->dev, w, e);
}

/*
 * The numbers of weights of this mean and deviation: the same for each slice, so that filling is
 * all that takes time.
 */
static const uint16_t *numbers(struct rig *r, float mean, float deviation, struct err *e)
{
	struct noise *n = r->noise;

	while (n < r->noise + NOISES && n->p && (n->mean != mean || n->deviation != deviation))
		n++;
	if (n == r->noise + NOISES) {
		err_fail(e, "weights of more than %d kinds", NOISES);
		return NULL;
	}
	if (!n->p) {
		*n = (struct noise){ mean, deviation, mem_aligned(SLICE * sizeof *n->p, e) };
		if (n->p)
			rig_noise(n->p, SLICE, mean, deviation, (uint64_t)(n - r->noise));
	}
	return n->p;
}

/* Slices of whole rows of a weight. */
struct filler {
	struct rig *r;
	struct weight *w;
	const uint16_t *p;
	int64_t rows, slices; /* of a slice; of a matrix */
};

static int fill_slice(void *ctx, int64_t i, struct err *e)
{
	struct filler *f = ctx;
	int64_t row0 = i % f->slices * f->rows, left = f->w->rows - row0;

	return f->r->dev.be->weight_fill(&f->r->dev, f->w, i / f->slices, row0,
					 left < f->rows ? left : f->rows, f->p, DT_BF16, NULL, e);
}

static int fill_random(struct rig *r, struct weight *w, const uint16_t *p, struct err *e)
{
	struct filler f = { r, w, p, SLICE / w->cols, 0 };

	f.slices = (w->rows + f.rows - 1) / f.rows;
	return parallel_each(w->count * f.slices, r->dev.threads, fill_slice, &f, e);
}

struct loader {
	struct weight_walk walk; /* first */
	struct rig *r;
};

static float deviation(const struct weight *w)
{
	return w->use == USE_VECTOR ? 0.1f : w->use == USE_TABLE ? 1 : 1 / sqrtf((float)w->cols);
}

static int load(struct weight_walk *walk, const struct weight_spec *s, struct err *e)
{
	struct rig *r = ((struct loader *)walk)->r;
	struct weight *w = s->field;
	const uint16_t *p;
	double start;

	*w = (struct weight){ .count = s->count,
			      .rows = s->rows,
			      .cols = s->cols,
			      .use = s->use,
			      .unit = s->kind,
			      .stored = s->data ? s->data_dtype : DT_BF16 };
	if (s->unit == UNIT_EXPORT)
		return 0;
	if (s->kind == WEIGHT_RAW && !s->data)
		return err_refuse(e, "'%s' is a table of integers, which cannot be random",
				  s->part[0].name);
	if (s->cols > SLICE)
		return err_refuse(e, "'%s' has rows of %lld numbers", s->part[0].name,
				  (long long)s->cols);
	p = numbers(r, w->use == USE_VECTOR ? 1 : 0, deviation(w), e);
	if (!p)
		return -1;
	start = log_seconds();
	if (hold(r, w, e) ||
	    (s->data ? r->dev.be->weight_fill(&r->dev, w, 0, 0, w->rows, s->data, s->data_dtype,
					      NULL, e)
		     : fill_random(r, w, p, e)) ||
	    r->dev.be->weight_ready(&r->dev, w, e))
		return -1;
	r->filling += log_seconds() - start;
	return 0;
}

int rig_fill(struct rig *r, struct err *e)
{
	struct loader l = { { load }, r };

	return r->target.model->weights(&r->target, &l.walk, e);
}

/* ---- measuring ------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double rig_median(double *x, int n)
{
	qsort(x, (size_t)n, sizeof *x, ascending);
	return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* Seconds of one call, over n of them. */
static int clock_calls(int (*call)(void *, struct err *), void *ctx, int n, double *seconds,
		       struct err *e)
{
	double start = log_seconds();

	for (int i = 0; i < n; i++)
		if (call(ctx, e))
			return -1;
	*seconds = (log_seconds() - start) / n;
	return 0;
}

int contest_run(const struct contest *c, int pairs, struct outcome *o, struct err *e)
{
	double side[2][PAIRS_MOST], ratio[PAIRS_MOST], once[2];
	int (*const call[2])(void *, struct err *) = { c->ours, c->theirs };
	int calls[2];

	/* the first call may make what later ones find: the second tells how many fill a sample */
	for (int k = 0; k < 4; k++)
		if (clock_calls(call[k % 2], c->ctx, 1, &once[k % 2], e))
			return -1;
	for (int k = 0; k < 2; k++)
		calls[k] = once[k] > SAMPLE ? 1 : (int)(SAMPLE / (once[k] + 1e-9)) + 1;
	for (int i = 0; i < pairs; i++) {
		for (int k = 0; k < 2; k++) {
			int who = (i + k) % 2;

			if (clock_calls(call[who], c->ctx, calls[who], &side[who][i], e))
				return -1;
		}
		ratio[i] = side[1][i] / side[0][i];
	}
	o->ours = rig_median(side[0], pairs);
	o->theirs = rig_median(side[1], pairs);
	o->ratio = rig_median(ratio, pairs);
	o->least = ratio[0];
	o->most = ratio[pairs - 1];
	return 0;
}

/* ---- results --------------------------------------------------------------------------------- */

void rig_result(const struct rig_options *o, const char *part, const char *name, double value,
		const char *unit, enum bound bound, double target, json_t *more)
{
	static const char *const words[] = { "none", "at least", "at most" };
	bool holds = bound == BOUND_NONE ||
		     (bound == BOUND_AT_LEAST ? value >= target : value <= target);
	struct text line = TEXT_INIT;
	json_t *rec;

	if (o->table) {
		printf("%-9s %-44s %10.4g %-8s", part, name, value, unit);
		if (bound != BOUND_NONE)
			printf(" %s %.4g: %s", words[bound], target, holds ? "holds" : "MISSED");
		printf("\n");
		json_decref(more);
		return;
	}
	rec = json_pack("{s:s, s:s, s:f, s:s}", "part", part, "name", name, "value", value, "unit",
			unit);
	if (bound != BOUND_NONE) {
		json_object_set_new(rec, "bound", json_string(words[bound]));
		json_object_set_new(rec, "target", json_real(target));
		json_object_set_new(rec, "holds", json_boolean(holds));
	}
	if (more)
		json_object_update(rec, more);
	json_decref(more);
	json_line(&line, rec);
	json_decref(rec);
	puts(line.s ? line.s : "");
	text_release(&line);
}
