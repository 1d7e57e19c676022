/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json, record, yaml: typed members and refusals. base_oracle.py holds the spellings against
 * Python.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "json.h"
#include "record.h"
#include "tap.h"
#include "text.h"
#include "yaml.h"

static json_t *parse(const char *s)
{
	struct err e = ERR_INIT;

	return json_parse(s, strlen(s), "test", &e);
}

static void test_members(void)
{
	static const char doc[] =
		"{\"s\":\"x\",\"i\":7,\"w\":3.0,\"r\":2.5,\"b\":true,\"n\":null,"
		"\"big\":1e19,\"neg\":-9223372036854775808}";
	json_t *o = parse(doc);
	struct err e = ERR_INIT;
	const char *s;
	int64_t i;
	double d;
	bool b;

	ok(!json_str(o, "o", "s", &s, &e) && !strcmp(s, "x"), "a string");
	ok(!json_int(o, "o", "i", &i, &e) && i == 7, "an integer");
	ok(!json_int(o, "o", "w", &i, &e) && i == 3, "a whole real is an integer");
	ok(!json_int(o, "o", "neg", &i, &e) && i == INT64_MIN, "the smallest integer");
	ok(!json_real_or(o, "o", "r", 0, &d, &e) && d == 2.5, "a real");
	ok(!json_real_or(o, "o", "i", 0, &d, &e) && d == 7, "an integer is a real");
	ok(!json_bool_or(o, "o", "b", false, &b, &e) && b, "a boolean");
	ok(!json_str_or(o, "o", "n", "def", &s, &e) && !strcmp(s, "def"), "null gives the default");
	ok(!json_int_or(o, "o", "absent", -1, &i, &e) && i == -1, "absence gives the default");
	ok(!json_real_or(o, "o", "n", 1.5, &d, &e) && d == 1.5, "a default real");
	ok(!json_bool_or(o, "o", "n", true, &b, &e) && b, "a default boolean");
	ok(json_has(o, "s") && !json_has(o, "n") && !json_has(o, "absent") && !json_has(NULL, "s"),
	   "has");
	is_int(e.code, 0, "no error so far");

#define REFUSED(call, words)                                                                       \
	do {                                                                                       \
		e = (struct err)ERR_INIT;                                                          \
		ok((call) == -1 && e.code == EXIT_REFUSED && strstr(e.text, words), "%s", e.text); \
	} while (0)
	REFUSED(json_str(o, "o", "i", &s, &e), "o: 'i' must be a string, not an integer");
	REFUSED(json_str(o, "o", "n", &s, &e), "'n' is missing");
	REFUSED(json_str(NULL, "o", "n", &s, &e), "'n' is missing");
	REFUSED(json_int(o, "o", "absent", &i, &e), "'absent' is missing");
	REFUSED(json_int(o, "o", "r", &i, &e), "an integer, not a number with a fraction");
	REFUSED(json_int(o, "o", "b", &i, &e), "an integer, not a boolean");
	REFUSED(json_int(o, "o", "big", &i, &e), "too large");
	REFUSED(json_int_or(o, "o", "s", 0, &i, &e), "an integer, not a string");
	REFUSED(json_real_or(o, "o", "s", 0, &d, &e), "a number, not a string");
	REFUSED(json_bool_or(o, "o", "i", false, &b, &e), "true or false, not an integer");
	json_decref(o);
}

static void test_places(void)
{
	static const struct {
		const char *s, *words;
	} t[] = {
		{ "{\n  \"a\": 1,\n  \"a\": 2\n}", "line 3, column" },
		{ "[1, 2", "line 1" },
		{ "{} {}", "end of file expected" },
		{ "\"\xff\"", "0xff" },
		{ "\"\\u0000\"", "u0000" },
		{ "", "not valid JSON" },
	};
	struct err e = ERR_INIT;
	size_t i;

	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		e = (struct err)ERR_INIT;
		ok(!json_parse(t[i].s, strlen(t[i].s), "x.json", &e) && e.code == EXIT_REFUSED &&
			   strstr(e.text, t[i].words) && strstr(e.text, "x.json"),
		   "%s", e.text);
	}
	e = (struct err)ERR_INIT;
	ok(!json_read("/nonexistent", 9, &e) && e.code == EXIT_REFUSED, "%s", e.text);
}

