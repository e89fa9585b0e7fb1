// The table of runs: only the rows in sight are in the document.

import { ApiError, getJson, getRunPath, postJson } from "./api.js";
import { closePopover, copyText, openMenu, openPopover, showError, showToast } from "./dialogs.js";
import { formatCount, h, icon } from "./dom.js";
import { findDifferingSettings, isSeed } from "./filters.js";
import { SearchBox } from "./search_box.js";
import { Column, OWN_COLUMNS, chooseColumns, makeCell, makeGroupCell } from "./table_columns.js";

const OVERSCAN = 8;
const HEAD_PX = 30;
const MEASURED_ROWS = 60;
const CLOCK_MS = 10000;
let nextId = 0;

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
    this.top = new Map();
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
    this.search = new SearchBox(this.store, () => this.focus());
    this.groupButton = this.buildBarButton("group", "Group", (event) => this.openGroupMenu(event.currentTarget));
    this.columnsButton = this.buildBarButton("columns", "Columns", (event) => this.openColumns(event.currentTarget));
    this.viewsButton = this.buildBarButton("views", "Views", (event) => this.openViews(event.currentTarget));
    this.chartsButton = this.buildBarButton("table", "Charts", () => this.store.setView({ panel: "curves" }));
    this.rootButton = this.buildBarButton("table", "All folders", (event) => this.openRoots(event.currentTarget));
    this.head = h("div", { class: "rt-head", role: "row", "aria-rowindex": "1" });
    this.body = h("div", { class: "rt-body", role: "rowgroup" });
    this.note = h("div", { class: "rt-note" });
    this.scroller = h(
      "div",
      { class: "rt-scroll", role: "treegrid", tabindex: "0", "aria-label": "Runs", "aria-multiselectable": "true" },
      h("div", { role: "rowgroup", class: "rt-headgroup" }, this.head),
      this.body,
      this.note,
    );
    this.foot = h("div", { class: "rt-foot" });
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
      this.foot,
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
    this.head.addEventListener("pointerdown", (event) => this.onHeadPointer(event));
    this.head.addEventListener("contextmenu", (event) => {
      const at = this.findHeadIndex(event.target);
      if (at < 0) return;
      event.preventDefault();
      this.openColumnMenu(at, { x: event.clientX, y: event.clientY });
    });
    this.observer = new ResizeObserver(() => {
      this.height = scroller.clientHeight;
      this.rowHeight = matchMedia("(max-width: 560px)").matches ? 36 : 30;
      this.refresh();
    });
    this.observer.observe(scroller);
    this.height = 600;
    this.rowHeight = matchMedia("(max-width: 560px)").matches ? 36 : 30;
  }

  update(kind) {
    if (kind !== "rows" && kind !== "view") return;
    cancelAnimationFrame(this.frame);
    if (kind === "view") this.refresh();
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
    this.renderHead();
    this.renderNote();
    this.renderFoot();
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
    this.top = new Map();
    const counts = new Map();
    for (const row of this.store.getVisibleRows()) {
      if (typeof row.best !== "number") continue;
      const key = `${row.experiment}\n${row.best_name}`;
      const known = this.top.get(key);
      counts.set(key, (counts.get(key) || 0) + 1);
      if (known === undefined || (row.best_is === "max" ? row.best > known : row.best < known)) this.top.set(key, row.best);
    }
    for (const [key, count] of counts) if (count < 2) this.top.delete(key);
  }

  isTop(row) {
    return this.top.get(`${row.experiment}\n${row.best_name}`) === row.best;
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
    const isNarrow = this.scroller.clientWidth < 480;
    const titles = columns.map((column) => `${column.key} ${column.title} ${column.isNumber}`);
    const key = [...titles, rows.length > 0, isNarrow, this.store.view.group].join("\n");
    if (key !== this.columnKey) {
      this.columnKey = key;
      this.columns = columns;
      this.measureColumns(rows, isNarrow);
      this.dropRows();
      this.scroller.setAttribute("aria-colcount", String(keys.length));
      this.headKey = null;
    }
    for (const column of this.columns) column.width = widths.get(column.key) || column.ownWidth;
    const template = this.columns.map((column) => `${column.width}px`).join(" ");
    if (template !== this.template) {
      this.template = template;
      this.element.style.setProperty("--columns", `${template} minmax(0, 1fr)`);
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
      if (column.key === "name") column.ownWidth = Math.min(column.ownWidth, 156);
      if (column.key === "state") column.ownWidth = 24;
      if (column.key === "step") column.ownWidth = Math.min(column.ownWidth, 88);
    }
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
    this.renderRows(false);
    const isScrolled = this.scroller.scrollLeft > 0;
    if (isScrolled !== this.isScrolled) {
      this.isScrolled = isScrolled;
      this.scroller.classList.toggle("is-scrolled", isScrolled);
    }
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
    [...this.head.children].forEach((title, i) => {
      title.classList.toggle("is-active", active.isHead && i === Math.max(0, active.col));
      if (active.isHead && i === Math.max(0, active.col)) name = title.id;
    });
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
    const handled = this.active.isHead ? this.onHeadKey(event) : this.onRowKey(event);
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
        if (!item.rows) this.openRowMenu(item, this.getActiveElement());
        return true;
      default:
        return false;
    }
  }

  onHeadKey(event) {
    const { col } = this.active;
    const column = this.columns[col];
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && event.altKey) {
      this.moveColumn(col, col + step);
      this.setActiveTitle(Math.max(1, col + step));
    } else if (step && event.shiftKey) this.setWidth(column.key, column.width + 16 * step);
    else if (step) this.setActiveTitle(col + step);
    else if (event.key === "Home") this.setActiveTitle(0);
    else if (event.key === "End") this.setActiveTitle(this.columns.length - 1);
    else if (event.key === "ArrowDown") this.setActive(Math.ceil(this.scroller.scrollTop / this.rowHeight), -1);
    else if (event.key === "Enter" || event.key === " ") this.sortBy(column.key);
    else if (event.key === "m") this.openColumnMenu(col, this.getActiveElement());
    else return false;
    return true;
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
    else if (action === "menu") this.openRowMenu(item, event.target.closest("button"));
    else if (action === "edit") this.editAnnotations(item, this.columns[col].key, cell);
    else if (item.rows) this.toggleGroup(item);
    this.lastTicked = action === "tick" ? index : this.lastTicked;
    this.renderActive();
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
    this.openRowMenu(found.item, { x: event.clientX, y: event.clientY });
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

  async openRowMenu(row, anchor) {
    const pinned = (this.store.view.pin || []).includes(row.id);
    const isShown = this.store.getShownIds().has(row.id);
    const items = [
      row.name,
      { label: "Open", icon: "right", hint: "Enter", onSelect: () => this.openRun(row) },
      { label: isShown ? "Do not draw" : "Draw", icon: "eye", hint: "Space", onSelect: () => this.tick(row) },
      { label: "Draw only this", icon: "only", hint: "o", onSelect: () => this.drawOnly([row.id]) },
      { label: pinned ? "Unpin" : "Pin to the top", icon: "pin", hint: "p", onSelect: () => this.togglePin([row.id]) },
      { label: "Hide", icon: "hide", hint: "h", onSelect: () => this.hide([row.id]) },
      null,
      { label: "Tags and note…", icon: "tag", hint: "t", onSelect: () => this.editAnnotations(row, "tags") },
      { label: "Only runs of its experiment", icon: "search", onSelect: () => this.search.add(`experiment=${row.experiment}`) },
      null,
      { label: "Copy the name", icon: "link", onSelect: () => copyText(row.name, "The name is copied") },
      { label: "Copy the folder", icon: "link", onSelect: () => copyText(row.folder, "The folder is copied") },
      ...(await this.listActions(row)),
    ];
    openMenu(anchor, items, { label: `Run ${row.name}`, focusBack: this.scroller });
  }

  /** Return what can be done with a run where the board may act. */
  async listActions(row) {
    if (!this.store.meta.can_act || (row.source || "echelon") !== "echelon") return [];
    const { getActions, openAction } = await import("./act.js");
    const items = getActions(row).map(({ action, label }) => ({
      label,
      icon: action === "stop" || action === "cancel" ? "stop" : "play",
      onSelect: () => openAction(this.store, action, [row.id]),
    }));
    return items.length ? [null, ...items] : [];
  }

  // --- tags and note ---

  /** Edit the tags and the note of a run. What was typed is kept until it is saved or discarded. */
  editAnnotations(row, what, anchor = this.getActiveElement()) {
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

  // --- columns ---

  renderHead() {
    const { sort = "when", reverse } = this.store.view;
    const shown = this.store.getShownIds();
    const visible = this.store.getVisibleRows();
    const drawn = visible.reduce((count, row) => count + shown.has(row.id), 0);
    const ticked = !drawn ? "false" : drawn === visible.length ? "true" : "mixed";
    const key = `${this.columnKey}|${sort}|${reverse}|${ticked}`;
    if (key === this.headKey) return;
    this.headKey = key;
    this.head.replaceChildren(...this.columns.map((column, i) => this.buildTitle(column, i, sort, reverse, ticked)));
    this.renderActive();
  }

  buildTitle(column, i, sort, reverse, ticked) {
    const isSorted = sort === column.key || (sort === "when" && column.key === "age");
    const isDown = Boolean(reverse) !== this.isBestFirst(column.key);
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

  findHeadIndex(target) {
    return [...this.head.children].indexOf(target.closest(".rt-h"));
  }

  onHeadPointer(event) {
    const at = this.findHeadIndex(event.target);
    if (at < 0 || event.button || event.target.closest(".rt-tick")) return;
    if (event.target.closest(".rt-grip")) this.startResize(event, at);
    else this.startMove(event, at);
  }

  startResize(event, at) {
    event.preventDefault();
    const column = this.columns[at];
    const [startX, startWidth] = [event.clientX, column.width];
    let width = startWidth;
    const grip = event.target;
    follow(grip, event, {
      move: (x) => {
        width = Math.max(40, Math.round(startWidth + x - startX));
        column.width = width;
        const template = this.columns.map((one) => `${one.width}px`).join(" ");
        this.element.style.setProperty("--columns", `${template} minmax(0, 1fr)`);
      },
      end: () => {
        this.template = null;
        if (width !== startWidth) this.setWidth(column.key, width);
      },
    });
    grip.addEventListener("dblclick", () => this.setWidth(column.key, null), { once: true });
  }

  setWidth(key, width) {
    const widths = this.readWidths();
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
        else this.sortBy(this.columns[at].key);
      },
    });
  }

  moveColumn(from, to) {
    const keys = this.columns.map((column) => column.key);
    if (from < 1 || to < 1 || to >= keys.length || from === to) return;
    const [key] = keys.splice(from, 1);
    keys.splice(to, 0, key);
    this.setColumns(keys.slice(1));
  }

  setColumns(keys) {
    this.store.setView({ columns: keys }, { replace: true });
  }

  openColumnMenu(at, anchor) {
    const { key, title } = this.columns[at];
    const keys = this.columns.slice(1).map((column) => column.key);
    const wanted = key === "age" ? "when" : key;
    const sort = (reverse) => this.store.setView({ sort: wanted, reverse });
    const isFirstHigh = this.isBestFirst(wanted);
    openMenu(
      anchor,
      [
        title,
        { label: isFirstHigh ? "Highest first" : "Lowest first", icon: "up", onSelect: () => sort(null) },
        { label: isFirstHigh ? "Lowest first" : "Highest first", icon: "down", onSelect: () => sort(true) },
        null,
        { label: "Group by it", icon: "group", disabled: at === 0, onSelect: () => this.store.setView({ group: key, open: null }) },
        { label: "Filter by it…", icon: "search", onSelect: () => this.search.begin(`${key}=`) },
        { label: "Its usual width", icon: "columns", onSelect: () => this.setWidth(key, null) },
        { label: "Move to the left", icon: "back", disabled: at < 2, onSelect: () => this.moveColumn(at, at - 1) },
        { label: "Move to the right", icon: "right", disabled: at === 0 || at === keys.length, onSelect: () => this.moveColumn(at, at + 1) },
        { label: "Remove the column", icon: "close", disabled: at === 0, onSelect: () => this.setColumns(keys.filter((one) => one !== key)) },
      ],
      { label: `Column ${title}`, focusBack: this.scroller },
    );
  }

  openColumns(anchor) {
    const names = this.search.getNames();
    const sections = [
      ["Of every run", OWN_COLUMNS],
      ["Results", names.metrics.flatMap((name) => [name, `${name}.best`])],
      ["Settings that differ", findDifferingSettings(this.store.reader, this.store.getVisibleRows())],
      ["Other settings", names.settings],
    ];
    const list = h("div", { class: "columns-list" });
    const draw = (text) => {
      const chosen = this.columns.map((column) => column.key);
      const seen = new Set(["name"]);
      list.replaceChildren(
        ...sections.flatMap(([title, keys]) => {
          const fitting = keys.filter((key) => !seen.has(key) && key.toLowerCase().includes(text));
          fitting.forEach((key) => seen.add(key));
          return fitting.length ? [h("h3", {}, title), ...fitting.map((key) => this.buildColumnTick(key, chosen))] : [];
        }),
      );
    };
    const box = h("input", {
      type: "search",
      placeholder: "Find a column",
      "aria-label": "Find a column",
      oninput: (event) => draw(event.target.value.toLowerCase().trim()),
    });
    const usual = h("button", { class: "quiet", onclick: () => this.store.setView({ columns: null, widths: null }) }, "As usual");
    draw("");
    openPopover(anchor, h("div", {}, h("div", { class: "popover-head" }, box, usual), list), { label: "Columns", wide: true });
  }

  buildColumnTick(key, chosen) {
    const box = h("input", {
      type: "checkbox",
      checked: chosen.includes(key),
      onchange: () => {
        const now = this.columns.slice(1).map((column) => column.key);
        this.keepOpen(() => this.setColumns(box.checked ? [...now, key] : now.filter((one) => one !== key)));
      },
    });
    return h("label", {}, box, h("code", {}, key));
  }

  /** Change the view without closing the popover: it is where one ticks several. */
  keepOpen(change) {
    this.store.keepsPopover = true;
    change();
    this.store.keepsPopover = false;
  }

  // --- group, folders, views ---

  openGroupMenu(anchor) {
    const { group } = this.store.view;
    const rows = this.store.getVisibleRows();
    const settings = findDifferingSettings(this.store.reader, rows).filter((key) => !isSeed(key));
    const pick = (key) => ({
      label: key,
      checked: group === key,
      onSelect: () => this.store.setView({ group: key, open: null }),
    });
    const own = ["experiment", "state", "host", "tags", "sweep"];
    openMenu(
      anchor,
      [
        { label: "No groups", checked: !group, onSelect: () => this.store.setView({ group: null, open: null }) },
        { ...pick("-seed"), label: "All settings but the seed" },
        null,
        ...own.map(pick),
        ...(settings.length ? ["Settings that differ", ...settings.map(pick)] : []),
      ],
      { label: "Group runs by" },
    );
  }

  openRoots(anchor) {
    const { root } = this.store.view;
    const items = this.store.meta.roots.map(({ path }, i) => ({
      label: path,
      checked: root === String(i),
      onSelect: () => this.store.setView({ root: String(i) }),
    }));
    const all = { label: "All folders", checked: root === undefined, onSelect: () => this.store.setView({ root: null }) };
    openMenu(anchor, [all, null, ...items], { label: "Folder of runs" });
  }

  async openViews(anchor) {
    let views;
    try {
      ({ views } = await getJson("/api/views"));
    } catch (error) {
      showError(error);
      return;
    }
    openPopover(anchor, new ViewsForm(this.store, views).element, { label: "Views", wide: true });
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

  renderNote() {
    this.note.replaceChildren();
    this.note.hidden = this.items.length > 0;
    if (this.items.length) return;
    this.note.append(...this.explainEmptiness());
  }

  explainEmptiness() {
    const { store } = this;
    if (!store.isLoaded || (!store.rows.size && !store.meta.complete)) {
      return [52, 38, 61, 44, 57, 40].map((width) =>
        h("div", { class: "rt-skeleton", "aria-hidden": "true" }, h("i", { style: { width: `${width}%` } })),
      );
    }
    if (!store.rows.size) return [explainFirstRun(store.meta.roots)];
    const left = store.countLeftOut();
    if (!store.getCandidates().length) {
      return [
        h(
          "div",
          { class: "empty" },
          h("h2", {}, "Every run is left out of the list"),
          h("p", {}, `${describeLeftOut(left)}.`),
          h("button", { onclick: () => store.setView({ all: true }) }, "Show them"),
        ),
      ];
    }
    return [
      h(
        "div",
        { class: "empty" },
        h("h2", {}, "No run is such a one"),
        h("p", {}, `${formatCount(store.getCandidates().length, "run")} do not meet what is asked for.`),
        h("button", { onclick: () => this.search.clear() }, "Show all runs"),
      ),
    ];
  }

  renderFoot() {
    const { store } = this;
    const visible = store.getVisibleRows().length;
    const all = store.getCandidates().length;
    const left = store.countLeftOut();
    const parts = [h("span", { class: "rt-count", role: "status" }, visible === all ? formatCount(all, "run") : `${visible.toLocaleString("en-US")} of ${formatCount(all, "run")}`)];
    if (store.getGroups()) parts.push(h("span", {}, `in ${formatCount(store.getGroups().length, "group")}`));
    if (store.isLoaded && !store.meta.complete) parts.push(h("span", { class: "rt-checking" }, "reading the folders"));
    parts.push(this.buildDrawnNote());
    if (left.hidden) {
      parts.push(h("span", {}, `${left.hidden} hidden `, h("button", { onclick: () => store.setView({ hide: null }) }, "show")));
    }
    if (left.early || left.archived) {
      const toggle = () => store.setView({ all: store.view.all ? null : true });
      const text = store.view.all ? "with those that are usually left out " : `${describeLeftOut(left)} `;
      parts.push(h("span", {}, text, h("button", { onclick: toggle }, store.view.all ? "leave out" : "show")));
    }
    this.foot.replaceChildren(...parts);
  }

  buildDrawnNote() {
    const { store } = this;
    const shown = store.get("shown");
    const count = store.getShownRows().length;
    const what = { auto: `the first ${count} drawn`, all: `all ${count} drawn`, none: "none drawn" }[shown];
    const reset = shown !== "auto" && h("button", { onclick: () => store.setView({ shown: null }, { replace: true }) }, "the first ten");
    return h("span", {}, what || `${count} drawn`, " ", reset);
  }
}

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

