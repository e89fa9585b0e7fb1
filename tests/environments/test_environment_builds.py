"""Environments built for real, from wheels made here: killed, broken, shared, in use, cleaned."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from wheels import wheel

from echelon.environments import (
    EnvironmentPlan,
    build_environment,
    plan_environment,
    render_activation_lines,
)
from echelon.environments.build_lock import lock_if_unused
from echelon.environments.cache import EnvironmentPaths, clean_cache, list_cached_environments
from echelon.errors import EchelonError

pytestmark = pytest.mark.slow

BUILD = [sys.executable, "-m", "echelon", "env", "build", "--source"]
LIMIT_S = 300.0


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """No network: packages come from a folder of wheels."""
    own = {
        "ECHELON_CACHE": str(tmp_path / "cache"),
        "UV_CACHE_DIR": str(tmp_path / "uv-cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        "PIP_EXTRA_INDEX_URL": "",
    }
    wheel(tmp_path / "wheels", "tiny")
    wheel(tmp_path / "wheels", "tiny", "2.0")
    wheel(tmp_path / "wheels", "other", needs="tiny")
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return dict(os.environ)


@pytest.fixture
def uv(environ: dict[str, str]) -> str:
    found = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if not found:
        pytest.skip("no uv here")
    return found


def source(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def record_lines(plan: EnvironmentPlan, code: str) -> str:
    """What Python prints in a shell that has entered the environment."""
    script = "\n".join(["set -eu", *render_activation_lines(plan), 'python -c "$CODE"'])
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": os.defpath, "CODE": code},
        cwd=plan.source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(found: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline
        if process and process.poll() is not None:
            return
        time.sleep(0.001)


@pytest.mark.parametrize("builder", ["uv", "pip"])
def test_an_environment_is_built_once(
    tmp_path: Path,
    environ: dict[str, str],
    builder: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if builder == "uv":
        request.getfixturevalue("uv")
    monkeypatch.setenv("ECHELON_ENV_BUILDER", builder)
    lines = "-c limits.txt\nother\n"
    folder = source(
        tmp_path / "it's a $ource é", **{"requirements.txt": lines, "limits.txt": "tiny<2\n"}
    )
    said: list[str] = []
    plan = plan_environment(folder)
    assert build_environment(plan, said.append) == plan.folder
    assert plan.builder == builder
    assert said[0].startswith("building")
    assert record_lines(plan, "import tiny, other; print(tiny.version)") == "1.0"
    assert list(plan.folder.parent.glob("*.inputs")) == []

    again = plan_environment(folder)
    assert again.ready
    said.clear()
    build_environment(again, said.append)
    assert said == []

    (folder / "requirements.txt").write_text("other\nno-such-thing==7\n")
    with pytest.raises(EchelonError) as caught:
        build_environment(plan_environment(folder), said.append)
    failed = str(caught.value)
    assert ": no-such-thing==7 (requirements.txt:2)" in failed
    log = EnvironmentPaths(plan_environment(folder).folder).log
    assert str(log) in failed
    assert "no-such-thing" in log.read_text()
    assert not plan_environment(folder).folder.exists()


class _Index(BaseHTTPRequestHandler):
    """A simple index of one package, for who has the password."""

    wheel: Path
    password: str

    def do_GET(self) -> None:
        expected = base64.b64encode(f"user:{self.password}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {expected}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()
            return
        page = f'<!DOCTYPE html><a href="/{self.wheel.name}">{self.wheel.name}</a>'.encode()
        found = {"/simple/hidden/": page, f"/{self.wheel.name}": self.wheel.read_bytes()}
        body = found.get(self.path)
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "text/html" if body == page else "application/zip")
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    do_HEAD = do_GET  # uv asks for the size of a wheel first

    def log_message(self, *_: object) -> None:
        pass


def test_uv_uses_the_index_of_pip_conf_and_its_password_is_not_stored(
    tmp_path: Path, uv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = "canary-4e1b"
    index = {"wheel": wheel(tmp_path / "served", "hidden"), "password": canary}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Index", (_Index,), index))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    conf = f"[global]\nindex-url = http://user:{canary}@127.0.0.1:{server.server_port}/simple\n"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(source(tmp_path / "c", conf=conf) / "conf"))
    monkeypatch.delenv("PIP_NO_INDEX")
    said: list[str] = []
    folder = source(tmp_path / "source", **{"requirements.txt": "hidden\n"})
    build_environment(plan_environment(folder), said.append)
    assert record_lines(plan_environment(folder), "import hidden; print(hidden.version)") == "1.0"
    (folder / "requirements.txt").write_text("hidden\nnot-there\n")
    with pytest.raises(EchelonError, match=r"not-there \(requirements.txt:2\)") as caught:
        build_environment(plan_environment(folder), said.append)
    server.shutdown()
    server.server_close()
    kept_texts = [
        path.read_bytes()
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    assert canary.encode() not in b"".join(kept_texts)
    assert canary not in "".join([*said, str(caught.value)])


def has_match(folder: Path, pattern: str) -> bool:
    """Whether a file is there; none while the builder removes the folder that is being listed."""
    with contextlib.suppress(FileNotFoundError):
        return any(folder.glob(pattern))
    return False


def test_builds_survive_kills_and_concurrent_builders(tmp_path: Path, uv: str) -> None:
    folder = source(tmp_path / "source", **{"requirements.txt": "other\n"})
    plan = plan_environment(folder)
    place = EnvironmentPaths(plan.folder)
    library = plan.folder / "lib"
    moments: list[Callable[[], bool]] = [
        place.lock.exists,
        place.building_marker.exists,
        place.log.exists,
        (place.inputs_folder / "requirements.txt").exists,
        plan.folder.exists,
        (plan.folder / "pyvenv.cfg").exists,
        lambda: has_match(library, "*/site-packages/tiny.py"),
        lambda: has_match(library, "*/site-packages/*.dist-info/RECORD"),
        lambda: has_match(plan.folder, f".{place.marker.stem}.*.json"),
        place.marker.exists,
    ]
    for moment in moments:
        process = subprocess.Popen([*BUILD, str(folder)], stderr=subprocess.DEVNULL, text=True)
        wait_for(moment, process)
        process.kill()
        process.wait()
        if plan_environment(folder).ready:
            assert record_lines(plan, "import tiny, other; print(tiny.version)") == "2.0"
            shutil.rmtree(plan.folder)

    (plan.folder / "half").mkdir(parents=True)
    both = [
        subprocess.Popen([*BUILD, str(folder)], stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    told = [process.communicate(timeout=LIMIT_S)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("building" in text for text in told) == 1, told
    assert "its build did not finish" in "".join(told)
    assert record_lines(plan, "import tiny, other; print(tiny.version)") == "2.0"
    assert not (plan.folder / "half").exists()


def test_a_killed_builder_kills_its_child(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the child would write into what the next builder makes."""
    pid = tmp_path / "pid"
    stand_in = (
        source(
            tmp_path / "bin",
            uv=f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}\nexec sleep 600\n",
        )
        / "uv"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    folder = source(tmp_path / "source", **{"requirements.txt": "tiny\n"})
    process = subprocess.Popen([*BUILD, str(folder)], stderr=subprocess.DEVNULL)
    wait_for(pid.exists)
    child = int(pid.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: _is_gone(child))
    assert not plan_environment(folder).ready


