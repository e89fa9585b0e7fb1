"""What the Tab key offers: commands, options, settings and their values, and names on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typed_terminal import open_terminal

from echelon.completion.answer import complete
from echelon.completion.shell_lines import print_answer, split_line

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
EXPERIMENT = """
from dataclasses import dataclass, field
from typing import Literal
import torch

@dataclass
class Net:
    width: int = 8

@dataclass
class Settings:
    lr: float = 0.1
    kind: Literal["mlp", "cnn"] = "mlp"
    shuffle: bool = True
    net: Net = field(default_factory=Net)

def experiment(cfg: Settings): ...
def plain(cfg):
    return cfg.depth + cfg.width
def _hidden(cfg): ...
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, a sweep and a file with experiments; another run is elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("runs/first", "runs/second", "elsewhere/other"):
        (tmp_path / name / "snapshots/step-000000010").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "runs/first/snapshots/best").symlink_to("step-000000010")
    (tmp_path / "runs/search").mkdir()
    (tmp_path / "runs/search/sweep.json").write_text("{}")
    (tmp_path / "runs/bad\x1b[2Jname").mkdir()
    (tmp_path / "mine.py").write_text(EXPERIMENT)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host login node-a\n  User me\nHost node-* !x\n")
    return tmp_path


def offer(line: str) -> list[str]:
    """What may stand at the end of a line."""
    words, _ = split_line(line)
    return [candidate.text for candidate in complete(words[1:]).candidates]


def test_the_words_are_those_of_the_code() -> None:
    """If not: make completion-words."""
    script = str(ROOT / "scripts/write_completion_words.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("echelon exp", ["explain"]),
        ("echelon sweep sh", ["show"]),
        ("echelon env ", ["build", "show", "clean"]),
        ("echelon data pack --form", ["--format"]),
        ("echelon data pack --format ", ["tar", "parquet"]),
        ("echelon cost --by=m", ["--by=month"]),
        ("echelon completion ", ["bash", "zsh", "fish"]),
        ("echelon train trainer.sch", ["trainer.schedule="]),
        ("echelon train trainer.best_is=m", ["trainer.best_is=min", "trainer.best_is=max"]),
        ("echelon train launch.k8", ["launch.k8s."]),
        ("echelon train launch.preflight=t", ["launch.preflight=true"]),
        ("echelon train --dry-run launch=sl", ["launch=slurm"]),
        ("echelon train +hid", ["+hidden="]),
        ("echelon train experiment=transformer wid", ["width="]),
        ("echelon train track=[wandb,ten", [f"track=[wandb,tensorboard{end}" for end in ",]"]),
        ("echelon train trainer.save.mi", ["trainer.save.minutes="]),
        ("echelon train 'launch.container_runtime=po", ["launch.container_runtime=podman"]),
        ("echelon train --help noti", ["notify", "notify."]),
        ("echelon scale first no", ["nodes="]),
        ("echelon nonsense ", []),
        ("echelon train nonsense=", []),
        ("echelon run launch=local -- python tr", []),
    ],
)
def test_commands_options_and_settings(line: str, offered: list[str]) -> None:
    assert offer(line) == offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("echelon show ", ["latest", "first", "second"]),
        ("echelon show --dir elsewhere o", ["other"]),
        ("echelon show --dir=elsewhere o", ["other"]),
        ("echelon train --like f", ["first"]),
        ("echelon train run.name=se", ["run.name=second"]),
        ("echelon plot first s", ["second"]),
        ("echelon sweep show ", ["search"]),
        ("echelon train trainer.resume=runs/f", ["trainer.resume=runs/first/snapshots/"]),
        (
            "echelon train trainer.resume=runs/first/snapshots/",
            [f"trainer.resume=runs/first/snapshots/{n}" for n in ("best", "step-000000010")],
        ),
        ("echelon train experiment=mi", ["experiment=mine.py:"]),
        (
            "echelon train experiment=mine.py:",
            ["experiment=mine.py:experiment", "experiment=mine.py:plain"],
        ),
        ("echelon train experiment=mine.py:experiment l", ["lr=", "launch=", "launch."]),
        ("echelon train experiment=mine.py:experiment net.", ["net.width="]),
        ("echelon train experiment=mine.py:experiment kind=", ["kind=mlp", "kind=cnn"]),
        ("echelon train experiment=mine.py:plain d", ["depth="]),
        ("echelon train launch.login=", ["launch.login=login", "launch.login=node-a"]),
        ("echelon train launch.hosts=[login,n", [f"launch.hosts=[login,node-a{e}" for e in ",]"]),
        ("echelon cluster lo", ["login"]),
    ],
)
def test_names_on_this_machine(here: Path, line: str, offered: list[str]) -> None:
    assert sorted(offer(line)) == sorted(offered)


