// The curves of the drawn runs: a panel per metric, live, with one x axis and one cursor over all panels.

import {
  LineChart,
  drawIcon,
  findExtent,
  findNearest,
  formatTick,
  formatTickDuration,
  isDarkTheme,
  onTheme,
  padRange,
  smoothCurve,
} from "./chart.js";
import { CurveLoader } from "./curve_loader.js";
import { formatCount, formatNumber, formatTime, h } from "./dom.js";
import { downloadCsv, downloadPng, downloadSvg, makePlotAddress } from "./export.js";
import { SPEED_METRICS } from "./filters.js";

const AXES = [
  ["step", "Step", "number"],
  ["samples", "Samples", "number"],
  ["epoch", "Epochs", "number"],
  ["time", "Time at work", "duration"],
  ["clock", "Clock", "clock"],
];
const SIZES = { small: 220, medium: 300, large: 560 };
const DASHES = [null, [4, 2], [1.2, 1.6], [6, 2, 1.2, 2]];
const MAX_RUNS = 500;
const MAX_GROUPS = 14;
const MAX_GROUPED_RUNS = 200;
const NEAR_PX = 28;
const TIP_ROWS = 8;
const ZOOM_DEBOUNCE_MS = 60;
const ADDRESS_DEBOUNCE_MS = 350;

const SPREAD_ICON = "M9.5 2.500h4v4M13.500 2.500 9 7M6.500 13.500h-4v-4M2.500 13.500 7 9";
const SHRINK_ICON = "M13 7H9V3M9 7l4.500-4.500M3 9h4v4M7 9l-4.500 4.500";
const RESET_ICON = "M3 8a5 5 0 1 0 1.600-3.700M3 2.500v3h3";
const SAVE_ICON = "M8 2.500v7.500M4.800 7 8 10.200 11.200 7M3 13.500h10";

/** Show the curves. Returns `{update(kind, data), unmount()}`. */
export function mount(element, store) {
  const view = new CurvesView(element, store);
  return { update: (kind, data) => view.update(kind, data), unmount: () => view.unmount() };
}

/** Return metric names in the order of panels: the loss, what was evaluated, the rest. */
export function sortMetrics(names) {
  const rank = (name) => (name === "loss" ? 0 : name === "eval_loss" ? 1 : name.startsWith("eval_") ? 2 : 3);
  return [...names].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
}

class CurvesView {
  constructor(element, store) {
    this.element = element;
    this.store = store;
    this.panels = new Map();
    this.zoom = null;
    this.writtenZoom = "";
    this.allRange = [0, 1];
    this.hovered = null;
    this.hoverFrame = 0;
    this.loader = new CurveLoader((metrics) => this.onData(metrics));
    this.build();
    const root = findScroller(element);
    this.observer = new IntersectionObserver((entries) => this.onIntersect(entries), { root, rootMargin: "250px" });
    this.resizer = new ResizeObserver(() => this.onResize());
    this.resizer.observe(this.grid);
    this.unwatch = [onTheme(() => this.refresh())];
    if (store.on) this.unwatch.push(store.on("metrics", (ids) => this.onGrown(ids)));
    this.refresh();
  }

  unmount() {
    this.loader.close();
    this.observer.disconnect();
    this.resizer.disconnect();
    for (const end of this.unwatch) end();
    for (const panel of this.panels.values()) panel.destroy();
    cancelAnimationFrame(this.hoverFrame);
    clearTimeout(this.zoomTimer);
    clearTimeout(this.addressTimer);
    this.tip.remove();
    this.element.replaceChildren();
  }

  update(kind) {
    if (kind === "view" || kind === "rows" || kind === "theme") this.refresh();
  }

  // --- what the view says ---

  get settings() {
    const { view } = this.store;
    const axis = AXES.find(([name]) => name === view.x) || AXES[0];
    const smooth = Math.min(0.999, Math.max(0, Number(view.smooth) || 0));
    return {
      x: axis[0],
      xLabel: axis[1],
      xKind: axis[2],
      logX: isOn(view.logx) && axis[0] !== "clock",
      smooth,
      band: view.band || "minmax",
      search: view.mq || "",
      size: SIZES[view.size] ? view.size : "medium",
      big: view.big || "",
      only: asList(view.metrics),
    };
  }

  isLogY(metric) {
    const { logy } = this.store.view;
    return logy === "1" || asList(logy).includes(metric);
  }

  set(patch) {
    this.store.setView(patch, { replace: true });
  }

  toggleLogY(metric) {
    const now = this.store.view.logy;
    const all = now === "1" ? [...this.panels.keys()] : asList(now).filter((name) => name !== "1");
    const next = all.includes(metric) ? all.filter((name) => name !== metric) : [...all, metric];
    this.set({ logy: next.join(",") || null });
  }

  // --- the page ---

