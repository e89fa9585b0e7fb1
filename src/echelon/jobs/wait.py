"""Wait for queued runs, and print how each of them ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from echelon.errors import ExitCode
from echelon.notify.follow import FollowedNews
from echelon.runs.run_folder import Run
from echelon.runs.status import read_run_statuses
from echelon.utils.text import print_to_stderr

_POLL_S = 3.0


def wait_for_runs(runs: Sequence[Run]) -> int:
    """Wait until all runs are over, print their states, and return the first exit code but 0."""
    reported_states: dict[str, str] = {}
    news = {str(run.folder): FollowedNews(run) for run in runs}
    order = {str(run.folder): number for number, run in enumerate(runs)}
    while True:
        statuses, _ = read_run_statuses(runs)
        for s in sorted(statuses, key=lambda s: order[s.folder]):
            news[s.folder].look(s)
            if reported_states.get(s.folder) != s.state:
                reported_states[s.folder] = s.state
                note = f" ({s.note})" if s.note else ""
                print_to_stderr(f"{s.run}: {s.state}{note}")
        if not any(s.is_active for s in statuses):
            ended = sorted(statuses, key=lambda s: order[s.folder])
            return next((int(s.exit) for s in ended if s.exit), ExitCode.OK)
        time.sleep(_POLL_S)
