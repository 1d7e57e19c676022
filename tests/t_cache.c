/* SPDX-License-Identifier: Apache-2.0 */
/*
 * t_cache: sizes and layout, identity, opening and locks, the shard writer and what is read back.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache.h"
#include "cache_scan.h"
#include "cache_view.h"
#include "err.h"
#include "json.h"
#include "log.h"
#include "tap.h"
#include "text.h"
#include "vouch.h"

/* The system's fcntl, or a file system's that has no locks. */
static int no_locks;

int fcntl(int fd, int cmd, ...)
{
	va_list ap;
	void *arg;

	va_start(ap, cmd);
	arg = va_arg(ap, void *);
	va_end(ap);
	if (no_locks && (cmd == F_OFD_SETLK || cmd == F_OFD_SETLKW)) {
		errno = no_locks;
		return -1;
	}
	return (int)syscall(SYS_fcntl, fd, cmd, arg);
}

static char root[] = "/tmp/dspark-t_cache.XXXXXX";

static const struct geometry small = { .rows = 10,
				       .seq_length = 9,
				       .shard_size = 4,
				       .hidden = 5,
				       .nids = 3,
				       .vocab = 7,
				       .dtype = DT_BF16,
				       .pad_token_id = 6 };

static const char *at(const char *name)
{
	static char path[4][512];
	static int turn;
	char *p = path[turn++ & 3];

	snprintf(p, 512, "%s/%s", root, name);
	return p;
}

static struct identity identity(const struct geometry *g, int64_t extra)
{
	struct identity id = { 0 };
	struct err e = ERR_INIT;
	json_t *ids = json_array();
	int i;

	for (i = 0; i < g->nids; i++)
		json_array_append_new(ids, json_integer(i - 1));
	id.json = json_pack("{s:{s:I, s:I, s:I, s:I, s:I, s:s, s:o}, s:I, s:I}", "manifest",
			    "num_samples", (json_int_t)g->rows, "seq_length",
			    (json_int_t)g->seq_length, "shard_size", (json_int_t)g->shard_size,
			    "hidden_size", (json_int_t)g->hidden, "target_vocab_size",
			    (json_int_t)g->vocab, "dtype", dtype_recipe_name(g->dtype),
			    "target_layer_ids", ids, "pad_token_id", (json_int_t)g->pad_token_id,
			    "extra", (json_int_t)extra);
	identity_finish(&id, &e);
	return id;
}

/*
 * ---- values of a test cache: row r has 1 + r * 5 % S tokens
 * ----------------------------------------------------------------
 */

static int64_t length_of(const struct geometry *g, int64_t row)
{
	return 1 + row * 5 % g->seq_length;
}

static uint16_t value(int64_t row, int64_t i)
{
	return (uint16_t)(0x3f00 + (row * 131 + i * 7) % 251);
}

static int read_weights(void *ctx, int which, int64_t row0, int64_t n, float *buf, struct err *e)
{
	const struct geometry *g = ctx;
	int64_t i;

	(void)e;
	for (i = 0; i < n * g->hidden; i++)
		buf[i] = dtype_bf16_to_f32(value(which, row0 * g->hidden + i));
	return 0;
}

static int write_row(struct shard_writer *w, const struct geometry *g, int64_t row, struct err *e)
{
	int64_t len = length_of(g, row), i, n = len * g->hidden * g->nids;
	size_t size = dtype_size(g->dtype);
	uint16_t *states = calloc((size_t)n, size), *last = calloc((size_t)(len * g->hidden), size);
	int32_t *ids = malloc((size_t)len * 4);
	uint8_t *mask = malloc((size_t)len);
	int rc;

	for (i = 0; i < n; i++)
		states[i] = value(row, i);
	for (i = 0; i < len * g->hidden; i++)
		last[i] = value(row, i + 1000);
	for (i = 0; i < len; i++) {
		ids[i] = (int32_t)((row + i) % g->vocab);
		mask[i] = i & 1;
	}
	rc = shard_row(w, row % g->shard_size, ids, mask, len, states, last, e);
	free(states);
	free(last);
	free(ids);
	free(mask);
	return rc;
}

