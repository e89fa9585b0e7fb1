"""Reading GPUs, with every driver version and every fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_nvml import GIB, NOBODY_HERE, MakeDriver, gpu, mig_slice, process, run_idle_process

from echelon.gpus.probe import Gpu, GpuNode, GpuProbe, GpuProcess, node_from_dict, node_to_dict

ME = os.getpid()


def read_node() -> GpuNode:
    probe = GpuProbe()
    try:
        return probe.read_node()
    finally:
        probe.close()


def read_only_gpu() -> Gpu:
    [gpu] = read_node().gpus
    return gpu


def pids(processes: tuple[GpuProcess, ...]) -> list[int | None]:
    return [process.pid for process in processes]


def test_every_value(make_driver: MakeDriver) -> None:
    make_driver(gpu(use=97, used=61 * GIB, temp=64, power=612_345, fan=30), process(ME, gib=60.5))
    node = read_node()
    assert (node.driver, node.cuda, node.fault) == ("550.54.15", "12.4", None)
    [seen] = node.gpus
    assert (seen.index, seen.name, seen.fault) == (0, "NVIDIA H200", None)
    assert (seen.use_percent, seen.temperature_c, seen.fan_percent) == (97, 64, 30)
    assert (seen.memory_used_bytes, seen.memory_total_bytes) == (61 * GIB, 140 * GIB)
    assert (seen.power_w, seen.power_limit_w) == (612.345, 700)
    [mine] = seen.processes
    assert (mine.pid, mine.memory_bytes) == (ME, int(60.5 * GIB))
    assert mine.command is not None
    assert mine.command.startswith("python")  # pytest, or a worker of its
    assert not seen.idle


def test_what_a_gpu_does_not_report_is_none(make_driver: MakeDriver) -> None:
    make_driver(gpu(use="-", temp="-", power="-", limit="-", total="-", lists=3))
    seen = read_only_gpu()
    assert seen.use_percent is seen.temperature_c is seen.power_w is seen.power_limit_w is None
    assert seen.memory_used_bytes is seen.memory_total_bytes is seen.fan_percent is None
    assert not seen.has_process_list
    assert not seen.idle, "nobody knows"


@pytest.mark.parametrize("newest", [1, 2, 3])
def test_process_lists_of_every_driver(make_driver: MakeDriver, newest: int) -> None:
    lines = [process(ME, gib=2), process(1, gib=3), process(2, memory="-", draws=1)]
    make_driver(gpu(used=5 * GIB), *lines, newest=newest)
    found = {p.pid: p.memory_bytes for p in read_only_gpu().processes}
    assert found == {ME: 2 * GIB, 1: 3 * GIB, 2: None}


def test_lists_with_a_field_that_nobody_announced(make_driver: MakeDriver) -> None:
    make_driver(gpu(wide=1), process(ME, gib=2), process(1, gib=3))
    assert {p.pid: p.memory_bytes for p in read_only_gpu().processes} == {ME: 2 * GIB, 1: 3 * GIB}


def test_more_processes_come_while_they_are_listed(make_driver: MakeDriver) -> None:
    make_driver(gpu(grow=1), process(ME), process(1))
    assert pids(read_only_gpu().processes) == [1, ME]


def test_a_process_with_compute_and_graphics_is_listed_once(make_driver: MakeDriver) -> None:
    make_driver(gpu(), process(ME, gib=2), process(ME, gib=2, draws=1))
    assert pids(read_only_gpu().processes) == [ME]


def test_a_process_that_has_ended_is_left_out(make_driver: MakeDriver) -> None:
    make_driver(gpu(), process(NOBODY_HERE, once=1), process(ME))
    assert pids(read_only_gpu().processes) == [ME]


def test_a_process_of_another_namespace_keeps_its_memory(make_driver: MakeDriver) -> None:
    make_driver(gpu(), process(NOBODY_HERE, gib=7))
    [unknown] = read_only_gpu().processes
    assert unknown == GpuProcess(None, memory_bytes=7 * GIB)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a namespace of processes")
def test_inside_a_container_a_pid_alone_proves_nothing(make_driver: MakeDriver) -> None:
    """The driver reports PIDs of the host; inside, the same PID is another process."""
    driver = make_driver(gpu(), process(1, gib=7))
    words = ["unshare", "-p", "-f", "--mount-proc", sys.executable, "-m", "echelon", "gpus"]
    done = subprocess.run(words, env=driver.environment(), capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert "pid ?  ?  7.0 GiB" in done.stdout


def test_a_lost_gpu_is_a_row_and_the_others_go_on(make_driver: MakeDriver) -> None:
    make_driver(gpu(0), gpu(1, handle=15), gpu(2, code=16), gpu(3, handle=4), gpu(4, handle=999))
    faults = [seen.fault for seen in read_node().gpus]
    assert faults[:4] == [
        None,
        "lost: reboot or reset",
        "needs a reset: nvidia-smi --gpu-reset",
        "no permission",
    ]
    assert faults[4] == "NVML error 999"


def test_a_gpu_is_lost_while_it_is_watched_and_comes_back(make_driver: MakeDriver) -> None:
    driver, probe = make_driver(gpu(0), gpu(1)), GpuProbe()
    assert [seen.fault for seen in probe.read_node().gpus] == [None, None]
    driver.set(gpu(0), gpu(1, code=15))
    lost = probe.read_node().gpus[1]
    assert (lost.name, lost.fault) == ("NVIDIA H200", "lost: reboot or reset")
    driver.set(gpu(0), gpu(1, use=50))
    assert probe.read_node().gpus[1].use_percent == 50
    probe.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("init 9", "the NVIDIA driver is not loaded"),
        ("init 4", "denies access"),
        ("init 18", "changed under a running system"),
        ("init 999", "NVML error 999"),
        ("", "the NVIDIA driver is there, but no GPU"),
    ],
)
def test_no_gpu_has_its_reason(make_driver: MakeDriver, line: str, words: str) -> None:
    make_driver(line)
    node = read_node()
    assert words in str(node.fault)
    assert node.gpus == ()


def test_slices_have_the_processes(make_driver: MakeDriver) -> None:
    parts = [mig_slice(1, 0, used=20 * GIB), mig_slice(1, 1), mig_slice(1, 2)]
    make_driver(gpu(0), gpu(1, mig=1, use="-", lists=4), *parts, process(ME, on=1, slice=1, gib=19))
    whole, cut = read_node().gpus
    assert not whole.mig
    assert cut.mig
    assert not cut.idle
    assert [pids(part.processes) for part in cut.slices] == [[], [ME], []]
    assert [part.idle for part in cut.slices] == [False, False, True]
    assert cut.slices[0].memory_total_bytes == 70 * GIB


@pytest.mark.parametrize("newest", [1, 3])
def test_idle_is_what_nobody_holds(make_driver: MakeDriver, newest: int) -> None:
    """Whether or not the driver tells apart what it keeps for itself."""
    busy = [gpu(1, used=GIB * 4), gpu(2, use=30), gpu(3)]
    make_driver(gpu(0), *busy, process(ME, on=3, gib=0), newest=newest)
    assert [seen.idle for seen in read_node().gpus] == [True, False, False, False]


def test_a_node_survives_json(make_driver: MakeDriver) -> None:
    parts = [mig_slice(1, 0), process(ME, on=1, slice=0), process(ME), process(NOBODY_HERE)]
    make_driver(gpu(0), gpu(1, mig=1), gpu(2, code=15), *parts)
    node = read_node()
    assert node_from_dict(json.loads(json.dumps(node_to_dict(node)))) == node


# --- who a process works for ---


def test_the_slurm_job(make_driver: MakeDriver) -> None:
    plain, array = {"SLURM_JOB_ID": "41"}, {"SLURM_JOB_ID": "44", "SLURM_ARRAY_JOB_ID": "42"}
    with (
        run_idle_process("a", env=plain) as one,
        run_idle_process("b", env=array | {"SLURM_ARRAY_TASK_ID": "2"}) as other,
    ):
        make_driver(gpu(), process(one), process(other), process(1))
        jobs = {p.pid: p.job for p in read_only_gpu().processes}
    assert jobs == {one: "41", other: "42_2", 1: None}


def _run(root: Path, name: str, **status: object) -> Path:
    folder = root / name
    (folder / "logs").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def test_the_run_and_whether_it_is_over(make_driver: MakeDriver, tmp_path: Path) -> None:
    now = time.time()
    from echelon.runs.process_record import identify_this_process

    gone = identify_this_process() | {"born": "1@here"}
    folders = [
        _run(
            tmp_path, "at-work", state="running", updated=now - 99, process=identify_this_process()
        ),
        _run(tmp_path, "over", state="finished", updated=now - 99),
        _run(tmp_path, "leaving", state="finished", updated=now + 3600),  # not long ago
        _run(tmp_path, "abandoned", state="running", updated=now - 99, process=gone),
    ]
    expected = [("at-work", False), ("over", True), ("leaving", False), ("abandoned", True)]
    for folder, (name, orphan) in zip(folders, expected, strict=True):
        with (
            (folder / "logs" / "rank-1.log").open("w") as log,
            run_idle_process("r", stderr=log) as pid,
        ):
            make_driver(gpu(), process(pid))
            [seen] = read_only_gpu().processes
        assert (seen.run, seen.run_folder, seen.orphan) == (name, str(folder), orphan)


def test_a_process_title_cannot_send_terminal_escapes(make_driver: MakeDriver) -> None:
    with run_idle_process("evil\x1b[2J\n\x07 name") as pid:
        make_driver(gpu(), process(pid))
        [seen] = read_only_gpu().processes
    assert seen.command == "evil?[2J ? name"
