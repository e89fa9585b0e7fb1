"""What clusters of many kinds answer, as data: their facts, the table, the file of defaults."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from echelon.cli import run_and_report_faults, run_command
from echelon.cluster_info.cluster_facts import (
    ClusterFacts,
    format_time_limit,
    parse_time_limit,
    read_facts,
)
from echelon.cluster_info.defaults_draft import collect_values, draft_settings, render_draft
from echelon.cluster_info.free_table import JobEstimate, describe_free, render_free
from echelon.cluster_info.login_probe import (
    LoginNode,
    Section,
    build_probe,
    make_login_node,
    parse_sections,
)
from echelon.cluster_info.start_estimate import (
    MAX_CHANGES,
    StartEstimate,
    list_changes,
    read_estimate,
    render_test_job,
)
from echelon.config.compose import compose
from echelon.config.defaults_files import load_defaults
from echelon.errors import EchelonError, ExitCode
from echelon.launch.slurm.version import SlurmVersion

NODES = """\
NodeName=g1 CPUAlloc=8 CPUTot=64 Gres=gpu:a100:4(S:0-1) GresUsed=gpu:a100:3(IDX:0-2) \
RealMemory=512000 AllocMem=12000 State=MIXED Partitions=gpu,all
NodeName=g2 CPUAlloc=64 CPUTot=64 Gres=gpu:a100:4(S:0-1) GresUsed=gpu:a100:2(IDX:0-1) \
RealMemory=512000 AllocMem=256000 State=ALLOCATED Partitions=gpu,all
NodeName=g3 CPUAlloc=0 CPUTot=64 Gres=gpu:1g.5gb:7,gpu:v100:2(S:0,1),shard:8 \
GresUsed=gpu:1g.5gb:1(IDX:0),gpu:v100:0(IDX:N/A) RealMemory=256000 AllocMem=0 State=IDLE+PLANNED \
Partitions=gpu,all
NodeName=g4 CPUAlloc=0 CPUTot=64 Gres=gpu:a100:4 GresUsed=gpu:a100:0 RealMemory=512000 AllocMem=0 \
State=IDLE+DRAIN Partitions=gpu
NodeName=c1 CPUAlloc=0 CPUTot=32 Gres=(null) GresUsed=gpu:0 RealMemory=64000 AllocMem=0 \
State=IDLE* Partitions=cpu,all
NodeName=c2 CPUAlloc=0 CPUTot=32 Gres=(null) GresUsed=gpu:0 RealMemory=64000 AllocMem=0 \
State=IDLE Partitions=cpu,all
"""
TWO_KINDS = """\
NodeName=g1 CPUAlloc=8 CPUTot=64 Gres=gpu:a100:4 GresUsed=gpu:a100:4 State=MIXED Partitions=gpu
NodeName=g2 CPUAlloc=0 CPUTot=64 Gres=gpu:h100:4 GresUsed=gpu:h100:0 State=IDLE Partitions=all
"""
PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES DefaultTime=01:00:00 \
MaxNodes=UNLIMITED MaxTime=2-00:00:00 Nodes=c[1-2] RootOnly=NO State=UP
PartitionName=gpu AllowGroups=ALL AllowAccounts=lab,other AllowQos=ALL Default=NO DefaultTime=NONE \
MaxNodes=4 MaxTime=1-00:00:00 Nodes=g[1-4] RootOnly=NO State=UP
PartitionName=all AllowGroups=staff AllowAccounts=ALL AllowQos=ALL Default=NO DefaultTime=NONE \
MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=g[1-3],c[1-2] RootOnly=NO State=UP
PartitionName=old AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO DefaultTime=NONE \
MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=(null) RootOnly=NO State=DRAIN
"""
NO_ACCOUNTING = "You are not running a supported accounting_storage plugin"
SECTIONS = {
    "time": Section("2026-11-19T20:00:00", 0),
    "user": Section("ada", 0),
    "groups": Section("users students", 0),
    "hostname": Section("login1", 0),
    "sbatch": Section("/usr/bin/sbatch", 0),
    "version": Section("slurm 23.02.7", 0),
    "config": Section("ClusterName             = turing\nSelectType  = select/cons_tres", 0),
    "nodes": Section(NODES, 0),
    "partitions": Section(PARTITIONS, 0),
    "waiting": Section("   12 gpu|Priority\n    3 gpu,all|Resources\n   40 gpu|Dependency", 0),
    "accounts": Section("lab||normal,long|normal|20|12:00:00\nthesis||normal|||", 0),
    "user_defaults": Section("ada|lab", 0),
    "qos": Section("normal|0|||\nlong|10|7-00:00:00|gres/gpu=8|4", 0),
    "licenses": Section("LicenseName=matlab Total=10 Used=2 Free=8 Remote=no", 0),
    "reservations": Section("No reservations in the system", 0),
    "modules": Section("cuda/12.4\npython/3.12.1", 0),
    "pythons": Section("/usr/bin/python3|Python 3.6.8\n/x/python3.12|pyenv: not found", 0),
    "containers": Section("apptainer|apptainer version 1.3.2-1.el9\npyxis|", 0),
    "folders": Section(
        "/home/ada|yes|nas:/home nfs4 1000 400 600 40% /home\n"
        "/scratch|no|x@tcp:/lfs lustre 9000 1 8999 1% /scratch\n"
        "/scratch/ada|yes|x@tcp:/lfs lustre 9000000 1 8999999 1% /scratch",
        0,
    ),
}
HERE = LoginNode("login")


