"""Who a process is: the variables as each launcher really sets them, and what comes of them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from echelon.errors import EchelonError, ExitCode
from echelon.world import (
    Detection,
    DetectionReason,
    DeviceRule,
    IgnoredVariable,
    World,
    detect,
    expand_hostlist,
)
from echelon.world.render import detection_to_dict, render_detection
from echelon.world.slurm_variables import derive_step_port, parse_tasks_per_node

Env = dict[str, str]

SHELL = {"HOME": "/home/ada", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "_": "/usr/bin/python3"}

# torchrun --nnodes=2 --nproc-per-node=4, second agent, its second worker
TORCHRUN = SHELL | {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "41253",
    "OMP_NUM_THREADS": "1",
    "RANK": "5",
    "ROLE_NAME": "default",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/error.json",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "42",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "WORLD_SIZE": "8",
}

# what salloc -N2 --ntasks-per-node=4 puts into its shell
ALLOCATION = SHELL | {
    "SLURM_CLUSTER_NAME": "atlas",
    "SLURM_JOBID": "1234",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NPROCS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_SUBMIT_DIR": "/home/ada",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
# the batch script itself: a task of no step
BATCH = ALLOCATION | {
    "ENVIRONMENT": "BATCH",
    "SLURMD_NODENAME": "n1",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "811",
}
# srun in that script: the sixth of eight tasks
STEP = BATCH | {
    "SLURMD_NODENAME": "n2",
    "SLURM_GTIDS": "4,5,6,7",
    "SLURM_LAUNCH_NODE_IPADDR": "10.1.0.11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_SRUN_COMM_HOST": "10.1.0.11",
    "SLURM_SRUN_COMM_PORT": "37221",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "37221",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "_": "/usr/bin/srun",
}
TERMINAL = {"SLURM_PTY_PORT": "43121", "SLURM_PTY_WIN_COL": "80", "SLURM_PTY_WIN_ROW": "24"}
# srun -n 8 --pty bash, and python typed there
PTY = (
    STEP
    | TERMINAL
    | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "_": "/usr/bin/python3"}
)

# mpirun -np 8 -H a:4,b:4 (Open MPI 4.1)
OPEN_MPI = SHELL | {
    "HWLOC_HIDE_ERRORS": "1",
    "MASTER_ADDR": "a",
    "OMPI_APP_CTX_NUM_PROCS": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_UNIVERSE_SIZE": "8",
    "PMIX_NAMESPACE": "3735879681",
    "PMIX_RANK": "6",
}
# mpiexec -n 4 (MPICH's Hydra), one machine
HYDRA = SHELL | {
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "MPI_LOCALNRANKS": "4",
    "MPI_LOCALRANKID": "3",
    "PMI_FD": "9",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
MVAPICH = SHELL | {
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29400",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "4",
}
# Kubeflow's PyTorchJob: RANK and WORLD_SIZE count pods
POD = SHELL | {
    "HOSTNAME": "bert-worker-0",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "MASTER_ADDR": "bert-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "RANK": "1",
    "WORLD_SIZE": "3",
}
CLUSTER = SHELL | {
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "29501",
    "NODE_RANK": "1",
    "WORLD_SIZE": "2",
}
BY_HAND = SHELL | {
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "WORLD_SIZE": "4",
}

STEP_PORT = derive_step_port(STEP)
ALONE = (0, 1, 0, 1, 0, 1)


def place(world: World) -> tuple[int, ...]:
    return (
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.node_rank,
        world.nodes,
    )


def ignored(detection: Detection) -> dict[str, str]:
    return {i.variable: i.why for i in detection.ignored}


def because(detection: Detection) -> dict[str, str]:
    return {r.field: r.because for r in detection.reasons}


def faults(env: Env, **given: Any) -> list[str]:
    with pytest.raises(EchelonError) as caught:
        detect(env, **given)
    assert caught.value.exit is ExitCode.USAGE
    assert all(fault.do for fault in caught.value.faults)
    return [fault.what for fault in caught.value.faults]


# ---- each source --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "source", "expected", "master", "settled"),
    [
        pytest.param({}, "single process", ALONE, None, True, id="nothing"),
        pytest.param(SHELL, "single process", ALONE, None, True, id="a shell"),
        pytest.param(TORCHRUN, "torchrun", (5, 8, 1, 4, 1, 2), "node-a:41253", True, id="torchrun"),
        pytest.param(
            STEP, "slurm step", (5, 8, 1, 4, 1, 2), f"n1:{STEP_PORT}", True, id="srun in sbatch"
        ),
        pytest.param(
            STEP | TORCHRUN,
            "torchrun",
            (5, 8, 1, 4, 1, 2),
            "node-a:41253",
            True,
            id="srun+torchrun",
        ),
        pytest.param(ALLOCATION, "single process", ALONE, None, True, id="salloc"),
        pytest.param(BATCH, "single process", ALONE, None, True, id="batch script"),
        pytest.param(PTY, "single process", ALONE, None, True, id="srun --pty"),
        pytest.param(OPEN_MPI, "open mpi", (6, 8, 2, 4, 1, 2), "a:29500", False, id="mpirun"),
        pytest.param(HYDRA, "pmi", (3, 4, 3, 4, 0, 1), "127.0.0.1:29500", True, id="mpiexec"),
        pytest.param(MVAPICH, "pmi", (2, 4, 0, 2, 1, 2), "a:29400", False, id="mvapich"),
        pytest.param(
            POD,
            "torchrun-like variables",
            (1, 3, 0, 1, 1, 3),
            "bert-master-0:23456",
            True,
            id="PyTorchJob",
        ),
        pytest.param(
            CLUSTER,
            "cluster variables",
            (1, 2, 0, 1, 1, 2),
            "10.0.0.4:29501",
            True,
            id="general-purpose cluster",
        ),
        pytest.param(
            BY_HAND,
            "torchrun-like variables",
            (3, 4, 3, 4, 0, 1),
            "node-a:29500",
            False,
            id="by hand",
        ),
    ],
)
def test_source(
    env: Env, source: str, expected: tuple[int, ...], master: str | None, settled: bool
) -> None:
    world = detect(env).world
    assert (world.source, place(world), world.master) == (source, expected, master)
    assert world.settled is settled
    assert world.devices == ("cpu",)


def test_every_field_has_a_reason() -> None:
    assert because(detect(TORCHRUN)) == {
        "source": "TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE are set",
        "rank": "RANK=5",
        "size": "WORLD_SIZE=8",
        "local_rank": "LOCAL_RANK=1",
        "local_size": "LOCAL_WORLD_SIZE=4",
        "node_rank": "GROUP_RANK=1",
        "nodes": "GROUP_WORLD_SIZE=2",
        "master": "MASTER_ADDR=node-a, MASTER_PORT=41253",
        "devices": "no CUDA device is visible",
    }


def test_torchrun_without_local_world_size_is_filled() -> None:
    env = {k: v for k, v in TORCHRUN.items() if k not in ("LOCAL_WORLD_SIZE", "GROUP_RANK")}
    world = detect(env).world
    assert place(world) == (5, 8, 1, 4, 1, 2)
    assert not world.settled


def test_ranks_by_hand_on_this_machine_are_certain() -> None:
    found = detect(BY_HAND | {"MASTER_ADDR": "localhost"})
    assert found.world.settled
    assert because(found)["local_rank"] == "the rank; the master is this machine"


def test_nodes_are_counted_by_world_size_on_a_general_cluster() -> None:
    assert because(detect(CLUSTER))["size"] == "WORLD_SIZE=2: WORLD_SIZE counts nodes here"


def test_the_first_node_of_a_cluster_needs_no_master_address() -> None:
    env = {k: v for k, v in CLUSTER.items() if k != "MASTER_ADDR"} | {"NODE_RANK": "0"}
    assert detect(env).world.master == "127.0.0.1:29501"


def test_ipv6_master_address_is_bracketed() -> None:
    assert detect(TORCHRUN | {"MASTER_ADDR": "fe80::1"}).world.master == "[fe80::1]:41253"


# ---- slurm --------------------------------------------------------------------------------------


def test_uneven_tasks_per_node() -> None:
    env = STEP | {
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "2",
        "SLURM_PROCID": "10",
        "SLURM_STEP_NODELIST": "n[1-2],gpu-07",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "11",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    }
    assert place(detect(env).world) == (10, 11, 2, 3, 2, 3)


def test_a_smaller_step_than_its_allocation() -> None:
    env = STEP | {
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    found = detect(env)
    assert place(found.world) == (1, 2, 0, 1, 1, 2)
    assert ignored(found)["SLURM_NTASKS"] == "SLURM_STEP_NUM_TASKS is read instead"


def test_master_variables_beat_the_steps_own() -> None:
    world = detect(STEP | {"MASTER_ADDR": "ib-n1", "MASTER_PORT": "6000"}).world
    assert (world.source, world.master) == ("slurm step", "ib-n1:6000")


def test_step_port_is_one_for_all_tasks_and_below_the_ephemeral_ports() -> None:
    ports = {derive_step_port({"SLURM_JOB_ID": str(j), "SLURM_STEP_ID": "0"}) for j in range(500)}
    assert len(ports) > 450
    assert all(20000 <= port < 32768 for port in ports)
    assert derive_step_port(STEP | {"SLURM_PROCID": "0"}) == derive_step_port(STEP)
    assert derive_step_port(STEP | {"SLURM_STEP_ID": "1"}) != derive_step_port(STEP)


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292", "-5", "-6"])
def test_slurms_own_steps_are_one_process(step: str) -> None:
    world = detect(BATCH | {"SLURM_STEP_ID": step, "SLURM_STEPID": step}).world
    assert (world.source, place(world)) == ("single process", ALONE)


def test_the_allocation_is_seen_and_ignored() -> None:
    text = "the allocation's; no srun step: one process"
    assert ignored(detect(ALLOCATION)) == {
        "SLURM_NNODES": text,
        "SLURM_NTASKS": text,
        "SLURM_TASKS_PER_NODE": text,
    }


def test_a_terminal_is_one_process_and_says_so() -> None:
    assert ignored(detect(PTY))["SLURM_NTASKS"] == "opened by srun --pty: one process"


def test_srun_typed_into_a_terminal_is_a_step() -> None:
    """Slurm leaves the terminal's variables set; `_` shows that srun started this process."""
    world = detect(STEP | TERMINAL).world
    assert (world.source, place(world)) == ("slurm step", (5, 8, 1, 4, 1, 2))


