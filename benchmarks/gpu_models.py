"""Models of the middle size on one NVIDIA GPU, in bf16: what a step costs beside a plain loop.

    PYTHONPATH=src:carried python3 benchmarks/gpu_models.py [--compile] [--only gpt …] [--quick]

The models are those of mid_size_models.py, each with a small and a large batch; their data are
tensors. Everybody trains in turns in one process, as in steps.py, and all of them have their data
on the GPU:

- Echelon: what `echelon train` runs, with its metrics, stop check and sign of life.
- plain loop: a permutation of the samples per epoch, autocast, backward, step; nothing is logged.
- Accelerate, and Lightning with everything off: given batches that lie on the GPU already.

Models of convolutions have their channels last: trainer.channels_last=true, and `model.to` with the
others. With --compile, models are compiled: trainer.compile=true beside torch.compile(model).

A process of each model prepares itself, several at a time; then they train against the clock, one
at a time. What was measured when time is up (--limit-s) is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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

import steps
from common import Figure, Result, compute_ratios, environment, make_figure, measure_in_turns

BATCHES = {
    "resnet18": (128, 512),
    "resnet50": (32, 128),
    "vit_s": (32, 128),
    "unet": (8, 32),
    "diffusion": (32, 128),
    "lstm": (32, 128),
    "gpt": (16, 64),
    "gnn": (32, 512),
    "recommender": (1024, 16384),
    "mlp": (128, 4096),
    "speech_encoder": (8, 32),
}
WITH_CONVOLUTIONS = ("resnet18", "resnet50", "unet", "diffusion")
ROUNDS, TURN_S, EPOCH_BATCHES = 3, 0.5, 32
OURS, PLAIN, ACCELERATE, LIGHTNING = "Echelon", "a plain loop", "Accelerate", "Lightning, off"
PLAIN_TARGET, PEER_TARGET = 1.0, 0.7
STARTED_AT_ONCE = 6
ENTRY = "BENCH_MODEL"


# --- the side that starts `echelon train` -------------------------------------------------------


def measure(
    is_compiled: bool = False,
    only: tuple[str, ...] = (),
    device: str = "cuda",
    limit_s: float = 220.0,
) -> Result:
    ends = time.monotonic() + limit_s
    wanted = [
        (name, size)
        for name, sizes in BATCHES.items()
        if not only or name in only
        for size in (sizes if not is_compiled else sizes[:1])
    ]
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    children = {
        (name, size): start_child(name, size, is_compiled, device, folder / f"{name}-{size}")
        for name, size in wanted
    }
    own = {key: folder / f"{key[0]}-{key[1]}" for key in children}
    try:
        let_start(own, children)
        for key, child in children.items():
            wait_until(partial(is_ready, own[key], child), child, ends - limit_s / 3)
        for key, child in children.items():
            (own[key] / "go").touch()
            answer = own[key] / "answer.json"
            wait_until(answer.exists, child, ends)
            name, size = key
            label = f"{name}, batch {size:,}" + (", compiled" if is_compiled else "")
            if answer.exists():
                found[label] = json.loads(answer.read_text())
            else:
                failed[label] = (own[key] / "output").read_text()[-600:] or "time was up"
            child.kill()
            child.wait()
    finally:
        for child in children.values():
            child.kill()
        shutil.rmtree(folder, ignore_errors=True)
    rows = [row for label, told in found.items() for row in list_figures(label, told["seconds"])]
    devices = {told["device"] for told in found.values()} or {"none"}
    return {
        "config": {
            "device": devices.pop(),
            "compiled": is_compiled,
            "rounds": ROUNDS,
            "missing": failed,
        },
        "figures": rows,
        "milliseconds_per_step": {
            label: {
                who: make_figure(who, [1e3 * s for s in v], unit="ms")
                for who, v in told["seconds"].items()
            }
            for label, told in found.items()
        },
    }


def start_child(
    name: str, size: int, is_compiled: bool, device: str, folder: Path
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    env = environment(
        **{ENTRY: f"{name} {size} {int(is_compiled)} {folder}"}, OMP_NUM_THREADS="1", COLUMNS="100"
    )
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    words = [
        *("train", f"experiment={Path(__file__).resolve()}:experiment", f"run.dir={folder}/runs"),
        *(f"trainer.batch_size={size}", "trainer.steps=1000000", "trainer.save.epochs=null"),
        *("track.progress=lines", f"trainer.compile={str(is_compiled).lower()}"),
        *(["trainer.precision=bf16"] if device == "cuda" else []),
        *(["trainer.channels_last=true"] if name in WITH_CONVOLUTIONS else []),
    ]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "echelon", *words], env=env, stdout=output, stderr=output
        )


def let_start(own: dict[Any, Path], children: dict[Any, subprocess.Popen[bytes]]) -> None:
    """Let a few prepare themselves at a time, in a thread: all at once would wait for each other
    for longer."""

    def run() -> None:
        begun: list[Any] = []
        for key in children:
            while sum(not is_ready(own[k], children[k]) for k in begun) >= STARTED_AT_ONCE:
                time.sleep(0.05)
            with contextlib.suppress(FileNotFoundError):  # it is all over
                (own[key] / "begin").touch()
            begun.append(key)

    threading.Thread(target=run, daemon=True).start()


def is_ready(own: Path, child: subprocess.Popen[bytes]) -> bool:
    return (own / "ready").exists() or child.poll() is not None


def wait_until(is_true: Callable[[], bool], child: subprocess.Popen[bytes], ends: float) -> bool:
    while not is_true():
        if child.poll() is not None or time.monotonic() > ends:
            return is_true()
        time.sleep(0.02)
    return True


def list_figures(label: str, seconds: dict[str, list[float]]) -> Iterator[Figure]:
    """With its small batch a model waits for the host, and a loop that is better gains something;
    with the large one the GPU is busy anyway."""
    name, _, size = label.removesuffix(", compiled").replace(",", "").partition(" batch ")
    is_small = int(size) == BATCHES[name][0]
    for peer, goal in ((PLAIN, PLAIN_TARGET), (ACCELERATE, PEER_TARGET), (LIGHTNING, PEER_TARGET)):
        if peer in seconds:
            at_most = goal if peer == PLAIN or is_small else None
            ratios = compute_ratios(seconds[OURS], seconds[peer])
            yield make_figure(f"{label}: a step, × {peer}", ratios, at_most)


# --- the side inside `echelon train` ------------------------------------------------------------


def experiment(cfg: Any) -> Any:
    """One of the models; and instead of once, `train` is called between the others."""
    from echelon import Experiment
    from echelon.train import worker
    from mid_size_models import MAKERS, make_optimizer

    name, size, _, folder = os.environ[ENTRY].split()
    while not (Path(folder) / "begin").exists():
        time.sleep(0.05)
    globals()["_train"], worker.train = worker.train, take_turns
    problem = MAKERS[name](int(size) * EPOCH_BATCHES)
    globals()["_problem"] = problem
    return Experiment(
        problem.model, make_optimizer(name, problem.model), problem.loss, problem.data
    )


def take_turns(t: Any) -> Any:
    """In the place of echelon.train.loop.train; Echelon's own is `_train`."""
    import torch

    from echelon.errors import ExitCode

    name, size, is_compiled, own = os.environ[ENTRY].split()
    folder = Path(own)
    data = tuple(tensor.to(t.device) for tensor in globals()["_problem"].data)
    ready = list(zip(*(column.split(int(size)) for column in data), strict=True))
    make = partial(make_copy, name, t.device, is_compiled == "1")
    contestants: dict[str, Callable[[int], None] | None] = {
        PLAIN: make_plain_loop(make, data, int(size)),
        OURS: partial(train_echelon, t),
    }
    if is_compiled == "0":
        contestants[ACCELERATE] = steps.optional(make_accelerate, make, ready)
        contestants[LIGHTNING] = steps.optional(make_lightning, make, ready, t.device, own)
    running = {name: run for name, run in contestants.items() if run is not None}
    for run in running.values():
        run(12)  # compiles, allocates, captures
    begun = time.perf_counter()
    running[PLAIN](5)
    synchronize(t.device)
    count = max(10, min(1000, int(TURN_S / ((time.perf_counter() - begun) / 5))))
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    seconds = measure_in_turns(
        {name: partial(time_turn, run, count, t.device) for name, run in running.items()}, ROUNDS
    )
    on = torch.cuda.get_device_name() if t.device.type == "cuda" else "cpu"
    text = json.dumps({"seconds": seconds, "steps": count, "device": on})
    (folder / "answer.part").write_text(text)
    (folder / "answer.part").rename(folder / "answer.json")
    return ExitCode.OK


