"""One copy of the model and its step: forward, backward, all-reduce, clip, optimizer.

With several processes, torch's DDP averages the gradients, except those of tables with sparse ones,
which go by rows (`tables.py`). Two things ride along with them for
free, as the gradient of a parameter nobody trains: what a rank wishes (stop, save) and its loss.
So all ranks know the same wishes and the same global loss after the same step, without a
collective of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_flatten, tree_unflatten

from echelon.config.schema import TrainerConfig
from echelon.cudagraph.capture import StepCapture
from echelon.cudagraph.step_graph import RING_STEPS
from echelon.data.batches import Batch, BlockSlice
from echelon.errors import EchelonError, Exit, Fault
from echelon.experiment.compilation import CompiledFunction
from echelon.experiment.definition import Experiment, Predict, default_predict
from echelon.experiment.loss_check import compute_loss
from echelon.experiment.optimizer_step import list_trained_parameters, update_weights
from echelon.experiment.precision import Precision
from echelon.monitoring.speed import StepTimestamps
from echelon.optim import RowMerger
from echelon.parallel.sparse_tables import RowExchange, find_sparse_tables, make_sparse_gradient
from echelon.runs.heartbeat import Heartbeat
from echelon.world import World

READBACK_STEPS = {"cpu": 1, "cuda": 16}
"""Steps. Reading a number back makes the host wait for the device; ranks must read together."""
_UNREDUCED_MESSAGE = "Expected to have finished reduction in the prior iteration"
"""How torch's DDP begins to say it."""


_MAX_NAMES = 5
"""Parameters in a sentence."""


class StepRequests(NamedTuple):
    """What a rank would like to happen after this step, by its own signals and clock."""

    stop: bool = False
    save: bool = False
    evaluate: bool = False
    read_each_step: bool = False
    """To read what is told after every step."""


_NO_REQUESTS = StepRequests()


class StepResult(NamedTuple):
    """What all ranks know about one step."""

    requests: StepRequests
    loss: float
    """Mean over the global batch."""