  build() {
    this.search = h("input", {
      class: "cv-search",
      type: "search",
      placeholder: "Search",
      "aria-label": "Search metrics",
      oninput: () => this.set({ mq: this.search.value || null }),
    });
    this.axis = h(
      "select",
      { "aria-label": "Horizontal axis", onchange: () => this.changeAxis() },
      AXES.map(([name, label]) => h("option", { value: name }, label)),
    );
    this.smooth = h("input", {
      type: "range",
      min: "0",
      max: "0.99",
      step: "0.01",
      "aria-label": "Smoothing",
      oninput: () => this.changeSmoothing(),
    });
    this.smoothText = h("output", { class: "cv-number" });
    this.logX = this.makeToggle("log x", "Logarithmic horizontal axis", () => this.set({ logx: this.logX.pressed ? null : "1" }));
    this.logY = this.makeToggle("log y", "Logarithmic vertical axes", () => this.set({ logy: this.logY.pressed ? null : "1" }));
    this.band = h(
      "select",
      { "aria-label": "Band of a group", onchange: () => this.set({ band: this.band.value === "minmax" ? null : this.band.value }) },
      h("option", { value: "minmax" }, "Band: min to max"),
      h("option", { value: "std" }, "Band: ± std"),
      h("option", { value: "none" }, "Mean only"),
      h("option", { value: "lines" }, "Every run"),
    );
    this.size = h(
      "select",
      { "aria-label": "Size of the panels", onchange: () => this.set({ size: this.size.value === "medium" ? null : this.size.value }) },
      h("option", { value: "small" }, "Small"),
      h("option", { value: "medium" }, "Medium"),
      h("option", { value: "large" }, "Large"),
    );
    this.reset = h("button", { type: "button", class: "cv-button cv-reset", title: "Reset zoom (0, or a double click)", "aria-label": "Reset zoom", disabled: true, onclick: () => this.setZoom(null, true) }, drawIcon(RESET_ICON));
    this.page = h("a", { class: "cv-button", download: "curves.html", title: "One page with these curves that needs nothing else" }, drawIcon(SAVE_ICON), "HTML");
    this.only = h("button", { type: "button", class: "cv-button", hidden: true, onclick: () => this.set({ metrics: null }) });
    this.legend = h("div", { class: "cv-legend", role: "list", "aria-label": "Drawn runs" });
    this.notes = h("p", { class: "cv-notes", role: "status", hidden: true });
    this.grid = h("div", { class: "cv-grid" });
    this.speedGrid = h("div", { class: "cv-grid" });
    this.speedTitle = h("span");
    this.speed = h("details", { class: "cv-more", ontoggle: () => this.onResize() }, h("summary", {}, this.speedTitle), this.speedGrid);
    this.spoken = h("p", { class: "cv-hidden", role: "status", "aria-live": "polite" });
    this.tip = h("div", { class: "cv-tip", hidden: true, "aria-hidden": "true" });
    document.body.append(this.tip);
    const smoothing = h("label", { class: "cv-smooth" }, h("span", {}, "Smooth"), this.smooth, this.smoothText);
    const bar = h("div", { class: "cv-bar", role: "toolbar", "aria-label": "Curves" }, this.search, this.axis, smoothing);
    bar.append(this.logX, this.logY, this.reset, this.band, this.size, this.only, h("span", { class: "cv-room" }), this.page);
    this.section = h("section", { class: "cv-view", "aria-label": "Curves" }, bar, this.legend, this.notes, this.grid, this.speed, this.spoken);
    this.element.replaceChildren(this.section);
  }

  makeToggle(text, label, onclick) {
    const button = h("button", { type: "button", class: "cv-button cv-toggle", "aria-label": label, "aria-pressed": "false", onclick }, text);
    Object.defineProperty(button, "pressed", {
      get: () => button.getAttribute("aria-pressed") === "true",
      set: (value) => button.setAttribute("aria-pressed", String(Boolean(value))),
    });
    return button;
  }

  changeAxis() {
    this.zoom = null;
    this.writtenZoom = "";
    this.set({ x: this.axis.value, zoom: null });
  }

  changeSmoothing() {
    // The slider is quicker than the address may be: browsers allow some hundred changes of it in half a minute.
    this.liveSmooth = Number(this.smooth.value);
    this.smoothText.textContent = this.liveSmooth.toFixed(2);
    this.redrawLines();
    clearTimeout(this.smoothTimer);
    this.smoothTimer = setTimeout(() => {
      const value = this.liveSmooth;
      this.liveSmooth = undefined;
      this.set({ smooth: value ? String(value) : null });
    }, 200);
  }

  /** Bring everything in line with rows and view. */
  refresh() {
    const settings = this.settings;
    this.takeZoomFromAddress();
    this.showControls(settings);
    this.collectRuns();
    this.showLegend();
    this.layOutPanels(settings);
    this.ask(0);
    // Rows change several times a second while runs train: lines are drawn anew only where that changes them.
    const key = this.describeDrawn(settings);
    if (key !== this.drawnKey) this.redrawLines();
    this.drawnKey = key;
  }

  describeDrawn(settings) {
    const series = this.series.map(({ id, name, colour, dash, rows }) => [id, name, colour, dash, rows.map((row) => row.id)]);
    const metrics = this.rows.map((row) => Object.keys(row.metrics || {}).length);
    return JSON.stringify([settings, this.store.view.logy, this.zoom, [...this.panels.keys()], series, metrics, isDarkTheme()]);
  }

  showControls(settings) {
    const { view } = this.store;
    if (document.activeElement !== this.search) this.search.value = settings.search;
    this.axis.value = settings.x;
    if (this.liveSmooth === undefined) {
      this.smooth.value = String(settings.smooth);
      this.smoothText.textContent = settings.smooth.toFixed(2);
    }
    this.logX.pressed = settings.logX;
    this.logX.disabled = settings.x === "clock";
    this.logY.pressed = view.logy === "1";
    this.band.hidden = !this.store.getGroups();
    this.band.value = settings.band;
    this.size.value = settings.size;
    this.reset.disabled = !this.zoom;
    this.only.hidden = !settings.only.length;
    this.only.textContent = `${formatCount(settings.only.length, "metric")} chosen · show all`;
    this.section.style.setProperty("--cv-size", `${SIZES[settings.size]}px`);
  }

  takeZoomFromAddress() {
    const said = this.store.view.zoom || "";
    if (said === this.writtenZoom) return;
    clearTimeout(this.addressTimer);
    this.writtenZoom = said;
    const [from, to] = said.split("_").map(Number);
    this.zoom = said && Number.isFinite(from) && to > from ? [from, to] : null;
  }

