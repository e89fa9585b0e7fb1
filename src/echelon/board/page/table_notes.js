// What is said around the rows: how many there are and are left out, and what to do where there are none.

import { formatCount, h } from "./dom.js";

/** The line below the table, and what stands in the place of rows. */
export class TableNotes {
  constructor(table) {
    this.table = table;
    this.store = table.store;
    this.note = h("div", { class: "rt-note" });
    this.foot = h("div", { class: "rt-foot" });
  }

  render() {
    this.renderNote();
    this.renderFoot();
  }

  renderNote() {
    this.note.replaceChildren();
    this.note.hidden = this.table.items.length > 0;
    if (this.table.items.length) return;
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
        h("button", { onclick: () => this.table.search.clear() }, "Show all runs"),
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
    if (visible) parts.push(this.buildDrawnNote());
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
