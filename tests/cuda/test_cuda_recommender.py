"""The recommenders on one NVIDIA GPU: the numbers of the CPU, to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_cuda_training import echelon
from torch import nn

from echelon.optim import RowAdam
from echelon.recipes.movielens.data.synthetic import make_synthetic, write_csv
from echelon.runs.metrics_file import read_metrics

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    write_csv(make_synthetic(20_000, users=300, items=500, seed=0), folder)
    return folder


@pytest.mark.parametrize("kind", ["movielens", "movielens_dot", "movielens_ranking"])
def test_the_curve_is_the_one_of_the_cpu(kind: str, ratings: Path, tmp_path: Path) -> None:
    words = [f"experiment={kind}", f"data={ratings}", "trainer.log_steps=1", "trainer.steps=20"]
    for name, visible in (("gpu", "0"), ("cpu", "")):
        run = ["train", f"run.name={name}", *words]
        done = echelon(tmp_path, *run, CUDA_VISIBLE_DEVICES=visible)
        assert done.returncode == 0, done.stderr
    on_gpu, on_cpu = (
        [
            line["loss"]
            for line in read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
            if "lr" in line
        ]
        for name in ("gpu", "cpu")
    )
    assert len(on_gpu) == 20
    assert on_gpu == pytest.approx(on_cpu, rel=2e-3)


def test_rows_are_stepped_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    start, batches = torch.randn(50, 8), [torch.randint(0, 50, (64,)) for _ in range(10)]
    ends = []
    for device in ("cuda", "cpu"):
        table = nn.Embedding(50, 8, sparse=True, _weight=start.clone()).to(device)
        optimizer = RowAdam(table.parameters(), lr=0.1, weight_decay=0.01)
        for rows in batches:
            table(rows.to(device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(table.weight.detach().cpu())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
