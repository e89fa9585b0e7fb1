// The logs of one run as one stream of lines: only what is on the screen is in the page, so that a log
// of ten million lines opens as one of ten does. What a log says is text, whatever it contains.

import { renderLine, stripAnsi } from "./ansi.js";
import { getJson, getRunPath } from "./api.js";
import { openMenu } from "./dialogs.js";
import { formatBytes, h } from "./dom.js";
import { copyText } from "./run_parts.js";

const BLOCK_LINES = 400; // of one request
const KEPT_BLOCKS = 40; // of lines; those that were seen longest ago are dropped
const MAX_HEIGHT_PX = 8_000_000; // browsers draw nothing in taller elements
const SHOWN_CHARACTERS = 2_000; // of a line; the rest comes by a button
const STEP_CHARACTERS = 16_000; // that such a button shows more
const COPY_LINES = 20_000; // at most, into the clipboard
const FALLBACK_LINE_PX = 18;
const SHOWN_IN_MENU = 100;
const GOAL_SHARE = 0.35; // of the height: where a line that was asked for stands

/** The lines of a log by their numbers, fetched in blocks when they are looked at. */
class LineBlocks {
  constructor(path, onChange) {
    this.path = path;
    this.onChange = onChange;
    this.clear([]);
  }

  clear(names) {
    this.names = names;
    this.blocks = new Map();
    this.loading = new Map();
    this.tried = new Map(); // block → how many lines there were when it was fetched
    this.partial = []; // numbers of lines that are still being written
    this.mark = null;
    this.total = 0;
    this.size = null;
    this.isComplete = false;
    this.generation = (this.generation || 0) + 1;
    this.error = null;
  }

  get(line) {
    const block = this.blocks.get(Math.floor(line / BLOCK_LINES));
    return block && block.get(line);
  }

  /** Fetch the blocks of these lines that are not here. */
  need(from, to) {
    const last = Math.floor(Math.max(from, to - 1) / BLOCK_LINES);
    for (let number = Math.floor(from / BLOCK_LINES); number <= last; number += 1) {
      const block = this.blocks.get(number);
      if (block) {
        this.blocks.delete(number); // and to the end: the first ones are dropped first
        this.blocks.set(number, block);
      }
      const wanted = Math.min(BLOCK_LINES, this.total - number * BLOCK_LINES);
      const isMissing = !block || (block.size < wanted && this.tried.get(number) !== this.total);
      if (isMissing && !this.loading.has(number)) this.fetch(number);
    }
  }

  /** Ask for the end of the log: how many lines there are, and the last block again. */
  async follow() {
    if (this.following) {
      this.followAgain = true;
      return this.following;
    }
    const last = Math.max(0, Math.floor((this.total - 1) / BLOCK_LINES));
    this.following = this.fetch(this.total ? last : 0).finally(() => {
      this.following = null;
      if (this.followAgain) {
        this.followAgain = false;
        this.follow();
      }
    });
    return this.following;
  }

  async fetch(number) {
    const generation = this.generation;
    const wait = this.request({ from: number * BLOCK_LINES, count: BLOCK_LINES });
    this.loading.set(number, wait);
    try {
      const answer = await wait;
      if (generation !== this.generation) return;
      if (!this.store(answer, number * BLOCK_LINES)) return this.follow(); // it begins anew
      // An answer may be cut where its lines are long: the rest of the block is another request.
      let next = number * BLOCK_LINES + answer.lines.length;
      const end = Math.min((number + 1) * BLOCK_LINES, this.total);
      let more = answer;
      while (next < end && more.lines.length) {
        more = await this.request({ from: next, count: end - next });
        if (generation !== this.generation) return;
        this.store(more, next);
        next += more.lines.length;
      }
      this.tried.set(number, this.total);
      this.error = null;
    } catch (error) {
      if (generation === this.generation) this.error = error;
    } finally {
      if (this.loading.get(number) === wait) this.loading.delete(number);
    }
    if (generation === this.generation) this.onChange();
  }

  request(params) {
    const names = this.names.length ? { names: this.names.join(",") } : {};
    return getJson(this.path, { ...names, ...params });
  }

