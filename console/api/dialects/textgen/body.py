"""Bodies that clients of text-generation-webui's own API send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, WithJsonSchema

from console.api.requests.body import Body
from console.api.requests.parameters import (
    CONTEXT_LENGTH,
    DEFAULT_TO_LIMIT,
    FRONTEND_INERT,
    SAMPLING_CLAMPED,
    SAMPLING_REFUSED,
    Refusal,
)
from console.api.requests.sampling import SamplingFields
from console.api.requests.text_frontends import FrontendBody, TruncatedPrompt
from engine.config import RANGES

_ALIASES = {
    **SamplingFields.aliases,
    "max_context_length": "truncation_length",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
}


_REFUSED: Mapping[str, Refusal] = {
    **{name: refusal for name, refusal in SAMPLING_REFUSED.items() if name != "do_sample"},
    "chat_generation_attempts": Refusal("send the prompt again for another answer", (1,)),
    "custom_stopping_strings": Refusal("use stopping_strings"),
    "preset": Refusal("presets are not stored; send their settings", ("None",)),
    "stop_at_newline": Refusal('put "\\n" into stopping_strings', (False,)),
    "use_max_seq_len": Refusal("set max_new_tokens", (False,)),
}

_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_new_tokens": DEFAULT_TO_LIMIT,
    "prompt": "to its end, if it is too long",
    "truncation_length": CONTEXT_LENGTH,
}


class TextgenBody(FrontendBody):
    """A prompt and its settings, with text-generation-webui's defaults.

    do_sample: false for greedy sampling.  truncation_length: tokens of prompt and answer together, by default the
    model's context; a prompt that is too long loses its beginning.
    """

    refused = _REFUSED
    inert = FRONTEND_INERT
    clamped = _CLAMPED
    aliases = _ALIASES
    length_field = "max_new_tokens"
    context_field = "truncation_length"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {**RANGES, length_field: RANGES["max_tokens"]}

    max_new_tokens: Annotated[int, Field(ge=1)] = 200
    do_sample: bool = True
    temperature: float | None = 0.5
    top_p: float | None = 1.0
    top_k: Annotated[int | None, Field(ge=-1)] = 0
    min_p: float | None = 0.0
    typical_p: float | None = 1.0
    repetition_penalty: float | None = 1.1
    truncation_length: Annotated[int | None, Field(ge=1)] = None
    add_bos_token: bool = True

    def _sampling_fields(self) -> SamplingFields:
        return self if self.do_sample else self.model_copy(update={"temperature": 0.0})

    def _truncated(self, room: int) -> TruncatedPrompt:
        return TruncatedPrompt(self.prompt, room, add_special_tokens=self.add_bos_token)


class CountBody(Body):
    """A text to count the tokens of."""

    prompt: str


class ModelBody(Body):
    """A question about the models."""

    action: Annotated[str, WithJsonSchema({"enum": ["", "info", "list", "list_lora"]})] = ""
    model_name: str | None = None
    args: dict[str, object] | None = None
    settings: dict[str, object] | None = None
    lora: object = None
