"""What a test sees of the board's pages in a browser."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from board_server import RunningBoard
from browser import Browser
from command_runner import HERE

OpenBoard = Callable[..., RunningBoard]
"""Starts a board on a folder, with words of its command line, and opens a `view` of it."""
PACED = (
    *("train", f"experiment={HERE / 'paced_training.py'}:train"),
    *("trainer.batch_size=8", "trainer.log_steps=1", "trainer.save.steps=20"),
)
LOSS, EVAL_LOSS = ".cv-panel[data-metric=loss]", ".cv-panel[data-metric=eval_loss]"
SEARCH = "[data-search]"


def count_pixels(browser: Browser, css: str, least_colour: int = 50) -> int:
    """How many pixels of a canvas are drawn in a colour; 0: in any, grey too."""
    count: int = browser.run(
        """
        const canvas = document.querySelector(arguments[0]);
        if (!canvas || !canvas.width) return 0;
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let i = 0; i < data.length; i += 4) {
          const [r, g, b] = data.subarray(i, i + 3);
          const colour = Math.max(r, g, b) - Math.min(r, g, b);
          if (data[i + 3] && colour >= arguments[1]) count += 1;
        }
        return count;""",
        *(css, least_colour),
    )
    return count


def list_rows(browser: Browser) -> list[str]:
    """The names of the runs in sight, from the top."""
    names: list[str] = browser.run(
        """
        const rows = [...document.querySelectorAll(".rt-body .rt-row")];
        const seen = rows.map((row) => [row.getBoundingClientRect().top, row]);
        return seen.filter(([top]) => top > 0).sort((a, b) => a[0] - b[0])
          .map(([, row]) => (row.querySelector("a") || row.querySelector("span")).textContent);"""
    )
    return names


def wait_for_rows(browser: Browser, *names: str) -> None:
    browser.wait(
        f"rows {names}", lambda: list_rows(browser)[: len(names)] == list(names) if names else True
    )


def wait_for_count(browser: Browser, text: str) -> None:
    browser.wait(text, lambda: browser.list_texts(".rt-count") == [text])


def read_cell(browser: Browser, name: str, title: str) -> str:
    """What the table says of a run under a title."""
    cell: str = browser.run(
        """
        const [name, title] = arguments;
        const titles = [...document.querySelectorAll(".rt-h span")].map((e) => e.textContent);
        const row = [...document.querySelectorAll(".rt-body .rt-row")]
          .find((one) => one.querySelector("a")?.textContent === name);
        return row?.children[titles.indexOf(title)]?.textContent ?? "";""",
        *(name, title),
    )
    return cell


def read_last_points(browser: Browser, metric: str = "loss") -> dict[str, str]:
    """The step of the last point of each line of a chart."""
    rows: list[list[str]] = browser.run(
        """
        const rows = document.querySelectorAll(arguments[0] + " tbody tr");
        return [...rows].map((row) => [...row.children].map((e) => e.textContent));""",
        f".cv-panel[data-metric={metric}] table",
    )
    return {name: step for name, _, step in rows}


def read_zoom(browser: Browser) -> tuple[float, float] | None:
    """The part of the horizontal axis that the address names."""
    _, has_zoom, rest = browser.url.partition("zoom=")
    if not has_zoom:
        return None
    low, high = rest.split("&")[0].split("_")
    return float(low), float(high)


def save_chart(browser: Browser, folder: Path, metric: str, kind: str) -> Path:
    """Save a chart by its menu, as `PNG`, `SVG` or `CSV`. Returns the file."""
    file = folder / f"{metric}.{kind.lower()}"
    file.unlink(missing_ok=True)
    panel = f".cv-panel[data-metric={metric}]"
    browser.click(f"{panel} .cv-menu summary")
    browser.click(f"{panel} [role=menuitem]", kind)
    browser.wait(f"{file}", file.exists)
    return file


def read_points(browser: Browser, folder: Path, metric: str) -> list[dict[str, str]]:
    """The points of a chart that are on the screen, by its CSV."""
    text = save_chart(browser, folder, metric, "CSV").read_text()
    return list(csv.DictReader(text.splitlines()))
