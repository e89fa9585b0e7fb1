"""`TrainingInfo`, the public class of what an experiment may know of its training."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.config.schema import Config

_PARAMETER = "training"
_ANNOTATION = re.compile(r"(\w+\.)*TrainingInfo( \| None)?")


@dataclass(frozen=True)
class TrainingInfo:
    """What an experiment may know of the training that it is part of.

    An experiment function receives it in a parameter that is annotated with this class, or that is
    named `training` and is not the first:

        def experiment(cfg, training: echelon.TrainingInfo):
            ...
            steps = training.count_total_steps(len(images))
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, cfg.lr, total_steps=steps)

    Parts that depend on `rank` are not the same on every rank, and Echelon relies on equal parts:
    use the rank for what a process prints or writes, not for the model or the data.

    Fields:

    batch_size  trainer.batch_size: the samples of one optimizer step over all processes.
    epochs      trainer.epochs: passes over the data; None where trainer.steps decides.
    steps       trainer.steps: optimizer steps in total; None where trainer.epochs decides.
    rank        The number of this process, from 0.
    world_size  The number of processes.
    run_folder  The folder of the run. Of several machines only the first need have it.
    step        The step that the training continues after; 0 at its beginning.
    samples     The samples of all processes up to this step.
    """

    batch_size: int
    epochs: int | None
    steps: int | None
    rank: int
    world_size: int
    run_folder: Path
    step: int = 0
    samples: int = 0

    def count_epoch_steps(self, sample_count: int) -> int:
        """Return the optimizer steps of one pass over data with so many samples."""
        return -(-sample_count // self.batch_size)

    def count_total_steps(self, sample_count: int) -> int:
        """Return the optimizer steps of the whole training over data with so many samples: those
        made so far, perhaps with another batch size, and those left. With a sampler the samples are
        those that it gives in an epoch; a batch_sampler decides on steps of its own."""
        if self.steps is not None:
            return self.steps
        epoch, offset = divmod(self.samples, sample_count)
        left = ((self.epochs or 0) - epoch) * self.count_epoch_steps(sample_count)
        return self.step + max(0, left - offset // self.batch_size)


def make_training_info(
    config: Config, rank: int, world_size: int, run_folder: Path, step: int = 0, samples: int = 0
) -> TrainingInfo:
    """Return what an experiment may know, from the settings of a run and its position."""
    trainer = config.trainer
    epochs = trainer.epochs if trainer.steps is None else None
    return TrainingInfo(
        trainer.batch_size, epochs, trainer.steps, rank, world_size, run_folder, step, samples
    )


def find_info_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of the parameter in which a function receives a TrainingInfo; None if it has
    none."""
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        annotation = parameter.annotation
        is_annotated = annotation is TrainingInfo or (
            isinstance(annotation, str) and _ANNOTATION.fullmatch(annotation)
        )
        if is_annotated or (index and parameter.name == _PARAMETER):
            return parameter.name
    return None
