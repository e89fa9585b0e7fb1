"""From typing to a job in the queue: `echelon submit` with its environment ready, beside `sbatch`.

    make cluster && SLURM_CONF=… python benchmarks/submitting.py [--rounds 15]

The peer is `sbatch` with the script that Echelon wrote for the same command, so that the
difference is all that comes before it: reading commands and defaults, seeing what decides the
environment and that it works, asking Slurm whether it would take the job, copying the source. The
source is a git repository of 200 files. Jobs are held, and removed at the end.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path

from common import Result, find_tool, make_figure, measure_in_turns, run_benchmark
from on_slurm import cluster_environment

ROUNDS = 15
FILES = 200
BARE, ONE, MANY = "sbatch", "echelon submit, one command", "echelon submit, 100 commands"
TARGET_S = 1.0


def measure(rounds: int = ROUNDS) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    env = cluster_environment() | {"ECHELON_CACHE": str(folder / "cache")}
    source = folder / "source"
    make_source(source)
    numbers = count()
    contestants = {
        BARE: partial(sbatch_s, source, env),
        ONE: partial(submit_s, source, "one.txt", numbers, env),
        MANY: partial(submit_s, source, "many.txt", numbers, env),
    }
    submit_s(source, "one.txt", numbers, env)  # makes the environment
    shutil.copy(source / "runs" / "bench-0" / "job.sh", source / "runs" / "job.sh")
    try:
        seconds = measure_in_turns(contestants, rounds)
    finally:
        remove_jobs(env)
        shutil.rmtree(folder, ignore_errors=True)
    over = {
        name: [ours - bare for ours, bare in zip(seconds[name], seconds[BARE], strict=True)]
        for name in (ONE, MANY)
    }
    return {
        "config": {"rounds": rounds, "files": FILES},
        "figures": [
            make_figure("submitting one command, over bare sbatch", over[ONE], TARGET_S, "s"),
            make_figure("submitting 100 commands, over bare sbatch", over[MANY], unit="s"),
        ],
        "seconds": {name: make_figure(name, values, unit="s") for name, values in seconds.items()},
    }


def make_source(source: Path) -> None:
    source.mkdir(parents=True)
    for number in range(FILES):
        (source / f"module_{number}.py").write_text("value = 1\n" * 100)
    (source / "requirements.txt").write_text("# none: the environment is Python's own\n")
    (source / "one.txt").write_text("python module_0.py\n")
    lines = (f"python module_0.py --seed {seed} 'a=[1,2]'\n" for seed in range(100))
    (source / "many.txt").write_text("".join(lines))
    (source / ".gitignore").write_text("runs/\n")
    who = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "source"]):
        subprocess.run(["git", *words], cwd=source, check=True)


def submit_s(source: Path, file: str, numbers: count[int], env: dict[str, str]) -> float:
    name = f"bench-{next(numbers)}"
    words = ["--configs", file, "--name", name, "launch.sbatch=[--hold]"]
    return _time_call([find_tool("echelon"), "submit", *words], source, env)


def sbatch_s(source: Path, env: dict[str, str]) -> float:
    return _time_call(["sbatch", "--parsable", "runs/job.sh"], source, env)


def _time_call(words: list[str], folder: Path, env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(words, cwd=folder, env=env, check=True, capture_output=True)
    return time.perf_counter() - began


def remove_jobs(env: dict[str, str]) -> None:
    told = subprocess.run(
        ["squeue", "-h", "-o", "%A %j"], env=env, capture_output=True, text=True
    ).stdout
    jobs = {line.split()[0] for line in told.splitlines() if line.split()[1].startswith("bench-")}
    if jobs:
        subprocess.run(["scancel", *sorted(jobs)], env=env, check=True)


if __name__ == "__main__":
    run_benchmark("measure submitting beside sbatch", measure, ROUNDS)
