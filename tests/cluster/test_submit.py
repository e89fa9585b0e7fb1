"""`echelon submit` on a cluster: words that arrive, environments, the code as it was, sweeps."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ECHELON, REGRESSION, CommandLine
from command_runner import EXAMPLES, until
from wandb_server import SWEEP, serving
from wheels import wheel

import echelon
from echelon.errors import EchelonError, ExitCode
from echelon.runs.status import read_run_status
from echelon.submission.command_file import quote_words

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

DUMP = """
import json, os, sys
if sys.argv[1:] == ["fail"]:
    sys.exit(7)
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("SEED")]))
"""
TRIAL = """
import os, pathlib, socket, sys, time
rank, said = os.environ["RANK"], pathlib.Path("said-0")
print(rank, os.environ["WORLD_SIZE"], socket.gethostname(), *sys.argv[1:],
      os.environ["WANDB_RUN_ID"], flush=True)
if rank == "0":
    said.touch()
while not said.exists():  # who fails first ends the other
    time.sleep(0.1)
sys.exit(3 * (rank == "1"))
"""
NASTY = [
    *("--layers=64,64", "b=[1,2]", "{a: 1}", "*", "a\nb", "it's", '"', "$(touch hacked)", ";"),
    *("-x", "--", "x" * 300, "ä你", "", "\\", "`touch hacked`", "$HOME", "\r\n", "a\tb"),
]


@pytest.fixture
def offline(command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """Packages come from a folder of wheels, and environments are this test's own."""
    place = tmp_path_factory.mktemp("packages")
    wheel(place / "wheels", "tiny")
    command_line.variables |= {
        "ECHELON_CACHE": str(place / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(place / "wheels"),
        "PIP_EXTRA_INDEX_URL": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return command_line


def over(command_line: CommandLine, name: str, limit_s: float = 90.0) -> str:
    """How a run ended."""
    run = command_line.run(name)
    until(
        lambda: run.exit_code_file.exists() and run.exit_code_file.read_text(),
        limit_s,
        f"{name} over",
    )
    return read_run_status(run).state


def test_every_word_arrives_and_every_failure_is_one(command_line: CommandLine) -> None:
    (command_line.folder / "dump.py").write_text(DUMP)
    python = [sys.executable, "dump.py"]
    commands = [[*python, word] for word in NASTY] + [[*python, *NASTY], [*python, "fail"]]
    lines = [
        "# all kinds",
        *map(quote_words, commands),
        f"SEED='4 2' {quote_words([*python, 'seed'])}",
    ]
    (command_line.folder / "all.txt").write_text("\n".join(lines))
    words = ("--configs", "all.txt", "--name", "all", "--max-parallel", "8", "--wait")
    done = command_line.type("submit", *words)
    assert done.code == 7, done.err
    for number, sent in enumerate([*([word] for word in NASTY), NASTY]):
        run = command_line.run(f"all-{number}")
        wanted = [sent, str(run.work_folder), None]
        assert json.loads(run.get_rank_log_file(0).read_text()) == wanted
    failed, seeded = len(NASTY) + 1, len(NASTY) + 2
    run = command_line.run(f"all-{seeded}")
    wanted = [["seed"], str(run.work_folder), "4 2"]
    assert json.loads(run.get_rank_log_file(0).read_text()) == wanted
    shown = json.loads(command_line.type("jobs", "all", "--json").out)
    states = {s["run"]: (s["state"], s["exit"]) for s in shown}
    assert states.pop(f"all-{failed}") == ("failed", 7)
    assert set(states.values()) == {("finished", 0)}
    assert len(states) == len(NASTY) + 2
    array = command_line.run("all-0").read_job_id().partition("_")[0]
    command_line.cluster.wait_for_job(f"{array}_{failed}", "FAILED")
    assert f"==> all-{failed} <==" in command_line.type("logs", array).out
    assert not list(command_line.folder.rglob("hacked"))


def test_a_job_runs_what_was_submitted_whatever_is_edited_later(offline: CommandLine) -> None:
    """It is held in the queue while the source changes under it."""
    command_line = offline
    shutil.copytree(EXAMPLES / "submit", command_line.folder, dirs_exist_ok=True)
    main = command_line.folder / "main.py"
    main.write_text("import sys\nprint('as it was', sys.argv[1:])\n")
    more = ("--name", "a", "--env", "none", "launch.sbatch=['--hold']")
    started = command_line.program("bash", "job_submitter.sh", *more)
    assert started.process.wait(300) == ExitCode.OK, started.read_output()
    assert f"job {command_line.job()}: run a in" in started.read_output()
    main.write_text("raise SystemExit('edited')\n")
    again = command_line.type("submit", "--name", "a", "--env", "none")
    assert again.code == ExitCode.OK, again.err
    assert "the name a is in use, so this is a.2" in again.err
    assert over(command_line, "a.2") == "failed"
    command_line.cluster.slurm("scontrol", "release", command_line.job())
    assert over(command_line, "a") == "finished", command_line.run().job_log_file.read_text()
    assert (
        command_line.run().get_rank_log_file(0).read_text()
        == "as it was ['--train', '--batch_size', '6']\n"
    )
    assert "as it was" in command_line.type("logs", command_line.job()).out


def test_two_at_once_and_a_build_that_was_killed_give_one_environment(offline: CommandLine) -> None:
    command_line = offline
    (command_line.folder / "requirements.txt").write_text("tiny==1.0\n")
    (command_line.folder / "main.py").write_text("import tiny\nprint(tiny.version)\n")
    (command_line.folder / "one.txt").write_text("python main.py\n")
    killed = command_line.start("submit", "--configs", "one.txt", "--name", "k")
    cache = Path(command_line.variables["ECHELON_CACHE"])
    until(lambda: list(cache.glob("envs/*/bin")), 300, "a build half done")
    killed.end()
    assert not command_line.run("k").read_job_id()
    both = [command_line.start("submit", "--configs", "one.txt", "--name", n) for n in ("a", "b")]
    assert [each.process.wait(300) for each in both] == [0, 0], command_line.recent_output()
    assert [over(command_line, name) for name in ("a", "b")] == ["finished", "finished"]
    told = "".join(each.read_output() for each in both)
    assert told.count("building ") == 1, told
    assert (
        command_line.run("a").get_rank_log_file(0).read_text()
        == command_line.run("b").get_rank_log_file(0).read_text()
        == "1.0\n"
    )


def test_a_job_has_the_environment_it_was_submitted_with_or_none(offline: CommandLine) -> None:
    """Made in the job, from the copy; and in a .venv of the source that others rebuild."""
    command_line = offline
    lines = "--no-index\n--find-links ./wheels\ntiny\n"
    (command_line.folder / "requirements.txt").write_text(lines)
    wheel(command_line.folder / "wheels", "tiny", "3.0")
    (command_line.folder / "main.py").write_text("import tiny\nprint(tiny.version)\n")
    (command_line.folder / "one.txt").write_text("python main.py\n")
    submit = ("submit", "--configs", "one.txt", "--name")
    here: dict[str, Any] = {"ECHELON_CACHE": "cache", "PIP_FIND_LINKS": ""}
    done = command_line.type(*submit, "a", "--build", "job", "--wait", **here)
    assert done.code == ExitCode.OK, command_line.run("a").job_log_file.read_text()
    assert command_line.run("a").get_rank_log_file(0).read_text() == "3.0\n"
    in_source = ("--env", "source", "launch.sbatch=['--hold']")
    assert command_line.type(*submit, "b", *in_source, **here).code == ExitCode.OK
    (command_line.folder / "requirements.txt").write_text("tiny==1.0\n")
    assert command_line.type(*submit, "c", *in_source).code == ExitCode.OK
    command_line.cluster.slurm("scontrol", "release", command_line.job("b"), command_line.job("c"))
    assert [over(command_line, name) for name in ("b", "c")] == ["failed", "finished"]
    assert "is not what this was submitted with" in command_line.run("b").job_log_file.read_text()


def test_an_environment_that_cannot_be_made_in_the_job_fails_the_job(offline: CommandLine) -> None:
    command_line = offline
    (command_line.folder / "requirements.txt").write_text("tiny==9.9\n")
    (command_line.folder / "one.txt").write_text("python -c pass\n")
    words = ("--configs", "one.txt", "--build", "job", "--name", "a", "--wait")
    done = command_line.type("submit", *words)
    assert done.code != ExitCode.OK
    assert "tiny==9.9" in command_line.run().job_log_file.read_text()
    command_line.cluster.wait_for_job(command_line.job(), "FAILED")


def test_a_training_of_a_command_on_two_nodes_is_its_run(command_line: CommandLine) -> None:
    words = ("trainer.steps=5", "trainer.log_steps=1", "eval_samples=9", "trainer.batch_size=6")
    (command_line.folder / "one.txt").write_text(
        quote_words([*ECHELON, "train", REGRESSION, *words])
    )
    options = ("--configs", "one.txt", "--name", "a", "--env", "none", "launch.nodes=2", "--wait")
    done = command_line.type("submit", *options)
    assert done.code == ExitCode.OK, done.out + done.err
    facts = command_line.run().read_status_file()
    assert (facts["state"], facts["step"], facts["world"]) == ("finished", 5, 2)
    assert (facts["launcher"], facts["job"]) == ("slurm", command_line.job())
    assert command_line.step() == 5


def test_a_training_of_a_command_is_its_run_over_two_jobs(command_line: CommandLine) -> None:
    """It hears the end of its time, saves, and goes on in the same folders."""
    words = ("trainer.steps=30", "trainer.log_steps=1", "eval_samples=9", "trainer.batch_size=6")
    train = [*ECHELON, "train", REGRESSION, *words]
    (command_line.folder / "one.txt").write_text(quote_words(train))
    options = ("--configs", "one.txt", "--name", "a", "--env", "none", "--requeue")
    submitted = command_line.type("submit", *options, ECHELON_TEST_FAULT="0:20:hear")
    assert submitted.code == ExitCode.OK, submitted.err
    run, job = command_line.run(), command_line.job()
    command_line.wait_for_step(15)
    assert read_run_status(run).state == "running"
    assert run.read_job_id() == job
    command_line.cluster.slurm("scancel", "--signal=USR2", job)
    assert over(command_line, "a", 300.0) == "finished", run.get_rank_log_file(0).read_text()
    facts = run.read_status_file()
    assert (facts["launcher"], facts["step"], facts["total_steps"]) == ("slurm", 30, 30)
    assert facts["best"] is not None
    assert "resuming run a after step" in run.get_rank_log_file(0).read_text()
    shown = json.loads(command_line.type("show", "a", "--json").out)
    assert (shown["run"], shown["state"]) == ("a", "finished")


def test_a_function_as_a_job(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(command_line.folder)
    monkeypatch.setenv("SLURM_CONF", str(command_line.cluster.slurm_conf))
    (command_line.folder / "work.py").write_text(
        "def add(a, b):\n    if a > b:\n        raise ValueError('a > b')\n    return a + b\n"
    )
    good = echelon.submit("work.py:add", [1, 2], name="a", time="5:00")
    bad = echelon.submit("work.py:add", [2, 1], name="a")
    assert good.result(timeout_s=300) == 3
    with pytest.raises(EchelonError, match=r"run a\.2: ValueError: a > b"):
        bad.result(timeout_s=300)
    assert (good.state, bad.state) == ("finished", "failed")


def test_a_sweep_of_wandbs_on_two_nodes(command_line: CommandLine) -> None:
    """Its agent ends with 0 when a trial fails; the job does not."""
    pytest.importorskip("wandb")
    (command_line.folder / "trial.py").write_text(TRIAL)
    (command_line.folder / "sweep.txt").write_text(f"wandb agent --count 1 me/project/{SWEEP}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with serving(address=command_line.address) as server:
        server.sweep.config = "method: grid\nprogram: trial.py\nparameters: {}\n"
        server.sweep.trials = [{"lr": 0.1}]
        job = ("--configs", "sweep.txt", "--name", "a", "launch.nodes=2", "--wait")
        words = (*job, command_line.first_two_nodes)
        variables: dict[str, Any] = {
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": "a" * 40,
            "PATH": path,
        }
        done = command_line.type("submit", *words, **variables)
    assert done.code == 3, done.out + done.err
    assert done.left == []
    for rank, host in enumerate(command_line.cluster.nodes[:2]):
        line = command_line.run().get_rank_log_file(rank).read_text().splitlines()[0]
        assert line.startswith(f"{rank} 2 {host} --lr=0.1 trial")
    assert server.sweep.agents == 1
    assert "a" * 40 not in "".join(p.read_text() for p in command_line.run().folder.rglob("*.sh"))
