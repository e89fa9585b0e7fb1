// The page of one run: its head, and tabs for results, curves, settings, time line, logs, snapshots, media,
// traces and the plan. What a run says of itself is text, however long and whatever is in it.

import { getJson, getRunPath, postJson } from "./api.js";
import { formatAge, formatBytes, formatDuration, formatNumber, formatSetting, formatTime, h, icon } from "./dom.js";
import { copyText } from "./log_view.js";

const TABS = [
  ["overview", "Overview"], ["curves", "Curves"], ["settings", "Settings"], ["timeline", "Time line"], ["logs", "Logs"],
  ["snapshots", "Snapshots"], ["media", "Media"], ["traces", "Traces"], ["plan", "Plan"],
];
/** The keys of the view that belong to this page, for links that leave it. */
export const OWN_KEYS = ["run", "tab", "with", "ranks", "find", "regex", "line", "wrap", "stamps", "setting", "changed"];
const DETAILS_EVERY_MS = 3000;
const RETRY_MS = 4000;
const CUT_CHARACTERS = 600; // of a note, a reason, a path; the rest comes by a button
const MORE_CHARACTERS = 20_000; // that such a button shows more
const SPEED_METRICS = new Set([
  "samples_per_s", "step_ms", "data_ms", "compute_ms", "communication_ms", "optimizer_ms", "mfu", "memory_gb", "slowest_rank",
  "slowest_x",
]);
const STEP_PARTS = [
  ["data_ms", "waiting for data"], ["compute_ms", "forward and backward"], ["communication_ms", "communication"],
  ["optimizer_ms", "optimizer"],
];
const LOSS_LABELS = {
  starting: "starting", restarts: "restarts", queue: "in the queue", stopped: "stopped", redone_steps: "steps made again",
  replaced_ranks: "replacing ranks",
};

/** Return the view that shows a run; without the keys that other tabs or runs have left. */
export function showRun(store, id, patch = {}) {
  const empty = Object.fromEntries(OWN_KEYS.map((key) => [key, null]));
  store.setView({ ...empty, page: "run", run: id, ...patch });
}

/** Return a button that copies a text and says so. */
export function copyButton(getText, label = "Copy", title = label) {
  const button = h("button", { class: "rp-button", type: "button", title, "aria-label": title }, label);
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    const before = button.textContent;
    try {
      await copyText(typeof getText === "function" ? getText() : getText);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => {
      button.textContent = label || before;
    }, 1500);
  });
  return button;
}

/** Return text that may be very long: its start, and a button for more. */
export function longText(text, className = "", most = CUT_CHARACTERS) {
  const all = String(text ?? "");
  const holder = h("span", { class: `rp-long ${className}`, dir: "auto" }, cleanText(all.slice(0, most)));
  let shown = most;
  if (all.length > shown) {
    const more = h("button", { class: "lv-more", type: "button" });
    const label = () => {
      more.textContent = `… ${(all.length - shown).toLocaleString("en")} more characters`;
    };
    more.addEventListener("click", (event) => {
      event.stopPropagation();
      more.before(cleanText(all.slice(shown, shown + MORE_CHARACTERS)));
      shown += MORE_CHARACTERS;
      if (shown >= all.length) more.remove();
      else label();
    });
    label();
    holder.append(more);
  }
  return holder;
}

/** Return text in which what controls a terminal or the direction of writing can be seen. */
export function cleanText(text) {
  // eslint-disable-next-line no-control-regex
  return text.replace(/[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]/g, (letter) => {
    const code = letter.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : "\u2421";
  });
}

/** Return an error as a sentence and what to do about it. */
export function renderError(error) {
  return h("div", { class: "rp-error", role: "alert" },
    h("span", null, cleanText(String(error.message || error).slice(0, 2000))),
    error.hint ? h("span", { class: "rp-hint" }, ` ${cleanText(String(error.hint).slice(0, 2000))}`) : null);
}

export function stateBadge(state) {
  const known = { running: "running", finished: "good", failed: "bad", lost: "bad", killed: "bad", stopped: "warn", cancelled: "warn", pruned: "warn", queued: "wait", waiting: "wait" };
  return h("span", { class: `rp-state rp-state-${known[state] || "plain"}` }, state || "unknown");
}

/** Return a bar of parts with its legend. `parts`: `[{label, value, text, rate}]`. */
export function stackedBar(parts, label) {
  const sum = parts.reduce((total, part) => total + part.value, 0) || 1;
  const said = parts.map((part) => `${part.label} ${part.text}`).join(", ");
  const bar = h("div", { class: "rp-stack", role: "img", "aria-label": `${label}: ${said}` });
  const legend = h("ul", { class: "rp-legend", "aria-hidden": "true" });
  parts.forEach((part, i) => {
    const piece = h("span", { class: `rp-part rp-part${part.rate ?? i}`, title: `${part.label} ${part.text}` });
    piece.style.flexGrow = String(part.value / sum);
    bar.append(piece);
    legend.append(h("li", null, h("i", { class: `rp-part${part.rate ?? i}` }), part.label, h("b", null, part.text)));
  });
  return h("div", { class: "rp-split" }, bar, legend);
}

export function card(title, ...content) {
  return h("section", { class: "rp-card" }, h("h3", null, title), ...content);
}

/** Return names with their values. Empty values are left out. */
export function facts(entries) {
  const list = h("dl", { class: "rp-facts" });
  for (const [name, value] of entries) {
    if (value === null || value === undefined || value === "" || value === false) continue;
    list.append(h("dt", null, name), h("dd", null, value instanceof Node ? value : longText(value)));
  }
  return list;
}

