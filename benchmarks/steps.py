"""What one training step of a toy costs, beside the bare loop, the tutorial's and the peers.

    python benchmarks/steps.py [--procs 2] [--rounds 15]

Linear 20 → 1, a global batch of 32, SGD, mean squared error, one thread per process. Everybody
trains in turns in the same processes, so that a slow moment of the machine falls on all; a ratio
is of two times of one round.

Echelon is what `echelon train` runs: this file is its experiment, started by the command line
(with two processes: by launch=local, its agent and its zygote), and all that is changed is that
`train` is called epoch by epoch, between the others, on the training that `echelon train` built.
Metrics are written (log_steps=10, the default), progress is shown on a terminal (as a bar, or as
lines), the stop check and the sign of life are on; evaluation is off, and there is one snapshot
per round, at the end of the epoch, which counts as its own.

The others, as a careful user would have them:
- bare: a hand-written loop over batches that are ready in a list; nothing is logged or read.
- tutorial: the same loop over a per-sample Dataset and a shuffling DataLoader, no worker.
- Ignite: an Engine with the bare step, no handlers, over the ready batches.
- Fabric, Accelerate: model and optimizer set up by them, the bare loop over the ready batches.
- Lightning: over the ready batches; "off" without logger, checkpoints, bar, summary; "default" as
  Trainer() is, with its bar, a CSV logger and its checkpoint at the end. Timed inside `fit`, from
  the start of training to its end.
With two processes they share Echelon's process group, a gloo one, and DDP is at its defaults.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common import Figure, Result, compute_ratios, environment, make_figure, measure_in_turns

BATCH, FEATURES = 32, 20
STEPS = {1: 2000, 2: 600}
"""Of the bare loop and Echelon per round; the slower peers make a quarter."""
ROUNDS = 15
BARE, OURS, OURS_BAR, TUTORIAL = "bare", "Echelon, lines", "Echelon, bar", "tutorial"
TARGETS = {1: {OURS: 1.05, OURS_BAR: 1.05}, 2: {OURS: 1.05, OURS_BAR: 1.05}}
TUTORIAL_TARGET = 0.8


# --- the side that starts `echelon train` -------------------------------------------------------


def measure(rounds: int = ROUNDS, procs: tuple[int, ...] = (1, 2)) -> Result:
    rows: list[Figure] = []
    microseconds: dict[str, dict[str, float]] = {}
    for n in procs:
        seconds = alternate(n, rounds)
        rows += figures(n, seconds)
        micro = {
            name: make_figure(name, [1e6 * s for s in v], unit="µs") for name, v in seconds.items()
        }
        microseconds[f"{n} process(es)"] = {name: f["median"] for name, f in micro.items()}
    config = {"command": commands(procs), "rounds": rounds, "steps_per_round": STEPS}
    return {"config": config, "figures": rows, "microseconds_per_step": microseconds}


def figures(procs: int, seconds: dict[str, list[float]]) -> list[Figure]:
    base = "the bare loop" if procs == 1 else "the bare DDP loop"
    where = "one process" if procs == 1 else f"{procs} processes"
    rows = [
        make_figure(f"{where}: {name}, a step, × {base}", compute_ratios(v, seconds[BARE]), at_most)
        for name, v in seconds.items()
        if name != BARE
        for at_most in [TARGETS[procs].get(name)]
    ]
    if TUTORIAL in seconds:
        rows += [
            make_figure(
                f"{where}: {name}, a step, × the tutorial's loop",
                compute_ratios(seconds[name], seconds[TUTORIAL]),
                TUTORIAL_TARGET,
            )
            for name in (OURS, OURS_BAR)
        ]
    return rows


def overrides(procs: int) -> list[str]:
    launch = ["launch=local", f"launch.procs={procs}", "launch.hang_s=0"] if procs > 1 else []
    samples = f"samples={BATCH * STEPS[procs]}"
    return [*launch, "launch.threads=1", "trainer.epochs=1", "track.progress=lines", samples]


def commands(procs: tuple[int, ...]) -> list[str]:
    return [
        " ".join(["echelon train experiment=steps.py:experiment", *overrides(n)]) for n in procs
    ]


def alternate(
    procs: int, rounds: int, only: str = "", device: str = "cpu", quick: bool = False
) -> dict[str, list[float]]:
    """Seconds per step of everybody in every round, from inside `echelon train`."""
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    answer = folder / "seconds.json"
    env = environment(
        BENCH_ANSWER=str(answer),
        BENCH_ROUNDS=str(rounds),
        BENCH_ONLY=only,
        BENCH_QUICK="1" if quick else "",
        OMP_NUM_THREADS="1",
        COLUMNS="100",
    )
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    here = Path(__file__).resolve()
    words = [f"experiment={here}:experiment", *overrides(procs), f"run.dir={folder / 'runs'}"]
    try:
        return run_echelon_train(words, env, folder, answer)
    finally:
        shutil.rmtree(folder)


def run_echelon_train(
    words: list[str], env: dict[str, str], folder: Path, answer: Path
) -> dict[str, list[float]]:
    """The seconds that an `echelon train` of this kind writes down."""
    said = on_terminal([sys.executable, "-m", "echelon", "train", *words], env, folder)
    if not answer.exists():
        raise RuntimeError(f"echelon train gave no figures; it said:\n{said[-3000:]}")
    seconds: dict[str, list[float]] = json.loads(answer.read_text())
    return seconds


def on_terminal(command: list[str], env: dict[str, str], folder: Path) -> str:
    """Run with a terminal as its screen, and read that as a terminal would."""
    ours, theirs = pty.openpty()
    program = subprocess.Popen(command, env=env, cwd=folder, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said: list[bytes] = []

    def read() -> None:
        while True:
            try:
                text = os.read(ours, 65536)
            except OSError:  # the last writer has gone
                return
            said.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    program.wait()
    reader.join()
    os.close(ours)
    return b"".join(said).decode(errors="replace")


# --- the side inside `echelon train` ------------------------------------------------------------


def experiment(cfg: Any) -> Any:
    """The bundled toy; and instead of once, `train` is called between the others."""
    from types import SimpleNamespace

    from echelon.recipes import toy
    from echelon.train import worker

    if worker.train is not take_turns:
        globals()["_train"] = worker.train
        worker.train = take_turns
    settings = {"eval_samples": 0, "features": FEATURES, "hidden": 0, "noise": 0.1}
    return toy.experiment(
        SimpleNamespace(samples=int(cfg.samples), lr=0.01, data_seed=0, **settings)
    )


def take_turns(t: Any) -> Any:
    """In the place of echelon.train.loop.train; Echelon's own is `_train`."""
    from echelon.errors import ExitCode

    steps, world = t.total_steps, t.group.world
    contestants = {
        name: partial(time_steps, run, t.device)
        for name, run in lineup(t, steps, world.rank, world.size).items()
    }
    rounds = int(os.environ["BENCH_ROUNDS"])
    seconds = measure_in_turns(contestants, rounds)
    if world.rank == 0:
        Path(os.environ["BENCH_ANSWER"]).write_text(json.dumps(seconds))
    return ExitCode.OK


