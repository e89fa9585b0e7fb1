"""A sweep's file: everything in wandb's format is read, and what is wrong is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given as drawn
from hypothesis import strategies as st

from echelon.config.untrusted import describe_unsafe_value
from echelon.errors import EchelonError
from echelon.sweep import located_yaml
from echelon.sweep.search_space import DISTRIBUTIONS
from echelon.sweep.sweep_file import SweepFile, parse_sweep
from echelon.sweep.trial_command import (
    expand_macros,
    format_override_value,
    format_overrides,
    resolve_target,
)

HEAD = "method: random\nmetric: {name: eval/loss}\nrun_cap: 3\nparameters:\n"


def read(text: str) -> SweepFile:
    return parse_sweep(located_yaml.parse_yaml(text, Path("s.yml")))


def faults(text: str) -> list[str]:
    with pytest.raises(EchelonError) as raised:
        read(text)
    return [fault.what for fault in raised.value.faults]


def test_the_whole_format() -> None:
    file = read("""\
program: train.py
name: my sweep
description: words
project: p
entity: me
method: bayes
metric: {name: eval/rmse, goal: maximize, target: 0.9}
run_cap: 7
command: ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
early_terminate: {type: hyperband, max_iter: 27, s: 2, eta: 3}
parameters:
  a: {value: x}
  b: {values: [1, 2.5, null, true, [3, 4]]}
  c: {values: [p, q], probabilities: [0.25, 0.75]}
  d: {min: 1, max: 8}
  e: {min: 1, max: 8.0}
  f: {distribution: q_normal, mu: 3}
  trainer:
    parameters:
      clip: {min: 0.0, max: 1}
      evaluate: {parameters: {steps: {values: [1, 2]}}}
