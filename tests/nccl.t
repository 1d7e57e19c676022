#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The kernels of CUDA on the host, several ranks of them, connected by the stand-in for NCCL as torchrun starts them: weights
# that are gathered and experts that are divided give the states of one rank. What the transport does by itself, and when
# ranks fail, is t_comm's. DSPARK_TEST_QUICK leaves out what takes long.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

here=${top_builddir:?}/tests/cuda
if [ ! -x "$here/dspark-forward" ]; then
	skip "ranks that NCCL connects" "this build has no C++17 compiler to run CUDA on the host"
	done_testing
fi
golden=$top_srcdir/tests/data/golden
OMP_NUM_THREADS=1
export OMP_NUM_THREADS

# ranks WORLD RUN: rank 0's records in $tmp/log; what all say in $tmp/said
ranks() {
	world=$1 file=$2 pids='' bad=0 rank=0
	while [ "$rank" -lt "$world" ]; do
		RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$world MASTER_ADDR=localhost MASTER_PORT=29500 \
			LD_LIBRARY_PATH=$here "$here/dspark-forward" -q "$file" >"$tmp/log.$rank" 2>"$tmp/said.$rank" &
		pids="$pids $!"
		rank=$((rank + 1))
	done
	for pid in $pids; do
		wait "$pid" || bad=$?
	done
	cat "$tmp"/said.*
	cp "$tmp/log.0" "$tmp/log"
	return "$bad"
}

# run OUT WORLD OPTION...: a cache of $case in OUT
run() (
	out=$1 world=$2
	shift 2
	cd "$golden/$case" || exit
	rm -rf "$out" "$tmp/stage" "$tmp"/said.*
	dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cuda --compute-dtype fp32 --set dist_env.backend=nccl \
		--set "recipe_args.cache_output_dir=$out" --world "$world" "$@" >"$tmp/plan" &&
		dspark-load -q -s "$tmp/stage" "$tmp/plan" >"$tmp/run" || exit
	if [ "$world" -eq 1 ]; then
		"$here/dspark-forward" -q "$tmp/run" >"$tmp/log" || exit
	else
		ranks "$world" "$tmp/run" || exit
	fi
	dspark-manifest merge -q "$out" >"$tmp/merged"
)

# same NAME WORLD OPTION...: the bytes of one rank, and nothing left of how the ranks met
same() {
	name=$1
	shift
	if run "$tmp/v" "$@" >"$tmp/tap.out" 2>&1 && diff -r "$tmp/one" "$tmp/v" >>"$tmp/tap.out" 2>&1 &&
		[ -z "$(find "$tmp/v" -name '.nccl*')" ]; then
		pass "$case: $name"
	else
		fail "$case: $name" "$tmp/tap.out"
	fi
}

# the summary tells that the ranks did exchange: seconds of exchange above 0
exchanged() {
	sed -n 's/.*"exchange":\([0-9.e-]*\).*/\1/p' "$tmp/log" | awk '{ n += $1 > 0 } END { exit n < 1 }'
}

# what the others are compared with: kernels run on the host give the same bytes for any ranks
one() {
	if run "$tmp/one" 1 --weights resident >"$tmp/tap.out" 2>&1; then
		pass "$case: one rank"
	else
		fail "$case: one rank" "$tmp/tap.out"
	fi
}

case=qwen3moe-norm
one
same "gathered by 2 ranks" 2 --weights gather
same "experts divided by 2 ranks" 2 --weights resident --set distributed.ep_size=2
check "$case: tokens travelled" exchanged
if [ -z "${DSPARK_TEST_QUICK:-}" ]; then
	same "streamed and gathered by 2 ranks, in small windows" 2 --weights gather,stream --window-tokens 64
	same "gathered by 3 ranks" 3 --weights gather
	same "divided by 2 of 4 ranks" 4 --weights gather --set distributed.ep_size=2
	case=glm52-fp8 # codes, whose scales come back to the host
	one
	same "gathered by 2 ranks" 2 --weights gather
	same "divided and gathered by 3 ranks" 3 --weights gather
fi
done_testing
