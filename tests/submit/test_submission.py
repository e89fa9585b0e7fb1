"""A submission before it happens: how each command is run, the code as it was, and defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.cli import run_and_report_faults, run_command
from echelon.config.compose import compose
from echelon.config.defaults_files import NO_DEFAULTS, load_defaults, read_secrets
from echelon.config.validate import check_run_name
from echelon.environments import plan_environment as plan_environment
from echelon.errors import EchelonError, ExitCode
from echelon.launch.slurm import batch_script
from echelon.runs import run_folder
from echelon.runs.create import create_run, generate_run_name
from echelon.runs.find import find_run, find_runs
from echelon.runs.run_folder import Run
from echelon.submission import plan as plans
from echelon.submission.command_file import parse_commands, quote_words
from echelon.submission.dry_run import format_words
from echelon.submission.enqueue import prepare_submission
from echelon.submission.launch_modes import build_argv, detect_launch_mode
from echelon.submission.plan import Submission, SubmitRequest
from echelon.submission.prerequisites import require_prerequisites
from echelon.submission.source_copy import copy_source, survey_source

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which a person types."""
    monkeypatch.chdir(tmp_path)
    # Debian itself has no `python`.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "main.py").write_text("print('here')\n")
    return tmp_path


def planned(text: str, *overrides: str, **more: Any) -> Submission:
    Path("commands.txt").write_text(text)
    request = SubmitRequest(["run.name=a", *overrides], Path("commands.txt"), **more)
    submission = plans.plan_submission(request, load_defaults(os.environ, [Path()]), os.environ)
    require_prerequisites(submission, os.environ)
    return submission


def told(text: str, *overrides: str, **more: Any) -> str:
    with pytest.raises(EchelonError) as caught:
        planned(text, *overrides, **more)
    return str(caught.value)


def git(*words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], check=True, capture_output=True)


# --- how a command is run ---


@pytest.mark.parametrize(
    ("command", "overrides", "mode", "program"),
    [
        ("python main.py", [], "plain", "python main.py"),
        ("python main.py", ["launch.nodes=2"], "torchrun", "python main.py"),
        ("python main.py", ["launch.gpus_per_node=4"], "torchrun", "python main.py"),
        ("python main.py", ["launch.nodes=2", "mode=plain"], "plain", "python main.py"),
        ("python light.py", ["launch.nodes=2"], "lightning", "python light.py"),
        ("python light.py", [], "plain", "python light.py"),
        ("srun python main.py", ["launch.nodes=2"], "srun", "python main.py"),
        ("torchrun --standalone main.py -x", [], "torchrun", "python main.py -x"),
        ("torchrun --nproc_per_node 2 -m a.b", [], "torchrun", "python -m a.b"),
        ("torchrun --nnodes=$N --rdzv_id $J main.py", [], "torchrun", "python main.py"),
        ("python -m torch.distributed.run main.py", [], "torchrun", "python main.py"),
        ("torchrun --no-python ls", [], "torchrun", "ls"),
        (
            "wandb agent --count 1 a/b/c",
            [],
            "wandb",
            "wandb agent --count 1 a/b/c",
        ),
        ("python -m wandb agent c", [], "wandb", "wandb agent c"),
        ("A='x y' python main.py", [], "plain", "env 'A=x y' python main.py"),
    ],
)
def test_it_is_seen_from_the_command(
    here: Path, command: str, overrides: list[str], mode: str, program: str
) -> None:
    (here / "light.py").write_text("import lightning as L\nparser.add_argument('--num_nodes')\n")
    config = compose(["launch=slurm", *overrides], program=["x"])
    [read] = parse_commands(command, "f")
    chosen = next((word[5:] for word in overrides if word.startswith("mode=")), None)
    way = detect_launch_mode(read, config, chosen, here, 0)
    assert way.mode == mode
    assert format_words(build_argv(read, way)) == program
    assert way.reason


