"""Settings of launch=slurm that become options of sbatch: types of GPUs, features, other jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.config.compose import compose, recompose
from echelon.config.defaults_files import load_defaults
from echelon.config.multirun import expand_multirun
from echelon.config.schema import Config, LaunchConfig
from echelon.errors import EchelonError, ExitCode
from echelon.launch.plan import LaunchPlan, LocalMachine
from echelon.launch.slurm.batch_script import (
    make_srun_allocation_options,
    render_array_script,
    render_sweep_script,
)
from echelon.launch.slurm.dependency import resolve_dependency
from echelon.launch.slurm.joining_job import render_joining_script
from echelon.launch.slurm.launcher import SlurmLauncher
from echelon.launch.slurm.version import (
    SlurmVersion,
    find_unknown_options,
    parse_slurm_version,
)
from echelon.runs.create import assign_name
from echelon.runs.run_folder import Run

HERE = LocalMachine({"PATH": "/bin"}, "login", 0)
ODD_JOB = {
    "launch.gpus_per_node=a100:4": "--gpus-per-node=a100:4",
    "launch.exclusive=true": "--exclusive",
    "launch.partition=gpu,gpu-long": "--partition=gpu,gpu-long",
    "launch.constraint=[rack1|rack2]&ib": "--constraint=[rack1|rack2]&ib",
    "launch.reservation=course": "--reservation=course",
    "launch.licenses=matlab:2,fluent@server": "--licenses=matlab:2,fluent@server",
    "launch.qos=high": "--qos=high",
    "launch.deadline=2030-01-31T12:00": "--deadline=2030-01-31T12:00",
    "launch.after=12,afterany:14_3": "--dependency=afterok:12,afterany:14_3",
}


def composed(*words: str, program: Sequence[str] = ()) -> Config:
    return assign_name(compose(["launch=slurm", "run.name=a", *words], program=program))


def planned(config: Config) -> LaunchPlan:
    return SlurmLauncher().plan(config, HERE)


def options(script: str) -> list[str]:
    lines = script.splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def faults(*words: str) -> str:
    with pytest.raises(EchelonError) as caught:
        composed(*words)
    return str(caught.value)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A laptop, on which no command of Slurm is found."""
    monkeypatch.setenv("PATH", str(tmp_path))


# --- what is asked of Slurm ---


@pytest.mark.usefixtures("no_slurm")
def test_every_setting_is_an_option_in_scripts_of_every_kind(tmp_path: Path) -> None:
    config = resolve_dependency(composed(*ODD_JOB, "launch.nodes=2", f"run.dir={tmp_path}"))
    run = Run.from_config(config)
    plan = planned(config)
    scripts = [
        plan.script,
        render_array_script(config, tmp_path / "list", 3),
        render_sweep_script(config, tmp_path / "logs", ["true"], ["true"], 2),
    ]
    for script in scripts:
        assert set(ODD_JOB.values()) <= set(options(script)), script
        assert "--kill-on-invalid-dep=yes" in options(script)
    assert "wait for jobs: afterok:12,afterany:14_3 (launch.after)" in plan.steps
    joining = options(render_joining_script(config, run, 1, 2))
    asked = make_srun_allocation_options(config)
    for option in ODD_JOB.values():
        is_dependency = option.startswith("--dependency")
        assert (option in joining) is not is_dependency
        assert (option in asked) is not option.startswith(("--dependency", "--deadline"))


def test_without_them_the_script_is_what_it_was() -> None:
    asked = options(planned(composed()).script)
    assert [o.partition("=")[0] for o in asked] == [
        *("--job-name", "--output", "--nodes", "--ntasks-per-node", "--cpus-per-task"),
        *("--signal", "--requeue", "--open-mode"),
    ]


# --- GPUs with a type ---


@pytest.mark.parametrize(
    ("mode", "request_", "option"),
    [
        ("torchrun", "gpus-per-node", "--gpus-per-node=a100:4"),
        ("torchrun", "gpus-per-task", "--gpus-per-task=a100:4"),
        ("torchrun", "gres", "--gres=gpu:a100:4"),
        ("srun", "gpus-per-task", "--gpus-per-task=a100:1"),
        ("plain", "gres", "--gres=gpu:a100:4"),
    ],
)
def test_a_type_of_gpu_is_asked_for_in_every_way(mode: str, request_: str, option: str) -> None:
    words = ["launch.gpus_per_node=a100:4", f"launch.gpu_request={request_}", f"mode={mode}"]
    script = planned(composed(*words, program=["true"])).script
    assert [o for o in options(script) if o.startswith(("--gpu", "--gres"))] == [option]
    assert not [o for o in options(script) if o.startswith("--cpus")]