def test_a_later_task_is_never_taken_for_a_terminal() -> None:
    [what] = faults(STEP | TERMINAL | {"_": "/bin/bash"})
    assert "SLURM_PTY_PORT" in what
    assert "SLURM_PROCID=5" in what


def test_a_step_of_one_task_is_one_process() -> None:
    env = STEP | {
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    world = detect(env).world
    assert (place(world), world.master) == (ALONE, None)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[1-2],gpu-[01-03]", ["n1", "n2", "gpu-01", "gpu-02", "gpu-03"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]c[1-2]", ["r1c1", "r1c2", "r2c1", "r2c2"]),
        ("r[1-2]c[01,03].site", ["r1c01.site", "r1c03.site", "r2c01.site", "r2c03.site"]),
        ("a-b[5]", ["a-b5"]),
        ("", []),
    ],
)
def test_expand_hostlist(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n1]", "n[3-1]", "n[a]", "n[]", "n[[1-2]-3]", "a,,b"])
def test_no_hostlist(text: str) -> None:
    with pytest.raises(ValueError):
        expand_hostlist(text)


def test_tasks_per_node() -> None:
    assert parse_tasks_per_node("4(x2),3") == [4, 4, 3]
    assert parse_tasks_per_node("1") == [1]
    with pytest.raises(ValueError):
        parse_tasks_per_node("4x2")


