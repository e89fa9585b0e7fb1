"""`echelon runs`, `show`, `plot` and `note`: the results of runs, and what to say about them."""

from __future__ import annotations

import argparse
import glob
from pathlib import Path

from echelon.commands.arguments import (
    RUN_HELP,
    add_dir_argument,
    make_parser,
    parse_fraction,
    parse_names,
)


def runs(words: list[str]) -> int:
    """`echelon runs`: the table of runs and their results."""
    parser = make_parser(
        "runs",
        "List runs and their results, the newest first. `echelon jobs` shows their status on their "
        "machines.",
        """\
BEST is the value of trainer.best. TIME is the time at work: pauses and queues do not count.
SETTINGS are those in which the runs shown differ from others of the same experiment.

columns of --columns, and keys of --sort and --filter:
  run state experiment step total_steps best time when age launcher host job
  nodes processes tags note folder  what every run has
  why                            why it failed, or what it waits for
  lr model.width trainer.epochs  settings, as they are typed
  accuracy loss lr.last          metrics: the last value; also .best .min .max

conditions of --filter (all must hold; values may have * and ?):
  state=finished  experiment=toy  name='seed-*'  lr=0.1  hidden!=0  'best<0.9'
  'accuracy.best>0.8'

--json prints {version: 1, runs: [{run, folder, experiment, state, note, step, total_steps, best,
best_name, trained_s, started, tags, user_note, differs: {setting: value}, columns: {name: value} if
--columns is given}], hidden: {before_step_1, archived}}, where `hidden` counts what is shown with
--all. What is not known is null; `started` is in seconds since 1970; a folder that cannot be read
has the state `broken`.""",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every run, also archived ones and those that ended before their first step; else the "
        "first twenty",
    )
    parser.add_argument(
        "--sort",
        default="when",
        metavar="KEY",
        help="when (the default), best, or a column: metrics the best first, others ascending",
    )
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="KEY=VALUE", help="only these; repeatable"
    )
    parser.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="only runs with it; repeatable"
    )
    parser.add_argument(
        "--columns",
        type=parse_names,
        action="extend",
        default=[],
        metavar="A,B,…",
        help="these columns, such as accuracy,lr,time",
    )
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.login.listing import refresh_listed
    from echelon.views.runs_table import RunsQuery, show_runs

    refresh_listed(Path(given.dir))
    query = RunsQuery(given.all, given.sort, given.reverse, given.filter, given.tag, given.columns)
    return show_runs(Path(given.dir), query, given.json)


def show(words: list[str]) -> int:
    """`echelon show`: one run and its curves."""
    parser = make_parser(
        "show",
        "Show one run: its settings, results and curves, and what to type next.",
        """\
--json prints {version: 1, run, folder, experiment, entry, program, state, note, started, trained_s,
launcher, job, host, nodes, world, step, total_steps, settings: {those that are not the defaults},
tags, user_note, phases: [{started, ended, launcher, host, job, nodes, processes, first_step,
last_step, trained_s, samples_per_s, cause}], one for each start of the run,
metrics: {name: {is: min or max, best, best_step, last, last_step, count}},
snapshots: [{step, best, folder}], files: {name: path}, cost: {as `echelon cost --json` has it, by
the run's history}}. What is not known is null.""",
    )
    parser.add_argument("run", help="a name, a folder, or `latest`")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.login.listing import refresh_named
    from echelon.views.run_details import show_run

    refresh_named([given.run], given.dir)
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
    from echelon.login.listing import refresh_listed, refresh_named
    from echelon.views.plot import plot_runs
    from echelon.views.plot_data import PlotOptions

    refresh_named(given.run, given.dir)
    if glob.has_magic(" ".join(given.run)):
        refresh_listed(Path(given.dir))
    wanted = PlotOptions(given.metric, given.x, given.smooth, given.log, given.title)
    return plot_runs(given.run, given.dir, Path(given.output), wanted)


def note(words: list[str]) -> int:
    """`echelon note`: the note and the tags of a run."""
    parser = make_parser(
        "note",
        "Give runs a note and tags, and print what they have. They are kept in the run folder and "
        "change nothing else.",
        """\
`echelon show RUN` shows them, and so do `echelon runs --columns tags,note` and, for the runs with a
tag, `echelon runs --tag TAG`.

examples:
  echelon note latest the baseline of the paper --tag baseline
  echelon note sweep-3 --tag good --untag draft
  echelon note latest                            only print them

--json prints {version: 1, runs: [{run, folder, tags, user_note}]}.""",
    )
    parser.add_argument("run", help=f"{RUN_HELP}, or what several were submitted as")
    parser.add_argument("text", nargs="*", help="the note; replaces the one before")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="add a tag")
    parser.add_argument("--untag", action="append", default=[], metavar="TAG", help="remove a tag")
    parser.add_argument("--clear", action="store_true", help="remove the note")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_intermixed_args(words)
    if given.clear and given.text:
        parser.error("--clear removes the note, and a text replaces it: give one of them")
    from echelon.runs.find import find_runs
    from echelon.views.run_notes import annotate_and_show

    text = "" if given.clear else " ".join(given.text) or None
    runs = find_runs(given.run, given.dir)
    return annotate_and_show(runs, text, given.tag, given.untag, given.json)
