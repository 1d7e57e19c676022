/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oneDNN behind one interface. Two rules make a row's bits independent of everything around it:
 * sizes are fixed when a primitive is made, and both making and running see exactly one OpenMP
 * thread, for its blocking depends on the number of threads it sees.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <dnnl.h>
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "mem.h"
#include "onednn.h"

#if DNNL_CPU_THREADING_RUNTIME != DNNL_RUNTIME_OMP && DNNL_CPU_THREADING_RUNTIME != DNNL_RUNTIME_SEQ
#error "a oneDNN built for OpenMP or without threads is needed"
#endif
#ifndef _OPENMP
#error "a compiler with OpenMP is needed: without one, configure --without-onednn"
#endif

/*
 * Memory descriptors are values in version 2 and handles in version 3: here always owned pointers.
 */
#if DNNL_VERSION_MAJOR >= 3
#define MD       dnnl_memory_desc_t
#define CONST_MD const_dnnl_memory_desc_t

static dnnl_status_t md_strided(MD *md, const dnnl_dims_t dims, dnnl_data_type_t type,
				const dnnl_dims_t strides)
{
	return dnnl_memory_desc_create_with_strides(md, 2, dims, type, strides);
}

static dnnl_status_t md_any(MD *md, const dnnl_dims_t dims, dnnl_data_type_t type)
{
	return dnnl_memory_desc_create_with_tag(md, 2, dims, type, dnnl_format_tag_any);
}

static dnnl_status_t md_copy(MD *md, CONST_MD from)
{
	return dnnl_memory_desc_clone(md, from);
}

static void md_free(MD md)
{
	if (md)
		dnnl_memory_desc_destroy(md);
}

static dnnl_status_t matmul_desc(dnnl_primitive_desc_t *pd, dnnl_engine_t engine, MD src, MD weight,
				 MD dst, dnnl_primitive_attr_t attr)
{
	return dnnl_matmul_primitive_desc_create(pd, engine, src, weight, NULL, dst, attr);
}

static dnnl_status_t append_sum(dnnl_post_ops_t p)
{
	return dnnl_post_ops_append_sum(p, 1.0f, 0, dnnl_data_type_undef);
}
#else
#define MD       dnnl_memory_desc_t *
#define CONST_MD const dnnl_memory_desc_t *

static dnnl_status_t md_strided(MD *md, const dnnl_dims_t dims, dnnl_data_type_t type,
				const dnnl_dims_t strides)
{
	*md = calloc(1, sizeof **md);
	return *md ? dnnl_memory_desc_init_by_strides(*md, 2, dims, type, strides)
		   : dnnl_out_of_memory;
}

static dnnl_status_t md_any(MD *md, const dnnl_dims_t dims, dnnl_data_type_t type)
{
	*md = calloc(1, sizeof **md);
	return *md ? dnnl_memory_desc_init_by_tag(*md, 2, dims, type, dnnl_format_tag_any)
		   : dnnl_out_of_memory;
}

static dnnl_status_t md_copy(MD *md, CONST_MD from)
{
	*md = calloc(1, sizeof **md);
	if (!*md)
		return dnnl_out_of_memory;
	**md = *from;
	return dnnl_success;
}

static void md_free(MD md)
{
	free(md);
}

static dnnl_status_t matmul_desc(dnnl_primitive_desc_t *pd, dnnl_engine_t engine, MD src, MD weight,
				 MD dst, dnnl_primitive_attr_t attr)
{
	dnnl_matmul_desc_t d;
	dnnl_status_t s = dnnl_matmul_desc_init(&d, src, weight, NULL, dst);

	return s == dnnl_success ? dnnl_primitive_desc_create(pd, &d, attr, engine, NULL) : s;
}

static dnnl_status_t append_sum(dnnl_post_ops_t p)
{
	return dnnl_post_ops_append_sum(p, 1.0f);
}
#endif

/* A product with what oneDNN needs for it. */
struct entry {
	struct product p; /* first */
	MD src;
	MD dst;
	MD weight; /* in its layout */
	MD plain;  /* as onednn_pack reads it */
	MD run_scratch;
	MD pack_scratch;
	dnnl_primitive_t run, pack;
	struct layout layout; /* row NULL = not known yet */
	struct entry *next;
};

struct onednn {
	dnnl_engine_t engine;
	dnnl_primitive_attr_t attr;
	pthread_mutex_t lock; /* of the list */
	struct entry *list;
};

