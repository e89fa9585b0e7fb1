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
from echelon.data.data_layout import require_same_layout
from echelon.errors import EchelonError, Fault
from echelon.experiment.training_info import TrainingInfo, make_training_info
from echelon.parallel.process_group import RankGroup, broadcast_buffers
from echelon.parallel.replica import StepRequests
from echelon.parallel.user_collectives import count_collectives
from echelon.runs.heartbeat import Heartbeat
from echelon.runs.metrics_file import MetricsLine
from echelon.runs.metrics_summary import NOT_METRICS
from echelon.runs.run_folder import Run
from echelon.snapshot.state import pack_rng_state, restore_rng_state, seed_all
from echelon.tracking.tracker import is_better
from echelon.train.evaluations import Evaluations
from echelon.train.loop_arguments import (
    read_count,
    require_no_lost_settings,
    require_positive,
)
from echelon.train.loop_exit import LoopExit
from echelon.train.media import Media, MediaError, encode_media
from echelon.train.memory_copies import KeptLoop
from echelon.train.minute_timers import MinuteTimers
from echelon.train.output_tee import OutputTee
from echelon.train.prepare_evaluation import make_bad_sample_list
from echelon.train.round_end import RoundLost, is_round_end
from echelon.train.same_data_check import COMPARE_TIMEOUT_S, require_same_data
from echelon.train.session_agreement import SessionAgreement
from echelon.train.session_metrics import MetricSums, RankSums
from echelon.train.session_parts import RNG_PART, SessionParts
from echelon.train.session_shares import Share, fill_share, iter_eval_shares, open_loop_data
from echelon.train.step_boundary import RegroupRequested, StepBoundary
from echelon.train.stop_signals import StopSignals
from echelon.train.train_data import (
    collect_stream_state,
    find_stream_notes,
    require_no_epochs,
    require_steps,
    restore_stream,
)
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_count

_LINES_INTERVAL_S = 0.1
"""Lines of metrics of several ranks are written at most so often."""


