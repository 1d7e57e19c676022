/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Product weights. Rows arrive in any order and from several threads; a panel is packed by whoever
 * brings its last row, so that besides the packed weight only the panels under way take memory.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "mem.h"
#include "quant.h"

#define UNIT 64 /* sizes are rounded up to it, as weight_bytes promises */

static int64_t divide(int64_t n, int64_t by)
{
	return (n + by - 1) / by;
}

/*
 * n UNITs in the fewest equal parts of at most `most`, each whole UNITs; the last may be smaller.
 */
static int64_t part_of(int64_t n, int64_t most)
{
	return round_up(divide(n, divide(n, most)), UNIT);
}

static void set_sizes(struct packed *p, const struct weight *w)
{
	int64_t size = (int64_t)dtype_size(p->operand), rows, most;

	rows = p->gated ? 2 * round_up(w->rows / 2, UNIT / 2) : round_up(w->rows, UNIT);
	p->K = round_up(w->cols, UNIT);
	p->block = part_of(p->K, BLOCK_MOST(size));
	p->blocks = divide(p->K, p->block);
	most = PANEL_BYTES / (p->block * size) / UNIT * UNIT;
	most = most < UNIT ? UNIT : most > PANEL_MOST ? PANEL_MOST : most;
	p->width = part_of(rows, most);
	p->panels = divide(rows, p->width);
	p->last = rows - (p->panels - 1) * p->width;
}

static const struct product *product_of(struct packed *p, struct onednn *o, bool last, int64_t k,
					int64_t rows, enum dtype result, const struct product *like,
					struct err *e)
{
	int64_t left = p->K - k * p->block;
	struct product want = { .operand = p->operand,
				.result = result,
				.M = rows,
				.N = last ? p->last : p->width,
				.K = left < p->block ? left : p->block,
				.ld = p->K,
				.order = ORDER_NK,
				.add = k > 0,
				.like = like };
	const struct product *x = onednn_product(o, &want, e);

	if (x && x->scratch_bytes > p->scratch)
		p->scratch = x->scratch_bytes;
	return x;
}

/* Both kinds of tiles read the layout that suits the large one. */
static int set_block(struct packed *p, struct onednn *o, bool last, int64_t k, struct err *e)
{
	const struct product *like = NULL;

	for (int kind = 0; kind < TILE_KINDS; kind++) {
		const struct product **to = &p->product[kind][last][cpu_block_kind(p, k)];

		if (!*to)
			*to = product_of(p, o, last, k, TILE_ROWS(kind), DT_F32, like, e);
		if (!*to)
			return -1;
		like = *to;
	}
	return 0;
}

static int set_products(struct packed *p, struct onednn *o, struct err *e)
{
	for (int last = 0; last < 2; last++) {
		for (int64_t k = 0; k < p->blocks; k++)
			if (set_block(p, o, last, k, e))
				return -1;
		if (p->operand != DT_BF16 || p->blocks > 1 || p->gated)
			continue;
		p->rounding[last] = product_of(p, o, last, 0, TILE_ROWS(TILE_LARGE), DT_BF16,
					       p->product[TILE_LARGE][last][BLOCK_FIRST], e);
		if (!p->rounding[last])
			return -1;
	}
	return 0;
}

/* Where codes come from. */
static int set_layouts(struct packed *p, struct err *e)
{
	for (int last = 0; last < 2; last++)
		for (int64_t k = 0; k < p->blocks; k++) {
			enum block_kind kind = cpu_block_kind(p, k);

			if (!p->layout[last][kind])
				p->layout[last][kind] =
					onednn_layout(p->product[TILE_LARGE][last][kind], e);
			if (!p->layout[last][kind])
				return -1;
		}
	p->tables = cpu_codes_tables(p);
	return 0;
}

/* Of a panel, as kept or as operands. */
static size_t panel_bytes(const struct packed *p, bool last, bool kept)
{
	size_t bytes = 0;

	for (int64_t k = 0; k < p->blocks; k++)
		bytes += kept ? cpu_kept_bytes(p, last, k) : cpu_block_bytes(p, last, k);
	return bytes;
}

static int packed_alloc(struct cpu *c, struct packed *p, const struct weight *w, struct err *e)
{
	int64_t bytes;

	p->panel_bytes = panel_bytes(p, false, true);
	p->matrix_bytes = (size_t)(p->panels - 1) * p->panel_bytes + panel_bytes(p, true, true);
	p->expanded = p->kept == p->operand ? 0 : panel_bytes(p, false, false);
	bytes = mem_mul(w->count, (int64_t)p->matrix_bytes);
	if (bytes < 0)
		return err_fail(
			e,
			"a weight of %lld x %lld x %lld elements is larger than the address space",
			(long long)w->count, (long long)w->rows, (long long)w->cols);
	if (p->quant && ref_scales_init(&p->scales, w, e))
		return -1;
	p->staging = mem_calloc((size_t)(w->count * p->panels), sizeof *p->staging, e);
	p->bytes = (size_t)bytes;
	p->data = p->staging ? cpu_take_block(c, &p->bytes, e) : NULL;
	return p->data ? 0 : -1;
}

