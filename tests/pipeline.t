#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The whole pipeline on the bundled example: the same bytes whatever the world, the transport, the threads, the windows and
# the interruptions; sizes as planned; what must be refused. DSPARK_TEST_QUICK shortens the loops.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

example=$(cd "$top_srcdir/examples/quickstart" && pwd)
mkdir "$tmp/w"
cp -R "$example/model" "$example/recipe.yaml" "$example/tokens.safetensors" "$tmp/w"
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

staged() {
	plan "$@" | dspark-load -q -s stage
}

# Every file of two caches has the same bytes, and there are the same files (.dspark.lock too).
same() {
	diff -r "$1" "$2"
}

# expect CODE TEXT COMMAND...: exit status and one sentence on stderr
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
	if ! grep -q -e "$text" "$tmp/err"; then
		echo "stderr does not say '$text':"
		cat "$tmp/err"
		return 1
	fi
}

# ---- one rank ---------------------------------------------------------------------------------------------------------------
one_pipe() {
	plan one "$@" | dspark-load -q -s stage | dspark-forward -q | dspark-manifest merge >merged && dspark-manifest verify one
}
check "one pipe, fp32" one_pipe
check "the expected identity" grep "\"identity_xxh3_128\":\"$(cat "$example/expected")\"" merged
mv one fp32
check "one pipe, bf16" one_pipe --compute-dtype bf16
mv one bf16

estimate() {
	dspark-plan -q -c recipe.yaml --device cpu --set "recipe_args.cache_output_dir=$1" >estimate
}
check "an estimate accepts the cache that it would become" estimate fp32
check "an estimate refuses another cache" \
	expect 1 seq_length dspark-plan -q -c recipe.yaml --set recipe_args.cache_output_dir=fp32 --set recipe_args.seq_length=128
check "a mesh larger than any world is refused" \
	expect 1 ep_size dspark-plan -q -c recipe.yaml -t tokens.safetensors --set distributed.ep_size=4294967296

sizes() {
	plan sized >p
	total=$(sed -n 's/.*"total_bytes":\([0-9]*\).*/\1/p' p)
	have=$(stat -c %s fp32/shard-*.safetensors fp32/target_weights.safetensors | awk '{ n += $1 } END { printf "%d", n }')
	echo "planned $total, have $have"
	[ "$total" -eq "$have" ]
}
check "the plan's total is the sum of the file sizes" sizes

allocated() {
	have=$(du -c --block-size=1 fp32/shard-*.safetensors fp32/target_weights.safetensors | tail -n 1 | cut -f 1)
	bound=$(sed -n 's/.*"allocated_bytes":\([0-9]*\).*/\1/p' p)
	slack=$((52 * 4 * 2 * 4096 + 2 * 4096))
	echo "du $have, planned at most $bound, slack $slack"
	[ "$have" -le "$bound" ] && [ $((bound - have)) -le "$slack" ]
}
check "the plan's allocation bounds du within two blocks a row and tensor" allocated

# ---- the same bytes -----------------------------------------------------------------------------------------------------------
# variant NAME REFERENCE COMMAND...: COMMAND fills $name, which must then equal REFERENCE
variant() {
	name=$1 reference=$2
	shift 2
	rm -rf v
	check "$name: runs" "$@"
	check "$name: same bytes" same "$reference" v
}

ranks() {
	world=$1
	shift
	staged v --world "$world" "$@" >run &&
	"$MPIEXEC" -n "$world" dspark-forward -q run >log && dspark-manifest merge <log >merged
}

told() {
	world=$1
	shift
	staged v --world "$world" "$@" >run || return
	r=$world
	while [ "$r" -gt 0 ]; do
		r=$((r - 1))
		dspark-forward -q --rank "$r" run >log || return
	done
	dspark-manifest merge v >merged
}

torchrun() {
	staged v --world 2 "$@" >run &&
	RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 dspark-forward -q run >log0 && RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 dspark-forward -q run >log1 &&
	dspark-manifest merge v >merged
}

with_threads() {
	n=$(threads "$1")
	shift
	staged v "$@" >run && OMP_NUM_THREADS=$n dspark-forward -q run >log && dspark-manifest merge v >merged
}

copied() {
	plan v --compute-dtype "$2" | dspark-load -q -s "copy-$1" --copy="$1" | dspark-forward -q >log && dspark-manifest merge v >merged
}

for type in fp32 bf16; do
	if [ -n "$MPIEXEC" ]; then
		variant "$type, 2 MPI ranks" $type ranks 2 --compute-dtype $type
		variant "$type, 3 MPI ranks, by shards" $type ranks 3 --compute-dtype $type --balance shards
	else
		skip "$type, MPI ranks" "no MPI"
	fi
	variant "$type, --rank of 3" $type told 3 --compute-dtype $type
	variant "$type, torchrun's environment" $type torchrun --compute-dtype $type
	variant "$type, 1 thread" $type with_threads 1 --compute-dtype $type
	variant "$type, 3 threads, windows of 300 tokens" $type with_threads 3 --compute-dtype $type --window-tokens 300
	variant "$type, windows of 1 token" $type with_threads 2 --compute-dtype $type --window-tokens 1
	variant "$type, from a copy" $type copied raw $type
	variant "$type, from an LZ4 copy" $type copied lz4 $type
done
more_ranks_than_shards() {
	told 9
}
variant "more ranks than shards" fp32 more_ranks_than_shards