function describeLeftOut({ early, archived }) {
  const parts = [];
  if (early) parts.push(`${early.toLocaleString("en-US")} ended before step 1`);
  if (archived) parts.push(`${archived.toLocaleString("en-US")} archived`);
  return parts.join(", ");
}

function explainFirstRun(roots) {
  const paths = roots.map((root) => root.path).join(", ");
  const folder = roots.length === 1 ? ` run.dir=${roots[0].path}` : "";
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, "No runs yet"),
    h("p", {}, `A run appears here by itself as soon as it starts in ${paths}. For example:`),
    h("pre", {}, `echelon train trainer.epochs=20${folder}\nechelon train -m lr=0.01,0.03,0.1 seed=0,1,2${folder}`),
    h("p", {}, "TensorBoard's event files and wandb's offline folders below it are shown as well."),
  );
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

// --- one row in sight ---

class RowView {
  constructor(table, type) {
    this.table = table;
    this.type = type;
    this.item = null;
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
    element.style.transform = `translateY(${index * table.rowHeight}px)`;
    element.style.display = "";
    element.setAttribute("aria-rowindex", String(index + 2));
  }

  hide() {
    this.item = null;
    this.element.style.display = "none";
  }

  setTick(state, label) {
    this.tick.setAttribute("aria-checked", state);
    this.tick.setAttribute("aria-label", label);
    this.element.setAttribute("aria-selected", String(state === "true"));
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

class RunRowView extends RowView {
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
    if (this.link.textContent !== row.name) {
      this.link.textContent = row.name;
      this.link.title = row.name;
      this.link.href = `?page=run&run=${encodeURIComponent(row.id)}`;
    }
    const isShown = shownIds.has(row.id);
    this.setTick(String(isShown), `Draw ${row.name}`);
    this.tick.style.setProperty("--dot", isShown ? this.table.store.getColour(row.id) : "transparent");
    const isPinned = pinned.has(row.id);
    this.element.classList.toggle("is-pinned", isPinned);
    this.pin.classList.toggle("is-on", isPinned);
    this.pin.setAttribute("aria-label", isPinned ? "Unpin" : "Pin to the top");
    this.pin.setAttribute("aria-pressed", String(isPinned));
    for (const show of this.shows) show(row);
  }
}

class GroupRowView extends RowView {
  constructor(table) {
    super(table, "group");
    const [first, ...rest] = this.cells;
    first.classList.add("rt-name");
    this.element.classList.add("is-group");
    this.element.setAttribute("aria-level", "1");
    this.label = h("span", {});
    this.count = h("small", {});
    first.append(h("span", { class: "rt-fold" }, icon("right")), this.tick, this.label, this.count);
    this.shows = rest.map((cell, i) => makeGroupCell(cell, table.columns[i + 1]));
  }

