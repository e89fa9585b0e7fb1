// The language of `echelon runs --filter`, over the rows of the server: what a name means of a run, which
// runs meet a condition, in which order they stand. tests/board/filter_cases.json checks it with Python's.

import { formatSetting } from "./dom.js";

/** Names that every run has, as `echelon runs` knows them. */
export const OWN_NAMES = [
  "name", "run", "folder", "experiment", "state", "why", "step", "total_steps", "best", "time",
  "when", "started", "age", "launcher", "host", "job", "nodes", "processes", "tags", "note",
];
const OWN = new Set(OWN_NAMES);
const SUFFIXES = ["last", "best", "min", "max"];
/** How fast a run was, not how good. */
export const SPEED_METRICS = new Set([
  "samples_per_s", "step_ms", "data_ms", "compute_ms", "communication_ms", "optimizer_ms", "mfu",
  "memory_gb", "slowest_rank", "slowest_x",
]);
const IRRELEVANT_PREFIXES = [
  "run.", "launch.", "track.", "rank", "world_size", "master", "program", "trainer.resume",
  "trainer.save.", "trainer.keep_last", "trainer.mirror", "trainer.log_steps",
];
const MACHINE_PREFIXES = ["launch.", "run.", "track."];
const ACTIVE_STATES = new Set(["starting", "queued", "requeued", "running"]);

/** A condition that cannot be read, or names what no run has. */
export class FilterError extends Error {
  constructor(message, hint) {
    super(message);
    this.hint = hint;
  }
}

/** Return whether a run is queued, starts or runs. */
export function isActive(row) {
  return ACTIVE_STATES.has(row.state);
}

/** Return whether lists leave a run out unless all are asked for. */
export function isLeftOut(row) {
  return !isActive(row) && Boolean(row.archived || row.early);
}

// --- what a name means ---

function getOwnValue(row, key, now) {
  switch (key) {
    case "name":
    case "run":
      return row.name;
    case "why":
      return row.why || null;
    case "time":
      return row.trained_s ?? null;
    case "when":
    case "started":
      return row.started ?? null;
    case "age":
      return typeof row.started === "number" ? Math.max(0, now - row.started) : null;
    case "tags":
      return (row.tags && row.tags.join(",")) || null;
    case "note":
      return row.note || null;
    default:
      return row[key] ?? null;
  }
}

/** Reads values of rows by name. `defaults`: settings of runs that do not say them. */
export class RowReader {
  constructor(defaults = {}) {
    this.defaults = defaults;
  }

  /** Return a value; undefined if the run has nothing of this name, null if it is not known. */
  get(row, key) {
    if (OWN.has(key)) return getOwnValue(row, key, Date.now() / 1000);
    const setting = this.getSetting(row, key);
    return setting === undefined ? this.getMetric(row, key) : setting;
  }

  /** Return a setting, dotted or bare: those of the experiment and of `trainer` by both. */
  getSetting(row, key) {
    let value = this.getExactSetting(row, key);
    if (value === undefined && key.startsWith("experiment.")) {
      const bare = key.slice(11);
      if (!bare.includes(".")) value = this.getExactSetting(row, bare);
    }
    return value === undefined ? this.getExactSetting(row, `trainer.${key}`) : value;
  }

  getExactSetting(row, key) {
    const settings = row.settings || {};
    if (Object.hasOwn(settings, key)) return settings[key];
    if (!hasDefaults(row) || !Object.hasOwn(this.defaults, key)) return undefined;
    return this.defaults[key];
  }

  /** Return a metric, with or without `eval_`: its last value, or `.best`, `.min`, `.max`. */
  getMetric(row, key) {
    const found = findMetric(row, key);
    if (!found) return undefined;
    const [[last, min, max, , bestIs], suffix] = found;
    if (suffix === "min") return min;
    if (suffix === "max") return max;
    if (suffix === "best") return bestIs === "max" ? max : min;
    return last;
  }

  /** Return whether a name means a metric of this run. */
  isMetric(row, key) {
    return !OWN.has(key) && this.getSetting(row, key) === undefined && Boolean(findMetric(row, key));
  }

  /** Return `[class, number, text]`: metrics by the best first, everything else ascending, nothing last. */
  getSortKey(row, key) {
    const value = this.get(row, key);
    if (typeof value === "number") {
      const isReversed = this.isMetric(row, key) && findMetric(row, key)[0][4] === "max";
      return [0, isReversed ? -value : value, ""];
    }
    return value === null || value === undefined ? [2, 0, ""] : [1, 0, formatSetting(value)];
  }
}

