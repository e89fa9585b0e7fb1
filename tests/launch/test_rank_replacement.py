"""A rank is lost: the others go on with their state, a replacement joins, and the curve is that of
a run that nothing happened to."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_runner import ECHELON, HERE, curve, evaluations, only_run, status
from worlds import run_forked

FAULTY = HERE / "faulty_experiment.py"
TRAIN = (*ECHELON, "train", f"experiment={FAULTY}:experiment", "launch=local")
SETTINGS = ("trainer.batch_size=8", "trainer.epochs=4", "trainer.log_steps=1", "pause_s=0.02")
"""Forty steps, evaluated and saved after every tenth."""


@dataclass(frozen=True)
class Loss:
    """Rank `on` of `procs` is lost in `phase` at step `at` by `fault`."""

    procs: int
    fault: str
    on: int
    phase: str
    at: int
    says: str = "killed by SIGKILL"
    more: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        place = [f"on={self.on}", f"phase={self.phase}", f"at={self.at}"]
        return [f"launch.procs={self.procs}", f"fault='{self.fault}'", *place, *self.more]

    def __str__(self) -> str:
        return f"{self.fault}-rank-{self.on}-of-{self.procs}-{self.phase}-{self.at}"


LOSSES = (
    Loss(2, "kill", 1, "step", 5),
    Loss(2, "kill", 0, "step", 5),
    Loss(3, "kill", 1, "step", 13),
    Loss(3, "kill", 0, "evaluation", 10),
    Loss(3, "kill", 1, "evaluation", 10),
    Loss(2, "kill", 0, "save", 10),
    Loss(3, "error", 1, "step", 5, "TransientError: injected", ("transient=true",)),
    Loss(2, "segv", 1, "step", 5, "killed by SIGSEGV"),
    Loss(3, "stop", 1, "step", 8, "no progress for 3 s", ("launch.hang_s=3",)),
    Loss(3, "sleep", 0, "step", 8, "no progress for 3 s", ("launch.hang_s=3",)),
)


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    done = run_forked([*TRAIN, *SETTINGS, "launch.procs=2", "pause_s=0"], folder)
    assert done.code == 0, done.err
    return only_run(folder)


def require_same_numbers(folder: Path, clean: Path) -> None:
    """Every step and every evaluation stands there once, with the number of the clean run."""
    for read in (curve, evaluations):
        steps, values = zip(*read(folder), strict=True)
        clean_steps, clean_values = zip(*read(clean), strict=True)
        assert steps == clean_steps
        assert values == pytest.approx(clean_values, rel=1e-4, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_others_go_on_and_the_rank_is_replaced(
    loss: Loss, clean_run: Path, tmp_path: Path
) -> None:
    words = [*TRAIN, *SETTINGS, *loss.words, f"once={tmp_path}/once", "missing_pause_s=1"]
    done = run_forked(words, tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert (tmp_path / "once").exists()  # it did happen
    folder = only_run(tmp_path)
    require_same_numbers(folder, clean_run)
    assert status(folder)["state"] == "finished"
    assert status(folder)["failure"] is None
    lost = re.search(rf"lost rank {loss.on} on \S+ after step (\d+): (.*)", done.err)
    assert lost is not None, done.err
    assert loss.says in lost[2]
    if loss.says.startswith("no progress"):  # on a busy machine another one may seem to hang too
        assert re.search(r"going on with \d process(es)?$", lost[2])
        assert re.search(rf"ranks? [\d, ]*{loss.on}[\d, ]* replaced: \d processes", done.err)
    else:
        left = loss.procs - 1
        assert lost[2].endswith(f"going on with {left} process{'es' if left > 1 else ''}")
        assert f"rank {loss.on} replaced: {loss.procs} processes" in done.err
    assert "starting again" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize(("on", "phase"), [(0, "save"), (1, "evaluation")])
def test_a_rank_that_is_lost_at_the_end_costs_nothing(
    on: int, phase: str, clean_run: Path, tmp_path: Path
) -> None:
    loss = Loss(2, "kill", on, phase, 40)
    words = [*TRAIN, *SETTINGS, *loss.words, f"once={tmp_path}/once"]
    done = run_forked(words, tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert (tmp_path / "once").exists()  # it did happen
    folder = only_run(tmp_path)
    require_same_numbers(folder, clean_run)
    assert (folder / "snapshots" / "step-000000040" / "manifest.json").exists()
    assert status(folder)["state"] == "finished"


@pytest.mark.slow
def test_a_rank_that_is_lost_again_and_again_does_not_keep_the_others(
    clean_run: Path, tmp_path: Path
) -> None:
    """Each replacement is killed in its first step, and the other rank goes on alone meanwhile."""
    words = [*TRAIN, *SETTINGS, "launch.procs=2", "fault=kill", "on=1", "phase=step", "at=1"]
    done = run_forked(words, tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    require_same_numbers(only_run(tmp_path), clean_run)


@pytest.mark.slow
@pytest.mark.parametrize("on", [1, 0])
def test_a_rank_whose_replacements_do_not_start_is_left_out(
    on: int, clean_run: Path, tmp_path: Path
) -> None:
    """Without rank 0 the next one says what rank 0 would."""
    words = [*TRAIN, *SETTINGS, "launch.procs=2", "fault=kill", f"on={on}", "phase=step", "at=3"]
    words.append("missing_pause_s=0.3")  # its replacements fail before the others are done
    done = run_forked([*words, f"unbuildable={tmp_path}/once", f"once={tmp_path}/once"], tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert f"warning: rank {on} could not be replaced: " in done.err
    assert "going on without it" in done.err
    assert len(re.findall(r"^finished [\d,]+ steps in ", done.err, re.MULTILINE)) == 1
    require_same_numbers(only_run(tmp_path), clean_run)


@pytest.mark.slow
def test_a_replacement_that_fails_when_the_others_are_done_is_no_failure(
    clean_run: Path, tmp_path: Path
) -> None:
    words = [*TRAIN, *SETTINGS, "launch.procs=2", "fault=kill", "on=1", "phase=step", "at=37"]
    words += [f"unbuildable={tmp_path}/once", f"once={tmp_path}/once", "missing_pause_s=0"]
    done = run_forked(words, tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    require_same_numbers(only_run(tmp_path), clean_run)


@pytest.mark.slow
def test_a_sample_of_the_kill_campaign(tmp_path: Path) -> None:
    """`make campaigns` kills a hundred times."""
    campaign = HERE.parent / "campaigns" / "rank_kills.py"
    words = ["--kills", "5", "--pause-s", "0.5", "--epochs", "40", "--json", str(tmp_path / "a")]
    done = subprocess.run([sys.executable, str(campaign), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "a").read_text())
    assert (found["exit"], found["bad"]) == (0, 0)
    assert found["kills"] >= 1
    assert found["lines"] == 440
