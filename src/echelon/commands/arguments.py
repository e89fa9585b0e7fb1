"""What the command lines share: a parser, common arguments, and types of values."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

from echelon.errors import EchelonError, Fault

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
        conflict_handler="resolve",  # `train` has a --help of its own
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


def add_help_topics(parser: argparse.ArgumentParser, render_topic: Callable[[str], str]) -> None:
    """Let `--help` take a topic, whose page `render_topic` returns."""

    class HelpTopicAction(argparse.Action):
        def __call__(
            self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
        ) -> None:
            # `--help lr=0.1` is the plain help: the word is an override.
            if values and "=" not in values:
                print(render_topic(values))
            else:
                parser.print_help()
            parser.exit()

    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        metavar="TOPIC",
        action=HelpTopicAction,
        default=argparse.SUPPRESS,
        help="show this page, or all settings of a TOPIC: a group, a word, or `all`",
    )


def parse_with_overrides(
    parser: argparse.ArgumentParser, words: Sequence[str], list_names: Callable[[], Sequence[str]]
) -> argparse.Namespace:
    """Return the arguments of a command that takes overrides.

    Raises an EchelonError for `--epochs 3`, as other programs take it, that says how it is written
    here. `list_names` returns the names of all settings, and is called only then.
    """
    given, unknown = parser.parse_known_intermixed_args(words)
    options = [word for word in unknown if word.startswith("-")]  # the others are their values
    if not options:
        return given
    names = list_names()
    raise EchelonError(*(_explain_option(word, words, names, parser.prog) for word in options))


def _explain_option(word: str, words: Sequence[str], names: Sequence[str], program: str) -> Fault:
    """Return the fault of an option that is not one, with the setting that it may mean."""
    option, equals, value = word.partition("=")
    following = list(words)[list(words).index(word) + 1 :][:1] if word in words else []
    if not equals and following and "=" not in following[0] and following[0][:2] != "--":
        value = following[0]
    typed = f"{option} {value}" if value and not equals else word
    key = option.lstrip("-").replace("-", "_")
    short = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = difflib.get_close_matches(key, [*names, *short], n=1, cutoff=0.7)
    setting = (
        key if key in names else short.get(key) or (short.get(near[0], near[0]) if near else "")
    )
    return Fault(
        f"{typed} is not an option of `{program}`: settings are written KEY=VALUE",
        f"write {setting}={value or 'true'}"
        if setting
        else f"{program} --help {key} searches them",
    )


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all commands that start a run."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--wait", action="store_true", help="slurm, k8s: follow the job to its end")


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


def parse_size_bytes(text: str) -> int:
    """Return a number of bytes from a size such as 256MB, 1.5GB, 64MiB or 4096."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", text)
    size = 0
    if found:
        power = "kMGT".index(found[2].replace("K", "k")) + 1 if found[2] else 0
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give one such as 256MB")
    return size


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
