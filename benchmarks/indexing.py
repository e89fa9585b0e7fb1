"""Finding the samples of tar shards, which is done once, beside reading and listing them.

    python benchmarks/indexing.py [--rounds 5]      100,000 members in 4 shards of 262 MB
    python benchmarks/indexing.py --full            a million members in 40 shards, 10.5 GB

Members are pictures of 19 kB and class numbers in turn. Times are of the clock.
- reading: `cat SHARDS > /dev/null`.
- tar t: one after the other.
- Echelon: opening the shards without an index, which is written beside them. From a gigabyte on,
  this takes several processes, whose start is counted.
Once with the files in the page cache, and once from the disk: the cache is told to drop them before
each turn (what lies below a virtual disk may still have them).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common import (
    Figure,
    Result,
    compute_ratios,
    environment,
    make_figure,
    measure_in_turns,
)

ROUNDS = 5
SHARDS, FULL_SHARDS = 4, 40
MEMBERS_PER_SHARD = 25_000
PICTURE_BYTES = 19_000
READING = "reading"


def write_shard(file: Path) -> None:
    picture = os.urandom(PICTURE_BYTES)
    with file.open("wb", buffering=8 << 20) as tar:
        for number in range(MEMBERS_PER_SHARD):
            ending, data = ("cls", b"7") if number % 2 else ("jpg", picture)
            member = tarfile.TarInfo(f"{number // 2:08}.{ending}")
            member.size = len(data)
            tar.write(member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
        tar.write(bytes(10240))


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())


def read(files: Sequence[Path]) -> None:
    run(["cat", *map(str, files)])


def list_members(files: Sequence[Path]) -> None:
    for file in files:
        run(["tar", "tf", str(file)])


def index(files: Sequence[Path]) -> None:
    from echelon.data.formats.tar_files import TarReader

    shutil.rmtree(files[0].parent / ".echelon", ignore_errors=True)
    assert len(TarReader(files)) == len(files) * MEMBERS_PER_SHARD // 2


def drop_from_cache(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)  # what is not written yet cannot be dropped
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def time_turn(work: partial[None], files: Sequence[Path], is_cold: bool) -> float:
    if is_cold:
        for file in files:
            drop_from_cache(file)
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure_places(files: Sequence[Path], rounds: int) -> list[Figure]:
    rows = []
    works = {READING: read, "tar t": list_members, "Echelon": index}
    for place, is_cold in (("from the page cache", False), ("from the disk", True)):
        turns = {
            who: partial(time_turn, partial(work, files), files, is_cold)
            for who, work in works.items()
        }
        seconds = measure_in_turns(turns, rounds)
        members = len(files) * MEMBERS_PER_SHARD
        for who in (READING, "tar t"):
            rows.append(
                make_figure(
                    f"index of {members:,} members {place}: Echelon, × {who}",
                    compute_ratios(seconds["Echelon"], seconds[who]),
                    1.2 if who == READING else None,
                )
            )
        rows += [make_figure(f"{place}: {who}", taken, unit="s") for who, taken in seconds.items()]
    return rows


def measure(rounds: int = ROUNDS, shards: int = SHARDS) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    try:
        files = [folder / f"train-{number:03}.tar" for number in range(shards)]
        for file in files:
            write_shard(file)
        rows = measure_places(files, rounds)
    finally:
        shutil.rmtree(folder)
    return {"config": {"rounds": rounds, "shards": shards}, "figures": rows, "seconds": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--full", action="store_true", help="a million members")
    given = parser.parse_args()
    for row in measure(given.rounds, FULL_SHARDS if given.full else SHARDS)["figures"]:
        print(f"{row['what']:<75}{row['median']:>9} {row['unit']} [{row['min']}–{row['max']}]")


if __name__ == "__main__":
    sys.exit(main())
