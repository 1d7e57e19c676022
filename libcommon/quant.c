/* SPDX-License-Identifier: Apache-2.0 */
/* Codes, scales, and what a checkpoint says of them. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <string.h>
#include <strings.h>

#include "err.h"
#include "json.h"
#include "quant.h"

#define CONFIG "config.json"
#define QUANT  CONFIG ": quantization_config"
#define MOST_BLOCK 65536

/* ---- bytes ----------------------------------------------------------------------------------- */

enum dtype quant_stored(const struct quant *q)
{
	return q->code == CODE_F8_E4M3 ? DT_F8_E4M3 : q->code == CODE_MXFP4 ? DT_U8 : DT_I32;
}

bool quant_stores(const struct quant *q, enum dtype d)
{
	return d == quant_stored(q) || (q->code == CODE_MXFP4 && d == DT_I8);
}

void quant_scales(float *dst, const struct quant *q, const void *p, int64_t first, int64_t n)
{
	const unsigned char *at = (const unsigned char *)p + (size_t)first * dtype_size(q->scale);
	uint16_t h;

	switch (q->scale) {
	case DT_F32:
		memcpy(dst, at, (size_t)n * sizeof *dst);
		break;
	case DT_BF16:
	case DT_F16:
		for (int64_t i = 0; i < n; i++) {
			memcpy(&h, at + i * 2, sizeof h);
			dst[i] = q->scale == DT_BF16 ? dtype_bf16_to_f32(h) : dtype_f16_to_f32(h);
		}
		break;
	default:
		for (int64_t i = 0; i < n; i++)
			dst[i] = dtype_f8_e8m0_to_f32(at[i]);
		for (int64_t i = 0; q->zero_scale_is_zero && i < n; i++)
			dst[i] = at[i] ? dst[i] : 0;
	}
}

float quant_scale(const struct quant *q, const void *p, int64_t i)
{
	float f;

	quant_scales(&f, q, p, i, 1);
	return f;
}

/* Numbers of half a byte. */
static const float e2m1[16] = { 0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,	 6.0f,
				-0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f },
		   int4[16] = { -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7 };

static const float *halves(const struct quant *q)
{
	return q->code == CODE_MXFP4 ? e2m1 : int4;
}

float quant_code(const struct quant *q, uint8_t code)
{
	return q->code == CODE_F8_E4M3 ? dtype_f8_e4m3_to_f32(code) : halves(q)[code & 15];
}

void quant_codes(uint8_t *dst, const struct quant *q, const void *codes, int64_t cols)
{
	const uint8_t *c = codes;

	if (q->code == CODE_F8_E4M3) {
		memcpy(dst, c, (size_t)cols);
		return;
	}
	for (int64_t i = 0; i < cols / 2; i++) {
		dst[2 * i] = c[i] & 15;
		dst[2 * i + 1] = c[i] >> 4;
	}
	if (cols % 2)
		dst[cols - 1] = c[cols / 2] & 15;
}

/* Numbers [from, end) of a row. */
static void one_block(float *dst, const struct quant *q, const uint8_t *codes, float scale,
		      int64_t from, int64_t end)
{
	const float *half = halves(q);

	if (q->code == CODE_F8_E4M3)
		for (int64_t i = from; i < end; i++)
			dst[i] = dtype_f8_e4m3_to_f32(codes[i]) * scale;
	else
		for (int64_t i = from; i < end; i++)
			dst[i] = half[codes[i / 2] >> (i % 2 ? 4 : 0) & 15] * scale;
}

void quant_values(float *dst, const struct quant *q, const void *codes, const void *scales,
		  int64_t cols)
{
	for (int64_t b = 0, end; b * q->block_cols < cols; b++) {
		end = (b + 1) * q->block_cols < cols ? (b + 1) * q->block_cols : cols;
		one_block(dst, q, codes, quant_scale(q, scales, b), b * q->block_cols, end);
	}
}

/* ---- what config.json says ------------------------------------------------------------------- */

static int add(struct quants *q, struct quant layout, struct err *e)
{
	for (int i = 0; i < q->n; i++)
		if (q->layout[i].code == layout.code &&
		    q->layout[i].block_cols == layout.block_cols &&
		    q->layout[i].scale == layout.scale)
			return 0;
	if (q->n == QUANTS_MOST)
		return err_refuse(e, QUANT " has groups of more than %d kinds", QUANTS_MOST / 3);
	q->layout[q->n] = layout;
	q->list[q->n] = &q->layout[q->n];
	q->n++;
	return 0;
}

