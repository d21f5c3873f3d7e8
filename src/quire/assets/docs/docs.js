// The page of the server's routes: what openapi.json says, and a form that sends a request. Text goes in as text nodes only.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "value") element.value = value;
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** The schema that a reference names, or the schema itself. */
export function resolve(schema, spec) {
  while (schema && schema.$ref) schema = spec.components.schemas[schema.$ref.split("/").pop()];
  return schema ?? {};
}

/** A schema's type in words: `integer`, `list of string`, `CompletionUsage`, `string | null`. */
export function typeName(schema, spec) {
  if (!schema || Object.keys(schema).length === 0) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((one) => typeName(one, spec)).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `list of ${typeName(schema.items, spec)}`;
  return schema.type ?? "any";
}

/** The rows of a schema's table: name, type, default. */
export function fieldRows(schema, spec) {
  const { properties = {}, required = [] } = resolve(schema, spec);
  return Object.entries(properties).map(([name, field]) => [
    name,
    typeName(field, spec),
    required.includes(name) ? "required" : field.default === undefined ? "" : JSON.stringify(field.default),
  ]);
}

function fieldTable(title, schema, spec) {
  const rows = fieldRows(schema, spec);
  if (!rows.length) return null;
  const cells = rows.map(([name, type, value]) => h("tr", {}, h("td", {}, h("code", {}, name)), h("td", {}, type), h("td", {}, value)));
  const head = h("tr", {}, ["Field", "Type", "Default"].map((text) => h("th", { scope: "col" }, text)));
  return h("details", {}, h("summary", {}, `${title}: ${rows.length} fields`), h("div", {}, h("table", {}, h("thead", {}, head), h("tbody", {}, cells))));
}

/** The curl line of a request. */
export function curlLine(url, method, body, key) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const words = ["curl", quoted(url)];
  if (method !== "POST" || body === undefined) words.push("-X", method);
  if (key) words.push("-H", quoted("Authorization: Bearer YOUR_KEY"));
  if (body !== undefined) words.push("-H", quoted("Content-Type: application/json"), "-d", quoted(body));
  return words.join(" ");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** The form that sends a request to a route and shows the answer. */
function form(path, method, operation, key) {
  const example = operation.requestBody?.content["application/json"].example;
  const body = example === undefined ? null : h("textarea", { "aria-label": "Body", spellcheck: "false", value: JSON.stringify(example, null, 2) });
  const places = (operation.parameters ?? []).map((parameter) => [parameter, h("input", { "aria-label": parameter.name, placeholder: parameter.name })]);
  const line = h("pre", { class: "soft" });
  const answer = h("pre", { hidden: true });

  function address() {
    let target = path;
    const query = new URLSearchParams();
    for (const [parameter, input] of places) {
      if (parameter.in === "path") target = target.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
      else if (input.value) query.set(parameter.name, input.value);
    }
    return target.slice(1) + (query.size ? `?${query}` : "");
  }

  function showLine() {
    line.textContent = curlLine(new URL(address(), document.baseURI).href, method, body?.value, key.value);
  }

  async function send() {
    answer.hidden = false;
    answer.className = "";
    answer.textContent = "…";
    const headers = key.value ? { authorization: `Bearer ${key.value}` } : {};
    if (body) headers["content-type"] = "application/json";
    try {
      const response = await fetch(address(), { method, headers, body: body?.value });
      const head = `${response.status} ${response.statusText}  ${response.headers.get("x-request-id") ?? ""}\n\n`;
      answer.className = response.ok ? "" : "bad";
      answer.textContent = head;
      if ((response.headers.get("content-type") ?? "").startsWith("text/event-stream")) {
        const decoder = new TextDecoder();
        for await (const part of response.body) answer.textContent += decoder.decode(part, { stream: true });
      } else {
        answer.textContent = head + pretty(await response.text());
      }
    } catch (error) {
      answer.className = "bad";
      answer.textContent = String(error);
    }
  }

  for (const input of [body, key, ...places.map(([, each]) => each)]) input?.addEventListener("input", showLine);
  showLine();
  return h("div", {}, places.map(([, input]) => input), body, h("p", {}, h("button", { type: "button", on: { click: send } }, "Send")), line, answer);
}

function route(path, method, operation, spec, key) {
  const content = (part) => part?.content?.["application/json"]?.schema;
  const box = h("details", { "data-words": `${method} ${path} ${operation.summary ?? ""}`.toLowerCase() },
    h("summary", {}, h("span", { class: "method" }, method), h("code", {}, path), h("span", {}, operation.summary ?? "")));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    const errors = Object.entries(operation.responses).filter(([status]) => status !== "200");
    box.append(h("div", {},
      fieldTable("Body", content(operation.requestBody), spec),
      fieldTable("Answer", content(operation.responses["200"]), spec),
      h("details", {}, h("summary", {}, "Errors"), h("div", {}, h("table", {}, h("tbody", {}, errors.map(([status, told]) => h("tr", {}, h("td", {}, status), h("td", {}, told.description))))))),
      h("h3", {}, "Try it"),
      form(path, method, operation, key)));
  });
  return box;
}

/** Read the document and show its routes. */
export async function show(main, filter, key) {
  const headers = key.value ? { authorization: `Bearer ${key.value}` } : {};
  const response = await fetch("openapi.json", { headers });
  if (!response.ok) {
    const wanted = response.status === 401 ? "This server wants an API key: type it in above." : `openapi.json: ${response.status}`;
    main.replaceChildren(h("p", { class: "bad" }, wanted));
    return;
  }
  const spec = await response.json();
  const boxes = Object.entries(spec.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => route(path, method.toUpperCase(), operation, spec, key)));
  const narrow = () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const box of boxes) box.hidden = !words.every((word) => box.dataset.words.includes(word));
  };
  filter.oninput = narrow;
  narrow();
  main.replaceChildren(...boxes);
}

if (typeof document !== "undefined" && document.getElementById("routes")) {
  const [main, filter, key] = ["routes", "filter", "key"].map((id) => document.getElementById(id));
  const start = () => show(main, filter, key).catch((error) => main.replaceChildren(h("p", { class: "bad" }, String(error))));
  key.addEventListener("change", () => main.querySelector("details") || start());
  start();
}
