// The menus of the table: of a run, columns, groups, folders, saved views.

import { getJson, importPart } from "./api.js";
import { copyText, openMenu, openPopover, showError } from "./dialogs.js";
import { h } from "./dom.js";
import { findDifferingSettings, isSeed } from "./filters.js";
import { OWN_COLUMNS } from "./table_columns.js";

/** What the table's buttons open. */
export class TableMenus {
  constructor(table) {
    this.table = table;
    this.store = table.store;
  }

  async openRun(row, anchor) {
    const pinned = (this.store.view.pin || []).includes(row.id);
    const isShown = this.store.getShownIds().has(row.id);
    const items = [
      row.name,
      { label: "Open", icon: "right", hint: "Enter", onSelect: () => this.table.openRun(row) },
      { label: isShown ? "Do not draw" : "Draw", icon: "eye", hint: "Space", onSelect: () => this.table.tick(row) },
      { label: "Draw only this", icon: "only", hint: "o", onSelect: () => this.table.drawOnly([row.id]) },
      { label: pinned ? "Unpin" : "Pin to the top", icon: "pin", hint: "p", onSelect: () => this.table.togglePin([row.id]) },
      { label: "Hide", icon: "hide", hint: "h", onSelect: () => this.table.hide([row.id]) },
      null,
      { label: "Tags and note…", icon: "tag", hint: "t", onSelect: () => this.table.editAnnotations(row, "tags") },
      { label: "Only runs of its experiment", icon: "search", onSelect: () => this.table.search.add(`experiment=${row.experiment}`) },
      null,
      { label: "Copy the name", icon: "link", onSelect: () => copyText(row.name, "The name is copied") },
      { label: "Copy the folder", icon: "link", onSelect: () => copyText(row.folder, "The folder is copied") },
      ...(await this.listActions(row)),
    ];
    openMenu(anchor, items, { label: `Run ${row.name}`, focusBack: this.table.scroller });
  }

  /** Return what can be done with a run where the board may act. */
  async listActions(row) {
    if (!this.store.meta.can_act || (row.source || "echelon") !== "echelon") return [];
    const { getActions, openAction } = await importPart("./act.js");
    const items = getActions(row).map(({ action, label }) => ({
      label,
      icon: action === "stop" || action === "cancel" ? "stop" : "play",
      onSelect: () => openAction(this.store, action, [row.id]),
    }));
    return items.length ? [null, ...items] : [];
  }

  openColumns(anchor) {
    const names = this.table.search.getNames();
    const sections = [
      ["Of every run", OWN_COLUMNS],
      ["Results", names.metrics.flatMap((name) => [name, `${name}.best`])],
      ["Settings that differ", findDifferingSettings(this.store.reader, this.store.getVisibleRows())],
      ["Other settings", names.settings],
    ];
    const list = h("div", { class: "columns-list" });
    const draw = (text) => {
      const chosen = this.table.columns.map((column) => column.key);
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
        const now = this.table.columns.slice(1).map((column) => column.key);
        this.keepOpen(() => this.table.setColumns(box.checked ? [...now, key] : now.filter((one) => one !== key)));
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
    const { ViewsForm } = await importPart("./views_form.js");
    try {
      ({ views } = await getJson("/api/views"));
    } catch (error) {
      showError(error);
      return;
    }
    openPopover(anchor, new ViewsForm(this.store, views).element, { label: "Views", wide: true });
  }
}
