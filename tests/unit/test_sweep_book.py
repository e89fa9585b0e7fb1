"""The book of a sweep: what is drawn, who has a trial, when one stops, and what a kill leaves."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import EchelonError
from echelon.sweep import lease as leases
from echelon.sweep.book import Book, Lost, Taken
from echelon.sweep.early import band, stops
from echelon.sweep.file import Early
from echelon.sweep.folder import Settings, Sweep
from echelon.sweep.journal import Journal
from echelon.sweep.lease import Watch
from echelon.sweep.lock import SweepLock
from echelon.sweep.metrics import History, key_of
from echelon.sweep.report import report
from echelon.sweep.search import beta_at
from echelon.sweep.supervise import share

RANDOM = "method: random\nparameters:\n"


def made(folder: Path, text: str, cap: int = 5, **metric: object) -> Sweep:
    sweep = Sweep(folder / "s")
    sweep.write(Settings([], [], {"name": "eval/loss", **metric}, cap), text)
    return sweep


def draws(folder: Path, specs: list[str], number: int) -> list[list[Any]]:
    """Of each of these parameters."""
    lines = "".join(f"  x{i}: {{{spec}}}\n" for i, spec in enumerate(specs))
    book = Book(made(folder, RANDOM + lines, number), "w")
    rows = [run_of(book, "finished").values for _ in range(number)]
    return [[row[f"x{i}"] for row in rows] for i in range(len(specs))]


def run_of(book: Book, state: str, value: float = 1.0, cause: str = "") -> Taken:
    taken = book.take()
    assert isinstance(taken, Taken)
    book.report(taken, [value])
    book.end(taken, state, cause)
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
    ("distribution: beta, a: 2, b: 2", 0.5, 0, 1),
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


def test_beta() -> None:
    rng = random.Random(0)
    for a, b in ((0.5, 0.5), (2.0, 5.0), (20.0, 1.0)):
        sample = [rng.betavariate(a, b) for _ in range(4000)]
        for part in (0.1, 0.5, 0.9):
            bound = beta_at(part, a, b)
            below = sum(value <= bound for value in sample) / 4000
            assert below == pytest.approx(part, abs=0.03)


def test_a_random_search_is_the_same_however_many_workers_share_it(tmp_path: Path) -> None:
    text = RANDOM + "  x: {min: 0.0, max: 1.0}\n  y: {values: [1, 2, 3]}\n"
    one = Book(made(tmp_path, text), "a")
    alone = [run_of(one, "finished").values for _ in range(5)]
    sweep = made(tmp_path / "b", text)
    crew = [Book(sweep, name) for name in "abcde"]
    shared = [taken.values for book in crew if isinstance(taken := book.take(), Taken)]
    assert alone == shared
    assert len({str(values) for values in shared}) == 5


def test_a_grid_is_every_combination_once(tmp_path: Path) -> None:
    text = (
        "method: grid\nparameters:\n  x: {values: [1, 2]}\n  y: {min: 3, max: 5}\n"
        "  z: {distribution: q_uniform, min: 0, max: 0.5, q: 0.5}\n  l: {values: [[1], [2, 3]]}\n"
    )
    sweep = made(tmp_path, text, 24)
    books = [Book(sweep, name) for name in "ab"]
    seen = []
    while isinstance(taken := books[len(seen) % 2].take(), Taken):
        books[len(seen) % 2].report(taken, [1.0])
        books[len(seen) % 2].end(taken, "finished")
        seen.append(json.dumps(taken.values))
    assert len(seen) == len(set(seen)) == 24
    assert json.loads(seen[0]) == {"x": 1, "y": 3, "z": 0.0, "l": [1]}


# --- who has a trial ---


def test_exactly_as_many_results_as_were_asked_for(tmp_path: Path) -> None:
    book = Book(made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n", 2), "a")
    for number in range(2):
        taken = book.take()
        assert isinstance(taken, Taken)
        assert taken.number == number
        assert book.report(taken, [3.0, 1.0, 2.0]) is False
        book.end(taken, "finished")
    assert book.take() is False
    assert [(r.state, r.value, r.history) for r in book.results()] == [
        ("finished", 1.0, [3.0, 1.0, 2.0])
    ] * 2
    with pytest.raises(Lost):
        book.end(taken, "finished")


def test_a_trial_that_is_at_work_is_waited_for_and_given_back_ones_go_first(tmp_path: Path) -> None:
    sweep = made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n", 1)
    a, b = Book(sweep, "a"), Book(sweep, "b")
    taken = a.take()
    assert isinstance(taken, Taken)
    assert b.take() is True
    assert [result.state for result in b.results()] == ["running"]
    a.give_back(taken, on_purpose=True)
    assert [result.state for result in b.results()] == ["waiting"]
    again = b.take()
    assert isinstance(again, Taken)
    assert (again.number, again.values) == (taken.number, taken.values)
    with pytest.raises(Lost):  # who was thought gone cannot write over the other
        a.report(taken, [1.0])


def test_a_killed_worker_s_trial_is_taken_at_once(tmp_path: Path) -> None:
    """With whatever it had begun to write."""
    sweep = made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n  y: {min: 1, max: 9}\n", 3)
    pid = os.fork()
    if pid == 0:
        Book(sweep, "gone").take()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with sweep.journal.open("a") as journal:
        journal.write('{"op_code": 5, "half')
    taken = Book(sweep, "next").take()
    assert isinstance(taken, Taken)
    assert taken.number == 0
    assert len(Book(sweep).results()) == 1
    sweep.lease(0).unlink()  # killed between the two
    assert isinstance(again := Book(sweep, "third").take(), Taken)
    assert (again.number, again.values) == (0, taken.values)


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
        run_of(Book(sweep, "mine"), "finished")
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            os._exit(0 if [r.state for r in Book(sweep).results()] == ["finished"] else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_half_a_line_of_a_journal_is_cut_off(tmp_path: Path) -> None:
    path, lock = tmp_path / "j", SweepLock(tmp_path / "l")
    Journal(path, lock).append_logs([{"a": 1}])
    with path.open("a") as file:
        file.write('{"b": ')
    journal = Journal(path, lock)
    assert list(journal.read_logs(0)) == [{"a": 1}]
    journal.append_logs([{"c": 3}, {"d": 4}])
    assert list(journal.read_logs(0)) == [{"a": 1}, {"c": 3}, {"d": 4}]
    assert list(journal.read_logs(2)) == [{"d": 4}]
    assert list(Journal(path, lock).read_logs(1)) == [{"c": 3}, {"d": 4}]


def test_the_silence_of_another_host_is_timed_by_who_looks() -> None:
    theirs = leases.new("b", None, 0)
    theirs = leases.Lease(**{**vars(theirs), "process": {"host": "elsewhere", "pid": 1}})
    patient, hasty = Watch(3600.0), Watch(-1.0)
    for watch in (patient, hasty):
        assert not watch.is_over(theirs, "a")  # the first look tells nothing
        assert not watch.is_over(theirs.beaten(), "a")
    assert not patient.is_over(theirs.beaten(), "a")
    assert hasty.is_over(theirs.beaten(), "a")
    assert patient.is_over(theirs, "b")  # its own, before it was queued again


def test_a_trial_that_kills_its_workers_is_failed_in_the_end(tmp_path: Path) -> None:
    sweep = made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n", 1)
    book = Book(sweep, "a")
    takes = 0
    while isinstance(book.take(), Taken):  # its own again and again, from the same step
        takes += 1
        assert takes < 50
    assert takes == 10
    [result] = book.results()
    assert result.state == "failed"
    assert "killed 10 times in a row, from step 0" in result.cause


# --- when it is over ---


def test_failures_from_the_start_end_the_sweep(tmp_path: Path) -> None:
    book = Book(made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n", 9), "a")
    for number in range(3):
        run_of(book, "failed", cause=f"reason {number}")
    assert book.take() is False
    assert book.ending() == "the first 3 trials failed: reason 0"
    other = Book(made(tmp_path / "b", RANDOM + "  x: {min: 0.0, max: 1.0}\n", 9), "a")
    for state in ("failed", "finished", "failed", "failed", "failed"):
        run_of(other, state)
    assert isinstance(other.take(), Taken)


def test_a_target_ends_the_sweep(tmp_path: Path) -> None:
    text = RANDOM + "  x: {min: 0.0, max: 1.0}\n"
    book = Book(made(tmp_path, text, 9, goal="maximize", target=0.9), "a")
    run_of(book, "finished", 0.8)
    run_of(book, "finished", 0.95)
    assert book.take() is False
    told = report(book)
    assert told.best is not None
    assert (told.best.number, told.best.value) == (1, 0.95)
    assert told.ending == "trial 1 reached the target: 0.95"


def test_early_stopping() -> None:
    early = Early((1, 3), eta=3.0)
    assert [band(early, evaluations) for evaluations in range(5)] == [0, 1, 1, 3, 3]
    assert not stops(early, 9.0, [1.0])  # too few to judge
    assert stops(early, 9.0, [1.0, 2.0])
    assert not stops(early, 0.5, [1.0, 2.0])
    assert not stops(early, 1.5, [1.0, 2.0, 3.0, 4.0, 5.0])  # two of six go on
    assert stops(Early((1,), 3.0, strict=True), 9.0, [1.0])


def test_a_trial_is_judged_at_its_band(tmp_path: Path) -> None:
    text = RANDOM + "  x: {min: 0.0, max: 1.0}\n"
    text += "early_terminate: {type: hyperband, min_iter: 2, eta: 2}\nmetric: {name: a}\n"
    sweep = made(tmp_path, text, goal="maximize")
    books = [Book(sweep, name) for name in "ab"]
    good, bad = (taken for book in books if isinstance(taken := book.take(), Taken))
    assert not books[0].report(good, [0.1, 0.9])
    assert not books[1].report(bad, [0.99])
    assert books[1].report(bad, [0.99, 0.8])
    assert not books[0].report(good, [0.1, 0.9, 0.2])  # still by its second evaluation


def test_pruned_trials_do_not_win(tmp_path: Path) -> None:
    book = Book(made(tmp_path, RANDOM + "  x: {min: 0.0, max: 1.0}\n"), "a")
    run_of(book, "pruned", 0.1)
    run_of(book, "finished", 0.5)
    told = report(book)
    assert told.best is not None
    assert told.best.number == 1
    assert told.to_dict()["trials"][0]["state"] == "pruned"


def test_any_database(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    url = f"sqlite:///{tmp_path}/d.db"
    settings = Settings([], [], {"name": "x"}, 2, storage=url)
    sweep.write(settings, RANDOM + "  x: {min: 0.0, max: 1.0}\n")
    book = Book(sweep, "a")
    run_of(book, "finished")
    assert Book(sweep).results()[0].state == "finished"
    assert sweep.folder.stat().st_mode & 0o077 == 0
    other = Sweep(tmp_path / "elsewhere" / "s")
    other.write(settings, sweep.copy.read_text())
    assert Book(other).results() == []
    sweep.write(Settings([], [], {"name": "x"}, 2, storage="nosql://me:secret@h/d"), RANDOM)
    with pytest.raises(EchelonError) as raised:
        Book(Sweep(tmp_path / "s"))
    assert "secret" not in str(raised.value)


# --- following ---


def test_a_metric_s_names() -> None:
    names = ("rmse", "eval/rmse", "eval_rmse", "train/loss", "loss")
    assert [key_of(n, False) for n in names] == [*["eval_rmse"] * 3, "loss", "eval_loss"]
    assert key_of("val/acc", True) == "val/acc"


def test_a_history_that_grows_and_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "m"
    history = History(file, "eval_loss")
    assert history.read() == []
    file.write_text('{"step": 1, "loss": 3}\n{"step": 1, "eval_loss": 2}\n{"eval_lo')
    assert history.read() == [2.0]
    with file.open("a") as more:
        more.write('ss": 1.5}\n{"eval_loss": NaN}\nnonsense\n')
    assert history.read() == [2.0, 1.5]
    assert history.seen == {"loss", "eval_loss"}
    beside = tmp_path / "n"
    beside.write_text('{"eval_loss": 7}\n')
    beside.replace(file)
    assert history.read() == [7.0]


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    nothing = {"CUDA_VISIBLE_DEVICES": ""}
    assert share(0, 2, nothing) == {"OMP_NUM_THREADS": "4"}
    assert share(0, 1, nothing) == {}
    assert share(0, 2, nothing | {"OMP_NUM_THREADS": "3"}) == {}
