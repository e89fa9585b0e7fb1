"""The process of a trial, started as `wandb agent` would start it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from echelon.config.untrusted import WandbTrial
from echelon.errors import EchelonError
from echelon.jobs.cancel import cancel_runs
from echelon.runs.run_folder import Run
from echelon.sweep.overrides import format_value
from echelon.sweep.program import expand_macros
from echelon.sweep.sweep_folder import SweepSettings
from echelon.sweep.wandb import trial_history
from echelon.utils.processes import die_with_parent

_ECHELON_COMMAND = (sys.executable, "-m", "echelon")


def build_trial_command(settings: SweepSettings, trial: WandbTrial, run_dir: Path) -> list[str]:
    """An experiment takes its parameters from the agent's file, on whichever rank is the first; a
    program of another kind has them in its words."""
    words = [*settings.words, f"run.dir={format_value(str(run_dir))}"]
    if not settings.program:
        return [*_ECHELON_COMMAND, "train", *words]
    program = expand_macros(settings.program, trial.values)
    return [
        *_ECHELON_COMMAND,
        "run",
        "--wait",
        *words,
        f"run.name={trial.run_name}",
        "--",
        *program,
    ]


def build_attach_command(run: Run) -> list[str]:
    """To the end of its job."""
    return [*_ECHELON_COMMAND, "attach", str(run.folder)]


@dataclass(frozen=True)
class WandbTrialProcess:
    _popen: subprocess.Popen[bytes]

    @staticmethod
    def start(trial: WandbTrial, command: Sequence[str], folder: Path) -> WandbTrialProcess:
        file = trial_history.parameter_file(folder, trial.id)
        given = {name: {"value": value} for name, value in trial.parameters.items()}
        file.write_text(yaml.safe_dump({"wandb_version": 1, **given}), encoding="utf-8")
        entity, project, sweep = trial.sweep.split("/")
        variables = {
            "WANDB_ENTITY": entity,
            "WANDB_PROJECT": project,
            "WANDB_SWEEP_ID": sweep,
            "WANDB_RUN_ID": trial.id,
            "WANDB_SWEEP_PARAM_PATH": str(file.absolute()),
        }
        with trial_history.log_file(folder, trial.id).open("ab") as log:
            popen = subprocess.Popen(
                list(command),
                env=os.environ | {key: value for key, value in variables.items() if value},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for us to hand on
                # Asked to save if we are killed, as nobody would hear of its result.
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        return WandbTrialProcess(popen)

    def poll(self) -> int | None:
        """Its exit code, once it has one."""
        return self._popen.poll()

    def cancel(self, run: Run) -> None:
        """Ask the world to save and end for good, wherever it runs."""
        if not run.read_status():
            self._popen.terminate()  # it has not begun
            return
        with contextlib.suppress(EchelonError), contextlib.redirect_stdout(io.StringIO()):
            cancel_runs([run], now=False)

    def stop(self, run: Run, now: bool) -> None:
        """Ask it to save and end for now; on Slurm this process only looks at the job."""
        if now:
            self._popen.kill()
        elif run.read_status().get("launcher") == "slurm":
            self.cancel(run)
        else:
            self._popen.terminate()
