// The conversation: what was asked and answered, and the one request that may run.
// It is kept in this module alone: nothing of it outlives the page.

import { stream } from "./api.js";
import { counted } from "./format.js";
import { Pace } from "./pace.js";
import { parameters, systemPrompt } from "./settings.js";
import { Turn } from "./turn.js";

const USAGE = { include_usage: true, continuous_usage_stats: true };
const scroll = document.getElementById("scroll");
const latest = document.getElementById("latest");
const turns = document.getElementById("turns");
const said = document.getElementById("said");

/** An exchange is `{mode, prompt, text, view}`; `text` is empty until something was answered. */
export class Talk {
  /** `model` returns its name; `onChange` is called when a request begins or ends. */
  constructor({ model, onChange, onEdit, onComplete }) {
    this.exchanges = [];
    this.model = model;
    this.onChange = onChange;
    this.onEdit = onEdit;
    this.onComplete = onComplete;
    this.running = null; // an AbortController
    this.sticks = true; // whether the view follows the end
    scroll.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    latest.addEventListener("click", () => {
      this.#toEnd();
      document.getElementById("prompt").focus();
    });
  }

  get isBusy() {
    return this.running !== null;
  }

  /** Ask something. */
  ask(mode, prompt) {
    const exchange = { mode, prompt, text: "" };
    const actions = {
      again: () => this.#again(exchange),
      edit: () => this.#edit(exchange),
      more: () => this.#more(exchange),
      complete: () => {
        this.#drop(exchange);
        this.onComplete(exchange.prompt);
      },
    };
    exchange.view = new Turn({ mode, prompt, model: this.model() ?? "Model", actions });
    this.exchanges.push(exchange);
    turns.append(exchange.view.node);
    this.sticks = true;
    return this.#run(exchange);
  }

  /** Stop the request that runs. Returns whether there was one. */
  stop() {
    this.running?.abort();
    return this.isBusy;
  }

  /** Forget everything. */
  clear() {
    this.stop();
    this.exchanges = [];
    turns.replaceChildren();
    said.textContent = "Cleared";
    this.onChange();
  }

  #again(exchange) {
    if (this.isBusy) return;
    exchange.text = "";
    exchange.view.begin();
    this.#run(exchange);
  }

  #more(exchange) {
    if (this.isBusy) return;
    exchange.prompt += exchange.text;
    exchange.text = "";
    exchange.view.beginMore();
    this.#run(exchange);
  }

  #edit(exchange) {
    if (this.isBusy) return;
    this.#drop(exchange);
    this.onEdit(exchange.prompt);
  }

  #drop(exchange) {
    exchange.view.node.remove();
    this.exchanges = this.exchanges.filter((one) => one !== exchange);
    this.onChange();
  }

  async #run(exchange) {
    const { view } = exchange;
    const controller = new AbortController();
    this.running = controller;
    this.onChange();
    said.textContent = "Waiting for the answer";
    // A button that was pressed is gone now. On a phone the focus would bring up the keyboard.
    if (matchMedia("(pointer: fine)").matches) {
      document.getElementById("prompt").focus({ preventScroll: true });
    }
    this.#toEnd();
    const pace = new Pace();
    const shown = new Frames((piece) => {
      view.append(piece, pace.facts());
      if (this.sticks) this.#toEnd();
    });
    try {
      const [path, body] = this.#request(exchange);
      for await (const chunk of stream(path, body, controller.signal)) {
        pace.note(chunk);
        const piece = pieceOf(chunk);
        exchange.text += piece;
        shown.add(piece);
      }
      shown.flush();
      view.end(pace.facts());
      said.textContent = `Answered: ${counted(pace.usage?.completion_tokens ?? 0, "token")}`;
    } catch (error) {
      shown.flush();
      if (error.name === "AbortError") {
        view.end(pace.facts(), "stopped");
        said.textContent = "Stopped";
      } else {
        view.fail(error, pace.facts());
        said.textContent = "";
      }
    } finally {
      if (this.running === controller) this.running = null;
      this.onChange();
      if (this.sticks) this.#toEnd();
    }
  }

  #request(exchange) {
    const common = { stream: true, stream_options: USAGE, ...parameters() };
    if (this.model() !== null) common.model = this.model();
    if (exchange.mode === "complete") {
      return ["v1/completions", { ...common, prompt: exchange.prompt }];
    }
    return ["v1/chat/completions", { ...common, messages: this.#messages(exchange) }];
  }

  /** The messages up to an exchange; what has no answer is left out. */
  #messages(last) {
    const messages = [];
    const system = systemPrompt();
    if (system !== "") messages.push({ role: "system", content: system });
    for (const one of this.exchanges) {
      if (one === last) break;
      if (one.mode !== "chat" || one.text === "") continue;
      messages.push({ role: "user", content: one.prompt });
      messages.push({ role: "assistant", content: one.text });
    }
    messages.push({ role: "user", content: last.prompt });
    return messages;
  }

  #noteScroll() {
    const left = scroll.scrollHeight - scroll.clientHeight - scroll.scrollTop;
    this.sticks = left < 40;
    latest.hidden = this.sticks;
  }

  #toEnd() {
    this.sticks = true;
    latest.hidden = true;
    scroll.scrollTop = scroll.scrollHeight;
  }
}

function pieceOf(chunk) {
  const choice = chunk.choices?.[0];
  return choice?.delta?.content ?? choice?.text ?? "";
}

/** Collects pieces, and shows them once per frame. */
class Frames {
  constructor(show) {
    this.show = show;
    this.pending = "";
    this.frame = null;
  }

  add(piece) {
    this.pending += piece;
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const piece = this.pending;
    this.pending = "";
    this.show(piece);
  }
}
