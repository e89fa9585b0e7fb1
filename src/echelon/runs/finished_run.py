"""A run that has nothing left to do, so that resuming it need not queue or start anything."""

from __future__ import annotations

from echelon.config.schema import Config, find_differences
from echelon.runs.run_folder import Run
from echelon.runs.status import FolderFacts, read_run_status


def describe_finished_run(run: Run, config: Config, resumed: Config, typed: str) -> str | None:
    """Return what to tell a person who resumes a finished run, or None if there is work left.

    ``config`` is the run's, ``resumed`` the same with the overrides, ``typed`` how the run was
    named. Work is left if it is to train longer or from another snapshot, or if its last snapshot
    is gone. Settings that change its numbers are for the checks of a start, which refuse them. A
    program knows itself whether it has work.
    """
    if config.program or resumed.trainer.resume != "auto" or _is_longer(config, resumed):
        return None
    if config.trainer.early_stop != resumed.trainer.early_stop:
        return None
    if find_differences(config.select_numerics_settings(), resumed.select_numerics_settings()):
        return None
    step, saved_step = FolderFacts.read(run).step, run.find_newest_step()
    if read_run_status(run).state != "finished" or not saved_step or saved_step < (step or 0):
        return None
    key, value = _get_length(config)
    return (
        f"run {run.name} is finished after step {saved_step} ({key}={value}): nothing was started\n"
        f"  train longer  echelon resume {typed} {key}={2 * value}"
    )


def _get_length(config: Config) -> tuple[str, int]:
    """Return the setting that says how long a run trains, and its value."""
    trainer = config.trainer
    if trainer.steps is not None:
        return "trainer.steps", trainer.steps
    return "trainer.epochs", trainer.epochs or 0


def _is_longer(config: Config, resumed: Config) -> bool:
    """Return whether a run is to train longer than before, as far as that is known: epochs and
    steps cannot be compared."""
    (key, before), (resumed_key, now) = _get_length(config), _get_length(resumed)
    return now > before if key == resumed_key else True
