"""Builds what evaluates a training, and what results decide: the best snapshot, an early end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from echelon.config.schema import Config
from echelon.data.bad_samples import BadSampleList
from echelon.data.batches import BatchSource, make_source
from echelon.errors import EchelonError, Fault
from echelon.experiment.definition import Experiment, get_parts_by_name
from echelon.experiment.precision import Precision
from echelon.experiment.schedule_length import waits_for_metric
from echelon.parallel.process_group import RankGroup
from echelon.runs.heartbeat import Heartbeat
from echelon.runs.run_folder import Run
from echelon.train.best_metric import find_direction, resolve_best_metric
from echelon.train.early_stop import EarlyStop
from echelon.train.evaluate import Evaluator
from echelon.train.evaluations import Evaluations


def open_data(
    experiment: Experiment,
    name: str,
    workers: int,
    device: torch.device,
    bad_samples: BadSampleList | None,
) -> BatchSource:
    """Return the source of train_data or eval_data."""
    data, collate_fn = getattr(experiment, name), experiment.collate_fn
    return make_source(data, name, workers, device, collate_fn, experiment.loader, bad_samples)


def make_bad_sample_list(config: Config, run: Run) -> BadSampleList | None:
    """Return the list of samples that the run skips; None where the first one is to end it."""
    trainer = config.trainer
    if trainer.bad_samples == "raise":
        return None
    return BadSampleList(run.bad_samples_file, trainer.max_bad_samples)


def make_evaluator(
    experiment: Experiment,
    config: Config,
    group: RankGroup,
    devices: Sequence[torch.device],
    heartbeat: Heartbeat,
    precision: Precision,
    bad_samples: BadSampleList | None,
) -> Evaluator | None:
    """Return the evaluator, or None where the experiment has neither data to evaluate by nor an
    evaluation of its own."""
    if experiment.eval_data is None and experiment.evaluate is None:
        return None
    first, last = devices[0], devices[-1]
    source = None
    if experiment.eval_data is not None:
        workers = config.trainer.loader_workers
        source = open_data(experiment, "eval_data", workers, first, bad_samples)
    size = config.trainer.eval_batch_size or config.trainer.batch_size
    return Evaluator(experiment, source, size, group, first, last, heartbeat.beat, precision)


def resolve_best(config: Config, evaluator: Evaluator | None) -> Config:
    """Return the configuration with what is better of the number that `trainer.best` names."""
    return resolve_best_metric(config, _get_metrics(evaluator, config.trainer.best))


def make_evaluations(
    experiment: Experiment, config: Config, evaluator: Evaluator | None
) -> Evaluations:
    """Return the evaluations of a run, whose settings say what is better (`resolve_best`)."""
    schedules = {
        name: schedule
        for name, schedule in get_parts_by_name("schedule", experiment.schedule).items()
        if waits_for_metric(schedule)
    }
    best, best_is = config.trainer.best, config.trainer.best_is
    faults = []
    for name, schedule in schedules.items():
        which = f"the experiment's {name}, a {type(schedule).__name__},"
        if evaluator is None:
            faults.append(
                Fault(
                    f"{which} waits for a number of every evaluation, but the experiment has no "
                    "eval_data, so nothing is evaluated",
                    "give it eval_data, or leave it out and set trainer.schedule=cosine",
                )
            )
        elif schedule.mode != best_is:
            faults.append(
                Fault(
                    f"{which} has mode={schedule.mode!r}, but the best value of {best}, by which "
                    f"it is stepped (trainer.best), is its {best_is}",
                    f"make it with mode={best_is!r}, or set trainer.best to another number",
                )
            )
    if faults:
        raise EchelonError(*faults)
    early_stop = _make_early_stop(config, evaluator)
    return Evaluations(evaluator, config.trainer, early_stop, list(schedules.values()))


def _make_early_stop(config: Config, evaluator: Evaluator | None) -> EarlyStop | None:
    """Return what ends the training early, where `trainer.early_stop` asks for it."""
    trainer = config.trainer
    name, patience = trainer.early_stop.metric or trainer.best, trainer.early_stop.patience
    if patience is None:
        return None
    if evaluator is None:
        raise EchelonError(
            Fault(
                f"trainer.early_stop.patience={patience}, but the experiment has no eval_data, so "
                "nothing is evaluated",
                "give it eval_data, or leave trainer.early_stop out",
            )
        )
    if name == trainer.best:
        return EarlyStop(name, trainer.best_is, patience)
    metrics = _get_metrics(evaluator, name)
    return EarlyStop(name, find_direction(name, metrics, "trainer.early_stop.metric"), patience)


def _get_metrics(evaluator: Evaluator | None, best: str) -> Mapping[str, Any] | None:
    """Return the metrics by name; None where nothing is evaluated. They are not created where the
    loss decides, as nothing need be known of them then."""
    if evaluator is None:
        return None
    if evaluator.experiment.evaluate is not None:
        return {best: evaluator.experiment.evaluate}  # its names are known when it has run
    return evaluator.metrics if best != "loss" else {}
