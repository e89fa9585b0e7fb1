// The settings of one run: which are not the default, and in which it differs from another run.

import { getJson, getRunPath } from "./api.js";
import { formatSetting, h, icon } from "./dom.js";
import { cleanText, longText, renderError } from "./run_parts.js";

/** Show the settings of a run: `getDetails()` is what the server says of it, once it has. */
export function mountSettings(place, store, { id, getDetails }) {
  const input = h("input", { class: "lv-find", "data-search": "", type: "search", placeholder: "Search settings", "aria-label": "Search settings", value: store.view.setting || "", autocomplete: "off", spellcheck: "false" });
  const only = h("input", { type: "checkbox", checked: store.view.changed === "1" });
  const count = h("span", { class: "rp-dim", role: "status", "aria-live": "polite" });
  const other = h("input", { class: "lv-find rp-with", type: "search", list: "rp-runs", placeholder: "Compare with a run …", "aria-label": "Compare with another run", autocomplete: "off" });
  const runs = h("datalist", { id: "rp-runs" });
  const compared = h("div", { class: "rp-compared" });
  const table = h("div", { class: "rp-settings" });
  place.append(h("div", { class: "lv-bar" }, h("div", { class: "lv-group lv-search" }, input, count),
    h("div", { class: "lv-group" }, h("label", { class: "rp-check" }, only, "only what is not the default"), other, runs)), compared, table);
  let shownKey = "";
  let comparedKey = "";

  function listSettings() {
    const defaults = store.meta?.defaults || {};
    const known = getDetails()?.all_settings || [];
    return known.map(({ name, value, default: isDefault }) => ({ name, value, isChanged: !isDefault, normal: defaults[name] }));
  }

  function draw() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = listSettings();
    const key = JSON.stringify([all, words, only.checked]);
    if (key === shownKey) return;
    shownKey = key;
    const shown = all.filter(({ name, value, isChanged }) => (!only.checked || isChanged)
      && words.every((word) => `${name}=${formatSetting(value)}`.toLowerCase().includes(word)));
    count.textContent = `${shown.length} of ${all.length}, ${all.filter((each) => each.isChanged).length} not the default`;
    table.replaceChildren(shown.length ? h("table", { class: "rp-table rp-setting-table", "aria-label": "Settings" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), h("th", { scope: "col" }, "Value"), h("th", { scope: "col" }, "Default"))),
      h("tbody", null, ...shown.map(({ name, value, isChanged, normal }) => h("tr", { class: isChanged ? "rp-changed" : null },
        h("th", { scope: "row", dir: "auto" }, isChanged ? h("span", { class: "rp-dot", title: "not the default", role: "img", "aria-label": "not the default" }) : null, cleanText(name.slice(0, 200))),
        h("td", null, longText(formatSetting(value), "rp-mono", 300)),
        h("td", { class: "rp-dim" }, isChanged && normal !== undefined ? longText(formatSetting(normal), "rp-mono", 100) : "")))))
      : h("p", { class: "rp-empty" }, all.length ? "No setting has that." : "No settings were recorded."));
  }

  async function drawCompared() {
    const otherId = store.view.with || "";
    if (comparedKey === `${id}|${otherId}`) return;
    comparedKey = `${id}|${otherId}`;
    const otherName = store.rows.get(otherId)?.name || nameOfId(otherId);
    other.value = otherId ? otherName : "";
    if (!otherId) {
      compared.replaceChildren();
      return;
    }
    try {
      const answer = await getJson(getRunPath(id, "/settings"), { with: otherId });
      if (comparedKey !== `${id}|${otherId}`) return;
      const mine = store.rows.get(id)?.name || nameOfId(id);
      const close = h("button", { class: "rp-button", type: "button", "aria-label": "End the comparison", onclick: () => store.setView({ with: null }, { replace: true }) }, icon("close"));
      const missing = (value) => (value === null || value === undefined ? h("span", { class: "rp-dim" }, "–") : longText(formatSetting(value), "rp-mono", 300));
      compared.replaceChildren(h("section", { class: "rp-card rp-wide" },
        h("div", { class: "rp-line" }, h("h3", null, answer.differ.length ? `${answer.differ.length} settings differ, ${answer.same} are the same` : `All ${answer.same} settings are the same`), close),
        answer.differ.length ? h("table", { class: "rp-table rp-setting-table", "aria-label": "Settings that differ" },
          h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), h("th", { scope: "col", dir: "auto" }, cleanText(mine.slice(0, 80))),
            h("th", { scope: "col", dir: "auto" }, cleanText(otherName.slice(0, 80))))),
          h("tbody", null, ...answer.differ.map((each) => h("tr", null, h("th", { scope: "row" }, cleanText(each.name.slice(0, 200))),
            h("td", null, missing(each.mine)), h("td", { class: "rp-theirs" }, missing(each.theirs)))))) : null));
    } catch (error) {
      compared.replaceChildren(renderError(error));
    }
  }

  function offerRuns() {
    const text = other.value.toLowerCase();
    const found = [...store.rows.values()].filter((row) => row.id !== id && row.name.toLowerCase().includes(text)).slice(0, 40);
    runs.replaceChildren(...found.map((row) => h("option", { value: row.name }, [row.experiment, row.state].filter(Boolean).join(", "))));
    const exact = [...store.rows.values()].find((row) => row.id !== id && row.name === other.value);
    if (exact) store.setView({ with: exact.id }, { replace: true });
    else if (!other.value) store.setView({ with: null }, { replace: true });
  }

  other.addEventListener("input", offerRuns);
  other.addEventListener("focus", offerRuns);
  other.addEventListener("keydown", (event) => event.stopPropagation());
  input.addEventListener("keydown", (event) => event.stopPropagation());
  input.addEventListener("input", () => {
    store.setView({ setting: input.value || null }, { replace: true });
    draw();
  });
  only.addEventListener("change", () => {
    store.setView({ changed: only.checked ? "1" : null }, { replace: true });
    draw();
  });
  draw();
  drawCompared();
  return {
    onDetails: draw,
    update(kind) {
      if (kind === "view") drawCompared();
    },
  };
}


function nameOfId(id) {
  return String(id).replace(/^\d+:/, "");
}
