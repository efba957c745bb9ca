"""What clients of text-generation-webui's own API send."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from console.api.body import Body
from console.api.cut_prompts import Cut, room_for_prompt
from console.api.parameters import FRONTEND_INERT, TEXTGEN_REFUSED
from console.api.prompts import Prompt, negative_prompt_ids
from console.api.sampler_order import dynamic_alone
from console.api.sampling import SamplingFields, sampling_params
from console.api.served import ServedModel
from engine.config import SamplingParams

_ALIASES = {
    **SamplingFields.aliases,
    "max_context_length": "truncation_length",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
}


class TextgenBody(SamplingFields):
    """A prompt and its settings, with text-generation-webui's defaults.

    do_sample: without it the likeliest tokens are taken.  truncation_length: tokens of prompt and answer together, the
    model's context where it is left out; of a prompt that is too long the end is kept.
    """

    refused = TEXTGEN_REFUSED
    inert = FRONTEND_INERT
    aliases = _ALIASES

    prompt: str
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

    def limited(self, most: int | None) -> Self:
        """The body, its answer no longer than any may be where the client has not said how long."""
        if most is None or "max_new_tokens" in self.model_fields_set:
            return self
        return self.model_copy(update={"max_new_tokens": min(self.max_new_tokens, most)})

    async def params(self, model: ServedModel) -> SamplingParams:
        """What the engine is told; raises InvalidRequest."""
        fields = self if self.do_sample else self.model_copy(update={"temperature": 0.0})
        negative_ids = await negative_prompt_ids(self, model)
        return dynamic_alone(
            sampling_params(fields, model, max_tokens=self.max_new_tokens, negative_prompt_ids=negative_ids)
        )

    async def prompt_for(self, model: ServedModel) -> Prompt:
        """The end of the prompt that leaves room for the answer; raises InvalidRequest."""
        room = room_for_prompt(
            self.max_new_tokens, self.truncation_length, model, answer="max_new_tokens", context="truncation_length"
        )
        return await Cut(self.prompt, room, add_special_tokens=self.add_bos_token).prompt(model)


class CountBody(Body):
    """A text whose tokens are counted."""

    prompt: str


class ModelBody(Body):
    """What is to be told or done about the model."""

    action: str = ""
    model_name: str | None = None
    args: dict[str, object] | None = None
    settings: dict[str, object] | None = None
    lora: object = None
