"""Sweeps on wandb's server: its own agent and ours, one rank and several, and when it is ill."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import command_runner
import pytest
import yaml
from command_runner import ECHELON, HERE, only_run
from optional_packages import require_package
from other_users import STRANGER, give_away, needs_root
from run_folders import lines, make_run
from wandb_server import SWEEP, Server, serving
from worlds import Ended, configured, run_forked, started_forked, train_config

from echelon.cli import run_command
from echelon.entrypoint import compose_config
from echelon.errors import EchelonError, ExitCode
from echelon.runs.run_folder import Run
from echelon.runs.status import read_run_status
from echelon.sweep.plan import SweepPlan, plan_sweep
from echelon.sweep.sweep_file import SweepFile, read_sweep_file
from echelon.sweep.sweep_folder import SweepLock
from echelon.sweep.wandb import trial_records
from echelon.sweep.wandb.client import ServerUnavailableError
from echelon.sweep.wandb.client import WandbServer as Client
from echelon.sweep.wandb.engine import run_agents
from echelon.sweep.wandb.trial_records import WandbTrialRecord

require_package("wandb")

KEY = "5ecre7" * 7
EXPERIMENT = f"experiment={HERE / 'toy_experiments.py'}:regression"
LEASE_S = 60.0
SIZE = ("samples=16", "eval_samples=4", "trainer.batch_size=8", "trainer.epochs=1")


def at_home(tmp_path: Path, server: Server) -> dict[str, Any]:
    """Nobody's settings but these."""
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    limits = {"WANDB_INIT_TIMEOUT": "300", "WANDB_FINISH_TIMEOUT": "300"}
    known = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "HOME": str(tmp_path)}
    return known | limits | {"PATH": python}


def nowhere(key: str, folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if key.encode() in path.read_bytes()] == []


# --- ranks --------------------------------------------------------------------------------------


def agent(folder: Path, given: Mapping[str, Any]) -> dict[str, str]:
    """What an agent leaves its command, without one."""
    file = folder / "parameters.yaml"
    file.write_text(yaml.safe_dump({name: {"value": value} for name, value in given.items()}))
    return {
        "WANDB_SWEEP_ID": SWEEP,
        "WANDB_RUN_ID": "trial0",
        "WANDB_SWEEP_PARAM_PATH": str(file),
        "WANDB_MODE": "disabled",
    }


def trained(folder: Path, given: Mapping[str, Any], **env: str) -> list[Ended]:
    """Two ranks, of which the first alone is on the agent's machine."""
    config = configured(folder, SIZE)
    prepare = partial(take_variables, agent(folder, given))
    return train_config(folder, 2, config, env=env, prepare=prepare).ranks


def take_variables(of_agent: Mapping[str, str], rank: int) -> None:
    os.environ.update(of_agent if rank == 0 else {"WANDB_MODE": "disabled"})


