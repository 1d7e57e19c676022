#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Random tiny GLM-5 targets against their mathematics in float64, and such targets with a fault each, which are refused. TRIALS=N of
# them with SEED=N; hundreds by hand: oracle/glm_fuzz.py.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

: "${TRIALS:=8}" "${SEED:=1}"
need_python "random GLM targets" numpy,xxhash || done_testing
# agree NAME OPTION...
agree() {
	name=$1
	shift
	"$PYTHON" "$top_srcdir/tests/oracle/glm_fuzz.py" --seed "$SEED" -j "$(threads 2)" "$@" >"$tmp/lines" 2>"$tmp/err"
	status=$?
	while read -r verdict line; do
		case $verdict in
		ok | refused) pass "$verdict $line" ;;
		FAIL) fail "$line" "$tmp/err" ;;
		esac
	done <"$tmp/lines"
	check "$name" [ "$status" -eq 0 ]
}
agree "$TRIALS targets" --count "$TRIALS"
agree "targets with faults" --count 16 --faults
done_testing
