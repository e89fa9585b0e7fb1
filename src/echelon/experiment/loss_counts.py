"""What the mean of a loss is over, where it is not over samples: tokens that are not ignored, or
class weights.

Losses of shares and microbatches are put together to the loss of the whole batch: means over
samples by the numbers of samples, other means by what `Experiment.count` returns, sums by adding
them. For the usual losses of torch the rule is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.loss_check import compute_loss

CountFunction = Callable[[Any, Any], Any]
"""Takes output and target, and returns the number that the mean of the loss is over."""

Count = CountFunction | Literal["sum"]
"""As a function, or "sum" where the loss is a sum over the samples."""

_CLASS_LOSSES = (nn.functional.cross_entropy, nn.functional.nll_loss)
_CLASS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_IGNORED_BY_DEFAULT = -100
_COUNT_REMEDY = (
    "let it return one number that is not negative, such as "
    "count=lambda output, target: (target != -100).sum()"
)


def infer_count(loss: Any) -> Count | None:
    """Return how the losses of parts of a batch are put together, where `loss` is one of torch's;
    None for a mean over samples, and for what is not known."""
    if isinstance(loss, nn.Module):
        options: dict[str, Any] = vars(loss) | dict(loss.named_buffers())
        is_torch = type(loss).__module__ == "torch.nn.modules.loss"
        is_class_loss = type(loss).forward in [kind.forward for kind in _CLASS_MODULES]
    else:
        is_partial = isinstance(loss, functools.partial) and not loss.args
        function = loss.func if is_partial else loss
        options = dict(loss.keywords) if is_partial else {}
        is_torch = getattr(function, "__module__", "") == "torch.nn.functional"
        is_class_loss = function in _CLASS_LOSSES
    if not (is_torch or is_class_loss):
        return None
    if _get_reduction(options) == "sum":
        return "sum"
    if not is_class_loss:
        return None
    ignored = options.get("ignore_index", _IGNORED_BY_DEFAULT)
    return partial(_count_targets, weight=options.get("weight"), ignored=ignored)


def _get_reduction(options: dict[str, Any]) -> str:
    """Return the reduction of a loss of torch, which has two older ways to say it."""
    legacy = (options.get("size_average"), options.get("reduce"))
    if legacy != (None, None):
        return "sum" if legacy[0] is False and legacy[1] is not False else "mean"
    return str(options.get("reduction", "mean"))


def _count_targets(output: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> Any:
    """Return what torch divides a sum over classes by."""
    if target.is_floating_point():  # probabilities of all classes: every row counts as one
        return output.numel() // output.shape[min(1, output.dim() - 1)]
    # Classes begin at 0. One operator less in each small step, in which nothing is ignored.
    may_have_none = weight is None and ignored < 0 and target.numel() > 0 and _is_readable(target)
    if may_have_none and target.min().item() >= 0:
        return target.numel()
    is_counted = target != ignored
    if weight is None:
        return is_counted.sum()
    # Without a selection by mask, whose size would have to be read from the device.
    return (weight[target.where(is_counted, 0)] * is_counted).sum()


def compute_counted_loss(
    loss: Callable[[Any, Any], Any], count: CountFunction, output: Any, target: Any
) -> tuple[Tensor, float | Tensor]:
    """Return the mean loss of a part of a batch, and the number that the mean is over.

    A part may have nothing to count. Its mean is then 0 / 0, and so are its gradients; both are
    taken as zero.
    """
    number = read_count(count, output, target)
    if not isinstance(number, Tensor) and number > 0:
        return compute_loss(loss, output, target), number
    is_counted = torch.as_tensor(number) > 0
    guarded = tree_map_only(Tensor, lambda t: _guard_gradient(t, is_counted), output)
    value = compute_loss(loss, guarded, target)
    return value.where(is_counted.to(value.device), 0.0), number


def read_count(count: CountFunction, output: Any, target: Any) -> float | Tensor:
    """Return the count of a batch; raises a fault where it is not a number.

    A tensor on a GPU stays there, as reading it would make the host wait.
    """
    value = count(output, target)
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value) if _is_readable(value) else value.detach().reshape(()).float()
    what = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"something of type {type(value).__name__}"
    )
    raise EchelonError(
        Fault(f"the experiment's count returned {what}", _COUNT_REMEDY), exit=ExitCode.USAGE
    )


def _is_readable(tensor: Tensor) -> bool:
    """Return whether a number can be read from a tensor without waiting for a device."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _guard_gradient(output: Tensor, is_counted: Tensor) -> Tensor:
    """Return the output with a gradient of zeros where nothing is counted."""
    if not output.requires_grad:
        return output
    guarded: Tensor = _ZeroGradientUnless.apply(output, is_counted)  # type: ignore[no-untyped-call]
    return guarded


class _ZeroGradientUnless(torch.autograd.Function):
    """Passes a tensor on; its gradient is zero unless the condition holds, even where the gradient
    is not a number."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, condition: Tensor) -> Tensor:
        ctx.save_for_backward(condition)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (condition,) = ctx.saved_tensors
        return gradients[0].where(condition.to(gradients[0].device), 0.0), None
