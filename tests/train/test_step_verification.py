"""Steps are verified: without a trace where all ranks agree, and with a name where one is wrong."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from command_runner import ECHELON, HERE, curve, evaluations, run_here, status
from faulty_experiment import flip_bit
from torch import Tensor, nn
from worlds import (
    Trained,
    differing,
    losses,
    metrics,
    run_forked,
    snapshot_steps,
    state_at,
    train_world,
)

import echelon
from echelon.errors import ExitCode
from echelon.train.step_verification import PassDigest, assign_shares, settle_difference

SHORT = ("trainer.batch_size=24", "trainer.epochs=2", "trainer.keep_last=99")
"""Ten steps; the last batch of an epoch has twelve samples."""


@dataclass
class Settings:
    wrong: str = ""
    """What is wrong: gradient, loss, weights or samples."""
    on: int = 1
    """The rank that computes wrong numbers."""
    at: int = 5
    """From which forward pass on; a check is one, its step the next."""
    times: int = 1000
    """In how many passes."""
    data: str = "tensors"
    """Or dataset, whose samples are drawn anew each time, or stream."""
    talks: bool = False
    """Whether processes exchange tensors in the forward pass."""


class Noisy(nn.Module):
    """Draws from all generators, changes its buffers, and computes wrong numbers if it is told."""

    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
        self.head = nn.Linear(16, 1)
        rank = int(os.environ.get("ECHELON_TEST_RANK", "0"))
        last = cfg.at + cfg.times if rank == cfg.on else 0
        self.wrong_passes = range(cfg.at, last) if cfg.wrong else range(0)
        self.cfg, self.passes = cfg, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.passes[0] += self.training
        is_wrong = self.training and self.passes[0] in self.wrong_passes
        if is_wrong and self.cfg.wrong == "weights" and self.passes[0] == self.cfg.at:
            self.head.weight.data.copy_(flip_bit(self.head.weight, bit=20))
        if is_wrong and self.cfg.wrong == "samples":
            x.copy_(flip_bit(x))
        hidden = self.body(x)
        if self.cfg.talks and self.training:
            torch.distributed.all_reduce(torch.ones(1))
        output = self.head(hidden).squeeze(-1)
        if is_wrong and self.cfg.wrong == "gradient":
            output.register_hook(flip_bit)
        noise = (torch.rand(()) + random.random() + np.random.random()) * 1e-3
        return output + noise + (is_wrong and self.cfg.wrong == "loss")


def flip_some(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = batch
    return torch.where(torch.rand(len(x), 1) < 0.5, x, -x), y


class Jittered(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.01 * torch.randn(3) + 0.01 * random.random(), self.x[index].sum()


class Stream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((row, row.sum()) for row in self.x)


def noisy(cfg: Settings) -> echelon.Experiment:
    x = torch.randn(108, 3, generator=torch.Generator().manual_seed(1))
    model = Noisy(cfg)
    data = {"tensors": (x, x.sum(1)), "dataset": Jittered(x), "stream": Stream(x)}
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.mse_loss,
        train_data=data[cfg.data],
        eval_data=(x[:17], x[:17].sum(1)),
        batch_transform=flip_some,
    )


def train(folder: Path, ranks: int, *words: str, name: str = "a") -> Trained:
    return train_world(folder, ranks, *SHORT, *words, name=name, experiment=noisy)


def find_sentence(trained: Trained) -> str:
    """What all ranks ended with."""
    assert set(trained.codes) == {ExitCode.WRONG_NUMBERS}, trained.said
    failure = trained.run.read_status_file()["failure"]
    assert failure["summary"][:60] in trained.said
    return str(failure["detail"])


# --- nothing is wrong ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "steps", "words"),
    [
        (1, 1, ()),
        (2, 1, ()),
        (3, 1, ()),
        (3, 2, ("trainer.accumulate=2", "trainer.clip=1.0")),
        (1, 3, ("trainer.ema=0.9", "replica.checkpoint=true")),
        (2, 2, ("trainer.precision=bf16",)),
        (2, 3, ("data=dataset", "trainer.loader_workers=1")),
    ],
    ids=["alone", "two", "three", "accumulated", "checkpointed", "bf16", "dataset"],
)
def test_a_verified_run_has_the_numbers_of_any_other(
    tmp_path: Path, ranks: int, steps: int, words: tuple[str, ...]
) -> None:
    save = ("trainer.save.steps=1", *words)
    plain = train(tmp_path, ranks, *save, name="plain")
    verified = train(tmp_path, ranks, *save, f"trainer.verify_steps={steps}", name="verified")
    assert plain.codes == verified.codes == [0] * ranks, verified.said
    assert len(losses(plain.run)) == 10
    assert metrics(plain.run) == metrics(verified.run)
    for step in snapshot_steps(plain.run):
        assert differing(state_at(plain.run, step), state_at(verified.run, step)) == []


@pytest.mark.slow
def test_what_a_check_cannot_undo_is_said(tmp_path: Path) -> None:
    trained = train(tmp_path, 1, "trainer.verify_steps=5")
    assert "warning: trainer.verify_steps=5: the model's passes changes" in trained.said


def test_every_rank_is_verified_in_every_check_beside_others() -> None:
    for size in range(2, 12):
        partners: dict[int, set[int]] = {rank: set() for rank in range(size)}
        for check in range(2 * size):
            shares = assign_shares(check, size)
            groups = [[r for r in range(size) if shares[r] == share] for share in set(shares)]
            assert all(len(group) in (2, 3) for group in groups)
            assert sum(len(group) == 3 for group in groups) == size % 2
            for group in groups:
                assert shares[group[0]] in group
                for rank in group:
                    partners[rank] |= set(group) - {rank}
        assert all(len(others) >= min(2, size - 1) for others in partners.values())


# --- a rank is wrong ---

RIGHT, WRONG, OTHER = (PassDigest(1, 1, 1, n) for n in range(3))


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        ({0: RIGHT, 1: WRONG}, [RIGHT, WRONG, RIGHT], [1]),
        ({0: WRONG, 1: RIGHT}, [WRONG, RIGHT, RIGHT, RIGHT], [0]),
        ({0: RIGHT, 1: WRONG}, [RIGHT, RIGHT, RIGHT], [1]),  # it comes and goes
        ({2: RIGHT, 3: WRONG}, [RIGHT, OTHER, RIGHT, WRONG, RIGHT], [1, 3]),
        ({0: RIGHT, 1: WRONG}, [RIGHT, RIGHT], [1]),
        ({0: RIGHT, 1: WRONG}, [RIGHT, OTHER], [1]),
        ({0: RIGHT, 1: WRONG}, [RIGHT, WRONG], None),
        ({0: RIGHT, 1: WRONG}, [OTHER, OTHER], None),
        ({0: RIGHT, 1: WRONG}, [RIGHT, WRONG, OTHER], None),
        ({0: RIGHT, 1: WRONG}, [RIGHT, WRONG, RIGHT, WRONG], None),
    ],
)
def test_the_majority_is_right(
    first: dict[int, PassDigest], second: list[PassDigest], wrong: list[int] | None
) -> None:
    settled = settle_difference(first, second)
    assert (settled.wrong if settled else None) == wrong
    assert settled is None or settled.reference not in settled.wrong


@pytest.mark.slow
@pytest.mark.parametrize("on", [0, 1, 2])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("gradient", r"gradients differ from those of ranks {others} by up to \S+ in "),
        ("loss", "losses differ from those of ranks {others} by up to"),
        ("samples", "samples differ from those of ranks {others}"),
    ],
)
def test_of_three_the_wrong_one_is_named(tmp_path: Path, on: int, wrong: str, said: str) -> None:
    trained = train(tmp_path, 3, "trainer.verify_steps=1", f"wrong={wrong}", f"on={on}")
    others = ", ".join(str(rank) for rank in range(3) if rank != on)
    sentence = find_sentence(trained)
    named = rf"error: rank {on} on \S+ \(cpu, .*\) computes wrong numbers: in step 3 its "
    assert re.search(named + said.format(others=others), sentence), sentence
    assert "not verified" not in sentence  # the first two steps were
    assert trained.run.read_status_file()["failure"]["rank"] == on
    assert len(losses(trained.run)) == 2


@pytest.mark.slow
def test_of_two_pairs_the_other_one_settles(tmp_path: Path) -> None:
    trained = train(tmp_path, 4, "trainer.verify_steps=1", "wrong=gradient", "on=3")
    named = "rank 3 on .* in step 3 its gradients differ from those of ranks 0, 1, 2 by up to"
    assert re.search(named, find_sentence(trained))


@pytest.mark.slow
def test_weights_that_went_wrong_in_a_step_are_found_at_the_next_check(tmp_path: Path) -> None:
    wrong = ("wrong=weights", "at=3")  # after one check, in the step after its own
    trained = train(tmp_path, 3, "trainer.verify_steps=2", *wrong)
    sentence = find_sentence(trained)
    assert "in step 4 its weights before it differ from those of ranks 0, 2 by up to" in sentence
    assert "step 3 was not verified and may be wrong" in sentence


@pytest.mark.slow
def test_of_two_both_are_named(tmp_path: Path) -> None:
    trained = train(tmp_path, 2, "trainer.verify_steps=1", "wrong=gradient")
    sentence = find_sentence(trained)
    assert re.search(r"rank 0 on \S+ \(.*\) and rank 1 on \S+ \(.*\) compute different", sentence)
    assert "in step 3 the gradients of ranks " in sentence
    assert "there is no third rank to settle it" in sentence


@pytest.mark.slow
def test_of_two_the_one_that_does_not_repeat_itself_is_wrong(tmp_path: Path) -> None:
    trained = train(tmp_path, 2, "trainer.verify_steps=1", "wrong=gradient", "times=1")
    sentence = find_sentence(trained)
    assert re.search(r"error: rank 1 on .* computes wrong numbers: in step 3 ", sentence)
    assert "computed again, they were right" in sentence


@pytest.mark.slow
def test_a_process_that_is_alone_must_repeat_itself(tmp_path: Path) -> None:
    wrong = ("wrong=gradient", "on=0", "at=5", "times=1")  # three passes a step
    sentence = find_sentence(train(tmp_path, 1, "trainer.verify_steps=1", *wrong))
    assert "in step 2 the gradients differed the second time" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "on", "why"),
    [
        ("miscompute", 0, r"rank 0 on \S+ \(.*\) computes wrong numbers"),
        ("miscompute", 1, r"rank 1 on \S+ \(.*\) computes wrong numbers"),
        ("kill", 1, "killed by SIGKILL"),  # while it is verified
    ],
)
def test_who_is_lost_in_a_check_is_replaced_and_the_numbers_stay(
    tmp_path: Path, fault: str, on: int, why: str
) -> None:
    faulty = HERE / "faulty_experiment.py"
    words = [*ECHELON, "train", f"experiment={faulty}:experiment", "launch=local"]
    words += ["trainer.batch_size=8", "trainer.epochs=2", "trainer.log_steps=1", "launch.procs=3"]
    clean = run_forked([*words, f"run.dir={tmp_path}/clean"], tmp_path)
    assert clean.code == 0, clean.err
    # The check of step 5 is the ninth pass.
    wrong = [f"fault={fault}", f"on={on}", "at=9", f"once={tmp_path}/once"]
    wrong += ["trainer.verify_steps=1", "missing_pause_s=1", f"run.dir={tmp_path}/wrong"]
    done = run_forked([*words, *wrong], tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert re.search(rf"lost rank {on} on \S+ after step 4: {why}", done.err), done.err
    assert f"rank {on} replaced: 3 processes" in done.err
    folders = [next((tmp_path / kind).glob("*/config.json")).parent for kind in ("clean", "wrong")]
    assert status(folders[1])["state"] == "finished"
    for read in (curve, evaluations):
        clean_numbers, numbers = (dict(read(folder)) for folder in folders)
        assert numbers == pytest.approx(clean_numbers, rel=1e-4, abs=1e-7)
    assert [step for step, _ in curve(folders[1])] == list(range(1, 21))


@pytest.mark.slow
def test_who_is_wrong_again_is_left_out(tmp_path: Path) -> None:
    faulty = HERE / "faulty_experiment.py"
    words = [*ECHELON, "train", f"experiment={faulty}:experiment", "launch=local", "launch.procs=3"]
    words += ["trainer.batch_size=8", "trainer.epochs=2", "trainer.verify_steps=1"]
    done = run_forked([*words, "fault=miscompute", "on=1", "at=3", "missing_pause_s=1"], tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert done.err.count("rank 1 replaced: 3 processes") == 1
    left_out = r"warning: rank 1 could not be replaced: .* wrong numbers.*; going on without it"
    assert re.search(left_out, done.err), done.err


# --- where it is not offered ---


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.verify_steps=0"], "trainer.verify_steps=0 is below 1"),
        (["trainer.verify_steps=-1"], "trainer.verify_steps=-1 is below 1"),
        (["trainer.verify_steps=2", "replica.kind=fsdp"], "no process with the whole model"),
        (["trainer.verify_steps=2", "replica.devices=2"], "spreads the model over devices"),
        (["trainer.verify_steps=2", "trainer.capture=always"], "replays steps"),
    ],
)
def test_it_is_refused_before_the_start(tmp_path: Path, words: list[str], said: str) -> None:
    done = run_here(["train", "launch=local", "launch.procs=2", *words], tmp_path)
    assert done.code == 2
    assert said in done.err


@pytest.mark.slow
def test_streams_are_refused(tmp_path: Path) -> None:
    trained = train(tmp_path, 2, "trainer.verify_steps=1", "data=stream", "trainer.steps=5")
    assert trained.codes == [2, 2], trained.said
    assert "trainer.verify_steps=1, but train_data is a stream" in trained.said


@pytest.mark.slow
def test_processes_that_exchange_tensors_are_refused(tmp_path: Path) -> None:
    trained = train(tmp_path, 2, "trainer.verify_steps=1", "talks=true")
    assert trained.codes == [2, 2], trained.said
    assert "none can compute another's share alone" in trained.said


@pytest.mark.slow
def test_processors_that_round_differently_are_refused(tmp_path: Path) -> None:
    trained = train_world(
        tmp_path,
        2,
        *(*SHORT, "trainer.verify_steps=1", "launch.threads=null"),
        experiment=noisy,
        prepare=use_own_thread_count,
    )
    assert trained.codes == [2, 2], trained.said
    assert re.search(r"rank 0 on .*, 1 thread, .* and rank 1 on .*, 2 threads, ", trained.said)


def use_own_thread_count(rank: int) -> None:
    torch.set_num_threads(1 + rank)
