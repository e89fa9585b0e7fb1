"""What all benchmarks share: a figure with its spread, the machine, and watching process trees.

Imports nothing heavy: a parent that holds torch would share its pages with what it measures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
PACKAGES = (
    *("torch", "lightning", "accelerate", "pytorch-ignite", "hydra-core", "torchmetrics"),
    *("webdataset", "mosaicml-streaming", "litdata", "datasets", "pyarrow", "pillow", "simplejpeg"),
)

Figure = dict[str, Any]
Result = dict[str, Any]


def make_figure(
    what: str, values: Sequence[float], at_most: float | None = None, unit: str = "×"
) -> Figure:
    """A row of a table: every value, the median and the spread, and what it should reach."""
    return {
        "what": what,
        "unit": unit,
        "at_most": at_most,
        "median": float(f"{statistics.median(values):.4g}"),
        "min": float(f"{min(values):.4g}"),
        "max": float(f"{max(values):.4g}"),
        "values": [float(f"{v:.4g}") for v in values],
    }


def reached_target(row: Figure) -> bool | None:
    return None if row["at_most"] is None else row["median"] <= row["at_most"]


def compute_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round, so that a slow moment of the machine falls on both."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def measure_in_turns(
    contestants: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """What each gave in each round; another one begins each time, as the first may be favoured."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            value = contestants[name]()
            if number >= 0:
                taken[name].append(value)
    return taken


def describe_machine() -> dict[str, Any]:
    model = _field(Path("/proc/cpuinfo"), "model name") or platform.machine()
    memory = _field(Path("/proc/meminfo"), "MemTotal") or "0 kB"
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory.split()[0]) / 1e6, 1),
        "system": platform.system() + " " + platform.release().split("-")[0],
    }


def read_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("echelon", *PACKAGES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _field(path: Path, name: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


# --- programs as a person types them ------------------------------------------------------------


def find_tool(name: str) -> str:
    """A command that is installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def environment(**extra: str) -> dict[str, str]:
    """Ours, without what an earlier launch left in it."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return kept | {"PYTHONWARNINGS": "ignore"} | extra


@contextlib.contextmanager
def start_program(command: Sequence[str], env: Mapping[str, str], folder: Path) -> Iterator[int]:
    """A program in a folder of its own; what it started ends with it. Gives its process id."""
    with (folder / "output.txt").open("wb") as output:
        program = subprocess.Popen(
            command, env=dict(env), cwd=folder, stdout=output, stderr=output, close_fds=True
        )
    try:
        yield program.pid
    finally:
        for pid in [program.pid, *descendants(program.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.wait()


def wait_for(found: Callable[[], Any], folder: Path, timeout_s: float = 120.0) -> Any:
    """Look every few milliseconds until something is there; else tell what the program said."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (value := found()) is not None:
            return value
        time.sleep(0.005)
    said = (folder / "output.txt").read_text(errors="replace")[-2000:]
    raise TimeoutError(f"nothing after {timeout_s:g} s; the program said:\n{said}")


def descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def proportional_megabytes(root: int) -> float:
    """Memory of a process tree; a page that n processes share counts 1/n for each (PSS)."""
    total = 0
    for pid in [root, *descendants(root)]:
        with contextlib.suppress(OSError):
            text = _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss")
            total += int(text.split()[0]) if text else 0
    return total / 1e3


def run_benchmark(description: str, measure: Callable[[int], Result], rounds: int) -> None:
    """One benchmark by itself, for who works on what it measures; nothing is kept."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    result = measure(parser.parse_args().rounds)
    for row in [*result["figures"], *result.get("seconds", {}).values()]:
        print(f"{row['what']:<60}{row['median']:>8} {row['unit']} [{row['min']}–{row['max']}]")