static int read_block(const json_t *o, int size[2], struct err *e)
{
	const json_t *a = json_object_get(o, "weight_block_size");

	for (size_t i = 0; i < 2; i++) {
		json_int_t n = json_integer_value(json_array_get(a, i));

		if (json_array_size(a) != 2 || n < 1 || n > MOST_BLOCK)
			return err_refuse(e,
					  QUANT " needs weight_block_size [rows, columns]: fp8 "
						"weights with one scale a tensor or a row are not "
						"supported");
		size[i] = (int)n;
	}
	return 0;
}

static int read_fp8(struct quants *q, const json_t *o, struct err *e)
{
	static const enum dtype scales[] = { DT_F32, DT_BF16, DT_F16, DT_F8_E8M0, DT_U8 };
	const char *fmt;
	int size[2];

	if (json_str_or(o, CONFIG, "fmt", "e4m3", &fmt, e))
		return -1;
	if (strcasecmp(fmt, "e4m3") && strcasecmp(fmt, "float8_e4m3fn"))
		return err_refuse(e,
				  CONFIG ": the checkpoint is quantised by quant_method 'fp8', fmt "
					 "%s, which this version does not read (it reads e4m3); "
					 "use the BF16 checkpoint",
				  fmt);
	if (read_block(o, size, e))
		return -1;
	for (size_t i = 0; i < sizeof scales / sizeof *scales; i++)
		if (add(q,
			(struct quant){ .code = CODE_F8_E4M3,
					.block_rows = size[0],
					.block_cols = size[1],
					.scale = scales[i],
					.scale_suffix = ".weight_scale_inv" },
			e))
			return -1;
	return 0;
}

/* A member that must be absent, null, false or empty. */
static int refuse_member(const json_t *o, const char *key, const char *why, struct err *e)
{
	const json_t *v = json_object_get(o, key);

	if (!v || json_is_null(v) || json_is_false(v) ||
	    (json_is_object(v) && !json_object_size(v)))
		return 0;
	return err_refuse(e, QUANT " has '%s': %s, which this version does not do; use the BF16 "
				   "checkpoint",
			  key, why);
}

/* Of the group: how its codes are made. */
static int check_weights(const json_t *w, const char *group, const char *format, const char *type,
			 struct err *e)
{
	const char *have;
	int64_t bits;
	bool symmetric;

	if (json_int_or(w, CONFIG, "num_bits", 8, &bits, e) ||
	    json_str_or(w, CONFIG, "type", "int", &have, e) ||
	    json_bool_or(w, CONFIG, "symmetric", true, &symmetric, e))
		return -1;
	if (bits != 4 || strcasecmp(have, type))
		return err_refuse(e,
				  QUANT ": '%s' stores %s of %lld bits as %s, which this version "
					"does not read (%s of 4 bits it does); use the BF16 "
					"checkpoint",
				  group, have, (long long)bits, format, type);
	if (!symmetric)
		return err_refuse(e,
				  QUANT ": '%s' is not symmetric: zero points are not supported; "
					"use the BF16 checkpoint",
				  group);
	return refuse_member(w, "dynamic", "its weights are quantised anew in each forward", e);
}

/* "weight" (or "static") only says in which order the quantiser went. */
static int check_order(const json_t *w, const char *group, struct err *e)
{
	const json_t *v = json_object_get(w, "actorder");
	const char *s = json_string_value(v);

	if (!v || json_is_null(v) || json_is_false(v) ||
	    (s && (!strcasecmp(s, "weight") || !strcasecmp(s, "static"))))
		return 0;
	return err_refuse(e,
			  QUANT ": '%s' has actorder '%s': groups of columns that do not lie "
				"together (g_idx) are not supported; use the BF16 checkpoint",
			  group, s ? s : "true");
}

/* Columns of a group, all of a row by channel. */
static int read_columns(const json_t *w, const char *group, int *cols, struct err *e)
{
	const char *strategy;
	int64_t n;

	if (json_int_or(w, CONFIG, "group_size", 0, &n, e) ||
	    json_str_or(w, CONFIG, "strategy",
			n > 0	? "group"
			: n < 0 ? "channel"
				: "tensor",
			&strategy, e))
		return -1;
	if (!strcasecmp(strategy, "channel") && n <= 0) {
		*cols = QUANT_ALL_COLS;
		return 0;
	}
	if (strcasecmp(strategy, "group") || n < 1 || n > MOST_BLOCK)
		return err_refuse(e,
				  QUANT ": '%s' has strategy '%s' with group_size %lld, which this "
					"version does not read (group with a size, and channel, it "
					"does); use the BF16 checkpoint",
				  group, strategy, (long long)n);
	*cols = (int)n;
	return 0;
}