# ---- interrupted and resumed ----------------------------------------------------------------------------------------------------
mtimes() {
	find "$1" -name 'shard-*.safetensors' -exec stat -c '%n %Y %i' '{}' + | sort
}

# Kills the run after a while, then plans again for another world; what was published keeps its inode.
killed() {
	after=$1 world=$2
	rm -rf v
	staged v --window-tokens 64 >run || return
	dspark-forward -q run >log 2>err &
	pid=$!
	sleep "$after"
	kill -9 "$pid" 2>/dev/null
	wait "$pid" 2>/dev/null
	mtimes v >before
	told "$world" --window-tokens 64 || return
	mtimes v >after
	comm -23 before after | grep . && return 1
	same fp32 v
}
delays="0.05 0.2 0.5"
if [ -z "${DSPARK_TEST_QUICK-}" ]; then delays="0.02 0.05 0.1 0.15 0.2 0.3 0.4 0.6"; fi
for d in $delays; do
	check "kill -9 after $d s, resumed by 2 ranks" killed "$d" 2
done

again() {
	rm -rf v
	staged v >run && dspark-forward -q run >log && dspark-manifest merge v >merged && mtimes v >before &&
	staged v >run && grep -q '"shards":\[\]' run && dspark-forward -q run >log && mtimes v >after && cmp before after && same fp32 v
}
check "a finished cache is left alone and stays complete" again

stopped() {
	rm -rf v
	staged v --window-tokens 64 >run || return
	dspark-forward -q run >log 2>err &
	pid=$!
	sleep 0.15
	kill -TERM "$pid" 2>/dev/null
	wait "$pid"
	status=$?
	if [ "$status" -ne 3 ] && [ "$status" -ne 0 ]; then return 1; fi
	find v -name '.*.tmp.*' | grep . && return 1
	told 1 --window-tokens 64 && same fp32 v
}
check "SIGTERM: exit 3, no temporaries, resumed" stopped

# ---- damage -----------------------------------------------------------------------------------------------------------------------
damaged() {
	cp -R fp32 d
	printf x | dd of=d/shard-000002.safetensors bs=1 seek=200000 conv=notrunc 2>dd.err
	expect 1 'shard 2' dspark-manifest verify d && expect 1 'shard 2' dspark-manifest verify --discard d || return
	[ -e d/shard-000002.safetensors.bad ] || return
	staged d >run && dspark-forward -q run >log && rm d/shard-000002.safetensors.bad && dspark-manifest merge d >merged && same fp32 d
}
check "a damaged shard is found, discarded and made again" damaged

# ---- refusals -----------------------------------------------------------------------------------------------------------------------
staged v2 --world 2 >run2
check "a world that is not the plan's" expect 1 'plan is for 2 ranks' dspark-forward run2
check "a rank outside the plan" expect 1 'outside' dspark-forward --rank 2 run2
check "no stage record" sh -c 'dspark-plan -q -c recipe.yaml -t tokens.safetensors --set recipe_args.cache_output_dir=v3 >p3; ! dspark-forward p3 2>err && grep -q "dspark-load" err'
check "an estimate cannot run" sh -c 'dspark-plan -q -c recipe.yaml >est && ! dspark-load est 2>err && grep -q estimate err'
check "an empty run" expect 1 'no plan record' dspark-load /dev/null
check "a cut run" sh -c 'grep -v "\"rank\":1" run2 >cut; dspark-forward cut 2>err; [ $? -eq 1 ] && grep -q "range records" err'
check "an edited run" sh -c 'sed "s/\"window_tokens\":[0-9]*/\"window_tokens\":77/" run2 >edited; dspark-forward --rank 0 edited 2>err; [ $? -eq 1 ] && grep -q "changed" err'
check "another cache in the directory" expect 1 'target_layer_ids: .* -> ' plan fp32 --set 'recipe_args.target_layer_ids=[1, 2]'
check "another tokens file" expect 1 'seq_length' plan v4 --recipe_args.seq_length 128
check "stdout full: plan" sh -c 'dspark-plan -q -c recipe.yaml -t tokens.safetensors >/dev/full 2>err; [ $? -eq 3 ] && grep -q "No space left" err'
check "stdout full: forward publishes all the same" sh -c 'staged() { dspark-plan -q -c recipe.yaml -t tokens.safetensors --set recipe_args.cache_output_dir=full | dspark-load -q -s stage; }
	staged >run; dspark-forward -q run >/dev/full 2>err; [ $? -eq 3 ] && dspark-manifest merge full >merged && diff -r fp32 full'
check "memory that is too small" expect 1 'memory' plan v5 --memory 1M

# ---- a full disk --------------------------------------------------------------------------------------------------------------------
if mkdir disk && mount -t tmpfs -o size=2m none disk 2>/dev/null; then
	check "a disk that is too small is refused" expect 1 'free' plan disk/c
	full() {
		plan disk/c -f 2>warn | dspark-load -q -s stage >run
		expect 3 'No space left' dspark-forward -q run || return
		grep -q '"complete": false' disk/c/manifest.json || return
		find disk/c -name '.*.tmp.*' | grep . && return 1
		mount -o remount,size=64m disk && dspark-forward -q run >log && dspark-manifest merge disk/c >merged && same fp32 disk/c
	}
	check "a disk that fills up: exit 3, complete: false, goes on with space" full
	umount disk
else
	skip "a full disk" "cannot mount a tmpfs here"
fi
done_testing
