"""Letters beyond ASCII: in values they work as typed, in names they are refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import echelon

from echelon.config.compose import compose
from echelon.errors import EchelonError, Fault

QUICK = ("samples=64", "eval_samples=16", "trainer.batch_size=8", "trainer.epochs=1")


def find_fault(*words: str) -> Fault:
    with pytest.raises(EchelonError) as raised:
        compose(words)
    (fault,) = raised.value.faults
    return fault


@pytest.mark.parametrize("name", ["größe", "'größe'", "实验", "naïve-1", "a b", "über/unter"])
def test_a_name_says_which_letters_it_cannot_have(name: str) -> None:
    fault = find_fault(f"run.name={name}")
    odd = [c for c in name.strip("'") if not (c.isascii() and (c.isalnum() or c == "-"))]
    assert f"run.name='{name.strip(chr(39))}' is not a valid name for a run" in fault.what
    assert all(repr(letter) in fault.what for letter in odd)
    assert "a to z" in fault.do


def test_a_refused_name_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "commands.txt").write_text("echo 1\n")
    (tmp_path / "sweep.yaml").write_text(
        "method: grid\nmetric: {name: loss, goal: minimize}\nparameters: {lr: {values: [1]}}\n"
    )
    before = sorted(tmp_path.iterdir())
    for words in (
        ["train", "run.name=größe"],
        ["train", "-m", "run.name=größe", "lr=0.1,0.2"],
        ["train", "launch=slurm", "run.name=größe"],
        ["run", "run.name=größe", "--", "true"],
        ["submit", "--configs", "commands.txt", "--name", "größe"],
        ["sweep", "sweep.yaml", "--name", "größe"],
    ):
        code, _, err = echelon(capsys, *words)
        assert code == 2, words
        assert "'größe' is not a valid name" in err, words
        assert err.count("error: ") == 1, words
    assert sorted(tmp_path.iterdir()) == before


def test_a_path_is_taken_as_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = echelon(capsys, "train", "run.dir=läufe/von mir", "run.name=a", *QUICK)
    assert code == 0, err
    folder = tmp_path / "läufe" / "von mir"
    assert (folder / "latest").resolve() == folder / "a"
    assert "a" in echelon(capsys, "runs", "--dir", "läufe/von mir")[1]


@pytest.mark.parametrize("value", ["[ä,b]", "{ä: 1}", "ä,b"])
def test_a_value_that_is_more_than_a_word_is_not_taken_for_one(value: str) -> None:
    assert "is not an override" in find_fault(f"run.dir={value}").what
    with pytest.raises(EchelonError):
        compose([f"launch.hosts={value}"])


def test_a_setting_with_such_a_name_cannot_be_typed() -> None:
    fault = find_fault("größe=1")
    assert "'größe' has others" in fault.what
    assert fault.do == "rename the setting"
