// The box of words and conditions above the table, its suggestions, and the conditions that were set.

import { formatSetting, h, icon } from "./dom.js";
import { listNames, meetsCondition, parseCondition, splitQuery } from "./filters.js";

const WAIT_MS = 90;
const MAX_OPTIONS = 12;

/** A search field: what is typed holds at once; Enter turns conditions into chips. `leave()` goes on to the table. */
export class SearchBox {
  constructor(store, leave) {
    this.store = store;
    this.leave = leave;
    this.timer = 0;
    this.options = [];
    this.selected = -1;
    this.input = h("input", {
      type: "text",
      placeholder: "Search, or a condition: lr>=0.1 state=running",
      "aria-label": "Search and filter runs",
      role: "combobox",
      "aria-autocomplete": "list",
      "aria-expanded": "false",
      "aria-controls": "rt-suggest",
      autocomplete: "off",
      spellcheck: "false",
      "data-search": true,
      oninput: () => this.onInput(),
      onkeydown: (event) => this.onKey(event),
      onblur: () => {
        this.close();
        this.take();
      },
    });
    this.list = h("div", { class: "rt-suggest", id: "rt-suggest", role: "listbox", "aria-label": "Suggestions", hidden: true });
    this.clearButton = h("button", { class: "quiet", "aria-label": "Clear the search", onclick: () => this.clearText() }, icon("close"));
    this.element = h("div", { class: "rt-search" }, icon("search"), this.input, this.clearButton, this.list);
    this.chips = h("div", { class: "rt-chips", "aria-label": "Conditions" });
    this.list.addEventListener("pointerdown", (event) => {
      event.preventDefault(); // the focus stays in the field
      const at = [...this.list.children].indexOf(event.target.closest(".rt-option"));
      if (at >= 0) this.choose(at);
    });
  }

  stop() {
    clearTimeout(this.timer);
  }

  /** Show what the view says; what is being typed stays. */
  update() {
    const { q = "" } = this.store.view;
    if (document.activeElement !== this.input && this.input.value !== q) this.input.value = q;
    this.clearButton.hidden = !this.input.value;
    this.renderChips();
  }

  renderChips() {
    const { filter = [] } = this.store.view;
    const { faults } = this.store.getQuery();
    const key = JSON.stringify([filter, faults]);
    if (key === this.chipsKey) return;
    this.chipsKey = key;
    const wrong = new Map(faults.map((fault) => [fault.text, fault]));
    const chips = filter.map((text) =>
      h(
        "span",
        { class: wrong.has(text) ? "rt-chip wrong" : "rt-chip" },
        h("span", {}, text),
        h("button", { "aria-label": `Remove ${text}`, onclick: () => this.remove(text) }, icon("close")),
      ),
    );
    const said = faults.map((fault) =>
      h("div", { class: "rt-fault", role: "alert" }, `${fault.message}. `, h("span", {}, fault.hint)),
    );
    const more = filter.length > 1 ? [h("button", { class: "quiet", onclick: () => this.clear() }, "Clear all")] : [];
    this.chips.replaceChildren(...chips, ...more, ...said);
    this.input.setAttribute("aria-invalid", String(faults.some((fault) => fault.isTyped)));
  }

