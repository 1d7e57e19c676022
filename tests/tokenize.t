#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dspark-tokenize as a command: vectors, output, refusals, exit codes, streams, signals. Rows against the reference: text.t.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

if ! need_python "dspark-tokenize" transformers,jinja2,yaml,numpy,xxhash; then done_testing; fi
if ! command -v dspark-tokenize >/dev/null; then
	skip "dspark-tokenize" "built without Python"
	done_testing
fi
case $top_srcdir in
/*) ;;
*) top_srcdir=$PWD/$top_srcdir ;;
esac
golden=$top_srcdir/tests/data/golden
mkdir "$tmp/work" "$tmp/work/wrong" || exit 99
cd "$tmp/work" || exit 99

# exits STATUS PATTERN ARGUMENT...	the status, no traceback, and PATTERN (of grep -E) among the messages
exits() {
	want=$1 pattern=$2
	shift 2
	have=0
	dspark-tokenize "$@" >out 2>err </dev/null || have=$?
	cat out err
	if [ "$have" -ne "$want" ]; then
		echo "exit $have, want $want"
		return 1
	fi
	if grep -q Traceback err; then return 1; fi
	if [ "$want" -eq 2 ]; then
		grep -q "^Try 'dspark-tokenize --help' for more information$" err || return 1
	fi
	grep -qE -e "$pattern" err
}

# ---- vectors

vectors() {
	"$PYTHON" "$top_srcdir/tests/tokenize/vectors.py" "$top_srcdir/tools/dspark-tokenize.py" "$1" "$2"
}
for kind in strings jinja shuffle; do
	check "vectors: $kind" vectors $kind "$golden/text-vectors"
done
sed 's/"permutation": \[0, 1\]/"permutation": [1, 0]/' "$golden/text-vectors/shuffle.jsonl" >wrong/shuffle.jsonl
wrong_vectors() { ! vectors shuffle wrong; }
check "vectors: a wrong one is seen" wrong_vectors

# ---- a small data set: two good rows

cp "$golden/e2e-qwen3-generation/model/tokenizer.json" "$golden/e2e-qwen3-generation/model/tokenizer_config.json" .
cat >good.jsonl <<'EOF'
{"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]}

{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}, {"role": "assistant", "content": "A longer answer, word by word."}]}
EOF
cat >r.yaml <<'EOF'
recipe_args:
  target_model_name_or_path: .
  train_data_path: good.jsonl
  seq_length: 64
  cache_output_dir: cache
EOF

header() { tail -c +9 t | head -c 4096 | grep -a -q "$1"; }
hidden() { find . -name '.?*'; }
no_hidden() { [ -z "$(hidden)" ]; }
aligned() { "$PYTHON" -c 'import struct; assert struct.unpack("<Q", open("t", "rb").read(8))[0] % 8 == 0'; }
check "good rows" exits 0 "^dspark-tokenize: t: 2 rows, [0-9]+ tokens, [0-9]+ supervised, 0 rows cut to 64$" -c r.yaml -o t
check "rows are counted" header '"num_rows":"2"'
check "the pad id" header '"pad_token_id":"1100"'
check "the data path" header '"train_data_path":"good.jsonl"'
check "no split" header '"train_split":"null"'
check "the tokenizer's digest" header '"tokenizer_xxh3_128":"[0-9a-f]\{32\}"'
check "data starts at a multiple of 8" aligned
check "no temporary is left" no_hidden
quiet() { dspark-tokenize -q -c r.yaml -o u 2>err && [ ! -s err ]; }
check "-q says nothing" quiet

# ---- streams and overrides

same() { cmp t u; }
from_stdin() { dspark-tokenize -q -c r.yaml -o u - <good.jsonl && same; }
check "rows on stdin" from_stdin
cp good.jsonl elsewhere.jsonl
from_operand() { dspark-tokenize -q -c r.yaml -o u elsewhere.jsonl && same; }
check "rows of an operand; the recipe's path is recorded" from_operand
mkfifo fifo
from_fifo() {
	cat good.jsonl >fifo &
	dspark-tokenize -q -c r.yaml -o u fifo && same
}
check "a pipe as operand holds JSON Lines" from_fifo
to_pipe() { dspark-tokenize -q -c r.yaml -o /dev/stdout | cat >u && same; }
check "a pipe as output" to_pipe
spellings() {
	dspark-tokenize -q -c r.yaml --set recipe_args.seq_length=5 -o a &&
		dspark-tokenize -q -c r.yaml --recipe_args.seq_length=5 -o b &&
		dspark-tokenize -q -c r.yaml --recipe_args.seq_length 5 -o c && cmp a b && cmp a c && ! cmp -s a t
}
check "three spellings of an override" spellings
check "rows longer than seq_length are cut and counted" exits 0 " 10 tokens, .* 2 rows cut to 5" -c r.yaml -o u --recipe_args.seq_length 5
check "seq_length 1" exits 0 " 2 tokens, 0 supervised" -c r.yaml -o u --recipe_args.seq_length 1
check "zero rows" exits 0 ": 0 rows, 0 tokens" -c r.yaml -o u -
# shellcheck disable=SC2016
sed 's/good\.jsonl/${DATA}.${SUFFIX,jsonl}/; s/: 64/: $SEQ/; s/path: \.$/path: ${oc.env:NOWHERE,.}/' r.yaml >env.yaml
variables() { DATA=good SEQ=64 dspark-tokenize -q -c env.yaml -o u && same; }
check "variables in a recipe" variables
check "an unset variable" exits 1 "environment variable 'DATA' is not set" -c env.yaml -o u
sed 's/cache_output_dir/cache_output_dri/' r.yaml >typo.yaml
check "an unknown key is a warning" exits 0 "unknown key 'recipe_args.cache_output_dri'; did you mean 'cache_output_dir'" -c typo.yaml -o u

# ---- many rows, many processes

"$PYTHON" - >many.jsonl <<'EOF'
import json
for i in range(700):
    turns = [{"role": role, "content": f"{role} {i} " * (1 + i * k % 7)} for k, role in enumerate(["user", "assistant"] * (1 + i % 3))]
    print(json.dumps({"messages": turns}))
EOF
jobs() {
	for n in 1 2 5; do
		dspark-tokenize -q -c r.yaml -j "$n" -o "many.$n" many.jsonl || return
	done
	cmp many.1 many.2 && cmp many.1 many.5
}
check "the same bytes for 1, 2, 5 jobs" jobs
check "--min-loss-tokens" exits 0 ": 1 rows, .* 1 rows under 8 supervised tokens dropped" -c r.yaml -o u --min-loss-tokens 8

# ---- invalid rows

cat good.jsonl >bad.jsonl
printf '{"messages": [\n{"messages": [{"role": "user", "content": "\351"}]}\n{"messages": [{"role": "user", "content": "a\342\200\250b"}]}\n' >>bad.jsonl
cat >>bad.jsonl <<'EOF'
{"messages": [{"role": "developer", "content": "x"}]}
[1]
{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}
EOF
listed() {
	exits 1 "6 of 9 rows are invalid" -c r.yaml -o bad bad.jsonl -j "$1" || return
	grep '^dspark-tokenize: bad\.jsonl' err | cut -d: -f3 | cut -d' ' -f1 | tr '\n' ' ' >lines
	[ "$(cat lines)" = "4 5 6 6 7 8 " ] && [ ! -e bad ]
}
check "every invalid row is listed by its line, nothing is written" listed 1
check "what is wrong: JSON" grep -q 'bad.jsonl:4: not valid JSON' err
check "what is wrong: UTF-8" grep -q 'bad.jsonl:5: not valid UTF-8: byte 0xe9' err
check "what is wrong: line separator" grep -q 'bad.jsonl:6 .*U+2028' err
check "what is wrong: role" grep -q "bad.jsonl:7: .*'developer'" err
check "--skip-invalid" exits 0 ": 3 rows, .* 6 invalid rows dropped" -c r.yaml -o u --skip-invalid bad.jsonl
printf '[{"messages": 1}, {"messages": [{"role": "user", "content": "x"}]}]' >list.json
check "a row of a JSON list is told by its number" exits 1 "list.json\[0\]: " -c r.yaml -o u list.json
printf '[{"messages": ]' >broken.json
check "broken JSON" exits 1 "'broken.json': not valid JSON: .* column 15" -c r.yaml -o u broken.json

# ---- --show

shows() {
	dspark-tokenize -c r.yaml --show 1 >out && head -n 1 out | grep -q "^row 1 (good.jsonl:3): [0-9]* tokens, [0-9]* supervised in 1 runs$" &&
		grep -q "^$(printf '\342\237\246')A longer answer, word by word\.<|im_end|>$" out && ! grep -q Two out
}
check "--show" shows
check "--show: no such row" exits 1 "no row 2: the data has 2 rows" -c r.yaml --show 2
check "--show: an invalid row" exits 1 "bad.jsonl:8: the row is a list" -c r.yaml --show 7 bad.jsonl
full() {
	have=0
	dspark-tokenize "$@" >/dev/full 2>err || have=$?
	cat err
	[ "$have" -eq 3 ] && grep -q "standard output: no space" err
}
check "--show into /dev/full" full -c r.yaml --show 0
check "--help into /dev/full" full --help
closed() {
	have=0
	dspark-tokenize "$@" >&- 2>err || have=$?
	cat err
	[ "$have" -eq 3 ] && grep -q "standard output" err && ! grep -q Traceback err
}
check "--show with stdout closed" closed -c r.yaml --show 0
check "--version with stdout closed" closed --version

# ---- usage

check "no recipe" exits 2 "a recipe is needed" -o u
check "no output" exits 2 "an output file is needed" -c r.yaml
check "an unknown option" exits 2 "nope" --nope
check "a missing argument" exits 2 "jobs" -c r.yaml --jobs
check "-j 0" exits 2 "at least 1, not '0'" -c r.yaml -o u -j 0
check "-j x" exits 2 "not 'x'" -c r.yaml -o u -jx
check "--show x" exits 2 "not 'x'" -c r.yaml --show x
check "--show and -o" exits 2 "no meaning with --show" -c r.yaml --show 1 -o u
check "two operands" exits 2 "one ROWS operand" -c r.yaml -o u good.jsonl good.jsonl
check "--set without =" exits 2 "KEY=VALUE" -c r.yaml -o u --set recipe_args.seq_length
check "an unknown key on the command line" exits 2 "did you mean 'seq_length'" -c r.yaml -o u --set recipe_args.seq_lenght=3
check "an unknown section on the command line" exits 2 "unknown recipe key 'recipe_arg.seq_length'" -c r.yaml -o u --recipe_arg.seq_length=3

# ---- refusals and failures

refuse() {
	name=$1 status=$2 pattern=$3
	shift 3
	check "$name" exits "$status" "$pattern" -c r.yaml -o refused "$@"
}
printf 'a: [' >broken.yaml
printf '\377' >bytes.yaml
printf '%s\n' '- 1' >list.yaml
check "no such recipe" exits 1 "'none.yaml': no such file" -c none.yaml -o refused
check "broken YAML" exits 1 "not valid YAML: .* line" -c broken.yaml -o refused
check "a recipe in no UTF-8" exits 1 "not valid UTF-8: byte 0xff" -c bytes.yaml -o refused
check "a recipe that is no mapping" exits 1 "no 'recipe_args'" -c list.yaml -o refused
for key in target_model_name_or_path train_data_path seq_length; do
	sed "/$key/d" r.yaml >without.yaml
	check "a recipe without $key" exits 1 "recipe_args.$key is missing" -c without.yaml -o refused
done
refuse "seq_length 0" 1 "at least 1, not 0" --recipe_args.seq_length 0
refuse "seq_length x" 1 "seq_length must be an integer" --recipe_args.seq_length x
refuse "a mask that is no flag" 1 "must be true or false, not 'maybe'" --recipe_args.mask_reasoning_content maybe
refuse "no such rows" 1 "'none.jsonl': no such file" none.jsonl
refuse "no such rows, as a path" 1 "'wrong/none.jsonl': no such file" wrong/none.jsonl
refuse "rows in an empty directory" 1 "'wrong': not JSON" wrong
refuse "no such target" 1 "neither a directory nor in the local" --recipe_args.target_model_name_or_path nobody/none
refuse "a target without a tokenizer" 1 "tokenizer cannot be loaded" --recipe_args.target_model_name_or_path wrong
refuse "a broken template" 1 "template is not valid" --recipe_args.chat_template '{% if %}'
refuse "a template that is a directory" 1 "chat template 'wrong'" --recipe_args.chat_template wrong
refuse "a template that renders nothing" 1 "no token at all" --recipe_args.chat_template '{{ "" }}'
check "no such directory for the output" exits 3 "cannot write 'none/t': no such file" -c r.yaml -o none/t
check "the output is a directory" exits 3 "cannot write 'wrong'" -c r.yaml -o wrong
check "the output is /dev/full" exits 3 "cannot write '/dev/full': no space" -c r.yaml -o /dev/full
mkdir locked
chmod 555 locked
if touch locked/x 2>/dev/null; then
	rm -f locked/x
	skip "a directory without permission" "this user may write everywhere"
else
	check "a directory without permission" exits 3 "cannot write 'locked/t': permission denied" -c r.yaml -o locked/t
fi
check "nothing was written by what was refused" test ! -e refused
no_hidden_either() { hidden && no_hidden; }
check "no temporary is left by what was refused" no_hidden_either

# ---- signals: a pipe that never ends keeps the program reading

# A run under nohup would hand its ignored SIGHUP down.
killed() {
	env --default-signal dspark-tokenize -c r.yaml -o killed -j "$2" - <fifo 2>err &
	child=$!
	exec 9>fifo
	cat many.jsonl >&9
	i=0
	while [ -z "$(find . -name '.killed.tmp.*')" ] && [ "$i" -lt 200 ]; do
		sleep 0.1
		i=$((i + 1))
	done
	sleep 1
	kill -"$1" "$child"
	(sleep 30 && kill -KILL "$child") 2>/dev/null &
	guard=$!
	have=0
	wait "$child" || have=$?
	kill "$guard"
	exec 9>&-
	cat err
	[ "$have" -eq 3 ] && grep -q "stopped by SIG$1" err && ! grep -q Traceback err && no_hidden && [ ! -e killed ]
}
check "SIGTERM" killed TERM 1
check "SIGTERM with workers" killed TERM 2
check "SIGHUP with workers" killed HUP 2
done_testing
