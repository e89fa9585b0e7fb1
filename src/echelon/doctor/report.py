"""Verdicts on a screen, or as plain lines for another program."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from echelon.doctor.verdict import FAIL, NONE, OK, WARN, Verdict, find_worst_state
from echelon.preflight.rules import NODE_CHECKS, NodeVerdict
from echelon.utils.text import convert_for_terminal

STATE_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red", NONE: "dim"}
STATE_LABELS = {OK: "ok", WARN: "warn", FAIL: "FAIL", NONE: "–"}
_MIN_WIDTH = 40


def make_console() -> Console:
    if hasattr(sys.stdout, "reconfigure"):  # what a program said may be in any letters
        sys.stdout.reconfigure(errors="replace")
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """On a terminal with what to do under each; else a line each with tabs between state, check,
    what was found and what to do."""
    screen = make_console()
    if not screen.is_terminal:
        for verdict in verdicts:
            fields = (verdict.state, verdict.check, verdict.found, verdict.do)
            print("\t".join(" ".join(field.split()) for field in fields).rstrip())
        return
    wide = max(len(v.check) for v in verdicts)
    room = max(_MIN_WIDTH, screen.width) - wide - 8
    for verdict in verdicts:
        lines = textwrap.wrap(verdict.found, room) or [""]
        screen.print(_render_state(verdict, f"{verdict.check:<{wide}}  {lines[0]}"))
        for line in lines[1:]:
            screen.print(convert_for_terminal(" " * (wide + 8) + line))
        if verdict.do and verdict.state != OK:  # whole, so that it can be copied
            screen.print(Text(convert_for_terminal(" " * (wide + 8) + f"→ {verdict.do}"), "cyan"))


def print_node_matrix(names: Sequence[str], findings: Sequence[NodeVerdict]) -> None:
    """Nodes by checks on a terminal, then a sentence for each thing that is wrong; else a line each
    with tabs between state, node, check, what was found and what to do."""
    screen = make_console()
    if not screen.is_terminal:
        for node, verdict in findings:
            fields = (verdict.state, names[node], verdict.check, verdict.found, verdict.do)
            print("\t".join(" ".join(field.split()) for field in fields).rstrip())
        return
    wide = max(map(len, names)) + 2
    for checks in _split_checks(screen.width - wide):
        screen.print(Text(" " * wide + "  ".join(checks), "bold"))
        for node, name in enumerate(names):
            row = Text(f"{name:<{wide}}")
            for check in checks:
                mine = [v for n, v in findings if n == node and v.check == check]
                state = find_worst_state(mine) if mine else NONE
                row += Text(
                    convert_for_terminal(f"{STATE_LABELS[state]:<{len(check) + 2}}"),
                    STATE_STYLES[state],
                )
            row.rstrip()
            screen.print(row)
        screen.print()
    for node, verdict in findings:
        slowest = verdict.check == "link" and verdict.found.endswith("slowest node")
        if verdict.state in (WARN, FAIL) or slowest:
            sentence = f"{names[node]}, {verdict.check}: {verdict.found}"
            first, *more = textwrap.wrap(sentence, max(_MIN_WIDTH, screen.width) - 6)
            screen.print(_render_state(verdict, first))
            for line in more:
                screen.print(convert_for_terminal(" " * 6 + line))
            if verdict.do:
                screen.print(Text(convert_for_terminal(f"      → {verdict.do}"), "cyan"))
            screen.print()
    fails = sum(verdict.state == FAIL for _, verdict in findings)
    screen.print(f"not ready: {fails} to mend" if fails else "ready")


def _split_checks(width: int) -> Iterator[list[str]]:
    """The checks, as many beside each other as there is room for."""
    row: list[str] = []
    for check in NODE_CHECKS:
        if row and len("  ".join([*row, check])) > width:
            yield row
            row = []
        row.append(check)
    yield row


def _render_state(verdict: Verdict, text: str) -> Text:
    state = convert_for_terminal(f"{STATE_LABELS[verdict.state]:<6}")
    return Text.assemble((state, STATE_STYLES[verdict.state]), convert_for_terminal(text))
