// Makes nodes. Children that are strings become text nodes, never HTML.

/** Make an element with attributes and children. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Make an element of SVG. */
export function shape(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Make a button. */
export function button(label, onClick, kind = "quiet") {
  const node = element("button", { type: "button", class: kind }, label);
  node.addEventListener("click", onClick);
  return node;
}

/** Make a button that copies a text. */
export function copyButton(text) {
  const node = button("Copy", () => copy(node, text()));
  return node;
}

/** Copy a text, and let the button say so for a moment. */
export async function copy(node, text) {
  const label = "Copy";
  try {
    await navigator.clipboard.writeText(text);
    node.textContent = "Copied";
  } catch {
    node.textContent = "Not allowed"; // as over plain HTTP from another machine
  }
  setTimeout(() => {
    node.textContent = label;
  }, 1500);
}
