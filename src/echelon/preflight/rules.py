"""From what the nodes found to verdicts, each with the node it is about. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from echelon.doctor.verdict import FAIL, NONE, OK, WARN, Verdict
from echelon.utils.text import format_bytes

NODE_CHECKS = (
    *("start", "versions", "code", "name", "tcp", "interface", "clock", "folder", "disk"),
    *("gpus", "link", "all-reduce"),
)
_DISK_FAIL, _DISK_WARN = 200 * 10**6, 5 * 10**9
_CLOCK_WARN_S, _CLOCK_FAIL_S = 0.5, 60.0
_SLOW_BYTES_PER_S = 100e6 / 8
"""Bytes a second, of a link on which no training across nodes pays."""
_SLOW_RATIO = 4.0
"""So many times slower than the usual link is worth a word."""

Answer = Mapping[str, Any]


class NodeVerdict(NamedTuple):
    node: int
    verdict: Verdict


class LinkSpeed(NamedTuple):
    sender: int
    receiver: int
    bytes_per_s: float | None
    """Bytes a second; None: nothing came."""
    trouble: str = ""


@dataclass(frozen=True)
class NodeObservations:
    """All that was found out."""

    kind: str
    """The launcher's."""
    names: Sequence[str]
    absent: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Nodes that did not come: why, and what to do."""
    looks: Mapping[int, Answer] = field(default_factory=dict)
    meets: Mapping[int, Answer] = field(default_factory=dict)
    links: Sequence[LinkSpeed] = ()
    reduces: Mapping[int, Answer] = field(default_factory=dict)
    reduced_bytes: int = 0
    not_reduced: str = ""
    """Why no all-reduce was tried."""
    out_of_time: bool = False

    def get_name(self, node: int) -> str:
        return str(self.looks.get(node, {}).get("host") or self.names[node])

    def find_slowest_node(self) -> int | None:
        """The node whose links are slowest; of two, both have the same."""
        rates = {
            n: r for n in range(len(self.names)) if (r := self.compute_median_rate(n)) is not None
        }
        return min(rates, key=rates.__getitem__) if len(rates) > 2 else None

    def compute_median_rate(self, node: int) -> float | None:
        rates = [k.bytes_per_s for k in self.links if node in k[:2] and k.bytes_per_s is not None]
        return median(rates) if rates else None


def evaluate_nodes(observations: NodeObservations) -> list[NodeVerdict]:
    rules = (
        _check_start,
        _check_versions,
        _check_code,
        _check_names,
        _check_tcp,
        _check_interface,
        _check_clock,
        _check_folder,
        _check_disk,
        _check_gpus,
    )
    return [
        *(
            NodeVerdict(node, verdict)
            for rule in rules
            for node in range(len(observations.names))
            if node not in observations.absent or rule is _check_start
            for verdict in rule(observations, node)
        ),
        *_check_links(observations),
        *(
            _check_all_reduce(observations)
            if observations.reduces or observations.not_reduced
            else ()
        ),
    ]


def _check_start(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    if node in seen.absent:
        yield Verdict("start", FAIL, *seen.absent[node])
    elif trouble := _describe_silence(seen.looks, node):
        yield Verdict("start", FAIL, trouble, "echelon doctor, on that node")
    else:
        yield Verdict("start", OK, f"at {seen.looks[node]['address']}")


def _describe_silence(answers: Mapping[int, Answer], node: int) -> str:
    if node not in answers:
        return "gave no answer in time"
    return str(answers[node].get("trouble") or "")


def _find_reference_node(seen: NodeObservations) -> int:
    return min((n for n in seen.looks if not _describe_silence(seen.looks, n)), default=0)


def _check_versions(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    if _describe_silence(seen.looks, node):
        return
    first = _find_reference_node(seen)
    mine, theirs = seen.looks[node], seen.looks[first]
    different = [
        f"{what} is {mine[what] or 'not installed'}, but {theirs[what]} on {seen.get_name(first)}"
        for what in ("torch", "echelon")
        if mine[what] != theirs[what]
    ]
    minors = [str(look["python"]).rpartition(".")[0] for look in (mine, theirs)]
    if minors[0] != minors[1]:
        different.append(f"Python is {mine['python']}, but {theirs['python']} there")
    if mine["torch"] is None and node == first:
        different.append("torch is not installed")
    if different:
        do = f"pip install torch=={theirs['torch']} echelon=={theirs['echelon']}, on that node"
        yield Verdict("versions", FAIL, "; ".join(different), do)
    else:
        found = f"torch {mine['torch']}, echelon {mine['echelon']}, Python {mine['python']}"
        yield Verdict("versions", OK, found)


def _check_code(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    if _describe_silence(seen.looks, node):
        return
    first = _find_reference_node(seen)
    mine, theirs = seen.looks[node], seen.looks[first]
    what = {
        "code": "Echelon's own files differ",
        "entry": "the experiment's file differs",
        "config": "the run's configuration differs",
    }
    # A file that is not there is sent, where the folder is not shared; see `_folder`.
    different = [
        f"{words} from those of {seen.get_name(first)} ({mine[key]}, not {theirs[key]})"
        for key, words in what.items()
        if mine[key] != theirs[key] and None not in (mine[key], theirs[key])
    ]
    if different:
        do = "bring the same checkout and the same environment to every node"
        yield Verdict("code", FAIL, "; ".join(different), do)
    else:
        yield Verdict("code", OK, f"echelon {mine['code']}")


# --- between nodes ---


def _check_names(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    if _describe_silence(seen.meets, node) or len(seen.names) == 1:
        yield Verdict("name", NONE, _describe_silence(seen.meets, node) or "one node alone")
        return
    names: Answer = seen.meets[node]["names"]
    wrong = []
    for other, addresses in sorted(names.items(), key=lambda item: int(item[0])):
        wanted, name = seen.looks[int(other)]["address"], seen.get_name(int(other))
        if not addresses:
            wrong.append((int(other), f"{name} leads to no address here"))
        elif wanted not in addresses:
            wrong.append((int(other), f"{name} leads to {addresses[0]} here, but is {wanted}"))
    backward = seen.meets[node]["backward"]
    if wrong:
        # Slurm's nodes meet by name; over ssh they are given the address.
        fatal = seen.kind == "slurm" and any(n == 0 for n, _ in wrong)
        lost = wrong[0][0]
        line = f"{seen.looks[lost]['address']} {seen.get_name(lost)}"
        do = f"put `{line}` into /etc/hosts of {seen.get_name(node)}, or mend its DNS"
        yield Verdict("name", FAIL if fatal else WARN, "; ".join(w for _, w in wrong), do)
    elif backward is None and node != 0:
        address = seen.looks[0]["address"]
        do = f"put `{address} {seen.get_name(0)}` into /etc/hosts, or add a PTR record"
        yield Verdict("name", WARN, f"{address} has no name here; logs show the address", do)
    else:
        yield Verdict("name", OK, "all nodes' lead to them")


def _check_tcp(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    if node == 0 and (trouble := seen.looks.get(0, {}).get("port_trouble")):
        yield Verdict("tcp", FAIL, trouble, "ss -ltnp, on that node: end what listens there")
        return
    if _describe_silence(seen.meets, node) or len(seen.names) == 1:
        return
    tcp: Answer = seen.meets[node]["tcp"]
    refused = {int(other): why for other, why in tcp.items() if why}
    if refused:
        listed = ", ".join(
            f"{seen.get_name(o)} ({seen.looks[o]['address']}:{seen.looks[o]['port']}): {why}"
            for o, why in sorted(refused.items())
        )
        do = "open the TCP ports above 1024 between the nodes in their firewalls, and the routes"
        yield Verdict("tcp", FAIL, f"cannot reach {listed}", do)
    else:
        yield Verdict("tcp", OK, "reaches every other node")


def _check_interface(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    if _describe_silence(seen.meets, node):
        return
    chosen, towards = seen.meets[node]["chosen"], seen.meets[node]["interface"]
    there: list[str] = seen.looks[node]["interfaces"]
    if chosen and not _matches_interface(there, chosen):
        found = f"there is no interface {chosen} that is up; there are {', '.join(there)}"
        do = f"set launch.interface={towards or 'NAME'}, or leave it out: each node finds its own"
        yield Verdict("interface", FAIL, found, do)
    elif chosen and towards and not _matches_interface([towards], chosen):
        found = f"{chosen} is set, but the route to {seen.get_name(0)} is {towards}"
        yield Verdict("interface", WARN, found, f"try launch.interface={towards}")
    else:
        yield Verdict("interface", OK, chosen or towards or "none needed")


def _matches_interface(there: Sequence[str], chosen: str) -> bool:
    """As NCCL reads it: a list of beginnings, `=` for whole names, `^` for all but these."""
    if chosen.startswith("^"):
        return True
    whole = chosen.startswith("=")
    wanted = chosen.lstrip("=").split(",")
    return any(name == w if whole else name.startswith(w) for name in there for w in wanted)


def _check_clock(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    clock = seen.meets.get(node, {}).get("clock")
    if not clock or "ahead_s" not in clock:
        return
    ahead_s = clock["ahead_s"]
    away_s = max(0.0, abs(ahead_s) - clock["round_s"] / 2)
    away = f"{abs(ahead_s):.3g} s" if abs(ahead_s) >= 1 else f"{1000 * abs(ahead_s):.2g} ms"
    found = f"{away} {'ahead of' if ahead_s > 0 else 'behind'} {seen.get_name(0)}'s"
    state = FAIL if away_s > _CLOCK_FAIL_S else WARN if away_s > _CLOCK_WARN_S else OK
    do = "sudo timedatectl set-ntp true, on that node" if state != OK else ""
    yield Verdict("clock", state, found, do)


def _check_links(seen: NodeObservations) -> Iterator[NodeVerdict]:
    if not seen.links:
        return
    usual = median([k.bytes_per_s for k in seen.links if k.bytes_per_s is not None] or [0.0])
    blamed = _find_blamed_nodes(seen, usual)
    slowest = seen.find_slowest_node()
    for node in range(len(seen.names)):
        mine = [k for k in seen.links if node in k[:2]]
        broken = [k for k in mine if k.bytes_per_s is None]
        worst = min(
            (k for k in mine if k.bytes_per_s is not None),
            key=lambda k: k.bytes_per_s or 0,
            default=None,
        )
        if broken:
            link = broken[0]
            found = (
                f"nothing came from {seen.get_name(link[0])} to {seen.get_name(link[1])}: {link[3]}"
            )
            yield NodeVerdict(node, Verdict("link", FAIL, found, "see tcp"))
        elif worst is not None:
            assert worst.bytes_per_s is not None
            found = f"{_format_rate(worst.bytes_per_s)} from {seen.get_name(worst[0])} to {seen.get_name(worst[1])}"
            found += ", the slowest node" if node == slowest else ""
            yield NodeVerdict(
                node, _evaluate_link_speed(found, worst.bytes_per_s, usual, node in blamed)
            )


def _evaluate_link_speed(found: str, rate: float, usual: float, blamed: bool) -> Verdict:
    do = "look at its cable, switch port and MTU: ethtool, ip -s link, iperf3"
    if not blamed or (rate >= _SLOW_BYTES_PER_S and rate * _SLOW_RATIO >= usual):
        return Verdict("link", OK, found)
    state = FAIL if rate < _SLOW_BYTES_PER_S else WARN
    than = f", usual here is {_format_rate(usual)}" if rate * _SLOW_RATIO < usual else ""
    return Verdict("link", state, f"{found}{than}", do)


def _find_blamed_nodes(seen: NodeObservations, usual: float) -> set[int]:
    """The nodes all of whose links are slow; where none is, or all are, both ends of each."""
    few = {k for k in seen.links if k.bytes_per_s is not None and _is_slow(k.bytes_per_s, usual)}
    ends = {n for k in few for n in k[:2]}
    always = {
        n for n in ends if not [k for k in seen.links if n in k[:2] and _is_fast_both_ways(k, few)]
    }
    explained = {k for k in few if set(k[:2]) & always}
    return always if explained == few and always else ends


def _is_fast_both_ways(link: LinkSpeed, slow: set[LinkSpeed]) -> bool:
    """Neither it nor its way back is slow: a shaped cable may be so in one direction."""
    return not any(set(link[:2]) == set(k[:2]) for k in slow)


def find_slow_links(
    links: Sequence[LinkSpeed], only_in_comparison: bool = False
) -> list[LinkSpeed]:
    """Those worth a second look, or without a rate; or only those that are fast by themselves, but
    not beside the others."""
    usual = median([k.bytes_per_s for k in links if k.bytes_per_s is not None] or [0.0])
    found = [k for k in links if k.bytes_per_s is None or _is_slow(k.bytes_per_s, usual)]
    return [
        k for k in found if not only_in_comparison or (k.bytes_per_s or 0.0) >= _SLOW_BYTES_PER_S
    ]


def _is_slow(rate: float, usual: float) -> bool:
    return rate < _SLOW_BYTES_PER_S or rate * _SLOW_RATIO < usual


def _format_rate(rate: float) -> str:
    bits = rate * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _check_all_reduce(seen: NodeObservations) -> Iterator[NodeVerdict]:
    if seen.not_reduced:
        more = "give it more time: --limit SECONDS"
        late = (WARN, seen.not_reduced, more) if seen.out_of_time else (NONE, seen.not_reduced)
        for node in range(len(seen.names)):
            if node not in seen.absent:
                yield NodeVerdict(node, Verdict("all-reduce", *late))
        return
    took_s = [r["s"] for a in seen.reduces.values() for r in a.get("ranks", ()) if not r["trouble"]]
    nccls = {r.get("nccl") for a in seen.reduces.values() for r in a.get("ranks", ())} - {None}
    for node in range(len(seen.names)):
        if node not in seen.absent:
            yield NodeVerdict(
                node, _check_node_all_reduce(seen, node, max(took_s, default=0.0), nccls)
            )


def _check_node_all_reduce(
    seen: NodeObservations, node: int, took_s: float, nccls: set[Any]
) -> Verdict:
    do = "NCCL_DEBUG=INFO echelon preflight …; see the other checks of this node first"
    failed = [n for n, answer in seen.reduces.items() if answer.get("failed")]
    if trouble := _describe_silence(seen.reduces, node):
        if failed:
            return Verdict("all-reduce", NONE, f"waited for {seen.get_name(failed[0])}")
        return Verdict("all-reduce", FAIL, trouble, do)
    ranks = seen.reduces[node]["ranks"]
    if troubles := [f"rank {r['rank']}: {r['trouble']}" for r in ranks if r["trouble"]]:
        return Verdict("all-reduce", FAIL, "; ".join(troubles), do)
    if wrong := [str(r["rank"]) for r in ranks if not r["right"]]:
        found = f"the sum is wrong on rank {', '.join(wrong)}"
        return Verdict("all-reduce", FAIL, found, "echelon doctor, on that node")
    if len(nccls) > 1:
        return Verdict("all-reduce", FAIL, f"NCCL is {ranks[0]['nccl']} of {nccls}", "see versions")
    alone = len(ranks) == 1 and len(seen.reduces) == 1
    speed = (
        f", {format_bytes(seen.reduced_bytes)} in {took_s:.3g} s" if took_s and not alone else ""
    )
    backend = ranks[0]["backend"] + (f" {ranks[0]['nccl']}" if ranks[0].get("nccl") else "")
    return Verdict("all-reduce", OK, f"{backend}, the sum is right{speed}")


# --- on each node ---


def _check_folder(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    if _describe_silence(seen.looks, node):
        return
    look = seen.looks[node]
    runs = next(d for d in look["disks"] if d["what"] == "runs")
    if look["shared"]:
        yield Verdict("folder", OK, "shared")
    elif seen.kind == "slurm":
        found = f"does not see {runs['path']}, which the other machines share"
        yield Verdict("folder", FAIL, found, "give a folder that all nodes share: run.dir=PATH")
    elif not runs["writable"]:
        found = f"{runs['path']} is neither shared nor can it be made there"
        yield Verdict("folder", FAIL, found, "give one that every host can write: run.dir=PATH")
    else:
        found = f"{runs['path']} is not shared: code is sent there, results are brought back"
        yield Verdict("folder", WARN, found, "give a folder that all share, if there is one")


def _check_disk(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    if _describe_silence(seen.looks, node):
        return
    worst = min(seen.looks[node]["disks"], key=lambda d: (d["writable"], d["free"]))
    found = f"{format_bytes(worst['free'])} free in {worst['path']}"
    do = f"df -h {worst['path']}, on that node; or give another place with " + (
        "run.dir=PATH" if worst["what"] == "runs" else "TMPDIR"
    )
    if not worst["writable"]:
        yield Verdict("disk", FAIL, f"{worst['path']} cannot be written", do)
    elif worst["free"] < _DISK_WARN:
        yield Verdict("disk", FAIL if worst["free"] < _DISK_FAIL else WARN, found, do)
    else:
        yield Verdict("disk", OK, found)


def _check_gpus(seen: NodeObservations, node: int) -> Iterator[Verdict]:
    if _describe_silence(seen.looks, node):
        return
    look = seen.looks[node]
    gpus = look["gpus"]
    first = seen.looks[_find_reference_node(seen)]
    if dead := [f"GPU {g['index']}: {g['trouble']}" for g in gpus if g["trouble"]]:
        do = "nvidia-smi -q, and Xid in `dmesg`, on that node; reset it, or leave the node out"
        yield Verdict("gpus", FAIL, "; ".join(dead), do)
    elif look["visible"] != first["visible"]:
        found = f"{look['visible']} are visible, but {first['visible']} on {seen.get_name(_find_reference_node(seen))}"
        yield Verdict("gpus", FAIL, found, "set launch.procs to what every node has")
    elif busy := [f"GPU {g['index']}: {', '.join(g['users'])}" for g in gpus if g["users"]]:
        do = "nvidia-smi, on that node; wait for it, or choose others"
        yield Verdict("gpus", WARN, f"in use: {'; '.join(busy)}", do)
    elif not gpus:
        yield Verdict("gpus", NONE, "none")
    else:
        yield Verdict("gpus", OK, f"{len(gpus)} × {gpus[0]['name']}, free")
