"""A step of the user's own as one CUDA graph, for one process on one GPU.

The graph reads its batch from tensors of its own, into which every batch is copied, and adds up
what the step returns to be logged. All that the step does on the host it does once, when it is
captured; so a step is captured only where its code refers to nothing that may change
(`step_references.py`), asks the session nothing, and leaves the host's state as it was
(`host_state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.cudagraph.capture import GraphCapture, find_hook_owner
from echelon.cudagraph.host_state import HostState, read_group_settings, read_host_state
from echelon.cudagraph.step_references import (
    HostReference,
    StepReferences,
    find_step_references,
)
from echelon.data.batch_structure import is_container, iter_items, rebuild
from echelon.experiment.definition import Experiment
from echelon.experiment.optimizer_flags import enable_fused_kernels, make_capturable

_MAX_NUMBERS = 64
"""Numbers that a captured step may log."""

_MIN_STEPS_PER_GRAPH = 100
"""A graph that is discarded sooner, twice in a row, was not worth its capture."""


StepRun = Callable[[Any], tuple[Mapping[str, Any], float | Tensor]]
"""Runs the step for a batch; returns what it logs, and the number of things that this is a mean
over."""


class UserStepGraph:
    """A captured step of the user's own."""

    def __init__(self, run_step: StepRun, batch: Any) -> None:
        self._inputs = [t.clone() for t in _list_tensors(batch)]
        self._form = _describe_form(batch)
        device = self._inputs[0].device
        # Made before the capture, which would make it anew in every step.
        self._sums = torch.zeros(_MAX_NUMBERS + 1, dtype=torch.float64, device=device)
        self._graph = torch.cuda.CUDAGraph()
        # Another thread may be copying a snapshot to host memory, as in StepGraph.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            numbers, mean_over = run_step(_replace_tensors(batch, iter(self._inputs)))
            self._names = list(numbers)
            if len(self._names) > _MAX_NUMBERS:
                raise ValueError(f"the step logs more than {_MAX_NUMBERS} numbers")
            weight = _put_number("its count", mean_over, device)
            row = [_put_number(k, v, device) * weight for k, v in numbers.items()]
            self._sums[: len(row) + 1].add_(torch.stack([*row, weight]))
        self.step_count = 0
        """Steps that were replayed."""

    def fits(self, batch: Any) -> bool:
        """Return whether the batch has the form that the graph was captured with."""
        return bool(_describe_form(batch) == self._form)

    def replay(self, batch: Any) -> None:
        """Run the step for this batch."""
        torch._foreach_copy_(self._inputs, _list_tensors(batch))
        self._graph.replay()
        self.step_count += 1

    def take_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the weighted sums of what was logged since the last call, and of the weights; they
        stay on the device."""
        *totals, weight = self._sums[: len(self._names) + 1].clone().unbind()
        self._sums.zero_()
        return {name: (total, weight) for name, total in zip(self._names, totals, strict=True)}


class UserStepCapture(GraphCapture[UserStepGraph]):
    """Captures the step of an experiment with a step of its own.

    add_sums          is given what replayed steps have logged
    abandon_step      cleans up after a step that failed halfway
    host_calls        what the step has asked of the session, which answers on the host
    """

    def __init__(
        self,
        experiment: Experiment,
        optimizers: Mapping[str, Optimizer],
        run_step: StepRun,
        add_sums: Callable[[dict[str, tuple[Tensor, Tensor]]], None],
        abandon_step: Callable[[], None],
        host_calls: set[str],
        is_required: bool,
    ) -> None:
        super().__init__(
            lambda batch: UserStepGraph(run_step, batch),
            self._read_state,
            abandon_step,
            world_size=1,
            is_required=is_required,
        )
        self._experiment, self._optimizers = experiment, optimizers
        self._parameters = list(experiment.model.parameters())
        self._add_sums = add_sums
        self._host_calls = host_calls
        self._settings: Any = None
        self._references: StepReferences | None = None
        """What the graph has taken for constant, compared before every replay."""
        self._short_graphs = 0
        self._unfit_batches = 0

    def try_replay(self, batch: Any) -> bool:
        """Replay the step for this batch; returns False where the caller must run it as usual."""
        if self.has_given_up:
            return False
        if reason := self._find_obstacle(batch):
            self.give_up(reason)
            return False
        if self.graph is not None and (what := self._find_changed_constant()):
            self._discard_changed_graph(what)
            return False
        is_replayed = self.replay_or_capture(batch)
        if is_replayed and self.graph is not None and self.graph.step_count == 1:
            self._note_constants()
        self._unfit_batches += self.graph is not None and not is_replayed
        return is_replayed

    def flush_sums(self) -> None:
        """Hand over what replayed steps have logged."""
        if self.graph is not None:
            self._add_sums(self.graph.take_sums())

    def _find_obstacle(self, batch: Any) -> str | None:
        if self._host_calls:
            return f"it calls {' and '.join(sorted(self._host_calls))}, which the host answers"
        if self.graph is not None and self._unfit_batches > 20 + self.graph.step_count:
            return "its batches are of many shapes"
        return _find_batch_obstacle(batch)

    def _discard_changed_graph(self, what: str) -> None:
        """Forget a graph after something that it has taken for constant was changed."""
        assert self.graph is not None
        is_short = self.graph.step_count < _MIN_STEPS_PER_GRAPH
        self._short_graphs = self._short_graphs + 1 if is_short else 0
        self.flush_sums()
        if self._short_graphs == 2:
            self.give_up(f"{what} changes every few steps")
        else:
            self.discard_graph()

    def _find_changed_constant(self) -> str | None:
        """Return what the graph has taken for constant, and is not any more: code of the user that
        runs between the steps, such as an evaluation, may have changed it."""
        assert self._references is not None
        if self._read_settings() != self._settings:
            return "a setting of an optimizer, or which layers are frozen,"
        return self._references.find_change()

    def _note_constants(self) -> None:
        """Remember what the graph that was captured just now takes for constant."""
        self._settings = self._read_settings()
        self._references = find_step_references(step=self._experiment.step)

    def _read_settings(self) -> Any:
        groups = [read_group_settings(optimizer) for optimizer in self._optimizers.values()]
        return groups, [p.requires_grad for p in self._parameters]

    def _read_state(self) -> HostState:
        try:
            references = find_step_references(step=self._experiment.step).found
        except HostReference:  # there was none before the first step
            references = {"references": object()}
        named = {f"optimizer {name}": part for name, part in self._optimizers.items()}
        return read_host_state(self._experiment, references | named)


def find_user_step_obstacle(
    experiment: Experiment,
    optimizers: Mapping[str, Optimizer],
    scheduled: list[Optimizer],
    device: torch.device,
    world_size: int,
) -> str | None:
    """Return why the experiment's own step cannot be captured, as far as is known before the first
    step; otherwise change its optimizers so that a graph can hold their steps. The learning rates
    of `scheduled` ones change from step to step."""
    if experiment.train_data is None:
        return "without train_data it is given the number of the step"
    if world_size > 1:
        return "its processes exchange gradients from the host"
    if hook_owner := find_hook_owner(experiment.model, optimizers.values()):
        return f"{hook_owner} has hooks, which run on the host"
    try:
        find_step_references(step=experiment.step)
    except HostReference as reference:
        return str(reference)
    for optimizer in optimizers.values():
        # They are restored by now: a snapshot has the experiment's own flags.
        enable_fused_kernels(optimizer, experiment.model, device)
        if _is_capturable(optimizer):
            if reason := make_capturable(optimizer, device):
                return reason
        elif optimizer in scheduled:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
    return None


def _is_capturable(optimizer: Optimizer) -> bool:
    """Return whether an optimizer says how its step can be held by a graph. Of another one, what it
    keeps on the host is found by comparing."""
    return all(group.get("fused") or "capturable" in group for group in optimizer.param_groups)


def _find_batch_obstacle(batch: Any) -> str | None:
    """Return why the graph cannot be given this batch."""
    if isinstance(batch, Tensor):
        return None if batch.device.type == "cuda" else "a batch is not on the GPU"
    if not is_container(batch):
        return f"a batch has a {type(batch).__name__}, which is no tensor"
    return next(filter(None, (_find_batch_obstacle(part) for _, part in iter_items(batch))), None)


def _list_tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for _, part in iter_items(batch) for tensor in _list_tensors(part)]


def _replace_tensors(batch: Any, tensors: Any) -> Any:
    """Return a batch of the same containers with other tensors."""
    if isinstance(batch, Tensor):
        return next(tensors)
    return rebuild(batch, {key: _replace_tensors(part, tensors) for key, part in iter_items(batch)})


def _describe_form(batch: Any) -> Any:
    """Return what must be the same for a graph to be replayed: containers, shapes, dtypes."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    return type(batch), [(key, _describe_form(part)) for key, part in iter_items(batch)]


def _put_number(name: str, value: Any, device: torch.device) -> Tensor:
    """Return a logged value as a number on the device."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().to(device, torch.float64).view(())
    if isinstance(value, (int, float)):
        return torch.full((), float(value), dtype=torch.float64, device=device)
    raise TypeError(f"the step logs {name}, which is no number")
