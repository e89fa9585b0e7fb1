"""A training on one NVIDIA GPU, fed from tar shards of JPEG pictures beside the same from memory.

    PYTHONPATH=src:carried python3 benchmarks/gpu_feeding.py [--device cpu] [--quick]

A ResNet-50 of torchvision, bf16, 256 pictures a step, made-up pictures of 256 × 256. From tar: each
is decoded and cropped at random to 224 × 224 by loader processes, two fewer than there are cores.
From memory: the pictures lie cropped on the GPU. Everybody in turns, each in a process of its own;
a figure is the time of a step after the first ones. No step is captured as a CUDA graph, because
one over a Dataset cannot be. What the training waits for data is in its metrics (`data_ms`).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common import Result, compute_ratios, environment, make_figure, measure_in_turns
from echelon.runs.metrics_file import read_metrics

HERE = Path(__file__).resolve()
ROUNDS, STEPS, LOG_STEPS = 3, 160, 20
PICTURES, SHARDS, SIDE, CROP, BATCH = 8192, 8, 256, 224, 256
AT_MOST = 1.02
TAR, MEMORY = "tar", "memory"


def measure(device: str = "cuda", quick: bool = False) -> Result:
    rounds, steps, pictures, batch = (1, 6, 64, 8) if quick else (ROUNDS, STEPS, PICTURES, BATCH)
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        write_shards(Path(folder), pictures)
        words = [
            *(f"folder={folder}", f"pictures={pictures}", f"trainer.steps={steps}"),
            *(f"trainer.batch_size={batch}", f"trainer.log_steps={2 if quick else LOG_STEPS}"),
        ]
        waits: dict[str, list[float]] = {TAR: [], MEMORY: []}
        seconds = measure_in_turns(
            {
                TAR: partial(time_s, device, [*words, f"trainer.loader_workers={workers}"], waits),
                MEMORY: partial(time_s, device, [*words, "from_memory=true"], waits),
            },
            rounds,
            warm_up=0,
        )
    figures = [
        make_figure(
            "a step fed from tar, × the same from memory",
            compute_ratios(seconds[TAR], seconds[MEMORY]),
            AT_MOST,
        ),
        *(
            make_figure(f"from {name}: a step", [1e3 * s for s in seconds[name]], unit="ms")
            for name in seconds
        ),
        *(
            make_figure(f"from {name}: of it, waiting for data", waits[name], unit="ms")
            for name in waits
            if waits[name]
        ),
    ]
    config = {"rounds": rounds, "steps": steps, "loader_processes": workers, "batch": batch}
    return {"config": config, "figures": figures}


def write_shards(folder: Path, pictures: int) -> None:
    """Smooth noise, so that a picture has about as many bytes as a photograph of its size."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for number in range(shard, pictures, SHARDS):
                small = draw.integers(0, 256, (48, 48, 3), dtype=np.uint8)
                picture = Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
                data = io.BytesIO()
                picture.save(data, "JPEG", quality=90)
                add_member(tar, f"{number:06}.jpg", data.getvalue())
                add_member(tar, f"{number:06}.cls", str(number % 1000).encode())


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def time_s(device: str, words: list[str], waits: dict[str, list[float]]) -> float:
    env = environment(**({} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}))
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        command = [
            *("train", f"experiment={HERE}:experiment", "trainer.precision=bf16"),
            *("trainer.capture=never", "trainer.save.epochs=null", "track.progress=none"),
            *(*words, f"run.dir={folder}", "run.name=a"),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "echelon", *command],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        first, *others = read_metrics(Path(folder) / "a" / "metrics.jsonl")[1:]
    waited = [line["data_ms"] for line in others if "data_ms" in line]
    if waited:
        waits[MEMORY if "from_memory=true" in words else TAR].append(statistics.mean(waited))
    return float(others[-1]["time"] - first["time"]) / (others[-1]["step"] - first["step"])


@dataclass
class Settings:
    folder: str
    pictures: int
    from_memory: bool = False


def experiment(cfg: Settings) -> Any:
    import torch
    from torch import Tensor, nn
    from torchvision.models import resnet50

    import echelon

    def crop(sample: dict[str, Any]) -> tuple[Tensor, int]:
        top, left = torch.randint(SIDE - CROP + 1, (2,)).tolist()
        pixels = np.asarray(sample["jpg"])[top : top + CROP, left : left + CROP]
        return torch.from_numpy(pixels.copy()), int(sample["cls"])

    def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        pixels, labels = batch
        rows = pixels.permute(0, 3, 1, 2)  # channels last, as the pixels lie
        return model(rows.to(torch.float32).sub(127).div(64)), labels

    data: Any
    if cfg.from_memory:
        draws = torch.Generator().manual_seed(0)
        pixels = torch.randint(256, (1024, CROP, CROP, 3), dtype=torch.uint8, generator=draws)
        rows = torch.arange(cfg.pictures)
        data = (pixels[rows % len(pixels)], rows % 1000)
    else:
        data = echelon.data.open(f"{cfg.folder}/*.tar", transform=crop)
    model = resnet50().to(memory_format=torch.channels_last)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        loss=nn.functional.cross_entropy,
        train_data=data,
        predict=predict,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="time a training that is fed from files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    given = parser.parse_args()
    print(json.dumps(measure(given.device, given.quick), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
