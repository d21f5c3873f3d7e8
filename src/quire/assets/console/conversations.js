// Conversations that this browser keeps: one entry each in the local storage, so that tabs do not overwrite each other's.
// Nothing of them is sent anywhere but in requests to this server.

import { wireContent } from "./attachments.js";
import { h, openDialog, replace } from "./dom.js";

const PREFIX = "quire.chat.";
const MOST = 100;
const TITLE_LENGTH = 60;

/** An id that no other conversation has. */
export function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
}

/** A conversation that was kept: `{id, title, at, messages}`, or null. */
export function readConversation(id) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + id));
  } catch {
    return null;
  }
}

/** All that are kept, the latest first. */
export function listConversations() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  return ids.map(readConversation).filter((one) => one?.messages?.length).sort((one, two) => two.at - one.at);
}

/** Keep a conversation; the oldest ones make room. One that is too large even alone is not kept. */
export function keepConversation(id, messages) {
  if (!messages.length) return;
  const text = JSON.stringify({ id, title: titleOf(messages), at: Date.now(), messages });
  const others = () => listConversations().filter((one) => one.id !== id);
  while (others().length >= MOST) forgetConversation(others().at(-1).id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + id, text);
      return;
    } catch {
      const oldest = others().at(-1);
      if (!oldest) return;
      forgetConversation(oldest.id);
    }
  }
}

export function forgetConversation(id) {
  localStorage.removeItem(PREFIX + id);
}

function titleOf(messages) {
  const first = messages.find((message) => message.role === "user") ?? messages[0];
  const text = (first.content || first.files?.[0]?.name || first.images?.[0]?.name || "").trim().replace(/\s+/g, " ");
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH)}…` : text || "Without words";
}

/** A conversation as a text for people. */
export function asMarkdown({ title, messages }) {
  const turns = messages.map((message) => {
    if (message.role === "user") {
      const images = (message.images ?? []).map((image) => `Attached: ${image.name}`);
      return ["## You", wireContent({ ...message, images: [] }), ...images].filter(Boolean).join("\n\n");
    }
    const calls = (message.tool_calls ?? []).map(({ function: call, result }) =>
      `Calls \`${call.name}\`:\n\n\`\`\`json\n${call.arguments}\n\`\`\`${result === undefined ? "" : `\n\nResult: ${result}`}`);
    const thought = message.reasoning ? [message.reasoning.split("\n").map((line) => `> ${line}`).join("\n")] : [];
    return ["## Answer", ...thought, message.content || message.error || "", ...calls].filter(Boolean).join("\n\n");
  });
  return `# ${title}\n\n${turns.join("\n\n")}\n`;
}

/** Save a text as a file of the reader's. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** The list, in a dialog. `open` shows a conversation; `forgotten` is told the id of one that was deleted. */
export function showHistory({ open, forgotten }) {
  const list = h("ul", { class: "kept" });
  const all = h("button", { class: "button", type: "button", on: { click: () => {
    if (!window.confirm("Delete every conversation that this browser keeps?")) return;
    for (const one of listConversations()) remove(one.id);
    draw();
  } } }, "Delete all");
  const dialog = openDialog("Conversations", {},
    h("p", { class: "soft small" }, "This browser keeps them, under this server's address. Whoever uses this browser can read them."), list, h("div", { class: "row end" }, all));
  const remove = (id) => {
    forgetConversation(id);
    forgotten(id);
  };
  function draw() {
    const found = listConversations();
    all.hidden = !found.length;
    replace(list, found.length ? found.map((one) => row(one, {
      open: () => { dialog.close(); open(one.id); },
      remove: () => { remove(one.id); draw(); },
    })) : h("li", { class: "soft" }, "None yet."));
  }
  draw();
}

function row(one, { open, remove }) {
  const at = new Date(one.at);
  const button = (label, name, action) => h("button", { class: "quiet", type: "button", "aria-label": `${name} “${one.title}”`, on: { click: action } }, label);
  return h("li", { class: "kept-row" },
    h("button", { class: "kept-title", type: "button", on: { click: open } }, h("strong", {}, one.title),
      h("time", { class: "soft small", datetime: at.toISOString() }, `${at.toLocaleString()} · ${one.messages.length} turns`)),
    h("span", { class: "row" },
      button("Text", "Save as text", () => download(`conversation-${one.id}.md`, "text/markdown", asMarkdown(one))),
      button("JSON", "Save as JSON", () => download(`conversation-${one.id}.json`, "application/json", JSON.stringify(one, null, 2))),
      button("Delete", "Delete", remove)));
}
