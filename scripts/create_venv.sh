#!/bin/sh
# Make the virtual environment, with pip, where there is none yet.
# Debian ships Python without venv; as root we add it, otherwise we say what to type.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "error: '$python' is not Python 3.10 or newer" >&2
    echo "  hint: install one, and name it: PYTHON=/path/to/python3.11 make ..." >&2
    exit 2
fi
if [ ! -x .venv/bin/pip ]; then
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            apt-get update -qq && apt-get install -y -qq python3-venv
        else
            echo "error: this Python cannot make virtual environments" >&2
            echo "  hint: sudo apt-get install python3-venv" >&2
            exit 2
        fi
    fi
    "$python" -m venv .venv
fi