function hasDefaults(row) {
  return (row.source || "echelon") === "echelon" && row.state !== "broken";
}

/** Return `[numbers, suffix]` of what a name means among a run's metrics; null for none. */
export function findMetric(row, key) {
  const metrics = row.metrics || {};
  const whole = lookUpMetric(metrics, key);
  if (whole) return [whole, "last"];
  const dot = key.lastIndexOf(".");
  if (dot < 0 || !SUFFIXES.includes(key.slice(dot + 1))) return null;
  const found = lookUpMetric(metrics, key.slice(0, dot));
  return found ? [found, key.slice(dot + 1)] : null;
}

function lookUpMetric(metrics, name) {
  if (Object.hasOwn(metrics, name)) return metrics[name];
  const full = `eval_${name}`;
  return Object.hasOwn(metrics, full) ? metrics[full] : null;
}

// --- conditions ---

const CONDITION = /^([\p{L}\p{N}_.]+?)(!=|<=|>=|=|<|>)(.*)$/u;
const COMPARISONS = {
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
};
const NUMBER = /^[+-]?(\d+(_\d+)*(\.(\d+(_\d+)*)?)?|\.\d+(_\d+)*)(e[+-]?\d+(_\d+)*)?$/i;
const SPECIAL_NUMBER = /^([+-]?)(inf|infinity|nan)$/i;

/** Return the number that Python's `float` reads; null if it is none. */
export function parseNumber(text) {
  const bare = text.trim();
  if (NUMBER.test(bare)) return Number(bare.replaceAll("_", ""));
  const special = SPECIAL_NUMBER.exec(bare);
  if (!special) return null;
  if (special[2].toLowerCase() === "nan") return NaN;
  return special[1] === "-" ? -Infinity : Infinity;
}

/** Return a function that tells whether a text matches a glob as Python's `fnmatch` reads it: `*`, `?`,
 * `[abc]`, `[!a-z]`. No regular expression: `*a*a*a*b` would take one for ever on a long text. */
