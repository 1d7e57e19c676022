/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed weights: every code point, and every product of packed weights against the same numbers
 * unpacked, bit for bit: whatever blocks, scales, parts and sizes there are.
 */
#include <malloc.h>
#include <pthread.h>

#include "bed.h"
#include "quant.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static struct device dut;

static const enum dtype types[] = { DT_F32, DT_BF16 };

static const struct quant layouts[] = {
	{ CODE_F8_E4M3, 128, 128, DT_F32, NULL, ".weight_scale_inv", false },
	{ CODE_F8_E4M3, 128, 128, DT_F8_E8M0, NULL, ".weight_scale_inv", false },
	{ CODE_F8_E4M3, 32, 32, DT_F32, NULL, ".weight_scale_inv", false },
	{ CODE_F8_E4M3, 32, 32, DT_U8, NULL, ".scale", true },
	{ CODE_F8_E4M3, 1, 32, DT_U8, NULL, ".scale", false },
	{ CODE_F8_E4M3, 48, 5, DT_F32, NULL, ".scale", false },
	{ CODE_F8_E4M3, 7, 1, DT_BF16, NULL, ".scale", false },
	{ CODE_F8_E4M3, 128, 10000, DT_F32, NULL, ".scale", false },
	{ CODE_MXFP4, 1, 32, DT_U8, ".weight_packed", ".weight_scale", false },
	{ CODE_MXFP4, 1, 32, DT_F8_E8M0, NULL, ".scale", true },
	{ CODE_MXFP4, 48, 5, DT_F32, NULL, ".scale", false },
	{ CODE_INT4, 1, 32, DT_BF16, ".weight_packed", ".weight_scale", false },
	{ CODE_INT4, 1, 128, DT_F32, ".weight_packed", ".weight_scale", false },
	{ CODE_INT4, 1, QUANT_ALL_COLS, DT_F16, ".weight_packed", ".weight_scale", false },
	{ CODE_INT4, 7, 11, DT_BF16, NULL, ".scale", false },
};

static const char *const codes[] = { "F8_E4M3", "MXFP4", "INT4" };

static const char *blocks(const struct quant *q)
{
	static char s[80];

	snprintf(s, sizeof s, "%s in blocks of %d x %d %s", codes[q->code], q->block_rows,
		 q->block_cols, dtype_name(q->scale));
	return s;
}

static const char *label(const char *fmt, ...)
{
	static char s[256];
	int n = snprintf(s, sizeof s, "%s %s: ", dut.be->name, dtype_recipe_name(dut.compute));
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(s + n, sizeof s - (size_t)n, fmt, ap);
	va_end(ap);
	return s;
}

static void *room(size_t bytes)
{
	struct err e = { 1, "no memory" };

	return bed_must(calloc(bytes + 1, 1), &e);
}

/* From 0 to n - 1. */
static int64_t draw(int64_t n)
{
	return (int64_t)((bed_random() * 0.5f + 0.5f) * 0.999f * (float)n);
}

/* ---- code points ----------------------------------------------------------------------------- */

/* By the definition of each format, in another way than the code does it. */
static double e4m3(int c)
{
	int exponent = c >> 3 & 15, mantissa = c & 7;
	double x = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);

	if (exponent == 15 && mantissa == 7)
		return NAN;
	return c & 128 ? -x : x;
}

static double e2m1(int c)
{
	int exponent = c >> 1 & 3, mantissa = c & 1;
	double x = exponent ? ldexp(2 + mantissa, exponent - 2) : ldexp(mantissa, -1);

	return c & 8 ? -x : x;
}

static double code_point(const struct quant *q, int c)
{
	return q->code == CODE_F8_E4M3 ? e4m3(c) : q->code == CODE_MXFP4 ? e2m1(c) : c - 8;
}

static double half(int h)
{
	int exponent = h >> 10 & 31, mantissa = h & 1023;
	double x = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);

	if (exponent == 31)
		x = mantissa ? NAN : INFINITY;
	return h & 0x8000 ? -x : x;
}

static double scale_point(const struct quant *q, const void *p)
{
	const unsigned char *b = p;
	float f;

	switch (q->scale) {
	case DT_F16:
		return half(b[1] << 8 | b[0]);
	case DT_U8:
	case DT_F8_E8M0:
		if (!*b && q->zero_scale_is_zero)
			return 0;
		return *b == 255 ? NAN : ldexp(1, *b - 127);
	case DT_BF16:
		f = dtype_bf16_to_f32((uint16_t)(b[1] << 8 | b[0]));
		return f;
	default:
		memcpy(&f, p, sizeof f);
		return f;
	}
}