  show(group, index, shownIds) {
    this.item = group;
    this.place(index);
    this.label.textContent = group.label;
    this.label.title = group.label;
    this.count.textContent = String(group.rows.length);
    this.element.setAttribute("aria-expanded", String(group.isOpen));
    const drawn = group.rows.filter((row) => shownIds.has(row.id));
    const state = !drawn.length ? "false" : drawn.length === group.rows.length ? "true" : "mixed";
    this.setTick(state, `Draw the runs with ${group.label}`);
    this.tick.style.setProperty("--dot", drawn.length ? this.table.store.getColour(drawn[0].id) : "transparent");
    for (const show of this.shows) show(group);
  }
}

// --- forms ---

class AnnotationForm {
  constructor(store, row, draft, what, close) {
    Object.assign(this, { store, row, draft, what, close });
    this.chips = h("div", { class: "tag-box" });
    this.input = h("input", {
      "aria-label": "New tag",
      placeholder: "add a tag",
      maxlength: "60",
      value: draft.typed,
      list: "known-tags",
      oninput: () => (draft.typed = this.input.value),
      onkeydown: (event) => this.onTagKey(event),
    });
    this.note = h("textarea", {
      rows: "3",
      "aria-label": "Note",
      placeholder: "what a reader should know of this run",
      value: draft.note,
      oninput: () => (draft.note = this.note.value),
      onkeydown: (event) => event.key === "Enter" && !event.shiftKey && this.save(event),
    });
    this.error = h("div", { class: "form-error", role: "alert", hidden: true });
    this.button = h("button", { class: "primary", type: "submit" }, "Save");
    this.element = h(
      "form",
      { class: "form", onsubmit: (event) => this.save(event) },
      h("label", {}, "Tags", this.chips),
      h("label", {}, "Note", this.note),
      this.error,
      h(
        "div",
        { class: "form-row" },
        this.button,
        h("button", { type: "button", class: "quiet", onclick: () => this.close(true) }, "Discard"),
        h("span", { class: "soft" }, "kept in the run's folder"),
      ),
      this.listKnownTags(),
    );
    this.drawTags();
  }

