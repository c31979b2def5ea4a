// The dialog that asks for an API key. Must not know what the key is for.

import { hasKey, setKey } from "./api.js";

const dialog = document.getElementById("key");
const value = document.getElementById("key-value");
let asking = null;

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

/** Wire the dialog. `onKey` is called after the user has changed the key without being asked. */
export function startKeys(onKey) {
  document.getElementById("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(value.value.trim());
    dialog.close("given");
  });
  document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
  document.getElementById("key-change").addEventListener("click", async () => {
    if (await askForKey("Requests are sent with this key.")) onKey();
  });
  document.getElementById("key-row").hidden = !hasKey();
}