static int code_points(const struct quant *q)
{
	return q->code == CODE_F8_E4M3 ? 256 : 16;
}

/* Code c of column i, in a row of zeros: as a checkpoint has it. */
static void put_code(const struct quant *q, void *row, int64_t i, unsigned c)
{
	uint32_t word;

	if (q->code == CODE_F8_E4M3) {
		((uint8_t *)row)[i] = (uint8_t)c;
	} else if (q->code == CODE_MXFP4) {
		((uint8_t *)row)[i / 2] |= (uint8_t)(i % 2 ? c << 4 : c);
	} else {
		memcpy(&word, (char *)row + i / 8 * 4, sizeof word);
		word |= c << 4 * (i % 8);
		memcpy((char *)row + i / 8 * 4, &word, sizeof word);
	}
}

static bool same_number(double a, double b)
{
	return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

static void test_tables(void)
{
	static const struct {
		int code;
		float value;
	} known[] = { { 0x00, 0 },    { 0x01, 0.001953125f }, { 0x07, 0.013671875f },
		      { 0x08, 0.015625f }, { 0x38, 1 },       { 0x3c, 1.5f },
		      { 0x7e, 448 },  { 0xb8, -1 },           { 0xfe, -448 } };
	static const float fp4[] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6 };
	struct quant q = layouts[3];
	int wrong = 0;

	for (int c = 0; c < 256; c++)
		wrong += !same_number(dtype_f8_e4m3_to_f32((uint8_t)c), e4m3(c));
	is_int(wrong, 0, "256 codes of F8_E4M3");
	for (int i = 0; i < COUNT(known); i++)
		wrong += dtype_f8_e4m3_to_f32((uint8_t)known[i].code) != known[i].value;
	is_int(wrong, 0, "known codes of F8_E4M3");
	for (int c = 0; c < 8; c++)
		wrong += e2m1(c) != (double)fp4[c] || e2m1(c | 8) != (double)-fp4[c];
	is_int(wrong, 0, "known codes of MXFP4");
	for (int c = 0; c < 256; c++)
		wrong += !same_number(dtype_f8_e8m0_to_f32((uint8_t)c),
				      c == 255 ? NAN : ldexp(1, c - 127));
	is_int(wrong, 0, "256 codes of F8_E8M0");
	ok(quant_scale(&q, "\0\1", 0) == 0 && quant_scale(&q, "\0\1", 1) == ldexpf(1, -126),
	   "a scale byte 0 that means 0");
	q.zero_scale_is_zero = false;
	ok(quant_scale(&q, "\0\1", 0) == ldexpf(1, -127), "a scale byte 0 that means 2^-127");
}

/* Scale point i: all of a dtype, of F32 every 65,537th. */
static void put_scale(const struct quant *q, void *p, uint32_t i)
{
	uint32_t word = q->scale == DT_F32 ? i << 16 | i : i;

	memcpy(p, &word, dtype_size(q->scale));
}

/* Every code point times every scale point, in rows of one block each, and in both nibbles. */
static void test_points(const struct quant *layout)
{
	struct quant q = *layout;
	int n = 2 * code_points(&q) - 1;
	uint32_t points = dtype_size(q.scale) == 1 ? 256 : 65536;
	unsigned char row[512] = { 0 }, scale[4];
	uint8_t each[512];
	float got[512];
	int64_t wrong = 0;

	q.block_cols = n;
	for (int i = 0; i < n; i++)
		put_code(&q, row, i, (unsigned)(i % code_points(&q)));
	quant_codes(each, &q, row, n);
	for (int i = 0; i < n; i++)
		wrong += each[i] != i % code_points(&q) ||
			 !same_number(quant_code(&q, each[i]), code_point(&q, each[i]));
	for (uint32_t p = 0; p < points; p++) {
		put_scale(&q, scale, p);
		quant_values(got, &q, row, scale, n);
		for (int i = 0; i < n; i++)
			wrong += !same_number(got[i], (float)(code_point(&q, i % code_points(&q)) *
							      scale_point(&q, scale)));
	}
	is_int(wrong, 0, "%d codes of %s times %u scales of %s%s", code_points(&q), codes[q.code],
	       points, dtype_name(q.scale), q.zero_scale_is_zero ? ", 0 meaning 0" : "");
}

