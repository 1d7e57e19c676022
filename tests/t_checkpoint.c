/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint: which files count, what the index decides, what is refused and with which words, and
 * the identity.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint.h"
#include "err.h"
#include "file.h"
#include "tap.h"
#include "text.h"

static char dir[] = "/tmp/dspark-ck.XXXXXX";

#define MAP "{\"metadata\":{\"total_size\":1},\"weight_map\":"
#define TENSOR(name, from, to) \
	"\"" name "\":{\"dtype\":\"U8\",\"shape\":[" #to "],\"data_offsets\":[" #from "," #to "]}"

static void put(const char *name, const void *bytes, size_t n)
{
	struct err e = ERR_INIT;
	char *path = file_join(dir, name, &e);

	if (!path || file_publish(path, 0, bytes, n, &e)) {
		printf("Bail out! %s\n", e.text);
		exit(1);
	}
	free(path);
}

static void put_text(const char *name, const char *s)
{
	put(name, s, strlen(s));
}

/* A file with `header` and n bytes 0, 1, 2, ... plus `seed`. */
static void put_tensors(const char *name, const char *header, size_t n, int seed)
{
	struct text t = TEXT_INIT;
	uint64_t len = strlen(header);
	size_t i;

	for (i = 0; i < 8; i++)
		text_addn(&t, &(char){ (char)(len >> 8 * i) }, 1);
	text_add(&t, header);
	for (i = 0; i < n; i++)
		text_addn(&t, &(char){ (char)(i + (size_t)seed) }, 1);
	put(name, t.s, t.len);
	text_release(&t);
}

static void drop(const char *name)
{
	struct err e = ERR_INIT;
	char *path = file_join(dir, name, &e);

	unlink(path);
	free(path);
}

static void empty(void)
{
	static const char *const names[] = {
		"config.json",        "model.safetensors", "model.safetensors.index.json",
		"a.safetensors",      "b.safetensors",     "pytorch_model.bin",
		".hidden.safetensors"
	};
	size_t i;

	for (i = 0; i < sizeof names / sizeof *names; i++)
		drop(names[i]);
	put_text("config.json", "{\"model_type\":\"x\"}");
}

/* Opens and expects `words` in the refusal. */
static void refused(bool estimate, const char *words, const char *what)
{
	struct err e = ERR_INIT;
	struct checkpoint c;

	if (!ok(checkpoint_open(&c, dir, estimate, &e) && e.code == EXIT_REFUSED &&
			strstr(e.text, words),
		"%s is refused", what))
		printf("# %d %s\n# want '%s'\n", e.code, e.text, words);
	checkpoint_release(&c);
}

/* "x@a.safetensors y@b.safetensors" and so on: where names are found, in the order asked. */
static void places(const char *const *names, const char *want, const char *what)
{
	struct err e = ERR_INIT;
	struct text t = TEXT_INIT;
	struct checkpoint c;

	text_add(&t, "");
	if (checkpoint_open(&c, dir, false, &e))
		text_printf(&t, "%s", e.text);
	else
		for (; *names; names++) {
			const struct entry *x = c.catalogue.find(&c.catalogue, *names);

			text_printf(&t, "%s%s@%s", t.len ? " " : "", *names,
				    x ? c.file[x->file].name : "none");
		}
	is_str(t.s, want, "%s", what);
	text_release(&t);
	checkpoint_release(&c);
}

static const char *const xyz[] = { "x", "y", "z", NULL };

static void test_files(void)
{
	empty();
	put_tensors("a.safetensors", "{" TENSOR("x", 0, 4) "}", 4, 0);
	put_tensors("b.safetensors", "{" TENSOR("y", 0, 4) "}", 4, 1);
	put_tensors(".hidden.safetensors", "{" TENSOR("z", 0, 4) "}", 4, 1);
	places(xyz, "x@a.safetensors y@b.safetensors z@none",
	       "without index: all files but hidden ones");

	put_tensors("model.safetensors", "{" TENSOR("x", 0, 4) "}", 4, 0);
	places(xyz, "x@model.safetensors y@none z@none", "model.safetensors alone");

	put_text("model.safetensors.index.json",
		 MAP "{\"x\":\"a.safetensors\",\"y\":\"b.safetensors\"}}");
	places(xyz, "x@a.safetensors y@b.safetensors z@none", "an index comes first");

	put_tensors("b.safetensors",
		    "{" TENSOR("y", 0,
			       4) ","
				  "\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]},"
				  "\"z\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[8,12]}}",
		    12, 1);
	places(xyz, "x@a.safetensors y@b.safetensors z@none",
	       "the index decides who holds a name, and what counts");

	put_text("model.safetensors.index.json", "{\"weight_map\" :\n{ \"x\" : \"a.safetensors\" "
						 ",\r\n\t\"\\u0079\": \"b.safetensors\"} }\n");
	places(xyz, "x@a.safetensors y@b.safetensors z@none", "an index with escapes");
	put_text("model.safetensors.index.json",
		 "{\"metadata\":{\"weight_map\":{\"x\":\"c\"}},"
		 "\"weight_map\":{\"x\":\"b.safetensors\",\"y\":\"b.safetensors\"}}");
	places(xyz, "x@b.safetensors y@b.safetensors z@none",
	       "an index with another weight_map inside");
}

