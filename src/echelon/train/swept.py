"""A trial that `wandb agent` started, in a world that torchrun, srun or a person made.

Every rank inherits the agent's variables, or some do, where its machine alone has an agent. Rank 0
takes the parameters; the others have theirs from it, before anything is built, whatever they see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from echelon.config.check import batch_fault
from echelon.config.outside import as_trial, from_json, trial_of
from echelon.config.schema import Config
from echelon.errors import EchelonError
from echelon.train.experiment import declared_settings, load_function
from echelon.train.group import Group

if TYPE_CHECKING:
    from echelon.config.compose import OwnExperiment


def with_parameters(config: Config, group: Group, env: Mapping[str, str]) -> Config:
    """The same on every rank; without a sweep, what it was."""
    mine = trial_of(env) if group.world.rank == 0 else None
    told = group.share("trial", mine.to_json() if mine else "")
    if not told:
        return config
    config = as_trial(config, from_json(told), _own(str(config.experiment.get("entry"))))
    if fault := batch_fault(config.trainer.batch_size, group.world.size):
        raise EchelonError(fault)
    return config


def _own(entry: str) -> OwnExperiment | None:
    if not entry.rpartition(":")[0].endswith(".py"):
        return None
    from echelon.config.compose import OwnExperiment  # with Hydra, which a worker does without

    return OwnExperiment(entry, declared_settings(load_function(entry)))
