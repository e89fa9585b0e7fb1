"""`echelon runs`, `show` and `plot`: the results of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from echelon.commands.arguments import add_dir_argument, make_parser, parse_fraction


def runs(words: list[str]) -> int:
    """`echelon runs`: the table of runs and their results."""
    parser = make_parser(
        "runs",
        "List runs and their results, the newest first. `echelon jobs` shows their status on their "
        "machines.",
        """\
BEST is the value of trainer.best. TIME is the time at work: pauses and queues do not count.
SETTINGS are those in which the runs shown differ from others of the same experiment.

conditions of --filter (all must hold; values may have * and ?):
  state=finished  experiment=toy  name='seed-*'  lr=0.1  hidden!=0  'best<0.9'

--json prints {version: 1, runs: [{run, folder, experiment, state, note, step, total_steps, best,
best_name, trained_s, started, differs: {setting: value}}]}. What is not known is null; `started` is
in seconds since 1970; a folder that cannot be read has the state `broken`.""",
    )
    parser.add_argument("--all", action="store_true", help="every run; else the first twenty")
    parser.add_argument(
        "--sort",
        default="when",
        metavar="KEY",
        help="when (the default), best, time, step, name, or a setting",
    )
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="KEY=VALUE", help="only these; repeatable"
    )
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.views.runs_table import show_runs

    root = Path(given.dir)
    return show_runs(root, given.all, given.json, given.sort, given.reverse, given.filter)


def show(words: list[str]) -> int:
    """`echelon show`: one run and its curves."""
    parser = make_parser(
        "show",
        "Show one run: its settings, results and curves, and what to type next.",
        """\
--json prints {version: 1, run, folder, experiment, entry, program, state, note, started, trained_s,
launcher, job, host, nodes, world, step, total_steps, settings: {those that are not the defaults},
metrics: {name: {is: min or max, best, best_step, last, last_step, count}},
snapshots: [{step, best, folder}], files: {name: path}}. What is not known is null.""",
    )
    parser.add_argument("run", help="a name, a folder, or `latest`")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.views.run_details import show_run

    return show_run(given.run, given.dir, given.json)


def plot(words: list[str]) -> int:
    """`echelon plot`: curves of several runs in one image or page."""
    parser = make_parser(
        "plot",
        "Draw the curves of runs together, a panel per metric, into a .png, .svg or .html file, "
        "and print its name.",
        """\
An .html file is one page that needs nothing else: it shows values under the pointer, hides runs at
a click and zooms by drag. .png and .svg need matplotlib: pip install 'echelon[plot]'.""",
    )
    parser.add_argument(
        "run", nargs="+", metavar="RUN", help="a name, a folder, `latest`, or a pattern: 'seed-*'"
    )
    parser.add_argument("-o", "--output", default="curves.png", help="default: curves.png")
    parser.add_argument(
        "--metric",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="only these; default: the loss and all that was evaluated",
    )
    parser.add_argument(
        "--x", default="step", choices=("step", "epoch", "samples", "time"), help="default: step"
    )
    parser.add_argument(
        "--smooth",
        type=parse_fraction,
        metavar="S",
        help="0 (not at all) to below 1; default: as much as the noise asks for",
    )
    parser.add_argument(
        "--log",
        action=argparse.BooleanOptionalAction,
        help="logarithmic values; default: where they fall far",
    )
    parser.add_argument("--title", default="")
    add_dir_argument(parser)
    given = parser.parse_intermixed_args(words)
    from echelon.views.plot import plot_runs
    from echelon.views.plot_data import PlotOptions

    wanted = PlotOptions(given.metric, given.x, given.smooth, given.log, given.title)
    return plot_runs(given.run, given.dir, Path(given.output), wanted)