  /** What is drawn: `series` of one run each, or of the runs of one group. */
  collectRuns() {
    const { store } = this;
    const groups = store.getGroups();
    const chosen = store.getShownRows();
    const shown = chosen.slice(0, MAX_RUNS);
    const isLines = this.settings.band === "lines";
    const series = [];
    let leftOut = "";
    if (groups) {
      const isChosen = !["auto", "all"].includes(store.view.shown || "auto");
      const ids = isChosen ? new Set(chosen.map((row) => row.id)) : null;
      let runs = 0;
      const some = groups
        .map((group) => ({ ...group, rows: ids ? group.rows.filter((row) => ids.has(row.id)) : group.rows }))
        .filter((group) => group.rows.length);
      for (const group of some.slice(0, MAX_GROUPS)) {
        const rows = group.rows.slice(0, Math.max(0, MAX_GROUPED_RUNS - runs));
        runs += rows.length;
        if (!rows.length) continue;
        const colour = store.getColour(rows[0].id);
        const name = `${group.label} (${rows.length})`;
        if (isLines) for (const row of rows) series.push(this.makeSeries(row.id, `${group.label}: ${row.name}`, colour, [row]));
        else series.push({ ...this.makeSeries(`group ${group.key}`, name, colour, rows), isGroup: true });
      }
      const all = some.reduce((sum, group) => sum + group.rows.length, 0);
      if (some.length > MAX_GROUPS) leftOut = `${MAX_GROUPS} of ${some.length} groups are drawn; tick runs to choose`;
      else if (all > runs) leftOut = `${runs} of ${all} runs are in the groups drawn; filter to have fewer`;
    } else {
      if (chosen.length > shown.length) leftOut = `${shown.length} of ${formatCount(chosen.length, "run")} are drawn; filter to have fewer`;
      const names = countBy(shown, (row) => row.name);
      for (const row of shown) {
        const name = names.get(row.name) > 1 ? `${row.name} (${getRootName(store, row)})` : row.name;
        series.push(this.makeSeries(row.id, name, store.getColour(row.id), [row]));
      }
    }
    const used = new Map();
    for (const one of series) {
      const times = used.get(one.colour) || 0;
      used.set(one.colour, times + 1);
      one.dash = isLines && groups ? null : DASHES[times % DASHES.length];
    }
    this.series = series;
    this.leftOut = leftOut;
    this.rows = series.flatMap((one) => one.rows);
    this.loader.forget(new Set(this.rows.map((row) => row.id)));
    this.markGrownRows();
  }

  makeSeries(id, name, colour, rows) {
    return { id, name, colour, rows, isGroup: false };
  }

  /** Rows count what was logged: where they have more than when a curve was asked for, it has grown. */
  markGrownRows() {
    const grown = [];
    const counts = new Map();
    for (const row of this.rows) {
      const total = Object.values(row.metrics || {}).reduce((sum, one) => sum + (one[3] || 0), 0);
      counts.set(row.id, total);
      const before = this.counts && this.counts.get(row.id);
      if (before !== undefined && before !== total) grown.push(row.id);
    }
    this.counts = counts;
    if (grown.length) this.loader.markGrown(grown);
  }

  onGrown(ids) {
    this.loader.markGrown(Array.isArray(ids) ? ids : this.rows.map((row) => row.id));
  }

  showLegend() {
    const key = this.series.map((one) => `${one.id} ${one.name} ${one.colour} ${one.dash}`).join("\n");
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(
      ...this.series.map((one) =>
        h(
          "span",
          { role: "listitem" },
          h(
            "button",
            {
              type: "button",
              class: "cv-key",
              dataset: { id: one.id },
              title: one.isGroup ? one.rows.map((row) => row.name).join("\n") : `Open ${one.name}`,
              onclick: () => this.open(one),
              onpointerenter: () => this.mark(one.id),
              onpointerleave: () => this.mark(null),
              onfocus: () => this.mark(one.id),
              onblur: () => this.mark(null),
            },
            makeSwatch(one),
            one.name,
          ),
        ),
      ),
    );
  }

  open(series) {
    if (series.isGroup) this.store.setView({ shown: series.rows.map((row) => row.id).join(","), band: "lines" });
    else this.store.setView({ page: "run", run: series.rows[0].id });
  }

  layOutPanels(settings) {
    const known = new Set();
    for (const row of this.rows) for (const name of Object.keys(row.metrics || {})) known.add(name);
    const words = settings.search.toLowerCase().split(/\s+/).filter(Boolean);
    const only = new Set(settings.only);
    const matches = (name) => words.every((word) => name.toLowerCase().includes(word));
    const names = sortMetrics(known).filter((name) => matches(name) && (!only.size || only.has(name)));
    const isSpeed = (name) => SPEED_METRICS.has(name) && !only.has(name) && !words.length;
    const wanted = { main: names.filter((name) => !isSpeed(name)), speed: names.filter(isSpeed) };
    for (const [name, panel] of this.panels) {
      if (names.includes(name)) continue;
      panel.destroy();
      this.panels.delete(name);
    }
    this.place(this.grid, wanted.main, settings);
    this.place(this.speedGrid, wanted.speed, settings);
    this.speed.hidden = !wanted.speed.length;
    this.speedTitle.textContent = `Speed and memory (${wanted.speed.length})`;
    this.metricsFound = { known: known.size, shown: names.length };
    this.showNotes();
    this.page.href = makePlotAddress(this.rows, wanted.main, settings, this.store.view.logy === "1");
    this.page.hidden = !this.rows.length || !wanted.main.length;
  }

  place(grid, names, settings) {
    let before = null;
    for (const name of names) {
      let panel = this.panels.get(name);
      if (!panel) {
        panel = new Panel(this, name);
        this.panels.set(name, panel);
        this.observer.observe(panel.figure);
      }
      const at = before ? before.nextSibling : grid.firstChild;
      if (panel.figure !== at) grid.insertBefore(panel.figure, at);
      before = panel.figure;
      panel.setBig(settings.big === name);
    }
  }