def _is_gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_broken_environment_is_rebuilt(tmp_path: Path, uv: str) -> None:
    folder = source(tmp_path / "source", **{"requirements.txt": "tiny\n"})
    plan = plan_environment(folder)
    said: list[str] = []
    build_environment(plan, said.append)

    python = EnvironmentPaths(plan.folder).python_executable()
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert not plan_environment(folder).ready, "the base interpreter is gone"
    build_environment(plan, said.append)

    (record,) = plan.folder.glob("lib/*/site-packages/tiny*.dist-info/METADATA")
    record.unlink()
    build_environment(plan, said.append)
    assert sum("it no longer works" in line for line in said) == 2
    assert record_lines(plan, "import tiny; print(tiny.version)") == "2.0"


def test_a_venv_in_the_source_is_built_but_a_users_own_is_kept(tmp_path: Path, uv: str) -> None:
    folder = source(tmp_path / "source", **{"requirements.txt": "tiny==1.0\n"})
    plan = plan_environment(folder, "source")
    assert build_environment(plan, lambda _: None) == folder / ".venv"
    (folder / "requirements.txt").write_text("tiny==2.0\n")
    assert not plan_environment(folder, "source").ready
    build_environment(plan_environment(folder, "source"), lambda _: None)
    assert (
        record_lines(plan_environment(folder, "source"), "import tiny; print(tiny.version)")
        == "2.0"
    )
    (folder / ".venv" / EnvironmentPaths(folder / ".venv").marker.name).unlink()
    with pytest.raises(EchelonError, match="was not made by Echelon"):
        build_environment(plan_environment(folder, "source"), lambda _: None)
    assert (folder / ".venv" / "pyvenv.cfg").exists()


