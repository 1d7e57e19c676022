#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dspark-precompute: from a recipe to a complete cache: tokenize, plan, load, forward, merge, with files between them.
#
# Commands are kept as text that eval understands, so that overrides and launcher survive with all their blanks, and so that
# --dry-run prints what would run. Each output appears under its name when its command has succeeded.
set -u
me=dspark-precompute
PATH=$(cd "$(dirname "$0")" && pwd):$PATH
export PATH

usage() {
	cat <<'END'
usage: dspark-precompute -c RECIPE [--set KEY=VALUE]... [-w DIR] [-n] [-- LAUNCHER...]

Runs dspark-tokenize, dspark-plan, dspark-load, dspark-forward and dspark-manifest merge one after the other. Started
again it goes on: tokens newer than recipe, data, template and tokenizer are kept, published shards are not computed again.
A tokens.safetensors that was put into DIR is used as it is.

  -c, --config RECIPE   the YAML recipe
      --set KEY=VALUE   override a key of the recipe; also --recipe_args.KEY VALUE
  -w DIR                where tokens.safetensors, plan, run and log go (default: the recipe's name, with .work for .yaml)
  -n, --dry-run         print the commands and run none
  -q, --quiet           only errors
  -v, --verbose         say more, and print each command before it runs
  -h, --help            show this help
  -V, --version         show the version

LAUNCHER is put in front of dspark-forward, as in: -- mpirun -n 4. The plan is made for as many ranks as it starts.
Exit status: that of the command that failed; 0 done, 1 refused, 2 usage, 3 failed (try again).
END
}

misuse() {
	printf '%s: %s\n' "$me" "$*" >&2
	printf "Try '%s --help' for more information.\n" "$me" >&2
	exit 2
}

failed() {
	printf '%s: %s\n' "$me" "$*" >&2
	exit 3
}

# A word as the shell reads it again.
quote() {
	case $1 in
	'' | *[!A-Za-z0-9_./:=,@%+-]*) printf '%s' "$1" | sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/" ;;
	*) printf '%s' "$1" ;;
	esac
}

# Keys that only say where the work goes leave the tokens as they are.
override() {
	sets="$sets --set $(quote "$1")"
	case $1 in
	recipe_args.cache_* | distributed.* | dist_env.*) ;;
	*) made_from="$made_from --set $(quote "$1")" ;;
	esac
}

# step OUTPUT COMMAND: a command whose output is a file; with OUTPUT - it is ours.
step() {
	if [ -n "$dry" ]; then
		if [ "$1" = - ]; then printf '%s\n' "$2"; else printf '%s >%s\n' "$2" "$(quote "$1")"; fi || exit 3
		return
	fi
	if [ "$flags" = ' -v' ]; then printf '%s: %s\n' "$me" "$2" >&2; fi
	if [ "$1" = - ]; then eval "exec $2" & else eval "exec $2" >"$1.new" & fi
	child=$!
	wait "$child"
	status=$?
	child=
	[ "$status" -le 3 ] || status=3
	if [ "$1" != - ]; then
		if [ "$status" -eq 0 ]; then mv "$1.new" "$1" || exit 3; else rm -f "$1.new"; fi
	fi
	[ "$status" -eq 0 ] || exit "$status"
}

# Values of members of the estimate, one a line without quotes: strings, or the strings of a list.
members() {
	grep -oE "\"($1)\":(\\[[^]]*\\]|\"([^\"\\\\]|\\\\.)*\")" "$work/estimate" | sed -E 's/^"[a-z_]*"://' |
		grep -oE '"([^"\\]|\\.)*"' | sed -E 's/^"(.*)"$/\1/; s/\\(["\\\/])/\1/g'
}

