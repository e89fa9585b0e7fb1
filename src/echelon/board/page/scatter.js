// Two numbers of every run as points, and one number of every run as bars.

import { LineChart, formatTickDuration, getTheme, onTheme, padRange } from "./chart.js";
import { formatCount, formatNumber, formatTime, h } from "./dom.js";
import { makeFileName, quoteCell, saveFile } from "./export.js";
import { drawColourLegend, getAxisKind, guessResult, isMoreBetter, listFields, listNames, makeChooser, makeColouring, mountLimited } from "./fields.js";

/* global uPlot */

const NEAR_PX = 18;
const MAX_TABLE_ROWS = 200;
const MAX_BARS = 200;

/** Show the scatter plot. Returns `{update(kind), unmount()}`. */
export function mount(element, store) {
  const view = new ScatterView(element, store);
  return mountLimited(view);
}

/** Show bars of one number. Returns `{update(kind), unmount()}`. */
export function mountBars(element, store) {
  const view = new BarsView(element, store);
  return mountLimited(view);
}

/** Return a value of an axis as text. */
export function formatField(name, value) {
  const kind = getAxisKind(name);
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (kind === "clock") return formatTime(value);
  if (kind === "duration") return formatTickDuration(value);
  // A setting is written as it was typed, a result with as many digits as any other.
  return String(value).length <= 7 ? String(value) : formatNumber(value);
}

/** Points instead of lines, on the axes of the curves. */
class PointChart extends LineChart {
  constructor(host, handlers) {
    super(host, handlers);
    this.points = [];
    this.current = null;
  }

  setPoints(points) {
    this.points = points;
    this.schedule();
  }

  place(point, map) {
    const { logX, logY } = this.options;
    const x = logX ? Math.log10(point.x) : point.x;
    const y = logY ? Math.log10(point.y) : point.y;
    return [map.left + (x - map.x0) * map.sx, map.bottom - (y - map.y0) * map.sy];
  }

  drawLines(plot) {
    const { ctx, bbox } = plot;
    const ratio = uPlot.pxRatio;
    const map = this.getMap(plot);
    const size = (this.points.length > 3000 ? 2 : this.points.length > 300 ? 3.2 : 4.6) * ratio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = ratio;
    ctx.strokeStyle = getTheme().bg;
    for (const point of this.points) {
      const [x, y] = this.place(point, map);
      ctx.globalAlpha = point.isFaint ? 0.5 : 0.9;
      ctx.fillStyle = point.colour;
      ctx.beginPath();
      ctx.arc(x, y, size, 0, 2 * Math.PI);
      ctx.fill();
      if (size > 3 * ratio) ctx.stroke();
    }
    ctx.restore();
  }

  setCurrent(point) {
    if (this.current === point) return;
    this.current = point;
    this.drawOverlay();
  }

  drawOverlay() {
    const { plot, overlay } = this;
    if (!plot || !overlay) return;
    const { bbox } = plot;
    const ratio = uPlot.pxRatio;
    overlay.width = bbox.width;
    overlay.height = bbox.height;
    overlay.style.width = `${bbox.width / ratio}px`;
    overlay.style.height = `${bbox.height / ratio}px`;
    if (!this.current) return;
    const ctx = overlay.getContext("2d");
    const [x, y] = this.place(this.current, this.getMap(plot, 1, 0, 0));
    ctx.strokeStyle = getTheme().fg;
    ctx.lineWidth = 2 * ratio;
    ctx.beginPath();
    ctx.arc(x, y, 8 * ratio, 0, 2 * Math.PI);
    ctx.stroke();
  }

  /** Return the point nearest to a place, null where none is near. */
  findPoint(left, top) {
    const map = this.getMap(this.plot, 1 / uPlot.pxRatio, 0, 0);
    let best = null;
    let least = NEAR_PX;
    for (const point of this.points) {
      const [x, y] = this.place(point, map);
      const distance = Math.hypot(x - left, y - top);
      if (distance < least) [best, least] = [point, distance];
    }
    return best;
  }
}

