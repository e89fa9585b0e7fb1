"""Sizes, durations and counts in few characters."""

from __future__ import annotations

import time

import pytest

from echelon.utils.text import (
    convert_to_ascii,
    format_bytes,
    format_count,
    format_duration,
    format_elapsed,
    format_time_ago,
    format_timestamp,
    join_names,
    truncate_text,
)


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.5, "1 kB"),
        (1500, "1.5 kB"),
        (1_234_567, "1.23 MB"),
        (999_600, "1 MB"),
        (25e9, "25 GB"),
        (139_586e6, "140 GB"),
        (3e12, "3 TB"),
        (3e15, "3,000 TB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(size_bytes: float, shown: str) -> None:
    assert format_bytes(size_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *[(-1, "0s"), (0, "0s"), (59.9, "59s"), (60, "1m00s"), (114, "1m54s"), (3599, "59m59s")],
        *[(3600, "1h00m"), (11100, "3h05m"), (48 * 3600 - 1, "47h59m"), (48 * 3600, "2d00h")],
        (10**7, "115d17h"),
    ],
)
def test_durations_have_two_units(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0.0 s"), (7.71, "7.7 s"), (59.96, "1m00s"), (113.6, "1m54s")]
)
def test_a_sentence_says_tenths_of_a_short_time(seconds: float, shown: str) -> None:
    assert format_elapsed(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *[(-60, "just now"), (0, "just now"), (59, "just now"), (60, "1 minute ago")],
        *[(7200, "2 hours ago"), (86400, "1 day ago"), (3 * 86400 + 5, "3 days ago")],
    ],
)
def test_ages_are_in_words(seconds: float, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert format_time_ago(1e9 - seconds) == shown


def test_timestamps_are_local_dates() -> None:
    moment = time.mktime((2026, 2, 28, 9, 5, 59, 0, 0, -1))
    assert format_timestamp(moment) == "2026-02-28 09:05"


def test_counts_have_a_plural() -> None:
    assert [format_count(n, "step") for n in (0, 1, 2, 1000)] == [
        *("0 steps", "1 step", "2 steps", "1,000 steps")
    ]


def test_long_text_is_cut_and_many_names_are_abbreviated() -> None:
    assert truncate_text("abcdef", 6) == "abcdef"
    assert truncate_text("abcdef", 5) == "abcd…"
    assert join_names(["a", "b"]) == "a, b"
    assert join_names([str(n) for n in range(9)]) == "0 … 8"


def test_ascii_is_never_longer() -> None:
    text = "a–b — c… 2×4 · └ → ━─╸ 40° ≥"
    assert convert_to_ascii(text).isascii()
    assert len(convert_to_ascii(text)) == len(text)
