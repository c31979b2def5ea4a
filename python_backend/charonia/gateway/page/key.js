// The dialog that asks for an API key. Must not know what the key is for.

import { hasKey, setKey } from "./api.js";

const dialog = document.getElementById("key");
const value = document.getElementById("key-value");
let asking = null;
let onKey = () => {};

/** Ask for a key. Resolves to whether one was given; calls while the dialog is open share it. */
export function askForKey(reason) {
  document.getElementById("key-row").hidden = false;
  asking ??= new Promise((resolve) => {
    document.getElementById("key-reason").textContent = reason;
    value.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  }).finally(() => {
    asking = null;
  });
  return asking;
}

/** Wire the dialog. `call` is called whenever the user has given a key. */
export function startKeys(call) {
  onKey = call;
  document.getElementById("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(value.value.trim());
    dialog.close("given");
    onKey();
  });
  document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
  document.getElementById("key-change").addEventListener("click", () =>
    askForKey("Requests are sent with this key."),
  );
  document.getElementById("key-row").hidden = !hasKey();
}
