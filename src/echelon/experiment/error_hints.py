"""Explains errors of torch that a mistake in an experiment causes, in words of the experiment.

torch reports where a tensor did not fit or a process group was missing. The mistake is usually in
what the experiment returned, often with no line of the user's in the traceback.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from echelon.data.batches import get_columns
from echelon.errors import EchelonError, Fault

if TYPE_CHECKING:
    from echelon.experiment.definition import Experiment

_PREDICT_EXAMPLE = "echelon.Experiment(…, predict=lambda model, batch: (model({}), {}))"
_WRONG_COUNT = re.compile(r"forward\(\) (takes|missing)")
_WRONG_DTYPE = re.compile(
    r"same dtype|expected scalar type|expected .*dtype|Found dtype|not implemented for '(Long|Int)'"
    r"|to have one of the following scalar types"
)
_WRONG_SHAPE = re.compile(
    r"shapes cannot be multiplied|size mismatch|must match the size|channels, but got|"
    r"same number of dimensions|batch_size .*to match|input\.size"
)
_OUT_OF_RANGE = re.compile(r"Target -?\d+ is out of bounds|index out of range in self")
_TWO_GROUPS = re.compile(
    r"initialize the default process group twice|Error initializing torch\.distributed"
)
_NO_GROUP = "Default process group has not been initialized"


def make_batch_type_error(batch: Any) -> EchelonError:
    """Returns the error for a batch that is not `(*inputs, target)` where there is no `predict`."""
    if isinstance(batch, Mapping):
        names = [repr(name) for name in batch]
        what = f"a {type(batch).__name__} with {', '.join(names[:5])}"
        columns = [f"batch[{name}]" for name in names]
        example = _PREDICT_EXAMPLE.format(", ".join(columns[:-1][:2]) or "…", columns[-1])
    else:
        what = f"one {type(batch).__name__}"
        example = _PREDICT_EXAMPLE.format("batch", "batch")
    return EchelonError(
        Fault(
            f"a batch of the experiment's data is {what}, but without predict it has to be "
            "(*inputs, target)",
            f"say how a batch is used: {example}",
        )
    )


def explain_batch_error(error: BaseException, experiment: Experiment) -> Fault | None:
    """Returns the fault of data that the model or the loss cannot take, or None for another error.

    The caller has made sure that no line of the user's is in the traceback: there it would say
    more.
    """
    message = _format_message(error)
    if experiment.predict is None and _WRONG_COUNT.search(message):
        return Fault(
            f"the model cannot be called with the inputs of a batch: {message}",
            "a batch is (*inputs, target), so every value of a sample but the last is an input; "
            f"otherwise say how it is used: {_PREDICT_EXAMPLE.format('…', 'target')}",
        )
    for pattern, hint in (
        (_WRONG_DTYPE, "convert the data: inputs with .float(), class numbers with .long()"),
        (_WRONG_SHAPE, "give the data the shape that the first layer and the loss take"),
        (_OUT_OF_RANGE, "let the model have an output, or the table a row, for every number"),
    ):
        if pattern.search(message):
            data = _describe_data(experiment)
            return Fault(f"the model or the loss cannot take a batch: {message}{data}", hint)
    return None


def _describe_data(experiment: Experiment) -> str:
    """Describes the columns of the data and the model's parameters, where they are known."""
    columns = get_columns(experiment.train_data)
    if columns is None:
        return ""
    described = [f"{_name_dtype(column)} {tuple(column.shape)}" for column in columns]
    dtypes = {_name_dtype(p) for p in experiment.model.parameters()}
    return f"; train_data is {', '.join(described)}, the model's parameters {', '.join(dtypes)}"


def _name_dtype(column: Any) -> str:
    """Returns the name of a type of numbers, such as `float32`."""
    return str(column.dtype).removeprefix("torch.")


def explain_process_group_error(error: BaseException, location: str) -> Fault | None:
    """Returns the fault of an experiment that opens or uses a process group by itself, or None.

    `location` is the line of the user's that did so, as FILE:LINE.
    """
    message = _format_message(error)
    if _TWO_GROUPS.search(message):
        return Fault(
            f"{location} opens a process group, which Echelon does: {message}",
            "leave init_process_group out, and let launch.procs, launch.hosts or launch.nodes say "
            "how many processes there are",
        )
    if _NO_GROUP in message:
        return Fault(
            f"{location} uses torch.distributed, but there is no process group: {message}",
            "return the plain model without DistributedDataParallel or FSDP, which Echelon adds. "
            "Other code asks torch.distributed.is_initialized() first: the group opens once the "
            "experiment is built, and not for a process that is alone",
        )
    return None


def require_no_process_group() -> None:
    """Raises where the experiment has opened a process group of its own."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise EchelonError(
            Fault(
                "the experiment called torch.distributed.init_process_group, but Echelon opens the "
                "process group itself, once all processes have built the experiment",
                "leave that call out; DistributedDataParallel and FSDP as well",
            )
        )


def _format_message(error: BaseException) -> str:
    """Returns the type and the message of an exception in one line."""
    return " ".join(traceback.format_exception_only(error)[0].split())