def time_turn(run: Callable[[int], Any], count: int, device: Any) -> float:
    synchronize(device)
    begun = time.perf_counter()
    taken = run(count)
    synchronize(device)
    return (taken or time.perf_counter() - begun) / count


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def train_echelon(t: Any, count: int) -> None:
    t.total_steps = t.saved_step = t.step + count  # as if saved: the end of a run always saves
    globals()["_train"](t)


def make_copy(name: str, device: Any, is_compiled: bool) -> tuple[Any, Any, Any, Any]:
    """A model and an optimizer of its own, the loss, and autocast."""
    import torch

    from mid_size_models import MAKERS, make_optimizer

    problem = MAKERS[name](1)
    model = problem.model.to(device).train()
    if name in WITH_CONVOLUTIONS:
        model.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(name, model)
    cast = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")
    return torch.compile(model) if is_compiled else model, optimizer, problem.loss, cast


def make_plain_loop(make: Callable[[], Any], data: Any, size: int) -> Callable[[int], None]:
    import torch

    model, optimizer, loss_of, cast = make()
    samples, device = len(data[0]), data[0].device
    order = torch.randperm(samples, device=device)

    def run(count: int) -> None:
        nonlocal order
        for number in range(count):
            start = number * size % samples
            if start == 0:
                order = torch.randperm(samples, device=device)
            *inputs, target = (column[order[start : start + size]] for column in data)
            optimizer.zero_grad()
            with cast():
                loss = loss_of(model(*inputs), target)
            loss.backward()
            optimizer.step()

    return run


