// Which points of which curves the page has, and asking the server for those that it lacks.
//
// Of every curve there is an overview (all of it, two points a pixel) and, while a part is looked at, the detail of
// that part. What has come stays on the screen until better is there; an answer to a question that nobody asks any
// more is dropped.

import { getCurves } from "./api.js";

const MAX_RUNS_PER_REQUEST = 100;
const MAX_METRICS_PER_REQUEST = 6;
const MAX_REQUESTS = 4;
const LIVE_INTERVAL_MS = 500;
const BUILDING_INTERVAL_MS = 400;
const RETRY_MS = 2000;

/** One metric of one run. */
class CurveEntry {
  constructor(run, metric) {
    this.run = run;
    this.metric = metric;
    this.parts = { overview: newPart(), detail: newPart() };
    this.merged = null;
  }

  get overview() {
    return this.parts.overview.curve;
  }
}

function newPart() {
  return { curve: null, key: "", asked: "", isStale: false, range: null };
}

/** Holds the curves of a page of panels. `onData(metrics)` is called after an answer. */
export class CurveLoader {
  constructor(onData) {
    this.onData = onData;
    this.entries = new Map();
    this.question = { x: "step", width: 600, logX: false, zoom: null };
    this.wanted = new Map();
    this.building = new Map();
    this.faults = new Map();
    this.failure = null;
    this.requests = 0;
    this.timer = 0;
    this.due = 0;
    this.lastLive = 0;
    this.isClosed = false;
    this.detailAbort = new AbortController();
  }

  /** Say which part of the curves is looked at, on which axis and over how many pixels. */
  setQuestion(question) {
    const before = this.question;
    this.question = question;
    if (String(before.zoom) !== String(question.zoom) || before.x !== question.x) {
      this.detailAbort.abort();
      this.detailAbort = new AbortController();
    }
    if (before.x !== question.x) {
      this.entries.clear();
      this.faults.clear();
    }
  }

  /** Say which runs each visible panel shows: a Map from metric to ids. */
  setWanted(wanted, delay_ms = 0) {
    this.wanted = wanted;
    this.schedule(delay_ms);
  }

  /** Return the entry of a curve; empty at first. */
  get(run, metric) {
    const key = `${metric}\n${run}`;
    let entry = this.entries.get(key);
    if (!entry) this.entries.set(key, (entry = new CurveEntry(run, metric)));
    return entry;
  }

  /** Ask again for the curves of runs that have grown, not more often than twice a second. */
  markGrown(ids, isGrown = () => true) {
    const grown = new Set(ids);
    let any = false;
    for (const entry of this.entries.values()) {
      if (!grown.has(entry.run) || !isGrown(entry)) continue;
      entry.parts.overview.isStale = true;
      entry.parts.detail.isStale = true;
      any = true;
    }
    if (any) this.schedule(Math.max(0, this.lastLive + LIVE_INTERVAL_MS - performance.now()));
  }

  /** Drop what belongs to runs that are not shown any more. */
  forget(keptIds) {
    for (const [key, entry] of this.entries) if (!keptIds.has(entry.run)) this.entries.delete(key);
    for (const id of this.building.keys()) if (!keptIds.has(id)) this.building.delete(id);
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.detailAbort.abort();
  }

