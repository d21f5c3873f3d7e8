// The inspector: what happened to one request, from the queue to its last token, and where its prompt left the prefix cache.
// Asks `/console/requests/{id}`, again and again while the request runs.

import { json } from "./api.js";
import { h, replace, replaceKeyed } from "./dom.js";
import { cameAt } from "./engine.js";
import { number, seconds, share, shortId } from "./format.js";

const POLL_MS = 1000;

/** Causes of a stall, in words. */
const CAUSES = {
  pages: "too few pages are free",
  rows: "as many requests run as may (max_num_seqs)",
  tokens: "the step's budget of tokens is spent",
  "common prefix": "another request computes what both begin with",
  form: "its grammar is compiled, beside the steps of others",
  sibling: "another answer to the same request computes the prompt",
  delay: "admission is delayed (delay_factor, or the scheduling policy)",
  "partial prefills": "as many prompts are cut into chunks as may be",
  "whole prompt": "its whole prompt does not fit into a step, and chunked prefill is off",
};

const LANES = [["frontend", "Frontend"], ["queue", "Queue"], ["stall", "Stalls"], ["prefill", "Prefill"], ["decode", "Decode"]];

/** Build the tab. `inspect` goes to a request. Gives `show(id)` and `hide`. */
export function buildRequests(root, inspect) {
  const input = h("input", { id: "request-id", placeholder: "chatcmpl-…, or what X-Request-Id said", spellcheck: "false", autocomplete: "off" });
  const go = (event) => {
    event.preventDefault();
    if (input.value.trim()) inspect(input.value.trim());
  };
  const form = h("form", { class: "finder", on: { submit: go } }, h("label", { for: input.id }, "Request id"), input, h("button", { class: "button main", type: "submit" }, "Show"));
  const problem = h("p", { class: "notice bad", role: "alert", hidden: true });
  const content = h("div", { class: "inspector" });
  const recent = h("ul", { class: "recent" });
  const aside = h("nav", { class: "recent-box", "aria-labelledby": "recent-title" }, h("h2", { id: "recent-title" }, "Recent"), recent);
  replace(root, h("div", { class: "board with-list" }, aside, h("div", { class: "stack" }, form, problem, content)));

  let shown = null;
  let found = null;
  let timer = null;
  let drawn = "";
  let isShown = false;

  async function load() {
    const id = shown;
    try {
      const state = await json("console/state");
      let refusal = null;
      const request = id && (await json(`console/requests/${encodeURIComponent(id)}`).catch((error) => { refusal = error; }));
      if (id !== shown) return;
      found = request?.id;
      listRecent(state);
      if (refusal) throw refusal;
      problem.hidden = true;
      if (request) draw(request);
      if (request?.is_finished === false && isShown) timer = setTimeout(load, POLL_MS);
    } catch (error) {
      if (id === shown) refused(error);
    }
  }

  function refused(error) {
    problem.hidden = false;
    problem.textContent = error.message;
    drawn = "";
    replace(content);
  }

  function listRecent(state) {
    const all = [...state.requests, ...state.finished].slice(0, 60);
    replaceKeyed(recent, all.map((request) => h("li", {}, h("button", { type: "button", class: "recent-item", title: request.id, data: { key: request.id },
      "aria-current": request.id === found ? "true" : null, on: { click: () => inspect(request.id) } },
    h("span", { class: "mono" }, shortId(request.id)),
    state.first_words[request.id] && h("span", { class: "first-words small" }, state.first_words[request.id]),
    h("span", { class: "soft small" }, cameAt(request), ` · ${request.reason ?? request.state} · ${number(request.prompt_tokens)} in, ${number(request.output_tokens)} out`)))));
    if (!all.length) replace(recent, h("li", { class: "soft" }, "No requests yet."));
  }

  function draw(request) {
    if (drawn === request.id && request.is_finished) return;
    drawn = request.is_finished ? request.id : "";
    replace(content,
      h("h2", { class: "mono request-title" }, request.id),
      request.siblings?.length > 0 && h("p", { class: "small" }, "Its siblings: ", request.siblings.map((id) => [requestLink(id, inspect), " "])),
      summary(request), timeline(request), prefix(request.prefix, inspect), eventTable(request, inspect));
  }

  return {
    show(id) {
      clearTimeout(timer);
      isShown = true;
      if (id) input.value = id;
      if (id !== shown) {
        drawn = "";
        replace(content, id ? null : h("p", { class: "soft" }, "Choose a request, or type its id: “Inspect” below an answer leads here."));
      }
      shown = id || null;
      load();
    },
    hide() {
      isShown = false;
      clearTimeout(timer);
    },
  };
}

function requestLink(id, inspect) {
  return h("button", { class: "link mono", type: "button", title: id, on: { click: () => inspect(id) } }, shortId(id));
}

/** Stretches of time by lane, from the events: `{lane, from, to, label}` in seconds since arrival. */
export function stretches(events) {
  const end = Math.max(0.000001, ...events.map((event) => event.t_s + (event.detail.s ?? 0)));
  const found = [];
  let queuedAt = null;
  const taken = events[0]?.t_s ?? 0;
  if (taken > 0) found.push({ lane: "frontend", from: 0, to: taken, label: `made ready (template, tokens, form of the answer) in ${seconds(taken)}` });
  for (const event of events) {
    const { t_s: at, kind, detail } = event;
    if (queuedAt !== null && ["scheduled", "finished"].includes(kind)) {
      found.push({ lane: "queue", from: queuedAt, to: at, label: `in the queue for ${seconds(at - queuedAt)}` });
      queuedAt = null;
    }
    if (kind === "queued") queuedAt = at;
    if (kind === "stall") found.push({ lane: "stall", from: at, to: at + (detail.s ?? 0), label: describe(event) });
    if (kind === "chunk") found.push({ lane: "prefill", from: at, to: at + detail.ms / 1000, label: describe(event) });
    if (kind === "decode") found.push({ lane: "decode", from: at, to: at + detail.s, label: describe(event) });
    if (kind === "preempted") found.push({ lane: "stall", from: at, to: at, label: describe(event), mark: true });
  }
  if (queuedAt !== null) found.push({ lane: "queue", from: queuedAt, to: end, label: "still in the queue" });
  return { found, end: Math.max(end, ...found.map(({ to }) => to)) };
}

