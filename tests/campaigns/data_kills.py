"""Kill trainings over every kind of data, and resume them at other sizes; the order stays.

    python tests/campaigns/data_kills.py --kills 200 --seed 0 --json OUT
    python tests/campaigns/data_kills.py --kills 3 --kind tar --kind stream

Tars, Parquet, lines of JSON, arrays, tokens, pictures, streams with and without a state, a mixture
and a batch sampler: each is trained once undisturbed on one process. Then runs of it are killed by
SIGKILL at random instants (all ranks, one of them, or a loader process; also while they start) and
go on with 1 to 5 ranks and 0 to 3 loader processes each, until they end. Held against the
undisturbed run:

* what every rank was given at every step of every life: its share of the same global batch;
* no step left out, no line of the losses lost or twice, the losses equal to rounding;
* every sample exactly once in an epoch, or in a pass over its source or shard.

Whatever is counted under ``bad`` makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import report
from data_experiments import KINDS, MIXED_OFFSET, SAMPLES, train_on_data, write_data
from random_configs import measure_difference
from worlds import Trained, configured, losses, members, steps_logged, train_config

from echelon.data.sample_order import cut_share
from echelon.snapshot.reader import find_newest
from echelon.utils.processes import die_with_parent

STEPS, BATCH_SIZE = 20, 7
MAX_WORLD_SIZE, MAX_WORKERS = 5, 3
KILLS_OF_RUN = 5
TOLERANCE = 1e-5
"""Ranks add the parts of a sum in another order than one process does."""
STARTING = 0.25
"""So often a kill comes while the world starts, and not after some steps."""
STARTING_S, STEP_S = 1.5, 0.05
"""A kill comes within so many seconds of the start, or of a step."""
_POLL_S = 0.001
Steps = dict[int, list[int]]
"""The samples of every step."""


class Life(NamedTuple):
    """One start of a run, and how it ends."""

    world_size: int
    workers: int
    victim: str = ""
    """``all``, ``rank`` or ``loader``; nothing happens without one."""
    after_batches: int = 0
    """The kill comes after so many batches of a rank, and this long after them."""
    delay_s: float = 0.0

    def __str__(self) -> str:
        size = f"{self.world_size}×{self.workers}"
        if not self.victim:
            return size
        return f"{size} ({self.victim} at {self.after_batches} + {self.delay_s:.3f} s)"


def draw_life(rng: random.Random) -> Life:
    world_size, workers = rng.randint(1, MAX_WORLD_SIZE), rng.randint(0, MAX_WORKERS)
    victim = rng.choice(("all", "rank", "loader") if workers else ("all", "rank"))
    if rng.random() < STARTING:
        return Life(world_size, workers, victim, 0, rng.uniform(0, STARTING_S))
    return Life(world_size, workers, victim, rng.randint(1, 8), rng.uniform(0, STEP_S))


def kill(pids: Sequence[int], life: Life, traces: Path, rng: random.Random) -> None:
    """Wait for the moment, and kill; a world that ends before is left alone."""
    while _count_batches(traces) < life.after_batches:
        if not all(_is_running(pid) for pid in pids):
            return
        time.sleep(_POLL_S)
    time.sleep(life.delay_s)
    victims = list(pids) if life.victim == "all" else [rng.choice(pids)]
    if life.victim == "loader":
        # A world that is starting has none yet.
        victims = [rng.choice(sorted(set(members(pids)) - set(pids)) or list(pids))]
    for pid in victims:
        if _is_running(pid):
            os.kill(pid, signal.SIGKILL)


def _count_batches(traces: Path) -> int:
    return max((file.read_bytes().count(b"\n") for file in traces.iterdir()), default=0)


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@dataclass
class Judge:
    """Counts what was done, and what was wrong."""

    done: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    largest_difference: float = 0.0

    def expect(self, holds: bool, what: str, about: object) -> None:
        """Count a promise that does not hold, and say of which run."""
        self.bad[what] += not holds
        if not holds:
            print(f"{what}: {about}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Campaign:
    """All runs of it, in one folder."""

    folder: Path
    rng: random.Random
    judge: Judge = field(default_factory=Judge)

    def live(self, kind: str, name: str, number: int, life: Life) -> tuple[Trained, Path]:
        """Start a run once, and return how it ended and where its batches are traced."""
        traces = self.folder / f"trace-{name}-{number}"
        traces.mkdir()
        words = (
            f"kind={kind}",
            f"folder={self.folder / 'data'}",
            f"run.name={name}",
            f"trainer.steps={STEPS}",
            f"trainer.batch_size={BATCH_SIZE}",
            f"trainer.loader_workers={life.workers}",
            "trainer.save.steps=1",
        )
        interrupt: Callable[[Sequence[int]], None] | None = None
        if life.victim:
            interrupt = partial(kill, life=life, traces=traces, rng=self.rng)
        trained = train_config(
            self.folder,
            life.world_size,
            configured(self.folder, words, train_on_data),
            env={"ECHELON_TEST_TRACE": str(traces)},
            end_together=bool(life.victim),
            interrupt=interrupt,
        )
        _, damaged = find_newest(trained.run.snapshots_folder)
        self.judge.expect(not damaged, "damaged snapshots", (kind, life, damaged))
        self.judge.done["lives"] += 1
        return trained, traces

    def train_undisturbed(self, kind: str) -> tuple[Steps, list[float]]:
        """Return the samples and the losses of every step."""
        trained, traces = self.live(kind, f"{kind}-whole", 0, Life(1, 0))
        self.judge.expect(trained.codes == [0], "wrong exits", (kind, trained.said))
        steps = {line["batch"]: line["samples"] for line in read_traces(traces)}
        self.judge.expect([*steps] == [*range(1, STEPS + 1)], "steps left out", kind)
        drawn = [number for step in sorted(steps) for number in steps[step]]
        self.judge.expect(has_all_once(kind, drawn), "not exactly once", (kind, drawn))
        return steps, losses(trained.run)

    def kill_and_resume(
        self, kind: str, name: str, kills: int, whole: tuple[Steps, list[float]]
    ) -> str:
        """Kill a run so many times or until it ends, and hold it against the undisturbed one."""
        steps, curve = whole
        lives: list[Life] = []
        complete: set[int] = set()
        is_ended = False
        while not is_ended:
            life = draw_life(self.rng)
            if kills == 0:
                life = Life(life.world_size, life.workers)
            trained, traces = self.live(kind, name, len(lives), life)
            lives.append(life)
            about = (kind, name, [*map(str, lives)])
            complete |= self.compare_shares(traces, steps, about)
            is_ended = set(trained.codes) == {0}
            if not life.victim:
                said = [rank.output[-2000:] for rank in trained.ranks]
                self.judge.expect(is_ended, "wrong exits", (about, trained.codes, said))
                break
            if not is_ended:
                kills -= 1
                self.judge.done["kills"] += 1
                self.judge.done[f"kills of {kind}"] += 1
                self.judge.done[f"kills of {life.victim}"] += 1
        missing = sorted(steps.keys() - complete)
        self.judge.expect(not missing, "steps left out", (about, missing))
        self.judge.expect(
            steps_logged(trained.run) == [*range(1, STEPS + 1)], "losses lost or twice", about
        )
        difference = measure_difference(losses(trained.run), curve)
        self.judge.largest_difference = max(self.judge.largest_difference, difference)
        self.judge.expect(difference <= TOLERANCE, "different losses", (about, difference))
        self.judge.done["runs"] += 1
        return f"{kind}: {' → '.join(map(str, lives))}; differs by {difference:.2g}"

    def compare_shares(self, traces: Path, steps: Steps, about: object) -> set[int]:
        """Hold what each rank was given in a life against its share of the undisturbed batch, and
        return the steps of which all samples were given."""
        given: Counter[int] = Counter()
        for line in read_traces(traces):
            step, found = line["batch"], line["samples"]
            batch = steps.get(step, [])
            share = cut_share(len(batch), line["rank"], line["world_size"])
            expected = batch[share.start : share.stop]
            self.judge.expect(
                found == expected, "other samples", (about, step, line["rank"], found, expected)
            )
            given[step] += len(found)
            self.judge.done["shares compared"] += 1
        return {step for step, count in given.items() if count == len(steps.get(step, []))}


def read_traces(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks of a life were given, by step; a kill may have cut the last line."""
    texts = [file.read_text() for file in folder.iterdir()]
    lines = [json.loads(line) for text in texts for line in text.split("\n")[:-1]]
    return sorted(lines, key=lambda line: (line["batch"], line["rank"]))


