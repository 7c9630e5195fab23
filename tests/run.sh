#!/usr/bin/env bash
# Installs what is needed, builds, and runs the tests. See usage below.
set -uo pipefail
export LC_ALL=C.UTF-8

usage() {
  cat <<'EOF'
Usage: tests/run.sh [--all] [--stage NAME]... [--list]

Without arguments: install, build-release, test-release, build-asan, test-asan, test-model, test-python.
--all adds what takes long: build-tsan, test-tsan, fuzz, crash, peers, sharing.
--stage runs that stage alone (may be repeated); the builds it stands on must be there.

Ends in a table of times, why tests were skipped, and the line 'N passed, N failed, N skipped' over everything.
Exit code 0 when nothing failed and each test stage ran something.

Environment: KVTRIE_CACHE  packages, model and compiler cache (default ~/.cache/kvtrie)
             KV_JOBS       compiler processes (default: the cores)
             KV_FUZZ_SECONDS per libFuzzer target (default 120), KV_CRASH_ROUNDS of each crash loop (default 1000)
EOF
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2
export KVTRIE_CACHE=${KVTRIE_CACHE:-$HOME/.cache/kvtrie}
export CCACHE_DIR=$KVTRIE_CACHE/ccache CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-5G}
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1  # a clone elsewhere uses what this one compiled
jobs=${KV_JOBS:-$(nproc)}
python=$KVTRIE_CACHE/venv/bin/python
results=$root/build/results

plain_stages=(install build-release test-release build-asan test-asan test-model test-python)
long_stages=(build-tsan test-tsan fuzz crash peers sharing)

# build_in NAME TARGET CMAKE_ARGUMENTS...
build_in() {
  local name=$1 target=$2
  shift 2
  cmake -S . -B "build/$name" -G Ninja "$@" >"build/$name.configure.log" 2>&1 ||
    { tail -30 "build/$name.configure.log"; return 1; }
  ninja -C "build/$name" -j "$jobs" -k 20 --quiet "$target"
}

# ctest_in BUILD_NAME RESULT_NAME CTEST_ARGUMENTS...
ctest_in() {
  local build=$1 result=$2
  shift 2
  # Only what did not pass is printed.
  ctest --test-dir "build/$build" -j "$jobs" --output-on-failure --no-tests=error \
    --output-junit "$results/$result.xml" "$@" 2>&1 | grep -vE '^ +Start +[0-9]+:| Passed +[0-9.]+ sec$'
}

stage_install() { bash deploy/packages/install.sh; }

stage_build_release() { build_in release all -DCMAKE_BUILD_TYPE=Release; }
stage_test_release() { ctest_in release release --timeout 300; }

# Debug keeps the costly checks of our own beliefs; with -Og the sanitized build compiles in half the time of -O1.
stage_build_asan() {
  build_in asan all -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-Og -g1" -DKV_SANITIZE=address,undefined
}
stage_test_asan() {
  UBSAN_OPTIONS=print_stacktrace=1 ctest_in asan asan --timeout 600
}

stage_test_model() {
  "$python" -m pytest tests/model tests/bench/quality tests/bench/sharing tests/bench/costs -q -p no:cacheprovider -rs --junitxml "$results/model.xml"
}

# By itself: the stubs that tests of the model generate are a package kvtrie too.
stage_test_python() {
  "$python" -m pytest tests/client/python -q -p no:cacheprovider -rs --junitxml "$results/python.xml"
}

stage_build_tsan() {
  build_in tsan all -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-Og -g1" -DKV_SANITIZE=thread
}
stage_test_tsan() {
  local suppressions=$root/tests/tsan-suppressions options=history_size=4
  [ ! -f "$suppressions" ] || options="$options suppressions=$suppressions"
  TSAN_OPTIONS=$options ctest_in tsan tsan --timeout 1200
}

