// Streams an answer into its turn.

import { ApiError, answer } from "./client.js";

const SAVE_MS = 2000;

/**
 * Read an answer into `turn`, to its end, whatever that is: it then has finish, stats and, where it failed, error.
 * Where the model thinks it has thinking, and thinkingMs: from the first of that to the first of the text.
 * grew: called max once per frame while text arrives; save: called every 2 s, so that little is lost with the page.
 * Returns whether another key might help.
 */
export async function readInto(turn, body, key, signal, { grew, save }) {
  const began = performance.now();
  const pace = { began, first: null, last: began };
  let savedAt = began;
  let frame = 0;
  let usage = null;
  try {
    for await (const piece of answer(body, key, signal)) {
      usage = piece.usage ?? usage;
      turn.finish = piece.finish ?? turn.finish;
      if (!piece.text && !piece.thinking) continue;
      pace.last = performance.now();
      pace.first ??= pace.last;
      if (piece.thinking) turn.thinking = (turn.thinking ?? "") + piece.thinking;
      if (turn.thinking && !turn.text) turn.thinkingMs = pace.last - pace.first;
      turn.text += piece.text;
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        grew();
      });
      if (pace.last - savedAt > SAVE_MS) {
        savedAt = pace.last;
        save();
      }
    }
    turn.finish ??= "stop";
  } catch (error) {
    return failed(turn, error, signal);
  } finally {
    cancelAnimationFrame(frame);
    turn.stats = statsOf(usage, pace);
  }
  return false;
}

function failed(turn, error, signal) {
  if (signal.aborted) {
    turn.finish = "stopped";
    return false;
  }
  turn.finish = "error";
  turn.error = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
  return error instanceof ApiError && error.needsKey;
}

/** How fast an answer came, as this browser saw it. usage: the server's count of tokens, null where it sent none. */
function statsOf(usage, { began, first, last }) {
  if (first === null) return null;
  const tokens = usage?.completion_tokens ?? null;
  const rate = tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null;
  return { tokens, rate, firstMs: first - began, context: usage?.total_tokens ?? null };
}
