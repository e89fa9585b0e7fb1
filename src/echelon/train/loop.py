"""The training loop, and what it does between two steps."""

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

from echelon.config.schema import Config, Interval
from echelon.data.batch_transform import BatchTransform
from echelon.data.batches import Batch, BatchOrder, BatchSource, BlockSlice
from echelon.data.data_layout import LAYOUT_KEY
from echelon.data.epoch_plan import EpochPlan, TrainOrder
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.definition import Experiment
from echelon.experiment.optimizer_flags import OptimizerFlags
from echelon.experiment.trained_parameters import read_trained_flags, set_trained_flags
from echelon.monitoring.profiler import StepProfiler
from echelon.monitoring.readback_schedule import ReadbackSchedule
from echelon.monitoring.speed import SpeedMonitor
from echelon.parallel.ddp_replica import DDPReplica
from echelon.parallel.process_group import RankGroup
from echelon.parallel.replica import StepRequests, StepResult
from echelon.runs.metrics_file import MetricsLine
from echelon.snapshot.finite_check import FiniteCheck, format_tensor_names
from echelon.snapshot.state import collect_state
from echelon.train.evaluations import Evaluations
from echelon.train.lr_schedule import LRSchedule
from echelon.train.nonfinite_cause import make_nonfinite_error
from echelon.train.run_output import RunOutput
from echelon.train.stop_signals import StopSignals
from echelon.train.train_data import collect_stream_state, describe_stream
from echelon.train.weight_average import WeightAverage

if TYPE_CHECKING:
    from echelon.parallel.fsdp_replica import FSDPReplica

_TREND_STEPS = 32
"""Losses that are kept to say how the loss went before it was not finite."""


def train(t: Training) -> ExitCode:
    """Trains until the last step: step, log, save, evaluate, stop check, in this order.

    The order matters: an evaluation that fails must not lose what was trained, and a run that is
    stopped must have saved before it leaves. What an evaluation finds is added to the snapshot of
    its step afterwards. Returns `Exit.PREEMPTED` where a stop was requested, otherwise `Exit.OK`.
    """
    t.finish_evaluation()
    while t.step < t.total_steps:
        for batch, total in t.iter_epoch():
            t.schedule.set_rates(t.step)
            t.replica.step(batch, total, t.collect_requests())
            if t.average is not None:
                t.average.update()
            t.count_step(total)
            if t.is_log_due():
                t.schedule_log_line()
            if not t.is_readback_due():
                continue
            requests = t.read_results()
            evaluates = t.is_due(t.config.trainer.evaluate) or requests.evaluate
            if t.is_due(t.config.trainer.save) or requests.save or requests.stop:
                t.save(is_evaluation_left=evaluates)
            if evaluates:
                t.evaluate()
            if requests.stop:
                return ExitCode.PREEMPTED
            if t.step == t.total_steps:
                break
    t.evaluate()
    t.save()
    return ExitCode.OK


