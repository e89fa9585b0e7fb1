"""The training loop, and what it calls between two steps."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from echelon.config.schema import Config, Every
from echelon.data.batches import Batch, Cut, Source
from echelon.data.order import EpochOrder, batches_per_epoch
from echelon.errors import EchelonError, Exit, Fault
from echelon.pulse import Pulse
from echelon.runs import Run
from echelon.track.lines import Line, Tracker, better
from echelon.track.screen import Screen
from echelon.train.checks import no_such_best
from echelon.train.evaluate import Evaluator
from echelon.train.experiment import Experiment
from echelon.train.group import Group, PeerFailed
from echelon.train.looks import Looks
from echelon.train.optimizers import Ways
from echelon.train.profile import Profile
from echelon.train.replica import Replica, Wishes
from echelon.train.schedule import Schedule
from echelon.train.speed import Speed
from echelon.train.state import collect
from echelon.train.stop import Stop
from echelon.train.writer import Saved, Writer

if TYPE_CHECKING:
    from echelon.train.sharded import ShardedReplica
    from echelon.train.shards import ShardedWriter

_WAIT_FOR_WORD_S = 30.0


def train(t: Training) -> Exit:
    """Step, log, evaluate, save, stop check: in this order."""
    while t.step < t.total_steps:
        for batch, total in t.rest_of_epoch():
            t.schedule.apply(t.step)
            t.replica.step(batch, total, t.wishes())
            t.advance(total)
            if t.due_log():
                t.log()
            if not t.time_to_look():
                continue
            wishes = t.look()
            if t.due(t.config.trainer.evaluate) or wishes.evaluate:
                t.evaluate()
            if t.due(t.config.trainer.save) or wishes.save or wishes.stop or t.best_is_new:
                t.save()
            if wishes.stop:
                return Exit.PREEMPTED
            if t.step == t.total_steps:
                break
    t.evaluate()
    t.save()
    return Exit.OK


@dataclass
class Training:
    """A run in progress on one rank. Only rank 0 has trackers and a screen that shows; a writer
    is rank 0's too, unless the model is sharded."""

    config: Config
    run: Run
    group: Group
    experiment: Experiment
    source: Source
    evaluator: Evaluator | None
    stop: Stop
    pulse: Pulse
    device: torch.device
    ways: Ways
    schedule: Schedule = field(init=False)
    replica: Replica | ShardedReplica = field(init=False)
    speed: Speed = field(init=False)
    profile: Profile | None = None
    trackers: tuple[Tracker, ...] = ()
    screen: Screen = field(default_factory=Screen)
    writer: Writer | ShardedWriter | None = None
    collect: Callable[[Experiment, Ways, Group], dict[str, Any]] = collect

    step: int = 0
    samples: int = 0
    """Global samples consumed since the beginning: the one number that says where a run is."""
    best: float | None = None
    best_is_new: bool = False
    last_saved: str | None = None
    saved_step: int | None = None
    unsaved: str | None = None
    """Why the last state of the run is on no disk."""

    looks: Looks = field(default_factory=Looks)
    _losses: list[float] = field(default_factory=list)
    _marked: deque[Line] = field(default_factory=deque)
    _evaluated_step: int | None = None
    _results: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trainer = self.config.trainer
        self.size = len(self.source)
        self.steps_per_epoch = batches_per_epoch(self.size, trainer.batch_size)
        self.total_steps = self._steps_in_all()
        self.speed = Speed([self.device])
        self._minutes = dict.fromkeys(("save", "evaluate"), time.monotonic())

    def take_up(self, info: dict[str, Any]) -> None:
        """Be where the snapshot was that holds this `info`."""
        self.step = self.saved_step = info["step"]
        self.samples, self.best, self.last_saved = info["samples"], info["best"], info["folder"]
        self._losses, self._results = info["losses"], info["results"]
        self._evaluated_step = info["evaluated_step"]
        batch_size = self.config.trainer.batch_size
        if self.samples % self.size % batch_size:
            raise EchelonError(
                Fault(
                    f"trainer.batch_size={batch_size}, but {self.last_saved} stands after "
                    f"{self.samples % self.size} of {self.size} samples of an epoch",
                    "keep the batch size, or take a snapshot of the end of an epoch",
                )
            )
        self.total_steps = self.schedule.total = self._steps_in_all()

    def _steps_in_all(self) -> int:
        """Those made, perhaps with batches of another size, and what is left of the epochs."""
        trainer = self.config.trainer
        if trainer.steps is not None:
            return trainer.steps
        epoch, offset = divmod(self.samples, self.size)
        left = ((trainer.epochs or 0) - epoch) * self.steps_per_epoch
        return self.step + max(0, left - offset // trainer.batch_size)

    # --- moving on ---

    def rest_of_epoch(self) -> Iterator[tuple[Batch | Cut, int]]:
        """This rank's shares from where the run is to the end of the epoch, with global sizes."""
        epoch, offset = divmod(self.samples, self.size)
        size, world = self.config.trainer.batch_size, self.group.world
        order = EpochOrder(
            self.size,
            size,
            world.rank,
            world.size,
            self.config.seed,
            epoch,
            device=self.source.home,
        )
        first = offset // size
        left = self.size - offset
        batches = self.source.batches(order, first, self.device)
        for batch in self.speed.feed(batches, self.replica):
            total = min(size, left)
            left -= total
            yield batch, total

    def advance(self, total: int) -> None:
        self.step += 1
        self.samples += total
        self.pulse.step = self.step
        self.pulse.beat()
        if self.profile is not None:
            self.speed.leave_out(self.profile.advance(self.step))

    def wishes(self) -> Wishes:
        """Clocks differ between ranks, so rank 0's counts; a signal may reach any rank."""
        stop, look = self.stop.requested, self.looks.slow
        if self._no_minutes or self.group.world.rank != 0:
            return Wishes(stop, look=look) if stop or look else _NOTHING
        trainer = self.config.trainer
        save = self._late("save", trainer.save)
        return Wishes(stop, save, self._late("evaluate", trainer.evaluate), look)

    @property
    def _no_minutes(self) -> bool:
        return (
            self.config.trainer.save.minutes is None
            and self.config.trainer.evaluate.minutes is None
        )

    def _late(self, what: str, every: Every) -> bool:
        if every.minutes is None or time.monotonic() < self._minutes[what] + 60 * every.minutes:
            return False
        self._minutes[what] = time.monotonic()
        return True

    # --- looking ---

    @property
    def epoch(self) -> int:
        """The pass over the data that the last step belongs to, from 1."""
        return -(-self.samples // self.size)

    def time_to_look(self) -> bool:
        """Every step on a CPU; rarely on a GPU whose steps are quick, and whenever something is due
        by its step."""
        every = self.replica.read_every
        return every == 1 or self.looks.due(self.step, every) or self._something_due()

    def _something_due(self) -> bool:
        trainer = self.config.trainer
        alone_and_stopped = self.stop.requested and self.group.world.size == 1
        return alone_and_stopped or self.due(trainer.evaluate) or self.due(trainer.save)

    def due(self, every: Every) -> bool:
        """All is due at the end, in the loop's order, so that the last snapshot can be the best."""
        if self.step == self.total_steps:
            return True
        if every.steps is not None and self.step % every.steps == 0:
            return True
        return every.epochs is not None and self.samples % (every.epochs * self.size) == 0

    def due_log(self) -> bool:
        return self.step % self.config.trainer.log_steps == 0 or self.step == self.total_steps

    def look(self) -> Wishes:
        """Read what all ranks know of the steps since the last look, and log what is marked."""
        told = self.replica.told()
        # A GPU has caught up with the host only here: between two looks a clock says nothing.
        speed = self.speed.line(self.step, self.samples) if self._marked else {}
        for step, (_, loss) in enumerate(told, self.step - len(told) + 1):
            if not math.isfinite(loss):
                raise self._not_finite(loss, step)
            self._losses.append(loss)
            if self._marked and self._marked[0]["step"] == step:
                self._write(self._marked.popleft() | speed)
        wishes = told[-1].wishes if len(told) == 1 else _any(told)
        if self.replica.read_every > 1:
            self.looks.looked(self.step, wishes)
        return wishes

    def _not_finite(self, loss: float, step: int) -> Exception:
        """Rank 0 knows what was saved, so it speaks for all."""
        if self.group.world.rank != 0 and (told := self.group.first_failure(_WAIT_FOR_WORD_S)):
            return PeerFailed(told)
        self._report_saved(self.writer.wait() if self.writer else [])
        stands = f"the last snapshot is {self.last_saved}" if self.last_saved else "none was saved"
        return EchelonError(
            Fault(
                f"the loss is {loss} at step {step}; {stands}",
                "lower the learning rate, or clip gradients with trainer.clip=1.0",
            ),
            exit=Exit.FAILED,
        )

    # --- between steps ---

    def log(self) -> None:
        """A line of metrics is due for this step; its loss and speed come with the next look."""
        line = {
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "loss": math.nan,
            "lr": self.schedule.rate,
            "time": round(time.time(), 3),
        }
        self._marked.append(line)

    def _write(self, line: Line) -> None:
        losses, self._losses = self._losses, []
        if not self.trackers:
            return
        line["loss"] = sum(losses) / len(losses)
        self._track(line)
        self.screen.progress(line)
        self._report_saved(self.writer.finished() if self.writer else [])

    def evaluate(self) -> None:
        if self.evaluator is None or self._evaluated_step == self.step:
            return
        self._evaluated_step = self.step
        self.pulse.rest()
        results = self.evaluator()
        self._results = results
        self._compare(results)
        if self.trackers:
            numbers = {f"eval_{k}": v for k, v in results.items()}
            self._track({"step": self.step, "epoch": self.epoch, **numbers})
            shown = "  ".join(f"{k} {v:.5g}" for k, v in results.items())
            print(f"evaluated after step {self.step}: {shown}", file=sys.stderr)
        self.pulse.beat()
        self.speed.restart(self.step, self.samples)

    def _track(self, line: Line) -> None:
        for tracker in self.trackers:
            tracker.log(line)

    def _compare(self, results: dict[str, float]) -> None:
        name = self.config.trainer.best
        if name not in results:
            raise no_such_best(name, results)
        if better(results[name], self.best, self.config.trainer.best_is):
            self.best, self.best_is_new = results[name], True

    def save(self) -> None:
        if self.step in (0, self.saved_step):
            return
        self.saved_step = self.step
        self.pulse.rest()  # an earlier save may still be on its way to a slow disk
        parts = self.collect(self.experiment, self.ways, self.group)
        if self.writer is not None:
            self.writer.save(self.step, parts, self._info(), best=self.best_is_new)
        self.best_is_new = False
        self.pulse.beat()

    def _info(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples": self.samples,
            "best": self.best,
            "results": self._results,
            "evaluated_step": self._evaluated_step,
            "losses": self._losses,  # since the last line of metrics
            "config": self.config.numbers(),
            "fingerprint": self.config.fingerprint(),
            "world_size": self.group.world.size,
            "wandb_run_id": self.run.wandb_id(),
        }

    def _report_saved(self, results: list[Saved]) -> None:
        for saved in results:
            if saved.folder is not None:
                self.last_saved = str(saved.folder)
                self.run.update_status(step=self.step, snapshot=str(saved.folder))
            if saved.error is not None:
                what = saved.error if saved.folder else f"not saved: {saved.error}"
                print(f"warning: {what}", file=sys.stderr)

    def close(self) -> None:
        """Wait for the last snapshot to be on disk."""
        self.pulse.rest()
        results = self.writer.close() if self.writer is not None else []
        if results and results[-1].step == self.step and results[-1].folder is None:
            self.unsaved = results.pop().error
        self._report_saved(results)
        self.screen.close()

    def close_trackers(self, outcome: Exit) -> dict[str, str]:
        """After all else, as a server may take its time; once, whatever happened."""
        self.pulse.rest()
        closing, self.trackers = self.trackers, ()
        return {title: text for t in closing for title, text in t.close(outcome).items()}


_NOTHING = Wishes()


def _any(told: list[Any]) -> Wishes:
    return Wishes(*(any(column) for column in zip(*(t.wishes for t in told), strict=True)))
