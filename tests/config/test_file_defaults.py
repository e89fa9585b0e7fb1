"""Settings that a file gives to `echelon.main`, below what is typed."""

from __future__ import annotations

import json

import pytest
import toy_experiments

import echelon


@pytest.mark.parametrize(("typed", "processes"), [([], 3), (["launch.procs=2"], 2)])
def test_what_is_typed_wins(
    typed: list[str], processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        echelon.main(
            toy_experiments.regression,
            [*typed, "--dry-run", "--json"],
            defaults=["launch=local", "launch.procs=3"],
        )
    assert ended.value.code == 0
    assert len(json.loads(capsys.readouterr().out)["places"]) == processes
