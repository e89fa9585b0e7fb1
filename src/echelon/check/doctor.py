"""`echelon doctor`: this machine, what is wrong with it, and what mends it."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from echelon import __version__
from echelon.check import rules
from echelon.check.facts import gather
from echelon.check.show import console, table
from echelon.check.smoke import smoke_test
from echelon.check.verdict import FAIL, OK, Verdict, worst
from echelon.errors import Exit

JSON_VERSION = 1


def doctor(runs: Path, as_json: bool, with_smoke: bool) -> int:
    facts = gather(os.environ, runs)
    verdicts = rules.judge(facts)
    if with_smoke and not isinstance(facts.torch, str):
        if sys.stderr.isatty():
            print("training a step on every device …", file=sys.stderr)
        verdicts += rules.smoke(smoke_test(len(facts.torch.devices), os.environ))
    if as_json:
        print(json.dumps(as_data(verdicts), indent=2))
    else:
        table(verdicts)
        if console().is_terminal:
            print(_last_line(verdicts))
    return Exit.NOT_READY if worst(verdicts) == FAIL else Exit.OK


def as_data(verdicts: list[Verdict]) -> dict[str, object]:
    return {
        "version": JSON_VERSION,
        "host": socket.gethostname(),
        "echelon": __version__,
        "python": sys.executable,
        "worst": worst(verdicts),
        "checks": [verdict._asdict() for verdict in verdicts],
    }


def _last_line(verdicts: list[Verdict]) -> str:
    bad = [v for v in verdicts if v.do and v.state != OK]
    fails = sum(v.state == FAIL for v in bad)
    if not bad:
        return "all well"
    return f"{fails} to mend, {len(bad) - fails} to consider: the command is under each"
