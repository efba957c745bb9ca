"""One live request of the torch backend, and what it tells of each step that brought it something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.backends.base import BackendRequest, TokenEvent, TokenMask
from engine.backends.torch.drawn import SampledToken
from engine.backends.torch.lora import LoraAdapter
from engine.backends.torch.prompts import Telling, telling_of
from engine.backends.torch.sampler import SampleRow
from engine.backends.torch.sequences import Sequence as TokenSequence

NOT_FINITE = "the model gave no finite probabilities for it"


@dataclass(slots=True)
class Job:
    """A request's sequence for the scheduler, its row for the sampler, the adapter that it holds, and what is still to
    be told of its prompt."""

    sequence: TokenSequence
    row: SampleRow
    adapter: LoraAdapter | None
    telling: Telling | None
    begun: bool = False

    @classmethod
    def of(cls, request: BackendRequest, adapter: LoraAdapter | None, mask: TokenMask | None, vocab_size: int) -> Job:
        """A request, before anything of it happens."""
        telling = telling_of(request)
        prompt_tokens, most = len(request.prompt_ids), request.params.max_tokens
        sequence = TokenSequence(
            request.id,
            [*request.prompt_ids, *request.generated],
            prompt_tokens=prompt_tokens,
            adapter=adapter.key if adapter is not None else "",
            cache_scope=request.cache_scope,
            shared_tokens=request.shared_tokens,
            answers=most != 0,
            limit=prompt_tokens + most if most is not None else None,
            tell=telling.until if telling is not None else 0,
            resumed=request.resumed,
        )
        row = SampleRow(
            request.params,
            prompt_ids=request.prompt_ids,
            generated=request.generated,
            end_token_ids=[token_id for token_id in request.end_token_ids if token_id < vocab_size],
            banned_next=request.banned_next,
            mask=mask,
        )
        return cls(sequence, row, adapter, telling)

    @property
    def foreseeable(self) -> bool:
        """Whether tokens may be guessed ahead of it."""
        return self.row.foreseeable and self.sequence.answers

    def told(self, tokens: Sequence[SampledToken], *, ended: bool) -> Iterator[TokenEvent]:
        """Take its new tokens; ended: whether they are its last ones."""
        for left, token in zip(reversed(range(len(tokens))), tokens, strict=True):
            self.row.push(token.token_id)
            whole = self.row.mask is not None and self.row.mask.ended
            yield TokenEvent(
                request_id=self.sequence.id,
                token_id=token.token_id,
                logprob=token.logprob,
                finish="stop" if whole else "length" if ended and not left else None,
                cached_tokens=None if self.begun else self.sequence.cached_tokens,
                prompt_logprobs=self.telling.logprobs if self.telling is not None else (),
            )
            self.begun, self.telling = True, None

    def computed(self) -> TokenEvent:
        """Its end, where it is to have no answer and its prompt is computed."""
        vector = self.telling.vector if self.telling is not None else b""
        return TokenEvent(
            request_id=self.sequence.id,
            finish="stop" if vector else "length",
            cached_tokens=self.sequence.cached_tokens,
            prompt_logprobs=self.telling.logprobs if self.telling is not None else (),
            vector=vector,
        )

    @property
    def why_nothing(self) -> str:
        """Why no token could be chosen for it."""
        mask = self.row.mask
        return NOT_FINITE if mask is None or not mask.error else f"its grammar allows nothing more: {mask.error}"