# ---- precedence ---------------------------------------------------------------------------------


def test_explicit_wins_over_all() -> None:
    found = detect(STEP | TORCHRUN | OPEN_MPI, rank=2, world_size=3)
    assert (found.world.source, place(found.world)) == ("explicit", (2, 3, 2, 3, 0, 1))
    assert found.world.master == "127.0.0.1:29500"
    assert ignored(found)["RANK"] == "rank= and world_size= decide"
    assert ignored(found)["MASTER_ADDR"] == "rank= needs master=HOST:PORT"


def test_explicit_wins_over_broken_variables() -> None:
    assert detect({"RANK": "x", "WORLD_SIZE": ""}, rank=0, world_size=2).world.size == 2


def test_torchrun_wins_over_slurm_and_mpi() -> None:
    found = detect(STEP | OPEN_MPI | TORCHRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    assert found.world.source == "torchrun"
    assert ignored(found)["SLURM_PROCID"] == "torchrun decides"
    assert ignored(found)["OMPI_COMM_WORLD_RANK"] == "torchrun decides"


def test_mpirun_wins_over_the_step_of_its_daemon() -> None:
    daemon = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert detect(daemon | OPEN_MPI).world.source == "open mpi"
    assert detect(daemon | HYDRA).world.source == "pmi"


def test_a_step_wins_over_the_pmi_it_sets() -> None:
    found = detect(STEP | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9"})
    assert found.world.source == "slurm step"
    assert ignored(found)["PMI_RANK"] == "srun sets it as well; its step says more"


def test_a_step_wins_over_an_exported_world_size() -> None:
    exported = {"WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "12345"}
    found = detect(STEP | exported)
    assert (found.world.source, found.world.master) == ("slurm step", "n1:12345")
    assert ignored(found)["WORLD_SIZE"] == "says nothing without RANK"


def test_an_exported_rank_that_agrees_leaves_the_step_to_decide() -> None:
    exported = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "12345"}
    world = detect(STEP | exported).world
    assert (world.source, place(world)) == ("slurm step", (5, 8, 1, 4, 1, 2))


def test_an_exported_rank_that_differs_wins_over_the_step() -> None:
    exported = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "12345"}
    assert detect(STEP | exported).world.source == "torchrun-like variables"


def test_what_is_never_read_is_said() -> None:
    assert ignored(detect({"PMIX_RANK": "0"})) == {"PMIX_RANK": "PMIx sets no world size beside it"}
    assert "OMPI_COMM_WORLD_NODE_RANK" in ignored(detect(OPEN_MPI))
    alone = ignored(detect({"MASTER_ADDR": "a", "MASTER_PORT": "1"}))
    assert alone == dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "one process meets nobody")


