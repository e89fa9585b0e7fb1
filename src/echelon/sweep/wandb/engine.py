"""`echelon sweep --engine wandb`: wandb's server searches, the trials are whole runs started here.

The agents are those of agent.py. Each trial is a process `echelon train …` (or `echelon run …` for
another program) with a run folder beside the sweep's, so that every command for runs works on it.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from echelon.config.untrusted import WandbTrial
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.jobs.cancel import cancel_runs
from echelon.runs.failure import shorten_to_line
from echelon.runs.process_record import is_alive
from echelon.runs.run_folder import Run
from echelon.runs.status import read_run_status
from echelon.runs.trusted_code import require_trusted_folder
from echelon.sweep.display import print_report
from echelon.sweep.metric_history import MetricHistory, to_metrics_file_key
from echelon.sweep.plan import SweepPlan
from echelon.sweep.sweep_file import SweepFile
from echelon.sweep.sweep_folder import SweepLock, SweepSettings, make_unwritable_folder_error
from echelon.sweep.trial_command import expand_macros, format_override_value
from echelon.sweep.wandb import server_sweep, trial_records
from echelon.sweep.wandb.agent import AgentPool, AgentSlot
from echelon.sweep.wandb.local_report import build_report_from_records
from echelon.sweep.wandb.trial_records import DONE_STATES, WandbTrialRecord
from echelon.tracking import wandb_run
from echelon.utils.processes import die_with_parent
from echelon.utils.text import print_to_stderr

_ECHELON_COMMAND = (sys.executable, "-m", "echelon")


def run_agents(file: SweepFile, plan: SweepPlan, parallel: int, as_json: bool = False) -> int:
    """Run trials of the sweep until its server says that it is over, and return the exit code.

    The sweep is created on the server unless the folder knows one already, whose unfinished trials
    run first. The exit code is 1 when a trial failed, 75 after a signal.
    """
    server_sweep.require_wandb(os.environ)
    folder = plan.sweep.folder
    require_trusted_folder(folder)  # server.json names the sweep whose trials run
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise make_unwritable_folder_error(folder, error) from None
    with SweepLock(plan.sweep.lock_file, f"the sweep {plan.sweep.name} is at work already"):
        server, sweep = server_sweep.open_server_sweep(file, plan.settings, folder)
        backend = RunBackend(sweep, plan.settings, folder)
        pool = AgentPool(
            server,
            sweep,
            backend,
            [AgentSlot() for _ in range(parallel)],
            unfinished=trial_records.read_unfinished_records(folder),
            prints_rows=not as_json,
        )
        try:
            pool.run()
            return _report_sweep_outcome(pool, backend)
        finally:
            if as_json:
                print_report(build_report_from_records(plan.sweep), as_json)


def _report_sweep_outcome(pool: AgentPool, backend: RunBackend) -> int:
    """Print what the sweep has come to, and return the exit code."""
    records = trial_records.read_trial_records(backend.folder)
    states = Counter(record.state for record in (*records, *pool.refused))
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    print_to_stderr(f"sweep {pool.sweep}: {counts or 'no trial'}")
    for record in records:
        # The server was out of reach: wandb has kept the rows in files that can be sent later.
        if command := wandb_run.get_url_and_sync_rows(backend.get_trial_run(record)).get("send it"):
            print_to_stderr(f"trial {record.id} did not reach the server: {command}")
    if pool.refusal:
        raise pool.refusal
    if pool.failures_in_a_row >= pool.max_failures_in_a_row:
        first = pool.failed_trials[-pool.failures_in_a_row]
        log = trial_records.get_trial_log_file(backend.folder, first.id)
        raise EchelonError(
            Fault(
                f"{pool.failures_in_a_row} trials in a row have failed, the first, {first.id}, "
                f"because: {first.cause}",
                "look at the sweep there" if first in pool.refused else f"look into {log}",
            ),
            exit=ExitCode.FAILED,
        )
    if pool.is_stopping:
        print_to_stderr("the same command continues it")
        return ExitCode.PREEMPTED
    return ExitCode.FAILED if pool.failed_trials else ExitCode.OK


@dataclass(frozen=True)
class RunBackend:
    """A TrialBackend whose trials are runs, with their records in the sweep's folder."""

    sweep: str
    settings: SweepSettings
    folder: Path
    """The sweep's own folder, beside those of its trials."""

    def get_trial_run(self, record: WandbTrialRecord) -> Run:
        """Return the run of a trial."""
        return Run(self.folder.with_name(record.to_checked_trial().run_name))

    def has_result(self, trial_id: str) -> bool:
        """Return whether a record of the trial contains a result."""
        states = {
            record.id: record.state for record in trial_records.read_trial_records(self.folder)
        }
        return states.get(trial_id) in DONE_STATES

    def create_trial_record(self, trial_id: str, parameters: Mapping[str, Any]) -> WandbTrialRecord:
        """Return a record; EchelonError if a parameter is not one that a server may set."""
        record = WandbTrialRecord(trial_id, self.sweep, parameters)
        record.to_checked_trial()
        return record

    def can_resume_trial(self, record: WandbTrialRecord) -> bool:
        """Return whether the process that ran it before has saved and ended."""
        return not is_alive(self.get_trial_run(record).read_status_file().get("process"))

    def start_trial(self, record: WandbTrialRecord) -> RunTrial:
        """Start it, or attach to its Slurm job, which outlives an interrupted sweep.

        A job that came to its end meanwhile is attached to as well, which passes on how it ended:
        the trial has its result, and a second job would train it once more.
        """
        trial_records.write_record(self.folder, replace(record, state="running"))
        run = self.get_trial_run(record)
        command = _build_trial_command(self.settings, record.to_checked_trial(), self.folder.parent)
        if run.read_status_file().get("launcher") == "slurm":
            status = read_run_status(run)
            if status.job and (status.is_active or status.state in ("finished", "failed")):
                command = [*_ECHELON_COMMAND, "attach", str(run.folder)]
        return RunTrial.start(run, record, command, self.folder)

    def record_trial_end(
        self, record: WandbTrialRecord, exit_code: int, is_cancelled: bool, is_stopping: bool
    ) -> WandbTrialRecord:
        """Return the record with state, cause and metric, and write it."""
        run = self.get_trial_run(record)
        state = _determine_state(run, exit_code, is_cancelled, is_stopping)
        log = trial_records.get_trial_log_file(self.folder, record.id)
        ended = replace(
            record,
            state=state,
            cause=_find_failure_cause(run, log) if state == "failed" else "",
            value=self._read_metric_value(run),
            exit_code=exit_code,
        )
        trial_records.write_record(self.folder, ended)
        if state == "stopped" and is_cancelled and run.read_status_file():
            # The server ended it; nobody here cancelled the run.
            run.update_status(state="pruned")
        return ended

    def _read_metric_value(self, run: Run) -> float | None:
        key = to_metrics_file_key(self.settings.metric["name"], bool(self.settings.program))
        values = MetricHistory(run.metrics_file, key).read_all_values()
        return values[-1] if values else None


