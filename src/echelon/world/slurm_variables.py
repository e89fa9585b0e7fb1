"""What Slurm's variables mean: real steps, host lists, task counts, a port for the step."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from itertools import product
from pathlib import PurePath

from echelon.errors import Fault

# slurm.h: the steps Slurm makes for itself (interactive shell, batch script, extern, pending) have
# the highest ids of 32 bits. Slurm prints them as unsigned in one place and as signed in another.
FIRST_RESERVED_STEP = 0xFFFFFFFA

TERMINAL_VARIABLES = ("SLURM_PTY_PORT", "SLURM_PTY_WIN_ROW")


def explain_not_a_step(env: Mapping[str, str]) -> str | None:
    """Return why this process is not a task of a step, or None where it is one.

    The variables of the allocation (SLURM_NTASKS among them) are also set in a `salloc` shell and
    in the batch script itself, where exactly one process runs.
    """
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if not re.fullmatch(r"-?\d+", step):
        return "the allocation's; no srun step: one process"
    if int(step) % 2**32 >= FIRST_RESERVED_STEP:
        return "a batch script or shell: one process"
    if _is_in_terminal(env):
        return "opened by srun --pty: one process"
    return None


def _is_in_terminal(env: Mapping[str, str]) -> bool:
    """Return whether this process was typed into a shell that `srun --pty` opened.

    Slurm never removes its terminal variables, so an `srun` typed into such a shell (every
    `salloc` shell, where the site has interactive steps) hands them to real tasks. Shells put the
    program they start into `_`: a task started by srun itself still has srun there.
    """
    return (
        any(name in env for name in TERMINAL_VARIABLES)
        and PurePath(env.get("_", "")).name != "srun"
    )


def find_pty_task_fault(env: Mapping[str, str]) -> Fault | None:
    """Return the fault of a task that has a terminal's variables and is not the first; None if all
    is well.

    Only task 0 of a step has the terminal. Taking the others for single processes would start the
    same training several times.
    """
    task = env.get("SLURM_PROCID", "0")
    found = [name for name in TERMINAL_VARIABLES if name in env]
    if not found or task == "0" or not explain_not_a_step(env):
        return None
    return Fault(
        f"{found[0]} says this is a terminal opened by srun --pty, which is one process, "
        f"but SLURM_PROCID={task} says it is one task of several",
        "type `unset SLURM_PTY_PORT SLURM_PTY_WIN_COL SLURM_PTY_WIN_ROW` before srun, "
        "or give rank= and world_size=",
    )


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of a Slurm host list: `n[1-3,7],gpu-[01-04]` → n1, n2, n3, n7, gpu-01 …

    Raises ValueError where the text is not a host list.
    """
    return [host for word in _split_hostlist(text) for host in _expand_word(word)]


def _split_hostlist(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    words = re.findall(r"(?:[^\[\],]|\[[^\[\]]*\])+", text)
    if ",".join(words) != text:
        raise ValueError(f"{text!r} is not a Slurm host list")
    return words


def _expand_word(word: str) -> list[str]:
    """Expand one word with any number of brackets; the last bracket counts fastest, as in Slurm."""
    pieces = re.split(r"\[([^\]]*)\]", word)
    choices = [_expand_ranges(p) if i % 2 else [p] for i, p in enumerate(pieces)]
    return ["".join(parts) for parts in product(*choices)]


def _expand_ranges(text: str) -> list[str]:
    """`1-3,7` → 1, 2, 3, 7. The width of the first number is kept: `08-10` → 08, 09, 10."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{text!r} is not a range of hosts")
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def parse_tasks_per_node(text: str) -> list[int]:
    """`4(x2),3` → 4, 4, 3. Raises ValueError where the text is something else."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"{text!r} is not a list of tasks per node")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def derive_step_port(env: Mapping[str, str]) -> int:
    """Return a port that is the same on every task of a step, and another one for the next step or
    job.

    It is below 32768, where Linux begins to give ports to clients.
    """
    step = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return 20000 + zlib.crc32(step.encode()) % 12000


def find_device_cut_variable(env: Mapping[str, str], needed_devices: int) -> str | None:
    """Return the variable that shows that each task sees only its own devices, or None.

    `needed_devices` is what all tasks of this node hold together. Where the step holds that many
    here while a task sees only its share, the share was cut for it (--gpus-per-task, --gpu-bind).
    """
    if env.get("SLURM_GPUS_PER_TASK"):
        return f"SLURM_GPUS_PER_TASK={env['SLURM_GPUS_PER_TASK']}"
    if "gpu" in env.get("SLURM_TRES_PER_TASK", ""):
        return f"SLURM_TRES_PER_TASK={env['SLURM_TRES_PER_TASK']}"
    if len(env.get("SLURM_STEP_GPUS", "").split(",")) >= needed_devices:
        return f"SLURM_STEP_GPUS={env['SLURM_STEP_GPUS']}"
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    return (
        f"SLURM_GPUS_ON_NODE={on_node}"
        if on_node.isdigit() and int(on_node) >= needed_devices
        else None
    )
