#!/bin/sh
# The codec on a GPU, in less than five minutes: the tests of gpu/ (on the host twin, and on a CUDA device where there
# is one), then gpu_codec_bench, whose first lines say what it measures. Prints one JSON object; exit code 0 where all
# that can be checked here holds, a device or none.
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${KVTRIE_BUILD:-$root/build/release}
if [ "$1" = --help ]; then
  sed -n '1,/^#include/{/^#include/!p}' "$root/tests/bench/gpu_codec_bench.cc"
  exit 0
fi
[ -f "$build/build.ninja" ] || cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
ninja -C "$build" --quiet gpu_tests gpu_codec_bench >&2
tests=true
ctest --test-dir "$build" -L '^gpu$' --output-on-failure --no-tests=error >&2 || tests=false
status=0
bench=$("$build/tests/bench/gpu_codec_bench" "$@") || status=$?
printf '{"tests_passed": %s, "bench": %s}\n' "$tests" "${bench:-null}"
[ "$tests" = true ] && exit "$status"
exit 1
