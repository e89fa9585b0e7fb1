// Sweeps: their list, and one of them: the best so far, all trials, which parameters matter, what runs where.

import { getJson, importPart } from "./api.js";
import { formatAge, formatDuration, formatNumber, formatSetting, h, icon } from "./dom.js";
import { card, cleanText, cutName, isKnown, limitToRows, longText, renderError, showRun, stateBadge } from "./run_parts.js";

const ROW_PX = 28;
const READ_EVERY_MS = 2500;
const RETRY_MS = 5000;
const STATE_ORDER = ["running", "waiting", "finished", "pruned", "failed"];
const LOG_FROM_RATIO = 1000; // between the largest and the smallest value

/** Show all sweeps, or the one that the view names. */
export function mount(element, store) {
  const place = h("div", { class: "sw", tabindex: "-1" });
  element.append(place);
  const id = store.get("page") === "sweep" ? store.view.sweep : null;
  const page = id ? mountSweep(place, store, id) : mountList(place, store);
  return {
    update: (kind) => page.update(kind),
    unmount() {
      page.unmount();
      element.replaceChildren();
    },
  };
}

/** Read an address now and when rows have changed, not too often; a fault is shown and tried again. */
function follow(path, onAnswer, onFault) {
  let timer = 0;
  let isGone = false;
  let isReading = false;
  let isDue = false;
  let readAt = 0;
  let shown = "";

  async function read() {
    clearTimeout(timer);
    timer = 0;
    isDue = false;
    isReading = true;
    try {
      const answer = await getJson(path);
      if (isGone) return;
      const key = JSON.stringify(answer);
      if (key !== shown) onAnswer(answer);
      shown = key;
    } catch (error) {
      if (isGone) return;
      shown = "";
      onFault(error);
      timer = setTimeout(read, RETRY_MS);
    } finally {
      isReading = false;
      readAt = performance.now();
    }
    if (isDue) later();
  }

  function later() {
    isDue = true;
    if (!timer && !isReading) timer = setTimeout(read, Math.max(100, readAt + READ_EVERY_MS - performance.now()));
  }

  read();
  return {
    later,
    end() {
      isGone = true;
      clearTimeout(timer);
    },
  };
}

function drawCounts(counts = {}) {
  const states = [...STATE_ORDER, ...Object.keys(counts).filter((state) => !STATE_ORDER.includes(state))].filter((state) => counts[state]);
  return h("span", { class: "sw-counts" }, states.map((state) => {
    const badge = stateBadge(state);
    badge.textContent = `${counts[state]} ${state}`;
    return badge;
  }));
}


// --- all sweeps ---

function mountList(place, store) {
  const body = h("div", null);
  place.append(h("div", { class: "sw-head" }, h("h2", null, "Sweeps")), body);

  function draw({ sweeps = [] }) {
    if (!sweeps.length) {
      body.replaceChildren(h("p", { class: "rp-empty" }, "No sweep is in these folders. ", h("code", null, "echelon sweep FILE.yml"), " starts one."));
      return;
    }
    const focused = document.activeElement?.dataset?.key;
    const rows = sweeps.map((sweep) => {
      const total = Object.values(sweep.counts || {}).reduce((sum, count) => sum + count, 0);
      const value = sweep.best?.value;
      return h("tr", null,
        h("td", null, h("button", { class: "sw-link", type: "button", dir: "auto", "data-key": sweep.id, onclick: () => store.setView({ page: "sweep", sweep: sweep.id }) }, cutName(sweep.name))),
        h("td", null, cutName(sweep.metric), " ", h("span", { class: "rp-dim" }, sweep.metric ? (isMore(sweep) ? "↑" : "↓") : "")),
        h("td", { class: "rp-num" }, isKnown(value) ? formatNumber(value) : ""),
        h("td", { class: "rp-num" }, sweep.run_cap ? `${total} of ${sweep.run_cap}` : String(total)),
        h("td", null, sweep.error ? longText(sweep.error, "mc-silent", 200) : sweep.loading ? h("span", { class: "rp-dim" }, "is being read …") : drawCounts(sweep.counts)),
        h("td", { class: "rp-dim" }, isKnown(sweep.changed) ? `${formatAge(sweep.changed)} ago` : ""));
    });
    body.replaceChildren(h("div", { class: "sw-scroll" }, h("table", { class: "rp-table", "aria-label": "Sweeps" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Sweep"), h("th", { scope: "col", title: "↑ more is better, ↓ less is better" }, "Metric"), h("th", { scope: "col", class: "rp-num" }, "Best"),
        h("th", { scope: "col", class: "rp-num" }, "Trials"), h("th", { scope: "col" }, "States"), h("th", { scope: "col" }, "Changed"))), h("tbody", null, rows))));
    if (focused) body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    if (sweeps.some((sweep) => sweep.loading)) reader.later();
  }

  const reader = follow("/api/sweeps", draw, (error) => body.replaceChildren(renderError(error)));
  return {
    update: (kind) => kind === "rows" && reader.later(),
    unmount: reader.end,
  };
}

