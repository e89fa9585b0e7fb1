"""The command line: verbs, each loading its room, and all that takes time, when it is called."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from echelon import __version__
from echelon.errors import EchelonError, Exit, Fault, nearest

if TYPE_CHECKING:
    from echelon.config.compose import OwnExperiment


_WHICH = "a name, a folder, a job's number, or `latest`"


class Verb(NamedTuple):
    does: str
    run: Callable[[list[str]], int]


def main() -> None:
    sys.exit(guarded(lambda: dispatch(sys.argv[1:])))


def guarded(verb: Callable[[], int]) -> int:
    """A user's mistake is a sentence and an exit code, never a traceback of ours."""
    try:
        return int(verb())
    except EchelonError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return error.exit
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # `echelon … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except Exception as error:  # a user's file that cannot be imported, or a fault of ours
        from echelon.failure import users_traceback

        print(users_traceback(error), end="", file=sys.stderr)
        return Exit.FAILED


def dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return Exit.OK
    if words[0] in ("-V", "--version"):
        print(f"echelon {__version__}")
        return Exit.OK
    verb = VERBS.get(words[0])
    if verb is None:
        print(
            f"error: there is no verb {words[0]!r}\n  hint: {nearest(words[0], VERBS)}",
            file=sys.stderr,
        )
        return Exit.USAGE
    return verb.run(words[1:])


def _overview() -> str:
    verbs = "\n".join(f"  {name:<11}{verb.does}" for name, verb in VERBS.items())
    return f"""\
echelon takes a PyTorch training from a laptop to a cluster.

{verbs}

Try:
  echelon train                                        a toy, in this process
  echelon train launch=local launch.procs=2            the same, on two
  echelon train launch=slurm launch.nodes=2            the same, as a batch job
  echelon train experiment=my_file.py:experiment lr=0.1
  python my_file.py lr=0.1                             a file with echelon.main

`echelon VERB --help` says more about each."""


# --- verbs ---


def train_words(words: Sequence[str], own: OwnExperiment | None = None) -> int:
    from echelon.config.outside import own_words, trial_of
    from echelon.config.settings import described

    trial = trial_of(os.environ)

    parser = _parser(
        "train",
        "Train an experiment. Every setting can be overridden: KEY=VALUE, as in Hydra.",
        "settings:\n"
        "  experiment=toy\n"
        "      What to train: toy, transformer, movielens, movielens_dot,\n"
        "      movielens_ranking, or FILE.py:FUNCTION. Its own settings are given by\n"
        "      their bare names: lr=0.1.\n" + described(),
    )
    _add_plan(parser)
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="a run for each combination: lr=0.1,0.2 seed=range(0,5); on slurm as an array",
    )
    given = parser.parse_intermixed_args(own_words(words, trial))
    from echelon.entry import train, train_all

    if given.multirun and trial:
        parser.error("`wandb agent` asks for one run, so --multirun cannot be")
    if given.multirun and (given.wait or given.json):
        parser.error("--wait and --json are for one run")
    if given.multirun:
        return train_all(given.overrides, own, given.dry_run)
    return train(given.overrides, own, dry_run=given.dry_run, as_json=given.json, wait=given.wait)


def _run(words: list[str]) -> int:
    parser = _parser(
        "run",
        "Run any program on one process, many, or many machines: echelon run launch=slurm "
        "launch.nodes=2 -- python train.py",
        "modes:\n"
        "  mode=torchrun    an agent per node and torchrun's variables: plain torch,\n"
        "                   Accelerate, Lightning (the default)\n"
        "  mode=srun        one Slurm task per process\n"
        "  mode=lightning   the same, as Lightning expects it; its arguments get\n"
        "                   the world by launch.nodes_flag=--num_nodes and\n"
        "                   launch.gpus_flag=--gpus\n"
        "  mode=plain       once per node, left alone\n"
        "  mode=wandb       for `wandb agent`: one of them, its trial on all nodes\n\n"
        "`echelon train --help` lists the settings of launch.",
    )
    _add_plan(parser)
    parser.add_argument("program", nargs="*", metavar="-- PROGRAM ARGS")
    options, program = _split(words)
    given = parser.parse_intermixed_args(options)
    from echelon.entry import run_program

    return run_program(given.overrides, program, given.dry_run, given.json, given.wait)


