/* SPDX-License-Identifier: Apache-2.0 */
/* err, mem, text, digest: sentences, overflow, growth, digests. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <stdlib.h>

#include "digest.h"
#include "err.h"
#include "mem.h"
#include "tap.h"
#include "text.h"

static void test_err(void)
{
	struct err e = ERR_INIT;
	char longer[2 * ERR_TEXT];

	is_int(err_refuse(&e, "first %d", 1), -1, "err_refuse returns -1");
	err_fail(&e, "second");
	is_str(e.text, "first 1", "the first error wins");
	is_int(e.code, EXIT_REFUSED, "its code too");
	err_context(&e, "file '%s'", "x");
	is_str(e.text, "file 'x': first 1", "context goes in front");

	e = (struct err)ERR_INIT;
	errno = ENOSPC;
	err_errno(&e, "cannot write '%s'", "y");
	is_str(e.text, "cannot write 'y': No space left on device", "err_errno says why");
	is_int(e.code, EXIT_FAILED, "err_errno is a failure");
	is_int(errno, ENOSPC, "err_errno keeps errno");

	memset(longer, 'x', sizeof longer - 1);
	longer[sizeof longer - 1] = '\0';
	e = (struct err)ERR_INIT;
	errno = EIO;
	err_errno(&e, "%s", longer);
	ok(strlen(e.text) == ERR_TEXT - 1 && strstr(e.text, ": Input/output error"),
	   "a long sentence is cut before its reason");
	err_context(&e, "%s", longer);
	is_int((int64_t)strlen(e.text), ERR_TEXT - 1, "a long context is cut");
	e = (struct err)ERR_INIT;
	err_context(&e, "nothing");
	is_int(e.code, 0, "context without an error changes nothing");
}

static void test_input(void)
{
	static const struct {
		int number, code;
	} t[] = {
		{ ENOENT, EXIT_REFUSED },       { ENOTDIR, EXIT_REFUSED }, { EISDIR, EXIT_REFUSED },
		{ EACCES, EXIT_REFUSED },       { EPERM, EXIT_REFUSED },   { ELOOP, EXIT_REFUSED },
		{ ENAMETOOLONG, EXIT_REFUSED }, { EIO, EXIT_FAILED },      { EMFILE, EXIT_FAILED },
		{ ENOMEM, EXIT_FAILED },        { ESTALE, EXIT_FAILED },
	};
	size_t i;

	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		struct err e = ERR_INIT;

		errno = t[i].number;
		err_input(&e, "x");
		is_int(e.code, t[i].code, "an input that fails with: %s", strerror(t[i].number));
	}
}

static void test_mem(void)
{
	struct err e = ERR_INIT;
	int *a = NULL, i;
	size_t cap = 0;
	char *p;

	p = mem_calloc(0, 8, &e);
	ok(p != NULL, "no elements are a pointer");
	free(p);
	ok(!mem_calloc(SIZE_MAX / 4, 8, &e) && e.code == EXIT_FAILED,
	   "an array beyond the address space fails");
	for (i = 0; i < 1000; i++) {
		if (mem_grow(&a, &cap, (size_t)i + 1, sizeof *a, &e))
			break;
		a[i] = i;
	}
	ok(i == 1000 && a[0] == 0 && a[999] == 999 && cap >= 1000 && cap < 2000,
	   "an array grows and keeps its elements");
	e = (struct err)ERR_INIT;
	ok(mem_grow(&a, &cap, SIZE_MAX / 2, sizeof *a, &e) && e.code == EXIT_FAILED &&
		   a[999] == 999,
	   "growth that overflows leaves it");
	free(a);
	for (i = 0; i < 3; i++) {
		static const size_t bytes[] = { 0, 100, (size_t)5 << 20 };

		p = mem_aligned(bytes[i], &e);
		ok(p && (uintptr_t)p % (i == 2 ? (uintptr_t)2 << 20 : 64) == 0,
		   "%zu bytes are aligned", bytes[i]);
		free(p);
	}
	p = mem_printf(&e, "%s-%d", "a", 7);
	is_str(p, "a-7", "mem_printf");
	free(p);
	is_int(mem_mul(3, 5), 15, "3 x 5");
	is_int(mem_mul(INT64_MAX / 2 + 1, 2), -1, "a product that overflows");
	is_int(mem_mul(-1, 5), -1, "a negative factor");
	is_int(mem_mul(0, INT64_MAX), 0, "0 x the largest");
	is_int(mem_add(INT64_MAX, 1), -1, "a sum that overflows");
	is_int(mem_add(INT64_MAX - 1, 1), INT64_MAX, "the largest sum");
	is_int(mem_add(-1, 1), -1, "a negative summand");
}

static void test_text(void)
{
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;
	size_t i;

	text_release(&t);
	text_add(&t, "");
	is_str(t.s, "", "an empty append makes a string");
	for (i = 0; i < 500; i++)
		text_printf(&t, "%03zu,", i);
	ok(t.len == 2000 && !strncmp(t.s + 1996, "499,", 5), "500 appends");
	text_clear(&t);
	is_str(t.s, "", "cleared");
	text_addn(&t, "a\0b", 3);
	text_pad(&t, '.', 6);
	text_pad(&t, '.', 2);
	ok(t.len == 6 && !memcmp(t.s, "a\0b...", 7), "bytes with a NUL, padded");
	text_pad(&t, '.', SIZE_MAX - 1);
	text_add(&t, "more");
	ok(t.failed && t.len == 6 && text_ok(&t, &e) && e.code == EXIT_FAILED,
	   "a failed append is remembered");
	text_clear(&t);
	is_int(text_ok(&t, &e), 0, "clear forgets it");
	text_release(&t);
	ok(!t.s && !t.len, "released");
}

static void test_bytes(void)
{
	static const struct {
		double bytes;
		const char *want;
	} t[] = {
		{ 0, "0 B" },
		{ 17, "17 B" },
		{ 1023, "1023 B" },
		{ 1024, "1.00 KiB" },
		{ 1536, "1.50 KiB" },
		{ 12.0 * 1048576, "12.0 MiB" },
		{ 10234, "9.99 KiB" },
		{ 10239, "10.0 KiB" },
		{ 102390, "100 KiB" },
		{ 1048575, "1.00 MiB" },
		{ 1.5 * 1073741824, "1.50 GiB" },
	};
	size_t i;

	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		struct text s = TEXT_INIT;

		text_bytes(&s, t[i].bytes);
		is_str(s.s, t[i].want, "%.0f bytes", t[i].bytes);
		text_release(&s);
	}
}

static void test_digest(void)
{
	static const struct {
		const char *s, *xxh, *sha;
	} t[] = {
		{ "", "99aa06d3014798d86001c324468d497f",
		  "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" },
		{ "a", "a96faf705af16834e6c632b61e964e1f",
		  "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb" },
		{ "abc", "06b05ab6733a618578af5f94892f3950",
		  "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" },
		{ "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", NULL,
		  "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1" },
	};
	struct err e = ERR_INIT;
	struct digest *d = digest_new(&e);
	char hex[DIGEST_HEX], sha[SHA256_HEX];
	unsigned char bytes[1000];
	size_t i;

	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		digest_xxh3(hex, t[i].s, strlen(t[i].s));
		if (t[i].xxh)
			is_str(hex, t[i].xxh, "XXH3-128 of \"%s\"", t[i].s);
		digest_sha256(sha, t[i].s, strlen(t[i].s));
		is_str(sha, t[i].sha, "SHA-256 of \"%s\"", t[i].s);
	}
	for (i = 0; i < sizeof bytes; i++)
		bytes[i] = (unsigned char)(i * 7);
	digest_update(d, NULL, 0);
	digest_hex(d, hex);
	is_str(hex, t[0].xxh, "an empty stream");
	for (i = 0; i < sizeof bytes; i += 8)
		digest_update(d, bytes + i, 8);
	digest_hex(d, hex);
	is_str(hex, "abee229cdadad76d10ad30264426c830", "a stream in pieces");
	digest_reset(d);
	digest_update(d, "a", 1);
	digest_hex(d, hex);
	is_str(hex, t[1].xxh, "a stream begun again");
	digest_update(d, "bc", 2);
	digest_hex(d, hex);
	is_str(hex, t[2].xxh, "asked, then continued");
	digest_free(d);
	digest_free(NULL);
}

int main(void)
{
	test_err();
	test_input();
	test_mem();
	test_text();
	test_bytes();
	test_digest();
	return tap_end();
}
