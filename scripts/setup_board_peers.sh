#!/bin/sh
# Make a virtual environment for each peer of the board, in .venv/board-peers. They cannot share
# ours: MLflow asks for an older pandas. One that cannot be had is left out of the benchmark.
set -eu
cd "$(dirname "$0")/.."
for peer in tensorboard==2.21.0 aim==3.29.1 mlflow==3.17.2 trackio==0.43.0; do
    folder=.venv/board-peers/${peer%%==*}
    [ "$(cat "$folder/.ready" 2>/dev/null)" = "$peer" ] && continue
    rm -rf "$folder"
    if .venv/bin/python -m venv "$folder" &&
        "$folder/bin/python" -m pip install --disable-pip-version-check --quiet "$peer"; then
        echo "$peer" > "$folder/.ready"
    else
        echo "warning: $peer cannot be installed; the board is measured without it" >&2
        rm -rf "$folder"
    fi
done