/* Of the layouts with the same points. */
static bool is_first(int layout)
{
	const struct quant *q = &layouts[layout];

	for (int i = 0; i < layout; i++)
		if (layouts[i].code == q->code && layouts[i].scale == q->scale &&
		    layouts[i].zero_scale_is_zero == q->zero_scale_is_zero)
			return false;
	return true;
}

/* What a row of each takes, and scales from a place that is aligned to nothing. */
static void test_rows(void)
{
	static const struct {
		int layout, cols;
		size_t bytes;
	} row[] = { { 0, 1, 1 },  { 0, 33, 33 }, { 8, 1, 1 },	{ 8, 32, 16 },
		    { 8, 33, 17 }, { 11, 1, 4 },  { 11, 8, 4 }, { 11, 9, 8 } };
	unsigned char bytes[9] = { 0, 0, 0, 0x80, 0x3f, 0, 0, 0, 0x40 };
	float two[2];

	for (int i = 0; i < COUNT(row); i++)
		is_int((int64_t)quant_row_bytes(&layouts[row[i].layout], row[i].cols),
		       (int64_t)row[i].bytes, "bytes of %d codes of %s", row[i].cols,
		       codes[layouts[row[i].layout].code]);
	quant_scales(two, &layouts[0], bytes + 1, 0, 2);
	ok(two[0] == 1 && two[1] == 2, "scales at an odd address");
	is_int(quant_blocks(&layouts[13], 1 << 20), 1, "one block for all columns");
}

/* ---- weights --------------------------------------------------------------------------------- */

/* A packed weight on the host, and the same numbers as F32. */
struct source {
	const struct quant *q;
	int64_t count, rows, cols;
	size_t pitch;		/* bytes of a row of codes */
	char *codes;		/* [count, rows], as a checkpoint has them */
	char *scales;		/* [count, rows, blocks]: a row for each row */
	size_t strip;		/* bytes of one */
	float *values;
};

static void draw_scale(char *to, const struct quant *q)
{
	float f = 0.01f + 0.02f * (bed_random() + 1);

	if (dtype_is_float(q->scale))
		dtype_convert(to, q->scale, &f, DT_F32, 1);
	else
		*to = (char)(q->zero_scale_is_zero && !draw(6) ? 0 : 120 + draw(5));
}

static void draw_codes(struct source *s, int64_t row)
{
	char *at = s->codes + (size_t)row * s->pitch;

	for (int64_t i = 0; i < s->cols; i++) {
		unsigned c = (unsigned)draw(code_points(s->q));

		if (s->q->code == CODE_F8_E4M3 && (c & 127) == 127)
			c--;
		put_code(s->q, at, i, c);
		s->values[row * s->cols + i] = (float)code_point(s->q, (int)c);
	}
}

/* Parts of `part` rows (the last may be smaller) have grids of their own. */
static struct source source_make(const struct quant *q, int64_t count, int64_t rows, int64_t cols,
				 int64_t part)
{
	size_t strip = (size_t)quant_blocks(q, cols) * dtype_size(q->scale),
	       pitch = quant_row_bytes(q, cols);
	int64_t n = count * rows;
	struct source s = { q, count, rows, cols, pitch, room((size_t)n * pitch),
			    room((size_t)n * strip), strip,
			    room((size_t)(n * cols) * sizeof(float)) };

	for (int64_t i = 0; i < n; i++) {
		bool same = i % rows % part % q->block_rows != 0;
		char *row = s.scales + (size_t)i * strip;

		for (size_t b = 0; b < strip; b += dtype_size(q->scale))
			if (same)
				memcpy(row + b, row - strip + b, dtype_size(q->scale));
			else
				draw_scale(row + b, q);
		draw_codes(&s, i);
		for (int64_t c = 0; c < cols; c++)
			s.values[i * cols + c] *= (float)scale_point(
				q, row + (size_t)(c / q->block_cols) * dtype_size(q->scale));
	}
	return s;
}

static void source_free(struct source *s)
{
	free(s->codes);
	free(s->scales);
	free(s->values);
}

static int put_rows(struct weight *w, const struct source *s, int64_t index, int64_t row, int64_t n,
		    struct err *e)
{
	size_t at = (size_t)(index * s->rows + row);

