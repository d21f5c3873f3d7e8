// JSON for people: coloured, and read with errors that say where.

import { h } from "./dom.js";

const TOKEN = /"(?:[^"\\]|\\.)*"(\s*:)?|\b(?:true|false|null)\b|-?\d[\d.eE+-]*/g;

/** JSON text as nodes, with keys, strings and words told apart; text that is no JSON comes out as it was. */
export function highlightJson(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(TOKEN)) {
    const kind = match[1] !== undefined ? "key" : match[0][0] === '"' ? "text" : "word";
    const token = match[1] === undefined ? match[0] : match[0].slice(0, -match[1].length);
    nodes.push(text.slice(end, match.index), h("span", { class: `json-${kind}` }, token));
    end = match.index + token.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

/** The value, or an Error whose message names line and column where the browser tells them. */
export function readJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    const position = /position (\d+)/.exec(error.message);
    if (!position || /line \d+/.test(error.message)) throw new Error(`Not valid JSON: ${error.message}.`);
    const before = text.slice(0, Number(position[1])).split("\n");
    throw new Error(`Not valid JSON in line ${before.length}, column ${before.at(-1).length + 1}.`);
  }
}

/** JSON text with line breaks, or the text itself where it is not (yet) JSON. */
export function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
