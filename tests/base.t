#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The spellings and readers of libcommon against Python's own.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

cat=${top_builddir:-.}/tests/base_cat
if [ "$PYTHON" = : ] || [ ! -x "$cat" ]; then
	echo "1..0 # SKIP no Python, or tests/base_cat is not built"
	exit 0
fi
exec "$PYTHON" "$top_srcdir/tests/base_oracle.py" "$cat"
