"""From Enter on a laptop to a job in the cluster's queue, beside one `ssh HOST true`.

    python benchmarks/login_submitting.py [--rounds 9]

The laptop is a host of the test cluster without Slurm (tests/helpers/laptop.py), whose login node
it reaches by ssh; its code is a git repository of 5,000 files. The clock is that of a shell on the
laptop, so that it has nothing but the command in it. The experiment is in a file that imports
torch. It was submitted before: unchanged; with one of the 5,000 files edited, which the experiment
does not import; and with the file of the experiment itself edited, which then has to be imported to
be checked. Jobs are held, and removed at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from common import (
    HERE,
    Result,
    compute_ratios,
    make_figure,
    measure_in_turns,
    run_benchmark,
)

sys.path.append(str(HERE.parent / "tests" / "helpers"))

import slurm_cluster
from laptop import Laptop, open_laptop
from slurm_cluster import ClusterSlot

ROUNDS = 9
FILES = 5000
SSH, SAME, ONE, OWN = "ssh HOST true", "unchanged", "one of 5,000 files", "the experiment's file"
SSH_CALLS, SAME_S, ONE_S = 3, 1.0, 1.5
EXPERIMENT = """import torch
import echelon


def experiment(cfg):
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=cfg.lr),
        loss=torch.nn.functional.mse_loss,
        train_data=(x, x.sum(1, keepdim=True)),
    )
"""
CLOCK = 'began=$EPOCHREALTIME; "$@" > last.log 2>&1; echo "$? $began $EPOCHREALTIME"'


def measure(rounds: int = ROUNDS) -> Result:
    slot = ClusterSlot()
    kind = slot.make_kind(accounting=False)
    was_up = slurm_cluster.is_up(kind)
    cluster = slurm_cluster.start(kind)
    numbers = count()
    try:
        with tempfile.TemporaryDirectory() as folder, open_laptop(cluster, Path(folder)) as laptop:
            make_source(laptop.folder)
            ssh = ["ssh", "-F", str(laptop.ssh_config), "login", "true"]
            for _ in range(2):  # the code and the source are sent, and what is asked is remembered
                submit_s(laptop)
            seconds = measure_in_turns(
                {
                    SSH: partial(time_s, laptop, ssh),
                    SAME: partial(submit_s, laptop),
                    ONE: partial(submit_s, laptop, partial(edit, "module_17.py", numbers)),
                    OWN: partial(submit_s, laptop, partial(edit, "train.py", numbers)),
                },
                rounds,
            )
    finally:
        if not was_up:
            slurm_cluster.require(slurm_cluster.manage(kind, "down"))
    beyond = {
        name: [s - SSH_CALLS * one for s, one in zip(values, seconds[SSH], strict=True)]
        for name, values in seconds.items()
    }
    figures = [
        make_figure(f"{name}, × {SSH}", compute_ratios(seconds[name], seconds[SSH]))
        for name in (SAME, ONE, OWN)
    ]
    target = {SAME: SAME_S, ONE: ONE_S, OWN: None}
    figures += [
        make_figure(f"{name}, beyond {SSH_CALLS} × {SSH}", beyond[name], at_most, "s")
        for name, at_most in target.items()
    ]
    return {
        "config": {"rounds": rounds, "files": FILES},
        "figures": figures,
        "seconds": {name: make_figure(name, values, unit="s") for name, values in seconds.items()},
    }


def make_source(source: Path) -> None:
    for number in range(FILES):
        folder = source / f"part_{number % 50}" if number != 17 else source
        folder.mkdir(exist_ok=True)
        (folder / f"module_{number}.py").write_text(f"value = {number}\n" * 20)
    (source / "train.py").write_text(EXPERIMENT)
    (source / ".gitignore").write_text("runs/\n*.log\n")
    who = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "source"]):
        subprocess.run(["git", *words], cwd=source, check=True)


def edit(name: str, numbers: count[int], laptop: Laptop) -> None:
    with (laptop.folder / name).open("a") as file:
        file.write(f"\nedited = {next(numbers)}\n")


def submit_s(laptop: Laptop, before: Callable[[Laptop], None] | None = None) -> float:
    if before is not None:
        before(laptop)
    words = ["experiment=train.py:experiment", "lr=0.1", *laptop.words[:-1]]
    held = "launch.sbatch=['--hold']"
    return time_s(laptop, [sys.executable, "-m", "echelon", "train", *words, held])


def time_s(laptop: Laptop, words: list[str]) -> float:
    # Without the variable by which tests find their processes: it is another one every time.
    unmarked = ["env", "-u", "ECHELON_TEST_MARK"]
    done = laptop.run_program(*unmarked, "bash", "-c", CLOCK, "clock", *words)
    code, began, ended = done.out.split()
    if code != "0":
        raise RuntimeError((laptop.folder / "last.log").read_text())
    return float(ended) - float(began)


if __name__ == "__main__":
    run_benchmark("measure submitting from a laptop beside one ssh call", measure, ROUNDS)
