// The turns of a conversation on the page.

import { path, versions } from "./conversation.js";
import { copyButton, el, icon, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const NOTES = {
  stopped: "Stopped",
  length: "Cut off at max tokens",
  timeout: "Timed out",
};

/** Shows one conversation. actions: {edit(turn, text), regenerate(turn), choose(turn)}. */
export class Thread {
  #list;
  #actions;
  #shown = new Map();

  constructor(list, actions) {
    this.#list = list;
    this.#actions = actions;
  }

  /** Show the branch that the conversation has chosen; running: the turn that is being written, if any. */
  show(conversation, running) {
    this.#shown.clear();
    const items = path(conversation).map((turn) => this.#item(conversation, turn, turn === running));
    this.#list.replaceChildren(...items);
  }

  /** Show what was added to a turn that is being written, where it is on the page. */
  grow(turn) {
    const shown = this.#shown.get(turn.id);
    if (shown) showAnswer(shown, turn, true);
  }

  #item(conversation, turn, isRunning) {
    const mine = turn.role === "user";
    const text = mine ? el("div", { class: "text" }, turn.text) : el("div", { class: "text prose" });
    if (!mine) showAnswer(text, turn, isRunning);
    this.#shown.set(turn.id, mine ? null : text);
    const article = el("article", { "aria-label": mine ? "You" : turn.model || "Answer", "aria-busy": isRunning ? "true" : null });
    if (!mine) article.append(el("header", {}, turn.model || "Answer"));
    article.append(text);
    if (isRunning) article.append(el("span", { class: "cursor", "aria-hidden": "true" }));
    else article.append(...this.#ending(turn), this.#foot(conversation, turn, article));
    return el("li", { class: mine ? "turn mine" : "turn", "data-turn": turn.id }, article);
  }

  /** Why an answer is incomplete. */
  #ending(turn) {
    if (turn.role === "user") return [];
    if (turn.error) {
      const again = el("button", { type: "button", onclick: () => this.#actions.regenerate(turn) }, icon("again"), "Try again");
      return [el("p", { class: "failure" }, icon("cross"), el("span", {}, turn.error), again)];
    }
    const note = turn.finish ? NOTES[turn.finish] : "Interrupted: the page was closed";
    return note ? [el("p", { class: "note" }, note)] : [];
  }

  #foot(conversation, turn, article) {
    const mine = turn.role === "user";
    const own = mine
      ? iconButton("edit", "Edit this message", () => this.#edit(turn, article))
      : iconButton("again", "Regenerate", () => this.#actions.regenerate(turn));
    const copying = copyButton(mine ? "Copy this message" : "Copy this answer", () => turn.text);
    const foot = el("footer", {}, ...this.#versions(conversation, turn), copying, own);
    if (turn.stats) foot.append(el("span", { class: "stats" }, statsLine(turn.stats)));
    return foot;
  }

  #versions(conversation, turn) {
    const all = versions(conversation, turn);
    if (all.length < 2) return [];
    const at = all.indexOf(turn);
    const step = (label, name, other) =>
      iconButton(name, label, () => this.#actions.choose(other), { disabled: !other });
    const where = el("span", { class: "version" }, `${at + 1}/${all.length}`);
    return [step("Previous version", "back", all[at - 1]), where, step("Next version", "forward", all[at + 1])];
  }

  #edit(turn, article) {
    const box = el("textarea", { "aria-label": "Your message", rows: "3" });
    box.value = turn.text;
    const before = [...article.childNodes];
    const cancel = () => {
      article.replaceChildren(...before);
      article.querySelector("footer button:last-of-type")?.focus();
    };
    const send = () => box.value.trim() && this.#actions.edit(turn, box.value);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const buttons = el("div", { class: "buttons" },
      el("button", { type: "button", onclick: cancel }, "Cancel"),
      el("button", { type: "button", class: "strong", onclick: send }, "Send"));
    article.replaceChildren(el("div", { class: "editing" }, box, buttons));
    box.focus();
  }
}

/** An answer: what the model thought, folded, and what it says. */
function showAnswer(box, { text, thinking, thinkingMs }, isRunning) {
  if (!box.said) {
    box.thought = el("details", { class: "thought", hidden: true }, el("summary"), el("div"));
    box.said = el("div", { class: "said" });
    box.append(box.thought, box.said);
  }
  box.thought.hidden = !thinking;
  if (thinking) {
    const thought = thinkingMs ? `Thought for ${Math.ceil(thinkingMs / 1000)} s` : "Thoughts";
    box.thought.firstChild.textContent = isRunning && !text ? "Thinking…" : thought;
    showMarkdown(box.thought.lastChild, thinking);
  }
  showMarkdown(box.said, text);
}

function statsLine({ rate, firstMs, tokens }) {
  const parts = [];
  if (rate) parts.push(`${rate.toFixed(1)} tok/s`);
  if (firstMs !== null) parts.push(`first token ${(firstMs / 1000).toFixed(2)} s`);
  if (tokens) parts.push(`${tokens.toLocaleString("en")} tokens`);
  return parts.join(" · ");
}
