"""Prints the table of docs/ports.md: lines of a training outside its model and data.

    python benchmarks/ports/count_lines.py

Of a file the lines after `# --- training` count, without blank lines, comments, docstrings and
imports. The files of the peers import model, data and settings from the example.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("lightning", "accelerate")
_BEGIN = "# --- training"


def count_lines(file: Path) -> int:
    """Return the lines of code of a file's training."""
    text = file.read_text()
    above, mark, _ = text.partition(f"\n{_BEGIN}\n")
    if not mark:
        raise SystemExit(f"{file} has no line {_BEGIN!r}")
    first = above.count("\n") + 2
    left_out = _find_imports_and_docstrings(ast.parse(text))
    return sum(
        number > first and number not in left_out and line.strip() != "" and not _is_comment(line)
        for number, line in enumerate(text.splitlines(), 1)
    )


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _find_imports_and_docstrings(tree: ast.Module) -> set[int]:
    """Return the numbers of their lines; a string that stands alone is a docstring."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            assert isinstance(node, ast.stmt)
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def make_table() -> str:
    """Return the table as Markdown, with a row for every port."""
    rows = ["| port | Echelon | Lightning | Accelerate |", "|---|---|---|---|"]
    for port in sorted((ROOT / "examples" / "ports").glob("*.py")):
        of_peers = [Path(__file__).parent / f"{port.stem}_{peer}.py" for peer in PEERS]
        counts = [str(count_lines(file)) if file.exists() else "–" for file in (port, *of_peers)]
        rows.append(f"| `{port.name}` | {' | '.join(counts)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(make_table())
