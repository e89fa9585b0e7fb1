// What is known of one run at a glance: results, where its time went, machines, code; and its snapshots,
// traces and plan.

import { renderLine } from "./ansi.js";
import { getJson, getRunPath } from "./api.js";
import { formatAge, formatBytes, formatDuration, formatNumber, formatSetting, formatTime, h } from "./dom.js";
import { card, cleanText, copyButton, facts, isKnown, longText, renderError, stackedBar } from "./run_parts.js";

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
const SHOWN_FILES = 60;
const SHOWN_MACHINES = 60;

/** Return the parts of the first tab. */
export function drawOverview(details, row, id) {
  const cards = [
    drawResults(details, row), drawSpeed(details), drawTime(details), drawMemory(details), drawStragglers(details), drawMachines(details, row),
    drawCode(details), drawEnvironment(details), drawFiles(details, row),
  ];
  return [drawFailure(details), drawCommands(details), h("div", { class: "rp-cards" }, cards), drawHangs(details, id)];
}

function drawFailure({ failure }) {
  if (!failure || !(failure.summary || failure.detail)) return null;
  const where = [
    isKnown(failure.rank) ? `rank ${failure.rank}` : "", failure.host ? `on ${failure.host}` : "", isKnown(failure.step) ? `at step ${failure.step}` : "",
  ].filter(Boolean).join(" ");
  const text = h("pre", { class: "rp-pre lv-body", tabindex: "0", "aria-label": "What was raised" });
  for (const line of String(failure.detail || "").slice(0, 100_000).trimEnd().split("\n")) {
    const place = h("div", null);
    renderLine(place, line || " ");
    text.append(place);
  }
  return h("section", { class: "rp-card rp-failure" }, h("div", { class: "rp-line" }, h("h3", null, "First failure"), h("span", { class: "rp-dim" }, where),
    failure.detail ? copyButton(failure.detail) : null), failure.detail ? text : longText(failure.summary));
}

function drawCommands(details) {
  const known = [
    ["train anew", details.command], ["go on", details.resume_command], ["end it", details.cancel_command], ["logs", details.logs_command],
  ].filter(([, text]) => text);
  if (!known.length) return null;
  return h("section", { class: "rp-commands", "aria-label": "Commands" }, known.map(([label, text]) =>
    h("div", { class: "rp-command" }, h("span", { class: "rp-command-label" }, label), h("code", { dir: "ltr" }, longText(text, "", 400)),
      copyButton(text, "Copy", `Copy the command: ${label}`))));
}

function drawResults(details, row) {
  const metrics = Object.entries(details.metrics || {}).filter(([name]) => !SPEED_METRICS.has(name)).map(([name, each]) => {
    const is = each.is ?? row.metrics?.[name]?.[4];
    return [name, { ...each, is, best: each.best ?? (is === "max" ? each.max : each.min) }];
  });
  if (!metrics.length) return card("Results", h("p", { class: "rp-empty" }, "No numbers yet."));
  const body = metrics.map(([name, each]) => {
    const hasBest = name !== "lr" && isKnown(each.best);
    return h("tr", { class: name === row.best_name ? "rp-main-metric" : null },
      h("th", { scope: "row", dir: "auto" }, cleanText(name.slice(0, 120))),
      h("td", { class: "rp-num" }, hasBest ? `${formatNumber(each.best)} ${each.is === "max" ? "↑" : "↓"}` : ""),
      h("td", { class: "rp-num rp-dim" }, hasBest && isKnown(each.best_step) ? String(each.best_step) : ""),
      h("td", { class: "rp-num" }, formatNumber(each.last)));
  });
  return card("Results", h("table", { class: "rp-table", "aria-label": "Results" },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "Metric"), h("th", { scope: "col", class: "rp-num", title: "↑ more is better, ↓ less is better" }, "Best"),
      h("th", { scope: "col", class: "rp-num" }, "at step"), h("th", { scope: "col", class: "rp-num" }, "Last"))),
    h("tbody", null, body)));
}

