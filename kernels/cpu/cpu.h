/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu: ref's table with faster verbs over it. Products are fixed tiles of oneDNN, one thread each;
 * this folder spreads the tiles over OpenMP threads.
 *
 * A product weight [count, rows, cols] lies in memory as panels of its rows, all of one width but
 * the last of each matrix:
 *
 *	matrix 0: panel 0 [width, K] | panel 1 | ... | panel n-1 [last, K] || matrix 1: ...
 *
 * widths, and K = cols, are rounded up to 64 with zeros. A panel is cut along K into blocks, whose
 * products are added one after the other, so that a block of rows and a block of weights stay in
 * the second-level cache whatever K is. Widths and blocks depend on the weight's shape and dtype
 * alone, so that the sums of a column do too.
 *
 * Packed storage (struct quant) lies in memory as codes in the order in which oneDNN would have
 * their numbers, and is expanded a panel at a time; its scales lie beside it, a row for each block
 * of rows. Of codes of half a byte, byte i of each 16 has number i of 32 in its low half and number
 * 16 + i in its high half.
 */
#ifndef DSPARK_CPU_H
#define DSPARK_CPU_H

#include <pthread.h>

#include "err.h"
#include "onednn.h"
#include "ref/ref.h"

/*
 * Rows of a tile of matmul and of experts: with them a product's bits are fixed (numerics number of
 * the identity). Small ones waste less on experts with few rows.
 */
enum tile_kind { TILE_LARGE, TILE_SMALL, TILE_KINDS };
#define TILE_ROWS(kind) ((kind) == TILE_LARGE ? 128 : 64)

#define PANEL_MOST      256 /* most rows of a weight in a panel */
#define PANEL_BYTES \
	(512 << 10) /* of a block of a panel, about: leaves room for rows in the cache */
#define BLOCK_MOST(size) ((size) == 2 ? 4096 : 3072) /* most of K in a block */
#define GROUP_BYTES \
	(1 << 20) /* of a block of the rows that meet a panel one after the other, about */
/* the same where a panel is expanded first: the panel stays in the cache, rows pass through */
#define GROUP_BYTES_EXPANDED (8 << 20)
#define BATCH_BYTES          (32 << 20) /* of rows that are made operands at a time, about */

/* Memory that grows and stays. */
struct room {
	char *p;
	size_t size;
};

/* Memory that was taken and given back. */
struct spare {
	struct spare *next;
	size_t bytes; /* behind this one, from the next 64 on */
};

/* Memory of a packed weight that was freed. */
struct block {
	struct block *next;
	void *p;
	size_t bytes;
};

struct cpu {
	struct onednn *dnn;
	bool bf16; /* products of bf16 operands as such; else in F32 on rounded operands */
	int threads;
	struct room shared;
	struct room *own;     /* [threads] */
	pthread_mutex_t lock; /* of the next three */
	struct spare *spare;
	size_t spare_bytes;
	struct block *blocks; /* the oldest first */
};

/* Rows of a panel that wait for the rest of it. */
struct staging {
	void *rows; /* [width, K] in the operand dtype, NULL = nothing yet */
	int64_t filled;
};

/* The first block of K overwrites the sums, the others add; the last may be smaller than they. */
enum block_kind { BLOCK_FIRST, BLOCK_MIDDLE, BLOCK_LAST, BLOCK_KINDS };

struct packed {
	enum dtype rounded; /* precision of the operands: DT_F32 or DT_BF16 */
	enum dtype operand; /* in which the product runs; DT_F32 where bf16 has no hardware */
	enum dtype kept; /* of the packed numbers in memory: = rounded; DT_U8: codes */
	bool half;       /* codes of half a byte: two in each */
	const struct quant *quant; /* of codes, else NULL */
	int64_t rows, cols;        /* of the weight */
	bool gated;         /* each panel: rows of gate, then the rows of up that belong to them */
	int64_t K, panels, width, last;
	int64_t blocks, block;            /* of K; the last may be smaller */
	size_t panel_bytes, matrix_bytes; /* of a full panel and of a matrix, as kept */
	size_t bytes;                     /* that data has, or more */
	size_t expanded; /* bytes of a full panel as operand where kept != operand, else 0 */
	size_t tables;   /* bytes of the tables that expanding codes takes */
	size_t scratch;  /* most that a product needs */
	/* for both kinds of tiles, of full panels and of the last; all read the same layout */
	const struct product *product[TILE_KINDS][2][BLOCK_KINDS];
	/* of large tiles to BF16, where K is one block and the weight is not gated; else NULL */
	const struct product *rounding[2];
	/* where codes come from, of full panels and of the last */
	const struct layout *layout[2][BLOCK_KINDS];
	struct ref_scales scales;
	pthread_mutex_t lock;    /* of staging */
	struct staging *staging; /* [count * panels], NULL once ready */
	char *data;
};

