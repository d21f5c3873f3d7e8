// What happened to the engine besides answers, batches, and each tenant's part of the work.

import { h, replace } from "./dom.js";
import { number, share, shortId } from "./format.js";

const KINDS = {
  restart: "core restarted", replay: "request went on", given_up: "request given up", hang: "core stood still", refusal: "refused",
  deadline: "deadline missed", handover: "handed over", control: "control", batch: "batch",
};
const TOTALS = { restart: "restarts", replay: "requests went on", given_up: "given up", refusal: "refused", deadline: "deadlines missed" };
const MAX_TENANTS = 20;

/** The section. Gives its element and `update`, which takes the server's state and an earlier one. */
export function buildHappenings() {
  const totals = h("p", { class: "soft small happened-totals" });
  const events = table("What happened, latest first", ["Time", "What", "Detail", "Times"], "happened");
  const tenants = table("Tenants, by tokens of ended requests", ["Tenant", "Share lately", "Prompt tokens", "Generated", "Requests", "Refused"], "tenants");
  const batches = table("Batches, the newest first", ["Batch", "Status", "Lines done", "Failed", "Lines"], "batches");
  const adapters = table("Adapters on the device", ["Adapter", "State", "Sequences", "Folder"], "adapters");
  const element = h("div", { class: "stack" }, events.box, totals, adapters.box, batches.box, tenants.box);

  function update(state, earlier) {
    replace(events.rows, [...state.events].reverse().map(eventRow));
    if (!state.events.length) replace(events.rows, h("tr", {}, h("td", { colspan: 4, class: "soft" }, "Nothing but answers so far.")));
    totals.textContent = Object.entries(TOTALS).map(([kind, name]) => `${number(state.event_totals[kind] ?? 0)} ${name}`).join(", ");
    adapters.box.hidden = !state.adapters?.length;
    replace(adapters.rows, (state.adapters ?? []).map(adapterRow));
    batches.box.hidden = !state.batches?.length;
    replace(batches.rows, (state.batches ?? []).map(batchRow));
    const names = Object.keys(state.tenants);
    tenants.box.hidden = names.length < 2 && (names[0] ?? "default") === "default";
    replace(tenants.rows, tenantRows(state.tenants, earlier.tenants));
  }

  return { element, update };
}

function table(caption, titles, name) {
  const rows = h("tbody");
  const head = h("thead", {}, h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title))));
  const element = h("table", { class: `requests ${name}` }, h("caption", {}, caption), head, rows);
  return { rows, box: h("div", { class: "table-box", tabindex: 0, role: "group", "aria-label": caption }, element) };
}

function eventRow(event) {
  const at = new Date(1000 * event.at);
  return h("tr", {}, h("td", {}, h("time", { datetime: at.toISOString(), title: at.toLocaleString() }, at.toLocaleTimeString())),
    h("td", {}, h("span", { class: `state is-${event.kind}` }, KINDS[event.kind] ?? event.kind)), h("td", {}, event.text),
    h("td", {}, event.count > 1 ? number(event.count) : ""));
}

function batchRow({ id, status, request_counts: { total, completed, failed } }) {
  const done = total ? `${number(completed + failed)} (${share((completed + failed) / total)})` : "–";
  return h("tr", {}, h("td", { class: "mono", title: id }, shortId(id)), h("td", {}, h("span", { class: `state is-batch-${status}` }, status)),
    h("td", {}, done), h("td", {}, number(failed)), h("td", {}, number(total)));
}

function adapterRow({ name, state, is_pinned, num_holders, path }) {
  return h("tr", {}, h("td", { class: "mono" }, name), h("td", {}, is_pinned ? `${state}, pinned` : state), h("td", {}, number(num_holders)),
    h("td", { class: "mono" }, path));
}

const tokens = (row) => (row ? row.prompt_tokens + row.generation_tokens : 0);

function tenantRows(now, before) {
  const lately = Object.fromEntries(Object.entries(now).map(([name, row]) => [name, tokens(row) - tokens(before[name])]));
  const sum = Object.values(lately).reduce((one, two) => one + two, 0);
  const sorted = Object.entries(now).sort(([, one], [, two]) => tokens(two) - tokens(one));
  return sorted.slice(0, MAX_TENANTS).map(([name, row]) => h("tr", {}, h("td", { class: "mono" }, name),
    h("td", {}, sum ? share(lately[name] / sum) : "–"), h("td", {}, number(row.prompt_tokens)), h("td", {}, number(row.generation_tokens)),
    h("td", {}, number(row.requests)), h("td", {}, number(row.refused))));
}
