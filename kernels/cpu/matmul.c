/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products as groups of tiles of rows by one panel of the weight. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <omp.h>
#include <string.h>

#include "cpu.h"
#include "number.h"

/* `width` operands from n numbers, zeros behind them. */
static void operands(const struct packed *w, void *dst, const void *src, enum dtype from, int64_t n,
		     int64_t width)
{
	size_t size = dtype_size(w->operand);

	if (w->operand == w->rounded || from == w->rounded) {
		if (from == w->operand)
			memcpy(dst, src, (size_t)n * size);
		else if (from == DT_F32)
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
	memset((char *)dst + (size_t)n * size, 0, (size_t)(width - n) * size);
}

void cpu_operand_row(const struct packed *w, void *dst, const void *src, enum dtype from, int64_t n)
{
	operands(w, dst, src, from, n, w->K);
}

void cpu_tile_row(const struct packed *w, enum tile_kind kind, char *tile, int64_t row,
		  const void *src, enum dtype from, int64_t n)
{
	size_t size = dtype_size(w->operand);

	for (int64_t c = 0; c < w->K; c += w->block) {
		int64_t width = w->K - c < w->block ? w->K - c : w->block,
			m = n - c < width ? n - c : width;
		char *dst = tile + (size_t)(c * TILE_ROWS(kind) + row * width) * size;

		if (m > 0)
			operands(w, dst, (const char *)src + (size_t)c * dtype_size(from), from, m,
				 width);
		else
			memset(dst, 0, (size_t)width * size);
	}
}

void cpu_tile_columns(const struct packed *w, enum tile_kind kind, char *tile, int64_t row,
		      int64_t c0, const float *src, int64_t n)
{
	for (int64_t end = c0 + n; c0 < end;) {
		int64_t first = c0 / w->block * w->block, at = c0 - first,
			width = w->K - first < w->block ? w->K - first : w->block,
			m = width - at < end - c0 ? width - at : end - c0;

		operands(w,
			 tile + (size_t)(first * TILE_ROWS(kind) + row * width + at) *
					 dtype_size(w->operand),
			 src, DT_F32, m, m);
		src += m;
		c0 += m;
	}
}

/* ---- a panel --------------------------------------------------------------------------------- */

int64_t cpu_group(const struct packed *w, enum tile_kind kind)
{
	int64_t n = (w->expanded ? GROUP_BYTES_EXPANDED : GROUP_BYTES) /
		    (TILE_ROWS(kind) * w->block * (int64_t)dtype_size(w->operand));

	return n < 1 ? 1 : n;
}

/* Where K is one block, a tile is done before the next begins and one place for sums will do. */
static size_t sums_bytes(const struct packed *w, enum tile_kind kind, int64_t tiles)
{
	return whole_lines((size_t)((w->blocks > 1 ? tiles : 1) * TILE_ROWS(kind) * w->width) *
			   sizeof(float));
}

size_t cpu_bench_bytes(const struct packed *w, enum tile_kind kind, int64_t tiles)
{
	return sums_bytes(w, kind, tiles) + whole_lines(w->expanded) + whole_lines(w->tables) +
	       whole_lines(w->scratch);
}

struct bench cpu_bench(const struct packed *w, enum tile_kind kind, int64_t tiles, char *p)
{
	size_t sums = sums_bytes(w, kind, tiles);

	return (struct bench){
		.w = w,
		.kind = kind,
		.sums = (float *)p,
		.expanded = p + sums,
		.tables = p + sums + whole_lines(w->expanded),
		.scratch = p + sums + whole_lines(w->expanded) + whole_lines(w->tables),
	};
}

void cpu_bench_end(struct bench *b)
{
	for (int last = 0; last < 2; last++)
		for (int kind = 0; kind < BLOCK_KINDS; kind++)
			onednn_end(&b->call[last][kind]);
}

/* The panel as operands. */
static const char *panel_operands(struct bench *b, int64_t index, int64_t panel)
{
	const struct packed *w = b->w;
	const char *data =
		w->data + (size_t)index * w->matrix_bytes + (size_t)panel * w->panel_bytes;
	size_t bytes = panel == w->panels - 1 ? w->matrix_bytes - (size_t)panel * w->panel_bytes
					      : w->panel_bytes;

	if (!w->expanded)
		return data;
	if (b->holds != data && w->quant)
		cpu_codes_expand(w, index, panel, b->expanded, (const uint8_t *)data, b->tables);
	else if (b->holds != data)
		run_load((float *)b->expanded, data, w->kept,
			 (int64_t)(bytes / dtype_size(w->kept)));
	b->holds = data;
	return b->expanded;
}

int cpu_panel(struct bench *b, int64_t index, int64_t panel, const void *rows, int64_t tiles,
	      tile_done *done, void *ctx, struct err *e)
{
	const struct packed *w = b->w;
	int64_t high = TILE_ROWS(b->kind);
	size_t size = dtype_size(w->operand), tile = (size_t)(high * w->K) * size;
	const char *data = panel_operands(b, index, panel);
	bool last = panel == w->panels - 1;

	for (int64_t k = 0; k < w->blocks; data += cpu_block_bytes(w, last, k++)) {
		enum block_kind kind = cpu_block_kind(w, k);
		struct call *c = &b->call[last][kind];
		const char *src = (const char *)rows + (size_t)(k * w->block * high) * size;

		if (!c->product &&
		    onednn_begin(c, b->rounds ? w->rounding[last] : w->product[b->kind][last][kind],
				 e))
			return -1;
		for (int64_t t = 0; t < tiles; t++, src += tile) {
			float *sums = b->sums + (w->blocks > 1 ? t * high * w->width : 0);

			if (onednn_run(c, sums, src, data, b->scratch, e))
				return -1;
			if (k == w->blocks - 1)
				done(ctx, t, panel, sums);
		}
	}
	return 0;
}

/* ---- the verb -------------------------------------------------------------------------------- */

#define TILE TILE_ROWS(TILE_LARGE)

struct job {
	struct device *d;
	struct tensor out, x;
	const struct weight *w, *bias;
	bool add;
	bool rounds;           /* the product itself rounds to the dtype of out */
	const struct act *act; /* of a gated weight */
	int64_t whole;         /* leading tiles that are operands as they lie in x */
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
	char *tile = tile_rows(j, row / TILE, base);
	bool real = row < j->x.rows;

	cpu_tile_row(packed_of(j->w), TILE_LARGE, tile, row % TILE,
		     real ? ref_at(j->x, row, 0) : NULL, j->x.dtype, real ? j->x.cols : 0);
}

/* A group of tiles under way. */
struct group {
	const struct job *j;
	int64_t first; /* tile */
};

static void finish_row(const struct job *j, void *out, float *restrict sums, const float *bias,
		       int64_t n)
{
	float old[PANEL_MOST];

	for (int64_t i = 0; bias && i < n; i++)
		sums[i] += bias[i];
	if (j->add && j->out.dtype == DT_F32) {
		float *restrict o = out;

		for (int64_t i = 0; i < n; i++)
			o[i] += sums[i];
		return;
	}
	if (j->add) {
		run_load(old, out, j->out.dtype, n);
		for (int64_t i = 0; i < n; i++)
			sums[i] += old[i];
		run_save(out, j->out.dtype, sums, n);
		return;
	}
	if (j->out.dtype != DT_F32)
		run_save(sums, j->out.dtype, sums, n);
	run_stream(out, sums, (size_t)n * dtype_size(j->out.dtype));
}

/*
 * out[rows of the tile, columns of the panel] from the sums, plus bias, plus what is there; or the
 * activation of its gates and ups.
 */
static void finish(void *ctx, int64_t t, int64_t panel, void *tile)
{
	const struct group *g = ctx;
	const struct job *j = g->j;
	const struct packed *w = packed_of(j->w);
	int64_t pitch = cpu_panel_width(w, panel), wide = j->act ? pitch / 2 : pitch,
		c0 = panel * (j->act ? w->width / 2 : w->width),
		n = j->out.cols - c0 < wide ? j->out.cols - c0 : wide;
	int64_t row = (g->first + t) * TILE,
		end = row + TILE < j->out.rows ? row + TILE : j->out.rows;
	const float *bias = j->bias ? ref_vector(j->bias) + c0 : NULL;

	float act[PANEL_MOST], *sums = tile;
	uint16_t *rounded = tile;

	for (; j->rounds && row < end; row++, rounded += pitch)
		run_stream(ref_at(j->out, row, c0), rounded, (size_t)n * sizeof *rounded);
	for (; row < end; row++, sums += pitch) {
		if (j->act)
			cpu_act_row(act, sums, sums + wide, j->act, n);
		finish_row(j, ref_at(j->out, row, c0), j->act ? act : sums, bias, n);
	}
}

/*
 * Tiles [first, first + n), all ready in x or none: rows that are no operands yet are made so, then
 * groups of `each` tiles meet all panels. Threads take the panels of a group in turn: its rows stay
 * in the cache of each, and each panel is read by one.
 */
static void run(const struct job *j, int64_t first, int64_t n, int64_t each)
{
	const struct packed *w = packed_of(j->w);
	int64_t base = first, groups = (n + each - 1) / each;

#pragma omp parallel num_threads(j->d->threads)
	{
		struct bench b =
			cpu_bench(w, TILE_LARGE, each, cpu_of(j->d)->own[omp_get_thread_num()].p);
		struct err e = ERR_INIT;

		b.rounds = j->rounds;
		if (first >= j->whole) {
#pragma omp for schedule(static)
			for (int64_t row = first * TILE; row < (first + n) * TILE; row++)
				prepare_row(j, row, base);
		}
#pragma omp for schedule(dynamic)
		for (int64_t task = 0; task < groups * w->panels; task++) {
			struct group g = { j, first + task / w->panels * each };
			int64_t left = first + n - g.first;

			if (!e.code)
				cpu_panel(&b, 0, task % w->panels, tile_rows(j, g.first, base),
					  left < each ? left : each, finish, &g, &e);
		}
		run_stream_end();
		cpu_bench_end(&b);
		if (e.code)
			cpu_fail(j->d, &e);
	}
}

/* Tiles of a group: as the cache has room for, but all threads shall find work. */
static int64_t group_of(const struct job *j, int64_t tiles)
{
	const struct packed *w = packed_of(j->w);
	int64_t most = cpu_group(w, TILE_LARGE), fair = tiles * w->panels / (4 * j->d->threads);

	return fair < 1 ? 1 : fair < most ? fair : most;
}

static void multiply(struct job *j)
{
	const struct packed *p = packed_of(j->w);
	struct device *d = j->d;
	int64_t tiles = (j->x.rows + TILE - 1) / TILE, each, batch;

	if (!ref_good(d) || !j->x.rows)
		return;
	if (j->x.dtype == p->operand && p->operand == p->rounded && j->x.cols == p->K &&
	    j->x.ld == p->K && p->blocks == 1)
		j->whole = j->x.rows / TILE;
	j->rounds =
		j->out.dtype == DT_BF16 && !j->bias && !j->add && p->rounding[0] && p->rounding[1];
	each = group_of(j, tiles);
	batch = BATCH_BYTES / (TILE * p->K * (int64_t)dtype_size(p->operand));
	batch = batch > each ? batch : each;
	batch = batch < tiles - j->whole ? batch : tiles - j->whole;
	if (!cpu_own(d, cpu_bench_bytes(p, TILE_LARGE, each)) ||
	    !cpu_shared(d, (size_t)(batch * TILE * p->K) * dtype_size(p->operand)))
		return;
	if (j->whole)
		run(j, 0, j->whole, each);
	for (int64_t first = j->whole; first < tiles && ref_good(d); first += batch)
		run(j, first, tiles - first < batch ? tiles - first : batch, each);
}

void cpu_matmul(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		const struct weight *bias, bool add)
{
	struct job j = { .d = d, .out = out, .x = x, .w = w, .bias = bias, .add = add };

	multiply(&j);
}

void cpu_matmul_gate(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		     const struct act *a)
{
	struct job j = { .d = d, .out = out, .x = x, .w = w, .act = a };

	multiply(&j);
}