stage_fuzz() {
  local target name failed=0 seconds=${KV_FUZZ_SECONDS:-120}
  CXX=clang++ build_in fuzz fuzzers -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DKV_FUZZERS=ON \
    -DKV_SANITIZE=address,undefined,fuzzer-no-link || return 1
  for target in build/fuzz/tests/fuzz/*_fuzz; do
    [ -x "$target" ] || continue
    name=$(basename "$target" _fuzz)
    mkdir -p "build/fuzz/corpus/$name" "build/fuzz/findings"
    # New inputs go to the first folder; the committed corpus is only read.
    if "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=4096 -print_final_stats=1 \
      -artifact_prefix="build/fuzz/findings/$name-" "build/fuzz/corpus/$name" "tests/fuzz/corpus/$name" \
      >"build/fuzz/$name.log" 2>&1; then
      echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "build/fuzz/$name.log") inputs"
      record fuzz "$name" passed
    else
      tail -40 "build/fuzz/$name.log"
      record fuzz "$name" failed
      failed=1
    fi
  done
  return $failed
}

# The tests that kill a process or cut a disk off, and the model-based ones, with many more rounds.
stage_crash() {
  local rounds=${KV_CRASH_ROUNDS:-1000}
  KV_TEST_ROUNDS=$rounds KV_CRASH_CYCLES=$rounds KV_FLIPS=200 \
    ctest_in release crash -R '[Cc]rash|[Kk]ill|[Mm]odel|[Ff]lip' --timeout 3600
}

stage_peers() {
  bash tests/bench/peers.sh --quick --json "$results/peers.jsonl" && record peers peers.sh passed ||
    { record peers peers.sh failed; return 1; }
}

stage_sharing() {
  bash tests/bench/sharing.sh --quick --json "$results/sharing.jsonl" && record sharing sharing.sh passed ||
    { record sharing sharing.sh failed; return 1; }
}

# record STAGE TEST passed|failed: a result of something that writes no JUnit file.
record() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$results/recorded.tsv"; }

# Sets cpu_seconds: user and system time of all children that have ended. `times` must run in this very shell.
read_cpu_seconds() {
  times >"$results/times"
  cpu_seconds=$(awk 'NR == 2 { gsub(/[ms]/, " "); printf "%d", $1 * 60 + $2 + $3 * 60 + $4 }' "$results/times")
}

run_stage() {
  local stage=$1 start=$SECONDS code=0 cpu_before
  read_cpu_seconds
  cpu_before=$cpu_seconds
  printf '\n== %s\n' "$stage"
  "stage_${stage//-/_}" </dev/null || code=$?
  read_cpu_seconds
  rows+=("$(printf '%-14s %7d %7d  %s' "$stage" $((SECONDS - start)) $((cpu_seconds - cpu_before)) \
    "$([ $code -eq 0 ] && echo ok || echo FAILED)")")
  [ $code -eq 0 ] || record "$stage" "exit code $code" stage-failed
}

wanted=("${plain_stages[@]}")
chosen=()
while [ $# -gt 0 ]; do
  case $1 in
    --all) wanted=("${plain_stages[@]}" "${long_stages[@]}") ;;
    --stage)
      [[ " ${plain_stages[*]} ${long_stages[*]} " == *" ${2:-} "* ]] || { usage >&2; exit 2; }
      chosen+=("$2")
      shift
      ;;
    --list) printf '%s\n' "${plain_stages[@]}" "${long_stages[@]}"; exit 0 ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift
done
[ ${#chosen[@]} -eq 0 ] || wanted=("${chosen[@]}")

rm -rf "$results"
mkdir -p "$results" "$CCACHE_DIR"
rows=()
for stage in "${wanted[@]}"; do
  run_stage "$stage"
done
ccache_line=$(ccache -s 2>/dev/null | sed -n 's/^ *Hits: */compiler cache hits: /p' | head -1)

printf '\n%-14s %7s %7s\n' "$(nproc) cores" 'wall s' 'CPU s'
printf '%s\n' "${rows[@]}" "$(printf '%-14s %7d %7d' total $SECONDS "$cpu_seconds")"
[ -z "$ccache_line" ] || echo "$ccache_line"
exec python3 tests/run_totals.py "$results" "${wanted[@]}"