  listKnownTags() {
    const known = new Set();
    for (const row of this.store.rows.values()) for (const tag of row.tags || []) known.add(tag);
    return h("datalist", { id: "known-tags" }, [...known].sort().slice(0, 200).map((tag) => h("option", { value: tag })));
  }

  focus() {
    (this.what === "note" ? this.note : this.input).focus();
  }

  drawTags() {
    const chips = this.draft.tags.map((tag) =>
      h(
        "span",
        { class: "rt-chip" },
        h("span", {}, tag),
        h("button", { type: "button", "aria-label": `Remove the tag ${tag}`, onclick: () => this.removeTag(tag) }, icon("close")),
      ),
    );
    this.chips.replaceChildren(...chips, this.input);
  }

  removeTag(tag) {
    this.draft.tags = this.draft.tags.filter((one) => one !== tag);
    this.drawTags();
    this.input.focus();
  }

  onTagKey(event) {
    const typed = this.input.value.trim();
    if ((event.key === "Enter" || event.key === "," || event.key === " ") && typed) {
      event.preventDefault();
      this.takeTyped();
    } else if (event.key === "Enter") this.save(event);
    else if (event.key === "Backspace" && !this.input.value && this.draft.tags.length) {
      this.removeTag(this.draft.tags.at(-1));
    }
  }

