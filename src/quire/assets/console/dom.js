// Builds nodes. Text goes in as text nodes only: nothing here, or anywhere in the console, parses HTML.

/**
 * An element with properties and children.
 * `class`, `data` (an object) and `on` (event name to listener) are special; true and false set or leave out an attribute.
 */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An SVG element, made the same way. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.setAttribute("class", value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "value") element.value = value;
    else if (name === "checked") element.checked = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Give an element other children. */
export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/** The same, where the focus stays on the control with the same `data-key`. */
export function replaceKeyed(element, ...children) {
  const key = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  replace(element, ...children);
  if (key !== undefined) [...element.querySelectorAll("[data-key]")].find((node) => node.dataset.key === key)?.focus({ preventScroll: true });
}

let names = 0;

/** An id that no other element has. */
export function uniqueId(stem) {
  names += 1;
  return `${stem}-${names}`;
}

/** A control under its label. `hint` is read out with it. */
export function field(label, control, hint) {
  control.id ||= uniqueId("field");
  const note = hint && h("p", { class: "soft small", id: `${control.id}-hint` }, hint);
  if (note) control.setAttribute("aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, note);
}

/** A checkbox with its label beside it. */
export function checkbox(label, checked, onChange) {
  const box = h("input", { type: "checkbox", id: uniqueId("box"), checked, on: { change: () => onChange(box.checked) } });
  return h("div", { class: "check" }, box, h("label", { for: box.id }, label));
}

/** A modal dialog with a title and a close button; removed when it closes. */
export function openDialog(title, { narrow = false } = {}, ...children) {
  const heading = h("h2", { id: uniqueId("title") }, title);
  const close = h("button", { class: "quiet", type: "button", "aria-label": "Close", on: { click: () => dialog.close() } }, "✕");
  const body = h("div", { class: "dialog-body" }, h("div", { class: "dialog-head" }, heading, close), children);
  const dialog = h("dialog", { class: narrow ? "narrow" : "", "aria-labelledby": heading.id }, body);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** A row of buttons of which one is chosen; arrows move between them. Gives the element and a function that chooses. */
export function segments(label, choices, chosen, onChoose) {
  const buttons = choices.map(([value, text]) =>
    h("button", { type: "button", role: "radio", data: { value }, on: { click: () => choose(value, true) } }, text));
  const element = h("div", { class: "tabs", role: "radiogroup", "aria-label": label, on: { keydown: (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const index = buttons.indexOf(document.activeElement);
    const next = buttons[(index + step + buttons.length) % buttons.length];
    next.focus();
    choose(next.dataset.value, true);
  } } }, buttons);
  function choose(value, told = false) {
    for (const button of buttons) {
      const is = button.dataset.value === value;
      button.setAttribute("aria-checked", String(is));
      button.tabIndex = is ? 0 : -1;
    }
    if (told) onChoose(value);
  }
  choose(chosen);
  return { element, choose };
}

/** A button that copies what `text` gives, and says so. */
export function copyButton(text, label = "Copy") {
  const button = h("button", { class: "quiet", type: "button", on: { click: async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Could not copy";
    }
    announce(button.textContent);
    setTimeout(() => { button.textContent = label; }, 1500);
  } } }, label);
  return button;
}

/** Have a screen reader say something. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** A textarea that is as tall as its text, up to `maximum` pixels. */
export function growing(area, maximum = 260) {
  const grow = () => {
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, maximum)}px`;
  };
  area.addEventListener("input", grow);
  area.grow = grow;
  requestAnimationFrame(grow);
  return area;
}
