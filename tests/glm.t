#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Random tiny GLM-5 targets against their mathematics in float64. TRIALS=N of them with SEED=N; hundreds by hand: oracle/glm_fuzz.py.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

: "${TRIALS:=8}" "${SEED:=1}"
need_python "random GLM targets" numpy,xxhash || done_testing
"$PYTHON" "$top_srcdir/tests/oracle/glm_fuzz.py" --seed "$SEED" --count "$TRIALS" -j "$(threads 2)" >"$tmp/lines" 2>"$tmp/err"
status=$?
while read -r verdict line; do
	case $verdict in
	ok | refused) pass "$verdict $line" ;;
	FAIL) fail "$line" "$tmp/err" ;;
	esac
done <"$tmp/lines"
check "all of $TRIALS targets agree" [ "$status" -eq 0 ]
done_testing
