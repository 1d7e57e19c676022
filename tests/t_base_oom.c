/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every allocation of every base module fails once: an error must come back, with nothing crashed
 * and nothing lost.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "digest.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "mem.h"
#include "record.h"
#include "safetensors.h"
#include "tap.h"
#include "text.h"
#include "yaml.h"

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#define SANITIZED 1
#elif defined __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
	__has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif

#if defined SANITIZED || !defined __GLIBC__

int main(void)
{
	tap_skip("the sanitizer owns malloc");
	return tap_end();
}

#else

/* glibc lets a program bring its own malloc; these names are its real ones. */
extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void __libc_free(void *p);

static long countdown = -1; /* fails when it reaches 0; negative: never */
static long living;
static bool failed;

static bool fails(void)
{
	if (countdown < 0 || countdown-- > 0)
		return false;
	failed = true;
	errno = ENOMEM;
	return true;
}

static void *counted(void *p)
{
	living += p != NULL;
	return p;
}

void *malloc(size_t n)
{
	return fails() ? NULL : counted(__libc_malloc(n));
}

void *calloc(size_t n, size_t size)
{
	return fails() ? NULL : counted(__libc_calloc(n, size));
}

void *realloc(void *p, size_t n)
{
	void *new = fails() ? NULL : __libc_realloc(p, n);

	living += !p && new;
	return new;
}

void free(void *p)
{
	living -= p != NULL;
	__libc_free(p);
}

static char path[] = "/tmp/dspark-oom.XXXXXX";

static int do_json(struct err *e)
{
	static const char doc[] =
		"{\"a\":[1,2.5,\"x\\u00e9\",null],\"b\":{\"c\":true},\"big\":99999999999999999999}";
	json_t *v = json_parse(doc, strlen(doc), "doc", e);
	struct text t = TEXT_INIT;
	int rc = -1;

	if (!v)
		return -1;
	json_python(&t, v, 2, true);
	json_python_repr(&t, v);
	json_line(&t, v);
	rc = text_ok(&t, e);
	text_release(&t);
	json_decref(v);
	return rc;
}

static int do_yaml(struct err *e)
{
	static const char doc[] =
		"a: &x {b: 1, c: 1_0.5}\nd: {<<: [*x, {q: z}], e: [yes, ~, 0x1f, !!str 3]}\n"
		"? &k key\n: *k\n";
	json_t *v = yaml_parse(doc, strlen(doc), "doc", e);

	json_decref(v);
	return v ? 0 : -1;
}

static int do_record(struct err *e)
{
	static const char lines[] = "{\"record\":\"plan\",\"n\":1}\n{\"record\":\"range\"}\n";
	struct run r;
	int rc = run_parse(&r, lines, strlen(lines), "run", e);

	run_release(&r);
	return rc;
}

static int do_safetensors(struct err *e)
{
	struct st_tensor t[] = {
		{ .name = "w", .dtype = DT_F32, .ndim = 1, .shape = { 4 } },
		{ .name = "v", .dtype = DT_U8, .ndim = 1, .shape = { 3 } },
	};
	json_t *meta = json_pack("{s:s}", "k", "v");
	struct text out = TEXT_INIT;
	struct safetensors s = SAFETENSORS_INIT;
	int rc = -1;

	if (!meta) {
		err_fail(e, "no metadata");
		return -1;
	}
	if (safetensors_header(&out, t, 2, meta, 0, 0, e))
		goto out;
	text_pad(&out, 'x', t[1].end);
	if (text_ok(&out, e) || file_publish(path, 0, out.s, out.len, e))
		goto out;
	rc = safetensors_open(&s, path, e);
out:
	safetensors_release(&s);
	text_release(&out);
	json_decref(meta);
	return rc;
}

static int do_file(struct err *e)
{
	struct file_space space;
	struct text t = TEXT_INIT;
	char *joined = file_join("/tmp", "x", e);
	int rc = joined ? 0 : -1;

	free(joined);
	if (!rc)
		rc = file_publish(path, 0, "hello", 5, e);
	if (!rc)
		rc = file_read_all(path, 100, &t, e);
	if (!rc)
		rc = file_space("/tmp/not/there", &space, e);
	if (!rc)
		rc = file_mkdir_p("/tmp/.", e);
	if (!rc)
		rc = file_sweep("/tmp", false, e);
	text_release(&t);
	return rc;
}

static int do_mem(struct err *e)
{
	struct digest *d = digest_new(e);
	char *s = d ? mem_printf(e, "%d", 7) : NULL, *p = s ? mem_strdup(s, e) : NULL;
	void *a = p ? mem_calloc(3, 4, e) : NULL, *b = NULL;
	size_t cap = 0;
	int rc = a ? mem_grow(&b, &cap, 10, 4, e) : -1;

	digest_free(d);
	free(s);
	free(p);
	free(a);
	free(b);
	return rc;
}

int main(void)
{
	static const struct {
		const char *name;
		int (*run)(struct err *e);
	} t[] = {
		{ "json", do_json },     { "yaml", do_yaml },
		{ "record", do_record }, { "safetensors", do_safetensors },
		{ "file", do_file },     { "mem and digest", do_mem },
	};
	size_t i;

	setvbuf(stdout, NULL, _IONBF, 0); /* no buffer that comes later */
	close(mkstemp(path));
	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		long n, wrong = 0, lost = 0;

		for (n = 0;; n++) {
			struct err e = ERR_INIT;
			long before = living;
			int rc;

			failed = false;
			countdown = n;
			rc = t[i].run(&e);
			countdown = -1;
			if (living != before && lost++ < 10)
				printf("# %s, allocation %ld: %ld blocks lost\n", t[i].name, n,
				       living - before);
			if (!failed)
				break;
			if (rc ? e.code != EXIT_FAILED : e.code != 0) {
				printf("# %s, allocation %ld: returned %d, code %d: %s\n",
				       t[i].name, n, rc, e.code, e.text);
				wrong++;
			}
		}
		is_int(wrong, 0, "%s: each of %ld allocations fails", t[i].name, n);
		is_int(lost, 0, "%s: nothing is lost", t[i].name);
	}
	unlink(path);
	return tap_end();
}

#endif
