"""From variables to a world.

The first launcher whose variables are all there decides; the gaps it leaves are filled and
marked as guesses; whatever else was set is listed as ignored, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from echelon.errors import EchelonError
from echelon.world import slurm
from echelon.world.draft import Draft
from echelon.world.master import HERE, find_master, is_loopback
from echelon.world.sources import CLUSTER, NEVER_READ, SLURM_STEP, SOURCES, TORCHRUN, Source, choose
from echelon.world.value import Detection, DeviceRule, Ignored, Reason, World

FIELDS = ("rank", "size", "local_rank", "local_size", "node_rank", "nodes")


def detect(
    env: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master: str | None = None,
    visible: int = 0,
    devices_per_replica: int = 1,
    share_devices: bool = False,
) -> Detection:
    """Who this process is. Everything that is wrong is raised at once, as one EchelonError."""
    draft = Draft(env)
    if rank is not None or world_size is not None:
        source = None
        _read_explicit(draft, rank, world_size)
    else:
        source = _read_variables(draft)
    if not draft.faults:
        _fill_gaps(draft, master)
        _check_ranges(draft)
    meeting = find_master(draft, source, master)
    rule = _device_rule(draft, DeviceRule(visible, devices_per_replica, share_devices))
    if draft.faults:
        raise EchelonError(*draft.faults)
    world = World(
        **{name: draft.values[name] for name in FIELDS},
        master=meeting,
        source=draft.source,
        devices=rule.names(draft.values["local_rank"]),
        settled=not draft.guessed,
        rule=rule,
    )
    return Detection(world, _reasons(world, draft), _ignored(draft, source, world))


# ---- what decides ------------------------------------------------------------------------------


def _read_explicit(draft: Draft, rank: int | None, world_size: int | None) -> None:
    draft.source = "explicit"
    draft.because["source"] = "rank= and world_size= win over all variables"
    if rank is None or world_size is None:
        given, absent = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        value = rank if world_size is None else world_size
        draft.wrong(
            f"{given}={value} is given without {absent}=",
            f"give both, for example: rank={rank or 0} world_size={world_size or 4}",
        )
        return
    draft.put("rank", rank, f"rank={rank}")
    draft.put("size", world_size, f"world_size={world_size}")
    if world_size < 1:
        draft.wrong(f"world_size={world_size} is not a number of processes", "give 1 or more")
    elif not 0 <= rank < world_size:
        draft.wrong(
            f"rank={rank} is not a rank of world_size={world_size}",
            f"count the ranks from 0 to {world_size - 1}",
        )


def _read_variables(draft: Draft) -> Source | None:
    """Read the source that decides; None where the process is alone."""
    env = draft.env
    source = choose(env)
    if source is None:
        _read_nothing(draft)
        return None
    draft.source = source.name
    if missing := source.missing(env):
        _explain_missing(draft, source, missing)
        return source
    draft.because["source"] = _evidence(draft, source)
    for name in FIELDS:
        variable = source.known_as(env, name)
        if variable and (value := draft.integer(variable)) is not None:
            draft.put(name, value, draft.quote(variable))
    if special := SPECIAL.get(source.name):
        special(draft)
    return source


def _evidence(draft: Draft, source: Source) -> str:
    names = [source.known_as(draft.env, f) for f in ("agent", "step", "rank", "size")]
    found = [name for name in names if name]
    draft.read.update(found)
    return f"{', '.join(found)} are set"


def _read_nothing(draft: Draft) -> None:
    draft.because["source"] = "no launcher variables make a world"
    draft.put("rank", 0, "one process")
    draft.put("size", 1, "one process")
    if fault := slurm.lost_task(draft.env):
        draft.faults.append(fault)


def _explain_missing(draft: Draft, source: Source, missing: list[str]) -> None:
    """Some of a launcher's variables without the others: nobody can tell what was meant."""
    names = [name for names in source.variables.values() for name in names if name in draft.env]
    found = ", ".join(draft.quote(name) for name in names)
    absent = " and ".join(missing)
    if missing == ["NODE_RANK"]:
        absent = "NODE_RANK (or RANK)"
    draft.wrong(
        f"{found} {'is' if len(names) == 1 else 'are'} set, but not {absent}",
        f"set {absent} as well, or unset {' and '.join(names)} to run as one process",
    )