  showNotes() {
    const notes = [];
    const { known, shown } = this.metricsFound;
    if (!this.rows.length) notes.push("No run is drawn. Tick runs in the table to see their curves.");
    else if (!known) notes.push("The drawn runs have logged no numbers yet.");
    else if (!shown) notes.push(`None of ${formatCount(known, "metric")} matches “${this.settings.search}”.`);
    if (this.leftOut) notes.push(this.leftOut);
    if (this.loader.failure) notes.push(`${this.loader.failure.message}. It is asked again by itself.`);
    const text = notes.join(" · ");
    this.notes.hidden = !text;
    if (this.notes.textContent !== text) this.notes.textContent = text;
  }

  // --- data ---

  onIntersect(entries) {
    for (const entry of entries) {
      const panel = this.panels.get(entry.target.dataset.metric);
      if (!panel) continue;
      panel.isVisible = entry.isIntersecting;
      if (panel.isVisible) panel.show();
      else panel.hide();
    }
    this.ask(0);
  }

  get visiblePanels() {
    return [...this.panels.values()].filter((panel) => panel.isVisible);
  }

  /** Ask for what visible panels lack. */
  ask(delay_ms) {
    const settings = this.settings;
    const panels = this.visiblePanels;
    if (!panels.length) return;
    const width = Math.max(...panels.map((panel) => panel.pixels));
    this.loader.setQuestion({ x: settings.x, width, logX: settings.logX, zoom: this.zoom, extent: this.extent });
    const wanted = new Map();
    for (const panel of panels) {
      const ids = this.rows.filter((row) => row.metrics && row.metrics[panel.metric]).map((row) => row.id);
      if (ids.length) wanted.set(panel.metric, ids);
    }
    this.loader.setWanted(wanted, delay_ms);
  }

  onData(metrics) {
    this.showNotes();
    this.updateAllRange();
    for (const panel of this.visiblePanels) {
      if (metrics.has(panel.metric)) panel.updateLines();
      else panel.draw();
    }
    if (this.hovered) this.scheduleHover();
  }

  redrawLines() {
    this.updateAllRange();
    for (const panel of this.visiblePanels) panel.updateLines();
  }

  get smoothing() {
    return this.liveSmooth === undefined ? this.settings.smooth : this.liveSmooth;
  }

  /** The range of x of everything that is known, which all panels share, so that they can be compared. */
  updateAllRange() {
    const { logX } = this.settings;
    let low = Infinity;
    let high = -Infinity;
    for (const row of this.rows) {
      for (const metric of this.panels.keys()) {
        const entry = this.loader.entries.get(`${metric}\n${row.id}`);
        const curve = entry && entry.overview;
        if (!curve || !curve.n) continue;
        let first = curve.x[0];
        if (logX && !(first > 0)) first = curve.x.find((v) => v > 0) ?? Infinity;
        low = Math.min(low, first);
        high = Math.max(high, curve.x[curve.n - 1]);
      }
    }
    const had = this.extent;
    this.extent = low <= high ? [low, high] : null;
    if (low < high) this.allRange = [low, high];
    else if (low === high) this.allRange = logX ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
    else this.allRange = logX ? [1, 10] : [0, 1];
    if (logX && this.extent && String(had) !== String(this.extent)) this.ask(0);
  }

  get xRange() {
    return this.zoom || this.allRange;
  }

  // --- zoom ---

  /** Show a range of x in all panels; null: everything. Of a moving hand `isFinal` is false. */
  setZoom(range, isFinal) {
    this.zoom = range && this.limitZoom(range);
    this.reset.disabled = !this.zoom;
    for (const panel of this.visiblePanels) {
      panel.chart.isMoving = true;
      panel.draw();
    }
    clearTimeout(this.zoomTimer);
    this.zoomTimer = setTimeout(() => this.settle(), isFinal ? 0 : ZOOM_DEBOUNCE_MS);
    clearTimeout(this.addressTimer);
    this.addressTimer = setTimeout(() => this.writeZoom(), isFinal ? 0 : ADDRESS_DEBOUNCE_MS);
  }

  /** The hand rests: smooth and draw everything for this part, and ask for finer points. */
  settle() {
    for (const panel of this.visiblePanels) {
      panel.chart.isMoving = false;
      panel.updateLines();
    }
    this.ask(0);
  }

  limitZoom([from, to]) {
    const { logX } = this.settings;
    const [low, high] = this.allRange;
    if (!(to > from) || (logX && !(from > 0))) return this.zoom;
    if (from <= low && to >= high) return null;
    const least = (high - low) * 1e-7;
    if (!logX && to - from < least) return [(from + to - least) / 2, (from + to + least) / 2];
    return [from, to];
  }

  writeZoom() {
    const text = this.zoom ? this.zoom.map((v) => Number(v.toPrecision(9))).join("_") : "";
    if (text === this.writtenZoom) return;
    this.writtenZoom = text;
    this.set({ zoom: text || null });
  }

  // --- the pointer ---

  hover(panel, at) {
    this.hovered = at && { panel, at };
    this.scheduleHover();
  }

  scheduleHover() {
    if (!this.hoverFrame) this.hoverFrame = requestAnimationFrame(() => this.showHover());
  }

  showHover() {
    this.hoverFrame = 0;
    const { hovered } = this;
    let near = [];
    let marked = null;
    if (hovered && hovered.panel.chart.plot) {
      near = hovered.panel.chart.findNear(hovered.at.left, hovered.at.top);
      if (near.length && near[0].distance <= NEAR_PX) marked = near[0].line.id;
    }
    this.nearest = marked;
    if (this.kept && !this.series.some((one) => one.id === this.kept)) this.kept = null;
    this.marked = marked = marked || this.pointed || this.kept || null;
    for (const panel of this.visiblePanels) {
      panel.chart.setCursor(hovered ? hovered.at.x : null);
      panel.chart.setMarked(marked);
      panel.showReading(hovered ? hovered.at.x : null, marked);
    }
    for (const key of this.legend.querySelectorAll(".cv-key")) key.classList.toggle("cv-near", key.dataset.id === marked);
    this.showTip(near);
  }

  /** Mark the line of a name in the legend; null: of none. */
  mark(pointed) {
    this.pointed = pointed;
    this.scheduleHover();
  }