const isMore = (sweep) => sweep.direction === "maximize";

// --- one sweep ---

function mountSweep(place, store, id) {
  let sweep = null;
  const name = h("h2", { dir: "auto" }, cutName(id.replace(/^\d+:/, "")));
  const counts = h("span", null);
  const about = h("span", { class: "rp-dim" });
  const problem = h("div", null);
  const chart = makeBestChart(store, (trial) => openTrial(trial));
  const importance = h("div", null);
  const parallelPlace = h("div", { class: "sw-parallel" });
  const parallel = h("section", { class: "rp-card" }, h("h3", null, "Parameters of all trials"), parallelPlace);
  const running = h("div", null);
  const table = makeTrialTable(store, (trial) => openTrial(trial), getId);
  const body = h("div", { class: "sw-body", hidden: true }, h("div", { class: "sw-grid" }, card("Best so far", chart.element), card("Importance", importance)), running, parallel, table.element);
  place.append(
    h("div", { class: "rp-line" }, h("button", { class: "rp-button rp-back", type: "button", onclick: () => store.setView({ page: "sweeps", sweep: null }) }, icon("back"), "Sweeps"),
      name, counts, about),
    problem, body);
  let drawn = null; // parallel coordinates

  function getId(trial) {
    return trial.run && store.rows.has(trial.run) ? trial.run : null;
  }

  function openTrial(trial) {
    const run = getId(trial);
    if (run) showRun(store, run, { sweep: null });
  }

  function draw(answer) {
    sweep = answer;
    body.hidden = false;
    problem.replaceChildren(...(answer.error ? [renderError(new Error(answer.error))] : []));
    const trials = answer.trials || [];
    name.textContent = cutName(answer.name);
    counts.replaceChildren(drawCounts(answer.counts));
    const value = answer.best?.value;
    about.textContent = [
      `${isMore(answer) ? "highest" : "lowest"} ${cutName(answer.metric || "value")}`, isKnown(value) ? `best ${formatNumber(value)}` : "",
      answer.run_cap ? `${trials.length} of ${answer.run_cap} trials` : `${trials.length} trials`, answer.ending ? `ended: ${answer.ending}` : "",
    ].filter(Boolean).join(" · ");
    chart.draw(answer);
    drawImportance(answer.importance || {}, trials);
    drawRunning(trials);
    table.draw(answer);
    drawParallel();
  }

  function drawImportance(found, trials) {
    const list = Object.entries(found).sort((a, b) => b[1] - a[1]);
    if (!list.length) {
      const done = trials.filter((trial) => trial.state === "finished" || trial.state === "pruned").length;
      importance.replaceChildren(h("p", { class: "rp-empty" }, done < 8 ? "It is computed once eight trials have a result." : "It cannot be computed of these trials."));
      return;
    }
    const most = list[0][1] || 1;
    importance.replaceChildren(h("dl", { class: "sw-importance" }, list.map(([key, share]) => {
      const fill = h("i");
      fill.style.width = `${(100 * share) / most}%`;
      return [h("dt", { dir: "auto" }, cutName(key)), h("dd", { class: "sw-bar", "aria-hidden": "true" }, fill), h("dd", { class: "rp-num" }, `${Math.round(share * 100)} %`)];
    })));
  }

  function drawRunning(trials) {
    const active = trials.filter((trial) => trial.state === "running" || trial.state === "waiting");
    running.hidden = !active.length;
    if (!active.length) return;
    running.replaceChildren(card("What runs where", h("div", { class: "sw-scroll" }, h("table", { class: "rp-table", "aria-label": "What runs where" },
      h("thead", null, h("tr", null, ["Trial", "State", "Step", "Ready in", "Where", "Value so far"].map((each) => h("th", { scope: "col" }, each)))),
      h("tbody", null, active.slice(0, 200).map((trial) => {
        const row = store.rows.get(getId(trial)) || {};
        return h("tr", null, h("td", null, trialLink(trial)), h("td", null, stateBadge(trial.state)),
          h("td", { class: "rp-dim" }, isKnown(row.step) ? `${row.step}${row.total_steps ? ` of ${row.total_steps}` : ""}` : ""),
          h("td", null, row.eta_s ? formatDuration(row.eta_s) : ""), h("td", null, [trial.host || row.host, row.job ? `job ${row.job}` : ""].filter(Boolean).join(" ")),
          h("td", null, isKnown(trial.value) ? formatNumber(trial.value) : ""));
      }))))));
  }

  function trialLink(trial) {
    const text = cutName(trial.run_name || `trial ${trial.number}`);
    return getId(trial) ? h("button", { class: "sw-link", type: "button", dir: "auto", onclick: () => openTrial(trial) }, text) : text;
  }

  async function drawParallel() {
    const rows = listRows();
    parallel.hidden = rows.length < 2;
    if (parallel.hidden || drawn) {
      drawn?.update?.("rows");
      return;
    }
    drawn = {};
    try {
      const module = await importPart("./parallel.js");
      if (drawn) drawn = module.mount(parallelPlace, limitToRows(store, listRows), { sweep });
    } catch (error) {
      parallelPlace.replaceChildren(renderError(error));
    }
  }

  function listRows() {
    return (sweep?.trials || []).map((trial) => store.rows.get(getId(trial))).filter(Boolean);
  }

  const reader = follow(`/api/sweep/${encodeURIComponent(id)}`, draw, (error) => problem.replaceChildren(renderError(error)));
  return {
    update(kind) {
      if (kind === "rows") {
        reader.later();
        if (sweep) {
          drawRunning(sweep.trials || []);
          table.refresh();
        }
      }
      if (kind === "theme") chart.redraw();
      drawn?.update?.(kind);
    },
    unmount() {
      reader.end();
      drawn?.unmount?.();
      drawn = null;
      chart.end();
      table.end();
    },
  };
}

