// What happened to a run and when: its starts as bars, with what was lost between them, its rounds, and
// events as marks. The same events stand below as a list, for readers, for screen readers and for search.

import { formatDuration, formatTime, h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const LANE_PX = 24;
const AXIS_PX = 26;
const LABEL_PX = 74;
const NARROW_LABEL_PX = 8;
const MARK_PX = 9; // marks that are nearer are drawn as one with a number
const SHOWN_EVENTS = 300;
const STAGE_PADDING_PX = 4;
const LEAST_SPAN_S = 0.5;
const SCROLL_REST_MS = 300;
const TICKS_S = [
  0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
  1209600, 2592000, 7776000, 31536000,
];
const RATES = {
  fault: "bad", lost: "bad", hang: "bad", machine: "bad", slow: "warn", stop: "warn", left: "warn", return: "warn",
  finished: "good", snapshot: "good", ok: "good", joined: "good",
};

/** Return the class by which an event is coloured: what went wrong, what is slow, what is good news. */
function rateEvent(kind) {
  return RATES[kind] || "plain";
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** Show the time line of a run. `setDetails(details, row)` draws it anew. */
export function mountTimeline(element) {
  let events = [];
  let phases = [];
  let rounds = [];
  let bounds = [0, 1];
  let range = null; // null: all
  let hidden = new Set();
  let chosen = null;
  let isLive = false;
  let signature = "";

  const chips = h("div", { class: "lv-chips", role: "group", "aria-label": "Kinds of events shown" });
  const button = (label, title, onclick) =>
    h("button", { class: "rp-button", type: "button", title, "aria-label": title, onclick }, label);
  const tools = h("div", { class: "tl-tools" },
    button("−", "Zoom out", () => zoom(2)),
    button("+", "Zoom in", () => zoom(0.5)),
    button("‹", "Earlier", () => pan(-0.3)),
    button("›", "Later", () => pan(0.3)),
    button("All", "Show all of it", () => setRange(null)));
  const span = h("span", { class: "tl-span", role: "status", "aria-live": "polite" });
  const chart = svg("svg", { class: "tl-chart", tabindex: "0", role: "img" });
  const tip = h("div", { class: "tl-tip", hidden: true, "aria-hidden": "true" });
  const stage = h("div", { class: "tl-stage" }, chart, tip);
  const list = h("div", { class: "tl-list" });
  element.append(h("section", { class: "tl", "aria-label": "Time line" },
    h("div", { class: "tl-bar" }, chips, span, tools), stage, list));

  // --- data ---

  function setDetails(details, row) {
    const next = JSON.stringify([details.timeline, details.phases, details.accounting?.rounds, row?.state]);
    if (next === signature) return;
    signature = next;
    events = (details.timeline || [])
      .filter((event) => typeof event.t === "number")
      .map((event, i) => ({ ...event, i, rate: rateEvent(event.kind) }))
      .sort((a, b) => a.t - b.t);
    phases = (details.phases || []).filter((phase) => typeof phase.started === "number");
    rounds = (details.rounds || details.accounting?.rounds || []).filter((round) => typeof round.began === "number");
    isLive = row?.state === "running";
    const times = [
      ...events.map((event) => event.t),
      ...phases.flatMap((phase) => [phase.started, phase.ended]),
      ...rounds.map((round) => round.began),
      ...(isLive ? [Date.now() / 1000] : []),
    ].filter((t) => typeof t === "number");
    const first = Math.min(...(times.length ? times : [Date.now() / 1000]));
    const last = Math.max(first + 1, ...(times.length ? times : [0]));
    const margin = (last - first) * 0.02;
    bounds = [first - margin, last + margin];
    renderChips();
    draw();
    renderList();
  }

  function renderChips() {
    const counts = new Map();
    for (const event of events) counts.set(event.kind, (counts.get(event.kind) || 0) + 1);
    chips.replaceChildren(...[...counts].map(([kind, count]) =>
      h("button", {
        class: `lv-chip tl-${rateEvent(kind)}`, type: "button", "aria-pressed": String(!hidden.has(kind)),
        onclick: (event) => {
          if (hidden.has(kind)) hidden.delete(kind);
          else hidden.add(kind);
          event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(kind)));
          draw();
          renderList();
        },
      }, `${kind} ${count}`)));
  }

  const getShown = () => events.filter((event) => !hidden.has(event.kind));

  // --- the range ---

  const getRange = () => range || bounds;

  function setRange(next) {
    if (next) {
      const whole = bounds[1] - bounds[0];
      const width = Math.min(Math.max(next[1] - next[0], LEAST_SPAN_S), whole);
      const from = Math.min(Math.max(next[0], bounds[0]), bounds[1] - width);
      range = width >= whole * 0.999 ? null : [from, from + width];
    } else range = null;
    draw();
  }

  function zoom(factor, at) {
    const [from, to] = getRange();
    const middle = at ?? (from + to) / 2;
    setRange([middle - (middle - from) * factor, middle + (to - middle) * factor]);
  }

  function pan(share) {
    const [from, to] = getRange();
    setRange([from + (to - from) * share, to + (to - from) * share]);
  }

  // --- the drawing ---

  function draw() {
    const width = Math.max(240, stage.clientWidth - 2 * STAGE_PADDING_PX);
    const label = width < 520 ? NARROW_LABEL_PX : LABEL_PX;
    const lanes = ["starts", ...(rounds.length ? ["processes"] : []), "events"];
    const height = lanes.length * LANE_PX + AXIS_PX + 10;
    const [from, to] = getRange();
    const place = (t) => label + ((t - from) / (to - from)) * (width - label - 10);
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.setAttribute("height", height);
    chart.setAttribute("width", width);
    const clip = svg("clipPath", { id: "tl-clip" }, svg("rect", { x: label, y: 0, width: width - label - 4, height }));
    const inner = svg("g", { "clip-path": "url(#tl-clip)" });
    const outer = svg("g");
    lanes.forEach((lane, i) => {
      const y = 6 + i * LANE_PX;
      if (label > NARROW_LABEL_PX) outer.append(svg("text", { x: label - 8, y: y + 15, class: "tl-lane" }, lane));
      outer.append(svg("line", { x1: label, x2: width - 4, y1: y + LANE_PX - 1, y2: y + LANE_PX - 1, class: "tl-rule" }));
    });
    drawPhases(inner, place, 6, width);
    if (rounds.length) drawRounds(inner, place, 6 + LANE_PX, width);
    drawEvents(inner, place, 6 + (lanes.length - 1) * LANE_PX, label, width);
    drawAxis(outer, place, lanes.length * LANE_PX + 8, from, to, label, width);
    if (isLive) {
      const x = place(Date.now() / 1000);
      inner.append(svg("line", { x1: x, x2: x, y1: 2, y2: lanes.length * LANE_PX + 6, class: "tl-now" }));
    }
    chart.replaceChildren(clip, outer, inner);
    chart.setAttribute("aria-label",
      `${phases.length} starts and ${events.length} events from ${formatTime(from, true)} to ${formatTime(to, true)}; they are listed below`);
    const before = getShown().filter((event) => event.t < from).length;
    const after = getShown().filter((event) => event.t > to).length;
    span.textContent = [
      before ? `‹ ${before} earlier` : "", `${formatTime(from, true)} · ${formatDuration(to - from)}`, after ? `${after} later ›` : "",
    ].filter(Boolean).join("  ·  ");
  }

  function drawBar(group, x, end, y, height, className, title, text) {
    const width = Math.max(1.5, end - x);
    const bar = svg("rect", { x, y, width, height, rx: Math.min(3, width / 2), class: className });
    bar.dataset.tip = title;
    group.append(bar);
    if (text && width > text.length * 6.4 + 8) group.append(svg("text", { x: x + 5, y: y + height / 2 + 4, class: "tl-in" }, text));
  }

  function drawPhases(group, place, y, width) {
    phases.forEach((phase, i) => {
      const now = Date.now() / 1000;
      const next = phases[i + 1]?.started ?? now;
      const end = phase.ended ?? (isLive && i === phases.length - 1 ? now : Math.min(next, phase.started + (phase.trained_s || 0)));
      const trained = phase.trained_since ?? Math.max(phase.started, end - (phase.trained_s || 0));
      const cause = phase.cause || (isLive && i === phases.length - 1 ? "running" : "");
      const size = phase.processes ? `${phase.processes} ${phase.processes === 1 ? "process" : "processes"}` : "";
      const where = [phase.launcher, phase.job ? `job ${phase.job}` : phase.host].filter(Boolean).join(" ");
      const steps = phase.first_step === null || phase.first_step === undefined ? "" : `steps ${phase.first_step} to ${phase.last_step ?? "…"}`;
      const title = [`start ${i + 1}`, where, size, steps, formatDuration(end - phase.started), cause].filter(Boolean).join(" · ");
      const rate = /finished|running/.test(cause) ? "good" : /fail|kill|lost/.test(cause) ? "bad" : "warn";
      if (place(end) < 0 || place(phase.started) > width) return;
      drawBar(group, place(phase.started), place(trained), y + 3, LANE_PX - 8, "tl-starting", `starting · ${title}`);
      drawBar(group, place(trained), place(end), y + 3, LANE_PX - 8, `tl-phase tl-${rate}`, title, cause || steps);
    });
  }

  function drawRounds(group, place, y, width) {
    const most = Math.max(...rounds.map((round) => round.processes || 1), ...phases.map((phase) => phase.processes || 1));
    const draw = (from, to, processes, title) => {
      if (place(to) < 0 || place(from) > width) return;
      const tall = Math.max(3, ((LANE_PX - 8) * processes) / most);
      drawBar(group, place(from), place(to), y + LANE_PX - 5 - tall, tall, "tl-round", title, String(processes));
    };
    phases.forEach((phase, i) => {
      const end = phase.ended ?? phases[i + 1]?.started ?? Date.now() / 1000;
      const own = rounds.filter((round) => round.phase === i);
      const first = own.length ? own[0].began : end;
      if (phase.processes) draw(phase.started, first, phase.processes, `${phase.processes} processes`);
      own.forEach((round, k) => {
        const until = own[k + 1]?.began ?? end;
        const why = [
          `round ${round.number}: ${round.processes} processes from step ${round.step}`,
          round.lost_ranks?.length ? `lost ranks ${round.lost_ranks.join(", ")}` : "",
          round.joined_ranks?.length ? `replaced ranks ${round.joined_ranks.join(", ")}` : "",
          round.reason, round.standstill_s ? `${formatDuration(round.standstill_s)} of standstill` : "",
        ];
        draw(round.began, until, round.processes, why.filter(Boolean).join(" · "));
      });
    });
  }

  function drawEvents(group, place, y, label, width) {
    let heap = null;
    const marks = [];
    for (const event of getShown()) {
      const x = place(event.t);
      if (x < label - 5 || x > width) continue;
      if (heap && x - heap.x < MARK_PX) heap.events.push(event);
      else marks.push((heap = { x, events: [event] }));
    }
    for (const { x, events: own } of marks) {
      const rate = ["bad", "warn", "good", "plain"].find((each) => own.some((event) => event.rate === each));
      const middle = y + LANE_PX / 2;
      const isChosen = own.some((event) => event.i === chosen);
      const mark = svg("circle", { cx: x, cy: middle, r: own.length > 1 ? 6 : 4.5, class: `tl-mark tl-${rate}${isChosen ? " tl-chosen" : ""}` });
      mark.dataset.tip = own.slice(0, 6).map((event) => `${formatTime(event.t, true)}  ${event.kind}: ${cut(event.text)}`).join("\n")
        + (own.length > 6 ? `\nand ${own.length - 6} more: zoom in` : "");
      mark.dataset.first = own[0].i;
      if (own.length > 1) mark.dataset.until = own[own.length - 1].t;
      group.append(mark);
      if (own.length > 1) group.append(svg("text", { x, y: middle + 3, class: "tl-count" }, own.length > 99 ? "99" : String(own.length)));
    }
  }

  function drawAxis(group, place, y, from, to, label, width) {
    const wanted = Math.max(2, Math.floor((width - label) / 110));
    const step = TICKS_S.find((each) => (to - from) / each <= wanted) || TICKS_S[TICKS_S.length - 1];
    const offset = new Date(from * 1000).getTimezoneOffset() * 60;
    for (let t = Math.ceil((from - offset) / step) * step + offset; t <= to; t += step) {
      const x = place(t);
      group.append(svg("line", { x1: x, x2: x, y1: 4, y2: y, class: "tl-tick" }));
      group.append(svg("text", { x, y: y + 14, class: "tl-time" }, formatTick(t, step)));
    }
  }

  function formatTick(t, step) {
    const date = new Date(t * 1000);
    const pad = (v) => String(v).padStart(2, "0");
    if (step >= 86400) return `${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
    const clock = `${pad(date.getHours())}:${pad(date.getMinutes())}`;
    if (step >= 3600 && to24h(date)) return `${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
    if (step >= 60) return clock;
    const seconds = `${clock}:${pad(date.getSeconds())}`;
    return step >= 1 ? seconds : `${seconds}.${Math.floor(date.getMilliseconds() / 100)}`;
  }

  const to24h = (date) => date.getHours() === 0 && date.getMinutes() === 0;

  // --- the list ---

  let listed = SHOWN_EVENTS;

  function renderList() {
    const shown = getShown();
    if (!shown.length) {
      list.replaceChildren(h("p", { class: "rp-empty" }, events.length ? "All kinds of events are hidden." : "No event was recorded."));
      return;
    }
    const start = phases[0]?.started ?? events[0].t;
    let day = "";
    const body = shown.slice(0, listed).flatMap((event) => {
      const [date, clock] = formatTime(event.t, true).split(" ");
      const head = date === day ? [] : [h("tr", { class: "tl-day" }, h("th", { colspan: "5", scope: "rowgroup" }, date))];
      day = date;
      const row = h("tr", { class: event.i === chosen ? "tl-chosen" : "", tabindex: "0",
        onclick: () => choose(event.i, true),
        onkeydown: (key) => {
          if (key.key === "Enter" || key.key === " ") {
            key.preventDefault();
            choose(event.i, true);
          } else if (key.key === "ArrowDown") row.nextElementSibling?.focus();
          else if (key.key === "ArrowUp") row.previousElementSibling?.focus();
          else return;
          key.preventDefault();
        } },
        h("td", { class: "rp-num tl-when" }, clock),
        h("td", { class: "rp-num tl-after" }, `+${formatDuration(event.t - start)}`),
        h("td", null, h("span", { class: `tl-kind tl-${event.rate}` }, event.kind)),
        h("td", { class: "rp-num" }, event.step === null || event.step === undefined ? "" : String(event.step)),
        h("td", { class: "tl-text", dir: "auto" }, cut(event.text, 600)));
      row.dataset.i = event.i;
      return [...head, row];
    });
    list.replaceChildren(
      h("table", { class: "rp-table", "aria-label": "Events" },
        h("thead", null, h("tr", null, ...["When", "After", "What", "Step", ""].map((each) => h("th", { scope: "col", class: each === "After" ? "tl-after" : null, "aria-label": each ? null : "Event" }, each)))),
        h("tbody", null, ...body)),
      ...(shown.length > listed
        ? [button(`Show ${Math.min(SHOWN_EVENTS, shown.length - listed)} of ${shown.length - listed} more`, "Show more events", () => {
          listed += SHOWN_EVENTS;
          renderList();
        })]
        : []));
  }

  function choose(i, shows) {
    chosen = i;
    for (const row of list.querySelectorAll("tr[data-i]")) row.classList.toggle("tl-chosen", Number(row.dataset.i) === i);
    const event = events.find((each) => each.i === i);
    if (!event) return;
    const [from, to] = getRange();
    if (shows && range && (event.t < from || event.t > to)) setRange([event.t - (to - from) / 2, event.t + (to - from) / 2]);
    else draw();
    if (!shows) list.querySelector(`tr[data-i="${i}"]`)?.scrollIntoView({ block: "nearest" });
  }

  // --- pointer and keyboard ---

  const timeAt = (clientX) => {
    const box = chart.getBoundingClientRect();
    const label = box.width < 520 ? NARROW_LABEL_PX : LABEL_PX;
    const [from, to] = getRange();
    return from + ((clientX - box.left - label) / (box.width - label - 10)) * (to - from);
  };
  let drag = null;
  let scrolledAt = -1e9;
  const onScroll = () => {
    scrolledAt = performance.now();
  };
  document.addEventListener("scroll", onScroll, { capture: true, passive: true });
  chart.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && performance.now() - scrolledAt < SCROLL_REST_MS) return; // the page is being scrolled past it
    if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY) && !range && event.deltaY > 0) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / 800);
    else zoom(2 ** (event.deltaY / 240), timeAt(event.clientX));
  }, { passive: false });
  chart.addEventListener("pointerdown", (event) => {
    const first = event.target.dataset?.first;
    if (first !== undefined) {
      const until = Number(event.target.dataset.until);
      const at = events.find((each) => each.i === Number(first));
      if (until > at.t) setRange([at.t - (until - at.t) * 0.2, until + (until - at.t) * 0.2]);
      choose(Number(first), false);
      return;
    }
    drag = { x: event.clientX, range: getRange() };
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointermove", (event) => {
    if (drag) {
      const box = chart.getBoundingClientRect();
      const [from, to] = drag.range;
      const shift = ((drag.x - event.clientX) / box.width) * (to - from);
      if (range) setRange([from + shift, to + shift]);
      return;
    }
    showTip(event);
  });
  for (const kind of ["pointerup", "pointercancel"]) chart.addEventListener(kind, () => { drag = null; });
  chart.addEventListener("pointerleave", () => { tip.hidden = true; });
  chart.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event.clientX)));
  chart.addEventListener("keydown", (event) => {
    const doing = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
      0: () => setRange(null), Home: () => setRange(null),
    }[event.key];
    if (!doing || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    doing();
  });

  function showTip(event) {
    const text = event.target.dataset?.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = stage.getBoundingClientRect();
    const x = event.clientX - box.left;
    tip.style.left = `${Math.max(0, Math.min(x + 12, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  }

  const observer = new ResizeObserver(() => draw());
  observer.observe(stage);
  return {
    setDetails,
    unmount() {
      observer.disconnect();
      document.removeEventListener("scroll", onScroll, { capture: true });
      element.replaceChildren();
    },
  };
}

function cut(text, most = 160) {
  const line = String(text ?? "").replace(/\s+/g, " ");
  return line.length > most ? `${line.slice(0, most)} …` : line;
}
