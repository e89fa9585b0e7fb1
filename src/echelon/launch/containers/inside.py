"""The first program inside a container: it looks whether Python there can run Echelon, and runs it.

It is started by its path, as `python3 inside.py [-P] [-u] -m MODULE WORDS`, where the options mean
what they mean for Python itself. That Python may be old or lack everything, so only the standard
library is imported, and nothing is written that Python 3.7 does not know.
"""

from __future__ import annotations

import os
import sys

NEEDED = (
    ("torch", "torch"),
    ("numpy", "numpy"),
    ("hydra", "hydra-core"),
    ("omegaconf", "omegaconf"),
    ("torchmetrics", "torchmetrics"),
    ("rich", "rich"),
    ("psutil", "psutil"),
    ("xxhash", "xxhash"),
    ("packaging", "packaging"),
    ("yaml", "pyyaml"),
)
"""Modules and what pip calls them: the dependencies in pyproject.toml."""
OLDEST_PYTHON = (3, 10)
NOT_READY = 8
"""echelon.errors.ExitCode.NOT_READY"""


def find_fault() -> tuple[str, str] | None:
    """Return what keeps Echelon from running here and what to do about it, or None."""
    if sys.version_info < OLDEST_PYTHON:
        version, oldest = sys.version.split()[0], ".".join(map(str, OLDEST_PYTHON))
        return (
            f"the Python of the image is {version} ({sys.executable})",
            f"Echelon needs {oldest} or newer: launch.container_python=PATH names another one",
        )
    from importlib.util import find_spec

    needed = [*NEEDED, *([("tomli", "tomli")] if sys.version_info < (3, 11) else [])]
    missing = [package for module, package in needed if find_spec(module) is None]
    if not missing:
        return None
    return (
        f"the Python of the image ({sys.executable}) lacks {', '.join(missing)}",
        f"`pip install {' '.join(missing)}` when the image is built, as `echelon env build "
        "--container` does, or name another Python of it: launch.container_python=PATH",
    )


def main() -> int:
    """Check, then do what `python [-P] [-u] -m MODULE WORDS` does."""
    # The folder of this file has others that are named like modules.
    sys.path.pop(0)
    fault = find_fault()
    if fault is not None:
        sys.stderr.write(f"error: {fault[0]}\n  hint: {fault[1]}\n")
        return NOT_READY
    start = sys.argv.index("-m")
    options, words = sys.argv[1:start], sys.argv[start + 1 :]
    if "-u" in options:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "-P" not in options:
        sys.path.insert(0, os.getcwd())
    import runpy

    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
