"""Building an environment, once, whoever asks for it and whatever happens on the way.

It is built in its final place, for the paths of interpreters are written into its scripts: what is
moved there afterwards does not start. A marker, written last and flushed, says that it is whole.
Nothing without it is used; the next builder removes it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import IO

from echelon.environments import pipfile
from echelon.environments.build_errors import explain_build_failure
from echelon.environments.build_lock import PrintLine, lock_if_unused, wait_for_lock
from echelon.environments.build_plan import EnvironmentPlan
from echelon.environments.cache import (
    EnvironmentPaths,
    measure_size,
    remove_environment,
    unwritable_error,
)
from echelon.environments.package_indexes import hide_passwords
from echelon.environments.requirements import ParsedDependencies
from echelon.errors import EchelonError, Exit, Fault
from echelon.utils.files import write_json_atomically
from echelon.utils.locks import FileLock
from echelon.utils.os_errors import describe_os_error
from echelon.utils.processes import die_with_parent


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def build_environment(plan: EnvironmentPlan, print_line: PrintLine = _print_to_stderr) -> Path:
    """The folder, built if it was not. Lines of the builders are said with two spaces before."""
    if plan.kind == "none":
        return plan.folder
    place = EnvironmentPaths(plan.folder)
    try:
        place.make_parent()
        if not _is_usable(place, plan.key):
            with wait_for_lock(place.lock, "this environment", print_line) as lock:
                # Who held it before us has most likely built what we want.
                if not _is_usable(place, plan.key):
                    _build_locked(plan, place, lock, print_line)
        place.use_lock.touch()
    except OSError as error:
        raise unwritable_error(Path(error.filename or plan.folder), error) from error
    return plan.folder


def _is_usable(place: EnvironmentPaths, key: str) -> bool:
    """Beyond `stands`: the interpreter starts (its library may be gone), and no distribution has
    lost its record. Cleaners of scratch file systems take the files first that nobody reads."""
    if not place.is_ready(key):
        return False
    names = place.read_marker().get("distributions", [])
    if not all((place.folder / name / "METADATA").exists() for name in names):
        return False
    command = [str(place.python()), "-I", "-S", "-c", "import os"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _build_locked(
    plan: EnvironmentPlan, place: EnvironmentPaths, lock: FileLock, print_line: PrintLine
) -> None:
    _require_own_venv(plan, place)
    if place.folder.exists():
        print_line(f"removing {place.folder}: " + _explain_removal(plan, place))
    place.building_marker.touch(0o600)
    remove_environment(place)
    what = ", ".join(file.name for file in plan.files) or plan.build_steps.requirements[0].text
    print_line(f"building {place.folder} with {plan.builder}: {what}")
    began = time.time()
    try:
        with place.log.open("w", encoding="utf-8", errors="replace") as log:
            place.log.chmod(0o600)
            _run_steps(plan, place, lock, log, print_line)
        _require_python(plan, place)
        _write_marker(plan, place, time.time() - began)
    except BaseException:
        shutil.rmtree(place.folder, ignore_errors=True)
        place.building_marker.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(place.inputs, ignore_errors=True)
    place.building_marker.unlink(missing_ok=True)
    place.log.unlink(missing_ok=True)
    print_line(f"built in {time.time() - began:.1f} s")


def _require_own_venv(plan: EnvironmentPlan, place: EnvironmentPaths) -> None:
    """In the cache all is ours; a .venv in the source may be somebody's work."""
    if place.folder.name != ".venv" or not place.folder.exists():
        return
    if not place.read_marker() and not place.building_marker.exists():
        raise EchelonError(
            Fault(
                f"{place.folder} is there already and was not made by echelon",
                "remove it, or use --where cache",
            )
        )
    with lock_if_unused(place.use_lock) as alone:
        if not alone:
            raise EchelonError(
                Fault(
                    f"{place.folder} would have to be rebuilt, and a job runs in it",
                    "wait for it, or keep environments apart with --where cache",
                )
            )


def _require_python(plan: EnvironmentPlan, place: EnvironmentPaths) -> None:
    """Before the marker vouches for it."""
    if not place.python().exists():
        what = f"what {plan.files[0].name} lists has no python in it"
        raise EchelonError(Fault(what, "add it to the dependencies"), exit=Exit.FAILED)


def _explain_removal(plan: EnvironmentPlan, place: EnvironmentPaths) -> str:
    marker = place.read_marker()
    if not marker:
        return "its build broke off"
    return (
        "it does not work any more" if marker.get("key") == plan.key else "its files have changed"
    )


