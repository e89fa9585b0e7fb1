"""How well data that lies in files is shuffled, and what it costs to start an epoch of it.

    python benchmarks/shuffle_quality.py [--rounds 5]

A million samples of 10 kB. A round is an epoch with a seed of its own; all figures are of one
reader, which is the global order.
- Echelon: chunks of 4 MB (400 samples) in windows of 256 MB, its default; and of 64 MB.
- webdataset: 40 shards of 250 MB in a random order, then a buffer of 1,000 samples (what its
  documentation shows) or of 25,600 (256 MB, our window). Its buffer is written down here: it is
  filled with two samples for each that is drawn from it.
- streaming: MosaicML's own functions, with its default shards of 64 MB: py1e with its default block
  of 2¹⁸ samples (2.6 GB here), py1e with our window as its block, and py2s. Left out where
  mosaicml-streaming is not installed (`pip install --no-deps mosaicml-streaming` is enough).
- all together: a random permutation, as good as it gets.
Rank correlation: of the position and the number of a sample, without its sign. Neighbours kept: how
many of a million samples are followed by one that is beside it in the file. Of one piece: the share
followed by one of the same 400. Parts in a batch: how many hundredths of the data are in 256
samples in a row, as classes would be in data that is sorted by class.
Starting an epoch is the time of the processor, in a process that has drawn a small epoch before.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common import Figure, Result, make_figure, run_benchmark
from echelon.data.chunk_order import ChunkedOrder, ChunkWindows
from echelon.data.formats.reader import ChunkTable
from order import resident

ROUNDS = 5
SAMPLES = 1_000_000
SAMPLE_BYTES = 10_000
CHUNK = 400
WINDOW = 25_600
SHARD = 25_000
STREAMING_SHARD = 6_400
BATCH = 256
LARGE_CHUNKS = (250_000, 1_000_000)
"""Of 10⁹ samples of 1 kB: pieces of 4 MB, and of 1 MB."""

Order = NDArray[np.int64]


# --- the contestants ----------------------------------------------------------------------------


def make_windows(samples: int, chunk: int, sample_bytes: int, window_bytes: int) -> ChunkWindows:
    starts = np.arange(0, samples + 1, chunk, dtype=np.int64)
    return ChunkWindows(ChunkTable(starts, np.diff(starts) * sample_bytes), window_bytes)


def order_ours(window_bytes: int, seed: int) -> Order:
    windows = make_windows(SAMPLES, CHUNK, SAMPLE_BYTES, window_bytes)
    order = ChunkedOrder(SAMPLES, BATCH, 0, 1, seed, 0, windows=windows)
    drawn: Order = torch.cat([indices for indices, _ in order.iter_blocks()]).numpy()
    return drawn


def order_like_webdataset(buffer_samples: int, seed: int) -> Order:
    rng = random.Random(seed)
    shards = [range(first, first + SHARD) for first in range(0, SAMPLES, SHARD)]
    rng.shuffle(shards)
    stream = iter([sample for shard in shards for sample in shard])
    buffer: list[int] = []
    drawn: list[int] = []
    for sample in stream:
        buffer.append(sample)
        if len(buffer) < buffer_samples and (another := next(stream, None)) is not None:
            buffer.append(another)
        if len(buffer) >= min(100, buffer_samples):
            drawn.append(pick(buffer, rng))
    while buffer:
        drawn.append(pick(buffer, rng))
    return np.array(drawn)


def pick(buffer: list[int], rng: random.Random) -> int:
    place = rng.randrange(len(buffer))
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()


def order_like_streaming(name: str, block: int, seed: int) -> Order:
    folder = find_streaming()
    assert folder is not None
    shards = np.diff(np.append(np.arange(0, SAMPLES, STREAMING_SHARD), SAMPLES))
    shuffle = load_function(folder / "base" / "shuffle" / f"{name}.py", f"get_shuffle_{name}")
    order: Order = shuffle(shards, 1, seed, 0, block)
    return order


@cache
def find_streaming() -> Path | None:
    spec = importlib.util.find_spec("streaming")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def load_function(file: Path, name: str) -> Callable[..., Any]:
    """From the file: the package imports the clients of every cloud."""
    if file.stem == "py1e":  # of which it uses one function, for several nodes
        divide = load_function(file.with_name("py1s.py"), "divide_spans")
        module = ModuleType("streaming.base.shuffle.py1s")
        module.divide_spans = divide  # type: ignore[attr-defined]
        sys.modules["streaming.base.shuffle.py1s"] = module
        for parent in ("streaming", "streaming.base", "streaming.base.shuffle"):
            sys.modules.setdefault(parent, ModuleType(parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    function: Callable[..., Any] = getattr(loaded, name)
    return function


def order_together(seed: int) -> Order:
    return np.random.default_rng(seed).permutation(SAMPLES)


def list_contestants() -> dict[str, Callable[[int], Order]]:
    found: dict[str, Callable[[int], Order]] = {
        "Echelon, windows of 256 MB": partial(order_ours, WINDOW * SAMPLE_BYTES),
        "Echelon, windows of 64 MB": partial(order_ours, WINDOW * SAMPLE_BYTES // 4),
        "webdataset, shuffle(1000)": partial(order_like_webdataset, 1000),
        "webdataset, shuffle(25600)": partial(order_like_webdataset, WINDOW),
    }
    if find_streaming() is not None:
        found |= {
            "streaming, py1e": partial(order_like_streaming, "py1e", 1 << 18),
            "streaming, py1e of 256 MB": partial(order_like_streaming, "py1e", WINDOW),
            "streaming, py2s": partial(order_like_streaming, "py2s", 1 << 18),
        }
    return found | {"all together": order_together}


# --- measuring ----------------------------------------------------------------------------------


def measure_order(order: Order) -> dict[str, float]:
    assert np.array_equal(np.sort(order), np.arange(SAMPLES))
    steps = np.abs(np.diff(order))
    pieces = order // CHUNK
    parts = order[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH) // (SAMPLES // 100)
    parts.sort(axis=1)
    return {
        "rank correlation": abs(float(np.corrcoef(np.arange(SAMPLES), order)[0, 1])),
        "neighbours kept": float((steps == 1).sum()),
        "of one piece": 100 * float((np.diff(pieces) == 0).mean()),
        "parts in a batch": float(1 + (np.diff(parts, axis=1) != 0).sum(axis=1).mean()),
    }


UNITS = {"rank correlation": "", "neighbours kept": "", "of one piece": "%", "parts in a batch": ""}


def time_start(chunks: int, epoch: int, first_batch: int) -> float:
    """Milliseconds of the processor until a rank of 8 has its first samples."""
    windows = make_windows(10**9, 10**9 // chunks, 1000, 256 << 20)
    begun = time.process_time()
    order = ChunkedOrder(10**9, BATCH, 3, 8, 0, epoch, windows=windows)
    indices, counts = next(order.iter_blocks(first_batch))
    indices[: counts[0]].tolist()
    return 1e3 * (time.process_time() - begun)


def measure_memory(chunks: int) -> float:
    """Megabytes that a fresh process needs for that, with the table of chunks."""
    command = [sys.executable, __file__, "--memory", str(chunks)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(child.stdout)


def print_memory(chunks: int) -> None:
    torch.set_num_threads(1)
    order_ours(WINDOW * SAMPLE_BYTES, 0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    time_start(chunks, 1, 0)
    print((resident("VmHWM") - before) / 1e6)


def measure(rounds: int = ROUNDS) -> Result:
    torch.set_num_threads(1)
    rows: list[Figure] = []
    for chunks in LARGE_CHUNKS:
        time_start(chunks, 0, 0)
        starts = [time_start(chunks, 1, 0) for _ in range(rounds)]
        resumes = [time_start(chunks, 2, 3_000_000) for _ in range(rounds)]
        data = f"10⁹ samples in {chunks:,} chunks"
        rows += [
            make_figure(f"first batch of epoch 2, {data}", starts, 50.0, "ms"),
            make_figure(f"first batch after a resume, {data}", resumes, 50.0, "ms"),
            make_figure(f"memory for that, {data}", [measure_memory(chunks)], 100.0, "MB"),
        ]
    contestants = list_contestants()
    results = {
        who: [measure_order(order(seed)) for seed in range(rounds)]
        for who, order in contestants.items()
    }
    rows += [
        make_figure(f"{what}: {who}", [each[what] for each in of_rounds], unit=unit)
        for what, unit in UNITS.items()
        for who, of_rounds in results.items()
    ]
    note = (
        "An even shuffle has 2 neighbours kept, 0.04 % of one piece and 92.4 parts in a batch. "
        "Within a window every order is equally likely; between windows, chunks are as scattered "
        "as shards of 4 MB would be."
    )
    return {"config": {"rounds": rounds, "note": note}, "figures": rows, "seconds": {}}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print_memory(int(sys.argv[2]))
    else:
        run_benchmark(__doc__ or "", measure, ROUNDS)
