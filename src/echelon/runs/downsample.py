"""Curves of any length in bounded memory: what a picture can show, and no value that matters lost.

Up to a few thousand points a curve is kept as it is. A longer one is kept in buckets of equally
many points, each with its lowest, highest and last point and its mean. When there are too many
buckets, neighbours are merged, so one pass over a file is enough whatever its length.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_POINTS = 4096
"""Points that are kept exactly. Of more there are half as many to as many buckets."""


class CurveBucket(NamedTuple):
    """Consecutive points of a curve."""

    points: int
    mean: float
    min_step: float
    min: float
    max_step: float
    max: float
    last_step: float
    last: float

    def merge(self, later: CurveBucket) -> CurveBucket:
        """Return both as one."""
        points = self.points + later.points
        lowest = later if later.min < self.min else self
        highest = later if later.max > self.max else self
        return CurveBucket(
            points,
            self.mean * (self.points / points) + later.mean * (later.points / points),
            lowest.min_step,
            lowest.min,
            highest.max_step,
            highest.max,
            later.last_step,
            later.last,
        )


class CurveSampler:
    """Takes the points of one curve one by one, in the order of their steps.

    `add` is called for every value of a file, so the open bucket is plain attributes: making a
    tuple for each value would take longer than reading it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first_value = 0.0
        self._steps: list[float] = []
        self._values: list[float] = []
        self._buckets: list[CurveBucket] = []
        self._bucket_size = 1
        """Points of a full bucket."""
        self._open_count = 0
        self._mean = self._min = self._max = self._last = 0.0
        self._min_step = self._max_step = self._last_step = 0.0

    def add(self, step: float, value: float) -> None:
        """Add a point."""
        self.count += 1
        if self.count <= MAX_POINTS:
            if self.count == 1:
                self.first_value = value
            self._steps.append(step)
            self._values.append(value)
            return
        if not self._buckets:
            self._start_buckets()
        self._open_count += 1
        if self._open_count == 1:
            self._mean = self._min = self._max = value
            self._min_step = self._max_step = step
        else:
            self._mean += value / self._open_count - self._mean / self._open_count
            if value < self._min:
                self._min, self._min_step = value, step
            if value > self._max:
                self._max, self._max_step = value, step
        self._last, self._last_step = value, step
        if self._open_count == self._bucket_size:
            self._close_bucket()

    def _start_buckets(self) -> None:
        points = zip(self._steps, self._values, strict=True)
        self._buckets = [CurveBucket(1, v, s, v, s, v, s, v) for s, v in points]
        self._steps, self._values = [], []
        self._merge_neighbours()

    def _close_bucket(self) -> None:
        self._buckets.append(self._get_open_bucket())
        self._open_count = 0
        if len(self._buckets) == MAX_POINTS:
            self._merge_neighbours()

    def _get_open_bucket(self) -> CurveBucket:
        lowest, highest = (self._min_step, self._min), (self._max_step, self._max)
        return CurveBucket(
            self._open_count, self._mean, *lowest, *highest, self._last_step, self._last
        )

    def _merge_neighbours(self) -> None:
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
        self._buckets = [first.merge(second) for first, second in pairs]
        self._bucket_size *= 2

    def _list_buckets(self) -> list[CurveBucket]:
        return self._buckets + ([self._get_open_bucket()] if self._open_count else [])

    def list_points(self) -> tuple[list[float], list[float], list[float]]:
        """Return steps, values, and for each the mean of the values around it.

        Of a bucket these are its lowest, highest and last point. Of a curve that is kept exactly
        they are its points, and the means are the values themselves.
        """
        if not self._buckets:
            return self._steps, self._values, self._values
        steps, values, means = [], [], []
        for bucket in self._list_buckets():
            last = (bucket.last_step, bucket.last)
            extremes = {(bucket.min_step, bucket.min), (bucket.max_step, bucket.max)}
            for step, value in [*sorted(extremes - {last}), last]:
                steps.append(step)
                values.append(value)
                means.append(bucket.mean)
        return steps, values, means

    def list_last_points(self) -> tuple[list[float], list[float]]:
        """Return steps and values, of each bucket the last: for a curve that only rises."""
        if not self._buckets:
            return self._steps, self._values
        buckets = self._list_buckets()
        return [bucket.last_step for bucket in buckets], [bucket.last for bucket in buckets]
