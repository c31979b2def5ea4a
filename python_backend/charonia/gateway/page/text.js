// Renders a growing text as DOM nodes: paragraphs, headings, code blocks, code and bold in a line.
// Whatever the text is, it becomes text nodes: no HTML of a model is ever read as HTML.
//
// Lines that are complete stay as they are, and only the last one is rendered again.

import { copyButton, element } from "./dom.js";

const FENCE = /^\s{0,3}(`{3,}|~{3,})/;
const LANGUAGE = /^[\w+#.-]*/;
const HEADING = /^#{1,6}\s+(\S.*)$/;
const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*/g;

/** A text in a node, which `append` makes longer. */
export class RichText {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.rest = ""; // the last line, which may not be complete
    this.fence = null; // of the code block that is open
    this.block = null; // the paragraph or code that is open
    this.last = []; // nodes of the last line
    this.mayBreak = false; // whether the open paragraph has a line
  }

  /** Add a piece. */
  append(piece) {
    this.text += piece;
    for (const node of this.last) node.remove();
    this.last = [];
    const lines = (this.rest + piece).split("\n");
    this.rest = lines.pop();
    for (const line of lines) this.#line(line, true);
    if (this.rest !== "") this.#line(this.rest, false);
  }

  #line(line, isComplete) {
    if (this.fence !== null) {
      this.#codeLine(line, isComplete);
      return;
    }
    const opening = openingOf(line);
    if (opening !== null) {
      if (isComplete) this.#openCode(...opening);
    } else if (line.trim() === "") {
      if (isComplete) this.#close();
    } else {
      this.#proseLine(line, isComplete);
    }
  }

  #codeLine(line, isComplete) {
    const closing = line.trim();
    if (closing.startsWith(this.fence) && closing.replaceAll(this.fence[0], "") === "") {
      if (isComplete) this.#close();
      return;
    }
    const node = document.createTextNode(isComplete ? `${line}\n` : line);
    this.block.append(node);
    if (isComplete) this.block.normalize();
    else this.last = [node];
  }

  #proseLine(line, isComplete) {
    const heading = HEADING.exec(line);
    if (heading !== null) {
      const node = element("p", { class: "heading-line" }, ...inline(heading[1]));
      this.node.append(node);
      if (isComplete) this.#close();
      else this.last = [node];
      return;
    }
    const isNew = this.block === null;
    const block = this.block ?? this.node.appendChild(element("p"));
    const nodes = inline(line);
    if (this.mayBreak) nodes.unshift(document.createTextNode("\n"));
    block.append(...nodes);
    if (isComplete) {
      this.block = block;
      this.mayBreak = true;
    } else {
      this.last = isNew ? [block] : nodes;
    }
  }

  #openCode(fence, language) {
    this.#close();
    this.fence = fence;
    const code = element("code");
    const label = language === "" ? "Code" : `Code, ${language}`;
    const pre = element("pre", { tabindex: "0", role: "group", "aria-label": label }, code);
    const copy = copyButton(() => code.textContent);
    const head = element("p", { class: "head" }, language || "code", copy);
    this.node.append(element("div", { class: "code" }, head, pre));
    this.block = code;
  }

  #close() {
    this.block = null;
    this.fence = null;
    this.mayBreak = false;
  }
}

/**
 * Return the fence and the language of a line that opens a code block; null for any other line.
 *
 * One pattern for the whole line would take time that is quadratic in its length.
 */
function openingOf(line) {
  const fence = FENCE.exec(line);
  if (fence === null) return null;
  const info = line.slice(fence[0].length);
  return info.includes("`") ? null : [fence[1], LANGUAGE.exec(info.trimStart())[0]];
}

/** Return the nodes of a line. */
function inline(line) {
  const nodes = [];
  let end = 0;
  for (const found of line.matchAll(INLINE)) {
    if (found.index > end) nodes.push(document.createTextNode(line.slice(end, found.index)));
    nodes.push(found[1] === undefined ? element("strong", {}, found[2])
      : element("code", {}, found[1]));
    end = found.index + found[0].length;
  }
  if (end < line.length) nodes.push(document.createTextNode(line.slice(end)));
  return nodes;
}

/** A text as it is, in a node, which `append` makes longer. */
export class PlainText {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.last = null;
  }

  /** Add a piece. */
  append(piece) {
    this.text += piece;
    this.last ??= this.node.appendChild(document.createTextNode(""));
    this.last.appendData(piece);
  }
}
