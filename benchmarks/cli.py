"""How long a person waits for the command line, beside `python -c 'import torch'`.

    python benchmarks/cli.py [--rounds 9]

Commands take turns, from files that are in memory already; ratios are within a round. `echelon
train --dry-run` composes with Hydra and prints the plan of two processes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial

from common import (
    Result,
    compute_ratios,
    environment,
    find_tool,
    make_figure,
    measure_in_turns,
    run_benchmark,
)
from startup import shorten_command

ROUNDS = 9
TORCH = "python -c 'import torch'"
PLAN = ["train", "launch=local", "launch.procs=2", "--dry-run"]
COMMANDS = {
    TORCH: [sys.executable, "-c", "import torch"],
    "python -c pass": [sys.executable, "-c", "pass"],
    "echelon --help": [find_tool("echelon"), "--help"],
    "echelon explain": [find_tool("echelon"), "explain"],
    "echelon train --dry-run": [find_tool("echelon"), *PLAN],
    "torchrun --help": [find_tool("torchrun"), "--help"],
    "accelerate --help": [find_tool("accelerate"), "--help"],
}
TARGETS = {"echelon --help": 0.15, "echelon explain": 0.15, "echelon train --dry-run": 0.5}


def measure(rounds: int = ROUNDS) -> Result:
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        seconds = measure_in_turns(
            {n: partial(time_command, c, folder) for n, c in COMMANDS.items()}, rounds
        )
    return {
        "config": {
            "commands": {n: " ".join(map(shorten_command, c)) for n, c in COMMANDS.items()},
            "rounds": rounds,
        },
        "figures": [
            make_figure(
                f"{name}, × import torch", compute_ratios(v, seconds[TORCH]), TARGETS.get(name)
            )
            for name, v in seconds.items()
            if name != TORCH
        ],
        "seconds": {n: make_figure(n, v, unit="s") for n, v in seconds.items()},
    }


def time_command(command: list[str], folder: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=environment(), cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    run_benchmark("time commands that need no torch", measure, ROUNDS)
