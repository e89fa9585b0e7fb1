"""launch.login: a laptop without Slurm, a login node behind ssh, and what happens in between."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_runner import is_a_sentence_and_a_hint, until
from laptop import Laptop, open_laptop, start_login_sshd, write_ssh_config
from slurm_cluster import TestCluster
from sshd import HIDE
from wandb_server import SWEEP as SWEEP_ID
from wandb_server import serving
from wheels import wheel

from echelon.errors import ExitCode
from echelon.runs.origin import read_copy_state, read_origin

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

HOLD = "launch.sbatch=['--hold']"
"""The job stays in the queue, so that it costs nothing."""
EXPERIMENT = """
import dataclasses, pathlib, time
import torch
import echelon
from scale import SCALE

@dataclasses.dataclass
class Settings:
    seconds: float = 0.0

def experiment(cfg: Settings):
    print("data:", pathlib.Path("data/numbers.txt").read_text().strip())
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    def loss(output, target):
        time.sleep(cfg.seconds)
        return torch.nn.functional.mse_loss(output, target)
    data = (x, SCALE * x.sum(1, keepdim=True))
    return echelon.Experiment(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss,
        train_data=data, eval_data=data,
    )

if __name__ == "__main__":
    echelon.main(experiment)
"""


@pytest.fixture
def laptop(cluster: TestCluster, tmp_path: Path) -> Iterator[Laptop]:
    with open_laptop(cluster, tmp_path) as opened:
        yield opened


@pytest.fixture
def project(laptop: Laptop) -> Laptop:
    """Code on the laptop, data on the cluster."""
    (laptop.folder / "train.py").write_text(EXPERIMENT)
    (laptop.folder / "scale.py").write_text("SCALE = 1.0\n")
    data = laptop.remote / "data"
    data.mkdir(parents=True)
    (data / "numbers.txt").write_text("only on the cluster\n")
    return laptop


# --- one run from its submission to its snapshots -----------------------------------------------


def test_a_run_goes_there_and_comes_back(project: Laptop) -> None:
    laptop = project
    words = ("train", "experiment=train.py:experiment", *laptop.words, "trainer.epochs=3")
    plan = laptop.type(*words, "run.name=a", "--dry-run")
    assert plan.code == ExitCode.OK, plan.err
    assert "2 files of" in plan.out
    assert not laptop.remote.joinpath(".echelon").exists()
    done = laptop.type(*words, "run.name=a", "--wait")
    assert done.code == ExitCode.OK, done.output
    assert done.out.startswith("job ")
    assert "run a on login in" in done.out
    assert "data: only on the cluster" in done.out
    assert laptop.queue("a") == [], "it has ended there"
    copy = laptop.run("a")
    origin = read_origin(copy)
    assert origin is not None
    assert (origin.host, origin.folder) == ("login", str(laptop.remote / "runs" / "a"))
    there = Path(origin.folder)
    for name in ("metrics.jsonl", "history.jsonl", "status.json", "exit", "logs/node-0.log"):
        assert (copy.folder / name).read_bytes() == (there / name).read_bytes(), name
    assert not copy.has_snapshots()
    # It is over and copied whole: lists do not ask for it again, even if nobody answers.
    assert read_copy_state(copy).is_settled
    shown = json.loads(laptop.type("show", "latest", "--json").out)
    assert (shown["run"], shown["state"], shown["step"]) == ("a", "finished", 6)
    plotted = laptop.type("plot", "a", "-o", "../curves.html")
    assert plotted.code == ExitCode.OK, plotted.err
    pulled = laptop.type("pull", "a", "--best", "--json")
    assert pulled.code == ExitCode.OK, pulled.err
    [snapshot] = json.loads(pulled.out)["snapshots"]
    files = [path for path in Path(snapshot).rglob("*") if path.is_file()]
    assert files
    origin_snapshot = there / "snapshots" / Path(snapshot).name
    for file in files:
        assert file.read_bytes() == (origin_snapshot / file.relative_to(snapshot)).read_bytes()
    # Other code in one file: that file alone is sent, and the run goes on where it was.
    (laptop.folder / "scale.py").write_text("SCALE = 2.0\n")
    more = laptop.type("resume", "a", "trainer.epochs=4")
    assert "sent 1 of 2 files" in more.err, more.output
    assert laptop.wait_for_state("a", "finished") == "finished"
    assert json.loads(laptop.type("show", "a", "--json").out)["step"] == 8


def test_a_running_job_is_followed_and_cancelled(project: Laptop) -> None:
    """While its login node ends processes that are there for long, and the laptop changes networks;
    and it gives back a node."""
    laptop = project
    words = ("train", "experiment=train.py:experiment", *laptop.words, "run.name=b")
    nodes = ("launch.nodes=2", "launch.procs=1")
    done = laptop.type(*words, *nodes, "seconds=0.2", "trainer.epochs=1000")
    assert done.code == ExitCode.OK, done.output
    following = laptop.start("attach", "b")
    until(
        lambda: "evaluated after step 4" in following.read_output(), 300, "steps", laptop.describe
    )
    again = laptop.type("train", "experiment=train.py:experiment", *laptop.words, "run.name=b")
    assert again.code != ExitCode.OK
    assert is_a_sentence_and_a_hint(again.err), again.err
    stacks = laptop.type("stacks", "b")
    assert "2 ranks on" in stacks.out, stacks.output
    for number in range(2):
        until(laptop.kill_answering_processes, 60, "a process that answers", laptop.describe)
        until(
            lambda n=number: following.read_output().count("answers again") > n,  # type: ignore[misc]
            120,
            "it is started again",
            laptop.describe,
        )
    scaled = laptop.type("scale", "b", "nodes=1", "--json")
    assert scaled.code == ExitCode.OK, scaled.output
    assert json.loads(scaled.out)["nodes"] == 1
    # The laptop changes networks: the job goes on, and so does the command.
    laptop.cluster.link(laptop.host, "down")
    until(
        lambda: following.read_output().count("trying again") > 2, 120, "a warning", laptop.describe
    )
    shown = laptop.type("jobs")
    assert "as of" in shown.out, shown.output
    assert "warning: what is shown of b" in shown.err
    laptop.cluster.link(laptop.host, "up")
    until(
        lambda: following.read_output().count("answers again") > 2,
        120,
        "it is back",
        laptop.describe,
    )
    cancelled = laptop.type("cancel", "b")
    assert "was asked to save and end" in cancelled.out, cancelled.output
    ended = following.wait(300)
    assert ended.code == ExitCode.PREEMPTED, ended.output
    assert "everything is saved" in ended.out
    assert laptop.wait_for_state("b", "cancelled") == "cancelled"


def test_runs_of_a_grid_are_one_array_and_programs_run_too(project: Laptop) -> None:
    laptop = project
    words = ("train", "-m", "experiment=train.py:experiment", *laptop.words, "run.name=grid")
    done = laptop.type(*words, "seed=1,2", "trainer.epochs=1", "--wait")
    assert done.code == ExitCode.OK, done.output
    assert "2 runs on login, grid-0 … grid-1" in done.out
    jobs = {laptop.run(f"grid-{n}").read_job_id() for n in (0, 1)}
    [array] = {job.partition("_")[0] for job in jobs}
    assert jobs == {f"{array}_0", f"{array}_1"}
    together = json.loads(laptop.type("jobs", "grid", "--json").out)
    assert {job["run"]: job["state"] for job in together} == dict.fromkeys(
        ("grid-0", "grid-1"), "finished"
    )
    program = ("run", *laptop.words, "run.name=p", "--wait")
    secrets = laptop.folder / "secrets.env"
    secrets.write_text("CANARY=tell-nobody\n")
    secrets.chmod(0o600)
    code = "import os, scale; print('scale', scale.SCALE, len(os.environ['CANARY']))"
    program = (*program, f"launch.secrets={secrets}", "--", "python", "-c", code)
    ran = laptop.type(*program)
    assert ran.code == ExitCode.OK, ran.output
    assert "scale 1.0 11" in ran.out
    sources = laptop.remote / ".echelon" / "sources"
    assert not list(sources.glob("*/secrets.env"))
    texts = [path for path in (laptop.remote / "runs").rglob("*") if path.is_file()]
    assert not [path for path in texts if b"tell-nobody" in path.read_bytes()]
    # Without launch.python: the environment that the folder asks for is built there, once.
    wheel(laptop.folder / "wheels", "tiny")
    (laptop.folder / "requirements.txt").write_text("--no-index\n--find-links ./wheels\ntiny\n")
    settings = [word for word in laptop.words if not word.startswith("launch.python")]
    program = ("run", "mode=plain", *settings, "--wait")
    code = "import sys, tiny; print('tiny', tiny.version, sys.prefix)"
    for name, is_built in (("e", True), ("e2", False)):
        ran = laptop.type(*program, f"run.name={name}", "--", "python", "-c", code)
        assert ran.code == ExitCode.OK, ran.output
        assert "tiny 1.0" in ran.out, ran.output
        assert ("login: building" in ran.err) == is_built
    assert str(laptop.remote.parent / ".cache" / "echelon" / "envs") in ran.out
    removed = laptop.type("rm", "--yes", "p")
    assert removed.code == ExitCode.OK, removed.output
    assert not (laptop.remote / "runs" / "p").exists()
    assert not laptop.run("p").folder.exists()


def test_commands_of_a_file_work_in_copies_of_their_own(project: Laptop) -> None:
    laptop = project
    (laptop.folder / "work.py").write_text(
        "import pathlib, sys\n"
        "pathlib.Path('result.txt').write_text(sys.argv[1])\n"
        "pathlib.Path('scale.py').write_text('changed')\n"
        "print('data', pathlib.Path('data/numbers.txt').read_text().strip(), sys.argv[1])\n"
    )
    (laptop.folder / "commands.txt").write_text("python work.py one\npython work.py two\n")
    words = ("submit", "--configs", "commands.txt", "--name", "w", *laptop.words)
    plan = laptop.type(*words, "--dry-run")
    assert plan.code == ExitCode.OK, plan.err
    assert "submit 2 runs once" in plan.out
    done = laptop.type(*words, "--wait")
    assert done.code == ExitCode.OK, done.output
    for number, word in enumerate(("one", "two")):
        there = laptop.remote / "runs" / f"w-{number}"
        assert (there / "work" / "result.txt").read_text() == word
        assert f"data only on the cluster {word}" in laptop.type("logs", f"w-{number}").out
    [tree] = (laptop.remote / ".echelon" / "sources").iterdir()
    assert (tree / "scale.py").read_text() == "SCALE = 1.0\n"
    again = laptop.type("resume", "w-0")
    assert "is a submitted command on login" in again.err
    refused = laptop.type(*words, "--link", "data")
    assert refused.code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(refused.err), refused.err


SWEEP = """\
method: grid
metric: {name: loss, goal: minimize}
parameters:
  seed: {values: [1, 2]}
  trainer.epochs: {value: 1}
