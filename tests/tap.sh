# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# tap: what the shell tests share. Source it first; done_testing comes last.
#
#	pass NAME			ok
#	fail NAME [FILE]		not ok, with FILE as diagnostics
#	skip NAME REASON		ok, counted as skipped
#	check NAME COMMAND...		runs COMMAND, pass or fail by its exit status
#	threads N			N, or DSPARK_TEST_THREADS where that is smaller
#	$tmp				a scratch directory, removed at the end
#
# The Makefile gives PATH (the built commands first), top_srcdir, top_builddir, PYTHON, MPIEXEC, GOLDEN.
set -u
LC_ALL=C
export LC_ALL
: "${PYTHON:=:}" "${MPIEXEC:=}" "${GOLDEN:=}"
tap_n=0
tap_failed=0
tmp=$(mktemp -d "${TMPDIR:-/tmp}/dspark-test.XXXXXX") || exit 99
trap 'rm -rf "$tmp"' EXIT
trap 'exit 99' HUP INT TERM

threads() {
	if [ "${DSPARK_TEST_THREADS:-$1}" -lt "$1" ]; then echo "$DSPARK_TEST_THREADS"; else echo "$1"; fi
}

pass() {
	tap_n=$((tap_n + 1))
	echo "ok $tap_n - $1"
}

fail() {
	tap_n=$((tap_n + 1))
	tap_failed=$((tap_failed + 1))
	echo "not ok $tap_n - $1"
	if [ -n "${2-}" ]; then sed 's/^/# /' "$2"; fi
}

skip() {
	tap_n=$((tap_n + 1))
	echo "ok $tap_n - $1 # SKIP $2"
}

check() {
	tap_name=$1
	shift
	if "$@" >"$tmp/tap.out" 2>&1; then
		pass "$tap_name"
	else
		echo "exit status $?: $*" >>"$tmp/tap.out"
		fail "$tap_name" "$tmp/tap.out"
	fi
}

# Whether $PYTHON has the named modules. With DSPARK_TEST_PYTHON=required a missing one is a failure, not a skip.
python_has() {
	"$PYTHON" -c "import $1" 2>/dev/null && [ "$PYTHON" != : ]
}

need_python() {
	if python_has "$2"; then return 0; fi
	if [ "${DSPARK_TEST_PYTHON-}" = required ]; then
		echo "$PYTHON cannot import $2" >"$tmp/tap.out"
		fail "$1" "$tmp/tap.out"
	else
		skip "$1" "Python has no $2"
	fi
	return 1
}

done_testing() {
	echo "1..$tap_n"
	[ "$tap_failed" -eq 0 ]
	exit
}
