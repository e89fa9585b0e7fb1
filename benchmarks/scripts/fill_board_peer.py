"""Give a peer of the board the runs of a folder, through its own library and in its own format.

    PYTHON_OF_THE_PEER fill_board_peer.py NAME SOURCE TARGET LIMIT_S

Every run has the settings and all the numbers that it has in SOURCE. When the limit has passed the
peer has to do with those that it has by then. Prints how many, and in what time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class SourceRun(NamedTuple):
    name: str
    settings: dict[str, Any]
    lines: list[dict[str, float]]

    def list_numbers(self) -> list[tuple[dict[str, float], dict[str, float]]]:
        """Return for each line what was measured, and the whole line."""
        places = ("step", "epoch", "samples", "time")
        return [({k: v for k, v in line.items() if k not in places}, line) for line in self.lines]


def read_run(folder: Path) -> SourceRun:
    config = json.loads((folder / "config.json").read_text())
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # a line of an evaluation has the time of its step
        line.setdefault("time", lines[0]["time"] + line["step"])
    return SourceRun(folder.name, {**config["experiment"], "seed": config["seed"]}, lines)


def fill_tensorboard(target: Path) -> Callable[[SourceRun], None]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    def add(run: SourceRun) -> None:
        # Settings are left out: beside HPARAMS it has no place for them.
        folder = target / run.name
        folder.mkdir()
        began = run.lines[0]["time"]
        with (folder / f"events.out.tfevents.{int(began)}.host.1.0").open("wb") as file:
            writer = RecordWriter(file)
            first = Event(wall_time=began, file_version="brain.Event:2")
            writer.write(first.SerializeToString())
            for numbers, line in run.list_numbers():
                values = [Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
                event = Event(wall_time=line["time"], step=int(line["step"]))
                event.summary.CopyFrom(Summary(value=values))
                writer.write(event.SerializeToString())
            writer.flush()

    return add


def fill_aim(target: Path) -> Callable[[SourceRun], None]:
    from aim import Repo, Run

    repo = Repo.from_path(str(target), init=True)

    def add(run: SourceRun) -> None:
        one = Run(
            repo=repo,
            experiment="toy",
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        one.name = run.name
        one["hparams"] = run.settings
        for numbers, line in run.list_numbers():
            for name, value in numbers.items():
                one.track(value, name=name, step=int(line["step"]), epoch=int(line["epoch"]))
        one.close()

    return add


def fill_mlflow(target: Path) -> Callable[[SourceRun], None]:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(f"sqlite:///{target / 'mlflow.db'}")
    experiment = client.create_experiment("toy", str(target / "artifacts"))

    def add(run: SourceRun) -> None:
        began_ms = int(1000 * run.lines[0]["time"])
        made = client.create_run(experiment, began_ms, run_name=run.name).info.run_id
        numbers = [
            Metric(name, value, int(1000 * line["time"]), int(line["step"]))
            for values, line in run.list_numbers()
            for name, value in values.items()
        ]
        settings = [Param(name, str(value)) for name, value in run.settings.items()]
        client.log_batch(made, numbers[:900], settings)
        client.set_terminated(made, "FINISHED", int(1000 * run.lines[-1]["time"]))

    return add


def fill_trackio(target: Path) -> Callable[[SourceRun], None]:
    os.environ["TRACKIO_DIR"] = str(target)
    from datetime import datetime, timezone

    from trackio.sqlite_storage import SQLiteStorage

    def add(run: SourceRun) -> None:
        numbers = run.list_numbers()
        SQLiteStorage.bulk_log(
            project="toy",
            run=run.name,
            metrics_list=[values for values, _ in numbers],
            steps=[int(line["step"]) for _, line in numbers],
            timestamps=[
                datetime.fromtimestamp(line["time"], timezone.utc).isoformat()
                for _, line in numbers
            ],
            config=run.settings,
        )

    return add


FILL = {
    "TensorBoard": fill_tensorboard,
    "Aim": fill_aim,
    "MLflow": fill_mlflow,
    "Trackio": fill_trackio,
}


def main() -> None:
    name, source, target, limit_s = sys.argv[1:]
    add = FILL[name](Path(target))
    begun = time.monotonic()
    count = 0
    for folder in sorted(Path(source).iterdir()):
        if folder.name.startswith("."):
            continue
        add(read_run(folder))
        count += 1
        if time.monotonic() - begun > float(limit_s):
            break
    print(json.dumps({"runs": count, "seconds": round(time.monotonic() - begun, 1)}))


if __name__ == "__main__":
    main()
