"""A step's loss as one number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.errors import EchelonError, Exit, Fault

_HALF = (torch.bfloat16, torch.float16)


def one_number(loss: Any) -> Tensor:
    """Without a shape, and not in half precision: it is weighed, scaled and told."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise _no_number(loss)
    number = loss.reshape(()) if loss.dim() else loss
    return number.float() if number.dtype in _HALF else number


def _no_number(loss: Any) -> EchelonError:
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else _typed(loss)
    return EchelonError(
        Fault(
            f"the experiment's loss gave {what}, but a step needs one number",
            "let it return one, such as loss.mean(); other numbers belong to its metrics",
        ),
        exit=Exit.USAGE,
    )


def _typed(loss: Any) -> str:
    return f"something of type {type(loss).__name__}, not a tensor"
