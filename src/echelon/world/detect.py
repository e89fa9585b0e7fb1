"""From environment variables to a world.

The first launcher whose variables are all there decides. The gaps it leaves are filled and marked
as guesses. Whatever else was set is listed as ignored, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from echelon.errors import EchelonError
from echelon.world import slurm_variables
from echelon.world.draft import WorldDraft
from echelon.world.launcher_variables import (
    CLUSTER,
    KNOWN_LAUNCHERS,
    NEVER_READ_VARIABLES,
    SLURM_STEP,
    TORCHRUN,
    LauncherVariables,
    choose_launcher,
)
from echelon.world.master import LOOPBACK, find_master, is_loopback
from echelon.world.types import Detection, DetectionReason, DeviceRule, IgnoredVariable, World

WORLD_FIELDS = ("rank", "size", "local_rank", "local_size", "node_rank", "nodes")


def detect(
    env: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master: str | None = None,
    visible_devices: int = 0,
    devices_per_replica: int = 1,
    share_devices: bool = False,
) -> Detection:
    """Return the world of a process with these variables, with the reasons for every field.

    `rank`, `world_size` and `master` are what was typed, and win over all variables. Everything
    that is wrong is raised at once, as one EchelonError.
    """
    draft = WorldDraft(env)
    if rank is not None or world_size is not None:
        source = None
        _read_explicit(draft, rank, world_size)
    else:
        source = _read_variables(draft)
    if not draft.faults:
        _fill_gaps(draft, master)
        _check_ranges(draft)
    master_address = find_master(draft, source, master)
    rule = _decide_device_rule(
        draft, DeviceRule(visible_devices, devices_per_replica, share_devices)
    )
    if draft.faults:
        raise EchelonError(*draft.faults)
    world = World(
        **{name: draft.values[name] for name in WORLD_FIELDS},
        master=master_address,
        source=draft.source,
        devices=rule.get_device_names(draft.values["local_rank"]),
        settled=not draft.is_guess,
        rule=rule,
    )
    return Detection(
        world, _list_reasons(world, draft), _list_ignored_variables(draft, source, world)
    )


# ---- what decides ------------------------------------------------------------------------------


def _read_explicit(draft: WorldDraft, rank: int | None, world_size: int | None) -> None:
    """Take the rank and the world size that were typed."""
    draft.source = "explicit"
    draft.reasons["source"] = "rank= and world_size= win over all variables"
    if rank is None or world_size is None:
        given, absent = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        value = rank if world_size is None else world_size
        draft.add_fault(
            f"{given}={value} is given without {absent}=",
            f"give both, for example: rank={rank or 0} world_size={world_size or 4}",
        )
        return
    draft.set_value("rank", rank, f"rank={rank}")
    draft.set_value("size", world_size, f"world_size={world_size}")
    if world_size < 1:
        draft.add_fault(f"world_size={world_size} is not a number of processes", "give 1 or more")
    elif not 0 <= rank < world_size:
        draft.add_fault(
            f"rank={rank} is not a rank of world_size={world_size}",
            f"count the ranks from 0 to {world_size - 1}",
        )


def _read_variables(draft: WorldDraft) -> LauncherVariables | None:
    """Read the variables of the launcher that decides; returns it, or None for a single process."""
    env = draft.env
    source = choose_launcher(env)
    if source is None:
        _read_single_process(draft)
        return None
    draft.source = source.name
    if missing := source.list_missing_variables(env):
        _report_missing_variables(draft, source, missing)
        return source
    draft.reasons["source"] = _describe_evidence(draft, source)
    for name in WORLD_FIELDS:
        variable = source.find_variable(env, name)
        if variable and (value := draft.read_integer(variable)) is not None:
            draft.set_value(name, value, draft.quote_variable(variable))
    if special := EXTRA_READERS.get(source.name):
        special(draft)
    return source


def _describe_evidence(draft: WorldDraft, source: LauncherVariables) -> str:
    """Return the variables by which the launcher was recognised."""
    names = [source.find_variable(draft.env, f) for f in ("agent", "step", "rank", "size")]
    found = [name for name in names if name]
    draft.variables_read.update(found)
    return f"{', '.join(found)} are set"


def _read_single_process(draft: WorldDraft) -> None:
    """No launcher: one process."""
    draft.reasons["source"] = "no launcher variables make a world"
    draft.set_value("rank", 0, "one process")
    draft.set_value("size", 1, "one process")
    if fault := slurm_variables.find_pty_task_fault(draft.env):
        draft.faults.append(fault)


def _report_missing_variables(
    draft: WorldDraft, source: LauncherVariables, missing: list[str]
) -> None:
    """Note the fault of a launcher of which only some variables are set."""
    names = [name for names in source.variables.values() for name in names if name in draft.env]
    found = ", ".join(draft.quote_variable(name) for name in names)
    absent = " and ".join(missing)
    if missing == ["NODE_RANK"]:
        absent = "NODE_RANK (or RANK)"
    draft.add_fault(
        f"{found} {'is' if len(names) == 1 else 'are'} set, but not {absent}",
        f"set {absent} as well, or unset {' and '.join(names)} to run as one process",
    )


# ---- what single launchers do in their own way -------------------------------------------------


def _set_layout_without_torchrun(draft: WorldDraft) -> None:
    """RANK and WORLD_SIZE without torchrun: set by hand, by a script, or by a pod's operator."""
    if "LOCAL_RANK" in draft.env:
        return
    draft.source = "torchrun-like variables"
    if "KUBERNETES_SERVICE_HOST" in draft.env and "rank" in draft.values:
        # PyTorchJob sets RANK and WORLD_SIZE per pod, and each pod has its own devices.
        pod = "one process per Kubernetes pod"
        _set_one_process_per_node(draft, pod)


