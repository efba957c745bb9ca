// Storage of this browser: conversations in IndexedDB, settings in localStorage. Nothing of it leaves the browser.

const DATABASE = "ericllm-chat";
const TABLE = "conversations";
const SETTINGS = "ericllm-chat-settings";
const KEY = "ericllm-chat-key";

const promised = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** The conversations of this browser. */
export class Conversations {
  #database;

  /** Opens them; where the browser keeps nothing (a private window), they last as long as the page. */
  static async open() {
    const kept = new Conversations();
    try {
      const opening = indexedDB.open(DATABASE, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
      kept.#database = await promised(opening);
    } catch {
      kept.#database = null;
    }
    return kept;
  }

  /** True if they are saved beyond the page. */
  get lasting() {
    return this.#database !== null;
  }

  /** All of them, the one that changed last first. */
  async all() {
    const found = this.#database ? await promised(this.#database.transaction(TABLE).objectStore(TABLE).getAll()) : [];
    return found.sort((one, other) => other.changedAt - one.changedAt);
  }

  async put(conversation) {
    await this.#change((table) => table.put(conversation));
  }

  async delete(id) {
    await this.#change((table) => table.delete(id));
  }

  /** Resolves once the change is saved; committed at once, so that it survives leaving the page. */
  async #change(change) {
    if (!this.#database) return;
    const transaction = this.#database.transaction(TABLE, "readwrite");
    change(transaction.objectStore(TABLE));
    transaction.commit();
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

/** The saved settings, {} at first. */
export function readSettings() {
  try {
    const found = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
    return found && typeof found === "object" ? found : {};
  } catch {
    return {};
  }
}

export const writeSettings = (settings) => quietly(() => localStorage.setItem(SETTINGS, JSON.stringify(settings)));

/** The saved key, "" for none. */
export const readKey = () => quietly(() => localStorage.getItem(KEY)) ?? "";

/** Save the key, or remove it where `keep` is false. */
export const writeKey = (key, keep) =>
  quietly(() => (keep && key ? localStorage.setItem(KEY, key) : localStorage.removeItem(KEY)));

function quietly(action) {
  try {
    return action();
  } catch {
    return null; // the browser keeps nothing
  }
}