static int check(dnnl_status_t s, const char *what, struct err *e)
{
	if (s == dnnl_success)
		return 0;
	return err_fail(e, "oneDNN cannot %s (status %d)", what, (int)s);
}

/*
 * One thread for the library from here to `restore`, whichever OpenMP runtime calls it and whether
 * or not we are in a parallel region.
 */
static int one_thread(void)
{
	int before = omp_get_max_threads();

	if (before != 1)
		omp_set_num_threads(1);
	return before;
}

static void restore(int before)
{
	if (before != 1)
		omp_set_num_threads(before);
}

bool onednn_has(enum onednn_isa isa)
{
	static const unsigned flags[] = {
		[ONEDNN_AVX2] = dnnl_cpu_isa_avx2,
		[ONEDNN_AVX512] = dnnl_cpu_isa_avx512_core,
		[ONEDNN_AVX512_BF16] = dnnl_cpu_isa_avx512_core_bf16,
		[ONEDNN_AMX] = dnnl_cpu_isa_avx512_core_amx,
	};

	return ((unsigned)dnnl_get_effective_cpu_isa() & flags[isa]) == flags[isa];
}

struct onednn *onednn_open(struct err *e)
{
	struct onednn *o = mem_calloc(1, sizeof *o, e);

	if (!o)
		return NULL;
	pthread_mutex_init(&o->lock, NULL);
	if (check(dnnl_engine_create(&o->engine, dnnl_cpu, 0), "start", e) ||
	    check(dnnl_primitive_attr_create(&o->attr), "start", e) ||
	    check(dnnl_primitive_attr_set_scratchpad_mode(o->attr, dnnl_scratchpad_mode_user),
		  "start", e)) {
		onednn_close(o);
		return NULL;
	}
	return o;
}

static void entry_free(struct entry *x)
{
	if (!x)
		return;
	if (x->run)
		dnnl_primitive_destroy(x->run);
	if (x->pack)
		dnnl_primitive_destroy(x->pack);
	md_free(x->src);
	md_free(x->dst);
	md_free(x->weight);
	md_free(x->plain);
	md_free(x->run_scratch);
	md_free(x->pack_scratch);
	free(x->layout.row);
	free(x->layout.col);
	free(x);
}

void onednn_close(struct onednn *o)
{
	if (!o)
		return;
	while (o->list) {
		struct entry *x = o->list;

		o->list = x->next;
		entry_free(x);
	}
	if (o->attr)
		dnnl_primitive_attr_destroy(o->attr);
	if (o->engine)
		dnnl_engine_destroy(o->engine);
	pthread_mutex_destroy(&o->lock);
	free(o);
}

/* The primitive of `pd` and its scratch, whose size counts into the product's. Destroys pd. */
static int make(struct entry *x, dnnl_primitive_desc_t pd, dnnl_primitive_t *primitive, MD *scratch,
		struct err *e)
{
	int rc = check(dnnl_primitive_create(primitive, pd), "make a primitive", e);
	size_t bytes;

	if (!rc)
		rc = check(md_copy(scratch,
				   dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0)),
			   "tell its scratch", e);
	dnnl_primitive_desc_destroy(pd);
	if (rc)
		return -1;
	bytes = dnnl_memory_desc_get_size(*scratch);
	if (bytes > x->p.scratch_bytes)
		x->p.scratch_bytes = bytes;
	return 0;
}

/* Attributes of a product: scratch by the caller, and dst += where it adds. NULL with `e` set. */
static dnnl_primitive_attr_t product_attr(const struct entry *x, struct err *e)
{
	dnnl_primitive_attr_t attr = NULL;
	dnnl_post_ops_t sum = NULL;
	dnnl_status_t s = dnnl_primitive_attr_create(&attr);

	if (s == dnnl_success)
		s = dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
	if (s == dnnl_success && x->p.add)
		s = dnnl_post_ops_create(&sum);
	if (s == dnnl_success && x->p.add)
		s = append_sum(sum);
	if (s == dnnl_success && x->p.add)
		s = dnnl_primitive_attr_set_post_ops(attr, sum);
	if (sum)
		dnnl_post_ops_destroy(sum);
	if (!check(s, "describe a product", e))
		return attr;
	if (attr)
		dnnl_primitive_attr_destroy(attr);
	return NULL;
}

