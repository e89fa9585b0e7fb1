// The table of runs: only the rows in sight are in the document.

import { importPart } from "./api.js";
import { closePopover, openPopover } from "./dialogs.js";
import { h, icon } from "./dom.js";
import { GroupRowView, RunRowView } from "./row_views.js";
import { SearchBox } from "./search_box.js";
import { Column, chooseColumns } from "./table_columns.js";
import { TableMenus } from "./table_menus.js";
import { TableNotes } from "./table_notes.js";
import { TableTitles } from "./table_titles.js";

const OVERSCAN = 8;
const HEAD_PX = 30;
const MEASURED_ROWS = 60;
const CLOCK_MS = 10000;
const PHONE = matchMedia("(max-width: 560px)");

/** Mount the table; see the contract of view modules: `{update(kind), unmount()}`. */
export function mount(element, store) {
  const table = new RunsTable(element, store);
  return { update: (kind) => table.update(kind), unmount: () => table.unmount() };
}

class RunsTable {
  constructor(element, store) {
    this.store = store;
    this.items = [];
    this.columns = [];
    this.columnKey = null;
    this.views = new Map();
    this.free = { run: [], group: [] };
    this.active = { id: null, col: -1, isHead: false };
    this.tops = new Map();
    this.frame = 0;
    this.drafts = new Map();
    this.before = null;
    this.build(element);
    this.clock = setInterval(() => this.renderRows(true), CLOCK_MS);
    this.stopThemes = store.on("theme", () => this.renderRows(true));
    this.refresh();
  }

  unmount() {
    clearInterval(this.clock);
    cancelAnimationFrame(this.frame);
    this.observer.disconnect();
    this.stopThemes();
    this.search.stop();
  }

  build(element) {
    this.titles = new TableTitles(this);
    this.menus = new TableMenus(this);
    this.notes = new TableNotes(this);
    this.search = new SearchBox(this.store, () => this.focus());
    this.groupButton = this.buildBarButton("group", "Group", (event) => this.menus.openGroupMenu(event.currentTarget));
    this.columnsButton = this.buildBarButton("columns", "Columns", (event) => this.menus.openColumns(event.currentTarget));
    this.viewsButton = this.buildBarButton("views", "Views", (event) => this.menus.openViews(event.currentTarget));
    this.chartsButton = this.buildBarButton("table", "Charts", () => this.store.setView({ panel: "curves" }));
    this.rootButton = this.buildBarButton("table", "All folders", (event) => this.menus.openRoots(event.currentTarget));
    this.body = h("div", { class: "rt-body", role: "rowgroup" });
    this.scroller = h(
      "div",
      { class: "rt-scroll", role: "treegrid", tabindex: "0", "aria-label": "Runs", "aria-multiselectable": "true" },
      h("div", { role: "rowgroup", class: "rt-headgroup" }, this.titles.head),
      this.body,
      this.notes.note,
    );
    this.element = h(
      "div",
      { class: "rt" },
      h(
        "div",
        { class: "rt-bar", role: "toolbar", "aria-label": "Table" },
        this.search.element,
        this.rootButton,
        this.groupButton,
        this.columnsButton,
        this.viewsButton,
        this.chartsButton,
      ),
      this.search.chips,
      this.scroller,
      this.notes.foot,
    );
    element.append(this.element);
    this.wire();
  }

  buildBarButton(name, label, onclick) {
    const text = h("span", { class: "rt-label" }, label);
    return h("button", { "aria-haspopup": "true", "aria-expanded": "false", "aria-label": label, onclick }, icon(name), text);
  }

  wire() {
    const { scroller } = this;
    scroller.addEventListener("scroll", () => this.onScroll(), { passive: true });
    scroller.addEventListener("keydown", (event) => this.onKey(event));
    scroller.addEventListener("focus", () => this.onFocus());
    this.body.addEventListener("click", (event) => this.onClick(event));
    this.body.addEventListener("dblclick", (event) => this.onDoubleClick(event));
    this.body.addEventListener("contextmenu", (event) => this.onContextMenu(event));
    this.body.addEventListener("pointerover", (event) => this.explainCell(event.target));
    this.height = 0;
    this.readSize();
    this.observer = new ResizeObserver(() => this.readSize() && this.refresh());
    this.observer.observe(scroller);
  }

