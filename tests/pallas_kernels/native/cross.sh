#!/usr/bin/env bash
# Compiles every native kernel for 64-bit Arm and runs the drivers of products, attention and the pool there, emulated
# (Debian: g++-aarch64-linux-gnu and qemu-user); their results must be those of this machine's plain level.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
native=pallas_kernels/native drivers=tests/pallas_kernels/native
cross=${CROSS_CXX:-aarch64-linux-gnu-g++} emulator=${EMULATOR:-qemu-aarch64 -L /usr/aarch64-linux-gnu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
headers=$(${PYTHON:-.venv/bin/python} -c 'from pallas_kernels.native import build; print(build.headers())')

# build COMPILER PREFIX: the kernels at the plain level, and the drivers PREFIX-gemm, PREFIX-attention and PREFIX-pool.
build() {
  local cxx=$1 out=$work/$2
  local flags=(-std=c++17 -O2 -Wall -Wextra -fno-math-errno -pthread "-I$native" -isystem "$headers" -DPAGEDJAX_LEVEL=plain)
  mkdir -p "$out"
  for source in "$native"/*.cc; do
    local name=$(basename "$source" .cc) also=()
    [ "$name" = library ] && also=('-DPAGEDJAX_SOURCE_HASH=""' -Dcurrent_level=library_level)
    "$cxx" "${flags[@]}" "${also[@]}" -c "$source" -o "$out/$name.o"
  done
  for driver in gemm attention pool; do
    "$cxx" "${flags[@]}" "$drivers/${driver}_driver.cc" "$out"/{pool,library,peak_isa,gemm_isa}.o \
      "$out"/attention{,_isa,_plan,_write_isa}.o -o "$work/$2-$driver"
  done
}

build "$cross" arm
build "${CXX:-c++}" here
for driver in gemm attention; do
  "$work/here-$driver" | tee "$work/here.txt"
  $emulator "$work/arm-$driver" | tee "$work/arm.txt"
  cmp "$work/here.txt" "$work/arm.txt"
done
$emulator "$work/arm-pool" 2
echo 'Arm: every kernel compiled and ran as here'
