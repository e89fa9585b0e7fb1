"""`echelon sweep show NAME --plot FILE`: history, parameters and importance in one picture."""

from __future__ import annotations

import html
import json
from pathlib import Path

from echelon.errors import EchelonError, Fault
from echelon.sweep.drawing import Drawing, drawing
from echelon.sweep.report import Report
from echelon.utils.files import replace_file
from echelon.utils.os_errors import describe_os_error

_KINDS = (".html", ".png", ".svg")


def plot(told: Report, output: Path) -> None:
    if output.suffix.lower() not in _KINDS:
        raise EchelonError(
            Fault(f"--plot {output}: what kind of file is that?", f"end it in {', '.join(_KINDS)}")
        )
    made = drawing(told)
    try:
        with replace_file(output) as temporary:
            if output.suffix.lower() == ".html":
                temporary.write_text(page(made), encoding="utf-8")
            else:
                _picture(made, temporary)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"--plot {output} cannot be written: {describe_os_error(error)}",
                "give another place",
            )
        ) from None


def page(made: Drawing) -> str:
    """Values may come from anywhere: they are data to the script, which writes them as text, and
    `<` cannot end the data early."""
    data = {
        **made._asdict(),
        "points": [point._asdict() for point in made.points],
        "axes": [axis._asdict() for axis in made.axes],
        "lines": [line._asdict() for line in made.lines],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("%TITLE%", html.escape(made.title)).replace("%DATA%", text)


def _picture(made: Drawing, path: Path) -> None:
    try:
        from echelon.sweep.picture import save
    except ModuleNotFoundError:
        raise EchelonError(
            Fault(
                f"--plot …{path.suffix} needs matplotlib, which is not installed",
                "pip install 'echelon[plot]', or --plot sweep.html, which needs nothing",
            )
        ) from None
    save(made, path)