@pytest.mark.slow
def test_every_rank_is_given_what_rank_0_took(tmp_path: Path, traced: Path) -> None:
    given = {"lr": 0.5, "trainer": {"batch_size": 4.0}}
    ranks = trained(tmp_path, given, ECHELON_TEST_TRACE=str(traced))
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
    lines = [json.loads(line) for file in traced.iterdir() for line in file.open()]
    steps = [(line["rank"], line["lr"]) for line in lines if "step" in line]
    assert sorted(steps) == [(rank, 0.5) for rank in (0, 1) for _ in range(4)]
    run = Run(tmp_path / f"{SWEEP}-trial0")
    assert run.read_config().trainer.batch_size == 4
    assert run.read_config().track.wandb.swept == ["lr", "trainer.batch_size"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": {"_target_": "os.system"}}, "is not the name of a setting"),
        ({"lr": "${oc.env:HOME}"}, "an interpolation"),
        ({"lrr": 0.1}, "did you mean 'lr'?"),
        ({"trainer.batch_size": 1}, "smaller than the world of 2"),
        ({"launch.kind": "slurm"}, "which it may not"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused_on_rank_0_runs_nowhere(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    ranks = trained(tmp_path, given)
    assert [rank.code for rank in ranks] == [2, 2], ranks[0].output
    assert all(said in rank.output for rank in ranks)
    assert list(tmp_path.glob("*/config.json")) == []


# --- wandb's own agent --------------------------------------------------------------------------


@pytest.mark.slow
def test_wandb_agent_with_torchrun(tmp_path: Path) -> None:
    """The program of a sweep is a file that calls echelon.main."""
    program = tmp_path / "mine.py"
    program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(HERE)!r})\nimport echelon, toy_experiments\n"
        "def experiment(cfg: toy_experiments.Settings) -> echelon.Experiment:\n"
        "    os.write(1, f\"rank {os.environ['RANK']} has lr={cfg.lr}\\n\".encode())\n"
        "    return toy_experiments.regression(cfg)\n"
        "if __name__ == '__main__':\n    echelon.main(experiment)\n"
    )
    torchrun = ["torchrun", "--nproc-per-node", "2", "--standalone", "${program}", *SIZE]
    with serving() as server:
        server.sweep.config = yaml.safe_dump(
            {"program": str(program), "command": [*torchrun, "${args}"], "method": "random"}
        )
        server.sweep.trials = [{"lr": 0.125, "trainer.batch_size": 4}]
        words = [shutil.which("wandb") or "wandb", "agent", "--count", "1", f"me/pro/{SWEEP}"]
        done = command_runner.run(words, tmp_path, **at_home(tmp_path, server))
        assert done.code == 0, done.err
        [(name, served)] = server.runs.items()
    said = [line for line in done.out.splitlines() if "has lr=" in line]
    assert sorted(said) == ["rank 0 has lr=0.125", "rank 1 has lr=0.125"]
    assert (name, served.about["sweep"], served.about["project"]) == ("trial0", SWEEP, "pro")
    assert (served.config["lr"], served.config["trainer.batch_size"]) == (0.125, 4)
    assert [row["eval/loss"] for row in served.rows() if "eval/loss" in row]
    assert [end["exitcode"] for end in served.ends] == [0]
    assert Run(only_run(tmp_path)).read_wandb_id() == "trial0"
    assert not [line for line in done.err.splitlines() if line.startswith("warning:")]
    nowhere(KEY, tmp_path)


# --- the protocol -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (401, "does not accept the key"),
        (404, "has no such sweep"),
        (403, "does not give this key access"),
    ],
)
def test_a_server_that_refuses(answer: int, said: str) -> None:
    with serving() as server:
        server.answer = answer
        with pytest.raises(EchelonError, match=said):
            Client(server.url, KEY).register_agent("host", f"me/pro/{SWEEP}")


def test_a_server_that_is_silent() -> None:
    with serving() as server:
        server.answer = 502
        with pytest.raises(ServerUnavailableError, match="it answers 502"):
            Client(server.url, KEY).send_heartbeat("agent1", [])
    with pytest.raises(ServerUnavailableError, match="refused"):
        Client(server.url, KEY).send_heartbeat("agent1", [])


def test_an_answer_of_ten_megabytes_is_not_read() -> None:
    with serving() as server:
        server.sweep.config = "method: random"
        server.sweep.trials = [{"kind": "x" * 10_000_000}]
        with pytest.raises(EchelonError, match="more than 4 MiB"):
            Client(server.url, KEY).send_heartbeat("agent1", [])


def test_the_key_is_not_shown() -> None:
    assert KEY not in repr(Client("http://localhost", KEY))


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[SweepFile, SweepPlan]:
    path = tmp_path / "s.yml"
    path.write_text(FILE)
    file = read_sweep_file(path)
    return file, plan_sweep(file, SIZE, None, tmp_path / "runs", None, LEASE_S, compose_config)


def made(ready: SweepPlan, file: Mapping[str, Any]) -> Path:
    """The folder of a sweep that is on the server already."""
    folder = ready.sweep.folder
    folder.mkdir(parents=True)
    known = {"metric": ready.settings.metric, "run_cap": ready.settings.run_cap, "program": False}
    (folder / "server.json").write_text(
        json.dumps({"sweep": f"me/pro/{SWEEP}", "file": dict(file), **known})
    )
    return folder


