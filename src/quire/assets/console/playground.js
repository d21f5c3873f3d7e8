// The first tab: chat, completion and tokens around one set of settings.

import { address, getKey } from "./api.js";
import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { showHistory } from "./conversations.js";
import { copyButton, growing, h, openDialog, replace, segments } from "./dom.js";
import { asCurl, asPython, SettingError } from "./request.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOL, Settings } from "./settings.js";
import { keep, recall } from "./store.js";
import { Tokens } from "./tokens.js";

const PLAIN = { form: "text", tools: "", thinking: "default", probabilities: false, sampling: {} };
const STARTERS = [
  ["Ask something", "What is 17 + 25?", PLAIN],
  ["See how sure it is", "Spell the word necessary backwards.", { ...PLAIN, probabilities: true, sampling: { temperature: 0 } }],
  ["Get JSON of a schema", "Make JSON with name Bob and age 7",
    { ...PLAIN, form: "json_schema", forms: { json_schema: JSON.stringify(EXAMPLE_SCHEMA, null, 2), regex: "", choice: "", grammar: "" } }],
  ["Let it call a tool", "Use the calculator: 12 * 7", { ...PLAIN, tools: JSON.stringify([EXAMPLE_TOOL], null, 2) }],
  ["Have it think first", "Tom has 3 apples and buys 4 more. How many apples has Tom?", { ...PLAIN, thinking: "on" }],
];

const isTouched = matchMedia("(pointer: coarse)"); // where Enter is the only way to a new line

/** Build the tab. `model` gives the served model's name, `inspect` shows a request, `seesImages` tells whether the model does.
 * Gives what the shortcuts need. */
export function buildPlayground(root, { model, inspect, seesImages }) {
  const settings = new Settings();
  const onBusy = () => drawButtons();
  const welcome = h("div", { class: "welcome" });
  const chat = new Chat(settings, model, { onBusy, inspect, onEmpty: (empty) => { welcome.hidden = !empty; } });
  const completion = new Completion(settings, model, { onBusy, inspect });
  const tokens = new Tokens(settings, () => chat.wire());
  let mode = "chat";

  const area = growing(h("textarea", { rows: 1, placeholder: "Say something", "aria-label": "Your message", id: "composer", on: { keydown: (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouched.matches) return;
    event.preventDefault();
    send();
  } } }));
  const sendButton = h("button", { class: "button main", type: "button", on: { click: () => (active()?.busy ? stop() : send()) } });
  const attachments = new Attachments(seesImages);
  const composer = h("div", { class: "composer" }, attachments.element, attachments.button, area);
  const bar = h("div", { class: "composer-bar" });
  const scroll = h("div", { class: "scroll" }, welcome, chat.element);
  const stage = h("div", { class: "stage" });

  function active() {
    return { chat, completion }[mode];
  }

  /** `own`: settings of this message alone. */
  async function send(own = undefined) {
    if (active()?.busy) return;
    if (mode === "completion") return completion.run();
    const text = area.value;
    if (!text.trim() && attachments.isEmpty) return area.focus();
    try {
      chat.body(text, own);
      const said = chat.say(text, { attached: attachments.give(), settings: own });
      area.value = "";
      area.grow();
      await said;
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      area.value = text;
      showSettings(true);
      settings.complain(error.setting, error.message);
    }
  }

  function stop() {
    if (!active()?.busy) return false;
    active().stop();
    return true;
  }

  function drawButtons() {
    const busy = Boolean(active()?.busy);
    sendButton.textContent = busy ? "Stop" : mode === "completion" ? "Complete" : "Send";
    sendButton.className = busy ? "button stop" : "button main";
  }

  function showCode() {
    let body;
    try {
      body = mode === "completion" ? completion.body() : chat.body(area.value);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      showSettings(true);
      settings.complain(error.setting, error.message);
      return;
    }
    const path = mode === "completion" ? "v1/completions" : "v1/chat/completions";
    const texts = { curl: asCurl(address(path), body, Boolean(getKey())), python: asPython(address("v1"), body, Boolean(getKey())) };
    const code = h("pre", { class: "block", tabindex: 0 }, texts.curl);
    let shown = "curl";
    const kinds = segments("Language", [["curl", "curl"], ["python", "Python"]], shown, (kind) => {
      shown = kind;
      code.textContent = texts[kind];
    });
    openDialog("This request as code", {}, h("div", { class: "row" }, kinds.element, copyButton(() => texts[shown])), code);
  }

  const settingsButton = h("button", { class: "quiet", type: "button", "aria-controls": "settings", on: { click: () => showSettings(settings.element.hidden) } }, "Settings");
  const clearButton = h("button", { class: "quiet", type: "button", on: { click: () => { chat.clear(); area.focus(); } } }, "New chat");
  const historyButton = h("button", { class: "quiet", type: "button", "aria-haspopup": "dialog", on: { click: () => showHistory({
    open: (id) => { chat.open(id); area.focus(); },
    forgotten: (id) => id === chat.id && chat.clear(),
  }) } }, "History");
  const codeButton = h("button", { class: "quiet", type: "button", on: { click: showCode } }, "Code");

  function showSettings(on) {
    settings.element.hidden = !on;
    settingsButton.setAttribute("aria-expanded", String(on));
    keep("panel", on);
  }

  function choose(next) {
    mode = next;
    keep("mode", mode);
    const parts = {
      chat: [scroll, h("div", { class: "dock" }, composer)],
      completion: [h("div", { class: "scroll" }, completion.element), h("div", { class: "dock bare" }, bar)],
      tokens: [h("div", { class: "scroll" }, tokens.element)],
    };
    (mode === "chat" ? composer : bar).append(sendButton);
    replace(stage, parts[mode]);
    for (const button of [clearButton, historyButton]) button.hidden = mode !== "chat";
    codeButton.hidden = mode === "tokens";
    drawButtons();
    for (const growable of [area, completion.area]) growable.grow();
    if (mode === "tokens") tokens.refresh();
    scroll.scrollTop = scroll.scrollHeight;
  }

  replace(welcome,
    h("h2", {}, "What should the model do?"),
    h("p", { class: "soft" }, "Ask below, or begin with one of these."),
    h("ul", { class: "starters" }, STARTERS.map(([title, text, changes]) =>
      h("li", {}, h("button", { type: "button", class: "starter", on: { click: () => {
        area.value = text;
        area.focus();
        send(changes);
      } } }, h("strong", {}, title), h("span", { class: "soft" }, text))))));

  const modes = segments("Mode", [["chat", "Chat"], ["completion", "Completion"], ["tokens", "Tokens"]], recall("mode", "chat"), choose);
  replace(root, h("div", { class: "playground" },
    h("div", { class: "toolbar" }, modes.element, h("span", { class: "row" }, clearButton, historyButton, codeButton, settingsButton)),
    stage, settings.element));
  stage.addEventListener("dragover", (event) => mode === "chat" && event.preventDefault());
  stage.addEventListener("drop", (event) => {
    if (mode !== "chat" || !event.dataTransfer.files.length) return;
    event.preventDefault();
    attachments.add(event.dataTransfer.files);
  });
  area.addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attachments.add(event.clipboardData.files);
  });
  showSettings(recall("panel", window.innerWidth > 1000));
  choose(recall("mode", "chat"));
  return { stop, focus: () => (mode === "chat" ? area : mode === "completion" ? completion.area : tokens.area).focus(),
    newChat: () => chat.clear(), toggleSettings: () => showSettings(settings.element.hidden), showCode };
}
