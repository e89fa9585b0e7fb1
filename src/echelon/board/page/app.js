// The page: head, banner, and which part is shown by the view.

import { ApiError, getHello, getJson, hasLostPart, importPart, onReachable, subscribe } from "./api.js";
import { closePopover, showError, showKeys } from "./dialogs.js";
import { h, icon } from "./dom.js";
import { isActive } from "./filters.js";
import { Store } from "./store.js";

const store = new Store();
const PAGES = { runs: "Runs", sweeps: "Sweeps", machines: "Machines" };
const PANELS = {
  curves: ["Curves", "./curves.js", "mount"],
  bars: ["Bars", "./scatter.js", "mountBars"],
  scatter: ["Scatter", "./scatter.js", "mount"],
  parallel: ["Parallel", "./parallel.js", "mount"],
  media: ["Media", "./media.js", "mount"],
};
const WATCH_MAX = 200;

// --- parts that are mounted ---

/** A place for one module at a time; a module that was asked for and is not wanted any more is not mounted. */
class Slot {
  constructor(element) {
    this.element = element;
    this.name = null;
    this.mounted = null;
  }

  async show(name, path, exported = "mount") {
    if (this.name === name) return;
    this.clear();
    this.name = name;
    try {
      const module = await importPart(path);
      if (this.name !== name) return;
      this.mounted = module[exported](this.element, store);
    } catch (error) {
      if (!(error instanceof ApiError)) console.error(error);
      if (this.name === name) this.element.replaceChildren(explainFailure(error));
    }
  }

  clear() {
    if (this.mounted && this.mounted.unmount) this.mounted.unmount();
    this.mounted = null;
    this.name = null;
    this.element.replaceChildren();
  }

  update(kind) {
    if (this.mounted && this.mounted.update) this.mounted.update(kind);
  }
}

function explainFailure(error) {
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, "This part of the page could not be loaded"),
    h("p", {}, [error.message || String(error), error.hint].filter(Boolean).join(": ")),
    h("button", { onclick: () => location.reload() }, "Load the page again"),
  );
}

// --- the head ---

const links = {};
const status = h("span", { class: "live", title: "" }, h("i", {}), h("span", {}, "connecting"));
const where = h("span", { class: "where" });
const themeButton = h("button", { class: "quiet", onclick: switchTheme });

function buildHead() {
  const nav = h("nav", { "aria-label": "Pages" });
  for (const [page, label] of Object.entries(PAGES)) {
    links[page] = buildPageLink(page, label);
    nav.append(links[page]);
  }
  const help = h("button", { class: "quiet", "aria-label": "Keys", title: "Keys (?)", onclick: showKeys }, icon("help"));
  const brand = h("a", { class: "brand", href: "?", onclick: follow({ page: "runs" }) }, drawBrand(), "Echelon");
  document.getElementById("top").append(brand, nav, where, status, themeButton, help);
  showTheme();
}

function drawBrand() {
  const mark = h("span", { class: "brand-mark", "aria-hidden": "true" });
  mark.append(h("i", {}), h("i", {}), h("i", {}));
  return mark;
}

function buildPageLink(page, label) {
  const query = page === "runs" ? "?" : `?page=${page}`;
  return h("a", { href: query, onclick: follow({ page, run: null, sweep: null }) }, label);
}

function follow(patch) {
  return (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    store.setView(patch);
  };
}

function showRoots() {
  const { roots, host } = store.meta;
  const paths = roots.map((root) => root.path);
  const text = paths.length > 1 ? `${paths.length} folders` : paths[0] || "";
  where.textContent = host ? `${host}: ${text}` : text;
  where.title = paths.join("\n");
}

const THEMES = { auto: ["auto", "Theme: as the system"], light: ["sun", "Theme: light"], dark: ["moon", "Theme: dark"] };

function getTheme() {
  return document.documentElement.dataset.chosenTheme || "auto";
}

function switchTheme() {
  const next = { auto: "light", light: "dark", dark: "auto" }[getTheme()];
  if (next === "auto") delete document.documentElement.dataset.chosenTheme;
  else document.documentElement.dataset.chosenTheme = next;
  try {
    localStorage.setItem("echelon-theme", next);
  } catch (error) {
    console.warn(error); // it holds until the page is loaded again
  }
  showTheme();
}

function showTheme() {
  const [name, label] = THEMES[getTheme()];
  themeButton.replaceChildren(icon(name));
  themeButton.title = label;
  themeButton.setAttribute("aria-label", label);
}

function onTheme() {
  store.emit("theme");
  for (const slot of slots) slot.update("theme");
}

// --- the pages ---

