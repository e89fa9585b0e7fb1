// Images, histograms and texts of the drawn runs, side by side, with a slider over the steps.

import { drawIcon, formatTick, getTheme, onTheme } from "./chart.js";
import { getJson, getRunPath } from "./api.js";
import { formatCount, formatNumber, h } from "./dom.js";

const MAX_RUNS = 24;
const MAX_HEAT_STEPS = 120;
const MAX_REQUESTS = 5;
const LIVE_INTERVAL_MS = 2000;
const KINDS = { image: "Images", histogram: "Histograms", text: "Texts" };
const PLAY_ICON = "M5 3.500v9l7-4.500z";
const PLAY_INTERVAL_MS = 350;

/** Show what runs have logged besides numbers. Returns `{update(kind), unmount()}`. */
export function mount(element, store) {
  const view = new MediaView(element, store);
  return { update: (kind) => view.update(kind), unmount: () => view.unmount() };
}

/** Asks for values a few at a time, and remembers them: a value of a step never changes. */
class ValueLoader {
  constructor() {
    this.values = new Map();
    this.waiting = [];
    this.running = 0;
    this.isClosed = false;
  }

  get(run, name, step) {
    const key = `${run}\n${name}\n${step}`;
    if (!this.values.has(key)) {
      const answer = new Promise((resolve, reject) => {
        this.waiting.push({ run, name, step, resolve, reject });
      });
      answer.catch(() => this.values.delete(key));
      this.values.set(key, answer);
      if (this.values.size > 4000) this.values.delete(this.values.keys().next().value);
      this.next();
    }
    return this.values.get(key);
  }

  next() {
    while (this.running < MAX_REQUESTS && this.waiting.length && !this.isClosed) {
      // What was asked for last is what is looked at now.
      const { run, name, step, resolve, reject } = this.waiting.pop();
      this.running += 1;
      getJson(getRunPath(run, "/media/value"), { name, step })
        .then((data) => resolve(data && typeof data === "object" && "value" in data ? data.value : data), reject)
        .finally(() => {
          this.running -= 1;
          this.next();
        });
    }
  }
}

