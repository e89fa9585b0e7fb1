// What the page knows: the rows, the view (mirrored in the URL), and what follows from both.

import { getRows } from "./api.js";
import {
  FilterError,
  RowReader,
  findDifferingSettings,
  isLeftOut,
  isRelevantSetting,
  isSeed,
  matchesWords,
  meetsCondition,
  parseCondition,
  requireKnownName,
  shortenKey,
  sortRows,
  splitQuery,
} from "./filters.js";
import { formatSetting } from "./dom.js";

const LIST_KEYS = new Set(["filter", "columns", "pin", "hide", "metrics", "open"]);
const DEFAULTS = { page: "runs", panel: "curves", sort: "when", shown: "auto", x: "step" };
const SHOWN_BY_DEFAULT = 10;
const SHOWN_OF_GROUPS = 60;
const PALETTE_SIZE = 14;
/** Light and dark differ in lightness only, so a run keeps its colour when the theme changes. */
const PALETTES = {
  light: [
    "#166cbf", "#e8590c", "#2b9348", "#8b3dff", "#c2255c", "#0b8a99", "#a8700a", "#d6409f",
    "#5c7cfa", "#7a5230", "#6a8f00", "#5f6b7a", "#e03131", "#1d6f5c",
  ],
  dark: [
    "#4c9ff0", "#ff8a4c", "#4fc06d", "#a97bff", "#f06595", "#2fb8c6", "#d9a032", "#f277c6",
    "#8ca2ff", "#b98a5e", "#a3c437", "#94a1b2", "#ff6b6b", "#43a98e",
  ],
};

/** Rows, view and what is derived of them. One for the page. */
export class Store {
  constructor() {
    this.rows = new Map();
    this.meta = { roots: [], defaults: {}, can_act: false, host: "", generation: 0, complete: false };
    this.reader = new RowReader();
    this.view = parseView(location.search);
    this.listeners = new Map();
    this.rowsVersion = 0;
    this.viewVersion = 0;
    this.isLoaded = false;
    this.memos = new Map();
    this.colours = new Map();
    this.watched = new Set();
    this.keepsPopover = false;
    window.addEventListener("popstate", () => this.readAddress());
  }

  // --- listeners ---

  /** Call `fn` at every change of a kind: `rows`, `view`, `metrics`, `logs`, `theme`. Returns what ends it. */
  on(kind, fn) {
    if (!this.listeners.has(kind)) this.listeners.set(kind, new Set());
    this.listeners.get(kind).add(fn);
    return () => this.listeners.get(kind).delete(fn);
  }

  emit(kind, data) {
    for (const fn of [...(this.listeners.get(kind) || [])]) {
      try {
        fn(data);
      } catch (error) {
        console.error(error); // one part of the page must not stop the others
      }
    }
  }

  // --- rows ---

  /** Load all rows. Those of before stay on the screen until the answer is here. */
  async load() {
    this.setRows(await getRows());
  }

  setRows({ rows, defaults, ...meta }) {
    Object.assign(this.meta, meta, { defaults: defaults || {} });
    this.reader = new RowReader(this.meta.defaults);
    this.rows = new Map(rows.map((row) => [row.id, row]));
    this.isLoaded = true;
    this.rowsVersion += 1;
    this.emit("rows", { all: true });
  }

  /** Take what an event says has changed. */
  applyRows({ generation, complete, changed = [], removed = [] }) {
    for (const row of changed) this.rows.set(row.id, row);
    for (const id of removed) this.rows.delete(id);
    this.meta.generation = generation ?? this.meta.generation;
    const wasComplete = this.meta.complete;
    this.meta.complete = complete ?? wasComplete;
    if (!changed.length && !removed.length && wasComplete === this.meta.complete) return;
    this.rowsVersion += 1;
    this.emit("rows", { changed: changed.map((row) => row.id), removed });
  }

  /** Ask for `metrics` and `logs` of runs beyond those that are drawn and the one that is open. */
  watch(ids) {
    this.watched = new Set(ids);
    this.emit("watch");
  }

