"""Where the processes of a world meet: MASTER_ADDR and MASTER_PORT, or what replaces them."""

from __future__ import annotations

import re

from echelon.world import slurm_variables
from echelon.world.draft import WorldDraft
from echelon.world.launcher_variables import CLUSTER, OPEN_MPI, PMI, SLURM_STEP, LauncherVariables

DEFAULT_PORT = 29500  # torch's own
LOOPBACK = "127.0.0.1"


def find_master(
    draft: WorldDraft, source: LauncherVariables | None, master: str | None
) -> str | None:
    """HOST:PORT where the processes meet; None for one process, or where a fault was noted."""
    if draft.values.get("size", 2) == 1:
        draft.reasons["master"] = "one process meets nobody"
        return None
    if draft.source == "explicit" or master is not None:
        draft.reasons["master"] = f"master={master}" if master is not None else "the default"
        return _parse_explicit_master(draft, master if master is not None else LOOPBACK)
    if source is None or (source.list_missing_variables(draft.env) and source is not CLUSTER):
        return None  # the missing variables are reported; a missing master is the same fault
    host, port = _find_host(draft, source), _find_port(draft, source)
    draft.reasons["master"] = ", ".join(because for _, because in (host, port) if because)
    # The brackets separate an IPv6 address from its port.
    shown = f"[{host[0]}]" if ":" in host[0] and not host[0].startswith("[") else host[0]
    return f"{shown}:{port[0]}"


def _parse_explicit_master(draft: WorldDraft, text: str) -> str:
    """Return the address that was typed as master=HOST:PORT."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+)(?::([0-9]+))?", text)
    if not match:
        draft.add_fault(
            f"master={text} is not HOST:PORT",
            f"for example master=node1:{DEFAULT_PORT}; an IPv6 address stands in brackets",
        )
        return text
    port = int(match[2]) if match[2] else DEFAULT_PORT
    _check_port(draft, port, f"master={text}")
    return f"{match[1]}:{port}"


def _find_host(draft: WorldDraft, source: LauncherVariables) -> tuple[str, str]:
    """Return the master's host and the reason; a fault where no variable gives it."""
    if "MASTER_ADDR" in draft.env:
        host, quoted = draft.env["MASTER_ADDR"].strip(), draft.quote_variable("MASTER_ADDR")
        if not host:
            draft.add_fault("MASTER_ADDR is set, but empty", "set it to the host of rank 0")
        elif host.count(":") == 1 or "/" in host:
            draft.add_fault(
                f"{quoted} is not a host alone",
                "put the host into MASTER_ADDR and the port into MASTER_PORT",
            )
        return host, quoted
    if source is SLURM_STEP:
        return _find_first_step_host(draft)
    values = draft.values
    if source is CLUSTER and values.get("rank") == 0:
        return LOOPBACK, "NODE_RANK=0 is the master itself"
    if _is_mpi(source) and not draft.is_guess and values.get("local_size") == values.get("size"):
        return LOOPBACK, "all processes are on this machine"
    draft.add_fault(
        f"MASTER_ADDR is not set, and nothing else ({draft.source}) says where rank 0 is",
        "set MASTER_ADDR to the host of rank 0, the same for every process",
    )
    return "", ""


def _find_first_step_host(draft: WorldDraft) -> tuple[str, str]:
    """Return the first host of the Slurm step."""
    listed = draft.env.get("SLURM_STEP_NODELIST", "")
    try:
        host = slurm_variables.expand_hostlist(listed)[0]
    except (ValueError, IndexError):
        draft.add_fault(
            f"SLURM_STEP_NODELIST={listed} names no first host",
            "set MASTER_ADDR to the host of rank 0",
        )
        return "", ""
    return host, f"first of {draft.quote_variable('SLURM_STEP_NODELIST')}"


def _find_port(draft: WorldDraft, source: LauncherVariables) -> tuple[int, str]:
    """Return the master's port and the reason; a fault where no variable gives it."""
    if "MASTER_PORT" in draft.env:
        port = draft.read_integer("MASTER_PORT")
        quoted = draft.quote_variable("MASTER_PORT")
        if port is not None:
            _check_port(draft, port, quoted)
        return port or 0, quoted
    if source is SLURM_STEP:
        return slurm_variables.derive_step_port(draft.env), "a port from the job and step id"
    if _is_mpi(source):
        return DEFAULT_PORT, "torch's default port"
    draft.add_fault(
        "MASTER_PORT is not set"
        + (f" beside {draft.quote_variable('MASTER_ADDR')}" if "MASTER_ADDR" in draft.env else ""),
        f"set MASTER_PORT to a free port of rank 0's host, for example {DEFAULT_PORT}",
    )
    return 0, ""


def _check_port(draft: WorldDraft, port: int, quoted: str) -> None:
    """Note a fault if this is not a port."""
    if not 1 <= port <= 65535:
        draft.add_fault(f"{quoted}: {port} is not a port", "give a number from 1 to 65535")


def _is_mpi(source: LauncherVariables) -> bool:
    """Return whether the launcher is an MPI's."""
    return source in (OPEN_MPI, PMI)


def is_loopback(host: str) -> bool:
    """Return whether this host, with or without a port, is the machine one is on."""
    return bool(re.match(r"(localhost|127\.[\d.]+|\[::1\])(:\d*)?$|::1$", host))
