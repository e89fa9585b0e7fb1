#!/bin/sh
# Make the virtual environment and install the package with the named extras.
set -eu
cd "$(dirname "$0")/.."
scripts/create_venv.sh
.venv/bin/python -m pip install --disable-pip-version-check --quiet \
    --constraint constraints.txt --editable ".[$1]"
