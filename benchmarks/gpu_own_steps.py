"""A step of one's own on one NVIDIA GPU: two models and two optimizers in turn.

    PYTHONPATH=src:carried python3 benchmarks/gpu_own_steps.py [--device cpu] [--quick]

A maker and a judge of three layers of 256, batches of 128, Adam twice: the shape of a GAN, small
enough that the host is what takes time. Everybody in turns, each in a process of its own; a figure
is the time of a step after the first ones.

- Echelon: `echelon train` on this file, as a person types it, with metrics every 250 steps. The
  step is captured as a CUDA graph, by default; "plain" is trainer.capture=never.
- loop: the same step in a bare loop over batches on the GPU, with torch's own calls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import Result, compute_ratios, environment, make_figure, measure_in_turns
from echelon.runs.metrics_file import read_metrics

HERE = Path(__file__).resolve()
ROUNDS, STEPS, LOG_STEPS = 3, 1500, 250
BATCH, WIDTH, NOISE = 128, 256, 32
OURS, OURS_PLAIN, LOOP = "Echelon", "Echelon, plain", "loop, data on the GPU"
WORDS = {OURS: [], OURS_PLAIN: ["trainer.capture=never"]}


def measure(device: str = "cuda", quick: bool = False) -> Result:
    rounds, steps = (1, 2 * LOG_STEPS) if quick else (ROUNDS, STEPS)
    contestants = {name: partial(time_ours_s, steps, device, WORDS[name]) for name in WORDS}
    contestants[LOOP] = partial(time_loop_s, steps, device)
    seconds = measure_in_turns(contestants, rounds, warm_up=0)
    rows = [
        make_figure(
            f"a step of one's own: {name}, × a loop, data on the GPU",
            compute_ratios(seconds[name], seconds[LOOP]),
            1.0 if name == OURS else None,
        )
        for name in WORDS
    ]
    micro = {n: make_figure(n, [1e6 * s for s in v], unit="µs") for n, v in seconds.items()}
    config = {
        "command": " ".join(["echelon", *make_command(steps, [])]),
        "rounds": rounds,
        "steps": steps,
    }
    return {"config": config, "figures": rows, "microseconds_per_step": micro}


def make_command(steps: int, words: list[str]) -> list[str]:
    return [
        *("train", f"experiment=benchmarks/{HERE.name}:experiment", f"trainer.batch_size={BATCH}"),
        *(f"trainer.steps={steps}", f"trainer.log_steps={LOG_STEPS}", "trainer.save.epochs=null"),
        *("track.progress=none", *words),
    ]


def time_ours_s(steps: int, device: str, words: list[str]) -> float:
    env = environment(**({} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}))
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        command = [*make_command(steps, words), f"run.dir={folder}", "run.name=a"]
        done = subprocess.run(
            [sys.executable, "-m", "echelon", *command],
            env=env,
            cwd=HERE.parent.parent,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        if not words and device == "cuda" and "not captured" in done.stderr:
            raise RuntimeError(done.stderr)
        first, *_, last = read_metrics(Path(folder) / "a" / "metrics.jsonl")
    return float(last["time"] - first["time"]) / (last["step"] - first["step"])


def time_loop_s(steps: int, device: str) -> float:
    """A child, as the others are processes of their own too."""
    done = subprocess.run(
        [sys.executable, str(HERE), "--loop", str(steps), "--device", device],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def make_models() -> tuple[Any, Any]:
    from torch import nn

    def make(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, outputs),
        )

    return make(NOISE, WIDTH), make(WIDTH, 1)


def make_data() -> Any:
    import torch

    return torch.randn(BATCH * 200, WIDTH, generator=torch.Generator().manual_seed(0))


def compute_losses(maker: Any, judge: Any, real: Any) -> tuple[Any, Any]:
    """Return the judge's loss, and a function of the maker's."""
    import torch
    from torch.nn.functional import softplus

    fake = maker(torch.randn(len(real), NOISE, device=real.device))
    judge_loss = softplus(-judge(real)).mean() + softplus(judge(fake.detach())).mean()
    return judge_loss, lambda: softplus(-judge(fake)).mean()


def experiment() -> Any:
    import torch

    import echelon

    maker, judge = make_models()
    makes = torch.optim.Adam(maker.parameters(), lr=1e-4)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-4)

    def step(batch: Any, session: echelon.Session) -> dict[str, Any]:
        [real] = batch
        judge_loss, compute_maker_loss = compute_losses(maker, judge, real)
        session.backward(judge_loss)
        session.step(judges)
        maker_loss = compute_maker_loss()
        session.backward(maker_loss)
        session.step(makes)
        return {"judge_loss": judge_loss, "maker_loss": maker_loss}

    return echelon.Experiment(
        model={"maker": maker, "judge": judge},
        optimizer={"maker": makes, "judge": judges},
        step=step,
        train_data=(make_data(),),
    )


def run_loop(steps: int, device: str) -> float:
    import torch

    maker, judge = (model.to(device) for model in make_models())
    makes = torch.optim.Adam(maker.parameters(), lr=1e-4)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-4)
    batches = make_data().to(device).split(BATCH)
    begun = 0.0
    for number in range(steps):
        if number == LOG_STEPS:
            _synchronize(device)
            begun = time.perf_counter()
        judge_loss, compute_maker_loss = compute_losses(maker, judge, batches[number % 200])
        judges.zero_grad()
        judge_loss.backward()
        judges.step()
        makes.zero_grad()
        compute_maker_loss().backward()
        makes.step()
    _synchronize(device)
    return (time.perf_counter() - begun) / (steps - LOG_STEPS)


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description="time a step of one's own on a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    parser.add_argument("--loop", type=int, metavar="STEPS", help="time the bare loop alone")
    given = parser.parse_args()
    if given.loop:
        print(run_loop(given.loop, given.device))
        return
    print(json.dumps(measure(given.device, given.quick), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
