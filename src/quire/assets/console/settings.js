// The panel beside the playground: everything that goes into a request but the conversation. Kept while the tab lives.

import { checkbox, field, h, replace, uniqueId } from "./dom.js";
import { readJson } from "./json.js";
import { DEFAULTS, readTools, SAMPLING } from "./request.js";
import { keep, recall } from "./store.js";

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

export const EXAMPLE_TOOL = {
  type: "function",
  function: {
    name: "calculate",
    description: "Work out an arithmetic expression.",
    parameters: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
  },
};

const FORMS = [
  ["text", "Free text", null],
  ["json_object", "Any JSON object", null],
  ["json_schema", "JSON schema", JSON.stringify(EXAMPLE_SCHEMA, null, 2)],
  ["regex", "Regular expression", String.raw`\d{4}-\d{2}-\d{2}`],
  ["choice", "One of these lines", "yes\nno"],
  ["grammar", "Grammar (EBNF or Lark)", `root ::= "yes" | "no"`],
];

const POLICIES = [["auto", "Auto: the model decides"], ["none", "None"], ["required", "Required"]];

/** The settings and their panel. `value` is what `request.js` reads. */
export class Settings {
  constructor() {
    const kept = recall("settings", {});
    this.value = { ...structuredClone(DEFAULTS), ...kept, forms: { ...DEFAULTS.forms, ...kept.forms } };
    this.element = h("form", { class: "settings", id: "settings", "aria-label": "Request settings", on: { submit: (event) => event.preventDefault() } });
    this.build();
  }

  /** Change settings and show them. */
  set(changes) {
    Object.assign(this.value, changes);
    this.build();
    this.changed();
  }

  reset() {
    this.set(structuredClone(DEFAULTS));
  }

  changed() {
    keep("settings", this.value);
  }

