"""`echelon runs` with columns of one's choice, and tags and notes by `echelon note`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import STARTED, echelon, lines, make_run, write_phases


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (name, lr) in enumerate([("a", 0.3), ("b", 0.1)]):
        settings: dict[str, Any] = {"lr": lr, "model": {"width": 8 * (number + 1)}}
        better = [
            {**li, "eval_acc": li["eval_acc"] + number} if "eval_acc" in li else li
            for li in lines()
        ]
        run = make_run(
            tmp_path / "runs", name, better, status={"started": STARTED - number}, **settings
        )
        write_phases(run, (STARTED, STARTED + 114, 0, 40))


def read_table(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    code, out, err = echelon(capsys, "runs", *words)
    assert (code, err) == (0, "")
    return [line.split() for line in out.splitlines()]


def test_columns_are_metrics_settings_and_what_every_run_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read_table(capsys, "--columns", "acc,lr,time") == [
        ["RUN", "ACC", "LR", "TIME"],
        ["a", "0.4000", "0.3", "1m54s"],
        ["b", "1.400", "0.1", "1m54s"],
    ]
    dotted = "run,model.width,trainer.epochs,eval_loss.best,loss.max,lr.last"
    head, a, _ = read_table(capsys, "--columns", dotted)
    assert head[:2] == ["RUN", "MODEL.WIDTH"]
    assert (a[0], a[1], a[3:]) == ("a", "8", ["1.000", "4.000", "0.1000"])
    many = "state,step,total_steps,best,when,age,launcher,host,job,nodes,processes,tags,note,why"
    assert len(read_table(capsys, "--columns", many)) == 3


def test_sorted_and_filtered_by_any_column(capsys: pytest.CaptureFixture[str]) -> None:
    def list_names(*words: str) -> str:
        return "".join(row[0] for row in read_table(capsys, "--columns", "state", *words)[1:])

    assert list_names("--sort", "acc") == "ba", "the higher is the better"
    assert list_names("--sort", "model.width", "--reverse") == "ba"
    assert list_names("--filter", "acc>1") == "b"
    assert list_names("--filter", "acc.min<1") == "a"


def test_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    out = echelon(capsys, "runs", "--json", "--columns", "acc,lr,time,tags")[1]
    a, b = json.loads(out)["runs"]
    assert a["columns"] == {"acc": 0.4, "lr": 0.3, "time": 114.0, "tags": None}
    assert b["columns"]["acc"] == pytest.approx(1.4)
    assert "columns" not in json.loads(echelon(capsys, "runs", "--json")[1])["runs"][0]


def test_unknown_columns_are_named_together_with_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = echelon(capsys, "runs", "--columns", "accc,lr,zzz")
    assert (code, out) == (2, "")
    assert "no run has 'accc'" in err
    assert "did you mean 'acc'?" in err
    assert "no run has 'zzz'" in err
    for there in ("tags", "metrics: acc, eval_loss, loss", "settings: ", "model.width"):
        assert there in err
    with pytest.raises(SystemExit, match="2"):
        echelon(capsys, "runs", "--columns", ",")
    assert "at least one name" in capsys.readouterr().err


def test_notes_and_tags_are_kept_shown_and_searched(capsys: pytest.CaptureFixture[str]) -> None:
    said = echelon(capsys, "note", "a", "the", "baseline", "--tag", "good", "--tag", "paper")
    assert said == (0, "a [good, paper]: the baseline\n", "")
    assert echelon(capsys, "note", "a", "--untag", "paper", "--tag", "best")[1] == (
        "a [good, best]: the baseline\n"
    )
    assert echelon(capsys, "note", "b")[1] == "b: no note\n"
    shown = [" ".join(line.split()) for line in echelon(capsys, "show", "a")[1].splitlines()]
    assert "tags good, best" in shown
    assert "noted the baseline" in shown
    table = read_table(capsys, "--columns", "tags,note", "--tag", "good")
    assert table == [["RUN", "TAGS", "NOTE"], ["a", "good,best", "the", "baseline"]]
    assert echelon(capsys, "runs", "--tag", "good", "--tag", "paper")[1].startswith("no run in")
    (run,) = json.loads(echelon(capsys, "runs", "--json", "--tag", "good")[1])["runs"]
    assert (run["tags"], run["user_note"]) == (["good", "best"], "the baseline")
    data = json.loads(echelon(capsys, "note", "a", "--clear", "--json")[1])
    assert data["runs"][0]["user_note"] == ""
    assert data["runs"][0]["tags"] == ["good", "best"]


@pytest.mark.parametrize("tag", ["", "a b", "a,b", "x=1", "a*"])
def test_a_tag_is_one_word(capsys: pytest.CaptureFixture[str], tag: str) -> None:
    code, out, err = echelon(capsys, "note", "a", "--tag", tag, "--tag", "fine")
    assert (code, out) == (2, "")
    assert f"--tag {tag!r} cannot be a tag" in err
    assert echelon(capsys, "note", "a")[1] == "a: no note\n", "nothing was written"
