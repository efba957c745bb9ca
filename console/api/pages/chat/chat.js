// The chat page: what is open, what is being answered, and what happens when a person does something.

import { ApiError, answer, models } from "./client.js";
import { addTurn, exported, imported, messages, newConversation, path, show, titleOf } from "./conversation.js";
import { el, say } from "./dom.js";
import { Settings, samplingOf } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Conversations, readKey, readSettings, writeKey, writeSettings } from "./store.js";
import { Thread } from "./thread.js";

const SAVE_MS = 2000;
const UNDO_MS = 8000;
const NEAR_END_PX = 80;

const $ = (id) => document.getElementById(id);

class Chat {
  #kept;
  #conversations = [];
  #current = newConversation();
  #models = [];
  #settings = readSettings();
  #key = readKey();
  #running = new Map(); // conversation id -> {turn, controller}
  #following = true;
  #deleted = null;

  async start() {
    this.thread = new Thread($("turns"), {
      edit: (turn, text) => this.#ask(turn.parent, text),
      regenerate: (turn) => this.#answer(this.#current, turn.parent),
      choose: (turn) => this.#choose(turn),
    });
    this.sidebar = new Sidebar($("conversations"), {
      open: (conversation) => this.#open(conversation),
      rename: (conversation, title) => this.#rename(conversation, title),
      remove: (conversation) => this.#remove(conversation),
    });
    this.settings = new Settings($("settings"), this.#settings, { key: this.#key, keepKey: !!this.#key }, (change) => this.#changed(change));
    this.#listen();
    this.#kept = await Conversations.open();
    this.#conversations = await this.#kept.all();
    const last = this.#conversations.find((each) => each.id === this.#settings.open);
    this.#open(last ?? newConversation(this.#settings.system));
    if (!this.#kept.lasting) this.#toast("This browser keeps nothing: conversations last as long as this page.");
    await this.#learnModels();
    document.body.dataset.ready = "true";
  }

  #listen() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#submit();
      }
    });
    $("message").addEventListener("input", () => this.#showComposer());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.#escape());
    $("stop").addEventListener("click", () => this.#stop());
    $("new").addEventListener("click", () => this.#open(newConversation(this.#settings.system)));
    $("new-narrow").addEventListener("click", () => this.#open(newConversation(this.#settings.system)));
    $("open-settings").addEventListener("click", () => this.settings.open(this.#current.system));
    $("model").addEventListener("change", () => {
      this.#settings.model = $("model").value;
      writeSettings(this.#settings);
      this.#showWelcome();
    });
    $("export").addEventListener("click", () => this.#export());
    $("import").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => this.#import());
    $("menu").addEventListener("click", () => this.#openSidebar(true));
    $("close-menu").addEventListener("click", () => this.#openSidebar(false));
    $("scrim").addEventListener("click", () => this.#openSidebar(false));
    matchMedia("(max-width: 47.5rem)").addEventListener("change", () => this.#openSidebar(false));
    $("scroller").addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    $("to-end").addEventListener("click", () => this.#follow(true));
    addEventListener("focus", () => this.#learnModels());
    for (const starter of document.querySelectorAll("[data-starter]")) {
      starter.addEventListener("click", () => this.#ask(null, starter.dataset.starter));
    }
    this.#openSidebar(false);
  }

  // -- asking ---------------------------------------------------------------------------------------------------

  #submit() {
    const text = $("message").value;
    if (!text.trim() || this.#running.has(this.#current.id)) return;
    $("message").value = "";
    this.#ask(this.#current.leaf, text);
  }

  /** Say something after `parent`, and have it answered. */
  #ask(parent, text) {
    if (this.#running.has(this.#current.id)) return;
    const turn = addTurn(this.#current, parent, "user", text);
    this.#answer(this.#current, turn.id);
  }

  /** Have the turn `parent` answered, once more where it was before. */
  async #answer(conversation, parent) {
    if (this.#running.has(conversation.id)) return;
    conversation.leaf = parent;
    const body = { ...samplingOf(this.#settings), model: $("model").value || undefined, messages: messages(conversation, path(conversation)) };
    const turn = addTurn(conversation, parent, "assistant", "");
    turn.model = body.model ?? "";
    const run = { turn, controller: new AbortController() };
    this.#running.set(conversation.id, run);
    this.#keepFirst(conversation);
    this.#follow(true);
    this.#show();
    say("Answering");
    await this.#read(conversation, run, body);
    this.#running.delete(conversation.id);
    await this.#kept.put(conversation);
    this.#showSidebar();
    if (conversation === this.#current) this.#show();
    say(turn.error ?? (turn.finish === "stopped" ? "Stopped" : `Answered: ${turn.text}`));
  }

  /** Read an answer into its turn, to its end. */
  async #read(conversation, { turn, controller }, body) {
    const began = performance.now();
    const pace = { first: null, last: began, savedAt: began, frame: 0 };
    try {
      for await (const piece of answer(body, this.#key, controller.signal)) {
        if (piece.text) {
          pace.last = performance.now();
          pace.first ??= pace.last;
          turn.text += piece.text;
          pace.frame ||= requestAnimationFrame(() => {
            pace.frame = 0;
            this.#grow(conversation, turn);
          });
          if (pace.last - pace.savedAt > SAVE_MS) {
            pace.savedAt = pace.last;
            this.#kept.put(conversation);
          }
        }
        turn.finish = piece.finish ?? turn.finish;
        if (piece.usage) turn.stats = statsOf(piece.usage, began, pace);
      }
      turn.finish ??= "stop";
    } catch (error) {
      this.#failed(turn, error, controller.signal);
    }
    cancelAnimationFrame(pace.frame);
    turn.stats ??= statsOf(null, began, pace);
  }

  #failed(turn, error, signal) {
    if (signal.aborted) {
      turn.finish = "stopped";
      return;
    }
    turn.finish = "error";
    turn.error = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
    if (error.status === 401 || error.status === 403) this.#askForKey();
  }

  #stop() {
    this.#running.get(this.#current.id)?.controller.abort();
  }

  #escape() {
    if (document.querySelector("dialog[open]")) return;
    if ($("sidebar").classList.contains("open")) this.#openSidebar(false);
    else this.#stop();
  }

  #choose(turn) {
    show(this.#current, turn);
    this.#kept.put(this.#current);
    this.#show();
    document.querySelector(`[data-turn="${CSS.escape(turn.id)}"] footer button`)?.focus();
  }

  // -- conversations --------------------------------------------------------------------------------------------

  #open(conversation) {
    this.#current = conversation;
    this.#settings.open = conversation.id;
    writeSettings(this.#settings);
    this.#openSidebar(false);
    this.#follow(true);
    this.#show();
    if (matchMedia("(hover: hover)").matches) $("message").focus();
  }

  /** Put the conversation on top of the list, and keep it. */
  #keepFirst(conversation) {
    this.#conversations = [conversation, ...this.#conversations.filter((each) => each !== conversation)];
    this.#kept.put(conversation).catch(() => this.#toast("This browser has no room to keep the conversation."));
  }

  #rename(conversation, title) {
    conversation.title = title === titleOf({ ...conversation, title: "" }) ? "" : title;
    this.#kept.put(conversation);
    this.#show();
  }

  #remove(conversation) {
    this.#running.get(conversation.id)?.controller.abort();
    this.#conversations = this.#conversations.filter((each) => each !== conversation);
    this.#kept.delete(conversation.id);
    if (conversation === this.#current) this.#open(newConversation(this.#settings.system));
    else this.#showSidebar();
    this.#deleted = conversation;
    this.#toast(`Deleted “${titleOf(conversation)}”.`, "Undo", () => {
      this.#keepFirst(this.#deleted);
      this.#open(this.#deleted);
    });
    $("new").focus();
  }

  #export() {
    const file = new Blob([exported(this.#conversations)], { type: "application/json" });
    const address = URL.createObjectURL(file);
    el("a", { href: address, download: `conversations-${new Date().toISOString().slice(0, 10)}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  async #import() {
    const [file] = $("file").files;
    $("file").value = "";
    if (!file) return;
    try {
      const found = imported(await file.text());
      for (const conversation of found.reverse()) this.#keepFirst(conversation);
      this.#toast(`Imported ${found.length} ${found.length === 1 ? "conversation" : "conversations"}.`);
      this.#showSidebar();
    } catch (error) {
      this.#toast(error.message);
    }
  }

  // -- settings and models --------------------------------------------------------------------------------------

  #changed({ system, key, keepKey, settings }) {
    if (system !== undefined) {
      this.#current.system = this.#settings.system = system;
      if (this.#current.turns.length) this.#kept.put(this.#current);
    }
    if (key !== undefined) {
      this.#key = key;
      writeKey(key, keepKey);
      clearTimeout(this.learning);
      this.learning = setTimeout(() => this.#learnModels(), 400);
    }
    if (settings || system !== undefined) writeSettings(this.#settings);
  }

  async #learnModels() {
    try {
      this.#models = await models(this.#key);
      $("notice").hidden = true;
    } catch (error) {
      this.#models = [];
      this.#notice(error);
    }
    const names = this.#models.map((model) => model.id);
    const chosen = names.includes(this.#settings.model) ? this.#settings.model : names[0];
    $("model").replaceChildren(...names.map((name) => el("option", { value: name, selected: name === chosen }, name)));
    $("model").disabled = names.length === 0;
    if (!names.length) $("model").append(el("option", { value: "" }, "no model"));
    this.#showWelcome();
  }

  #notice(error) {
    const needsKey = error.status === 401 || error.status === 403;
    const enter = el("button", { type: "button", onclick: () => this.#askForKey() }, "Enter a key");
    const again = el("button", { type: "button", onclick: () => this.#learnModels() }, "Try again");
    $("notice").replaceChildren(el("span", {}, error.message), needsKey ? enter : again);
    $("notice").hidden = false;
  }

  #askForKey() {
    if (!$("settings").open) this.settings.open(this.#current.system, "key");
  }

  // -- the page -------------------------------------------------------------------------------------------------

  #show() {
    this.thread.show(this.#current, this.#running.get(this.#current.id)?.turn);
    const title = this.#current.turns.length ? titleOf(this.#current) : "";
    document.title = title ? `${title} · EricLLM` : "EricLLM chat";
    this.#showSidebar();
    this.#showWelcome();
    this.#showComposer();
    this.#toEnd();
  }

  #showSidebar() {
    this.sidebar.show(this.#conversations, this.#current, (each) => this.#running.has(each.id));
    $("no-conversations").hidden = this.#conversations.length > 0;
    $("export").disabled = this.#conversations.length === 0;
  }

  #showWelcome() {
    $("welcome").hidden = this.#current.turns.length > 0;
    $("turns").hidden = !$("welcome").hidden;
    const card = this.#models.find((model) => model.id === $("model").value);
    const limit = card?.max_model_len;
    $("about-model").textContent = card ? [card.id, limit && `${limit.toLocaleString("en")} tokens of context`].filter(Boolean).join(" · ") : "";
    const used = path(this.#current).findLast((turn) => turn.stats?.context)?.stats.context;
    $("context").textContent = used && limit ? `${used.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens` : "";
  }

  #showComposer() {
    const isRunning = this.#running.has(this.#current.id);
    const hadFocus = document.activeElement === $("stop") || document.activeElement === $("send");
    $("stop").hidden = !isRunning;
    $("send").hidden = isRunning;
    $("send").disabled = !$("message").value.trim();
    if (hadFocus) $("message").focus();
    const box = $("message");
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
  }

  #grow(conversation, turn) {
    if (conversation !== this.#current) return;
    this.thread.grow(turn);
    this.#toEnd();
  }

  #noteScroll() {
    const { scrollTop, clientHeight, scrollHeight } = $("scroller");
    this.#following = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    $("to-end").hidden = this.#following;
  }

  #follow(on) {
    this.#following = on;
    this.#toEnd();
  }

  #toEnd() {
    if (this.#following) $("scroller").scrollTop = $("scroller").scrollHeight;
  }

  #openSidebar(open) {
    const isNarrow = matchMedia("(max-width: 47.5rem)").matches;
    const had = $("sidebar").contains(document.activeElement);
    $("sidebar").classList.toggle("open", open);
    $("sidebar").inert = isNarrow && !open;
    $("main").inert = isNarrow && open;
    $("scrim").hidden = !(isNarrow && open);
    $("menu").setAttribute("aria-expanded", String(open));
    if (isNarrow && open) $("close-menu").focus();
    else if (isNarrow && had) $("menu").focus();
  }

  #toast(text, label, action) {
    clearTimeout(this.toasting);
    const close = () => ($("toast").hidden = true);
    const button = label && el("button", { type: "button", onclick: () => (close(), action()) }, label);
    $("toast").replaceChildren(el("span", {}, text), ...(button ? [button] : []));
    $("toast").hidden = false;
    this.toasting = setTimeout(close, UNDO_MS);
  }
}

/** How fast an answer came, as this browser saw it. usage: the server's count of tokens, null where it sent none. */
function statsOf(usage, began, { first, last }) {
  if (first === null) return null;
  const tokens = usage?.completion_tokens ?? null;
  const rate = tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null;
  return { tokens, rate, firstMs: first - began, context: usage?.total_tokens ?? null };
}

new Chat().start();
