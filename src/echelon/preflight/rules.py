"""The rules of `echelon preflight`: functions from the nodes' answers to verdicts, without effects.

Each ``_check_…`` function yields verdicts on one subject for one node. To add a check, write such a
function, list it in ``NODE_RULES`` and its name in ``NODE_CHECKS``. Links and the all-reduce
concern several nodes at once and come after the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from echelon.doctor.rules import classify_free_space
from echelon.doctor.verdict import FAIL, NONE, OK, WARN, Verdict
from echelon.launch.launcher import Launcher
from echelon.utils.text import format_bytes

NODE_CHECKS = (
    *("start", "versions", "code", "name", "tcp", "interface", "clock", "folder", "disk"),
    *("gpus", "link", "all-reduce"),
)
"""The names of all checks, in the order of the columns."""
_CLOCK_WARN_S, _CLOCK_FAIL_S = 0.5, 60.0
_SLOW_BYTES_PER_S = 100e6 / 8
"""On a link slower than this, training across nodes does not pay."""
_SLOW_RATIO = 4.0
"""A link that is this many times slower than the median link is reported."""

Answer = Mapping[str, Any]


class NodeVerdict(NamedTuple):
    """A verdict and the node that it is about."""

    node: int
    verdict: Verdict


class LinkSpeed(NamedTuple):
    """What was measured from one node to another."""

    sender: int
    receiver: int
    bytes_per_s: float | None
    """None if nothing arrived."""
    trouble: str = ""
    """Why nothing arrived."""


@dataclass(frozen=True)
class NodeObservations:
    """Everything that was found out about the nodes. Mappings have the node's number as key."""

    launcher: Launcher
    """Asked for what it needs of its nodes."""
    node_names: Sequence[str]
    """As they were configured; see ``get_name``."""
    missing_nodes: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Nodes on which no probe could be started: why, and what to do."""
    node_answers: Mapping[int, Answer] = field(default_factory=dict)
    """Of ``NodeProbe.inspect_node``."""
    network_answers: Mapping[int, Answer] = field(default_factory=dict)
    """Of ``NodeProbe.inspect_network``."""
    links: Sequence[LinkSpeed] = ()
    all_reduce_answers: Mapping[int, Answer] = field(default_factory=dict)
    """Of ``NodeProbe.run_ranks``."""
    all_reduce_bytes: int = 0
    all_reduce_skipped: str = ""
    """Why no all-reduce was tried; empty if one was."""
    is_out_of_time: bool = False

    def get_name(self, node: int) -> str:
        """Return the host name of a node, or the configured name if it did not answer."""
        return str(self.node_answers.get(node, {}).get("host") or self.node_names[node])

    def find_slowest_node(self) -> int | None:
        """Return the node whose links are slowest; None for two nodes, which share a link."""
        rates = {
            node: rate
            for node in range(len(self.node_names))
            if (rate := self.compute_median_rate(node)) is not None
        }
        return min(rates, key=rates.__getitem__) if len(rates) > 2 else None

    def compute_median_rate(self, node: int) -> float | None:
        """Return the median speed of a node's links in bytes per second."""
        rates = [
            link.bytes_per_s
            for link in self.links
            if node in link[:2] and link.bytes_per_s is not None
        ]
        return median(rates) if rates else None


def evaluate_nodes(observations: NodeObservations) -> list[NodeVerdict]:
    """Return the verdicts of all rules, check by check."""
    has_all_reduce = observations.all_reduce_answers or observations.all_reduce_skipped
    return [
        *(
            NodeVerdict(node, verdict)
            for rule in NODE_RULES
            for node in range(len(observations.node_names))
            if node not in observations.missing_nodes or rule is _check_start
            for verdict in rule(observations, node)
        ),
        *_check_link_speeds(observations),
        *(_check_all_reduce(observations) if has_all_reduce else ()),
    ]


def _describe_silence(answers: Mapping[int, Answer], node: int) -> str:
    """Return why a node has no usable answer; empty if it has one."""
    if node not in answers:
        return "gave no answer in time"
    return str(answers[node].get("trouble") or "")


def _find_reference_node(observations: NodeObservations) -> int:
    """Return the first node that answered; the others are compared with it."""
    answers = observations.node_answers
    return min((node for node in answers if not _describe_silence(answers, node)), default=0)


