#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What --help says, what the parser takes and what the man page describes are the same options; SYNOPSIS and usage the same lines.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

# Options in a text of the form "-c, --config RECIPE": one a line, sorted.
words() {
	sed 's/--recipe_args[._A-Za-z]*//g' | grep -oE '(^|[][ (|=,])--?[A-Za-z][A-Za-z0-9-]*' | sed 's/^[^-]*//' | sort -u
}

# The options a program's own table has.
table_c() {
	grep -oE '\{ *"[a-z-]+", *(no|required|optional)_argument' "$1" | sed 's/^{ *"\([a-z-]*\)".*/--\1/'
	printf '%s\n' --help --version --quiet --verbose
}

table_py() {
	sed -n 's/^LONG = "\(.*\)"\.split()$/\1/p' "$1" | tr ' ' '\n' | sed 's/=$//; s/^/--/'
}

table_sh() {
	grep -oE '^[[:space:]]*(-[A-Za-z] *\| *)?--[a-z-]+(=\*)?( *\| *[-a-z=*]+)*\)' "$1" | grep -oE -e '--[a-z-]+'
}

# The options that the man page lists: .It Fl c , Fl -config Ar RECIPE
man_options() {
	sed -n 's/^\.It \(Fl .*\)/\1/p' "$1" | grep -oE 'Fl -?[A-Za-z][a-z-]*' | sed 's/^Fl /-/' | sort -u
}

# The SYNOPSIS as words, without the name-dependent layout.
synopsis() {
	mandoc -T ascii -O width=500 "$1" | sed "s/.$(printf '\b')//g" | sed -n '/^SYNOPSIS/,/^[A-Z]* *DESCRIPTION/p' | sed '1d;$d' | tr -s ' \n' '  ' | sed 's/^ //;s/ $//'
}

usage_lines() {
	sed -n '/^usage: /,/^$/p' "$1" | sed 's/^usage: //;s/^ *or: *//' | tr -s ' \n' '  ' | sed 's/^ //;s/ $//'
}

for command in tokenize plan load forward manifest precompute; do
	name=dspark-$command
	page=$top_srcdir/man/$name.1
	if ! command -v "$name" >/dev/null; then
		skip "$name" "not built"
		continue
	fi
	if ! "$name" --help >"$tmp/help" 2>"$tmp/err"; then
		cat "$tmp/help" >>"$tmp/err"
		fail "$name --help" "$tmp/err"
		continue
	fi
	pass "$name --help"

	words <"$tmp/help" | grep -e '^--' >"$tmp/usage"
	case $command in
	tokenize) table_py "$top_srcdir/tools/$name.py" ;;
	precompute) table_sh "$top_srcdir/tools/$name.sh" ;;
	*) table_c "$top_srcdir/tools/$name.c" ;;
	esac | sort -u >"$tmp/table"
	check "$name: usage and parser" diff "$tmp/usage" "$tmp/table"

	words <"$tmp/help" >"$tmp/usage"
	man_options "$page" >"$tmp/man"
	check "$name: usage and man page" diff "$tmp/usage" "$tmp/man"

	if command -v mandoc >/dev/null; then
		usage_lines "$tmp/help" | fold -s -w 80 >"$tmp/usage"
		synopsis "$page" | fold -s -w 80 >"$tmp/man"
		check "$name: usage and SYNOPSIS" diff "$tmp/usage" "$tmp/man"
	fi

	"$name" --version >"$tmp/version" 2>&1
	check "$name --version" grep -q "^$name (dspark) [0-9]" "$tmp/version"

	"$name" --no-such-option >"$tmp/out" 2>"$tmp/err" </dev/null
	status=$?
	if [ $status -eq 2 ] && [ ! -s "$tmp/out" ] && grep -q -e "--help" "$tmp/err"; then
		pass "$name: unknown option"
	else
		echo "exit status $status" >>"$tmp/err"
		fail "$name: unknown option" "$tmp/err"
	fi
	if [ -w /dev/full ]; then
		"$name" --help >/dev/full 2>"$tmp/err"
		status=$?
		if [ $status -eq 3 ] && [ -s "$tmp/err" ]; then
			pass "$name --help >/dev/full"
		else
			echo "exit status $status" >>"$tmp/err"
			fail "$name --help >/dev/full" "$tmp/err"
		fi
	fi
done
done_testing
