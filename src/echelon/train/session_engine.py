"""What a session does between two iterations of a user's loop: it counts, agrees, logs and saves.

The end of an iteration is the one place where state is collected and where ranks agree on a stop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.config.schema import Config, Interval
from echelon.data.batches import BatchSource
from echelon.data.data_layout import LAYOUT_KEY, require_same_layout
from echelon.data.epoch_plan import EpochPlan
from echelon.errors import EchelonError, Fault
from echelon.experiment.training_info import TrainingInfo, make_training_info
from echelon.parallel.process_group import RankGroup, broadcast_buffers
from echelon.parallel.user_collectives import count_collectives
from echelon.runs.heartbeat import Heartbeat
from echelon.runs.metrics_file import MetricsLine
from echelon.runs.metrics_summary import NOT_METRICS
from echelon.runs.run_folder import Run
from echelon.snapshot.reader import Snapshot
from echelon.snapshot.state import pack_rng_state, restore_rng_state, seed_all
from echelon.snapshot.writer import SnapshotWriter
from echelon.tracking.create import create_trackers
from echelon.tracking.progress import create_progress_display
from echelon.tracking.tracker import is_better
from echelon.train.evaluations import Evaluations
from echelon.train.loop_arguments import (
    read_count,
    require_no_lost_settings,
    require_positive,
)
from echelon.train.loop_exit import LoopExit
from echelon.train.media import Media, MediaError, encode_media
from echelon.train.output_tee import OutputTee
from echelon.train.prepare_evaluation import make_bad_sample_list
from echelon.train.run_output import RunOutput
from echelon.train.same_data_check import COMPARE_TIMEOUT_S, require_same_data
from echelon.train.session_agreement import SessionAgreement
from echelon.train.session_metrics import MetricSums, RankSums
from echelon.train.session_parts import RNG_PART, SessionParts
from echelon.train.session_shares import Share, iter_eval_shares, open_loop_data
from echelon.train.stop_signals import StopSignals
from echelon.train.train_data import (
    collect_stream_state,
    describe_stream,
    find_stream_notes,
    require_no_epochs,
    require_steps,
    restore_stream,
)
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_count

_LINES_INTERVAL_S = 0.1
"""Lines of metrics of several ranks are written at most so often."""


class SessionStopped(BaseException):
    """Ends a user's loop after a stop was asked for and everything is saved. Not an Exception, so
    that code which catches those does not go on."""


class SessionEngine(RunOutput):
    """The state of a session on one rank; the public class `Session` talks to the user."""

    profile = None
    is_over = False
    """Whether the block of a script's session has ended, so that nothing can be asked for."""
    on_first_step: Callable[[], None] | None = None
    """Called once, on rank 0, after the first iteration of this start."""
    flush_metrics: Callable[[], None] | None = None
    """Adds to the metrics what a captured step has kept on the device."""

    def __init__(
        self,
        config: Config,
        run: Run,
        group: RankGroup,
        stop: StopSignals,
        heartbeat: Heartbeat,
        output_tee: OutputTee,
        device: torch.device,
        snapshot: Snapshot | None,
        info: dict[str, Any],
    ) -> None:
        super().__init__(
            run=run,
            group=group,
            heartbeat=heartbeat,
            step=int(info.get("step", 0)),
            best_value=info.get("best"),
        )
        self.config, self.device = config, device
        self.parts = SessionParts(
            group, snapshot, info, takes_new_settings=config.trainer.resume not in ("auto", "never")
        )
        self._snapshot_info = info
        self.samples = int(info.get("samples", 0))
        self.is_finished = bool(info.get("is_finished", False))
        """Whether the loop of a resumed run had ended by itself."""
        self._output_tee = output_tee
        self.metrics = MetricSums()
        self.metrics.restore(info.get("metrics", ()), group.world.rank, group.world.size)
        self._share = self._loop_share = Share(None, 1, 1)
        """That of the loop, or of an evaluation within; and that of the loop."""
        self._is_in_iteration = self._has_iterated = False
        self._has_compared_eval_data = False
        self._first_step = self.step
        self.has_stepped = False
        """Whether this start has stepped an optimizer."""
        self.plan: EpochPlan | None = None
        """Of the data; None for a loop without."""
        self.evaluations: Evaluations | None = None
        """Of an experiment with a step of its own; a user's loop evaluates by itself."""
        self._sources: list[BatchSource] = []
        self._bad_samples = make_bad_sample_list(config, run)
        self._loop_source: BatchSource | None = None
        self._loop_exit = LoopExit(group, self.step)
        self.agreement = SessionAgreement(group, stop, config.trainer.save.minutes, self._loop_exit)
        self.collective_count = 0
        """Collectives before the iteration, or up to the last backward pass in it."""
        self.backward_count = 0
        """Backward passes in the current iteration."""
        self._is_left = False
        """Whether the user's loop was left within an iteration, by `break` or by an error."""
        self._is_best = False
        self.log_weight: float | Tensor = 1.0
        """The number of things that what is logged is a mean over."""
        self.host_calls: set[str] = set()
        """What the loop has asked the session in a way that a captured step could not."""
        self.saved_step = self.step if info else None
        self._line_begun = (time.monotonic(), self.step, self.samples)
        self._due_lines: list[_DueLine | MetricsLine] = []
        """Lines that are not written yet, in order."""
        self._lines_written_s = -_LINES_INTERVAL_S
        """By rank 0's clock, as all ranks know it."""

    # --- the loop ---

    def iter_batches(
        self,
        data: Any,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        **loader: Any,
    ) -> Iterator[Any]:
        """Yield the data of this rank's shares; see `Session.batches`."""
        trainer, world = self.config.trainer, self.group.world
        given = {"batch_size": batch_size, "epochs": epochs, "steps": steps}
        require_positive(**given)
        require_no_lost_settings(trainer, "session.batches", **given)
        loop_data = open_loop_data(
            self.config,
            self.group,
            self.device,
            self.samples,
            self._bad_samples,
            data,
            batch_size,
            **loader,
        )
        self._sources.append(loop_data.source)
        require_same_data(self.group, loop_data.plan, train_data=data)
        self.group.wait_for_all("given the same data", COMPARE_TIMEOUT_S)
        self.plan = loop_data.plan
        note = require_same_layout(self._snapshot_info, self.plan.layout, trainer.resume)
        if note is not None and world.rank == 0:
            print(note, file=sys.stderr)
        require_no_epochs(self.plan, epochs, "session.batches")
        if steps is None and epochs is None:
            steps, epochs = trainer.steps, trainer.epochs
        require_steps(
            loop_data.source, steps, "set trainer.steps, or give session.batches(data, steps=…)"
        )
        self._loop_source = loop_data.source
        restore_stream(
            loop_data.source, self._snapshot_info, self.parts.load_extra_part, self.group
        )
        if steps is None:
            steps = loop_data.count_steps(self.step, self.samples, epochs or 0)
        self._begin_loop(steps, loop_data.description)
        if world.rank == 0:
            for stream_note in find_stream_notes(loop_data.source, trainer):
                print(stream_note, file=sys.stderr)
        return _Iterations(
            self._run_loop(
                loop_data.iter_shares(world, self.device, lambda: (self.step, self.samples))
            )
        )

    def iter_steps(self, count: int | None) -> Iterator[int]:
        """Yield the numbers of iterations; see `Session.steps`."""
        steps = self.config.trainer.steps if count is None else count
        if steps is None:
            raise EchelonError(
                Fault("session.steps has no number", "give one: session.steps(1000)")
            )
        require_positive(steps=steps)
        require_no_lost_settings(self.config.trainer, "session.steps", steps=count)
        self._begin_loop(steps, "")
        world = self.group.world.size
        shares = (Share(n + 1, 1, world) for n in range(self.step, steps))
        return _Iterations(self._run_loop(shares))

    def iter_eval_batches(
        self,
        data: Any,
        batch_size: int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> Iterator[Any]:
        """Yield this rank's share of every batch, in order; see `Session.eval_batches`."""
        if not self._has_compared_eval_data:
            self._has_compared_eval_data = True
            require_same_data(self.group, None, **{"the data of eval_batches": data})
        self.begin_message()
        self._share_buffers()  # what is evaluated is what is saved
        self.heartbeat.suspend()
        world, bad_samples = self.group.world, self._bad_samples
        shares = iter_eval_shares(
            self.config, world, self.device, bad_samples, data, batch_size, collate_fn
        )
        try:
            for share in shares:
                self._share = share
                yield share.data
                self.heartbeat.beat()
        finally:
            self._share = self._loop_share
            shares.close()

    def _begin_loop(self, total_steps: int, what: str) -> None:
        """Check the parts, restore random numbers, and open trackers: once, before iteration 1."""
        if self.parts.is_complete:
            raise _make_second_loop_error()
        self.parts.begin_loop()
        self.total_steps = total_steps
        # From here on every rank draws its own random numbers, for dropout and the like.
        seed_all(self.config.seed + 1 + self.group.world.rank)
        rows = self.parts.load_rng_rows()
        if rows is not None and len(rows) == self.group.world.size:  # another number draws anew
            restore_rng_state(rows[self.group.world.rank], self.device)
        if self.group.world.rank == 0:
            self._open_output(what)
        self.heartbeat.step = self.step
        self._line_begun = (time.monotonic(), self.step, self.samples)
        self.agreement.start_clock()
        self._loop_exit.start_watching()

    def _open_output(self, what: str) -> None:
        trainer, size = self.config.trainer, self.group.world.size
        where = f"{size} processes ({self.device.type})" if size > 1 else "one process"
        over = f" over {what}" if what else ""
        steps = format_count(self.total_steps, "step")
        print(f"run {self.run.name}: {steps}{over} on {where}", file=sys.stderr)
        self.writer = SnapshotWriter(
            self.run.snapshots_folder, trainer.keep_last, resumed_step=self.step
        )
        is_evaluation_left = self.evaluations is not None and self.evaluations.is_left
        self.trackers = create_trackers(self.config, self.run, self.step, is_evaluation_left)
        self.screen = create_progress_display(
            self.config.track.progress, self.total_steps, self.step
        )
        self._output_tee.set_line_printer(self.screen.show)
        self.run.update_status(step=self.step, total_steps=self.total_steps)

    def _run_loop(self, shares: Iterator[Share]) -> Iterator[Any]:
        """Yield the data of the shares; what follows a `yield` is the end of an iteration.

        Nothing is done where the loop is left: `break` and an error look the same from here, and
        the iteration of an error must not be saved. `finish` ends that of a `break`.
        """
        self._has_iterated = True
        while self.step < self.total_steps and not self.is_finished:
            self._share = self._loop_share = next(shares)
            self.log_weight = self._share.sample_count
            self._is_in_iteration = True
            self.backward_count, self.collective_count = 0, count_collectives()
            try:
                yield self._share.data
            except GeneratorExit:
                self._is_left = True
                raise
            self._end_iteration()
        self.is_finished = True
        self.save()

    def _end_iteration(self, is_left: bool = False) -> None:
        """Count the iteration, and do what is due; `is_left` where the user's loop ends here."""
        self._is_in_iteration = False
        self.step += 1
        self.samples += self._loop_share.total if self.plan is not None else 0
        self.heartbeat.step = self.step
        self.heartbeat.beat()
        if self.on_first_step is not None:
            self.on_first_step()
            self.on_first_step = None
        agreed = self.agreement.agree()
        self.is_finished = agreed.is_finished or is_left or self.step == self.total_steps
        if self.is_finished or agreed.is_stopped:
            self._loop_exit.leave(self.step)
        else:
            self._loop_exit.go_on(self.step)
        self._share_buffers()
        if self.step % self.config.trainer.log_steps == 0 or self.is_finished:
            self._schedule_log_line()
        is_due = self._is_interval_over(self.config.trainer.save)
        evaluates = self.evaluations is not None and self._is_interval_over(
            self.config.trainer.evaluate
        )
        if agreed.is_save_due or agreed.is_stopped or self._is_best or is_due or self.is_finished:
            self.save(is_evaluation_left=evaluates)
        if evaluates:
            self.evaluate()
        if agreed.is_stopped and not self.is_finished:
            raise SessionStopped

    def _share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, such as the statistics of batch norms."""
        if self.group.world.size > 1:
            buffers = self.parts.list_buffers()
            broadcast_buffers([b for b in buffers if b.device.type == self.device.type])

    # --- what the ranks agree on ---

    @property
    def share_count(self) -> int:
        """Samples of this rank's share that count."""
        return self._share.sample_count

    @property
    def epoch(self) -> int:
        """The pass over the data that the current batch belongs to, from 1."""
        return 1 if self.plan is None else 1 + self.plan.locate(self.step, self.samples)[0]

    @property
    def is_loop_over(self) -> bool:
        """Whether the loop has ended by itself, so that its last snapshot is saved."""
        return self._has_iterated and self.is_finished and not self._is_in_iteration

    def compute_weight(self, count: float | Tensor | None) -> float | Tensor:
        """Return the weight of this rank's mean in the mean over all ranks; the sum of all ranks'
        weights is 1."""
        share = self._loop_share
        if count is None:
            return share.sample_count / share.total
        counted = read_count(count, self.step + 1)
        own = counted if share.sample_count else 0.0
        self.log_weight = own
        device = counted.device if isinstance(counted, Tensor) else None
        total = torch.as_tensor(own, dtype=torch.float64, device=device).clone()
        if self.group.world.size > 1:
            self.begin_message()
            dist.all_reduce(total)
        elif isinstance(counted, Tensor):
            return 1.0
        if not isinstance(counted, Tensor) and not float(total):
            raise EchelonError(
                Fault(
                    f"session.backward is given count=0 on every rank in step {self.step + 1}",
                    "leave out a batch that counts nothing",
                )
            )
        return own / total if isinstance(counted, Tensor) else own / float(total)

    def begin_message(self) -> None:
        """Note that this rank is about to exchange something with all others; one that has left the
        loop waits until they have left it too."""
        if self._is_left:
            self._leave_loop()
        self._loop_exit.begin_message()

    def _leave_loop(self) -> None:
        self._loop_exit.leave(self.step + int(self.agreement.has_step))

    def make_info(self) -> TrainingInfo:
        """Return what a function with a loop of its own may know of its training."""
        world = self.group.world
        position = (self.step, self.samples)
        return make_training_info(self.config, world.rank, world.size, self.run.folder, *position)

    # --- what is due, and numbers ---

    def is_due(self, steps: int | None, epochs: int | None, minutes: float | None) -> bool:
        """Return whether something is due in the current iteration."""
        require_no_epochs(self.plan, epochs, "session.every")
        if minutes is not None and self.agreement.has_time_passed(minutes):
            return True
        total = self._loop_share.total if self.plan is not None else 0
        return self._is_due_after(self.step + 1, self.samples + total, steps, epochs)

    def _is_interval_over(self, every: Interval) -> bool:
        """Return whether something with this interval is due after the iterations so far."""
        return self._is_due_after(self.step, self.samples, every.steps, every.epochs)

    def _is_due_after(self, step: int, samples: int, steps: int | None, epochs: int | None) -> bool:
        """Return whether something is due after a step, at that position in the data."""
        if step == self.total_steps or (steps is not None and step % steps == 0):
            return True
        if epochs is None or self.plan is None:
            return False
        epoch, batch = self.plan.locate(step, samples)
        return batch == 0 and epoch % epochs == 0

    def add_metrics(self, numbers: dict[str, float | Tensor]) -> None:
        """Add to the means of the next line of metrics, weighted by this rank's samples, or by what
        the mean of its loss is over."""
        self._require_free_names(numbers)
        if self._share.sample_count:  # what a rank computes without a sample of its own is nothing
            self.metrics.add(numbers, self.log_weight)

    def _require_free_names(self, names: Iterable[str]) -> None:
        """Raise where something is to be logged under the name of a place in metrics.jsonl."""
        if taken := sorted(NOT_METRICS.intersection(names)):
            where = f"(rank {self.group.world.rank}, step {self.step + 1})"
            raise EchelonError(
                *(
                    Fault(
                        f"{name} is the name of a place in metrics.jsonl {where}",
                        "choose another name",
                    )
                    for name in taken
                )
            )

    def log_media(self, media: dict[str, Media]) -> None:
        """Log texts, images and histograms of rank 0 for the current iteration."""
        self._require_free_names(media)
        where = f"(rank {self.group.world.rank}, step {self.step + 1})"
        if not self._is_in_iteration:
            names = ", ".join(media)
            raise EchelonError(
                Fault(
                    f"session.log is given {names} outside of the loop {where}",
                    "log texts, images and histograms in an iteration: where session.every() says "
                    "so, the last one included",
                )
            )
        if self.group.world.rank == 0:
            for name, value in media.items():  # a line each, as lines have a limit
                self._log_medium(name, value, where)

    def _log_medium(self, name: str, value: Media, where: str) -> None:
        step = self.step + 1
        try:
            encoded = encode_media(self.run, name, step, value)
        except MediaError as error:
            raise EchelonError(Fault(f"{name} is {error.what} {where}", error.do)) from None
        except OSError as error:  # a full disk must not end a training
            reason = format_os_error_reason(error)
            print(f"warning: {name} was not logged {where}: {reason}", file=sys.stderr)
            return
        line: MetricsLine = {"step": step, "epoch": self.epoch, name: encoded}
        if self._due_lines:  # which are of steps before
            self._due_lines.append(line)
        else:
            self.log_to_trackers(line)

    def record_best(self, name: str, value: float, best_is: str) -> bool:
        """Log the result of an evaluation and keep it where it is the best; the same on all
        ranks."""
        self.begin_message()
        if self._due_lines:
            self._write_due_lines()
        value = float(self.group.broadcast(torch.tensor([value], dtype=torch.float64)))
        if is_better(value, self.best_value, best_is):
            self.best_value, self._is_best = value, True
        is_best = self._is_best
        step, epoch = (
            (self.step, self._count_epochs())
            if self.is_loop_over
            else (
                self.step + 1,
                self.epoch,
            )
        )
        if self.group.world.rank == 0 and step > self._first_step:  # else it stands there already
            self.log_to_trackers({"step": step, "epoch": epoch, f"eval_{name}": value})
            print(f"evaluated in step {step}: {name} {value:.5g}", file=sys.stderr)
        if self.is_loop_over and is_best:
            if self.writer is not None:
                self.writer.record_evaluation(step, {"best": value}, is_best=True)
            self._is_best = False
        return is_best

    def _count_epochs(self) -> int:
        """Return the pass over the data that the last iteration belongs to, from 1."""
        if self.plan is None:
            return 1
        epoch, batch = self.plan.locate(self.step, self.samples)
        return max(1, epoch + (batch > 0))

    # --- lines of metrics ---

    def _schedule_log_line(self) -> None:
        """Note that a line of metrics is due for this step. With several ranks lines are written
        together: their sums take a message, which may take as long as a quick step."""
        if self.flush_metrics is not None:
            self.flush_metrics()
        self.metrics.close_line()
        begun_s, step, samples = self._line_begun
        self._line_begun = (time.monotonic(), self.step, self.samples)
        seconds = max(1e-9, self._line_begun[0] - begun_s)
        optimizer = self.parts.optimizer
        measured = {"step_ms": 1e3 * seconds / max(1, self.step - step)}
        if self.plan is not None:
            measured = {"samples_per_s": (self.samples - samples) / seconds, **measured}
        if optimizer is not None:
            measured = {"lr": float(optimizer.param_groups[0]["lr"]), **measured}
        self._due_lines.append(_DueLine(self._locate_line(), measured, round(time.time(), 3)))
        waited_s = self.agreement.clock_s - self._lines_written_s
        if self.group.world.size == 1 or waited_s >= _LINES_INTERVAL_S:
            self._write_due_lines()

    def _write_due_lines(self) -> list[RankSums]:
        """Write the lines that are due; return on rank 0 what each rank has logged since. A
        collective."""
        if self.flush_metrics is not None:
            self.flush_metrics()
        gathered = self.metrics.gather(self.group)
        self._lines_written_s = self.agreement.clock_s
        due, self._due_lines = self._due_lines, []
        sums = iter(gathered.lines)
        for line in due if self.group.world.rank == 0 else ():
            if isinstance(line, _DueLine):
                self._write_log_line(line, _compute_means(next(sums)))
            else:
                self.log_to_trackers(line)
        if self.writer is not None:
            self.report_saves(self.writer.take_results())
        return gathered.of_ranks

    def _write_log_line(self, due: _DueLine, logged: dict[str, float]) -> None:
        # The loop may log a rate of its own: that of another optimizer, or of a schedule.
        measured = {name: value for name, value in due.measured.items() if name not in logged}
        line = {**due.place, **logged, **measured, "time": due.time_s}
        if logged or measured:
            self.log_to_trackers(line)
        if logged:
            self.screen.update_progress(line, "loss" if "loss" in logged else next(iter(logged)))

    def _write_last_numbers(self) -> None:
        """Write what was logged after the loop, such as the result of a test."""
        self.metrics.close_line()
        self._due_lines.append(_DueLine(self._locate_line(), {}, round(time.time(), 3)))
        self._write_due_lines()

    def _locate_line(self) -> MetricsLine:
        return {"step": self.step, "epoch": self._count_epochs(), "samples": self.samples}

    # --- snapshots ---

    def evaluate(self) -> None:
        """Evaluate what an experiment with a step of its own is to be evaluated by, if anything."""
        if self.evaluations is not None:
            if self._due_lines:
                self._write_due_lines()
            self.evaluations.evaluate(self, self._count_epochs())

    def save(self, *, is_evaluation_left: bool = False, is_best: bool = False) -> None:
        """Save a snapshot, unless this step has been saved already. All ranks take part."""
        if self.step in (0, self.saved_step):
            return
        self.saved_step, self.unsaved_reason = self.step, None
        if self.evaluations is not None:
            self.evaluations.is_left = is_evaluation_left
        self.heartbeat.suspend()
        self.parts.require_savable(self.step)
        rng_rows = self.group.gather(pack_rng_state(self.device))
        metrics = self._write_due_lines()
        stream_state = collect_stream_state(self._loop_source, self.samples, self.group)
        if self.group.world.rank == 0:
            assert self.writer is not None
            parts = self.parts.collect_state() | stream_state
            parts[RNG_PART] = {"ranks": torch.stack(rng_rows)}
            info = {
                "step": self.step,
                "samples": self.samples,
                "best": self.best_value,
                "metrics": metrics,
                **({LAYOUT_KEY: self.plan.layout._asdict()} if self.plan is not None else {}),
                "parts": self.parts.names,
                "optimizer_settings": self.parts.optimizer_settings,
                "changed_parameters": self.parts.find_changed_parameters(),
                "is_finished": self.is_finished and self.step < self.total_steps,
                "config": self.config.select_numerics_settings(),
                "fingerprint": self.config.compute_numerics_fingerprint(),
                "world_size": self.group.world.size,
                "wandb_run_id": self.run.read_wandb_id(),
                **describe_stream(self._loop_source),
            }
            if self.evaluations is not None:
                info |= self.evaluations.describe(self.best_value)
            self.writer.save(self.step, parts, info, is_best=is_best or self._is_best)
        self._is_best = False
        self.heartbeat.beat()

    # --- the end, as the worker asks for it ---

    def close_sources(self) -> None:
        """End the processes that load data."""
        for source in self._sources:
            source.close()
        if self.evaluations is not None:
            self.evaluations.close_source()

    def finish(self, what_ended: str) -> None:
        """End a session whose function has returned, or whose block was left, perhaps from within
        its loop: then it is finished, and the iteration counts if it made a step."""
        if not self.parts.is_complete:
            raise EchelonError(
                Fault(
                    f"{what_ended} without a loop",
                    "iterate over session.batches(data) or session.steps(count)",
                )
            )
        if not self._has_iterated:
            raise EchelonError(
                Fault(
                    f"{what_ended}, but nothing iterated over its session.batches or session.steps",
                    "write the loop: for batch in session.batches(data)",
                )
            )
        if self.parts.optimizer is not None and self.step > self._first_step:
            self._require_step()
        if self._is_in_iteration:
            self._leave_loop()
        if self._is_in_iteration and self.agreement.has_step:
            self._end_iteration(is_left=True)
        self.is_finished = True
        if self.step > self._first_step:  # otherwise they stand there already
            self._write_last_numbers()
        self.save()

    def _require_step(self) -> None:
        if not self.has_stepped:
            made = format_count(self.step - self._first_step, "iteration")
            raise EchelonError(
                Fault(
                    f"the loop has made {made}, but session.step was never called, so nothing was "
                    "trained",
                    "call session.backward(loss) and session.step(optimizer) in it",
                )
            )


class _DueLine(NamedTuple):
    """A line of metrics whose means are not known yet."""

    place: MetricsLine
    measured: dict[str, float]
    time_s: float


class _Iterations(Iterator[Any]):
    """What a loop iterates over. A second `for` over it would train nothing, so it is refused."""

    def __init__(self, iterations: Iterator[Any]) -> None:
        self._iterations = iterations
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            raise _make_second_loop_error()
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterations)
        except StopIteration:
            self._is_over = True
            raise


def _make_second_loop_error() -> EchelonError:
    return EchelonError(
        Fault(
            "the session has had its loop already",
            "write one loop over all epochs: session.batches(data, epochs=10), in which "
            "session.every(epochs=1) says when one ends",
        )
    )


def _compute_means(sums: RankSums) -> dict[str, float]:
    return {name: total / weight for name, (total, weight) in sums.items() if weight}
