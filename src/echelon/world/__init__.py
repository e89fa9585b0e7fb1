"""Who this process is: rank, size, node, master and devices, and why it is thought so.

Everything is read from a mapping of variables that is passed in. Nothing here imports torch, opens
a socket or asks the machine, so `echelon explain` answers in a blink, and a dump of somebody
else's variables explains their world as well as ours.
"""

from echelon.world.detect import detect
from echelon.world.explain import as_json, render
from echelon.world.slurm import expand_hostlist
from echelon.world.value import Detection, DeviceRule, Ignored, Reason, World

__all__ = [
    "Detection",
    "DeviceRule",
    "Ignored",
    "Reason",
    "World",
    "as_json",
    "detect",
    "expand_hostlist",
    "render",
]