static int write_shard(const struct cache *c, int64_t shard, struct err *e)
{
	int64_t n = geometry_shard_rows(&c->g, shard), r;
	struct shard_writer w;

	if (shard_begin(&w, c, shard, e))
		return -1;
	for (r = 0; r < n; r++)
		if (write_row(&w, &c->g, shard * c->g.shard_size + r, e)) {
			shard_abort(&w);
			return -1;
		}
	return shard_publish(&w, NULL, e);
}

static int open_cache(struct cache *c, const char *dir, const struct geometry *g, const char *plan,
		      bool work, struct err *e)
{
	struct cache_weights w = { read_weights, (void *)g };
	struct identity id = identity(g, 1);
	int rc = cache_open(c, dir, g, &id, plan, 0, work, &w, e);

	identity_release(&id);
	return rc;
}

static int write_cache(const char *dir, const struct geometry *g, struct err *e)
{
	int64_t shard, n = geometry_shards(g);
	struct cache c = CACHE_INIT;
	int rc = open_cache(&c, dir, g, "plan", true, e);

	for (shard = 0; shard < n && !rc; shard++)
		rc = write_shard(&c, shard, e);
	cache_close(&c);
	return rc;
}

static uint64_t size_of(const char *path)
{
	struct stat st;

	return stat(path, &st) ? UINT64_MAX : (uint64_t)st.st_size;
}

static int count_files(const char *dir, const char *what)
{
	DIR *d = opendir(dir);
	struct dirent *ent;
	int n = 0;

	while (d && (ent = readdir(d)))
		n += strstr(ent->d_name, what) != NULL;
	if (d)
		closedir(d);
	return n;
}

static bool contains(const char *path, const char *what)
{
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;
	bool found = !file_read_all(path, 1 << 20, &t, &e) && t.s && strstr(t.s, what);

	text_release(&t);
	return found;
}

static bool complete(const char *dir)
{
	struct cache_state s;
	struct err e = ERR_INIT;
	bool yes = !cache_inspect(&s, dir, &e) && s.complete;

	cache_state_release(&s);
	return yes;
}

/* cache_merge prints its record; here it must not reach the TAP stream. */
static int merge(const char *dir, struct err *e)
{
	int keep, null, rc;

	fflush(stdout);
	keep = dup(1);
	null = open("/dev/null", O_WRONLY);
	dup2(null, 1);
	rc = cache_merge(dir, e);
	fflush(stdout);
	dup2(keep, 1);
	close(keep);
	close(null);
	return rc;
}

/* ---- tests ---------------------------------------------------------------- */

static void test_geometry(void)
{
	struct geometry g = small, odd;
	struct err e = ERR_INIT;
	int64_t n;
	bool aligned = true, grows = true;

	is_int(geometry_shards(&g), 3, "10 rows in shards of 4");
	is_int(geometry_shard_rows(&g, 1), 4, "a full shard");
	is_int(geometry_shard_rows(&g, 2), 2, "the last shard");
	g.rows = 0;
	is_int(geometry_shards(&g), 0, "no rows, no shards");
	ok(!geometry_check(&g, "g", &e), "no rows are legal");
	g.rows = 8;
	is_int(geometry_shards(&g), 2, "a multiple has no short shard");
	for (n = 1; n < 3000; n++) {
		aligned &= geometry_header(&g, n) % 4096 == 0;
		grows &= geometry_header(&g, n) >= (uint64_t)n * (4 * 33 + 2) &&
			 geometry_header(&g, n) < (uint64_t)n * 140 + 8192;
	}
	ok(aligned && grows, "headers are whole pages and hold their rows");
	is_int((int64_t)geometry_shard_bytes(&g, 4), 4096 + 4 * 9 * (16 + 4 * 5 * 2),
	       "bytes of a shard");
	is_int((int64_t)geometry_target_weights(&g), 4096 + 2 * 7 * 5 * 2,
	       "bytes of target weights");
	is_int((int64_t)geometry_allocated(&g, 4, 10, 4096, false), 8192,
	       "allocated without holes: the whole file");

	odd = small, odd.dtype = DT_I32;
	e = (struct err)ERR_INIT;
	ok(geometry_check(&odd, "g", &e) && e.code == EXIT_REFUSED,
	   "refused: states of a dtype that is none");
	odd = small, odd.rows = 1000001, odd.shard_size = 1;
	e = (struct err)ERR_INIT;
	ok(geometry_check(&odd, "g", &e) && strstr(e.text, "six digits"),
	   "refused: more shards than names");
	odd = small, odd.rows = odd.shard_size = 10000000;
	e = (struct err)ERR_INIT;
	ok(geometry_check(&odd, "g", &e) && strstr(e.text, "100 MB"),
	   "refused: a header that no reader takes");
	odd = small, odd.seq_length = INT64_C(1) << 50, odd.hidden = 1 << 20;
	e = (struct err)ERR_INIT;
	ok(geometry_check(&odd, "g", &e) && strstr(e.text, "2^63"),
	   "refused: a file longer than files can be");
	odd = small, odd.hidden = 0;
	e = (struct err)ERR_INIT;
	ok(geometry_check(&odd, "g", &e), "refused: hidden_size 0");
}

