"""Agents of two nodes collect stacks over a real lifeline, each in a folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_runner import run_here, until

from echelon.errors import ExitCode
from echelon.launch.node import stack_exchange
from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.membership import Member
from echelon.launch.node.node_scaling import ScaleAnswer
from echelon.launch.node.stack_exchange import StackExchange
from echelon.launch.plan import NodeSpec
from echelon.runs.process_record import identify_this_process
from echelon.runs.run_folder import RUN_FORMAT, Run
from echelon.runs.stack_report import StackReport

LIMIT_S = 60.0


class TwoNodes(NamedTuple):
    """Rank 0 on node 0 and rank 1 on node 1, both a program that sleeps."""

    run: Run
    first: StackExchange
    second: StackExchange
    server: Lifeline
    client: Lifeline
    pids: list[int]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    folders = [Run(tmp_path / node / "a") for node in ("runs", "elsewhere")]
    for run in folders:
        run.logs_folder.mkdir(parents=True)
    config = {"run_format": RUN_FORMAT}
    folders[0].config_file.write_text(json.dumps(config), encoding="utf-8")
    folders[0].update_status(state="running", launcher="env", process=identify_this_process())
    words = [sys.executable, "-c", "import time\nprint(flush=True)\ntime.sleep(600)"]
    programs = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(2)]
    for program in programs:
        assert program.stdout
        program.stdout.readline()
    server, client = (Lifeline(Member(n, f"host {n}", place=n)) for n in range(2))
    port = server.open_as_leader("127.0.0.1", "127.0.0.1", b"key", 2)
    client.open_as_follower(f"127.0.0.1:{port}", b"key", 2, lambda failure: None)
    until(lambda: 1 in server.membership.members, LIMIT_S, "the other node")

    def make_exchange(node: int, lifeline: Lifeline) -> StackExchange:
        workers = {node: programs[node].pid}
        run, spec = folders[node], NodeSpec(node, 2)
        return StackExchange(
            run, spec, lifeline, lambda: workers, True, lambda count: ScaleAnswer()
        )

    made = [make_exchange(node, lifeline) for node, lifeline in enumerate((server, client))]
    yield TwoNodes(folders[0], made[0], made[1], server, client, [p.pid for p in programs])
    made[0].close()
    client.leave()
    server.leave()
    for program in programs:
        program.kill()
        program.communicate()


def ask(nodes: TwoNodes, request: str = "0" * 16, **fields: Any) -> StackReport:
    """Write a request as `echelon stacks` does, and look until it is answered."""
    answer = nodes.run.get_stack_answer_file(request)
    answer.touch()
    written = {"id": request, "agent": identify_this_process()} | fields
    nodes.run.stack_request_file.write_text(json.dumps(written), encoding="utf-8")
    look_until(nodes, lambda: answer.read_bytes().endswith(b"\n"))
    return StackReport.from_json(json.loads(answer.read_bytes()))


def look_until(nodes: TwoNodes, holds: Callable[[], Any]) -> None:
    def look() -> Any:
        nodes.first.look_for_request()
        return holds()

    until(look, LIMIT_S, "the answer")


def test_ranks_of_both_nodes_are_in_the_answer(nodes: TwoNodes) -> None:
    report = ask(nodes)
    assert [(rank.rank, rank.pid) for rank in report.ranks] == list(enumerate(nodes.pids))
    assert {rank.source for rank in report.ranks} == {"py-spy"}
    assert [rank.main_frames[0].line for rank in report.ranks] == [3, 3]
    assert report.missing == ()
    assert ask(nodes, "1" * 16).missing == (), "and again"


def test_a_node_that_is_silent_is_named(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_exchange, "_NODES_LIMIT_S", 0.2)
    nodes.client.on_stack_message = lambda message: None
    report = ask(nodes)
    assert [rank.rank for rank in report.ranks] == [0]
    assert report.missing == ("node 1 sent no stacks within 0.2 s",)


def test_a_hang_is_written_by_node_0_and_known_to_the_other(nodes: TwoNodes) -> None:
    assert nodes.second.record_hang("0.0") is False, "node 0 writes it"
    until(lambda: nodes.first.record_hang("0.0"), LIMIT_S, "written")
    until(lambda: nodes.second.record_hang("0.0"), LIMIT_S, "known")
    [file] = nodes.run.list_hang_reports()
    assert nodes.first.get_hang_file("0.0") == nodes.second.get_hang_file("0.0") == str(file)
    assert "\nranks 0, 1: no collective in the stack\n  <string>:3 in <module>" in file.read_text()
    own = nodes.second.get_own_rank(1)
    assert own is not None
    assert own.pid == nodes.pids[1]


def test_what_is_no_request_is_ignored(nodes: TwoNodes) -> None:
    agent = json.dumps(identify_this_process())
    half = '{"id": "' + "0" * 16
    named = [f'{{"agent": {agent}, "id": {name}}}' for name in ("3", '"../../x"', "null", '"0"')]
    for text in ("", "[]", "{}", "x" * 100_000, half, *named):
        nodes.run.stack_request_file.write_text(text)
        assert nodes.first._read_request() is None, text
    other = {"id": "2" * 16, "agent": identify_this_process() | {"pid": 1}}
    nodes.run.stack_request_file.write_text(json.dumps(other))
    assert nodes.first._read_request() is None, "that is for another agent"


def test_the_agent_is_known_while_it_runs(nodes: TwoNodes, tmp_path: Path) -> None:
    assert nodes.run.stack_agent_file.exists()
    nodes.first.close()
    assert not nodes.run.stack_agent_file.exists()
    assert run_here(["stacks", "a"], tmp_path).code == ExitCode.NOT_FOUND