  /** Show what is wrong with a setting, and go there. */
  complain(setting, message) {
    const control = this.element.querySelector(`[data-setting="${setting}"]`);
    if (!control) return;
    for (let node = control; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    control.setAttribute("aria-invalid", "true");
    control.focus();
    const note = control.parentElement.querySelector(".verdict");
    if (note) replace(note, h("span", { class: "error-text" }, message));
  }

  build() {
    const { value } = this;
    replace(
      this.element,
      section("System prompt", true, this.text("system", "System prompt", "You are …", "unlabelled")),
      section("Sampling", true, this.sampling()),
      section("Form of the answer", value.form !== "text", this.form()),
      section("Tools", Boolean(value.tools.trim()), this.tools()),
      section("Reasoning", value.thinking !== "default" || value.effort !== "default", this.reasoning()),
      section("Token probabilities", value.probabilities, this.probabilities()),
      h("div", { class: "row end" }, h("button", { type: "button", class: "quiet", on: { click: () => this.reset() } }, "Reset all settings")),
    );
  }

  text(name, label, placeholder) {
    const area = h("textarea", { placeholder, rows: 3, data: { setting: name }, "aria-label": label, value: this.value[name], on: { input: () => {
      this.value[name] = area.value;
      this.changed();
    } } });
    return area;
  }

  sampling() {
    const numbers = SAMPLING.map(({ name, label, ...range }) => {
      const input = h("input", { type: "number", ...range, placeholder: "default", inputmode: "decimal", data: { setting: name },
        value: this.value.sampling[name] ?? "", on: { input: () => {
          const number = input.valueAsNumber;
          if (Number.isNaN(number)) delete this.value.sampling[name];
          else this.value.sampling[name] = number;
          input.setAttribute("aria-invalid", String(!input.validity.valid));
          this.changed();
        } } });
      return field(label, input);
    });
    const stop = h("textarea", { rows: 2, class: "code", placeholder: "one a line; \\n is a line break", data: { setting: "stop" }, value: this.value.stop,
      on: { input: () => { this.value.stop = stop.value; this.changed(); } } });
    return [
      h("div", { class: "pairs" }, numbers),
      field("Stop texts", stop),
      checkbox("Go on after the end token", this.value.ignoreEos, (on) => { this.value.ignoreEos = on; this.changed(); }),
    ];
  }

  form() {
    const select = choice(FORMS.map(([name, label]) => [name, label]), this.value.form, (name) => this.set({ form: name }));
    const [, label, example] = FORMS.find(([name]) => name === this.value.form);
    const chosen = field("The answer is", select);
    if (example === null) return [chosen];
    const check = this.value.form === "json_schema" ? (text) => readJson(text) && "Valid JSON." : () => "";
    const editor = this.editor("form", label, this.value.forms[this.value.form], check, (text) => { this.value.forms[this.value.form] = text; });
    const fill = () => this.set({ forms: { ...this.value.forms, [this.value.form]: example } });
    return [chosen, editor, h("div", { class: "row end" }, h("button", { type: "button", class: "quiet", on: { click: fill } }, "Use an example"))];
  }

  tools() {
    const check = (text) => `${readTools(text).length} tool(s).`;
    const policies = () => [...POLICIES, ...toolNames(this.value.tools).map((name) => [`=${name}`, `Always ${name}`])];
    const select = choice(policies(), this.value.toolChoice, (name) => this.set({ toolChoice: name }));
    const editor = this.editor("tools", "Tools, as a JSON list", this.value.tools, check, (text) => {
      this.value.tools = text;
      offer(select, policies(), this.value.toolChoice);
    });
    const fill = () => this.set({ tools: JSON.stringify([EXAMPLE_TOOL], null, 2) });
    const clear = () => this.set({ tools: "" });
    return [
      editor,
      h("div", { class: "row end" },
        h("button", { type: "button", class: "quiet", on: { click: clear } }, "No tools"),
        h("button", { type: "button", class: "quiet", on: { click: fill } }, "Use an example")),
      field("Tool choice", select),
    ];
  }

  reasoning() {
    const thinking = choice([["default", "As the template says"], ["on", "On"], ["off", "Off"]], this.value.thinking, (name) => this.set({ thinking: name }));
    const levels = [["default", "As the template says"], ["low", "Low"], ["medium", "Medium"], ["high", "High"]];
    const effort = choice(levels, this.value.effort, (name) => this.set({ effort: name }));
    return [field("Thinking", thinking, "enable_thinking, for templates that know it"), field("Effort", effort)];
  }

  probabilities() {
    const count = h("input", { type: "number", min: 0, max: 20, step: 1, value: this.value.alternatives, on: { input: () => {
      if (!count.validity.valid || Number.isNaN(count.valueAsNumber)) return;
      this.value.alternatives = count.valueAsNumber;
      this.changed();
    } } });
    return [
      checkbox("Ask for them, and show a heat map", this.value.probabilities, (on) => { this.value.probabilities = on; this.changed(); }),
      field("Alternatives for each token", count),
    ];
  }

  /** A text area for code with a line below that says whether it can be used. */
  editor(setting, label, text, check, write) {
    const verdict = h("p", { class: "verdict small soft", id: uniqueId("verdict"), "aria-live": "polite" });
    const area = h("textarea", { class: "code", rows: 8, spellcheck: "false", data: { setting }, "aria-describedby": verdict.id, value: text,
      on: { input: () => { write(area.value); judge(); this.changed(); } } });
    const judge = () => {
      let bad = "";
      let good = "";
      try {
        good = area.value.trim() ? check(area.value) : "";
      } catch (error) {
        bad = error.message;
      }
      area.setAttribute("aria-invalid", String(Boolean(bad)));
      replace(verdict, bad ? h("span", { class: "error-text" }, bad) : good);
    };
    judge();
    const element = field(label, area);
    element.append(verdict);
    return element;
  }
}

function toolNames(text) {
  try {
    return readTools(text).map((tool) => tool.function.name);
  } catch {
    return [];
  }
}

function choice(options, chosen, onChoose) {
  return offer(h("select", { on: { change: (event) => onChoose(event.target.value) } }), options, chosen);
}

/** Give a select its options; the first is chosen where the chosen one is not among them. */
function offer(select, options, chosen) {
  replace(select, options.map(([value, label]) => h("option", { value }, label)));
  select.value = options.some(([value]) => value === chosen) ? chosen : options[0][0];
  return select;
}

function section(title, open, ...content) {
  return h("details", { open }, h("summary", {}, title), h("div", { class: "section" }, content));
}
