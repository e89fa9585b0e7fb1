"""Trainings that a submitted command starts: the run of the command becomes the training's.

`echelon submit` makes a run for each command. Without this module, a command that trains with
Echelon would have a second run, in a folder that nobody looks into. The command finds its run by a
variable, because any program may stand between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from echelon.config.schema import Config, RunConfig, find_differences
from echelon.runs.run_folder import Run
from echelon.runs.writer import claim_run_folder

SUBMITTED_RUN_VARIABLE = "ECHELON_RUN"
"""It holds the folder of the run, in all processes of a submitted command."""
_ATTEMPT_VARIABLES = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def get_submitted_run(env: Mapping[str, str]) -> Run | None:
    """Return the run of the submitted command that this process is part of; None outside of one."""
    folder = env.get(SUBMITTED_RUN_VARIABLE)
    return Run(Path(folder)) if folder else None


def place_beside_submitted_run(config: Config, env: Mapping[str, str]) -> Config:
    """Return the configuration with the folder of all runs in which the command was submitted.

    A command works in a folder of its own, where nobody would look for runs. A `run.dir` that was
    set stays.
    """
    run = get_submitted_run(env)
    if run is None or config.run.dir != RunConfig().dir:
        return config
    return replace(config, run=replace(config.run, dir=str(run.folder.parent)))


def take_submitted_run(config: Config, env: Mapping[str, str]) -> Run | None:
    """Return the run of the submitted command as the run of this training.

    The first training of a command takes it, and takes it again when the job is restarted. None
    means that the training needs a run of its own: outside of a submitted command, for a training
    with another name, for the second training of a command, and for trials of wandb.
    """
    run = get_submitted_run(env)
    if run is None or config.program or config.run.name not in (None, run.name):
        return None
    if env.get("WANDB_SWEEP_ID"):  # an agent of wandb runs one training after the other
        return None
    if Path(config.run.dir).absolute() != run.folder.parent or not _may_become(run, config):
        return None
    attempt = "-".join(env.get(name) or "0" for name in _ATTEMPT_VARIABLES)
    try:
        # Atomic: a command may start two trainings at once.
        run.get_training_claim_file(attempt).touch(exist_ok=False)
    except FileExistsError:
        return None
    # Shared with the agent of the command; where srun starts it without one, it is ours.
    claim_run_folder(run)
    if not run.command_file.exists():
        run.set_command_aside()
    run.write_config(replace(config, run=RunConfig(run.name, str(run.folder.parent))))
    return run


def _may_become(run: Run, config: Config) -> bool:
    """Return whether a run is a command that has not trained yet, or this training before the
    restart of its job."""
    before = run.read_config()
    if before.program:
        return True
    differences = find_differences(
        before.select_numerics_settings(), config.select_numerics_settings()
    )
    return config.trainer.resume != "never" and not differences
