"""`echelon jobs`, `logs`, `stacks`, `attach`, `scale` and `cancel`: runs on their machines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.commands.arguments import RUN_HELP, add_dir_argument, make_parser, parse_line_count

if TYPE_CHECKING:
    from echelon.sweep.sweep_folder import SweepFolder


def jobs(words: list[str]) -> int:
    """`echelon jobs`: the status of runs."""
    parser = make_parser(
        "jobs",
        "Show runs, the newest first: those that are active and the last ten.",
        "states:\n"
        "  queued, requeued       waits for its machines, at first or to continue\n"
        "  starting, running      at work\n"
        "  finished               all steps were made\n"
        "  preempted, cancelled   stopped on request, saved; `echelon resume` continues\n"
        "  pruned                 its sweep ended it early, as others were better\n"
        "  failed                 the line below says why\n"
        "  lost                   its process or job is gone and recorded no end\n\n"
        "SIZE is nodes × processes on each, LEFT the time to the end at the present pace.\n\n"
        "Archived runs, and those that failed, were lost or cancelled before their first step, are "
        "shown with --all and by name; with --json the latter always are.",
    )
    parser.add_argument(
        "run", nargs="*", help="only these: a name, a job's number, what several were submitted as"
    )
    parser.add_argument(
        "--all", action="store_true", help="every run, also archived and early failed ones"
    )
    parser.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.login.listing import refresh_listed, refresh_named
    from echelon.login.refresh import following_folders
    from echelon.views.jobs_table import show_jobs

    root = Path(given.dir)
    refresh_named(given.run, given.dir)
    if not given.run:
        refresh_listed(root)
    with following_folders([root] if given.watch else [], with_logs=False, is_verbose=False):
        return show_jobs(root, given.run, given.all, given.json, given.watch)


def logs(words: list[str]) -> int:
    """`echelon logs`: the logs of a run, merged in order of time."""
    parser = make_parser(
        "logs",
        "Show the logs of a run's ranks, its agents and its batch script, merged in order of time.",
        "One rank alone is shown as it was written; of several, each line begins with its rank.",
    )
    parser.add_argument("run", help=RUN_HELP)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        default=[],
        metavar="R",
        help="only this; may be repeated",
    )
    parser.add_argument(
        "--node", type=int, action="append", default=[], metavar="N", help="only this"
    )
    parser.add_argument(
        "--lines",
        type=parse_line_count,
        metavar="N",
        help="only the last N; default: all, with -f 20",
    )
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.jobs.logs import show_logs, show_logs_of_runs
    from echelon.login.refresh import following, refresh_runs
    from echelon.runs.find import find_run, find_runs

    found = find_runs(given.run, given.dir)
    if not given.follow:
        refresh_runs(found, with_logs=True)
    if len(found) > 1 and not given.follow:
        return show_logs_of_runs(found, given.rank, given.node, given.lines)
    run = find_run(given.run, given.dir)
    with following([run] if given.follow else []):
        return show_logs(run, given.rank, given.node, given.lines, given.follow)


def stacks(words: list[str]) -> int:
    """`echelon stacks`: where all ranks of a run stand."""
    parser = make_parser(
        "stacks",
        "Show where all ranks of a run stand, on all nodes: the Python stack of each, equal ones "
        "once, and the collective in which each waits. The run goes on.",
        """\
A run that stands still is found by asking twice: what shows the same place again waits there. The
rank that is not in the collective of the others is the one for which they wait. When a hang is
found (launch.hang_s), the same is written into logs/hang-*.txt of the run folder before anything is
ended, and the failure names the file.

Stacks are read by py-spy where it is installed (pip install py-spy) and may read other processes;
else ranks of `echelon train` write theirs. Of `echelon run` and launch=inline only py-spy can read
them. Collectives are those of torch's flight recorder; without it, those in the stack.

examples:
  echelon stacks latest
  echelon stacks latest --all-threads     also threads of loaders and trackers
  echelon stacks 4711                     of a Slurm job