def test_what_torchrun_was_told_is_the_launch(here: Path) -> None:
    [entry] = planned("torchrun --nproc-per-node=2 --nnodes=3 --max_restarts=1 main.py").commands
    launch = entry.config.launch
    assert (launch.procs, launch.nodes, launch.max_restarts) == (2, 3, 1)
    assert "torchrun is told procs 2, but launch.procs=4" in told(
        "torchrun --nproc-per-node=2 main.py", "launch.procs=4"
    )
    assert "torchrun without a script" in told("torchrun --standalone\n")
    assert "--tee has no counterpart" in told("torchrun --tee 3 main.py")


def test_lightning_is_told_its_world_at_the_end(here: Path) -> None:
    def words(*overrides: str) -> str:
        [job] = planned("python main.py -x", "mode=lightning", *overrides).build_jobs()
        return job.script

    size = ("launch.nodes=2", "launch.gpus_per_node=4")
    assert "python main.py -x --num_nodes 2 --gpus 4\n" in words(*size)
    assert "python main.py -x --nnodes 2\n" in words(
        *size, "launch.nodes_flag=--nnodes", "launch.gpus_flag=''"
    )


def test_twelve_commands_are_an_array_with_every_word_exact(here: Path) -> None:
    nasty = ["a\nb", "$(touch x)", ";", "it's", '"', "", "ä你", "-x", "x" * 300, "{a: 1}", "*"]
    commands = [["python", "main.py", word] for word in [*nasty, "[1,2]"]]
    submission = planned("\n".join(map(quote_words, commands)), "launch.max_parallel=5")
    [job] = submission.build_jobs()
    assert "#SBATCH --array=0-11%5" in job.script
    assert job.script.index("#SBATCH --array") < job.script.index("run=")
    for word in nasty[:2]:
        assert word not in job.script, "words are not part of an array's script"
    for entry, command in zip(submission.commands, commands, strict=True):
        run = create_run(entry.config)
        batch_script.write_program_argv(entry.config, run)
        read = 'mapfile -d "" -t words < "$1"; printf "%s\\0" "${words[@]}"'
        done = subprocess.run(["bash", "-c", read, "_", run.arguments_file], capture_output=True)
        assert done.stdout.decode().split("\0")[:-1] == command


def test_more_than_an_array_takes_are_several(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "slurm.conf").write_text("MaxArraySize=6\n")
    monkeypatch.setenv("SLURM_CONF", str(here / "slurm.conf"))
    jobs = planned("python main.py\n" * 12).build_jobs()
    assert [len(job.configs) for job in jobs] == [5, 5, 2]
    for size in (0, 1):
        (here / "slurm.conf").write_text(f"MaxArraySize={size}\n")
        jobs = planned("python main.py\n" * 2).build_jobs()
        assert [job.array for job in jobs] == [None, None]
        assert "#SBATCH --job-name=a-1\n" in jobs[1].script


def test_commands_of_different_shapes_are_jobs_of_their_own(here: Path) -> None:
    text = "python main.py 1\ntorchrun --nproc-per-node=2 main.py\npython main.py 2\n"
    submission = planned(text)
    assert [[c.run.name for c in job.configs] for job in submission.build_jobs()] == [
        ["a-0", "a-2"],
        ["a-1"],
    ]


def test_only_who_can_resume_is_queued_again(here: Path) -> None:
    [job] = planned("python main.py").build_jobs()
    assert "--no-requeue" in job.script
    assert "--signal" not in job.script, "it would kill a program that does not know it"
    assert "scontrol requeue" not in job.script
    [job] = planned("python main.py", requeue=True).build_jobs()
    assert "#SBATCH --signal=USR2@120" in job.script
    assert "scontrol requeue" in job.script