static void test_identity(void)
{
	struct identity a = identity(&small, 1), b = identity(&small, 2), c = identity(&small, 1),
			m = { 0 };
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;

	is_str(a.digest, c.digest, "same members, same digest");
	ok(strcmp(a.digest, b.digest), "another member, another digest");
	identity_differences(&t, a.json, c.json);
	is_int((int64_t)t.len, 0, "no difference");
	json_object_set_new(json_object_get(b.json, "manifest"), "seq_length", json_integer(77));
	json_object_set_new(json_object_get(b.json, "manifest"), "train_split",
			    json_string("a\xc3\xa4"));
	json_object_set_new(json_object_get(b.json, "manifest"), "complete", json_true());
	json_object_set_new(json_object_get(b.json, "manifest"), "format_version", json_integer(2));
	json_object_set_new(json_object_get(b.json, "manifest"), "mask_reasoning_content",
			    json_false());
	identity_differences(&t, a.json, b.json);
	is_str(t.s,
	       "seq_length: 9 -> 77\ntrain_split: absent -> "
	       "\"a\\u00e4\"\nextra: 1 -> 2",
	       "all differing fields");
	text_clear(&t);
	m.json = json_pack("{s:O}", "manifest", json_object_get(a.json, "manifest"));
	identity_differences(&t, m.json, c.json);
	is_int((int64_t)t.len, 0, "a manifest alone is compared as a manifest");
	text_clear(&t);
	json_object_set_new(m.json, "manifest",
			    json_pack("{s:[i,i], s:s, s:n, s:b}", "ids", 1, 5, "b", "x\xe2\x82\xac",
				      "n", "f", 0));
	ok(!identity_manifest(&t, m.json, true, &e), "manifest text");
	is_str(t.s,
	       "{\n  \"b\": \"x\\u20ac\",\n  \"complete\": true,\n  "
	       "\"f\": false,\n  \"format_version\": 1,\n  \"ids\": [\n   "
	       " 1,\n"
	       "    5\n  ],\n  \"n\": null\n}",
	       "the bytes of json.dump(indent=2, sort_keys=True)");
	text_release(&t);
	identity_release(&a);
	identity_release(&b);
	identity_release(&c);
	identity_release(&m);
}

