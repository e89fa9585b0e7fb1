"""A sample of the campaign of random configurations; `make campaigns` tries 28."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))
import random_configs


@pytest.mark.slow
def test_a_sample_of_the_campaign_of_random_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", [random_configs.__file__, "--only", "2", "--json", str(out)])
    assert random_configs.main() == 0
    found = json.loads(out.read_text())
    assert "fsdp kind=buffers" in found["tried"][0]
    assert found["done"]["runs"] == 6
    assert found["done"]["killed while saving"] > 0
    assert sum(found["bad"].values()) == 0
