// Machines and jobs: what waits and runs, the GPUs of here and of other hosts with their users over the
// last hour, and what preflight found. What cannot be asked is said.

import { getJson } from "./api.js";
import { formatAge, formatBytes, formatDuration, formatTime, h } from "./dom.js";
import { cleanText, longText, meter, renderError, showRun, stateBadge } from "./run_parts.js";

const MACHINES_EVERY_MS = 5000; // as often as the server samples
const JOBS_EVERY_MS = 10000;
const HOUR_S = 3600;
const SVG = "http://www.w3.org/2000/svg";

/** Show the queue, the machines and what preflight found. */
export function mount(element, store) {
  let isGone = false;
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

  function renderJobs(answer) {
    const own = answer.jobs || answer.runs || [];
    const queue = answer.queue || [];
    const notes = [answer.silence, answer.error, answer.queue_error, ...(answer.notes || [])].filter(Boolean).map((text) => (typeof text === "string" ? text : text.what || ""));
    jobs.replaceChildren(
      h("h3", null, `Own jobs${own.length ? ` · ${own.length}` : ""}`),
      own.length ? drawTable(["Run", "State", "Step", "Ready in", "Where", "Size", "Started", "Why"], own.map((job) => [
        runLink(job), stateBadge(job.state), formatStep(job), formatEta(job), [job.launcher, job.job ? `job ${job.job}` : "", job.host].filter(Boolean).join(" "),
        job.nodes ? `${job.nodes} × ${(job.processes ?? job.world) ? Math.round((job.processes ?? job.world) / job.nodes) : "?"}` : "", formatStarted(job),
        longText(job.why || job.note || "", "rp-dim", 160)])) : h("p", { class: "rp-empty" }, "Nothing runs or waits."),
      ...(queue.length ? [h("h3", { class: "mc-queue" }, `Queue · ${queue.length}`), drawTable(["Job", "Name", "User", "State", "Partition", "Nodes", "Time", "Starts", "Why"], queue.map((job) => [
        String(job.job ?? job.id ?? ""), longText(job.name || "", "", 80), job.user || "", job.state || "", job.partition || "",
        String(job.nodes ?? ""), formatAny(job.time ?? job.elapsed_s), job.start ? formatAny(job.start, true) : "", longText(job.reason || job.why || "", "rp-dim", 120)]))] : []),
      ...notes.map((text) => h("p", { class: "mc-silent" }, cleanText(text.slice(0, 600)))));
  }

  const formatAny = (value, isMoment) => (typeof value === "number" ? (isMoment ? formatTime(value) : formatDuration(value)) : String(value ?? ""));
  const formatStep = (job) => (job.step === null || job.step === undefined ? "" : `${job.step}${job.total_steps ? ` of ${job.total_steps}` : ""}`);
  const formatEta = (job) => (typeof job.eta_s === "number" ? formatDuration(job.eta_s) : "");
  const formatStarted = (job) => (typeof job.started === "number" ? `${formatAge(job.started)} ago` : "");

  function runLink(job) {
    const name = String(job.run ?? job.name ?? "");
    const id = job.id && store.rows.has(job.id) ? job.id : findId(job, name);
    const shown = cleanText(name.slice(0, 80));
    if (!id) return h("span", { dir: "auto" }, shown);
    return h("button", { class: "sw-link", type: "button", dir: "auto", "data-key": id, onclick: () => showRun(store, id) }, shown);
  }

  function findId(job, name) {
    for (const row of store.rows.values()) {
      if (job.folder ? row.folder === job.folder : row.name === name) return row.id;
    }
    return null;
  }

  function drawTable(titles, rows) {
    const used = titles.map((_, i) => rows.some((row) => (row[i] instanceof Node ? row[i].textContent : row[i])));
    return h("div", { class: "mc-scroll" }, h("table", { class: "rp-table" },
      h("thead", null, h("tr", null, ...titles.filter((_, i) => used[i]).map((each) => h("th", { scope: "col" }, each)))),
      h("tbody", null, ...rows.map((row) => h("tr", null, ...row.filter((_, i) => used[i]).map((cell) => h("td", null, cell)))))));
  }

  // --- machines ---

  function renderMachines(answer) {
    const hosts = answer.hosts || [];
    status.textContent = hosts.length ? "sampled every 5 s while this page is open" : "";
    machines.replaceChildren(h("h3", null, "GPUs and hosts"),
      ...(hosts.length ? hosts.map(drawHost) : [h("p", { class: "rp-empty" }, "No host is known yet.")]),
      ...[].concat(answer.notes || answer.unasked || []).map((text) => h("p", { class: "mc-silent" }, cleanText(String(text.error || text).slice(0, 600)))));
    renderPreflight(answer.preflight || []);
  }

  function drawHost(host) {
    const gpus = host.gpus || [];
    const cpu = host.cpu || {};
    const users = [...new Set((host.users || []).map((user) => (typeof user === "string" ? user : user.user)))];
    return h("div", { class: "mc-host" },
      h("div", { class: "mc-host-head" }, h("span", { class: "mc-host-name", dir: "auto" }, cleanText(String(host.host).slice(0, 120)), host.is_here ? " (here)" : ""),
        h("span", { class: "rp-dim" }, describeHost(host, cpu, gpus)), users.length ? h("span", { class: "rp-dim" }, users.join(", ")) : null),
      host.error ? h("p", { class: "mc-silent" }, longText(typeof host.error === "string" ? host.error : host.error.what || "cannot be asked", "", 400)) : null,
      ...drawCpu(host, cpu),
      gpus.length ? h("div", { class: "mc-gpus" }, ...gpus.map((gpu, i) => drawGpu(gpu, i))) : host.error ? null : h("p", { class: "rp-empty" }, "No GPU."));
  }

  function describeHost(host, cpu, gpus) {
    return [
      host.state, host.partition || (host.partitions || []).join(", "), gpus.length ? `${gpus.length} ${gpus.length === 1 ? "GPU" : "GPUs"}` : "",
      cpu.cores ? `${cpu.cores} cores` : "", host.driver ? `driver ${host.driver}` : "",
    ].filter(Boolean).join(" · ");
  }

  function drawCpu(host, cpu) {
    const parts = [];
    const load = cpu.load ?? cpu.load_1 ?? cpu.load1;
    if (typeof load === "number" && cpu.cores) parts.push(meter(load / cpu.cores, `load ${load.toFixed(1)} of ${cpu.cores}`));
    const used = cpu.memory_used_bytes ?? cpu.used_bytes;
    const total = cpu.memory_total_bytes ?? cpu.total_bytes ?? cpu.memory_bytes;
    if (used !== undefined && total) parts.push(meter(used / total, `${formatBytes(used)} of ${formatBytes(total)}`));
    return parts;
  }

  function drawGpu(gpu, i) {
    const util = pick(gpu, "use_percent", "utilization", "util");
    const used = bytesOf(gpu, "memory_used", "used");
    const total = bytesOf(gpu, "memory_total", "total");
    const numbers = [
      util === null ? null : h("span", { class: "mc-key" }, `${Math.round(util)} %`),
      used === null ? null : h("span", { class: "mc-key mc-key-mem" }, total ? `${formatBytes(used)} of ${formatBytes(total)}` : formatBytes(used)),
      say(pick(gpu, "temperature_c", "temperature"), "°C"), say(pick(gpu, "power_w", "power"), "W"),
      gpu.memory_errors ? h("span", { class: "rp-bad" }, `${gpu.memory_errors} memory errors`) : null,
    ];
    const users = (gpu.users || gpu.processes || []).slice(0, 20).map((user) => {
      if (typeof user === "string") return user;
      const memory = bytesOf(user, "memory", "used");
      return [user.user, user.run || user.name || user.command || "", user.pid ? `pid ${user.pid}` : "", memory === null ? "" : formatBytes(memory)].filter(Boolean).join(" ");
    });
    return h("div", { class: "mc-gpu" },
      h("div", { class: "mc-gpu-head" }, h("span", { class: "mc-gpu-name", title: gpu.name || "" }, h("b", null, String(gpu.index ?? i)), cleanText(String(gpu.name || "GPU").slice(0, 80)))),
      drawSparkline(gpu.history || [], `GPU ${gpu.index ?? i} over the last hour`, total),
      h("div", { class: "mc-numbers" }, ...numbers.filter(Boolean)),
      gpu.error ? h("p", { class: "mc-silent" }, longText(String(gpu.error), "", 200)) : null,
      users.length ? h("div", { class: "mc-users" }, longText(users.join(" · "), "", 400)) : gpu.users ? h("div", { class: "mc-users rp-dim" }, "free") : null);
  }

  const pick = (object, ...keys) => {
    for (const key of keys) if (typeof object[key] === "number") return object[key];
    return null;
  };
  const bytesOf = (object, ...keys) => pick(object, ...keys.map((key) => `${key}_bytes`), ...keys);
  const say = (value, unit) => (value === null ? null : h("span", null, `${Math.round(value)} ${unit}`));

  function drawSparkline(history, label, total) {
    const points = history.filter((point) => Array.isArray(point) && typeof point[0] === "number");
    const now = points.length ? points[points.length - 1][0] : 0;
    const place = (point, value) => `${(((point[0] - now + HOUR_S) / HOUR_S) * 300).toFixed(1)},${(39 - Math.max(0, Math.min(1, value)) * 37).toFixed(1)}`;
    const svg = document.createElementNS(SVG, "svg");
    const add = (tag, attributes) => {
      const shape = document.createElementNS(SVG, tag);
      for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
      svg.append(shape);
    };
    for (const [key, value] of Object.entries({ class: "mc-spark", viewBox: "0 0 300 40", preserveAspectRatio: "none", role: "img" })) svg.setAttribute(key, value);
    for (const x of [75, 150, 225]) add("line", { x1: x, x2: x, y1: 0, y2: 40 });
    add("line", { x1: 0, x2: 300, y1: 39.5, y2: 39.5 });
    const share = (memory) => (memory <= 1 && !total ? memory : total && memory > 100 ? memory / total : memory / 100);
    const utils = points.filter((point) => typeof point[1] === "number");
    const memories = points.filter((point) => typeof point[2] === "number");
    if (utils.length) {
      const line = utils.map((point) => place(point, point[1] / 100));
      const start = line[0].split(",")[0];
      const end = line[line.length - 1].split(",")[0];
      add("polygon", { points: `${start},39 ${line.join(" ")} ${end},39`, class: "mc-util" });
    }
    if (memories.length) add("polyline", { points: memories.map((point) => place(point, share(point[2]))).join(" "), class: "mc-mem" });
    const mean = utils.length ? utils.reduce((sum, point) => sum + point[1], 0) / utils.length : null;
    svg.setAttribute("aria-label", mean === null ? `${label}: nothing is known yet` : `${label}: ${mean.toFixed(0)} % used on average`);
    return svg;
  }

  // --- preflight ---

  function renderPreflight(list) {
    preflight.replaceChildren(h("h3", null, "Preflight"));
    if (!list.length) {
      preflight.append(h("p", { class: "rp-empty" }, "No run was preflighted. The setting launch.preflight=true checks all nodes before a run."));
      return;
    }
    preflight.append(drawTable(["When", "Run", "Node", "Check", "Result", "Found", "To do"], list.flatMap((entry) =>
      (entry.verdicts || entry.checks || [entry]).map((each) => {
        const state = String(each.state ?? each.result ?? "").toLowerCase();
        return [
          typeof (each.t ?? entry.t) === "number" ? formatTime(each.t ?? entry.t) : "", entry.run ? runLink(entry) : "", cleanText(String(each.node ?? each.host ?? entry.host ?? "").slice(0, 80)),
          each.check || "", h("span", { class: `mc-check-${state}` }, state), longText(each.found || each.text || "", "", 300), longText(each.do || "", "rp-dim", 300)];
      }))));
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