/* The header of a published shard says what was written, and its bytes are where it says. */
static void test_contents(const char *dir)
{
	struct cache_view v;
	struct shard_head h;
	struct err e = ERR_INIT;
	int64_t ids[9], mask[9], i, r, bad = 0, lengths = 0;
	uint16_t states[9 * 15], last[9 * 5], zero[9 * 15] = { 0 };
	char hex[DIGEST_HEX];

	ok(!cache_view_open(&v, dir, &e) && !cache_view_shard(&v, 2, &h, &e),
	   "the last shard opens: %s", e.text);
	is_int(h.rows, 2, "its rows");
	for (r = 0; r < h.rows; r++) {
		int64_t row = 8 + r, len = h.row_tokens[r];

		lengths += len == length_of(&small, row);
		shard_read(&h, &v.g, SHARD_IDS, r, 0, 9, ids, &e);
		shard_read(&h, &v.g, SHARD_MASK, r, 0, 9, mask, &e);
		shard_read(&h, &v.g, SHARD_STATES, r, 0, 9, states, &e);
		shard_read(&h, &v.g, SHARD_LAST, r, 0, 9, last, &e);
		for (i = 0; i < 9; i++) {
			bad += ids[i] != (i < len ? (row + i) % 7 : 6);
			bad += mask[i] != (i < len ? (i & 1) : 0);
		}
		for (i = 0; i < len * 15; i++)
			bad += states[i] != value(row, i);
		for (i = 0; i < len * 5; i++)
			bad += last[i] != value(row, i + 1000);
		bad += memcmp(states + len * 15, zero, (size_t)(9 - len) * 30) != 0;
		bad += memcmp(last + len * 5, zero, (size_t)(9 - len) * 10) != 0;
		digest_xxh3(hex, ids, (size_t)len * 8);
		bad += memcmp(hex, h.hash[SHARD_IDS] + 33 * r, 32) != 0;
		digest_xxh3(hex, states, (size_t)len * 30);
		bad += memcmp(hex, h.hash[SHARD_STATES] + 33 * r, 32) != 0;
		digest_xxh3(hex, last, (size_t)len * 10);
		bad += memcmp(hex, h.hash[SHARD_LAST] + 33 * r, 32) != 0;
	}
	is_int(lengths, 2, "row_tokens are the real lengths");
	is_int(bad, 0, "ids, mask, states, pads and hashes are what was written");
	shard_head_release(&h);
	cache_view_release(&v);
}

static void test_writing(void)
{
	char dir[512];
	struct shard_writer w, never = { 0 };
	struct cache c = CACHE_INIT;
	struct err e = ERR_INIT;
	struct identity id = identity(&small, 1), other = identity(&small, 2);
	bool done[3];
	int64_t count;
	uint64_t bytes;

	strcpy(dir, at("w"));
	shard_abort(&never);
	ok(!cache_done(at("nowhere"), &small, id.digest, done, &count, &e) && !count,
	   "a missing directory holds no shards");
	ok(!open_cache(&c, dir, &small, "plan", true, &e), "open: %s", e.text);
	ok(!shard_begin(&w, &c, 0, &e) && !write_row(&w, &small, 3, &e) &&
		   !write_row(&w, &small, 0, &e),
	   "rows in any order");
	ok(write_row(&w, &small, 3, &e) && e.code == EXIT_FAILED, "a row twice is refused");
	e = (struct err)ERR_INIT;
	ok(shard_publish(&w, &bytes, &e) && e.code == EXIT_FAILED,
	   "a shard with missing rows is not published");
	is_int(count_files(dir, ".tmp."), 0, "and leaves no temporary");
	e = (struct err)ERR_INIT;
	ok(shard_begin(&w, &c, 3, &e), "a shard beyond the last is refused");
	cache_close(&c);

	e = (struct err)ERR_INIT;
	ok(!write_cache(dir, &small, &e), "a whole cache: %s", e.text);
	is_int((int64_t)size_of(at("w/shard-000000.safetensors")),
	       (int64_t)geometry_shard_bytes(&small, 4), "size of a full shard");
	is_int((int64_t)size_of(at("w/shard-000002.safetensors")),
	       (int64_t)geometry_shard_bytes(&small, 2), "size of the last");
	is_int((int64_t)size_of(at("w/target_weights.safetensors")),
	       (int64_t)geometry_target_weights(&small), "size of target weights");
	is_int((int64_t)size_of(at("w/.dspark.lock")), 0,
	       "the lock file is empty when nobody runs");
	ok(!cache_done(dir, &small, id.digest, done, &count, &e) && count == 3 && done[0] &&
		   done[1] && done[2],
	   "all are done");
	ok(!cache_done(dir, &small, other.digest, done, &count, &e) && count == 0,
	   "none is done for another identity");
	ok(!truncate(at("w/shard-000001.safetensors"), 5000) &&
		   !cache_done(dir, &small, id.digest, done, &count, &e) && count == 2 && !done[1],
	   "a short shard is not done");
	ok(merge(dir, &e) && e.code == EXIT_REFUSED && strstr(e.text, "shard 1 missing (1 of 3)"),
	   "merge: %s", e.text);
	e = (struct err)ERR_INIT;
	ok(!open_cache(&c, dir, &small, "plan", true, &e) && !write_shard(&c, 1, &e),
	   "it is written again");
	cache_close(&c);
	test_contents(dir);
	identity_release(&id);
	identity_release(&other);
}

