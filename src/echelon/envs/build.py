"""Building an environment, once, whoever asks for it and whatever happens on the way.

It is built in its final place, for the paths of interpreters are written into its scripts: what is
moved there afterwards does not start. A marker, written last and flushed, says that it is whole.
Nothing without it is used; the next builder removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from echelon.envs import pipfile
from echelon.envs.failures import faults
from echelon.envs.indexes import hidden
from echelon.envs.lock import lock_if_unused, wait_for_lock
from echelon.envs.places import Place, unwritable
from echelon.envs.plan import EnvPlan
from echelon.envs.requirements import Read
from echelon.errors import EchelonError, Exit, Fault
from echelon.utils.files import write_json_atomically
from echelon.utils.locks import FileLock
from echelon.utils.os_errors import describe_os_error
from echelon.utils.processes import die_with_parent

Say = Callable[[str], None]


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def build(plan: EnvPlan, say: Say = _to_stderr) -> Path:
    """The folder, built if it was not. Lines of the builders are said with two spaces before."""
    if plan.kind == "none":
        return plan.folder
    place = Place(plan.folder)
    try:
        place.prepare()
        if not _works(place, plan.key):
            with wait_for_lock(place.lock, "this environment", say) as lock:
                # Who held it before us has most likely built what we want.
                if not _works(place, plan.key):
                    _build(plan, place, lock, say)
        place.use.touch()
    except OSError as error:
        raise unwritable(Path(error.filename or plan.folder), error) from error
    return plan.folder


def size(folder: Path, alone: bool = False) -> int:
    """On the disk, in bytes; `alone` without what uv's cache shares by links."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                state = os.lstat(os.path.join(where, name))
                total += 0 if alone and state.st_nlink > 1 else state.st_blocks * 512
    return total


def remove(place: Place) -> None:
    """The marker first: killed at any moment, what is left is seen to be no environment."""
    place.marker.unlink(missing_ok=True)
    if place.folder.is_symlink():
        place.folder.unlink()
    elif place.folder.exists():
        shutil.rmtree(place.folder)


def _works(place: Place, key: str) -> bool:
    """Beyond `stands`: the interpreter starts (its library may be gone), and no distribution has
    lost its record. Cleaners of scratch file systems take the files first that nobody reads."""
    if not place.stands(key):
        return False
    names = place.made().get("distributions", [])
    if not all((place.folder / name / "METADATA").exists() for name in names):
        return False
    command = [str(place.python()), "-I", "-S", "-c", "import os"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _build(plan: EnvPlan, place: Place, lock: FileLock, say: Say) -> None:
    _require_ours(plan, place)
    if place.folder.exists():
        say(f"removing {place.folder}: " + _why_removed(plan, place))
    place.building.touch(0o600)
    remove(place)
    what = ", ".join(file.name for file in plan.files) or plan.recipe.wanted[0].text
    say(f"building {place.folder} with {plan.builder}: {what}")
    began = time.time()
    try:
        with place.log.open("w", encoding="utf-8", errors="replace") as log:
            place.log.chmod(0o600)
            _run_all(plan, place, lock, log, say)
        _require_whole(plan, place)
        _mark(plan, place, time.time() - began)
    except BaseException:
        shutil.rmtree(place.folder, ignore_errors=True)
        place.building.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(place.inputs, ignore_errors=True)
    place.building.unlink(missing_ok=True)
    place.log.unlink(missing_ok=True)
    say(f"built in {time.time() - began:.1f} s")


def _require_ours(plan: EnvPlan, place: Place) -> None:
    """In the cache all is ours; a .venv in the source may be somebody's work."""
    if place.folder.name != ".venv" or not place.folder.exists():
        return
    if not place.made() and not place.building.exists():
        raise EchelonError(
            Fault(
                f"{place.folder} is there already and was not made by echelon",
                "remove it, or use --where cache",
            )
        )
    with lock_if_unused(place.use) as alone:
        if not alone:
            raise EchelonError(
                Fault(
                    f"{place.folder} would have to be rebuilt, and a job runs in it",
                    "wait for it, or keep environments apart with --where cache",
                )
            )


def _require_whole(plan: EnvPlan, place: Place) -> None:
    """Before the marker vouches for it."""
    if not place.python().exists():
        what = f"what {plan.files[0].name} lists has no python in it"
        raise EchelonError(Fault(what, "add it to the dependencies"), exit=Exit.FAILED)


def _why_removed(plan: EnvPlan, place: Place) -> str:
    made = place.made()
    if not made:
        return "its build broke off"
    return "it does not work any more" if made.get("key") == plan.key else "its files have changed"


# --- running the builders ---


def _run_all(plan: EnvPlan, place: Place, lock: FileLock, log: IO[str], say: Say) -> None:
    recipe, tool = plan.recipe, None
    if recipe.lock_with:
        say("Pipfile has no lock: its versions are chosen now; `pipenv lock` would fix them")
        tool = build(recipe.lock_with, say)
    place.inputs.mkdir(mode=0o700, exist_ok=True)
    for name, text in recipe.inputs.items():
        (place.inputs / name).write_text(text, encoding="utf-8")
    first, *rest = recipe.steps
    _run(first, plan, lock, log, say)
    if tool:
        _lock_pipfile(tool, plan, place, lock, log, say)
    for step in rest:
        _run(step, plan, lock, log, say)


def _run(
    step: tuple[str, ...],
    plan: EnvPlan,
    lock: FileLock,
    log: IO[str],
    say: Say,
    cwd: Path | None = None,
    **variables: str,
) -> None:
    log.write(f"$ {hidden(' '.join(step))}\n")
    try:
        process = subprocess.Popen(
            step,
            cwd=cwd or plan.source,
            env={**plan.recipe.environ, **variables},
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
            log.write(hidden(line))
            log.flush()
            say(f"  {hidden(line.rstrip())}")
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code != 0:
        log.write(f"exit status {code}\n")
        log.flush()
        kept = Place(plan.folder).log
        said = kept.read_text(encoding="utf-8", errors="replace")
        raise EchelonError(*faults(said, plan.recipe.wanted, plan.source, kept), exit=Exit.FAILED)


def _lock_pipfile(
    tool: Path, plan: EnvPlan, place: Place, lock: FileLock, log: IO[str], say: Say
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
    _run(pipenv, plan, lock, log, say, cwd=place.inputs, **variables)
    found = Read()
    file = place.inputs / "Pipfile.lock"
    pipfile.add_locked(
        found, json.loads(file.read_text(encoding="utf-8")), file, plan.source, plan.recipe.environ
    )
    lines = "".join(f"{wanted.text}\n" for wanted in found.wanted)
    (place.inputs / "requirements.txt").write_text(lines, encoding="utf-8")


# --- the marker ---


def _mark(plan: EnvPlan, place: Place, took_s: float) -> None:
    said = {
        "key": plan.key,
        "kind": plan.kind,
        "builder": plan.builder,
        "source": str(plan.source),
        "files": [file.name for file in plan.files],
        "made": time.time(),
        "took_s": round(took_s, 1),
        "bytes": size(place.folder),
        "distributions": _distributions(place),
    }
    place.use.touch()
    _flush_all(place.folder)
    write_json_atomically(place.marker, said, durable=True)


def _distributions(place: Place) -> list[str]:
    found = place.folder.glob("lib/python*/site-packages/*.dist-info")
    return sorted(
        str(path.relative_to(place.folder)) for path in found if (path / "METADATA").exists()
    )


def _flush_all(folder: Path) -> None:
    """The file system's pages, so that after a power cut no marker vouches for empty files."""
    file = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(file)
    finally:
        os.close(file)
