"""On a real Slurm cluster: from typing the command to the first step on two nodes; a large plan;
how often the controller is asked when many runs are submitted.

    make cluster && SLURM_CONF=… python benchmarks/on_slurm.py [--rounds 7]

The peer is the hand-written script that everyone has: sbatch, srun, torchrun with c10d on the first
node. Both train the toy of startup.py on one process per node. The clock starts when the command is
typed (`sbatch` for the script; `echelon train`, which calls it, for ours) and stops when both ranks
have made their first step. Without SLURM_CONF the project's own test cluster is used (cluster/),
and started if need be.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from common import (
    HERE,
    SCRIPTS,
    Result,
    compute_ratios,
    environment,
    find_tool,
    make_figure,
    measure_in_turns,
    run_benchmark,
    wait_for,
)

ROUNDS, PLAN_ROUNDS = 7, 9
MANY = 1000
SEED, OURS = "hand-written sbatch script", "echelon train launch=slurm"
START_TARGET, PLAN_TARGET_S, CALLS_TARGET = 1.10, 1.0, 1.0
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=output.txt
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {find_tool("torchrun")} --nnodes 2 --nproc_per_node 1 --rdzv_id $SLURM_JOB_ID \\
  --rdzv_backend c10d --rdzv_endpoint $head:$((20000 + SLURM_JOB_ID % 10000)) \\
  {SCRIPTS / "bare_loop.py"} --steps 1
"""


def measure(rounds: int = ROUNDS) -> Result:
    env = cluster_environment()
    launch = ["launch=slurm", "launch.nodes=2", "trainer.steps=1"]
    ours = [
        find_tool("echelon"),
        "train",
        f"experiment={SCRIPTS / 'echelon_experiment.py'}:experiment",
        *launch,
    ]
    seconds = measure_in_turns(
        {
            SEED: partial(first_step_s, ["sbatch", "job.sh"], env),
            OURS: partial(first_step_s, ours, env),
        },
        rounds,
    )
    plan = [plan_s() for _ in range(PLAN_ROUNDS)]
    chunks, calls = controller_calls(env)
    return {
        "config": {"rounds": rounds, "nodes": 2, "processes": 2, "runs": MANY, "arrays": chunks},
        "figures": [
            make_figure(
                "to the first step on two nodes, × a hand-written script",
                compute_ratios(seconds[OURS], seconds[SEED]),
                START_TARGET,
            ),
            make_figure("the plan for 4,096 nodes × 8 GPUs", plan, PLAN_TARGET_S, "s"),
            make_figure(
                f"calls to the controller per array, submitting {MANY:,} runs",
                [calls / chunks],
                CALLS_TARGET,
                "",
            ),
        ],
        "seconds": {n: make_figure(n, v, unit="s") for n, v in seconds.items()},
    }


def cluster_environment() -> dict[str, str]:
    if "SLURM_CONF" not in os.environ:
        cluster = [sys.executable, str(HERE.parent / "cluster" / "cluster.py")]
        subprocess.run([*cluster, "up"], check=True, stdout=subprocess.DEVNULL)
        told = subprocess.run([*cluster, "status", "--json"], check=True, capture_output=True)
        os.environ["SLURM_CONF"] = json.loads(told.stdout)["slurm_conf"]
    return environment(SLURM_CONF=os.environ["SLURM_CONF"])


def first_step_s(command: list[str], env: dict[str, str]) -> float:
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    (folder / "marks").mkdir()
    (folder / "job.sh").write_text(SCRIPT)
    began = time.time()
    with (folder / "output.txt").open("a") as output:
        subprocess.run(
            command,
            env=env | {"BENCH_MARKS": str(folder / "marks")},
            cwd=folder,
            stdout=output,
            stderr=output,
            check=True,
        )
    made = float(wait_for(partial(find_first_step_time, folder / "marks"), folder))
    clear_queue(env)  # torchrun may wait for minutes where a peer has ended
    wait_for(partial(queue_is_empty, env), folder)
    shutil.rmtree(folder, ignore_errors=True)
    return made - began


def find_first_step_time(marks: Path) -> float | None:
    """When the last of two ranks had made its first step."""
    first = [file.read_text().split("\n")[0].split() for file in marks.iterdir()]
    return max(float(row[1]) for row in first) if len(first) == 2 and all(first) else None


def clear_queue(env: dict[str, str]) -> None:
    told = subprocess.run(["squeue", "-h", "-o", "%A"], env=env, capture_output=True, text=True)
    if jobs := sorted(set(told.stdout.split())):
        subprocess.run(["scancel", *jobs], env=env, check=True)


def queue_is_empty(env: dict[str, str]) -> bool | None:
    told = subprocess.run(["squeue", "-h"], env=env, capture_output=True, text=True, check=True)
    return True if not told.stdout.strip() else None


def plan_s() -> float:
    words = ["launch=slurm", "launch.nodes=4096", "launch.gpus_per_node=8"]
    began = time.perf_counter()
    subprocess.run(
        [find_tool("echelon"), "train", *words, "trainer.batch_size=32768", "--dry-run"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began


def controller_calls(env: dict[str, str]) -> tuple[int, int]:
    """Arrays submitted, and commands of Slurm's run for it; they are held, then removed."""
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    count = folder / "count"
    for name in ("sbatch", "squeue", "scontrol", "sinfo", "sacct"):
        shim = folder / "bin" / name
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(f'#!/bin/sh\necho {name} >> {count}\nexec {shutil.which(name)} "$@"\n')
        shim.chmod(0o755)
    words = ["launch=slurm", f"seed=range(0,{MANY})", "launch.sbatch=[--hold]"]
    subprocess.run(
        [find_tool("echelon"), "train", "-m", *words, "run.name=many"],
        env=env | {"PATH": f"{folder / 'bin'}:{env['PATH']}"},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    arrays = len(list((folder / "runs").glob(".many-*.sh")))
    calls = len(count.read_text().split())
    clear_queue(env)
    shutil.rmtree(folder, ignore_errors=True)
    return arrays, calls


if __name__ == "__main__":
    run_benchmark("measure on a Slurm cluster", measure, ROUNDS)