--json prints {version: 1, run, time, ranks: [{rank, host, pid, source: py-spy, itself or
faulthandler, threads: [{name, is_main, frames: [[file, line, function], …]}], collectives: [[name,
number, backend, group, tensors], …] or null if not known, note}], missing: [sentences about nodes
that did not answer]}. The most recent call is the first.""",
    )
    parser.add_argument("run", help=RUN_HELP)
    parser.add_argument(
        "--all-threads", action="store_true", help="every thread of every rank below"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.jobs.stacks import show_stacks
    from echelon.login.remote_commands import run_there
    from echelon.runs.find import find_run

    run = find_run(given.run, given.dir)
    if run.origin_file.exists():
        options = ["--all-threads"] * given.all_threads + ["--json"] * given.json
        return run_there([run], lambda folders: ["stacks", *options, *folders])
    return show_stacks(run, given.all_threads, given.json, given.here)


def attach(words: list[str]) -> int:
    """`echelon attach`: follow a run to its end."""
    parser = make_parser(
        "attach",
        "Follow a run as if it had been started here: the output of rank 0, to the end. The exit "
        "code is the training's. Ctrl-C detaches; the run goes on.",
    )
    parser.add_argument("run", help=RUN_HELP)
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.jobs.attach import attach_run
    from echelon.login.refresh import following
    from echelon.runs.find import find_run

    run = find_run(given.run, given.dir)
    with following([run]):
        return attach_run(run)


def scale(words: list[str]) -> int:
    """`echelon scale`: another number of nodes for a run that trains."""
    parser = make_parser(
        "scale",
        "Change on how many nodes a run trains, while it goes on. No step is made again, and the "
        "numbers are those of any other number of nodes, to rounding: the global batch stays.",
        """\
With fewer nodes the last ones leave at a step boundary, and with launch=slurm they are given back
to Slurm. With more, spares take part first. Then launch=ssh starts agents on hosts of its list that
are free, and launch=slurm queues a further job, with the options of the run's own, which ends with
the run. They take part when they are ready, also beyond the number of the start. A run is scaled
where lost nodes are survived: not with NCCL, programs of `echelon run`, models on several devices,
or folders that not all machines see.

examples:
  echelon scale latest nodes=2
  echelon scale 4711 nodes=3 --json       by the number of a Slurm job

--json prints {version: 1, run, nodes, before, left: [hosts], joining: [hosts of spares], starting:
how many are being started, job: the further job or null, given_back_to_slurm}.""",
    )
    parser.add_argument("run", help=RUN_HELP)
    parser.add_argument("setting", nargs="*", metavar="nodes=N", help="on how many nodes")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_intermixed_args(words)  # nodes=N may stand after an option
    from echelon.jobs.scale import parse_node_count, scale_run
    from echelon.login.remote_commands import run_there
    from echelon.runs.find import find_run

    count = parse_node_count(given.setting)
    run = find_run(given.run, given.dir)
    if run.origin_file.exists():
        options = [*given.setting, *["--json"] * given.json]
        return run_there([run], lambda folders: ["scale", *folders, *options])
    return scale_run(run, count, given.json)


def cancel(words: list[str]) -> int:
    """`echelon cancel`: ask runs to save and end."""
    parser = make_parser(
        "cancel",
        "Ask runs to save and end, and not to be queued again, wherever they run, and say what was "
        "done. `echelon resume RUN` goes on later.",
    )
    parser.add_argument(
        "run", nargs="+", help=f"{RUN_HELP}, what several were submitted as, or a sweep on Slurm"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="kill: the last snapshot stands")
    how.add_argument(
        "--requeue", action="store_true", help="slurm: save, end, and go on in another job"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done and stop")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.jobs.cancel import cancel_runs, requeue_runs
    from echelon.login.remote_commands import run_there, split_by_place
    from echelon.runs.find import find_runs
    from echelon.runs.run_folder import Run

    sweeps = _find_sweeps(given.run, given.dir)
    if sweeps and (given.now or given.requeue):
        parser.error("--now and --requeue are for runs, not for a sweep")
    found = [r for name in given.run if name not in sweeps for r in find_runs(name, given.dir)]
    found += [Run(sweep.folder) for sweep in sweeps.values()]
    runs, elsewhere = split_by_place(found)
    options = [f"--{name}" for name in ("now", "requeue") if getattr(given, name)]
    options += ["--dry-run"] * given.dry_run
    code = run_there(elsewhere, lambda folders: ["cancel", *options, *folders])
    for sweep in sweeps.values():
        if (run := Run(sweep.folder)) in runs:
            from echelon.sweep.slurm_workers import cancel_workers

            print(cancel_workers(sweep, given.dry_run))
            runs.remove(run)
    if not runs:
        return code
    if given.requeue:
        return max(code, requeue_runs(runs, given.dry_run))
    return max(code, cancel_runs(runs, given.now, given.dry_run))


def _find_sweeps(names: Sequence[str], root: str) -> dict[str, SweepFolder]:
    """Return the names that are those of sweeps which search on Slurm, here or on a cluster."""
    sweeps = {}
    for name in names:
        for folder in (Path(name), Path(root) / name):
            if (folder / "sweep.json").exists():
                from echelon.sweep.sweep_folder import SweepFolder as Sweep

                sweeps[name] = Sweep(folder.resolve())
                break
    return sweeps
