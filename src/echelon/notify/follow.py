"""News that nobody but a command that follows a run can send.

A job in the queue has no process of ours, and one whose machine went down has none any more.
`echelon attach`, `--wait` and `echelon jobs --watch` see both.
"""

from __future__ import annotations

import os
import time

from echelon.config.defaults_files import read_secrets
from echelon.errors import EchelonError
from echelon.notify.deliver import deliver, warn_of_failures
from echelon.notify.events import News, find_end, make_failed_message, make_queued_message
from echelon.notify.record import NewsRecord
from echelon.notify.run_view import RunView
from echelon.runs.accounting import count_starts_on_request
from echelon.runs.history import read_history
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import query_queue_position
from echelon.runs.status import RunStatus
from echelon.utils.text import print_to_stderr

_ENDED_BADLY = ("failed", "lost")


class FollowedNews:
    """What a follower may have to tell of one run, if that asks for news and is one's own."""

    def __init__(self, run: Run) -> None:
        self._run, self._record = run, NewsRecord(run.news_file)
        self._warned: set[str] = set()
        self._was_active = False
        try:
            is_own = run.folder.stat().st_uid == os.geteuid()
            config = run.read_config(runs_code=False) if is_own else None
        except (OSError, EchelonError):
            config = None
        self._config = config if config is not None and config.notify.to else None

    def look(self, status: RunStatus) -> None:
        """Tell what this status shows, unless it was told before."""
        if self._config is None:
            return
        if status.state in ("queued", "requeued") and status.job:
            self._tell_of_queue(status, status.job)
        elif self._was_active and status.state in _ENDED_BADLY:
            self._tell_end(status)  # what was over before is no news
        self._was_active = status.is_active

    def _tell_of_queue(self, status: RunStatus, job: str) -> None:
        assert self._config is not None
        phases = read_history(self._run, is_running=False).phases
        since = max([status.started, *(p.ended for p in phases[-1:] if p.ended)])
        waited_s = time.time() - since
        if waited_s < self._config.notify.queued_minutes * 60:
            return
        key = f"queued/{job}/{len(phases)}"
        if "queued" in self._config.notify.enabled_events and self._record.claim(
            key, "queued", job
        ):
            position = query_queue_position(job)
            self._send(News(key, make_queued_message(self._run, job, waited_s, position)))

    def _tell_end(self, status: RunStatus) -> None:
        """The run tells its end itself, before its last status can be seen, if it still can."""
        assert self._config is not None
        view = RunView.read(self._run, self._config)
        news = find_end(view, has_leader_ended=True)
        if news is None:
            key = f"{count_starts_on_request(view.history)}/failed"
            news = News(key, make_failed_message(view, status.note or status.state))
        wanted = self._config.notify.enabled_events
        message = news.message
        if message.event in wanted and self._record.claim(news.key, message.event, message.subject):
            self._send(news)

    def _send(self, news: News) -> None:
        assert self._config is not None
        env = dict(os.environ)
        if self._config.launch.secrets:
            try:
                env |= read_secrets(self._config.launch.secrets)
            except EchelonError as error:
                print_to_stderr(f"warning: notify: {error.faults[0].what}")
        deliveries = deliver(news.message, self._config.notify, env, tries=1)
        warn_of_failures(deliveries, self._warned)
        self._record.note(news.key, deliveries)
