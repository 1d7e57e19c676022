#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What a compiler does not say: line length, licence lines, and which way includes go.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

cd "$top_srcdir" || exit 99
# shellcheck disable=SC2046 # names without blanks
set -- $(find libcommon kernels tools tests \( -name '*.c' -o -name '*.h' \) -print)

# none PATTERN FILE...: no line of the files matches; those that do are shown
none() {
	pattern=$1
	shift
	! grep -nE -e "$pattern" "$@" /dev/null
}

columns() {
	for file; do
		expand "$file" | awk -v file="$file" 'length($0) > 100 { print file ":" FNR ": " length($0) " columns" }'
	done >"$tmp/long"
	cat "$tmp/long"
	[ ! -s "$tmp/long" ]
}

licence() {
	for file; do
		head -n 1 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || echo "$file"
	done >"$tmp/bare"
	cat "$tmp/bare"
	[ ! -s "$tmp/bare" ]
}

check "no line of C is longer than 100 columns" columns "$@"
check "every C file begins with its licence" licence "$@"
check "libcommon includes no device, rank or kernel header" \
	none '^#[[:space:]]*include[[:space:]]*[<"](mpi|nccl|cuda|dnnl|oneapi|omp|immintrin|kernels|session|ref/|cpu)' libcommon/*.[ch] libcommon/models/*.c
check "tools include no device or rank header" \
	none '^#[[:space:]]*include[[:space:]]*[<"](mpi|nccl|cuda|dnnl|oneapi|omp|immintrin|ref/|cpu)' tools/*.c
# What is listed twice is built into two libraries, or where its library is missing.
once() {
	sed -nE 's,^[[:blank:]]+((libcommon|kernels)/[a-z0-9_/]+\.c).*,\1,p' Makefile.am | sort | uniq -d >"$tmp/twice"
	cat "$tmp/twice"
	[ ! -s "$tmp/twice" ]
}

check "Makefile.am names every source once" once
check "nothing asks for the locale" none 'setlocale|newlocale' libcommon/*.[ch] libcommon/models/*.c kernels/*.[ch] kernels/*/*.[ch] tools/*.c
# the names of other people's libraries are theirs
# shellcheck disable=SC2046
check "no struct hides behind a typedef" none '^typedef (struct|union|enum)' $(printf '%s\n' "$@" | grep -v '^tests/cuda/include/')
done_testing
