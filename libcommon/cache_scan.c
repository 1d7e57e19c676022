/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_scan: one pass over a file. Floats are judged eight bytes at a time by their bits: a value
 * is not finite when its exponent is all ones, and adding one to such an exponent carries into the
 * sign bit that was masked off.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache_scan.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "mem.h"

#if defined __GNUC__ && !defined __clang__
#pragma GCC optimize("O3")	/* at -O2 gcc vectorises only loops of known length */
#endif

#define PIECE        ((size_t)256 << 10)	/* read, hashed and judged in a core's own cache */
#define FAULTS_SHOWN 8

void faults_add(struct faults *f, const char *fmt, ...)
{
	char line[512];
	va_list ap;

	if (f->n++ >= FAULTS_SHOWN)
		return;
	va_start(ap, fmt);
	vsnprintf(line, sizeof line, fmt, ap);
	va_end(ap);
	text_printf(&f->text, "%s\n", line);
}

void faults_release(struct faults *f)
{
	text_release(&f->text);
	*f = (struct faults){ 0 };
}

struct pattern {
	uint64_t exponent, one, sign; /* of every lane of 8 bytes */
};

static struct pattern pattern_of(enum dtype d)
{
	switch (d) {
	case DT_BF16:
		return (struct pattern){ 0x7f807f807f807f80, 0x0080008000800080,
					 0x8000800080008000 };
	case DT_F16:
		return (struct pattern){ 0x7c007c007c007c00, 0x0400040004000400,
					 0x8000800080008000 };
	default:
		return (struct pattern){ 0x7f8000007f800000, 0x0080000000800000,
					 0x8000000080000000 };
	}
}

bool scan_finite(const void *p, size_t bytes, enum dtype d, bool *zero)
{
	const struct pattern k = pattern_of(d);
	const char *s = p;
	uint64_t bad = 0, any = 0, w;
	size_t i;

	for (i = 0; i + 8 <= bytes; i += 8) {
		memcpy(&w, s + i, 8);
		bad |= (w & k.exponent) + k.one;
		any |= w;
	}
	if (i < bytes) {
		w = 0;
		memcpy(&w, s + i, bytes - i);
		bad |= (w & k.exponent) + k.one;
		any |= w;
	}
	*zero = !(any & ~k.sign);
	return !(bad & k.sign);
}

static bool is_zero(const char *p, size_t n)
{
	return !n || (!*p && !memcmp(p, p + 1, n - 1));
}

/* ---- one shard ---------------------------------------------------------------- */

struct scan {
	const struct cache_view *v;
	struct shard_head head;
	struct faults *f;
	struct digest *digest;
	char *piece;        /* PIECE bytes, or one position, or a row if that is less */
	int64_t *line;      /* [S] */
	bool *real;         /* [S]: must not be zero */
	const int64_t *ids; /* [L] captured layers */
	int64_t row;
};

/* How often and where first something is wrong in one tensor of one row. */
struct tally {
	int64_t n, position, layer;
};

static void count(struct tally *t, int64_t position, int64_t layer)
{
	if (t->n++)
		return;
	t->position = position;
	t->layer = layer;
}

static void report(struct scan *s, const struct tally *t, enum shard_tensor k, const char *what)
{
	char layer[48] = "", more[64] = "";

	if (!t->n)
		return;
	if (k == SHARD_STATES && t->layer >= 0)
		snprintf(layer, sizeof layer, " (layer %lld)", (long long)s->ids[t->layer]);
	if (t->n > 1)
		snprintf(more, sizeof more, " and %lld more", (long long)t->n - 1);
	faults_add(s->f, "row %lld position %lld%s of '%s'%s: %s", (long long)s->row,
		   (long long)t->position, layer, shard_tensor_name(k), more, what);
}

static int read_piece(struct scan *s, enum shard_tensor k, int64_t first, int64_t n, void *buf)
{
	struct err e = ERR_INIT;

	if (!shard_read(&s->head, &s->v->g, k, s->row, first, n, buf, &e))
		return 0;
	faults_add(s->f, "row %lld: %s", (long long)s->row, e.text);
	return -1;
}

static void check_hash(struct scan *s, enum shard_tensor k)
{
	char hex[DIGEST_HEX];

	if (!s->head.hash[k])
		return;
	digest_hex(s->digest, hex);
	if (memcmp(hex, s->head.hash[k] + s->row * DIGEST_HEX, DIGEST_HEX - 1))
		faults_add(s->f, "row %lld of '%s': its bytes do not have their hash",
			   (long long)s->row, shard_tensor_name(k));
}

