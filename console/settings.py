"""Every setting, once: this model makes the flags, the ERICLLM_* variables, config.toml and the sample file.

A flag wins over a variable, a variable over config.toml, config.toml over the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
from pydantic import BeforeValidator, Field, SecretStr, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from engine.backends.torch.settings import MAX_STRETCH
from engine.config import MAX_TIMEOUT_S, AttentionName, BackendKind, CacheBits
from engine.devices import parse_devices
from engine.errors import InvalidRequest
from engine.models.adapters import CONFIG as ADAPTER_CONFIG
from engine.models.files import home_expanded

APP_NAME = "ericllm"
ENV_PREFIX = "ERICLLM_"
MAX_TOKENS = 10**9

Group = Literal["Model", "Engine", "API", "Console"]


@dataclass(frozen=True, slots=True)
class Flag:
    """What a field is besides its type: its group in the help, and which backends honour it.

    metavar: how the help shows its value.  backends: None where every one does.
    example: what the sample file shows where there is no default.
    """

    group: Group
    metavar: str = ""
    backends: tuple[BackendKind, ...] | None = None
    example: str | int | float | None = None


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


def _split_list(value: object) -> object:
    """'16,24' -> ['16', '24'], '' -> []; anything but text is left to pydantic."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")] if value.strip() else []
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    return value


def _split_paths(value: object) -> object:
    if isinstance(value, str):
        return [part for part in value.split(os.pathsep) if part]
    return value


