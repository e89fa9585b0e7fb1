"""What the command lines share: a parser, common arguments, and types of values."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable

RUN_HELP = "a name, a folder, a job's number, or `latest`"


def make_parser(
    command: str, description: str, epilog: str | Callable[[], str] | None = None
) -> argparse.ArgumentParser:
    """Return the argument parser of `echelon COMMAND`.

    `epilog` is the text below the options. A function is called only if the help is printed; use
    one where the text needs slow imports or a user's file.
    """
    parser = LazyEpilogParser(
        prog=f"echelon {command}",
        description=description,
        formatter_class=ParagraphHelpFormatter,
    )
    parser.make_epilog = epilog if callable(epilog) else None
    parser.epilog = None if callable(epilog) else epilog
    return parser


class LazyEpilogParser(argparse.ArgumentParser):
    """A parser that can make the text below its options when the help is printed."""

    make_epilog: Callable[[], str] | None = None

    def format_help(self) -> str:
        """Return the whole help text."""
        if self.make_epilog is not None:
            self.epilog = self.make_epilog()
        return super().format_help()


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all commands that start a run."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--wait", action="store_true", help="slurm: follow the job to its end")


def add_dir_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument --dir, the folder of all runs."""
    parser.add_argument("--dir", default="runs", help="the folder of all runs (default: runs)")


def split_at_double_dash(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first `--`, and those after it.

    argparse cannot split them: with two lists of words, it would give all words to the first.
    """
    separator = words.index("--") if "--" in words else len(words)
    return words[:separator], words[separator + 1 :]


def parse_gpu_count(text: str) -> int:
    """Return a number of GPUs, at least 1.

    Like every `parse_` function here it is a `type=` of argparse, which reports the
    ArgumentTypeError that it raises as a usage error.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs")
    return int(text)


def parse_interval_s(text: str) -> float:
    """Return the time between two refreshes in seconds, from a tenth of a second to a day."""
    with contextlib.suppress(ValueError):
        if 0.1 <= float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not an interval: give 0.1 to 86400 s")


def parse_fraction(text: str) -> float:
    """Return a number of at least 0 and below 1."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")


def parse_names(text: str) -> list[str]:
    """Return the names in a list with commas."""
    if not (names := [name.strip() for name in text.split(",") if name.strip()]):
        raise argparse.ArgumentTypeError("give at least one name")
    return names


def parse_positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def parse_line_count(text: str) -> int:
    """Return a number of lines, at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def parse_days(text: str) -> float:
    """Return a number of days, at least 0 and finite."""
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return days


def parse_seconds(text: str) -> float:
    """Return a number of seconds, above 0 and finite."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


def parse_lease_s(text: str) -> float:
    """Return the length of a lease in seconds.

    It must be three times as long as the interval in which workers renew it: with less, a worker
    that is merely slow would lose its trial.
    """
    with contextlib.suppress(ValueError):
        if float(text) >= 6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not 6 or more: workers show life every 2 s")


class ParagraphHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps prose to the terminal; a paragraph with indented lines stays as it is written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        import textwrap

        paragraphs = [
            part if "\n  " in part else textwrap.fill(part, width) for part in text.split("\n\n")
        ]
        return "\n\n".join(paragraphs)