  schedule(delay_ms) {
    const due = performance.now() + delay_ms;
    if (this.timer && this.due <= due) return;
    clearTimeout(this.timer);
    this.due = due;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.ask();
    }, delay_ms);
  }

  // --- questions ---

  /** The parts of the axis that are asked for, each with its pixels: on a logarithmic axis one per decade, since
   * the server divides a range evenly. */
  getRanges(kind) {
    const { width, logX, zoom, extent } = this.question;
    if (!logX) return [kind === "detail" ? { from: zoom[0], to: zoom[1], width } : { width }];
    const [from, to] = kind === "detail" ? zoom : extent || [1, 1];
    if (!(to > from) || !(from > 0)) return [{ width }];
    const decades = Math.log10(to / from);
    const count = Math.min(8, Math.max(1, Math.ceil(decades)));
    const at = (i) => (i === count ? to : from * 10 ** ((decades * i) / count));
    return Array.from({ length: count }, (_, i) => ({
      from: at(i),
      to: at(i + 1),
      width: Math.max(40, Math.ceil(width / count)),
    }));
  }

  getKey(kind) {
    const { x, width, logX, zoom, extent } = this.question;
    if (kind === "detail") return `${x} ${width} ${logX} ${zoom[0]} ${zoom[1]}`;
    // The extent of a logarithmic axis grows while a run is followed: only its magnitude is a new question.
    const size = logX && extent ? Math.ceil(Math.log10(extent[1] / extent[0]) * 4) : "";
    return `${x} ${width} ${logX} ${size}`;
  }

  needs(entry, kind) {
    const part = entry.parts[kind];
    const key = this.getKey(kind);
    if (part.asked === key) return false;
    if (kind === "overview") {
      if (!part.curve) return true;
      if (part.isStale) return true;
      return part.key !== key && !part.curve.exact;
    }
    const { overview } = entry;
    if (!overview || overview.exact) return false;
    const { zoom } = this.question;
    if (overview.n && (overview.last_x < zoom[0] || overview.first_x > zoom[1]) && !part.isStale) return false;
    return part.key !== key || (part.isStale && zoom[1] >= overview.last_x);
  }

  ask() {
    if (this.isClosed) return;
    const kinds = this.question.zoom ? ["detail", "overview"] : ["overview"];
    let isLive = false;
    for (const kind of kinds) {
      const byRuns = new Map();
      for (const [metric, ids] of this.wanted) {
        const missing = ids.filter((id) => this.needs(this.get(id, metric), kind));
        if (!missing.length) continue;
        isLive = isLive || missing.some((id) => this.get(id, metric).parts[kind].isStale);
        const key = missing.join("\n");
        if (!byRuns.has(key)) byRuns.set(key, { ids: missing, metrics: [] });
        byRuns.get(key).metrics.push(metric);
      }
      for (const { ids, metrics } of byRuns.values()) {
        for (let i = 0; i < ids.length; i += MAX_RUNS_PER_REQUEST) {
          for (let j = 0; j < metrics.length; j += MAX_METRICS_PER_REQUEST) {
            if (this.requests >= MAX_REQUESTS) return; // the next answer asks again
            const some = metrics.slice(j, j + MAX_METRICS_PER_REQUEST);
            this.request(kind, ids.slice(i, i + MAX_RUNS_PER_REQUEST), some);
          }
        }
      }
    }
    if (isLive) this.lastLive = performance.now();
  }

  async request(kind, ids, metrics) {
    const key = this.getKey(kind);
    const { x } = this.question;
    const asked = metrics.flatMap((metric) => ids.map((id) => this.get(id, metric)));
    for (const entry of asked) entry.parts[kind].asked = key;
    const ranges = this.getRanges(kind);
    this.requests += 1;
    const options = kind === "detail" ? { signal: this.detailAbort.signal } : undefined;
    let answers = null;
    let wasAborted = false;
    try {
      answers = await Promise.all(
        ranges.map((range) => getCurves({ run: ids, metric: metrics, x, ...range }, options)),
      );
      this.failure = null;
    } catch (error) {
      wasAborted = error.name === "AbortError";
      if (!wasAborted) this.failure = error;
    }
    this.requests -= 1;
    if (this.isClosed) return;
    for (const entry of asked) if (entry.parts[kind].asked === key) entry.parts[kind].asked = "";
    if (wasAborted) return this.schedule(0);
    if (!answers) {
      this.onData(new Set(metrics));
      return this.schedule(RETRY_MS);
    }
    const isWanted = this.question.x === x && (kind === "overview" || (this.question.zoom && this.getKey(kind) === key));
    if (isWanted) this.take(kind, key, ids, metrics, ranges, answers);
    const wait_ms = this.building.size ? BUILDING_INTERVAL_MS : this.anyStale() ? this.waitForLive() : 0;
    return this.schedule(wait_ms);
  }

  anyStale() {
    for (const entry of this.entries.values()) if (entry.parts.overview.isStale) return true;
    return false;
  }

  waitForLive() {
    return Math.max(0, this.lastLive + LIVE_INTERVAL_MS - performance.now());
  }

  take(kind, key, ids, metrics, ranges, answers) {
    for (const id of ids) this.building.delete(id);
    for (const answer of answers) {
      for (const { run, share } of answer.building) this.building.set(run, share);
      for (const fault of answer.faults) this.faults.set(`${fault.metric}\n${fault.run}`, fault);
    }
    const found = new Map();
    for (const answer of answers) {
      for (const curve of answer.curves) {
        const name = `${curve.metric}\n${curve.run}`;
        if (!found.has(name)) found.set(name, []);
        found.get(name).push(curve);
      }
    }
    for (const metric of metrics) {
      for (const id of ids) {
        const name = `${metric}\n${id}`;
        const entry = this.entries.get(name);
        if (!entry) continue;
        const curves = found.get(name);
        if (curves) this.faults.delete(name);
        const part = entry.parts[kind];
        part.curve = curves ? checkAxis(joinPieces(curves), this.question.x) : EMPTY;
        part.key = key;
        // Of a run that is read for the first time this is what was read so far.
        part.isStale = this.building.has(id);
        part.range = kind === "detail" ? [ranges[0].from, ranges[ranges.length - 1].to] : null;
        entry.merged = null;
      }
    }
    this.onData(new Set(metrics));
  }

  // --- what is drawn ---

  /** Return the points of a curve: the detail where there is one, the overview around it; null before any. */
  getPoints(entry) {
    const { overview, detail } = entry.parts;
    if (!overview.curve) return detail.curve && detail.curve.n ? detail.curve : null;
    const isZoomed = Boolean(this.question.zoom && detail.curve && detail.curve.n && !overview.curve.exact);
    if (entry.merged && entry.merged.isZoomed === isZoomed) return entry.merged.points;
    const points = isZoomed ? replacePart(overview.curve, detail.curve, detail.range) : overview.curve;
    entry.merged = { isZoomed, points };
    return points;
  }
}

