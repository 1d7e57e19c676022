#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The golden cases by the kernels of CUDA, which tests/cuda/dspark-forward runs on the host.
if [ ! -x "${top_builddir:?run it by make check}/tests/cuda/dspark-forward" ]; then
	echo "ok 1 - golden cases by the kernels of CUDA # SKIP this build has no C++17 compiler to run them on the host"
	echo "1..1"
	exit 0
fi
if [ -n "${DSPARK_TEST_QUICK-}" ]; then
	echo "ok 1 - golden cases by the kernels of CUDA # SKIP DSPARK_TEST_QUICK"
	echo "1..1"
	exit 0
fi
# Those of the source tree: on the host kernels take their time.
unset GOLDEN
DSPARK_DEVICE=cuda
PATH=$top_builddir/tests/cuda:$PATH
export DSPARK_DEVICE PATH
exec sh "${top_srcdir:?}/tests/golden.t"
