/* SPDX-License-Identifier: Apache-2.0 */
/* oneDNN 2.6 or 3.x; nothing of kernels/cpu, whose primitives are made for one thread. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <dnnl.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

#include "mem.h"
#include "yardstick.h"

/* Memory descriptors are handles in version 3; in version 2 values, of which we own copies. */
#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t owned_md;
typedef const_dnnl_memory_desc_t lent_md;

static dnnl_status_t describe(owned_md *md, const dnnl_dims_t dims, dnnl_data_type_t type,
			      const dnnl_dims_t strides)
{
	return strides ? dnnl_memory_desc_create_with_strides(md, 2, dims, type, strides)
		       : dnnl_memory_desc_create_with_tag(md, 2, dims, type, dnnl_format_tag_any);
}

static void forget(owned_md md)
{
	if (md)
		dnnl_memory_desc_destroy(md);
}

static dnnl_status_t matmul(dnnl_primitive_desc_t *pd, dnnl_engine_t engine, owned_md src,
			    owned_md w, owned_md dst)
{
	return dnnl_matmul_primitive_desc_create(pd, engine, src, w, NULL, dst, NULL);
}
#else
typedef dnnl_memory_desc_t *owned_md;
typedef const dnnl_memory_desc_t *lent_md;

static dnnl_status_t describe(owned_md *md, const dnnl_dims_t dims, dnnl_data_type_t type,
			      const dnnl_dims_t strides)
{
	*md = calloc(1, sizeof **md);
	if (!*md)
		return dnnl_out_of_memory;
	return strides ? dnnl_memory_desc_init_by_strides(*md, 2, dims, type, strides)
		       : dnnl_memory_desc_init_by_tag(*md, 2, dims, type, dnnl_format_tag_any);
}

static void forget(owned_md md)
{
	free(md);
}

static dnnl_status_t matmul(dnnl_primitive_desc_t *pd, dnnl_engine_t engine, owned_md src,
			    owned_md w, owned_md dst)
{
	dnnl_matmul_desc_t d;
	dnnl_status_t s = dnnl_matmul_desc_init(&d, src, w, NULL, dst);

	return s == dnnl_success ? dnnl_primitive_desc_create(pd, &d, NULL, engine, NULL) : s;
}
#endif

struct yardstick {
	dnnl_engine_t engine;
	dnnl_stream_t stream;
	dnnl_primitive_t run;
	dnnl_memory_t src, w, dst;
	void *packed;
	int threads;
};

static int check(dnnl_status_t s, const char *what, struct err *e)
{
	if (s == dnnl_success)
		return 0;
	return err_fail(e, "the yardstick: oneDNN cannot %s (status %d)", what, (int)s);
}

void yardstick_free(struct yardstick *y)
{
	if (!y)
		return;
	if (y->run)
		dnnl_primitive_destroy(y->run);
	if (y->src)
		dnnl_memory_destroy(y->src);
	if (y->w)
		dnnl_memory_destroy(y->w);
	if (y->dst)
		dnnl_memory_destroy(y->dst);
	if (y->stream)
		dnnl_stream_destroy(y->stream);
	if (y->engine)
		dnnl_engine_destroy(y->engine);
	free(y->packed);
	free(y);
}

static dnnl_data_type_t type_of(enum dtype d)
{
	return d == DT_BF16 ? dnnl_bf16 : dnnl_f32;
}

