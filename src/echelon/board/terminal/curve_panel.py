"""Curves of the runs that are drawn, of one metric, in one frame."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import BindingType
from textual.screen import Screen
from textual.strip import Strip

from echelon.board.curves.curve_queries import CurvePoints, query_curve
from echelon.board.request import RequestError
from echelon.board.terminal.lines import BOLD, DIM, LinesWidget, fit_text
from echelon.board.terminal.prompts import ChoiceScreen
from echelon.runs.run_folder import Run
from echelon.tracking.summary import needs_log_scale
from echelon.utils.os_errors import format_os_error_reason
from echelon.views.smoothing import smooth_values
from echelon.views.text_chart import ASCII, BRAILLE, ChartCurve, ChartWindow, Glyphs, draw_chart

AXES = ("step", "epoch", "samples", "time")
SMOOTHING = (0.0, 0.6, 0.9, 0.97)
_COLOURS = ("blue", "red", "green", "magenta", "cyan", "yellow", "bright_blue", "bright_red")
"""Of the sixteen that every terminal has; it knows which can be read on its background."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_AXIS_WIDTH = 9
_MIN_PAUSE_S = 0.8
"""Between two pictures of what grows."""
_LIVE_PARTS = 25


class DrawnRun(NamedTuple):
    """A run of which a curve is drawn."""

    run_id: str
    name: str
    number: int
    """By which its colour and letter are chosen."""
    is_live: bool = False
    """Whether it may still grow."""

    @property
    def style(self) -> Style:
        """Its colour."""
        return Style(color=_COLOURS[self.number % len(_COLOURS)])

    @property
    def letter(self) -> str:
        """What it is drawn with where there are no colours."""
        return _LETTERS[self.number % len(_LETTERS)]


@dataclass(frozen=True)
class CurveView:
    """What is drawn, and how."""

    runs: tuple[DrawnRun, ...] = ()
    metric: str = "loss"
    axis: str = "step"
    from_x: float | None = None
    to_x: float | None = None
    smooth: float = 0.0
    scale: str = "auto"
    """Of the axis of values: also `log` or `linear`."""


class _ReadCurve(NamedTuple):
    run: DrawnRun
    points: CurvePoints


class _ReadView(NamedTuple):
    """What was read for a view."""

    view: CurveView
    curves: list[_ReadCurve]
    shown: tuple[float, float] | None
    fault: str


