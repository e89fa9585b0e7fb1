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
from echelon.sweep.sweep_file import SweepFile
from echelon.sweep.sweep_folder import SweepSettings
from echelon.sweep.wandb.client import ServerUnavailableError, WandbServer
from echelon.tracking import wandb_key
from echelon.tracking.background import summarize_error
from echelon.utils.files import write_json_atomically

_SERVER_FILE = "server.json"
_IDENTITY_KEYS = ("method", "metric", "parameters", "early_terminate")
_DEFAULT_PROJECT = "echelon"


def require_wandb(env: Mapping[str, str]) -> None:
    """Before anything is made."""
    if importlib.util.find_spec("wandb") is None:
        raise EchelonError(
            Fault(
                "--engine wandb, but wandb is not installed",
                'install it: pip install "echelon[wandb]"',
            )
        )
    if reason := wandb_key.find_key_problem(env):
        raise EchelonError(Fault(f"--engine wandb, but {reason}", _LOGIN_HINT))


def open_server_sweep(
    file: SweepFile, settings: SweepSettings, folder: Path
) -> tuple[WandbServer, str]:
    """The server, and ENTITY/PROJECT/SWEEP there. A sweep that is known needs no answer yet."""
    found = wandb_key.read_credentials(os.environ)
    if found is None:
        raise EchelonError(Fault("--engine wandb needs an API key, and there is none", _LOGIN_HINT))
    server = WandbServer(*found)
    return server, _find_known_sweep(file, folder) or _create_sweep(
        file, settings, folder, _find_entity(file, server)
    )


_LOGIN_HINT = (
    "log in with `wandb login`, set WANDB_API_KEY, or go without a server: --engine embedded"
)


def _find_entity(file: SweepFile, server: WandbServer) -> str:
    """Also whether it answers: wandb would try for minutes."""
    try:
        user = server.query_user()
    except ServerUnavailableError as error:
        raise EchelonError(
            Fault(
                f"wandb's server at {wandb_key.get_host(server.url)} does not answer: {error}",
                "try again later, or go without a server: --engine embedded",
            ),
            exit=Exit.FAILED,
        ) from None
    return file.entity or os.environ.get("WANDB_ENTITY") or user


def _find_known_sweep(file: SweepFile, folder: Path) -> str | None:
    """The one that this folder is of, if it is this sweep."""
    if (folder / "sweep.json").exists():
        raise EchelonError(
            Fault(
                f"the sweep {folder.name} in {folder} is searched without a server",
                "leave --engine wandb out, or choose another name with --name",
            )
        )
    if not (folder / _SERVER_FILE).exists():
        return None
    known = read_server_file(folder)
    differs = [key for key in _IDENTITY_KEYS if known["file"].get(key) != file.data.get(key)]
    if differs:
        raise EchelonError(
            Fault(
                f"the sweep {folder.name} in {folder} is another one: {', '.join(differs)}",
                "choose another name with --name",
            )
        )
    return str(known["sweep"])


def read_server_file(folder: Path) -> dict[str, Any]:
    """What is known here of a sweep there: sweep, file, metric, cap, program."""
    try:
        known = json.loads((folder / _SERVER_FILE).read_text(encoding="utf-8"))
        if isinstance(known, dict) and {"sweep", "file", "metric", "cap", "program"} <= {*known}:
            return known
        why = "it holds something else"
    except (OSError, ValueError) as error:
        why = str(error)
    raise EchelonError(
        Fault(f"{folder / _SERVER_FILE} cannot be read: {why}", "start another sweep"),
        exit=Exit.NOT_FOUND,
    )


def _create_sweep(file: SweepFile, settings: SweepSettings, folder: Path, entity: str) -> str:
    import wandb

    was_silent = os.environ.get("WANDB_SILENT")
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    project = file.project or os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):  # where ours are data
            name = wandb.sweep(build_sweep_config(file, settings), entity=entity, project=project)
    except Exception as error:
        raise EchelonError(
            Fault(f"wandb's server did not make the sweep: {summarize_error(error)}", _LOGIN_HINT),
            exit=Exit.FAILED,
        ) from None
    finally:
        wandb.teardown()  # its process; trials have their own
        del os.environ["WANDB_SILENT"]
        if was_silent is not None:
            os.environ["WANDB_SILENT"] = was_silent
    sweep = f"{entity}/{project}/{name}"
    known = {"metric": settings.metric, "cap": settings.cap, "program": bool(settings.program)}
    write_json_atomically(folder / _SERVER_FILE, {"sweep": sweep, "file": file.data, **known})
    for line in output.getvalue().splitlines():
        if line.startswith("Sweep URL: "):
            print(f"sweep {sweep}: {line.removeprefix('Sweep URL: ')}", file=sys.stderr)
    return sweep


def build_sweep_config(file: SweepFile, settings: SweepSettings) -> dict[str, Any]:
    """What the server is told, with a command that agents of others can run as well."""
    config = {"run_cap": settings.cap, "metric": settings.metric, **file.data}
    if file.program is None and file.command is None:
        train = ("${env}", "${interpreter}", "-m", "echelon", "train")
        config["command"] = [*train, *settings.words, "${args_no_hyphens}"]
    return config
