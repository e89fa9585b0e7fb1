"""What a person wants to see of it: some GPUs, some users, or those that nobody uses."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping, Sequence

from echelon.errors import EchelonError, Exit, Fault, suggest_nearest
from echelon.gpus.processes import look_up_user_name
from echelon.gpus.state import Gpu, GpuNode
from echelon.gpus.visible_devices import list_visible_gpus

_INDEX = re.compile(r"[0-9]{1,4}")
_MAX_LISTED = 8


def parse_gpu_indices(text: str) -> list[int]:
    """`0,2` and `4-7`. No machine has ten thousand, but a slip of the finger soon does."""
    found: list[int] = []
    wrong = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        last = last if dash else first
        if _INDEX.fullmatch(first) and _INDEX.fullmatch(last) and int(first) <= int(last):
            found += range(int(first), int(last) + 1)
        else:
            wrong.append(word.strip())
    if wrong:
        named = ", ".join(map(repr, wrong))
        raise EchelonError(
            Fault(f"--gpu {text}: {named} is no index", "give indices: --gpu 0,2 or --gpu 4-7")
        )
    return found


def parse_host_names(text: str) -> list[str]:
    """A name that begins with a dash would be an option of ssh's."""
    names = [name.strip() for name in text.split(",")]
    wrong = [name for name in names if not name or name.startswith("-") or " " in name]
    if wrong:
        named = ", ".join(map(repr, wrong))
        raise EchelonError(
            Fault(f"--hosts {text}: {named} is no host", "give names that ssh knows: --hosts a,b")
        )
    return list(dict.fromkeys(names))


def require_indices_exist(wanted: Sequence[int], counts: Sequence[int]) -> None:
    """Of several machines, on one of them at least."""
    most = max(counts, default=0)
    missing = sorted({index for index in wanted if index >= most})
    if missing and most:
        last = most - 1
        known = f"there are 0 to {last}" if last else "there is only 0"
        named = ", ".join(map(str, missing[:_MAX_LISTED])) + ", …" * (len(missing) > _MAX_LISTED)
        raise EchelonError(
            Fault(f"--gpu: there is no GPU {named} here", known),
            exit=Exit.NOT_FOUND,
        )


def filter_node(node: GpuNode, users: Sequence[str], wanted: Sequence[int]) -> GpuNode:
    """With users, the GPUs on which they have a process, and these processes."""
    gpus = [gpu for gpu in node.gpus if not wanted or gpu.index in wanted]
    if users:
        gpus = [
            gpu
            for gpu in (_filter_processes(gpu, users) for gpu in gpus)
            if gpu.list_all_processes()
        ]
    return node._replace(gpus=tuple(gpus))


def _filter_processes(gpu: Gpu, users: Sequence[str]) -> Gpu:
    return gpu._replace(
        processes=tuple(p for p in gpu.processes if p.user in users),
        slices=tuple(
            part._replace(processes=tuple(p for p in part.processes if p.user in users))
            for part in gpu.slices
        ),
    )


def get_current_user() -> str:
    return look_up_user_name(os.getuid())


def require_known_users(users: Sequence[str], nodes: Sequence[GpuNode]) -> None:
    """To this machine, or as somebody who is seen."""
    users_on_gpus = {
        p.user for node in nodes for gpu in node.gpus for p in gpu.list_all_processes() if p.user
    }
    unknown = [user for user in users if user not in users_on_gpus and not _has_account(user)]
    if unknown:
        known = users_on_gpus | {entry.pw_name for entry in pwd.getpwall()}
        raise EchelonError(
            *(
                Fault(f"--user {u}: there is no such user", suggest_nearest(u, known))
                for u in unknown
            ),
            exit=Exit.NOT_FOUND,
        )


def _has_account(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


# --- nobody's ---


def list_idle_gpus(node: GpuNode, env: Mapping[str, str]) -> list[str]:
    """Of those that CUDA_VISIBLE_DEVICES leaves: as CUDA_VISIBLE_DEVICES takes them.

    Where GPUs of several models are mixed, CUDA numbers the fastest first and NVML does not, so
    that only a UUID names the same one to both. Of GPUs that are cut up, only slices can be used.
    """
    allowed = list_visible_gpus(env) if "CUDA_VISIBLE_DEVICES" in env else range(1 << 16)
    gpus = [gpu for gpu in node.gpus if gpu.index in allowed]
    idle = [gpu for gpu in gpus if gpu.idle]
    if gpus and all(gpu.mig for gpu in gpus):
        return [part.uuid for gpu in gpus for part in gpu.slices if part.idle and part.uuid]
    mixed = len({gpu.name for gpu in node.gpus if gpu.name}) > 1
    if mixed and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return [gpu.uuid or str(gpu.index) for gpu in idle]
    return [str(gpu.index) for gpu in idle]
