// What the page makes of the cases: node filter_cases.mjs FILTERS_JS CASES ROWS prints JSON. Each answer is the
// list of names, or what is said against the case.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [script, casesFile, rowsFile] = process.argv.slice(2);
const page = await import(pathToFileURL(script).href);
const { filters, orders } = JSON.parse(readFileSync(casesFile, "utf8"));
const { rows, defaults } = JSON.parse(readFileSync(rowsFile, "utf8"));
const reader = new page.RowReader(defaults);

function filterRows(texts) {
  const conditions = texts.map((text) => page.parseCondition(text));
  for (const condition of conditions) page.requireKnownName(reader, rows, condition.key);
  const kept = rows.filter((row) => conditions.every((one) => page.meetsCondition(reader, row, one)));
  return page.sortRows(reader, kept, "when").map((row) => row.name);
}

function answer(ask) {
  try {
    return { names: ask() };
  } catch (error) {
    if (!(error instanceof page.FilterError)) throw error;
    return { said: error.message, hint: error.hint };
  }
}

const answers = {
  filters: filters.map((one) => answer(() => filterRows(one.filter))),
  orders: orders.map((one) => answer(() => page.sortRows(reader, rows, one.sort).map((row) => row.name))),
};
console.log(JSON.stringify(answers));
