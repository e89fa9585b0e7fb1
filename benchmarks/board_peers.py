"""What the board is measured beside: TensorBoard, Aim, MLflow and Trackio, each from an environment
of its own (scripts/setup_board_peers.sh), with the runs that the board is given.

They are filled once, through their own libraries, for at most ten minutes each: who has not taken
all runs by then is measured with those that it has. Each is started as its documentation says, and
its page is opened as soon as its server answers; TensorBoard's as soon as its server knows all
runs, since its page would not ask again. None is asked for more than its table of runs:

* TensorBoard: all rows of the table beside its time series. It has no settings and no results.
* Aim, MLflow: the first rows of the table, newest first; more of them are loaded on scrolling.
* Trackio: the list of all runs beside the charts; it has no table of runs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from board_data import KEPT, make_once
from common import HERE, environment

ENVIRONMENTS = HERE.parent / ".venv" / "board-peers"
FILL_S = 600.0
OPENING_S = 180.0
FILLED_FILE = "filled.json"


class Peer(NamedTuple):
    name: str
    package: str
    serve: Callable[[Path, int], Sequence[str]]
    """Its program and words, of its folder of data and a port."""
    page: str
    """The path of its table of runs."""
    is_shown: str
    """In JavaScript, for a number of runs and the name of the last one."""
    get_variables: Callable[[Path, int], dict[str, str]] = lambda folder, port: {}
    runs_path: str = ""
    """Where its server says which runs it knows, if its page must not be opened before."""

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.package / "bin" / "python"

    @property
    def version(self) -> str:
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        return subprocess.check_output([self.python, "-c", code], text=True).strip()


class RunningPeer(NamedTuple):
    url: str
    pid: int


class FilledPeer(NamedTuple):
    peer: Peer
    folder: Path
    runs: int
    fill_s: float


HAS_NAME = """
  const names = [...document.querySelectorAll(%r)].map((one) => one.textContent.trim());
  return names.length >= 15 && names.some((name) => name === "%%(last)s");"""
PEERS = (
    Peer(
        "TensorBoard",
        "tensorboard",
        lambda folder, port: ("tensorboard", "--logdir", str(folder), "--port", str(port)),
        "/?#timeseries",
        "return document.querySelectorAll('tb-data-table-content-row').length === %(runs)d",
        runs_path="/data/runs",
    ),
    Peer(
        "Aim",
        "aim",
        lambda folder, port: ("aim", "up", "--repo", str(folder), "--port", str(port), "--yes"),
        "/runs",
        HAS_NAME % ".RunNameColumn__runName",
    ),
    Peer(
        "MLflow",
        "mlflow",
        lambda folder, port: (
            *("mlflow", "server", "--workers", "1", "--port", str(port)),
            *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
        ),
        "/#/experiments/1/runs",
        HAS_NAME % ".ag-pinned-left-cols-container [role=gridcell] a",
    ),
    Peer(
        "Trackio",
        "trackio",
        lambda folder, port: ("trackio", "show", "--project", "toy"),
        "/?project=toy",
        """const text = document.body.innerText;
        return text.includes("Runs (%(runs)d)") && text.includes("%(last)s")""",
        lambda folder, port: {"TRACKIO_DIR": str(folder), "GRADIO_SERVER_PORT": str(port)},
    ),
)


def find_filled_peers(source: Path, runs: int) -> tuple[list[FilledPeer], dict[str, str]]:
    """Return the peers that can be measured, and why the others cannot."""
    found: list[FilledPeer] = []
    missing: dict[str, str] = {}
    for peer in PEERS:
        if not peer.python.exists():
            missing[peer.name] = "not installed: scripts/setup_board_peers.sh"
            continue
        try:
            found.append(fill_peer(peer, source, runs))
        except subprocess.CalledProcessError as error:
            missing[peer.name] = f"could not be filled: {error.stderr.strip()[-300:]}"
    return found, missing


def fill_peer(peer: Peer, source: Path, runs: int) -> FilledPeer:
    def fill(folder: Path) -> None:
        script = HERE / "scripts" / "fill_board_peer.py"
        words = [peer.python, script, peer.name, source, folder, str(FILL_S)]
        done = subprocess.run(
            words, env=environment(**peer.get_variables(folder, 0)), capture_output=True, text=True
        )
        done.check_returncode()
        (folder / FILLED_FILE).write_text(done.stdout.splitlines()[-1])

    folder = make_once(KEPT / f"peer-{peer.name}-{runs}", fill)
    told = json.loads((folder / FILLED_FILE).read_text())
    return FilledPeer(peer, folder, told["runs"], told["seconds"])


def describe_condition(filled: FilledPeer) -> str:
    last = f"toy-{filled.runs - 1:05d}"
    return filled.peer.is_shown % {"runs": filled.runs, "last": last}


@contextlib.contextmanager
def run_peer(filled: FilledPeer, log: Path) -> Iterator[RunningPeer]:
    """Start a peer, and go on as soon as its page can be opened."""
    peer, port = filled.peer, find_free_port()
    program, *words = peer.serve(filled.folder, port)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(peer.python.parent / program), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=filled.folder,
            env=make_environment(peer, filled.folder, port),
            start_new_session=True,
        )
    try:
        wait_until_it_answers(filled, port, process)
        yield RunningPeer(f"http://127.0.0.1:{port}{peer.page}", process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_environment(peer: Peer, folder: Path, port: int) -> dict[str, str]:
    """Nobody is told of its use, and nothing is looked for elsewhere."""
    quiet = {
        "GRADIO_ANALYTICS_ENABLED": "False",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "HF_HUB_OFFLINE": "1",
        "BROWSER": "true",
    }
    return environment(**quiet, **peer.get_variables(folder, port))


def wait_until_it_answers(filled: FilledPeer, port: int, process: subprocess.Popen[bytes]) -> None:
    path = filled.peer.runs_path
    deadline = time.monotonic() + OPENING_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{filled.peer.name} ended with {process.returncode}")
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            answer = ask(port, path or "/")
            if not path or len(json.loads(answer)) == filled.runs:
                return
        time.sleep(0.03)
    raise TimeoutError(f"{filled.peer.name} has not answered after {OPENING_S:g} s")


def ask(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