@needs_root
def test_the_sweep_that_a_strangers_folder_names_is_not_run(
    prepared: tuple[SweepFile, SweepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ready = prepared
    folder = made(ready, file.data)
    give_away(folder)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        with pytest.raises(EchelonError, match=f"{folder} belongs to {STRANGER}"):
            run_agents(file, ready, 1)


def test_no_server_makes_no_sweep(
    prepared: tuple[SweepFile, SweepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(EchelonError, match=r"does not answer: .*refused"):
        run_agents(*prepared, 1)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(EchelonError, match="WANDB_API_KEY does not have the form of a key") as no:
        run_agents(*prepared, 1)
    assert "--engine embedded" in str(no.value)


def test_a_folder_of_another_sweep(
    prepared: tuple[SweepFile, SweepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ready = prepared
    made(ready, dict(file.data) | {"method": "bayes"})
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(EchelonError, match="is another one: method"):
        run_agents(file, ready, 1)


def test_a_sweep_that_is_searched_here_is_none_of_the_server_s(
    prepared: tuple[SweepFile, SweepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ready = prepared
    ready.sweep.write_files(ready.settings, FILE)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(EchelonError, match="is searched without a server"):
        run_agents(file, ready, 1)


def test_one_at_a_time(
    prepared: tuple[SweepFile, SweepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would take up the trials of the first."""
    file, ready = prepared
    made(ready, file.data)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with (
        SweepLock(ready.sweep.lock_file),
        pytest.raises(EchelonError, match="s is at work already"),
    ):
        run_agents(file, ready, 1)


def test_what_our_agents_have_run_is_shown(
    prepared: tuple[SweepFile, SweepPlan],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, ready = prepared
    folder = made(ready, file.data)
    states = ("finished",) * 9 + ("stopped", "failed", "preempted")
    for number, state in enumerate(states):
        value, cause = (number / 10, "") if state != "failed" else (None, "it broke")
        given = {"lr": 0.01 * (number + 1)}
        trial_records.write_record(
            folder, WandbTrialRecord(f"t{number}", f"me/pro/{SWEEP}", given, state, cause, value)
        )
    words = ["sweep", "show", "s", "--dir", str(folder.parent)]
    assert run_command(words) == 0
    shown = capsys.readouterr().out
    head = "sweep s: 11 of 4 results (9 finished, 1 pruned, 1 failed, 1 waiting)"
    assert shown.startswith(f"{head}\nbest eval/loss 0 in trial t0\n")
    assert "trial t10 failed: it broke" in shown
    assert f"best run    echelon show {SWEEP}-t0\n" in shown
    (folder.with_name("a-run")).mkdir()
    (folder.with_name("a-run") / "wandb.json").touch()  # a run's own
    with pytest.raises(EchelonError, match=r"known: s$"):
        run_command(["sweep", "show", "a-run", "--dir", str(folder.parent)])
    picture = folder / "p.html"
    assert run_command([*words, "--plot", str(picture)]) == 0
    assert capsys.readouterr().out.endswith(f"picture     {picture}\n")
    assert run_command([*words, "--json", "--plot", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["importance"] == {"lr": 1.0}
    assert [trial["parameters"] for trial in told["trials"][:2]] == [{"lr": 0.01}, {"lr": 0.02}]
    assert "trial t0 finished" in picture.read_text()


def test_failures_in_a_row_end_it(
    prepared: tuple[SweepFile, SweepPlan],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first cause is told; nothing of what was refused has run."""
    file, ready = prepared
    made(ready, file.data)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        server.sweep.config = FILE
        server.sweep.trials = [{"launch.setup": ["true"]}, {"lr": {"_target_": "x"}}, {"": 1}]
        with pytest.raises(EchelonError, match=r"3 trials in a row .* trial0, .* launch\.setup"):
            run_agents(file, ready, 3)
    assert [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()] == ["failed"] * 3
    assert [path.name for path in ready.sweep.folder.parent.iterdir()] == [ready.sweep.name]


@pytest.mark.parametrize(
    ("code", "state", "is_queued"),
    [
        (ExitCode.OK, "finished", False),
        (ExitCode.FAILED, "failed", False),
        (ExitCode.PREEMPTED, "preempted", True),  # it has saved and has to go on
    ],
)
@pytest.mark.slow
def test_a_job_that_ended_while_nobody_followed_it_has_its_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: ExitCode,
    state: str,
    is_queued: bool,
) -> None:
    """The sweep was killed, and comes back after its trial's job: a second one is not queued."""
    (tmp_path / "s.yml").write_text(FILE)
    file, root = read_sweep_file(tmp_path / "s.yml"), tmp_path / "runs"
    words = (*SIZE, "launch=slurm")
    ready = plan_sweep(file, words, None, root, None, LEASE_S, compose_config)
    folder = made(ready, file.data)
    trial_records.write_record(folder, WandbTrialRecord("trial0", f"me/pro/{SWEEP}", {"lr": 0.25}))
    failure = {"rank": 0, "summary": "it broke"} if state == "failed" else None
    told = {"state": state, "launcher": "slurm", "job": "7", "failure": failure}
    run = make_run(root, f"{SWEEP}-trial0", lines(), status=told)
    run.exit_code_file.write_text(f"{int(code)}\n")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("PATH", str(tmp_path))  # where no Slurm is
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        server.sweep.config = FILE
        assert run_agents(file, ready, 1) == (ExitCode.FAILED if state == "failed" else ExitCode.OK)
    out, err = capsys.readouterr()
    assert out == f"trial0\t{state}\t1.1\tlr=0.25\n"
    assert ("trial trial0 failed: it broke\n" in err) == (state == "failed")
    log = trial_records.get_trial_log_file(folder, "trial0").read_text()
    assert ("there is no sbatch" in log) == is_queued, log


# --- our agents ---------------------------------------------------------------------------------

FILE = """
method: random
run_cap: 4
metric: {name: eval/loss, goal: minimize}
parameters: {lr: {min: 0.01, max: 0.5}}
"""


def sweeping(tmp_path: Path, parallel: int, *words: str) -> list[str]:
    (tmp_path / "s.yml").write_text(FILE)
    engine = ("--engine", "wandb", "--parallel", str(parallel))
    return [*ECHELON, "sweep", "s.yml", *SIZE, *words, *engine]


def rows(out: str) -> dict[str, list[str]]:
    return {line.split("\t")[0]: line.split("\t") for line in out.splitlines()}


@pytest.mark.slow
def test_our_agents_tell_how_every_trial_ended(tmp_path: Path) -> None:
    """One that finishes, one that the server stops, one that it must not set, one that fails."""
    with serving() as server:
        server.sweep.trials = [
            {"lr": 0.125},
            {"lr": 0.25, "trainer.epochs": 1_000_000},
            {"lr": "${oc.env:WANDB_API_KEY}"},
            {"lrr": 0.5},
        ]
        server.sweep.stop = {"trial1"}
        words = sweeping(tmp_path, 2, "launch=local", "launch.procs=2", "trainer.log_steps=1")
        done = run_forked(words, tmp_path, **at_home(tmp_path, server))
        assert server.sweep.agents == 2
        assert server.sweep.handed == [f"trial{n}" for n in range(4)]
        served = dict(server.runs)
    assert done.code == 1, done.err
    assert done.left == []
    ended = rows(done.out)
    assert [ended[f"trial{n}"][1] for n in range(4)] == ["finished", "stopped", "failed", "failed"]
    assert float(ended["trial0"][2]) > 0
    assert "an interpolation" in done.err
    assert "trial3 failed: lrr=0.5: there is no such setting" in done.err
    assert served["trial0"].about["sweep"] == SWEEP
    assert [end["exitcode"] for end in served["trial1"].ends] == [0]
    assert not served["trial1"].preempting
    stopped = Run(tmp_path / "runs" / f"{SWEEP}-trial1")
    assert read_run_status(stopped).state == "pruned", "the server ended it, and nobody here"
    assert "trial2" not in served
    assert not (tmp_path / "runs" / f"{SWEEP}-trial2").exists()
    nowhere(KEY, tmp_path)


@pytest.mark.slow
def test_a_sweep_that_was_broken_off_goes_on_with_its_runs(tmp_path: Path) -> None:
    """And a server that goes down under it costs no number."""
    run = Run(tmp_path / "runs" / f"{SWEEP}-trial0")
    with serving() as server:
        server.sweep.trials = [{"lr": 0.125, "trainer.epochs": 40}, {"lr": 0.25}]
        env = at_home(tmp_path, server)
        words = sweeping(tmp_path, 1, EXPERIMENT)
        with started_forked(words, tmp_path, ECHELON_TEST_PAUSE_S="0.1", **env) as first:
            command_runner.until(
                lambda: any(run.snapshots_folder.glob("step-*")), 300, "a snapshot"
            )
            first.process.terminate()
            broken_off = first.wait()
        assert broken_off.code == 75, broken_off.err
        assert server.runs["trial0"].preempting
        assert server.sweep.config
        server.sweep.config = ""

        server.then = 500  # after the first request, as there is a run already
        env |= {"WANDB_INIT_TIMEOUT": "2", "WANDB_FINISH_TIMEOUT": "2"}
        with started_forked(words, tmp_path, **env) as second:
            command_runner.until(lambda: "trial0\t" in second.read_output(), 300, "its end")
            second.process.terminate()
            again = second.wait()
    assert rows(again.out)["trial0"][1] == "finished", again.err
    assert run.read_status_file()["step"] == 80
    assert run.read_wandb_id() == "trial0"
    assert "no answer from its server" in again.err
    assert "wandb sync" in again.err
    assert again.code == 75
    assert broken_off.left == again.left == []
