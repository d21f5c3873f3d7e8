// What the server finds in its last hour, and which setting changes it: what is not fine first, the rest folded away.

import { json } from "./api.js";
import { h, replace } from "./dom.js";

const POLL_MS = 15000;
const WORDS = { fine: "fine", look: "look", wrong: "wrong" };
const ORDER = Object.keys(WORDS).reverse();

/** The section. Gives its element, `show` and `hide`: it asks while it is seen. */
export function buildFindings() {
  const title = h("h2", { class: "findings-title" });
  const list = h("dl", { class: "findings" });
  const element = h("section", { class: "stack", hidden: true, "aria-label": "What to look at" }, title, list);
  let timer = null;
  let isShown = false;

  async function poll() {
    try {
      draw(await json("console/findings"));
    } catch {
      element.hidden = true; // an older server, or a core that does not answer: the notice above says so
    }
    if (isShown) timer = setTimeout(poll, POLL_MS);
  }

  function draw({ seconds, findings }) {
    element.hidden = false;
    const minutes = Math.max(1, Math.round(seconds / 60));
    const many = findings.filter(({ state }) => state !== "fine").length;
    title.textContent = `The last ${minutes === 60 ? "hour" : `${minutes} min`}: ${many ? `${many} to look at` : "all is fine"}`;
    const sorted = [...findings].sort((one, two) => ORDER.indexOf(one.state) - ORDER.indexOf(two.state));
    replace(list, sorted.flatMap(row));
  }

  return {
    element,
    show() {
      isShown = true;
      poll();
    },
    hide() {
      isShown = false;
      clearTimeout(timer);
    },
  };
}

function row({ check, state, seen, to_do: todo }) {
  const mark = h("span", { class: `state is-finding-${state}` }, WORDS[state] ?? state);
  return [h("dt", {}, mark, check), h("dd", {}, seen, todo ? h("p", { class: "finding-todo" }, todo) : null)];
}
