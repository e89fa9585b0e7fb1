"""What a person can get wrong: one sentence, one hint, an exit code, and no traceback of ours."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent

import command_runner
import pytest
from command_runner import ECHELON, QUICK, TWO, is_a_sentence_and_a_hint
from worlds import Ended, run_commands, run_forked

from echelon.cli import run_and_report_faults, run_command
from echelon.errors import ExitCode
from echelon.runs.metrics_file import read_metrics

TypeCommand = Callable[..., tuple[int, str]]


@pytest.fixture
def type_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> TypeCommand:
    """Type words in an empty folder; the exit code and what is on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def type_words(*words: str) -> tuple[int, str]:
        code = run_and_report_faults(partial(run_command, list(words)))
        return code, capsys.readouterr().err

    return type_words


# --- settings ---

REFUSED = {
    # what is typed: what must be read
    "trainer.epoch=3": ("trainer.epoch=3", "trainer.epochs"),
    "lrr=0.1": ("lrr=0.1", "'lr'"),
    "trainr.epochs=3": ("trainr.epochs=3", "trainer.epochs"),
    "launch=lokal": ("launch=lokal", "'local'"),
    "experiment=toi": ("experiment=toi", "'toy'"),
    "track=wandbb": ("track=wandbb", "jsonl"),
    "launch.kind=banana": ("launch.kind=banana", "inline, k8s, local"),
    "trainer.epochs=three": ("trainer.epochs=three", "3"),
    "trainer.batch_size=1.5": ("trainer.batch_size=1.5", "32"),
    "lr=fast": ("lr=fast", "0.05"),
    "launch.share_devices=perhaps": ("launch.share_devices=perhaps", "false"),
    "trainer=fast": ("trainer=fast", "default"),
    "trainer.batch_size=0": ("trainer.batch_size=0", "1 or more"),
    "trainer.epochs=-1": ("trainer.epochs=-1", "0 or more"),
    "trainer.schedule=cosin": ("trainer.schedule=cosin", "'cosine'"),
    "trainer.best_is=most": ("trainer.best_is=most", "min"),
    "trainer.steps=0": ("trainer.steps=0", "1 or more"),
    "trainer.clip=nan": ("trainer.clip=nan", "finite"),
    "trainer.clip=inf": ("trainer.clip=inf", "finite"),
    "trainer.save.minutes=inf": ("trainer.save.minutes=inf", "finite"),
    "launch.hang_s=nan": ("launch.hang_s=nan", "finite"),
    "lr=nan": ("lr=nan", "finite"),
    "noise=inf": ("noise=inf", "finite"),
    "run.dir=/proc/runs": ("/proc/runs", "directory", "hint: give another place with run.dir=PATH"),
    "run.dir=/dev/null": ("/dev/null", "not a directory", "hint: give another place"),
    "trainer.clip=0": ("trainer.clip=0", "positive"),
    "trainer.save.steps=0": ("trainer.save.steps=0", "null"),
    "trainer.epochs=null": ("trainer.epochs", "set one"),
    "trainer.epochs=1,2": ("trainer.epochs=1,2", "single value"),
    "trainer.save.steps=1e3": ("trainer.save.steps=1000.0", "write trainer.save.steps=1000"),
    "seed=-1": ("seed=-1", "0 or more"),
    "~trainer.clip": ("~trainer.clip", "null"),
    "just words": ("just words", "KEY=VALUE"),
    "rank=4 world_size=4": ("rank=4", "0 to 3"),
    "rank=-1 world_size=4": ("rank=-1", "0 to 3"),
    "rank=0": ("rank=0", "world_size"),
    "world_size=2": ("world_size=2", "rank=0"),
    "rank=0 world_size=2 master=a:b:c": ("master=a:b:c", "HOST:PORT"),
    "rank=0 world_size=2 master=here:99999": ("99999", "port"),
    "master=here:1": ("master=here:1", "rank="),
    "rank=0 world_size=2 launch=local": ("rank=0", "launch=local"),
    "launch.procs=2": ("launch.procs=2", "launch=local"),
    "launch=local launch.procs=0": ("launch.procs=0", "1 or more"),
    "launch=local launch.procs=40": ("trainer.batch_size=32", "40"),
    "rank=0 world_size=64": ("trainer.batch_size=32", "64"),
    "run.name=a/b": ("run.name='a/b'", "letters"),
    "run.name=..": ("run.name='..'", "letters"),
    "run.name=.hidden": ("run.name='.hidden'", "letters"),
    "run.name=-rf": ("run.name='-rf'", "letters"),
    "run.name=latest": ("run.name='latest'", "name"),
    "experiment=nowhere.py:experiment": ("nowhere.py", "path"),
    "experiment=nowhere.py": ("nowhere.py", "FILE.py:FUNCTION"),
    "experiment=no.such.module:f": ("no.such.module", "path/to/file.py"),
}


@pytest.mark.parametrize("typed", REFUSED)
def test_a_refused_setting(typed: str, type_command: TypeCommand, tmp_path: Path) -> None:
    words = [typed] if typed == "just words" else typed.split()
    code, text = type_command("train", *words)
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    for part in REFUSED[typed]:
        assert part in text, text
    assert list(tmp_path.iterdir()) == []  # nothing was started


@pytest.mark.parametrize("name", ["two words", "new\nline", "ünïcode", "", "a" * 101, "a;b", "a$b"])
def test_a_refused_run_name(name: str, type_command: TypeCommand, tmp_path: Path) -> None:
    code, text = type_command("train", f'run.name="{name}"')
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert f"run.name={name!r} is not a valid name for a run" in text
    assert list(tmp_path.iterdir()) == []


