// A small Markdown that is safe by construction: text becomes nodes, never HTML. What is no Markdown stays as it was written.
// Knows paragraphs, headings, lists, quotes, code, tables, rules; emphasis, code, links. Images are shown as links: a page that
// fetched them would tell their host what was answered.

import { copyButton, h } from "./dom.js";
import { highlightJson } from "./json.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/;
const SAFE_LINKS = new Set(["http:", "https:", "mailto:"]);

/** Shows a text that grows: only blocks that have changed are built again. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  update(text) {
    const blocks = parseBlocks(text.split("\n"), 0);
    let same = 0;
    while (same < blocks.length && same < this.shown.length && blocks[same].raw === this.shown[same].raw) same += 1;
    while (this.shown.length > same) this.shown.pop().node.remove();
    for (const block of blocks.slice(same)) {
      const node = renderBlock(block, 0);
      this.element.append(node);
      this.shown.push({ raw: block.raw, node });
    }
  }
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = depth < MAX_DEPTH ? parseBlock(lines, at) : paragraph(lines, at, false);
    block.raw = `${block.kind}\n${lines.slice(at, next).join("\n")}`;
    blocks.push(block);
    at = next;
  }
  return blocks;
}

function parseBlock(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] ?? "" }, at + 1];
  if (isRule(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return quote(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, true);
}

function fence(lines, at) {
  const [, marker, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= marker.length && text === marker[0].repeat(text.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  return [{ kind: "code", language: language.trim().slice(0, 80), text }, Math.min(end + 1, lines.length)];
}

function isRule(line) {
  const text = line.replaceAll(" ", "");
  return text.length >= 3 && "-*_".includes(text[0]) && text === text[0].repeat(text.length);
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [{ kind: "quote", lines: lines.slice(at, end).map((line) => line.replace(QUOTE, "")) }, end];
}

function list(lines, at) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered || isRule(lines[end])) break;
    const content = item[1].length + 2;
    const body = [item[3] ?? ""];
    end += 1;
    while (end < lines.length && belongs(lines, end, content)) {
      body.push(lines[end].slice(Math.min(indentOf(lines[end]), content)));
      end += 1;
    }
    items.push(body);
  }
  return [{ kind: "list", ordered, start: ordered ? parseInt(marker, 10) : 1, items }, end];
}

/** Whether a line goes on with a list's item: it is indented, or blank with an indented line or another item after it. */
function belongs(lines, at, content) {
  if (lines[at].trim()) return indentOf(lines[at]) >= content || !startsBlock(lines, at);
  const next = lines[at + 1];
  return Boolean(next?.trim()) && (indentOf(next) >= content || ITEM.test(next));
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const marks = cells(lines[at + 1]);
  return marks.length === cells(lines[at]).length && marks.every((mark) => /^:?-+:?$/.test(mark));
}

function table(lines, at) {
  const marks = cells(lines[at + 1]);
  const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "end") : "start"));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  return [{ kind: "table", align, head: cells(lines[at]), rows: lines.slice(at + 2, end).map(cells) }, end];
}

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || isRule(line) || isTable(lines, at);
}

function paragraph(lines, at, interruptible) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !(interruptible && startsBlock(lines, end))) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((line) => line.trim()).join("\n") }, end];
}

function renderBlock(block, depth) {
  switch (block.kind) {
    case "code": return codeBlock(block.text, block.language);
    case "heading": return h(`h${Math.min(block.level + 2, 6)}`, {}, inline(block.text));
    case "rule": return h("hr");
    case "quote": return h("blockquote", {}, nested(block.lines, depth));
    case "list": return h(block.ordered ? "ol" : "ul", block.start === 1 ? {} : { start: block.start },
      block.items.map((lines) => h("li", {}, nested(lines, depth, true))));
    case "table": return renderTable(block);
    default: return h("p", {}, inline(block.text));
  }
}

function nested(lines, depth, tight = false) {
  const blocks = parseBlocks(lines, depth + 1);
  return blocks.map((block, index) =>
    tight && index === 0 && block.kind === "paragraph" ? inline(block.text) : renderBlock(block, depth + 1));
}

