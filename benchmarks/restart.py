"""One of two workers is killed with SIGKILL: how long until all have made a new step?

    python benchmarks/restart.py [--rounds 7]

Echelon with launch.max_restarts=1 and a snapshot every 50 steps, against `torchrun
--max-restarts=1` with a script that saves every 50 steps with torch.save (to a file beside, then
renamed) and loads that when it starts. Both are the toy of scripts/. Rank 1 is killed after 120
steps; the clock stops when both ranks of the new attempt have made their first optimizer step.

With Echelon's defaults nothing is restarted: rank 0 goes on alone with its state, until rank 1 is
replaced. The first clock stops when rank 0 has made a step after it stood still, to ten steps; the
second when the replacement has made one.

torchrun is given TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it a restart can hang, as the ranks
of the new attempt meet the keys that the old ones left in the agent's store.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from common import (
    SCRIPTS,
    Result,
    compute_ratios,
    find_tool,
    make_figure,
    measure_in_turns,
    run_benchmark,
)
from startup import MANY_STEPS, Start, shorten_command

ROUNDS = 7
TARGET = 0.5
SAVE_EVERY, KILL_AFTER = 50, 120
OURS, TORCHRUN = "echelon train launch.max_restarts=1", "torchrun --max-restarts=1"
COMMANDS = {
    TORCHRUN: [
        *[find_tool("torchrun"), "--standalone", "--nproc_per_node=2", "--max-restarts=1"],
        *[str(SCRIPTS / "bare_loop.py"), f"--steps={MANY_STEPS}", f"--save-every={SAVE_EVERY}"],
    ],
    OURS: [
        *[
            find_tool("echelon"),
            "train",
            f"experiment={SCRIPTS / 'echelon_experiment.py'}:experiment",
        ],
        *["launch=local", "launch.procs=2", "launch.max_restarts=1", "launch.max_replacements=0"],
        *[f"trainer.steps={MANY_STEPS}", f"trainer.save.steps={SAVE_EVERY}"],
    ],
}
REPLACED = "a replaced rank"
REPLACING = [word for word in COMMANDS[OURS] if not word.startswith("launch.max_")]


def measure(rounds: int = ROUNDS) -> Result:
    alone_s: list[float] = []
    contestants: dict[str, Callable[[], float]] = {
        n: partial(restart_s, n, c) for n, c in COMMANDS.items()
    }
    seconds = measure_in_turns(contestants | {REPLACED: partial(replacement_s, alone_s)}, rounds, 0)
    whole_s = seconds.pop(REPLACED)
    return {
        "config": {
            "commands": {n: " ".join(map(shorten_command, c)) for n, c in COMMANDS.items()},
            "rounds": rounds,
            "kill_after_steps": KILL_AFTER,
        },
        "figures": [
            make_figure(
                "from kill -9 of a worker to a new step, × torchrun",
                compute_ratios(seconds[OURS], seconds[TORCHRUN]),
                TARGET,
            ),
            make_figure(
                "from kill -9 of a rank to the next step of the other",
                alone_s,
                0.5,
                unit="s",
            ),
            make_figure("… to a step of its replacement", whole_s, 2.0, unit="s"),
        ],
        "seconds": {n: make_figure(n, v, unit="s") for n, v in seconds.items()},
    }


def restart_s(name: str, command: list[str]) -> float:
    with Start(name, command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as start:
        start.wait(lambda: start.made(KILL_AFTER))
        [victim] = [int(f.name.partition("-")[2]) for f in start.marks.glob("1-*")]
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        return start.wait(lambda: start.made(1, after=killed)) - killed


def replacement_s(alone_s: list[float]) -> float:
    """Return the seconds from the kill to a step of the new rank 1; those to the next step of
    rank 0 are appended to `alone_s`."""
    with Start(REPLACED, REPLACING) as start:
        start.wait(lambda: start.made(KILL_AFTER))
        [victim] = start.marks.glob("1-*")
        [survivor] = start.marks.glob("0-*")
        killed = time.time()
        os.kill(int(victim.name.partition("-")[2]), signal.SIGKILL)

        def find_first_step() -> float | None:
            new = [file for file in start.marks.glob("1-*") if file != victim]
            times = [t for file in new for t in read_times(file)]
            return min(times) if times else None

        whole_s = start.wait(find_first_step) - killed
        before = max(t for t in read_times(survivor) if t <= killed)
        times = [before, *(t for t in read_times(survivor) if t > killed)]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        alone_s.append(times[gaps.index(max(gaps)) + 1] - killed)
        return whole_s


def read_times(file: Path) -> list[float]:
    lines = file.read_text().splitlines(keepends=True)
    return [float(line.split()[1]) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    run_benchmark("time restarts after a killed worker", measure, ROUNDS)