	return dut.be->weight_fill(&dut, w, index, row, n, s->codes + at * s->pitch,
				   quant_stored(s->q), s->scales + at * s->strip, e);
}

static struct weight packed_weight(const struct source *s, enum weight_use use)
{
	return (struct weight){ .count = s->count,
				.rows = s->rows,
				.cols = s->cols,
				.use = use,
				.unit = WEIGHT_BULK,
				.stored = quant_stored(s->q),
				.quant = s->q };
}

/* From pieces out of order. */
static void fill_packed(struct weight *w, const struct source *s, enum weight_use use)
{
	struct err e = ERR_INIT;

	*w = packed_weight(s, use);
	bed_check(dut.be->weight_alloc(&dut, w, &e), &e);
	for (int64_t i = 0; i < s->count; i++) {
		int64_t a = s->rows / 3, b = s->rows - s->rows / 4;

		bed_check(put_rows(w, s, i, b, s->rows - b, &e), &e);
		bed_check(put_rows(w, s, i, 0, a, &e), &e);
		bed_check(put_rows(w, s, i, a, b - a, &e), &e);
	}
	bed_check(dut.be->weight_ready(&dut, w, &e), &e);
}

struct pair {
	struct source s;
	struct weight packed, plain;
};

static struct pair pair_make(const struct quant *q, enum weight_use use, int64_t count,
			     int64_t rows, int64_t cols, int64_t part)
{
	struct pair p = { .s = source_make(q, count, rows, cols, part) };

	fill_packed(&p.packed, &p.s, use);
	bed_weight(&dut, &p.plain, use, WEIGHT_BULK, DT_F32, count, rows, cols, p.s.values);
	return p;
}

static void pair_drop(struct pair *p)
{
	dut.be->weight_free(&dut, &p->packed);
	dut.be->weight_free(&dut, &p->plain);
	source_free(&p->s);
}

/* The bits of two results, which are dropped. */
static void same_bits(struct tensor got, struct tensor want, const char *what)
{
	char *g = bed_bytes(&dut, got), *w = bed_bytes(&dut, want);

	ok(!memcmp(g, w, (size_t)(got.rows * got.cols) * dtype_size(got.dtype)), "%s", what);
	free(g);
	free(w);
	bed_drop(&dut, got);
	bed_drop(&dut, want);
}

/* The same of F32 where NaN is NaN, of any sign and bits. */
static void same_numbers(struct tensor got, struct tensor want, const char *what)
{
	float *g = bed_floats(&dut, got), *w = bed_floats(&dut, want);
	int64_t wrong = 0;

	for (int64_t i = 0; i < got.rows * got.cols; i++)
		wrong += !same_number(g[i], w[i]);
	is_int(wrong, 0, "%s", what);
	free(g);
	free(w);
	bed_drop(&dut, got);
	bed_drop(&dut, want);
}

/*
 * Rows of the identity times a weight are its numbers as operands, exactly: nothing is added to
 * them but zeros. All code points are among them.
 */
static void test_numbers(const struct quant *q, int64_t rows, int64_t cols)
{
	struct source s = source_make(q, 1, rows, cols, 90);
	float *one = room((size_t)(cols * cols) * sizeof *one), *got;
	struct tensor x, y = bed_tensor(&dut, DT_F32, cols, rows, 0, NULL);
	struct weight w;
	int64_t wrong = 0;

	for (int64_t i = 0; i < cols; i++)
		one[i * cols + i] = 1;
	x = bed_tensor(&dut, DT_F32, cols, cols, 0, one);
	fill_packed(&w, &s, USE_PRODUCT);
	dut.be->matmul(&dut, y, x, &w, NULL, false);
	got = bed_floats(&dut, y);
	for (int64_t r = 0; r < rows; r++)
		for (int64_t c = 0; c < cols; c++) {
			float want = s.values[r * cols + c];

			if (dut.compute == DT_BF16)
				want = dtype_bf16_to_f32(dtype_f32_to_bf16(want));
			wrong += got[c * rows + r] != want;
		}
	is_int(wrong, 0, "%s",
	       label("%d x %d numbers, %s", (int)rows, (int)cols, blocks(q)));
	dut.be->weight_free(&dut, &w);
	bed_drop(&dut, x);
	bed_drop(&dut, y);
	source_free(&s);
	free(one);
	free(got);
}

