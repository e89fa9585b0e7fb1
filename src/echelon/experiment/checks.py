"""Checks whether the parts that an experiment gives can train together, before anything is
computed.

Every check returns or yields faults instead of raising the first one, so that the user sees all of
them at once. What can only be seen when a loss is computed is checked in `loss_check.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.data.batches import get_columns
from echelon.data.loader_options import find_loader_faults
from echelon.errors import EchelonError, Fault
from echelon.experiment.sparse_parameters import find_sparse_tables

if TYPE_CHECKING:
    from echelon.experiment.definition import Experiment

_USE_ROW_OPTIMIZER = (
    "give echelon.optim.RowAdam or echelon.optim.RowSGD, which take dense and sparse gradients, "
    "or build the table with sparse=False"
)
STATE_METHODS = ("state_dict", "load_state_dict")
_METRICS_REMEDY = (
    "give a torchmetrics.Metric, several as {name: Metric}, or a function without arguments that "
    "makes them"
)
_METRIC_ATTRIBUTES = ("to", "reset", "update", "compute", "full_state_update", "metric_state")
"""What an evaluation asks of a metric; torchmetrics itself is slow to import."""
_PARALLEL_WRAPPERS = (
    *("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"),
    "FSDPModule",  # what `fully_shard` makes of a model
)
"""Classes of torch, by name: importing FSDP takes a while, and few experiments need it."""


def find_part_faults(experiment: Experiment) -> Iterator[Fault]:
    """Yields what is wrong with the parts of an experiment.

    The caller has made sure that `model` is an `nn.Module` and `optimizer` a
    `torch.optim.Optimizer`; all other parts may be anything here.
    """
    wrapper_fault = find_wrapper_fault(experiment.model)
    if wrapper_fault is not None:
        yield wrapper_fault
    else:  # a wrapper may replace the parameters, and the optimizer is not to blame for that
        yield from find_optimizer_faults(experiment.model, experiment.optimizer)
    yield from _find_column_faults(experiment)
    yield from find_batch_faults(experiment)
    if isinstance(experiment.loss, type):
        yield Fault(
            f"the experiment's loss is {describe_wrong_type(experiment.loss)}",
            f"make one: loss={experiment.loss.__name__}()",
        )
    elif callable(experiment.loss) and not accepts_arguments(experiment.loss, 2):
        yield Fault(
            "the experiment's loss does not take two arguments: "
            f"{format_signature(experiment.loss)}",
            "give (output, target) → Tensor",
        )
    yield from _find_count_faults(experiment.count)
    yield from _find_metric_faults(experiment.metrics)
    yield from find_evaluate_faults(experiment)
    yield from find_state_faults(experiment.state)
    schedule, scaler = experiment.schedule, experiment.scaler
    if schedule is not None and not has_attributes(schedule, "step", *STATE_METHODS):
        yield Fault(
            f"the experiment's schedule is {describe_wrong_type(schedule)}",
            "give one of torch.optim.lr_scheduler, or what has its step and state_dict",
        )
    else:
        yield from _find_schedule_faults(schedule, experiment.optimizer)
    if scaler is not None and not has_attributes(
        scaler, "scale", "unscale_", "step", "update", *STATE_METHODS
    ):
        yield Fault(
            f"the experiment's scaler is {describe_wrong_type(scaler)}",
            'give a torch.amp.GradScaler("cuda"), or leave it out',
        )


def _find_count_faults(count: Any) -> Iterator[Fault]:
    """Yields the fault of a count that is neither "sum" nor a function of output and target."""
    if count is None or count == "sum":
        return
    if not callable(count) or isinstance(count, type):
        yield Fault(
            f"the experiment's count is {describe_wrong_type(count)}",
            'give a function, (output, target) → number, or "sum" for a loss that is a sum',
        )
    elif not accepts_arguments(count, 2):
        yield Fault(
            f"the experiment's count does not take two arguments: {format_signature(count)}",
            "give (output, target) → number",
        )


def has_attributes(part: Any, *names: str) -> bool:
    """Return whether `part` is an object, not a class, with all of these attributes."""
    return not isinstance(part, type) and all(hasattr(part, name) for name in names)


def describe_wrong_type(part: Any) -> str:
    """Says what was given instead of the expected part: a class instead of an object, or another
    type."""
    if isinstance(part, type):
        return f"the class {part.__name__}, not an object of it"
    return f"of type {type(part).__name__}"


def find_closure_faults(optimizer: Any, which: str) -> Iterator[Fault]:
    """Yields the fault of an optimizer that cannot step with one gradient."""
    if isinstance(optimizer, torch.optim.LBFGS):
        yield Fault(
            f"{which} is LBFGS, which computes the loss several times in a step (it takes a "
            "closure), but a step here computes it once",
            "give an optimizer that trains with one gradient a step, such as torch.optim.AdamW",
        )


def find_wrapper_fault(model: nn.Module) -> Fault | None:
    """Return the fault of a model that is wrapped for several processes already, or has such a
    part."""
    for name, module in model.named_modules():
        kinds = [k for k in type(module).__mro__ if k.__module__.startswith("torch.")]
        wrapper = next((k.__name__ for k in kinds if k.__name__ in _PARALLEL_WRAPPERS), None)
        if wrapper is not None:
            which = f"its part {name!r}" if name else "it"
            return Fault(
                f"the experiment's model is made parallel twice: {which} is wrapped in {wrapper}, "
                "and Echelon wraps the whole model itself",
                "return the plain model, and call neither the wrapper nor init_process_group; "
                "launch.procs says how many processes there are, replica.kind=fsdp shards the "
                "model",
            )
    return None


def _find_schedule_faults(schedule: Any, optimizer: Optimizer) -> Iterator[Fault]:
    """Yields the fault of a schedule that sets the rates of another optimizer."""
    scheduled = getattr(schedule, "optimizer", optimizer)
    if scheduled is not optimizer:
        kind, own = type(schedule).__name__, type(optimizer).__name__
        yield Fault(
            f"the experiment's schedule, a {kind}, sets the learning rate of another optimizer "
            f"({type(scheduled).__name__}) than the experiment's ({own}), which would keep its own",
            f"make it of the optimizer that the experiment returns: {kind}(optimizer, …)",
        )


# --- parameters ---


def find_optimizer_faults(
    model: nn.Module, optimizer: Optimizer, which: str = "the optimizer"
) -> Iterator[Fault]:
    """Yields what keeps the optimizer from training the model: foreign, frozen or missing
    parameters. `which` names it in a fault."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    model_ids = {id(p) for p in model.parameters()}
    foreign_count = sum(id(p) not in model_ids for p in stepped)
    if foreign_count == len(stepped):
        yield Fault(
            f"{which} trains {foreign_count} tensor(s), and none is a parameter of the model",
            "make it of the model that the experiment returns: "
            f"{type(optimizer).__name__}(model.parameters(), …)",
        )
    elif foreign_count:
        yield Fault(
            f"{which} trains {foreign_count} tensor(s) that are not parameters of the model: "
            "they would be missing in snapshots and differ between processes",
            "make their module, such as a loss with weights, a part of the model: "
            "model.extra = module",
        )
    elif not any(p.requires_grad for p in stepped):
        whose = which if any(p.requires_grad for p in model.parameters()) else "the model"
        yield Fault(
            f"every parameter of {whose} is frozen (requires_grad=False), so there is nothing "
            "to train",
            "keep requires_grad=True for the parameters to train, and give them to the optimizer",
        )
    else:
        yield from _find_sparse_faults(model, optimizer)


