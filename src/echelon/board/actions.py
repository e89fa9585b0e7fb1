"""Stop, resume, cancel, requeue and submit again: commands of `echelon` in processes of their own.

The board does nothing to a run itself. It builds the command that a person would type, shows what
that command says with `--dry-run`, and starts it when that was confirmed. A training that is
started so outlives the board.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.board.request import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    Request,
    RequestError,
    Response,
    Route,
    json_response,
)
from echelon.board.run_index import find_board_cache
from echelon.board.run_rows import make_run_id

if TYPE_CHECKING:
    from echelon.board.server import Board
    from echelon.runs.run_folder import Run

ACTIONS = ("stop", "resume", "cancel", "requeue", "submit")
_TAKE_OVERRIDES = ("resume", "submit")
_MAX_RUNS = 200
_MAX_OVERRIDES = 100
_MAX_OVERRIDE = 10_000
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*=[^\0]*", re.DOTALL)
"""KEY=VALUE, so never an option."""
_COMMAND_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 60.0
"""After so long a start is said to be under way still."""
_POLL_S = 0.1
_MAX_OUTPUT = 100_000
_REPEATED_WITHIN_S = 5.0
_KEPT_OUTPUTS = 100


class ActionCommand(NamedTuple):
    """One command of `echelon` that an action carries out."""

    words: tuple[str, ...]
    """After `echelon`."""
    folder: Path
    """Where it is typed."""
    run: Run | None
    """Of a command that starts a training: the run that it continues, or whose settings it
    takes."""
    root_number: int

    @property
    def starts_training(self) -> bool:
        return self.run is not None

    def __str__(self) -> str:
        return shlex.join(["echelon", *self.words])


class Outcome(NamedTuple):
    """What became of a command."""

    is_ok: bool
    output: str
    run_id: str | None = None
    """Of the run that was started."""
    is_running: bool = False
    """Whether the command goes on, as a training does."""


def act(request: Request) -> Response:
    """``POST /api/act``: plan an action, or carry it out.

    Body: ``{"action": "stop|resume|cancel|requeue|submit", "runs": [id …], "overrides":
    ["lr=0.1" …] (of resume and submit), "confirm": bool}``. ``stop`` saves and ends, ``cancel``
    kills, ``requeue`` has a Slurm job save and go on in another one, ``submit`` starts a new run
    with the settings of each run and the overrides.

    With ``confirm: false`` nothing is done, and the answer is ``{"ok": whether it can be done,
    "plan": what the command says with --dry-run, "command": text, a line per command, "folder":
    where it would be typed}``. With ``confirm: true`` it is ``{"ok", "output", "command", "runs":
    [ids of runs that were started], "running": whether they still run}``.

    403 unless the board was started with --act, and for folders of other users; 409 while the same
    run is acted on, and for the same action again at once.
    """
    board, data = request.board, request.json
    if not board.can_act:
        raise ForbiddenError("this board only shows", "start it with: echelon board --act")
    action, run_ids = data.get("action"), data.get("runs")
    if action not in ACTIONS:
        raise RequestError(f"there is no such action; known: {', '.join(ACTIONS)}")
    if not isinstance(run_ids, list) or not all(isinstance(each, str) for each in run_ids):
        raise RequestError("runs is not a list of ids")
    run_ids = list(dict.fromkeys(run_ids))
    if not 0 < len(run_ids) <= _MAX_RUNS:
        raise RequestError(f"give 1 to {_MAX_RUNS} runs")
    overrides = _check_overrides(action, data.get("overrides", []))
    commands = build_commands(board, action, run_ids, overrides)
    typed = "\n".join(map(str, commands))
    if data.get("confirm") is not True:
        outcomes = [_run_to_end(command, ["--dry-run"]) for command in commands]
        return json_response(
            {
                "ok": all(outcome.is_ok for outcome in outcomes),
                "plan": "\n\n".join(outcome.output for outcome in outcomes),
                "command": typed,
                "folder": str(commands[0].folder),
            }
        )
    with _claims.claim(run_ids, (action, *overrides)):
        outcomes = [_carry_out(command) for command in commands]
    for run_id in (*run_ids, *(outcome.run_id for outcome in outcomes)):
        if run_id is not None:
            with contextlib.suppress(NotFoundError, OSError):
                board.index.read_again(run_id)
    board.watch.request_check()
    return json_response(
        {
            "ok": all(outcome.is_ok for outcome in outcomes),
            "output": "\n".join(outcome.output for outcome in outcomes if outcome.output),
            "command": typed,
            "runs": [outcome.run_id for outcome in outcomes if outcome.run_id is not None],
            "running": any(outcome.is_running for outcome in outcomes),
        }
    )


def _check_overrides(action: str, overrides: Any) -> list[str]:
    if not isinstance(overrides, list) or not all(isinstance(word, str) for word in overrides):
        raise RequestError("overrides is not a list of texts")
    words = [word.strip() for word in overrides if word.strip()]
    if words and action not in _TAKE_OVERRIDES:
        raise RequestError(f"{action} takes no settings")
    if len(words) > _MAX_OVERRIDES:
        raise RequestError(f"give at most {_MAX_OVERRIDES} settings")
    for word in words:
        if len(word) > _MAX_OVERRIDE or not _OVERRIDE.fullmatch(word):
            raise RequestError(f"{word[:80]!r} is not a setting KEY=VALUE", "for example lr=0.1")
    return words


# --- commands ---


def build_commands(
    board: Board, action: str, run_ids: Sequence[str], overrides: Sequence[str]
) -> list[ActionCommand]:
    """Return the commands of an action; ForbiddenError for a run that is not one's own."""
    runs = [_find_own_run(board, run_id) for run_id in run_ids]
    roots = [int(run_id.partition(":")[0]) for run_id in run_ids]
    if action in ("stop", "cancel"):
        options = ["--now"] if action == "cancel" else []
        folders = [str(run.folder) for run in runs]
        return [ActionCommand(("cancel", *options, *folders), runs[0].folder.parent, None, -1)]
    commands = []
    for run, root in zip(runs, roots, strict=True):
        folder, typed = find_typing_folder(run), str(run.folder)
        if action == "submit":
            words = ("train", "--like", typed, *overrides)
        elif action == "requeue" and _is_active(run):
            commands.append(ActionCommand(("cancel", "--requeue", typed), folder, None, root))
            continue
        else:
            words = ("resume", typed, *overrides)
        if action == "requeue" and not run.read_job_id():
            raise ConflictError(f"run {run.name} was never a job of Slurm's", "resume it instead")
        commands.append(ActionCommand(words, folder, run, root))
    return commands


