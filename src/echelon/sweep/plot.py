"""`echelon sweep show NAME --plot FILE`: history, parameters and importance in one picture."""

from __future__ import annotations

import html
import json
from pathlib import Path

from echelon.errors import EchelonError, Fault
from echelon.sweep.plot_data import SweepPlotData, build_plot_data
from echelon.sweep.report import SweepReport
from echelon.utils.files import replace_file
from echelon.utils.os_errors import describe_os_error

_FILE_SUFFIXES = (".html", ".png", ".svg")


def plot_sweep(report: SweepReport, output: Path) -> None:
    if output.suffix.lower() not in _FILE_SUFFIXES:
        raise EchelonError(
            Fault(
                f"--plot {output}: what kind of file is that?",
                f"end it in {', '.join(_FILE_SUFFIXES)}",
            )
        )
    data = build_plot_data(report)
    try:
        with replace_file(output) as temporary:
            if output.suffix.lower() == ".html":
                temporary.write_text(render_page(data), encoding="utf-8")
            else:
                _save_image(data, temporary)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"--plot {output} cannot be written: {describe_os_error(error)}",
                "give another place",
            )
        ) from None


def render_page(plot_data: SweepPlotData) -> str:
    """Values may come from anywhere: they are data to the script, which writes them as text, and
    `<` cannot end the data early."""
    data = {
        **plot_data._asdict(),
        "points": [point._asdict() for point in plot_data.points],
        "axes": [axis._asdict() for axis in plot_data.axes],
        "lines": [line._asdict() for line in plot_data.lines],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("%TITLE%", html.escape(plot_data.title)).replace("%DATA%", text)


def _save_image(data: SweepPlotData, path: Path) -> None:
    try:
        from echelon.sweep.plot_matplotlib import save_image
    except ModuleNotFoundError:
        raise EchelonError(
            Fault(
                f"--plot …{path.suffix} needs matplotlib, which is not installed",
                "pip install 'echelon[plot]', or --plot sweep.html, which needs nothing",
            )
        ) from None
    save_image(data, path)
