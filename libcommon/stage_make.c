/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making a stage. The weight walk is made once; each source of each weight is kept as a use (48
 * bytes), and a share is what remains of all uses between its first and last row. The head comes
 * first: it claims the directory. A share is there once its index is.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "plan.h"
#include "stage.h"
#include "stage_copy.h"
#include "stage_derive.h"
#include "stage_index.h"
#include "text.h"

/* How one weight is divided, and one stretch of its rows in one tensor. */
struct rule {
	enum shard shard;
	int64_t count, rows;
};

struct use {
	uint32_t rule, entry;
	int64_t at, rows;		/* rows [at, at + rows) of the weight's stack */
	int64_t from;			/* first of them in the entry */
	int64_t whole;	/* not 0: any of them needs that many rows of the entry, from `from` on */
};

struct maker {
	struct catalogue catalogue;	/* first: the checkpoint's tensors and the derived ones */
	struct stage_derivation derived;
	const char *dir;
	const struct plan *plan;
	const struct checkpoint *checkpoint;
	const struct stage_options *o;
	struct stage_made *made;
	struct stage_mesh mesh;
	struct stage_head head;
	bool may_copy;			/* false: a copy that was found may only be used as it is */
	struct rule *rule;
	struct use *use;
	size_t nrules, caprules, nuses, capuses;
	uint32_t *slot;			/* of an entry (entry_at): place in the share's index + 1 */
	int lock;
};

/* ---- the walk -------------------------------------------------------------------------------- */

static const struct entry *find(const struct catalogue *c, const char *name)
{
	const struct maker *m = (const struct maker *)c;
	const struct catalogue *checkpoint = &m->checkpoint->catalogue;
	const struct entry *t = checkpoint->find(checkpoint, name);

	return t ? t : stage_derivation_find(&m->derived, name);
}

/* Entries are numbered through: the checkpoint's, then the derived ones. */
static const struct entry *entry_at(const struct maker *m, uint32_t i)
{
	return i < m->checkpoint->nentries ? &m->checkpoint->entry[i]
					   : &m->derived.entry[i - m->checkpoint->nentries];
}

static uint32_t number_of(const struct maker *m, const struct entry *t)
{
	return (uint32_t)((size_t)t->file < m->checkpoint->nfiles
				  ? t - m->checkpoint->entry
				  : t - m->derived.entry + (ptrdiff_t)m->checkpoint->nentries);
}

static int put_use(struct maker *m, const struct entry *t, int64_t at, int64_t rows, int64_t from,
		   struct err *e)
{
	if (mem_grow(&m->use, &m->capuses, m->nuses + 1, sizeof *m->use, e))
		return -1;
	m->use[m->nuses++] =
		(struct use){ (uint32_t)(m->nrules - 1), number_of(m, t), at, rows, from, 0 };
	return 0;
}

/*
 * Scales of single rows are cut with them; a grid whose scales cover several rows goes whole with
 * any row of its tensor, or of its matrix of a fused one.
 */
static int add_use(void *ctx, const struct weight_source *src, struct err *e)
{
	struct maker *m = ctx;
	int64_t at = src->index * m->rule[m->nrules - 1].rows + src->row0;

	if (put_use(m, src->entry, at, src->rows, src->from, e))
		return -1;
	if (!src->scale)
		return 0;
	if (put_use(m, src->scale, at, src->rows, weight_grid_row(src, src->from), e))
		return -1;
	if (src->quant->block_rows > 1)
		m->use[m->nuses - 1].whole = weight_grid_rows(src);
	return 0;
}

struct walker {
	struct weight_walk walk;	/* first */
	struct maker *m;
};

static int visit(struct weight_walk *walk, const struct weight_spec *s, struct err *e)
{
	struct maker *m = ((struct walker *)walk)->m;
	struct weight_storage storage;

	if (s->shard == SHARD_EXPERT && s->count % m->mesh.ep)
		return err_refuse(e, "%" PRId64 " experts cannot be divided by ep_size %d",
				  s->count, m->mesh.ep);
	if (mem_grow(&m->rule, &m->caprules, m->nrules + 1, sizeof *m->rule, e))
		return -1;
	/* the head that only target_weights wants is written by whoever comes first */
	m->rule[m->nrules++] = (struct rule){ s->unit == UNIT_EXPORT ? SHARD_WHOLE : s->shard,
					      s->count, s->rows };
	return weight_resolve(s, &m->catalogue, &storage, add_use, m, e);
}