def test_an_explicit_master_serves_any_source() -> None:
    found = detect(STEP | {"MASTER_ADDR": "n9"}, master="ib-n1:6000")
    assert (found.world.source, found.world.master) == ("slurm step", "ib-n1:6000")
    assert ignored(found)["MASTER_ADDR"] == "master= decides"


# ---- explicit ranks and their places ------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "master"),
    [
        (None, "127.0.0.1:29500"),
        ("node-a", "node-a:29500"),
        ("node-a:6000", "node-a:6000"),
        ("[::1]:6000", "[::1]:6000"),
        ("[fe80::1%eth0]", "[fe80::1%eth0]:29500"),
    ],
)
def test_explicit_master(given: str | None, master: str) -> None:
    assert detect({}, rank=1, world_size=2, master=given).world.master == master


@pytest.mark.parametrize("given", ["", "::1", "node:", ":29500", "node:x", "node:0", "node:70000"])
def test_explicit_master_faults(given: str) -> None:
    [what] = faults({}, rank=0, world_size=2, master=given)
    assert f"master={given}" in what


def test_one_explicit_rank_is_a_single_process() -> None:
    world = detect({}, rank=0, world_size=1).world
    assert (place(world), world.master, world.settled) == (ALONE, None, True)


def test_placed_on_two_hosts_in_turn() -> None:
    world = detect({}, rank=3, world_size=4, master="a:29500", visible_devices=2).world
    assert not world.settled
    placed = world.renumber_by_hosts(["a", "b", "a", "b"])
    assert place(placed) == (3, 4, 1, 2, 1, 2)
    assert placed.devices == ("cuda:1",)
    assert placed.settled


def test_placed_on_one_host_with_too_few_devices() -> None:
    world = detect({}, rank=3, world_size=4, master="a:29500", visible_devices=2).world
    with pytest.raises(EchelonError, match="2 CUDA devices are visible"):
        world.renumber_by_hosts(["a"] * 4)


def test_placed_needs_every_host() -> None:
    with pytest.raises(ValueError, match="1 hosts for a world of 2"):
        detect({}, rank=0, world_size=2).world.renumber_by_hosts(["a"])


# ---- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "each", "devices"),
    [
        (0, 1, ("cpu",)),
        (0, 2, ("cpu stage 0", "cpu stage 1")),
        (2, 1, ("cuda:1",)),
        (8, 2, ("cuda:2", "cuda:3")),
        (4, 2, ("cuda:2", "cuda:3")),
    ],
)
def test_a_local_rank_holds_its_devices(visible: int, each: int, devices: tuple[str, ...]) -> None:
    found = detect({}, rank=1, world_size=2, visible_devices=visible, devices_per_replica=each)
    assert found.world.devices == devices


@pytest.mark.parametrize(("visible", "each"), [(1, 1), (3, 2), (1, 2)])
def test_two_workers_on_one_device_by_accident(visible: int, each: int) -> None:
    [what] = faults({}, rank=1, world_size=2, visible_devices=visible, devices_per_replica=each)
    assert f"local rank 1 holds cuda:{each}" in what
    assert f"{visible} CUDA device" in what