def test_several_runs_of_no_value(type_command: TypeCommand, tmp_path: Path) -> None:
    code, text = type_command("train", "-m", "lr=0.1,0.2", "seed=range(0,0)")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert "seed=range(0,0) lists no value" in text
    assert list(tmp_path.iterdir()) == []


def test_of_many_names_only_those_alike_are_listed(type_command: TypeCommand) -> None:
    for typed, hint in {
        "trainer.epoch=3": "did you mean 'trainer.epochs'? also like it: ",
        "lrr=0.1": "did you mean 'lr'?",
        "entri=1": "known: data_seed",
    }.items():
        text = type_command("train", typed)[1]
        assert f"hint: {hint}" in text
        assert "entry" not in text
        assert ("launch.account" in text) == hint.startswith("known"), "unlike what was typed"


def test_an_experiment_of_ones_own_may_have_any_number(
    type_command: TypeCommand, tmp_path: Path
) -> None:
    _write(tmp_path, GOOD)
    assert type_command("train", "experiment=own.py:experiment", "+limit=inf", "--dry-run") == (
        0,
        "",
    )


def test_all_faults_are_told_together(type_command: TypeCommand) -> None:
    words = ["trainer.epoch=3", "lr=fast", "launch=lokal", "run.name=a/b", "rank=5", "world_size=2"]
    code, text = type_command("train", *words)
    assert code == ExitCode.USAGE
    assert text.count("error: ") == 5
    for word in ("trainer.epoch=3", "lr=fast", "launch=lokal", "run.name='a/b'", "rank=5"):
        assert word in text


def test_an_unknown_verb(type_command: TypeCommand) -> None:
    code, text = type_command("trian")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text)
    assert "'train'" in text


@pytest.mark.parametrize(
    "words",
    [["rank=x", "world_size=2"], ["lr=3"], ["rank=3", "world_size=2"], ["replica.devices=two"]],
)
def test_explain_refuses_too(words: list[str], type_command: TypeCommand) -> None:
    code, text = type_command("explain", *words)
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert words[0] in text


