"""What a login node has answered, as values: partitions and their nodes, limits, software."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from echelon.cluster_info.login_probe import NO_SECTION, LoginNode, Section, read_fields
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.slurm.version import SlurmVersion, parse_slurm_version

OLDEST_VERSION = SlurmVersion(20, 11)
"""The oldest that is looked after."""
_GPU = re.compile(r"\bgpu(?::([^:,()]+))?:(\d+)")
_UNUSABLE_FLAGS = {
    *("DOWN", "DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "NOT_RESPONDING", "MAINT"),
    *("ERROR", "UNKNOWN", "FUTURE", "REBOOT", "REBOOT_ISSUED", "RESERVED", "INVALID_REG"),
}
"""Parts of a node's state by which no job of everybody starts there."""
_SHARED_TYPES = re.compile(
    r"nfs|lustre|gpfs|beegfs|ceph|weka|panfs|glusterfs|orangefs|pvfs|afs|quobyte|vast|daos", re.I
)
"""Types of file systems that all nodes of a cluster see."""


@dataclass(frozen=True)
class NodeState:
    """One node as Slurm sees it now."""

    name: str
    condition: str
    """`idle`, `mixed`, `full`, or `down` for one where nothing starts."""
    cpus_free: int
    cpus_total: int
    memory_free_mb: int
    """None where all CPUs are taken: no job reaches memory or GPUs without a CPU."""
    memory_total_mb: int
    gpus_total: Mapping[str, int]
    """By type; GPUs without a type have an empty one."""
    gpus_free: Mapping[str, int]
    partitions: Sequence[str]


@dataclass(frozen=True)
class Partition:
    """A partition, its nodes, and whether this user may use it."""

    name: str
    is_default: bool
    obstacle: str
    """Why this user cannot use it; empty if they can."""
    max_time_s: int | None
    """None: no limit."""
    default_time_s: int | None
    max_nodes: int | None
    waiting: int
    """Jobs that wait for resources or their turn."""
    nodes: Sequence[NodeState] = ()

    @property
    def usable_nodes(self) -> list[NodeState]:
        """Its nodes on which jobs start."""
        return [node for node in self.nodes if node.condition != "down"]

    def count(self, condition: str) -> int:
        """Return how many nodes are idle, mixed, full or down."""
        return sum(node.condition == condition for node in self.nodes)

    def sum_gpus(self) -> dict[str, tuple[int, int]]:
        """Return the GPUs that are free and all that work, by type."""
        total: Counter[str] = Counter()
        free: Counter[str] = Counter()
        for node in self.usable_nodes:
            total.update(node.gpus_total)
            free.update(node.gpus_free)
        return {kind: (free[kind], total[kind]) for kind in sorted(total)}

    def count_all_gpus(self) -> dict[str, int]:
        """Return all GPUs by type, those of nodes that are down now too."""
        total: Counter[str] = Counter()
        for node in self.nodes:
            total.update(node.gpus_total)
        return dict(sorted(total.items()))

    def find_gpus_per_node(self, kind: str) -> int:
        """Return the most GPUs of a type that a node has."""
        return max((node.gpus_total.get(kind, 0) for node in self.nodes), default=0)


@dataclass(frozen=True)
class Association:
    """What Slurm's accounting lets a user do by one account."""

    account: str
    partition: str
    """Empty: all."""
    qos: Sequence[str]
    default_qos: str
    max_jobs: int | None
    max_time_s: int | None


@dataclass(frozen=True)
class QualityOfService:
    """A QoS and its limits."""

    name: str
    priority: int
    max_time_s: int | None
    max_tres_per_user: str
    max_jobs_per_user: int | None


@dataclass(frozen=True)
class SharedFolder:
    """A folder on the login node, and what it is on."""

    path: str
    is_writable: bool
    filesystem: str
    free_kb: int

    @property
    def is_shared(self) -> bool:
        """Whether nodes see it too, as far as the file system tells."""
        return bool(_SHARED_TYPES.search(self.filesystem))


@dataclass(frozen=True)
class ClusterFacts:
    """Everything that was found. What was not asked for is empty."""

    host: str
    user: str
    groups: Sequence[str]
    now: datetime
    version: SlurmVersion | None
    partitions: Sequence[Partition]
    associations: Sequence[Association] = ()
    has_accounting: bool = False
    accounting_error: str = ""
    """Why accounting did not answer, where there is one."""
    cluster: str = ""
    select_type: str = ""
    default_account: str = ""
    qos: Sequence[QualityOfService] = ()
    reservations: Sequence[str] = ()
    licenses: Sequence[str] = ()
    modules: Sequence[str] = ()
    pythons: Sequence[tuple[str, str]] = ()
    """Path and version."""
    containers: Sequence[tuple[str, str]] = ()
    """Name and version."""
    folders: Sequence[SharedFolder] = field(default=())

    def find_partition(self, name: str) -> Partition | None:
        """Return a partition by its name."""
        return next((p for p in self.partitions if p.name == name), None)

    @property
    def default_partition(self) -> Partition | None:
        """The partition of jobs that name none."""
        return next((p for p in self.partitions if p.is_default), None)


