// The page of one run: its head, and tabs for results, curves, settings, time line, logs, snapshots, media,
// traces and the plan. What a run says of itself is text, however long and whatever is in it.

import { stripAnsi } from "./ansi.js";
import { getJson, getRunPath, importPart, postJson } from "./api.js";
import { formatAge, formatDuration, formatNumber, formatTime, h, icon } from "./dom.js";
import { drawOverview, drawSnapshots, drawTraces, showPlan } from "./run_overview.js";
import { OWN_KEYS, cleanText, limitToRows, longText, renderError, stateBadge } from "./run_parts.js";
import { mountSettings } from "./run_settings.js";

const TABS = [
  ["overview", "Overview"], ["curves", "Curves"], ["settings", "Settings"], ["timeline", "Time line"], ["logs", "Logs"],
  ["snapshots", "Snapshots"], ["media", "Media"], ["traces", "Traces"], ["plan", "Plan"],
];
const TABS_OF_OTHERS = new Set(["overview", "curves", "settings", "media"]); // what other programs leave of a run
const DETAILS_EVERY_MS = 3000;
const RETRY_MS = 4000;

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
  const isOther = () => /^\d+:[^:]+:/.test(id || "");
  const listTabs = () => (isOther() ? TABS.filter(([key]) => TABS_OF_OTHERS.has(key)) : TABS);
  const getTab = () => (listTabs().some(([key]) => key === store.view.tab) ? store.view.tab : "overview");

  // --- the head ---

  const title = h("h2", { class: "rp-name", dir: "auto" });
  const badge = h("span", { class: "rp-badge" });
  const source = h("span", { class: "rp-source" });
  const progress = h("div", { class: "rp-progress", role: "progressbar", "aria-label": "Steps done", "aria-valuemin": "0" }, h("i"));
  const progressText = h("span", { class: "rp-progress-text" });
  const times = h("span", { class: "rp-times" });
  const why = h("div", { class: "rp-why" });
  const tagInput = h("input", { class: "rp-tag-input", type: "text", placeholder: "+ tag", "aria-label": "Add a tag", maxlength: "80", autocomplete: "off", hidden: true });
  const tags = h("div", { class: "rp-tags", role: "group", "aria-label": "Tags" }, tagInput);
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
    page.classList.toggle("rp-missing", !row && fault?.status === 404);
    progress.hidden = !row;
    if (!row) return;
    if (badge.dataset.state !== row.state) {
      badge.dataset.state = row.state;
      badge.replaceChildren(stateBadge(row.state));
      if (lastState && lastState !== row.state) {
        live.textContent = `The run is ${row.state} now${row.why ? `: ${stripAnsi(row.why.slice(0, 200))}` : ""}`;
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
      why.replaceChildren(...(row.why ? [longText(stripAnsi(row.why), `rp-why-${/fail|lost|kill/.test(row.state) ? "bad" : "plain"}`, 400)] : []));
    }
    renderTags(row);
    renderNote(row);
  }

  const nameOfId = (text) => String(text || "").replace(/^\d+:/, "");

  async function renderActs(row) {
    acts.replaceChildren();
    if (!store.meta?.can_act || (row.source && row.source !== "echelon")) return;
    const { getActions, openAction } = await importPart("./act.js");
    if (isGone || getRow()?.state !== row.state) return;
    acts.replaceChildren(...getActions(row).map(({ action, label, hint }) =>
      h("button", { class: `rp-button rp-act-${action}`, type: "button", title: hint, onclick: () => openAction(store, action, [id], { details }) }, label)));
  }

  // --- tags and note ---

  async function annotate(change) {
    try {
      const row = await postJson(getRunPath(id, "/annotations"), change);
      if (details && "note" in change) details.user_note = change.note;
      if (row?.id) store.applyRows({ changed: [row] });
      fault = null;
    } catch (error) {
      fault = error;
    }
    tags.dataset.key = note.dataset.key = "";
    renderHead();
  }

  const isOurs = (row) => (!row.source || row.source === "echelon") && details?.own !== false;

  function renderTags(row) {
    const key = JSON.stringify([row.tags, isOurs(row)]);
    if (tags.dataset.key === key) return;
    tags.dataset.key = key;
    const hadFocus = tags.contains(document.activeElement);
    tagInput.hidden = !isOurs(row);
    // The field stays as it is: somebody may be typing the next tag.
    while (tags.firstChild !== tagInput) tags.firstChild.remove();
    tagInput.before(...(row.tags || []).map((tag) =>
      h("span", { class: "rp-tag" }, h("bdi", null, cleanText(tag.slice(0, 80))),
        isOurs(row) ? h("button", { type: "button", "aria-label": `Remove the tag ${tag.slice(0, 80)}`, onclick: () => annotate({ remove_tags: [tag] }) }, "×") : null)));
    if (hadFocus) tagInput.focus();
  }

  tagInput.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Escape") tagInput.blur();
    if (event.key !== "Enter" && event.key !== ",") return;
    event.preventDefault();
    const added = tagInput.value.split(",").map((tag) => tag.trim()).filter(Boolean);
    tagInput.value = "";
    if (added.length) annotate({ add_tags: added });
  });

  function renderNote(row) {
    const text = getNote(row);
    const key = `${isOurs(row)}${Boolean(details)}${text}`;
    if (note.dataset.edits || note.noted === key) return;
    note.noted = key;
    const shown = text ? [longText(text, "rp-note-text", 300)] : [];
    if (!isOurs(row) || !details) {
      note.replaceChildren(...shown);
      return;
    }
    const edit = h("button", { class: "rp-note-edit", type: "button", "aria-label": text ? "Change the note" : "Write a note", onclick: () => editNote(text) },
      icon("note"), text ? "" : "note");
    note.replaceChildren(...shown, edit);
  }

  /** The note as it is in the folder. A row has only the start of a long one, so it cannot be edited. */
  function getNote(row) {
    return details?.user_note ?? row.note ?? "";
  }

  function editNote(text) {
    note.dataset.edits = "1";
    const area = h("textarea", { class: "rp-note-area", "aria-label": "Note", rows: "3" });
    area.value = text;
    const done = (saves) => {
      if (!note.dataset.edits) return;
      delete note.dataset.edits;
      note.noted = null;
      if (saves && area.value.trim() !== text.trim()) annotate({ note: area.value.trim() });
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
    const tabs = listTabs();
    if (tablist.children.length !== tabs.length) {
      tablist.replaceChildren(...tabs.map(([key, label]) => h("button", {
        class: "rp-tab", role: "tab", type: "button", id: `rp-tab-${key}`, "aria-controls": "rp-panel",
        onclick: () => store.setView({ tab: key === "overview" ? null : key }),
      }, label, h("span", { class: "rp-tab-count" }))));
    }
    tabs.forEach(([key], i) => {
      const button = tablist.children[i];
      button.setAttribute("aria-selected", String(key === chosen));
      button.tabIndex = key === chosen ? 0 : -1;
    });
    panel.setAttribute("aria-labelledby", `rp-tab-${chosen}`);
    const button = tablist.querySelector('[aria-selected="true"]');
    if (button && tablist.scrollWidth > tablist.clientWidth) {
      const from = button.offsetLeft - tablist.offsetLeft;
      if (from < tablist.scrollLeft || from + button.offsetWidth > tablist.scrollLeft + tablist.clientWidth) tablist.scrollLeft = from - 24;
    }
  }

  function onTabKey(event) {
    const tabs = listTabs();
    const at = tabs.findIndex(([key]) => key === getTab());
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const [key] = tabs[(to + tabs.length) % tabs.length];
    store.setView({ tab: key === "overview" ? null : key });
    tablist.querySelector(`#rp-tab-${key}`).focus();
  }

  function setCounts() {
    const traces = details?.files?.filter((file) => file.kind === "trace");
    const counts = { snapshots: details?.snapshots?.length, traces: traces?.length, timeline: details?.timeline?.length };
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
    const oneRun = limitToRows(store, () => [getRow()].filter(Boolean));
    if (tab === "curves" || tab === "media") {
      const module = await importPart(tab === "curves" ? "./curves.js" : "./media.js");
      const made = module.mount(place, oneRun);
      return { update: (kind) => made.update?.(kind), unmount: () => made.unmount?.() };
    }
    if (tab === "logs") {
      const { mountLogs } = await importPart("./log_view.js");
      return mountLogs(place, store, id);
    }
    if (tab === "timeline") {
      const { mountTimeline } = await importPart("./timeline.js");
      const made = mountTimeline(place);
      return { onDetails: () => details && made.setDetails(details, getRow()), unmount: made.unmount };
    }
    if (tab === "settings") return mountSettings(place, store, { id, getDetails: () => details });
    if (tab === "plan") {
      showPlan(place, id, () => details);
      return {};
    }
    const draw = { overview: drawOverview, snapshots: drawSnapshots, traces: drawTraces }[tab];
    return {
      onDetails() {
        if (!details) return;
        const key = JSON.stringify([details, getRow()?.state]);
        if (place.drawn === key) return; // and what a person has opened or chosen stays
        place.drawn = key;
        const active = document.activeElement?.dataset?.key;
        place.replaceChildren(...draw(details, getRow() || {}, id).filter(Boolean));
        if (active) place.querySelector(`[data-key="${CSS.escape(active)}"]`)?.focus();
      },
    };
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
      details = { ...answer.details, row: answer.row };
      fault = null;
      if (details.row && !store.rows.has(id)) lastState = lastState || details.row.state;
      setCounts();
      child?.onDetails?.();
    } catch (error) {
      if (isGone || asked !== id) return;
      fault = error;
      if (error.status === 404 && details) {
        fault.message = "This run is not there any more";
        fault.hint = "what was known of it is still shown";
      }
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
    const key = row ? `${row.state}|${row.step}|${row.updated}|${row.note}` : "gone";
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

  /** Take what belongs to this run out of the address of the page that comes after it. */
  function forgetKeys() {
    const { page, run } = store.view;
    const kept = page === "run" ? ["run", "tab"] : [];
    const stale = OWN_KEYS.filter((key) => !kept.includes(key) && ownView[key] !== undefined && store.view[key] === ownView[key]);
    if (!stale.length || (page === "run" && run === id)) return;
    queueMicrotask(() => store.setView(Object.fromEntries(stale.map((key) => [key, null])), { replace: true }));
  }

  let ownView = store.view;
  tablist.addEventListener("keydown", onTabKey);
  const clock = setInterval(renderHead, 5000);
  open();

  return {
    update(kind) {
      if (kind === "view") {
        if (store.view.page !== "run") return; // it is about to be unmounted
        if (store.view.run === id) ownView = store.view;
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
      forgetKeys();
      clearInterval(clock);
      clearTimeout(timer);
      child?.unmount?.();
      element.replaceChildren();
    },
  };
}
