"""Bodies that clients of KoboldAI and KoboldCpp send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from console.api.requests.body import Body
from console.api.requests.parameters import (
    CONTEXT_LENGTH,
    DEFAULT_TO_LIMIT,
    FRONTEND_INERT,
    SAMPLING_CLAMPED,
    SAMPLING_REFUSED,
    TEXT_ONLY,
    Refusal,
)
from console.api.requests.sampling import SamplingFields
from console.api.requests.text_frontends import FrontendBody, TruncatedPrompt
from engine.config import RANGES

_ALIASES = {
    **SamplingFields.aliases,
    "banned_tokens": "banned_strings",
    "grammar": "grammar_string",
    "max_new_tokens": "max_length",
    "max_tokens": "max_length",
    "n_predict": "max_length",
    "num_predict": "max_length",
    "truncation_length": "max_context_length",
    "use_default_badwordsids": "ban_eos_token",
}
_INERT = FRONTEND_INERT | {
    "gui_settings",  # names the settings, which are sent along
    "quiet",  # about the server's console; prompts are never printed
    "sampler_full_determinism",  # an answer with a seed is always the same
    "streaming",  # SillyTavern's own note of the endpoint that it uses, as the next
    "can_abort",
}


_NO_STORY = "stories are not stored; put it into the prompt"
_AS_THEY_ARE = "prompts and answers are not reformatted"

_REFUSED: Mapping[str, Refusal] = {
    **SAMPLING_REFUSED,
    "bypass_eos": Refusal("use ban_eos_token", (False,)),
    "disable_input_formatting": Refusal(_AS_THEY_ARE, (True,)),
    "disable_output_formatting": Refusal(_AS_THEY_ARE, (True,)),
    "frmtadsnsp": Refusal(_AS_THEY_ARE, (False,)),
    "frmtrmblln": Refusal(_AS_THEY_ARE, (False,)),
    "frmtrmspch": Refusal(_AS_THEY_ARE, (False,)),
    "frmttriminc": Refusal(_AS_THEY_ARE, (False,)),
    "grammar_retain_state": Refusal("a grammar is per request", (False,)),
    "images": Refusal(TEXT_ONLY),
    "soft_prompt": Refusal("soft prompts are not supported"),
    "use_authors_note": Refusal(_NO_STORY, (False,)),
    "use_memory": Refusal(_NO_STORY, (False,)),
    "use_story": Refusal(_NO_STORY, (False,)),
    "use_userscripts": Refusal(_NO_STORY, (False,)),
    "use_world_info": Refusal(_NO_STORY, (False,)),
}

_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_context_length": CONTEXT_LENGTH,
    "max_length": DEFAULT_TO_LIMIT,
    "prompt": "to its end, if it is too long",
}


class KoboldBody(FrontendBody):
    """A prompt and its settings, with KoboldCpp's defaults.

    memory: text before the prompt, never truncated.  max_context_length: tokens of prompt and answer together, by
    default the model's context; a prompt that is too long loses its beginning.
    trim_stop: end an answer before its stop sequence.  singleline: end it after its first line.
    genkey: for requests that read or stop the answer.  render_special: show control tokens.
    """

    refused = _REFUSED
    inert = _INERT
    clamped = _CLAMPED
    aliases = _ALIASES
    length_field = "max_length"
    context_field = "max_context_length"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {**RANGES, length_field: RANGES["max_tokens"]}

    memory: str = ""
    max_length: Annotated[int, Field(ge=1)] = 180
    max_context_length: Annotated[int | None, Field(ge=1)] = None
    temperature: float | None = 0.7
    top_k: Annotated[int | None, Field(ge=-1)] = 100
    top_p: float | None = 0.92
    min_p: float | None = 0.0
    typical_p: float | None = 1.0
    repetition_penalty: float | None = 1.0
    repetition_range: Annotated[int, Field(ge=-1)] = 320
    dry_range: Annotated[int, Field(ge=-1)] = 320
    xtc_threshold: float = 0.2
    trim_stop: bool = False
    singleline: bool = False
    genkey: Annotated[str, Field(max_length=200)] = ""
    render_special: bool = False

    def _sampling_fields(self) -> SamplingFields:
        return self.model_copy(
            update={
                "stopping_strings": [*self.stopping_strings, "\n"] if self.singleline else self.stopping_strings,
                "include_stop_str_in_output": not (self.trim_stop or self.singleline),
                "skip_special_tokens": not self.render_special,
            }
        )

    def _truncated(self, room: int) -> TruncatedPrompt:
        return TruncatedPrompt(self.prompt, room, head=self.memory)


class KeyBody(Body):
    """The genkey of an answer."""

    genkey: str = ""


class CountBody(Body):
    """A text to tokenize. special: with the tokens that the model expects around it."""

    prompt: str
    special: bool = True