  takeTyped() {
    for (const tag of this.input.value.split(/[\s,]+/).filter(Boolean)) {
      if (!this.draft.tags.includes(tag)) this.draft.tags.push(tag);
    }
    this.input.value = "";
    this.draft.typed = "";
    this.drawTags();
    this.input.focus();
  }

  async save(event) {
    event.preventDefault();
    this.takeTyped();
    const { row, draft } = this;
    const now = this.store.rows.get(row.id) || row;
    const before = row.tags || [];
    const body = {
      add_tags: draft.tags.filter((tag) => !before.includes(tag)),
      remove_tags: before.filter((tag) => !draft.tags.includes(tag)),
    };
    if (draft.note !== (row.note || "")) body.note = draft.note;
    this.button.disabled = true;
    try {
      const answer = await postJson(getRunPath(row.id, "/annotations"), body);
      this.store.applyRows({ changed: [answer.row || answer] });
      this.close(true);
      showToast(`Saved in ${now.name}`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.error.hidden = false;
      const kept = error.status === 0 ? "What you typed is kept; save it again when the server is back." : error.hint;
      this.error.replaceChildren(error.message.replace(/^--tag /, ""), h("small", {}, kept));
    } finally {
      this.button.disabled = false;
    }
  }
}

class ViewsForm {
  constructor(store, views) {
    this.store = store;
    this.views = { ...views };
    this.list = h("div", { class: "columns-list" });
    this.input = h("input", { placeholder: "Name of this view", "aria-label": "Name of this view", maxlength: "200" });
    this.error = h("div", { class: "form-error", role: "alert" });
    this.element = h(
      "div",
      {},
      h(
        "form",
        { class: "popover-head", onsubmit: (event) => this.save(event) },
        this.input,
        h("button", { class: "primary" }, "Save"),
        h(
          "button",
          { type: "button", class: "quiet", title: "Copy the address of this view", "aria-label": "Copy the address of this view", onclick: () => copyText(location.href, "The address is copied") },
          icon("link"),
        ),
      ),
      this.error,
      this.list,
    );
    this.draw();
  }

