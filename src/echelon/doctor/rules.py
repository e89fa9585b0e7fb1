"""The rules of `echelon doctor`: functions from facts to verdicts, without side effects.

Each ``check_…`` function yields verdicts on one subject. To add a check, write such a function and
list it in ``RULES``, in the order in which verdicts are shown.
"""

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
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = 200 * _MB, 5 * _GB
_SHM_FAIL_BYTES, _SHM_WARN_BYTES = 16 * _MB, 1 * _GB
_MIN_FREE_INODES = 1000
_EARLIEST_TIME = 1_700_000_000
"""A time in 2023: a clock that shows an earlier one was never set."""
_DRIVER_URL = "https://www.nvidia.com/drivers"


def evaluate_machine(facts: MachineFacts) -> list[Verdict]:
    """Return the verdicts of all rules, in their order."""
    return [verdict for rule in RULES for verdict in rule(facts)]


# --- Python and packages ---


def check_python(facts: MachineFacts) -> Iterator[Verdict]:
    """Python is new enough."""
    found = f"{facts.python[0]}.{facts.python[1]}, {facts.executable}"
    if facts.python < _MIN_PYTHON:
        do = "make an environment with Python 3.10 or later: python3.12 -m venv .venv"
        yield Verdict("python", FAIL, found, do)
    else:
        yield Verdict("python", OK, found)


def check_venv(facts: MachineFacts) -> Iterator[Verdict]:
    """Python is that of an environment, not of the system."""
    if facts.venv:
        yield Verdict("environment", OK, facts.venv)
    else:
        yield Verdict(
            "environment",
            WARN,
            "none: this is the system's Python, which other programs share",
            "python3 -m venv .venv && . .venv/bin/activate && pip install "
            f"echelon-{facts.echelon}-py3-none-any.whl",
        )


def check_echelon(facts: MachineFacts) -> Iterator[Verdict]:
    """The version of Echelon and its extras; never a problem."""
    installed = [name for name, is_installed in facts.extras.items() if is_installed]
    missing = [name for name in facts.extras if name not in installed]
    found = f"{facts.echelon}, extras: {', '.join(installed) or 'none'}"
    if missing:
        found += f" (not installed: {', '.join(missing)})"
    yield Verdict("echelon", OK, found)


def check_torch(facts: MachineFacts) -> Iterator[Verdict]:
    """torch can be imported, is new enough, and uses the GPUs of this machine."""
    line = _suggest_wheel(facts)
    if isinstance(facts.torch, str):
        yield Verdict("torch", FAIL, f"cannot be imported: {facts.torch}", line)
        return
    built = f"CUDA {facts.torch.cuda}" if facts.torch.cuda else f"ROCm {facts.torch.hip}"
    built = built if facts.torch.cuda or facts.torch.hip else "the CPU alone"
    found = f"{facts.torch.version}, built for {built}"
    if (parse_version(facts.torch.version) or (0, 0)) < _MIN_TORCH:
        yield Verdict("torch", FAIL, f"{found}; Echelon needs 2.4 or later", line)
    elif _filter_readable_gpus(facts) and not facts.torch.cuda and not facts.torch.hip:
        count = len(_filter_readable_gpus(facts))
        found += f", but this machine has {count} NVIDIA GPU{'s' * (count > 1)}"
        yield Verdict("torch", FAIL, found, line)
    else:
        yield Verdict("torch", OK, found)


