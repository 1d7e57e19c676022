#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What hostile input and surroundings may do: every refusal is one message with the right exit status, nothing hangs, crashes or
# leaves a temporary, a partial file or a plan behind.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

example=$(cd "$top_srcdir/examples/quickstart" && pwd)
mkdir "$tmp/w"
cp -R "$example/model" "$example/recipe.yaml" "$example/tokens.safetensors" "$tmp/w"
chmod -R u+w "$tmp/w"
cd "$tmp/w" || exit 99
OMP_NUM_THREADS=1
export OMP_NUM_THREADS
limited=$(command -v timeout) && limited="$limited 30"

plan() {
	dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cpu "$@"
}

# expect CODE TEXT COMMAND...: exit status, TEXT in the one message, no output of a refused command, no temporaries
expect() {
	code=$1 text=$2
	shift 2
	"$@" >"$tmp/out" 2>"$tmp/err"
	status=$?
	cat "$tmp/err"
	if [ "$status" -ne "$code" ]; then
		echo "exit $status, not $code: $*"
		return 1
	fi
	grep -q -e "$text" "$tmp/err" || return 1
	[ "$(grep -c '^dspark-' "$tmp/err")" -eq 1 ] || return 1
	! find "$tmp/w" -name '.*.tmp.*' | grep .
}

# refuses NAME TEXT COMMAND...
refuses() {
	name=$1
	shift
	check "$name" expect 1 "$@"
}

# ---- config.json ------------------------------------------------------------------------------------------------------------
cp model/config.json config.whole

# config NAME SED TEXT: a plan over config.json after SED
config() {
	sed "$2" config.whole >model/config.json
	refuses "config.json: $1" "$3" plan
}
for size in 0 -1 2147483648 4611686018427387904 1.5 '"x"' null '[]' 1e300; do
	for key in hidden_size vocab_size num_hidden_layers num_attention_heads; do
		config "$key $size" "s/\"$key\": [0-9]*/\"$key\": $size/" "$key"
	done
done
config "a billion layers" 's/"num_hidden_layers": 6/"num_hidden_layers": 1000000000/' num_hidden_layers
config "heads a billion wide" 's/"head_dim": 32/"head_dim": 1000000000/' head_dim
config "heads of odd width" 's/"head_dim": 32/"head_dim": 31/' head_dim
config "a negative epsilon" 's/1e-06/-1/' rms_norm_eps
config "an epsilon too large" 's/1e-06/1e300/' rms_norm_eps
config "a number out of range" 's/1e-06/1e400/' config.json
config "NaN" 's/1e-06/NaN/' config.json
for value in '"x"' true '[1]' 7; do
	config "rope_scaling $value" "s/\"rope_scaling\": null/\"rope_scaling\": $value/" rope_scaling
done
config "no model_type" '/model_type/d' model_type
config "an unknown model_type" 's/"qwen3"/"llama"/' "'llama'"
config "MiniMax M3" 's/"qwen3"/"minimax_m3_vl"/' text-only
config "broken" 's/{/[/' config.json
config "a key twice" 's/"hidden_size": 64/"hidden_size": 64, "hidden_size": 64/' duplicate
: >model/config.json
refuses "config.json: empty" config.json plan
awk 'BEGIN { for (i = 0; i < 100000; i++) printf "[" }' >model/config.json
refuses "config.json: 100,000 brackets" depth plan
rm model/config.json
mkfifo model/config.json
# shellcheck disable=SC2086 # words
check "config.json: a FIFO" expect 1 "not a regular file" $limited dspark-plan -c recipe.yaml -t tokens.safetensors
rm model/config.json
cp config.whole model/config.json

# What a file says cannot steer the terminal, nor pose as a message.
steer() {
	printf '{"model_type": "a\\u001b[31mb\\ndspark-plan: fine"}' >model/config.json
	expect 1 'a\\x1b' plan || return
	LC_ALL=C grep "$(printf '\033')" "$tmp/err" && return 1
	[ "$(grep -c '^dspark-plan: ' "$tmp/err")" -eq 1 ]
}
check "control characters are shown, not sent" steer
cp config.whole model/config.json

# ---- safetensors ---------------------------------------------------------------------------------------------------------------
# cuts FILE: refused wherever it is cut
cuts() {
	cp "$1" whole
	size=$(wc -c <whole)
	for n in 0 1 7 8 9 300 $((size / 2)) $((size - 1)); do
		head -c "$n" whole >"$1"
		refuses "$1 cut at $n" "$1" plan
	done
	{ cat whole; printf x; } >"$1"
	refuses "$1 with one byte more" "$1" plan
	{ printf '\377\377\377\377\377\377\377\377'; tail -c +9 whole; } >"$1"
	refuses "$1 with a header of 2^64 - 1 bytes" 'over 100 MB' plan
	{ printf '\000\341\365\005\000\000\000\000'; tail -c +9 whole; } >"$1"
	refuses "$1 with a header of 100 MB" 'cut short' plan
	rm "$1"
	for kind in /dev/zero /dev/full . "$(basename "$1")"; do
		ln -s "$kind" "$1"
		refuses "$1 is a link to $kind" "$1" plan
		rm "$1"
	done
	mkfifo "$1"
	# shellcheck disable=SC2086 # words
	check "$1 is a FIFO" expect 1 'not a regular file' $limited dspark-plan -c recipe.yaml -t tokens.safetensors
	rm "$1"
	cp whole "$1"
}
cuts tokens.safetensors
cuts model/model.safetensors