class MediaView {
  constructor(element, store) {
    this.element = element;
    this.store = store;
    this.items = new Map();
    this.sections = new Map();
    this.loader = new ValueLoader();
    this.asked = new Map();
    this.failure = "";
    this.isReading = false;
    this.search = h("input", {
      type: "search",
      class: "cv-search",
      placeholder: "Search",
      "aria-label": "Search names",
      oninput: () => store.setView({ mdq: this.search.value || null }, { replace: true }),
    });
    this.kind = h(
      "select",
      { "aria-label": "Kind", onchange: () => store.setView({ mdkind: this.kind.value || null }, { replace: true }) },
      h("option", { value: "" }, "All kinds"),
      Object.entries(KINDS).map(([kind, label]) => h("option", { value: kind }, label)),
    );
    this.note = h("p", { class: "cv-notes", role: "status" });
    this.list = h("div", { class: "md-list" });
    const bar = h("div", { class: "cv-bar", role: "toolbar", "aria-label": "Media" }, this.search, this.kind);
    element.replaceChildren(h("section", { class: "md-view", "aria-label": "Media" }, bar, this.note, this.list));
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const section = [...this.sections.values()].find((one) => one.element === entry.target);
        if (section) section.setVisible(entry.isIntersecting);
      }
    });
    this.unwatch = [onTheme(() => this.redraw())];
    if (store.on) this.unwatch.push(store.on("metrics", (ids) => this.onGrown(ids)));
    this.refresh();
  }

  unmount() {
    this.loader.isClosed = true;
    this.observer.disconnect();
    for (const end of this.unwatch) end();
    for (const section of this.sections.values()) section.stop();
    clearTimeout(this.growTimer);
    this.element.replaceChildren();
  }

  update(kind) {
    if (kind === "view" || kind === "rows") this.refresh();
  }

  onGrown(ids) {
    for (const id of Array.isArray(ids) ? ids : []) this.asked.delete(id);
    if (this.growTimer) return;
    this.growTimer = setTimeout(() => {
      this.growTimer = 0;
      this.refresh();
    }, LIVE_INTERVAL_MS);
  }

  refresh() {
    const { view } = this.store;
    if (document.activeElement !== this.search) this.search.value = view.mdq || "";
    this.kind.value = view.mdkind || "";
    this.all = this.store.getShownRows();
    this.rows = this.all.slice(0, MAX_RUNS);
    for (const row of this.rows) if (!this.asked.has(row.id)) this.load(row);
    this.show();
  }

  async load(row) {
    this.asked.set(row.id, true);
    try {
      const { items, share = 1 } = await getJson(getRunPath(row.id, "/media"));
      this.items.set(row.id, items);
      // A long run that is looked at for the first time is read meanwhile.
      if (share < 1) this.onGrown([row.id]);
      this.isReading = share < 1;
      this.failure = "";
    } catch (error) {
      this.failure = error.message;
    }
    if (!this.loader.isClosed) this.show();
  }

  show() {
    const { view } = this.store;
    const words = (view.mdq || "").toLowerCase().split(/\s+/).filter(Boolean);
    const found = new Map();
    for (const row of this.rows) {
      for (const item of this.items.get(row.id) || []) {
        if (!(item.kind in KINDS) || !item.steps.length) continue;
        if (view.mdkind && item.kind !== view.mdkind) continue;
        if (!words.every((word) => item.name.toLowerCase().includes(word))) continue;
        const key = `${item.kind}\n${item.name}`;
        if (!found.has(key)) found.set(key, { kind: item.kind, name: item.name, runs: [] });
        found.get(key).runs.push({ row, steps: item.steps });
      }
    }
    const order = Object.keys(KINDS);
    const sorted = [...found].sort(([, a], [, b]) => order.indexOf(a.kind) - order.indexOf(b.kind) || a.name.localeCompare(b.name, "en", { numeric: true }));
    for (const [key, section] of this.sections) {
      if (found.has(key)) continue;
      section.stop();
      this.observer.unobserve(section.element);
      section.element.remove();
      this.sections.delete(key);
    }
    let before = null;
    for (const [key, media] of sorted) {
      let section = this.sections.get(key);
      if (!section) {
        section = new MediaSection(this, media);
        this.sections.set(key, section);
        this.observer.observe(section.element);
      }
      const at = before ? before.nextSibling : this.list.firstChild;
      if (section.element !== at) this.list.insertBefore(section.element, at);
      before = section.element;
      section.setRuns(media.runs);
    }
    this.showNote(found.size, words.length || view.mdkind);
  }

  showNote(count, isFiltered) {
    const isLoading = this.isReading || this.rows.some((row) => !this.items.has(row.id));
    const notes = [];
    if (!this.rows.length) notes.push("No run is drawn. Tick runs in the table to see what they have logged.");
    else if (!count && !isLoading && isFiltered) notes.push("Nothing of this kind and name.");
    else if (!count && !isLoading) notes.push("These runs have logged no images, histograms or texts: session.log takes them.");
    if (this.all.length > MAX_RUNS) notes.push(`${MAX_RUNS} of ${this.all.length} runs are shown`);
    if (this.isReading) notes.push("a long run is still being read");
    if (this.failure) notes.push(this.failure);
    this.note.textContent = notes.join(" · ");
    this.note.hidden = !notes.length;
  }

  redraw() {
    for (const section of this.sections.values()) section.draw();
  }
}

/** One name, of all runs that have it. */
class MediaSection {
  constructor(owner, { kind, name }) {
    this.owner = owner;
    this.kind = kind;
    this.name = name;
    this.runs = [];
    this.steps = [];
    this.step = null;
    this.follows = true;
    this.cards = new Map();
    this.isVisible = false;
    this.slider = h("input", {
      type: "range",
      min: "0",
      step: "1",
      "aria-label": `Step of ${name}`,
      oninput: () => this.setIndex(Number(this.slider.value)),
    });
    this.output = h("output", { class: "md-step" });
    this.play = h("button", { type: "button", class: "cv-tool", "aria-label": `Play ${name}`, "aria-pressed": "false", title: "Play", onclick: () => this.togglePlay() }, drawIcon(PLAY_ICON));
    this.mode = h(
      "select",
      { "aria-label": `How ${name} is drawn`, onchange: () => this.draw() },
      h("option", { value: "heat" }, "Over steps"),
      h("option", { value: "single" }, "One step"),
    );
    this.mode.hidden = kind !== "histogram";
    this.grid = h("div", { class: `md-grid md-${kind}` });
    const head = h("div", { class: "md-head" }, h("h3", {}, name), this.mode, this.play, this.slider, this.output);
    this.element = h("section", { class: "cv-panel md-section", "aria-label": name }, head, this.grid);
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (isVisible) this.draw();
  }

  setRuns(runs) {
    const key = runs.map(({ row, steps }) => `${row.id} ${row.name} ${steps.length} ${steps[steps.length - 1]}`).join("\n");
    if (key === this.key) return;
    this.key = key;
    this.runs = runs;
    this.steps = [...new Set(runs.flatMap(({ steps }) => steps))].sort((a, b) => a - b);
    if (this.follows || this.step === null) this.step = this.steps[this.steps.length - 1];
    this.slider.max = String(this.steps.length - 1);
    this.slider.hidden = this.play.hidden = this.steps.length < 2;
    this.showStep();
    this.draw();
  }