# --- each node by itself and in comparison ---


def _check_start(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """The probe was started on the node and answered."""
    if node in observations.missing_nodes:
        yield Verdict("start", FAIL, *observations.missing_nodes[node])
    elif trouble := _describe_silence(observations.node_answers, node):
        yield Verdict("start", FAIL, trouble, "echelon doctor, on that node")
    else:
        yield Verdict("start", OK, f"at {observations.node_answers[node]['address']}")


def _check_versions(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """torch, Echelon and Python have the same version as on the reference node."""
    if _describe_silence(observations.node_answers, node):
        return
    reference = _find_reference_node(observations)
    own, expected = observations.node_answers[node], observations.node_answers[reference]
    host = observations.get_name(reference)
    differences = [
        f"{package} is {own[package] or 'not installed'}, but {expected[package]} on {host}"
        for package in ("torch", "echelon")
        if own[package] != expected[package]
    ]
    own_minor, expected_minor = (str(a["python"]).rpartition(".")[0] for a in (own, expected))
    if own_minor != expected_minor:
        differences.append(f"Python is {own['python']}, but {expected['python']} there")
    if own["torch"] is None and node == reference:
        differences.append("torch is not installed")
    if differences:
        do = f"pip install torch=={expected['torch']} echelon=={expected['echelon']}, on that node"
        yield Verdict("versions", FAIL, "; ".join(differences), do)
    else:
        found = f"torch {own['torch']}, echelon {own['echelon']}, Python {own['python']}"
        yield Verdict("versions", OK, found)


def _check_code(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """Echelon's source, the experiment's file and the run's configuration are the same."""
    if _describe_silence(observations.node_answers, node):
        return
    reference = _find_reference_node(observations)
    own, expected = observations.node_answers[node], observations.node_answers[reference]
    host = observations.get_name(reference)
    subjects = {
        "code": "Echelon's own files differ",
        "entry": "the experiment's file differs",
        "config": "the run's configuration differs",
    }
    # A file that does not exist there is no difference: it is sent where the folder is not shared.
    differences = [
        f"{subject} from those of {host} ({own[key]}, not {expected[key]})"
        for key, subject in subjects.items()
        if own[key] != expected[key] and None not in (own[key], expected[key])
    ]
    if differences:
        do = "bring the same checkout and the same environment to every node"
        yield Verdict("code", FAIL, "; ".join(differences), do)
    else:
        yield Verdict("code", OK, f"echelon {own['code']}")


def _check_folder(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """The folder of runs is shared; Slurm needs that, ssh can send files instead."""
    if _describe_silence(observations.node_answers, node):
        return
    answer = observations.node_answers[node]
    runs = next(disk for disk in answer["disks"] if disk["name"] == "runs")
    if answer["is_shared"]:
        yield Verdict("folder", OK, "shared")
    elif observations.launcher.needs_shared_folder:
        found = f"does not see {runs['path']}, which the other machines share"
        yield Verdict("folder", FAIL, found, "give a folder that all nodes share: run.dir=PATH")
    elif not runs["is_writable"]:
        found = f"{runs['path']} is not shared and cannot be made there"
        yield Verdict("folder", FAIL, found, "give one that every host can write: run.dir=PATH")
    else:
        found = f"{runs['path']} is not shared: code is sent there, results are brought back"
        yield Verdict("folder", WARN, found, "give a folder that all share, if there is one")


def _check_disk(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """The disks of runs and of temporary files have space and can be written."""
    if _describe_silence(observations.node_answers, node):
        return
    disks = observations.node_answers[node]["disks"]
    worst = min(disks, key=lambda disk: (disk["is_writable"], disk["free_bytes"]))
    setting = "run.dir=PATH" if worst["name"] == "runs" else "TMPDIR"
    do = f"df -h {worst['path']}, on that node; or give another place with {setting}"
    if not worst["is_writable"]:
        yield Verdict("disk", FAIL, f"{worst['path']} cannot be written", do)
        return
    state = classify_free_space(worst["free_bytes"])
    found = f"{format_bytes(worst['free_bytes'])} free in {worst['path']}"
    yield Verdict("disk", state, found, do if state != OK else "")


def _check_gpus(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """The GPUs are healthy, as many as on the reference node, and free."""
    if _describe_silence(observations.node_answers, node):
        return
    reference = _find_reference_node(observations)
    answer, expected = observations.node_answers[node], observations.node_answers[reference]
    gpus = answer["gpus"]
    if broken := [f"GPU {g['index']}: {g['trouble']}" for g in gpus if g["trouble"]]:
        do = "nvidia-smi -q, and Xid in `dmesg`, on that node; reset it, or leave the node out"
        yield Verdict("gpus", FAIL, "; ".join(broken), do)
    elif answer["visible_gpus"] != expected["visible_gpus"]:
        host = observations.get_name(reference)
        found = f"{answer['visible_gpus']} are visible, but {expected['visible_gpus']} on {host}"
        yield Verdict("gpus", FAIL, found, "set launch.procs to what every node has")
    elif busy := [f"GPU {g['index']}: {', '.join(g['users'])}" for g in gpus if g["users"]]:
        do = "nvidia-smi, on that node; wait for it, or choose others"
        yield Verdict("gpus", WARN, f"in use: {'; '.join(busy)}", do)
    elif not gpus:
        yield Verdict("gpus", NONE, "none")
    else:
        yield Verdict("gpus", OK, f"{len(gpus)} × {gpus[0]['name']}, free")


# --- the network of each node ---


def _check_names(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """The names of the other nodes resolve here to their addresses, and node 0's address back."""
    answers = observations.network_answers
    if _describe_silence(answers, node) or len(observations.node_names) == 1:
        yield Verdict("name", NONE, _describe_silence(answers, node) or "one node alone")
        return
    resolved: Answer = answers[node]["names"]
    wrong = []
    for number, addresses in sorted((int(key), value) for key, value in resolved.items()):
        expected = observations.node_answers[number]["address"]
        name = observations.get_name(number)
        if not addresses:
            wrong.append((number, f"{name} does not resolve here"))
        elif expected not in addresses:
            wrong.append((number, f"{name} resolves to {addresses[0]} here, but is {expected}"))
    if wrong:
        # With Slurm the ranks find node 0 by name; over ssh they get its address.
        is_fatal = observations.launcher.finds_node_0_by_name and any(n == 0 for n, _ in wrong)
        first = wrong[0][0]
        line = f"{observations.node_answers[first]['address']} {observations.get_name(first)}"
        do = f"put `{line}` into /etc/hosts of {observations.get_name(node)}, or fix its DNS"
        found = "; ".join(sentence for _, sentence in wrong)
        yield Verdict("name", FAIL if is_fatal else WARN, found, do)
    elif answers[node]["reverse_name"] is None and node != 0:
        address = observations.node_answers[0]["address"]
        do = f"put `{address} {observations.get_name(0)}` into /etc/hosts, or add a PTR record"
        yield Verdict("name", WARN, f"{address} has no name here; logs show the address", do)
    else:
        yield Verdict("name", OK, "all nodes' names resolve to their addresses")


def _check_tcp(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """The node can connect to every other, and node 0's port for the rendezvous is free."""
    nodes = observations.node_answers
    if node == 0 and (trouble := nodes.get(0, {}).get("port_trouble")):
        yield Verdict("tcp", FAIL, trouble, "ss -ltnp, on that node: end what listens there")
        return
    answers = observations.network_answers
    if _describe_silence(answers, node) or len(observations.node_names) == 1:
        return
    tcp: Answer = answers[node]["tcp"]
    refused = sorted((int(number), reason) for number, reason in tcp.items() if reason)
    if refused:
        listed = ", ".join(
            f"{observations.get_name(n)} ({nodes[n]['address']}:{nodes[n]['port']}): {reason}"
            for n, reason in refused
        )
        do = "open the TCP ports above 1024 between the nodes in their firewalls, and the routes"
        yield Verdict("tcp", FAIL, f"cannot reach {listed}", do)
    else:
        yield Verdict("tcp", OK, "reaches every other node")


def _check_interface(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """The chosen network interface exists, is up, and is the one towards node 0."""
    if _describe_silence(observations.network_answers, node):
        return
    answer = observations.network_answers[node]
    chosen, routed = answer["chosen_interface"], answer["route_interface"]
    interfaces: list[str] = observations.node_answers[node]["interfaces"]
    if chosen and not _matches_interface(interfaces, chosen):
        found = f"there is no interface {chosen} that is up; there are {', '.join(interfaces)}"
        do = f"set launch.interface={routed or 'NAME'}, or leave it out: each node finds its own"
        yield Verdict("interface", FAIL, found, do)
    elif chosen and routed and not _matches_interface([routed], chosen):
        found = f"{chosen} is set, but the route to {observations.get_name(0)} is {routed}"
        yield Verdict("interface", WARN, found, f"try launch.interface={routed}")
    else:
        yield Verdict("interface", OK, chosen or routed or "none needed")


def _matches_interface(names: Sequence[str], chosen: str) -> bool:
    """Return whether NCCL would use one of these interfaces.

    ``chosen`` is a list of prefixes; with ``=`` of whole names, with ``^`` of excluded ones.
    """
    if chosen.startswith("^"):
        return True
    is_exact = chosen.startswith("=")
    wanted = chosen.lstrip("=").split(",")
    return any(name == w if is_exact else name.startswith(w) for name in names for w in wanted)


def _check_clock(observations: NodeObservations, node: int) -> Iterator[Verdict]:
    """The clock agrees with node 0's, as far as the round trip lets it be measured."""
    clock = observations.network_answers.get(node, {}).get("clock")
    if not clock or "ahead_s" not in clock:
        return
    ahead_s = clock["ahead_s"]
    certain_s = max(0.0, abs(ahead_s) - clock["round_trip_s"] / 2)
    offset = f"{abs(ahead_s):.3g} s" if abs(ahead_s) >= 1 else f"{1000 * abs(ahead_s):.2g} ms"
    found = f"{offset} {'ahead of' if ahead_s > 0 else 'behind'} {observations.get_name(0)}'s"
    state = FAIL if certain_s > _CLOCK_FAIL_S else WARN if certain_s > _CLOCK_WARN_S else OK
    do = "sudo timedatectl set-ntp true, on that node" if state != OK else ""
    yield Verdict("clock", state, found, do)


NODE_RULES: Sequence[Callable[[NodeObservations, int], Iterator[Verdict]]] = (
    *(_check_start, _check_versions, _check_code, _check_names, _check_tcp, _check_interface),
    *(_check_clock, _check_folder, _check_disk, _check_gpus),
)


# --- links between nodes ---


def find_slow_links(
    links: Sequence[LinkSpeed], only_in_comparison: bool = False
) -> list[LinkSpeed]:
    """Return the links that are worth measuring again: slow ones and those without a speed.

    With ``only_in_comparison``, only those that are fast enough, but much slower than others.
    """
    usual = _compute_median_link_speed(links)
    slow = [k for k in links if k.bytes_per_s is None or _is_slow(k.bytes_per_s, usual)]
    if only_in_comparison:
        return [k for k in slow if (k.bytes_per_s or 0.0) >= _SLOW_BYTES_PER_S]
    return slow


def _compute_median_link_speed(links: Sequence[LinkSpeed]) -> float:
    return median([k.bytes_per_s for k in links if k.bytes_per_s is not None] or [0.0])


def _is_slow(bytes_per_s: float, usual: float) -> bool:
    return bytes_per_s < _SLOW_BYTES_PER_S or bytes_per_s * _SLOW_RATIO < usual


def _check_link_speeds(observations: NodeObservations) -> Iterator[NodeVerdict]:
    """Yield a verdict per node on the slowest of its links."""
    if not observations.links:
        return
    usual = _compute_median_link_speed(observations.links)
    blamed = _find_blamed_nodes(observations.links, usual)
    slowest_node = observations.find_slowest_node()
    for node in range(len(observations.node_names)):
        own = [link for link in observations.links if node in link[:2]]
        broken = [link for link in own if link.bytes_per_s is None]
        if broken:
            link = broken[0]
            names = map(observations.get_name, link[:2])
            found = f"nothing arrived from {' to '.join(names)}: {link.trouble}"
            yield NodeVerdict(node, Verdict("link", FAIL, found, "see tcp"))
        elif own:
            slowest = min(own, key=lambda link: link.bytes_per_s or 0)
            bytes_per_s = slowest.bytes_per_s or 0.0
            names = map(observations.get_name, slowest[:2])
            found = f"{_format_rate(bytes_per_s)} from {' to '.join(names)}"
            found += ", the slowest node" if node == slowest_node else ""
            is_blamed = node in blamed
            yield NodeVerdict(node, _evaluate_speed(found, bytes_per_s, usual, is_blamed))


def _evaluate_speed(found: str, bytes_per_s: float, usual: float, is_blamed: bool) -> Verdict:
    if not is_blamed or not _is_slow(bytes_per_s, usual):
        return Verdict("link", OK, found)
    state = FAIL if bytes_per_s < _SLOW_BYTES_PER_S else WARN
    is_outlier = bytes_per_s * _SLOW_RATIO < usual
    comparison = f", usual here is {_format_rate(usual)}" if is_outlier else ""
    do = "check its cable, switch port and MTU: ethtool, ip -s link, iperf3"
    return Verdict("link", state, f"{found}{comparison}", do)


def _find_blamed_nodes(links: Sequence[LinkSpeed], usual: float) -> set[int]:
    """Return the nodes that slow links are blamed on.

    A node is to blame if all its links are slow. If that does not explain every slow link, both
    ends of each are blamed.
    """
    slow = {k for k in links if k.bytes_per_s is not None and _is_slow(k.bytes_per_s, usual)}
    slow_pairs = [set(link[:2]) for link in slow]  # a link may be slow in one direction alone
    ends = {node for link in slow for node in link[:2]}
    always_slow = {
        node
        for node in ends
        if all(set(link[:2]) in slow_pairs for link in links if node in link[:2])
    }
    explained = {link for link in slow if set(link[:2]) & always_slow}
    return always_slow if always_slow and explained == slow else ends


def _format_rate(bytes_per_s: float) -> str:
    """Return ``9.41 Gbit/s``, the unit of networks."""
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


# --- the all-reduce across all nodes ---


def _check_all_reduce(observations: NodeObservations) -> Iterator[NodeVerdict]:
    """Yield a verdict per node on the all-reduce, or on why it was not tried."""
    nodes = [
        node
        for node in range(len(observations.node_names))
        if node not in observations.missing_nodes
    ]
    if reason := observations.all_reduce_skipped:
        verdict = Verdict("all-reduce", NONE, reason)
        if observations.is_out_of_time:
            verdict = Verdict("all-reduce", WARN, reason, "give it more time: --limit SECONDS")
        for node in nodes:
            yield NodeVerdict(node, verdict)
        return
    for node in nodes:
        yield NodeVerdict(node, _evaluate_all_reduce_of_node(observations, node))


def _evaluate_all_reduce_of_node(observations: NodeObservations, node: int) -> Verdict:
    """Return the verdict on one node's ranks; a node that only waited is not blamed."""
    answers = observations.all_reduce_answers
    do = "NCCL_DEBUG=INFO echelon preflight …; see the other checks of this node first"
    if trouble := _describe_silence(answers, node):
        failed = [n for n, answer in answers.items() if answer.get("failed")]
        if failed:
            return Verdict("all-reduce", NONE, f"waited for {observations.get_name(failed[0])}")
        return Verdict("all-reduce", FAIL, trouble, do)
    ranks = answers[node]["ranks"]
    if troubles := [f"rank {r['rank']}: {r['trouble']}" for r in ranks if r["trouble"]]:
        return Verdict("all-reduce", FAIL, "; ".join(troubles), do)
    if wrong := [str(r["rank"]) for r in ranks if not r["is_sum_right"]]:
        found = f"the sum is wrong on rank {', '.join(wrong)}"
        return Verdict("all-reduce", FAIL, found, "echelon doctor, on that node")
    all_ranks = [rank for answer in answers.values() for rank in answer.get("ranks", ())]
    nccl_versions = {rank.get("nccl") for rank in all_ranks} - {None}
    if len(nccl_versions) > 1:
        found = f"NCCL is {ranks[0]['nccl']} of {nccl_versions}"
        return Verdict("all-reduce", FAIL, found, "see versions")
    took_s = max((rank["took_s"] for rank in all_ranks if not rank["trouble"]), default=0.0)
    is_alone = len(ranks) == 1 and len(answers) == 1
    size = format_bytes(observations.all_reduce_bytes)
    speed = f", {size} in {took_s:.3g} s" if took_s and not is_alone else ""
    backend = ranks[0]["backend"] + (f" {ranks[0]['nccl']}" if ranks[0].get("nccl") else "")
    return Verdict("all-reduce", OK, f"{backend}, the sum is right{speed}")