def test_half_a_world_in_the_variables(
    type_command: TypeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    code, text = type_command("train")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert "RANK=1" in text
    assert "WORLD_SIZE" in text


# --- runs ---


def test_an_unknown_run(type_command: TypeCommand) -> None:
    code, text = type_command("resume", "nothing")
    assert code == ExitCode.NOT_FOUND
    assert is_a_sentence_and_a_hint(text), text
    assert type_command("train", *QUICK, "run.name=first")[0] == 0
    code, text = type_command("resume", "frist")
    assert code == ExitCode.NOT_FOUND
    assert "'first'" in text


def test_a_run_of_another_experiment(type_command: TypeCommand, tmp_path: Path) -> None:
    _write(tmp_path, GOOD)
    assert type_command("train", *QUICK, "run.name=a")[0] == 0
    code, text = type_command("train", "experiment=own.py:experiment", "run.name=a")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert "echelon.recipes.toy" in text
    assert "own.py:experiment" in text
    assert "trainer.resume=never" in text
    # Nothing is lost: the old run still goes on.
    assert type_command("train", *QUICK, "run.name=a")[0] == 0


def test_a_resume_with_other_numbers_names_the_field(type_command: TypeCommand) -> None:
    assert type_command("train", *QUICK, "run.name=a")[0] == 0
    code, text = type_command("train", *QUICK, "run.name=a", "lr=0.3")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert "lr=0.3" in text
    assert "lr=0.05" in text


def test_a_snapshot_that_is_none(type_command: TypeCommand) -> None:
    code, text = type_command("train", *QUICK, "trainer.resume=nowhere/step-1")
    assert code == ExitCode.NOT_FOUND
    assert is_a_sentence_and_a_hint(text), text
    assert "trainer.resume=nowhere/step-1" in text


@pytest.mark.parametrize("given", ["runs/a", "nowhere"])
def test_a_refused_snapshot_leaves_the_run_as_it_was(
    given: str, type_command: TypeCommand, tmp_path: Path
) -> None:
    assert type_command("train", *QUICK, "run.name=a")[0] == 0
    before = {f: (tmp_path / "runs" / "a" / f).read_text() for f in ("config.json", "status.json")}
    code, text = type_command("train", "run.name=a", f"trainer.resume={given}")
    assert code == ExitCode.NOT_FOUND, text
    assert is_a_sentence_and_a_hint(text), text
    assert {f: (tmp_path / "runs" / "a" / f).read_text() for f in before} == before


def test_a_damaged_config_of_a_run(type_command: TypeCommand, tmp_path: Path) -> None:
    assert type_command("train", *QUICK, "run.name=a")[0] == 0
    (tmp_path / "runs" / "a" / "config.json").write_text("{")
    code, text = type_command("resume", "a")
    assert code == ExitCode.NOT_FOUND
    assert is_a_sentence_and_a_hint(text), text
    assert "config.json" in text


def test_best_by_a_number_that_nobody_evaluates(type_command: TypeCommand) -> None:
    code, text = type_command("train", *QUICK, "trainer.best=maee")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert "trainer.best=maee" in text
    assert "'mae'" in text


@pytest.mark.parametrize("folder", ["with space", "ünï/cødé", "a'quote", "per%cent+plus"])
def test_paths_of_any_name(folder: str, type_command: TypeCommand, tmp_path: Path) -> None:
    place = tmp_path / folder
    place.mkdir(parents=True)
    _write(place, GOOD)
    quoted = str(place / "out").replace("'", "\\'")
    words = [f"experiment={place}/own.py:experiment", f"run.dir='{quoted}'", "run.name=a"]
    code, text = type_command("train", *words)
    assert code == 0, text
    assert (place / "out" / "a" / "status.json").exists()
    assert type_command("resume", str(place / "out" / "a"), "trainer.epochs=4")[0] == 0


# --- the user's file ---

GOOD = """
import torch, echelon

def experiment(cfg):
    model = torch.nn.Linear(4, 1)
    x = torch.ones(8, 4)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        train_data=(x, x.sum(1, keepdim=True)),
    )
"""
SHORT = "train_data=(x, x.sum(1, keepdim=True))"
NONSENSE = {
    # what the good file's line becomes: what must be read
    "nothing": ("    return echelon", "    echelon", ("NoneType", "echelon.Experiment")),
    "a dict": ("return echelon.Experiment(", "return dict(", ("dict", "echelon.Experiment")),
    "no model": ("model=model,", "model=3,", ("model", "int", "Module")),
    "no optimizer": ("torch.optim.SGD(model.parameters(), lr=0.01)", "'sgd'", ("optimizer", "str")),
    "an optimizer's class": (
        *("torch.optim.SGD(model.parameters(), lr=0.01)", "torch.optim.SGD"),
        ("optimizer is the class SGD, not an object", "optimizer=SGD(model.parameters(), …)"),
    ),
    "a model's class": (
        *("model=model,", "model=torch.nn.Linear,"),
        ("model is the class Linear, not an object", "model=Linear(…)"),
    ),
    "a loss's class": (
        *("torch.nn.functional.mse_loss", "torch.nn.CrossEntropyLoss"),
        ("loss is the class CrossEntropyLoss, not an object", "loss=CrossEntropyLoss()"),
    ),
    "a model for several GPUs": (
        *("model=model,", "model=torch.nn.DataParallel(model),"),
        ("it is wrapped in DataParallel", "return the plain model"),
    ),
    "a schedule of another optimizer": (
        *(SHORT, f"{SHORT}, schedule=torch.optim.lr_scheduler.StepLR(Adam([x.clone()]), 1)"),
        ("a StepLR, sets the learning rate of another optimizer (Adam)", "StepLR(optimizer, …)"),
    ),
    "batches that are dicts": (
        *(SHORT, "train_data=[{'tokens': row, 'label': row[:1]} for row in x]"),
        (
            "a batch of the experiment's data is a dict with 'tokens', 'label'",
            "(*inputs, target)",
            "predict=lambda model, batch: (model(batch['tokens']), batch['label'])",
        ),
    ),
    "batches without a target": (
        *(SHORT, "train_data=Rows(x)"),
        ("a batch of the experiment's data is one Tensor", "predict="),
    ),
    "no loss": ("torch.nn.functional.mse_loss", "None", ("loss", "(output, target)")),
    "a loss for every sample": (
        "torch.nn.functional.mse_loss",
        "torch.nn.MSELoss(reduction='none')",
        ("shape (8, 1)", "loss.mean()"),
    ),
    "a loss without gradient": (
        "torch.nn.functional.mse_loss",
        "lambda output, target: (output - target).square().mean().detach()",
        ("no gradient", "detach()", "no_grad()"),
    ),
    "a loss of the output": (
        *("torch.nn.functional.mse_loss", "lambda output: output.mean()"),
        ("does not take two arguments", "<lambda>(output)", "(output, target)"),
    ),
    "a loss of the target": (
        *("torch.nn.functional.mse_loss", "lambda output, target: target.mean()"),
        ("no gradient", "the model's output"),
    ),
    "several outputs": (
        *("torch.nn.Linear(4, 1)", "Several()"),
        ("mse_loss cannot take", "a tuple of Tensor, NoneType", "predict=", "'tuple' object"),
    ),
    "no output": (
        *("model=model,", "model=model, predict=lambda model, batch: (None, batch[1]),"),
        ("mse_loss was given no output", "NoneType", "returned None"),
    ),
    "an output without its target": (
        *("model=model,", "model=model, predict=lambda model, batch: model(batch[0]),"),
        ("predict returned a tensor of shape (8, 1), not (output, target)", "(model(…), target)"),
    ),
    "several losses": ("torch.nn.functional.mse_loss", "lambda *_: (1, 2)", ("tuple", "metrics")),
    "weights outside the model": (
        "model.parameters(), lr",
        "[*model.parameters(), torch.nn.Parameter(x)], lr",
        ("1 tensor(s)", "model.extra"),
    ),
    "the weights of another model": (
        "model.parameters()",
        "torch.nn.Linear(4, 1).parameters()",
        ("none is a parameter of the model", "SGD(model.parameters(), …)"),
    ),
    "a frozen model": (
        "x = torch",
        "model.requires_grad_(False); x = torch",
        ("every parameter of the model is frozen", "nothing to train"),
    ),
    "a frozen optimizer": (
        "model.parameters(), lr",
        "[model.weight.requires_grad_(False)], lr",
        ("every parameter of the optimizer is frozen", "requires_grad"),
    ),
    "Adam for a table": (
        *("torch.nn.Linear(4, 1)", "torch.nn.EmbeddingBag(4, 1, sparse=True)", "SGD", "Adam"),
        (
            "Adam does not accept sparse",
            "'weight'",
            "echelon.optim.RowAdam or echelon.optim.RowSGD",
        ),
    ),
    "decay of a table": (
        *("torch.nn.Linear(4, 1)", "torch.nn.EmbeddingBag(4, 1, sparse=True)"),
        *("lr=0.01", "lr=0.01, weight_decay=0.1"),
        ("SGD does not accept sparse gradients with a weight_decay", "echelon.optim.RowAdam"),
    ),
    "SparseAdam for all": ("SGD", "SparseAdam", ("only sparse gradients, but 2 of its 2", "Adam")),
    "SparseAdam for all but a table": (
        *("torch.nn.Linear(4, 1)", "Looked()", "SGD", "SparseAdam"),
        ("2 of its 3 parameters have dense", "echelon.optim.RowAdam"),
    ),
    "a scaler": ("model=model,", "model=model, scaler=3,", ("scaler is of type int", "GradScaler")),
    "a schedule": (
        *("model=model,", "model=model, schedule=torch.optim.lr_scheduler.StepLR,"),
        ("schedule is the class StepLR, not an object", "state_dict"),
    ),
    "a list of metrics": (
        *("model=model,", "model=model, metrics=[1],"),
        ("metrics is of type list", "{name: Metric}"),
    ),
    "a function as a metric": (
        *("model=model,", "model=model, metrics={'mae': torch.nn.functional.l1_loss},"),
        ("metric 'mae' is of type function", "torchmetrics.Metric"),
    ),
    "a function as metrics": (
        *("model=model,", "model=model, metrics=torch.nn.functional.l1_loss,"),
        ("metrics is a function that takes arguments", "without arguments"),
    ),
    "metrics made wrong": (
        *("model=model,", "model=model, eval_data=(x, x[:, :1]), metrics=lambda: {'mae': 3},"),
        ("metric 'mae' is of type int", "torchmetrics.Metric"),
    ),
    "one tensor": (SHORT, "train_data=x", ("1 tensor(s)", "0 input(s)", "forward(", "predict=")),
    "three tensors": (SHORT, "train_data=(x, x, x)", ("3 tensor(s)", "2 input(s)", "predict=")),
    "eval_data of one": (SHORT, SHORT + ", eval_data=x", ("eval_data is 1", "predict=")),
    "words": (SHORT, "train_data=(x.numpy(), np.array(['a'] * 8))", ("<U1", "astype")),
    "no rows": (SHORT, "train_data=(x, torch.tensor(1.0))", ("without rows", "per sample")),
    "a loader": (
        *(SHORT, "train_data=torch.utils.data.DataLoader(x)"),
        ("DataLoader", "loader.dataset", "trainer.batch_size", "trainer.loader_workers"),
    ),
    "a loader with parts": (
        *(SHORT, "train_data=torch.utils.data.DataLoader(x, 4, collate_fn=list, sampler=[1, 1])"),
        ("collate_fn=loader.collate_fn, sampler=loader.sampler", "trainer.batch_size=4"),
    ),
    "a sampler beyond the data": (
        *(SHORT, f"{SHORT}, sampler=[7, 8]"),
        ("sampler gives the index 8", "8 samples", "from 0 to 7"),
    ),
    "options of the loader": (
        *(SHORT, f"{SHORT}, loader={{'num_workers': 2, 'prefetch': 4}}"),
        ("trainer.loader_workers", "no option 'prefetch'", "prefetch_factor"),
    ),
    "a closure": ("SGD(", "LBFGS(", ("LBFGS", "closure", "trains with")),
    "a plateau": (
        SHORT,
        f"{SHORT}, schedule=Plateau(torch.optim.SGD(model.parameters()))",
        ("ReduceLROnPlateau", "another optimizer"),
    ),
    "one device": ("(cfg)", "(cfg, device)", ("'device'", "def experiment(cfg, devices)")),
    "settings one by one": ("(cfg)", "(width: int = 4)", ("width: int", "cfg.width")),
    "no data": (SHORT, "train_data=None", ("train_data", "NoneType")),
    "empty": (SHORT, "train_data=(x[:0], x[:0])", ("train_data", "no samples")),
    "unequal": (SHORT, "train_data=(x, x[:3])", ("train_data", "[8, 3]")),
    "named columns": (
        *(SHORT, "train_data={'x': x, 'y': x[:, :1]}"),
        ("train_data is a dict with 'x', 'y'", "(*inputs, target)"),
    ),
    "a stream": (SHORT, "train_data=Stream()", ("train_data is a stream", "trainer.steps")),
    "a stream with a length": (SHORT, "train_data=Counted()", ("train_data", "trainer.steps")),
    "a stream with a sampler": (
        *(SHORT, "train_data=Stream(), sampler=[1, 2]"),
        ("train_data is a stream", "sampler, which gives indices"),
    ),
    "a stream to evaluate": (
        *(SHORT, f"{SHORT}, eval_data=Stream()"),
        ("eval_data is of type Stream, which has no length", "__getitem__"),
    ),
}
CLASSES = """
import numpy as np

Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
Adam = torch.optim.Adam

class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

class Looked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4, 4, sparse=True)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.top(x + self.table(x[:, 0].long()))

class Several(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, x):
        return super().forward(x), None

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))

class Counted(Stream):
    def __len__(self):
        return 8
"""


@pytest.mark.parametrize("what", NONSENSE)
def test_an_experiment_that_returns_nonsense(
    what: str, type_command: TypeCommand, tmp_path: Path
) -> None:
    *changes, parts = NONSENSE[what]
    text = GOOD
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text  # type: ignore[operator]
        text = text.replace(old, new)  # type: ignore[arg-type]
    _write(tmp_path, CLASSES.join(text.split("\n\n", 1)))
    code, text = type_command("train", "experiment=own.py:experiment")
    assert code == ExitCode.USAGE, text
    assert is_a_sentence_and_a_hint(text), text
    for part in parts:
        assert part in text, text


def test_what_the_users_loss_was_given(type_command: TypeCommand, tmp_path: Path) -> None:
    """Below the user's own lines, which say where it failed."""
    changed = GOOD.replace("torch.nn.Linear(4, 1)", "torch.nn.LSTM(4, 1)")
    loss = "lambda output, target: (output - target).mean()"
    _write(tmp_path, changed.replace("torch.nn.functional.mse_loss", loss))
    code, text = type_command("train", "experiment=own.py:experiment")
    assert code == ExitCode.FAILED
    assert "unsupported operand" in text
    assert 'own.py", line ' in text
    assert "src/echelon" not in text
    [hint] = [line for line in text.splitlines() if line.startswith("  hint: ")]
    assert "a tuple of Tensor, tuple" in hint
    assert "predict=" in hint


DATA_MISTAKES = {
    # what the good file's data become, and its loss: what must be read
    "float64": ("(x.double(), x[:, :1])", "mse_loss", ("float64 (8, 4)", ".float()")),
    "a wrong width": ("(x[:, :3], x[:, :1])", "mse_loss", ("float32 (8, 3)", "first layer")),
    "labels that are not whole": ("(x, x[:, 0])", "nll_loss", ("Long", ".long()")),
    "a label too high": ("(x, x[:, 0].long() * 7)", "cross_entropy", ("Target 7", "an output")),
    "samples of other shapes": (
        *("[(a[: 1 + i % 2], a[:1]) for i, a in enumerate(x)]", "mse_loss"),
        ("the samples of the experiment's data differ in shape", "padding", "collate_fn="),
    ),
    "samples that are objects": (
        *("[(a, object()) for a in x]", "mse_loss"),
        ("cannot be put into a batch", "__getitem__", "collate_fn="),
    ),
    "one sample for a batch norm": (
        *("(x[:1], x[:1, :1])", "mse_loss"),
        ("a batch norm needs two", "trainer.batch_size"),
    ),
    "samples of three": ("[(a, a, a[:1]) for a in x]", "mse_loss", ("forward() takes", "predict=")),
}


@pytest.mark.parametrize("what", DATA_MISTAKES)
def test_data_that_the_model_cannot_take(
    what: str, type_command: TypeCommand, tmp_path: Path
) -> None:
    """No line of the user's is in such a traceback, so a sentence is in its place."""
    data, loss, parts = DATA_MISTAKES[what]
    text = GOOD.replace(SHORT, f"train_data={data}").replace("mse_loss", loss)
    if "norm" in what:
        norm = "torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))"
        text = text.replace("torch.nn.Linear(4, 1)", norm)
    _write(tmp_path, text)
    code, text = type_command("train", "experiment=own.py:experiment")
    assert code == ExitCode.FAILED, text
    assert is_a_sentence_and_a_hint(text), text
    for part in parts:
        assert part in text, text


def test_samples_of_other_shapes_in_a_loader_process(
    type_command: TypeCommand, tmp_path: Path
) -> None:
    data = "train_data=[(a[: 1 + i % 2], a[:1]) for i, a in enumerate(x)]"
    _write(tmp_path, GOOD.replace(SHORT, data))
    words = ["experiment=own.py:experiment", "trainer.loader_workers=1"]
    code, text = type_command("train", *words)
    assert code == ExitCode.FAILED
    assert is_a_sentence_and_a_hint(text), text
    assert "differ in shape: RuntimeError: stack expects each tensor to be equal size" in text


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        ("Twice()", ("the loss was differentiated twice", "detach()")),
        ("InPlace()", ("was changed in place", "set_detect_anomaly")),
    ],
)
def test_a_backward_pass_that_cannot_be(
    loss: str, parts: tuple[str, str], type_command: TypeCommand, tmp_path: Path
) -> None:
    """torch notices it in its own backward pass, far from the line that caused it."""
    classes = """
class Twice:
    def __call__(self, output, target):
        loss = (output - target).square().mean()
        loss.backward()
        return loss

class InPlace:
    def __call__(self, output, target):
        grown = output.exp()
        loss = grown.mean()
        grown += 1
        return loss
"""
    text = GOOD.replace("torch.nn.functional.mse_loss", loss)
    _write(tmp_path, f"{classes}\n{text}")
    code, text = type_command("train", "experiment=own.py:experiment")
    assert code == ExitCode.FAILED, text
    assert is_a_sentence_and_a_hint(text), text
    for part in parts:
        assert part in text, text