function renderTable({ align, head, rows }) {
  const row = (tag, values) => h("tr", {}, align.map((side, column) => h(tag, { class: `to-${side}` }, inline(values[column] ?? ""))));
  return h("div", { class: "table", tabindex: 0 }, h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, rows.map((values) => row("td", values)))));
}

/** A block of code with its language and a button that copies it. */
export function codeBlock(text, language = "") {
  const code = h("code", {}, language === "json" ? highlightJson(text) : text);
  return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, language), copyButton(() => text)), h("pre", { tabindex: 0 }, code));
}

/** A line's text as nodes. */
export function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set();
  let plain = "";
  let at = 0;
  const put = (node, length) => {
    if (plain) nodes.push(plain);
    plain = "";
    if (node !== null) nodes.push(node);
    at += length;
  };
  while (at < text.length) {
    const char = text[at];
    const found = span(text, at, char, depth, missing);
    if (found) put(...found);
    else if (char === "\n") put(h("br"), 1);
    else if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += char;
      at += 1;
    }
  }
  put(null, 0);
  return nodes;
}

function span(text, at, char, depth, missing) {
  if (char === "`") return codeSpan(text, at, missing);
  if (depth >= MAX_DEPTH) return null;
  if (char === "*" || char === "_" || char === "~") return emphasis(text, at, char, depth, missing);
  if (char === "[" || (char === "!" && text[at + 1] === "[")) return link(text, at, depth);
  if (char === "h") return bareLink(text, at);
  return null;
}

function codeSpan(text, at, missing) {
  let length = 1;
  while (text[at + length] === "`") length += 1;
  const marker = "`".repeat(length);
  for (let end = at; !missing.has(marker);) {
    end = text.indexOf(marker, end + length);
    if (end < 0) missing.add(marker);
    else if (text[end + length] !== "`" && text[end - 1] !== "`") {
      return [h("code", {}, text.slice(at + length, end).trim()), end + length - at];
    }
  }
  return [marker, length];
}

function emphasis(text, at, char, depth, missing) {
  const double = text[at + 1] === char;
  const marker = double ? char + char : char;
  const start = at + marker.length;
  if ((char === "~" && !double) || /\s|^$/.test(text[start] ?? "") || missing.has(marker)) return null;
  if (char === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? "")) return null;
  for (let end = text.indexOf(marker, start + 1); end > 0; end = text.indexOf(marker, end + 1)) {
    while (text[end + marker.length] === char) end += 1;
    const lone = double || text[end - 1] !== char || text[end - 2] === char;
    if (/\s/.test(text[end - 1]) || !lone || (char === "_" && /[\p{L}\p{N}]/u.test(text[end + marker.length] ?? ""))) continue;
    const tag = char === "~" ? "s" : double ? "strong" : "em";
    return [h(tag, {}, inline(text.slice(start, end), depth + 1)), end + marker.length - at];
  }
  missing.add(marker);
  return null;
}

function link(text, at, depth) {
  const image = text[at] === "!";
  const begin = at + (image ? 2 : 1);
  const middle = begin + text.slice(begin, begin + 500).indexOf("](");
  if (middle < begin) return null;
  const end = middle + text.slice(middle, middle + 2000).indexOf(")");
  if (end < middle) return null;
  const label = text.slice(begin, middle);
  const target = safeUrl(text.slice(middle + 2, end).trim().split(/\s/)[0]);
  if (!target) return null;
  const content = image ? `image: ${label || target}` : inline(label, MAX_DEPTH - 1 > depth ? MAX_DEPTH - 1 : depth + 1);
  return [anchor(target, content), end + 1 - at];
}

function bareLink(text, at) {
  if (/[\p{L}\p{N}]/u.test(text[at - 1] ?? "") || !/^https?:\/\//.test(text.slice(at, at + 8))) return null;
  const address = /^[^\s<>"`]{1,2000}/.exec(text.slice(at, at + 2000))[0].replace(/[.,;:!?)\]*_]+$/, "");
  const target = safeUrl(address);
  return target && [anchor(target, address), address.length];
}

function anchor(target, content) {
  return h("a", { href: target, title: target, target: "_blank", rel: "noopener noreferrer nofollow" }, content);
}

/** An absolute address of a kind that runs nothing, or null. */
function safeUrl(text) {
  try {
    const url = new URL(text);
    return SAFE_LINKS.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
