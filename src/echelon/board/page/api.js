// The server's answers: JSON, curves, and live updates that come back by themselves.

/** What the server refused, or that it does not answer (`status` 0). */
export class ApiError extends Error {
  constructor(message, hint = "", status = 0) {
    super(message);
    this.hint = hint;
    this.status = status;
  }
}

const UNREACHABLE = "The board's server does not answer";
const UNKNOWN_PAGE = "The board's server does not know this page any more";
const UNKNOWN_HINT = "open the address that `echelon board` printed";
const watchers = new Set();
let hello = null;

/** Call `fn(isReachable)` when a request fails for want of a server, and when one is answered. */
export function onReachable(fn) {
  watchers.add(fn);
  return () => watchers.delete(fn);
}

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    for (const fn of watchers) fn(false);
    throw new ApiError(UNREACHABLE, "it is tried again by itself", 0);
  }
  for (const fn of watchers) fn(true);
  if (answer.ok) return answer;
  if (answer.status === 401) throw new ApiError(UNKNOWN_PAGE, UNKNOWN_HINT, 401);
  const said = await answer.json().catch(() => ({}));
  throw new ApiError(said.error || `The server answered ${answer.status}`, said.hint || "", answer.status);
}

function buildAddress(path, params) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params || {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(key, one);
    }
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** Return the path of a run's answers: `/api/run/ID` and what follows. */
export function getRunPath(id, rest = "") {
  return `/api/run/${encodeURIComponent(id)}${rest}`;
}

/** Return the JSON of a GET. `params` may have lists; `options` may have a `signal`. */
export async function getJson(path, params, options) {
  const answer = await request(buildAddress(path, params), options);
  return readBody(answer);
}

/** `json()` reads a large answer in half the time of `text()` and a parse. */
async function readBody(answer) {
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server's answer cannot be read", String(error.message), 0);
  }
}

function readJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new ApiError("The server's answer cannot be read", String(error.message), 0);
  }
}

const ROW_START = ',{"id":"';
const PARSED_SIGNS = 1 << 20;

/** Return the answer with all rows. They are parsed while the rest of them is still on its way. */
export async function getRows() {
  const answer = await request("/api/runs");
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  const parts = []; // the whole text, for an answer that cannot be cut
  let slices = []; // parsed: the head, then lists of rows
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const text = decoder.decode(value, { stream: !done });
    parts.push(text);
    rest += text;
    if (done) break;
    if (slices && rest.length > PARSED_SIGNS) [slices, rest] = parseSlice(slices, rest);
  }
  if (slices && slices.length) {
    const last = tryParse(`{"rows":[${rest}`);
    if (last) return { ...slices[0], rows: [...slices.map((slice) => slice.rows), last.rows].flat() };
  }
  return readJson(parts.join(""));
}

/** Parse what comes before the last row that has begun. In text, quotes are escaped, so only a setting that is a
 * list of objects with an id could look like the start of a row: then it cannot be parsed, and is not cut. */
function parseSlice(slices, text) {
  const end = text.lastIndexOf(ROW_START);
  if (end < 0) return [slices, text];
  const parsed = tryParse(slices.length ? `{"rows":[${text.slice(0, end)}]}` : `${text.slice(0, end)}]}`);
  return parsed && Array.isArray(parsed.rows) ? [[...slices, parsed], text.slice(end + 1)] : [null, ""];
}

function tryParse(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    return null;
  }
}

/** Return what the server says of itself: `token`, `can_act`, `host`, …; asked once. */
export function getHello() {
  hello = hello || getJson("/api/hello").catch((error) => {
    hello = null;
    throw error;
  });
  return hello;
}

/** Return the JSON of a POST. The token comes from the server, and is asked again if it has changed. */
export async function postJson(path, body) {
  const send = async () => {
    const { token } = await getHello();
    const headers = { "Content-Type": "application/json", "X-Echelon-Token": token };
    const answer = await request(path, { method: "POST", headers, body: JSON.stringify(body) });
    return readBody(answer);
  };
  try {
    return await send();
  } catch (error) {
    if (error.status !== 401 && error.status !== 403) throw error;
    const before = (await getHello()).token;
    hello = null;
    if ((await getHello()).token === before) throw error;
    return send();
  }
}

