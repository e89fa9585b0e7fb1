#!/bin/sh
# `make demo`: install what a training needs, train a toy on two processes, and draw it.
# Every phase is a line with the seconds since the start. What the installer says is in a log.
set -eu
cd "$(dirname "$0")/.."
log=.venv/install.log
failed=.venv/install.failed
started=$(date +%s)

say() { printf '%5d s  %s\n' "$(($(date +%s) - started))" "$1"; }

is_installed() { # the environment of the tests has what the demo needs
    for marker in .venv/.ready .venv/.ready-demo; do
        if [ "$marker" -nt pyproject.toml ] && [ "$marker" -nt constraints.txt ]; then
            return 0
        fi
    done
    return 1
}

install_package() { # without extras: no test tools, no optional trackers
    if command -v uv >/dev/null; then
        .venv/bin/python scripts/uv_install.py --constraint constraints.txt --editable .
    else
        .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-compile \
            --constraint constraints.txt --editable .
    fi
}

report_progress() { # the lines of pip and uv that say how far they are
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$log"
        case $line in
        *Downloading*[MG]B\) | *Downloading*[MG]iB\)) say "  d${line#*D}" ;;
        Resolved* | Prepared* | Installed*) say "  $line" ;;
        Installing\ collected*) say "  unpacking $(($(printf %s "$line" | tr -cd , | wc -c) + 1)) packages" ;;
        esac
    done
}

if ! is_installed; then
    say "making a virtual environment in .venv"
    scripts/create_venv.sh
    say "installing torch and what else a training needs with $(command -v uv >/dev/null && echo uv || echo pip)"
    rm -f "$log" "$failed"
    { install_package || touch "$failed"; } 2>&1 | report_progress
    if [ -e "$failed" ]; then
        tail -n 20 "$log" >&2
        echo "error: the packages could not be installed; all that was said is in $log" >&2
        echo "  hint: check the network and pip's settings, then type make demo again" >&2
        exit 1
    fi
    touch .venv/.ready-demo
fi

number=1
while [ -e "runs/demo-$number" ]; do number=$((number + 1)); done
run=demo-$number
say "training a toy on two processes"
.venv/bin/echelon train run.name="$run" launch=local launch.procs=2 hidden=64 samples=8192 trainer.epochs=6
say "drawing its curves"
.venv/bin/echelon show "$run"
page=$(.venv/bin/echelon plot "$run" -o "runs/$run/curves.html")
say "done"
echo "  picture   $page  (one file, for any browser)"
echo "  here      . .venv/bin/activate  puts echelon on the PATH"
