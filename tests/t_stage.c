/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage: packed blocks, who holds which rows, and that every form gives the bytes of the checkpoint
 * or says what is wrong. The checkpoint is made here, and so is the walk over it: each kind of
 * sharding, parts, a fused tensor, an alias, an absent bias.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint.h"
#include "err.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "pack.h"
#include "plan.h"
#include "safetensors.h"
#include "model.h"
#include "stage.h"
#include "tap.h"
#include "text.h"

static char dir[] = "/tmp/dspark-stage.XXXXXX";

static uint64_t state = 88172645463325252u;

static uint32_t number(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)(state >> 32);
}

/* Nearly normal, sigma 0.02. */
static float weight(void)
{
	int i, sum = 0;

	for (i = 0; i < 12; i++)
		sum += (int)(number() & 0xffff);
	return ((float)sum / 65536 - 6) * 0.02f;
}

static void must(int rc, const struct err *e)
{
	if (!rc)
		return;
	printf("Bail out! %s\n", e->text);
	exit(1);
}

/* ---- packed blocks --------------------------------------------------------------------------- */

enum filling { NORMAL, UNIFORM, ZERO, SPECIAL, FILLINGS };

static void fill(unsigned char *p, size_t n, enum dtype d, enum filling how)
{
	static const uint32_t special[] = { 0,          0x80000000, 0x7f800000, 0xff800000,
					    0x7fc00000, 1,          0x7fffffff, 0x3f800000 };
	size_t i, w = dtype_size(d);

	for (i = 0; i < n; i++)
		p[i] = how == ZERO ? 0 : (unsigned char)number();
	for (i = 0; (how == NORMAL || how == SPECIAL) && i + w <= n; i += w) {
		uint32_t u = special[number() & 7];
		float f = weight();

		if (how == SPECIAL)
			memcpy(&f, &u, sizeof f);
		if (d == DT_F32 || d == DT_BF16 || d == DT_F16)
			dtype_convert(p + i, d, &f, DT_F32, 1);
	}
}

/* Everything but the hash was changed on purpose: the decoder itself must hold. */
static int unpack_forged(void *out, size_t n, unsigned char *block, size_t len, void *scratch)
{
	char hex[DIGEST_HEX];

	digest_xxh3(hex, block, len - 32);
	memcpy(block + len - 32, hex, 32);
	return pack_unpack(out, n, block, len, scratch);
}