def test_variables_are_refused_unless_they_are_asked_for(here: Path) -> None:
    found = told("python main.py\npython main.py $HOME/x \\\n '$y' ${z}")
    assert "commands.txt:2: $HOME/x has a variable in it" in found
    assert "commands.txt:3: ${z} has a variable in it" in found
    assert "$y" not in found
    [entry] = planned("# echelon: expand\npython main.py $HOME/x").commands
    assert entry.config.program[:2] == ["bash", "-c"]
    text = '# echelon: expand\nOUT="my dir/$N" A=b$N printenv OUT A'
    [entry] = planned(text, env="none").commands
    done = subprocess.run(entry.config.program, env={"N": "1"}, capture_output=True, text=True)
    assert done.stdout == "my dir/1\nb1\n"


def test_what_would_fail_only_in_the_job_is_told_now(here: Path) -> None:
    (here / "train.py").touch()
    found = told("python trian.py\nno-such-program\n./none.sh", env="none")
    assert "commands.txt:1: trian.py is not in" in found
    assert "did you mean 'train.py'?" in found
    assert "commands.txt:2: there is no program no-such-program" in found
    assert "commands.txt:3: ./none.sh is not a program" in found
    assert "launch=ssh: commands are submitted to Slurm" in told(
        "python main.py", "launch=ssh", "launch.hosts=[a]"
    )
    for name in ("a b", "a\nb", "$(x)", ";", "-x", "x" * 101):
        assert "is not a valid name for a run" in told("python main.py", name=name)
    for script_ in (f"{'x' * 240}.py", "-x.py", ".py"):
        assert check_run_name(generate_run_name(["python", script_])) is None


def test_what_was_queued_before_a_refusal_is_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And which file decides the environment, where two could."""
    sbatch = f"""#!/bin/sh
