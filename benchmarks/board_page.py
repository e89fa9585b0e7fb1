"""A page in a real browser, and when what is looked for was on its screen.

The browser is headless Chromium, with an empty profile for each benchmark. A script that every
page begins with looks 50 times a second for what is to be shown, and notes the time one frame
after it was there, by the clock that this process reads too.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from selenium.common.exceptions import TimeoutException
from urllib3.exceptions import ReadTimeoutError

from common import HERE, descendants

sys.path.append(str(HERE.parent / "tests" / "helpers"))
from browser import start_browser

WINDOW = (1600, 1000)
LIMIT_S = 60.0
WATCH = """
(() => {
  const isShown = () => { %s };
  const look = () => {
    let found = false;
    try {
      found = Boolean(isShown());
    } catch (error) {
      found = false; // the page is not there yet
    }
    if (!found) setTimeout(look, 20);
    else requestAnimationFrame(() => setTimeout(() => { window.benchmarkShownAt = Date.now(); }));
  };
  look();
})();"""


class PageMemory(NamedTuple):
    """In MB. Of the page's process: what n processes share counts 1/n."""

    process: float
    script_heap: float


class BenchmarkPage:
    """The one page that is looked at."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def command(self, name: str, **parameters: Any) -> Any:
        with answering():
            return self.driver.execute_cdp_cmd(name, parameters)

    def run(self, script: str, *values: Any) -> Any:
        with answering():
            return self.driver.execute_script(script, *values)

    def leave(self) -> None:
        with answering():
            self.driver.get("about:blank")

    @contextlib.contextmanager
    def prepare(self, script: str) -> Iterator[None]:
        """Have a script run in every page before its own."""
        source = f"(() => {{ {script} }})();"
        found = self.command("Page.addScriptToEvaluateOnNewDocument", source=source)
        try:
            yield
        finally:
            self.command("Page.removeScriptToEvaluateOnNewDocument", **found)

    def open_until(self, url: str, is_shown: str, limit_s: float = LIMIT_S) -> float:
        """Open a page and return the time at which a condition held, the body of a function in
        JavaScript."""
        with self.prepare(WATCH % is_shown):
            self.command("Page.navigate", url=url)
            return self._wait_until_shown(is_shown, limit_s)

    def act_until(self, action: str, is_shown: str, limit_s: float = LIMIT_S) -> float:
        """Run a script in the page and return the seconds until a condition holds."""
        begun_ms = self.run(f"const begun = Date.now(); {action}; return begun;")
        return self.wait_until(is_shown, limit_s) - float(begun_ms) / 1e3

    def wait_until(self, is_shown: str, limit_s: float = LIMIT_S) -> float:
        """Return the time at which a condition holds in the page that is open."""
        self.run(f"window.benchmarkShownAt = 0; {WATCH % is_shown}")
        return self._wait_until_shown(is_shown, limit_s)

    def _wait_until_shown(self, is_shown: str, limit_s: float) -> float:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if shown_ms := self.run("return window.benchmarkShownAt || 0"):
                return float(shown_ms) / 1e3
            time.sleep(0.02)
        raise TimeoutError(f"not on the screen after {limit_s:g} s: {is_shown}\n{self.read_text()}")

    def read_text(self) -> str:
        with contextlib.suppress(Exception):
            return str(self.run("return document.body.innerText"))[:2000]
        return "there is no page"

    def measure_memory(self) -> PageMemory:
        self.command("HeapProfiler.collectGarbage")
        metrics = self.command("Performance.getMetrics")["metrics"]
        [heap] = [each["value"] for each in metrics if each["name"] == "JSHeapUsedSize"]
        return PageMemory(read_megabytes(self._find_process()), heap / 1e6)

    def _find_process(self) -> int:
        """Return the process of the page: the one that is at work when the page is. Those of pages
        that were left stay for a while."""
        found = {
            pid: read_processor_s(pid)
            for pid in descendants(self.driver.service.process.pid)
            if b"--type=renderer" in _read_bytes(Path(f"/proc/{pid}/cmdline"))
        }
        self.run("const end = performance.now() + 300; while (performance.now() < end);")
        return max(found, key=lambda pid: read_processor_s(pid) - found[pid])


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Whatever it is that a browser waits for in vain, a script or a server, is a TimeoutError."""
    try:
        yield
    except (ReadTimeoutError, TimeoutException) as error:
        raise TimeoutError(f"the page or its server does not answer: {error}") from error


@contextlib.contextmanager
def open_page() -> Iterator[BenchmarkPage]:
    with (
        tempfile.TemporaryDirectory(prefix="echelon-bench-", ignore_cleanup_errors=True) as folder,
        start_browser(Path(folder)) as browser,
    ):
        browser.set_size(*WINDOW)
        for domain in ("Page", "Performance", "HeapProfiler"):
            browser.command(f"{domain}.enable")
        page = BenchmarkPage(browser.driver)
        page.leave()
        yield page


def can_open_pages() -> bool:
    return all(shutil.which(program) for program in ("chromium", "chromedriver"))


def read_megabytes(pid: int) -> float:
    """Memory of one process: a page that n processes share counts 1/n (PSS)."""
    text = _read_bytes(Path(f"/proc/{pid}/smaps_rollup")).decode()
    found = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    return int(found[0]) / 1e3 if found else 0.0


def read_processor_s(pid: int) -> float:
    """Seconds of the processor that a process has used, its threads included."""
    clock = (~pid << 3) | 2  # as clock_getcpuclockid(3) makes it: ticks of /proc are too coarse
    with contextlib.suppress(OSError):
        return time.clock_gettime(clock)
    return 0.0  # it has ended


def _read_bytes(file: Path) -> bytes:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""
