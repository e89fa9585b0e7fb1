"""`echelon plot RUN… -o FILE`: which runs, what of them, and into what."""

from __future__ import annotations

import contextlib
import glob
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon.errors import EchelonError, Exit, Fault
from echelon.runs import Run
from echelon.track.summary import short
from echelon.utils.files import replace_file
from echelon.utils.os_errors import describe_os_error
from echelon.view.metrics import Metrics, load
from echelon.view.record import Record, find, records, unknown
from echelon.view.sheet import Sheet, Wanted, sheet

_SUFFIXES = (".png", ".svg", ".html")


def plot(words: Sequence[str], root: str, output: Path, wanted: Wanted) -> int:
    _require_suffix(output)
    loaded = _with_numbers(_named(words, root))
    made = sheet([record for record, _ in loaded], [metrics for _, metrics in loaded], wanted)
    if not made.panels:
        raise EchelonError(
            Fault("nothing is left to draw on a logarithmic scale", "leave --log away")
        )
    _write(made, output)
    print(output)
    return Exit.OK


def _require_suffix(output: Path) -> None:
    if output.suffix.lower() not in _SUFFIXES:
        raise EchelonError(
            Fault(
                f"-o {output}: {output.suffix or 'a name without an ending'} is nothing that can "
                "be drawn",
                f"end the name with one of {', '.join(_SUFFIXES)}",
            )
        )


# --- which runs ---


def _named(words: Sequence[str], root: str) -> list[Run]:
    """Each once, in the order they were named; those of a pattern by name, 9 before 10."""
    found: dict[Path, Run] = {}
    for word in words:
        for run in _meant(word, root):
            found.setdefault(run.folder, run)
    return list(found.values())


def _meant(word: str, root: str) -> list[Run]:
    if not glob.has_magic(word):
        return [find(word, root)]
    with contextlib.suppress(EchelonError):  # a run may be called a[1]
        return [find(word, root)]
    return _matching(word, root)


def _matching(pattern: str, root: str) -> list[Run]:
    for folder in (Path(root), Path()):
        paths = sorted(glob.glob(str(folder / pattern)), key=_by_number)
        runs = [Run(Path(p).absolute()) for p in paths if not Path(p).is_symlink()]
        if runs := [run for run in runs if run.metrics_file.exists() or run.config_file.exists()]:
            return runs
    raise unknown(pattern, root)


def _by_number(path: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)
    ]


def _with_numbers(runs: Sequence[Run]) -> list[tuple[Record, Metrics]]:
    """Those without are named, and left out as long as others remain."""
    looked, _ = records(runs)
    by_folder = {record.run.folder: record for record in looked}
    loaded = [(by_folder[run.folder], load(by_folder[run.folder])) for run in runs]
    kept = [(record, metrics) for record, metrics in loaded if metrics.lines and metrics.shown]
    empty = [record.name for record, metrics in loaded if not (metrics.lines and metrics.shown)]
    if not kept:
        raise EchelonError(
            Fault(
                f"{', '.join(empty[:5])}: no numbers to draw",
                f"wait for the first line of metrics.jsonl, or look with `echelon show {empty[0]}`",
            ),
            exit=Exit.NOT_FOUND,
        )
    if empty:
        print(f"warning: {', '.join(empty)}: no numbers to draw, left out", file=sys.stderr)
    bad = sum(metrics.not_finite for _, metrics in kept)
    if bad:
        print(f"warning: {bad} values are not finite and left out", file=sys.stderr)
    return kept


# --- into what ---


def _write(made: Sheet, output: Path) -> None:
    """Beside and renamed: a viewer that reloads the file never sees a half."""
    draw = _page if output.suffix.lower() == ".html" else _figure
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(output) as temporary:
            draw(made, temporary)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"-o {output}: {short(output.absolute())} cannot be written: "
                f"{describe_os_error(error)}",
                "give another place with -o",
            )
        ) from error


def _page(made: Sheet, path: Path) -> None:
    from echelon.view.page import page

    path.write_text(page(made), encoding="utf-8")


def _figure(made: Sheet, path: Path) -> None:
    try:
        from echelon.view.figure import save
    except ModuleNotFoundError as error:
        raise EchelonError(
            Fault(
                f"-o …{path.suffix} needs matplotlib, which is not installed",
                "pip install 'echelon[plot]', or -o curves.html, which needs nothing",
            )
        ) from error
    save(made, path)