def _find_own_run(board: Board, run_id: str) -> Run:
    run: Run = board.find_run(run_id)
    if run.folder.parent not in board.roots or not run.config_file.exists():
        raise ForbiddenError(f"{run_id[:200]} is not a run of Echelon's", "it can be looked at")
    if run.folder.stat().st_uid != os.geteuid():
        raise ForbiddenError(
            f"{run.folder} belongs to another user", "the board acts on runs of its user alone"
        )
    return run


def _is_active(run: Run) -> bool:
    from echelon.runs.status import read_run_status

    return read_run_status(run).is_active


def find_typing_folder(run: Run) -> Path:
    """Return the folder in which a run was started, as far as that can be known: the one from which
    its `run.dir` leads to the folder of its runs. Relative paths among its settings begin there."""
    root = run.folder.parent
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
        given = Path(str(run.read_config_json().get("run", {}).get("dir") or ""))
        parts = given.parts
        if parts and not given.is_absolute() and root.parts[-len(parts) :] == parts:
            return Path(*root.parts[: -len(parts)])
    return root.parent if root.name == "runs" else root


# --- processes ---


class _Claims:
    """Which runs are acted on now, so that two clicks at once are one action."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._done: dict[tuple[str, tuple[str, ...]], float] = {}

    @contextlib.contextmanager
    def claim(self, run_ids: Sequence[str], what: tuple[str, ...]) -> Iterator[None]:
        """Act on these runs; ConflictError if somebody does already, or has just done the same."""
        keys = [(run_id, what) for run_id in run_ids]
        with self._lock:
            now = time.monotonic()
            self._done = {k: t for k, t in self._done.items() if now - t < _REPEATED_WITHIN_S}
            if busy := [run_id for run_id in run_ids if run_id in self._busy]:
                raise ConflictError(f"{busy[0]} is acted on already", "wait for that to end")
            if any(key in self._done for key in keys):
                raise ConflictError(
                    f"the same was done {_REPEATED_WITHIN_S:g} s ago or less",
                    "wait a moment if it is to be done twice",
                )
            self._busy.update(run_ids)
        try:
            yield
        finally:
            with self._lock:
                self._busy.difference_update(run_ids)
                self._done |= dict.fromkeys(keys, time.monotonic())


_claims = _Claims()


def _make_argv(words: Sequence[str]) -> list[str]:
    # As the script `echelon`, which does not import modules from where it is typed.
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe, "-m", "echelon", *words]


def _run_to_end(command: ActionCommand, options: Sequence[str] = ()) -> Outcome:
    try:
        done = subprocess.run(
            _make_argv([*command.words, *options]),
            cwd=command.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Outcome(False, f"{command} did not end within {_COMMAND_TIMEOUT_S:g} s")
    except OSError as error:
        from echelon.utils.os_errors import format_os_error_reason

        return Outcome(False, f"{command} cannot be started: {format_os_error_reason(error)}")
    text = done.stdout[-_MAX_OUTPUT:].decode(errors="replace").rstrip("\n")
    return Outcome(done.returncode == 0, text)


def _carry_out(command: ActionCommand) -> Outcome:
    return _start_training(command) if command.starts_training else _run_to_end(command)


def _start_training(command: ActionCommand) -> Outcome:
    """Start a command that trains, and wait until it has a run, or has ended.

    It is in a session of its own, with its output in a file: it goes on when the board ends.
    """
    assert command.run is not None
    is_new = command.words[0] == "train"
    root, begun = command.run.folder.parent, time.time()
    before = set(_list_names(root))
    output = _make_output_file(command)
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                _make_argv(command.words),
                cwd=command.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            from echelon.utils.os_errors import format_os_error_reason

            return Outcome(False, f"{command}: {format_os_error_reason(error)}")
    threading.Thread(target=process.wait, daemon=True).start()  # so that it leaves no zombie
    until = time.monotonic() + _START_TIMEOUT_S
    found: str | None = None
    while process.poll() is None and time.monotonic() < until:
        names = [n for n in _list_runs(root) if n not in before] if is_new else [command.run.name]
        found = next((n for n in names if _was_started(root / n, process.pid, begun)), None)
        if found is not None:
            break
        time.sleep(_POLL_S)
    code = process.poll()
    if found is None and code == 0:
        new = [name for name in _list_runs(root) if name not in before]
        found = command.run.name if not is_new else new[0] if len(new) == 1 else None
    run_id = None if found is None else make_run_id(command.root_number, found)
    return Outcome(code in (None, 0), _read_output(output, code), run_id, code is None)


def _list_runs(root: Path) -> list[str]:
    """Return the names of all folders of runs, without the link to the newest one."""
    from echelon.runs.latest import LATEST

    return [name for name in _list_names(root) if name != LATEST]


def _list_names(root: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(root)
    return []


def _was_started(folder: Path, pid: int, begun: float) -> bool:
    """Return whether a run was started by this process."""
    from echelon.runs.run_folder import Run

    status = Run(folder).read_status_file()
    process, started = status.get("process"), status.get("started")
    is_recent = isinstance(started, (int, float)) and started >= begun - 1
    return is_recent and isinstance(process, dict) and process.get("pid") == pid


def _make_output_file(command: ActionCommand) -> Path:
    """Return a new file in the user's cache folder for what a command prints; old ones go."""
    folder = find_board_cache() / "actions"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in sorted(_list_names(folder))[:-_KEPT_OUTPUTS]:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    moment = time.strftime("%Y%m%d-%H%M%S")
    return folder / f"{moment}-{command.words[0]}-{secrets.token_hex(4)}.log"


def _read_output(file: Path, code: int | None) -> str:
    text = ""
    with contextlib.suppress(OSError):
        text = file.read_bytes()[-_MAX_OUTPUT:].decode(errors="replace").rstrip("\n")
    if code is None:
        return "\n".join(filter(None, [text, f"started; what it prints is in {file}"]))
    return text or (f"ended with exit code {code}" if code else "")


ROUTES: list[Route] = [("POST", "/api/act", act)]