/* w, as `plain` describes it, into y->packed, as `like` does. */
static int pack(struct yardstick *y, owned_md plain, lent_md like, const void *w, struct err *e)
{
	dnnl_primitive_desc_t pd = NULL;
	dnnl_primitive_t reorder = NULL;
	dnnl_memory_t from = NULL;
	dnnl_exec_arg_t arg[2];
	int rc;

	y->packed = mem_aligned(dnnl_memory_desc_get_size(like), e);
	rc = !y->packed ||
	     check(dnnl_memory_create(&y->w, like, y->engine, y->packed), "keep a weight", e) ||
	     check(dnnl_memory_create(&from, plain, y->engine, (void *)w), "read a weight", e) ||
	     check(dnnl_reorder_primitive_desc_create(&pd, plain, y->engine, like, y->engine, NULL),
		   "pack a weight", e) ||
	     check(dnnl_primitive_create(&reorder, pd), "pack a weight", e);
	if (!rc) {
		arg[0] = (dnnl_exec_arg_t){ DNNL_ARG_FROM, from };
		arg[1] = (dnnl_exec_arg_t){ DNNL_ARG_TO, y->w };
		rc = check(dnnl_primitive_execute(reorder, y->stream, 2, arg), "pack a weight",
			   e) ||
		     check(dnnl_stream_wait(y->stream), "pack a weight", e);
	}
	if (reorder)
		dnnl_primitive_destroy(reorder);
	if (pd)
		dnnl_primitive_desc_destroy(pd);
	if (from)
		dnnl_memory_destroy(from);
	return rc ? -1 : 0;
}

static int make(struct yardstick *y, owned_md const md[4], const void *src, const void *w,
		void *dst, struct err *e)
{
	dnnl_primitive_desc_t pd = NULL;
	int rc;

	rc = check(matmul(&pd, y->engine, md[0], md[1], md[2]), "multiply matrices of these sizes",
		   e) ||
	     check(dnnl_primitive_create(&y->run, pd), "make a primitive", e) ||
	     check(dnnl_memory_create(&y->src, md[0], y->engine, (void *)src), "take a matrix",
		   e) ||
	     check(dnnl_memory_create(&y->dst, md[2], y->engine, dst), "take a matrix", e) ||
	     pack(y, md[3], dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0), w, e);
	if (pd)
		dnnl_primitive_desc_destroy(pd);
	return rc ? -1 : 0;
}

struct yardstick *yardstick_new(enum dtype in, enum dtype out, int64_t M, int64_t N, int64_t K,
				const void *src, const void *w, void *dst, int threads,
				struct err *e)
{
	dnnl_dims_t size[] = { { M, K }, { K, N }, { M, N } },
		    row[] = { { K, 1 }, { 1, K }, { N, 1 } };
	struct yardstick *y = mem_calloc(1, sizeof *y, e);
	owned_md md[4] = { NULL }; /* src, weight as the product likes it, dst, weight as given */
	int rc;

	if (!y)
		return NULL;
	y->threads = threads;
	omp_set_num_threads(threads);
	rc = check(dnnl_engine_create(&y->engine, dnnl_cpu, 0), "start", e) ||
	     check(dnnl_stream_create(&y->stream, y->engine, dnnl_stream_default_flags), "start",
		   e) ||
	     check(describe(&md[0], size[0], type_of(in), row[0]), "describe a matrix", e) ||
	     check(describe(&md[1], size[1], type_of(in), NULL), "describe a matrix", e) ||
	     check(describe(&md[2], size[2], type_of(out), row[2]), "describe a matrix", e) ||
	     check(describe(&md[3], size[1], type_of(in), row[1]), "describe a matrix", e) ||
	     make(y, md, src, w, dst, e);
	for (int i = 0; i < 4; i++)
		forget(md[i]);
	if (rc) {
		yardstick_free(y);
		return NULL;
	}
	return y;
}

int yardstick_run(struct yardstick *y, struct err *e)
{
	dnnl_exec_arg_t arg[] = { { DNNL_ARG_SRC, y->src },
				  { DNNL_ARG_WEIGHTS, y->w },
				  { DNNL_ARG_DST, y->dst } };

	omp_set_num_threads(y->threads);
	if (check(dnnl_primitive_execute(y->run, y->stream, 3, arg), "run a product", e))
		return -1;
	return check(dnnl_stream_wait(y->stream), "run a product", e);
}

const char *yardstick_version(void)
{
	static char text[32];
	const dnnl_version_t *v = dnnl_version();

	snprintf(text, sizeof text, "%d.%d.%d", v->major, v->minor, v->patch);
	return text;
}
