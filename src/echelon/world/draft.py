"""A world that is still being detected."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from echelon.errors import Fault
from echelon.world.launcher_variables import Env


@dataclass
class WorldDraft:
    """What is known so far and why, which variables were read, and which faults were found."""

    env: Env
    source: str = "single process"
    values: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    variables_read: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    is_guess: bool = False

    def set_value(self, name: str, value: int, because: str) -> None:
        """Set a field, with the reason."""
        self.values[name], self.reasons[name] = value, because

    def set_guess(self, name: str, value: int, because: str) -> None:
        """Set a field that may turn out to be another once the processes have met."""
        self.is_guess = True
        self.set_value(name, value, f"a guess: {because}")

    def add_fault(self, what: str, do: str) -> None:
        """Note a fault; all of them are raised together at the end."""
        self.faults.append(Fault(what, do))

    def quote_variable(self, name: str) -> str:
        """Return a variable as it is set, NAME=VALUE; it then counts as read."""
        self.variables_read.add(name)
        return f"{name}={self.env[name]}"

    def read_integer(self, name: str) -> int | None:
        """Return the whole number in a variable, or None and a fault."""
        quoted, raw = self.quote_variable(name), self.env[name].strip()
        if not raw:
            self.add_fault(f"{name} is set, but empty", f"unset {name}, or give it its number")
        elif not re.fullmatch(r"[+-]?[0-9]+", raw):
            self.add_fault(f"{quoted} is not a whole number", f"unset {name}, or correct it")
        elif int(raw) < 0:
            self.add_fault(f"{quoted} is negative", f"count from 0 in {name}, or unset it")
        else:
            return int(raw)
        return None
