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

from common import Result, alone, environment, figure, in_turns, ratios, tool
from startup import shortened

ROUNDS = 9
TORCH = "python -c 'import torch'"
PLAN = ["train", "launch=local", "launch.procs=2", "--dry-run"]
COMMANDS = {
    TORCH: [sys.executable, "-c", "import torch"],
    "python -c pass": [sys.executable, "-c", "pass"],
    "echelon --help": [tool("echelon"), "--help"],
    "echelon explain": [tool("echelon"), "explain"],
    "echelon train --dry-run": [tool("echelon"), *PLAN],
    "torchrun --help": [tool("torchrun"), "--help"],
    "accelerate --help": [tool("accelerate"), "--help"],
}
TARGETS = {"echelon --help": 0.15, "echelon explain": 0.15, "echelon train --dry-run": 0.5}


def measure(rounds: int = ROUNDS) -> Result:
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        seconds = in_turns({n: partial(taken_s, c, folder) for n, c in COMMANDS.items()}, rounds)
    return {
        "config": {
            "commands": {n: " ".join(map(shortened, c)) for n, c in COMMANDS.items()},
            "rounds": rounds,
        },
        "figures": [
            figure(f"{name}, × import torch", ratios(v, seconds[TORCH]), TARGETS.get(name))
            for name, v in seconds.items()
            if name != TORCH
        ],
        "seconds": {n: figure(n, v, unit="s") for n, v in seconds.items()},
    }


def taken_s(command: list[str], folder: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=environment(), cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    alone("time commands that need no torch", measure, ROUNDS)
