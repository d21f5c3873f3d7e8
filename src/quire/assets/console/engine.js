// The live view of the engine: asks `/console/state` once a second while it is seen, and remembers two minutes.

import { json } from "./api.js";
import { Chart } from "./charts.js";
import { h, replace, replaceKeyed } from "./dom.js";
import { number, seconds, share, shortId } from "./format.js";
import { buildHappenings } from "./happenings.js";

const POLL_MS = 1000;
const KEPT_S = 120;
const LEAST_S = 30;
const MAX_ROWS = 40;

/** Build the tab. `inspect` shows a request. Gives `show` and `hide`. */
export function buildEngine(root, inspect) {
  const problem = h("p", { class: "notice bad", role: "alert", hidden: true });
  const tiles = new Tiles();
  const rate = new Chart("Tokens a second", { format: number, ceiling: 10 });
  const requests = new Chart("Requests", { format: number, ceiling: 4 });
  const pages = new Chart("Pages in use", { format: share, ceiling: 1 });
  const steps = new Chart("Step time against prediction", { format: (value) => `${value.toFixed(value < 10 ? 2 : 1)} ms`, ceiling: 1 });
  const rows = h("tbody");
  const table = h("table", { class: "requests live" },
    h("caption", {}, "Requests, running ones first"),
    h("thead", {}, h("tr", {}, ["Request", "State", "Queued", "Prompt", "From cache", "Output", "Tokens/s"].map((title) => h("th", { scope: "col" }, title)))), rows);
  const happenings = buildHappenings();
  replace(root, h("div", { class: "board" }, problem, tiles.element,
    h("div", { class: "charts" }, rate.element, steps.element, requests.element, pages.element), happenings.element, h("div", { class: "table-box", tabindex: 0, role: "group", "aria-label": "Requests" }, table)));

  const history = [];
  let timer = null;
  let isShown = false;

  async function poll() {
    try {
      const state = await json("console/state");
      if (!isShown) return;
      problem.hidden = !state.problem;
      problem.textContent = state.problem ?? "";
      happenings.update(state, history[0] ?? state);
      if (!state.problem) draw(state);
    } catch (error) {
      problem.hidden = false;
      problem.textContent = error.status === 404 ? "This server does not tell its state." : error.message;
    }
    if (isShown) timer = setTimeout(poll, POLL_MS);
  }

  function draw(state) {
    const now = performance.now() / 1000;
    history.push({ at: now, ...state });
    while (now - history[0].at > KEPT_S) history.shift();
    tiles.update(state);
    const over = (read) => history.map((past) => [past.at, read(past)]);
    const domain = [Math.min(history[0].at, now - LEAST_S), now];
    rate.update([{ label: "generated", style: "blue", fill: true, points: over((past) => past.tokens_per_second) }], domain);
    requests.update([
      { label: "running", style: "green", fill: true, points: over((past) => past.running) },
      { label: "waiting", style: "orange", points: over((past) => past.waiting) },
    ], domain);
    pages.update([{ label: "used", style: "violet", fill: true, points: over((past) => past.kv_usage) }], domain);
    const timed = state.steps.map((step, index) => [index, step]);
    steps.update([
      { label: "took", style: "blue", points: timed.map(([index, step]) => [index, step.ms]) },
      { label: "predicted", style: "orange dashed", points: timed.map(([index, step]) => [index, step.predicted_ms]) },
    ], [0, Math.max(1, timed.length - 1)]);
    replaceKeyed(rows, [...state.requests, ...state.finished].slice(0, MAX_ROWS).map((request) => row(request, inspect)));
    if (!rows.childElementCount) replace(rows, h("tr", {}, h("td", { colspan: 7, class: "soft" }, "No requests yet.")));
  }

  return {
    show() {
      if (isShown) return;
      isShown = true;
      poll();
    },
    hide() {
      isShown = false;
      clearTimeout(timer);
    },
  };
}

/** The figures at the top. */
class Tiles {
  constructor() {
    this.values = {};
    const tile = (name, label) => {
      this.values[name] = { value: h("dd"), note: h("dd", { class: "tile-note" }) };
      return h("div", { class: "tile" }, h("dt", {}, label), this.values[name].value, this.values[name].note);
    };
    this.element = h("dl", { class: "tiles" }, tile("running", "Running"), tile("waiting", "Waiting"), tile("rate", "Tokens a second"),
      tile("pages", "Pages in use"), tile("prefix", "From the prefix cache"), tile("uptime", "Up for"));
  }

  update(state) {
    const { num_pages: pages, prefix_queries: queries, prefix_hits: hits } = state;
    this.set("running", number(state.running), `${number(state.preemptions)} preempted so far`);
    this.set("waiting", number(state.waiting), state.waiting ? "in the queue" : "the queue is empty");
    this.set("rate", number(state.tokens_per_second), `${number(state.generation_tokens_total)} generated, ${number(state.prompt_tokens_total)} read`);
    this.set("pages", share(state.kv_usage), `${number(pages - state.free_pages)} of ${number(pages)}`);
    this.set("prefix", queries ? share(hits / queries) : "–", `${number(hits)} of ${number(queries)} tokens`);
    this.set("uptime", seconds(state.uptime_s), `Quire ${state.version}`);
  }

  set(name, value, note) {
    this.values[name].value.textContent = value;
    this.values[name].note.textContent = note;
  }
}

function row(request, inspect) {
  const link = h("button", { class: "link mono", type: "button", title: request.id, data: { key: request.id }, on: { click: () => inspect(request.id) } }, shortId(request.id));
  const state = request.state === "finished" ? (request.reason ?? "finished") : request.state;
  const progress = request.state === "prefill" ? ` ${share(request.computed_tokens / Math.max(1, request.prompt_tokens))}` : "";
  return h("tr", {}, h("td", {}, link), h("td", {}, h("span", { class: `state is-${request.state}` }, state), progress),
    h("td", {}, seconds(request.queued_s)), h("td", {}, number(request.prompt_tokens)), h("td", {}, number(request.cached_tokens)),
    h("td", {}, number(request.output_tokens)), h("td", {}, request.tokens_per_second ? number(request.tokens_per_second) : "–"));
}