static int make_run(struct onednn *o, struct entry *x, struct err *e)
{
	dnnl_data_type_t type = x->p.operand == DT_BF16 ? dnnl_bf16 : dnnl_f32;
	dnnl_dims_t src = { x->p.M, x->p.K }, weight = { x->p.K, x->p.N }, dst = { x->p.M, x->p.N };
	/* A src with gaps between its rows would keep version 2 from its fastest kernels. */
	dnnl_dims_t src_stride = { x->p.K, 1 }, dst_stride = { x->p.N, 1 };
	dnnl_primitive_desc_t pd = NULL;
	dnnl_primitive_attr_t attr;
	MD any = NULL;
	int rc = -1;

	attr = product_attr(x, e);
	if (!attr)
		return -1;
	if (check(md_strided(&x->src, src, type, src_stride), "describe a matrix", e) ||
	    check(md_strided(&x->dst, dst, x->p.result == DT_BF16 ? dnnl_bf16 : dnnl_f32,
			     dst_stride),
		  "describe a matrix", e) ||
	    check(x->p.like ? md_copy(&any, ((const struct entry *)x->p.like)->weight)
			    : md_any(&any, weight, type),
		  "describe a weight", e) ||
	    check(matmul_desc(&pd, o->engine, x->src, any, x->dst, attr),
		  "multiply matrices of these sizes", e))
		goto out;
	if (check(md_copy(&x->weight, dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0)),
		  "tell a layout", e)) {
		dnnl_primitive_desc_destroy(pd);
		goto out;
	}
	rc = make(x, pd, &x->run, &x->run_scratch, e);
out:
	md_free(any);
	dnnl_primitive_attr_destroy(attr);
	return rc;
}

static int make_pack(struct onednn *o, struct entry *x, struct err *e)
{
	dnnl_data_type_t type = x->p.operand == DT_BF16 ? dnnl_bf16 : dnnl_f32;
	dnnl_dims_t dims = { x->p.K, x->p.N }, nk = { 1, x->p.ld }, kn = { x->p.N, 1 };
	dnnl_primitive_desc_t pd;

	if (check(md_strided(&x->plain, dims, type, x->p.order == ORDER_NK ? nk : kn),
		  "describe a matrix", e) ||
	    check(dnnl_reorder_primitive_desc_create(&pd, x->plain, o->engine, x->weight, o->engine,
						     o->attr),
		  "pack a weight", e))
		return -1;
	return make(x, pd, &x->pack, &x->pack_scratch, e);
}

static struct entry *find(struct onednn *o, const struct product *want)
{
	struct entry *x;

	for (x = o->list; x; x = x->next)
		if (x->p.operand == want->operand && x->p.result == want->result &&
		    x->p.M == want->M && x->p.N == want->N && x->p.K == want->K &&
		    x->p.ld == want->ld && x->p.order == want->order && x->p.add == want->add &&
		    x->p.like == want->like)
			break;
	return x;
}

static struct entry *entry_new(struct onednn *o, const struct product *want, struct err *e)
{
	struct entry *x = mem_calloc(1, sizeof *x, e);
	int threads, rc;

	if (!x)
		return NULL;
	x->p = *want;
	x->p.owner = o;
	x->p.scratch_bytes = 0;
	threads = one_thread();
	rc = make_run(o, x, e) || make_pack(o, x, e);
	restore(threads);
	if (rc) {
		err_context(e, "product of %lld x %lld x %lld", (long long)x->p.M,
			    (long long)x->p.N, (long long)x->p.K);
		entry_free(x);
		return NULL;
	}
	x->p.packed_bytes = (dnnl_memory_desc_get_size(x->weight) + 63) / 64 * 64;
	return x;
}

const struct product *onednn_product(struct onednn *o, const struct product *want, struct err *e)
{
	struct entry *x;

	pthread_mutex_lock(&o->lock);
	x = find(o, want);
	if (!x) {
		x = entry_new(o, want, e);
		if (x) {
			x->next = o->list;
			o->list = x;
		}
	}
	pthread_mutex_unlock(&o->lock);
	return x ? &x->p : NULL;
}

/* ---- running: with the calling thread alone -------------------------------------------------- */

void onednn_end(struct call *c)
{
	for (int i = 0; i < 4; i++)
		if (c->memory[i])
			dnnl_memory_destroy(c->memory[i]);
	if (c->stream)
		dnnl_stream_destroy(c->stream);
	*c = (struct call){ 0 };
}