/*
 * A row for each scale point, with all code points: the bits of the same numbers given plain,
 * wherever they are too large, too small or no numbers.
 */
static void test_all_points(const struct quant *layout)
{
	struct quant q = *layout;
	int n = code_points(&q), points = dtype_size(q.scale) == 1 ? 256 : 1024;
	struct source s;
	struct weight w, plain;
	float *v = bed_numbers(3 * n);
	struct tensor x = bed_tensor(&dut, DT_F32, 3, n, 0, v),
		      a = bed_tensor(&dut, DT_F32, 3, points, 0, NULL),
		      b = bed_tensor(&dut, DT_F32, 3, points, 0, NULL);

	q.block_rows = 1;
	q.block_cols = n;
	s = source_make(&q, 1, points, n, points);
	memset(s.codes, 0, (size_t)points * s.pitch);
	for (int p = 0; p < points; p++) {
		char *scale = s.scales + (size_t)p * s.strip;

		put_scale(&q, scale, (uint32_t)(points == 256 ? p : p * 64 + 21));
		for (int c = 0; c < n; c++) {
			put_code(&q, s.codes + (size_t)p * s.pitch, c, (unsigned)c);
			s.values[p * n + c] = (float)(code_point(&q, c) * scale_point(&q, scale));
		}
	}
	fill_packed(&w, &s, USE_PRODUCT);
	bed_weight(&dut, &plain, USE_PRODUCT, WEIGHT_BULK, DT_F32, 1, points, n, s.values);
	dut.be->matmul(&dut, a, x, &w, NULL, false);
	dut.be->matmul(&dut, b, x, &plain, NULL, false);
	same_numbers(a, b, label("%d codes times %d scales, %s", n, points, blocks(&q)));
	dut.be->weight_free(&dut, &w);
	dut.be->weight_free(&dut, &plain);
	bed_drop(&dut, x);
	source_free(&s);
	free(v);
}

static void one_matmul(const struct quant *q, int64_t T, int64_t N, int64_t K, int64_t part)
{
	struct pair p = pair_make(q, USE_PRODUCT, 1, N, K, part);
	enum dtype out = draw(2) ? DT_F32 : DT_BF16;
	float *v = bed_numbers(T * K);
	struct tensor x = bed_tensor(&dut, types[draw(2)], T, K, 0, v),
		      a = bed_tensor(&dut, out, T, N, 0, NULL),
		      b = bed_tensor(&dut, out, T, N, 0, NULL);

	dut.be->matmul(&dut, a, x, &p.packed, NULL, false);
	dut.be->matmul(&dut, b, x, &p.plain, NULL, false);
	same_bits(a, b, label("matmul %d x %d x %d, %s", (int)T, (int)N, (int)K, blocks(q)));
	bed_drop(&dut, x);
	pair_drop(&p);
	free(v);
}

static void one_matmul_gate(const struct quant *q, int64_t T, int64_t I, int64_t K)
{
	struct pair p = pair_make(q, USE_GATED, 1, 2 * I, K, I);
	struct act act = { .kind = ACT_SILU };
	float *v = bed_numbers(T * K);
	struct tensor x = bed_tensor(&dut, types[draw(2)], T, K, 0, v),
		      a = bed_tensor(&dut, DT_BF16, T, I, 0, NULL),
		      b = bed_tensor(&dut, DT_BF16, T, I, 0, NULL);

	dut.be->matmul_gate(&dut, a, x, &p.packed, &act);
	dut.be->matmul_gate(&dut, b, x, &p.plain, &act);
	same_bits(a, b, label("matmul_gate %d x %d x %d, %s", (int)T, (int)I, (int)K, blocks(q)));
	bed_drop(&dut, x);
	pair_drop(&p);
	free(v);
}

