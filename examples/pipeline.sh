#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# From a recipe to a complete cache in one pipe:
#
#	cd quickstart && sh ../pipeline.sh [RECIPE [WORLD]]
#
# Set LAUNCHER for more than one rank where `mpirun -n WORLD` is not the right word. Run it again
# after an interruption: shards that are published are left out. For a run of hours use files in
# place of the pipe (Makefile, slurm.sbatch).

set -eu

recipe=${1:-recipe.yaml}
world=${2:-1}
tokens=${TOKENS:-tokens.safetensors}

if [ "$world" -gt 1 ]; then
	launcher=${LAUNCHER:-mpirun -n $world}
else
	launcher=${LAUNCHER:-}
fi

# tokens that do not belong to the recipe are refused by dspark-plan; remove the file to make it
# anew
if [ ! -e "$tokens" ]; then
	dspark-tokenize -c "$recipe" -o "$tokens"
fi

# The status of a pipe is that of its last command. That is enough: a run that lost its plan, a
# range, its stage or a shard is refused by whoever comes next, so the last one succeeds only if all
# did.
# shellcheck disable=SC2086 # the launcher is a command and its arguments
dspark-plan -c "$recipe" -t "$tokens" --world "$world" | dspark-load |
	$launcher dspark-forward | dspark-manifest merge
