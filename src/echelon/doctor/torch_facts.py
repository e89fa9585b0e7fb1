"""What torch says of itself, printed by a process of its own."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist


def collect_torch_facts() -> dict[str, object]:
    devices, trouble = [], ""
    try:
        if torch.version.cuda or torch.version.hip:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        for i in range(torch.cuda.device_count()):
            devices.append((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)))
    except Exception as error:  # no driver, one that is too old, a device that is gone
        trouble = str(error).splitlines()[0]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": _list_archs(),
        "nccl": _read_nccl_version(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "devices": devices,
        "trouble": trouble,
    }


def _list_archs() -> list[str]:
    """As it was built; torch.cuda.get_arch_list() is empty without a device."""
    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    return str(flags).split() if flags else []


def _read_nccl_version() -> str | None:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, numbers))


if __name__ == "__main__":
    print(json.dumps(collect_torch_facts()))
