"""Evaluation: every sample once, the same bits at any world size, no collective per batch.

Each rank evaluates complete batches and keeps the statistics of every batch. Rank 0 receives all of
them once at the end and merges them in the order of the batches, whichever rank computed them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from echelon.data.batches import BatchSource, EvalOrder
from echelon.experiment.checks import get_named_metrics, is_metrics_factory
from echelon.experiment.definition import Experiment, default_predict
from echelon.experiment.loss_check import compute_loss, split_prediction, update_metric
from echelon.experiment.loss_counts import read_count
from echelon.experiment.module_modes import use_eval_mode
from echelon.experiment.precision import Precision
from echelon.parallel.process_group import RankGroup, broadcast_buffers

BatchStatistics = list[dict[str, Tensor]]
"""For each batch, named tensors: the loss, what its mean is over, the states of the metrics."""


class Evaluator:
    """Evaluates the experiment's model on its `eval_data`."""

    def __init__(
        self,
        experiment: Experiment,
        source: BatchSource,
        batch_size: int,
        group: RankGroup,
        device: torch.device,
        output_device: torch.device,
        send_heartbeat: Callable[[], None],
        precision: Precision,
    ) -> None:
        self.precision = precision
        self.experiment = experiment
        self.source = source
        self.group = group
        self.device = device
        self.output_device = output_device
        self.send_heartbeat = send_heartbeat
        world = group.world
        self.order = EvalOrder(len(source), batch_size, world.rank, world.size)
        self._metrics: dict[str, Any] | None = None
        self.get_filler_batch: Callable[[], Any] | None = None
        """For a sharded model, which no rank can compute alone: what a rank computes while others
        have one batch more."""
        self.explain_errors: Callable[[], AbstractContextManager[None]] = nullcontext
        """For a sharded model: explains what a predict cannot do with shards."""

    def __call__(self) -> dict[str, float]:
        """Return the loss and the metrics by name, on every rank. All ranks take part."""
        # Running averages differ between ranks until the next step. A snapshot has rank 0's, and
        # the results are to be those of the model in the snapshot.
        broadcast_buffers(list(self.experiment.model.buffers()))
        with use_eval_mode(self.experiment.model):
            statistics = self._evaluate_batches()
        gathered = self.group.gather(_pack_statistics(statistics))
        results = self._merge([_unpack_statistics(raw) for raw in gathered]) if gathered else None
        shared_results: dict[str, float] = self.group.broadcast_json(results)
        return shared_results

    def evaluate_first_batches(self, count: int) -> dict[str, float]:
        """Return the same for the first `count` batches of every rank, and resets the metrics. All
        ranks take part."""
        whole = self.order
        size = min(whole.size, count * whole.batch_size * whole.world_size)
        self.order = replace(whole, size=size)
        results = self()
        self.order = whole
        for metric in self.metrics.values():
            metric.reset()
        return results

    @torch.no_grad()
    def _evaluate_batches(self) -> BatchStatistics:
        """Return the statistics of this rank's batches."""
        predict = self.experiment.predict or default_predict
        statistics: BatchStatistics = []
        for batch in self.source.iter_batches(self.order, 0, self.device):
            with self.precision.autocast():
                with self.explain_errors():
                    output, target = split_prediction(predict(self.experiment.model, batch.data))
                loss = compute_loss(self.experiment.loss, output, target)
            batch_statistics = self._weigh_loss(loss, batch.sample_count, output, target)
            for name, metric in self.metrics.items():
                if can_merge_states(metric):
                    metric.reset()
                    update_metric(name, metric, output, target)
                    batch_statistics |= _read_metric_state(name, metric)
                else:
                    batch_statistics |= {"output": output.cpu(), "target": target.cpu()}
            statistics.append(batch_statistics)
            self.send_heartbeat()
        if self.get_filler_batch is not None and len(statistics) < self.order.max_batches:
            with self.precision.autocast():
                predict(self.experiment.model, self.get_filler_batch())
        self.send_heartbeat()  # also for a rank without a batch: a rank that hangs has fewer beats
        return statistics

    def _weigh_loss(
        self, loss: Tensor, sample_count: int, output: Any, target: Any
    ) -> dict[str, Tensor]:
        """Return the loss of a batch times what its mean is over, and that count."""
        if not callable(self.experiment.count):
            count = torch.tensor(float(sample_count)).double()
            return {"loss": (loss.double() * sample_count).cpu(), "count": count}
        count = read_count(self.experiment.count, output, target).double().cpu()
        # The mean over nothing is not a number.
        return {"loss": (loss.double().cpu() * count).where(count > 0, 0.0), "count": count}

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics by name, on the device of the outputs. Created when they are first needed."""
        if self._metrics is None:
            given: Any = self.experiment.metrics
            named = get_named_metrics(given() if is_metrics_factory(given) else given)
            self._metrics = {k: metric.to(self.output_device) for k, metric in named.items()}
            for metric in self._metrics.values():
                metric.sync_on_compute = metric._to_sync = (
                    False  # rank 0 computes alone, so torchmetrics must not communicate
                )
        return self._metrics

    def _merge(self, rank_statistics: list[BatchStatistics]) -> dict[str, float]:
        """Merges the statistics of all ranks in the order of the batches, and computes the
        metrics."""
        size = len(rank_statistics)
        count = sum(map(len, rank_statistics))
        in_order = [rank_statistics[i % size][i // size] for i in range(count)]
        loss = sum(float(batch_statistics["loss"]) for batch_statistics in in_order)
        counted = sum(float(found["count"]) for found in in_order)
        results = {"loss": loss / counted if counted else math.nan}
        for name, metric in self.metrics.items():
            metric.reset()
            if can_merge_states(metric):
                self._merge_states(name, metric, in_order)
            else:
                for found in in_order:
                    where = self.output_device
                    update_metric(
                        name, metric, found["output"].to(where), found["target"].to(where)
                    )
            results |= _flatten_result(name, metric.compute())
        return results

    def _merge_states(self, name: str, metric: Any, in_order: BatchStatistics) -> None:
        """Merges the states that a metric had after each batch."""
        merged: dict[str, Any] | None = None
        for count, found in enumerate(in_order, 1):
            for key, value in _build_metric_state(name, metric, found, self.output_device).items():
                setattr(metric, key, value)
            metric._update_count = count
            if merged is not None:
                metric.merge_state(merged)  # torchmetrics puts the given state first
            merged = metric.metric_state


def can_merge_states(metric: Any) -> bool:
    """Return whether torchmetrics can merge a metric's states. If not, rank 0 replays all outputs
    in order."""
    return metric.full_state_update is False and not metric.dist_sync_on_step


def _read_metric_state(name: str, metric: Any) -> dict[str, Tensor]:
    """Return a metric's state after one batch; list states are joined, as torchmetrics does to
    merge."""
    return {
        f"{name}/{key}": (torch.cat(value) if isinstance(value, list) else value).cpu().clone()
        for key, value in metric.metric_state.items()
        if not (isinstance(value, list) and not value)
    }


def _build_metric_state(
    name: str, metric: Any, batch_statistics: Mapping[str, Tensor], device: torch.device
) -> dict[str, Any]:
    """Return a metric's state from the statistics of a batch."""
    state: dict[str, Any] = {}
    for key, default in metric._defaults.items():
        value = batch_statistics.get(f"{name}/{key}")
        if isinstance(default, list):
            state[key] = [] if value is None else [value.to(device)]
        else:
            state[key] = default if value is None else value.to(device)
    return state