def _set_one_process_per_node(draft: WorldDraft, because: str) -> None:
    """Fill in local rank, node rank and node count where every node has one process."""
    draft.set_value("local_rank", 0, because)
    draft.set_value("local_size", 1, because)
    for name, same in (("node_rank", "rank"), ("nodes", "size")):
        if same in draft.values:
            draft.set_value(name, draft.values[same], because)


def _set_cluster_layout(draft: WorldDraft) -> None:
    """The general-purpose cluster's WORLD_SIZE counts nodes."""
    if "size" in draft.values:
        draft.reasons["size"] += ": WORLD_SIZE counts nodes here"
    _set_one_process_per_node(draft, "one process per node")


def _set_local_size_from_step(draft: WorldDraft) -> None:
    """The step's task counts, one per node, become this node's local size."""
    variable = SLURM_STEP.find_variable(draft.env, "tasks_per_node")
    if not variable:
        return
    try:
        counts = slurm_variables.parse_tasks_per_node(draft.env[variable])
    except ValueError:
        draft.add_fault(
            f"{draft.quote_variable(variable)} is not Slurm's form, like 4(x2),3",
            f"unset {variable}, which srun sets itself",
        )
        return
    node = draft.values.get("node_rank")
    # Counts that do not add up to the step are the allocation's (srun --preserve-env).
    if node is not None and sum(counts) == draft.values.get("size") and node < len(counts):
        draft.set_value("local_size", counts[node], draft.quote_variable(variable))


EXTRA_READERS: dict[str, Callable[[WorldDraft], None]] = {
    TORCHRUN.name: _set_layout_without_torchrun,
    CLUSTER.name: _set_cluster_layout,
    SLURM_STEP.name: _set_local_size_from_step,
}


# ---- filling and checking -----------------------------------------------------------------------