static void one_experts(const struct quant *q, int64_t T, int64_t H, int64_t I, int count)
{
	struct pair up = pair_make(q, USE_GATED, count, 2 * I, H, I),
		    down = pair_make(q, USE_PRODUCT, count, H, I, H);
	float *v = bed_numbers(T * H), *ones = bed_numbers(T * 2);
	int32_t *id = room((size_t)T * 2 * sizeof *id);
	struct experts ex = { .count = count, .act = { .kind = ACT_SILU } };
	struct tensor x = bed_tensor(&dut, DT_BF16, T, H, 0, v), ids,
		      w = bed_tensor(&dut, DT_F32, T, 2, 0, ones),
		      a = bed_tensor(&dut, DT_F32, T, H, 0, NULL),
		      b = bed_tensor(&dut, DT_F32, T, H, 0, NULL);

	for (int64_t t = 0; t < T; t++) {
		id[2 * t] = (int32_t)draw(count);
		id[2 * t + 1] = (int32_t)(id[2 * t] + draw(count - id[2 * t]));
	}
	ids = bed_ints(&dut, T, 2, id);
	ex.gate_up = &up.packed;
	ex.down = &down.packed;
	dut.be->experts(&dut, a, x, ids, w, &ex, false);
	ex.gate_up = &up.plain;
	ex.down = &down.plain;
	dut.be->experts(&dut, b, x, ids, w, &ex, false);
	same_bits(a, b, label("experts of %d x %d, %d tokens, %s", (int)H, (int)I, (int)T,
			      blocks(q)));
	bed_drop(&dut, x);
	bed_drop(&dut, w);
	bed_drop(&dut, ids);
	pair_drop(&up);
	pair_drop(&down);
	free(v);
	free(ones);
	free(id);
}

static void test_products(void)
{
	static const int64_t sizes[][4] = { /* rows of x, out, in, of a part */
		{ 1, 1, 1, 1 },	     { 3, 65, 33, 20 },	   { 5, 300, 130, 77 },
		{ 130, 64, 64, 64 }, { 2, 517, 260, 130 }, { 7, 140, 3200, 140 },
	};

	for (int i = 0; i < COUNT(layouts); i++) {
		test_all_points(&layouts[i]);
		test_numbers(&layouts[i], 150, 70);
		test_numbers(&layouts[i], 70, 300);
		for (int k = 0; k < COUNT(sizes); k++) {
			one_matmul(&layouts[i], sizes[k][0], sizes[k][1], sizes[k][2], sizes[k][3]);
			one_matmul_gate(&layouts[i], sizes[k][0], sizes[k][1], sizes[k][2]);
		}
		one_experts(&layouts[i], 40, 70, 33, 3);
		one_experts(&layouts[i], 9, 130, 260, 2);
		/* rows of whole 16 bytes, in more steps than are under way at once */
		one_experts(&layouts[i], 40, 160, 224, 3);
	}
	/* K in several blocks, several tiles to a group */
	one_matmul(&layouts[0], 140, 200, 8300, 200);
	one_matmul(&layouts[5], 2, 70, 6300, 70);
	one_matmul(&layouts[8], 2, 70, 8300, 70);
	one_matmul(&layouts[11], 140, 200, 8300, 200);
}

/* ---- what else can happen -------------------------------------------------------------------- */

/* A NaN among the codes makes its row of the weight NaN, and no other. */
static void test_nan(uint8_t code)
{
	struct source s = source_make(&layouts[0], 1, 90, 40, 90);
	float *v = bed_numbers(2 * 40), *got;
	struct tensor x = bed_tensor(&dut, DT_F32, 2, 40, 0, v),
		      y = bed_tensor(&dut, DT_F32, 2, 90, 0, NULL);
	struct weight w;
	int wrong = 0;

	s.codes[33 * 40 + 7] = (char)code;
	fill_packed(&w, &s, USE_PRODUCT);
	dut.be->matmul(&dut, y, x, &w, NULL, false);
	got = bed_floats(&dut, y);
	for (int i = 0; i < 180; i++)
		wrong += (bool)isnan(got[i]) != (i % 90 == 33);
	is_int(wrong, 0, "%s", label("code %#x is NaN", code));
	dut.be->weight_free(&dut, &w);
	bed_drop(&dut, x);
	bed_drop(&dut, y);
	source_free(&s);
	free(v);
	free(got);
}

struct filler {
	struct weight *w;
	const struct source *s;
	int64_t first;
	bool failed;
};

static void *fill_some(void *arg)
{
	struct filler *f = arg;
	struct err e = ERR_INIT;

	for (int64_t r = f->first; r < f->s->rows; r += 4)
		f->failed |= put_rows(f->w, f->s, 0, r, 1, &e) != 0;
	return NULL;
}