  /** Read how much is in sight; return whether that has changed. */
  readSize() {
    const { clientHeight, clientWidth } = this.scroller;
    const rowHeight = PHONE.matches ? 36 : 30;
    const isSame = clientHeight === this.height && clientWidth === this.width && rowHeight === this.rowHeight;
    this.height = clientHeight;
    this.width = clientWidth;
    this.rowHeight = rowHeight;
    return !isSame;
  }

  update(kind) {
    if (kind !== "rows" && kind !== "view") return;
    cancelAnimationFrame(this.frame);
    if (kind === "view" || !this.items.length) this.refresh();
    else this.frame = requestAnimationFrame(() => this.refresh());
  }

  // --- what is shown ---

  refresh() {
    const anchor = this.findAnchor();
    this.items = this.listItems();
    this.findTops();
    this.buildColumns();
    this.body.style.height = `${this.items.length * this.rowHeight}px`;
    this.scroller.setAttribute("aria-rowcount", String(this.items.length + 1));
    this.scroller.setAttribute("aria-busy", String(!this.store.meta.complete));
    this.restoreAnchor(anchor);
    this.renderRows(true);
    this.titles.render();
    this.notes.render();
    this.renderBar();
    this.search.update();
  }

  listItems() {
    const groups = this.store.getGroups();
    if (!groups) return this.store.getVisibleRows();
    const open = new Set(this.store.view.open);
    const items = [];
    for (const group of groups) {
      group.isOpen = open.has(hashKey(group.key));
      items.push(group);
      if (group.isOpen) items.push(...group.rows);
    }
    return items;
  }

  /** Find the best result of each experiment and metric among the runs that are shown. */
  findTops() {
    const tops = new Map();
    let last = { experiment: null, name: null, top: null };
    for (const { best, best_is: bestIs, best_name: name, experiment } of this.store.getVisibleRows()) {
      if (typeof best !== "number") continue;
      if (last.experiment !== experiment || last.name !== name) {
        const key = `${experiment}\n${name}`;
        if (!tops.has(key)) tops.set(key, { best, count: 0 });
        last = { experiment, name, top: tops.get(key) }; // most runs are like the one before
      }
      last.top.count += 1;
      if (bestIs === "max" ? best > last.top.best : best < last.top.best) last.top.best = best;
    }
    this.tops = tops;
  }

  isTop(row) {
    const top = this.tops.get(`${row.experiment}\n${row.best_name}`);
    return top !== undefined && top.count > 1 && top.best === row.best;
  }

  getColumnKeys() {
    const chosen = this.store.view.columns;
    return chosen ? chosen.filter((key) => key !== "name") : chooseColumns(this.store);
  }

  buildColumns() {
    const keys = ["name", ...this.getColumnKeys()];
    const widths = this.readWidths();
    const rows = this.store.getVisibleRows();
    const columns = keys.map((one) => new Column(this.store, one, rows));
    const isNarrow = this.width < 480;
    const titles = columns.map((column) => `${column.key} ${column.title} ${column.isNumber}`);
    const key = [...titles, rows.length > 0, isNarrow, this.store.view.group].join("\n");
    if (key !== this.columnKey) {
      this.columnKey = key;
      this.columns = columns;
      this.measureColumns(rows, isNarrow);
      this.dropRows();
      this.scroller.setAttribute("aria-colcount", String(keys.length));
      this.titles.shownKey = null;
    }
    for (const column of this.columns) column.width = widths.get(column.key) || column.ownWidth;
    const template = this.columns.map((column) => `${column.width}px`).join(" ");
    if (template !== this.template) {
      this.template = template;
      this.setTemplate();
    }
  }

