// Lines as a terminal would colour them: colours and weights of ANSI become classes. Everything else that
// could move a cursor, hide text or turn its direction around is shown as what it is.

const ESCAPES = /\x1b\[([0-9;:]*)m|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufeff]/g;
const BIDI_NAMES = {
  0x061c: "ALM", 0x200e: "LRM", 0x200f: "RLM", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO",
  0x202e: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0x2028: "LS", 0x2029: "PS", 0xfeff: "BOM",
};

/** Return the parts of a line: `{text, style}` for text, `{text, mark: true}` for what is not printable.
 * Only colours and weights of ANSI are obeyed; every other escape is shown as what it is. */
export function parseAnsi(line) {
  const parts = [];
  let style = null;
  let from = 0;
  const add = (text, isMark) => {
    if (text) parts.push(isMark ? { text, style, mark: true } : { text, style });
  };
  for (const match of line.matchAll(ESCAPES)) {
    add(line.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[1] !== undefined) style = applySgr(style, match[1]);
    else add(describeControl(match[0]), true);
  }
  add(line.slice(from));
  return parts;
}

function describeControl(found) {
  return Array.from(found, (letter) => {
    const code = letter.codePointAt(0);
    if (code < 0x20 || code === 0x7f) return `^${String.fromCodePoint(code ^ 0x40)}`;
    if (BIDI_NAMES[code]) return `⟨${BIDI_NAMES[code]}⟩`;
    if (code >= 0x80 && code < 0xa0) return `⟨${code.toString(16).toUpperCase()}⟩`;
    return letter;
  }).join("");
}

function applySgr(style, codes) {
  const numbers = (codes || "0").split(/[;:]/).map((code) => Number(code || 0));
  let next = style ? { ...style } : {};
  for (let i = 0; i < numbers.length; i += 1) {
    const code = numbers[i];
    if (code === 0) next = {};
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.underline = true;
    else if (code === 7) next.inverse = true;
    else if (code === 9) next.strike = true;
    else if (code === 22) next.bold = next.dim = false;
    else if (code === 23) next.italic = false;
    else if (code === 24) next.underline = false;
    else if (code === 27) next.inverse = false;
    else if (code === 29) next.strike = false;
    else if (code >= 30 && code <= 37) next.fg = code - 30;
    else if (code >= 90 && code <= 97) next.fg = code - 82;
    else if (code >= 40 && code <= 47) next.bg = code - 40;
    else if (code >= 100 && code <= 107) next.bg = code - 92;
    else if (code === 39) delete next.fg;
    else if (code === 49) delete next.bg;
    else if (code === 38 || code === 48) {
      const key = code === 38 ? "fg" : "bg";
      if (numbers[i + 1] === 5) {
        next[key] = indexColour(numbers[i + 2]);
        i += 2;
      } else if (numbers[i + 1] === 2) {
        next[key] = numbers.slice(i + 2, i + 5).map((v) => Math.max(0, Math.min(255, v | 0)));
        i += 4;
      }
    }
  }
  return next;
}

function indexColour(index) {
  if (!(index >= 0 && index <= 255)) return undefined;
  if (index < 16) return index;
  if (index >= 232) return Array(3).fill(8 + (index - 232) * 10);
  const level = (v) => (v ? 55 + 40 * v : 0);
  const at = index - 16;
  return [level(Math.floor(at / 36)), level(Math.floor(at / 6) % 6), level(at % 6)];
}

function styleSpan(span, style) {
  if (!style) return;
  for (const flag of ["bold", "dim", "italic", "underline", "inverse", "strike"]) {
    if (style[flag]) span.classList.add(`lv-${flag}`);
  }
  for (const [key, name] of [["fg", "color"], ["bg", "backgroundColor"]]) {
    const colour = style[key];
    if (typeof colour === "number") span.classList.add(`lv-${key}${colour}`);
    else if (Array.isArray(colour)) span.style[name] = `rgb(${colour.join(",")})`;
  }
}

/** Return the plain text of a line, as search and the clipboard have it. */
export function stripAnsi(line) {
  return line.replace(/\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?/g, "");
}

/** Put a line into an element: colours by classes, marks where `pattern` was found. */
export function renderLine(element, line, pattern) {
  const parts = parseAnsi(line);
  const ranges = pattern ? findRanges(parts.map((part) => part.text).join(""), pattern) : [];
  let at = 0;
  for (const part of parts) {
    for (const [text, isFound] of splitByRanges(part.text, at, ranges)) {
      const isPlain = !part.mark && !isFound && (!part.style || !Object.keys(part.style).length);
      if (isPlain) {
        element.append(text);
        continue;
      }
      const span = document.createElement(isFound ? "mark" : "span");
      if (part.mark) span.className = "lv-control";
      styleSpan(span, part.style);
      span.textContent = text;
      element.append(span);
    }
    at += part.text.length;
  }
}

function findRanges(text, pattern) {
  const ranges = [];
  for (const match of text.matchAll(pattern)) {
    if (match[0]) ranges.push([match.index, match.index + match[0].length]);
    if (ranges.length >= 100) break;
  }
  return ranges;
}

function* splitByRanges(text, start, ranges) {
  let from = 0;
  for (const [first, end] of ranges) {
    const a = Math.max(first - start, from);
    const b = Math.min(end - start, text.length);
    if (b <= a) continue;
    if (a > from) yield [text.slice(from, a), false];
    yield [text.slice(a, b), true];
    from = b;
  }
  if (from < text.length) yield [text.slice(from), false];
}