def read_facts(node: LoginNode, sections: Mapping[str, Section]) -> ClusterFacts:
    """Return the facts in an answer. Raises an EchelonError where there is no Slurm, or where it
    does not answer."""
    get = {**{name: NO_SECTION for name in _NAMES}, **sections}
    _require_slurm(node, get)
    user = get["user"].text.strip()
    groups = get["groups"].text.split()
    accounts = get["accounts"]
    associations = list(_read_associations(accounts.lines))
    return ClusterFacts(
        host=get["hostname"].text.strip() or node.name,
        user=user,
        groups=groups,
        now=_read_time(get["time"].text),
        version=parse_slurm_version(get["version"].text),
        partitions=_read_partitions(get, groups, associations),
        associations=associations,
        has_accounting=accounts.exit_code == 0,
        accounting_error=_find_accounting_error(accounts),
        **_read_config(get["config"].lines),
        default_account=next(
            (line.split("|")[1] for line in get["user_defaults"].lines if line.count("|")), ""
        ),
        qos=list(_read_qos(get["qos"].lines)),
        reservations=_read_names(get["reservations"].lines, "ReservationName"),
        licenses=_read_names(get["licenses"].lines, "LicenseName"),
        modules=[line.strip() for line in get["modules"].lines],
        pythons=[
            (path, text.removeprefix("Python "))
            for path, text in _split_pairs(get["pythons"].lines)
            if re.fullmatch(r"Python \d+\.\d+\S*", text)
        ],
        containers=[
            (name, _read_version(text)) for name, text in _split_pairs(get["containers"].lines)
        ],
        folders=list(_read_folders(get["folders"].lines)),
    )


_NAMES = (
    *("time", "user", "groups", "hostname", "sbatch", "version", "nodes", "partitions", "waiting"),
    *("accounts", "config", "user_defaults", "qos", "reservations", "licenses", "modules"),
    *("pythons", "containers", "folders"),
)