def check_driver(facts: MachineFacts) -> Iterator[Verdict]:
    """The driver supports the CUDA version of torch, and all its devices answer."""
    if isinstance(facts.driver, MissingDriver):
        do = "nvidia-smi; sudo modprobe nvidia, or restart the machine" * facts.driver.is_broken
        yield Verdict("driver", WARN if do else NONE, facts.driver.reason, do)
        return
    cuda = facts.driver.cuda
    found = f"{facts.driver.version}, supports CUDA up to {_format_version(cuda)}"
    built = parse_version(facts.torch.cuda) if isinstance(facts.torch, TorchFacts) else None
    if cuda and built and built[0] > cuda[0]:
        found += f", but torch is built for CUDA {_format_version(built)}"
        do = _suggest_wheel(facts) or f"install a later driver: {_DRIVER_URL}"
        yield Verdict("driver", FAIL, found, do)
    elif cuda and built and built > cuda:
        # Minor version compatibility: machine code runs, but PTX cannot be compiled.
        found += f"; torch's {_format_version(built)} runs on it too, but cannot compile for it"
        yield Verdict("driver", OK, found)
    else:
        yield Verdict("driver", OK, found)
    for index, device in enumerate(facts.driver.devices):
        if isinstance(device, str):
            do = "nvidia-smi -q; look for Xid in `dmesg`; reset the GPU or restart the machine"
            yield Verdict(f"gpu {index}", FAIL, f"does not answer: {device}", do)


def check_capability(facts: MachineFacts) -> Iterator[Verdict]:
    """torch has machine code for the GPUs that it sees, and sees some."""
    if isinstance(facts.torch, str) or not facts.torch.cuda or not _filter_readable_gpus(facts):
        return
    if facts.torch.trouble and facts.visible_gpus:
        do = "nvidia-smi; a driver that was updated needs a restart of the machine"
        yield Verdict("cuda", FAIL, f"torch finds no device: {facts.torch.trouble}", do)
    for index, device in enumerate(facts.torch.devices):
        found = f"{device.name}, compute capability {_format_version(device.capability)}"
        name = f"gpu {index}"
        if not facts.torch.archs or is_built_for(facts.torch.archs, device.capability):
            yield Verdict(name, OK, found)
        else:
            found += f", but torch is built for {' '.join(facts.torch.archs)}"
            yield Verdict(name, FAIL, found, _suggest_wheel(facts) or _suggest_driver(facts))
    hidden = len(_filter_readable_gpus(facts)) - facts.visible_gpus
    if hidden > 0:
        yield Verdict(
            "visible",
            OK if facts.visible_gpus else WARN,
            f"{facts.visible_gpus} of {len(_filter_readable_gpus(facts))} GPUs, "
            "by CUDA_VISIBLE_DEVICES",
            "" if facts.visible_gpus else "unset CUDA_VISIBLE_DEVICES",
        )


def _suggest_driver(facts: MachineFacts) -> str:
    """Return which driver would run a torch for these devices."""
    cuda = find_oldest_cuda([d.capability for d in _filter_readable_gpus(facts)])
    if cuda is None:
        return "no wheel of torch supports all of these: choose with CUDA_VISIBLE_DEVICES"
    return f"install a driver for CUDA {_format_version(cuda)} or later: {_DRIVER_URL}"


def check_cuda_toolkit(facts: MachineFacts) -> Iterator[Verdict]:
    """nvcc, if there is one, matches torch's CUDA."""
    built = parse_version(facts.torch.cuda) if isinstance(facts.torch, TorchFacts) else None
    if facts.nvcc_version is None:
        yield Verdict("toolkit", NONE, "no nvcc; it is needed only to compile CUDA code")
    elif built and (parse_version(facts.nvcc_version) or built)[0] != built[0]:
        found = f"nvcc {facts.nvcc_version}, but torch is built for CUDA {_format_version(built)}"
        cuda_home = f"/usr/local/cuda-{_format_version(built)}"
        do = f"put nvcc {built[0]}.x first: export CUDA_HOME={cuda_home}"
        yield Verdict("toolkit", WARN, f"{found}: extensions will not compile", do)
    else:
        yield Verdict("toolkit", OK, f"nvcc {facts.nvcc_version}")