# ---- recipes --------------------------------------------------------------------------------------------------------------------
cp recipe.yaml recipe.whole

# recipe NAME TEXT: refuses what was written to recipe.yaml. Behind a pipe it would count in a subshell.
recipe() {
	refuses "recipe: $1" "$2" plan
}
: >recipe.yaml
recipe empty 'not a recipe'
echo '- a' >recipe.yaml
recipe "a list" 'not a recipe'
printf 'recipe_args: {a: \000}\n' >recipe.yaml
recipe "a NUL byte" 'control characters'
printf 'recipe_args: {a: "\377"}\n' >recipe.yaml
recipe "invalid UTF-8" 'UTF-8'
printf 'recipe_args:\n\tseq_length: 1\n' >recipe.yaml
recipe "a tab" 'line 2'
printf 'a: &a [*a]\n' >recipe.yaml
recipe "an alias in its own anchor" 'anchor'
awk 'BEGIN { print "a0: &a0 [x,x,x,x,x,x,x,x,x,x]"
	for (i = 1; i < 12; i++) { a = "*a" (i - 1); print "a" i ": &a" i " [" a "," a "," a "," a "," a "," a "," a "," a "]" } }' >recipe.yaml
recipe "an alias bomb" 'aliases expand'
awk 'BEGIN { for (i = 0; i < 20000; i++) printf "[" }' >recipe.yaml
recipe "20,000 brackets" 'nested too deeply'
{ cat recipe.whole; echo '---'; } >recipe.yaml
recipe "two documents" 'more than one document'
# shellcheck disable=SC2016 # dspark expands it
sed 's/rows.jsonl/$DSPARK_UNSET/' recipe.whole >recipe.yaml
recipe "an unset variable" 'DSPARK_UNSET'
cp recipe.whole recipe.yaml
for key in ep_size cp_size dp_replicate_size; do
	for size in 4294967296 4294967297 9223372036854775807 -1; do
		refuses "$key $size" "$key" plan --set "distributed.$key=$size"
	done
done
for key in seq_length micro_batch_size cache_shard_size; do
	for size in 0 -1 1.5 x 99999999999999999999; do refuses "$key $size" "$key\|64 bits" plan --set "recipe_args.$key=$size"; done
done
refuses "tp_size" tp_size plan --set distributed.tp_size=2
refuses "layer ids that fall" target_layer_ids plan --set 'recipe_args.target_layer_ids=[2, 1]'
refuses "layer ids beyond 32 bits" target_layer_ids plan --set 'recipe_args.target_layer_ids=[4294967297]'
refuses "cache_dtype" cache_dtype plan --set recipe_args.cache_dtype=int8
check "--memory 0" expect 2 memory plan --memory 0
check "--memory that overflows" expect 2 memory plan --memory 99999999T
check "--world 0" expect 2 world plan --world 0

# ---- cache_output_dir -------------------------------------------------------------------------------------------------------------
echo precious >file
refuses "a cache in a file" file plan --set recipe_args.cache_output_dir=file
refuses "a cache below a file" file plan --set recipe_args.cache_output_dir=file/x
ln -s loop loop
refuses "a cache in a loop of links" loop plan --set recipe_args.cache_output_dir=loop
check "the file is whole" grep -q precious file
odd_name() {
	plan --set "recipe_args.cache_output_dir=$1" | dspark-load -q -s stage | dspark-forward -q | dspark-manifest merge >merged &&
		dspark-manifest verify -- "$1"
}
check "a name with blank, quotes and newline" odd_name "a 'b\"
c"
check "a name that begins with a dash" odd_name ./-x
dspark-plan -q -c recipe.yaml -t tokens.safetensors --set recipe_args.cache_output_dir=dangling >p
ln -s nowhere/at/all dangling
check "a link to nothing" expect 3 'Not a directory' sh -c 'dspark-load -q -s stage p | dspark-forward -q'
for name in manifest.json dspark.json target_weights.safetensors shard-000000.safetensors; do
	rm -rf odd
	mkdir odd
	mkfifo "odd/$name"
	fifo() {
		# shellcheck disable=SC2086 # words
		plan --set recipe_args.cache_output_dir=odd >p && dspark-load -q -s stage p >r && $limited dspark-forward -q r
		status=$?
		[ "$status" -eq 1 ] || [ "$status" -eq 3 ] || return 1
		[ -p "odd/$name" ]
	}
	check "$name is a FIFO" fifo
