/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors: what is read, what is refused and with which words, and that written headers read
 * back.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "safetensors.h"
#include "tap.h"
#include "text.h"

static char path[] = "/tmp/dspark-st.XXXXXX";

/* u64 `n` (0 = the header's own length), header, `data` bytes 0, 1, 2, ... */
static void write_file(uint64_t n, const char *header, size_t data)
{
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;
	size_t i;

	if (!n)
		n = strlen(header);
	for (i = 0; i < 8; i++)
		text_addn(&t, &(char){ (char)(n >> 8 * i) }, 1);
	text_add(&t, header);
	for (i = 0; i < data; i++)
		text_addn(&t, &(char){ (char)i }, 1);
	if (file_publish(path, 0, t.s, t.len, &e))
		printf("Bail out! %s\n", e.text);
	text_release(&t);
}

#define A "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
#define T(dtype, shape, offsets) \
	"{\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void test_refused(void)
{
	static const struct {
		const char *name;
		uint64_t n;
		const char *header;
		size_t data;
		const char *words; /* in the message */
	} t[] = {
		{ "header longer than the file", 1000, "{}", 0, "cut short" },
		{ "header over 100 MB", 100000001, "{}", 0, "100 MB" },
		{ "header of 2^64-1 bytes", UINT64_MAX, "{}", 0, "100 MB" },
		{ "not JSON", 0, "{\"a\":", 0, "not valid JSON" },
		{ "no object", 0, "[1]", 0, "does not begin with '{'" },
		{ "space in front", 0, " {}", 0, "does not begin with '{'" },
		{ "text behind", 0, "{} x", 0, "not valid JSON" },
		{ "a name twice", 0, "{" A "," A "}", 8, "duplicate" },
		{ "overlap", 0,
		  "{" A ",\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12,
		  "'a' and 'b' overlap" },
		{ "the same bytes twice", 0,
		  "{" A ",\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
		  "overlap" },
		{ "a hole", 0,
		  "{" A ",\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[12,20]}}", 20,
		  "4 bytes before tensor 'b'" },
		{ "a hole in front", 0, T("F32", "[2]", "[4,12]"), 12,
		  "4 bytes before tensor 'a'" },
		{ "bytes behind", 0, "{" A "}", 9, "1 bytes after" },
		{ "bytes without tensors", 0, "{}", 3, "3 bytes after" },
		{ "short file", 0, "{" A "}", 7, "tensor 'a' ends 1 bytes behind" },
		{ "no data at all", 0, "{" A "}", 0, "cut short" },
		{ "too few bytes for the shape", 0, T("F32", "[3]", "[0,8]"), 8,
		  "8 bytes of data, its shape and dtype want 12" },
		{ "too many bytes for the shape", 0, T("F32", "[1]", "[0,8]"), 8, "want 4" },
		{ "offsets fall", 0, T("F32", "[0]", "[8,0]"), 8, "data_offsets" },
		{ "negative offset", 0, T("F32", "[2]", "[-8,0]"), 8, "data_offsets" },
		{ "one offset", 0, T("F32", "[2]", "[8]"), 8, "data_offsets" },
		{ "three offsets", 0, T("F32", "[2]", "[0,8,8]"), 8, "data_offsets" },
		{ "offsets no list", 0, T("F32", "[2]", "8"), 8, "data_offsets" },
		{ "offset with a fraction", 0, T("F32", "[2]", "[0,8.0]"), 8, "data_offsets" },
		{ "offset beyond 64 bits", 0, T("F32", "[2]", "[0,18446744073709551624]"), 8,
		  "data_offsets" },
		{ "negative dimension", 0, T("F32", "[-1]", "[0,8]"), 8, "dimension" },
		{ "two negative dimensions", 0, T("F32", "[-1,-2]", "[0,8]"), 8, "dimension" },
		{ "dimension with a fraction", 0, T("F32", "[2.0]", "[0,8]"), 8, "dimension" },
		{ "dimension is a string", 0, T("F32", "[\"2\"]", "[0,8]"), 8, "dimension" },
		{ "dimensions overflow", 0, T("F32", "[4294967296,4294967296]", "[0,8]"), 8,
		  "larger than any file" },
		{ "bytes overflow", 0, T("F64", "[2305843009213693952]", "[0,8]"), 8,
		  "larger than any file" },
		{ "wraps around to the right size", 0,
		  T("U8", "[4294967297,4294967296,2]", "[0,8]"), 8, "larger than any file" },
		{ "nine dimensions", 0, T("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1,
		  "9 dimensions" },
		{ "shape no list", 0, T("F32", "2", "[0,8]"), 8, "shape" },
		{ "unknown dtype", 0, T("F4", "[16]", "[0,8]"), 8,
		  "tensor 'a' has the unknown dtype 'F4'" },
		{ "lower-case dtype", 0, T("f32", "[2]", "[0,8]"), 8, "unknown dtype" },
		{ "no dtype", 0, "{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype" },
		{ "dtype no string", 0,
		  "{\"a\":{\"dtype\":1,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype" },
		{ "no shape", 0, "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "shape" },
		{ "no offsets", 0, "{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "data_offsets" },
		{ "tensor no object", 0, "{\"a\":[]}", 0, "not described by an object" },
		{ "metadata no object", 0, "{\"__metadata__\":[]}", 0, "__metadata__" },
		{ "metadata with a number", 0, "{\"__metadata__\":{\"k\":1}}", 0,
		  "'k' is not a string" },
		{ "metadata null", 0, "{\"__metadata__\":null}", 0, "__metadata__" },
		{ "name is not UTF-8", 0, "{\"\xff\":{}}", 0, "not valid JSON" },
	};
	size_t i;

	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		struct safetensors s;
		struct err e = ERR_INIT;
		int rc;

		write_file(t[i].n, t[i].header, t[i].data);
		rc = safetensors_open(&s, path, &e);
		ok(rc == -1 && e.code == EXIT_REFUSED && strstr(e.text, t[i].words) &&
			   strstr(e.text, path),
		   "%s: %s", t[i].name, e.text);
		safetensors_release(&s);
	}
}

static void test_short(void)
{
	struct safetensors s, zero = { 0 };
	struct err e = ERR_INIT;
	size_t n;

	for (n = 0; n < 8; n++) {
		e = (struct err)ERR_INIT;
		file_publish(path, 0, "\2\0\0\0\0\0\0\0{}", n, &e);
		ok(safetensors_open(&s, path, &e) && e.code == EXIT_REFUSED,
		   "a file of %zu bytes: %s", n, e.text);
	}
	e = (struct err)ERR_INIT;
	ok(safetensors_open(&s, "/nonexistent/x", &e) && e.code == EXIT_REFUSED, "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(safetensors_open(&s, "/", &e) && e.code == EXIT_REFUSED, "%s", e.text);
	safetensors_release(&s);
	safetensors_release(&zero);
	is_int(s.fd, -1, "a refused file is released");
}

static void test_good(void)
{
	static const char header[] =
		"{\"z\":{\"dtype\":\"U8\",\"shape\":[0,9000000000000000000,9000000000000000000],"
		"\"data_offsets\":[8,8]},"
		"\"__metadata__\":{\"k\":\"v\",\"e\":\"\"},"
		"\"s\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[8,16],\"extra\":null},"
		"\"b\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[0,8]}}     ";
	const struct st_tensor *b, *z, *scalar;
	struct safetensors s;
	struct err e = ERR_INIT;
	unsigned char buf[8];

	write_file(0, header, 16);
	if (!ok(!safetensors_open(&s, path, &e), "opens %s", e.text))
		return;
	is_int((int64_t)s.n, 3, "three tensors");
	ok(!strcmp(s.tensor[0].name, "b") && !strcmp(s.tensor[1].name, "s") &&
		   !strcmp(s.tensor[2].name, "z"),
	   "sorted by name");
	is_int((int64_t)s.data, (int64_t)strlen(header) + 8, "where the data starts");
	is_int((int64_t)s.size, (int64_t)s.data + 16, "the size of the file");
	b = safetensors_find(&s, "b");
	z = safetensors_find(&s, "z");
	scalar = safetensors_find(&s, "s");
	ok(!safetensors_find(&s, "") && !safetensors_find(&s, "bb") &&
		   !safetensors_find(&s, "__metadata__"),
	   "absent names");
	ok(b && b->dtype == DT_BF16 && b->ndim == 2 && b->shape[0] == 2 && b->shape[1] == 2,
	   "a matrix");
	ok(b->begin == s.data && b->end == s.data + 8, "its place");
	is_int(safetensors_elements(b), 4, "its elements");
	ok(scalar && scalar->ndim == 0 && safetensors_elements(scalar) == 1,
	   "no dimensions are one element");
	ok(z && safetensors_elements(z) == 0, "a zero dimension is none, whatever the others");
	is_str(safetensors_meta(&s, "k"), "v", "metadata");
	is_str(safetensors_meta(&s, "e"), "", "empty metadata");
	is_str(safetensors_meta(&s, "x"), NULL, "absent metadata");
	ok(!safetensors_read(&s, b, buf, 2, 4, &e) && !memcmp(buf, "\2\3\4\5", 4),
	   "bytes of a tensor");
	ok(!safetensors_read(&s, scalar, buf, 0, 8, &e) && buf[0] == 8, "all of another");
	ok(!safetensors_read(&s, b, buf, 8, 0, &e), "none at its end");
	ok(safetensors_read(&s, b, buf, 2, 7, &e) && e.code, "more than it has: %s", e.text);
	e = (struct err)ERR_INIT;
	ok(safetensors_read(&s, b, buf, UINT64_MAX, 2, &e) && e.code, "far behind it");
	safetensors_release(&s);

	e = (struct err)ERR_INIT;
	write_file(0, "{}", 0);
	ok(!safetensors_open(&s, path, &e) && !s.n && !safetensors_find(&s, "a") &&
		   !safetensors_meta(&s, "a"),
	   "no tensors");
	safetensors_release(&s);
}

static void test_header(void)
{
	struct st_tensor t[] = {
		{ .name = "w\"1", .dtype = DT_F32, .ndim = 2, .shape = { 2, 3 } },
		{ .name = "a", .dtype = DT_U8, .ndim = 0 },
		{ .name = "\xc3\xa9", .dtype = DT_BF16, .ndim = 1, .shape = { 0 } },
	};
	static const char plain[] =
		"{\"__metadata__\":{\"b\":\"1\\n\",\"a\":\"2\"},"
		"\"w\\\"1\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
		"\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[24,25]},"
		"\"\xc3\xa9\":{\"dtype\":\"BF16\",\"shape\":[0],\"data_offsets\":[25,25]}}";
	json_t *meta = json_pack("{s:s, s:s}", "b", "1\n", "a", "2");
	struct text out = TEXT_INIT;
	struct safetensors s;
	struct err e = ERR_INIT;
	size_t need = 8 + strlen(plain);

	ok(!safetensors_header(&out, t, 3, meta, 0, 0, &e), "a header");
	ok(out.len == (need + 7) / 8 * 8 && !strncmp(out.s + 8, plain, strlen(plain)), "its bytes");
	ok(strspn(out.s + need, " ") == out.len - need, "spaces behind");
	is_int((unsigned char)out.s[0] | (unsigned char)out.s[1] << 8, (int64_t)out.len - 8,
	       "its length");
	ok(t[0].begin == out.len && t[0].end == out.len + 24 && t[2].end == out.len + 25,
	   "places from the start of the file");
	ok(!safetensors_header(&out, t, 3, meta, 5000, 4096, &e) && out.len == 8192,
	   "padded to a size, then a page");
	ok(!safetensors_header(&out, t, 3, meta, need, 1, &e) && out.len == need, "exactly filled");
	ok(safetensors_header(&out, t, 3, meta, need - 1, 1, &e) && e.code, "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(!safetensors_header(&out, t, 3, meta, 0, 4096, &e) && out.len == 4096, "a page");
	text_pad(&out, 'x', t[2].end);
	ok(!file_publish(path, 0, out.s, out.len, &e) && !safetensors_open(&s, path, &e),
	   "reads back %s", e.text);
	is_str(safetensors_meta(&s, "b"), "1\n", "its metadata");
	ok(safetensors_find(&s, "w\"1") && safetensors_find(&s, "w\"1")->begin == t[0].begin,
	   "its places");
	safetensors_release(&s);
	ok(!safetensors_header(&out, NULL, 0, NULL, 0, 0, &e) && out.len == 16 &&
		   !strcmp(out.s + 8, "{}      "),
	   "an empty one");
	t[0].shape[0] = INT64_MAX / 2;
	ok(safetensors_header(&out, t, 3, NULL, 0, 0, &e) && e.code == EXIT_REFUSED, "%s", e.text);
	e = (struct err)ERR_INIT;
	t[0].shape[0] = 2;
	json_object_set_new(meta, "n", json_integer(1));
	ok(safetensors_header(&out, t, 3, meta, 0, 0, &e) && e.code == EXIT_REFUSED, "%s", e.text);
	json_decref(meta);
	text_release(&out);
}

int main(void)
{
	int fd = mkstemp(path);

	if (fd < 0)
		return 1;
	close(fd);
	test_refused();
	test_short();
	test_good();
	test_header();
	unlink(path);
	return tap_end();
}