[ "$1" = --test-only ] && exec cat > /dev/null
[ -e {here}/once ] && {{ echo 'sbatch: error: full' >&2; exit 1; }}
touch {here}/once; echo 7
"""
    for name, text in {"sbatch": sbatch, "squeue": "#!/bin/sh\n"}.items():
        (here / name).write_text(text)
        (here / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    (here / "experiment_configurations.txt").write_text("python main.py\nsrun python main.py\n")
    (here / "requirements.txt").touch()
    (here / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '1'\n")
    assert (
        run_and_report_faults(lambda: run_command(["submit", "--build", "job", "--name", "a"]))
        == ExitCode.USAGE
    )
    told = capsys.readouterr()
    assert told.out.startswith("job 7: run a-0 in")
    assert "requirements.txt determines the environment; ignored: pyproject.toml" in told.err
    assert "error: full" in told.err
    assert "job 7: run a-0" in told.err
    assert "`scancel 7` takes it back" in told.err


def test_without_slurm_another_way_is_offered(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "experiment_configurations.txt").write_text("/bin/sh -c true")
    monkeypatch.setenv("PATH", str(here))
    assert run_and_report_faults(lambda: run_command(["submit"])) == ExitCode.USAGE
    assert "add launch=local to run the commands on this machine" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_a_dry_run_shows_everything_and_does_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "sweep.txt").write_text("python main.py --layers=64,64\nA=1 python main.py 'a\nb'\n")
    before = sorted(here.iterdir())
    assert run_command(["submit", "--configs", "sweep.txt", "--dry-run"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "mode=plain: one process (lines 1, 2)" in shown
    assert '["A=1", "python", "main.py", "a\\nb"]' in shown
    assert "#SBATCH --array=0-1" in shown
    assert run_command(["submit", "--configs", "sweep.txt", "--dry-run", "--json"]) == ExitCode.OK
    data = json.loads(capsys.readouterr().out)
    assert [(c["line"], c["argv"][1:], c["variables"]) for c in data["commands"]] == [
        (1, ["main.py", "--layers=64,64"], {}),
        (2, ["main.py", "a\nb"], {"A": "1"}),
    ]
    assert sorted(here.iterdir()) == before


# --- the code as it was ---


def test_a_copy_has_what_git_would_know(here: Path) -> None:
    git("init", "-q")
    (here / ".gitignore").write_text("data/\n*.log\n")
    (here / "gone.py").touch()
    git("add", "main.py", ".gitignore", "gone.py")
    git("commit", "-qm", "first")
    (here / "main.py").write_text("print('edited')\n")
    (here / "gone.py").unlink()
    (here / "new.py").touch()
    for folder in ("data", "runs/a", ".venv", "pkg"):
        (here / folder).mkdir(parents=True)
        (here / folder / "file.py").touch()
    (here / "inside").symlink_to(here / "pkg")
    (here / "outside").symlink_to("../outside")
    source = survey_source(here, here / "runs", ["data"])
    assert source.files == (
        *(".gitignore", "inside", "main.py", "new.py", "outside", "pkg/file.py"),
    )
    assert source.untracked == ("inside", "new.py", "outside", "pkg/file.py")
    copy = copy_source(source, here / "runs" / "a")
    assert (copy / "main.py").read_text() == "print('edited')\n"
    assert os.readlink(copy / "inside") == "pkg"
    assert os.readlink(copy / "outside") == str(here.parent / "outside")
    assert os.readlink(copy / "data") == str(here / "data")
    diff = (here / "runs" / "a" / "source.diff").read_text()
    assert "+print('edited')" in diff
    told = json.loads((here / "runs" / "a" / "source.json").read_text())
    assert len(told["commit"]) == 40
    assert survey_source(here, here / "runs").left_out == ("data",)


def test_what_is_hard_to_copy(here: Path) -> None:
    """A clone within, links that go in circles, pipes, and git as its user likes it."""
    git("init", "-q")
    git("add", "main.py")
    git("commit", "-qm", "first")
    git("init", "-q", "clone")
    (here / "clone" / "a.py").touch()
    (here / "one").symlink_to("two")
    (here / "two").symlink_to("one")
    (here / "main.py").write_text("print('edited')\n")
    for key, value in {"color.ui": "always", "diff.noprefix": "1", "diff.external": "x"}.items():
        git("config", key, value)
    source = survey_source(here, here / "runs")
    assert source.files == ("clone/a.py", "main.py", "one", "two")
    copy = copy_source(source, here / "runs" / "a")
    assert (copy / "one").is_symlink()
    diff = (here / "runs" / "a" / "source.diff").read_text()
    assert diff.startswith("diff --git a/main.py b/main.py\n")
    (here / "plain").mkdir()
    os.mkfifo(here / "plain" / "pipe")
    (here / "plain" / "a.py").touch()
    (here / ".gitignore").write_text("plain\n")
    assert survey_source(here / "plain", here / "runs").files == ("a.py",)


def test_secrets_stay_where_they_are(here: Path) -> None:
    git("init", "-q")
    (here / "secrets").write_text("A=1\n")
    git("add", "-A")
    git("commit", "-qm", "by mistake")
    (here / "secrets").write_text("A=canary\n")
    source = planned("python main.py", f"launch.secrets={here}/secrets").source
    assert source.files == ("commands.txt", "main.py")
    copy_source(source, here / "runs" / "a")
    for file in (here / "runs").rglob("*"):
        assert file.is_dir() or b"canary" not in file.read_bytes()
    commands = ("API_KEY={} python main.py", "python main.py --key {}", "python main.py token={}")
    for command in (text.format(KEY) for text in commands):
        found = told(command)
        assert "commands.txt:1: what looks like a secret" in found
        assert KEY not in found
    assert planned(f"python main.py data/{KEY}.csv --commit {KEY}")


def test_a_name_in_use_gets_a_number_and_what_has_it_stays(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepared(text: str, name: str) -> Submission:
        submission = planned(text, "launch=local", name=name, env="none")
        return prepare_submission(submission, os.environ)

    one, several = "python main.py", "python main.py\n" * 2
    first = prepared(one, "b")
    (first.folder / "source" / "written.pt").touch()
    assert (first.name, first.name_note) == ("b", "")
    second = prepared(one, "b")
    assert (second.name, second.runs[0].name) == ("b.2", "b.2")
    assert second.name_note == "the name b is in use, so this is b.2"
    assert prepared(several, "b").runs[1].name == "b.3-1"
    assert (first.folder / "source" / "written.pt").exists()
    assert prepared(several, "c").name == "c"
    assert prepared(several, "c").name == "c.2"
    create_run(compose(["run.name=d-3"]))  # of a multirun, so `d` names a group
    assert prepared(one, "d").name == "d.2"
    submitted_alone = prepared(one, "e-1")
    create_run(submitted_alone.configs[0])
    assert prepared(one, "e").name == "e"
    assert prepared(several, "e").name == "e.2"
    (here / "commands.txt").write_text(one)
    words = ["submit", "--configs", "commands.txt", "--name", "b", "--env", "none", "--dry-run"]
    assert run_command(words) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "the name b is in use, so this is b.4\n" in shown
    assert f"work: {here}/runs/b.4/work\n" in shown


def test_a_batch_script_works_in_a_folder_that_a_restart_finds_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm would run it, with a srun that only runs the program."""
    srun = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'
    for name, text in {"srun": srun, "scontrol": "#!/bin/sh\necho here\n"}.items():
        (here / "tools" / name).parent.mkdir(exist_ok=True)
        (here / "tools" / name).write_text(text)
        (here / "tools" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/tools:{os.environ['PATH']}")
    (here / "main.py").write_text(
        "import os\nprint(os.environ['ECHELON_RUN'], file=open('out.txt', 'a'))\n"
    )
    (here / "main.py").chmod(0o755)
    submission = planned("python main.py", env="none", links=("tools",))
    copy_source(submission.source, submission.folder)
    [run] = submission.runs
    [job] = submission.build_jobs()
    for _ in range(2):
        done = subprocess.run(["bash", "-c", job.script], env=os.environ | {"SLURM_JOB_ID": "7"})
        assert done.returncode == 0
    assert (run.work_folder / "out.txt").read_text() == f"{run.folder}\n" * 2
    assert os.access(run.work_folder / "main.py", os.X_OK)
    assert os.readlink(run.work_folder / "tools") == str(here / "tools")
    assert not (submission.source_copy / "out.txt").exists()
    assert run.exit_code_file.read_text() == "0\n"


def test_two_submissions_at_once_get_two_names(here: Path) -> None:
    """Both were planned before one of them made its folder."""
    one, other = (planned("python main.py\n" * 2, "launch=local", env="none") for _ in range(2))
    assert one.name == other.name == "a"
    assert prepare_submission(one, os.environ).name == "a"
    assert prepare_submission(other, os.environ).name == "a.2"
    third = planned("python main.py\n" * 2, "launch=local", env="none")
    (here / "runs" / "a.3-1").mkdir()  # another one has just begun with it
    assert prepare_submission(third, os.environ).name == "a.4"
    assert not (here / "runs" / "a.3").exists()


def test_a_submission_that_fails_leaves_its_name_free(here: Path) -> None:
    (here / "requirements.txt").write_text("six\n")
    submission = planned("python main.py", "launch=local")
    with pytest.raises(EchelonError):
        prepare_submission(submission, os.environ | {"ECHELON_CACHE": "/dev/null/x"})
    assert not (here / "runs" / "a").exists()


def test_an_environment_is_that_of_the_copy(here: Path) -> None:
    (here / "requirements.txt").write_text("six\n")
    submission = planned("python main.py", "launch=local", build="job")
    kept = prepare_submission(submission, os.environ | {"ECHELON_CACHE": "cache"})
    (here / "requirements.txt").write_text("rich\n")
    assert kept.environment
    assert kept.environment.source == kept.source_copy
    assert kept.environment.key == plan_environment(kept.source_copy).key
    lines = "\n".join(kept.render_environment_setup())
    assert f"ECHELON_CACHE={here}/cache " in lines
    assert kept.environment.key in lines.splitlines()[-1], "what is there is looked at last"


def test_a_plain_folder_works_as_well(here: Path) -> None:
    for folder in ("__pycache__", ".git", "runs", "pkg/__pycache__"):
        (here / folder).mkdir(parents=True)
        (here / folder / "x").touch()
    (here / "pkg" / "a.py").touch()
    source = survey_source(here, here / "runs")
    assert source.files == ("main.py", "pkg/a.py")
    assert source.commit is None


def test_a_folder_that_a_repository_around_it_ignores_is_copied(here: Path) -> None:
    git("init", "-q")
    (here / ".gitignore").write_text("inner\n")
    (here / "inner").mkdir()
    (here / "inner" / "main.py").touch()
    assert survey_source(here / "inner", here / "runs").files == ("main.py",)


def test_data_that_is_not_copied_is_told(here: Path) -> None:
    git("init", "-q")
    (here / ".gitignore").write_text("data\n")
    (here / "data").mkdir()
    (here / "data" / "x.csv").touch()
    assert "add --link data" in told("python main.py --in=data/x.csv")
    assert planned("python main.py --in=data/x.csv", links=("data",))
    (here / ".gitignore").write_text("data\n.venv\ngen.py\n*.csv\nrequirements.txt\nwandb\n")
    (here / "pkg" / "data").mkdir(parents=True)
    (here / ".venv" / "bin").mkdir(parents=True)
    (here / "wandb").mkdir()
    (here / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for name in ("pkg/a.py", "pkg/gen.py", "pkg/x.csv", "requirements.txt"):
        (here / name).touch()
    assert "add --link pkg/x.csv" in told("python main.py pkg/x.csv", env="none")
    assert "add --link pkg/gen.py" in told("python pkg/gen.py", env="none")
    assert "add --link .venv" in told(".venv/bin/python main.py", env="none")
    assert "requirements.txt is in the source folder, but is not copied" in told("python main.py")
    (here / "requirements.txt").unlink()
    assert planned("python pkg/a.py --logger=wandb pkg runs")
    assert planned("python main.py", links=("pkg/data", "data/x.csv", "pkg/data", "data"))
    assert "--link nowhere" in told("python main.py", links=("nowhere",))
    assert "is not inside the source" in told("python main.py", links=("../x",))


def test_a_source_full_of_data_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (here / "large.bin").open("wb") as file:
        file.truncate(300 << 20)
    assert "the largest: large.bin (300 MB)" in told("python main.py")


def test_no_place_for_the_copy(here: Path) -> None:
    (here / "file").touch()
    source = survey_source(here, here / "runs")
    with pytest.raises(EchelonError, match="cannot be copied"):
        copy_source(source, here / "file" / "a")


# --- by name, number and group ---


def test_runs_are_found_by_name_number_and_group(here: Path) -> None:
    config = compose(["run.dir=runs"])
    (here / "runs" / "a").mkdir(parents=True)
    (here / "runs" / "a" / run_folder.SUBMISSION_FILE).touch()
    for number in (0, 1, 2, 10):
        named = compose([f"run.name=a-{number}"])
        create_run(named).job_id_file.write_text(f"7_{number}\n")
    single = create_run(compose(["run.name=b"]))
    single.job_id_file.write_text("8\n")
    assert config.run.name is None

    def names(where: str) -> list[str]:
        return [run.name for run in find_runs(where)]

    assert names("a") == ["a-0", "a-1", "a-2", "a-10"]
    assert names("a-1") == ["a-1"]
    assert sorted(names("7")) == ["a-0", "a-1", "a-10", "a-2"]
    assert names("7_2") == ["a-2"]
    assert names("8") == ["b"]
    assert find_run("8") == Run(single.folder)
    with pytest.raises(EchelonError, match="a is the name of 4 runs"):
        find_run("a")
    for number in (1, 2):  # submitted one by one, so that they are no group
        alone = create_run(compose([f"run.name=c-{number}"]))
        (alone.folder / run_folder.SUBMISSION_FILE).touch()
    for nothing in ("9", "7_3", "[", "*", "a-", "c"):
        with pytest.raises(EchelonError, match="no run"):
            find_runs(nothing)


# --- defaults ---


def test_the_typed_stands_above_the_project_above_the_user(here: Path) -> None:
    (here / "home" / "echelon").mkdir(parents=True)
    (here / "home" / "echelon" / "echelon.yaml").write_text(
        "launch: {partition: u, account: u, time: 4:00:00, setup: [module load x]}\n"
        "wandb: {entity: us}\n"
    )
    (here / "echelon.yaml").write_text("launch:\n  partition: p\n  account: p\n")
    defaults = load_defaults(os.environ, [here])
    launch = compose(["launch=slurm", "launch.account=t"], defaults=defaults).launch
    assert (launch.partition, launch.account, launch.time) == ("p", "t", "4:00:00")
    assert launch.setup == ["module load x"]
    assert defaults.variables == {"WANDB_ENTITY": "us"}
    assert compose([], defaults=defaults).launch.partition is None, "not of this launcher"
    assert planned("python main.py").commands[0].config.launch.partition == "p"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("launch:\n  partion: gpu\n", "echelon.yaml:2: there is no default 'launch.partion'"),
        ("launch:\n  kind: slurm\n", "echelon.yaml:2: there is no default 'launch.kind'"),
        ("x: 1\n", "echelon.yaml:1: there is no default 'x'"),
        ("a: [\n", "echelon.yaml:2 cannot be read"),
        ("- partition\n", "echelon.yaml is not a mapping of settings"),
        ("wandb:\n  api_key: x\n", "echelon.yaml:2: wandb.api_key looks like a secret"),
        (f"wandb:\n  entity: {KEY}\n", "echelon.yaml:2: wandb.entity looks like a secret"),
        (f"launch:\n  setup: [export K={KEY}]\n", "echelon.yaml:2: launch.setup looks like"),
    ],
)
def test_what_defaults_may_not_be(here: Path, text: str, told: str) -> None:
    (here / "echelon.yaml").write_text(text)
    with pytest.raises(EchelonError) as caught:
        load_defaults(os.environ, [here])
    assert told in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_wrong_value_is_told_with_its_file_and_line(here: Path) -> None:
    (here / "echelon.yaml").write_text("launch:\n  nodes: many\n")
    with pytest.raises(EchelonError, match=r"echelon.yaml:2: launch.nodes"):
        compose(["launch=slurm"], defaults=load_defaults(os.environ, [here]))
    assert load_defaults(os.environ, []) == NO_DEFAULTS


