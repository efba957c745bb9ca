"""How the tokens of an answer are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from engine.errors import InvalidRequest
from engine.text.printable import format_number

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BANNED_STRINGS = 64
MAX_BANNED_CHARACTERS = 200
MAX_GRAMMAR_BYTES = 2**20


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer is held to.

    source: a JSON schema; nothing for "json_object"; a regular expression that the whole answer matches; a JSON array
    of the strings to choose from; or a grammar in Lark's syntax, as llguidance reads it.
    param: what the client called it, for errors.
    """

    kind: GrammarKind
    source: str = ""
    param: str = "grammar"

    @property
    def is_json(self) -> bool:
        """Whether what it holds is one JSON value, which shows by itself where it ends."""
        return self.kind in ("json_schema", "json_object")

    def refuse_longer(self, max_bytes: int) -> None:
        """Raise InvalidRequest where the source has more than `max_bytes` bytes."""
        size = len(self.source.encode(errors="surrogatepass"))
        if size > max_bytes:
            raise InvalidRequest(
                f"{self.param} has {size} bytes; it may have {max_bytes}", param=self.param, value=size, limit=max_bytes
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose each next token and when to end. Every default is neutral.

    temperature: 0 is greedy (exact argmax).      top_k: 0 is off.
    top_p, typical_p: 1.0 is off, in (0, 1].      min_p: 0.0 is off, in [0, 1].
    top_a: 0.0 is off; drops tokens less likely than top_a times the square of the best one's probability.
    tfs: 1.0 is off, in (0, 1]; tail-free sampling (second derivative of the sorted probabilities).
    min_temp, max_temp, temp_exponent: dynamic temperature by entropy, after the filters; max_temp 0.0 is off.
    smoothing_factor: 0.0 is off; quadratic smoothing of the logits around the best one.
    temperature_last: the temperature is applied after the filters instead of before; a dynamic one takes its place.
    xtc_probability: 0.0 is off; the chance that a token's most likely choices above xtc_threshold are left out.
    mirostat: 0 is off, 2 is Mirostat 2.0 (Basu et al. 2021) with its target mirostat_tau and rate mirostat_eta.
    repetition_penalty: 1.0 is off, multiplicative on prompt and output tokens (CTRL, Keskar et al. 2019).
    repetition_range: how many of the last tokens the three penalties look at; 0 is all of them.
    repetition_decay: tokens over which the penalties fade to nothing beyond repetition_range; 0 is at once.
    frequency_penalty, presence_penalty: 0.0 is off, additive on output tokens, in [-2, 2] (OpenAI).
    dry_multiplier: 0.0 is off; DRY: a token that would extend a repeat of at least dry_allowed_length tokens loses
        dry_multiplier * dry_base ** (length - dry_allowed_length). dry_range: last tokens looked at, 0 is all.
        dry_breaker_ids: tokens over which no repeat reaches.
    cfg_scale: 1.0 is off; classifier-free guidance against negative_prompt_ids.
    banned_strings: texts that the answer must not contain, whatever their case; generation goes another way.
    logit_bias: token id -> added to its logit, in [-100, 100].
    seed: None lets the engine draw one; the token at position p depends on (seed, p) alone.
    max_tokens: None means up to the context's end; 0 ends with the prompt computed.
    min_tokens: end tokens are masked before that many.
    stop: text that ends the answer (left out unless include_stop).   stop_token_ids: besides the model's own.
    shown_token_ids: control tokens that are text all the same where skip_special_tokens leaves them out.
    logprobs: None is off, 0 the chosen token only, k the k most likely besides.
    prompt_logprobs: the same of the prompt's tokens.
    grammar: what the answer is held to; None is off. Where it is JSON, stop and stop_token_ids end nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_a: float = 0.0
    tfs: float = 1.0
    min_temp: float = 0.0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    smoothing_factor: float = 0.0
    temperature_last: bool = False
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    repetition_range: int = 0
    repetition_decay: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_breaker_ids: tuple[int, ...] = ()
    cfg_scale: float = 1.0
    negative_prompt_ids: tuple[int, ...] = ()
    banned_strings: tuple[str, ...] = ()
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def validate(self) -> SamplingParams:
        """Itself, or InvalidRequest naming the first field out of range."""
        for param, (low, high) in RANGES.items():
            value = getattr(self, param)
            if value is not None and not (low <= value <= high):
                lowest = "more than 0 and at most" if low == TINY else f"between {low} and"
                raise InvalidRequest(f"{param} is {format_number(value)}; it must be {lowest} {high}", param=param)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}", param="min_tokens"
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
        """What fields must be for each other's sake, and how long some may be."""
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
                f"cfg_scale is {format_number(self.cfg_scale)}, with no negative_prompt_ids to be guided away from",
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


TINY = math.ulp(0.0)
"""The lowest value of what must be more than 0."""

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31),
    "top_p": (TINY, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (TINY, 1.0),
    "top_a": (0.0, 1.0),
    "tfs": (TINY, 1.0),
    "min_temp": (0.0, 100.0),
    "max_temp": (0.0, 100.0),
    "temp_exponent": (TINY, 100.0),
    "smoothing_factor": (0.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "mirostat_tau": (TINY, 100.0),
    "mirostat_eta": (TINY, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "repetition_range": (0, 2**31),
    "repetition_decay": (0, 2**31),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "dry_allowed_length": (1, 2**31),
    "dry_range": (0, 2**31),
    "cfg_scale": (0.0, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (0, 2**31),
    "min_tokens": (0, 2**31),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
"""Lowest and highest values of those that are numbers."""
