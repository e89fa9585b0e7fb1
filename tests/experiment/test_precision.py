"""trainer.precision, trainer.compile and trainer.capture on a CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import losses, train_world

from echelon.config.schema import Config, TrainerConfig
from echelon.errors import ExitCode
from echelon.experiment.compilation import CompiledFunction
from echelon.runs.heartbeat import Heartbeat, HeartbeatTable

NOBODY = Heartbeat()
STEPS = ["trainer.batch_size=5", "trainer.steps=6"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_is_near_and_not_the_same(world_size: int, tmp_path: Path) -> None:
    words = [*STEPS, "eval_samples=3"]
    full = train_world(tmp_path, world_size, *words, name="full")
    half = train_world(tmp_path, world_size, *words, "trainer.precision=bf16", name="half")
    assert losses(half.run) == pytest.approx(losses(full.run), rel=0.05)
    assert losses(half.run) != losses(full.run)


@pytest.mark.slow
def test_tf32_is_of_gpus_alone(tmp_path: Path) -> None:
    full = train_world(tmp_path, 1, *STEPS, name="full")
    tf32 = train_world(tmp_path, 1, *STEPS, "trainer.precision=tf32", name="tf32")
    assert losses(tf32.run) == losses(full.run)
    assert "note: trainer.precision=tf32 is for GPUs; on this CPU it is float32" in tf32.said
    assert "note:" not in full.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("trainer.precision=fp16", "trainer.precision=fp16, but this run is on a CPU"),
        ("trainer.capture=always", "the step cannot be a CUDA graph: this run is on a CPU"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_cpu_cannot(word: str, says: str, ranks: int, tmp_path: Path) -> None:
    ended = train_world(tmp_path, ranks, *STEPS, word)
    assert ended.codes == [ExitCode.USAGE] * ranks
    assert says in ended.said
    assert "Traceback" not in ended.said
    for number, rank in enumerate(ended.ranks):
        assert f"\n  rank {number} on " in rank.output


@pytest.mark.parametrize("how", [[], ["launch=local", "launch.procs=2"]])
def test_what_a_cpu_cannot_is_all_said_before_a_run_is_made(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from echelon.cli import run_and_report_faults, run_command

    words = [f"run.dir={tmp_path / 'runs'}", "trainer.precision=fp16", "trainer.capture=always"]
    for more in ([], ["--dry-run"]):
        command = ["train", *words, *how, *more]
        assert run_and_report_faults(partial(run_command, command)) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert said.count("error: ") == 2
        assert "error: trainer.precision=fp16, but this run is on a CPU" in said
        assert "error: trainer.capture=always, but the step cannot be a CUDA graph" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_what_does_not_compile_is_said_and_computed(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler was found\n\nSet TORCHDYNAMO_VERBOSE=1 for much more")

    doubled = CompiledFunction(lambda x: x * 2.0, NOBODY, broken)
    for _ in range(2):
        assert float(doubled(torch.ones(()))) == 2.0
    said = capsys.readouterr().err
    assert said.count("trainer.compile=true: not compiled: ") == 1
    assert "no compiler was found" in said
    assert "TORCHDYNAMO" not in said
    with pytest.raises(ZeroDivisionError) as caught:  # the user's own, and torch's not before it
        CompiledFunction(lambda x: x / (1 // 0), NOBODY, broken)(torch.ones(()))
    assert caught.value.__context__ is None


def test_another_shape_that_does_not_compile(capsys: pytest.CaptureFixture[str]) -> None:
    """As the last batch of an epoch, long after the first step."""

    def broken_for_two(graph: Any, inputs: Any) -> Any:
        if inputs[0].shape == (2,):
            raise RuntimeError("no kernel of that shape")
        return graph.forward

    doubled = CompiledFunction(lambda x: x * 2.0, NOBODY, broken_for_two)
    for size in (3, 2, 3):
        assert doubled(torch.ones(size)).tolist() == [2.0] * size
    assert capsys.readouterr().err.count("no kernel of that shape") == 1


def test_whoever_compiles_is_not_called_hung(tmp_path: Path) -> None:
    """Nor where it compiles another shape after many steps."""
    watch = HeartbeatTable(tmp_path / "heartbeat", ranks=1)
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    beats = []

    def slow(graph: Any, inputs: Any) -> Any:
        beats.append(watch.read_all()[0].beats)
        return graph.forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    first, second = (CompiledFunction(doubled, heartbeat, slow) for _ in range(2))
    for size in (3, 3, 2):
        heartbeat.beat()
        first(torch.ones(size))
        second(torch.ones(size))  # a layer like the first: what was compiled serves both
    assert beats == [0, 0]  # at work that may take any time
    heartbeat.beat()  # of the forward pass; the backward pass is compiled at its first call
    assert watch.read_all()[0].beats == 0
    heartbeat.beat()
    assert watch.read_all()[0].beats > 0


def test_a_backward_pass_that_does_not_compile(capsys: pytest.CaptureFixture[str]) -> None:
    """torch would compile it when it comes, where the forward pass cannot be taken back."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no sparse gradients\nWhile executing %a")

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=broken
    )
    doubled = CompiledFunction(lambda x: x * 2.0, NOBODY, backend)
    x = torch.ones(3, requires_grad=True)
    doubled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    [said] = capsys.readouterr().err.splitlines()
    assert said.endswith("no sparse gradients")


def test_a_snapshot_that_says_no_precision_was_of_float32() -> None:
    assert "trainer.precision" not in Config().select_numerics_settings()
    half = Config(trainer=TrainerConfig(precision="bf16"))
    assert half.select_numerics_settings()["trainer.precision"] == "bf16"
    assert half.compute_numerics_fingerprint() != Config().compute_numerics_fingerprint()
