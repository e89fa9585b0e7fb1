"""News of real trainings: once, with the one cause, whoever is killed and whatever servers do."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import FAULTY
from command_runner import ECHELON, TWO, until
from news_servers import DIRECTLY, LOOPBACK, refusing_port, serve_web
from worlds import run_forked, started_forked

from echelon.runs.run_folder import Run

CANARY = "c4nary-of-a-secret"
TRAIN = (*ECHELON, "train", FAULTY, "trainer.batch_size=8", "trainer.log_steps=1", "run.name=a")
ALONE = "launch.max_replacements=0"

pytestmark = pytest.mark.slow


def find_canary(folder: Path) -> list[Path]:
    files = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    assert len(files) > 5
    return [path for path in files if CANARY.encode() in path.read_bytes()]


def list_commands() -> list[str]:
    """What everybody on the machine sees of its processes."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(path.read_text(errors="replace"))
    assert any("echelon.notify.watcher" in words for words in commands)
    return commands


def test_a_run_that_is_restarted_tells_its_start_and_its_end_once(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    with serve_web() as sink:
        secrets.write_text(f"ECHELON_WEBHOOK_URL={sink.url}/{CANARY}\n")
        secrets.chmod(0o600)
        fault = ("fault=kill", "on=1", f"once={tmp_path}/once", "launch.max_restarts=1")
        words = (*TRAIN, *TWO, *fault, ALONE, "notify=webhook", f"launch.secrets={secrets}")
        done = run_forked(words, tmp_path, **DIRECTLY)
    assert done.code == 0, done.output
    assert sink.events == ["started", "finished"]
    finished = sink.received[1]
    assert (finished["run"], finished["step"], finished["total_steps"]) == ("a", 30, 30)
    assert finished["metric"]["name"] == "best loss"
    assert CANARY not in done.output
    assert find_canary(tmp_path) == []


def test_a_killed_rank_is_the_cause_and_a_dead_server_costs_one_warning(tmp_path: Path) -> None:
    with serve_web() as sink, refusing_port() as port:
        addresses = {
            "ECHELON_WEBHOOK_URL": f"{sink.url}/{CANARY}",
            "ECHELON_SLACK_URL": f"http://{LOOPBACK}:{port}/{CANARY}",
        }
        words = (*TRAIN, *TWO, "fault=kill", "on=1", ALONE, "notify=[webhook,slack]")
        done = run_forked(words, tmp_path, **DIRECTLY, **addresses)
    assert done.code == 1, done.output
    assert sink.events == ["started", "failed"]
    cause = Run(tmp_path / "runs" / "a").read_status_file()["failure"]["summary"]
    assert sink.received[1]["lines"][0].endswith(cause)
    assert sink.received[1]["failure"]["rank"] == 1
    assert done.output.count("warning: notify") == 1
    assert f"warning: notify: slack: {LOOPBACK}: Connection refused" in done.output
    assert CANARY not in done.output
    assert find_canary(tmp_path) == []


def test_whoever_led_the_run_is_killed_and_it_is_told(tmp_path: Path) -> None:
    with serve_web() as sink:
        words = (*TRAIN, *TWO, "fault=kill agent", "notify=webhook", "trainer.epochs=9999")
        with started_forked(words, tmp_path, **DIRECTLY, ECHELON_WEBHOOK_URL=sink.url) as command:
            until(lambda: len(sink.received) == 2, 300, "two messages", command.describe)
    assert sink.events == ["started", "failed"]
    assert sink.received[1]["lines"][0] == "the process that led it was killed"


def test_a_loss_that_is_not_finite_in_this_process_and_a_stuck_server(tmp_path: Path) -> None:
    """The training ends while the server holds the first message."""
    with serve_web(is_stuck=True) as sink:
        words = (*TRAIN, "fault=error", "phase=nan", "notify=webhook")
        run = Run(tmp_path / "runs" / "a")
        url = f"{sink.url}/{CANARY}"
        with started_forked(words, tmp_path, **DIRECTLY, ECHELON_WEBHOOK_URL=url) as command:
            until(lambda: sink.received, 300, "a message", command.describe)
            assert [words for words in list_commands() if CANARY in words] == []
            said = until(lambda: run.read_status_file().get("failure"), 300, "the end")
            sink.is_stuck = False
            sink.released.set()
            done = command.wait()
    assert done.code == 1
    assert sink.events[-1] == "nan"
    assert said["summary"].startswith("the loss is nan at step")
    assert said["summary"] in sink.received[-1]["lines"][0]


SWEEP = """
method: grid
metric: {name: loss, goal: minimize}
parameters:
  lr: {values: [0.01, 0.02]}
"""


def test_a_sweep_is_told_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "s.yml").write_text(SWEEP)
    with serve_web() as sink:
        quick = ("samples=32", "eval_samples=16", "trainer.epochs=1", "notify=webhook")
        words = (*ECHELON, "sweep", "s.yml", "--name", "s", *quick)
        done = run_forked(words, tmp_path, **DIRECTLY, ECHELON_WEBHOOK_URL=f"{sink.url}/{CANARY}")
    assert done.code == 0, done.output
    assert sink.events == ["started", "finished"]
    assert [body["run"] for body in sink.received] == ["s", "s"]
    assert "2 finished" in sink.received[1]["lines"][0]
    assert sink.received[1]["lines"][1].startswith("best loss ")
    trial = json.loads((tmp_path / "runs" / "s-0" / "config.json").read_text())
    assert trial["notify"]["to"] == []
    assert find_canary(tmp_path) == []
