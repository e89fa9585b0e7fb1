"""What real trainings leave behind, as lists, screens and drawings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from worlds import losses, verb

from echelon.runs.run_folder import Run

TOY = ("train", "experiment=toy", "samples=256", "eval_samples=64", "trainer.log_steps=1")


@pytest.mark.slow
def test_runs_that_finished_went_on_and_failed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    where = ("--dir", str(root))
    base = (*TOY, f"run.dir={root}", "track.progress=none")
    assert verb(tmp_path, *base, "run.name=a", "lr=0.05").code == 0
    assert verb(tmp_path, *base, "run.name=b", "lr=0.01", "trainer.epochs=1").code == 0
    assert verb(tmp_path, "resume", str(root / "b"), "trainer.epochs=3").code == 0
    assert verb(tmp_path, *base, "run.name=c", "lr=1e30").code == 1

    listed = json.loads(verb(tmp_path, "runs", "--json", *where, "--sort", "best").output)["runs"]
    assert [run["run"] for run in listed] == ["a", "b", "c"]
    assert [run["state"] for run in listed] == ["finished", "finished", "failed"]
    assert [run["differs"] for run in listed] == [{"lr": "0.05"}, {"lr": "0.01"}, {"lr": "1e+30"}]
    assert [run["step"] for run in listed[:2]] == [24, 24]

    shown = json.loads(verb(tmp_path, "show", "b", "--json", *where).output)
    assert shown["metrics"]["loss"]["count"] == len(losses(Run(root / "b"))) == 24
    assert shown["metrics"]["eval_loss"]["best"] == pytest.approx(listed[1]["best"])
    assert [s["step"] for s in shown["snapshots"]] == [8, 16, 24]
    assert [s["best"] for s in shown["snapshots"]] == [False, False, True]
    assert "the loss is" in verb(tmp_path, "show", "c", *where).output

    page = tmp_path / "curves.html"
    drawn = verb(tmp_path, "plot", "[ab]", *where, "-o", str(page))
    assert drawn.output == f"{page}\n"
    (text,) = re.findall(r'id="data">(.*?)</script>', page.read_text(), re.S)
    panels = {panel["metric"]: panel for panel in json.loads(text)["panels"]}
    assert list(panels) == ["loss", "eval_loss", "eval_mae"]
    assert panels["loss"]["lines"][1]["y"] == pytest.approx(losses(Run(root / "b")), rel=1e-5)
