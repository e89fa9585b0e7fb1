"""Parameters from a sweep's server: plain values of declared settings, or nothing runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.config.compose import UserExperiment, compose
from echelon.config.untrusted import (
    MAX_BYTES,
    WandbTrial,
    apply_trial,
    drop_trial_arguments,
    make_wandb_trial,
    parse_wandb_trial,
    read_wandb_trial,
)
from echelon.errors import EchelonError


@dataclass
class Optimizer:
    lr: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9])


@dataclass
class Settings:
    lr: float = 0.05
    hidden: int = 8
    deep: bool = False
    kind: str = "a"
    optimizer: Optimizer = field(default_factory=Optimizer)


OWN = UserExperiment("file.py:experiment", Settings)


def make_trial_config(given: dict[str, Any]) -> WandbTrial:
    return make_wandb_trial("me/pro/sw33p", "abc", given)


def apply_parameters(given: dict[str, Any], own: UserExperiment | None = OWN, *words: str) -> Any:
    return apply_trial(compose(words, own), make_trial_config(given), own)


def refusal(given: dict[str, Any], own: UserExperiment | None = OWN) -> str:
    with pytest.raises(EchelonError) as caught:
        apply_parameters(given, own)
    return str(caught.value)


# --- what is taken ------------------------------------------------------------------------------


def test_values_become_settings_of_their_types() -> None:
    config = apply_parameters(
        {"lr": "1e-4", "hidden": 16.0, "deep": True, "trainer.batch_size": 64.0}
    )
    assert config.experiment_settings["lr"] == 1e-4
    assert config.experiment_settings["hidden"] == 16
    assert isinstance(config.experiment_settings["hidden"], int)
    assert config.experiment_settings["deep"] is True
    assert config.trainer.batch_size == 64


def test_nested_parameters_are_nested_settings() -> None:
    given = {"optimizer": {"lr": 0.5, "betas": [0.8, 0.99]}, "trainer": {"clip": 1}, "seed": 3}
    config = apply_parameters(given)
    assert config.experiment_settings["optimizer"] == {"lr": 0.5, "betas": [0.8, 0.99]}
    assert (config.trainer.clip, config.seed) == (1.0, 3)


def test_the_run_is_tracked_as_the_trial_and_named_after_it() -> None:
    config = apply_parameters({"lr": 0.1, "optimizer": {"lr": 0.5}})
    assert config.run.name == "sw33p-abc"
    told = config.track.wandb
    assert (told.use, told.sweep, told.id) == (True, "me/pro/sw33p", "abc")
    assert told.swept == ["lr", "optimizer.lr"]


def test_command_line_settings_are_kept() -> None:
    config = apply_parameters(
        {"lr": 0.1}, OWN, "hidden=3", "run.name=mine", "kind='1e3 b'", "trainer.clip=2"
    )
    assert (config.experiment_settings["hidden"], config.experiment_settings["kind"]) == (
        3,
        "1e3 b",
    )
    assert (config.run.name, config.trainer.clip) == ("mine", 2.0)


def test_a_bundled_experiment_accepts_only_settings_of_its_file() -> None:
    assert apply_parameters({"lr": 1, "trainer.schedule": "cosine"}, None).experiment["lr"] == 1.0
    assert "lr=fast: " in refusal({"lr": "fast"}, None)
    assert "did you mean 'hidden'" in refusal({"hiden": 1}, None)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"lr": "${oc.env:HOME}"},
        {"kind": "a ${oc.env:WANDB_API_KEY}"},
        {"optimizer": {"_target_": "os.system", "command": "true"}},
        {"_target_": "os.system"},
        {"optimizer": {"betas": [{"_target_": "os.system"}]}},
        {"optimizer": {"betas": [[1], [2]]}},
        {"lr": {}},
        {"kind": "x" * 10_000_000},
        {"optimizer": {"betas": [0.5] * 100_000}},
        {f"p{n}": n for n in range(100_000)},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"hidden": 2**70},
        {"kind": "???"},
        {"lr": b"1"},
        {"a=b": 1},
        {"~lr": 1},
        {"+lr": 1},
        {"lr ": 1},
        {"": 1},
        {"x" * 5000: 1},
        {"${lr}": 1},
        {1: 2},
    ],
    ids=lambda given: str(given)[:40],
)
def test_values_that_are_not_plain_data_are_refused(given: dict[str, Any]) -> None:
    assert "hint: " in refusal(given)
    assert len(refusal(given)) < 3000


@pytest.mark.parametrize(
    "key",
    [
        *("launch", "launch.kind", "launch.setup", "launch.sbatch", "launch.procs"),
        *("track", "track.wandb.mode", "track.tensorboard.folder", "run.dir", "run.name"),
        *("experiment", "experiment.entry", "entry", "rank", "world_size", "master", "program"),
        *("mode", "trainer.resume", "trainer.loader_workers", "trainer.best", "trainer"),
    ],
)
def test_a_sweep_may_not_set_where_and_what_runs(key: str) -> None:
    assert f"the sweep sets {key}, which it may not" in refusal({key: "local"})
    top, dot, rest = key.partition(".")
    if dot:
        assert "which it may not" in refusal({top: {rest: "local"}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": {"a": 1}}, "lr.a=1: there is no such setting"),
        ({"lr": [1, 2]}, "lr=[1, 2]: not a number"),
        ({"hidden": 2.5}, "hidden=2.5: not a whole number"),
        ({"hidden": True}, "hidden=true: not a whole number"),
        ({"deep": "perhaps"}, "deep=perhaps: not true or false"),
        ({"optimizer": 3}, "optimizer=3"),
        ({"lrr": 0.1}, "did you mean 'lr'?"),
        ({"batch_size": 8}, "'trainer.batch_size'"),
        ({"trainer.batch_size": -1}, "trainer.batch_size=-1 is below 1"),
        ({"trainer.schedule": "zigzag"}, "there is no such choice"),
        ({"trainer.batchsize": 8}, "batch_size"),
    ],
)
def test_values_that_do_not_fit_the_declared_type(given: dict[str, Any], said: str) -> None:
    assert said in refusal(given)


def test_every_fault_is_reported_at_once() -> None:
    told = refusal({"lr": float("nan"), "launch.kind": "slurm", "kind": "${x}"})
    assert told.count("hint: ") == 3


@pytest.mark.parametrize("id", ["", "../x", "a/b", "-x", "x" * 200, "a b"])
def test_unsafe_ids_are_refused(id: str) -> None:
    with pytest.raises(EchelonError, match="is not the id of a run"):
        make_wandb_trial("me/pro/sw33p", id, {})


# --- how it comes -------------------------------------------------------------------------------


def agent_environ(folder: Path, text: str) -> dict[str, str]:
    file = folder / "config.yaml"
    file.write_text(text)
    return {
        "WANDB_ENTITY": "me",
        "WANDB_PROJECT": "pro",
        "WANDB_SWEEP_ID": "sw33p",
        "WANDB_RUN_ID": "abc",
        "WANDB_SWEEP_PARAM_PATH": str(file),
    }


def test_the_parameter_file_of_an_agent_is_read(tmp_path: Path) -> None:
    env = agent_environ(tmp_path, "wandb_version: 1\n\nlr:\n  value: 0.5\n")
    assert read_wandb_trial(env) == make_trial_config({"lr": 0.5})
    assert read_wandb_trial({}) is None
    assert read_wandb_trial({"WANDB_RUN_ID": "abc"}) is None


def test_a_missing_parameter_file(tmp_path: Path) -> None:
    env = agent_environ(tmp_path, "") | {"WANDB_SWEEP_PARAM_PATH": str(tmp_path / "none")}
    with pytest.raises(EchelonError, match="WANDB_DIR"):
        read_wandb_trial(env)


_LAUGHS = "a: &a {value: [1]}\n" + "".join(
    f"{b}: &{b} {{{', '.join(f'{n}: *{a}' for n in 'stuvwxyz')}}}\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        "lr: {value: !!python/object/apply:os.system [true]}",
        "lr: {value: 2020-01-01}",
        "lr: 3",
        "[1, 2]",
        "lr: {value: [",
        "x" * (MAX_BYTES + 1),
        _LAUGHS + "laugh: {value: *i}",
        "lr: {value: &x {y: *x}}",
        "",
    ],
    ids=lambda text: text[:30],
)
def test_a_parameter_file_with_other_content(text: str, tmp_path: Path) -> None:
    with pytest.raises(EchelonError):
        read_wandb_trial(agent_environ(tmp_path, text))


def test_a_trial_sent_to_ranks_is_checked_again() -> None:
    told = make_trial_config({"lr": 0.5, "optimizer": {"lr": 1}})
    assert parse_wandb_trial(told.to_json()) == told
    with pytest.raises(EchelonError, match="KiB"):
        parse_wandb_trial(" " * (MAX_BYTES + 1))
    with pytest.raises(EchelonError, match="may not"):
        parse_wandb_trial(
            json.dumps({"sweep": "a/b/c", "id": "x", "given": {"launch.kind": "ssh"}})
        )


def test_arguments_that_an_agent_added_are_dropped() -> None:
    given = {"lr": 0.1, "deep": True, "trainer.batch_size": 8, "optimizer": {"lr": 1.5}}
    told = make_trial_config(given)
    own = ["experiment=toy", "launch=local", "--dry-run", "samples=3"]
    for filled in (
        ["--lr=0.1", "--deep=True", "--trainer.batch_size=8", "--optimizer={'lr': 1.5}"],
        ["lr=0.1", "deep=True", "trainer.batch_size=8", "optimizer={'lr': 1.5}"],
        ["++lr=0.1", "+deep=True"],
        ["--lr", "0.1", "--deep", "True", "--optimizer", "{'lr': 1.5}"],
        ["--lr=0.1", "--deep"],
        [],
    ):
        assert drop_trial_arguments([*own[:2], *filled, *own[2:]], told) == own
    assert drop_trial_arguments(["lr", "--lrs=1", "0.1"], told) == ["lr", "--lrs=1", "0.1"]
    assert drop_trial_arguments(["--lr=0.1"], None) == ["--lr=0.1"]


def test_a_file_that_wandb_writes_is_read(tmp_path: Path) -> None:
    given = {"lr": 1e-05, "kind": "1e-05", "deep": None, "optimizer": {"betas": [1, 2.5]}}
    text = yaml.safe_dump({"wandb_version": 1} | {k: {"value": v} for k, v in given.items()})
    told = read_wandb_trial(agent_environ(tmp_path, text))
    assert told is not None
    assert told.parameters == given