  formatX(value) {
    const { x, xKind } = this.settings;
    if (xKind === "clock") return formatTime(value, true);
    if (xKind === "duration") return formatTickDuration(value);
    if (x === "epoch") return formatTick(Number(value.toPrecision(5)));
    return Math.round(value).toLocaleString("en-US");
  }

  showTip(near) {
    const { tip, hovered } = this;
    tip.hidden = !near.length || !hovered || hovered.at.clientX === undefined;
    if (tip.hidden) return;
    const { panel, at } = hovered;
    const rows = near.slice(0, TIP_ROWS).map(({ line, index }) =>
      h(
        "tr",
        { class: line.id === this.marked ? "cv-near" : "" },
        h("td", {}, makeSwatch(line)),
        h("td", { class: "cv-name" }, line.name),
        h("td", { class: "cv-value" }, panel.formatValue(line, index)),
        h("td", { class: "cv-step" }, this.formatX(line.x[index])),
      ),
    );
    const more = near.length - rows.length;
    tip.replaceChildren(
      h("div", { class: "cv-tip-head" }, h("b", {}, panel.metric), h("span", {}, `${this.settings.xLabel} ${this.formatX(at.x)}`)),
      h("table", {}, h("tbody", {}, rows)),
      more > 0 ? h("div", { class: "cv-tip-more" }, `and ${more} more`) : "",
    );
    const box = tip.getBoundingClientRect();
    const left = at.clientX + 18 + box.width > innerWidth ? at.clientX - box.width - 18 : at.clientX + 18;
    const top = Math.min(innerHeight - box.height - 8, at.clientY + 18);
    tip.style.left = `${Math.max(6, left)}px`;
    tip.style.top = `${Math.max(6, top)}px`;
  }

  /** A click on a line keeps it marked in all panels, until a click elsewhere. */
  pick() {
    this.kept = this.nearest === this.kept ? null : this.nearest;
    this.scheduleHover();
  }

  // --- size ---

  onResize() {
    for (const panel of this.visiblePanels) panel.fit();
    clearTimeout(this.resizeTimer);
    this.resizeTimer = setTimeout(() => this.ask(0), 150);
  }
}

/** One metric. Its chart exists only while it is on the screen. */
class Panel {
  constructor(owner, metric) {
    this.owner = owner;
    this.metric = metric;
    this.isVisible = false;
    this.yZoom = null;
    this.showsAll = false;
    this.lines = [];
    this.smoothed = new Map();
    this.build();
    this.chart = new LineChart(this.body, {
      onHover: (at) => owner.hover(this, at),
      onZoom: (range, isFinal) => owner.setZoom(range, isFinal),
      onZoomY: (range) => this.zoomY(range),
      onPick: () => owner.pick(),
      canWheel: (isSideways) => this.isBig || document.activeElement === this.body || (isSideways && Boolean(owner.zoom)),
    });
  }

