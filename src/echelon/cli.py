"""The command line: verbs, each loading its room, and all that takes time, when it is called."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from echelon import __version__
from echelon.errors import EchelonError, Exit, suggest_nearest


class Subcommand(NamedTuple):
    summary: str
    module: str
    """Of `echelon.commands`, loaded when the verb is typed."""
    function: str


def main() -> None:
    sys.exit(run_guarded(lambda: run_command(sys.argv[1:])))


def run_guarded(command: Callable[[], int]) -> int:
    """A user's mistake is a sentence and an exit code, never a traceback of ours."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # LC_ALL=C has no letter for │ or ×
            stream.reconfigure(errors="replace")
    code: int = Exit.OK
    try:
        code = int(command())
        sys.stdout.flush()  # here, where a reader that has left is no error
        return code
    except EchelonError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return error.exit
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except BrokenPipeError:  # `echelon … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # how rich takes the same
            return Exit.OK
        raise
    except Exception as error:  # a user's file that cannot be imported, or a fault of ours
        from echelon.runs.failure import format_user_traceback

        print(format_user_traceback(error), end="", file=sys.stderr)
        return Exit.FAILED


def run_command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_render_overview())
        return Exit.OK
    if words[0] in ("-V", "--version"):
        print(f"echelon {__version__}")
        return Exit.OK
    verb = SUBCOMMANDS.get(words[0])
    if verb is None:
        print(
            f"error: there is no verb {words[0]!r}\n  hint: {suggest_nearest(words[0], SUBCOMMANDS)}",
            file=sys.stderr,
        )
        return Exit.USAGE
    # A recipe brings its commands itself, so that nothing in the core imports it.
    is_recipe = "." in verb.module
    module = import_module(verb.module if is_recipe else f"echelon.commands.{verb.module}")
    function = getattr(module, verb.function)
    return int(function(words[1:]))


def _render_overview() -> str:
    verbs = "\n".join(f"  {name:<11}{verb.summary}" for name, verb in SUBCOMMANDS.items())
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


_MOVIELENS = "echelon.recipes.movielens.commands"

SUBCOMMANDS = {
    "train": Subcommand("train an experiment, here or on many machines", "train", "train"),
    "resume": Subcommand("go on with an old run", "train", "resume"),
    "run": Subcommand("run any program in the same places", "train", "run"),
    "submit": Subcommand("the commands of a file, as jobs, from this code", "submit", "submit"),
    "sweep": Subcommand("search for the best settings", "sweep", "sweep"),
    "jobs": Subcommand("how runs stand, wherever they run", "jobs", "jobs"),
    "logs": Subcommand("what the ranks of a run said, in order of time", "jobs", "logs"),
    "attach": Subcommand("follow a run as if it had been started here", "jobs", "attach"),
    "cancel": Subcommand("ask runs to save and end", "jobs", "cancel"),
    "runs": Subcommand("what was trained, with what, and what came of it", "runs", "runs"),
    "show": Subcommand("one run and its curves", "runs", "show"),
    "plot": Subcommand("curves of several runs, as a picture or a page", "runs", "plot"),
    "data": Subcommand("get a data set, such as MovieLens", _MOVIELENS, "data"),
    "recommend": Subcommand("movies for a user, by a run of MovieLens", _MOVIELENS, "recommend"),
    "env": Subcommand("the environment of a source folder: build, show, clean", "submit", "env"),
    "gpus": Subcommand("who uses the GPUs, here and elsewhere", "gpus", "gpus"),
    "doctor": Subcommand("what is wrong with this machine, and what mends it", "gpus", "doctor"),
    "preflight": Subcommand("whether a job would go well on its nodes", "gpus", "preflight"),
    "setup": Subcommand("make a rented machine a host of launch=ssh", "gpus", "setup"),
    "explain": Subcommand("what this process thinks its world is, and why", "train", "explain"),
    "node": Subcommand("be one node of a run; scripts call this", "train", "node"),
    "wandb-job": Subcommand(
        "be the job of a wandb agent; scripts call this", "submit", "wandb_job"
    ),
}
