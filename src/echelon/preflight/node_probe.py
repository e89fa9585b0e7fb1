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
from echelon.config.schema import Config, build_config
from echelon.doctor.machine_facts import describe_exit, read_disk, resolve_addresses
from echelon.gpus import count_visible_gpus
from echelon.hosts.messages import send_message
from echelon.launch import network_interface
from echelon.launch.node.service import make_network_variables, make_thread_variables
from echelon.launch.slurm.batch_script import FIRST_PORT, PORTS
from echelon.launch.ssh.watchdog import find_own_address
from echelon.preflight import gpu_health
from echelon.utils.os_errors import describe_os_error
from echelon.utils.processes import die_with_parent

_CONNECT_TIMEOUT_S = 4.0
_PINGS = 8
_CHUNK_BYTES = 1 << 20
_MAX_PARALLEL = 64

ProbeAnswer = dict[str, Any]


def main() -> NoReturn:
    node = int(sys.argv[1]) if len(sys.argv) > 1 else int(os.environ["SLURM_PROCID"])
    station = NodeProbe(node)
    station.write_message({"hello": socket.gethostname()})
    # Orders are obeyed in a thread, so that the end of the input is noticed meanwhile.
    with ThreadPoolExecutor(1) as obeying:
        for line in sys.stdin:
            order = json.loads(line)
            if node in order["to"]:
                obeying.submit(station.execute_order, order)
        os._exit(0)  # and what was started ends with us


class NodeProbe:
    def __init__(self, node: int) -> None:
        self._node = node
        self._config = Config()
        self._key = ""
        self._address = ""
        self._held = _reserve_port()

    def write_message(self, message: ProbeAnswer) -> None:
        send_message(message | {"node": self._node})

    def execute_order(self, order: Mapping[str, Any]) -> None:
        does: dict[str, Callable[..., ProbeAnswer]] = {
            "look": self.inspect_node,
            "meet": self.inspect_network,
            "send": self.measure_link,
            "reduce": self.run_ranks,
        }
        try:
            answer = does[order["do"]](**order["with"])
        except Exception as error:  # of this node alone: the others go on
            answer = {"trouble": f"{type(error).__name__}: {error}"}
        self.write_message({"id": order["id"], "answer": answer})

    # --- what is here ---

    def inspect_node(
        self, config: ProbeAnswer, nodes: int, key: str, token: str, folder: str
    ) -> ProbeAnswer:
        self._config, self._key = build_config(config), key
        self._address = _find_own_address(self._config.launch.kind, nodes)
        port, trouble = self._listen()
        entry = str(self._config.experiment.get("entry", "")).rpartition(":")[0]
        return {
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "address": self._address,
            "port": port,
            "port_trouble": trouble,
            "free_port": self._held.getsockname()[1],
            "python": platform.python_version(),
            "torch": _get_installed_version("torch"),
            "echelon": echelon.__version__,
            "code": _hash_files(sorted(Path(echelon.__file__).parent.rglob("*.py"))),
            "entry": _hash_files([Path(entry)]) if os.path.isfile(entry) else None,
            "config": _hash_files([Path(folder, "config.json")]),
            "interfaces": _list_interfaces(),
            "shared": os.path.exists(token),
            "disks": [
                read_disk("runs", Path(folder))._asdict(),
                read_disk("tmp", Path(os.environ.get("TMPDIR") or "/tmp"))._asdict(),
            ],
            "visible": count_visible_gpus(os.environ),
            "gpus": gpu_health.read_gpu_health(os.environ),
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
            listener = socket.create_server((where, wanted), family=family, backlog=_MAX_PARALLEL)
        except OSError as error:
            trouble = f"port {wanted} is taken: {describe_os_error(error)}"
            listener = socket.create_server((where, 0), family=family, backlog=_MAX_PARALLEL)
        serve = threading.Thread(
            target=_accept_connections, args=(listener, self._key), daemon=True
        )
        serve.start()
        return int(listener.getsockname()[1]), trouble

    # --- the others ---

    def inspect_network(self, nodes: list[ProbeAnswer]) -> ProbeAnswer:
        """Names both ways, the interface, TCP to every other node, the clock against node 0's."""
        first = nodes[0]
        others = [n for n in nodes if n["node"] != self._node]
        chosen = self._config.launch.interface or os.environ.get("NCCL_SOCKET_IFNAME")
        with ThreadPoolExecutor(_MAX_PARALLEL) as pool:
            names = pool.map(lambda n: resolve_addresses(n["host"]), others)
            backward = pool.submit(_look_up_name, first["address"])
            tcp = list(pool.map(lambda n: self._test_connection(n["address"], n["port"]), others))
            return {
                "names": dict(zip((n["node"] for n in others), names, strict=True)),
                "backward": backward.result(),
                "interface": network_interface.find_interface_to(first["address"]),
                "chosen": chosen,
                "tcp": {n["node"]: t["trouble"] for n, t in zip(others, tcp, strict=True)},
                "clock": next(
                    (t for n, t in zip(others, tcp, strict=True) if n["node"] == first["node"]),
                    None,
                ),
            }

    def _test_connection(self, address: str, port: int) -> ProbeAnswer:
        try:
            with self._connect(address, port) as connection:
                return {"trouble": "", **_compare_clocks(connection)}
        except OSError as error:
            return {"trouble": describe_os_error(error)}

    def _connect(self, address: str, port: int) -> socket.socket:
        connection = socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._key.encode() + b"\n")
        return connection

    def measure_link(
        self, address: str, port: int, limit_s: float, limit_bytes: int
    ) -> ProbeAnswer:
        """As fast as one connection goes; what arrived, and in which time, the other end says."""
        with self._connect(address, port) as connection:
            # Of a slow link the buffers must not hold seconds.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHUNK_BYTES)
            connection.sendall(json.dumps({"sink": limit_s}).encode() + b"\n")
            deadline, left, data = time.monotonic() + limit_s, limit_bytes, bytes(_CHUNK_BYTES)
            while left > 0 and time.monotonic() < deadline:
                ready, writable, _ = select.select([connection], [connection], [], 0.1)
                if ready:
                    break
                if writable:
                    left -= connection.send(data[: min(_CHUNK_BYTES, left)], socket.MSG_DONTWAIT)
            if left <= 0:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(limit_s + _CONNECT_TIMEOUT_S)
            answer: ProbeAnswer = json.loads(_read_line(connection))
            drop = struct.pack("ii", 1, 0)  # what is still on its way is of no use to anybody
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, drop)
            return answer

    # --- all together ---

    def run_ranks(
        self,
        host: str,
        port: int,
        first: int,
        count: int,
        size: int,
        numbers: int,
        limit_s: float,
    ) -> ProbeAnswer:
        """The ranks of this node; one that does not come in time is killed."""
        env = dict(os.environ) | make_thread_variables(self._config, count, os.environ)
        env |= make_network_variables(self._config, host, os.environ)
        env |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        deadline = time.monotonic() + limit_s
        words = [sys.executable, "-m", "echelon.preflight.all_reduce", str(numbers), str(limit_s)]
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
            ranks = list(pool.map(lambda p: _wait_for_rank(p, deadline), processes))
        failed = any(rank["trouble"] for rank in ranks)
        return {"ranks": [r | {"rank": first + i} for i, r in enumerate(ranks)], "failed": failed}


