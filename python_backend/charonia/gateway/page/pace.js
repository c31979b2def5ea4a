// Measures one answer: time to first token, and tokens per second from then on.

import { count, milliseconds, rate } from "./format.js";

// Chunks that are read at once say nothing of the pace at which they were made.
const LEAST_S = 0.02;

/** The measures of one answer. `now` gives milliseconds. */
export class Pace {
  constructor(now = () => performance.now()) {
    this.now = now;
    this.startedAt = now();
    this.firstAt = null;
    this.lastAt = null;
    this.firstTokens = 0;
    this.usage = null;
    this.finishReason = null;
  }

  /** Take what a chunk says. */
  note(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (choice === undefined) return; // the last one, with the usage alone
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const tokens = this.usage?.completion_tokens ?? 0;
    if (tokens === 0) return;
    this.lastAt = this.now();
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.firstTokens = tokens;
    }
  }

  /** Tokens per second after the first chunk; null where they came too fast to tell. */
  get tokensPerS() {
    const tokens = (this.usage?.completion_tokens ?? 0) - this.firstTokens;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return tokens > 0 && seconds >= LEAST_S ? tokens / seconds : null;
  }

  /** What is shown: a name, a value, and whether the name follows the value as its unit. */
  facts() {
    const facts = [];
    if (this.firstAt !== null) {
      facts.push(["first token", milliseconds(this.firstAt - this.startedAt)]);
    }
    if (this.tokensPerS !== null) facts.push(["tokens/s", rate(this.tokensPerS), true]);
    if (this.usage !== null) {
      const made = this.usage.completion_tokens;
      facts.push([made === 1 ? "token" : "tokens", count(made), true]);
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      const prompt = count(this.usage.prompt_tokens);
      facts.push(["prompt", cached > 0 ? `${prompt} (${count(cached)} cached)` : prompt]);
    }
    if (this.finishReason !== null) facts.push(["finish_reason", this.finishReason]);
    return facts;
  }
}
