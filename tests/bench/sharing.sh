#!/bin/sh
# What sessions take that share prefixes, documents and a codec, in a real server with a real model's KV: see --help.
python=${KVTRIE_CACHE:-$HOME/.cache/kvtrie}/venv/bin/python
[ -x "$python" ] || { echo "no $python: run deploy/packages/install.sh" >&2; exit 1; }
exec "$python" -B "$(dirname "$0")/sharing/sharing.py" "$@"
