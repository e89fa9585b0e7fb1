"""`echelon cancel` ends a run on all nodes, though the others could go on without the one that it
signals."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from command_runner import ECHELON, HERE, free_port, run, run_here, until
from worlds import started_forked

from echelon.errors import ExitCode

pytestmark = pytest.mark.slow

LIMIT_S = 300.0
NODES = 3


@pytest.mark.parametrize("now", [False, True], ids=["saved", "now"])
def test_a_cancelled_run_ends_on_every_node(tmp_path: Path, now: bool) -> None:
    words = (
        *(*ECHELON, "train", f"experiment={HERE / 'faulty_experiment.py'}:experiment"),
        *("run.name=a", "launch=env", "launch.procs=1", "trainer.batch_size=8", "pause_s=0.02"),
        *("trainer.steps=1000000", "trainer.log_steps=10", "launch.threads=1"),
        *("trainer.save.epochs=null", "trainer.evaluate.epochs=null"),
    )
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(NODES)}
    with ExitStack() as stack:
        commands = [
            stack.enter_context(started_forked(words, tmp_path, NODE_RANK=str(n), **same))
            for n in range(NODES)
        ]
        metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.stat().st_size, LIMIT_S, "the first steps")
        done = run((*ECHELON, "cancel", "a", *(["--now"] if now else [])), tmp_path)
        assert done.code == 0, done.err
        codes = [command.wait(LIMIT_S).code for command in commands]
    if now:
        assert codes[0] == -signal.SIGKILL
        assert all(code not in (ExitCode.OK, ExitCode.PREEMPTED) for code in codes)
    else:
        assert codes == [ExitCode.PREEMPTED] * NODES
    shown = run_here(("runs", "--all", "--filter", "state=cancelled"), tmp_path)
    assert "a" in shown.out.split(), shown.out
