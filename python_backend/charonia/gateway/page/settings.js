// The parameters of requests: read from the form, and remembered. Must not know requests.

import { settingsStore, tabStore } from "./store.js";

const STORED = "parameters";
const SYSTEM = "system";
const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "repetition_penalty",
  "seed",
];
const field = (name) => document.getElementById(name);

/**
 * Return the parameters that are given, in the gateway's names.
 *
 * @throws {Error} a field has no number; ranges are judged by the server.
 */
export function parameters() {
  const given = {};
  for (const name of NUMBERS) {
    const input = field(name);
    const isWhole = input.step === "1";
    if (input.validity.badInput) {
      throw new Error(`${name} must be a ${isWhole ? "whole " : ""}number`);
    }
    if (input.value === "") continue;
    given[name] = Number(input.value);
    if (isWhole && Math.abs(given[name]) > Number.MAX_SAFE_INTEGER) {
      throw new Error(`${name} = ${input.value} is too large for a browser, whose largest whole ` +
        `number is ${Number.MAX_SAFE_INTEGER}`);
    }
  }
  const stops = stopStrings(field("stop").value);
  if (stops.length) given.stop = stops;
  return given;
}

/** Return the system prompt; empty without one. */
export function systemPrompt() {
  return field("system").value.trim();
}

/** Fill the form with what is remembered, and remember what changes. */
export function startSettings() {
  const stored = remembered();
  for (const name of [...NUMBERS, "stop"]) field(name).value = stored[name] ?? "";
  field("system").value = tabStore.get(SYSTEM) ?? "";
  field("parameters").addEventListener("submit", (event) => event.preventDefault());
  field("parameters").addEventListener("input", remember);
  field("reset").addEventListener("click", () => {
    for (const name of [...NUMBERS, "stop"]) field(name).value = "";
    remember();
  });
}

function remember() {
  const names = [...NUMBERS, "stop"].filter((name) => field(name).value !== "");
  const values = Object.fromEntries(names.map((name) => [name, field(name).value]));
  settingsStore.set(STORED, JSON.stringify(values));
  // A prompt, which is no setting for the next visit.
  tabStore.set(SYSTEM, field("system").value);
}

function remembered() {
  try {
    return JSON.parse(settingsStore.get(STORED)) ?? {};
  } catch {
    return {};
  }
}

/** Split lines, and read `\n`, `\t` and `\\` in each. */
function stopStrings(text) {
  const characters = { n: "\n", t: "\t", "\\": "\\" };
  return text
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replace(/\\([nt\\])/g, (_, letter) => characters[letter]));
}