def _flatten_result(name: str, value: Any) -> dict[str, float]:
    """Return a metric's result as numbers by name; a metric may return a mapping or a tensor of
    several."""
    if isinstance(value, Mapping):
        return {f"{name}_{k}": float(v) for k, v in value.items()}
    if isinstance(value, Tensor) and value.numel() > 1:
        return {f"{name}_{i}": float(v) for i, v in enumerate(value.flatten())}
    return {name: float(value)}


# --- as one row of bytes: a JSON header of known length, then the tensors ---


def _pack_statistics(statistics: BatchStatistics) -> Tensor:
    """Packs statistics into one row of bytes: the length of a header, a JSON header, the
    tensors."""
    header = [
        [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in found.items()]
        for found in statistics
    ]
    text = json.dumps(header).encode()
    body = b"".join(
        t.reshape(-1).view(torch.uint8).numpy().tobytes()
        for found in statistics
        for t in found.values()
    )
    raw = bytearray(len(text).to_bytes(8, "little") + text + body)
    return torch.frombuffer(raw, dtype=torch.uint8)


def _unpack_statistics(row: Tensor) -> BatchStatistics:
    """Return the statistics that `_pack_statistics` packed."""
    raw = bytearray(row.numpy().tobytes())
    length = int.from_bytes(raw[:8], "little")
    at = 8 + length
    statistics: BatchStatistics = []
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
        statistics.append(batch)
    return statistics
