// The token view: how a text, or the conversation with its template, is cut into tokens. Asks `/tokenize`.

import { json } from "./api.js";
import { checkbox, h, replace, segments } from "./dom.js";
import { bytesText, visible } from "./probabilities.js";
import { readTools } from "./request.js";
import { keep, recall } from "./store.js";

const MAX_SHOWN = 5000;

/** A text field and its tokens. `conversation` gives the chat's messages. */
export class Tokens {
  constructor(settings, conversation) {
    this.settings = settings;
    this.conversation = conversation;
    this.source = "text";
    this.ids = false;
    this.turn = 0;
    this.area = h("textarea", { rows: 5, class: "prompt", placeholder: "A text to cut into tokens", "aria-label": "Text to tokenize", value: recall("tokens", ""),
      on: { input: () => { keep("tokens", this.area.value); this.soon(); } } });
    this.count = h("p", { class: "token-count", role: "status" });
    this.list = h("div", { class: "chips", tabindex: 0, role: "group", "aria-label": "Tokens" });
    const sources = segments("What is cut", [["text", "A text"], ["chat", "The conversation"]], "text", (source) => {
      this.source = source;
      this.area.hidden = source !== "text";
      this.refresh();
    });
    const ids = checkbox("Show ids", false, (on) => this.list.classList.toggle("with-ids", on));
    this.element = h("div", { class: "completion" }, h("div", { class: "row" }, sources.element, ids), this.area, this.count, this.list);
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), 200);
  }

  async refresh() {
    this.turn += 1;
    const turn = this.turn;
    try {
      const body = this.source === "text" ? { prompt: this.area.value, add_special_tokens: false } : this.chat();
      const empty = this.source === "text" ? !body.prompt : !body.messages.length;
      this.byteLevel ??= await usesBytes();
      const answer = empty ? { count: 0, tokens: [], token_strs: [] } : await json("tokenize", { ...body, return_token_strs: true });
      if (turn === this.turn) this.show(answer);
    } catch (error) {
      if (turn === this.turn) replace(this.count, h("span", { class: "error-text" }, error.message));
    }
  }

  chat() {
    const messages = this.conversation();
    const tools = readTools(this.settings.value.tools);
    const system = this.settings.value.system;
    const all = system.trim() && messages.length ? [{ role: "system", content: system }, ...messages] : messages;
    return { messages: all, ...(tools.length && { tools }) };
  }

  show({ count, tokens, token_strs: texts, max_model_len: limit }) {
    const characters = this.source === "text" ? [...this.area.value].length : null;
    const parts = [`${count} tokens`];
    if (characters) parts.push(`${characters} characters`, `${(characters / Math.max(1, count)).toFixed(2)} characters a token`);
    if (limit) parts.push(`context ${limit}`);
    if (count > MAX_SHOWN) parts.push(`the first ${MAX_SHOWN} are shown`);
    this.count.textContent = parts.join(" · ");
    replace(this.list, tokens.slice(0, MAX_SHOWN).map((id, index) => {
      const text = this.byteLevel ? fromByteLevel(texts[index]) : texts[index].replaceAll("▁", " ");
      const chip = h("span", { class: `chip hue-${index % 5}`, title: `token ${id}` }, visible(text), h("small", {}, String(id)));
      return text.includes("\n") ? [chip, h("br")] : chip;
    }));
  }
}

/** Whether the tokenizer writes bytes as printable characters, as GPT-2's does. */
async function usesBytes() {
  const { token_strs: texts } = await json("tokenize", { prompt: "a b", return_token_strs: true, add_special_tokens: false });
  return texts.some((text) => text.includes("Ġ"));
}

const PRINTABLE = [[33, 126], [161, 172], [174, 255]];
const BYTE_OF = byteTable();

/** GPT-2's table: printable bytes stand for themselves, the others for characters from 256 on. */
function byteTable() {
  const table = new Map();
  let next = 256;
  for (let byte = 0; byte < 256; byte += 1) {
    const printable = PRINTABLE.some(([first, last]) => first <= byte && byte <= last);
    table.set(String.fromCharCode(printable ? byte : next), byte);
    if (!printable) next += 1;
  }
  return table;
}

function fromByteLevel(text) {
  const bytes = [...text].map((char) => BYTE_OF.get(char));
  return bytes.includes(undefined) ? text : bytesText(bytes);
}
