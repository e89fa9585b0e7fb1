"""Where the processes of a world meet."""

from __future__ import annotations

import re

from echelon.world import slurm
from echelon.world.draft import Draft
from echelon.world.sources import CLUSTER, OPEN_MPI, PMI, SLURM_STEP, Source

DEFAULT_PORT = 29500  # torch's own
HERE = "127.0.0.1"


def find_master(draft: Draft, source: Source | None, master: str | None) -> str | None:
    """Where the processes meet; None for one process."""
    if draft.values.get("size", 2) == 1:
        draft.because["master"] = "one process meets nobody"
        return None
    if draft.source == "explicit" or master is not None:
        draft.because["master"] = f"master={master}" if master is not None else "the default"
        return _explicit_master(draft, master if master is not None else HERE)
    if source is None or (source.missing(draft.env) and source is not CLUSTER):
        return None  # half a world is told as that; its master would only be more of the same
    host, port = _host(draft, source), _port(draft, source)
    draft.because["master"] = ", ".join(because for _, because in (host, port) if because)
    # The brackets keep an IPv6 address apart from its port.
    shown = f"[{host[0]}]" if ":" in host[0] and not host[0].startswith("[") else host[0]
    return f"{shown}:{port[0]}"


def _explicit_master(draft: Draft, text: str) -> str:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+)(?::([0-9]+))?", text)
    if not match:
        draft.wrong(
            f"master={text} is not HOST:PORT",
            f"for example master=node1:{DEFAULT_PORT}; an IPv6 address stands in brackets",
        )
        return text
    port = int(match[2]) if match[2] else DEFAULT_PORT
    _check_port(draft, port, f"master={text}")
    return f"{match[1]}:{port}"


def _host(draft: Draft, source: Source) -> tuple[str, str]:
    """The master's host and the reason; a fault where nothing says it."""
    if "MASTER_ADDR" in draft.env:
        host, quoted = draft.env["MASTER_ADDR"].strip(), draft.quote("MASTER_ADDR")
        if not host:
            draft.wrong("MASTER_ADDR is set, but empty", "set it to the host of rank 0")
        elif host.count(":") == 1 or "/" in host:
            draft.wrong(
                f"{quoted} is not a host alone",
                "put the host into MASTER_ADDR and the port into MASTER_PORT",
            )
        return host, quoted
    if source is SLURM_STEP:
        return _first_host(draft)
    values = draft.values
    if source is CLUSTER and values.get("rank") == 0:
        return HERE, "NODE_RANK=0 is the master itself"
    if _is_mpi(source) and not draft.guessed and values.get("local_size") == values.get("size"):
        return HERE, "all processes are on this machine"
    draft.wrong(
        f"MASTER_ADDR is not set, and nothing else ({draft.source}) says where rank 0 is",
        "set MASTER_ADDR to the host of rank 0, the same for every process",
    )
    return "", ""


def _first_host(draft: Draft) -> tuple[str, str]:
    listed = draft.env.get("SLURM_STEP_NODELIST", "")
    try:
        host = slurm.expand_hostlist(listed)[0]
    except (ValueError, IndexError):
        draft.wrong(
            f"SLURM_STEP_NODELIST={listed} names no first host",
            "set MASTER_ADDR to the host of rank 0",
        )
        return "", ""
    return host, f"first of {draft.quote('SLURM_STEP_NODELIST')}"


def _port(draft: Draft, source: Source) -> tuple[int, str]:
    if "MASTER_PORT" in draft.env:
        port = draft.integer("MASTER_PORT")
        quoted = draft.quote("MASTER_PORT")
        if port is not None:
            _check_port(draft, port, quoted)
        return port or 0, quoted
    if source is SLURM_STEP:
        return slurm.step_port(draft.env), "a port from the job and step id"
    if _is_mpi(source):
        return DEFAULT_PORT, "torch's default port"
    draft.wrong(
        "MASTER_PORT is not set"
        + (f" beside {draft.quote('MASTER_ADDR')}" if "MASTER_ADDR" in draft.env else ""),
        f"set MASTER_PORT to a free port of rank 0's host, for example {DEFAULT_PORT}",
    )
    return 0, ""


def _check_port(draft: Draft, port: int, quoted: str) -> None:
    if not 1 <= port <= 65535:
        draft.wrong(f"{quoted}: {port} is not a port", "give a number from 1 to 65535")


def _is_mpi(source: Source) -> bool:
    return source in (OPEN_MPI, PMI)


def is_loopback(host: str) -> bool:
    """Whether this host, with or without a port, is the machine one is on."""
    return bool(re.match(r"(localhost|127\.[\d.]+|\[::1\])(:\d*)?$|::1$", host))
