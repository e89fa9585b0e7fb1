"""`echelon cost`: GPU-hours, what they were spent on, energy and price."""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.commands.arguments import RUN_HELP, add_dir_argument, make_parser
from echelon.errors import EchelonError, Fault

if TYPE_CHECKING:
    from echelon.runs.run_folder import Run
    from echelon.views.cost_table import Price

_HELP = """\
Hours are those of GPUs that a run held, or of processor cores where it had no
GPU. Slurm's accounting (sacct) says how many, where the cluster keeps one, else
the history of each run, from a start to its stop. What they were spent on is
told by the history:
  STEPPING  steps that were kept, with evaluations and saves
  WAITING   from a start to its first step
  LOST      steps made again, standstills and restarts after losses
  IDLE      devices whose rank was lost; those of a job beside its run
  PROGRAMS  of `echelon run`, which counts no steps
Time in the queue costs nothing and is a column of its own. Energy is that of
the GPUs as NVML counts it, or of whole nodes where Slurm measures them. Runs
that were removed are not counted.

The price of a GPU-hour is --price, or a line in echelon.yaml:
  cost.gpu_hour_price: 2.50 EUR

A month begins in the time zone of this terminal (TZ). A start that is cut by
its border is shared in proportion.

--json prints {version: 1, since, until, by, price_per_gpu_hour, currency,
slurm_error, rows: [{run (or sweep, user, month), user, gpu_hours, cpu_hours,
gpu_hours_by_use: {stepping, waiting, lost, idle, other}, cpu_hours_by_use,
queue_hours, energy_kwh, price, sources: [history, slurm], runs, active,
estimate}], total: {…}}. What is not known is null.

examples:
  echelon cost                            every run in ./runs
  echelon cost --month 2026-03 --by user  who has used how much in March
  echelon cost --sweep lr-search --price 2.5
  echelon cost big-run --since 7d"""


def cost(words: list[str]) -> int:
    """`echelon cost`: what runs have cost."""
    parser = make_parser("cost", "What runs have cost: GPU-hours, energy and price.", _HELP)
    parser.add_argument("run", nargs="*", help=RUN_HELP + "; default: all")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="S",
        help="trials of a sweep; repeatable",
    )
    parser.add_argument("--user", metavar="U", help="only runs of this user")
    parser.add_argument("--month", metavar="YYYY-MM", type=_parse_month, help="only this month")
    parser.add_argument(
        "--since", metavar="T", type=_parse_time, help="a date, YYYY-MM-DD, or 12h, 7d, 4w ago"
    )
    parser.add_argument("--until", metavar="T", type=_parse_time, help="the same")
    parser.add_argument(
        "--by", choices=("run", "sweep", "user", "month"), default="run", help="a line for each"
    )
    parser.add_argument("--price", metavar="P", help="of a GPU-hour: 2.5 or '2.5 EUR'")
    parser.add_argument(
        "--history", action="store_true", help="by histories alone, without asking Slurm"
    )
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.runs.cost import TimeWindow
    from echelon.views.cost_table import CostQuery, show_costs

    window = given.month or TimeWindow()
    window = TimeWindow(
        max(window.since, given.since or 0.0), min(window.until, given.until or math.inf)
    )
    if window.since >= window.until:
        raise EchelonError(Fault("no time is between --since and --until", "give a later --until"))
    price = _read_price(given.price)
    root = Path(given.dir)
    query = CostQuery(
        _find_runs(given.run, given.sweep, root),
        window,
        given.by,
        given.user,
        price,
        not given.history,
        _find_sweep_name,
    )
    return show_costs(query, given.json)


def _find_runs(names: list[str], sweeps: list[str], root: Path) -> list[Run]:
    """Return the runs that were named, each once; without a name all."""
    from echelon.runs.find import find_numbered_runs, find_runs, list_runs
    from echelon.sweep.sweep_folder import find_sweep

    if not names and not sweeps:
        return list_runs(root)
    found = [run for name in names for run in find_runs(name, str(root))]
    for name in sweeps:
        sweep = find_sweep(name, str(root))
        found += find_numbered_runs(sweep.name, sweep.folder.parent)
    return list(dict.fromkeys(found))


def _find_sweep_name(run: Run) -> str:
    from echelon.sweep.sweep_folder import SweepFolder

    name, dash, number = run.name.rpartition("-")
    sweep = SweepFolder(run.folder.with_name(name or "-"))
    is_trial = bool(dash) and number.isdecimal()
    is_there = sweep.settings_file.exists() or sweep.server_file.exists()
    return name if is_trial and is_there else ""


# --- values ---


def _parse_month(text: str) -> object:
    from echelon.runs.cost import TimeWindow
    from echelon.views.cost_table import get_month_start

    match = re.fullmatch(r"(\d{4})-(\d{2})", text)
    if not match or not int(match[1]) >= 1970 or not 1 <= int(match[2]) <= 12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a month: write YYYY-MM")
    year, month = int(match[1]), int(match[2])
    end = get_month_start(year + month // 12, month % 12 + 1)
    return TimeWindow(get_month_start(year, month), end)


def _parse_time(text: str) -> float:
    """Return the time of a date, as it begins here, or of so long ago, in seconds since 1970."""
    if match := re.fullmatch(r"(\d{1,6})([hdw])", text):
        return time.time() - int(match[1]) * {"h": 3600, "d": 86_400, "w": 604_800}[match[2]]
    try:
        year, month, day = time.strptime(text, "%Y-%m-%d")[:3]
        return time.mktime((year, month, day, 0, 0, 0, 0, 0, -1))
    except (ValueError, OverflowError):
        message = f"{text!r} is not a time: write YYYY-MM-DD, or 7d for seven days ago"
        raise argparse.ArgumentTypeError(message) from None


def _read_price(given: str | None) -> Price | None:
    """Return the price that was typed, or that of echelon.yaml."""
    from echelon.config.defaults_files import GPU_HOUR_PRICE, load_defaults
    from echelon.views.cost_table import Price

    where, text = "--price", given
    if text is None:
        default = load_defaults(os.environ, [Path()]).others.get(GPU_HOUR_PRICE)
        if default is None:
            return None
        where, text = f"{default.location}: {GPU_HOUR_PRICE}", str(default.value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([^\W\d_]{1,8}|[$€£¥])?\s*", text)
    if not match:
        raise EchelonError(Fault(f"{where} {text!r} is not a price", "write 2.50, or 2.50 EUR"))
    return Price(float(match[1]), match[2] or "")