static void test_opening(void)
{
	char dir[512];
	struct geometry longer = small;
	struct cache c = CACHE_INIT, d = CACHE_INIT;
	struct err e = ERR_INIT;
	struct stat before, after;

	strcpy(dir, at("w"));
	longer.seq_length = 12;
	ok(!merge(dir, &e) && complete(dir), "merge completes: %s", e.text);
	stat(at("w/dspark.json"), &before);
	ok(!merge(dir, &e), "merge again");
	stat(at("w/dspark.json"), &after);
	ok(before.st_ino == after.st_ino && before.st_mtim.tv_nsec == after.st_mtim.tv_nsec,
	   "and nothing is written");
	ok(!open_cache(&c, dir, &small, "plan", false, &e) && complete(dir),
	   "a rank without work leaves it complete");
	cache_close(&c);
	ok(open_cache(&c, dir, &longer, "plan", true, &e) && e.code == EXIT_REFUSED &&
		   strstr(e.text, "\nseq_length: 9 -> 12"),
	   "another cache is refused with the field that differs");
	ok(complete(dir), "and left as it was");
	e = (struct err)ERR_INIT;
	stat(at("w/target_weights.safetensors"), &before);
	ok(!open_cache(&c, dir, &small, "plan", true, &e) && !complete(dir),
	   "a rank with work clears complete");
	stat(at("w/target_weights.safetensors"), &after);
	ok(before.st_ino == after.st_ino, "target weights are left alone");
	ok(!contains(at("w/dspark.json"), "files"), "and the hashes are gone until the next merge");
	ok(contains(at("w/.dspark.lock"), "plan"), "the lock file names the plan");

	ok(!open_cache(&d, dir, &small, "plan", true, &e), "a second rank of the plan comes in");
	cache_close(&d);
	ok(contains(at("w/.dspark.lock"), "plan"), "its end leaves the name there");
	ok(open_cache(&d, dir, &small, "another", true, &e) && e.code == EXIT_REFUSED &&
		   strstr(e.text, "another plan, plan"),
	   "another living plan is refused: %s", e.text);
	e = (struct err)ERR_INIT;
	ok(merge(dir, &e) && e.code == EXIT_REFUSED && strstr(e.text, "ranks of plan plan"),
	   "merge waits for nobody: %s", e.text);
	cache_close(&c);
	e = (struct err)ERR_INIT;
	ok(!open_cache(&c, dir, &small, "another", true, &e), "when they have ended it opens");
	cache_close(&c);
	is_int((int64_t)size_of(at("w/.dspark.lock")), 0, "the last one empties the lock file");
	ok(!merge(dir, &e) && complete(dir), "and merge completes it again");
}

static void put(const char *path, const char *s)
{
	struct err e = ERR_INIT;

	file_publish(path, 0, s, strlen(s), &e);
}