  // --- the view ---

  readAddress() {
    this.view = parseView(location.search);
    this.viewVersion += 1;
    this.emit("view", {});
  }

  /** Change the view; null removes a key. With `replace`, the back button does not come back to before. */
  setView(patch, { replace = false } = {}) {
    const next = { ...this.view };
    for (const [key, value] of Object.entries(patch)) {
      const isEmpty = value === null || value === undefined || value === "" || value === false;
      if (isEmpty || (Array.isArray(value) && !value.length) || DEFAULTS[key] === value) delete next[key];
      else next[key] = value;
    }
    const query = formatView(next);
    if (query === formatView(this.view)) return;
    this.view = parseView(query);
    this.viewVersion += 1;
    history[replace ? "replaceState" : "pushState"](null, "", `${location.pathname}${query}`);
    this.emit("view", patch);
  }

  /** Show the view of a query string, such as a saved one. */
  openQuery(query) {
    this.view = parseView(query);
    this.viewVersion += 1;
    history.pushState(null, "", `${location.pathname}${formatView(this.view)}`);
    this.emit("view", {});
  }

  /** Return a key of the view, or what it is by default. */
  get(key) {
    return this.view[key] ?? DEFAULTS[key];
  }

  /** Return what was computed under a name before, if all of `keys` are the same as then. */
  memo(name, keys, compute) {
    const known = this.memos.get(name);
    if (known && known.keys.length === keys.length && keys.every((key, i) => key === known.keys[i])) {
      return known.value;
    }
    const value = compute();
    this.memos.set(name, { keys, value });
    return value;
  }

  // --- derived ---

  /** Return `{conditions, words, faults: [{text, message, hint}]}` of the filter and the search box. */
  getQuery() {
    const { filter = [], q = "", all, root } = this.view;
    return this.memo("query", [this.rowsVersion, q, all, root, ...filter], () => {
      const { conditions: typed, words } = splitQuery(q);
      const conditions = [];
      const faults = [];
      const rows = this.getCandidates();
      for (const text of [...filter, ...typed]) {
        try {
          const condition = parseCondition(text);
          requireKnownName(this.reader, rows, condition.key);
          conditions.push(condition);
        } catch (error) {
          if (!(error instanceof FilterError)) throw error;
          faults.push({ text, message: error.message, hint: error.hint, isTyped: typed.includes(text) });
        }
      }
      return { conditions, words, faults };
    });
  }

  /** Return all rows but those that lists leave out. */
  getCandidates() {
    const { all, root } = this.view;
    return this.memo("candidates", [this.rowsVersion, all, root], () => {
      const rows = [...this.rows.values()];
      const wanted = root === undefined ? rows : rows.filter((row) => String(row.root) === root);
      return all ? wanted : wanted.filter((row) => !isLeftOut(row));
    });
  }

  /** Return how many runs are not shown: `{early, archived, hidden}`. */
  countLeftOut() {
    const { all, hide = [] } = this.view;
    return this.memo("left out", [this.rowsVersion, all, joinList(hide)], () => {
      const found = { early: 0, archived: 0, hidden: hide.filter((id) => this.rows.has(id)).length };
      for (const row of this.rows.values()) {
        if (isLeftOut(row)) found[row.archived ? "archived" : "early"] += 1;
      }
      return found;
    });
  }

  /** Return the rows that the table shows: filtered and sorted, hidden ones out, pinned ones first. */
  getVisibleRows() {
    const { q, filter, reverse, hide, pin, all, root } = this.view;
    const sort = this.get("sort");
    const lists = [filter, hide, pin].map((list) => (list || []).join("\n"));
    return this.memo("visible", [this.rowsVersion, q, sort, reverse, all, root, ...lists], () => {
      const { conditions, words } = this.getQuery();
      const hidden = new Set(hide);
      const rows = this.getCandidates().filter(
        (row) =>
          !hidden.has(row.id) &&
          matchesWords(row, words) &&
          conditions.every((condition) => meetsCondition(this.reader, row, condition)),
      );
      const sorted = sortRows(this.reader, rows, sort);
      if (reverse) sorted.reverse();
      if (!pin) return sorted;
      const pinned = new Set(pin);
      return [...sorted.filter((row) => pinned.has(row.id)), ...sorted.filter((row) => !pinned.has(row.id))];
    });
  }

