// What a panel shows as a file: an image, a drawing, a table; and the address of the page that `echelon plot` makes.

import { getTheme } from "./chart.js";

/* global uPlot */

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const LEGEND_LINE = 18;
const TITLE_HEIGHT = 30;
const PNG_WIDTH = 1600;

/** Save text or bytes under a name, without asking the server. */
export function saveFile(name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Return a name that every file system takes. */
export function makeFileName(name, suffix) {
  return `${name.replace(/[^\w.+-]+/g, "-").replace(/^[-.]+|-+$/g, "").slice(0, 100) || "chart"}.${suffix}`;
}

/** Return the address of the page that `echelon plot` makes of these curves. */
export function makePlotAddress(rows, metrics, settings, isLog) {
  const query = new URLSearchParams();
  for (const row of rows.slice(0, 200)) query.append("run", row.id);
  for (const metric of metrics.slice(0, 40)) query.append("metric", metric);
  query.set("x", settings.x === "clock" ? "time" : settings.x);
  query.set("smooth", String(settings.smooth));
  query.set("log", isLog ? "1" : "0");
  return `/api/plot.html?${query}`;
}

/** Save a panel as an image, finer than the screen: it is for a paper or a talk. */
export async function downloadPng(panel) {
  if (!panel.chart.plot) return;
  const { text, width, height } = renderSvg(panel);
  const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const scale = Math.max(2, Math.ceil(PNG_WIDTH / width));
    const canvas = document.createElement("canvas");
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => blob && saveFile(makeFileName(panel.metric, "png"), blob));
  } finally {
    URL.revokeObjectURL(address);
  }
}

function layOutLegend(lines, width) {
  const ctx = document.createElement("canvas").getContext("2d");
  ctx.font = `12px ${FONT}`;
  const items = [];
  let x = 12;
  let y = 14;
  for (const line of lines) {
    const size = Math.min(width - 24, ctx.measureText(line.name).width + 44);
    if (x + size > width - 8 && x > 12) {
      x = 12;
      y += LEGEND_LINE;
    }
    items.push({ line, x, y });
    x += size;
  }
  return { items, height: items.length ? y + 12 : 0 };
}

/** Save a panel as a drawing whose text stays text. */
export function downloadSvg(panel) {
  if (panel.chart.plot) saveFile(makeFileName(panel.metric, "svg"), renderSvg(panel).text, "image/svg+xml");
}

/** Return the drawing of a panel: `{text, width, height}`. */
export function renderSvg(panel) {
  const { chart, metric, lines } = panel;
  const { plot } = chart;
  const ratio = uPlot.pxRatio;
  const theme = getTheme();
  const box = { left: plot.bbox.left / ratio, top: plot.bbox.top / ratio + TITLE_HEIGHT, width: plot.bbox.width / ratio };
  box.height = plot.bbox.height / ratio;
  const legend = layOutLegend(lines, plot.width);
  const height = plot.height + TITLE_HEIGHT + legend.height;
  const out = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${plot.width}" height="${height}" viewBox="0 0 ${plot.width} ${height}" font-family="${escapeXml(FONT)}" font-size="11">`,
    `<title>${escapeXml(metric)}</title>`,
    `<rect width="100%" height="100%" fill="${theme.bg}"/>`,
    `<text x="10" y="20" font-size="14" font-weight="600" fill="${theme.fg}">${escapeXml(metric)}</text>`,
    `<clipPath id="area"><rect x="${box.left}" y="${box.top}" width="${box.width}" height="${box.height}"/></clipPath>`,
    ...renderAxes(plot, box, theme),
    '<g clip-path="url(#area)" fill="none" stroke-linejoin="bevel">',
  ];
  const map = chart.getMap(plot, 1 / ratio);
  map.bottom += TITLE_HEIGHT;
  for (const line of lines) {
    if (line.tLow) out.push(`<path d="${traceBand(line, map)}" fill="${line.colour}" fill-opacity="0.16"/>`);
    if (line.tPale) out.push(`<path d="${traceLine(line.tx, line.tPale, map)}" stroke="${line.colour}" stroke-opacity="0.22"/>`);
  }
  for (const line of lines) {
    const dash = line.dash ? ` stroke-dasharray="${line.dash.map((part) => part * 2).join(" ")}"` : "";
    const name = `<title>${escapeXml(line.name)}</title>`;
    out.push(`<path d="${traceLine(line.tx, line.ty, map)}" stroke="${line.colour}" stroke-width="1.5"${dash}>${name}</path>`);
  }
  out.push("</g>");
  for (const { line, x, y } of legend.items) {
    const top = plot.height + TITLE_HEIGHT + y;
    const dash = line.dash ? ` stroke-dasharray="${line.dash.map((part) => part * 2.5).join(" ")}"` : "";
    out.push(`<path d="M${x} ${top}h18" stroke="${line.colour}" stroke-width="2.5"${dash}/>`);
    out.push(`<text x="${x + 24}" y="${top + 4}" font-size="12" fill="${theme.fg}">${escapeXml(line.name)}</text>`);
  }
  out.push("</svg>\n");
  return { text: out.join("\n"), width: plot.width, height };
}

