// The rows of the table that are in sight: elements that show one run or group after the other.

import { h, icon } from "./dom.js";
import { makeCell, makeGroupCell } from "./table_columns.js";

let nextId = 0;

/** What rows of runs and of groups have in common. */
class RowView {
  constructor(table, type) {
    this.table = table;
    this.type = type;
    this.item = null;
    this.top = undefined;
    this.isActive = false;
    this.activeCol = -1;
    const id = `rt-row-${(nextId += 1)}`;
    this.cells = table.columns.map((column, i) =>
      h("div", { class: "rt-c", role: "gridcell", id: `${id}-${i}`, "aria-colindex": String(i + 1) }),
    );
    this.element = h("div", { class: "rt-row", role: "row", id }, this.cells);
    this.tick = h("div", { class: "rt-tick", role: "checkbox", "data-do": "tick", title: "Draw" }, h("i", {}));
  }

  place(index) {
    const { element, table } = this;
    const top = index * table.rowHeight;
    if (this.top === top) return;
    this.top = top;
    element.style.transform = `translateY(${top}px)`;
    element.setAttribute("aria-rowindex", String(index + 2));
  }

  hide() {
    if (this.top === null) return;
    this.item = null;
    this.top = null;
    this.element.style.transform = "translateY(-9999px)"; // cheaper to bring back than with no display
  }

  setTick(state, label) {
    if (this.ticked !== state) {
      this.ticked = state;
      this.tick.setAttribute("aria-checked", state);
      this.element.setAttribute("aria-selected", String(state === "true"));
    }
    if (this.label !== label) {
      this.label = label;
      this.tick.setAttribute("aria-label", label);
    }
  }

  setDot(colour) {
    if (this.dot === colour) return;
    this.dot = colour;
    this.tick.style.setProperty("--dot", colour);
  }

  setActive(isActive, col) {
    if (this.activeCol >= 0) this.cells[this.activeCol].classList.remove("is-active");
    this.isActive = isActive;
    this.activeCol = col;
    this.element.classList.toggle("is-active", isActive);
    this.element.classList.toggle("has-cell", isActive && col >= 0);
    if (isActive && col >= 0) this.cells[col].classList.add("is-active");
  }
}

/** A row of one run. */
export class RunRowView extends RowView {
  constructor(table) {
    super(table, "run");
    const [first, ...rest] = this.cells;
    first.classList.add("rt-name");
    this.link = h("a", { tabindex: "-1", "data-do": "open" });
    this.pin = h("button", { tabindex: "-1", "data-do": "pin" }, icon("pin"));
    const more = h("button", { tabindex: "-1", "data-do": "menu", "aria-label": "Menu of the run", title: "More" }, icon("more"));
    first.append(this.tick, this.link, h("span", { class: "rt-more" }, this.pin, more));
    if (table.store.view.group) first.classList.add("is-child");
    const isTop = (row) => table.isTop(row);
    this.shows = rest.map((cell, i) => makeCell(cell, table.columns[i + 1], isTop));
    if (table.store.view.group) this.element.setAttribute("aria-level", "2");
  }

  show(row, index, shownIds, pinned) {
    this.item = row;
    this.place(index);
    if (this.shownId !== row.id) {
      this.shownId = row.id;
      this.link.textContent = row.name;
      this.link.href = `?page=run&run=${encodeURIComponent(row.id)}`;
    }
    const isShown = shownIds.has(row.id);
    this.setTick(String(isShown), `Draw ${row.name}`);
    this.setDot(isShown ? this.table.store.getColour(row.id) : "transparent");
    const isPinned = pinned.has(row.id);
    if (this.isPinned !== isPinned) this.showPin(isPinned);
    for (const show of this.shows) show(row);
  }

  showPin(isPinned) {
    this.isPinned = isPinned;
    this.element.classList.toggle("is-pinned", isPinned);
    this.pin.classList.toggle("is-on", isPinned);
    this.pin.setAttribute("aria-label", isPinned ? "Unpin" : "Pin to the top");
    this.pin.setAttribute("aria-pressed", String(isPinned));
  }
}

/** A row of a group: how many runs, and the means of their results. */
export class GroupRowView extends RowView {
  constructor(table) {
    super(table, "group");
    const [first, ...rest] = this.cells;
    first.classList.add("rt-name");
    this.element.classList.add("is-group");
    this.element.setAttribute("aria-level", "1");
    this.title = h("span", {});
    this.count = h("small", {});
    first.append(h("span", { class: "rt-fold" }, icon("right")), this.tick, this.title, this.count);
    this.shows = rest.map((cell, i) => makeGroupCell(cell, table.columns[i + 1]));
  }

  show(group, index, shownIds) {
    this.item = group;
    this.place(index);
    this.title.textContent = group.label;
    this.count.textContent = String(group.rows.length);
    this.element.setAttribute("aria-expanded", String(group.isOpen));
    const drawn = group.rows.filter((row) => shownIds.has(row.id));
    const state = !drawn.length ? "false" : drawn.length === group.rows.length ? "true" : "mixed";
    this.setTick(state, `Draw the runs with ${group.label}`);
    this.setDot(drawn.length ? this.table.store.getColour(drawn[0].id) : "transparent");
    for (const show of this.shows) show(group);
  }
}
