"""From facts to verdicts: each rule is a function of plain data, and asks nobody."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from echelon.doctor.machine_facts import (
    DiskFacts,
    DriverFacts,
    GpuModel,
    MachineFacts,
    MissingDriver,
    ResourceLimit,
    TorchFacts,
)
from echelon.doctor.smoke_test import SmokeTestResult
from echelon.doctor.torch_wheels import (
    Version,
    find_oldest_cuda,
    is_built_for,
    make_install_command,
    parse_version,
)
from echelon.doctor.verdict import FAIL, NONE, OK, WARN, Verdict
from echelon.utils.text import format_bytes

_MIN_PYTHON = (3, 10)
_MIN_TORCH = (2, 4)
_MB, _GB = 10**6, 10**9
_DISK_FAIL, _DISK_WARN = 200 * _MB, 5 * _GB
_SHM_FAIL, _SHM_WARN = 16 * _MB, 1 * _GB
_EARLIEST_TIME = 1_700_000_000
"""2023: a clock that shows less was never set."""


def evaluate_machine(facts: MachineFacts) -> list[Verdict]:
    return [verdict for rule in RULES for verdict in rule(facts)]


# --- Python and packages ---


def check_python(f: MachineFacts) -> Iterator[Verdict]:
    found = f"{f.python[0]}.{f.python[1]}, {f.executable}"
    if f.python < _MIN_PYTHON:
        do = "make an environment with Python 3.10 or later: python3.12 -m venv .venv"
        yield Verdict("python", FAIL, found, do)
    else:
        yield Verdict("python", OK, found)


def check_venv(f: MachineFacts) -> Iterator[Verdict]:
    if f.venv:
        yield Verdict("environment", OK, f.venv)
    else:
        yield Verdict(
            "environment",
            WARN,
            "none: this is the system's Python, which other programs share",
            "python3 -m venv .venv && . .venv/bin/activate && pip install echelon",
        )


def check_echelon(f: MachineFacts) -> Iterator[Verdict]:
    there = [name for name, is_there in f.extras.items() if is_there]
    missing = [name for name, is_there in f.extras.items() if not is_there]
    found = f"{f.echelon}, extras: {', '.join(there) or 'none'}"
    if missing:
        found += f" (not installed: {', '.join(missing)})"
    yield Verdict("echelon", OK, found)


def check_torch(f: MachineFacts) -> Iterator[Verdict]:
    line = make_install_command(*_get_wheel_requirements(f))
    if isinstance(f.torch, str):
        yield Verdict("torch", FAIL, f"cannot be imported: {f.torch}", line)
        return
    built = f"CUDA {f.torch.cuda}" if f.torch.cuda else f"ROCm {f.torch.hip}"
    built = built if f.torch.cuda or f.torch.hip else "the CPU alone"
    found = f"{f.torch.version}, built for {built}"
    if (parse_version(f.torch.version) or (0, 0)) < _MIN_TORCH:
        yield Verdict("torch", FAIL, f"{found}; Echelon needs 2.4 or later", line)
    elif _list_gpus(f) and not f.torch.cuda and not f.torch.hip:
        count = len(_list_gpus(f))
        found += f", but this machine has {count} NVIDIA GPU{'s' * (count > 1)}"
        yield Verdict("torch", FAIL, found, line)
    else:
        yield Verdict("torch", OK, found)


def check_driver(f: MachineFacts) -> Iterator[Verdict]:
    if isinstance(f.driver, MissingDriver):
        do = "nvidia-smi; sudo modprobe nvidia, or restart the machine" * f.driver.is_broken
        yield Verdict("driver", WARN if do else NONE, f.driver.reason, do)
        return
    cuda = f.driver.cuda
    found = f"{f.driver.version}, supports CUDA up to {_format_version(cuda)}"
    built = parse_version(f.torch.cuda) if isinstance(f.torch, TorchFacts) else None
    if cuda and built and built[0] > cuda[0]:
        found += f", but torch is built for CUDA {_format_version(built)}"
        do = (
            make_install_command(*_get_wheel_requirements(f))
            or "install a later driver: https://www.nvidia.com/drivers"
        )
        yield Verdict("driver", FAIL, found, do)
    elif cuda and built and built > cuda:
        found += (
            f"; torch's {_format_version(built)} runs on it too, but nothing can be compiled for it"
        )
        yield Verdict("driver", OK, found)
    else:
        yield Verdict("driver", OK, found)
    for index, device in enumerate(f.driver.devices):
        if isinstance(device, str):
            do = "nvidia-smi -q; look for Xid in `dmesg`; reset the GPU or restart the machine"
            yield Verdict(f"gpu {index}", FAIL, f"does not answer: {device}", do)


def check_capability(f: MachineFacts) -> Iterator[Verdict]:
    if isinstance(f.torch, str) or not f.torch.cuda or not _list_gpus(f):
        return
    if f.torch.trouble and f.visible:
        do = "nvidia-smi; a driver that was updated needs a restart of the machine"
        yield Verdict("cuda", FAIL, f"torch finds no device: {f.torch.trouble}", do)
    for index, device in enumerate(f.torch.devices):
        found = f"{device.name}, compute capability {_format_version(device.capability)}"
        name = f"gpu {index}"
        if not f.torch.archs or is_built_for(f.torch.archs, device.capability):
            yield Verdict(name, OK, found)
        else:
            found += f", but torch is built for {' '.join(f.torch.archs)}"
            yield Verdict(
                name,
                FAIL,
                found,
                make_install_command(*_get_wheel_requirements(f)) or _suggest_driver(f),
            )
    hidden = len(_list_gpus(f)) - f.visible
    if hidden > 0:
        yield Verdict(
            "visible",
            OK if f.visible else WARN,
            f"{f.visible} of {len(_list_gpus(f))} GPUs, by CUDA_VISIBLE_DEVICES",
            "" if f.visible else "unset CUDA_VISIBLE_DEVICES",
        )


def _suggest_driver(f: MachineFacts) -> str:
    cuda = find_oldest_cuda([d.capability for d in _list_gpus(f)])
    if cuda is None:
        return "no wheel of torch has all of these: choose with CUDA_VISIBLE_DEVICES"
    return f"install a driver for CUDA {_format_version(cuda)} or later: https://www.nvidia.com/drivers"


def check_toolkit(f: MachineFacts) -> Iterator[Verdict]:
    built = parse_version(f.torch.cuda) if isinstance(f.torch, TorchFacts) else None
    if f.nvcc is None:
        yield Verdict("toolkit", NONE, "no nvcc; only who compiles CUDA code needs it")
    elif built and (parse_version(f.nvcc) or built)[0] != built[0]:
        found = f"nvcc {f.nvcc}, but torch is built for CUDA {_format_version(built)}"
        do = f"put nvcc {built[0]}.x first: export CUDA_HOME=/usr/local/cuda-{_format_version(built)}"
        yield Verdict("toolkit", WARN, f"{found}: extensions will not compile", do)
    else:
        yield Verdict("toolkit", OK, f"nvcc {f.nvcc}")


def check_communication(f: MachineFacts) -> Iterator[Verdict]:
    if isinstance(f.torch, str):
        return
    line = make_install_command(*_get_wheel_requirements(f))
    if f.torch.nccl:
        yield Verdict("nccl", OK, f.torch.nccl)
    elif f.torch.cuda and _list_gpus(f):
        yield Verdict("nccl", FAIL, "this torch has none, so GPUs cannot exchange", line)
    else:
        yield Verdict("nccl", NONE, "this torch has none; only GPUs need it")
    if f.torch.gloo:
        yield Verdict("gloo", OK, "available")
    else:
        yield Verdict("gloo", FAIL, "this torch has none, so processes cannot exchange", line)


def _list_gpus(f: MachineFacts) -> list[GpuModel]:
    devices = f.driver.devices if isinstance(f.driver, DriverFacts) else ()
    return [d for d in devices if isinstance(d, GpuModel)]


def _get_wheel_requirements(f: MachineFacts) -> tuple[Version | None, Sequence[Version]]:
    """For `install_line`."""
    capabilities = [d.capability for d in _list_gpus(f)]
    cuda = f.driver.cuda if isinstance(f.driver, DriverFacts) and capabilities else None
    return cuda, capabilities


def _format_version(numbers: Version | None) -> str:
    return ".".join(map(str, numbers)) if numbers else "?"


# --- the machine ---


def check_port(f: MachineFacts) -> Iterator[Verdict]:
    if f.port:
        do = "ip link set lo up; raise net.ipv4.ip_local_port_range if all ports are taken"
        yield Verdict("port", FAIL, f"none can be opened on 127.0.0.1: {f.port}", do)
    else:
        yield Verdict("port", OK, "one can be opened")


_OTHER_FOLDER_HINTS = {
    "here": "cd to another folder",
    "runs": "give another folder: run.dir=PATH",
    "tmp": "export TMPDIR=PATH",
    "home": "export HOME=PATH; caches of torch and pip go there",
}


def check_disks(f: MachineFacts) -> Iterator[Verdict]:
    for each in f.disks:
        state, found = _evaluate_disk(each)
        do = f"df -h {each.path}; {_OTHER_FOLDER_HINTS[each.what]}" if state != OK else ""
        state = WARN if state == FAIL and each.what == "home" else state
        yield Verdict(f"disk {each.what}", state, found, do)


def _evaluate_disk(each: DiskFacts) -> tuple[str, str]:
    if not each.writable:
        return FAIL, f"{each.path} cannot be written"
    if each.inodes is not None and each.inodes < 1000:
        return FAIL, f"{each.path} has room for {each.inodes} more files"
    state = FAIL if each.free < _DISK_FAIL else WARN if each.free < _DISK_WARN else OK
    return state, f"{format_bytes(each.free)} free in {each.path}"


def check_shm(f: MachineFacts) -> Iterator[Verdict]:
    do = "in a container: docker run --shm-size=8g …; else: mount -o remount,size=8G /dev/shm"
    if f.shm is None:
        yield Verdict("/dev/shm", FAIL, "is not there; NCCL and data loaders need it", do)
        return
    total, free = f.shm
    found = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < _SHM_FAIL:
        yield Verdict("/dev/shm", FAIL, found, do if total < _SHM_WARN else "ls -la /dev/shm")
    elif free < _SHM_WARN:
        yield Verdict("/dev/shm", WARN, f"{found}: data loaders run out of it", do)
    else:
        yield Verdict("/dev/shm", OK, found)


def check_limits(f: MachineFacts) -> Iterator[Verdict]:
    yield _check_limit("open files", f.files, 256, 1024, "ulimit -n", 65536)
    yield _check_limit("processes", f.processes, 128, 1024, "ulimit -u", 4096)
    soft = f.locked.soft
    found = "no limit" if math.isinf(soft) else format_bytes(soft)
    if f.infiniband and not math.isinf(soft):
        do = "ulimit -l unlimited; for all: memlock in /etc/security/limits.conf"
        yield Verdict("locked memory", WARN, f"{found}, and InfiniBand registers more", do)
    else:
        yield Verdict("locked memory", OK, found)


def _check_limit(
    check: str, limit: ResourceLimit, fail: int, warn: int, command: str, wanted: float
) -> Verdict:
    found = "no limit" if math.isinf(limit.soft) else f"{limit.soft:.0f}"
    if limit.soft >= warn:
        return Verdict(check, OK, found)
    do = f"{command} {min(wanted, limit.hard):.0f}"
    if limit.hard < warn:
        do += f"; more needs an administrator: the hard limit is {limit.hard:.0f}"
    return Verdict(check, FAIL if limit.soft < fail else WARN, found, do)


def check_threads(f: MachineFacts) -> Iterator[Verdict]:
    cores = f"{f.cores} core{'s' * (f.cores > 1)}"
    if f.omp is None:
        yield Verdict("threads", OK, f"{cores}; OMP_NUM_THREADS is not set, so launchers choose")
    elif not f.omp.isdecimal() or int(f.omp) == 0:
        found = f"OMP_NUM_THREADS={f.omp} is no number of threads"
        yield Verdict("threads", WARN, found, "unset OMP_NUM_THREADS")
    elif int(f.omp) > f.cores:
        found = f"OMP_NUM_THREADS={f.omp} on {cores}: threads wait for each other"
        yield Verdict("threads", WARN, found, f"export OMP_NUM_THREADS={f.cores}")
    else:
        yield Verdict("threads", OK, f"OMP_NUM_THREADS={f.omp} on {cores}")


def check_wandb(f: MachineFacts) -> Iterator[Verdict]:
    if not f.extras.get("wandb"):
        yield Verdict("wandb", NONE, "not installed; pip install 'echelon[wandb]'")
    elif f.wandb:
        yield Verdict("wandb", NONE, f"{f.wandb}; track=wandb needs one: wandb login")
    else:
        yield Verdict("wandb", OK, "there is a key")


def check_slurm(f: MachineFacts) -> Iterator[Verdict]:
    if f.slurm is None:
        yield Verdict("slurm", NONE, "no Slurm here; launch=slurm is for login nodes")
    elif f.slurm.trouble:
        found = f"{f.slurm.version or 'a client'}, but its controller does not answer: "
        yield Verdict(
            "slurm", WARN, found + f.slurm.trouble, "export SLURM_CONF=FILE; scontrol ping"
        )
    else:
        yield Verdict("slurm", OK, f"{f.slurm.version}, its controller answers")


def check_ssh(f: MachineFacts) -> Iterator[Verdict]:
    if f.ssh is None:
        yield Verdict("ssh", NONE, "no ssh here; launch=ssh needs OpenSSH's client")
    elif f.ssh.trouble:
        yield Verdict("ssh", WARN, f.ssh.trouble, "ssh -V has to work")
    else:
        yield Verdict("ssh", OK, f.ssh.version.partition(",")[0])


def check_clock(f: MachineFacts) -> Iterator[Verdict]:
    if f.now < _EARLIEST_TIME:
        yield Verdict("clock", FAIL, "shows a year long ago", "sudo timedatectl set-ntp true")
    elif f.clock_kept is False:
        found = "no time server keeps it right, as far as the kernel knows"
        yield Verdict("clock", WARN, found, "sudo timedatectl set-ntp true")
    else:
        yield Verdict("clock", OK, "kept right" if f.clock_kept else "set")


def check_host_name(f: MachineFacts) -> Iterator[Verdict]:
    if f.addresses:
        yield Verdict("host name", OK, f"{f.host} is {', '.join(f.addresses)}")
    else:
        do = f"echo '127.0.1.1 {f.host}' | sudo tee -a /etc/hosts"
        yield Verdict("host name", WARN, f"{f.host} leads to no address", do)


RULES: Sequence[Callable[[MachineFacts], Iterable[Verdict]]] = (
    *(
        check_python,
        check_venv,
        check_echelon,
        check_torch,
        check_driver,
        check_capability,
        check_toolkit,
        check_communication,
    ),
    *(
        check_port,
        check_disks,
        check_shm,
        check_limits,
        check_threads,
        check_wandb,
        check_slurm,
        check_ssh,
        check_clock,
        check_host_name,
    ),
)


# --- the smoke test ---


def evaluate_smoke_test(ranks: Sequence[SmokeTestResult]) -> Iterator[Verdict]:
    do = "echelon doctor --json; CUDA_LAUNCH_BLOCKING=1 shows where CUDA fails"
    for number, rank in enumerate(ranks):
        name = f"step {rank.device}" + (f" #{number}" if rank.device == "cpu" else "")
        if rank.loss is None:
            yield Verdict(name, FAIL, f"no step was made: {rank.trouble}", do)
        elif not rank.loss[1] < rank.loss[0]:
            found = f"the loss went from {rank.loss[0]:.4g} to {rank.loss[1]:.4g}"
            yield Verdict(name, FAIL, f"{found}: this device computes wrongly", do)
        else:
            found = f"trained, loss {rank.loss[0]:.3g} to {rank.loss[1]:.3g}"
            yield Verdict(name, OK, f"{found}, {rank.step_s:.2g} s with its start")
    yield _evaluate_all_reduce(ranks)


def _evaluate_all_reduce(ranks: Sequence[SmokeTestResult]) -> Verdict:
    backend = next((r.backend for r in ranks if r.backend), "the process group")
    blamed = [n for n, r in enumerate(ranks) if r.trouble and "waited" not in r.trouble]
    first = blamed[0] if blamed else 0
    if all(rank.is_sum_right for rank in ranks):
        took_s = max(rank.reduce_s for rank in ranks)
        found = f"{backend} across {len(ranks)}, the sum is right, {took_s:.2g} s with its start"
        return Verdict("all-reduce", OK, found)
    if any(rank.is_sum_right is False for rank in ranks):
        wrong = next(n for n, rank in enumerate(ranks) if rank.is_sum_right is False)
        do = "NCCL_P2P_DISABLE=1 echelon doctor; if it is right then, look at the PCIe links"
        return Verdict("all-reduce", FAIL, f"{backend}: the sum is wrong on rank {wrong}", do)
    found = f"{backend}: rank {first} {ranks[first].trouble or 'did not come to it'}"
    return Verdict("all-reduce", FAIL, found, "NCCL_DEBUG=INFO echelon doctor")