def test_fewer_devices_than_one_replica_needs() -> None:
    [what] = faults({}, visible_devices=1, devices_per_replica=2)
    assert what == "replica.devices=2, but 1 CUDA device is visible"


def test_two_workers_on_one_device_on_purpose() -> None:
    found = detect({}, rank=5, world_size=8, visible_devices=2, share_devices=True)
    assert found.world.devices == ("cuda:1",)
    assert because(found)["devices"] == "local rank 5, 2 visible, shared as set"


@pytest.mark.parametrize(
    "cut",
    [
        {"SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"},
        {"SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "1"},
        {"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"},
    ],
)
def test_devices_that_slurm_cut_per_task_count_from_zero(cut: Env) -> None:
    found = detect(STEP | cut, visible_devices=1)
    assert found.world.devices == ("cuda:0",)
    assert because(found)["devices"].startswith("each task sees only its own: SLURM_")


def test_one_device_for_four_tasks_of_a_step_is_an_accident() -> None:
    env = STEP | {"SLURM_STEP_GPUS": "0", "SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    [what] = faults(env, visible_devices=1)
    assert "1 CUDA device is visible" in what


def test_only_slurm_cuts_devices() -> None:
    assert faults(TORCHRUN | {"SLURM_GPUS_PER_TASK": "1"}, visible_devices=1)


# ---- faults -------------------------------------------------------------------------------------


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "3"}, ["RANK=3 is set, but not WORLD_SIZE"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0 is set, but not RANK and WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK=0 is set, but not OMPI_COMM_WORLD"]),
        ({"PMI_RANK": "0"}, ["PMI_RANK=0 is set, but not PMI_SIZE"]),
        (without(CLUSTER, "NODE_RANK"), ["WORLD_SIZE=2 is set, but not NODE_RANK (or RANK)"]),
        (without(CLUSTER, "WORLD_SIZE"), ["NODE_RANK=1 is set, but not WORLD_SIZE"]),
        (without(CLUSTER, "MASTER_ADDR"), ["MASTER_ADDR is not set"]),
        (without(CLUSTER, "MASTER_PORT"), ["MASTER_PORT is not set beside MASTER_ADDR=10.0.0.4"]),
        (
            {"WORLD_SIZE": "2"},
            ["WORLD_SIZE=2 is set", "MASTER_ADDR is not set", "MASTER_PORT is not set"],
        ),
        (TORCHRUN | {"RANK": ""}, ["RANK is set, but empty"]),
        (TORCHRUN | {"RANK": "one"}, ["RANK=one is not a whole number"]),
        (TORCHRUN | {"RANK": "1.5"}, ["RANK=1.5 is not a whole number"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK=-1 is negative"]),
        (TORCHRUN | {"RANK": "8"}, ["RANK=8, but WORLD_SIZE=8: ranks count from 0 to 7"]),
        (TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE=0: a world has at least one", "LOCAL_WORLD"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4, but LOCAL_WORLD_SIZE=4"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9, but WORLD_SIZE=8"]),
        (TORCHRUN | {"GROUP_RANK": "2"}, ["GROUP_RANK=2, but GROUP_WORLD_SIZE=2"]),
        (without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT is not set beside MASTER_ADDR=node-a"]),
        (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR is not set, and nothing else ("]),
        (TORCHRUN | {"MASTER_ADDR": ""}, ["MASTER_ADDR is set, but empty"]),
        (TORCHRUN | {"MASTER_ADDR": "a:29500"}, ["MASTER_ADDR=a:29500 is not a host alone"]),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000: 70000 is not a port"]),
        (TORCHRUN | {"MASTER_PORT": "x"}, ["MASTER_PORT=x is not a whole number"]),
        (without(OPEN_MPI, "MASTER_ADDR"), ["MASTER_ADDR is not set, and nothing else ("]),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["MASTER_ADDR is not set"]),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-"}, ["SLURM_STEP_NODELIST=n[1- names no first host"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4x2"}, ["SLURM_STEP_TASKS_PER_NODE=4x2 is not"]),
    ],
)
def test_faults(env: Env, expected: list[str]) -> None:
    found = faults(env)
    assert len(found) == len(expected)
    assert all(what.startswith(start) for what, start in zip(found, expected, strict=True))


def test_all_faults_come_at_once() -> None:
    broken = {"RANK": "x", "WORLD_SIZE": "", "LOCAL_RANK": "-2", "MASTER_PORT": "0"}
    assert faults(TORCHRUN | broken) == [
        "RANK=x is not a whole number",
        "WORLD_SIZE is set, but empty",
        "LOCAL_RANK=-2 is negative",
        "MASTER_PORT=0: 0 is not a port",
    ]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"rank": 1}, "rank=1 is given without world_size="),
        ({"world_size": 2}, "world_size=2 is given without rank="),
        ({"rank": 2, "world_size": 2}, "rank=2 is not a rank of world_size=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1 is not a rank of world_size=2"),
        ({"rank": 0, "world_size": 0}, "world_size=0 is not a number of processes"),
        ({"devices_per_replica": 0}, "0 devices per replica is too few"),
    ],
)
def test_explicit_faults(given: dict[str, int], what: str) -> None:
    assert faults({}, **given) == [what]


