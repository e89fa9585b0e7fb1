"""The one rule of whether processes fit onto devices, and the sentences that report a misfit.

A process holds `devices_per_replica` devices of its own, unless sharing was asked for. Whoever has
to decide this asks here: the configuration (launch.gpus_per_node), a launcher's plan (the devices
visible on this machine), a host of launch=ssh, a node that joins a run, and a single rank that
needs to know its devices.
"""

from __future__ import annotations

from enum import Enum

from echelon.errors import Fault


class DeviceCountMismatch(Enum):
    """Why processes do not fit onto the devices of one machine."""

    TOO_FEW_DEVICES = "one replica takes more devices than there are"
    TOO_MANY_PROCESSES = "the processes together take more devices than there are"
    DEVICES_LEFT_OVER = "the devices do not divide by those of one replica"


def find_device_count_mismatch(
    devices: int, devices_per_replica: int, procs: int | None, share_devices: bool = False
) -> DeviceCountMismatch | None:
    """Decide whether `procs` processes of `devices_per_replica` devices each fit onto `devices`.

    Returns None where they do, where devices are shared on purpose, and on a machine without
    devices, which trains on its CPU. `procs` None means as many processes as fit. Devices may be
    left over only where the number of processes was given, because then it is intended.
    """
    if not devices or share_devices:
        return None
    max_procs, left_over = divmod(devices, devices_per_replica)
    if not max_procs:
        return DeviceCountMismatch.TOO_FEW_DEVICES
    if procs is not None and procs > max_procs:
        return DeviceCountMismatch.TOO_MANY_PROCESSES
    if procs is None and left_over:
        return DeviceCountMismatch.DEVICES_LEFT_OVER
    return None


def get_default_process_count(devices: int, devices_per_replica: int) -> int:
    """Return one process for every `devices_per_replica` devices; one process without devices."""
    return max(1, devices // devices_per_replica)


def describe_visible_count(devices: int) -> str:
    """`1 device is visible`, `4 devices are visible`."""
    return f"{devices} device{'s are' if devices > 1 else ' is'} visible"


def find_visible_fit_fault(
    visible_devices: int,
    devices_per_replica: int,
    procs: int | None,
    share_devices: bool = False,
    location: str = "",
) -> Fault | None:
    """Return the fault of a machine whose visible devices do not take these processes, or None.

    `location` names the machine where it is not this one, with a space before it: ` on node1`.
    """
    misfit = find_device_count_mismatch(visible_devices, devices_per_replica, procs, share_devices)
    if misfit is None:
        return None
    max_procs, left_over = divmod(visible_devices, devices_per_replica)
    visible_text = describe_visible_count(visible_devices) + location
    if misfit is DeviceCountMismatch.TOO_FEW_DEVICES:
        return Fault(
            f"replica.devices={devices_per_replica}, but {visible_text}",
            f"make {devices_per_replica} visible (CUDA_VISIBLE_DEVICES), or set "
            f"replica.devices={visible_devices}",
        )
    if misfit is DeviceCountMismatch.DEVICES_LEFT_OVER:
        used = max_procs * devices_per_replica
        return Fault(
            f"{visible_devices} visible devices{location} do not divide by "
            f"replica.devices={devices_per_replica}: {max_procs} "
            f"replica{'s' * (max_procs > 1)} would use {used}",
            f"set CUDA_VISIBLE_DEVICES to {used} of them, or launch.procs={max_procs} to leave "
            f"{left_over} idle",
        )
    if devices_per_replica > 1:
        return Fault(
            f"launch.procs={procs} with replica.devices={devices_per_replica} take "
            f"{(procs or 0) * devices_per_replica} devices, but {visible_text}",
            f"set launch.procs={max_procs}, or make more devices visible (CUDA_VISIBLE_DEVICES)",
        )
    return Fault(
        f"launch.procs={procs}, but {visible_text}, so that two processes would share one",
        f"set launch.procs={max_procs} (slots={max_procs} in a hostfile), make more devices "
        "visible, or allow it with launch.share_devices=true",
    )
