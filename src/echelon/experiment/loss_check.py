"""A step's loss as one number, and what is said where the experiment's gives none."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.errors import EchelonError, Exit, Fault

_HALF_DTYPES = (torch.bfloat16, torch.float16)


def compute_loss(loss: Callable[[Any, Any], Any], output: Any, target: Any) -> Tensor:
    """The loss of a batch. A function of its own, as `untaken` looks for it in tracebacks."""
    return require_scalar(loss(output, target))


def require_scalar(loss: Any) -> Tensor:
    """Without a shape, and not in half precision: it is weighed, scaled and told."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise _make_not_scalar_error(loss)
    if not loss.requires_grad and torch.is_grad_enabled():
        raise _make_no_gradient_error()
    number = loss.reshape(()) if loss.dim() else loss
    return number.float() if number.dtype in _HALF_DTYPES else number


def _make_not_scalar_error(loss: Any) -> EchelonError:
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
        exit=Exit.USAGE,
    )


def _make_no_gradient_error() -> EchelonError:
    return EchelonError(
        Fault(
            "the experiment's loss has no gradient: it depends on no parameter that is trained",
            "compute it from the model's output, without detach(), item(), no_grad() or a "
            "comparison in between",
        ),
        exit=Exit.USAGE,
    )


def explain_loss_failure(error: BaseException) -> Fault | None:
    """Where the loss failed on something other than a tensor: what it was given."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is compute_loss.__code__ and not isinstance(error, EchelonError):
            loss, output = frame.f_locals["loss"], frame.f_locals["output"]
            if isinstance(output, Tensor):
                return None
            name = getattr(loss, "__name__", type(loss).__name__)
            message = traceback.format_exception_only(error)[-1].strip()
            if output is None:
                remedy = "let the model's forward, or predict, return its output: it returned None"
                return Fault(f"the loss {name} was given no output: {message}", remedy)
            return Fault(
                f"the loss {name} cannot take the output, {_describe_output(output)}: {message}",
                f"the output is {_describe_output(output)}: take apart what the model returns with "
                "echelon.Experiment(…, predict=lambda model, batch: (output, target))",
            )
    return None


def _describe_output(output: Any) -> str:
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {', '.join(type(o).__name__ for o in output[:5])}"
    if isinstance(output, dict):
        return f"a {type(output).__name__} with {', '.join(map(repr, list(output)[:5]))}"
    return f"something of type {type(output).__name__}"


def _describe_type(loss: Any) -> str:
    return f"something of type {type(loss).__name__}, not a tensor"
