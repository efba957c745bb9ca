"""One request as a job of the library's: token ids in, token ids out."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from engine.backends.base import BackendRequest, TokenMask
from engine.backends.exllama.bias import TokenBias
from engine.backends.exllama.cache_scope import CacheScope
from engine.backends.exllama.choosing import Choosing, Chosen
from engine.backends.exllama.draws import Draws
from engine.backends.exllama.parts import Library
from engine.backends.exllama.sampling import settings_of, uses_xtc
from engine.backends.exllama.sizes import PAGE_TOKENS


class Job:
    """A job that has been made, and how far it is. Text, stop strings and end tokens are not the library's here.

    root: as in CacheScope.
    handle: the library's job.   identifier: what its results carry.
    """

    def __init__(
        self,
        library: Library,
        request: BackendRequest,
        *,
        new_tokens: int,
        draft_tokens: int,
        vocab_size: int,
        root: bytes = b"",
        mask: TokenMask | None = None,
    ) -> None:
        params = request.params
        prompts = [request.prompt_ids] if params.cfg_scale == 1.0 else [request.prompt_ids, params.negative_prompt_ids]
        self.identifier = request.id
        self.places = len(prompts)
        self.known_tokens = len(request.prompt_ids) + len(request.generated)
        self.handle: Any = library.job(
            input_ids=[torch.tensor([[*prompt, *request.generated]]) for prompt in prompts],
            # The library ends a job that many guesses early.
            max_new_tokens=new_tokens + draft_tokens,
            gen_settings=library.settings(**settings_of(params, vocab_size)),
            return_top_tokens=min(int(1 / params.xtc_threshold), vocab_size) if uses_xtc(params) else 0,
            identifier=request.id,
        )
        CacheScope(self.handle, library.page_hash, root)
        if mask is not None:
            mask.restart(request.generated)
        self._choosing = Choosing(
            self.handle,
            params,
            _bias(request, vocab_size, masked=mask is not None),
            Draws(params.seed or 0),
            tokens=len(request.generated),
            vocab_size=vocab_size,
            mask=mask,
        )

    @property
    def failed(self) -> bool:
        """Whether there was nothing to choose from."""
        return self._choosing.failed

    @property
    def why_failed(self) -> str:
        """Why there was nothing to choose from."""
        return self._choosing.why_failed

    @property
    def whole(self) -> bool:
        """Whether its mask allows nothing more after what was chosen."""
        return self._choosing.whole

    def take(self) -> list[Chosen]:
        """The tokens since the last call."""
        return self._choosing.take()

    def tokens(self) -> list[int]:
        """All tokens of its own sequence known so far."""
        known: list[int] = self.handle.sequences[0].sequence_ids.torch()[0].tolist()
        return known

    @property
    def started(self) -> bool:
        """Whether it holds pages; before, and after its end, it does not."""
        return bool(self.handle.sequences[0].allocated_pages)

    @property
    def decoding(self) -> bool:
        """Whether its prompt is computed, but for the last token, which the first step of decoding computes."""
        return bool(self.handle.is_prefill_done())

    @property
    def computed_tokens(self) -> int:
        """Tokens of its own sequence whose keys and values are in the cache."""
        return int(self.handle.sequences[0].kv_position)

    @property
    def length(self) -> int:
        """Tokens of its own sequence known so far."""
        return len(self.handle.sequences[0].sequence_ids)

    @property
    def cached_tokens(self) -> int:
        """Tokens per sequence that were found in the prefix cache."""
        return int((self.handle.cached_pages * PAGE_TOKENS + self.handle.cached_tokens) // self.places)

    @property
    def draft_accepted(self) -> int:
        """Guesses that held, so far."""
        return int(self.handle.accepted_draft_tokens)

    @property
    def draft_tokens(self) -> int:
        """Guesses so far."""
        return int(self.handle.accepted_draft_tokens + self.handle.rejected_draft_tokens)


def _bias(request: BackendRequest, vocab_size: int, *, masked: bool) -> TokenBias:
    """masked: a mask decides on end tokens."""
    params = msgspec.structs.replace(request.params, min_tokens=0) if masked else request.params
    return TokenBias(
        params,
        prompt_tokens=len(request.prompt_ids),
        end_token_ids=tuple(token_id for token_id in request.end_token_ids if token_id < vocab_size),
        banned_next=tuple(token_id for token_id in request.banned_next if token_id < vocab_size),
        first=len(request.generated),
    )
