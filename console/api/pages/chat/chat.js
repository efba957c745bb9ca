// The chat page: what is open, what is being answered, and what happens when a person does something.

import { readInto } from "./answering.js";
import { models } from "./client.js";
import { addTurn, exported, imported, messages, newConversation, path, show, titleOf } from "./conversation.js";
import { el, say } from "./dom.js";
import { Drawer, End, Toast } from "./frame.js";
import { Settings, samplingOf } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Conversations, readKey, readSettings, writeKey, writeSettings } from "./store.js";
import { Thread } from "./thread.js";

const $ = (id) => document.getElementById(id);

class Chat {
  #kept;
  #conversations = [];
  #current = newConversation();
  #models = [];
  #settings = readSettings();
  #key = readKey();
  #running = new Map(); // conversation id -> {turn, controller}

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
    this.drawer = new Drawer({ list: $("sidebar"), main: $("main"), scrim: $("scrim"), button: $("menu"), close: $("close-menu") });
    this.end = new End($("scroller"), $("to-end"));
    this.toast = new Toast($("toast"));
    this.#listen();
    this.#kept = await Conversations.open();
    this.#conversations = await this.#kept.all();
    const last = this.#conversations.find((each) => each.id === this.#settings.open);
    this.#open(last ?? newConversation(this.#settings.system));
    if (!this.#kept.lasting) this.toast.say("This browser blocks storage: conversations are lost when the page closes.");
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
    addEventListener("focus", () => this.#learnModels());
    for (const starter of document.querySelectorAll("[data-starter]")) {
      starter.addEventListener("click", () => this.#ask(null, starter.dataset.starter));
    }
  }

  // -- sending ---------------------------------------------------------------------------------------------------

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
    const controller = new AbortController();
    this.#running.set(conversation.id, { turn, controller });
    this.#keepFirst(conversation);
    this.end.follow();
    this.#show();
    say("Answering");
    const watching = { grew: () => this.#grow(conversation, turn), save: () => this.#keep(conversation) };
    if (await readInto(turn, body, this.#key, controller.signal, watching)) this.#askForKey();
    this.#running.delete(conversation.id);
    await this.#keep(conversation);
    this.#showSidebar();
    if (conversation === this.#current) this.#show();
    say(turn.error ?? (turn.finish === "stopped" ? "Stopped" : `Answered: ${turn.text}`));
  }

  #stop() {
    this.#running.get(this.#current.id)?.controller.abort();
  }

  #escape() {
    if (document.querySelector("dialog[open]")) return;
    if (this.drawer.isOpen) this.drawer.turn(false);
    else this.#stop();
  }

  #choose(turn) {
    show(this.#current, turn);
    this.#keep(this.#current);
    this.#show();
    document.querySelector(`[data-turn="${CSS.escape(turn.id)}"] footer button`)?.focus();
  }

  // -- conversations --------------------------------------------------------------------------------------------

  #open(conversation) {
    this.#current = conversation;
    this.#settings.open = conversation.id;
    writeSettings(this.#settings);
    this.drawer.turn(false);
    this.end.follow();
    this.#show();
    if (matchMedia("(hover: hover)").matches) $("message").focus();
  }

  /** Put the conversation on top of the list, and keep it. */
  #keepFirst(conversation) {
    this.#conversations = [conversation, ...this.#conversations.filter((each) => each !== conversation)];
    this.#keep(conversation);
  }

  /** Keep the conversation as it is; one that was deleted meanwhile stays so. */
  async #keep(conversation) {
    if (!this.#conversations.includes(conversation)) return;
    try {
      await this.#kept.put(conversation);
    } catch {
      this.toast.say("Browser storage is full: the conversation is not saved.");
    }
  }

  #rename(conversation, title) {
    conversation.title = title === titleOf({ ...conversation, title: "" }) ? "" : title;
    this.#keep(conversation);
    this.#show();
  }

  #remove(conversation) {
    this.#running.get(conversation.id)?.controller.abort();
    this.#conversations = this.#conversations.filter((each) => each !== conversation);
    this.#kept.delete(conversation.id);
    if (conversation === this.#current) this.#open(newConversation(this.#settings.system));
    else this.#showSidebar();
    this.toast.say(`Deleted “${titleOf(conversation)}”.`, "Undo", () => {
      this.#keepFirst(conversation);
      this.#open(conversation);
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
      this.toast.say(`Imported ${found.length} ${found.length === 1 ? "conversation" : "conversations"}.`);
      this.#showSidebar();
    } catch (error) {
      this.toast.say(error.message);
    }
  }

  // -- settings and models --------------------------------------------------------------------------------------

  #changed({ system, key, keepKey, settings }) {
    if (system !== undefined) {
      this.#current.system = this.#settings.system = system;
      this.#keep(this.#current);
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
    const enter = el("button", { type: "button", onclick: () => this.#askForKey() }, "Enter a key");
    const again = el("button", { type: "button", onclick: () => this.#learnModels() }, "Try again");
    $("notice").replaceChildren(el("span", {}, error.message), error.needsKey ? enter : again);
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
    this.end.keep();
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
    this.end.keep();
  }
}

new Chat().start();
