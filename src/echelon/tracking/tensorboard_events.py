"""TensorBoard's event files, written with its own record writer.

Not with torch's SummaryWriter or TensorBoard's EventFileWriter: both put a thread and a queue of
their own in between, which hide a full disk and lose the lines of two minutes to a kill. The import
costs the same, a quarter of a second.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.config.schema import Config
from echelon.errors import ExitCode
from echelon.runs.metrics_file import MetricsLine
from echelon.runs.run_folder import Run
from echelon.tracking.background import PrintMessage, TrackerProgress
from echelon.tracking.media_records import find_image, is_histogram, read_png_size
from echelon.tracking.tracker import prefix_metric_names, select_axes


def get_event_folder(config: Config, run_folder: Path) -> Path:
    """Return the folder of a run's event files. In a folder that is chosen by a setting every
    run has its own: in the same one, each would purge the others."""
    chosen = config.track.tensorboard.folder
    return Path(chosen).absolute() / run_folder.name if chosen else run_folder / "tensorboard"


class TensorBoardWriter:
    """One event file; every start of a run adds another to the folder."""

    settles_s = 0.0

    def __init__(self, folder: Path, run: Run, config: Config, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._run = run
        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # Readers then drop what earlier files hold from this step on: it comes again.
        again = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=first_step, session_log=again))
        self._write_config(config, first_step)

    def _write_config(self, config: Config, step: int) -> None:
        """Write the configuration as text."""
        from tensorboard.plugins.text.summary_v2 import text_pb  # the same as it draws

        config_lines = json.dumps(config.to_dict(), indent=2).splitlines()
        shown = text_pb("config", "\n".join(f"    {line}" for line in config_lines))
        self._write(self._event(wall_time=time.time(), step=step, summary=shown))

    def put(self, line: MetricsLine, row: int) -> None:
        """Write one line of metrics as an event."""
        numbers = {key: value for key, value in select_axes(line).items() if key != "step"}
        values = [
            self._make_value(name, value)
            for name, value in (numbers | prefix_metric_names(line)).items()
        ]
        summary = self._summary(value=[value for value in values if value is not None])
        wall_time = line.get("time", time.time())
        self._write(self._event(wall_time=wall_time, step=line["step"], summary=summary))

    def _make_value(self, name: str, value: Any) -> Any:
        """Return a number, a text, an image or a histogram as TensorBoard has it; None where the
        file of an image is gone."""
        if isinstance(value, str):
            from tensorboard.plugins.text.summary_v2 import text_pb

            return text_pb(name, value).value[0]
        if is_histogram(value):
            return self._summary.Value(tag=name, histo=_make_histogram(value))
        if not isinstance(value, dict):
            return self._summary.Value(tag=name, simple_value=value)
        if (path := find_image(self._run, value)) is None:
            return None
        data = path.read_bytes()
        width, height, channels = read_png_size(data)
        image = self._summary.Image(
            width=width, height=height, colorspace=channels, encoded_image_string=data
        )
        return self._summary.Value(tag=name, image=image)

    def _write(self, event: object) -> None:
        self._records.write(event.SerializeToString())  # type: ignore[attr-defined]

    def flush(self) -> None:
        self._file.flush()

    def close(self, outcome: ExitCode) -> None:
        self._file.close()


def open_tensorboard(
    folder: Path,
    run: Run,
    config: Config,
    step: int,
    past_lines: Sequence[MetricsLine],
    progress: TrackerProgress,
    print_message: PrintMessage,
) -> tuple[TensorBoardWriter, Sequence[MetricsLine]]:
    """Return the writer and the lines it must be given. Steps of which lines are missing are
    written again as a whole."""
    has = progress.lines if any(folder.glob("events.out.tfevents.*")) else 0
    first = past_lines[has]["step"] if has < len(past_lines) else step + 1
    return TensorBoardWriter(folder, run, config, first), [
        line for line in past_lines if line["step"] >= first
    ]


def _make_histogram(value: dict[str, list[float]]) -> Any:
    """Return a histogram as TensorBoard has it. Sums are of the middles of the bins."""
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto

    edges, counts = value["bins"], value["counts"]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    pairs = list(zip(counts, middles, strict=True))
    return HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(count * middle for count, middle in pairs),
        sum_squares=sum(count * middle**2 for count, middle in pairs),
        bucket_limit=edges[1:],
        bucket=counts,
    )
