"""Who this process is: rank, size, node, master and devices, and what that was concluded from.

Everything is read from a mapping of variables that is passed in. Nothing here imports torch, opens
a socket or asks the machine. So `echelon explain` answers at once, and a copy of somebody else's
variables explains their world as well as ours.
"""

from echelon.world.detect import detect
from echelon.world.slurm_variables import expand_hostlist
from echelon.world.types import Detection, DetectionReason, DeviceRule, IgnoredVariable, World

__all__ = [
    "Detection",
    "DetectionReason",
    "DeviceRule",
    "IgnoredVariable",
    "World",
    "detect",
    "expand_hostlist",
]
