"""The batch script: what stands in it, what it does, and what may not get into it."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.cli import run_and_report_faults, run_command
from echelon.config.compose import compose
from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode
from echelon.launch.plan import LaunchPlan, LocalMachine, RankPlacement
from echelon.launch.slurm.joining_job import render_joining_script
from echelon.launch.slurm.launcher import SlurmLauncher
from echelon.runs import run_folder
from echelon.runs.create import assign_name
from echelon.runs.history import read_history

CANARY = "canary-5d1f0c"
HERE = LocalMachine({"WANDB_API_KEY": CANARY, "PATH": "/bin"}, "login", 0)


def planned(*words: str, program: Sequence[str] = ()) -> LaunchPlan:
    name = [] if any(word.startswith("run.name=") for word in words) else ["run.name=a"]
    config = compose(["launch=slurm", *name, *words], program=program)
    return SlurmLauncher().plan(assign_name(config), HERE)


def options(plan: LaunchPlan) -> list[str]:
    lines = plan.script.splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def faults(*words: str) -> str:
    with pytest.raises(EchelonError) as caught:
        planned(*words)
    return str(caught.value)


# --- what stands in it ---


def test_what_was_asked_for_is_asked_of_slurm() -> None:
    words = [
        "launch.nodes=2",
        "launch.gpus_per_node=4",
        "launch.cpus_per_node=16",
        "launch.partition=gpu",
        "launch.account=lab",
        "launch.time='4:00:00'",
        "launch.sbatch=['--mem=64G','--constraint=\"a100|h100\"']",
    ]
    asked = options(planned(*words))
    assert asked[0] == "--job-name=a"
    for option in (
        *("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=16"),
        *("--partition=gpu", "--account=lab", "--time=4:00:00", "--signal=USR2@120"),
        *("--requeue", "--open-mode=append", "--mem=64G", '--constraint="a100|h100"'),
    ):
        assert option in asked
    assert asked[-2:] == ["--mem=64G", '--constraint="a100|h100"']  # a person has the last word


@pytest.mark.parametrize(
    ("mode", "request_", "option"),
    [
        ("torchrun", "gpus-per-node", "--gpus-per-node=4"),
        ("torchrun", "gpus-per-task", "--gpus-per-task=4"),
        ("torchrun", "gres", "--gres=gpu:4"),
        ("srun", "gpus-per-node", "--gpus-per-node=4"),
        ("srun", "gpus-per-task", "--gpus-per-task=1"),
        ("plain", "gpus-per-task", "--gpus-per-task=4"),
    ],
)
def test_gpus_by_node_by_task_or_as_gres(mode: str, request_: str, option: str) -> None:
    words = ["launch.gpus_per_node=4", f"launch.gpu_request={request_}", f"mode={mode}"]
    plan = planned(*words, program=["true"])
    assert [o for o in options(plan) if o.startswith(("--gpu", "--gres"))] == [option]
    tasks = 4 if mode == "srun" else 1
    assert f"--ntasks-per-node={tasks}" in options(plan)
    assert f"srun --export=ALL --ntasks-per-node={tasks} " in plan.script


def test_tasks_of_srun_have_whole_replicas() -> None:
    words = ["launch.gpus_per_node=4", "launch.gpu_request=gpus-per-task", "replica.devices=2"]
    asked = options(planned(*words, "mode=srun", program=["true"]))
    assert "--ntasks-per-node=2" in asked
    assert "--gpus-per-task=2" in asked


def test_a_further_job_has_the_options_but_not_the_nodes_of_the_first(tmp_path: Path) -> None:
    given = "launch.sbatch=['--nodelist=n1,n2','-wn1,n2','--mem=64G']"
    config = assign_name(compose(["launch=slurm", "launch.nodes=2", "run.name=a", given]))
    script = render_joining_script(config, run_folder.Run(tmp_path / "a"), 1, 2)
    assert "#SBATCH --mem=64G\n" in script
    assert "#SBATCH --nodes=1\n" in script
    assert "n1" not in script


def test_set_up_lines_stand_before_the_training() -> None:
    lines = planned("launch.setup=['module load cuda','. venv/bin/activate']").script.splitlines()
    at = lines.index("# launch.setup") + 1
    assert lines[at + 1 : at + 3] == ["module load cuda", ". venv/bin/activate"]
    assert at < next(i for i, line in enumerate(lines) if line.startswith("srun "))


@pytest.mark.parametrize("preflight", [False, True])
def test_the_script_writes_the_history_of_a_program_without_an_agent(
    bench: Bench, tmp_path: Path, preflight: bool
) -> None:
    words = [f"run.dir={tmp_path}/runs", "mode=srun", "launch.nodes=2", "launch.procs=4"]
    plan = planned(*words, f"launch.preflight={preflight}".lower(), program=["true"])
    if preflight:
        plan = replace(
            plan, script=re.sub(r"\S+python\S* .*-m echelon preflight", "true", plan.script)
        )
    run = run_folder.Run(tmp_path / "runs" / "a")
    for code in (3, 0):
        assert bench.run(plan, code).returncode == code
    first, second = read_history(run, is_running=False).phases
    assert [first.cause, second.cause] == ["exit code 3", "exit code 0"]
    assert (first.launcher, first.nodes, first.processes, first.job) == ("slurm", 2, 8, "70007")
    assert first.started <= first.ended <= second.started <= second.ended  # type: ignore[operator]
    assert read_history(run, is_running=False).trained_s is not None


def test_a_set_up_line_that_fails_ends_the_job(bench: Bench, tmp_path: Path) -> None:
    """But not what fails within a function or a file of somebody else's."""
    (tmp_path / "profile").write_text("false\ntrue\n")
    fine = ["f() {", "false", "true", "}", "f", f". {tmp_path}/profile", "false || :"]
    for bad in (["false"], ["g() { return 3; }", "g"], ["no-such-program"]):
        for lines, works in ((fine, True), ([*fine, *bad], False)):
            config = compose(["launch=slurm", "run.name=a", f"run.dir={tmp_path}/runs"])
            config = replace(config, launch=replace(config.launch, setup=lines))
            done = bench.run(SlurmLauncher().plan(config, HERE), 0)
            assert (done.returncode == 0) is works, done.stderr
            code = (tmp_path / "runs" / "a" / "exit").read_text()
            assert code == f"{done.returncode}\n"
            assert works or "error: launch.setup fails with " in done.stderr