static void test_strangers(void)
{
	struct cache c = CACHE_INIT;
	struct err e = ERR_INIT;
	struct cache_state s;

	mkdir(at("f"), 0777);
	put(at("f/manifest.json"), "{\"seq_length\": 9, \"complete\": true}");
	ok(!cache_inspect(&s, at("f"), &e) && s.exists && s.foreign && s.complete,
	   "a manifest alone is the reference's");
	cache_state_release(&s);
	ok(open_cache(&c, at("f"), &small, "plan", true, &e) && e.code == EXIT_REFUSED,
	   "and refused: %s", e.text);
	is_int(count_files(at("f"), "dspark"), 0, "nothing of ours is left in it");
	unlink(at("f/manifest.json"));
	put(at("f/shard-000001.safetensors"), "somebody's");
	e = (struct err)ERR_INIT;
	ok(open_cache(&c, at("f"), &small, "plan", true, &e) && e.code == EXIT_REFUSED,
	   "shards of nobody are refused: %s", e.text);

	e = (struct err)ERR_INIT;
	put(at("w/.shard-000000.safetensors.tmp.elsewhere.0.1"), "");
	ok(!open_cache(&c, at("w"), &small, "plan", false, &e), "open");
	is_int(count_files(at("w"), ".tmp."), 0,
	       "temporaries of the dead are swept, of any host when "
	       "nobody lives");
	put(at("w/.shard-000000.safetensors.tmp.elsewhere.0.1"), "");
	e = (struct err)ERR_INIT;
	{
		struct cache d = CACHE_INIT;

		ok(!open_cache(&d, at("w"), &small, "plan", false, &e),
		   "open beside a living rank");
		is_int(count_files(at("w"), ".tmp."), 1, "which may own that of another host");
		cache_close(&d);
	}
	cache_close(&c);
	e = (struct err)ERR_INIT;
	ok(!merge(at("w"), &e) && !count_files(at("w"), ".tmp."), "merge leaves none");

	put(at("w/dspark.json"), "{}");
	ok(open_cache(&c, at("w"), &small, "plan", true, &e) && e.code == EXIT_REFUSED &&
		   strstr(e.text, "damaged"),
	   "a damaged dspark.json is refused: %s", e.text);
	unlink(at("w/dspark.json"));
	unlink(at("w/manifest.json"));
	e = (struct err)ERR_INIT;
	ok(!open_cache(&c, at("w"), &small, "plan", true, &e),
	   "without both, shards of this identity are taken over: %s", e.text);
	cache_close(&c);
}

/* A rank that is killed holds nothing; one that lives is seen from other processes. */
static void test_processes(void)
{
	int ready[2], end[2], status;
	struct cache c = CACHE_INIT;
	struct err e = ERR_INIT;
	char byte;
	pid_t pid;

	if (pipe(ready) || pipe(end))
		return;
	pid = fork();
	if (!pid) {
		close(end[1]);
		byte = open_cache(&c, at("p"), &small, "theirs", true, &e) ? 'n' : 'y';
		if (write(ready[1], &byte, 1) == 1 && read(end[0], &byte, 1) >= 0)
			_exit(0);
		_exit(1);
	}
	close(end[0]);
	ok(read(ready[0], &byte, 1) == 1 && byte == 'y', "another process opens it");
	ok(open_cache(&c, at("p"), &small, "ours", true, &e) && strstr(e.text, "theirs"),
	   "and is named: %s", e.text);
	close(end[1]);
	waitpid(pid, &status, 0);
	e = (struct err)ERR_INIT;
	ok(!open_cache(&c, at("p"), &small, "ours", true, &e),
	   "it ended without closing: the lock is free");
	cache_close(&c);
	is_int((int64_t)size_of(at("p/.dspark.lock")), 0, "and emptied by the next");
	close(ready[0]);
	close(ready[1]);
}

static const char *in(const char *dir, const char *name)
{
	char both[128];

	snprintf(both, sizeof both, "%s/%s", dir, name);
	return at(both);
}

/* Any order of openers is harmless where nothing can be locked. */
static void test_no_locks(const char *dir, int number)
{
	static const char left[] = ".shard-000001.safetensors.tmp.elsewhere.0.1";
	struct cache a = CACHE_INIT, b = CACHE_INIT, idle = CACHE_INIT;
	struct err e = ERR_INIT;
	struct stat before, after;

	no_locks = number;
	log_level(-1);
	ok(!open_cache(&a, at(dir), &small, "plan", true, &e) && !a.lock.works,
	   "no locks (%s): opens: %s", strerror(number), e.text);
	ok(!write_shard(&a, 0, &e) && !write_shard(&a, 2, &e), "writes");
	put(in(dir, left), "");
	ok(!open_cache(&b, at(dir), &small, "another", true, &e), "so does another: %s", e.text);
	is_int(count_files(at(dir), ".tmp."), 1, "and sweeps nothing that may be alive");
	unlink(in(dir, left));
	ok(!write_shard(&b, 1, &e) && !write_shard(&b, 2, &e) && !write_shard(&a, 1, &e),
	   "all publish the same bytes");
	cache_close(&b);
	ok(!merge(at(dir), &e) && complete(at(dir)), "merge: %s", e.text);
	stat(in(dir, "target_weights.safetensors"), &before);
	ok(!open_cache(&idle, at(dir), &small, "plan", false, &e) && complete(at(dir)),
	   "who has nothing to write leaves it complete");
	stat(in(dir, "target_weights.safetensors"), &after);
	ok(before.st_ino == after.st_ino, "target weights are left alone");
	cache_close(&idle);
	cache_close(&a);
	is_int((int64_t)size_of(in(dir, ".dspark.lock")), 0, "the lock file stays empty");
	log_level(0);
	no_locks = 0;
}

