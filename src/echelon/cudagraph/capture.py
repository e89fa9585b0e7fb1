"""Decides whether a training step can be a CUDA graph, and captures it.

The first steps run as usual: they allocate the optimizer's state, compile what is to be compiled,
and show whether a step does anything that a replay would not repeat. All ranks decide alike, as a
replayed step and a plain step call different collectives.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.config.schema import TrainerConfig
from echelon.cudagraph.host_state import HostState, find_host_change, read_host_state
from echelon.cudagraph.step_graph import StepGraph
from echelon.cudagraph.step_references import StepReferences, find_step_references
from echelon.data.batches import Batch, BatchSource, BlockSlice, TensorSource
from echelon.errors import EchelonError, Fault
from echelon.experiment.definition import Experiment
from echelon.experiment.optimizer_flags import make_capturable
from echelon.experiment.sparse_parameters import find_sparse_tables
from echelon.utils.text import format_bytes

_WARMUP_STEPS = 3
"""Steps before the capture. Host state is compared before and after the last of them."""

_MIN_WORTHWHILE_STEPS = 64
"""Fewer steps are not worth it: a capture takes as long as about a hundred small steps."""

StepFunction = Callable[[Any, int, int], Tensor]


class GraphedStep(Protocol):
    """A captured step."""

    def fits(self, batch: Any) -> bool:
        """Return whether the step can be replayed for this batch."""
        ...

    def replay(self, batch: Any) -> None:
        """Run the step for this batch."""
        ...


Graph = TypeVar("Graph", bound=GraphedStep)


class GraphCapture(Generic[Graph]):
    """Captures a step when it can, and replays it from then on.

    make_graph        captures the step for a batch
    read_state        reads the host's state, to compare it before and after a step
    abandon_step      cleans up after a step that failed halfway
    is_required       whether a step that cannot be captured is a fault
    """

    def __init__(
        self,
        make_graph: Callable[[Any], Graph],
        read_state: Callable[[], HostState],
        abandon_step: Callable[[], None],
        world_size: int,
        is_required: bool,
    ) -> None:
        self._make_graph, self._read_state = make_graph, read_state
        self._abandon_step = abandon_step
        self._world_size = world_size
        self._is_required = is_required
        self._steps_seen = 0
        self._state_before: HostState | None = None
        self.graph: Graph | None = None
        self.has_given_up = False

    def replay_or_capture(self, batch: Any) -> bool:
        """Replay the step for this batch, where it is or can now be captured; returns False where
        the caller must run it as usual."""
        if self.has_given_up or (self.graph is not None and not self.graph.fits(batch)):
            return False
        if self.graph is None:
            self._steps_seen += 1
            if self._steps_seen == _WARMUP_STEPS:
                self._state_before = self._read_state()
            if self._steps_seen <= _WARMUP_STEPS or not self._try_capture(batch):
                return False
        assert self.graph is not None
        self.graph.replay(batch)
        return True

    def discard_graph(self) -> None:
        """Forgets the captured step, because it is not the step any more; it is captured anew
        after some plain steps."""
        self.graph, self._steps_seen = None, 0

    def give_up(self, reason: str) -> None:
        """Run the step as usual from here on, and say why; where it is required, raise."""
        self.graph, self.has_given_up = None, True
        report_obstacle(reason, self._is_required)

    def _try_capture(self, batch: Any) -> bool:
        """Return whether the step could be captured; otherwise it is reported once and never tried
        again."""
        assert self._state_before is not None
        reason = find_host_change(self._state_before, self._read_state()) or _find_memory_obstacle()
        reason = agree_on_obstacle(reason, self._world_size)
        if reason is None:
            reason = agree_on_obstacle(self._capture(batch), self._world_size)
        if reason is not None:
            self.give_up(reason)
        return reason is None

    def _capture(self, batch: Any) -> str | None:
        """Captures the step; returns the reason where that failed."""
        stream = torch.cuda.current_stream()
        try:
            self.graph = self._make_graph(batch)
        except Exception as error:  # whatever the reason, the step still works without a graph
            _leave_capture_stream(stream)
            self._abandon_step()
            return _summarize_error(error)
        return None


class StepCapture(GraphCapture[StepGraph]):
    """Captures the step of an experiment with a loss, whose batches are cut out of blocks."""

    def __init__(
        self,
        step: StepFunction,
        abandon_step: Callable[[], None],
        experiment: Experiment,
        source: TensorSource,
        trainer: TrainerConfig,
        world_size: int,
        result_width: int,
    ) -> None:
        """`result_width` is how many numbers a step reports."""
        super().__init__(
            self._make_step_graph,
            lambda: read_host_state(experiment),
            abandon_step,
            world_size,
            is_required=trainer.capture == "always",
        )
        self._step = step
        self._experiment = experiment
        self._source = source
        self._batch_size = trainer.batch_size
        self._result_width = result_width
        self._references: StepReferences | None = None
        """What the graph has taken for constant, where code of the user runs between two steps and
        may change it."""

    def is_outdated(self) -> bool:
        """Return whether something that the captured step has taken for constant was changed."""
        return (
            self.graph is not None
            and self._references is not None
            and self._references.find_change() is not None
        )

    def try_replay(self, batch: Batch | BlockSlice, total: int) -> bool:
        """Replays the step for this batch; returns False where the caller must run it as usual.

        Only full batches have the graph's shape. The smaller last batch of an epoch is never
        replayed.
        """
        if self.has_given_up or total != self._batch_size:
            return False
        if not isinstance(batch, BlockSlice):
            if self._experiment.batch_transform is not None:
                self.give_up("batch_transform does not return tensors with a row per sample")
            return False
        return self.replay_or_capture(batch)

    def _make_step_graph(self, block_slice: BlockSlice) -> StepGraph:
        def body(data: tuple[Tensor, ...]) -> Tensor:
            return self._step(data, block_slice.sample_count, self._batch_size)

        capacity = self._source.compute_block_rows(block_slice.sample_count)
        graph = StepGraph(body, block_slice, capacity, self._result_width)
        experiment = self._experiment
        if experiment.evaluate is not None or experiment.batch_transform is not None:
            self._references = find_step_references(
                loss=experiment.loss, predict=experiment.predict, model=experiment.model
            )
        return graph


def _leave_capture_stream(stream: torch.cuda.Stream) -> None:
    """Restores stream and random-number generator after a failed capture.

    torch stays in the capture's stream, and its generator waits for the end of the capture: a
    dropout in the next step would fail.
    """
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    numbers = torch.cuda.default_generators[torch.cuda.current_device()]
    with contextlib.suppress(RuntimeError):
        numbers.graphsafe_set_state(numbers.clone_state())


def agree_on_obstacle(reason: str | None, world_size: int) -> str | None:
    """Return an obstacle on every rank if any rank has one: one may lack memory that the others
    have."""
    if world_size == 1:
        return reason
    obstacle_count = torch.tensor(float(reason is not None))
    dist.all_reduce(obstacle_count)
    return reason or ("another rank cannot capture its step" if obstacle_count > 0 else None)


def find_step_shortage(steps: int, is_required: bool) -> str | None:
    """Return the obstacle that too few steps are left for a capture to pay off."""
    return (
        f"only {steps} steps are left"
        if steps <= (_WARMUP_STEPS if is_required else _MIN_WORTHWHILE_STEPS - 1)
        else None
    )


def find_obstacle(
    experiment: Experiment,
    source: BatchSource,
    device: torch.device,
    world_size: int,
    trainer: TrainerConfig,
) -> str | None:
    """Return why the steps of this run cannot be captured, as far as is known before the first
    step."""
    if not isinstance(source, TensorSource):
        return "the data is a Dataset; only tensors can be kept on the GPU"
    if source.storage_device.type != "cuda":
        return "the data does not fit on the GPU"
    if len(source) < trainer.batch_size:
        return f"a batch has {trainer.batch_size} samples, but there are only {len(source)}"
    if experiment.schedule is not None:
        return "the experiment has a schedule of its own, which runs on the host"
    if world_size > 1 and find_sparse_tables(experiment.model):
        return "the ranks exchange different numbers of sparse rows in every step"
    if world_size > 1 and next(experiment.model.buffers(), None) is not None:
        return "the model's buffers are broadcast to all ranks in every step"
    if world_size > 1 and trainer.unused_parameters:
        return "ranks may use different parameters (trainer.unused_parameters=true)"
    if hook_owner := find_hook_owner(experiment.model, [experiment.optimizer]):
        return f"{hook_owner} has hooks, which run on the host"
    scales = getattr(experiment.optimizer, "_step_supports_amp_scaling", False)
    if experiment.scaler is not None and not scales:
        name = type(experiment.optimizer).__name__
        return f"the gradient scaler needs the host in every step of {name}, which is not fused"
    return make_capturable(experiment.optimizer, device)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def find_hook_owner(model: nn.Module, optimizers: Iterable[Optimizer]) -> str | None:
    """Return whose hooks would run once, at the capture, and never again."""
    if any(getattr(optimizer, hooks, None) for optimizer in optimizers for hooks in _STEP_HOOKS):
        return "the optimizer"
    for name, module in model.named_modules():
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            return f"the model's {name}" if name else "the model"
    for name, p in model.named_parameters():
        if any(getattr(p, hooks, None) for hooks in _GRADIENT_HOOKS):
            return f"the model's {name}"
    return None


def report_obstacle(reason: str, is_required: bool) -> None:
    """Prints why the step is not captured; raises instead where `trainer.capture=always` requires
    it."""
    if is_required:
        raise EchelonError(
            Fault(
                f"trainer.capture=always, but the step cannot be a CUDA graph: {reason}",
                "set trainer.capture=auto to train without a graph where it is not possible",
            )
        )
    print(f"the step is not captured as a CUDA graph: {reason}", file=sys.stderr)


def _summarize_error(error: Exception) -> str:
    """Return the type and the first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _find_memory_obstacle() -> str | None:
    """Return the obstacle that a graph's memory does not fit.

    A graph keeps the memory of its step for itself, beside what an evaluation or the smaller last
    batch needs.
    """
    step = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    free, _ = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if 2 * step <= free + cached:
        return None
    return f"a step takes {format_bytes(step)}, and there are {format_bytes(free + cached)} free"
