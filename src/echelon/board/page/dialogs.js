// Menus, popovers, dialogs and short notices. One of each kind at a time; Escape closes, focus goes back.

import { h, icon } from "./dom.js";

let open = null;

/** Close the menu or popover that is open. */
export function closePopover({ focus = false } = {}) {
  if (!open) return;
  const { element, anchor, stop, onClose } = open;
  open = null;
  stop();
  element.remove();
  if (anchor.setAttribute && anchor.hasAttribute("aria-expanded")) anchor.setAttribute("aria-expanded", "false");
  if (focus && anchor.focus) anchor.focus();
  if (onClose) onClose();
}

/** Show an element at an anchor: an element, or `{x, y}`. It closes at Escape and at a click elsewhere. */
export function openPopover(anchor, content, { label, role = "dialog", onClose, focusBack, wide } = {}) {
  const isSame = open && open.anchor === anchor && anchor instanceof Element;
  closePopover();
  if (isSame) return null;
  const element = h("div", { class: `popover${wide ? " wide" : ""}`, role, "aria-label": label }, content);
  document.body.append(element);
  place(element, anchor);
  const controller = new AbortController();
  const options = { capture: true, signal: controller.signal };
  const isInside = (target) =>
    element.contains(target) || (anchor instanceof Element && anchor.contains(target));
  document.addEventListener("pointerdown", (event) => !isInside(event.target) && closePopover(), options);
  window.addEventListener("resize", () => place(element, anchor), options);
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    event.preventDefault();
    closePopover({ focus: true });
  });
  const back = focusBack || (anchor instanceof Element ? anchor : document.activeElement);
  if (anchor instanceof Element && anchor.hasAttribute("aria-expanded")) anchor.setAttribute("aria-expanded", "true");
  open = { element, anchor: anchor instanceof Element && !focusBack ? anchor : back, stop: () => controller.abort(), onClose };
  const first = element.querySelector("[autofocus], input, textarea, button, [tabindex]");
  if (first) first.focus({ preventScroll: true });
  return element;
}

function place(element, anchor) {
  const box = anchor instanceof Element ? anchor.getBoundingClientRect() : null;
  const [left, top, bottom] = box ? [box.left, box.top, box.bottom] : [anchor.x, anchor.y, anchor.y];
  const { offsetWidth: width, offsetHeight: height } = element;
  const fitsBelow = bottom + 4 + height <= innerHeight - 8 || bottom < innerHeight / 2;
  element.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  element.style.top = `${Math.max(8, fitsBelow ? bottom + 4 : top - height - 4)}px`;
  element.style.maxHeight = `${Math.max(160, fitsBelow ? innerHeight - bottom - 16 : top - 16)}px`;
}

/** Show a menu. `items`: `{label, icon, hint, checked, disabled, danger, onSelect}`, `null` (a line), or
 * a text (a heading). Arrows move, letters jump. */
export function openMenu(anchor, items, { label = "Menu", focusBack } = {}) {
  const buttons = [];
  const list = items.map((item) => {
    if (item === null) return h("div", { class: "menu-line", role: "separator" });
    if (typeof item === "string") return h("div", { class: "menu-head" }, item);
    const button = buildMenuItem(item);
    buttons.push(button);
    return button;
  });
  const menu = h("div", { class: "menu", onkeydown: (event) => moveInMenu(event, buttons) }, list);
  return openPopover(anchor, menu, { label, role: "menu", focusBack });
}

function buildMenuItem({ label, icon: name, hint, checked, disabled, danger, onSelect, keepOpen }) {
  const props = {
    class: `menu-item${danger ? " danger" : ""}`,
    role: checked === undefined ? "menuitem" : "menuitemcheckbox",
    "aria-checked": checked === undefined ? null : String(checked),
    disabled: Boolean(disabled),
    tabindex: "-1",
    onclick: (event) => {
      if (!keepOpen) closePopover({ focus: true });
      onSelect(event);
    },
  };
  const mark = checked === undefined ? (name ? icon(name) : null) : checked ? icon("check") : h("span", { class: "icon" });
  return h("button", props, mark, h("span", { class: "menu-label" }, label), hint && h("kbd", {}, hint));
}

