#!/bin/sh
# Side-by-side benchmark of kvtrie and what could be used instead, all on loopback: see --help.
exec python3 -B "$(dirname "$0")/peers/run.py" "$@"
