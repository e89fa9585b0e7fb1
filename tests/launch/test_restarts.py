"""A sample of the campaign of restarts and starts; `make campaigns` does hundreds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[1] / "campaigns" / "restarts.py"


@pytest.mark.slow
def test_a_sample_of_the_restart_campaign(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, str(CAMPAIGN), "--restarts", "2", "--starts", "1"]
    patient = ["--limit-s", "300", "--late-s", "300"]  # machines are shared: no time is judged
    done = subprocess.run(
        [*command, *patient, "--json", str(out)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["restarts"]["count"]["kills"] == 2
    assert found["restarts"]["seconds"]["number"] == 2 - found["restarts"]["count"]["early"]
    assert found["starts"]["seconds_to_first_step"]["number"] == 1