/*
 * ids and mask: `max` is the first value too large; from `length` on every value must be `pad` (-1:
 * any).
 */
static int scan_integers(struct scan *s, enum shard_tensor k, int64_t length, int64_t max,
			 int64_t pad)
{
	struct tally range = { 0 }, pads = { 0 };
	int64_t i, seq = s->v->g.seq_length;

	if (read_piece(s, k, 0, seq, s->line))
		return -1;
	for (i = 0; i < seq; i++) {
		if (s->line[i] < 0 || s->line[i] >= max)
			count(&range, i, 0);
		else if (i >= length && pad >= 0 && s->line[i] != pad)
			count(&pads, i, 0);
	}
	digest_reset(s->digest);
	digest_update(s->digest, s->line, (size_t)length * sizeof *s->line);
	report(s, &range, k,
	       k == SHARD_IDS ? "a token id outside the vocabulary" : "neither 0 nor 1");
	report(s, &pads, k,
	       k == SHARD_IDS ? "a pad that is not the pad id" : "a pad that is not 0");
	check_hash(s, k);
	return 0;
}

/* n positions from `first` in s->piece. */
static void scan_positions(struct scan *s, enum shard_tensor k, int64_t first, int64_t n,
			   struct tally *bad, struct tally *blank)
{
	const struct geometry *g = &s->v->g;
	size_t slice = (size_t)g->hidden * dtype_size(g->dtype);
	int layers = k == SHARD_STATES ? g->nids : 1, l;
	const char *p = s->piece;
	int64_t i;
	bool zero;

	for (i = first; i < first + n; i++)
		for (l = 0; l < layers; l++, p += slice) {
			if (!scan_finite(p, slice, g->dtype, &zero))
				count(bad, i, l);
			else if (zero && s->real[i] && (k == SHARD_LAST || s->ids[l] >= 0))
				count(blank, i, l);
		}
}

static int scan_states(struct scan *s, enum shard_tensor k, int64_t length)
{
	const struct geometry *g = &s->v->g;
	size_t width = geometry_token_bytes(g, k);
	int64_t step = width < PIECE ? (int64_t)(PIECE / width) : 1, i, n;
	struct tally bad = { 0 }, blank = { 0 }, pads = { 0 };

	digest_reset(s->digest);
	for (i = 0; i < length; i += n) {
		n = length - i < step ? length - i : step;
		if (read_piece(s, k, i, n, s->piece))
			return -1;
		if (s->head.hash[k])
			digest_update(s->digest, s->piece, (size_t)n * width);
		scan_positions(s, k, i, n, &bad, &blank);
	}
	for (i = length;
	     i < g->seq_length && (i = shard_skip_hole(&s->head, g, k, s->row, i)) < g->seq_length;
	     i += n) {
		n = g->seq_length - i < step ? g->seq_length - i : step;
		if (read_piece(s, k, i, n, s->piece))
			return -1;
		if (!is_zero(s->piece, (size_t)n * width))
			count(&pads, i, -1);
	}
	report(s, &bad, k, "not finite");
	report(s, &blank, k, "all zero: it was never computed");
	report(s, &pads, k, "a pad that is not zero");
	check_hash(s, k);
	return 0;
}

static int scan_row(struct scan *s, int64_t row)
{
	const struct geometry *g = &s->v->g;
	bool ours = s->head.row_tokens != NULL;
	int64_t length = ours ? s->head.row_tokens[row] : g->seq_length, i;

	s->row = row;
	if (scan_integers(s, SHARD_IDS, length, g->vocab, ours ? g->pad_token_id : -1) ||
	    scan_integers(s, SHARD_MASK, length, 2, ours ? 0 : -1))
		return -1;
	for (i = 0; i < g->seq_length; i++)
		s->real[i] = ours ? i < length : s->line[i] == 1;
	return scan_states(s, SHARD_STATES, length) || scan_states(s, SHARD_LAST, length) ? -1 : 0;
}

static int64_t *layer_ids(const struct cache_view *v, struct err *e)
{
	const json_t *list =
		json_object_get(json_object_get(v->identity, "manifest"), "target_layer_ids");
	int64_t *ids = mem_calloc((size_t)v->g.nids, sizeof *ids, e);
	int i;

	for (i = 0; ids && i < v->g.nids; i++)
		ids[i] = json_integer_value(json_array_get(list, (size_t)i));
	return ids;
}

