// Shared by all pages with charts: elements, numbers, ticks, the box at the pointer.
"use strict";
const at = id => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const make = (tag, parent, text, cls) => {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls;
  if (parent) parent.append(e);
  return e;
};

// --- numbers

const show = v => {
  if (v === 0) return "0";
  const a = Math.abs(v);
  if (a >= 1e6 || a < 1e-4) return v.toExponential(2).replace("e+", "e");
  return String(+v.toPrecision(5));
};
const along = v => Math.abs(v) >= 1e4 && Math.abs(v) < 1e15 ? v.toLocaleString("en").replaceAll(",", "\u202f") : show(v);

// --- ticks

// Round numbers from low to high: about `count` of them, at least three where the range has them.
// `whole` is for what is counted: there is no half a step.
function ticks(low, high, count, whole = false) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0) || !isFinite(raw)) return [];
  const exponent = Math.floor(Math.log10(raw));
  let sizes = [1, 0, -1].flatMap(e => [5, 2.5, 2, 1].map(m => m * 10 ** (exponent + e)));
  if (whole) sizes = [...sizes.filter(s => s >= 1 && Number.isInteger(s)), ...(raw < 1 ? [1] : [])];
  const wide = sizes.filter(s => s >= raw * (1 - 1e-9)), narrow = sizes.filter(s => s < raw * (1 - 1e-9));
  let found = [];
  for (const size of [...wide.slice(-1), ...narrow]) {
    found = multiples(low, high, size);
    if (found.length >= 3) break;
  }
  return found;
}
function multiples(low, high, size) {
  const first = Math.ceil(low / size - 1e-9), count = Math.floor(high / size + 1e-9) - first;
  const found = new Set(); // numbers too near to each other to tell apart are one
  for (let k = 0; k <= count && k < 100; k++) found.add(+((first + k) * size).toPrecision(12));
  return [...found];
}
function logTicks(low, high) {
  const decades = Math.log10(high / low), found = [];
  const many = decades < 1 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : decades < 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.round(decades / 6));
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    if (e % every === 0) for (const m of many) {
      const v = +(m * 10 ** e).toPrecision(12);
      if (v >= low * (1 - 1e-9) && v <= high * (1 + 1e-9)) found.push(v);
    }
  return found.length > 2 ? found : ticks(low, high, 4).filter(v => v > 0);
}

// The texts of ticks. Numbers below each other have as many decimals, and no two read the same.
function tickLabels(marks, log = false) {
  const largest = Math.max(...marks.map(Math.abs)), plain = marks.map(v => String(+v.toPrecision(12)));
  if (log && largest < 1e6 && plain.every(t => !t.includes("e") && t.length < 8)) return plain;
  const most = Math.max(0, ...plain.map(t => (t.split(".")[1] || "").length));
  if (!log && largest < 1e6 && most < 7 && !plain.some(t => t.includes("e"))) return marks.map(v => v.toFixed(most));
  for (let digits = 0; digits < 12; digits++) {
    const texts = marks.map(v => v === 0 ? "0" : v.toExponential(digits).replace("e+", "e"));
    if (marks.every((v, i) => Math.abs(+texts[i] - v) <= Math.abs(v) * 1e-9)) return texts;
  }
  return plain;
}

// --- the box at the pointer

function openTip(event) {
  const box = at("tip");
  box.style.display = "block";
  const b = box.getBoundingClientRect();
  box.style.left = (event.clientX + 18 + b.width > innerWidth ? Math.max(4, event.clientX - b.width - 18) : event.clientX + 18) + "px";
  box.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - b.height - 6)) + "px";
}
function closeTip() { at("tip").style.display = "none"; }
