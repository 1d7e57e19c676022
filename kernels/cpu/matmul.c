/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products as tiles of TILE rows by one panel of the weight. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <omp.h>
#include <string.h>

#include "cpu.h"
#include "number.h"

void cpu_operand_row(const struct packed *w, void *dst, const void *src, enum dtype from, int64_t n)
{
	size_t size = dtype_size(w->operand);

	if (w->operand == w->rounded || from == w->rounded) {
		if (from == DT_F32)
			run_save(dst, w->operand, src, n);
		else if (w->operand == DT_F32)
			run_load(dst, src, from, n);
		else
			dtype_convert(dst, w->operand, src, from, (size_t)n);
	} else if (from == DT_F64) {
		for (int64_t i = 0; i < n; i++) {
			uint16_t h;

			dtype_convert(&h, DT_BF16, (const double *)src + i, DT_F64, 1);
			((float *)dst)[i] = dtype_bf16_to_f32(h);
		}
	} else {
		run_load(dst, src, from, n);
		run_round(dst, w->rounded, n);
	}
	memset((char *)dst + (size_t)n * size, 0, (size_t)(w->K - n) * size);
}

static size_t sums_bytes(const struct packed *w, int64_t tile)
{
	return whole_lines((size_t)(tile * w->width) * sizeof(float));
}

size_t cpu_bench_bytes(const struct packed *w, int64_t tile)
{
	return sums_bytes(w, tile) + whole_lines(w->expanded) + whole_lines(w->scratch);
}

struct bench cpu_bench(const struct packed *w, int64_t tile, char *p)
{
	return (struct bench){
		.sums = (float *)p,
		.expanded = p + sums_bytes(w, tile),
		.scratch = p + sums_bytes(w, tile) + whole_lines(w->expanded),
	};
}

int cpu_tile(const struct packed *w, enum tile_kind kind, int64_t index, int64_t panel,
	     const void *rows, struct bench *b, struct err *e)
{
	const struct product *x = panel == w->panels - 1 ? w->last_tile[kind] : w->tile[kind];
	const char *data =
		w->data + (size_t)index * w->matrix_bytes + (size_t)panel * w->panel_bytes;

	if (w->expanded) {
		if (b->holds != data)
			run_load((float *)b->expanded, data, w->kept,
				 (int64_t)(x->packed_bytes / sizeof(float)));
		b->holds = data;
		data = b->expanded;
	}
	return onednn_run(x, b->sums, rows, data, b->scratch, e);
}

struct job {
	struct device *d;
	struct tensor out, x;
	const struct weight *w, *bias;
	bool add;
	int64_t whole;		/* leading tiles that are operands as they lie in x */
};

/* Rows of tile t start here: in x, or in the shared room, which holds the tiles from `base` on. */
static char *tile_rows(const struct job *j, int64_t t, int64_t base)
{
	const struct packed *w = packed_of(j->w);
	int64_t row = t < j->whole ? t : t - base;
	char *p = t < j->whole ? j->x.p : cpu_of(j->d)->shared.p;

	return p + (size_t)(row * TILE * w->K) * dtype_size(w->operand);
}

static void prepare_row(const struct job *j, int64_t row, int64_t base)
{
	const struct packed *w = packed_of(j->w);
	size_t pitch = (size_t)w->K * dtype_size(w->operand);
	char *dst = tile_rows(j, row / TILE, base) + (size_t)(row % TILE) * pitch;

	if (row < j->x.rows)
		cpu_operand_row(w, dst, ref_at(j->x, row, 0), j->x.dtype, j->x.cols);
	else
		memset(dst, 0, pitch);
}

/* out[rows of the tile, columns of the panel] from the sums, plus bias, plus what is there. */
static void finish(const struct job *j, int64_t tile, int64_t panel, struct bench *b)
{
	const struct packed *w = packed_of(j->w);
	int64_t c0 = panel * w->width, pitch = cpu_panel_width(w, panel);
	int64_t n = j->w->rows - c0 < pitch ? j->w->rows - c0 : pitch;
	const float *bias = j->bias ? ref_vector(j->bias) + c0 : NULL;
	float old[PANEL_MOST];

	for (int64_t row = tile * TILE; row < (tile + 1) * TILE && row < j->out.rows; row++) {
		float *sums = b->sums + (row % TILE) * pitch;
		void *out = ref_at(j->out, row, c0);

		for (int64_t i = 0; bias && i < n; i++)
			sums[i] += bias[i];
		if (j->add)
			run_load(old, out, j->out.dtype, n);
		for (int64_t i = 0; j->add && i < n; i++)
			sums[i] += old[i];
		run_save(out, j->out.dtype, sums, n);
	}
}

/*
 * Tiles [first, first + n): rows that are no operands yet are made so, then all tiles meet all
 * panels.
 */
static void run(const struct job *j, int64_t first, int64_t n)
{
	const struct packed *w = packed_of(j->w);
	int64_t base = first > j->whole ? first : j->whole;

#pragma omp parallel num_threads(j->d->threads)
	{
		struct bench b = cpu_bench(w, TILE, cpu_of(j->d)->own[omp_get_thread_num()].p);
		struct err e = ERR_INIT;

#pragma omp for schedule(static)
		for (int64_t row = base * TILE; row < (first + n) * TILE; row++)
			prepare_row(j, row, base);
#pragma omp for schedule(dynamic)
		for (int64_t task = 0; task < n * w->panels; task++) {
			int64_t panel = task / n, tile = first + task % n;

			if (e.code ||
			    cpu_tile(w, TILE_ROWS, 0, panel, tile_rows(j, tile, base), &b, &e))
				continue;
			finish(j, tile, panel, &b);
		}
		if (e.code)
			cpu_fail(j->d, &e);
	}
}

void cpu_matmul(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		const struct weight *bias, bool add)
{
	const struct packed *p = packed_of(w);
	struct job j = { .d = d, .out = out, .x = x, .w = w, .bias = bias, .add = add };
	int64_t tiles = (x.rows + TILE - 1) / TILE,
		group = (4 * d->threads + p->panels - 1) / p->panels;

	if (!ref_good(d) || !x.rows)
		return;
	if (x.dtype == p->operand && p->operand == p->rounded && x.cols == p->K && x.ld == p->K) {
		j.whole = x.rows / TILE;
		group = tiles;
	}
	if (!cpu_own(d, cpu_bench_bytes(p, TILE)) ||
	    !cpu_shared(
		    d, (size_t)((group < tiles - j.whole ? group : tiles - j.whole) * TILE * p->K) *
			       dtype_size(p->operand)))
		return;
	for (int64_t first = 0; first < tiles && ref_good(d); first += group)
		run(&j, first, tiles - first < group ? tiles - first : group);
}
