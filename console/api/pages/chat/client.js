// Client of the API: lists models, and streams answers.

const at = (path) => new URL(`../${path}`, import.meta.url);

/** Why there is no answer. status: of HTTP, 0 where the server could not be reached. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  /** Whether another key might help. */
  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

/** The models that a request may name: [{id, max_model_len, ...}]. Throws ApiError. */
export async function models(key) {
  const response = await ask("v1/models", { headers: headers(key) });
  return (await response.json()).data;
}

/**
 * The pieces of an answer: {thinking, text}, and {finish} and {usage} where present. Throws ApiError, and what `signal`
 * is aborted with.
 */
export async function* answer(body, key, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let ended = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      ended = true;
      continue;
    }
    const { error, choices, usage } = JSON.parse(data);
    if (error) throw new ApiError(error.message, response.status);
    const choice = choices?.[0];
    const { reasoning_content: thinking, content: text } = choice?.delta ?? {};
    yield { thinking: thinking ?? "", text: text ?? "", finish: choice?.finish_reason ?? null, usage: usage ?? null };
  }
  if (!ended) throw new ApiError("Connection lost before the answer was complete.", 0);
}

/** The data of each server-sent event in a stream of bytes. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const frames = (rest + value).split(/\r?\n\r?\n/);
      rest = frames.pop();
      for (const frame of frames) {
        const lines = frame.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function ask(path, options) {
  let response;
  try {
    response = await fetch(at(path), { credentials: "omit", referrerPolicy: "no-referrer", ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  throw new ApiError(await errorMessage(response), response.status);
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}.`;
  }
}