def test_data_to_evaluate_that_the_model_cannot_take(
    type_command: TypeCommand, tmp_path: Path
) -> None:
    _write(tmp_path, GOOD.replace(SHORT, f"{SHORT}, eval_data=(x[:, :2], x[:, :1])"))
    code, text = type_command("train", "experiment=own.py:experiment")
    assert code == ExitCode.FAILED
    assert is_a_sentence_and_a_hint(text), text
    assert "eval_data is float32 (8, 2), float32 (8, 1), the model's parameters float32" in text


def test_a_metric_of_another_task(type_command: TypeCommand, tmp_path: Path) -> None:
    metric = "metrics={'acc': torchmetrics.Accuracy(task='binary')}"
    data = "train_data=(x, x[:, 0].long()), eval_data=(x, x[:, 0].long())"
    text = GOOD.replace(SHORT, f"{data}, {metric}").replace("mse_loss", "cross_entropy")
    _write(tmp_path, "import torchmetrics\n" + text.replace("Linear(4, 1)", "Linear(4, 3)"))
    words = ["experiment=own.py:experiment", "trainer.epochs=1"]
    code, text = type_command("train", *words)
    assert code == ExitCode.FAILED
    assert is_a_sentence_and_a_hint(text), text
    assert "the metric 'acc', a BinaryAccuracy, cannot take the output float32 (8, 3) and" in text


