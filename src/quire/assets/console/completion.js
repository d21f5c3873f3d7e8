// Text in, its continuation out: `/v1/completions`.

import { statsLine } from "./answer.js";
import { stream } from "./api.js";
import { announce, copyButton, growing, h, replace, segments } from "./dom.js";
import { completionTokens, heatMap } from "./probabilities.js";
import { completionBody, SettingError } from "./request.js";
import { keep, recall } from "./store.js";

/** A prompt, a button, and what the model writes after it. */
export class Completion {
  constructor(settings, model, { onBusy, inspect }) {
    this.settings = settings;
    this.model = model;
    this.onBusy = onBusy;
    this.inspect = inspect;
    this.abort = null;
    this.area = growing(h("textarea", { rows: 6, class: "prompt", placeholder: "A text to go on with", "aria-label": "Prompt", value: recall("prompt", ""),
      on: {
        input: () => keep("prompt", this.area.value),
        keydown: (event) => {
          if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
          event.preventDefault();
          this.run();
        },
      } }), 420);
    this.output = h("div", { class: "continuation" });
    this.footer = h("div", { class: "answer-footer" });
    this.problem = h("p", { class: "notice bad", role: "alert", hidden: true });
    this.element = h("div", { class: "completion" }, this.area, this.problem, h("article", { "aria-label": "Continuation" }, this.output, this.footer));
  }

  get busy() {
    return this.abort !== null;
  }

  /** The body that would be sent now. */
  body() {
    return completionBody(this.settings.value, this.area.value, this.model());
  }

  stop() {
    this.abort?.abort();
  }

  async run() {
    if (this.busy) return;
    let body;
    try {
      body = this.body();
    } catch (error) {
      if (error instanceof SettingError) return this.settings.complain(error.setting, error.message);
      throw error;
    }
    const answer = { prompt: body.prompt, text: "", tokens: [], stats: {}, finish: null, id: null };
    this.problem.hidden = true;
    replace(this.footer);
    this.show(answer, "text");
    this.abort = new AbortController();
    this.onBusy(true);
    const began = performance.now();
    try {
      for await (const event of stream("v1/completions", body, this.abort.signal)) this.take(answer, event, performance.now() - began);
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopped";
      else {
        this.problem.textContent = error.message;
        this.problem.hidden = false;
        if (error.param) this.settings.complain(error.param, error.message);
      }
    }
    this.abort = null;
    this.onBusy(false);
    this.show(answer, "text");
    this.finish(answer);
    announce(answer.text ? `Continuation: ${answer.text.slice(0, 300)}` : "Nothing was written.");
  }

  take(answer, event, elapsed) {
    answer.id = event.id;
    if (event.usage) Object.assign(answer.stats, { prompt_tokens: event.usage.prompt_tokens, completion_tokens: event.usage.completion_tokens });
    for (const choice of event.choices) {
      if (choice.text) answer.stats.first_ms ??= elapsed;
      answer.text += choice.text ?? "";
      answer.tokens.push(...completionTokens(choice.logprobs));
      answer.finish = choice.finish_reason ?? answer.finish;
      answer.stats.total_ms = elapsed;
    }
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.show(answer, "text");
    });
  }

  show(answer, mode) {
    if (mode === "heat") replace(this.output, heatMap(answer.tokens));
    else replace(this.output, h("span", { class: "soft" }, answer.prompt), h("span", { class: "written" }, answer.text));
  }

  finish(answer) {
    const goOn = () => {
      this.area.value = answer.prompt + answer.text;
      keep("prompt", this.area.value);
      this.area.grow();
      this.area.focus();
    };
    const views = [["text", "Text"], ["heat", "Heat map"]];
    replace(this.footer,
      h("span", { class: "stats small soft" }, statsLine(answer)),
      answer.tokens.length > 0 && segments("View of the continuation", views, "text", (mode) => this.show(answer, mode)).element,
      h("span", { class: "row" },
        copyButton(() => answer.text),
        h("button", { class: "quiet", type: "button", on: { click: goOn } }, "Make it the prompt"),
        answer.id && h("button", { class: "quiet", type: "button", on: { click: () => this.inspect(answer.id) } }, "Inspect")));
  }
}