int cpu_weight_alloc(struct device *d, struct weight *w, struct err *e)
{
	struct packed *p;

	if (!cpu_packs(w) || (!w->quant && !dtype_is_float(w->stored)))
		return ref_weight_alloc(d, w, e);
	if (ref_weight_usable(w, e))
		return -1;
	p = mem_calloc(1, sizeof *p, e);
	if (!p)
		return -1;
	pthread_mutex_init(&p->lock, NULL);
	w->handle = p;
	p->gated = w->use == USE_GATED;
	p->quant = w->quant;
	p->rows = w->rows;
	p->cols = w->cols;
	p->rounded = ref_operand(w, d->compute);
	p->kept = w->quant ? DT_U8 : p->rounded;
	p->half = w->quant && w->quant->code != CODE_F8_E4M3;
	p->operand = cpu_of(d)->bf16 ? p->rounded : DT_F32;
	set_sizes(p, w);
	if (set_products(p, cpu_of(d)->dnn, e) || (p->quant && set_layouts(p, e)) ||
	    packed_alloc(cpu_of(d), p, w, e)) {
		cpu_weight_free(d, w);
		return -1;
	}
	return 0;
}

/* Of a number of a row that waits for its panel. */
static size_t staged_size(const struct packed *p)
{
	return dtype_size(p->quant ? p->kept : p->operand);
}

static int64_t panel_rows(const struct packed *p, const struct weight *w, int64_t panel)
{
	int64_t left = w->rows - panel * p->width;

	return left < p->width ? left : p->width;
}

/* Where a row of the weight lies, and how many after it, with it, lie behind one another. */
static int64_t place_of(const struct packed *p, const struct weight *w, int64_t row, int64_t *panel,
			int64_t *at)
{
	int64_t I = w->rows / 2, half = p->width / 2, i = row < I ? row : row - I, run;

	if (!p->gated) {
		*panel = row / p->width;
		*at = row % p->width;
		return p->width - *at;
	}
	*panel = i / half;
	*at = i % half + (row < I ? 0 : cpu_panel_width(p, *panel) / 2);
	run = half - i % half;
	return run < I - i ? run : I - i;
}

static char *panel_data(const struct packed *p, int64_t index, int64_t panel)
{
	return p->data + (size_t)index * p->matrix_bytes + (size_t)panel * p->panel_bytes;
}

/*
 * One block of a panel's rows. Where the weight is kept smaller than it runs, the packed order is
 * kept; `packed` has room for the block as it runs.
 */
static int pack_block(const struct packed *p, bool last, int64_t k, char *to, const char *rows,
		      char *packed, char *scratch, struct err *e)
{
	const struct product *x = p->product[TILE_LARGE][last][cpu_block_kind(p, k)];
	const char *src = rows + (size_t)(k * p->block) * dtype_size(p->operand);

	if (onednn_pack(x, packed ? packed : to, src, scratch, e))
		return -1;
	if (packed)
		dtype_convert(to, p->kept, packed, p->operand,
			      x->packed_bytes / dtype_size(p->operand));
	return 0;
}

/* Packs the rows of one panel (NULL = all zero) and gives their memory back. */
static int pack_panel(struct cpu *c, const struct packed *p, int64_t index, int64_t panel,
		      void *rows, struct err *e)
{
	char *to = panel_data(p, index, panel), *scratch, *packed = NULL;
	bool last = panel == p->panels - 1;
	int rc = -1;

	if (!rows) {
		memset(to, 0, panel_bytes(p, last, true));
		return 0;
	}
	if (p->quant) {
		for (int64_t k = 0; k < p->blocks; to += cpu_kept_bytes(p, last, k++))
			cpu_codes_pack(p, last, k, (uint8_t *)to, rows);
		cpu_give_spare(c, rows);
		return 0;
	}
	scratch = cpu_take_spare(c, p->scratch, e);
	if (p->expanded)
		packed = cpu_take_spare(c, cpu_block_bytes(p, false, 0), e);
	if (scratch && (packed || !p->expanded))
		rc = 0;
	for (int64_t k = 0; k < p->blocks && !rc; to += cpu_kept_bytes(p, last, k++))
		rc = pack_block(p, last, k, to, rows, packed, scratch, e);
	cpu_give_spare(c, scratch);
	cpu_give_spare(c, packed);
	cpu_give_spare(c, rows);
	return rc;
}

/* The staging rows of a panel, made by the first to come, zero where nobody will write. */
static char *staging_rows(struct cpu *c, struct packed *p, struct staging *s, int64_t width,
			  struct err *e)
{
	size_t bytes = (size_t)(width * p->K) * staged_size(p);
	void *rows, *mine = NULL;