  /** Keep what came. Returns false if the lines of before are no more: the log was replaced. */
  store(answer, from) {
    this.knownNames = answer.names || [];
    if (this.mark !== null && answer.mark !== this.mark) {
      this.clear(this.names);
      return false;
    }
    this.mark = answer.mark ?? null;
    for (const n of this.partial) this.blocks.get(Math.floor(n / BLOCK_LINES))?.delete(n);
    this.partial = this.partial.filter((n) => n < from || n >= from + answer.lines.length);
    this.total = answer.total;
    this.size = answer.size ?? null;
    this.isComplete = answer.complete !== false;
    answer.lines.forEach((line, index) => {
      const at = line.n ?? from + index;
      const number = Math.floor(at / BLOCK_LINES);
      if (!this.blocks.has(number)) this.blocks.set(number, new Map());
      this.blocks.get(number).set(at, line);
      if (line.partial) this.partial.push(at);
    });
    while (this.blocks.size > KEPT_BLOCKS) this.blocks.delete(this.blocks.keys().next().value);
    return true;
  }
}

/** Show the logs of a run. `update("logs")` says that there may be more. */
export function mountLogs(element, store, id) {
  const path = getRunPath(id, "/logs");
  const expanded = new Map(); // line → characters that are shown of it
  const view = {
    wraps: store.view.wrap === "1",
    time: store.view.stamps || "clock",
    follows: !store.view.line,
    fraction: store.view.line ? 0 : 1,
    goal: null, // a line to bring into sight
    current: null, // the line that search stands at
    selection: parseSelection(store.view.line),
  };
  let matches = { text: "", lines: [], set: new Set(), isCut: false };
  let isGone = false;
  let linePx = FALLBACK_LINE_PX;
  let writtenTop = -1;
  let drawn = []; // the rows on the screen: {n, top, height}
  let frame = 0;

  // --- what is around the lines ---

  const chips = h("div", { class: "lv-chips", role: "group", "aria-label": "Logs shown" });
  const input = h("input", {
    class: "lv-find", "data-search": "", type: "search", placeholder: "Search in logs", "aria-label": "Search in logs", spellcheck: "false",
    autocomplete: "off", value: store.view.find || "",
  });
  const regex = makeSwitch(".*", "Regular expression", store.view.regex === "1", () => search(true));
  const found = h("span", { class: "lv-found", role: "status", "aria-live": "polite" });
  const previous = makeButton("↑", "Previous match (Shift+Enter)", () => goToMatch(-1));
  const next = makeButton("↓", "Next match (Enter)", () => goToMatch(1));
  const jump = h("input", {
    class: "lv-jump", type: "text", inputmode: "numeric", placeholder: "Line", "aria-label": "Go to line", autocomplete: "off",
  });
  const wrap = makeSwitch("Wrap", "Wrap long lines", view.wraps, (on) => {
    view.wraps = on;
    store.setView({ wrap: on ? "1" : null }, { replace: true });
    body.classList.toggle("lv-wraps", on);
    draw();
  });
  const stamps = h("select", { class: "lv-stamps", "aria-label": "Time stamps" },
    ...[["clock", "Clock"], ["age", "Since start"], ["none", "No times"]].map(([value, label]) =>
      h("option", { value }, label)));
  stamps.value = view.time;
  const follow = makeSwitch("Follow", "Follow the end of the log", view.follows, (on) => {
    view.follows = on;
    if (on) setFraction(1);
  });
  const copy = makeButton("Copy", "Copy the chosen lines, or those on the screen", copyLines);
  const download = h("button", { class: "rp-button", type: "button", title: "Download whole logs", "aria-haspopup": "menu", onclick: chooseDownload }, "Download");
  const bar = h("div", { class: "lv-bar" },
    h("div", { class: "lv-group lv-search" }, input, regex, previous, next, found),
    h("div", { class: "lv-group" }, jump, stamps, wrap, follow, copy, download));
  const spacer = h("div", { class: "lv-spacer" });
  const rows = h("div", { class: "lv-rows" });
  const body = h("div", {
    class: "lv-body", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Log lines",
  }, spacer, rows);
  body.classList.toggle("lv-wraps", view.wraps);
  const message = h("p", { class: "lv-message", role: "status" });
  const foot = h("div", { class: "lv-foot" });
  element.append(h("section", { class: "lv", "aria-label": "Logs" }, chips, bar, message, body, foot));

  const blocks = new LineBlocks(path, () => {
    if (!isGone) onLines();
  });
  blocks.clear(splitNames(store.view.ranks));
  let firstTime = null;

  function makeButton(label, title, onclick) {
    return h("button", { class: "rp-button", type: "button", title, "aria-label": title, onclick }, label);
  }

  function makeSwitch(label, title, isOn, onchange) {
    const button = h("button", {
      class: "rp-button rp-switch", type: "button", title, "aria-label": title, "aria-pressed": String(isOn),
      onclick: () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        onchange(on);
      },
    }, label);
    return button;
  }

  function renderChips() {
    const names = blocks.knownNames || [];
    const key = JSON.stringify([names, blocks.names]);
    if (chips.dataset.key === key) return;
    chips.dataset.key = key;
    const chosen = new Set(blocks.names);
    const make = (label, isOn, onclick) =>
      h("button", { class: "lv-chip", type: "button", "aria-pressed": String(isOn), onclick, dir: "ltr" }, label);
    const focused = chips.contains(document.activeElement) ? document.activeElement.textContent : null;
    chips.replaceChildren(
      make("all", !chosen.size, () => chooseNames([])),
      ...names.map((name) => make(name, chosen.has(name), (event) => {
        if (event.shiftKey || event.ctrlKey || event.metaKey || chosen.size) {
          if (chosen.has(name)) chosen.delete(name);
          else chosen.add(name);
        } else chosen.add(name);
        chooseNames(names.filter((each) => chosen.has(each)));
      })));
    chips.hidden = names.length < 2;
    if (focused) [...chips.children].find((chip) => chip.textContent === focused)?.focus();
  }

  function chooseNames(names) {
    store.setView({ ranks: names.join(",") || null, line: null }, { replace: true });
    view.selection = null;
    expanded.clear();
    blocks.clear(names);
    view.fraction = view.follows ? 1 : 0;
    open();
    if (input.value) search(false);
  }

  /** Download the one log that is shown, or ask which. Files come as they are, without cut lines. */
  function chooseDownload() {
    const names = blocks.names.length ? blocks.names : blocks.knownNames || [];
    const fetchLog = (name) => {
      const file = `logs/${name}.log`;
      const link = h("a", { href: getRunPath(id, `/file?name=${encodeURIComponent(file)}`), download: "" });
      element.append(link);
      link.click();
      link.remove();
    };
    if (names.length === 1) fetchLog(names[0]);
    else openMenu(download, names.slice(0, SHOWN_IN_MENU).map((name) => ({ label: `${name}.log`, onSelect: () => fetchLog(name) })), { label: "Download a log" });
  }

  function renderFoot() {
    const parts = [`${blocks.total.toLocaleString("en")} lines`];
    if (blocks.size !== null) parts.push(formatBytes(blocks.size));
    if (!blocks.isComplete) parts.push("still being read");
    if (view.selection) {
      const [a, b] = view.selection;
      parts.push(a === b ? `line ${a + 1} chosen` : `lines ${a + 1} to ${b + 1} chosen`);
    }
    foot.textContent = parts.join(" · ");
  }

  function showMessage() {
    let text = "";
    if (blocks.error) text = [blocks.error.message, blocks.error.hint].filter(Boolean).join(" – ");
    else if (!blocks.total && !blocks.loading.size) text = "Nothing was logged yet.";
    if (message.textContent !== text) message.textContent = text;
    message.hidden = !text;
    body.hidden = !blocks.total && Boolean(text);
  }

  // --- where the view is: the line at `fraction` of all lines stands at `fraction` of the height ---
  // So the ends are exact, with lines of any height, and a log may be taller than an element can be.

  function measureHeights() {
    const total = Math.max(1, blocks.total);
    const height = body.clientHeight || 400;
    const scrollPx = Math.min(MAX_HEIGHT_PX, Math.max(height, total * linePx + 8));
    return { total, height, scrollPx, range: Math.max(0, scrollPx - height) };
  }

  function setFraction(fraction) {
    view.fraction = Math.max(0, Math.min(1, fraction));
    draw();
  }

  function writeScroll() {
    const { range, scrollPx } = measureHeights();
    const height = `${scrollPx}px`;
    if (spacer.style.height !== height) spacer.style.height = height;
    const top = Math.round(view.fraction * range);
    if (Math.abs(body.scrollTop - top) >= 1) body.scrollTop = top;
    writtenTop = body.scrollTop;
  }

  function onScroll() {
    if (Math.abs(body.scrollTop - writtenTop) < 1) return; // our own
    view.goal = null;
    const { range } = measureHeights();
    const isDown = body.scrollTop > writtenTop;
    writtenTop = body.scrollTop;
    view.fraction = range ? Math.min(1, body.scrollTop / range) : 0;
    const atEnd = body.scrollTop >= range - 2;
    if (atEnd !== view.follows && (atEnd ? isDown : true)) setFollows(atEnd);
    draw();
  }

  function setFollows(on) {
    view.follows = on;
    follow.setAttribute("aria-pressed", String(on));
  }

  /** Move by pixels where the scroll bar is coarser than a line. */
  function moveBy(px) {
    const { total, height } = measureHeights();
    const perLine = linePx * total - height;
    if (perLine <= 0) return;
    if (px < 0) setFollows(false);
    setFraction(view.fraction + px / perLine);
    if (view.fraction >= 1) setFollows(true);
  }

  function isScaled() {
    return blocks.total * linePx + 8 > MAX_HEIGHT_PX;
  }

  /** Return which line, with a fraction, is at this height of the view, by what is drawn. */
  function findLineAt(y) {
    for (const row of drawn) {
      if (y < row.top + row.height) return row.n + Math.max(0, (y - row.top) / row.height);
    }
    return drawn.length ? drawn[drawn.length - 1].n + 1 : 0;
  }

  /** Return the fraction at which what is drawn stands `shift` pixels lower, by its measured heights. */
  function solveFraction(shift) {
    const { height } = measureHeights();
    let low = 0;
    let high = 1;
    for (let turn = 0; turn < 50; turn += 1) {
      const middle = (low + high) / 2;
      if (middle * blocks.total < findLineAt(middle * height - shift)) low = middle;
      else high = middle;
    }
    return (low + high) / 2;
  }

  /** After the log has grown: what is on the screen stays where it is. */
  function keepPlace(totalBefore) {
    if (view.follows || !drawn.length || !totalBefore || totalBefore === blocks.total) return;
    view.fraction = solveFraction(0);
  }

  /** Bring the line that was asked for into sight, once its height is known. */
  function showGoal() {
    const entry = drawn.find((row) => row.n === view.goal);
    if (!entry || !blocks.get(entry.n)) return;
    view.goal = null;
    const { height } = measureHeights();
    const margin = Math.min(3 * linePx, height / 4);
    if (entry.top >= Math.min(margin, entry.n * linePx) && entry.top + linePx <= height - linePx) return;
    view.fraction = Math.max(0, Math.min(1, solveFraction(height * GOAL_SHARE - entry.top)));
    draw();
  }

  // --- drawing ---

  function draw() {
    if (frame || isGone) return;
    frame = requestAnimationFrame(() => {
      frame = 0;
      drawNow();
    });
  }

  function drawNow() {
    if (view.follows) view.fraction = 1;
    const { total, height } = measureHeights();
    if (!blocks.total) {
      rows.replaceChildren();
      drawn = [];
      return;
    }
    const anchor = view.fraction * blocks.total;
    const first = Math.min(blocks.total - 1, Math.floor(anchor));
    const y = view.fraction * height;
    const around = Math.ceil(height / linePx) + 2;
    blocks.need(Math.max(0, first - around), Math.min(blocks.total, first + around));

    // Rows are made downwards from the anchor and upwards before it, until the height is full.
    const fragment = document.createDocumentFragment();
    const from = Math.max(0, first - Math.ceil(y / linePx) - 1);
    const to = Math.min(blocks.total, first + Math.ceil((height - y) / linePx) + 2);
    const made = [];
    for (let n = from; n < to; n += 1) {
      const row = makeRow(n);
      made.push({ n, row });
      fragment.append(row);
    }
    const active = keepFocus();
    rows.replaceChildren(fragment);
    measureLine(made);

    let anchorTop = 0;
    let sum = 0;
    drawn = made.map(({ n, row }) => {
      const rowPx = view.wraps ? row.getBoundingClientRect().height : linePx;
      if (n === first) anchorTop = sum + (anchor - first) * rowPx;
      const entry = { n, top: sum, height: rowPx };
      sum += rowPx;
      return entry;
    });
    if (first >= to || anchor >= blocks.total) anchorTop = sum;
    const shift = blocks.total * linePx <= height && !view.wraps ? 0 : y - anchorTop;
    const all = view.wraps && from === 0 && to === blocks.total && sum <= height ? 0 : shift;
    for (const entry of drawn) entry.top += all;
    writeScroll();
    rows.style.transform = `translateY(${Math.round(all)}px)`;
    active?.();
    if (view.goal !== null) showGoal();
    renderFoot();
    if (total) body.setAttribute("aria-label", `Log lines, ${from + 1} to ${to} of ${blocks.total}`);
  }

  function keepFocus() {
    const at = document.activeElement;
    if (!at || !rows.contains(at)) return null;
    const n = at.closest(".lv-row")?.dataset.n;
    return () => (rows.querySelector(`[data-n="${n}"] button`) || body).focus({ preventScroll: true });
  }

  function measureLine(made) {
    const plain = made.find(({ row }) => row.dataset.plain);
    const height = plain && !view.wraps ? plain.row.getBoundingClientRect().height : 0;
    if (height > 4 && Math.abs(height - linePx) > 0.01) {
      linePx = height;
      draw();
    }
  }

  function makeRow(n) {
    const line = blocks.get(n);
    const number = h("button", {
      class: "lv-number", type: "button", tabindex: "-1", "aria-label": `Choose line ${n + 1}`,
      onclick: (event) => chooseLine(n, event.shiftKey),
    }, String(n + 1));
    const row = h("div", { class: "lv-row" }, number);
    row.dataset.n = n;
    const [a, b] = view.selection || [-1, -2];
    row.classList.toggle("lv-chosen", n >= a && n <= b);
    row.classList.toggle("lv-match", matches.set.has(n));
    row.classList.toggle("lv-current", view.current === n);
    if (!line) {
      row.append(h("span", { class: "lv-text lv-waiting" }, "…"));
      return row;
    }
    if (view.time !== "none") row.append(h("span", { class: "lv-time" }, formatStamp(line.t)));
    if ((blocks.knownNames || []).length > 1 && blocks.names.length !== 1) {
      row.append(h("span", { class: `lv-name lv-name${hashName(line.name)}`, title: line.name }, line.name));
    }
    const text = line.text || "";
    const shown = expanded.get(n) || SHOWN_CHARACTERS;
    const holder = h("span", { class: "lv-text", dir: "ltr" });
    renderLine(holder, text.slice(0, shown), matches.pattern);
    const rest = text.length - shown;
    if (rest > 0) {
      holder.append(makeMore(n, `… ${rest.toLocaleString("en")} more characters`, "Show more of this line", shown + STEP_CHARACTERS));
    } else if (line.cut) {
      holder.append(h("span", { class: "lv-control" }, ` … and ${formatBytes(line.cut)} more, which the download has`));
    }
    row.append(holder);
    if (!rest || rest < 0) row.dataset.plain = "1";
    return row;
  }

  function makeMore(n, label, title, characters) {
    return h("button", {
      class: "lv-more", type: "button", title,
      onclick: () => {
        expanded.set(n, characters);
        if (!view.wraps) wrap.click();
        setFollows(false);
        draw();
      },
    }, label);
  }

  function formatStamp(t) {
    if (typeof t !== "number") return "";
    if (view.time === "age") {
      const start = store.rows.get(id)?.started || firstTime || t;
      const s = t - start;
      const sign = s < 0 ? "−" : "";
      const all = Math.abs(s);
      const pad = (v) => String(Math.floor(v)).padStart(2, "0");
      return `${sign}${Math.floor(all / 3600)}:${pad((all / 60) % 60)}:${pad(all % 60)}`;
    }
    const date = new Date(t * 1000);
    const pad = (v) => String(v).padStart(2, "0");
    return `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  }

  function hashName(name) {
    let sum = 0;
    for (const letter of String(name)) sum = (sum * 31 + letter.charCodeAt(0)) >>> 0;
    return sum % 6;
  }

  // --- choosing, searching, copying ---

  function chooseLine(n, extends_) {
    const [a, b] = view.selection || [n, n];
    if (extends_ && view.selection) view.selection = [Math.min(a, n), Math.max(b, n)];
    else view.selection = view.selection && a === n && b === n ? null : [n, n];
    const line = view.selection
      ? view.selection.map((each) => each + 1).filter((each, i, all) => i === 0 || each !== all[0]).join("-")
      : null;
    store.setView({ line }, { replace: true });
    setFollows(false);
    draw();
  }

  function goToLine(n) {
    const at = Math.max(0, Math.min(blocks.total - 1, n));
    const { height } = measureHeights();
    const rest = blocks.total * linePx - height;
    setFollows(false);
    view.goal = at;
    setFraction(rest > 0 ? (at * linePx - height * GOAL_SHARE) / rest : 0);
  }

  let searching = 0;
  async function search(goes) {
    const text = input.value;
    const isRegex = regex.getAttribute("aria-pressed") === "true";
    store.setView({ find: text || null, regex: text && isRegex ? "1" : null }, { replace: true });
    searching += 1;
    const turn = searching;
    if (!text) {
      matches = { text, lines: [], set: new Set() };
      view.current = null;
      showFound();
      draw();
      return;
    }
    found.textContent = "searching …";
    found.classList.remove("rp-bad");
    try {
      const answer = await blocks.request({ from: 0, count: 1, search: text, regex: isRegex ? 1 : 0 });
      if (turn !== searching || isGone) return;
      if (answer.search_fault) throw new Error(answer.search_fault);
      const lines = answer.matches || [];
      const hadNone = !matches.lines.length || matches.text !== text;
      matches = { text, lines, set: new Set(lines), count: answer.match_count ?? lines.length, pattern: makePattern(text, isRegex) };
      matches.isSearching = answer.searching === true;
      if (!matches.set.has(view.current)) view.current = null;
      showFound();
      if (goes && hadNone && lines.length) goToMatch(0);
      else draw();
      if (matches.isSearching) searchLater(goes && !lines.length, 400);
    } catch (error) {
      if (turn !== searching || isGone) return;
      matches = { text, lines: [], set: new Set() };
      found.textContent = error.message || "the search failed";
      found.classList.add("rp-bad");
      draw();
    }
  }

  function makePattern(text, isRegex) {
    const source = isRegex ? text : text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    try {
      return new RegExp(source, "giu");
    } catch {
      return null; // Python's language of patterns is another one: its lines are still marked
    }
  }

  function showFound() {
    const { lines, text, count, isSearching } = matches;
    found.classList.remove("rp-bad");
    if (!text) found.textContent = "";
    else if (!lines.length) found.textContent = isSearching ? "searching …" : "not found";
    else {
      const place = lines.indexOf(view.current);
      const at = place < 0 ? "" : `${(place + 1).toLocaleString("en")} of `;
      const more = count > lines.length ? `, the first ${lines.length.toLocaleString("en")} can be gone to` : "";
      found.textContent = `${at}${count.toLocaleString("en")}${isSearching ? " …" : ""}`;
      found.title = `${count.toLocaleString("en")} lines${more}`;
    }
    previous.disabled = next.disabled = !lines.length;
  }

  /** Go to the match before (−1) or after (1) the current one, or to the first one on from here (0). */
  function goToMatch(direction) {
    const { lines } = matches;
    if (!lines.length) return;
    let at;
    const place = lines.indexOf(view.current);
    if (place >= 0 && direction) at = (place + direction + lines.length) % lines.length;
    else {
      const top = Math.floor(findLineAt(0));
      const after = lines.findIndex((n) => n >= top);
      at = after < 0 ? (direction < 0 ? lines.length - 1 : 0) : direction < 0 ? (after - 1 + lines.length) % lines.length : after;
    }
    view.current = lines[at];
    goToLine(view.current);
    showFound();
  }

  async function copyLines() {
    const visible = drawn.filter((row) => row.top + row.height > 0 && row.top < body.clientHeight);
    const [a, b] = view.selection || (visible.length ? [visible[0].n, visible[visible.length - 1].n] : [0, -1]);
    const lines = [];
    const end = Math.min(b + 1, a + COPY_LINES);
    try {
      for (let n = a; n < end; ) {
        const answer = await blocks.request({ from: n, count: Math.min(1000, end - n) });
        if (!answer.lines.length) break;
        lines.push(...answer.lines.map((line) => stripAnsi(line.text)));
        n += answer.lines.length;
      }
      await copyText(`${lines.join("\n")}\n`);
      say(copy, "Copied", "Copy");
    } catch (error) {
      message.textContent = `The lines could not be copied: ${error.message}`;
      message.hidden = false;
    }
  }

  function say(button, text, after) {
    button.textContent = text;
    setTimeout(() => {
      button.textContent = after;
    }, 1500);
  }

  // --- opening and following ---

  let totalBefore = 0;

  function onLines() {
    keepPlace(totalBefore);
    if (firstTime === null) firstTime = blocks.get(0)?.t ?? null;
    totalBefore = blocks.total;
    renderChips();
    showMessage();
    draw();
    if (!blocks.isComplete && !readTimer) {
      readTimer = setTimeout(() => {
        readTimer = 0;
        if (!isGone) blocks.follow();
      }, 400);
    }
  }
  let readTimer = 0;

  async function open() {
    totalBefore = 0;
    await blocks.follow();
    if (isGone) return;
    if (view.selection && !view.follows && blocks.total) {
      goToLine(view.selection[0]);
    }
    draw();
  }

  async function onGrown() {
    await blocks.follow();
    if (!isGone && matches.text) searchLater(false, 2000);
  }

  let searchTimer = 0;
  function searchLater(goes, wait_ms) {
    if (searchTimer) return;
    searchTimer = setTimeout(() => {
      searchTimer = 0;
      if (!isGone && input.value) search(goes);
    }, wait_ms);
  }

  body.addEventListener("scroll", onScroll, { passive: true });
  body.addEventListener("wheel", (event) => {
    if (!isScaled() || event.ctrlKey || !event.deltaY) return;
    event.preventDefault();
    moveBy(event.deltaMode === 1 ? event.deltaY * linePx : event.deltaY);
  }, { passive: false });
  body.addEventListener("keydown", (event) => {
    if (event.target !== body || event.altKey || event.metaKey) return;
    const page = body.clientHeight - 2 * linePx;
    const moves = { ArrowDown: linePx, ArrowUp: -linePx, PageDown: page, PageUp: -page };
    if (event.key === "Home") {
      setFollows(false);
      setFraction(0);
    } else if (event.key === "End" || event.key === "G") {
      setFollows(true);
      setFraction(1);
    } else if (event.ctrlKey && event.key === "f") input.focus();
    else if (event.ctrlKey) return;
    else if (event.key === "n") goToMatch(1);
    else if (event.key === "N") goToMatch(-1);
    else if (event.key === "w") wrap.click();
    else if (event.key === "f") follow.click();
    else if (isScaled() && moves[event.key]) moveBy(moves[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  let typing = 0;
  input.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => search(true), 250);
  });
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") {
      event.preventDefault();
      clearTimeout(typing);
      if (input.value !== matches.text) search(true);
      else goToMatch(event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      input.value = "";
      search(false);
      body.focus();
    }
  });
  jump.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key !== "Enter") return;
    const n = Number.parseInt(jump.value.replace(/[^0-9]/g, ""), 10);
    if (!Number.isFinite(n)) return;
    view.current = Math.max(0, Math.min(blocks.total, n) - 1);
    goToLine(view.current);
    body.focus();
  });
  stamps.addEventListener("change", () => {
    view.time = stamps.value;
    store.setView({ stamps: view.time === "clock" ? null : view.time }, { replace: true });
    draw();
  });
  const observer = new ResizeObserver(() => draw());
  observer.observe(body);
  showFound();
  open().then(() => {
    if (input.value && !isGone) search(!view.selection);
  });

  return {
    update(kind) {
      if (kind === "logs") onGrown();
    },
    unmount() {
      isGone = true;
      observer.disconnect();
      cancelAnimationFrame(frame);
      clearTimeout(searchTimer);
      clearTimeout(readTimer);
      clearTimeout(typing);
      element.replaceChildren();
    },
  };
}

function splitNames(text) {
  return text ? String(text).split(",").filter(Boolean) : [];
}

function parseSelection(text) {
  const found = /^(\d+)(?:-(\d+))?$/.exec(text || "");
  if (!found) return null;
  const a = Number(found[1]) - 1;
  const b = found[2] ? Number(found[2]) - 1 : a;
  return a >= 0 ? [Math.min(a, b), Math.max(a, b)] : null;
}
