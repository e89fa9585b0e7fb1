"""A real browser, Debian's Chromium, and what a person does with a page in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60.0
SHIM = Path(__file__).with_name("no_netlink.c")
SCRIPT = Path(__file__).parents[2] / "scripts" / "install_chromium.py"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1400,900", "--hide-scrollbars"),
)


class Key:
    """Keys that are no signs, as WebDriver names them."""

    BACKSPACE, TAB, SHIFT, CONTROL, ESCAPE = "\ue003", "\ue004", "\ue008", "\ue009", "\ue00c"
    END, HOME, LEFT, UP, RIGHT, DOWN = "\ue010", "\ue011", "\ue012", "\ue013", "\ue014", "\ue015"


def require_browser() -> None:
    """Install the browser if that is possible; otherwise skip the test with the reason."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    reason = done.stderr.strip()
    if done.returncode == 0:
        with contextlib.suppress(ImportError):
            import selenium  # noqa: F401

            return
        reason = "the package selenium is not installed"
    if os.environ.get("ECHELON_REQUIRE_CLUSTER") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def build_library(folder: Path) -> Path | None:
    """Return the library that keeps a browser from what happens to this machine's networks; None
    where there is no compiler."""
    if shutil.which("gcc") is None:
        return None
    target = folder / "no_netlink.so"
    flags = ["-O1", "-shared", "-fPIC", "-ldl"]
    subprocess.run(["gcc", str(SHIM), "-o", str(target), *flags], check=True)
    return target