def make_accelerate(make: Callable[[], Any], ready: Any) -> Callable[[int], None]:
    from accelerate import Accelerator

    model, optimizer, loss_of, _ = make()
    on_gpu = next(model.parameters()).is_cuda
    made = Accelerator(cpu=not on_gpu, mixed_precision="bf16" if on_gpu else "no")
    model, optimizer = made.prepare(model, optimizer)

    def run(count: int) -> None:
        for number in range(count):
            *inputs, target = ready[number % len(ready)]
            optimizer.zero_grad()
            with made.autocast():
                loss = loss_of(model(*inputs), target)
            made.backward(loss)
            optimizer.step()

    return run


def make_lightning(
    make: Callable[[], Any], ready: Any, device: Any, folder: str
) -> Callable[[int], float]:
    import logging

    try:
        from lightning import LightningModule, Trainer
    except ModuleNotFoundError:
        from pytorch_lightning import LightningModule, Trainer

    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    given, made, loss_of, _ = make()

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = given

        def training_step(self, batch: Any, _: int) -> Any:
            *inputs, target = batch
            return loss_of(self.model(*inputs), target)

        def configure_optimizers(self) -> Any:
            return made

        def on_train_start(self) -> None:
            synchronize(device)
            self.begun = time.perf_counter()

        def on_train_end(self) -> None:
            synchronize(device)
            self.taken = time.perf_counter() - self.begun

    module = Module()

    def run(count: int) -> float:
        trainer = Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if device.type == "cuda" else "32-true",
            max_steps=count,
            max_epochs=-1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, steps.Ready(ready))
        return float(module.taken)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="models of the middle size beside a plain loop")
    parser.add_argument("--compile", action="store_true", help="all models compiled")
    parser.add_argument("--only", nargs="*", default=(), choices=tuple(BATCHES), metavar="MODEL")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=220.0, help="end by then")
    parser.add_argument("--json", type=Path, help="write all of it there")
    given = parser.parse_args()
    result = measure(given.compile, tuple(given.only), given.device, given.limit_s)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1, ensure_ascii=False))
    for label, each in result["milliseconds_per_step"].items():
        line = "  ".join(f"{who} {row['median']:g}" for who, row in each.items())
        print(f"{label:<36}{line}")
    for row in result["figures"]:
        print(f"{row['what']:<64}{row['median']:>8} [{row['min']}–{row['max']}]")
    print(json.dumps(result["config"]["missing"], indent=1))


if __name__ == "__main__":
    main()
