"""What is drawn of a curve, against all of its points, for random files, windows and widths."""

from __future__ import annotations

import json
import math
import random
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import STARTED, lines, make_run, write_phases

from echelon.board.curves.curve_pyramid import CurvePyramid
from echelon.board.curves.curve_queries import CurvePoints, query_curve, read_curve, show_curves
from echelon.board.request import NotFoundError, Request, RequestError
from echelon.runs.curves import build_scale, load_metrics
from echelon.runs.metrics_file import is_number, iterate_metrics
from echelon.runs.record import read_run_records
from echelon.runs.run_folder import Run

# --- all points, without any pyramid ---


@dataclass
class AllPoints:
    """Every point of a metric, in the order of steps; of equal steps in that of the lines."""

    x: list[float]
    y: list[float]
    not_finite: int

    @classmethod
    def read(cls, run: Run, metric: str = "loss") -> AllPoints:
        points, not_finite = [], 0
        for line in iterate_metrics(run.metrics_file):
            step, value = line.get("step"), line.get(metric)
            if is_number(step):
                if is_number(value):
                    points.append((float(step), float(value)))
                not_finite += isinstance(value, float) and not is_number(value)
        points.sort(key=lambda point: point[0])
        return cls([x for x, _ in points], [y for _, y in points], not_finite)


def check_curve(
    drawn: CurvePoints, points: AllPoints, from_x: float | None, to_x: float | None, width: int
) -> None:
    """Everything that is promised of a curve in a window."""
    assert (drawn.count, drawn.not_finite) == (len(points.x), points.not_finite)
    assert len(drawn.x) == len(drawn.y) == len(drawn.mean)
    if not points.x:
        assert (len(drawn.x), drawn.first_x, drawn.last_x) == (0, None, None)
        return
    assert (drawn.first_x, drawn.last_x) == (points.x[0], points.x[-1])
    first = points.x[0] if from_x is None else from_x
    last = max(first, points.x[-1] if to_x is None else to_x)
    x, y = np.array(points.x), np.array(points.y)
    is_inside = (x >= first) & (x <= last)
    is_drawn_inside = (drawn.x >= first) & (drawn.x <= last)
    assert (np.diff(drawn.x) >= 0).all()
    assert {*zip(drawn.x.tolist(), drawn.y.tolist(), strict=True)} <= {
        *zip(points.x, points.y, strict=True)
    }
    check_neighbours(drawn, x, first, last)
    inside_x, inside_y = x[is_inside], y[is_inside]
    drawn_x, drawn_y = drawn.x[is_drawn_inside], drawn.y[is_drawn_inside]
    assert drawn.is_exact == (len(inside_x) <= 2 * width)
    if drawn.is_exact:
        assert drawn_x.tolist() == inside_x.tolist()
        assert drawn_y.tolist() == inside_y.tolist()
        assert drawn.mean.tolist() == drawn.y.tolist()
        return
    assert len(drawn_x) <= 2 * width
    assert (drawn_x[-1], drawn_y[-1]) == (inside_x[-1], inside_y[-1])
    assert (drawn_y.min(), drawn_y.max()) == (inside_y.min(), inside_y.max())
    check_every_point_is_covered(drawn_x, drawn_y, inside_x, inside_y, (last - first) / (width - 1))
    slack = 1e-9 * max(1.0, float(np.abs(inside_y).max()))
    means = drawn.mean[is_drawn_inside]
    assert ((means >= inside_y.min() - slack) & (means <= inside_y.max() + slack)).all()


def check_neighbours(drawn: CurvePoints, x: Any, first: float, last: float) -> None:
    before, after = x[x < first], x[x > last]
    assert drawn.x[drawn.x < first].tolist() == before[-1:].tolist()
    assert drawn.x[drawn.x > last].tolist() == after[:1].tolist()


def check_every_point_is_covered(
    drawn_x: Any, drawn_y: Any, all_x: Any, all_y: Any, pixel: float
) -> None:
    """No point lies outside of what is drawn within two pixels of it: that of its own, which may
    begin and end less than a pixel late."""
    reach = 2 * pixel * (1 + 1e-9) + 1e-9 * abs(all_x).max()
    starts = np.searchsorted(drawn_x, all_x - reach, side="left")
    ends = np.searchsorted(drawn_x, all_x + reach, side="right")
    for start, end, value in zip(starts.tolist(), ends.tolist(), all_y.tolist(), strict=True):
        near = drawn_y[start:end]
        assert near.min() <= value <= near.max()