def has_all_once(kind: str, drawn: Sequence[int]) -> bool:
    """Return whether every sample came exactly once in every epoch or pass that was ended, and at
    most once in the last."""
    if kind == "mixture":
        sources = [[n for n in drawn if (n >= MIXED_OFFSET) == is_second] for is_second in (0, 1)]
        passes = [
            [number % MIXED_OFFSET for number in of[first : first + SAMPLES]]
            for of in sources
            for first in range(0, len(of), SAMPLES)
        ]
    elif kind.endswith("stream"):
        # 1000 × shard + 100 × pass + number; shard s has 7 + s samples.
        for shard in range(3):
            own = [number % 1000 for number in drawn if number // 1000 == shard]
            expected = [100 * (at // (7 + shard)) + at % (7 + shard) for at in range(len(own))]
            if own != expected or not own:
                return False
        return True
    else:
        passes = [[*drawn[first : first + SAMPLES]] for first in range(0, len(drawn), SAMPLES)]
    whole = [sorted(of) == [*range(SAMPLES)] for of in passes if len(of) == SAMPLES]
    return bool(whole) and all(whole) and all(len(set(of)) == len(of) for of in passes)


def run_campaign(
    folder: Path, kinds: Sequence[str], kills: int, seed: int, limit_s: float = math.inf
) -> dict[str, Any]:
    """Kill so many times, or until no more runs are begun after so long."""
    deadline = time.monotonic() + limit_s
    campaign = Campaign(folder, random.Random(seed))
    judge, lines = campaign.judge, []
    folder.mkdir(exist_ok=True)
    write_data(folder / "data")
    whole = {kind: campaign.train_undisturbed(kind) for kind in kinds}
    number = 0
    while judge.done["kills"] < kills and time.monotonic() < deadline:
        kind = kinds[number % len(kinds)]
        left = min(KILLS_OF_RUN, kills - judge.done["kills"])
        try:
            lines.append(campaign.kill_and_resume(kind, f"run-{number}", left, whole[kind]))
            print(lines[-1], flush=True)
        except AssertionError as error:  # a world that hangs, or a process that is left
            judge.expect(False, "hangs", (kind, error))
            break
        for old in folder.glob(f"*run-{number}*"):
            shutil.rmtree(old)
        number += 1
    return {
        "done": dict(sorted(judge.done.items())),
        "largest_difference": judge.largest_difference,
        "tolerance": TOLERANCE,
        "bad": dict(sorted(judge.bad.items())),
        "tried": lines,
    }


def merge_results(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what several campaigns found as one."""
    done: Counter[str] = sum((Counter(part["done"]) for part in parts), Counter())
    bad: Counter[str] = sum((Counter(part["bad"]) for part in parts), Counter())
    return {
        "kills": done["kills"],
        "done": dict(sorted(done.items())),
        "largest_difference": max(part["largest_difference"] for part in parts),
        "tolerance": TOLERANCE,
        "bad": dict.fromkeys(parts[0]["bad"], 0) | bad,
        "tried": [line for part in parts for line in part["tried"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kind", action="append", choices=KINDS, help="this one; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", type=int, default=3, help="campaigns beside each other")
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="begin no run later than this"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="echelon-data-kills-"))
    kinds = given.kind or KINDS
    # A world waits as much as it computes, so several of them share the cores well.
    shares = [len(range(part, given.kills, given.beside)) for part in range(given.beside)]
    try:
        with ProcessPoolExecutor(
            given.beside, get_context("spawn"), die_with_parent, (os.getpid(),)
        ) as processes:
            tasks = [
                processes.submit(
                    run_campaign,
                    folder / str(part),
                    # Each begins with other kinds, so that all come equally often.
                    [*kinds[3 * part :], *kinds[: 3 * part]],
                    kills,
                    given.seed + part,
                    given.limit_s,
                )
                for part, kills in enumerate(shares)
            ]
            result = merge_results([task.result() for task in tasks])
    finally:
        shutil.rmtree(folder)
    print(*(f"{name:20} {result[name]}" for name in result if name != "tried"), sep="\n")
    if given.json:
        report.write(given.json, result)
    return 1 if sum(result["bad"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
