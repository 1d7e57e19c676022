/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokens: the file is public, so nothing in it is believed: structure and metadata are checked when
 * it is opened, every id and mask value and the hash when it is verified. Integers lie in the file
 * in little-endian order, as on every machine this runs on.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "digest.h"
#include "err.h"
#include "json.h"
#include "mem.h"
#include "recipe.h"
#include "text.h"
#include "tokens.h"

#define PIECE ((size_t)1 << 20) /* bytes read at a time */

/* ---- opening --------------------------------------------------------------------------------- */

static int meta_text(const struct tokens *t, const char *key, const char **out, struct err *e)
{
	*out = safetensors_meta(&t->file, key);
	return *out ? 0 : err_refuse(e, "its metadata lacks '%s'", key);
}

static int meta_is(const struct tokens *t, const char *key, const char *want, struct err *e)
{
	const char *have;

	if (meta_text(t, key, &have, e))
		return -1;
	return strcmp(have, want)
		       ? err_refuse(e, "its metadata says %s '%s', not '%s'", key, have, want)
		       : 0;
}

/* A decimal integer and nothing else. */
static int meta_int(const struct tokens *t, const char *key, int64_t min, int64_t max, int64_t *out,
		    struct err *e)
{
	const char *s, *digits;
	char *end;
	long long v;

	if (meta_text(t, key, &s, e))
		return -1;
	digits = s + (*s == '-');
	errno = 0;
	v = strtoll(s, &end, 10);
	if (!*digits || strspn(digits, "0123456789") != strlen(digits) || errno || v < min ||
	    v > max)
		return err_refuse(e, "its metadata says %s '%s': it must be a whole number from %"
				  PRId64 " to %" PRId64, key, s, min, max);
	*out = v;
	return 0;
}

static int meta_bool(const struct tokens *t, const char *key, bool *out, struct err *e)
{
	const char *s;

	if (meta_text(t, key, &s, e))
		return -1;
	*out = !strcmp(s, "true");
	return *out || !strcmp(s, "false")
		       ? 0
		       : err_refuse(e, "its metadata says %s '%s': it must be true or false", key,
				    s);
}

/* A hash of `digits` lower-case hexadecimal digits, or with `empty` none. */
static int meta_hash(const struct tokens *t, const char *key, size_t digits, bool empty,
		     const char **out, struct err *e)
{
	if (meta_text(t, key, out, e))
		return -1;
	if ((empty && !**out) ||
	    (strlen(*out) == digits && strspn(*out, "0123456789abcdef") == digits))
		return 0;
	return err_refuse(e, "its metadata says %s '%s': it must be %zu hexadecimal digits in "
			  "lower case", key, *out, digits);
}

/* Of several named templates there is no one hash, and dspark-tokenize says so in its place. */
static int meta_template(struct tokens *t, struct err *e)
{
	const char *key = "chat_template_sha256";

	if (meta_text(t, key, &t->template_sha256, e))
		return -1;
	if (!strncmp(t->template_sha256, "not available", 13))
		return err_refuse(e, "the tokenizer has several chat templates: say in "
				  "recipe_args.chat_template which one is meant and tokenize "
				  "again");
	return meta_hash(t, key, SHA256_HEX - 1, false, &t->template_sha256, e);
}

/* JSON: null or a string. */
static int meta_split(struct tokens *t, struct err *e)
{
	const char *s;
	json_t *v;
	int rc = -1;

	if (meta_text(t, "train_split", &s, e))
		return -1;
	v = json_loads(s, JSON_DECODE_ANY, NULL);
	if (json_is_string(v)) {
		t->split_text = mem_strdup(json_string_value(v), e);
		t->train_split = t->split_text;
		rc = t->split_text ? 0 : -1;
	} else if (json_is_null(v)) {
		rc = 0;
	} else {
		err_refuse(e,
			   "its metadata says train_split %s: it must be null or a string, as JSON",
			   s);
	}
	json_decref(v);
	return rc;
}

static int read_meta(struct tokens *t, struct err *e)
{
	int64_t rows;

	if (meta_is(t, "format", "dspark-tokens", e) || meta_is(t, "version", "1", e) ||
	    meta_int(t, "seq_length", 1, INT32_MAX, &t->seq_length, e) ||
	    meta_int(t, "num_rows", 0, INT64_MAX, &rows, e) ||
	    meta_int(t, "pad_token_id", 0, INT32_MAX, &t->pad_token_id, e) ||
	    meta_int(t, "shuffle_seed", INT64_MIN, INT64_MAX, &t->shuffle_seed, e) ||
	    meta_template(t, e) ||
	    meta_text(t, "train_data_path", &t->train_data_path, e) || meta_split(t, e) ||
	    meta_bool(t, "mask_reasoning_content", &t->mask_reasoning_content, e) ||
	    meta_bool(t, "mask_generation_prompt", &t->mask_generation_prompt, e) ||
	    meta_hash(t, "rows_xxh3_128", DIGEST_HEX - 1, false, &t->rows_xxh3, e) ||
	    meta_hash(t, "tokenizer_xxh3_128", DIGEST_HEX - 1, true, &t->tokenizer_xxh3, e))
		return -1;
	if (rows != t->rows)
		return err_refuse(e,
				  "its metadata says num_rows %" PRId64
				  ", but row_offsets has %" PRId64 " rows",
				  rows, t->rows);
	return 0;
}

