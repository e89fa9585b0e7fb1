"""Evaluation: every sample once, the same bits at any world size, no collective per batch.

Each rank evaluates complete batches and keeps the statistics of every batch. Rank 0 receives all of
them once at the end and merges them in the order of the batches, whichever rank computed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from echelon.data.batches import BatchSource, EvalOrder
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.checks import get_named_metrics, is_metrics_factory
from echelon.experiment.definition import Experiment, default_predict
from echelon.experiment.loss_check import compute_loss, split_prediction, update_metric
from echelon.experiment.loss_counts import read_count
from echelon.experiment.module_modes import use_eval_mode
from echelon.experiment.precision import Precision
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.packed_tree import UnpackableValueError, pack_tree, to_device, unpack_tree
from echelon.parallel.process_group import RankGroup, broadcast_buffers
from echelon.parallel.user_collectives import count_collectives
from echelon.snapshot.state import pack_rng_state, restore_rng_state
from echelon.train.own_evaluation import convert_to_totals, join_totals

BatchStatistics = list[dict[str, Any]]
"""For each batch, by name: the loss, what its mean is over, the states of the metrics, and the
output and target where a metric needs them. They are trees of tensors and plain values."""


class Evaluator:
    """Evaluates the experiment's model on its `eval_data`."""

    def __init__(
        self,
        experiment: Experiment,
        source: BatchSource | None,
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
        size = 0 if source is None else len(source)
        self.order = self._whole_order = EvalOrder(size, batch_size, world.rank, world.size)
        self._metrics: dict[str, Any] | None = None
        self.get_filler_batch: Callable[[], Any] | None = None
        """For a sharded model, which no rank can compute alone: what a rank computes while others
        have one batch more."""
        self.explain_errors: Callable[[], AbstractContextManager[None]] = nullcontext
        """For a sharded model: explains what a predict cannot do with shards."""
        self.use_weights: Callable[[], AbstractContextManager[None]] = nullcontext
        """Puts the weights that are evaluated in the place of those that are trained."""

    def __call__(self) -> dict[str, float]:
        """Return the loss and the metrics by name, on every rank. All ranks take part.

        Random states and buffers are brought back: a snapshot of this step may have been saved
        before, and a run that resumes from it does not evaluate again.
        """
        model = self.experiment.model
        with self.use_weights(), preserve_state(model, get_process_devices(self.group.world)):
            # Running averages differ between ranks until the next step. A snapshot has rank 0's,
            # and the results are to be those of the model in the snapshot.
            broadcast_buffers(list(model.buffers()))
            with use_eval_mode(model):
                has_own = self.experiment.evaluate is not None
                results = self._run_own_evaluation() if has_own else self._evaluate_metrics()
        shared_results: dict[str, float] = self.group.broadcast_json(results)
        return shared_results

    @torch.no_grad()
    def _run_own_evaluation(self) -> dict[str, float] | None:
        """Return on rank 0 what the experiment's own `evaluate` found on all ranks, None on
        others."""
        assert self.experiment.evaluate is not None
        with self.precision.autocast():
            returned = self.experiment.evaluate(self.experiment.model, self._iter_batch_data())
        self.send_heartbeat()
        gathered = self.group.gather_json(convert_to_totals(returned))
        return join_totals(gathered) if gathered else None

    def _iter_batch_data(self) -> Iterator[Any]:
        """Yields this rank's batches; none where the experiment has no eval_data."""
        if self.source is not None:
            for batch in self.source.iter_batches(self.order, 0, self.device):
                yield batch.data
                self.send_heartbeat()

    def _evaluate_metrics(self) -> dict[str, float] | None:
        """Return the loss and the metrics on rank 0, None on others."""
        gathered = self.group.gather(self._pack_statistics(self._evaluate_batches()))
        return self._merge([unpack_tree(row) for row in gathered]) if gathered else None

    def _pack_statistics(self, statistics: BatchStatistics) -> Tensor:
        """Return the statistics as one row of bytes. What cannot be sent is a fault of the
        experiment."""
        try:
            return pack_tree(statistics)
        except UnpackableValueError as error:
            kinds = ", ".join(sorted({type(metric).__name__ for metric in self.metrics.values()}))
            raise EchelonError(
                Fault(
                    f"the metrics ({kinds}) are computed on rank 0, which needs the outputs and "
                    f"targets of all batches for them, but these hold {error}",
                    "let predict return tensors, numbers and texts, in dicts, lists and tuples",
                )
            ) from None

    def evaluate_first_batches(self, count: int) -> dict[str, float]:
        """Return the same for the first `count` batches of every rank, and resets the metrics. All
        ranks take part."""
        whole = self._whole_order
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
        assert self.source is not None
        collectives_before = count_collectives()
        for batch in self.source.iter_batches(self.order, 0, self.device):
            with self.precision.autocast():
                with self.explain_errors():
                    output, target = split_prediction(predict(self.experiment.model, batch.data))
                loss = compute_loss(self.experiment.loss, output, target)
            if not statistics and count_collectives() != collectives_before:
                self._require_even_batches()
            batch_statistics = self._weigh_loss(loss, batch.sample_count, output, target)
            for name, metric in self.metrics.items():
                if can_merge_states(metric):
                    metric.reset()
                    update_metric(name, metric, output, target)
                    batch_statistics |= _read_metric_state(name, metric)
                else:
                    host = torch.device("cpu")
                    batch_statistics |= {
                        "output": to_device(output, host),
                        "target": to_device(target, host),
                    }
            statistics.append(batch_statistics)
            self.send_heartbeat()
        if self.get_filler_batch is not None and len(statistics) < self.order.max_batches:
            with self.precision.autocast():
                predict(self.experiment.model, self.get_filler_batch())
        self.send_heartbeat()  # also for a rank without a batch: a rank that hangs has fewer beats
        return statistics

    def _require_even_batches(self) -> None:
        """Raises where code of the user calls collectives and the ranks have not all the same
        number of batches of one size: the others would wait for a rank that has no batch left."""
        order = self._whole_order  # also where only the first batches are evaluated
        is_even = order.size % (order.batch_size * order.world_size) == 0
        if is_even or self.get_filler_batch is not None:  # a sharded model has its own collectives
            return
        raise EchelonError(
            Fault(
                "the experiment exchanges tensors between its processes in an evaluation, but its "
                f"{order.size} samples in batches of {order.batch_size} cannot be shared evenly by "
                f"{order.world_size} processes",
                "let it do so in training alone: if torch.is_grad_enabled(): …",
            ),
            exit=ExitCode.FAILED,
        )

    def _weigh_loss(
        self, loss: Tensor, sample_count: int, output: Any, target: Any
    ) -> dict[str, Any]:
        """Return the loss of a batch times what its mean is over, and that count."""
        if not callable(self.experiment.count):
            count = torch.tensor(float(sample_count)).double()
            return {"loss": (loss.double() * sample_count).cpu(), "count": count}
        number = read_count(self.experiment.count, output, target)
        count = torch.as_tensor(number).double().cpu()
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
                _disable_sync(metric)
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
                    output, target = (
                        to_device(found[key], self.output_device) for key in ("output", "target")
                    )
                    update_metric(name, metric, output, target)
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


@contextmanager
def preserve_state(model: nn.Module, devices: tuple[torch.device, ...]) -> Iterator[None]:
    """Brings back the random states of this rank and the buffers of the model."""
    rng_row = pack_rng_state(*devices)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    yield
    for buffer, before in buffers:
        buffer.copy_(before)
    restore_rng_state(rng_row, *devices)


def can_merge_states(metric: Any) -> bool:
    """Return whether the states that a metric had after each batch can be merged. If not, rank 0
    replays all outputs in order.

    torchmetrics can merge means and functions of a metric's own too, but not so that any number of
    batches gives the same result. A metric that wraps others keeps nothing itself.
    """
    from torchmetrics.utilities import data as reductions

    exact = (
        reductions.dim_zero_sum,
        reductions.dim_zero_max,
        reductions.dim_zero_min,
        reductions.dim_zero_cat,
    )
    return (
        metric.full_state_update is False
        and not metric.dist_sync_on_step
        and len(_find_metrics(metric)) == 1
        and all(
            reduction in exact or (reduction is None and isinstance(metric._defaults[key], list))
            for key, reduction in metric._reductions.items()
        )
    )


def _find_metrics(metric: Any) -> list[Any]:
    """Return a metric and those that it wraps."""
    return [part for part in metric.modules() if hasattr(part, "sync_on_compute")]


def _disable_sync(metric: Any) -> None:
    """Lets a metric compute without the other ranks, as rank 0 computes alone."""
    for part in _find_metrics(metric):
        part.sync_on_compute = part._to_sync = False


def _read_metric_state(name: str, metric: Any) -> dict[str, Any]:
    """Return a copy of a metric's state after one batch. Lists stay lists: what is in them may be
    of unequal shapes."""
    host = torch.device("cpu")
    return {
        f"{name}/{key}": value.cpu().clone()
        if isinstance(value, Tensor)
        else to_device(value, host)
        for key, value in metric.metric_state.items()
    }


def _build_metric_state(
    name: str, metric: Any, batch_statistics: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return a metric's state from the statistics of a batch."""
    return {key: to_device(batch_statistics[f"{name}/{key}"], device) for key in metric._defaults}


def _flatten_result(name: str, value: Any) -> dict[str, float]:
    """Return a metric's result as numbers by name. A metric may return a mapping, a list or a
    tensor of several."""
    if isinstance(value, Tensor) and value.numel() != 1:
        value = value.flatten().tolist()
    if isinstance(value, Mapping):
        named = {f"{name}_{key}": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        named = {f"{name}_{i}": part for i, part in enumerate(value)}
    else:
        return {name: _as_number(name, value)}
    return {
        k: number for key, part in named.items() for k, number in _flatten_result(key, part).items()
    }


def _as_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise EchelonError(
            Fault(
                f"the metric gives {name} as a {type(value).__name__}, which is not a number",
                "let its compute return numbers, or a dict of them",
            )
        ) from None
