/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_yaml: any bytes as a document and, cut at NUL, as a plain scalar; what is accepted must be
 * writable as JSON.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "fuzz.h"
#include "json.h"
#include "text.h"
#include "yaml.h"

static void check(json_t *v, const struct err *e)
{
	struct text t = TEXT_INIT;
	struct err why = ERR_INIT;
	json_t *again;

	if (!v != !!e->code || (e->code && e->code != EXIT_REFUSED))
		abort();
	if (!v)
		return;
	json_line(&t, v);
	again = json_parse(t.s, t.len, "again", &why);
	if (!again || !json_equal(v, again))
		abort();
	json_decref(again);
	json_decref(v);
	text_release(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	char *s = strndup((const char *)data, n);
	struct err e = ERR_INIT;

	check(yaml_parse((const char *)data, n, "fuzz", &e), &e);
	e = (struct err)ERR_INIT;
	if (s)
		check(yaml_scalar(s, &e), &e);
	free(s);
	return 0;
}
