// A line of the last two minutes, in SVG.

import { shape } from "./dom.js";

const SPAN_S = 120;
const GAP_S = 5; // without a value for so long, the line is interrupted
const WIDTH = 240;
const HEIGHT = 36;

/** A sparkline. `say` writes its last value for those who do not see it. */
export class Spark {
  constructor(label, say) {
    this.label = label;
    this.say = say;
    this.points = []; // [seconds, value]
    this.area = shape("path", { class: "area" });
    this.line = shape("path", { class: "line" });
    this.node = shape(
      "svg",
      {
        class: "spark",
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": label,
      },
      this.area,
      this.line,
    );
  }

  /** Add a value; null adds none. `most` is the top of the scale, the largest value without it. */
  add(seconds, value, most = null) {
    if (Number.isFinite(value)) this.points.push([seconds, value]);
    while (this.points.length > 0 && this.points[0][0] < seconds - SPAN_S) this.points.shift();
    const top = most > 0 ? most : Math.max(1, ...this.points.map((point) => point[1]));
    const x = (at) => (WIDTH * (at - seconds + SPAN_S)) / SPAN_S;
    const y = (of) => HEIGHT - 1.5 - (HEIGHT - 3) * Math.min(1, of / top);
    let line = "";
    let area = "";
    let before = null;
    for (const [at, of] of this.points) {
      const place = `${x(at).toFixed(1)} ${y(of).toFixed(1)}`;
      if (before === null || at - before > GAP_S) {
        if (before !== null) area += `L${x(before).toFixed(1)} ${HEIGHT}Z`;
        line += `M${place}`;
        area += `M${x(at).toFixed(1)} ${HEIGHT}L${place}`;
      } else {
        line += `L${place}`;
        area += `L${place}`;
      }
      before = at;
    }
    if (before !== null) area += `L${x(before).toFixed(1)} ${HEIGHT}Z`;
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    const largest = Math.max(0, ...this.points.map((point) => point[1]));
    this.node.setAttribute(
      "aria-label",
      `${this.label}, last two minutes: now ${this.say(value)}, at most ${this.say(largest)}`,
    );
  }
}
