"""Write docs/wheels.md: for which machines everything that Echelon installs has wheels.

It reads what is installed beside this Python (scripts/setup.sh dev), and asks pip where the wheel
that was chosen here needs a newer glibc than that of Rocky Linux 8.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).parents[1] / "docs/wheels.md"
OLDEST_GLIBC = (2, 28)
EXTRAS = ("", "movielens", "data", "cloud", "wandb", "tensorboard", "sweep", "board", "stacks")
EXTRAS += ("plot",)
LEGACY = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
HEAD = """\
# Wheels of all dependencies

Nothing that Echelon installs is compiled on your machine, and nothing needs root. This table is
made by `make wheel-tags` from the versions of [constraints.txt](../constraints.txt), on x86_64 and
Python {python}. A wheel for glibc 2.17 or 2.28 also installs on a newer one. Rocky Linux 8, RHEL 8
and their like have 2.28, Ubuntu 20.04 has 2.31. Python alone: the wheel has no compiled code.
antlr4-python3-runtime, which hydra-core needs, is published as source alone: pip makes its wheel,
for which it needs no compiler.

| package | version | needed by | glibc |
|---|---|---|---|
"""


def collect_needs() -> dict[str, set[str]]:
    """Return the extras of Echelon that need each package; `core` is every installation."""
    needs: dict[str, set[str]] = {}
    for extra in EXTRAS:
        waiting, seen = [("echelon", extra)], set()
        while waiting:
            name, of_extra = waiting.pop()
            if (name, of_extra) in seen:
                continue
            seen.add((name, of_extra))
            if name != "echelon":
                needs.setdefault(name, set()).add(extra or "core")
            for text in importlib.metadata.requires(name) or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": of_extra}):
                    inner = canonicalize_name(needed.name)
                    waiting += [(inner, each) for each in ("", *needed.extras)]
    return {n: {"core"} if "core" in extras else extras for n, extras in sorted(needs.items())}


def find_glibc(name: str) -> tuple[int, int] | None:
    """Return the oldest glibc for which the installed wheel is; None if it is Python alone."""
    text = importlib.metadata.distribution(name).read_text("WHEEL") or ""
    found = []
    for platform in re.findall(r"^Tag: \S+-(\S+)$", text, re.MULTILINE):
        if match := re.match(r"manylinux_(\d+)_(\d+)_", platform):
            found.append((int(match[1]), int(match[2])))
        elif (legacy := platform.partition("_")[0]) in LEGACY:
            found.append(LEGACY[legacy])
    return min(found, default=None)


def has_older_wheel(name: str, version: str) -> bool:
    """Return whether there is another wheel of this version, for the oldest glibc."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 17)] + ["manylinux2014_x86_64"]
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        words += ["--only-binary=:all:", f"{name}=={version}"]
        words += [f"--platform={platform}" for platform in platforms]
        return subprocess.run(words, capture_output=True).returncode == 0


def describe_glibc(name: str, version: str) -> str:
    glibc = find_glibc(name)
    if glibc is None:
        return "Python alone"
    shown = ".".join(map(str, glibc))
    if glibc <= OLDEST_GLIBC:
        return shown
    return f"{shown}; another wheel: 2.28" if has_older_wheel(name, version) else f"**{shown}**"


def main() -> None:
    rows = []
    for name, extras in collect_needs().items():
        version = importlib.metadata.version(name)
        of = ", ".join(sorted(extras))
        rows.append(f"| {name} | {version} | {of} | {describe_glibc(name, version)} |")
    python = ".".join(map(str, sys.version_info[:2]))
    PAGE.write_text(HEAD.format(python=python) + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