def _find_sparse_faults(model: nn.Module, optimizer: Optimizer) -> Iterator[Fault]:
    """Yields combinations of sparse embeddings and optimizers that torch refuses after the first
    backward pass.

    Only torch's own optimizers are checked, as the optimizers of other libraries may accept both
    kinds of gradients.
    """
    kind, name = type(optimizer), type(optimizer).__name__
    if not kind.__module__.startswith("torch.optim."):
        return
    tables = {id(p): name for name, p in find_sparse_tables(model).items()}
    stepped = [
        (p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    ]
    dense = [p for p, _ in stepped if id(p) not in tables]
    sparse = [(tables[id(p)], group) for p, group in stepped if id(p) in tables]
    decayed = [table for table, group in sparse if group.get("weight_decay")]
    if kind is torch.optim.SparseAdam:
        if dense:
            yield Fault(
                f"the optimizer SparseAdam accepts only sparse gradients, but {len(dense)} of its "
                f"{len(stepped)} parameters have dense ones",
                _USE_ROW_OPTIMIZER if sparse else "give another, such as torch.optim.Adam",
            )
    elif kind not in (torch.optim.SGD, torch.optim.Adagrad):
        if sparse:
            yield Fault(
                f"the optimizer {name} does not accept sparse gradients, but {sparse[0][0]!r} "
                "belongs to an embedding with sparse=True",
                _USE_ROW_OPTIMIZER,
            )
    elif decayed:
        yield Fault(
            f"the optimizer {name} does not accept sparse gradients with a weight_decay, but "
            f"{decayed[0]!r} belongs to an embedding with sparse=True",
            "put it in a parameter group with weight_decay=0, or use echelon.optim.RowAdam",
        )


# --- a call of the model ---


def _find_column_faults(experiment: Experiment) -> Iterator[Fault]:
    """Yields data whose number of columns does not match the model's `forward`.

    Without `predict`, a batch is `(*inputs, target)`, so the model must accept as many inputs as
    there are columns before the target.
    """
    model = experiment.model
    for name in ("train_data", "eval_data"):
        columns = get_columns(getattr(experiment, name))
        if columns is None or experiment.predict is not None or _has_custom_call(model):
            continue
        inputs = len(columns) - 1
        if not accepts_arguments(model.forward, inputs):
            yield Fault(
                f"{name} is {len(columns)} tensor(s), the last of them the target, so the model "
                f"is called with {inputs} input(s), but it is {format_signature(model.forward)}",
                "give (*inputs, target), or say how a batch is used: echelon.Experiment(…, "
                "predict=lambda model, batch: (model(…), target))",
            )


def find_batch_faults(experiment: Experiment) -> Iterator[Fault]:
    """Yields what is wrong with how batches are made: functions of them, samplers and loader."""
    yield from find_collate_faults(experiment.collate_fn)
    yield from _find_function_faults(
        "batch_transform", experiment.batch_transform, "give (batch) → batch"
    )
    yield from find_sampler_faults(experiment.sampler, experiment.batch_sampler)
    if experiment.loader is not None:
        yield from find_loader_faults(experiment.loader)


def find_collate_faults(collate_fn: Any) -> Iterator[Fault]:
    """Yields what is wrong with a `collate_fn` before it is called."""
    yield from _find_function_faults("collate_fn", collate_fn, "give (list of samples) → batch")


def _find_function_faults(name: str, function: Any, remedy: str) -> Iterator[Fault]:
    if function is not None and not (callable(function) and accepts_arguments(function, 1)):
        found = (
            f"does not take one argument: {format_signature(function)}"
            if callable(function)
            else f"is {describe_wrong_type(function)}"
        )
        yield Fault(f"the {name} {found}", remedy)


def find_sampler_faults(sampler: Any, batch_sampler: Any) -> Iterator[Fault]:
    """Yields what is wrong with samplers before they are asked for anything."""
    for name, given in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if given is None:
            continue
        if isinstance(given, type) or not hasattr(given, "__iter__"):
            yield Fault(
                f"the {name} is {describe_wrong_type(given)}",
                "give what torch's DataLoader takes, such as a "
                "torch.utils.data.WeightedRandomSampler",
            )
        elif isinstance(given, Iterator):
            yield Fault(
                f"the {name} is an iterator, which gives one epoch and is used up",
                "give an object whose __iter__ begins anew, such as a list or a torch Sampler",
            )
        elif getattr(given, "num_replicas", 1) != 1:
            yield Fault(
                f"the {name}, a {type(given).__name__}, gives the share of one of "
                f"{given.num_replicas} processes, but Echelon cuts the shares itself",
                "give the sampler of all samples, or leave it out: every epoch is shuffled",
            )
    if sampler is not None and batch_sampler is not None:
        yield Fault(
            "there are both a sampler and a batch_sampler",
            "give one of them: a batch_sampler gives whole batches",
        )


def _has_custom_call(model: nn.Module) -> bool:
    """Return whether the model changes its own arguments, so that the signature of `forward` says
    nothing."""
    return bool(model._forward_pre_hooks) or type(model).__call__ is not nn.Module.__call__


def accepts_arguments(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with `count` positional arguments.

    Also true where the signature is unknown, as it is for functions that are not written in Python.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def format_signature(function: Callable[..., Any]) -> str:
    """Formats a function with its parameters, such as `Net.forward(x, mask)`."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name}{inspect.signature(function)}"


# --- an evaluation and state of the experiment's own ---


def find_evaluate_faults(experiment: Experiment) -> Iterator[Fault]:
    """Yields what is wrong with an evaluation of the experiment's own."""
    evaluate = experiment.evaluate
    if evaluate is None:
        return
    if not callable(evaluate) or not accepts_arguments(evaluate, 2):
        found = format_signature(evaluate) if callable(evaluate) else describe_wrong_type(evaluate)
        yield Fault(
            f"the experiment's evaluate does not take a model and batches: it is {found}",
            "give (model, batches) → {name: (sum, count)}",
        )
    if experiment.metrics is not None:
        yield Fault(
            "the experiment has metrics and an evaluate of its own, which takes their place",
            "leave one of the two out",
        )


def find_state_faults(state: Any) -> Iterator[Fault]:
    """Yields what is wrong with the experiment's state."""
    if state is None:
        return
    if not isinstance(state, Mapping):
        yield Fault(
            f"the experiment's state is {describe_wrong_type(state)}", "give {name: part, …}"
        )
        return
    for name, part in state.items():
        if not isinstance(name, str) or name.startswith("trainer."):
            yield Fault(
                f"the experiment's state has a part named {name!r}",
                "give it another name, as a text; those that begin with trainer. are Echelon's",
            )
        if not has_attributes(part, *STATE_METHODS):
            yield Fault(
                f"the experiment's state {name!r} is {describe_wrong_type(part)}",
                "give an object with state_dict() and load_state_dict(state)",
            )


# --- metrics ---


def is_metrics_factory(metrics: Any) -> bool:
    """Return whether `metrics` is a function that creates the metrics later, at the first
    evaluation."""
    return callable(metrics) and not hasattr(metrics, "update")


def get_named_metrics(metrics: Any) -> dict[str, Any]:
    """Return the metrics by name, and raise a fault for each one that an evaluation cannot use.

    A single metric is named by its class in lower case.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping) or has_attributes(metrics, "items"):
        named = {f"metric {name!r}": (name, metric) for name, metric in metrics.items()}
    else:
        named = {"metrics": (type(metrics).__name__.lower(), metrics)}
    faults = [
        Fault(f"the experiment's {which} is {describe_wrong_type(metric)}", _METRICS_REMEDY)
        for which, (_, metric) in named.items()
        if not has_attributes(metric, *_METRIC_ATTRIBUTES)
    ]
    if faults:
        raise EchelonError(*faults)
    return dict(named.values())


def _find_metric_faults(metrics: Any) -> Iterator[Fault]:
    if is_metrics_factory(metrics):
        if not accepts_arguments(metrics, 0):
            yield Fault(
                "the experiment's metrics is a function that takes arguments", _METRICS_REMEDY
            )
    else:
        try:
            get_named_metrics(metrics)
        except EchelonError as error:
            yield from error.faults
