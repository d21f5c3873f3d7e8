// From the playground's settings to a request's body, and from a body to a command to paste. No page, no network.

import { readJson } from "./json.js";

/** The settings before anybody has changed them: an empty number leaves the choice to the model's defaults. */
export const DEFAULTS = {
  system: "",
  sampling: {},
  stop: "",
  ignoreEos: false,
  form: "text",
  forms: { json_schema: "", regex: "", choice: "", grammar: "" },
  tools: "",
  toolChoice: "auto",
  thinking: "default",
  effort: "default",
  probabilities: false,
  alternatives: 5,
};

/** Numbers that go into a request as they are. */
export const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.05 },
  { name: "seed", label: "Seed", step: 1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 2, step: 0.05 },
  { name: "min_tokens", label: "Min tokens", min: 0, step: 1 },
];

/** A setting that cannot be used; `setting` names its control. */
export class SettingError extends Error {
  constructor(setting, message) {
    super(message);
    this.setting = setting;
  }
}

function parsed(setting, text) {
  try {
    return readJson(text);
  } catch (error) {
    throw new SettingError(setting, error.message);
  }
}

/** The tools of a request, in the protocol's form; plain function descriptions are wrapped. */
export function readTools(text) {
  if (!text.trim()) return [];
  const value = parsed("tools", text);
  return (Array.isArray(value) ? value : [value]).map((tool) => {
    const wrapped = tool?.function ? tool : { type: "function", function: tool };
    if (typeof wrapped.function?.name !== "string") throw new SettingError("tools", "Each tool needs a function with a name.");
    return wrapped;
  });
}

/** `auto`, `none`, `required`, or `=NAME` of one of the tools. */
function toolChoice(choice, tools) {
  if (!choice.startsWith("=")) return choice;
  const name = choice.slice(1);
  return tools.some((tool) => tool.function.name === name) ? { type: "function", function: { name } } : "auto";
}

function formFields(settings) {
  const text = settings.forms[settings.form] ?? "";
  if (settings.form === "text") return {};
  if (settings.form === "json_object") return { response_format: { type: "json_object" } };
  if (!text.trim()) throw new SettingError("form", "The form is empty: write it, or choose free text.");
  if (settings.form === "json_schema") {
    return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parsed("form", text) } } };
  }
  const value = settings.form === "choice" ? text.split("\n").map((line) => line.trim()).filter(Boolean) : text;
  return { structured_outputs: { [settings.form]: value } };
}

function common(settings, model) {
  const stop = settings.stop.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  return {
    model,
    ...settings.sampling,
    ...(stop.length && { stop }),
    ...(settings.ignoreEos && { ignore_eos: true }),
    ...formFields(settings),
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** Body of `/v1/chat/completions`. Raises SettingError. */
export function chatBody(settings, messages, model) {
  const tools = readTools(settings.tools);
  const body = {
    messages: settings.system.trim() ? [{ role: "system", content: settings.system }, ...messages] : messages,
    ...common(settings, model),
  };
  if (tools.length) Object.assign(body, { tools, tool_choice: toolChoice(settings.toolChoice, tools) });
  if (settings.thinking !== "default") body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.effort !== "default") body.reasoning_effort = settings.effort;
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: settings.alternatives });
  return body;
}

/** Body of `/v1/completions`. Raises SettingError. */
export function completionBody(settings, prompt, model) {
  return { prompt, ...common(settings, model), ...(settings.probabilities && { logprobs: settings.alternatives }) };
}

/** The request as a `curl` command; the key stays a variable of the shell. */
export function asCurl(url, body, hasKey) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = hasKey ? `  -H "Authorization: Bearer $QUIRE_API_KEY" \\\n` : "";
  const buffer = body.stream ? " --no-buffer" : "";
  return `curl${buffer} ${url} \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${quoted}'`;
}

const OPENAI_FIELDS = new Set([
  "model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "max_tokens", "presence_penalty",
  "frequency_penalty", "seed", "stop", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "reasoning_effort",
]);

/** The request with the `openai` package; fields that are not OpenAI's go into `extra_body`. */
export function asPython(base, body, hasKey) {
  const entries = Object.entries(body);
  const extra = Object.fromEntries(entries.filter(([name]) => !OPENAI_FIELDS.has(name)));
  const known = entries.filter(([name]) => OPENAI_FIELDS.has(name));
  if (Object.keys(extra).length) known.push(["extra_body", extra]);
  const lines = known.map(([name, value]) => `    ${name}=${pythonLiteral(value, 1)},`);
  const chat = "messages" in body;
  const key = hasKey ? `os.environ["QUIRE_API_KEY"]` : `"none"`;
  const piece = chat ? "chunk.choices[0].delta.content or \"\"" : "chunk.choices[0].text";
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url="${base}", api_key=${key})`,
    `stream = client.${chat ? "chat.completions" : "completions"}.create(`, ...lines, ")",
    "for chunk in stream:", "    if chunk.choices:", `        print(${piece}, end="", flush=True)`,
  ].join("\n");
}

function pythonLiteral(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const parts = list
    ? value.map((item) => pythonLiteral(item, depth + 1))
    : Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${pythonLiteral(item, depth + 1)}`);
  const [open, close] = list ? "[]" : "{}";
  const flat = `${open}${parts.join(", ")}${close}`;
  if (flat.length < 72 && !flat.includes("\n")) return flat;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${parts.map((part) => `${indent}${part},\n`).join("")}${"    ".repeat(depth)}${close}`;
}