const main = document.getElementById("main");
const tableElement = h("section", { class: "pane table-pane", "aria-label": "Runs" });
const panelElement = h("div", { class: "panel-body", id: "panel" });
const panelTabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Charts" });
const splitter = h("div", {
  class: "splitter",
  role: "separator",
  tabindex: "0",
  "aria-orientation": "vertical",
  "aria-label": "Width of the table",
  "aria-valuemin": "15",
  "aria-valuemax": "85",
});
const panelPane = h("section", { class: "pane panel-pane", "aria-label": "Charts" }, panelTabs, panelElement);
const runsPage = h("div", { class: "runs-page" }, tableElement, splitter, panelPane);
const otherPage = h("div", { class: "other-page" });
const tableSlot = new Slot(tableElement);
const panelSlot = new Slot(panelElement);
const pageSlot = new Slot(otherPage);
const slots = [tableSlot, panelSlot, pageSlot];
const OTHER_MODULES = {
  run: "./run_page.js",
  machines: "./machines.js",
  sweeps: "./sweeps.js",
  sweep: "./sweeps.js",
};

function showView() {
  const page = store.get("page");
  const isRuns = !(page in OTHER_MODULES);
  if (isRuns) showRunsPage();
  else showOtherPage(page);
  for (const [name, link] of Object.entries(links)) {
    const isHere = name === page || (name === "runs" && page === "run") || (name === "sweeps" && page === "sweep");
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = buildTitle(page);
}

function buildTitle(page) {
  const row = page === "run" ? store.rows.get(store.view.run) : null;
  const what = row ? row.name : page === "sweep" ? store.view.sweep || "Sweep" : PAGES[page] || "Runs";
  return `${what} · Echelon`;
}

function showRunsPage() {
  if (!runsPage.isConnected) {
    pageSlot.clear();
    main.replaceChildren(runsPage);
  }
  tableSlot.show("table", "./runs_table.js");
  const name = store.get("panel");
  runsPage.classList.toggle("no-panel", !(name in PANELS));
  if (!(name in PANELS)) panelSlot.clear();
  else if (store.isLoaded) panelSlot.show(name, PANELS[name][1], PANELS[name][2]);
  showTabs(name);
}

function showOtherPage(page) {
  if (!otherPage.isConnected) main.replaceChildren(otherPage);
  const { run, sweep } = store.view;
  if (store.isLoaded) pageSlot.show(`${page}|${run || ""}|${sweep || ""}`, OTHER_MODULES[page]);
}

function showTabs(current) {
  if (panelTabs.dataset.current === current) return;
  panelTabs.dataset.current = current;
  const tabs = Object.entries(PANELS).map(([name, [label]]) =>
    h(
      "button",
      {
        role: "tab",
        class: "tab",
        "aria-selected": String(name === current),
        "aria-controls": "panel",
        tabindex: name === current ? "0" : "-1",
        onclick: () => store.setView({ panel: name }),
        onkeydown: moveInTabs,
      },
      label,
    ),
  );
  const close = h(
    "button",
    {
      class: "quiet tabs-close",
      "aria-label": "Close the charts",
      title: "Close the charts",
      onclick: () => store.setView({ panel: "none" }),
    },
    icon("close"),
  );
  const hadFocus = panelTabs.contains(document.activeElement);
  panelTabs.replaceChildren(...tabs, close);
  if (hadFocus) panelTabs.querySelector("[aria-selected=true]")?.focus();
}

function moveInTabs(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const names = Object.keys(PANELS);
  const next = (names.indexOf(store.get("panel")) + step + names.length) % names.length;
  store.setView({ panel: names[next] });
}

// --- the width of the table ---

function setSplit(share) {
  const bounded = Math.min(85, Math.max(15, share));
  runsPage.style.setProperty("--split", `${bounded}%`);
  splitter.setAttribute("aria-valuenow", String(Math.round(bounded)));
  try {
    localStorage.setItem("echelon-split", String(bounded));
  } catch (error) {
    console.warn(error);
  }
}

function readSplit() {
  try {
    return Number(localStorage.getItem("echelon-split")) || 52;
  } catch (error) {
    return 52;
  }
}

function wireSplitter() {
  setSplit(readSplit());
  const isStacked = () => getComputedStyle(runsPage).flexDirection === "column";
  splitter.addEventListener("pointerdown", (event) => {
    splitter.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  splitter.addEventListener("pointermove", (event) => {
    if (!splitter.hasPointerCapture(event.pointerId)) return;
    const box = runsPage.getBoundingClientRect();
    const share = isStacked() ? (event.clientY - box.top) / box.height : (event.clientX - box.left) / box.width;
    setSplit(100 * share);
  });
  splitter.addEventListener("dblclick", () => setSplit(52));
  splitter.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -2, ArrowUp: -2, ArrowRight: 2, ArrowDown: 2 }[event.key];
    if (!step) return;
    event.preventDefault();
    setSplit(readSplit() + step);
  });
}

