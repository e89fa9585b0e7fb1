"""`echelon submit launch=local`: the commands of a file on this machine, one after the other."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from command_runner import ECHELON, EXAMPLES, TWO
from wandb_server import SWEEP, serving
from worlds import run_forked

from echelon.errors import ExitCode
from echelon.runs.find import list_runs
from echelon.runs.run_folder import Run
from echelon.runs.status import read_run_status

pytestmark = pytest.mark.slow

TELL = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("A"), os.environ.get("WORLD_SIZE")]))
sys.exit(9 * (sys.argv[1:] == ["fail"]))
"""


def test_commands_run_here_as_they_would_in_jobs(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    lines = [
        f"A='x y' {sys.executable} tell.py 'b c'",
        f"{sys.executable} tell.py fail",
        "# echelon: expand",
        f"{sys.executable} tell.py $ONE-$TWO",
        "torchrun --nproc_per_node=2 tell.py both",
    ]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    words = ("submit", "--configs", "all.txt", "launch=local", "--name", "a")
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "ONE": "1 *", "TWO": "2"}
    done = run_forked([*ECHELON, *words], tmp_path, **path)
    assert done.code == 9, done.err
    assert done.left == []
    work = [str(Run(tmp_path / "runs" / f"a-{number}").work_folder) for number in range(4)]
    told = [json.loads(_log(tmp_path, n).splitlines()[0]) for n in range(4)]
    assert told[0] == [["b c"], work[0], "x y", None]
    assert told[2] == [["1 *-2"], work[2], None, None]
    assert told[3] == [["both"], work[3], None, "2"]
    refused = run_forked([*ECHELON, "resume", "a-0"], tmp_path)
    assert refused.code == ExitCode.USAGE
    assert "submit the command again" in refused.err


WRITE = """
import pathlib, sys
pathlib.Path("checkpoints").mkdir(exist_ok=True)
pathlib.Path("checkpoints/a.pt").write_text(sys.argv[1])
"""


def test_what_a_command_wrote_stays_when_its_name_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "write.py").write_text(WRITE)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "README").touch()  # a folder that is part of the source
    command = [*ECHELON, "submit", "--configs", "c.txt", "launch=local", "--env", "none"]
    runs = tmp_path / "runs"
    for text, written in (("1", "ab"), ("2", "ab.2")):
        (tmp_path / "c.txt").write_text(f"{sys.executable} write.py {text}\n")
        done = run_forked([*command, "--name", "ab"], tmp_path)
        assert done.code == 0, done.err
        assert (runs / written / "work" / "checkpoints" / "a.pt").read_text() == text
    assert "the name ab is in use, so this is ab.2" in done.err
    assert (runs / "ab" / "work" / "checkpoints" / "a.pt").read_text() == "1"
    assert not (runs / "ab" / "source" / "checkpoints" / "a.pt").exists()
    listed = run_forked([*ECHELON, "jobs", "--json", "--all"], tmp_path)
    assert {s["run"]: s["state"] for s in json.loads(listed.out)} == {
        "ab": "finished",
        "ab.2": "finished",
    }


