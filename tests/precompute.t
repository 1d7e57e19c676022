#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dspark-precompute: which commands run in which order, what is kept, exit codes. The commands are stand-ins that log their
# arguments and fail when told to; the whole pipeline with the real ones is pipeline.t's.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

bin=$tmp/bin
mkdir -p "$bin" "$tmp/run/model" "$tmp/run/data dir"
cp "$top_srcdir/tools/dspark-precompute.sh" "$bin/dspark-precompute"
chmod +x "$bin/dspark-precompute"

# shellcheck disable=SC2016
stand_in() {
	{
		echo '#!/bin/sh'
		echo 'name=${0##*/}'
		echo 'printf "%s" "$name" >>"$LOG"'
		echo 'for a; do printf " [%s]" "$a" >>"$LOG"; done; echo >>"$LOG"'
		echo 'if [ "${FAIL-}" = "$name" ]; then exit "$STATUS"; fi'
		cat
	} >"$bin/dspark-$1"
	chmod +x "$bin/dspark-$1"
}

stand_in plan <<'END'
cat <<'J'
{"record":"plan","version":1,"target":"model","identity":{"manifest":{"train_data_path":"['no', 'such']"}},"recipe":{"dist_env":{},"distributed":{},"recipe_args":{"chat_template":"{% x \"train_data_path\":\"trap\" }}","train_data_path":["rows.jsonl","data dir","quo\"te","org/hub"]}}}
{"record":"host","target_dir":null}
J
END
stand_in tokenize <<'END'
while [ "$1" != -o ]; do shift; done
echo tokens >"$2"
END
stand_in load <<'END'
echo '{"record":"stage"}'
END
stand_in forward <<'END'
echo '{"record":"summary"}'
if [ -n "${SLOW-}" ]; then
	trap 'echo stopped >>"$LOG"; exit 3' TERM
	while :; do sleep 0.1; done
fi
END
stand_in manifest <<'END'
cat >>"$LOG"
echo '{"record":"manifest"}'
END
# A launcher of three ranks, of which the first one writes.
stand_in launch <<'END'
"$@"
for i in 1 2; do "$@" >"${TMPDIR:-/tmp}/$$"; case $1 in sh) cat "${TMPDIR:-/tmp}/$$" ;; esac; done
rm -f "${TMPDIR:-/tmp}/$$"
END

cd "$tmp/run" || exit 99
LOG=$tmp/log TMPDIR=$tmp
export LOG TMPDIR
: >model/tokenizer.json
: >rows.jsonl
: >'data dir/a.parquet'
: >'quo"te'
echo x >r.yaml
find . -exec touch -t 202001010000 {} +

pre() {
	: >"$LOG"
	"$bin/dspark-precompute" "$@" >"$tmp/out" 2>"$tmp/err"
	status=$?
	cat "$tmp/err" >>"$tmp/err.all"
	sed 's/ .*//; s/^{.*//; /^$/d' "$LOG" | tr '\n' ' ' >"$tmp/ran"
	ran=$(cat "$tmp/ran")
}

# expect NAME STATUS COMMANDS
expect() {
	if [ "$status" -eq "$2" ] && [ "$ran" = "$3" ]; then
		pass "$1"
	else
		{ echo "status $status, want $2"; echo "ran  $ran"; echo "want $3"; cat "$tmp/err"; } >"$tmp/why"
		fail "$1" "$tmp/why"
	fi
}

has() {
	if grep -qF -e "$2" "$3"; then pass "$1"; else fail "$1" "$3"; fi
}

all="dspark-plan dspark-tokenize dspark-plan dspark-load dspark-forward dspark-manifest "
kept="dspark-plan dspark-plan dspark-load dspark-forward dspark-manifest "

pre -c r.yaml --set 'recipe_args.x=a  b' --recipe_args.y "it's" --recipe_args.z --recipe_args.w=1
expect "the five commands" 0 "$all"
has "overrides reach the tokenizer" "dspark-tokenize [-c] [r.yaml] [--set] [recipe_args.x=a  b] [--set] [recipe_args.y=it's] [--set] [recipe_args.z=True] [--set] [recipe_args.w=1] [-o] [./r.work/tokens.safetensors]" "$LOG"
has "the plan is for the tokens" "[recipe_args.w=1] [-t] [./r.work/tokens.safetensors]" "$LOG"
has "forward reads a file" "dspark-forward [./r.work/run]" "$LOG"
has "merge reads the log" '{"record":"summary"}' "$LOG"
has "merge's record is the output" '{"record":"manifest"}' "$tmp/out"
check "files are there" test -s r.work/plan -a -s r.work/run -a -s r.work/log
check "no temporaries stay" sh -c '! ls r.work/*.new 2>/dev/null'

