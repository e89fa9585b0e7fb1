"""Has machines leave that are at fault, on the node that leads.

A machine is at fault by what was lost on it (`bad_machines.py`), by an error that its GPUs count
(`gpu_watch.py`), or since all others wait for it (`monitoring/stragglers.py`). It leaves as any
node does that leaves on purpose: at a step boundary, and a spare takes over its ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence

from echelon.launch.node.bad_machines import (
    Verdict,
    describe_faults,
    find_faulty_host,
    judge_machine,
    list_new_faults,
)
from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.node_reports import RankLoss
from echelon.runs.history import BadMachine, record_bad_machine
from echelon.runs.run_folder import Run
from echelon.world.rounds import SlowMachine


class MachineJudge:
    """What a node that leads knows of machines; all that must outlive it is in the membership."""

    def __init__(self, lifeline: Lifeline, run: Run, max_faults: int, min_nodes: int) -> None:
        self._lifeline, self._run = lifeline, run
        self._max_faults, self._min_nodes = max_faults, min_nodes
        self._kept: set[str] = set()
        """Machines of which it was said that they stay."""
        self._newest_step = 0

    def count_losses(self, losses: Sequence[RankLoss], present: Collection[int]) -> None:
        """Count what machines are at fault for; `present` are the ranks of the round in which it
        happened. One that is alone cannot be compared with others."""
        known = self._lifeline.membership
        hosts = {m.host for m in known.members.values()} | {loss.failure.host for loss in losses}
        for failure in list_new_faults(known, losses, present) if len(hosts) > 1 else ():
            self._lifeline.count_fault(failure.host, failure.summary)

    def judge_all(self, step: int, can_replace: bool, slow: SlowMachine | None = None) -> None:
        """Have the machines leave that are at fault now; `can_replace`: the others could go on
        without one of them, and `slow` has been slow for too long."""
        known = self._lifeline.membership
        self._newest_step = max(step, self._newest_step)  # it is not known right after a loss
        if self._lifeline.stop_reason:
            return
        if host := find_faulty_host(known, self._max_faults):
            # Without a spare it is worth more than nothing, unless it is lost itself.
            is_here = any(m.host == host for m in known.members.values())
            self._judge(host, describe_faults(known, host), can_replace, needs_spare=is_here)
        for host, reason in self._lifeline.get_machine_faults().items():
            self._judge(host, reason, can_replace)
        if slow is not None and can_replace:
            self._judge(slow.host, str(slow), can_replace, needs_spare=True, is_named=True)

    def _judge(
        self,
        host: str,
        reason: str,
        can_replace: bool,
        needs_spare: bool = False,
        is_named: bool = False,
    ) -> None:
        known = self._lifeline.membership
        if host in known.excluded_hosts:
            return
        verdict = Verdict("its ranks cannot be replaced")
        if can_replace:
            verdict = judge_machine(known, host, self._min_nodes, needs_spare)
        kept_because, nodes, replaced_by = verdict
        if kept_because:
            # It is judged again and again: a spare may come.
            if is_named or host in self._kept:
                return
            self._kept.add(host)
            text = f"it stays, since {kept_because}"
        else:
            self._lifeline.exclude(host)
            for node in nodes:
                self._lifeline.ask_to_leave(node, reason)
            text = "it is left out" + (f", and {replaced_by} takes over" if replaced_by else "")
        print(f"{host} is at fault ({reason}): {text}", file=sys.stderr, flush=True)
        found = (time.time(), host, reason, self._newest_step)
        machine = BadMachine(*found, not kept_because, replaced_by, kept_because)
        record_bad_machine(self._run, machine)
