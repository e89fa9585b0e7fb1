"""The step as one CUDA graph: the numbers of a step that is not, and what is not captured."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_cuda_training import echelon, losses

from echelon.runs.metrics_file import read_metrics

pytestmark = pytest.mark.gpu

EXPERIMENTS = Path(__file__).parent / "capture_experiments.py"
SIZES = ["trainer.log_steps=1", "trainer.epochs=2", "trainer.batch_size=32"]


def train(folder: Path, name: str, *words: str) -> tuple[list[float], str]:
    done = echelon(folder, "train", f"run.name={name}", *SIZES, *words)
    assert done.returncode == 0, done.stderr
    return losses(folder, name), done.stderr


def both(folder: Path, *words: str) -> tuple[list[float], list[float]]:
    captured, said = train(folder, "captured", *words, "trainer.capture=always")
    plain, _ = train(folder, "plain", *words, "trainer.capture=never")
    assert "not captured" not in said
    return captured, plain


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["optimizer=Adam", "trainer.schedule=cosine", "trainer.warmup_steps=10"],
        ["optimizer=AdamW", "trainer.clip=0.1"],
        ["trainer.accumulate=2"],
        ["dropout=0.3", "norm=true"],
        ["trainer.precision=bf16"],
        ["trainer.precision=fp16", "optimizer=Adam"],
        ["trainer.compile=true"],
    ],
    ids=lambda words: "-".join(words) or "sgd",
)
def test_the_numbers_are_those_of_plain_steps(words: list[str], tmp_path: Path) -> None:
    """2,000 samples: the last batch of an epoch is smaller, and is not of the graph."""
    captured, plain = both(tmp_path, f"experiment={EXPERIMENTS}:experiment", *words)
    assert len(captured) == 126
    rel = 2e-2 if "fp16" in str(words) or "bf16" in str(words) else 1e-4
    assert captured == pytest.approx(plain, rel=rel, abs=1e-6)


def test_what_an_evaluation_changes_comes_to_captured_steps(tmp_path: Path) -> None:
    words = [f"experiment={EXPERIMENTS}:annealed", "trainer.best=error"]
    captured, plain = both(tmp_path, *words, "trainer.evaluate.steps=40")
    assert captured == pytest.approx(plain, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("optimizer", ["RowAdam", "RowSGD"])
def test_tables_are_captured(optimizer: str, tmp_path: Path) -> None:
    words = [f"experiment={EXPERIMENTS}:tables", f"optimizer={optimizer}"]
    captured, plain = both(tmp_path, *words)
    assert captured == pytest.approx(plain, rel=1e-4)
    on_cpu = echelon(tmp_path, "train", "run.name=cpu", *SIZES, *words, CUDA_VISIBLE_DEVICES="")
    assert on_cpu.returncode == 0, on_cpu.stderr
    assert captured == pytest.approx(losses(tmp_path, "cpu"), rel=2e-3)


def test_what_is_thawed_between_two_steps_is_captured_anew(tmp_path: Path) -> None:
    words = [f"experiment={EXPERIMENTS}:thawing", "trainer.evaluate.steps=30"]
    captured, plain = both(tmp_path, *words)
    frozen, _ = train(tmp_path, "frozen", words[0], "trainer.evaluate.steps=1000")
    assert captured == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert captured[:30] == pytest.approx(frozen[:30], rel=1e-4, abs=1e-6)
    assert captured[40:] != pytest.approx(frozen[40:], rel=1e-2)


def test_what_a_loss_counts_is_captured(tmp_path: Path) -> None:
    words = [f"experiment={EXPERIMENTS}:classes"]
    captured, plain = both(tmp_path, *words, "trainer.accumulate=2")
    whole, _ = train(tmp_path, "whole", *words)
    assert captured == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert captured == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_a_run_repeats_itself(tmp_path: Path) -> None:
    words = [f"experiment={EXPERIMENTS}:tables", "optimizer=RowAdam", "trainer.capture=always"]
    assert train(tmp_path, "a", *words)[0] == train(tmp_path, "b", *words)[0]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["host_random=true"], "draws random numbers on the host"),
        (["counter=true"], "the model's calls changes from step to step"),
        (["reads=true"], "capture"),
        (["reads=true", "dropout=0.3"], "capture"),
        (["optimizer=Adagrad"], "Adagrad keeps state of its step on the host"),
        (["dataset=true"], "the data is a Dataset"),
        (["own_schedule=true"], "a schedule of its own"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_captured_is_trained_without(
    words: list[str], reason: str, tmp_path: Path
) -> None:
    words = [f"experiment={EXPERIMENTS}:experiment", *words]
    auto, said = train(tmp_path, "auto", *words)
    plain, _ = train(tmp_path, "plain", *words, "trainer.capture=never")
    assert "the step is not captured as a CUDA graph: " in said
    assert reason in said
    assert auto == pytest.approx(plain, rel=1e-4, abs=1e-6)
    must = echelon(tmp_path, "train", *SIZES, *words, "trainer.capture=always")
    assert must.returncode not in (0, 75)
    assert "trainer.capture=always" in must.stderr
    assert "Traceback" not in must.stderr


def test_a_short_run_is_not_worth_a_capture(tmp_path: Path) -> None:
    words = [f"experiment={EXPERIMENTS}:experiment", "trainer.steps=10"]
    assert "only 10 steps are left" in train(tmp_path, "short", *words)[1]


def test_stopped_at_any_step_and_resumed_the_curve_goes_on(tmp_path: Path) -> None:
    words = [f"experiment={EXPERIMENTS}:experiment", "optimizer=Adam", "dropout=0.3", *SIZES]
    words += ["trainer.epochs=200", "trainer.save.steps=777", "trainer.capture=always"]
    command = [sys.executable, "-m", "echelon", "train", "run.name=cut", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size > 100_000) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    if process.returncode != 0:  # it may have been quicker than the signal
        assert process.returncode == 75
        assert echelon(tmp_path, *command[3:]).returncode == 0
    assert echelon(tmp_path, "train", "run.name=whole", *words).returncode == 0
    assert losses(tmp_path, "cut") == pytest.approx(losses(tmp_path, "whole"), rel=1e-3, abs=1e-6)


def test_a_snapshot_of_a_captured_run_goes_on_without(tmp_path: Path) -> None:
    """Fused kernels and rates on the device are not the experiment's: a CPU knows none of them."""
    words = [f"experiment={EXPERIMENTS}:experiment", "optimizer=Adam", *SIZES]
    begun = echelon(
        tmp_path, "train", "run.name=a", *words, "trainer.epochs=1", "trainer.capture=always"
    )
    assert begun.returncode == 0, begun.stderr
    on = echelon(tmp_path, "train", "run.name=a", *words, CUDA_VISIBLE_DEVICES="")
    assert on.returncode == 0, on.stderr
    whole, _ = train(tmp_path, "whole", *words[:2], "trainer.capture=never")
    assert losses(tmp_path, "a") == pytest.approx(whole, rel=1e-3, abs=1e-6)


