"""What the folder of a run says at one moment, as far as news is made of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from echelon.config.schema import Config
from echelon.runs.heartbeat import read_progress
from echelon.runs.history import RunHistory, read_history
from echelon.runs.metric_direction import guess_best_is
from echelon.runs.metrics_summary import MetricsSummary, read_summary
from echelon.runs.run_folder import Run
from echelon.runs.status import FolderFacts


@dataclass(frozen=True)
class RunView:
    """One reading. Damaged files leave gaps, as everywhere in `runs`."""

    run: Run
    config: Config
    facts: FolderFacts
    history: RunHistory
    summary: MetricsSummary
    beats: int
    """Of all ranks of this node; they grow while anything goes on."""
    beat_step: int
    now: float

    @classmethod
    def read(cls, run: Run, config: Config, node: int = 0) -> RunView:
        """Read the small files of the run and the new lines of its metrics."""
        facts, history, summary = (
            FolderFacts.read(run),
            read_history(run, is_running=True),
            read_summary(run),
        )
        step, beats = read_progress(run.get_heartbeat_file(node))
        return cls(run, config, facts, history, summary, beats, step, time.time())

    @property
    def step(self) -> int | None:
        """The newest step that is known; None before the first, and for a program."""
        steps = [self.beat_step, self.facts.step or 0, int(self.summary.last_step or 0)]
        return max(steps) or None

    @property
    def best_is(self) -> str:
        """Whether the best value is the `min` or the `max`."""
        chosen = (self.config.trainer.best_is, self.facts.status.get("best_is"))
        known = (value for value in chosen if value in ("min", "max"))
        return str(next(known, None) or guess_best_is(self.config.trainer.best) or "min")

    def find_best(self) -> tuple[str, float, int] | None:
        """Return name, best value and its step of the metric that `trainer.best` names; None until
        it was evaluated."""
        name = self.config.trainer.best
        known = self.summary.metrics.get(f"eval_{name}")
        if known is None:
            return None
        value = known.get_best(self.best_is)
        step = known.max_step if self.best_is == "max" else known.min_step
        return name, value, int(step)

    def find_number(self) -> tuple[str, float] | None:
        """Return the one number that says how the run is: its best metric, else its loss."""
        if (best := self.find_best()) is not None:
            return f"best {best[0]}", best[1]
        loss = self.summary.metrics.get("loss")
        return None if loss is None else ("loss", loss.last)

    @property
    def failure(self) -> dict[str, Any]:
        """The one root cause, as the run wrote it; empty if it has not failed."""
        return self.facts.failure
