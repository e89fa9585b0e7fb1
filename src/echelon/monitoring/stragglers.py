"""Which rank the others wait for.

With a line of metrics, at most once a second, every rank writes to the store how long its own part
of a step took (data and computation, before it waits for another rank), and rank 0 reads what is
there. No rank waits for another, and no step has one more collective.

A machine that is slow for minutes is reported to the agents through the store: they replace it, if
they have a spare.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from echelon.config.schema import LaunchConfig
from echelon.parallel.process_group import RankGroup
from echelon.world.rounds import SLOW_MACHINE_KEY, SlowMachine

RecordStraggler = Callable[[int, str, float | None], None]
"""Called with a rank, its host, and its time as a multiple of the median of the others; None when
it keeps up again."""
_MIN_LAG_MS = 1.0
"""And so much more: what takes a tenth of a millisecond takes another one for no reason at all."""
_CONFIRMATIONS = 2
"""Times in a row that the same rank has to be behind, or no rank, however short that takes."""
_COMPARE_EVERY_S = 1.0
_MIN_SAMPLES = 3
"""Steps of a rank that its word is the median of, at the least."""


class OwnTime(NamedTuple):
    """A rank's own part of a step, in milliseconds."""

    data_ms: float
    compute_ms: float
    """0 where a rank waits for others within it, so that nobody knows what is its own."""

    @property
    def total_ms(self) -> float:
        return self.data_ms + self.compute_ms


class StragglerMonitor:
    """Reports the own time of this rank; on rank 0 also compares all ranks."""

    def __init__(self, group: RankGroup, launch: LaunchConfig, record: RecordStraggler) -> None:
        self._group = group
        self._detector = StragglerDetector(_print, launch.slow_factor, launch.slow_s, record)
        self._machines = SlowMachineDetector(launch.slow_factor, launch.replace_slow_s)
        self._hosts: list[str] = []
        self._own_times: list[OwnTime] = []
        self._next_s = 0.0

    def add_steps(self, own_times: Iterable[OwnTime | None]) -> None:
        """Add the own times of sampled steps; None stands for a step that could not be measured."""
        self._own_times += [one for one in own_times if one is not None]

    def compare_ranks(self, now: float) -> dict[str, float]:
        """Return, on rank 0 and about once a second, `slowest_rank` and `slowest_x`; empty
        otherwise."""
        if now < self._next_s or len(self._own_times) < _MIN_SAMPLES:
            return {}
        self._next_s = now + _COMPARE_EVERY_S
        own_time = OwnTime(
            *(_compute_median(column) for column in zip(*self._own_times, strict=True))
        )
        self._own_times.clear()
        # The store may go with the world; then the next step says so, and says it better.
        with contextlib.suppress(RuntimeError):
            self._group.set_value(f"pace/{self._group.world.rank}", json.dumps(own_time))
            if self._group.world.rank == 0:
                own_times = self._read_all_ranks()
                if own_times:
                    self._report_slow_machine(own_times, now)
                return self._detector(own_times, self._get_host, now)
        return {}

    def _report_slow_machine(self, own_times: Mapping[int, OwnTime], now: float) -> None:
        if not self._hosts:
            self._hosts = [self._get_host(rank) for rank in range(self._group.world.size)]
        if (found := self._machines(own_times, self._hosts, now)) is not None:
            self._group.set_value(SLOW_MACHINE_KEY, found.to_json())

    def _read_all_ranks(self) -> dict[int, OwnTime]:
        """Return the own times of all ranks, or nothing until every rank has reported."""
        store, size = self._group.store, self._group.world.size
        keys = [f"pace/{rank}" for rank in range(size)]
        if store is None or not store.check(keys):
            return {}
        return {rank: OwnTime(*json.loads(text)) for rank, text in enumerate(store.multi_get(keys))}

    def _get_host(self, rank: int) -> str:
        return self._group.get_value(f"rank {rank}")