  /** Return the ids of the rows that are drawn: those ticked, or the first ten visible; pinned ones too. */
  getShownIds() {
    const shown = this.get("shown");
    const { pin = [] } = this.view;
    if (shown === "auto" || shown === "all") {
      const keys = [this.getVisibleRows(), shown, joinList(pin), this.view.group];
      return this.memo("shown ids", keys, () => new Set([...pin, ...this.chooseShownIds(shown)]));
    }
    const ids = shown === "none" ? [] : splitList(shown);
    return this.memo("shown ids", [shown, joinList(pin)], () => new Set([...pin, ...ids]));
  }

  chooseShownIds(shown) {
    const rows = this.getVisibleRows();
    const groups = shown === "auto" && this.getGroups();
    if (!groups) return rows.slice(0, shown === "all" ? rows.length : SHOWN_BY_DEFAULT).map((row) => row.id);
    const members = groups.slice(0, SHOWN_BY_DEFAULT).flatMap((group) => group.rows);
    return members.slice(0, SHOWN_OF_GROUPS).map((row) => row.id);
  }

  /** Return the rows that are drawn, in the order of the table; also ticked ones that it does not show. */
  getShownRows() {
    const visible = this.getVisibleRows();
    const ids = this.getShownIds();
    return this.memo("shown rows", [visible, ids], () => {
      const rows = visible.filter((row) => ids.has(row.id));
      const seen = new Set(rows.map((row) => row.id));
      const hidden = new Set(this.view.hide);
      for (const id of ids) {
        const row = this.rows.get(id);
        if (row && !seen.has(id) && !hidden.has(id)) rows.push(row);
      }
      return rows;
    });
  }

  /** Draw runs or not. From the default choice on, what is drawn now is what the choice begins with. */
  setShown(ids, isShown) {
    const now = new Set(this.getShownIds());
    for (const id of ids) {
      if (isShown) now.add(id);
      else now.delete(id);
    }
    this.setView({ shown: joinList([...now]) || "none" }, { replace: true });
  }

  /** Return `[{key, label, rows}]` by the settings of `group`, null when nothing is grouped. */
  getGroups() {
    const { group } = this.view;
    if (!group) return null;
    const visible = this.getVisibleRows();
    return this.memo("groups", [visible, group], () => {
      const keys = this.getGroupKeys();
      const groups = new Map();
      for (const row of visible) {
        const parts = keys.map((key) => [key, formatCell(key === "sweep" ? row.sweep : this.getValue(row, key))]);
        const id = JSON.stringify(parts.map(([, text]) => text));
        let found = groups.get(id);
        if (!found) {
          const said = parts.filter(([, text]) => text !== "–");
          const label = said.map(([key, text]) => `${shortenKey(key, keys)}=${text}`).join(" ") || "the same in all settings";
          groups.set(id, (found = { key: id, label, parts, rows: [] }));
        }
        found.rows.push(row);
      }
      return [...groups.values()];
    });
  }

  /** Return the names by which rows are grouped; `-seed` is all settings that differ but the seeds. */
  getGroupKeys() {
    const { group } = this.view;
    if (!group) return [];
    if (group !== "-seed") return group.split(",");
    const visible = this.getVisibleRows();
    return this.memo("group keys", [visible], () => {
      const keys = findDifferingSettings(this.reader, visible).filter((key) => !isSeed(key));
      const experiments = new Set(visible.map((row) => row.experiment));
      return experiments.size > 1 ? ["experiment", ...keys] : keys.length ? keys : ["experiment"];
    });
  }

