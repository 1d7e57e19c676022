/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens files: a good one, and a table of what is wrong with others. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "digest.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "log.h"
#include "mem.h"
#include "recipe.h"
#include "tap.h"
#include "text.h"
#include "tokens.h"

#define ROWS 3
#define TOKENS 8

static char dir[] = "/tmp/dspark-tokens.XXXXXX";
static char sha[SHA256_HEX];

/* One file: three tensors in the order of their fields, and metadata. */
struct file {
	int32_t ids[TOKENS];
	uint8_t mask[TOKENS];
	int64_t offset[ROWS + 1];
	struct st_tensor tensor[3];
	json_t *meta;
	size_t drop;		/* bytes missing at the end */
};

static struct st_tensor vector(const char *name, enum dtype dtype, int64_t n)
{
	return (struct st_tensor){
		.name = (char *)name, .dtype = dtype, .ndim = 1, .shape = { n }
	};
}

static void set(struct file *f, const char *key, const char *value)
{
	if (value)
		json_object_set_new(f->meta, key, json_string(value));
	else
		json_object_del(f->meta, key);
}

static void rehash(struct file *f)
{
	struct err e = ERR_INIT;
	struct digest *d = digest_new(&e);
	char hex[DIGEST_HEX];

	digest_update(d, f->ids, sizeof f->ids);
	digest_update(d, f->mask, sizeof f->mask);
	digest_update(d, f->offset, sizeof f->offset);
	digest_hex(d, hex);
	digest_free(d);
	set(f, "rows_xxh3_128", hex);
}

static struct file good(void)
{
	struct file f = {
		.ids = { 3, 1, 4, 1, 5, 9, 2, 6 },
		.mask = { 0, 1, 1, 0, 0, 0, 1, 0 },
		.offset = { 0, 3, 4, 8 },
		.tensor = { vector("input_ids", DT_I32, TOKENS), vector("loss_mask", DT_U8, TOKENS),
			    vector("row_offsets", DT_I64, ROWS + 1) },
		.meta = json_pack("{s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:s}", "format",
				  "dspark-tokens", "version", "1", "seq_length", "4", "num_rows",
				  "3", "pad_token_id", "7", "chat_template_sha256", sha,
				  "train_data_path", "rows.jsonl", "train_split", "\"train[:3]\"",
				  "shuffle_seed", "-42", "mask_reasoning_content", "true",
				  "mask_generation_prompt", "false", "tokenizer_xxh3_128", ""),
	};

	rehash(&f);
	return f;
}

static void write_file(const char *name, struct file *f)
{
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;

	/* The bytes that a tensor's type and shape take, whatever they are said to be. */
	if (safetensors_header(&t, f->tensor, 3, f->meta, 0, 0, &e))
		ok(false, "header: %s", e.text);
	const void *data[] = { f->ids, f->mask, f->offset };
	const size_t have[] = { sizeof f->ids, sizeof f->mask, sizeof f->offset };

	for (int i = 0; i < 3; i++) {
		size_t size = (size_t)(f->tensor[i].end - f->tensor[i].begin);
		char zero[512] = "";

		text_addn(&t, data[i], size < have[i] ? size : have[i]);
		if (size > have[i])
			text_addn(&t, zero, size - have[i]);
	}
	if (file_publish(name, 0, t.s, t.len - f->drop, &e))
		ok(false, "write: %s", e.text);
	text_release(&t);
	json_decref(f->meta);
}

/* ---- what is wrong when it is opened --------------------------------------------------------- */

static void no_ids(struct file *f) { f->tensor[0].name = "ids"; }
static void no_mask(struct file *f) { f->tensor[1].name = "mask"; }
static void no_offsets(struct file *f) { f->tensor[2].name = "offsets"; }
static void ids_i64(struct file *f) { f->tensor[0].dtype = DT_I64; }
static void mask_i8(struct file *f) { f->tensor[1].dtype = DT_I8; }
static void offsets_i32(struct file *f) { f->tensor[2].dtype = DT_I32; }
static void two_dims(struct file *f)
{
	f->tensor[0].ndim = 2;
	f->tensor[0].shape[0] = 2;
	f->tensor[0].shape[1] = 4;
}
static void no_dims(struct file *f) { f->tensor[0].ndim = 0; }
static void short_mask(struct file *f) { f->tensor[1].shape[0] = 7; }
static void empty_offsets(struct file *f) { f->tensor[2].shape[0] = 0; }
static void first_offset(struct file *f) { f->offset[0] = 1; }
static void negative(struct file *f) { f->offset[0] = -1; }
static void descending(struct file *f) { f->offset[2] = 2; }
static void past_end(struct file *f) { f->offset[2] = 9; }
static void far_past_end(struct file *f) { f->offset[2] = INT64_MAX; }
static void empty_row(struct file *f) { f->offset[2] = 3; f->offset[1] = 3; }
static void early_end(struct file *f) { f->offset[3] = 7; }
static void cut(struct file *f) { f->drop = 1; }
static void no_meta(struct file *f) { json_object_clear(f->meta); }

