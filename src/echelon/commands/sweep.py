"""`echelon sweep` and `echelon sweep show`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.commands.arguments import (
    add_dir_argument,
    make_parser,
    parse_lease_s,
    parse_positive_int,
)

if TYPE_CHECKING:
    from echelon.sweep.plan import SweepPlan
    from echelon.sweep.run_sweep import SweepOptions as Options
    from echelon.sweep.sweep_file import SweepFile


def sweep(words: list[str]) -> int:
    """`echelon sweep FILE`: search for the best settings."""
    if words[:1] == ["show"]:
        return sweep_show(words[1:])
    parser = make_parser(
        "sweep",
        "Search for the best settings: a file in wandb's format, with Optuna here (no account, no "
        "server) or on wandb's server. Every trial is a whole run, on any launcher. The same "
        "command typed again continues. `echelon sweep show NAME` shows the results.",
        """\
parameters are settings by their names: lr, trainer.batch_size, seed; nested ones are dotted. An
experiment is given by experiment=NAME, here or in a `command` of `echelon train`, or by `program:
FILE.py` that calls echelon.main. Another `program` or `command` is run as wandb's agent would, and
appends a line of JSON with its metric to the file $ECHELON_METRICS after each evaluation.

metric.name is what is reported: eval/rmse, or rmse for short; the best evaluation of a trial
counts. early_terminate counts evaluations: with min_iter, eta at min_iter, min_iter·eta, …; with
max_iter, eta, s at max_iter/eta … max_iter/eta^s. There the best 1/eta of all trials that came so
far go on, the others save and end; strict judges from the first trial on, else from the eta-th.""",
    )
    parser.add_argument("file", nargs="?", help="the sweep, in YAML")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. launch=slurm")
    parser.add_argument(
        "--parallel", type=parse_positive_int, default=1, metavar="N", help="trials at once"
    )
    parser.add_argument(
        "--engine",
        choices=("embedded", "wandb"),
        default="embedded",
        help="who searches: Optuna here, or wandb's server",
    )
    parser.add_argument("--name", help="of the sweep (default: that in the file, or the file's)")
    parser.add_argument("--storage", metavar="URL", help="a database of Optuna's for the results")
    parser.add_argument(
        "--lease",
        type=parse_lease_s,
        default=30.0,
        metavar="SECONDS",
        help="a worker of another host that is silent for so long has lost its trial (default: 30)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would happen and stop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--wait", action="store_true", help="slurm: watch to the end")
    parser.add_argument("--work", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--slot", default="0", help=argparse.SUPPRESS)
    add_dir_argument(parser)
    given = parser.parse_intermixed_args(words)
    from echelon.entrypoint import compose_config, load_project_defaults, start_run

    if given.work:
        from echelon.sweep.worker import run_sweep_worker

        return run_sweep_worker(given.work, given.slot, compose_config)
    if given.file is None:
        parser.error("which FILE? (or: echelon sweep show NAME)")
    from echelon.sweep.run_sweep import SweepOptions, run_sweep

    wanted = SweepOptions(
        given.parallel,
        given.name,
        Path(given.dir),
        given.storage,
        given.lease,
        given.dry_run,
        given.json,
        given.wait,
        given.engine,
    )

    def submit_elsewhere(file: SweepFile, plan: SweepPlan, options: Options) -> int:
        from echelon.login.sweep_submission import run_sweep_by_login

        return run_sweep_by_login(file, plan, options, load_project_defaults(), start_run)

    return run_sweep(
        Path(given.file), given.overrides, wanted, compose_config, start_run, submit_elsewhere
    )


def sweep_show(words: list[str]) -> int:
    """`echelon sweep show NAME`: the results of a sweep."""
    parser = make_parser(
        "sweep show",
        "Show a sweep: its best trials, what failed and, once 8 have a result, which parameters "
        "matter.",
        """\
--json prints {version: 1, sweep, folder, metric, goal, run_cap, results, ending, best, importance:
{parameter: part of 1}, trials: [{trial, run, state, value, parameters, evaluations, cause}]}.""",
    )
    parser.add_argument("name", help="a name or a folder")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw history, parameters and importance: .html, .png, .svg"
    )
    parser.add_argument("--all", action="store_true", help="every trial; else the best ten")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.login.listing import refresh_sweep
    from echelon.sweep.run_sweep import show_sweep
    from echelon.sweep.sweep_folder import find_sweep

    refresh_sweep(find_sweep(given.name, given.dir).folder)
    return show_sweep(given.name, given.dir, given.json, given.all, given.plot)