def facts_of(**changed: Section) -> ClusterFacts:
    return read_facts(HERE, {**SECTIONS, **changed})


# --- facts ---


def test_nodes_are_counted_as_jobs_see_them() -> None:
    cpu, gpu, everything, old = facts_of().partitions
    assert {c: gpu.count(c) for c in ("idle", "mixed", "full", "down")} == {
        **{"idle": 1, "mixed": 1, "full": 1, "down": 1}
    }
    assert (cpu.count("idle"), cpu.count("down")) == (1, 1), "IDLE* does not respond"
    # g2 has no CPU left for its two GPUs, and g4 is drained.
    assert gpu.sum_gpus() == {"1g.5gb": (6, 7), "a100": (1, 8), "v100": (2, 2)}
    assert sum(node.cpus_free for node in gpu.nodes) == 56 + 64
    assert sum(node.memory_free_mb for node in gpu.nodes) == 500_000 + 256_000
    assert (gpu.waiting, everything.waiting, cpu.waiting) == (15, 3, 0)
    assert (cpu.is_default, gpu.max_time_s, cpu.max_time_s) == (True, 86_400, 172_800)
    assert not old.nodes


def test_what_a_user_cannot_use_has_its_reason() -> None:
    found = {p.name: p.obstacle for p in facts_of().partitions}
    assert found == {"cpu": "", "gpu": "", "all": "for groups staff", "old": "it is DRAIN"}
    thesis = facts_of(accounts=Section("thesis||normal||||", 0))
    assert thesis.partitions[1].obstacle == "for accounts lab,other"


def test_a_cluster_without_gpu_types_and_without_accounting() -> None:
    nodes = "NodeName=n1 CPUAlloc=0 CPUTot=4 Gres=gpu:2 GresUsed=gpu:1 State=MIXED Partitions=gpu"
    facts = facts_of(nodes=Section(nodes, 0), accounts=Section(NO_ACCOUNTING, 1))
    assert facts.partitions[1].sum_gpus() == {"": (1, 2)}
    assert not facts.has_accounting
    assert not facts.accounting_error
    down = facts_of(accounts=Section("sacctmgr: error: slurmdbd: Connection refused", 1))
    assert down.accounting_error == "sacctmgr: error: slurmdbd: Connection refused"


@pytest.mark.parametrize(
    ("changed", "said", "code"),
    [
        (
            {"nodes": Section("sh: scontrol: not found", 127), "sbatch": Section("", 127)},
            "there is no Slurm on login",
            ExitCode.NOT_FOUND,
        ),
        (
            {"nodes": Section("slurm_load_node: Unable to contact slurm controller", 1)},
            "Slurm's controller does not answer login: slurm_load_node: Unable to contact",
            ExitCode.NOT_FOUND,
        ),
        (
            {"partitions": Section("", 124)},
            "does not answer login: not within 30 s\n",
            ExitCode.NOT_FOUND,
        ),
    ],
)
def test_no_slurm_and_a_silent_one_are_told_apart(
    changed: Mapping[str, Section], said: str, code: ExitCode
) -> None:
    with pytest.raises(EchelonError) as caught:
        facts_of(**changed)
    assert said in str(caught.value)
    assert caught.value.exit == code


