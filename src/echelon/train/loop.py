"""The training loop of an experiment with a loss."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.data.batch_transform import BatchTransform
from echelon.data.batches import Batch, BatchSource, BlockSlice
from echelon.data.epoch_plan import EpochPlan, TrainOrder
from echelon.errors import EchelonError, Fault
from echelon.experiment.definition import Experiment
from echelon.experiment.optimizer_flags import OptimizerFlags
from echelon.experiment.trained_parameters import (
    find_changed_flags,
    read_trained_flags,
    set_trained_flags,
)
from echelon.monitoring.readback_schedule import ReadbackSchedule
from echelon.monitoring.speed import SpeedMonitor
from echelon.parallel.ddp_replica import DDPReplica
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.process_group import RankGroup
from echelon.parallel.replica import StepRequests, StepResult
from echelon.runs.metrics_file import MetricsLine
from echelon.snapshot.finite_check import FiniteCheck, format_tensor_names
from echelon.snapshot.memory_snapshot import MemorySnapshot
from echelon.snapshot.state import collect_parts, collect_state, pack_rng_state
from echelon.train.loss_parts_check import check_loss_of_parts
from echelon.train.lr_schedule import LRSchedule
from echelon.train.minute_timers import MinuteTimers
from echelon.train.nonfinite_cause import make_nonfinite_error
from echelon.train.step_boundary import StepBoundary
from echelon.train.stop_signals import StopSignals
from echelon.train.train_data import collect_stream_state
from echelon.train.weight_average import WeightAverage

if TYPE_CHECKING:
    from echelon.parallel.fsdp_replica import FSDPReplica
    from echelon.train.step_verification import StepVerifier

_TREND_STEPS = 32
"""Losses that are kept to say how the loss went before it was not finite."""


def train(t: Training) -> None:
    """Trains to the last step. What follows a step (count, agree, log, save, evaluate, stop) is in
    `StepBoundary.end_step`; a loop over a session ends its iterations there as well."""
    t.finish_evaluation()
    batches = t.iter_batches()
    while t.step < t.total_steps:
        batch, total = next(batches)
        if t.step == 0:
            check_loss_of_parts(t, batch, total)
        if t.verifier is not None:
            t.verifier.verify_next_step(t)
        t.schedule.set_rates(t.step)
        t.replica.step(batch, total, t.collect_requests())
        if t.average is not None:
            t.average.update()
        t.end_step(total)
    t.evaluate()
    t.save()


@dataclass(kw_only=True)
class Training(StepBoundary):
    """The training of an experiment with a loss, in progress on one rank."""

    experiment: Experiment
    source: BatchSource
    plan: EpochPlan
    stop: StopSignals
    optimizer_flags: OptimizerFlags
    finite_check: FiniteCheck
    transform: BatchTransform | None = None
    average: WeightAverage | None = None
    verifier: StepVerifier | None = None
    """Present where steps are verified."""
    schedule: LRSchedule = field(init=False)
    replica: DDPReplica | FSDPReplica = field(init=False)
    speed: SpeedMonitor = field(init=False)
    collect_state: Callable[[Experiment, OptimizerFlags, RankGroup], dict[str, Any]] = collect_state
    collect_own_parts: Callable[[Experiment, OptimizerFlags], dict[str, Any]] = collect_parts
    """What a rank keeps of the state in its memory."""

    built_flags: dict[str, bool] = field(init=False)
    """Which parameters were trained when the experiment was built."""
    is_round_planned: Callable[[], bool] = field(default=lambda: False)
    """Whether the agents ask the ranks to go over to another round."""
    first_weights: dict[str, Tensor] | None = None
    """Those of a small model, to find the cause of a loss that is not finite."""
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=_TREND_STEPS))

    readback: ReadbackSchedule = field(default_factory=ReadbackSchedule)
    _new_results: list[StepResult] = field(default_factory=list)
    """Of the steps of the last readback."""
    _unlogged_losses: list[float] = field(default_factory=list)
    _unwritten_lines: deque[MetricsLine] = field(default_factory=deque)
    _last_line: MetricsLine | None = None
    """The newest complete line: another rank may be lost before it has written it."""

    def __post_init__(self) -> None:
        trainer = self.config.trainer
        self.dataset_size = self.plan.epoch_samples
        self.steps_per_epoch = self.plan.count_batches(0)
        self.total_steps = self.count_total_steps(trainer.steps, trainer.epochs)
        self.built_flags = read_trained_flags(self.experiment.model)
        self.speed = SpeedMonitor([self.device])
        self._timers = MinuteTimers(trainer, self.group.world.rank)

    def restore_progress(self, info: dict[str, Any]) -> None:
        """Continues from the snapshot with this `info`."""
        super().restore_progress(info)
        self.last_snapshot, self._unlogged_losses = info["folder"], info["losses"]
        set_trained_flags(self.experiment.model, info.get("changed_parameters", {}))
        is_own = info.get("is_in_memory", False) or (
            Path(info["folder"]).parent == self.run.snapshots_folder
        )
        self.evaluations.restore(info, is_own)
        trainer = self.config.trainer
        if self.plan.count_partial_samples(self.samples):
            raise EchelonError(
                Fault(
                    f"trainer.batch_size={trainer.batch_size}, but {self.last_snapshot} was saved "
                    f"after {self.samples % self.dataset_size} of {self.dataset_size} "
                    "samples of an epoch",
                    "keep the batch size, or use a snapshot from the end of an epoch",
                )
            )
        self.total_steps = self.count_total_steps(trainer.steps, trainer.epochs)
        self.schedule.total_steps = self.total_steps
        self.evaluations.stop_early_if_due(self)

    def iter_epoch(self, order: TrainOrder, first: int) -> Iterator[Batch | BlockSlice]:
        """Yields this rank's shares as the experiment's `batch_transform` makes them; the steps of
        some are timed."""
        batches = super().iter_epoch(order, first)
        if self.transform is not None:
            batches = self._iter_transformed(self.transform, batches)
        return self.speed.sample_batches(batches, self.replica)

    def _iter_transformed(
        self, transform: BatchTransform, batches: Iterator[Batch | BlockSlice]
    ) -> Iterator[Batch | BlockSlice]:
        """Yields the batches as the experiment's `batch_transform` makes them for their steps."""
        for batch in batches:
            yield transform.transform(batch, self.step)

    # --- what the ranks ask for, and what the steps report ---

    def collect_requests(self) -> StepRequests:
        """Return what this rank asks for after the next step.

        A signal may reach any rank. Timers are rank 0's alone, because the clocks of ranks differ.
        """
        stop, look = self.stop.is_requested, self.readback.wants_every_step
        save, evaluate = self._timers.take_due()
        regroup = self.is_round_planned()
        copies = self.copies is not None and self.group.world.rank == 0 and self.copies.is_due()
        if stop or save or evaluate or look or regroup or copies:
            return StepRequests(stop, save, evaluate, look, regroup, copies)
        return _NO_REQUESTS

    def agree(self) -> StepRequests | None:
        """Reads the results of the steps since the last readback, and returns their requests; None
        where none is due."""
        if self.profile is not None:
            self.speed.exclude_time(self.profile.advance(self.step))
        # On a CPU results are read after every step. On a GPU with quick steps that is every few
        # steps, and whenever an evaluation or a snapshot is due.
        every = self.replica.readback_interval_steps
        if every > 1 and not (self.readback.is_due(self.step, every) or self._is_any_action_due()):
            return None
        results = self._new_results = self.replica.read_results()
        requests = (
            results[-1].requests if len(results) == 1 else _combine_requests_over_steps(results)
        )
        if every > 1:
            self.readback.record_readback(self.step, requests)
        return requests

    def _is_any_action_due(self) -> bool:
        """Return whether something is due at this step, or a process that is alone was asked to
        stop."""
        trainer = self.config.trainer
        is_stopped_alone = self.stop.is_requested and self.group.world.size == 1
        return is_stopped_alone or self.is_due(trainer.evaluate) or self.is_due(trainer.save)

    def take_part_in_rounds(
        self, is_round_planned: Callable[[], bool], confirm_round: Callable[[], None]
    ) -> None:
        self.is_round_planned = is_round_planned
        confirm_round()

    # --- lines of metrics ---

    def schedule_log_line(self) -> None:
        """Notes that a line of metrics is due for this step.

        Its loss and its speed are known at the next readback: on a GPU, waiting for them here would
        stall.
        """
        line = {
            **self.locate_line(),
            "loss": math.nan,
            "lr": self.schedule.current_rate,
            "time": round(time.time(), 3),
        }
        self._unwritten_lines.append(line)

    def write_due_lines(self) -> None:
        """Takes the losses of the last readback, and completes the lines of their steps."""
        # Measured right after reading: only here has the GPU caught up with the host. In between, a
        # clock on the host would measure how fast steps are queued.
        speed = (
            self.speed.measure_interval(self.step, self.samples) if self._unwritten_lines else {}
        )
        results = self._new_results
        for step, (_, loss) in enumerate(results, self.step - len(results) + 1):
            if not math.isfinite(loss):
                raise make_nonfinite_error(self, f"the loss is {loss} at step {step}", step)
            self._unlogged_losses.append(loss)
            self.recent_losses.append(loss)
            if self._unwritten_lines and self._unwritten_lines[0]["step"] == step:
                self._write_log_line(self._unwritten_lines.popleft() | speed)

    def _write_log_line(self, line: MetricsLine) -> None:
        """Completes a line of metrics with the mean loss and gives it to trackers and progress
        bar."""
        losses, self._unlogged_losses = self._unlogged_losses, []
        line["loss"] = sum(losses) / len(losses)
        self._last_line = line
        if not self.trackers:
            return
        self.log_to_trackers(line)
        self.screen.update_progress(line)
        self.report_saves(self.writer.take_results() if self.writer else [])

    # --- evaluations and snapshots ---

    def evaluate(self) -> bool:
        """Evaluates, unless this step has been evaluated already. The time does not count as that
        of steps."""
        is_done = super().evaluate()
        if is_done:
            self.speed.restart_interval(self.step, self.samples)
        return is_done

    def collect_parts(self) -> dict[str, Any]:
        """Return the state of the experiment's parts, and the position of its stream."""
        parts = self.collect_state(self.experiment, self.optimizer_flags, self.group)
        self._require_finite(parts)
        return parts | collect_stream_state(self.source, self.samples, self.group)

    def collect_copy(self) -> dict[str, Any]:
        """Return this rank's part of the state, with what every rank has of its own."""
        parts = self.collect_own_parts(self.experiment, self.optimizer_flags)
        rng_rows = self.group.gather(
            pack_rng_state(*get_process_devices(self.group.world)), to_all=True
        )
        stream_state = collect_stream_state(self.source, self.samples, self.group, to_all=True)
        return parts | {"rng": {"ranks": torch.stack(rng_rows)}} | stream_state

    def keep_state(self) -> MemorySnapshot:
        """Return the state after the last whole step, as it is in the memory of this rank."""
        evaluations = self.evaluations
        info = self.describe_snapshot() | {
            "folder": self.last_snapshot,
            "last_line": self._last_line,
            "evaluation_left": evaluations.is_left or evaluations.is_running,
            "is_in_memory": True,
        }
        return MemorySnapshot(info, collect_parts(self.experiment, self.optimizer_flags))

    def _require_finite(self, parts: dict[str, Any]) -> None:
        """Raises on all ranks where the state of any is not finite: it could never be resumed."""
        bad = self.finite_check.find_nonfinite(parts)
        if self.group.is_any_true(bool(bad)):
            of_ranks = self.group.gather_json(bad)
            names = list(dict.fromkeys(name for found in of_ranks for name in found))
            what = f"the state after step {self.step} is not finite ({format_tensor_names(names)})"
            raise make_nonfinite_error(self, f"{what} and was not saved", self.step, names)

    def describe_state(self) -> dict[str, Any]:
        """Return what a snapshot of an experiment with a loss says of its parts."""
        return {
            "losses": self._unlogged_losses,  # since the last line of metrics
            "changed_parameters": find_changed_flags(self.experiment.model, self.built_flags),
            **self.evaluations.describe(self.best_value),
        }


_NO_REQUESTS = StepRequests()


def _combine_requests_over_steps(results: list[StepResult]) -> StepRequests:
    """Return the requests of several steps as one: a request made in any of them counts."""
    return StepRequests(
        *(any(column) for column in zip(*(result.requests for result in results), strict=True))
    )
