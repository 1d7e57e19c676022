#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kill -9 at a random moment on a random rank, or on the whole group, of a run of 26 shards; then the same recipe with another
# world goes on: published shards keep inode and mtime, and the finished cache has the same bytes as one that was never interrupted.
# TRIALS=N sets the number of trials.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

: "${TRIALS:=${DSPARK_TEST_QUICK:+3}}" "${TRIALS:=8}"
example=$(cd "$top_srcdir/examples/quickstart" && pwd)
cd "$tmp" || exit 99
cp -R "$example/model" "$example/recipe.yaml" "$example/tokens.safetensors" .
OMP_NUM_THREADS=1
export OMP_NUM_THREADS

random() {
	od -An -N2 -tu2 /dev/urandom | awk -v n="$1" '{ print int($1 * n / 65536) }'
}

# staged OUT WORLD NAME
staged() {
	dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cpu --world "$2" --window-tokens 96 \
		--set "recipe_args.cache_output_dir=$1" --set recipe_args.cache_shard_size=2 | dspark-load -q -s stage >"$3"
}

start() {
	if [ -n "$MPIEXEC" ] && [ "$1" -gt 1 ]; then
		# a launcher may miss the death of a rank that it has only just started: it gets a limit
		timeout -s KILL 60 "$MPIEXEC" -n "$1" dspark-forward -q "$2" >log 2>err
	else
		r=$1
		while [ "$r" -gt 0 ]; do
			r=$((r - 1))
			dspark-forward -q --rank "$r" "$2" >log 2>err || return
		done
	fi
}

published() {
	find "$1" -name 'shard-*.safetensors' -exec stat -c '%n %Y %i' '{}' + 2>/dev/null | sort
}

now() {
	date +%s%N | cut -c 1-13
}

staged whole 1 run && began=$(now) && start 1 run
check "a run that is left alone" dspark-manifest merge whole
span=$(($(now) - began))

trial() {
	rm -rf v
	world=$(($(random 3) + 1))
	staged v "$world" "$1" || return
	start "$world" "$1" &
	launcher=$!
	sleep "$(($(random "$span") + 20))e-3"
	victims=$(pgrep -x -f "dspark-forward .*$1\$")
	if [ "$(random 2)" -eq 0 ]; then victims=$(echo "$victims" | head -n $(($(random 3) + 1)) | tail -n 1); fi
	# shellcheck disable=SC2086
	kill -9 $victims 2>/dev/null
	wait "$launcher"
	published v >before
	next=$(($(random 4) + 1))
	echo "# world $world, killed $(echo "$victims" | wc -w), $(wc -l <before) of 26 shards published; resumed with $next"
	if ! staged v "$next" "$1.again" || ! start "$next" "$1.again"; then
		cat err
		return 1
	fi
	published v >after
	[ "$(comm -12 before after | wc -l)" -eq "$(wc -l <before)" ] || { echo "a published shard was written again"; return 1; }
	dspark-manifest merge v >merged && diff -r whole v
}

n=0
while [ "$n" -lt "$TRIALS" ]; do
	n=$((n + 1))
	check "trial $n" trial "run.$$.$n"
	sed -n 's/^# /# /p' "$tmp/tap.out"
done
done_testing