/* A tensor of one dimension. */
static const struct st_tensor *find_vector(const struct tokens *t, const char *name,
					   enum dtype dtype, struct err *e)
{
	const struct st_tensor *v = safetensors_find(&t->file, name);

	if (!v)
		err_refuse(e, "it has no tensor '%s'", name);
	else if (v->dtype != dtype || v->ndim != 1)
		err_refuse(e, "its tensor '%s' is %s of %d dimensions: it must be %s of one", name,
			   dtype_name(v->dtype), v->ndim, dtype_name(dtype));
	else
		return v;
	return NULL;
}

static int check_offsets(const struct tokens *t, struct err *e)
{
	if (t->offset[0])
		return err_refuse(e, "row_offsets begins with %" PRId64 ", not 0", t->offset[0]);
	for (int64_t i = 0; i < t->rows; i++) {
		int64_t begin = t->offset[i], end = t->offset[i + 1];

		if (end < begin || end > t->total)
			return err_refuse(e,
					  "row_offsets must ascend to %" PRId64 ", but row %" PRId64
					  " goes from %" PRId64 " to %" PRId64,
					  t->total, i, begin, end);
		if (end == begin)
			return err_refuse(e, "row %" PRId64 " has no token: leave it out, as "
					  "dspark-tokenize --min-loss-tokens 1 does", i);
		if (end - begin > t->seq_length)
			return err_refuse(e,
					  "row %" PRId64 " has %" PRId64
					  " tokens, more than seq_length, %" PRId64 ": cut it",
					  i, end - begin, t->seq_length);
	}
	if (t->offset[t->rows] != t->total)
		return err_refuse(e,
				  "row_offsets ends at %" PRId64 ", but input_ids has %" PRId64
				  " tokens",
				  t->offset[t->rows], t->total);
	return 0;
}

static int read_all(struct tokens *t, struct err *e)
{
	const struct st_tensor *offsets;

	t->ids = find_vector(t, "input_ids", DT_I32, e);
	t->mask = t->ids ? find_vector(t, "loss_mask", DT_U8, e) : NULL;
	offsets = t->mask ? find_vector(t, "row_offsets", DT_I64, e) : NULL;
	if (!offsets)
		return -1;
	t->total = t->ids->shape[0];
	if (t->mask->shape[0] != t->total)
		return err_refuse(e,
				  "loss_mask has %" PRId64 " values for the %" PRId64
				  " tokens of input_ids",
				  t->mask->shape[0], t->total);
	if (offsets->shape[0] < 1)
		return err_refuse(e, "row_offsets is empty: it must begin with 0");
	t->rows = offsets->shape[0] - 1;
	if (read_meta(t, e))
		return -1;
	t->offset = mem_calloc((size_t)offsets->shape[0], sizeof *t->offset, e);
	if (!t->offset || safetensors_read(&t->file, offsets, t->offset, 0,
					   (size_t)offsets->shape[0] * sizeof *t->offset, e))
		return -1;
	return check_offsets(t, e);
}

int tokens_open(struct tokens *t, const char *path, struct err *e)
{
	*t = (struct tokens)TOKENS_INIT;
	if (safetensors_open(&t->file, path, e))
		goto bad;
	if (read_all(t, e)) {
		if (!strstr(e->text, path))
			err_context(e, "tokens file '%s'", path);
		goto bad;
	}
	return 0;
bad:
	tokens_release(t);
	return -1;
}

void tokens_release(struct tokens *t)
{
	safetensors_release(&t->file);
	free(t->offset);
	free(t->split_text);
	*t = (struct tokens)TOKENS_INIT;
}

/* ---- reading --------------------------------------------------------------------------------- */

int tokens_rows(const struct tokens *t, int64_t first, int64_t n, int32_t *ids, uint8_t *mask,
		struct err *e)
{
	int64_t begin = t->offset[first], count = t->offset[first + n] - begin;

	if (ids && safetensors_read(&t->file, t->ids, ids, (uint64_t)begin * sizeof *ids,
				    (size_t)count * sizeof *ids, e))
		return -1;
	return mask ? safetensors_read(&t->file, t->mask, mask, (uint64_t)begin, (size_t)count, e)
		    : 0;
}

/*
 * The row that token `at` belongs to: rows are not empty, so it is the last that begins at or
 * before it.
 */
static int64_t row_of(const struct tokens *t, int64_t at)
{
	int64_t low = 0, high = t->rows;

	while (high - low > 1) {
		int64_t middle = low + (high - low) / 2;

		if (t->offset[middle] <= at)
			low = middle;
		else
			high = middle;
	}
	return low;
}