class SessionEngine(StepBoundary):
    """The state of a session on one rank; the public class `Session` talks to the user."""

    is_over = False
    """Whether the block of a script's session or the round of a function's has ended, so that
    nothing can be asked for."""
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
        load_part: Callable[[str], Any],
        info: dict[str, Any],
        evaluations: Evaluations,
        kept: KeptLoop | None = None,
    ) -> None:
        super().__init__(
            config=config,
            run=run,
            group=group,
            heartbeat=heartbeat,
            device=device,
            evaluations=evaluations,
        )
        if info:
            self.restore_progress(info)
        is_own = info.get("is_in_memory") or config.trainer.resume in ("auto", "never")
        self.parts = SessionParts(group, load_part, info, takes_new_settings=not is_own)
        self._snapshot_info = info
        self._kept = kept
        self.interruption: BaseException | None = None
        """Why the loop was left, if its round is over."""
        self.on_loop_begun: Callable[[], None] = lambda: None
        self.is_finished = bool(info.get("is_finished", False))
        self._output_tee = output_tee
        self.metrics = MetricSums()
        self.metrics.restore(info.get("metrics", ()), group.world.rank, group.world.size)
        self._share = self._loop_share = Share(None, 1, 1)
        """That of the loop, or of an evaluation within; and that of the loop."""
        self._is_in_iteration = self._has_iterated = False
        self._has_compared_eval_data = False
        self.has_stepped = False
        """Whether this start has stepped an optimizer."""
        self._bad_samples = make_bad_sample_list(config, run)
        self._loop_exit = LoopExit(group, self.step)
        timers = MinuteTimers(config.trainer, group.world.rank)
        self.agreement = SessionAgreement(group, stop, timers, self._loop_exit)
        self.collective_count = 0
        """Collectives before the iteration, or up to the last backward pass in it."""
        self.backward_count = 0
        """Backward passes in the current iteration."""
        self._is_left = False
        """Whether the user's loop was left within an iteration, by `break` or by an error."""
        self.log_weight: float | Tensor = 1.0
        """The number of things that what is logged is a mean over."""
        self.host_calls: set[str] = set()
        """What the loop has asked the session in a way that a captured step could not."""
        self._line_begun = (time.monotonic(), self.step, self.samples)
        self._saved_metrics: list[RankSums] = []
        """What each rank has logged for the next line, when a snapshot was saved."""
        self._due_lines: list[_DueLine | MetricsLine] = []
        """Lines that are not written yet, in order."""
        self._lines_written_s = -_LINES_INTERVAL_S
        """By rank 0's clock, as all ranks know it."""

    # --- the loop ---

    def open_batches(
        self,
        data: Any,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        **loader: Any,
    ) -> Iterator[Any]:
        """Yield the data of this rank's shares; see `Session.batches`."""
        self._require_first_loop()
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
        self.source = source = loop_data.source
        require_same_data(self.group, loop_data.plan, train_data=data)
        self.group.wait_for_all("given the same data", COMPARE_TIMEOUT_S)
        self.plan = loop_data.plan
        note = require_same_layout(self._snapshot_info, self.plan.layout, trainer.resume)
        if note is not None and world.rank == 0:
            print(note, file=sys.stderr)
        require_no_epochs(self.plan, epochs, "session.batches")
        if steps is None and epochs is None:
            steps, epochs = trainer.steps, trainer.epochs
        require_steps(source, steps, "set trainer.steps, or give session.batches(data, steps=…)")
        restore_stream(source, self._snapshot_info, self.parts.load_part, self.group)
        self._begin_loop(
            self.count_total_steps(steps, epochs),
            f" over {loop_data.description}",
            find_stream_notes(source, trainer),
        )
        shares = (fill_share(source, *batch, self.device) for batch in self.iter_batches())
        return _Iterations(self, self._run_loop(shares))

    def open_steps(self, count: int | None) -> Iterator[int]:
        """Yield the numbers of iterations; see `Session.steps`."""
        self._require_first_loop()
        steps = self.config.trainer.steps if count is None else count
        if steps is None:
            raise EchelonError(
                Fault("session.steps has no number", "give one: session.steps(1000)")
            )
        require_positive(steps=steps)
        require_no_lost_settings(self.config.trainer, "session.steps", steps=count)
        self._begin_loop(steps)
        world = self.group.world.size
        shares = (Share(n + 1, 1, world) for n in range(self.step, steps))
        return _Iterations(self, self._run_loop(shares))

    def iter_eval_batches(
        self,
        data: Any,
        batch_size: int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> Iterator[Any]:
        """Yield this rank's share of every batch, in order; see `Session.eval_batches`."""
        try:
            if not self._has_compared_eval_data:
                self._has_compared_eval_data = True
                require_same_data(self.group, None, **{"the data of eval_batches": data})
            self.begin_message("session.eval_batches")
            self._share_buffers()  # what is evaluated is what is saved
        except Exception as error:
            self.leave_lost_round(error)
            raise
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

    def _require_first_loop(self) -> None:
        if self.parts.is_complete:
            raise _make_second_loop_error()

    def _begin_loop(self, total_steps: int, what: str = "", notes: Iterable[str] = ()) -> None:
        """Check the parts, restore random numbers, and open trackers: once, before iteration 1."""
        self.parts.begin_loop()
        self.total_steps = total_steps
        # From here on every rank draws its own random numbers, for dropout and the like.
        rank, size = self.group.world.rank, self.group.world.size
        seed_all(self.config.seed + 1 + rank)
        rows = self.parts.load_rng_rows()
        if rows is not None and len(rows) == size:
            restore_rng_state(rows[rank], self.device)
        elif self._kept is not None:  # other numbers than those of the beginning
            seed_all(hash((self.config.seed, self.step, rank, size)) % 2**63)
        if rank == 0:
            where = f"{size} processes ({self.device.type})" if size > 1 else "one process"
            steps = format_count(total_steps, "step")
            self._open_files((f"run {self.run.name}: {steps}{what} on {where}", *notes))
        self.heartbeat.step = self.step
        self._line_begun = (time.monotonic(), self.step, self.samples)
        self.agreement.start_clock()
        self._loop_exit.start_watching()
        self.on_loop_begun()

    def _open_files(self, opening_lines: Iterable[str]) -> None:
        """Open writer and trackers, or go on with those of the round before."""
        if self._kept is not None and self._kept.output is not None:
            self.adopt_output(self._kept.output)
            self._kept.output = None
        else:
            self.open_writer()
            self.open_output(self._output_tee, opening_lines if self._kept is None else ())
            self.start_mirror()

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
            self.end_step(self._count_batch())
        self.is_finished = True
        self.evaluate()
        self.save()

    def _count_batch(self) -> int:
        """Return the samples of the current batch, of all ranks."""
        return self._loop_share.total if self.plan is not None else 0

    def agree(self) -> StepRequests:
        """End an iteration: return what any rank has asked for in it."""
        self._is_in_iteration = False
        requests, is_finished = self.agreement.agree()
        self.is_finished = is_finished or self._is_left or self.step == self.total_steps
        if self.is_finished or requests.stop:
            self._loop_exit.leave(self.step)
        else:
            self._loop_exit.go_on(self.step)
        self._share_buffers()
        return requests

    def leave_lost_round(self, error: BaseException) -> None:
        """Raise RoundLost in the place of an error that this rank meets because another one is
        lost. What is asked of the session from then on raises it again."""
        if self.copies is None or not is_round_end(error):
            return
        if not isinstance(error, (RegroupRequested, RoundLost)):
            lost = RoundLost()
            lost.__cause__, error = error, lost
        self.interruption = error
        self._loop_exit.stop_watching()
        raise error

    def take_part_in_rounds(
        self, is_round_planned: Callable[[], bool], confirm_round: Callable[[], None]
    ) -> None:
        assert self.copies is not None
        self.agreement.is_copy_due = self.copies.is_due
        self.agreement.is_round_planned = is_round_planned
        self.on_loop_begun = confirm_round

    def leave_round(self) -> None:
        self.is_over = True
        self._loop_exit.stop_watching()
        super().leave_round()

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
            self.begin_message("session.backward with a count")
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

    def begin_message(self, call: str) -> None:
        """Note that this rank is about to exchange something with all others in this call; one
        that has left the loop waits until they have left it too."""
        if self._is_left:
            self._leave_loop()
        self._loop_exit.begin_message(call)

    def _leave_loop(self) -> None:
        self._loop_exit.leave(self.step + int(self.agreement.has_step))

    def make_info(self) -> TrainingInfo:
        """Return what a function with a loop of its own may know of its training."""
        world = self.group.world
        position = (self.step, self.samples)
        return make_training_info(self.config, world.rank, world.size, self.run.folder, *position)

    # --- what is due, and numbers ---

    def is_iteration_due(
        self, steps: int | None, epochs: int | None, minutes: float | None
    ) -> bool:
        """Return whether something is due in the current iteration."""
        require_no_epochs(self.plan, epochs, "session.every")
        if minutes is not None and self.agreement.has_time_passed(minutes):
            return True
        return self.is_due(Interval(epochs=epochs, steps=steps), 1, self._count_batch())

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
        self.begin_message("session.best")
        if self._due_lines:
            self._write_lines()
        value = float(self.group.broadcast(torch.tensor([value], dtype=torch.float64)))
        if is_better(value, self.best_value, best_is):
            self.best_value, self.is_best = value, True
        is_best = self.is_best
        step, epoch = (
            (self.step, self.count_epochs())
            if self.is_loop_over
            else (
                self.step + 1,
                self.epoch,
            )
        )
        if self.group.world.rank == 0 and step > self.resumed_step:  # else it stands there already
            self.log_to_trackers({"step": step, "epoch": epoch, f"eval_{name}": value})
            print(f"evaluated in step {step}: {name} {value:.5g}", file=sys.stderr)
        if self.is_loop_over and is_best:
            if self.writer is not None:
                self.writer.record_evaluation(step, {"best": value}, is_best=True)
            self.is_best = False
        return is_best

    # --- lines of metrics ---

    def schedule_log_line(self) -> None:
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
        self._due_lines.append(_DueLine(self.locate_line(), measured, round(time.time(), 3)))

    def write_due_lines(self) -> None:
        """Write the lines that are due; those of several ranks only now and then."""
        if not self._due_lines:
            return
        waited_s = self.agreement.clock_s - self._lines_written_s
        if self.group.world.size == 1 or waited_s >= _LINES_INTERVAL_S:
            self._write_lines()

    def _write_lines(self, to_all: bool = False) -> list[RankSums]:
        """Write all lines that are due; return on rank 0, or on all ranks, what each rank has
        logged since. A collective."""
        if self.flush_metrics is not None:
            self.flush_metrics()
        gathered = self.metrics.gather(self.group, to_all)
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
        self._due_lines.append(_DueLine(self.locate_line(), {}, round(time.time(), 3)))
        self._write_lines()

    # --- evaluations and snapshots ---

    def evaluate(self) -> bool:
        """Evaluate what an experiment with a step of its own is to be evaluated by, if anything; a
        user's loop evaluates by itself."""
        if self._due_lines and self.evaluations.evaluator is not None:
            self._write_lines()
        return super().evaluate()

    def collect_parts(self) -> dict[str, Any]:
        """Return the state of all parts, which rank 0 writes."""
        self.parts.require_savable(self.step)
        return self._collect_parts()

    def collect_copy(self) -> dict[str, Any]:
        """Return the state of all parts, which every rank keeps."""
        return self._collect_parts(to_all=True)

    def _collect_parts(self, to_all: bool = False) -> dict[str, Any]:
        """Return the state of all parts, on rank 0 or on all ranks. A collective: what every rank
        has of its own comes together."""
        rng_rows = self.group.gather(pack_rng_state(self.device), to_all)
        self._saved_metrics = self._write_lines(to_all)
        stream_state = collect_stream_state(self.source, self.samples, self.group, to_all)
        if not rng_rows:
            return {}
        return (
            self.parts.collect_state() | stream_state | {RNG_PART: {"ranks": torch.stack(rng_rows)}}
        )

    def describe_state(self) -> dict[str, Any]:
        """Return what a snapshot of a session says of its parts."""
        evaluations = self.evaluations
        return {
            "metrics": self._saved_metrics,
            "parts": self.parts.names,
            "optimizer_settings": self.parts.optimizer_settings,
            "changed_parameters": self.parts.find_changed_parameters(),
            "is_finished": self.is_finished and self.step < self.total_steps,
            **({} if evaluations.evaluator is None else evaluations.describe(self.best_value)),
        }

    # --- the end, as the worker asks for it ---

    def finish(self, what_ended: str) -> None:
        """End a session whose function has returned, or whose block was left, perhaps from within
        its loop: then it is finished, and the iteration counts if it made a step."""
        if self.interruption is not None:  # which the function has caught
            raise self.interruption
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
        if self.parts.optimizer is not None and self.step > self.resumed_step:
            self._require_step()
        if self._is_in_iteration:
            self._leave_loop()
        if self._is_in_iteration and self.agreement.has_step:
            self._is_left = True
            self.end_step(self._count_batch())
        self.is_finished = True
        if self.step > self.resumed_step:  # otherwise they stand there already
            self._write_last_numbers()
        self.save()

    def _require_step(self) -> None:
        if not self.has_stepped:
            made = format_count(self.step - self.resumed_step, "iteration")
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

    def __init__(self, engine: SessionEngine, iterations: Iterator[Any]) -> None:
        self._engine, self._iterations = engine, iterations
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
        except BaseException as error:
            self._engine.leave_lost_round(error)
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
