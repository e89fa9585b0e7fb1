"""Turns a forked process into `python -m MODULE WORDS` or `python FILE WORDS`."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path


def run_as_main_program(words: Sequence[str]) -> None:
    """Do what a fresh interpreter does with these words; it differs in what is imported already.

    Call it once, in a process of its own. It ends in SystemExit, or returns where the program does.
    """
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


def _run_file(words: Sequence[str]) -> None:
    """`runpy.run_path` would change what the program finds as its name in `sys.argv`."""
    file = Path(words[0]).absolute()
    sys.argv = list(words)
    sys.path.insert(0, str(file.parent))
    main = types.ModuleType("__main__")
    main.__file__ = str(file)
    sys.modules["__main__"] = main
    exec(compile(file.read_bytes(), file, "exec"), vars(main))
