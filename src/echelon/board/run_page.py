"""All about one run but its curves and its logs: settings, time line, speed, snapshots, files.

What `echelon show --json` prints is read by the same functions. Nothing here reads all of
metrics.jsonl, so a run of any length is there at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from echelon.board.request import (
    BYTES_TYPE,
    TEXT_TYPE,
    NotFoundError,
    Request,
    Response,
    Route,
    StreamResponse,
    json_response,
)
from echelon.board.safe_files import open_inside, read_inside

if TYPE_CHECKING:
    from echelon.board.run_rows import AskSlurm
    from echelon.runs.curves import RunOverview
    from echelon.runs.history import RunHistory
    from echelon.runs.record import RunRecord
    from echelon.runs.run_folder import Run

_HANG_TIME = re.compile(r"hang-(\d{8}-\d{6})")
_MAX_TIMELINE = 5000
"""The newest are shown."""
_MAX_TEXT_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_NOT_COMPARED = ("run.name", "run.dir", "rank", "world_size", "master")


def show_run(request: Request) -> Response:
    """``GET /api/run/{id}``: everything about one run.

    Answer ``{"row": the row of the table, "details": {…}}``. The details of a run of ours are what
    `echelon show --json` prints, with ``metrics`` as ``{name: {"is", "best", "best_step", "last",
    "last_step", "min", "max", "count"}}``, and::

        {"own": true if its folder belongs to the user of the board,
         "all_settings": [{"name", "value", "default": bool}],
         "command": text or null, that starts the same training as a new run
         "resume_command": text or null, "cancel_command": text or null (of one that is active),
         "logs_command": text,
         "code": {"entry", "commit"?, "folder"?, "files"?, "bytes"?} (the last three where the run
                 was submitted with a copy of its code),
         "environment": {"command"?, "typed in"?, "python"?, "executable"?, "echelon"?: of the last
                 start, "setup"?: [lines], "builder"?, "files"?, "folder"?},
         "machines": [{"host", "launcher", "job", "nodes", "processes", "since", "losses"}],
         "timeline": [{"t", "kind", "text", "step"}] the oldest first; kinds: start train stop
                 finished fault lost joined left slow ok machine return hang snapshot,
         "speed": {"samples_per_s", "step_ms", "data_ms", "compute_ms", "communication_ms",
                 "optimizer_ms", "mfu", "memory_gb", "slowest_rank", "slowest_x"} where measured;
                 the parts of a step are means of the last samples,
         "memory": {"last_gb", "max_gb", "max_step"} or null,
         "stragglers": [{"rank", "host", "factor", "step", "until_step", "phase"}],
         "failure": {"rank", "host", "step", "summary", "detail"} or null,
         "snapshots": [{"step", "best", "folder", "bytes", "saved", "resume_command"}],
         "files": [{"name", "bytes", "changed", "kind": "file|log|trace|hang|script"}],
         "copies": what is kept of its state in memory, or null}

    A name in ``files`` of the kinds trace, log, hang and script can be asked for with
    ``GET /api/run/{id}/file?name=``, the plan with ``GET /api/run/{id}/plan``. Of a run of another
    program the details are ``settings``, ``all_settings``, ``metrics``, ``files``, ``folder``,
    ``started``, ``ended``, ``host``, ``program``, ``faults`` and ``left_out`` (what of its files
    could not be read, and what has no place here: ``{text: times}``).
    """
    run_id = request.path_values["id"]
    run = request.board.find_run(run_id)
    row = json.loads(request.board.index.read_again(run_id))
    if row.get("source", "echelon") != "echelon":
        return json_response({"row": row, "details": _describe_foreign_run(run, row)})
    return json_response({"row": row, "details": read_details(run, request.board.index.ask_slurm)})


def read_details(run: Run, ask_slurm: AskSlurm | None = None) -> dict[str, Any]:
    """Return the details of a run of ours. ``ask_slurm`` is for callers that have asked already."""
    from echelon.runs.accounting import account_for_run
    from echelon.runs.annotations import read_annotations
    from echelon.runs.curves import choose_best_direction, read_overview, read_record_history
    from echelon.runs.record import read_run_records
    from echelon.runs.slurm_queue import query_jobs
    from echelon.views.run_details import describe_run, measure_recent_speed

    [record], _ = read_run_records([run], ask_slurm or query_jobs)
    overview, history = read_overview(record), read_record_history(record)
    logged_step = overview.summary.last_training_step
    accounting = account_for_run(history, None if logged_step is None else int(logged_step))
    data = describe_run(
        record,
        history,
        accounting,
        read_annotations(run),
        overview.progress.step,
        overview.trained_s,
    )
    data["metrics"] = {
        name: {
            "is": (best_is := choose_best_direction(name, record)),
            "best": each.get_best(best_is),
            "best_step": each.max_step if best_is == "max" else each.min_step,
            **{k: getattr(each, k) for k in ("last", "last_step", "min", "max", "count")},
        }
        for name, each in overview.summary.metrics.items()
    }
    last, parts = measure_recent_speed(record, history)
    snapshots = _list_snapshots(run, data["snapshots"])
    return data | {
        "own": _is_own(run.folder),
        "all_settings": _list_settings(record),
        **_make_commands(record),
        "code": _describe_code(record),
        "environment": _describe_environment(record),
        "machines": _list_machines(record, history),
        "timeline": list_timeline(run, history, snapshots),
        "speed": last | {f"{part}_ms": value for part, value in parts.items()},
        "memory": _describe_memory(overview),
        "stragglers": (data["accounting"] or {}).get("slow_ranks", []),
        "failure": _describe_failure(record),
        "snapshots": snapshots,
        "files": _list_files(run),
        "copies": record.facts.status.get("memory_copies"),
    }


def _is_own(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.stat().st_uid == os.geteuid()
    return False


def _list_settings(record: RunRecord) -> list[dict[str, Any]]:
    from echelon.views.run_settings import find_non_defaults, flatten_settings

    changed = find_non_defaults(record)
    return [
        {"name": name, "value": value, "default": name not in changed}
        for name, value in sorted(flatten_settings(record).items())
    ]


def _make_commands(record: RunRecord) -> dict[str, str | None]:
    """Return what to type to go on with the run, to start it anew, and to end it."""
    from echelon.config.schema import find_script

    folder = str(record.run.folder)
    is_active = record.run_status.is_active
    is_resumable = not record.problem and find_script(record.entry_point) is None
    is_new = is_resumable and record.run.submission_file is None
    return {
        "command": shlex.join(["echelon", "train", "--like", folder]) if is_new else None,
        "resume_command": shlex.join(["echelon", "resume", folder]) if is_resumable else None,
        "cancel_command": shlex.join(["echelon", "cancel", folder]) if is_active else None,
        "logs_command": shlex.join(["echelon", "logs", folder, *(["-f"] if is_active else [])]),
    }


def _describe_code(record: RunRecord) -> dict[str, Any]:
    from echelon.runs.start_record import read_start_command

    found: dict[str, Any] = {"entry": record.entry_point or None}
    if commit := read_start_command(record.run).get("commit"):
        found["commit"] = commit
    source = _read_submission(record).get("source")
    if isinstance(source, dict):
        known = ("folder", "commit", "files", "bytes", "size_bytes")
        found |= {key: source[key] for key in known if key in source}
        if isinstance(found.get("files"), list):
            found["files"] = len(found["files"])
    return found


def _describe_environment(record: RunRecord) -> dict[str, Any]:
    from echelon.runs.start_record import read_start_command

    start = read_start_command(record.run)
    names = {"command": "command", "folder": "typed in"}
    names |= {name: name for name in ("python", "executable", "echelon")}
    found: dict[str, Any] = {shown: start[n] for n, shown in names.items() if start.get(n)}
    if setup := record.get_section("launch").get("setup"):
        found["setup"] = setup
    environment = _read_submission(record).get("environment")
    if isinstance(environment, dict):
        known = ("builder", "files", "folder", "python")
        found |= {key: environment[key] for key in known if key in environment}
    return found


def _read_submission(record: RunRecord) -> dict[str, Any]:
    from echelon.utils.files import read_json_object

    file = record.run.submission_file
    return (read_json_object(file) or {}) if file is not None else {}


def _list_machines(record: RunRecord, history: RunHistory) -> list[dict[str, Any]]:
    """Return the machines of which the run's files speak, the newest first."""
    found: dict[str, dict[str, Any]] = {}
    for phase in reversed(history.phases):
        size = {"nodes": phase.nodes, "processes": phase.processes}
        where = {"launcher": phase.launcher, "job": phase.job, "since": phase.started}
        if phase.host:
            found.setdefault(phase.host, {"host": phase.host, **where, **size, "losses": 0})
    hosts = record.get_section("launch").get("hosts")
    names = [str(host) for host in hosts] if isinstance(hosts, list) else []
    names += [host for phase in history.phases for r in phase.rounds for host in r.hosts]
    for name in names:
        nothing = dict.fromkeys(("launcher", "job", "since", "nodes", "processes"))
        found.setdefault(name, {"host": name, **nothing, "losses": 0})
    for phase in history.phases:
        for round_ in phase.rounds:
            for host in round_.hosts:
                found[host]["losses"] += 1
    return list(found.values())