static void test_pack(void)
{
	static const enum dtype dtypes[] = { DT_F32,     DT_BF16,    DT_F16,    DT_F64,
					     DT_I64,     DT_I32,     DT_U8,     DT_I8,
					     DT_F8_E4M3, DT_F8_E5M2, DT_F8_E8M0 };
	static const size_t sizes[] = { 1,         2,   7,   63,   64,   65,   127,
					128,       255, 256, 1000, 4096, 4097, PACK_BLOCK - 2,
					PACK_BLOCK };
	unsigned char *src = malloc(PACK_BLOCK), *out = malloc(PACK_BLOCK),
		      *block = malloc(pack_bound(PACK_BLOCK));
	void *scratch = malloc(PACK_SCRATCH);
	int wrong = 0, too_long = 0, missed = 0, cut = 0;
	size_t d, s, i, len;
	int how;

	for (d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
		for (s = 0; s < sizeof sizes / sizeof *sizes; s++)
			for (how = 0; how < FILLINGS; how++) {
				size_t n = sizes[s];

				fill(src, n, dtypes[d], how);
				len = pack_block(block, src, n, dtypes[d], scratch);
				too_long += len > pack_bound(n);
				memset(out, 0x55, n);
				wrong += pack_unpack(out, n, block, len, scratch) ||
					 memcmp(out, src, n);
				cut += !pack_unpack(out, n, block, len - 1, scratch) ||
				       !pack_unpack(out, n, block, len / 2, scratch) ||
				       !pack_unpack(out, n, block, 0, scratch);
				block[number() % len] ^= (unsigned char)(1 << (number() & 7));
				missed += !pack_unpack(out, n, block, len, scratch) ||
					  !pack_check(block, len);
			}
	is_int(wrong, 0, "blocks unpack to what was packed");
	is_int(too_long, 0, "no block is longer than its bound");
	is_int(missed, 0, "a changed bit is seen");
	is_int(cut, 0, "a cut block is refused");

	fill(src, PACK_BLOCK, DT_BF16, NORMAL);
	len = pack_block(block, src, PACK_BLOCK, DT_BF16, scratch);
	ok((double)len / PACK_BLOCK < 0.73, "bf16 weights pack to %.3f", (double)len / PACK_BLOCK);
	ok(pack_unpack(out, PACK_BLOCK - 2, block, len, scratch), "another length is refused");
	for (i = 0; i < 20000; i++) {
		len = pack_block(block, src, 512, DT_BF16, scratch);
		block[i % 2 ? number() % 16 : number() % (len - 32)] = (unsigned char)number();
		unpack_forged(out, 512, block, i % 3 ? len : 32 + number() % (len - 32), scratch);
	}
	ok(true, "forged blocks do no harm");
	free(src);
	free(out);
	free(block);
	free(scratch);
}

/* ---- shares ---------------------------------------------------------------------------------- */

static void share_is(struct stage_mesh m, int share, enum shard how, int64_t count, int64_t rows,
		     int64_t first, int64_t n)
{
	int64_t f, k;

	stage_share(&m, share, how, count, rows, &f, &k);
	if (!ok(f == first && k == n, "world %d ep %d replicate %d share %d: %s of [%d,%d]",
		m.world, m.ep, m.replicate, share,
		how == SHARD_EXPERT  ? "EXPERT"
		: how == SHARD_WHOLE ? "WHOLE"
				     : "ROWS",
		(int)count, (int)rows))
		printf("# got [%d, +%d), want [%d, +%d)\n", (int)f, (int)k, (int)first, (int)n);
}

static void test_shares(void)
{
	const struct stage_mesh three = { 3, 1, 1, true }, replicated = { 3, 1, 1, false };

	share_is(three, 0, SHARD_ROWS, 1, 7, 0, 3);
	share_is(three, 1, SHARD_ROWS, 1, 7, 3, 3);
	share_is(three, 2, SHARD_ROWS, 1, 7, 6, 1);
	share_is(three, 2, SHARD_ROWS, 1, 4, 4, 0);	/* c = 2: nothing is left */
	share_is(three, 1, SHARD_TABLE, 1, 7, 0, 7);
	/* experts belong to ep_index also where nothing is cut */
	share_is((struct stage_mesh){ 6, 2, 1, false }, 3, SHARD_EXPERT, 4, 5, 10, 10);
	share_is((struct stage_mesh){ 6, 2, 1, false }, 3, SHARD_ROWS, 1, 7, 0, 7);
	share_is(three, 2, SHARD_ROWS, 1, 1, 1, 0);	/* c * r = 2 > 1 */
	share_is(three, 2, SHARD_WHOLE, 1, 7, 0, 7);
	share_is(replicated, 2, SHARD_ROWS, 1, 7, 0, 7);
	share_is(replicated, 2, SHARD_EXPERT, 4, 7, 0, 28);
	share_is((struct stage_mesh){ 2, 2, 1, true }, 1, SHARD_EXPERT, 4, 5, 10, 10);
	/* ep_shard 1 of 3, ep_index 1: 10 rows by c = 4 */
	share_is((struct stage_mesh){ 6, 2, 1, true }, 3, SHARD_EXPERT, 4, 5, 14, 4);
	share_is((struct stage_mesh){ 6, 2, 1, true }, 5, SHARD_EXPERT, 4, 5, 18, 2);
	/* shard group of 4: the third */
	share_is((struct stage_mesh){ 8, 2, 2, true }, 6, SHARD_ROWS, 1, 8, 4, 2);
	/* ep spans shard groups */
	share_is((struct stage_mesh){ 8, 8, 4, true }, 5, SHARD_EXPERT, 8, 3, 15, 3);
	share_is((struct stage_mesh){ 8, 8, 4, true }, 5, SHARD_ROWS, 1, 3, 2, 1);
}

/*
 * Within a shard group every row is held, and once; so is every expert's where the group holds all
 * of them.
 */
static void test_cover(void)
{
	int world, ep, replicate, bad = 0, meshes = 0;

	for (world = 1; world <= 12; world++)
		for (replicate = 1; replicate <= world; replicate++)
			for (ep = 1; ep <= 4; ep++) {
				struct stage_mesh m = { world, ep, replicate, true };
				struct err e = ERR_INIT;
				int shares, s, kind, held[2][12 * 5] = { { 0 } };

				if (stage_shares(&m, &shares, &e))
					continue;
				meshes++;
				for (s = 0; s < shares; s++)
					for (kind = 0; kind < 2; kind++) {
						int64_t first, n;

						stage_share(&m, s, kind ? SHARD_EXPERT : SHARD_ROWS,
							    kind ? 12 : 1, kind ? 5 : 37, &first,
							    &n);
						while (n--)
							held[kind][first + n]++;
					}
				for (s = 0; s < 60; s++) {
					bad += s < 37 && held[0][s] != shares / (world / replicate);
					bad += held[1][s] != 1;
				}
			}
	is_int(bad, 0, "%d meshes hold every row as often as they should", meshes);
}

static void test_key(void)
{
	char a[DIGEST_HEX], b[DIGEST_HEX];
	const struct stage_mesh one = { 1, 1, 1, false }, four = { 4, 1, 2, false },
				ep = { 4, 2, 2, false }, cut = { 4, 2, 2, true },
				other = { 4, 1, 2, true };

	stage_key(a, "w", &one, 0, false, "");
	stage_key(b, "w", &four, 0, false, "");
	is_str(a, b, "where nothing is cut there is one key for every world");
	stage_key(b, "w", &ep, 0, false, "");
	ok(strcmp(a, b), "ep_size counts");
	stage_key(b, "v", &one, 0, false, "");
	ok(strcmp(a, b), "weights count");
	stage_key(b, "w", &one, 3, false, "");
	ok(strcmp(a, b), "the number of layers counts");
	stage_key(b, "w", &cut, 0, false, "");
	ok(strcmp(a, b), "sharding counts");
	stage_key(a, "w", &other, 0, false, "");
	ok(strcmp(a, b), "the mesh counts");
}

/* ---- a checkpoint and a walk over it --------------------------------------------------------- */

#define E 4		/* experts */
#define I 3		/* their rows */

static const struct {
	const char *name;
	enum dtype dtype;
	int ndim;
	int64_t shape[3];
} tensors[2][8] = {
	{ { "embed.weight", DT_BF16, 2, { 10, 4 } },
	  { "q.weight", DT_F32, 2, { 5, 4 } },
	  { "k.weight", DT_F32, 2, { 2, 4 } },
	  { "norm.weight", DT_F16, 1, { 4 } } },
	{ { "e.0.weight", DT_BF16, 2, { I, 4 } },
	  { "e.1.weight", DT_BF16, 2, { I, 4 } },
	  { "e.2.weight", DT_BF16, 2, { I, 4 } },
	  { "e.3.weight", DT_BF16, 2, { I, 4 } },
	  { "fused", DT_BF16, 3, { E, I, 4 } },
	  { "ids", DT_I64, 2, { 9, 2 } },
	  { "big.weight", DT_BF16, 2, { 700, 999 } },
	  { "stray", DT_F32, 1, { 3 } } },
};

static void write_tensors(const char *path, int file)
{
	struct st_tensor st[8] = { { 0 } };
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;
	size_t n = 0, i, k;

	for (; n < 8 && tensors[file][n].name; n++) {
		st[n] = (struct st_tensor){ .name = (char *)tensors[file][n].name,
					    .dtype = tensors[file][n].dtype,
					    .ndim = tensors[file][n].ndim };
		memcpy(st[n].shape, tensors[file][n].shape, sizeof tensors[file][n].shape);
	}
	must(safetensors_header(&t, st, n, NULL, 0, 0, &e), &e);
	for (i = 0; i < n; i++) {
		size_t bytes = (size_t)(st[i].end - st[i].begin);
		unsigned char *p = malloc(bytes);

		fill(p, bytes, st[i].dtype, NORMAL);
		for (k = 0; st[i].dtype == DT_I64 && k < bytes; k++)
			p[k] = (unsigned char)k;
		text_addn(&t, p, bytes);
		free(p);
	}
	must(file_publish(path, 0, t.s, t.len, &e), &e);
	text_release(&t);
}

static struct weight fields[8];

/*
 * embed TABLE, its alias as the head, [q; k] ROWS with an absent bias, a vector WHOLE, experts one
 * by one and fused, integers, a large matrix.
 */
static int walk(struct target *t, struct weight_walk *w, struct err *e)
{
	struct weight_spec s[8] = {
		weight_matrix(&fields[0], UNIT_EMBED, -1, 10, 4, "embed.weight"),
		weight_matrix(&fields[1], UNIT_LAYER, 0, 5, 4, "q.weight"),
		weight_vector(&fields[2], UNIT_LAYER, 0, 7, "bias"),
		weight_vector(&fields[3], UNIT_LAYER, 0, 4, "norm.weight"),
		weight_matrix(&fields[4], UNIT_EXPERTS, 0, I, 4, "e.{e}.weight"),
		weight_matrix(&fields[5], UNIT_EXPERTS, 0, I, 4, "f.{e}.weight"),
		weight_matrix(&fields[6], UNIT_LAYER, 0, 9, 2, "ids"),
		weight_matrix(&fields[7], UNIT_FINAL, -1, 700, 999, "big.weight"),
	};
	struct weight_spec head = weight_matrix(&fields[0], UNIT_EXPORT, -1, 10, 4, "embed.weight");
	int i;

	(void)t;
	s[0].shard = SHARD_TABLE;
	weight_part_add(&s[1], 2, "k.weight");
	s[2].optional = true;
	s[3].shard = SHARD_WHOLE;
	s[4].count = s[5].count = E;
	s[4].shard = s[5].shard = SHARD_EXPERT;
	strcpy(s[5].fused, "fused");
	s[6].kind = WEIGHT_RAW;
	for (i = 0; i < 8; i++)
		if (w->visit(w, &s[i], e))
			return -1;
	return w->visit(w, &head, e);
}

static const struct model made_up = { .name = "made-up", .weights = walk };

/* A model that makes two tensors at staging, besides one it reads. */
static int64_t classes[11];
static float mix[3][2];

static int walk_derived(struct target *t, struct weight_walk *w, struct err *e)
{
	struct weight_spec s[3] = {
		weight_vector(&fields[0], UNIT_ALWAYS, -1, 11, "classes"),
		weight_matrix(&fields[1], UNIT_LAYER, 0, 3, 2, "mix"),
		weight_vector(&fields[2], UNIT_LAYER, 0, 4, "norm.weight"),
	};
	int i;

	(void)t;
	s[0].kind = WEIGHT_RAW;
	s[0].shard = SHARD_WHOLE;
	s[0].derived = s[1].derived = true;
	for (i = 0; i < 3; i++)
		if (w->visit(w, &s[i], e))
			return -1;
	return 0;
}

static int derive(struct target *t, const char *model, char digest[33],
		  int (*put)(void *ctx, const char *name, enum dtype dtype, int64_t rows,
			     int64_t cols, const void *data, struct err *e),
		  void *ctx, struct err *e)
{
	(void)t;
	digest_xxh3(digest, classes, sizeof classes);
	return !*model || put(ctx, "classes", DT_I64, 11, 1, classes, e) ||
			       put(ctx, "mix", DT_F32, 3, 2, mix, e)
		       ? -1
		       : 0;
}

static const struct model deriving = { .name = "deriving",
				       .weights = walk_derived,
				       .derive = derive };

struct bed {
	struct checkpoint c;
	struct target t;
	struct plan p;
	char *model, *stage;
};

static void bed_open(struct bed *b, struct stage_mesh m)
{
	struct err e = ERR_INIT;

	*b = (struct bed){ .t.model = &made_up };
	b->model = file_join(dir, "model", &e);
	b->stage = file_join(dir, "stage", &e);
	must(checkpoint_open(&b->c, b->model, false, &e), &e);
	b->p.world = m.world;
	b->p.ep = m.ep;
	b->p.replicate = m.replicate;
	b->p.cut = m.cut;
	must(checkpoint_identity(&b->c, b->p.weights, &e), &e);
	stage_key(b->p.stage_key, b->p.weights, &m, 0, false, "");
}

static void bed_close(struct bed *b)
{
	checkpoint_release(&b->c);
	free(b->model);
	free(b->stage);
}

static int make(struct bed *b, enum stage_form form, const bool *ranks, struct stage_made *made,
		struct err *e)
{
	struct stage_options o = { form, ranks, false };
	struct stage_made none;

	return stage_make(b->stage, &b->p, &b->t, &b->c, &o, made ? made : &none, e);
}

static void remove_dir(const char *path)
{
	DIR *d = opendir(path);
	struct dirent *ent;

	while (d && (ent = readdir(d)))
		if (strcmp(ent->d_name, ".") && strcmp(ent->d_name, ".."))
			unlinkat(dirfd(d), ent->d_name, 0);
	if (d)
		closedir(d);
	rmdir(path);
}

static void make_model(void)
{
	struct err e = ERR_INIT;
	char *model = file_join(dir, "model", &e), *path;
	static const char *const names[] = { "a.safetensors", "b.safetensors" };
	int i;

	must(file_mkdir_p(model, &e), &e);
	path = file_join(model, "config.json", &e);
	must(file_publish(path, 0, "{}", 2, &e), &e);
	free(path);
	for (i = 0; i < 2; i++) {
		path = file_join(model, names[i], &e);
		write_tensors(path, i);
		free(path);
	}
	free(model);
}

/* Bytes of the checkpoint's tensor that a staged entry stands for. */
static char *original(const struct bed *b, const struct entry *t, struct err *e)
{
	const struct entry *whole = b->c.catalogue.find(&b->c.catalogue, t->name);
	char *path = file_join(b->model, b->c.file[whole->file].name, e),
	     *buf = malloc(stage_bytes(t) + 1);
	int fd = file_open(path, e);

	must(fd < 0 || file_pread(fd, path, buf, stage_bytes(t),
				  whole->begin + (uint64_t)t->row0 * entry_row_bytes(t), e)
		     ? -1
		     : 0,
	     e);
	close(fd);
	free(path);
	return buf;
}

/* All of an entry at once, then in odd pieces. */
static int differs(struct stage *s, const struct entry *t, const char *want, struct err *e)
{
	uint64_t n = stage_bytes(t), off, part;
	char *got = malloc(n + 1);
	int bad = stage_read(s, t, got, 0, n, e) || memcmp(got, want, n);

	memset(got, 0, n);
	for (off = 0; !bad && off < n; off += part) {
		part = 1 + number() % 300000;
		part = part < n - off ? part : n - off;
		bad = stage_read(s, t, got + off, off, part, e) ||
		      memcmp(got + off, want + off, part);
	}
	bad |= !stage_read(s, t, got, n, 1, &(struct err)ERR_INIT);
	free(got);
	return bad;
}

static int wrong_entries(const struct bed *b, struct stage *s, struct err *e)
{
	int bad = 0;
	size_t i;

	for (i = 0; i < s->nentries; i++) {
		char *want = original(b, &s->entry[i], e);

		bad += differs(s, &s->entry[i], want, e);
		free(want);
	}
	return bad;
}

/* "NAME:row0+rows ..." of a rank's share. */
static void holds(const struct bed *b, int rank, const char *want, const char *what)
{
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;
	struct stage s;
	size_t i;

	text_add(&t, "");
	if (stage_open(&s, b->stage, b->p.stage_key, rank, &e))
		text_add(&t, e.text);
	for (i = 0; i < s.nentries; i++)
		text_printf(&t, "%s%s:%d+%d", i ? " " : "", s.entry[i].name, (int)s.entry[i].row0,
			    (int)s.entry[i].rows);
	is_str(t.s, want, "%s", what);
	is_int(wrong_entries(b, &s, &e), 0, "%s: bytes", what);
	stage_release(&s);
	text_release(&t);
}

static void test_replicated(void)
{
	static const char all[] =
		"embed.weight:0+10 q.weight:0+5 k.weight:0+2 norm.weight:0+4 e.0.weight:0+3 "
		"e.1.weight:0+3 "
		"e.2.weight:0+3 e.3.weight:0+3 fused:0+12 ids:0+9 big.weight:0+700";
	enum stage_form form;

	for (form = 0; form < STAGE_FORMS; form++) {
		struct err e = ERR_INIT;
		struct stage_made made;
		struct bed b;

		bed_open(&b, (struct stage_mesh){ 3, 1, 1, false });
		ok(!make(&b, form, NULL, &made, &e) && !made.reused && made.shares == 1 &&
			   made.form == form,
		   "%s: made", stage_form_name(form));
		holds(&b, 2, all, stage_form_name(form));
		ok(!make(&b, form, NULL, &made, &e) && made.reused,
		   "%s: made again, nothing is written", stage_form_name(form));
		ok(!make(&b, STAGE_REFERENCE, NULL, &made, &e) && made.reused && made.form == form,
		   "%s: taken where no copy is asked for", stage_form_name(form));
		b.p.world = 7;
		ok(!make(&b, form, NULL, &made, &e) && made.reused, "%s: another world takes it",
		   stage_form_name(form));
		if (e.code)
			printf("# %s\n", e.text);
		remove_dir(b.stage);
		bed_close(&b);
	}
}

static void test_sharded(void)
{
	enum stage_form form;

	for (form = 0; form < STAGE_FORMS; form++) {
		struct err e = ERR_INIT;
		struct stage_made made;
		struct bed b;

		/* [q; k] of 7 rows by c = 3; each expert stack of 12 by c = 4 */
		bed_open(&b, (struct stage_mesh){ 3, 1, 1, true });
		ok(!make(&b, form, NULL, &made, &e) && made.shares == 3 && made.done == 3,
		   "%s on 3 ranks", stage_form_name(form));
		holds(&b, 0,
		      "embed.weight:0+10 q.weight:0+3 k.weight:0+0 norm.weight:0+4 "
		      "e.0.weight:0+3 e.1.weight:0+1 e.2.weight:0+0 e.3.weight:0+0 fused:0+4 "
		      "ids:0+3 big.weight:0+234",
		      "rank 0");
		holds(&b, 1,
		      "embed.weight:0+10 q.weight:3+2 k.weight:0+1 norm.weight:0+4 "
		      "e.0.weight:0+0 e.1.weight:1+2 e.2.weight:0+2 e.3.weight:0+0 fused:4+4 "
		      "ids:3+3 big.weight:234+234",
		      "rank 1");
		holds(&b, 2,
		      "embed.weight:0+10 q.weight:0+0 k.weight:1+1 norm.weight:0+4 "
		      "e.0.weight:0+0 e.1.weight:0+0 e.2.weight:2+1 e.3.weight:0+3 fused:8+4 "
		      "ids:6+3 big.weight:468+232",
		      "rank 2");
		remove_dir(b.stage);
		bed_close(&b);
	}
}

static void test_experts(void)
{
	const bool second[] = { false, true };
	struct err e = ERR_INIT;
	struct stage_made made;
	struct stage s;
	struct bed b;

	bed_open(&b, (struct stage_mesh){ 2, 2, 1, true });
	ok(!make(&b, STAGE_COPY, second, &made, &e) && made.done == 1, "one rank of two");
	holds(&b, 1,
	      "embed.weight:0+10 q.weight:4+1 k.weight:0+2 norm.weight:0+4 e.2.weight:0+3 "
	      "e.3.weight:0+3 fused:6+6 ids:5+4 "
	      "big.weight:350+350",
	      "ep_size 2, rank 1");
	ok(stage_open(&s, b.stage, b.p.stage_key, 0, &e) &&
		   strstr(e.text, "run dspark-load --copy --ranks 0"),
	   "the other is not staged");
	e = (struct err)ERR_INIT;
	ok(make(&b, STAGE_REFERENCE, NULL, NULL, &e) &&
		   strstr(e.text, "without a good copy of share 0"),
	   "a copy is not made unasked");
	e = (struct err)ERR_INIT;
	ok(!make(&b, STAGE_COPY, NULL, &made, &e) && !made.reused && made.done == 2,
	   "the other is added");
	holds(&b, 0,
	      "embed.weight:0+10 q.weight:0+4 k.weight:0+0 norm.weight:0+4 e.0.weight:0+3 "
	      "e.1.weight:0+3 fused:0+6 ids:0+5 "
	      "big.weight:0+350",
	      "ep_size 2, rank 0");
	remove_dir(b.stage);
	b.p.ep = 3;
	stage_key(b.p.stage_key, b.p.weights, &(struct stage_mesh){ 2, 3, 1, true }, 0, false, "");
	ok(make(&b, STAGE_COPY, NULL, NULL, &e) && strstr(e.text, "cannot be divided"),
	   "3 does not divide 2 ranks");
	bed_close(&b);
}

/* ---- what is wrong is said ------------------------------------------------------------------- */

static char *in_stage(const struct bed *b, const char *name)
{
	struct err e = ERR_INIT;

	return file_join(b->stage, name, &e);
}

/* Turns a bit of byte `at` (from the end if negative). */
static void spoil(const struct bed *b, const char *name, off_t at)
{
	char *path = in_stage(b, name), c = 0;
	int fd = open(path, O_RDWR);
	struct stat st;

	if (fstat(fd, &st) || pread(fd, &c, 1, at < 0 ? at + st.st_size : at) != 1)
		printf("# cannot read '%s'\n", path);
	c ^= 4;
	if (pwrite(fd, &c, 1, at < 0 ? at + st.st_size : at) != 1)
		printf("# cannot write '%s'\n", path);
	close(fd);
	free(path);
}

static void open_refused(const struct bed *b, const char *words, const char *what)
{
	struct err e = ERR_INIT;
	struct stage s;

	if (!ok(stage_open(&s, b->stage, b->p.stage_key, 0, &e) && e.code == EXIT_REFUSED &&
			strstr(e.text, words),
		"%s", what))
		printf("# '%s', want '%s'\n", e.text, words);
	stage_release(&s);
}

static void test_damage(enum stage_form form)
{
	static const char *const data[] = { NULL, "rank-00000.safetensors", "rank-00000.lz4" };
	const char *name = stage_form_name(form);
	struct err e = ERR_INIT;
	struct stage_made made;
	const struct entry *t;
	struct stage s;
	struct bed b;
	char *path;
	off_t at;
	int bad = 0;

	bed_open(&b, (struct stage_mesh){ 1, 1, 1, false });
	open_refused(&b, "no stage.json", "no stage");
	must(make(&b, form, NULL, NULL, &e), &e);
	for (at = 0; at < 600; at += 7) {	/* wherever a bit turns, nothing is taken */
		const char *file = at & 1 ? "stage.json" : "index-00000.jsonl";

		spoil(&b, file, at % 140);
		bad += !stage_open(&s, b.stage, b.p.stage_key, 0, &e);
		stage_release(&s);
		spoil(&b, file, at % 140);
		e = (struct err)ERR_INIT;
	}
	is_int(bad, 0, "%s: a damaged head or index is refused", name);
	spoil(&b, "index-00000.jsonl", -40);
	open_refused(&b, "does not vouch", "an index whose hash is damaged");
	ok(!make(&b, form, NULL, &made, &e) && !made.reused &&
		   !stage_open(&s, b.stage, b.p.stage_key, 0, &e),
	   "%s: dspark-load mends it", name);
	stage_release(&s);
	ok(stage_open(&s, b.stage, "00000000000000000000000000000000", 0, &e) &&
		   strstr(e.text, "other weights"),
	   "%s: another key", name);
	e = (struct err)ERR_INIT;

	if (data[form]) {
		for (at = -1; at > -100000; at -= 9999) {	/* the large matrix is last */
			uint64_t n;
			char *buf;

			spoil(&b, data[form], at);
			must(stage_open(&s, b.stage, b.p.stage_key, 0, &e), &e);
			t = s.catalogue.find(&s.catalogue, "big.weight");
			n = stage_bytes(t);
			buf = malloc(n);
			bad += !stage_read(&s, t, buf, 0, n, &e) || !strstr(e.text, "big.weight") ||
			       !strstr(e.text, data[form]);
			stage_release(&s);
			free(buf);
			e = (struct err)ERR_INIT;
			spoil(&b, data[form], at);
		}
		is_int(bad, 0, "%s: a damaged tensor is named", name);
		spoil(&b, data[form], -5000);
		ok(!make(&b, STAGE_COPY + (form == STAGE_LZ4), NULL, &made, &e) && !made.reused,
		   "%s: and made again", name);
		must(stage_open(&s, b.stage, b.p.stage_key, 0, &e), &e);
		is_int(wrong_entries(&b, &s, &e), 0, "%s: with the right bytes", name);
		stage_release(&s);
		path = in_stage(&b, data[form]);
		if (truncate(path, 5000))
			printf("# cannot cut '%s'\n", path);
		free(path);
		open_refused(&b, "5000 bytes", "a copy cut short");
		must(make(&b, STAGE_COPY + (form == STAGE_LZ4), NULL, NULL, &e), &e);
		path = in_stage(&b, "index-00000.jsonl");
		unlink(path);
		free(path);
		open_refused(&b, "is not staged", "no index");
		ok(!make(&b, STAGE_COPY + (form == STAGE_LZ4), NULL, &made, &e) && !made.reused,
		   "%s: an index is written again", name);
	}
	remove_dir(b.stage);
	bed_close(&b);
}

static void test_changed(void)
{
	struct err e = ERR_INIT;
	struct stage_made made;
	struct stage s;
	struct bed b;
	char *path, byte[1];
	size_t i;

	bed_open(&b, (struct stage_mesh){ 1, 1, 1, false });
	must(make(&b, STAGE_REFERENCE, NULL, NULL, &e), &e);
	path = file_join(b.model, "b.safetensors", &e);
	must(utimensat(AT_FDCWD, path, (struct timespec[2]){ { 1, 2 }, { 3, 4 } }, 0), &e);
	open_refused(&b, "b.safetensors' changed since it was staged",
		     "a checkpoint that was touched");
	checkpoint_release(&b.c);
	must(checkpoint_open(&b.c, b.model, false, &e), &e);
	ok(!make(&b, STAGE_REFERENCE, NULL, &made, &e) && !made.reused &&
		   !stage_open(&s, b.stage, b.p.stage_key, 0, &e),
	   "staging again looks at it again");
	for (i = 0; i + 1 < s.nentries && strcmp(s.file[s.entry[i].file], path); i++)
		;
	ok(!stage_read(&s, &s.entry[i], byte, 0, 1, &e), "what is as it was is read");
	must(utimensat(AT_FDCWD, path, (struct timespec[2]){ { 1, 2 }, { 5, 6 } }, 0), &e);
	ok(stage_read(&s, &s.entry[i], byte, 0, 1, &e) &&
		   strstr(e.text, "b.safetensors' changed while it was read"),
	   "what is touched while the stage is open is not (%s)", e.text);
	stage_release(&s);
	unlink(path);
	open_refused(&b, "b.safetensors", "a checkpoint without a file");
	write_tensors(path, 1);
	free(path);
	remove_dir(b.stage);
	bed_close(&b);
}

static void make_refused(struct bed *b, enum stage_form form, const char *words, const char *what)
{
	struct err e = ERR_INIT;

	if (!ok(make(b, form, NULL, NULL, &e) && e.code == EXIT_REFUSED && strstr(e.text, words),
		"%s", what))
		printf("# '%s', want '%s'\n", e.text, words);
}

static void test_refusals(void)
{
	struct err e = ERR_INIT;
	struct stage_made made;
	char *stage;
	struct bed b;

	bed_open(&b, (struct stage_mesh){ 1, 1, 1, false });
	stage = b.stage;
	b.stage = b.model;
	make_refused(&b, STAGE_REFERENCE, "would lie in the checkpoint",
		     "the checkpoint is not written");
	b.stage = file_join(b.model, "deep/er/", &e);
	make_refused(&b, STAGE_COPY, "would lie in the checkpoint", "nor any place in it");
	free(b.stage);
	b.stage = stage;
	b.p.cache_dir = b.stage;
	make_refused(&b, STAGE_REFERENCE, "would lie in the cache", "nor is the cache");
	b.p.cache_dir = NULL;

	must(make(&b, STAGE_COPY, NULL, NULL, &e), &e);
	make_refused(&b, STAGE_LZ4, "in the form 'copy', not 'lz4'",
		     "a copy of another form stays");
	b.p.world = 2;
	b.p.cut = true;
	stage_key(b.p.stage_key, b.p.weights, &(struct stage_mesh){ 2, 1, 1, true }, 0, false, "");
	make_refused(&b, STAGE_COPY, "remove it or give another -s", "a copy of another key stays");
	make_refused(&b, STAGE_REFERENCE, "remove it or give another -s", "by reference, too");
	spoil(&b, "stage.json", 20);
	make_refused(&b, STAGE_REFERENCE, "is damaged or no stage of dspark",
		     "so does what nobody can read");
	remove_dir(b.stage);
	must(make(&b, STAGE_REFERENCE, NULL, NULL, &e), &e);
	b.p.cut = false;
	stage_key(b.p.stage_key, b.p.weights, &(struct stage_mesh){ 2, 1, 1, false }, 0, false, "");
	ok(!make(&b, STAGE_REFERENCE, NULL, &made, &e) && !made.reused,
	   "a stage by reference is replaced");
	ok(!make(&b, STAGE_LZ4, NULL, &made, &e) && made.form == STAGE_LZ4, "by a copy, too");
	strcpy(b.p.stage_key, "0");
	make_refused(&b, STAGE_REFERENCE, "run dspark-plan again",
		     "a plan whose key is not its own");
	remove_dir(b.stage);
	bed_close(&b);
}

/* ---- derived tensors ------------------------------------------------------------------------- */

static void derived_is(struct stage *s, const char *name, const void *want, size_t off, size_t n,
		       struct err *e)
{
	const struct entry *t = s->catalogue.find(&s->catalogue, name);
	char buf[256];

	ok(t && stage_bytes(t) == n && !stage_read(s, t, buf, 0, n, e) &&
		   !memcmp(buf, (const char *)want + off, n),
	   "%s in form '%s'", name, stage_form_name(s->form));
}

static void test_derived(void)
{
	const struct stage_mesh two = { 2, 1, 1, true };
	char none[DIGEST_HEX], digest[DIGEST_HEX];
	enum stage_form form;
	struct stage s;

	for (form = 0; form < STAGE_FORMS; form++) {
		struct err e = ERR_INIT;
		struct stage_made made;
		struct bed b;

		classes[3] = 7;
		mix[2][1] = 0.5f;
		bed_open(&b, two);
		must(stage_derived(none, &b.t, b.model, &e), &e);
		is_str(none, "", "a model that derives nothing");
		b.t.model = &deriving;
		make_refused(&b, form, "run dspark-plan again",
			     "what is derived counts in the key");
		must(stage_derived(digest, &b.t, b.model, &e), &e);
		stage_key(b.p.stage_key, b.p.weights, &two, 0, false, digest);
		must(make(&b, form, NULL, &made, &e), &e);
		must(stage_open(&s, b.stage, b.p.stage_key, 1, &e), &e);
		derived_is(&s, "classes", classes, 0, sizeof classes, &e);
		/* the second of two ranks: a row by c = 2 */
		derived_is(&s, "mix", mix, 16, 8, &e);
		ok(s.nentries == 3 && s.catalogue.find(&s.catalogue, "norm.weight"),
		   "with the others");
		stage_release(&s);
		ok(!make(&b, form, NULL, &made, &e) && made.reused, "is kept");
		classes[3] = 8;
		make_refused(&b, form, "run dspark-plan again", "changes are seen");
		remove_dir(b.stage);
		bed_close(&b);
	}
}

/* ---- threads --------------------------------------------------------------------------------- */

struct reader {
	struct stage *s;
	const char *want;
	int bad;
};

static void *read_much(void *arg)
{
	struct reader *r = arg;
	const struct entry *t = r->s->catalogue.find(&r->s->catalogue, "big.weight");
	struct err e = ERR_INIT;
	char *buf = malloc(stage_bytes(t));
	uint64_t i, n = stage_bytes(t);

	for (i = 0; i < 40; i++) {
		uint64_t off = i * 33333 % n, part = n - off < 400000 ? n - off : 400000;

		r->bad +=
			stage_read(r->s, t, buf, off, part, &e) || memcmp(buf, r->want + off, part);
	}
	free(buf);
	return NULL;
}

static void test_threads(void)
{
	struct err e = ERR_INIT;
	struct reader r[4];
	pthread_t thread[4];
	struct stage s;
	struct bed b;
	char *want;
	int i, bad = 0;

	bed_open(&b, (struct stage_mesh){ 1, 1, 1, false });
	must(make(&b, STAGE_LZ4, NULL, NULL, &e), &e);
	must(stage_open(&s, b.stage, b.p.stage_key, 0, &e), &e);
	want = original(&b, s.catalogue.find(&s.catalogue, "big.weight"), &e);
	for (i = 0; i < 4; i++) {
		r[i] = (struct reader){ &s, want, 0 };
		must(pthread_create(&thread[i], NULL, read_much, &r[i]), &e);
	}
	for (i = 0; i < 4; i++) {
		pthread_join(thread[i], NULL);
		bad += r[i].bad;
	}
	is_int(bad, 0, "four threads read at once");
	free(want);
	stage_release(&s);
	remove_dir(b.stage);
	bed_close(&b);
}

int main(void)
{
	enum stage_form form;
	char model[64];

	log_program("t_stage");
	log_level(-1);		/* what is made again is warned of */
	if (!mkdtemp(dir))
		return 1;
	test_pack();
	test_shares();
	test_cover();
	test_key();
	make_model();
	test_replicated();
	test_sharded();
	test_experts();
	for (form = 0; form < STAGE_FORMS; form++)
		test_damage(form);
	test_changed();
	test_refusals();
	test_derived();
	test_threads();
	snprintf(model, sizeof model, "%s/model", dir);
	remove_dir(model);
	remove_dir(dir);
	return tap_end();
}
