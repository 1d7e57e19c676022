#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What befalls one of 3 ranks that depend on each other: it is killed, stopped for good or told to end, or the disk is full, at a
# random moment of a run with random residency. The others end in time and say why, nothing false is published, no temporary
# stays but of who was killed, and the same commands finish the cache with the bytes of a run that was left alone. TRIALS=N sets
# the number of trials, SEED=N their choices (not the moments to the last millisecond), PATIENCE=S the seconds that a rank waits.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

: "${TRIALS:=${DSPARK_TEST_QUICK:+3}}" "${TRIALS:=4}" "${PATIENCE:=3}"
: "${SEED:=$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')}"
tests=$(cd "$top_srcdir/tests" && pwd)
OMP_NUM_THREADS=1
export OMP_NUM_THREADS
if [ -z "$MPIEXEC" ]; then
	skip "ranks that fail" "this build has no MPI"
	done_testing
fi
need_python "ranks that fail" numpy,xxhash || done_testing
cd "$tmp" || exit 99

# ---- a target, and runs of it ----------------------------------------------------------------------------------------------
shards=300
"$PYTHON" "$tests/make_model.py" --type qwen3_moe --layers 4 --experts 6 --topk 2 --vocab 2048 model || exit 99
"$PYTHON" "$tests/make_tokens.py" --model model --rows $((shards * 4)) --seq-length 64 --shard-size 4 --layer-ids 0,1,2 \
	--recipe recipe.yaml tokens.safetensors || exit 99
minutes=$(awk -v s="$PATIENCE" 'BEGIN { print s / 60 }')
# A rank gives up after its patience; the watchdog waits a tenth and 2 s longer. The rest is for launchers and loaded machines.
limit=$((PATIENCE + PATIENCE / 10 + 12))
name=fault.$$

pids() {
	pgrep -x -f "dspark-forward -q ${name}[.a-z0-9]*"
}

end_all() {
	if mountpoint -q disk; then umount -l disk; fi
	# shellcheck disable=SC2046 # words
	kill -9 $(pids) 2>/dev/null
	rm -rf "$tmp"
}
trap end_all EXIT

now() {
	echo $(($(date +%s%N) / 1000000))
}

# staged OUT RUN WEIGHTS [OPTION...]: COPY holds an option of dspark-load
staged() {
	out=$1 run=$2 weights=$3
	shift 3
	dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cpu --world 3 --weights "$weights" --window-tokens 96 \
		--set "recipe_args.cache_output_dir=$out" --set distributed.ep_size=3 --set "dist_env.timeout_minutes=$minutes" "$@" |
		dspark-load -q -s "stage.$weights${COPY:+.copy}" ${COPY:+"$COPY"} >"$run"
}

# start RUN: in the background, $launcher; whoever does not end is killed
start() {
	rm -f log err
	(exec timeout -s KILL $((limit + 60)) "$MPIEXEC" -n 3 dspark-forward -q "$1" >log 2>err) &
	launcher=$!
}

undisturbed() {
	start "$1"
	wait "$launcher" || {
		echo "exit $?"
		cat err
		return 1
	}
}

# Until all ranks of a run are there, or it is over.
await_ranks() {
	while kill -0 "$launcher" 2>/dev/null && [ "$(pids | wc -l)" -lt 3 ]; do sleep 0.01; done
}

# Until OUT has a shard, or the run is over.
await_shard() {
	while kill -0 "$launcher" 2>/dev/null && ! ls "$1"/shard-*.safetensors >ls.out 2>&1; do sleep 0.01; done
}

# The process that is rank $1.
rank() {
	for p in $(pids); do
		if tr '\0' '\n' 2>/dev/null <"/proc/$p/environ" | grep -qxE "(OMPI_COMM_WORLD_RANK|PMI_RANK)=$1"; then
			echo "$p"
			return
		fi
	done
}

published() {
	find "$1" -name 'shard-*.safetensors' -exec stat -c '%n %Y %i' '{}' + 2>/dev/null | sort
}

# ---- what must hold afterwards -----------------------------------------------------------------------------------------------
# Until the launcher ends. A rank that was stopped when its work was done, and all others have ended, holds up nobody but the
# launcher: it may go on.
await_end() {
	alone=0
	while [ -d "/proc/$launcher" ] && ! grep -q '^State:.Z' "/proc/$launcher/status" 2>/dev/null; do
		last=$(pids)
		if [ "$(echo "$last" | grep -c .)" -eq 1 ] && grep -q '^State:.T' "/proc/$last/status" 2>/dev/null; then
			alone=$((alone + 1))
			if [ "$alone" -eq 20 ]; then kill -CONT "$last"; fi
		fi
		sleep 0.1
	done
}

