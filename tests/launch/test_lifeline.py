"""Agents and node 0's, over real connections: losses, first failures and hangs are known to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from echelon.config import schema
from echelon.errors import EchelonError, ExitCode
from echelon.launch.node.lifeline import HungRank, Lifeline, LifelineClient, LifelineServer
from echelon.runs.failure import Failure

LIMIT_S = 300.0
KEY = b"a key of 32 bytes or of any size"


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    return found


def failure(rank: int, summary: str = "boom") -> Failure:
    return Failure(rank, "here", 3, summary, "")


def sign(rank: int, beats: int, still: float = 100.0) -> dict[str, Any]:
    still_signs = {"step": beats, "begun": True, "still": still, "stopped": False}
    return {"rank": rank, "beats": beats, **still_signs}


@contextmanager
def world(
    address: str = "127.0.0.1",
) -> Iterator[tuple[LifelineServer, LifelineClient, list[Failure]]]:
    """Two nodes, and what the second hears when it loses the first."""
    lost: list[Failure] = []
    hub = LifelineServer(address, 2, KEY)
    spoke = LifelineClient(address, hub.port, KEY, 1, lost.append)
    until(lambda: hub._peers)
    yield hub, spoke, lost
    spoke.leave()
    hub.leave()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_first_failure_is_everybodys(address: str) -> None:
    with world(address) as (hub, spoke, _):
        assert spoke.agree_on_failure(0, failure(2)).rank == 2
        assert hub.find_failure(0) == failure(2)
        assert hub.agree_on_failure(0, failure(0, "broken pipe")).rank == 2, "it came later"
        assert hub.agree_on_failure(1, failure(0)).rank == 0, "another attempt"
        assert until(lambda: spoke.find_failure(1)).rank == 0


def test_an_agent_that_ends_without_a_word_is_named_in_every_attempt() -> None:
    with world() as (hub, spoke, _):
        spoke.report_heartbeats([sign(2, 5), sign(3, 5)])
        until(lambda: hub._peers[1].report.heartbeats)
        spoke._channel.close()
        told = until(lambda: hub.find_failure(0))
        assert told.exit == ExitCode.NODE_LOST
        assert "node 1" in told.summary
        assert "rank 2–3" in told.summary
        assert hub.find_failure(7) == told


def test_node_0_that_ends_is_missed_at_once() -> None:
    with world() as (hub, _, lost):
        for peer in list(hub._peers.values()):
            hub._drop_peer(peer)
        assert until(lambda: lost)[0].exit == ExitCode.NODE_LOST


def test_the_rank_that_all_wait_for_is_found_on_another_node() -> None:
    with world() as (hub, spoke, _):
        hub.report_heartbeats([sign(0, 40), sign(1, 40)])
        spoke.report_heartbeats([sign(2, 40), sign(3, 39)])
        found = until(lambda: hub.find_hung_rank(0, 1.0))
        assert found.rank == 3
        assert until(lambda: spoke.find_hung_rank(0, 1.0)) == found


def test_heartbeats_that_are_stored_while_an_attempt_begins_are_not_taken_for_its_own() -> None:
    class ArrivingLate(dict[str, Any]):
        """A message that is being stored when the attempt begins."""

        def __getitem__(self, key: str) -> Any:
            if key == "signs" and hub._attempt == 0:
                hub.begin_attempt(1)
            return super().__getitem__(key)

    with world() as (hub, spoke, _):
        hub.report_heartbeats([sign(0, 40)])
        hub._handle_message(hub._peers[1], ArrivingLate(signs=[sign(1, 39)], attempt=0))
        assert hub.find_hung_rank(1, 1.0) is None, "node 1 has not reported in this attempt"
        spoke.begin_attempt(1)
        spoke.report_heartbeats([sign(1, 39)])
        assert until(lambda: hub.find_hung_rank(1, 1.0)).rank == 1


def test_the_limit_is_the_one_that_the_help_says() -> None:
    lone, pair = [sign(0, 40, still=9.0)], [sign(0, 6, still=9.0), sign(1, 6, still=9.0)]
    first_steps = Lifeline()
    first_steps.report_heartbeats(pair)
    assert first_steps.find_hung_rank(0, 1.0) == HungRank(0, 8.0)
    assert first_steps.find_hung_rank(0, 2.0) is None
    assert "It is 8 times as long" in Path(schema.__file__).read_text(encoding="utf-8")
    alone = Lifeline()
    alone.report_heartbeats(lone)
    assert alone.find_hung_rank(0, 9.0) == HungRank(0, 9.0)
    alone.report_heartbeats(pair[:1])
    assert alone.find_hung_rank(0, 1.0) is None, "a process that is alone may take any time"


def test_a_slow_rank_is_not_stuck_and_a_stranger_is_not_heard() -> None:
    with world() as (hub, spoke, _):
        hub.report_heartbeats([sign(0, 40)])
        spoke.report_heartbeats([sign(1, 39, still=0.1)])
        until(lambda: hub._peers[1].report.heartbeats)
        assert hub.find_hung_rank(0, 1.0) is None
        with pytest.raises(EchelonError, match="has another key"):
            LifelineClient("127.0.0.1", hub.port, b"guessed", 5, lambda failure: None)
        assert set(hub._peers) == {1}
