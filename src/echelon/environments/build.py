"""Building an environment: once, by one process, with a result that is either complete or absent.

An environment is built in its final folder, because its scripts contain the absolute path of its
interpreter and would not start after a move. A marker file is written last and flushed to disk; it
certifies that the environment is complete. A folder without a marker is never used, and the next
build removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
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
    make_unwritable_error,
    measure_size,
    remove_environment,
    require_trusted_environment,
)
from echelon.environments.package_indexes import hide_passwords
from echelon.environments.requirements import ParsedDependencies
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.utils.files import write_json_atomically
from echelon.utils.locks import FileLock
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.processes import die_with_parent
from echelon.utils.text import format_elapsed, print_to_stderr


def build_environment(plan: EnvironmentPlan, print_line: PrintLine = print_to_stderr) -> Path:
    """Build the environment unless it exists and works, and return its folder.

    Concurrent calls, also on other hosts that share the cache, wait for each other. Output of pip,
    uv or conda is passed to `print_line` indented by two spaces, progress of the build itself
    without indentation.
    """
    if plan.kind == "none":
        return plan.folder
    paths = EnvironmentPaths(plan.folder)
    try:
        require_trusted_environment(paths)  # before its interpreter is started to try it
        paths.make_parent()
        if not _is_intact(paths, plan.key):
            with wait_for_lock(paths.lock, "this environment", print_line) as lock:
                # The previous holder of the lock has most likely built what we want.
                if not _is_intact(paths, plan.key):
                    _build_under_lock(plan, paths, lock, print_line)
        _record_use(paths)
    except OSError as error:
        raise make_unwritable_error(Path(error.filename or plan.folder), error) from error
    return plan.folder


def _record_use(paths: EnvironmentPaths) -> None:
    """Note the time of this use, unless the environment is one that root made for everybody."""
    with contextlib.suppress(PermissionError):
        paths.use_lock.touch()


def _is_intact(paths: EnvironmentPaths, key: str) -> bool:
    """Return whether the environment is complete and still works.

    Beyond `EnvironmentPaths.is_ready`, this starts the interpreter (its shared library may be gone)
    and looks for the METADATA file of every distribution: cleaners of scratch file systems delete
    the files first that nobody reads.
    """
    if not paths.is_ready(key):
        return False
    names = paths.read_marker().get("distributions", [])
    if not all((paths.folder / name / "METADATA").exists() for name in names):
        return False
    command = [str(paths.python_executable()), "-I", "-S", "-c", "import os"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _build_under_lock(
    plan: EnvironmentPlan, paths: EnvironmentPaths, lock: FileLock, print_line: PrintLine
) -> None:
    """Build in an empty folder and write the marker; on any failure, remove what was built.

    The log is kept when the build fails. The inputs given to pip are always removed, as they may
    contain passwords.
    """
    _require_own_venv(plan, paths)
    if paths.folder.exists():
        print_line(f"removing {paths.folder}: " + _explain_removal(plan, paths))
    paths.building_marker.touch(0o600)
    remove_environment(paths)
    dependencies = (
        ", ".join(file.name for file in plan.files) or plan.build_steps.requirements[0].text
    )
    print_line(f"building {paths.folder} with {plan.builder}: {dependencies}")
    began = time.time()
    try:
        with paths.log.open("w", encoding="utf-8", errors="replace") as log:
            paths.log.chmod(0o600)
            _run_steps(plan, paths, lock, log, print_line)
        _require_environment_python(plan, paths)
        _write_marker(plan, paths, time.time() - began)
    except BaseException:
        shutil.rmtree(paths.folder, ignore_errors=True)
        paths.building_marker.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(paths.inputs_folder, ignore_errors=True)
    paths.building_marker.unlink(missing_ok=True)
    paths.log.unlink(missing_ok=True)
    print_line(f"built in {format_elapsed(time.time() - began)}")


def _require_own_venv(plan: EnvironmentPlan, paths: EnvironmentPaths) -> None:
    """Raise if the folder is a .venv that Echelon did not make, or one that a job uses.

    Everything in the cache is ours, but a .venv in the source folder may be somebody's work.
    """
    if paths.folder.name != ".venv" or not paths.folder.exists():
        return
    if not paths.read_marker() and not paths.building_marker.exists():
        raise EchelonError(
            Fault(
                f"{paths.folder} exists and was not made by Echelon",
                "remove it, or use --where cache",
            )
        )
    with lock_if_unused(paths.use_lock) as is_unused:
        if not is_unused:
            raise EchelonError(
                Fault(
                    f"{paths.folder} must be rebuilt, but a job is running in it",
                    "wait for the job to end, or use --where cache, which keeps environments apart",
                )
            )


def _require_environment_python(plan: EnvironmentPlan, paths: EnvironmentPaths) -> None:
    """Raise if the built environment has no interpreter, before the marker certifies it."""
    if not paths.python_executable().exists():
        what = f"the environment of {plan.files[0].name} has no python"
        raise EchelonError(Fault(what, "add python to the dependencies"), exit=ExitCode.FAILED)


def _explain_removal(plan: EnvironmentPlan, paths: EnvironmentPaths) -> str:
    """Return why an existing environment is about to be rebuilt."""
    marker = paths.read_marker()
    if not marker:
        return "its build did not finish"
    return "it no longer works" if marker.get("key") == plan.key else "its files have changed"


# --- running the builders ---


def _run_steps(
    plan: EnvironmentPlan,
    paths: EnvironmentPaths,
    lock: FileLock,
    log: IO[str],
    print_line: PrintLine,
) -> None:
    """Run every command of the plan, in order.

    Where a Pipfile has no lock file, pipenv resolves it after the first step has made the
    environment, and the remaining steps install from that lock.
    """
    build_steps, pipenv_folder = plan.build_steps, None
    if build_steps.pipenv_environment:
        print_line(
            "Pipfile has no lock file: versions are resolved now; run `pipenv lock` to pin them"
        )
        pipenv_folder = build_environment(build_steps.pipenv_environment, print_line)
    paths.inputs_folder.mkdir(mode=0o700, exist_ok=True)
    for name, text in build_steps.inputs.items():
        (paths.inputs_folder / name).write_text(text, encoding="utf-8")
    first, *remaining_steps = build_steps.steps
    _run_step(first, plan, lock, log, print_line)
    if pipenv_folder:
        _lock_pipfile(pipenv_folder, plan, paths, lock, log, print_line)
    for step in remaining_steps:
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
    """Run one command, copy its output to the log and to `print_line`, and raise if it fails."""
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
            preexec_fn=partial(_prepare_step, os.getpid()),
        )
    except OSError as error:
        what = f"{step[0]} cannot be run: {format_os_error_reason(error)}"
        raise EchelonError(
            Fault(what, "fix the installation, or remove it from the PATH"), exit=ExitCode.FAILED
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
            exit=ExitCode.FAILED,
        )


def _prepare_step(parent: int) -> None:
    """Set up the process of a builder, before its program begins."""
    # If we are killed, pip must die too: it would write into the next build.
    die_with_parent(parent)
    # An environment that a group may write would not be trusted at its next use.
    os.umask(0o022 | os.umask(0o022))


def _lock_pipfile(
    pipenv_folder: Path,
    plan: EnvironmentPlan,
    paths: EnvironmentPaths,
    lock: FileLock,
    log: IO[str],
    print_line: PrintLine,
) -> None:
    """Run `pipenv lock` and write the result as a requirements.txt for the next step.

    It runs in a copy, because the source folder is not ours to write to, and with VIRTUAL_ENV set
    to the new environment, because pipenv would otherwise create one of its own elsewhere.
    """
    variables = {
        "PIPENV_PIPFILE": str(paths.inputs_folder / "Pipfile"),
        "PIPENV_VERBOSITY": "-1",
        "PIPENV_NOSPIN": "1",
        "VIRTUAL_ENV": str(paths.folder),
    }
    pipenv = (str(pipenv_folder / "bin" / "pipenv"), "lock")
    _run_step(pipenv, plan, lock, log, print_line, cwd=paths.inputs_folder, **variables)
    parsed = ParsedDependencies()
    file = paths.inputs_folder / "Pipfile.lock"
    pipfile.add_locked_packages(
        parsed,
        json.loads(file.read_text(encoding="utf-8")),
        file,
        plan.source,
        plan.build_steps.environ,
    )
    lines = "".join(f"{requirement.text}\n" for requirement in parsed.requirements)
    (paths.inputs_folder / "requirements.txt").write_text(lines, encoding="utf-8")


# --- the marker ---


def _write_marker(plan: EnvironmentPlan, paths: EnvironmentPaths, took_s: float) -> None:
    """Flush the environment to disk, then write the marker that certifies it.

    The order matters: after a power cut no marker may certify files that are empty.
    """
    marker = {
        "key": plan.key,
        "kind": plan.kind,
        "builder": plan.builder,
        "source": str(plan.source),
        "files": [file.name for file in plan.files],
        "made": time.time(),
        "took_s": round(took_s, 1),
        "bytes": measure_size(paths.folder),
        "distributions": _list_distributions(paths),
    }
    paths.use_lock.touch()
    _sync_filesystem(paths.folder)
    write_json_atomically(paths.marker, marker, durable=True, names_code=True)


def _list_distributions(paths: EnvironmentPaths) -> list[str]:
    """Return the .dist-info folders that have METADATA, relative to the environment."""
    found = paths.folder.glob("lib/python*/site-packages/*.dist-info")
    return sorted(
        str(path.relative_to(paths.folder)) for path in found if (path / "METADATA").exists()
    )


def _sync_filesystem(folder: Path) -> None:
    """Flush all pending writes of the file system that holds the folder (syncfs)."""
    file = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(file)
    finally:
        os.close(file)
