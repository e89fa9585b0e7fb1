"""The step of a model that several processes hold together (torch's FSDP2): each has a shard of
every layer.

A block's weights are gathered when it is needed and freed after it; gradients are reduced to where
their shard lies, and then over the replicas of the model, if there are several. torch requires
every rank to take part in the same passes, so a rank without a sample computes a filler batch of
weight zero. What all ranks must know (requests, the loss) takes one small all-reduce per step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from echelon.config.schema import TrainerConfig
from echelon.data.batches import Batch, BlockSlice
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.definition import Experiment, default_predict
from echelon.experiment.loss_check import compute_loss, split_prediction
from echelon.experiment.loss_counts import compute_counted_loss
from echelon.experiment.optimizer_step import update_weights
from echelon.experiment.precision import Precision
from echelon.experiment.trained_parameters import TrainedParameters, format_parameter_names
from echelon.parallel.layer_blocks import SHARDING
from echelon.parallel.process_group import broadcast_buffers
from echelon.parallel.replica import (
    READBACK_STEPS,
    StepRequests,
    StepResult,
    compute_part_weight,
    read_tensors_to_host,
    split_microbatches,
)
from echelon.runs.heartbeat import Heartbeat
from echelon.world import World

if TYPE_CHECKING:
    from echelon.monitoring.speed import StepTimestamps

_LOSS_SLOT = len(StepRequests())
_COUNT_SLOT = _LOSS_SLOT + 1


class FSDPReplica:
    """The step of a sharded model, with the same interface as `DDPReplica`."""

    def __init__(
        self,
        experiment: Experiment,
        world: World,
        device: torch.device,
        trainer: TrainerConfig,
        precision: Precision,
        heartbeat: Heartbeat,
        get_filler_batch: Callable[[], Any],
    ) -> None:
        root = experiment.model
        assert isinstance(root, FSDPModule)
        self.experiment = experiment
        self.heartbeat = heartbeat
        most = trainer.clip
        self._clip = None if most is None else partial(self._clip_gradients, most)
        self.accumulate_steps = trainer.accumulate
        self.world_size = world.size
        self.readback_interval_steps = READBACK_STEPS[device.type]
        self._parameters = TrainedParameters(experiment.model, experiment.optimizer)
        self._root = root
        self._buffers = list(experiment.model.buffers())
        self._predict = experiment.predict or default_predict
        self._get_filler_batch = get_filler_batch
        self._precision = precision
        self._sent_requests = StepRequests()
        self._request_buffer = torch.zeros(_COUNT_SLOT + 1, device=device)
        self._unread_rows: list[Tensor] = []
        self.step_timer: StepTimestamps | None = None

    def step(self, batch: Batch | BlockSlice, total: int, requests: StepRequests) -> None:
        """One optimizer step over this rank's share of a global batch of `total` samples."""
        self._run_forward_backward(batch, total, requests)
        if self.step_timer is not None:
            self.step_timer.record("reduced")
        self._require_unchanged_parameters()
        self._update_weights()
        if self.step_timer is not None:
            self.step_timer.record("stepped")

    def _update_weights(self) -> None:
        update_weights(self.experiment, self._clip, self._step_optimizer)
        for p in self._parameters.trained:
            p.grad = None

    def _require_unchanged_parameters(self) -> None:
        """Raises where parameters were frozen or thawed: torch keeps for each whole weight whether
        it is trained, from when it was first gathered, so the change would have no effect."""
        known = self._parameters
        changed = [*known.list_frozen_since(), *known.list_thawed_since()]
        # Inside of a forward pass the flag of the gathered weight was set, and not of the shard.
        changed += [p for p in known.frozen if p.grad is not None]
        if changed:
            raise EchelonError(
                Fault(
                    "the model is sharded, but the experiment froze or thawed "
                    f"{format_parameter_names(self.experiment.model, changed)} during the training",
                    f"freeze them from the beginning, or leave {SHARDING} out",
                ),
                exit=ExitCode.FAILED,
            )

    def _step_optimizer(self) -> None:
        """Steps the optimizer; an optimizer that cannot work on shards becomes a fault."""
        optimizer = self.experiment.optimizer
        try:
            optimizer.step()
        except (RuntimeError, NotImplementedError) as error:
            if not _is_dtensor_error(error):
                raise
            name = type(optimizer).__name__
            raise EchelonError(
                Fault(
                    f"the model is sharded, but the optimizer {name} cannot train shards: "
                    f"{str(error).splitlines()[0]}",
                    "use one that updates every element on its own, such as AdamW or SGD, or leave "
                    f"{SHARDING} out",
                ),
                exit=ExitCode.FAILED,
            ) from error

    def read_results(self) -> list[StepResult]:
        """Return the results of the steps since the last call. On a GPU this waits for the
        device."""
        results = [
            StepResult(StepRequests(*(number > 0 for number in sums)), loss)
            for *sums, loss in read_tensors_to_host(self._unread_rows)
        ]
        self._unread_rows.clear()
        return results

    def _run_forward_backward(
        self, batch: Batch | BlockSlice, total: int, requests: StepRequests
    ) -> None:
        """Runs forward and backward over the microbatches, then all-reduces requests and loss."""
        broadcast_buffers(self._buffers)  # before every step, as DDP does
        reduced = self._copy_requests_to_device(requests)
        is_default_collated = self.experiment.collate_fn is None
        pieces = split_microbatches(
            batch.data, batch.sample_count, self.accumulate_steps, is_default_collated
        )
        for i, (data, sample_count) in enumerate(pieces):
            self._root.set_requires_gradient_sync(i + 1 == len(pieces))
            # The pass over a filler batch, for which the others wait, must leave no trace.
            saved_buffers = [] if sample_count else [buffer.clone() for buffer in self._buffers]
            weight = compute_part_weight(
                self.experiment.count, sample_count, self.world_size, total
            )
            loss, count = self._compute_loss(data if sample_count else self._get_filler_batch())
            factor = weight * count
            loss = loss * factor
            # A rank that hangs before this has fewer beats than the ranks that wait for it.
            self.heartbeat.beat()
            if sample_count:  # the loss of a filler batch need not be finite
                reduced[_LOSS_SLOT] += loss.detach() / self.world_size
                reduced[_COUNT_SLOT] += factor / self.world_size
            scaler = self.experiment.scaler
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            for buffer, was in zip(self._buffers, saved_buffers, strict=False):
                buffer.copy_(was)
        dist.all_reduce(reduced)
        if callable(self.experiment.count):
            reduced[_LOSS_SLOT].div_(reduced[_COUNT_SLOT])
            self._divide_gradients(reduced[_COUNT_SLOT])
        self._unread_rows.append(reduced[:_COUNT_SLOT])

    def _divide_gradients(self, counted: Tensor) -> None:
        """Divides the gradients, which were multiplied by what the loss counts, by the count of the
        whole batch."""
        for p in self._parameters.trained:
            if isinstance(p.grad, DTensor):
                p.grad.to_local().div_(counted)

    def _compute_loss(self, data: Any) -> tuple[Tensor, float | Tensor]:
        """Return the mean loss over `data` and the number it is over; 1 where that is known."""
        loss, count = self.experiment.loss, self.experiment.count
        with self._precision.autocast():
            with explain_weights_outside_model():
                output, target = split_prediction(self._predict(self.experiment.model, data))
            if callable(count):
                value, number = compute_counted_loss(loss, count, output, target)
                return value.float(), number
            return compute_loss(loss, output, target).float(), 1.0

    def _copy_requests_to_device(self, requests: StepRequests) -> Tensor:
        """Return a copy of this rank's requests on the device, with room for loss and count."""
        if requests != self._sent_requests:  # seldom, so the write to the device costs nothing
            self._request_buffer[:_LOSS_SLOT] = torch.tensor([float(w) for w in requests])
            self._sent_requests = requests
        return self._request_buffer.clone()

    def _clip_gradients(self, max_norm: float) -> None:
        """Clips by the norm over all shards, which torch returns as a distributed tensor."""
        grads = [p.grad for p in self._parameters.optimized if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        total_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(self._parameters.optimized, max_norm, total_norm)


@contextmanager
def explain_weights_outside_model() -> Iterator[None]:
    """Turns the error of a predict that uses weights outside the model's call into a fault."""
    try:
        yield
    except RuntimeError as error:
        if not _is_dtensor_error(error):
            raise
        raise EchelonError(
            Fault(
                "the model is sharded, but the experiment uses weights outside a call of its "
                "model, where this rank has only a shard of them",
                "let predict call the model itself, model(…), for all that needs weights",
            ),
            exit=ExitCode.FAILED,
        ) from error


def _is_dtensor_error(error: Exception) -> bool:
    """Return whether an error was raised by torch's code for sharded tensors.

    torch has no class for such errors, and not all of their messages name DTensor, so the files of
    the traceback decide.
    """
    if "gloo" in str(error).lower():  # another rank is lost
        return False
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return "DTensor" in str(error) or any(
        Path(file).match("torch/distributed/tensor/*.py") for file in files
    )