def test_gpus_with_a_type_count_as_gpus_everywhere() -> None:
    plan = planned(composed("launch.gpus_per_node=nvidia_a100_80gb:4", "launch.nodes=2"))
    assert len(plan.places) == 8
    assert plan.places[5].devices == ("cuda:1",)
    two = planned(composed("launch.gpus_per_node=a100:4", "replica.devices=2"))
    assert [place.devices for place in two.places] == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]
    words = ("launch.gpus_flag=--gpus", "launch.nodes_flag=--num_nodes", "mode=lightning")
    script = planned(composed("launch.gpus_per_node=a100:4", *words, program=["fit.py"])).script
    assert "fit.py --num_nodes 1 --gpus 4" in script
    assert "does not divide by replica.devices=3" in faults(
        "launch.gpus_per_node=a100:4", "replica.devices=3"
    )


@pytest.mark.parametrize("value", ["a100", "a100:0", "a100:x", ":4", "a100:2:3", "a100:4;ls", "4 "])
def test_what_is_no_number_of_gpus_is_refused(value: str) -> None:
    said = faults(f"launch.gpus_per_node='{value}'")
    assert "is not a number of GPUs" in said
    assert "a100:4" in said


def test_the_number_and_the_type_are_read_from_one_value() -> None:
    cases: dict[int | str | None, tuple[int, str | None]] = {
        **{None: (0, None), 4: (4, None), "4": (4, None), "a100:4": (4, "a100")},
        **{"h100-80g:8": (8, "h100-80g"), "a100": (0, None)},
    }
    for value, (count, kind) in cases.items():
        launch = LaunchConfig(gpus_per_node=value)
        assert (launch.gpu_count, launch.gpu_type) == (count, kind), value


def test_a_file_of_defaults_may_name_the_type(tmp_path: Path) -> None:
    (tmp_path / "echelon.yaml").write_text(
        "launch:\n  gpus_per_node: a100:4\n  partition: gpu,long\n  exclusive: true\n"
    )
    defaults = load_defaults({"HOME": str(tmp_path)}, [tmp_path])
    launch = compose(["launch=slurm"], defaults=defaults).launch
    assert (launch.gpus_per_node, launch.partition, launch.exclusive) == (
        *("a100:4", "gpu,long"),
        True,
    )
    (tmp_path / "echelon.yaml").write_text("launch: {gpus_per_node: 4}\n")
    defaults = load_defaults({"HOME": str(tmp_path)}, [tmp_path])
    assert compose(["launch=slurm"], defaults=defaults).launch.gpus_per_node == 4
    assert compose(["launch=local"], defaults=defaults).launch.gpus_per_node is None


# --- what may not get into a script ---


@pytest.mark.parametrize("key", ["constraint", "reservation", "licenses", "qos", "deadline"])
@pytest.mark.parametrize("value", ["a b", "a;ls", "$(ls)", "`ls`", "a\n#SBATCH --uid=0", 'a"b', ""])
def test_no_shell_text_and_no_second_line_gets_into_a_script(
    tmp_path: Path, key: str, value: str
) -> None:
    (tmp_path / "echelon.yaml").write_text(f"launch:\n  {key}: {json.dumps(value)}\n")
    defaults = load_defaults({"HOME": str(tmp_path)}, [tmp_path])
    with pytest.raises(EchelonError, match="is not safe as one word in a batch script"):
        compose(["launch=slurm"], defaults=defaults)


@pytest.mark.parametrize("after", ["", "a,,b", "afterok:", "aftercorr:12", "after:12", "a;b"])
def test_what_is_no_dependency_is_refused(after: str) -> None:
    assert "launch.after=" in faults(f"launch.after='{after}'")


def test_an_option_is_given_in_one_way() -> None:
    said = faults("launch.qos=high", "launch.sbatch=['--qos=low']")
    assert "launch.qos=high, but launch.sbatch has --qos=low too" in said
    script = planned(composed("launch.sbatch=['--qos=low']")).script
    assert [option for option in options(script) if "qos" in option] == ["--qos=low"]


def test_other_launchers_refuse_what_is_slurms() -> None:
    with pytest.raises(EchelonError) as caught:
        compose(["launch=local", "launch.exclusive=true", "launch.constraint=a100"])
    assert "launch.exclusive=True is set, but launch=local does not use it" in str(caught.value)
    assert "add launch=slurm" in str(caught.value)


def test_commas_of_slurm_are_not_several_runs() -> None:
    words = ["launch.partition=a,b", "lr=0.1,0.2"]
    assert expand_multirun(words) == [[words[0], "lr=0.1"], [words[0], "lr=0.2"]]
    assert composed("launch.partition='a,b'").launch.partition == "a,b"
    assert composed("launch.partition=null").launch.partition is None


# --- versions ---