static int walk(struct maker *m, struct target *t, struct err *e)
{
	struct walker w = { { visit }, m };

	m->slot = mem_calloc(m->checkpoint->nentries + m->derived.n, sizeof *m->slot, e);
	return m->slot ? t->model->weights(t, &w.walk, e) : -1;
}

/* ---- one share ------------------------------------------------------------------------------- */

/*
 * Rows [from, from + n) of a tensor are held too. A tensor of several weights, or of one in several
 * pieces, is held from the first to the last.
 */
static int hold(struct maker *m, struct stage_index *x, uint32_t i, int64_t from, int64_t n,
		struct err *e)
{
	struct entry *t;

	if (!m->slot[i]) {
		if (stage_index_add(x, entry_at(m, i), e))
			return -1;
		m->slot[i] = (uint32_t)x->n;
		x->entry[x->n - 1].row0 = n ? from : 0;
		x->entry[x->n - 1].rows = n;
		return 0;
	}
	t = &x->entry[m->slot[i] - 1];
	if (!n)
		return 0;
	if (!t->rows) {
		t->row0 = from;
		t->rows = n;
		return 0;
	}
	n = from + n > t->row0 + t->rows ? from + n : t->row0 + t->rows;
	t->row0 = from < t->row0 ? from : t->row0;
	t->rows = n - t->row0;
	return 0;
}

/* Rows of a weight's stack. */
struct stretch {
	int64_t first, n;
};

static bool meets(const struct use *u, const struct stretch *s)
{
	return u->at < s->first + s->n && s->first < u->at + u->rows;
}

/*
 * `u` within the rows held of its weight. What other members hold is listed without rows: they must
 * be known to be gathered. Experts of other ep_index are not.
 */
static int take_use(struct maker *m, struct stage_index *x, const struct use *u,
		    const struct stretch *held, const struct stretch *all, struct err *e)
{
	int64_t end = held->first + held->n, low = u->at > held->first ? u->at : held->first,
		high = u->at + u->rows < end ? u->at + u->rows : end;

	if (low < high && u->whole)
		return hold(m, x, u->entry, u->from, u->whole, e);
	if (low < high)
		return hold(m, x, u->entry, u->from + low - u->at, high - low, e);
	return meets(u, all) ? hold(m, x, u->entry, 0, 0, e) : 0;
}

/* The share with its places in the checkpoint. */
static int take_share(struct maker *m, int share, struct stage_index *x, struct err *e)
{
	const struct stage_mesh whole = { m->mesh.world, m->mesh.ep, m->mesh.replicate, false };
	struct stretch held = { 0, 0 }, all = { 0, 0 };
	size_t i;

	*x = (struct stage_index){ .form = m->head.form, .share = share };
	memcpy(x->key, m->head.key, DIGEST_HEX);
	memset(m->slot, 0, (m->checkpoint->nentries + m->derived.n) * sizeof *m->slot);
	for (i = 0; i < m->nuses; i++) {
		const struct use *u = &m->use[i];
		const struct rule *r = &m->rule[u->rule];

		if (!i || u->rule != u[-1].rule) {
			stage_share(&m->mesh, share, r->shard, r->count, r->rows, &held.first,
				    &held.n);
			stage_share(&whole, share, r->shard, r->count, r->rows, &all.first, &all.n);
		}
		if (take_use(m, x, u, &held, &all, e))
			return -1;
	}
	for (i = 0; i < x->n; i++) {
		struct entry *t = &x->entry[i];

		t->begin += (uint64_t)t->row0 * entry_row_bytes(t);
		t->end = t->begin + stage_bytes(t);
	}
	return 0;
}

/* `path` is published unless it has these bytes already. */
static int publish_new(struct maker *m, const char *path, int share, const struct text *want,
		       struct err *e)
{
	struct text have = TEXT_INIT;
	struct err none = ERR_INIT;
	bool same = file_exists(path) && !file_read_all(path, want->len, &have, &none) &&
		    have.len == want->len && !memcmp(have.s, want->s, want->len);

	text_release(&have);
	if (same)
		return 0;
	m->made->reused = false;
	return file_publish(path, share, want->s, want->len, e);
}