class ScatterView {
  constructor(element, store) {
    this.element = element;
    this.store = store;
    this.zoomX = null;
    this.zoomY = null;
    this.build();
    this.chart = new PointChart(this.body, {
      onHover: (at) => this.hover(at),
      onZoom: (range) => this.zoom(range, this.zoomY),
      onZoomY: (range) => this.zoom(this.zoomX, range),
      onPick: () => this.open(),
      canWheel: () => document.activeElement === this.body,
    });
    this.resizer = new ResizeObserver(() => this.chart.setSize(this.body.clientWidth, this.body.clientHeight));
    this.resizer.observe(this.body);
    this.unwatch = onTheme(() => this.refresh());
    this.refresh();
  }

  unmount() {
    this.resizer.disconnect();
    this.unwatch();
    this.chart.destroy();
    this.tip.remove();
    this.element.replaceChildren();
  }

  build() {
    const set = (key) => (value) => {
      this.zoomX = this.zoomY = null;
      this.store.setView({ [key]: value || null }, { replace: true });
    };
    this.choosers = {
      x: makeChooser("Across", set("xkey")),
      y: makeChooser("Up", set("ykey")),
      colour: makeChooser("Colour", set("ckey"), { optional: true }),
    };
    const toggle = (key, text, label) => {
      const onclick = () => set(key)(this.store.view[key] ? null : "1");
      return h("button", { type: "button", class: "cv-button cv-toggle", "aria-label": label, onclick }, text);
    };
    this.logX = toggle("xlog", "log x", "Logarithmic horizontal axis");
    this.logY = toggle("ylog", "log y", "Logarithmic vertical axis");
    this.reset = h("button", { type: "button", class: "cv-button cv-reset", onclick: () => this.zoom(null, null) }, "Reset zoom");
    const csv = h("button", { type: "button", class: "cv-button", onclick: () => this.saveCsv() }, "CSV");
    const png = h("button", { type: "button", class: "cv-button", onclick: () => this.savePng() }, "PNG");
    this.legend = h("div", { class: "sc-legend" });
    this.note = h("p", { class: "cv-notes", role: "status" });
    this.table = h("table", { class: "cv-hidden" });
    this.body = h("div", { class: "cv-plot sc-plot", tabindex: "0", role: "application", "aria-roledescription": "chart", onkeydown: (event) => this.onKey(event) });
    this.spoken = h("p", { class: "cv-hidden", role: "status", "aria-live": "polite" });
    this.tip = h("div", { class: "cv-tip", hidden: true, "aria-hidden": "true" });
    document.body.append(this.tip);
    const { x, y, colour } = this.choosers;
    const bar = h("div", { class: "cv-bar", role: "toolbar", "aria-label": "Scatter" }, x.element, y.element, colour.element);
    bar.append(this.logX, this.logY, this.reset, h("span", { class: "cv-room" }), csv, png);
    const figure = h("figure", { class: "cv-panel" }, this.legend, this.body, this.table);
    this.element.replaceChildren(h("section", { class: "sc-view", "aria-label": "Scatter" }, bar, figure, this.note, this.spoken));
  }

  refresh() {
    const { store } = this;
    const rows = store.getVisibleRows();
    const fields = listFields(store, rows);
    const names = listNames(fields);
    const isNumber = (name) => rows.some((row) => typeof store.getValue(row, name) === "number");
    const { view } = store;
    this.x = view.xkey || fields.settings.find(isNumber) || "started";
    this.y = view.ykey || guessResult(store, rows);
    this.colourName = view.ckey || "";
    this.choosers.x.set(names, this.x);
    this.choosers.y.set(names, this.y);
    this.choosers.colour.set(names, this.colourName);
    const logX = Boolean(view.xlog) && getAxisKind(this.x) !== "clock";
    const logY = Boolean(view.ylog) && getAxisKind(this.y) !== "clock";
    this.logX.setAttribute("aria-pressed", String(logX));
    this.logY.setAttribute("aria-pressed", String(logY));
    this.chart.setOptions({ xKind: getAxisKind(this.x), yKind: getAxisKind(this.y), logX, logY });
    this.collectPoints(rows, logX, logY);
    this.draw();
    this.describe(rows);
  }

