// The API: requests, their errors, and the stream of events.

import { byId, openDialog, setText } from "./dom.js";

/** An answer that is an error. fields: [{param, message}] of each value that cannot be served. */
export class ApiError extends Error {
  constructor(status, { message, code = null, fields = [] }) {
    super(message);
    Object.assign(this, { status, code, fields });
  }
}

/** Ask the API; `json` and `file` are bodies. Where a password is needed, this waits until it was given. */
export async function call(path, { method, json, file, headers = {}, signal } = {}) {
  let body;
  if (json !== undefined) {
    body = JSON.stringify(json);
    headers = { ...headers, "content-type": "application/json" };
  } else if (file !== undefined) {
    body = new FormData();
    body.append("file", file);
  }
  let response, answer;
  try {
    response = await fetch(path, { method: method ?? (body === undefined ? "GET" : "POST"), body, headers, signal });
    answer = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(response?.status ?? 0, { message: "the server does not answer; is it running?" });
  }
  if (response.ok) return answer;
  if (response.status === 401) {
    await login();
    return call(path, { method, json, file, headers, signal });
  }
  throw new ApiError(response.status, answer.error ?? { message: response.statusText });
}

let loggingIn = null;

/** Ask for the password, once for all requests that need it. */
function login() {
  loggingIn ??= new Promise((resolve) => {
    const dialog = byId("login");
    dialog.onclose = () => loggingIn && openDialog(dialog);
    byId("login-form").onsubmit = async (event) => {
      event.preventDefault();
      const body = JSON.stringify({ password: byId("password").value });
      try {
        const response = await fetch("/login", { method: "POST", body, headers: { "content-type": "application/json" } });
        if (!response.ok) {
          setText(byId("login-error"), (await response.json()).error.message);
          byId("password").select();
          return;
        }
      } catch {
        setText(byId("login-error"), "the server does not answer; is it running?");
        return;
      }
      setText(byId("login-error"), "");
      byId("password").value = "";
      loggingIn = null;
      dialog.close();
      resolve();
    };
    openDialog(dialog);
  });
  return loggingIn;
}

const KINDS = ["queued", "started", "progress", "preview", "compile", "completed", "failed", "deleted"];

/** Follow the events of all videos for as long as the page is seen: a browser has few connections for all its windows.
 *
 * onOpen: the stream began, or events were lost: what is shown has to be read again.
 */
export function follow({ onOpen, onEvent, onDown }) {
  let source = null;
  let timer = 0;

  function open() {
    clearTimeout(timer);
    source?.close();
    source = new EventSource("/v1/events");
    source.onopen = onOpen;
    source.addEventListener("reset", onOpen);
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => onEvent(kind, JSON.parse(event.data)));
    }
    source.onerror = () => {
      onDown();
      if (source.readyState === EventSource.CLOSED) timer = setTimeout(again, 2000); // refused, not only cut off
    };
  }

  async function again() {
    try {
      await call("/v1/videos?limit=1"); // which asks for the password where that is why
    } catch {
      timer = setTimeout(again, 2000);
      return;
    }
    if (!document.hidden) open();
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    source?.close();
    if (!document.hidden) again();
  });
  again();
}