def test_an_answer_is_found_behind_what_a_login_prints() -> None:
    text = "Welcome!\n\x1euser\nada\x1b[2J\n\n\x1e=0\n\x1enodes\n\n\x1e=124\n\x1ecut off"
    assert parse_sections(text) == {"user": Section("ada\\u001b[2J", 0), "nodes": Section("", 124)}


def test_time_limits() -> None:
    cases = {"1-02:03:04": 93_784, "04:00:00": 14_400, "30:00": 1800, "UNLIMITED": None, "": None}
    assert {text: parse_time_limit(text) for text in cases} == cases
    assert [format_time_limit(s) for s in (1800, 14_400, 93_784)] == [
        *("0:30:00", "4:00:00", "1-02:03:04"),
    ]


# --- the table ---


def test_the_table_and_its_remarks() -> None:
    lines = [str(line) for line in render_free(facts_of(), None, 200)]
    text = "\n".join(lines)
    assert lines[0] == "cluster turing, Slurm 23.02, as ada sees it at 2026-11-19 20:00"
    row = next(line for line in lines if line.startswith("gpu "))
    assert row.split()[:6] == ["gpu", "1", "1", "1", "1", "120/256"]
    assert "1g.5gb 6/7, a100 1/8, v100 2/2" in row
    assert "cpu*" in text
    assert "└ you cannot use it: for groups staff" in text
    old = "\n".join(map(str, render_free(facts_of(version=Section("slurm 18.08.5", 0)), None, 200)))
    assert "Slurm 18.08 is older than 20.11" in old


def test_json_has_the_figures_of_the_table() -> None:
    found = describe_free(facts_of(), None)
    gpu = found["partitions"][1]
    assert gpu["nodes"] == {"total": 4, "idle": 1, "mixed": 1, "full": 1, "down": 1}
    assert gpu["gpus"][1] == {"type": "a100", "free": 1, "total": 8}
    assert found["partitions"][2]["obstacle"] == "for groups staff"
    assert "job" not in found
    json.dumps(found)


# --- when a job would start ---


@pytest.mark.parametrize(
    ("text", "code", "estimate"),
    [
        (
            "sbatch: Job 12 to start at 2026-11-19T21:30:00 using 8 processors on nodes g[1-2] in "
            "partition gpu\nsbatch:   Preempts: 7",
            0,
            ("g[1-2]", "gpu", 5400),
        ),
        (
            "sbatch: Job 12 to start at 2026-11-19T20:00:30 using 1 processors on g1",
            0,
            ("g1", "", 0),
        ),
        ("allocation failure: Requested node configuration is not available", 1, ("", "", None)),
        ("", 124, ("", "", None)),
    ],
)
def test_estimates_of_slurm_are_read(
    text: str, code: int, estimate: tuple[str, str, int | None]
) -> None:
    found = read_estimate(Section(text, code))
    wait_s = found.count_wait_s(facts_of().now)
    assert (found.nodes, found.partition, wait_s) == estimate
    assert bool(found.reason) is (found.start is None)
    assert not found.reason.startswith(("sbatch:", "allocation"))


