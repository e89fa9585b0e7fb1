"""How many processes, and which device each has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.config.compose import compose
from echelon.config.schema import Config, ReplicaConfig
from echelon.errors import EchelonError
from echelon.launch.env_launcher import EnvLauncher
from echelon.launch.inline_launcher import InlineLauncher
from echelon.launch.local_launcher import LocalLauncher
from echelon.launch.plan import LaunchPlan, LocalMachine
from echelon.launch.slurm.launcher import SlurmLauncher
from echelon.launch.ssh.launcher import SshLauncher

LOCAL = "launch=local"


@pytest.mark.parametrize(
    ("words", "visible", "devices"),
    [
        ([], 0, ["cpu"]),
        ([], 1, ["cuda:0"]),
        ([], 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (["launch.procs=2"], 4, ["cuda:0", "cuda:1"]),
        (["launch.procs=3"], 0, ["cpu", "cpu", "cpu"]),
        (["launch.procs=3", "launch.share_devices=true"], 2, ["cuda:0", "cuda:1", "cuda:0"]),
    ],
)
def test_one_process_per_visible_device_unless_set(
    words: list[str], visible: int, devices: list[str]
) -> None:
    plan = LocalLauncher().plan(compose([LOCAL, *words]), LocalMachine({}, "here", visible))
    assert [place.devices for place in plan.places] == [(device,) for device in devices]
    assert [place.rank for place in plan.places] == list(range(len(devices)))


def test_two_processes_on_one_device_by_accident() -> None:
    with pytest.raises(EchelonError) as raised:
        LocalLauncher().plan(compose([LOCAL, "launch.procs=3"]), LocalMachine({}, "here", 2))
    [fault] = raised.value.faults
    assert "launch.procs=3, but 2 devices are visible" in fault.what
    assert "launch.share_devices=true" in fault.do


# ---- replicas of several devices ----------------------------------------------------------------

PAIRS = [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]
STAGES = ("cpu stage 0", "cpu stage 1")


@pytest.mark.parametrize(
    ("words", "visible", "devices"),
    [
        ([], 4, PAIRS),
        ([], 2, PAIRS[:1]),
        (["launch.procs=1"], 4, PAIRS[:1]),
        (["launch.procs=2"], 5, PAIRS),  # given, so one is left over on purpose
        ([], 0, [STAGES]),
        (["launch.procs=2"], 0, [STAGES, STAGES]),
    ],
)
def test_processes_are_devices_by_replicas(
    words: list[str], visible: int, devices: list[tuple[str, ...]]
) -> None:
    plan = LocalLauncher().plan(
        compose([LOCAL, "replica.devices=2", *words]), LocalMachine({}, "here", visible)
    )
    assert [place.devices for place in plan.places] == devices


@pytest.mark.parametrize(
    ("words", "visible", "what", "do"),
    [
        (
            [],
            5,
            "5 visible devices do not divide by replica.devices=2: 2 replicas would use 4",
            "set CUDA_VISIBLE_DEVICES to 4 of them, or launch.procs=2 to leave 1 idle",
        ),
        ([], 1, "replica.devices=2, but 1 device is visible", "set replica.devices=1"),
        (
            ["launch.procs=3"],
            4,
            "launch.procs=3 with replica.devices=2 take 6 devices, but 4 devices are visible",
            "set launch.procs=2",
        ),
    ],
)
def test_devices_that_make_no_replicas(words: list[str], visible: int, what: str, do: str) -> None:
    with pytest.raises(EchelonError) as raised:
        LocalLauncher().plan(
            compose([LOCAL, "replica.devices=2", *words]), LocalMachine({}, "here", visible)
        )
    [fault] = raised.value.faults
    assert fault.what == what
    assert do in fault.do


@pytest.mark.parametrize(
    ("words", "make", "visible", "lines"),
    [
        (
            [LOCAL, "launch.procs=2"],
            LocalLauncher().plan,
            0,
            [
                "launch=local: 2 processes × 2 stages",
                "0     here  0           cpu stage 0, cpu stage 1",
            ],
        ),
        (
            [LOCAL],
            LocalLauncher().plan,
            4,
            ["launch=local: 2 processes × 2 devices", "1     here  1           cuda:2, cuda:3"],
        ),
        (
            [LOCAL, "launch.procs=2"],
            LocalLauncher().plan,
            5,
            [
                "launch=local: 2 processes × 2 devices",
                "3. leave 1 of 5 devices idle: launch.procs=2 × replica.devices=2",
            ],
        ),
        (
            ["launch=slurm", "launch.nodes=2", "launch.gpus_per_node=4", "run.name=a"],
            SlurmLauncher().plan,
            0,
            ["launch=slurm: 4 processes × 2 devices", "3     node 1  1           cuda:2, cuda:3"],
        ),
        (
            ["launch=ssh", "launch.hosts=[a,b]", "launch.procs=2", "run.name=a"],
            SshLauncher().plan,
            0,
            [
                "launch=ssh: 4 processes × 2 devices",
                "1     a     1           cuda:2 or cpu stage 0, cuda:3 or cpu stage 1",
            ],
        ),
        (
            ["launch=ssh", "launch.hosts=[a,b]", "run.name=a"],
            SshLauncher().plan,
            0,
            ["launch=ssh", "0     a     0           every visible"],
        ),
        (
            ["launch=env"],
            EnvLauncher().plan,
            4,
            ["launch=env: 4 processes × 2 devices", "1     here    1           cuda:2, cuda:3"],
        ),
        ([], InlineLauncher().plan, 2, ["launch=inline: 1 process × 2 devices"]),
    ],
)
def test_the_plan_says_which_rank_has_which(
    words: list[str],
    make: Callable[[Config, LocalMachine], LaunchPlan],
    visible: int,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = {"MASTER_ADDR": "h", "MASTER_PORT": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    here = LocalMachine(env if "launch=env" in words else {}, "here", visible)
    make(compose([*words, "replica.devices=2"]), here).print_plan(as_json=False)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == lines[0]
    assert set(lines) <= set(printed)


def test_every_host_is_asked_for_whole_replicas() -> None:
    config = compose(["launch=ssh", "launch.hosts=[a,b]", "run.name=a", "replica.devices=2"])
    steps = SshLauncher().plan(config, LocalMachine({}, "here", 0)).steps
    assert any("on each host one process for every 2 devices" in step for step in steps)


def test_a_users_own_number_of_threads_is_kept() -> None:
    config = compose([LOCAL, "launch.procs=2"])
    assert LocalLauncher().plan(config, LocalMachine({}, "here", 0)).variables == {
        "OMP_NUM_THREADS": "1"
    }
    assert (
        LocalLauncher().plan(config, LocalMachine({"OMP_NUM_THREADS": "3"}, "here", 0)).variables
        == {}
    )
    assert LocalLauncher().plan(compose([LOCAL]), LocalMachine({}, "here", 0)).variables == {}


# ---- nodes that are lost ------------------------------------------------------------------------


def test_a_plan_says_what_becomes_of_a_lost_node() -> None:
    machine = LocalMachine({}, "here", 0)
    hosts = ["launch=ssh", "launch.hosts=[a,b,c]", "launch.procs=2", "run.name=a"]
    plan = SshLauncher().plan(compose([*hosts, "launch.spares=1"]), machine)
    assert [place.host for place in plan.places] == ["a", "a", "b", "b"]
    assert len(plan.commands) == 3
    lost = "a node that dies, or is silent for 14 s, "
    others = "the others go on while a majority is left, and 1 node"
    nccl = "; with NCCL it ends the run"
    assert plan.steps[-1] == f"{lost}is replaced by one of 1 spare; {others}{nccl}"
    plan = SshLauncher().plan(compose([*hosts, "launch.min_nodes=2"]), machine)
    assert plan.steps[-1] == f"{lost}is left out; {others[:-6]}2 nodes{nccl}"
    job = ["launch=slurm", "launch.nodes=3", "run.name=a"]
    plan = SlurmLauncher().plan(compose([*job, "launch.max_replacements=0"]), machine)
    assert f"{lost}ends the run: its ranks cannot be replaced; it is queued again" in plan.steps
    assert "--no-kill" not in plan.script
    plan = SlurmLauncher().plan(compose([*job, "launch.spares=2"]), machine)
    assert "#SBATCH --nodes=5\n#SBATCH --no-kill\n" in plan.script
    assert "--no-kill --wait=0 --kill-on-bad-exit=0" in plan.script
    assert len(plan.places) == 3


def test_spares_of_a_hostfile_and_of_variables_are_counted(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb\n")
    words = ["launch=ssh", f"launch.hostfile={tmp_path}/hosts", "launch.spares=2", "run.name=a"]
    with pytest.raises(EchelonError, match="of 2 nodes leaves none to train"):
        SshLauncher().plan(compose(words), LocalMachine({}, "here", 0))
    env = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "3", "NODE_RANK": "2"}
    plan = EnvLauncher().plan(compose(["launch=env", "launch.spares=1"]), LocalMachine(env, "c", 0))
    assert [place.host for place in plan.places] == ["node 0", "node 1"]
    with pytest.raises(EchelonError, match=r"launch\.min_nodes=4 is more than the 3 nodes"):
        EnvLauncher().plan(compose(["launch=env", "launch.min_nodes=4"]), LocalMachine(env, "c", 0))


# ---- replicas that several processes hold together ----------------------------------------------

HERE = LocalMachine({}, "here", 0)


def plan_here(*words: str) -> LaunchPlan:
    return LocalLauncher().plan(compose([LOCAL, *words]), HERE)


def test_the_plan_shows_replicas_and_shards() -> None:
    text = plan_here("launch.procs=6", "replica.shards=2").render_text()
    assert "launch=local: 3 replicas × 2 shards" in text
    rows = [line.split()[-2:] for line in text.splitlines()[1:8]]
    assert rows == [["replica", "shard"], *([str(r // 2), str(r % 2)] for r in range(6))]
    assert "the model shared out between 2 ranks each (fsdp)" in text
    shown = plan_here("launch.procs=4", "replica.kind=fsdp")
    assert "1 replica × 4 shards" in shown.render_text()
    assert [p["shard"] for p in shown.to_dict()["places"]] == [0, 1, 2, 3]


def test_the_plan_of_many_nodes_shows_where_replicas_are() -> None:
    words = ["launch=slurm", "launch.nodes=9", "launch.procs=8", "run.name=a", "replica.shards=4"]
    config = compose([*words, "trainer.batch_size=144"])
    text = SlurmLauncher().plan(config, HERE).render_text()
    assert [line.split()[-2:] for line in text.splitlines()[2:4]] == [
        ["0–1", "0–3"],
        ["2–3", "0–3"],
    ]


@pytest.mark.parametrize(
    ("procs", "shards", "do"),
    [
        (6, 4, "set replica.shards to 2 or 3 or 6, or start 4 or 8 processes"),
        (4, 8, "set replica.shards to 2 or 4, or start 8 processes"),
        (1, 8, "start 8 or more: launch.procs=8; or leave replica.shards=8 out"),
    ],
)
def test_shards_that_do_not_divide_the_processes(procs: int, shards: int, do: str) -> None:
    words = [f"launch.procs={procs}", f"replica.shards={shards}", f"trainer.batch_size={procs}"]
    with pytest.raises(EchelonError) as told:
        compose([LOCAL, *words])
    [fault] = told.value.faults
    assert fault.what.startswith(f"replica.shards={shards} ")
    assert fault.do == do
    visible = LocalMachine({}, "here", procs)
    config = compose([LOCAL, *words[1:]])
    launcher = LocalLauncher()
    assert launcher.find_config_faults(config, launcher.plan(config, visible), visible) == [fault]


def test_all_that_does_not_fit_the_processes_is_told_at_once() -> None:
    with pytest.raises(EchelonError) as told:
        compose(["rank=0", "world_size=6", "replica.shards=4", "trainer.batch_size=5"])
    assert [fault.what.split()[0] for fault in told.value.faults] == [
        "trainer.batch_size=5",
        "replica.shards=4",
    ]


@pytest.mark.parametrize(
    ("wanted", "world_size", "shards"),
    [(2, 4, 2), (2, 3, 3), (2, 5, 5), (4, 6, 6), (2, 6, 2), (4, 2, 2), (2, 1, 1), (None, 3, 3)],
)
def test_shards_of_a_world_of_another_size_need_no_more_memory(
    wanted: int | None, world_size: int, shards: int
) -> None:
    assert ReplicaConfig("fsdp", wanted).count_shards(world_size) == shards
    assert ReplicaConfig().count_shards(world_size) == 1


def test_shards_of_hosts_that_are_still_to_be_asked(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb\n")
    words = ["launch=ssh", "run.name=a", "replica.shards=2"]
    config = compose([*words, f"launch.hostfile={tmp_path}/hosts"])
    shown = SshLauncher().plan(config, HERE)
    assert "shard" not in shown.render_text().splitlines()[1]
    assert SshLauncher().find_config_faults(config, shown, HERE) == []
    known = compose([*words, "launch.hosts=[a,b]", "launch.procs=3", "replica.shards=4"])
    shown = SshLauncher().plan(known, HERE)
    [fault] = SshLauncher().find_config_faults(known, shown, HERE)
    assert fault.what.startswith("replica.shards=4 does not divide 6 processes")
