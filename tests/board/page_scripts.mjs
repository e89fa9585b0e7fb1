// What the page's own scripts make of answers and addresses: node page_scripts.mjs PAGE_FOLDER CASE prints JSON.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, caseFile] = process.argv.slice(2);
const { answer, chunk_bytes: chunkBytes, views } = JSON.parse(readFileSync(caseFile, "utf8"));
globalThis.document = { hidden: false };

function load(name) {
  return import(pathToFileURL(`${folder}/${name}`).href);
}

/** An answer of the server that arrives in pieces, cut anywhere, also within a sign. */
globalThis.fetch = async () => {
  const bytes = new TextEncoder().encode(answer);
  let at = 0;
  const read = async () => {
    const value = bytes.slice(at, at + chunkBytes);
    at += value.length;
    return value.length ? { done: false, value } : { done: true };
  };
  return { ok: true, body: { getReader: () => ({ read }) } };
};

const { getRows } = await load("api.js");
const { formatView, parseView } = await load("store.js");
const addresses = views.map((view) => formatView(view));
const read = addresses.map((address) => parseView(address));
console.log(JSON.stringify({ rows: await getRows(), addresses, read }));