def check_collective_backends(facts: MachineFacts) -> Iterator[Verdict]:
    """torch has the libraries for collectives: NCCL for GPUs, Gloo for CPUs."""
    if isinstance(facts.torch, str):
        return
    line = _suggest_wheel(facts)
    if facts.torch.nccl:
        yield Verdict("nccl", OK, facts.torch.nccl)
    elif facts.torch.cuda and _filter_readable_gpus(facts):
        yield Verdict("nccl", FAIL, "not in this torch: GPUs cannot communicate", line)
    else:
        yield Verdict("nccl", NONE, "not in this torch; only GPUs need it")
    if facts.torch.gloo:
        yield Verdict("gloo", OK, "available")
    else:
        yield Verdict("gloo", FAIL, "not in this torch: processes cannot communicate", line)


def _filter_readable_gpus(facts: MachineFacts) -> list[GpuModel]:
    """Return the GPUs that the driver can read."""
    devices = facts.driver.devices if isinstance(facts.driver, DriverFacts) else ()
    return [d for d in devices if isinstance(d, GpuModel)]


def _suggest_wheel(facts: MachineFacts) -> str:
    """Return the pip command for the torch that fits this machine; empty if none does."""
    capabilities = [gpu.capability for gpu in _filter_readable_gpus(facts)]
    cuda = facts.driver.cuda if isinstance(facts.driver, DriverFacts) and capabilities else None
    return make_install_command(cuda, capabilities)


def _format_version(numbers: Version | None) -> str:
    return ".".join(map(str, numbers)) if numbers else "?"


# --- the machine ---


def check_loopback_port(facts: MachineFacts) -> Iterator[Verdict]:
    """A TCP port can be opened on the loopback interface."""
    if facts.port_fault:
        do = "ip link set lo up; raise net.ipv4.ip_local_port_range if all ports are taken"
        yield Verdict("port", FAIL, f"none can be opened on 127.0.0.1: {facts.port_fault}", do)
    else:
        yield Verdict("port", OK, "one can be opened")


_OTHER_FOLDER_HINTS = {
    "here": "cd to another folder",
    "runs": "give another folder: run.dir=PATH",
    "tmp": "export TMPDIR=PATH",
    "home": "export HOME=PATH; caches of torch and pip are there",
}


def check_disks(facts: MachineFacts) -> Iterator[Verdict]:
    """The folders that a training writes to have space and can be written."""
    for disk in facts.disks:
        state, found = _evaluate_disk(disk)
        do = f"df -h {disk.path}; {_OTHER_FOLDER_HINTS[disk.name]}" if state != OK else ""
        state = WARN if state == FAIL and disk.name == "home" else state  # training needs no home
        yield Verdict(f"disk {disk.name}", state, found, do)


def _evaluate_disk(disk: DiskFacts) -> tuple[str, str]:
    """Return the state of a disk and what was found."""
    if not disk.is_writable:
        return FAIL, f"{disk.path} cannot be written"
    if disk.free_inodes is not None and disk.free_inodes < _MIN_FREE_INODES:
        return FAIL, f"{disk.path} has room for {disk.free_inodes} more files"
    return classify_free_space(
        disk.free_bytes
    ), f"{format_bytes(disk.free_bytes)} free in {disk.path}"


def classify_free_space(free_bytes: int) -> str:
    """Return the state of a disk with this much free space; `echelon preflight` uses it too."""
    if free_bytes < _DISK_FAIL_BYTES:
        return FAIL
    return WARN if free_bytes < _DISK_WARN_BYTES else OK


def check_shm(facts: MachineFacts) -> Iterator[Verdict]:
    """/dev/shm is large enough for NCCL and data loaders; containers have 64 MB."""
    do = "in a container: docker run --shm-size=8g …; else: mount -o remount,size=8G /dev/shm"
    if facts.shm_bytes is None:
        yield Verdict("/dev/shm", FAIL, "does not exist; NCCL and data loaders need it", do)
        return
    total, free = facts.shm_bytes
    found = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < _SHM_FAIL_BYTES:
        yield Verdict("/dev/shm", FAIL, found, do if total < _SHM_WARN_BYTES else "ls -la /dev/shm")
    elif free < _SHM_WARN_BYTES:
        yield Verdict("/dev/shm", WARN, f"{found}: data loaders may run out of it", do)
    else:
        yield Verdict("/dev/shm", OK, found)


