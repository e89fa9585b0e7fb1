// What can stand on an axis: settings, results and a run's own values, by the names of `echelon runs`.

import { isDarkTheme } from "./chart.js";
import { h } from "./dom.js";
import { SPEED_METRICS } from "./filters.js";

const OWN_NUMBERS = ["best", "step", "time", "started", "age", "nodes", "processes"];
const SUFFIXES = ["best", "last", "min", "max"];
const HUE_STOPS = [[61, 79, 196], [138, 63, 184], [204, 71, 120], [238, 123, 60], [226, 165, 38]];
const GOOD_STOPS = { light: [[158, 146, 136], [22, 108, 191]], dark: [[120, 110, 102], [92, 172, 248]] };

/** Return the names that mean something of these rows: `{settings, metrics, own}`; settings that differ come first. */
export function listFields(store, rows) {
  const metrics = new Set();
  const settings = new Set();
  for (const row of rows.slice(0, 2000)) {
    for (const name of Object.keys(row.metrics || {})) metrics.add(name);
    for (const name of Object.keys(row.settings || {})) settings.add(name);
  }
  const differing = store.getDifferingSettings().filter((name) => settings.has(name) || name in store.meta.defaults);
  const own = OWN_NUMBERS.filter((name) => rows.some((row) => typeof store.getValue(row, name) === "number"));
  const speed = [...metrics].filter((name) => SPEED_METRICS.has(name)).sort();
  const results = [...metrics].filter((name) => !SPEED_METRICS.has(name)).sort(compareMetrics);
  return { settings: differing, metrics: [...results, ...speed], own };
}

function compareMetrics(a, b) {
  const rank = (name) => (name.startsWith("eval_") ? 0 : name === "loss" ? 1 : 2);
  return rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true });
}

/** Return all names that may be chosen for an axis. */
export function listNames({ settings, metrics, own }) {
  const results = metrics.flatMap((name) => SUFFIXES.map((suffix) => `${name}.${suffix}`));
  return [...settings, ...own, ...results];
}