def _wait_for_rank(process: subprocess.Popen[bytes], deadline: float) -> ProbeAnswer:
    try:
        out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"trouble": "did not come to an end in time"}
    lines = out.decode(errors="replace").strip().splitlines()
    if process.returncode == 0 and lines:
        answer: ProbeAnswer = json.loads(lines[-1])
        return answer | {"trouble": ""}
    return {"trouble": describe_exit(process.returncode, err.decode(errors="replace"))}


# --- facts ---


def _find_own_address(kind: str, nodes: int) -> str:
    """The one that others reach this node at, as the launcher would take it."""
    if kind == "ssh":
        return find_own_address(nodes).strip("[]")
    if kind == "slurm" and nodes > 1:
        towards = os.environ.get("SLURM_SRUN_COMM_HOST") or "192.0.2.1"
        return network_interface.find_local_address(towards) or "127.0.0.1"
    return "127.0.0.1"


def _get_installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hash_files(files: list[Path]) -> str | None:
    """Of their names and what is in them; None where one cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()[:12]


def _reserve_port() -> socket.socket:
    """For the all-reduce. Bound, but not listening, and so that who asks for this very port by
    number (as torch does) gets it, but nobody is given it by chance meanwhile."""
    held = socket.socket(socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("0.0.0.0", 0))
    return held


def _list_interfaces() -> list[str]:
    stats = psutil.net_if_stats()
    return [name for name in psutil.net_if_addrs() if name in stats and stats[name].isup]


def _look_up_name(address: str) -> str | None:
    try:
        return socket.gethostbyaddr(address)[0]
    except OSError:
        return None


# --- between two stations ---


def _accept_connections(listener: socket.socket, key: str) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_connection, args=(connection, key), daemon=True).start()


def _serve_connection(connection: socket.socket, key: str) -> None:
    with connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if not hmac.compare_digest(_read_line(connection), key):
                return  # a stranger
            while line := _read_line(connection):
                order = json.loads(line)
                if "sink" in order:
                    _receive_all(connection, float(order["sink"]))
                    return
                connection.sendall(json.dumps(time.time()).encode() + b"\n")
        except (OSError, ValueError):
            return


def _receive_all(connection: socket.socket, limit_s: float) -> None:
    connection.settimeout(limit_s + _CONNECT_TIMEOUT_S)
    buffer = bytearray(_CHUNK_BYTES)
    taken, began = connection.recv_into(buffer), time.monotonic()
    first, now = taken, began
    while now - began < limit_s and (data := connection.recv_into(buffer)):
        taken, now = taken + data, time.monotonic()
    # What came first was under way before the watch was started.
    measurement = {"bytes": taken - first, "s": max(now - began, 1e-6)}
    connection.sendall(json.dumps(measurement).encode() + b"\n")
    while connection.recv_into(buffer):  # until it has read that, and hangs up
        pass


def _compare_clocks(connection: socket.socket) -> ProbeAnswer:
    """As NTP does: the quickest of a few round trips errs least, by half its time at most."""
    trips = []
    for _ in range(_PINGS):
        before = time.time()
        connection.sendall(b"{}\n")
        theirs = float(_read_line(connection))
        after = time.time()
        trips.append((after - before, (before + after) / 2 - theirs))
    round_s, ahead_s = min(trips)
    return {"round_s": round_s, "ahead_s": ahead_s}


def _read_line(connection: socket.socket) -> str:
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
