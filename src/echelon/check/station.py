"""One node during a preflight: it answers orders, a line of JSON each, from standard input.

What it finds out goes to standard output, over ssh or srun: a road that stays open when the nodes
cannot reach each other, which is what is to be found out. When its input closes, it ends.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import json
import os
import platform
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil

import echelon
from echelon.check import devices
from echelon.check.facts import addresses_of, disk, how_it_ended
from echelon.config.schema import Config, build
from echelon.gpus import visible_count
from echelon.launch import interface
from echelon.launch.node import network_variables, variables
from echelon.launch.slurm.script import FIRST_PORT, PORTS
from echelon.launch.ssh.tether import MARK, own_address
from echelon.utils.os_errors import describe_os_error
from echelon.utils.processes import die_with_parent

_CONNECT_S = 4.0
_PINGS = 8
_CHUNK = 1 << 20
_AT_ONCE = 64

Reply = dict[str, Any]


def main() -> NoReturn:
    node = int(sys.argv[1]) if len(sys.argv) > 1 else int(os.environ["SLURM_PROCID"])
    station = Station(node)
    station.say({"hello": socket.gethostname()})
    # Orders are obeyed in a thread, so that the end of the input is noticed meanwhile.
    with ThreadPoolExecutor(1) as obeying:
        for line in sys.stdin:
            order = json.loads(line)
            if node in order["to"]:
                obeying.submit(station.obey, order)
        os._exit(0)  # and what was started ends with us


class Station:
    def __init__(self, node: int) -> None:
        self._node = node
        self._config = Config()
        self._key = ""
        self._address = ""
        self._held = _held_port()

    def say(self, message: Reply) -> None:
        # One write: srun may mix the lines of several nodes, but not within one.
        sys.stdout.write(f"{MARK}{json.dumps(message | {'node': self._node})}\n")
        sys.stdout.flush()

    def obey(self, order: Mapping[str, Any]) -> None:
        does: dict[str, Callable[..., Reply]] = {
            "look": self.look,
            "meet": self.meet,
            "send": self.send,
            "reduce": self.reduce,
        }
        try:
            answer = does[order["do"]](**order["with"])
        except Exception as error:  # of this node alone: the others go on
            answer = {"trouble": f"{type(error).__name__}: {error}"}
        self.say({"id": order["id"], "answer": answer})

    # --- what is here ---

    def look(self, config: Reply, nodes: int, key: str, token: str, folder: str) -> Reply:
        self._config, self._key = build(config), key
        self._address = _own_address(self._config.launch.kind, nodes)
        port, trouble = self._listen()
        entry = str(self._config.experiment.get("entry", "")).rpartition(":")[0]
        return {
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "address": self._address,
            "port": port,
            "port_trouble": trouble,
            "free_port": self._held.getsockname()[1],
            "python": platform.python_version(),
            "torch": _version("torch"),
            "echelon": echelon.__version__,
            "code": _hash_of(sorted(Path(echelon.__file__).parent.rglob("*.py"))),
            "entry": _hash_of([Path(entry)]) if os.path.isfile(entry) else None,
            "config": _hash_of([Path(folder, "config.json")]),
            "interfaces": _interfaces(),
            "shared": os.path.exists(token),
            "disks": [
                disk("runs", Path(folder))._asdict(),
                disk("tmp", Path(os.environ.get("TMPDIR") or "/tmp"))._asdict(),
            ],
            "visible": visible_count(os.environ),
            "gpus": devices.look(os.environ),
        }

    def _listen(self) -> tuple[int, str]:
        """Where the training would: with Slurm node 0 has a port of the job's own."""
        wanted, trouble = 0, ""
        job = os.environ.get("SLURM_JOB_ID", "")
        if self._config.launch.kind == "slurm" and self._node == 0 and job.isdecimal():
            wanted = FIRST_PORT + int(job) % PORTS
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        where = "::" if family == socket.AF_INET6 else "0.0.0.0"
        try:
            listener = socket.create_server((where, wanted), family=family, backlog=_AT_ONCE)
        except OSError as error:
            trouble = f"port {wanted} is taken: {describe_os_error(error)}"
            listener = socket.create_server((where, 0), family=family, backlog=_AT_ONCE)
        serve = threading.Thread(target=_serve, args=(listener, self._key), daemon=True)
        serve.start()
        return int(listener.getsockname()[1]), trouble

    # --- the others ---

    def meet(self, nodes: list[Reply]) -> Reply:
        """Names both ways, the interface, TCP to every other node, the clock against node 0's."""
        first = nodes[0]
        others = [n for n in nodes if n["node"] != self._node]
        chosen = self._config.launch.interface or os.environ.get("NCCL_SOCKET_IFNAME")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            names = pool.map(lambda n: addresses_of(n["host"]), others)
            backward = pool.submit(_name_of, first["address"])
            tcp = list(pool.map(lambda n: self._knock(n["address"], n["port"]), others))
            return {
                "names": dict(zip((n["node"] for n in others), names, strict=True)),
                "backward": backward.result(),
                "interface": interface.towards(first["address"]),
                "chosen": chosen,
                "tcp": {n["node"]: t["trouble"] for n, t in zip(others, tcp, strict=True)},
                "clock": next(
                    (t for n, t in zip(others, tcp, strict=True) if n["node"] == first["node"]),
                    None,
                ),
            }

    def _knock(self, address: str, port: int) -> Reply:
        try:
            with self._open(address, port) as connection:
                return {"trouble": "", **_compare_clocks(connection)}
        except OSError as error:
            return {"trouble": describe_os_error(error)}

    def _open(self, address: str, port: int) -> socket.socket:
        connection = socket.create_connection((address, port), timeout=_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._key.encode() + b"\n")
        return connection

    def send(self, address: str, port: int, limit_s: float, limit_bytes: int) -> Reply:
        """As fast as one connection goes; what arrived, and in which time, the other end says."""
        with self._open(address, port) as connection:
            # Of a slow link the buffers must not hold seconds.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHUNK)
            connection.sendall(json.dumps({"sink": limit_s}).encode() + b"\n")
            deadline, left, data = time.monotonic() + limit_s, limit_bytes, bytes(_CHUNK)
            while left > 0 and time.monotonic() < deadline:
                ready, writable, _ = select.select([connection], [connection], [], 0.1)
                if ready:
                    break
                if writable:
                    left -= connection.send(data[: min(_CHUNK, left)], socket.MSG_DONTWAIT)
            if left <= 0:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(limit_s + _CONNECT_S)
            told: Reply = json.loads(_line(connection))
            drop = struct.pack("ii", 1, 0)  # what is still on its way is of no use to anybody
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, drop)
            return told

    # --- all together ---

    def reduce(
        self,
        host: str,
        port: int,
        first: int,
        count: int,
        size: int,
        numbers: int,
        limit_s: float,
    ) -> Reply:
        """The ranks of this node; one that does not come in time is killed."""
        env = dict(os.environ) | variables(self._config, count, os.environ)
        env |= network_variables(self._config, host, os.environ)
        env |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        deadline = time.monotonic() + limit_s
        words = [sys.executable, "-m", "echelon.check.reduce", str(numbers), str(limit_s)]
        processes = [
            subprocess.Popen(
                words,
                env=env | {"RANK": str(first + local), "LOCAL_RANK": str(local)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            for local in range(count)
        ]
        with ThreadPoolExecutor(count) as pool:
            ranks = list(pool.map(lambda p: _ended(p, deadline), processes))
        failed = any(rank["trouble"] for rank in ranks)
        return {"ranks": [r | {"rank": first + i} for i, r in enumerate(ranks)], "failed": failed}


def _ended(process: subprocess.Popen[bytes], deadline: float) -> Reply:
    try:
        out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"trouble": "did not come to an end in time"}
    said = out.decode(errors="replace").strip().splitlines()
    if process.returncode == 0 and said:
        told: Reply = json.loads(said[-1])
        return told | {"trouble": ""}
    return {"trouble": how_it_ended(process.returncode, err.decode(errors="replace"))}


# --- facts ---


def _own_address(kind: str, nodes: int) -> str:
    """The one that others reach this node at, as the launcher would take it."""
    if kind == "ssh":
        return own_address(nodes).strip("[]")
    if kind == "slurm" and nodes > 1:
        towards = os.environ.get("SLURM_SRUN_COMM_HOST") or "192.0.2.1"
        return interface.local_address(towards) or "127.0.0.1"
    return "127.0.0.1"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hash_of(files: list[Path]) -> str | None:
    """Of their names and what is in them; None where one cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()[:12]


def _held_port() -> socket.socket:
    """For the all-reduce. Bound, but not listening, and so that who asks for this very port by
    number (as torch does) gets it, but nobody is given it by chance meanwhile."""
    held = socket.socket(socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("0.0.0.0", 0))
    return held


def _interfaces() -> list[str]:
    stats = psutil.net_if_stats()
    return [name for name in psutil.net_if_addrs() if name in stats and stats[name].isup]


def _name_of(address: str) -> str | None:
    try:
        return socket.gethostbyaddr(address)[0]
    except OSError:
        return None


# --- between two stations ---


def _serve(listener: socket.socket, key: str) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, key), daemon=True).start()


def _answer(connection: socket.socket, key: str) -> None:
    with connection:
        connection.settimeout(_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if not hmac.compare_digest(_line(connection), key):
                return  # a stranger
            while line := _line(connection):
                order = json.loads(line)
                if "sink" in order:
                    _take_all(connection, float(order["sink"]))
                    return
                connection.sendall(json.dumps(time.time()).encode() + b"\n")
        except (OSError, ValueError):
            return


def _take_all(connection: socket.socket, limit_s: float) -> None:
    connection.settimeout(limit_s + _CONNECT_S)
    buffer = bytearray(_CHUNK)
    taken, began = connection.recv_into(buffer), time.monotonic()
    first, now = taken, began
    while now - began < limit_s and (data := connection.recv_into(buffer)):
        taken, now = taken + data, time.monotonic()
    # What came first was under way before the watch was started.
    told = {"bytes": taken - first, "s": max(now - began, 1e-6)}
    connection.sendall(json.dumps(told).encode() + b"\n")
    while connection.recv_into(buffer):  # until it has read that, and hangs up
        pass


def _compare_clocks(connection: socket.socket) -> Reply:
    """As NTP does: the quickest of a few round trips errs least, by half its time at most."""
    trips = []
    for _ in range(_PINGS):
        before = time.time()
        connection.sendall(b"{}\n")
        theirs = float(_line(connection))
        after = time.time()
        trips.append((after - before, (before + after) / 2 - theirs))
    round_s, ahead_s = min(trips)
    return {"round_s": round_s, "ahead_s": ahead_s}


def _line(connection: socket.socket) -> str:
    """Byte by byte: what follows is not ours to read."""
    text = b""
    while not text.endswith(b"\n") and len(text) < 4096:
        data = connection.recv(1)
        if not data:
            break
        text += data
    return text.decode(errors="replace").strip()


if __name__ == "__main__":
    main()