/* What a thread needs to multiply: calls and memory, which is part of its own room. */
struct bench {
	const struct packed *w;
	enum tile_kind kind;
	bool rounds; /* sums are BF16: w has `rounding` */
	struct call call[2][BLOCK_KINDS];
	float *sums; /* [tiles, rows, width] */
	char *expanded, *tables, *scratch;
	const char *holds; /* the panel that `expanded` holds, NULL = none */
};

/*
 * A tile of a group has met all of a panel: sums [rows, width of the panel], F32, or BF16 if the
 * bench rounds; free to be changed.
 */
typedef void tile_done(void *ctx, int64_t tile, int64_t panel, void *sums);

static inline struct cpu *cpu_of(const struct device *d)
{
	return d->state;
}

static inline const struct packed *packed_of(const struct weight *w)
{
	return w->handle;
}

static inline int64_t round_up(int64_t n, int64_t to)
{
	return (n + to - 1) / to * to;
}

static inline size_t whole_lines(size_t bytes)
{
	return (bytes + 63) / 64 * 64;
}

int cpu_open(struct device *d, const struct device_options *o, struct err *e);
void cpu_close(struct device *d);

extern const struct backend cpu_verbs_base, cpu_verbs_avx2, cpu_verbs_avx512;

/* Keeps `e` as the device's failure; safe inside a parallel region. */
void cpu_fail(struct device *d, const struct err *e);

/*
 * At least `bytes` in the shared room, or in each thread's own. False if there is no memory: the
 * device has failed.
 */
bool cpu_shared(struct device *d, size_t bytes);
bool cpu_own(struct device *d, size_t bytes);

/*
 * At least `bytes` for the time between two panels that are packed, from those given back if they
 * suffice: new pages for every panel would cost as much as the packing. Thread-safe; some MiB
 * stay.
 */
void *cpu_take_spare(struct cpu *c, size_t bytes, struct err *e);
void cpu_give_spare(struct cpu *c, void *p); /* may be NULL */

/*
 * Memory for a packed weight of *bytes, and its return: weights that come and go take it over from
 * each other, since the system would clear its pages each time, which costs more than the packing.
 * *bytes becomes what it has, at most twice as much, and is to be given back. What finds nothing
 * that fits first gives up as much of the oldest, so that what is kept never adds to the most that
 * was in use. Thread-safe.
 */
void *cpu_take_block(struct cpu *c, size_t *bytes, struct err *e);
void cpu_give_block(struct cpu *c, void *p, size_t bytes); /* p may be NULL */

/*
 * Everything below is compiled once for each vector unit, CPU_VARIANT (base, avx2, avx512): no name
 * of one may stand for the other's.
 */
