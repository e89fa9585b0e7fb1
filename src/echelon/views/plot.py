"""`echelon plot RUN… -o FILE`: which runs, what of them, and in which format."""

from __future__ import annotations

import contextlib
import glob
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.curves import RunMetrics, load_metrics
from echelon.runs.find import find_run_including_broken, make_unknown_run_error
from echelon.runs.record import RunRecord, read_run_records
from echelon.runs.run_folder import Run
from echelon.tracking.summary import shorten_path
from echelon.utils.files import replace_file
from echelon.utils.os_errors import format_os_error_reason
from echelon.views.plot_data import Plot, PlotOptions, build_plot

_SUFFIXES = (".png", ".svg", ".html")


def plot_runs(words: Sequence[str], root: str, output: Path, options: PlotOptions) -> int:
    """Draw the runs into the file, whose suffix decides the format, and print its name."""
    _require_suffix(output)
    loaded = _load_metrics(_find_runs(words, root))
    plot = build_plot([record for record, _ in loaded], [metrics for _, metrics in loaded], options)
    if not plot.panels:
        raise EchelonError(
            Fault("nothing is left to draw on a logarithmic scale", "leave --log away")
        )
    _write_output(plot, output)
    print(output)
    return ExitCode.OK


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


def _find_runs(words: Sequence[str], root: str) -> list[Run]:
    """Return each named run once, in the order of the arguments; those of a pattern by name, 9
    before 10."""
    runs: dict[Path, Run] = {}
    for word in words:
        for run in _resolve_run_argument(word, root):
            runs.setdefault(run.folder, run)
    return list(runs.values())


def _resolve_run_argument(word: str, root: str) -> list[Run]:
    if not glob.has_magic(word):
        return [find_run_including_broken(word, root)]
    with contextlib.suppress(EchelonError):  # a run may be called a[1]
        return [find_run_including_broken(word, root)]
    return _glob_runs(word, root)


def _glob_runs(pattern: str, root: str) -> list[Run]:
    for folder in (Path(root), Path()):
        paths = sorted(glob.glob(str(folder / pattern)), key=_get_natural_sort_key)
        runs = [Run(Path(p).absolute()) for p in paths if not Path(p).is_symlink()]
        if runs := [run for run in runs if run.metrics_file.exists() or run.config_file.exists()]:
            return runs
    raise make_unknown_run_error(pattern, root)


def _get_natural_sort_key(path: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)
    ]


def _load_metrics(runs: Sequence[Run]) -> list[tuple[RunRecord, RunMetrics]]:
    """Return records and metrics of the runs. Runs without numbers are left out with a warning
    as long as others remain."""
    records, _ = read_run_records(runs)
    by_folder = {record.run.folder: record for record in records}
    loaded = [(by_folder[run.folder], load_metrics(by_folder[run.folder])) for run in runs]
    kept = [(record, metrics) for record, metrics in loaded if metrics.can_be_drawn]
    empty = [record.name for record, metrics in loaded if not metrics.can_be_drawn]
    if not kept:
        raise EchelonError(
            Fault(
                f"{', '.join(empty[:5])}: no numbers to draw",
                f"wait for the first line of metrics.jsonl, or look with `echelon show {empty[0]}`",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    if empty:
        print(f"warning: {', '.join(empty)}: no numbers to draw, left out", file=sys.stderr)
    not_finite = sum(metrics.not_finite for _, metrics in kept)
    if not_finite:
        print(f"warning: {not_finite} values are not finite and left out", file=sys.stderr)
    return kept


# --- into what ---


def _write_output(plot: Plot, output: Path) -> None:
    """Write the file atomically: a viewer that reloads it never sees a half."""
    draw = _write_page if output.suffix.lower() == ".html" else _write_figure
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(output) as temporary:
            draw(plot, temporary)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"-o {output}: {shorten_path(output.absolute())} cannot be written: "
                f"{format_os_error_reason(error)}",
                "give another place with -o",
            )
        ) from error


def _write_page(plot: Plot, path: Path) -> None:
    from echelon.views.plot_page import render_page

    path.write_text(render_page(plot), encoding="utf-8")


def _write_figure(plot: Plot, path: Path) -> None:
    try:
        from echelon.views.plot_image import save_figure
    except ModuleNotFoundError as error:
        raise EchelonError(
            Fault(
                f"-o …{path.suffix} needs matplotlib, which is not installed",
                "pip install 'echelon[plot]', or -o curves.html, which needs nothing",
            )
        ) from error
    save_figure(plot, path)
