#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dspark-load: the three forms give the same cache; records, places and refusals; what an interrupted copy leaves behind.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

top=$(cd "$top_srcdir" && pwd)
mkdir "$tmp/w"
cp -R "$top/tests/data/golden/qwen3moe-norm/model" "$top/tests/data/golden/qwen3moe-norm/recipe.yaml" \
	"$top/tests/data/golden/qwen3moe-norm/tokens.safetensors" "$tmp/w"
chmod -R u+w "$tmp/w"
cd "$tmp/w" || exit 99
OMP_NUM_THREADS=$(threads 2)
export OMP_NUM_THREADS

# plan OUT OPTION...: a plan that writes into OUT
plan() {
	out=$1
	shift
	dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cpu --set "recipe_args.cache_output_dir=$out" "$@"
}

# expect CODE TEXT COMMAND...: exit status and one sentence on stderr, nothing on stdout
expect() {
	code=$1 text=$2
	shift 2
	"$@" >"$tmp/out" 2>"$tmp/err"
	status=$?
	if [ "$status" -ne "$code" ]; then
		echo "exit $status, not $code: $*"
		cat "$tmp/err"
		return 1
	fi
	if [ -s "$tmp/out" ]; then
		echo "standard output is not empty:"
		cat "$tmp/out"
		return 1
	fi
	if ! grep -q -e "$text" "$tmp/err"; then
		echo "stderr does not say '$text':"
		cat "$tmp/err"
		return 1
	fi
}

# member NAME <RECORDS: a string or number of the last record
member() {
	tail -n 1 | sed -n "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/p"
}

# ---- the forms ----------------------------------------------------------------------------------------------------------
run_form() {
	form=$1
	shift
	plan "$form" >p1 && dspark-load -q -s "$form.stage" "$@" p1 >run && dspark-forward -q run >log &&
		dspark-manifest merge "$form" >manifest
}
check "by reference" run_form reference
check "--copy" run_form copy --copy
check "--copy=lz4" run_form lz4 --copy=lz4
check "a copy gives the same cache" diff -r reference copy
check "a packed copy gives the same cache" diff -r reference lz4
small_head() { [ "$(wc -c <copy.stage/stage.json)" -lt 1000 ]; }
check "the head is small" small_head

# ---- the record ---------------------------------------------------------------------------------------------------------
plan out >p1
dspark-load p1 >run
check "the run is copied" cmp -n "$(wc -c <p1)" p1 run
one_more() { [ "$(wc -l <run)" -eq "$(($(wc -l <p1) + 1))" ] && tail -n 1 run | grep -q '^{"record":"stage","path":"/'; }
check "one record more, with an absolute path" one_more
default_path() { [ "$(member path <run)" = "$tmp/w/out.stage" ] && [ -f out.stage/stage.json ]; }
check "the default lies beside the cache" default_path
elsewhere() {
	mkdir away && (cd away && dspark-load -q - <../p1 >run && cmp run ../run && dspark-load -q -s here ../p1 >run2 &&
		[ "$(member path <run2)" = "$tmp/w/away/here" ] && [ -f here/stage.json ] && [ ! -e out.stage ])
}
check "from elsewhere: the plan's paths start at the plan, -s here" elsewhere
same_again() { dspark-load p1 >run2 && cmp run run2; }
check "again: the same record" same_again
checkpoint_whole() { diff -r "$top/tests/data/golden/qwen3moe-norm/model" model; }
check "the checkpoint is as it was" checkpoint_whole
slash() { plan slash/ | dspark-load >r && [ "$(member path <r)" = "$tmp/w/slash.stage" ]; }
check "a slash behind cache_output_dir" slash
quiet() { dspark-load -q --copy -s quiet p1 2>&1 >r | cmp - /dev/null; }
check "-q says nothing" quiet
progress() { dspark-load --copy -s progress p1 2>&1 >r | grep -q '^dspark-load: .*bytes'; }
check "a copy shows its progress" progress

