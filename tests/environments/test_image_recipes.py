"""`echelon env build --container`: recipes of every kind of file, and a real build by podman."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command_runner import run_here
from container_images import (
    make_podman_variables,
    make_python_image,
    require_containers,
    require_runs,
)
from wheels import wheel

from echelon.errors import ExitCode

OWN = "printf '%s\\n' 'torch>=2.4' 'numpy>=1.24' 'hydra-core<1.4,>=1.3'"
BUILD = ("env", "build", "--container")
NO_SETTINGS = {name: "" for name in ("PIP_FIND_LINKS", "PIP_CERT", "PIP_INDEX_URL", "PIP_PROXY")}


def recipe(source: Path, *options: str, **variables: str) -> str:
    settings = NO_SETTINGS | {"PIP_DEFAULT_TIMEOUT": "", "PIP_CONFIG_FILE": "/dev/null"}
    done = run_here([*BUILD, "--recipe", *options], source, **settings | variables)
    assert done.code == ExitCode.OK, done.err
    return done.out


def test_requirements_become_lines_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        'rich>=13; python_version > "3.8"  # it\'s a table\n-c limits.txt\n--pre\n'
    )
    (tmp_path / "limits.txt").write_text("rich<15\n")
    text = recipe(tmp_path, "--base", "python:3.12-slim")
    first, start, *rest = text.splitlines()
    assert first.startswith("# The environment of requirements.txt, limits.txt, made by `echelon")
    assert start == "FROM python:3.12-slim"
    assert rest[0] == (
        "RUN printf '%s\\n' 'rich>=13; python_version > \"3.8\"' > /tmp/requirements.txt \\"
    )
    assert rest[1] == " && printf '%s\\n' 'rich<15' > /tmp/constraints.txt \\"
    assert rest[2].endswith("--requirement /tmp/requirements.txt --constraint /tmp/constraints.txt")
    assert " --pre " in rest[2]
    assert rest[3].startswith(f"RUN {OWN}")


def test_apptainer_gets_a_definition_of_the_same(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("rich\n")
    text = recipe(tmp_path, "--builder", "apptainer", "--base", "docker://python:3.12-slim")
    lines = text.splitlines()
    assert lines[:2] == ["Bootstrap: docker", "From: python:3.12-slim"]
    assert "%post" in lines
    assert any(line.strip().startswith("printf '%s\\n' rich > /tmp/req") for line in lines)
    local = recipe(tmp_path, "--builder", "apptainer", "--base", "/images/a.sif")
    assert local.splitlines()[:2] == ["Bootstrap: localimage", "From: /images/a.sif"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        (
            "environment.yml",
            "dependencies:\n- python=3.11\n- numpy\n",
            ("COPY environment.yml /opt/echelon-files/", "micromamba install --yes --name base"),
        ),
        (
            "uv.lock",
            'version = 1\nrequires-python = ">=3.10"\n',
            ("COPY uv.lock pyproject.toml", "uv export --locked --no-dev --no-emit-project"),
        ),
        (
            "Pipfile",
            '[packages]\nrich = "*"\n',
            ("COPY Pipfile ", "pipenv lock && pipenv requirements > /tmp/requirements.txt"),
        ),
        ("pyproject.toml", '[project]\nname = "a"\ndependencies = ["rich>=13"]\n', ("'rich>=13'",)),
    ],
)
def test_every_kind_of_file_without_its_tool_here(
    tmp_path: Path, name: str, content: str, parts: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(content)
    if name == "uv.lock":
        (tmp_path / "pyproject.toml").write_text(
            '[project]\nname = "a"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = []\n'
        )
    text = recipe(tmp_path, PATH="/nowhere").replace(" \\\n &&", " &&")
    for part in parts:
        assert part in text
    assert OWN in text


def test_what_an_image_cannot_take_over_is_refused(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "setup.py").touch()
    lines = "./package\nx @ https://me:secret@example.org/x-1-py3-none-any.whl\n"
    (tmp_path / "requirements.txt").write_text(lines)
    done = run_here([*BUILD, "--recipe", "--base", "a b"], tmp_path)
    assert done.code == ExitCode.USAGE
    for part in ("requirements.txt:1 installs files", "requirements.txt:2 has a password", "'a b'"):
        assert part in done.err
    assert "secret" not in done.output


def test_without_a_builder_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("rich\n")
    done = run_here([*BUILD], tmp_path, PATH="/nowhere")
    assert done.code == ExitCode.NOT_FOUND
    assert "none of podman, apptainer and ch-image is on the PATH" in done.err
    assert "--recipe" in done.err
    assert run_here([*BUILD, "--builder", "docker"], tmp_path).code == ExitCode.USAGE
    assert run_here(["env", "build", "--recipe"], tmp_path).code == ExitCode.USAGE
    (tmp_path / "requirements.txt").unlink()
    assert run_here([*BUILD], tmp_path).code == ExitCode.NOT_FOUND


@pytest.mark.slow
def test_podman_builds_an_image_once(tmp_path: Path) -> None:
    require_containers()
    variables = make_podman_variables(tmp_path)
    image = make_python_image(tmp_path)
    require_runs(image, "podman", variables)
    base, source, wheels = f"localhost/{tmp_path.name}:1", tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    (source / "requirements.txt").write_text("mine==1.0\n")
    for name in ("mine", "torchmetrics", "rich", "psutil", "xxhash", "packaging", "pyyaml"):
        wheel(wheels, name, "99.0" if name != "mine" else "1.0")
    exact = (("torch", "2.9"), ("numpy", "1.99"), ("hydra_core", "1.3.2"), ("omegaconf", "2.3.1"))
    for name, version in exact:
        wheel(wheels, name, version)
    wheel(wheels, "tomli", "99.0")
    podman = ["podman"]
    env = {"PATH": "/usr/bin:/usr/sbin:/bin", "HOME": str(tmp_path), **variables}
    with subprocess.Popen(["tar", "-C", str(image), "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run([*podman, "import", "-", base], stdin=packed.stdout, env=env, check=True)
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": "/dev/null"}
    made = ""
    try:
        words = [*BUILD, "--base", base, "--builder", "podman", "--json"]
        done = run_here(words, source, **variables, **settings, ECHELON_CACHE=str(tmp_path / "c"))
        assert done.code == ExitCode.OK, done.err
        told = json.loads(done.out)
        made = told["image"]
        assert (told["runtime"], made) == ("podman", f"localhost/echelon-env:{told['key']}")
        assert "building" in done.err
        program = "import mine, torch; print(mine.version)"
        seen = subprocess.run(
            [
                *podman,
                "run",
                "--rm",
                made,
                "python3",
                "-c",
                program,
            ],
            env=env,
            capture_output=True,
            text=True,
        )
        assert seen.stdout == "1.0\n", seen.stderr
        again = run_here(words, source, **variables, **settings, ECHELON_CACHE=str(tmp_path / "c"))
        assert json.loads(again.out)["image"] == made
        assert again.err == ""
        # What is missing is named by the builder.
        (source / "requirements.txt").write_text("mine==2.0\n")
        failed = run_here(words, source, **variables, **settings, ECHELON_CACHE=str(tmp_path / "c"))
        assert failed.code == ExitCode.FAILED
        assert "mine==2.0" in failed.err
        assert "podman could not build the image" in failed.err
    finally:
        for name in filter(None, (made, base)):
            subprocess.run([*podman, "rmi", "--force", name], env=env, capture_output=True)