static void test_entry(void)
{
	struct err e = ERR_INIT;
	const struct entry *x;
	struct checkpoint c;

	empty();
	put_tensors("model.safetensors",
		    "{\"m\":{\"dtype\":\"BF16\",\"shape\":[2,3,4],\"data_offsets\":[0,48]},"
		    "\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[48,52]}}",
		    52, 0);
	if (!ok(!checkpoint_open(&c, dir, false, &e), "opens"))
		return;
	x = c.catalogue.find(&c.catalogue, "m");
	ok(x && x->dtype == DT_BF16 && x->ndim == 3 && x->shape[0] == 2 && x->shape[1] == 3 &&
		   x->shape[2] == 4,
	   "dtype and shape");
	ok(x && x->row0 == 0 && x->rows == 6 && entry_rows(x) == 6 && entry_row_bytes(x) == 8,
	   "rows are all dimensions but the last");
	ok(x && x->begin == c.file[0].data && x->end == x->begin + 48, "bytes in the file");
	x = c.catalogue.find(&c.catalogue, "s");
	ok(x && x->ndim == 0 && x->rows == 1 && entry_row_bytes(x) == 4, "a scalar is one row");
	ok(!c.catalogue.find(&c.catalogue, "none") && !c.partial, "what is not there is not found");
	checkpoint_release(&c);
}

static void test_refusals(void)
{
	empty();
	refused(false, "no safetensors files", "a directory without weights");
	put_text("pytorch_model.bin", "x");
	refused(false, "convert it to safetensors", "a .bin checkpoint");
	refused(true, "convert it to safetensors", "a .bin checkpoint, for an estimate");
	drop("pytorch_model.bin");

	put_tensors("a.safetensors", "{" TENSOR("x", 0, 4) "}", 4, 0);
	put_tensors("b.safetensors", "{" TENSOR("x", 0, 4) "}", 4, 0);
	refused(false, "both in 'a.safetensors' and in 'b.safetensors'",
		"a name in two files without index");

	put_text("model.safetensors.index.json",
		 MAP "{\"x\":\"a.safetensors\",\"y\":\"b.safetensors\"}}");
	refused(false, "places tensor 'y' in 'b.safetensors', which does not hold it",
		"an index that is wrong");
	put_text("model.safetensors.index.json",
		 MAP "{\"x\":\"a.safetensors\",\"y\":\"c.safetensors\"}}");
	refused(false, "names 'c.safetensors', which is missing", "a missing file");
	put_text("model.safetensors.index.json",
		 MAP "{\"x\":\"a.safetensors\",\"x\":\"a.safetensors\"}}");
	refused(false, "twice", "a name twice in the index");
	put_text("model.safetensors.index.json", MAP "{\"x\":\"../a.safetensors\"}}");
	refused(false, "not a name in this directory", "a path in the index");
	put_text("model.safetensors.index.json", MAP "{\"x\":7}}");
	refused(false, "no file name", "a number in the index");
	put_text("model.safetensors.index.json", MAP "{}}");
	refused(false, "weight_map is empty", "an empty weight_map");
	put_text("model.safetensors.index.json", "{\"metadata\":{}}");
	refused(false, "no object 'weight_map'", "an index without weight_map");
	put_text("model.safetensors.index.json", MAP "{\"x\":\"a.safetensors\",}}");
	refused(false, "model.safetensors.index.json", "a comma too many");
	put_text("model.safetensors.index.json", MAP "{\"x\":\"a.safetensors\"}");
	refused(false, "model.safetensors.index.json", "an index cut short");
	put_text("model.safetensors.index.json", MAP "{\"x\":\"a.safetensors\"}} x");
	refused(false, "model.safetensors.index.json", "text behind the index");
	put("model.safetensors.index.json", MAP "{\"x\":\"a.safetensors\"}}\0",
	    sizeof MAP "{\"x\":\"a.safetensors\"}}");
	refused(false, "model.safetensors.index.json", "a NUL behind the index");
	drop("model.safetensors.index.json");

	drop("b.safetensors");
	put_tensors("a.safetensors", "{" TENSOR("x", 0, 4) "}", 3, 0);
	refused(false, "a.safetensors", "a file cut short");
	put_text("config.json", "[]");
	refused(false, "not a JSON object", "a config.json that is no object");
	drop("config.json");
	refused(false, "config.json", "no config.json");
}

