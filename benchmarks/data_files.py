"""Samples from files, on one core: pictures, tokens, rows of tables, and very small samples.

    python benchmarks/data_files.py [--rounds 5]

Every contestant is a process on one core without loader processes (`data_contestants.py`). Its time
is that of the processor for one epoch, from the request of the first batch to the last batch; the
next contestant's turn follows. All shuffle, but for pyarrow, and all data is in the page cache.
- images: 1,000 JPEGs of 256 × 256 in 4 shards, decoded, cut to 224 × 224 at random places, as
  tensors of bytes in batches of 64. Echelon decodes by `echelon.data.decode_pixels`, which is
  simplejpeg. webdataset reads the same tars through a buffer of 1,000 samples, streaming and
  litData their own formats with the bytes of the same files, torch's DataLoader the files
  themselves. They decode by PIL, as their documentation does. litData and the DataLoader are
  measured a second time with simplejpeg, which their users may call too, and litData with its own
  type of pictures, which torchvision decodes, where that is installed. "PIL alone" has all bytes
  in memory: no loader that decodes by PIL can be faster.
- tokens: windows of 1,024 uint16 of a file of 4 GB (a sparse file, read once before), widened to
  int64, in batches of 32: 20,000 windows a turn. The loop keeps the file mapped; nanoGPT's
  `get_batch` maps it for every batch. Both draw from anywhere in the file, Echelon in its windows.
- rows: 400,000 rows of Parquet with 10 columns (4 float32, 3 int64, float64, int32, a text of 12
  letters) in 8 row groups, in batches of 1,024 as tensors. Hugging Face's datasets in two ways: its
  Arrow copy of the files, shuffled (a tenth of an epoch), and its stream with a buffer of 1,000
  rows. pyarrow reads in the order of the file. Echelon opens the files anew for every epoch.
- small samples: 100 bytes each, in a `.npy` file, and in streaming's own format; batches of 256.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO

from common import (
    HERE,
    Figure,
    Result,
    compute_ratios,
    environment,
    make_figure,
    measure_in_turns,
    run_benchmark,
)
from data_contestants import CONTESTANTS, DRAWN_WINDOWS, FLOOR, ROW_BATCH, TOKEN_BATCH
from file_writers import IMAGES, ROWS, SMALL_SAMPLES, write_files

ROUNDS = 5
SAMPLES = {
    "images": IMAGES,
    "tokens": DRAWN_WINDOWS // TOKEN_BATCH * TOKEN_BATCH,
    "rows": ROWS,
    "small": SMALL_SAMPLES,
}
GOALS: dict[str, dict[str, float]] = {
    "images": {"the best of them": 1 / 1.2},
    "tokens": {"a memmap loop": 1 / 0.95, "nanoGPT's get_batch": 1 / 1.5},
    "rows": {
        "datasets": 1 / 1.5,
        "datasets, streaming": 1 / 1.5,
        "pyarrow's iter_batches": 1 / 0.9,
    },
    "small": {"DataLoader": 0.1, "streaming": 0.1},
}
"""At most so much of the other's time."""


@contextmanager
def start_contestants(task: str, folder: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All of a task, each ready and waiting for its turn on the same core."""
    core = max(os.sched_getaffinity(0))
    program = str(HERE / "data_contestants.py")
    env = environment(HF_HUB_OFFLINE="1")
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        for name in CONTESTANTS[task]:
            command = [sys.executable, program, task, name, str(folder), str(core)]
            started[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
            )
        for process in started.values():
            read_answer(process.stdout)
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def read_answer(stream: IO[str] | None) -> str:
    assert stream is not None
    if not (line := stream.readline()):
        raise RuntimeError("a contestant ended; see above for why")
    return line


def time_sample(process: subprocess.Popen[str], samples: int) -> float:
    """Seconds of the processor for a sample, of an epoch that has all, or a known part of them."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    seconds, _, count = read_answer(process.stdout).split()
    assert int(count) in (samples, samples // 10 // ROW_BATCH * ROW_BATCH), count
    return float(seconds) / int(count)


def measure_task(task: str, folder: Path, rounds: int) -> list[Figure]:
    samples = SAMPLES[task]
    with start_contestants(task, folder) as contestants:
        turns = {who: partial(time_sample, each, samples) for who, each in contestants.items()}
        seconds = measure_in_turns(turns, rounds)
    ours = seconds["Echelon"]
    peers = {who: taken for who, taken in seconds.items() if who != "Echelon"}
    best = min((who for who in peers if who != FLOOR), key=lambda who: median(peers[who]))
    goals = GOALS[task]
    rows = [
        make_figure(f"{task}: Echelon, × {who}", compute_ratios(ours, taken), goals.get(who))
        for who, taken in peers.items()
    ]
    if "the best of them" in goals:
        rows.append(
            make_figure(
                f"{task}: Echelon, × the best of them, {best}",
                compute_ratios(ours, peers[best]),
                goals["the best of them"],
            )
        )
    return rows + [
        make_figure(f"{task} per second and core: {who}", [1 / s for s in taken], unit="/s")
        for who, taken in seconds.items()
    ]


def measure(rounds: int = ROUNDS, tasks: Sequence[str] = tuple(SAMPLES)) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-", dir=os.environ.get("TMPDIR")))
    rows: list[Figure] = []
    try:
        for task in tasks:
            write_files(task, folder)
            rows += measure_task(task, folder, rounds)
    finally:
        shutil.rmtree(folder)
    return {"config": {"rounds": rounds}, "figures": rows, "seconds": {}}


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure, ROUNDS)