static const struct {
	void (*change)(struct file *f);
	const char *key, *value;	/* with change NULL: metadata; value NULL deletes */
	const char *says;
} bad[] = {
	{ no_ids, 0, 0, "no tensor 'input_ids'" },
	{ no_mask, 0, 0, "no tensor 'loss_mask'" },
	{ no_offsets, 0, 0, "no tensor 'row_offsets'" },
	{ ids_i64, 0, 0, "'input_ids' is I64" },
	{ mask_i8, 0, 0, "'loss_mask' is I8" },
	{ offsets_i32, 0, 0, "'row_offsets' is I32" },
	{ two_dims, 0, 0, "2 dimensions" },
	{ no_dims, 0, 0, "0 dimensions" },
	{ short_mask, 0, 0, "loss_mask has 7 values for the 8" },
	{ empty_offsets, 0, 0, "row_offsets is empty" },
	{ first_offset, 0, 0, "begins with 1" },
	{ negative, 0, 0, "begins with -1" },
	{ descending, 0, 0, "must ascend" },
	{ past_end, 0, 0, "must ascend to 8, but row 1 goes from 3 to 9" },
	{ far_past_end, 0, 0, "must ascend" },
	{ empty_row, 0, 0, "row 1 has no token" },
	{ early_end, 0, 0, "ends at 7, but input_ids has 8" },
	{ cut, 0, 0, "t.safetensors" },
	{ no_meta, 0, 0, "lacks 'format'" },
	{ 0, "format", NULL, "lacks 'format'" },
	{ 0, "format", "other", "format 'other'" },
	{ 0, "version", "2", "version '2'" },
	{ 0, "seq_length", NULL, "lacks 'seq_length'" },
	{ 0, "seq_length", "3", "row 2 has 4 tokens, more than seq_length, 3" },
	{ 0, "seq_length", "0", "seq_length '0'" },
	{ 0, "seq_length", "4.0", "seq_length '4.0'" },
	{ 0, "seq_length", "", "seq_length ''" },
	{ 0, "seq_length", " 4", "seq_length ' 4'" },
	{ 0, "seq_length", "99999999999999999999", "whole number" },
	{ 0, "num_rows", "4", "num_rows 4, but row_offsets has 3" },
	{ 0, "num_rows", NULL, "lacks 'num_rows'" },
	{ 0, "pad_token_id", "-1", "pad_token_id '-1'" },
	{ 0, "pad_token_id", "null", "pad_token_id 'null'" },
	{ 0, "shuffle_seed", "-", "shuffle_seed '-'" },
	{ 0, "shuffle_seed", NULL, "lacks 'shuffle_seed'" },
	{ 0, "chat_template_sha256", "", "64 hexadecimal" },
	{ 0, "chat_template_sha256", "not available: the template is not a string",
	  "several chat templates" },
	{ 0, "chat_template_sha256", NULL, "lacks 'chat_template_sha256'" },
	{ 0, "train_data_path", NULL, "lacks 'train_data_path'" },
	{ 0, "train_split", NULL, "lacks 'train_split'" },
	{ 0, "train_split", "train", "train_split train" },
	{ 0, "train_split", "[]", "null or a string" },
	{ 0, "train_split", "", "null or a string" },
	{ 0, "mask_reasoning_content", "True", "must be true or false" },
	{ 0, "mask_generation_prompt", NULL, "lacks 'mask_generation_prompt'" },
	{ 0, "rows_xxh3_128", "", "32 hexadecimal" },
	{ 0, "rows_xxh3_128", "0123", "32 hexadecimal" },
	{ 0, "rows_xxh3_128", "0123456789ABCDEF0123456789ABCDEF", "lower case" },
	{ 0, "tokenizer_xxh3_128", "x", "32 hexadecimal" },
	{ 0, "tokenizer_xxh3_128", NULL, "lacks 'tokenizer_xxh3_128'" },
};

