#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Man pages: mandoc finds nothing to warn about, each has the sections it owes, and its EXAMPLES run.
#
# In a literal block of EXAMPLES every line that starts with "$ " is a command (a trailing backslash continues it); those of one
# page run in order, in one fresh copy of examples/quickstart, and each must succeed. Blocks without "$ " are only shown.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

examples() {
	awk '
		/^\.Sh/ { on = $2 == "EXAMPLES"; next }
		!on { next }
		/^\.Bd -literal/ { lit = 1; next }
		/^\.Ed/ { lit = 0; next }
		!lit { next }
		more || sub(/^\$ /, "") { gsub(/\\e/, "\\"); gsub(/\\&/, ""); print; more = /(\\|\|)$/ }
	' "$1"
}

section() {
	grep -q "^\.Sh $2" "$1"
}

for page in "$top_srcdir"/man/*.[1-8]; do
	name=${page##*/}
	if command -v mandoc >/dev/null; then
		check "$name: mandoc" mandoc -T lint -W warning "$page"
	else
		skip "$name: mandoc" "mandoc is not here"
	fi
	check "$name: EXIT STATUS" section "$page" "EXIT STATUS"
	check "$name: EXAMPLES" section "$page" EXAMPLES
	if grep -n '.\{121\}' "$page" >"$tmp/long"; then fail "$name: lines of 120" "$tmp/long"; else pass "$name: lines of 120"; fi

	examples "$page" >"$tmp/cmds"
	if [ ! -s "$tmp/cmds" ]; then
		fail "$name: no example to run"
		continue
	fi
	if grep -q -E 'dspark-(tokenize|precompute)' "$tmp/cmds"; then
		if ! command -v dspark-tokenize >/dev/null; then
			skip "$name: examples" "built without Python"
			continue
		fi
		need_python "$name: examples" transformers,jinja2,yaml,numpy,xxhash || continue
	fi
	if grep -q mpirun "$tmp/cmds" && [ -z "$MPIEXEC" ]; then
		skip "$name: examples" "built without MPI"
		continue
	fi
	rm -rf "$tmp/run"
	cp -R "$top_srcdir/examples/quickstart" "$tmp/run"
	chmod -R u+w "$tmp/run"
	{ echo 'set -e'; cat "$tmp/cmds"; } >"$tmp/script"
	if (cd "$tmp/run" && sh -x "$tmp/script") >"$tmp/out" 2>&1 </dev/null; then
		pass "$name: examples"
	else
		fail "$name: examples" "$tmp/out"
	fi
done
done_testing