def test_the_whole_step_holds_an_all_reduce(tmp_path: Path) -> None:
    """NCCL has one rank on one GPU; what several would replay is captured and replayed with it."""
    import torch.distributed as dist

    from echelon.config.schema import TrainerConfig
    from echelon.cudagraph.step_graph import StepGraph
    from echelon.data.batches import BlockSlice
    from echelon.experiment.definition import Experiment
    from echelon.experiment.optimizer_flags import enable_fused_kernels, make_capturable
    from echelon.experiment.precision import Precision
    from echelon.parallel.ddp_replica import DDPReplica
    from echelon.parallel.replica import StepRequests
    from echelon.runs.heartbeat import Heartbeat
    from echelon.world import detect

    if not dist.is_initialized():
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    experiment = Experiment(model, optimizer, torch.nn.functional.mse_loss, None)
    enable_fused_kernels(experiment.optimizer, experiment.model, device)
    assert make_capturable(optimizer, device) is None
    replica = DDPReplica(
        experiment,
        detect({}).world,
        device,
        TrainerConfig(),
        Precision("float32", device),
        Heartbeat(),
    )
    replica.world_size = 2  # its gradients are halved, as if a second rank had none
    x = torch.randn(64, 2, device=device)
    cut = BlockSlice((x, x.sum(1, keepdim=True)), 0, 16)
    for _ in range(3):
        replica._objective.write_requests(StepRequests(stop=True))
        replica.run_capturable_step(cut.data, 16, 32)
    row = replica.result_width
    graph = StepGraph(lambda data: replica.run_capturable_step(data, 16, 32), cut, 64, row)
    before = model.weight.detach().clone()
    for start in (0, 16, 32, 48):
        graph.replay(BlockSlice(cut.block, start, 16))
    rows = graph.take_results().tolist()
    assert [row[:-1] for row in rows] == [[0.5, *[0.0] * 5]] * 4
    assert not torch.equal(before, model.weight)
    assert rows[-1][-1] < rows[0][-1]


def test_metrics_are_complete_with_late_lines(tmp_path: Path) -> None:
    """Losses are read every 64 steps; a line is there for every tenth step, in its place."""
    words = [f"experiment={EXPERIMENTS}:experiment", "trainer.log_steps=10"]
    done = echelon(tmp_path, "train", "run.name=a", *SIZES[1:], *words)
    assert done.returncode == 0, done.stderr
    lines = [x for x in read_metrics(tmp_path / "runs" / "a" / "metrics.jsonl") if "lr" in x]
    assert [line["step"] for line in lines] == [*range(10, 130, 10), 126]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
