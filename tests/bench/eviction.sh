#!/bin/sh
# What eviction keeps, beside other policies and the best that could be kept: replays traces of requests through the
# store and through caches of the same size. Arguments are those of eviction_bench (--help: its first lines); --json
# FILE adds a row per trace, footprint and policy. --traces DIR replays the *.jsonl files of a folder instead.
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${KVTRIE_BUILD:-$root/build/release}
if [ "$1" = --help ]; then
  sed -n '1,/^$/p' "$root/tests/bench/eviction/eviction_bench.cc"
  exit 0
fi
[ -f "$build/build.ninja" ] || cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
ninja -C "$build" --quiet eviction_bench
if [ "$1" = --traces ]; then
  [ -d "$2" ] || { echo "eviction.sh: --traces needs a folder with *.jsonl files" >&2; exit 2; }
  folder=$2
  shift 2
  for file in "$folder"/*.jsonl; do set -- --trace "$file" "$@"; done
fi
exec "$build/tests/bench/eviction_bench" "$@"
