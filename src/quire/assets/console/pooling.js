// The first tab of a server whose model embeds, classifies or scores: what it does, with texts of the reader's own.

import { address, getKey, json } from "./api.js";
import { copyButton, field, growing, h, openDialog, replace, segments } from "./dom.js";
import { asCurl } from "./request.js";
import { keep, recall } from "./store.js";

const EXAMPLES = "A quire is a gathering of pages.\nBooks are bound from quires.\nThe weather is fine today.";
const SHOWN_NUMBERS = 8;

/** Build the tab for a pooling model. `abilities` is what the server said; `model` gives its name. */
export function buildPooling(root, { abilities, model }) {
  const views = [
    abilities.tasks.includes("embed") && ["compare", "Compare", compareView(model)],
    abilities.tasks.includes("embed") && ["embed", "Embed", embedView(model)],
    abilities.scores && ["rerank", "Rerank", rerankView(model)],
    abilities.tasks.includes("classify") && !abilities.scores && ["classify", "Classify", classifyView(model)],
  ].filter(Boolean);
  if (!views.length) views.push(["pool", "Numbers", poolView(model, abilities.tasks[0])]);
  const stage = h("div", { class: "scroll" });
  let shown = null;
  const choose = (name) => {
    [, , shown] = views.find(([view]) => view === name) ?? views[0];
    keep("pooling", name);
    replace(stage, shown.element);
  };
  const first = views.some(([name]) => name === recall("pooling", "")) ? recall("pooling", "") : views[0][0];
  const modes = segments("What to do", views.map(([name, title]) => [name, title]), first, choose);
  const code = h("button", { class: "quiet", type: "button", on: { click: () => showCode(shown.request()) } }, "Code");
  replace(root, h("div", { class: "playground" }, h("div", { class: "toolbar" }, modes.element, h("span", { class: "row" }, code)), h("div", { class: "stage" }, stage)));
  choose(first);
  return { stop: () => false, focus: () => shown.element.querySelector("textarea").focus(), newChat: () => {}, toggleSettings: () => {},
    showCode: () => showCode(shown.request()) };
}

function showCode({ path, body }) {
  const text = asCurl(address(path), body, Boolean(getKey()));
  openDialog("This request as code", {}, h("div", { class: "row" }, copyButton(() => text)), h("pre", { class: "block", tabindex: 0 }, text));
}

const lines = (area) => area.value.split("\n").map((line) => line.trim()).filter(Boolean);

function texts(name, label, hint, example = EXAMPLES) {
  const area = growing(h("textarea", { rows: 5, class: "prompt", value: recall(`pooling.${name}`, example), on: { input: () => keep(`pooling.${name}`, area.value) } }), 420);
  return { area, element: field(label, area, hint) };
}

/** A form of some fields with a button; `show` gets what the server answered and gives nodes. */
function view(label, fields, request, show) {
  const output = h("div", { class: "pooled", role: "status" });
  const problem = h("p", { class: "notice bad", role: "alert", hidden: true });
  const button = h("button", { class: "button main", type: "submit" }, label);
  async function run(event) {
    event.preventDefault();
    button.disabled = true;
    problem.hidden = true;
    try {
      const { path, body } = request();
      replace(output, show(await json(path, body), body));
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
      replace(output);
    }
    button.disabled = false;
  }
  const element = h("form", { class: "completion", on: { submit: run } }, fields.map((one) => one.element), h("div", { class: "row end" }, button), problem, output);
  return { element, request };
}

function compareView(model) {
  const given = texts("compare", "Texts to compare", "One a line.");
  const request = () => ({ path: "v1/embeddings", body: { model: model(), input: lines(given.area) } });
  return view("Compare", [given], request, ({ data }, { input }) => {
    const vectors = data.map((one) => one.embedding);
    const head = input.map((_, index) => h("th", { scope: "col" }, String(index + 1)));
    const rows = vectors.map((one, row) => h("tr", {}, h("th", { scope: "row" }, `${row + 1}. ${input[row]}`),
      vectors.map((two) => likeness(cosine(one, two)))));
    return h("div", { class: "table-box", tabindex: 0, role: "group", "aria-label": "How near the texts are" }, h("table", { class: "requests near" },
      h("caption", {}, "How near the texts are to each other (cosine)"), h("thead", {}, h("tr", {}, h("th", {}), head)), h("tbody", {}, rows)));
  });
}

function likeness(value) {
  const cell = h("td", { class: "near-cell" }, value.toFixed(3));
  cell.style.setProperty("--near", `${Math.round(100 * Math.max(0, Math.min(1, value)))}%`);
  return cell;
}

function cosine(one, two) {
  const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
  const length = Math.sqrt(dot(one, one) * dot(two, two));
  return length ? dot(one, two) / length : 0;
}

function embedView(model) {
  const given = texts("embed", "Texts to embed", "One a line.");
  const request = () => ({ path: "v1/embeddings", body: { model: model(), input: lines(given.area) } });
  return view("Embed", [given], request, ({ data, usage }, { input }) => [
    h("p", { class: "soft small" }, `${data[0].embedding.length} numbers each · ${usage.prompt_tokens} tokens read`),
    data.map(({ embedding }, index) => h("figure", { class: "code" },
      h("figcaption", {}, h("span", {}, input[index]), copyButton(() => JSON.stringify(embedding))),
      h("pre", { tabindex: 0 }, `[${embedding.slice(0, SHOWN_NUMBERS).map((number) => number.toFixed(5)).join(", ")}, …]`)))]);
}

function rerankView(model) {
  const query = h("input", { value: recall("pooling.query", "What is a quire?"), on: { input: () => keep("pooling.query", query.value) } });
  const given = texts("documents", "Documents", "One a line.");
  const request = () => ({ path: "v1/rerank", body: { model: model(), query: query.value, documents: lines(given.area) } });
  return view("Rank", [{ element: field("Question", query) }, given], request, ({ results }) => h("ol", { class: "ranked" },
    results.map(({ index, document, relevance_score: score }) => bar(document?.text ?? lines(given.area)[index], score, results[0].relevance_score))));
}

function classifyView(model) {
  const given = texts("classify", "Texts to classify", "One a line.");
  const request = () => ({ path: "classify", body: { model: model(), input: lines(given.area) } });
  return view("Classify", [given], request, ({ data }, { input }) => data.map(({ label, probs }, index) => h("section", {},
    h("h3", {}, input[index]), h("p", {}, "Most likely: ", h("strong", {}, label ?? String(probs.indexOf(Math.max(...probs))))),
    h("ol", { class: "ranked" }, probs.map((share, number) => bar(`class ${number}`, share))))));
}

/** `most`: the greatest score, which may be above 1 where it is a sum over tokens. */
function bar(text, score, most = 1) {
  const meter = h("span", { class: "ranked-bar", "aria-hidden": "true" });
  meter.style.setProperty("--share", `${100 * Math.max(0, score / Math.max(1, most))}%`);
  return h("li", {}, h("span", {}, text), h("span", { class: "ranked-score" }, score.toFixed(4)), meter);
}

function poolView(model, task) {
  const given = texts("pool", "Texts", "One a line.");
  const request = () => ({ path: "pooling", body: { model: model(), input: lines(given.area), task } });
  return view("Run", [given], request, ({ data }, { input }) => data.map((one, index) => h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, input[index]), copyButton(() => JSON.stringify(one.data))),
    h("pre", { tabindex: 0 }, JSON.stringify(one.data).slice(0, 400)))));
}
