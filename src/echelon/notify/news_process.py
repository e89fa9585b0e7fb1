"""What the process that leads a run holds of the one that sends its news.

Nothing is imported or started for a run that asks for no news.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from echelon.config.schema import Config
from echelon.runs.run_folder import Run

_CLOSE_LIMIT_S = 22.0
"""How long the end of a run may wait for its last message, where a server is slow or down. After a
batch job nothing of it runs on, so this is waited for."""
END_WORD = b"end\n"
"""What says that the last status is written. Without it, whoever led the run was killed."""


class NewsProcess:
    """A process of its own session: neither Ctrl-C nor a closed terminal ends it."""

    def __init__(self, run: Run, node: int = 0) -> None:
        words = [sys.executable, "-m", "echelon.notify.watcher", str(run.folder), str(node)]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            print(f"warning: notify: no news is sent: {error}", file=sys.stderr, flush=True)

    def close(self, is_over: bool = True) -> None:
        """Say that the last status of the run is written, and wait until it was told.

        ``is_over=False``: this process leads the run no more, and another one may.
        """
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            if is_over:
                os.write(process.stdin.fileno(), END_WORD)
        with contextlib.suppress(OSError):
            process.stdin.close()
        if not is_over:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSE_LIMIT_S)


def start_news(run: Run, config: Config, node: int = 0) -> NewsProcess | None:
    """Start what sends the news of a run; None for a run that asks for none."""
    return NewsProcess(run, node) if config.notify.to else None