static void test_estimate(void)
{
	struct err e = ERR_INIT;
	const struct entry *x, *y;
	struct checkpoint c;
	char hex[DIGEST_HEX];

	empty();
	ok(!checkpoint_open(&c, dir, true, &e) && c.partial && !c.nentries, "config.json alone");
	ok(checkpoint_identity(&c, hex, &e) && strstr(e.text, "not whole"), "has no identity");
	checkpoint_release(&c);

	put_tensors("a.safetensors", "{" TENSOR("x", 0, 4) "}", 4, 0);
	put_text("model.safetensors.index.json",
		 MAP "{\"x\":\"a.safetensors\",\"y\":\"c.safetensors\"}}");
	e = (struct err)ERR_INIT;
	ok(!checkpoint_open(&c, dir, true, &e) && c.partial, "index with a missing file");
	x = c.catalogue.find(&c.catalogue, "x");
	y = c.catalogue.find(&c.catalogue, "y");
	ok(x && x->dtype == DT_U8 && x->ndim == 1, "what is there is known");
	ok(y && y->dtype == DT_NONE && y->ndim == -1 && y->begin == y->end &&
		   c.file[y->file].missing,
	   "what is missing is named");
	checkpoint_release(&c);
}

static void identity(char hex[DIGEST_HEX])
{
	struct err e = ERR_INIT;
	struct checkpoint c;

	hex[0] = '\0';
	if (checkpoint_open(&c, dir, false, &e) || checkpoint_identity(&c, hex, &e))
		printf("# %s\n", e.text);
	checkpoint_release(&c);
}

/* The rule of checkpoint.h, byte by byte. */
static void test_identity(void)
{
	static const char header[] = "{" TENSOR("x", 0, 300000) "}";
	static const char config[] = "{\"model_type\":\"x\"}";
	const uint64_t n = 300000, data = 8 + sizeof header - 1;
	char want[DIGEST_HEX], got[DIGEST_HEX], again[DIGEST_HEX];
	struct text t = TEXT_INIT;
	unsigned char *file = calloc(1, data + n);
	uint64_t k, word[] = { sizeof config - 1, 1, data + n, sizeof header - 1 };

	if (!file)
		return;
	empty();
	memcpy(file, &word[3], 8);	/* little-endian machine */
	memcpy(file + 8, header, sizeof header - 1);
	for (k = 0; k < n; k++)
		file[data + k] = (unsigned char)(k * 7 >> 3);
	put("model.safetensors", file, data + n);
	text_addn(&t, &word[0], 8);
	text_add(&t, config);
	text_addn(&t, &word[1], 8);
	text_addn(&t, &word[2], 8);
	text_addn(&t, file, data);
	for (k = 0; k < 64; k++)
		text_addn(&t, file + data + k * (n - 4096) / 63, 4096);
	digest_xxh3(want, t.s, t.len);
	identity(got);
	is_str(got, want, "64 blocks of a large file");

	file[data + n - 1] ^= 1;
	put("model.safetensors", file, data + n);
	identity(again);
	ok(strcmp(again, got), "the last byte counts");
	put_text("config.json", "{\"model_type\":\"x\" }");
	identity(got);
	ok(strcmp(again, got), "config.json counts");
	file[data] ^= 1;
	put("model.safetensors", file, data + n);
	identity(again);
	ok(strcmp(again, got), "the first byte counts");
	text_release(&t);
	free(file);
}

int main(void)
{
	if (!mkdtemp(dir))
		return 1;
	test_files();
	test_entry();
	test_refusals();
	test_estimate();
	test_identity();
	empty();
	drop("config.json");
	rmdir(dir);
	return tap_end();
}
