// Talks to the server that the page came from. Knows the key, errors and event streams; not what the routes mean.

const KEY = "quire.key";
const base = new URL(".", document.baseURI);
const keyListeners = [];

/** A refusal by the server, or no answer from it (`status` 0). */
export class ApiError extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The API key; it lives in this tab's session storage and nowhere else. */
export function getKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  for (const listener of keyListeners) listener(key);
}

/** Be told when the key changes. */
export function onKey(listener) {
  keyListeners.push(listener);
}

/** The full address of a route. */
export function address(path) {
  return new URL(path.replace(/^\//, ""), base).href;
}

async function send(path, body, signal) {
  const headers = {};
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Look whether it still runs (“quire ps”), then try again.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = `The server answered ${response.status}.`;
  let param = null;
  try {
    const { error } = await response.json();
    message = error.message ?? message;
    param = error.param ?? null;
  } catch {
    // Not the protocol's shape: the status has to do.
  }
  if (response.status === 401) message = "The server wants an API key. Give it with “API key”, at the top.";
  else message = [message, advice(response.status, message, response.headers.get("retry-after"))].filter(Boolean).join(" ");
  return new ApiError(response.status, message, param);
}

/** What the reader can do about a refusal, where its own words do not say so. */
function advice(status, message, wait) {
  if (/context length/.test(message)) return "Begin a new chat, shorten what you said, or lower Max tokens.";
  if (status === 429) return `Try again ${wait ? `in ${wait} s` : "in a moment"}: the queue is full (the tab Engine shows it).`;
  if (status === 503) return "Wait until the model is loaded, then try again; the server's log tells how far it is.";
  if (status === 413) return "Attach less, or say less.";
  if (status === 404 && /model/.test(message)) return "Reload this page: the server may serve another model now.";
  if (status >= 500) return "The server's log says why; try again, or look under the tab Engine.";
  return "";
}

/** The JSON that a route gives; `body` makes it a POST. */
export async function json(path, body, signal) {
  return (await send(path, body, signal)).json();
}

/** Whether a route answers with success. */
export async function succeeds(path) {
  try {
    await send(path);
    return true;
  } catch {
    return false;
  }
}

/** The events of a streamed answer, parsed, up to `[DONE]`. An error within the stream is thrown. */
export async function* stream(path, body, signal) {
  const response = await send(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "The answer broke off: the connection was closed.");
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message, event.error.param);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
