/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed storage: codes in the order in which oneDNN reads their numbers, so that a panel becomes
 * operands by one pass over it. Neighbours there are neither rows nor columns of the weight: a
 * table holds the scales in that order too, once for each block of columns.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <string.h>

#include "cpu.h"
#include "number.h"
#include "quant.h"

static const struct layout *layout_of(const struct packed *w, bool last, int64_t k)
{
	return w->layout[last][cpu_block_kind(w, k)];
}

static int64_t block_width(const struct packed *w, int64_t k)
{
	int64_t left = w->K - k * w->block;

	return left < w->block ? left : w->block;
}

void cpu_codes_row(const struct packed *w, uint8_t *to, const void *codes)
{
	quant_codes(to, w->quant, codes, w->cols);
	for (int64_t i = 0; w->quant->code == CODE_INT4 && i < w->cols; i++)
		to[i] ^= 8;
}

void cpu_codes_pack(const struct packed *w, bool last, int64_t k, uint8_t *to, const uint8_t *rows)
{
	const struct layout *y = layout_of(w, last, k);
	int64_t step[LAYOUT_LANES] = { 0 };

	for (int l = 0; l < y->lanes; l++)
		step[l] = y->row_in[l] * w->K + y->col_in[l];
	rows += k * w->block;
	for (int64_t g = 0, n = 0; g < y->groups; g++) {
		const uint8_t *from =
			rows + (int64_t)y->row[g] * y->rows * w->K + (int64_t)y->col[g] * y->cols;

		for (int l = 0; l < y->lanes && !w->half; l++)
			*to++ = from[step[l]];
		for (int l = 0; l < y->lanes && w->half; l++, n++) {
			uint8_t *at = to + n / 32 * 16 + n % 16, code = from[step[l]];

			*at = n % 32 < 16 ? code : (uint8_t)(*at | code << 4);
		}
	}
}

/* ---- tables ---------------------------------------------------------------------------------- */

/* Of one block of K: the scales in the order of the layout, and where those of a column are. */
struct tables {
	int64_t first, n;	/* blocks of columns */
	int64_t step;		/* floats of one of them */
	float *scale;		/* [n][rows of the panel / layout's][lanes] */
	float *row;		/* [lanes][n] */
	uint32_t *at;		/* [columns] first of scale */
};

static size_t table_bytes(const struct packed *w, bool last, int64_t k, struct tables *t)
{
	const struct layout *y = layout_of(w, last, k);
	int64_t first = k * w->block, wide = block_width(w, k);

	t->first = first / w->quant->block_cols;
	t->n = (first + wide - 1) / w->quant->block_cols - t->first + 1;
	t->step = (last ? w->last : w->width) / y->rows * y->lanes;
	return (size_t)(t->n * t->step + t->n * y->lanes + wide) * sizeof(float);
}

size_t cpu_codes_tables(const struct packed *w)
{
	size_t most = 0;
	struct tables t;

	for (int last = 0; last < 2; last++)
		for (int64_t k = 0; k < w->blocks; k++) {
			size_t n = table_bytes(w, last, k, &t);

			most = n > most ? n : most;
		}
	return most;
}

/* The scales of row i of a panel, NULL where it has none: zeros behind the last. */
static const void *row_scales(const struct packed *w, int64_t index, int64_t panel, int64_t i)
{
	int64_t I = w->rows / 2, half = cpu_panel_width(w, panel) / 2, row;

	if (!w->gated) {
		row = panel * w->width + i;
		return row < w->rows ? ref_scales_row(&w->scales, index, row) : NULL;
	}
	row = panel * (w->width / 2) + i % half;
	return row < I ? ref_scales_row(&w->scales, index, row + (i < half ? 0 : I)) : NULL;
}

/* Behind the last column there are zeros whatever the scale. */
static void read_row(const struct packed *w, const struct tables *t, float *to, const void *scales)
{
	int64_t most = scales ? quant_blocks(w->quant, w->cols) - t->first : 0,
		n = most < t->n ? most : t->n;

	n = n > 0 ? n : 0;
	if (n)
		quant_scales(to, w->quant, scales, t->first, n);
	memset(to + n, 0, (size_t)(t->n - n) * sizeof *to);
}

/* Lanes of the same row follow each other, or those of all rows do. */
static void make_tables(const struct packed *w, int64_t index, int64_t panel, int64_t k,
			struct tables *t, char *p)
{
	bool last = panel == w->panels - 1;
	const struct layout *y = layout_of(w, last, k);

	table_bytes(w, last, k, t);
	t->scale = (float *)p;
	t->row = t->scale + t->n * t->step;
	t->at = (uint32_t *)(t->row + t->n * y->lanes);
	for (int64_t c = 0; c < block_width(w, k); c++)
		t->at[c] = (uint32_t)(((k * w->block + c) / w->quant->block_cols - t->first) *
				      t->step);
	for (int64_t i = 0; i < t->step; i += y->lanes) {
		const float *row[LAYOUT_LANES];

		for (int l = 0; l < y->lanes; l++) {
			row[l] = t->row + l * t->n;
			if (l && y->row_in[l] == y->row_in[l - 1])
				row[l] = row[l - 1];
			else
				read_row(w, t, t->row + l * t->n,
					 row_scales(w, index, panel,
						    i / y->lanes * y->rows + y->row_in[l]));
		}
		for (int64_t b = 0; b < t->n; b++)
			for (int l = 0; l < y->lanes; l++)
				t->scale[b * t->step + i + l] = row[l][b];
	}
}

