"""The process beside the one that leads a run: it looks at the run's folder and sends news.

It is a process of its own, so that a slow server, a resolver that hangs or a crash of an
encryption library is nothing that a training would notice, and so that somebody is left to say
that the leading process was killed. It ends with the run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from echelon.config.schema import Config
from echelon.errors import EchelonError
from echelon.notify.deliver import deliver, warn_of_failures
from echelon.notify.events import EventDetector, News, find_end
from echelon.notify.news_process import END_WORD
from echelon.notify.record import NewsRecord
from echelon.notify.run_view import RunView
from echelon.runs.run_folder import Run
from echelon.runs.writer import find_writing_process
from echelon.utils.text import print_to_stderr

_POLL_S = 1.0
_KILLED_WAIT_S = 2.0
"""How long after the death of the leading process to look whether the run says more."""
_TAKEOVER_WAIT_S = 15.0
"""Beyond launch.silence_s: how long another node may take to lead in its place."""


def main() -> None:
    """`python -m echelon.notify.watcher FOLDER NODE`; the leading process holds its input open."""
    # A job's end signals everything in it. This process ends when its leader has.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    run, node = Run(Path(sys.argv[1])), int(sys.argv[2])
    try:
        config = run.read_launch_config()
    except EchelonError as error:
        print_to_stderr(f"warning: notify: no news is sent: {error.faults[0].what}")
        return
    RunWatcher(run, config, os.environ, node).watch()


class RunWatcher:
    """Sends the news of one start of a run."""

    def __init__(self, run: Run, config: Config, env: Mapping[str, str], node: int = 0) -> None:
        self._run, self._config, self._env, self._node = run, config, env, node
        self._record, self._finder = NewsRecord(run.news_file), EventDetector()
        self._warned: set[str] = set()
        self._parent = os.getppid()

    def watch(self) -> None:
        """Look again and again until the leading process is gone, and then tell the end."""
        while (said := self._wait_for_leader()) is None:
            with contextlib.suppress(OSError):
                self._look()
        has_ended = said == END_WORD
        if not has_ended:
            if self._is_taken_over():
                return
        elif self._will_be_restarted():
            return
        view = RunView.read(self._run, self._config, self._node)
        for news in self._finder.find(view):
            self.tell(news)
        if (end := find_end(view, has_ended)) is not None:
            self.tell(end)

    def tell(self, news: News) -> None:
        """Send news once, if this run is to tell it."""
        event, wanted = news.message.event, self._config.notify.enabled_events
        is_end_by_nan = event == "nan" and news.key.endswith("/failed")
        if event not in wanted and not (is_end_by_nan and "failed" in wanted):
            return
        if not self._record.claim(news.key, event, news.message.subject):
            return
        deliveries = deliver(news.message, self._config.notify, self._env)
        warn_of_failures(deliveries, self._warned)
        self._record.note(news.key, deliveries)

    def _look(self) -> None:
        view = RunView.read(self._run, self._config, self._node)
        for news in self._finder.find(view):
            self.tell(news)

    def _wait_for_leader(self) -> bytes | None:
        """Return what the leading process has said at its end, which is nothing if it was killed;
        None while it lives."""
        if select.select([0], [], [], _POLL_S)[0]:
            return os.read(0, len(END_WORD))
        # A process that it has forked may hold its end of the pipe a while longer than it lives.
        return None if os.getppid() == self._parent else b""

    def _will_be_restarted(self) -> bool:
        """Return whether torchrun, which started the leading process, will start it again."""
        counts = [self._env.get(f"TORCHELASTIC_{n}", "") for n in ("RESTART_COUNT", "MAX_RESTARTS")]
        if not all(count.isdecimal() for count in counts) or not self._env.get("RANK"):
            return False
        failed = self._run.read_status_file().get("state") == "failed"
        return failed and int(counts[0]) < int(counts[1])

    def _is_taken_over(self) -> bool:
        """Wait until the run has said how it ended, or goes on with another process that leads it;
        returns whether it does."""
        nodes = self._run.read_status_file().get("nodes") or 1
        several = isinstance(nodes, int) and nodes > 1
        limit_s = self._config.launch.silence_s + _TAKEOVER_WAIT_S if several else _KILLED_WAIT_S
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if several and find_writing_process(self._run) is not None:
                return True
            if self._run.read_status_file().get("state") in ("finished", "failed"):
                return False
            time.sleep(0.2)
        return False


if __name__ == "__main__":
    main()
