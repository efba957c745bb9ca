// A conversation is a tree of turns, so that an edit or another answer loses nothing: `leaf` names the last turn of the
// branch that is shown. A turn's parent always stands before it in `turns`. Pure: no DOM, no storage.

const FORMAT = "ericllm-conversations";
const MAX_TITLE = 60;

export const newId = () => crypto.getRandomValues(new Uint32Array(4)).reduce((id, part) => id + part.toString(36), "");

/** A conversation without a turn. */
export function newConversation(system = "") {
  const now = Date.now();
  return { id: newId(), title: "", createdAt: now, changedAt: now, system, turns: [], leaf: null };
}

/** Display title: the name that it was given, else its first question. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.turns.find((turn) => turn.role === "user");
  return first ? shortened(first.text) : "New conversation";
}

/** The turns of the branch that is shown, first to last. */
export function path(conversation) {
  const byId = new Map(conversation.turns.map((turn) => [turn.id, turn]));
  const found = [];
  for (let turn = byId.get(conversation.leaf); turn; turn = byId.get(turn.parent)) found.push(turn);
  return found.reverse();
}

/** Put a turn after `parent` (a turn's id, null for the start) and show it. */
export function addTurn(conversation, parent, role, text) {
  const turn = { id: newId(), parent, role, text, at: Date.now() };
  conversation.turns.push(turn);
  conversation.leaf = turn.id;
  conversation.changedAt = turn.at;
  return turn;
}

/** The turns that stand at the same place, `turn` among them. */
export const versions = (conversation, turn) =>
  conversation.turns.filter((other) => other.parent === turn.parent && other.role === turn.role);

/** Show the branch that goes through `turn`, to the latest of what came after it. */
export function show(conversation, turn) {
  let last = turn;
  for (let next = turn; next; next = conversation.turns.findLast((other) => other.parent === last.id)) last = next;
  conversation.leaf = last.id;
}

/**
 * Messages as the API takes them: the system prompt, then turns. An answer that never came is none, and two questions in
 * a row are one: templates want the roles to alternate.
 */
export function messages(conversation, turns) {
  const found = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  for (const { role, text } of turns) {
    if (!text.trim()) continue;
    if (found.at(-1)?.role === role) found.at(-1).content += `\n\n${text}`;
    else found.push({ role, content: text });
  }
  return found;
}

/** Conversations as the text of a file. */
export const exported = (conversations) => JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);

/** The conversations in such a text, each with an id of its own; throws an Error that says what is wrong with it. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("That file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("That file has no conversations exported from this page.");
  }
  return file.conversations.map(readConversation);
}

function readConversation(given, place) {
  const wrong = (what) => new Error(`Conversation ${place + 1} of that file ${what}.`);
  if (!Array.isArray(given?.turns)) throw wrong("has no turns");
  const ids = new Map();
  const turns = given.turns.map((turn) => {
    const known = turn?.parent === null || ids.has(turn?.parent);
    if (!known || !["user", "assistant"].includes(turn.role) || typeof turn.text !== "string") {
      throw wrong("has an invalid turn");
    }
    const id = newId();
    ids.set(turn.id, id);
    return { ...readTurn(turn), id, parent: turn.parent === null ? null : ids.get(turn.parent) };
  });
  const now = Date.now();
  return {
    id: newId(),
    title: textOr(given.title),
    createdAt: numberOr(given.createdAt, now),
    changedAt: numberOr(given.changedAt, now),
    system: textOr(given.system),
    turns,
    leaf: ids.get(given.leaf) ?? turns.at(-1)?.id ?? null,
  };
}

function readTurn({ role, text, at, model, finish, error, stats, thinking, thinkingMs }) {
  const turn = { role, text, at: numberOr(at, Date.now()) };
  for (const [name, value] of Object.entries({ model, finish, error, thinking })) {
    if (typeof value === "string") turn[name] = value;
  }
  if (Number.isFinite(thinkingMs)) turn.thinkingMs = thinkingMs;
  if (stats && typeof stats === "object") {
    turn.stats = { tokens: numberOr(stats.tokens, null), firstMs: numberOr(stats.firstMs, null), rate: numberOr(stats.rate, null) };
  }
  return turn;
}

const textOr = (value) => (typeof value === "string" ? value : "");
const numberOr = (value, other) => (Number.isFinite(value) ? value : other);

function shortened(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line || "…";
}