def test_a_device_that_is_not_there(type_command: TypeCommand, tmp_path: Path) -> None:
    """Below the user's own line, which says where."""
    _write(tmp_path, GOOD.replace("torch.nn.Linear(4, 1)", "torch.nn.Linear(4, 1).cuda()"))
    code, text = type_command("train", "experiment=own.py:experiment")
    assert code == ExitCode.FAILED
    assert 'own.py", line 5' in text
    assert "  hint: leave .cuda() and .to(device) out" in text


LOADED = """
import os, signal, torch, echelon

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        FAULT
        return torch.ones(4), torch.ones(1)

def experiment(cfg):
    model = torch.nn.Linear(4, 1)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        train_data=Rows(),
    )
"""


def test_an_exception_in_a_loader_process_is_shown_once(
    type_command: TypeCommand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, LOADED.replace("FAULT", "raise ValueError('a sample\\n' + 'is bad ' * 200)"))
    words = ["experiment=own.py:experiment", "trainer.loader_workers=1", "run.name=a"]
    code, text = type_command("train", *words)
    assert code == ExitCode.FAILED
    assert text.count("Traceback (most recent call last)") == 1, text
    assert text.count('own.py", line 9, in __getitem__') == 1, text
    assert "In DataLoader worker process 0:" in text
    assert "src/echelon" not in text
    assert "site-packages" not in text
    assert run_and_report_faults(partial(run_command, ["jobs", "a"])) == 0
    [note] = [line for line in capsys.readouterr().out.splitlines() if "ValueError" in line]
    assert "rank 0: ValueError: a sample is bad is bad" in note
    assert len(note) < 250


