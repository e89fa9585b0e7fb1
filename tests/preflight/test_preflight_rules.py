"""`echelon preflight`: what nodes found, as data, and which node is blamed for what."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from echelon.config.schema import build_config
from echelon.doctor.verdict import FAIL, NONE, OK, WARN
from echelon.launch.registry import make_launcher
from echelon.launch.ssh.launcher import SshLauncher
from echelon.preflight.check_nodes import _pair_in_rounds
from echelon.preflight.report import print_verdict_matrix
from echelon.preflight.rules import (
    LinkSpeed,
    NodeObservations,
    NodeVerdict,
    evaluate_nodes,
    find_slow_links,
)

GB = 10**9
FAST, SLOW = 1.2e9, 0.1e6


def answer_of_node(node: int, **facts: Any) -> dict[str, Any]:
    disks = [
        {"name": w, "path": f"/{w}", "free_bytes": 50 * GB, "is_writable": True}
        for w in ("runs", "tmp")
    ]
    return {
        "host": f"n{node}",
        "address": f"10.0.0.{node}",
        "port": 4000,
        "port_trouble": "",
        "python": "3.12.1",
        "torch": "2.9.0",
        "echelon": "0.1.0",
        "code": "abc",
        "entry": None,
        "config": None,
        "interfaces": ["lo", "eth0"],
        "is_shared": True,
        "disks": disks,
        "visible_gpus": 1,
        "gpus": [{"index": 0, "name": "H100", "trouble": "", "users": []}],
        **facts,
    }


def answer_of_network(node: int, nodes: int, **facts: Any) -> dict[str, Any]:
    others = [n for n in range(nodes) if n != node]
    return {
        "names": {str(n): [f"10.0.0.{n}"] for n in others},
        "reverse_name": "n0",
        "route_interface": "eth0",
        "chosen_interface": None,
        "tcp": {str(n): "" for n in others},
        "clock": {"round_trip_s": 0.001, "ahead_s": 0.0, "trouble": ""} if node else None,
        **facts,
    }


def answer_of_ranks(node: int, **facts: Any) -> dict[str, Any]:
    rank = {
        "rank": node,
        "trouble": "",
        "is_sum_right": True,
        "took_s": 0.1,
        "backend": "nccl",
        "nccl": "2.27",
    }
    return {"ranks": [rank | facts], "failed": bool(facts.get("trouble"))}


def observe(
    node_answers: dict[int, dict[str, Any]] | None = None,
    network_answers: dict[int, dict[str, Any]] | None = None,
    rank_answers: dict[int, dict[str, Any]] | None = None,
    slow: set[int] | frozenset[int] = frozenset(),
    kind: str = "ssh",
    nodes: int = 3,
) -> NodeObservations:
    """Three nodes in order, but for these; `slow` are nodes with slow cables."""
    pairs = [(a, b) for a in range(nodes) for b in range(nodes) if a != b]
    return NodeObservations(
        make_launcher(build_config({"launch": {"kind": kind}})),
        [f"n{n}" for n in range(nodes)],
        node_answers={n: answer_of_node(n) | (node_answers or {}).get(n, {}) for n in range(nodes)},
        network_answers={
            n: answer_of_network(n, nodes) | (network_answers or {}).get(n, {})
            for n in range(nodes)
        },
        links=[LinkSpeed(a, b, SLOW if {a, b} & slow else FAST) for a, b in pairs],
        all_reduce_answers={n: answer_of_ranks(n) for n in range(nodes)} | (rank_answers or {}),
        all_reduce_bytes=4000,
    )


def list_problems(found: NodeObservations) -> list[tuple[str, str, str]]:
    return [
        (found.get_name(f.node), f.verdict.check, f.verdict.state)
        for f in evaluate_nodes(found)
        if f.verdict.state not in (OK, NONE)
    ]


def find_only_problem(found: NodeObservations) -> NodeVerdict:
    (one,) = [f for f in evaluate_nodes(found) if f.verdict.state not in (OK, NONE)]
    assert one.verdict.do, "there is something to do"
    return one


def test_nodes_in_order_are_ready() -> None:
    assert list_problems(observe()) == []
    assert list_problems(observe(nodes=1)) == []
    assert list_problems(observe(nodes=2)) == []


@pytest.mark.parametrize(
    ("facts", "check", "state", "words"),
    [
        ({"torch": "2.4.0"}, "versions", FAIL, "torch is 2.4.0, but 2.9.0 on n0"),
        ({"torch": None}, "versions", FAIL, "torch is not installed, but 2.9.0 on n0"),
        ({"python": "3.10.2"}, "versions", FAIL, "Python is 3.10.2"),
        ({"code": "xyz"}, "code", FAIL, "Echelon's own files differ from those of n0"),
        ({"is_shared": False}, "folder", WARN, "/runs is not shared: code is sent there"),
        ({"visible_gpus": 0, "gpus": []}, "gpus", FAIL, "0 are visible, but 1 on n0"),
        (
            {"gpus": [{"index": 0, "name": "H100", "trouble": "GPU is lost", "users": []}]},
            "gpus",
            FAIL,
            "GPU 0: GPU is lost",
        ),
        (
            {"gpus": [{"index": 0, "name": "H100", "trouble": "", "users": ["process 7"]}]},
            "gpus",
            WARN,
            "in use: GPU 0: process 7",
        ),
        (
            {"disks": [{"name": "runs", "path": "/r", "free_bytes": 10, "is_writable": True}]},
            "disk",
            FAIL,
            "10 B free in /r",
        ),
    ],
)
def test_one_fault_on_a_node(facts: dict[str, Any], check: str, state: str, words: str) -> None:
    one = find_only_problem(observe({1: facts}))
    assert (one.node, one.verdict.check, one.verdict.state) == (1, check, state)
    assert words in one.verdict.found


@pytest.mark.parametrize(
    ("facts", "check", "state", "words"),
    [
        ({"names": {"0": [], "2": ["10.0.0.2"]}}, "name", WARN, "n0 does not resolve here"),
        (
            {"names": {"0": ["127.0.1.1"]}},
            "name",
            WARN,
            "resolves to 127.0.1.1 here, but is 10.0.0.0",
        ),
        ({"reverse_name": None}, "name", WARN, "10.0.0.0 has no name here"),
        ({"tcp": {"0": "timed out", "2": ""}}, "tcp", FAIL, "cannot reach n0 (10.0.0.0:4000)"),
        (
            {"chosen_interface": "ib0"},
            "interface",
            FAIL,
            "no interface ib0 that is up; there are lo, eth0",
        ),
        ({"chosen_interface": "lo"}, "interface", WARN, "lo is set, but the route to n0 is eth0"),
        ({"clock": {"round_trip_s": 0.1, "ahead_s": -3.0}}, "clock", WARN, "3 s behind n0's"),
        ({"clock": {"round_trip_s": 0.1, "ahead_s": 99.0}}, "clock", FAIL, "99 s ahead of n0's"),
    ],
)
def test_one_fault_between_nodes(facts: dict[str, Any], check: str, state: str, words: str) -> None:
    one = find_only_problem(observe(network_answers={1: facts}))
    assert (one.node, one.verdict.check, one.verdict.state) == (1, check, state)
    assert words in one.verdict.found


def test_with_slurm_the_first_nodes_name_and_the_folder_are_needed() -> None:
    assert list_problems(observe(network_answers={1: {"names": {"0": []}}}, kind="slurm")) == [
        ("n1", "name", FAIL)
    ]
    assert list_problems(observe(network_answers={1: {"names": {"2": []}}}, kind="slurm")) == [
        ("n1", "name", WARN)
    ]
    assert list_problems(observe({1: {"is_shared": False}}, kind="slurm")) == [
        ("n1", "folder", FAIL)
    ]
    assert list_problems(observe({0: {"port_trouble": "port 20001 is taken"}})) == [
        ("n0", "tcp", FAIL)
    ]


def test_interfaces_are_read_as_nccl_reads_them() -> None:
    for chosen in ("eth", "=eth0", "ib0,eth0", "^docker0"):
        assert list_problems(observe(network_answers={1: {"chosen_interface": chosen}})) == []
    assert list_problems(observe(network_answers={1: {"chosen_interface": "=eth"}})) == [
        ("n1", "interface", FAIL)
    ]


def test_a_slow_cable_is_blamed_on_its_node_alone() -> None:
    slow = observe(slow={2})
    one = find_only_problem(slow)
    assert (one.node, one.verdict.check, one.verdict.state) == (2, "link", FAIL)
    assert "the slowest node" in one.verdict.found
    assert slow.find_slowest_node() == 2
    both = list_problems(observe(slow={1}, nodes=2))
    assert both == [("n0", "link", FAIL), ("n1", "link", FAIL)], "of two nobody can tell"


def test_an_all_reduce_is_blamed_on_who_failed() -> None:
    broken = {1: answer_of_ranks(1, trouble="Unable to find address")}
    found = observe(rank_answers=broken)
    found.all_reduce_answers.pop(0)  # type: ignore[attr-defined]
    assert list_problems(found) == [("n1", "all-reduce", FAIL)]
    assert list_problems(observe(rank_answers={2: answer_of_ranks(2, is_sum_right=False)})) == [
        ("n2", "all-reduce", FAIL)
    ]


def test_nodes_that_did_not_come_and_answers_that_did_not() -> None:
    found = NodeObservations(
        SshLauncher(), ["a", "b"], {1: ("b cannot be reached", "try ssh")}, {0: answer_of_node(0)}
    )
    assert list_problems(found) == [("b", "start", FAIL)]
    silent = NodeObservations(
        SshLauncher(),
        ["a", "b"],
        node_answers={0: answer_of_node(0), 1: {"trouble": "OSError: full"}},
    )
    assert ("b", "start", FAIL) in list_problems(silent)


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8, 40])
def test_every_pair_is_measured_once_and_no_node_twice_at_a_time(nodes: int) -> None:
    rounds = list(_pair_in_rounds(list(range(nodes))))
    for pairs in rounds:
        busy = [n for pair in pairs for n in pair]
        assert len(busy) == len(set(busy))
    every = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(every) == len(set(every))
    if nodes <= 8:
        assert len(every) == nodes * (nodes - 1) // 2


def test_an_all_reduce_without_time_is_a_warning() -> None:
    late = replace(
        observe(rank_answers={}), all_reduce_answers={}, all_reduce_skipped="not tried: out of time"
    )
    assert {f.verdict.state for f in evaluate_nodes(late) if f.verdict.check == "all-reduce"} == {
        NONE
    }
    found = [f.verdict for f in evaluate_nodes(replace(late, is_out_of_time=True))]
    remedies = {v.do for v in found if v.check == "all-reduce" and v.state == WARN}
    assert remedies == {"give it more time: --limit SECONDS"}


# --- on a screen ---


def test_a_narrow_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    wrong = observe(node_answers={1: answer_of_node(1, torch="2.8.0")})
    print_verdict_matrix(wrong.node_names, evaluate_nodes(wrong))
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert shown[:5] == [
        "    start  versions  code  name  tcp  interface  clock",
        "n0  ok     ok        ok    ok    ok   ok         –",
        "n1  ok     FAIL      ok    ok    ok   ok         ok",
        "n2  ok     ok        ok    ok    ok   ok         ok",
        "",
    ]
    assert "FAIL  n1, versions: torch is 2.8.0, but 2.9.0 on n0" in shown
    assert "      → pip install torch==2.9.0 echelon==0.1.0, on that node" in shown
    assert shown[-1] == "not ready: 1 to fix"
    print_verdict_matrix(wrong.node_names, evaluate_nodes(observe()))
    assert capsys.readouterr().out.endswith("ready\n")
    monkeypatch.setenv("LC_ALL", "C")
    print_verdict_matrix(wrong.node_names, evaluate_nodes(wrong))
    assert capsys.readouterr().out.isascii()


def test_a_link_that_is_slow_beside_the_others_gets_more_chances() -> None:
    links = [
        LinkSpeed(0, 1, FAST),
        LinkSpeed(1, 0, FAST),
        LinkSpeed(0, 2, FAST / 5),
        LinkSpeed(2, 0, None),
    ]
    links += [LinkSpeed(1, 2, SLOW), LinkSpeed(2, 1, FAST), LinkSpeed(3, 1, FAST)]
    assert find_slow_links(links) == links[2:5]
    assert find_slow_links(links, only_in_comparison=True) == [links[2]]