def _fill_gaps(draft: WorldDraft, master: str | None) -> None:
    """Fill what the launcher left open: certain if all ranks are on one machine, else a guess."""
    have, rank, size = draft.values, draft.values["rank"], draft.values["size"]
    together = _explain_single_machine(draft, master)
    put = draft.set_value if together else draft.set_guess
    why = together or "nothing says who is local"
    if "local_rank" not in have:
        put("local_rank", rank, why if size == 1 else f"the rank; {why}")
    if "local_size" not in have:
        even = have.get("nodes") and size % have["nodes"] == 0
        put("local_size", size // have["nodes"] if even else size, why)
    local_size = max(have["local_size"], 1)
    if "nodes" not in have:
        draft.set_value(
            "nodes",
            -(-size // local_size),
            "one process" if size == 1 else f"size {size} / local size {local_size}",
        )
    if "node_rank" not in have and have["nodes"] == 1:
        draft.set_value("node_rank", 0, "one process" if size == 1 else "one node")
    elif "node_rank" not in have:
        draft.set_guess("node_rank", rank // local_size, "ranks fill node by node")


def _explain_single_machine(draft: WorldDraft, master: str | None) -> str | None:
    """Return why all ranks must be on this machine, or None where they need not be."""
    if draft.values["size"] == 1:
        return "one process"
    if draft.source == "explicit":
        host = master or LOOPBACK
    else:
        host = master or draft.env.get("MASTER_ADDR", "")
    return "the master is this machine" if is_loopback(host) else None


def _check_ranges(draft: WorldDraft) -> None:
    """Check that each rank is below its size; both are named as they were set."""
    for small, large in (("rank", "size"), ("local_rank", "local_size"), ("node_rank", "nodes")):
        low, high = draft.reasons[small], draft.reasons[large]
        if draft.values[large] < 1:
            draft.add_fault(f"{high}: a world has at least one process", "set it to 1 or more")
        elif draft.values[small] >= draft.values[large]:
            last = draft.values[large] - 1
            draft.add_fault(
                f"{low}, but {high}: ranks count from 0 to {last}",
                "correct the two, or unset the launcher's variables to run as one process",
            )
    if draft.values["local_size"] > max(draft.values["size"], 1):
        draft.add_fault(
            f"{draft.reasons['local_size']}, but {draft.reasons['size']}: "
            "one machine cannot hold more processes than there are",
            "correct the two",
        )


# ---- the devices --------------------------------------------------------------------------------


def _decide_device_rule(draft: WorldDraft, rule: DeviceRule) -> DeviceRule:
    """Return the device rule of this process, with its reason; a fault where devices are too
    few."""
    if rule.per_replica < 1:
        draft.add_fault(f"{rule.per_replica} devices per replica is too few", "give 1 or more")
    if draft.faults:
        return rule
    local_rank, local_size = draft.values["local_rank"], draft.values["local_size"]
    if draft.source == SLURM_STEP.name and rule.visible == rule.per_replica and local_size > 1:
        cut = slurm_variables.find_device_cut_variable(draft.env, local_size * rule.per_replica)
        if cut:
            draft.reasons["devices"] = f"each task sees only its own: {cut}"
            return DeviceRule(rule.visible, rule.per_replica, rule.share, own=True)
    draft.reasons["devices"] = _describe_device_reason(rule, local_rank)
    # A guessed local rank is not a reason to refuse: `renumber_by_hosts` checks again.
    if not draft.is_guess and (fault := rule.find_fault(local_rank)):
        draft.faults.append(fault)
    return rule


def _describe_device_reason(rule: DeviceRule, local_rank: int) -> str:
    """Return why this process gets these devices."""
    if not rule.visible:
        stages = f": {rule.per_replica} stages of one CPU" if rule.per_replica > 1 else ""
        return f"no CUDA device is visible{stages}"
    each = f", {rule.per_replica} each" if rule.per_replica > 1 else ""
    shared = ", shared as set" if rule.share else ""
    return f"local rank {local_rank}{each}, {rule.visible} visible{shared}"


# ---- what is reported ---------------------------------------------------------------------------


def _list_reasons(world: World, draft: WorldDraft) -> tuple[DetectionReason, ...]:
    """Every decided field with its reason, for `echelon explain`."""
    names = ("source", *WORLD_FIELDS, "master", "devices")
    shown = {"devices": ", ".join(world.devices), "master": world.master or "none"}
    return tuple(
        DetectionReason(name, shown.get(name, str(getattr(world, name))), draft.reasons[name])
        for name in names
    )


def _list_ignored_variables(
    draft: WorldDraft, winner: LauncherVariables | None, world: World
) -> tuple[IgnoredVariable, ...]:
    """Every launcher variable that is set and was not read, with the reason."""
    why: dict[str, str | None] = {}
    for source in KNOWN_LAUNCHERS:
        for names in source.variables.values():
            for name in names:
                # WORLD_SIZE is in two tables: the source that would have come first explains it.
                why.setdefault(name, _explain_ignored_variable(draft, source, winner, names, name))
    why |= NEVER_READ_VARIABLES
    why |= dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), _explain_ignored_master(draft, world))
    return tuple(
        IgnoredVariable(name, draft.env[name], text)
        for name, text in why.items()
        if text and name in draft.env and name not in draft.variables_read
    )


def _explain_ignored_variable(
    draft: WorldDraft,
    source: LauncherVariables,
    winner: LauncherVariables | None,
    names: tuple[str, ...],
    name: str,
) -> str | None:
    """Return why one variable was not read; None if that is not worth a line."""
    if source is winner:
        # Two variables with the same value for one field are not worth a line.
        read = [
            n for n in names if n in draft.variables_read and draft.env[n] != draft.env.get(name)
        ]
        return f"{read[0]} is read instead" if read else None
    if draft.source == "explicit":
        return "rank= and world_size= decide"
    if refusal := source.explain_refusal(draft.env):
        return refusal
    if missing := source.list_missing_variables(draft.env):
        return f"says nothing without {' and '.join(missing)}"
    return f"{draft.source} decides"


def _explain_ignored_master(draft: WorldDraft, world: World) -> str:
    """Return why MASTER_ADDR and MASTER_PORT were not read."""
    if world.master is None:
        return "one process meets nobody"
    return "master= decides" if draft.source != "explicit" else "rank= needs master=HOST:PORT"
