"""Ports of public trainings: they learn, the same on one process and on two, and after a kill."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from ports import read_column, require_promises

pytestmark = pytest.mark.slow

SAVES = "trainer.save.steps=4"


def test_reinforce(tmp_path: Path) -> None:
    words = ("trainer.steps=12", "episodes=8", "length=40", "lr=0.05", "trainer.save.steps=2")
    trained = require_promises(tmp_path, "reinforce.py:train", *words, kill_step=6)
    rewards = read_column(trained, "reward")
    assert mean(rewards[-3:]) > 1.2 * mean(rewards[:3])


def test_simclr(tmp_path: Path) -> None:
    words = ("samples=120", "width=16", "lr=0.01", "trainer.batch_size=30", "trainer.epochs=4")
    trained = require_promises(tmp_path, "simclr.py:train", *words, SAVES, kill_step=9)
    accuracy = read_column(trained, "eval_accuracy")
    assert accuracy[-1] > accuracy[0]


def test_replay_buffer(tmp_path: Path) -> None:
    words = ("trainer.steps=80", "exploration_steps=50", "target_rate=0.1", "capacity=1000")
    rates = ("lr=0.01", "gamma=0.9", "width=32", "trainer.save.steps=20")
    trained = require_promises(tmp_path, "replay_buffer.py:train", *words, *rates, kill_step=50)
    lengths = read_column(trained, "game_length")
    assert mean(lengths[50:]) > 1.3 * mean(lengths[10:25])


@pytest.mark.parametrize("order", ["weighted", "buckets", "curriculum"])
def test_samplers(order: str, tmp_path: Path) -> None:
    words = (f"order={order}", "samples=90", "width=16", "lr=0.05", "trainer.batch_size=16")
    trained = require_promises(
        tmp_path, "samplers.py:experiment", *words, "trainer.epochs=5", SAVES, kill_step=15
    )
    accuracy = read_column(trained, "eval_accuracy")
    assert accuracy[-1] > accuracy[0]


def test_graphs(tmp_path: Path) -> None:
    words = ("samples=60", "eval_samples=40", "width=8", "lr=0.02", "trainer.batch_size=12")
    trained = require_promises(
        tmp_path, "graphs.py:experiment", *words, "trainer.epochs=4", SAVES, kill_step=11
    )
    eval_losses = read_column(trained, "eval_loss")
    assert eval_losses[-1] < eval_losses[0]
    assert read_column(trained, "eval_accuracy")[-1] > 0.6


@pytest.mark.parametrize("method", ["lora", "thawing", "distillation"])
def test_fine_tuning(method: str, tmp_path: Path) -> None:
    """The network is pretrained in 60 steps; the body is thawed in the fifth step after them."""
    words = (f"method={method}", "samples=64", "trainer.batch_size=16", "trainer.epochs=4", SAVES)
    trained = require_promises(tmp_path, "fine_tuning.py:train", *words, kill_step=69)
    accuracy = read_column(trained, "eval_accuracy")
    assert accuracy[-1] > accuracy[0]


def test_detection(tmp_path: Path) -> None:
    words = ("samples=48", "eval_samples=16", "width=8", "trainer.batch_size=8", "lr=0.02")
    trained = require_promises(
        tmp_path, "detection.py:train", *words, "trainer.epochs=6", SAVES, kill_step=15
    )
    precision = read_column(trained, "eval_map")
    assert mean(precision[-2:]) > mean(precision[:2])
    pictures = [value["image"] for value in read_column(trained, "found")]  # type: ignore[index]
    assert [(trained.run.folder / path).read_bytes()[:4] for path in pictures] == [b"\x89PNG"] * 6