class StragglerDetector:
    """Prints and records when a rank falls behind, when another one does, and when none does any
    more.

    A rank is behind that has taken `factor` times the median of the others for `min_s` seconds.
    """

    def __init__(
        self,
        print_message: Callable[[str], None],
        factor: float,
        min_s: float,
        record: RecordStraggler,
    ) -> None:
        self._print_message, self._record = print_message, record
        self._factor, self._min_s = factor, min_s
        self._current_straggler: int | None = None
        self._suspect: int | None = None
        self._suspected_since_s, self._suspected_times = 0.0, 0

    def __call__(
        self, own_times: Mapping[int, OwnTime], get_host: Callable[[int], str], now: float
    ) -> dict[str, float]:
        if len(own_times) < 2:
            return {}
        slowest = max(own_times, key=lambda rank: own_times[rank].total_ms)
        slowest_time = own_times[slowest]
        median_ms = _compute_median(
            [own.total_ms for rank, own in own_times.items() if rank != slowest]
        )
        factor = slowest_time.total_ms / max(median_ms, 1e-6)
        straggler = (
            slowest
            if factor >= self._factor and slowest_time.total_ms - median_ms >= _MIN_LAG_MS
            else None
        )
        if self._is_confirmed(straggler, now) and straggler != self._current_straggler:
            before, self._current_straggler = self._current_straggler, straggler
            if before is not None:
                self._record(before, get_host(before), None)
            if straggler is not None:
                host = get_host(straggler)
                self._record(straggler, host, round(factor, 2))
                self._print_message(_describe_straggler(straggler, host, slowest_time, median_ms))
            elif before is not None:
                self._print_message(f"rank {before} on {get_host(before)} keeps up again")
        if not slowest_time.compute_ms:
            return {}
        return {"slowest_rank": slowest, "slowest_x": round(factor, 2)}

    def _is_confirmed(self, straggler: int | None, now: float) -> bool:
        """Return whether this rank, or none, has been behind for long enough."""
        if straggler != self._suspect or not self._suspected_times:
            self._suspect, self._suspected_since_s, self._suspected_times = straggler, now, 0
        self._suspected_times += 1
        is_long = now - self._suspected_since_s >= self._min_s
        return is_long and self._suspected_times >= _CONFIRMATIONS


class SlowMachineDetector:
    """Finds a machine whose slowest rank takes `factor` times the median of those of the other
    machines, each time for `min_s` seconds; 0: never."""

    def __init__(self, factor: float, min_s: float) -> None:
        self._factor, self._min_s = factor, min_s
        self._suspect, self._since_s = "", 0.0

    def __call__(
        self, own_times: Mapping[int, OwnTime], hosts: Sequence[str], now: float
    ) -> SlowMachine | None:
        slowest: dict[str, int] = {}
        for rank, own in own_times.items():
            known = slowest.setdefault(hosts[rank], rank)
            if own.total_ms > own_times[known].total_ms:
                slowest[hosts[rank]] = rank
        if not self._min_s or len(slowest) < 2:
            return None
        host, rank = max(slowest.items(), key=lambda item: own_times[item[1]].total_ms)
        others = [own_times[r].total_ms for name, r in slowest.items() if name != host]
        median_ms, time_ms = _compute_median(others), own_times[rank].total_ms
        factor = time_ms / max(median_ms, 1e-6)
        is_slow = factor >= self._factor and time_ms - median_ms >= _MIN_LAG_MS
        if not is_slow or host != self._suspect:
            self._suspect, self._since_s = host if is_slow else "", now
            return None
        slow_s = now - self._since_s
        if slow_s < self._min_s:
            return None
        return SlowMachine(host, rank, round(factor, 2), round(slow_s, 1))


def _describe_straggler(rank: int, host: str, slowest_time: OwnTime, median_ms: float) -> str:
    """Return the message about a rank that is behind: by how much, where, and what it waits for."""
    hint = f"look at {host} with `echelon gpus` or `echelon preflight`"
    if not slowest_time.compute_ms:
        return (
            f"rank {rank} on {host} waits for its data {slowest_time.data_ms:.3g} ms a step "
            f"(the others {median_ms:.3g}) and all wait for it; {hint}"
        )
    part = "waits for its data" if slowest_time.data_ms > slowest_time.compute_ms else "computes"
    return (
        f"rank {rank} on {host} takes {slowest_time.total_ms / max(median_ms, 1e-6):.1f} × "
        f"the median ({slowest_time.total_ms:.3g} ms beside {median_ms:.3g}) and all wait for it: "
        f"of these it {part} "
        f"{max(slowest_time):.3g} ms a step; {hint}"
    )


def _compute_median(values: Sequence[float]) -> float:
    """Return the median. Python's own module takes a hundredth of a second to import."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2


def _print(text: str) -> None:
    print(text, file=sys.stderr)