class CurvePanel(LinesWidget):
    """The chart. Curves are read in a thread of their own, the latest view last."""

    DEFAULT_CSS = "CurvePanel { height: 1fr; width: 1fr; }"

    def __init__(
        self,
        find_run: Callable[[str], Run],
        is_unicode: bool,
        has_colours: bool,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self._find_run = find_run
        self._glyphs = BRAILLE if is_unicode else ASCII
        self._has_colours = has_colours
        self._view = CurveView()
        self._read_view = CurveView()
        """That of the curves that were read."""
        self._curves: list[_ReadCurve] = []
        self._range: tuple[float, float] | None = None
        """What is drawn of the axis; None without any point."""
        self._is_log_drawn = False
        self._fault = ""
        self._wanted = threading.Event()
        self._has_new_view = threading.Event()
        self._is_closed = False

    @property
    def view(self) -> CurveView:
        """What is drawn."""
        return self._view

    @property
    def is_log_drawn(self) -> bool:
        """Whether the axis of values is logarithmic now."""
        return self._is_log_drawn

    def on_mount(self) -> None:
        threading.Thread(target=self._keep_reading, name="board-curves", daemon=True).start()

    def on_unmount(self) -> None:
        self._is_closed = True
        self._has_new_view.set()
        self._wanted.set()

    def show(self, view: CurveView) -> None:
        """Draw something else."""
        if view != self._view:
            self._view = view
            self._has_new_view.set()
            self.read_again()

    def read_again(self) -> None:
        """Read the curves anew: they may have grown."""
        self._wanted.set()

    def change(self, **values: object) -> None:
        """Draw the same in another way."""
        self.show(replace(self._view, **values))  # type: ignore[arg-type]

    def zoom(self, factor: float) -> None:
        """Show another part of the axis around the middle, or all of it where that is less."""
        whole = _find_range(self._curves)
        if whole is None:
            return
        first, last = _choose_range(self._view, whole)
        middle, half = (first + last) / 2, (last - first) / 2 * factor
        self._set_range(middle - half, middle + half, whole)

    def pan(self, share: float) -> None:
        """Move along the axis by a share of what is shown."""
        whole = _find_range(self._curves)
        if whole is None or self._view.from_x is None:
            return
        first, last = _choose_range(self._view, whole)
        by = min(max((last - first) * share, whole[0] - first), whole[1] - last)
        self._set_range(first + by, last + by, whole)

    def _set_range(self, first: float, last: float, whole: tuple[float, float]) -> None:
        if last - first >= whole[1] - whole[0]:
            self.change(from_x=None, to_x=None)
        elif last > first:
            by = max(0.0, whole[0] - first) - max(0.0, last - whole[1])
            self.change(from_x=first + by, to_x=last + by)

    # --- reading ---

    def _keep_reading(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            self._has_new_view.clear()
            if self._is_closed:
                return
            began = time.monotonic()
            found = self._read(self._view, self._get_dots())
            if self._is_closed:
                return
            self.app.call_from_thread(self._take, found)
            if any(curve.points.share < 1 for curve in found.curves):
                self._wanted.set()
            took_s = time.monotonic() - began
            # A pause by the cost, so that many long runs leave room for everything else. A person
            # who asks for something new does not wait for the growth of the old.
            self._has_new_view.wait(max(_MIN_PAUSE_S, took_s))

    def _get_dots(self) -> int:
        return max(2, (self.size.width - _AXIS_WIDTH) * self._glyphs.dots_wide)

    def _read(self, view: CurveView, width: int) -> _ReadView:
        found = self._read_part(view, view.from_x, view.to_x, width)
        whole = _find_range(found.curves)
        if whole is None:
            return found
        first = whole[0] if view.from_x is None else view.from_x
        last = whole[1] if view.to_x is None else view.to_x
        if view.to_x is None and any(run.is_live for run in view.runs):
            last = _round_up_end(first, last)
        if any(not curve.points.is_exact for curve in found.curves):
            # All of them by the same pixels, which stay where they are while runs go on.
            found = self._read_part(view, first, last, width)
        return found._replace(shown=(first, last))

    def _read_part(
        self, view: CurveView, from_x: float | None, to_x: float | None, width: int
    ) -> _ReadView:
        curves, fault = [], ""
        for drawn in view.runs:
            try:
                run = self._find_run(drawn.run_id)
                points = query_curve(run, view.metric, view.axis, from_x, to_x, width)
            except RequestError as error:
                fault = error.what
            except OSError as error:
                fault = f"{drawn.name}: {format_os_error_reason(error)}"
            else:
                curves.append(_ReadCurve(drawn, points))
        return _ReadView(view, curves, None, fault)

    def _take(self, found: _ReadView) -> None:
        self._read_view, self._curves, self._range, self._fault = found
        self.update_lines()

    def on_resize(self) -> None:
        self.read_again()

    # --- drawing ---

    def make_lines(self, width: int, height: int) -> list[Strip]:
        curves = [curve for curve in self._curves if len(curve.points.x)]
        shown = [(curve.run, *self._select_values(curve.points)) for curve in curves]
        lines = [self._make_title(width, curves), *self._make_legend(width)]
        chart_height = height - len(lines) - 2
        if chart_height < 2 or width < 2 * _AXIS_WIDTH or self._range is None or not shown:
            return [*lines, Strip([Segment("  " + self._explain_nothing(), DIM)])]
        first_x, last_x = self._range
        values = [
            y for _, xs, ys in shown for x, y in zip(xs, ys, strict=True) if first_x <= x <= last_x
        ] or [y for _, _, ys in shown for y in ys]
        is_log = self._is_log_drawn = self._is_log(values)
        if is_log:
            values = [value for value in values if value > 0]
        lines[0] = self._make_title(width, curves)
        unit = curves[0].points.axis
        window = ChartWindow(first_x, last_x, min(values), max(values), is_log, unit)
        has_letters = not self._has_colours and len(shown) > 1
        glyphs = Glyphs(1, 1, "|", "+", "-") if has_letters else self._glyphs
        chart = draw_chart(
            [ChartCurve(xs, ys, run.letter if has_letters else "") for run, xs, ys in shown],
            window,
            width,
            chart_height,
            glyphs,
        )
        styles = [run.style for run, _, _ in shown]
        for line in chart:
            lines.append(
                Strip([Segment(text, DIM if n is None else styles[n]) for text, n in line])
            )
        return lines

    def _select_values(self, points: CurvePoints) -> tuple[list[float], list[float]]:
        """Return x and y of what is drawn of a curve."""
        xs = points.x.tolist()
        if not self._read_view.smooth or len(xs) < 3:
            return xs, points.y.tolist()
        means = points.mean.tolist()
        is_log = self._is_log(means)
        if is_log and min(means) <= 0:
            is_log = False
        return xs, smooth_values(means, self._read_view.smooth, is_log)

    def _is_log(self, values: Sequence[float]) -> bool:
        if self._read_view.scale == "auto":
            return needs_log_scale(min(values), max(values))
        return self._read_view.scale == "log" and any(value > 0 for value in values)

    def _make_title(self, width: int, curves: Sequence[_ReadCurve]) -> Strip:
        view = self._read_view
        said = []
        if self._is_log_drawn:
            said.append("logarithmic")
        if view.smooth:
            said.append(f"smoothed {view.smooth:g}")
        if view.from_x is not None and view.to_x is not None:
            said.append(f"zoomed to {view.from_x:.6g} – {view.to_x:.6g}")
        shares = [curve.points.share for curve in curves if curve.points.share < 1]
        if shares:
            said.append(f"{math.floor(100 * min(shares))} % read")
        not_finite = sum(curve.points.not_finite for curve in curves)
        if not_finite:
            said.append(f"{not_finite} not finite")
        if self._fault:
            said.append(self._fault)
        text = fit_text(f"  {', '.join(said)}" if said else "", max(0, width - len(view.metric)))
        return Strip([Segment(fit_text(view.metric, len(view.metric)), BOLD), Segment(text, DIM)])

    def _make_legend(self, width: int) -> list[Strip]:
        """Return a line with the names of the runs, as far as they fit."""
        parts: list[Segment] = []
        room = width
        for run in self._read_view.runs:
            sign = "●" if self._has_colours else run.letter
            text = f"{sign} {run.name}  "
            if len(text) > room and parts:
                parts.append(Segment("…"))
                break
            parts.append(Segment(fit_text(text, min(len(text), room)), run.style))
            room -= len(text) + 2
        return [Strip(parts)]

    def _explain_nothing(self) -> str:
        if not self._view.runs:
            return "no run is selected"
        if self._fault:
            return self._fault
        if self._read_view != self._view:
            return "reading…"
        return f"no values of {self._view.metric} yet"


def _find_range(curves: Sequence[_ReadCurve]) -> tuple[float, float] | None:
    """Return where all curves begin and end; None without any point."""
    points = [curve.points for curve in curves]
    firsts = [each.first_x for each in points if each.first_x is not None]
    lasts = [each.last_x for each in points if each.last_x is not None]
    return (min(firsts), max(lasts)) if firsts and lasts else None


def _round_up_end(first: float, last: float) -> float:
    """Return a place a little behind the end of a curve that grows, so that the axis and all that
    was drawn stay where they are for a while."""
    reach = last - first
    if reach <= 0:
        return last
    part = 10.0 ** math.ceil(math.log10(reach)) / _LIVE_PARTS / 4
    return math.ceil(last / part) * part


def _choose_range(view: CurveView, whole: tuple[float, float]) -> tuple[float, float]:
    return (
        whole[0] if view.from_x is None else view.from_x,
        whole[1] if view.to_x is None else view.to_x,
    )


class CurveScreen(Screen[None]):
    """A screen with a chart, and the keys that change it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("m", "next_metric", "next metric"),
        ("M", "choose_metric", "choose the metric"),
        ("l", "next_scale", "logarithmic axis"),
        ("s", "next_smoothing", "smoothing"),
        ("x", "next_axis", "axis"),
        ("plus,equals_sign", "zoom(0.5)", "zoom in"),
        ("minus", "zoom(2.0)", "zoom out"),
        ("right_square_bracket", "pan(0.25)", "later"),
        ("left_square_bracket", "pan(-0.25)", "earlier"),
        ("0", "whole", "all steps"),
    ]

    @property
    def curves(self) -> CurvePanel:
        """The chart."""
        return self.query_one(CurvePanel)

    def list_metrics(self) -> list[str]:
        """Return the metrics that can be drawn. For subclasses."""
        raise NotImplementedError

    def action_next_metric(self) -> None:
        self._show_metric(_find_next(self.list_metrics(), self.curves.view.metric))

    def action_choose_metric(self) -> None:
        chosen = {self.curves.view.metric}
        screen = ChoiceScreen("Draw which metric?", self.list_metrics(), chosen)
        self.app.push_screen(screen, lambda names: self._show_metric(names[0]) if names else None)

    def _show_metric(self, metric: str) -> None:
        self.curves.change(metric=metric)

    def action_next_scale(self) -> None:
        self.curves.change(scale="linear" if self.curves.is_log_drawn else "log")

    def action_next_smoothing(self) -> None:
        self.curves.change(smooth=_find_next(SMOOTHING, self.curves.view.smooth))

    def action_next_axis(self) -> None:
        axis = _find_next(AXES, self.curves.view.axis)
        self.curves.change(axis=axis, from_x=None, to_x=None)

    def action_zoom(self, factor: float) -> None:
        self.curves.zoom(factor)

    def action_pan(self, share: float) -> None:
        self.curves.pan(share)

    def action_whole(self) -> None:
        self.curves.change(from_x=None, to_x=None)


_T = TypeVar("_T")


def _find_next(values: Sequence[_T], value: _T) -> _T:
    if not values:
        return value
    return values[(values.index(value) + 1) % len(values)] if value in values else values[0]
