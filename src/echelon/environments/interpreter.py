"""The Python that an environment is made of, and whether it is one that the source asks for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from echelon.environments import interpreter_probe
from echelon.errors import EchelonError, Exit, Fault


class Interpreter(NamedTuple):
    executable: str
    version: str
    build: str
    implementation: str
    base: str
    """The real file, behind the links of virtual environments."""
    prefix: Path
    platform: str
    machine: str
    libc: str


def find_interpreter(python: str, environ: Mapping[str, str]) -> Interpreter:
    """Of our own for free; another one is asked."""
    python = shutil.which(python, path=environ.get("PATH")) or python
    description = (
        interpreter_probe.describe_interpreter()
        if python == sys.executable
        else _probe_interpreter(python)
    )
    return Interpreter(python, **(description | {"prefix": Path(description["prefix"])}))


def check_python_version(
    interpreter: Interpreter, requests: list[tuple[str, str, str]], source: Path
) -> list[Fault]:
    return [
        Fault(
            f"{said}, but the environment would be made with Python {interpreter.version} "
            f"({interpreter.executable})",
            "give another with --python PATH (`uv python install VERSION` or the cluster's "
            "modules bring one), or change the wish",
        )
        for said, how, version in [*requests, *_read_python_version_file(source)]
        if not _matches(interpreter.version, how, version)
    ]


def _read_python_version_file(source: Path) -> list[tuple[str, str, str]]:
    """Of .python-version, where it is a version: pyenv allows names of environments there."""
    try:
        words = (source / ".python-version").read_text(encoding="utf-8-sig").split()
    except (OSError, UnicodeDecodeError):
        return []
    numbers = [w for w in words if re.fullmatch(r"\d+(\.\d+)*", w)]
    return [(f".python-version asks for {numbers[0]}", "minor", numbers[0])] if numbers else []


def _matches(version: str, rule: str, requested: str) -> bool:
    """A patch version is only insisted on by who says `full`: no package differs by it."""
    if rule == "specifiers":
        try:
            return SpecifierSet(requested).contains(version, prereleases=True)
        except InvalidSpecifier:
            return False
    if rule == "exact":
        return version == requested
    parts = requested.split(".")[:2]
    return version.split(".")[: len(parts)] == parts


def _probe_interpreter(python: str) -> dict[str, Any]:
    command = [python, "-I", str(Path(interpreter_probe.__file__))]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=True
        )
        description = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EchelonError(
            Fault(
                f"{python} is no Python that could be asked for its version: {error}",
                "give the path of an interpreter with --python PATH",
            ),
            exit=Exit.NOT_FOUND,
        ) from error
    return dict(description)
