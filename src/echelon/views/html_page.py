"""Pages that need nothing else: template, data, and the style and script that all charts share."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any


def fill_page_template(template: Path, title: str, data: dict[str, Any]) -> str:
    """Return the page.

    Names come from folders, settings and files and may hold anything. They are data to the script,
    which writes them as text, and `<` is escaped so that it cannot end the data early. All is
    filled in at once, so a title such as `%DATA%` stays a title.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "%TITLE%": html.escape(title),
        "%STYLE%": _read_neighbour("chart.css"),
        "%CHART%": _read_neighbour("chart.js"),
        "%DATA%": text,
    }
    page = template.read_text(encoding="utf-8")
    return re.sub("|".join(parts), lambda found: parts[found[0]], page)


def _read_neighbour(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
