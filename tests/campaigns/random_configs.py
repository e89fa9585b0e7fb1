"""Train random configurations at 1 to 4 processes, kill and resume them; the numbers stay.

    python tests/campaigns/random_configs.py --configs 28 --seed 0 --json OUT
    python tests/campaigns/random_configs.py --only 7 --seed 0      # one of them again

Model, data, batch, optimizer, schedule, precision, evaluation and strategy (ddp, fsdp, stages) are
drawn by a generator that is seeded with the campaign's seed and the configuration's number. Each
configuration is trained

* whole, at one process and at every other number: equal within `TOLERANCES`;
* interrupted at one number of processes: kills after a step, kills while a snapshot is written,
  requests to stop; bit for bit as if it had never been interrupted;
* interrupted in the same ways, with another number of processes in every life: equal within the
  tolerance, with every step made and logged once.

After every life, no snapshot may be damaged. Whatever is counted under ``bad`` makes the exit code
1. A difference is relative to the value, or to a hundredth of the largest one of that curve.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import report
from random_experiments import kill_while_saving, random_experiment
from worlds import (
    Trained,
    configured,
    differing,
    losses,
    metrics,
    snapshot_steps,
    state_at,
    steps_logged,
    train_config,
)

from echelon.config.schema import Config
from echelon.snapshot.reader import find_newest

WORLDS = (1, 2, 3, 4)
TOLERANCES = {"float32": 1e-5, "bf16": 0.05}
"""In bf16 every rank rounds its part of a sum to three digits before the parts are added."""
STRATEGIES = {
    "ddp": (),
    "fsdp": ("replica.kind=fsdp",),
    "stages": ("replica.devices=2",),
}
_PREEMPTED = 75
_MAX_OPERATION = 40
"""Of the writer of snapshots; a save has about 20."""
Count = Counter[str]


@dataclass(frozen=True)
class Drawn:
    """A random configuration."""

    number: int
    strategy: str
    precision: str
    steps: int
    words: tuple[str, ...]
    """Without those of the strategy."""

    def __str__(self) -> str:
        return f"{self.number}: {self.strategy} {' '.join(self.words)}"

    def configure(self, folder: Path, name: str, world_size: int) -> Config:
        """Return the configuration of a run. One process has nobody to share a model with."""
        strategy = "ddp" if self.strategy == "fsdp" and world_size == 1 else self.strategy
        words = (f"run.name={name}", *self.words, *STRATEGIES[strategy])
        return configured(folder, words, random_experiment)


def draw(number: int, seed: int) -> tuple[Drawn, random.Random]:
    """Return a configuration, and the generator that goes on to draw what happens to its runs."""
    rng = random.Random(f"{seed}-{number}")
    kind = rng.choice(("dense", "dense", "buffers", "tables"))
    strategy = rng.choice(("ddp", "stages") if kind == "tables" else ("ddp", "fsdp", "stages"))
    precision = "float32" if kind == "tables" else rng.choice(("float32",) * 3 + ("bf16",))
    steps = rng.randint(6, 14)
    settings: dict[str, Any] = {
        "kind": kind,
        "samples": rng.choice((rng.randint(1, 8), rng.randint(9, 60))),
        "width": rng.choice((4, 7, 16)),
        "depth": rng.randint(1, 4),
        "activation": rng.choice(("Tanh", "GELU", "ReLU")),
        "has_norms": rng.random() < 0.3,
        "lr": rng.choice((0.003, 0.01, 0.03)),
        "seed": rng.randint(0, 999),
        "trainer.steps": steps,
        "trainer.batch_size": rng.randint(max(WORLDS), 24),
        "trainer.accumulate": rng.choice((1, 1, 2, 3)),
        "trainer.clip": rng.choice(("null", "null", 0.5, 2.0)),
        "trainer.precision": precision,
        "trainer.save.steps": rng.randint(1, 4),
        "trainer.keep_last": rng.randint(1, 3),
        "replica.checkpoint": strategy != "stages" and rng.random() < 0.25,
    }
    settings |= _draw_optimizer(kind, rng) | _draw_schedule(steps, rng) | _draw_evaluation(rng)
    words = [f"{key}={value}" for key, value in settings.items()]
    return Drawn(number, strategy, precision, steps, tuple(words)), rng


def _draw_optimizer(kind: str, rng: random.Random) -> dict[str, Any]:
    if kind == "tables":
        return {"optimizer": rng.choice(("sgd", "row_sgd", "row_adam"))}
    decay = rng.choice((0.0, 0.0, 0.01))
    return {
        "optimizer": rng.choice(("sgd", "momentum", "adam", "adamw")),
        "weight_decay": decay,
    }


def _draw_schedule(steps: int, rng: random.Random) -> dict[str, Any]:
    """The trainer's, the experiment's own, or none."""
    if rng.random() < 0.3:
        return {"gamma": 0.7}
    return {
        "trainer.schedule": rng.choice(("constant", "linear", "cosine")),
        "trainer.warmup_steps": rng.randint(0, steps // 2),
    }


def _draw_evaluation(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {}
    return {
        "eval_samples": rng.randint(1, 20),
        "trainer.eval_batch_size": rng.randint(1, 9),
        "trainer.evaluate.steps": rng.randint(1, 5),
    }


# What happens to a run ---------------------------------------------------------------------------


class Life(NamedTuple):
    """One start of a run: at how many processes, and how it ends."""

    world_size: int
    end: str = "finished"
    """``killed``, ``killed while saving``, ``stopped`` or ``finished``."""
    rank: int = 0
    """To which it happens."""
    moment: int = 0
    """The step after which, or the operation of the writer at which it happens."""

    def __str__(self) -> str:
        where = f" (rank {self.rank}, {self.moment})" if self.moment else ""
        return f"{self.world_size}: {self.end}{where}"

    @property
    def expected_codes(self) -> set[int]:
        """Of the rank to which it happens; 0: the run had ended before."""
        ends = {"killed": -signal.SIGKILL, "stopped": _PREEMPTED}
        return {0, ends.get(self.end.partition(" ")[0], 0)}


def draw_lives(drawn: Drawn, sizes: Sequence[int], rng: random.Random) -> list[Life]:
    """Return the lives of an interrupted run, the last of which nothing happens to."""
    lives = []
    for _ in range(rng.randint(2, 3)):
        size = rng.choice(sizes)
        end = rng.choice(("killed", "killed while saving", "killed while saving", "stopped"))
        # With ddp only rank 0 writes; of shards every rank writes its own.
        writes_alone = drawn.strategy != "fsdp" and end == "killed while saving"
        rank = 0 if writes_alone else rng.randrange(size)
        last = _MAX_OPERATION if end == "killed while saving" else max(1, drawn.steps // 2)
        lives.append(Life(size, end, rank, rng.randint(1, last)))
    return [*lives, Life(rng.choice(sizes))]


@dataclass
class Judge:
    """Counts what was done, and what was wrong."""

    done: Count = field(default_factory=Count)
    bad: Count = field(default_factory=Count)
    largest_difference: dict[str, float] = field(default_factory=dict)

    def expect(self, holds: bool, what: str, about: object) -> None:
        """Count a promise that does not hold, and say of which run."""
        self.bad[what] += not holds
        if not holds:
            print(f"{what}: {about}", file=sys.stderr, flush=True)

    def note_difference(self, drawn: Drawn, difference: float) -> None:
        before = self.largest_difference.get(drawn.precision, 0.0)
        self.largest_difference[drawn.precision] = max(before, difference)


def live(drawn: Drawn, folder: Path, name: str, life: Life, judge: Judge) -> Trained:
    """Start a run once, let happen what is to happen, and look at its snapshots."""
    env: Mapping[str, str] = {}
    prepare: Callable[[int], None] | None = None
    if life.end == "killed while saving":
        prepare = partial(kill_while_saving, victim=life.rank, operation=life.moment)
    elif life.moment:
        what = "KILL" if life.end == "killed" else "TERM"
        env = {"ECHELON_TEST_FAULT": f"{life.rank}:{life.moment}:{what}"}
    is_killed = life.end.startswith("killed")
    size = life.world_size
    config = drawn.configure(folder, name, size)
    trained = train_config(folder, size, config, env=env, end_together=is_killed, prepare=prepare)
    code = trained.codes[life.rank]
    judge.done["lives"] += 1
    judge.done[life.end if code else "finished"] += 1
    judge.expect(code in life.expected_codes, "wrong exits", (life, trained.codes, trained.said))
    if not is_killed:
        judge.expect(set(trained.codes) == {code}, "wrong exits", (life, trained.codes))
    _, damaged = find_newest(trained.run.snapshots_folder)
    judge.expect(not damaged, "damaged snapshots", (life, damaged))
    return trained


def live_on(drawn: Drawn, folder: Path, name: str, lives: Sequence[Life], judge: Judge) -> Trained:
    """All lives of a run; the next one comes only where the last did not finish."""
    judge.done["runs"] += 1
    for life in lives:
        trained = live(drawn, folder, name, life, judge)
        if set(trained.codes) == {0}:
            break
    return trained


# What is compared --------------------------------------------------------------------------------


def measure_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two curves; infinite for other lengths and NaN."""
    if len(found) != len(expected):
        return math.inf
    floor = 0.01 * max((abs(value) for value in expected), default=0.0)
    pairs = zip(found, expected, strict=True)
    differences = [abs(a - b) / max(abs(b), floor, 1e-12) for a, b in pairs]
    return max((math.inf if math.isnan(d) else d for d in differences), default=0.0)


