"""A worker of a sweep: it takes a trial, runs it with all its ranks, records it, takes the next."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode
from echelon.runs.failure import shorten_to_line
from echelon.runs.run_folder import Run
from echelon.sweep.metric_history import MetricHistory, to_metrics_file_key, to_tracker_name
from echelon.sweep.sweep_file import SweepFile
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings
from echelon.sweep.sweep_news import SweepNews
from echelon.sweep.trial_command import (
    METRICS_VARIABLE,
    describe_parameters,
    expand_macros,
    format_override_value,
    format_overrides,
)
from echelon.sweep.trial_lease import make_worker_name
from echelon.sweep.trial_process import (
    ForkedTrialStarter,
    SlurmStepStarter,
    TrialProcess,
    TrialStarter,
)
from echelon.sweep.trial_store import LeasedTrial, LeaseLostError, TrialStore
from echelon.utils.text import print_to_stderr

_POLL_S = 0.1
_HEARTBEAT_S = 2.0
_IDLE_S = 0.2
_SAVE_TIMEOUT_S = 60.0
"""A trial that was asked to save and end is killed after so long."""
STOPPED, PRUNED, CANCELLED = "asked to end", "pruned", "cancelled"
"""Why a worker ends its trial: it has to end itself, hyperband says so, a user says so."""

Compose = Callable[..., Config]
"""Makes a configuration from overrides, and `program=` for another program."""


def run_sweep_worker(folder: str, slot: str, compose: Compose) -> int:
    """Run trials until there are no more or a signal asks to end, and return the exit code."""
    sweep = SweepFolder(Path(folder))
    sweep.require_trusted_files()
    is_in_slurm_job = sweep.read_settings().launcher == "slurm"
    # First of all, as the starter forks its server: nothing may have started threads before.
    starter: TrialStarter = SlurmStepStarter() if is_in_slurm_job else ForkedTrialStarter()
    return SweepWorker(sweep, slot, compose, starter, is_in_slurm_job).run()


class SweepWorker:
    """One worker. `is_in_slurm_job`: it is a batch job, and its trials are steps of that job."""

    def __init__(
        self,
        sweep: SweepFolder,
        slot: str,
        compose: Compose,
        starter: TrialStarter,
        is_in_slurm_job: bool,
    ) -> None:
        self._sweep, self._compose, self._starter = sweep, compose, starter
        self._settings, self._file = sweep.read_settings(), sweep.read_file()
        self._is_in_slurm_job = is_in_slurm_job
        self._store = TrialStore(sweep, make_worker_name(slot, os.environ))
        self._metric = sweep.read_metric().name
        self._key = to_metrics_file_key(self._metric, bool(self._settings.program))
        self._is_stop_requested = False
        self._news = SweepNews(sweep)
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_stop_requested = True

    def run(self) -> int:
        """Run trials, and return 0 when there are no more, 75 after a signal."""
        while not self._is_stop_requested:
            leased = self._store.take_trial()
            if isinstance(leased, LeasedTrial):
                self._run_trial(leased)
            elif leased:
                time.sleep(_IDLE_S)
            else:
                self._news.tell_end()
                return ExitCode.OK
        return ExitCode.PREEMPTED

    def _run_trial(self, leased: LeasedTrial) -> None:
        """Run a trial to its end and record the result, unless another worker has it by then."""
        print_to_stderr(f"trial {leased.number}: {describe_parameters(leased.parameters)}")
        run = self._sweep.get_trial_run(leased.number)
        try:
            config = compose_trial_config(
                self._settings, self._file, run, leased.parameters, self._compose
            )
            config = self._news.take_from(config)
            if run.read_status_file().get("state") == "finished":
                # Its worker was killed between the end of the run and the record of it.
                self._record_result(leased, run, ExitCode.OK, "")
                return
            # Before the start: a cancellation of an earlier attempt must not end this one, and one
            # that arrives after the start must not be removed.
            run.cancel_file.unlink(missing_ok=True)
            process = self._starter.start(config, run, self._build_trial_environment(run))
            try:
                code, stop_reason = self._follow_trial(leased, run, process)
                self._record_result(leased, run, code, stop_reason)
            except LeaseLostError:
                process.kill()
                print_to_stderr(
                    f"trial {leased.number} is another worker's: this one was silent for too long"
                )
        except EchelonError as error:
            self._store.end_trial(leased, "failed", error.faults[0].what)

    def _build_trial_environment(self, run: Run) -> dict[str, str]:
        return {METRICS_VARIABLE: str(run.metrics_file)} if self._settings.program else {}

    def _follow_trial(
        self, leased: LeasedTrial, run: Run, process: TrialProcess
    ) -> tuple[int, str]:
        """Follow a trial to its end; return the exit code, and why this worker ended it, if so."""
        history = MetricHistory(run.metrics_file, self._key)
        reported_count, stop_reason = 0, ""
        renewed_at, stop_requested_at = time.monotonic(), 0.0
        while (code := process.poll(_POLL_S)) is None:
            now = time.monotonic()
            # The heartbeat first: the rest may take long on a slow file system, and a worker that
            # has lost its lease must report nothing.
            if now - renewed_at > _HEARTBEAT_S:
                leased, renewed_at = self._store.renew_lease(leased), now
            values = history.read_all_values()
            if len(values) > reported_count and not stop_reason:
                reported_count = len(values)
                stop_reason = PRUNED if self._store.report_history(leased, values) else ""
            if self._is_stop_requested and not stop_reason:
                stop_reason = STOPPED
            if self._is_in_slurm_job and not stop_reason and run.cancel_file.exists():
                # Without Slurm, `echelon cancel` signals the process itself.
                stop_reason = CANCELLED
            if stop_reason and not stop_requested_at:
                process.request_stop()
                stop_requested_at = now
            elif stop_requested_at and now - stop_requested_at > _SAVE_TIMEOUT_S:
                process.kill()
        return code, stop_reason

    def _record_result(self, leased: LeasedTrial, run: Run, code: int, stop_reason: str) -> None:
        """Record how a trial ended, or release it if another worker has to continue it.

        Raises LeaseLostError if another worker has the trial by now.
        """
        # The whole history first: the last lines may have been written after the last poll, and
        # the result of a trial is computed from its recorded history.
        history = MetricHistory(run.metrics_file, self._key)
        if history.read_all_values():
            self._store.report_history(leased, history.values)
        if stop_reason == STOPPED or _was_interrupted(run, code, stop_reason):
            self._store.release_trial(leased, is_voluntary=stop_reason == STOPPED)
            # A Slurm job that lost its step is requeued, and continues with this trial.
            self._is_stop_requested |= self._is_in_slurm_job
        elif stop_reason == PRUNED and not self._ran_to_completion(code):
            self._store.end_trial(leased, "pruned")
            # After the result: a worker that has lost its lease must not touch the run. The run
            # itself knows only that it was asked to save and end.
            run.update_status(state="pruned")
        elif code != ExitCode.OK:
            self._store.end_trial(leased, "failed", _find_failure_cause(run, code))
        elif not history.values:
            cause = self._describe_missing_metric(leased.number, history)
            self._store.end_trial(leased, "failed", cause, is_fatal=True)
        else:
            self._store.end_trial(leased, "finished")
        reason = f", {stop_reason}" if stop_reason else ""
        print_to_stderr(f"trial {leased.number} ended with {code}{reason}")

    def _ran_to_completion(self, code: int) -> bool:
        """Return whether it was at its last step when it was asked to end.

        A program may exit with 0 when it is interrupted, so its 0 does not show that.
        """
        return code == ExitCode.OK and not self._settings.program

    def _describe_missing_metric(self, number: int, history: MetricHistory) -> str:
        is_program = bool(self._settings.program)
        names = sorted(k if is_program else to_tracker_name(k) for k in history.reported_keys)
        reported = ", ".join(names) or "nothing"
        return f"trial {number} never reported the metric {self._metric!r}; it reported {reported}"


def compose_trial_config(
    settings: SweepSettings, file: SweepFile, run: Run, values: Mapping[str, Any], compose: Compose
) -> Config:
    """Compose one trial: overrides of the command line, constants of the file, searched values."""
    parameters = {**file.constant_values, **values}
    own = [f"run.name={run.name}", f"run.dir={format_override_value(str(run.folder.parent))}"]
    if settings.program:
        program = expand_macros(settings.program, parameters)
        return compose([*settings.overrides, *own], program=program)
    if not any(word.startswith("track.progress=") for word in settings.overrides):
        own.append("track.progress=none")
    return compose([*settings.overrides, *format_overrides(parameters), *own])


def _was_interrupted(run: Run, code: int, stop_reason: str) -> bool:
    """Return whether it was killed, preempted or lost its node, and nobody wanted this trial to
    end."""
    if code in (ExitCode.NODE_LOST, -signal.SIGKILL):
        return True
    return code == ExitCode.PREEMPTED and not stop_reason and not run.cancel_file.exists()


def _find_failure_cause(run: Run, code: int) -> str:
    """Return one line: what the run recorded, else the last error or line of its logs."""
    if run.cancel_file.exists():
        return "cancelled"
    failure = run.read_status_file().get("failure")
    if code != ExitCode.OK and isinstance(failure, dict) and failure.get("summary"):
        return shorten_to_line(str(failure["summary"]))
    for log in (run.logs_folder / "trial.log", run.job_log_file):
        lines = [line.strip() for line in _read_tail(log).splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if errors or lines:
            return shorten_to_line((errors or lines)[-1])
    return f"exit code {code}"


def _read_tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace", encoding="utf-8")[-8192:]
    except OSError:
        return ""
