"""What the bodies of text frontends (KoboldAI's, text-generation-webui's) have in common: a text and its settings, with
a default length of the answer, and a prompt that is cut where it is too long."""

from __future__ import annotations

from typing import ClassVar

from console.api.cut_prompts import Cut, room_for_prompt
from console.api.prompts import Prompt, negative_prompt_ids
from console.api.sampler_order import dynamic_alone
from console.api.sampling import SamplingFields, sampling_params
from console.api.served import ServedModel
from engine.config import SamplingParams


class FrontendBody(SamplingFields):
    """A prompt and its settings. length_field, context_field: what the dialect calls the most tokens of the answer,
    and of prompt and answer together."""

    length_field: ClassVar[str]
    context_field: ClassVar[str]

    prompt: str

    async def params(self, model: ServedModel) -> SamplingParams:
        """What the engine is told; raises InvalidRequest."""
        negative_ids = await negative_prompt_ids(self, model)
        most = getattr(self, self.length_field)
        return dynamic_alone(
            sampling_params(self._completed(), model, max_tokens=most, negative_prompt_ids=negative_ids)
        )

    async def prompt_for(self, model: ServedModel) -> Prompt:
        """The end of the prompt that leaves room for the answer; raises InvalidRequest."""
        answer, context = self.length_field, self.context_field
        room = room_for_prompt(getattr(self, answer), getattr(self, context), model, answer=answer, context=context)
        return await self._cut(room).prompt(model)

    def _completed(self) -> SamplingFields:
        """With what the dialect says in fields of its own."""
        return self

    def _cut(self, room: int) -> Cut:
        """The prompt, of which `room` tokens are kept."""
        return Cut(self.prompt, room)