static int publish_index(struct maker *m, const struct stage_index *x, struct err *e)
{
	struct text t = TEXT_INIT;
	char *path;
	int rc = -1;

	if (!stage_index_name(&path, m->dir, x->share, e) && !stage_index_text(&t, x, e))
		rc = publish_new(m, path, x->share, &t, e);
	text_release(&t);
	free(path);
	return rc;
}

static int check_space(const struct maker *m, const struct stage_index *x, struct err *e)
{
	struct text need = TEXT_INIT, have = TEXT_INIT;
	uint64_t bytes = stage_index_bytes(x);
	struct file_space space;
	int rc = 0;

	if (x->form != STAGE_COPY)	/* what LZ4 gains is known only afterwards */
		return 0;
	if (file_space(m->dir, &space, e))
		return -1;
	if (space.free < bytes) {
		text_bytes(&need, (double)bytes);
		text_bytes(&have, (double)space.free);
		rc = err_fail(e,
			      "'%s' has %s free, the copy of share %d needs %s: make room, try "
			      "--copy=lz4, or stage by reference",
			      m->dir, have.s, x->share, need.s);
	}
	text_release(&need);
	text_release(&have);
	return rc;
}

/*
 * Ranks on one node ask for the same share: who is first makes it, the others wait and find it.
 * Without locks all make it, with the same bytes.
 */
static void lock_share(const struct maker *m, int share, enum file_lock how)
{
	struct err none = ERR_INIT;

	if (m->lock >= 0)
		file_lock(m->lock, m->dir, 1 + (off_t)share, how, true, &none);
}

static int copy_share(struct maker *m, struct stage_copier *k, struct stage_index *x, struct err *e)
{
	int rc;

	lock_share(m, x->share, FILE_EXCLUSIVE);
	rc = stage_copy_keep(k, x, e);
	if (rc > 0) {
		m->made->reused = false;
		if (!m->may_copy)
			rc = err_refuse(e,
					"'%s' is a stage of form '%s' without a good copy of share "
					"%d: add --copy%s, or give another -s",
					m->dir, stage_form_name(x->form), x->share,
					x->form == STAGE_LZ4 ? "=lz4" : "");
		else
			rc = check_space(m, x, e) ? -1 : stage_copy_make(k, x, e);
	}
	if (!rc)
		rc = publish_index(m, x, e);
	lock_share(m, x->share, FILE_UNLOCK);
	return rc;
}

/* ---- the directory --------------------------------------------------------------------------- */

/* `path` without links, although its last parts may not exist yet. */
static char *real_path(const char *path, struct err *e)
{
	char *real = realpath(path, NULL), *copy, *slash, *parent = NULL;

	if (real || errno != ENOENT)
		return real ? real : (err_input(e, "cannot look at '%s'", path), NULL);
	copy = mem_strdup(path, e);
	if (!copy)
		return NULL;
	while ((slash = strrchr(copy, '/')) && !slash[1] && slash != copy)
		*slash = '\0';
	if (slash != copy)
		parent = slash ? (*slash = '\0', real_path(copy, e)) : real_path(".", e);
	else
		parent = mem_strdup("/", e);
	if (parent)
		real = file_join(parent, slash ? slash + 1 : copy, e);
	free(parent);
	free(copy);
	return real;
}

static bool is_inside(const char *path, const char *dir)
{
	size_t n = strlen(dir);

	return !strncmp(path, dir, n) && (!path[n] || path[n] == '/' || (n && dir[n - 1] == '/'));
}

static int check_place(const struct maker *m, struct err *e)
{
	char *dir = real_path(m->dir, e), *model = dir ? real_path(m->checkpoint->dir, e) : NULL,
	     *cache = NULL, *path = NULL;
	int rc = -1;

	if (model && m->plan->cache_dir) {
		path = plan_path(m->plan, m->plan->cache_dir, e);
		cache = path ? real_path(path, e) : NULL;
	}
	if (!model || (m->plan->cache_dir && !cache))
		goto out;
	if (is_inside(dir, model))
		err_refuse(e,
			   "stage '%s' would lie in the checkpoint '%s', which is never written: "
			   "give another -s",
			   m->dir, m->checkpoint->dir);
	else if (cache && is_inside(dir, cache))
		err_refuse(e, "stage '%s' would lie in the cache '%s': give another -s", m->dir,
			   path);
	else
		rc = 0;
out:
	free(path);
	free(cache);
	free(model);
	free(dir);
	return rc;
}

/*
 * Has a copy been made or begun in the directory? One that found no room leaves stage.json alone.
 */
