"""Every verb's help fits a terminal and leaves no setting out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from echelon.cli import SUBCOMMANDS, run_command
from echelon.commands.train import train
from echelon.config.compose import UserExperiment
from echelon.config.schema import Config, flatten

VERB_WORDS = [*([verb] for verb in SUBCOMMANDS), ["sweep", "show"]]


@pytest.mark.parametrize("words", VERB_WORDS, ids=" ".join)
def test_help_fits_80_columns(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        run_command([*words, "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: echelon {words[0]} ")
    long_lines = [line for line in output.splitlines() if len(line) > 80]
    assert long_lines == []


def test_the_overview_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([]) == 0
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if len(line) > 80] == []
    assert [line.split()[0] for line in output[2 : 2 + len(SUBCOMMANDS)]] == list(SUBCOMMANDS)


def test_train_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(["train", "--help"])
    output = capsys.readouterr().out
    known = {
        key.removesuffix(".kind") if key == "launch.kind" else key for key in _known_settings()
    }
    assert {
        key for key in known if f"\n  {key}=" not in output and f"\n  {key}." not in output
    } == set()


def _known_settings() -> set[str]:
    units = (".steps", ".epochs", ".minutes")
    cadences = ("trainer.evaluate", "trainer.save")
    flat = flatten(Config().to_dict())
    return {
        next((c for c in cadences if key.startswith(c) and key.endswith(units)), key)
        for key in [*flat, "experiment"]
    }


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ([], "settings of toy:\n  samples=2048\n"),
        (["experiment=transformer"], "  feed=gelu\n      the layers after attention: gelu, or swi"),
        (["experiment=movielens_dot"], "  tower=[]\n      widths of layers over both vectors"),
    ],
)
def test_train_lists_the_settings_of_the_experiment(
    words: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_command(["train", *words, "--help"])
    parts = capsys.readouterr().out.partition("\nsettings of ")
    assert output in "".join(parts[1:]).lstrip("\n")
    assert "epochs" not in parts[2], "which are the trainer's"


def test_help_lists_what_a_users_experiment_declares(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass
    class Settings:
        lr: float = 0.1
        tied: bool = True
        widths: list[int] = field(default_factory=lambda: [8])

    with pytest.raises(SystemExit):
        train(["--help"], UserExperiment("/home/me/own.py:experiment", Settings))
    output = capsys.readouterr().out
    assert output.startswith("usage: python own.py ")
    assert "\nsettings of own.py:experiment:\n  lr=0.1\n  tied=true\n  widths=[8]\n" in output
