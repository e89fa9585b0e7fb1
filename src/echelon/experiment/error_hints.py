"""Explains errors of torch that a mistake in an experiment causes, in words of the experiment.

torch reports where a tensor did not fit or a process group was missing. The mistake is usually in
what the experiment returned, often with no line of the user's in the traceback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from echelon.data.batches import get_columns
from echelon.errors import EchelonError, Fault
from echelon.runs.failure import format_message

if TYPE_CHECKING:
    from echelon.experiment.definition import Experiment

_PREDICT_EXAMPLE = "echelon.Experiment(…, predict=lambda model, batch: (model({}), {}))"
_WRONG_COUNT = re.compile(r"forward\(\) (takes|missing)")
_UNFIT_DATA = (
    (
        re.compile(
            r"same dtype|expected scalar type|expected .*dtype|Found dtype|"
            r"not implemented for '(Long|Int)'|to have one of the following scalar types"
        ),
        "convert the data: inputs with .float(), class numbers with .long()",
    ),
    (
        re.compile(
            r"shapes cannot be multiplied|size mismatch|must match the size|channels, but got|"
            r"same number of dimensions|batch_size .*to match|input\.size"
        ),
        "give the data the shape that the first layer and the loss take",
    ),
    (
        re.compile(r"Target -?\d+ is out of bounds|index out of range in self"),
        "let the model have an output, or the table a row, for every number",
    ),
)
"""Messages of torch about data that the model or the loss cannot take, and what to do."""
_KNOWN_CAUSES = (
    (
        re.compile(
            r"stack expects each tensor to be equal size|"
            r"each element in list of batch should be of equal"
        ),
        "the samples of the experiment's data differ in shape",
        "give every sample the same shape, for example by padding in the Dataset's __getitem__, "
        "or make batches yourself: echelon.Experiment(…, collate_fn=…)",
    ),
    (
        re.compile(r"default_collate: batch must contain"),
        "the samples of the experiment's data cannot be put into a batch",
        "return tensors, arrays or numbers from the Dataset's __getitem__, of an image for example "
        "torchvision.transforms.functional.to_tensor(image), or make batches yourself: "
        "echelon.Experiment(…, collate_fn=…)",
    ),
    (
        re.compile(r"Expected more than 1 value per channel when training"),
        "a process has one sample of a batch, and a batch norm needs two",
        "choose a trainer.batch_size whose last batch of an epoch leaves two samples or more for "
        "every process, or another norm, such as torch.nn.GroupNorm",
    ),
    (
        re.compile(r"view size is not compatible with input tensor's size and stride"),
        "the model takes a tensor apart with view, and its numbers are in another order in memory",
        "write reshape in the place of view, or leave trainer.channels_last=true out",
    ),
    (
        re.compile(r"backward through the graph a second time"),
        "the loss was differentiated twice",
        "call no backward() in loss and predict, and detach() what is kept from an earlier step, "
        "such as a hidden state",
    ),
    (
        re.compile(r"has been modified by an inplace operation"),
        "a tensor that the backward pass needs was changed in place",
        "write x = x + y instead of x += y, and leave inplace=True out; "
        "torch.autograd.set_detect_anomaly(True) shows the line",
    ),
)
"""Messages of torch, what they mean in an experiment, and what to do."""
_NO_CUDA = re.compile(r"Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are")
_TWO_DEVICES = "Expected all tensors to be on the same device"
_TWO_GROUPS = re.compile(
    r"initialize the default process group twice|Error initializing torch\.distributed"
)
_NO_GROUP = "Default process group has not been initialized"


def make_batch_type_error(batch: Any) -> EchelonError:
    """Return the error for a batch that is not `(*inputs, target)` where there is no `predict`."""
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


def explain_batch_error(
    error: BaseException, experiment: Experiment, data_name: str
) -> Fault | None:
    """Return the fault of data that the model or the loss cannot take, or None for another error.

    `data_name` is the part of the experiment that the batch is from, `train_data` or `eval_data`.
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
    for pattern, what, hint in _KNOWN_CAUSES:
        if pattern.search(message):
            return Fault(f"{what}: {message}", hint)
    for pattern, hint in _UNFIT_DATA:
        if pattern.search(message):
            data = _describe_data(experiment, data_name)
            return Fault(f"the model or the loss cannot take a batch: {message}{data}", hint)
    return None


def suggest_remedy(error: BaseException) -> str:
    """Return a hint to print below the user's own traceback, or an empty string."""
    message = _format_message(error)
    if _NO_CUDA.search(message):
        return "leave .cuda() and .to(device) out: Echelon moves the model and every batch"
    if _TWO_DEVICES in message:
        return "make tensors where the inputs are: torch.zeros(…, device=x.device)"
    return ""


def _describe_data(experiment: Experiment, name: str) -> str:
    """Describe the columns of the data and the model's parameters, where they are known."""
    columns = get_columns(getattr(experiment, name))
    if columns is None:
        return ""
    described = [f"{_name_dtype(column)} {tuple(column.shape)}" for column in columns]
    dtypes = sorted({_name_dtype(p) for p in experiment.model.parameters()})
    return f"; {name} is {', '.join(described)}, the model's parameters {', '.join(dtypes)}"


def _name_dtype(column: Any) -> str:
    """Return the name of a type of numbers, such as `float32`."""
    return str(column.dtype).removeprefix("torch.")


def explain_process_group_error(error: BaseException, location: str) -> Fault | None:
    """Return the fault of an experiment that opens or uses a process group by itself, or None.

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
    """Raise where the experiment has opened a process group of its own."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise EchelonError(
            Fault(
                "the experiment called torch.distributed.init_process_group, but Echelon opens the "
                "process group itself, once all processes have built the experiment",
                "leave that call out; DistributedDataParallel and FSDP as well",
            )
        )


def _format_message(error: BaseException) -> str:
    """Return the type and the message of an exception in one line."""
    return " ".join(format_message(error).split()).removesuffix(".")
