"""Every setting, once: this model makes the flags, the ERICLLM_* variables, config.toml and the sample file.

A flag wins over a variable, a variable over config.toml, config.toml over the default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import platformdirs
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic.fields import FieldInfo

from console.settings.addresses import checked_host
from console.settings.values import (
    AdapterFolder,
    Duration,
    Folders,
    GigabyteList,
    MegabyteList,
    ModelPath,
    Names,
    Networks,
    SimulatedDevices,
    Words,
    whole_number,
)
from engine.config import (
    MAX_STOP_STRINGS,
    MAX_STRETCH,
    MAX_THREADS,
    MAX_TIMEOUT_S,
    STEP_TOKENS,
    AttentionName,
    BackendKind,
    BackendName,
    CacheBits,
    DtypeName,
    PrefixSharing,
    ThinkingName,
    WeightsName,
)
from engine.config.engine import MAX_MODELS, MAX_PROMPTS, NUM_WORKERS
from engine.models.files import home_expanded

# Flag: what a setting is besides its type.

AutoLoad = Literal["off", "listed", "all"]
Group = Literal["Model", "Engine", "API", "Console"]
When = Literal["now", "load", "start"]
"""When a value that is saved while the program runs is used: at once, by the next model loaded, at the next start."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Facts of a setting besides its type: its group in the help, and which backends honour it.

    metavar: how the help shows its value.  backends: None where every one does.
    example: what the sample file shows where there is no default.
    when: when a value saved while the program runs is used; by default, the next load for a model's settings and the
    next start for all others.
    knob: it can be changed while a model serves, with Engine.reconfigure.
    engine: the field of EngineConfig or ModelSpec, "" for the one of the same name, if any.
    basic: one of those that most operators set: the Settings screen begins with them.
    gpu: the default on a machine with an NVIDIA GPU, where that is another.  gpu_library: that of models on exllamav2
    and exllamav3.
    """

    group: Group
    metavar: str = ""
    backends: tuple[BackendKind, ...] | None = None
    example: str | int | float | None = None
    when: When | None = None
    knob: bool = False
    engine: str = ""
    basic: bool = False
    gpu: int | None = None
    gpu_library: int | None = None

    @property
    def gpu_text(self) -> str:
        """The defaults on a machine with an NVIDIA GPU, as a clause; "" for no other."""
        library = f", {self.gpu_library} for exllamav2 and exllamav3" if self.gpu_library is not None else ""
        return f"{self.gpu} with an NVIDIA GPU{library}" if self.gpu is not None else ""

    @property
    def used(self) -> When:
        """When a value that is saved is used."""
        return self.when or ("load" if self.group == "Model" else "start")


_ALL_BUT_EXLLAMAV3: tuple[BackendKind, ...] = ("torch", "exllamav2")

# ServedSettings: the settings of the HTTP side. Where it listens, whom it lets in, and what it puts up with.

MAX_OUTPUT_TOKENS = 10**9
_MAX_DEPTH = 150
"""What the parser of JSON itself puts up with, with room to spare."""


class ServedSettings(BaseModel):
    """Part of `console.settings.schema.Settings`. Durations are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)  # --help validates nothing

    api: Annotated[bool, Flag("API", basic=True), Field(description="Start the HTTP API with the program")] = True
    host: Annotated[
        str,
        Flag("API", "ADDRESS", basic=True),
        Field(min_length=1, description="Listen address; *: all interfaces, IPv4 and IPv6; unix:PATH: a Unix socket"),
        AfterValidator(checked_host),
    ] = "127.0.0.1"
    port: Annotated[
        int, Flag("API", "PORT", basic=True), Field(ge=0, le=65535, description="Listen port; 0: any free port")
    ] = 8000
    api_key: Annotated[
        SecretStr | None,
        Flag("API", "KEY", example="change-me", basic=True),
        Field(min_length=1, description="API key that clients send as a Bearer token"),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Flag("API", "FILE", example="~/.config/ericllm/api-key", basic=True),
        Field(description="File whose first line is the API key; flags are visible to other users of the machine"),
    ] = None
    no_auth: Annotated[bool, Flag("API"), Field(description="Allow a non-local listen address without an API key")] = (
        False
    )
    admin_remote: Annotated[
        bool, Flag("API", basic=True), Field(description="Accept admin requests from other machines, with an API key")
    ] = False
    tls_cert: Annotated[
        Path | None,
        Flag("API", "FILE", example="~/tls/cert.pem"),
        Field(description="TLS certificate chain (PEM) for HTTPS; reloaded when the file changes"),
    ] = None
    tls_key: Annotated[
        Path | None, Flag("API", "FILE", example="~/tls/key.pem"), Field(description="TLS private key (PEM)")
    ] = None
    cors_origins: Annotated[
        Words,
        Flag("API", "ORIGIN,ORIGIN"),
        Field(description="Allowed CORS origins, for example https://chat.example; *: all"),
    ] = ()
    allowed_hosts: Annotated[
        Words,
        Flag("API", "NAME,NAME"),
        Field(description="Allowed Host names of a server on loopback, in addition to localhost; *: all"),
    ] = ()
    dialects_off: Annotated[
        Words,
        Flag("API", "NAME,NAME"),
        Field(description="Disabled API dialects, for example tgi,kobold; also switched on the API screen"),
    ] = ()
    trusted_proxies: Annotated[
        Networks,
        Flag("API", "ADDRESS,NET", example="127.0.0.1,10.0.0.0/8"),
        Field(description="Proxies whose X-Forwarded-For is trusted, for logs, limits and fair queueing"),
    ] = ()
    request_rate: Annotated[
        int,
        Flag("API", "N"),
        Field(ge=0, le=10**9, description="Max requests per minute from one remote address; 0: unlimited"),
    ] = 6000
    auto_load: Annotated[
        AutoLoad,
        Flag("API", when="now", basic=True),
        Field(
            description="Models that requests load by name: none; listed: those of [models] in config.toml; all: also "
            "every model found. From other machines only with a key of scope load"
        ),
    ] = "listed"
    max_queue: Annotated[
        int,
        Flag("API", "N", basic=True),
        Field(ge=0, le=10**6, description="Max queued requests; further ones are refused with 429"),
    ] = 1024
    max_body_kib: Annotated[int, Flag("API", "KIB"), Field(ge=1, le=2**21, description="Max request body, in KiB")] = (
        8192
    )
    max_header_bytes: Annotated[
        int, Flag("API", "BYTES"), Field(ge=256, le=2**20, description="Max bytes of a request line or header line")
    ] = 8192
    max_json_depth: Annotated[
        int, Flag("API", "N"), Field(ge=4, le=_MAX_DEPTH, description="Max nesting depth of a JSON request body")
    ] = 64
    max_schema_bytes: Annotated[
        int,
        Flag("API", "BYTES"),
        Field(ge=1, le=2**20, description="Max bytes of a JSON schema, regex or grammar for structured output"),
    ] = 65_536
    max_choices: Annotated[
        int, Flag("API", "N"), Field(ge=1, le=2**16, description="Max answers per request: prompts times n")
    ] = 512
    max_output_len: Annotated[
        int | None,
        Flag("API", "TOKENS", example=4096),
        Field(
            ge=1,
            le=MAX_OUTPUT_TOKENS,
            description="Max tokens of an answer; the context length if not given",
        ),
    ] = None
    max_stops: Annotated[
        int, Flag("API", "N"), Field(ge=0, le=MAX_STOP_STRINGS, description="Max stop strings per request")
    ] = MAX_STOP_STRINGS
    max_stop_length: Annotated[
        int, Flag("API", "N"), Field(ge=1, le=2**20, description="Max characters of a stop string")
    ] = 1000
    idle_timeout: Annotated[
        Duration,
        Flag("API", "SECONDS"),
        Field(ge=0.1, le=MAX_TIMEOUT_S, description="Close idle connections after this time"),
    ] = 75.0
    body_timeout: Annotated[
        Duration,
        Flag("API", "SECONDS"),
        Field(ge=0.1, le=MAX_TIMEOUT_S, description="Time limit for receiving a request body"),
    ] = 30.0
    write_timeout: Annotated[
        Duration,
        Flag("API", "SECONDS"),
        Field(ge=0.1, le=MAX_TIMEOUT_S, description="Disconnect clients that stop reading for this time"),
    ] = 60.0
    access_log: Annotated[
        str | None,
        Flag("API", "FILE", example="~/ericllm-access.jsonl", basic=True),
        Field(
            min_length=1,
            description="Access log: one JSON line per request, without its texts; -: stdout, with --headless",
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Flag("API", "URL", example="http://127.0.0.1:4318"),
        Field(min_length=1, description="OTLP/HTTP endpoint for OpenTelemetry traces of requests"),
    ] = None


__all__ = ["Flag", "Group", "Settings", "When"]

APP_NAME = "ericllm"
ENV_PREFIX = "ERICLLM_"
LogLevel = Literal["debug", "info", "warning", "error"]
TUNED_FILE = "tuned.json"
"""In the state folder: what autotune found."""
MAX_TOKENS = 10**9
_OPTIONS = "console.settings.load_options"


def config_path(env: Mapping[str, str] | None = None) -> Path:
    """Where config.toml is read: ERICLLM_CONFIG, or the user's config folder (XDG)."""
    named = (os.environ if env is None else env).get("ERICLLM_CONFIG")
    return home_expanded(named) if named else Path(platformdirs.user_config_dir(APP_NAME)) / "config.toml"


def data_dir() -> Path:
    """Where conversations are kept (XDG data folder)."""
    return Path(platformdirs.user_data_dir(APP_NAME))


def log_dir() -> Path:
    """Where logs and workers' native output go (XDG state folder)."""
    return Path(platformdirs.user_log_dir(APP_NAME))


def state_dir() -> Path:
    """Where what was learned of earlier loads is kept (XDG state folder)."""
    return Path(platformdirs.user_state_dir(APP_NAME))


class Settings(ServedSettings):
    """All settings of the console, the engine and the HTTP side. Build it with
    `console.settings.sources.load_settings`; what is said of each is read with `console.settings.schema`."""

    model: Annotated[
        str,
        Flag("Model", "NAME", when="start", basic=True),
        Field(
            min_length=1,
            description="Model to load: a folder or GGUF file, a name found in --models-dir, a hub id such "
            "as org/model or org/model:Q4_K_M, or 'demo'",
        ),
    ] = "demo"
    served_model_name: Annotated[
        Names,
        Flag("Model", "NAME,NAME", when="start"),
        Field(description="Names of --model for clients: the first is its name, the others are aliases"),
    ] = ()
    models_dir: Annotated[
        Folders,
        Flag("Model", "DIR", when="now", basic=True),
        Field(description="Folder to search for models, in addition to the hub cache; can be repeated"),
    ] = ()
    backend: Annotated[BackendName, Flag("Model", basic=True), Field(description="Inference backend")] = "auto"
    dtype: Annotated[
        DtypeName,
        Flag("Model", backends=("torch",)),
        Field(description="Data type of weights and activations"),
    ] = "auto"
    weights: Annotated[
        WeightsName,
        Flag("Model", backends=("torch",), basic=True),
        Field(description="Quantize weights to int8 or int4 at load (CPU only); auto: as stored"),
    ] = "auto"
    thinking: Annotated[
        ThinkingName,
        Flag("Model"),
        Field(description="Markers of the model's thinking; auto: by its chat template; off: leave it in the answer"),
    ] = "auto"
    pin: Annotated[
        bool,
        Flag("Model"),
        Field(description="Never unload the model to make room for another"),
    ] = False
    deterministic: Annotated[
        bool,
        Flag("Model", backends=("torch",)),
        Field(description="Refuse models whose seeded answers are not bit-identical for every batch (CPU only)"),
    ] = False
    lora: Annotated[
        AdapterFolder | None,
        Flag("Model", "DIR", _ALL_BUT_EXLLAMAV3, example="~/models/my-lora"),
        Field(description="Folder of a LoRA adapter to apply to every request"),
    ] = None
    max_model_len: Annotated[
        int | None,
        Flag("Model", "TOKENS", example=8192, basic=True),
        Field(ge=1, le=MAX_TOKENS, description="Max context length; the model's own if not given"),
    ] = None
    max_input_len: Annotated[
        int | None,
        Flag("Model", "TOKENS", example=4096),
        Field(ge=1, le=MAX_TOKENS, description="Max prompt length"),
    ] = None
    alpha_value: Annotated[
        float | None,
        Flag("Model", "X", _ALL_BUT_EXLLAMAV3, example=2.5),
        Field(ge=1, le=MAX_STRETCH, description="RoPE scaling factor (NTK alpha), for longer contexts"),
    ] = None
    compress_pos_emb: Annotated[
        float | None,
        Flag("Model", "X", _ALL_BUT_EXLLAMAV3, example=2.0),
        Field(ge=1, le=MAX_STRETCH, description="RoPE scaling factor (linear position compression)"),
    ] = None
    num_experts: Annotated[
        int | None,
        Flag("Model", "N", _ALL_BUT_EXLLAMAV3, example=2),
        Field(ge=1, le=4096, description="Active experts per token of a mixture-of-experts model"),
    ] = None

    num_workers: Annotated[
        int,
        Flag("Engine", "N", when="now", knob=True, basic=True),
        Field(
            ge=NUM_WORKERS[0], le=NUM_WORKERS[1], description="Workers: replicas of the model, each in its own process"
        ),
    ] = 1
    max_prompts: Annotated[
        int,
        Flag("Engine", "N", when="now", knob=True, basic=True, gpu=64, gpu_library=32),
        Field(ge=MAX_PROMPTS[0], le=MAX_PROMPTS[1], description="Max concurrent requests per worker"),
    ] = 16
    step_tokens: Annotated[
        int,
        Flag("Engine", "TOKENS", ("torch",), when="now", knob=True, gpu=2048),
        Field(
            ge=STEP_TOKENS[0],
            le=STEP_TOKENS[1],
            description="Max tokens per step, prefill and decode together",
        ),
    ] = 512
    threads: Annotated[
        int,
        Flag("Engine", "N", when="now", knob=True),
        Field(ge=0, le=MAX_THREADS, description="CPU threads per worker; 0: cores divided by workers"),
    ] = 0
    timeout: Annotated[
        float,
        Flag("Engine", "SECONDS", engine="timeout_s", basic=True),
        Field(ge=0, le=MAX_TIMEOUT_S, description="Request timeout, including time in the queue; 0: none"),
    ] = 600.0
    drain_seconds: Annotated[
        float,
        Flag("Engine", "SECONDS"),
        Field(ge=0, le=MAX_TIMEOUT_S, description="Grace period for running requests at shutdown"),
    ] = 30.0
    hang_seconds: Annotated[
        float,
        Flag("Engine", "SECONDS", engine="hang_s"),
        Field(ge=0, le=MAX_TIMEOUT_S, description="Replace a worker that does not report for this time; 0: never"),
    ] = 60.0
    idle_unload: Annotated[
        float,
        Flag("Engine", "SECONDS", when="now", knob=True, engine="idle_unload_s", basic=True),
        Field(
            ge=0,
            le=MAX_TIMEOUT_S,
            description="Unload after this many idle seconds; reload on demand; 0: never",
        ),
    ] = 0.0
    max_models: Annotated[
        int,
        Flag("Engine", "N"),
        Field(ge=0, le=MAX_MODELS, description="Max models in memory when a request loads one; 0: as many as fit"),
    ] = 0
    devices: Annotated[
        SimulatedDevices,
        Flag("Engine", "sim:GIB,GIB", example="sim:24,24", basic=True),
        Field(description="Simulate GPUs with this memory (GiB each); workers run on the CPU"),
    ] = ""
    cluster: Annotated[
        str,
        Flag("Engine", "ADDRESS"),
        Field(
            pattern=r"^(local|auto|ray://.+)$",
            description="Ray cluster for the workers: local (none), auto or ray://HOST:PORT",
        ),
    ] = "local"
    gpu_split: Annotated[
        GigabyteList,
        Flag("Engine", "GB,GB", when="load", engine="gpu_split_gb", basic=True),
        Field(description="GB of weights on each GPU, for example 16,24"),
    ] = ()
    gpu_reserve: Annotated[
        MegabyteList,
        Flag("Engine", "MIB,MIB", ("exllamav2", "exllamav3"), when="load", engine="gpu_reserve_mib"),
        Field(description="MiB to leave free on each GPU with an automatic split, for example 512,256"),
    ] = ()
    tensor_parallel: Annotated[
        bool,
        Flag("Engine", backends=("exllamav2",), when="load"),
        Field(description="Tensor parallelism: split every layer over all GPUs"),
    ] = False
    tensor_parallel_size: Annotated[
        int,
        Flag("Engine", "N", backends=("torch",), example=2, when="load"),
        Field(ge=1, le=64, description="Tensor parallelism: split every layer over this many GPUs"),
    ] = 1
    gpu_balance: Annotated[
        bool,
        Flag("Engine", when="load"),
        Field(description="Place whole workers on the GPUs, round-robin"),
    ] = False
    cache_8bit: Annotated[
        bool,
        Flag("Engine", when="load"),
        Field(description="8-bit KV cache; same as --cache-bits 8"),
    ] = False
    cache_bits: Annotated[
        CacheBits,
        BeforeValidator(whole_number),
        Flag("Engine", when="load", basic=True),
        Field(description="Bits per KV cache element; 6 only with exllamav2 and exllamav3"),
    ] = 16
    kv_host_gib: Annotated[
        float,
        Flag("Engine", "GIB", backends=("torch",), example=8, when="load"),
        Field(ge=0, le=65536, description="Host memory for KV pages that outlive reloads and worker deaths; 0: none"),
    ] = 0.0
    kv_disk_gib: Annotated[
        float,
        Flag("Engine", "GIB", backends=("torch",), example=50, when="load"),
        Field(ge=0, le=65536, description="Disk space for KV pages that outlive reloads and restarts; 0: none"),
    ] = 0.0
    kv_dir: Annotated[
        Path | None,
        Flag("Engine", "DIR", backends=("torch",), example="/mnt/nvme", when="load"),
        Field(description="Folder in which ericllm-kv has the KV pages on disk; default: the user's cache folder"),
    ] = None
    draft_model: Annotated[
        ModelPath | None,
        Flag("Engine", "DIR", example="~/models/my-draft", when="load"),
        Field(description="Draft model for speculative decoding (same tokenizer): a folder or GGUF file"),
    ] = None
    ngram_draft: Annotated[
        bool,
        Flag("Engine", when="load"),
        Field(description="N-gram (prompt lookup) speculative decoding"),
    ] = False
    draft_tokens: Annotated[
        int | None,
        Flag("Engine", "N", example=4, when="load"),
        Field(ge=1, le=8, description="Max draft tokens per step (exllamav2: 7)"),
    ] = None
    attention: Annotated[
        AttentionName,
        Flag("Engine", backends=_ALL_BUT_EXLLAMAV3, when="load"),
        Field(description="Attention kernel: flash, triton, varlen (CUDA), native (CPU); auto: the fastest available"),
    ] = "auto"
    prefix_sharing: Annotated[
        PrefixSharing,
        Flag("Engine", when="now"),
        Field(
            description="Share the prefix cache; key: per API key; system: system prompts across keys; all: across keys"
        ),
    ] = "key"
    show_prompts: Annotated[
        bool,
        Flag("Engine", basic=True),
        Field(description="Keep prompts and answers of the last 200 requests in memory, readable by the operator"),
    ] = False
    worker_host: Annotated[
        Literal["process", "thread"],
        Flag("Engine"),
        Field(description="Run workers as child processes, or as threads for debugging"),
    ] = "process"
    slo_ttft: Annotated[
        Duration | None,
        Flag("Engine", "DURATION", example="500ms", when="now", engine="slo_ttft_s", basic=True),
        Field(
            gt=0, le=MAX_TIMEOUT_S, description="TTFT target: answers with a slower first token do not count as goodput"
        ),
    ] = None
    slo_itl: Annotated[
        Duration | None,
        Flag("Engine", "DURATION", example="50ms", when="now", engine="slo_itl_s", basic=True),
        Field(
            gt=0,
            le=MAX_TIMEOUT_S,
            description="ITL target: steps compute no more prompt tokens than keep it (torch backend), and answers "
            "with a slower average inter-token latency do not count as goodput",
        ),
    ] = None
    energy_rate: Annotated[
        float | None,
        Flag("Engine", "PER_KWH", example=0.3, when="now"),
        Field(ge=0, le=10**6, description="Price per kWh, for the energy cost on screen"),
    ] = None
    energy_currency: Annotated[
        str,
        Flag("Engine", "WORD", example="EUR", when="now"),
        Field(max_length=8, pattern=r"^\S*$", description="Currency of the energy price"),
    ] = ""

    headless: Annotated[bool, Flag("Console"), Field(description="Run the engine and the API without the console")] = (
        False
    )
    theme: Annotated[
        str,
        Flag("Console", "NAME", when="now", basic=True),
        Field(min_length=1, description="Colour theme; auto: dark, or high contrast on a 16-colour terminal"),
    ] = "auto"
    refresh_hz: Annotated[
        int,
        Flag("Console", "N", when="now", basic=True),
        Field(ge=1, le=10, description="Screen updates per second"),
    ] = 2
    read_only: Annotated[bool, Flag("Console"), Field(description="Show everything, change nothing")] = False
    record: Annotated[
        Path | None,
        Flag("Console", "FILE", example="~/night.rec"),
        Field(description="Record what the screens show into this file, for 'ericllm replay'"),
    ] = None
    log_level: Annotated[
        LogLevel, Flag("Console", basic=True), Field(description="Lowest log level; requests are logged at info")
    ] = "info"
    verbose: Annotated[bool, Flag("Console"), Field(description="Same as --log-level debug")] = False
    quiet: Annotated[
        bool, Flag("Console"), Field(description="With --headless, print only warnings and errors on stderr")
    ] = False

    @property
    def effective_log_level(self) -> LogLevel:
        """--log-level, or debug with --verbose."""
        return "debug" if self.verbose else self.log_level

    @property
    def effective_cache_bits(self) -> Literal[16, 8, 6, 4]:
        """--cache-bits, or 8 where --cache_8bit was given."""
        return 8 if self.cache_8bit else self.cache_bits


# What the schema says of each setting: its flag, its group, and whether it is a secret.


def fields() -> Sequence[tuple[str, FieldInfo, Flag]]:
    """Every setting with its flag, by its group, in the order of the model."""
    found = [(name, field, flag_of(name)) for name, field in Settings.model_fields.items()]
    return sorted(found, key=lambda each: get_args(Group).index(each[2].group))


def flag_of(name: str) -> Flag:
    """Return the facts of a setting besides its type."""
    return next(extra for extra in Settings.model_fields[name].metadata if isinstance(extra, Flag))


def is_secret(name: str) -> bool:
    """Return whether the value of a setting is never shown."""
    annotation = Settings.model_fields[name].annotation
    return SecretStr in (annotation, *get_args(annotation))


def add_setting(name: str, annotation: Any, default: object) -> None:
    """Add a setting of a plugin. annotation: type, Flag and Field, as in Settings.

    Raises RuntimeError once console.settings.load_options was imported: its options of a load would lack the setting.
    """
    if _OPTIONS in sys.modules:
        raise RuntimeError(f"add the setting {name} before {_OPTIONS} is imported")
    Settings.__annotations__[name] = annotation
    Settings.model_fields[name] = FieldInfo.from_annotated_attribute(annotation, default)
    Settings.model_rebuild(force=True)
