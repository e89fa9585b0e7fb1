"""Chooses how an optimizer is executed: with fused kernels, and so that a CUDA graph can hold it.

What it computes stays the experiment's choice. How it is executed depends on this machine, so
snapshots never contain these flags: a run can continue on another device.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.experiment.sparse_parameters import find_sparse_tables
from echelon.kernels import can_use_kernels
from echelon.optim import RowAdam, RowSGD

_FUSABLE_OPTIMIZERS = {
    "cuda": (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD),
    # SGD gains nothing on a CPU; Adam's fused step takes half the time.
    "cpu": (torch.optim.Adam, torch.optim.AdamW),
}
_FLAG_NAMES = ("fused", "foreach", "capturable")


def move_state_to_parameters(optimizer: Optimizer) -> None:
    """Moves state that an optimizer creates in its constructor, as Adagrad does, to the parameters'
    devices."""
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step":
                state[key] = value.to(p.device)


def match_state_layout(optimizer: Optimizer) -> None:
    """Gives restored state the order in memory of its parameters, such as channels last, which a
    snapshot does not keep: fused kernels require it."""
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and type(value) is type(p.data)
                and value.shape == p.shape
                and value.layout is p.layout is torch.strided
                and value.stride() != p.stride()
            ):
                state[key] = torch.empty_like(p, dtype=value.dtype).copy_(value)


def enable_fused_kernels(optimizer: Optimizer, model: nn.Module, device: torch.device) -> None:
    """Switches to fused kernels, unless the experiment chose otherwise or its parameters do not
    allow it."""
    if type(optimizer) not in _FUSABLE_OPTIMIZERS.get(device.type, ()) or find_sparse_tables(model):
        return
    if not all(map(_can_fuse, optimizer.param_groups)):
        return
    for group in optimizer.param_groups:
        group["fused"] = True
    create_momentum_buffers(optimizer)
    # torch's constructors set these two attributes where fused=True is passed.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    _move_step_counts(optimizer)


def _can_fuse(group: dict[str, Any]) -> bool:
    """Return whether a parameter group leaves the choice open and has only plain floating-point
    parameters."""
    undecided = group.get("fused") is None and group.get("foreach") is None
    return (
        undecided
        and not group.get("differentiable")
        and not group.get("capturable")
        and not group.get("dampening")  # see _begin_at_zero
        and all(p.is_floating_point() and p.layout is torch.strided for p in group["params"])
    )


def create_momentum_buffers(optimizer: Optimizer) -> None:
    """Creates the momentum buffers of a fused SGD as zeros, because its step needs them to exist.

    It would leave a buffer unset where the first step is skipped for an overflow, and fails where
    one parameter gets its first gradient later than the others. The first momentum equals the first
    gradient either way, unless it is dampened; therefore groups with dampening are not fused.
    """
    groups = [g for g in optimizer.param_groups if g.get("fused") and g.get("momentum")]
    for p in [p for group in groups for p in group["params"] if p.requires_grad]:
        if optimizer.state[p].get("momentum_buffer") is None:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def make_capturable(optimizer: Optimizer, device: torch.device) -> str | None:
    """Changes the optimizer so that a CUDA graph can hold its step; returns the reason where it
    cannot.

    The learning rate becomes a tensor on the device, where the host can change it between replays.
    """
    first = optimizer.param_groups[0]["params"][0]
    if isinstance(optimizer, RowAdam) and not can_use_kernels(first):
        return "RowAdam needs Triton for it"
    known = isinstance(optimizer, RowAdam | RowSGD)
    for group in optimizer.param_groups:
        if not (known or group.get("fused") or "capturable" in group):
            return f"{type(optimizer).__name__} keeps state of its step on the host"
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
    _move_step_counts(optimizer)
    return None


def _move_step_counts(optimizer: Optimizer) -> None:
    """Moves step counts to the parameters' devices; a snapshot restores them on the CPU."""
    for p, state in optimizer.state.items():
        if isinstance(step := state.get("step"), Tensor):
            state["step"] = step.to(p.device)


class OptimizerFlags:
    """Remembers the flags and settings that the experiment gave its optimizer, for snapshots."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._flags = [
            {key: group[key] for key in _FLAG_NAMES if key in group}
            for group in optimizer.param_groups
        ]
        self.settings = [
            {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "lr")}
            for group in optimizer.param_groups
        ]
        """The settings that the experiment gave. Schedules and some optimizers change theirs
        later."""

    def merge_new_settings(
        self, state: dict[str, Any], saved_settings: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return a snapshot's optimizer state with the settings that the experiment has changed
        since.

        `saved_settings` are those that the experiment gave when the snapshot was taken. A setting
        that is the same now keeps the value in the state, because a schedule or the optimizer
        itself may have changed it during training.
        """
        if not len(saved_settings) == len(self.settings) == len(state["param_groups"]):
            return state  # it belongs to another model; load_state_dict reports that
        groups = [
            {**group, **{k: v for k, v in now.items() if k not in was or _differs(v, was[k])}}
            for group, now, was in zip(
                state["param_groups"], self.settings, saved_settings, strict=True
            )
        ]
        return {**state, "param_groups": groups}

    def make_portable_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state dict with the experiment's own flags, valid on any
        device."""
        groups = [
            {**group, **wanted, "lr": float(group["lr"])}
            for group, wanted in zip(state["param_groups"], self._flags, strict=True)
        ]
        return {**state, "param_groups": groups}


def _differs(a: Any, b: Any) -> bool:
    """Return whether two settings differ; they may be tensors on different devices."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not torch.equal(a.cpu(), b.cpu())
    return bool(a != b)