// --- the best so far, over the trials ---

function makeBestChart(store, onOpen) {
  const canvas = h("canvas", { role: "img", tabindex: "-1" });
  const tip = h("div", { class: "sw-tip", hidden: true, "aria-hidden": "true" });
  const element = h("div", { class: "sw-chart" }, canvas, tip);
  let points = []; // {trial, x, y}
  let sweep = null;
  let hovered = null;

  function redraw() {
    if (sweep) draw(sweep);
  }

  function draw(answer) {
    sweep = answer;
    const width = element.clientWidth;
    const height = element.clientHeight;
    if (!width || !height) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(element);
    const colour = (key) => style.getPropertyValue(key).trim() || "#888";
    const trials = (answer.trials || []).filter((trial) => Number.isFinite(trial.value));
    const best = (answer.history || []).map(([number, , value]) => ({ number, value }));
    canvas.setAttribute("aria-label", trials.length
      ? `The value of ${trials.length} trials; the best is ${formatNumber(best[best.length - 1]?.value)}. All of them are in the table.` : "No trial has a value yet");
    points = [];
    if (!trials.length) {
      pen.fillStyle = colour("--fg2");
      pen.font = "13px sans-serif";
      pen.fillText("No trial has a value yet.", 8, 24);
      return;
    }
    const values = trials.map((trial) => trial.value);
    const low = Math.min(...values);
    const high = Math.max(...values);
    const isLog = low > 0 && high / low > LOG_FROM_RATIO;
    const scale = isLog ? Math.log10 : (value) => value;
    const span = scale(high) - scale(low) || Math.abs(scale(high)) || 1;
    const left = 58;
    const bottom = 22;
    const lastNumber = Math.max(1, ...(answer.trials || []).map((trial) => trial.number));
    const placeX = (number) => left + 8 + (number / lastNumber) * (width - left - 20);
    const placeY = (value) => 10 + (1 - (scale(value) - scale(low) + span * 0.04) / (span * 1.08)) * (height - bottom - 14);

    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const value of makeTicks(scale(low), scale(high), 4)) {
      const real = isLog ? 10 ** value : value;
      const y = placeY(real);
      if (!(y > 4 && y < height - bottom)) continue;
      pen.strokeStyle = colour("--line");
      pen.lineWidth = 1;
      line(pen, [[left, Math.round(y) + 0.5], [width, Math.round(y) + 0.5]]);
      pen.fillStyle = colour("--fg2");
      pen.textAlign = "right";
      pen.fillText(formatTick(real), left - 6, y);
    }
    pen.textAlign = "center";
    for (const number of makeTicks(0, lastNumber, Math.min(lastNumber, Math.floor(width / 80))).filter(Number.isInteger)) {
      pen.fillStyle = colour("--fg2");
      pen.fillText(String(number), placeX(number), height - 8);
    }
    pen.strokeStyle = colour("--accent");
    pen.lineWidth = 1.5;
    const steps = [];
    best.forEach(({ number, value }, i) => {
      if (i) steps.push([placeX(number), placeY(best[i - 1].value)]);
      steps.push([placeX(number), placeY(value)]);
    });
    if (best.length) steps.push([placeX(lastNumber), placeY(best[best.length - 1].value)]);
    line(pen, steps);
    const colours = { finished: colour("--accent"), pruned: colour("--fg2"), failed: colour("--bad"), running: colour("--running"), waiting: colour("--warn") };
    points = trials.map((trial) => ({ trial, x: placeX(trial.number), y: placeY(trial.value) }));
    for (const { trial, x, y } of points) {
      pen.beginPath();
      pen.arc(x, y, trial === hovered ? 5.5 : 3.5, 0, 7);
      pen.fillStyle = trial.state === "pruned" ? colour("--bg") : colours[trial.state] || colour("--fg2");
      pen.strokeStyle = colours[trial.state] || colour("--fg2");
      pen.lineWidth = 1.3;
      pen.fill();
      pen.stroke();
    }
  }

  function findNearest(event) {
    const box = canvas.getBoundingClientRect();
    let nearest = null;
    let distance = 14 ** 2;
    for (const point of points) {
      const d = (point.x - event.clientX + box.left) ** 2 + (point.y - event.clientY + box.top) ** 2;
      if (d < distance) [nearest, distance] = [point, d];
    }
    return nearest;
  }

  canvas.addEventListener("pointermove", (event) => {
    const point = findNearest(event);
    tip.hidden = !point;
    canvas.style.cursor = point ? "pointer" : "default";
    if ((point?.trial || null) !== hovered) {
      hovered = point?.trial || null;
      redraw();
    }
    if (!point) return;
    const parameters = Object.entries(point.trial.parameters || {}).slice(0, 12).map(([key, value]) => `${cutName(key)}=${formatSetting(value).slice(0, 40)}`);
    tip.textContent = [`${cutName(point.trial.run_name || point.trial.number)}: ${formatNumber(point.trial.value)} (${point.trial.state})`, ...parameters].join("\n");
    tip.style.left = `${Math.max(0, Math.min(point.x + 10, element.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(0, Math.min(point.y + 10, element.clientHeight - tip.offsetHeight))}px`;
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    hovered = null;
    redraw();
  });
  canvas.addEventListener("click", (event) => {
    const point = findNearest(event);
    if (point) onOpen(point.trial);
  });
  const observer = new ResizeObserver(redraw);
  observer.observe(element);
  return { element, draw, redraw, end: () => observer.disconnect() };
}