  get index() {
    let i = this.steps.findIndex((step) => step > this.step);
    if (i < 0) i = this.steps.length;
    return Math.max(0, i - 1);
  }

  setIndex(index) {
    this.step = this.steps[index];
    this.follows = index === this.steps.length - 1;
    this.showStep();
    this.draw();
  }

  showStep() {
    this.slider.value = String(this.index);
    this.slider.setAttribute("aria-valuetext", `step ${this.step}`);
    this.output.textContent = `step ${this.step.toLocaleString("en-US")}`;
  }

  togglePlay() {
    if (this.timer) return this.stop();
    this.play.setAttribute("aria-pressed", "true");
    if (this.index === this.steps.length - 1) this.setIndex(0);
    this.timer = setInterval(() => {
      if (this.index >= this.steps.length - 1) this.stop();
      else this.setIndex(this.index + 1);
    }, PLAY_INTERVAL_MS);
    return undefined;
  }

  stop() {
    clearInterval(this.timer);
    this.timer = 0;
    this.play.setAttribute("aria-pressed", "false");
  }

  // --- cards ---

  draw() {
    if (!this.isVisible) return;
    const kept = new Set(this.runs.map(({ row }) => row.id));
    for (const [id, card] of this.cards) {
      if (kept.has(id)) continue;
      card.element.remove();
      this.cards.delete(id);
    }
    this.runs.forEach(({ row, steps }, i) => {
      let card = this.cards.get(row.id);
      if (!card) {
        card = this.makeCard(row);
        this.cards.set(row.id, card);
      }
      if (this.grid.children[i] !== card.element) this.grid.insertBefore(card.element, this.grid.children[i] || null);
      card.dot.style.background = this.owner.store.getColour(row.id);
      this.fill(card, row, steps);
    });
  }

  makeCard(row) {
    const dot = h("i", { class: "md-dot" });
    const at = h("small");
    const body = h("div", { class: "md-body" });
    const open = () => this.owner.store.setView({ page: "run", run: row.id });
    const name = h("button", { type: "button", class: "cv-link", title: row.name, onclick: open }, row.name);
    return { element: h("figure", { class: "md-card" }, h("figcaption", {}, dot, name, at), body), dot, at, body, shown: "" };
  }

  /** The last step of a run that is not after the chosen one; its first where all are. */
  findStep(steps) {
    let found = steps[0];
    for (const step of steps) if (step <= this.step) found = step;
    return found;
  }

  fill(card, row, steps) {
    const step = this.findStep(steps);
    const isHeat = this.kind === "histogram" && this.mode.value === "heat" && steps.length > 1;
    card.at.textContent = step === this.step || isHeat ? "" : `step ${step.toLocaleString("en-US")}`;
    if (isHeat) return this.fillHeat(card, row, steps);
    if (this.kind === "image") return this.fillImage(card, row, step);
    card.wanted = step;
    return this.owner.loader
      .get(row.id, this.name, step)
      .then((value) => {
        if (card.wanted !== step || (this.kind === "histogram" && this.mode.value === "heat" && steps.length > 1)) return;
        if (this.kind === "text") showText(card, value);
        else showHistogram(card, value, this.describeHistogram(row, step, value));
      })
      .catch((error) => showFailure(card, error));
  }

  fillImage(card, row, step) {
    const query = new URLSearchParams({ name: this.name, step: String(step) });
    const address = `${getRunPath(row.id, "/media/value")}?${query}`;
    let { image } = card;
    if (!image) {
      image = card.image = h("img", { class: "md-picture", decoding: "async" });
      image.addEventListener("error", () => showFailure(card, new Error("the image cannot be read")));
      image.addEventListener("click", () => card.element.classList.toggle("md-big"));
    }
    if (card.body.firstChild !== image) card.body.replaceChildren(image);
    image.alt = `${this.name} of ${row.name} at step ${step}`;
    if (image.getAttribute("src") !== address) image.src = address;
  }

  describeHistogram(row, step, { bins, counts }) {
    const most = counts.indexOf(Math.max(...counts));
    const total = counts.reduce((a, b) => a + b, 0);
    return (
      `${this.name} of ${row.name} at step ${step}: ${formatCount(total, "value")} from ${formatNumber(bins[0])} to ` +
      `${formatNumber(bins[bins.length - 1])}, most between ${formatNumber(bins[most])} and ${formatNumber(bins[most + 1])}`
    );
  }

