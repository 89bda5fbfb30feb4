// The server: requests with the API key, errors, and streams of events.

import { apiKey } from "./store.js";

/** What the server has refused, in its words. */
export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let askForKey = async () => false;

/** Set what asks the user for a key. It returns whether to try again. */
export function onMissingKey(ask) {
  askForKey = ask;
}

/** Send a request; the key is asked for when the server wants one. */
async function send(path, body, signal) {
  for (let attempt = 0; ; attempt++) {
    const headers = {};
    if (body !== undefined) headers["content-type"] = "application/json";
    if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
    const options = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store" };
    if (body !== undefined) options.body = JSON.stringify(body);
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server cannot be reached. Is it still running?");
    }
    if (response.ok) return response;
    if (response.status === 401 && await askForKey(attempt > 0 || Boolean(apiKey()))) continue;
    throw await errorOf(response);
  }
}

async function errorOf(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // not a body of this server: perhaps of a proxy
  }
  const wait = response.headers.get("retry-after");
  const message = error?.message ?? `The server answered with the status ${response.status}.`;
  return new ApiError(response.status, wait ? `${message} (try again in ${wait} s)` : message, error?.code);
}

/** Send a request; return the JSON of the answer. */
export async function call(path, body, signal) {
  return (await send(path, body, signal)).json();
}

/** Send a request; yield the objects of the stream that answers it. `begun` gets the headers. */
export async function* stream(path, body, signal, begun) {
  const response = await send(path, { ...body, stream: true }, signal);
  begun(response.headers);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw new ApiError(response.status, value.error.message, value.error.code);
    yield value;
  }
  throw new ApiError(0, "The server has broken the answer off.");
}

/** The data of the server-sent events in a stream of bytes. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection to the server was lost.");
      }
      if (part.done) return;
      const lines = (rest + decoder.decode(part.value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The models that the server has: their names, and whether they are open. */
export async function listModels() {
  return (await call("v1/models")).data.map((model) => ({ id: model.id, isLoaded: model.loaded ?? true }));
}

const templates = new Map();

/** Whether a model has a chat template. One without continues texts. */
export function canChat(model) {
  if (!templates.has(model)) {
    const asking = asksTemplate(model);
    templates.set(model, asking);
    asking.catch(() => templates.delete(model));
  }
  return templates.get(model);
}

async function asksTemplate(model) {
  try {
    await call("apply-template", { model, messages: [{ role: "user", content: "?" }] });
    return true;
  } catch (error) {
    if (error.status !== 400) throw error;
    return !error.message.includes("no chat template");
  }
}
