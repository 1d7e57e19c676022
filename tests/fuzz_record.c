/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_record: any bytes as a run; what is accepted must be the same when written and read again.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>

#include "err.h"
#include "fuzz.h"
#include "json.h"
#include "record.h"
#include "text.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct text lines = TEXT_INIT, words = TEXT_INIT;
	struct run r, again;
	struct err e = ERR_INIT;
	size_t i;

	if (run_parse(&r, (const char *)data, n, "fuzz", &e)) {
		if (e.code != EXIT_REFUSED)
			abort();
		run_release(&r);
		return 0;
	}
	for (i = 0; i < r.n; i++) {
		json_line(&lines, r.record[i]);
		text_add(&lines, "\n");
		json_python(&words, r.record[i], 2, true);
		json_python_repr(&words, r.record[i]);
	}
	text_add(&lines, "");
	if (text_ok(&lines, &e) || text_ok(&words, &e) ||
	    run_parse(&again, lines.s, lines.len, "again", &e) || again.n != r.n)
		abort();
	for (i = 0; i < r.n; i++)
		if (!json_equal(r.record[i], again.record[i]))
			abort();
	run_release(&r);
	run_release(&again);
	text_release(&lines);
	text_release(&words);
	return 0;
}
