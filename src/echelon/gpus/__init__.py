"""The GPUs of this machine and of others, and who uses them, read from NVML without torch.

| module | what is in it |
|---|---|
| ``nvml`` | bindings for NVIDIA's management library |
| ``processes`` | what /proc shows about a process on a GPU |
| ``probe`` | reads all GPUs of a machine into plain values |
| ``availability`` | which GPUs a process sees, which are idle, who occupies them |
| ``error_counts`` | which GPUs count errors that they did not count before |
| ``remote`` | the same readings from other machines, over ssh or srun |
| ``formatting`` | values as short text, and lines for a pipe |
| ``terminal`` | the table on a terminal, and the screen that ``--watch`` redraws |
| ``command`` | ``echelon gpus`` |
"""

from __future__ import annotations

from echelon.gpus.availability import count_visible_gpus

__all__ = ["count_visible_gpus"]
