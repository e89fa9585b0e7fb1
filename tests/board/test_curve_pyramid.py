"""The curves that are kept of a run: followed, taken over by others, made anew when they are not
those of its lines, and never needed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from other_users import NOBODY, STRANGER, act_as, give_away, make_open_folder, needs_root
from run_folders import lines, make_run

from echelon.board.curves.curve_builds import PyramidCache, build_curves
from echelon.board.curves.curve_file import DamagedCurvesError
from echelon.board.curves.curve_pyramid import LEVEL_SIZES, CurvePyramid, list_places
from echelon.board.curves.curve_queries import read_curve
from echelon.board.curves.line_columns import NUMBER
from echelon.runs.metrics_file import is_number, iterate_metrics
from echelon.runs.run_folder import Run
from echelon.tracking.metrics_writer import MetricsFile

COUNT = 9000
"""Lines of a run that is worth a file; it has buckets of all levels."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))


def make_long_run(root: Path, count: int = COUNT, name: str = "a") -> Run:
    dice = random.Random(count)
    return make_run(root, name, [{"step": n, "loss": dice.gauss(0, 1)} for n in range(count)])


def read_all(pyramid: CurvePyramid) -> CurvePyramid:
    pyramid.look()
    while not pyramid.read_lines(1 << 16):
        pass
    return pyramid


def keep(run: Run) -> CurvePyramid:
    """A pyramid that has read all lines and written them."""
    pyramid = read_all(CurvePyramid(run))
    pyramid.flush()
    assert not pyramid.fault
    return pyramid


def open_again(run: Run) -> CurvePyramid:
    """What another process finds."""
    pyramid = CurvePyramid(run)
    pyramid.look()
    return pyramid


def list_points(pyramid: CurvePyramid, name: str = "loss") -> list[tuple[float, float]]:
    series = pyramid.get_series((NUMBER, name))
    if series is None:
        return []
    steps, values = series.take(0, series.list_all(0)).tolist()
    return [*zip(steps, values, strict=True)]


def list_logged(run: Run, name: str = "loss") -> list[tuple[float, float]]:
    return [
        (line["step"], line[name])
        for line in iterate_metrics(run.metrics_file)
        if is_number(line.get("step")) and is_number(line.get(name))
    ]


def append(run: Run, found: list[Any]) -> None:
    with run.metrics_file.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in found)


def find_file(run: Run) -> Path:
    return run.curves_folder / "curves"


def test_buckets_have_the_extremes_and_the_mean_of_their_points(tmp_path: Path) -> None:
    run = make_long_run(tmp_path, 5000)
    append(run, [{"step": n % 100, "loss": n / 3} for n in range(4000)])
    keep(run)
    series = open_again(run).get_series((NUMBER, "loss"))
    assert series is not None
    steps, values = series.take(0, series.list_all(0))
    for level, size in enumerate(LEVEL_SIZES[1:], 1):
        count = series.get_count(level)
        assert count == 9000 // size
        buckets = series.take(level, series.list_all(level))
        own_steps, own_values = (a[: count * size].reshape(count, size) for a in (steps, values))
        rows = np.arange(count)
        lowest, highest = own_values.argmin(1), own_values.argmax(1)
        expected = [
            *(own_steps.min(1), own_steps.max(1)),
            *(own_values[rows, lowest], own_steps[rows, lowest]),
            *(own_values[rows, highest], own_steps[rows, highest]),
        ]
        assert buckets[:6].tolist() == np.array(expected).tolist()
        assert buckets[6] == pytest.approx(own_values.mean(1))


def test_a_short_run_has_no_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", lines(400))
    pyramid = read_all(CurvePyramid(run))
    assert len(list_points(pyramid)) == 400
    assert build_curves(run) == ""
    assert not find_file(run).exists()