function summary({ events, is_finished: isFinished }) {
  const { found } = stretches(events);
  const total = (lane) => found.filter((part) => part.lane === lane).reduce((sum, part) => sum + part.to - part.from, 0);
  const first = events.find(({ kind }) => kind === "first_token");
  const last = events.findLast(({ kind }) => kind === "finished");
  const decode = events.findLast(({ kind }) => kind === "decode");
  const tiles = [
    ["In the queue", seconds(total("queue"))], ["Stalled", seconds(total("stall"))], ["Prefill", seconds(total("prefill"))],
    ["First token", first ? seconds(first.t_s) : "–"], ["Decode", decode ? seconds(decode.detail.s) : "–"],
    [isFinished === false ? "Runs" : "In all", last ? seconds(last.t_s) : "…"],
  ];
  return h("dl", { class: "tiles" }, tiles.map(([label, value]) => h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, value))));
}

function timeline({ events }) {
  const { found, end } = stretches(events);
  const lanes = LANES.map(([lane, title]) => {
    const parts = found.filter((part) => part.lane === lane).map(({ from, to, label, mark }) => {
      const bar = h("span", { class: `span ${lane}${mark ? " mark" : ""}`, title: label });
      bar.style.left = `${(100 * from) / end}%`;
      bar.style.width = `${(100 * (to - from)) / end}%`;
      return bar;
    });
    return h("div", { class: "lane" }, h("span", { class: "lane-title" }, title), h("div", { class: "lane-track" }, parts));
  });
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", {}, seconds(part * end)));
  return h("figure", { class: "timeline" }, h("figcaption", {}, "Timeline"),
    h("div", { role: "img", "aria-label": found.map(({ label }) => label).join("; ") }, lanes, h("div", { class: "ticks", "aria-hidden": "true" }, ticks)));
}

function prefix({ prompt_tokens: length, hit_tokens: hit, left_at_token: left, why, explanation, request, common_tokens: common }, inspect) {
  const bar = h("div", { class: "prefix-bar", role: "img", "aria-label": `${hit} of ${length} prompt tokens came from the cache` });
  bar.style.setProperty("--hit", `${(100 * hit) / Math.max(1, length)}%`);
  return h("section", { class: "prefix" }, h("h3", {}, "Prefix cache"), bar,
    h("p", {}, h("strong", {}, `${number(hit)} of ${number(length)}`), ` prompt tokens came from the cache (${share(hit / Math.max(1, length))}). The prompt left it at token `,
      h("strong", {}, number(left)), ": ", h("span", { class: "why" }, explanation ?? why), "."),
    request && h("p", { class: "small soft" }, `Tokens in common with the nearest prompt: ${number(common)}. It is `, requestLink(request, inspect)));
}

/** An event in words. */
export function describe({ kind, detail }) {
  const cause = CAUSES[detail.cause] ?? detail.cause;
  const of = detail.behind ? " behind another request" : "";
  switch (kind) {
    case "queued": return detail.requests_in_queue ? `joins the queue behind ${number(detail.requests_in_queue)}` : "joins the queue, at its head";
    case "stall": return `waits ${seconds(detail.s)}${of}: ${cause}`;
    case "scheduled": return `gets row ${detail.row}, with ${number(detail.computed_tokens)} tokens computed already; ${number(detail.free_pages)} pages stay free`;
    case "chunk": return `computes prompt tokens ${number(detail.from_token)} to ${number(detail.to_token)} in step ${detail.step} (${seconds(detail.ms / 1000)})`;
    case "first_token": return "its first token";
    case "decode": return detail.tokens === undefined ? `decodes since ${seconds(detail.s)}` : `decodes ${number(detail.tokens)} tokens in ${seconds(detail.s)} (${number(detail.tokens_per_second)} tokens/s)`;
    case "preempted": return `gives its pages up after ${number(detail.computed_tokens)} tokens: ${cause}`;
    case "finished": return `ends: ${detail.reason}, after ${number(detail.output_tokens)} tokens`;
    default: return Object.entries(detail ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
  }
}

function eventTable({ events, events_left_out: leftOut }, inspect) {
  const rows = events.map((event) => {
    const other = event.detail.behind ?? event.detail.request ?? event.detail.for_request;
    return h("tr", {}, h("td", { class: "mono" }, seconds(event.t_s)), h("td", {}, h("span", { class: `state is-${event.kind}` }, event.kind.replace("_", " "))),
      h("td", {}, describe(event), other && [" ", requestLink(other, inspect)]));
  });
  return h("div", { class: "table-box", tabindex: 0, role: "group", "aria-label": "Events" }, h("table", { class: "requests events" }, h("caption", {}, "Events"),
    h("thead", {}, h("tr", {}, ["After", "What", ""].map((title) => h("th", { scope: "col" }, title)))), h("tbody", {}, rows)),
  leftOut > 0 && h("p", { class: "soft small" }, `${number(leftOut)} events from the middle were not kept.`));
}
