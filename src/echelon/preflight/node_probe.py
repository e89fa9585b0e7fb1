"""The probe of a preflight on one node: executes orders from standard input, a line of JSON each.

Answers go to standard output and through ssh or srun back to ``probe_client``. That way stays open
even where the nodes cannot reach each other, which is what is to be found out. When its standard
input is closed, the probe ends.

Run as ``python -m echelon.preflight.node_probe NODE``. NODE is the number of the node or the name
of a variable that holds it, because srun gives all nodes the same command.
"""

from __future__ import annotations

import hashlib
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
from echelon.hosts.message_protocol import send_message
from echelon.launch import network_interface
from echelon.launch.node.message_channel import ChannelClosed, MessageChannel
from echelon.launch.node.service import make_network_variables, make_thread_variables
from echelon.launch.registry import make_launcher
from echelon.preflight import gpu_health
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.processes import die_with_parent

_CONNECT_TIMEOUT_S = 4.0
_PINGS = 8
_CHUNK_BYTES = 1 << 20
_MAX_PARALLEL = 64
_MAX_CONNECTIONS = 1024

ProbeAnswer = dict[str, Any]


def main() -> NoReturn:
    """Say hello, then execute the orders for this node until the standard input is closed."""
    node = int(os.environ.get(sys.argv[1], sys.argv[1]))
    probe = NodeProbe(node)
    probe.write_message({"hello": socket.gethostname()})
    # Orders are executed in a thread, so that the end of the input is noticed meanwhile.
    with ThreadPoolExecutor(1) as executor:
        for line in sys.stdin:
            order = json.loads(line)
            if node in order["to"]:  # srun gives every order to all its probes
                executor.submit(probe.execute_order, order)
        os._exit(0)  # without waiting for an order; ranks that it started die with this process


