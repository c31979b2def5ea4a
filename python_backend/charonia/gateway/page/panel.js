// The operator's panel: asks for /v1/metrics once a second while the tab is seen, and draws it.

import { get } from "./api.js";
import { button, element } from "./dom.js";
import { summed, stateOf } from "./figures.js";
import { count, counted, duration, milliseconds, percent, rate } from "./format.js";
import { askForKey } from "./key.js";
import { Spark } from "./spark.js";

const PERIOD_MS = 1000;
const SLOW_MS = 10_000; // where there is nothing to ask
const TIMEOUT_MS = 5000;
const byId = (id) => document.getElementById(id);

/** The panel. */
export class Panel {
  constructor() {
    this.timer = null;
    this.isAsking = false;
    this.values = new Map();
    this.tokens = new Spark("Tokens per second", rate);
    this.queue = new Spark("Waiting requests", count);
    this.blocks = new Spark("KV blocks used", count);
    byId("figures").append(...this.#layout());
  }

  /** Begin to ask. */
  start() {
    document.addEventListener("visibilitychange", () => this.now());
    this.now();
  }

  /** Ask now, and once a second from then on. */
  now() {
    clearTimeout(this.timer);
    if (document.visibilityState === "visible" && !this.isAsking) this.#ask();
  }

  async #ask() {
    this.isAsking = true;
    let wait = PERIOD_MS;
    try {
      const found = await get("v1/metrics", { signal: AbortSignal.timeout(TIMEOUT_MS) });
      this.#show(found);
    } catch (error) {
      this.#miss(error);
      if (error.status >= 400 && error.status < 500) wait = SLOW_MS;
    } finally {
      this.isAsking = false;
    }
    if (document.visibilityState === "visible") this.timer = setTimeout(() => this.#ask(), wait);
  }

  #miss(error) {
    const empty = byId("no-figures");
    empty.hidden = false;
    empty.replaceChildren(`No figures: ${error.message}`);
    if (error.status === 401) {
      const ask = () => askForKey(error.message);
      empty.append(element("span", { class: "buttons" }, button("Enter an API key", ask, "")));
    }
    byId("figures").classList.add("old");
    const isReached = error.status > 0;
    showState(isReached ? "unknown" : "bad", isReached ? "no figures" : "no connection");
  }

  #show(found) {
    byId("no-figures").hidden = true;
    byId("figures").hidden = false;
    byId("figures").classList.remove("old");
    const servers = found.servers ?? [];
    const sum = summed(servers.map((server) => server.load).filter(Boolean));
    const [state, words] = stateOf(servers);
    showState(state, words);
    byId("uptime").textContent = `up ${duration(found.uptime_s)}`;
    const texts = {
      tokens: rate(found.tokens_per_sec),
      first50: milliseconds(found.ttft_ms?.p50),
      first99: milliseconds(found.ttft_ms?.p99),
      running: count(sum.num_running),
      waiting: count(sum.num_waiting),
      used: percent(sum.kv_blocks_used / sum.kv_blocks_total),
      blocks: `${count(sum.kv_blocks_used)} of ${count(sum.kv_blocks_total)} blocks`,
      hits: percent(found.cache_hit_rate),
      accepted: percent(found.acceptance_rate),
      requests: count(found.total_requests),
      flight: count(found.requests_in_flight),
      generated: count(found.total_tokens_generated),
      latency: milliseconds(found.avg_latency_ms),
      throughput: rate(found.avg_throughput_tokens_per_sec),
      engine: words,
      loaded: sum.engine_age_s === null ? "–" : `${duration(sum.engine_age_s)} ago`,
      restarts: restarts(sum),
    };
    for (const [name, text] of Object.entries(texts)) this.values.get(name).textContent = text;
    this.values.get("engine").dataset.state = state;
    const now = performance.now() / 1000;
    this.tokens.add(now, found.tokens_per_sec);
    this.queue.add(now, sum.num_waiting);
    this.blocks.add(now, sum.kv_blocks_used, sum.kv_blocks_total);
    this.#showServers(servers);
  }

  #showServers(servers) {
    const list = byId("servers");
    list.hidden = servers.length < 2;
    if (list.hidden) return;
    list.replaceChildren(
      ...servers.map((server) => {
        const state = server.is_up ? "good" : "bad";
        const load = server.load;
        const doing = server.is_up && load
          ? `${count(load.num_running)} running, ${count(load.num_waiting)} waiting`
          : (server.reason || "not ready");
        return element(
          "li",
          {},
          element("span", { class: "state", "data-state": state }, server.server),
          element("span", { class: "help" }, doing),
        );
      }),
    );
  }

  #layout() {
    return [
      element(
        "div",
        { class: "figure large" },
        element("h3", {}, "Tokens per second"),
        element("p", { class: "number" }, this.#value("tokens")),
        this.tokens.node,
      ),
      element(
        "div",
        { class: "figure" },
        element("h3", {}, "Time to first token"),
        element(
          "dl",
          { class: "pair" },
          ...this.#pair("p50", "first50"),
          ...this.#pair("p99", "first99"),
        ),
      ),
      element(
        "div",
        { class: "figure" },
        element("h3", {}, "Queue"),
        element(
          "dl",
          { class: "pair" },
          ...this.#pair("running", "running"),
          ...this.#pair("waiting", "waiting"),
        ),
        this.queue.node,
      ),
      element(
        "div",
        { class: "figure" },
        element("h3", {}, "KV cache"),
        element(
          "p",
          { class: "number" },
          this.#value("used"),
          " ",
          element("small", {}, this.#value("blocks")),
        ),
        this.blocks.node,
      ),
      this.#list("Work", [
        ["Cache hit rate", "hits"],
        ["Drafts accepted", "accepted"],
        ["Requests in flight", "flight"],
        ["Prompts answered", "requests"],
        ["Tokens generated", "generated"],
        ["Latency of an answer", "latency"],
        ["Tokens/s of an answer", "throughput"],
      ]),
      this.#list("Engine", [
        ["State", "engine"],
        ["Loaded", "loaded"],
        ["Restarts", "restarts"],
      ]),
    ];
  }

  #list(title, rows) {
    const list = element("dl", { class: "rows" });
    for (const [label, name] of rows) list.append(...this.#pair(label, name));
    return element("div", { class: "figure" }, element("h3", {}, title), list);
  }

  #pair(label, name) {
    return [element("div", {}, element("dt", {}, label), element("dd", {}, this.#value(name)))];
  }

  #value(name) {
    const node = element("span", {}, "–");
    this.values.set(name, node);
    return node;
  }
}

function restarts(sum) {
  if (!Number.isFinite(sum.engine_restarts)) return "–";
  if (sum.engine_restarts === 0) return "none";
  if (sum.engine_age_s === null) return counted(sum.engine_restarts, "restart");
  return `${count(sum.engine_restarts)}, last ${duration(sum.engine_age_s)} ago`;
}

function showState(state, words) {
  byId("state").dataset.state = state;
  byId("state-text").textContent = words;
  byId("state").title = words;
}
