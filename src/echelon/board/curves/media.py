"""Images, histograms and texts of a run: which there are, and one of them.

Where their lines are is found in the same pass over metrics.jsonl as the curves; the values
themselves are read when they are asked for.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from echelon.board.curves.curve_file import DamagedCurvesError
from echelon.board.curves.curve_pyramid import CurvePyramid
from echelon.board.curves.curve_queries import pyramids
from echelon.board.curves.line_columns import MEDIA_KINDS, get_media_kind
from echelon.board.request import (
    ConflictError,
    NotFoundError,
    Request,
    Response,
    Route,
    json_response,
)
from echelon.board.safe_files import read_inside
from echelon.runs.metrics_file import MetricsBlocks
from echelon.runs.run_folder import Run
from echelon.tracking.media_records import find_image
from echelon.utils.os_errors import format_os_error_reason

_READ_S = 0.25
_MAX_STEPS = 100_000
"""Of one medium in a list: the newest ones."""
_MAX_IMAGE_BYTES = 64 << 20
_PNG_BEGIN = b"\x89PNG\r\n\x1a\n"


def list_media(request: Request) -> Response:
    """Answer with the names of images, histograms and texts, and the steps that have one."""
    pyramid = _refresh(request)
    items = []
    for kind, name in pyramid.list_keys():
        if kind in MEDIA_KINDS and (steps := _read_places(pyramid, kind, name)[0]):
            items.append({"name": name, "kind": kind, "steps": sorted({*steps})})
    share = pyramid.share if pyramid.is_far_behind else 1.0
    return json_response({"items": items, "share": share})


def show_media_value(request: Request) -> Response:
    """Answer with the newest value of a name at a step or before it: an image as PNG, anything else
    as JSON. The step that it is of is said with it."""
    name, step = request.get("name"), request.get_float("step")
    pyramid = _refresh(request)
    kinds = [request.get("kind")] if request.get("kind") else MEDIA_KINDS
    found: list[tuple[float, float]] = []
    for kind in kinds:
        for own_step, position in zip(*_read_places(pyramid, kind, name), strict=True):
            if step is None or own_step <= step:
                found.append((own_step, position))
    if not found:
        raise NotFoundError(f"{name[:80]!r} has no image, histogram or text up to step {step}")
    own_step, position = max(found)
    value = _read_value(pyramid.run, int(position), name)
    own_kind = get_media_kind(value)
    if own_kind is None:
        raise ConflictError("metrics.jsonl was changed meanwhile", "ask again")
    if own_kind == "image":
        return _answer_with_image(pyramid.run, value, own_step)
    return json_response({"name": name, "kind": own_kind, "step": own_step, "value": value})


def _refresh(request: Request) -> CurvePyramid:
    run = request.board.find_run(request.path_values["id"])
    try:
        return pyramids.refresh(run, time.monotonic() + _READ_S)
    except FileNotFoundError:
        raise NotFoundError("the run has logged nothing yet") from None
    except OSError as error:
        raise NotFoundError(
            f"metrics.jsonl cannot be read: {format_os_error_reason(error)}"
        ) from None


def _read_places(pyramid: CurvePyramid, kind: str, name: str) -> tuple[list[float], list[float]]:
    """Return the steps of a medium and where their lines are in metrics.jsonl."""
    series = pyramid.get_series((kind, name))
    if series is None:
        return [], []
    try:
        places = series.take(0, np.arange(max(0, series.count - _MAX_STEPS), series.count))
    except DamagedCurvesError:
        pyramid.discard_damaged_file()
        return [], []
    return places[0].tolist(), places[1].tolist()


def _read_value(run: Run, position: int, name: str) -> Any:
    """Return the value of a name in the line at a position; None if it is not there any more."""
    try:
        with MetricsBlocks(run.metrics_file) as blocks:
            line = blocks.read_line(position)
    except OSError:
        line = None
    return None if line is None else line.get(name)


def _answer_with_image(run: Run, value: Any, step: float) -> Response:
    path = None
    with contextlib.suppress(OSError):  # a name that is too long for any file
        path = find_image(run, value)
    if path is None:
        raise NotFoundError(f"the image of step {step:g} is not there any more")
    # What leads out of the run's folder, however it does, is not served.
    data = read_inside(path, run.folder, _MAX_IMAGE_BYTES)
    if not data.startswith(_PNG_BEGIN):
        raise NotFoundError(f"{path.name} is no PNG file")
    # The name of a file has its step, and a run that logs that step again writes it anew.
    headers = {"X-Step": f"{step:g}", "Cache-Control": "private, max-age=10"}
    return Response(data, "image/png", 200, headers)


ROUTES: list[Route] = [
    ("GET", "/api/run/{id}/media", list_media),
    ("GET", "/api/run/{id}/media/value", show_media_value),
]