def _submit(words: list[str]) -> int:
    from pathlib import Path

    parser = _parser(
        "submit",
        "Run the commands of a file as Slurm jobs: one run for each, several as an array, in the "
        "environment that the source folder asks for, from a copy of the code as it is now.",
        "A command file has a command a line, as typed into a shell: # comments, quotes,\n"
        "\\ at the end of a line to go on in the next, NAME=value before a command. Variables\n"
        "are left to the job only after a line `# echelon: expand`; pipes and the like belong\n"
        "in a script.\n\n"
        "How a command is run is seen from it, and shown by --dry-run; mode=plain, torchrun,\n"
        "lightning, srun or wandb decides for all. Defaults stand in echelon.yaml.\n"
        "`echelon train --help` lists the settings of launch.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. launch.nodes=2")
    parser.add_argument(
        "--configs", type=Path, metavar="FILE", help="default: experiment_configurations.txt"
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="the folder the commands run in; default: this"
    )
    parser.add_argument("--name", help="of the run, or of all together; default: a new one")
    parser.add_argument(
        "--build", choices=("login", "job"), default="login", help="where the environment is made"
    )
    parser.add_argument(
        "--env",
        choices=("cache", "source", "none"),
        default="cache",
        help="where it is kept: by what decides it, in DIR/.venv, or none is used",
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="PATH",
        help="link to this in DIR instead of copying it, such as data; may be repeated",
    )
    parser.add_argument("--max-parallel", type=int, metavar="N", help="so many runs at a time")
    parser.add_argument(
        "--requeue",
        action="store_true",
        help="commands that are out of time are told so (USR2), and queued again: they can resume",
    )
    parser.add_argument("--wait", action="store_true", help="until all are over")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print what is planned or done as JSON")
    given = parser.parse_intermixed_args(words)
    from echelon.entry import submit
    from echelon.submit.plan import Request

    at_once = (
        [f"launch.max_parallel={given.max_parallel}"] if given.max_parallel is not None else []
    )
    request = Request(
        [*given.overrides, *at_once],
        given.configs,
        given.source,
        given.name,
        given.build,
        given.env,
        tuple(given.link),
        given.requeue,
    )
    return submit(request, given.dry_run, given.json, given.wait)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _gpus(words: list[str]) -> int:
    parser = _parser(
        "gpus",
        "Show the GPUs of this machine, or of others, and every process on them.",
        """\
A terminal gets a table; a pipe a line per GPU and per process, whole:
  echelon gpus | grep NAME
  free=$(echelon gpus --free 2) &&
  CUDA_VISIBLE_DEVICES=$free echelon train launch=local

– is a value that this GPU does not tell, ? somebody who cannot be seen from here, such as a process
of another container. A process whose run is over is marked as an orphan. JOB is Slurm's, RUN is
Echelon's; both are known of your own processes, a job also of others' where Slurm uses cgroups.

--free prints what CUDA_VISIBLE_DEVICES takes: indices; UUIDs where GPUs of several models are
mixed, which CUDA numbers in its own order, and UUIDs of MIG's slices. What CUDA_VISIBLE_DEVICES
hides is left out.

--json prints {version: 1, time, nodes: [{host, fault, driver, cuda, stale_s, gpus: [{index, uuid,
name, fault, use_percent, memory_used_bytes, memory_total_bytes, temperature_c, power_w,
power_limit_w, fan_percent, idle, mig, processes_told, processes: [{pid, user, memory_bytes, age_s,
command, job, run, run_folder, orphan}], slices: [{index, uuid, name, memory_used_bytes,
memory_total_bytes, idle, processes}]}]}]}; with --free {version: 1, free: [...]}. What is not
known is null. With --watch, one object on each line.

exit codes: 6 there is no GPU, 7 fewer are free than asked for""",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=0.5,
        metavar="SECONDS",
        help="again and again, until Ctrl-C (default: every 0.5 s)",
    )
    parser.add_argument(
        "--user", action="append", default=[], metavar="NAME", help="only theirs; `me`; repeatable"
    )
    parser.add_argument("--gpu", metavar="0,2", help="only these; also 4-7")
    parser.add_argument(
        "--free", nargs="?", type=_some, const=0, metavar="N", help="print N that are idle, or all"
    )
    parser.add_argument("--hosts", metavar="A,B", help="other machines, over ssh")
    parser.add_argument(
        "--slurm",
        nargs="?",
        const="",
        metavar="PARTITION",
        help="the machines of my running jobs, or of a partition",
    )
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help="e.g. 'ssh -F FILE'")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    elsewhere = given.hosts is not None or given.slurm is not None
    if given.free is not None and (elsewhere or given.watch or given.user):
        parser.error("--free is about all GPUs of this machine, once")
    from echelon.gpus import choose, show

    wanted = show.Wanted(
        tuple(choose.me() if name == "me" else name for name in given.user),
        () if given.gpu is None else tuple(choose.indices(given.gpu)),
        given.json,
        given.watch,
        () if given.hosts is None else tuple(choose.hosts(given.hosts)),
        given.slurm,
        given.ssh,
    )
    return show.show(wanted) if given.free is None else show.show_free(given.free or None, wanted)