static void test_allocation(void)
{
	static const struct geometry shapes[] = {
		{ 12, 700, 12, 96, 3, 8, DT_F32, 0 },
		{ 12, 64, 12, 8, 1, 8, DT_BF16, 0 },
		{ 3, 4097, 3, 33, 5, 8, DT_F16, 0 },
		{ 1, 3000, 1, 128, 2, 8, DT_BF16, 0 },
	};
	struct file_space space;
	struct err e = ERR_INIT;
	size_t k;

	if (file_space(root, &space, &e))
		return;
	for (k = 0; k < sizeof shapes / sizeof *shapes; k++) {
		const struct geometry *g = &shapes[k];
		int64_t tokens = 0, r, disk, bound;
		char name[32], path[64];
		struct stat st;

		snprintf(name, sizeof name, "a%zu", k);
		snprintf(path, sizeof path, "a%zu/shard-000000.safetensors", k);
		for (r = 0; r < g->rows; r++)
			tokens += length_of(g, r);
		e = (struct err)ERR_INIT;
		ok(!write_cache(at(name), g, &e) && !stat(at(path), &st),
		   "a shard of %d rows is written: %s", (int)g->rows, e.text);
		disk = (int64_t)st.st_blocks * 512;
		bound = (int64_t)geometry_allocated(g, g->rows, tokens, space.block, space.sparse);
		ok(disk <= bound &&
			   bound - disk <= 2 * g->rows * SHARD_TENSORS * (int64_t)space.block,
		   "allocated bytes are bounded: %lld of at most %lld", (long long)disk,
		   (long long)bound);
		is_int((int64_t)st.st_size, (int64_t)geometry_shard_bytes(g, g->rows),
		       "and the size is exact");
	}
}

static void test_values(void)
{
	uint16_t b[9] = { 0x3f80, 0x7f7f, 0xff7f, 0, 1, 0x8001, 0x3f80, 0x3f80, 0x3f80 },
		 zeros[9] = { 0, 0x8000 };
	float f[3] = { 1, -3e38f, 0 };
	bool zero, good = true;
	int i;

	ok(scan_finite(b, sizeof b, DT_BF16, &zero) && !zero, "finite bf16, largest ones too");
	for (i = 0; i < 9; i++) {
		uint16_t keep = b[i];

		b[i] = i & 1 ? 0x7f80 : 0xffc1;
		good &= !scan_finite(b, sizeof b, DT_BF16, &zero);
		b[i] = keep;
	}
	ok(good, "infinity or NaN at any of 9 places");
	ok(scan_finite(zeros, sizeof zeros, DT_BF16, &zero) && zero, "+0 and -0 are zero");
	ok(scan_finite(zeros, 2, DT_F16, &zero) && zero, "one element");
	b[8] = 0x7bff;
	ok(scan_finite(b + 8, 2, DT_F16, &zero) && !zero, "the largest fp16");
	b[8] = 0xfc00;
	ok(!scan_finite(b + 8, 2, DT_F16, &zero), "fp16 -infinity");
	ok(scan_finite(f, sizeof f, DT_F32, &zero) && !zero, "finite fp32");
	f[2] = -1.0f / (f[2] * 0);
	ok(!scan_finite(f, sizeof f, DT_F32, &zero), "fp32 infinity in the tail");
}

int main(void)
{
	char command[64];

	log_program("t_cache");
	if (!mkdtemp(root))
		return 1;
	test_geometry();
	test_identity();
	test_writing();
	test_opening();
	test_strangers();
	test_processes();
	test_no_locks("n1", ENOLCK);
	test_no_locks("n2", EOPNOTSUPP);
	test_allocation();
	test_values();
	snprintf(command, sizeof command, "rm -rf %s", root);
	ok(!system(command), "clean up");
	return tap_end();
}