set -- --set 'recipe_args.x=a  b' --recipe_args.y "it's" --recipe_args.z --recipe_args.w=1
pre -c r.yaml "$@"
expect "again: tokens are kept" 0 "$kept"
pre -c r.yaml "$@" --set recipe_args.cache_output_dir=elsewhere --set distributed.ep_size=2
expect "another place for the cache: tokens are kept" 0 "$kept"
pre -c r.yaml "$@" --set recipe_args.seq_length=5
expect "another override: tokens are made again" 0 "$all"
pre -c r.yaml
expect "without overrides: tokens are made again" 0 "$all"

for file in r.yaml rows.jsonl 'data dir/a.parquet' 'quo"te' model/tokenizer.json; do
	touch -t 203001010000 "$file"
	pre -c r.yaml
	expect "newer $file: tokens are made again" 0 "$all"
	touch -t 202001010000 "$file"
done

sed 's|"target_dir":null|"target_dir":"model dir"|' "$bin/dspark-plan" >"$tmp/plan" && cat "$tmp/plan" >"$bin/dspark-plan"
mkdir "model dir"
echo >"model dir/vocab.json"
touch -t 203001010000 "model dir/vocab.json"
pre -c r.yaml
expect "newer tokenizer where the target's name stands for a directory" 0 "$all"
touch -t 202001010000 "model dir/vocab.json"

rm r.work/tokens.from
touch -t 203001010000 rows.jsonl
pre -c r.yaml
expect "tokens that were put there stay" 0 "dspark-plan dspark-load dspark-forward dspark-manifest "
touch -t 202001010000 rows.jsonl

pre -c r.yaml -w "other dir" -- dspark-launch a b
expect "a launcher that starts nothing is found before the plan" 3 "dspark-plan dspark-tokenize dspark-launch "
pre -c r.yaml -w"other dir" -- dspark-launch
expect "a launcher's ranks are counted" 0 "dspark-plan dspark-launch dspark-plan dspark-load dspark-launch dspark-forward dspark-forward dspark-forward dspark-manifest "
has "the plan is for its ranks" "[-t] [./other dir/tokens.safetensors] [--world] [3]" "$LOG"

for name in plan tokenize load forward manifest; do
	for code in 1 2 3; do
		rm -rf r.work
		FAIL=dspark-$name STATUS=$code
		export FAIL STATUS
		pre --config=r.yaml
		if [ "$status" -eq "$code" ] && [ "${ran##*dspark-}" = "$name " ]; then
			pass "dspark-$name's exit status $code is passed on"
		else
			echo "status $status, ran $ran" >"$tmp/why"
			fail "dspark-$name's exit status $code is passed on" "$tmp/why"
		fi
	done
done
STATUS=77
pre -c r.yaml
expect "any other exit status is 3" 3 "$kept"
unset FAIL STATUS

pre -c r.yaml -n --set "a.b=c d" -- mpirun -n 4
expect "a dry run runs nothing" 0 ""
has "and prints what would run" "mpirun -n 4 dspark-forward ./r.work/run >./r.work/log" "$tmp/out"
has "as the shell reads it" "--set 'a.b=c d'" "$tmp/out"
rm -rf fresh.work
pre -c fresh.yaml --dry-run
check "and makes no directory" test ! -e fresh.work
pre -c r.yaml -v
has "-v is passed on" "dspark-load [-v]" "$LOG"
pre -q -c r.yaml
has "-q is passed on" "dspark-load [-q]" "$LOG"

for bad in "" "-c" "-c r.yaml extra" "-c r.yaml --foo" "-c r.yaml --foo=1" "-c r.yaml -w" "-c r.yaml --set" "-z"; do
	# shellcheck disable=SC2086
	pre $bad
	expect "usage error: '$bad'" 2 ""
done

SLOW=1 "$bin/dspark-precompute" -c r.yaml >"$tmp/out" 2>"$tmp/err" &
child=$!
n=0
: >"$LOG"
until grep -q dspark-forward "$LOG" || [ $n -gt 100 ]; do
	sleep 0.1
	n=$((n + 1))
done
sleep 0.3
kill -TERM $child
wait $child
status=$?
ran=$(tail -n 1 "$LOG")
expect "SIGTERM stops the running command, then itself" 3 "stopped"
check "and leaves no temporary" sh -c '! ls r.work/*.new 2>/dev/null'
done_testing
