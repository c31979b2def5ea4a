// One prompt and its answer on the page. Must not know how answers are made.

import { button, copyButton, element } from "./dom.js";
import { PlainText, RichText } from "./text.js";

/**
 * A turn of a conversation, or a completion.
 *
 * `actions` has `again`, `edit`, `more` and `complete`, called when the user asks for it.
 */
export class Turn {
  constructor({ mode, prompt, model, actions }) {
    this.mode = mode;
    this.actions = actions;
    this.answer = element("div", { class: "answer" });
    this.state = element("p", { class: "waiting" }, "Waiting for the first token");
    this.facts = element("dl", { class: "facts" });
    this.buttons = element("div", { class: "buttons" });
    this.node = element("article", { class: `turn ${mode}` });
    if (mode === "chat") {
      const asked = element("div", { class: "asked" }, prompt);
      this.node.append(element("h3", { class: "who hidden" }, "You"), asked);
    }
    const foot = element("footer", {}, this.facts, this.buttons);
    this.node.append(element("h3", { class: "who" }, model), this.answer, this.state, foot);
    this.prompt = prompt;
    this.begin();
  }

  /** Begin the answer, or begin it again. */
  begin() {
    this.answer.replaceChildren();
    if (this.mode === "chat") {
      this.text = new RichText(this.answer);
    } else {
      const made = element("span", { class: "made" });
      this.answer.append(element("span", { class: "given" }, this.prompt), made);
      this.text = new PlainText(made);
    }
    this.#wait();
  }

  /** Begin to continue a completion: what was made belongs to the prompt now. */
  beginMore() {
    this.prompt += this.text.text;
    this.begin();
  }

  #wait() {
    this.node.querySelector(".error")?.remove();
    this.facts.replaceChildren();
    this.buttons.replaceChildren();
    this.state.hidden = false;
    this.answer.setAttribute("aria-busy", "true");
  }

  /** Add a piece of the answer, and show its measures so far. */
  append(piece, facts) {
    if (piece !== "") {
      this.state.hidden = true;
      this.text.append(piece);
    }
    this.#showFacts(facts);
  }

  /** End the answer. `ending`: what is said beside its measures, e.g. "stopped". */
  end(facts, ending = null) {
    this.#close(facts);
    if (ending !== null) this.facts.append(element("div", { class: "ending" }, ending));
    if (this.text.text === "" && ending === null) {
      this.facts.prepend(element("div", { class: "ending" }, "The answer is empty."));
    }
    if (this.text.text !== "") this.buttons.append(copyButton(() => this.text.text));
    if (this.mode === "complete") this.#offer("Continue", this.actions.more);
    this.#offer("Edit", this.actions.edit);
    this.#offer("Again", this.actions.again);
  }

  /** End the answer with an error; what came of it stays. */
  fail(error, facts) {
    this.#close(facts);
    const message = element("p", {}, error.message);
    const box = element("div", { class: "error", role: "alert" });
    if (this.text.text !== "") {
      box.append(element("p", { class: "help" }, "The answer broke off here."));
    }
    box.append(message);
    if (error.retryAfterS) {
      box.append(element("p", { class: "help" }, `Try again in ${error.retryAfterS} s.`));
    }
    const buttons = element("div", { class: "buttons last" });
    if (error.code === "no_chat_template") {
      buttons.append(button("Complete instead", this.actions.complete, ""));
    } else {
      buttons.append(button("Try again", this.actions.again, ""));
    }
    buttons.append(button("Edit", this.actions.edit));
    box.append(buttons);
    this.answer.after(box);
  }

  #close(facts) {
    this.state.hidden = true;
    this.answer.removeAttribute("aria-busy");
    this.#showFacts(facts);
  }

  #offer(label, call) {
    const offered = button(label, call);
    offered.classList.add("last");
    this.buttons.append(offered);
  }

  #showFacts(facts) {
    this.facts.replaceChildren(
      ...facts.map(([name, value, isUnit]) => {
        const pair = [element("dt", {}, name), element("dd", {}, value)];
        return element("div", isUnit ? { class: "unit" } : {}, ...pair);
      }),
    );
  }
}
