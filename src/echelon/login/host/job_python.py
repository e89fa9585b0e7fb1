"""The Python of jobs: one that was named, that of an environment, or that on the PATH."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import EchelonError, ExitCode, Fault

_CHECK_LIMIT_S = 120.0
_CHECK = """import importlib.util, sys
print(sys.version.split()[0], *(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"""


@dataclass(frozen=True)
class JobPython:
    """An interpreter, and the lines of a batch script that make it the one to use."""

    command: str
    lines: tuple[str, ...]
    described: str
    """For the person who waits."""


@dataclass(frozen=True)
class PythonRequest:
    """What was asked for on the laptop."""

    named: str | None
    """`launch.python`."""
    setup: tuple[str, ...]
    """`launch.setup`."""
    requirements: tuple[str, ...]
    """What Echelon itself needs in an environment, as lines of a requirements.txt."""
    modules: tuple[str, ...]
    """The same as names of modules."""
    uses_environment: bool = True
    """Whether the environment that the source asks for is built."""


def prepare_job_python(
    request: PythonRequest,
    source: Path,
    package: Path,
    state_folder: Path,
    print_line: Callable[[str], None],
) -> JobPython:
    """Return the Python for jobs from this source; an environment is built if it is not there."""
    chosen = _choose_python(request, source, print_line)
    lines = (
        *chosen.lines,
        f'export PYTHONPATH={shlex.quote(str(package))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
    )
    chosen = JobPython(chosen.command, lines, chosen.described)
    _require_modules(request, chosen, source, state_folder)
    return chosen


def _choose_python(
    request: PythonRequest, source: Path, print_line: Callable[[str], None]
) -> JobPython:
    if request.named is not None:
        python = os.path.expanduser(request.named)
        first = f'export PATH={shlex.quote(str(Path(python).parent))}"${{PATH:+:$PATH}}"'
        return JobPython(python, (first,), python)
    if request.uses_environment:
        from echelon.environments import (
            build_environment,
            plan_environment,
            render_activation_lines,
        )

        plan = plan_environment(source, environ=os.environ, more=request.requirements)
        if plan.kind != "none":
            if not plan.ready:
                build_environment(plan, print_line)
            python = str(plan.folder / "bin" / "python")
            lines = tuple(render_activation_lines(plan))
            return JobPython(python, lines, f"environment {plan.key}")
    if request.setup:
        return JobPython("python3", (), "python3 after launch.setup")
    return JobPython(sys.executable, (), sys.executable)


def _require_modules(
    request: PythonRequest, python: JobPython, source: Path, state_folder: Path
) -> None:
    """Raise a fault if that Python lacks what a job needs. That it has it is remembered."""
    words = [python.command, "-c", _CHECK, *request.modules]
    script = "\n".join([*request.setup, *python.lines, f"exec {shlex.join(words)}"])
    digest = hashlib.sha256(json.dumps([script, str(source)]).encode()).hexdigest()[:32]
    if request.named is None and not request.setup:
        digest = hashlib.sha256(script.encode()).hexdigest()[:32]
    passed = state_folder / "checked" / digest
    if passed.exists():
        return
    try:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=source,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_CHECK_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise EchelonError(
            Fault(
                f"{python.described} did not start within {_CHECK_LIMIT_S:g} s",
                "look whether launch.setup waits for something on that machine",
            ),
            exit=ExitCode.NOT_READY,
        ) from None
    version, *missing = (done.stdout.splitlines() or [""])[-1].split() or [""]
    hint = (
        "name one that has torch and what Echelon needs with launch.python=PATH, load it in "
        "launch.setup, or put a requirements.txt into the source folder: it is built there once"
    )
    if done.returncode or not version:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise EchelonError(
            Fault(f"{python.described} is no Python that jobs can use: {reason}", hint),
            exit=ExitCode.NOT_READY,
        )
    if tuple(map(int, version.split(".")[:2])) < (3, 10):
        raise EchelonError(
            Fault(f"{python.described} is Python {version}, and jobs need 3.10 or newer", hint),
            exit=ExitCode.NOT_READY,
        )
    if missing:
        raise EchelonError(
            Fault(f"{python.described} lacks {', '.join(missing)}", hint), exit=ExitCode.NOT_READY
        )
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()