@pytest.mark.slow
def test_a_loader_process_that_is_killed_is_explained(
    type_command: TypeCommand, tmp_path: Path
) -> None:
    _write(tmp_path, LOADED.replace("FAULT", "os.kill(os.getpid(), signal.SIGKILL)"))
    words = ["experiment=own.py:experiment", "trainer.loader_workers=2"]
    code, text = type_command("train", *words)
    assert code == ExitCode.FAILED
    assert is_a_sentence_and_a_hint(text), text
    assert "trainer.loader_workers=2) was killed by SIGKILL" in text
    assert "dmesg | tail" in text


GROUPS = {
    # what stands before the model: what must be read
    "a group": (
        "init_process_group('gloo')",
        ("opens a process group", "leave init_"),
    ),
    "a wrapper": (
        "DDP(torch.nn.Linear(4, 1))",
        ("there is no process group", "without DistributedDataParallel", "is_initialized()"),
    ),
}


@pytest.mark.parametrize("what", GROUPS)
def test_torch_distributed_in_an_experiment(
    what: str, type_command: TypeCommand, tmp_path: Path
) -> None:
    typed, parts = GROUPS[what]
    lines = "from torch.distributed import init_process_group\n"
    lines += "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    _write(tmp_path, lines + GOOD.replace("    model =", f"    {typed}\n    model ="))
    code, text = type_command("train", "experiment=own.py:experiment")
    assert code == ExitCode.USAGE, text
    assert is_a_sentence_and_a_hint(text), text
    assert f"error: {tmp_path}/own.py:7 " in text
    for part in parts:
        assert part in text, text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3])
def test_a_killed_loader_process_is_named_among_several_ranks(ranks: int, tmp_path: Path) -> None:
    """It dies while its batches are received, and the report of one rank is not cut short."""
    _write(tmp_path, LOADED.replace("FAULT", "index == 5 and os.kill(os.getpid(), signal.SIGKILL)"))
    words = ["experiment=own.py:experiment", "trainer.loader_workers=1", "trainer.batch_size=3"]
    local = ["launch=local", f"launch.procs={ranks}", "run.name=a"]
    done = run_forked([*ECHELON, "train", *local, *words], tmp_path)
    text = _sentence(done, ExitCode.FAILED)
    assert text.count("error: ") == 1
    assert "was killed by SIGKILL while it fetched sample 5;" in text
    failure = command_runner.status(tmp_path / "runs" / "a")["failure"]
    assert "was killed by SIGKILL" in failure["summary"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["experiment", "loss"])