  /** Return the settings in which the visible rows differ. */
  getDifferingSettings() {
    const visible = this.getVisibleRows();
    return this.memo("differing", [visible], () =>
      findDifferingSettings(this.reader, visible).filter(isRelevantSetting),
    );
  }

  /** Return a value of a row by the names of `echelon runs`; undefined for none. */
  getValue(row, key) {
    return this.reader.get(row, key);
  }

  // --- colours ---

  /** Return whether the page is dark now. */
  get isDark() {
    return document.documentElement.dataset.theme === "dark";
  }

  /** Return the colour of a run: by its name, and another one where a drawn run has that already. */
  getColour(id) {
    const shown = this.getShownIds();
    const groups = this.getGroups();
    this.memo("colours", [shown, groups], () => this.assignColours(shown, groups || []));
    const index = this.colours.get(id) ?? hashName(getNameOfId(id)) % PALETTE_SIZE;
    return PALETTES[this.isDark ? "dark" : "light"][index];
  }

  /** Groups have the colour of their first drawn run, so these differ before all others. */
  assignColours(shown, groups) {
    const kept = new Map();
    const uses = new Array(PALETTE_SIZE).fill(0);
    const take = (id, index) => {
      kept.set(id, index);
      uses[index] += 1;
    };
    const findFree = (id) => {
      const least = Math.min(...uses);
      let index = hashName(getNameOfId(id)) % PALETTE_SIZE;
      while (uses[index] > least) index = (index + 1) % PALETTE_SIZE;
      return index;
    };
    for (const { rows } of groups) {
      const first = rows.find((row) => shown.has(row.id));
      if (!first) continue;
      const known = this.colours.get(first.id);
      take(first.id, known === undefined || uses[known] ? findFree(first.id) : known);
    }
    const waiting = [];
    for (const id of shown) {
      if (kept.has(id)) continue;
      const known = this.colours.get(id);
      if (known === undefined) waiting.push(id);
      else take(id, known);
    }
    waiting.sort(); // the same runs get the same colours in every browser
    for (const id of waiting) take(id, findFree(id));
    this.colours = kept;
    return kept;
  }
}

function getNameOfId(id) {
  return id.slice(id.indexOf(":") + 1);
}

function hashName(name) {
  let hash = 2166136261;
  for (let i = 0; i < name.length; i += 1) hash = Math.imul(hash ^ name.charCodeAt(i), 16777619) >>> 0;
  return (hash ^ (hash >>> 15)) >>> 0;
}

/** Return a value as text for a label; `–` for none. */
export function formatCell(value) {
  return value === undefined || value === null ? "–" : formatSetting(value);
}

/** Return the view of a query string. Keys of lists may stand several times, or have commas. */
export function parseView(query) {
  const view = {};
  for (const [key, value] of new URLSearchParams(query)) {
    if (key === "token") continue;
    if (key === "filter") (view.filter = view.filter || []).push(value);
    else if (LIST_KEYS.has(key)) (view[key] = view[key] || []).push(...splitList(value));
    else view[key] = value;
  }
  return view;
}

/** Return names as one text with commas; commas within them are written as in a URL. */
export function joinList(names) {
  return names.map((name) => name.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");
}

/** Return the names of such a text. */
export function splitList(text) {
  const names = text.split(",").filter(Boolean);
  return names.map((name) => name.replaceAll("%2C", ",").replaceAll("%25", "%"));
}

/** Return the query string of a view, in an order that does not depend on how it came about. */
export function formatView(view) {
  const params = new URLSearchParams();
  for (const key of Object.keys(view).sort()) {
    const value = view[key];
    if (key === "filter") value.forEach((text) => params.append(key, text));
    else if (Array.isArray(value)) params.append(key, joinList(value));
    else params.append(key, value === true ? "1" : String(value));
  }
  const text = params.toString().replaceAll(/%(2C|3A|2F)/g, decodeURIComponent);
  return text ? `?${text}` : "";
}