  build() {
    const { metric } = this;
    this.reading = h("span", { class: "cv-reading" });
    this.logButton = this.makeButton("log", `Logarithmic axis of ${metric}`, () => this.owner.toggleLogY(metric));
    this.bigButton = this.makeButton(drawIcon(SPREAD_ICON), `Enlarge ${metric}`, () => this.toggleBig());
    const save = (text, fn) => h("button", { type: "button", role: "menuitem", onclick: () => this.save(fn) }, text);
    this.saveMenu = h(
      "details",
      { class: "cv-menu" },
      h("summary", { class: "cv-tool", title: "Save", "aria-label": `Save ${metric} as a file` }, drawIcon(SAVE_ICON)),
      h("div", { role: "menu" }, save("PNG image", downloadPng), save("SVG drawing", downloadSvg), save("CSV table", downloadCsv)),
    );
    this.saveMenu.addEventListener("focusout", (event) => {
      if (!this.saveMenu.contains(event.relatedTarget)) this.saveMenu.open = false;
    });
    this.saveMenu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.saveMenu.open = false;
    });
    this.note = h("p", { class: "cv-note" });
    this.table = h("table", { class: "cv-hidden" });
    this.body = h("div", {
      class: "cv-plot",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "chart",
      "aria-label": metric,
      onkeydown: (event) => this.onKey(event),
      onblur: () => this.owner.hover(this, null),
    });
    this.body.append(h("p", { class: "cv-empty" }));
    this.figure = h(
      "figure",
      { class: "cv-panel", dataset: { metric } },
      h("figcaption", {}, h("b", { title: metric }, metric), this.reading, h("span", { class: "cv-tools" }, this.logButton, this.saveMenu, this.bigButton)),
      this.body,
      this.note,
      this.table,
    );
  }

  makeButton(content, label, onclick) {
    return h("button", { type: "button", class: "cv-tool", title: label, "aria-label": label, onclick }, content);
  }

  destroy() {
    this.owner.observer.unobserve(this.figure);
    this.chart.destroy();
    this.figure.remove();
    if (this.owner.hovered && this.owner.hovered.panel === this) this.owner.hover(this, null);
  }

  setBig(isBig) {
    if (this.isBig === isBig) return;
    this.isBig = isBig;
    this.figure.classList.toggle("cv-big", isBig);
    this.bigButton.replaceChildren(drawIcon(isBig ? SHRINK_ICON : SPREAD_ICON));
    const label = isBig ? `Make ${this.metric} small again` : `Enlarge ${this.metric}`;
    this.bigButton.setAttribute("aria-label", label);
    this.bigButton.title = label;
    if (this.isVisible) this.fit();
    if (isBig) requestAnimationFrame(() => this.figure.scrollIntoView({ block: "nearest" }));
  }

  toggleBig() {
    this.owner.set({ big: this.isBig ? null : this.metric });
  }

  save(fn) {
    this.saveMenu.open = false;
    fn(this);
  }

  // --- on and off the screen ---

  show() {
    this.fit();
    this.updateLines();
  }

  hide() {
    this.chart.dropPlot();
  }

  fit() {
    this.chart.setSize(this.body.clientWidth, this.body.clientHeight);
  }

  /** The pixels of the plotting area, which is how many points can be told apart. */
  get pixels() {
    const width = this.chart.plotWidth || this.body.clientWidth - 50;
    return Math.max(50, Math.round((width * (devicePixelRatio || 1)) / 10) * 10);
  }

  // --- lines ---

  updateLines() {
    const { owner, metric } = this;
    const { xKind, logX, band } = owner.settings;
    const logY = owner.isLogY(metric);
    this.logButton.setAttribute("aria-pressed", String(logY));
    this.chart.setOptions({ xKind, logX, logY });
    const smooth = owner.smoothing;
    const curves = this.collectCurves();
    this.lines = [];
    this.bandRange = String(owner.xRange);
    for (const series of owner.series) {
      const mine = series.rows.map((row) => curves.get(row.id)).filter(Boolean);
      if (!mine.length) continue;
      const base = { id: series.id, name: series.name, colour: series.colour, dash: series.dash };
      if (series.isGroup) {
        const line = makeBand(mine, owner.xRange, this.pixels, { smooth, logX, logY, zoom: owner.zoom, band });
        if (line) this.lines.push({ ...base, ...line, isExact: false });
      } else {
        this.lines.push({ ...base, ...this.drawRun(mine[0], { smooth, logX, logY, zoom: owner.zoom }) });
      }
    }
    this.chart.setLines(this.lines);
    this.describe(curves, logY);
    this.draw();
  }

  collectCurves() {
    const { owner, metric } = this;
    const curves = new Map();
    for (const row of owner.rows) {
      const entry = owner.loader.entries.get(`${metric}\n${row.id}`);
      const points = entry && owner.loader.getPoints(entry);
      if (points && points.n) curves.set(row.id, points);
    }
    return curves;
  }

  drawRun(points, options) {
    const common = { x: points.x, isExact: points.exact };
    if (!options.smooth || points.n < 3) return { ...common, y: points.y, pale: null, points: points.n <= 400 };
    return { ...common, y: smoothPoints(points, options), pale: points.y, points: false };
  }

  /** Draw with the ranges of now. */
  draw() {
    const { owner, chart, metric } = this;
    const logY = owner.isLogY(metric);
    const range = owner.xRange;
    if (this.hasBand && !chart.isMoving && String(range) !== this.bandRange) return this.updateLines();
    const extent = findExtent(this.lines, range[0], range[1], logY);
    this.limit = null;
    let yRange = this.yZoom;
    if (!yRange && extent) yRange = padRange(this.limitExtent(extent, range, logY), logY);
    chart.setRanges(range, yRange || (logY ? [0.1, 1] : [0, 1]));
    return this.showNote();
  }

  /** Bands are computed for a range of x, other lines are not. */
  get hasBand() {
    return this.owner.series.some((series) => series.isGroup);
  }

  /** A line that has left all others behind would press them flat: the scale ends before it, and the note says
   * so. */
  limitExtent(extent, [from, to], logY) {
    if (this.showsAll || logY || this.lines.length < 2) return extent;
    const peaks = this.lines.map((line) => findExtent([line], from, to, logY)).filter(Boolean).map(([, high]) => high);
    const sorted = [...peaks].sort((a, b) => a - b);
    const near = 100 * sorted[(sorted.length - 1) >> 1];
    if (!(near > 0 && near < extent[1])) return extent;
    this.limit = { count: peaks.filter((peak) => peak > near).length };
    return [extent[0], 1.2 * Math.max(...peaks.filter((peak) => peak <= near))];
  }

  zoomY(range) {
    this.yZoom = range;
    this.draw();
  }

  formatValue(line, index) {
    const value = line.y[index];
    if (line.low && Number.isFinite(line.low[index])) {
      return `${formatNumber(value)}  (${formatNumber(line.low[index])} to ${formatNumber(line.high[index])})`;
    }
    return formatNumber(value);
  }

  showReading(x, id) {
    const line = id === null ? null : this.lines.find((one) => one.id === id);
    if (!line) {
      if (this.reading.textContent) this.reading.textContent = "";
      return;
    }
    const index = x === null ? line.x.length - 1 : findNearest(line.x, x);
    const text = index < 0 ? "" : formatNumber(line.y[index]);
    if (this.reading.textContent !== text) this.reading.textContent = text;
    this.reading.style.color = line.colour;
  }

  // --- words ---

  /** Note what is missing, and write the table that stands for the chart. */
  describe(curves, logY) {
    const { owner, metric } = this;
    const { loader } = owner;
    const notes = [];
    let isWaiting = false;
    let missing = 0;
    let otherAxis = 0;
    let notFinite = 0;
    let noLog = 0;
    const building = [];
    const faults = [];
    for (const row of owner.rows) {
      const entry = loader.entries.get(`${metric}\n${row.id}`);
      const fault = loader.faults.get(`${metric}\n${row.id}`);
      const overview = entry && entry.overview;
      if (fault) faults.push(`${row.name}: ${fault.error}`);
      else if (overview && overview.hasOtherAxis) otherAxis += 1;
      else if (loader.building.has(row.id)) building.push({ name: row.name, share: loader.building.get(row.id) });
      else if (!(row.metrics && row.metrics[metric]) || (overview && !overview.count && !overview.not_finite)) missing += 1;
      else if (!overview) isWaiting = true;
      if (overview) notFinite += overview.not_finite || 0;
      if (logY && overview) for (let i = 0; i < overview.n; i++) noLog += overview.y[i] <= 0 ? 1 : 0;
    }
    if (building.length) {
      const share = building.reduce((sum, one) => sum + (one.share || 0), 0) / building.length;
      const what = building.length === 1 ? building[0].name : formatCount(building.length, "long run");
      notes.push(`reading ${what}: ${Math.round(share * 100)} %`);
    }
    const count = owner.rows.length;
    if (missing) notes.push(`${missing} of ${formatCount(count, "run")} ${missing === 1 ? "has" : "have"} no ${metric}`);
    const { xLabel } = owner.settings;
    if (otherAxis) notes.push(`${formatCount(otherAxis, "run")} ${otherAxis === 1 ? "does" : "do"} not say ${xLabel.toLowerCase()}`);
    if (notFinite) notes.push(`${formatCount(notFinite, "value")} ${notFinite === 1 ? "is" : "are"} not finite`);
    if (noLog) notes.push(`${formatCount(noLog, "point")} at or below 0 ${noLog === 1 ? "has" : "have"} no logarithm`);
    if (faults.length) notes.push(faults.length === 1 ? faults[0] : `${faults.length} runs cannot be read: ${faults[0]}`);
    this.words = notes;
    const empty = this.body.querySelector(".cv-empty");
    const text = curves.size ? "" : building.length ? "The curve is being read" : isWaiting ? "" : "Nothing to draw";
    if (empty.textContent !== text) empty.textContent = text;
    this.figure.classList.toggle("cv-waiting", isWaiting && !curves.size);
    this.showNote();
    this.writeTable();
  }

  showNote() {
    const words = this.words || [];
    const { limit } = this;
    const key = `${words.join("|")}|${limit ? limit.count : ""}|${this.yZoom}|${this.showsAll}`;
    if (key === this.noteKey) return;
    this.noteKey = key;
    const parts = words.length ? [words.join(" · ")] : [];
    const link = (text, onclick) => h("button", { type: "button", class: "cv-link", onclick }, text);
    if (limit) {
      parts.push(`${formatCount(limit.count, "line")} ${limit.count === 1 ? "leaves" : "leave"} the scale`, link("show all", () => this.setShowsAll(true)));
    } else if (this.showsAll) {
      parts.push(link("keep to the scale of most runs", () => this.setShowsAll(false)));
    }
    if (this.yZoom) parts.push(link("reset height", () => this.zoomY(null)));
    this.note.replaceChildren(...parts.flatMap((part, i) => (i ? [" · ", part] : [part])));
  }

  setShowsAll(showsAll) {
    this.showsAll = showsAll;
    this.draw();
  }

  writeTable() {
    if (this.tableTimer) return;
    this.tableTimer = setTimeout(() => {
      this.tableTimer = 0;
      const { xLabel } = this.owner.settings;
      const rows = this.lines.map((line) => {
        let last = line.x.length - 1;
        while (last > 0 && Number.isNaN(line.y[last])) last -= 1;
        const cell = (text) => h("td", {}, text);
        return h("tr", {}, h("th", { scope: "row" }, line.name), cell(formatNumber(line.y[last])), cell(this.owner.formatX(line.x[last])));
      });
      const heads = ["Run", "Last value", xLabel].map((text) => h("th", { scope: "col" }, text));
      this.table.replaceChildren(h("caption", {}, `Last values of ${this.metric}`), h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
      const keys = "Arrow keys move the cursor, plus and minus zoom, shift and arrows pan, 0 resets.";
      this.body.setAttribute("aria-label", `${this.metric} over ${xLabel.toLowerCase()}, ${formatCount(this.lines.length, "line")}. ${keys}`);
    }, 700);
  }

  // --- keys ---

  onKey(event) {
    if (event.target !== this.body || event.altKey || event.ctrlKey || event.metaKey || !this.chart.plot) return;
    const handled = this.handleKey(event.key, event.shiftKey);
    if (handled) event.preventDefault();
  }

  handleKey(key, isShift) {
    const { owner, chart } = this;
    const width = chart.plotWidth;
    const left = this.keyLeft === undefined ? width / 2 : Math.min(width, Math.max(0, this.keyLeft));
    const sideways = key === "ArrowLeft" ? -1 : key === "ArrowRight" ? 1 : 0;
    if (sideways && isShift) owner.setZoom(chart.shiftRange(owner.xRange, sideways * 0.15), false);
    else if (sideways) this.moveCursor(left + sideways * Math.max(1, width / 100));
    else if (key === "ArrowUp" || key === "ArrowDown") this.moveMark(key === "ArrowUp" ? -1 : 1);
    else if (key === "+" || key === "=") owner.setZoom(chart.scaleRange(owner.xRange, left, 0.75), false);
    else if (key === "-" || key === "_") owner.setZoom(chart.scaleRange(owner.xRange, left, 1 / 0.75), false);
    else if (key === "Home") this.moveCursor(0);
    else if (key === "End") this.moveCursor(width);
    else if (key === "0" || (key === "Escape" && (owner.zoom || this.yZoom))) {
      owner.setZoom(null, true);
      this.zoomY(null);
    } else if (key === "Escape" && this.isBig) this.toggleBig();
    else if (key === "Enter") this.toggleBig();
    else if (key === "l") owner.toggleLogY(this.metric);
    else return false;
    return true;
  }

  moveCursor(left) {
    this.keyLeft = Math.min(this.chart.plotWidth, Math.max(0, left));
    const x = this.chart.toValues(this.keyLeft, 0).x;
    const line = this.lines.find((one) => one.id === this.keyMark) || this.lines[0];
    if (!line) return;
    this.keyMark = line.id;
    const index = findNearest(line.x, x);
    const { plot } = this.chart;
    const top = Number.isNaN(line.y[index]) ? 0 : plot.valToPos(line.y[index], "y");
    const box = plot.over.getBoundingClientRect();
    const at = { ...this.chart.toValues(this.keyLeft, top), clientX: box.left + this.keyLeft, clientY: box.top + top };
    this.owner.hover(this, at);
    this.owner.spoken.textContent = `${line.name}: ${formatNumber(line.y[index])} at ${this.owner.formatX(line.x[index])}`;
  }

  moveMark(by) {
    const ids = this.lines.map((line) => line.id);
    if (!ids.length) return;
    const now = ids.indexOf(this.keyMark);
    this.keyMark = ids[(now + by + ids.length) % ids.length];
    this.moveCursor(this.keyLeft === undefined ? this.chart.plotWidth / 2 : this.keyLeft);
  }
}

