"""`echelon stacks`: where all ranks of a run stand."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.hosts.ask import ask_host, join_last_lines
from echelon.jobs.agent_request import ask_agent
from echelon.launch.node.rank_stacks import find_py_spy, read_stack_with_py_spy
from echelon.launch.ssh import remote_command
from echelon.launch.ssh.host_check import wrap_for_host
from echelon.runs.process_record import is_alive
from echelon.runs.run_folder import Run
from echelon.runs.stack_report import RankStack, StackReport
from echelon.runs.stack_text import render_report
from echelon.runs.status import RunStatus, read_run_status

_SSH_LIMIT_S = 60.0


def show_stacks(run: Run, all_threads: bool, as_json: bool, asks_here: bool) -> int:
    """Print where all ranks of a run stand. Raises EchelonError where that cannot be found out.

    `asks_here`: the agent of this very folder is asked, whatever the status says; for the host of
    node 0, whose folder is a copy.
    """
    report = _ask_agent(run) if asks_here else _collect_report(run)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        print(render_report(report, all_threads), end="")
    return ExitCode.OK


def _collect_report(run: Run) -> StackReport:
    """Return where the ranks stand, by whatever way leads to them."""
    status = read_run_status(run)
    if status.state != "running" and status.state != "starting":
        raise _make_not_running_error(run, status)
    hosts = run.read_status_file().get("hosts")
    if run.stack_agent_file.exists():
        return _ask_agent(run)
    if status.launcher == "ssh" and isinstance(hosts, list) and hosts:
        return _ask_first_host(run, str(hosts[0]))
    if status.launcher == "inline":
        return _read_inline(run, status)
    raise EchelonError(
        Fault(
            f"run {run.name} is {status.state}, but no agent of it answers in {run.folder}",
            "wait until its ranks have been started; programs that srun starts by itself "
            "(mode=srun) have no agent",
        ),
        exit=ExitCode.NOT_FOUND,
    )


def _make_not_running_error(run: Run, status: RunStatus) -> EchelonError:
    note = f" ({status.note})" if status.note else ""
    reports = run.list_hang_reports()
    if status.is_active:
        hint = "ask again when it runs"
    elif reports:
        hint = f"where all ranks stood when it hung: {reports[-1]}"
    else:
        hint = f"`echelon logs {run.name}` shows what it wrote"
    what = f"run {run.name} has no ranks now: it is {status.state}{note}"
    return EchelonError(Fault(what, hint), exit=ExitCode.NOT_FOUND)


# --- by its agent ---


def _ask_agent(run: Run) -> StackReport:
    return StackReport.from_json(ask_agent(run, {}))


def _ask_first_host(run: Run, host: str) -> StackReport:
    """Ask on the first host of launch=ssh, which does not share the folder with this machine."""
    config = run.read_config(runs_code=False)
    launch = config.launch
    words = [sys.executable, "-m", "echelon", "stacks", str(run.folder), "--here", "--json"]
    words = wrap_for_host(config, words)
    argv = remote_command.make_argv(launch, host, (os.getcwd(), "/"), words)
    variables = remote_command.select_variables(os.environ, launch.carry)
    answer = ask_host(argv, remote_command.encode_variables(variables), _SSH_LIMIT_S)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return StackReport.from_json(answer.read_message() or {})
    why = answer.failure or join_last_lines(answer.stderr) or f"exit code {answer.exit_code}"
    raise EchelonError(
        Fault(
            f"run {run.name} was asked on its first host {host}, without success: {why}",
            f"type it there: echelon stacks {run.folder}",
        ),
        exit=ExitCode.FAILED,
    )


# --- without an agent ---


def _read_inline(run: Run, status: RunStatus) -> StackReport:
    """Read the stack of a run without an agent: of one process, or of rank 0 of a world that
    torchrun or srun started."""
    process = run.read_status_file().get("process")
    is_here = is_alive(process)
    if not isinstance(process, dict) or not is_here:
        raise EchelonError(
            Fault(
                f"run {run.name} has no agent, and its process is on {status.host}",
                f"ssh {status.host} echelon stacks {run.folder}",
            )
        )
    py_spy, pid = find_py_spy(), process["pid"]
    if py_spy is None:
        raise EchelonError(
            Fault(
                f"run {run.name} has no agent (launch=inline), so only py-spy can read the stack "
                f"of its process {pid}, and py-spy is not installed",
                "pip install py-spy, or start runs with launch=local",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    threads, problem = read_stack_with_py_spy(py_spy, pid)
    if not threads:
        raise EchelonError(
            Fault(
                f"{problem} (process {pid} of run {run.name})",
                "reading another process needs ptrace: the same user, and "
                "/proc/sys/kernel/yama/ptrace_scope at 0, or root",
            ),
            exit=ExitCode.FAILED,
        )
    others = (
        ("only rank 0 is shown: the others were not started by an agent of Echelon",)
        if (status.world or 1) > 1
        else ()
    )
    rank = RankStack(0, str(process["host"]), pid, "py-spy", threads)
    return StackReport(run.name, time.time(), (rank,), others)