function renderAxes(plot, box, theme) {
  const out = [];
  plot.axes.forEach((axis, i) => {
    const isX = i === 0;
    (axis._splits || []).forEach((value, k) => {
      const at = plot.valToPos(value, isX ? "x" : "y");
      const x = box.left + (isX ? at : 0);
      const y = box.top + (isX ? 0 : at);
      if (at < -0.5 || at > (isX ? box.width : box.height) + 0.5) return;
      out.push(`<path d="M${round(x)} ${round(y)}${isX ? `v${box.height}` : `h${box.width}`}" stroke="${theme.line}"/>`);
      const text = axis._values ? axis._values[k] : null;
      if (!text) return;
      const place = isX ? `x="${round(x)}" y="${box.top + box.height + 16}" text-anchor="middle"` : `x="${box.left - 6}" y="${round(y) + 4}" text-anchor="end"`;
      String(text).split("\n").forEach((line, n) => {
        out.push(`<text ${place} dy="${n * 13}" fill="${theme.fg2}">${escapeXml(line)}</text>`);
      });
    });
  });
  return out;
}

function traceLine(tx, ty, map) {
  const parts = [];
  let isDown = false;
  for (let i = 0; i < tx.length; i++) {
    const isInside = tx[Math.min(tx.length - 1, i + 1)] >= map.x0 && tx[Math.max(0, i - 1)] <= map.x1;
    if (!isInside || !Number.isFinite(ty[i]) || !Number.isFinite(tx[i])) {
      isDown = false;
      continue;
    }
    parts.push(`${isDown ? "L" : "M"}${toPlace(tx[i], ty[i], map)}`);
    isDown = true;
  }
  return parts.join("");
}

function traceBand({ tx, tLow, tHigh }, map) {
  const ids = [...tx.keys()].filter((i) => Number.isFinite(tLow[i]) && Number.isFinite(tHigh[i]));
  const there = ids.map((i) => toPlace(tx[i], tHigh[i], map));
  const back = ids.reverse().map((i) => toPlace(tx[i], tLow[i], map));
  return there.length ? `M${[...there, ...back].join("L")}Z` : "";
}

function toPlace(x, y, map) {
  return `${round(map.left + (x - map.x0) * map.sx)} ${round(map.bottom - (y - map.y0) * map.sy)}`;
}

function round(value) {
  return Math.round(value * 100) / 100;
}

function escapeXml(text) {
  // Characters that XML has not at all would make the whole file unreadable.
  // eslint-disable-next-line no-control-regex
  const clean = String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");
  return clean.replace(/[<>&"]/g, (c) => ({ "<": "&lt;", ">": "&gt;", "&": "&amp;", '"': "&quot;" })[c]);
}

/** Save the visible points of a panel: a line per point of each run. */
export function downloadCsv(panel) {
  saveFile(makeFileName(panel.metric, "csv"), renderCsv(panel), "text/csv");
}

/** Return the table of a panel: run, x, value, where a curve is smoothed that too, and a band's ends. */
export function renderCsv(panel) {
  const { lines, owner, metric } = panel;
  const [from, to] = owner.xRange;
  const hasSmooth = lines.some((line) => line.pale);
  const hasBand = lines.some((line) => line.low);
  const head = ["run", owner.settings.x, metric];
  if (hasSmooth) head.push(`${metric} (smoothed)`);
  if (hasBand) head.push("low", "high");
  const rows = [head.map(quoteCell).join(",")];
  for (const line of lines) {
    const name = quoteCell(line.name);
    for (let i = 0; i < line.x.length; i++) {
      if (line.x[i] < from || line.x[i] > to) continue;
      const cells = [name, line.x[i], (line.pale || line.y)[i]];
      if (hasSmooth) cells.push(line.pale ? line.y[i] : "");
      if (hasBand) cells.push(line.low ? line.low[i] : "", line.high ? line.high[i] : "");
      rows.push(cells.map((cell) => (cell === cell ? cell : "")).join(","));
    }
  }
  return `${rows.join("\n")}\n`;
}

/** Quote a cell, and keep a spreadsheet from taking a name for a formula. */
export function quoteCell(value) {
  const text = String(value);
  const safe = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