# The files that the tokens are made of, as far as they are files. The last target is the directory.
sources() {
	printf '%s\n' "$recipe"
	members 'train_data_path|chat_template'
	target=$(members 'target|target_dir' | tail -n 1)
	[ -z "$target" ] || printf '%s\n' "$target"/*token* "$target"/chat_template* "$target"/vocab* "$target"/merges*
}

# The tokens were made from the same recipe and overrides, after the last change of everything they are made of.
fresh() {
	[ -e "$tokens" ] && [ "$(cat "$work/tokens.from")" = "$made_from" ] &&
		[ -z "$(sources | while IFS= read -r file; do [ ! -e "$file" ] || find -L "$file" -newer "$tokens"; done)" ]
}

recipe='' work='' dry='' flags='' sets='' made_from='' launcher='' child=''
while [ $# -gt 0 ]; do
	case $1 in
	-c | --config | --set | -w) [ $# -gt 1 ] || misuse "option '$1' needs an argument" ;;
	esac
	case $1 in
	-c | --config) recipe=$2 && shift ;;
	--config=*) recipe=${1#*=} ;;
	--set) override "$2" && shift ;;
	--set=*) override "${1#*=}" ;;
	-w) work=$2 && shift ;;
	-n | --dry-run) dry=yes ;;
	-q | --quiet) flags=' -q' ;;
	-v | --verbose) flags=' -v' ;;
	-h | --help)
		usage || failed "standard output: cannot write"
		exit 0
		;;
	-V | --version)
		printf '%s (dspark) %s\n' "$me" "@VERSION@" || failed "standard output: cannot write"
		exit 0
		;;
	--)
		shift
		for word; do launcher="$launcher$(quote "$word") "; done
		break
		;;
	-c?*) recipe=${1#-c} ;;
	-w?*) work=${1#-w} ;;
	--*=*) case ${1%%=*} in *.*) override "${1#--}" ;; *) misuse "unknown option '$1'" ;; esac ;;
	--*.*)
		case ${2---} in
		--*) override "${1#--}=True" ;;
		*) override "${1#--}=$2" && shift ;;
		esac
		;;
	-*) misuse "unknown option '$1'" ;;
	*) misuse "unexpected argument '$1'" ;;
	esac
	shift
done
[ -n "$recipe" ] || misuse "no recipe: name it with -c"
if [ -z "$work" ]; then
	work=${recipe##*/}
	work=${work%.yaml}.work
fi
case $work in /* | ./*) ;; *) work=./$work ;; esac
tokens=$work/tokens.safetensors
config="-c $(quote "$recipe")$sets"
made_from="$(quote "$recipe")$made_from"
trap '[ -z "$child" ] || { kill "$child"; wait "$child"; } 2>/dev/null; rm -f "$work"/*.new; exit 3' HUP INT TERM
if [ -z "$dry" ]; then mkdir -p "$work" || exit 3; fi

# Tokens that were put there are used as they are. Others may be old; then an estimate comes first, because what recipe or
# target are refused for is better said before the data is read.
if [ -n "$dry" ] || [ ! -e "$tokens" ] || [ -e "$work/tokens.from" ]; then
	step "$work/estimate" "dspark-plan$flags $config"
	if [ -n "$dry" ] || ! fresh; then
		step - "dspark-tokenize$flags $config -o $(quote "$tokens")"
		[ -n "$dry" ] || printf '%s\n' "$made_from" >"$work/tokens.from" || exit 3
	fi
fi
world=
if [ -n "$launcher" ] && [ -n "$dry" ]; then
	# shellcheck disable=SC2016 # printed, not run
	world=' --world $('$launcher"sh -c 'echo rank' | grep -c '^rank')"
elif [ -n "$launcher" ]; then
	ranks=$(eval "${launcher}sh -c 'echo rank'" </dev/null | grep -c '^rank') || failed "the launcher started no rank: $launcher"
	world=" --world $ranks"
fi
forward=$([ -n "$dry" ] || command -v dspark-forward) || failed "dspark-forward is neither beside $me nor in PATH"
step "$work/plan" "dspark-plan$flags $config -t $(quote "$tokens")$world"
step "$work/run" "dspark-load$flags $(quote "$work/plan")"
step "$work/log" "$launcher$(quote "${forward:-dspark-forward}")$flags $(quote "$work/run")"
step - "dspark-manifest merge$flags <$(quote "$work/log")"
