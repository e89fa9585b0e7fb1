"""Whether the parts that an experiment gives can train together, before anything is computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.data.batches import columns_of
from echelon.errors import EchelonError, Fault, nearest
from echelon.train.tables import tables_of

if TYPE_CHECKING:
    from echelon.train.experiment import Experiment

_BOTH = (
    "give echelon.optim.RowAdam or echelon.optim.RowSGD, which take dense and sparse gradients, "
    "or build the table with sparse=False"
)
_STATE = ("state_dict", "load_state_dict")
_METRICS = (
    "give a torchmetrics.Metric, several as {name: Metric}, or a function without arguments that "
    "makes them"
)
_METRIC = ("to", "reset", "update", "compute", "full_state_update", "metric_state")
"""What an evaluation asks of a metric; torchmetrics itself is slow to import."""


def parts_faults(experiment: Experiment) -> Iterator[Fault]:
    """Of an experiment whose model is a model, and whose optimizer an optimizer."""
    yield from _parameter_faults(experiment.model, experiment.optimizer)
    yield from _call_faults(experiment)
    if callable(experiment.loss) and not _takes(experiment.loss, 2):
        yield Fault(
            f"the experiment's loss does not take two arguments: {_signed(experiment.loss)}",
            "give (output, target) → Tensor",
        )
    yield from _metric_faults(experiment.metrics)
    schedule, scaler = experiment.schedule, experiment.scaler
    if schedule is not None and not _offers(schedule, "step", *_STATE):
        yield Fault(
            f"the experiment's schedule is {described(schedule)}",
            "give one of torch.optim.lr_scheduler, or what has its step and state_dict",
        )
    if scaler is not None and not _offers(scaler, "scale", "unscale_", "step", "update", *_STATE):
        yield Fault(
            f"the experiment's scaler is {described(scaler)}",
            'give a torch.amp.GradScaler("cuda"), or leave it out',
        )


def _offers(part: Any, *names: str) -> bool:
    return not isinstance(part, type) and all(hasattr(part, name) for name in names)


def described(part: Any) -> str:
    """As what is wrong with it."""
    if isinstance(part, type):
        return f"the class {part.__name__} and no object of it"
    return f"of type {type(part).__name__}"


# --- parameters ---


def _parameter_faults(model: nn.Module, optimizer: Optimizer) -> Iterator[Fault]:
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    inside = {id(p) for p in model.parameters()}
    apart = sum(id(p) not in inside for p in stepped)
    if apart == len(stepped):
        yield Fault(
            f"the optimizer trains {apart} tensor(s), and none is a parameter of the model",
            "make it of the model that the experiment returns: "
            f"{type(optimizer).__name__}(model.parameters(), …)",
        )
    elif apart:
        yield Fault(
            f"the optimizer trains {apart} tensor(s) that are no parameters of the model: they "
            "would be in no snapshot, and differ between processes",
            "make what they belong to, such as a loss with weights, a part of the model: "
            "model.extra = it",
        )
    elif not any(p.requires_grad for p in stepped):
        whose = "optimizer" if any(p.requires_grad for p in model.parameters()) else "model"
        yield Fault(
            f"every parameter of the {whose} is frozen (requires_grad=False), so there is nothing "
            "to train",
            "leave requires_grad of those to be trained, and give them to the optimizer",
        )
    else:
        yield from _sparse_faults(model, optimizer)


def _sparse_faults(model: nn.Module, optimizer: Optimizer) -> Iterator[Fault]:
    """torch's optimizers say so after a backward pass; those of others may well take both."""
    kind, name = type(optimizer), type(optimizer).__name__
    if not kind.__module__.startswith("torch.optim."):
        return
    tables = {id(p): name for name, p in tables_of(model).items()}
    stepped = [
        (p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    ]
    dense = [p for p, _ in stepped if id(p) not in tables]
    sparse = [(tables[id(p)], group) for p, group in stepped if id(p) in tables]
    decayed = [table for table, group in sparse if group.get("weight_decay")]
    if kind is torch.optim.SparseAdam:
        if dense:
            yield Fault(
                f"the optimizer SparseAdam takes sparse gradients only, but {len(dense)} of its "
                f"{len(stepped)} parameters have dense ones",
                _BOTH if sparse else "give another, such as torch.optim.Adam",
            )
    elif kind not in (torch.optim.SGD, torch.optim.Adagrad):
        if sparse:
            yield Fault(
                f"the optimizer {name} takes no sparse gradients, but {sparse[0][0]!r} is of an "
                "embedding with sparse=True",
                _BOTH,
            )
    elif decayed:
        yield Fault(
            f"the optimizer {name} takes no sparse gradients with a weight_decay, but "
            f"{decayed[0]!r} is of an embedding with sparse=True",
            "give it a group with weight_decay=0, or the optimizer echelon.optim.RowAdam",
        )


# --- a call of the model ---


def _call_faults(experiment: Experiment) -> Iterator[Fault]:
    """Without predict, a batch is (*inputs, target): as many inputs as the model takes."""
    model = experiment.model
    for name in ("train_data", "eval_data"):
        columns = columns_of(getattr(experiment, name))
        if columns is None or experiment.predict is not None or _calls_its_own_way(model):
            continue
        inputs = len(columns) - 1
        if not _takes(model.forward, inputs):
            yield Fault(
                f"{name} is {len(columns)} tensor(s), the last of them the target, so the model "
                f"is called with {inputs} input(s), but it is {_signed(model.forward)}",
                "give (*inputs, target), or say how a batch is used: echelon.Experiment(…, "
                "predict=lambda model, batch: (model(…), target))",
            )


def _calls_its_own_way(model: nn.Module) -> bool:
    return bool(model._forward_pre_hooks) or type(model).__call__ is not nn.Module.__call__


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Also where nobody can say, as of functions that are not of Python."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _signed(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name}{inspect.signature(function)}"


# --- metrics, and the number that says what is best ---


def made_later(metrics: Any) -> bool:
    """Whether it is a function that makes them."""
    return callable(metrics) and not hasattr(metrics, "update")


def named_metrics(metrics: Any) -> dict[str, Any]:
    """The metrics by name, each of which an evaluation can use."""
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping) or _offers(metrics, "items"):
        named = {f"metric {name!r}": (name, metric) for name, metric in metrics.items()}
    else:
        named = {"metrics": (type(metrics).__name__.lower(), metrics)}
    faults = [
        Fault(f"the experiment's {which} is {described(metric)}", _METRICS)
        for which, (_, metric) in named.items()
        if not _offers(metric, *_METRIC)
    ]
    if faults:
        raise EchelonError(*faults)
    return dict(named.values())


def _metric_faults(metrics: Any) -> Iterator[Fault]:
    if made_later(metrics):
        if not _takes(metrics, 0):
            yield Fault("the experiment's metrics is a function that takes arguments", _METRICS)
    else:
        try:
            named_metrics(metrics)
        except EchelonError as error:
            yield from error.faults


def require_best(name: str, experiment: Experiment) -> None:
    """Where metrics are made later, the first evaluation says it."""
    if name == "loss":
        return
    if experiment.eval_data is None:
        raise EchelonError(
            Fault(
                f"trainer.best={name}, but the experiment has no eval_data, so nothing is "
                "evaluated",
                "give it eval_data, or leave trainer.best out",
            )
        )
    if made_later(experiment.metrics):
        return
    names = named_metrics(experiment.metrics)
    if not any(name == known or name.startswith(f"{known}_") for known in names):
        raise no_such_best(name, ["loss", *names])


def no_such_best(name: str, known: Iterable[str]) -> EchelonError:
    what = f"trainer.best={name}, but no such number is evaluated"
    return EchelonError(Fault(what, nearest(name, known)))