function moveInMenu(event, buttons) {
  const usable = buttons.filter((button) => !button.disabled);
  const at = usable.indexOf(document.activeElement);
  const steps = { ArrowDown: at + 1, ArrowUp: at - 1 + usable.length, Home: 0, End: usable.length - 1 };
  let next = steps[event.key];
  if (next === undefined && event.key.length === 1 && /\S/.test(event.key)) {
    const order = [...usable.slice(at + 1), ...usable.slice(0, at + 1)];
    const found = order.find((b) => b.textContent.trim().toLowerCase().startsWith(event.key.toLowerCase()));
    next = found ? usable.indexOf(found) : undefined;
  }
  if (next === undefined) return;
  event.preventDefault();
  usable[next % usable.length].focus();
}

/** Show a dialog above all else; returns `{dialog, close}`. */
export function openDialog(title, content, { onClose, wide } = {}) {
  const back = document.activeElement;
  const close = () => dialog.close();
  const head = h(
    "header",
    { class: "dialog-head" },
    h("h2", {}, title),
    h("button", { class: "quiet", "aria-label": "Close", onclick: close }, icon("close")),
  );
  const dialog = h("dialog", { class: wide ? "dialog wide" : "dialog", "aria-label": title }, head, content);
  dialog.addEventListener("click", (event) => event.target === dialog && close());
  dialog.addEventListener("keydown", (event) => event.stopPropagation());
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (back && back.focus) back.focus();
    if (onClose) onClose();
  });
  document.body.append(dialog);
  dialog.showModal();
  return { dialog, close };
}

/** Say something for a few seconds; an error stays longer. */
export function showToast(text, { isError = false, hint = "" } = {}) {
  const toast = h(
    "div",
    { class: isError ? "toast error" : "toast", role: isError ? "alert" : null },
    h("span", {}, text),
    hint && h("small", {}, hint),
    h("button", { class: "quiet", "aria-label": "Dismiss", onclick: () => toast.remove() }, icon("close")),
  );
  const place = document.getElementById("toasts");
  while (place.children.length > 2) place.firstChild.remove();
  place.append(toast);
  setTimeout(() => toast.remove(), isError ? 12000 : 3500);
}

/** Show an ApiError, or an error of ours, as a sentence. */
export function showError(error) {
  showToast(error.message, { isError: true, hint: error.hint || "" });
}

/** Copy a text and say so. */
export async function copyText(text, what = "Copied") {
  try {
    await navigator.clipboard.writeText(text);
  } catch (error) {
    const area = h("textarea", { value: text, class: "off-screen" }); // without https, or without the right
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  showToast(what);
}

const KEYS = [
  ["The page", [
    ["/", "search and filter"],
    ["?", "these keys"],
    ["g r", "runs"],
    ["g s", "sweeps"],
    ["g m", "machines"],
    ["Esc", "close, or leave a field"],
  ]],
  ["The table", [
    ["↑ ↓", "from run to run; above the first are the titles"],
    ["Home End", "first, last run"],
    ["PgUp PgDn", "a page"],
    ["→ ←", "into the cells of a run and out; open and fold a group"],
    ["Space", "draw the run or not"],
    ["o", "draw only this run; again: as before"],
    ["Enter", "open the run; on a title: sort"],
    ["p", "pin"],
    ["h", "hide"],
    ["t", "tags and note"],
    ["m", "menu of the run or column"],
    ["Alt ← →", "on a title: move the column"],
    ["Shift ← →", "on a title: its width"],
  ]],
];

/** Show what the keys do. */
export function showKeys() {
  const tables = KEYS.map(([title, keys]) =>
    h(
      "section",
      {},
      h("h3", {}, title),
      h(
        "dl",
        { class: "keys" },
        keys.map(([key, what]) => [
          h("dt", {}, key.split(" ").map((one) => h("kbd", {}, one))),
          h("dd", {}, what),
        ]),
      ),
    ),
  );
  const language = h(
    "section",
    {},
    h("h3", {}, "Conditions in the search box"),
    h("p", { class: "soft" }, "As in ", h("code", {}, "echelon runs --filter"), ". All must hold; other words are searched for."),
    h(
      "dl",
      { class: "keys" },
      [
        ["state=running", "by state, host, tags, …"],
        ["lr>=0.01", "a setting: < <= > >= = !="],
        ["accuracy.best>0.9", "a metric: .last .best .min .max"],
        ["name=seed-*", "* and ? stand for other signs"],
        ["tags=*baseline*", "one of the tags"],
      ].map(([code, what]) => [h("dt", {}, h("code", {}, code)), h("dd", {}, what)]),
    ),
  );
  openDialog("Keys", h("div", { class: "keys-page" }, tables, language), { wide: true });
}
