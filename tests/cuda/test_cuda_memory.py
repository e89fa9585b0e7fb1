"""Memory of an NVIDIA GPU that really runs out, and what is said then."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_cuda_training import echelon

from echelon.snapshot.reader import find_newest

pytestmark = pytest.mark.gpu

GREEDY = """
import echelon, torch
from torch import nn

class Greedy(nn.Linear):
    passes = 0
    def forward(self, x):
        Greedy.passes += self.training  # not in the check of the loss before the first step
        if Greedy.passes == 9:
            torch.empty({bytes}, dtype=torch.uint8, device=x.device)
        return super().forward(x)

def experiment():
    model = Greedy(4, 1)
    data = (torch.ones(160, 4), torch.ones(160, 1))
    optimizer = torch.optim.Adam(model.parameters())
    return echelon.Experiment(model, optimizer, nn.functional.mse_loss, data)
"""


def test_out_of_memory_is_explained_and_the_run_can_go_on(tmp_path: Path) -> None:
    _, total = torch.cuda.mem_get_info()
    (tmp_path / "greedy.py").write_text(GREEDY.format(bytes=2 * total))
    words = ["experiment=greedy.py:experiment", "trainer.batch_size=8", "trainer.save.steps=4"]
    failed = echelon(tmp_path, "train", "run.name=a", *words, "trainer.capture=never")
    assert failed.returncode == 1, failed.stderr
    assert "Traceback" not in failed.stderr
    told = re.search(r"out of memory on cuda:0 of rank 0: (\S+) GB were asked for", failed.stderr)
    assert told, failed.stderr
    assert float(told[1].replace(",", "")) == pytest.approx(2 * total / 1e9, rel=0.01)
    assert re.search(r"GB of \S+ GB were free; used by parameters 20 B", failed.stderr)
    assert "trainer.accumulate=2 (the numbers stay)" in failed.stderr
    assert "trainer.precision=bf16" in failed.stderr
    snapshot, damaged = find_newest(tmp_path / "runs" / "a" / "snapshots")
    assert snapshot is not None
    assert (snapshot.step, damaged) == (8, [])
    again = "is intact: echelon resume a trainer.accumulate=2"
    assert again in failed.stderr
    (tmp_path / "greedy.py").write_text(GREEDY.format(bytes=8))
    resumed = echelon(tmp_path, "resume", "a", "trainer.accumulate=2")
    assert resumed.returncode == 0, resumed.stderr


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    """Before there is a training, less can be counted, and the settings are said all the same."""
    _, total = torch.cuda.mem_get_info()
    (tmp_path / "large.py").write_text(
        f"""
import echelon, torch
from torch import nn

def experiment():
    with torch.device("meta"):
        model = nn.Linear({total // 4}, 4, bias=False)
    model.to = lambda device: model.to_empty(device=device)
    data = (torch.ones(8, 4), torch.ones(8, 1))
    return echelon.Experiment(model, torch.optim.SGD(model.parameters()), nn.MSELoss(), data)
"""
    )
    failed = echelon(tmp_path, "train", "experiment=large.py:experiment", "trainer.batch_size=8")
    assert failed.returncode == 1, failed.stderr
    assert "out of memory on cuda:0 of rank 0" in failed.stderr
    assert "replica.kind=fsdp on several GPUs" in failed.stderr
    assert "before the first step" in failed.stderr