done

# ---- a good cache and what surrounds it ---------------------------------------------------------------------------------------------
plan --set recipe_args.cache_output_dir=good >p
dspark-load -q -s stage p >run
check "a cache" sh -c 'dspark-forward -q run >log && dspark-manifest merge <log'
cp -R good keep

# A closed stream's number must not become a file's.
for command in 'dspark-plan -c recipe.yaml -t tokens.safetensors' 'dspark-load -s stage run' 'dspark-forward run' \
	'dspark-manifest merge good' 'dspark-manifest show good'; do
	check "stdout closed: ${command%% -*}" expect 3 'standard output' sh -c "$command -q >&-"
	check "stderr and stdin closed: ${command%% -*}" sh -c "$command >/dev/null <&- 2>&-"
done
closed() {
	rm -rf closed
	plan --set recipe_args.cache_output_dir=closed | dspark-load -q -s stage >r || return
	dspark-forward -v r <&- >&- 2>&-
	[ $? -eq 3 ] && dspark-manifest merge closed >&- 2>"$tmp/err"
	dspark-manifest merge closed >merged && diff -r good closed
}
check "all closed: what is written is the cache and nothing else" closed
check "the good cache is as it was" diff -r keep good
check "stdin closed: no run" expect 3 'standard input' sh -c 'dspark-forward <&-'
check "stdin a directory" expect 1 'standard input' sh -c 'dspark-load <.'

# RLIMIT_FSIZE: a signal by default
for blocks in 1 100 400; do
	limit() {
		rm -rf small small.stage
		plan --set recipe_args.cache_output_dir=small >p || return
		expect 3 'File too large' sh -c "ulimit -f $blocks; exec dspark-load -q -s small.stage --copy=$1 p" || return
		dspark-load -q -s stage p >r || return
		expect 3 'File too large' sh -c "ulimit -f $blocks; exec dspark-forward -q r"
	}
	check "file size limited to $blocks: raw" limit raw
	check "file size limited to $blocks: lz4" limit lz4
done
descriptors() {
	rm -rf few
	plan --set recipe_args.cache_output_dir=few | dspark-load -q -s stage >r || return
	expect 3 'Too many open files' sh -c 'ulimit -n 5; exec dspark-forward -q r' || return
	sh -c 'ulimit -n 16; exec dspark-forward -q --comm self r' >log && dspark-manifest merge few >merged && diff -r good few
}
check "few descriptors" descriptors

lost() {
	cp -R good lost && plan --set recipe_args.cache_output_dir=lost | dspark-load -q -s stage >r || return
	rm lost/shard-000002.safetensors lost/shard-000003.safetensors
	expect 1 'shards 2-3: run dspark-plan again' dspark-forward -q r || return
	plan --set recipe_args.cache_output_dir=lost | dspark-load -q -s stage | dspark-forward -q >log
	dspark-manifest merge lost >merged && diff -r good lost
}
check "shards that went after the plan was made" lost

# ---- runs -----------------------------------------------------------------------------------------------------------------------------
plan --set recipe_args.cache_output_dir=other >p
dspark-load -q -s stage p >run
bad_run() {
	refuses "a run with $1" "$2" dspark-forward -q r
}
sed 's/^{"record":"plan"/{"record":"plan","x":1/' run >r
bad_run "a changed plan" changed
{ cat run; cat run; } >r
bad_run "two plans" 'two plan'
{ cat run; echo junk; } >r
bad_run "a line of junk" 'not a record'
head -c 900 run >r
bad_run "half a plan" 'not a record'
tr l '\000' <run >r
bad_run "NUL bytes" 'not a record'
sed '/"record":"range"/d' run >r
bad_run "no range" 'range'
check "nothing was made" test ! -e other

# ---- weights --------------------------------------------------------------------------------------------------------------------------
nan() {
	header=$(od -An -tu8 -N8 model/model.safetensors | tr -d ' ')
	printf '\300\177' | dd of=model/model.safetensors bs=1 seek=$((8 + header)) conv=notrunc 2>dd.err
	plan --set recipe_args.cache_output_dir=nan | dspark-load -q -s nan.stage >r || return
	expect 1 "row 0 of the target's embeddings is not finite" dspark-forward -q r && [ ! -e nan/target_weights.safetensors ]
}
check "a NaN in a row of the embeddings that no token uses" nan

# ---- tokenizers -----------------------------------------------------------------------------------------------------------------------
# transformers makes an empty tokenizer, and says nothing, where the vocabulary is missing.
no_vocabulary() {
	rm model/tokenizer.json
	expect 1 'no vocabulary' dspark-tokenize -q -c recipe.yaml -o t "$example/rows.jsonl" && [ ! -e t ]
}
if need_python "a tokenizer without vocabulary" transformers; then
	check "a tokenizer without vocabulary" no_vocabulary
fi
done_testing
