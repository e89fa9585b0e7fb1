"""Whether a step can be a CUDA graph, and when it becomes one.

The first steps are taken as ever: they allocate what an optimizer keeps, compile what is to be
compiled, and show whether a step does anything that a replay would not. All ranks decide alike.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.config.schema import Trainer
from echelon.data.batches import Batch, Cut, Source, TensorSource
from echelon.errors import EchelonError, Fault
from echelon.train.experiment import Experiment
from echelon.train.graph import StepGraph
from echelon.train.host_state import State, host_change, host_state
from echelon.train.optimizers import capturable
from echelon.train.tables import tables_of
from echelon.utils.text import format_bytes

_WARM = 3
"""Steps before the capture; the last of them is watched."""

_WORTH = 64
"""Steps. A capture takes as long as about a hundred small steps."""

Step = Callable[[Any, int, int], Tensor]


class Capture:
    """Takes steps over once it can."""

    def __init__(
        self,
        step: Step,
        forget: Callable[[], None],
        experiment: Experiment,
        source: TensorSource,
        trainer: Trainer,
        world_size: int,
        row: int,
    ) -> None:
        self._step = step
        self._forget = forget
        self._experiment = experiment
        self._source = source
        self._batch_size = trainer.batch_size
        self._must = trainer.capture == "always"
        self._world_size = world_size
        self._row = row
        """How many numbers are told of a step."""
        self._seen = 0
        self._before: State | None = None
        self.graph: StepGraph | None = None
        self.given_up = False

    def replayed(self, batch: Batch | Cut, total: int) -> bool:
        """Whether the graph took this step; only whole batches are of its shape."""
        if self.given_up or total != self._batch_size or not isinstance(batch, Cut):
            return False
        if self.graph is None:
            self._seen += 1
            if self._seen == _WARM:
                self._before = host_state(self._experiment)
            if self._seen <= _WARM or not self._captured(batch, total):
                return False
        assert self.graph is not None
        self.graph.replay(batch)
        return True

    def _captured(self, cut: Cut, total: int) -> bool:
        assert self._before is not None
        reason = host_change(self._before, host_state(self._experiment)) or _room()
        reason = of_all(reason, self._world_size)
        if reason is None:
            reason = of_all(self._tried(cut, total), self._world_size)
        if reason is not None:
            self.graph, self.given_up = None, True
            not_captured(reason, self._must)
        return reason is None

    def _tried(self, cut: Cut, total: int) -> str | None:
        def body(data: tuple[Tensor, ...]) -> Tensor:
            return self._step(data, cut.mine, total)

        stream = torch.cuda.current_stream()
        try:
            capacity = self._source.largest_block(cut.mine)
            self.graph = StepGraph(body, cut, capacity, self._row)
        except Exception as error:  # whatever torch or the model says of it, the step is as before
            _leave(stream)
            self._forget()
            return _first_line(error)
        return None


def _leave(stream: torch.cuda.Stream) -> None:
    """After a capture that failed, torch stays in the capture's stream, and its random numbers wait
    for the capture's end: a dropout of the next step would fail."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    numbers = torch.cuda.default_generators[torch.cuda.current_device()]
    with contextlib.suppress(RuntimeError):
        numbers.graphsafe_set_state(numbers.clone_state())


def of_all(reason: str | None, world_size: int) -> str | None:
    """All ranks capture, or none; one may lack the memory that the others have."""
    if world_size == 1:
        return reason
    hindered = torch.tensor(float(reason is not None))
    dist.all_reduce(hindered)
    return reason or ("another rank cannot capture its step" if hindered > 0 else None)


def too_few(steps: int, must: bool) -> str | None:
    return f"only {steps} steps are left" if steps <= (_WARM if must else _WORTH - 1) else None


def obstacle(
    experiment: Experiment, source: Source, device: torch.device, world_size: int, trainer: Trainer
) -> str | None:
    """Why the steps of this run cannot be captured, as far as is known before the first."""
    if not isinstance(source, TensorSource):
        return "the data is a Dataset; tensors could be kept on the GPU"
    if source.home.type != "cuda":
        return "the data does not fit on the GPU"
    if len(source) < trainer.batch_size:
        return f"a batch is of {trainer.batch_size} samples, and there are only {len(source)}"
    if experiment.schedule is not None:
        return "the experiment has a schedule of its own, which runs on the host"
    if world_size > 1 and tables_of(experiment.model):
        return "the rows that ranks send each other differ in number"
    if world_size > 1 and next(experiment.model.buffers(), None) is not None:
        return "the model's buffers are spread between ranks at every step"
    if world_size > 1 and trainer.unused_parameters:
        return "ranks may use different parameters (trainer.unused_parameters=true)"
    if hooked := _hooked(experiment):
        return f"{hooked} has hooks, which run on the host"
    scales = getattr(experiment.optimizer, "_step_supports_amp_scaling", False)
    if experiment.scaler is not None and not scales:
        name = type(experiment.optimizer).__name__
        return f"the host asks the scaler before every step of {name}, which is not fused"
    return capturable(experiment.optimizer, device)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooked(experiment: Experiment) -> str | None:
    """Whose hooks would be called at the capture, and never again."""
    if any(getattr(experiment.optimizer, hooks, None) for hooks in _STEP_HOOKS):
        return "the optimizer"
    for name, module in experiment.model.named_modules():
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            return f"the model's {name}" if name else "the model"
    for name, p in experiment.model.named_parameters():
        if any(getattr(p, hooks, None) for hooks in _GRADIENT_HOOKS):
            return f"the model's {name}"
    return None


def not_captured(reason: str, must: bool) -> None:
    if must:
        raise EchelonError(
            Fault(
                f"trainer.capture=always, but the step cannot be a CUDA graph: {reason}",
                "set trainer.capture=auto, and it is trained without",
            )
        )
    print(f"the step is not captured as a CUDA graph: {reason}", file=sys.stderr)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _room() -> str | None:
    """A graph keeps the memory of its step for itself, beside what an evaluation or a last,
    smaller batch needs: `None` where there is enough for both."""
    step = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    free, _ = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if 2 * step <= free + cached:
        return None
    return f"a step takes {format_bytes(step)}, and there are {format_bytes(free + cached)} free"
