"""Which rank the others wait for.

With a line of metrics, at most once a second, every rank writes into the store how long its own
part of a step took (its data and its computation, before it waits for anybody), and rank 0 reads
what is there. No rank waits for another, and no step has a collective more.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from echelon.train.group import Group

BEHIND = 1.5
"""So many times the median of the others."""
_LEAST_MS = 1.0
"""And so much more: what takes a tenth of a millisecond takes another one for no reason at all."""
_AGREE = 2
"""Times in a row that the same rank has to be behind."""
_EVERY_S = 1.0
_SAMPLES = 3
"""Steps of a rank that its word is the median of, at the least."""


class Own(NamedTuple):
    """A rank's own part of a step, in milliseconds."""

    data: float
    compute: float
    """0 where a rank waits for others within it, so that nobody knows what is its own."""

    @property
    def total(self) -> float:
        return self.data + self.compute


class Stragglers:
    """Of one rank of several."""

    def __init__(self, group: Group, say: Callable[[str], None] | None = None) -> None:
        self._group = group
        self._judge = Judge(say or _print)
        self._taken: list[Own] = []
        self._next_s = 0.0

    def note(self, own: Iterable[Own | None]) -> None:
        self._taken += [one for one in own if one is not None]

    def compare(self, now: float) -> dict[str, float]:
        """On rank 0, now and then, `slowest_rank` and `slowest_x`."""
        if now < self._next_s or len(self._taken) < _SAMPLES:
            return {}
        self._next_s = now + _EVERY_S
        mine = Own(*(_median(column) for column in zip(*self._taken, strict=True)))
        self._taken.clear()
        # The store may go with the world; then the next step says so, and says it better.
        with contextlib.suppress(RuntimeError):
            self._group.tell(f"pace/{self._group.world.rank}", json.dumps(mine))
            if self._group.world.rank == 0:
                return self._judge(self._all(), self._host)
        return {}

    def _all(self) -> dict[int, Own]:
        """Of the ranks that have said something."""
        store, size = self._group.store, self._group.world.size
        keys = [f"pace/{rank}" for rank in range(size)]
        if store is None or not store.check(keys):
            return {}
        return {rank: Own(*json.loads(text)) for rank, text in enumerate(store.multi_get(keys))}

    def _host(self, rank: int) -> str:
        return self._group.ask(f"rank {rank}")


class Judge:
    """Says when a rank falls behind, another one does, or none does any more."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._named: int | None = None
        self._suspects: list[int | None] = []

    def __call__(self, all_: Mapping[int, Own], host: Callable[[int], str]) -> dict[str, float]:
        if len(all_) < 2:
            return {}
        slowest = max(all_, key=lambda rank: all_[rank].total)
        its = all_[slowest]
        usual = _median([own.total for rank, own in all_.items() if rank != slowest])
        times = its.total / max(usual, 1e-6)
        behind = slowest if times >= BEHIND and its.total - usual >= _LEAST_MS else None
        self._suspects = [*self._suspects, behind][-_AGREE:]
        if behind != self._named and self._suspects == [behind] * _AGREE:
            if behind is None:
                self._say(f"rank {self._named} on {host(self._named or 0)} keeps up again")
            else:
                self._say(_behind(slowest, host(slowest), its, usual))
            self._named = behind
        if not its.compute:
            return {}
        return {"slowest_rank": slowest, "slowest_x": round(times, 2)}


def _behind(rank: int, host: str, its: Own, usual: float) -> str:
    look = f"look at {host} with `echelon gpus` or `echelon preflight`"
    if not its.compute:
        return (
            f"rank {rank} on {host} waits for its data {its.data:.3g} ms a step "
            f"(the others {usual:.3g}) and all wait for it; {look}"
        )
    part = "waits for its data" if its.data > its.compute else "computes"
    return (
        f"rank {rank} on {host} takes {its.total / max(usual, 1e-6):.1f} × the median "
        f"({its.total:.3g} ms beside {usual:.3g}) and all wait for it: of these it {part} "
        f"{max(its):.3g} ms a step; {look}"
    )


def _median(values: Sequence[float]) -> float:
    """Python's own takes a hundredth of a second to import."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2


def _print(text: str) -> None:
    print(text, file=sys.stderr)
