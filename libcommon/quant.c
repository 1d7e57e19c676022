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
#define MOST_BLOCK 65536

float quant_scale(const struct quant *q, const void *p, int64_t i)
{
	const unsigned char *at = (const unsigned char *)p + (size_t)i * dtype_size(q->scale);
	uint16_t h;
	float f;

	switch (q->scale) {
	case DT_F32:
		memcpy(&f, at, sizeof f);
		return f;
	case DT_BF16:
		memcpy(&h, at, sizeof h);
		return dtype_bf16_to_f32(h);
	default:
		return !*at && q->zero_scale_is_zero ? 0 : dtype_f8_e8m0_to_f32(*at);
	}
}

void quant_values(float *dst, const struct quant *q, const void *codes, const void *scales,
		  int64_t cols)
{
	const uint8_t *c = codes;

	for (int64_t b = 0, end; b * q->block_cols < cols; b++) {
		float scale = quant_scale(q, scales, b);

		end = (b + 1) * q->block_cols < cols ? (b + 1) * q->block_cols : cols;
		for (int64_t i = b * q->block_cols; i < end; i++)
			dst[i] = dtype_f8_e4m3_to_f32(c[i]) * scale;
	}
}

static int read_block(const json_t *o, int size[2], struct err *e)
{
	const json_t *a = json_object_get(o, "weight_block_size");

	for (size_t i = 0; i < 2; i++) {
		json_int_t n = json_integer_value(json_array_get(a, i));

		if (json_array_size(a) != 2 || n < 1 || n > MOST_BLOCK)
			return err_refuse(e, CONFIG ": quantization_config needs weight_block_size "
						    "[rows, columns]: fp8 weights with one scale a "
						    "tensor or a row are not supported");
		size[i] = (int)n;
	}
	return 0;
}

int quants_read(struct quants *q, const json_t *config, struct err *e)
{
	static const enum dtype scales[] = { DT_F32, DT_F8_E8M0, DT_U8 };
	const json_t *o = json_object_get(config, "quantization_config");
	const char *method, *fmt;
	int size[2];

	memset(q, 0, sizeof *q);
	if (!o || json_is_null(o))
		return 0;
	if (json_str_or(o, CONFIG, "quant_method", "?", &method, e) ||
	    json_str_or(o, CONFIG, "fmt", "e4m3", &fmt, e))
		return -1;
	if (strcmp(method, "fp8") || (strcasecmp(fmt, "e4m3") && strcasecmp(fmt, "float8_e4m3fn")))
		return err_refuse(e,
				  CONFIG ": the checkpoint is quantised by quant_method '%s'%s%s, "
					 "which this version does not read (it reads fp8, e4m3, "
					 "with weight_block_size); use the BF16 checkpoint",
				  method, strcmp(method, "fp8") ? "" : ", fmt ",
				  strcmp(method, "fp8") ? "" : fmt);
	if (read_block(o, size, e))
		return -1;
	for (int i = 0; i < 3; i++) {
		q->layout[i] = (struct quant){ .code = CODE_F8_E4M3,
					       .block_rows = size[0],
					       .block_cols = size[1],
					       .scale = scales[i],
					       .scale_suffix = ".weight_scale_inv" };
		q->list[i] = &q->layout[i];
	}
	return 0;
}