def test_lock_files_of_pipenv_and_uv_are_installed(tmp_path: Path, uv: str) -> None:
    """Hashes are checked, and a project's own code is found in the job's folder."""
    good = hashlib.sha256((tmp_path / "wheels" / "tiny-1.0-py3-none-any.whl").read_bytes())
    folder = source(tmp_path / "pipfile", Pipfile='[packages]\ntiny = "*"\n')
    for digest, works in ((good.hexdigest(), True), ("0" * 64, False)):
        entry = {"version": "==1.0", "hashes": [f"sha256:{digest}"]}
        (folder / "Pipfile.lock").write_text(json.dumps({"default": {"tiny": entry}}, indent=4))
        if works:
            build_environment(plan_environment(folder), lambda _: None)
            assert (
                record_lines(plan_environment(folder), "import tiny; print(tiny.version)") == "1.0"
            )
        else:
            with pytest.raises(EchelonError, match=r"tiny==1.0 \(Pipfile.lock:3\)"):
                build_environment(plan_environment(folder), lambda _: None)

    text = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["tiny<2"]\n'
    folder = source(tmp_path / "uv", **{"pyproject.toml": f'{text}requires-python = ">=3.10"\n'})
    source(folder / "src", **{"mine.py": "import tiny\n"})
    offline = [uv, "lock", "--no-index", "--find-links", os.environ["PIP_FIND_LINKS"]]
    subprocess.run([*offline, "--python", sys.executable, "-q"], cwd=folder, check=True)
    plan = plan_environment(folder)
    assert plan.kind == "uv.lock"
    build_environment(plan, lambda _: None)
    assert record_lines(plan, "import mine; print(mine.tiny.version)") == "1.0"