  onInput() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.take({ isTyping: true }), WAIT_MS);
    this.clearButton.hidden = !this.input.value;
    this.suggest();
  }

  /** Let what is typed hold. A condition that is still being typed waits until a run can meet it, so that
   * the table is not empty at every second key. */
  take({ isTyping = false } = {}) {
    clearTimeout(this.timer);
    let text = this.input.value;
    const last = /\S+$/.exec(text);
    if (isTyping && last && this.isUnfinished(last[0])) text = text.slice(0, last.index);
    this.store.setView({ q: text.trim() }, { replace: true });
  }

  isUnfinished(token) {
    const [text] = splitQuery(token).conditions;
    if (!text) return false;
    try {
      const condition = parseCondition(text);
      const rows = this.store.getCandidates();
      return !rows.some((row) => meetsCondition(this.store.reader, row, condition));
    } catch (error) {
      return true; // what is wrong with it is said when it is finished
    }
  }

  onKey(event) {
    const isOpen = !this.list.hidden;
    if (event.key === "ArrowDown" && isOpen) this.select(this.selected + 1);
    else if (event.key === "ArrowUp" && isOpen) this.select(this.selected - 1);
    else if (event.key === "ArrowDown") this.leave();
    else if (event.key === "Tab" && isOpen && this.selected >= 0) this.choose(this.selected);
    else if (event.key === "Enter" && isOpen && this.selected >= 0) this.choose(this.selected);
    else if (event.key === "Enter") this.fix();
    else if (event.key === "Escape" && isOpen) this.close();
    else if (event.key === "Escape" && this.input.value) this.clearText();
    else if (event.key === "Escape") this.leave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Turn typed conditions into chips; words stay in the field. */
  fix() {
    this.close();
    const { conditions } = splitQuery(this.input.value);
    const tokens = this.input.value.match(/(?:[^\s"']|"[^"]*"?|'[^']*'?)+/g) || [];
    if (!conditions.length) {
      this.take();
      this.leave();
      return;
    }
    const rest = tokens.filter((token) => !splitQuery(token).conditions.length).join(" ");
    this.input.value = rest;
    const { filter = [] } = this.store.view;
    clearTimeout(this.timer);
    this.store.setView({ filter: [...new Set([...filter, ...conditions])], q: rest });
  }

  /** Add a condition. */
  add(text) {
    const { filter = [] } = this.store.view;
    this.store.setView({ filter: [...new Set([...filter, text])] });
  }

  /** Begin to type a condition. */
  begin(text) {
    this.input.value = this.input.value ? `${this.input.value.trim()} ${text}` : text;
    setTimeout(() => {
      this.input.focus();
      this.onInput();
    });
  }

  remove(text) {
    this.store.setView({ filter: (this.store.view.filter || []).filter((one) => one !== text) });
    this.input.focus();
  }

  clearText() {
    this.input.value = "";
    this.take();
    this.close();
    this.input.focus();
  }

  clear() {
    this.input.value = "";
    clearTimeout(this.timer);
    this.store.setView({ q: null, filter: null, root: null });
  }

  // --- suggestions ---

  /** Return the names that can be typed. */
  getNames() {
    const rows = this.store.getCandidates();
    return this.store.memo("names", [rows], () => listNames(this.store.reader, rows));
  }

  /** Return `[start, token]` of the word at the cursor. */
  findToken() {
    const before = this.input.value.slice(0, this.input.selectionStart ?? this.input.value.length);
    const start = before.search(/\S+$/);
    return start < 0 ? [before.length, ""] : [start, before.slice(start)];
  }

  suggest() {
    const [, token] = this.findToken();
    const relation = /^([\p{L}\p{N}_.]+)(!?=)(.*)$/u.exec(token);
    this.options = !token ? [] : relation ? this.listValues(...relation.slice(1)) : this.listKeys(token);
    this.selected = -1;
    this.list.hidden = !this.options.length;
    this.input.setAttribute("aria-expanded", String(!this.list.hidden));
    this.input.removeAttribute("aria-activedescendant");
    this.list.replaceChildren(
      ...this.options.map(({ text, about }, i) =>
        h("div", { class: "rt-option", role: "option", id: `rt-option-${i}`, "aria-selected": "false" }, h("code", {}, text), h("span", {}, about)),
      ),
    );
  }

  listKeys(token) {
    if (/[<>=!]/.test(token)) return [];
    const wanted = token.toLowerCase();
    const names = this.getNames();
    const all = [
      ...names.metrics.map((name) => ({ text: name, about: "result", next: `${name}>` })),
      ...names.settings.map((name) => ({ text: name, about: "setting", next: `${name}=` })),
      ...names.own.map((name) => ({ text: name, about: "of every run", next: `${name}=` })),
    ];
    const rank = ({ text }) => {
      const at = text.toLowerCase().indexOf(wanted);
      return at < 0 ? 9 : at === 0 ? 0 : ".".includes(text[at - 1]) || text[at - 1] === "_" ? 1 : 2;
    };
    return all
      .map((option) => [rank(option), option])
      .filter(([r]) => r < 9)
      .sort((a, b) => a[0] - b[0] || a[1].text.length - b[1].text.length)
      .slice(0, MAX_OPTIONS)
      .map(([, option]) => option);
  }

  listValues(key, relation, typed) {
    const counts = new Map();
    for (const row of this.store.getCandidates()) {
      const value = this.store.getValue(row, key);
      if (value === undefined || value === null) continue;
      const text = formatSetting(value);
      counts.set(text, (counts.get(text) || 0) + 1);
    }
    if (counts.size > 2000) return []; // of a name or a result no value is likely
    return [...counts]
      .filter(([text]) => text.toLowerCase().includes(typed.toLowerCase()) && text !== typed && text.length < 80)
      .sort((a, b) => b[1] - a[1])
      .slice(0, MAX_OPTIONS)
      .map(([text, count]) => {
        const whole = `${key}${relation}${text}`;
        return { text, about: `${count}`, next: /\s/.test(text) ? `"${whole}" ` : `${whole} ` };
      });
  }

  select(at) {
    const count = this.options.length;
    this.selected = (at + count) % count;
    [...this.list.children].forEach((option, i) => option.setAttribute("aria-selected", String(i === this.selected)));
    this.list.children[this.selected].scrollIntoView({ block: "nearest" });
    this.input.setAttribute("aria-activedescendant", `rt-option-${this.selected}`);
  }

  choose(at) {
    const [start, token] = this.findToken();
    const { next } = this.options[at];
    const { value } = this.input;
    this.input.value = value.slice(0, start) + next + value.slice(start + token.length).replace(/^\s+/, "");
    const end = start + next.length;
    this.input.setSelectionRange(end, end);
    this.onInput();
  }

  close() {
    this.list.hidden = true;
    this.selected = -1;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
  }
}
