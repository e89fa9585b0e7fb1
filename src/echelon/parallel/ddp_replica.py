"""One copy of the model and its step: forward, backward, all-reduce, clip, optimizer.

With several processes, torch's DDP averages the gradients, except those of tables with sparse
gradients, which are exchanged by rows (`sparse_tables.py`). Two things travel with them at no cost,
as the gradient of a parameter that nobody trains: what a rank requests (stop, save, evaluate) and
its loss. So all ranks know the same requests and the same global loss after the same step, without
a collective of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from echelon.config.schema import TrainerConfig
from echelon.data.batches import Batch, BlockSlice
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.definition import Experiment, Predict, default_predict
from echelon.experiment.loss_check import compute_loss, split_prediction
from echelon.experiment.optimizer_step import (
    UnprofiledStep,
    list_trained_parameters,
    update_weights,
)
from echelon.experiment.precision import Precision
from echelon.experiment.sparse_parameters import find_sparse_tables
from echelon.optim import RowMerger
from echelon.parallel.replica import (
    READBACK_STEPS,
    StepRequests,
    StepResult,
    read_tensors_to_host,
    split_microbatches,
)
from echelon.parallel.sparse_tables import RowExchange, make_sparse_gradient
from echelon.runs.heartbeat import Heartbeat
from echelon.world import World

if TYPE_CHECKING:
    from echelon.cudagraph.capture import StepCapture
    from echelon.monitoring.speed import StepTimestamps

_UNREDUCED_MESSAGE = "Expected to have finished reduction in the prior iteration"
"""How DDP's message about parameters without a gradient begins."""


_MAX_NAMES = 5
"""Parameters that an error names."""


_NO_REQUESTS = StepRequests()