@dataclass(kw_only=True)
class Training(RunOutput):
    """A run in progress on one rank."""

    config: Config
    experiment: Experiment
    source: BatchSource
    plan: EpochPlan
    evaluations: Evaluations
    stop: StopSignals
    device: torch.device
    optimizer_flags: OptimizerFlags
    finite_check: FiniteCheck
    transform: BatchTransform | None = None
    average: WeightAverage | None = None
    schedule: LRSchedule = field(init=False)
    replica: DDPReplica | FSDPReplica = field(init=False)
    speed: SpeedMonitor = field(init=False)
    profile: StepProfiler | None = None
    collect_state: Callable[[Experiment, OptimizerFlags, RankGroup], dict[str, Any]] = collect_state

    check_first_batch: Callable[[Training, Batch | BlockSlice, int], None] | None = None
    """Called once, on all ranks, before the first step of the run."""
    on_first_step: Callable[[], None] | None = None
    """Called once, on rank 0, after the first step of this start."""
    resumed_step: int = 0
    """The step that this process began after."""
    samples: int = 0
    """Samples of all ranks since the beginning: the one number that says where a run is."""
    first_weights: dict[str, Tensor] | None = None
    """Those of a small model, to find the cause of a loss that is not finite."""
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=_TREND_STEPS))

    readback: ReadbackSchedule = field(default_factory=ReadbackSchedule)
    _unlogged_losses: list[float] = field(default_factory=list)
    _unwritten_lines: deque[MetricsLine] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.dataset_size = self.plan.epoch_samples
        self.steps_per_epoch = self.plan.count_batches(0)
        self.total_steps = self._count_total_steps()
        self._built_flags = read_trained_flags(self.experiment.model)
        self.speed = SpeedMonitor([self.device])
        self._timer_starts = dict.fromkeys(("save", "evaluate"), time.monotonic())

    def restore_progress(self, info: dict[str, Any]) -> None:
        """Continues from the snapshot with this `info`: its step, position in the data and best
        value."""
        self.step = self.saved_step = self.resumed_step = info["step"]
        self.samples, self.best_value, self.last_snapshot = (
            info["samples"],
            info["best"],
            info["folder"],
        )
        self._unlogged_losses = info["losses"]
        set_trained_flags(self.experiment.model, info.get("changed_parameters", {}))
        is_own = Path(info["folder"]).parent == self.run.snapshots_folder
        self.evaluations.restore(info, is_own)
        batch_size = self.config.trainer.batch_size
        if self.plan.count_partial_samples(self.samples):
            raise EchelonError(
                Fault(
                    f"trainer.batch_size={batch_size}, but {self.last_snapshot} was saved after "
                    f"{self.samples % self.dataset_size} of {self.dataset_size} "
                    "samples of an epoch",
                    "keep the batch size, or use a snapshot from the end of an epoch",
                )
            )
        self.total_steps = self.schedule.total_steps = self._count_total_steps()
        self.evaluations.stop_early_if_due(self)

    def _count_total_steps(self) -> int:
        """Return the steps made so far, perhaps with another batch size, plus those left in the
        epochs."""
        trainer = self.config.trainer
        if trainer.steps is not None:
            return trainer.steps
        epoch, done = self.plan.locate(self.step, self.samples)
        left = sum(map(self.plan.count_batches, range(epoch, trainer.epochs or 0)))
        return self.step + max(0, left - done)

    # --- from step to step ---

    def iter_epoch(self) -> Iterator[tuple[Batch | BlockSlice, int]]:
        """Yields this rank's shares from the current position to the end of the epoch, with global
        batch sizes."""
        epoch, first = self.plan.locate(self.step, self.samples)
        order = self.make_order(epoch)
        batches = self.source.iter_batches(order, first, self.device, self._make_next_order)
        if self.transform is not None:
            batches = self._iter_transformed(self.transform, batches)
        for number, batch in enumerate(self.speed.sample_batches(batches, self.replica), first):
            total = order.count_samples(number)
            if self.check_first_batch is not None:
                self.check_first_batch(self, batch, total)
                self.check_first_batch = None
            yield batch, total

    def _iter_transformed(
        self, transform: BatchTransform, batches: Iterator[Batch | BlockSlice]
    ) -> Iterator[Batch | BlockSlice]:
        """Yields the batches as the experiment's `batch_transform` makes them for their steps."""
        for batch in batches:
            yield transform.transform(batch, self.step)

    def make_order(self, epoch: int) -> TrainOrder:
        """Return which samples this rank takes in an epoch, batch by batch."""
        world = self.group.world
        return self.plan.make_order(epoch, world.rank, world.size, self.source.storage_device)

    def _make_next_order(self, order: BatchOrder) -> TrainOrder | None:
        """Return the order of the next epoch, or None where the training ends before it."""
        epoch, done = self.plan.locate(self.step, self.samples)
        left = sum(map(self.plan.count_batches, range(epoch, order.epoch + 1))) - done
        return self.make_order(order.epoch + 1) if self.step + left < self.total_steps else None

    def close_sources(self) -> None:
        """Ends the processes that load data."""
        self.source.close()
        self.evaluations.close_source()

    def count_step(self, total: int) -> None:
        """Advances the position by one step over `total` samples, and lets the heartbeat know."""
        self.step += 1
        self.samples += total
        self.heartbeat.step = self.step
        self.heartbeat.beat()
        if self.on_first_step is not None:
            self.on_first_step()
            self.on_first_step = None
        if self.profile is not None:
            self.speed.exclude_time(self.profile.advance(self.step))

    def collect_requests(self) -> StepRequests:
        """Return what this rank asks for after the next step.

        A signal may reach any rank. Timers are rank 0's alone, because the clocks of ranks differ.
        """
        stop, look = self.stop.is_requested, self.readback.wants_every_step
        if self._has_no_timers or self.group.world.rank != 0:
            return StepRequests(stop, read_each_step=look) if stop or look else _NO_REQUESTS
        trainer = self.config.trainer
        save = self._restart_timer_if_due("save", trainer.save)
        return StepRequests(
            stop, save, self._restart_timer_if_due("evaluate", trainer.evaluate), look
        )

    @property
    def _has_no_timers(self) -> bool:
        """Whether neither saving nor evaluating is due by minutes."""
        return (
            self.config.trainer.save.minutes is None
            and self.config.trainer.evaluate.minutes is None
        )

    def _restart_timer_if_due(self, action: str, every: Interval) -> bool:
        """Return whether a timer has run out; it is then started again."""
        if (
            every.minutes is None
            or time.monotonic() < self._timer_starts[action] + 60 * every.minutes
        ):
            return False
        self._timer_starts[action] = time.monotonic()
        return True

    # --- what is due, and what the steps reported ---

    @property
    def epoch(self) -> int:
        """The pass over the data that the last step belongs to, from 1."""
        epoch, done = self.plan.locate(self.step, self.samples)
        return epoch + (done > 0)

    def is_readback_due(self) -> bool:
        """Return whether results are read from the device after this step.

        On a CPU that is every step. On a GPU with quick steps it is every few steps, and whenever
        an evaluation or a snapshot is due.
        """
        every = self.replica.readback_interval_steps
        return every == 1 or self.readback.is_due(self.step, every) or self._is_any_action_due()

    def _is_any_action_due(self) -> bool:
        """Return whether something is due at this step, or a process that is alone was asked to
        stop."""
        trainer = self.config.trainer
        is_stopped_alone = self.stop.is_requested and self.group.world.size == 1
        return is_stopped_alone or self.is_due(trainer.evaluate) or self.is_due(trainer.save)

    def is_due(self, every: Interval) -> bool:
        """Return whether something with this interval is due after this step.

        Everything is due after the last step, so that the last snapshot can be the best one.
        """
        if self.step == self.total_steps:
            return True
        if every.steps is not None and self.step % every.steps == 0:
            return True
        if every.epochs is None:
            return False
        epoch, done = self.plan.locate(self.step, self.samples)
        return done == 0 and epoch % every.epochs == 0

    def is_log_due(self) -> bool:
        """Return whether a line of metrics is due for this step."""
        return self.step % self.config.trainer.log_steps == 0 or self.step == self.total_steps

    def read_results(self) -> StepRequests:
        """Reads the results of the steps since the last readback, writes due log lines, returns the
        requests."""
        results = self.replica.read_results()
        # Measured right after reading: only here has the GPU caught up with the host. In between, a
        # clock on the host would measure how fast steps are queued.
        speed = (
            self.speed.measure_interval(self.step, self.samples) if self._unwritten_lines else {}
        )
        for step, (_, loss) in enumerate(results, self.step - len(results) + 1):
            if not math.isfinite(loss):
                raise make_nonfinite_error(self, f"the loss is {loss} at step {step}", step)
            self._unlogged_losses.append(loss)
            self.recent_losses.append(loss)
            if self._unwritten_lines and self._unwritten_lines[0]["step"] == step:
                self._write_log_line(self._unwritten_lines.popleft() | speed)
        requests = (
            results[-1].requests if len(results) == 1 else _combine_requests_over_steps(results)
        )
        if self.replica.readback_interval_steps > 1:
            self.readback.record_readback(self.step, requests)
        return requests

    # --- between steps ---

    def schedule_log_line(self) -> None:
        """Notes that a line of metrics is due for this step.

        Its loss and its speed are known at the next readback: on a GPU, waiting for them here would
        stall.
        """
        line = {
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "loss": math.nan,
            "lr": self.schedule.current_rate,
            "time": round(time.time(), 3),
        }
        self._unwritten_lines.append(line)

    def _write_log_line(self, line: MetricsLine) -> None:
        """Completes a line of metrics with the mean loss and gives it to trackers and progress
        bar."""
        losses, self._unlogged_losses = self._unlogged_losses, []
        if not self.trackers:
            return
        line["loss"] = sum(losses) / len(losses)
        self.log_to_trackers(line)
        self.screen.update_progress(line)
        self.report_saves(self.writer.take_results() if self.writer else [])

    def finish_evaluation(self) -> None:
        """Evaluates the step that the run resumes from, where it ended before it had done so."""
        if self.evaluations.is_left:
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluates, unless this step has been evaluated already."""
        if self.evaluations.evaluate(self, self.epoch):
            self.speed.restart_interval(self.step, self.samples)

    def save(self, *, is_evaluation_left: bool = False, is_best: bool = False) -> None:
        """Saves a snapshot, unless this step has been saved already. All ranks take part."""
        if self.step in (0, self.saved_step):
            return
        self.saved_step, self.unsaved_reason = self.step, None
        self.evaluations.is_left = is_evaluation_left and self.evaluations.evaluator is not None
        self.heartbeat.suspend()  # an earlier save may still be writing to a slow disk
        parts = self.collect_state(self.experiment, self.optimizer_flags, self.group)
        self._require_finite(parts)
        parts |= collect_stream_state(self.source, self.samples, self.group)
        if self.writer is not None:
            self.writer.save(self.step, parts, self._build_snapshot_info(), is_best)
        self.heartbeat.beat()

    def _require_finite(self, parts: dict[str, Any]) -> None:
        """Raises on all ranks where the state of any is not finite: it could never be resumed."""
        bad = self.finite_check.find_nonfinite(parts)
        if self.group.is_any_true(bool(bad)):
            of_ranks = self.group.gather_json(bad)
            names = list(dict.fromkeys(name for found in of_ranks for name in found))
            what = f"the state after step {self.step} is not finite ({format_tensor_names(names)})"
            raise make_nonfinite_error(self, f"{what} and was not saved", self.step, names)

    def _build_snapshot_info(self) -> dict[str, Any]:
        """Return what a snapshot says about itself, besides the state of the parts."""
        return {
            "step": self.step,
            "samples": self.samples,
            "losses": self._unlogged_losses,  # since the last line of metrics
            LAYOUT_KEY: self.plan.layout._asdict(),
            "changed_parameters": self._find_changed_parameters(),
            "config": self.config.select_numerics_settings(),
            "fingerprint": self.config.compute_numerics_fingerprint(),
            "world_size": self.group.world.size,
            "wandb_run_id": self.run.read_wandb_id(),
            **self.evaluations.describe(self.best_value),
            **describe_stream(self.source),
        }

    def _find_changed_parameters(self) -> dict[str, bool]:
        """Return by name the parameters that the training has frozen or thawed, and whether they
        are trained now."""
        flags = read_trained_flags(self.experiment.model)
        return {name: flag for name, flag in flags.items() if flag != self._built_flags[name]}


_NO_REQUESTS = StepRequests()


def _combine_requests_over_steps(results: list[StepResult]) -> StepRequests:
    """Return the requests of several steps as one: a request made in any of them counts."""
    return StepRequests(
        *(any(column) for column in zip(*(result.requests for result in results), strict=True))
    )
