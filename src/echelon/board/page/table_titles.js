// The titles of the table's columns: sort at a click, drag to move, drag the edge for the width, a menu.

import { openMenu as showMenu } from "./dialogs.js";
import { h, icon } from "./dom.js";

/** The row of titles of a table. */
export class TableTitles {
  constructor(table) {
    this.table = table;
    this.store = table.store;
    this.shownKey = null;
    this.head = h("div", {
      class: "rt-head",
      role: "row",
      "aria-rowindex": "1",
      onpointerdown: (event) => this.onPointer(event),
      oncontextmenu: (event) => {
        const at = this.findIndex(event.target);
        if (at < 0) return;
        event.preventDefault();
        this.openMenu(at, { x: event.clientX, y: event.clientY });
      },
    });
  }

  render() {
    const { sort = "when", reverse } = this.store.view;
    const shown = this.store.getShownIds();
    const visible = this.store.getVisibleRows();
    const drawn = visible.reduce((count, row) => count + shown.has(row.id), 0);
    const ticked = !drawn ? "false" : drawn === visible.length ? "true" : "mixed";
    const key = `${this.table.columnKey}|${sort}|${reverse}|${ticked}`;
    if (key === this.shownKey) return;
    this.shownKey = key;
    this.head.replaceChildren(...this.table.columns.map((column, i) => this.buildTitle(column, i, sort, reverse, ticked)));
    this.table.renderActive();
  }

  buildTitle(column, i, sort, reverse, ticked) {
    const isSorted = sort === column.key || (sort === "when" && column.key === "age");
    const isDown = isSorted && Boolean(reverse) !== this.isBestFirst(column.key);
    const direction = isSorted ? (isDown ? "descending" : "ascending") : "none";
    const tick =
      i === 0 &&
      h(
        "div",
        {
          class: "rt-tick",
          role: "checkbox",
          "aria-checked": ticked,
          "aria-label": "Draw all runs",
          title: "Draw all, none, or the first ten",
          onclick: (event) => {
            event.stopPropagation();
            this.tickAll();
          },
        },
        h("i", {}),
      );
    return h(
      "div",
      {
        class: `rt-h kind-${column.kind}${column.isNumber ? " num" : ""}`,
        role: "columnheader",
        id: `rt-title-${i}`,
        "aria-colindex": String(i + 1),
        "aria-sort": direction,
        title: column.title === column.key ? column.key : `${column.title} (${column.key})`,
      },
      tick,
      h("span", {}, column.title),
      isSorted && icon(isDown ? "down" : "up"),
      h("div", { class: "rt-grip", "aria-hidden": "true" }),
    );
  }

  /** Return whether this order begins with the highest values. */
  isBestFirst(key) {
    if (key === "when") return true;
    const row = this.store.getVisibleRows().find((one) => typeof this.store.getValue(one, key) === "number");
    if (!row) return false;
    if (key === "best") return row.best_is === "max";
    return this.store.reader.isMetric(row, key) && this.store.reader.getSortKey(row, key)[1] === -this.store.getValue(row, key);
  }

  tickAll() {
    const now = this.store.get("shown");
    const visible = this.store.getVisibleRows();
    const next = now === "auto" ? "all" : now === "all" ? "none" : "auto";
    this.store.setView({ shown: next === "all" && visible.length <= 10 ? "none" : next }, { replace: true });
  }

  sortBy(key) {
    const wanted = key === "age" ? "when" : key;
    const { reverse } = this.store.view;
    if (this.store.get("sort") !== wanted) this.store.setView({ sort: wanted, reverse: null });
    else if (!reverse) this.store.setView({ reverse: true });
    else this.store.setView({ sort: null, reverse: null });
  }

  findIndex(target) {
    return [...this.head.children].indexOf(target.closest(".rt-h"));
  }

  onPointer(event) {
    const at = this.findIndex(event.target);
    if (at < 0 || event.button || event.target.closest(".rt-tick")) return;
    if (event.target.closest(".rt-grip")) this.startResize(event, at);
    else this.startMove(event, at);
  }

  startResize(event, at) {
    event.preventDefault();
    const column = this.table.columns[at];
    const [startX, startWidth] = [event.clientX, column.width];
    let width = startWidth;
    const grip = event.target;
    follow(grip, event, {
      move: (x) => {
        width = Math.max(40, Math.round(startWidth + x - startX));
        column.width = width;
        this.table.setTemplate();
      },
      end: () => {
        this.table.template = null;
        if (width !== startWidth) this.setWidth(column.key, width);
      },
    });
    grip.addEventListener("dblclick", () => this.setWidth(column.key, null), { once: true });
  }