""")
    kinds = {name: p.distribution for name, p in file.parameters.items()}
    assert kinds == {
        "a": "constant",
        "b": "categorical",
        "c": "categorical_w_probabilities",
        "d": "int_uniform",  # two integers
        "e": "uniform",
        "f": "q_normal",
        "trainer.clip": "uniform",
        "trainer.evaluate.steps": "categorical",
    }
    assert file.constant_values == {"a": "x"}
    assert file.parameters["f"].q == 1.0
    assert file.early_terminate is not None
    assert file.early_terminate.bands == (3, 9)
    assert file.metric is not None
    assert (file.metric.goal, file.metric.target) == ("maximize", 0.9)
    assert (file.program, file.name, file.run_cap) == ("train.py", "my sweep", 7)


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_every_distribution_is_read(name: str) -> None:
    given_keys = {
        "value": "1",
        "values": "[1, 2]",
        "probabilities": "[0.5, 0.5]",
        **{"min": "1", "max": "2", "mu": "0", "sigma": "1", "a": "2", "b": "3", "q": "1"},
    }
    keys = ", ".join(f"{key}: {given_keys[key]}" for key in DISTRIBUTIONS[name])
    file = read(f"{HEAD}  x: {{distribution: {name}, {keys}}}\n")
    assert file.parameters["x"].distribution == name


def test_numbers_that_yaml_takes_for_text_are_numbers_with_a_note() -> None:
    file = read(HEAD + "  lr: {min: 1e-4, max: 2E-1}\n  s: {values: ['1e-4', e4]}\n")
    lr = file.parameters["lr"]
    assert (lr.min, lr.max, lr.distribution) == (0.0001, 0.2, "uniform")
    assert file.parameters["s"].values == ("1e-4", "e4")  # in quotes it is meant so
    assert file.notes[0] == "s.yml:5: 1e-4 is read as the number 0.0001"
    assert file.data["parameters"]["lr"]["min"] == 0.0001


def test_bands() -> None:
    def bands(text: str) -> tuple[int, ...]:
        file = read(f"{HEAD}  x: {{value: 1}}\nearly_terminate: {{type: hyperband, {text}}}\n")
        assert file.early_terminate is not None
        return file.early_terminate.bands

    assert bands("min_iter: 2, eta: 2")[:4] == (2, 4, 8, 16)
    assert bands("min_iter: 1")[:3] == (1, 3, 9)
    assert bands("max_iter: 27, s: 9") == (1, 3, 9)  # never below one evaluation


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("  x: {min: 3, max: 1}\n", "s.yml:5: x has min=3 > max=1"),
        ("  x: {distribution: unifrom, min: 0, max: 1}\n", "unknown distribution 'unifrom'"),
        ("  x: {min: 1}\n", "neither value, values, min and max, nor a distribution"),
        ("  x: {mim: 1, max: 2}\n", "x has no 'mim'"),
        ("  x: {distribution: normal, min: 0}\n", "is normal, which has no 'min'"),
        ("  x: {distribution: log_uniform_values, min: 0, max: 1}\n", "with min=0"),
        ("  x: {distribution: log_uniform, min: 1, max: 1000}\n", "exponents of e"),
        ("  x: {distribution: uniform, min: a, max: 1}\n", "x.min is 'a', not a number"),
        ("  x: {distribution: int_uniform, min: 0.5, max: 1}\n", "int_uniform between"),
        ("  x: {distribution: normal, sigma: -1}\n", "x.sigma=-1"),
        ("  x: {values: []}\n", "x.values is []"),
        ("  x: {values: [1, 2], probabilities: [1]}\n", "x has 2 values"),
        ("  x: {values: [1, 2], probabilities: [1, 1]}\n", "do not add up to 1"),
        ("  x: {value: '${oc.env:HOME}'}\n", "an interpolation"),
        ("  x: {value: {_target_: os.system}}\n", "not a plain value"),
        ("  x: {value: !!python/name:os.system ''}\n", "not YAML"),
        ("  x: 3\n", "x is 3, not a mapping"),
        ("  'a b': {value: 1}\n", "'a b' is not a name of a parameter"),
        ("  a: {value: 1}\n  a: {value: 2}\n", "s.yml:6: not YAML: 'a' is here twice"),
        ("  a.b: {value: 1}\n  a: {parameters: {b: {value: 2}}}\n", "a.b is there twice"),
        ("  x: {value: 1}\nscheduler: {engine: ax}\n", "s.yml:6: 'scheduler' is not supported"),
        ("  x: {value: 1}\nmetrics: []\n", "'metrics' is not supported"),
        ("  x: {value: 1}\nrun_kap: 3\n", "a sweep has no 'run_kap'"),
        ("  x: {value: 1}\nearly_terminate: {type: median}\n", "of type 'median'"),
        ("  x: {value: 1}\nearly_terminate: {type: hyperband}\n", "leave no band"),
        ("  x: {value: 1}\nearly_terminate: {type: hyperband, min_iter: 1, eta: 1}\n", "eta is 1"),
        ("  x: [\n", "s.yml:6: not YAML"),
        ("", "parameters are a mapping of names, not None"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    assert any(says in what for what in faults(HEAD + text)), faults(HEAD + text)


def test_what_is_no_sweep_at_all() -> None:
    for text, says in (("", "s.yml is empty"), ("[1]", "a sweep is a mapping"), ("hi", "mapping")):
        assert says in faults(text)[0]


def test_all_faults_come_at_once() -> None:
    told = faults("method: magic\nparameters:\n  x: {min: 2, max: 1}\n  y: 1\nrun_cap: 0\n")
    assert len(told) == 4


def test_a_grid_needs_an_end() -> None:
    text = "method: grid\nparameters:\n  x: {min: 0.0, max: 1.0}\n  q: {distribution: q_uniform, "
    told = faults(text + "min: 0, max: 1, q: 0.25}\n")
    assert told == ["s.yml:3: x is uniform, which has no grid"]


def test_a_search_by_results_needs_a_metric() -> None:
    assert "needs a metric" in faults("method: bayes\nparameters: {x: {values: [1, 2]}}\n")[0]


# --- parameters as overrides ---

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(
        st.characters(blacklist_categories=("Cs", "Cc", "Cf", "Zl", "Zp", "Co", "Cn", "Zs"))
        | st.just(" ")
    ).filter(lambda text: not describe_unsafe_value(text)),
)


@drawn(PLAIN | st.lists(PLAIN, max_size=4))
def test_a_value_comes_back_as_it_was(value: object) -> None:
    read_back = OverridesParser.create().parse_override(f"k={format_override_value(value)}").value()
    plain = [_plain(v) for v in read_back] if isinstance(read_back, list) else _plain(read_back)
    assert plain == value
    assert type(plain) is type(value)


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model._target_", "os.system", "not the name of a setting"),
        ("lr", "${oc.env:WANDB_API_KEY}", "an interpolation"),
        ("lr", "x" * 10_000_000, "10,000,000 characters"),
        ("lr", "a\x1b[2J", "not text"),
        ("launch.ssh", "sh -c evil", "which it may not"),
        ("experiment", "/tmp/x.py:f", "which it may not"),
        ("trainer.save.steps", 1, "which it may not"),
    ],
)
def test_what_a_file_may_not_set_is_what_a_server_may_not(
    key: str, value: object, says: str
) -> None:
    """The rest of it: test_swept.py."""
    with pytest.raises(EchelonError, match=says) as raised:
        format_overrides({key: value})
    assert len(str(raised.value)) < 400


# --- programs of another kind ---


def test_macros() -> None:
    values = {"lr": 0.1, "flag": True, "off": False, "name": "a b"}
    assert expand_macros(["prog", "${args}"], values)[1:] == [
        *("--lr=0.1", "--flag=True", "--off=False", "--name=a b")
    ]
    assert expand_macros(["${args_no_hyphens}"], values)[0] == "lr=0.1"
    assert expand_macros(["${args_no_boolean_flags}"], values) == [
        "--lr=0.1",
        "--flag",
        "--name=a b",
    ]
    assert expand_macros(["${args_json}"], {"a": [1]}) == ['{"a": [1]}']
    assert expand_macros(["${env}", "x"], {}) == ["x"]


def test_variables_are_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "there")
    assert expand_macros(["--to=${envvar:WHERE}/x"], {}) == ["--to=there/x"]


def test_a_file_that_calls_main_is_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import echelon\necholon = 1\nechelon.main(make_it)\n")
    (tmp_path / "other.py").write_text("print(1)\n")
    text = HEAD + "  x: {value: 1}\nprogram: %s\n"
    mine = parse_sweep(located_yaml.parse_yaml(text % "mine.py", tmp_path / "s.yml"))
    assert resolve_target(mine, ["a=1"]).overrides == [
        f"experiment={tmp_path}/mine.py:make_it",
        "a=1",
    ]
    other = parse_sweep(located_yaml.parse_yaml(text % "other.py", tmp_path / "s.yml"))
    assert resolve_target(other, []).program == ["${env}", "${interpreter}", "other.py", "${args}"]
    assert resolve_target(other, ["experiment=toy"]).program == []


def test_an_unknown_macro_is_refused() -> None:
    file = read(HEAD + "  x: {value: 1}\ncommand: [prog, '${argz}']\n")
    with pytest.raises(EchelonError, match="unknown macro"):
        resolve_target(file, [])