class DDPReplica:
    def __init__(
        self,
        experiment: Experiment,
        world: World,
        device: torch.device,
        trainer: TrainerConfig,
        precision: Precision,
        pulse: Heartbeat,
    ) -> None:
        self.experiment = experiment
        self.device = device
        self.pulse = pulse
        most = trainer.clip
        self._clip = None if most is None else partial(self._clip_gradients, most)
        self.accumulate_steps = trainer.accumulate
        self.world_size = world.size
        self.parameters = [p for p in experiment.model.parameters() if p.requires_grad]
        self._optimized_parameters = list_trained_parameters(experiment.optimizer)
        self._step_optimizer = _UnprofiledStep(experiment.optimizer)
        self._unread_rows: list[Tensor] = []
        self.step_timer: StepTimestamps | None = None
        self._unread_requests = StepRequests()
        tables = find_sparse_tables(experiment.model)
        self._objective = _WeightedLoss(experiment, device, list(tables.values()), precision)
        if trainer.compile:
            compiled = CompiledFunction(self._objective.compute_loss, pulse)
            self._objective.compute_loss = compiled  # type: ignore[method-assign]
        self._parameters_with_control = [self._objective.control, *self.parameters]
        self._merge_rows = RowMerger()
        self._ddp: nn.Module = self._objective
        self._exchange: RowExchange | None = None
        if world.size > 1:
            if tables:
                self._exchange = RowExchange(tables, world.size)
            self._ddp = _wrap_in_ddp(self._objective, trainer.unused_parameters, list(tables))
        self.capture: StepCapture | None = None
        """Set where the step can be a CUDA graph."""

    @property
    def readback_steps(self) -> int:
        captured = self.capture is not None and self.capture.graph is not None
        return RING_STEPS if captured and self.world_size == 1 else READBACK_STEPS[self.device.type]

    @property
    def result_width(self) -> int:
        """Of a step: the loss, and with several ranks what they wish."""
        return 1 if self.world_size == 1 else self._objective.control.numel()

    def step(self, batch: Batch | BlockSlice, total: int, requests: StepRequests) -> None:
        """One optimizer step over this rank's share of a global batch of `total` samples."""
        self._keep_requests(requests)
        if self.capture is None or not self.capture.try_replay(batch, total):
            self._collect_graph_results()
            self._unread_rows.append(self._run_backward(batch.data, batch.sample_count, total))
            if self.step_timer is not None:
                self.step_timer.record("reduced")
            self._update_weights()
        if self.step_timer is not None:
            self.step_timer.record("stepped")

    def run_capturable_step(self, data: Any, mine: int, total: int) -> Tensor:
        """The step as a graph holds it: on this device alone, but for one all-reduce."""
        if self.world_size == 1:
            result = self._run_backward(data, mine, total)
        else:
            self._run_microbatches(data, mine, total, self._objective)
            _average_gradients(self._parameters_with_control, self.world_size)
            result = self._copy_reduced_control()
        self._update_weights()
        return result

    def _update_weights(self) -> None:
        update_weights(self.experiment, self._clip, self._step_optimizer)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for p in self._parameters_with_control:
            p.grad = None

    def abandon_step(self) -> None:
        """After a step that failed halfway: nothing of it is in the next one."""
        self.clear_gradients()
        if self.experiment.scaler is not None:  # it knows whose gradients are unscaled already
            self.experiment.scaler._per_optimizer_states.clear()

    def _clip_gradients(self, max_norm: float) -> None:
        grads = [p.grad for p in self._optimized_parameters if p.grad is not None]
        if not any(grad.is_sparse for grad in grads):
            nn.utils.clip_grad_norm_(self._optimized_parameters, max_norm)
            return
        # The norm is of a row's whole gradient, not of its share in every sample.
        for p in self._optimized_parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = make_sparse_gradient(*self._merge_rows(p.grad), p)
        scaled = [p.grad for p in self._optimized_parameters if p.grad is not None]
        scaled = [grad._values() if grad.is_sparse else grad for grad in scaled]
        norms = [norm.to(self.device) for norm in torch._foreach_norm(scaled)]
        factor = (max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        for device in {grad.device for grad in scaled}:
            device_grads = [grad for grad in scaled if grad.device == device]
            torch._foreach_mul_(device_grads, factor.to(device))

    def read_results(self) -> list[StepResult]:
        """What was agreed in the steps since the last call."""
        self._collect_graph_results()
        rows = read_rows(self._unread_rows)
        self._unread_rows.clear()
        if self.world_size == 1:
            results = [StepResult(self._unread_requests, loss) for loss in rows]
            self._unread_requests = _NO_REQUESTS
            return results
        return [StepResult(StepRequests(*(n > 0 for n in wishes)), loss) for *wishes, loss in rows]

    def _collect_graph_results(self) -> None:
        """What the graph's steps left, in the order of the steps."""
        if (
            self.capture is not None
            and self.capture.graph is not None
            and self.capture.graph.pending_steps
        ):
            rows = self.capture.graph.take_results()
            self._unread_rows += rows.squeeze(1) if self.world_size == 1 else rows

    def _keep_requests(self, requests: StepRequests) -> None:
        """Until they are read: a clock's wish is made once, and a GPU is read every few steps."""
        if requests != self._unread_requests:
            self._unread_requests = StepRequests(
                *(a or b for a, b in zip(self._unread_requests, requests, strict=True))
            )
        if self.world_size > 1:
            self._objective.write_requests(requests)

    def _run_backward(self, data: Any, mine: int, total: int) -> Tensor:
        """What is told of the step: the loss, and with several ranks what they wish."""
        if self.world_size == 1 and self.accumulate_steps == 1:
            loss = self._objective.compute_loss(data)
            self._objective.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        self._run_microbatches(data, mine, total, self._ddp)
        if self._exchange is not None:
            self._exchange()
        return self._copy_reduced_control()

    def _run_microbatches(self, data: Any, mine: int, total: int, module: nn.Module) -> None:
        pieces = split_microbatches(data, mine, self.accumulate_steps)
        for i, (piece, count) in enumerate(pieces):
            # DDP divides the sum by the number of ranks; the weight makes it the mean over samples.
            weight = count * self.world_size / total
            last = i + 1 == len(pieces)
            with nullcontext() if last else _no_sync(module):
                loss: Tensor = module(piece, weight)
                self.pulse.beat()  # who hangs before this is behind the ranks that wait for it
                if self.step_timer is not None and self.world_size > 1:
                    self.step_timer.watch_backward(loss)
                loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(module, DistributedDataParallel):
            _require_all_reduced(module)

    def _copy_reduced_control(self) -> Tensor:
        """The wishes and the loss of all ranks, which came with the gradients."""
        reduced = self._objective.control.grad
        assert reduced is not None
        return reduced[-1].clone() if self.world_size == 1 else reduced.clone()


class _UnprofiledStep:
    """An optimizer's step without the label that torch puts around it for its profiler, which takes
    a tenth of a small step. Where somebody profiles, or has hooked into the step, it is torch's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        step = type(optimizer).step
        ours = getattr(step, "hooked", False) and "step" not in vars(optimizer)
        self._unwrapped_step: Callable[[Optimizer], Any] | None = (
            getattr(step, "__wrapped__", None) if ours else None
        )

    def __call__(self) -> None:
        if self._unwrapped_step is None or self._is_observed():
            self._optimizer.step()
        else:
            self._unwrapped_step(self._optimizer)

    def _is_observed(self) -> bool:
        own = self._optimizer
        hooks = own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks
        for_all = optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks
        return bool(hooks or for_all or torch.autograd._profiler_enabled())


class _WeightedLoss(nn.Module):
    """The weighted loss of one share, as a module, so that DDP sees one scalar and every rank has
    a backward pass, also one with no sample."""

    def __init__(
        self,
        experiment: Experiment,
        device: torch.device,
        tables: list[nn.Parameter],
        precision: Precision,
    ) -> None:
        super().__init__()
        self._precision = precision
        # First, so that its gradient lands in the last bucket, with the model's first layers.
        self.control = nn.Parameter(torch.zeros(len(StepRequests()) + 1, device=device))
        self._control_values = torch.zeros(len(StepRequests()) + 1, device=device)
        self._loss_slot = self._control_values[-1]
        self._sent_requests = StepRequests()
        self.model = experiment.model
        self.predict: Predict = experiment.predict or default_predict
        self.loss = experiment.loss
        self.scaler = experiment.scaler
        table_ids = {id(p) for p in tables}
        trained = [p for p in experiment.model.parameters() if p.requires_grad]
        self._dense = [p for p in trained if id(p) not in table_ids]

    def write_requests(self, requests: StepRequests) -> None:
        if requests != self._sent_requests:  # seldom, so writing to the device costs nothing
            self._control_values[:-1] = torch.tensor([float(w) for w in requests])
            self._sent_requests = requests

    def compute_loss(self, data: Any) -> Tensor:
        if (
            self._precision.half_dtype is None
        ):  # even an empty context takes a percent of a small step
            return compute_loss(self.loss, *self.predict(self.model, data))
        with self._precision.autocast():
            return compute_loss(self.loss, *self.predict(self.model, data))

    def forward(self, data: Any, weight: float) -> Tensor:
        weighted = self._make_zero_loss() if data is None else self.compute_loss(data)
        if weight != 1.0:  # most often it is, and a product takes a percent of a small step
            weighted = weighted * weight
        self._loss_slot.copy_(weighted.detach())
        return self.scale_loss(weighted) + self.control.dot(self._control_values)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _make_zero_loss(self) -> Tensor:
        """Zero gradients for every parameter, from no sample; none for a table, where they would
        be as large as the table."""
        zeros = [(p.flatten()[:1].sum() * 0.0).to(self._control_values.device) for p in self._dense]
        return torch.stack(zeros).sum() if zeros else torch.zeros_like(self._control_values[0])


def _wrap_in_ddp(objective: _WeightedLoss, unused_parameters: bool, tables: list[str]) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        objective, [f"model.{name}" for name in tables]
    )
    ddp = DistributedDataParallel(
        objective, gradient_as_bucket_view=True, find_unused_parameters=unused_parameters
    )
    # DDP orders its buckets by the first backward pass it sees, and the order decides how sums
    # round. This pass over nothing makes it the same for a fresh run and a resumed one.
    ddp(None, 0.0).backward()
    for p in objective.parameters():
        p.grad = None
    return ddp


def _no_sync(module: nn.Module) -> AbstractContextManager[None]:
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def _require_all_reduced(ddp: DistributedDataParallel) -> None:
    """DDP itself complains in the next forward pass, when this step is taken and perhaps saved."""
    try:
        ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not str(error).startswith(_UNREDUCED_MESSAGE):
            raise
        raise EchelonError(
            Fault(
                f"{_name_missing_gradients(ddp)} had no part in the loss of this step, so the other "
                "processes wait for gradients that never come",
                "set trainer.unused_parameters=true, or freeze them: p.requires_grad_(False)",
            ),
            exit=Exit.FAILED,
        ) from error


def _name_missing_gradients(ddp: DistributedDataParallel) -> str:
    """Where a batch is taken in pieces, an earlier one may have left them a gradient."""
    objective = ddp.module
    assert isinstance(objective, _WeightedLoss)
    dense_ids = {id(p) for p in objective._dense}
    named = objective.model.named_parameters()
    names = [name for name, p in named if p.grad is None and id(p) in dense_ids]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"the parameters {', '.join(names[:_MAX_NAMES])}{more}" if names else "some parameters"


def _average_gradients(parameters: list[nn.Parameter], world_size: int) -> None:
    """The mean gradients of all ranks by one all-reduce, which a graph can hold; DDP's cannot."""
    grads = [p.grad for p in parameters if p.grad is not None]
    for kind in dict.fromkeys(grad.dtype for grad in grads):
        of_kind = [grad for grad in grads if grad.dtype == kind]
        flat = torch.cat([grad.reshape(-1) for grad in of_kind]).div_(world_size)
        dist.all_reduce(flat)
        pieces = torch.split(flat, [grad.numel() for grad in of_kind])
        views = [piece.view_as(grad) for piece, grad in zip(pieces, of_kind, strict=True)]
        torch._foreach_copy_(of_kind, views)


def split_microbatches(data: Any, sample_count: int, count: int) -> list[tuple[Any, int]]:
    """The share in `count` pieces, some of nothing, as ranks must agree on the number."""
    if count == 1 or data is None:
        return [(data, sample_count)] + [(None, 0)] * (count - 1)
    leaves, structure = tree_flatten(data, is_leaf=_is_plain_column)
    pieces: list[tuple[Any, int]] = []
    start = 0
    for i in range(count):
        size = sample_count // count + (i < sample_count % count)
        columns = [leaf[start : start + size] for leaf in leaves]
        pieces.append((tree_unflatten(columns, structure) if size else None, size))
        start += size
    return pieces


def _is_plain_column(node: Any) -> bool:
    """Something plain of every sample, such as texts, as torch's loaders put them together."""
    return isinstance(node, list | tuple) and not any(
        isinstance(item, Tensor | list | tuple | dict) for item in node
    )


def read_rows(pending: list[Tensor]) -> list[Any]:
    """One transfer for all of them."""
    if len(pending) == 1:
        return [pending[0].tolist()]
    return torch.stack(pending).tolist() if pending else []