/** Return curves as typed arrays that share the bytes of the answer. */
export async function getCurves(params, options) {
  const answer = await request(buildAddress("/api/curves", params), options);
  const bytes = await answer.arrayBuffer();
  const size = new DataView(bytes).getUint32(0, true);
  const header = readJson(new TextDecoder().decode(new Uint8Array(bytes, 4, size)));
  const start = Math.ceil((4 + size) / 8) * 8;
  const curves = header.curves.map((curve) => {
    const part = (i) => new Float64Array(bytes, start + 8 * (curve.offset + i * curve.n), curve.n);
    return { ...curve, axis: curve.x, x: part(0), y: part(1), mean: part(2) };
  });
  return { ...header, curves, building: header.building || [], faults: header.faults || [] };
}

let hasLost = false;

/** Return a module of the page that is not needed at first. */
export async function importPart(path) {
  try {
    return await import(path);
  } catch (error) {
    console.error(error);
    hasLost = true;
    throw new ApiError("A part of the page did not arrive", "it is loaded with the page, once the server answers");
  }
}

/** Return whether a module did not arrive. A browser does not ask for it again before the page is loaded anew. */
export function hasLostPart() {
  return hasLost;
}

const FIRST_WAIT_MS = 400;
const LONGEST_WAIT_MS = 4000;
const HIDDEN_WAIT_MS = 20000;

/** Follow the server's events. `handlers`: `onRows(data)`, `onMetrics(ids)`, `onLogs(ids)`, `onReload()`,
 * `onState("live" | "connecting" | "lost")` and `getGeneration()`. Returns `{setWatch, retry, close}`.
 * A page that nobody sees lets go of its connection: a browser has only six to one server. */
export function subscribe(handlers, watchIds = []) {
  let source = null;
  let timer = 0;
  let hiddenTimer = 0;
  let wait_ms = FIRST_WAIT_MS;
  let watched = [...watchIds];
  let closed = false;
  const say = (state) => handlers.onState && handlers.onState(state);

  function open() {
    clearTimeout(timer);
    if (source) source.close();
    if (closed || document.hidden) return;
    const generation = handlers.getGeneration ? handlers.getGeneration() : undefined;
    source = new EventSource(buildAddress("/api/events", { generation, watch: watched }));
    source.onopen = () => {
      wait_ms = FIRST_WAIT_MS;
      say("live");
    };
    source.onerror = retryLater;
    listen("rows", (data) => handlers.onRows && handlers.onRows(data));
    listen("metrics", (data) => handlers.onMetrics && handlers.onMetrics(data.runs || []));
    listen("logs", (data) => handlers.onLogs && handlers.onLogs(data.runs || []));
    listen("reload", () => handlers.onReload && handlers.onReload());
  }

  function listen(kind, fn) {
    source.addEventListener(kind, (event) => fn(readJson(event.data)));
  }

  function retryLater() {
    source.close();
    source = null;
    say("lost");
    clearTimeout(timer);
    timer = setTimeout(open, wait_ms);
    wait_ms = Math.min(LONGEST_WAIT_MS, wait_ms * 1.6);
  }

  function onVisibility() {
    clearTimeout(hiddenTimer);
    if (!document.hidden) {
      if (!source) open();
      return;
    }
    hiddenTimer = setTimeout(() => {
      clearTimeout(timer);
      if (source) source.close();
      source = null;
    }, HIDDEN_WAIT_MS);
  }

  document.addEventListener("visibilitychange", onVisibility);
  open();
  return {
    setWatch(ids) {
      if (ids.length === watched.length && ids.every((id, i) => id === watched[i])) return;
      watched = [...ids];
      if (source) open();
    },
    retry() {
      wait_ms = FIRST_WAIT_MS;
      open();
    },
    close() {
      closed = true;
      clearTimeout(timer);
      clearTimeout(hiddenTimer);
      document.removeEventListener("visibilitychange", onVisibility);
      if (source) source.close();
    },
  };
}