	pthread_mutex_lock(&p->lock);
	rows = s->rows;
	pthread_mutex_unlock(&p->lock);
	if (rows || !(mine = cpu_take_spare(c, bytes, e)))
		return rows;
	memset(mine, 0, bytes);
	pthread_mutex_lock(&p->lock);
	rows = s->rows ? s->rows : mine;
	s->rows = rows;
	pthread_mutex_unlock(&p->lock);
	if (rows != mine)
		cpu_give_spare(c, mine);
	return rows;
}

/* Of a row as it comes. */
static size_t row_bytes(const struct weight *w, enum dtype from)
{
	return w->quant ? quant_row_bytes(w->quant, w->cols)
			: (size_t)w->cols * dtype_size(from);
}

/* n rows, all of panel `panel`, from `row` within it. */
static int fill_panel(struct cpu *c, const struct weight *w, int64_t index, int64_t panel,
		      int64_t row, int64_t n, const char *src, enum dtype from, struct err *e)
{
	struct packed *p = w->handle;
	struct staging *s = &p->staging[index * p->panels + panel];
	size_t pitch = (size_t)p->K * staged_size(p), step = row_bytes(w, from);
	char *rows = staging_rows(c, p, s, cpu_panel_width(p, panel), e);
	bool whole;

	if (!rows)
		return -1;
	for (int64_t i = 0; i < n; i++)
		if (p->quant)
			cpu_codes_row(p, (uint8_t *)rows + (size_t)(row + i) * pitch,
				      src + (size_t)i * step);
		else
			cpu_operand_row(p, rows + (size_t)(row + i) * pitch,
					src + (size_t)i * step, from, w->cols);
	pthread_mutex_lock(&p->lock);
	s->filled += n;
	whole = s->filled == panel_rows(p, w, panel);
	if (whole)
		s->rows = NULL;
	pthread_mutex_unlock(&p->lock);
	return whole ? pack_panel(c, p, index, panel, rows, e) : 0;
}

int cpu_weight_fill(struct device *d, struct weight *w, int64_t index, int64_t row0, int64_t n,
		    const void *src, enum dtype from, const void *scales, struct err *e)
{
	struct packed *p = w->handle;
	const char *s = src;

	if (!cpu_packs(w))
		return ref_weight_fill(d, w, index, row0, n, src, from, scales, e);
	if (index < 0 || index >= w->count || row0 < 0 || n < 0 || n > w->rows - row0)
		return err_fail(
			e,
			"rows %lld..%lld of matrix %lld are outside a weight of %lld x %lld rows",
			(long long)row0, (long long)(row0 + n), (long long)index,
			(long long)w->count, (long long)w->rows);
	if (ref_fill_usable(w, from, scales, e))
		return -1;
	if (!p->quant && !dtype_is_float(from))
		return err_refuse(e, "a weight stored as %s cannot become %s", dtype_name(from),
				  dtype_name(p->kept));
	if (p->quant && ref_scales_put(&p->scales, index, row0, n, scales, e))
		return -1;
	while (n > 0) {
		int64_t panel, row, run = place_of(p, w, row0, &panel, &row), m = run < n ? run : n;

		if (fill_panel(cpu_of(d), w, index, panel, row, m, s, from, e))
			return -1;
		s += (size_t)m * row_bytes(w, from);
		row0 += m;
		n -= m;
	}
	return 0;
}

static bool has_rows(const struct packed *p, int64_t index)
{
	for (int64_t i = 0; i < p->panels; i++)
		if (p->staging[index * p->panels + i].filled)
			return true;
	return false;
}

/* What is left of a matrix's panels; rows that nobody filled are zero. */
static int end_matrix(struct cpu *c, const struct weight *w, int64_t index, struct err *e)
{
	struct packed *p = w->handle;

	for (int64_t i = 0; i < p->panels; i++) {
		struct staging *s = &p->staging[index * p->panels + i];
		void *rows = s->rows;

		if (s->filled == panel_rows(p, w, i))
			continue;
		s->rows = NULL;
		if (pack_panel(c, p, index, i, rows, e))
			return -1;
	}
	return 0;
}

/* Experts that nobody chose are never filled: their memory is not touched. */
int cpu_weight_ready(struct device *d, struct weight *w, struct err *e)
{
	struct packed *p = w->handle;

	if (!cpu_packs(w))
		return ref_weight_ready(d, w, e);
	for (int64_t i = 0; p->staging && i < w->count; i++)
		if (has_rows(p, i) && end_matrix(cpu_of(d), w, i, e))
			return -1;
	free(p->staging);
	p->staging = NULL;
	return 0;
}

void cpu_weight_free(struct device *d, struct weight *w)
{
	struct packed *p = w->handle;

	if (!p || !cpu_packs(w)) {
		ref_weight_free(d, w);
		return;
	}
	for (int64_t i = 0; p->staging && i < w->count * p->panels; i++)
		cpu_give_spare(cpu_of(d), p->staging[i].rows);
	free(p->staging);
	cpu_give_block(cpu_of(d), p->data, p->bytes);
	ref_scales_release(&p->scales);
	pthread_mutex_destroy(&p->lock);
	free(p);
	w->handle = NULL;
}
