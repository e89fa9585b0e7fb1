"""The command line: verbs, each loading its room, and all that takes time, when it is called."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from echelon import __version__
from echelon.errors import EchelonError, Exit, nearest


class Verb(NamedTuple):
    does: str
    room: str
    """Of `echelon.verbs`, loaded when the verb is typed."""
    function: str


def main() -> None:
    sys.exit(guarded(lambda: dispatch(sys.argv[1:])))


def guarded(verb: Callable[[], int]) -> int:
    """A user's mistake is a sentence and an exit code, never a traceback of ours."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # LC_ALL=C has no letter for │ or ×
            stream.reconfigure(errors="replace")
    code: int = Exit.OK
    try:
        code = int(verb())
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
    function = getattr(import_module(f"echelon.verbs.{verb.room}"), verb.function)
    return int(function(words[1:]))


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


VERBS = {
    "train": Verb("train an experiment, here or on many machines", "training", "train"),
    "resume": Verb("go on with an old run", "training", "resume"),
    "run": Verb("run any program in the same places", "training", "run"),
    "submit": Verb("the commands of a file, as jobs, from this code", "submitting", "submit"),
    "sweep": Verb("search for the best settings", "sweeping", "sweep"),
    "jobs": Verb("how runs stand, wherever they run", "running", "jobs"),
    "logs": Verb("what the ranks of a run said, in order of time", "running", "logs"),
    "attach": Verb("follow a run as if it had been started here", "running", "attach"),
    "cancel": Verb("ask runs to save and end", "running", "cancel"),
    "runs": Verb("what was trained, with what, and what came of it", "results", "runs"),
    "show": Verb("one run and its curves", "results", "show"),
    "plot": Verb("curves of several runs, as a picture or a page", "results", "plot"),
    "data": Verb("get a data set, such as MovieLens", "movies", "data"),
    "recommend": Verb("movies for a user, by a run of MovieLens", "movies", "recommend"),
    "env": Verb("the environment of a source folder: build, show, clean", "submitting", "env"),
    "gpus": Verb("who uses the GPUs, here and elsewhere", "machines", "gpus"),
    "doctor": Verb("what is wrong with this machine, and what mends it", "machines", "doctor"),
    "preflight": Verb("whether a job would go well on its nodes", "machines", "preflight"),
    "setup": Verb("make a rented machine a host of launch=ssh", "machines", "setup"),
    "explain": Verb("what this process thinks its world is, and why", "training", "explain"),
    "node": Verb("be one node of a run; scripts call this", "training", "node"),
    "wandb-job": Verb("be the job of a wandb agent; scripts call this", "submitting", "wandb_job"),
}