@pytest.mark.slow
def test_another_process_finds_what_was_kept(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    assert build_curves(run) == ""
    again = open_again(run)
    assert (again.share, again.pending_bytes, again.facts.lines) == (1, 0, COUNT)
    assert list_points(again) == list_logged(run)


def test_a_growing_file_costs_its_new_lines(tmp_path: Path, monkeypatch: Any) -> None:
    run = make_long_run(tmp_path)
    pyramid = keep(run)
    read: list[int] = []
    pread = os.pread

    def count_bytes(handle: int, size: int, position: int) -> bytes:
        data = pread(handle, size, position)
        read.append(len(data))
        return data

    append(run, [{"step": COUNT, "loss": 1.5, "new": 2}])
    monkeypatch.setattr(os, "pread", count_bytes)
    read_all(pyramid)
    assert sum(read) < 1000
    monkeypatch.undo()
    assert list_points(pyramid) == list_logged(run)
    assert list_points(pyramid, "new") == [(COUNT, 2)]


@pytest.mark.parametrize("flushes", [True, False])
def test_many_small_additions_make_the_same_curve(tmp_path: Path, flushes: bool) -> None:
    run = make_long_run(tmp_path)
    pyramid = keep(run)
    dice = random.Random(3)
    for start in range(COUNT, COUNT + 3000, 100):
        append(run, [{"step": n, "loss": dice.gauss(0, 1)} for n in range(start, start + 100)])
        read_all(pyramid)
        if flushes:
            assert pyramid.flush()
    again = open_again(run)
    read_all(again)
    assert list_points(pyramid) == list_points(again) == list_logged(run)
    for width in (7, 300):
        mine, other = (
            read_curve(each, "loss", "step", None, None, width) for each in (pyramid, again)
        )
        assert set(mine.y[[mine.y.argmin(), mine.y.argmax()]].tolist()) == set(
            other.y[[other.y.argmin(), other.y.argmax()]].tolist()
        )


def test_a_line_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", '{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    pyramid = read_all(CurvePyramid(run))
    assert (list_points(pyramid), pyramid.share, pyramid.is_far_behind) == ([(1, 1.0)], 1, False)
    with run.metrics_file.open("a") as file:
        file.write('ss": 2.0}\n')
    assert list_points(read_all(pyramid)) == [(1, 1.0), (2, 2.0)]


def test_a_line_that_is_too_long_is_skipped_in_bounded_memory(tmp_path: Path) -> None:
    before, after = '{"step": 1, "loss": 1.0}\n', '{"step": 3, "loss": 3.0}\n'
    run = make_run(tmp_path, "a", before)
    with run.metrics_file.open("a") as file:
        file.write('{"step": 2, "loss": 2.0, "text": "')
        for _ in range(40):
            file.write("x" * (1 << 20))
        file.write('"}\n' + after)
    tracemalloc.start()
    pyramid = read_all(CurvePyramid(run))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list_points(pyramid) == [(1, 1.0), (3, 3.0)]
    assert peak < 20 << 20


def test_a_long_line_that_fits_counts(tmp_path: Path) -> None:
    text = "".join(
        json.dumps({"step": n, "loss": n / 2, "note": "x" * (900_000 + n)}) + "\n" for n in range(5)
    )
    run = make_run(tmp_path, "a", text)
    assert list_points(read_all(CurvePyramid(run))) == [(n, n / 2) for n in range(5)]


def test_a_resumed_run_that_writes_another_file_is_noticed(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    pyramid, other = keep(run), open_again(run)
    writer = MetricsFile(run, 5000)
    for step in range(5001, 9500):
        writer.log({"step": step, "loss": float(step)})
    for each in (pyramid, other, CurvePyramid(run)):
        read_all(each)
        assert list_points(each) == list_logged(run)
    assert pyramid.flush()
    assert list_points(open_again(run)) == list_logged(run)
    read_all(other)
    assert list_points(other) == list_logged(run)


def test_a_file_that_became_shorter_is_read_anew(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    pyramid = keep(run)
    run.metrics_file.write_text('{"step": 1, "loss": 7.0}\n')
    assert list_points(read_all(pyramid)) == [(1, 7.0)]
    assert list_points(read_all(CurvePyramid(run))) == [(1, 7.0)]


def test_a_run_that_disappears_is_said(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    pyramid = keep(run)
    series = pyramid.get_series((NUMBER, "loss"))
    run.metrics_file.unlink()
    find_file(run).unlink()
    with pytest.raises(FileNotFoundError):
        pyramid.look()
    assert series is not None
    assert series.take(1, series.list_all(1)).shape == (7, COUNT // 16), "a picture is finished"


# --- damage ---


def damage_tail(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 9)


def damage_head(file: Path) -> None:
    file.write_bytes(b"x" * 50 + file.read_bytes()[50:])


def damage_end(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"ECHCRV02" + os.urandom(200))


def damage_everything(file: Path) -> None:
    file.write_bytes(os.urandom(100_000))


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    "damage", [damage_tail, damage_head, damage_end, damage_everything, empty, Path.unlink]
)
@pytest.mark.slow
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: Any) -> None:
    run = make_long_run(tmp_path)
    keep(run)
    damage(find_file(run))
    for _ in range(2):
        pyramid = read_all(open_again(run))
        assert list_points(pyramid) == list_logged(run)
        assert pyramid.flush()
    assert list_points(open_again(run)) == list_logged(run)


def test_numbers_that_have_changed_on_the_disk_are_not_drawn(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    keep(run)
    data = bytearray(find_file(run).read_bytes())
    for position in range(len(data) // 3, len(data), 997):
        data[position] ^= 1
    find_file(run).write_bytes(data)
    pyramid = open_again(run)
    with pytest.raises(DamagedCurvesError):
        list_points(pyramid)
    pyramid.discard_damaged_file()
    assert list_points(read_all(pyramid)) == list_logged(run)


def test_a_damaged_file_in_use_is_made_anew_by_the_next_questions(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    cache = PyramidCache()
    keep(run)
    cache.refresh(run, float("inf"))
    data = find_file(run).read_bytes()
    with find_file(run).open("r+b") as file:
        file.seek(len(data) // 2)
        file.write(bytes(len(data) // 2))
    pyramid = cache.refresh(run, float("inf"))
    with pytest.raises(DamagedCurvesError):
        list_points(pyramid)
    pyramid.discard_damaged_file()
    assert list_points(cache.refresh(run, float("inf"))) == list_logged(run)


# --- places ---


@pytest.mark.slow
def test_no_place_at_all_costs_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_long_run(tmp_path)
    run.curves_folder.write_text("no folder")
    (tmp_path / "cache").write_text("no folder")
    pyramid = read_all(CurvePyramid(run))
    assert not pyramid.flush()
    assert pyramid.is_in_memory
    assert "cache" in pyramid.fault
    append(run, [{"step": COUNT + n, "loss": -9.0} for n in range(5000)])
    read_all(pyramid)
    assert pyramid.flush()
    assert list_points(pyramid) == list_logged(run)


def test_a_full_disk_costs_no_curve(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    pyramid = keep(run)
    append(run, [{"step": COUNT + n, "loss": n / 7} for n in range(9000)])
    read_all(pyramid)
    size = find_file(run).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
    try:
        assert not pyramid.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert pyramid.fault
    assert find_file(run).stat().st_size == size
    assert list_points(pyramid) == list_logged(run)
    assert pyramid.flush(), "there is space again"
    assert not pyramid.fault
    assert list_points(open_again(run)) == list_logged(run)


@pytest.fixture
def strangers_run() -> Iterator[Run]:
    with make_open_folder() as root:
        run = make_long_run(root)
        give_away(root, STRANGER)
        yield run


@needs_root
def test_nothing_is_written_into_a_folder_of_somebody_else(strangers_run: Run) -> None:
    before = sorted(path.name for path in strangers_run.folder.iterdir())
    keep(strangers_run)
    assert sorted(path.name for path in strangers_run.folder.iterdir()) == before
    [place] = list_places(strangers_run)
    assert (place / "curves").exists()
    assert list_points(open_again(strangers_run)) == list_logged(strangers_run)


@needs_root
def test_a_folder_of_ones_own_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_open_folder() as root:
        run = make_long_run(root)
        cache = root / "cache"
        cache.mkdir()
        monkeypatch.setenv("ECHELON_CACHE", str(cache))
        give_away(root, NOBODY)
        run.folder.chmod(0o555)
        with act_as(NOBODY):
            keep(run)
            assert not run.curves_folder.exists()
            assert list_points(open_again(run)) == list_logged(run)


@needs_root
def test_a_file_that_somebody_else_put_there_is_not_read(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    keep(run)
    give_away(find_file(run))
    assert open_again(run).offset == 0


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    keep(run)
    target = tmp_path / "elsewhere"
    find_file(run).rename(target)
    find_file(run).symlink_to(target)
    assert open_again(run).offset == 0


@needs_root
def test_curves_of_runs_of_others_take_bounded_space(
    strangers_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was looked at last stays."""
    size = 0
    runs = []
    for number in range(4):
        run = Run(strangers_run.folder.with_name(f"run-{number}"))
        shutil.copytree(strangers_run.folder, run.folder)
        give_away(run.folder, STRANGER)
        keep(run)
        runs.append(run)
        size = (list_places(run)[0] / "curves").stat().st_size
        monkeypatch.setattr("echelon.board.curves.curve_pyramid._MAX_CACHE_BYTES", 3 * size)
        for old in runs:
            with contextlib.suppress(OSError):
                path = list_places(old)[0] / "curves"
                os.utime(path, (number, path.stat().st_mtime - 100))
        open_again(runs[0])
    keep(strangers_run)
    kept = [run.name for run in runs if (list_places(run)[0] / "curves").exists()]
    assert kept == ["run-0", "run-2", "run-3"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    run.curves_folder.mkdir()
    (run.curves_folder / ".curves.0123abcd").write_bytes(b"half")
    keep(run)
    assert {path.name for path in run.curves_folder.iterdir()} == {"curves", "lock"}


# --- several at once ---


def _build(folder: str, barrier: Any) -> None:
    barrier.wait()
    assert build_curves(Run(Path(folder))) == ""


@pytest.mark.slow
def test_processes_that_build_at_once_make_one_sound_file(tmp_path: Path) -> None:
    run = make_long_run(tmp_path, 60_000)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    builders = [context.Process(target=_build, args=(str(run.folder), barrier)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
        assert builder.exitcode == 0
    assert list_points(open_again(run)) == list_logged(run)


@pytest.mark.slow
def test_two_that_follow_one_file_take_over_from_each_other(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    first = keep(run)
    second = open_again(run)
    dice = random.Random(5)
    for start in range(COUNT, COUNT + 4000, 200):
        append(run, [{"step": n, "loss": dice.random()} for n in range(start, start + 200)])
        for each in (first, second):
            if dice.random() < 0.7:
                read_all(each)
            if dice.random() < 0.5:
                each.flush()
    for each in (first, second, open_again(run)):
        assert list_points(read_all(each)) == list_logged(run)


def test_a_writer_that_another_one_keeps_out_leaves_it_to_that_one(tmp_path: Path) -> None:
    run = make_long_run(tmp_path)
    pyramid, other = read_all(CurvePyramid(run)), CurvePyramid(run)
    with other.hold_file():
        assert not pyramid.flush()
        assert not pyramid.fault
        read_all(other)
        assert other.flush()
    assert list_points(read_all(pyramid)) == list_logged(run)
    assert pyramid.unwritten_bytes == 0, "it has taken over what the other one wrote"


# --- many of them ---


@pytest.mark.slow
def test_thousands_of_metrics_in_one_run(tmp_path: Path) -> None:
    names = [f"layer/{n}/weight.norm" for n in range(3000)]
    run = make_run(tmp_path, "a", [{"step": n, **dict.fromkeys(names, n / 3)} for n in range(20)])
    pyramid = read_all(CurvePyramid(run))
    assert pyramid.flush()
    again = open_again(run)
    assert len(again.list_keys()) == 3000
    assert list_points(again, names[1234]) == [(n, n / 3) for n in range(20)]
    assert find_file(run).stat().st_size < 2 << 20


def test_lines_that_all_differ_in_their_names(tmp_path: Path) -> None:
    dice = random.Random(2)
    found = []
    for step in range(6000):
        names = dice.sample("abcdefghijklmnop", dice.randint(0, 12))
        found.append({"step": step, **{name: dice.random() for name in names}})
    run = make_run(tmp_path, "a", found)
    pyramid = read_all(CurvePyramid(run))
    for name in "adp":
        assert list_points(pyramid, name) == list_logged(run, name)


def test_open_pyramids_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.board.curves.curve_builds._MAX_OPEN", 3)
    cache = PyramidCache()
    runs = [make_run(tmp_path, f"run-{n}", lines(30)) for n in range(6)]
    for run in runs * 2:
        assert len(list_points(cache.refresh(run, float("inf")))) == 30
    assert len(cache) == 3


def wait_until_read(cache: PyramidCache, run: Run) -> CurvePyramid:
    end = time.monotonic() + 60
    while (pyramid := cache.refresh(run, float("inf"))).pending_bytes:
        assert time.monotonic() < end
        time.sleep(0.01)
    return pyramid


def test_a_long_file_is_read_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page asks again until it is whole; what is there is drawn meanwhile."""
    monkeypatch.setattr("echelon.board.curves.curve_builds.MAX_FLUSH_BYTES", 100_000)
    run = make_long_run(tmp_path, 30_000)
    cache = PyramidCache()
    assert cache.refresh(run, float("inf")).is_far_behind
    assert list_points(wait_until_read(cache, run)) == list_logged(run)
    assert find_file(run).exists()


def test_a_long_file_without_a_place_for_its_curves_is_read_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("echelon.board.curves.curve_builds.MAX_FLUSH_BYTES", 100_000)
    run = make_long_run(tmp_path, 30_000)
    run.curves_folder.write_text("no folder")
    (tmp_path / "cache").write_text("no folder")
    cache = PyramidCache()
    assert list_points(wait_until_read(cache, run)) == list_logged(run)
    assert capsys.readouterr().err.count("warning") == 1
