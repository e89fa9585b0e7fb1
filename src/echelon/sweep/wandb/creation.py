"""The sweep on wandb's server, made once: the same command typed again goes on with it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Exit, Fault
from echelon.sweep.file import SweepFile
from echelon.sweep.folder import Settings
from echelon.sweep.wandb.client import Server, Silent
from echelon.track import key
from echelon.track.apart import brief
from echelon.utils.files import write_json_atomically

_FILE = "server.json"
_DECIDES = ("method", "metric", "parameters", "early_terminate")
_PROJECT = "echelon"


def require(env: Mapping[str, str]) -> None:
    """Before anything is made."""
    if importlib.util.find_spec("wandb") is None:
        raise EchelonError(
            Fault(
                "--engine wandb, but wandb is not installed",
                'install it: pip install "echelon[wandb]"',
            )
        )
    if reason := key.problem(env):
        raise EchelonError(Fault(f"--engine wandb, but {reason}", _LOGIN))


def opened(file: SweepFile, settings: Settings, folder: Path) -> tuple[Server, str]:
    """The server, and ENTITY/PROJECT/SWEEP there. A sweep that is known needs no answer yet."""
    found = key.credentials(os.environ)
    if found is None:
        raise EchelonError(Fault("--engine wandb needs an API key, and there is none", _LOGIN))
    server = Server(*found)
    return server, _known(file, folder) or _made(file, settings, folder, _entity(file, server))


_LOGIN = "log in with `wandb login`, set WANDB_API_KEY, or go without a server: --engine embedded"


def _entity(file: SweepFile, server: Server) -> str:
    """Also whether it answers: wandb would try for minutes."""
    try:
        user = server.user()
    except Silent as error:
        raise EchelonError(
            Fault(
                f"wandb's server at {key.host_of(server.url)} does not answer: {error}",
                "try again later, or go without a server: --engine embedded",
            ),
            exit=Exit.FAILED,
        ) from None
    return file.entity or os.environ.get("WANDB_ENTITY") or user


def _known(file: SweepFile, folder: Path) -> str | None:
    """The one that this folder is of, if it is this sweep."""
    if (folder / "sweep.json").exists():
        raise EchelonError(
            Fault(
                f"the sweep {folder.name} in {folder} is searched without a server",
                "leave --engine wandb out, or choose another name with --name",
            )
        )
    if not (folder / _FILE).exists():
        return None
    told = read(folder)
    differs = [key for key in _DECIDES if told["file"].get(key) != file.data.get(key)]
    if differs:
        raise EchelonError(
            Fault(
                f"the sweep {folder.name} in {folder} is another one: {', '.join(differs)}",
                "choose another name with --name",
            )
        )
    return str(told["sweep"])


def read(folder: Path) -> dict[str, Any]:
    """What is known here of a sweep there: sweep, file, metric, cap, program."""
    try:
        known = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        if isinstance(known, dict) and {"sweep", "file", "metric", "cap", "program"} <= {*known}:
            return known
        why = "it holds something else"
    except (OSError, ValueError) as error:
        why = str(error)
    raise EchelonError(
        Fault(f"{folder / _FILE} cannot be read: {why}", "start another sweep"),
        exit=Exit.NOT_FOUND,
    )


def _made(file: SweepFile, settings: Settings, folder: Path, entity: str) -> str:
    import wandb

    was_silent = os.environ.get("WANDB_SILENT")
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    project = file.project or os.environ.get("WANDB_PROJECT") or _PROJECT
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):  # where ours are data
            name = wandb.sweep(description(file, settings), entity=entity, project=project)
    except Exception as error:
        raise EchelonError(
            Fault(f"wandb's server did not make the sweep: {brief(error)}", _LOGIN),
            exit=Exit.FAILED,
        ) from None
    finally:
        wandb.teardown()  # its process; trials have their own
        del os.environ["WANDB_SILENT"]
        if was_silent is not None:
            os.environ["WANDB_SILENT"] = was_silent
    sweep = f"{entity}/{project}/{name}"
    known = {"metric": settings.metric, "cap": settings.cap, "program": bool(settings.program)}
    write_json_atomically(folder / _FILE, {"sweep": sweep, "file": file.data, **known})
    for line in said.getvalue().splitlines():
        if line.startswith("Sweep URL: "):
            print(f"sweep {sweep}: {line.removeprefix('Sweep URL: ')}", file=sys.stderr)
    return sweep


def description(file: SweepFile, settings: Settings) -> dict[str, Any]:
    """What the server is told, with a command that agents of others can run as well."""
    told = {"run_cap": settings.cap, "metric": settings.metric, **file.data}
    if file.program is None and file.command is None:
        train = ("${env}", "${interpreter}", "-m", "echelon", "train")
        told["command"] = [*train, *settings.words, "${args_no_hyphens}"]
    return told
