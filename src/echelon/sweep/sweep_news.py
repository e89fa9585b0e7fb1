"""News of a whole sweep: one message when it begins and one when it is over, whatever the number of
trials, workers and restarts."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from echelon.config.defaults_files import read_secrets
from echelon.config.schema import Config, NotifyConfig
from echelon.errors import EchelonError
from echelon.sweep.report import SweepReport, build_report
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_store import TrialStore
from echelon.utils.text import print_to_stderr


class SweepNews:
    """What a worker tells. All workers share the record in the sweep's folder, so whoever is the
    first to begin or to find nothing left says so."""

    def __init__(self, sweep: SweepFolder) -> None:
        self._sweep = sweep
        self._config: NotifyConfig | None = None
        self._secrets_file: str | None = None
        self._first: threading.Thread | None = None

    def take_from(self, config: Config) -> Config:
        """Return the configuration of a trial, which sends no news of its own, and tell that the
        sweep has begun."""
        if config.notify.to and self._config is None:
            self._config, self._secrets_file = config.notify, config.launch.secrets
            # In a thread: no trial waits for a server.
            self._first = threading.Thread(target=self._tell_start, daemon=True, name="notify")
            self._first.start()
        return replace(config, notify=replace(config.notify, to=[]))

    def tell_end(self) -> None:
        """Tell that there are no more trials, with the best one."""
        if self._config is None or self._first is None:  # this worker came when all was done
            return
        self._first.join()  # which has a limit of its own
        report = build_report(TrialStore(self._sweep), with_importance=False)
        event = "failed" if report.stop_reason and report.best is None else "finished"
        counts = report.count_states()
        shown = [f"{count} {state}" for state, count in counts.items() if count]
        look = f"echelon sweep show {self._sweep.name}"
        lines = [report.stop_reason, ", ".join(shown), _describe_best(report), look]
        self._tell(f"{event}/{report.run_cap}", event, f"sweep {self._sweep.name} {event}", lines)

    def _tell_start(self) -> None:
        name = self._sweep.name
        self._tell("started", "started", f"sweep {name} started", [f"echelon sweep show {name}"])

    def _tell(self, key: str, event: str, subject: str, lines: list[str]) -> None:
        from echelon.notify.deliver import deliver, warn_of_failures
        from echelon.notify.message import make_message
        from echelon.notify.record import NewsRecord

        assert self._config is not None
        record = NewsRecord(self._sweep.news_file)
        if event not in self._config.enabled_events or not record.claim(key, event, subject):
            return
        env = dict(os.environ)
        if self._secrets_file:
            try:
                env |= read_secrets(self._secrets_file)
            except EchelonError as error:
                print_to_stderr(f"warning: notify: {error.faults[0].what}")
        facts = {"folder": str(self._sweep.folder)}
        message = make_message(event, self._sweep.name, subject, lines, facts)
        deliveries = deliver(message, self._config, env)
        warn_of_failures(deliveries, set())
        record.note(key, deliveries)


def _describe_best(report: SweepReport) -> str:
    best = report.best
    if best is None or best.metric_value is None:
        return ""
    return f"best {report.metric.name} {best.metric_value:.4g}, of trial {best.number}"
