"""A trial that `wandb agent` started, in a world that torchrun, srun or a person made.

Every rank inherits the agent's variables, or some do, where its machine alone has an agent. Rank 0
takes the parameters; the others have theirs from it, before anything is built, whatever they see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from echelon.config.schema import Config
from echelon.config.untrusted import apply_trial, parse_trial, read_trial
from echelon.config.validate import check_batch_size
from echelon.errors import EchelonError
from echelon.experiment.definition import find_settings_class, load_function
from echelon.parallel.process_group import RankGroup

if TYPE_CHECKING:
    from echelon.config.compose import UserExperiment


def apply_trial_parameters(config: Config, group: RankGroup, env: Mapping[str, str]) -> Config:
    """The same on every rank; without a sweep, what it was."""
    own_trial = read_trial(env) if group.world.rank == 0 else None
    shared_trial = group.share_from_rank0("trial", own_trial.to_json() if own_trial else "")
    if not shared_trial:
        return config
    config = apply_trial(
        config, parse_trial(shared_trial), _find_own_experiment(str(config.experiment.get("entry")))
    )
    if fault := check_batch_size(config.trainer.batch_size, group.world.size):
        raise EchelonError(fault)
    return config


def _find_own_experiment(entry: str) -> UserExperiment | None:
    if not entry.rpartition(":")[0].endswith(".py"):
        return None
    from echelon.config.compose import UserExperiment  # with Hydra, which a worker does without

    return UserExperiment(entry, find_settings_class(load_function(entry)))
