"""mistral.rs, whose wheel has no server: its Runner, with a thread for each client. It takes text alone, so prompts are
words that its tokenizer makes as many tokens of. `mode` is what its weights are quantised to at load, "" for bf16."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import islice
from threading import Lock

import mistralrs

from tools.benchmarks.protocol import Answer, Given, Prompt, Ready, serve


@asynccontextmanager
async def loaded(given: Given) -> AsyncIterator[Ready]:
    """Load the model."""
    runner = mistralrs.Runner(
        which=mistralrs.Which.Plain(model_id=str(given.model), dtype=mistralrs.ModelDType.BF16),
        max_seqs=given.clients,
        in_situ_quant=given.mode or None,
        prefix_cache_n=0,
    )
    vocabulary: dict[str, int] = json.loads((given.model / "tokenizer.json").read_text(encoding="utf-8"))["model"][
        "vocab"
    ]
    words = {number: word for word, number in vocabulary.items() if word.isascii() and word.isalpha()}
    threads, sending = ThreadPoolExecutor(given.clients), Lock()

    def text(prompt: Prompt) -> str:
        """Each word but the first has its space before it as a token of its own."""
        plain = (words[number] for number in prompt if number in words)
        return " ".join(islice(plain, (len(prompt) + 1) // 2))

    def answered(prompt: Prompt, tokens: int, answer: Answer) -> None:
        request = mistralrs.ChatCompletionRequest(
            messages=text(prompt),
            model="default",
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            stream=True,
        )
        with sending:  # it takes one request at a time, and then streams many
            chunks = runner.send_chat_completion_request(request)
        for chunk in chunks:
            answer.arrived()
            if chunk.usage:
                answer.tokens = chunk.usage.completion_tokens

    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        await asyncio.get_running_loop().run_in_executor(threads, answered, prompt, tokens, answer)

    yield Ready("int8" if given.mode else "bf16", ask=ask)


if __name__ == "__main__":
    serve(loaded, ["mistralrs"])
