// Calls of the gateway: the API key, errors and streams. Must not know the page.

import { tabStore } from "./store.js";

const KEY = "key";
let askKey = async () => null;

/**
 * An error of the gateway, or of the way to it.
 *
 * `code` is the gateway's own, or "unreachable", "broken" or "unreadable".
 */
export class GatewayError extends Error {
  constructor(message, { status = 0, code = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

/** Set what asks the user for a key: gets the gateway's words, resolves to whether there is one. */
export function onKeyNeeded(ask) {
  askKey = ask;
}

/** Set the key. The tab keeps it, see `tabStore`. */
export function setKey(key) {
  tabStore.set(KEY, key);
}

/** Whether there is a key. */
export function hasKey() {
  return tabStore.get(KEY) !== null;
}

/**
 * Get JSON.
 *
 * @param {boolean} asks whether the user may be asked for a key.
 * @throws {GatewayError}
 */
export async function get(path, { asks = false, signal } = {}) {
  const response = await send(path, { signal }, asks);
  try {
    return await response.json();
  } catch (error) {
    throw wayError(error, "The gateway’s answer cannot be read.", "unreadable");
  }
}

/**
 * Post a request and yield the events of its stream, up to `[DONE]`.
 *
 * Leaving the loop, or aborting the signal, closes the connection, which cancels the request.
 *
 * @throws {GatewayError} also where the stream ends before `[DONE]`.
 * @throws {DOMException} AbortError: the signal was aborted.
 */
export async function* stream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const request = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await send(path, request, true);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await read(reader);
      if (done) {
        throw new GatewayError("The stream broke off before its end.", { code: "broken" });
      }
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw errorOf(event, 200, null);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw wayError(error, "The connection broke.", "broken");
  }
}

async function send(path, options, asks) {
  for (let isSecond = false; ; isSecond = true) {
    const headers = { ...options.headers };
    if (hasKey()) headers.authorization = `Bearer ${tabStore.get(KEY)}`;
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, headers });
    } catch (error) {
      throw wayError(error, "The gateway cannot be reached.", "unreachable");
    }
    if (response.ok) return response;
    const error = await refusal(response);
    if (response.status !== 401 || !asks || isSecond) throw error;
    if (!(await askKey(error.message))) throw error;
  }
}

async function refusal(response) {
  const retryAfterS = Number(response.headers.get("retry-after")) || null;
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Something before the gateway may answer in a form of its own.
  }
  return errorOf(body, response.status, retryAfterS);
}

function errorOf(body, status, retryAfterS) {
  const error = body?.error;
  const message = error?.message ?? `The gateway answered with status ${status}.`;
  return new GatewayError(message, { status, code: error?.code ?? null, retryAfterS });
}

function wayError(error, message, code) {
  return error.name === "AbortError" ? error : new GatewayError(message, { code });
}
