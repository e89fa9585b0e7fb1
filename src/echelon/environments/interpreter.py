"""The Python that an environment is built with, and whether it is the version that the source asks
for."""

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
from echelon.errors import EchelonError, ExitCode, Fault


class Interpreter(NamedTuple):
    """Everything about a Python that decides whether a package built for it works."""

    executable: str
    version: str
    build: str
    implementation: str
    base: str
    """The real executable, behind the symbolic links of virtual environments."""
    prefix: Path
    platform: str
    machine: str
    libc: str


class PythonRequest(NamedTuple):
    """A version of Python that a file asks for."""

    statement: str
    """What the file says, for messages."""
    rule: str
    """How versions are compared: minor, exact or specifiers."""
    version: str


def inspect_interpreter(python: str, environ: Mapping[str, str]) -> Interpreter:
    """Return the description of a Python. Our own is described in this process; another one is
    started for it."""
    python = shutil.which(python, path=environ.get("PATH")) or python
    description = (
        interpreter_probe.describe_interpreter()
        if python == sys.executable
        else _probe_interpreter(python)
    )
    return Interpreter(python, **(description | {"prefix": Path(description["prefix"])}))


def find_python_version_faults(
    interpreter: Interpreter, requests: list[PythonRequest], source: Path
) -> list[Fault]:
    """Return a fault for every request that the interpreter does not meet."""
    return [
        Fault(
            f"{request.statement}, but the environment would be made with Python "
            f"{interpreter.version} ({interpreter.executable})",
            "give another with --python PATH (`uv python install VERSION` or the cluster's "
            "modules provide one), or change the requested version",
        )
        for request in [*requests, *_read_python_version_file(source)]
        if not _matches(interpreter.version, request.rule, request.version)
    ]


def _read_python_version_file(source: Path) -> list[PythonRequest]:
    """Return the version in .python-version; pyenv also allows names, which are ignored."""
    try:
        words = (source / ".python-version").read_text(encoding="utf-8-sig").split()
    except (OSError, UnicodeDecodeError):
        return []
    numbers = [w for w in words if re.fullmatch(r"\d+(\.\d+)*", w)]
    if not numbers:
        return []
    return [PythonRequest(f".python-version asks for {numbers[0]}", "minor", numbers[0])]


def _matches(version: str, rule: str, requested: str) -> bool:
    """Return whether a version meets a request.

    Requests for `3.11` accept any patch version, as no package depends on it. Only
    `python_full_version` of a Pipfile compares it.
    """
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
    """Start a Python that has none of our packages and let it describe itself."""
    command = [python, "-I", str(Path(interpreter_probe.__file__))]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=True
        )
        description = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EchelonError(
            Fault(
                f"{python} did not report its version as a Python would: {error}",
                "give the path of an interpreter with --python PATH",
            ),
            exit=ExitCode.NOT_FOUND,
        ) from error
    return dict(description)
