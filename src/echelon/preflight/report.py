"""Prints the verdicts on all nodes: a matrix and what to do, or tab-separated lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from echelon.doctor.report import (
    LABEL_WIDTH,
    STATE_LABELS,
    STATE_STYLES,
    make_console,
    print_tab_separated,
    print_verdict,
)
from echelon.doctor.verdict import FAIL, NONE, WARN, find_worst_state
from echelon.preflight.rules import NODE_CHECKS, NodeVerdict
from echelon.utils.text import convert_for_terminal


def print_verdict_matrix(names: Sequence[str], verdicts: Sequence[NodeVerdict]) -> None:
    """Print nodes by checks on a terminal, then a sentence for each problem.

    Elsewhere each verdict is one line: state, node, check, what was found and what to do, between
    tabs.
    """
    console = make_console()
    if not console.is_terminal:
        for node, verdict in verdicts:
            print_tab_separated(
                verdict.state, names[node], verdict.check, verdict.found, verdict.do
            )
        return
    name_width = max(map(len, names)) + 2
    for checks in _split_checks_by_width(console.width - name_width):
        _print_part(console, checks, names, name_width, verdicts)
        console.print()
    for node, verdict in verdicts:
        is_slowest = verdict.check == "link" and verdict.found.endswith("slowest node")
        if verdict.state in (WARN, FAIL) or is_slowest:
            sentence = f"{names[node]}, {verdict.check}: {verdict.found}"
            print_verdict(console, verdict._replace(found=sentence), "", LABEL_WIDTH)
            console.print()
    fail_count = sum(verdict.state == FAIL for _, verdict in verdicts)
    console.print(f"not ready: {fail_count} to fix" if fail_count else "ready")


def _print_part(
    console: Console,
    checks: Sequence[str],
    names: Sequence[str],
    name_width: int,
    verdicts: Sequence[NodeVerdict],
) -> None:
    """Print the part of the matrix with these checks."""
    console.print(Text(" " * name_width + "  ".join(checks), "bold"))
    for node, name in enumerate(names):
        row = Text(f"{name:<{name_width}}")
        for check in checks:
            own = [v for n, v in verdicts if n == node and v.check == check]
            state = find_worst_state(own) if own else NONE
            cell = f"{STATE_LABELS[state]:<{len(check) + 2}}"
            row += Text(convert_for_terminal(cell), STATE_STYLES[state])
        row.rstrip()
        console.print(row)


def _split_checks_by_width(width: int) -> Iterator[list[str]]:
    """Yield the checks in groups, each as long as fits the width."""
    group: list[str] = []
    for check in NODE_CHECKS:
        if group and len("  ".join([*group, check])) > width:
            yield group
            group = []
        group.append(check)
    yield group
