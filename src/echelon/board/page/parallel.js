// Parallel coordinates: an axis per setting and one for the result, a line per run. A range marked on an axis
// chooses the runs that are drawn.

import { getTheme, onTheme } from "./chart.js";
import { getJson } from "./api.js";
import { formatCount, formatG, h } from "./dom.js";
import { drawColourLegend, getAxisKind, guessResult, listFields, listNames, makeChooser, makeColouring, mountLimited } from "./fields.js";
import { formatField } from "./scatter.js";

const MAX_AXES = 12;
const DEFAULT_SETTINGS = 6;
const MAX_DRAWN = 4000;
const MAX_CHOSEN = 100;
const TOP = 64;
const BOTTOM = 34;
const SIDE = 60;
const NEAR_PX = 10;
const LEAST_GAP = 96;
const MAX_WORDS = 40;

/** Show parallel coordinates. Returns `{update(kind), unmount()}`. */
export function mount(element, store) {
  const view = new ParallelView(element, store);
  return mountLimited(view);
}

/** An axis: where a value stands between 0 (bottom) and 1 (top), and what is written beside it. */
export function makeAxis(name, values) {
  const present = values.filter((v) => v !== undefined && v !== null);
  const numbers = present.filter((v) => typeof v === "number" && Number.isFinite(v));
  const distinct = new Set(numbers);
  if (numbers.length && numbers.length === present.length) {
    const low = numbers.reduce((a, b) => Math.min(a, b));
    const high = numbers.reduce((a, b) => Math.max(a, b));
    const isLog = low > 0 && high / low >= 20;
    const place = (v) => {
      if (typeof v !== "number" || !Number.isFinite(v)) return null;
      if (high === low) return 0.5;
      return isLog ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
    };
    const invert = (share) => (isLog ? low * (high / low) ** share : low + (high - low) * share);
    const ticks = distinct.size <= 6 ? [...distinct].sort((a, b) => a - b) : [0, 0.25, 0.5, 0.75, 1].map(invert);
    return { name, kind: "number", place, invert, ticks, isLog };
  }
  const words = [...new Set(present.map(String))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const kept = words.slice(0, MAX_WORDS);
  const index = new Map(kept.map((word, i) => [word, kept.length > 1 ? i / (kept.length - 1) : 0.5]));
  return { name, kind: "word", place: (v) => (v === null || v === undefined ? null : (index.get(String(v)) ?? null)), ticks: kept };
}

/** Return the rank correlation of two lists of numbers; null where too few runs have both. */
export function correlateRanks(xs, ys) {
  const pairs = xs.map((x, i) => [x, ys[i]]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  if (pairs.length < 5) return null;
  const a = rank(pairs.map(([x]) => x));
  const b = rank(pairs.map(([, y]) => y));
  const middle = (pairs.length - 1) / 2;
  let ab = 0;
  let aa = 0;
  let bb = 0;
  for (let i = 0; i < a.length; i++) {
    ab += (a[i] - middle) * (b[i] - middle);
    aa += (a[i] - middle) ** 2;
    bb += (b[i] - middle) ** 2;
  }
  return aa && bb ? ab / Math.sqrt(aa * bb) : null;
}

function rank(values) {
  const order = values.map((v, i) => [v, i]).sort((a, b) => a[0] - b[0]);
  const ranks = new Array(values.length);
  for (let i = 0; i < order.length; ) {
    let j = i;
    while (j < order.length && order[j][0] === order[i][0]) j += 1;
    for (let k = i; k < j; k++) ranks[order[k][1]] = (i + j - 1) / 2;
    i = j;
  }
  return ranks;
}

class ParallelView {
  constructor(element, store) {
    this.element = element;
    this.store = store;
    this.axes = [];
    this.brushes = new Map();
    this.importance = null;
    this.askedSweep = "";
    this.hovered = null;
    this.frame = 0;
    this.build();
    this.resizer = new ResizeObserver(() => this.schedule());
    this.resizer.observe(this.body);
    this.unwatch = onTheme(() => this.refresh());
    this.refresh();
  }

  unmount() {
    this.resizer.disconnect();
    this.unwatch();
    cancelAnimationFrame(this.frame);
    this.tip.remove();
    this.element.replaceChildren();
  }

  build() {
    const set = (patch) => this.store.setView(patch, { replace: true });
    this.colour = makeChooser("Colour", (value) => set({ pcolour: value || null }));
    this.adder = makeChooser("Add an axis", (value) => value && set({ axes: [...new Set([...this.names, value])].slice(0, MAX_AXES).join(",") }));
    this.clear = h("button", { type: "button", class: "cv-button cv-reset", onclick: () => this.clearBrushes() }, "Clear ranges");
    this.keep = h("button", { type: "button", class: "cv-button cv-reset", onclick: () => this.filterByBrushes() }, "Filter the table by this");
    this.usual = h("button", { type: "button", class: "cv-button", onclick: () => set({ axes: null }) }, "Usual axes");
    this.legend = h("div", { class: "sc-legend" });
    this.canvas = h("canvas", { class: "pc-canvas", "aria-hidden": "true" });
    this.top = h("canvas", { class: "pc-canvas pc-top", "aria-hidden": "true" });
    this.heads = h("div", { class: "pc-heads" });
    this.body = h("div", { class: "pc-body" }, this.canvas, this.top, this.heads);
    this.note = h("p", { class: "cv-notes", role: "status" });
    this.ranges = h("div", { class: "pc-ranges" });
    this.table = h("table", { class: "cv-hidden" });
    this.tip = h("div", { class: "cv-tip", hidden: true, "aria-hidden": "true" });
    document.body.append(this.tip);
    const bar = h("div", { class: "cv-bar", role: "toolbar", "aria-label": "Parallel coordinates" }, this.colour.element, this.adder.element);
    bar.append(this.usual, this.clear, this.keep);
    const figure = h("figure", { class: "cv-panel" }, this.legend, h("div", { class: "pc-scroll" }, this.body), this.table);
    const typed = h("details", { class: "cv-more" }, h("summary", {}, "Ranges as numbers"), this.ranges);
    this.element.replaceChildren(h("section", { class: "pc-view", "aria-label": "Parallel coordinates" }, bar, figure, this.note, typed));
    this.body.addEventListener("pointerdown", (event) => this.onDown(event));
    this.body.addEventListener("pointermove", (event) => this.onMove(event));
    this.body.addEventListener("pointerup", (event) => this.onUp(event));
    this.body.addEventListener("pointercancel", (event) => this.onUp(event));
    this.body.addEventListener("pointerleave", () => this.setHovered(null));
    this.body.addEventListener("dblclick", (event) => {
      const axis = this.findAxis(event);
      if (axis) this.setBrush(axis.name, null);
    });
  }

  // --- what is drawn ---

  refresh() {
    const { store } = this;
    const { view } = store;
    this.rows = store.getVisibleRows();
    const fields = listFields(store, this.rows);
    const names = listNames(fields);
    this.result = view.pcolour || guessResult(store, this.rows);
    this.loadImportance();
    this.names = view.axes ? String(view.axes).split(",").slice(0, MAX_AXES) : this.chooseAxes(fields);
    this.colour.set(names, this.result);
    this.adder.set(names.filter((name) => !this.names.includes(name)), "");
    this.usual.hidden = !view.axes;
    this.readBrushes(view.brush || "");
    const drawn = this.rows.slice(0, MAX_DRAWN);
    this.axes = this.names.map((name) => makeAxis(name, drawn.map((row) => store.getValue(row, name))));
    this.colouring = makeColouring(store, drawn, this.result);
    this.lines = drawn.map((row) => ({
      row,
      values: this.names.map((name) => store.getValue(row, name)),
      colour: this.colouring.get(row),
    }));
    for (const line of this.lines) line.places = this.axes.map((axis, i) => axis.place(line.values[i]));
    this.legend.replaceChildren(drawColourLegend(this.result, this.colouring, (v) => formatField(this.result, v)));
    this.body.style.minWidth = `${2 * SIDE + (this.axes.length - 1) * LEAST_GAP}px`;
    this.measureInfluence();
    this.showHeads();
    this.showRanges();
    this.describe();
    this.schedule();
  }

  /** The settings that differ, the more important ones first, and the result last. */
  chooseAxes({ settings }) {
    const { importance } = this;
    const weigh = (name) => (importance ? (importance[name] ?? importance[name.replace(/^experiment\./, "")] ?? 0) : 0);
    const sorted = [...settings].sort((a, b) => weigh(b) - weigh(a));
    return [...sorted.slice(0, DEFAULT_SETTINGS), this.result];
  }

  /** Ask for the importance of parameters where all runs are of one sweep. */
  async loadImportance() {
    const sweeps = new Set(this.rows.map((row) => `${row.root}:${row.sweep || ""}`));
    const [only] = sweeps;
    const key = sweeps.size === 1 && !only.endsWith(":") ? only : "";
    if (key === this.askedSweep) return;
    this.askedSweep = key;
    this.importance = null;
    if (!key) return;
    try {
      const { sweeps: all } = await getJson("/api/sweeps");
      const sweep = all.find((one) => `${one.root}:${one.name}` === key);
      if (!sweep) return;
      const { importance } = await getJson(`/api/sweep/${encodeURIComponent(sweep.id)}`);
      if (this.askedSweep !== key || !importance || !Object.keys(importance).length) return;
      this.importance = importance;
      this.refresh();
    } catch (error) {
      console.warn(error); // the chart says the correlation instead
    }
  }

  measureInfluence() {
    const at = this.names.indexOf(this.result);
    const results = this.lines.map((line) => (at >= 0 ? line.values[at] : this.store.getValue(line.row, this.result)));
    this.influence = this.axes.map((axis, i) => {
      if (axis.name === this.result) return { text: "result", share: 0 };
      const known = this.importance && this.importance[axis.name];
      if (typeof known === "number") return { text: `importance ${Math.round(known * 100)} %`, share: known };
      if (axis.kind !== "number") return { text: "", share: 0 };
      const r = correlateRanks(this.lines.map((line) => line.values[i]), results);
      if (r === null) return { text: "", share: 0 };
      return { text: `correlation ${r.toFixed(2).replace("-", "−")}`, share: Math.abs(r) };
    });
  }

  showHeads() {
    this.heads.replaceChildren(
      ...this.axes.map((axis, i) => {
        const { text, share } = this.influence[i];
        const remove = h("button", { type: "button", class: "pc-remove", title: `Take ${axis.name} away`, "aria-label": `Take the axis ${axis.name} away`, onclick: () => this.removeAxis(axis.name) }, "×");
        const left = h("button", { type: "button", class: "pc-name", title: `${axis.name}: click moves it to the left`, onclick: () => this.moveAxis(i) }, axis.name);
        const bar = h("span", { class: "pc-weight", "aria-hidden": "true" }, h("i", { style: { width: `${Math.round(100 * Math.min(1, share))}%` } }));
        return h("div", { class: "pc-head", dataset: { index: String(i) } }, h("span", { class: "pc-line" }, left, remove), bar, h("small", {}, text));
      }),
    );
  }

  removeAxis(name) {
    const brushes = new Map(this.brushes);
    brushes.delete(name);
    const axes = this.names.filter((one) => one !== name).join(",");
    this.store.setView({ axes: axes || null, brush: formatBrushes(brushes) || null }, { replace: true });
  }

  moveAxis(index) {
    const names = [...this.names];
    const [name] = names.splice(index, 1);
    names.splice(Math.max(0, index - 1), 0, name);
    this.store.setView({ axes: names.join(",") }, { replace: true });
  }

  schedule() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  getLeft(i) {
    const width = this.body.clientWidth;
    const n = this.axes.length;
    return n > 1 ? SIDE + ((width - 2 * SIDE) * i) / (n - 1) : width / 2;
  }

  getTop(share) {
    return TOP + (this.body.clientHeight - TOP - BOTTOM) * (1 - share);
  }

  draw() {
    this.frame = 0;
    const ctx = this.prepare(this.canvas);
    if (!ctx) return;
    const theme = getTheme();
    this.matching = this.lines.filter((line) => this.isInside(line));
    const few = this.lines.length < 60;
    const others = this.brushes.size ? this.lines.filter((line) => !this.isInside(line)) : [];
    ctx.lineWidth = 1;
    ctx.strokeStyle = theme.line;
    ctx.globalAlpha = 0.7;
    this.strokeLines(ctx, others, () => theme.line);
    ctx.lineWidth = few ? 1.6 : 1.1;
    ctx.globalAlpha = few ? 0.85 : Math.max(0.16, Math.min(0.7, 120 / this.matching.length));
    this.strokeLines(ctx, this.matching, (line) => line.colour || theme.fg2);
    ctx.globalAlpha = 1;
    this.axes.forEach((axis, i) => this.drawAxis(ctx, axis, i, theme));
    for (const head of this.heads.children) {
      const i = Number(head.dataset.index);
      const gap = this.axes.length > 1 ? this.getLeft(1) - this.getLeft(0) : 200;
      head.style.left = `${this.getLeft(i)}px`;
      head.style.width = `${Math.max(64, Math.min(150, gap - 6))}px`;
    }
    this.drawTop();
    // Not hidden: the chart would move under the pointer that marks a range.
    this.clear.disabled = this.keep.disabled = !this.brushes.size;
  }

  prepare(canvas) {
    const width = this.body.clientWidth;
    const height = this.body.clientHeight;
    if (!width || !height) return null;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.lineJoin = "bevel";
    return ctx;
  }

  strokeLines(ctx, lines, getColour) {
    for (const line of lines) {
      ctx.strokeStyle = getColour(line);
      ctx.beginPath();
      let isDown = false;
      line.places.forEach((share, i) => {
        if (share === null) {
          isDown = false;
          return;
        }
        const [x, y] = [this.getLeft(i), this.getTop(share)];
        if (isDown) ctx.lineTo(x, y);
        else ctx.moveTo(x, y);
        isDown = true;
      });
      ctx.stroke();
    }
  }

  drawAxis(ctx, axis, i, theme) {
    const x = this.getLeft(i);
    ctx.fillStyle = theme.fg2;
    ctx.globalAlpha = 0.6;
    ctx.fillRect(Math.round(x), this.getTop(1), 1, this.getTop(0) - this.getTop(1));
    ctx.globalAlpha = 1;
    ctx.font = "11px system-ui, -apple-system, sans-serif";
    ctx.textBaseline = "middle";
    const isLast = i === this.axes.length - 1 && i > 0;
    ctx.textAlign = isLast ? "left" : "right";
    let before = Infinity;
    for (const tick of axis.ticks) {
      const y = this.getTop(axis.place(tick) ?? 0);
      if (Math.abs(before - y) < 13) continue;
      before = y;
      const text = axis.kind === "word" ? shorten(tick, 16) : formatTickOf(axis.name, tick);
      const at = isLast ? x + 6 : x - 6;
      ctx.lineWidth = 3;
      ctx.strokeStyle = theme.bg;
      ctx.strokeText(text, at, y);
      ctx.fillText(text, at, y);
    }
    const brush = this.brushes.get(axis.name);
    if (!brush) return;
    ctx.fillStyle = theme.accent;
    for (const [a, b] of this.getBrushSpans(axis, brush)) {
      ctx.globalAlpha = 0.28;
      ctx.fillRect(x - 7, this.getTop(b), 15, Math.max(3, this.getTop(a) - this.getTop(b)));
      ctx.globalAlpha = 1;
      ctx.fillRect(x - 7, this.getTop(b) - 1, 15, 2);
      ctx.fillRect(x - 7, this.getTop(a) - 1, 15, 2);
    }
  }

  drawTop() {
    const ctx = this.prepare(this.top);
    if (!ctx || !this.hovered) return;
    ctx.lineWidth = 5;
    this.strokeLines(ctx, [this.hovered], () => getTheme().bg);
    ctx.lineWidth = 2.6;
    this.strokeLines(ctx, [this.hovered], (line) => line.colour || getTheme().fg);
  }

  // --- ranges ---

  readBrushes(text) {
    this.brushes = new Map();
    for (const part of text.split(";").filter(Boolean)) {
      const at = part.lastIndexOf("~");
      const name = decodeURIComponent(part.slice(0, at));
      const rest = part.slice(at + 1);
      if (rest.startsWith("in ")) this.brushes.set(name, { words: new Set(rest.slice(3).split("|").map(decodeURIComponent)) });
      else {
        const [low, high] = rest.split("_").map(Number);
        if (low <= high) this.brushes.set(name, { low, high });
      }
    }
  }

  getBrushSpans(axis, brush) {
    if (!brush.words) {
      if (axis.kind !== "number") return [];
      const bound = (v) => Math.min(1, Math.max(0, axis.place(v) ?? 0));
      return [[bound(brush.low), bound(brush.high)]];
    }
    const room = Math.min(0.04, 0.4 / Math.max(1, axis.ticks.length));
    return axis.ticks.filter((word) => brush.words.has(word)).map((word) => [axis.place(word) - room, axis.place(word) + room]);
  }

  isInside(line) {
    for (const [name, brush] of this.brushes) {
      const i = this.names.indexOf(name);
      if (i < 0) continue;
      const value = line.values[i];
      if (brush.words ? !brush.words.has(String(value)) : !(value >= brush.low && value <= brush.high)) return false;
    }
    return true;
  }

  /** Set or take away the range of an axis, and draw the runs inside all ranges. */
  setBrush(name, brush) {
    const brushes = new Map(this.brushes);
    if (brush) brushes.set(name, brush);
    else brushes.delete(name);
    this.brushes = brushes;
    const ids = this.lines.filter((line) => this.isInside(line)).map((line) => line.row.id);
    const shown = brushes.size ? ids.slice(0, MAX_CHOSEN).join(",") || "none" : null;
    this.store.setView({ brush: formatBrushes(brushes) || null, shown }, { replace: true });
  }

  clearBrushes() {
    this.store.setView({ brush: null, shown: null }, { replace: true });
  }

  /** Make the ranges conditions of the table, where they can be said as such. */
  filterByBrushes() {
    const conditions = [...(this.store.view.filter || [])];
    for (const [name, brush] of this.brushes) {
      if (!brush.words) conditions.push(`${name}>=${formatBound(brush.low)}`, `${name}<=${formatBound(brush.high)}`);
      else if (brush.words.size === 1) conditions.push(`${name}=${[...brush.words][0]}`);
      else {
        const axis = this.axes.find((one) => one.name === name);
        if (axis) for (const word of axis.ticks) if (!brush.words.has(word)) conditions.push(`${name}!=${word}`);
      }
    }
    this.store.setView({ filter: [...new Set(conditions)], brush: null, shown: null });
  }

  showRanges() {
    if (this.ranges.contains(document.activeElement)) return;
    this.ranges.replaceChildren(
      ...this.axes.map((axis) => {
        const brush = this.brushes.get(axis.name) || {};
        if (axis.kind === "word") {
          const boxes = axis.ticks.map((word) => {
            const box = h("input", { type: "checkbox", checked: !brush.words || brush.words.has(word), onchange: () => this.setBrush(axis.name, readBoxes()) });
            box.dataset.word = word;
            return h("label", {}, box, word);
          });
          const readBoxes = () => {
            const chosen = boxes.map((label) => label.firstChild).filter((box) => box.checked);
            return chosen.length === boxes.length ? null : { words: new Set(chosen.map((box) => box.dataset.word)) };
          };
          return h("fieldset", {}, h("legend", {}, axis.name), boxes);
        }
        const field = (label, value) => h("input", { type: "text", inputmode: "decimal", size: "9", "aria-label": `${label} ${axis.name}`, placeholder: label, value: value === undefined ? "" : formatBound(value), onchange: () => apply() });
        const low = field("from", brush.low);
        const high = field("to", brush.high);
        const read = (input, other) => (input.value.trim() && Number.isFinite(Number(input.value)) ? Number(input.value) : other);
        const apply = () => {
          const range = { low: read(low, -Number.MAX_VALUE), high: read(high, Number.MAX_VALUE) };
          const isAll = range.low === -Number.MAX_VALUE && range.high === Number.MAX_VALUE;
          this.setBrush(axis.name, isAll ? null : range);
        };
        return h("fieldset", {}, h("legend", {}, axis.name), low, high);
      }),
    );
  }

  // --- the pointer ---

  locate(event) {
    const box = this.body.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  findAxis(event) {
    const [x, y] = this.locate(event);
    if (y < TOP - 8 || y > this.body.clientHeight - BOTTOM + 12) return null;
    let best = null;
    this.axes.forEach((axis, i) => {
      const distance = Math.abs(this.getLeft(i) - x);
      if (distance < 18 && (!best || distance < best.distance)) best = { axis, distance };
    });
    return best && best.axis;
  }

  toShare(event) {
    const [, y] = this.locate(event);
    return Math.min(1, Math.max(0, (this.getTop(0) - y) / (this.getTop(0) - this.getTop(1))));
  }

  onDown(event) {
    if (event.button || event.target.closest("button")) return;
    const axis = this.findAxis(event);
    if (!axis) {
      if (this.hovered) this.store.setView({ page: "run", run: this.hovered.row.id });
      return;
    }
    event.preventDefault();
    this.body.setPointerCapture(event.pointerId);
    this.drag = { axis, from: this.toShare(event), before: this.brushes, hasMoved: false };
  }

  onMove(event) {
    const { drag } = this;
    if (!drag) {
      const axis = this.findAxis(event);
      this.body.classList.toggle("pc-on-axis", Boolean(axis));
      this.setHovered(axis ? null : this.findLine(...this.locate(event)), event);
      return;
    }
    const to = this.toShare(event);
    drag.hasMoved = drag.hasMoved || Math.abs(to - drag.from) > 0.012;
    if (!drag.hasMoved) return;
    this.brushes = new Map(drag.before);
    this.brushes.set(drag.axis.name, this.makeBrush(drag.axis, drag.from, to));
    this.schedule();
  }

  onUp(event) {
    const { drag } = this;
    if (!drag) return;
    this.drag = null;
    this.brushes = drag.before;
    const { axis } = drag;
    if (event.type === "pointercancel") return this.schedule();
    if (drag.hasMoved) return this.setBrush(axis.name, this.makeBrush(axis, drag.from, this.toShare(event)));
    if (axis.kind === "word") return this.toggleWord(axis, drag.from);
    return this.setBrush(axis.name, null);
  }

  makeBrush(axis, a, b) {
    const [low, high] = a < b ? [a, b] : [b, a];
    if (axis.kind === "number") return { low: axis.invert(low), high: axis.invert(high) };
    return { words: new Set(axis.ticks.filter((word) => axis.place(word) >= low - 0.02 && axis.place(word) <= high + 0.02)) };
  }

  toggleWord(axis, share) {
    const word = axis.ticks.reduce((a, b) => (Math.abs(axis.place(b) - share) < Math.abs(axis.place(a) - share) ? b : a));
    const now = this.brushes.get(axis.name);
    const words = new Set(now ? now.words : []);
    if (words.has(word)) words.delete(word);
    else words.add(word);
    this.setBrush(axis.name, words.size && words.size < axis.ticks.length ? { words } : null);
  }

  findLine(x, y) {
    const i = this.axes.findIndex((_, k) => k + 1 < this.axes.length && x >= this.getLeft(k) && x <= this.getLeft(k + 1));
    if (i < 0 || !this.matching) return null;
    const part = (x - this.getLeft(i)) / (this.getLeft(i + 1) - this.getLeft(i));
    let best = null;
    let least = NEAR_PX;
    for (const line of this.matching) {
      const [a, b] = [line.places[i], line.places[i + 1]];
      if (a === null || b === null) continue;
      const [ya, yb] = [this.getTop(a), this.getTop(b)];
      const slope = (yb - ya) / (this.getLeft(i + 1) - this.getLeft(i));
      const distance = Math.abs(y - (ya + (yb - ya) * part)) / Math.hypot(1, slope);
      if (distance < least) [best, least] = [line, distance];
    }
    return best;
  }

  setHovered(line, event) {
    this.tip.hidden = !line;
    if (this.hovered !== line) {
      this.hovered = line;
      this.body.classList.toggle("pc-on-line", Boolean(line));
      this.drawTop();
      if (line) this.fillTip(line);
    }
    if (!line) return;
    const box = this.tip.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 16 : event.clientX + 16;
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${Math.max(4, Math.min(innerHeight - box.height - 6, event.clientY + 14))}px`;
  }

  fillTip(line) {
    const rows = this.names.map((name, i) => h("tr", {}, h("td", {}, name), h("td", { class: "cv-value" }, formatField(name, line.values[i]))));
    this.tip.replaceChildren(h("div", { class: "cv-tip-head" }, h("b", {}, line.row.name), h("span", {}, line.row.state)), h("table", {}, h("tbody", {}, rows)));
  }

  // --- words ---

  describe() {
    const inside = this.lines.filter((line) => this.isInside(line)).length;
    const notes = [];
    if (!this.rows.length) notes.push("No run is listed.");
    else if (this.axes.length < 2) notes.push("The runs differ in no setting. Add an axis to compare them by.");
    else if (this.brushes.size) {
      notes.push(`${inside} of ${formatCount(this.rows.length, "run")} inside the ranges`);
      if (inside > MAX_CHOSEN) notes.push(`the first ${MAX_CHOSEN} are drawn as curves`);
    } else notes.push(`${formatCount(this.lines.length, "run")}. Drag along an axis to choose runs; a click on a line opens its run`);
    if (this.rows.length > MAX_DRAWN) notes.push(`${MAX_DRAWN} of ${this.rows.length} are drawn`);
    this.note.textContent = notes.join(" · ");
    const head = h("tr", {}, ["Axis", "From", "To", "Influence"].map((text) => h("th", { scope: "col" }, text)));
    const lines = this.axes.map((axis, i) => {
      const write = (tick) => (tick === undefined ? "–" : axis.kind === "word" ? tick : formatTickOf(axis.name, tick));
      const cells = [write(axis.ticks[0]), write(axis.ticks[axis.ticks.length - 1]), this.influence[i].text].map((text) => h("td", {}, text));
      return h("tr", {}, h("th", { scope: "row" }, axis.name), cells);
    });
    this.table.replaceChildren(h("caption", {}, `Axes, coloured by ${this.result}`), h("thead", {}, head), h("tbody", {}, lines));
  }
}

function formatBrushes(brushes) {
  return [...brushes]
    .map(([name, brush]) => {
      const rest = brush.words ? `in ${[...brush.words].map(encodeURIComponent).join("|")}` : `${formatBound(brush.low)}_${formatBound(brush.high)}`;
      return `${encodeURIComponent(name)}~${rest}`;
    })
    .join(";");
}

function formatBound(value) {
  return Math.abs(value) === Number.MAX_VALUE ? (value > 0 ? "1e308" : "-1e308") : String(Number(value.toPrecision(5)));
}

/** Return a mark of an axis; settings as they were typed. */
function formatTickOf(name, value) {
  if (getAxisKind(name) !== "number") return formatField(name, value);
  return Number.isInteger(value) ? formatG(value) : formatG(Number(value.toPrecision(3)));
}

function shorten(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}