static int begin(struct call *c, const struct product *p, CONST_MD const md[4], struct err *e)
{
	dnnl_engine_t engine = p->owner->engine;
	dnnl_stream_t stream = NULL;
	dnnl_memory_t m;
	dnnl_status_t s = dnnl_stream_create(&stream, engine, dnnl_stream_default_flags);

	*c = (struct call){ .product = p, .stream = stream };
	for (int i = 0; i < 4 && s == dnnl_success; i++) {
		if (!md[i])
			continue;
		s = dnnl_memory_create(&m, md[i], engine, DNNL_MEMORY_NONE);
		if (s == dnnl_success)
			c->memory[i] = m;
	}
	if (!check(s, "prepare a product", e))
		return 0;
	onednn_end(c);
	return -1;
}

static int execute(struct call *c, dnnl_primitive_t primitive, const int kind[4], void *p[4],
		   struct err *e)
{
	dnnl_exec_arg_t arg[4];
	dnnl_status_t s = dnnl_success;
	int n = 0, threads = one_thread();

	for (int i = 0; i < 4 && s == dnnl_success; i++) {
		if (!c->memory[i])
			continue;
		s = dnnl_memory_set_data_handle(c->memory[i], p[i]);
		arg[n++] = (dnnl_exec_arg_t){ kind[i], c->memory[i] };
	}
	if (s == dnnl_success)
		s = dnnl_primitive_execute(primitive, c->stream, n, arg);
	if (s == dnnl_success)
		s = dnnl_stream_wait(c->stream);
	restore(threads);
	return check(s, "run a product", e);
}

int onednn_pack(const struct product *p, void *packed, const void *src, void *scratch,
		struct err *e)
{
	static const int kind[4] = { DNNL_ARG_FROM, DNNL_ARG_TO, DNNL_ARG_SCRATCHPAD };
	const struct entry *x = (const struct entry *)p;
	CONST_MD md[4] = { x->plain, x->weight, x->pack_scratch };
	void *buf[4] = { (void *)src, packed, scratch };
	struct call c;
	int rc;

	if (begin(&c, p, md, e))
		return -1;
	rc = execute(&c, x->pack, kind, buf, e);
	onednn_end(&c);
	return rc;
}

int onednn_begin(struct call *c, const struct product *p, struct err *e)
{
	const struct entry *x = (const struct entry *)p;
	CONST_MD md[4] = { x->src, x->weight, x->dst, x->run_scratch };

	return begin(c, p, md, e);
}

int onednn_run(struct call *c, void *dst, const void *src, const void *packed, void *scratch,
	       struct err *e)
{
	static const int kind[4] = { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST,
				     DNNL_ARG_SCRATCHPAD };
	const struct entry *x = (const struct entry *)c->product;
	void *buf[4] = { (void *)src, (void *)packed, dst, scratch };

	return execute(c, x->run, kind, buf, e);
}

/* ---- the order of a packed weight: told by packing coordinates ------------------------------- */

/* The row of an element, its column / 64, its column % 64: all are exact in BF16. */
enum coordinate { ROW, COL_HIGH, COL_LOW, COORDINATES };

static int64_t coordinate(enum coordinate c, int64_t row, int64_t col)
{
	return 1 + (c == ROW ? row : c == COL_HIGH ? col / 64 : col % 64);
}

static void put_number(void *p, enum dtype d, int64_t i, float f)
{
	if (d == DT_BF16)
		((uint16_t *)p)[i] = dtype_f32_to_bf16(f);
	else
		((float *)p)[i] = f;
}

static int64_t get_number(const void *p, enum dtype d, int64_t i)
{
	return (int64_t)(d == DT_BF16 ? dtype_bf16_to_f32(((const uint16_t *)p)[i])
				      : ((const float *)p)[i]);
}

/* found[n]: the coordinate, from 1, of each packed number. */
static int pack_coordinate(const struct product *p, enum coordinate c, void *plain, void *packed,
			   void *scratch, uint16_t *found, int64_t n, struct err *e)
{
	for (int64_t r = 0; r < p->N; r++)
		for (int64_t k = 0; k < p->K; k++)
			put_number(plain, p->operand,
				   p->order == ORDER_NK ? r * p->ld + k : k * p->N + r,
				   (float)coordinate(c, r, k));
	memset(packed, 0, p->packed_bytes);
	if (onednn_pack(p, packed, plain, scratch, e))
		return -1;
	for (int64_t i = 0; i < n; i++)
		found[i] = (uint16_t)get_number(packed, p->operand, i);
	return 0;
}

