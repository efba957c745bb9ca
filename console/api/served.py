"""The model that answers: its name, its tokenizer and its limits, as one HTTP request sees them from start to end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.base import LoadedModel
from engine.config import shown
from engine.engine import Engine
from engine.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, NoModelLoaded
from engine.snapshot import ModelStatus
from engine.text.tokenizer import Tokenizer

LONG_TEXT = 16_384
RETRY_LOADING_S = 5.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready. name: what clients call it."""

    name: str
    loaded: LoadedModel
    tokenizer: Tokenizer

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text; long ones are tokenized beside the event loop, which the tokenizer leaves free meanwhile.

        Raises ContextLengthExceeded, before the work, for a text that cannot fit however few tokens it makes.
        """
        if sum(map(len, texts)) < LONG_TEXT:
            return self.tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
        self._refuse_endless(max(map(len, texts)))
        return await asyncio.to_thread(self.tokenizer.encode_all, texts, add_special_tokens=add_special_tokens)

    def _refuse_endless(self, characters: int) -> None:
        least, limit = characters // self.tokenizer.longest_token, self.loaded.max_model_len
        if least > limit:
            raise ContextLengthExceeded(
                f"the prompt has {characters} characters, so {least} tokens at the very least; with the answer's first "
                f"token it may have {limit}",
                param="prompt",
                limit=limit,
            )

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for an id that the model has no token for."""
        for token_id in token_ids:
            if not 0 <= token_id < self.loaded.vocab_size:
                last = self.loaded.vocab_size - 1
                raise InvalidRequest(
                    f"{param} holds {shown(token_id)}; the model's token ids lie between 0 and {last}", param=param
                )


def served_model(engine: Engine, wanted: str | None) -> ServedModel:
    """The loaded model, where `wanted` names it or is empty.

    Raises NoModelLoaded with the state, or ModelNotFound with what there is.
    """
    status = engine.status
    tokenizer = engine.tokenizer
    if status.state != "ready" or status.spec is None or status.model is None or tokenizer is None:
        raise not_ready(status)
    if wanted and wanted != status.spec.name:
        raise ModelNotFound(
            f"There is no model {wanted!r} here; available: {status.spec.name}",
            param="model",
            model=wanted,
            available=status.spec.name,
        )
    return ServedModel(name=status.spec.name, loaded=status.model, tokenizer=tokenizer)


def not_ready(status: ModelStatus) -> NoModelLoaded:
    """Why no model answers."""
    sentence = "No model is loaded"
    if status.state == "failed" and status.error is not None:
        sentence = "No model is loaded: the last load failed"
    elif status.state != "unloaded" and status.spec is not None:
        sentence = f"The model {status.spec.name} is {status.state}"
    elif status.state != "unloaded":
        sentence = f"The model is {status.state}"
    return NoModelLoaded(sentence, state=status.state, retry_after_s=RETRY_LOADING_S)