#ifdef CPU_VARIANT
#define CPU_JOIN(name, variant) cpu_##name##_##variant
#define CPU_NAME(name, variant) CPU_JOIN(name, variant)
#define cpu_verbs               CPU_NAME(verbs, CPU_VARIANT)
#define cpu_operand_row         CPU_NAME(operand_row, CPU_VARIANT)
#define cpu_codes_row           CPU_NAME(codes_row, CPU_VARIANT)
#define cpu_codes_pack          CPU_NAME(codes_pack, CPU_VARIANT)
#define cpu_codes_tables        CPU_NAME(codes_tables, CPU_VARIANT)
#define cpu_codes_expand        CPU_NAME(codes_expand, CPU_VARIANT)
#define cpu_bench_bytes         CPU_NAME(bench_bytes, CPU_VARIANT)
#define cpu_bench               CPU_NAME(bench, CPU_VARIANT)
#define cpu_tile_row            CPU_NAME(tile_row, CPU_VARIANT)
#define cpu_tile_columns        CPU_NAME(tile_columns, CPU_VARIANT)
#define cpu_bench_end           CPU_NAME(bench_end, CPU_VARIANT)
#define cpu_group               CPU_NAME(group, CPU_VARIANT)
#define cpu_panel               CPU_NAME(panel, CPU_VARIANT)
#define cpu_weight_alloc        CPU_NAME(weight_alloc, CPU_VARIANT)
#define cpu_weight_fill         CPU_NAME(weight_fill, CPU_VARIANT)
#define cpu_weight_ready        CPU_NAME(weight_ready, CPU_VARIANT)
#define cpu_weight_free         CPU_NAME(weight_free, CPU_VARIANT)
#define cpu_matmul              CPU_NAME(matmul, CPU_VARIANT)
#define cpu_matmul_gate         CPU_NAME(matmul_gate, CPU_VARIANT)
#define cpu_experts             CPU_NAME(experts, CPU_VARIANT)
#define cpu_attention           CPU_NAME(attention, CPU_VARIANT)
#define cpu_choose              CPU_NAME(choose, CPU_VARIANT)
#define cpu_attention_at        CPU_NAME(attention_at, CPU_VARIANT)
#define cpu_product             CPU_NAME(product, CPU_VARIANT)
#define cpu_layer_norm          CPU_NAME(layer_norm, CPU_VARIANT)
#define cpu_copy                CPU_NAME(copy, CPU_VARIANT)
#define cpu_act_row             CPU_NAME(act_row, CPU_VARIANT)
#define cpu_upload              CPU_NAME(upload, CPU_VARIANT)
#define cpu_store               CPU_NAME(store, CPU_VARIANT)
#define cpu_rows                CPU_NAME(rows, CPU_VARIANT)
#define cpu_norm                CPU_NAME(norm, CPU_VARIANT)
#define cpu_rope                CPU_NAME(rope, CPU_VARIANT)
#define cpu_gate                CPU_NAME(gate, CPU_VARIANT)
#define cpu_add                 CPU_NAME(add, CPU_VARIANT)
#define cpu_route               CPU_NAME(route, CPU_VARIANT)
#define cpu_pick                CPU_NAME(pick, CPU_VARIANT)
#define cpu_combine             CPU_NAME(combine, CPU_VARIANT)

extern const struct backend cpu_verbs;

/* Weights (pack.c): products are packed, everything else is ref's. */
int cpu_weight_alloc(struct device *d, struct weight *w, struct err *e);
int cpu_weight_fill(struct device *d, struct weight *w, int64_t index, int64_t row0, int64_t n,
		    const void *src, enum dtype from, const void *scales, struct err *e);
int cpu_weight_ready(struct device *d, struct weight *w, struct err *e);
void cpu_weight_free(struct device *d, struct weight *w);

/*
 * Codes (codes.c). A row of codes as they are stored to one of a panel, a byte each and 0 for the
 * number 0; block k of a panel [width, K] of them to where it is kept; the bytes of tables that
 * expand needs; all blocks of a panel as operands.
 */
void cpu_codes_row(const struct packed *w, uint8_t *to, const void *codes);
void cpu_codes_pack(const struct packed *w, bool last, int64_t k, uint8_t *to, const uint8_t *rows);
size_t cpu_codes_tables(const struct packed *w);
void cpu_codes_expand(const struct packed *w, int64_t index, int64_t panel, char *to,
		      const uint8_t *codes, char *tables);

/*
 * Products (matmul.c). K operands from n numbers, zeros behind them; the same as row `row` of a
 * tile; n operands of it from column c0 on; how many tiles make a group; the bytes of a bench for
 * groups of so many; a bench laid out at p, to be ended in the same parallel region; `tiles` tiles
 * that lie one behind the other x panel of matrix `index`, `done` called for each.
 *
 * A tile of operands lies as the blocks of K do, [blocks][rows, block]: one block is [rows, K].
 */