# ended: the launcher ends in time, with $status, and no rank stays behind
ended() {
	since=$(now)
	await_end
	wait "$launcher"
	status=$?
	took=$(($(now) - since))
	sed 's/^/    /' err
	if [ "$took" -gt $((limit * 1000)) ]; then
		echo "it took $took ms to end, more than $limit s"
		return 1
	fi
	tries=0
	while pids >left && [ "$tries" -lt 100 ]; do
		tries=$((tries + 1))
		sleep 0.05
	done
	[ "$tries" -lt 100 ] || { echo "left running: $(cat left)"; return 1; }
}

# sound OUT: what is published is what it will be at the end, and nobody calls a part of it the whole
sound() {
	if [ ! -e "$1/dspark.json" ]; then return 0; fi
	for f in "$1"/shard-*.safetensors "$1"/target_weights.safetensors; do
		if [ -e "$f" ]; then cmp "$f" "whole/${f##*/}" || return; fi
	done
	if dspark-manifest verify "$1" >verified 2>&1 || grep -q bad: verified; then
		cat verified
		return 1
	fi
	if dspark-manifest merge "$1" >merged 2>merge.err; then
		[ "$(published "$1" | wc -l)" -eq "$shards" ]
	else
		cat merge.err
		grep -q missing merge.err && grep -q '"complete": false' "$1/manifest.json"
	fi
}

# tidy OUT [RANK...]: no temporaries but of these ranks, who had no time for it
tidy() {
	dir=$1
	shift
	find "$dir" -name '.*.tmp.*' >temporaries
	for r in "$@"; do
		grep -v "\\.$r\\.[0-9]*\$" temporaries >t
		mv t temporaries
	done
	! grep . temporaries
}

# goes_on OUT RUN STAGED-ARGUMENT...: the same commands again
goes_on() {
	out=$1 run=$2
	published "$out" >before
	staged "$@" && undisturbed "$run" || return
	published "$out" >after
	comm -23 before after | grep . && return 1
	dspark-manifest merge "$out" >merged && diff -r whole "$out"
}

staged whole "$name.whole" gather && start "$name.whole" && await_ranks && began=$(now) && check "a run that is left alone" wait "$launcher"
span=$(($(now) - began))
check "its cache" dspark-manifest merge whole

# ---- trials --------------------------------------------------------------------------------------------------------------------
state=$SEED
# draw N: an integer below N, in $drawn
draw() {
	state=$(((state * 1103515245 + 12345) % 2147483648))
	drawn=$((state / 65536 % $1))
}

kinds="kill stop term disk"
if ! mkdir disk || ! mount -t tmpfs -o size=64m none disk 2>/dev/null; then
	skip "a full disk" "cannot mount a tmpfs here"
	kinds="kill stop term"
fi

# befall KIND: 1 if there is nobody left
befall() {
	victim=$(rank "$lot")
	case $1 in
	kill) kill -KILL "$victim" 2>/dev/null ;;
	stop) kill -STOP "$victim" 2>/dev/null ;;
	term) kill -TERM "$victim" 2>/dev/null ;;
	disk) ! dd if=/dev/zero of=disk/filler bs=64k >dd.out 2>&1 && grep -q 'No space' dd.out ;;
	esac
}

# clear KIND: a sentence of who is to say it
clear() {
	case $1 in
	kill) others 'stopped by a signal|waited .* s for|has not come back' || grep "exited on signal 9" err ;;
	stop) others 'waited .* s for|has not come back|signal' ;;
	term) grep '^dspark-forward.*: stopped by a signal' err ;;
	disk) grep '^dspark-forward.*No space left' err ;;
	esac && return
	echo "nobody says why"
	return 1
}

others() {
	grep -E "^dspark-forward(\\[[0-2]\\])?: .*($1)" err | grep -v "^dspark-forward\\[$lot\\]"
}

trial() {
	draw 3
	weights=$(echo gather gather,stream stream | cut -d ' ' -f $((drawn + 1)))
	draw 3
	lot=$drawn
	draw 1000
	delay=$((drawn * span / 1000))
	out=v
	if [ "$kind" = disk ]; then out=disk/v; fi
	rm -rf "$out"
	staged "$out" "$1" "$weights" || return
	start "$1"
	await_ranks
	sleep "${delay}e-3"
	befall "$kind"
	late=$?
	ended
	rc=$?
	rm -f disk/filler
	count=$(published "$out" | wc -l)
	echo "# $kind of rank $lot, $weights, after $delay ms: exit $status after $took ms with $count of $shards shards"
	[ "$rc" -eq 0 ] || return
	if [ "$late" -ne 0 ] && [ "$status" -ne 0 ]; then
		echo "nothing was done to it"
		return 1
	fi
	# too late for anything: the machine was slower when it was measured
	if [ "$status" -eq 0 ] && [ "$delay" -lt "$span" ]; then span=$((delay + 1)); fi
	if [ "$status" -ne 0 ] && [ "$count" -lt "$shards" ]; then clear "$kind" || return; fi
	case $kind in
	kill | stop) tidy "$out" "$lot" ;;
	*) tidy "$out" ;;
	esac && sound "$out" && goes_on "$out" "$1" "$weights"
}

