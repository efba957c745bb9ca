"""Sampling parameters: how tokens are chosen, and when an answer ends. Each field has its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Literal, TypeVar, get_type_hints

import msgspec

from engine.errors import InvalidRequest
from engine.samplers import TINY, Parameter, added_parameters, with_fields
from engine.text.printable import format_number

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

T = TypeVar("T", bound=msgspec.Struct)

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BANNED_STRINGS = 64
MAX_BANNED_CHARACTERS = 200
MAX_GRAMMAR_BYTES = 2**20


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The format that an answer's text must have.

    source: a JSON schema; nothing for "json_object"; a regular expression that the whole answer matches; a JSON array
    of the strings to choose from; or a grammar in Lark's syntax, as llguidance reads it.
    param: the client's name for it, for errors.
    """

    kind: GrammarKind
    source: str = ""
    param: str = "grammar"

    @property
    def is_json(self) -> bool:
        """True if the text is one JSON value, which shows by itself where it ends."""
        return self.kind in ("json_schema", "json_object")

    def refuse_longer(self, max_bytes: int) -> None:
        """Raise InvalidRequest where the source has more than `max_bytes` bytes."""
        size = len(self.source.encode(errors="surrogatepass"))
        if size > max_bytes:
            raise InvalidRequest(
                f"{self.param} has {size} bytes; the max is {max_bytes}", param=self.param, value=size, limit=max_bytes
            )


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Text of the model before its answer, between markers; stop strings and the grammar apply after it.

    answer: what an answer without thinking begins with, "" where that is nothing.  ends: other texts that end the
    thinking, each with the text after it that begins the answer, such as a call.  inside: the prompt ends with the
    opening marker, or, where it has begun, with some of the thinking.  budget: most tokens of thinking, None where it
    may go on.
    """

    open: str
    close: str
    answer: str = ""
    ends: tuple[tuple[str, str], ...] = ()
    inside: bool = False
    begun: bool = False
    budget: int | None = None


_STATEFUL = "its state cannot be restored after a worker is lost"
_ONE_SEQUENCE = "it computes one sequence per request; a negative prompt needs two"
_LAST_LOGITS = "its generator keeps only the logits of the last prompt token"

_MANY = 2**31


def _added_fields(struct: type[T]) -> type[T]:
    """The struct with a field for each parameter that a file of engine/samplers/ adds."""
    rows = added_parameters()
    return with_fields(struct, [(row.name, Annotated[type(row.neutral), row], row.neutral) for row in rows])


@_added_fields
class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose each next token and when to end. Every default is neutral.

    A field's row says all about it, and `PARAMETERS` has them by name: requests, the chat's form, documentation and
    refusals are derived from there. Parameters that only a file of engine/samplers/ reads are fields, too.
    """

    temperature: Annotated[float, Parameter("0 is greedy", 0.0, 100.0, label="Temperature")] = 1.0
    top_k: Annotated[int, Parameter("0 and -1 are off", 0, _MANY, sent_low=-1, label="top_k")] = 0
    top_p: Annotated[float, Parameter("1 is off", TINY, 1.0, label="top_p")] = 1.0
    min_p: Annotated[float, Parameter("0 is off", 0.0, 1.0, label="min_p")] = 0.0
    typical_p: Annotated[float, Parameter("1 is off", TINY, 1.0, aliases=("typical",))] = 1.0
    top_a: Annotated[
        float,
        Parameter(
            "0 is off; drops tokens less likely than top_a times the square of the best one's probability", 0.0, 1.0
        ),
    ] = 0.0
    tfs: Annotated[
        float,
        Parameter(
            "tail-free sampling, by the second derivative of the sorted probabilities; 1 is off",
            TINY,
            1.0,
            aliases=("tfs_z",),
        ),
    ] = 1.0
    min_temp: Annotated[
        float,
        Parameter(
            "lowest dynamic temperature", 0.0, 100.0, part_of="max_temp", aliases=("dynatemp_low", "dynatemp_min")
        ),
    ] = 0.0
    max_temp: Annotated[
        float,
        Parameter(
            "highest dynamic temperature, which depends on the entropy, after the filters; 0 is off",
            0.0,
            100.0,
            aliases=("dynatemp_high", "dynatemp_max"),
        ),
    ] = 0.0
    temp_exponent: Annotated[
        float,
        Parameter(
            "exponent of the entropy's share in the dynamic temperature",
            TINY,
            100.0,
            part_of="max_temp",
            aliases=("dynatemp_exponent",),
        ),
    ] = 1.0
    smoothing_factor: Annotated[
        float, Parameter("quadratic smoothing of the logits around the top one; 0 is off", 0.0, 100.0)
    ] = 0.0
    temperature_last: Annotated[
        bool, Parameter("apply the temperature after the filters; a dynamic one replaces it")
    ] = False
    xtc_probability: Annotated[
        float, Parameter("chance that the most likely tokens above xtc_threshold are excluded; 0 is off", 0.0, 1.0)
    ] = 0.0
    xtc_threshold: Annotated[
        float, Parameter("probability from which XTC excludes tokens", 0.0, 1.0, part_of="xtc_probability")
    ] = 0.1
    mirostat: Annotated[
        int,
        Parameter(
            "0 is off, 2 is Mirostat 2.0 (Basu et al. 2021)",
            http_name="mirostat_mode",
            aliases=("mirostat",),
            lacking={"torch": _STATEFUL, "exllamav3": _STATEFUL},
        ),
    ] = 0
    mirostat_tau: Annotated[float, Parameter("Mirostat's target surprise", TINY, 100.0, part_of="mirostat")] = 5.0
    mirostat_eta: Annotated[float, Parameter("Mirostat's learning rate", TINY, 1.0, part_of="mirostat")] = 0.1
    repetition_penalty: Annotated[
        float,
        Parameter(
            "multiplicative on prompt and output tokens (CTRL, Keskar et al. 2019); 1 is off",
            0.01,
            100.0,
            aliases=("rep_pen", "repeat_penalty"),
        ),
    ] = 1.0
    repetition_range: Annotated[
        int,
        Parameter(
            "number of last tokens that the three penalties use; 0 and -1 are all",
            0,
            _MANY,
            sent_low=-1,
            aliases=("penalty_range", "rep_pen_range", "repeat_last_n", "repetition_penalty_range"),
        ),
    ] = 0
    repetition_decay: Annotated[
        int, Parameter("tokens beyond repetition_range over which the penalties fade to nothing", 0, _MANY)
    ] = 0
    frequency_penalty: Annotated[
        float, Parameter("additive for each use in the output (OpenAI); 0 is off", -2.0, 2.0)
    ] = 0.0
    presence_penalty: Annotated[
        float, Parameter("additive once a token is in the output (OpenAI); 0 is off", -2.0, 2.0)
    ] = 0.0
    dry_multiplier: Annotated[
        float,
        Parameter(
            "DRY: a token that extends a repeat of at least dry_allowed_length tokens loses dry_multiplier * "
            "dry_base ** (length - dry_allowed_length); 0 is off",
            0.0,
            100.0,
        ),
    ] = 0.0
    dry_base: Annotated[float, Parameter("base of DRY's penalty", 1.0, 100.0)] = 1.75
    dry_allowed_length: Annotated[int, Parameter("shortest repeat that DRY penalises", 1, _MANY)] = 2
    dry_range: Annotated[
        int,
        Parameter(
            "number of last tokens that DRY uses; 0 and -1 are all",
            0,
            _MANY,
            sent_low=-1,
            aliases=("dry_penalty_last_n",),
        ),
    ] = 0
    dry_breaker_ids: Annotated[tuple[int, ...], Parameter("tokens over which no repeat reaches")] = ()
    cfg_scale: Annotated[
        float,
        Parameter(
            "classifier-free guidance against the negative prompt; 1 is off",
            0.0,
            100.0,
            aliases=("guidance_scale",),
            lacking={"torch": _ONE_SEQUENCE, "exllamav3": _ONE_SEQUENCE},
        ),
    ] = 1.0
    negative_prompt_ids: Annotated[tuple[int, ...], Parameter("the negative prompt", part_of="cfg_scale")] = ()
    banned_strings: Annotated[
        tuple[str, ...], Parameter("texts that the answer must not contain, whatever their case")
    ] = ()
    logit_bias: Annotated[dict[int, float], Parameter("token id -> added to its logit, -100 to 100")] = {}
    seed: Annotated[
        int | None,
        Parameter(
            "the token at position p depends on (seed, p) alone; null is drawn by the engine",
            -(2**63),
            2**63 - 1,
            label="Seed",
        ),
    ] = None
    max_tokens: Annotated[
        int | None, Parameter("null is up to the context's end; 0 ends with the prompt", 0, _MANY, label="Max tokens")
    ] = None
    min_tokens: Annotated[
        int, Parameter("no end token before this number of tokens", 0, _MANY, aliases=("min_length",))
    ] = 0
    stop: Annotated[tuple[str, ...], Parameter("text that ends the answer")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter("end tokens besides the model's own")] = ()
    ignore_eos: Annotated[bool, Parameter("do not end with the model's end tokens")] = False
    include_stop: Annotated[
        bool, Parameter("leave a stop string in the answer", http_name="include_stop_str_in_output")
    ] = False
    skip_special_tokens: Annotated[bool, Parameter("leave control tokens out of the text")] = True
    shown_token_ids: Annotated[
        tuple[int, ...], Parameter("control tokens that are text where skip_special_tokens leaves others out")
    ] = ()
    logprobs: Annotated[
        int | None, Parameter("null is off, 0 the chosen token only, k also the k most likely ones", 0, MAX_LOGPROBS)
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Parameter(
            "the same for the prompt's tokens",
            0,
            MAX_LOGPROBS,
            lacking={"exllamav2": _LAST_LOGITS, "exllamav3": _LAST_LOGITS},
        ),
    ] = None
    grammar: Annotated[
        Grammar | None, Parameter("what the answer must match; where it is JSON, stop and stop_token_ids end nothing")
    ] = None
    thinking: Annotated[Thinking | None, Parameter("markers of the thinking before the answer")] = None

    @property
    def needs_mask(self) -> bool:
        """True if some tokens are not allowed in some places."""
        return self.grammar is not None or (self.thinking is not None and self.thinking.budget is not None)

    def validate(self) -> SamplingParams:
        """Return itself; raises InvalidRequest naming the first field out of range."""
        for param, (low, high) in RANGES.items():
            value = getattr(self, param)
            if value is not None and not (low <= value <= high):
                lowest = "more than 0, up to" if low == TINY else f"between {low} and"
                raise InvalidRequest(f"{param} is {format_number(value)}; it must be {lowest} {high}", param=param)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}; the answer may have {self.max_tokens} tokens", param="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS or any(not text for text in self.stop):
            raise InvalidRequest(
                f"stop takes up to {MAX_STOP_STRINGS} strings, none of them empty", param="stop", value=len(self.stop)
            )
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -100 <= bias <= 100:
                raise InvalidRequest(
                    f"logit_bias of token {token_id} is {format_number(bias)}; biases lie between -100 and 100",
                    param="logit_bias",
                )
        self._validate_samplers()
        return self

    def _validate_samplers(self) -> None:
        """Check fields that depend on each other, and lengths."""
        if self.grammar is not None:
            self.grammar.refuse_longer(MAX_GRAMMAR_BYTES)
        if (self.min_temp > 0 or self.max_temp > 0) and self.max_temp <= self.min_temp:
            raise InvalidRequest(
                f"max_temp is {format_number(self.max_temp)}; it must be more than min_temp, "
                f"{format_number(self.min_temp)}",
                param="max_temp",
            )
        if self.mirostat not in (0, 2):
            raise InvalidRequest(
                f"mirostat is {format_number(self.mirostat)}; it must be 0 (off) or 2 (Mirostat 2.0)", param="mirostat"
            )
        if self.cfg_scale != 1 and not self.negative_prompt_ids:
            raise InvalidRequest(
                f"cfg_scale is {format_number(self.cfg_scale)}, which needs negative_prompt_ids",
                param="cfg_scale",
            )
        longest = max(map(len, self.banned_strings), default=0)
        if (
            len(self.banned_strings) > MAX_BANNED_STRINGS
            or longest > MAX_BANNED_CHARACTERS
            or not all(self.banned_strings)
        ):
            raise InvalidRequest(
                f"banned_strings takes up to {MAX_BANNED_STRINGS} strings of up to {MAX_BANNED_CHARACTERS} characters, "
                "none of them empty",
                param="banned_strings",
                value=len(self.banned_strings),
            )


def _rows() -> Iterator[tuple[str, Parameter]]:
    fields = {field.name: field for field in msgspec.structs.fields(SamplingParams)}
    for name, annotation in get_type_hints(SamplingParams, include_extras=True).items():
        (row,) = annotation.__metadata__
        field = fields[name]
        neutral = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        yield name, replace(row, name=name, neutral=neutral, http_name=row.http_name or name)


PARAMETERS: Mapping[str, Parameter] = dict(_rows())
"""Rows of all fields of SamplingParams, by name."""

RANGES: Mapping[str, tuple[float, float]] = {
    name: (row.low, row.high) for name, row in PARAMETERS.items() if row.low is not None and row.high is not None
}
"""Lowest and highest values of those that are numbers."""
