"""What a page must be for those who see it badly, on a small screen, or use no mouse."""

from __future__ import annotations

from typing import Any

from browser import Browser, Key

NAMED_ROLES = (
    *("button", "link", "textbox", "searchbox", "combobox", "listbox", "slider", "spinbutton"),
    *("checkbox", "tab", "tablist", "menu", "menuitem", "menuitemcheckbox", "DisclosureTriangle"),
    *("image", "img", "application", "table", "grid", "columnheader", "separator", "toolbar"),
    *("dialog", "log", "progressbar"),
)
LEAST_CONTRAST = 4.5
"""Of WCAG's level AA, for text of normal size."""


def find_nameless(browser: Browser) -> list[str]:
    """What a screen reader would say no name of, as it stands in the page."""
    nodes = browser.command("Accessibility.getFullAXTree")["nodes"]
    found = []
    for node in nodes:
        name = node.get("name", {}).get("value", "")
        role = node.get("role", {}).get("value")
        if node["ignored"] or name.strip() or role not in NAMED_ROLES:
            continue
        element = {"backendNodeId": node["backendDOMNodeId"]}
        found.append(f"{role}: {browser.command('DOM.getOuterHTML', **element)['outerHTML'][:200]}")
    return found


def find_pale_texts(browser: Browser) -> list[str]:
    """Texts in sight that hardly differ from what they stand on. The stroke that stands for no
    value is no text."""
    script = """
        const parse = (text) => {
          const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
          return text.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
        };
        const blend = (top, below, share) =>
          [0, 1, 2].map((i) => top[i] * share + below[i] * (1 - share));
        const measure = (colour) => {
          const [r, g, b] = colour.map((v) => v / 255)
            .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const found = new Set();
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
          const text = walker.currentNode.data.trim();
          const element = walker.currentNode.parentElement;
          const box = element.getBoundingClientRect();
          if (!text || text === "–" || box.width < 2 || element.closest(":disabled, svg")) continue;
          const isSeen = { visibilityProperty: true, opacityProperty: true };
          if (!element.checkVisibility(isSeen)) continue;
          if (box.bottom < 0 || box.top > innerHeight || box.right < 0) continue;
          const chain = [];
          for (let at = element; at; at = at.parentElement) chain.push(getComputedStyle(at));
          let ground = [255, 255, 255];
          for (const { backgroundColor } of [...chain].reverse()) {
            const colour = parse(backgroundColor);
            ground = blend(colour, ground, colour[3]);
          }
          const ink = parse(chain[0].color);
          const opacity = chain.reduce((product, style) => product * Number(style.opacity), 1);
          const [high, low] = [blend(ink, ground, ink[3] * opacity), ground].map(measure)
            .sort((a, b) => b - a);
          const contrast = (high + 0.05) / (low + 0.05);
          if (contrast < arguments[0]) {
            found.add(`${contrast.toFixed(1)} ${element.className}: ${text.slice(0, 40)}`);
          }
        }
        return [...found];"""
    texts: list[str] = browser.run(script, LEAST_CONTRAST)
    return texts


def find_cut_off(browser: Browser) -> list[str]:
    """What lies to the right of the screen and cannot be scrolled to in a box of its own."""
    script = """
        const scrolls = (element) => {
          for (let at = element.parentElement; at && at !== document.body; at = at.parentElement) {
            const isInSight = at.getBoundingClientRect().right <= innerWidth + 1;
            if (getComputedStyle(at).overflowX !== "visible" && isInSight) return true;
          }
          return false;
        };
        const found = [];
        for (const element of document.body.querySelectorAll("*")) {
          const box = element.getBoundingClientRect();
          if (!box.width || !box.height || box.right <= innerWidth + 1) continue;
          if (element.checkVisibility() && !scrolls(element)) {
            found.push(`${element.tagName}.${element.className} ends at ${box.right}`);
          }
        }
        const { scrollWidth } = document.scrollingElement;
        if (scrollWidth > innerWidth) found.push(`the page is ${scrollWidth} wide`);
        return found;"""
    found: list[str] = browser.run(script)
    return found


def find_out_of_reach(browser: Browser) -> list[str]:
    """Controls that the Tab key does not come to, and those that do not show that it has. Within a
    table, menu, list of tabs or log, arrow keys go on. What is drawn anew meanwhile is left out."""
    count: int = browser.run(
        """
        const css = "a[href], button, input, select, textarea, summary, [tabindex]";
        const isSeen = (e) => e.checkVisibility({ visibilityProperty: true }) && !e.disabled;
        const inside = "[role=treegrid], [role=menu], [role=tablist], [role=log]";
        window.findControls = () => [...document.querySelectorAll(css)].filter(isSeen)
          .filter((e) => e.tabIndex >= 0 ||
            (e.matches("a, button, input, select, textarea, summary") && !e.closest(inside)));
        window.outOfReach = new Set(window.findControls());
        const count = window.outOfReach.size;
        window.unmarked = new Set();
        window.steps = 0;
        document.activeElement.blur();
        document.addEventListener("focusin", ({ target }) => {
          window.steps += 1;
          window.outOfReach.delete(target);
          if (target.hasAttribute("aria-activedescendant")) return; // it marks a row instead
          const { outlineStyle, boxShadow } = getComputedStyle(target);
          if (outlineStyle === "none" && boxShadow === "none") window.unmarked.add(target);
        });
        return count;"""
    )
    pressed = 0
    while count > pressed:  # parts that come meanwhile have controls too, on the way to others
        browser.press(*[Key.TAB] * (count - pressed + 2))
        browser.wait_until_true("window.steps >= arguments[0]", count)
        pressed, count = count, browser.run("return window.findControls().length")
    missed: dict[str, Any] = browser.run(
        """
        const write = (elements) =>
          [...elements].filter((e) => e.isConnected).map((e) => e.outerHTML.slice(0, 200));
        return { missed: write(window.outOfReach), unmarked: write(window.unmarked) };"""
    )
    return [f"{what}: {each}" for what, elements in missed.items() for each in elements]