function drawSpeed({ speed = {} }) {
  const step = speed.step_ms;
  const parts = STEP_PARTS.filter(([key]) => isKnown(speed[key]))
    .map(([key, label], i) => ({ label, value: speed[key], text: formatMs(speed[key]), kind: i }));
  const known = parts.reduce((sum, part) => sum + part.value, 0);
  if (isKnown(step) && parts.length && step - known > step * 0.02) parts.push({ label: "other", value: step - known, text: formatMs(step - known), kind: 5 });
  const numbers = facts([
    ["a step", isKnown(step) ? formatMs(step) : null],
    ["samples", isKnown(speed.samples_per_s) ? `${Math.round(speed.samples_per_s).toLocaleString("en")} /s` : null],
    ["of the peak FLOPS", isKnown(speed.mfu) ? `${(speed.mfu * 100).toFixed(1)} %` : null],
  ]);
  if (!parts.length && !numbers.children.length) return null;
  return card("Speed of a step", parts.length ? stackedBar(parts, "A step") : null, numbers);
}

function drawTime({ accounting: time }) {
  if (!time) return null;
  const parts = [{ label: "steps that were kept", value: time.effective_s || 0, text: formatDuration(time.effective_s), kind: 3 }];
  Object.entries(time.lost_s || {}).forEach(([cause, value], i) => {
    if (value > 0) parts.push({ label: LOSS_LABELS[cause] || cause.replaceAll("_", " "), value, text: formatDuration(value), kind: `L${i % 6}` });
  });
  const count = (number, noun) => (number ? `${number} ${noun}${number === 1 ? "" : "s"}` : "");
  const hosts = Object.entries(time.losses_by_host || {}).map(([host, n]) => `${host} ${n} ×`).join(", ");
  return card("Time", stackedBar(parts, "Time since the first start"), facts([
    ["effective", isKnown(time.effective_share) ? `${(time.effective_share * 100).toFixed(1)} % of ${formatDuration(time.wall_s)}` : null],
    ["starts", [count(time.starts, "start"), count(time.restarts, "restart"), count(time.requeues, "requeue")].filter(Boolean).join(", ")],
    ["ranks", [time.lost_ranks ? `${time.lost_ranks} lost` : "", time.replaced_ranks ? `${time.replaced_ranks} replaced` : ""].filter(Boolean).join(", ")],
    ["made again", count(time.steps_redone, "step")],
    ["with fewer processes", time.fewer_processes_s ? formatDuration(time.fewer_processes_s) : null],
    ["losses", hosts],
  ]));
}

function drawMemory({ memory }) {
  if (!memory) return null;
  return card("Memory", facts([
    ["now", formatBytes(memory.last_gb * 1e9)],
    ["most", `${formatBytes(memory.max_gb * 1e9)}${isKnown(memory.max_step) ? ` at step ${memory.max_step}` : ""}`],
  ]));
}

function drawStragglers({ stragglers = [], speed = {}, accounting }) {
  const slow = stragglers.map((each) => `rank ${each.rank} on ${each.host}: ${formatNumber(each.factor)} × the median, from step ${each.step} `
    + (isKnown(each.until_step) ? `to ${each.until_step}` : "on"));
  const bad = (accounting?.bad_machines || []).map((each) => `${each.host}: ${each.reason} at step ${each.step}; `
    + (each.is_left_out ? `left out${each.replaced_by ? `, ${each.replaced_by} took over` : ""}` : `kept, since ${each.kept_because || "nothing else was there"}`));
  const isSlow = isKnown(speed.slowest_x) && speed.slowest_x > 1.05;
  if (!slow.length && !bad.length && !isSlow) return null;
  return card("Stragglers",
    isSlow ? facts([["slowest now", `rank ${speed.slowest_rank}: ${formatNumber(speed.slowest_x)} × the median`]]) : null,
    slow.length + bad.length ? h("ul", { class: "rp-list" }, [...slow, ...bad].map((text) => h("li", null, longText(text)))) : null);
}