static void test_spelling(void)
{
	json_t *v = parse(
		"{\"b\":[1,-0.0,1e-06,true,null],\"a\":\"\xc3\xa9\xf0\x9f\x98\x80\\u007f/\","
		"\"e\":{},\"l\":[]}");
	struct text t = TEXT_INIT;

	json_python(&t, v, 2, true);
	is_str(t.s,
	       "{\n  \"a\": \"\\u00e9\\ud83d\\ude00\\u007f/\",\n  \"b\": [\n    1,\n    -0.0,\n"
	       "    1e-06,\n    true,\n    null\n  ],\n"
	       "  \"e\": {},\n  \"l\": []\n}",
	       "json.dump(indent=2, sort_keys=True)");
	text_clear(&t);
	json_python(&t, v, -1, false);
	is_str(t.s,
	       "{\"b\": [1, -0.0, 1e-06, true, null], \"a\": \"\\u00e9\\ud83d\\ude00\\u007f/\", "
	       "\"e\": {}, \"l\": []}",
	       "json.dumps");
	text_clear(&t);
	json_line(&t, v);
	is_str(t.s,
	       "{\"b\":[1,-0.0,1e-06,true,null],\"a\":\"\xc3\xa9\xf0\x9f\x98\x80\x7f/\","
	       "\"e\":{},\"l\":[]}",
	       "a line");
	text_clear(&t);
	json_python_repr(&t, v);
	is_str(t.s,
	       "{'b': [1, -0.0, 1e-06, True, None], 'a': '\xc3\xa9\xf0\x9f\x98\x80\\x7f/', "
	       "'e': {}, 'l': []}",
	       "repr");
	json_decref(v);
	v = parse("[\"it's\", \"\\\"\", \"'\\\"\", \"\\u200b\\n\"]");
	text_clear(&t);
	json_python_repr(&t, v);
	is_str(t.s, "[\"it's\", '\"', '\\'\"', '\\u200b\\n']", "quotes of repr");
	json_decref(v);
	text_release(&t);
}

static void test_run(void)
{
	static const char good[] =
		"{\"record\":\"plan\",\"n\":1}\n{\"record\":\"range\",\"rank\":0}\n"
		"{\"record\":\"range\",\"rank\":1}\n"
		"{\"record\":\"plan\",\"n\":2}";
	static const struct {
		const char *s, *words;
	} bad[] = {
		{ "{\"record\":\"a\"}\n\n", "line 2" },
		{ "{\"record\":\"a\"}\nx\n", "line 2" },
		{ "[]\n", "line 1" },
		{ "{}\n", "line 1" },
		{ "{\"record\":1}\n", "line 1" },
		{ "{\"record\":\"a\"} {\"record\":\"a\"}\n", "line 1" },
		{ "{\"record\":\"a\"\n}\n", "line 1" },
	};
	char copy[] = "/tmp/dspark-run.XXXXXX";
	struct text t = TEXT_INIT;
	struct err e = ERR_INIT;
	struct run r, zero = { 0 };
	size_t at = 0, i;
	FILE *f;

	ok(!run_parse(&r, good, strlen(good), "run", &e) && r.n == 4,
	   "four records, the last without its newline");
	is_int(json_integer_value(json_object_get(run_next(&r, "range", &at), "rank")), 0,
	       "the first range");
	is_int(json_integer_value(json_object_get(run_next(&r, "range", &at), "rank")), 1,
	       "the next");
	ok(!run_next(&r, "range", &at), "no more");
	is_int(json_integer_value(json_object_get(run_last(&r, "plan"), "n")), 2, "the last plan");
	ok(!run_last(&r, "stage"), "no stage");
	close(mkstemp(copy));
	f = fopen(copy, "w");
	ok(!run_copy(f, &r, &e) && !record_write(f, r.record[0], &e) && !fclose(f),
	   "copied, and one more");
	ok(!file_read_all(copy, 1000, &t, &e) && !strncmp(t.s, good, strlen(good)) &&
		   !strcmp(t.s + strlen(good), "\n{\"record\":\"plan\",\"n\":1}\n"),
	   "as they were");
	run_release(&r);
	run_release(&zero);
	ok(!run_read(&r, copy, &e) && r.n == 5, "read from a file");
	is_str(r.name, copy, "which names it");
	run_release(&r);
	ok(!run_parse(&r, "", 0, "run", &e) && r.n == 0, "an empty run");
	run_release(&r);
	for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
		e = (struct err)ERR_INIT;
		ok(run_parse(&r, bad[i].s, strlen(bad[i].s), "run", &e) == -1 &&
			   e.code == EXIT_REFUSED && strstr(e.text, bad[i].words),
		   "%s", e.text);
		run_release(&r);
	}
	e = (struct err)ERR_INIT;
	ok(run_read(&r, "/nonexistent", &e) && e.code == EXIT_REFUSED, "%s", e.text);
	e = (struct err)ERR_INIT;
	f = fopen("/dev/full", "w");
	if (f) {
		json_t *rec = parse("{\"record\":\"x\"}");

		ok(record_write(f, rec, &e) && e.code == EXIT_FAILED && strstr(e.text, "No space"),
		   "%s", e.text);
		json_decref(rec);
		fclose(f);
	}
	unlink(copy);
	text_release(&t);
}

