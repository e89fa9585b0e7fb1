"""Every verb's help fits a terminal and leaves no setting out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from textwrap import dedent
from typing import Literal

import pytest

from echelon.cli import SUBCOMMANDS, run_and_report_faults, run_command
from echelon.commands.train import train
from echelon.config.compose import UserExperiment
from echelon.config.schema import Config, flatten
from echelon.config.settings_help import GROUPS

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


def read_help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `echelon train WORDS` prints before it ends with 0."""
    with pytest.raises(SystemExit) as ended:
        run_command(["train", *words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_all_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    output = read_help(capsys, "--help", "all")
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


def test_the_short_help_lists_ten_settings_and_where_more_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, used, more = re.split(r"\n(?:most used|more settings):\n", read_help(capsys, "--help"))
    assert "\nsettings of toy:\n  samples=2048\n" in own, "the experiment's own come first"
    assert len(re.findall(r"^  \w", used, re.MULTILINE)) == 10
    topics = re.findall(r"^  --help (\w+)", more, re.MULTILINE)
    assert topics == [*("experiment", *GROUPS), "other", "all", "WORD"]
    for topic in topics[:-1]:
        assert f"{topic}:\n" in read_help(capsys, "--help", topic) or topic in ("experiment", "all")


def test_the_groups_together_are_all_settings(capsys: pytest.CaptureFixture[str]) -> None:
    def list_names(topic: str) -> set[str]:
        return set(re.findall(r"^  ([\w.]+?)=", read_help(capsys, "--help", topic), re.MULTILINE))

    every = list_names("all")
    topics = ["experiment", *GROUPS, "other"]
    assert set().union(*map(list_names, topics)) == every
    assert sum(len(list_names(topic)) for topic in topics) == len(every)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--help", "warmup"], ["trainer.warmup_steps"]),
        (["-h", "WARMUP"], ["trainer.warmup_steps"]),
        (["--help=trainer.clip"], ["trainer.clip"]),
        (["experiment=transformer", "--help", "swiglu"], ["feed"]),
        (["--help", "hidden", "experiment=toy"], ["hidden"]),
    ],
)
def test_help_on_a_word(
    words: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.findall(r"^  ([\w.]+)=", read_help(capsys, *words), re.MULTILINE) == names


def test_a_word_that_no_setting_has_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_and_report_faults(partial(run_command, ["train", "--help", "epohcs"])) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: no setting has 'epohcs' in its name or in its help\n")
    assert "did you mean 'epochs'?" in output.err


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("topic", ["all", "trainer", "wandb"])
def test_topics_fit_the_terminal(
    topic: str,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = read_help(capsys, "--help", topic).splitlines()
    assert columns - 30 < max(map(len, lines)) <= columns


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
    page = read_help(capsys, *words, "--help", "experiment")
    assert output in page
    assert "epochs" not in page, "which are the trainer's"


@dataclass
class Adam:
    lr: float = 0.1  # the peak of the learning rate
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass
class Sgd:
    lr: float = 0.5
    """Of every
    step."""


@dataclass
class Inherited:
    tied: bool = True  # not shown: # is part of it


@dataclass
class Settings(Inherited):
    """The string under a class is no help on its first field."""

    widths: list[int] = field(default_factory=lambda: [8])
    optimizer: Adam | Sgd = field(default_factory=lambda: Sgd(0.3))
    """What steps."""
    kind: Literal["mean", "sum"] = "mean"
    """How losses are joined."""
    head: Adam | None = None
    needed: int = field(kw_only=True)


def test_help_lists_what_a_users_experiment_declares(capsys: pytest.CaptureFixture[str]) -> None:
    own = UserExperiment("/home/me/own.py:experiment", Settings)
    with pytest.raises(SystemExit):
        train(["--help"], own)
    output = capsys.readouterr().out
    assert output.startswith("usage: python own.py ")
    expected = """
        settings of own.py:experiment:
          tied=true
              not shown: # is part of it
          widths=[8]
          optimizer.class=Sgd
              What steps. One of Adam, Sgd.
          optimizer.lr=0.3
              Of every step.
          optimizer.betas=[0.9, 0.99]
              (Adam)
          kind=mean
              How losses are joined. One of mean, sum.
          head=null
              The settings of Adam or null.
          needed=…  (required)

        most used:
          experiment=own.py:experiment
    """
    assert dedent(expected).rstrip() in output
    with pytest.raises(SystemExit):
        train(["--help", "betas"], own)
    assert "  optimizer.betas=[0.9, 0.99]\n" in capsys.readouterr().out


def test_help_lists_what_code_without_a_class_reads(capsys: pytest.CaptureFixture[str]) -> None:
    own = UserExperiment("/me/own.py:fn", None, frozenset({"lr", "width"}), has_exact_names=True)
    with pytest.raises(SystemExit):
        train(["--help"], own)
    assert "\nsettings of own.py:fn:\n  lr=…\n  width=…\n\n" in capsys.readouterr().out


# --- options that are settings ---


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (["--epochs", "3"], ["write trainer.epochs=3"]),
        (["--epochs=3"], ["write trainer.epochs=3"]),
        (["--epoch", "3", "lr=0.1"], ["write trainer.epochs=3"]),
        (
            ["--batch-size", "8", "--lr", "0.1", "--trainer.clip", "1"],
            ["write trainer.batch_size=8", "write lr=0.1", "write trainer.clip=1"],
        ),
        (["--compile"], ["write trainer.compile=true"]),
        (["--zzz"], ["echelon train --help zzz searches them"]),
    ],
)
def test_an_option_that_is_a_setting(
    words: list[str], hints: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_and_report_faults(partial(run_command, ["train", *words])) == 2
    output = capsys.readouterr().err
    assert re.findall(r"^  hint: (.*)$", output, re.MULTILINE) == hints
    assert output.startswith(f"error: {' '.join(words[: 1 if '=' in words[0] else 2])} is not an")


def test_an_option_of_resume_that_is_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_and_report_faults(partial(run_command, ["resume", "a", "--epochs", "9"])) == 2
    assert "hint: write trainer.epochs=9" in capsys.readouterr().err