static int extent(const uint16_t *v, uint8_t in[LAYOUT_LANES], int lanes)
{
	int low = v[0], high = v[0];

	for (int l = 1; l < lanes; l++) {
		low = v[l] < low ? v[l] : low;
		high = v[l] > high ? v[l] : high;
	}
	for (int l = 0; l < lanes; l++)
		in[l] = (uint8_t)(v[l] - low);
	return high - low + 1;
}

static bool follows(const uint16_t *v, const uint8_t *in, int lanes, int size)
{
	int base = v[0] - in[0];

	for (int l = 0; l < lanes; l++)
		if (v[l] != base + in[l])
			return false;
	return base >= 0 && base % size == 0;
}

/* The pattern of the first `lanes` numbers, if all follow it. */
static bool find_pattern(struct layout *y, const uint16_t *row, const uint16_t *col, int64_t n,
			 int lanes)
{
	y->lanes = lanes;
	y->groups = n / lanes;
	for (int l = 1; l < lanes; l++)
		if (abs(row[l] - row[0]) > UINT8_MAX || abs(col[l] - col[0]) > UINT8_MAX)
			return false;
	y->rows = extent(row, y->row_in, lanes);
	y->cols = extent(col, y->col_in, lanes);
	for (int64_t g = 0; g < y->groups; g++) {
		if (!follows(row + g * lanes, y->row_in, lanes, y->rows) ||
		    !follows(col + g * lanes, y->col_in, lanes, y->cols))
			return false;
		y->row[g] = (uint16_t)((row[g * lanes] - y->row_in[0]) / y->rows);
		y->col[g] = (uint16_t)((col[g * lanes] - y->col_in[0]) / y->cols);
	}
	return n % lanes == 0;
}

/* Coordinates from 1 to from 0; a number without any fills a gap. */
static int join_coordinates(uint16_t *const found[COORDINATES], int64_t n, struct err *e)
{
	for (int64_t i = 0; i < n; i++) {
		if (!found[ROW][i])
			return err_fail(e, "oneDNN packs a weight with gaps, which packed storage "
					   "cannot follow");
		found[ROW][i]--;
		found[COL_HIGH][i] =
			(uint16_t)((found[COL_HIGH][i] - 1) * 64 + found[COL_LOW][i] - 1);
	}
	return 0;
}

static void shrink(uint16_t **p, int64_t n)
{
	uint16_t *q = *p && n ? realloc(*p, (size_t)n * sizeof *q) : NULL;

	*p = q ? q : *p;
}

static int find_layout(const struct product *p, struct layout *y, struct err *e)
{
	int64_t n = (int64_t)(p->packed_bytes / dtype_size(p->operand));
	size_t ld = (size_t)(p->order == ORDER_NK ? p->ld : p->K);
	uint16_t *found[COORDINATES] = { NULL };
	void *plain = mem_aligned((size_t)p->N * ld * dtype_size(p->operand), e),
	     *packed = plain ? mem_aligned(p->packed_bytes, e) : NULL,
	     *scratch = packed ? mem_aligned(p->scratch_bytes + 64, e) : NULL;
	int rc = scratch ? 0 : -1;

	for (int c = 0; c < COORDINATES && !rc; c++) {
		found[c] = mem_calloc((size_t)n, sizeof *found[c], e);
		rc = found[c] ? pack_coordinate(p, c, plain, packed, scratch, found[c], n, e) : -1;
	}
	y->row = mem_calloc((size_t)n, sizeof *y->row, e);
	y->col = mem_calloc((size_t)n, sizeof *y->col, e);
	if (!rc && y->row && y->col && !join_coordinates(found, n, e) &&
	    !find_pattern(y, found[ROW], found[COL_HIGH], n, LAYOUT_LANES))
		find_pattern(y, found[ROW], found[COL_HIGH], n, 1);
	shrink(&y->row, y->groups);
	shrink(&y->col, y->groups);
	for (int c = 0; c < COORDINATES; c++)
		free(found[c]);
	free(plain);
	free(packed);
	free(scratch);
	return e->code ? -1 : 0;
}

const struct layout *onednn_layout(const struct product *p, struct err *e)
{
	struct entry *x = (struct entry *)p;
	struct onednn *o = p->owner;
	int rc = 0;

	pthread_mutex_lock(&o->lock);
	if (!x->layout.row) {
		rc = find_layout(p, &x->layout, e);
		if (rc) {
			free(x->layout.row);
			free(x->layout.col);
			x->layout = (struct layout){ 0 };
		}
	}
	pthread_mutex_unlock(&o->lock);
	return rc ? NULL : &x->layout;
}
