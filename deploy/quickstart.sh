#!/usr/bin/env bash
# From a fresh Debian 12 to a real model's KV cache that went through the server and came back: installs, builds,
# runs the main job (tests/model/main_job.py), and ends in a table, a picture and the numbers as one JSON object.
set -euo pipefail
export LC_ALL=C.UTF-8

usage() {
  cat <<'EOF'
Usage: deploy/quickstart.sh [--quick] [--json FILE] [--png FILE]

--quick  6 chat sessions instead of 24
--json   also write the numbers there, with those of each session
--png    where the picture goes (default build/quickstart.png)
EOF
}

called_from=$PWD
absolute() { case $1 in /*) echo "$1" ;; *) echo "$called_from/$1" ;; esac; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
png=$root/build/quickstart.png
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) arguments+=(--quick) ;;
    --json) arguments+=(--json "$(absolute "${2:?--json needs a file}")"); shift ;;
    --png) png=$(absolute "${2:?--png needs a file}"); shift ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift
done

cd "$root"
export KVTRIE_CACHE=${KVTRIE_CACHE:-$HOME/.cache/kvtrie}
export CCACHE_DIR=$KVTRIE_CACHE/ccache CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1

echo "== 1/3 packages"
bash deploy/packages/install.sh

echo "== 2/3 build (the first time some minutes)"
mkdir -p build "$CCACHE_DIR"
cmake -S . -B build/release -G Ninja -DCMAKE_BUILD_TYPE=Release >build/release.configure.log 2>&1 ||
  { tail -30 build/release.configure.log >&2; exit 1; }
ninja -C build/release -j "${KV_JOBS:-$(nproc)}" kvtrie-server kvtrie

echo "== 3/3 main job"
exec env KVTRIE_BUILD="$root/build/release" "$KVTRIE_CACHE/venv/bin/python" tests/model/main_job.py \
  --png "$png" "${arguments[@]}"