class DDPReplica:
    """The model as every process holds it whole: alone, or averaged with the other processes by
    DDP."""

    def __init__(
        self,
        experiment: Experiment,
        world: World,
        device: torch.device,
        trainer: TrainerConfig,
        precision: Precision,
        heartbeat: Heartbeat,
    ) -> None:
        self.experiment = experiment
        self.device = device
        self.heartbeat = heartbeat
        most = trainer.clip
        self._clip = None if most is None else partial(self._clip_gradients, most)
        self.accumulate_steps = trainer.accumulate
        self.world_size = world.size
        self.parameters = [p for p in experiment.model.parameters() if p.requires_grad]
        self._optimized_parameters = list_trained_parameters(experiment.optimizer)
        self._step_optimizer = UnprofiledStep(experiment.optimizer)
        self._unread_rows: list[Tensor] = []
        self.step_timer: StepTimestamps | None = None
        self._unread_requests = StepRequests()
        tables = find_sparse_tables(experiment.model)
        self._objective = _WeightedLoss(experiment, device, list(tables.values()), precision)
        if trainer.compile:
            from echelon.experiment.compilation import CompiledFunction

            compiled = CompiledFunction(self._objective.compute_mean_loss, heartbeat)
            self._objective.compute_mean_loss = compiled  # type: ignore[method-assign]
        self._parameters_with_control = [self._objective.control, *self.parameters]
        self._merge_rows = RowMerger()
        self._ddp: nn.Module = self._objective
        self._exchange: RowExchange | None = None
        if world.size > 1:
            if tables:
                self._exchange = RowExchange(tables, world.size)
            self._ddp = _wrap_in_ddp(self._objective, trainer.unused_parameters, list(tables))
        self.capture: StepCapture | None = None
        """Present where the step can be a CUDA graph."""

    @property
    def readback_interval_steps(self) -> int:
        """How many steps may pass until their results are read from the device."""
        graph = None if self.capture is None else self.capture.graph
        if graph is not None and self.world_size == 1:
            return graph.ring_steps
        return READBACK_STEPS[self.device.type]

    @property
    def result_width(self) -> int:
        """How many numbers a step reports: the loss, and with several ranks their requests."""
        return 1 if self.world_size == 1 else self._objective.control.numel()

    def step(self, batch: Batch | BlockSlice, total: int, requests: StepRequests) -> None:
        """One optimizer step over this rank's share of a global batch of `total` samples."""
        self._keep_requests(requests)
        if self.capture is None or not self.capture.try_replay(batch, total):
            self._collect_graph_results()
            self._unread_rows.append(
                self._run_forward_backward(batch.data, batch.sample_count, total)
            )
            if self.step_timer is not None:
                self.step_timer.record("reduced")
            self._update_weights()
        if self.step_timer is not None:
            self.step_timer.record("stepped")

    def run_capturable_step(self, data: Any, sample_count: int, total: int) -> Tensor:
        """Runs the step as a CUDA graph holds it: on this device alone, except for one all-reduce.

        DDP cannot be captured here, as it runs its collectives from hooks in other streams.
        """
        if self.world_size == 1:
            result = self._run_forward_backward(data, sample_count, total)
        else:
            self._run_microbatches(data, sample_count, total, self._objective)
            _average_gradients(self._parameters_with_control, self.world_size)
            result = self._clone_reduced_control()
        self._update_weights()
        return result

    def _update_weights(self) -> None:
        update_weights(self.experiment, self._clip, self._step_optimizer)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Drops all gradients, including the one that carries requests and loss."""
        for p in self._parameters_with_control:
            p.grad = None

    def abandon_step(self) -> None:
        """Cleans up after a step that failed halfway, so that the next step contains nothing of
        it."""
        self.clear_gradients()
        if self.experiment.scaler is not None:  # it notes whose gradients are unscaled already
            self.experiment.scaler._per_optimizer_states.clear()

    def _clip_gradients(self, max_norm: float) -> None:
        """Clips gradients by their total norm; sparse gradients are merged first.

        The norm counts the sum of a row's gradients, not each occurrence of the row in the batch.
        """
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
        """Return the results of the steps since the last call. On a GPU this waits for the
        device."""
        self._collect_graph_results()
        rows = read_tensors_to_host(self._unread_rows)
        self._unread_rows.clear()
        if self.world_size == 1:
            results = [StepResult(self._unread_requests, loss) for loss in rows]
            self._unread_requests = _NO_REQUESTS
            return results
        return [StepResult(StepRequests(*(n > 0 for n in sums)), loss) for *sums, loss in rows]

    def _collect_graph_results(self) -> None:
        """Adds the results that replayed steps have left, so that results stay in the order of the
        steps."""
        if (
            self.capture is not None
            and self.capture.graph is not None
            and self.capture.graph.pending_steps
        ):
            rows = self.capture.graph.take_results()
            self._unread_rows += rows.squeeze(1) if self.world_size == 1 else rows

    def _keep_requests(self, requests: StepRequests) -> None:
        """Keeps requests until they are read.

        A timer makes its request once, but the results of a GPU are read only every few steps.
        """
        if requests != self._unread_requests:
            self._unread_requests = StepRequests(
                *(a or b for a, b in zip(self._unread_requests, requests, strict=True))
            )
        if self.world_size > 1:
            self._objective.write_requests(requests)

    def _run_forward_backward(self, data: Any, sample_count: int, total: int) -> Tensor:
        """Return the step's result: the loss, and with several ranks all requests."""
        if self.world_size == 1 and self.accumulate_steps == 1:
            loss = self._objective.compute_mean_loss(data)
            self._objective.apply_grad_scaler(loss).backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        self._run_microbatches(data, sample_count, total, self._ddp)
        if self._exchange is not None:
            self._exchange()
        return self._clone_reduced_control()

    def _run_microbatches(
        self, data: Any, sample_count: int, total: int, module: nn.Module
    ) -> None:
        """Runs forward and backward over the microbatches; only the last one reduces gradients."""
        is_default_collated = self.experiment.collate_fn is None
        pieces = split_microbatches(data, sample_count, self.accumulate_steps, is_default_collated)
        for i, (piece, count) in enumerate(pieces):
            # DDP averages over ranks, whose shares may differ in size. This weight turns the result
            # into the mean over all samples of the global batch.
            weight = count * self.world_size / total
            last = i + 1 == len(pieces)
            with nullcontext() if last else _no_sync(module):
                loss: Tensor = module(piece, weight)
                # A rank that hangs before this has fewer beats than the ranks that wait for it.
                self.heartbeat.beat()
                if self.step_timer is not None and self.world_size > 1:
                    self.step_timer.watch_backward(loss)
                loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(module, DistributedDataParallel):
            _require_all_reduced(module)

    def _clone_reduced_control(self) -> Tensor:
        """Return the requests and the loss of all ranks, which arrived with the gradients."""
        reduced = self._objective.control.grad
        assert reduced is not None
        return reduced[-1].clone() if self.world_size == 1 else reduced.clone()


