// Tags and note of a run, edited where it stands in the table and written into its folder.

import { ApiError, getRunPath, postJson } from "./api.js";
import { showToast } from "./dialogs.js";
import { h, icon } from "./dom.js";

/** A form over a draft that the caller keeps: `{tags, note, typed}`. `close(isDone)` is called when it is saved or
 * discarded. */
export class AnnotationForm {
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