def check_limits(facts: MachineFacts) -> Iterator[Verdict]:
    """The limits on open files, processes and locked memory are high enough."""
    yield _check_limit("open files", facts.open_files_limit, 256, 1024, "ulimit -n", 65536)
    yield _check_limit("processes", facts.process_limit, 128, 1024, "ulimit -u", 4096)
    soft = facts.locked_memory_limit.soft
    found = "no limit" if math.isinf(soft) else format_bytes(soft)
    if facts.has_infiniband and not math.isinf(soft):
        do = "ulimit -l unlimited; for all: memlock in /etc/security/limits.conf"
        yield Verdict("locked memory", WARN, f"{found}, and InfiniBand registers more", do)
    else:
        yield Verdict("locked memory", OK, found)


def _check_limit(
    check: str, limit: ResourceLimit, fail: int, warn: int, command: str, wanted: float
) -> Verdict:
    """Return the verdict on a limit, with the command that raises it as far as the hard limit."""
    found = "no limit" if math.isinf(limit.soft) else f"{limit.soft:.0f}"
    if limit.soft >= warn:
        return Verdict(check, OK, found)
    do = f"{command} {min(wanted, limit.hard):.0f}"
    if limit.hard < warn:
        do += f"; more needs an administrator: the hard limit is {limit.hard:.0f}"
    return Verdict(check, FAIL if limit.soft < fail else WARN, found, do)


def check_threads(facts: MachineFacts) -> Iterator[Verdict]:
    """OMP_NUM_THREADS, if it is set, does not exceed the cores."""
    cores = f"{facts.core_count} core{'s' * (facts.core_count > 1)}"
    if facts.omp_num_threads is None:
        yield Verdict("threads", OK, f"{cores}; OMP_NUM_THREADS is not set, so launchers choose")
    elif not facts.omp_num_threads.isdecimal() or int(facts.omp_num_threads) == 0:
        found = f"OMP_NUM_THREADS={facts.omp_num_threads} is not a number of threads"
        yield Verdict("threads", WARN, found, "unset OMP_NUM_THREADS")
    elif int(facts.omp_num_threads) > facts.core_count:
        found = f"OMP_NUM_THREADS={facts.omp_num_threads} on {cores}: threads wait for each other"
        yield Verdict("threads", WARN, found, f"export OMP_NUM_THREADS={facts.core_count}")
    else:
        yield Verdict("threads", OK, f"OMP_NUM_THREADS={facts.omp_num_threads} on {cores}")


def check_wandb(facts: MachineFacts) -> Iterator[Verdict]:
    """The wandb package has an API key; never a problem, because tracking is optional."""
    if not facts.extras.get("wandb"):
        yield Verdict("wandb", NONE, "not installed; pip install 'echelon[wandb]'")
    elif facts.wandb_fault:
        yield Verdict("wandb", NONE, f"{facts.wandb_fault}; track=wandb needs one: wandb login")
    else:
        yield Verdict("wandb", OK, "there is an API key")


def check_slurm(facts: MachineFacts) -> Iterator[Verdict]:
    """Slurm's controller answers, if its client is installed."""
    if facts.slurm is None:
        yield Verdict("slurm", NONE, "not installed; launch=slurm needs it, on a login node")
    elif facts.slurm.trouble:
        found = f"{facts.slurm.version or 'a client'}, but its controller does not answer: "
        yield Verdict(
            "slurm", WARN, found + facts.slurm.trouble, "export SLURM_CONF=FILE; scontrol ping"
        )
    else:
        yield Verdict("slurm", OK, f"{facts.slurm.version}, its controller answers")


