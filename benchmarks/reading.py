"""From a csv of 20 million ratings to arrays, beside pandas, polars and pyarrow.

    python benchmarks/reading.py [--rows 20000000] [--rounds 5]

Each contestant is a process of its own, in turns, from a file that is in memory already; ratios are
within a round. Time is from before its imports to the last value; memory is the most that was
resident at once. "echelon, prepare" does more than the others: it reads, checks every value, gives
dense ids, looks for repeated ratings, fingerprints the file, and writes and flushes the cache. The
others only read: pandas with its pyarrow engine as people call it, then with types given, then with
what it takes to have dense ids; polars and pyarrow with types, whole or in blocks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

from common import (
    HERE,
    Result,
    compute_ratios,
    environment,
    make_figure,
    measure_in_turns,
    read_versions,
)

ROWS, USERS, MOVIES = 20_000_000, 138_000, 27_000
ROUNDS = 5
PANDAS = "pandas with pyarrow"
OURS = "echelon, prepare"
CACHED = "echelon, from the cache, with its imports"
CALL = "echelon, from the cache"

_TYPED = "{'userId': 'int32', 'movieId': 'int32', 'rating': 'float32', 'timestamp': 'int64'}"
_ARROW = (
    "import pyarrow as pa; from pyarrow import csv;"
    "types = csv.ConvertOptions(column_types=dict(userId=pa.int32(), movieId=pa.int32(),"
    "rating=pa.float32(), timestamp=pa.int64()));"
)
_POLARS = (
    "import polars as pl;"
    "types = dict(userId=pl.Int32, movieId=pl.Int32, rating=pl.Float32, timestamp=pl.Int64);"
)
_LOAD = (
    "from echelon.recipes.movielens.data import load_ratings; n = len(load_ratings(folder).users)"
)
WAYS = {
    PANDAS: "import pandas; n = len(pandas.read_csv(csv_file, engine='pyarrow'))",
    "pandas with pyarrow and types": (
        f"import pandas; n = len(pandas.read_csv(csv_file, engine='pyarrow', dtype={_TYPED}))"
    ),
    "pandas with pyarrow, and dense ids": (
        "import pandas; table = pandas.read_csv(csv_file, engine='pyarrow');"
        "users = pandas.factorize(table.userId, sort=True);"
        "items = pandas.factorize(table.movieId, sort=True); n = len(table)"
    ),
    "polars, whole": _POLARS + "n = len(pl.read_csv(csv_file, schema=types))",
    "polars, blocks": (
        _POLARS + "n = sum(map(len, pl.scan_csv(csv_file, schema=types).collect_batches()))"
    ),
    "pyarrow, whole": _ARROW + "n = len(csv.read_csv(csv_file, convert_options=types))",
    "pyarrow, blocks": _ARROW + "n = sum(map(len, csv.open_csv(csv_file, convert_options=types)))",
    OURS: f"import shutil; shutil.rmtree(folder + '/.echelon', ignore_errors=True); {_LOAD}",
    CACHED: _LOAD,
    CALL: (
        "from echelon.recipes.movielens.data import load_ratings; "
        f"began = time.perf_counter(); {_LOAD}"
    ),
}
TARGETS = {OURS: 0.5}
"""Of time and of memory, beside pandas."""

_CHILD = """
import json, sys, time
began = time.perf_counter()
folder = sys.argv[1]
csv_file = folder + "/ratings.csv"
{way}
seconds = time.perf_counter() - began
with open("/proc/self/status") as status:
    [peak] = [line.split()[1] for line in status if line.startswith("VmHWM")]
print(json.dumps([n, seconds, int(peak) / 1e3]))
"""


def measure(rows: int = ROWS, rounds: int = ROUNDS) -> Result:
    memory: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        make_ratings_file(rows, Path(folder))
        size = (Path(folder) / "ratings.csv").stat().st_size
        ways: dict[str, Callable[[], float]] = {
            name: partial(time_reading, way, folder, rows, memory[name])
            for name, way in WAYS.items()
        }
        seconds = measure_in_turns(ways, rounds)
    memory = {name: taken[-rounds:] for name, taken in memory.items()}  # the first was a warm-up
    beside = [(name, TARGETS.get(name)) for name in WAYS if name not in (PANDAS, CACHED, CALL)]
    return {
        "config": {
            "rows": rows,
            "megabytes": round(size / 1e6),
            "arrays_megabytes": round(20 * rows / 1e6),
            "rounds": rounds,
            "ways": WAYS,
        },
        "versions": read_versions()
        | {n: metadata.version(n) for n in ("pandas", "polars", "pyarrow")},
        "figures": [
            *(
                make_figure(
                    f"time: {name}, × {PANDAS}",
                    compute_ratios(seconds[name], seconds[PANDAS]),
                    most,
                )
                for name, most in beside
            ),
            *(
                make_figure(
                    f"memory: {name}, × {PANDAS}",
                    compute_ratios(memory[name], memory[PANDAS]),
                    most,
                )
                for name, most in beside
            ),
            *(
                make_figure(f"start: {name}", [1e3 * s for s in seconds[name]], most, "ms")
                for name, most in ((CALL, 10.0), (CACHED, None))
            ),
        ],
        "seconds": {n: make_figure(n, v, unit="s") for n, v in seconds.items()},
        "megabytes": {n: make_figure(n, v, unit="MB") for n, v in memory.items()},
    }


def make_ratings_file(rows: int, folder: Path) -> None:
    """By a child, so that nothing of it is in memory here."""
    code = (
        "import sys; from pathlib import Path;"
        "from echelon.recipes.movielens.data.synthetic import make_synthetic, write_csv;"
        f"write_csv(make_synthetic({rows}, {USERS}, {MOVIES}, seed=0), Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True, env=environment())


def time_reading(way: str, folder: str, rows: int, memory: list[float]) -> float:
    command = [sys.executable, "-c", _CHILD.format(way=way), folder]
    said = subprocess.run(
        command, env=environment(), cwd=HERE, check=True, stdout=subprocess.PIPE, text=True
    )
    n, seconds, megabytes = json.loads(said.stdout)
    if n != rows:
        raise RuntimeError(f"{n} rows came of {rows}")
    memory.append(megabytes)
    return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="read ratings beside pandas")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    result = measure(given.rows, given.rounds)
    rows = [*result["figures"], *result["seconds"].values(), *result["megabytes"].values()]
    for row in rows:
        print(f"{row['what']:<70}{row['median']:>8} {row['unit']} [{row['min']}–{row['max']}]")


if __name__ == "__main__":
    main()