def test_the_changes_that_are_tried_are_few_and_possible() -> None:
    words = ["launch.nodes=2", "launch.gpus_per_node=a100:1", "launch.partition=gpu"]
    config = compose(["launch=slurm", *words, "launch.time=16:00:00", "launch.exclusive=true"])
    nodes = NODES.replace("State=IDLE+DRAIN", "State=IDLE").replace("gpu:v100:2", "gpu:a100:2")
    facts = facts_of(nodes=Section(nodes, 0), groups=Section("staff", 0))
    changes = [change.settings for change in list_changes(facts, config)]
    assert changes == [
        ("launch.time=8:00:00",),
        ("launch.partition=all",),
        ("launch.nodes=1",),
        ("launch.exclusive=false",),
    ]
    assert len(changes) <= MAX_CHANGES
    # A partition with a shorter limit is proposed together with that limit; a type that too few
    # nodes have is not.
    cpu = compose(["launch=slurm", "launch.time=3-00:00:00", "launch.partition=all"])
    assert ("launch.partition=cpu", "launch.time=2-00:00:00") in [
        change.settings for change in list_changes(facts_of(), cpu)
    ]
    # A partition may have GPUs of another type alone.
    other = SECTIONS["partitions"].text.replace("AllowGroups=staff", "AllowGroups=ALL")
    two_kinds = facts_of(partitions=Section(other, 0), nodes=Section(TWO_KINDS, 0))
    a100 = compose(["launch=slurm", "launch.gpus_per_node=a100:2", "launch.partition=gpu"])
    assert [c.settings for c in list_changes(two_kinds, a100)][1:] == [
        ("launch.partition=all", "launch.gpus_per_node=h100:2"),
    ]
    typed = compose(["launch=slurm", "launch.gpus_per_node=a100:2", "launch.partition=gpu"])
    assert ("launch.gpus_per_node=v100:2",) in [c.settings for c in list_changes(facts_of(), typed)]


def test_a_test_job_has_the_options_of_the_run_but_waits_for_nothing() -> None:
    config = compose(["launch=slurm", "launch.gpus_per_node=a100:4", "launch.after=afterok:12"])
    text = render_test_job(config)
    assert "#SBATCH --gpus-per-node=a100:4\n" in text
    assert "--dependency" not in text
    assert text.endswith("\ntrue\n")
    script = build_probe(jobs=[text])
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0


def test_a_job_that_cannot_start_has_slurms_words() -> None:
    estimate = StartEstimate(None, "", "", "Requested node configuration is not available")
    job = JobEstimate(["launch.nodes=9"], estimate, [], 2)
    text = "\n".join(str(line) for line in render_free(facts_of(), job, 200))
    assert "a job with launch.nodes=9 cannot start: Requested node configuration is not" in text
    assert "2 changes of time, nodes, partition or GPUs were tried; none starts sooner" in text
    assert "estimates of Slurm's" in text


# --- the file of defaults ---


def test_the_file_of_defaults_is_one_that_is_read(tmp_path: Path) -> None:
    facts = facts_of()
    text = render_draft(facts, "echelon setup cluster login")
    (tmp_path / "echelon.yaml").write_text(text)
    config = compose(["launch=slurm"], defaults=load_defaults({"HOME": "/"}, [tmp_path])).launch
    # The default partition has no GPUs. An account may run for 12 h, so 4 h are possible.
    assert (config.partition, config.account, config.time) == ("gpu", "lab", "4:00:00")
    assert (config.gpus_per_node, config.max_parallel, config.gpu_request) == (
        *(1, 20),
        "gpus-per-node",
    )
    for words in (
        *("gpu (4 nodes", "not for you: for groups staff", "thesis", "long (priority 10"),
        *("gres/gpu=8 per user", "matlab", "module load cuda/12.4", "3.6.8 (/usr/bin/python3)"),
        *("Echelon needs 3.10", "apptainer 1.3.2-1.el9, pyxis", "/scratch/ada (lustre"),
    ):
        assert words in " ".join(text.replace("# ", "").split()), words
    assert "/scratch (lustre" not in text, "it cannot be written"


def test_every_line_of_it_is_explained(tmp_path: Path) -> None:
    lines = render_draft(facts_of(), "echelon setup cluster").splitlines()
    for number, line in enumerate(lines):
        key = line.strip().partition(":")[0]
        if line.startswith("  ") and not line.strip().startswith("#"):
            above = "\n".join(lines[:number])
            assert f"  # {key}: " in above, line
    assert max(map(len, lines)) <= 100
    values = collect_values(draft_settings(facts_of()))
    assert yaml.safe_load("\n".join(lines))["launch"] == {
        key.removeprefix("launch."): value for key, value in values.items()
    }