def compare_curves(drawn: Drawn, trained: Trained, reference: Trained, judge: Judge) -> float:
    """Hold the losses, the evaluations and the steps of a run against the reference."""

    def evaluated(of: Trained) -> list[float]:
        return [line["eval_loss"] for line in metrics(of.run) if "eval_loss" in line]

    difference = max(
        measure_difference(losses(trained.run), losses(reference.run)),
        measure_difference(evaluated(trained), evaluated(reference)),
    )
    judge.note_difference(drawn, difference)
    about = f"{difference:.2g} in {trained.run.name} of {drawn}"
    judge.expect(difference <= TOLERANCES[drawn.precision], "different curves", about)
    every_step = [*range(1, drawn.steps + 1)]
    judge.expect(steps_logged(trained.run) == every_step, "steps lost or twice", about)
    return difference


def compare_bits(drawn: Drawn, resumed: Trained, whole: Trained, judge: Judge) -> None:
    """Hold every line and the last snapshot of a resumed run against one that was not."""
    step = drawn.steps
    is_same = metrics(resumed.run) == metrics(whole.run)
    for run in (resumed.run, whole.run):
        is_same = is_same and step in snapshot_steps(run)
    if is_same:
        is_same = not differing(state_at(resumed.run, step), state_at(whole.run, step))
    judge.expect(is_same, "inexact resumes", f"{resumed.run.name} of {drawn}")


