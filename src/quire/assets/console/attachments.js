// Files that go with what is said: texts become part of the message, pictures go to a model that sees. Nothing is uploaded before
// the message is sent.

import { announce, h, replace } from "./dom.js";

const MOST_TEXT = 512 * 1024;
const MOST_IMAGE = 8 * 1024 * 1024;
const IMAGES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]);

/** The files that wait to be sent, as a row of chips above the message. `seesImages` tells whether the model sees. */
export class Attachments {
  constructor(seesImages) {
    this.seesImages = seesImages;
    this.files = [];
    this.images = [];
    this.chips = h("div", { class: "attached", hidden: true });
    this.problem = h("p", { class: "error-text small", role: "alert", hidden: true });
    this.input = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files to attach", on: { change: () => {
      this.add(this.input.files);
      this.input.value = "";
    } } });
    this.button = h("button", { class: "quiet attach", type: "button", title: "Attach files (or drop them here)", on: { click: () => this.input.click() } }, "Attach");
    this.element = h("div", { class: "attachments" }, this.chips, this.problem, this.input);
  }

  get isEmpty() {
    return !this.files.length && !this.images.length;
  }

  /** Take files in; what cannot be used is told. */
  async add(files) {
    const problems = [];
    for (const file of files) {
      try {
        await this.take(file);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.problem.hidden = !problems.length;
    this.problem.textContent = problems.join(" ");
    this.draw();
    announce(problems.join(" ") || "Attached.");
  }

  async take(file) {
    if (IMAGES.has(file.type)) {
      if (!(await this.seesImages())) throw new Error(`${file.name}: this model reads text only. Serve a model that sees, such as quire-demo-vision.`);
      if (file.size > MOST_IMAGE) throw new Error(`${file.name} has more than 8 MiB: make the picture smaller.`);
      this.images.push({ name: file.name, url: await dataUrl(file) });
      return;
    }
    if (file.size > MOST_TEXT) throw new Error(`${file.name} has more than 512 KiB: attach a part of it.`);
    const bytes = new Uint8Array(await file.arrayBuffer());
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    } catch {
      text = "\0";
    }
    if (text.includes("\0")) throw new Error(`${file.name} is no text in UTF-8: save it as text first.`);
    this.files.push({ name: file.name, text });
  }

  /** What is attached; nothing is, from then on. */
  give() {
    const { files, images } = this;
    this.files = [];
    this.images = [];
    this.problem.hidden = true;
    this.draw();
    return { ...(files.length && { files }), ...(images.length && { images }) };
  }

  draw() {
    const chip = (one, list) => h("span", { class: "attached-chip" }, one.name,
      h("button", { class: "quiet", type: "button", "aria-label": `Remove ${one.name}`, on: { click: () => { list.splice(list.indexOf(one), 1); this.draw(); } } }, "✕"));
    replace(this.chips, this.files.map((one) => chip(one, this.files)), this.images.map((one) => chip(one, this.images)));
    this.chips.hidden = this.isEmpty;
  }
}

/** A message's `content` for the protocol: its text with the files behind it, as parts where there are pictures. */
export function wireContent({ content, files = [], images = [] }) {
  const text = [content, ...files.map(fenced)].filter(Boolean).join("\n\n");
  if (!images.length) return text;
  const pictures = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...pictures, { type: "text", text }] : pictures;
}

/** A file's text between marks that it does not hold itself. */
function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text}\n${fence}`;
}

/** What was attached to a message, to look at. Pictures are drawn: the page's policy lets nothing load them. */
export function attachedView({ files = [], images = [] }) {
  if (!files.length && !images.length) return null;
  const texts = files.map(({ name, text }) => h("details", { class: "attached-file" }, h("summary", {}, name), h("pre", { tabindex: 0 }, text)));
  const pictures = images.map((image) => {
    const canvas = h("canvas", { class: "attached-image", role: "img", "aria-label": image.name });
    drawImage(canvas, image.url).catch(() => canvas.replaceWith(h("span", { class: "attached-chip" }, image.name)));
    return canvas;
  });
  return h("div", { class: "attached-view" }, pictures, texts);
}

async function drawImage(canvas, url) {
  const [head, body] = url.split(",");
  const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes], { type: /^data:([^;]*)/.exec(head)[1] }));
  const scale = Math.min(1, 480 / bitmap.width, 320 / bitmap.height);
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}
