"""The command line: verbs, each loading its room when it is called."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from echelon import __version__
from echelon.errors import EchelonError, Exit, nearest

if TYPE_CHECKING:
    from echelon.config.compose import OwnExperiment


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
    verbs = "\n".join(f"  {name:<10}{verb.does}" for name, verb in VERBS.items())
    return f"""\
echelon takes a PyTorch training from a laptop to a cluster.

{verbs}

Try:
  echelon train                                        a toy, in this process
  echelon train launch=local launch.procs=2            the same, on two
  echelon train experiment=my_file.py:experiment lr=0.1
  python my_file.py lr=0.1                             a file that calls echelon.main(experiment)

`echelon VERB --help` says more about each."""


# --- verbs ---


def train_words(words: Sequence[str], own: OwnExperiment | None = None) -> int:
    from echelon.config.settings import described

    parser = _parser(
        "train",
        "Train an experiment. Every setting can be overridden: KEY=VALUE, as in Hydra.",
        "settings (those of the experiment are given by their bare names, e.g. lr=0.1):\n\n"
        + described(),
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    given = parser.parse_intermixed_args(words)
    from echelon.entry import train

    return train(given.overrides, own, dry_run=given.dry_run, as_json=given.json)


def _resume(words: list[str]) -> int:
    parser = _parser("resume", "Go on with a run where its newest valid snapshot is.")
    parser.add_argument("run", help="a name, a folder, or `latest`")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. trainer.epochs=10")
    given = parser.parse_intermixed_args(words)
    from echelon.config.compose import recompose
    from echelon.entry import start
    from echelon.runs import open_run

    run = open_run(given.run)
    config = run.config()
    if config.trainer.resume == "never" or any(run.snapshots.glob("step-*")):
        given.overrides.insert(0, "trainer.resume=auto")  # from its own, however it began
    return start(recompose(config, given.overrides, name=run.name, folder=run.folder.parent))


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
    "train": Verb("train an experiment, here or on many processes", lambda w: train_words(w)),
    "resume": Verb("go on with an old run", _resume),
    "explain": Verb("what this process thinks its world is, and why", _explain),
}


def _parser(verb: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"echelon {verb}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