@contextlib.contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, until the block ends. Nothing is fetched to start it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    environment = {**os.environ, "SE_OFFLINE": "true", "HOME": str(profile)}
    if library := build_library(profile):
        environment["LD_PRELOAD"] = str(library)
    service = Service(shutil.which("chromedriver"), env=environment)
    driver = webdriver.Chrome(options, service)
    try:
        driver.set_script_timeout(LIMIT_S)
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """One browser, and the page in it. Elements are named by CSS: the first one that is seen."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.home = driver.current_window_handle
        self.allowed: list[str] = []
        self.errors: list[str] = []

    # --- pages ---

    def open(self, url: str) -> None:
        self.driver.get(url)

    def open_window(self, url: str) -> str:
        """Open another page beside this one; returns the name to switch to it."""
        self.driver.switch_to.new_window("tab")
        self.driver.get(url)
        return str(self.driver.current_window_handle)

    def switch_to(self, window: str) -> None:
        self.driver.switch_to.window(window)

    def leave_pages(self) -> None:
        """Keep what went wrong in all pages, and close them: what happens to their servers from
        here on is no fault of theirs."""
        self.errors += self.read_errors()
        origins = set()
        for window in self.driver.window_handles:
            self.driver.switch_to.window(window)
            origins.add(str(self.run("return location.origin")))
            if window == self.home:
                self.driver.get("about:blank")
            else:
                self.driver.close()
        self.driver.switch_to.window(self.home)
        for origin in origins:  # once no page is left that would ask without its cookie
            if origin.startswith("http"):
                self.command("Storage.clearDataForOrigin", origin=origin, storageTypes="all")

    def reset(self) -> None:
        """Be as a new browser: one empty page, no cookies, no errors, light, at a desk."""
        self.leave_pages()
        self.command("Network.clearBrowserCookies")
        self.command("Emulation.clearDeviceMetricsOverride")
        self.set_scheme("light")
        self.driver.get_log("browser")
        self.allowed, self.errors = [], []

    def set_scheme(self, scheme: str) -> None:
        """What the system prefers: `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def set_size(self, width: int, height: int) -> None:
        """Narrower than a window can be."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)

    @property
    def url(self) -> str:
        return str(self.driver.current_url)

    def take_picture(self, file: Path) -> None:
        self.driver.save_screenshot(str(file))

    # --- what went wrong ---

    def allow(self, pattern: str) -> None:
        """Expect errors of this kind in the console."""
        self.allowed.append(pattern)

    def read_errors(self) -> list[str]:
        """Errors and violations of policies since this was last asked, but those allowed."""
        errors = [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE" or entry.get("source") == "security"
        ]
        return [e for e in errors if not any(re.search(pattern, e) for pattern in self.allowed)]

    # --- looking ---

    def run(self, script: str, *values: Any) -> Any:
        """What a script gives, which sees the values as `arguments`."""
        return self.driver.execute_script(script, *values)

    def wait(self, what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """The first value of a condition that is true. An element that is replaced meanwhile is
        looked for again."""
        from selenium.common.exceptions import (
            ElementNotInteractableException,
            StaleElementReferenceException,
        )

        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(
                StaleElementReferenceException, ElementNotInteractableException
            ):
                if value := condition():
                    return value
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_s:g} s: {what}\n{self.read_page()}")
            time.sleep(0.03)

    def wait_for(self, css: str, text: str = "") -> Any:
        """The first element that is seen and holds the text."""
        return self.wait(f"{css} {text!r}", lambda: self.find(css, text))

    def wait_until_gone(self, css: str, text: str = "") -> None:
        self.wait(f"no {css} {text!r}", lambda: not self.find(css, text))

    def wait_until_true(self, script: str, *values: Any) -> Any:
        """What an expression gives, once it is true."""
        return self.wait(script, lambda: self.run(f"return {script}", *values))

    def find(self, css: str, text: str = "") -> Any:
        """The element, or None."""
        return self.run(
            """
            for (const one of document.querySelectorAll(arguments[0])) {
              if (one.checkVisibility() && one.textContent.includes(arguments[1])) return one;
            }
            return null;""",
            css,
            text,
        )

    def list_texts(self, css: str) -> list[str]:
        """The texts of all elements, seen or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        texts: list[str] = self.run(script, css)
        return texts

    def read_page(self) -> str:
        """What is on the screen, for a message."""
        with contextlib.suppress(Exception):
            return f"{self.url}\n{self.run('return document.body.innerText')[:3000]}"
        return "there is no page"

    def read_clipboard(self) -> str:
        """What was copied in the page last."""
        origin = str(self.run("return location.origin"))
        granted = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        self.command("Browser.grantPermissions", origin=origin, permissions=granted)
        return str(self.run("return navigator.clipboard.readText()"))

    # --- acting ---

    def hover(self, css: str, text: str = "") -> None:
        """Move the pointer over an element."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver, duration=0).move_to_element(self.wait_for(css, text)).perform()

    def click(self, css: str, text: str = "") -> None:
        """Click an element once it is there, and is covered by nothing."""
        from selenium.common.exceptions import ElementClickInterceptedException

        def try_click() -> bool:
            element = self.find(css, text)
            if element is None:
                return False
            with contextlib.suppress(ElementClickInterceptedException):
                element.click()
                return True
            return False

        self.wait(f"a click on {css} {text!r}", try_click)

    def type(self, css: str, *keys: str) -> None:
        """Type into a field, in the place of what is there."""

        def try_type() -> bool:
            element = self.find(css)
            if element is None:
                return False
            self.run("arguments[0].focus(); arguments[0].select?.()", element)
            element.send_keys(*keys)
            return True

        self.wait(f"typing into {css}", try_type)

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is. Several signs are one key after the other."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def choose(self, css: str, value: str) -> None:
        """Choose in a list."""
        from selenium.webdriver.support.select import Select

        Select(self.wait_for(css)).select_by_value(value)

    def slide(self, css: str, value: float) -> None:
        """Move a slider."""
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        self.run(script, self.wait_for(css), value)

    def drag(
        self, css: str, start: tuple[float, float], end: tuple[float, float], key: str = ""
    ) -> None:
        """Drag over an element, between two places in shares of its width and height, with a key
        held down."""
        from selenium.webdriver.common.action_chains import ActionChains

        element = self.wait_for(css)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        size = element.size["width"], element.size["height"]
        places = [
            [round((share - 0.5) * all_of_it) for share, all_of_it in zip(place, size, strict=True)]
            for place in (start, end)
        ]
        (left, top), (right, bottom) = places
        half = (right - left) // 2, (bottom - top) // 2
        actions = ActionChains(self.driver, duration=20)
        if key:
            actions.key_down(key)
        actions.move_to_element_with_offset(element, left, top).click_and_hold()
        actions.move_by_offset(*half)
        actions.move_by_offset(right - left - half[0], bottom - top - half[1]).release()
        if key:
            actions.key_up(key)
        actions.perform()

    def turn_wheel(self, css: str, pixels: int) -> None:
        """Turn the wheel over the middle of an element: down, or up where it is negative."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        origin = ScrollOrigin.from_element(self.wait_for(css))
        ActionChains(self.driver, duration=0).scroll_from_origin(origin, 0, pixels).perform()

    def double_click(self, css: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver, duration=0).double_click(self.wait_for(css)).perform()