  draw() {
    const names = Object.keys(this.views).sort((a, b) => a.localeCompare(b));
    if (!names.length) {
      this.list.replaceChildren(h("p", { class: "soft menu-head" }, "Filter, order, columns and charts can be saved under a name."));
      return;
    }
    this.list.replaceChildren(
      ...names.map((name) =>
        h(
          "div",
          { class: "form-row" },
          h("button", { class: "menu-item views-name", onclick: () => this.open(name) }, icon("views"), h("span", { class: "menu-label" }, name)),
          h("button", { class: "quiet", "aria-label": `Remove the view ${name}`, title: "Remove", onclick: () => this.remove(name) }, icon("close")),
        ),
      ),
    );
  }

  open(name) {
    closePopover();
    this.store.openQuery(this.views[name]);
  }

  async save(event) {
    event.preventDefault();
    const name = this.input.value.trim();
    if (!name) return;
    if (await this.change((views) => ({ ...views, [name]: location.search }))) {
      closePopover({ focus: true });
      showToast(`The view ${name} is saved`);
    }
  }

  async remove(name) {
    await this.change((views) => {
      const rest = { ...views };
      delete rest[name];
      return rest;
    });
    this.draw();
  }

  /** Change what is saved now, which another page may have changed since. */
  async change(make) {
    try {
      const { views } = await getJson("/api/views");
      const answer = await postJson("/api/views", { views: make(views) });
      this.views = answer.views;
      this.error.textContent = "";
      return true;
    } catch (error) {
      this.error.textContent = `${error.message}. ${error.hint || ""}`;
      return false;
    }
  }
}
