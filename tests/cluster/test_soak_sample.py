"""A short sample of the campaign that breaks something of a run on three hosts every minute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_runner import HERE
from slurm_cluster import TestCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_a_sample_of_the_soak(cluster: TestCluster, tmp_path: Path) -> None:
    """`make campaigns` goes on for two hours."""
    campaign = HERE.parent / "campaigns" / "soak.py"
    pace = ["--minutes", "0.3", "--every-s", "5", "--silence-s", "14"]
    done = subprocess.run(
        [sys.executable, str(campaign), *pace, "--json", str(tmp_path / "a")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "a").read_text())
    assert (found["exit"], found["bad"], found["orphans"]) == (0, 0, [])
    assert sum(found["faults"].values()) >= 1
