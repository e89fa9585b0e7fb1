"""Runs on their machines."""

from __future__ import annotations

from pathlib import Path

from echelon.verbs.arguments import WHICH, add_dir, count, parser_for


def jobs(words: list[str]) -> int:
    parser = parser_for(
        "jobs",
        "Show runs, the newest first: those that are active and the last ten.",
        "states:\n"
        "  queued, requeued       waits for its machines, for the first time or to go on\n"
        "  starting, running      at work\n"
        "  finished               all steps were made\n"
        "  preempted, cancelled   stopped on request, all saved; `echelon resume` goes on\n"
        "  failed                 the line below says why\n"
        "  lost                   what should be there is gone without a word\n\n"
        "SIZE is nodes × processes on each, LEFT the time to the end at the present pace.",
    )
    parser.add_argument(
        "run", nargs="*", help="only these: a name, a job's number, what several were submitted as"
    )
    parser.add_argument("--all", action="store_true", help="every run")
    parser.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    parser.add_argument("--json", action="store_true")
    add_dir(parser)
    given = parser.parse_args(words)
    from echelon.jobs.board import show

    return show(Path(given.dir), given.run, given.all, given.json, given.watch)


def logs(words: list[str]) -> int:
    parser = parser_for(
        "logs",
        "Show what the ranks of a run said, and its agents and batch script, in order of time.",
        "One rank alone is shown as it was written; several, line by line after who said it.",
    )
    parser.add_argument("run", help=WHICH)
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
        "--lines", type=count, metavar="N", help="only the last N; default: all, with -f 20"
    )
    add_dir(parser)
    given = parser.parse_args(words)
    from echelon.jobs.logs import logs, logs_of_all
    from echelon.runs import find_runs, open_run

    found = find_runs(given.run, given.dir)
    if len(found) > 1 and not given.follow:
        return logs_of_all(found, given.rank, given.node, given.lines)
    run = open_run(given.run, given.dir)
    return logs(run, given.rank, given.node, given.lines, given.follow)


def attach(words: list[str]) -> int:
    parser = parser_for(
        "attach",
        "Follow a run as if it had been started here: what rank 0 says, to the end. The exit code "
        "is the training's. Ctrl-C detaches; the run goes on.",
    )
    parser.add_argument("run", help=WHICH)
    add_dir(parser)
    given = parser.parse_args(words)
    from echelon.jobs.attach import attach
    from echelon.runs import open_run

    return attach(open_run(given.run, given.dir))


def cancel(words: list[str]) -> int:
    parser = parser_for(
        "cancel",
        "Ask runs to save and end, and not to be queued again. `echelon resume RUN` goes on later.",
    )
    parser.add_argument("run", nargs="+", help=f"{WHICH}, or what several were submitted as")
    parser.add_argument("--now", action="store_true", help="kill: the last snapshot stands")
    add_dir(parser)
    given = parser.parse_args(words)
    from echelon.jobs.cancel import cancel
    from echelon.runs import find_runs

    return cancel([run for name in given.run for run in find_runs(name, given.dir)], given.now)