def test_two_processes_with_a_group_of_their_own(where: str, tmp_path: Path) -> None:
    """Before ours, which would then be the second, and after ours."""
    opened = "import torch.distributed\n"
    opened += "def open_group(*_):\n    torch.distributed.init_process_group('gloo')\n"
    old, new = {
        "experiment": ("    model =", "    open_group()\n    model ="),
        "loss": ("torch.nn.functional.mse_loss", "open_group"),
    }[where]
    _write(tmp_path, opened + GOOD.replace(old, new))
    words = ["experiment=own.py:experiment", "trainer.batch_size=4"]
    done = run_forked([*ECHELON, "train", *TWO, *words], tmp_path)
    text = _sentence(done, ExitCode.USAGE)
    assert done.left == []
    assert "init_process_group" in text
    assert text.count("error: ") == 1


def test_numpy_arrays_are_tensors(type_command: TypeCommand, tmp_path: Path) -> None:
    _write(tmp_path, GOOD)
    other = GOOD.replace(SHORT, "train_data=(x.numpy()[::-1], x.sum(1, keepdim=True).numpy())")
    (tmp_path / "arrays.py").write_text(other)
    for file in ("own", "arrays"):
        code, text = type_command("train", f"experiment={file}.py:experiment", f"run.name={file}")
        assert code == 0, text
    losses = [
        [line["loss"] for line in read_metrics(run / "metrics.jsonl")]
        for run in (tmp_path / "runs" / "own", tmp_path / "runs" / "arrays")
    ]
    assert losses[0] == losses[1] != []


@pytest.mark.parametrize("order", ["cfg, devices", "devices, cfg", "devices, cfg: S", "devices"])
def test_devices_stand_anywhere(order: str, type_command: TypeCommand, tmp_path: Path) -> None:
    declared = "from dataclasses import dataclass\n@dataclass\nclass S:\n    width: int = 4\n"
    use = "cfg.width" if "S" in order else "4"
    placed = "Linear(4, 1).to(devices[0])"
    text = GOOD.replace("(cfg)", f"({order})").replace("Linear(4, 1)", placed)
    _write(tmp_path, declared + text.replace("ones(8, 4)", f"ones(8, {use})"))
    code, said = type_command("train", "experiment=own.py:experiment")
    assert code == 0, said


def test_best_of_what_is_not_evaluated(type_command: TypeCommand, tmp_path: Path) -> None:
    _write(tmp_path, GOOD)
    code, text = type_command("train", "experiment=own.py:experiment", "trainer.best=accuracy")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert "trainer.best=accuracy, but the experiment has no eval_data" in text
    _write(tmp_path, GOOD.replace(SHORT, SHORT + ", eval_data=(x, x[:, :1])"))
    code, text = type_command("train", "experiment=own.py:experiment", "trainer.best=los")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert "trainer.best=los, but no such number is evaluated" in text
    assert "'loss'" in text
    assert "before the first step" in text


def test_no_such_function_names_the_nearest(type_command: TypeCommand, tmp_path: Path) -> None:
    _write(tmp_path, GOOD)
    code, text = type_command("train", "experiment=own.py:experimnt")
    assert code == ExitCode.USAGE
    assert is_a_sentence_and_a_hint(text), text
    assert "'experiment'" in text


def test_an_undeclared_setting_of_a_users_dataclass(
    type_command: TypeCommand, tmp_path: Path
) -> None:
    declared = "from dataclasses import dataclass\n@dataclass\nclass S:\n    width: int = 4\n"
    _write(tmp_path, declared + GOOD.replace("(cfg)", "(cfg: S)"))
    code, text = type_command(
        "train", "experiment=own.py:experiment", "widht=3", "trainer.epochs=x"
    )
    assert code == ExitCode.USAGE
    assert text.count("error: ") == 2
    assert "'width'" in text