def _describe_memory(overview: RunOverview) -> dict[str, Any] | None:
    memory = overview.summary.metrics.get("memory_gb")
    if memory is None:
        return None
    return {"last_gb": memory.last, "max_gb": memory.max, "max_step": memory.max_step}


def _describe_failure(record: RunRecord) -> dict[str, Any] | None:
    failure = record.facts.failure
    if not failure or record.state in ("finished", "running", "starting"):
        return None
    return {key: failure.get(key) for key in ("rank", "host", "step", "summary", "detail")}


# --- the time line ---


def list_timeline(
    run: Run, history: RunHistory, snapshots: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what happened to a run, the oldest first."""
    events = [*_iterate_phase_events(history), *_iterate_other_events(run)]
    for file in run.list_hang_reports():
        with contextlib.suppress(OSError, ValueError):
            stamp = _HANG_TIME.match(file.name)
            when = (
                time.mktime(time.strptime(stamp[1], "%Y%m%d-%H%M%S"))
                if stamp
                else file.stat().st_mtime
            )
            text = f"a rank was hanging; where all ranks stood: {file.name}"
            events.append(_make_event(when, "hang", text, None))
    for each in snapshots:
        best = ", the best so far" if each["best"] else ""
        if each["saved"] is not None:
            text = f"snapshot of step {each['step']}{best}"
            events.append(_make_event(each["saved"], "snapshot", text, each["step"]))
    return sorted(events, key=lambda event: event["t"])[-_MAX_TIMELINE:]


def _make_event(when: float, kind: str, text: str, step: float | None) -> dict[str, Any]:
    return {"t": when, "kind": kind, "text": text, "step": step}


def _iterate_phase_events(history: RunHistory) -> Iterator[dict[str, Any]]:
    from echelon.runs.history import KILLED

    for phase in history.phases:
        size = ""
        if phase.nodes and phase.processes:
            nodes = f"{phase.nodes} nodes, " if phase.nodes > 1 else ""
            size = f", {nodes}{phase.processes} process{'es' * (phase.processes > 1)}"
        place = f"job {phase.job}" if phase.job else phase.host
        again = f", attempt {phase.attempt + 1}" if phase.attempt else ""
        requeued = ", queued again" if phase.requeues else ""
        text = f"started: {phase.launcher} {place}{size}{again}{requeued}"
        yield _make_event(phase.started, "start", text, None)
        if phase.trained_since is not None:
            after = f" after step {phase.first_step}" if phase.first_step else ""
            yield _make_event(phase.trained_since, "train", f"trains{after}", phase.first_step)
        for round_ in phase.rounds:
            kind = "lost" if round_.lost else "left" if round_.left else "joined"
            ranks = round_.lost or round_.left or round_.joined
            named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            what = round_.reason or f"{named} {kind}; {round_.processes} processes go on"
            text = f"{what}; stood still for {round_.standstill_s:.1f} s"
            yield _make_event(round_.began, kind, text, round_.step)
        for machine in phase.bad_machines:
            fate = (
                f"left out, {machine.replaced_by or 'no other'} took over"
                if machine.is_left_out
                else f"stays, since {machine.kept_because or 'nothing is known'}"
            )
            text = f"{machine.host} is at fault ({machine.reason}): {fate}"
            yield _make_event(machine.time, "machine", text, machine.step)
        if phase.ended is not None:
            is_fault = phase.cause.startswith("failed") or phase.cause == KILLED
            kind = "finished" if phase.cause == "finished" else "fault" if is_fault else "stop"
            yield _make_event(phase.ended, kind, phase.cause or "ended", phase.last_step)


def _iterate_other_events(run: Run) -> Iterator[dict[str, Any]]:
    """Yield what the history's phases have no time of."""
    from echelon.runs.metrics_file import is_number, iterate_metrics

    with contextlib.suppress(OSError):
        for line in iterate_metrics(run.history_file):
            name, when, step = line.get("event"), line.get("time"), line.get("step")
            if not is_number(when) or not is_number(step):
                continue
            if name == "return":
                text = f"all ranks went back from step {line.get('from_step')} to step {step}"
                yield _make_event(when, "return", text, step)
            elif name == "slow":
                who, factor = f"rank {line.get('rank')} on {line.get('host')}", line.get("factor")
                text = f"{who} keeps up again"
                if is_number(factor):
                    text = f"{who} is slow: {factor:.3g} × the median"
                yield _make_event(when, "slow" if is_number(factor) else "ok", text, step)


# --- files ---


def _list_snapshots(run: Run, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        each
        | {
            "bytes": _measure_size_bytes(Path(each["folder"])),
            "saved": _get_change_time(Path(each["folder"])),
            "resume_command": shlex.join(
                ["echelon", "resume", str(run.folder), f"trainer.resume={each['folder']}"]
            ),
        }
        for each in known
    ]


def _measure_size_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; links are not followed."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += _measure_size_bytes(Path(entry.path))
            else:
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _get_change_time(path: Path) -> float | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def _list_files(run: Run) -> list[dict[str, Any]]:
    """Return the files of a run that a person may want to look at."""
    kinds = [
        *(("file", path) for path in (run.metrics_file, run.config_file, run.status_file)),
        *(("file", path) for path in (run.history_file, run.bad_samples_file)),
        *(("script", path) for path in (run.script_file,)),
        *(("log", path) for path in sorted(run.logs_folder.glob("*.log"))),
        *(("hang", path) for path in run.list_hang_reports()),
        *(("trace", path) for path in sorted(run.traces_folder.glob("*"))),
    ]
    found = []
    for kind, path in kinds:
        with contextlib.suppress(OSError):
            status = path.stat()
            name = str(path.relative_to(run.folder))
            file = {"name": name, "bytes": status.st_size, "changed": status.st_mtime}
            found.append(file | {"kind": kind})
    return found


def show_file(request: Request) -> Response | StreamResponse:
    """``GET /api/run/{id}/file?name=``: a hang report, the batch script, a trace or a log of a run,
    as ``files`` of its details names it. Texts are cut after 1 MB;
    traces and logs are sent whole."""
    run = request.board.find_run(request.path_values["id"])
    name = request.get("name")
    kinds = {file["name"]: file["kind"] for file in _list_files(run)}
    kind = kinds.get(name)
    if kind in ("hang", "script"):
        return Response(read_inside(run.folder / name, run.folder, _MAX_TEXT_BYTES), TEXT_TYPE)
    if kind in ("trace", "log"):
        handle = open_inside(run.folder / name, run.folder)
        shown = quote(f"{run.name}-{Path(name).name}")
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{shown}"}
        return StreamResponse(_iterate_chunks(handle), BYTES_TYPE, headers)
    raise NotFoundError(f"run {run.name} has no file {name[:80]!r} to look at")


def _iterate_chunks(handle: int) -> Iterator[bytes]:
    with os.fdopen(handle, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def show_plan(request: Request) -> Response:
    """``GET /api/run/{id}/plan``: ``{"text"}``, the plan of the run's launcher as `--dry-run` would
    print it here. EchelonError for a run whose configuration cannot be read."""
    import socket

    from echelon.gpus import count_visible_gpus
    from echelon.launch.plan import LocalMachine
    from echelon.launch.registry import make_launcher

    run = request.board.find_run(request.path_values["id"])
    config = run.read_config(runs_code=False)
    machine = LocalMachine(os.environ, socket.gethostname(), count_visible_gpus(os.environ))
    return json_response({"text": make_launcher(config).plan(config, machine).render_text()})


# --- settings of two runs ---


def compare_settings(request: Request) -> Response:
    """``GET /api/run/{id}/settings?with=ID2``: ``{"same": n, "differ": [{"name", "mine",
    "theirs"}]}``. A setting that only one of the two has is null in the other, and has ``"only":
    "mine"`` or ``"theirs"``."""
    board = request.board
    mine = _flatten_run_settings(board.find_run(request.path_values["id"]))
    theirs = _flatten_run_settings(board.find_run(request.get("with")))
    names = sorted(mine.keys() | theirs.keys())
    differ = []
    for name in names:
        if name in mine and name in theirs and mine[name] == theirs[name]:
            continue
        one: dict[str, Any] = {"name": name, "mine": mine.get(name), "theirs": theirs.get(name)}
        if not (name in mine and name in theirs):
            one["only"] = "mine" if name in mine else "theirs"
        differ.append(one)
    return json_response({"same": len(names) - len(differ), "differ": differ})


def _flatten_run_settings(run: Run) -> dict[str, Any]:
    from echelon.config.schema import flatten
    from echelon.runs.record import read_run_records
    from echelon.utils.files import read_json_object
    from echelon.views.run_settings import flatten_settings

    if (foreign := read_json_object(run.folder / "foreign.json")) is not None:
        settings = foreign.get("settings")
        return flatten(settings) if isinstance(settings, dict) else {}
    [record], _ = read_run_records([run])
    flat = flatten_settings(record)
    return {name: value for name, value in flat.items() if name not in _NOT_COMPARED}


def _describe_foreign_run(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    from echelon.runs.metrics_summary import read_summary
    from echelon.utils.files import read_json_object

    facts = read_json_object(run.folder / "foreign.json") or {}
    known = ("folder", "started", "ended", "host", "program", "faults", "left_out")
    settings = facts.get("settings") or row.get("settings") or {}
    return {
        **{name: facts.get(name) or None for name in known},
        "state": row.get("state"),
        "note": row.get("why"),
        "own": False,
        "settings": settings,
        "all_settings": [
            {"name": name, "value": value, "default": False}
            for name, value in sorted(settings.items())
        ],
        "metrics": {
            name: {k: getattr(each, k) for k in ("last", "last_step", "min", "max", "count")}
            for name, each in read_summary(run).metrics.items()
        },
        "timeline": [],
        "machines": [],
        "snapshots": [],
        "stragglers": [],
        "speed": {},
        "files": _list_files(run),
    }


ROUTES: list[Route] = [
    ("GET", "/api/run/{id}", show_run),
    ("GET", "/api/run/{id}/settings", compare_settings),
    ("GET", "/api/run/{id}/file", show_file),
    ("GET", "/api/run/{id}/plan", show_plan),
]
