"""One of two workers is killed with SIGKILL: how long until all have made a new step?

    python benchmarks/restart.py [--rounds 7]

Echelon with launch.max_restarts=1 and a snapshot every 50 steps, against `torchrun
--max-restarts=1` with a script that saves every 50 steps with torch.save (to a file beside, then
renamed) and loads that when it starts. Both are the toy of scripts/. Rank 1 is killed after 120
steps; the clock stops when both ranks of the new attempt have made their first optimizer step.

torchrun is given TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it a restart can hang, as the ranks
of the new attempt meet the keys that the old ones left in the agent's store.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial

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
        *["launch=local", "launch.procs=2", "launch.max_restarts=1"],
        *[f"trainer.steps={MANY_STEPS}", f"trainer.save.steps={SAVE_EVERY}"],
    ],
}


def measure(rounds: int = ROUNDS) -> Result:
    seconds = measure_in_turns(
        {n: partial(restart_s, n, c) for n, c in COMMANDS.items()}, rounds, 0
    )
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
            )
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


if __name__ == "__main__":
    run_benchmark("time restarts after a killed worker", measure, ROUNDS)