// --- the server ---

const banner = document.getElementById("banner");
let live = null;
let isLost = false;
let isUnknown = false;
let lastRetry = 0;

function showBanner(text) {
  banner.hidden = !text;
  if (banner.textContent !== text) banner.textContent = text;
}

function setLive(state) {
  const wasLost = isLost;
  isLost = state === "lost";
  status.dataset.state = isUnknown ? "lost" : state;
  status.lastChild.textContent = { live: "live", lost: "offline", connecting: "connecting" }[state];
  status.title = state === "live" ? "What changes on disk is shown within a second" : "";
  if (state === "live") {
    isUnknown = false;
    showBanner("");
    if (wasLost && hasLostPart() && !isTyping(document.activeElement)) location.reload();
    return;
  }
  if (isLost) checkServer();
}

/** Tell a server that is gone from one that does not know this page any more. */
async function checkServer() {
  try {
    await getJson("/api/hello");
  } catch (error) {
    isUnknown = error.status === 401;
    if (!isLost) return;
    showBanner(
      isUnknown
        ? `${error.message}: ${error.hint}.`
        : "The board's server does not answer; trying again. What is shown is the last that was known.",
    );
  }
}

/** Return the runs whose metrics and logs are asked for as they grow: those drawn that still run, and the one
 * that is open. */
function getWatchedIds() {
  const isRun = store.get("page") === "run";
  const ids = new Set(isRun && store.view.run ? [store.view.run] : []);
  for (const id of store.watched) ids.add(id);
  if (store.isLoaded && !isRun) {
    for (const row of store.getShownRows()) if (isActive(row)) ids.add(row.id);
  }
  return [...ids].slice(0, WATCH_MAX).sort();
}

let watchTimer = 0;
function watchLater() {
  clearTimeout(watchTimer);
  watchTimer = setTimeout(() => live && live.setWatch(getWatchedIds()), 250);
}

async function loadRows() {
  try {
    await store.load();
    return true;
  } catch (error) {
    setLive("lost");
    if (error.status && error.status !== 401) showError(error);
    return false;
  }
}

async function start() {
  buildHead();
  wireSplitter();
  showView();
  let wait_ms = 300;
  while (!(await loadRows())) {
    await new Promise((resolve) => setTimeout(resolve, wait_ms));
    wait_ms = Math.min(4000, wait_ms * 1.6);
  }
  showBanner("");
  live = subscribe(
    {
      onRows: (data) => store.applyRows(data),
      onMetrics: (ids) => store.emit("metrics", ids),
      onLogs: (ids) => store.emit("logs", ids),
      onReload: loadRows,
      onState: setLive,
      getGeneration: () => store.meta.generation,
    },
    getWatchedIds(),
  );
  getHello().then((hello) => Object.assign(store.meta, hello), () => {});
}

store.on("rows", () => {
  showRoots();
  showView();
  for (const slot of slots) slot.update("rows");
  watchLater();
});
store.on("view", () => {
  if (!store.keepsPopover) closePopover();
  showView();
  for (const slot of slots) slot.update("view");
  watchLater();
});
store.on("metrics", () => slots.forEach((slot) => slot.update("metrics")));
store.on("logs", () => slots.forEach((slot) => slot.update("logs")));
store.on("watch", watchLater);
new MutationObserver(onTheme).observe(document.documentElement, { attributeFilter: ["data-theme"] });
onReachable((isReachable) => {
  if (!isReachable || !isLost || !live || Date.now() - lastRetry < 1500) return;
  lastRetry = Date.now();
  live.retry();
});

window.addEventListener("unhandledrejection", (event) => {
  if (!(event.reason instanceof ApiError)) return;
  event.preventDefault();
  showError(event.reason);
});

// --- keys of the page ---

let lastKey = "";
document.addEventListener("keydown", (event) => {
  const before = lastKey;
  lastKey = "";
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  if (event.key === "?") showKeys();
  else if (event.key === "/") {
    const box = document.querySelector("[data-search]");
    if (!box) return;
    box.focus();
    box.select();
  } else if (before === "g" && "rsm".includes(event.key)) {
    store.setView({ page: { r: "runs", s: "sweeps", m: "machines" }[event.key], run: null, sweep: null });
  } else {
    if (event.key === "g") lastKey = "g";
    return;
  }
  event.preventDefault();
});

function isTyping(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

start();
