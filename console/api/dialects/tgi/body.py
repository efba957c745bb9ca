"""Bodies that TGI's clients send, and the prompt and parameters made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from console.api.requests.body import Body
from console.api.requests.parameters import NO_DEFAULT_LENGTH, Refusal
from console.api.requests.prompts import Prompt
from console.api.requests.sampling import MAX_N, SamplingFields
from console.api.requests.schemas import STOP_STRINGS, ShapedAs
from console.api.requests.served_model import ServedModel
from console.api.requests.structured_output import json_grammar, regex_grammar
from engine.config import MAX_LOGPROBS, RANGES, Grammar
from engine.errors import InvalidRequest
from engine.requests.request import compact_ids
from engine.text.tokenizer import Tokenizer

# TGI's grammars, which constrain an answer.


class TgiGrammar(BaseModel):
    """A constraint on the answer. value: a JSON schema, {"schema": ...} for json_schema, or a regular expression."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"const": "regex"}, "value": {"type": "string", "minLength": 1}}},
                {"properties": {"type": {"enum": ["json", "json_object"]}, "value": {"type": ["object", "string"]}}},
                {
                    "properties": {
                        "type": {"const": "json_schema"},
                        "value": {"type": "object", "required": ["schema"]},
                    }
                },
            ]
        },
    )

    type: str
    value: Any

    def grammar(self, max_bytes: int) -> Grammar:
        """Return the engine's grammar; takes a fraction of a second at worst. Raises InvalidRequest."""
        match self.type, self.value:
            case "regex", str(text):
                return regex_grammar(text, "grammar", max_bytes=max_bytes)
            case "json" | "json_object", schema:
                return json_grammar(schema, "grammar", max_bytes=max_bytes)
            case "json_schema", {"schema": schema}:
                return json_grammar(schema, "grammar", max_bytes=max_bytes)
            case "regex" | "json_schema", _:
                value = "a string" if self.type == "regex" else 'an object with "schema"'
                raise InvalidRequest(f"grammar of type {self.type} should have {value} as its value", param="grammar")
            case _:
                raise InvalidRequest("grammar should be of type json, json_schema or regex", param="grammar")


_SEEDS = 2**64


_REFUSED: Mapping[str, Refusal] = {
    "watermark": Refusal("watermarks are not supported", (False,)),
}

_CLAMPED: Mapping[str, str] = {
    "max_new_tokens": NO_DEFAULT_LENGTH,
    "seed": "the upper half of its 64 bits to the lower",
}


class TgiParameters(Body):
    """TGI's parameters with its defaults, which are neutral: the model's recommendations are not used.

    do_sample: without it, and without any setting that implies sampling, generation is greedy.
    max_new_tokens: by default as many as fit.  truncate: use only this number of last prompt tokens.
    top_n_tokens: number of most likely tokens to return per position.
    why: add the latency by cause, in milliseconds, to the answer or the last event.
    """

    refused = _REFUSED
    clamped = _CLAMPED
    ranges = RANGES

    adapter_id: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    decoder_input_details: bool = False
    details: bool = False
    do_sample: bool = False
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    grammar: TgiGrammar | None = None
    max_new_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    repetition_penalty: float = 1.0
    return_full_text: bool | None = None
    seed: Annotated[int | None, Field(ge=0, lt=_SEEDS)] = None
    stop: Annotated[list[str], Field(default_factory=list), STOP_STRINGS]
    temperature: float | None = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    top_n_tokens: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    top_p: float | None = None
    truncate: Annotated[int | None, Field(ge=1)] = None
    typical_p: float | None = None
    why: bool = False

    @property
    def samples(self) -> bool:
        """True if tokens are sampled, which TGI takes any setting that narrows the choice to ask for."""
        narrowed = (self.temperature not in (None, 1.0), self.top_k, self.top_p not in (None, 1.0))
        return self.do_sample or any(narrowed) or self.typical_p not in (None, 1.0)

    @property
    def has_details(self) -> bool:
        """True if the answer has details."""
        return self.details or self.decoder_input_details

    def check(self, *, stream: bool) -> None:
        """Raise InvalidRequest for parameters that TGI cannot combine."""
        if self.best_of > 1 and not self.samples:
            raise InvalidRequest("best_of of more than 1 needs sampling; set do_sample", param="best_of")
        if self.best_of > 1 and self.seed is not None:
            raise InvalidRequest("seed cannot be set where best_of is more than 1", param="seed")
        if self.best_of > 1 and stream:
            raise InvalidRequest("best_of must be 1 in a stream", param="best_of")
        if self.decoder_input_details and stream:
            raise InvalidRequest("decoder_input_details is not supported in a stream", param="decoder_input_details")

    def sampling(self, model: str | None) -> SamplingFields:
        """Return them as the fields that dialects share."""
        return SamplingFields.from_document(
            {
                "model": model,
                "lora": self.adapter_id,
                "n": self.best_of,
                "temperature": (1.0 if self.temperature is None else self.temperature) if self.samples else 0.0,
                "top_k": self.top_k or 0,
                "top_p": 1.0 if self.top_p is None else self.top_p,
                "min_p": 0.0,
                "typical_p": 1.0 if self.typical_p is None else self.typical_p,
                "repetition_penalty": self.repetition_penalty,
                "frequency_penalty": self.frequency_penalty,
                "seed": _signed_seed(self.seed),
                "stop": self.stop,
                "include_stop_str_in_output": True,
                "why": self.why,
            }
        )


class TgiBody(Body):
    """The whole body. inputs: the prompt, as text.  model: by default the first; TGI's own clients name none."""

    keeps_empty = frozenset({"parameters"})

    inputs: str
    model: str | None = None
    stream: bool = False
    parameters: Annotated[dict[str, Any] | None, ShapedAs(TgiParameters)] = None

    def read_parameters(self) -> TgiParameters:
        """Return the parameters; raises InvalidRequest. TGI samples where none are sent, and is greedy by default."""
        return TgiParameters.from_document({"do_sample": True} if self.parameters is None else self.parameters)

    async def prompt(self, model: ServedModel, truncate: int | None) -> Prompt:
        """Return the last `truncate` tokens of inputs. Raises InvalidRequest."""
        text = self.inputs if truncate is None else await model.part(self.inputs, truncate, end=True)
        encode = partial(_encode, text, truncate)
        ids = _last((await model.encode([text]))[0], truncate)
        if not ids:
            raise InvalidRequest("inputs is empty", param="inputs")
        return Prompt(compact_ids(ids), self.inputs, encode)


async def _encode(text: str, truncate: int | None, tokenizer: Tokenizer) -> list[int]:
    return _last(await asyncio.to_thread(tokenizer.encode, text), truncate)


def _last(ids: list[int], count: int | None) -> list[int]:
    return ids if count is None else ids[-count:]


def _signed_seed(seed: int | None) -> int | None:
    """Return a seed of TGI, which has 64 bits, as one of ours, of whose bits one is the sign; -1 is no seed."""
    return None if seed is None else seed % (_SEEDS // 2)