BROKEN = {
    "a syntax error": ("def experiment(cfg)\n", "SyntaxError", 1),
    "an import error": ("import torch\nimport no_such_thing\n", "ModuleNotFoundError", 2),
    "an error at import": ("a = 1\nb = a / 0\n", "ZeroDivisionError", 2),
    "an error in the function": (
        "def experiment(cfg):\n    return 1 / 0\n",
        "ZeroDivisionError",
        2,
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_shows_the_users_lines_only(
    what: str, type_command: TypeCommand, tmp_path: Path
) -> None:
    code_text, error, line = BROKEN[what]
    _write(tmp_path, code_text)
    code, text = type_command("train", "experiment=own.py:experiment")
    assert code == ExitCode.FAILED
    assert error in text
    assert f'own.py", line {line}' in text
    assert "src/echelon" not in text, text
    assert "importlib" not in text, text


def _write(folder: Path, text: str) -> None:
    (folder / "own.py").write_text(text)


# --- worlds that do not come about ---


def _ranks(folder: Path, *words: list[str]) -> list[Ended]:
    """Forked, and so there at the same moment: each imports nothing while another waits for it."""
    return run_commands(
        folder, [["train", f"run.dir={folder / 'runs'}", *QUICK, *w] for w in words]
    )


def _sentence(
    ended: Ended | command_runner.CommandResult, code: ExitCode = ExitCode.RENDEZVOUS
) -> str:
    text = ended.output if isinstance(ended, Ended) else ended.err
    assert ended.code == code, text
    assert is_a_sentence_and_a_hint(text), text
    return text


@pytest.mark.slow
def test_a_world_that_never_fills_names_the_missing_everywhere(tmp_path: Path) -> None:
    master = f"master=127.0.0.1:{command_runner.free_port()}"
    words = ["world_size=4", master, "launch.join_timeout_s=15"]
    for done in _ranks(tmp_path, ["rank=0", *words], ["rank=2", *words]):
        text = _sentence(done)
        assert "world_size=4" in text
        assert "2 of 4" in text
        assert "missing: rank 1, 3" in text


@pytest.mark.slow
def test_rank_0_missing(tmp_path: Path) -> None:
    master = f"127.0.0.1:{command_runner.free_port()}"
    words = ["rank=1", "world_size=2", f"master={master}", "launch.join_timeout_s=2"]
    (done,) = _ranks(tmp_path, words)
    text = _sentence(done)
    assert f"found no rank 0 at {master}" in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_two_processes_with_one_rank(tmp_path: Path) -> None:
    words = [
        "world_size=3",
        f"master=127.0.0.1:{command_runner.free_port()}",
        "launch.join_timeout_s=15",
    ]
    first, *twins = _ranks(tmp_path, ["rank=0", *words], ["rank=1", *words], ["rank=1", *words])
    texts = [_sentence(done) for done in twins]
    assert sum("rank=1 is taken" in text for text in texts) == 1
    assert "missing: rank 2" in _sentence(first)


@pytest.mark.slow
def test_the_port_is_taken(tmp_path: Path) -> None:
    """By something that is no rank 0 and says nothing: every rank says so in time."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["world_size=2", f"master={master}", "launch.join_timeout_s=3"]
        first, second = _ranks(tmp_path, ["rank=0", *words], ["rank=1", *words])
    text = _sentence(first)
    assert master in text
    assert "taken" in text
    assert master in _sentence(second)


@pytest.mark.slow
def test_different_words_on_two_ranks_name_the_field(tmp_path: Path) -> None:
    words = ["world_size=3", f"master=127.0.0.1:{command_runner.free_port()}"]
    rates = ("lr=0.1", "lr=0.2", "lr=0.1")
    typed = [[f"rank={rank}", rate, *words] for rank, rate in enumerate(rates)]
    for done in _ranks(tmp_path, *typed):  # those who agree must not wait for the other for ever
        text = _sentence(done)
        assert "lr=0.2" in text
        assert "lr=0.1" in text


@pytest.mark.slow
def test_nonsense_in_a_worker_is_a_sentence_too(tmp_path: Path) -> None:
    _write(tmp_path, GOOD.replace(SHORT, "train_data=(x, x[:3])"))
    words = ["experiment=own.py:experiment", "trainer.batch_size=4"]
    done = run_forked([*ECHELON, "train", *TWO, *words], tmp_path)
    text = _sentence(done, ExitCode.USAGE)
    assert done.left == []
    assert "[8, 3]" in text
    assert text.count("error: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_refuse_a_loss_without_gradient(kind: str, tmp_path: Path) -> None:
    """Theirs has a part that all ranks need, and its gradient is no training."""
    _, loss, _ = NONSENSE["a loss of the target"]
    _write(tmp_path, GOOD.replace("torch.nn.functional.mse_loss", loss))  # type: ignore[arg-type]
    words = ["experiment=own.py:experiment", f"replica.kind={kind}", *TWO]
    ended = run_forked([*ECHELON, "train", *words], tmp_path)
    assert ended.code == ExitCode.USAGE, ended.err
    assert is_a_sentence_and_a_hint(ended.err), ended.err
    assert "the experiment's loss has no gradient" in ended.err


@pytest.mark.slow
def test_parameters_that_no_loss_needs(tmp_path: Path) -> None:
    text = """
        import torch, echelon
        from torch import nn

        def experiment():
            model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
            data = (torch.ones(8, 2), torch.ones(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = nn.functional.mse_loss
            predict = lambda model, batch: (model[0](batch[0]), batch[1])
            return echelon.Experiment(model, optimizer, loss, data, predict=predict)
    """
    (tmp_path / "own.py").write_text(dedent(text))
    words = [*ECHELON, "train", "experiment=own.py:experiment", "trainer.batch_size=2", *TWO]
    # Before the step is taken: DDP itself complains in the next one, and here there is none.
    ended = run_forked([*words, "trainer.steps=1"], tmp_path)
    assert ended.code == 1
    assert is_a_sentence_and_a_hint(ended.err)
    assert "the parameters 1.weight, 1.bias had no part" in ended.err
    assert "set trainer.unused_parameters=true" in ended.err
    ended = run_forked([*words, "trainer.unused_parameters=true"], tmp_path)
    assert ended.code == 0, ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (
            "torch.full((8, 4), os.getpid())",
            "its first or last sample is another one than on rank 0",
        ),
        ("torch.full((8, 4), os.getpid()).numpy()[::-1]", "its first or last sample is another"),
        ("torch.ones(9 - int('rank=0' in sys.argv), 4)", "9 samples here, 8 on rank 0"),
    ],
)
def test_data_that_differs_between_ranks(drawn: str, said: str, tmp_path: Path) -> None:
    """As it does when it is drawn while torchrun's processes start."""
    of_file = GOOD.replace("    x = torch.ones", "    torch.ones").replace(
        SHORT, "train_data=(x, x)"
    )
    _write(tmp_path, f"import os, sys, torch\nx = {drawn}\n{of_file}")
    own = [f"experiment={tmp_path / 'own.py'}:experiment", "trainer.batch_size=4"]
    words = [*own, "world_size=2", f"master=127.0.0.1:{command_runner.free_port()}"]
    where = f"run.dir={tmp_path / 'runs'}"
    for done in run_commands(
        tmp_path, [["train", f"rank={rank}", where, *words] for rank in (0, 1)]
    ):
        assert f"train_data is not the same on all ranks: {said}" in _sentence(done, ExitCode.USAGE)
