// One turn of the assistant on the page: reasoning apart, content as Markdown or heat map, tool calls with their results.

import { copyButton, growing, h, replace, segments } from "./dom.js";
import { highlightJson, prettyJson } from "./json.js";
import { codeBlock, MarkdownView } from "./markdown.js";
import { heatMap } from "./probabilities.js";

const SHORTEST_MS = 10; // What arrives in less came at once: it has no rate.

/** Shows a message and follows it while it grows. `actions` has `retry`, `sendResults` and `inspect`. */
export class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.mode = "text";
    this.reasoning = null;
    this.calls = [];
    this.content = h("div", { class: "prose" });
    this.markdown = new MarkdownView(this.content);
    this.map = h("div", { hidden: true });
    this.callList = h("div", { class: "calls" });
    this.problem = h("p", { class: "notice bad", role: "alert", hidden: true });
    this.footer = h("div", { class: "answer-footer" });
    this.element = h("article", { class: "turn assistant", "aria-label": "Answer" }, this.content, this.map, this.callList, this.problem, this.footer);
    this.update();
  }

  update() {
    const { message } = this;
    this.element.setAttribute("aria-busy", String(Boolean(message.busy)));
    this.element.classList.toggle("busy", Boolean(message.busy));
    if (message.reasoning) this.showReasoning();
    if (message.form || isJson(message)) replace(this.content, message.content ? codeBlock(message.busy ? message.content : prettyJson(message.content), "json") : null);
    else this.markdown.update(message.content ?? "");
    this.content.classList.toggle("empty", !message.content);
    message.tool_calls.forEach((call, index) => {
      this.calls[index] ??= this.addCall(call);
      this.calls[index].update(call);
    });
    this.problem.hidden = !message.error;
    this.problem.textContent = message.error ?? "";
    if (!message.busy) this.finish();
  }

  showReasoning() {
    const { message } = this;
    if (!this.reasoning) {
      const summary = h("summary");
      const text = h("div", { class: "reasoning-text" });
      const element = h("details", { class: "reasoning", open: true }, summary, text);
      this.reasoning = { element, summary, text };
      this.element.prepend(element);
    }
    this.reasoning.text.textContent = message.reasoning;
    const done = message.stats.thought_ms !== undefined || !message.busy;
    const seconds = message.stats.thought_ms === undefined ? "" : ` for ${duration(message.stats.thought_ms)}`;
    this.reasoning.summary.textContent = done ? `Thought${seconds}` : "Thinking …";
    if (done && !this.reasoning.folded) {
      this.reasoning.folded = true;
      this.reasoning.element.open = false;
    }
  }

  addCall(call) {
    const view = new CallView(call, () => this.actions.sendResults(this.message));
    this.callList.append(view.element);
    return view;
  }

  finish() {
    const { message, actions } = this;
    const parts = [h("span", { class: "stats small soft" }, statsLine(message))];
    if (message.tokens.length) {
      if (message.heat && this.mode === "text" && !this.wasShown) this.show("heat");
      this.wasShown = true;
      const views = [["text", "Text"], ["heat", "Heat map"]];
      parts.push(segments("View of the answer", views, this.mode, (mode) => this.show(mode)).element);
    }
    parts.push(h("span", { class: "row" },
      copyButton(() => message.content ?? ""),
      h("button", { class: "quiet", type: "button", on: { click: () => actions.retry(message) } }, "Retry"),
      message.id && h("button", { class: "quiet", type: "button", on: { click: () => actions.inspect(message.id) } }, "Inspect")));
    replace(this.footer, parts);
    for (const view of this.calls) view.finish();
  }

  /** `text`, or `heat` for the heat map. */
  show(mode) {
    this.mode = mode;
    const heat = mode === "heat";
    replace(this.map, heat ? heatMap(this.message.tokens) : null);
    this.map.hidden = !heat;
    for (const part of [this.content, this.callList]) part.hidden = heat;
    if (this.reasoning) this.reasoning.element.hidden = heat;
  }
}

/** One tool call: its name and arguments, and where its result is entered. */
class CallView {
  constructor(call, send) {
    this.call = call;
    this.send = send;
    this.name = h("code", {});
    this.code = h("code");
    this.result = h("div", { class: "call-result" });
    this.element = h("div", { class: "call", role: "group" },
      h("p", { class: "call-title" }, h("span", { class: "soft" }, "calls "), this.name), h("pre", { tabindex: 0 }, this.code), this.result);
  }

  update(call) {
    this.call = call;
    this.name.textContent = call.function.name;
    this.element.setAttribute("aria-label", `Call of ${call.function.name}`);
    replace(this.code, highlightJson(prettyJson(call.function.arguments)));
  }

  finish() {
    const { call } = this;
    if (call.sent) {
      replace(this.result, h("p", { class: "soft small" }, "Result"), h("pre", { tabindex: 0 }, call.result));
      return;
    }
    if (this.result.childElementCount) return;
    const area = growing(h("textarea", { rows: 1, class: "code", placeholder: "What the tool answers", "aria-label": `Result of ${call.function.name}`,
      value: call.result ?? "", on: {
        input: () => { call.result = area.value; },
        keydown: (event) => {
          if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
          event.preventDefault();
          this.send();
        },
      } }));
    replace(this.result, area, h("button", { class: "button", type: "button", on: { click: () => this.send() } }, "Send result"));
  }
}

/** Whether a whole answer is a JSON object or list, though nobody asked for one. */
function isJson({ content, busy }) {
  if (busy || !/^\s*[[{]/.test(content ?? "")) return false;
  try {
    JSON.parse(content);
    return true;
  } catch {
    return false;
  }
}

/** How an answer came about, in a line. */
export function statsLine({ stats, finish, tool_calls: calls = [] }) {
  const parts = [];
  if (stats.first_ms !== undefined) parts.push(`first token ${duration(stats.first_ms)}`);
  if (stats.completion_tokens !== undefined) parts.push(`${stats.completion_tokens} tokens`);
  if (stats.completion_tokens > 1 && stats.total_ms > stats.first_ms + SHORTEST_MS) {
    const rate = (1000 * (stats.completion_tokens - 1)) / (stats.total_ms - stats.first_ms);
    parts.push(`${rate >= 100 ? Math.round(rate) : rate.toFixed(1)} tokens/s`);
  }
  if (stats.prompt_tokens !== undefined) parts.push(`prompt ${stats.prompt_tokens}${stats.cached_tokens ? ` (${stats.cached_tokens} cached)` : ""}`);
  const isAnswered = finish === "tool_calls" && calls.every((call) => call.sent);
  if (finish && finish !== "stop" && !isAnswered) parts.push({ length: "cut off by its length", tool_calls: "waits for tools", stopped: "stopped" }[finish] ?? finish);
  return parts.join(" · ");
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