/* Four threads, each every fourth row. */
static void test_threads(const struct quant *q)
{
	struct source s = source_make(q, 1, 300, 70, 110);
	struct weight w = packed_weight(&s, USE_PRODUCT), one;
	float *v = bed_numbers(3 * 70);
	struct tensor x = bed_tensor(&dut, DT_F32, 3, 70, 0, v),
		      a = bed_tensor(&dut, DT_F32, 3, 300, 0, NULL),
		      b = bed_tensor(&dut, DT_F32, 3, 300, 0, NULL);
	struct err e = ERR_INIT;
	struct filler f[4];
	pthread_t thread[4];
	bool failed = false;

	bed_check(dut.be->weight_alloc(&dut, &w, &e), &e);
	for (int i = 0; i < 4; i++) {
		f[i] = (struct filler){ &w, &s, i, false };
		pthread_create(&thread[i], NULL, fill_some, &f[i]);
	}
	for (int i = 0; i < 4; i++) {
		pthread_join(thread[i], NULL);
		failed |= f[i].failed;
	}
	bed_check(dut.be->weight_ready(&dut, &w, &e), &e);
	fill_packed(&one, &s, USE_PRODUCT);
	dut.be->matmul(&dut, a, x, &w, NULL, false);
	dut.be->matmul(&dut, b, x, &one, NULL, false);
	ok(!failed, "%s", label("four threads fill, %s", blocks(q)));
	same_bits(a, b, label("four threads fill what one does, %s", blocks(q)));
	dut.be->weight_free(&dut, &w);
	dut.be->weight_free(&dut, &one);
	bed_drop(&dut, x);
	source_free(&s);
	free(v);
}

/* Rows that nobody fills are zero, though a scale beside them is NaN. */
static void test_missing_rows(const struct quant *q)
{
	struct source s = source_make(q, 1, 200, 70, 200);
	struct weight w = packed_weight(&s, USE_PRODUCT);
	float *v = bed_numbers(70), *got, nan = NAN;
	struct tensor x = bed_tensor(&dut, DT_F32, 1, 70, 0, v),
		      y = bed_tensor(&dut, DT_F32, 1, 200, 0, NULL);
	struct err e = ERR_INIT;
	int wrong = 0;

	if (dtype_is_float(q->scale))
		dtype_convert(s.scales + 150 * s.strip, q->scale, &nan, DT_F32, 1);
	else
		s.scales[150 * s.strip] = (char)255;
	bed_check(dut.be->weight_alloc(&dut, &w, &e), &e);
	bed_check(put_rows(&w, &s, 0, 10, 20, &e), &e);
	bed_check(put_rows(&w, &s, 0, 150, 1, &e), &e);
	bed_check(dut.be->weight_ready(&dut, &w, &e), &e);
	dut.be->matmul(&dut, y, x, &w, NULL, false);
	got = bed_floats(&dut, y);
	for (int i = 0; i < 200; i++)
		wrong += i == 150 ? !isnan(got[i]) : i >= 10 && i < 30 ? got[i] == 0 : got[i] != 0;
	is_int(wrong, 0, "%s", label("rows that nobody filled, %s", blocks(q)));
	dut.be->weight_free(&dut, &w);
	bed_drop(&dut, x);
	bed_drop(&dut, y);
	source_free(&s);
	free(v);
	free(got);
}

static void refused(int rc, const struct err *e, const char *text, const char *what)
{
	ok(rc == -1 && e->code == EXIT_REFUSED && strstr(e->text, text), "%s",
	   label("%s: %s", what, e->text));
}

