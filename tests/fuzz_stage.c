/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_stage: any bytes as what a stage's files hold, with a right hash behind them, as only malice
 * or a fault of ours would write it. First byte: 'h' a head, 'i' an index, else a packed block
 * whose unpacked length the next two bytes give. What is accepted must be the same when written and
 * read again.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "fuzz.h"
#include "pack.h"
#include "stage_index.h"

static void seal(struct text *t, const char *before)
{
	char hex[DIGEST_HEX];

	digest_xxh3(hex, t->s, t->len);
	text_printf(t, "%s\"xxh3_128\":\"%s\"}\n", before, hex);
}

static void as_head(struct text *t)
{
	struct text again = TEXT_INIT;
	struct err e = ERR_INIT;
	struct stage_head h, other;

	seal(t, "");
	if (stage_head_parse(&h, t, "fuzz", &e)) {
		if (e.code != EXIT_REFUSED)
			abort();
		return;
	}
	if (stage_head_text(&again, &h, &e) || stage_head_parse(&other, &again, "again", &e) ||
	    other.nfiles != h.nfiles || other.form != h.form || other.shares != h.shares)
		abort();
	stage_head_release(&h);
	stage_head_release(&other);
	text_release(&again);
}

static void as_index(struct text *t)
{
	struct text again = TEXT_INIT;
	struct err e = ERR_INIT;
	struct stage_index x, other;
	size_t i;

	seal(t, "{");
	if (stage_index_parse(&x, t, "fuzz", &e)) {
		if (e.code != EXIT_REFUSED)
			abort();
		return;
	}
	if (stage_index_text(&again, &x, &e) || stage_index_parse(&other, &again, "again", &e) ||
	    other.n != x.n || other.size != x.size)
		abort();
	for (i = 0; i < x.n; i++)
		if (strcmp(x.entry[i].name, other.entry[i].name) ||
		    stage_bytes(&x.entry[i]) != stage_bytes(&other.entry[i]) ||
		    x.place[i].nblocks != other.place[i].nblocks ||
		    x.entry[i].end != other.entry[i].end)
			abort();
	stage_index_release(&x);
	stage_index_release(&other);
	text_release(&again);
}

static void as_block(const uint8_t *data, size_t len, size_t n)
{
	unsigned char *block = malloc(len + DIGEST_HEX), *out = malloc(n + 1),
		      *scratch = malloc(PACK_SCRATCH);
	char hex[DIGEST_HEX];

	if (!block || !out || !scratch)
		abort();
	memcpy(block, data, len);
	digest_xxh3(hex, data, len);
	memcpy(block + len, hex, DIGEST_HEX - 1);
	pack_unpack(out, n, block, len + DIGEST_HEX - 1, scratch);
	free(block);
	free(out);
	free(scratch);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct text t = TEXT_INIT;

	if (n < 3)
		return 0;
	text_addn(&t, data + 1, n - 1);
	if (data[0] == 'h')
		as_head(&t);
	else if (data[0] == 'i')
		as_index(&t);
	else
		as_block(data + 3, n - 3, data[1] | (size_t)data[2] << 8);
	text_release(&t);
	return 0;
}
