"""`echelon board`: one live page over runs, sweeps, jobs and machines."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from echelon.commands.arguments import make_parser
from echelon.errors import EchelonError, ExitCode, Fault


def board(words: list[str]) -> int:
    """`echelon board`: serve the page until Ctrl-C."""
    parser = make_parser(
        "board",
        "Open a live page over runs: their table, curves, logs, sweeps, jobs and machines.",
        """\
The page is served on this machine alone, and the URL holds a token: who has it can read the runs.
From a laptop to a login node:

  ssh -L PORT:127.0.0.1:PORT HOST      the line that is printed; then open the URL

The page can write notes and tags of one's own runs, and nothing else. With --act it can also stop,
resume, cancel, requeue and submit runs, each after a plan is shown and confirmed.

examples:
  echelon board                        the runs in ./runs
  echelon board runs ../shared/runs    several folders
  echelon board --port 8765            the same address at each start
  echelon board --tui                  in this terminal, without a page

--json prints {url, token, port, pid} in one line.""",
    )
    parser.add_argument("dir", nargs="*", metavar="DIR", help="folders of runs (default: runs)")
    parser.add_argument(
        "--port", type=_parse_port, default=0, metavar="N", help="default: one that is free"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDR",
        help="the address to serve on (default: 127.0.0.1, this machine alone)",
    )
    parser.add_argument(
        "--act", action="store_true", help="let the page stop, resume, cancel and submit runs"
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    parser.add_argument("--tui", action="store_true", help="a board in this terminal")
    parser.add_argument("--json", action="store_true", help="print the address as JSON")
    given = parser.parse_args(words)
    roots = _find_roots(given.dir or ["runs"])
    from echelon.login.refresh import following_folders

    with following_folders(roots, with_logs=True, is_verbose=False):
        if given.tui:
            return _run_terminal_board(roots)
        return _serve(roots, given)


def _parse_port(text: str) -> int:
    import argparse

    if text.isdecimal() and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to 65535")


def _find_roots(words: list[str]) -> list[Path]:
    faults = []
    for word in words:
        if not Path(word).is_dir():
            what = "is not a folder" if Path(word).exists() else "does not exist"
            do = "name a folder of runs: echelon board DIR; `echelon train` makes `runs` here"
            faults.append(Fault(f"{Path(word).absolute()} {what}", do))
    if faults:
        raise EchelonError(*faults, exit=ExitCode.NOT_FOUND)
    return list(dict.fromkeys(Path(os.path.realpath(word)) for word in words))


def _run_terminal_board(roots: list[Path]) -> int:
    from importlib.util import find_spec

    if find_spec("textual") is None:
        raise EchelonError(Fault("--tui needs the package textual", "pip install 'echelon[board]'"))
    from echelon.board.terminal.app import run_terminal_board

    return run_terminal_board(roots)


def _serve(roots: list[Path], given: Any) -> int:
    from echelon.board.server import Board, BoardServer, is_loopback, read_or_make_token

    shared = Board(roots, can_act=given.act, read_sweep=_read_sweep)
    try:
        server = BoardServer(shared, given.host, given.port, read_or_make_token())
    except OSError as error:
        from echelon.utils.os_errors import format_os_error_reason

        what = f"{given.host}:{given.port} cannot be bound: {format_os_error_reason(error)}"
        do = "leave out --port for one that is free" if given.port else "give another --host"
        raise EchelonError(Fault(what, do)) from None
    # At once, wherever a thread stands: what is kept in files is replaced as a whole.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(ExitCode.OK))
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    if not is_loopback(given.host):
        print(
            f"warning: the board is served on {given.host}: who reaches this address and has the "
            "token can read the runs"
            + (" and act on them" if given.act else "")
            + ", and nothing is encrypted",
            file=sys.stderr,
        )
    if given.json:
        port = server.server_port
        data = {"url": server.url, "token": server.token, "port": port, "pid": os.getpid()}
        print(json.dumps(data), flush=True)
    else:
        print(server.url)
        if is_loopback(given.host):
            port = server.server_port
            print(f"from elsewhere: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}")
        sys.stdout.flush()
    if not shared.index.load():
        shared.watch.request_check()  # else with the first page, after its rows were sent
    if not given.no_browser and not given.json and sys.stdout.isatty() and _has_screen():
        threading.Thread(target=_open_browser, args=(server.url,), daemon=True).start()
    server.serve_forever(wake)
    return ExitCode.OK


def _read_sweep(folder: Path, with_importance: bool) -> dict[str, Any]:
    from echelon.sweep.run_sweep import read_report
    from echelon.sweep.sweep_folder import SweepFolder

    return read_report(SweepFolder(folder), with_importance).to_dict()


def _has_screen() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open_browser(url: str) -> None:
    import webbrowser

    webbrowser.open(url)
