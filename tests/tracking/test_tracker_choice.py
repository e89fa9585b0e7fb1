"""What is wrong with a choice of trackers is said before anything starts, and never shows a key."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from echelon.config.compose import compose
from echelon.config.schema import Config
from echelon.config.settings_help import describe_bundled_settings, render_topic
from echelon.errors import EchelonError
from echelon.runs.run_folder import Run
from echelon.tracking import wandb_key, wandb_run
from echelon.tracking.create import require_trackers
from echelon.tracking.tracker import is_better

KEY = "0123456789abcdef" * 3
ONLINE = compose(["track=wandb"])
OFFLINE = compose(["track=[wandb,tensorboard]", "track.wandb.mode=offline"])


@pytest.fixture(autouse=True)
def _nobody_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def faults(*words: str) -> dict[str, str]:
    with pytest.raises(EchelonError) as caught:
        compose(words)
    return {fault.what: fault.do for fault in caught.value.faults}


# --- settings -----------------------------------------------------------------------------------


def test_a_choice_of_trackers() -> None:
    assert not compose([]).track.wandb.use
    assert not compose([]).track.tensorboard.use
    assert compose(["track=tensorboard"]).track.tensorboard.use
    assert OFFLINE.track.wandb.use
    assert OFFLINE.track.tensorboard.use
    assert OFFLINE.track.wandb.mode == "offline"


def test_every_mistake_at_once_with_the_nearest_name() -> None:
    found = faults("track=[wandb,tensorbord]", "track.wandb.mod=offline", "track.wandb.mode=of")
    assert len(found) == 3
    assert found["track=tensorbord: there is no such track"].startswith(
        "did you mean 'tensorboard'"
    )
    [hint] = [do for what, do in found.items() if "track.wandb.mod=offline" in what]
    assert hint.startswith("did you mean 'track.wandb.mode'?")


def test_what_nobody_would_read_is_a_slip() -> None:
    [what] = faults("track.wandb.mode=offline")
    assert what == "track.wandb.mode=offline is set, but wandb does not track this run"


def test_names_that_wandb_would_refuse() -> None:
    assert len(faults("track=wandb", "track.wandb.project=a/b", "track.wandb.tags=['']")) == 2


def test_the_settings_are_in_the_help() -> None:
    page = render_topic("track", describe_bundled_settings("toy"))
    assert "  track.wandb.mode=null" in page
    assert "  track.tensorboard.folder=null" in page


# --- is it there --------------------------------------------------------------------------------


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(EchelonError) as caught:
        require_trackers(OFFLINE, {})
    assert [fault.do for fault in caught.value.faults] == [
        'install it: pip install "echelon[wandb]"',
        'install it: pip install "echelon[tensorboard]"',
    ]


def test_without_a_key_it_says_how_to_get_one_or_to_do_without() -> None:
    with pytest.raises(EchelonError) as caught:
        require_trackers(ONLINE, {})
    [fault] = caught.value.faults
    assert fault.what == "track=wandb, but there is no key for api.wandb.ai"
    assert "`wandb login`" in fault.do
    assert "WANDB_API_KEY" in fault.do
    assert "track.wandb.mode=offline" in fault.do


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_without_a_server_no_key_is_needed(mode: str) -> None:
    require_trackers(ONLINE, {"WANDB_MODE": mode})


def test_a_mode_that_wandb_has_not_is_told() -> None:
    with pytest.raises(EchelonError, match="WANDB_MODE=ofline: there is no such mode"):
        require_trackers(ONLINE, {"WANDB_MODE": "ofline"})


# --- the key ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "wrong"),
    [
        ({"WANDB_API_KEY": KEY}, None),
        ({"WANDB_API_KEY": f"local-{KEY}"}, None),
        ({"WANDB_API_KEY": "too-short"}, "WANDB_API_KEY does not have the form of a key"),
        ({"WANDB_API_KEY": KEY + " x"}, "WANDB_API_KEY does not have the form of a key"),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/a/file"}, None),
        ({"WANDB_BASE_URL": "http://mine:8080"}, "there is no key for mine:8080"),
        ({"WANDB_BASE_URL": "http://me:secret@mine:80"}, "there is no key for mine:80"),
    ],
)
def test_keys_in_variables(env: Mapping[str, str], wrong: str | None) -> None:
    assert wandb_key.find_key_problem(env) == wrong


def test_keys_of_wandb_login(tmp_path: Path) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    assert wandb_key.find_key_problem({}) is None
    assert (
        wandb_key.find_key_problem({"WANDB_BASE_URL": "https://mine"}) == "there is no key for mine"
    )
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://other\n")
    assert wandb_key.find_key_problem({}) == "there is no key for other"


def test_a_wrong_key_is_not_shown() -> None:
    with pytest.raises(EchelonError) as caught:
        require_trackers(ONLINE, {"WANDB_API_KEY": "sEcReT"})
    assert "sEcReT" not in str(caught.value)


# --- the run ------------------------------------------------------------------------------------


def test_the_id_is_made_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    made = wandb_run.ensure_run_id(Config(), run, {})
    assert (
        wandb_run.ensure_run_id(Config(), run, {"WANDB_RUN_ID": "other"})
        == run.read_wandb_id()
        == made
    )


def test_a_sweep_gives_the_id(tmp_path: Path) -> None:
    assert wandb_run.ensure_run_id(Config(), Run(tmp_path), {"WANDB_RUN_ID": "given"}) == "given"


def test_the_best_so_far(tmp_path: Path) -> None:
    trainer = compose(["trainer.best=acc", "trainer.best_is=max"]).trainer
    best = wandb_run.BestMetric(trainer, [{"step": 1, "eval_acc": 0.5}, {"step": 2, "loss": 9.0}])
    assert not best.update({"step": 3, "eval_acc": 0.4})
    assert best.update({"step": 4, "eval_acc": 0.6})
    assert best.to_summary() == {"best/acc": 0.6, "best/step": 4}


@pytest.mark.parametrize(("best_is", "best"), [("min", 0.25), ("max", 0.5)])
def test_what_is_not_finite_is_never_the_best(best_is: str, best: float) -> None:
    trainer = compose([f"trainer.best_is={best_is}"]).trainer
    values = [math.nan, math.inf, 0.5, math.nan, -math.inf, 0.25]
    found = wandb_run.BestMetric(
        trainer, [{"step": i, "eval_loss": v} for i, v in enumerate(values)]
    )
    assert found.to_summary()["best/loss"] == best
    assert is_better(0.5, math.nan, best_is)