// --- smoothing and bands ---

/** Return the smoothed values of a curve. The half-life is that of an exponential average over its points, or over
 * thousandths of its visible part where it has more points; on a logarithmic axis it is one of the logarithms. */
function smoothPoints(points, { smooth, logX, logY, zoom }) {
  const key = `${smooth} ${logX} ${logY} ${zoom}`;
  if (points.smoothed && points.smoothed.key === key) return points.smoothed.y;
  const { x, n, count, first_x, last_x } = points;
  const at = (v) => (logX ? Math.log10(v) : v);
  const first = [first_x ?? x[0], x[0], ...x.subarray(0, 3)].find((v) => !logX || v > 0) ?? 1;
  const length = at(last_x ?? x[n - 1]) - at(first);
  const visible = zoom ? Math.min(length, at(zoom[1]) - at(zoom[0])) : length;
  const spacing = Math.max(length / Math.max(1, (count || n) - 1), visible / 1000);
  const tau = -spacing / Math.log(smooth);
  const y = tau > 0 ? smoothCurve(logX ? x.map((v) => Math.log10(v)) : x, points.mean, tau, logY) : points.mean;
  points.smoothed = { key, y };
  return y;
}

/** Return the mean line of several curves on a common grid of x and the band around it: lowest to highest, or a
 * standard deviation either way. Where a run has ended, the others go on without it. */
