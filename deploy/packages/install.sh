#!/usr/bin/env bash
# Installs what debian.txt and pypi.txt list: Debian packages on the system (as root), Python packages in a virtual
# environment, ${KVTRIE_CACHE:-~/.cache/kvtrie}/venv. What is there already costs no network.
set -euo pipefail
export LC_ALL=C.UTF-8

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${KVTRIE_CACHE:-$HOME/.cache/kvtrie}
mkdir -p "$cache"
exec 9>"$cache/install.lock"
flock 9

lines_of() { sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$1"; }

install_debian() {
  local wanted installed missing
  wanted=$(lines_of "$folder/debian.txt" | sort -u)
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p' | sort -u)
  missing=$(comm -23 <(echo "$wanted") <(echo "$installed"))
  [ -n "$missing" ] || return 0
  echo "Debian packages to install:" $missing
  if [ "$(id -u)" -ne 0 ]; then
    echo "That needs root. Run as root: apt-get install" $missing >&2
    return 1
  fi
  export DEBIAN_FRONTEND=noninteractive
  # $missing holds one name per line: unquoted on purpose.
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 $missing >"$cache/apt.log" 2>&1 ||
    { tail -20 "$cache/apt.log" >&2; return 1; }
}

# The environment is made anew whenever the list or the interpreter changes, or an earlier attempt stopped half-way.
install_python() {
  local venv=$cache/venv python=/usr/bin/python3 wanted
  wanted=$("$python" --version; lines_of "$folder/pypi.txt")
  [ "$(cat "$venv/complete" 2>/dev/null || true)" != "$wanted" ] || return 0
  echo "Python packages to install: $(lines_of "$folder/pypi.txt" | wc -l), into $venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps \
    -r "$folder/pypi.txt"
  echo "$wanted" >"$venv/complete"
}

install_debian
install_python
