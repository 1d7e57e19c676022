#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dspark-manifest on caches of tests/make_cache: merge, verify with every kind of damage, discard and mend, show, diff, locks, kills and
# full disks.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

make=${top_builddir:?run it by make check}/tests/make_cache
shape="rows=10 seq=16 shard=4 hidden=8 ids=2 vocab=50 dtype=fp32 seed=5"

# make_cache DIR KEY=VALUE...: of the shape above
make_cache() {
	dir=$1
	shift
	# shellcheck disable=SC2086
	"$make" "$dir" $shape "$@"
}

# expect STATUS NAME COMMAND...: its output is in $tmp/out and $tmp/err
expect() {
	want=$1 what=$2
	shift 2
	"$@" >"$tmp/out" 2>"$tmp/err" </dev/null
	got=$?
	if [ "$got" -eq "$want" ]; then
		pass "$what"
	else
		{ echo "exit status $got instead of $want: $*"; cat "$tmp/out" "$tmp/err"; } >"$tmp/why"
		fail "$what" "$tmp/why"
	fi
}

# says NAME PATTERN: standard output or error of the last command has a line that matches
says() {
	cat "$tmp/out" "$tmp/err" >"$tmp/said"
	if grep -q -e "$2" "$tmp/said"; then
		pass "$1"
	else
		echo "wanted: $2" >>"$tmp/said"
		fail "$1" "$tmp/said"
	fi
}

# poke FILE OFFSET BYTES: overwrites bytes, given as printf's octal escapes
poke() {
	# shellcheck disable=SC2059
	printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}

# Full shard of this shape: header 4096, ids at 4096, mask at 4608, states at 5120 (64 bytes a position, 1024 a row), last at 9216.
good=$tmp/good
expect 0 "make a cache" make_cache "$good"
expect 1 "not merged, not complete" dspark-manifest verify "$good"
says "verify says what to do" 'all 3 shards are good but it is not complete: run dspark-manifest merge'
expect 0 "merge" dspark-manifest merge "$good"
says "one manifest record" '^{"record":"manifest",.*"complete":true,"rows":10,.*"shards":3,'
check "one line" test "$(wc -l <"$tmp/out")" -eq 1
expect 0 "verify" dspark-manifest verify "$good"
says "complete and good" "^$good: complete and good: 10 rows, 3 shards, 36.6 KiB\$"
check "the lock file is empty" test ! -s "$good/.dspark.lock"
cp -R "$good" "$tmp/again"
expect 0 "merge again" dspark-manifest merge "$tmp/again"
check "changes nothing" diff -r "$good" "$tmp/again"
expect 0 "logits" dspark-manifest verify --logits "$good"
says "logits are reported" 'logits of [1-9][0-9]* sampled positions are finite: mean next-token loss'

for dtype in bf16 fp16; do
	expect 0 "make a cache of $dtype" make_cache "$tmp/$dtype" dtype=$dtype
	expect 0 "merge it" dspark-manifest merge "$tmp/$dtype"
	expect 0 "verify it" dspark-manifest verify "$tmp/$dtype"
done
expect 0 "no rows" make_cache "$tmp/empty" rows=0
expect 0 "merge no rows" dspark-manifest merge "$tmp/empty"
expect 0 "verify no rows" dspark-manifest verify --logits "$tmp/empty"
says "no rows are complete and good" 'complete and good: 0 rows, 0 shards'
expect 0 "one row of one token" make_cache "$tmp/one" rows=1 seq=1
expect 0 "merge one token" dspark-manifest merge "$tmp/one"
expect 0 "verify one token" dspark-manifest verify --logits "$tmp/one"

# ---- incomplete
expect 0 "leave shards out" make_cache "$tmp/part" rows=40 skip=1-3,7
cp -R "$tmp/part" "$tmp/part.before"
expect 1 "merge refuses" dspark-manifest merge "$tmp/part"
says "and lists intervals" 'shards 1-3, 7 missing (4 of 10): run it again$'
check "and changes nothing" diff -r "$tmp/part.before" "$tmp/part"
expect 1 "verify refuses" dspark-manifest verify "$tmp/part"
says "and lists them too" 'missing: shards 1-3, 7 (4 of 10): run it again$'
expect 0 "show" dspark-manifest show "$tmp/part"
says "show lists them" 'missing shards *1-3, 7 (4 of 10)'
expect 0 "run it again" make_cache "$tmp/part" rows=40 plan=other rank=3
expect 0 "merge" dspark-manifest merge "$tmp/part"
expect 0 "the same at once" make_cache "$tmp/whole" rows=40
expect 0 "merge that" dspark-manifest merge "$tmp/whole"
check "same bytes of the whole directory" diff -r "$tmp/whole" "$tmp/part"

