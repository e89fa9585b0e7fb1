"""Values that a person types without quotes, though they mean something else in Hydra's grammar."""

from __future__ import annotations

_GRAMMAR_CHARACTERS = set("[]{}(),'\"\\=$")
"""What makes a value more than a plain word in Hydra's grammar."""
_SLURM_WORDS = {
    *("launch.partition", "launch.constraint", "launch.reservation", "launch.licenses"),
    *("launch.after", "launch.qos", "launch.deadline"),
}
"""Settings in which commas and brackets are Slurm's: `launch.partition=a,b` is one value."""


def quote_plain_word(text: str) -> str:
    """Return an override with its value quoted, where it is one word for the user but not in
    Hydra's grammar: letters beyond ASCII, as in a path, and what is Slurm's."""
    key, _, value = text.partition("=")
    if key in _SLURM_WORDS:
        is_special = any(not c.isalnum() and c not in "_-" for c in value)
        return f"{key}='{value}'" if is_special and not set("'\"\\$") & set(value) else text
    if not value.isascii() and not _GRAMMAR_CHARACTERS & set(value):
        return f"{key}='{value}'"
    return text