  collectPoints(rows, logX, logY) {
    const { store } = this;
    const shown = store.getShownIds();
    const colouring = this.colourName ? makeColouring(store, rows, this.colourName) : null;
    const grey = getTheme().fg2;
    const points = [];
    this.lost = { missing: 0, noLog: 0 };
    for (const row of rows) {
      const x = store.getValue(row, this.x);
      const y = store.getValue(row, this.y);
      if (!Number.isFinite(x) || !Number.isFinite(y)) this.lost.missing += 1;
      else if ((logX && x <= 0) || (logY && y <= 0)) this.lost.noLog += 1;
      else {
        const isShown = shown.has(row.id);
        const colour = colouring ? colouring.get(row) : isShown ? store.getColour(row.id) : null;
        points.push({ row, x, y, colour: colour || grey, isFaint: !colour });
      }
    }
    points.sort((a, b) => Number(b.isFaint) - Number(a.isFaint));
    this.points = points;
    this.chart.current = null;
    this.chart.setPoints(points);
    this.legend.replaceChildren(drawColourLegend(this.colourName, colouring, (v) => formatField(this.colourName, v)));
  }

  draw() {
    const { points, chart } = this;
    const { logX, logY } = chart.options;
    const spread = (values, isLog) => {
      if (!values.length) return isLog ? [0.1, 1] : [0, 1];
      return padRange([values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))], isLog);
    };
    const x = this.zoomX || spread(points.map((point) => point.x), logX);
    const y = this.zoomY || spread(points.map((point) => point.y), logY);
    chart.setSize(this.body.clientWidth, this.body.clientHeight);
    chart.setRanges(x, y);
    this.reset.disabled = !this.zoomX && !this.zoomY;
  }

  zoom(x, y) {
    const { logX } = this.chart.options;
    this.zoomX = x && x[1] > x[0] && (!logX || x[0] > 0) ? x : null;
    this.zoomY = y;
    this.draw();
  }

  describe(rows) {
    const { missing, noLog } = this.lost;
    const notes = [`${formatCount(this.points.length, "run")}: ${this.y} over ${this.x}`];
    if (missing) notes.push(`${formatCount(missing, "run")} ${missing === 1 ? "has" : "have"} not both numbers`);
    if (noLog) notes.push(`${noLog} at or below 0 ${noLog === 1 ? "has" : "have"} no logarithm`);
    this.note.textContent = rows.length ? notes.join(" · ") : "No run is listed.";
    this.body.setAttribute("aria-label", `${notes.join(", ")}. Arrow keys go from run to run, Enter opens one.`);
    const head = h("tr", {}, ["Run", this.x, this.y].map((text) => h("th", { scope: "col" }, text)));
    const lines = this.points.slice(0, MAX_TABLE_ROWS).map(({ row, x, y }) =>
      h("tr", {}, h("th", { scope: "row" }, row.name), h("td", {}, formatField(this.x, x)), h("td", {}, formatField(this.y, y))),
    );
    this.table.replaceChildren(h("caption", {}, `${this.y} over ${this.x}`), h("thead", {}, head), h("tbody", {}, lines));
  }

  hover(at) {
    const point = at && this.chart.plot ? this.chart.findPoint(at.left, at.top) : null;
    this.show(point, at);
  }

  show(point, at) {
    this.chart.setCurrent(point);
    this.body.classList.toggle("sc-on-point", Boolean(point));
    this.tip.hidden = !point;
    if (!point) return;
    const { row } = point;
    const lines = [[this.x, point.x], [this.y, point.y]];
    if (this.colourName) lines.push([this.colourName, this.store.getValue(row, this.colourName)]);
    const table = lines.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", { class: "cv-value" }, formatField(name, value))));
    this.tip.replaceChildren(h("div", { class: "cv-tip-head" }, h("b", {}, row.name), h("span", {}, row.state)), h("table", {}, h("tbody", {}, table)));
    const box = this.tip.getBoundingClientRect();
    const left = at.clientX + 16 + box.width > innerWidth ? at.clientX - box.width - 16 : at.clientX + 16;
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${Math.max(4, Math.min(innerHeight - box.height - 6, at.clientY + 14))}px`;
  }

  open() {
    const point = this.chart.current;
    if (point) this.store.setView({ page: "run", run: point.row.id });
  }

  onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter") this.open();
    else if (event.key === "Escape" || event.key === "0") this.zoom(null, null);
    else if (step && this.points.length) {
      const sorted = [...this.points].sort((a, b) => a.x - b.x || a.y - b.y);
      const now = sorted.indexOf(this.chart.current);
      const point = sorted[(now + step + sorted.length) % sorted.length];
      const box = this.chart.plot.over.getBoundingClientRect();
      const [left, top] = this.chart.place(point, this.chart.getMap(this.chart.plot, 1 / uPlot.pxRatio, 0, 0));
      this.show(point, { clientX: box.left + left, clientY: box.top + top });
      this.spoken.textContent = `${point.row.name}: ${this.x} ${formatField(this.x, point.x)}, ${this.y} ${formatField(this.y, point.y)}`;
    } else return;
    event.preventDefault();
  }

  saveCsv() {
    const lines = this.points.map(({ row, x, y }) => [quoteCell(row.name), x, y].join(","));
    const head = ["run", this.x, this.y].map(quoteCell).join(",");
    saveFile(makeFileName(`${this.y}-${this.x}`, "csv"), `${[head, ...lines].join("\n")}\n`, "text/csv");
  }

  savePng() {
    const source = this.chart.plot && this.chart.plot.ctx.canvas;
    if (!source) return;
    const canvas = document.createElement("canvas");
    canvas.width = source.width;
    canvas.height = source.height + 34;
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = getTheme().bg;
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.fillStyle = getTheme().fg;
    ctx.font = "600 14px system-ui, sans-serif";
    ctx.fillText(`${this.y} over ${this.x}`, 10, 22);
    ctx.drawImage(source, 0, 34);
    canvas.toBlob((blob) => blob && saveFile(makeFileName(`${this.y}-${this.x}`, "png"), blob));
  }
}

class BarsView {
  constructor(element, store) {
    this.element = element;
    this.store = store;
    this.chooser = makeChooser("Number", (value) => store.setView({ bar: value || null }, { replace: true }));
    this.base = h("select", { "aria-label": "Where bars begin", onchange: () => store.setView({ base: this.base.value === "0" ? null : "low" }, { replace: true }) });
    this.base.append(h("option", { value: "0" }, "Bars from 0"), h("option", { value: "low" }, "Bars from the lowest"));
    this.order = h("select", { "aria-label": "Order", onchange: () => store.setView({ order: this.order.value === "best" ? null : "table" }, { replace: true }) });
    this.order.append(h("option", { value: "best" }, "Best first"), h("option", { value: "table" }, "As in the table"));
    this.note = h("p", { class: "cv-notes", role: "status" });
    this.list = h("tbody");
    const csv = h("button", { type: "button", class: "cv-button", onclick: () => this.saveCsv() }, "CSV");
    const bar = h("div", { class: "cv-bar", role: "toolbar", "aria-label": "Bars" }, this.chooser.element, this.order, this.base, h("span", { class: "cv-room" }), csv);
    this.table = h("table", { class: "sc-bars" }, this.list);
    element.replaceChildren(h("section", { class: "sc-view", "aria-label": "Bars" }, bar, h("figure", { class: "cv-panel" }, this.table), this.note));
    this.unwatch = onTheme(() => this.refresh());
    this.refresh();
  }

  unmount() {
    this.unwatch();
    this.element.replaceChildren();
  }

  refresh() {
    const { store } = this;
    const rows = store.getVisibleRows();
    const name = store.view.bar || guessResult(store, rows);
    this.name = name;
    this.chooser.set(listNames(listFields(store, rows)), name);
    this.base.value = store.view.base === "low" ? "low" : "0";
    this.order.value = store.view.order === "table" ? "table" : "best";
    const items = this.collectItems(rows, name);
    const isMore = isMoreBetter(rows, name) ?? true;
    if (this.order.value === "best") items.sort((a, b) => (isMore ? b.value - a.value : a.value - b.value));
    this.items = items.slice(0, MAX_BARS);
    this.draw(items, isMore);
  }

  /** A bar for each run; of grouped runs one for each group, with the lowest and the highest of its runs. */
  collectItems(rows, name) {
    const { store } = this;
    const read = (row) => store.getValue(row, name);
    this.missing = 0;
    const groups = store.getGroups();
    if (!groups) {
      const shown = store.view.shown && store.view.shown !== "auto" ? store.getShownRows() : rows;
      const found = shown.filter((row) => Number.isFinite(read(row)));
      this.missing = shown.length - found.length;
      return found.map((row) => ({ row, label: row.name, value: read(row), colour: store.getColour(row.id) }));
    }
    const items = [];
    for (const group of groups) {
      const values = group.rows.map(read).filter(Number.isFinite);
      this.missing += group.rows.length - values.length;
      if (!values.length) continue;
      const value = values.reduce((a, b) => a + b, 0) / values.length;
      const label = `${group.label} (${values.length})`;
      items.push({ label, value, low: Math.min(...values), high: Math.max(...values), colour: store.getColour(group.rows[0].id) });
    }
    return items;
  }

  draw(all, isMore) {
    const { items, name, store } = this;
    const ends = items.flatMap((item) => [item.value, item.low ?? item.value, item.high ?? item.value]);
    const top = ends.reduce((a, b) => Math.max(a, b), -Infinity);
    const bottom = ends.reduce((a, b) => Math.min(a, b), Infinity);
    const isFromZero = this.base.value === "0";
    const low = isFromZero ? Math.min(0, bottom) : bottom - (top - bottom) * 0.05;
    const high = isFromZero ? Math.max(0, top) : top;
    const toShare = (v) => (high > low ? (100 * (v - low)) / (high - low) : 100);
    const origin = toShare(isFromZero ? 0 : low);
    const best = items.length ? items.reduce((a, b) => (b.value > a.value === isMore ? b : a)) : null;
    this.list.replaceChildren(...items.map((item) => this.drawBar(item, toShare, origin, item === best)));
    this.table.setAttribute("aria-label", `${name} of ${formatCount(items.length, store.getGroups() ? "group" : "run")}`);
    const notes = [];
    if (!items.length) notes.push(`No run that is listed has ${name}.`);
    else if (this.missing) notes.push(`${formatCount(this.missing, "run")} ${this.missing === 1 ? "has" : "have"} no ${name}`);
    if (all.length > items.length) notes.push(`${items.length} of ${all.length} are drawn`);
    this.note.textContent = notes.join(" · ");
    this.note.hidden = !notes.length;
  }

  drawBar(item, toShare, origin, isBest) {
    const from = Math.min(origin, toShare(item.value));
    const width = Math.max(0.3, Math.abs(toShare(item.value) - origin));
    const fill = h("i", { class: "sc-fill", style: { left: `${from}%`, width: `${width}%`, background: item.colour } });
    const track = h("div", { class: "sc-track", "aria-hidden": "true" }, fill);
    if (item.low !== undefined && item.high > item.low) {
      const style = { left: `${toShare(item.low)}%`, width: `${toShare(item.high) - toShare(item.low)}%` };
      track.append(h("i", { class: "sc-range", style }));
    }
    const open = () => this.store.setView({ page: "run", run: item.row.id });
    const label = item.row ? h("button", { type: "button", class: "cv-link", title: item.label, onclick: open }, item.label) : item.label;
    const range = item.low !== undefined && item.high > item.low ? `${formatNumber(item.low)} to ${formatNumber(item.high)}` : "";
    return h(
      "tr",
      { class: isBest ? "sc-best" : "" },
      h("th", { scope: "row" }, label),
      h("td", { class: "sc-cell" }, track),
      h("td", { class: "sc-number", title: range }, formatField(this.name, item.value)),
    );
  }

  saveCsv() {
    const lines = this.items.map(({ label, value }) => `${quoteCell(label)},${value}`);
    saveFile(makeFileName(this.name, "csv"), `${[`run,${quoteCell(this.name)}`, ...lines].join("\n")}\n`, "text/csv");
  }
}