def test_a_plan_of_4096_nodes_says_where_each_rank_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = ("launch.nodes=4096", "launch.gpus_per_node=8", "trainer.batch_size=32768")
    plan = planned(*size)
    assert len(plan.places) == 32_768
    assert plan.places[-1] == RankPlacement(32_767, "node 4095", 7, ("cuda:7",))
    plan.print_plan(as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0–7", "node", "0", "0–7", "cuda:0", "…", "cuda:7"] in rows
    assert ["32760–32767", "node", "4095", "0–7", "cuda:0", "…", "cuda:7"] in rows
    assert len(rows) < 4096 + 100
    assert len(plan.script.splitlines()) < 80


def test_no_secret_gets_into_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for program in ([], ["python", "train.py"]):
        plan = planned("launch.nodes=2", program=program)
        for as_json in (False, True):
            plan.print_plan(as_json)
        assert CANARY not in capsys.readouterr().out


# --- what may not get in ---

HOSTILE = ("a b", "a\nb", "$(touch x)", "`touch x`", "a;b", 'a"b', "a'b", "a#b", "-x y", "")


def quoted(value: str) -> str:
    """As a word of Hydra's grammar."""
    return "'" + value.replace("'", "\\'") + "'"


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", ["run.name", "launch.partition", "launch.account", "launch.time"])
def test_what_would_not_stand_as_one_word_is_refused(key: str, value: str) -> None:
    assert f"{key}=" in faults(f"{key}={quoted(value)}")


def test_names_that_are_options_or_paths_are_refused() -> None:
    for name in ("-rf", "../x", ".hidden", "a/b", "ä", "x" * 101, "latest"):
        assert "run.name=" in faults(f"run.name={quoted(name)}")


def test_a_line_is_one_line() -> None:
    assert "is not an option of sbatch" in faults("launch.sbatch=['--mem=1\ntouch x']")
    assert "is not an option of sbatch" in faults("launch.sbatch=['touch x']")
    assert "is more than one line" in faults("launch.setup=['a\nb']")


@pytest.mark.parametrize(
    ("time", "lead_s", "ok"),
    [
        ("1", 120, False),
        ("3", 120, False),
        ("0:03:00", 120, False),
        ("3:01", 120, True),
        ("4", 120, True),
        ("2", 30, True),
        ("0-1", 3540, False),
        ("0-1", 3539, True),
        ("1-0:0:0", 120, True),
        ("UNLIMITED", 120, True),
    ],
)
def test_a_job_that_would_be_told_to_stop_as_it_starts_is_refused(
    time: str, lead_s: int, ok: bool
) -> None:
    words = (f"launch.time='{time}'", f"launch.signal_lead_s={lead_s}")
    if ok:
        assert f"--time={time}" in options(planned(*words))
    else:
        assert "the signal to save may come" in faults(*words)


# --- what it does ---

SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$CALLS/srun"
[ -n "$LEAVES" ] && echo "$WHAT" > "$FOLDER/$LEAVES"
exit $CODE
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo first; echo second; else echo "$@" >> "$CALLS/scontrol"; fi
exit $REFUSES
"""
ENDED_BY_SLURM = '[ "$1" = show ] || kill -TERM $$'


class Bench:
    """A place where the script finds a Slurm that only notes what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.calls = folder / "calls"
        self.calls.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            make_command(self.bin / name, text)

    def run(
        self,
        plan: LaunchPlan,
        code: int,
        leaves: str = "",
        what: str = "",
        refuses: int = 0,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        script = Path(plan.commands[0][-1])
        (script.parent / "logs").mkdir(parents=True, exist_ok=True)
        script.write_text(plan.script)
        env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "SLURM_JOB_ID": "70007",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "CALLS": str(self.calls),
            "FOLDER": str(script.parent),
            "CODE": str(code),
            "LEAVES": leaves,
            "WHAT": what,
            "REFUSES": str(refuses),
            **variables,
        }
        command = ["bash", str(script)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

    def asked(self, whom: str) -> list[str]:
        file = self.calls / whom
        return file.read_text().splitlines() if file.exists() else []


def make_command(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


AWKWARD = "my runs/it's $(touch x) `touch x` & more; {a,b} *"


@pytest.mark.parametrize("folder", ["plain", AWKWARD])
def test_agents_are_told_where_to_meet_in_any_folder(
    bench: Bench, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(["launch=slurm", "launch.nodes=2", "run.name=a"])
    plan = SlurmLauncher().plan(_in(config, folder), HERE)
    done = bench.run(plan, 0)
    assert (done.returncode, done.stderr) == (0, "")
    words = bench.asked("srun")
    run = tmp_path / folder / "a"
    assert words[-5:] == ["--nodes", "2", "--master", "first:20007", str(run)]
    assert (run / "exit").read_text() == "0\n"
    assert not (tmp_path / "x").exists()
    assert bench.asked("scontrol") == []


def _in(config: Config, folder: str) -> Config:
    return replace(config, run=replace(config.run, dir=folder))


@pytest.mark.parametrize("folder", ["100%j", 'a"b', "a\nb", "a\\b"])
def test_a_folder_that_slurm_would_misread_is_refused(folder: str) -> None:
    config = _in(compose(["launch=slurm", "run.name=a"]), folder)
    with pytest.raises(EchelonError, match="Slurm cannot write its logs"):
        SlurmLauncher().plan(config, HERE)


@pytest.mark.parametrize(
    ("code", "leaves", "what", "exit_", "requeued"),
    [
        (0, "", "", 0, False),
        (1, "", "", 1, False),
        (75, "", "", 0, True),
        (137, "requeue", "a node was lost", 0, True),
        (137, ".code", "5", 5, False),
        (137, ".code", "75", 0, True),
        (75, "cancelled", "", 75, False),
    ],
    ids=["done", "failed", "out of time", "node lost", "node 0 knows", "node 0 saved", "cancelled"],
)
def test_the_job_ends_as_the_training_did_or_queues_again(
    bench: Bench,
    tmp_path: Path,
    code: int,
    leaves: str,
    what: str,
    exit_: int,
    requeued: bool,
) -> None:
    plan = planned(f"run.dir={tmp_path}/runs")
    done = bench.run(plan, code, leaves, what)
    assert done.returncode == exit_
    assert bench.asked("scontrol") == (["requeue 70007"] if requeued else [])
    over = tmp_path / "runs" / "a" / "exit"
    assert over.exists() is not requeued
    if not requeued:
        assert over.read_text() == f"{exit_}\n"


def test_a_requeue_that_ends_the_one_who_asked_for_it_is_a_requeue(
    bench: Bench, tmp_path: Path
) -> None:
    """Slurm ends the processes of a job that it queues again, scontrol among them."""
    make_command(bench.bin / "scontrol", SCONTROL.replace("exit $REFUSES", ENDED_BY_SLURM))
    done = bench.run(planned(f"run.dir={tmp_path}/runs"), 75)
    assert done.returncode == 0
    assert bench.asked("scontrol") == ["requeue 70007"]
    assert not (tmp_path / "runs" / "a" / "exit").exists()


def test_the_last_task_of_an_array_queues_itself_and_not_all_of_them(
    bench: Bench, tmp_path: Path
) -> None:
    """It has the number of the whole array."""
    task: dict[str, Any] = {"SLURM_ARRAY_JOB_ID": "70007", "SLURM_ARRAY_TASK_ID": "3"}
    assert bench.run(planned(f"run.dir={tmp_path}/runs"), 75, **task).returncode == 0
    assert bench.asked("scontrol") == ["requeue 70007_3"]


def test_a_job_that_slurm_will_not_requeue_says_so_by_its_status(
    bench: Bench, tmp_path: Path
) -> None:
    assert bench.run(planned(f"run.dir={tmp_path}/runs"), 75, refuses=1).returncode == 75
    assert (tmp_path / "runs" / "a" / "exit").read_text() == "75\n"


@pytest.mark.parametrize("program", [[], ["true"]], ids=["training", "program"])
def test_a_second_job_of_the_script_leaves_the_folder_of_the_first_alone(
    bench: Bench, tmp_path: Path, program: list[str]
) -> None:
    plan = planned(f"run.dir={tmp_path}/runs", "mode=srun", program=program)
    run = run_folder.Run(tmp_path / "runs" / "a")
    run.folder.mkdir(parents=True)
    run.job_id_file.write_text("70006\n")
    run.agent_exit_file.write_text("0\n")
    make_command(bench.bin / "squeue", '#!/bin/bash\n[ "$3" = 70006 ] && echo 70006\n')
    done = bench.run(plan, 0)
    assert done.returncode == ExitCode.USAGE
    assert "is in use by job 70006, which is queued or running" in done.stderr
    assert bench.asked("srun") == []
    assert not run.exit_code_file.exists()
    assert run.agent_exit_file.exists()
    assert run.read_job_id() == "70006"

    # Once the first one is over, the second is the job of the run.
    make_command(bench.bin / "squeue", "#!/bin/bash\nexit 1\n")
    assert bench.run(plan, 0).returncode == 0
    assert run.exit_code_file.read_text() == "0\n"
    assert run.read_job_id() == "70007"


def test_words_of_a_program_arrive_as_they_were_typed(bench: Bench, tmp_path: Path) -> None:
    program = ["bash", "-c", 'echo "$RANK" $(date); exit 1', "a  b", "it's", "new\nline", "", "*"]
    flags = ("launch.nodes_flag=--num_nodes", "launch.gpus_flag=--gpus", "launch.procs=2")
    plan = planned(f"run.dir={tmp_path}/runs", "mode=lightning", *flags, program=program)
    make_command(bench.bin / "srun", '#!/bin/bash\nprintf "%s\\0" "$@" > "$CALLS/srun"\n')
    assert bench.run(plan, 0).returncode == 0
    words = (bench.calls / "srun").read_text().split("\0")[:-1]
    appended = ["--num_nodes", "1", "--gpus", "2"]
    assert words[-len(program) - 4 :] == [*program, *appended]


# --- what Slurm says to it ---

SBATCH = """#!/bin/bash
echo "$@" >> {calls}
[ "$1" = --test-only ] && {{ cat > /dev/null; {tested}; }}
{submitted}
"""


@pytest.mark.parametrize(
    ("tested", "submitted", "says"),
    [
        ("echo 'sbatch: error: Invalid account' >&2; exit 1", "", "Invalid account"),
        ("exit 0", "echo 'sbatch: error: Slurm is full' >&2; exit 1", "Slurm is full"),
    ],
    ids=["asked before", "refused all the same"],
)
def test_a_refusal_is_shown_in_slurms_words_with_ours(
    tested: str,
    submitted: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    text = SBATCH.format(calls=shlex.quote(str(calls)), tested=tested, submitted=submitted)
    make_command(tools / "sbatch", text)
    make_command(tools / "squeue", "#!/bin/bash\n")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    code = run_and_report_faults(
        lambda: run_command(["train", "launch=slurm", "run.name=a", "launch.account=x"])
    )
    told = capsys.readouterr().err
    assert code == ExitCode.USAGE
    assert told.startswith(f"error: Slurm does not take the job: error: {says}\n  hint: compare ")
    if submitted:  # what was prepared says that it was not
        assert (
            run_folder.Run(tmp_path / "runs" / "a").read_status_file()["state"] == "not submitted"
        )
    else:
        assert calls.read_text().split() == ["--test-only"]
        assert not (tmp_path / "runs").exists()


def test_without_slurm_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_and_report_faults(lambda: run_command(["train", "launch=slurm"])) == ExitCode.USAGE
    assert "there is no sbatch on this machine's PATH" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_program_is_told_of_the_end_in_its_own_way_and_queues_again_so_often() -> None:
    lightning = planned("mode=lightning", program=["python", "train.py"])
    assert "--signal=USR1@120" in options(lightning), "Lightning's own"
    tasks = planned("mode=srun", "launch.max_requeues=7", program=["python", "train.py"])
    assert "--signal=USR2@120" in options(tasks)
    assert '[ "$code" -eq 140 ]' in tasks.script, "ended by USR2"
    assert '[ "${SLURM_RESTART_COUNT:-0}" -lt 7 ]' in tasks.script


def test_a_process_gets_a_cpu_where_no_gpu_decides() -> None:
    assert "--cpus-per-task=3" in options(planned("launch.procs=3"))
    assert not [o for o in options(planned("launch.gpus_per_node=3")) if "cpus" in o]
