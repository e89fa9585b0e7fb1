"""A model that the processes hold together (torch's FSDP2): each a shard of every layer.

A block's weights are gathered when it is needed and dropped after it; gradients are summed where
their shard lies. torch asks that every rank takes part in the same passes, so a rank without a
sample computes one of no weight. What all ranks must know (wishes, the loss) takes one small
all-reduce per step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from echelon.config.schema import Trainer
from echelon.data.batches import Batch, Cut, Source
from echelon.errors import EchelonError, Exit, Fault
from echelon.pulse import Pulse
from echelon.train.experiment import Experiment, predict_default
from echelon.train.group import same_buffers
from echelon.train.number import judged
from echelon.train.precision import Precision
from echelon.train.replica import READ_EVERY, Told, Wishes, in_pieces, read_all
from echelon.train.speed import Moments
from echelon.train.update import stepped_by, update
from echelon.world import World

_SPARE_SAMPLES = 2
"""One would be too few for layers that want a variance."""


class Spare:
    """What a rank without a sample computes instead: the first samples, of no weight."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._device = source, device
        self._data: Any = None

    def __call__(self) -> Any:
        if self._data is None:
            order = _First(min(_SPARE_SAMPLES, len(self._source)))
            [batch] = self._source.batches(order, 0, self._device)
            self._data = batch.data
        return self._data


class _First:
    def __init__(self, count: int) -> None:
        self.count = count

    def blocks(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        yield torch.arange(self.count), [self.count]


class ShardedReplica:
    """The step of a sharded model, with the surface of `Replica`."""

    def __init__(
        self,
        experiment: Experiment,
        world: World,
        device: torch.device,
        trainer: Trainer,
        precision: Precision,
        pulse: Pulse,
        spare: Callable[[], Any],
    ) -> None:
        assert isinstance(experiment.model, FSDPModule)
        self.experiment = experiment
        self.pulse = pulse
        most = trainer.clip
        self._clip = None if most is None else partial(self._clip_to, most)
        self.accumulate = trainer.accumulate
        self.world_size = world.size
        self.read_every = READ_EVERY[device.type]
        self.parameters = [p for p in experiment.model.parameters() if p.requires_grad]
        self._stepped = stepped_by(experiment.optimizer)
        self._root: FSDPModule = experiment.model
        self._buffers = list(experiment.model.buffers())
        self._predict = experiment.predict or predict_default
        self._spare = spare
        self._precision = precision
        self._wished = Wishes()
        self._signal = torch.zeros(len(Wishes()) + 1, device=device)
        self._pending: list[Tensor] = []
        self.sampled: Moments | None = None

    def step(self, batch: Batch | Cut, total: int, wishes: Wishes) -> None:
        """One optimizer step over this rank's share of a global batch of `total` samples."""
        self._backward(batch, total, wishes)
        if self.sampled is not None:
            self.sampled.put("reduced")
        self._update()
        if self.sampled is not None:
            self.sampled.put("stepped")

    def _update(self) -> None:
        update(self.experiment, self._clip, self._optimize)
        for p in self.parameters:
            p.grad = None

    def _optimize(self) -> None:
        optimizer = self.experiment.optimizer
        try:
            optimizer.step()
        except (RuntimeError, NotImplementedError) as error:
            if not _of_shards(error):
                raise
            name = type(optimizer).__name__
            raise EchelonError(
                Fault(
                    f"replica.kind=fsdp, but the optimizer {name} cannot train shards: "
                    f"{str(error).splitlines()[0]}",
                    "use one that treats every number alone, such as AdamW or SGD, or leave "
                    "replica.kind=fsdp out",
                ),
                exit=Exit.FAILED,
            ) from error

    def told(self) -> list[Told]:
        """What was agreed in the steps since the last call."""
        told = [
            Told(Wishes(*(number > 0 for number in wishes)), loss)
            for *wishes, loss in read_all(self._pending)
        ]
        self._pending.clear()
        return told

    def _backward(self, batch: Batch | Cut, total: int, wishes: Wishes) -> None:
        same_buffers(self._buffers)  # before every step, as DDP does
        agreed = self._wish(wishes)
        pieces = in_pieces(batch.data, batch.mine, self.accumulate)
        for i, (data, mine) in enumerate(pieces):
            self._root.set_requires_gradient_sync(i + 1 == len(pieces))
            # A pass over nothing, which the others wait for, leaves no trace.
            kept = [] if mine else [buffer.clone() for buffer in self._buffers]
            # torch divides the sum by the number of ranks; the weight makes it the mean over
            # samples, as in `Replica`.
            weight = mine * self.world_size / total
            loss = self._loss(data if mine else self._spare()) * weight
            self.pulse.beat()  # who hangs before this is behind the ranks that wait for it
            agreed[-1] += loss.detach() / self.world_size
            scaler = self.experiment.scaler
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            for buffer, was in zip(self._buffers, kept, strict=False):
                buffer.copy_(was)
        dist.all_reduce(agreed)
        self._pending.append(agreed)

    def _loss(self, data: Any) -> Tensor:
        with self._precision.context():
            try:
                output, target = self._predict(self.experiment.model, data)
            except RuntimeError as error:
                if not _of_shards(error):
                    raise
                raise EchelonError(
                    Fault(
                        "replica.kind=fsdp, but the experiment uses weights outside a call of its "
                        "model, where this rank has a shard of them only",
                        "let predict call the model itself, model(…), for all that needs weights",
                    ),
                    exit=Exit.FAILED,
                ) from error
            return judged(self.experiment.loss, output, target).float()

    def _wish(self, wishes: Wishes) -> Tensor:
        if wishes != self._wished:  # seldom, so writing to the device costs nothing
            self._signal[:-1] = torch.tensor([float(w) for w in wishes])
            self._wished = wishes
        return self._signal.clone()

    def _clip_to(self, most: float) -> None:
        grads = [p.grad for p in self._stepped if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(self._stepped, most, whole)


def _of_shards(error: Exception) -> bool:
    """Whether it was torch's code for shards that did not know what to do."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return "DTensor" in str(error) or any(
        Path(file).match("torch/distributed/tensor/*.py") for file in files
    )
