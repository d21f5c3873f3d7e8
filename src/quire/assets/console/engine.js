// The live view of the engine: asks `/console/state` once a second while it is seen. Its charts begin with the minutes that the
// server remembers.

import { json } from "./api.js";
import { Chart } from "./charts.js";
import { h, replace, replaceKeyed } from "./dom.js";
import { buildFindings } from "./findings.js";
import { number, seconds, share, shortId } from "./format.js";
import { buildHappenings } from "./happenings.js";

const POLL_MS = 1000;
const KEPT_S = 1200;
const LEAST_S = 60;
const TENANTS_S = 120;
const MAX_ROWS = 40;

/** Build the tab. `inspect` shows a request. Gives `show` and `hide`. */
export function buildEngine(root, inspect) {
  const problem = h("p", { class: "notice bad", role: "alert", hidden: true });
  const tiles = new Tiles();
  const rate = new Chart("Tokens a second", { format: number, axis: clock, ceiling: 10 });
  const requests = new Chart("Requests", { format: number, axis: clock, ceiling: 4 });
  const pages = new Chart("Pages in use", { format: share, axis: clock, ceiling: 1 });
  const steps = new Chart("Step time against prediction", { format: (value) => `${value.toFixed(value < 10 ? 2 : 1)} ms`, axis: stepsAgo, ceiling: 1 });
  const rows = h("tbody");
  const table = h("table", { class: "requests live" },
    h("caption", {}, "Requests, running ones first"),
    h("thead", {}, h("tr", {}, ["Request", "Came", "State", "Queued", "Prompt", "From cache", "Output", "Tokens/s"].map((title) => h("th", { scope: "col" }, title)))), rows);
  const happenings = buildHappenings();
  const findings = buildFindings();
  replace(root, h("div", { class: "board" }, problem, tiles.element,
    h("div", { class: "charts" }, rate.element, steps.element, requests.element, pages.element), findings.element, happenings.element, h("div", { class: "table-box", tabindex: 0, role: "group", "aria-label": "Requests" }, table)));

  const history = [];
  let timer = null;
  let isShown = false;

  async function poll() {
    try {
      const state = await json("console/state");
      if (!isShown) return;
      problem.hidden = !state.problem;
      problem.textContent = state.problem ?? "";
      happenings.update(state, tenantsBefore(history) ?? state);
      if (!state.problem) draw(state);
    } catch (error) {
      problem.hidden = false;
      problem.textContent = error.status === 404 ? "This server does not tell its state." : error.message;
    }
    if (isShown) timer = setTimeout(poll, POLL_MS);
  }

  function draw(state) {
    const now = Date.now() / 1000;
    if (!history.length) history.push(...remembered(state, now));
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
    replaceKeyed(rows, [...state.requests, ...state.finished].slice(0, MAX_ROWS).map((request) => row(request, state.first_words[request.id], inspect)));
    if (!rows.childElementCount) replace(rows, h("tr", {}, h("td", { colspan: 8, class: "soft" }, "No requests yet.")));
  }

  return {
    show() {
      if (isShown) return;
      isShown = true;
      poll();
      findings.show();
    },
    hide() {
      isShown = false;
      clearTimeout(timer);
      findings.hide();
    },
  };
}

/** The time of day. */
function clock(at, [first, last]) {
  const options = last - first > 150 ? { hour: "2-digit", minute: "2-digit" } : { hour: "2-digit", minute: "2-digit", second: "2-digit" };
  return new Date(1000 * at).toLocaleTimeString([], options);
}

function stepsAgo(at, [, last]) {
  const steps = Math.round(last - at);
  return steps ? `${steps} steps ago` : "the last step";
}

/** The server's slots as earlier states; between two that do not touch nothing ran. */
function remembered({ history, history_every_s: every }, now) {
  const states = [];
  const quiet = (at) => states.push({ at, running: 0, waiting: 0, kv_usage: states.at(-1)?.kv_usage ?? 0, tokens_per_second: 0 });
  for (const [at, running, waiting, kv_usage, tokens] of history) {
    if (now - at > KEPT_S) continue;
    if (states.length && at - states.at(-1).at > 2 * every) {
      quiet(states.at(-1).at + every);
      quiet(at - 1);
    }
    states.push({ at, running, waiting, kv_usage, tokens_per_second: tokens / every });
  }
  if (states.length && now - states.at(-1).at > 2 * every) quiet(states.at(-1).at + every);
  return states;
}

/** The state before which tenants are counted: that of two minutes ago, where the page has seen it. */
function tenantsBefore(history) {
  const seen = history.filter((past) => past.tenants);
  return seen.find((past) => past.at >= (seen.at(-1)?.at ?? 0) - TENANTS_S);
}

/** When a request came, as the time of day. */
export function cameAt({ age_s: age }) {
  if (age === undefined) return "–";
  const at = new Date(Date.now() - 1000 * age);
  return h("time", { datetime: at.toISOString(), title: at.toLocaleString() }, at.toLocaleTimeString());
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
      tile("pages", "Pages in use"), tile("prefix", "Prefix cache"), tile("uptime", "Up for"));
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

function row(request, words, inspect) {
  const link = h("button", { class: "link mono", type: "button", title: request.id, data: { key: request.id }, on: { click: () => inspect(request.id) } }, shortId(request.id));
  const state = request.state === "finished" ? (request.reason ?? "finished") : request.state;
  const progress = request.state === "prefill" ? ` ${share(request.computed_tokens / Math.max(1, request.prompt_tokens))}` : "";
  const said = words && h("div", { class: "first-words soft small", title: words }, words);
  return h("tr", {}, h("td", {}, link, said), h("td", {}, cameAt(request)), h("td", {}, h("span", { class: `state is-${request.state}` }, state), progress),
    h("td", {}, seconds(request.queued_s)), h("td", {}, number(request.prompt_tokens)), h("td", {}, number(request.cached_tokens)),
    h("td", {}, number(request.output_tokens)), h("td", {}, request.tokens_per_second ? number(request.tokens_per_second) : "–"));
}