  /** Choose widths by some rows, once: a column that follows every change jumps. */
  measureColumns(rows, isNarrow) {
    const groups = this.store.getGroups() || [];
    const stride = Math.max(1, Math.floor(rows.length / MEASURED_ROWS));
    const sample = rows.filter((row, i) => i < MEASURED_ROWS || i % stride === 0);
    for (const column of this.columns) column.ownWidth = column.measure(sample, groups);
    if (groups.length) this.columns[0].ownWidth = Math.max(this.columns[0].ownWidth, 280);
    this.element.classList.toggle("is-narrow", isNarrow);
    if (isNarrow) this.narrowColumns();
  }

  /** On a phone the state is its dot, and the name leaves room for step and result. */
  narrowColumns() {
    for (const column of this.columns) {
      const name = this.store.view.group ? 210 : 156;
      if (column.key === "name") column.ownWidth = Math.min(column.ownWidth, name);
      if (column.key === "state") column.ownWidth = 24;
      if (column.key === "step") column.ownWidth = Math.min(column.ownWidth, 88);
    }
  }

  setTemplate() {
    const widths = this.columns.map((column) => column.width);
    const { style } = this.element;
    style.setProperty("--columns", `${widths.map((width) => `${width}px`).join(" ")} minmax(0, 1fr)`);
    style.setProperty("--width", `${widths.reduce((sum, width) => sum + width, 0)}px`);
  }

  readWidths() {
    const text = this.store.view.widths || "";
    return new Map(
      text
        .split(",")
        .filter(Boolean)
        .map((part) => [part.slice(0, part.lastIndexOf(":")), Number(part.slice(part.lastIndexOf(":") + 1))])
        .filter(([, width]) => width >= 30 && width <= 2000),
    );
  }

  dropRows() {
    for (const view of this.views.values()) view.element.remove();
    this.views.clear();
    this.free = { run: [], group: [] };
  }

  // --- rows in sight ---

  findAnchor() {
    const scroll = this.scroller.scrollTop;
    if (!this.items.length || scroll < this.rowHeight) return null;
    const index = Math.min(this.items.length - 1, Math.floor(scroll / this.rowHeight));
    return { id: getItemId(this.items[index]), rest: scroll - index * this.rowHeight };
  }

  /** Keep the first row in sight where it is, whatever came or went above it. */
  restoreAnchor(anchor) {
    if (!anchor) return;
    const index = this.items.findIndex((item) => getItemId(item) === anchor.id);
    if (index < 0) return;
    const scroll = index * this.rowHeight + anchor.rest;
    if (Math.abs(scroll - this.scroller.scrollTop) > 1) this.scroller.scrollTop = scroll;
  }

  onScroll() {
    const isScrolled = this.scroller.scrollLeft > 0; // read before anything is written
    this.renderRows(false);
    if (isScrolled === this.isScrolled) return;
    this.isScrolled = isScrolled;
    this.scroller.classList.toggle("is-scrolled", isScrolled);
  }

  renderRows(isChanged) {
    const { rowHeight, items } = this;
    const scroll = this.scroller.scrollTop;
    const first = Math.max(0, Math.floor(scroll / rowHeight) - OVERSCAN);
    const last = Math.min(items.length, Math.ceil((scroll + this.height) / rowHeight) + OVERSCAN);
    for (const [index, view] of this.views) {
      if (index >= first && index < last && view.type === getItemType(items[index])) continue;
      this.views.delete(index);
      this.free[view.type].push(view);
    }
    const shownIds = this.store.getShownIds();
    const pinned = new Set(this.store.view.pin);
    for (let index = first; index < last; index += 1) {
      const item = items[index];
      let view = this.views.get(index);
      const isNew = !view;
      if (isNew) {
        view = this.free[getItemType(item)].pop() || this.makeRow(getItemType(item));
        this.views.set(index, view);
      }
      if (isNew || isChanged || view.item !== item) view.show(item, index, shownIds, pinned);
    }
    for (const views of Object.values(this.free)) for (const view of views) view.hide();
    this.renderActive();
  }