def draw(run: Run, metric: str, *window: Any, **more: Any) -> CurvePoints:
    """A curve of all lines, however many questions it takes until they are read."""
    deadline = time.monotonic() + 60
    while (drawn := query_curve(run, metric, *window, **more)).share < 1:
        assert time.monotonic() < deadline
    return drawn


# --- random files ---


def make_steps(kind: str, count: int, dice: random.Random) -> list[float]:
    if kind == "rising":
        return [float(n) for n in range(1, count + 1)]
    if kind == "sparse":  # first dense, then rare, as with a schedule of evaluations
        step, found = 0.0, []
        for n in range(count):
            step += 1 if n < count * 0.9 else dice.choice([50, 1000])
            found.append(step)
        return found
    if kind == "repeated":
        return [float(n // 7) for n in range(count)]
    if kind == "epochs":  # a loop that counts from the start again
        return [float(n % max(1, count // 5)) for n in range(count)]
    if kind == "constant":
        return [3.0] * count
    if kind == "huge":
        return [n * 1e300 - 1e303 for n in range(count)]
    return [dice.uniform(-1000, 1000) for _ in range(count)]


STEP_KINDS = ["rising", "sparse", "repeated", "epochs", "constant", "huge", "random"]
ODD_LINES = [
    b"",
    b"null",
    b"[1]",
    b'{"step": 5, "loss"',
    b'{"step": 1}, {"step": 2, "loss": 3}',
    b"\xff\xfe",
    b'{"step": "7", "loss": 1.0}',
    b'{"loss": 1.0}',
    b'{"step": NaN, "loss": 1.0}',
    b'{"step": 1, "loss": "a text"}',
    b'{"step": 1, "loss": true}',
    b'{"step": true, "loss": 1.0}',
    b'{"step": 1, "loss": 1' + b"0" * 400 + b"}",
    b'{"step": 2, "loss": ' + b"9" * 5000 + b"}",
    b'{"step": 4, "loss": [1, 2',
    b"3]}",
    b'{"step": 4, "loss": null} ',
    b"[" * 3000,
]


def make_text(kind: str, count: int, dice: random.Random, odd_share: float) -> bytes:
    found = []
    for step in make_steps(kind, count, dice):
        value: Any = dice.gauss(0, 1) * 10 ** dice.choice([0, 0, 0, 3])
        if dice.random() < odd_share:
            found.append(dice.choice(ODD_LINES))
            value = dice.choice([math.nan, math.inf, -math.inf, 0, 10**30, value])
        line = {"step": int(step) if step.is_integer() and abs(step) < 1e9 else step, "loss": value}
        if dice.random() < odd_share:
            del line["loss"]
        found.append(json.dumps(line | {"lr": 0.1}).encode())
    return b"".join(line + b"\n" for line in found)


def make_reader(run: Run, dice: random.Random) -> CurvePyramid:
    """A pyramid that has read all lines, of which some are in its file and some in memory."""
    pyramid = CurvePyramid(run)
    pyramid.look()
    while not pyramid.read_lines(1 << 20):
        pass
    if dice.random() < 0.7:
        pyramid.flush()
    return pyramid


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(STEP_KINDS),
    count=st.one_of(st.integers(0, 40), st.integers(0, 9000)),
    odd_share=st.sampled_from([0.0, 0.0, 0.01, 0.5]),
    width=st.sampled_from([2, 3, 10, 100, 700]),
    seed=st.integers(0, 2**32),
)
def test_what_is_drawn_is_what_was_logged(
    kind: str, count: int, odd_share: float, width: int, seed: int
) -> None:
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "a")
        run.folder.mkdir()
        text = make_text(kind, count, dice, odd_share)
        split = text.rfind(b"\n", 0, dice.randint(0, len(text)) + 1) + 1
        run.metrics_file.write_bytes(text[:split])
        pyramid = make_reader(run, dice)
        with run.metrics_file.open("ab") as file:
            file.write(text[split:])
        pyramid.look()
        while not pyramid.read_lines(1 << 20):
            pass
        points = AllPoints.read(run)
        windows: list[tuple[float | None, float | None]] = [(None, None), (None, 2.0), (1.0, None)]
        for _ in range(6):
            if points.x:
                ends = sorted(dice.choice(points.x) + dice.choice([0, 0, 0.5]) for _ in range(2))
                windows.append((ends[0], ends[1]))
        for from_x, to_x in windows:
            drawn = read_curve(pyramid, "loss", "step", from_x, to_x, width)
            check_curve(drawn, points, from_x, to_x, width)


@pytest.mark.slow
def test_the_mean_of_a_pixel_is_that_of_all_its_points(tmp_path: Path) -> None:
    values = [math.sin(n) + (n > 8000) for n in range(20_000)]
    found = [{"step": n, "loss": v} for n, v in enumerate(values)]
    run = make_run(tmp_path, "a", found)
    pyramid = make_reader(run, random.Random(0))
    pyramid.flush()
    [mean] = {*read_curve(pyramid, "loss", "step", None, None, 2).mean.tolist()}
    assert mean == pytest.approx(sum(values) / len(values))
    large = [{"step": n, "loss": 1.7e308} for n in range(20_000)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in large))
    drawn = draw(run, "loss", width=2)
    assert drawn.mean.tolist() == pytest.approx([1.7e308] * len(drawn.x)), "no sum overflows"


def test_a_window_between_two_points_shows_the_line_that_crosses_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", lines(40))
    drawn = draw(run, "loss", "step", 10.2, 10.8, 500)
    assert drawn.x.tolist() == [10, 11]
    assert draw(run, "loss", "step", 100, 200, 500).x.tolist() == [40]
    assert draw(run, "loss", "step", -9, 0, 500).x.tolist() == [1]


def test_a_metric_that_no_line_has_has_no_points(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", lines(40))
    drawn = draw(run, "unknown")
    assert (len(drawn.x), drawn.count, drawn.lines, drawn.is_exact) == (0, 0, 44, True)
    run.metrics_file.unlink()
    with pytest.raises(FileNotFoundError):
        query_curve(run, "loss")


# --- other axes ---


@pytest.mark.parametrize("axis", ["step", "samples", "epoch", "time"])
@pytest.mark.parametrize("has_history", [True, False])
@pytest.mark.parametrize("count", [60, 20_000])
@pytest.mark.slow
def test_an_axis_means_what_it_means_in_a_plot(
    tmp_path: Path, axis: str, has_history: bool, count: int
) -> None:
    run = make_run(tmp_path, "a", lines(count))
    if has_history:
        half = STARTED + count // 2
        write_phases(run, (STARTED + 1, half, 0, count // 2), (half + 10, None, count // 2, count))
    [record], _ = read_run_records([run])
    scale = build_scale(axis, record, load_metrics(record))
    for metric in ("loss", "eval_acc"):
        drawn = draw(run, metric, axis, width=count)
        steps = draw(run, metric, width=count).x.tolist()
        assert drawn.axis == axis
        expected = [scale.convert(step) for step in steps]
        # A plot keeps 4096 places of a long run, between which it is less exact.
        slack = 1e-6 * max(expected) if count < 4096 else scale.convert(10)
        assert drawn.x.tolist() == pytest.approx(expected, abs=slack)


@pytest.mark.slow
def test_a_narrow_window_of_a_long_run_has_exact_places(tmp_path: Path) -> None:
    """Of a long run 4096 places are looked at, or as many of the part that is shown."""
    dice = random.Random(1)
    moment, found = STARTED, []
    for line in lines(60_000):
        if "time" in line:
            moment += dice.uniform(0.5, 1.5)
            line["time"] = moment
        found.append(line)
    run = make_run(tmp_path, "a", found)
    make_reader(run, random.Random(0)).flush()
    times = [line["time"] for line in found if "time" in line]
    drawn = draw(run, "loss", "clock", times[30_000], times[30_500], 500)
    assert drawn.x.tolist() == pytest.approx(times[29_999:30_502], rel=1e-15, abs=1e-4)
    pixel_s = (times[-1] - times[0]) / 500
    whole = draw(run, "loss", "clock", width=500)
    steps = draw(run, "loss", width=500)
    for step, place in zip(steps.x.tolist()[::50], whole.x.tolist()[::50], strict=False):
        assert abs(times[int(step) - 1] - place) < 20 * pixel_s
    assert whole.last_x == pytest.approx(times[-1])


def test_steps_that_say_nothing_of_an_axis_stay_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", [{"step": n, "loss": 1.0} for n in range(9)])
    for axis in ("samples", "epoch", "time", "clock"):
        drawn = draw(run, "loss", axis)
        assert (drawn.axis, drawn.x.tolist()) == ("step", [float(n) for n in range(9)])


def test_times_and_samples_that_go_back_do_not_turn_the_axis(tmp_path: Path) -> None:
    found = lines(40)
    found[5]["time"] -= 1000.0
    found[9]["samples"] = 1
    found[12]["step"] = 3
    run = make_run(tmp_path, "a", found)
    for axis in ("samples", "time", "clock"):
        drawn = draw(run, "loss", axis)
        assert (np.diff(drawn.x) >= 0).all()
        assert len(drawn.x) == 40


# --- the answer to a page ---


class FolderBoard:
    """A board whose ids are the names of folders."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_run(self, run_id: str) -> Run:
        if not (self.root / run_id).is_dir():
            raise NotFoundError(f"{run_id} is not there any more")
        return Run(self.root / run_id)


def ask(root: Path, **query: Any) -> tuple[dict[str, Any], list[list[float]]]:
    """The header of an answer, and of each curve x, y and mean after one another."""
    lists = {
        name.rstrip("_"): [str(v) for v in value] if isinstance(value, list) else [str(value)]
        for name, value in query.items()
    }
    board: Any = FolderBoard(root)
    answer = show_curves(Request("GET", "/api/curves", board, query=lists))
    (size,) = struct.unpack("<I", answer.body[:4])
    header = json.loads(answer.body[4 : 4 + size])
    assert (4 + size) % 8 == 0, "an array of float64 can begin there"
    data = np.frombuffer(answer.body, "<f8", offset=4 + size)
    assert len(data) == sum(3 * curve["n"] for curve in header["curves"])
    return header, [data[c["offset"] :][: 3 * c["n"]].tolist() for c in header["curves"]]


def test_an_answer_has_the_curves_of_all_runs_and_metrics(tmp_path: Path) -> None:
    make_run(tmp_path, "a", lines(40))
    make_run(tmp_path, "b", lines(20))
    (tmp_path / "c").mkdir()
    header, data = ask(tmp_path, run=["a", "b", "c", "d"], metric=["loss", "eval_acc"], width=500)
    assert [(c["run"], c["metric"], c["n"], c["count"], c["exact"]) for c in header["curves"]] == [
        ("a", "loss", 40, 40, True),
        ("a", "eval_acc", 4, 4, True),
        ("b", "loss", 20, 20, True),
        ("b", "eval_acc", 2, 2, True),
    ]
    assert data[1] == [10, 20, 30, 40, 0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4]
    assert {(f["run"], f["metric"]) for f in header["faults"]} == {
        (run, metric) for run in "cd" for metric in ("loss", "eval_acc")
    }
    assert header["building"] == []


def test_curves_without_a_window_share_one(tmp_path: Path) -> None:
    """A short run beside a long one has as many pixels as it takes on the screen."""
    make_run(tmp_path, "long", [{"step": n, "loss": n % 7} for n in range(10_000)])
    make_run(tmp_path, "short", [{"step": n, "loss": n % 7} for n in range(1000)])
    until = time.monotonic() + 60
    while True:  # one answer waits for new lines for a quarter of a second
        header, _ = ask(tmp_path, run=["long", "short"], metric="loss", width=100)
        if [curve["count"] for curve in header["curves"]] == [10_000, 1000]:
            break
        assert time.monotonic() < until, header
    assert [curve["exact"] for curve in header["curves"]] == [False, False]
    assert header["curves"][1]["n"] <= 2 * 11 + 1


@pytest.mark.parametrize(
    "query",
    [{"x": "wallclock"}, {"from_": 5, "to": 4}, {"from_": "nan"}, {"width": "wide"}],
)
def test_a_wrong_question_is_refused(tmp_path: Path, query: dict[str, Any]) -> None:
    make_run(tmp_path, "a", lines(40))
    with pytest.raises(RequestError):
        ask(tmp_path, run="a", metric="loss", **query)


def test_widths_are_bounded(tmp_path: Path) -> None:
    make_run(tmp_path, "a", [{"step": n, "loss": n % 7} for n in range(3000)])
    for width in (-5, 0, 1, 10**9):
        header, _ = ask(tmp_path, run="a", metric="loss", width=width)
        assert 2 <= header["curves"][0]["n"] <= 3000


@pytest.mark.parametrize("name", ["a/b/../c", "x" * 10_000, "ü\u2028\0", "", "../../etc", "a\nb"])
@pytest.mark.slow
def test_names_of_metrics_are_values_and_no_paths(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    run = make_run(tmp_path, "a", [{"step": n, name: n / 2} for n in range(9000)])
    make_reader(run, random.Random(1)).flush()
    header, data = ask(tmp_path, run="a", metric=name, width=5000)
    assert (header["curves"][0]["metric"], header["curves"][0]["n"]) == (name, 9000)
    assert data[0][9000:9003] == [0.0, 0.5, 1.0]


def test_lone_surrogates_in_names_are_survived(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", '{"step": 1, "\\ud800": 2.0, "loss": 1.0}\n')
    pyramid = make_reader(run, random.Random(0))
    assert pyramid.flush()
    again = CurvePyramid(run)
    again.look()
    assert again.list_keys() == pyramid.list_keys()
