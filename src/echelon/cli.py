"""The command line: a table of commands, each imported when it is typed.

`echelon --help` has to answer at once, so nothing here imports torch, Hydra or rich.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from echelon.errors import EchelonError, ExitCode, suggest_nearest
from echelon.utils.streams import open_missing_streams


class Subcommand(NamedTuple):
    """One command that can be typed; its function has its name, with `_` for `-` and blanks."""

    summary: str
    """Its line in `echelon --help`."""
    module: str
    """Of `echelon.commands`; imported when the command is typed."""


def main() -> None:
    """Run the command that was typed, and exit with its code. This is the script `echelon`."""
    sys.exit(run_and_report_faults(lambda: run_command(sys.argv[1:])))


def run_and_report_faults(command: Callable[[], int]) -> int:
    """Run a command and return its exit code, whatever it raises.

    A fault of the user's or the machine's becomes a sentence and an exit code, never a traceback.
    An exception of ours keeps its traceback.
    """
    open_missing_streams()  # first: the next file that is opened must not become one of them
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # LC_ALL=C cannot encode │ or ×
            stream.reconfigure(errors="replace")
    code: int = ExitCode.OK
    try:
        code = int(command())
        sys.stdout.flush()  # here, where a closed pipe is handled
        return code
    except EchelonError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return error.exit
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `echelon … | head`
        # Python flushes stdout once more at exit, and would print another error there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except SystemExit as exit_request:
        if isinstance(exit_request.__context__, BrokenPipeError):  # rich turns it into an exit
            return ExitCode.OK
        raise
    except Exception as error:  # a user's file that cannot be imported, or a bug of ours
        from echelon.runs.failure import format_user_traceback

        print(format_user_traceback(error), end="", file=sys.stderr)
        return ExitCode.FAILED


def run_command(words: list[str]) -> int:
    """Run the command that these words are, `["train", "lr=0.1"]`; returns its exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_render_overview())
        return ExitCode.OK
    if words[0] in ("-V", "--version"):
        return int(import_module("echelon.commands.version").version(words[1:]))
    name = words[0]
    subcommand = SUBCOMMANDS.get(name)
    if " ".join(words[:2]) in RECIPE_COMMANDS:
        name, words = " ".join(words[:2]), words[1:]
        subcommand = RECIPE_COMMANDS[name]
    if subcommand is None:
        hint = suggest_nearest(name, SUBCOMMANDS)
        print(f"error: there is no command {name!r}\n  hint: {hint}", file=sys.stderr)
        return ExitCode.USAGE
    # A recipe brings its commands itself, so that nothing in the core imports it.
    is_recipe = "." in subcommand.module
    module = subcommand.module if is_recipe else f"echelon.commands.{subcommand.module}"
    return int(getattr(import_module(module), re.sub("[- ]", "_", name))(words[1:]))


def _render_overview() -> str:
    width = max(map(len, SUBCOMMANDS)) + 2
    lines = "\n".join(f"  {name:<{width}}{each.summary}" for name, each in SUBCOMMANDS.items())
    return f"""\
echelon takes a PyTorch training from a laptop to a cluster.

{lines}

Try:
  echelon train                                        a toy, in this process
  echelon train launch=local launch.procs=2            the same, on two
  echelon train launch=slurm launch.nodes=2            the same, as a batch job
  echelon train experiment=my_file.py:experiment lr=0.1
  python my_file.py lr=0.1                             a file with echelon.main

`echelon COMMAND --help` says more about each."""


_MOVIELENS = "echelon.recipes.movielens.commands"

SUBCOMMANDS = {
    "init": Subcommand("write a small project that trains at once", "init"),
    "train": Subcommand("train an experiment, here or on many machines", "train"),
    "resume": Subcommand("continue an old run", "train"),
    "run": Subcommand("run any program in the same places", "train"),
    "submit": Subcommand("run the commands of a file as jobs, from this code", "submit"),
    "sweep": Subcommand("search for the best settings", "sweep"),
    "dev": Subcommand("a shell, an ssh entry and ports in an allocation of Slurm", "dev"),
    "jobs": Subcommand("the status of runs, wherever they run", "jobs"),
    "logs": Subcommand("the logs of a run's ranks, in order of time", "jobs"),
    "stacks": Subcommand("where all ranks of a run stand: stacks and collectives", "jobs"),
    "attach": Subcommand("follow a run as if it had been started here", "jobs"),
    "scale": Subcommand("another number of nodes for a run that trains", "jobs"),
    "cancel": Subcommand("ask runs to save and end", "jobs"),
    "runs": Subcommand("what was trained, with which settings and results", "runs"),
    "show": Subcommand("one run and its curves", "runs"),
    "pull": Subcommand("snapshots of a run on a cluster, brought here", "pull"),
    "cost": Subcommand("what runs cost: GPU-hours, energy, price", "cost"),
    "board": Subcommand("one live page over runs, sweeps, jobs and machines", "board"),
    "plot": Subcommand("curves of several runs, as an image or a page", "runs"),
    "notify": Subcommand("news of runs for your phone: try whether it arrives", "notify"),
    "note": Subcommand("a note and tags for a run", "runs"),
    "rm": Subcommand("move runs into the trash, and get them back", "removal"),
    "archive": Subcommand("take runs out of the lists, and back into them", "removal"),
    "data": Subcommand("look at files of samples, check them, pack them into shards", "data"),
    "recommend": Subcommand("movies for a user, by a run of MovieLens", _MOVIELENS),
    "env": Subcommand("the environment of a source folder: build, show, clean", "env"),
    "cluster": Subcommand("what is free on a Slurm cluster, when a job would start", "cluster"),
    "gpus": Subcommand("who uses the GPUs, here and on other machines", "gpus"),
    "doctor": Subcommand("what is wrong with this machine, and what fixes it", "doctor"),
    "preflight": Subcommand("whether a job would run well on its nodes", "doctor"),
    "setup": Subcommand("a rented machine for launch=ssh; defaults for a cluster", "setup"),
    "completion": Subcommand("completion of command lines in bash, zsh and fish", "completion"),
    "explain": Subcommand("the rank and world of this process, and why", "explain"),
    "node": Subcommand("be one node of a run; scripts call this", "node"),
    "pod": Subcommand("be one pod of a run of launch=k8s; manifests call this", "node"),
    "return-nodes": Subcommand("start lost nodes of a Slurm job again; scripts call this", "node"),
    "wandb-job": Subcommand("be the job of a wandb agent; scripts call this", "submit"),
}

RECIPE_COMMANDS = {"data movielens": Subcommand("get a data set of MovieLens", _MOVIELENS)}
"""What recipes add to a command of the core. They are not in the overview."""