static void test_bad(void)
{
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
		struct file f = good();
		struct tokens t;
		struct err e = ERR_INIT;
		int rc;

		if (bad[i].change)
			bad[i].change(&f);
		else
			set(&f, bad[i].key, bad[i].value);
		write_file("t.safetensors", &f);
		rc = tokens_open(&t, "t.safetensors", &e);
		ok(rc == -1 && e.code == EXIT_REFUSED && strstr(e.text, bad[i].says) &&
			   strstr(e.text, "t.safetensors"),
		   "refused with \"%s\"", bad[i].says);
		if (rc != -1 || !strstr(e.text, bad[i].says))
			printf("# %s\n", e.text);
		if (!rc)
			tokens_release(&t);
	}
}

/* ---- what is wrong inside -------------------------------------------------------------------- */

static void id_large(struct file *f) { f->ids[4] = 10; }
static void id_negative(struct file *f) { f->ids[0] = -1; }
static void mask_two(struct file *f) { f->mask[7] = 2; }
static void pad_large(struct file *f) { set(f, "pad_token_id", "10"); }

static void test_verify(void)
{
	static const struct {
		void (*change)(struct file *f);
		bool hash;
		const char *says;
	} table[] = {
		{ id_large, true, "row 2, position 0: token id 10" },
		{ id_negative, true, "row 0, position 0: token id -1" },
		{ mask_two, true, "row 2, position 3: loss_mask value 2" },
		{ pad_large, true, "pad_token_id 10" },
		{ NULL, false, "is damaged" },
	};

	for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
		struct file f = good();
		struct tokens t;
		struct err e = ERR_INIT;

		if (table[i].change)
			table[i].change(&f);
		if (table[i].hash)
			rehash(&f);
		else
			f.ids[2] ^= 1;
		write_file("t.safetensors", &f);
		if (!ok(!tokens_open(&t, "t.safetensors", &e), "opened %s", e.text))
			continue;
		ok(tokens_verify(&t, 10, &e) == -1 && e.code == EXIT_REFUSED &&
			   strstr(e.text, table[i].says),
		   "%s", e.text);
		tokens_release(&t);
	}
}

/* More than a piece of the streaming reader, with the fault in a later piece. */
static void test_large(void)
{
	enum { N = 300000, LENGTH = 7 };
	int64_t total = (int64_t)N * LENGTH, *offset;
	struct st_tensor tensor[] = { vector("row_offsets", DT_I64, N + 1),
				      vector("input_ids", DT_I32, total),
				      vector("loss_mask", DT_U8, total) };
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;
	struct file f = good();
	struct digest *d = digest_new(&e);
	uint8_t *mask = mem_calloc((size_t)total, 1, &e);
	int32_t *ids = mem_calloc((size_t)total, sizeof *ids, &e), some[2 * LENGTH];
	uint8_t marks[2 * LENGTH];
	char hex[DIGEST_HEX];
	struct tokens k;

	offset = mem_calloc(N + 1, sizeof *offset, &e);
	for (int64_t i = 0; i <= N; i++)
		offset[i] = i * LENGTH;
	for (int64_t i = 0; i < total; i++) {
		ids[i] = (int32_t)(i % 1000);
		mask[i] = i % 3 == 0;
	}
	ids[total - LENGTH - 2] = 5000;
	digest_update(d, ids, (size_t)total * 4);
	digest_update(d, mask, (size_t)total);
	digest_update(d, offset, (N + 1) * 8);
	digest_hex(d, hex);
	set(&f, "rows_xxh3_128", hex);
	set(&f, "num_rows", "300000");
	set(&f, "seq_length", "7");
	ok(!safetensors_header(&t, tensor, 3, f.meta, 0, 0, &e), "header %s", e.text);
	text_addn(&t, offset, (N + 1) * 8);
	text_addn(&t, ids, (size_t)total * 4);
	text_addn(&t, mask, (size_t)total);
	ok(!file_publish("t.safetensors", 0, t.s, t.len, &e), "written %s", e.text);
	if (ok(!tokens_open(&k, "t.safetensors", &e), "opened %s", e.text)) {
		is_int(k.rows, N, "rows");
		ok(!tokens_verify(&k, 5001, &e), "verified %s", e.text);
		ok(tokens_verify(&k, 5000, &e) &&
			   strstr(e.text, "row 299998, position 5: token id 5000"),
		   "%s", e.text);
		e = (struct err)ERR_INIT;
		ok(!tokens_rows(&k, N - 2, 2, some, marks, &e) && some[5] == 5000 &&
			   !memcmp(marks, mask + total - 14, 14),
		   "the last rows");
		tokens_release(&k);
	}
	digest_free(d);
	text_release(&t);
	json_decref(f.meta);
	free(offset);
	free(ids);
	free(mask);
}

/* ---- a good file ----------------------------------------------------------------------------- */