def test_stray_variables_beside_a_whole_source_are_no_fault() -> None:
    found = detect(STEP | {"RANK": "7"})
    assert found.world.source == "slurm step"
    assert ignored(found)["RANK"] == "says nothing without WORLD_SIZE"


# ---- explain ------------------------------------------------------------------------------------


def text(detection: Detection) -> str:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None, legacy_windows=False).print(
        render_detection(detection)
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


NOTHING_SEEN = """\
no launcher variables: one process

 field        value            because
 ────────────────────────────────────────────────────────────────
 source       single process   no launcher variables make a world
 rank         0                one process
 size         1                "
 local rank   0                "
 local size   1                "
 node rank    0                "
 nodes        1                "
 master       none             one process meets nobody
 devices      cpu              no CUDA device is visible
"""
MPIRUN = """\
rank 6 of 8 on cuda:2, node 1 of 2, from open mpi

 field        value      because
 ──────────────────────────────────────────────────────────────────────────
 source       open mpi   OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE are set
 rank         6          OMPI_COMM_WORLD_RANK=6
 size         8          OMPI_COMM_WORLD_SIZE=8
 local rank   2          OMPI_COMM_WORLD_LOCAL_RANK=2
 local size   4          OMPI_COMM_WORLD_LOCAL_SIZE=4
 node rank    1          a guess: ranks fill node by node
 nodes        2          size 8 / local size 4
 master       a:29500    MASTER_ADDR=a, torch's default port
 devices      cuda:2     local rank 2, 4 visible

guesses are settled when the processes meet and tell their hosts

seen and ignored

 variable                    value   why
 ─────────────────────────────────────────────────────────────────────────────
 PMIX_RANK                   6       PMIx sets no world size beside it
 OMPI_COMM_WORLD_NODE_RANK   2       counts the processes of a node, not nodes
"""


@pytest.mark.parametrize(
    ("env", "visible", "expected"), [({}, 0, NOTHING_SEEN), (OPEN_MPI, 4, MPIRUN)]
)
def test_rendered(env: Env, visible: int, expected: str) -> None:
    assert text(detect(env, visible_devices=visible)) == expected


def test_one_process_in_spite_of_what_is_set() -> None:
    assert text(detect(ALLOCATION)).startswith("one process: nothing that is set makes a world\n")


@pytest.mark.parametrize("env", [{}, TORCHRUN, STEP, PTY, OPEN_MPI, POD, CLUSTER, BY_HAND])
def test_json_round_trip(env: Env) -> None:
    found = detect(env, visible_devices=4)
    plain = detection_to_dict(found)
    back = json.loads(json.dumps(plain))
    assert back == plain
    world = back["world"]
    rule = DeviceRule(**world.pop("rule"))
    again = Detection(
        World(**{**world, "devices": tuple(world["devices"]), "rule": rule}),
        tuple(DetectionReason(**r) for r in back["reasons"]),
        tuple(IgnoredVariable(**i) for i in back["ignored"]),
    )
    assert again == found


@pytest.mark.parametrize("env", [{}, TORCHRUN, STEP | TORCHRUN | OPEN_MPI, PTY, POD])
def test_no_line_is_wider_than_the_terminal(env: Env) -> None:
    assert max(map(len, text(detect(env, visible_devices=4)).splitlines())) <= 80


def test_markup_in_values_is_shown_as_it_is() -> None:
    assert "SLURM_STEP_NODELIST=n[1-2]" in text(detect(STEP))


def test_no_torch_and_no_rich_until_rendering() -> None:
    code = (
        "import sys; from echelon.world import detect; "
        "from echelon.world.render import detection_to_dict; "
        "detection_to_dict(detect({})); "
        "assert not {'torch', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