  makeRow(type) {
    const view = type === "run" ? new RunRowView(this) : new GroupRowView(this);
    this.body.append(view.element);
    return view;
  }

  // --- the active row and cell ---

  findActiveIndex() {
    if (this.active.id === null) return -1;
    return this.items.findIndex((item) => getItemId(item) === this.active.id);
  }

  renderActive() {
    const { active } = this;
    let name = null;
    for (const view of this.views.values()) {
      const isHere = !active.isHead && getItemId(view.item) === active.id;
      const col = isHere ? active.col : -1;
      if (view.isActive !== isHere || view.activeCol !== col) view.setActive(isHere, col);
      if (isHere) name = col >= 0 ? view.cells[col].id : view.element.id;
    }
    const title = active.isHead ? this.titles.head.children[Math.max(0, active.col)] : null;
    if (this.activeTitle !== title) {
      if (this.activeTitle) this.activeTitle.classList.remove("is-active");
      if (title) title.classList.add("is-active");
      this.activeTitle = title;
    }
    if (title) name = title.id;
    if (this.activeName === name) return;
    this.activeName = name;
    if (name) this.scroller.setAttribute("aria-activedescendant", name);
    else this.scroller.removeAttribute("aria-activedescendant");
  }

  setActive(index, col = this.active.col) {
    if (!this.items.length) return;
    const bounded = Math.max(0, Math.min(this.items.length - 1, index));
    this.active = { id: getItemId(this.items[bounded]), col, isHead: false };
    this.scrollTo(bounded, col);
    this.renderActive();
  }

  setActiveTitle(col) {
    const bounded = Math.max(0, Math.min(this.columns.length - 1, col));
    this.active = { ...this.active, col: bounded, isHead: true };
    this.scrollToColumn(bounded);
    this.renderActive();
  }

  scrollTo(index, col) {
    const { scroller, rowHeight } = this;
    const top = index * rowHeight;
    const room = this.height - HEAD_PX - rowHeight;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    else if (top > scroller.scrollTop + room) scroller.scrollTop = top - room;
    this.scrollToColumn(col);
    this.renderRows(false);
  }

  scrollToColumn(col) {
    if (col < 1) {
      if (col === 0) this.scroller.scrollLeft = 0;
      return;
    }
    const left = this.columns.slice(0, col).reduce((sum, column) => sum + column.width, 0);
    const right = left + this.columns[col].width;
    const fixed = this.columns[0].width;
    const { scrollLeft, clientWidth } = this.scroller;
    if (left - fixed < scrollLeft) this.scroller.scrollLeft = left - fixed;
    else if (right > scrollLeft + clientWidth) this.scroller.scrollLeft = right - clientWidth;
  }

  focus() {
    this.scroller.focus({ preventScroll: true });
  }

  onFocus() {
    if (this.findActiveIndex() < 0 && !this.active.isHead) {
      this.setActive(Math.ceil(this.scroller.scrollTop / this.rowHeight), -1);
    }
  }

  // --- keys ---

  onKey(event) {
    if (event.target !== this.scroller || event.ctrlKey || event.metaKey) return;
    const handled = this.active.isHead ? this.titles.onKey(event) : this.onRowKey(event);
    if (handled) {
      event.preventDefault();
      event.stopPropagation();
    }
  }

  onRowKey(event) {
    const index = this.findActiveIndex();
    const { col } = this.active;
    const item = this.items[index];
    const page = Math.max(1, Math.floor((this.height - HEAD_PX) / this.rowHeight) - 1);
    const isInCells = col >= 0;
    switch (event.key) {
      case "ArrowDown":
        return this.go(index + 1);
      case "ArrowUp":
        if (index > 0) return this.go(index - 1);
        this.setActiveTitle(col);
        return true;
      case "PageDown":
        return this.go(index + page);
      case "PageUp":
        return this.go(index - page);
      case "Home":
        return isInCells ? this.go(index, 0) : this.go(0);
      case "End":
        return isInCells ? this.go(index, this.columns.length - 1) : this.go(this.items.length - 1);
      case "ArrowRight":
        if (item && item.rows && !item.isOpen && !isInCells) return this.toggleGroup(item);
        return this.go(index, Math.min(this.columns.length - 1, col + 1));
      case "ArrowLeft":
        if (item && item.rows && item.isOpen && !isInCells) return this.toggleGroup(item);
        if (!isInCells && item && !item.rows && this.store.view.group) return this.goToGroup(item);
        return this.go(index, Math.max(-1, col - 1));
      default:
        return item ? this.onItemKey(event, item) : false;
    }
  }