"""


def test_a_sweep_searches_there_and_its_trials_come_back(project: Laptop) -> None:
    laptop = project
    pytest.importorskip("optuna")
    (laptop.folder / "s.yml").write_text(SWEEP)
    # A file of defaults goes with the code: workers must not log in anywhere.
    lines = [f"  {word.partition('.')[2].replace('=', ': ', 1)}\n" for word in laptop.words[1:5]]
    (laptop.folder / "echelon.yaml").write_text(f"launch:\n{''.join(lines)}")
    where = ("launch=slurm", laptop.words[-1], "experiment=train.py:experiment")
    plan = laptop.type("sweep", "s.yml", *where, "--dry-run")
    assert plan.code == ExitCode.OK, plan.err
    assert f"{laptop.remote}/runs/s" in plan.out
    assert not laptop.remote.joinpath(".echelon").exists()
    done = laptop.type("sweep", "s.yml", *where, "--parallel", "2", "--wait", "--json")
    assert done.code == ExitCode.OK, done.output
    told = json.loads(done.out[done.out.index("{") :])
    assert [trial["state"] for trial in told["trials"]] == ["finished", "finished"], done.output
    for number in (0, 1):
        copy, there = laptop.run(f"s-{number}"), laptop.remote / "runs" / f"s-{number}"
        for name in ("metrics.jsonl", "status.json"):
            assert (copy.folder / name).read_bytes() == (there / name).read_bytes()
        assert read_copy_state(copy).is_settled
    resumed = laptop.type("resume", "s-0")
    assert "is a trial of the sweep s on login" in resumed.err
    # Killed once the workers are queued: the same command takes them over.
    held = ("sweep", "s.yml", "--name", "held", *where, HOLD)
    running = laptop.start(*held)
    until(lambda: laptop.queue("held"), 120, "workers", laptop.describe)
    laptop.kill(running)
    again = laptop.type(*held)
    assert len(laptop.queue("held")) == 1, again.output
    shown = json.loads(laptop.type("sweep", "show", "held", "--json").out)
    assert (shown["results"], shown["run_cap"]) == (0, 2)
    refused = laptop.type("sweep", "s.yml", "--name", "held", *where, "trainer.batch_size=16")
    assert "is another one" in refused.err
    assert is_a_sentence_and_a_hint(refused.err), refused.err
    cancelled = laptop.type("cancel", "held")
    assert "were told to save and end" in cancelled.out, cancelled.output
    until(lambda: not laptop.queue("held"), 120, "an empty queue", laptop.describe)


def test_python_and_preflight_ask_by_the_login_node(project: Laptop) -> None:
    laptop = project
    checked = laptop.type("preflight", *laptop.words, "launch.nodes=2", "--json")
    found = json.loads(checked.out)
    assert len({node["host"] for node in found["nodes"]}) == 2, checked.output
    assert {check["check"] for check in found["checks"]} >= {"start", "tcp"}
    refused = laptop.type("preflight", *laptop.words, "launch.partition=nowhere")
    assert refused.code != ExitCode.OK
    assert "on login: Slurm does not take the job" in refused.err, refused.output
    assert is_a_sentence_and_a_hint(refused.err), refused.err
    (laptop.folder / "work.py").write_text(
        "from scale import SCALE\n\ndef scaled(x, by):\n    return {'value': SCALE * x * by}\n"
    )
    settings = dict(word.removeprefix("launch.").split("=", 1) for word in laptop.words[1:5])
    exclude = [laptop.words[-1].split("'")[1]]
    ran = laptop.run_program(
        sys.executable,
        "-c",
        "import echelon\n"
        f"launch = {settings!r}\n"
        "job = echelon.submit('work.py:scaled', args=[3], kwargs={'by': 2}, "
        f"sbatch={exclude!r}, **launch)\n"
        "print(job.result(), job.state)\n",
    )
    assert ran.code == ExitCode.OK, ran.output
    assert ran.out.splitlines()[-1] == "{'value': 6.0} finished"


def test_an_agent_of_wandb_goes_there(laptop: Laptop) -> None:
    pytest.importorskip("wandb")
    (laptop.folder / "trial.py").write_text("import sys\nprint('trial', *sys.argv[1:])\n")
    (laptop.folder / "agent.txt").write_text(f"wandb agent --count 1 me/project/{SWEEP_ID}\n")
    address = laptop.cluster.addresses[laptop.cluster.nodes[0]].rpartition(".")[0] + ".1"
    with serving(address=address) as server:
        secrets = laptop.folder / "secrets.env"
        secrets.write_text(f"WANDB_API_KEY={'a' * 40}\nWANDB_BASE_URL={server.url}\n")
        secrets.chmod(0o600)
        server.sweep.config = "method: grid\nprogram: trial.py\nparameters: {}\n"
        server.sweep.trials = [{"lr": 0.1}]
        words = ("submit", "--configs", "agent.txt", "--name", "agent", *laptop.words)
        done = laptop.type(*words, f"launch.secrets={secrets}", "--wait")
    assert done.code == ExitCode.OK, done.output
    assert server.sweep.handed == ["trial0"]
    assert "trial --lr=0.1" in laptop.type("logs", "agent").out


# --- nothing half, nothing twice ----------------------------------------------------------------


def test_a_laptop_that_is_killed_submits_once(laptop: Laptop) -> None:
    """Killed after ever longer times, from before the connection to after the answer; the same
    command typed again ends with one job and one run."""
    words = ("train", *laptop.words[:-1], HOLD)
    began = time.monotonic()
    assert laptop.type(*words, "run.name=first").code == ExitCode.OK
    whole_s = time.monotonic() - began
    for number in range(5):
        name = f"k{number}"
        running = laptop.start(*words, f"run.name={name}")
        time.sleep(whole_s * (0.35 + 0.15 * number))  # when to kill it, not what to wait for
        laptop.kill(running)
        done = laptop.type(*words, f"run.name={name}")
        # Where the killed command had come to its end, the run is queued already: a refusal.
        assert len(laptop.queue(name)) == 1, done.output
        assert laptop.run(name).read_job_id() == laptop.queue(name)[0]
        assert next(job for job in laptop.jobs() if job["run"] == name)["state"] == "queued"
    assert not (laptop.folder / "runs" / ".login").exists()


def test_a_submission_whose_laptop_never_came_back_is_found_by_a_list(laptop: Laptop) -> None:
    words = ("train", *laptop.words[:-1], HOLD, "run.name=lost")
    running = laptop.start(*words)
    until(lambda: laptop.queue("lost"), 120, "a job", laptop.describe)
    laptop.kill(running)
    assert [job["run"] for job in laptop.jobs()] == ["lost"]
    assert len(laptop.queue("lost")) == 1


def test_two_laptops_at_once_share_the_folder_there(laptop: Laptop) -> None:
    """And one of them has a run that the other one resumes by its name."""
    other = replace(laptop, folder=laptop.folder.with_name("other"), started=[])
    other.folder.mkdir()
    words = ("train", *laptop.words[:-1], HOLD)
    commands = [each.start(*words, f"run.name={n}") for n, each in enumerate((laptop, other))]
    commands += [each.start(*words, "run.name=same") for each in (laptop, other)]
    ended = [command.wait() for command in commands]
    assert [done.code for done in ended[:2]] == [0, 0], ended
    # Of two starts of one run, one is refused; both laptops may have it afterwards.
    assert sorted(done.code == ExitCode.OK for done in ended[2:]) == [False, True], ended
    assert [len(laptop.queue(name)) for name in ("0", "1", "same")] == [1, 1, 1]
    assert {job["run"] for job in laptop.jobs()} <= {"0", "same"}
    assert {job["run"] for job in other.jobs()} <= {"1", "same"}


# --- what may be wrong --------------------------------------------------------------------------


def test_what_is_wrong_there_is_a_sentence(laptop: Laptop, tmp_path: Path) -> None:
    cluster = laptop.cluster
    base = ("train", "run.name=w", *laptop.words[:2])

    def refused(config: Path, *words: str) -> str:
        done = laptop.type(*base, f"launch.ssh=ssh -F {config}", *words)
        assert done.code != ExitCode.OK, done.output
        assert is_a_sentence_and_a_hint(done.err), done.err
        assert not laptop.run("w").folder.exists()
        assert laptop.queue("w") == []
        return done.err

    other = tmp_path / "other_config"
    write_ssh_config(cluster, other, more="    UserKnownHostsFile /dev/null\n")
    assert "ssh has never seen login" in refused(other)
    write_ssh_config(
        cluster, other, more="    IdentityFile /dev/null\n    PreferredAuthentications publickey\n"
    )
    text = other.read_text().replace(str(cluster.kind.folder / "ssh" / "client"), "/dev/null")
    other.write_text(text)
    assert "does not let you in" in refused(other)
    write_ssh_config(cluster, other, port=2299)
    assert "cannot be reached" in refused(other)
    there = f"launch.remote_dir={tmp_path / 'there' / 'x'}"
    python = f"launch.python={laptop.words[4].partition('=')[2]}"
    assert "partition" in refused(laptop.ssh_config, there, python, "launch.partition=nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with start_login_sshd(cluster, tmp_path / "there", 2223, variables=f"PATH={empty}"):
        write_ssh_config(cluster, other, port=2223)
        assert "login" in refused(other, there)
    assert "lacks torch" in refused(laptop.ssh_config, there, "launch.python=/usr/bin/python3")
    full = tmp_path / "full"
    full.mkdir()
    small = HIDE.replace("mount -t tmpfs", "mount -t tmpfs -o size=64k")
    with start_login_sshd(cluster, full, 2224, prepare=small):
        write_ssh_config(cluster, other, port=2224)
        assert "No space left on device" in refused(other, f"launch.remote_dir={full}/x", python)
    (laptop.folder / "run.py").write_text("print(1)\n")
    (laptop.folder / "blob.bin").write_bytes(os.urandom(40 << 20))
    larger = HIDE.replace("mount -t tmpfs", "mount -t tmpfs -o size=30m")
    with start_login_sshd(cluster, full, 2225, prepare=larger):
        write_ssh_config(cluster, other, port=2225)
        program = ("run", "run.name=w", *laptop.words[:2], f"launch.ssh=ssh -F {other}")
        there = f"launch.remote_dir={full}/x"
        done = laptop.type(*program, there, python, "--", "python", "run.py")
        assert "on login: sending the source: a file could not be written" in done.err, done.output
        assert "No space left on device" in done.err
        assert is_a_sentence_and_a_hint(done.err), done.err
        assert not laptop.run("w").folder.exists()
