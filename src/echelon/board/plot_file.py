"""The curves of runs as the one HTML file that `echelon plot -o curves.html` writes, to be kept or
sent on."""

from __future__ import annotations

import math

from echelon.board.request import NotFoundError, Request, RequestError, Response, Route
from echelon.runs.curves import AXES

_MAX_RUNS = 200


def send_plot_file(request: Request) -> Response:
    """Answer with the page of the runs `run`, as a file to save.

    `metric`, which may be repeated, `x`, `smooth` and `log` (0 or 1) mean what they mean to
    `echelon plot`, and so does leaving them out. Metrics that none of the runs has, and runs
    without numbers, are left out as long as others remain.
    """
    from echelon.runs.curves import load_metrics
    from echelon.runs.record import read_run_records
    from echelon.views.plot_data import PlotOptions, build_plot
    from echelon.views.plot_page import render_page

    options = _read_options(request)
    ids = list(dict.fromkeys(request.get_all("run")))
    if not 0 < len(ids) <= _MAX_RUNS:
        raise RequestError(f"{len(ids)} runs", f"ask for 1 to {_MAX_RUNS} of them: run=ID&run=ID")
    runs = [request.board.find_run(run_id) for run_id in ids]
    records, _ = read_run_records(runs)
    by_folder = {record.run.folder: record for record in records}
    loaded = [(by_folder[run.folder], load_metrics(by_folder[run.folder])) for run in runs]
    kept = [(record, metrics) for record, metrics in loaded if metrics.can_be_drawn]
    if not kept:
        raise NotFoundError("none of these runs has numbers to draw", "wait for their first lines")
    known = {name for _, metrics in kept for name in metrics.curves}
    wanted = [name for name in request.get_all("metric") if name in known]
    if request.get_all("metric") and not wanted:
        raise NotFoundError("none of these runs has these metrics")
    plot = build_plot(
        [record for record, _ in kept],
        [metrics for _, metrics in kept],
        PlotOptions(wanted, *options, title=""),
    )
    if not plot.panels:
        raise RequestError("nothing is left to draw on a logarithmic scale", "leave log=1 away")
    return Response(
        render_page(plot).encode(),
        "text/html; charset=utf-8",
        headers={"Content-Disposition": 'attachment; filename="curves.html"'},
    )


def _read_options(request: Request) -> tuple[str, float | None, bool | None]:
    x = request.get("x", "step")
    if x not in AXES:
        raise RequestError(f"x={x[:80]!r} is not an axis", f"one of {', '.join(AXES)}")
    smooth = request.get_float("smooth")
    if smooth is not None and not (math.isfinite(smooth) and 0 <= smooth < 1):
        raise RequestError(f"smooth={smooth:g} is not between 0 and 1")
    log = request.get("log")
    if log not in ("", "0", "1"):
        raise RequestError(f"log={log[:80]!r} is neither 0 nor 1")
    return x, smooth, log == "1" if log else None


ROUTES: list[Route] = [("GET", "/api/plot.html", send_plot_file)]
