"""The starts of a run, one below the other: phases of different sizes have different speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from echelon.runs.history import RunHistory, RunPhase
from echelon.tracking.tracker import format_three_digits
from echelon.utils.text import convert_for_terminal, format_duration, format_timestamp
from echelon.views.table import Table, TableColumn

_MAX_SHOWN = 12


def render_phases(history: RunHistory, width: int) -> list[Text]:
    """Return a table of the starts of a run that was started more than once, else nothing."""
    if len(history.phases) < 2:
        return []
    shown = history.phases[-_MAX_SHOWN:]
    lines = Table(_build_columns(shown), header_style="", indent=2).render(width)
    if hidden := len(history.phases) - len(shown):
        lines.append(Text(convert_for_terminal(f"  and {hidden} before: --json"), "dim"))
    return lines


def _build_columns(phases: Sequence[RunPhase]) -> list[TableColumn]:
    return [
        TableColumn("STARTED", [format_timestamp(p.started) for p in phases]),
        TableColumn("STEPS", [_format_steps(p) for p in phases], is_right_aligned=True),
        TableColumn("TIME", [_format_time(p) for p in phases], is_right_aligned=True, priority=2),
        TableColumn("SPEED", [_format_speed(p) for p in phases], is_right_aligned=True),
        TableColumn("SIZE", [_format_size(p) for p in phases], priority=1),
        TableColumn("WHERE", [_format_place(p) for p in phases], priority=4),
        TableColumn("ENDED", [p.cause or "–" for p in phases], priority=3, min_width=6),
    ]


def _format_steps(phase: RunPhase) -> str:
    if phase.first_step is None:
        return "–"
    return f"{phase.first_step}–{'' if phase.last_step is None else phase.last_step}"


def _format_time(phase: RunPhase) -> str:
    return "–" if phase.trained_since is None else format_duration(phase.trained_s)


def _format_speed(phase: RunPhase) -> str:
    """Return the mean speed, evaluations and saves included."""
    if phase.trained_s <= 0:
        return "–"
    if phase.samples:
        return f"{format_three_digits(phase.samples / phase.trained_s)} samples/s"
    return f"{format_three_digits(phase.steps / phase.trained_s)} steps/s" if phase.steps else "–"


def _format_size(phase: RunPhase) -> str:
    """Return nodes × processes on each, as `echelon jobs` does."""
    if not phase.nodes or not phase.processes:
        return "–"
    return f"{phase.nodes} × {phase.processes // phase.nodes}"


def _format_place(phase: RunPhase) -> str:
    place = f"job {phase.job}" if phase.job else phase.host
    return f"{phase.launcher} {place}".strip()


def phases_to_json(history: RunHistory) -> list[dict[str, Any]]:
    """Return the starts of a run as `echelon show --json` prints them."""
    return [
        {
            **{key: getattr(phase, key) for key in ("started", "ended", "launcher", "host", "job")},
            **{key: getattr(phase, key) for key in ("nodes", "processes")},
            "first_step": phase.first_step,
            "last_step": phase.last_step,
            "trained_s": phase.trained_s,
            "samples_per_s": phase.samples / phase.trained_s
            if phase.samples and phase.trained_s
            else None,
            "cause": phase.cause or None,
        }
        for phase in history.phases
    ]