/** Return the name of the result that most runs are judged by: `eval_loss.best`. */
export function guessResult(store, rows) {
  const counts = new Map();
  for (const row of rows) {
    // The best loss is that of evaluations, where there are some; `loss` alone is that of training.
    const evaluated = `eval_${row.best_name}`;
    const judged = Object.hasOwn(row.metrics || {}, evaluated) ? evaluated : row.best_name;
    const name = row.best_name && row.best_name !== "train loss" ? `${judged}.best` : "loss.last";
    if (typeof store.getValue(row, name) === "number") counts.set(name, (counts.get(name) || 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1]).map(([name]) => name)[0] || "best";
}

/** Return whether a larger value of this name is better, by what the runs say; null where nothing is. */
export function isMoreBetter(rows, name) {
  const bare = name.replace(/\.(best|last|min|max)$/, "");
  for (const row of rows) {
    if (bare === "best") return row.best_is === "max";
    const metric = (row.metrics || {})[bare] || (row.metrics || {})[`eval_${bare}`];
    if (metric && metric[4]) return metric[4] === "max";
  }
  return null;
}

/** Return the kind of axis that a name needs. */
export function getAxisKind(name) {
  if (name === "started" || name === "when") return "clock";
  return name === "time" || name === "age" ? "duration" : "number";
}

let chooserCount = 0;

/** Return a labelled field in which a name is typed or chosen from a list that narrows while typing. */
export function makeChooser(label, onChange, { optional = false } = {}) {
  chooserCount += 1;
  const id = `fields-${chooserCount}`;
  const list = h("datalist", { id });
  const input = h("input", {
    list: id,
    class: "sc-chooser",
    "aria-label": label,
    placeholder: optional ? "nothing" : "choose",
    spellcheck: "false",
    autocomplete: "off",
    onchange: () => onChange(input.value.trim()),
    // A list that narrows by what is in the field would only offer what is chosen already.
    onfocus: () => input.select(),
    onkeydown: (event) => event.key === "Enter" && onChange(input.value.trim()),
  });
  const element = h("label", { class: "sc-label" }, h("span", {}, label), input, list);
  let known = "";
  return {
    element,
    set(names, value) {
      const key = names.join("\n");
      if (key !== known) {
        known = key;
        list.replaceChildren(...names.map((name) => h("option", { value: name })));
      }
      if (document.activeElement !== input || !input.value) input.value = value;
      input.setAttribute("aria-invalid", String(Boolean(value) && !names.includes(value) && !names.includes(`${value}.last`)));
    },
  };
}

/** Return the colour of a share between 0 and 1; with `isGoodness` from grey to blue, as results are drawn. */
export function getScaleColour(share, isGoodness) {
  const stops = isGoodness ? GOOD_STOPS[isDarkTheme() ? "dark" : "light"] : HUE_STOPS;
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  const mix = stops[i].map((v, k) => Math.round(v + (stops[i + 1][k] - v) * (at - i)));
  return `rgb(${mix.join(",")})`;
}

/** Return how to colour rows by a name: `{get(row), low, high, isGoodness}` of numbers, `{get, entries}` of words. */
export function makeColouring(store, rows, name) {
  const values = new Map(rows.map((row) => [row.id, store.getValue(row, name)]));
  const numbers = [...values.values()].filter((v) => typeof v === "number" && Number.isFinite(v));
  const found = [...values.values()].filter((v) => v !== undefined && v !== null);
  if (numbers.length && numbers.length >= found.length / 2) {
    const low = numbers.reduce((a, b) => Math.min(a, b));
    const high = numbers.reduce((a, b) => Math.max(a, b));
    const isLog = low > 0 && high / low > 50;
    const better = isMoreBetter(rows, name);
    const place = (v) => {
      if (high === low) return 0.5;
      return isLog ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
    };
    const share = (v) => (better === false ? 1 - place(v) : place(v));
    const get = (row) => {
      const v = values.get(row.id);
      return typeof v === "number" && Number.isFinite(v) ? getScaleColour(share(v), better !== null) : null;
    };
    return { get, low, high, isGoodness: better !== null, isReversed: better === false };
  }
  const words = [...new Set(found.map(String))].sort();
  const colours = ["#2f7fd1", "#e8590c", "#2b9f56", "#a061f2", "#d6336c", "#0b9aa8", "#b8860b", "#7a8794"];
  const byWord = new Map(words.map((word, i) => [word, colours[i % colours.length]]));
  const get = (row) => byWord.get(String(values.get(row.id))) || null;
  return { get, entries: [...byWord].slice(0, 12) };
}

/** Return a legend of a colouring: a bar with its ends, or words. */
export function drawColourLegend(name, colouring, format) {
  if (!colouring) return h("span");
  if (colouring.entries) {
    const items = colouring.entries.map(([word, colour]) => h("span", { class: "sc-word" }, h("i", { style: { background: colour } }), word));
    return h("span", { class: "sc-scale" }, h("b", {}, name), items);
  }
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => getScaleColour(share, colouring.isGoodness));
  const ends = [format(colouring.low), format(colouring.high)];
  if (colouring.isReversed) ends.reverse();
  const bar = h("i", { class: "sc-ramp", style: { background: `linear-gradient(90deg, ${stops.join(",")})` } });
  return h("span", { class: "sc-scale" }, h("b", {}, name), ends[0], bar, ends[1]);
}

/** Return a function that calls `fn` at once, and at most once in so many milliseconds; its last call is not lost. */
function limitRate(fn, interval_ms) {
  let timer = 0;
  let last = -Infinity;
  const call = () => {
    timer = 0;
    last = performance.now();
    fn();
  };
  const limited = () => {
    const wait_ms = last + interval_ms - performance.now();
    if (timer) return;
    if (wait_ms <= 0) call();
    else timer = setTimeout(call, wait_ms);
  };
  limited.stop = () => clearTimeout(timer);
  return limited;
}

/** Return what a view module returns: all rows are looked at for a chart, so their changes count once a second. */
export function mountLimited(view) {
  const refreshLater = limitRate(() => view.refresh(), 1000);
  return {
    update: (kind) => {
      if (kind === "rows") refreshLater();
      else if (kind === "view" || kind === "theme") view.refresh();
    },
    unmount: () => {
      refreshLater.stop();
      view.unmount();
    },
  };
}
