"""Computes the loss of a batch and checks that it is one number with a gradient.

A loss or a metric that cannot work with the model's output is explained in words of the experiment,
as the user's mistake is usually in what `predict` or `forward` returns, not in the loss.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.errors import EchelonError, ExitCode, Fault

_HALF_DTYPES = (torch.bfloat16, torch.float16)


class PartInputError(Exception):
    """The loss or a metric failed on what it was given; `__cause__` is its own error."""

    def __init__(self, fault: Fault, exit: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(fault.what)
        self.fault = fault
        self.exit = exit


def compute_loss(loss: Callable[[Any, Any], Any], output: Any, target: Any) -> Tensor:
    """Return the loss of a batch as one scalar tensor.

    Where the loss function fails on an output that is not a tensor, the error is replaced by a
    `PartInputError` that says what the output was. A tensor output takes the short way: this runs
    in every step.
    """
    # torch cannot compile a call inside a try block that breaks the graph. A compiled function that
    # fails is called again uncompiled (`CompiledFunction`), so nothing is lost.
    if isinstance(output, Tensor) or torch.compiler.is_compiling():
        return require_scalar(loss(output, target))
    try:
        value = loss(output, target)
    except Exception as error:
        raise PartInputError(_make_loss_input_fault(loss, output, error)) from error
    return require_scalar(value)


def split_prediction(prediction: Any) -> tuple[Any, Any]:
    """Return what `predict` returned as output and target, or raises where it is not a pair."""
    if isinstance(prediction, (tuple, list)) and len(prediction) == 2:
        output, target = prediction
        return output, target
    found = (
        f"a tensor of shape {tuple(prediction.shape)}"
        if isinstance(prediction, Tensor)
        else (_describe_model_output(prediction))
    )
    raise EchelonError(
        Fault(
            f"the experiment's predict returned {found}, not (output, target)",
            "let it return both: predict=lambda model, batch: (model(…), target)",
        )
    )


def update_metric(name: str, metric: Any, output: Any, target: Any) -> None:
    """Updates a metric with a batch; what it cannot take becomes a `PartInputError`."""
    try:
        metric.update(output, target)
    except Exception as error:
        message = traceback.format_exception_only(error)[0].strip()
        given = f"output {_describe_value(output)} and target {_describe_value(target)}"
        raise PartInputError(
            Fault(
                f"the metric {name!r}, a {type(metric).__name__}, cannot take the {given}: "
                f"{message}",
                "give one for this task, or prepare output and target with a wrapper of its update",
            ),
            exit=ExitCode.FAILED,
        ) from error


def require_scalar(loss: Any) -> Tensor:
    """Return the loss without a shape and at least in float32, as it is weighted, scaled and
    reported.

    Raises a fault where it is not one number, or where it has no gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise _make_not_scalar_error(loss)
    if not loss.requires_grad and torch.is_grad_enabled():
        raise _make_no_gradient_error()
    number = loss.reshape(()) if loss.dim() else loss
    return number.float() if number.dtype in _HALF_DTYPES else number


def _make_not_scalar_error(loss: Any) -> EchelonError:
    """Return the error for a loss that is not a tensor with one element."""
    what = (
        f"a tensor of shape {tuple(loss.shape)}"
        if isinstance(loss, Tensor)
        else _describe_type(loss)
    )
    return EchelonError(
        Fault(
            f"the experiment's loss gave {what}, but a step needs one number",
            "let it return one, such as loss.mean(); other numbers belong to its metrics",
        ),
        exit=ExitCode.USAGE,
    )


def _make_no_gradient_error() -> EchelonError:
    """Return the error for a loss that was cut off from the parameters."""
    return EchelonError(
        Fault(
            "the experiment's loss has no gradient: it depends on no parameter that is trained",
            "compute it from the model's output, without detach(), item(), no_grad() or a "
            "comparison in between",
        ),
        exit=ExitCode.USAGE,
    )


def _make_loss_input_fault(loss: Callable[..., Any], output: Any, error: Exception) -> Fault:
    """Return a fault that says what the loss was given, and where to change it."""
    name = getattr(loss, "__name__", type(loss).__name__)
    message = traceback.format_exception_only(error)[-1].strip()
    if output is None:
        remedy = "let the model's forward, or predict, return its output: it returned None"
        return Fault(f"the loss {name} was given no output: {message}", remedy)
    return Fault(
        f"the loss {name} cannot take the output, {_describe_model_output(output)}: {message}",
        f"the output is {_describe_model_output(output)}: take apart what the model returns with "
        "echelon.Experiment(…, predict=lambda model, batch: (output, target))",
    )


def _describe_model_output(output: Any) -> str:
    """Describes an output that is not a tensor, such as "a tuple of Tensor, NoneType"."""
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {', '.join(type(o).__name__ for o in output[:5])}"
    if isinstance(output, dict):
        return f"a {type(output).__name__} with {', '.join(map(repr, list(output)[:5]))}"
    return f"something of type {type(output).__name__}"


def _describe_value(value: Any) -> str:
    """Describes an output or a target, such as "float32 (32, 3)"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return _describe_model_output(value)


def _describe_type(loss: Any) -> str:
    """Describes a loss that is not a tensor."""
    return f"something of type {type(loss).__name__}, not a tensor"