def test_secrets_are_read_from_a_file_of_ones_own(here: Path) -> None:
    file = here / "secrets"
    file.write_text(f"# mine\nWANDB_API_KEY={KEY}\nnot a line\nEMPTY=\n")
    file.chmod(0o644)
    (here / "echelon.yaml").write_text("secrets: secrets\n")
    with pytest.raises(EchelonError, match="chmod 600"):
        read_secrets(str(file))
    with pytest.raises(EchelonError, match="chmod 600"):
        prepare_submission(planned("python main.py"), os.environ)
    file.chmod(0o600)
    assert read_secrets(str(file)) == {"WANDB_API_KEY": KEY, "EMPTY": ""}
    [job] = planned("python main.py").build_jobs()
    assert KEY not in job.script
    begin = job.script.index("# launch.secrets")
    lines = job.script[begin : job.script.index("unset line")]
    file.write_bytes(f"X=\xff\nWANDB_API_KEY={KEY}\r\n".encode("latin-1"))
    for mode, code in ((0o600, 0), (0o644, 1), (0o700, 1)):
        file.chmod(mode)
        if code == 0:
            assert read_secrets(str(file)) == {"X": os.fsdecode(b"\xff"), "WANDB_API_KEY": KEY}
        else:
            with pytest.raises(EchelonError, match="chmod 600"):
                read_secrets(str(file))
        text = f'fail() {{ exit "$1"; }}\n{lines}\n[ "$WANDB_API_KEY" = {KEY} ]'
        assert subprocess.run(["bash", "-c", text], capture_output=True).returncode == code