static void test_good(void)
{
	struct file f = good();
	int32_t ids[TOKENS];
	uint8_t mask[TOKENS];
	struct tokens t;
	struct err e = ERR_INIT;

	write_file("t.safetensors", &f);
	if (!ok(!tokens_open(&t, "t.safetensors", &e), "opened %s", e.text))
		return;
	is_int(t.rows, ROWS, "rows");
	is_int(t.total, TOKENS, "tokens");
	is_int(tokens_length(&t, 0), 3, "length of row 0");
	is_int(tokens_length(&t, 2), 4, "length of row 2");
	is_int(t.seq_length, 4, "seq_length");
	is_int(t.pad_token_id, 7, "pad_token_id");
	is_int(t.shuffle_seed, -42, "shuffle_seed");
	is_str(t.train_split, "train[:3]", "train_split");
	is_str(t.train_data_path, "rows.jsonl", "train_data_path");
	is_str(t.template_sha256, sha, "template");
	is_str(t.tokenizer_xxh3, "", "tokenizer");
	ok(t.mask_reasoning_content && !t.mask_generation_prompt, "masks");
	ok(!tokens_verify(&t, 10, &e), "verified %s", e.text);
	ok(!tokens_rows(&t, 1, 2, ids, mask, &e) && ids[0] == 1 && ids[4] == 6 && !mask[0] &&
		   mask[3],
	   "rows 1 and 2");
	ok(!tokens_rows(&t, 3, 0, ids, mask, &e) && !tokens_rows(&t, 0, 1, NULL, mask, &e) &&
		   !tokens_rows(&t, 0, 1, ids, NULL, &e),
	   "parts");
	tokens_release(&t);
	tokens_release(&t);
	ok(!t.offset, "released twice");
	ok(tokens_open(&t, "no-such", &e) && e.code == EXIT_REFUSED, "a missing file: %s", e.text);
}

static void test_no_rows(void)
{
	struct file f = good();
	char hex[DIGEST_HEX];
	struct tokens t;
	struct err e = ERR_INIT;

	for (int i = 0; i < 2; i++)
		f.tensor[i].shape[0] = 0;
	f.tensor[2].shape[0] = 1;
	digest_xxh3(hex, f.offset, 8);
	set(&f, "rows_xxh3_128", hex);
	set(&f, "num_rows", "0");
	set(&f, "train_split", "null");
	write_file("t.safetensors", &f);
	if (ok(!tokens_open(&t, "t.safetensors", &e), "no rows %s", e.text)) {
		ok(t.rows == 0 && t.total == 0 && !t.train_split && !tokens_verify(&t, 10, &e),
		   "verified %s", e.text);
		tokens_release(&t);
	}
}

static void test_match(void)
{
	struct recipe r = { .path = "r.yaml",
			    .seq_length = 4,
			    .train_data_path = "rows.jsonl",
			    .train_split = "train[:3]",
			    .shuffle_seed = -42,
			    .mask_reasoning_content = true };
	struct recipe other = { .path = "r.yaml",
				.seq_length = 5,
				.train_data_path = "b",
				.shuffle_seed = 1,
				.mask_generation_prompt = true };
	struct file f = good();
	struct tokens t;
	struct err e = ERR_INIT;

	write_file("t.safetensors", &f);
	if (!ok(!tokens_open(&t, "t.safetensors", &e), "opened %s", e.text))
		return;
	ok(!tokens_match(&t, &r, &e), "its own recipe %s", e.text);
	r.train_split = "train";
	ok(tokens_match(&t, &r, &e) && strstr(e.text, "(train_split is 'train[:3]', not 'train')"),
	   "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(tokens_match(&t, &other, &e) && e.code == EXIT_REFUSED &&
		   strstr(e.text,
			  "seq_length is 4, not 5; train_data_path is 'rows.jsonl', not 'b'; "
			  "train_split is 'train[:3]', not null; shuffle_seed is -42, not 1; "
			  "mask_reasoning_content is true, not false; "
			  "mask_generation_prompt is false, not true"),
	   "%s", e.text);
	tokens_release(&t);
}

int main(void)
{
	struct err e = ERR_INIT;
	char *command;

	log_program("t_tokens");
	log_level(-1);
	digest_sha256(sha, "", 0);
	if (!mkdtemp(dir) || chdir(dir)) {
		perror(dir);
		return 99;
	}
	test_good();
	test_no_rows();
	test_bad();
	test_verify();
	test_large();
	test_match();
	command = mem_printf(&e, "rm -rf '%s'", dir);
	if (chdir("/") || !command || system(command))
		printf("# cannot remove %s\n", dir);
	free(command);
	return tap_end();
}
