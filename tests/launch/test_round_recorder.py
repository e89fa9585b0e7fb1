"""How long the ranks stood still for a round, by the steps that node 0's agent sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import make_run

from echelon.launch.node.round_recorder import RoundRecorder
from echelon.runs.history import RoundRecord, read_history, record_start, record_training
from echelon.runs.run_folder import Run
from echelon.world.rounds import Round

WITHOUT_1 = Round(1, (0, 2), False, "lost rank 1")
ALL_AGAIN = Round(2, (0, 1, 2), True, "rank 1 replaced")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path, "a")
    record_start(run, "local", 1, 3, None)
    record_training(run, 0, 0)
    return run


def read_rounds(run: Run) -> tuple[RoundRecord, ...]:
    (phase,) = read_history(run, is_running=True).phases
    return phase.rounds


def follow_steps(recorder: RoundRecorder, first: int, last: int, begun_s: float) -> None:
    """Two seconds for every step."""
    for step in range(first, last + 1):
        recorder.observe(step, False, begun_s + 2.0 * (step - first))


def test_a_loss_and_a_replacement_are_written_with_their_first_steps(run: Run) -> None:
    recorder = RoundRecorder(run, 0.0)
    follow_steps(recorder, 1, 10, begun_s=100.0)  # the tenth at 118
    recorder.begin(WITHOUT_1, {1}, (), 119.0)
    assert recorder.unformed == WITHOUT_1
    recorder.observe(10, False, 119.5)
    recorder.observe(10, True, 120.0)
    assert recorder.unformed is None
    assert read_rounds(run) == ()
    recorder.observe(11, False, 122.5)
    recorder.begin(ALL_AGAIN, (), {1}, 123.0)
    follow_steps(recorder, 12, 13, begun_s=124.5)  # they go over at a step boundary
    recorder.observe(13, True, 129.0)
    recorder.observe(14, False, 131.0)
    first, second = read_rounds(run)
    assert (first.number, first.processes, first.step) == (1, 2, 10)
    assert (first.lost, first.joined, first.reason) == ((1,), (), "lost rank 1")
    assert (first.standstill_s, first.step_s) == (4.5, 2.0)
    assert (second.number, second.processes, second.step) == (2, 3, 13)
    assert (second.lost, second.joined) == ((), (1,))
    assert (second.standstill_s, second.step_s) == (4.5, 2.0)


def test_a_round_that_is_planned_before_the_first_step_of_another(run: Run) -> None:
    """The replacement was ready at once; both rounds are seen to be formed one after the other."""
    recorder = RoundRecorder(run, 0.0)
    follow_steps(recorder, 1, 10, begun_s=100.0)
    recorder.begin(WITHOUT_1, {1}, (), 119.0)
    recorder.begin(ALL_AGAIN, (), {1}, 119.0)
    recorder.observe(10, True, 120.0)
    assert recorder.unformed == ALL_AGAIN
    recorder.observe(11, False, 122.5)
    recorder.observe(11, True, 123.5)
    recorder.observe(12, False, 125.5)
    first, second = read_rounds(run)
    assert (first.number, first.standstill_s, first.step_s) == (1, 4.5, 2.0)
    assert (second.number, second.standstill_s, second.step_s) == (2, 3.0, 2.0)


def test_the_rank_that_was_ahead_is_lost(run: Run) -> None:
    recorder = RoundRecorder(run, 0.0)
    follow_steps(recorder, 1, 10, begun_s=100.0)
    recorder.begin(WITHOUT_1, {1}, (), 118.5)
    recorder.observe(9, True, 119.0)
    recorder.observe(10, False, 121.0)
    (only,) = read_rounds(run)
    assert (only.step, only.standstill_s) == (9, 3.0)


def test_losses_before_a_round_is_formed_are_written_with_the_next_one(run: Run) -> None:
    recorder = RoundRecorder(run, 0.0)
    follow_steps(recorder, 1, 10, begun_s=100.0)
    recorder.begin(WITHOUT_1, {1}, (), 119.0, ["b"])
    recorder.begin(Round(2, (0,), False, "lost rank 2"), {2}, (), 120.0, ["a"])
    recorder.observe(10, True, 121.0)
    recorder.observe(11, False, 123.0)
    (only,) = read_rounds(run)
    assert (only.number, only.lost, only.standstill_s) == (2, (1, 2), 5.0)
    assert only.hosts == ("b", "a")


def test_a_round_that_was_formed_and_made_no_step(run: Run) -> None:
    """The replacement is lost in its first step."""
    recorder = RoundRecorder(run, 0.0)
    follow_steps(recorder, 1, 10, begun_s=100.0)
    recorder.begin(ALL_AGAIN, (), {1}, 118.0)
    recorder.observe(10, True, 119.0)
    recorder.begin(Round(3, (0, 2), False, "lost rank 1"), {1}, (), 120.0)
    recorder.observe(10, True, 121.0)
    recorder.observe(11, False, 123.0)
    first, second = read_rounds(run)
    assert (first.joined, first.standstill_s, first.step_s) == ((1,), 2.0, None)
    assert (second.lost, second.standstill_s, second.step_s) == ((1,), 3.0, 2.0)


def test_what_is_left_at_the_end_of_an_attempt(run: Run) -> None:
    recorder = RoundRecorder(run, 0.0)
    follow_steps(recorder, 1, 10, begun_s=100.0)
    recorder.begin(ALL_AGAIN, (), {1}, 118.0)
    recorder.close(130.0)
    assert read_rounds(run) == (), "the ranks never came to it"
    recorder.begin(WITHOUT_1, {1}, (), 119.0)
    recorder.close(121.0)
    (only,) = read_rounds(run)
    assert (only.lost, only.standstill_s, only.step_s) == ((1,), 3.0, None)
