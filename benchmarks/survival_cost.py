"""What a training pays, in every step, for being able to go on without a lost rank.

    python benchmarks/survival_cost.py [--rounds 7]

The toy of scripts/ on two processes, as an experiment with a loss and as a loop of one's own, with
lost ranks replaced (the default) and not (launch.max_replacements=0). A loop of one's own is copied
into memory now and then, which may take one percent of the time. A value is the median time of a
step, by the run's own metrics, after the first half of the steps.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

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
)

ROUNDS = 7
STEPS = 6000
AT_MOST = 1.02
KINDS = {
    "an experiment with a loss": f"experiment={SCRIPTS / 'echelon_experiment.py'}:experiment",
    "a loop of one's own": f"experiment={HERE / 'survival_cost.py'}:train",
}


def measure(rounds: int = ROUNDS) -> Result:
    contestants = {
        (kind, limit): partial(measure_step_ms, KINDS[kind], limit)
        for kind in KINDS
        for limit in (3, 0)
    }
    taken = measure_in_turns({f"{k} {n}": run for (k, n), run in contestants.items()}, rounds)
    return {
        "config": {"processes": 2, "steps": STEPS, "rounds": rounds},
        "figures": [
            make_figure(
                f"{kind}: lost ranks replaced ÷ not",
                compute_ratios(taken[f"{kind} 3"], taken[f"{kind} 0"]),
                AT_MOST,
            )
            for kind in KINDS
        ],
        "step_ms": {name: make_figure(name, values, unit="ms") for name, values in taken.items()},
    }


def measure_step_ms(experiment: str, max_replacements: int) -> float:
    words = [find_tool("echelon"), "train", experiment, "run.name=a", "launch=local"]
    words += ["launch.procs=2", f"launch.max_replacements={max_replacements}"]
    words += [f"trainer.steps={STEPS}", "trainer.log_steps=100", "track.progress=none"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        text = (Path(folder) / "runs" / "a" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return statistics.median(
        line["step_ms"] for line in lines if "step_ms" in line and line["step"] > STEPS / 2
    )


def train(session: Any) -> None:
    """Inside `echelon train`."""
    import sys

    import torch

    sys.path.insert(0, str(SCRIPTS))
    from toy import FEATURES, data

    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = session.prepare(model, optimizer)
    for x, y in session.batches(data()):
        loss = torch.nn.functional.mse_loss(model(x), y)
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)


if __name__ == "__main__":
    run_benchmark("time steps with and without replacement of lost ranks", measure, ROUNDS)
