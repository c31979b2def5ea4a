// Wires the page: the model, the mode, the theme, the views and the keyboard.

import { get, hasKey, onKeyNeeded } from "./api.js";
import { copy } from "./dom.js";
import { count } from "./format.js";
import { askForKey, startKeys } from "./key.js";
import { Panel } from "./panel.js";
import { startSettings } from "./settings.js";
import { settingsStore } from "./store.js";
import { Talk } from "./talk.js";

const THEMES = ["auto", "light", "dark"];
const RETRY_MS = 5000;
const byId = (id) => document.getElementById(id);
const prompt = byId("prompt");
let model = null;
let contextLength = null;
let mode = "chat";

const talk = new Talk({
  model: () => model,
  onChange: showBusy,
  onEdit: (text) => {
    prompt.value = text;
    fit();
    prompt.focus();
  },
  onComplete: (text) => {
    setMode("complete");
    talk.onEdit(text);
  },
});
const panel = new Panel();

function send() {
  const text = prompt.value;
  if (talk.isBusy || text.trim() === "") return;
  prompt.value = "";
  fit();
  talk.ask(mode, text);
}

function showBusy() {
  const button = byId("send");
  button.textContent = talk.isBusy ? "Stop" : "Send";
  button.classList.toggle("stop", talk.isBusy);
  byId("clear").disabled = talk.exchanges.length === 0;
  byId("welcome").hidden = talk.exchanges.length > 0;
}

/** Let the prompt be as high as its text, within what the style permits. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function setMode(value) {
  mode = value;
  document.body.dataset.mode = value;
  for (const input of document.querySelectorAll("input[name=mode]")) {
    input.checked = input.value === value;
  }
  const label = value === "chat" ? "Message" : "Text to continue";
  byId("prompt-label").textContent = label;
  prompt.placeholder = label;
  showWelcome();
}

function showWelcome() {
  const name = model ?? "the model";
  byId("welcome-title").textContent =
    mode === "chat" ? `Write to ${name}` : `Begin a text, and ${name} continues it`;
  const facts = [];
  if (byId("mode-chat").disabled) facts.push("This model has no chat template.");
  if (contextLength) facts.push(`Its context is ${count(contextLength)} tokens.`);
  byId("welcome-facts").textContent = facts.join(" ");
  showCurl();
}

function showCurl() {
  const base = new URL("v1", document.baseURI).href;
  byId("base-url").textContent = base;
  const asked = mode === "chat"
    ? { messages: [{ role: "user", content: "Hello" }] }
    : { prompt: "Once upon a time", max_tokens: 64 };
  const body = JSON.stringify({ ...(model && { model }), ...asked, stream: true });
  const path = mode === "chat" ? "chat/completions" : "completions";
  const headers = ["-H 'content-type: application/json'"];
  if (hasKey()) headers.push('-H "authorization: Bearer $API_KEY"');
  byId("curl").textContent = [`curl -N ${base}/${path}`, ...headers, `-d '${body}'`].join(" \\\n  ");
}

async function findModel(asks) {
  try {
    const models = await get("v1/models", { asks });
    const first = models.data[0];
    model = first.id;
    byId("model").textContent = model;
    contextLength = first.max_model_len;
    document.title = `${model} · charonia`;
    showWelcome();
  } catch (error) {
    byId("model").textContent = error.message;
    if (error.status !== 401) setTimeout(findModel, RETRY_MS, asks);
  }
}

/** Find out whether there is a chat template. Without one, only texts can be continued. */
async function findModes() {
  try {
    const facts = await get("page/facts.json");
    if (facts.chats) return;
  } catch {
    return; // a chat says so itself
  }
  const chat = byId("mode-chat");
  chat.disabled = true;
  chat.parentElement.title = "This model has no chat template.";
  setMode("complete");
}

function startTheme() {
  let theme = settingsStore.get("theme");
  if (!THEMES.includes(theme)) theme = "auto";
  const show = () => {
    byId("theme").textContent = `Theme: ${theme}`;
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  byId("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    settingsStore.set("theme", theme);
    show();
  });
  show();
}

function startViews() {
  const buttons = document.querySelectorAll(".views button");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.to;
      for (const one of buttons) one.removeAttribute("aria-current");
      button.setAttribute("aria-current", "page");
    });
  }
}

function startKeyboard() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!talk.stop()) send();
  });
  prompt.addEventListener("input", fit);
  prompt.addEventListener("keydown", (event) => {
    // While a word is composed, as in Japanese, Enter belongs to the input method.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("key").open) talk.stop();
  });
}

byId("clear").addEventListener("click", () => {
  talk.clear();
  prompt.focus();
});
byId("curl-copy").addEventListener("click", (event) =>
  copy(event.currentTarget, byId("curl").textContent),
);
for (const input of document.querySelectorAll("input[name=mode]")) {
  input.addEventListener("change", () => {
    setMode(input.value);
    settingsStore.set("mode", input.value);
  });
}

onKeyNeeded(askForKey);
startKeys(() => {
  if (model === null) findModel(false);
  panel.now();
});
startSettings();
startTheme();
startViews();
startKeyboard();
setMode(settingsStore.get("mode") === "complete" ? "complete" : "chat");
showBusy();
findModes();
findModel(true).then(() => panel.now());
panel.start();
if (matchMedia("(min-width: 760px)").matches) prompt.focus();
