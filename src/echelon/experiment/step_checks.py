"""Checks an experiment with a step of its own: its models and optimizers, which may be several by
name, and parts that such a step takes the place of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from echelon.errors import Fault
from echelon.experiment.checks import (
    STATE_METHODS,
    accepts_arguments,
    describe_wrong_type,
    find_batch_faults,
    find_closure_faults,
    find_evaluate_faults,
    find_optimizer_faults,
    find_state_faults,
    find_wrapper_fault,
    format_signature,
    has_attributes,
)
from echelon.experiment.definition import Experiment

_INSTEAD = {
    "loss": "compute it in the step, and call session.backward(loss)",
    "predict": "call the model in the step",
    "metrics": "give an evaluate: (model, batches) → {name: (sum, count)}",
    "count": "give it in the step: session.backward(loss, count=…)",
    "scaler": "compute under torch.autocast in the step in bfloat16, which needs no scaler",
}
"""Parts that nothing uses beside a step, and what to do."""


def find_step_faults(experiment: Experiment) -> Iterator[Fault]:
    """Yields what is wrong with an experiment that has a step; every part may be anything here."""
    step = experiment.step
    if not callable(step) or not accepts_arguments(step, 2):
        found = format_signature(step) if callable(step) else describe_wrong_type(step)
        yield Fault(
            f"the experiment's step does not take a batch and a session: it is {found}",
            "give (batch, session) → numbers to log",
        )
    for name, remedy in _INSTEAD.items():
        if getattr(experiment, name) is not None:
            yield Fault(f"the experiment has a step of its own, so nothing uses its {name}", remedy)
    if experiment.eval_data is not None and experiment.evaluate is None:
        yield Fault(
            "the experiment has a step of its own and eval_data, but no evaluate",
            "give an evaluate: (model, batches) → {name: (sum, count)}",
        )
    if experiment.batch_transform is not None and experiment.train_data is None:
        yield Fault(
            "the experiment has a batch_transform, but no train_data", "leave one out, or give both"
        )
    yield from find_batch_faults(experiment)
    yield from find_evaluate_faults(experiment)
    yield from find_state_faults(experiment.state)
    faults = [
        *_find_kind_faults("model", experiment.model, nn.Module),
        *_find_kind_faults("optimizer", experiment.optimizer, torch.optim.Optimizer),
    ]
    yield from faults
    if not faults:
        yield from _find_training_faults(experiment)


def join_models(model: Any) -> nn.Module:
    """Return the model of an experiment; several by name as one module."""
    joined: nn.Module = nn.ModuleDict(model) if isinstance(model, Mapping) else model
    return joined


def _list_named(given: Any, kind: str) -> dict[str, Any]:
    """Return parts by how a fault names them: the optimizer, or the optimizer 'generator'."""
    if not isinstance(given, Mapping):
        return {f"the {kind}": given}
    return {f"the {kind} {name!r}": part for name, part in given.items()}


def _find_kind_faults(field: str, given: Any, kind: type) -> Iterator[Fault]:
    """Yields what is no part of this kind, and no mapping of names to such parts."""
    if isinstance(given, Mapping):
        if not given:
            yield Fault(f"the experiment's {field} is an empty dict", "give at least one by name")
        for name in given:
            # They name parameters and files, and models are attributes of an nn.ModuleDict.
            if not (isinstance(name, str) and name.isidentifier()) or hasattr(nn.ModuleDict, name):
                yield Fault(
                    f"the experiment's {field} has the name {name!r}",
                    f"give another one, a plain word such as {field}_a",
                )
    for which, part in _list_named(given, field).items():
        if not isinstance(part, kind):
            yield Fault(
                f"{which} of the experiment is {describe_wrong_type(part)}",
                f"give a {kind.__module__}.{kind.__name__}, or several as {{name: {field}, …}}",
            )


def _find_training_faults(experiment: Experiment) -> Iterator[Fault]:
    """Yields what keeps the optimizers from training the models, and the schedules from working."""
    model, optimizers = (
        join_models(experiment.model),
        _list_named(experiment.optimizer, "optimizer"),
    )
    if wrapper_fault := find_wrapper_fault(model):
        yield wrapper_fault
    else:
        for which, optimizer in optimizers.items():
            yield from find_optimizer_faults(model, optimizer, which)
    for which, optimizer in optimizers.items():
        yield from find_closure_faults(optimizer, which)
    if experiment.schedule is None:
        return
    for which, schedule in _list_named(experiment.schedule, "schedule").items():
        if not has_attributes(schedule, "step", *STATE_METHODS):
            yield Fault(
                f"{which} of the experiment is {describe_wrong_type(schedule)}",
                "give one of torch.optim.lr_scheduler, or what has its step and state_dict",
            )
        elif all(getattr(schedule, "optimizer", o) is not o for o in optimizers.values()):
            yield Fault(
                f"{which}, a {type(schedule).__name__}, sets the learning rate of another "
                "optimizer than those of the experiment, which would keep their own",
                "make it of an optimizer that the experiment returns",
            )
