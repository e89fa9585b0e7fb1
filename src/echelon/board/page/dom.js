// Elements, icons, and numbers and times as text. Everything that comes from a run is set as text.

/** Return a new element. `props`: `class`, `on…` listeners, `style` (an object, set by CSSOM), properties
 * such as `value` and `checked`, everything else an attribute; null, undefined and false are left out. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) setProp(element, key, value);
  append(element, children);
  return element;
}

const PROPERTIES = new Set(["value", "checked", "disabled", "indeterminate", "hidden", "selected"]);

function setProp(element, key, value) {
  if (key === "class") element.className = value || "";
  else if (key.startsWith("on") && typeof value === "function") {
    element.addEventListener(key.slice(2).toLowerCase(), value);
  } else if (key === "style") {
    for (const [name, text] of Object.entries(value || {})) element.style.setProperty(name, text);
  } else if (key === "dataset") Object.assign(element.dataset, value);
  else if (PROPERTIES.has(key)) element[key] = value;
  else if (value === true) element.setAttribute(key, "");
  else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child);
  }
}

const ICONS = {
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9M10.3 10.3 14 14",
  columns: "M2.5 3h11v10h-11zM6.2 3v10M9.9 3v10",
  group: "M2.5 4h11M5 8h8.5M5 12h8.5",
  views: "M4 2.5h8v11l-4-3-4 3z",
  pin: "M6 2.5h4l-.5 4.5 2 2v1h-7v-1l2-2zM8 10v4",
  eye: "M1.5 8s2.5-4.5 6.5-4.5S14.5 8 14.5 8 12 12.5 8 12.5 1.5 8 1.5 8zM8 6.2a1.8 1.8 0 1 0 0 3.6 1.8 1.8 0 0 0 0-3.6",
  hide: "M2 2l12 12M6.5 3.7A7 7 0 0 1 8 3.5c4 0 6.5 4.5 6.5 4.5a11 11 0 0 1-1.8 2.3M4 5.2A11 11 0 0 0 1.5 8s2.5 4.5 6.5 4.5a6.6 6.6 0 0 0 3-.7",
  note: "M3 2.5h10v8l-3 3H3zM5.5 6h5M5.5 9h3",
  tag: "M2.5 2.5h5l6 6-5 5-6-6zM5.3 5.3v.01",
  more: "M3.5 8v.01M8 8v.01M12.5 8v.01",
  close: "M4 4l8 8M12 4l-8 8",
  check: "M3 8.5 6.5 12 13 4.5",
  down: "M4 6l4 4 4-4",
  right: "M6 4l4 4-4 4",
  up: "M4 10l4-4 4 4",
  sun: "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  moon: "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5z",
  auto: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2zM8 2v12M8 5h4.5M8 8h6M8 11h4.5",
  help: "M8 1.8a6.2 6.2 0 1 0 0 12.4A6.2 6.2 0 0 0 8 1.8M6.2 6.2a1.8 1.8 0 1 1 2.5 1.7c-.5.2-.7.5-.7 1.1M8 11.3v.01",
  link: "M6.5 9.5l3-3M7 4.5l1.5-1.5a2.8 2.8 0 0 1 4 4L11 8.5M9 11.5l-1.5 1.5a2.8 2.8 0 0 1-4-4L5 7.5",
  back: "M9.5 3.5 5 8l4.5 4.5",
  plus: "M8 3v10M3 8h10",
  only: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2M8 6a2 2 0 1 0 0 4 2 2 0 0 0 0-4",
  drag: "M6 4v.01M10 4v.01M6 8v.01M10 8v.01M6 12v.01M10 12v.01",
  table: "M2.5 3h11v10h-11zM2.5 6.5h11M2.5 9.8h11M6.5 6.5V13",
  play: "M5 3.5v9l7-4.5z",
  stop: "M4.5 4.5h7v7h-7z",
};

/** Return a small drawing that takes the colour of the text and says nothing to a screen reader. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name] || ICONS.more);
  svg.append(path);
  return svg;
}

/** Return a value with four significant digits, as `echelon runs` writes results: `0.9312`. */
export function formatNumber(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e3 && size < 1e6 && Number.isInteger(value)) return String(value);
  if (size >= 1e-3 && size < 1e4) return value.toPrecision(4);
  if (size >= 1e4 && size < 1e6) return value.toFixed(0);
  return fixExponent(value.toExponential(2));
}

function fixExponent(text) {
  return text.replace(/(\.\d*?)0*e/, "$1e").replace(".e", "e").replace(/e([+-])(\d)$/, "e$10$2");
}

/** Return a number as Python's `%g` does: six significant digits, no zeros at the end. */
export function formatG(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (value === 0) return Object.is(value, -0) ? "-0" : "0";
  const exponential = value.toExponential(5);
  const exponent = Number(exponential.slice(exponential.indexOf("e") + 1));
  if (exponent < -4 || exponent >= 6) return fixExponent(exponential);
  const fixed = value.toFixed(Math.max(0, 5 - exponent));
  return fixed.includes(".") ? fixed.replace(/\.?0+$/, "") : fixed;
}

/** Return a setting as it would be typed. */
export function formatSetting(value) {
  if (typeof value === "string") return value;
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : formatG(value);
  const escape = (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return (JSON.stringify(value) ?? "null").replace(/[\u007f-\uffff]/g, escape);
}

/** Return the two largest units: `42s`, `1m54s`, `3h05m`, `2d04h`. */
export function formatDuration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.floor(seconds));
  const minutes = Math.floor(whole / 60);
  if (minutes < 1) return `${whole}s`;
  if (minutes < 60) return `${minutes}m${pad(whole % 60)}s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours}h${pad(minutes % 60)}m` : `${Math.floor(hours / 24)}d${pad(hours % 24)}h`;
}

/** Return a time in seconds since 1970 as local date and minute; with `seconds` also these. */
export function formatTime(moment, seconds = false) {
  if (typeof moment !== "number" || !Number.isFinite(moment)) return "–";
  const t = new Date(moment * 1000);
  const day = `${t.getFullYear()}-${pad(t.getMonth() + 1)}-${pad(t.getDate())}`;
  const clock = `${pad(t.getHours())}:${pad(t.getMinutes())}`;
  return `${day} ${clock}${seconds ? `:${pad(t.getSeconds())}` : ""}`;
}

/** Return how long ago a time was, in its largest units: `3h05m`. */
export function formatAge(moment) {
  return typeof moment === "number" ? formatDuration(Date.now() / 1000 - moment) : "–";
}

/** Return three significant digits and a decimal unit: `51.3 GB`. */
export function formatBytes(bytes) {
  if (typeof bytes !== "number" || !Number.isFinite(bytes)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < 4) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 999.5 ? Number(value.toPrecision(3)) : Math.round(value)} ${units[unit]}`;
}

/** Return `1 run`, `12,345 runs`. */
export function formatCount(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}

function pad(number) {
  return String(number).padStart(2, "0");
}
