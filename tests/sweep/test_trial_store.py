"""The book of a sweep: what is drawn, who has a trial, when one stops, and what a kill leaves."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import EchelonError
from echelon.sweep import trial_lease as leases
from echelon.sweep.display import LineProgress
from echelon.sweep.hyperband import Hyperband, find_band, should_stop
from echelon.sweep.metric_history import MetricHistory, to_metrics_file_key
from echelon.sweep.optuna_journal import SweepJournal
from echelon.sweep.report import build_report
from echelon.sweep.supervisor import assign_devices
from echelon.sweep.sweep_folder import SweepFolder, SweepLock, SweepSettings
from echelon.sweep.trial_lease import LeaseWatch
from echelon.sweep.trial_store import LeasedTrial, LeaseLostError, TrialStore

RANDOM = "method: random\nparameters:\n"


def made(folder: Path, text: str, cap: int = 5, **metric: object) -> SweepFolder:
    sweep = SweepFolder(folder / "s")
    sweep.write_files(SweepSettings([], [], {"name": "eval/loss", **metric}, cap), text)
    return sweep


def draws(folder: Path, specs: list[str], number: int) -> list[list[Any]]:
    """Of each of these parameters."""
    lines = "".join(f"  x{i}: {{{spec}}}\n" for i, spec in enumerate(specs))
    book = TrialStore(made(folder, RANDOM + lines, number), "w")
    rows = [run_of(book, "finished").parameters for _ in range(number)]
    return [[row[f"x{i}"] for row in rows] for i in range(len(specs))]


def run_of(book: TrialStore, state: str, value: float = 1.0, cause: str = "") -> LeasedTrial:
    taken = book.take_trial()
    assert isinstance(taken, LeasedTrial)
    book.report_history(taken, [value])
    book.end_trial(taken, state, cause)
    return taken


# --- what is drawn ---


RANGES = [
    ("min: 0.0, max: 1.0", 0.5, 0, 1),
    ("min: 1, max: 9", 5, 1, 9),
    ("distribution: log_uniform, min: -4, max: 4", 1, math.exp(-4), math.exp(4)),
    ("distribution: log_uniform_values, min: 0.01, max: 100", 1, 0.01, 100),
    ("distribution: inv_log_uniform, min: 0, max: 4", math.exp(-2), math.exp(-4), 1),
    ("distribution: inv_log_uniform_values, min: 0.01, max: 100", 1, 0.01, 100),
    ("distribution: normal, mu: 3, sigma: 0.5", 3, 0, 6),
    ("distribution: log_normal, mu: 1, sigma: 0.5", math.e, 0, 50),
]


def test_distributions(tmp_path: Path) -> None:
    drawn = draws(tmp_path, [spec for spec, *_ in RANGES], 50)
    for values, (_, median, low, high) in zip(drawn, RANGES, strict=True):
        assert all(low <= value <= high for value in values)
        spread = statistics.quantiles(values, n=4)
        assert spread[0] < median < spread[2]


def test_steps_and_weights(tmp_path: Path) -> None:
    tenths, pairs, letters = draws(
        tmp_path,
        [
            "distribution: q_uniform, min: 0.1, max: 0.75, q: 0.1",
            "distribution: q_log_normal, mu: 2, q: 2",
            "values: [a, b, c], probabilities: [0.9, 0.0, 0.1]",
        ],
        60,
    )
    assert set(tenths) <= {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}
    assert len(set(tenths)) > 4
    assert all(type(value) is int and value % 2 == 0 for value in pairs)
    count = Counter(letters)
    assert count["b"] == 0
    assert 45 < count["a"] < 60


def test_a_random_search_is_the_same_however_many_workers_share_it(tmp_path: Path) -> None:
    text = RANDOM + "  x: {min: 0.0, max: 1.0}\n  y: {values: [1, 2, 3]}\n"
    one = TrialStore(made(tmp_path, text), "a")
    alone = [run_of(one, "finished").parameters for _ in range(5)]
    sweep = made(tmp_path / "b", text)
    crew = [TrialStore(sweep, name) for name in "abcde"]
    shared = [
        taken.parameters for book in crew if isinstance(taken := book.take_trial(), LeasedTrial)
    ]
    assert alone == shared
    assert len({str(values) for values in shared}) == 5


def test_a_grid_is_every_combination_once(tmp_path: Path) -> None:
    text = (
        "method: grid\nparameters:\n  x: {values: [1, 2]}\n  y: {min: 3, max: 5}\n"
        "  z: {distribution: q_uniform, min: 0, max: 0.5, q: 0.5}\n  l: {values: [[1], [2, 3]]}\n"
    )
    sweep = made(tmp_path, text, 24)
    books = [TrialStore(sweep, name) for name in "ab"]
    seen: list[str] = []
    while isinstance(taken := books[len(seen) % 2].take_trial(), LeasedTrial):
        books[len(seen) % 2].report_history(taken, [1.0])
        books[len(seen) % 2].end_trial(taken, "finished")
        seen.append(json.dumps(taken.parameters))
    assert len(seen) == len(set(seen)) == 24
    assert json.loads(seen[0]) == {"x": 1, "y": 3, "z": 0.0, "l": [1]}


# --- who has a trial ---


def test_exactly_as_many_results_as_were_asked_for(tmp_path: Path) -> None:
    book = TrialStore(made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n", 2), "a")
    for number in range(2):
        taken = book.take_trial()
        assert isinstance(taken, LeasedTrial)
        assert taken.number == number
        assert book.report_history(taken, [3.0, 1.0, 2.0]) is False
        book.end_trial(taken, "finished")
    assert book.take_trial() is False
    assert [(r.state, r.metric_value, r.history) for r in book.summarize_trials()] == [
        ("finished", 1.0, [3.0, 1.0, 2.0])
    ] * 2
    with pytest.raises(LeaseLostError):
        book.end_trial(taken, "finished")  # type: ignore[arg-type]


def test_a_trial_that_is_at_work_is_waited_for_and_given_back_ones_go_first(tmp_path: Path) -> None:
    sweep = made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n", 1)
    a, b = TrialStore(sweep, "a"), TrialStore(sweep, "b")
    taken = a.take_trial()
    assert isinstance(taken, LeasedTrial)
    assert b.take_trial() is True
    assert [result.state for result in b.summarize_trials()] == ["running"]
    a.release_trial(taken, is_voluntary=True)
    assert [result.state for result in b.summarize_trials()] == ["waiting"]
    again = b.take_trial()
    assert isinstance(again, LeasedTrial)
    assert (again.number, again.parameters) == (taken.number, taken.parameters)
    with pytest.raises(LeaseLostError):  # who was thought gone cannot write over the other
        a.report_history(taken, [1.0])


def test_a_killed_worker_s_trial_is_taken_at_once(tmp_path: Path) -> None:
    """With whatever it had begun to write."""
    sweep = made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n  y: {min: 1, max: 9}\n", 3)
    pid = os.fork()
    if pid == 0:
        TrialStore(sweep, "gone").take_trial()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with sweep.journal_file.open("a") as journal:
        journal.write('{"op_code": 5, "half')
    taken = TrialStore(sweep, "next").take_trial()
    assert isinstance(taken, LeasedTrial)
    assert taken.number == 0
    assert len(TrialStore(sweep).summarize_trials()) == 1
    sweep.get_lease_file(0).unlink()  # killed between the two
    assert isinstance(again := TrialStore(sweep, "third").take_trial(), LeasedTrial)
    assert (again.number, again.parameters) == (0, taken.parameters)


def test_a_lock_goes_with_its_holder(tmp_path: Path) -> None:
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with SweepLock(tmp_path / "lock"):
            os.write(told, b"1")
            signal.pause()
    os.read(ready, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with SweepLock(tmp_path / "lock") as held:
        assert held is None


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes somebody else")
def test_a_sweep_of_somebody_else_s_can_be_looked_at() -> None:
    with tempfile.TemporaryDirectory() as where:  # pytest's own are closed to others
        Path(where).chmod(0o755)
        sweep = made(Path(where), RANDOM + "  x: {min: 0.0, max: 1.0}\n")
        run_of(TrialStore(sweep, "mine"), "finished")
        # Once before, too: what is imported on first use may lie where nobody can read it.
        seen = TrialStore(sweep).summarize_trials()
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            os._exit(0 if TrialStore(sweep).summarize_trials() == seen else 1)
        assert [trial.state for trial in seen] == ["finished"]
        assert os.waitpid(pid, 0)[1] == 0


def test_half_a_line_of_a_journal_is_cut_off(tmp_path: Path) -> None:
    path, lock = tmp_path / "j", SweepLock(tmp_path / "l")
    SweepJournal(path, lock).append_logs([{"a": 1}])
    with path.open("a") as file:
        file.write('{"b": ')
    journal = SweepJournal(path, lock)
    assert list(journal.read_logs(0)) == [{"a": 1}]
    journal.append_logs([{"c": 3}, {"d": 4}])
    assert list(journal.read_logs(0)) == [{"a": 1}, {"c": 3}, {"d": 4}]
    assert list(journal.read_logs(2)) == [{"d": 4}]
    assert list(SweepJournal(path, lock).read_logs(1)) == [{"c": 3}, {"d": 4}]


def test_the_silence_of_another_host_is_timed_by_who_looks() -> None:
    theirs = leases.build_lease("b", None, 0)
    theirs = leases.TrialLease(**{**vars(theirs), "process": {"host": "elsewhere", "pid": 1}})
    patient, hasty = LeaseWatch(3600.0), LeaseWatch(-1.0)
    for watch in (patient, hasty):
        assert not watch.is_free_to_take(theirs, "a")  # the first look tells nothing
        assert not watch.is_free_to_take(theirs.with_next_heartbeat(), "a")
    assert not patient.is_free_to_take(theirs.with_next_heartbeat(), "a")
    assert hasty.is_free_to_take(theirs.with_next_heartbeat(), "a")
    assert patient.is_free_to_take(theirs, "b")  # its own, before it was queued again


def test_a_trial_that_kills_its_workers_is_failed_in_the_end(tmp_path: Path) -> None:
    sweep = made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n", 1)
    book = TrialStore(sweep, "a")
    takes = 0
    while isinstance(book.take_trial(), LeasedTrial):  # its own again and again, from the same step
        takes += 1
        assert takes < 50
    assert takes == 10
    [result] = book.summarize_trials()
    assert result.state == "failed"
    assert "killed 10 times in a row, from step 0" in result.cause


# --- when it is over ---


def test_failures_from_the_start_end_the_sweep(tmp_path: Path) -> None:
    book = TrialStore(made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n", 9), "a")
    for number in range(3):
        run_of(book, "failed", cause=f"reason {number}")
    assert book.take_trial() is False
    assert book.find_stop_reason() == "the first 3 trials failed: reason 0"
    other = TrialStore(made(tmp_path / "b", RANDOM + "  x: {min: 0.0, max: 1.0}\n", 9), "a")
    for state in ("failed", "finished", "failed", "failed", "failed"):
        run_of(other, state)
    assert isinstance(other.take_trial(), LeasedTrial)


def test_a_target_ends_the_sweep(tmp_path: Path) -> None:
    text = RANDOM + "  x: {min: 0.0, max: 1.0}\n"
    book = TrialStore(made(tmp_path, text, 9, goal="maximize", target=0.9), "a")
    run_of(book, "finished", 0.8)
    run_of(book, "finished", 0.95)
    assert book.take_trial() is False
    told = build_report(book)
    assert told.best is not None
    assert (told.best.number, told.best.metric_value) == (1, 0.95)
    assert told.stop_reason == "trial 1 reached the target: 0.95"


def test_early_stopping() -> None:
    early = Hyperband((1, 3), eta=3.0)
    assert [find_band(early, evaluations) for evaluations in range(5)] == [0, 1, 1, 3, 3]
    assert not should_stop(early, 9.0, [1.0])  # too few to judge
    assert should_stop(early, 9.0, [1.0, 2.0])
    assert not should_stop(early, 0.5, [1.0, 2.0])
    assert not should_stop(early, 1.5, [1.0, 2.0, 3.0, 4.0, 5.0])  # two of six go on
    assert should_stop(Hyperband((1,), 3.0, strict=True), 9.0, [1.0])


def test_a_trial_is_judged_at_its_band(tmp_path: Path) -> None:
    text = RANDOM + "  x: {min: 0.0, max: 1.0}\n"
    text += "early_terminate: {type: hyperband, min_iter: 2, eta: 2}\nmetric: {name: a}\n"
    sweep = made(tmp_path, text, goal="maximize")
    books = [TrialStore(sweep, name) for name in "ab"]
    good, bad = (taken for book in books if isinstance(taken := book.take_trial(), LeasedTrial))
    assert not books[0].report_history(good, [0.1, 0.9])
    assert not books[1].report_history(bad, [0.99])
    assert books[1].report_history(bad, [0.99, 0.8])
    assert not books[0].report_history(good, [0.1, 0.9, 0.2])  # still by its second evaluation


def test_pruned_trials_do_not_win(tmp_path: Path) -> None:
    book = TrialStore(made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n"), "a")
    run_of(book, "pruned", 0.1)
    run_of(book, "finished", 0.5)
    told = build_report(book)
    assert told.best is not None
    assert told.best.number == 1
    assert told.to_dict()["trials"][0]["state"] == "pruned"


def test_a_continued_sweep_announces_only_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = TrialStore(made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n"), "a")
    run_of(book, "finished", 0.5)
    waiting = book.take_trial()
    assert isinstance(waiting, LeasedTrial)
    book.release_trial(waiting, is_voluntary=True)
    progress = LineProgress(book.summarize_trials())
    progress.update(book)
    assert capsys.readouterr().err == ""
    run_of(book, "finished", 0.25)
    progress.update(book)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("trial 1 finished, ")


def test_any_database(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "s")
    url = f"sqlite:///{tmp_path}/d.db"
    settings = SweepSettings([], [], {"name": "x"}, 2, storage=url)
    sweep.write_files(settings, RANDOM + "  x: {min: 0.0, max: 1.0}\n")
    book = TrialStore(sweep, "a")
    run_of(book, "finished")
    assert TrialStore(sweep).summarize_trials()[0].state == "finished"
    assert sweep.folder.stat().st_mode & 0o077 == 0
    other = SweepFolder(tmp_path / "elsewhere" / "s")
    other.write_files(settings, sweep.file_copy.read_text())
    assert TrialStore(other).summarize_trials() == []
    sweep.write_files(
        SweepSettings([], [], {"name": "x"}, 2, storage="nosql://me:secret@h/d"), RANDOM
    )
    with pytest.raises(EchelonError) as raised:
        TrialStore(SweepFolder(tmp_path / "s"))
    assert "secret" not in str(raised.value)


# --- following ---


def test_a_metric_s_names() -> None:
    names = ("rmse", "eval/rmse", "eval_rmse", "train/loss", "loss")
    assert [to_metrics_file_key(n, False) for n in names] == [
        *["eval_rmse"] * 3,
        "loss",
        "eval_loss",
    ]
    assert to_metrics_file_key("val/acc", True) == "val/acc"


def test_a_history_that_grows_and_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "m"
    history = MetricHistory(file, "eval_loss")
    assert history.read_all_values() == []
    file.write_text('{"step": 1, "loss": 3}\n{"step": 1, "eval_loss": 2}\n{"eval_lo')
    assert history.read_all_values() == [2.0]
    with file.open("a") as more:
        more.write('ss": 1.5}\n{"eval_loss": NaN}\nnonsense\n')
    assert history.read_all_values() == [2.0, 1.5]
    assert history.reported_keys == {"loss", "eval_loss"}
    beside = tmp_path / "n"
    beside.write_text('{"eval_loss": 7}\n')
    beside.replace(file)
    assert history.read_all_values() == [7.0]


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    nothing = {"CUDA_VISIBLE_DEVICES": ""}
    assert assign_devices(0, 2, nothing) == {"OMP_NUM_THREADS": "4"}
    assert assign_devices(0, 1, nothing) == {}
    assert assign_devices(0, 2, nothing | {"OMP_NUM_THREADS": "3"}) == {}
