"""Evaluation: every sample once, the same bits at any world size, no collective per batch.

Each rank judges whole batches and keeps what every metric learned from each. Rank 0 receives them
all once at the end and merges them in the order of the batches, whoever computed them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.data.batches import Source, WholeBatches
from echelon.train.checks import made_later, named_metrics
from echelon.train.experiment import Experiment, predict_default
from echelon.train.group import Group, same_buffers
from echelon.train.modes import evaluating
from echelon.train.precision import Precision

Learned = list[dict[str, Tensor]]
"""Per batch: what the loss and the metrics learned, as named tensors."""


class Evaluator:
    def __init__(
        self,
        experiment: Experiment,
        source: Source,
        batch_size: int,
        group: Group,
        device: torch.device,
        output_device: torch.device,
        beat: Callable[[], None],
        precision: Precision,
    ) -> None:
        self.precision = precision
        self.experiment = experiment
        self.source = source
        self.group = group
        self.device = device
        self.output_device = output_device
        self.beat = beat
        world = group.world
        self.order = WholeBatches(len(source), batch_size, world.rank, world.size)
        self._metrics: dict[str, Any] | None = None
        self.spare: Callable[[], Any] | None = None
        """For a sharded model, of which no rank can compute alone: what a rank computes while
        others have one batch more."""

    def __call__(self) -> dict[str, float]:
        """loss and metrics by name, on every rank."""
        # Averages of batches, which differ by rank until the next step: a snapshot has rank 0's,
        # and what is said here is of that model.
        same_buffers(list(self.experiment.model.buffers()))
        with evaluating(self.experiment.model):
            learned = self._judge()
        everything = self.group.gather(_pack(learned))
        results = self._merge([_unpack(raw) for raw in everything]) if everything else None
        told: dict[str, float] = self.group.broadcast_json(results)
        return told

    @torch.no_grad()
    def _judge(self) -> Learned:
        predict = self.experiment.predict or predict_default
        learned: Learned = []
        for batch in self.source.batches(self.order, 0, self.device):
            with self.precision.context():
                output, target = predict(self.experiment.model, batch.data)
                loss = self.experiment.loss(output, target).double() * batch.mine
            found = {"loss": loss.cpu(), "samples": torch.tensor(float(batch.mine)).double()}
            for name, metric in self.metrics.items():
                if _merges(metric):
                    metric.reset()
                    metric.update(output, target)
                    found |= _state_of(name, metric)
                else:
                    found |= {"output": output.cpu(), "target": target.cpu()}
            learned.append(found)
            self.beat()
        if self.spare is not None and len(learned) < self.order.most:
            with self.precision.context():
                predict(self.experiment.model, self.spare())
        self.beat()  # also of a rank with no batch: who hangs is behind the ranks that wait
        return learned

    @property
    def metrics(self) -> dict[str, Any]:
        if self._metrics is None:
            given: Any = self.experiment.metrics
            named = named_metrics(given() if made_later(given) else given)
            self._metrics = {k: metric.to(self.output_device) for k, metric in named.items()}
            for metric in self._metrics.values():
                metric.sync_on_compute = metric._to_sync = False  # rank 0 computes alone
        return self._metrics

    def _merge(self, of_ranks: list[Learned]) -> dict[str, float]:
        size = len(of_ranks)
        count = sum(map(len, of_ranks))
        in_order = [of_ranks[i % size][i // size] for i in range(count)]
        loss = sum(float(found["loss"]) for found in in_order)
        samples = sum(float(found["samples"]) for found in in_order)
        results = {"loss": loss / samples}
        for name, metric in self.metrics.items():
            metric.reset()
            if _merges(metric):
                self._merge_states(name, metric, in_order)
            else:
                for found in in_order:
                    where = self.output_device
                    metric.update(found["output"].to(where), found["target"].to(where))
            results |= _numbers(name, metric.compute())
        return results

    def _merge_states(self, name: str, metric: Any, in_order: Learned) -> None:
        merged: dict[str, Any] | None = None
        for count, found in enumerate(in_order, 1):
            for key, value in _state_from(name, metric, found, self.output_device).items():
                setattr(metric, key, value)
            metric._update_count = count
            if merged is not None:
                metric.merge_state(merged)  # torchmetrics puts what it is given first
            merged = metric.metric_state


def _merges(metric: Any) -> bool:
    """Whether torchmetrics can merge its states. If not, rank 0 replays all outputs in order."""
    return metric.full_state_update is False and not metric.dist_sync_on_step


def _state_of(name: str, metric: Any) -> dict[str, Tensor]:
    """What one batch taught; list states are joined, as torchmetrics itself does to merge."""
    return {
        f"{name}/{key}": (torch.cat(value) if isinstance(value, list) else value).cpu().clone()
        for key, value in metric.metric_state.items()
        if not (isinstance(value, list) and not value)
    }


def _state_from(
    name: str, metric: Any, found: Mapping[str, Tensor], device: torch.device
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key, default in metric._defaults.items():
        value = found.get(f"{name}/{key}")
        if isinstance(default, list):
            state[key] = [] if value is None else [value.to(device)]
        else:
            state[key] = default if value is None else value.to(device)
    return state


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{k}": float(v) for k, v in value.items()}
    if isinstance(value, Tensor) and value.numel() > 1:
        return {f"{name}_{i}": float(v) for i, v in enumerate(value.flatten())}
    return {name: float(value)}


# --- as one row of bytes: a JSON header of known length, then the tensors ---


def _pack(learned: Learned) -> Tensor:
    header = [
        [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in found.items()]
        for found in learned
    ]
    text = json.dumps(header).encode()
    body = b"".join(
        t.reshape(-1).view(torch.uint8).numpy().tobytes()
        for found in learned
        for t in found.values()
    )
    raw = bytearray(len(text).to_bytes(8, "little") + text + body)
    return torch.frombuffer(raw, dtype=torch.uint8)


def _unpack(row: Tensor) -> Learned:
    raw = bytearray(row.numpy().tobytes())
    length = int.from_bytes(raw[:8], "little")
    at = 8 + length
    learned: Learned = []
    for found in json.loads(raw[8:at]):
        batch: dict[str, Tensor] = {}
        for key, dtype_name, shape in found:
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            batch[key] = torch.empty(shape, dtype=dtype)
            if size:
                piece = torch.frombuffer(raw[at : at + size], dtype=torch.uint8)
                batch[key] = piece.view(dtype).reshape(shape)
            at += size
        learned.append(batch)
    return learned
