"""How an optimizer is carried out: by fused kernels where torch has them, and so that a CUDA graph
can hold its step. What it computes is the experiment's; snapshots never say how."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.experiment.definition import Experiment
from echelon.kernels import can_use_kernels
from echelon.optim import RowAdam, RowSGD
from echelon.parallel.sparse_tables import find_sparse_tables

_FUSABLE_OPTIMIZERS = {
    "cuda": (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD),
    # SGD gains nothing there; Adam's step takes half the time.
    "cpu": (torch.optim.Adam, torch.optim.AdamW),
}
_FLAG_NAMES = ("fused", "foreach", "capturable")


def move_state_to_parameters(optimizer: Optimizer) -> None:
    """Bring what some optimizers make at once, as Adagrad does, to where the parameters went."""
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step":
                state[key] = value.to(p.device)


def enable_fused_kernels(experiment: Experiment, device: torch.device) -> None:
    """Fused kernels, unless the experiment chose otherwise or its parameters do not allow it."""
    optimizer = experiment.optimizer
    if type(optimizer) not in _FUSABLE_OPTIMIZERS.get(device.type, ()) or find_sparse_tables(
        experiment.model
    ):
        return
    if not all(map(_can_fuse, optimizer.param_groups)):
        return
    for group in optimizer.param_groups:
        group["fused"] = True
        if group.get("momentum"):
            _create_momentum_buffers(optimizer, group["params"])
    # As their constructors do when they are asked for it.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    _move_step_counts(optimizer)


def _can_fuse(group: dict[str, Any]) -> bool:
    undecided = group.get("fused") is None and group.get("foreach") is None
    return (
        undecided
        and not group.get("differentiable")
        and not group.get("capturable")
        and not group.get("dampening")  # see _begin_at_zero
        and all(p.is_floating_point() and p.layout is torch.strided for p in group["params"])
    )


def _create_momentum_buffers(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """SGD's momentum, which its fused step would leave unset where the first step is skipped for an
    overflow, and cannot do without where a parameter has its first gradient later than others. The
    first momentum is the first gradient either way, unless it is dampened."""
    for p in parameters:
        if p.requires_grad and optimizer.state[p].get("momentum_buffer") is None:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def make_capturable(optimizer: Optimizer, device: torch.device) -> str | None:
    """Make its step one that a graph can hold, or say why it cannot be."""
    first = optimizer.param_groups[0]["params"][0]
    if isinstance(optimizer, RowAdam) and not can_use_kernels(first):
        return "RowAdam needs Triton for it"
    known = isinstance(optimizer, RowAdam | RowSGD)
    for group in optimizer.param_groups:
        if not (known or group.get("fused") or "capturable" in group):
            return f"{type(optimizer).__name__} keeps numbers of its step on the host"
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
    _move_step_counts(optimizer)
    return None


def _move_step_counts(optimizer: Optimizer) -> None:
    """A snapshot brings the counts of steps to the CPU, where plain optimizers have them."""
    for p, state in optimizer.state.items():
        if isinstance(step := state.get("step"), Tensor):
            state["step"] = step.to(p.device)


class OptimizerFlags:
    """Remembers how the experiment wanted its optimizer carried out, for snapshots."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._flags = [
            {key: group[key] for key in _FLAG_NAMES if key in group}
            for group in optimizer.param_groups
        ]
        self.settings = [
            {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "lr")}
            for group in optimizer.param_groups
        ]
        """As the experiment gave them. Schedules, and some optimizers, change theirs later."""

    def merge_new_settings(
        self, state: dict[str, Any], saved_settings: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The state dict of a snapshot, with the settings that the experiment gives otherwise than
        it did `then`. The rest is as it was left: it may be of a cycle, or count steps."""
        if not len(saved_settings) == len(self.settings) == len(state["param_groups"]):
            return state  # of another model; torch says so
        groups = [
            {**group, **{k: v for k, v in now.items() if k not in was or _differs(v, was[k])}}
            for group, now, was in zip(
                state["param_groups"], self.settings, saved_settings, strict=True
            )
        ]
        return {**state, "param_groups": groups}

    def restore_flags(self, state: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state dict as the experiment would have it on any device."""
        groups = [
            {**group, **wanted, "lr": float(group["lr"])}
            for group, wanted in zip(state["param_groups"], self._flags, strict=True)
        ]
        return {**state, "param_groups": groups}


def _differs(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not torch.equal(a.cpu(), b.cpu())
    return bool(a != b)
