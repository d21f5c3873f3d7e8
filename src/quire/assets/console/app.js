// The console's frame: tabs, theme, key, the server's state, shortcuts. What the tabs show is in their own modules.

import { ApiError, getKey, json, onKey, setKey, succeeds } from "./api.js";
import { announce, field, h, openDialog, replace } from "./dom.js";
import { buildEngine } from "./engine.js";
import { buildPlayground } from "./playground.js";
import { buildPooling } from "./pooling.js";
import { buildRequests } from "./requests.js";

const TABS = ["playground", "engine", "requests"];
const POLL_STARTING_MS = 1000;
const POLL_SERVING_MS = 10000;

const byId = (id) => document.getElementById(id);
let modelName;

const inspect = (id) => { location.hash = `requests/${encodeURIComponent(id)}`; };
let abilities = null;

/** What the server's model can do, asked once. */
async function askAbilities() {
  abilities ??= await json("console/abilities");
  return abilities;
}

const seesImages = async () => (await askAbilities()).media.includes("image");
let playground = buildPlayground(byId("playground"), { model: () => modelName, inspect, seesImages });

/** A server that embeds, classifies or scores cannot chat: its first tab is another. */
async function fitToModel() {
  if (abilities !== null || !(await askAbilities()).tasks.length) return;
  playground = buildPooling(byId("playground"), { abilities, model: () => modelName });
}

const views = { engine: buildEngine(byId("engine"), inspect), requests: buildRequests(byId("requests"), inspect) };

function currentTab() {
  const [tab, ...rest] = location.hash.slice(1).split("/");
  return [TABS.includes(tab) ? tab : "playground", unescaped(rest.join("/"))];
}

/** What a part of an address stands for; one that is broken stands for itself. */
function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function showTab() {
  const [shown, argument] = currentTab();
  for (const tab of TABS) {
    const is = tab === shown;
    byId(tab).hidden = !is;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(is));
    byId(`tab-${tab}`).tabIndex = is ? 0 : -1;
    if (!is) views[tab]?.hide();
  }
  if (!document.hidden) views[shown]?.show(argument);
  document.title = shown === "playground" ? "Quire" : `Quire · ${byId(`tab-${shown}`).textContent}`;
}

function buildTabs() {
  for (const tab of TABS) byId(`tab-${tab}`).addEventListener("click", () => { location.hash = tab; });
  document.querySelector(".top .tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = TABS[(TABS.indexOf(currentTab()[0]) + step + TABS.length) % TABS.length];
    location.hash = next;
    byId(`tab-${next}`).focus();
  });
  window.addEventListener("hashchange", showTab);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) for (const view of Object.values(views)) view.hide();
    else showTab();
  });
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
}

const THEMES = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function buildTheme() {
  const button = byId("theme-button");
  const root = document.documentElement;
  const draw = () => { button.textContent = THEMES[root.dataset.theme ?? ""]; };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf(root.dataset.theme ?? "") + 1) % names.length];
    if (next) root.dataset.theme = next;
    else delete root.dataset.theme;
    try {
      localStorage.setItem("quire.theme", next);
    } catch {
      // Kept for this page only.
    }
    draw();
    announce(button.textContent);
  });
  draw();
}

function askForKey() {
  const input = h("input", { type: "password", autocomplete: "off", spellcheck: "false", value: getKey(), placeholder: "none" });
  const save = (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    dialog.close();
  };
  const form = h("form", { class: "dialog-body", on: { submit: save } },
    field("Key", input, "Sent as “Authorization: Bearer …” to this server only, and forgotten when the tab closes."),
    h("div", { class: "row end" }, h("button", { class: "button main", type: "submit" }, "Use it")));
  const dialog = openDialog("API key", { narrow: true }, form);
  input.focus();
}

function showHelp() {
  const keys = [
    ["Enter", "send; Shift+Enter is a line break, Ctrl+Enter completes a prompt"], ["Esc", "stop the answer"], ["/", "go to the message"],
    ["Alt+1 … 3", "go to a tab"], ["Alt+N", "new chat"], ["Alt+S", "settings"], ["Alt+C", "the request as code"], ["← →", "between tabs, modes, tokens of a heat map"], ["?", "this list"],
  ];
  openDialog("Keys", { narrow: true }, h("dl", { class: "shortcuts" }, keys.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])));
}

function buildShortcuts() {
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const typing = event.target.matches("input, textarea, select");
    const plain = !event.altKey && !event.ctrlKey && !event.metaKey;
    const inPlayground = { KeyN: playground.newChat, KeyS: playground.toggleSettings, KeyC: playground.showCode };
    if (event.key === "Escape") playground.stop();
    else if (event.altKey && /^Digit[1-3]$/.test(event.code)) location.hash = TABS[Number(event.code.at(-1)) - 1];
    else if (event.altKey && inPlayground[event.code] && currentTab()[0] === "playground") inPlayground[event.code]();
    else if (plain && !typing && event.key === "?") showHelp();
    else if (plain && !typing && event.key === "/") {
      location.hash = "playground";
      showTab();
      playground.focus();
    } else return;
    if (event.key !== "Escape") event.preventDefault();
  });
}

function showState(state, text) {
  byId("model").querySelector(".dot").dataset.state = state;
  const name = byId("model").querySelector(".model-name");
  if (name.textContent !== text) replace(name, text);
}

/** Ask how the server is, now and again. */
async function watchServer() {
  clearTimeout(watchServer.timer);
  let pause = POLL_STARTING_MS;
  try {
    const { data } = await json("v1/models");
    modelName = data[0].id;
    await fitToModel();
    showState("ready", modelName);
    pause = POLL_SERVING_MS;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) showState("waiting", "needs an API key");
    else if (error.status === 503) showState("waiting", (await succeeds("live")) ? "loading the model …" : "the engine has died");
    else showState("gone", "not reachable");
  }
  watchServer.timer = setTimeout(() => document.hidden || watchServer(), pause);
}

buildTabs();
buildTheme();
buildShortcuts();
byId("key-button").addEventListener("click", askForKey);
byId("help-button").addEventListener("click", showHelp);
onKey(watchServer);
document.addEventListener("visibilitychange", () => document.hidden || watchServer());
showTab();
watchServer();
if (matchMedia("(pointer: fine)").matches) playground.focus();
