#!/bin/sh
# Build an sdist, and from it a wheel, into dist/. The wheel shows that the sdist is complete.
set -eu
cd "$(dirname "$0")/.."
backend=$(mktemp -d)
trap 'rm -rf "$backend"' EXIT
pip="$PWD/.venv/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --target "$backend" 'setuptools>=77'
rm -rf dist build
PYTHONPATH=$backend .venv/bin/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null
PYTHONPATH=$backend $pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/echelon-*.tar.gz
rm -rf src/echelon.egg-info
ls -l dist
