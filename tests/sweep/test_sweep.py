"""Sweeps as a person types them: refused before anything runs, stopped, gone on with, looked at."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from command_runner import ECHELON, is_a_sentence_and_a_hint, run, until, wait_for_all
from worlds import run_forked, start_forked, started_forked

from echelon.cli import run_and_report_faults, run_command
from echelon.errors import ExitCode
from echelon.runs.run_folder import Run

CAMPAIGN = Path(__file__).parents[1] / "campaigns" / "sweep_kills.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
WAITS = """\
import signal, time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
import echelon, torch
from echelon.data.toy import make_linear_data

STEPS, HEARD = [], []

@dataclass
class Settings:
    lr: float = 0.1

def hear(listener, number, frame):
    HEARD.append(number)
    listener(number, frame)

def loss(cfg, output, target):
    STEPS.extend([1] * output.requires_grad)
    ended = cfg.lr > 0.01 and Path(__file__).with_name("stopped").exists()
    while len(STEPS) == 70 and not HEARD and not ended:  # the good one goes on, once resumed
        time.sleep(0.01)
    return torch.nn.functional.mse_loss(output, target)

def experiment(cfg: Settings):
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, partial(hear, signal.getsignal(number)))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    data = make_linear_data(512, 4, 0.1, 0)
    return echelon.Experiment(model, optimizer, partial(loss, cfg), train_data=data, eval_data=data)

if __name__ == "__main__":
    echelon.main(experiment)
"""
"""Every trial waits in its 70th step, in the fifth epoch, until it is asked to end."""
TINY = "samples: {value: 512}, eval_samples: {value: 64}"


def file(folder: Path, text: str, name: str = "s.yml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """`echelon sweep` in this process, up to where workers would start."""
    monkeypatch.chdir(tmp_path)

    def type_it(text: str, *words: str) -> tuple[int, str, str]:
        code = run_and_report_faults(lambda: run_command(["sweep", file(tmp_path, text), *words]))
        told = capsys.readouterr()
        return code, told.out, told.err

    return type_it


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("parameters: {lrr: {values: [1]}}\n", (), "s.yml:2: lrr=1: there is no such setting"),
        ("parameters: {lr: {values: [a]}}\n", (), "s.yml:2: lr=a: "),
        ("parameters: {lr: {values: [0.1, fast]}}\n", (), "s.yml:2: lr=fast: "),
        ("parameters: {trainer.epochs: {values: [1, -1]}}\n", (), "trainer.epochs=-1 is below 0"),
        ("parameters: {launch.procs: {values: [1]}}\n", (), "s.yml:2: the sweep sets launch.procs"),
        ("parameters: {lr: {value: 1}}\n", ("run.name=x",), "run.name=x is the same for all"),
        ("parameters: {lr: {value: 1}}\n", ("--name", "a b"), "is not a valid name for a run"),
        ("parameters: {lr: {value: 1}}\n", ("experiment=nope",), "there is no such experiment"),
        ("parameters: {lr: {min: 2, max: 1}}\n", (), "s.yml:2: lr has min=2 > max=1"),
        ("parameters: {lr: {value: 1}}\n", ("launch.nodes=2",), "does not use it"),
        ("parameters: {lr: {value: 1}}\n", ("lr=2",), "the sweep's file has a parameter lr"),
        ("parameters: {lr: {value: 1}}\n", ("--name", ""), "--name='' is not a valid name"),
        ("parameters: {lr: {value: 1}}\n", ("--dir", "/proc/x"), "/proc/x/s cannot be written"),
        ("parameters: {lr: {value: 1}}\n", ("--storage", "no://a:pw@b"), "--storage no://a:…@b: "),
        ("parameters: {lr: {min: 1, max: 10000000000}}\n", (), "10,000,000,000 values"),
        ("parameters: {lr: {values: [!!python/name:os.system [1]]}}\n", (), "an object"),
        ("parameters: {_target_: {value: 1}}\n", (), "s.yml:2: the sweep sets '_target_'"),
        ("command: [prog]\nparameters: {lr: {value: 1}}\n", (), "there is no metric"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    typed: Any, tmp_path: Path, text: str, words: tuple[str, ...], says: str
) -> None:
    code, _, err = typed("method: grid\n" + text, *words)
    assert code == ExitCode.USAGE
    assert says in err
    assert is_a_sentence_and_a_hint(err)
    assert [path.name for path in tmp_path.iterdir()] == ["s.yml"]


def test_a_run_that_is_called_like_a_trial_is_none(typed: Any, tmp_path: Path) -> None:
    """It may be left of a sweep whose folder was removed, with other values."""
    (tmp_path / "runs" / "s-0").mkdir(parents=True)
    (tmp_path / "runs" / "s-0" / "config.json").write_text("{}")
    code, _, err = typed("method: grid\nparameters: {lr: {value: 1}}\n")
    assert code == ExitCode.USAGE
    assert "runs/s-0 is there already" in err
    assert is_a_sentence_and_a_hint(err)


def test_a_search_without_end_is_refused(typed: Any) -> None:
    code, _, err = typed("method: random\nparameters: {lr: {min: 0.1, max: 0.2}}\n")
    assert code == ExitCode.USAGE
    assert "would never end" in err


def test_all_faults_of_a_file_come_in_one_round(typed: Any) -> None:
    """Of its format, of its values, of the settings that they name, and of the command line."""
    text = """\
