// Around a conversation: the drawer with the list, automatic scrolling, and toasts.

import { el } from "./dom.js";

const TOAST_MS = 8000;
const NEAR_END_PX = 80;

/** The list of conversations: next to the conversation, or over it on narrow screens. */
export class Drawer {
  #list;
  #main;
  #scrim;
  #button;
  #narrow = matchMedia("(max-width: 47.5rem)");

  constructor({ list, main, scrim, button, close }) {
    [this.#list, this.#main, this.#scrim, this.#button] = [list, main, scrim, button];
    button.addEventListener("click", () => this.turn(true, close));
    close.addEventListener("click", () => this.turn(false));
    scrim.addEventListener("click", () => this.turn(false));
    this.#narrow.addEventListener("change", () => this.turn(false));
    this.turn(false);
  }

  get isOpen() {
    return this.#list.classList.contains("open");
  }

  /** Open it, with the focus on `first`, or close it. */
  turn(open, first = null) {
    const isOver = this.#narrow.matches;
    const hadFocus = this.#list.contains(document.activeElement);
    this.#list.classList.toggle("open", open);
    this.#list.inert = isOver && !open;
    this.#main.inert = isOver && open;
    this.#scrim.hidden = !(isOver && open);
    this.#button.setAttribute("aria-expanded", String(open));
    if (isOver && open) first?.focus();
    else if (isOver && hadFocus) this.#button.focus();
  }
}

/** Keeps the end of a conversation in view while it grows, until the user scrolls away. */
export class End {
  #scroller;
  #following = true;

  constructor(scroller, button) {
    this.#scroller = scroller;
    scroller.addEventListener("scroll", () => {
      const { scrollTop, clientHeight, scrollHeight } = scroller;
      this.#following = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
      button.hidden = this.#following;
    }, { passive: true });
    button.addEventListener("click", () => this.follow());
  }

  /** Scroll to the end, and follow it. */
  follow() {
    this.#following = true;
    this.keep();
  }

  /** Stay at the end, unless the user scrolled away. */
  keep() {
    if (this.#following) this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }
}

/** A short message, with an optional action. */
export class Toast {
  #box;
  #timer = 0;

  constructor(box) {
    this.#box = box;
  }

  say(text, label = "", action = null) {
    clearTimeout(this.#timer);
    const close = () => (this.#box.hidden = true);
    const act = () => (close(), action());
    this.#box.replaceChildren(el("span", {}, text), ...(label ? [el("button", { type: "button", onclick: act }, label)] : []));
    this.#box.hidden = false;
    this.#timer = setTimeout(close, TOAST_MS);
  }
}