function drawMachines({ machines = [] }, row) {
  const size = row.nodes && row.processes ? `${row.nodes} ${row.nodes === 1 ? "node" : "nodes"}, ${row.processes} ${row.processes === 1 ? "process" : "processes"}` : "";
  const list = machines.slice(0, SHOWN_MACHINES).map((each) => h("li", null, h("b", { dir: "auto" }, cleanText(String(each.host).slice(0, 120))), " ",
    h("span", { class: "rp-dim" }, [
      [each.launcher, each.job ? `job ${each.job}` : ""].filter(Boolean).join(" "), isKnown(each.since) ? `since ${formatTime(each.since)}` : "",
      each.losses ? `${each.losses} ${each.losses === 1 ? "loss" : "losses"}` : "",
    ].filter(Boolean).join(" · "))));
  if (machines.length > SHOWN_MACHINES) list.push(h("li", { class: "rp-dim" }, `and ${machines.length - SHOWN_MACHINES} more`));
  if (!size && !list.length) return null;
  return card("Machines", facts([["launcher", [row.launcher, row.job ? `job ${row.job}` : ""].filter(Boolean).join(", ")], ["size", size]]),
    list.length ? h("ul", { class: "rp-list" }, list) : null);
}

function drawCode(details) {
  const code = details.code || {};
  const program = Array.isArray(details.program) ? details.program.join(" ") : details.program;
  const list = facts([
    ["experiment", details.experiment], ["entry", code.entry || details.entry], ["program", program], ["commit", code.commit], ["copy of the code", code.folder],
    ["files", isKnown(code.files) ? `${code.files}${isKnown(code.bytes ?? code.size_bytes) ? `, ${formatBytes(code.bytes ?? code.size_bytes)}` : ""}` : null],
  ]);
  if (!list.children.length) return null;
  return card("Code", list, code.commit || code.folder ? null : h("p", { class: "rp-empty" }, "No version was recorded: only a submitted run has a copy of its code."));
}

function drawEnvironment({ environment = {} }) {
  const list = facts(Object.entries(environment).map(([key, value]) => [key, Array.isArray(value) ? value.join("\n") : isKnown(value) ? formatSetting(value) : null]));
  return list.children.length ? card("Environment", list) : null;
}

function drawFiles(details, row) {
  const files = details.files || [];
  const mirror = details.mirror;
  const list = files.slice(0, SHOWN_FILES).map((file) => h("tr", null, h("th", { scope: "row" }, longText(file.name, "rp-mono", 100)),
    h("td", { class: "rp-num" }, formatBytes(file.bytes)), h("td", { class: "rp-num rp-dim" }, isKnown(file.changed) ? `${formatAge(file.changed)} ago` : "")));
  return card("Files", facts([
    ["folder", row.folder || details.folder],
    ["mirror", mirror ? `${mirror.url} ${isKnown(mirror.step) ? `at step ${mirror.step}` : "empty"}${mirror.problem ? `; newer ones are not: ${mirror.problem}` : ""}` : null],
  ]), list.length ? h("div", { class: "rp-files" }, h("table", { class: "rp-table", "aria-label": "Files" }, h("tbody", null, list))) : null,
  files.length > SHOWN_FILES ? h("p", { class: "rp-empty" }, `and ${files.length - SHOWN_FILES} more`) : null);
}

function drawHangs(details, id) {
  const reports = (details.files || []).filter((file) => file.kind === "hang");
  if (!reports.length) return null;
  return h("section", { class: "rp-card rp-hangs" }, h("h3", null, "Where all ranks stood when one was hanging"), reports.map((file) => drawFile(id, file)));
}

/** Return a file of a run that is read when it is opened. */
function drawFile(id, file, isOpen = false) {
  const place = h("div", null);
  const read = async () => {
    if (place.children.length) return;
    try {
      const answer = await fetch(getRunPath(id, `/file?name=${encodeURIComponent(file.name)}`));
      if (!answer.ok) throw new Error((await answer.json()).error || "it cannot be read");
      const text = await answer.text();
      place.replaceChildren(h("pre", { class: "rp-pre", tabindex: "0", "aria-label": file.name }, longText(text, "", 50_000)), copyButton(text));
    } catch (error) {
      place.replaceChildren(renderError(error));
    }
  };
  const holder = h("details", { open: isOpen, ontoggle: () => holder.open && read() },
    h("summary", { "data-key": file.name }, cleanText(file.name), h("span", { class: "rp-dim" }, ` ${formatBytes(file.bytes)}`)), place);
  return holder;
}