static int add_packed(struct quants *q, int code, int cols, const enum dtype *scales, struct err *e)
{
	for (; *scales != DT_NONE; scales++)
		if (add(q,
			(struct quant){ .code = code,
					.block_rows = 1,
					.block_cols = cols,
					.scale = *scales,
					.codes_suffix = ".weight_packed",
					.scale_suffix = ".weight_scale" },
			e))
			return -1;
	return 0;
}

static int read_group(struct quants *q, const char *name, const json_t *g, const char *format,
		      struct err *e)
{
	static const enum dtype real[] = { DT_BF16, DT_F16, DT_F32, DT_NONE },
				power[] = { DT_U8, DT_F8_E8M0, DT_NONE };
	const json_t *w = json_object_get(g, "weights");
	bool fp4;
	int cols = 0;

	if (!json_is_object(g))
		return err_refuse(e, QUANT ": '%s' is the name of a scheme, not the scheme", name);
	if (json_str_or(g, CONFIG, "format", format, &format, e) ||
	    refuse_member(g, "input_activations", "activations are quantised too", e) ||
	    refuse_member(g, "output_activations", "activations are quantised too", e))
		return -1;
	fp4 = !strcmp(format, "mxfp4-pack-quantized");
	if (!fp4 && strcmp(format, "pack-quantized"))
		return err_refuse(e,
				  QUANT ": '%s' has format '%s', which this version does not read "
					"(pack-quantized and mxfp4-pack-quantized it does); use "
					"the BF16 checkpoint",
				  name, format);
	if (!json_is_object(w))
		return err_refuse(e, QUANT ": '%s' does not say how its weights are stored", name);
	if (check_weights(w, name, format, fp4 ? "float" : "int", e) || check_order(w, name, e) ||
	    read_columns(w, name, &cols, e))
		return -1;
	if (fp4 && cols != 32)
		return err_refuse(e, QUANT ": '%s' has groups of %d columns, but %s has 32", name,
				  cols, format);
	return fp4 ? add_packed(q, CODE_MXFP4, cols, power, e)
		   : add_packed(q, CODE_INT4, cols, real, e);
}

static int read_compressed(struct quants *q, const json_t *o, struct err *e)
{
	const json_t *groups = json_object_get(o, "config_groups"), *sparse, *g;
	const char *format, *name, *density;

	if (json_str_or(o, CONFIG, "format", "?", &format, e) ||
	    refuse_member(o, "kv_cache_scheme", "keys and values are quantised too", e) ||
	    refuse_member(o, "transform_config", "weights are rotated", e))
		return -1;
	sparse = json_object_get(o, "sparsity_config");
	if (json_str_or(sparse, CONFIG, "format", "dense", &density, e))
		return -1;
	if (strcmp(density, "dense"))
		return err_refuse(e,
				  QUANT ": sparsity_config has format '%s': sparse weights are not "
					"supported; use the BF16 checkpoint",
				  density);
	if (!json_is_object(groups) || !json_object_size(groups))
		return err_refuse(e, QUANT " needs config_groups: how weights are stored");
	json_object_foreach((json_t *)groups, name, g)
		if (read_group(q, name, g, format, e))
			return -1;
	return 0;
}

int quants_read(struct quants *q, const json_t *config, struct err *e)
{
	const json_t *o = json_object_get(config, "quantization_config");
	const char *method;

	memset(q, 0, sizeof *q);
	if (!o || json_is_null(o))
		return 0;
	if (json_str_or(o, CONFIG, "quant_method", "?", &method, e))
		return -1;
	if (!strcmp(method, "fp8"))
		return read_fp8(q, o, e);
	if (!strcmp(method, "compressed-tensors"))
		return read_compressed(q, o, e);
	return err_refuse(e,
			  CONFIG ": the checkpoint is quantised by quant_method '%s', which this "
				 "version does not read (it reads fp8, e4m3, with "
				 "weight_block_size, and 4 bits of compressed-tensors); use the "
				 "BF16 checkpoint",
			  method);
}
