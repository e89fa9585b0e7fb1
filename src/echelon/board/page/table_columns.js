// The columns of the table of runs: which there are, what their cells say of a run and of a group.

import { SPEED_METRICS, isActive } from "./filters.js";
import { formatAge, formatDuration, formatNumber, formatSetting, formatTime, h } from "./dom.js";

const TITLES = {
  name: "Run",
  state: "State",
  step: "Step",
  best: "Best",
  time: "Time",
  age: "Age",
  when: "Started",
  started: "Started",
  experiment: "Experiment",
  host: "Host",
  tags: "Tags",
  note: "Note",
  root: "Folder of runs",
  sweep: "Sweep",
  why: "Why",
  total_steps: "Steps in all",
  launcher: "Launcher",
  job: "Job",
  nodes: "Nodes",
  processes: "Processes",
  folder: "Folder",
};
const OWN_NUMBERS = new Set(["step", "best", "time", "age", "total_steps", "nodes", "processes"]);
const DURATIONS = new Set(["time", "age"]);
const MOMENTS = new Set(["when", "started"]);
/** Own names that a person can choose as columns. */
export const OWN_COLUMNS = Object.keys(TITLES).filter((key) => key !== "name" && key !== "when");
const MAX_SETTINGS = 10;
const MAX_METRICS = 3;
/** The least and the most that columns get by themselves. */
const WIDTHS = {
  name: [150, 340],
  step: [64, 200],
  state: [104, 120],
  age: [74, 74],
  time: [66, 90],
  tags: [90, 200],
  note: [110, 260],
  best: [70, 190],
};
const SORT_ICON_PX = 16;
const MEASURED_GROUPS = 20;
const measured = document.createElement("canvas").getContext("2d");

/** What stands in a cell beside its text. */
const EXTRA_PX = { name: 74, state: 32, step: 54 };

/** Return the keys of the columns that are shown when none are chosen: as `echelon runs` does, settings
 * that differ between the runs, and results. */
export function chooseColumns(store) {
  const rows = store.getVisibleRows();
  const settings = store.getDifferingSettings().slice(0, MAX_SETTINGS);
  const isMixed = rows.some((row) => row.experiment !== rows[0].experiment);
  return [
    "state",
    "step",
    "best",
    ...settings,
    ...chooseMetrics(rows, settings),
    "time",
    "age",
    ...(isMixed ? ["experiment"] : []),
    "host",
    ...(store.meta.roots.length > 1 ? ["root"] : []),
    "tags",
    "note",
  ];
}

function chooseMetrics(rows, settings) {
  const counts = new Map();
  for (const row of rows) {
    for (const key in row.metrics) {
      if (SPEED_METRICS.has(key) || key === "lr" || key === `eval_${row.best_name}`) continue;
      counts.set(key, (counts.get(key) || 0) + 1);
    }
  }
  const isFirst = (key) => (key === "loss" ? 0 : key.startsWith("eval_") ? 1 : 2);
  return [...counts]
    .sort(([a, n], [b, m]) => isFirst(a) - isFirst(b) || m - n || (a < b ? -1 : 1))
    .slice(0, MAX_METRICS)
    .map(([key]) => (key.startsWith("eval_") && !counts.has(key.slice(5)) ? key.slice(5) : key))
    .filter((key) => !settings.includes(key));
}

/** One column: its title, its width, and the text of its cells. */
export class Column {
  constructor(store, key, rows) {
    this.store = store;
    this.key = key;
    this.bestName = key === "best" ? findCommonBestName(rows) : null;
    this.title = this.bestName ? `Best ${this.bestName}` : TITLES[key] || (key.startsWith("trainer.") ? key.slice(8) : key);
    this.kind = key in TITLES ? "own" : this.isSetting(rows) ? "setting" : "metric";
    this.isNumber = this.kind === "own" ? OWN_NUMBERS.has(key) : this.hasNumbers(rows);
    this.min = (WIDTHS[key] || [56, 220])[0];
    this.max = (WIDTHS[key] || [56, 220])[1];
  }

  isSetting(rows) {
    return rows.slice(0, 200).some((row) => this.store.reader.getSetting(row, this.key) !== undefined);
  }

  hasNumbers(rows) {
    if (this.kind === "metric") return true;
    const values = rows.slice(0, 50).map((row) => this.getValue(row));
    return values.some((v) => typeof v === "number") && !values.some((v) => typeof v === "string");
  }

  getValue(row) {
    if (this.key === "root") return shortenPath((this.store.meta.roots[row.root] || {}).path || "");
    if (this.key === "sweep") return row.sweep ?? null;
    return this.store.getValue(row, this.key);
  }

  /** Return the text of a cell; "–" for nothing. */
  getText(row) {
    const { key } = this;
    if (key === "best") return typeof row.best === "number" ? this.addBestName(row, formatNumber(row.best)) : "–";
    if (key === "step") return formatSteps(row);
    if (key === "age") return formatAge(row.started);
    const value = this.getValue(row);
    if (value === null || value === undefined) return key === "tags" || key === "note" ? "" : "–";
    if (DURATIONS.has(key)) return formatDuration(value);
    if (MOMENTS.has(key)) return formatTime(value);
    if (this.kind === "metric") return formatNumber(value);
    return formatSetting(value);
  }

