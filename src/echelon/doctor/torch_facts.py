"""What torch reports about itself: run as ``python -m echelon.doctor.torch_facts``, prints JSON.

It is a program of its own because importing torch takes seconds and a broken CUDA can kill the
process that initializes it.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist


def collect_torch_facts() -> dict[str, object]:
    """Return the fields of ``machine_facts.TorchFacts`` as JSON-serializable values."""
    devices, trouble = [], ""
    try:
        if torch.version.cuda or torch.version.hip:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        for i in range(torch.cuda.device_count()):
            devices.append((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)))
    except Exception as error:  # no driver, a driver that is too old, a device that is lost
        trouble = str(error).splitlines()[0]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": _list_archs(),
        "nccl": read_nccl_version() if dist.is_available() and dist.is_nccl_available() else None,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "devices": devices,
        "trouble": trouble,
    }


def _list_archs() -> list[str]:
    """Return the architectures that torch was built for, such as ``sm_90``.

    torch.cuda.get_arch_list() is not used because it is empty without a device.
    """
    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    return str(flags).split() if flags else []


def read_nccl_version() -> str:
    """Return the version of NCCL that torch was built with: ``2.27.5``."""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    print(json.dumps(collect_torch_facts()))
