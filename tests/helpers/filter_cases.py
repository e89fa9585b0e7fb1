"""Conditions and orders of runs, and what every door to them must answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_folders import make_run

from echelon.runs.annotations import annotate_run
from echelon.runs.run_folder import Run

CASES_FILE = Path(__file__).parents[1] / "board" / "filter_cases.json"
CASES: dict[str, list[dict[str, Any]]] = json.loads(CASES_FILE.read_text())


def make_runs(root: Path) -> list[Run]:
    """The run folders of the cases."""
    runs = []
    for case in CASES["runs"]:
        settings = {"entry": "echelon.recipes.toy:experiment", **case["settings"]}
        run = make_run(root, case["name"], case["metrics"], case.get("trainer"), case["status"])
        config = json.loads(run.config_file.read_text())
        config |= {"experiment": settings, "seed": case.get("seed", config["seed"])}
        run.config_file.write_text(json.dumps(config))
        annotate_run(run, case.get("note"), case.get("tags", []), [])
        runs.append(run)
    return runs


def require_answer(
    case: dict[str, Any], names: list[str] | None, said: str, hint: str | None = None
) -> None:
    """Compare an answer, names or a fault, with what a case expects."""
    if "says" not in case:
        assert names == case["keeps"], (case, said)
        return
    assert names is None, case
    assert case["says"] in said, case
    if "nearest" in case:
        nearest = (said if hint is None else hint).partition("did you mean ")[2].strip("'")
        assert nearest.startswith(case["nearest"]), (case, said, hint)