def _some(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs")
    return int(text)


def _interval(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no time between looks: give 0.1 to 86400 s")


def _node(words: list[str]) -> int:
    parser = _parser(
        "node", "Be one node of a run. Batch scripts and ssh call this; nobody needs to type it."
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--nodes", type=int, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--master", metavar="HOST:PORT", help="where node 0 listens")
    where.add_argument("--tether", action="store_true", help="be told, and live on standard input")
    parser.add_argument("--node-rank", type=int, help="default: SLURM_NODEID")
    parser.add_argument("--procs", type=int, help="processes here; default: as configured")
    given = parser.parse_args(words)
    if given.tether:
        from echelon.launch.ssh.tether import hold

        return hold(given.run, given.nodes, given.node_rank, given.procs)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # it waits until the agent listens
    from echelon.launch.join import join

    return join(given.run, given.nodes, lambda: given.master, given.node_rank, given.procs)


def _trial(words: list[str]) -> int:
    from pathlib import Path

    parser = _parser(
        "wandb-job",
        "Be a wandb agent's job, or what it starts. Batch scripts call this; nobody types it.",
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--master", metavar="HOST:PORT", required=True)
    parser.add_argument("--instead-of", metavar="NAME", help="what wandb's agent believes to start")
    parser.add_argument("words", nargs="*", metavar="-- WORDS")
    options, rest = _split(words)
    given = parser.parse_args(options)
    from echelon.runs import Run
    from echelon.submit import trial

    job = trial.Place(Run(Path(given.run)), given.master)
    if given.instead_of:
        return trial.start(job, given.instead_of, rest)
    return trial.watch(job, rest)


def _resume(words: list[str]) -> int:
    parser = _parser("resume", "Go on with a run where its newest valid snapshot is.")
    parser.add_argument("run", help=_WHICH)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. trainer.epochs=10")
    given = parser.parse_intermixed_args(words)
    from echelon.config.compose import recompose
    from echelon.entry import start
    from echelon.runs import open_run

    run = open_run(given.run)
    if run.submission_file is not None:
        raise EchelonError(
            Fault(
                f"run {run.name} is a submitted command, whose program knows how to go on",
                "submit the command again, with --requeue if it resumes by itself",
            )
        )
    config = run.config()
    if config.trainer.resume == "never" or any(run.snapshots.glob("step-*")):
        given.overrides.insert(0, "trainer.resume=auto")  # from its own, however it began
    return start(recompose(config, given.overrides, name=run.name, folder=run.folder.parent))


def _jobs(words: list[str]) -> int:
    from pathlib import Path

    parser = _parser(
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
    _add_dir(parser)
    given = parser.parse_args(words)
    from echelon.jobs.board import show

    return show(Path(given.dir), given.run, given.all, given.json, given.watch)


def _logs(words: list[str]) -> int:
    parser = _parser(
        "logs",
        "Show what the ranks of a run said, and its agents and batch script, in order of time.",
        "One rank alone is shown as it was written; several, line by line after who said it.",
    )
    parser.add_argument("run", help=_WHICH)
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
        "--lines", type=_count, metavar="N", help="only the last N; default: all, with -f 20"
    )
    _add_dir(parser)
    given = parser.parse_args(words)
    from echelon.jobs.logs import logs, logs_of_all
    from echelon.runs import find_runs, open_run

    found = find_runs(given.run, given.dir)
    if len(found) > 1 and not given.follow:
        return logs_of_all(found, given.rank, given.node, given.lines)
    run = open_run(given.run, given.dir)
    return logs(run, given.rank, given.node, given.lines, given.follow)


def _attach(words: list[str]) -> int:
    parser = _parser(
        "attach",
        "Follow a run as if it had been started here: what rank 0 says, to the end. The exit code "
        "is the training's. Ctrl-C detaches; the run goes on.",
    )
    parser.add_argument("run", help=_WHICH)
    _add_dir(parser)
    given = parser.parse_args(words)
    from echelon.jobs.attach import attach
    from echelon.runs import open_run

    return attach(open_run(given.run, given.dir))


def _cancel(words: list[str]) -> int:
    parser = _parser(
        "cancel",
        "Ask runs to save and end, and not to be queued again. `echelon resume RUN` goes on later.",
    )
    parser.add_argument("run", nargs="+", help=f"{_WHICH}, or what several were submitted as")
    parser.add_argument("--now", action="store_true", help="kill: the last snapshot stands")
    _add_dir(parser)
    given = parser.parse_args(words)
    from echelon.jobs.cancel import cancel
    from echelon.runs import find_runs

    return cancel([run for name in given.run for run in find_runs(name, given.dir)], given.now)


def _runs(words: list[str]) -> int:
    from pathlib import Path

    parser = _parser(
        "runs",
        "List runs and what came of them, the newest first: the notebook of results. `echelon "
        "jobs` says how they stand on their machines.",
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
    _add_dir(parser)
    given = parser.parse_args(words)
    from echelon.view.listing import show_runs

    root = Path(given.dir)
    return show_runs(root, given.all, given.json, given.sort, given.reverse, given.filter)


def _show(words: list[str]) -> int:
    parser = _parser(
        "show",
        "Show one run: what it was, what came of it, its curves, and what to type next.",
        """\
--json prints {version: 1, run, folder, experiment, entry, program, state, note, started, trained_s,
launcher, job, host, nodes, world, step, total_steps, settings: {those that are not the defaults},
metrics: {name: {is: min or max, best, best_step, last, last_step, count}},
snapshots: [{step, best, folder}], files: {name: path}}. What is not known is null.""",
    )
    parser.add_argument("run", help="a name, a folder, or `latest`")
    parser.add_argument("--json", action="store_true")
    _add_dir(parser)
    given = parser.parse_args(words)
    from echelon.view.one import show_run

    return show_run(given.run, given.dir, given.json)


def _plot(words: list[str]) -> int:
    from pathlib import Path

    parser = _parser(
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
        type=_part,
        metavar="S",
        help="0 (not at all) to below 1; default: as much as the noise asks for",
    )
    parser.add_argument(
        "--log",
        action=argparse.BooleanOptionalAction,
        help="logarithmic values; default: where they fall far",
    )
    parser.add_argument("--title", default="")
    _add_dir(parser)
    given = parser.parse_intermixed_args(words)
    from echelon.view.plot import plot
    from echelon.view.sheet import Wanted

    wanted = Wanted(given.metric, given.x, given.smooth, given.log, given.title)
    return plot(given.run, given.dir, Path(given.output), wanted)


def _part(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")


def _recommend(words: list[str]) -> int:
    parser = _parser(
        "recommend",
        "Say what users of MovieLens might like, by a run's best snapshot: movies that they have "
        "not rated, the best first.",
        "The score is the expected rating, not clipped to the scale; of\n"
        "experiment=movielens_ranking, a logarithm of how likely a movie is next.\n"
        "Piped: user, place, score, movie id and title between tabs.",
    )
    parser.add_argument("run", help="a name, a folder, or `latest`")
    parser.add_argument(
        "--user",
        type=int,
        action="append",
        required=True,
        metavar="ID",
        help="MovieLens' number of a user; may be repeated",
    )
    parser.add_argument("-k", type=_positive, default=10, help="how many (default: 10)")
    parser.add_argument("--json", action="store_true")
    _add_dir(parser)
    given = parser.parse_args(words)
    from echelon.recommend import recommend
    from echelon.runs import open_run

    return recommend(open_run(given.run, given.dir), given.user, given.k, given.json)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines")
    return int(text)


def _data(words: list[str]) -> int:
    from pathlib import Path

    parser = _parser(
        "data",
        "Get a data set: download it, or take it from a file; check it, unpack it and prepare it.",
        "A broken download goes on where it stopped when the same is typed again. A mirror's\n"
        "address is given by ECHELON_MOVIELENS_URL "
        "(default: https://files.grouplens.org/datasets/movielens).",
    )
    parser.add_argument("name", choices=["movielens"])
    parser.add_argument(
        "--size",
        choices=["latest-small", "100k", "1m", "25m", "32m"],
        help="which of GroupLens' sets (default: latest-small, or what the file holds)",
    )
    parser.add_argument("--from", dest="given", metavar="FILE", help="a zip or folder, no internet")
    parser.add_argument("--to", default="data", metavar="DIR", help="(default: data)")
    parser.add_argument("--json", action="store_true", help="say where it is as JSON")
    given = parser.parse_args(words)
    from echelon.data.movielens.getting import get

    return get(given.size, given.given, Path(given.to), given.json)


def _env(words: list[str]) -> int:
    from pathlib import Path

    parser = _parser(
        "env",
        "The environment that a source folder asks for: build it, show it, clean the cache.",
        "The first of these files decides, and it is said: Pipfile (with its lock),\n"
        "requirements.txt, uv.lock, pyproject.toml, environment.yml. It is built with uv where\n"
        "there is one (ECHELON_ENV_BUILDER=pip asks for pip), once, and kept in ~/.cache/echelon\n"
        "(ECHELON_CACHE) by what decides it.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="build|show|clean")
    build = actions.add_parser("build", help="build it if it is not there, and print its folder")
    show = actions.add_parser("show", help="which file decides, where it is, what the cache holds")
    for action in (build, show):
        action.add_argument("--source", default=".", help="the folder with the files (default: .)")
        action.add_argument("--where", default="cache", help="cache, or source: its .venv")
        action.add_argument("--python", default=sys.executable, help="the interpreter to use")
        action.add_argument("--json", action="store_true")
    build.add_argument("--shell", action="store_true", help="print the lines that enter it")
    clean = actions.add_parser("clean", help="remove from the cache what was not used for long")
    clean.add_argument("--older", type=_days, default=30.0, metavar="DAYS", help="default: 30")
    clean.add_argument("--all", action="store_true", help="all that no job runs in")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    given = parser.parse_args(words)
    from echelon.envs import show as env

    if given.action == "clean":
        return env.sweep(given.older, given.all, given.dry_run)
    source = Path(given.source)
    if given.action == "show":
        return env.show(source, given.where, given.python, given.json)
    return env.make(source, given.where, given.python, given.json, given.shell)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days")
    return days


def _doctor(words: list[str]) -> int:
    from pathlib import Path

    parser = _parser(
        "doctor",
        "Look at this machine: Python, torch, driver, GPUs, disks, limits, network, clients. Then "
        "train a step on every device and all-reduce across them (without one, on two processes of "
        "the CPU).",
        """\
Each check is ok, warn (a training runs, but not as it could), fail (it does not run) or – (nothing
to check here), with the command that mends it. The exit code is 8 if any check fails, else 0.
Piped: state, check, what was found and what to do, between tabs.

--json prints {version: 1, host, echelon, python, worst: ok, warn or fail,
checks: [{check, state: ok, warn, fail or none, found, do}]}.""",
    )
    parser.add_argument("--no-smoke", action="store_true", help="only look, train nothing")
    parser.add_argument("--json", action="store_true")
    _add_dir(parser)
    given = parser.parse_args(words)
    from echelon.check.doctor import doctor

    return doctor(Path(given.dir), given.json, not given.no_smoke)


def _preflight(words: list[str]) -> int:
    parser = _parser(
        "preflight",
        "Look at the very nodes that a job will use, before it does: echelon preflight launch=ssh "
        "'launch.hosts=[a,b]', or launch=slurm launch.nodes=2. launch.preflight=true does the same "
        "before a training.",
        """\
On every node: does it start, versions, code, names both ways, TCP to every other node, interface,
clock, shared folder, disk, GPUs free and healthy, speed of each link, an all-reduce whose sum is
checked. With Slurm inside an allocation on its nodes, else srun asks for them as the job would.

The exit code is 8 if any check fails, else 0.
Piped: state, node, check, what was found and what to do, between tabs.

--json prints {version: 1, launcher, ready, nodes: [{node, host, address}],
checks: [{node, host, check, state: ok, warn, fail or none, found, do}],
links: [{from, to, bytes_per_s}], slowest: host or null}.""",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of `echelon train`")
    parser.add_argument("--run", help="of a run: its name or folder, with its settings")
    parser.add_argument(
        "--limit", type=_seconds, default=60.0, metavar="S", help="for all checks (default: 60)"
    )
    parser.add_argument(
        "--wait", type=_seconds, default=600.0, metavar="S", help="slurm: in the queue (600)"
    )
    parser.add_argument("--json", action="store_true")
    _add_dir(parser)
    given = parser.parse_intermixed_args(words)
    if given.run and given.overrides:
        parser.error("a run has its own settings: give --run or KEY=VALUE")
    from echelon.entry import check_nodes

    return check_nodes(given.overrides, given.run, given.dir, given.json, given.limit, given.wait)


def _setup(words: list[str]) -> int:
    parser = _parser(
        "setup",
        "Make a machine a host of launch=ssh: a key if there is none, an entry in ssh's "
        "configuration, and a look at its Python, torch and GPUs.",
        """\
Nothing that exists is touched: not a key, not an entry. What will be written is shown first; at a
terminal it asks, elsewhere it needs --yes and else stops with code 2. The exit code is 8 if the
host cannot be reached or is not ready yet; then mend what it says and type the same again.""",
    )
    parser.add_argument("what", choices=["ssh"])
    parser.add_argument("host", metavar="HOST", help="a name or address; USER@HOST, HOST:PORT")
    parser.add_argument("--user")
    parser.add_argument("--port", type=int)
    parser.add_argument("--name", metavar="ALIAS", help="what to call it (default: HOST)")
    parser.add_argument("--key", metavar="FILE", help="(default: ~/.ssh/id_ed25519)")
    parser.add_argument("--config", metavar="FILE", help="ssh's (default: ~/.ssh/config)")
    parser.add_argument(
        "--install", action="store_true", help="put the public key on the host, by a password, say"
    )
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    given = parser.parse_args(words)
    from echelon.setup.ssh import Wanted, setup_ssh

    wanted = Wanted(
        given.host,
        given.user,
        given.port,
        given.name,
        given.key,
        given.config,
        given.install,
        given.yes,
    )
    return setup_ssh(wanted)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")


def _sweep(words: list[str]) -> int:
    from pathlib import Path

    if words[:1] == ["show"]:
        return _sweep_show(words[1:])
    parser = _parser(
        "sweep",
        "Search for the best settings: a file in wandb's format, with Optuna here (no account, no "
        "server) or on wandb's server. Every trial is a whole run, on any launcher. The same "
        "command typed again goes on. `echelon sweep show NAME` shows what came of it.",
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
    parser.add_argument("--parallel", type=_positive, default=1, metavar="N", help="trials at once")
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
        type=_lease,
        default=30.0,
        metavar="SECONDS",
        help="a worker of another host that is silent for so long has lost its trial (default: 30)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would happen and stop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--wait", action="store_true", help="slurm: look on to the end")
    parser.add_argument("--work", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--slot", default="0", help=argparse.SUPPRESS)
    _add_dir(parser)
    given = parser.parse_intermixed_args(words)
    from echelon.entry import composed, start

    if given.work:
        from echelon.sweep.worker import work

        return work(given.work, given.slot, composed)
    if given.file is None:
        parser.error("which FILE? (or: echelon sweep show NAME)")
    from echelon.sweep.verb import Wanted, sweep

    wanted = Wanted(
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
    return sweep(Path(given.file), given.overrides, wanted, composed, start)


def _lease(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not 6 or more: workers show life every 2 s")


def _sweep_show(words: list[str]) -> int:

    parser = _parser(
        "sweep show",
        "Show a sweep: its best trials, what failed and, once 8 are finished, which parameters "
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
    _add_dir(parser)
    given = parser.parse_args(words)
    from echelon.sweep.verb import look

    return look(given.name, given.dir, given.json, given.all, given.plot)


def _explain(words: list[str]) -> int:
    parser = _parser(
        "explain", "Say which world this process would be part of, and which variables decided it."
    )
    parser.add_argument("overrides", nargs="*", metavar="rank=R world_size=N master=HOST:PORT")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args(words)
    from echelon.explain import explain

    return explain(given.overrides, given.json, os.environ)


VERBS = {
    "train": Verb("train an experiment, here or on many machines", lambda w: train_words(w)),
    "resume": Verb("go on with an old run", _resume),
    "run": Verb("run any program in the same places", _run),
    "submit": Verb("the commands of a file, as jobs, from the code as it is", _submit),
    "sweep": Verb("search for the best settings", _sweep),
    "jobs": Verb("how runs stand, wherever they run", _jobs),
    "logs": Verb("what the ranks of a run said, in order of time", _logs),
    "attach": Verb("follow a run as if it had been started here", _attach),
    "cancel": Verb("ask runs to save and end", _cancel),
    "runs": Verb("what was trained, with what, and what came of it", _runs),
    "show": Verb("one run and its curves", _show),
    "plot": Verb("curves of several runs, as a picture or a page", _plot),
    "data": Verb("get a data set, such as MovieLens", _data),
    "recommend": Verb("movies for a user, by a run of MovieLens", _recommend),
    "env": Verb("the environment of a source folder: build, show, clean", _env),
    "gpus": Verb("who uses the GPUs, here and elsewhere", _gpus),
    "doctor": Verb("what is wrong with this machine, and what mends it", _doctor),
    "preflight": Verb("whether a job would go well on its nodes", _preflight),
    "setup": Verb("make a rented machine a host of launch=ssh", _setup),
    "explain": Verb("what this process thinks its world is, and why", _explain),
    "node": Verb("be one node of a run; scripts call this", _node),
    "wandb-job": Verb("be the job of a wandb agent; scripts call this", _trial),
}


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--wait", action="store_true", help="slurm: follow the job to its end")


def _add_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", default="runs", help="the folder of all runs (default: runs)")


def _parser(verb: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"echelon {verb}",
        description=description,
        epilog=epilog,
        formatter_class=_Help,
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Prose is folded to the terminal; a paragraph with indented lines stays as it is written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        import textwrap

        kept = [
            part if "\n  " in part else textwrap.fill(part, width) for part in text.split("\n\n")
        ]
        return "\n\n".join(kept)
