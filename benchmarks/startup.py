"""From typing the command to the end of the first optimizer step of two processes, and memory.

    python benchmarks/startup.py [--rounds 7]

The same toy everywhere: Linear 20 → 1, ready data, DDP on gloo, one SGD step (scripts/). The clock
starts when the command is started and stops when the last rank has made its first optimizer step,
which each rank writes down itself; `echelon train` with its bundled toy is read from its
metrics.jsonl. Contestants take turns; ratios are within a round.

The peers: `torchrun --standalone` with a plain DDP script; `accelerate launch` with all it would
otherwise guess given (its --multi_gpu is what starts several processes, its --cpu does not; the
script asks for the CPU); Lightning by `python script.py` and its own launcher, with
everything optional off.

Memory is the proportional set size of the whole tree, agents included, after the fifth step of a
longer run: pages that processes share are counted once. This file imports no torch, whose pages
would be shared too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from common import (
    SCRIPTS,
    Figure,
    Result,
    compute_ratios,
    environment,
    find_tool,
    make_figure,
    measure_in_turns,
    proportional_megabytes,
    start_program,
    wait_for,
)
from echelon.runs.metrics_file import read_metrics

PROCS = 2
ROUNDS, MEMORY_ROUNDS = 7, 3
MANY_STEPS = 10**7
"""More than are made until the tree has been looked at."""
TORCHRUN = "torchrun --standalone"
BUNDLED, OWN_FILE, OWN_SCRIPT = (
    "echelon train",
    "echelon train experiment=FILE",
    "python FILE (echelon.main)",
)
OURS = (BUNDLED, OWN_FILE, OWN_SCRIPT)
TIME_TARGET, MEMORY_TARGET = 0.8, 0.7


def commands(steps: int) -> dict[str, list[str]]:
    launch = ["launch=local", f"launch.procs={PROCS}", f"trainer.steps={steps}"]
    bundled = [find_tool("echelon"), "train", *launch, "trainer.log_steps=1", "run.name=bench"]
    accelerate = ["launch", "--multi_gpu", f"--num_processes={PROCS}", "--num_machines=1"]
    accelerate += ["--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no"]
    script = str(SCRIPTS / "echelon_experiment.py")
    return {
        TORCHRUN: [
            *[find_tool("torchrun"), "--standalone", f"--nproc_per_node={PROCS}"],
            *[str(SCRIPTS / "bare_loop.py"), "--steps", str(steps)],
        ],
        BUNDLED: bundled,
        OWN_FILE: [find_tool("echelon"), "train", f"experiment={script}:experiment", *launch],
        OWN_SCRIPT: [sys.executable, script, *launch],
        "accelerate launch": [
            *[find_tool("accelerate"), *accelerate],
            *[str(SCRIPTS / "accelerate_loop.py"), "--steps", str(steps)],
        ],
        "Lightning's own launcher": [
            *[sys.executable, str(SCRIPTS / "lightning_loop.py"), "--steps", str(steps)],
        ],
    }


def measure(rounds: int = ROUNDS, memory_rounds: int = MEMORY_ROUNDS) -> Result:
    times = {n: partial(first_step_s, n, c) for n, c in commands(1).items()}
    memory = {n: partial(megabytes, n, c) for n, c in commands(MANY_STEPS).items()}
    seconds = measure_in_turns(times, rounds)
    sizes = measure_in_turns(memory, memory_rounds, warm_up=0)
    rows = [
        *rows_of("to the first step", seconds, TIME_TARGET),
        *rows_of("memory of the tree", sizes, MEMORY_TARGET),
    ]
    return {
        "config": {
            "commands": {n: " ".join(map(shorten_command, c)) for n, c in commands(1).items()},
            "rounds": rounds,
            "memory_rounds": memory_rounds,
        },
        "figures": rows,
        "seconds": {n: make_figure(n, v, unit="s") for n, v in seconds.items()},
        "megabytes": {n: make_figure(n, v, unit="MB") for n, v in sizes.items()},
    }


def rows_of(what: str, values: dict[str, list[float]], at_most: float) -> list[Figure]:
    return [
        make_figure(
            f"{what}: {name}, × torchrun",
            compute_ratios(v, values[TORCHRUN]),
            at_most if name in OURS else None,
        )
        for name, v in values.items()
        if name != TORCHRUN
    ]


def shorten_command(word: str) -> str:
    """As it would be typed: no folders of this machine."""
    key, equals, value = word.rpartition("=")
    return key + equals + (value.rpartition("/")[2] if "/" in value else value)


# --- one start ----------------------------------------------------------------------------------


class Start(AbstractContextManager["Start"]):
    """A program that has been started in a folder of its own, until we leave."""

    def __init__(self, name: str, command: list[str], **variables: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
        self.marks = self.folder / "marks"
        self.marks.mkdir()
        self.bundled = name == BUNDLED
        env = environment(BENCH_MARKS=str(self.marks), **variables)
        self.began = time.time()
        self._running = start_program(command, env, self.folder)
        self.pid = self._running.__enter__()

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(None, None, None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def made(self, step: int, after: float = 0.0) -> float | None:
        """When all ranks had made this step of an attempt that stepped after `after`."""
        if self.bundled:
            return self._logged(step)
        times = []
        for file in self.marks.iterdir():
            rows = [
                line.split()
                for line in file.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
            at = {int(number): float(moment) for number, moment in rows}
            if step in at and at[step] > after:
                times.append(at[step])
        return max(times) if len(times) == PROCS else None

    def _logged(self, step: int) -> float | None:
        lines = read_metrics(self.folder / "runs" / "bench" / "metrics.jsonl")
        found = [line["time"] for line in lines if line["step"] == step and "time" in line]
        return found[0] if found else None

    def wait(self, found: Callable[[], float | None]) -> float:
        return float(wait_for(found, self.folder))


def first_step_s(name: str, command: list[str]) -> float:
    with Start(name, command) as start:
        return start.wait(lambda: start.made(1)) - start.began


def megabytes(name: str, command: list[str]) -> float:
    with Start(name, command) as start:
        start.wait(lambda: start.made(5))
        return proportional_megabytes(start.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description="time starts and weigh process trees")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--memory-rounds", type=int, default=MEMORY_ROUNDS)
    given = parser.parse_args()
    result = measure(given.rounds, given.memory_rounds)
    for row in [*result["figures"], *result["seconds"].values(), *result["megabytes"].values()]:
        print(f"{row['what']:<60}{row['median']:>8} {row['unit']} [{row['min']}–{row['max']}]")


if __name__ == "__main__":
    main()
