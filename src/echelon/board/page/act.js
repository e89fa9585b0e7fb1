// Acting on runs. The plan and the exact command are shown first; only then can it be confirmed, once.

import { stripAnsi } from "./ansi.js";
import { postJson } from "./api.js";
import { openDialog } from "./dialogs.js";
import { formatSetting, h } from "./dom.js";
import { cleanText, copyButton, longText, renderError, showRun } from "./run_parts.js";

const ACTIONS = {
  stop: { label: "Stop", title: "Stop", does: "The run saves at its next step, and ends. It can be resumed.", confirm: "Stop it", isDanger: true },
  cancel: { label: "Cancel", title: "Cancel", does: "The run is ended at once, without saving; what waits in a queue is taken out of it.", confirm: "Cancel it", isDanger: true },
  resume: { label: "Resume", title: "Resume", does: "The run goes on from its newest snapshot.", confirm: "Resume it", takesSettings: true },
  requeue: { label: "Requeue", title: "Queue again", does: "The run saves, and goes on in another job.", confirm: "Queue it again" },
  submit: { label: "Submit again …", title: "Submit again with changed settings", does: "A new run with the settings of this one and the changes below.", confirm: "Submit it", takesSettings: true },
};
const ACTIVE = new Set(["starting", "running", "queued", "stopping"]);
const MAX_SHOWN = 20_000;

/** Return what can be done with a run in its state: `[{action, label, hint}]`. */
export function getActions(row) {
  const isSlurm = row.launcher === "slurm";
  const names = ACTIVE.has(row.state)
    ? [...(row.state === "queued" ? [] : ["stop"]), "cancel", ...(isSlurm && row.state === "running" ? ["requeue"] : []), "submit"]
    : ["resume", ...(isSlurm ? ["requeue"] : []), "submit"];
  return names.map((action) => ({ action, label: ACTIONS[action].label, hint: ACTIONS[action].does }));
}

