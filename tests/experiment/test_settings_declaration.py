"""What an experiment function declares as its settings, and the object it receives them in."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from echelon.errors import EchelonError
from echelon.experiment.settings_declaration import (
    UndeclaredSettings,
    build_settings,
    describe_experiment,
)

Load = Callable[..., Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Writes files and returns the function `experiment` of the first, as a user's would be."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write_and_load(text: str, **neighbours: str) -> Any:
        for name, content in {"settings_main": text, **neighbours}.items():
            (tmp_path / f"{name}.py").write_text(dedent(content))
        spec = importlib.util.spec_from_file_location(
            "settings_main", tmp_path / "settings_main.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["settings_main"] = module
        spec.loader.exec_module(module)
        return module.experiment

    yield write_and_load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


NESTED = """
    from __future__ import annotations
    from dataclasses import dataclass, field
    from enum import Enum
    from pathlib import Path
    from typing import Literal

    class Kind(Enum):
        ADAM = 1
        SGD = 2

    @dataclass
    class Optimizer:
        kind: Kind = Kind.ADAM
        betas: tuple[float, float] = (0.9, 0.99)

    @dataclass
    class Settings:
        optimizer: Optimizer = field(default_factory=Optimizer)
        folder: Path | None = None
        reduction: Literal["mean", "sum"] = "mean"

    def experiment(cfg: Settings):
        return cfg
"""


def test_nested_settings_arrive_as_their_classes(load: Load) -> None:
    experiment = load(NESTED)
    module = sys.modules["settings_main"]
    stored = {"optimizer": {"kind": "SGD", "betas": [0.5, 1]}, "folder": "a"}
    assert build_settings(experiment, stored) == module.Settings(
        module.Optimizer(module.Kind.SGD, (0.5, 1.0)), Path("a")
    )
    assert describe_experiment("m.py:experiment", experiment).settings is module.Settings


def test_a_class_that_has_changed_since_the_run_was_made(load: Load) -> None:
    with pytest.raises(EchelonError) as wrong:
        build_settings(load(NESTED), {"optimizer": {"knd": "SGD"}, "reduction": "max"})
    assert [fault.what for fault in wrong.value.faults] == [
        "optimizer.knd of this run: there is no such setting",
        "reduction of this run: not one of mean, sum",
    ]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("return cfg.lr + cfg.net.width", {"lr", "net"}),
        ("return getattr(cfg, 'lr', 0.1), hasattr(cfg, 'deep')", {"lr", "deep"}),
        ("return [cfg.lr for _ in range(3)], lambda: cfg.late", {"lr", "late"}),
        ("if cfg.a:\n        return cfg.b", {"a", "b"}),
        ("return 1", set()),
    ],
)
def test_settings_that_stay_in_the_function_are_known_exactly(
    body: str, names: set[str], load: Load
) -> None:
    own = describe_experiment("m.py:fn", load(f"def experiment(cfg):\n    {body}\n"))
    assert (own.names, own.has_exact_names) == (frozenset(names), True)


def test_settings_of_a_mapping(load: Load) -> None:
    text = """
        from typing import Any

        def experiment(cfg: dict[str, Any]):
            assert "deep" not in cfg
            return cfg["lr"], cfg.get("width", 3)
    """
    experiment = load(text)
    own = describe_experiment("m.py:fn", experiment)
    assert (own.names, own.has_exact_names) == (frozenset({"lr", "width", "deep"}), True)
    assert experiment(build_settings(experiment, {"lr": 1})) == (1, 3)


def test_settings_that_are_passed_on_may_be_any_word_of_ones_own_files(load: Load) -> None:
    text = """
        import json
        import settings_helper

        def experiment(cfg):
            from settings_late import finish
            return finish(settings_helper.build(cfg), **vars(cfg))
    """
    own = describe_experiment(
        "m.py:fn",
        load(
            text,
            settings_helper="def build(cfg):\n    return cfg.rate\n",
            settings_late="def finish(model, depth=3):\n    return model\n",
        ),
    )
    assert own.names is not None
    assert {"rate", "depth"} <= own.names
    assert "raet" not in own.names
    assert "JSONDecodeError" not in own.names, "which is Python's own"
    assert not own.has_exact_names


def test_a_function_without_parameters_has_no_settings(load: Load) -> None:
    own = describe_experiment("m.py:fn", load("def experiment(devices):\n    return devices\n"))
    assert (own.names, own.has_exact_names) == (frozenset(), True)


def test_a_function_without_a_source_takes_any_setting() -> None:
    space: dict[str, Any] = {}
    exec("def experiment(cfg): return cfg.lr", space)
    assert describe_experiment("m.py:fn", space["experiment"]).names is None


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("width=4", "experiment takes width=4, but all settings come as one object"),
        ("width: int = 4", "experiment takes width: int = 4, but all settings come as one object"),
        ("**settings", "experiment takes **settings, but all settings come as one object"),
        ("cfg: Plain", "experiment takes cfg: Plain, which is not a dataclass"),
        ("cfg: 'Nowhere'", "experiment takes cfg: Nowhere, which cannot be resolved"),
    ],
)
def test_declarations_that_nothing_could_be_given_to(signature: str, said: str, load: Load) -> None:
    text = f"class Plain:\n    lr: float = 0.1\n\ndef experiment({signature}):\n    return 1\n"
    experiment = load(text)
    with pytest.raises(EchelonError) as wrong:
        describe_experiment("m.py:fn", experiment)
    [fault] = wrong.value.faults
    assert fault.what.startswith(said)
    assert fault.do


def test_a_setting_that_nobody_gave_is_a_sentence() -> None:
    cfg = UndeclaredSettings(lr=1)
    assert (cfg.lr, getattr(cfg, "width", 3), hasattr(cfg, "width")) == (1, 3, False)
    assert copy.deepcopy(cfg) == cfg
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    with pytest.raises(EchelonError, match="reads the setting 'width', which has no value"):
        cfg.width  # noqa: B018
