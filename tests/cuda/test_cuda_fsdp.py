"""Shards on one NVIDIA GPU, through NCCL: the same curve as the whole model's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ALONE = Path(__file__).parent / "fsdp_single_rank.py"


@pytest.mark.parametrize(
    ("precision", "again", "kind", "close"),
    [
        ("float32", "false", "fsdp", 1e-3),
        ("float32", "true", "fsdp", 1e-3),
        ("bf16", "true", "fsdp", 0.05),
        ("fp16", "false", "fsdp", 0.05),
        ("float32", "false", "hybrid", 1e-3),
        ("fp16", "true", "hybrid", 0.05),
    ],
)
def test_the_curve_is_the_whole_models(precision: str, again: str, kind: str, close: float) -> None:
    ended = subprocess.run(
        [sys.executable, str(ALONE), "cuda", precision, again, kind],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["places"] == ["cuda"]
    assert len(told["shared"]) == 8
    assert told["shared"] == pytest.approx(told["whole"], rel=close)