static bool holds_copies(const char *dir)
{
	static const char *const parts[] = { "rank-", ".rank-", "index-" };
	DIR *d = opendir(dir);
	struct dirent *ent;
	bool found = !d;

	while (!found && (ent = readdir(d)))
		for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
			found |= !strncmp(ent->d_name, parts[i], strlen(parts[i]));
	if (d)
		closedir(d);
	return found;
}

/*
 * What is there decides: taken, replaced (a stage by reference, or of copies none of which was
 * made, holds nothing of value) or left to its user.
 */
static int settle_form(struct maker *m, struct err *e)
{
	struct stage_head old;
	int rc = stage_head_read(&old, m->dir, e);

	m->head.form = m->o->form;
	m->may_copy = true;
	if (rc || old.form == STAGE_REFERENCE || !holds_copies(m->dir)) {
		rc = rc < 0 ? -1 : 0;
	} else if (strcmp(old.key, m->head.key)) {
		rc = err_refuse(e,
				"'%s' holds a copy of other weights or for another sharding (its "
				"key is %s, the plan's %s): "
				"remove it or give another -s",
				m->dir, old.key, m->head.key);
	} else if (m->o->form == STAGE_REFERENCE) {
		m->head.form = old.form;
		m->may_copy = false;
	} else if (m->o->form != old.form) {
		rc = err_refuse(e,
				"'%s' holds these weights in the form '%s', not '%s': remove it or "
				"give another -s",
				m->dir, stage_form_name(old.form), stage_form_name(m->o->form));
	}
	stage_head_release(&old);
	return rc;
}

static char *absolute(const char *path, struct err *e)
{
	char *cwd, *joined;

	if (path[0] == '/')
		return mem_strdup(path, e);
	cwd = getcwd(NULL, 0);
	if (!cwd)
		return err_errno(e, "cannot find the working directory"), NULL;
	joined = file_join(cwd, path, e);
	free(cwd);
	return joined;
}

static int write_derived(struct maker *m, struct err *e)
{
	char *path;
	int rc;

	if (!m->derived.n)
		return 0;
	path = file_join(m->dir, STAGE_DERIVED, e);
	rc = path ? publish_new(m, path, 0, &m->derived.bytes, e) : -1;
	free(path);
	return rc;
}

/* By its absolute path, which a join with the checkpoint's directory leaves as it is. */
static int add_derived_file(struct maker *m, struct err *e)
{
	struct checkpoint_file *f = &m->head.file[m->head.nfiles];
	char *path;

	if (!m->derived.n)
		return 0;
	path = file_join(m->dir, STAGE_DERIVED, e);
	f->name = path ? absolute(path, e) : NULL;
	free(path);
	if (!f->name)
		return -1;
	m->head.nfiles++;
	return file_size(f->name, &f->size, &f->mtime_ns, e);
}

static int set_head_files(struct maker *m, struct err *e)
{
	const struct checkpoint *c = m->checkpoint;
	size_t i;

	if (m->head.form != STAGE_REFERENCE)
		return 0;
	m->head.checkpoint = absolute(c->dir, e);
	m->head.file = mem_calloc(c->nfiles + 1, sizeof *m->head.file, e);
	if (!m->head.checkpoint || !m->head.file)
		return -1;
	for (i = 0; i < c->nfiles; i++) {
		m->head.file[i] = c->file[i];
		m->head.file[i].name = mem_strdup(c->file[i].name, e);
		if (!m->head.file[i].name)
			return -1;
		m->head.nfiles++;
	}
	return add_derived_file(m, e);
}

static int write_head(struct maker *m, struct err *e)
{
	char *path = file_join(m->dir, "stage.json", e);
	struct text t = TEXT_INIT;
	int rc = -1;

	if (path && !set_head_files(m, e) && !stage_head_text(&t, &m->head, e))
		rc = publish_new(m, path, 0, &t, e);
	text_release(&t);
	free(path);
	return rc;
}

/*
 * Temporaries of dead processes go; those that other hosts left only when nobody else is at work
 * here.
 */