  addBestName(row, text) {
    return this.bestName === null ? `${row.best_name || ""} ${text}` : text;
  }

  /** Return what is said of a cell under the pointer, where it is more than the cell shows. */
  explain(item) {
    const { key } = this;
    if (item.rows) return this.summarize(item.rows).title || "";
    if (key === "state") return item.why || "";
    if (key === "best" && typeof item.best === "number") return `${item.best_name} ${item.best}`;
    if (key === "age" || MOMENTS.has(key)) return formatTime(item.started, true);
    if (key === "step" && isActive(item) && item.eta_s) return `${formatDuration(item.eta_s)} left at this speed`;
    const value = this.kind === "metric" ? this.getValue(item) : null;
    return typeof value === "number" ? String(value) : "";
  }

  /** Return the width that fits most of the cells that are looked at. */
  measure(rows, groups) {
    const extra = EXTRA_PX[this.key] || 18;
    let longest = "";
    const look = (text) => {
      if (text.length > longest.length) longest = text;
    };
    for (const row of rows) {
      const eta = this.key === "step" && isActive(row) && row.eta_s ? " 00m00s" : "";
      look(this.getText(row) + eta);
    }
    if (this.key !== "name" && this.key !== "state") for (const group of groups.slice(0, MEASURED_GROUPS)) look(this.getGroupText(group.rows));
    const { mono, sans } = getFonts();
    measured.font = this.kind === "setting" ? `12px ${mono}` : `550 13px ${sans}`;
    const width = measured.measureText(longest).width + extra;
    measured.font = `600 12px ${sans}`;
    const title = measured.measureText(this.title).width + 18 + SORT_ICON_PX;
    return Math.ceil(Math.min(this.max, Math.max(this.min, width, Math.min(title, 150))));
  }

  getGroupText(rows) {
    const { name = "", text, std = "" } = this.summarize(rows);
    return [this.bestName === null ? name : "", text, std].filter(Boolean).join(" ");
  }

  /** Return what a cell of a group says: `{text, std, title}`. */
  summarize(rows) {
    const { key } = this;
    if (key === "state") return { text: countStates(rows) };
    if (key === "tags" || key === "note") return { text: "" };
    if (key === "age") return { text: formatAge(Math.max(...rows.map((row) => row.started || 0))) };
    if (key === "step") return this.summarizeSteps(rows);
    if (key === "best") return this.summarizeBest(rows);
    if (key === "time" || this.kind === "metric") return this.summarizeNumbers(rows.map((row) => this.getValue(row)));
    const texts = new Set(rows.map((row) => this.getText(row)));
    return texts.size === 1 ? { text: [...texts][0] } : { text: `${texts.size} values`, isSoft: true };
  }

  summarizeSteps(rows) {
    const steps = rows.map((row) => row.step || 0);
    const [low, high] = [Math.min(...steps), Math.max(...steps)];
    return { text: low === high ? String(low) : `${low}–${high}` };
  }

  summarizeBest(rows) {
    const names = new Set(rows.filter((row) => typeof row.best === "number").map((row) => row.best_name));
    if (names.size !== 1) return { text: names.size ? "different metrics" : "–", isSoft: true };
    return { ...this.summarizeNumbers(rows.map((row) => row.best)), name: this.bestName === null ? [...names][0] : "" };
  }

  summarizeNumbers(values) {
    const found = computeMean(values);
    if (!found) return { text: "–" };
    const format = this.key === "time" ? formatDuration : formatNumber;
    const { mean, std, count, min, max } = found;
    return {
      text: format(mean),
      std: count > 1 ? `± ${this.key === "time" ? formatDuration(std) : formatSpread(std)}` : "",
      title: `mean ± standard deviation of ${count}; lowest ${format(min)}, highest ${format(max)}`,
    };
  }
}

/** Return the metric that decides the best of all these runs; null if they are several, or none. */
function findCommonBestName(rows) {
  let name = null;
  for (const row of rows) {
    if (typeof row.best !== "number" || row.best_name === name) continue;
    if (name !== null) return null;
    name = row.best_name;
  }
  return name;
}

let fonts = null;
function getFonts() {
  if (!fonts) {
    const style = getComputedStyle(document.documentElement);
    fonts = { mono: style.getPropertyValue("--mono"), sans: style.getPropertyValue("--sans") };
  }
  return fonts;
}

/** Return mean, standard deviation (of a sample), count, min and max of what is a number; null for none. */
export function computeMean(values) {
  const numbers = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (!numbers.length) return null;
  let [mean, squares, count, min, max] = [0, 0, 0, Infinity, -Infinity];
  for (const value of numbers) {
    count += 1;
    const before = value - mean;
    mean += before / count;
    squares += before * (value - mean);
    min = Math.min(min, value);
    max = Math.max(max, value);
  }
  return { mean, std: count > 1 ? Math.sqrt(squares / (count - 1)) : 0, count, min, max };
}