echo "# SEED=$SEED, a run takes $span ms"
n=0
draw 4
first=$drawn
while [ "$n" -lt "$TRIALS" ]; do
	n=$((n + 1))
	# shellcheck disable=SC2086 # words
	set -- $kinds
	shift $(((first + n) % $#))
	kind=$1
	check "trial $n" trial "$name.$n"
	grep '^# ' tap.out
done

# ---- not by chance -----------------------------------------------------------------------------------------------------------------
# One rank is left, and waits for those that are stopped.
two_stopped() {
	rm -rf v
	staged v "$name.two" gather && start "$name.two" && await_shard v || return
	for r in "$@"; do kill -STOP "$(rank "$r")"; done
	lot=none
	ended && clear stop && [ "$status" -ne 0 ] && sound v && goes_on v "$name.two" gather
}
check "ranks 0 and 1 are stopped" two_stopped 0 1
check "ranks 1 and 2 are stopped" two_stopped 1 2

# One stops before it is connected: nobody can have asked it for anything yet.
early_stopped() {
	rm -rf v
	staged v "$name.early" gather && start "$name.early" && await_ranks || return
	lot=2
	befall stop && ended && clear stop && [ "$status" -eq 3 ] && goes_on v "$name.early" gather
}
check "rank 2 is stopped while ranks connect" early_stopped

# As batch systems do it, to all ranks at once; and to the launcher alone, whose exit status is its own and which may let a second
# or two pass before its ranks hear of it.
all_told() {
	rm -rf v
	staged v "$name.told" gather,stream && start "$name.told" && await_shard v || return
	# shellcheck disable=SC2046 # words
	kill -TERM $(pids)
	ended && [ "$status" -eq 3 ] && grep '^dspark-forward.*stopped by a signal' err && tidy v && sound v &&
		goes_on v "$name.told" gather,stream
}
check "SIGTERM to all ranks" all_told
launcher_told() {
	rm -rf v
	staged v "$name.told" gather --window-tokens 1 && start "$name.told" && await_shard v || return
	pkill -TERM -P "$launcher"
	ended || return
	if [ "$(published v | wc -l)" -lt "$shards" ]; then grep '^dspark-forward.*stopped by a signal' err || return; fi
	[ "$status" -ne 0 ] && tidy v && sound v && goes_on v "$name.told" gather --window-tokens 1
}
check "SIGTERM to the launcher" launcher_told

damaged() {
	rm -rf v
	COPY=--copy=raw
	staged v "$name.damaged" gather && truncate -s 1000 stage.gather.copy/rank-00001.safetensors && start "$name.damaged" || return
	ended && { [ "$status" -eq 1 ] || [ "$status" -eq 3 ]; } && grep '^dspark-forward\[1\]: .*rank-00001' err &&
		[ "$took" -lt 5000 ] && goes_on v "$name.damaged" gather
	rc=$?
	COPY=
	return "$rc"
}
check "a rank whose weights are damaged ends all at once" damaged
# A rank that is stopped while it opens the cache, or writes target_weights, keeps the lock for which the others wait.
hold() {
	"$PYTHON" -c 'import fcntl, time
f = open("v/.dspark.lock", "a")
fcntl.lockf(f, fcntl.LOCK_EX, 1, 0)
print("held", flush=True)
time.sleep(1000)' >held &
	holder=$!
	while ! grep -q held held; do sleep 0.01; done
}

let_go() {
	kill "$holder"
	wait "$holder" 2>/dev/null
}

locked() {
	rm -rf v
	mkdir v
	staged v "$name.locked" gather || return
	hold
	start "$name.locked"
	ended
	rc=$?
	let_go
	[ "$rc" -eq 0 ] && [ "$status" -eq 3 ] && grep '^dspark-forward.*lock' err && goes_on v "$name.locked" gather
}
check "the cache's lock is never given back" locked
locked_later() {
	rm -rf v
	staged v "$name.locked" gather && start "$name.locked" || return
	while kill -0 "$launcher" 2>/dev/null && [ ! -s v/.dspark.lock ]; do sleep 0.005; done
	hold
	ended
	rc=$?
	let_go
	[ "$rc" -eq 0 ] && sound v && goes_on v "$name.locked" gather
}
check "the lock is taken while ranks run" locked_later
done_testing