  setWidth(key, width) {
    const widths = this.table.readWidths();
    if (width === null) widths.delete(key);
    else widths.set(key, Math.max(40, Math.min(900, width)));
    this.store.setView({ widths: [...widths].map(([name, px]) => `${name}:${px}`).join(",") }, { replace: true });
  }

  startMove(event, at) {
    const startX = event.clientX;
    const title = this.head.children[at];
    let target = at;
    let isMoved = false;
    follow(title, event, {
      move: (x) => {
        if (at === 0 || (!isMoved && Math.abs(x - startX) < 6)) return;
        isMoved = true;
        title.classList.add("is-dragged");
        const titles = [...this.head.children];
        target = titles.findIndex((one, i) => i > 0 && x < one.getBoundingClientRect().right);
        if (target < 0) target = titles.length - 1;
        titles.forEach((one, i) => one.classList.toggle("is-target", i === target && i !== at));
      },
      end: () => {
        title.classList.remove("is-dragged");
        [...this.head.children].forEach((one) => one.classList.remove("is-target"));
        if (isMoved) this.moveColumn(at, target);
        else this.sortBy(this.table.columns[at].key);
      },
    });
  }

  moveColumn(from, to) {
    const keys = this.table.columns.map((column) => column.key);
    if (from < 1 || to < 1 || to >= keys.length || from === to) return;
    const [key] = keys.splice(from, 1);
    keys.splice(to, 0, key);
    this.table.setColumns(keys.slice(1));
  }

  openMenu(at, anchor) {
    const { key, title } = this.table.columns[at];
    const keys = this.table.columns.slice(1).map((column) => column.key);
    const wanted = key === "age" ? "when" : key;
    const sort = (reverse) => this.store.setView({ sort: wanted, reverse });
    const isFirstHigh = this.isBestFirst(wanted);
    showMenu(
      anchor,
      [
        title,
        { label: isFirstHigh ? "Highest first" : "Lowest first", icon: "up", onSelect: () => sort(null) },
        { label: isFirstHigh ? "Lowest first" : "Highest first", icon: "down", onSelect: () => sort(true) },
        null,
        { label: "Group by it", icon: "group", disabled: at === 0, onSelect: () => this.store.setView({ group: key, open: null }) },
        { label: "Filter by it…", icon: "search", onSelect: () => this.table.search.begin(`${key}=`) },
        { label: "Its usual width", icon: "columns", onSelect: () => this.setWidth(key, null) },
        { label: "Move to the left", icon: "back", disabled: at < 2, onSelect: () => this.moveColumn(at, at - 1) },
        { label: "Move to the right", icon: "right", disabled: at === 0 || at === keys.length, onSelect: () => this.moveColumn(at, at + 1) },
        { label: "Remove the column", icon: "close", disabled: at === 0, onSelect: () => this.table.setColumns(keys.filter((one) => one !== key)) },
      ],
      { label: `Column ${title}`, focusBack: this.table.scroller },
    );
  }

  onKey(event) {
    const { col } = this.table.active;
    const column = this.table.columns[col];
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && event.altKey) {
      this.moveColumn(col, col + step);
      this.table.setActiveTitle(Math.max(1, col + step));
    } else if (step && event.shiftKey) this.setWidth(column.key, column.width + 16 * step);
    else if (step) this.table.setActiveTitle(col + step);
    else if (event.key === "Home") this.table.setActiveTitle(0);
    else if (event.key === "End") this.table.setActiveTitle(this.table.columns.length - 1);
    else if (event.key === "ArrowDown") this.table.setActive(Math.ceil(this.table.scroller.scrollTop / this.table.rowHeight), -1);
    else if (event.key === "Enter" || event.key === " ") this.sortBy(column.key);
    else if (event.key === "m") this.openMenu(col, this.table.getActiveElement());
    else return false;
    return true;
  }
}

/** Follow a pointer that is held down: `move(x)` at each move, `end()` when it is let go. */
function follow(element, event, { move, end }) {
  const controller = new AbortController();
  const { signal } = controller;
  element.setPointerCapture(event.pointerId);
  element.addEventListener("pointermove", (one) => move(one.clientX), { signal });
  const stop = () => {
    controller.abort();
    end();
  };
  element.addEventListener("pointerup", stop, { signal });
  element.addEventListener("pointercancel", stop, { signal });
}
