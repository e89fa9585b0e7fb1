// Views that were given a name: what the URL says, kept by the server.

import { getJson, postJson } from "./api.js";
import { closePopover, copyText, showToast } from "./dialogs.js";
import { h, icon } from "./dom.js";

/** The list of saved views, and a field to save the present one. */
export class ViewsForm {
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
