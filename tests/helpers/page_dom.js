// node page_dom.js PAGE.html WIDTH [ID X Y]: run the script of a page on elements of WIDTH pixels, point
// at a place of one of them, and print as JSON what it has made: elements by id, texts of canvases.
"use strict";
const fs = require("fs"), vm = require("vm");
const [file, width, id, x, y] = process.argv.slice(2);
const html = fs.readFileSync(file, "utf8");
const known = {}, listeners = {};

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, style: {}, text: "", written: [], classes: new Set() });
    Object.assign(this, { namespaceURI: "svg", clientWidth: +width, clientHeight: 300 });
    this.classList = { toggle: (name, on) => on ? this.classes.add(name) : this.classes.delete(name) };
  }
  append(...parts) { this.children.push(...parts.map(part => part instanceof Element ? part : Object.assign(new Element("#text"), { text: part }))); }
  appendChild(element) { this.append(element); return element; }
  replaceChildren(...elements) { this.children = elements; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  getAttribute(name) { return this.attributes[name] ?? null; }
  addEventListener() {}
  getBoundingClientRect() { return { width: 200, height: 100 }; }
  get firstElementChild() { return this.children[0]; }
  get content() { const box = new Element("box"); box.append(new Element("svg")); box.children[0].append(new Element("line")); return box; }
  cloneNode() { const copy = new Element(this.tag); copy.children = this.children.map(child => child.cloneNode()); return copy; }
  set textContent(text) { this.text = String(text); this.children = []; }
  get textContent() { return this.text; }
  getContext() {
    const write = (text, px, py) => this.written.push([String(text), px, py]);
    const special = { fillText: write, measureText: text => ({ width: 6.5 * text.length }) };
    return new Proxy({}, { get: (_, name) => special[name] ?? (() => undefined), set: () => true });
  }
  toJSON() {
    const { tag, attributes, text, children, written, classes } = this;
    return { tag, attributes, text, children, written, classes: [...classes, this.className].filter(Boolean) };
  }
}
const walk = element => [element, ...element.children.flatMap(walk)];
const document = {
  documentElement: new Element("html"),
  getElementById: name => known[name] ??= new Element("div"),
  createElement: tag => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  querySelectorAll: () => Object.values(known).flatMap(walk).filter(e => e.attributes["data-n"] !== undefined),
};
document.getElementById("data").text = html.match(/id="data">(.*?)<\/script>/s)[1];
vm.runInNewContext(html.match(/<script>(.*?)<\/script>/s)[1], {
  document, console, devicePixelRatio: 1, innerWidth: +width, innerHeight: 900,
  addEventListener: (name, listener) => listeners[name] = listener, matchMedia: () => ({ matches: false, addEventListener() {} }),
  getComputedStyle: () => ({ getPropertyValue: () => "#000" }), requestAnimationFrame: draw => draw(),
});
if (id) known[id].onpointermove({ offsetX: +x, offsetY: +y, clientX: +x, clientY: +y });
listeners.resize(); // as when a scrollbar appears
delete known.data;
console.log(JSON.stringify(known));
