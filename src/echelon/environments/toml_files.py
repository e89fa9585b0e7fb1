"""Reading TOML files of a source folder, and lenient access to their tables."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from echelon.environments.requirements import decode_text
from echelon.errors import EchelonError, Fault
from echelon.utils.os_errors import format_os_error_reason

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_toml(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file, or raise with the reason."""
    try:
        return dict(tomllib.loads(decode_text(file.read_bytes()).replace("\r\n", "\n")))
    except OSError as error:
        reason = format_os_error_reason(error)
        raise EchelonError(Fault(f"{file} cannot be read: {reason}", "fix the file")) from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise EchelonError(Fault(f"{file} is not TOML: {error}", "fix the file")) from error


def find_line(file: Path, name: str) -> int:
    """Return the number of the first line that mentions a package; 1 if that cannot be found."""
    start = re.compile(rf"(^|[\"'\s\[,]){re.escape(name)}($|[^\w.-])", re.I | re.M)
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    found = start.search(text)
    return text.count("\n", 0, found.end() - 1) + 1 if found else 1


def filter_tables(value: Any) -> list[dict[str, Any]]:
    """Return the tables of a list; whatever else is written there is left out."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def get_table_or_empty(value: Any) -> dict[str, Any]:
    """Return the value if it is a table, else an empty one."""
    return value if isinstance(value, dict) else {}
