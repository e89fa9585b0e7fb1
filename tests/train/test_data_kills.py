"""A sample of the campaign of kills over all kinds of data; `make campaigns` kills 200 times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))
import data_kills
from data_experiments import SAMPLES


@pytest.mark.slow
def test_a_sample_of_the_campaign_of_kills(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = data_kills.run_campaign(tmp_path, ["tar"], kills=2, seed=5)
    assert sum(found["bad"].values()) == 0, capfd.readouterr().err
    assert found["done"]["kills"] == 2
    assert found["done"]["shares compared"] > data_kills.STEPS


def test_what_is_not_exactly_once_is_seen() -> None:
    samples = [*range(SAMPLES)]
    twice = [0, *samples[:-1]]
    assert data_kills.has_all_once("tar", [*samples, *samples, 3, 1])
    assert not data_kills.has_all_once("tar", [*samples, *twice])
    assert not data_kills.has_all_once("tar", [*samples, 3, 3])
    assert not data_kills.has_all_once("mixture", twice)
    assert data_kills.has_all_once("stream", [0, 1000, 2000, 1, 1001, 2001])
    assert not data_kills.has_all_once("stream", [0, 1000, 2000, 2, 1001, 2001])
