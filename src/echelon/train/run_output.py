"""Where a training on rank 0 puts its numbers and snapshots: trackers, progress bar, writer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echelon.errors import ExitCode
from echelon.parallel.process_group import RankGroup
from echelon.runs.heartbeat import Heartbeat
from echelon.runs.metrics_file import MetricsLine
from echelon.runs.run_folder import Run
from echelon.snapshot.mirror import SnapshotMirror
from echelon.snapshot.writer import SaveResult, SnapshotWriter
from echelon.tracking.progress import TrainingDisplay
from echelon.tracking.tracker import Tracker

if TYPE_CHECKING:
    from echelon.snapshot.distributed_writer import DistributedSnapshotWriter

_SILENT_S = 2.0
"""What takes longer at the end of a run is said."""


@dataclass(kw_only=True)
class RunOutput:
    """The open files and displays of a run.

    Only rank 0 has trackers and a progress bar. Only rank 0 has a snapshot writer, unless the model
    is sharded.
    """

    run: Run
    group: RankGroup
    heartbeat: Heartbeat
    trackers: tuple[Tracker, ...] = ()
    screen: TrainingDisplay = field(default_factory=TrainingDisplay)
    writer: SnapshotWriter | DistributedSnapshotWriter | None = None
    mirror: SnapshotMirror | None = None
    """Of the snapshots, in an object store."""
    step: int = 0
    total_steps: int = 0
    saved_step: int | None = None
    """The last step of which a snapshot was saved, or is being saved."""
    best_value: float | None = None
    """Of the number that decides which snapshot is the best."""
    is_sanity_check: bool = False
    """Whether the evaluation before the first step runs. Stays True if it fails, so that a report
    of the failure can say so."""
    last_snapshot: str | None = None
    """The folder of the newest snapshot that is on disk."""
    logged_step: int = -1
    """The step of the last line that was given to the trackers."""
    unsaved_reason: str | None = None
    """Why the last state of the run could not be saved."""
    _reported_mirror: dict[str, Any] | None = None
    """What the status says of the mirror."""

    def wait_for_save(self) -> None:
        """Wait on all ranks until the snapshot of this step is on disk: an evaluation may end any
        of them, even without a word."""
        self.report_saves(self.writer.wait() if self.writer is not None else [])
        self.group.is_any_true(False)

    def log_to_trackers(self, line: MetricsLine) -> None:
        """Give a line of metrics to all trackers."""
        self.logged_step = line["step"]
        for tracker in self.trackers:
            tracker.log(line)

    def report_saves(self, results: list[SaveResult]) -> None:
        """Report finished saves: a snapshot goes into the run's status, a failed save becomes a
        warning."""
        for saved in results:
            if saved.folder is not None:
                self.last_snapshot = str(saved.folder)
                self.run.update_status(step=self.step, snapshot=str(saved.folder))
            elif saved.step == self.step:
                self.unsaved_reason = saved.error
            if saved.error is not None:
                what = saved.error if saved.folder else f"not saved: {saved.error}"
                print(f"warning: {what}", file=sys.stderr)
        if self.mirror is not None:
            self._report_mirror(self.mirror)

    def _report_mirror(self, mirror: SnapshotMirror) -> None:
        """Print what the mirror has to say, and write what it holds into the run's status."""
        for message in mirror.take_messages():
            print(message, file=sys.stderr)
        held = {"url": mirror.url, "step": mirror.mirrored_step, "problem": mirror.problem}
        if held != self._reported_mirror:
            self._reported_mirror = held
            self.run.update_status(mirror=held)

    def start_mirror(self) -> None:
        """Have snapshots mirrored from now on."""
        if self.writer is not None and self.mirror is not None:
            self.writer.mirror_to(self.mirror)
            self._report_mirror(self.mirror)

    def close_mirror(self, limit_s: float | None) -> str:
        """Wait until the newest snapshot is in the mirror; return what to say of it at the end."""
        mirror = self.mirror
        if mirror is None:
            return ""
        has_said = False

        def on_wait(seconds: float) -> None:
            nonlocal has_said
            self.heartbeat.suspend()
            if seconds > _SILENT_S and not has_said:
                has_said = True
                print(f"waiting until the last snapshot is in {mirror.url}", file=sys.stderr)

        mirror.close(limit_s, on_wait)
        self._report_mirror(mirror)
        self.mirror = None
        there = f"{mirror.url} at step {mirror.mirrored_step}"
        if mirror.mirrored_step is None:
            there = f"{mirror.url}, empty"
        if mirror.problem is None:
            return there
        newest = self.saved_step or self.step
        print(
            f"warning: step {newest} is not in the mirror {mirror.url}: {mirror.problem}",
            file=sys.stderr,
        )
        return f"{there}; step {newest} is not there: {mirror.problem}"

    def close_writer(self) -> None:
        """Wait until the last snapshot is on disk. One that failed is left in `unsaved_reason`."""
        self.heartbeat.suspend()
        results = self.writer.close() if self.writer is not None else []
        if results and results[-1].step == self.step and results[-1].folder is None:
            self.unsaved_reason = results.pop().error
        self.report_saves(results)
        self.screen.close()

    def release_output(self) -> None:
        """Leave trackers, progress bar and writer to another process, which goes on with them."""
        self.close_writer()
        self.close_trackers(ExitCode.OK)

    def adopt_output(self, old: RunOutput) -> None:
        """Go on with the trackers, the progress bar and the writer of a training that was left."""
        self.trackers, self.screen, self.writer = old.trackers, old.screen, old.writer
        self.mirror, self._reported_mirror = old.mirror, old._reported_mirror
        self.unsaved_reason, self.last_snapshot = old.unsaved_reason, old.last_snapshot
        self.logged_step = old.logged_step
        old.trackers, old.writer = (), None

    def log_missing_line(self, line: MetricsLine | None) -> None:
        """Give a line to the trackers, unless they have it already."""
        if line is not None and line["step"] > self.logged_step:
            self.log_to_trackers(line)

    def close_screen(self) -> None:
        """Leave the terminal to others."""
        self.screen.close()

    def close_trackers(self, outcome: ExitCode) -> dict[str, str]:
        """Close the trackers and return what they have to show, such as a link.

        It comes after everything else, as a server may be slow. A second call does nothing.
        """
        self.heartbeat.suspend()
        closing, self.trackers = self.trackers, ()
        return {title: text for t in closing for title, text in t.close(outcome).items()}