def _whole_number(value: object) -> object:
    """'8' -> 8, as variables have it; anything else is left to pydantic."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


GigabyteList = Annotated[tuple[float, ...], NoDecode, BeforeValidator(_split_list)]
MegabyteList = Annotated[tuple[int, ...], NoDecode, BeforeValidator(_split_list)]
PathList = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split_paths)]


class Settings(BaseSettings):
    """All settings of the console and the engine. Build it with `console.sources.load_settings`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    model: Annotated[
        str,
        Flag("Model", "NAME"),
        Field(min_length=1, description="A folder, a name found in --models-dir, a hub id, or 'demo'"),
    ] = "demo"
    models_dir: Annotated[
        PathList,
        Flag("Model", "DIR"),
        Field(description="Folder searched for models; may be given again. The hub cache is searched too"),
    ] = ()
    backend: Annotated[
        Literal["auto", "torch", "exllamav2"], Flag("Model"), Field(description="What computes the tokens")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Flag("Model", backends=("torch",)),
        Field(description="Type of weights and activations"),
    ] = "auto"
    lora: Annotated[
        Path | None,
        Flag("Model", "DIR", example="~/models/my-lora"),
        Field(description="Folder of a LoRA adapter to apply to every request"),
    ] = None
    max_model_len: Annotated[
        int | None,
        Flag("Model", "TOKENS", example=8192),
        Field(ge=1, le=MAX_TOKENS, description="Context length; the model's own if not given"),
    ] = None
    max_input_len: Annotated[
        int | None,
        Flag("Model", "TOKENS", example=4096),
        Field(ge=1, le=MAX_TOKENS, description="Longest prompt accepted"),
    ] = None
    alpha_value: Annotated[
        float | None,
        Flag("Model", "X", example=2.5),
        Field(ge=1, le=MAX_STRETCH, description="RoPE scaling by NTK alpha, for longer contexts"),
    ] = None
    compress_pos_emb: Annotated[
        float | None,
        Flag("Model", "X", example=2.0),
        Field(ge=1, le=MAX_STRETCH, description="RoPE scaling by linear compression of positions"),
    ] = None
    num_experts: Annotated[
        int | None,
        Flag("Model", "N", example=2),
        Field(ge=1, le=4096, description="Experts per token of a mixture-of-experts model"),
    ] = None

    num_workers: Annotated[
        int, Flag("Engine", "N"), Field(ge=1, le=64, description="Replicas of the model, each in its own process")
    ] = 1
    max_prompts: Annotated[
        int, Flag("Engine", "N"), Field(ge=1, le=4096, description="Requests that a worker works on at once")
    ] = 16
    timeout: Annotated[
        float,
        Flag("Engine", "SECONDS"),
        Field(ge=0, le=MAX_TIMEOUT_S, description="Time a request may take, waiting included; 0: any"),
    ] = 600.0
    drain_seconds: Annotated[
        float,
        Flag("Engine", "SECONDS"),
        Field(ge=0, le=MAX_TIMEOUT_S, description="Time that running requests get to end when the program is stopped"),
    ] = 30.0
    hang_seconds: Annotated[
        float,
        Flag("Engine", "SECONDS"),
        Field(ge=0, le=MAX_TIMEOUT_S, description="A worker that reports nothing for so long is replaced; 0: never"),
    ] = 60.0
    idle_unload: Annotated[
        float,
        Flag("Engine", "SECONDS"),
        Field(ge=0, le=MAX_TIMEOUT_S, description="Unload a model that nobody asks for so long, until asked; 0: never"),
    ] = 0.0
    devices: Annotated[
        str,
        Flag("Engine", "sim:GIB,GIB", example="sim:24,24"),
        Field(description="Simulated cards with that many GiB, computed on the CPU; the machine's own if not given"),
    ] = ""
    cluster: Annotated[
        str,
        Flag("Engine", "ADDRESS"),
        Field(pattern=r"^(local|auto|ray://.+)$", description="Where workers run: local, auto or ray://HOST:PORT"),
    ] = "local"
    gpu_split: Annotated[
        GigabyteList,
        Flag("Engine", "GB,GB"),
        Field(description="GB of weights per GPU, for example 16,24"),
    ] = ()
    gpu_reserve: Annotated[
        MegabyteList,
        Flag("Engine", "MIB,MIB", ("exllamav2",)),
        Field(description="MiB to leave free on each GPU where the split is automatic, for example 512,256"),
    ] = ()
    tensor_parallel: Annotated[
        bool,
        Flag("Engine", backends=("exllamav2",)),
        Field(description="Split every layer over the GPUs instead of giving each some layers"),
    ] = False
    gpu_balance: Annotated[
        bool, Flag("Engine"), Field(description="Spread whole workers over the GPUs, round-robin")
    ] = False
    cache_8bit: Annotated[bool, Flag("Engine"), Field(description="8-bit KV cache: the same as --cache-bits 8")] = False
    cache_bits: Annotated[
        CacheBits,
        BeforeValidator(_whole_number),
        Flag("Engine"),
        Field(description="Bits per KV cache element; 6 with exllamav2 alone"),
    ] = 16
    draft_model: Annotated[
        Path | None,
        Flag("Engine", "DIR", ("exllamav2",), example="~/models/my-draft"),
        Field(description="Folder of a small model with the same vocabulary that guesses tokens ahead"),
    ] = None
    ngram_draft: Annotated[
        bool,
        Flag("Engine", backends=("exllamav2",)),
        Field(description="Guess tokens ahead from the request's own text"),
    ] = False
    draft_tokens: Annotated[
        int | None,
        Flag("Engine", "N", ("exllamav2",), example=4),
        Field(ge=1, le=7, description="Tokens to guess ahead per step"),
    ] = None
    attention: Annotated[
        AttentionName,
        Flag("Engine"),
        Field(description="Paged attention on CUDA; auto takes the best that fits the GPU"),
    ] = "auto"
    worker_host: Annotated[
        Literal["process", "thread"],
        Flag("Engine"),
        Field(description="Where workers run: child processes, or threads of this one for debugging"),
    ] = "process"

    api: Annotated[bool, Flag("API"), Field(description="Serve HTTP from the start")] = True
    host: Annotated[str, Flag("API", "ADDRESS"), Field(min_length=1, description="Address to listen on")] = "127.0.0.1"
    port: Annotated[int, Flag("API", "PORT"), Field(ge=0, le=65535, description="Port to listen on; 0: any free")] = (
        8000
    )
    api_key: Annotated[
        SecretStr | None,
        Flag("API", "KEY", example="change-me"),
        Field(min_length=1, description="Key that clients must send as a Bearer token"),
    ] = None

    headless: Annotated[bool, Flag("Console"), Field(description="Engine and API without a screen")] = False
    theme: Annotated[str, Flag("Console", "NAME"), Field(description="Colour theme")] = "ericllm-dark"
    verbose: Annotated[bool, Flag("Console"), Field(description="Log more")] = False

    @field_validator("gpu_split")
    @classmethod
    def _positive_split(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(gigabytes <= 0 for gigabytes in value):
            raise ValueError("every GPU's share must be more than 0 GB")
        return value

    @field_validator("gpu_reserve")
    @classmethod
    def _no_negative_reserve(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(mebibytes < 0 for mebibytes in value):
            raise ValueError("what is left free on a GPU must be 0 MiB or more")
        return value

    @field_validator("models_dir")
    @classmethod
    def _existing_folders(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        folders = tuple(map(home_expanded, value))
        for path in folders:
            if not path.is_dir():
                raise ValueError(f"there is no folder {path}")
        return folders

    @field_validator("devices")
    @classmethod
    def _simulated_devices(cls, value: str) -> str:
        if value:
            try:
                parse_devices(value)
            except InvalidRequest as error:
                raise ValueError(error.message) from None
        return value

    @field_validator("lora", "draft_model")
    @classmethod
    def _existing_folder(cls, value: Path | None) -> Path | None:
        if value is not None and not home_expanded(value).is_dir():
            raise ValueError(f"there is no folder {value}")
        return value

    @field_validator("lora")
    @classmethod
    def _folder_of_an_adapter(cls, value: Path | None) -> Path | None:
        if value is not None and not (home_expanded(value) / ADAPTER_CONFIG).is_file():
            raise ValueError(f"there is no {ADAPTER_CONFIG} in {value}")
        return value

    @property
    def effective_cache_bits(self) -> Literal[16, 8, 6, 4]:
        """--cache-bits, or 8 where --cache_8bit was given."""
        return 8 if self.cache_8bit else self.cache_bits

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`console.sources` merges the sources itself, so that it can say where a bad value came from."""
        return (init_settings,)


def fields() -> Sequence[tuple[str, FieldInfo, Flag]]:
    """Every setting with its flag, in the order of the model."""
    return [
        (name, field, next(extra for extra in field.metadata if isinstance(extra, Flag)))
        for name, field in Settings.model_fields.items()
    ]
