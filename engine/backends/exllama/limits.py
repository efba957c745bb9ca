"""What fits: lengths, pages and places of a request, checked before the library's assertions could be. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.backends.base import BackendRequest
from engine.backends.exllama.parts import LoadedParts
from engine.backends.exllama.sizes import PAGE_TOKENS
from engine.config import ModelSpec
from engine.errors import ContextLengthExceeded, InvalidRequest

LEASE_TOKENS = 512
"""The library takes pages for a whole answer before it starts. An answer that may be long gets them for this many
tokens at a time instead: it goes on from the prefix cache, and those that wait have their turn in between."""


def sequence_lengths(request: BackendRequest) -> tuple[int, ...]:
    """Tokens of the sequences that the request runs as: with classifier-free guidance there are two."""
    prompts = [request.prompt_ids]
    if request.params.cfg_scale != 1.0:
        prompts.append(list(request.params.negative_prompt_ids))
    return tuple(len(prompt) + len(request.generated) for prompt in prompts)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker can hold.

    pages: KV pages of all requests together.      max_model_len: tokens of one sequence.
    max_input_len: tokens of one prompt.           draft_tokens: tokens guessed ahead per step.
    places: sequences of one step.                 vocab_size: token ids are below it.
    min_prompt: the shortest prompt that can be worked on.
    """

    pages: int
    max_model_len: int
    max_input_len: int | None
    draft_tokens: int
    places: int
    vocab_size: int
    min_prompt: int = 1

    def room(self, lengths: Sequence[int]) -> int:
        """How many tokens can follow sequences of these lengths, all growing alike; 0 or less where none can.

        Guesses take room as tokens do: a step computes them before it knows whether they hold.
        """
        free = self.max_model_len - max(lengths) - self.draft_tokens
        return bisect_right(range(1, free + 1), 0, key=lambda new: self.pages_of(lengths, new) > self.pages)

    def wanted(self, request: BackendRequest) -> int:
        """How many tokens the request can still get: as many as it wants and there is room for, if any."""
        room = self.room(sequence_lengths(request))
        limit = request.params.max_tokens
        return room if limit is None else min(room, limit - len(request.generated))

    def pages_of(self, lengths: Sequence[int], new_tokens: int) -> int:
        """Pages that sequences of these lengths take for `new_tokens` more each."""
        return sum(-(-(length + new_tokens + self.draft_tokens) // PAGE_TOKENS) for length in lengths)

    def refuse(self, request: BackendRequest) -> None:
        """Raise ContextLengthExceeded with the numbers, or InvalidRequest naming the field, where it can never run."""
        self._refuse_tokens(request)
        self._refuse_length(request)
        self._refuse_guidance(request)

    def _refuse_tokens(self, request: BackendRequest) -> None:
        params = request.params
        for param, token_ids in (
            ("prompt", request.prompt_ids),
            ("generated", request.generated),
            ("logit_bias", params.logit_bias),
            ("negative_prompt", params.negative_prompt_ids),
        ):
            wrong = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"{param} names token {wrong}; the model has {self.vocab_size}", param=param, value=wrong
                )
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty; it takes one token at least", param="prompt")
        if len(request.prompt_ids) < self.min_prompt:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt_ids)} tokens; guessing from the request's own text takes "
                f"{self.min_prompt} at least",
                param="prompt",
                value=len(request.prompt_ids),
            )

    def _refuse_length(self, request: BackendRequest) -> None:
        held = self.pages * PAGE_TOKENS
        guesses = f" with {self.draft_tokens} guessed ahead" if self.draft_tokens else ""
        limit, reason = min(
            (self.max_input_len or self.max_model_len, f"max_input_len is {self.max_input_len}"),
            (
                self.max_model_len - 1 - self.draft_tokens,
                f"the context is {self.max_model_len} tokens{guesses}, and the answer takes one at least",
            ),
            (
                held - 1 - self.draft_tokens,
                f"the KV pages hold {held} tokens{guesses}, and the answer takes one at least",
            ),
        )
        prompt = len(request.prompt_ids)
        if prompt > limit:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens, more than the {limit} that can be taken: {reason}",
                prompt_tokens=prompt,
                limit=limit,
                max_model_len=self.max_model_len,
                pool_tokens=held,
            )

    def _refuse_guidance(self, request: BackendRequest) -> None:
        params = request.params
        if params.cfg_scale == 1.0:
            return
        if not params.negative_prompt_ids:
            raise InvalidRequest(
                f"cfg_scale is {params.cfg_scale:g} without a negative prompt to steer away from",
                param="negative_prompt",
            )
        if self.draft_tokens:
            raise InvalidRequest(
                f"cfg_scale is {params.cfg_scale:g}; a model loaded with speculation takes 1 alone", param="cfg_scale"
            )
        if self.places < 2:
            raise InvalidRequest(
                f"cfg_scale is {params.cfg_scale:g}, which works on two sequences at once; this worker has one place",
                param="cfg_scale",
            )
        lengths = len(request.prompt_ids), len(params.negative_prompt_ids)
        if self.room(lengths) < 1:
            raise ContextLengthExceeded(
                f"the prompt and the negative prompt have {lengths[0]} and {lengths[1]} tokens, too many for "
                f"{self.pages} pages of {PAGE_TOKENS} and a context of {self.max_model_len}",
                prompt_tokens=lengths[0],
                negative_prompt_tokens=lengths[1],
                limit=self.max_model_len,
                max_model_len=self.max_model_len,
                pool_tokens=self.pages * PAGE_TOKENS,
            )


def limits_of(parts: LoadedParts, spec: ModelSpec, generator: Any) -> Limits:
    """The limits of what was loaded. Guesses from a request's own text look at its last max_ngram - 1 tokens, and the
    library takes it for granted that they are there."""
    return Limits(
        pages=parts.pages,
        max_model_len=parts.info.max_model_len,
        max_input_len=spec.max_input_len,
        draft_tokens=parts.draft_tokens,
        places=generator.max_batch_size,
        vocab_size=parts.info.vocab_size,
        min_prompt=generator.max_ngram - 1 if generator.use_ngram_draft else 1,
    )
