"""Which file decides, what the key depends on, and every sentence for what cannot be built."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.cli import run_and_report_faults, run_command
from echelon.environments import EnvironmentPlan, plan_environment, render_activation_lines
from echelon.environments.cache import EnvironmentPaths
from echelon.environments.pipfile import compute_pipfile_hash
from echelon.errors import EchelonError, ExitCode

PIPFILE = """\
[[source]]
url = "https://pypi.org/simple"
verify_ssl = true
name = "pypi"

[packages]
six = "*"
rich = {version=">=13", markers="python_version > \\"3.8\\""}

[dev-packages]

[requires]
python_version = "3.11"
"""
ITS_HASH = "0dc75e59c3a7f11d88557647f91a83ef7dbdf6e62a2e2b869e57844091d9a7b2"
"""As pipenv 2026.10.3 wrote it into the lock."""
PROJECT = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["six>=1", "rich"]\n'
CONDA = "name: x\nchannels: [conda-forge]\ndependencies:\n  - python=3.11\n  - pip:\n    - six\n"
CANARY = "canary-77ab"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of a user with an empty home and pip alone."""
    return {
        "HOME": str(tmp_path / "home"),
        "PATH": "/nowhere",
        "ECHELON_CACHE": str(tmp_path / "cache"),
        "ECHELON_ENV_BUILDER": "pip",
        "PIP_CONFIG_FILE": os.devnull,
    }


