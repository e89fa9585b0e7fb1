"""Trainings of public projects, ported: the same at 1 and 2 processes, killed and resumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ports import read_column, require_exact_resume, train_port

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Port:
    """A training of examples/ports, made small."""

    file: str
    words: tuple[str, ...]
    metric: str
    """The number that gets better."""
    is_more_better: bool
    kill_step: int
    """Steps of any optimizers."""
    equal: str = "loss"
    """The number that is the same on any number of processes."""
    equal_steps: int | None = None
    """In how many of the first steps; None: in all."""


PORTS = [
    # Each process draws noise, and a batch norm sees its share: nothing is equal.
    Port(
        "dcgan.py:train",
        ("width=4", "samples=128", "trainer.epochs=4"),
        "eval_distance",
        is_more_better=False,
        kill_step=19,
        equal_steps=0,
    ),
    # Noise is drawn for the reconstruction alone, and changes the weights from the first step on.
    Port(
        "vae.py:experiment",
        ("width=16", "samples=128", "trainer.epochs=4"),
        "eval_loss",
        is_more_better=False,
        kill_step=10,
        equal="divergence",
        equal_steps=1,
    ),
    Port(
        "nanogpt.py:train",
        ("width=16", "heads=2", "context=16", "letters=4000", "trainer.steps=16", "eval_steps=8"),
        "train_loss",
        is_more_better=False,
        kill_step=10,
    ),
    # Mixup is drawn by each process, see the test below.
    Port(
        "image_classification.py:experiment",
        ("width=4", "samples=128", "mixup=0", "trainer.ema=0.5", "trainer.epochs=4"),
        "eval_top5",
        is_more_better=True,
        kill_step=10,
    ),
    Port(
        "text_classification.py:experiment",
        ("width=8", "sentences=96", "library=torch", "trainer.epochs=4", "lr=0.02"),
        "eval_accuracy",
        is_more_better=True,
        kill_step=8,
    ),
    # Crops are drawn by each process, and a batch norm sees its share.
    Port(
        "cifar10_speedrun.py:experiment",
        ("width=4", "samples=128", "trainer.epochs=4", "trainer.best=accuracy"),
        "eval_accuracy",
        is_more_better=True,
        kill_step=19,
        equal_steps=0,
    ),
]
EVERY_TWO = ("trainer.save.epochs=null", "trainer.save.steps=2")


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.file.partition(".")[0])
def test_a_port_learns_the_same_at_any_size_and_after_a_kill(port: Port, tmp_path: Path) -> None:
    words = (*port.words, *EVERY_TWO)
    whole = train_port(tmp_path, 2, port.file, *words, name="whole")
    alone = train_port(tmp_path, 1, port.file, *words, name="alone")
    for trained in (whole, alone):
        assert set(trained.codes) == {0}, trained.said
        first, *_, last = read_column(trained, port.metric)
        assert first < last if port.is_more_better else last < first
    of_two, of_one = (read_column(each, port.equal)[: port.equal_steps] for each in (whole, alone))
    assert of_two == pytest.approx(of_one, rel=1e-4)
    require_exact_resume(tmp_path, whole, port.file, *words, kill_step=port.kill_step)


def test_mixup_is_drawn_again_after_a_kill(tmp_path: Path) -> None:
    port = "image_classification.py:experiment"
    words = ("width=4", "samples=128", "trainer.epochs=2", *EVERY_TWO)
    plain = train_port(tmp_path, 1, port, *words, "mixup=0", name="plain")
    mixed = train_port(tmp_path, 1, port, *words, name="mixed")
    assert read_column(mixed, "loss") != read_column(plain, "loss")
    require_exact_resume(tmp_path, mixed, port, *words, kill_step=5)


def test_a_model_of_transformers_is_trained(tmp_path: Path) -> None:
    words = ("width=8", "sentences=96", "library=transformers", "trainer.epochs=4", "lr=0.02")
    trained = train_port(tmp_path, 2, "text_classification.py:experiment", *words, name="a")
    assert set(trained.codes) == {0}, trained.said
    first, *_, last = read_column(trained, "eval_accuracy")
    assert first < last
