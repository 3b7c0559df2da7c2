#!/bin/sh
# usage: fuzz.sh [SECONDS]: build the kernels of this machine with ASan and UBSan, and feed them garbage.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-O1 -g -std=c++17 -fsanitize=address,undefined -fno-sanitize=alignment -fno-sanitize-recover=all -I$here/../src"
cxx=${CXX:-c++}
defines=
for unit in avx2:"-mavx2 -mfma -mf16c" avx512:"-march=x86-64-v4" avx512_bf16:"-march=x86-64-v4 -mavx512bf16"; do
  name=${unit%%:*}
  $cxx $flags ${unit#*:} -c "$here/../src/isa_$name.cc" -o "$work/$name.o"
  defines="$defines -DJATTN_HAVE_$(echo "$name" | tr a-z A-Z)"
done
$cxx $flags $defines "$here/fuzz.cc" "$work"/*.o -o "$work/fuzz"
"$work/fuzz" "${1:-10}"