/* ---- expanding ------------------------------------------------------------------------------- */

static void put_vector(char *to, vec *v, enum dtype operand, enum dtype rounded)
{
	uint16_t h[LANES];

	if (operand == DT_BF16) {
		vec_to_bf16((uint16_t *)to, v);
		return;
	}
	if (rounded == DT_BF16) {
		vec_to_bf16(h, v);
		vec_from_bf16(v, h);
	}
	vec_store(to, *v);
}

/* Numbers of groups g and g + 1 without scales; as bytes, or as halves of E2M1 or integers. */
enum kind { BYTES, HALVES_E2M1, HALVES_INT };

static inline __attribute__((always_inline)) void two_groups(vec v[2], const uint8_t *codes,
							     int64_t g, enum kind kind)
{
	if (kind == BYTES) {
		vec_from_e4m3(&v[0], codes + g * LANES);
		vec_from_e4m3(&v[1], codes + (g + 1) * LANES);
	} else {
		vec_from_halves(v, codes + g / 2 * LANES, kind == HALVES_E2M1);
	}
}

/* Lanes of one block of columns have their scales side by side. Sizes are even. */
static inline __attribute__((always_inline)) void
expand_lanes(const struct layout *y, const struct tables *t, char *to, const uint8_t *codes,
	     enum kind kind, enum dtype operand, enum dtype rounded)
{
	size_t pitch = LANES * (operand == DT_BF16 ? sizeof(uint16_t) : sizeof(float));

	for (int64_t g = 0; g < y->groups; g += 2) {
		vec v[2], s;

		two_groups(v, codes, g, kind);
		for (int h = 0; h < 2; h++) {
			vec_load(s, t->scale + t->at[y->col[g + h] * y->cols] +
					    y->row[g + h] * LANES);
			v[h] *= s;
			put_vector(to + (size_t)(g + h) * pitch, &v[h], operand, rounded);
		}
	}
}

static inline __attribute__((always_inline)) void
expand_kind(const struct packed *w, const struct layout *y, const struct tables *t, char *to,
	    const uint8_t *codes, enum kind kind)
{
	if (w->operand == DT_BF16)
		expand_lanes(y, t, to, codes, kind, DT_BF16, DT_BF16);
	else if (w->rounded == DT_BF16)
		expand_lanes(y, t, to, codes, kind, DT_F32, DT_BF16);
	else
		expand_lanes(y, t, to, codes, kind, DT_F32, DT_F32);
}

/* Number i of a block, without its scale. */
static float one_number(const struct packed *w, const uint8_t *codes, int64_t i)
{
	uint8_t c = w->half ? (uint8_t)(codes[i / 32 * 16 + i % 16] >> (i % 32 < 16 ? 0 : 4))
			    : codes[i];

	return quant_code(w->quant, w->quant->code == CODE_INT4 ? c ^ 8 : c);
}

/* Any layout and any blocks, one by one. */
static void expand_each(const struct packed *w, const struct layout *y, const struct tables *t,
			char *to, const uint8_t *codes)
{
	for (int64_t i = 0; i < y->groups * y->lanes; i++) {
		int64_t g = i / y->lanes, l = i % y->lanes;
		float f = one_number(w, codes, i) *
			  t->scale[t->at[y->col[g] * y->cols + y->col_in[l]] +
				   y->row[g] * y->lanes + l];

		if (w->operand == DT_BF16)
			((uint16_t *)to)[i] = dtype_f32_to_bf16(f);
		else
			((float *)to)[i] = ref_round(f, w->rounded);
	}
}

static void expand_block(const struct packed *w, const struct layout *y, const struct tables *t,
			 char *to, const uint8_t *codes)
{
	if (y->lanes != LANES || w->quant->block_cols % y->cols)
		expand_each(w, y, t, to, codes);
	else if (w->quant->code == CODE_F8_E4M3)
		expand_kind(w, y, t, to, codes, BYTES);
	else if (w->quant->code == CODE_MXFP4)
		expand_kind(w, y, t, to, codes, HALVES_E2M1);
	else
		expand_kind(w, y, t, to, codes, HALVES_INT);
}

void cpu_codes_expand(const struct packed *w, int64_t index, int64_t panel, char *to,
		      const uint8_t *codes, char *tables)
{
	bool last = panel == w->panels - 1;

	for (int64_t k = 0; k < w->blocks; k++) {
		struct tables t;

		make_tables(w, index, panel, k, &t, tables);
		expand_block(w, layout_of(w, last, k), &t, to, codes);
		to += cpu_block_bytes(w, last, k);
		codes += cpu_kept_bytes(w, last, k);
	}
}