# ---- ranks --------------------------------------------------------------------------------------------------------------
plan out4 --world 4 >plan4
ranks() { dspark-load -q --copy -s four --ranks 0-1,3 plan4 >r && [ "$(member made <r)" = 1 ] && [ "$(ls four)" = "$(ls copy.stage)" ]; }
check "replicated ranks share one copy" ranks
other_world() { dspark-load -q --copy -s copy.stage plan4 >r && [ -z "$(find copy.stage -newer plan4 -name 'rank*')" ]; }
check "which serves every world" other_world
check "--ranks beyond the world" expect 2 "list of ranks from 0 to 3" dspark-load --ranks 2-4 plan4
for list in "" x 1- -1 3-1 1,,2 "1 2" 99999999999999999999; do
	check "--ranks '$list'" expect 2 "no list of ranks" dspark-load --ranks "$list" plan4
done
both() {
	dspark-load -q --copy -s both --ranks 0,1 plan4 >r1 &
	dspark-load -q --copy -s both --ranks 2,3 plan4 >r2
	wait $! && cmp r1 r2 && cmp both/rank-00000.safetensors four/rank-00000.safetensors
}
check "two at once in one directory" both

# ---- refusals -----------------------------------------------------------------------------------------------------------
check "two operands" expect 2 "unexpected operand" dspark-load p1 p1
check "--copy=zip" expect 2 "copy" dspark-load --copy=zip p1
check "-s ''" expect 2 "name of a directory" dspark-load -s "" p1
check "no such run" expect 1 "cannot open" dspark-load nothing
check "an empty run" expect 1 "no plan record" dspark-load /dev/null
tail -n 1 p1 >ranges
check "a run without plan" expect 1 "no plan record" dspark-load ranges
sed '$d' plan4 >short
check "fewer ranges than ranks" expect 1 "range" dspark-load short
sed 's/"stage_key":"./"stage_key":"x/' p1 >forged
check "a plan that was changed" expect 1 "plan" dspark-load forged
dspark-plan -q -c recipe.yaml --device cpu --set recipe_args.cache_output_dir=out >estimate
check "an estimate" expect 1 "estimate" dspark-load estimate
check "a stage in the checkpoint" expect 1 "would lie in the checkpoint" dspark-load -s model/stage p1
check "a stage in the cache" expect 1 "would lie in the cache" dspark-load -s out p1
check "a copy of another form" expect 1 "not 'lz4'" dspark-load --copy=lz4 -s copy.stage p1
no_room() { (ulimit -f 8 && exec dspark-load -q --copy -s "$1" p1); }
check "no room for a copy" expect 3 "cannot write '.*rank-00000" no_room tight
packs_instead() { dspark-load -q --copy=lz4 -s tight p1 >r && [ "$(member form <r)" = lz4 ]; }
check "leaves the directory to another form" packs_instead
check "again no room" expect 3 "cannot write '.*rank-00000" no_room tighter
refers_instead() { dspark-load -q -s tighter p1 >r && [ "$(member form <r)" = reference ]; }
check "and to a stage by reference" refers_instead
: >file
check "a file in the way" expect 3 "Not a directory" dspark-load -s file p1
full() { dspark-load p1 >/dev/full 2>"$tmp/err"; [ $? -eq 3 ] && grep -q "standard output" "$tmp/err"; }
if [ -w /dev/full ]; then check ">/dev/full" full; fi
# A directory that root may write, too
if [ -d /proc/self ]; then check "no directory can be made" expect 3 "/proc/self/stage" dspark-load -s /proc/self/stage p1; fi

