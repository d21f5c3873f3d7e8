// The conversation: what has been said, and how the next answer is asked for and shown.

import { AnswerView } from "./answer.js";
import { stream } from "./api.js";
import { attachedView, wireContent } from "./attachments.js";
import { keepConversation, newId, readConversation } from "./conversations.js";
import { announce, growing, h, replace } from "./dom.js";
import { chatTokens } from "./probabilities.js";
import { chatBody, SettingError } from "./request.js";
import { keep, recall } from "./store.js";

/** A conversation on the page. Its element holds the turns; who drives it has the composer. */
export class Chat {
  /** `model` gives the model's name; `onBusy` is told when an answer begins and ends; `inspect` shows a request by its id. */
  constructor(settings, model, { onBusy, inspect, onEmpty }) {
    this.settings = settings;
    this.model = model;
    this.onBusy = onBusy;
    this.inspect = inspect;
    this.onEmpty = onEmpty;
    this.abort = null;
    this.id = recall("chat", null) ?? newId();
    this.messages = readConversation(this.id)?.messages ?? [];
    this.views = new Map();
    this.element = h("div", { class: "turns", role: "log", "aria-live": "off", "aria-label": "Conversation" });
    this.draw();
  }

  get busy() {
    return this.abort !== null;
  }

  /** The conversation as the protocol has it. */
  wire() {
    return this.messages.flatMap((message) => {
      if (message.role === "user") return [{ role: "user", content: wireContent(message) }];
      if (message.error && !message.content && !message.tool_calls.length) return [];
      const calls = message.tool_calls.map(({ id, function: call }) => ({ id, type: "function", function: call }));
      const turn = { role: "assistant", content: message.content || (calls.length ? null : ""), ...(calls.length && { tool_calls: calls }) };
      const results = message.tool_calls.filter((call) => call.sent);
      return [turn, ...results.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }))];
    });
  }

  /** The body that would be sent if `text` were said now. `settings`: those of this message alone, over the panel's. */
  body(text = "", settings = {}) {
    const next = text.trim() ? [{ role: "user", content: text }] : [];
    return chatBody({ ...this.settings.value, ...settings }, [...this.wire(), ...next], this.model());
  }

  /** Say something. `attached` has files and images; `settings` hold for the answer to this, and for no later one. */
  async say(text, { attached = {}, settings = undefined } = {}) {
    if (this.busy) return;
    this.body(text, settings); // a setting that cannot be used is told before the text leaves the composer
    this.messages.push({ role: "user", content: text, ...attached, ...(settings && { settings }) });
    this.draw();
    await this.answer();
  }

  /** The panel's settings, under those that came with what was said last. */
  current() {
    return { ...this.settings.value, ...this.messages.findLast((message) => message.role === "user")?.settings };
  }

  /** Go on with a conversation that was kept. */
  open(id) {
    this.stop();
    this.id = id;
    this.messages = readConversation(id)?.messages ?? [];
    this.draw();
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.id = newId();
    this.messages = [];
    this.draw();
  }

  /** Ask again for an answer; what came after it is forgotten. */
  async retry(message) {
    if (this.busy) return;
    this.messages.length = this.messages.indexOf(message);
    this.draw();
    await this.answer();
  }

  /** Say something else in a turn of the past; what came after it is forgotten. */
  async edit(message, text) {
    if (this.busy || !text.trim()) return;
    message.content = text;
    this.views.delete(message);
    this.messages.length = this.messages.indexOf(message) + 1;
    this.draw();
    await this.answer();
  }

  async sendResults(message) {
    if (this.busy) return;
    for (const call of message.tool_calls) call.result ??= "";
    for (const call of message.tool_calls) call.sent = true;
    this.messages.length = this.messages.indexOf(message) + 1;
    for (const view of this.views.get(message).calls) view.result.replaceChildren();
    this.views.get(message).update();
    this.draw();
    await this.answer();
  }

  async answer() {
    let body;
    const settings = this.current();
    try {
      body = chatBody(settings, this.wire(), this.model());
    } catch (error) {
      if (error instanceof SettingError) return this.settings.complain(error.setting, error.message);
      throw error;
    }
    const message = { role: "assistant", content: "", reasoning: "", tool_calls: [], tokens: [], stats: {}, busy: true, finish: null };
    message.form = Boolean(body.response_format);
    message.heat = settings.probabilities;
    this.messages.push(message);
    this.draw();
    this.abort = new AbortController();
    this.onBusy(true);
    const began = performance.now();
    try {
      for await (const event of stream("v1/chat/completions", body, this.abort.signal)) this.take(message, event, performance.now() - began);
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.error = error.message;
      if (error.param) this.settings.complain(error.param, error.message);
    }
    this.abort = null;
    message.busy = false;
    message.stats.total_ms ??= performance.now() - began;
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.views.get(message)?.update();
    this.onBusy(false);
    this.save();
    announce(message.error ? `Failed: ${message.error}` : `Answer: ${message.content.slice(0, 300) || "a tool call"}`);
  }

  /** Take in one event of the stream. */
  take(message, event, elapsed) {
    message.id = event.id;
    const { stats } = message;
    if (event.usage) {
      stats.prompt_tokens = event.usage.prompt_tokens;
      stats.completion_tokens = event.usage.completion_tokens;
      stats.cached_tokens = event.usage.prompt_tokens_details?.cached_tokens;
    }
    for (const { delta, logprobs, finish_reason: finish } of event.choices) {
      const thought = delta.reasoning ?? delta.reasoning_content;
      if (thought || delta.content || delta.tool_calls) stats.first_ms ??= elapsed;
      if (thought) message.reasoning += thought;
      if (delta.content) message.content += delta.content;
      if ((delta.content || delta.tool_calls) && message.reasoning) stats.thought_ms ??= elapsed - stats.first_ms;
      for (const part of delta.tool_calls ?? []) addCall(message.tool_calls, part);
      message.tokens.push(...chatTokens(logprobs));
      message.finish = finish ?? message.finish;
      stats.total_ms = elapsed;
    }
    this.redraw(message);
  }

  /** Show a growing message, at most once a frame. */
  redraw(message) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      keepAtEnd(this.element.parentElement, () => this.views.get(message)?.update());
    });
  }

  draw() {
    for (const message of this.views.keys()) if (!this.messages.includes(message)) this.views.delete(message);
    for (const message of this.messages) {
      if (!this.views.has(message)) this.views.set(message, message.role === "user" ? this.userView(message) : this.answerView(message));
    }
    replace(this.element, this.messages.map((message) => this.views.get(message).element));
    this.onEmpty(this.messages.length === 0);
    this.element.parentElement?.scrollTo({ top: this.element.parentElement.scrollHeight });
    this.save();
  }

  answerView(message) {
    return new AnswerView(message, {
      retry: (of) => this.retry(of),
      sendResults: (of) => this.sendResults(of),
      inspect: this.inspect,
    });
  }

  userView(message) {
    const said = message.content && h("div", { class: "said" }, message.content);
    const text = h("div", { class: "said-box" }, attachedView(message), said);
    const edit = h("button", { class: "quiet", type: "button", on: { click: () => this.editor(message, element) } }, "Edit");
    const element = h("article", { class: "turn user", "aria-label": "You" }, text, edit);
    return { element };
  }

  editor(message, element) {
    const before = [...element.childNodes];
    const area = growing(h("textarea", { "aria-label": "Edit what you said", value: message.content }));
    const cancel = () => { replace(element, before); element.querySelector("button").focus(); };
    const send = () => this.edit(message, area.value);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    replace(element, area, h("div", { class: "row end" },
      h("button", { class: "quiet", type: "button", on: { click: cancel } }, "Cancel"),
      h("button", { class: "button main", type: "button", on: { click: send } }, "Ask again")));
    area.focus();
  }

  save() {
    keep("chat", this.id);
    keepConversation(this.id, this.messages.filter((message) => !message.busy));
  }
}

function addCall(calls, { index = 0, id, function: part }) {
  calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
  if (id) calls[index].id = id;
  if (part?.name) calls[index].function.name += part.name;
  if (part?.arguments) calls[index].function.arguments += part.arguments;
}

/** Do something, and stay at the end of the scrolled box if it was there. */
export function keepAtEnd(box, action) {
  const atEnd = box && box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  action();
  if (atEnd) box.scrollTop = box.scrollHeight;
}
