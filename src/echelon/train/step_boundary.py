"""The step boundary: what follows a step, whoever has made it."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from echelon.config.schema import Config, Interval
from echelon.data.batches import Batch, BatchOrder, BatchSource, BlockSlice
from echelon.data.data_layout import LAYOUT_KEY
from echelon.data.epoch_plan import EpochPlan, TrainOrder
from echelon.monitoring.profiler import StepProfiler
from echelon.parallel.replica import StepRequests
from echelon.runs.metrics_file import MetricsLine, read_recent_metrics
from echelon.snapshot.writer import SnapshotWriter
from echelon.tracking.create import create_trackers
from echelon.tracking.progress import create_progress_display
from echelon.train.evaluations import Evaluations
from echelon.train.memory_copies import MemoryCopies
from echelon.train.output_tee import OutputTee
from echelon.train.run_output import RunOutput
from echelon.train.train_data import describe_stream


class TrainingStopped(BaseException):
    """Ends a loop after a stop was asked for and everything is saved. Not an Exception, so that
    code of the user which catches those does not go on."""


class RegroupRequested(BaseException):
    """Ends a loop at a step boundary from which its ranks go on in another round."""


@dataclass(kw_only=True)
class StepBoundary(RunOutput, ABC):
    """A training on one rank, between its steps: how far it is, what is due, and what follows.

    The loop of an experiment with a loss (`loop.Training`) and every loop over a session
    (`session_engine.SessionEngine`) differ in how a step is made, in when its results are known,
    and in what a snapshot holds. All that follows a step stands here.
    """

    config: Config
    device: torch.device
    evaluations: Evaluations
    source: BatchSource | None = None
    """Of the training data; None for a loop without."""
    plan: EpochPlan | None = None
    """Which batches every epoch has."""
    profile: StepProfiler | None = None
    copies: MemoryCopies | None = None
    """Of the state, in memory, where the ranks would go back to one if another was lost."""
    on_first_step: Callable[[], None] | None = None
    """Called once, on rank 0, after the first step of this start."""
    resumed_step: int = 0
    """The step that this process began after."""
    samples: int = 0
    """Samples of all ranks since the beginning: the one number that says where a run is."""
    is_finished: bool = False
    """Whether the loop has ended by itself, perhaps before its last step."""
    is_best: bool = False
    """Whether the loop has found this step to be the best so far."""

    def end_step(self, sample_count: int) -> None:
        """The step boundary, after a step over so many samples of all ranks: count, agree, log,
        save, evaluate, stop or regroup, in this order.

        The order matters: an evaluation that fails must not lose what was trained, and a run that
        is stopped must have saved before it leaves. What an evaluation finds is added to the
        snapshot of its step afterwards. Raises `TrainingStopped` where a stop was asked for.
        """
        self.count_step(sample_count)
        requests = self.agree()
        if self.is_log_due():
            self.schedule_log_line()
        if requests is None:
            return
        self.write_due_lines()
        trainer = self.config.trainer
        asks_save = requests.save or requests.stop or self.is_finished or self.is_best
        evaluates = self.evaluations.evaluator is not None and (
            requests.evaluate or self.is_finished or self.is_due(trainer.evaluate)
        )
        if asks_save or self.is_due(trainer.save):
            self.save(is_evaluation_left=evaluates)
        if evaluates:
            self.evaluate()
        if requests.stop and not self.is_finished:
            raise TrainingStopped
        if self.step < self.total_steps and not self.is_finished:
            if self.copies is not None and (requests.copy or requests.regroup):
                is_kept = self._keep_copy(self.copies) and self.copies.is_node_spared
                if requests.regroup and not is_kept:
                    self.save()
            if requests.regroup:
                raise RegroupRequested

    # --- what differs between loops ---

    @abstractmethod
    def agree(self) -> StepRequests | None:
        """Return what any rank has asked for, the same on all ranks. None where it is not known
        yet: the results of a GPU are read every few steps."""

    @abstractmethod
    def schedule_log_line(self) -> None:
        """Note that a line of metrics is due for this step; its numbers may be known later."""

    @abstractmethod
    def write_due_lines(self) -> None:
        """Write the lines whose numbers are known."""

    @abstractmethod
    def collect_parts(self) -> dict[str, Any]:
        """Return the parts of a snapshot that this rank writes. All ranks take part."""

    @abstractmethod
    def collect_copy(self) -> dict[str, Any]:
        """Return the parts of a copy in memory that this rank keeps. All ranks take part."""

    @abstractmethod
    def describe_state(self) -> dict[str, Any]:
        """Return what a snapshot says of its parts, besides what all snapshots say."""

    # --- position ---

    def count_step(self, sample_count: int) -> None:
        """Advance the position by one step, and let the heartbeat know."""
        self.step += 1
        self.samples += sample_count
        self.heartbeat.step = self.step
        self.heartbeat.beat()
        if self.on_first_step is not None:
            self.on_first_step()
            self.on_first_step = None

    def restore_progress(self, info: dict[str, Any]) -> None:
        """Continue from the snapshot with this `info`: its step, position in the data and best
        value."""
        self.step = self.saved_step = self.resumed_step = int(info["step"])
        if info.get("is_in_memory"):
            self.saved_step = None  # what a lost rank 0 was writing may be nowhere
        self.samples, self.best_value = int(info["samples"]), info["best"]

    def count_total_steps(self, steps: int | None, epochs: int | None) -> int:
        """Return the steps made so far, perhaps with another batch size, plus those left in the
        epochs."""
        if steps is not None:
            return steps
        assert self.plan is not None
        epoch, done = self.plan.locate(self.step, self.samples)
        left = sum(map(self.plan.count_batches, range(epoch, epochs or 0)))
        return self.step + max(0, left - done)

    def count_epochs(self) -> int:
        """Return the pass over the data that the last step belongs to, from 1."""
        if self.plan is None:
            return 1
        epoch, done = self.plan.locate(self.step, self.samples)
        return max(1, epoch + (done > 0))

    def locate_line(self) -> MetricsLine:
        """Return where a line of metrics of this step belongs."""
        return {"step": self.step, "epoch": self.count_epochs(), "samples": self.samples}

    # --- batches ---

    def iter_batches(self) -> Iterator[tuple[Batch | BlockSlice, int]]:
        """Yield this rank's shares from the current position on, with global batch sizes, without
        end."""
        assert self.plan is not None
        while True:
            epoch, first = self.plan.locate(self.step, self.samples)
            order = self.make_order(epoch)
            for number, batch in enumerate(self.iter_epoch(order, first), first):
                yield batch, order.count_samples(number)

    def iter_epoch(self, order: TrainOrder, first: int) -> Iterator[Batch | BlockSlice]:
        """Yield this rank's shares of an epoch from batch number `first` on."""
        assert self.source is not None
        return self.source.iter_batches(order, first, self.device, self._make_next_order)

    def make_order(self, epoch: int) -> TrainOrder:
        """Return which samples this rank takes in an epoch, batch by batch."""
        assert self.plan is not None
        assert self.source is not None
        world = self.group.world
        return self.plan.make_order(epoch, world.rank, world.size, self.source.storage_device)

    def _make_next_order(self, order: BatchOrder) -> TrainOrder | None:
        """Return the order of the next epoch, or None where the training ends before it."""
        is_over = self.count_total_steps(None, order.epoch + 1) >= self.total_steps
        return None if is_over else self.make_order(order.epoch + 1)

    def close_sources(self) -> None:
        """End the processes that load data."""
        if self.source is not None:
            self.source.close()
        self.evaluations.close_source()

    # --- rounds ---

    @abstractmethod
    def take_part_in_rounds(
        self, is_round_planned: Callable[[], bool], confirm_round: Callable[[], None]
    ) -> None:
        """Copy the state into memory from now on, look for planned rounds, and confirm this one
        when the loop begins."""

    def leave_round(self) -> None:
        """Give up a loop whose round is over."""
        self.close_sources()
        if self.profile is not None:
            self.profile.discard_profile()

    # --- what is due ---

    def is_due(self, every: Interval, next_steps: int = 0, next_samples: int = 0) -> bool:
        """Return whether something with this interval is due after this step, or after so many
        further ones.

        Everything is due after the last step, so that the last snapshot can be the best one.
        """
        step = self.step + next_steps
        if step == self.total_steps or (every.steps is not None and step % every.steps == 0):
            return True
        if every.epochs is None or self.plan is None:
            return False
        epoch, done = self.plan.locate(step, self.samples + next_samples)
        return done == 0 and epoch % every.epochs == 0

    def is_log_due(self) -> bool:
        """Return whether a line of metrics is due for this step."""
        return (
            self.step % self.config.trainer.log_steps == 0
            or self.step == self.total_steps
            or self.is_finished
        )

    # --- what follows ---

    def finish_evaluation(self) -> None:
        """Evaluate the step that the run resumes from, where it ended before it had done so."""
        if self.evaluations.is_left:
            self.evaluate()

    def evaluate(self) -> bool:
        """Evaluate, unless this step has been evaluated already; return whether it was done now."""
        return self.evaluations.evaluate(self)

    def save(self, *, is_evaluation_left: bool = False, is_best: bool = False) -> None:
        """Save a snapshot, unless this step has been saved already. All ranks take part.

        `is_evaluation_left` is set where an evaluation of this step follows.
        """
        if self.step in (0, self.saved_step):
            return
        self.unsaved_reason = None
        self.evaluations.is_left = is_evaluation_left
        self.heartbeat.suspend()  # an earlier save may still be writing to a slow disk
        parts = self.collect_parts()
        if self.writer is not None:
            info = self.describe_snapshot()
            self.writer.save(self.step, parts, info, is_best=is_best or self.is_best)
        self.saved_step = self.step  # not before: a rank may be lost while the state is collected
        self.is_best = False
        self.heartbeat.beat()

    def _keep_copy(self, copies: MemoryCopies) -> bool:
        """Copy the state into the memory of the ranks; return whether there is room for it. All of
        them take part."""
        begun_s = time.monotonic()
        parts = self.collect_copy()
        in_memory = {"is_in_memory": True, "folder": self.last_snapshot, "part_names": [*parts]}
        return copies.keep(self.describe_snapshot() | in_memory, parts, begun_s)

    def describe_snapshot(self) -> dict[str, Any]:
        """Return what a snapshot says about itself."""
        return {
            "step": self.step,
            "samples": self.samples,
            "best": self.best_value,
            **({LAYOUT_KEY: self.plan.layout._asdict()} if self.plan is not None else {}),
            "config": self.config.select_numerics_settings(),
            "fingerprint": self.config.compute_numerics_fingerprint(),
            "world_size": self.group.world.size,
            "wandb_run_id": self.run.read_wandb_id(),
            **describe_stream(self.source),
            **self.describe_state(),
        }

    # --- where the numbers go ---

    def open_writer(self) -> None:
        """Let this rank write snapshots."""
        self.writer = SnapshotWriter(
            self.run.snapshots_folder, self.config.trainer.keep_last, resumed_step=self.step
        )

    def open_output(self, output: OutputTee, opening_lines: Iterable[str]) -> None:
        """Announce the run, and open trackers and progress bar: on rank 0, when all that the user
        can get wrong has been checked."""
        for line in opening_lines:
            print(line, file=sys.stderr)
        is_evaluation_left = self.evaluations.is_left
        self.trackers = create_trackers(self.config, self.run, self.step, is_evaluation_left)
        recent = read_recent_metrics(self.run.metrics_file)
        self.logged_step = int(recent[-1].get("step", -1)) if recent else -1
        self.screen = create_progress_display(
            self.config.track.progress, self.total_steps, self.step
        )
        output.set_line_printer(self.screen.show)
        self.run.update_status(step=self.step, total_steps=self.total_steps)