class NodeProbe:
    """The orders of one node; each method below returns an answer that ``rules`` reads."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._config = Config()
        self._key = ""
        self._address = ""
        self._reserved_port = _reserve_port()

    def write_message(self, message: ProbeAnswer) -> None:
        """Send a message to the near end, with the number of this node."""
        send_message(message | {"node": self._node})

    def execute_order(self, order: Mapping[str, Any]) -> None:
        """Call the method that an order names and send its answer, which may be an exception."""
        actions: dict[str, Callable[..., ProbeAnswer]] = {
            "inspect_node": self.inspect_node,
            "inspect_network": self.inspect_network,
            "measure_link": self.measure_link,
            "run_ranks": self.run_ranks,
        }
        try:
            answer = actions[order["do"]](**order["with"])
        except Exception as error:  # a problem of this node is a verdict, not the end of the probe
            answer = {"trouble": f"{type(error).__name__}: {error}"}
        self.write_message({"id": order["id"], "answer": answer})

    # --- this node ---

    def inspect_node(
        self, config: ProbeAnswer, node_count: int, key: str, token: str, folder: str
    ) -> ProbeAnswer:
        """Return what can be found out on this node alone, and open the port for the others.

        ``key`` lets only probes of this preflight connect. ``token`` is a file in the folder of
        runs, which exists only where that folder is shared.
        """
        self._config, self._key = build_config(config), key
        launcher = make_launcher(self._config)
        self._address = launcher.find_own_address(node_count, os.environ)
        wanted_port = launcher.choose_master_port(os.environ) if self._node == 0 else 0
        port, trouble = self._listen(wanted_port)
        entry = str(self._config.experiment.get("entry", "")).rpartition(":")[0]
        return {
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "address": self._address,
            "port": port,
            "port_trouble": trouble,
            "free_port": self._reserved_port.getsockname()[1],
            "python": platform.python_version(),
            "torch": _get_installed_version("torch"),
            "echelon": echelon.__version__,
            "code": _hash_files(sorted(Path(echelon.__file__).parent.rglob("*.py"))),
            "entry": _hash_files([Path(entry)]) if os.path.isfile(entry) else None,
            "config": _hash_files([Path(folder, "config.json")]),
            "interfaces": _list_interfaces(),
            "is_shared": os.path.exists(token),
            "disks": [
                read_disk("runs", Path(folder))._asdict(),
                read_disk("tmp", Path(os.environ.get("TMPDIR") or "/tmp"))._asdict(),
            ],
            "visible_gpus": count_visible_gpus(os.environ),
            "gpus": gpu_health.read_gpu_health(os.environ),
        }

    def _listen(self, wanted: int) -> tuple[int, str]:
        """Listen where the training would, or with port 0 at any that is free.

        Returns the port, and why it is not the wanted one.
        """
        trouble = ""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        any_address = "::" if family == socket.AF_INET6 else "0.0.0.0"
        try:
            listener = socket.create_server(
                (any_address, wanted), family=family, backlog=_MAX_PARALLEL
            )
        except OSError as error:
            trouble = f"port {wanted} is taken: {format_os_error_reason(error)}"
            listener = socket.create_server((any_address, 0), family=family, backlog=_MAX_PARALLEL)
        arguments = (listener, self._key)
        threading.Thread(target=_accept_connections, args=arguments, daemon=True).start()
        return int(listener.getsockname()[1]), trouble

    # --- the network ---

    def inspect_network(self, nodes: list[ProbeAnswer]) -> ProbeAnswer:
        """Resolve names, find the interface, connect to the others, compare clocks with node 0."""
        first = nodes[0]
        others = [n for n in nodes if n["node"] != self._node]
        chosen = self._config.launch.interface or os.environ.get("NCCL_SOCKET_IFNAME")
        with ThreadPoolExecutor(_MAX_PARALLEL) as pool:
            names = pool.map(lambda n: resolve_addresses(n["host"]), others)
            reverse_name = pool.submit(_get_host_by_address, first["address"])
            tcp = list(pool.map(lambda n: self._test_connection(n["address"], n["port"]), others))
            return {
                "names": dict(zip((n["node"] for n in others), names, strict=True)),
                "reverse_name": reverse_name.result(),
                "route_interface": network_interface.find_interface_to(first["address"]),
                "chosen_interface": chosen,
                "tcp": {n["node"]: t["trouble"] for n, t in zip(others, tcp, strict=True)},
                "clock": next(
                    (t for n, t in zip(others, tcp, strict=True) if n["node"] == first["node"]),
                    None,
                ),
            }

    def _test_connection(self, address: str, port: int) -> ProbeAnswer:
        """Connect to another probe and compare clocks; return why that fails."""
        try:
            with self._connect_to_probe(address, port) as connection:
                return {"trouble": "", **_compare_clocks(connection)}
        except OSError as error:
            return {"trouble": format_os_error_reason(error)}

    def _connect_to_probe(self, address: str, port: int) -> socket.socket:
        connection = socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S)
        try:
            _authenticate(connection, self._key, is_listener=False)
        except OSError:
            connection.close()
            raise
        return connection

    def measure_link(
        self, address: str, port: int, limit_s: float, limit_bytes: int
    ) -> ProbeAnswer:
        """Send as fast as one connection goes; return what arrived and how long it took.

        The other end measures: what this one has sent may still be in buffers.
        """
        with self._connect_to_probe(address, port) as connection:
            # A larger send buffer would hold seconds of data on a slow link.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHUNK_BYTES)
            connection.sendall(json.dumps({"sink": limit_s}).encode() + b"\n")
            deadline, left, data = time.monotonic() + limit_s, limit_bytes, bytes(_CHUNK_BYTES)
            while left > 0 and time.monotonic() < deadline:
                ready, writable, _ = select.select([connection], [connection], [], 0.1)
                if ready:  # the other end has answered: it has measured long enough
                    break
                if writable:
                    left -= connection.send(data[: min(_CHUNK_BYTES, left)], socket.MSG_DONTWAIT)
            # Else the other end, whose time began later, might wait for data that never comes.
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(limit_s + _CONNECT_TIMEOUT_S)
            answer: ProbeAnswer = json.loads(_read_line(connection))
            drop = struct.pack("ii", 1, 0)  # on close, discard what is still in the buffers
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, drop)
            return answer

    # --- the all-reduce ---

    def run_ranks(
        self,
        master_address: str,
        master_port: int,
        first_rank: int,
        rank_count: int,
        world_size: int,
        number_count: int,
        limit_s: float,
    ) -> ProbeAnswer:
        """Run this node's ranks of the all-reduce; one that does not end in time is killed."""
        env = dict(os.environ) | make_thread_variables(self._config, rank_count, os.environ)
        env |= make_network_variables(self._config, master_address, os.environ)
        env |= {"MASTER_ADDR": master_address, "MASTER_PORT": str(master_port)}
        env |= {"WORLD_SIZE": str(world_size)}
        deadline = time.monotonic() + limit_s
        module = "echelon.preflight.all_reduce"
        argv = [sys.executable, "-m", module, str(number_count), str(limit_s)]
        processes = [
            subprocess.Popen(
                argv,
                env=env | {"RANK": str(first_rank + local), "LOCAL_RANK": str(local)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            for local in range(rank_count)
        ]
        with ThreadPoolExecutor(rank_count) as pool:
            ranks = list(pool.map(lambda p: _wait_for_rank(p, deadline), processes))
        return {
            "ranks": [rank | {"rank": first_rank + i} for i, rank in enumerate(ranks)],
            "failed": any(rank["trouble"] for rank in ranks),
        }


def _wait_for_rank(process: subprocess.Popen[bytes], deadline: float) -> ProbeAnswer:
    """Return the result that a rank prints, or why there is none."""
    try:
        out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"trouble": "did not end in time"}
    lines = out.decode(errors="replace").strip().splitlines()
    if process.returncode == 0 and lines:
        answer: ProbeAnswer = json.loads(lines[-1])
        return answer | {"trouble": ""}
    return {"trouble": describe_exit(process.returncode, err.decode(errors="replace"))}


# --- facts about this node ---


def _get_installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hash_files(files: list[Path]) -> str | None:
    """Return a hash of names and contents; None if a file cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()[:12]


def _reserve_port() -> socket.socket:
    """Reserve a port for the all-reduce, which another process will listen at.

    It is bound but not listening: the kernel gives it to nobody by chance, while torch, which asks
    for this very number with SO_REUSEADDR, gets it.
    """
    reserved = socket.socket(socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("0.0.0.0", 0))
    return reserved


def _list_interfaces() -> list[str]:
    """Return the names of the network interfaces that are up."""
    stats = psutil.net_if_stats()
    return [name for name in psutil.net_if_addrs() if name in stats and stats[name].isup]


def _get_host_by_address(address: str) -> str | None:
    """Return the name of an address by reverse lookup; None if it has none."""
    try:
        return socket.gethostbyaddr(address)[0]
    except OSError:
        return None


# --- between two probes ---


def _accept_connections(listener: socket.socket, key: str) -> None:
    """Serve every connection in a thread of its own."""
    places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
    while True:
        connection, _ = listener.accept()
        if not places.acquire(blocking=False):
            connection.close()  # strangers: our probes open less at a time
            continue
        arguments = (connection, key, places)
        threading.Thread(target=_serve_connection, args=arguments, daemon=True).start()


def _serve_connection(
    connection: socket.socket, key: str, places: threading.BoundedSemaphore
) -> None:
    """Check the key, then answer clock requests, or measure what a sender sends."""
    with connection:
        try:
            _authenticate(connection, key, is_listener=True)
            while line := _read_line(connection):
                order = json.loads(line)
                if "sink" in order:
                    _serve_link_measurement(connection, float(order["sink"]))
                    return
                connection.sendall(json.dumps(time.time()).encode() + b"\n")
        except (OSError, ValueError):
            return
        finally:
            places.release()


def _authenticate(connection: socket.socket, key: str, is_listener: bool) -> None:
    """Let both ends prove that they are probes of this preflight; raises a ConnectionError. What
    they send after that is plain: it is data without meaning, and clocks."""
    channel = MessageChannel(connection, key.encode(), is_listener)
    try:
        channel.authenticate(time.monotonic() + _CONNECT_TIMEOUT_S)
    except ChannelClosed as end:
        raise ConnectionError(f"the other end {end}") from None
    connection.settimeout(_CONNECT_TIMEOUT_S)


def _serve_link_measurement(connection: socket.socket, limit_s: float) -> None:
    """Receive for a time, then tell the sender how much came and how long it took."""
    connection.settimeout(limit_s + _CONNECT_TIMEOUT_S)
    buffer = bytearray(_CHUNK_BYTES)
    received, began = connection.recv_into(buffer), time.monotonic()
    first, now = received, began
    while now - began < limit_s and (data := connection.recv_into(buffer)):
        received, now = received + data, time.monotonic()
    # The first chunk was on its way before the time was started, so it does not count.
    measurement = {"bytes": received - first, "took_s": max(now - began, 1e-6)}
    connection.sendall(json.dumps(measurement).encode() + b"\n")
    while connection.recv_into(buffer):  # until the other end has read that and closes
        pass


def _compare_clocks(connection: socket.socket) -> ProbeAnswer:
    """Return how far this clock is ahead of the other end's, as NTP measures it.

    Of a few round trips the quickest has the smallest error, at most half its time.
    """
    trips = []
    for _ in range(_PINGS):
        before = time.time()
        connection.sendall(b"{}\n")
        theirs = float(_read_line(connection))
        after = time.time()
        trips.append((after - before, (before + after) / 2 - theirs))
    round_trip_s, ahead_s = min(trips)
    return {"round_trip_s": round_trip_s, "ahead_s": ahead_s}


def _read_line(connection: socket.socket) -> str:
    """Read a line byte by byte: what follows it belongs to somebody else."""
    text = b""
    while not text.endswith(b"\n") and len(text) < 4096:
        data = connection.recv(1)
        if not data:
            break
        text += data
    return text.decode(errors="replace").strip()


if __name__ == "__main__":
    main()
