"""A user's own file with the smallest experiment there is, and lines of a test in its function."""

from __future__ import annotations

import textwrap
from pathlib import Path

_TEMPLATE = """\
import torch
import echelon

def experiment(cfg):
{lines}
    model = torch.nn.Linear(2, 1)
    return echelon.Experiment(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.nn.functional.mse_loss,
        (torch.randn(64, 2), torch.randn(64, 1)),
    )

if __name__ == "__main__":
    echelon.main(experiment)
"""


def write_linear_experiment(path: Path, lines: str) -> None:
    """Write the file, in UTF-8. The function begins with these lines."""
    path.write_text(_TEMPLATE.format(lines=textwrap.indent(lines, "    ")), encoding="utf-8")