# ---- what single sources say in their own way --------------------------------------------------


def _plain_rank(draft: Draft) -> None:
    """RANK and WORLD_SIZE without torchrun: set by hand, by a script, or by a pod's operator."""
    if "LOCAL_RANK" in draft.env:
        return
    draft.source = "torchrun-like variables"
    if "KUBERNETES_SERVICE_HOST" in draft.env and "rank" in draft.values:
        # PyTorchJob sets RANK and WORLD_SIZE per pod, and each pod has its own devices.
        pod = "one process per Kubernetes pod"
        _one_per_node(draft, pod)


def _one_per_node(draft: Draft, because: str) -> None:
    draft.put("local_rank", 0, because)
    draft.put("local_size", 1, because)
    for name, same in (("node_rank", "rank"), ("nodes", "size")):
        if same in draft.values:
            draft.put(name, draft.values[same], because)


def _nodes_counted(draft: Draft) -> None:
    if "size" in draft.values:
        draft.because["size"] += ": WORLD_SIZE counts nodes here"
    _one_per_node(draft, "one process per node")


def _step_tasks(draft: Draft) -> None:
    """The step's task counts, one per node, become this node's local size."""
    variable = SLURM_STEP.known_as(draft.env, "tasks_per_node")
    if not variable:
        return
    try:
        counts = slurm.tasks_per_node(draft.env[variable])
    except ValueError:
        draft.wrong(
            f"{draft.quote(variable)} is not Slurm's form, like 4(x2),3",
            f"unset {variable}, which srun sets itself",
        )
        return
    node = draft.values.get("node_rank")
    # Counts that do not add up to the step are the allocation's (srun --preserve-env).
    if node is not None and sum(counts) == draft.values.get("size") and node < len(counts):
        draft.put("local_size", counts[node], draft.quote(variable))


SPECIAL: dict[str, Callable[[Draft], None]] = {
    TORCHRUN.name: _plain_rank,
    CLUSTER.name: _nodes_counted,
    SLURM_STEP.name: _step_tasks,
}


# ---- filling and checking -----------------------------------------------------------------------


