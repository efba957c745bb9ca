"""What a benchmark runs: a model, CPU threads, rounds, and requests that are the same in every run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from console.runtime.loading import model_spec
from console.settings.sources import load_settings
from engine.backends.base import BackendRequest
from engine.config import ModelSpec, SamplingParams
from engine.devices import usable_cores
from engine.engine import GenerateRequest
from engine.errors import ModelNotFound, UnsupportedModel
from engine.models.files import read_json_object
from engine.models.resolve import is_hub_id, resolve, resolve_local

PROMPT_TOKENS = 128
OUTPUT_TOKENS = range(96, 161)
"""Answers of every length in it: requests end one by one, as they do in life."""


class Spread(msgspec.Struct, frozen=True):
    """The middle, the least and the most of what rounds gave."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of one value at least."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])


class Timing(msgspec.Struct, frozen=True):
    """What a round gave, and the CPU that the process of the backend spent on it."""

    tokens: int
    seconds: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU per token."""
        return 1e6 * self.cpu_s / self.tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. model: its name as it was given.  spec: without threads and KV pages.  threads: in all."""

    model: str
    spec: ModelSpec
    vocab_size: int
    threads: int
    rounds: int

    def spec_for(self, concurrent: int, threads: int) -> ModelSpec:
        """The model for a worker of so many threads, with KV pages for `concurrent` requests twice over."""
        longest = PROMPT_TOKENS + OUTPUT_TOKENS.stop
        return msgspec.structs.replace(self.spec, threads=threads, kv_cache_tokens=2 * concurrent * longest)

    def prompt(self, number: int) -> list[int]:
        """Token ids, of which no two prompts share a page."""
        return random.Random(number).choices(range(self.vocab_size), k=PROMPT_TOKENS)

    def params(self, number: int) -> SamplingParams:
        """Greedy, and as many tokens as the number says."""
        tokens = OUTPUT_TOKENS[number * 37 % len(OUTPUT_TOKENS)]
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)

    def for_engine(self, number: int) -> GenerateRequest:
        """Request `number`, as the engine takes it."""
        return GenerateRequest(prompt_ids=self.prompt(number), params=self.params(number), source="bench")

    def for_backend(self, numbers: Iterable[int]) -> Iterator[BackendRequest]:
        """The same requests, as a backend takes them."""
        for number in numbers:
            yield BackendRequest(id=str(number), prompt_ids=self.prompt(number), params=self.params(number))


def numbers_of(round_: int, concurrent: int) -> range:
    """The requests of a round: two for each place, and none that another round has."""
    return range(2 * concurrent * round_, 2 * concurrent * (round_ + 1))


def plan_for(
    model: str, *, threads: int | None, rounds: int, changes: Mapping[str, Any] = MappingProxyType({})
) -> Plan:
    """The plan for a model on this machine. changes: settings of its load, before those of variables and config.toml.

    Raises ModelNotFound, UnsupportedModel or another EngineError.
    """
    settings = load_settings({"model": model, **changes})
    path = resolve_local(model, settings.models_dir)
    if path is None:
        if is_hub_id(model):
            raise ModelNotFound(f"{model} is not on this machine; 'ericllm --model {model}' downloads it", model=model)
        path = resolve(model, settings.models_dir)
    spec = model_spec(settings, model, path)
    vocab_size = read_json_object(path / "config.json").get("vocab_size")
    if not isinstance(vocab_size, int):
        raise UnsupportedModel(f"config.json of {spec.name} does not say how many tokens the model has")
    return Plan(model, spec, vocab_size, threads or usable_cores(), rounds)
