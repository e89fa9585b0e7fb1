"""Every test runs in the same surroundings, whoever starts them: a person at a terminal, `nohup`,
cron, `env -i`, another locale or umask, a home folder with settings of its own.

What a test is about it sets itself, over what is set here.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store_server import ObjectStoreServer, serve_object_store

from echelon.object_store.client import stop_store_process

KEPT = (
    *("PATH", "TMPDIR", "USER", "LOGNAME", "PYTHONPATH", "http_proxy", "https_proxy", "no_proxy"),
    *("ECHELON_CLUSTER", "ECHELON_REQUIRE_CLUSTER", "ECHELON_MOVIELENS_ZIP"),  # see CONTRIBUTING.md
    *("PIP_", "UV_", "SSL_", "REQUESTS_CA_BUNDLE"),  # where packages come from
    *("CUDA_", "NVIDIA_", "NCCL_", "LD_LIBRARY_PATH", "TORCH", "TRITON_"),  # how GPUs are reached
    *("PYTEST_", "HYPOTHESIS_"),
)
"""Variables that are left as they are, by the beginnings of their names."""

FIXED = {
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # sums in one order; and tests run beside each other
}

with contextlib.suppress(ImportError):  # a machine that only runs the tests of GPUs may lack it
    import hypothesis

    # An example has no time limit: a busy machine may stop it for longer than any.
    hypothesis.settings.register_profile(
        "any-load", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any-load")

_home = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Once for a session: the processes of pytest-xdist inherit it."""
    if hasattr(config, "workerinput"):
        return
    config.stash[_home] = home = tempfile.mkdtemp(prefix="echelon-tests-home-")
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    os.environ.clear()
    os.environ.update({"PATH": os.defpath} | kept | FIXED | {"HOME": home})
    os.umask(0o022)  # modes of files are compared
    _forget_inherited_signals()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _home in config.stash:
        shutil.rmtree(config.stash[_home], ignore_errors=True)


def _forget_inherited_signals() -> None:
    """An ignored signal stays ignored in every process that a test starts (nohup ignores SIGHUP, a
    script's `&` ignores SIGINT). A handler that does nothing spares this process alike, and is
    forgotten by those that it starts."""
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores these
        if signal.getsignal(number) is signal.SIG_IGN:
            with contextlib.suppress(OSError):
                signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


@pytest.fixture(autouse=True)
def _seed_torch(request: pytest.FixtureRequest) -> None:
    """pytest-randomly seeds `random` before every test, from its own seed and the test's name. Here
    torch follows, where it is used at all: a failing seed brings back the same numbers."""
    if torch := sys.modules.get("torch"):
        is_random = request.config.pluginmanager.hasplugin("randomly")
        torch.manual_seed(random.getrandbits(63) if is_random else 0)


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """An empty folder for what ranks write down (ECHELON_TEST_TRACE)."""
    folder = tmp_path / "trace"
    folder.mkdir()
    return folder


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectStoreServer]:
    """A bucket on a real server of S3's protocol, which the environment leads to."""
    with serve_object_store() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
        yield server
        stop_store_process()