function makeBand(curves, [from, to], pixels, { band, ...options }) {
  const { smooth, logX, logY } = options;
  const n = Math.max(2, Math.min(600, Math.round(pixels / 2)));
  const [a, b] = logX ? [Math.log10(from), Math.log10(to)] : [from, to];
  const grid = Float64Array.from({ length: n }, (_, i) => {
    const at = a + ((b - a) * i) / (n - 1);
    return logX ? 10 ** at : at;
  });
  const sum = new Float64Array(n);
  const squares = new Float64Array(n);
  const count = new Float64Array(n);
  const low = new Float64Array(n).fill(Infinity);
  const high = new Float64Array(n).fill(-Infinity);
  const slack = (to - from) / n;
  for (const points of curves) {
    const values = smooth && points.n > 2 ? smoothPoints(points, options) : points.mean;
    for (let i = 0; i < n; i++) {
      const v = interpolate(points.x, values, grid[i], slack);
      if (v !== v) continue;
      sum[i] += v;
      squares[i] += v * v;
      count[i] += 1;
      if (v < low[i]) low[i] = v;
      if (v > high[i]) high[i] = v;
    }
    if (!smooth) widenToExtremes(points, grid, low, high);
  }
  const y = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    y[i] = count[i] ? sum[i] / count[i] : NaN;
    if (band === "std") {
      const spread = count[i] ? Math.sqrt(Math.max(0, squares[i] / count[i] - y[i] * y[i])) : NaN;
      low[i] = y[i] - spread;
      high[i] = y[i] + spread;
      if (logY && low[i] <= 0) low[i] = y[i] / 10;
    } else if (!count[i]) low[i] = high[i] = NaN;
  }
  const line = { x: grid, y, pale: null, points: false, count: curves.length };
  return band === "none" ? line : { ...line, low, high };
}

/** Return the value between two points; a little outside the curve that of its end, since the first and the last
 * point of a reduced curve need not be those of the run. */
function interpolate(x, values, at, slack) {
  const n = x.length;
  if (!n || at < x[0] - slack || at > x[n - 1] + slack) return NaN;
  if (at <= x[0]) return values[0];
  if (at >= x[n - 1]) return values[n - 1];
  let low = 0;
  let high = n - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= at) low = middle;
    else high = middle;
  }
  if (x[high] === x[low]) return values[low];
  const part = (at - x[low]) / (x[high] - x[low]);
  return values[low] + (values[high] - values[low]) * part;
}

/** Without smoothing a band from the lowest to the highest holds every value, not only the means. */
function widenToExtremes(points, grid, low, high) {
  let i = 0;
  for (let k = 0; k < points.n; k++) {
    while (i < grid.length - 1 && grid[i + 1] <= points.x[k]) i += 1;
    if (points.x[k] < grid[0] || points.x[k] > grid[grid.length - 1]) continue;
    const v = points.y[k];
    for (const j of [i, Math.min(grid.length - 1, i + 1)]) {
      if (low[j] === Infinity) continue;
      if (v < low[j]) low[j] = v;
      if (v > high[j]) high[j] = v;
    }
  }
}

// --- small things ---

function isOn(value) {
  return value === true || value === "1" || value === "true";
}

function asList(value) {
  return Array.isArray(value) ? value : value ? String(value).split(",") : [];
}

function countBy(rows, get) {
  const counts = new Map();
  for (const row of rows) counts.set(get(row), (counts.get(get(row)) || 0) + 1);
  return counts;
}

function getRootName(store, row) {
  const root = (store.meta.roots || [])[row.root];
  return root && root.path ? root.path : `folder ${Number(row.root) + 1}`;
}

/** Return a short piece of a line, as it is drawn. */
export function makeSwatch({ colour, dash }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 18 8");
  svg.setAttribute("class", "cv-swatch");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [key, value] of Object.entries({ x1: 1, x2: 17, y1: 4, y2: 4, stroke: colour, "stroke-width": 2.6 })) {
    line.setAttribute(key, value);
  }
  if (dash) line.setAttribute("stroke-dasharray", dash.map((v) => v * 1.6).join(" "));
  svg.append(line);
  return svg;
}

function findScroller(element) {
  for (let at = element; at && at !== document.body; at = at.parentElement) {
    if (/auto|scroll/.test(getComputedStyle(at).overflowY)) return at;
  }
  return null;
}