def test_other_kinds_of_clusters_get_other_files() -> None:
    plain = facts_of(
        accounts=Section(NO_ACCOUNTING, 1),
        nodes=Section("NodeName=c1 CPUAlloc=0 CPUTot=4 Gres=(null) State=IDLE Partitions=cpu", 0),
        config=Section("ClusterName = x\nSelectType = select/linear", 0),
    )
    values = collect_values(draft_settings(plain))
    assert values == {"launch.partition": "cpu", "launch.time": "4:00:00"}
    text = render_draft(plain, "echelon setup cluster")
    assert "keeps no accounting" in text
    assert "Slurm shows no GPUs" in text
    linear = facts_of(config=Section("ClusterName = x\nSelectType = select/cons_res", 0))
    assert collect_values(draft_settings(linear))["launch.gpu_request"] == "gres"
    short = facts_of(accounts=Section("lab||normal|normal||01:30:00", 0))
    assert collect_values(draft_settings(short))["launch.time"] == "1:30:00"


def test_what_the_cluster_says_cannot_become_a_line() -> None:
    odd = "PartitionName=x:\u2028y AllowGroups=a Default=YES State=UP MaxTime=UNLIMITED"
    text = render_draft(facts_of(partitions=Section(odd, 0)), "echelon setup cluster")
    assert set(yaml.safe_load(text)) == {"launch"}
    assert facts_of(version=Section("slurm 20.11.9", 0)).version == SlurmVersion(20, 11)


# --- a login node that is this machine, or cannot be asked ---


def test_the_script_runs_in_a_plain_shell_and_writes_nothing(tmp_path: Path) -> None:
    """All of it, without bash, `timeout` and accounting; Slurm's programs answer little."""
    tools = tmp_path / "bin"
    tools.mkdir()
    names = "sh date id hostname sed awk sort uniq grep df cat tail head"
    for name in names.split():
        found = next(p for p in ("/bin", "/usr/bin") if os.path.exists(f"{p}/{name}"))
        (tools / name).symlink_to(f"{found}/{name}")
    programs = {
        "sbatch": "cat > /dev/null; echo no such option >&2; exit 3",
        "scontrol": "echo warning >&2; echo NodeName=n1 OS=a b Gres=gpu:2",
        **{"sinfo": "true", "squeue": "true"},
    }
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    script = build_probe(with_setup=True, jobs=["#!/bin/sh\n#SBATCH --nodes=1\ntrue\n"])
    env = {"PATH": str(tools), "HOME": str(home), "WANDB_API_KEY": "canary"}
    done = subprocess.run(["sh", "-s"], input=script, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sections = parse_sections(done.stdout)
    assert sections["job 0"] == Section("no such option", 3)
    assert sections["nodes"].text.splitlines() == ["warning", "NodeName=n1 Gres=gpu:2 "]
    assert sections["partitions"].exit_code == 0
    assert sections["waiting"].exit_code == 0
    assert sections["accounts"].exit_code == 127
    assert sections["folders"].lines[0].startswith(f"{home}|yes|")
    assert "canary" not in done.stdout
    assert not list(home.iterdir())


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "a;b"])
def test_what_is_no_host_never_reaches_ssh(host: str) -> None:
    with pytest.raises(EchelonError, match="is not the name of a host"):
        make_login_node(host, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 255", "login cannot be reached: ssh says nothing"),
        ("echo Host key verification failed. >&2; exit 255", "ssh has never seen login"),
        ("echo no shell >&2; exit 1", "the shell of login ended with 1: no shell"),
        ("exit 0", "the shell of login ended with 0: it printed nothing"),
    ],
)
def test_a_login_that_fails_says_why(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\n{text}\n")
    ssh.chmod(0o755)
    for command in (["cluster"], ["setup", "cluster"]):
        words = [*command, "login", "--ssh", str(ssh)]
        assert run_and_report_faults(lambda w=words: run_command(w)) == ExitCode.NOT_READY  # type: ignore[misc]
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster", "a", "b"], "a and b are 2 hosts"),
        (["cluster", "lr=0.1", "launch=slurm"], "lr=0.1 does not change when a job starts"),
        (["cluster", "launch.nodes=0"], "launch.nodes=0 is below 1"),
        (["cluster", "--nodes", "2"], "write launch.nodes=2"),
    ],
)
def test_mistakes_of_the_command_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_and_report_faults(lambda: run_command(words)) == ExitCode.USAGE
    assert said in capsys.readouterr().err


