"""Wraps a loss in torch's DDP, and what DDP does not do: gradients of single parameters, parameters
that were frozen or thawed, a sentence about parameters without a gradient."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.trained_parameters import TrainedParameters, format_parameter_names
from echelon.parallel.weighted_loss import WeightedLoss

_UNREDUCED_MESSAGE = "Expected to have finished reduction in the prior iteration"
"""How DDP's message about parameters without a gradient begins."""


def wrap_in_ddp(objective: WeightedLoss, unused_parameters: bool, tables: list[str]) -> nn.Module:
    """Wraps the loss in DDP, which ignores the tables, and fixes the order of DDP's buckets."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        objective, [f"model.{name}" for name in tables]
    )
    ddp = DistributedDataParallel(
        objective, gradient_as_bucket_view=True, find_unused_parameters=unused_parameters
    )
    # DDP orders its buckets by the first backward pass that it sees, and the order decides how sums
    # round. This pass without samples makes the order the same for a new run and a resumed one.
    ddp(None, 0.0).backward()
    for p in objective.parameters():
        p.grad = None
    return ddp


def pause_reduction(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a backward pass adds up gradients and reduces none."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def require_all_reduced(ddp: DistributedDataParallel) -> None:
    """Raises a fault where parameters had no part in the loss.

    DDP itself complains in the next forward pass, when this step has been taken and perhaps saved.
    """
    try:
        ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not str(error).startswith(_UNREDUCED_MESSAGE):
            raise
        raise EchelonError(
            Fault(
                f"{_name_missing_gradients(ddp)} had no part in the loss of this step, so the "
                "other processes wait for gradients that never arrive",
                "set trainer.unused_parameters=true, or freeze them: p.requires_grad_(False)",
            ),
            exit=ExitCode.FAILED,
        ) from error


def _name_missing_gradients(ddp: DistributedDataParallel) -> str:
    """Names the parameters without a gradient.

    Where a batch is computed in microbatches, an earlier one may have given them a gradient; then
    no name is known.
    """
    objective = ddp.module
    assert isinstance(objective, WeightedLoss)
    return format_parameter_names(objective.model, [p for p in objective.dense if p.grad is None])


def average_gradients(parameters: list[nn.Parameter], world_size: int) -> None:
    """Averages gradients over the ranks by one all-reduce per dtype, which a CUDA graph can
    hold."""
    grads = [p.grad for p in parameters if p.grad is not None]
    for kind in dict.fromkeys(grad.dtype for grad in grads):
        of_kind = [grad for grad in grads if grad.dtype == kind]
        flat = torch.cat([grad.reshape(-1) for grad in of_kind]).div_(world_size)
        dist.all_reduce(flat)
        pieces = torch.split(flat, [grad.numel() for grad in of_kind])
        views = [piece.view_as(grad) for piece, grad in zip(pieces, of_kind, strict=True)]
        torch._foreach_copy_(of_kind, views)


def share_parameter_changes(known: TrainedParameters, device: torch.device) -> None:
    """Freezes and thaws on this rank what was frozen or thawed on any. A collective."""
    parameters = [*known.trained, *known.frozen]
    was_trained = [True] * len(known.trained) + [False] * len(known.frozen)
    differs = [
        float(p.requires_grad != was) for p, was in zip(parameters, was_trained, strict=True)
    ]
    shared = torch.tensor(differs, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    for p, was, is_changed in zip(parameters, was_trained, shared.tolist(), strict=True):
        p.requires_grad_(was != bool(is_changed))