/** Return the table of snapshots. */
export function drawSnapshots({ snapshots = [] }) {
  const list = [...snapshots].sort((a, b) => b.step - a.step);
  if (!list.length) return [h("p", { class: "rp-empty" }, "No snapshot was saved yet.")];
  const most = Math.max(...list.map((each) => each.bytes || 0), 1);
  const total = list.reduce((sum, each) => sum + (each.bytes || 0), 0);
  const body = list.map((each) => {
    const bar = h("i", { class: "rp-bar" });
    bar.style.width = `${Math.max(2, (50 * (each.bytes || 0)) / most)}px`;
    return h("tr", null, h("th", { scope: "row", class: "rp-num" }, String(each.step)), h("td", null, each.best ? h("span", { class: "rp-best" }, "★ best") : ""),
      h("td", { class: "rp-num" }, formatBytes(each.bytes)), h("td", { class: "rp-folder" }, bar), h("td", { class: "rp-dim" }, isKnown(each.saved) ? formatTime(each.saved, true) : ""),
      h("td", { class: "rp-folder rp-dim" }, longText(each.folder || "", "rp-mono", 200)),
      h("td", { class: "rp-right" }, each.resume_command ? copyButton(each.resume_command, "Copy the command to resume from here", each.resume_command) : ""));
  });
  return [
    h("p", { class: "rp-dim rp-lead" }, `${list.length} ${list.length === 1 ? "snapshot" : "snapshots"}, ${formatBytes(total)}`),
    h("table", { class: "rp-table rp-snapshots", "aria-label": "Snapshots" }, h("thead", null, h("tr", null, h("th", { scope: "col", class: "rp-num" }, "Step"), h("th", { scope: "col", "aria-label": "Best" }),
      h("th", { scope: "col", class: "rp-num" }, "Size"), h("th", { scope: "col", class: "rp-folder", "aria-label": "Size as a bar" }), h("th", { scope: "col" }, "Saved"),
      h("th", { scope: "col", class: "rp-folder" }, "Folder"), h("th", { scope: "col", "aria-label": "Command" }))), h("tbody", null, body)),
  ];
}

/** Return the table of profile traces. */
export function drawTraces({ files = [] }, row, id) {
  const list = files.filter((file) => file.kind === "trace");
  if (!list.length) return [h("p", { class: "rp-empty" }, "No profile was recorded. The setting ", h("code", null, "trainer.profile"), " records one.")];
  const body = list.map((file) => h("tr", null, h("th", { scope: "row" }, longText(file.name, "rp-mono", 200)), h("td", { class: "rp-num" }, formatBytes(file.bytes)),
    h("td", { class: "rp-dim" }, isKnown(file.changed) ? formatTime(file.changed, true) : ""),
    h("td", { class: "rp-right" }, h("a", { class: "rp-button", href: getRunPath(id, `/file?name=${encodeURIComponent(file.name)}`), download: "" }, "Download"))));
  return [
    h("p", { class: "rp-dim rp-lead" }, "Perfetto (ui.perfetto.dev) and chrome://tracing open them."),
    h("table", { class: "rp-table", "aria-label": "Traces" }, h("thead", null, h("tr", null, h("th", { scope: "col" }, "File"), h("th", { scope: "col", class: "rp-num" }, "Size"),
      h("th", { scope: "col" }, "Written"), h("th", { scope: "col", "aria-label": "Download" }))), h("tbody", null, body)),
  ];
}

/** Show the plan of the run's launcher, and the batch script where there is one. */
export async function showPlan(place, id, getDetails) {
  let text = "";
  try {
    text = (await getJson(getRunPath(id, "/plan"))).text || "";
  } catch (error) {
    place.append(renderError(error));
  }
  if (text) {
    place.append(h("div", { class: "rp-line" }, h("span", { class: "rp-dim" }, "What its launcher does with these settings"), copyButton(text)),
      h("pre", { class: "rp-pre", tabindex: "0", "aria-label": "Plan" }, longText(text, "", 50_000)));
  }
  for (const file of (getDetails()?.files || []).filter((each) => each.kind === "script")) place.append(drawFile(id, file, true));
}


function formatMs(ms) {
  return ms >= 1000 ? `${(ms / 1000).toPrecision(3)} s` : `${Number(ms.toPrecision(3))} ms`;
}