export function compileGlob(pattern) {
  if (!/[*?[]/.test(pattern)) return (text) => text === pattern;
  const parts = parseGlob([...pattern]);
  return (text) => matchGlob(parts, [...text]);
}

const STAR = Symbol("any number of signs");

/** Return for each sign a function that tells whether it fits, or STAR. */
function parseGlob(signs) {
  const parts = [];
  let i = 0;
  while (i < signs.length) {
    const sign = signs[i];
    const end = sign === "[" ? findClosing(signs, i + 1) : -1;
    if (end >= 0) {
      parts.push(parseSet(signs.slice(i + 1, end)));
      i = end;
    } else if (sign === "*") parts.push(STAR);
    else parts.push(sign === "?" ? () => true : (other) => other === sign);
    i += 1;
  }
  return parts;
}

function findClosing(signs, start) {
  let end = start;
  if (signs[end] === "!") end += 1;
  if (signs[end] === "]") end += 1;
  while (end < signs.length && signs[end] !== "]") end += 1;
  return end < signs.length ? end : -1;
}

function parseSet(signs) {
  const isNot = signs[0] === "!";
  const left = signs.slice(isNot ? 1 : 0);
  const ranges = [];
  for (let i = 0; i < left.length; i += 1) {
    const isRange = left[i + 1] === "-" && i + 2 < left.length;
    ranges.push([left[i].codePointAt(0), left[isRange ? i + 2 : i].codePointAt(0)]);
    i += isRange ? 2 : 0;
  }
  return (other) => {
    const code = other.codePointAt(0);
    return ranges.some(([low, high]) => low <= code && code <= high) !== isNot;
  };
}

function matchGlob(parts, signs) {
  let [at, i, starAt, starI] = [0, 0, -1, 0];
  while (i < signs.length) {
    if (at < parts.length && parts[at] === STAR) {
      starAt = at;
      starI = i;
      at += 1;
    } else if (at < parts.length && parts[at](signs[i])) {
      at += 1;
      i += 1;
    } else if (starAt >= 0) {
      at = starAt + 1;
      starI += 1;
      i = starI;
    } else return false;
  }
  while (parts[at] === STAR) at += 1;
  return at === parts.length;
}

/** Return `{key, relation, value, test}` of one condition; throws FilterError for what is none. */
export function parseCondition(text) {
  const match = CONDITION.exec(text);
  if (!match || text.includes("\n")) {
    throw new FilterError(
      `${text}: this is not a condition`,
      "write KEY=VALUE, e.g. state=finished, experiment=toy, name=seed-*, lr>=0.1",
    );
  }
  const [, key, relation, value] = match;
  const number = parseNumber(value);
  const compare = COMPARISONS[relation];
  if (compare && number === null) {
    throw new FilterError(
      `${text}: ${JSON.stringify(value)} is not a number, and ${relation} needs one`,
      `write ${key}${relation}0.1, or ${key}=${value || "VALUE"}`,
    );
  }
  if (compare) {
    return { key, relation, value, test: (mine) => typeof mine === "number" && compare(mine, number) };
  }
  const glob = compileGlob(value);
  const isSame = (mine) =>
    typeof mine === "number" && number !== null ? mine === number : glob(formatSetting(mine));
  return { key, relation, value, test: (mine) => isSame(mine) === (relation === "=") };
}

/** Return whether a run meets a condition. A run without the key meets only `!=`. */
export function meetsCondition(reader, row, condition) {
  const mine = reader.get(row, condition.key);
  return mine === undefined ? condition.relation === "!=" : condition.test(mine);
}

/** Throw FilterError for a name that no run has, with the nearest that there is. */
export function requireKnownName(reader, rows, key) {
  if (!rows.length || OWN.has(key) || rows.some((row) => reader.get(row, key) !== undefined)) return;
  const names = listNames(reader, rows);
  const near = findNearest(key, [...names.own, ...names.settings, ...names.metrics]);
  const like = near.length > 1 ? ` also like it: ${near.slice(1).join(", ")}` : "";
  const others = [...names.metrics, ...names.settings].slice(0, 8).join(", ");
  const hint = near.length ? `did you mean ${near[0]}?${like}` : `there are ${others}, state, tags, …`;
  throw new FilterError(`no run has ${key}`, hint);
}

/** Return the names that can be typed: `own`, `settings` (likely ones) and `metrics`. */
export function listNames(reader, rows) {
  const settings = new Set();
  const metrics = new Set();
  for (const row of rows) {
    for (const key in row.settings) settings.add(key);
    for (const key in row.metrics) {
      const bare = key.startsWith("eval_") ? key.slice(5) : key;
      metrics.add(Object.hasOwn(row.metrics, bare) ? key : bare);
    }
  }
  for (const key of Object.keys(reader.defaults)) settings.add(key);
  const isLikely = (name) => !MACHINE_PREFIXES.some((prefix) => name.startsWith(prefix));
  return {
    own: OWN_NAMES,
    settings: [...settings].filter(isLikely).sort(),
    metrics: [...metrics].filter((name) => !SPEED_METRICS.has(name)).sort(),
  };
}

/** Return up to three names that are like one, the nearest first, as Python's difflib measures it. */
export function findNearest(name, known) {
  const wanted = name.toLowerCase();
  return [...new Set(known)]
    .map((other) => [measureLikeness(wanted, other.toLowerCase()), other])
    .filter(([likeness]) => likeness >= 0.5)
    .sort((a, b) => b[0] - a[0] || (a[1] < b[1] ? 1 : -1))
    .slice(0, 3)
    .map(([, other]) => other);
}

function measureLikeness(a, b) {
  return a.length + b.length ? (2 * countMatches(a, b)) / (a.length + b.length) : 1;
}

function countMatches(a, b) {
  let [best, bestA, bestB] = [0, 0, 0];
  let before = [];
  for (let i = 0; i < a.length; i += 1) {
    const row = [];
    for (let j = 0; j < b.length; j += 1) {
      if (a[i] !== b[j]) continue;
      row[j] = (before[j - 1] || 0) + 1;
      if (row[j] > best) [best, bestA, bestB] = [row[j], i - row[j] + 1, j - row[j] + 1];
    }
    before = row;
  }
  if (!best) return 0;
  const left = countMatches(a.slice(0, bestA), b.slice(0, bestB));
  return left + best + countMatches(a.slice(bestA + best), b.slice(bestB + best));
}

// --- what is typed into the box ---

const TOKEN = /(?:[^\s"']|"[^"]*"?|'[^']*'?)+/g;

/** Return `{conditions: [text], words: [text]}` of a line: words with a relation are conditions, the others
 * are searched for. Quotes hold blanks together. */
export function splitQuery(text) {
  const conditions = [];
  const words = [];
  for (const token of text.match(TOKEN) || []) {
    const bare = token.replace(/["']/g, "");
    if (CONDITION.test(bare)) conditions.push(bare);
    else if (bare) words.push(bare.toLowerCase());
  }
  return { conditions, words };
}

const searchTexts = new WeakMap();

/** Return whether all words are in a run's name, experiment, tags, note or settings. */
export function matchesWords(row, words) {
  if (!words.length) return true;
  let text = searchTexts.get(row);
  if (text === undefined) {
    const settings = Object.entries(row.settings || {}).map(([k, v]) => `${k}=${formatSetting(v)}`);
    const tags = (row.tags || []).map((tag) => `#${tag}`);
    const parts = [row.name, row.experiment, row.state, row.host, ...tags, row.note, ...settings];
    text = parts.filter(Boolean).join("\n").toLowerCase();
    searchTexts.set(row, text);
  }
  return words.every((word) => text.includes(word));
}

// --- order and columns ---

/** Return rows in the order of `echelon runs --sort KEY`: newest and best first, others ascending. */
export function sortRows(reader, rows, key) {
  if (key === "when") return rows.slice().sort(compareByStart);
  const keyed = rows.map((row) => [key === "best" ? getBestSortKey(row) : reader.getSortKey(row, key), row]);
  keyed.sort(compareKeyed);
  return keyed.map(([, row]) => row);
}

function compareByStart(a, b) {
  return (b.started || 0) - (a.started || 0) || (a.name < b.name ? 1 : a.name > b.name ? -1 : 0);
}

function compareKeyed([a, first], [b, second]) {
  for (let i = 0; i < a.length; i += 1) {
    if (a[i] < b[i]) return -1;
    if (a[i] > b[i]) return 1;
  }
  return compareByStart(first, second);
}

/** Sort within an experiment and metric, because values of different metrics cannot be compared. */
function getBestSortKey(row) {
  const value = typeof row.best === "number" ? row.best : null;
  const signed = value === null ? 0 : row.best_is === "max" ? -value : value;
  return [value === null ? 1 : 0, row.experiment || "", row.best_name || "", signed];
}

/** Return whether a setting says something about the training, not about where it ran. */
export function isRelevantSetting(key) {
  return !IRRELEVANT_PREFIXES.some((prefix) => key.startsWith(prefix));
}

/** Return the settings in which runs of one experiment differ, those with the most values last. */
export function findDifferingSettings(reader, rows) {
  const experiments = new Map();
  for (const row of rows) {
    if (!hasDefaults(row) && row.state === "broken") continue;
    let seen = experiments.get(row.experiment);
    if (!seen) experiments.set(row.experiment, (seen = { runs: 0, keys: new Map() }));
    seen.runs += 1;
    for (const key in row.settings) {
      const value = row.settings[key];
      const known = seen.keys.get(key);
      if (!known) seen.keys.set(key, { count: 1, value, differs: false });
      else {
        known.count += 1;
        if (!known.differs && value !== known.value) known.differs = !isEqual(value, known.value);
      }
    }
  }
  const found = new Set();
  for (const { runs, keys } of experiments.values()) {
    for (const [key, { count, value, differs }] of keys) {
      if (!isRelevantSetting(key)) continue;
      if (differs || (count < runs && !isEqual(value, reader.defaults[key]))) found.add(key);
    }
  }
  return [...found].sort((a, b) => isSeed(a) - isSeed(b) || a.includes(".") - b.includes(".") || (a < b ? -1 : 1));
}

function isEqual(a, b) {
  return a === b || (typeof a === "object" && JSON.stringify(a) === JSON.stringify(b));
}

/** Return whether a setting is a seed: runs that differ in nothing else are repetitions. */
export function isSeed(key) {
  return /(^|[._])seed$/.test(key);
}

/** Return a setting's name as a label: without `trainer.`, unless another of these is called so. */
export function shortenKey(key, keys) {
  const bare = key.startsWith("trainer.") ? key.slice(8) : key;
  return bare !== key && keys.includes(bare) ? key : bare;
}
