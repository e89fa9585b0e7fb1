// A chart of many lines. Axes, scales and the canvas are uPlot's; the lines are drawn here, since every line has
// x values of its own and is drawn anew in every frame of a zoom.

import { h } from "./dom.js";

/* global uPlot */

const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const TIME_STEPS_S = [
  ...[0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200],
  ...[86400, 172800, 432000, 864000, 2592000, 8640000],
];

// --- numbers and times on axes ---

/** Return a number as short as an axis wants it: `1.2M`, `0.003`, `2e-9`. */
export function formatTick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(2).replace(/\.?0*e/, "e").replace("e+", "e");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((value / (unit === 1e4 ? 1e3 : unit)).toPrecision(6))}${letter}`;
  }
  return String(Number(value.toPrecision(6)));
}

/** Return seconds as an axis wants them: `45s`, `1h30`, `2d 6h`. */
export function formatTickDuration(seconds) {
  const s = Math.abs(seconds);
  const sign = seconds < 0 ? "-" : "";
  if (s < 60) return `${sign}${Number(s.toPrecision(4))}s`;
  if (s < 3600) {
    const rest = Math.round(s % 60);
    return `${sign}${Math.floor(s / 60)}m${rest ? String(rest).padStart(2, "0") : ""}`;
  }
  if (s < 172800) {
    const rest = Math.round((s % 3600) / 60);
    return `${sign}${Math.floor(s / 3600)}h${rest ? String(rest).padStart(2, "0") : ""}`;
  }
  const rest = Math.round((s % 86400) / 3600);
  return `${sign}${Math.floor(s / 86400)}d${rest ? ` ${rest}h` : ""}`;
}

// --- theme ---

let theme = null;
const themeWatchers = new Set();

/** Return the colours of the page as they are now. */
export function getTheme() {
  if (theme) return theme;
  const style = getComputedStyle(document.documentElement);
  const get = (name, other) => style.getPropertyValue(name).trim() || other;
  theme = {
    bg: get("--bg", "#fff"),
    bg2: get("--bg2", "#f6f7f9"),
    fg: get("--fg", "#1c2025"),
    fg2: get("--fg2", "#626973"),
    line: get("--line", "#e0e3e7"),
    accent: get("--accent", "#166cbf"),
    bad: get("--bad", "#c0392b"),
  };
  return theme;
}

/** Call `fn` when the page changes between light and dark. Returns a function that ends this. */
export function onTheme(fn) {
  if (!themeWatchers.size) startWatchingTheme();
  themeWatchers.add(fn);
  return () => themeWatchers.delete(fn);
}

/** Return whether the page is dark now. */
export function isDarkTheme() {
  return document.documentElement.dataset.theme === "dark";
}

let isWatchingTheme = false;

function startWatchingTheme() {
  if (isWatchingTheme) return;
  isWatchingTheme = true;
  const tell = () => {
    theme = null;
    for (const fn of [...themeWatchers]) fn();
  };
  new MutationObserver(tell).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}

/** Return a small drawing beside a label; a screen reader skips it. */
export function drawIcon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  shape.setAttribute("d", path);
  svg.append(shape);
  return svg;
}

// --- values in arrays ---

/** Return the first index whose value is not below `value`. */
export function findIndex(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the index of the value nearest to `value`; -1 of an empty array. */
export function findNearest(values, value) {
  if (!values.length) return -1;
  const i = findIndex(values, value);
  if (i === 0) return 0;
  if (i === values.length) return i - 1;
  return value - values[i - 1] <= values[i] - value ? i - 1 : i;
}

/** Return the logarithms; NaN where there is none. */
function takeLogs(values) {
  const logs = new Float64Array(values.length);
  for (let i = 0; i < values.length; i++) logs[i] = values[i] > 0 ? Math.log10(values[i]) : NaN;
  return logs;
}

/** Return the mean of the exponential averages from either end, with a half-life in x: it does not depend on how
 * many points a curve was reduced to, and a fall is not drawn later than it was. On a logarithmic scale the
 * logarithms are averaged. */
export function smoothCurve(x, mean, tau, isLog) {
  const n = x.length;
  const result = new Float64Array(n);
  if (n === 0) return result;
  const values = isLog ? takeLogs(mean) : mean;
  const forth = new Float64Array(n);
  const start = x.find(Number.isFinite);
  const usual = n > 1 ? Math.max((x[n - 1] - start) / (n - 1), 1e-300) : 1;
  averageExponentially(x, values, tau, usual, forth, 1);
  averageExponentially(x, values, tau, usual, result, -1);
  for (let i = 0; i < n; i++) {
    const middle = (forth[i] + result[i]) / 2;
    result[i] = isLog ? 10 ** middle : middle;
  }
  return result;
}

function averageExponentially(x, values, tau, usual, result, direction) {
  const n = x.length;
  let total = 0;
  let weight = 0;
  let before = NaN;
  for (let k = 0; k < n; k++) {
    const i = direction > 0 ? k : n - 1 - k;
    const distance = Math.abs(x[i] - before);
    const gap = Number.isFinite(distance) ? distance : usual;
    before = x[i];
    const kept = Math.exp(-gap / tau);
    if (values[i] === values[i]) {
      total = kept * total + (1 - kept) * values[i];
      weight = kept * weight + (1 - kept);
    }
    result[i] = weight > 0 ? total / weight : NaN;
  }
}

/** Return the lowest and the highest of some lines between two x; null where there is nothing. */
export function findExtent(lines, from, to, isPositive) {
  let low = Infinity;
  let high = -Infinity;
  const take = (values, i0, i1) => {
    for (let i = i0; i < i1; i++) {
      const v = values[i];
      if (v !== v || (isPositive && v <= 0)) continue;
      if (v < low) low = v;
      if (v > high) high = v;
    }
  };
  for (const line of lines) {
    const i0 = Math.max(0, findIndex(line.x, from) - 1);
    const i1 = Math.min(line.x.length, findIndex(line.x, to) + 2);
    // Points just outside only count where no point is inside, so that a zoom between two points has a scale.
    const a = line.x[i0] < from && i1 - i0 > 2 ? i0 + 1 : i0;
    let b = i1;
    while (b - a > 1 && line.x[b - 1] > to) b--;
    if (line.pale) take(line.pale, a, b);
    take(line.y, a, b);
    if (line.low) take(line.low, a, b);
    if (line.high) take(line.high, a, b);
  }
  return low <= high ? [low, high] : null;
}

/** Return a range with room around it. */
export function padRange([low, high], isLog) {
  if (isLog) {
    const room = Math.max(0.02, (Math.log10(high) - Math.log10(low)) * 0.05);
    return [10 ** (Math.log10(low) - room), 10 ** (Math.log10(high) + room)];
  }
  const room = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

// --- the chart ---

/** A canvas with axes and lines. A line is `{id, name, colour, dash, x, y}` with sorted x, and where it has them
 * `pale` (the values behind a smoothed line), `low` and `high` (a band), `points` (whether to draw its points).
 *
 * `handlers`: `onHover({x, y, left, top} | null)`, `onZoom([from, to] | null, isFinal)`, `onZoomY([low, high] | null)`,
 * `onPick()`, `canWheel()`, `onKey(event)` returning true where it was handled. */
export class LineChart {
  constructor(host, handlers) {
    this.host = host;
    this.handlers = handlers;
    this.lines = [];
    this.options = { xKind: "number", yKind: "number", logX: false, logY: false };
    this.xRange = [0, 1];
    this.yRange = [0, 1];
    this.marked = null;
    this.cursorX = null;
    this.isMoving = false;
    this.plot = null;
    this.frame = 0;
    this.size = [0, 0];
    this.unwatchTheme = onTheme(() => this.schedule());
    this.abort = new AbortController();
  }

  /** Set kinds of axes; the chart is made anew where they differ. */
  setOptions(options) {
    const changed = Object.keys(options).some((key) => options[key] !== this.options[key]);
    this.options = { ...this.options, ...options };
    if (changed && this.plot) this.dropPlot();
    if (changed) for (const line of this.lines) this.prepareLine(line);
  }

  setLines(lines) {
    this.lines = lines;
    for (const line of lines) this.prepareLine(line);
    this.schedule();
  }

  prepareLine(line) {
    const { logX, logY } = this.options;
    const map = (values) => (values ? (logY ? takeLogs(values) : values) : null);
    line.tx = logX ? takeLogs(line.x) : line.x;
    line.ty = map(line.y);
    line.tPale = map(line.pale);
    line.tLow = map(line.low);
    line.tHigh = map(line.high);
  }

  setRanges(x, y) {
    this.xRange = x;
    this.yRange = y;
    this.schedule();
  }

  setMarked(id) {
    if (this.marked === id) return;
    this.marked = id;
    this.drawOverlay();
  }

  /** Show a line at this x, and points on the marked line; null takes it away. */
  setCursor(x) {
    if (this.cursorX === x) return;
    this.cursorX = x;
    this.drawOverlay();
  }

  setSize(width, height) {
    const size = [Math.max(80, Math.floor(width)), Math.max(80, Math.floor(height))];
    if (size[0] === this.size[0] && size[1] === this.size[1]) return;
    this.size = size;
    if (this.plot) {
      this.plot.setSize({ width: size[0], height: size[1] });
      this.schedule();
    }
  }

  /** Draw in the next frame. */
  schedule() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!this.size[0]) return;
    if (!this.plot) this.makePlot();
    const started = performance.now();
    const { plot, xRange, yRange } = this;
    plot.batch(() => {
      plot.setScale("x", { min: xRange[0], max: xRange[1] });
      plot.setScale("y", { min: yRange[0], max: yRange[1] });
    });
    this.drawMs = performance.now() - started;
    this.drawOverlay();
  }

  makePlot() {
    const { xKind, yKind, logX, logY } = this.options;
    const ink = () => getTheme().fg2;
    const grid = { stroke: () => getTheme().line, width: 1 };
    const xAxis = { scale: "x", stroke: ink, grid, font: FONT, size: 24, gap: 4, ticks: { show: false } };
    xAxis.space = xKind === "clock" ? 76 : 58;
    if (xKind === "duration") {
      xAxis.values = (u, splits) => splits.map((v) => (v === null ? "" : formatTickDuration(v)));
      if (!logX) xAxis.incrs = TIME_STEPS_S;
    } else if (xKind === "clock") {
      xAxis.values = (u, splits) => formatClockTicks(splits);
      xAxis.size = 38;
    } else {
      xAxis.values = (u, splits) => splits.map((v) => (v === null ? "" : formatTick(v)));
    }
    if (logX) Object.assign(xAxis, LOG_AXIS);
    const yAxis = { scale: "y", stroke: ink, grid, font: FONT, gap: 6, ticks: { show: false }, space: 34 };
    const formatY = yKind === "duration" ? formatTickDuration : formatTick;
    yAxis.values = (u, splits) => {
      if (yKind === "clock") return formatClockTicks(splits).map((text) => text.replace("\n", " "));
      return splits.map((v) => (v === null ? "" : formatY(v)));
    };
    yAxis.size = (u, values) => 12 + 6.3 * Math.max(3, ...(values || []).map((v) => (v ? String(v).length : 0)));
    if (logY) Object.assign(yAxis, LOG_AXIS);
    const scales = {
      x: { time: xKind === "clock" && !logX, distr: logX ? 3 : 1, auto: false, range: () => this.xRange },
      y: { time: yKind === "clock" && !logY, distr: logY ? 3 : 1, auto: false, range: () => this.yRange },
    };
    this.plot = new uPlot(
      {
        width: this.size[0],
        height: this.size[1],
        scales,
        axes: [xAxis, yAxis],
        series: [{}, { show: false }],
        legend: { show: false },
        cursor: { show: false },
        padding: [8, 18, 0, 0],
        hooks: { draw: [(u) => this.drawLines(u)] },
      },
      [[this.xRange[0], this.xRange[1]], [null, null]],
      this.host,
    );
    this.overlay = h("canvas", { class: "cv-overlay" });
    this.selection = h("div", { class: "cv-selection", hidden: true });
    this.plot.over.append(this.overlay, this.selection);
    this.listen(this.plot.over);
  }

  dropPlot() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.overlay = null;
  }

  destroy() {
    this.abort.abort();
    this.unwatchTheme();
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.dropPlot();
  }

  // --- lines ---

  /** The affine map from transformed values to pixels of the canvas. */
  getMap(plot, scale = 1, left = plot.bbox.left, top = plot.bbox.top) {
    const { logX, logY } = this.options;
    const [x0, x1] = logX ? this.xRange.map(Math.log10) : this.xRange;
    const [y0, y1] = logY ? this.yRange.map(Math.log10) : this.yRange;
    const { width, height } = plot.bbox;
    const sx = (width * scale) / (x1 - x0);
    const sy = (height * scale) / (y1 - y0);
    return { x0, x1, y0, y1, sx, sy, left: left * scale, bottom: (top + height) * scale };
  }

  drawLines(plot) {
    const { ctx, bbox } = plot;
    const ratio = uPlot.pxRatio;
    const map = this.getMap(plot);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineJoin = "bevel";
    const many = this.lines.length > 24;
    for (const line of this.lines) if (line.tLow) this.drawBand(ctx, line, map);
    ctx.lineWidth = ratio;
    ctx.globalAlpha = many ? 0.14 : 0.22;
    const column = (this.lines.length > 12 ? 4 : 2) * ratio;
    // In the frames of a zoom the lines of many runs count, not what is pale behind them.
    if (!(many && this.isMoving)) for (const line of this.lines) if (line.tPale) drawPale(ctx, line, map, ratio, column);
    ctx.globalAlpha = 1;
    ctx.lineWidth = (many ? 1 : 1.5) * ratio;
    for (const line of this.lines) {
      strokeLine(ctx, line, line.ty, map, ratio);
      if (line.points) drawPoints(ctx, line, map, ratio);
    }
    ctx.restore();
  }

  drawBand(ctx, line, map) {
    const { tx, tLow, tHigh } = line;
    ctx.globalAlpha = 0.16;
    ctx.fillStyle = line.colour;
    let start = 0;
    while (start < tx.length) {
      while (start < tx.length && !(tLow[start] === tLow[start] && tHigh[start] === tHigh[start])) start++;
      let end = start;
      while (end < tx.length && tLow[end] === tLow[end] && tHigh[end] === tHigh[end]) end++;
      if (end - start > 1) {
        ctx.beginPath();
        const toX = (i) => map.left + (tx[i] - map.x0) * map.sx;
        for (let i = start; i < end; i++) ctx.lineTo(toX(i), map.bottom - (tHigh[i] - map.y0) * map.sy);
        for (let i = end - 1; i >= start; i--) ctx.lineTo(toX(i), map.bottom - (tLow[i] - map.y0) * map.sy);
        ctx.fill();
      }
      start = end + 1;
    }
  }

  /** Draw what follows the pointer: its x, and the marked line above all others. */
  drawOverlay() {
    const { plot, overlay } = this;
    if (!plot || !overlay) return;
    const { bbox } = plot;
    const ratio = uPlot.pxRatio;
    const isEmpty = this.cursorX === null && this.marked === null;
    if (isEmpty && overlay.isClear) return;
    if (overlay.width !== bbox.width || overlay.height !== bbox.height) {
      overlay.width = bbox.width;
      overlay.height = bbox.height;
      overlay.style.width = `${bbox.width / ratio}px`;
      overlay.style.height = `${bbox.height / ratio}px`;
    }
    const ctx = overlay.getContext("2d");
    ctx.clearRect(0, 0, overlay.width, overlay.height);
    overlay.isClear = isEmpty;
    if (isEmpty) return;
    const colours = getTheme();
    const map = this.getMap(plot, 1, 0, 0);
    const x = this.cursorX === null ? null : this.options.logX ? Math.log10(this.cursorX) : this.cursorX;
    const left = x === null ? null : (x - map.x0) * map.sx;
    if (left !== null && left >= 0 && left <= overlay.width) {
      ctx.fillStyle = colours.fg2;
      ctx.globalAlpha = 0.55;
      ctx.fillRect(Math.round(left), 0, Math.max(1, Math.round(ratio)), overlay.height);
      ctx.globalAlpha = 1;
    }
    const line = this.lines.find((one) => one.id === this.marked);
    if (!line) return;
    ctx.lineJoin = "bevel";
    if (countVisible(line, map) < (map.x1 - map.x0) * map.sx * 0.6) {
      ctx.lineWidth = 5 * ratio;
      ctx.globalAlpha = 0.7;
      strokeLine(ctx, { ...line, colour: colours.bg, dash: null }, line.ty, map, ratio);
      ctx.globalAlpha = 1;
    }
    ctx.lineWidth = 2.4 * ratio;
    strokeLine(ctx, line, line.ty, map, ratio);
    if (x === null) return;
    const i = findNearest(line.tx, x);
    if (i < 0 || !(line.ty[i] === line.ty[i])) return;
    ctx.beginPath();
    const cy = map.bottom - (line.ty[i] - map.y0) * map.sy;
    ctx.arc((line.tx[i] - map.x0) * map.sx, cy, 3.5 * ratio, 0, 2 * Math.PI);
    ctx.fillStyle = line.colour;
    ctx.strokeStyle = colours.bg;
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash([]);
    ctx.fill();
    ctx.stroke();
  }

  // --- positions ---

  /** Return the values at a place, in pixels of the page from the corner of the plotting area. */
  toValues(left, top) {
    const { plot } = this;
    return { x: plot.posToVal(left, "x"), y: plot.posToVal(top, "y"), left, top };
  }

  get plotWidth() {
    return this.plot ? this.plot.bbox.width / uPlot.pxRatio : 0;
  }

  /** Return lines by their distance to a place: `[{line, index, distance}]`, the nearest first. */
  findNear(left, top) {
    const ratio = uPlot.pxRatio;
    const map = this.getMap(this.plot, 1 / ratio, 0, 0);
    const found = [];
    for (const line of this.lines) {
      const near = measureDistance(line, left, top, map);
      if (near) found.push({ line, ...near });
    }
    return found.sort((a, b) => a.distance - b.distance);
  }

  // --- pointer, wheel and keys ---

  listen(over) {
    const options = { signal: this.abort.signal };
    const pointers = new Map();
    let drag = null;
    let pinch = null;
    let lastTouch = 0;
    const locate = (event) => {
      const box = over.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const hover = (event) => {
      const [left, top] = locate(event);
      const at = { ...this.toValues(left, top), clientX: event.clientX, clientY: event.clientY };
      this.handlers.onHover(at);
    };
    over.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      const [left, top] = locate(event);
      pointers.set(event.pointerId, left);
      if (pointers.size === 2) {
        const [a, b] = [...pointers.values()];
        pinch = { gap: Math.max(20, Math.abs(a - b)), middle: (a + b) / 2, range: this.xRange };
        drag = null;
        return;
      }
      const isTouch = event.pointerType === "touch";
      if (isTouch && event.timeStamp - lastTouch < 300) this.handlers.onZoom(null, true);
      lastTouch = event.timeStamp;
      const how = isTouch ? "read" : event.shiftKey ? "pan" : "select";
      drag = { left, top, how, range: this.xRange, yRange: this.yRange, moved: false };
      if (!isTouch) over.setPointerCapture(event.pointerId);
      if (how === "pan") event.preventDefault();
    }, options);
    over.addEventListener("pointermove", (event) => {
      const [left, top] = locate(event);
      if (pinch && pointers.has(event.pointerId)) {
        pointers.set(event.pointerId, left);
        const [a, b] = [...pointers.values()];
        const factor = pinch.gap / Math.max(20, Math.abs(a - b));
        this.handlers.onZoom(this.scaleRange(pinch.range, pinch.middle, factor), false);
        return;
      }
      if (!drag || drag.how === "read") return hover(event);
      const dx = left - drag.left;
      const dy = top - drag.top;
      drag.moved = drag.moved || Math.hypot(dx, dy) > 4;
      if (!drag.moved) return undefined;
      if (drag.how === "pan") {
        over.classList.add("cv-panning");
        this.handlers.onHover(null);
        this.handlers.onZoom(this.shiftRange(drag.range, -dx / this.plotWidth), false);
      } else {
        this.showSelection(drag, left, top);
        hover(event);
      }
      return undefined;
    }, options);
    const end = (event) => {
      pointers.delete(event.pointerId);
      if (pinch && pointers.size < 2) {
        pinch = null;
        this.handlers.onZoom(this.xRange, true);
      }
      const was = drag;
      drag = null;
      over.classList.remove("cv-panning");
      if (!was) return;
      const chosen = this.takeSelection();
      if (event.type === "pointercancel") return;
      if (was.how === "pan" && was.moved) this.handlers.onZoom(this.xRange, true);
      else if (was.how === "select" && was.moved && chosen) {
        if (chosen.x) this.handlers.onZoom(chosen.x, true);
        if (chosen.y) this.handlers.onZoomY(chosen.y);
      } else if (!was.moved && was.how === "select") this.handlers.onPick();
    };
    over.addEventListener("pointerup", end, options);
    over.addEventListener("pointercancel", end, options);
    over.addEventListener("pointerleave", () => !drag && this.handlers.onHover(null), options);
    over.addEventListener("dblclick", () => {
      this.handlers.onZoom(null, true);
      this.handlers.onZoomY(null);
    }, options);
    over.addEventListener("wheel", (event) => this.onWheel(event, locate(event)), { ...options, passive: false });
  }

  onWheel(event, [left]) {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    const amount = isSideways ? event.deltaX || event.deltaY : event.deltaY;
    if (!amount || !(event.ctrlKey || event.metaKey || this.handlers.canWheel(isSideways))) return;
    event.preventDefault();
    const pixels = amount * (event.deltaMode === 1 ? 20 : event.deltaMode === 2 ? 400 : 1);
    const range = isSideways && !event.ctrlKey
      ? this.shiftRange(this.xRange, pixels / this.plotWidth)
      : this.scaleRange(this.xRange, left, Math.exp(Math.max(-200, Math.min(200, pixels)) * 0.0035));
    this.handlers.onZoom(range, false);
  }

  /** Return a range that is so many times as wide, around a place of the plotting area. */
  scaleRange(range, left, factor) {
    const [a, b] = this.options.logX ? range.map(Math.log10) : range;
    const at = a + (b - a) * (left / this.plotWidth);
    const scaled = [at - (at - a) * factor, at + (b - at) * factor];
    return this.options.logX ? scaled.map((v) => 10 ** v) : scaled;
  }

  /** Return a range that is moved by a part of its width. */
  shiftRange(range, part) {
    const [a, b] = this.options.logX ? range.map(Math.log10) : range;
    const moved = [a + (b - a) * part, b + (b - a) * part];
    return this.options.logX ? moved.map((v) => 10 ** v) : moved;
  }

  showSelection(drag, left, top) {
    const width = this.plotWidth;
    const height = this.plot.bbox.height / uPlot.pxRatio;
    const dx = Math.abs(left - drag.left);
    const dy = Math.abs(top - drag.top);
    const isX = dx > 12 || dx >= dy;
    const isY = dy > 40 || dy > dx;
    const clamp = (v, most) => Math.min(most, Math.max(0, v));
    const [x0, x1] = [drag.left, left].map((v) => clamp(v, width)).sort((a, b) => a - b);
    const [y0, y1] = [drag.top, top].map((v) => clamp(v, height)).sort((a, b) => a - b);
    const { selection } = this;
    selection.hidden = false;
    selection.style.left = `${isX ? x0 : 0}px`;
    selection.style.width = `${isX ? x1 - x0 : width}px`;
    selection.style.top = `${isY ? y0 : 0}px`;
    selection.style.height = `${isY ? y1 - y0 : height}px`;
    this.selected = {
      x: isX && x1 - x0 > 3 ? [this.toValues(x0, 0).x, this.toValues(x1, 0).x] : null,
      y: isY && y1 - y0 > 3 ? [this.toValues(0, y1).y, this.toValues(0, y0).y] : null,
    };
  }

  takeSelection() {
    const chosen = this.selected;
    this.selected = null;
    if (this.selection) this.selection.hidden = true;
    return chosen && (chosen.x || chosen.y) ? chosen : null;
  }
}

/** Return hours and minutes, with the day under the first of each day. */
function formatClockTicks(splits) {
  const pad = (number) => String(number).padStart(2, "0");
  const incr = splits.length > 1 ? splits[1] - splits[0] : 60;
  let before = "";
  return splits.map((v) => {
    if (v === null) return "";
    const t = new Date(v * 1000);
    const day = `${t.getFullYear()}-${pad(t.getMonth() + 1)}-${pad(t.getDate())}`;
    if (incr >= 86400) return day.slice(incr >= 86400 * 200 ? 0 : 5);
    const clock = `${pad(t.getHours())}:${pad(t.getMinutes())}${incr < 60 ? `:${pad(t.getSeconds())}` : ""}`;
    const isNew = day !== before;
    before = day;
    return isNew ? `${clock}\n${day}` : clock;
  });
}

/** Return places for marks on a logarithmic axis: powers of ten, with 2 and 5 where there is room, and round numbers
 * within a decade. */
function chooseLogTicks(plot, axisIndex, low, high) {
  const axis = plot.axes[axisIndex];
  const pixels = (axis.side % 2 ? plot.bbox.height : plot.bbox.width) / uPlot.pxRatio;
  const space = axis.side % 2 ? 30 : 56;
  const [a, b] = [Math.log10(low), Math.log10(high)];
  const perDecade = pixels / Math.max(b - a, 1e-9);
  const ticks = [];
  if (b - a < 0.8) {
    const step = chooseStep((high - low) / Math.max(2, pixels / space));
    for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  }
  const digits = perDecade > 4.5 * space ? [1, 2, 5] : perDecade > 2.2 * space ? [1, 3] : [1];
  const every = Math.max(1, Math.ceil(space / perDecade));
  for (let power = Math.floor(a); power <= b; power++) {
    if (power % every) continue;
    for (const digit of digits) {
      const tick = Number(`${digit}e${power}`);
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

const LOG_AXIS = { splits: chooseLogTicks, filter: (plot, splits) => splits };

function chooseStep(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  return size * [1, 2, 5, 10].find((digit) => digit * size >= least * 0.999);
}

/** Draw a line; where more points than pixels are visible, the first, lowest, highest and last of each pixel. */
function strokeLine(ctx, line, ty, map, ratio) {
  const { tx } = line;
  const n = tx.length;
  if (!n) return;
  const i0 = Math.max(0, findIndex(tx, map.x0) - 1);
  const i1 = Math.min(n, findIndex(tx, map.x1) + 1);
  ctx.strokeStyle = line.colour;
  ctx.setLineDash(line.dash ? line.dash.map((part) => part * ctx.lineWidth * 1.5) : []);
  ctx.beginPath();
  if (i1 - i0 > (map.x1 - map.x0) * map.sx * 1.5) tracePixels(ctx, tx, ty, i0, i1, map);
  else tracePoints(ctx, tx, ty, i0, i1, map);
  if (i1 - i0 === 1 && ty[i0] === ty[i0]) {
    const x = map.left + (tx[i0] - map.x0) * map.sx;
    const y = map.bottom - (ty[i0] - map.y0) * map.sy;
    ctx.moveTo(x + 2 * ratio, y);
    ctx.arc(x, y, 2 * ratio, 0, 2 * Math.PI);
  }
  ctx.stroke();
}

function countVisible({ tx }, map) {
  return findIndex(tx, map.x1) - findIndex(tx, map.x0);
}

/** Draw the values behind a smoothed line: where there are as many as pixels, the area between the lowest and the
 * highest of each few pixels, which is calmer than a line that fills it and drawn in a tenth of the time. */
function drawPale(ctx, line, map, ratio, width) {
  const { tx, tPale } = line;
  const i0 = Math.max(0, findIndex(tx, map.x0) - 1);
  const i1 = Math.min(tx.length, findIndex(tx, map.x1) + 1);
  if (i1 - i0 < (map.x1 - map.x0) * map.sx) return strokeLine(ctx, line, tPale, map, ratio);
  const ox = map.left - map.x0 * map.sx;
  const oy = map.bottom + map.y0 * map.sy;
  const columns = [];
  let column = null;
  for (let i = i0; i < i1; i++) {
    const v = tPale[i];
    if (v !== v) continue;
    const x = Math.floor((ox + tx[i] * map.sx) / width) * width;
    const y = oy - v * map.sy;
    if (!column || column.x !== x) columns.push((column = { x, low: y, high: y }));
    else if (y < column.low) column.low = y;
    else if (y > column.high) column.high = y;
  }
  ctx.fillStyle = line.colour;
  ctx.beginPath();
  for (const { x, low } of columns) ctx.lineTo(x, low - ratio / 2);
  for (let i = columns.length - 1; i >= 0; i--) ctx.lineTo(columns[i].x, columns[i].high + ratio / 2);
  return ctx.fill();
}

function tracePoints(ctx, tx, ty, i0, i1, map) {
  const { sx, sy } = map;
  const ox = map.left - map.x0 * sx;
  const oy = map.bottom + map.y0 * sy;
  let isDown = false;
  for (let i = i0; i < i1; i++) {
    const v = ty[i];
    if (v !== v || tx[i] !== tx[i]) {
      isDown = false;
      continue;
    }
    if (isDown) ctx.lineTo(ox + tx[i] * sx, oy - v * sy);
    else ctx.moveTo(ox + tx[i] * sx, oy - v * sy);
    isDown = true;
  }
}

function tracePixels(ctx, tx, ty, i0, i1, map) {
  const { sx, sy } = map;
  const ox = map.left - map.x0 * sx;
  const oy = map.bottom + map.y0 * sy;
  let pixel = NaN;
  let first = 0;
  let low = 0;
  let high = 0;
  let last = 0;
  let isDown = false;
  const flush = () => {
    const x = pixel + 0.5;
    if (isDown) ctx.lineTo(x, first);
    else ctx.moveTo(x, first);
    isDown = true;
    if (low !== high) {
      // From the nearer end to the other, so that the line does not double back more than the curve does.
      const isUp = Math.abs(first - low) <= Math.abs(first - high);
      const [a, b] = isUp ? [low, high] : [high, low];
      if (a !== first) ctx.lineTo(x, a);
      ctx.lineTo(x, b);
      if (b !== last) ctx.lineTo(x, last);
    }
  };
  for (let i = i0; i < i1; i++) {
    const v = ty[i];
    if (v !== v) continue;
    const y = oy - v * sy;
    const p = Math.floor(ox + tx[i] * sx);
    if (p === pixel) {
      if (y < low) low = y;
      else if (y > high) high = y;
      last = y;
    } else {
      if (pixel === pixel) flush();
      pixel = p;
      first = low = high = last = y;
    }
  }
  if (pixel === pixel) flush();
}

function drawPoints(ctx, line, map, ratio) {
  const { tx, ty } = line;
  const i0 = Math.max(0, findIndex(tx, map.x0));
  const i1 = Math.min(tx.length, findIndex(tx, map.x1) + 1);
  if ((map.x1 - map.x0) * map.sx < (i1 - i0) * 9 * ratio) return;
  ctx.fillStyle = line.colour;
  ctx.beginPath();
  for (let i = i0; i < i1; i++) {
    if (ty[i] !== ty[i]) continue;
    const x = map.left + (tx[i] - map.x0) * map.sx;
    const y = map.bottom - (ty[i] - map.y0) * map.sy;
    ctx.moveTo(x + 2 * ratio, y);
    ctx.arc(x, y, 2 * ratio, 0, 2 * Math.PI);
  }
  ctx.fill();
}

/** Return the distance of a line to a place in pixels and the index of its nearest point. */
function measureDistance(line, left, top, map) {
  const { tx, ty } = line;
  if (!tx.length) return null;
  const at = map.x0 + left / map.sx;
  const reach = 8 / map.sx;
  let i0 = findIndex(tx, at - reach);
  let i1 = findIndex(tx, at + reach);
  const index = findNearest(tx, at);
  i0 = Math.max(0, Math.min(i0, index) - 1);
  i1 = Math.min(tx.length - 1, Math.max(i1, index) + 1);
  const toX = (i) => (tx[i] - map.x0) * map.sx;
  const toY = (i) => map.bottom - (ty[i] - map.y0) * map.sy;
  let best = Infinity;
  for (let i = i0; i <= i1; i++) {
    if (ty[i] !== ty[i]) continue;
    const next = i < i1 && ty[i + 1] === ty[i + 1] ? i + 1 : i;
    const d = distanceToSegment(left, top, toX(i), toY(i), toX(next), toY(next));
    if (d < best) best = d;
  }
  return best < Infinity ? { distance: best, index } : null;
}

function distanceToSegment(px, py, ax, ay, bx, by) {
  const dx = bx - ax;
  const dy = by - ay;
  const length = dx * dx + dy * dy;
  const t = length ? Math.max(0, Math.min(1, ((px - ax) * dx + (py - ay) * dy) / length)) : 0;
  return Math.hypot(px - ax - t * dx, py - ay - t * dy);
}
