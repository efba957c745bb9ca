"""Which model to load, how, and what its workers take of which devices."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

BackendKind = Literal["torch", "exllamav2", "exllamav3"]
BackendName = Literal["auto", BackendKind]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
CacheBits = Literal[16, 8, 6, 4]
ThinkingName = Literal[
    "auto",
    "off",
    "think",
    "harmony",
    "gemma",
    "magistral",
    "command-a",
    "seed",
    "kimi",
    "apertus",
    "exaone",
    "granite",
]
"""A format of `engine.text.thinking`, the one that the model's chat template has, or none."""

AttentionName = Literal["auto", "native", "flash", "triton", "varlen", "gathered"]
WeightsName = Literal["auto", "int8", "int4"]

MAX_STRETCH = 1000.0
"""Most that a context may be stretched by, by alpha_value and by compress_pos_emb."""


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True):
    """Share of one device that a worker takes. device: "cpu", "cuda:N" or "sim:N".  layers: how many of the decoder's
    layers, in order; the embedding goes with the first share, the final norm and the head with the last.

    ranks: of tensor parallelism, each with a share that has a part of every layer; 1 for whole layers.
    shared_bytes: of the weights, what all workers of the model have once in the machine's RAM, as far as a plan knows.
    """

    device: str
    layers: int = 0
    ranks: int = 1
    weights_bytes: int = 0
    kv_bytes: int = 0
    working_bytes: int = 0
    shared_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.working_bytes


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter: its folder (adapter_config.json and safetensors) and what requests call it.

    version: digest of its files and scale, unlike that of another under its name; "" where that is not looked at.
    """

    name: str
    path: Path
    scale: float = 1.0
    version: str = ""

    @property
    def key(self) -> str:
        """Name and version: what an answer is computed with from its start to its end."""
        return f"{self.name}\0{self.version}" if self.version else self.name


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which model to load and how; what a worker gets to load.

    path: a folder with config.json and safetensors.  name: what clients call it; aliases: what they may call it too.
    pin: never unloaded to make room for another model.
    sampling: values for requests that leave them open, by the names of GenerationDefaults, before the recommendations
    of the model's makers.
    max_model_len, max_input_len: tokens; None takes the model's own context length.
    weights: what the weights of linear layers are made into at load; "auto" leaves them in `dtype`.
    kv_cache_tokens: tokens that the KV pages of one worker hold; None sizes it from max_prompts and free memory.
    kv_host_gib, kv_disk_gib: GiB of KV pages to keep in shared memory, and in the folder kv_dir, None for our cache.
    gpu_split_gb: GiB of weights per GPU, in device order.  gpu_reserve_mib: MiB left free on each GPU.
    tensor_parallel: split every layer over all GPUs of a machine (exllamav2).  tensor_parallel_size: split every layer
        over this many GPUs, or processes on a CPU, one rank of the worker on each (torch).
    draft_model: folder of a small model with the same vocabulary that guesses ahead.  ngram_draft: guess from the
        request's own text instead.  draft_tokens: guesses per step; None is the backend's choice.
    attention: which paged attention on CUDA; "auto" takes the best that fits.
    thinking: format of what it writes before its answers, which is kept apart; "auto" is by its chat template.
    deterministic: refuse whatever would let an answer depend, in its last bits, on what else is computed.
    device: "auto", "cpu", "cuda:N" or "sim:N".
    shares: what placement gave the worker of each device, in order of the layers; () where it had no say.
    prefix_salt: what the keys of KV pages are hashed with, the same for all workers of a model; b"" draws one.
    kv_file: name of the RAM file in which a worker on a CPU has its KV pages, the same for the one that takes its
        place; "" for memory of its own.
    native: whether our own kernels for a CPU must compute, or must not, as for the other workers of the model; None:
        where they can be had.
    threads: CPU threads of each worker; None shares the machine's cores out.
    """

    path: Path
    name: str
    aliases: tuple[str, ...] = ()
    pin: bool = False
    sampling: dict[str, float] = {}
    backend: BackendName = "auto"
    dtype: DtypeName = "auto"
    weights: WeightsName = "auto"
    max_model_len: int | None = None
    max_input_len: int | None = None
    kv_cache_tokens: int | None = None
    kv_host_gib: float = 0.0
    kv_disk_gib: float = 0.0
    kv_dir: Path | None = None
    cache_bits: CacheBits = 16
    alpha_value: float | None = None
    compress_pos_emb: float | None = None
    num_experts: int | None = None
    lora: Path | None = None
    gpu_split_gb: tuple[float, ...] = ()
    gpu_reserve_mib: tuple[int, ...] = ()
    tensor_parallel: bool = False
    tensor_parallel_size: int = 1
    draft_model: Path | None = None
    ngram_draft: bool = False
    draft_tokens: int | None = None
    attention: AttentionName = "auto"
    thinking: ThinkingName = "auto"
    deterministic: bool = False
    gpu_balance: bool = False
    device: str = "auto"
    shares: tuple[DeviceShare, ...] = ()
    prefix_salt: bytes = b""
    kv_file: str = ""
    native: bool | None = None
    threads: int | None = None