@pytest.mark.parametrize("world", [(), TWO], ids=["inline", "two processes"])
def test_a_training_of_a_command_is_the_run_of_that_command(
    tmp_path: Path, world: tuple[str, ...]
) -> None:
    """And its lines can be typed where the command was submitted."""
    for name in ("train.py", "toy.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    second = f"{sys.executable} train.py lr=0.2 trainer.epochs=1"
    (tmp_path / "both.sh").write_text(
        f"{sys.executable} train.py trainer.epochs=1 {' '.join(world)} && {second}\n"
    )
    (tmp_path / "c.txt").write_text("sh both.sh\n")
    command = [*ECHELON, "submit", "--configs", "c.txt", "launch=local", "--env", "none"]
    done = run_forked([*command, "launch.procs=1", "--name", "ab"], tmp_path)
    assert done.code == 0, done.out + done.err
    assert done.left == []
    run = Run(tmp_path / "runs" / "ab")
    config, facts = run.read_config(), run.read_status_file()
    assert (config.program, config.trainer.epochs) == ([], 1)
    assert run.read_launch_config().program == ["sh", "both.sh"]
    assert (facts["state"], facts["launcher"], facts["step"]) == ("finished", "local", 64)
    assert facts["best"] is not None
    log = run.get_rank_log_file(0).read_text()
    assert log.count("finished 64 steps") == 2, "each line of a training once"
    others = [r.name for r in list_runs(tmp_path / "runs") if r.name != "ab"]
    assert len(others) == 1, "the second training of the command"
    [look, _] = re.findall(r"echelon (show \S+)", log)
    shown = run_forked([*ECHELON, *look.split(), "--json"], tmp_path)
    assert json.loads(shown.out)["run"] == "ab", shown.err
    [go_on, _] = re.findall(r"echelon (resume \S+) trainer.epochs=", log)
    resumed = run_forked([*ECHELON, *go_on.split(), "trainer.epochs=2"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert run.read_status_file()["step"] == 128
    assert (run.work_folder / "train.py").exists()


BROKEN = """
import echelon

def experiment(cfg):
    raise ValueError("no data")

if __name__ == "__main__":
    echelon.main(experiment)
"""


def test_a_training_that_fails_says_why_in_the_run_of_its_command(tmp_path: Path) -> None:
    """Its exit code alone would say less."""
    (tmp_path / "main.py").write_text(BROKEN)
    (tmp_path / "c.txt").write_text("torchrun --nproc_per_node=2 main.py\n")
    command = [*ECHELON, "submit", "--configs", "c.txt", "launch=local", "--env", "none"]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = run_forked([*command, "--name", "ab"], tmp_path, PATH=path)
    assert done.code == ExitCode.FAILED, done.err
    assert done.left == []
    status = read_run_status(Run(tmp_path / "runs" / "ab"))
    assert status.state == "failed"
    assert "ValueError: no data" in status.note


TRIAL = """
import os, sys
words = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "WANDB_RUN_ID")]
print(*words, *sys.argv[1:], os.environ.get("A"), flush=True)
sys.exit(3 * ("--lr=0.1" in sys.argv and os.environ["RANK"] == "1"))
"""


def test_wandb_agents_run_trials_here_and_their_exit_codes_arrive(tmp_path: Path) -> None:
    """One trial fails, although an agent of wandb would exit with 0; the next two do not."""
    (tmp_path / "trial.py").write_text(TRIAL)
    (tmp_path / "wandb-cli").mkdir()  # the agent is ours: the program need not be installed
    program = tmp_path / "wandb-cli" / "wandb"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    lines = [
        f"wandb agent --count 1 me/pro/{SWEEP}",
        "# echelon: expand",
        f"A='x y' {program} agent --forward-signals -e me -p $PROJECT --count=2 {SWEEP}",
    ]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    options = ("launch=local", "launch.procs=2", "--env", "none", "--name", "a")
    with serving() as server:
        server.sweep.config = "program: trial.py\ncommand: [torchrun, '${program}', '${args}']\n"
        server.sweep.trials = [{"lr": 0.1}, {"lr": 0.2, "mode": "any"}, {"lr": 0.3}, {"lr": 0.4}]
        variables = {
            "PATH": f"{program.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": "a" * 40,
            "PROJECT": "pro",
        }
        command = [*ECHELON, "submit", "--configs", "all.txt", *options]
        done = run_forked(command, tmp_path, **variables)
        assert server.sweep.handed == ["trial0", "trial1", "trial2"]
        assert server.sweep.agents == 2
    assert done.code == 3, done.err
    assert done.left == []
    assert "trial trial0 failed: exit code 3" in done.err
    logs = [Run(tmp_path / "runs" / f"a-{number}").get_rank_log_file(1) for number in (0, 1)]
    assert logs[0].read_text().startswith("1 2 trial0 --lr=0.1 None\n")
    assert logs[1].read_text().endswith("1 2 trial2 --lr=0.3 x y\n")


def _log(folder: Path, number: int) -> str:
    return Run(folder / "runs" / f"a-{number}").get_rank_log_file(0).read_text()
