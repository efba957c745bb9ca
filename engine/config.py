"""What the engine is asked to do: frozen, validated values. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import InvalidRequest

BackendKind = Literal["torch", "exllamav2"]
BackendName = Literal["auto", "torch", "exllamav2"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
WorkerHostName = Literal["process", "thread"]
CacheBits = Literal[16, 8, 6, 4]
AttentionName = Literal["auto", "native", "flash", "triton", "varlen", "gathered"]
WeightsName = Literal["auto", "int8", "int4"]
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BANNED_STRINGS = 64
MAX_BANNED_CHARACTERS = 200
MAX_GRAMMAR_BYTES = 2**20
MAX_TIMEOUT_S = 10**7
MAX_STRETCH = 1000.0
MAX_THREADS = 1024
STEP_TOKENS = (16, 10**6)
"""Most that a context may be stretched by, by alpha_value and by compress_pos_emb."""
_SHOWN_DIGITS = 24


def shown(number: float) -> str:
    """A number that was asked for, exactly; the start of one so long that nobody would read it."""
    digits = str(number)
    return digits if len(digits) <= _SHOWN_DIGITS else f"{digits[:_SHOWN_DIGITS]}..."


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
                raise InvalidRequest(f"{param} is {shown(value)}; it must be {lowest} {high}", param=param)
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
                    f"logit_bias of token {token_id} is {shown(bias)}; biases lie between -100 and 100",
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
                f"max_temp is {shown(self.max_temp)}; it must be more than min_temp, {shown(self.min_temp)}",
                param="max_temp",
            )
        if self.mirostat not in (0, 2):
            raise InvalidRequest(
                f"mirostat is {shown(self.mirostat)}; it must be 0 (off) or 2 (Mirostat 2.0)", param="mirostat"
            )
        if self.cfg_scale != 1 and not self.negative_prompt_ids:
            raise InvalidRequest(
                f"cfg_scale is {shown(self.cfg_scale)}, with no negative_prompt_ids to be guided away from",
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


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker takes of one device. device: "cpu", "cuda:N" or "sim:N".  layers: how many of the decoder's
    layers, in order; the embedding goes with the first share, the final norm and the head with the last."""

    device: str
    layers: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    working_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.working_bytes


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter: its folder (adapter_config.json and safetensors) and what requests call it."""

    name: str
    path: Path
    scale: float = 1.0


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which model to load and how; what a worker gets to load.

    path: a folder with config.json and safetensors.  name: what clients call it.
    max_model_len, max_input_len: tokens; None takes the model's own context length.
    weights: what the weights of linear layers are made into at load; "auto" leaves them in `dtype`.
    kv_cache_tokens: tokens that the KV pages of one worker hold; None sizes it from max_prompts and free memory.
    gpu_split_gb: GiB of weights per GPU, in device order.  gpu_reserve_mib: MiB left free on each GPU.
    tensor_parallel: split every layer over the GPUs, where the backend and the architecture can.
    draft_model: folder of a small model with the same vocabulary that guesses ahead.  ngram_draft: guess from the
        request's own text instead.  draft_tokens: guesses per step; None is the backend's choice.
    attention: which paged attention on CUDA; "auto" takes the best that fits.
    deterministic: refuse whatever would let an answer depend, in its last bits, on what else is computed.
    device: "auto", "cpu", "cuda:N" or "sim:N".
    shares: what placement gave the worker of each device, in order of the layers; () where it had no say.
    prefix_salt: what the keys of KV pages are hashed with, the same for all workers of a model; b"" draws one.
    threads: CPU threads of each worker; None shares the machine's cores out.
    """

    path: Path
    name: str
    backend: BackendName = "auto"
    dtype: DtypeName = "auto"
    weights: WeightsName = "auto"
    max_model_len: int | None = None
    max_input_len: int | None = None
    kv_cache_tokens: int | None = None
    cache_bits: CacheBits = 16
    alpha_value: float | None = None
    compress_pos_emb: float | None = None
    num_experts: int | None = None
    lora: Path | None = None
    gpu_split_gb: tuple[float, ...] = ()
    gpu_reserve_mib: tuple[int, ...] = ()
    tensor_parallel: bool = False
    draft_model: Path | None = None
    ngram_draft: bool = False
    draft_tokens: int | None = None
    attention: AttentionName = "auto"
    deterministic: bool = False
    gpu_balance: bool = False
    device: str = "auto"
    shares: tuple[DeviceShare, ...] = ()
    prefix_salt: bytes = b""
    threads: int | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine runs, whatever model it holds.

    max_prompts: requests a worker works on at once.  max_queue: requests that may wait; more are QueueFull.
    timeout_s: 0 means no limit.  step_tokens: token budget of one step (prefill chunks and decodes together).
    page_tokens: tokens per KV page.
    threads: CPU threads of each worker; 0 shares the machine's cores out.
    hang_s: a worker with work that reports nothing for so long is replaced; 0: never.
    max_deaths: a worker that dies so many times in a row is left dead.
    ageing_s: waiting so long is worth one priority.
    idle_unload_s: a model without requests for so long gives its memory back until one comes; 0: never.
    devices: GiB of each simulated device, in place of the machine's own; () takes those.
    cluster: "local", "auto" or "ray://HOST:PORT": where workers run.
    state_dir: where it is remembered what loads really used; None forgets it.
    log_dir: where native output of workers goes; None keeps it in memory only.
    slo_ttft_s, slo_itl_s: what answers are held to (goodput); None is not asked for.
    energy_rate: what a kWh costs, None where nothing is to be reckoned; energy_currency: in what.
    show_prompts: the texts of the last requests are kept in memory, for the operator to read.
    """

    num_workers: int = 1
    max_prompts: int = 16
    max_queue: int = 1024
    timeout_s: float = 600.0
    worker_host: WorkerHostName = "process"
    step_tokens: int = 512
    page_tokens: int = 16
    threads: int = 0
    restart_backoff_s: float = 0.5
    max_restart_backoff_s: float = 30.0
    hang_s: float = 60.0
    max_deaths: int = 5
    ageing_s: float = 30.0
    idle_unload_s: float = 0.0
    devices: tuple[float, ...] = ()
    cluster: str = "local"
    state_dir: Path | None = None
    log_dir: Path | None = None
    show_prompts: bool = False
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    energy_rate: float | None = None
    energy_currency: str = ""

    def validate(self) -> EngineConfig:
        """Itself, or InvalidRequest naming the first field out of range."""
        for param, low, high in (
            ("num_workers", 1, 64),
            ("max_prompts", 1, 4096),
            ("max_queue", 0, 10**6),
            ("timeout_s", 0, MAX_TIMEOUT_S),
            ("step_tokens", *STEP_TOKENS),
            ("page_tokens", 1, 4096),
            ("threads", 0, MAX_THREADS),
            ("hang_s", 0, MAX_TIMEOUT_S),
            ("max_deaths", 1, 1000),
            ("ageing_s", 0.001, MAX_TIMEOUT_S),
            ("idle_unload_s", 0, MAX_TIMEOUT_S),
            ("slo_ttft_s", 1e-6, MAX_TIMEOUT_S),
            ("slo_itl_s", 1e-6, MAX_TIMEOUT_S),
            ("energy_rate", 0, 10**6),
        ):
            value = getattr(self, param)
            if value is not None and not low <= value <= high:
                raise InvalidRequest(f"{param} is {shown(value)}; it must be between {low} and {high}", param=param)
        return self