# --- running the builders ---


def _run_steps(
    plan: EnvironmentPlan,
    place: EnvironmentPaths,
    lock: FileLock,
    log: IO[str],
    print_line: PrintLine,
) -> None:
    recipe, tool = plan.build_steps, None
    if recipe.pipenv_environment:
        print_line("Pipfile has no lock: its versions are chosen now; `pipenv lock` would fix them")
        tool = build_environment(recipe.pipenv_environment, print_line)
    place.inputs.mkdir(mode=0o700, exist_ok=True)
    for name, text in recipe.inputs.items():
        (place.inputs / name).write_text(text, encoding="utf-8")
    first, *rest = recipe.steps
    _run_step(first, plan, lock, log, print_line)
    if tool:
        _lock_pipfile(tool, plan, place, lock, log, print_line)
    for step in rest:
        _run_step(step, plan, lock, log, print_line)


def _run_step(
    step: tuple[str, ...],
    plan: EnvironmentPlan,
    lock: FileLock,
    log: IO[str],
    print_line: PrintLine,
    cwd: Path | None = None,
    **variables: str,
) -> None:
    log.write(f"$ {hide_passwords(' '.join(step))}\n")
    try:
        process = subprocess.Popen(
            step,
            cwd=cwd or plan.source,
            env={**plan.build_steps.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            pass_fds=[lock.fileno()],
            # A killed builder takes pip with it, which else would write into its successor's place.
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    except OSError as error:
        what = f"{step[0]} cannot be run: {describe_os_error(error)}"
        raise EchelonError(
            Fault(what, "mend it, or take it from the PATH"), exit=Exit.FAILED
        ) from error
    try:
        assert process.stdout
        for line in process.stdout:
            log.write(hide_passwords(line))
            log.flush()
            print_line(f"  {hide_passwords(line.rstrip())}")
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code != 0:
        log.write(f"exit status {code}\n")
        log.flush()
        log_file = EnvironmentPaths(plan.folder).log
        log_text = log_file.read_text(encoding="utf-8", errors="replace")
        raise EchelonError(
            *explain_build_failure(log_text, plan.build_steps.requirements, plan.source, log_file),
            exit=Exit.FAILED,
        )


def _lock_pipfile(
    tool: Path,
    plan: EnvironmentPlan,
    place: EnvironmentPaths,
    lock: FileLock,
    log: IO[str],
    print_line: PrintLine,
) -> None:
    """In a copy: the source is not ours to write to. In the new environment, as pipenv would make
    one of its own elsewhere."""
    variables = {
        "PIPENV_PIPFILE": str(place.inputs / "Pipfile"),
        "PIPENV_VERBOSITY": "-1",
        "PIPENV_NOSPIN": "1",
        "VIRTUAL_ENV": str(place.folder),
    }
    pipenv = (str(tool / "bin" / "pipenv"), "lock")
    _run_step(pipenv, plan, lock, log, print_line, cwd=place.inputs, **variables)
    parsed = ParsedDependencies()
    file = place.inputs / "Pipfile.lock"
    pipfile.add_locked_packages(
        parsed,
        json.loads(file.read_text(encoding="utf-8")),
        file,
        plan.source,
        plan.build_steps.environ,
    )
    lines = "".join(f"{wanted.text}\n" for wanted in parsed.requirements)
    (place.inputs / "requirements.txt").write_text(lines, encoding="utf-8")


# --- the marker ---


def _write_marker(plan: EnvironmentPlan, place: EnvironmentPaths, took_s: float) -> None:
    marker = {
        "key": plan.key,
        "kind": plan.kind,
        "builder": plan.builder,
        "source": str(plan.source),
        "files": [file.name for file in plan.files],
        "made": time.time(),
        "took_s": round(took_s, 1),
        "bytes": measure_size(place.folder),
        "distributions": _list_distributions(place),
    }
    place.use_lock.touch()
    _sync_filesystem(place.folder)
    write_json_atomically(place.marker, marker, durable=True)


def _list_distributions(place: EnvironmentPaths) -> list[str]:
    found = place.folder.glob("lib/python*/site-packages/*.dist-info")
    return sorted(
        str(path.relative_to(place.folder)) for path in found if (path / "METADATA").exists()
    )


def _sync_filesystem(folder: Path) -> None:
    """The file system's pages, so that after a power cut no marker vouches for empty files."""
    file = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(file)
    finally:
        os.close(file)
