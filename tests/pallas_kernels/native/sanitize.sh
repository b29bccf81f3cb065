#!/usr/bin/env bash
# Builds the native kernels with AddressSanitizer and UBSan, and the pool with ThreadSanitizer, and runs their drivers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
native=pallas_kernels/native drivers=tests/pallas_kernels/native
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cxx=${CXX:-c++}
flags=(-std=c++17 -O1 -g -pthread "-I$native")
address=("${flags[@]}" -fsanitize=address,undefined -fno-sanitize-recover=all)

levels=(plain)
declare -A isa=([plain]='')
if [ "$(uname -m)" = x86_64 ]; then
  isa[avx2]='-mavx2 -mfma -mf16c'
  isa[avx512]="${isa[avx2]} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni"
  isa[avx512_bf16]="${isa[avx512]} -mavx512bf16"
  levels=(plain avx2 avx512 avx512_bf16)
fi
have=()
for level in "${levels[@]}"; do
  compilers=()
  for kernel in gemm peak attention attention_write; do
    "$cxx" "${address[@]}" ${isa[$level]} "-DPAGEDJAX_LEVEL=$level" -c "$native/${kernel}_isa.cc" -o "$work/$kernel-$level.o" &
    compilers+=($!)
  done
  for compiler in "${compilers[@]}"; do wait "$compiler"; done
  [ "$level" = plain ] || have+=("-DPAGEDJAX_HAS_${level^^}")
done

# `best_level` is in library.cc, and what attention's scratch takes in attention.cc, which need the headers inside jaxlib;
# the drivers bring a `current_level` of their own.
headers=$(${PYTHON:-.venv/bin/python} -c 'from pallas_kernels.native import build; print(build.headers())')
"$cxx" "${address[@]}" "${have[@]}" '-DPAGEDJAX_SOURCE_HASH=""' -isystem "$headers" -Dcurrent_level=library_level \
  -c "$native/library.cc" -o "$work/library.o"
"$cxx" "${address[@]}" "${have[@]}" "$drivers/gemm_driver.cc" "$native/pool.cc" "$work"/{gemm,peak}-*.o "$work/library.o" \
  -o "$work/gemm"
"$work/gemm"

"$cxx" "${address[@]}" "${have[@]}" -isystem "$headers" -c "$native/attention.cc" -o "$work/attention_handler.o"
"$cxx" "${address[@]}" "${have[@]}" "$drivers/attention_driver.cc" "$native/attention_plan.cc" "$native/pool.cc" \
  "$work"/{attention,attention_write,peak}-*.o "$work"/{attention_handler,library}.o -o "$work/attention"
"$work/attention"

"$cxx" "${address[@]}" "$drivers/pool_driver.cc" "$native/pool.cc" -o "$work/pool"
"$work/pool" 4
"$cxx" "${flags[@]}" -fsanitize=thread "$drivers/pool_driver.cc" "$native/pool.cc" -o "$work/pool_threads"
"$work/pool_threads" 4
