#!/bin/sh
# What coding KV costs beside computing it again, on paper and held against this CPU: see --help.
python=${KVTRIE_CACHE:-$HOME/.cache/kvtrie}/venv/bin/python
[ -x "$python" ] || { echo "no $python: run deploy/packages/install.sh" >&2; exit 1; }
exec "$python" -B "$(dirname "$0")/costs/costs.py" "$@"
