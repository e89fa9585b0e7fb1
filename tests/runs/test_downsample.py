"""Curves of any length in bounded memory: no extreme is lost, and short ones stay as they are."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.runs.downsample import MAX_POINTS, CurveSampler


def sample(values: list[float]) -> CurveSampler:
    sampler = CurveSampler()
    for step, value in enumerate(values):
        sampler.add(step, value)
    return sampler


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=50))
def test_a_short_curve_stays_as_it_is(values: list[float]) -> None:
    assert sample(values).list_points() == (list(range(len(values))), values, values)


@pytest.mark.parametrize("count", [MAX_POINTS, MAX_POINTS + 1, 3 * MAX_POINTS + 7, 10 * MAX_POINTS])
def test_extremes_and_the_last_are_kept(count: int) -> None:
    dice = random.Random(count)
    values = [dice.gauss(0, 1) for _ in range(count)]
    values[count // 3], values[count // 2] = -50.0, 50.0
    sampler = sample(values)
    steps, kept, means = sampler.list_points()
    assert sampler.count == count
    assert steps == sorted(steps)
    assert all(values[int(step)] == value for step, value in zip(steps, kept, strict=True))
    assert {(count // 3, -50.0), (count // 2, 50.0)} <= set(zip(steps, kept, strict=True))
    assert (steps[-1], kept[-1]) == (count - 1, values[-1])
    assert len(steps) <= 3 * MAX_POINTS
    if count > MAX_POINTS:
        assert max(means) < 50.0, "the mean of a piece, not its highest"


def test_means_are_means() -> None:
    """Of noise that is mostly 1 and seldom 101, which the middle of the extremes would not show."""
    values = [101.0 if step % 50 == 0 else 1.0 for step in range(200 * MAX_POINTS)]
    means = sample(values).list_points()[2]
    assert 1.0 < min(means) < max(means) < 7.0
    assert sum(means) / len(means) == pytest.approx(3.0, rel=0.02)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_curve() -> None:
    def measure_peak_bytes(count: int) -> int:
        tracemalloc.start()
        sampler = CurveSampler()
        for step in range(count):
            sampler.add(step, step * 0.5)
        sampler.list_points()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert measure_peak_bytes(40 * MAX_POINTS) < 1.5 * measure_peak_bytes(4 * MAX_POINTS)


def test_a_rising_curve_by_its_last_points() -> None:
    steps, values = sample([float(n) for n in range(5 * MAX_POINTS)]).list_last_points()
    assert steps == values
    assert values[-1] == 5 * MAX_POINTS - 1
    assert len(values) <= MAX_POINTS