def test_files_and_folders_are_left_to_the_shell() -> None:
    def paths(*words: str) -> str:
        return complete(words).paths

    assert paths("submit", "--configs", "") == "files"
    assert paths("train", "launch.secrets=") == "files"
    assert paths("train", "run.dir=") == "folders"
    assert paths("show", "--dir", "x") == "folders"
    assert paths("run", "--", "") == "files"
    assert paths("train", "trainer.epochs=") == "words"


def test_a_line_is_divided_as_shells_do() -> None:
    assert split_line("a 'b c' d\\ e \"f'\\\"g\"") == (["a", "b c", "d e", "f'\"g"], "")
    assert split_line("a 'b c") == (["a", "b c"], "'")
    assert split_line("a b  ") == (["a", "b", ""], "")
    assert split_line("") == ([""], "")


def test_bash_is_told_what_it_replaces(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It replaces what is behind = and :, unless the word is quoted or they divide no words."""

    def answer(line: str, breaks: str = " \t\n\"'><=;|&(:") -> list[str]:
        print_answer(["bash", line, breaks])
        return capsys.readouterr().out.split("\n")[1:-1]

    assert answer("echelon train launch=sl") == ["slurm"]
    assert answer("echelon train 'launch=sl") == ["launch=slurm"]
    assert answer("echelon train launch=sl", " ") == ["launch=slurm"]
    assert answer("echelon train experiment=mine.py:pl") == ["plain"]


_LOADED = """
import sys
from echelon.cli import run_command
run_command(["completion", "--answer", "zsh", "train", "experiment=mine.py:experiment", ""])
print(*sys.modules)
"""


def test_an_answer_imports_next_to_nothing(here: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "echelon.completion.answer" in loaded
    slow = {"torch", "numpy", "hydra", "omegaconf", "yaml", "argparse", "dataclasses", "typing_ext"}
    assert not loaded & slow


# --- real shells ---


def require_shells() -> None:
    """Install zsh and fish if that is possible; otherwise skip the test with the reason."""
    script = str(ROOT / "scripts/install_shells.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    if done.returncode == 0:
        return
    if os.environ.get("ECHELON_REQUIRE_CLUSTER") == "1":
        pytest.fail(done.stderr, pytrace=False)
    pytest.skip(done.stderr.strip())


TYPED = {
    "trai\ttrainer.sche\tcos\t": "train trainer.schedule=cosine ",
    "show sec\t": "show second ",
    "train experiment=mi\tpl\tdep\t": "train experiment=mine.py:plain depth=",
    "train run.dir=else\t": "train run.dir=elsewhere/",
    "submit --configs mi\t": "submit --configs mine.py ",
}
"""What is typed, with the Tab key, and what the line is then."""


def complete_in(shell: str, words: list[str], start: list[str], folder: Path) -> None:
    """Type lines at a terminal with a shell; each is printed instead of run."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with open_terminal(words, folder, PATH=path, HOME=str(folder)) as terminal:
        for line in [*start, f"source <(echelon completion {shell})", "echo rea''dy"]:
            terminal.type_line(line)
        terminal.wait_for("ready\r\n", LIMIT_S)
        for keys, typed in TYPED.items():
            # Ctrl-A and Ctrl-E go to the ends of the line.
            line = typed.rstrip(" /") if shell == "zsh" else typed  # which takes them back
            terminal.type_keys(f'echelon {keys}\x01echo "<\x05>"\n')
            terminal.wait_for(f"<echelon {line}>\r\n", LIMIT_S)


def test_bash_completes(here: Path) -> None:
    complete_in("bash", ["bash", "--norc", "--noprofile", "-i"], ["set +o history"], here)


@pytest.mark.slow
def test_zsh_completes(here: Path) -> None:
    require_shells()
    start = ["bindkey -e", "autoload -Uz compinit", "compinit -D -u"]
    complete_in("zsh", ["zsh", "-f", "-i"], start, here)


@pytest.mark.slow
def test_fish_completes(here: Path) -> None:
    """Asked for what it would offer: its lines are drawn with more than a terminal's letters."""
    require_shells()
    asked = {
        "echelon trai": "train\ttrain an experiment",
        "echelon train trainer.schedule=c": "trainer.schedule=cosine",
        "echelon show sec": "second",
        "echelon train experiment=mine.py:plain dep": "depth=",
        "echelon train run.dir=else": "run.dir=elsewhere/",
        "echelon submit --configs mi": "mine.py",
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    lines = "\n".join(f"complete -C '{line}'" for line in asked)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"echelon completion fish | source\n{lines}"],
        cwd=here,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    for offered in asked.values():
        assert f"\n{offered}" in f"\n{done.stdout}", done.stdout + done.stderr
