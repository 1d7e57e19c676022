/* SPDX-License-Identifier: Apache-2.0 */
/* file: reading what is not there, appearing whole or not at all, sweeping, locking, space. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "outlet.h"
#include "tap.h"
#include "text.h"

static char dir[] = "/tmp/dspark-file.XXXXXX";

/* A path in the scratch directory; four may live at once. */
static const char *at(const char *name)
{
	static char path[4][512];
	static int i;

	i = (i + 1) % 4;
	snprintf(path[i], sizeof path[i], "%s/%s", dir, name);
	return path[i];
}

static void put(const char *path, const char *s)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);

	if (fd < 0 || write(fd, s, strlen(s)) != (ssize_t)strlen(s) || close(fd))
		printf("Bail out! cannot write %s\n", path);
}

static int entries(const char *path)
{
	struct dirent *ent;
	DIR *d = opendir(path);
	int n = 0;

	while (d && (ent = readdir(d)))
		n += strcmp(ent->d_name, ".") && strcmp(ent->d_name, "..");
	if (d)
		closedir(d);
	return n;
}

static void test_read(void)
{
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;
	uint64_t size;
	int64_t mtime;
	char buf[8];
	int fd;

	put(at("five"), "12345");
	is_int(file_read_all(at("five"), 5, &t, &e), 0, "a file of 5 bytes with a limit of 5");
	is_str(t.s, "12345", "its text");
	ok(file_read_all(at("five"), 4, &t, &e) && e.code == EXIT_REFUSED,
	   "a limit of 4 refuses it: %s", e.text);
	e = (struct err)ERR_INIT;
	put(at("empty"), "");
	is_int(file_read_all(at("empty"), 0, &t, &e), 0, "an empty file");
	is_str(t.s, "", "is an empty string");
	ok(file_read_all(at("none"), 9, &t, &e) && e.code == EXIT_REFUSED &&
		   strstr(e.text, "No such file"),
	   "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(file_read_all(dir, 9, &t, &e) && e.code == EXIT_REFUSED && strstr(e.text, "directory"),
	   "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(file_open(dir, &e) < 0 && e.code == EXIT_REFUSED && strstr(e.text, "directory"), "%s",
	   e.text);
	e = (struct err)ERR_INIT;
	mkfifo(at("fifo"), 0666);
	ok(file_open(at("fifo"), &e) < 0 && e.code == EXIT_REFUSED && strstr(e.text, "regular"),
	   "a FIFO is refused at once");
	e = (struct err)ERR_INIT;
	fd = file_open(at("five"), &e);
	ok(fd >= 0 && fcntl(fd, F_GETFD) & FD_CLOEXEC, "descriptors are close-on-exec");
	ok(!file_pread(fd, "five", buf, 3, 2, &e) && !memcmp(buf, "345", 3), "3 bytes at 2");
	ok(file_pread(fd, "five", buf, 3, 3, &e) && e.code == EXIT_REFUSED &&
		   strstr(e.text, "ends early"),
	   "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(file_pread(fd, "five", buf, 1, UINT64_MAX, &e) && e.code == EXIT_REFUSED, "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(file_pwrite(fd, "five", buf, 1, 0, &e) && e.code == EXIT_FAILED, "%s", e.text);
	close(fd);
	e = (struct err)ERR_INIT;
	ok(!file_size(at("five"), &size, &mtime, &e) && size == 5 &&
		   mtime > (int64_t)1500000000 * 1000000000,
	   "size and time");
	ok(file_size(dir, &size, NULL, &e) && e.code == EXIT_REFUSED, "%s", e.text);
	ok(file_exists(at("five")) && !file_exists(at("none")) && file_exists(dir), "exists");
	ok(!file_is_dir(at("five")) && !file_is_dir(at("none")) && file_is_dir(dir),
	   "is a directory");
	text_release(&t);
}

static void test_paths(void)
{
	static const struct {
		const char *dir, *name, *want;
	} t[] = {
		{ "a", "b", "a/b" }, { "a/", "b", "a/b" }, { "/", "b", "/b" },
		{ "", "b", "b" },    { "a", "/b", "/b" },  { ".", "b", "./b" },
	};
	struct err e = ERR_INIT;
	size_t i;

	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		char *s = file_join(t[i].dir, t[i].name, &e);

		is_str(s, t[i].want, "'%s' and '%s'", t[i].dir, t[i].name);
		free(s);
	}
	ok(!file_mkdir_p(at("p/q/r"), &e) && file_is_dir(at("p/q/r")),
	   "directories and their parents");
	is_int(file_mkdir_p(at("p/q/r/"), &e), 0, "again, with a slash behind");
	put(at("plain"), "");
	ok(file_mkdir_p(at("plain/x"), &e) && e.code == EXIT_FAILED &&
		   strstr(e.text, "Not a directory"),
	   "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(file_mkdir_p(at("plain"), &e) && strstr(e.text, "Not a directory"), "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(file_mkdir_p("", &e) && e.code, "%s", e.text);
}

static void test_publish(void)
{
	struct file_new f = FILE_NEW_INIT, zero = { 0 };
	struct err e = ERR_INIT;
	struct text t = TEXT_INIT;
	struct stat st;
	char tail[64], *tmp;

	file_mkdir_p(at("pub"), &e);
	file_new_abort(&f);
	file_new_abort(&zero);
	ok(!file_new_open(&f, at("pub/out"), 3, &e), "a new file is open");
	snprintf(tail, sizeof tail, ".3.%ld", (long)getpid());
	tmp = strdup(f.tmp);
	ok(!strncmp(strrchr(tmp, '/'), "/.out.tmp.", 10) &&
		   !strcmp(tmp + strlen(tmp) - strlen(tail), tail),
	   "as %s", strrchr(tmp, '/'));
	ok(file_exists(tmp) && !file_exists(at("pub/out")), "under its temporary name only");
	ok(file_new_open(&(struct file_new)FILE_NEW_INIT, at("pub/out"), 3, &e) &&
		   e.code == EXIT_FAILED && file_exists(tmp),
	   "a second one of the same name is refused: %s", e.text);
	e = (struct err)ERR_INIT;
	ok(!file_pwrite(f.fd, f.tmp, "hello", 5, 0, &e) && !file_new_publish(&f, &e), "published");
	ok(!file_exists(tmp) && !file_read_all(at("pub/out"), 9, &t, &e),
	   "under its own name only");
	is_str(t.s, "hello", "whole");
	umask(027);
	ok(!file_publish(at("pub/out"), 0, "bye", 3, &e) && !stat(at("pub/out"), &st) &&
		   (st.st_mode & 0777) == 0640,
	   "replaced; its mode is 0666 less umask");
	umask(022);
	file_new_abort(&f);
	is_int(entries(at("pub")), 1, "nothing else is left");

	ok(!file_new_open(&f, at("pub/out"), 0, &e), "open again");
	file_new_abort(&f);
	ok(!file_read_all(at("pub/out"), 9, &t, &e) && !strcmp(t.s, "bye") &&
		   entries(at("pub")) == 1,
	   "abort leaves the old file");

	ok(file_new_open(&f, at("nowhere/out"), 0, &e) && e.code == EXIT_FAILED, "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(file_new_open(&f, at("pub/"), 0, &e) && e.code == EXIT_REFUSED, "%s", e.text);
	e = (struct err)ERR_INIT;
	ok(file_new_open(&f, "/dev/null", 0, &e) && e.code == EXIT_REFUSED, "%s", e.text);
	e = (struct err)ERR_INIT;

	/* a temporary of an earlier process with our number */
	put(tmp, "old");
	ok(!file_new_open(&f, at("pub/out"), 3, &e) && !fstat(f.fd, &st) && st.st_size == 0,
	   "an earlier namesake's remains are replaced");
	file_new_abort(&f);

	/* what NFS shows when a rename is sent twice */
	ok(!file_new_open(&f, at("pub/twice"), 0, &e) && !rename(f.tmp, f.path) &&
		   !file_new_publish(&f, &e),
	   "renamed already: success");
	ok(!file_new_open(&f, at("pub/twice"), 0, &e) && !unlink(f.tmp) &&
		   file_new_publish(&f, &e) && e.code == EXIT_FAILED,
	   "gone: %s", e.text);
	is_int(f.fd, -1, "a failed publication leaves nothing open");
	free(tmp);
	text_release(&t);
}

/* A file-size limit stands in for a full disk. */
static void test_full(void)
{
	struct rlimit old, small = { 1 << 16, 1 << 16 };
	struct file_new f = FILE_NEW_INIT;
	struct err e = ERR_INIT;
	static char data[1 << 17];

	getrlimit(RLIMIT_FSIZE, &old);
	small.rlim_max = old.rlim_max;
	signal(SIGXFSZ, SIG_IGN);
	file_mkdir_p(at("full"), &e);
	setrlimit(RLIMIT_FSIZE, &small);
	ok(file_publish(at("full/big"), 0, data, sizeof data, &e) && e.code == EXIT_FAILED, "cut");
	setrlimit(RLIMIT_FSIZE, &old);
	ok(strstr(e.text, "File too large") && entries(at("full")) == 0, "nothing is left: %s",
	   e.text);
	e = (struct err)ERR_INIT;
	if (geteuid()) {
		chmod(at("full"), 0500);
		ok(file_new_open(&f, at("full/x"), 0, &e) && e.code == EXIT_FAILED, "%s", e.text);
		chmod(at("full"), 0700);
	} else {
		tap_skip("root may write anywhere");
	}
}

/* ---- past the page cache --------------------------------------------------------------------- */

#define LARGE ((size_t)20 << 20)

static unsigned char *pattern(void)
{
	unsigned char *p = malloc(LARGE + 4096);
	uint32_t x = 1;

	for (size_t i = 0; i < LARGE + 4096; i++)
		p[i] = (unsigned char)((x = x * 1664525u + 1013904223u) >> 24);
	return p;
}

/* Do n bytes at `off` of the file equal p's, and is everything before and behind them zero? */
static bool holds(const char *path, const unsigned char *p, size_t n, size_t off, size_t size)
{
	unsigned char *got = malloc(size + 1);
	int fd = open(path, O_RDONLY);
	bool same = fd >= 0 && read(fd, got, size + 1) == (ssize_t)size &&
		    !memcmp(got + off, p, n);

	for (size_t i = 0; same && i < size; i++)
		same = (i >= off && i < off + n) || !got[i];
	close(fd);
	free(got);
	return same;
}

/* The same bytes whatever the place in file and memory, whether or not the file system can. */
static void test_write(const unsigned char *p)
{
	static const struct {
		size_t from, n, off;
	} job[] = {
		{ 0, 9 << 20, 0 },	  { 0, 9 << 20, 4096 },	     { 1, 9 << 20, 4096 },
		{ 0, (9 << 20) + 7, 1 }, { 512, (3 << 20) - 1, 8191 }, { 2048, 3 << 20, 6144 },
		{ 17, 300000, 12345 },	  { 0, 100, 3 },	     { 5, 262144 + 4095, 1 },
	};
	static const char *const place[] = { "", "/dev/shm" };

	for (size_t i = 0; i < 2; i++)
		for (size_t k = 0; k < sizeof job / sizeof *job; k++) {
			size_t size = job[k].off + job[k].n + 5000;
			struct file_new f = FILE_NEW_INIT;
			struct err e = ERR_INIT;
			char path[512];

			snprintf(path, sizeof path, "%s/dspark-w%ld",
				 *place[i] && file_is_dir(place[i]) ? place[i] : dir,
				 (long)getpid());
			ok(!file_new_open(&f, path, 0, &e) && !ftruncate(f.fd, (off_t)size) &&
			   !file_new_write(&f, p + job[k].from, job[k].n, job[k].off, &e) &&
			   !(fcntl(f.fd, F_GETFL) & O_DIRECT) && !file_new_publish(&f, &e) &&
			   holds(path, p + job[k].from, job[k].n, job[k].off, size),
			   "%zu bytes from %zu at %zu %s", job[k].n, job[k].from, job[k].off,
			   e.text);
			unlink(path);
		}
}

/* Two writes that meet inside a page: neither loses the other's half. */
static void test_meet(const unsigned char *p)
{
	struct file_new f = FILE_NEW_INIT;
	struct err e = ERR_INIT;

	ok(!file_new_open(&f, at("meet"), 0, &e) &&
	   !file_new_write(&f, p + 1000001, LARGE - 1000001, 1000001, &e) &&
	   !file_new_write(&f, p, 1000001, 0, &e) && !file_new_publish(&f, &e) &&
	   holds(at("meet"), p, LARGE, 0, LARGE), "written from the middle, then up to it");
}

static void test_outlet(const unsigned char *p)
{
	static const size_t step[] = { 1, 4096, 1000003, OUTLET_BUFFER, OUTLET_BUFFER + 1 };
	struct err e = ERR_INIT;

	for (size_t k = 0; k < sizeof step / sizeof *step; k++) {
		struct file_new f = FILE_NEW_INIT;
		struct outlet o;
		size_t n = step[k] == 1 ? 5000 : LARGE, i;

		ok(!file_new_open(&f, at("outlet"), 0, &e) && !outlet_open(&o, &f, &e), "open");
		for (i = 0; i < n; i += step[k])
			if (outlet_put(&o, p + i, n - i < step[k] ? n - i : step[k], &e))
				break;
		ok(i >= n && o.at == n && !outlet_close(&o, &e) && !file_new_publish(&f, &e) &&
		   holds(at("outlet"), p, n, 0, n), "%zu bytes by %zu %s", n, step[k], e.text);
	}
}

/* A thread's failure reaches the caller, at the latest at the end; then nothing is left. */
static void test_outlet_full(const unsigned char *p)
{
	struct rlimit old, small = { 1 << 20, 1 << 20 };
	struct file_new f = FILE_NEW_INIT;
	struct outlet o, none = { 0 };
	struct err e = ERR_INIT, late = ERR_INIT;

	getrlimit(RLIMIT_FSIZE, &old);
	small.rlim_max = old.rlim_max;
	setrlimit(RLIMIT_FSIZE, &small);
	file_new_open(&f, at("cut"), 0, &e);
	outlet_open(&o, &f, &e);
	ok(outlet_put(&o, p, LARGE, &e) && strstr(e.text, "File too large"), "%s", e.text);
	outlet_abort(&o);
	outlet_open(&o, &f, &late);
	outlet_put(&o, p, OUTLET_BUFFER / 2, &late);
	ok(!late.code && outlet_close(&o, &late) && strstr(late.text, "File too large"), "%s",
	   late.text);
	setrlimit(RLIMIT_FSIZE, &old);
	file_new_abort(&f);
	outlet_abort(&o);
	outlet_abort(&none);
	ok(!file_exists(at("cut")), "aborted");
}

static void test_large(void)
{
	unsigned char *p = pattern();

	test_write(p);
	test_meet(p);
	test_outlet(p);
	test_outlet_full(p);
	free(p);
}

static void on_signal(int sig)
{
	(void)sig;
	file_abort_all();
	_exit(EXIT_FAILED);
}

static void *publisher(void *arg)
{
	int i, id = (int)(intptr_t)arg;

	for (i = 0;; i++) {
		struct err e = ERR_INIT;
		char name[64];

		snprintf(name, sizeof name, "sig/f-%d-%d", id, i % 3);
		char *path = strdup(at(name));
		file_publish(path, 0, "x", 1, &e);
		free(path);
	}
	return NULL;
}

/* Killed at a random moment with files half written by several threads: no temporary may stay. */
static void test_signal(void)
{
	int trial, left = 0, codes = 0;
	struct err e = ERR_INIT;

	file_mkdir_p(at("sig"), &e);
	for (trial = 0; trial < 20; trial++) {
		struct file_new a[3];
		int status, ready[2];
		char byte;
		pid_t pid;

		if (pipe(ready))
			break;
		fflush(stdout);
		pid = fork();
		if (!pid) {
			pthread_t t;

			signal(SIGTERM, on_signal);
			file_new_open(&a[0], at("sig/a"), 0, &e);
			file_new_open(&a[1], at("sig/b"), 1, &e);
			file_new_open(&a[2], at("sig/c"), 2, &e);
			pthread_create(&t, NULL, publisher, NULL);
			if (write(ready[1], "", 1) != 1)
				_exit(99);
			for (;;)
				pause();
		}
		if (read(ready[0], &byte, 1) == 1)
			usleep((useconds_t)(500 * trial));
		kill(pid, SIGTERM);
		waitpid(pid, &status, 0);
		codes += WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED;
		close(ready[0]);
		close(ready[1]);
	}
	DIR *d = opendir(at("sig"));
	struct dirent *ent;
	while (d && (ent = readdir(d)))
		left += strstr(ent->d_name, ".tmp.") != NULL;
	if (d)
		closedir(d);
	is_int(codes, 20, "a signal ends with exit 3");
	ok(left <= 2,
	   "temporaries are removed (%d of 60 and more left by the moment between two calls)",
	   left);
}

static void test_abort_all(void)
{
	struct file_new f, g;
	struct err e = ERR_INIT;

	file_mkdir_p(at("all"), &e);
	file_new_open(&f, at("all/x"), 0, &e);
	file_new_open(&g, at("all/y"), 0, &e);
	is_int(entries(at("all")), 2, "two temporaries");
	file_abort_all();
	is_int(entries(at("all")), 0, "none after file_abort_all");
	ok(file_new_publish(&f, &e) && e.code == EXIT_FAILED, "%s", e.text);
	file_new_abort(&g);
	e = (struct err)ERR_INIT;
	ok(file_publish(at("all/x"), 0, "x", 1, &e) && e.code == EXIT_FAILED && !entries(at("all")),
	   "%s", e.text);
}

static void test_many(void)
{
	static struct file_new f[300];
	struct err e = ERR_INIT;
	char name[32];
	int i, n = 0;

	file_mkdir_p(at("many"), &e);
	for (i = 0; i < 300; i++) {
		snprintf(name, sizeof name, "many/%d", i);
		if (file_new_open(&f[i], at(name), 0, &e))
			break;
		n++;
	}
	ok(n == 256 && e.code == EXIT_FAILED, "the table holds %d: %s", n, e.text);
	is_int(entries(at("many")), 256, "a refused one leaves nothing");
	for (i = 0; i < n; i++)
		file_new_abort(&f[i]);
	is_int(entries(at("many")), 0, "all removed");
}

static void test_sweep(void)
{
	char host[65] = "", dead[200], other[200], alive[200], own[200], path[800];
	struct file_new f;
	struct err e = ERR_INIT;
	pid_t gone;
	char *p;

	gethostname(host, sizeof host - 1);
	for (p = host; *p; p++)
		if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.", *p))
			*p = '_';
	gone = fork();
	if (!gone)
		_exit(0);
	waitpid(gone, NULL, 0);
	file_mkdir_p(at("sweep"), &e);
	snprintf(dead, sizeof dead, "sweep/.s-1.tmp.%s.0.%ld", host, (long)gone);
	snprintf(alive, sizeof alive, "sweep/.s-1.tmp.%s.0.%ld", host, (long)getppid());
	snprintf(own, sizeof own, "sweep/.s-1.tmp.%s.7.%ld", host, (long)getpid());
	snprintf(other, sizeof other, "sweep/.s-1.tmp.not%s.0.1", host);
	put(at(dead), "");
	put(at(alive), "");
	put(at(own), "");
	put(at(other), "");
	put(at("sweep/.keep.tmp"), "");
	put(at("sweep/.keep.tmp.x"), "");
	put(at("sweep/.keep.tmp.host.0.x1"), "");
	put(at("sweep/keep.tmp.host.0.1"), "");
	put(at("sweep/.keep.0.1"), "");
	file_new_open(&f, at("sweep/mine"), 0, &e);
	snprintf(path, sizeof path, "%s", f.tmp);
	is_int(file_sweep(at("sweep"), false, &e), 0, "swept");
	ok(!file_exists(at(dead)), "the file of a dead process is gone");
	ok(!file_exists(at(own)), "our number, but not our file: gone");
	ok(file_exists(at(alive)) && file_exists(path), "those of living processes stay");
	ok(file_exists(at(other)), "another host's stays");
	is_int(file_sweep(at("sweep"), true, &e), 0, "swept of all");
	ok(!file_exists(at(other)) && !file_exists(at(alive)), "now they are gone");
	ok(file_exists(path), "our own open file stays");
	file_new_abort(&f);
	is_int(entries(at("sweep")), 5, "files that only look like temporaries stay");
	ok(file_sweep(at("none"), true, &e) && e.code == EXIT_REFUSED, "%s", e.text);
}

static void test_lock(void)
{
	struct err e = ERR_INIT;
	int a, b, ro;

	put(at("lock"), "");
	a = open(at("lock"), O_RDWR);
	b = open(at("lock"), O_RDWR);
	ro = open(at("lock"), O_RDONLY);
	is_int(file_lock(a, "lock", 0, FILE_EXCLUSIVE, false, &e), 0, "byte 0 exclusively");
	is_int(file_lock(b, "lock", 0, FILE_EXCLUSIVE, false, &e), 1, "held");
	is_int(file_lock(b, "lock", 0, FILE_SHARED, false, &e), 1, "held against readers too");
	is_int(e.code, 0, "held is no error");
	is_int(file_lock(b, "lock", 1, FILE_SHARED, false, &e), 0, "byte 1 is another lock");
	is_int(file_lock(a, "lock", 1, FILE_SHARED, false, &e), 0, "shared by two");
	is_int(file_lock(a, "lock", 1, FILE_EXCLUSIVE, false, &e), 1, "not exclusively then");
	is_int(file_lock(a, "lock", 0, FILE_UNLOCK, false, &e), 0, "released");
	is_int(file_lock(b, "lock", 0, FILE_EXCLUSIVE, true, &e), 0, "taken by waiting");
	close(b);
	is_int(file_lock(a, "lock", 1, FILE_EXCLUSIVE, false, &e), 0, "closing releases");
	errno = 0;
	ok(file_lock(ro, "lock", 5, FILE_EXCLUSIVE, false, &e) == -1 && e.code == EXIT_FAILED &&
		   errno == EBADF,
	   "%s", e.text);
	close(a);
	close(ro);
}

static void test_space(void)
{
	struct file_space s = { 0 }, deep = { 0 };
	struct err e = ERR_INIT;
	int before = entries(dir);

	is_int(file_space(dir, &s, &e), 0, "the space of a directory");
	ok(s.block >= 512 && !(s.block & (s.block - 1)) && s.free > 0,
	   "blocks of %" PRIu64 ", %" PRIu64 " free", s.block, s.free);
	is_int(file_space(at("not/yet/there"), &deep, &e), 0, "of one that is not there yet");
	ok(deep.block == s.block && deep.sparse == s.sparse, "is its parent's");
	is_int(entries(dir), before, "the probe leaves nothing");
	ok(!file_space("relative-name", &deep, &e), "a relative name");
	ok(file_space(at("five/x"), &deep, &e) && e.code == EXIT_FAILED, "%s", e.text);
}

int main(void)
{
	char command[64];

	if (!mkdtemp(dir)) {
		printf("Bail out! no scratch directory\n");
		return 1;
	}
	umask(022);
	test_read();
	test_paths();
	test_publish();
	test_full();
	test_large();
	test_signal();
	test_many();
	test_sweep();
	test_lock();
	test_space();
	test_abort_all(); /* last: nothing can be made after it */
	snprintf(command, sizeof command, "rm -rf '%s'", dir);
	return system(command) ? 1 : tap_end();
}