static int scan_begin(struct scan *s, int64_t **ids, struct err *e)
{
	const struct geometry *g = &s->v->g;
	size_t width = geometry_token_bytes(g, SHARD_STATES), row = width * (size_t)g->seq_length;

	s->digest = digest_new(e);
	s->piece = mem_aligned(row < PIECE ? row : width > PIECE ? width : PIECE, e);
	s->line = mem_calloc((size_t)g->seq_length, sizeof *s->line, e);
	s->real = mem_calloc((size_t)g->seq_length, sizeof *s->real, e);
	s->ids = *ids = layer_ids(s->v, e);
	return s->digest && s->piece && s->line && s->real && s->ids ? 0 : -1;
}

/*
 * A file that cannot be opened for what it holds is a fault of the cache; memory and descriptors
 * are ours.
 */
static int take_fault(struct faults *f, struct err *why, struct err *e)
{
	if (why->code != EXIT_REFUSED)
		return err_fail(e, "%s", why->text);
	faults_add(f, "%s", why->text);
	return 0;
}

int cache_scan_shard(const struct cache_view *v, int64_t i, struct faults *f,
		     char header[DIGEST_HEX], void (*read)(void *ctx, uint64_t bytes), void *ctx,
		     struct err *e)
{
	struct scan s = { .v = v, .head = SHARD_HEAD_INIT, .f = f };
	struct err why = ERR_INIT;
	int64_t *ids = NULL, row;
	int rc = -1;

	if (scan_begin(&s, &ids, e))
		goto out;
	if (cache_view_shard(v, i, &s.head, &why)) {
		rc = take_fault(f, &why, e);
		goto out;
	}
	memcpy(header, s.head.header_xxh3, DIGEST_HEX);
	for (row = 0; row < s.head.rows && !scan_row(&s, row); row++)
		if (read)
			read(ctx, (s.head.file.size - s.head.file.data) / (uint64_t)s.head.rows);
	rc = text_ok(&f->text, e);
out:
	shard_head_release(&s.head);
	digest_free(s.digest);
	free(s.piece);
	free(s.line);
	free(s.real);
	free(ids);
	return rc;
}

/* ---- target weights ---------------------------------------------------------------- */

static void scan_matrix(const struct cache_view *v, const struct weights_head *h, int which,
			char *piece, struct digest *d, struct faults *f)
{
	const struct st_tensor *t = h->tensor[which];
	uint64_t off, size = t->end - t->begin;
	char hex[DIGEST_HEX];
	struct err e = ERR_INIT;
	bool finite = true, zero, blank = true;
	size_t n;

	digest_reset(d);
	for (off = 0; off < size; off += n) {
		n = size - off < PIECE ? (size_t)(size - off) : PIECE;
		if (safetensors_read(&h->file, t, piece, off, n, &e)) {
			faults_add(f, "%s", e.text);
			return;
		}
		digest_update(d, piece, n);
		finite &= scan_finite(piece, n, v->g.dtype, &zero);
		blank &= zero;
	}
	digest_hex(d, hex);
	if (!finite)
		faults_add(f, "'%s' holds values that are not finite", t->name);
	if (blank)
		faults_add(f, "'%s' is all zero", t->name);
	if (h->hash[which] && strcmp(hex, h->hash[which]))
		faults_add(f, "'%s': its bytes do not have their hash", t->name);
}

int cache_scan_weights(const struct cache_view *v, struct faults *f, char header[DIGEST_HEX],
		       struct err *e)
{
	struct weights_head h = WEIGHTS_HEAD_INIT;
	char *piece = mem_aligned(PIECE, e);
	struct digest *d = digest_new(e);
	struct err why = ERR_INIT;
	int rc = -1;

	if (!piece || !d)
		goto out;
	if (cache_view_weights(v, &h, &why)) {
		rc = take_fault(f, &why, e);
		goto out;
	}
	memcpy(header, h.header_xxh3, DIGEST_HEX);
	scan_matrix(v, &h, 0, piece, d, f);
	scan_matrix(v, &h, 1, piece, d, f);
	rc = text_ok(&f->text, e);
out:
	weights_head_release(&h);
	digest_free(d);
	free(piece);
	return rc;
}