def check_ssh(facts: MachineFacts) -> Iterator[Verdict]:
    """OpenSSH's client works, if it is installed."""
    if facts.ssh is None:
        yield Verdict("ssh", NONE, "not installed; launch=ssh needs OpenSSH's client")
    elif facts.ssh.trouble:
        yield Verdict("ssh", WARN, facts.ssh.trouble, "ssh -V has to work")
    else:
        yield Verdict("ssh", OK, facts.ssh.version.partition(",")[0])


def check_clock(facts: MachineFacts) -> Iterator[Verdict]:
    """The clock is set and synchronized; certificates and logs need that."""
    if facts.now < _EARLIEST_TIME:
        yield Verdict(
            "clock",
            FAIL,
            "was never set: it shows a year before 2023",
            "sudo timedatectl set-ntp true",
        )
    elif facts.is_clock_synchronized is False:
        found = "not synchronized with a time server, as far as the kernel knows"
        yield Verdict("clock", WARN, found, "sudo timedatectl set-ntp true")
    else:
        yield Verdict("clock", OK, "synchronized" if facts.is_clock_synchronized else "set")


def check_host_name(facts: MachineFacts) -> Iterator[Verdict]:
    """The host's own name resolves, which Gloo needs."""
    if facts.addresses:
        yield Verdict("host name", OK, f"{facts.host} is {', '.join(facts.addresses)}")
    else:
        do = f"echo '127.0.1.1 {facts.host}' | sudo tee -a /etc/hosts"
        yield Verdict("host name", WARN, f"{facts.host} does not resolve to an address", do)


RULES: Sequence[Callable[[MachineFacts], Iterable[Verdict]]] = (
    *(
        check_python,
        check_venv,
        check_echelon,
        check_torch,
        check_driver,
        check_capability,
        check_cuda_toolkit,
        check_collective_backends,
    ),
    *(
        check_loopback_port,
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


def evaluate_smoke_test(results: Sequence[SmokeTestResult]) -> Iterator[Verdict]:
    """Yield a verdict per rank of the smoke test, and one on their all-reduce."""
    do = "echelon doctor --json; CUDA_LAUNCH_BLOCKING=1 shows where CUDA fails"
    for number, result in enumerate(results):
        name = f"step {result.device}" + (f" #{number}" if result.device == "cpu" else "")
        if result.loss is None:
            yield Verdict(name, FAIL, f"no step was completed: {result.trouble}", do)
        elif not result.loss[1] < result.loss[0]:  # false for NaN, too
            found = f"the loss went from {result.loss[0]:.4g} to {result.loss[1]:.4g}"
            yield Verdict(name, FAIL, f"{found}: this device computes wrongly", do)
        else:
            found = f"trained, loss {result.loss[0]:.3g} to {result.loss[1]:.3g}"
            yield Verdict(name, OK, f"{found}, {result.step_s:.2g} s including startup")
    yield _evaluate_all_reduce(results)


def _evaluate_all_reduce(results: Sequence[SmokeTestResult]) -> Verdict:
    """Return the verdict on the all-reduce; ranks that only waited are not blamed."""
    backend = next((r.backend for r in results if r.backend), "the process group")
    if all(result.is_sum_right for result in results):
        took_s = max(result.reduce_s for result in results)
        found = (
            f"{backend} across {len(results)}, the sum is right, {took_s:.2g} s including startup"
        )
        return Verdict("all-reduce", OK, found)
    if any(result.is_sum_right is False for result in results):
        wrong = next(n for n, result in enumerate(results) if result.is_sum_right is False)
        do = "NCCL_P2P_DISABLE=1 echelon doctor; if it is right then, check the PCIe links"
        return Verdict("all-reduce", FAIL, f"{backend}: the sum is wrong on rank {wrong}", do)
    blamed = [n for n, r in enumerate(results) if r.trouble and "waited" not in r.trouble]
    first = blamed[0] if blamed else 0
    found = f"{backend}: rank {first} {results[first].trouble or 'did not get to it'}"
    return Verdict("all-reduce", FAIL, found, "NCCL_DEBUG=INFO echelon doctor")