/* Value as json_line, or the words of its refusal behind "!". */
static void test_yaml(void)
{
	static const struct {
		const char *s, *want;
	} t[] = {
		{ "", "null" },
		{ "a: 12\nb: [0x10, 010, 1_000, 0b11, 1:30]", "{\"a\":12,\"b\":[16,8,1000,3,90]}" },
		{ "a: 1e-3\nb: 1.0e-3\nc: .5\nd: 1.",
		  "{\"a\":\"1e-3\",\"b\":0.001,\"c\":0.5,\"d\":1.0}" },
		{ "[yes, No, ON, off, y, True, FALSE]",
		  "[true,false,true,false,\"y\",true,false]" },
		{ "a:\nb: ~\nc: null\nd: ''\n", "{\"a\":null,\"b\":null,\"c\":null,\"d\":\"\"}" },
		{ "a: 2024-01-02", "{\"a\":\"2024-01-02\"}" },
		{ "1: a\nyes: b\n~: c", "{\"1\":\"a\",\"yes\":\"b\",\"~\":\"c\"}" },
		{ "a: 1\nb: 2\na: 3", "{\"a\":3,\"b\":2}" },
		{ "x: &x {p: 1, q: 2}\ny: {q: 3, <<: *x}",
		  "{\"x\":{\"p\":1,\"q\":2},\"y\":{\"p\":1,\"q\":3}}" },
		{ "a: [1\nb: 2", "!line 2" },
		{ "a: 1\n  b: 2", "!line 2" },
		{ "a: *x", "!line 1, column 4: the alias names no anchor" },
		{ "a: &x [*x]", "!inside its own anchor" },
		{ "--- 1\n--- 2", "!more than one document" },
		{ "a: !foo 1", "!tag '!foo'" },
		{ "a: .inf", "!line 1, column 4: '.inf' is not a finite number" },
		{ "a: 9223372036854775808", "!64 bits" },
		{ "a: =", "!in quotes" },
		{ "{[a]: b}", "!key must be a scalar" },
		{ "a: \"\\0\"", "!NUL" },
		{ "a: \xff", "!byte 3" },
		{ "a: b\tc: d", "!" },
		{ "\ta: b", "!line 1" },
	};
	struct text out = TEXT_INIT;
	struct err e = ERR_INIT;
	size_t i;

	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		json_t *v;

		e = (struct err)ERR_INIT;
		v = yaml_parse(t[i].s, strlen(t[i].s), "x.yaml", &e);
		text_clear(&out);
		if (v)
			json_line(&out, v);
		json_decref(v);
		if (t[i].want[0] == '!')
			ok(!v && e.code == EXIT_REFUSED && strstr(e.text, t[i].want + 1) &&
				   strstr(e.text, "x.yaml"),
			   "%s", e.text);
		else
			is_str(out.s, t[i].want, "yaml %zu", i);
	}
	e = (struct err)ERR_INIT;
	ok(!yaml_read("/nonexistent", &e) && e.code == EXIT_REFUSED, "%s", e.text);
	text_release(&out);
}

int main(void)
{
	test_members();
	test_places();
	test_spelling();
	test_run();
	test_yaml();
	return tap_end();
}
