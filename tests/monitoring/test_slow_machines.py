"""A machine that the others wait for long enough to be replaced."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from echelon.monitoring.stragglers import OwnTime, SlowMachineDetector
from echelon.world.rounds import SlowMachine

HOSTS = ("a", "a", "b", "b", "c", "c")


def look(
    detector: SlowMachineDetector, times_ms: Sequence[float], now: float
) -> SlowMachine | None:
    own_times = {rank: OwnTime(0.0, time_ms) for rank, time_ms in enumerate(times_ms)}
    return detector(own_times, HOSTS[: len(times_ms)], now)


def test_a_machine_is_found_by_whichever_of_its_ranks_is_the_slowest() -> None:
    detector = SlowMachineDetector(1.5, 10.0)
    for second in range(10):
        slow = (10, 10, 30, 25, 10, 10) if second % 2 else (10, 10, 25, 30, 10, 10)
        assert look(detector, slow, second) is None
    found = look(detector, (10, 10, 30, 10, 10, 15), 10.0)
    assert found == SlowMachine("b", 2, 2.4, 10.0)  # beside 10 and 15
    assert SlowMachine.from_json(found.to_json()) == found
    assert str(found) == "2.4 × the time of the others for 10 s"


def test_a_pause_begins_the_time_anew() -> None:
    detector = SlowMachineDetector(1.5, 10.0)
    for second in range(0, 30, 5):
        is_slow = second != 15
        times = (10, 10, 30 if is_slow else 10, 10)
        found = look(detector, times, second)
        assert (found is not None) == (second == 10)
    assert look(detector, (10, 10, 30, 10), 30.0) is not None


def test_another_machine_begins_the_time_anew() -> None:
    detector = SlowMachineDetector(1.5, 10.0)
    assert look(detector, (10, 10, 30, 10, 10, 10), 0.0) is None
    assert look(detector, (10, 10, 10, 10, 30, 10), 9.0) is None
    assert look(detector, (10, 10, 10, 10, 30, 10), 12.0) is None
    assert look(detector, (10, 10, 10, 10, 30, 10), 19.0) == SlowMachine("c", 4, 3.0, 10.0)


@pytest.mark.parametrize(
    ("factor", "min_s", "times"),
    [
        (1.5, 10.0, (10, 40)),  # one machine
        (4.0, 10.0, (10, 10, 30, 10)),  # not slow enough
        (1.5, 0.0, (10, 10, 30, 10)),  # never
        (1.5, 10.0, (0.1, 0.1, 0.9, 0.1)),  # a moment
    ],
)
def test_what_is_not_found(factor: float, min_s: float, times: Sequence[float]) -> None:
    detector = SlowMachineDetector(factor, min_s)
    assert [look(detector, times, now) for now in (0.0, 20.0, 40.0)] == [None] * 3
