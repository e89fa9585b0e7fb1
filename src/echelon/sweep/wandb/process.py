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

from echelon.config.outside import Trial
from echelon.errors import EchelonError
from echelon.jobs.cancel import cancel
from echelon.runs import Run
from echelon.sweep.folder import Settings
from echelon.sweep.given import written
from echelon.sweep.program import expanded
from echelon.sweep.wandb import record
from echelon.utils.processes import die_with_parent

_ECHELON = (sys.executable, "-m", "echelon")


def command_of(settings: Settings, trial: Trial, run_dir: Path) -> list[str]:
    """An experiment takes its parameters from the agent's file, on whichever rank is the first; a
    program of another kind has them in its words."""
    words = [*settings.words, f"run.dir={written(str(run_dir))}"]
    if not settings.program:
        return [*_ECHELON, "train", *words]
    program = expanded(settings.program, trial.values)
    return [*_ECHELON, "run", "--wait", *words, f"run.name={trial.run_name}", "--", *program]


def following(run: Run) -> list[str]:
    """To the end of its job."""
    return [*_ECHELON, "attach", str(run.folder)]


@dataclass(frozen=True)
class Process:
    _popen: subprocess.Popen[bytes]

    @staticmethod
    def start(trial: Trial, command: Sequence[str], folder: Path) -> Process:
        file = record.parameter_file(folder, trial.id)
        given = {name: {"value": value} for name, value in trial.given.items()}
        file.write_text(yaml.safe_dump({"wandb_version": 1, **given}), encoding="utf-8")
        entity, project, sweep = trial.sweep.split("/")
        variables = {
            "WANDB_ENTITY": entity,
            "WANDB_PROJECT": project,
            "WANDB_SWEEP_ID": sweep,
            "WANDB_RUN_ID": trial.id,
            "WANDB_SWEEP_PARAM_PATH": str(file.absolute()),
        }
        with record.log_file(folder, trial.id).open("ab") as log:
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
        return Process(popen)

    def ended(self) -> int | None:
        """Its exit code, once it has one."""
        return self._popen.poll()

    def cancel(self, run: Run) -> None:
        """Ask the world to save and end for good, wherever it runs."""
        if not run.status():
            self._popen.terminate()  # it has not begun
            return
        with contextlib.suppress(EchelonError), contextlib.redirect_stdout(io.StringIO()):
            cancel([run], now=False)

    def halt(self, run: Run, now: bool) -> None:
        """Ask it to save and end for now; on Slurm this process only looks at the job."""
        if now:
            self._popen.kill()
        elif run.status().get("launcher") == "slurm":
            self.cancel(run)
        else:
            self._popen.terminate()
