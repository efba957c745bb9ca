"""What the engine is told of a request to /api/generate or /api/chat."""

from __future__ import annotations

import asyncio

from console.api.ollama.body import AnswerBody
from console.api.ollama.options import Options, options_params
from console.api.prompts import Prompt
from console.api.served import ServedModel
from engine.config import SamplingParams


async def answer_params(body: AnswerBody, options: Options, model: ServedModel, prompt: Prompt) -> SamplingParams:
    """The options, and the format where there is one. Raises InvalidRequest naming the field as Ollama does."""
    params = options_params(options, model, prompt_tokens=len(prompt.ids), logprobs=body.wanted_logprobs)
    return await asyncio.to_thread(body.applied, params) if body.format else body.applied(params)