  go(index, col) {
    this.setActive(index, col);
    return true;
  }

  goToGroup(row) {
    return this.go(this.items.findIndex((item) => item.rows && item.rows.includes(row)));
  }

  onItemKey(event, item) {
    const rows = item.rows || [item];
    const ids = rows.map((row) => row.id);
    const column = this.columns[this.active.col];
    if (event.altKey) return false;
    switch (event.key) {
      case " ":
        this.tick(item);
        return true;
      case "Enter":
      case "F2":
        if (item.rows) return this.toggleGroup(item);
        if (column && (column.key === "tags" || column.key === "note")) this.editAnnotations(item, column.key);
        else if (event.key === "Enter") this.openRun(item);
        else this.editAnnotations(item, "note");
        return true;
      case "o":
        this.drawOnly(ids);
        return true;
      case "p":
        this.togglePin(ids);
        return true;
      case "h":
        this.hide(ids);
        return true;
      case "t":
        if (!item.rows) this.editAnnotations(item, "tags");
        return true;
      case "m":
      case "ContextMenu":
        if (!item.rows) this.menus.openRun(item, this.getActiveElement());
        return true;
      default:
        return false;
    }
  }

  getActiveElement() {
    const name = this.scroller.getAttribute("aria-activedescendant");
    return (name && document.getElementById(name)) || this.scroller;
  }

  // --- the pointer ---

  findItem(target) {
    const row = target.closest(".rt-row");
    if (!row) return null;
    for (const [index, view] of this.views) if (view.element === row) return { item: view.item, index, view };
    return null;
  }

  onClick(event) {
    const found = this.findItem(event.target);
    if (!found) return;
    const { item, index } = found;
    const action = event.target.closest("[data-do]")?.dataset.do;
    const cell = event.target.closest(".rt-c");
    const col = found.view.cells.indexOf(cell);
    this.active = { id: getItemId(item), col: -1, isHead: false };
    if (action === "tick") this.tick(item, event);
    else if (action === "open") this.followRun(item, event);
    else if (action === "pin") this.togglePin([item.id]);
    else if (action === "menu") this.menus.openRun(item, event.target.closest("button"));
    else if (action === "edit") this.editAnnotations(item, this.columns[col].key, cell);
    else if (item.rows) this.toggleGroup(item);
    this.lastTicked = action === "tick" ? index : this.lastTicked;
    this.renderActive();
  }

  /** Give the cell under the pointer its explanation, or its whole text where it is cut. */
  explainCell(target) {
    const cell = target.closest(".rt-c");
    const found = cell && this.findItem(cell);
    if (!found) return;
    const column = this.columns[found.view.cells.indexOf(cell)];
    const isCut = cell.scrollWidth > cell.clientWidth;
    const text = column.explain(found.item) || (isCut ? cell.textContent : "");
    if (cell.title !== text) cell.title = text;
  }

  onDoubleClick(event) {
    const found = this.findItem(event.target);
    if (found && !found.item.rows && !event.target.closest("[data-do]")) this.openRun(found.item);
  }

  onContextMenu(event) {
    const found = this.findItem(event.target);
    if (!found || found.item.rows || event.target.closest("a")) return;
    event.preventDefault();
    this.active = { id: found.item.id, col: -1, isHead: false };
    this.renderActive();
    this.menus.openRun(found.item, { x: event.clientX, y: event.clientY });
  }

