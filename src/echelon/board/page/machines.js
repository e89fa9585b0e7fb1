// Machines and jobs: what waits and runs, the GPUs of here and of other hosts with their users over the
// last hour, and what preflight found. What cannot be asked is said.

import { stripAnsi } from "./ansi.js";
import { getJson } from "./api.js";
import { formatAge, formatBytes, formatDuration, formatTime, h } from "./dom.js";
import { cleanText, cutName, isKnown, longText, renderError, showRun, stateBadge } from "./run_parts.js";

const MACHINES_EVERY_MS = 5000; // as often as the server samples
const JOBS_EVERY_MS = 10000;
const HOUR_S = 3600;
const LEAST_SPAN_S = 120;
const SHOWN_JOBS = 12;
const SHOWN_PROCESSES = 12;
const SHOWN_CHECKS = 300;
const SVG = "http://www.w3.org/2000/svg";

/** Show the queue, the machines and what preflight found. */
export function mount(element, store) {
  let isGone = false;
  let showsAll = false;
  const timers = new Map();
  const status = h("span", { class: "rp-dim", role: "status", "aria-live": "polite" });
  const jobs = h("section", { "aria-label": "Jobs" });
  const machines = h("section", { "aria-label": "Machines" });
  const preflight = h("section", { "aria-label": "Preflight" });
  element.append(h("div", { class: "mc", tabindex: "-1" }, h("div", { class: "mc-head" }, h("h2", null, "Machines and jobs"), status), jobs, machines, preflight));

  async function repeat(name, path, every_ms, render, place) {
    clearTimeout(timers.get(name));
    if (!document.hidden) {
      try {
        const answer = await getJson(path);
        if (isGone) return;
        const key = JSON.stringify(answer);
        if (place.shown !== key) {
          place.shown = key;
          keepFocus(place, () => render(answer));
        }
      } catch (error) {
        if (isGone) return;
        place.shown = null;
        if (error.status || !place.children.length) place.replaceChildren(renderError(error));
      }
    }
    if (!isGone) timers.set(name, setTimeout(() => repeat(name, path, every_ms, render, place), every_ms));
  }

  function keepFocus(place, render) {
    const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    render();
    if (key) place.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
  }

  // --- jobs ---

  function renderJobs({ jobs: own = [], silence = "", queue }) {
    const waits = queue?.jobs || [];
    jobs.replaceChildren(
      h("h3", null, "Own jobs"),
      own.length ? drawTable("Own jobs", ["Run", "State", "Step", "Ready in", "Where", "Nodes", "Processes", "Started", ""], own.map((job) => [
        runLink(job.id, job.run), stateBadge(job.state), formatStep(job), isKnown(job.eta_s) ? formatDuration(job.eta_s) : "",
        [job.launcher, job.job ? `job ${job.job}` : "", job.host].filter(Boolean).join(" "), formatCell(job.nodes), formatCell(job.world),
        isKnown(job.started) ? `${formatAge(job.started)} ago` : "", job.note ? longText(stripAnsi(job.note), "rp-dim", 160) : ""])) : h("p", { class: "rp-empty" }, "No run was started yet."),
      silence && !queue ? h("p", { class: "mc-silent" }, `Slurm does not answer: ${cleanText(silence.slice(0, 400))}`) : "",
      ...(queue ? [h("h3", { class: "mc-queue" }, `Queue${waits.length ? ` · ${waits.length} jobs` : ""}`),
        queue.error ? h("p", { class: "mc-silent" }, `The queue cannot be asked: ${cleanText(queue.error.slice(0, 400))}`) : "",
        waits.length ? drawQueue(waits) : queue.error ? "" : h("p", { class: "rp-empty" }, "Nothing waits or runs.")] : []));
  }

  function drawQueue(waits) {
    const sorted = [...waits.filter((job) => job.own), ...waits.filter((job) => !job.own)];
    const shown = showsAll ? sorted : sorted.slice(0, SHOWN_JOBS);
    const table = drawTable("Queue", ["Job", "Name", "User", "State", "Partition", "Nodes", "GPUs", "Time", "Limit", "Submitted", "Why"], shown.map((job) => [
      job.job, job.run ? runLink(job.run, job.name) : longText(job.name || "", "", 80), h("span", { class: job.own ? "mc-own" : null }, cutName(job.user)), cutName(job.state),
      cutName(job.partition), formatCell(job.nodes), /^(N\/A|\(null\))$/.test(job.gres) ? "" : cutName(job.gres).replace(/^gres\//, ""), cutName(job.time), cutName(job.limit), cutName(job.submitted).replace("T", " "),
      job.reason && job.reason !== "None" ? longText(job.reason, "rp-dim", 120) : ""]));
    if (shown.length < waits.length) {
      table.append(h("button", { class: "rp-button", type: "button", "data-key": "all", onclick: () => {
        showsAll = true;
        jobs.shown = null;
        repeat("jobs", "/api/jobs", JOBS_EVERY_MS, renderJobs, jobs);
      } }, `Show all ${waits.length} jobs`));
    }
    return table;
  }

  const formatCell = (value) => (isKnown(value) ? cutName(value) : "");
  const formatStep = (job) => (isKnown(job.step) ? `${job.step}${job.total_steps ? ` of ${job.total_steps}` : ""}` : "");

  function runLink(id, name) {
    const shown = cutName(name);
    if (!id || !store.rows.has(id)) return h("span", { dir: "auto" }, shown);
    return h("button", { class: "sw-link", type: "button", dir: "auto", "data-key": id, onclick: () => showRun(store, id) }, shown);
  }

  function drawTable(label, titles, rows) {
    const used = titles.map((_, i) => rows.some((row) => (row[i] instanceof Node ? row[i].textContent : row[i])));
    return h("div", { class: "mc-scroll" }, h("table", { class: "rp-table", "aria-label": label },
      h("thead", null, h("tr", null, ...titles.filter((_, i) => used[i]).map((each) => h("th", { scope: "col", "aria-label": each ? null : "Note" }, each)))),
      h("tbody", null, ...rows.map((row) => h("tr", null, ...row.filter((_, i) => used[i]).map((cell) => h("td", null, cell)))))));
  }

  // --- machines ---

  function renderMachines({ hosts = [], every_s = 5, preflight: results = [] }) {
    status.textContent = hosts.length ? `sampled every ${every_s} s while this page is open, kept for an hour` : "";
    machines.replaceChildren(h("h3", null, "Machines"), ...(hosts.length ? hosts.map(drawHost) : [h("p", { class: "rp-empty" }, "No machine is known yet.")]));
    renderPreflight(results);
  }

  function drawHost(host) {
    const { gpus = [], cpu } = host;
    const about = [
      gpus.length ? `${gpus.length} ${gpus.length === 1 ? "GPU" : "GPUs"}` : "", cpu?.cores ? `${cpu.cores} cores` : "", host.driver ? `driver ${host.driver}` : "", host.cuda ? `CUDA ${host.cuda}` : "",
    ].filter(Boolean).join(" · ");
    const stale = isKnown(host.stale_s) ? h("span", { class: "mc-silent" }, `does not answer: shown as ${formatDuration(host.stale_s)} ago`) : null;
    return h("div", { class: "mc-host" },
      h("div", { class: "mc-host-head" }, h("span", { class: "mc-host-name", dir: "auto" }, cutName(host.host)), h("span", { class: "rp-dim" }, about), stale),
      host.error && !(stale && gpus.length) ? h("p", { class: gpus.length ? "mc-silent" : "rp-empty" }, longText(host.error, "", 400)) : null,
      h("div", { class: "mc-gpus" }, gpus.map(drawGpu), cpu ? drawCpu(cpu) : null));
  }

  function drawCpu(cpu) {
    const load = (cpu.load || []).map((each) => each.toFixed(1)).join(" ");
    return drawDevice("CPU", `${cpu.cores} cores`, cpu.history, cpu.memory_total_bytes, [
      isKnown(cpu.used_percent) ? h("span", { class: "mc-key" }, `${Math.round(cpu.used_percent)} %`) : null,
      formatMemory(cpu.memory_used_bytes, cpu.memory_total_bytes), load ? h("span", null, `load ${load}`) : null,
    ], null);
  }

  function drawGpu(gpu) {
    const processes = (gpu.processes || []).slice(0, SHOWN_PROCESSES).map((each) => h("li", null,
      h("b", null, cutName(each.user || "?")), " ", each.run ? cutName(each.run) : h("span", { class: "rp-dim" }, cleanText(String(each.command || "").slice(0, 60))), " ",
      h("span", { class: "rp-dim" }, [isKnown(each.memory_bytes) ? formatBytes(each.memory_bytes) : "", each.job ? `job ${each.job}` : "", each.pid ? `pid ${each.pid}` : "", isKnown(each.age_s) ? formatDuration(each.age_s) : "",
        each.orphan ? "left over" : ""].filter(Boolean).join(" · "))));
    const users = processes.length ? h("ul", { class: "mc-users" }, processes)
      : gpu.users?.length ? h("div", { class: "mc-users" }, gpu.users.map(cutName).join(", ")) : gpu.idle ? h("div", { class: "mc-users rp-dim" }, "free") : null;
    return drawDevice(String(gpu.index), gpu.name || "GPU", gpu.history, gpu.memory_total_bytes, [
      isKnown(gpu.use_percent) ? h("span", { class: "mc-key" }, `${gpu.use_percent} %`) : null, formatMemory(gpu.memory_used_bytes, gpu.memory_total_bytes),
      isKnown(gpu.temperature_c) ? h("span", null, `${gpu.temperature_c} °C`) : null, isKnown(gpu.power_w) ? h("span", null, `${Math.round(gpu.power_w)} W`) : null,
      gpu.memory_errors ? h("span", { class: "rp-bad" }, `${gpu.memory_errors} memory errors`) : null, gpu.slices?.length ? h("span", null, `${gpu.slices.length} slices`) : null,
      gpu.fault ? h("span", { class: "mc-silent" }, cleanText(String(gpu.fault).slice(0, 300))) : null,
    ], users);
  }

  const formatMemory = (used, total) => (isKnown(used) ? h("span", { class: "mc-key mc-key-mem" }, total ? `${formatBytes(used)} of ${formatBytes(total)}` : formatBytes(used)) : null);

  function drawDevice(index, name, history, total, numbers, users) {
    return h("div", { class: "mc-gpu" }, h("div", { class: "mc-gpu-head" }, h("span", { class: "mc-gpu-name", title: name }, h("b", null, index), cutName(name)), sayRange(history)),
      drawSparkline(history || [], `${index} ${name}`, total), h("div", { class: "mc-numbers" }, numbers), users);
  }

  function sayRange(history) {
    if (!history?.length) return null;
    const span = Math.min(HOUR_S, Math.max(LEAST_SPAN_S, history[history.length - 1][0] - history[0][0]));
    return h("span", { class: "mc-range" }, `last ${span >= HOUR_S - 60 ? "hour" : formatDuration(span)}`);
  }

  function drawSparkline(history, label, total) {
    const points = history.filter((point) => Array.isArray(point) && typeof point[0] === "number");
    const now = points.length ? points[points.length - 1][0] : 0;
    const span = points.length ? Math.min(HOUR_S, Math.max(LEAST_SPAN_S, now - points[0][0])) : HOUR_S;
    const place = (point, value) => `${(((point[0] - now + span) / span) * 300).toFixed(1)},${(39 - Math.max(0, Math.min(1, value)) * 37).toFixed(1)}`;
    const svg = document.createElementNS(SVG, "svg");
    const add = (tag, attributes) => {
      const shape = document.createElementNS(SVG, tag);
      for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
      svg.append(shape);
    };
    for (const [key, value] of Object.entries({ class: "mc-spark", viewBox: "0 0 300 40", preserveAspectRatio: "none", role: "img" })) svg.setAttribute(key, value);
    for (const x of [75, 150, 225]) add("line", { x1: x, x2: x, y1: 0, y2: 40 });
    add("line", { x1: 0, x2: 300, y1: 39.5, y2: 39.5 });
    const utils = points.filter((point) => typeof point[1] === "number");
    const memories = total ? points.filter((point) => typeof point[2] === "number") : [];
    if (utils.length) {
      const line = utils.map((point) => place(point, point[1] / 100));
      const start = line[0].split(",")[0];
      const end = line[line.length - 1].split(",")[0];
      add("polygon", { points: `${start},39 ${line.join(" ")} ${end},39`, class: "mc-util" });
    }
    if (memories.length) add("polyline", { points: memories.map((point) => place(point, point[2] / total)).join(" "), class: "mc-mem" });
    const mean = utils.length ? utils.reduce((sum, point) => sum + point[1], 0) / utils.length : null;
    svg.setAttribute("aria-label", mean === null ? `${label}: nothing is known yet` : `${label} over the last ${formatDuration(span)}: ${mean.toFixed(0)} % used on average`);
    return svg;
  }

  // --- preflight ---

  function renderPreflight(results) {
    preflight.replaceChildren(h("h3", null, "Preflight"));
    if (!results.length) {
      preflight.append(h("p", { class: "rp-empty" }, "No nodes were checked yet. ", h("code", null, "echelon preflight"), " checks them, and so does a run with ", h("code", null, "launch.preflight=true"), "."));
      return;
    }
    preflight.append(...results.map((result, i) => {
      const checks = result.checks || [];
      const bad = checks.filter((each) => each.state === "fail" || each.state === "warn");
      const title = [isKnown(result.time) ? formatTime(result.time) : "", result.run || "", result.launcher, `${result.nodes?.length ?? "?"} nodes`].filter(Boolean).join(" · ");
      const verdict = result.ready ? (bad.length ? `ready, ${bad.length} to look at` : "ready") : `not ready: ${bad.length} to fix`;
      return h("details", { open: i === 0, class: "mc-preflight" },
        h("summary", { "data-key": `preflight-${result.time}` }, h("span", { class: result.ready ? "mc-check-ok" : "mc-check-fail" }, verdict), " ", h("span", { class: "rp-dim" }, cutName(title))),
        drawTable("Checks", ["Node", "Check", "Result", "Found", "To do"], [...bad, ...checks.filter((each) => each.state === "ok")].slice(0, SHOWN_CHECKS).map((each) => [
          cutName(each.host ?? each.node), cutName(each.check), h("span", { class: `mc-check-${["ok", "warn", "fail"].includes(each.state) ? each.state : "none"}` }, cutName(each.state)),
          longText(each.found || "", "", 300), longText(each.do || "", "rp-dim", 300)])));
    }));
  }

  function start() {
    repeat("machines", "/api/machines", MACHINES_EVERY_MS, renderMachines, machines);
    repeat("jobs", "/api/jobs", JOBS_EVERY_MS, renderJobs, jobs);
  }

  const onVisible = () => {
    if (!document.hidden) start();
  };
  document.addEventListener("visibilitychange", onVisible);
  start();
  return {
    update() {},
    unmount() {
      isGone = true;
      for (const timer of timers.values()) clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisible);
      element.replaceChildren();
    },
  };
}
