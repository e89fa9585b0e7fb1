"""`echelon submit` on a cluster: words that arrive, environments, the code as it was, sweeps."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Desk
from command_runner import EXAMPLES, until
from wandb_server import SWEEP, serving
from wheels import wheel

from echelon.errors import Exit
from echelon.jobs.status import read_run_status
from echelon.submit.command_file import quote_words

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
def offline(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Packages come from a folder of wheels, and environments are this test's own."""
    place = tmp_path_factory.mktemp("packages")
    wheel(place / "wheels", "tiny")
    desk.variables |= {
        "ECHELON_CACHE": str(place / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(place / "wheels"),
        "PIP_EXTRA_INDEX_URL": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return desk


def over(desk: Desk, name: str) -> str:
    """How a run ended."""
    run = desk.run(name)
    until(
        lambda: run.exit_code_file.exists() and run.exit_code_file.read_text(), 90.0, f"{name} over"
    )
    return read_run_status(run).state


def test_every_word_arrives_and_every_failure_is_one(desk: Desk) -> None:
    (desk.folder / "dump.py").write_text(DUMP)
    python = [sys.executable, "dump.py"]
    commands = [[*python, word] for word in NASTY] + [[*python, *NASTY], [*python, "fail"]]
    lines = [
        "# all kinds",
        *map(quote_words, commands),
        f"SEED='4 2' {quote_words([*python, 'seed'])}",
    ]
    (desk.folder / "all.txt").write_text("\n".join(lines))
    words = ("--configs", "all.txt", "--name", "all", "--max-parallel", "8", "--wait")
    done = desk.type("submit", *words)
    assert done.code == 7, done.err
    copy = str(desk.run("all").folder / "source")
    expected = [[[word], copy, None] for word in NASTY] + [[NASTY, copy, None]]
    for number, wanted in enumerate(expected):
        assert json.loads(desk.run(f"all-{number}").rank_log_file(0).read_text()) == wanted
    failed, seeded = len(NASTY) + 1, len(NASTY) + 2
    assert json.loads(desk.run(f"all-{seeded}").rank_log_file(0).read_text()) == [
        ["seed"],
        copy,
        "4 2",
    ]
    shown = json.loads(desk.type("jobs", "all", "--json").out)
    states = {s["run"]: (s["state"], s["exit"]) for s in shown}
    assert states.pop(f"all-{failed}") == ("failed", 7)
    assert set(states.values()) == {("finished", 0)}
    assert len(states) == len(NASTY) + 2
    array = desk.run("all-0").read_job_id().partition("_")[0]
    desk.cluster.wait_for_job(f"{array}_{failed}", "FAILED")
    assert f"==> all-{failed} <==" in desk.type("logs", array).out
    assert not list(desk.folder.rglob("hacked"))


def test_a_job_runs_what_was_submitted_whatever_is_edited_later(offline: Desk) -> None:
    """It is held in the queue while the source changes under it."""
    desk = offline
    shutil.copytree(EXAMPLES / "submit", desk.folder, dirs_exist_ok=True)
    main = desk.folder / "main.py"
    main.write_text("import sys\nprint('as it was', sys.argv[1:])\n")
    more = ("--name", "a", "--env", "none", "launch.sbatch=['--hold']")
    started = desk.program("bash", "job_submitter.sh", *more)
    assert started.process.wait(90) == Exit.OK, started.told()
    assert f"job {desk.job()}: run a in" in started.told()
    main.write_text("raise SystemExit('edited')\n")
    again = desk.type("submit", "--name", "a", "--env", "none")
    assert again.code == Exit.USAGE
    assert "a of that name is not over yet" in again.err
    desk.cluster.slurm("scontrol", "release", desk.job())
    assert over(desk, "a") == "finished", desk.run().job_log_file.read_text()
    assert desk.run().rank_log_file(0).read_text() == "as it was ['--train', '--batch_size', '6']\n"
    assert "as it was" in desk.type("logs", desk.job()).out


def test_two_at_once_and_a_build_that_was_killed_give_one_environment(offline: Desk) -> None:
    desk = offline
    (desk.folder / "requirements.txt").write_text("tiny==1.0\n")
    (desk.folder / "main.py").write_text("import tiny\nprint(tiny.version)\n")
    (desk.folder / "one.txt").write_text("python main.py\n")
    killed = desk.start("submit", "--configs", "one.txt", "--name", "k")
    cache = Path(desk.variables["ECHELON_CACHE"])
    until(lambda: list(cache.glob("envs/*/bin")), 60.0, "a build half done")
    killed.end()
    assert not desk.run("k").read_job_id()
    both = [desk.start("submit", "--configs", "one.txt", "--name", n) for n in ("a", "b")]
    assert [each.process.wait(120) for each in both] == [0, 0], desk.said()
    assert [over(desk, name) for name in ("a", "b")] == ["finished", "finished"]
    told = "".join(each.told() for each in both)
    assert told.count("building ") == 1, told
    assert (
        desk.run("a").rank_log_file(0).read_text()
        == desk.run("b").rank_log_file(0).read_text()
        == "1.0\n"
    )


def test_a_job_has_the_environment_it_was_submitted_with_or_none(offline: Desk) -> None:
    """Made in the job, from the copy; and in a .venv of the source that others rebuild."""
    desk = offline
    lines = "--no-index\n--find-links ./wheels\ntiny\n"
    (desk.folder / "requirements.txt").write_text(lines)
    wheel(desk.folder / "wheels", "tiny", "3.0")
    (desk.folder / "main.py").write_text("import tiny\nprint(tiny.version)\n")
    (desk.folder / "one.txt").write_text("python main.py\n")
    submit = ("submit", "--configs", "one.txt", "--name")
    here: dict[str, Any] = {"ECHELON_CACHE": "cache", "PIP_FIND_LINKS": ""}
    done = desk.type(*submit, "a", "--build", "job", "--wait", **here)
    assert done.code == Exit.OK, desk.run("a").job_log_file.read_text()
    assert desk.run("a").rank_log_file(0).read_text() == "3.0\n"
    in_source = ("--env", "source", "launch.sbatch=['--hold']")
    assert desk.type(*submit, "b", *in_source, **here).code == Exit.OK
    (desk.folder / "requirements.txt").write_text("tiny==1.0\n")
    assert desk.type(*submit, "c", *in_source).code == Exit.OK
    desk.cluster.slurm("scontrol", "release", desk.job("b"), desk.job("c"))
    assert [over(desk, name) for name in ("b", "c")] == ["failed", "finished"]
    assert "is not what this was submitted with" in desk.run("b").job_log_file.read_text()


def test_an_environment_that_cannot_be_made_in_the_job_fails_the_job(offline: Desk) -> None:
    desk = offline
    (desk.folder / "requirements.txt").write_text("tiny==9.9\n")
    (desk.folder / "one.txt").write_text("python -c pass\n")
    words = ("--configs", "one.txt", "--build", "job", "--name", "a", "--wait")
    done = desk.type("submit", *words)
    assert done.code != Exit.OK
    assert "tiny==9.9" in desk.run().job_log_file.read_text()
    desk.cluster.wait_for_job(desk.job(), "FAILED")


def test_a_sweep_of_wandbs_on_two_nodes(desk: Desk) -> None:
    """Its agent ends with 0 when a trial fails; the job does not."""
    pytest.importorskip("wandb")
    (desk.folder / "trial.py").write_text(TRIAL)
    (desk.folder / "sweep.txt").write_text(f"wandb agent --count 1 me/project/{SWEEP}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with serving(address=desk.address) as server:
        server.sweep.config = "method: grid\nprogram: trial.py\nparameters: {}\n"
        server.sweep.trials = [{"lr": 0.1}]
        words = ("--configs", "sweep.txt", "--name", "a", "launch.nodes=2", "--wait")
        variables: dict[str, Any] = {
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": "a" * 40,
            "PATH": path,
        }
        done = desk.type("submit", *words, **variables)
    assert done.code == 3, done.out + done.err
    assert done.left == []
    for rank, host in enumerate(desk.cluster.nodes[:2]):
        line = desk.run().rank_log_file(rank).read_text().splitlines()[0]
        assert line.startswith(f"{rank} 2 {host} --lr=0.1 trial")
    assert server.sweep.agents == 1
    assert "a" * 40 not in "".join(p.read_text() for p in desk.run().folder.rglob("*.sh"))
