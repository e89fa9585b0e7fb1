"""A world in the making."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from echelon.errors import Fault
from echelon.world.sources import Env


@dataclass
class Draft:
    """What is known and why, which variables were read, what is wrong."""

    env: Env
    source: str = "single process"
    values: dict[str, int] = field(default_factory=dict)
    because: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    guessed: bool = False

    def put(self, name: str, value: int, because: str) -> None:
        self.values[name], self.because[name] = value, because

    def guess(self, name: str, value: int, because: str) -> None:
        self.guessed = True
        self.put(name, value, f"a guess: {because}")

    def wrong(self, what: str, do: str) -> None:
        self.faults.append(Fault(what, do))

    def quote(self, name: str) -> str:
        """A variable as it is set; it then counts as read."""
        self.read.add(name)
        return f"{name}={self.env[name]}"

    def integer(self, name: str) -> int | None:
        """A variable's whole number, or a fault."""
        quoted, raw = self.quote(name), self.env[name].strip()
        if not raw:
            self.wrong(f"{name} is set, but empty", f"unset {name}, or give it its number")
        elif not re.fullmatch(r"[+-]?[0-9]+", raw):
            self.wrong(f"{quoted} is not a whole number", f"unset {name}, or correct it")
        elif int(raw) < 0:
            self.wrong(f"{quoted} is negative", f"count from 0 in {name}, or unset it")
        else:
            return int(raw)
        return None
