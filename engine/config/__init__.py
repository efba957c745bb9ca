"""Configuration of the engine, a model and a request: frozen, validated values. Nothing here imports torch."""

from engine.config.engine import (
    MAX_PROMPTS,
    MAX_THREADS,
    MAX_TIMEOUT_S,
    NUM_WORKERS,
    STEP_TOKENS,
    EngineConfig,
    PrefixSharing,
)
from engine.config.model import (
    MAX_STRETCH,
    AdapterSpec,
    AttentionName,
    BackendKind,
    BackendName,
    CacheBits,
    DeviceShare,
    DtypeName,
    ModelSpec,
    WeightsName,
)
from engine.config.sampling import (
    MAX_BANNED_CHARACTERS,
    MAX_BANNED_STRINGS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    PARAMETERS,
    RANGES,
    Grammar,
    SamplingParams,
)
from engine.samplers import TINY, Parameter
from engine.text.printable import format_number, quote_value

__all__ = [
    "MAX_BANNED_CHARACTERS",
    "MAX_BANNED_STRINGS",
    "MAX_GRAMMAR_BYTES",
    "MAX_LOGPROBS",
    "MAX_PROMPTS",
    "MAX_STOP_STRINGS",
    "MAX_STRETCH",
    "MAX_THREADS",
    "MAX_TIMEOUT_S",
    "NUM_WORKERS",
    "PARAMETERS",
    "RANGES",
    "STEP_TOKENS",
    "TINY",
    "AdapterSpec",
    "AttentionName",
    "BackendKind",
    "BackendName",
    "CacheBits",
    "DeviceShare",
    "DtypeName",
    "EngineConfig",
    "Grammar",
    "ModelSpec",
    "Parameter",
    "PrefixSharing",
    "SamplingParams",
    "WeightsName",
    "format_number",
    "quote_value",
]