static int enter(struct maker *m, struct err *e)
{
	struct err none = ERR_INIT;
	bool alone = false;
	char *path = NULL;
	int rc = -1;

	if (file_mkdir_p(m->dir, e))
		return -1;
	if (m->o->form != STAGE_REFERENCE) {
		path = file_join(m->dir, ".dspark.lock", e);
		if (!path)
			return -1;
		m->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
		if (m->lock < 0) {
			err_errno(e, "cannot open '%s'", path);
			goto out;
		}
		alone = !file_lock(m->lock, path, 0, FILE_EXCLUSIVE, false, &none);
		if (none.code)
			log_warn("%s; ranks that stage the same share will do it twice", none.text);
	}
	rc = file_sweep(m->dir, alone, e);
	if (m->lock >= 0 && !none.code)
		file_lock(m->lock, path, 0, FILE_SHARED, true, &none);
out:
	free(path);
	return rc;
}

static int check_key(const struct maker *m, struct err *e)
{
	char key[DIGEST_HEX];

	stage_key(key, m->plan->weights, &m->mesh, m->plan->target_layers, m->plan->force_hf,
		  m->derived.digest);
	if (strcmp(key, m->plan->stage_key))
		return err_refuse(e, "the plan's stage key is not what this version makes of it: "
				     "run dspark-plan again");
	return 0;
}

/* ---- all shares ------------------------------------------------------------------------------ */

static bool *wanted_shares(const struct maker *m, struct err *e)
{
	bool *want = mem_calloc((size_t)m->head.shares, sizeof *want, e);
	int r;

	for (r = 0; want && r < m->plan->world; r++) {
		bool *w = &want[r % m->head.shares];

		if (*w || (m->o->ranks && !m->o->ranks[r]))
			continue;
		*w = true;
		m->made->done++;
	}
	return want;
}

/* Each wanted share in turn; `k` NULL only counts its bytes. */
static int each_share(struct maker *m, const bool *want, struct stage_copier *k, uint64_t *bytes,
		      struct err *e)
{
	int s, rc = 0;

	*bytes = 0;
	for (s = 0; !rc && s < m->head.shares; s++) {
		struct stage_index x = { 0 };

		if (!want[s])
			continue;
		rc = take_share(m, s, &x, e);
		*bytes += stage_index_bytes(&x);
		if (!rc && k)
			rc = x.form == STAGE_REFERENCE ? publish_index(m, &x, e)
						       : copy_share(m, k, &x, e);
		stage_index_release(&x);
	}
	return rc;
}

static int make_shares(struct maker *m, const bool *want, struct err *e)
{
	bool show = m->o->progress && m->head.form != STAGE_REFERENCE;
	struct stage_copier k = { 0 };
	struct progress p;
	int rc;

	if (show) {
		if (each_share(m, want, NULL, &m->made->bytes, e))
			return -1;
		progress_begin(&p, PROGRESS_AUTO, "bytes", (int64_t)m->made->bytes);
	}
	rc = stage_copier_open(&k, m->dir, m->checkpoint, show ? &p : NULL, e);
	if (!rc)
		rc = each_share(m, want, &k, &m->made->bytes, e);
	if (show)
		progress_end(&p);
	stage_copier_release(&k);
	return rc;
}

int stage_make(const char *dir, const struct plan *plan, struct target *t,
	       const struct checkpoint *c, const struct stage_options *o, struct stage_made *made,
	       struct err *e)
{
	struct maker m = { .catalogue = { .find = find, .path = c->dir, .staged = true },
			   .dir = dir,
			   .plan = plan,
			   .checkpoint = c,
			   .o = o,
			   .made = made,
			   .lock = -1,
			   .mesh = stage_mesh(plan) };
	bool *want = NULL;
	int rc = -1;

	*made = (struct stage_made){ .reused = true };
	memcpy(m.head.key, plan->stage_key, DIGEST_HEX);
	if (stage_derive(&m.derived, t, c->dir, (int)c->nfiles, e) || check_key(&m, e) ||
	    stage_shares(&m.mesh, &m.head.shares, e) || check_place(&m, e) || settle_form(&m, e) ||
	    walk(&m, t, e))
		goto out;
	want = wanted_shares(&m, e);
	if (!want || enter(&m, e) || write_derived(&m, e) || write_head(&m, e) ||
	    make_shares(&m, want, e))
		goto out;
	made->form = m.head.form;
	made->shares = m.head.shares;
	memcpy(made->digest, m.head.digest, DIGEST_HEX);
	rc = 0;
out:
	stage_head_release(&m.head);
	stage_derivation_release(&m.derived);
	free(m.rule);
	free(m.use);
	free(m.slot);
	free(want);
	if (m.lock >= 0)
		close(m.lock);
	return rc;
}
