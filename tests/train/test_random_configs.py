"""A sample of the campaign of random configurations; `make campaigns` tries 28."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[1] / "campaigns" / "random_configs.py"


@pytest.mark.slow
def test_a_sample_of_the_campaign_of_random_configurations(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, str(CAMPAIGN), "--only", "2", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert "fsdp kind=buffers" in found["tried"][0]
    assert found["done"]["runs"] == 6
    assert found["done"]["killed while saving"] > 0
    assert sum(found["bad"].values()) == 0