static void test_refusals(void)
{
	struct source s = source_make(&layouts[0], 1, 64, 40, 64), each = s;
	struct weight w = packed_weight(&s, USE_PRODUCT), plain = w, table = w;
	struct err a = ERR_INIT, b = ERR_INIT, c = ERR_INIT, d = ERR_INIT, e = ERR_INIT,
		   f = ERR_INIT;

	bed_check(dut.be->weight_alloc(&dut, &w, &e), &e);
	refused(dut.be->weight_fill(&dut, &w, 0, 0, 1, s.codes, DT_U8, s.scales, &f), &f,
		"cannot be filled with U8", "codes of another kind");
	refused(dut.be->weight_fill(&dut, &w, 0, 0, 1, s.codes, DT_F8_E4M3, NULL, &a), &a,
		"without scales", "codes without scales");
	refused(dut.be->weight_fill(&dut, &w, 0, 0, 1, s.values, DT_F32, s.scales, &b), &b,
		"cannot be filled with F32", "numbers with scales");
	each.scales = room(64 * s.strip);
	for (int i = 0; i < 64; i++)
		each.scales[(size_t)i * s.strip] = (char)i;
	refused(put_rows(&w, &each, 0, 0, 64, &c), &c, "different rows of scales",
		"scales of single rows where blocks are promised");
	dut.be->weight_free(&dut, &w);
	plain.quant = NULL;
	plain.stored = DT_F32;
	bed_check(dut.be->weight_alloc(&dut, &plain, &e), &e);
	refused(dut.be->weight_fill(&dut, &plain, 0, 0, 1, s.values, DT_F32, s.scales, &d), &d,
		"and scales", "scales of plain numbers");
	dut.be->weight_free(&dut, &plain);
	table.use = USE_TABLE;
	refused(dut.be->weight_alloc(&dut, &table, &e), &e, "packed as F8_E4M3", "a packed table");
	free(each.scales);
	source_free(&s);
}

/* What a budget counts: codes and scales. */
static void test_bytes(void)
{
	static const struct {
		int layout;
		double most;
	} want[] = { { 0, 0.55 }, { 1, 0.55 }, { 2, 0.55 }, { 3, 0.55 }, { 8, 0.28 }, { 9, 0.28 },
		     { 11, 0.3 }, { 12, 0.28 }, { 13, 0.27 } };

	for (int i = 0; i < COUNT(want); i++) {
		const struct quant *q = &layouts[want[i].layout];
		struct weight w = { .count = 8,
				    .rows = 1408,
				    .cols = 2048,
				    .use = USE_PRODUCT,
				    .stored = quant_stored(q),
				    .quant = q };
		uint64_t packed = weight_bytes(&w, DT_BF16), plain;

		w.quant = NULL;
		w.stored = DT_BF16;
		plain = weight_bytes(&w, DT_BF16);
		ok((double)packed <= want[i].most * (double)plain,
		   "%s take %.3f of the memory of BF16", blocks(q),
		   (double)packed / (double)plain);
	}
}

#define COPIES 6
#define HEAP_NOISE 16384	/* freed pieces that the allocator still counts */

static size_t heap(void)
{
	struct mallinfo2 m = mallinfo2();

	return m.uordblks + m.hblkhd;
}

/* What a device takes, after a first weight with which comes what is made once for all. */
static void test_memory(void)
{
	for (int i = 0; i < COUNT(layouts); i++) {
		struct source s = source_make(&layouts[i], 2, 200 + 100 * (i % 3), 333, 70);
		struct weight w[1 + COPIES];
		size_t before = 0, each;
		uint64_t most;

		for (int k = 0; k <= COPIES; k++) {
			fill_packed(&w[k], &s, i % 2 ? USE_GATED : USE_PRODUCT);
			before = k ? before : heap();
		}
		each = (heap() - before) / COPIES;
		most = weight_bytes(&w[0], dut.compute);
		ok(each <= most + HEAP_NOISE / COPIES, "%s",
		   label("%d x %d, %s take %zu of %llu bytes", (int)s.rows, (int)s.cols,
			 blocks(s.q), each, (unsigned long long)most));
		for (int k = 0; k <= COPIES; k++)
			dut.be->weight_free(&dut, &w[k]);
		source_free(&s);
	}
}

int main(int argc, char **argv)
{
	static const int chosen[] = { 0, 2, 8, 11 };

	(void)argc;
	if (!bed_forced_isa()) {
		test_tables();
		for (int i = 0; i < COUNT(layouts); i++)
			if (is_first(i))
				test_points(&layouts[i]);
		test_rows();
		test_bytes();
	}
	for (const char *const *name = bed_backends(); *name; name++)
		for (int c = 0; c < COUNT(types); c++) {
			if (!strcmp(*name, "ref") && bed_forced_isa())
				continue;
			bed_open(&dut, *name, types[c], 2);
			test_products();
			test_nan(0x7f);
			test_nan(0xff);
			for (int i = 0; i < COUNT(chosen); i++) {
				test_threads(&layouts[chosen[i]]);
				test_missing_rows(&layouts[chosen[i]]);
			}
			test_refusals();
			test_memory();
			dut.be->close(&dut);
		}
	if (backend_names()[1])
		bed_each_isa(argv[0]);
	return tap_end();
}