/** Ask for the plan of an action on runs, show it, and carry it out when it is confirmed. */
export function openAction(store, action, ids, { details } = {}) {
  const kind = ACTIONS[action];
  const rows = ids.map((id) => store.rows.get(id)).filter(Boolean);
  const names = rows.map((row) => cleanText(row.name.slice(0, 80)));
  let planned = null; // the overrides of the plan that is shown
  let isActing = false;
  let isDone = false;
  let turn = 0;
  let timer = 0;

  const plan = h("div", { class: "ac-plan", "aria-live": "polite" });
  const outcome = h("div", { class: "ac-outcome", role: "status", "aria-live": "polite" });
  const confirm = h("button", { class: `rp-button ${kind.isDanger ? "rp-danger" : "rp-primary"}`, type: "button", disabled: true, onclick: act }, kind.confirm);
  const close = h("button", { class: "rp-button", type: "button", onclick: () => dialog.close() }, "Close");
  const list = h("div", { class: "ac-overrides" });
  const settings = kind.takesSettings
    ? h("section", { "aria-label": "Changed settings" }, h("h3", null, "Changed settings"), list,
      h("button", { class: "rp-button ac-add", type: "button", onclick: () => addOverride("", "", true) }, "+ setting"), makeNames(rows, details, store))
    : null;
  const content = h("div", { class: "ac" },
    h("p", null, kind.does, " ", h("span", { class: "rp-dim" }, names.length > 3 ? `${names.length} runs: ${names.slice(0, 3).join(", ")}, …` : names.join(", "))),
    settings, plan, outcome, h("div", { class: "ac-foot" }, close, confirm));
  const { dialog } = openDialog(kind.title, content, { wide: true, onClose: () => clearTimeout(timer) });
  if (action === "submit") addOverride("", "");
  readPlan();

  function addOverride(name, value, focuses) {
    const key = h("input", { type: "text", list: "ac-names", placeholder: "setting", "aria-label": "Setting", value: name, spellcheck: "false", autocomplete: "off" });
    const text = h("input", { type: "text", placeholder: "value", "aria-label": "Value", value, spellcheck: "false", autocomplete: "off" });
    const remove = h("button", { class: "rp-button", type: "button", "aria-label": "Remove this change", onclick: () => {
      line.remove();
      readLater();
    } }, "×");
    const line = h("div", { class: "ac-override" }, key, text, remove);
    for (const input of [key, text]) {
      input.addEventListener("input", readLater);
      input.addEventListener("keydown", (event) => {
        if (event.key === "Enter") {
          event.preventDefault();
          readPlan();
        }
      });
    }
    key.addEventListener("change", () => {
      if (text.value) return;
      const known = lookUp(rows[0], details, store, key.value);
      if (known !== undefined) text.value = formatSetting(known);
      text.focus();
      text.select();
    });
    list.append(line);
    if (focuses) key.focus();
  }

  function listOverrides() {
    return [...list.children]
      .map((line) => [...line.querySelectorAll("input")].map((input) => input.value.trim()))
      .filter(([name]) => name)
      .map(([name, value]) => `${name}=${value}`);
  }

  function readLater() {
    clearTimeout(timer);
    showStale();
    timer = setTimeout(readPlan, 500);
  }

  function showStale() {
    confirm.disabled = true;
    plan.classList.add("ac-stale");
  }

  async function readPlan() {
    clearTimeout(timer);
    if (isActing || isDone) return;
    showStale();
    turn += 1;
    const asked = turn;
    const overrides = listOverrides();
    if (!plan.children.length) plan.append(h("p", { class: "rp-dim" }, "Asking what it would do …"));
    try {
      const answer = await postJson("/api/act", { action, runs: ids, overrides, confirm: false });
      if (asked !== turn) return;
      planned = overrides;
      plan.classList.remove("ac-stale");
      plan.replaceChildren(
        answer.plan ? h("section", null, h("h3", null, "What happens"), h("pre", { tabindex: "0" }, longText(stripAnsi(answer.plan), "", MAX_SHOWN))) : "",
        h("section", null, h("div", { class: "rp-line" }, h("h3", null, "Command"), h("span", { class: "rp-dim" }, answer.folder ? `in ${cleanText(answer.folder.slice(0, 200))}` : "")),
          h("div", { class: "rp-command" }, h("code", { dir: "ltr" }, longText(answer.command, "", 2000)), copyButton(answer.command))),
        answer.ok === false ? h("p", { class: "rp-bad", role: "alert" }, "This cannot be done: what it says is above.") : "");
      confirm.disabled = answer.ok === false;
    } catch (error) {
      if (asked !== turn) return;
      planned = null;
      plan.classList.remove("ac-stale");
      plan.replaceChildren(renderError(error));
    }
  }

  async function act() {
    if (isActing || isDone || planned === null || confirm.disabled) return;
    isActing = true;
    confirm.disabled = true;
    confirm.textContent = "Working …";
    for (const input of list.querySelectorAll("input, button")) input.disabled = true;
    outcome.replaceChildren();
    try {
      const answer = await postJson("/api/act", { action, runs: ids, overrides: planned, confirm: true });
      isDone = answer.ok !== false;
      outcome.replaceChildren(
        h("p", { class: isDone ? "ac-ok" : "rp-bad" }, isDone ? (answer.running ? "It was started, and runs." : "Done.") : "It did not succeed."),
        answer.output ? h("pre", { tabindex: "0" }, longText(stripAnsi(answer.output), "", MAX_SHOWN)) : "",
        ...(answer.runs || []).map((id) => h("p", null, h("button", { class: "sw-link", type: "button", onclick: () => {
          dialog.close();
          showRun(store, id);
        } }, `Open the new run ${cleanText(id.replace(/^\d+:/, "").slice(0, 80))}`))));
    } catch (error) {
      outcome.replaceChildren(renderError(error));
    }
    isActing = false;
    confirm.textContent = isDone ? "Done" : kind.confirm;
    if (isDone) {
      confirm.hidden = true;
      close.focus();
      return;
    }
    for (const input of list.querySelectorAll("input, button")) input.disabled = false;
    readPlan(); // what is shown may have changed
  }
}

function listKnown(row, details, store) {
  const own = Object.fromEntries((details?.all_settings || []).map((each) => [each.name, each.value]));
  return { ...store.meta?.defaults, ...own, ...row?.settings };
}

function lookUp(row, details, store, name) {
  return listKnown(row, details, store)[name];
}

function makeNames(rows, details, store) {
  return h("datalist", { id: "ac-names" },
    ...Object.entries(listKnown(rows[0], details, store)).slice(0, 500).map(([name, value]) => h("option", { value: name }, formatSetting(value).slice(0, 60))));
}
