// The list of conversations: choose, rename, delete.

import { titleOf } from "./conversation.js";
import { el, iconButton } from "./dom.js";

/** Shows the conversations. actions: {open(conversation), rename(conversation, title), remove(conversation)}. */
export class Sidebar {
  #list;
  #actions;

  constructor(list, actions) {
    this.#list = list;
    this.#actions = actions;
  }

  /** current: the one that is open; busy: whether one is being answered. */
  show(conversations, current, busy) {
    this.#list.replaceChildren(...conversations.map((each) => this.#item(each, each === current, busy(each))));
  }

  #item(conversation, isCurrent, isBusy) {
    const title = titleOf(conversation);
    const open = el("button", {
      type: "button", class: "open", "aria-current": isCurrent ? "true" : null, title, onclick: () => this.#actions.open(conversation),
    }, title);
    if (isBusy) open.append(el("span", { class: "busy", role: "img", "aria-label": "answer in progress" }));
    const item = el("li", {}, open,
      iconButton("edit", `Rename ${title}`, () => this.#rename(conversation, item)),
      iconButton("delete", `Delete ${title}`, () => this.#actions.remove(conversation)));
    return item;
  }

  #rename(conversation, item) {
    const box = el("input", { "aria-label": "Name of the conversation", maxlength: "200" });
    box.value = titleOf(conversation);
    let ended = false;
    const end = (keep) => {
      if (ended) return;
      ended = true;
      this.#actions.rename(conversation, keep ? box.value.trim() : conversation.title);
    };
    box.addEventListener("blur", () => end(true));
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      end(event.key === "Enter");
    });
    item.replaceChildren(box);
    box.select();
  }
}
