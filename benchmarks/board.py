"""The board in a real browser: how soon what one looks for is on the screen, and what that costs.

    python benchmarks/board.py [--rounds 5] [--runs 10000] [--lines 1000000] [--no-peers]

Everything is measured in headless Chromium, which is open already, from outside: the clock starts
when the command does, and ends one frame after the page shows what was asked for.

* start: `echelon board ROOT` until the page shows the table of 10,000 runs. Cold, nothing is known
  of the runs (no index), and their contents must be read from the disk; warm, a board was there
  before. The peers of `board_peers.py` take turns with it, on the same runs.
* curves: 50 of a million points, drawn and zoomed (`board_curves.py`).
* delay and cost: trainings that are watched (`board_live.py`).
* memory: of the server, and of the browser's process that has the page.

Data are made once, in build/board-benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from board_curves import measure_curves
from board_data import drop_from_memory, find_long_runs, find_many_runs, forget_index
from board_live import measure_cost, measure_delay
from board_page import LIMIT_S, BenchmarkPage, open_page
from board_peers import FILL_S, FilledPeer, describe_condition, find_filled_peers, run_peer
from common import HERE, Figure, Result, make_figure, proportional_megabytes

sys.path.append(str(HERE.parent / "tests" / "helpers"))
from board_server import run_board

ROUNDS, PEER_ROUNDS = 5, 1
RUNS = 10_000
CURVES, LINES = 50, 1_000_000
TRAININGS = 100
WARM_S, COLD_S, MEMORY_MB, OF_BEST_PEER = 0.5, 3.0, 300.0, 0.1
OURS = "Echelon"
HAS_ROWS = """
  const text = document.querySelector(".rt-count").textContent;
  return text === "%s runs" && document.querySelectorAll(".rt-body .rt-row a").length >= 15;"""


class Sizes(NamedTuple):
    """What is measured; less of it for who works on this file."""

    rounds: int = ROUNDS
    runs: int = RUNS
    curves: int = CURVES
    lines: int = LINES
    trainings: int = TRAININGS
    with_peers: bool = True


def measure(sizes: Sizes | None = None) -> Result:
    sizes = sizes or Sizes()
    root = find_many_runs(sizes.runs)
    long_root = find_long_runs(sizes.curves, sizes.lines)
    peers, missing = find_filled_peers(root, sizes.runs) if sizes.with_peers else ([], {})
    figures: list[Figure] = []
    loads: dict[str, float] = {}
    parts: dict[str, Callable[[BenchmarkPage], list[Figure]]] = {
        "curves": lambda page: measure_curves(page, long_root, sizes.lines, sizes.rounds),
        "delay": lambda page: measure_delay(page, root),
        "cost": lambda page: measure_cost(page, root, sizes.trainings),
        # Last, as what some peers have begun goes on for a while after they were ended.
        "start": lambda _: measure_starts(root, sizes, peers, missing),
    }
    for name, part in parts.items():
        loads[name] = round(os.getloadavg()[0], 1)
        print(f"  {name}: load {loads[name]}", file=sys.stderr, flush=True)
        try:
            with open_page() as page:
                figures += part(page)
        except (TimeoutError, RuntimeError) as error:  # the others are worth having
            missing[name] = str(error)[:500]
    return {
        "config": {
            **sizes._asdict(),
            "load": loads,
            "peers": {p.peer.name: [p.peer.version, p.runs, p.fill_s] for p in peers},
            "missing": missing,
            "note": describe(loads, peers, missing),
        },
        "figures": figures,
    }


def describe(loads: dict[str, float], peers: list[FilledPeer], missing: dict[str, str]) -> str:
    """Return what stands below the table."""
    versions = [f"{p.peer.name} {p.peer.version} ({p.runs:,} runs)" for p in peers]
    busy = ", ".join(f"{load:g} ({name})" for name, load in loads.items())
    said = [f"Processes that wanted to run beside each part when it began: {busy}."]
    if versions:
        said.append(
            f"Peers: {', '.join(versions)}; each was given runs for {FILL_S:g} s through its own "
            "library. MLflow and Aim show the first of their runs, and load more on scrolling; "
            "TensorBoard shows no settings; Trackio has a list, and no table."
        )
    said += [f"Not measured: {name}, {why.splitlines()[0]}." for name, why in missing.items()]
    return " ".join(said)


# --- from the start to the table ----------------------------------------------------------------


class Start(NamedTuple):
    seconds: float
    server_mb: float
    page_mb: float


def measure_starts(
    root: Path,
    sizes: Sizes,
    peers: list[FilledPeer],
    failures: dict[str, str],
) -> list[Figure]:
    """Everybody in turns: cold and then warm, in a browser of one's own, as a page that hangs takes
    its browser along. A peer that fails is noted, and left out."""
    found: dict[str, dict[str, list[Start]]] = {}
    contestants: dict[str, tuple[Path, Callable[[BenchmarkPage], Start]]] = {
        OURS: (root, lambda page: start_board(page, root, sizes.runs))
    }
    for peer in peers:
        contestants[name_peer(peer, sizes.runs)] = (
            peer.folder,
            lambda page, peer=peer: start_peer(page, peer),
        )
    for number in range(sizes.rounds):
        for name, (folder, start) in contestants.items():
            if name in failures or (name != OURS and number >= PEER_ROUNDS):
                continue
            starts = found.setdefault(name, {"cold": [], "warm": []})
            try:
                forget_index(folder)
                drop_from_memory(folder)
                with open_page() as page:
                    starts["cold"].append(start(page))
                    starts["warm"].append(start(page))
            except (TimeoutError, RuntimeError) as error:
                if name == OURS:
                    raise
                failures[name] = str(error)[:500]
    return list(list_start_figures(found, sizes.runs))


def name_peer(filled: FilledPeer, runs: int) -> str:
    peer = filled.peer
    return peer.name if filled.runs == runs else f"{peer.name}, {filled.runs:,} runs only"


def list_start_figures(found: dict[str, dict[str, list[Start]]], runs: int) -> Iterator[Figure]:
    for how, goal in (("warm", WARM_S), ("cold", COLD_S)):
        seconds = {
            name: [each.seconds for each in starts[how]]
            for name, starts in found.items()
            if starts[how]
        }
        what = f"start → table of {runs:,} runs, {how}"
        figures = {
            name: make_figure(f"{what}: {name}", values, goal if name == OURS else None, "s")
            for name, values in seconds.items()
        }
        yield from figures.values()
        if peers := [name for name in figures if name != OURS]:
            best = min(peers, key=lambda name: float(figures[name]["median"]))
            ratios = [a / b for a, b in zip(seconds[OURS], seconds[best], strict=False)]
            what = f"{what}: Echelon, × the best peer, {best}"
            yield make_figure(what, ratios, OF_BEST_PEER)
    for name, starts in found.items():
        if warm := starts["warm"]:
            goal = MEMORY_MB if name == OURS else None
            servers, pages = [s.server_mb for s in warm], [s.page_mb for s in warm]
            yield make_figure(f"memory, {runs:,} runs: the server, {name}", servers, goal, "MB")
            yield make_figure(f"memory, {runs:,} runs: the page, {name}", pages, goal, "MB")


def start_board(page: BenchmarkPage, root: Path, runs: int) -> Start:
    page.leave()
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as cache:
        begun = time.time()
        with run_board(str(root), cache=Path(cache)) as board:
            shown = page.open_until(board.url, HAS_ROWS % f"{runs:,}")
            wait_until_known(page, root)
            memory = proportional_megabytes(board.process.pid)
            return Start(shown - begun, memory, page.measure_memory().process)


def start_peer(page: BenchmarkPage, filled: FilledPeer) -> Start:
    """Start a peer, twice if need be: a network interface that comes or goes on the machine has
    Chromium drop what it loads, and not every page asks again."""
    try:
        return start_peer_once(page, filled)
    except TimeoutError:
        return start_peer_once(page, filled)


def start_peer_once(page: BenchmarkPage, filled: FilledPeer) -> Start:
    page.leave()
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        begun = time.time()
        with run_peer(filled, Path(folder) / "output.txt") as running:
            shown = page.open_until(running.url, describe_condition(filled))
            memory = proportional_megabytes(running.pid)
            return Start(shown - begun, memory, page.measure_memory().process)


def wait_until_known(page: BenchmarkPage, root: Path) -> None:
    """Wait until the board has looked at all folders, and has written down what it found."""
    deadline = time.monotonic() + LIMIT_S
    index = root / ".board" / "index.jsonl"
    while page.run("return document.querySelector('.rt-checking') !== null") or not index.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the board still reads folders")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description="measure the board in a browser")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--curves", type=int, default=CURVES)
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--trainings", type=int, default=TRAININGS)
    parser.add_argument("--no-peers", action="store_true")
    given = parser.parse_args()
    sizes = Sizes(given.rounds, given.runs, given.curves, given.lines, given.trainings)
    result = measure(sizes._replace(with_peers=not given.no_peers))
    for row in result["figures"]:
        print(f"{row['what']:<78}{row['median']:>8} {row['unit']} [{row['min']}–{row['max']}]")
    print(json.dumps(result["config"], indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