method: random
metric: {name: eval/loss, gaol: minimize}
parameters:
  lr: {min: low, max: high, mini: 0}
  hiden: {values: [1, 2]}
  trainer.epochs: {values: [1, -1, -2]}
  trainer.batch_size: {value: big}
  launch.procs: {value: 2}
"""
    code, _, err = typed(text, "run.name=x", "--name", "a b")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(err)
    for says in (
        "s.yml:2: a metric has no 'gaol'",
        "s.yml:4: lr has no 'mini'",
        "s.yml:4: lr.min is 'low', not a number",
        "s.yml:4: lr.max is 'high', not a number",
        "run.name=x is the same for all trials",
        "--name='a b' is not a valid name",
        "method: random without run_cap would never end",
        "s.yml:5: hiden=1: there is no such setting",
        "s.yml:6: trainer.epochs=-1",
        "s.yml:6: trainer.epochs=-2",
        "s.yml:7: trainer.batch_size=big",
        "s.yml:8: the sweep sets launch.procs, which it may not",
    ):
        assert err.count(says) == 1, (says, err)


def test_a_fault_of_a_file_causes_no_other(typed: Any) -> None:
    """A program that is not text is no reason to look for its parameters in an experiment."""
    text = "method: grid\nprogram: 3\nrun_cap: many\nparameters: {x: {values: [1]}}\n"
    code, _, err = typed(text)
    assert code == ExitCode.USAGE
    assert err.count("error: ") == 2, err


def test_the_nearest_name_is_said(typed: Any) -> None:
    _, _, err = typed("method: grid\nparameters: {hiden: {values: [1]}}\n")
    assert "did you mean 'hidden'?" in err


def test_a_dry_run_says_what_would_happen(typed: Any, tmp_path: Path) -> None:
    text = "method: grid\nparameters: {lr: {values: [0.1, 1e-2]}, hidden: {min: 1, max: 3}}\n"
    code, out, err = typed(text, "--dry-run", "--parallel", "2")
    assert code == ExitCode.OK
    assert out.startswith("sweep s: 6 trials, 2 at once")
    assert "grid for the smallest eval/loss" in out
    assert "1e-2 is read as the number 0.01" in err
    code, out, _ = typed(text, "launch=slurm", "launch.nodes=2", "--dry-run", "--json")
    told = json.loads(out)
    assert told["run_cap"] == 6
    assert "#SBATCH --array=0-0\n" in told["script"]
    assert "#SBATCH --nodes=2\n" in told["script"]
    code, out, _ = typed(text, "launch=slurm", "launch.nodes=2", "--dry-run", "--engine", "wandb")
    assert "on wandb's server" in out
    assert "--array" not in out  # every trial is a job of its own
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("size", "says"),
    [("1", "this cluster takes no job arrays"), ("3", "an array has at most 2 tasks here")],
)
def test_a_cluster_whose_arrays_are_small(
    typed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, says: str
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "slurm.conf").write_text(f"MaxArraySize={size}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    text = "method: grid\nparameters: {lr: {values: [0.1, 0.2, 0.3]}}\n"
    code, _, err = typed(text, "launch=slurm", "--parallel", "3")
    assert code == ExitCode.USAGE
    assert says in err
    assert is_a_sentence_and_a_hint(err)
    assert not (tmp_path / "runs").exists()


def test_no_such_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "show", "nope", "--dir", str(tmp_path)]
    assert run_and_report_faults(lambda: run_command(words)) == ExitCode.NOT_FOUND
    assert "no sweep 'nope'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sweeper.yml", "movielens/sweep.yml"])
def test_the_examples_are_sweeps(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_and_report_faults(lambda: run_command(["sweep", str(EXAMPLES / name), "--dry-run"]))
        == ExitCode.OK
    )
    assert "bayes for the smallest eval/" in capsys.readouterr().out


# --- with workers ---


@pytest.mark.slow
def test_the_example_as_it_is_typed(tmp_path: Path) -> None:
    """On less data."""
    words = ("sweep", str(EXAMPLES / "sweeper.yml"), "--parallel", "2", "samples=256")
    done = run((*ECHELON, *words), tmp_path)
    assert done.code == ExitCode.OK, done.err
    assert done.out.startswith("sweep sweeper: 12 of 12 results (")
    assert "best run    echelon show sweeper-" in done.out
    show = (*ECHELON, "sweep", "show", "sweeper", "--plot", "p.png", "--json")
    done = run_forked(show, tmp_path)
    numbers = [trial["trial"] for trial in json.loads(done.out)["trials"]]
    assert numbers == list(range(12))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_sweep_is_stopped_gone_on_with_and_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every trial on two processes; Ctrl-C in the middle of the first."""
    text = """\
method: grid
name: my search
metric: {name: loss}
program: waits.py
parameters:
  lr: {values: [0.05, 1e-4]}
  trainer: {parameters: {epochs: {value: 8}}}
early_terminate: {type: hyperband, min_iter: 2, eta: 2}
"""
    (tmp_path / "waits.py").write_text(WAITS)
    words = (*ECHELON, "sweep", file(tmp_path, text), "launch=local", "launch.procs=2")
    first = Run(tmp_path / "runs" / "my-search-0")
    with started_forked(words, tmp_path) as running:
        until(
            lambda: first.find_newest_step() or running.process.poll() is not None,
            300,
            "a snapshot",
        )
        running.process.send_signal(signal.SIGINT)
        done = running.wait()
    assert done.code == ExitCode.PREEMPTED, done.err
    assert done.left == []
    assert "the same command continues" in done.err

    (tmp_path / "stopped").touch()
    done = run_forked(words, tmp_path)
    assert done.code == ExitCode.OK, done.err
    assert done.left == []
    assert "resuming run my-search-0 after step" in first.get_rank_log_file(0).read_text()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    show = ["sweep", "show", "my-search", "--json", "--plot", "p.html"]
    assert run_and_report_faults(lambda: run_command(show)) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert (told["results"], told["run_cap"]) == (2, 2)
    good, bad = told["trials"]
    assert (good["state"], bad["state"]) == ("finished", "pruned")
    assert good["evaluations"] == 8
    assert bad["evaluations"] < 8
    assert told["best"]["parameters"] == {"lr": 0.05}
    second = Run(tmp_path / "runs" / "my-search-1")
    assert second.read_status_file()["state"] == "pruned"
    assert second.find_newest_step() > 0
    page = (tmp_path / "p.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert run_and_report_faults(lambda: run_command(["runs", "--json"])) == ExitCode.OK
    runs = {each["run"]: each["state"] for each in json.loads(capsys.readouterr().out)["runs"]}
    assert runs == {"my-search-0": "finished", "my-search-1": "pruned"}

    other = file(tmp_path, text.replace("0.05", "0.06"))
    assert run_and_report_faults(lambda: run_command(["sweep", other])) == ExitCode.USAGE
    assert "is another one: parameters" in capsys.readouterr().err


@pytest.mark.slow
def test_sweeps_that_come_to_nothing_say_why(tmp_path: Path) -> None:
    """All trials fail; the metric is never reported; and a program of another kind that works."""
    (tmp_path / "other.py").write_text(
        "import json, os, sys\n"
        "x = float(sys.argv[1].removeprefix('--x='))\n"
        "with open(os.environ['ECHELON_METRICS'], 'a') as file:\n"
        "    print(json.dumps({'score': x * x}), file=file)\n"
    )
    texts = {
        "failing": "metric: {name: loss}\nparameters: {lr: {values: [1e30, 2e30, 3e30, 4e30]}}\n",
        "silent": "metric: {name: accuracy}\nparameters: {lr: {values: [0.1, 0.2]}, "
        f"{TINY}}}\n",
        "program": "metric: {name: score, goal: maximize}\nprogram: other.py\n"
        "parameters: {x: {values: [1, 3, 2]}}\n",
    }
    commands = [
        start_forked(
            (*ECHELON, "sweep", file(tmp_path, "method: grid\n" + text, f"{name}.yml"), "--json"),
            tmp_path,
        )
        for name, text in texts.items()
    ]
    done = dict(zip(texts, wait_for_all(commands), strict=True))
    assert done["failing"].code == ExitCode.FAILED
    assert "the first 3 trials failed: the loss is " in done["failing"].err
    assert json.loads(done["failing"].out)["results"] == 3
    assert done["silent"].code == ExitCode.FAILED
    says = "trial 0 never reported the metric 'accuracy'; it reported eval/loss"
    assert says in done["silent"].err
    assert done["program"].code == ExitCode.OK, done["program"].err
    assert json.loads(done["program"].out)["best"]["parameters"] == {"x": 3}
    assert [each.left for each in done.values()] == [[], [], []]


@pytest.mark.slow
def test_a_sample_of_the_kill_campaign(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = ("--trials", "3", "--kills", "2", "--epochs", "2", "--pause-s", "6")
    done = run_forked([sys.executable, str(CAMPAIGN), *words, "--json", str(out)], tmp_path)
    assert done.code == 0, done.output
    told = json.loads(out.read_text())
    assert told["results"] == 3
    assert sum(told["killed"].values()) > 0
