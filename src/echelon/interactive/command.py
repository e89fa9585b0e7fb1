"""The verbs of `echelon dev`: open, list, end, and what a dry run prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.interactive.allocation import (
    AllocationFolder,
    complete_dev_config,
    compute_cost,
    render_job_script,
    render_shell_script,
)
from echelon.interactive.attach import find_or_request, open_shell, wait_until_running
from echelon.interactive.queue import find_allocation, list_allocations
from echelon.interactive.ssh_entry import SshEntry, make_ssh_command, open_ssh_entry
from echelon.launch.plan import render_columns
from echelon.launch.slurm.sbatch import require_sbatch
from echelon.runs.slurm_queue import get_last_error_line, run_slurm_command
from echelon.utils.text import format_duration

_JSON_VERSION = 1


@dataclass(frozen=True)
class DevOptions:
    """The options as they were typed."""

    name: str
    idle_s: float
    ports: Sequence[int]
    wants_ssh: bool
    ssh_config: str | None
    detaches: bool
    as_json: bool


def open_allocation(config: Config | None, options: DevOptions) -> int:
    """Find the allocation of the name, or ask for it, and open a shell in it; returns the exit
    code. Without a configuration it is only looked for."""
    config = complete_dev_config(config) if config is not None else None
    files = AllocationFolder.find(options.name, os.environ)
    require_sbatch()
    job = find_or_request(config, files, options.idle_s)
    print(f"job {job}: {files.job_name}", file=sys.stderr, flush=True)
    try:
        wait_until_running(files, job)
    except KeyboardInterrupt:
        print(
            f"\njob {job} stays in the queue\n  hint: the same command comes back to it, "
            f"`echelon dev --end --name {files.name}` ends it",
            file=sys.stderr,
        )
        return ExitCode.INTERRUPTED
    entry = None
    given = Path(options.ssh_config).expanduser().absolute() if options.ssh_config else None
    if options.wants_ssh or options.ports:
        entry = open_ssh_entry(files, job, given)
    state = files.read_state(job) or {}
    if options.as_json:
        print(json.dumps(_describe_open(files, state, entry, options.ports), indent=2))
    elif entry is not None:
        _print_entry(entry, given, options.ports)
    if options.detaches or options.as_json:
        return ExitCode.OK
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(f"job {job} runs on {state.get('nodes')}; type this at a terminal for a shell")
        return ExitCode.OK
    return open_shell(files, job)


def _describe_open(
    files: AllocationFolder,
    state: dict[str, Any],
    entry: SshEntry | None,
    ports: Sequence[int],
) -> dict[str, Any]:
    return {
        "version": _JSON_VERSION,
        "name": files.name,
        "job": state.get("job"),
        "node": state.get("node"),
        "nodes": state.get("nodes"),
        "idle_limit_s": state.get("idle_limit_s"),
        "ssh": entry.to_dict() if entry else None,
        "forward": [entry.make_forwarding_command(port) for port in ports] if entry else [],
    }


def _print_entry(entry: SshEntry, config: Path | None, ports: Sequence[int]) -> None:
    print(f"  log in     {make_ssh_command(entry, config)}")
    for port in ports:
        print(f"  port {port:<5} {entry.make_forwarding_command(port)}")
        print(f"    from another machine  {entry.make_distant_command(port)}", flush=True)


def print_dry_run(config: Config, options: DevOptions) -> int:
    """Print what would be asked for, what it costs, and both scripts."""
    config = complete_dev_config(config)
    files = AllocationFolder.find(options.name, os.environ)
    cost = compute_cost(config)
    script = render_job_script(config, files, options.idle_s)
    shell = render_shell_script(config, files)
    command = ["sbatch", "--parsable", str(files.job_script)]
    steps = [
        f"use the allocation {files.job_name} if it is in Slurm's queue",
        f"otherwise {' '.join(command)}",
        "wait until it runs; Ctrl-C leaves it in the queue",
        *(["write an ssh entry for its first node"] if options.wants_ssh or options.ports else []),
        *(["open a shell there: a step of the job"] if not options.detaches else []),
        f"end the job once nobody has used it for {format_duration(options.idle_s)}",
    ]
    if options.as_json:
        cost_fields = cost._asdict() | {"text": str(cost)}
        plan = {"version": _JSON_VERSION, "name": files.name, "cost": cost_fields}
        more = {"steps": steps, "commands": [command], "script": script, "shell": shell}
        print(json.dumps(plan | more | {"launch": asdict(config.launch)}, indent=2))
        return ExitCode.OK
    print(f"cost: {cost}\n")
    print("\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1)))
    for title, text in (("script:", script), ("shell:", shell)):
        print(f"\n{title}")
        print("\n".join(f"  {line}" for line in text.splitlines()))
    return ExitCode.OK


def print_list(as_json: bool) -> int:
    """Print the allocations of this user."""
    require_sbatch()
    rows = []
    for found in list_allocations():
        state = AllocationFolder.find(found.name, os.environ).read_state(found.job) or {}
        rows.append(found._asdict() | {k: state.get(k) for k in ("idle_s", "idle_limit_s")})
    if as_json:
        print(json.dumps({"version": _JSON_VERSION, "allocations": rows}, indent=2))
        return ExitCode.OK
    if not rows:
        print("no allocation; `echelon dev launch=slurm` asks for one")
        return ExitCode.OK
    table = [("name", "job", "state", "nodes", "left", "idle")]
    for row in rows:
        idle = "" if row["idle_s"] is None else format_duration(row["idle_s"])
        where = row["nodes"] or row["reason"]
        table.append((row["name"], row["job"], row["state"].lower(), where, row["time_left"], idle))
    print("\n".join(render_columns(table)))
    return ExitCode.OK


def end_allocation(name: str, as_json: bool) -> int:
    """End the allocation of this name, and what runs in it."""
    require_sbatch()
    files = AllocationFolder.find(name, os.environ)
    found = find_allocation(name)
    if found is None:
        raise EchelonError(
            Fault(
                f"there is no allocation {name!r} in Slurm's queue",
                "`echelon dev --list` shows those there are",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    if files.folder.is_dir():
        files.ended_file.write_text("echelon dev --end was typed\n", encoding="utf-8")
    done = run_slurm_command("scancel", found.job)
    if done.returncode:
        files.ended_file.unlink(missing_ok=True)
        raise EchelonError(
            Fault(
                f"Slurm does not end job {found.job}: {get_last_error_line(done)}",
                f"scancel {found.job}",
            ),
            exit=ExitCode.FAILED,
        )
    files.ssh_config_file.unlink(missing_ok=True)
    if as_json:
        print(json.dumps({"version": _JSON_VERSION, "name": name, "job": found.job}))
    else:
        print(f"job {found.job} ends: {files.job_name}")
    return ExitCode.OK
