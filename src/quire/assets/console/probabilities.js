// The heat map: an answer's tokens coloured by how unlikely each was, with the alternatives on hover and focus.

import { h, replace, uniqueId } from "./dom.js";

/** Tokens of a chat chunk's `logprobs`: `{text, logprob, top: [{text, logprob}]}`. */
export function chatTokens(logprobs) {
  return (logprobs?.content ?? []).map((entry) => ({ ...readEntry(entry), top: (entry.top_logprobs ?? []).map(readEntry) }));
}

/** The same of a completion's four parallel lists. */
export function completionTokens(logprobs) {
  return (logprobs?.tokens ?? []).map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {})
      .map(([other, logprob]) => ({ text: other, logprob }))
      .sort((one, two) => two.logprob - one.logprob),
  }));
}

function readEntry({ token, logprob, bytes }) {
  return { text: bytes ? bytesText(bytes) : token, logprob };
}

/** The text of some bytes; those that are only a part of a character are written as ⟨E2⟩. */
export function bytesText(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return bytes.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩`)).join("");
  }
}

/** A token's text with its white space to be seen. */
export function visible(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍") || "∅";
}

/** A logprob as a percentage. */
export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (share > 99.995 || share === 0) return `${Math.round(share)} %`;
  return share >= 0.01 ? `${share.toFixed(share < 10 ? 2 : 1)} %` : "< 0.01 %";
}

/** The map of some tokens, with a legend and how sure the model was overall. */
export function heatMap(tokens) {
  const details = h("div", { class: "alternatives", role: "tooltip", id: uniqueId("alternatives"), hidden: true });
  const marks = tokens.map((token, index) => mark(token, index));
  const field = h("div", { class: "heat", role: "group", "aria-label": "Tokens by probability; the arrow keys move between them" }, marks);
  const show = (element) => {
    replace(details, alternatives(tokens[Number(element.dataset.index)]));
    details.hidden = false;
    place(details, element.getBoundingClientRect());
    for (const other of field.querySelectorAll("[aria-describedby]")) other.removeAttribute("aria-describedby");
    element.setAttribute("aria-describedby", details.id);
  };
  const hide = () => { details.hidden = true; };
  const onMark = (action) => (event) => event.target.dataset?.index !== undefined && action(event.target);
  field.addEventListener("mouseover", onMark(show));
  field.addEventListener("mouseleave", hide);
  field.addEventListener("focusin", onMark(show));
  field.addEventListener("focusout", hide);
  field.addEventListener("keydown", (event) => {
    const at = Number(event.target.dataset.index);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: marks.length - 1 }[event.key];
    if (event.key === "Escape" && !details.hidden) {
      hide();
      event.stopPropagation();
    }
    if (to === undefined) return;
    event.preventDefault();
    const next = marks[Math.max(0, Math.min(marks.length - 1, to))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return h("div", { class: "heat-map" }, field, legend(tokens), details);
}

function mark({ text, logprob, top }, index) {
  const drawn = top.length > 0 && logprob < top[0].logprob - 1e-6;
  const element = h("span", {
    class: drawn ? "token drawn" : "token", role: "button", tabindex: index ? -1 : 0, data: { index },
    "aria-label": `${visible(text)}, ${logprob === null ? "no probability" : percent(logprob)}`,
  }, text === "\n" ? "↵\n" : text || "∅");
  const surprise = logprob === null ? 0 : Math.sqrt(Math.min(1, -logprob / 5));
  element.style.setProperty("--surprise", `${Math.round(surprise * 75)}%`);
  return element;
}

function alternatives({ text, logprob, top }) {
  const others = top.some((other) => other.text === text) ? top : [{ text, logprob }, ...top];
  const rows = others.filter((other) => other.logprob !== null).map((other) => {
    const bar = h("span", { class: "bar" });
    bar.style.setProperty("--share", `${100 * Math.exp(other.logprob)}%`);
    return h("li", { class: other.text === text ? "chosen" : "" }, h("code", {}, visible(other.text)), bar, h("span", {}, percent(other.logprob)));
  });
  return [h("p", { class: "small soft" }, logprob === null ? "The first token has no probability." : `logprob ${logprob.toFixed(4)}`), h("ol", {}, rows)];
}

function place(details, around) {
  const width = details.offsetWidth;
  const left = Math.max(8, Math.min(around.left, document.documentElement.clientWidth - width - 8));
  const below = around.bottom + 6;
  const fits = below + details.offsetHeight < window.innerHeight;
  details.style.left = `${left}px`;
  details.style.top = `${fits ? below : Math.max(8, around.top - details.offsetHeight - 6)}px`;
}

function legend(tokens) {
  const known = tokens.filter((token) => token.logprob !== null);
  const mean = known.reduce((sum, token) => sum + token.logprob, 0) / Math.max(1, known.length);
  const least = known.reduce((worst, token) => (token.logprob < worst.logprob ? token : worst), known[0]);
  return h("p", { class: "legend small soft" },
    h("span", {}, "certain"), h("span", { class: "scale", "aria-hidden": "true" }), h("span", {}, "surprising"),
    known.length > 0 && h("span", {}, `perplexity ${Math.exp(-mean).toFixed(2)}`),
    least && h("span", {}, "least likely ", h("code", {}, visible(least.text)), ` ${percent(least.logprob)}`));
}
