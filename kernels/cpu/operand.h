/* SPDX-License-Identifier: Apache-2.0 */
/* operand: rows of numbers as operands of products that are not weights. */
#ifndef DSPARK_CPU_OPERAND_H
#define DSPARK_CPU_OPERAND_H

#include "cpu.h"
#include "number.h"

/* n numbers rounded to `rounded`, as `operand`, zeros behind them up to `width`. */
static inline void operand_row(void *dst, enum dtype operand, enum dtype rounded, const void *src,
			       enum dtype from, int64_t n, int64_t width)
{
	size_t size = dtype_size(operand);

	if (from == operand && (from == rounded || from == DT_BF16)) {
		memcpy(dst, src, (size_t)n * size);
	} else if (operand == DT_F32) {
		run_load(dst, src, from, n);
		run_round(dst, from == DT_BF16 ? DT_F32 : rounded, n);
	} else if (from == DT_F32) {
		run_save(dst, operand, src, n);
	} else {
		dtype_convert(dst, operand, src, from, (size_t)n);
	}
	memset((char *)dst + (size_t)n * size, 0, (size_t)(width - n) * size);
}

/* The dtype in which products of tensors run. */
static inline enum dtype operand_of(const struct device *d)
{
	return cpu_of(d)->bf16 ? d->compute : DT_F32;
}

#endif