def test_options_that_a_version_lacks_are_refused_with_both_versions() -> None:
    script = "#SBATCH --nodes=2\n#SBATCH --prefer=ib\n#SBATCH --exclusive=topo\nsrun --prefer\n"
    old = [fault.what for fault in find_unknown_options(script, SlurmVersion(20, 11))]
    assert old == [
        "--prefer=ib is an option of Slurm 22.05 and later, but here is Slurm 20.11",
        "--exclusive=topo is an option of Slurm 24.05 and later, but here is Slurm 20.11",
    ]
    assert not list(find_unknown_options(script, SlurmVersion(24, 5)))
    power = list(find_unknown_options("#SBATCH --power=level\n", SlurmVersion(24, 11)))
    assert "until 24.05, but here is Slurm 24.11" in power[0].what


@pytest.mark.usefixtures("no_slurm")
def test_all_of_our_own_options_are_known_to_slurm_20_11() -> None:
    config = resolve_dependency(composed(*ODD_JOB, "launch.nodes=2", "launch.spares=1"))
    assert not list(find_unknown_options(planned(config).script, SlurmVersion(20, 11)))
    older = list(find_unknown_options(planned(config).script, SlurmVersion(18, 8)))
    assert [fault.do for fault in older] == ["set launch.gpu_request=gres"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("slurm 20.11.9\n", SlurmVersion(20, 11)),
        ("slurm-wlm 22.05.8\n", SlurmVersion(22, 5)),
        ("slurm 24.05.0-rc1", SlurmVersion(24, 5)),
        ("", None),
        ("bash: sbatch: command not found", None),
    ],
)
def test_versions_as_they_are_printed(text: str, version: SlurmVersion | None) -> None:
    assert parse_slurm_version(text) == version


# --- launch.after ---


def make_run(root: Path, name: str, job: str | None, **status: object) -> Run:
    """A run folder with what a job has left there."""
    run = Run(root / name)
    run.folder.mkdir(parents=True)
    launch = {"launch": {"kind": "slurm" if job else "local"}}
    run.config_file.write_text(json.dumps({"run_format": 2, **launch}))
    run.update_status(launcher="slurm" if job else "local", **status)
    if job:
        run.job_id_file.write_text(f"{job}\n")
    return run


@pytest.mark.usefixtures("no_slurm")
def test_runs_are_found_by_name_folder_and_job(tmp_path: Path) -> None:
    make_run(tmp_path, "first", "12", state="queued")
    for word in ("first", f"{tmp_path}/first", "12", "afterok:first", "first,12"):
        config = resolve_dependency(composed(f"launch.after={word}", f"run.dir={tmp_path}"))
        assert config.launch.after == "afterok:12", word
        assert resolve_dependency(config) == config
    other = composed("launch.after=afterany:first", f"run.dir={tmp_path}")
    assert resolve_dependency(other).launch.after == "afterany:12"


@pytest.mark.usefixtures("no_slurm")
def test_a_run_that_is_over_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "done", "12", state="finished")
    make_run(tmp_path, "here", None, state="finished")
    for name in ("done", "here"):
        config = composed(f"launch.after={name}", f"run.dir={tmp_path}")
        assert resolve_dependency(config).launch.after is None
        said = f"launch.after={name}: run {name} is finished already, so nothing is waited for\n"
        assert capsys.readouterr().err == said


@pytest.mark.usefixtures("no_slurm")
def test_what_would_never_start_is_refused_all_at_once(tmp_path: Path) -> None:
    failed = make_run(tmp_path, "broken", "12", state="failed")
    failed.exit_code_file.write_text("1\n")
    make_run(tmp_path, "done", "13", state="finished")
    words = "broken,afternotok:done,nowhere"
    with pytest.raises(EchelonError) as caught:
        resolve_dependency(composed(f"launch.after={words}", f"run.dir={tmp_path}"))
    broken, done, nowhere = caught.value.faults
    assert caught.value.exit == ExitCode.NOT_FOUND
    assert broken.what.startswith("launch.after: run broken is failed (exit code 1")
    assert "would never start" in broken.what
    assert "`echelon resume broken`" in broken.do
    assert "launch.after=afterany:broken" in broken.do
    assert "run done is finished, so a job that starts when it fails" in done.what
    assert "no run 'nowhere'" in nowhere.what
    any_end = composed("launch.after=afterany:broken", f"run.dir={tmp_path}")
    assert resolve_dependency(any_end).launch.after is None


def test_a_resumed_run_does_not_wait_again(tmp_path: Path) -> None:
    config = composed("launch.after=afterok:12", f"run.dir={tmp_path}")
    assert recompose(config, [], "a", tmp_path).launch.after is None
    assert recompose(config, ["launch.after=14"], "a", tmp_path).launch.after == "14"
