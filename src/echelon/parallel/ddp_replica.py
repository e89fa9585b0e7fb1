"""One copy of the model and its step: forward, backward, all-reduce, clip, optimizer.

With several processes, torch's DDP averages the gradients, except those of tables with sparse
gradients, which are exchanged by rows (`sparse_tables.py`). Two things travel with them at no cost,
as the gradient of a parameter that nobody trains: what a rank requests (stop, save, evaluate) and
its loss. So all ranks know the same requests and the same global loss after the same step, without
a collective of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from echelon.config.schema import TrainerConfig
from echelon.data.batches import Batch, BlockSlice
from echelon.experiment.definition import Experiment
from echelon.experiment.optimizer_flags import create_momentum_buffers
from echelon.experiment.optimizer_step import UnprofiledStep, update_weights
from echelon.experiment.precision import Precision
from echelon.experiment.sparse_parameters import find_sparse_tables
from echelon.experiment.trained_parameters import TrainedParameters
from echelon.optim import RowMerger
from echelon.parallel.ddp_wrap import (
    average_gradients,
    pause_reduction,
    require_all_reduced,
    share_parameter_changes,
    wrap_in_ddp,
)
from echelon.parallel.replica import (
    READBACK_STEPS,
    StepRequests,
    StepResult,
    compute_part_weight,
    read_tensors_to_host,
    split_microbatches,
)
from echelon.parallel.sparse_tables import RowExchange, make_sparse_gradient
from echelon.parallel.user_collectives import ShapeComparison
from echelon.parallel.weighted_loss import (
    CHANGE_SLOT,
    COUNT_SLOT,
    LOSS_SLOT,
    RESULT_WIDTH,
    WeightedLoss,
)
from echelon.runs.heartbeat import Heartbeat
from echelon.world import World

if TYPE_CHECKING:
    from echelon.cudagraph.capture import StepCapture
    from echelon.monitoring.speed import StepTimestamps

_NO_REQUESTS = StepRequests()
_ROUNDING = 5e-7
"""Of a sum of the ranks' parts of one, in float32."""


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
        get_filler_batch: Callable[[], Any] | None = None,
    ) -> None:
        self.experiment = experiment
        self._get_filler_batch = get_filler_batch
        self.device = device
        self.heartbeat = heartbeat
        most = trainer.clip
        self._clip = None if most is None else partial(self._clip_gradients, most)
        self.accumulate_steps = trainer.accumulate
        self.world_size = world.size
        self._parameters = TrainedParameters(experiment.model, experiment.optimizer)
        self._step_optimizer = UnprofiledStep(experiment.optimizer)
        self._unread_rows: list[Tensor] = []
        self.step_timer: StepTimestamps | None = None
        self._unread_requests = StepRequests()
        self._objective = WeightedLoss(experiment, device, self._parameters, precision)
        self._is_compiled = trainer.compile
        self._compared_totals: set[int] = set()
        """Sizes of batches for which collectives of the user have compared shapes."""
        if trainer.compile:
            from echelon.experiment.compilation import CompiledFunction

            compiled = CompiledFunction(self._objective.compute_mean_loss, heartbeat)
            self._objective.compute_mean_loss = compiled  # type: ignore[method-assign]
            compiled = CompiledFunction(self._objective.compute_counted_loss, heartbeat)
            self._objective.compute_counted_loss = compiled  # type: ignore[method-assign]
        self._merge_rows = RowMerger()
        self._finds_unused_parameters = trainer.unused_parameters
        self._ddp: nn.Module = self._objective
        self._exchange: RowExchange | None = None
        self._needs_wrapping = False
        """Whether parameters were frozen or thawed since the model was wrapped."""
        self._buffers = list(experiment.model.buffers()) if world.size > 1 else []
        self._buffer_copies = [buffer.clone() for buffer in self._buffers]
        """As they were before the step: its forward pass may change them, and it may be redone."""
        self._is_step_open = False
        """Whether a step has begun that has not changed the weights yet."""
        self._prepare_exchange()
        self._wrap_model()
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
        return 1 if self.world_size == 1 else RESULT_WIDTH

    def step(self, batch: Batch | BlockSlice, total: int, requests: StepRequests) -> None:
        """One optimizer step over this rank's share of a global batch of `total` samples."""
        # Not right after the change: a step is over, or it is not, when a rank is lost.
        if self._needs_wrapping:
            self._wrap_model()
        self._keep_requests(requests)
        if self._buffer_copies:
            torch._foreach_copy_(self._buffer_copies, self._buffers)
        self._is_step_open = True
        if self.capture is not None and (
            self._parameters.have_changed() or self.capture.is_outdated()
        ):
            self._collect_graph_results()
            self.capture.discard_graph()
        if self.capture is None or not self.capture.try_replay(batch, total):
            self._collect_graph_results()
            self._unread_rows.append(
                self._run_forward_backward(batch.data, batch.sample_count, total)
            )
            if self.step_timer is not None:
                self.step_timer.record("reduced")
            self._update_weights()
        self._is_step_open = False
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
            average_gradients([self._objective.control, *self._parameters.trained], self.world_size)
            result = self._clone_reduced_control()
        if self._needs_wrapping or self._parameters.have_changed():
            raise RuntimeError("the step freezes or thaws parameters")
        self._update_weights()
        return result

    def compute_gradients(self, data: Any, sample_count: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a share, or of its first microbatch, and the gradients by the names of
        parameters; none from no sample. Nothing of the step notices: DDP watches gradients that
        are accumulated, and these are not."""
        is_default_collated = self.experiment.collate_fn is None
        piece, count = split_microbatches(
            data, sample_count, self.accumulate_steps, is_default_collated
        )[0]
        if not count:
            return torch.zeros((), device=self.device), {}
        named = {k: p for k, p in self.experiment.model.named_parameters() if p.requires_grad}
        loss, _ = self._objective.compute(piece)
        scaled = self._objective.apply_grad_scaler(loss)
        found = torch.autograd.grad(scaled, list(named.values()), allow_unused=True)
        gradients = {k: grad for k, grad in zip(named, found, strict=True) if grad is not None}
        return loss.detach(), gradients

    def _update_weights(self) -> None:
        update_weights(self.experiment, self._clip, self._step_optimizer)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Drops all gradients, including the one that carries requests and loss."""
        self._objective.control.grad = None
        for p in self._parameters.trained:
            p.grad = None

    def abandon_step(self) -> None:
        """Cleans up after a step that failed halfway, so that the next step contains nothing of
        it."""
        self.clear_gradients()
        if self._buffer_copies and self._is_step_open:
            torch._foreach_copy_(self._buffers, self._buffer_copies)
        if self.experiment.scaler is not None:  # it notes whose gradients are unscaled already
            self.experiment.scaler._per_optimizer_states.clear()

    def _clip_gradients(self, max_norm: float) -> None:
        """Clips gradients by their total norm; sparse gradients are merged first.

        The norm counts the sum of a row's gradients, not each occurrence of the row in the batch.
        """
        grads = [p.grad for p in self._parameters.optimized if p.grad is not None]
        if not any(grad.is_sparse for grad in grads):
            nn.utils.clip_grad_norm_(self._parameters.optimized, max_norm)
            return
        # The norm is of a row's whole gradient, not of its share in every sample.
        for p in self._parameters.optimized:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = make_sparse_gradient(*self._merge_rows(p.grad), p)
        values = _list_gradient_values(self._parameters.optimized)
        norms = [norm.to(self.device) for norm in torch._foreach_norm(values)]
        factor = (max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        _scale_gradients(values, factor)

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
            if self._parameters.have_changed():
                self._follow_changed_parameters()
            return loss.detach()
        self._run_microbatches(data, sample_count, total, self._ddp)
        if self._is_any_parameter_changed(total):
            self._follow_changed_parameters()
        if self._exchange is not None:
            self._exchange()
        return self._clone_reduced_control()

    def _run_microbatches(
        self, data: Any, sample_count: int, total: int, module: nn.Module
    ) -> None:
        """Runs forward and backward over the microbatches; only the last one reduces gradients."""
        is_default_collated = self.experiment.collate_fn is None
        pieces = split_microbatches(data, sample_count, self.accumulate_steps, is_default_collated)
        self._prepare_for_user_collectives(total)
        for i, (piece, count) in enumerate(pieces):
            weight = compute_part_weight(self.experiment.count, count, self.world_size, total)
            last = i + 1 == len(pieces)
            with nullcontext() if last else pause_reduction(module), self._fill_in(piece) as given:
                loss: Tensor = module(given, weight)
                # A rank that hangs before this has fewer beats than the ranks that wait for it.
                self.heartbeat.beat()
                if last and module is not self._objective and self._parameters.have_changed():
                    loss = loss + self._make_frozen_term()
                if self.step_timer is not None and self.world_size > 1:
                    self.step_timer.watch_backward(loss)
                loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(module, DistributedDataParallel):
            require_all_reduced(module)

    def _prepare_for_user_collectives(self, total: int) -> None:
        """Lets collectives of the user compare shapes in the first batch of this size, if the
        ranks cannot share it evenly. A compiled forward pass cannot be watched."""
        objective = self._objective
        is_watched = (
            total % self.world_size != 0
            and objective.communicates is not False
            and not self._is_compiled
            and total not in self._compared_totals
        )
        objective.shape_comparison = ShapeComparison(total) if is_watched else None
        if is_watched:
            self._compared_totals.add(total)

    @contextmanager
    def _fill_in(self, piece: Any) -> Iterator[Any]:
        """Yields the data of a microbatch. Where there is none and the other ranks wait for this
        one in a collective of the user, that is a filler batch, which leaves no trace."""
        if piece is not None or not self._objective.communicates or self._get_filler_batch is None:
            yield piece
            return
        buffers = [(b, b.clone()) for b in self.experiment.model.buffers()]
        tables = [(p, p.grad) for p in self._tables.values()]
        for p, _ in tables:  # an optimizer of rows would step the rows that the filler looks up
            p.grad = None
        yield self._get_filler_batch()
        for buffer, saved in buffers:
            buffer.copy_(saved)
        for p, grad in tables:
            p.grad = grad

    def _clone_reduced_control(self) -> Tensor:
        """Return the requests and the loss of all ranks, which arrived with the gradients."""
        reduced = self._objective.control.grad
        assert reduced is not None
        if callable(self.experiment.count):
            self._divide_by_count(reduced)
        return reduced[LOSS_SLOT if self.world_size == 1 else slice(RESULT_WIDTH)].clone()

    def _divide_by_count(self, reduced: Tensor) -> None:
        """Divides loss and gradients, which were multiplied by what the loss counts, by the count
        of the whole batch."""
        counted = reduced[COUNT_SLOT]
        # One for each sample, up to rounding. On a GPU it is not read, as the host would wait.
        if counted.device.type == "cpu" and abs(counted.item() - 1.0) < _ROUNDING:
            return
        reduced[LOSS_SLOT].div_(counted)
        _scale_gradients(_list_gradient_values(self._parameters.trained), 1.0 / counted)

    # --- parameters that were frozen or thawed ---

    def _prepare_exchange(self) -> None:
        """Prepares the exchange of rows for the tables that are trained now. A collective."""
        self._tables = find_sparse_tables(self.experiment.model)
        table_ids = {id(p) for p in self._tables.values()}
        self._objective.dense = [p for p in self._parameters.trained if id(p) not in table_ids]
        has_exchange = self.world_size > 1 and self._tables
        self._exchange = RowExchange(self._tables, self.world_size) if has_exchange else None

    def _wrap_model(self) -> None:
        """Wraps the model for the parameters that are trained now. A collective."""
        self._needs_wrapping = False
        if self.world_size > 1:
            self._ddp = self._objective  # the one before removes its hooks when it is freed
            self._ddp = wrap_in_ddp(
                self._objective, self._finds_unused_parameters, list(self._tables)
            )

    def _make_frozen_term(self) -> Tensor:
        """Return a term of zero that gives parameters which were frozen in this forward pass a
        gradient: the DDP that was made before waits for one."""
        frozen = [] if self._finds_unused_parameters else self._parameters.list_frozen_since()
        dense_ids = {id(p) for p in self._objective.dense}
        waiting = [p for p in frozen if id(p) in dense_ids]
        for p in waiting:
            p.requires_grad_(True)
        term = self._objective.make_zero_loss(waiting)
        for p in waiting:
            p.requires_grad_(False)
        return term

    def _is_any_parameter_changed(self, total: int) -> bool:
        """Return whether parameters were frozen or thawed on any rank.

        The ranks' answers came with the gradients. To read them would make a GPU wait, so there
        they are read only if a rank had no sample and may not have called the user's code.
        """
        if self.world_size == 1:
            return self._parameters.have_changed()
        if self.device.type == "cpu" or total < self.world_size * self.accumulate_steps:
            reduced = self._objective.control.grad
            assert reduced is not None
            return bool(reduced[CHANGE_SLOT].item())
        return self._parameters.have_changed()

    def _follow_changed_parameters(self) -> None:
        """Takes parameters that were thawed into this step and leaves out those that were frozen.

        All ranks call it in the same step. What one rank has changed is changed on all: a rank
        without a sample has not called the user's code.
        """
        known = self._parameters
        if self.world_size > 1:
            share_parameter_changes(known, self.device)
        for p in known.list_frozen_since():
            p.grad = None
        thawed = {id(p) for p in known.list_thawed_since()}
        known.refresh()
        create_momentum_buffers(self.experiment.optimizer)
        self._prepare_exchange()
        self._needs_wrapping = True
        if self.world_size > 1:  # this step's DDP does not know them
            new = [p for p in self._objective.dense if id(p) in thawed]
            for p in new:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            average_gradients(new, self.world_size)


def _list_gradient_values(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of parameters; of a sparse one, the values of its rows."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return [grad._values() if grad.is_sparse else grad for grad in grads]


def _scale_gradients(grads: list[Tensor], factor: Tensor) -> None:
    """Multiplies gradients by a number, which is a tensor on one of their devices."""
    for device in {grad.device for grad in grads}:
        device_grads = [grad for grad in grads if grad.device == device]
        torch._foreach_mul_(device_grads, factor.to(device))