def _fill_gaps(draft: Draft, master: str | None) -> None:
    """Whatever the source left open, certain where one machine is certain, else a guess."""
    have, rank, size = draft.values, draft.values["rank"], draft.values["size"]
    together = _all_here(draft, master)
    put = draft.put if together else draft.guess
    why = together or "nothing says who is local"
    if "local_rank" not in have:
        put("local_rank", rank, why if size == 1 else f"the rank; {why}")
    if "local_size" not in have:
        even = have.get("nodes") and size % have["nodes"] == 0
        put("local_size", size // have["nodes"] if even else size, why)
    local_size = max(have["local_size"], 1)
    if "nodes" not in have:
        draft.put(
            "nodes",
            -(-size // local_size),
            "one process" if size == 1 else f"size {size} / local size {local_size}",
        )
    if "node_rank" not in have and have["nodes"] == 1:
        draft.put("node_rank", 0, "one process" if size == 1 else "one node")
    elif "node_rank" not in have:
        draft.guess("node_rank", rank // local_size, "ranks fill node by node")


def _all_here(draft: Draft, master: str | None) -> str | None:
    """Why all ranks must be on this machine, or None where they need not be."""
    if draft.values["size"] == 1:
        return "one process"
    if draft.source == "explicit":
        host = master or HERE
    else:
        host = master or draft.env.get("MASTER_ADDR", "")
    return "the master is this machine" if is_loopback(host) else None


def _check_ranges(draft: Draft) -> None:
    """Each rank below its size; both are named as they were set."""
    for small, large in (("rank", "size"), ("local_rank", "local_size"), ("node_rank", "nodes")):
        low, high = draft.because[small], draft.because[large]
        if draft.values[large] < 1:
            draft.wrong(f"{high}: a world has at least one process", "set it to 1 or more")
        elif draft.values[small] >= draft.values[large]:
            last = draft.values[large] - 1
            draft.wrong(
                f"{low}, but {high}: ranks count from 0 to {last}",
                "correct the two, or unset the launcher's variables to run as one process",
            )
    if draft.values["local_size"] > max(draft.values["size"], 1):
        draft.wrong(
            f"{draft.because['local_size']}, but {draft.because['size']}: "
            "one machine cannot hold more processes than there are",
            "correct the two",
        )


# ---- the devices --------------------------------------------------------------------------------


def _device_rule(draft: Draft, rule: DeviceRule) -> DeviceRule:
    """The rule for this process, with its reason; a fault where devices are too few."""
    if rule.per_replica < 1:
        draft.wrong(f"{rule.per_replica} devices per replica is too few", "give 1 or more")
    if draft.faults:
        return rule
    local_rank, local_size = draft.values["local_rank"], draft.values["local_size"]
    if draft.source == SLURM_STEP.name and rule.visible == rule.per_replica and local_size > 1:
        cut = slurm.devices_cut_per_task(draft.env, local_size * rule.per_replica)
        if cut:
            draft.because["devices"] = f"each task sees only its own: {cut}"
            return DeviceRule(rule.visible, rule.per_replica, rule.share, own=True)
    draft.because["devices"] = _device_reason(rule, local_rank)
    # A guessed local rank is no reason to refuse: placed() will look again.
    if not draft.guessed and (fault := rule.fault(local_rank)):
        draft.faults.append(fault)
    return rule


def _device_reason(rule: DeviceRule, local_rank: int) -> str:
    if not rule.visible:
        stages = f": {rule.per_replica} stages of one CPU" if rule.per_replica > 1 else ""
        return f"no CUDA device is visible{stages}"
    each = f", {rule.per_replica} each" if rule.per_replica > 1 else ""
    shared = ", shared as set" if rule.share else ""
    return f"local rank {local_rank}{each}, {rule.visible} visible{shared}"


# ---- what is told -------------------------------------------------------------------------------


def _reasons(world: World, draft: Draft) -> tuple[Reason, ...]:
    names = ("source", *FIELDS, "master", "devices")
    shown = {"devices": ", ".join(world.devices), "master": world.master or "none"}
    return tuple(
        Reason(name, shown.get(name, str(getattr(world, name))), draft.because[name])
        for name in names
    )


def _ignored(draft: Draft, winner: Source | None, world: World) -> tuple[Ignored, ...]:
    """Every launcher variable that is set and was not read, with the reason."""
    why: dict[str, str | None] = {}
    for source in SOURCES:
        for names in source.variables.values():
            for name in names:
                # WORLD_SIZE is in two tables: the source that would have come first explains it.
                why.setdefault(name, _why_ignored(draft, source, winner, names, name))
    why |= NEVER_READ
    why |= dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), _why_no_master(draft, world))
    return tuple(
        Ignored(name, draft.env[name], text)
        for name, text in why.items()
        if text and name in draft.env and name not in draft.read
    )


def _why_ignored(
    draft: Draft, source: Source, winner: Source | None, names: tuple[str, ...], name: str
) -> str | None:
    if source is winner:
        # Two names of one fact that say the same are not worth a line.
        read = [n for n in names if n in draft.read and draft.env[n] != draft.env.get(name)]
        return f"{read[0]} is read instead" if read else None
    if draft.source == "explicit":
        return "rank= and world_size= decide"
    if refusal := source.refuses(draft.env):
        return refusal
    if missing := source.missing(draft.env):
        return f"says nothing without {' and '.join(missing)}"
    return f"{draft.source} decides"


def _why_no_master(draft: Draft, world: World) -> str:
    if world.master is None:
        return "one process meets nobody"
    return "master= decides" if draft.source != "explicit" else "rank= needs master=HOST:PORT"
