// What the pages of runs, machines and sweeps share: long and hostile texts, cards, bars, copying.

import { findDifferingSettings, isRelevantSetting } from "./filters.js";
import { h } from "./dom.js";

/** The keys of the view that belong to this page, for links that leave it. */
export const OWN_KEYS = ["run", "tab", "with", "ranks", "find", "regex", "line", "wrap", "stamps", "setting", "changed"];
const CUT_CHARACTERS = 600; // of a note, a reason, a path; the rest comes by a button
const MORE_CHARACTERS = 20_000; // that such a button shows more
/** Return the view that shows a run; without the keys that other tabs or runs have left. */
export function showRun(store, id, patch = {}) {
  const empty = Object.fromEntries(OWN_KEYS.map((key) => [key, null]));
  store.setView({ ...empty, page: "run", run: id, ...patch });
}

/** Put text on the clipboard, also where the page is not served over a secure address. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = h("textarea", { class: "rp-offscreen", "aria-hidden": "true" });
  area.value = text;
  (document.querySelector("dialog[open]") || document.body).append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("the browser did not allow it");
}

/** Return a button that copies a text and says so. */
export function copyButton(getText, label = "Copy", title = label) {
  const button = h("button", { class: "rp-button", type: "button", title, "aria-label": title }, label);
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    const before = button.textContent;
    try {
      await copyText(typeof getText === "function" ? getText() : getText);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => {
      button.textContent = label || before;
    }, 1500);
  });
  return button;
}

/** Return text that may be very long: its start, and a button for more. */
export function longText(text, className = "", most = CUT_CHARACTERS) {
  const all = String(text ?? "");
  const holder = h("span", { class: `rp-long ${className}`, dir: "auto" }, cleanText(all.slice(0, most)));
  let shown = most;
  if (all.length > shown) {
    const more = h("button", { class: "lv-more", type: "button" });
    const label = () => {
      more.textContent = `… ${(all.length - shown).toLocaleString("en")} more characters`;
    };
    more.addEventListener("click", (event) => {
      event.stopPropagation();
      more.before(cleanText(all.slice(shown, shown + MORE_CHARACTERS)));
      shown += MORE_CHARACTERS;
      if (shown >= all.length) more.remove();
      else label();
    });
    label();
    holder.append(more);
  }
  return holder;
}

/** Return text in which what controls a terminal or the direction of writing can be seen. */
export function cleanText(text) {
  // eslint-disable-next-line no-control-regex
  return text.replace(/[\x00-\x08\x0b-\x1f\x7f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (letter) => {
    const code = letter.charCodeAt(0);
    return code < 0x80 ? `^${String.fromCharCode(code ^ 0x40)}` : "\ufffd";
  });
}

/** Return an error as a sentence and what to do about it. */
export function renderError(error) {
  return h("div", { class: "rp-error", role: "alert" },
    h("span", null, cleanText(String(error.message || error).slice(0, 2000))),
    error.hint ? h("span", { class: "rp-hint" }, ` ${cleanText(String(error.hint).slice(0, 2000))}`) : null);
}

/** Return the state of a run, with its colour. */
export function stateBadge(state) {
  const known = { running: "running", starting: "running", finished: "done", failed: "bad", lost: "bad", killed: "bad", broken: "bad", preempted: "wait", queued: "wait", requeued: "wait" };
  return h("span", { class: `rp-state rp-state-${known[state] || "plain"}` }, state || "unknown");
}

/** Return a bar of parts with its legend. `parts`: `[{label, value, text, kind}]`; a kind has one colour. */
export function stackedBar(parts, label) {
  const sum = parts.reduce((total, part) => total + part.value, 0) || 1;
  const said = parts.map((part) => `${part.label} ${part.text}`).join(", ");
  const bar = h("div", { class: "rp-stack", role: "img", "aria-label": `${label}: ${said}` });
  const legend = h("ul", { class: "rp-legend", "aria-hidden": "true" });
  parts.forEach((part, i) => {
    const piece = h("span", { class: `rp-part rp-part${part.kind ?? i}`, title: `${part.label} ${part.text}` });
    piece.style.flexGrow = String(part.value / sum);
    bar.append(piece);
    legend.append(h("li", null, h("i", { class: `rp-part${part.kind ?? i}` }), part.label, h("b", null, part.text)));
  });
  return h("div", { class: "rp-split" }, bar, legend);
}

/** Return a part of a page with a title. */
export function card(title, ...content) {
  return h("section", { class: "rp-card" }, h("h3", null, title), ...content);
}

/** Return names with their values. Empty values are left out. */
export function facts(entries) {
  const list = h("dl", { class: "rp-facts" });
  for (const [name, value] of entries) {
    if (!isKnown(value) || value === "" || value === false) continue;
    list.append(h("dt", null, name), h("dd", null, value instanceof Node ? value : longText(value)));
  }
  return list;
}


/** Return whether there is a value. */
export function isKnown(value) {
  return value !== null && value !== undefined;
}

/** Return the start of a name, on one line. */
export function cutName(name, most = 80) {
  return cleanText(String(name ?? "").slice(0, most));
}

/** Return the store with these rows alone as what is visible and drawn. */
export function limitToRows(store, getRows) {
  const own = {
    getVisibleRows: getRows,
    getShownRows: getRows,
    getCandidates: getRows,
    getGroups: () => null,
    getShownIds: () => new Set(getRows().map((row) => row.id)),
    getDifferingSettings: () => findDifferingSettings(store.reader, getRows()).filter(isRelevantSetting),
  };
  return new Proxy(store, {
    get(target, key) {
      if (Object.hasOwn(own, key)) return own[key];
      const value = Reflect.get(target, key, target);
      return typeof value === "function" ? value.bind(target) : value;
    },
  });
}