# ---- damage: NAME FILE OFFSET BYTES|cut PATTERN PATTERN; every one is found, set aside and mended
damage() {
	name=$1 file=$2 bad=$tmp/bad
	rm -rf "$bad"
	cp -R "$good" "$bad"
	if [ "$4" = cut ]; then truncate -s "$3" "$bad/$file"; else poke "$bad/$file" "$3" "$4"; fi
	expect 1 "$name: verify" dspark-manifest verify "$bad"
	says "$name: is named" "$5"
	says "$name: the file is named" "$6"
	expect 1 "$name: discard" dspark-manifest verify --discard "$bad"
	check "$name: it is set aside" test -e "$bad/$file.bad"
	if [ "$file" != manifest.json ]; then
		expect 1 "$name: merge refuses what is left" dspark-manifest merge "$bad"
	fi
	expect 0 "$name: run it again" make_cache "$bad"
	expect 0 "$name: merge" dspark-manifest merge "$bad"
	expect 0 "$name: verify the mended" dspark-manifest verify "$bad"
	rm -f "$bad"/*.bad
	check "$name: same bytes as before" diff -r "$good" "$bad"
}
s=shard-000000.safetensors
damage "a changed state" $s 5124 '\001' "/$s: row 0 of 'target_hidden_states': its bytes do not have their hash" 'bad: shard 0 (1 of 3)'
damage "a NaN" $s 5120 '\000\000\300\177' "/$s: row 0 position 0 (layer 0) of 'target_hidden_states': not finite" 'bad: shard 0 '
damage "an infinity" $s 9216 '\000\000\200\177' "/$s: row 0 position 0 of 'target_last_hidden_states': not finite" 'bad: shard 0 '
damage "a position of zeros" $s 5152 "$(printf '\\000%.0s' 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32)" \
	"/$s: row 0 position 0 (layer 1) of 'target_hidden_states': all zero" 'bad: shard 0 '
damage "an id outside the vocabulary" $s 4096 '\062\000' "/$s: row 0 position 0 of 'input_ids': a token id outside" 'bad: shard 0 '
damage "a negative id" $s 4103 '\200' "/$s: row 0 position 0 of 'input_ids': a token id outside" 'bad: shard 0 '
damage "a mask of 2" $s 4608 '\002' "/$s: row 0 position 0 of 'loss_mask': neither 0 nor 1" 'bad: shard 0 '
damage "another header" $s 4090 'x' "/$s: .*is not valid JSON" 'bad: shard 0 '
damage "another row hash" $s 100 '0' "/$s" 'bad: shard 0 '
damage "a shard that ends early" shard-000002.safetensors 7000 cut 'shard-000002.safetensors: ' 'bad: shard 2 '
damage "an empty shard" shard-000002.safetensors 0 cut 'shard-000002.safetensors: ' 'bad: shard 2 '
damage "a changed embedding" target_weights.safetensors 4200 '\001' "target_weights.safetensors: 'embed_tokens.weight': its bytes" \
	'bad: target_weights.safetensors'
damage "an infinite head" target_weights.safetensors 7292 '\000\000\200\177' "'lm_head.weight' holds values that are not finite" \
	'bad: target_weights.safetensors'
damage "another manifest" manifest.json 10 'x' 'manifest.json: it is not the manifest' 'bad: manifest.json'
damage "a broken manifest" manifest.json 0 'x' 'manifest.json' 'manifest.json'
damage "a changed dspark.json" dspark.json 100 'x' "dspark.json' is damaged" 'dspark.json'

# pads, of row 0
length=$(sed -n '1s/.*"row_tokens":"\([0-9]*\).*/\1/p' "$good/$s")
if [ "$length" -lt 16 ]; then
	damage "a pad that is no pad" $s 4216 '\007' "/$s: row 0 position 15 of 'input_ids': a pad that is not the pad id" 'bad: shard 0 '
	damage "a supervised pad" $s 4728 '\001' "/$s: row 0 position 15 of 'loss_mask': a pad that is not 0" 'bad: shard 0 '
	damage "a pad with a state" $s 6143 '\100' "/$s: row 0 position 1*[0-9] of 'target_hidden_states': a pad that is not zero" 'bad: shard 0 '
else
	fail "row 0 has pads"
fi

rm -rf "$tmp/bad"
cp -R "$good" "$tmp/bad"
cp "$good/$s" "$tmp/bad/shard-000003.safetensors"
expect 1 "a shard too many" dspark-manifest verify "$tmp/bad"
says "is named" 'shard-000003.safetensors: beyond the last shard'
expect 1 "merge refuses it" dspark-manifest merge "$tmp/bad"
expect 1 "discard it" dspark-manifest verify --discard "$tmp/bad"
expect 0 "merge what is left" dspark-manifest merge "$tmp/bad"
check "it is set aside" test -e "$tmp/bad/shard-000003.safetensors.bad"
expect 1 "good and bad ones" dspark-manifest verify "$good" "$tmp/part.before" "$tmp/bf16"
says "the good are named" "^$good: complete and good"
says "all of them" "^$tmp/bf16: complete and good"
expect 0 "make a cache of another identity" make_cache "$tmp/other" name=other
cp "$tmp/other/$s" "$tmp/bad/$s"
expect 1 "a shard of another cache" dspark-manifest verify "$tmp/bad"
says "is named" "/$s: '.*belongs to another cache"
expect 1 "merge counts it as missing" dspark-manifest merge "$tmp/bad"
says "and says so" 'shard 0 missing (1 of 3)'

# ---- caches that somebody else wrote: manifest.json without dspark.json
cp -R "$good" "$tmp/foreign"
rm "$tmp/foreign/dspark.json" "$tmp/foreign/.dspark.lock"
expect 0 "a cache without dspark.json" dspark-manifest verify "$tmp/foreign"
says "no hashes vouch for it" 'no hashes vouch'
expect 1 "merge refuses it" dspark-manifest merge "$tmp/foreign"
expect 1 "discard leaves it alone" dspark-manifest verify --discard "$tmp/foreign"
expect 1 "writing refuses it" make_cache "$tmp/foreign"
says "and says why" 'did not write (manifest.json without dspark.json)'
check "nothing is added to it" test ! -e "$tmp/foreign/.dspark.lock"
expect 0 "show it" dspark-manifest show --stats "$tmp/foreign"
expect 0 "diff with ours" dspark-manifest diff "$tmp/foreign" "$good"
poke "$tmp/foreign/$s" 5120 '\000\000\300\177'
expect 1 "its NaN is found" dspark-manifest verify "$tmp/foreign"
says "and named" "row 0 position 0 (layer 0) of 'target_hidden_states': not finite"

# ---- show and diff
expect 0 "show --stats" dspark-manifest show --stats "$good"
says "its fields" '^  target_vocab_size *50$'
says "its tokens" '^  tokens *[0-9]* real of 160 positions'
says "its layers" '^  layer 1 *[-0-9.e]* *0\.5'
says "its row lengths" '^  row lengths *min [0-9]*, '
expect 0 "no difference" dspark-manifest diff "$good" "$tmp/again"
expect 1 "another seed" make_cache "$good" seed=6
says "is refused by field" '^rows_xxh3_128: 5 -> 6'
expect 1 "another dtype" dspark-manifest diff "$good" "$tmp/bf16"
says "the field" '^dtype: "fp32" -> "bf16"$'
says "and the values" '^target_last_hidden_states: [0-9]* of [0-9]* values differ, max abs 0.00'
says "but not the ids" '^input_ids: same$'
expect 0 "other shard size" make_cache "$tmp/three" shard=3
expect 1 "same rows in other shards" dspark-manifest diff "$good" "$tmp/three"
says "have the same values" '^target_last_hidden_states: same$'
expect 1 "other shapes" dspark-manifest diff "$good" "$tmp/one"
says "are not compared" 'shapes differ'

# ---- who lives
mkfifo "$tmp/fifo"
make_cache "$tmp/live" plan=theirs wait=1 <"$tmp/fifo" >"$tmp/live.out" 2>&1 &
pid=$!
exec 9>"$tmp/fifo"
while ! grep -q open "$tmp/live.out"; do kill -0 $pid 2>/dev/null || break; sleep 0.1; done
check "the lock file names the plan" grep -q '^theirs$' "$tmp/live/.dspark.lock"
expect 1 "merge is refused while a rank lives" dspark-manifest merge "$tmp/live"
says "and names the plan" 'ranks of plan theirs'
expect 1 "another plan is refused" make_cache "$tmp/live" plan=ours
says "and names both" 'another plan, theirs (this one is ours)'
expect 0 "a rank of the same plan is not" make_cache "$tmp/live" plan=theirs rank=1
exec 9>&-
wait $pid
expect 0 "when they are gone merge works" dspark-manifest merge "$tmp/live"
check "the lock file is empty" test ! -s "$tmp/live/.dspark.lock"
check "same bytes" diff -r "$good" "$tmp/live"

# ---- kills: any shard, then any other plan
for n in 1 2 3; do
	make_cache "$tmp/kill" plan=first die=$n >/dev/null 2>&1
	check "killed in shard $n: a temporary is left" sh -c "ls -A '$tmp/kill' | grep -q '\\.tmp\\.'"
	expect 0 "it is written by another plan" make_cache "$tmp/kill" plan=second rank=7
	check "no temporary is left" sh -c "! ls -A '$tmp/kill' | grep -q '\\.tmp\\.'"
	expect 0 "merge" dspark-manifest merge "$tmp/kill"
	check "same bytes" diff -r "$good" "$tmp/kill"
	rm -rf "$tmp/kill"
done

# ---- a disk that fills up. In a mount of our own, where that is allowed.
if unshare -rm true 2>/dev/null; then ns="unshare -rm"; else ns="unshare -m"; fi
cat >"$tmp/full.sh" <<END
mkdir -p '$tmp/disk' && mount -t tmpfs -o size=1m none '$tmp/disk' || exit 77
'$make' '$tmp/disk/c' rows=40 seq=64 shard=4 hidden=128 ids=3 vocab=50; echo "status \$?"
ls -A '$tmp/disk/c'
dspark-manifest merge '$tmp/disk/c'; echo "merge \$?"
mount -o remount,size=64m '$tmp/disk' || exit 77
'$make' '$tmp/disk/c' rows=40 seq=64 shard=4 hidden=128 ids=3 vocab=50; echo "resumed \$?"
dspark-manifest merge '$tmp/disk/c' && dspark-manifest verify '$tmp/disk/c'
END
$ns sh "$tmp/full.sh" >"$tmp/out" 2>"$tmp/err"
status=$?
if [ $status -eq 77 ] || ! $ns true 2>/dev/null; then
	skip "a full disk" "no mount of our own here"
else
	says "a full disk fails with 3" '^status 3$'
	says "and says so" 'No space left on device'
	check "no temporary is left" sh -c "! grep -q '\\.tmp\\.' '$tmp/out'"
	says "it is not complete" '^merge 1$'
	says "with space the same command goes on" '^resumed 0$'
	says "and the cache is good" 'complete and good: 40 rows, 10 shards'
fi
if [ -e /dev/full ]; then
	for command in "merge $good" "verify $good" "show $good" "diff $good $good"; do
		# shellcheck disable=SC2086
		dspark-manifest $command >/dev/full 2>"$tmp/err"
		check "/dev/full: ${command%% *}" test $? -eq 3
	done
fi

# ---- command lines and directories
expect 2 "nothing to do" dspark-manifest
expect 2 "an unknown command" dspark-manifest mend "$good"
expect 2 "verify without directory" dspark-manifest verify
expect 2 "show with two" dspark-manifest show "$good" "$good"
expect 2 "diff with one" dspark-manifest diff "$good"
expect 2 "merge with two" dspark-manifest merge "$good" "$good"
expect 2 "an option of another command" dspark-manifest merge --logits "$good"
expect 2 "another one" dspark-manifest verify --stats "$good"
expect 1 "a run without plan" dspark-manifest merge
for command in merge verify show; do
	expect 1 "$command: a directory that is not there" dspark-manifest $command "$tmp/nowhere"
	mkdir -p "$tmp/bare"
	expect 1 "$command: a directory without cache" dspark-manifest $command "$tmp/bare"
	check "$command: nothing is added to it" test -z "$(ls -A "$tmp/bare")"
	expect 1 "$command: a file" dspark-manifest $command "$good/$s"
done
if [ "$(id -u)" -ne 0 ]; then
	cp -R "$good" "$tmp/closed"
	chmod a-w "$tmp/closed"
	expect 1 "a directory that cannot be written" make_cache "$tmp/closed/sub"
	chmod u+w "$tmp/closed"
fi

# ---- the reference's own caches
for case in "$top_srcdir"/tests/data/golden/*/ "${GOLDEN:-/nonexistent}"/*/; do
	case=${case%/}
	[ -f "$case/expected/target_weights.safetensors" ] || continue
	name=$(basename "$case")
	expect 0 "$name: verify" dspark-manifest verify --logits "$case/expected"
	expect 0 "$name: written by us" "$make" "$tmp/ours" "from=$case/expected" "tokens=$case/tokens.safetensors"
	expect 0 "$name: merge" dspark-manifest merge "$tmp/ours"
	check "$name: manifest.json byte for byte" cmp "$case/expected/manifest.json" "$tmp/ours/manifest.json"
	expect 0 "$name: verify ours" dspark-manifest verify "$tmp/ours"
	expect 0 "$name: no difference" dspark-manifest diff "$tmp/ours" "$case/expected"
	rm -rf "$tmp/ours"
done
done_testing