  /** Steps across, values up, the share of the values as the strength of the colour. */
  async fillHeat(card, row, steps) {
    const every = Math.max(1, Math.ceil(steps.length / MAX_HEAT_STEPS));
    const some = steps.filter((_, i) => i % every === 0 || i === steps.length - 1);
    card.heatKey = `${some.length} ${some[some.length - 1]}`;
    const key = card.heatKey;
    try {
      const values = await Promise.all(some.map((step) => this.owner.loader.get(row.id, this.name, step)));
      if (card.heatKey !== key || this.mode.value !== "heat") return;
      showHeat(card, some, values, this.step, this.owner.store.getColour(row.id), `${this.name} of ${row.name} over ${some.length} steps`);
    } catch (error) {
      showFailure(card, error);
    }
  }
}

function showFailure(card, error) {
  card.body.replaceChildren(h("p", { class: "md-lost" }, error.message));
}

function showText(card, value) {
  const text = typeof value === "string" ? value : (value && value.text) || JSON.stringify(value, null, 1);
  card.body.replaceChildren(h("pre", { class: "md-words", tabindex: "0" }, text));
}

function makeCanvas(card, label, height) {
  const width = Math.max(160, card.body.clientWidth);
  const ratio = devicePixelRatio || 1;
  const canvas = h("canvas", { class: "md-canvas", role: "img", "aria-label": label });
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  card.body.replaceChildren(canvas);
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = "10.5px system-ui, sans-serif";
  return { ctx, width, height };
}

function showHistogram(card, { bins, counts }, label) {
  const { ctx, width, height } = makeCanvas(card, label, 150);
  const theme = getTheme();
  const room = { left: 6, right: 6, top: 6, bottom: 18 };
  // Bins differ in width: what is drawn is the density, so that the area is the share of the values.
  const density = counts.map((count, i) => count / Math.max(1e-300, bins[i + 1] - bins[i]));
  const most = Math.max(...density) || 1;
  const low = bins[0];
  const high = bins[bins.length - 1];
  const toX = (v) => room.left + ((v - low) / (high - low || 1)) * (width - room.left - room.right);
  ctx.fillStyle = theme.accent;
  density.forEach((d, i) => {
    const size = (d / most) * (height - room.top - room.bottom);
    ctx.fillRect(toX(bins[i]), height - room.bottom - size, Math.max(1, toX(bins[i + 1]) - toX(bins[i]) - 0.5), size);
  });
  ctx.fillStyle = theme.fg2;
  ctx.textBaseline = "bottom";
  for (const [v, align] of [[low, "left"], [(low + high) / 2, "center"], [high, "right"]]) {
    ctx.textAlign = align;
    ctx.fillText(formatTick(Number(v.toPrecision(3))), toX(v), height - 2);
  }
}

function showHeat(card, steps, values, step, colour, label) {
  const { ctx, width, height } = makeCanvas(card, label, 190);
  const theme = getTheme();
  const room = { left: 46, right: 4, top: 6, bottom: 18 };
  const low = Math.min(...values.map(({ bins }) => bins[0]));
  const high = Math.max(...values.map(({ bins }) => bins[bins.length - 1]));
  const inner = { width: width - room.left - room.right, height: height - room.top - room.bottom };
  const toX = (i) => room.left + (inner.width * i) / steps.length;
  const toY = (v) => room.top + inner.height * (1 - (v - low) / (high - low || 1));
  ctx.fillStyle = theme.bg2;
  ctx.fillRect(room.left, room.top, inner.width, inner.height);
  ctx.fillStyle = colour;
  values.forEach(({ bins, counts }, i) => {
    const density = counts.map((count, k) => count / Math.max(1e-300, bins[k + 1] - bins[k]));
    const most = Math.max(...density) || 1;
    density.forEach((d, k) => {
      if (!d) return;
      ctx.globalAlpha = Math.sqrt(d / most);
      const top = toY(bins[k + 1]);
      ctx.fillRect(toX(i), top, toX(i + 1) - toX(i) + 0.4, toY(bins[k]) - top + 0.4);
    });
  });
  ctx.globalAlpha = 1;
  ctx.fillStyle = theme.fg2;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  const unit = 10 ** Math.floor(Math.log10((high - low) / 100 || 1)); // the middle is often near 0
  for (const v of [low, (low + high) / 2, high]) {
    ctx.fillText(formatTick(Math.round(v / unit) * unit), room.left - 5, Math.min(height - room.bottom - 4, Math.max(room.top + 5, toY(v))));
  }
  ctx.textBaseline = "bottom";
  ctx.textAlign = "left";
  ctx.fillText(formatTick(steps[0]), room.left, height - 2);
  ctx.textAlign = "right";
  ctx.fillText(formatTick(steps[steps.length - 1]), width - room.right, height - 2);
  let at = 0;
  steps.forEach((one, i) => {
    if (one <= step) at = i;
  });
  ctx.strokeStyle = theme.fg;
  ctx.lineWidth = 1;
  ctx.strokeRect(toX(at) + 0.5, room.top + 0.5, Math.max(1, toX(at + 1) - toX(at) - 1), inner.height - 1);
}
