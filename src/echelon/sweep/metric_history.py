"""The history of one metric, read from the metrics.jsonl of a run while it grows."""

from __future__ import annotations

from pathlib import Path

from echelon.runs.metrics_file import MetricsFollower, is_number

_AXIS_KEYS = {"step", "epoch", "samples", "time"}
"""Numbers of a line that are not metrics."""


def to_metrics_file_key(name: str, is_program: bool) -> str:
    """Return the key of a metric in metrics.jsonl.

    A program writes its own names there. The metric of an experiment is named as trackers name it
    (`eval/rmse`) or as `trainer.best` does (`rmse`): both are `eval_rmse` in the file.
    """
    folder, slash, rest = name.partition("/")
    if is_program or name.startswith("eval_"):
        return name
    if slash and folder == "train":
        return rest
    return f"eval_{rest if slash and folder == 'eval' else name}"


def to_tracker_name(key: str) -> str:
    """Return the name by which trackers know a key of metrics.jsonl."""
    return f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}"


class MetricHistory:
    """The finite values of one metric so far."""

    def __init__(self, path: Path, key: str) -> None:
        self._follower, self._key = MetricsFollower(path), key
        self.values: list[float] = []
        self.reported_keys: set[str] = set()
        """All metrics that were reported."""

    def read_all_values(self) -> list[float]:
        """Read what was added since the last call, and return all values."""
        lines, is_new = self._follower.read_new_lines()
        if is_new:
            self.values = []
        for line in lines:
            numbers = {k: v for k, v in line.items() if isinstance(v, (int, float))}
            self.reported_keys |= numbers.keys() - _AXIS_KEYS
            if is_number(value := numbers.get(self._key)):
                self.values.append(float(value))
        return self.values
