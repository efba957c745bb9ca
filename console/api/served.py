"""The model that answers: its name, its tokenizer and its limits, as one HTTP request sees them from start to end."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from console.api.versions import product_version
from engine.backends.base import LoadedModel
from engine.config import shown
from engine.engine import Engine, Serving
from engine.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, NoModelLoaded
from engine.snapshot import ModelStatus
from engine.text.tokenizer import Tokenizer, TokenSpan

LONG_TEXT = 16_384
MANY_TOKENS = 4096
RETRY_LOADING_S = 5.0

_NO_NAMES = frozenset({"dummy", "tgi"})
"""What clients of TGI, which has one model, send for its name: huggingface_hub's by itself, others as its docs say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that is ready. name: what its answers call it, as the client did where it named one.

    asked: what the client named, "" for nothing.  key, adapter: as in GenerateRequest.
    shares_system: whether its workers share what they computed of system prompts among all clients.
    """

    name: str
    asked: str
    key: str
    adapter: str
    loaded: LoadedModel
    tokenizer: Tokenizer
    shares_system: bool = False

    @property
    def fingerprint(self) -> str:
        """All that an answer depends on besides its request, in a few characters."""
        loaded = self.loaded
        computed = (loaded.backend, loaded.dtype, loaded.attention, loaded.linear, *loaded.devices)
        text = "\n".join((product_version(), self.key, self.adapter, *computed))
        return f"fp_{hashlib.blake2s(text.encode(), digest_size=5).hexdigest()}"

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text; long ones are tokenized beside the event loop, which the tokenizer leaves free meanwhile.

        Raises ContextLengthExceeded, before the work, for a text that cannot fit however few tokens it makes.
        """
        if sum(map(len, texts)) < LONG_TEXT:
            return self.tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
        self._refuse_endless(max(map(len, texts)))
        return await asyncio.to_thread(self.tokenizer.encode_all, texts, add_special_tokens=add_special_tokens)

    async def spans(self, text: str) -> list[TokenSpan]:
        """The tokens of a text and where they stand in it; raises as `encode` does."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.spans(text)
        self._refuse_endless(len(text))
        return await asyncio.to_thread(self.tokenizer.spans, text)

    async def decode(self, token_ids: list[int], param: str) -> str:
        """What a prompt of ids says; long ones are read beside the event loop.

        Raises InvalidRequest naming `param` for an id that the model has no token for, and ContextLengthExceeded,
        before the work, for more of them than can fit.
        """
        if len(token_ids) > (most := self.loaded.max_model_len):
            raise ContextLengthExceeded(
                f"the prompt has {len(token_ids)} tokens; with the answer's first token it may have {most}",
                param="prompt",
                prompt_tokens=len(token_ids),
                limit=most - 1,
                max_model_len=most,
            )
        self.check_token_ids(token_ids, param)
        if len(token_ids) < MANY_TOKENS:
            return self.tokenizer.decode(token_ids)
        return await asyncio.to_thread(self.tokenizer.decode, token_ids)

    def _refuse_endless(self, characters: int) -> None:
        least, most = characters // self.tokenizer.longest_token, self.loaded.max_model_len
        if least > most:
            raise ContextLengthExceeded(
                f"the prompt has {characters} characters, so {least} tokens at the very least; with the answer's first "
                f"token it may have {most}",
                param="prompt",
                prompt_tokens=least,
                at_least=True,
                limit=most - 1,
                max_model_len=most,
            )

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for an id that the model has no token for."""
        for token_id in token_ids:
            if not 0 <= token_id < self.loaded.vocab_size:
                last = self.loaded.vocab_size - 1
                raise InvalidRequest(
                    f"{param} holds {shown(token_id)}; the model's token ids lie between 0 and {last}", param=param
                )


async def served_model(engine: Engine, wanted: str | None, lora: str | None = None) -> ServedModel:
    """The model that `wanted` names (the first where it is empty), once it answers, with the adapter that `wanted` or
    `lora` names.

    Raises what Engine.serving does, ModelNotFound for an adapter that the model lacks, and InvalidRequest where its
    backend takes none per request.
    """
    try:
        serving = await engine.serving(wanted or "")
    except ModelNotFound:
        if wanted not in _NO_NAMES:
            raise
        wanted = ""
        serving = await engine.serving("")
    return ServedModel(
        name=wanted or serving.name,
        asked=wanted or "",
        key=serving.key,
        adapter=_adapter(serving, lora),
        loaded=serving.model,
        tokenizer=serving.tokenizer,
        shares_system=engine.prefix_sharing == "system",
    )


def _adapter(serving: Serving, lora: str | None) -> str:
    if not lora:
        return serving.adapter
    if serving.adapter and serving.adapter != lora:
        raise InvalidRequest("model and lora name different adapters; send one of them", param="lora")
    if not serving.model.adapters_per_request:
        raise InvalidRequest(_fixed(serving), param="lora")
    if lora not in serving.adapters:
        available = ", ".join(serving.adapters)
        raise ModelNotFound(
            f"{serving.name} has no adapter {lora!r}; available: {available or 'none'}",
            param="lora",
            model=lora,
            available=available,
        )
    return lora


def _fixed(serving: Serving) -> str:
    """Why no request can choose its adapter."""
    same = f"the adapter {serving.spec.lora.name}" if serving.spec.lora is not None else "no adapter"
    return (
        f"the {serving.model.backend} backend takes no adapter per request: "
        f"all those of {serving.name} are computed with {same}"
    )


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
