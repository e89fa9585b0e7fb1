"""Prints verdicts: with colours on a terminal, as tab-separated lines for another program."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from echelon.doctor.verdict import FAIL, NONE, OK, WARN, Verdict
from echelon.utils.text import convert_for_terminal

STATE_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red", NONE: "dim"}
STATE_LABELS = {OK: "ok", WARN: "warn", FAIL: "FAIL", NONE: "–"}
LABEL_WIDTH = 6
MIN_WIDTH = 40


def make_console() -> Console:
    """Return a console for standard output that prints text as it is, without markup."""
    if hasattr(sys.stdout, "reconfigure"):  # output of other programs may be in any encoding
        sys.stdout.reconfigure(errors="replace")
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print a row per verdict, on a terminal with what to do under it.

    Elsewhere each is one line: state, check, what was found and what to do, between tabs.
    """
    console = make_console()
    if not console.is_terminal:
        for verdict in verdicts:
            print_tab_separated(verdict.state, verdict.check, verdict.found, verdict.do)
        return
    name_width = max(len(v.check) for v in verdicts)
    indent = name_width + 2 + LABEL_WIDTH
    for verdict in verdicts:
        is_remedy_shown = verdict.state != OK
        print_verdict(console, verdict, f"{verdict.check:<{name_width}}  ", indent, is_remedy_shown)


def print_verdict(
    console: Console, verdict: Verdict, prefix: str, indent: int, is_remedy_shown: bool = True
) -> None:
    """Print the state, a prefix and what was found, wrapped and indented; then what to do.

    What to do is not wrapped, so that it can be copied.
    """
    width = max(MIN_WIDTH, console.width) - LABEL_WIDTH
    space = " " * (indent - LABEL_WIDTH)
    first, *more = textwrap.wrap(
        verdict.found, width, initial_indent=prefix, subsequent_indent=space
    ) or [prefix]
    label = convert_for_terminal(f"{STATE_LABELS[verdict.state]:<{LABEL_WIDTH}}")
    style = STATE_STYLES[verdict.state]
    console.print(Text.assemble((label, style), convert_for_terminal(first)))
    for line in more:
        console.print(convert_for_terminal(" " * LABEL_WIDTH + line))
    if verdict.do and is_remedy_shown:
        console.print(Text(convert_for_terminal(" " * indent + f"→ {verdict.do}"), "cyan"))


def print_tab_separated(*fields: str) -> None:
    """Print fields between tabs; whitespace within a field becomes single spaces."""
    print("\t".join(" ".join(field.split()) for field in fields).rstrip())