function line(pen, points) {
  pen.beginPath();
  points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.stroke();
}

function makeTicks(low, high, count) {
  const raw = (high - low || 1) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw) || raw;
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) ticks.push(Number(value.toPrecision(12)));
  return ticks;
}

function formatTick(value) {
  const size = Math.abs(value);
  if (value !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(4)));
}

// --- the table of trials: only the rows on the screen are in the page ---

function makeTrialTable(store, onOpen, getId) {
  let trials = [];
  let columns = [];
  let sweep = {};
  let sort = "number";
  let isReverse = false;
  let frame = 0;
  const count = h("span", { class: "rp-dim", role: "status" });
  const find = h("input", { class: "lv-find", "data-search": "", type: "search", placeholder: "Search trials", "aria-label": "Search trials", autocomplete: "off" });
  const head = h("div", { class: "sw-head-row", role: "row" });
  const rows = h("div", { class: "sw-rows", role: "rowgroup" });
  const box = h("div", { class: "sw-table", role: "table", "aria-label": "Trials", tabindex: "0" }, h("div", { role: "rowgroup" }, head), rows);
  const element = h("section", { "aria-label": "Trials" }, h("div", { class: "rp-line sw-table-bar" }, h("h3", null, "Trials"), count, find), box);
  let shown = [];

  function draw(answer) {
    sweep = answer;
    trials = answer.trials || [];
    const names = answer.parameters || [];
    columns = [
      { key: "number", label: "#", isNumber: true, width: "48px", get: (trial) => trial.number },
      { key: "run", label: "Run", width: "minmax(110px, 1fr)", get: (trial) => trial.run_name || "" },
      { key: "state", label: "State", width: "104px", get: (trial) => trial.state },
      { key: "value", label: cutName(answer.metric || "Value"), isNumber: true, width: "96px", get: (trial) => trial.value ?? null },
      ...names.map((name) => ({ key: `p.${name}`, label: cutName(name), isNumber: trials.every((trial) => typeof (trial.parameters?.[name] ?? 0) === "number"), width: "minmax(86px, 150px)", get: (trial) => trial.parameters?.[name] ?? null })),
      { key: "evaluations", label: "Evaluations", isNumber: true, width: "84px", get: (trial) => trial.evaluations ?? null },
      { key: "trained", label: "Trained", isNumber: true, width: "76px", get: (trial) => trial.trained_s, format: formatDuration },
      { key: "host", label: "Host", width: "minmax(70px, 130px)", get: (trial) => trial.host || "" },
      { key: "why", label: "Why", width: "minmax(60px, 260px)", get: (trial) => trial.cause || "" },
    ].filter((column) => ["number", "run", "state", "value"].includes(column.key) || trials.some((trial) => ![null, "", undefined].includes(column.get(trial))));
    drawHead();
    refresh();
  }

  function drawHead() {
    const key = JSON.stringify([columns.map((column) => [column.key, column.label]), sort, isReverse]);
    if (head.drawn === key) return;
    head.drawn = key;
    const focused = head.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const layout = columns.map((column) => column.width).join(" ");
    box.style.setProperty("--sw-columns", layout);
    head.replaceChildren(...columns.map((column) => h("div", {
      role: "columnheader", class: column.isNumber ? "sw-num" : null, "aria-sort": sort === column.key ? (isReverse ? "descending" : "ascending") : "none",
    }, h("button", { type: "button", title: column.label, "data-key": column.key, onclick: () => {
      isReverse = sort === column.key ? !isReverse : column.key === "value" && isMore(sweep);
      sort = column.key;
      drawHead();
      refresh();
    } }, column.label))));
    if (focused) head.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  function refresh() {
    const column = columns.find((each) => each.key === sort) || columns[0];
    if (!column) return;
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = trials.filter((trial) => !words.length || matches(trial, words));
    const isEmpty = (value) => !isKnown(value) || value === "" || Number.isNaN(value);
    shown.sort((a, b) => {
      const [x, y] = [column.get(a), column.get(b)];
      if (isEmpty(x) || isEmpty(y)) return isEmpty(x) - isEmpty(y) || a.number - b.number;
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
      return (isReverse ? -order : order) || a.number - b.number;
    });
    count.textContent = shown.length === trials.length ? String(trials.length) : `${shown.length} of ${trials.length}`;
    box.setAttribute("aria-rowcount", String(shown.length + 1));
    rows.style.height = `${shown.length * ROW_PX}px`;
    drawRows();
  }

  function matches(trial, words) {
    const text = [trial.run_name, trial.state, ...Object.entries(trial.parameters || {}).map(([key, value]) => `${key}=${formatSetting(value)}`)].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  function drawRows() {
    if (frame) return;
    frame = requestAnimationFrame(() => {
      frame = 0;
      const first = Math.max(0, Math.floor(box.scrollTop / ROW_PX) - 6);
      const last = Math.min(shown.length, first + Math.ceil(box.clientHeight / ROW_PX) + 12);
      const best = sweep.best?.number;
      const focused = rows.contains(document.activeElement) ? document.activeElement.dataset.key : null;
      rows.replaceChildren(...shown.slice(first, last).map((trial, i) => makeRow(trial, first + i, trial.number === best)));
      if (focused) rows.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    });
  }

  function makeRow(trial, i, isBest) {
    const row = h("div", { class: `sw-row${isBest ? " sw-is-best" : ""}`, role: "row", "aria-rowindex": String(i + 2) }, columns.map((column) => {
      const value = column.get(trial);
      return h("div", { role: "cell", class: column.isNumber ? "sw-num" : null, title: column.key === "why" ? String(value).slice(0, 500) : null }, drawCell(column, trial, value, isBest));
    }));
    row.style.top = `${i * ROW_PX}px`;
    return row;
  }

  function drawCell(column, trial, value, isBest) {
    if (column.key === "run" && getId(trial)) {
      return h("button", { class: "sw-link", type: "button", dir: "auto", "data-key": String(trial.number), onclick: () => onOpen(trial) }, cutName(value), isBest ? " ★" : "");
    }
    if (column.key === "state") return stateBadge(value);
    if (!isKnown(value) || value === "") return "";
    if (column.format) return column.format(value);
    if (column.key === "value") return formatNumber(value);
    return cleanText(formatSetting(value).slice(0, 200));
  }

  box.addEventListener("scroll", drawRows, { passive: true });
  box.addEventListener("keydown", (event) => {
    if (event.target !== box) return;
    const by = { ArrowDown: ROW_PX, ArrowUp: -ROW_PX }[event.key];
    if (!by) return;
    event.preventDefault();
    box.scrollTop += by;
  });
  find.addEventListener("input", refresh);
  find.addEventListener("keydown", (event) => event.stopPropagation());
  const observer = new ResizeObserver(drawRows);
  observer.observe(box);
  return {
    element,
    draw,
    refresh,
    end() {
      observer.disconnect();
      cancelAnimationFrame(frame);
    },
  };
}