BACKEND = """
import os, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name, info = "mine-1-py3-none-any.whl", "mine-1.dist-info"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as archive:
        archive.write("mine.py")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: mine\\nVersion: 1\\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\n")
        archive.writestr(f"{info}/RECORD", "")
    return name
"""
ITS_PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "mine"
version = "1"
"""


@pytest.mark.parametrize("kind", ["requirements", "uv.lock"])
def test_a_local_project_is_installed_as_it_is_now(tmp_path: Path, uv: str, kind: str) -> None:
    folder = source(tmp_path / "source", **{"requirements.txt": "./lib\n"})
    lib = source(folder / "lib", **{"backend.py": BACKEND, "pyproject.toml": ITS_PROJECT})
    if kind == "uv.lock":
        (folder / "requirements.txt").unlink()
        asked = 'name = "all"\nversion = "1"\nrequires-python = ">=3.9"\ndependencies = ["mine"]\n'
        text = f'[project]\n{asked}[tool.uv.sources]\nmine = {{ path = "./lib" }}\n'
        (folder / "pyproject.toml").write_text(text)
    for value in ("1", "2"):
        (lib / "mine.py").write_text(f"value = {value}\n")
        if kind == "uv.lock":
            subprocess.run([uv, "lock", "-q", "--no-index"], cwd=folder, check=True)
        plan = plan_environment(folder)
        build_environment(plan, lambda _: None)
        assert record_lines(plan, "import mine; print(mine.value)") == value


def test_a_venv_that_a_job_runs_in_is_not_rebuilt(tmp_path: Path, uv: str) -> None:
    folder = source(tmp_path / "source", **{"requirements.txt": "tiny==1.0\n"})
    plan = plan_environment(folder, "source")
    build_environment(plan, lambda _: None)
    (folder / "requirements.txt").write_text("tiny==2.0\n")
    job = ["bash", "-c", "\n".join([*render_activation_lines(plan), "echo in; read -r _"])]
    with subprocess.Popen(job, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout
        running.stdout.readline()
        with pytest.raises(EchelonError, match="a job is running in it"):
            build_environment(plan_environment(folder, "source"), lambda _: None)
        running.communicate("\n")
    build_environment(plan_environment(folder, "source"), lambda _: None)
    assert record_lines(plan, "import tiny; print(tiny.version)") == "2.0"


def test_clean_keeps_environments_in_use(tmp_path: Path, uv: str) -> None:
    folder = source(tmp_path / "source", **{"requirements.txt": "tiny\n"})
    plan = plan_environment(folder)
    build_environment(plan, lambda _: None)
    (tmp_path / "cache" / "envs" / "half").mkdir()
    environ = os.environ
    said: list[str] = []

    def clean(**how: bool) -> str:
        said.clear()
        given = {"everything": False, "dry_run": False} | how
        clean_cache(environ, 30, given["everything"], given["dry_run"], said.append)
        return "\n".join(said)

    job = ["bash", "-c", "\n".join([*render_activation_lines(plan), "echo in; read -r _"])]
    with subprocess.Popen(job, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout
        assert running.stdin
        running.stdout.readline()
        with lock_if_unused(EnvironmentPaths(plan.folder).use_lock) as alone:
            assert not alone
        assert f"kept {plan.key}: a job is running in it" in clean(everything=True)
        running.stdin.write("\n")
    assert not (tmp_path / "cache" / "envs" / "half").exists()
    assert clean() == "", "used a moment ago"
    assert f"would remove {plan.key}" in clean(everything=True, dry_run=True)
    long_ago = time.time() - 31 * 86400
    os.utime(EnvironmentPaths(plan.folder).use_lock, (long_ago, long_ago))
    assert f"removed {plan.key}: requirements.txt of {folder}" in clean()
    assert list_cached_environments(environ) == []
    assert os.listdir(tmp_path / "cache" / "envs") == []


def test_a_conda_environment_is_built_and_activated(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in with conda's command line, as there is none to be had without its installer."""
    stand_in = (
        source(
            tmp_path / "bin",
            conda=f"""#!/bin/sh
[ "$1 $2 $3 $5" = "env create --prefix --file" ] && [ $# = 6 ] || exit 2
if grep -q no-such "$6"; then
    printf 'Solving environment: failed\\n\\nResolvePackageNotFound: \\n  - no-such-pkg=1\\n' >&2
    exit 1
fi
mkdir -p "$4/bin" "$4/etc/conda/activate.d" "$4/conda-meta"
ln -s {sys.executable} "$4/bin/python"
echo 'export FROM_CONDA=yes' > "$4/etc/conda/activate.d/x.sh"
""",
        )
        / "conda"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.defpath}")
    folder = source(tmp_path / "source", **{"environment.yml": "dependencies:\n- python\n"})
    plan = plan_environment(folder)
    build_environment(plan, lambda _: None)
    assert plan_environment(folder).ready
    code = "import os; print(os.environ['FROM_CONDA'], os.environ['CONDA_PREFIX'])"
    assert record_lines(plan, code) == f"yes {plan.folder}"
    (folder / "environment.yml").write_text("dependencies:\n- python\n- no-such-pkg=1\n")
    with pytest.raises(EchelonError, match=r"no-such-pkg=1 \(environment.yml:3\)"):
        build_environment(plan_environment(folder), lambda _: None)


def test_an_unwritable_cache_is_reported(
    tmp_path: Path, uv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = source(tmp_path / "source", **{"requirements.txt": "tiny\n"})
    monkeypatch.setenv("ECHELON_CACHE", str(source(tmp_path, file="") / "file"))
    with pytest.raises(EchelonError, match="cannot be written: not a directory"):
        build_environment(plan_environment(folder))


@pytest.mark.campaign
def test_pipenv_is_installed_for_a_pipfile_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs an index, by pip's own settings."""
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    folder = source(tmp_path / "source", Pipfile='[packages]\nsix = "*"\n')
    build_environment(plan_environment(folder))
    assert record_lines(plan_environment(folder), "import six; print(six.__name__)") == "six"
    assert [path.name for path in folder.iterdir()] == ["Pipfile"], "the source is left alone"