def time_steps(run: Callable[[], tuple[float, int]], device: Any) -> float:
    import torch
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, steps = run()
    return seconds / steps


def lineup(t: Any, steps: int, rank: int, world: int) -> dict[str, Callable[[], tuple[float, int]]]:
    import torch

    few = max(steps // 4, 10)
    x, y = (tensor.to(t.device) for tensor in t.source.tensors)
    mine = BATCH // world
    ready = list(zip(x.split(mine), y.split(mine), strict=True))[rank::world]
    toy = partial(_toy, t.device)
    sync: Callable[[], None] = torch.cuda.synchronize if t.device.type == "cuda" else _nothing
    # On a GPU the peers are given the tutorial's loader, as their own tutorials have it.
    loader = _loader(t) if world == 1 else None
    data = loader if t.device.type == "cuda" else ready
    quick = bool(os.environ.get("BENCH_QUICK"))
    contestants: dict[str, Callable[[], tuple[float, int]] | None] = {
        BARE: train_bare_loop(toy, ready, world, steps, sync),
        OURS: partial(train_echelon, t, steps, "lines"),
        OURS_BAR: partial(train_echelon, t, steps, "bar"),
    }
    if loader is not None:
        contestants[TUTORIAL] = train_bare_loop(toy, loader, world, steps, sync)
        contestants["Ignite"] = optional(ignite, toy, ready, steps, sync)
    contestants["Fabric"] = optional(fabric, toy, ready, world, steps, sync)
    contestants["Accelerate"] = optional(accelerate, toy, data, few, sync)
    contestants["Lightning, off"] = optional(lightning, data, world, few, t.device, False)
    if not quick:
        contestants["Lightning, default"] = optional(lightning, data, world, few, t.device, True)
    only = [word for word in os.environ.get("BENCH_ONLY", "").split(";") if word]
    return {
        name: run
        for name, run in contestants.items()
        if run is not None and (not only or name in only)
    }


def _nothing() -> None: ...


def optional(make: Callable[..., Any], *given: Any) -> Callable[[], tuple[float, int]] | None:
    """None where the peer is not installed."""
    try:
        made: Callable[[], tuple[float, int]] = make(*given)
    except ModuleNotFoundError:
        return None
    return made


def _toy(device: Any) -> tuple[Any, Any]:
    import torch

    model = torch.nn.Linear(FEATURES, 1).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _loader(t: Any) -> Any:
    from torch.utils.data import DataLoader, Dataset

    class PerSample(Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.x, self.y = (tensor.cpu() for tensor in t.source.tensors)

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, index: int) -> Any:
            return self.x[index], self.y[index]

    return DataLoader(PerSample(), batch_size=BATCH, shuffle=True)


class Ready:
    """Batches for Lightning, to which a list would mean several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def train_echelon(t: Any, steps: int, progress: str) -> tuple[float, int]:
    from echelon.tracking.progress import TrainingDisplay, create_progress_display

    t.total_steps = t.step + steps
    if t.group.world.rank == 0:
        t.screen = create_progress_display(progress, t.total_steps, t.step)
    begun = time.perf_counter()
    globals()["_train"](t)
    taken = time.perf_counter() - begun
    if t.writer is not None:
        t.writer.wait()
    t.screen.close()
    t.screen = TrainingDisplay()
    return taken, steps


def train_bare_loop(toy: Any, data: Any, world: int, steps: int, sync: Any) -> Any:
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = toy()
    device = next(model.parameters()).device
    if world > 1:
        model = DistributedDataParallel(model)

    def run() -> tuple[float, int]:
        begun = time.perf_counter()
        for x, y in data:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        sync()
        return time.perf_counter() - begun, steps

    def run_ready() -> tuple[float, int]:
        begun = time.perf_counter()
        for x, y in data:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        sync()
        return time.perf_counter() - begun, steps

    return run_ready if isinstance(data, list) or device.type == "cpu" else run


def ignite(toy: Any, data: Any, steps: int, sync: Any) -> Any:
    from ignite.engine import Engine
    from torch.nn.functional import mse_loss

    model, optimizer = toy()

    def step(engine: Any, batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()

    def run() -> tuple[float, int]:
        engine = Engine(step)
        begun = time.perf_counter()
        engine.run(data, max_epochs=1)
        sync()
        return time.perf_counter() - begun, steps

    return run


def fabric(toy: Any, data: Any, world: int, steps: int, sync: Any) -> Any:
    from lightning.fabric import Fabric
    from torch.nn.functional import mse_loss

    model, optimizer = toy()
    device = next(model.parameters()).device
    made = Fabric(accelerator=device.type, devices=world, strategy="ddp" if world > 1 else "auto")
    made.launch()
    model, optimizer = made.setup(model, optimizer)

    def run() -> tuple[float, int]:
        begun = time.perf_counter()
        for x, y in data:
            optimizer.zero_grad()
            made.backward(mse_loss(model(x), y))
            optimizer.step()
        sync()
        return time.perf_counter() - begun, steps

    return run


def accelerate(toy: Any, data: Any, steps: int, sync: Any) -> Any:
    from accelerate import Accelerator
    from torch.nn.functional import mse_loss

    model, optimizer = toy()
    made = Accelerator(cpu=next(model.parameters()).device.type == "cpu")
    model, optimizer = made.prepare(model, optimizer)
    if not isinstance(data, list):
        data = made.prepare_data_loader(data)

    def run() -> tuple[float, int]:
        begun = time.perf_counter()
        for number, (x, y) in enumerate(data):
            if number == steps:
                break
            optimizer.zero_grad()
            made.backward(mse_loss(model(x), y))
            optimizer.step()
        sync()
        return time.perf_counter() - begun, steps

    return run


def lightning(data: Any, world: int, steps: int, device: Any, default: bool) -> Any:
    import logging

    import torch
    from lightning import LightningModule, Trainer
    from torch.nn.functional import mse_loss

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(FEATURES, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_start(self) -> None:
            self.begun = time.perf_counter()

        def on_train_end(self) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            self.taken = time.perf_counter() - self.begun

    off = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    folder = os.environ["BENCH_ANSWER"] + ".lightning"
    batches = Ready(data) if isinstance(data, list) else data

    def run() -> tuple[float, int]:
        module = Module()
        trainer = Trainer(
            accelerator=device.type,
            devices=world,
            strategy="ddp" if world > 1 else "auto",
            max_steps=steps,
            max_epochs=-1,
            default_root_dir=folder,
            **({} if default else off),
        )
        trainer.fit(module, batches)
        return module.taken, steps

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="time training steps beside the peers")
    parser.add_argument("--procs", type=int, choices=(1, 2))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    result = measure(given.rounds, (given.procs,) if given.procs else (1, 2))
    print(json.dumps(result["microseconds_per_step"], indent=1))
    for row in result["figures"]:
        print(f"{row['what']:<70}{row['median']:>8} [{row['min']}–{row['max']}]  {row['at_most']}")


if __name__ == "__main__":
    main()