def _determine_state(run: Run, exit_code: int, is_cancelled: bool, is_stopping: bool) -> str:
    """Derive the state from the run folder too: programs have exit codes of their own, and so has
    a process that is interrupted while it starts."""
    if exit_code == ExitCode.OK:
        return "finished"
    has_saved = (
        exit_code == ExitCode.PREEMPTED or run.read_status_file().get("state") == "preempted"
    )
    if is_cancelled or (has_saved and run.cancel_file.exists() and not is_stopping):
        return "stopped"
    return "preempted" if has_saved or is_stopping else "failed"


def _find_failure_cause(run: Run, log: Path) -> str:
    """Return one line: the failure that the run recorded, else the first error in its output, else
    the last line of it."""
    failure = run.read_status_file().get("failure")
    if isinstance(failure, dict) and failure.get("summary"):
        return shorten_to_line(str(failure["summary"]))
    lines = log.read_text(errors="replace", encoding="utf-8").split("\n") if log.exists() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    printed = [line.strip() for line in lines if line.strip()]
    return shorten_to_line((errors[:1] or printed[-1:] or ["it printed nothing"])[0])


def _build_trial_command(settings: SweepSettings, trial: WandbTrial, run_dir: Path) -> list[str]:
    """Return the command of a trial.

    An experiment reads its parameters from the file that the environment names, on rank 0; a
    program gets them as arguments.
    """
    own = [f"run.dir={format_override_value(str(run_dir))}", "notify=[]"]
    overrides = [*settings.overrides, *own]
    if not settings.program:
        return [*_ECHELON_COMMAND, "train", *overrides]
    name = f"run.name={trial.run_name}"
    program = expand_macros(settings.program, trial.values)
    return [*_ECHELON_COMMAND, "run", "--wait", *overrides, name, "--", *program]


@dataclass(frozen=True)
class RunTrial:
    """An AgentTrial: the process of a trial that is a run."""

    _run: Run
    _process: subprocess.Popen[bytes]

    @staticmethod
    def start(run: Run, record: WandbTrialRecord, command: Sequence[str], folder: Path) -> RunTrial:
        """Start the command with its output in the sweep's folder."""
        variables = trial_records.prepare_trial_environment(folder, record)
        with trial_records.get_trial_log_file(folder, record.id).open("ab") as log:
            process = subprocess.Popen(
                list(command),
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us to pass on
                # If we are killed, it saves and ends: nobody would report its result.
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        return RunTrial(run, process)

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def cancel(self) -> None:
        """Ask the run to save and end for good, wherever it runs."""
        if not self._run.read_status_file():
            self._process.terminate()  # there is no run yet
            return
        with contextlib.suppress(EchelonError), contextlib.redirect_stdout(io.StringIO()):
            cancel_runs([self._run], now=False)

    def interrupt(self, signal_number: int, is_repeated: bool) -> None:
        """Ask the run to save and end; the second time, kill it.

        With Slurm the process only follows a job, so the job is cancelled.
        """
        if is_repeated:
            self._process.kill()
        elif self._run.read_status_file().get("launcher") == "slurm":
            self.cancel()
        else:
            self._process.terminate()