const NONE = new Float64Array(0);
const EMPTY = { n: 0, x: NONE, y: NONE, mean: NONE, exact: true, count: 0, not_finite: 0 };

/** A run that does not say where it is on an axis is given over steps: that cannot stand beside the others. */
function checkAxis(curve, x) {
  return curve.axis && curve.axis !== x ? { ...EMPTY, not_finite: curve.not_finite, hasOtherAxis: true } : curve;
}

/** Return the pieces of one curve, which follow each other, as one. */
function joinPieces(pieces) {
  if (pieces.length === 1) return pieces[0];
  const whole = pieces[0];
  const kept = pieces.map((piece, i) => {
    const next = pieces.slice(i + 1).find((one) => one.n);
    const end = next ? findEnd(piece.x, next.x[0]) : piece.n;
    return { x: piece.x.subarray(0, end), y: piece.y.subarray(0, end), mean: piece.mean.subarray(0, end) };
  });
  return {
    ...whole,
    ...concatenate(kept),
    exact: pieces.every((piece) => piece.exact),
    last_x: pieces[pieces.length - 1].last_x ?? whole.last_x,
  };
}

function findEnd(values, limit) {
  let end = values.length;
  while (end > 0 && values[end - 1] >= limit) end -= 1;
  return end;
}

function concatenate(pieces) {
  const n = pieces.reduce((sum, piece) => sum + piece.x.length, 0);
  const result = { n, x: new Float64Array(n), y: new Float64Array(n), mean: new Float64Array(n) };
  let at = 0;
  for (const piece of pieces) {
    result.x.set(piece.x, at);
    result.y.set(piece.y, at);
    result.mean.set(piece.mean, at);
    at += piece.x.length;
  }
  return result;
}

/** Return a curve with the points of a range replaced by finer ones. */
function replacePart(curve, finer, [from, to]) {
  const start = Math.min(from, finer.x[0]);
  const end = Math.max(to, finer.x[finer.n - 1]);
  let a = 0;
  while (a < curve.n && curve.x[a] < start) a += 1;
  let b = a;
  while (b < curve.n && curve.x[b] <= end) b += 1;
  const cut = (i, j) => ({ x: curve.x.subarray(i, j), y: curve.y.subarray(i, j), mean: curve.mean.subarray(i, j) });
  const points = concatenate([cut(0, a), finer, cut(b, curve.n)]);
  return { ...curve, ...points, exact: false, smoothed: null };
}
