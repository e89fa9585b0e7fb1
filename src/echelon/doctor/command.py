"""`echelon doctor`: reads facts about this machine, evaluates them, prints what to do."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from echelon import __version__
from echelon.doctor import rules
from echelon.doctor.machine_facts import read_machine_facts
from echelon.doctor.report import make_console, print_verdicts
from echelon.doctor.smoke_test import run_smoke_test
from echelon.doctor.verdict import FAIL, OK, Verdict, find_worst_state
from echelon.errors import ExitCode

DOCTOR_JSON_VERSION = 1


def run_doctor(runs: Path, as_json: bool, with_smoke: bool) -> int:
    """Check this machine and print the verdicts; return the exit code.

    ``runs`` is the folder whose disk is checked. ``with_smoke`` also trains a step on every
    device, unless torch cannot be imported.
    """
    facts = read_machine_facts(os.environ, runs)
    verdicts = rules.evaluate_machine(facts)
    if with_smoke and not isinstance(facts.torch, str):
        if sys.stderr.isatty():
            print("training a step on every device …", file=sys.stderr)
        verdicts += rules.evaluate_smoke_test(run_smoke_test(len(facts.torch.devices), os.environ))
    if as_json:
        print(json.dumps(convert_verdicts_to_dict(verdicts), indent=2))
    else:
        print_verdicts(verdicts)
        if make_console().is_terminal:
            print(_summarize(verdicts))
    return ExitCode.NOT_READY if find_worst_state(verdicts) == FAIL else ExitCode.OK


def convert_verdicts_to_dict(verdicts: list[Verdict]) -> dict[str, object]:
    """Return the document of ``--json``; ``echelon setup ssh`` reads it from other hosts."""
    return {
        "version": DOCTOR_JSON_VERSION,
        "host": socket.gethostname(),
        "echelon": __version__,
        "python": sys.executable,
        "worst": find_worst_state(verdicts),
        "checks": [verdict._asdict() for verdict in verdicts],
    }


def _summarize(verdicts: list[Verdict]) -> str:
    open_verdicts = [v for v in verdicts if v.do and v.state != OK]
    fail_count = sum(v.state == FAIL for v in open_verdicts)
    if not open_verdicts:
        return "no problem found"
    warn_count = len(open_verdicts) - fail_count
    return f"{fail_count} to fix, {warn_count} to consider: the command is under each"
