"""`echelon runs`: the notebook of results, whatever lies in the folder of runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from run_folders import STARTED, echelon, lines, make_run, write_phases

from echelon.runs.run_folder import Run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    code, out, err = echelon(capsys, "runs", "--json", *words)
    assert code == 0, err
    data = json.loads(out)
    assert data["version"] == 1
    found: list[dict[str, Any]] = data["runs"]
    return found


def names(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    return [run["run"] for run in listed(capsys, *words)]


def test_a_line_says_what_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = {"best": 0.85, "step": 40, "total_steps": 40}
    make_run(tmp_path / "runs", "a", lines(), status=done, trainer={"best": "rmse"}, lr=0.1)
    make_run(tmp_path / "runs", "b", lines(), status={"state": "failed"}, lr=0.2)
    code, out, _ = echelon(capsys, "runs")
    assert code == 0
    head, a, b = (line.split() for line in out.splitlines())
    assert head == ["RUN", "STATE", "EXPERIMENT", "STEP", "BEST", "TIME", "WHEN", "SETTINGS"]
    assert a[:7] == ["a", "finished", "toy", "40", "rmse", "0.8500", "40s"]
    assert a[-2:] == ["lr=0.1", "best=rmse"]
    assert b[:6] == ["b", "failed", "toy", "40", "loss", "1.000"], "found in the metrics"


def test_nothing_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = echelon(capsys, "runs")
    assert code == 0
    assert "no runs in" in out
    assert listed(capsys) == []


def test_settings_are_those_that_differ_within_an_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs", "a", lr=0.1, dim=8, kind="x")
    make_run(tmp_path / "runs", "b", lr=0.2, dim=8, kind="x", trainer={"batch_size": 64})
    make_run(tmp_path / "runs", "other", entry="file.py:train", width=3)
    make_run(tmp_path / "runs", "another", entry="file.py:train", width=3, seed=7)
    differs = {run["run"]: run["differs"] for run in listed(capsys)}
    assert differs["a"] == {"lr": "0.1", "batch_size": "32"}
    assert differs["b"] == {"lr": "0.2", "batch_size": "64"}
    assert differs["other"] == {}
    assert differs["another"] == {"experiment.seed": "7"}, "`seed` is another setting"


def test_programs_differ_in_their_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, word in (("a", "--x=1"), ("b", "--x=2")):
        run = make_run(tmp_path / "runs", name)
        config = json.loads(run.config_file.read_text())
        config |= {"experiment": {}, "program": ["python", "train.py", word]}
        run.config_file.write_text(json.dumps(config))
    code, out, _ = echelon(capsys, "runs")
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()] == ["SETTINGS", "--x=1", "--x=2"]
    assert out.splitlines()[1].split()[:4] == ["a", "finished", "train", "–"]


def test_many_settings_are_told_only_where_they_are_unusual(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(6):
        odd: dict[str, Any] = {"a": number, "b": number == 1, "c": number == 2, "d": number == 3}
        make_run(tmp_path / "runs", f"r{number}", status={"started": -number}, **odd)
    _, out, _ = echelon(capsys, "runs")
    rows = [line.split()[8:] for line in out.splitlines()[1:]]
    assert rows[:3] == [["a=0"], ["a=1", "b=true"], ["a=2", "c=true"]]
    assert out.splitlines()[-1] == "where not said: b=false c=false d=false"


BROKEN = {
    "half": '{"experiment": {"entry"',
    "list": "[1, 2]",
    "number": "3",
    "binary": "\x00\xff",
}


def test_broken_folders_are_shown_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    for name, text in BROKEN.items():
        make_run(root, name, lines()).config_file.write_text(text, encoding="latin-1")
    make_run(root, "no_config", lines()).config_file.unlink()
    make_run(root, "no_status", lines()).status_file.write_text("{")
    make_run(root, "sound", lines())
    (root / "not_a_run").mkdir()
    (root / "a_file").write_text("")
    (root / "latest").symlink_to("sound")
    found = {run["run"]: run for run in listed(capsys)}
    assert set(found) == {*BROKEN, "no_config", "no_status", "sound"}
    broken = [name for name, run in found.items() if run["state"] == "broken"]
    assert set(broken) == {*BROKEN, "no_config"}
    assert found["no_config"]["note"] == "config.json is missing"
    assert found["no_status"]["state"] == "unknown"
    for name in found:
        assert echelon(capsys, "show", name)[0] == 0


def test_numbers_beyond_all_bounds_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = 10**400
    odd = [{"step": 1, "loss": huge, "samples": huge, "samples_per_s": 1, "time": huge}]
    make_run(tmp_path / "runs", "a", [*lines(), *odd], status={"started": huge, "since": huge})
    for words in (["runs"], ["show", "a"], ["jobs", "--all"]):
        code, _, err = echelon(capsys, *words)
        assert code == 0, err


def test_a_later_version_is_read_as_far_as_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs", "later", lines())
    config = json.loads(run.config_file.read_text())
    config |= {"trainer": ["another", "shape"], "version": 9, "program": {"a": 1}, "new": {"x": 1}}
    run.config_file.write_text(json.dumps(config))
    status = {"state": "hovering", "started": "soon", "step": "many", "best": {}, "starts": 3}
    run.status_file.write_text(json.dumps(status))
    (found,) = listed(capsys)
    assert found["step"] == 40
    assert found["best"] == 1.0
    assert echelon(capsys, "show", "later")[0] == 0


def test_metrics_of_all_sorts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = '{"step": 1}\n[1]\nnull\n{"step": "x", "loss": 1}\n{"step": NaN, "time": 1}\n'
    whole = "".join(json.dumps(line) + "\n" for line in lines(status={}))
    texts = {
        "empty": "",
        "strange": strange,
        "binary": "\x00\x01\n\udcff",
        "half": whole + '{"step": 41, "lo',
        "nan": whole.replace("1.0,", "NaN,"),
    }
    for name, text in texts.items():
        run = make_run(tmp_path / "runs", name, status={"state": "running"})
        run.metrics_file.write_bytes(text.encode(errors="surrogateescape"))
    folder = make_run(tmp_path / "runs", "folder").metrics_file
    folder.unlink()
    folder.mkdir()
    found = {run["run"]: run for run in listed(capsys)}
    assert found["half"]["step"] == 40
    assert found["nan"]["best"] == pytest.approx(1.1), "what is not finite is no best"
    for name in found:
        assert echelon(capsys, "show", name)[0] == 0


def test_a_run_that_evaluates_nothing_shows_its_training_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs", "a", [line for line in lines() if "loss" in line])
    (found,) = listed(capsys)
    assert (found["best_name"], found["best"]) == ("train loss", 0.1)


def test_the_best_may_be_the_highest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {"best": "acc", "best_is": "max"}
    make_run(tmp_path / "runs", "a", lines(), trainer=wanted, status={"state": "failed"})
    assert listed(capsys)[0]["best"] == 0.4


def test_pauses_are_not_time_at_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs", "a", lines(60))
    for begun, first_step in ((0, 0), (5000, 20), (5050, 40)):
        began = STARTED + begun
        write_phases(run, (began, began + 20, first_step, first_step + 20))
    assert listed(capsys)[0]["trained_s"] == pytest.approx(60)


def test_the_newest_first_and_the_rest_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(25):
        make_run(tmp_path / "runs", f"r{number}", status={"started": STARTED + number})
    assert names(capsys) == [f"r{number}" for number in range(24, 4, -1)]
    assert names(capsys, "--reverse")[:2] == ["r0", "r1"]
    assert len(names(capsys, "--all")) == 25
    assert echelon(capsys, "runs")[1].splitlines()[-1] == "and 5 more: --all"
    assert echelon(capsys, "runs", "--sort", "name")[1].splitlines()[-1] == "and 5 more: --all"


@pytest.fixture
def several(tmp_path: Path) -> None:
    for name, lr, best in (("a", 0.3, 0.5), ("b", 0.1, 0.4), ("c", 0.2, None)):
        state = "finished" if best else "failed"
        status = {"best": best, "state": state, "step": 1}
        make_run(tmp_path / "runs", name, status=status, lr=lr)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sort", "best"], "bac"),
        (["--sort", "lr"], "bca"),
        (["--sort", "lr", "--reverse"], "acb"),
        (["--sort", "name"], "abc"),
        (["--filter", "lr=0.1", "--sort", "name"], "b"),
        (["--filter", "lr=1e-1", "--sort", "name"], "b"),
        (["--filter", "lr!=0.1", "--sort", "name"], "ac"),
        (["--filter", "lr>=0.2", "--sort", "name"], "ac"),
        (["--filter", "best<0.45"], "b"),
        (["--filter", "state=fail*"], "c"),
        (["--filter", "name=[ab]", "--filter", "lr>0.2"], "a"),
        (["--filter", "trainer.batch_size=33"], ""),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("several")
def test_order_and_choice(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert "".join(names(capsys, *words)) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--filter", "rl=0.1"], "did you mean 'lr'"),
        (["--filter", "lr"], "KEY=VALUE"),
        (["--filter", "lr<many"], "is not a number"),
        (["--sort", "bset"], "did you mean 'best'"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("several")
def test_what_cannot_be_asked(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, out, err = echelon(capsys, "runs", *words)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_a_terminal_is_never_too_narrow(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    for number in range(3):
        name = f"a_run_with_quite_a_long_name-{number}"
        make_run(tmp_path / "runs", name, lines(), lr=number, hidden_width=number, rate=number)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = echelon(capsys, "runs")
    shown = out.splitlines()
    assert max(map(len, shown)) <= width
    assert sum("hidden_width=" in line for line in shown) == 3, "settings go below if need be"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_of_jobs_fits(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    failure = {"rank": 1, "summary": "it broke " * 20}
    status = {"state": "failed", "failure": failure, "total_steps": 40}
    make_run(tmp_path / "runs", "a_run_with_quite_a_long_name", lines(), status=status)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = echelon(capsys, "jobs")
    head, row, note = out.splitlines()
    assert max(map(len, (head, row, note))) <= width
    assert head.startswith("RUN")
    assert row.startswith("a_"), "the name shrinks"
    assert note.startswith("  └ rank 1: it broke")


def test_only_what_is_shown_is_looked_into(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the others not even the first byte of the metrics is read: a pipe would block."""
    for number in range(21):
        make_run(tmp_path / "runs", f"r{number}", status={"started": STARTED + number})
    oldest = Run(tmp_path / "runs/r0").metrics_file
    oldest.unlink()
    os.mkfifo(oldest)
    assert len(listed(capsys)) == 20
    assert "r0" not in names(capsys)


@pytest.mark.parametrize("width", [24, 40, 60, 80])
def test_a_name_stays_whole_where_it_fits(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ["toy-20260101-120000-ab12", "recommender"]
    for name in known:
        make_run(tmp_path / "runs", name, lines(), entry=f"{name}_experiment.py:experiment")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = echelon(capsys, "runs")
    head, *rows = [line.rstrip() for line in out.splitlines()]
    assert sorted(row.split()[0] for row in rows) == sorted(known)
    assert ("STATE" in head) == (width >= 40), "what there is room for is shown"
    assert max(map(len, [head, *rows])) <= width