printf '{"weight_map":{"model.norm.weight":"gone.safetensors"}}' >model/model.safetensors.index.json
check "a checkpoint without a file" expect 1 "gone.safetensors" dspark-load p1
cp "$top/tests/data/golden/qwen3moe-norm/model/model.safetensors.index.json" model
sed 's/^{/{ /' "$top/tests/data/golden/qwen3moe-norm/model/config.json" >model/config.json
check "a checkpoint that was changed since the plan" expect 1 "not the one that was planned" dspark-load p1
cp "$top/tests/data/golden/qwen3moe-norm/model/config.json" model
touch -d 2001-01-01 model/model-00001-of-00002.safetensors
check "a checkpoint that was touched since it was staged" expect 1 "changed since it was staged" dspark-forward run
restage() { dspark-load -q p1 >run && dspark-forward -q run >log; }
check "is staged again" restage
check "a stage that is gone" expect 1 "no stage.json" dspark-forward -s nowhere run

# ---- interrupted copies -------------------------------------------------------------------------------------------------
# One layer and a large vocabulary of zeros: 512 MiB that take no space here.
V=4194304 H=64
mkdir big && cat >big/config.json <<END
{"model_type": "qwen3", "vocab_size": $V, "hidden_size": $H, "intermediate_size": 64, "num_hidden_layers": 1,
 "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": true, "rms_norm_eps": 1e-6}
END
at=0 header=
tensor() {	# NAME SHAPE ELEMENTS
	header="$header${header:+,}\"$1\":{\"dtype\":\"BF16\",\"shape\":[$2],\"data_offsets\":[$at,$((at + 2 * $3))]}"
	at=$((at + 2 * $3))
}
for name in input_layernorm post_attention_layernorm self_attn.q_norm self_attn.k_norm; do tensor "model.layers.0.$name.weight" $H $H; done
for name in self_attn.q self_attn.k self_attn.v self_attn.o mlp.gate mlp.up mlp.down; do
	tensor "model.layers.0.${name}_proj.weight" $H,$H $((H * H))
done
tensor model.norm.weight $H $H
tensor model.embed_tokens.weight $V,$H $((V * H))
header="{$header}"
n=${#header}
{
	# the length as 8 bytes, little-endian
	i=0
	while [ $i -lt 8 ]; do
		# shellcheck disable=SC2059 # the format is the byte
		printf "\\$(printf %o $((n % 256)))"
		n=$((n / 256)) i=$((i + 1))
	done
	printf %s "$header"
} >big/model.safetensors
truncate -s "+$at" big/model.safetensors
plan bigout --set recipe_args.target_model_name_or_path=big --set "recipe_args.target_layer_ids=[0]" >bigplan

temporary() { find big.stage -name '.rank*.tmp.*' 2>/dev/null | grep -q .; }

# interrupt SIGNAL: starts a copy and sends it the signal while it writes; the exit status in $status
interrupt() {
	tries=0
	while [ "$tries" -lt 10 ]; do
		rm -rf big.stage
		dspark-load -q --copy -s big.stage bigplan >r 2>err &
		pid=$!
		until temporary; do
			kill -0 "$pid" 2>/dev/null || break
		done
		kill "-$1" "$pid" 2>/dev/null
		wait "$pid" 2>/dev/null
		status=$?
		if [ ! -e big.stage/rank-00000.safetensors ]; then return 0; fi
		tries=$((tries + 1))
	done
	echo "the copy was always faster"
	return 1
}

check "kill -9 while it copies" interrupt KILL
leaves() { temporary && [ ! -s r ]; }
check "leaves a temporary and no record" leaves
check "which is no stage" expect 1 "is not staged" dspark-forward -s big.stage bigplan
rerun() { dspark-load -q --copy -s big.stage bigplan >r && ! temporary && [ -s big.stage/rank-00000.safetensors ]; }
check "the same command goes on and sweeps" rerun
kept() {
	rm big.stage/index-00000.jsonl && touch -d 2001-01-01 big.stage/rank-00000.safetensors &&
		dspark-load -q --copy -s big.stage bigplan >r && [ -s big.stage/index-00000.jsonl ] &&
		[ -n "$(find big.stage/rank-00000.safetensors ! -newermt 2002-01-01)" ]
}
check "a whole copy is kept" kept
check "SIGTERM while it copies" interrupt TERM
cleans() { [ "$status" -eq 3 ] && ! temporary; }
check "exits with 3 and leaves no temporary" cleans
done_testing