void cpu_operand_row(const struct packed *w, void *dst, const void *src, enum dtype from,
		     int64_t n);
void cpu_tile_row(const struct packed *w, enum tile_kind kind, char *tile, int64_t row,
		  const void *src, enum dtype from, int64_t n);
void cpu_tile_columns(const struct packed *w, enum tile_kind kind, char *tile, int64_t row,
		      int64_t c0, const float *src, int64_t n);
int64_t cpu_group(const struct packed *w, enum tile_kind kind);
size_t cpu_bench_bytes(const struct packed *w, enum tile_kind kind, int64_t tiles);
struct bench cpu_bench(const struct packed *w, enum tile_kind kind, int64_t tiles, char *p);
void cpu_bench_end(struct bench *b);
int cpu_panel(struct bench *b, int64_t index, int64_t panel, const void *rows, int64_t tiles,
	      tile_done *done, void *ctx, struct err *e);

static inline enum block_kind cpu_block_kind(const struct packed *w, int64_t k)
{
	return k == 0 ? BLOCK_FIRST : k < w->blocks - 1 ? BLOCK_MIDDLE : BLOCK_LAST;
}

/* Of block k of a full panel, or of the last, in the operand dtype; and as it is kept. */
static inline size_t cpu_block_bytes(const struct packed *w, bool last, int64_t k)
{
	return w->product[TILE_LARGE][last][cpu_block_kind(w, k)]->packed_bytes;
}

static inline size_t cpu_kept_bytes(const struct packed *w, bool last, int64_t k)
{
	size_t n = cpu_block_bytes(w, last, k) / dtype_size(w->operand);

	return w->half ? n / 2 : n * dtype_size(w->kept);
}

static inline int64_t cpu_panel_width(const struct packed *w, int64_t panel)
{
	return panel == w->panels - 1 ? w->last : w->width;
}

/* A product that this backend packs. */
static inline bool cpu_packs(const struct weight *w)
{
	return w->use == USE_PRODUCT || w->use == USE_GATED;
}

void cpu_matmul(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		const struct weight *bias, bool add);
void cpu_matmul_gate(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		     const struct act *a);
void cpu_experts(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
		 struct tensor weights, const struct experts *ex, bool add);
void cpu_combine(struct device *d, struct tensor sum, struct tensor y, struct tensor index,
		 struct tensor weights, bool add);
void cpu_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		   struct tensor v, const struct attention *a, const struct piece *pieces, int n);

void cpu_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
		struct tensor w, const struct piece *pieces, int n);
void cpu_attention_at(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		      struct tensor v, struct tensor keys, const struct attention *a,
		      const struct piece *pieces, int n);
void cpu_product(struct device *d, struct tensor out, struct tensor x, struct tensor y,
		 const struct grouped *g);
void cpu_layer_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		    const struct weight *bias, float eps, int64_t width);
void cpu_copy(struct device *d, struct tensor out, int64_t out_step, struct tensor x,
	      int64_t x_step, int64_t width, int n);

/* Row by row (rowwise.c). a[n] = act(g[n], u[n]). */
void cpu_act_row(float *restrict a, const float *restrict g, const float *restrict u,
		 const struct act *act, int64_t n);
void cpu_upload(struct device *d, struct tensor out, const void *src);
void cpu_store(struct device *d, void *dst, enum dtype to, int64_t dst_ld, struct tensor x);
void cpu_rows(struct device *d, struct tensor out, const struct weight *table, struct tensor ids);
void cpu_pick(struct device *d, struct tensor out, struct tensor x, struct tensor index);
void cpu_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
	      float eps, int64_t width);
void cpu_rope(struct device *d, struct tensor x, int heads, const struct weight *norm, float eps,
	      const struct rope *r, struct tensor pos);
void cpu_gate(struct device *d, struct tensor out, struct tensor x, const struct act *a);
void cpu_add(struct device *d, struct tensor x, struct tensor y);
void cpu_route(struct device *d, struct tensor ids, struct tensor weights, struct tensor logits,
	       const struct router *r);

#endif /* CPU_VARIANT */

#endif