/** Show one run. */
export function mount(element, store) {
  let id = store.view.run;
  let details = null;
  let fault = null;
  let child = null; // {tab, update(kind), unmount()}
  let mounting = 0;
  let isGone = false;
  let fetchedAt = 0;
  let timer = 0;
  let waiting = null;
  let lastState = null;

  const head = h("header", { class: "rp-head" });
  const live = h("p", { class: "rp-offscreen", role: "status", "aria-live": "polite" });
  const tablist = h("div", { class: "rp-tabs", role: "tablist", "aria-label": "Parts of the run" });
  const panel = h("div", { class: "rp-panel", role: "tabpanel", id: "rp-panel", tabindex: "-1" });
  const page = h("div", { class: "rp" }, head, live, tablist, panel);
  element.append(page);

  const getRow = () => store.rows.get(id) || details?.row || null;
  const getTab = () => (TABS.some(([key]) => key === store.view.tab) ? store.view.tab : "overview");

  // --- the head ---

  const title = h("h2", { class: "rp-name", dir: "auto" });
  const badge = h("span", { class: "rp-badge" });
  const source = h("span", { class: "rp-source" });
  const progress = h("div", { class: "rp-progress", role: "progressbar", "aria-label": "Steps done", "aria-valuemin": "0" }, h("i"));
  const progressText = h("span", { class: "rp-progress-text" });
  const times = h("span", { class: "rp-times" });
  const why = h("div", { class: "rp-why" });
  const tags = h("div", { class: "rp-tags", role: "group", "aria-label": "Tags" });
  const note = h("div", { class: "rp-note" });
  const problem = h("div", { class: "rp-problem" });
  const acts = h("div", { class: "rp-acts" });
  const back = h("button", { class: "rp-button rp-back", type: "button", title: "Back to all runs", "aria-label": "Back to all runs",
    onclick: leave }, icon("back"), "Runs");
  head.append(
    h("div", { class: "rp-line" }, back, title, badge, source, acts),
    h("div", { class: "rp-line rp-progress-line" }, progress, progressText, times),
    why, problem,
    h("div", { class: "rp-line rp-notes" }, tags, note));

  function leave() {
    const empty = Object.fromEntries(OWN_KEYS.map((key) => [key, null]));
    store.setView({ ...empty, page: "runs" });
  }

  function renderHead() {
    const row = getRow();
    const name = row?.name || nameOfId(id);
    const shown = cleanText(name).slice(0, 200) + (name.length > 200 ? " …" : "");
    if (title.textContent !== shown) title.textContent = shown;
    title.title = name.slice(0, 500);
    problem.replaceChildren(...(fault ? [renderError(fault)] : []));
    page.classList.toggle("rp-stale", Boolean(fault) && Boolean(details));
    if (!row) return;
    if (badge.dataset.state !== row.state) {
      badge.dataset.state = row.state;
      badge.replaceChildren(stateBadge(row.state));
      if (lastState && lastState !== row.state) {
        live.textContent = `The run is ${row.state} now${row.why ? `: ${row.why.slice(0, 200)}` : ""}`;
      }
      lastState = row.state;
      renderActs(row);
    }
    source.textContent = row.source && row.source !== "echelon" ? row.source : row.archived ? "archived" : "";
    const share = row.total_steps ? Math.min(1, (row.step || 0) / row.total_steps) : null;
    progress.hidden = share === null;
    if (share !== null) {
      progress.firstChild.style.width = `${(share * 100).toFixed(2)}%`;
      progress.className = `rp-progress rp-progress-${row.state === "running" ? "running" : row.state === "finished" ? "good" : "still"}`;
      progress.setAttribute("aria-valuenow", String(row.step || 0));
      progress.setAttribute("aria-valuemax", String(row.total_steps));
    }
    const steps = row.step === null || row.step === undefined ? ""
      : `step ${row.step.toLocaleString("en")}${row.total_steps ? ` of ${row.total_steps.toLocaleString("en")}` : ""}`;
    progressText.textContent = [steps, share !== null && share < 1 ? `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %` : ""].filter(Boolean).join(" · ");
    const isRunning = row.state === "running";
    times.textContent = [
      row.best !== null && row.best !== undefined ? `best ${row.best_name || ""} ${formatNumber(row.best)}`.replace("  ", " ") : "",
      row.trained_s ? `trained ${formatDuration(row.trained_s)}` : "",
      isRunning && row.eta_s ? `ready in ${formatDuration(row.eta_s)}` : "",
      row.started ? `started ${formatTime(row.started)}` : "",
      row.host ? `on ${row.host}` : "",
      isRunning && row.updated && Date.now() / 1000 - row.updated > 30 ? `silent for ${formatAge(row.updated)}` : "",
    ].filter(Boolean).join(" · ");
    if (why.dataset.text !== (row.why || "")) {
      why.dataset.text = (row.why || "").slice(0, 5000);
      why.replaceChildren(...(row.why ? [longText(row.why, `rp-why-${/fail|lost|kill/.test(row.state) ? "bad" : "plain"}`, 400)] : []));
    }
    renderTags(row);
    renderNote(row);
  }

  const nameOfId = (text) => String(text || "").replace(/^\d+:/, "");

  async function renderActs(row) {
    acts.replaceChildren();
    if (!store.meta?.can_act || (row.source && row.source !== "echelon")) return;
    const { getActions, openAction } = await import("./act.js");
    if (isGone || getRow()?.state !== row.state) return;
    acts.replaceChildren(...getActions(row).map(({ action, label, hint }) =>
      h("button", { class: `rp-button rp-act-${action}`, type: "button", title: hint, onclick: () => openAction(store, action, [id], { details }) }, label)));
  }

  // --- tags and note ---

  async function annotate(change) {
    try {
      const answer = await postJson(getRunPath(id, "/annotations"), change);
      const row = answer.row || answer;
      if (row?.id) store.applyRows({ changed: [row] });
      fault = null;
    } catch (error) {
      fault = error;
    }
    tags.dataset.key = note.dataset.key = "";
    renderHead();
  }

  const isOurs = (row) => !row.source || row.source === "echelon";

  function renderTags(row) {
    const key = JSON.stringify([row.tags, isOurs(row)]);
    if (tags.dataset.key === key || tags.contains(document.activeElement)) return;
    tags.dataset.key = key;
    tags.replaceChildren(...(row.tags || []).map((tag) =>
      h("span", { class: "rp-tag" }, h("bdi", null, cleanText(tag.slice(0, 80))),
        isOurs(row) ? h("button", { type: "button", "aria-label": `Remove the tag ${tag.slice(0, 80)}`, onclick: (event) => {
          event.currentTarget.blur();
          annotate({ remove_tags: [tag] });
        } }, "×") : null)));
    if (!isOurs(row)) return;
    const input = h("input", { class: "rp-tag-input", type: "text", placeholder: "+ tag", "aria-label": "Add a tag", maxlength: "80", autocomplete: "off" });
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Escape") input.blur();
      if (event.key !== "Enter" && event.key !== ",") return;
      event.preventDefault();
      const added = input.value.split(",").map((tag) => tag.trim()).filter(Boolean);
      input.value = "";
      input.blur();
      if (added.length) annotate({ add_tags: added }).then(() => tags.querySelector("input")?.focus());
    });
    tags.append(input);
  }

  function renderNote(row) {
    const key = `${isOurs(row)}${row.note || ""}`;
    if (note.dataset.edits || note.noted === key) return;
    note.noted = key;
    if (!isOurs(row)) {
      note.replaceChildren(...(row.note ? [longText(row.note, "rp-note-text", 300)] : []));
      return;
    }
    const edit = h("button", { class: "rp-note-edit", type: "button", "aria-label": row.note ? "Change the note" : "Write a note", onclick: () => editNote(row) },
      icon("note"), row.note ? "" : "note");
    note.replaceChildren(...(row.note ? [longText(row.note, "rp-note-text", 300)] : []), edit);
  }

  function editNote(row) {
    note.dataset.edits = "1";
    const area = h("textarea", { class: "rp-note-area", "aria-label": "Note", rows: "3" });
    area.value = row.note || "";
    const done = (saves) => {
      if (!note.dataset.edits) return;
      delete note.dataset.edits;
      note.noted = null;
      if (saves && area.value.trim() !== (row.note || "").trim()) annotate({ note: area.value.trim() });
      else renderHead();
      note.querySelector(".rp-note-edit")?.focus();
    };
    area.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Escape") done(false);
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done(true);
    });
    note.replaceChildren(area, h("span", { class: "rp-note-tools" },
      h("button", { class: "rp-button rp-primary", type: "button", title: "Ctrl+Enter", onclick: () => done(true) }, "Save"),
      h("button", { class: "rp-button", type: "button", onclick: () => done(false) }, "Cancel")));
    area.focus();
  }

  // --- tabs ---

  function renderTabs() {
    const chosen = getTab();
    if (!tablist.children.length) {
      tablist.append(...TABS.map(([key, label]) => h("button", {
        class: "rp-tab", role: "tab", type: "button", id: `rp-tab-${key}`, "aria-controls": "rp-panel",
        onclick: () => store.setView({ tab: key === "overview" ? null : key }),
      }, label, h("span", { class: "rp-tab-count" }))));
      tablist.addEventListener("keydown", onTabKey);
    }
    [...tablist.children].forEach((button, i) => {
      const isChosen = TABS[i][0] === chosen;
      button.setAttribute("aria-selected", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
    });
    panel.setAttribute("aria-labelledby", `rp-tab-${chosen}`);
    const button = tablist.querySelector('[aria-selected="true"]');
    if (button && tablist.scrollWidth > tablist.clientWidth) {
      const from = button.offsetLeft - tablist.offsetLeft;
      if (from < tablist.scrollLeft || from + button.offsetWidth > tablist.scrollLeft + tablist.clientWidth) tablist.scrollLeft = from - 24;
    }
  }

  function onTabKey(event) {
    const at = TABS.findIndex(([key]) => key === getTab());
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const [key] = TABS[(to + TABS.length) % TABS.length];
    store.setView({ tab: key === "overview" ? null : key });
    tablist.querySelector(`#rp-tab-${key}`).focus();
  }

  function setCounts() {
    const counts = { snapshots: details?.snapshots?.length, traces: details?.traces?.length, timeline: details?.timeline?.length };
    for (const [key, count] of Object.entries(counts)) {
      const place = tablist.querySelector(`#rp-tab-${key} .rp-tab-count`);
      if (place) place.textContent = count ? String(count) : "";
    }
  }

  async function renderTab() {
    const tab = getTab();
    if (child?.tab === tab && child.id === id) return;
    child?.unmount?.();
    child = null;
    mounting += 1;
    const turn = mounting;
    panel.replaceChildren();
    panel.className = `rp-panel rp-panel-${tab}`;
    const place = h("div", { class: "rp-place" });
    panel.append(place);
    try {
      const made = await makeTab(tab, place);
      if (turn !== mounting || isGone) {
        made.unmount?.();
        return;
      }
      child = { tab, id, ...made };
      child.onDetails?.();
    } catch (error) {
      console.error(error);
      if (turn === mounting) place.replaceChildren(renderError(error));
    }
  }

  async function makeTab(tab, place) {
    const oneRun = limitToRun(store, () => getRow());
    if (tab === "curves" || tab === "media") {
      const module = await import(tab === "curves" ? "./curves.js" : "./media.js");
      const made = module.mount(place, oneRun);
      return { update: (kind) => made.update?.(kind), unmount: () => made.unmount?.() };
    }
    if (tab === "logs") {
      const { mountLogs } = await import("./log_view.js");
      return mountLogs(place, store, id);
    }
    if (tab === "timeline") {
      const { mountTimeline } = await import("./timeline.js");
      const made = mountTimeline(place);
      return { onDetails: () => details && made.setDetails(details, getRow()), unmount: made.unmount };
    }
    if (tab === "settings") return mountSettings(place);
    const draw = { overview: drawOverview, snapshots: drawSnapshots, traces: drawTraces, plan: drawPlan }[tab];
    return {
      onDetails() {
        if (!details) return;
        const key = JSON.stringify([details, getRow()?.state]);
        if (place.drawn === key) return; // and what a person has opened or chosen stays
        place.drawn = key;
        const active = document.activeElement?.dataset?.key;
        place.replaceChildren(...[draw(details)].flat().filter(Boolean));
        if (active) place.querySelector(`[data-key="${CSS.escape(active)}"]`)?.focus();
      },
    };
  }

  // --- overview ---

  function drawOverview() {
    const row = getRow() || {};
    const grid = h("div", { class: "rp-cards" });
    const add = (...cards) => grid.append(...cards.filter(Boolean));
    add(drawResults(row), drawSpeed(), drawTime(), drawMemory(), drawStragglers(), drawMachines(row), drawPlaces(row),
      drawCode(), drawEnvironment(), drawHangs());
    return [drawCommand(row), grid];
  }

  function drawCommand() {
    const command = details.command || details.commands?.start;
    const others = Object.entries(details.commands || {}).filter(([key, value]) => value && value !== command && key !== "start");
    const line = (text, label) => h("div", { class: "rp-command" }, label ? h("span", { class: "rp-command-label" }, label) : null,
      h("code", { dir: "ltr" }, longText(text, "", 400)), copyButton(text, "Copy", `Copy the command${label ? `: ${label}` : ""}`));
    if (!command && !others.length) return null;
    return h("section", { class: "rp-commands", "aria-label": "Commands" },
      command ? line(command, others.length ? "started by" : "") : null, ...others.map(([key, value]) => line(value, key.replaceAll("_", " "))));
  }

  function drawResults(row) {
    const metrics = listMetrics(details, row).filter(({ name }) => !SPEED_METRICS.has(name));
    if (!metrics.length) return card("Results", h("p", { class: "rp-empty" }, "No numbers yet."));
    const body = metrics.map((metric) => h("tr", { class: metric.name === row.best_name ? "rp-main-metric" : null },
      h("th", { scope: "row", dir: "auto" }, cleanText(metric.name.slice(0, 120))),
      h("td", { class: "rp-num" }, metric.name === "lr" ? "" : formatNumber(metric.best)),
      h("td", { class: "rp-num rp-dim" }, metric.best_step === undefined || metric.name === "lr" ? "" : String(metric.best_step)),
      h("td", { class: "rp-num" }, formatNumber(metric.last)),
      h("td", { class: "rp-dim" }, metric.is === "max" ? "↑" : metric.is === "min" ? "↓" : "")));
    return card("Results", h("table", { class: "rp-table" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Metric"), h("th", { scope: "col", class: "rp-num" }, "Best"),
        h("th", { scope: "col", class: "rp-num" }, "at step"), h("th", { scope: "col", class: "rp-num" }, "Last"),
        h("th", { scope: "col", title: "Whether more (↑) or less (↓) is better" }, ""))),
      h("tbody", null, ...body)));
  }

  function listMetrics(data, row) {
    const known = Object.entries(data.metrics || {});
    if (known.length) return known.map(([name, value]) => ({ name, ...value }));
    return Object.entries(row.metrics || {}).map(([name, [last, low, high, count, is]]) => ({
      name, last, best: is === "max" ? high : low, count, is,
    }));
  }

  function drawSpeed() {
    const speed = details.speed || details.speed_split || {};
    const step = speed.step_ms ?? null;
    const parts = STEP_PARTS.filter(([key]) => typeof speed[key] === "number")
      .map(([key, label], i) => ({ label, value: speed[key], text: formatMs(speed[key]), rate: i }));
    const known = parts.reduce((sum, part) => sum + part.value, 0);
    if (step && parts.length && step - known > step * 0.02) {
      parts.push({ label: "other", value: step - known, text: formatMs(step - known), rate: 5 });
    }
    const rows = facts([
      ["a step", step === null ? null : formatMs(step)],
      ["samples", typeof speed.samples_per_s === "number" ? `${formatNumber(Math.round(speed.samples_per_s))} /s` : null],
      ["of the peak FLOPS", typeof speed.mfu === "number" ? `${(speed.mfu * (speed.mfu > 1.5 ? 1 : 100)).toFixed(1)} %` : null],
    ]);
    if (!parts.length && !rows.children.length) return null;
    return card("Speed of a step", parts.length ? stackedBar(parts, "A step") : null, rows);
  }

  function drawTime() {
    const time = details.accounting;
    if (!time) return null;
    const parts = [{ label: "kept steps", value: time.effective_s || 0, text: formatDuration(time.effective_s), rate: 3 }];
    Object.entries(time.lost_s || {}).forEach(([cause, value], i) => {
      if (value > 0) parts.push({ label: LOSS_LABELS[cause] || cause.replaceAll("_", " "), value, text: formatDuration(value), rate: `L${i}` });
    });
    const share = time.effective_share;
    const count = (number, one, many = `${one}s`) => (number ? `${number} ${number === 1 ? one : many}` : "");
    const hosts = Object.entries(time.losses_by_host || {}).map(([host, n]) => `${host} ${n} ×`).join(", ");
    return card("Time", stackedBar(parts, "Time since the first start"), facts([
      ["effective", typeof share === "number" ? `${(share * 100).toFixed(1)} % of ${formatDuration(time.wall_s)}` : null],
      ["starts", [count(time.starts, "start"), count(time.restarts, "restart"), count(time.requeues, "requeue")].filter(Boolean).join(", ")],
      ["ranks", [time.lost_ranks ? `${time.lost_ranks} lost` : "", time.replaced_ranks ? `${time.replaced_ranks} replaced` : ""].filter(Boolean).join(", ")],
      ["steps made again", time.steps_redone || null],
      ["with fewer processes", time.fewer_processes_s ? formatDuration(time.fewer_processes_s) : null],
      ["losses", hosts],
    ]));
  }

  function drawMemory() {
    const memory = details.memory;
    if (!memory || !Object.values(memory).some((value) => value !== null && value !== undefined)) return null;
    const entries = Object.entries(memory).filter(([, value]) => value !== null && typeof value !== "object");
    const show = (key, value) => {
      if (typeof value !== "number") return String(value);
      if (/bytes$/.test(key)) return formatBytes(value);
      if (/_gb$/.test(key)) return formatBytes(value * 1e9);
      return formatNumber(value);
    };
    const clean = (key) => key.replace(/_(gb|bytes)$/, "").replaceAll("_", " ");
    const total = memory.total_gb ?? (memory.total_bytes ? memory.total_bytes / 1e9 : null);
    const used = memory.memory_gb ?? memory.peak_gb ?? memory.last_gb ?? memory.max_gb;
    return card("Memory",
      total && used ? meter(used / total, `${formatBytes(used * 1e9)} of ${formatBytes(total * 1e9)}`) : null,
      facts(entries.map(([key, value]) => [clean(key), show(key, value)])));
  }

  function drawStragglers() {
    const slow = details.stragglers;
    const list = Array.isArray(slow) ? slow : slow?.ranks || slow?.slow_ranks || details.accounting?.slow_ranks || [];
    const bad = details.bad_machines || details.accounting?.bad_machines || [];
    const rank = slow?.slowest_rank ?? details.speed?.slowest_rank;
    const factor = slow?.slowest_x ?? details.speed?.slowest_x;
    const items = list.map((each) => h("li", null, `rank ${each.rank} on ${each.host}: ${formatNumber(each.factor)} × the median from step ${each.step}`
      + (each.until_step === null || each.until_step === undefined ? ", until the end" : ` to ${each.until_step}`)));
    const machines = bad.map((each) => h("li", null, longText(`${each.host}: ${each.reason} at step ${each.step}; `
      + (each.is_left_out ? `left out${each.replaced_by ? `, ${each.replaced_by} took over` : ""}` : `kept: ${each.kept_because || ""}`))));
    if (!items.length && !machines.length && typeof factor !== "number") return null;
    return card("Stragglers",
      typeof factor === "number" ? facts([["slowest now", `rank ${rank}: ${formatNumber(factor)} × the median`]]) : null,
      items.length || machines.length ? h("ul", { class: "rp-list" }, ...items, ...machines) : null);
  }

  function drawMachines(row) {
    const machines = Array.isArray(details.machines) ? details.machines : details.machines?.nodes || [];
    const entries = [
      ["launcher", [row.launcher, row.job ? `job ${row.job}` : ""].filter(Boolean).join(", ")],
      ["size", row.nodes && row.processes ? `${row.nodes} ${row.nodes === 1 ? "node" : "nodes"}, ${row.processes} ${row.processes === 1 ? "process" : "processes"}` : ""],
    ];
    if (!Array.isArray(details.machines)) {
      for (const [key, value] of Object.entries(details.machines || {})) {
        if (["nodes", "processes", "launcher", "job"].includes(key)) continue;
        if (key === "host" || typeof value !== "object") entries.push([key.replaceAll("_", " "), value === null ? null : String(value)]);
        else if (Array.isArray(value) && value.every((each) => typeof each !== "object")) entries.push([key.replaceAll("_", " "), value.join(", ")]);
      }
    }
    const list = h("ul", { class: "rp-list" }, ...(Array.isArray(machines) ? machines : []).slice(0, 100).map((machine) => h("li", null, longText(
      typeof machine === "string" ? machine : describeMachine(machine)))));
    return card("Machines", facts(entries), list.children.length ? list : null,
      list.children.length && machines.length > 100 ? h("p", { class: "rp-empty" }, `and ${machines.length - 100} more`) : null);
  }

  function describeMachine(machine) {
    const gpus = machine.gpus || machine.devices;
    const names = Array.isArray(gpus) ? gpus.map((gpu) => (typeof gpu === "string" ? gpu : gpu.name || gpu.index)).join(", ") : gpus;
    const known = new Set(["host", "name", "node", "gpus", "devices"]);
    const others = Object.entries(machine).filter(([key, value]) => !known.has(key) && value !== null && value !== "" && typeof value !== "object")
      .map(([key, value]) => `${key.replaceAll("_", " ")} ${value}`);
    return [machine.host || machine.name || `node ${machine.node ?? ""}`, names, ...others].filter(Boolean).join(" · ");
  }

  function drawPlaces(row) {
    const files = Object.entries(details.files || {}).map(([name, path]) => [
      name, typeof path === "string" ? path : [path?.path, typeof path?.bytes === "number" ? formatBytes(path.bytes) : ""].filter(Boolean).join(" · "),
    ]);
    const list = Array.isArray(details.files) ? details.files.map((file) => [file.name, [file.path, typeof file.bytes === "number" ? formatBytes(file.bytes) : ""].filter(Boolean).join(" · ")]) : files;
    const mirror = details.mirror;
    return card("Files", facts([
      ["folder", row.folder || details.folder], ...list,
      ["mirror", mirror ? `${mirror.url} ${mirror.step === null || mirror.step === undefined ? "empty" : `at step ${mirror.step}`}${mirror.problem ? `; newer ones are not: ${mirror.problem}` : ""}` : null],
    ]));
  }

  function drawCode() {
    const code = details.code || details.code_version;
    const entries = [["experiment", details.experiment], ["entry", details.entry], ["program", Array.isArray(details.program) ? details.program.join(" ") : details.program]];
    if (code && typeof code === "object") {
      for (const [key, value] of Object.entries(code)) entries.push([key.replaceAll("_", " "), value === null ? null : formatSetting(value)]);
    } else if (code) entries.push(["version", code]);
    const list = facts(entries);
    return list.children.length ? card("Code", list, code ? null : h("p", { class: "rp-empty" }, "No version of the code was recorded.")) : null;
  }

  function drawEnvironment() {
    const environment = details.environment;
    if (!environment || (typeof environment === "object" && !Object.keys(environment).length)) return null;
    if (typeof environment !== "object") return card("Environment", longText(environment));
    return card("Environment", facts(Object.entries(environment).map(([key, value]) => [key.replaceAll("_", " "),
      value === null || value === undefined ? null : typeof value === "object" ? (Array.isArray(value) ? value.join(", ") : JSON.stringify(value)) : String(value)])));
  }

  function drawHangs() {
    const reports = details.hang_reports || details.hangs || [];
    if (!reports.length) return null;
    return h("section", { class: "rp-card rp-wide" }, h("h3", null, "Where ranks stood"),
      ...reports.map((report, i) => h("details", null,
        h("summary", { "data-key": `hang-${i}` }, typeof report === "string" ? `report ${i + 1}` : [report.title || report.name || `report ${i + 1}`, report.t ? formatTime(report.t, true) : ""].filter(Boolean).join(" · ")),
        h("pre", { class: "rp-pre", tabindex: "0" }, longText(typeof report === "string" ? report : report.text || report.path || "", "", 20_000)))));
  }

  // --- settings ---

  function mountSettings(place) {
    const input = h("input", { class: "lv-find", type: "search", placeholder: "Search settings", "aria-label": "Search settings", value: store.view.setting || "", autocomplete: "off", spellcheck: "false" });
    const only = h("input", { type: "checkbox", checked: store.view.changed === "1" });
    const count = h("span", { class: "rp-dim", role: "status", "aria-live": "polite" });
    const other = h("input", { class: "lv-find rp-with", type: "search", list: "rp-runs", placeholder: "Compare with a run …", "aria-label": "Compare with another run", autocomplete: "off" });
    const runs = h("datalist", { id: "rp-runs" });
    const compared = h("div", { class: "rp-compared" });
    const table = h("div", { class: "rp-settings" });
    place.append(h("div", { class: "lv-bar" }, h("div", { class: "lv-group lv-search" }, input, count),
      h("div", { class: "lv-group" }, h("label", { class: "rp-check" }, only, "only what is not the default"), other, runs)), compared, table);
    let shownKey = "";
    let comparedKey = "";

    function listSettings() {
      const settings = details?.settings;
      const defaults = store.meta?.defaults || {};
      if (Array.isArray(settings)) {
        return settings.map((each) => ({ name: each.name ?? each.key, value: each.value, isChanged: Boolean(each.is_changed ?? each.changed ?? (each.is_default === false)), normal: each.default }));
      }
      const own = new Set(details?.non_defaults || details?.changed || Object.keys(getRow()?.settings || {}));
      const known = settings && Object.keys(settings).length ? settings : { ...defaults, ...getRow()?.settings };
      return Object.entries(known).map(([name, value]) => ({ name, value, isChanged: own.has(name), normal: defaults[name] }));
    }

    function draw() {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const all = listSettings();
      const key = JSON.stringify([all, words, only.checked]);
      if (key === shownKey) return;
      shownKey = key;
      const shown = all.filter(({ name, value, isChanged }) => (!only.checked || isChanged)
        && words.every((word) => `${name}=${formatSetting(value)}`.toLowerCase().includes(word)));
      count.textContent = `${shown.length} of ${all.length}, ${all.filter((each) => each.isChanged).length} not the default`;
      table.replaceChildren(shown.length ? h("table", { class: "rp-table rp-setting-table" },
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), h("th", { scope: "col" }, "Value"), h("th", { scope: "col" }, "Default"))),
        h("tbody", null, ...shown.map(({ name, value, isChanged, normal }) => h("tr", { class: isChanged ? "rp-changed" : null },
          h("th", { scope: "row", dir: "auto" }, isChanged ? h("span", { class: "rp-dot", title: "not the default", role: "img", "aria-label": "not the default" }) : null, cleanText(name.slice(0, 200))),
          h("td", null, longText(formatSetting(value), "rp-mono", 300)),
          h("td", { class: "rp-dim" }, isChanged && normal !== undefined ? longText(formatSetting(normal), "rp-mono", 100) : "")))))
        : h("p", { class: "rp-empty" }, all.length ? "No setting has that." : "No settings were recorded."));
    }

    async function drawCompared() {
      const otherId = store.view.with || "";
      if (comparedKey === `${id}|${otherId}`) return;
      comparedKey = `${id}|${otherId}`;
      const otherName = store.rows.get(otherId)?.name || nameOfId(otherId);
      other.value = otherId ? otherName : "";
      if (!otherId) {
        compared.replaceChildren();
        return;
      }
      try {
        const answer = await getJson(getRunPath(id, "/settings"), { with: otherId });
        if (comparedKey !== `${id}|${otherId}`) return;
        const mine = getRow()?.name || nameOfId(id);
        const close = h("button", { class: "rp-button", type: "button", "aria-label": "End the comparison", onclick: () => store.setView({ with: null }, { replace: true }) }, icon("close"));
        const missing = (value) => (value === null || value === undefined ? h("span", { class: "rp-dim" }, "–") : longText(formatSetting(value), "rp-mono", 300));
        compared.replaceChildren(h("section", { class: "rp-card rp-wide" },
          h("div", { class: "rp-line" }, h("h3", null, answer.differ.length ? `${answer.differ.length} settings differ, ${answer.same} are the same` : `All ${answer.same} settings are the same`), close),
          answer.differ.length ? h("table", { class: "rp-table rp-setting-table" },
            h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), h("th", { scope: "col", dir: "auto" }, cleanText(mine.slice(0, 80))),
              h("th", { scope: "col", dir: "auto" }, cleanText(otherName.slice(0, 80))))),
            h("tbody", null, ...answer.differ.map((each) => h("tr", null, h("th", { scope: "row" }, cleanText(each.name.slice(0, 200))),
              h("td", null, missing(each.mine)), h("td", { class: "rp-theirs" }, missing(each.theirs)))))) : null));
      } catch (error) {
        compared.replaceChildren(renderError(error));
      }
    }

    function offerRuns() {
      const text = other.value.toLowerCase();
      const found = [...store.rows.values()].filter((row) => row.id !== id && row.name.toLowerCase().includes(text)).slice(0, 40);
      runs.replaceChildren(...found.map((row) => h("option", { value: row.name }, [row.experiment, row.state].filter(Boolean).join(", "))));
      const exact = [...store.rows.values()].find((row) => row.id !== id && row.name === other.value);
      if (exact) store.setView({ with: exact.id }, { replace: true });
      else if (!other.value) store.setView({ with: null }, { replace: true });
    }

    other.addEventListener("input", offerRuns);
    other.addEventListener("focus", offerRuns);
    other.addEventListener("keydown", (event) => event.stopPropagation());
    input.addEventListener("keydown", (event) => event.stopPropagation());
    input.addEventListener("input", () => {
      store.setView({ setting: input.value || null }, { replace: true });
      draw();
    });
    only.addEventListener("change", () => {
      store.setView({ changed: only.checked ? "1" : null }, { replace: true });
      draw();
    });
    draw();
    drawCompared();
    return {
      onDetails: draw,
      update(kind) {
        if (kind === "view") drawCompared();
      },
    };
  }

  // --- snapshots, traces, plan ---

  function drawSnapshots() {
    const list = [...(details.snapshots || [])].sort((a, b) => b.step - a.step);
    if (!list.length) return h("p", { class: "rp-empty" }, "No snapshot was saved yet.");
    const sum = list.reduce((total, each) => total + (each.bytes || 0), 0);
    const most = Math.max(...list.map((each) => each.bytes || 0), 1);
    return [
      h("p", { class: "rp-dim rp-lead" }, `${list.length} ${list.length === 1 ? "snapshot" : "snapshots"}, ${formatBytes(sum)}. Each is the whole state of the run at a step.`),
      h("table", { class: "rp-table rp-snapshots" },
        h("thead", null, h("tr", null, h("th", { scope: "col", class: "rp-num" }, "Step"), h("th", { scope: "col" }, ""), h("th", { scope: "col", class: "rp-num" }, "Size"),
          h("th", { scope: "col" }, "Saved"), h("th", { scope: "col", class: "rp-folder" }, "Folder"), h("th", { scope: "col" }, ""))),
        h("tbody", null, ...list.map((each) => {
          const bar = h("i", { class: "rp-bar" });
          bar.style.width = `${Math.max(2, (60 * (each.bytes || 0)) / most)}px`;
          const saved = each.time ?? each.saved ?? each.t;
          return h("tr", null, h("th", { scope: "row", class: "rp-num" }, String(each.step)),
            h("td", null, each.best ? h("span", { class: "rp-best" }, "★ best") : ""),
            h("td", { class: "rp-num" }, formatBytes(each.bytes), bar),
            h("td", { class: "rp-dim" }, typeof saved === "number" ? formatTime(saved) : ""),
            h("td", { class: "rp-folder rp-dim" }, longText(each.folder || "", "rp-mono", 200)),
            h("td", { class: "rp-right" }, each.resume_command
              ? copyButton(each.resume_command, "Copy the command to resume from here", each.resume_command) : ""));
        }))),
    ];
  }

  function drawTraces() {
    const list = details.traces || [];
    if (!list.length) {
      return h("p", { class: "rp-empty" }, "No profile was recorded. The setting trainer.profile records one, for example ",
        h("code", null, "trainer.profile=10"), ".");
    }
    return [
      h("p", { class: "rp-dim rp-lead" }, "Open a trace with Perfetto (ui.perfetto.dev) or chrome://tracing."),
      h("table", { class: "rp-table" },
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "File"), h("th", { scope: "col", class: "rp-num" }, "Size"), h("th", { scope: "col" }, "Written"), h("th", { scope: "col" }, ""))),
        h("tbody", null, ...list.map((each) => {
          const name = typeof each === "string" ? each : each.name;
          const written = each.time ?? each.t;
          const address = each.url || getRunPath(id, `/trace?name=${encodeURIComponent(name)}`);
          return h("tr", null, h("th", { scope: "row" }, longText(name, "rp-mono", 200)), h("td", { class: "rp-num" }, formatBytes(each.bytes)),
            h("td", { class: "rp-dim" }, typeof written === "number" ? formatTime(written) : ""),
            h("td", { class: "rp-right" }, h("a", { class: "rp-button", href: address, download: name.split("/").pop() }, "Download")));
        }))),
    ];
  }

  function drawPlan() {
    const text = typeof details.plan === "string" ? details.plan : details.plan ? JSON.stringify(details.plan, null, 2) : "";
    if (!text) return h("p", { class: "rp-empty" }, "No plan is known of this run.");
    return [h("div", { class: "rp-line" }, h("span", { class: "rp-dim" }, "What its launcher does with these settings."), copyButton(text)),
      h("pre", { class: "rp-pre", tabindex: "0", "aria-label": "Plan" }, longText(text, "", 50_000))];
  }

  // --- reading ---

  async function readDetails() {
    clearTimeout(timer);
    timer = 0;
    if (waiting) return;
    const asked = id;
    waiting = getJson(getRunPath(id));
    try {
      const answer = await waiting;
      if (isGone || asked !== id) return;
      details = { ...answer.details, row: answer.row || answer.details?.row };
      fault = null;
      if (details.row && !store.rows.has(id)) lastState = lastState || details.row.state;
      setCounts();
      child?.onDetails?.();
    } catch (error) {
      if (isGone || asked !== id) return;
      fault = error.status === 404 ? Object.assign(error, { message: "This run is not there any more", hint: details ? "what was known of it is still shown" : error.hint }) : error;
      if (!details && !child?.onDetails) panel.classList.toggle("rp-empty", false);
      timer = setTimeout(readDetails, RETRY_MS);
    } finally {
      waiting = null;
      fetchedAt = performance.now();
    }
    renderHead();
  }

  function readLater() {
    if (timer || waiting) return;
    timer = setTimeout(readDetails, Math.max(50, fetchedAt + DETAILS_EVERY_MS - performance.now()));
  }

  let rowKey = "";
  function onRows() {
    const row = store.rows.get(id);
    const key = row ? `${row.state}|${row.step}|${row.updated}|${row.note?.length}` : "gone";
    renderHead();
    if (key === rowKey) return;
    const isFirst = rowKey === "";
    rowKey = key;
    if (!isFirst) readLater();
  }

  function open() {
    id = store.view.run;
    details = null;
    fault = null;
    lastState = null;
    rowKey = "";
    waiting = null;
    badge.dataset.state = why.dataset.text = tags.dataset.key = "";
    note.noted = null;
    delete note.dataset.edits;
    renderHead();
    renderTabs();
    renderTab();
    readDetails();
    onRows();
  }

  const clock = setInterval(renderHead, 5000);
  open();

  return {
    update(kind) {
      if (kind === "view") {
        if (store.view.run !== id) {
          open();
          return;
        }
        renderTabs();
        renderTab();
      }
      if (kind === "rows") onRows();
      if (kind === "metrics") readLater();
      child?.update?.(kind);
    },
    unmount() {
      isGone = true;
      clearInterval(clock);
      clearTimeout(timer);
      child?.unmount?.();
      element.replaceChildren();
    },
  };
}

export function meter(share, text) {
  const fill = h("i");
  fill.style.width = `${Math.max(0, Math.min(100, share * 100)).toFixed(1)}%`;
  return h("div", { class: "rp-meter" }, h("span", { class: "rp-meter-bar", "aria-hidden": "true" }, fill), h("span", null, text));
}

function formatMs(ms) {
  if (typeof ms !== "number") return "–";
  return ms >= 1000 ? `${(ms / 1000).toPrecision(3)} s` : `${Number(ms.toPrecision(3))} ms`;
}

/** Return the store as views of many runs see it, with one run (or some) alone in it. */
export function limitToRun(store, getRow) {
  return limitToRows(store, () => [getRow()].filter(Boolean));
}

/** Return the store with these rows alone as what is visible and drawn. */
export function limitToRows(store, getRows) {
  const own = {
    getVisibleRows: getRows,
    getShownRows: getRows,
    getCandidates: getRows,
    getGroups: () => null,
    getShownIds: () => new Set(getRows().map((row) => row.id)),
  };
  return new Proxy(store, {
    get(target, key) {
      if (Object.hasOwn(own, key)) return own[key];
      const value = Reflect.get(target, key, target);
      return typeof value === "function" ? value.bind(target) : value;
    },
  });
}