function formatSpread(value) {
  return value === 0 ? "0" : value >= 1e-3 && value < 1e4 ? String(Number(value.toPrecision(2))) : value.toExponential(1);
}

function countStates(rows) {
  const counts = new Map();
  for (const row of rows) counts.set(row.state, (counts.get(row.state) || 0) + 1);
  if (counts.size === 1) return rows[0].state;
  return [...counts].sort(([, a], [, b]) => b - a).map(([state, count]) => `${count} ${state}`).join(", ");
}

function formatSteps(row) {
  const { step, total_steps: total } = row;
  if (typeof step !== "number") return "–";
  return !total || step >= total ? String(step) : `${step}/${total}`;
}

function shortenPath(path) {
  const parts = path.split("/").filter(Boolean);
  return parts.slice(-2).join("/") || path;
}

// --- cells ---

/** Fill a new cell of runs, and return the function that shows a run in it. `isTop(row)`: whether its best
 * is the best of all. */
export function makeCell(cell, column, isTop) {
  const { key } = column;
  if (key === "state") return makeStateCell(cell);
  if (key === "step") return makeStepCell(cell);
  if (key === "best") return makeBestCell(cell, column, isTop);
  if (key === "tags") return makeTagsCell(cell);
  if (column.isNumber) cell.classList.add("num");
  if (column.kind === "setting" || key === "host" || key === "folder") cell.classList.add("mono");
  if (key === "note") {
    cell.classList.add("rt-edit");
    cell.dataset.do = "edit";
  }
  const text = document.createTextNode("");
  cell.append(text);
  let shown = "";
  return (row) => {
    const value = column.getText(row);
    if (shown === value) return;
    cell.classList.toggle("none", value === "–");
    text.nodeValue = value;
    shown = value;
  };
}

function makeStateCell(cell) {
  cell.classList.add("rt-state");
  const text = document.createElement("span");
  cell.append(document.createElement("i"), text);
  return (row) => {
    if (cell.dataset.state === row.state) return;
    cell.dataset.state = row.state;
    text.textContent = row.state;
  };
}

function makeStepCell(cell) {
  cell.classList.add("rt-step");
  const bar = document.createElement("i");
  const track = h("span", { class: "rt-track", "aria-hidden": "true" }, bar);
  const text = document.createElement("span");
  const eta = document.createElement("small");
  cell.append(eta, track, text);
  let shown = "";
  return (row) => {
    const { step, total_steps: total, eta_s: left } = row;
    const isAlive = isActive(row);
    const key = `${step}|${total}|${left}|${isAlive}`;
    if (key === shown) return;
    shown = key;
    text.textContent = formatSteps(row);
    const hasShare = Boolean(total) && typeof step === "number";
    track.classList.toggle("is-over", !isAlive);
    track.hidden = !hasShare || (!isAlive && step >= total);
    if (!track.hidden) bar.style.transform = `scaleX(${Math.min(1, step / total)})`;
    eta.textContent = isAlive && typeof left === "number" ? formatDuration(left) : "";
    cell.classList.toggle("none", typeof step !== "number");
  };
}

function makeBestCell(cell, column, isTop) {
  cell.classList.add("rt-best", "num");
  const name = document.createElement("small");
  const value = document.createElement("b");
  cell.append(name, value);
  let shown = "";
  return (row) => {
    const has = typeof row.best === "number";
    const isBest = has && isTop(row);
    const key = `${row.best_name}|${row.best}|${isBest}`;
    if (key === shown) return;
    shown = key;
    name.textContent = has && column.bestName === null ? row.best_name || "" : "";
    value.textContent = has ? formatNumber(row.best) : "–";
    cell.classList.toggle("none", !has);
    cell.classList.toggle("is-top", isBest);
  };
}

function makeTagsCell(cell) {
  cell.classList.add("rt-edit");
  cell.dataset.do = "edit";
  let shown = null;
  return (row) => {
    const text = (row.tags || []).join(",");
    if (text === shown) return;
    shown = text;
    cell.replaceChildren(...(row.tags || []).map((tag) => h("span", { class: "rt-tag" }, tag)));
  };
}

/** Fill a new cell of groups, and return the function that shows a group in it. */
export function makeGroupCell(cell, column) {
  if (column.isNumber) cell.classList.add("num");
  if (column.kind === "setting") cell.classList.add("mono");
  const name = document.createElement("small");
  const text = document.createElement("span");
  const std = h("span", { class: "rt-std" });
  if (column.key === "best") cell.classList.add("rt-best");
  cell.append(name, text, std);
  return (group) => {
    const said = column.summarize(group.rows);
    name.textContent = said.name || "";
    text.textContent = said.text;
    std.textContent = said.std || "";
    cell.classList.toggle("none", said.text === "–");
    cell.classList.toggle("soft", Boolean(said.isSoft));
  };
}
