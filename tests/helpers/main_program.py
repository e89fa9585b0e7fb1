"""Turns a forked process into `python -m MODULE WORDS` or `python FILE WORDS`."""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import signal
import socket
import sys
import types
from collections.abc import Sequence
from pathlib import Path

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


def run_as_main_program(words: Sequence[str], host: str | None = None) -> None:
    """Do what a fresh interpreter does with these words; it differs in what is imported already.

    Call it once, in a process of its own. It ends in SystemExit, or returns where the program does.
    `host`: that of the test cluster which the process moves to first.
    """
    if host is not None:
        _move_to_host(host)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            _run_file(words)
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def _move_to_host(host: str) -> None:
    """As `nsenter` and `unshare` do it in `cluster/network.py`: its network, and its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}") as namespace:
        failed = libc.setns(namespace.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS)
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot move to {host}")
    socket.sethostname(host)


def _run_file(words: Sequence[str]) -> None:
    """`runpy.run_path` would change what the program finds as its name in `sys.argv`."""
    file = Path(words[0]).absolute()
    sys.argv = list(words)
    sys.path.insert(0, str(file.parent))
    main = types.ModuleType("__main__")
    main.__file__ = str(file)
    sys.modules["__main__"] = main
    exec(compile(file.read_bytes(), file, "exec"), vars(main))
