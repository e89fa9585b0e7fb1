"""A sample of the campaign of restarts and starts; `make campaigns` does hundreds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from worlds import started_forked

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))
import restarts


@pytest.mark.slow
def test_a_sample_of_the_restart_campaign(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Machines are shared: no time is judged.
    options = argparse.Namespace(restarts=2, starts=1, limit_s=300.0, late_s=300.0, seed=0)
    found = restarts.campaign(started_forked, tmp_path, options)
    said = capfd.readouterr().err
    assert (found["restarts"]["bad"], found["starts"]["bad"]) == (0, 0), said
    assert found["restarts"]["count"]["kills"] == 2
    assert found["restarts"]["seconds"]["number"] == 2 - found["restarts"]["count"]["early"]
    assert found["starts"]["seconds_to_first_step"]["number"] == 1
