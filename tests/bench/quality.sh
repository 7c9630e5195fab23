#!/bin/sh
# How well KV codecs keep a real model's cache, beside what others do: see --help.
python=${KVTRIE_CACHE:-$HOME/.cache/kvtrie}/venv/bin/python
[ -x "$python" ] || { echo "no $python: run deploy/packages/install.sh" >&2; exit 1; }
exec "$python" -B "$(dirname "$0")/quality/run.py" "$@"