  followRun(item, event) {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return; // the browser opens another tab
    event.preventDefault();
    this.openRun(item);
  }

  // --- what can be done with runs ---

  openRun(row) {
    this.store.setView({ page: "run", run: row.id });
  }

  tick(item, event) {
    const ids = (item.rows || [item]).map((row) => row.id);
    const shown = this.store.getShownIds();
    const isOn = ids.every((id) => shown.has(id));
    if (event && event.altKey) {
      this.drawOnly(ids);
      return;
    }
    if (event && event.shiftKey && this.lastTicked !== undefined) {
      const index = this.items.indexOf(item);
      const [from, to] = [Math.min(index, this.lastTicked), Math.max(index, this.lastTicked)];
      for (const one of this.items.slice(from, to + 1)) if (!one.rows) ids.push(one.id);
    }
    this.store.setShown(ids, !isOn);
  }

  drawOnly(ids) {
    const now = this.store.getShownIds();
    const isOnly = now.size === ids.length && ids.every((id) => now.has(id));
    if (isOnly && this.before !== null) {
      this.store.setView({ shown: this.before }, { replace: true });
      this.before = null;
      return;
    }
    this.before = this.store.get("shown");
    this.store.setShown([...now], false);
    this.store.setShown(ids, true);
  }

  togglePin(ids) {
    const pinned = this.store.view.pin || [];
    const isOn = ids.every((id) => pinned.includes(id));
    const rest = pinned.filter((id) => !ids.includes(id));
    this.store.setView({ pin: isOn ? rest : [...rest, ...ids] }, { replace: true });
  }

  hide(ids) {
    const index = this.findActiveIndex();
    const hidden = this.store.view.hide || [];
    this.store.setView({ hide: [...new Set([...hidden, ...ids])] });
    if (index >= 0 && this.items.length) this.setActive(Math.min(index, this.items.length - 1), -1);
  }

  toggleGroup(group) {
    const key = hashKey(group.key);
    const open = this.store.view.open || [];
    const next = open.includes(key) ? open.filter((one) => one !== key) : [...open, key];
    this.store.setView({ open: next }, { replace: true });
    return true;
  }

  // --- tags and note ---

  /** Edit the tags and the note of a run. What was typed is kept until it is saved or discarded. */
  async editAnnotations(row, what, anchor = this.getActiveElement()) {
    const { AnnotationForm } = await importPart("./annotation_form.js");
    const id = row.id;
    const draft = this.drafts.get(id) || { tags: [...(row.tags || [])], note: row.note || "", typed: "" };
    this.drafts.set(id, draft);
    const form = new AnnotationForm(this.store, row, draft, what, (isDone) => {
      if (isDone) this.drafts.delete(id);
      closePopover({ focus: true });
    });
    openPopover(anchor, form.element, { label: `Tags and note of ${row.name}`, wide: true, focusBack: this.scroller });
    form.focus();
  }

  setColumns(keys) {
    this.store.setView({ columns: keys }, { replace: true });
  }

  // --- around the rows ---

  renderBar() {
    const { group, panel, root } = this.store.view;
    const { roots } = this.store.meta;
    this.groupButton.classList.toggle("is-on", Boolean(group));
    this.groupButton.lastChild.textContent = group ? (group === "-seed" ? "All but the seed" : group) : "Group";
    this.chartsButton.hidden = panel !== "none";
    this.rootButton.hidden = roots.length < 2;
    this.rootButton.lastChild.textContent = root === undefined ? "All folders" : (roots[root] || {}).path || root;
  }

}

function getItemType(item) {
  return item.rows ? "group" : "run";
}

function getItemId(item) {
  return item.rows ? `group ${item.key}` : item.id;
}

/** Return a short name of a group for the URL. */
function hashKey(text) {
  let hash = 5381;
  for (let i = 0; i < text.length; i += 1) hash = (Math.imul(hash, 33) ^ text.charCodeAt(i)) >>> 0;
  return hash.toString(36);
}
