"""Composed once: values where they belong, and every mistake told at once with the nearest name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from echelon.config.compose import UserExperiment, compose, recompose
from echelon.config.hydra_files import BUNDLED_CONF_DIR
from echelon.config.schema import Config, build_config, find_differences
from echelon.errors import EchelonError
from echelon.runs.create import create_run
from echelon.runs.find import find_run


@dataclass
class Settings:
    lr: float = 0.1
    layers: int = 2
    name: str = "plain"
    bias: bool = True
    warm: float | None = None
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    extra: dict[str, Any] = field(default_factory=dict)


TYPED = UserExperiment("/tmp/mine.py:experiment", Settings)
FREE = UserExperiment("/tmp/mine.py:experiment", None)


def list_faults(
    words: Sequence[str], own: UserExperiment | None = None, conf: Path | None = None
) -> dict[str, str]:
    """What is wrong, and the hint to each."""
    with pytest.raises(EchelonError) as caught:
        compose(words, own, conf)
    return {fault.what: fault.do for fault in caught.value.faults}


# --- values -------------------------------------------------------------------------------------


def test_the_defaults_are_the_toy_and_the_schema() -> None:
    config = compose([])
    assert config.experiment["entry"] == "echelon.recipes.toy:experiment"
    assert config.experiment_settings["lr"] == 0.05
    assert (config.trainer, config.launch, config.track) == (
        Config().trainer,
        Config().launch,
        Config().track,
    )


def test_overrides_by_full_and_by_bare_name() -> None:
    config = compose(["lr=0.2", "experiment.hidden=3", "trainer.batch_size=8", "seed=7"])
    assert config.experiment_settings["lr"] == 0.2
    assert config.experiment_settings["hidden"] == 3
    assert config.trainer.batch_size == 8
    assert config.seed == 7


def test_the_last_of_two_overrides_wins() -> None:
    assert compose(["lr=0.2", "lr=0.3"]).experiment_settings["lr"] == 0.3


def test_null_and_nested_values() -> None:
    config = compose(["trainer.save.epochs=null", "trainer.save.steps=5", "trainer.clip=1"])
    assert (config.trainer.save.epochs, config.trainer.save.steps) == (None, 5)
    assert config.trainer.clip == 1.0
    assert type(config.trainer.clip) is float


def test_a_group_is_chosen_and_its_values_too() -> None:
    config = compose(["launch=local", "launch.procs=3", "trainer.batch_size=9"])
    assert (config.launch.kind, config.launch.procs) == ("local", 3)


def test_manual_ranks_are_top_level_keys() -> None:
    config = compose(["rank=1", "world_size=4", "master=node1:29501"])
    assert (config.rank, config.world_size, config.master) == (1, 4, "node1:29501")


def test_a_yaml_file_gives_types_by_its_values() -> None:
    [what] = list_faults(["lr=fast"])
    assert what.startswith("lr=fast: ")
    assert compose(["lr=1"]).experiment_settings["lr"] == 1.0


# --- a user's experiment ------------------------------------------------------------------------


def test_declared_settings_are_typed() -> None:
    words = ["lr=1", "layers=3", "bias=false", "warm=0.5", "sizes=[4,5]", "extra.a=1"]
    config = compose(words, TYPED)
    assert config.experiment == {
        "entry": TYPED.entry,
        "lr": 1.0,
        "layers": 3,
        "name": "plain",
        "bias": False,
        "warm": 0.5,
        "sizes": [4, 5],
        "extra": {"a": 1},
    }
    assert config.experiment_settings.keys() == config.experiment.keys() - {"entry"}


def test_declared_settings_refuse_other_names_and_types() -> None:
    found = list_faults(["layer=3", "layers=many", "bias=7"], TYPED)
    assert len(found) == 3
    assert found["layer=3: there is no such setting"].startswith("did you mean 'layers'?")
    assert any(what.startswith("layers=many: ") for what in found)
    assert any(what.startswith("bias=7: ") for what in found)


def test_a_plus_does_not_add_undeclared_settings() -> None:
    """Hydra's +key adds what nobody declared; the experiment's dataclass would refuse it later."""
    config = compose(["+trainer.batch_size=4"], TYPED)
    assert config.trainer.batch_size == 4
    assert "+trainer.batch_sise=4: there is no such setting" in {
        f"+{what}" for what in list_faults(["+trainer.batch_sise=4"], TYPED)
    }


def test_settings_of_an_experiment_whose_source_is_not_known() -> None:
    config = compose(["lr=0.3", "anything=text", "deep.er=2", "listed=[1,a]"], FREE)
    assert config.experiment_settings == {
        "lr": 0.3,
        "anything": "text",
        "deep": {"er": 2},
        "listed": [1, "a"],
    }
    found = list_faults(["trainer.batchsize=3", "free=1"], FREE)
    assert list(found) == ["trainer.batchsize=3: there is no such setting"]


def test_without_a_class_a_setting_is_what_the_code_reads(tmp_path: Path) -> None:
    reads = UserExperiment("/tmp/mine.py:experiment", None, frozenset({"lr", "deep"}))
    config = compose(["lr=fast", "deep.er=2", "+extra=1"], reads)
    assert config.experiment_settings == {"lr": "fast", "deep": {"er": 2}, "extra": 1}
    assert list_faults(["lrr=0.1"], reads) == {
        "lrr=0.1: there is no such setting": "did you mean 'lr'? +lrr=0.1 passes it to the "
        "experiment all the same"
    }
    conf = _write_conf(
        tmp_path, {"config.yaml": "defaults: [echelon, _self_]\nexperiment: {depth: 3}\n"}
    )
    assert compose(["depth=4"], reads, conf).experiment_settings == {"depth": 4}


@dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass
class NestedSettings:
    optimizer: Optimizer = field(default_factory=Optimizer)
    layers: list[Optimizer] = field(default_factory=list)
    reduction: Literal["mean", "sum"] = "mean"
    folder: Path | None = None


NESTED = UserExperiment("/tmp/mine.py:experiment", NestedSettings)


def test_nested_settings_are_checked_at_any_depth(tmp_path: Path) -> None:
    words = ["optimizer.lr=1", "optimizer.betas=[1,2]", "layers=[{lr: 2}]", "folder=a/b"]
    config = compose(words, NESTED)
    assert config.experiment_settings == {
        "optimizer": {"lr": 1.0, "betas": [1.0, 2.0]},
        "layers": [{"lr": 2.0, "betas": [0.9, 0.99]}],
        "reduction": "mean",
        "folder": "a/b",
    }
    assert recompose(config, ["optimizer.lr=3"], "b", tmp_path, NESTED).experiment_settings[
        "optimizer"
    ] == {"lr": 3.0, "betas": [1.0, 2.0]}
    found = list_faults(
        ["optimizer.lrr=1", "layers=[{lrr: 2}]", "reduction=men", "optimizer=fast", "lr.a=1"],
        NESTED,
    )
    assert list(found) == [
        "lr.a=1: there is no such setting",
        "optimizer=fast: a group of settings, not one value",
        "layers=[{'lrr': 2}]: layers[0].lrr: there is no such setting",
        "reduction=men: not one of mean, sum",
    ]
    assert "conf/optimizer/fast.yaml" in found["optimizer=fast: a group of settings, not one value"]
    [hint] = list_faults(["optimizer.lrr=1"], NESTED).values()
    assert hint.startswith("did you mean 'optimizer.lr'? also like it: optimizer.betas")


@dataclass
class Sgd:
    momentum: float = 0.0


def test_a_setting_of_another_class_than_the_chosen_one() -> None:
    fields: list[Any] = [("optimizer", Optimizer | Sgd, field(default_factory=Sgd))]
    own = UserExperiment("/tmp/mine.py:experiment", make_dataclass("Either", fields))
    config = compose(["optimizer.class=Optimizer", "optimizer.lr=3"], own)
    assert config.experiment_settings["optimizer"] == {
        "class": "Optimizer",
        "lr": 3.0,
        "betas": [0.9, 0.99],
    }
    hint = "it is a setting of Optimizer: write optimizer.class=Optimizer too"
    assert list_faults(["optimizer.lr=3", "optimizer.class=Sgd"], own) == {
        "optimizer.lr=3: there is no such setting of the class that is chosen": hint
    }
    assert list(list_faults(["optimizer={lr: 3}"], own).values()) == [hint]
    assert list(list_faults(["optimizer=optimiser"], own).values()) == [
        "write optimizer.class=Optimizer; known: Optimizer, Sgd"
    ]


def test_settings_without_a_default_are_asked_for_together() -> None:
    settings = make_dataclass("Needy", [("width", int), ("depth", int)])
    found = list_faults(["width=x", "lrr=1"], UserExperiment("/tmp/mine.py:experiment", settings))
    assert list(found) == [
        "lrr=1: there is no such setting",
        "width=x: not a whole number",
        "depth has no value: Needy declares no default",
    ]
    assert found["depth has no value: Needy declares no default"] == "give one: depth=VALUE"


@pytest.mark.parametrize("name", ["seed", "trainer", "run", "mode", "entry"])
def test_a_setting_with_the_name_of_one_of_ours_is_named(name: str) -> None:
    declared = UserExperiment("/tmp/mine.py:fn", make_dataclass("Own", [(name, int, 3)]))
    read = UserExperiment("/tmp/mine.py:fn", None, frozenset({name, "lr"}), has_exact_names=True)
    words = UserExperiment("/tmp/mine.py:fn", None, frozenset({name, "lr"}))
    for own, start in ((declared, "Own declares"), (read, "fn reads")):
        [(what, do)] = list_faults([], own).items()
        assert what.startswith(f"{start} a setting {name!r}, but {name} is a setting of Echelon")
        assert do.startswith("rename yours, for example to ")
    assert compose([], words).experiment_settings == {}, "such words may mean anything"


def test_a_word_for_a_group_that_does_not_exist() -> None:
    [(what, do)] = list_faults(["model=huge"], TYPED).items()
    assert what == "model=huge: there is no such setting, and no config group 'model'"
    assert do.endswith("write conf/model/huge.yaml beside your experiment")


# --- all faults together ------------------------------------------------------------------------


def test_every_fault_is_reported_in_one_go() -> None:
    words = [
        "lrr=0.1",
        "trainer.batch_size=big",
        "launch=slrum",
        "track.progress=bars",
        "run.name=../up",
        "trainer.accumulate=0",
        "rank=1",
        "lr=1,2",
        "=",
        "trainer.save.minutes=-1",
    ]
    found = list_faults(words)
    starts = [
        "'=' is not an override",
        "'lr=1,2' has several values",
        "launch=slrum: there is no such launch",
        "lrr=0.1: there is no such setting",
        "trainer.batch_size=big: ",
        "trainer.accumulate=0 is below 1",
        "trainer.save.minutes=-1.0 is not above 0",
        "track.progress=bars: there is no such choice",
        "run.name='../up' is not a valid name for a run",
        "rank=1 is set without world_size",
    ]
    for start in starts:
        assert [what for what in found if what.startswith(start)], (start, list(found))
    assert len(found) == len(starts)
    assert all(found.values()), "each with what to do"


@pytest.mark.parametrize(
    ("word", "instead"),
    [("replica.blocks=Block", "[Block]"), ("launch.hosts=null", "[]"), ("launch.carry=3", "[3]")],
)
def test_a_list_needs_brackets(word: str, instead: str) -> None:
    with pytest.raises(EchelonError) as wrong:
        compose([word])
    [fault] = wrong.value.faults
    assert fault.what == f"{word}: not a list"
    assert fault.do == f"write '{word.partition('=')[0]}={instead}'"


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("trainer.batchsize=8", "trainer.batch_size"),
        ("batch_size=8", "trainer.batch_size"),
        ("trainer.epoch=1", "trainer.epochs"),
        ("hiden=3", "hidden"),
        ("experiment.hiden=3", "hidden"),
        ("launch=locl", "local"),
        ("experiment=toi", "toy"),
        ("trainer.schedule=cosin", "cosine"),
        ("sead=3", "seed"),
        ("trainer.precision=BF16", "bf16"),
        ("trainer.precision=fp32", "float32"),
        ("trainer.precision=bfloat16", "bf16"),
    ],
)
def test_the_nearest_name_comes_first(word: str, nearest: str) -> None:
    [hint] = list_faults([word]).values()
    assert hint.startswith(f"did you mean {nearest!r}?")


@pytest.mark.parametrize("word", ["lr=1,2", "lr=range(1,3)", "launch=inline,local", "seed=glob(*)"])
def test_sweeps_are_refused(word: str) -> None:
    [(what, do)] = list_faults([word]).items()
    assert what == f"{word!r} has several values, but one run has one"
    assert do == "give a single value"


def test_deleting_a_setting_is_refused() -> None:
    assert list_faults(["~lr"]) == {"~lr deletes a setting": "set it to null: lr=null"}


def test_a_section_is_not_a_value() -> None:
    assert list_faults(["trainer.save=5"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trainer.batch_size=2", "launch=local", "launch.procs=3"], "smaller than the world of 3"),
        (["trainer.batch_size=2", "rank=0", "world_size=3"], "smaller than the world of 3"),
        (["launch.procs=2"], "launch=inline is this one process"),
        (["launch=local", "rank=0", "world_size=2"], "starts one process by hand"),
        (["launch=local", "launch.spares=1"], "launch=local is one machine"),
        (["launch.min_nodes=1"], "launch=inline is one machine"),
        (["launch=slurm", "launch.nodes=2", "launch.min_nodes=3"], "more than the 2 nodes"),
        (["launch=slurm", "launch.spares=1", "launch.max_replacements=0"], "are never replaced"),
        (["launch=slurm", "launch.spares=1", "replica.devices=2"], "are never replaced"),
        (["launch=ssh", "launch.hosts=[a,b]", "launch.spares=2"], "of 2 nodes leaves none"),
        (["launch=local", "launch.silence_s=1"], "launch.silence_s=1.0 is below 5"),
        (["rank=4", "world_size=4"], "rank=4 is outside of a world of 4"),
        (["world_size=4"], "world_size=4 is set without rank"),
        (["master=a:1"], "master=a:1 is set without rank and world_size"),
        (["trainer.epochs=null"], "trainer.epochs and trainer.steps are both null"),
        (["trainer.clip=0"], "trainer.clip=0.0 is not above 0"),
        (["launch.slow_factor=1"], "launch.slow_factor=1.0 is not above 1"),
        (["launch.slow_s=-1"], "launch.slow_s=-1.0 is below 0"),
        (["seed=-1"], "seed=-1 is below 0"),
        (["replica.devices=0"], "replica.devices=0 is below 1"),
        (["replica.blocks=[A,B]"], "replica.blocks=[A,B] names the layers to shard or to"),
        (["replica.devices=2", "replica.kind=fsdp"], "replica.kind=fsdp shards layers"),
        (["replica.devices=2", "replica.shards=4"], "replica.shards=4 shards layers"),
        (["replica.shards=0"], "replica.shards=0 is below 1"),
        (["replica.kind=fsdp", "replica.shards=1"], "replica.shards=1 shards nothing"),
        (["replica.shards=2", "trainer.ema=0.9"], "replica.shards=2 keeps shards"),
        (
            ["replica.kind=fsdp", "trainer.unused_parameters=true", "trainer.accumulate=2"],
            "trainer.unused_parameters=true and trainer.accumulate=2",
        ),
        (["replica.devices=2", "launch.share_devices=true"], "puts several processes on one"),
        (["replica.devices=2", "trainer.capture=always"], "trainer.capture=always needs one"),
        (
            ["replica.devices=2", "launch=slurm", "launch.gpus_per_node=5"],
            "launch.gpus_per_node=5 does not divide by replica.devices=2",
        ),
        (
            ["replica.devices=2", "launch=slurm", "launch.gpus_per_node=4", "launch.procs=3"],
            "launch.procs=3 with replica.devices=2 take 6 devices, but launch.gpus_per_node=4",
        ),
    ],
)
def test_settings_that_contradict_each_other(words: list[str], part: str) -> None:
    [what] = list_faults(words)
    assert part in what


def test_snapshots_go_to_object_stores_and_run_folders_do_not() -> None:
    found = list_faults(
        ["run.dir=s3://bucket/x", "trainer.mirror=/data/x", "trainer.resume=https://host/x"]
    )
    assert list(found) == [
        "run.dir=s3://bucket/x is not on a file system, which the locks, heartbeats and logs of a "
        "run need",
        "trainer.mirror=/data/x is not the address of an object store",
        "trainer.resume=https://host/x is not the address of an object store",
    ]
    assert "trainer.mirror=s3://bucket/x" in next(iter(found.values()))
    assert "secret" not in str(list_faults(["trainer.mirror=s3://key:secret@bucket/x"]))
    compose(["trainer.mirror=gs://bucket/x", "trainer.resume=s3://bucket/x/run/best"])


def test_unused_gpus_are_allowed_if_procs_is_set() -> None:
    words = ["replica.devices=2", "launch=slurm", "launch.gpus_per_node=5", "launch.procs=2"]
    assert compose(words, TYPED).launch.procs == 2


def _fault_texts(words: list[str]) -> str:
    try:
        return json.dumps(compose(words, TYPED).to_dict())
    except EchelonError as error:
        return str(error)


def test_interpolation_of_environment_variables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values from outside are plain data: an interpolation is not resolved into the config."""
    monkeypatch.setenv("CANARY_KEY", "tweet")
    assert "tweet" not in _fault_texts(["name='${oc.env:CANARY_KEY}'"])