def _require_slurm(node: LoginNode, get: Mapping[str, Section]) -> None:
    """Raise an EchelonError where Slurm is missing or silent."""
    answer = get["nodes"] if get["nodes"].exit_code else get["partitions"]
    if answer.exit_code == 0:
        return
    if get["sbatch"].exit_code:
        raise EchelonError(
            Fault(
                f"there is no Slurm on {node.name}: sbatch is on no PATH there, not even that of "
                "a login shell",
                "name a login node of a cluster, or load the module that has Slurm in ~/.profile"
                if node.host
                else "name a login node of a cluster: echelon cluster HOST",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    late = "not within 30 s; " if answer.exit_code == 124 else ""
    what = f"{late}{answer.reason}" if answer.text.strip() or not late else late.strip("; ")
    raise EchelonError(
        Fault(
            f"Slurm's controller does not answer {node.name}: {what}",
            "`scontrol ping` there says whether it is up, and SLURM_CONF where its slurm.conf is",
        ),
        exit=ExitCode.NOT_FOUND,
    )


# --- partitions and nodes ---


def _read_partitions(
    get: Mapping[str, Section], groups: Sequence[str], associations: Sequence[Association]
) -> list[Partition]:
    node_fields = [read_fields(line) for line in get["nodes"].lines]
    nodes = [_read_node(fields) for fields in node_fields if "NodeName" in fields]
    waiting: Counter[str] = Counter()
    for line in get["waiting"].lines:
        count, _, rest = line.strip().partition(" ")
        names, _, reason = rest.partition("|")
        if not reason.startswith(("Dependency", "JobHeld", "BeginTime", "JobArrayTaskLimit")):
            for name in names.split(","):
                waiting[name] += int(count)
    found = []
    for line in get["partitions"].lines:
        fields = read_fields(line)
        if not (name := fields.get("PartitionName", "")):
            continue
        found.append(
            Partition(
                name,
                fields.get("Default") == "YES",
                _find_obstacle(fields, groups, associations),
                parse_time_limit(fields.get("MaxTime", "")),
                parse_time_limit(fields.get("DefaultTime", "")),
                _read_count(fields.get("MaxNodes", "")),
                waiting[name],
                [node for node in nodes if name in node.partitions],
            )
        )
    return found


def _find_obstacle(
    fields: Mapping[str, str], groups: Sequence[str], associations: Sequence[Association]
) -> str:
    """Return why a user of these groups and accounts cannot use a partition; empty if they can."""
    if (state := fields.get("State", "UP")) != "UP":
        return f"it is {state}"
    if fields.get("RootOnly") == "YES":
        return "for root only"
    allowed = fields.get("AllowGroups", "ALL")
    if allowed != "ALL" and not set(allowed.split(",")) & set(groups):
        return f"for groups {allowed}"
    if not associations:
        return ""
    name = fields.get("PartitionName", "")
    accounts = {a.account for a in associations if a.partition in ("", name)}
    allowed = fields.get("AllowAccounts", "ALL")
    if allowed != "ALL" and not set(allowed.split(",")) & accounts:
        return f"for accounts {allowed}"
    if accounts and accounts <= set(fields.get("DenyAccounts", "").split(",")):
        return "not for your accounts"
    allowed = fields.get("AllowQos", "ALL")
    qos = {name for a in associations for name in a.qos}
    if allowed != "ALL" and qos and not set(allowed.split(",")) & qos:
        return f"for QoS {allowed}"
    return "" if accounts else "none of your accounts is for it"


def _read_node(fields: Mapping[str, str]) -> NodeState:
    base, *flags = fields.get("State", "UNKNOWN").upper().replace("*", "+NOT_RESPONDING").split("+")
    cpus = _read_count(fields.get("CPUTot", "")) or 0
    taken = _read_count(fields.get("CPUAlloc", "")) or 0
    memory = _read_count(fields.get("RealMemory", "")) or 0
    is_down = bool(_UNUSABLE_FLAGS & {base, *flags})
    condition = {"IDLE": "idle", "MIXED": "mixed", "ALLOCATED": "full"}.get(base, "full")
    gpus = _count_gpus(fields.get("Gres", ""))
    used = _count_gpus(fields.get("GresUsed", ""))
    is_reachable = not is_down and taken < cpus
    return NodeState(
        fields.get("NodeName", ""),
        "down" if is_down else condition,
        0 if is_down else cpus - taken,
        cpus,
        memory - (_read_count(fields.get("AllocMem", "")) or 0) if is_reachable else 0,
        memory,
        gpus,
        {k: max(0, n - used.get(k, 0)) if is_reachable else 0 for k, n in gpus.items()},
        fields.get("Partitions", "").split(","),
    )


def _count_gpus(gres: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for kind, number in _GPU.findall(gres):
        counts[kind] += int(number)
    return dict(counts)


# --- accounting ---


def _read_associations(lines: Sequence[str]) -> Iterator[Association]:
    for line in lines:
        cells = line.split("|")
        if len(cells) >= 6:
            account, partition, qos, default_qos, jobs, wall = cells[:6]
            yield Association(
                account,
                partition,
                [name for name in qos.split(",") if name],
                default_qos,
                _read_count(jobs),
                parse_time_limit(wall),
            )


def _find_accounting_error(accounts: Section) -> str:
    """Return why accounting failed; empty where there is none, which is a kind of cluster."""
    if accounts.exit_code in (0, 126, 127) or "not running a supported" in accounts.text:
        return ""
    return accounts.reason


def _read_qos(lines: Sequence[str]) -> Iterator[QualityOfService]:
    for line in lines:
        cells = line.split("|")
        if len(cells) >= 5:
            name, priority, wall, tres, jobs = cells[:5]
            yield QualityOfService(
                name, _read_count(priority) or 0, parse_time_limit(wall), tres, _read_count(jobs)
            )


def _read_config(lines: Sequence[str]) -> dict[str, str]:
    pairs = (line.partition("=") for line in lines)
    values = {key.strip(): value.strip() for key, _, value in pairs}
    return {
        "cluster": values.get("ClusterName", ""),
        "select_type": values.get("SelectType", "").removeprefix("select/"),
    }


# --- single values ---


def parse_time_limit(text: str) -> int | None:
    """Return the seconds of a limit as Slurm writes it, [D-]H:M:S or M:S; None for no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return days * 86_400 + hours * 3600 + minutes * 60 + seconds


def format_time_limit(seconds: int) -> str:
    """Return seconds as `launch.time` takes them: 4:00:00 or 2-00:00:00."""
    days, rest = divmod(seconds, 86_400)
    minutes = f"{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{rest // 3600:02}:{minutes}" if days else f"{rest // 3600}:{minutes}"


def _read_count(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _read_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError:
        return datetime.now()


def _read_names(lines: Sequence[str], key: str) -> list[str]:
    return [name for line in lines if (name := read_fields(line).get(key))]


def _split_pairs(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if "|" in line:
            name, _, text = line.partition("|")
            yield name, text.strip()


def _read_version(text: str) -> str:
    found = re.search(r"\d+(\.\d+)+\S*", text)
    return found[0] if found else ""


def _read_folders(lines: Sequence[str]) -> Iterator[SharedFolder]:
    for line in lines:
        path, _, rest = line.partition("|")
        may, _, usage = rest.partition("|")
        cells = usage.split()
        if len(cells) >= 7:  # device, type, size, used, free, percent, mounted on
            yield SharedFolder(path, may == "yes", cells[-6], _read_count(cells[-3]) or 0)