def try_config(drawn: Drawn, rng: random.Random, folder: Path, judge: Judge) -> str:
    """Train one configuration in all ways, and return a line about it."""
    whole = {size: live_on(drawn, folder, f"whole-{size}", [Life(size)], judge) for size in WORLDS}
    reference = whole[1]
    if drawn.strategy == "stages":
        plain = replace(drawn, strategy="ddp")
        reference = live_on(plain, folder, "plain", [Life(1)], judge)
    differences = [compare_curves(drawn, of, reference, judge) for of in whole.values()]
    size = rng.choice(WORLDS)
    at_one_size, changing = (draw_lives(drawn, sizes, rng) for sizes in ([size], WORLDS))
    resumed = live_on(drawn, folder, "one-size", at_one_size, judge)
    compare_bits(drawn, resumed, whole[size], judge)
    resumed = live_on(drawn, folder, "changing", changing, judge)
    differences.append(compare_curves(drawn, resumed, reference, judge))
    lives = "; ".join(" → ".join(map(str, of)) for of in (at_one_size, changing))
    return f"{drawn}\n   differ by {max(differences):.2g}; lives at {lives}"


def run_campaign(numbers: Sequence[int], seed: int, folder: Path) -> tuple[Judge, list[str]]:
    judge, lines = Judge(), []
    for number in numbers:
        place = folder / str(number)
        try:
            lines.append(try_config(*draw(number, seed), place, judge))
        except AssertionError as error:  # a world that hangs, or a process that is left
            judge.expect(False, "hangs", f"{draw(number, seed)[0]}: {error}")
        else:
            print(lines[-1], flush=True)
        shutil.rmtree(place, ignore_errors=True)
    return judge, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=28)
    parser.add_argument("--only", type=int, action="append", help="this number; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="echelon-random-configs-"))
    try:
        numbers = given.only or range(given.configs)
        judge, lines = run_campaign(numbers, given.seed, folder)
    finally:
        shutil.rmtree(folder)
    result = {
        "configurations": len(numbers),
        "done": dict(sorted(judge.done.items())),
        "largest_difference": judge.largest_difference,
        "tolerances": TOLERANCES,
        "bad": dict(sorted(judge.bad.items())),
    }
    print(*(f"{name:20} {value}" for name, value in result.items()), sep="\n")
    if given.json:
        report.write(given.json, {**result, "tried": lines})
    return 1 if sum(judge.bad.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
