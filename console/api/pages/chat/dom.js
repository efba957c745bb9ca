// Making elements. Text goes in as text, never as HTML: nothing here, nor anywhere on the page, parses markup.

/** An element with attributes (on…: listeners; null and false: left out) and children (nodes, or text). */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** One of the icons that stand in the page; it says nothing to who cannot see it. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button with an icon alone; label: what it does. */
export const iconButton = (name, label, onclick, attributes = {}) =>
  el("button", { type: "button", class: "quiet", "aria-label": label, title: label, onclick, ...attributes }, icon(name));

/** A button that copies what `text()` is then, and says so. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const copied = await copy(text());
    button.replaceChildren(icon(copied ? "check" : "cross"));
    say(copied ? "Copied" : "The browser blocks copying");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // pages over plain HTTP from elsewhere have no clipboard
  }
}

function copyBySelection(text) {
  const box = el("textarea", { class: "unseen", "aria-hidden": "true" });
  const focused = document.activeElement;
  box.value = text;
  document.body.append(box);
  box.select();
  const copied = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return copied;
}

/** Tell who listens to the page rather than sees it. */
export function say(text) {
  document.getElementById("said").textContent = text;
}