def source(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def tool(folder: Path, name: str, text: str = "exit 0") -> str:
    """A folder for the PATH with an executable in it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return str(folder)


def plan_fault_text(folder: Path, environ: dict[str, str], where: str = "cache") -> str:
    with pytest.raises(EchelonError) as caught:
        plan_environment(folder, where, environ)
    return "\n".join(map(str, caught.value.faults))


def lock(pipfile_hash: str, **packages: dict[str, object]) -> str:
    return json.dumps({"_meta": {"hash": {"sha256": pipfile_hash}}, "default": packages})


def requirements_of(plan: EnvironmentPlan) -> list[str]:
    return plan.build_steps.inputs["requirements.txt"].splitlines()


# --- which file ---


def test_the_first_file_determines_the_environment_and_others_are_listed(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    this = f"{sys.version_info[0]}.{sys.version_info[1]}"
    files = {
        "Pipfile": PIPFILE.replace("3.11", this),
        "requirements.txt": "six\n",
        "pyproject.toml": PROJECT,
        "environment.yml": CONDA,
    }
    expected = ["pipfile", "requirements", "pyproject", "conda"]
    environ |= {"PATH": tool(tmp_path / "bin", "conda")}
    folder = source(tmp_path / "s", **files)
    for kind, name in zip(expected, files, strict=True):
        plan = plan_environment(folder, environ=environ)
        assert plan.kind == kind
        assert plan.files[0].name == name
        later = list(files)[expected.index(kind) + 1 :]
        assert [f.name for f in plan.ignored] == later
        (folder / name).unlink()
    assert plan_environment(folder, environ=environ).kind == "none"


def test_a_pyproject_with_linter_settings_alone_needs_no_environment(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = source(tmp_path / "s", **{"pyproject.toml": "[tool.ruff]\nline-length = 100\n"})
    plan = plan_environment(folder, environ=environ)
    assert (plan.kind, plan.ready, render_activation_lines(plan)) == ("none", True, [])
    (folder / "environment.yml").write_text(CONDA)
    assert "conda" in plan_fault_text(folder, environ)


def test_the_plan_is_data(tmp_path: Path, environ: dict[str, str]) -> None:
    plan = plan_environment(
        source(tmp_path / "s", **{"requirements.txt": "six\n"}), environ=environ
    )
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["kind"] == "requirements"
    assert told["builder"] == "pip"
    assert told["ready"] is False
    assert told["folder"] == str(tmp_path / "cache" / "envs" / plan.key)
    assert told["commands"][0].endswith(f"-m venv {plan.folder}")
    beside = plan_environment(plan.source, "source", environ)
    assert (beside.key, beside.folder) == (plan.key, plan.source / ".venv")


# --- the key ---


def test_a_copy_of_the_source_has_the_same_environment(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    one = source(tmp_path / "one", **{"requirements.txt": "-r b.txt\n-e .\n", "b.txt": "six\n"})
    (one / "setup.py").write_text("")
    two = tmp_path / "two"
    shutil.copytree(one, two)
    assert plan_environment(one, environ=environ).key == plan_environment(two, environ=environ).key


def test_wheels_in_the_source_give_the_same_key_in_a_copy(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    one = source(tmp_path / "one", **{"requirements.txt": "--find-links ./wheels\nsix\n"})
    source(one / "wheels", **{"six.whl": "1"})
    two = tmp_path / "two"
    shutil.copytree(one, two)
    assert plan_environment(one, environ=environ).key == plan_environment(two, environ=environ).key
    (two / "wheels" / "six.whl").write_text("2")
    assert plan_environment(one, environ=environ).key != plan_environment(two, environ=environ).key
    beside = plan_environment(two, "source", environ, venv_parent=one)
    assert beside.folder == one / ".venv"


def test_what_changes_the_key(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = source(
        tmp_path / "s",
        **{"requirements.txt": "-r b.txt\n-c c.txt\n./lib\n", "b.txt": "six\n", "c.txt": "six<2\n"},
    )
    code = source(folder / "lib", **{"setup.py": "", "lib.py": "x = 1\n"}) / "lib.py"
    keys = [plan_environment(folder, environ=environ).key]

    def changed() -> bool:
        keys.append(plan_environment(folder, environ=environ).key)
        return keys[-1] not in keys[:-1]

    (folder / "b.txt").write_text("six>1\n")
    assert changed(), "an included file"
    (folder / "c.txt").write_text("six<3\n")
    assert changed(), "a constraint"
    code.write_text("x = 2\n")
    assert changed(), "the code of a local project, which is installed as it is"
    for name, value in {
        "PIP_INDEX_URL": "https://a/",
        "PIP_EXTRA_INDEX_URL": "https://b/",
        "PIP_FIND_LINKS": "/w",
        "PIP_NO_INDEX": "1",
    }.items():
        environ[name] = value
        assert changed(), name
    environ["PIP_CONFIG_FILE"] = str(source(tmp_path / "c", conf="[global]\npre = 1\n") / "conf")
    assert changed(), "pip.conf"
    (folder / "b.txt").write_text("# a comment\n\nsix>1  # and another\n")
    assert not changed(), "what is installed is the same"
    (folder / "lib" / "__pycache__").mkdir()
    (folder / "lib" / "__pycache__" / "lib.pyc").write_text("")
    assert not changed()


def test_the_python_changes_the_key(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = source(tmp_path / "s", **{"requirements.txt": "six\n"})
    identity = {
        **{"version": "3.12.1", "build": "3.12.1 (x)", "implementation": "cpython"},
        **{"base": "/opt/python", "prefix": "/opt", "platform": "linux-x86_64"},
        **{"machine": "x86_64", "libc": "glibc 2.36"},
    }

    def key(**other: str) -> str:
        text = f"echo '{json.dumps(identity | other)}'"
        return plan_environment(
            folder, environ=environ, python=f"{tool(tmp_path / 'p', 'py', text)}/py"
        ).key

    others = [{"version": "3.12.2"}, {"base": "/usr/python"}, {"machine": "arm64"}]
    others += [{"libc": "musl"}, {"implementation": "pypy"}]
    keys = {key(), *(key(**other) for other in others)}
    assert len(keys) == 1 + len(others)
    assert key(prefix="/venv/over/it") in keys, "a venv over the same interpreter is the same"
    assert key() != plan_environment(folder, environ=environ).key


def test_no_password_is_written_or_shown(tmp_path: Path, environ: dict[str, str]) -> None:
    text = f"--extra-index-url https://u:{CANARY}@h/\nlib @ https://u:{CANARY}@h/l.whl\nsix\n"
    environ |= {"PIP_INDEX_URL": f"https://u:{CANARY}@m/", "TOKEN": CANARY}
    folder = source(tmp_path / "s", **{"requirements.txt": text})
    plan = plan_environment(folder, environ=environ)
    shown = [repr(plan), json.dumps(plan.to_dict()), "\n".join(render_activation_lines(plan))]
    assert CANARY not in "".join(shown)
    other = plan_environment(folder, environ=environ | {"PIP_INDEX_URL": "https://u:other@m/"})
    assert other.key != plan.key


# --- Pipfile ---


def test_a_lock_file_is_installed_as_it_is(tmp_path: Path, environ: dict[str, str]) -> None:
    hashes = ["sha256:aa", "sha256:bb"]
    text = lock(
        ITS_HASH,
        six={"version": "==1.17.0", "hashes": hashes, "markers": "python_version >= '2.7'"},
        rich={"version": "==15.0", "hashes": hashes[:1], "extras": ["jupyter"], "index": "pypi"},
    )
    folder = source(tmp_path / "s", **{"Pipfile": PIPFILE, "Pipfile.lock": text})
    _for_3_11(folder)
    plan = plan_environment(folder, environ=environ)
    assert plan.builder == "pip", "no pipenv is needed for this"
    assert requirements_of(plan) == [
        "six==1.17.0 ; python_version >= '2.7' --hash=sha256:aa --hash=sha256:bb",
        "rich[jupyter]==15.0 --hash=sha256:aa",
    ]


def _for_3_11(folder: Path) -> None:
    """The tests run on other Pythons too; what is asked for is a matter of its own test."""
    from echelon.environments import toml_files

    this = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "Pipfile").write_text(PIPFILE.replace("3.11", this))
    locked = json.loads((folder / "Pipfile.lock").read_text())
    locked["_meta"]["hash"]["sha256"] = compute_pipfile_hash(
        toml_files.load_toml(folder / "Pipfile")
    )
    (folder / "Pipfile.lock").write_text(json.dumps(locked, indent=4))


def test_the_hash_of_a_pipfile_is_pipenvs(tmp_path: Path) -> None:
    from echelon.environments import toml_files

    assert (
        compute_pipfile_hash(toml_files.load_toml(source(tmp_path, Pipfile=PIPFILE) / "Pipfile"))
        == ITS_HASH
    )


def test_one_package_without_a_hash_drops_all_hashes(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    text = lock(
        "",
        six={"version": "==1.17.0", "hashes": ["sha256:aa"]},
        lib={"git": "https://h/lib.git", "ref": "abc", "subdirectory": "py"},
        mine={"path": "./mine", "editable": True},
    )
    folder = source(tmp_path / "s", **{"Pipfile": PIPFILE, "Pipfile.lock": text})
    (folder / "mine").mkdir()
    _for_3_11(folder)
    assert requirements_of(plan_environment(folder, environ=environ)) == [
        *("six==1.17.0", "lib @ git+https://h/lib.git@abc#subdirectory=py", "./mine"),
    ]


def test_a_pipfile_without_a_lock_needs_pipenv(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = source(tmp_path / "s", Pipfile=PIPFILE.partition("[requires]")[0])
    plan = plan_environment(folder, environ=environ)
    assert plan.builder == "pipenv"
    assert "pipenv lock" in plan.commands
    assert plan.build_steps.pipenv_environment
    assert plan.build_steps.pipenv_environment.key != plan.key


# --- what cannot be ---


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"Pipfile": "[packages\n"}, "Pipfile is not TOML"),
        ({"Pipfile": PIPFILE, "Pipfile.lock": "{"}, "Pipfile.lock cannot be read"),
        ({"Pipfile": PIPFILE, "Pipfile.lock": lock("other")}, "run `pipenv lock`"),
        ({"Pipfile": PIPFILE.replace("3.11", "2.7")}, 'asks for python_version = "2.7"'),
        ({"Pipfile": PIPFILE.replace("https", "http")}, "Pipfile:2: packages from http://pypi"),
        ({"Pipfile": '[packages]\nlib = {path = "../lib"}\n'}, "Pipfile:2: ../lib is outside"),
        ({"pyproject.toml": "[project\n"}, "pyproject.toml is not TOML"),
        ({"pyproject.toml": "[tool.poetry.dependencies]\n"}, "poetry export"),
        ({"pyproject.toml": '[project]\ndynamic = ["dependencies"]\n'}, "`dynamic`"),
        ({"pyproject.toml": '[project]\ndependencies = [\n"a b"]\n'}, "pyproject.toml:3: 'a b'"),
        ({"pyproject.toml": '[project]\nrequires-python = "<3"\n'}, 'requires-python = "<3"'),
        ({"requirements.txt": "six\n", ".python-version": "2.7.18\n"}, "version asks for 2.7.18"),
        ({"pyproject.toml": PROJECT, "uv.lock": ""}, "there is no uv on the PATH"),
        ({"uv.lock": ""}, "uv.lock has no pyproject.toml beside it"),
        ({"environment.yml": CONDA}, "none of micromamba, mamba and conda"),
        ({"environment.yml": "a: [\n"}, "environment.yml is not YAML"),
        ({"environment.yml": "name: x\n"}, "no list of dependencies"),
        ({"environment.yml": f"{CONDA}    - x @ http://h/x.whl\n"}, "come over plain http"),
        ({"environment.yml": f"{CONDA}    - --index-url http://h/\n"}, "come over plain http"),
        ({"environment.yml": f"{CONDA}    - -e ./x\n"}, "environment.yml:7: -e ./x would link"),
        ({"environment.yml": f"{CONDA}    - ../x\n"}, "environment.yml:7: ../x is outside"),
        (
            {"pyproject.toml": f'{PROJECT}[tool.uv.sources]\nSix = {{path = "six"}}\n'},
            "pyproject.toml:4: [tool.uv.sources] says where six comes from",
        ),
    ],
)
def test_bad_files_are_reported(
    tmp_path: Path, environ: dict[str, str], files: dict[str, str], expected: str
) -> None:
    assert expected in plan_fault_text(source(tmp_path / "s", **files), environ)


def test_bad_arguments_are_reported(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = source(tmp_path / "s", **{"requirements.txt": "six\n"})
    assert "there is no source folder" in plan_fault_text(tmp_path / "gone", environ)
    assert "known: cache, source" in plan_fault_text(folder, environ, "elsewhere")
    assert "ECHELON_ENV_BUILDER=conda" in plan_fault_text(
        folder, environ | {"ECHELON_ENV_BUILDER": "conda"}
    )
    assert "pip's settings: packages from http://m/" in plan_fault_text(
        folder, environ | {"PIP_INDEX_URL": "http://m/"}
    )
    plan_environment(
        folder, environ=environ | {"PIP_INDEX_URL": "http://m/", "PIP_TRUSTED_HOST": "m"}
    )
    assert "a colon or a line break" in plan_fault_text(folder, environ | {"ECHELON_CACHE": "/a:b"})
    with pytest.raises(EchelonError, match="did not report its version"):
        plan_environment(folder, environ=environ, python=str(tmp_path / "no-python"))


def test_a_pyenv_name_is_not_a_version(tmp_path: Path, environ: dict[str, str]) -> None:
    files = {"requirements.txt": "six\n", ".python-version": "my-env\n"}
    plan_environment(source(tmp_path / "s", **files), environ=environ)


def test_all_faults_are_reported_together(tmp_path: Path, environ: dict[str, str]) -> None:
    files = {"requirements.txt": "../lib\n-r gone.txt\n", ".python-version": "2.7\n"}
    assert plan_fault_text(source(tmp_path / "s", **files), environ).count("hint:") == 3


# --- conda ---


@pytest.mark.parametrize("name", ["conda", "mamba", "micromamba"])
def test_the_conda_commands(tmp_path: Path, environ: dict[str, str], name: str) -> None:
    environ["PATH"] = tool(tmp_path / "bin", name)
    folder = source(tmp_path / "s", **{"environment.yml": CONDA})
    plan = plan_environment(folder, environ=environ)
    file = folder / "environment.yml"
    how = "create --yes" if name == "micromamba" else "env create"
    expected = f"{tmp_path}/bin/{name} {how} --prefix {plan.folder} --file {file}"
    assert plan.commands == (expected,)
    assert plan.builder == "conda"
    assert (
        plan.key != plan_environment(folder, environ=environ | {"PIP_INDEX_URL": "https://a/"}).key
    )


# --- entering it ---


@pytest.mark.parametrize("name", ["plain", "a b'c\"d$(touch x)`y`é; z", "-n"])
def test_activation_quotes_unusual_paths(
    tmp_path: Path, environ: dict[str, str], name: str
) -> None:
    folder = source(tmp_path / name, **{"pyproject.toml": PROJECT})
    (folder / "src").mkdir()
    plan = plan_environment(folder, "source", environ)
    (plan.folder / "bin").mkdir(parents=True)
    EnvironmentPaths(plan.folder).make_parent()
    EnvironmentPaths(plan.folder).use_lock.touch()
    tell = 'printf "%s\\n" "$VIRTUAL_ENV" "$PATH" "$PYTHONPATH" "${PYTHONHOME-unset}"'
    script = "\n".join(["set -eu", *render_activation_lines(plan), tell])
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": os.defpath, "PYTHONHOME": "/x", "PYTHONPATH": "/mine"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        str(plan.folder),
        f"{plan.folder}/bin:{os.defpath}",
        f"{folder}/src:{folder}:/mine",
        "unset",
    ]
    assert os.listdir(folder) == os.listdir(plan.source), "nothing in the name was run"
    assert not (folder / "x").exists()


def test_activation_continues_without_the_lock_file(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    plan = plan_environment(
        source(tmp_path / "s", **{"requirements.txt": "six\n"}), environ=environ
    )
    script = "\n".join(["set -eu", *render_activation_lines(plan), "echo here"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("here\n", "", 0)


# --- the verb ---


def test_show_prints_the_plan(
    tmp_path: Path,
    environ: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = source(tmp_path / "s", **{"requirements.txt": "six\n", "pyproject.toml": PROJECT})
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (
        run_and_report_faults(lambda: run_command(["env", "show", "--source", str(folder)]))
        == ExitCode.OK
    )
    output = capsys.readouterr().out
    assert "from         requirements.txt" in output
    assert "ignored      pyproject.toml" in output
    assert "not built yet" in output
    assert (
        run_and_report_faults(
            lambda: run_command(["env", "show", "--source", str(folder), "--json"])
        )
        == ExitCode.OK
    )
    assert json.loads(capsys.readouterr().out)["cache"] == []
    assert (
        run_and_report_faults(lambda: run_command(["env", "show", "--source", "/no/such"]))
        == ExitCode.NOT_FOUND
    )


def test_files_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    place = EnvironmentPaths(tmp_path / "cache" / "envs" / "k")
    place.make_parent()
    assert stat.S_IMODE(place.lock.parent.stat().st_mode) == 0o700
    in_source = EnvironmentPaths(tmp_path / ".venv")
    in_source.make_parent()
    assert (in_source.lock.parent / ".gitignore").read_text() == "*\n"


def test_requirements_may_be_added_that_the_files_do_not_name(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """What Echelon needs on a cluster joins a list, and leaves what is locked as it is."""
    more = ["rich>=13", "psutil>=5"]

    def read(folder: str, **files: str) -> tuple[str, str]:
        where = source(tmp_path / folder, **files)
        plan = plan_environment(where, environ=environ, more=more)
        return plan.build_steps.inputs["requirements.txt"], plan.key

    text, key = read("a", **{"requirements.txt": "six\nRich==13.7\n"})
    assert text == "six\nRich==13.7\npsutil>=5\n"
    plain = plan_environment(tmp_path / "a", environ=environ)
    assert plain.build_steps.inputs["requirements.txt"] == "six\nRich==13.7\n"
    assert plain.key != key
    hashed = "six==1.16.0 --hash=sha256:" + "a" * 64 + "\n"
    assert read("b", **{"requirements.txt": hashed})[0] == hashed
    assert "psutil>=5" in read("c", **{"pyproject.toml": PROJECT})[0]