# --- files of the user's ------------------------------------------------------------------------


def _write_conf(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_conf_folder_beside_the_file(tmp_path: Path) -> None:
    conf = _write_conf(
        tmp_path,
        {
            "config.yaml": "defaults: [echelon, _self_]\n"
            "experiment: {lr: 0.7}\ntrainer: {epochs: 9}\nseed: 3\n",
            "launch/mine.yaml": "kind: local\nprocs: 2\n",
            "trainer/long.yaml": "epochs: 100\nbatch_size: 64\n",
        },
    )
    config = compose([], TYPED, conf)
    assert (config.experiment_settings["lr"], config.experiment_settings["layers"]) == (0.7, 2)
    assert (config.trainer.epochs, config.seed, config.launch.kind) == (9, 3, "inline")
    chosen = compose(["launch=mine", "trainer=long", "lr=0.1"], TYPED, conf)
    assert (chosen.launch.kind, chosen.launch.procs) == ("local", 2)
    assert chosen.trainer.batch_size == 64
    assert chosen.experiment_settings["lr"] == 0.1
    assert compose(["launch=local"], TYPED, conf).launch.kind == "local", "ours are there too"


def test_faults_in_a_users_files_are_reported_with_the_others(tmp_path: Path) -> None:
    conf = _write_conf(
        tmp_path,
        {
            "config.yaml": "defaults: [echelon, _self_]\n"
            "experiment: {lrr: 1}\ntrainer: {epochs: x}\n"
        },
    )
    found = list_faults(["layers=many", "launch=mine"], TYPED, conf)
    assert len(found) == 4
    starts = (
        "experiment.lrr in the configuration files: there is no such setting",
        "trainer.epochs in the configuration files: ",
        "layers=many: ",
        "launch=mine: there is no such launch",
    )
    for start in starts:
        assert [what for what in found if what.startswith(start)], (start, list(found))


@pytest.mark.parametrize(
    ("files", "words", "what", "do"),
    [
        (
            {"config.yaml": "experiment: {lr: 0.7}\n"},
            [],
            "config.yaml has no line `defaults`",
            "begin it with:  defaults: [echelon, _self_]",
        ),
        ({"config.yaml": ""}, [], "config.yaml has no line `defaults`", "begin it with"),
        (
            {"config.yaml": "defaults: [echelon, {launch: nowhere}]\n"},
            [],
            "config.yaml names launch/nowhere in its defaults, but there is no such file",
            "launch/nowhere.yaml, or choose another; known: env, inline, k8s, local, slurm, ssh",
        ),
        (
            {"config.yaml": "defaults: [echelon, {model: huge}]\n", "model/small.yaml": "a: 1\n"},
            [],
            "config.yaml names model/huge in its defaults, but there is no such file",
            "model/huge.yaml, or choose another; known: small",
        ),
        (
            {"config.yaml": "defaults: [echelon]\n", "model/small.yaml": "a: 1\n"},
            ["model=small"],
            "config.yaml does not list model in its defaults",
            "add `- model: small` there, or type +model=small",
        ),
        (
            {"config.yaml": "defaults: [echelon]\n", "model/small.yaml": "a: 1\n"},
            ["model=huge"],
            "model=huge: there is no such model",
            "known: small",
        ),
        ({"config.yaml": "defaults: [echelon]\na: [\n"}, [], "config.yaml:3 cannot be", "fix that"),
    ],
)
def test_a_file_that_does_not_compose_is_named(
    files: dict[str, str], words: list[str], what: str, do: str, tmp_path: Path
) -> None:
    [(found, hint)] = list_faults(words, TYPED, _write_conf(tmp_path, files)).items()
    assert what in found
    assert do in hint
    assert "\n" not in found


def test_interpolations_of_files_refer_to_what_was_typed(tmp_path: Path) -> None:
    conf = _write_conf(
        tmp_path,
        {
            "config.yaml": "defaults: [echelon, _self_]\nexperiment:\n  lr: ${trainer.clip}\n"
            "  sizes: ['${seed}', 2]\n  name: ${.layers}\n"
        },
    )
    settings = compose(["trainer.clip=2", "seed=5", "layers=9"], TYPED, conf).experiment_settings
    assert (settings["lr"], settings["sizes"], settings["name"]) == (2.0, [5, 2], "9")
    assert compose(["lr=1", "name=a"], TYPED, conf).experiment_settings["lr"] == 1.0
    text = "defaults: [echelon, _self_]\nexperiment: {lr: '${nothing}'}\n"
    [what] = list_faults([], TYPED, _write_conf(tmp_path / "other", {"config.yaml": text}))
    assert what.startswith("experiment.lr in the configuration files: Interpolation key 'nothing'")


def test_hydras_global_state_is_restored() -> None:
    with initialize_config_dir(str(BUNDLED_CONF_DIR), version_base="1.3"):
        before = GlobalHydra.instance().hydra
        compose([])
        assert GlobalHydra.instance().hydra is before


# --- kept and composed again --------------------------------------------------------------------


def test_the_resolved_configuration_is_saved(tmp_path: Path) -> None:
    config = compose([f"run.dir={tmp_path}", "run.name=a", "lr=0.3", "trainer.clip=2"])
    run = create_run(config)
    assert run.read_config() == config
    assert json.loads(run.config_file.read_text())["experiment"]["lr"] == 0.3
    assert find_run("a", str(tmp_path)).read_config() == config
    assert find_run("latest", str(tmp_path)).folder == run.folder


def test_a_config_written_by_a_later_version_is_read() -> None:
    data = compose([]).to_dict()
    data["later"] = 1
    data["trainer"]["later"] = 2
    assert build_config(data) == compose([])


def test_recompose_changes_a_few_values_of_an_old_run(tmp_path: Path) -> None:
    old = compose(["lr=0.3", "rank=1", "world_size=2", "master=a:1", "trainer.epochs=3"], TYPED)
    new = recompose(old, ["trainer.epochs=9", "layers=5"], name="b", folder=tmp_path)
    changed = find_differences(_flatten(old), _flatten(new))
    assert changed == {
        "trainer.epochs": (3, 9),
        "experiment.layers": (2, 5),
        "rank": (1, None),
        "world_size": (2, None),
        "master": ("a:1", None),
        "run.name": (None, "b"),
        "run.dir": ("runs", str(tmp_path)),
    }


def _flatten(config: Config) -> dict[str, Any]:
    from echelon.config.schema import flatten

    return flatten(config.to_dict())


def test_recompose_refuses_like_compose(tmp_path: Path) -> None:
    old = compose([], TYPED)
    with pytest.raises(EchelonError) as caught:
        recompose(old, ["lerr=1", "trainer.epochs=x"], name="b", folder=tmp_path)
    assert len(caught.value.faults) == 2


def test_recompose_can_choose_another_launch(tmp_path: Path) -> None:
    new = recompose(compose([], TYPED), ["launch=local", "launch.procs=2"], "b", tmp_path)
    assert (new.launch.kind, new.launch.procs) == ("local", 2)


def test_numerics_fingerprint_covers_what_changes_results() -> None:
    plain = compose([])
    for word in ("lr=0.3", "seed=1", "trainer.batch_size=8", "trainer.clip=1"):
        assert (
            compose([word]).compute_numerics_fingerprint() != plain.compute_numerics_fingerprint()
        ), word
    for word in ("trainer.epochs=9", "launch=local", "run.name=a", "track.progress=none"):
        assert (
            compose([word]).compute_numerics_fingerprint() == plain.compute_numerics_fingerprint()
        ), word
