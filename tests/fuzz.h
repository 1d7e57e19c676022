/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz: the frame of fuzz_*.c. With -fsanitize=fuzzer the library calls LLVMFuzzerTestOneInput;
 * with -DFUZZ_MAIN the program runs the files it is given, so that corpora are tests under every
 * compiler.
 */
#ifndef DSPARK_FUZZ_H
#define DSPARK_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#ifdef FUZZ_MAIN
#include <stdio.h>

#include "err.h"
#include "file.h"
#include "text.h"

int main(int argc, char **argv)
{
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;
	int i;

	for (i = 1; i < argc && !e.code; i++)
		if (!file_read_all(argv[i], (size_t)1 << 30, &t, &e))
			LLVMFuzzerTestOneInput((const uint8_t *)t.s, t.len);
	text_release(&t);
	if (e.code)
		fprintf(stderr, "%s\n", e.text);
	return e.code;
}
#endif

#endif
