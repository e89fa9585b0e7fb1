"""An epoch from an object store, from nothing, and one after it: time, and bytes fetched.

    python benchmarks/object_store.py [--rounds 3]

A real server of S3's protocol on loopback (moto's), behind a proxy that waits 20 ms before every
answer and counts what it sends. 640 samples of 100 kB, which nothing compresses, in 8 shards of
8 MB; batches of 32, in one process. Every turn is a process of its own with an empty cache, on one
core with the processes that it starts; its time, by the clock, is from opening the data to the last
batch. The libraries are imported before. All shuffle.
- Echelon: tar shards, which it has never seen: finding the samples is counted.
- webdataset: the same shards through curl, with a buffer of 1,000 samples. It keeps nothing.
- streaming and litData: their own formats, written before, with shards of the same size.
Bytes fetched: all that the server sent in the first epoch, × those of the samples as they are
stored. The second epoch is read in the same process, by each as it does that.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

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
from data_contestants import import_streaming

sys.path.append(str(HERE.parent / "tests" / "helpers"))
from object_store_server import ObjectStoreServer, serve_object_store

ROUNDS = 3
SAMPLES, SAMPLE_BYTES, SHARDS = 640, 100_000, 8
DELAY_S = 0.02
FORMATS = {"Echelon": "tar", "webdataset": "tar", "streaming": "mds", "litData": "litdata"}


def make_sample(number: int) -> dict[str, bytes]:
    import numpy as np

    return {"bin": np.random.default_rng(number).bytes(SAMPLE_BYTES)}


def write_formats(folder: Path) -> None:
    import litdata

    (folder / "tar").mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / "tar" / f"train-{shard:03}.tar", "w") as tar:
            for number in range(shard * SAMPLES // SHARDS, (shard + 1) * SAMPLES // SHARDS):
                member = tarfile.TarInfo(f"{number:06}.bin")
                member.size = SAMPLE_BYTES
                tar.addfile(member, io.BytesIO(make_sample(number)["bin"]))
    size = SAMPLES * SAMPLE_BYTES // SHARDS
    with import_streaming().MDSWriter(
        out=str(folder / "mds"), columns={"bin": "bytes"}, size_limit=size + (1 << 16)
    ) as writer:
        for number in range(SAMPLES):
            writer.write(make_sample(number))
    litdata.optimize(
        make_sample,
        list(range(SAMPLES)),
        str(folder / "litdata"),
        chunk_size=SAMPLES // SHARDS,
        num_workers=1,
        verbose=False,
    )


def upload(folder: Path, server: ObjectStoreServer) -> dict[str, int]:
    """Return the bytes of each format."""
    sizes = dict.fromkeys(FORMATS.values(), 0)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = str(file.relative_to(folder))
        server.put(key, file.read_bytes())
        sizes[key.partition("/")[0]] += file.stat().st_size
    return sizes


class Turn(NamedTuple):
    """What was measured of one contestant in one round."""

    first_s: float
    second_s: float
    bytes_sent: int
    """In the first epoch."""


def run_turn(who: str, server: ObjectStoreServer, turns: dict[str, list[Turn]]) -> float:
    folder = tempfile.mkdtemp(prefix="echelon-bench-")
    core = max(os.sched_getaffinity(0))
    program = str(HERE / "data_contestants.py")
    shards = " ".join(f"train-{shard:03}.tar" for shard in range(SHARDS))
    env = environment(**server.environment, BENCH_BUCKET=server.bucket, BENCH_SHARDS=shards)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have theirs
    command = [sys.executable, program, "objects", who, folder, str(core)]
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()  # it is ready
            server.reset_counts()
            seconds, sent = [], []
            for _ in range(2):
                process.stdin.write("\n")
                process.stdin.flush()
                _, taken, samples = process.stdout.readline().split()
                assert int(samples) == SAMPLES, f"{who}: {samples} samples"
                seconds.append(float(taken))
                sent.append(server.bytes_sent)
            process.stdin.close()
    finally:
        shutil.rmtree(folder)
    turns[who].append(Turn(*seconds, sent[0]))
    return seconds[0]


def measure(rounds: int = ROUNDS) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    turns: dict[str, list[Turn]] = {who: [] for who in FORMATS}
    try:
        with serve_object_store() as server:
            write_formats(folder)
            sizes = upload(folder, server)
            server.delay_s = DELAY_S
            seconds = measure_in_turns(
                {who: partial(run_turn, who, server, turns) for who in FORMATS}, rounds
            )
    finally:
        shutil.rmtree(folder)
    measured = {who: each[-rounds:] for who, each in turns.items()}  # without the warm-up
    peers = [who for who in seconds if who != "Echelon"]
    best = min(peers, key=lambda who: median(seconds[who]))
    rows: list[Figure] = [
        make_figure(f"Echelon, × {who}", compute_ratios(seconds["Echelon"], seconds[who]))
        for who in peers
    ]
    rows.append(
        make_figure(
            f"Echelon, × the best of them, {best}",
            compute_ratios(seconds["Echelon"], seconds[best]),
            1 / 1.2,
        )
    )
    for who, each in measured.items():
        shares = [turn.bytes_sent / sizes[FORMATS[who]] for turn in each]
        goal = 1.05 if who == "Echelon" else None
        rows.append(make_figure(f"bytes fetched, × the data: {who}", shares, goal))
    rows += [make_figure(f"an epoch: {who}", taken, unit="s") for who, taken in seconds.items()]
    for who, each in measured.items():
        rows.append(make_figure(f"the epoch after: {who}", [t.second_s for t in each], unit="s"))
    return {"config": {"rounds": rounds, "delay_s": DELAY_S}, "figures": rows, "seconds": {}}


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure, ROUNDS)
