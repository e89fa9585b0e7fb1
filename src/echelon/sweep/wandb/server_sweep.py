"""The sweep on wandb's server: created once, and found again by the same command."""

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

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.sweep.sweep_file import SweepFile
from echelon.sweep.sweep_folder import SweepSettings
from echelon.sweep.wandb.client import ServerUnavailableError, WandbServer
from echelon.tracking import wandb_key
from echelon.tracking.background import summarize_error
from echelon.utils.files import write_json_atomically

_SERVER_FILE = "server.json"
"""In the sweep's folder: what is known here of the sweep there."""
_IDENTITY_KEYS = ("method", "metric", "parameters", "early_terminate")
"""Keys of the file that make it another sweep."""
_SERVER_FILE_KEYS = {"sweep", "file", "metric", "run_cap", "program"}
_DEFAULT_PROJECT = "echelon"


def require_wandb(env: Mapping[str, str]) -> None:
    """Raise EchelonError unless wandb is installed and a key is known."""
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
    """Return the server, and ENTITY/PROJECT/SWEEP of the sweep there.

    A sweep that this folder knows already needs no answer of the server yet.
    """
    credentials = wandb_key.read_credentials(os.environ)
    if credentials is None:
        raise EchelonError(Fault("--engine wandb needs an API key, and there is none", _LOGIN_HINT))
    server = WandbServer(*credentials)
    sweep = _find_known_sweep(file, folder)
    if sweep is None:
        sweep = _create_sweep(file, settings, folder, _find_entity(file, server))
    return server, sweep


_LOGIN_HINT = (
    "log in with `wandb login`, set WANDB_API_KEY, or go without a server: --engine embedded"
)


def _find_entity(file: SweepFile, server: WandbServer) -> str:
    """Return the entity of a new sweep. Also finds a server that is down: wandb would retry for
    minutes."""
    try:
        user = server.query_user()
    except ServerUnavailableError as error:
        raise EchelonError(
            Fault(
                f"wandb's server at {wandb_key.parse_server_host(server.url)} does not answer: "
                f"{error}",
                "try again later, or go without a server: --engine embedded",
            ),
            exit=ExitCode.FAILED,
        ) from None
    return file.entity or os.environ.get("WANDB_ENTITY") or user


def _find_known_sweep(file: SweepFile, folder: Path) -> str | None:
    """Return the sweep that this folder belongs to; EchelonError if it is another one."""
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
    """Return what is known here of a sweep there: sweep, file, metric, run_cap, program."""
    try:
        known = json.loads((folder / _SERVER_FILE).read_text(encoding="utf-8"))
        if isinstance(known, dict) and {*known} >= _SERVER_FILE_KEYS:
            return known
        reason = "it holds something else"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise EchelonError(
        Fault(f"{folder / _SERVER_FILE} cannot be read: {reason}", "start another sweep"),
        exit=ExitCode.NOT_FOUND,
    )


def _create_sweep(file: SweepFile, settings: SweepSettings, folder: Path, entity: str) -> str:
    """Create the sweep by wandb's own client, and write down what it is."""
    import wandb

    was_silent = os.environ.get("WANDB_SILENT")
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    project = file.project or os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):  # our stdout is for data
            name = wandb.sweep(build_sweep_config(file, settings), entity=entity, project=project)
    except Exception as error:
        raise EchelonError(
            Fault(
                f"wandb's server did not create the sweep: {summarize_error(error)}", _LOGIN_HINT
            ),
            exit=ExitCode.FAILED,
        ) from None
    finally:
        wandb.teardown()  # ends its service process; trials have their own
        del os.environ["WANDB_SILENT"]
        if was_silent is not None:
            os.environ["WANDB_SILENT"] = was_silent
    sweep = f"{entity}/{project}/{name}"
    known = {
        "sweep": sweep,
        "file": file.data,
        "metric": settings.metric,
        "run_cap": settings.run_cap,
        "program": bool(settings.program),
    }
    write_json_atomically(folder / _SERVER_FILE, known)
    for line in output.getvalue().splitlines():
        if line.startswith("Sweep URL: "):
            print(f"sweep {sweep}: {line.removeprefix('Sweep URL: ')}", file=sys.stderr)
    return sweep


def build_sweep_config(file: SweepFile, settings: SweepSettings) -> dict[str, Any]:
    """Return what the server is sent, with a command that other people's agents can run as well."""
    config = {"run_cap": settings.run_cap, "metric": settings.metric, **file.data}
    if file.program is None and file.command is None:
        train = ("${env}", "${interpreter}", "-m", "echelon", "train")
        config["command"] = [*train, *settings.overrides, "${args_no_hyphens}"]
    return config
