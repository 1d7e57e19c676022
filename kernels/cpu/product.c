/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of two tensors: y's panels of all groups are packed first, then tiles of x's rows meet
 * them, a group's panels one after the other, so that a thread makes its rows operands once.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <omp.h>
#include <string.h>

#include "cpu.h"
#include "number.h"
#include "operand.h"

#define ROWS       128
#define PANEL_COLS 256 /* most columns of a panel */
#define PAD        32

struct job {
	struct device *d;
	struct tensor out, x, y;
	const struct grouped *g;
	const struct product *product;
	int64_t panels, width; /* of a group; columns of a panel, the last filled up with zeros */
};

/* A thread's memory. */
struct desk {
	char *rows; /* [ROWS, K] of x, or a plain panel */
	char *sums; /* [ROWS, width] of the product's result */
	char *scratch;
};

static char *panel_at(const struct job *j, int64_t group, int64_t panel)
{
	return cpu_of(j->d)->shared.p +
	       (size_t)(group * j->panels + panel) * j->product->packed_bytes;
}

static size_t desk_at(const struct job *j, char *p, struct desk *w)
{
	const struct product *x = j->product;
	int64_t high = x->N > ROWS ? x->N : ROWS;
	size_t rows = whole_lines((size_t)(high * x->K) * dtype_size(x->operand)),
	       sums = whole_lines((size_t)(ROWS * x->N) * dtype_size(x->result));

	if (p)
		*w = (struct desk){ p, p + rows, p + rows + sums };
	return rows + sums + whole_lines(x->scratch_bytes);
}

/* y as [N, K], or across as [K, N], zeros around. */
static int pack_one(const struct job *j, int64_t group, int64_t panel, const struct desk *w,
		    struct err *e)
{
	const struct product *x = j->product;
	int64_t first = panel * j->width, y0 = group * j->g->y_step, left = j->g->n - first,
		n = left < j->width ? left : j->width, rows = j->g->across ? j->g->k : n,
		high = j->g->across ? x->K : x->N, wide = j->g->across ? x->N : x->K;
	size_t pitch = (size_t)wide * dtype_size(x->operand);

	for (int64_t i = 0; i < rows; i++) {
		const char *src = j->g->across ? ref_at(j->y, i, y0 + first)
					       : ref_at(j->y, first + i, y0);

		operand_row(w->rows + (size_t)i * pitch, x->operand, j->d->compute, src, j->y.dtype,
			    j->g->across ? n : j->g->k, wide);
	}
	memset(w->rows + (size_t)rows * pitch, 0, (size_t)(high - rows) * pitch);
	return onednn_pack(x, panel_at(j, group, panel), w->rows, w->scratch, e);
}

static void load_tile(const struct job *j, int64_t group, int64_t t0, const struct desk *w)
{
	const struct product *x = j->product;
	size_t pitch = (size_t)x->K * dtype_size(x->operand);

	for (int64_t r = 0; r < ROWS; r++)
		if (t0 + r < j->out.rows)
			operand_row(w->rows + (size_t)r * pitch, x->operand, j->d->compute,
				    ref_at(j->x, t0 + r, group * j->g->x_step), j->x.dtype,
				    j->g->k, x->K);
		else
			memset(w->rows + (size_t)r * pitch, 0, pitch);
}

/* Columns [first, first + n) of a group: large results need not be read before they are written. */
static void save(const struct job *j, int64_t group, int64_t t0, int64_t first, int64_t n,
		 const char *sums)
{
	enum dtype from = j->product->result, to = j->out.dtype;
	size_t pitch = (size_t)j->product->N * dtype_size(from);

	for (int64_t r = 0; r < ROWS && t0 + r < j->out.rows; r++, sums += pitch) {
		void *dst = ref_at(j->out, t0 + r, group * j->g->out_step + first);

		if (from == to)
			run_stream(dst, sums, (size_t)n * dtype_size(to));
		else
			run_convert(dst, to, sums, from, n);
	}
	run_stream_end();
}

static int one_tile(const struct job *j, int64_t group, int64_t t0, const struct desk *w,
		    struct call *c, struct err *e)
{
	load_tile(j, group, t0, w);
	for (int64_t panel = 0; panel < j->panels; panel++) {
		int64_t first = panel * j->width, left = j->g->n - first,
			n = left < j->width ? left : j->width;

		if (onednn_run(c, w->sums, w->rows, panel_at(j, group, panel), w->scratch, e))
			return -1;
		save(j, group, t0, first, n, w->sums);
	}
	return 0;
}

static void run(const struct job *j)
{
	int64_t tiles = (j->out.rows + ROWS - 1) / ROWS;

#pragma omp parallel num_threads(j->d->threads)
	{
		struct err e = ERR_INIT;
		struct call c = { 0 };
		struct desk w = { 0 };

		desk_at(j, cpu_of(j->d)->own[omp_get_thread_num()].p, &w);
		onednn_begin(&c, j->product, &e);
#pragma omp for schedule(static)
		for (int64_t i = 0; i < j->g->groups * j->panels; i++)
			if (!e.code)
				pack_one(j, i / j->panels, i % j->panels, &w, &e);
#pragma omp for schedule(dynamic)
		for (int64_t i = 0; i < j->g->groups * tiles; i++)
			if (!e.code)
				one_tile(j, i / tiles, i % tiles * ROWS, &w, &c, &e);
		onednn_end(&c);
		if (e.code)
			cpu_fail(j->d, &e);
	}
}

void cpu_product(struct device *d, struct tensor out, struct tensor x, struct tensor y,
		 const struct grouped *g)
{
	struct job j = { .d = d, .out = out, .x = x, .y = y, .g = g };
	struct product want = { .operand = operand_of(d),
				.result = operand_of(d) == out.dtype ? out.dtype : DT_F32,
				.M = ROWS,
				.K = round_up(g->k, PAD),
				.ld = round_up(g->k, PAD),
				.order = g->across ? ORDER_KN : ORDER_NK };

	if (!ref_good(d) || !out.rows)
		return;
	j.panels = (g->n + PANEL_COLS - 1) / PANEL_COLS;
	j.width = round_up((g->n + j.panels - 1) / j.panels, PAD);
	want.N = j.width;
	j.product = onednn_product(cpu_of(d)->dnn, &want, &d->err);
	if (j.product && cpu_own(d, desk_at(&j, NULL, NULL)) &&
	    cpu_shared(d, (size_t)(g->groups * j.panels) * j.product->packed_bytes))
		run(&j);
}
