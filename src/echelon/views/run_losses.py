"""What became of the time of a run: a table of what was lost by cause, and all numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from echelon.runs.accounting import (
    QUEUE,
    REDONE_STEPS,
    REPLACED_RANKS,
    RESTARTS,
    STARTING,
    STOPPED,
    RunAccounting,
)
from echelon.runs.history import BadMachine, RunHistory, SlowRank
from echelon.tracking.summary import format_share
from echelon.utils.text import format_count, format_elapsed
from echelon.views.table import Table, TableColumn

_TITLES = {
    STARTING: "starting",
    RESTARTS: "restarts",
    QUEUE: "waiting in the queue",
    STOPPED: "stopped",
    REDONE_STEPS: "steps made again",
    REPLACED_RANKS: "replacing ranks",
}


def render_losses(accounting: RunAccounting | None, width: int) -> list[Text]:
    """Return a table of the time that was lost by cause; nothing for a run that was started once
    and lost no rank."""
    if accounting is None or not accounting.is_disturbed:
        return []
    notes = _describe_causes(accounting)
    causes = [cause for cause, lost_s in accounting.lost_s.items() if lost_s or notes.get(cause)]
    times = [accounting.lost_s[cause] for cause in causes]
    shares = [format_share(lost_s / accounting.wall_s) if lost_s else "–" for lost_s in times]
    columns = [
        TableColumn("LOST BY", [_TITLES[cause] for cause in causes]),
        TableColumn("TIME", [format_elapsed(lost_s) for lost_s in times], is_right_aligned=True),
        TableColumn("SHARE", shares, is_right_aligned=True),
        TableColumn("", [notes.get(cause, "") for cause in causes], min_width=6, priority=1),
    ]
    return Table(columns, header_style="", indent=2).render(width)


def format_hosts_at_fault(accounting: RunAccounting | None) -> str:
    """Return how often ranks were lost on which machine: `b 3 times, a once`."""
    losses = {} if accounting is None else accounting.losses_by_host
    return ", ".join(f"{host} {f'{n} times' if n > 1 else 'once'}" for host, n in losses.items())


def format_left_nodes(history: RunHistory) -> str:
    """Return which nodes left on purpose, and why:
    `node 2 (c, rank 2): stopped by SIGTERM, after step 120`."""
    texts = []
    for phase in history.phases:
        for round_ in phase.rounds:
            if round_.left:
                why = round_.reason.removeprefix("left: ").partition("; going on")[0]
                texts.append(f"{why}, after step {round_.step}")
    return "; ".join(texts)


def format_slow_ranks(history: RunHistory) -> str:
    """Return the machines whose ranks were slow, and when they last were:
    `b 3 times, last rank 2 from step 120 to 180 (2.1 × the median)`."""
    by_host: dict[str, list[SlowRank]] = {}
    for phase in history.phases:
        for slow in phase.slow_ranks:
            by_host.setdefault(slow.host, []).append(slow)
    texts = []
    for host, found in sorted(by_host.items(), key=lambda item: -len(item[1])):
        last, times = found[-1], f"{len(found)} times, last " if len(found) > 1 else ""
        until = "on" if last.until_step is None else f"to {last.until_step}"
        when = f"from step {last.step} {until}"
        texts.append(f"{host} {times}rank {last.rank} {when} ({last.factor:.3g} × the median)")
    return "; ".join(texts)


def format_left_out_machines(history: RunHistory) -> str:
    """Return which machines were left out, when, why, and what took over:
    `b after step 40 (2 faults, the last: killed by SIGKILL): c took over`."""
    return "; ".join(
        f"{_format_bad_machine(machine)}: {machine.replaced_by or 'no other'} took over"
        for machine in _list_bad_machines(history)
        if machine.is_left_out
    )


def format_kept_machines(history: RunHistory) -> str:
    """Return which machines were found to be at fault and stayed, and why."""
    return "; ".join(
        f"{_format_bad_machine(machine)}, since {machine.kept_because}"
        for machine in _list_bad_machines(history)
        if not machine.is_left_out
    )


def _list_bad_machines(history: RunHistory) -> list[BadMachine]:
    return [machine for phase in history.phases for machine in phase.bad_machines]


def _format_bad_machine(machine: BadMachine) -> str:
    return f"{machine.host} after step {machine.step} ({machine.reason})"


def _describe_causes(accounting: RunAccounting) -> dict[str, str]:
    """Return what is to be counted of a cause, where there is something."""
    counts = {
        RESTARTS: [(accounting.restarts, "restart")],
        QUEUE: [(accounting.requeues, "requeue")],
        REDONE_STEPS: [(accounting.steps_redone, "step")],
        REPLACED_RANKS: [
            (accounting.lost_ranks, "lost rank"),
            (accounting.replaced_ranks, "replacement"),
        ],
    }
    notes = {cause: _format_counts(of_cause) for cause, of_cause in counts.items()}
    if accounting.lost_ranks:
        with_fewer = format_elapsed(accounting.fewer_processes_s)
        notes[REPLACED_RANKS] += f"; {with_fewer} with fewer processes"
    return notes


def _format_counts(counts: Sequence[tuple[int, str]]) -> str:
    return ", ".join(format_count(number, noun) for number, noun in counts if number)


def accounting_to_json(
    accounting: RunAccounting | None, history: RunHistory
) -> dict[str, Any] | None:
    """Return the time of a run as `echelon show --json` prints it; None where it is not known."""
    if accounting is None:
        return None
    slow_ranks = [
        {"phase": index, **asdict(slow)}
        for index, phase in enumerate(history.phases)
        for slow in phase.slow_ranks
    ]
    return {
        **accounting.to_json(),
        "rounds": _rounds_to_json(history),
        "slow_ranks": slow_ranks,
        "bad_machines": [
            {"phase": index, **asdict(machine)}
            for index, phase in enumerate(history.phases)
            for machine in phase.bad_machines
        ],
    }


def _rounds_to_json(history: RunHistory) -> list[dict[str, Any]]:
    return [
        {
            "phase": index,
            "began": round_.began,
            "number": round_.number,
            "processes": round_.processes,
            "step": round_.step,
            "standstill_s": round_.standstill_s,
            "step_s": round_.step_s,
            "lost_ranks": list(round_.lost),
            "joined_ranks": list(round_.joined),
            "left_ranks": list(round_.left),
            "reason": round_.reason,
            "hosts": list(round_.hosts),
        }
        for index, phase in enumerate(history.phases)
        for round_ in phase.rounds
    ]