class _WeightedLoss(nn.Module):
    """The weighted loss of one rank's share, as a module.

    DDP sees one scalar, and every rank has a backward pass, also a rank without a sample.
    """

    def __init__(
        self,
        experiment: Experiment,
        device: torch.device,
        tables: list[nn.Parameter],
        precision: Precision,
    ) -> None:
        super().__init__()
        self._precision = precision
        # Declared first: its gradient then lands in DDP's last bucket, with the model's first
        # layers, and no bucket waits for it.
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
        """Writes this rank's requests to the device, where the next backward pass sends them."""
        if requests != self._sent_requests:  # seldom, so the write to the device costs nothing
            self._control_values[:-1] = torch.tensor([float(w) for w in requests])
            self._sent_requests = requests

    def compute_mean_loss(self, data: Any) -> Tensor:
        """Return the mean loss over `data`. This is the function that `trainer.compile`
        compiles."""
        if self._precision.half_dtype is None:  # even an empty context costs 1 % of a small step
            return compute_loss(self.loss, *split_prediction(self.predict(self.model, data)))
        with self._precision.autocast():
            return compute_loss(self.loss, *split_prediction(self.predict(self.model, data)))

    def forward(self, data: Any, weight: float) -> Tensor:
        """Return the scaled loss plus a term whose gradient is the requests and the loss.

        The gradient of `control.dot(values)` with respect to `control` is `values`: so DDP's
        all-reduce of gradients also averages requests and loss.
        """
        weighted = self._make_zero_loss() if data is None else self.compute_mean_loss(data)
        if weight != 1.0:  # it usually is, and a product costs 1 % of a small step
            weighted = weighted * weight
        self._loss_slot.copy_(weighted.detach())
        return self.apply_grad_scaler(weighted) + self.control.dot(self._control_values)

    def apply_grad_scaler(self, loss: Tensor) -> Tensor:
        """Return the loss as the backward pass needs it: scaled where there is a gradient
        scaler."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _make_zero_loss(self) -> Tensor:
        """Return a loss of zero that gives every dense parameter a gradient of zeros, from no
        sample.

        Tables get none: their gradient would be as large as the table.
        """
        zeros = [(p.flatten()[:1].sum() * 0.0).to(self._control_values.device) for p in self._dense]
        return torch.stack(zeros).sum() if zeros else torch.zeros_like(self._control_values[0])


def _wrap_in_ddp(objective: _WeightedLoss, unused_parameters: bool, tables: list[str]) -> nn.Module:
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


def _no_sync(module: nn.Module) -> AbstractContextManager[None]:
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def _require_all_reduced(ddp: DistributedDataParallel) -> None:
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
    assert isinstance(objective, _WeightedLoss)
    dense_ids = {id(p) for p in objective._dense}
    named = objective.model.named_parameters()
    names = [name for name, p in named if p.grad is None and id(p) in dense_ids]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"the parameters {', '.join(names[:_MAX_NAMES])}{more}" if names else "some parameters"


def _average_gradients(parameters: list[nn.Parameter], world_size: int) -> None:
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
