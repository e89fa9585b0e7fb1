"""A trial that `wandb agent` started, in a world that torchrun, srun or a person started.

Some or all ranks inherit the agent's variables. Rank 0 takes the trial's parameters from them, and
the other ranks take them from rank 0 before anything is built, whatever their own variables say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from echelon.config.schema import Config
from echelon.config.untrusted import apply_trial, parse_wandb_trial, read_wandb_trial
from echelon.config.validate import find_size_faults
from echelon.errors import EchelonError
from echelon.experiment.loading import load_function
from echelon.experiment.settings_declaration import describe_experiment
from echelon.parallel.process_group import RankGroup

if TYPE_CHECKING:
    from echelon.config.compose import UserExperiment


def apply_trial_parameters(config: Config, group: RankGroup, env: Mapping[str, str]) -> Config:
    """Return the configuration with the trial's parameters, the same on every rank.

    Outside of a sweep it is the given configuration.
    """
    own_trial = read_wandb_trial(env) if group.world.rank == 0 else None
    shared_trial = group.share_from_rank0("trial", own_trial.to_json() if own_trial else "")
    if not shared_trial:
        return config
    config = apply_trial(
        config,
        parse_wandb_trial(shared_trial),
        _find_user_experiment(str(config.experiment.get("entry"))),
    )
    if faults := find_size_faults(config, group.world.size):
        raise EchelonError(*faults)
    return config


def _find_user_experiment(entry: str) -> UserExperiment | None:
    """Return the user's experiment with its settings, where the experiment is a file of the
    user."""
    if not entry.rpartition(":")[0].endswith(".py"):
        return None
    return describe_experiment(entry, load_function(entry))
