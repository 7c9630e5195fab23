#!/usr/bin/env bash
# What a worker costs beside the codec in the caller's own process: blocks of 64 tokens of an 8B model's shape, on the
# same two cores, all copies and gRPC included. Prints JSON.
#
#   worker.sh [FLAGS OF worker_bench]
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${KVTRIE_BUILD:-build/release}
if [[ ! -x $build/tests/bench/worker_bench || ! -x $build/kvtrie-worker ]]; then
  echo "worker.sh: build worker_bench and kvtrie-worker first: bash tests/run.sh --stage build-release" >&2
  exit 1
fi
exec "$build/tests/bench/worker_bench" --worker "$build/kvtrie-worker" "$@"