@pytest.fixture
def login(tmp_path: Path) -> list[str]:
    """The words for a login node whose ssh has an answer ready."""
    answer = "".join(f"\x1e{k}\n{s.text}\n\x1e={s.exit_code}\n" for k, s in SECTIONS.items())
    (tmp_path / "answer").write_text(answer)
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ncat > /dev/null; cat {tmp_path}/answer\n")
    (tmp_path / "ssh").chmod(0o755)
    return ["setup", "cluster", "login", "--ssh", str(tmp_path / "ssh")]


def test_a_file_that_exists_is_only_replaced_when_asked_to(
    login: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = Path("echelon.yaml")

    def type_words(*words: str) -> int:
        return run_and_report_faults(lambda: run_command([*login, *words]))

    assert type_words("--dry-run") == ExitCode.OK
    shown = capfd.readouterr().out
    assert not file.exists()
    assert type_words() == ExitCode.OK
    assert "echelon.yaml is written" in capfd.readouterr().out
    assert file.read_text() == shown
    assert type_words() == ExitCode.OK, "nothing differs"

    file.write_text(shown.replace("partition: gpu\n", "partition: mine\n"))
    capfd.readouterr()
    assert type_words() == ExitCode.USAGE
    said = capfd.readouterr().err
    assert "-  partition: mine" in said
    assert "+  partition: gpu" in said
    assert "type the same with --force" in said
    assert "partition: mine" in file.read_text()
    assert type_words("--json") == ExitCode.USAGE
    found = json.loads(capfd.readouterr().out)
    assert (found["written"], found["settings"]["launch.partition"]) == (False, "gpu")
    assert found["folders"][0]["is_shared"]

    assert type_words("--force") == ExitCode.OK
    assert file.read_text() == shown
    assert type_words("--user") == ExitCode.OK
    assert (tmp_path / "config/echelon/echelon.yaml").read_text() == shown
    linked = tmp_path / "linked.yaml"
    linked.symlink_to(file.absolute())
    file.write_text("")
    assert type_words("--file", str(linked), "--force") == ExitCode.OK
    assert linked.is_symlink()
    assert file.read_text() == shown
    capfd.readouterr()
    assert type_words("--file", "/proc/none/echelon.yaml") == ExitCode.USAGE
    assert "cannot be written" in capfd.readouterr().err


@pytest.mark.parametrize("answer", ["y", "n"])
def test_at_a_terminal_it_asks(login: list[str], tmp_path: Path, answer: str) -> None:
    file = tmp_path / "echelon.yaml"
    file.write_text("launch: {partition: mine}\n")
    command = [sys.executable, "-m", "echelon", *login, "--file", str(file)]
    ours, theirs = pty.openpty()
    started = subprocess.Popen(command, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    said = b""
    while not said.endswith(b"[y/N] "):
        said += os.read(ours, 1000)
    os.write(ours, f"{answer}\n".encode())
    assert started.wait(60) == (ExitCode.OK if answer == "y" else ExitCode.USAGE)
    os.close(ours)
    assert b"-launch: {partition: mine}" in said
    assert ("mine" in file.read_text()) is (answer == "n")


def test_defaults_of_files_count_and_are_named(
    login: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "echelon.yaml").write_text("launch: {partition: gpu, nodes: 4}\n")
    words = ["cluster", *login[2:], "launch.nodes=2"]
    assert run_and_report_faults(lambda: run_command(words)) == ExitCode.OK
    said = capfd.readouterr().out
    assert "a job with launch.nodes=2, and launch.partition=gpu of echelon.yaml, cannot" in said


def test_the_login_node_of_the_defaults_is_asked_where_there_is_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert make_login_node(None, None) == LoginNode(None, "ssh")
    Path("echelon.yaml").write_text("launch: {login: hpc, ssh: ssh -F x}\n")
    assert make_login_node(None, None) == LoginNode("hpc", "ssh -F x")
    assert make_login_node(None, "ssh -v") == LoginNode("hpc", "ssh -v")
    assert make_login_node("other", None) == LoginNode("other", "ssh")
    Path("echelon.yaml").write_text("launch: [\n")
    assert make_login_node(None, None).host is None, "it may be about to be written"
    Path("echelon.yaml").write_text("launch: {login: hpc}\n")
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert make_login_node(None, None).host is None, "Slurm is here"