static int bad_token(const struct tokens *t, int64_t at, const char *what, int64_t value,
		     const char *remedy, struct err *e)
{
	int64_t row = row_of(t, at);

	return err_refuse(e,
			  "tokens file '%s': row %" PRId64 ", position %" PRId64 ": %s %" PRId64
			  " %s",
			  t->file.path, row, at - t->offset[row], what, value, remedy);
}

static int check_ids(const struct tokens *t, const int32_t *ids, int64_t first, int64_t n,
		     int64_t vocab, struct err *e)
{
	for (int64_t i = 0; i < n; i++) {
		if (ids[i] < 0 || ids[i] >= vocab)
			return bad_token(t, first + i, "token id", ids[i], "is outside the "
					 "target's vocabulary: tokenize with its own tokenizer", e);
	}
	return 0;
}

static int check_mask(const struct tokens *t, const uint8_t *mask, int64_t first, int64_t n,
		      struct err *e)
{
	for (int64_t i = 0; i < n; i++) {
		if (mask[i] > 1)
			return bad_token(t, first + i, "loss_mask value", mask[i],
					 "is neither 0 nor 1: tokenize again", e);
	}
	return 0;
}

/* Reads one tensor in pieces into the hash; the ids and the mask are looked at on the way. */
static int verify_tensor(const struct tokens *t, const struct st_tensor *v, int64_t vocab,
			 void *buf, struct digest *d, struct err *e)
{
	uint64_t size = v->end - v->begin;
	size_t n;

	for (uint64_t off = 0; off < size; off += n) {
		n = size - off < PIECE ? (size_t)(size - off) : PIECE;
		if (safetensors_read(&t->file, v, buf, off, n, e))
			return -1;
		digest_update(d, buf, n);
		if (v == t->ids && check_ids(t, buf, (int64_t)off / 4, (int64_t)n / 4, vocab, e))
			return -1;
		if (v == t->mask && check_mask(t, buf, (int64_t)off, (int64_t)n, e))
			return -1;
	}
	return 0;
}

int tokens_verify(const struct tokens *t, int64_t vocab, struct err *e)
{
	const struct st_tensor *offsets = safetensors_find(&t->file, "row_offsets");
	struct digest *d = digest_new(e);
	char hex[DIGEST_HEX];
	void *buf = mem_aligned(PIECE, e);
	int rc = -1;

	if (!d || !buf)
		goto out;
	if (verify_tensor(t, t->ids, vocab, buf, d, e) ||
	    verify_tensor(t, t->mask, vocab, buf, d, e) ||
	    verify_tensor(t, offsets, vocab, buf, d, e))
		goto out;
	digest_hex(d, hex);
	if (strcmp(hex, t->rows_xxh3))
		err_refuse(e, "tokens file '%s' is damaged: its rows hash to %s, its metadata "
			   "says %s: tokenize again", t->file.path, hex, t->rows_xxh3);
	else if (t->pad_token_id >= vocab)
		err_refuse(e,
			   "tokens file '%s': pad_token_id %" PRId64
			   " is outside the target's vocabulary of %" PRId64
			   ": tokenize with its own tokenizer",
			   t->file.path, t->pad_token_id, vocab);
	else
		rc = 0;
out:
	digest_free(d);
	free(buf);
	return rc;
}

/* ---- the recipe's? --------------------------------------------------------------------------- */

static void differ_text(struct text *out, const char *key, const char *have, const char *want)
{
	if (have == want || (have && want && !strcmp(have, want)))
		return;
	text_printf(out, "%s%s is %s%s%s, not %s%s%s", out->len ? "; " : "", key, have ? "'" : "",
		    have ? have : "null", have ? "'" : "", want ? "'" : "", want ? want : "null",
		    want ? "'" : "");
}

static void differ_int(struct text *out, const char *key, int64_t have, int64_t want)
{
	if (have != want)
		text_printf(out, "%s%s is %" PRId64 ", not %" PRId64, out->len ? "; " : "", key,
			    have, want);
}

static void differ_bool(struct text *out, const char *key, bool have, bool want)
{
	if (have != want)
		text_printf(out, "%s%s is %s, not %s", out->len ? "; " : "", key,
			    have ? "true" : "false", want ? "true" : "false");
}

int tokens_match(const struct tokens *t, const struct recipe *r, struct err *e)
{
	struct text out = TEXT_INIT;
	int rc;

	differ_int(&out, "seq_length", t->seq_length, r->seq_length);
	differ_text(&out, "train_data_path", t->train_data_path, r->train_data_path);
	differ_text(&out, "train_split", t->train_split, r->train_split);
	differ_int(&out, "shuffle_seed", t->shuffle_seed, r->shuffle_seed);
	differ_bool(&out, "mask_reasoning_content", t->mask_reasoning_content,
		    r->mask_reasoning_content);
	differ_bool(&out, "mask_generation_prompt", t->mask_generation_prompt,
		    r->mask_generation_prompt);
	rc = text_ok(&out, e);
	if (!rc && out.len)
		rc = err_refuse(e, "tokens file '%s' was made for another recipe than '%s' (%s): "
				"run dspark-tokenize again", t->file.path, r->path, out.s);
	text_release(&out);
	return rc;
}
