"""The library's config, model, caches, tokenizer and adapter as documented, on GPUs that are numbers.

Reproduced: what `prepare` reads and asserts, and what the overrides do; the callback before each module and once at the
end; weights by given sizes or as they fit, the cache with them; the assertions and errors of each way to load; a model
that is dead after unload. Weights and caches take bytes of a `FakeGpus`; a cache gives its own back only when nothing
refers to it any more, as tensors do.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from engine.backends.exllama.load import Gpus
from engine.backends.exllamav2.library import Library
from engine.models.headers import read_header

PAGE = 256
MIB = 1 << 20
GIB = 1 << 30
HARD_RESERVE_BYTES = 256 * MIB

_SPLITTABLE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_EXPERTS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
_NORMED_QUERIES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

Callback = Callable[[int, int], None] | None


class OutOfMemoryError(RuntimeError):
    """What torch raises."""


class FakeGpus(Gpus):
    """GPUs with so many bytes free. collected: how often freed memory was asked for."""

    def __init__(self, *free_bytes: int) -> None:
        self._free = list(free_bytes)
        self.used: Counter[int] = Counter()
        self.collected = 0

    def count(self) -> int:
        return len(self._free)

    def free_bytes(self, number: int) -> int:
        return self._free[number] - self.used[number]

    def give_back(self) -> None:
        gc.collect()
        self.collected += 1

    def take(self, number: int, size: int) -> None:
        """Allocate, or raise as torch does."""
        if size > self.free_bytes(number):
            raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size // MIB} MiB.")
        self.used[number] += size


class FakeTraits:
    """What the library knows of an architecture's language model."""

    def __init__(self, architecture: str) -> None:
        self.supports_tp = architecture in _SPLITTABLE
        self.is_moe = architecture in _EXPERTS
        self.swa = False
        self.alternating_swa = architecture == "Gemma2ForCausalLM"
        self.residual_stream_fp32 = architecture == "Gemma2ForCausalLM"
        self.keys: dict[str, str | None] = {
            "norm_1_post": ".post_attention_layernorm" if architecture == "Gemma2ForCausalLM" else None,
            "learned_pos_emb": "model.wpe" if architecture == "GPT2LMHeadModel" else None,
        }


class FakeArchitecture:
    """An architecture."""

    def __init__(self, architecture: str) -> None:
        self.lm = FakeTraits(architecture)


class FakeConfig:
    """The config. An attention without a soft-cap is there where `softcap_is_there` says so."""

    softcap_is_there = True

    def __init__(self) -> None:
        self.model_dir: str | None = None
        self.max_batch_size = 1
        self.max_input_len = 2048
        self.max_attention_size = 2048**2
        self.max_output_len: int | None = None
        self.scale_pos_emb = 1.0
        self.scale_alpha_value = 1.0
        self.alt_rope_method: str | None = None
        self.no_flash_attn, self.no_xformers, self.no_sdpa = True, False, False
        self.overridden = 0

    def prepare(self) -> None:
        """Read config.json. Lengths are overwritten."""
        folder = Path(str(self.model_dir))
        read: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert len(read["architectures"]) == 1, "Multiple architectures defined in config.json"
        self.architecture: str = read["architectures"][0]
        self.arch = FakeArchitecture(self.architecture)
        self.vocab_size: int = read["vocab_size"]
        self.hidden_size: int = read["hidden_size"]
        self.intermediate_size: int = read["intermediate_size"]
        self.num_hidden_layers: int = read["num_hidden_layers"]
        self.num_attention_heads: int = read["num_attention_heads"]
        self.num_key_value_heads: int = read.get("num_key_value_heads", self.num_attention_heads)
        self.head_dim: int = read.get("head_dim") or self.hidden_size // self.num_attention_heads
        self.use_qk_norm = self.architecture in _NORMED_QUERIES
        self.num_experts: int | None = read.get("num_local_experts")
        self.num_experts_per_token: int | None = read.get("num_experts_per_tok")
        self.rotary_embedding_base = float(read.get("rope_theta", 10000))
        self.max_seq_len: int = read.get("max_position_embeddings", 2048)
        self.sliding_window: int = read.get("sliding_window") or 0
        self.attn_logit_softcapping: float | None = read.get("attn_logit_softcapping")
        scaling = read.get("rope_scaling") or {}
        if scaling.get("type") == "linear":
            self.scale_pos_emb = float(scaling["factor"])
        if scaling.get("type") == "yarn":
            self.alt_rope_method = "yarn"
            self.yarn_rope_factor: float = scaling["factor"]
            self.yarn_rope_original_max_position_embeddings: int = scaling["original_max_position_embeddings"]
        files = list(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f" ## No .safetensors files found in {folder}")
        self.tensor_file_map = {name: str(file) for file in files for name in read_header(file)}
        if read.get("missing"):
            raise ValueError(f" ## Could not find {read['missing']}.* in model")

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        """Give up the paged attention where the model needs what it lacks."""
        self.overridden += 1
        if self.attn_logit_softcapping and not self.softcap_is_there:
            self.no_flash_attn = True


class FakeModule:
    """One of the modules that a model is loaded by."""

    def __init__(self, key: str, submodules: Sequence[FakeModule] = (), layer_idx: int | None = None) -> None:
        self.key = key
        self.submodules = list(submodules)
        self.layer_idx = layer_idx
        self.device_idx: int | None = None
        self.size = 0
        self.loaded = False


class FakeTensorParallel:
    """What a model has that is split within its layers."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = list(devices)

    def all_devices(self) -> list[int]:
        return self._devices


class FakeModel:
    """The model. calls: the arguments of each load.  forwarded: tokens of each forward pass.

    fails_at: a module before which the load raises, and what makes the error.
    """

    def __init__(self, config: FakeConfig, gpus: FakeGpus) -> None:
        self.config = config
        self.gpus = gpus
        self.cache_map: dict[int, str] = {}
        self.tp_context: FakeTensorParallel | None = None
        self.modules: list[FakeModule] = self._make_modules()
        self.modules_dict = {each.key: each for module in self.modules for each in module.submodules or [module]}
        self.calls: list[dict[str, Any]] = []
        self.forwarded: list[int] = []
        self.fails_at: tuple[int, Callable[[], Exception]] | None = None

    def load(self, gpu_split: list[float] | None = None, callback: Callback = None) -> None:
        """By given sizes, in units of 1024**3."""
        self.calls.append({"gpu_split": gpu_split})
        room = [gigabytes * GIB for gigabytes in gpu_split or [99999]]
        number = 0
        for module in self.modules[1:]:
            while module.size > room[number] if number < len(room) else True:
                number += 1
                assert number < len(room), "Insufficient space in device allocation"
            room[number] -= module.size
            module.device_idx = number
        for index, module in enumerate(self.modules):
            self._step(callback, index)
            self._load_module(module, module.device_idx)
        self._step(callback, len(self.modules))

    def load_autosplit(self, cache: FakeCache, reserve_vram: list[int], callback: Callback = None) -> None:
        """Each module where it fits, its part of the cache with it."""
        self.calls.append({"reserve_vram": reserve_vram})
        number, reserved = -1, Counter[int]()
        try:
            for index, module in enumerate(self.modules):
                self._step(callback, index)
                if index == 0:
                    continue
                while number < 0 or not self._fits(module, cache, number):
                    number += 1
                    if number >= self.gpus.count():
                        raise RuntimeError("Insufficient VRAM for model and cache")
                    size = reserve_vram[number] + HARD_RESERVE_BYTES
                    self.gpus.take(number, size)
                    reserved[number] += size
                self._load_module(module, number)
            self._step(callback, len(self.modules))
        finally:
            self.gpus.used.subtract(reserved)
        assert cache.max_seq_len >= self.config.max_input_len, "Total sequence length exceeds cache size"

    def load_tp(
        self,
        gpu_split: list[float] | None = None,
        callback: Callback = None,
        expect_cache_tokens: int = 0,
        expect_cache_base: Any = None,
    ) -> None:
        """Every layer on every GPU."""
        self.calls.append({"gpu_split": gpu_split, "expect_cache_tokens": expect_cache_tokens})
        assert self.config.arch.lm.supports_tp, "Tensor-parallel is not supported"
        self.tp_context = FakeTensorParallel(range(self.gpus.count()))
        for index, module in enumerate(self.modules):
            self._step(callback, index)
            self._load_module(module, 0 if index else None)
        self._step(callback, len(self.modules))

    def forward(self, input_ids: Any, cache: FakeCache, preprocess_only: bool = False) -> None:
        """Advance the cache by a chunk."""
        count = input_ids.shape[1]
        assert count <= self.config.max_input_len
        assert cache.current_seq_len + count <= cache.max_seq_len, "Total sequence length exceeds cache size"
        cache.current_seq_len += count
        self.forwarded.append(count)

    def unload(self) -> None:
        """Give the weights back; the model is dead afterwards."""
        for module in self.modules:
            if module.loaded and module.device_idx is not None:
                self.gpus.used[module.device_idx] -= module.size
        self.modules, self.modules_dict = [], {}

    def _step(self, callback: Callback, index: int) -> None:
        if callback is not None:
            callback(index, len(self.modules))
        if self.fails_at is not None and self.fails_at[0] == index:
            raise self.fails_at[1]()

    def _fits(self, module: FakeModule, cache: FakeCache, number: int) -> bool:
        try:
            if module.layer_idx is not None:
                cache.take_layer(module.layer_idx, number)
            self.gpus.take(number, module.size)
        except OutOfMemoryError:
            return False
        self.gpus.used[number] -= module.size
        return True

    def _load_module(self, module: FakeModule, number: int | None) -> None:
        module.device_idx = number
        if number is not None:
            self.gpus.take(number, module.size)
            if module.layer_idx is not None:
                self.cache_map[module.layer_idx] = f"cuda:{number}"
        module.loaded = True

    def _make_modules(self) -> list[FakeModule]:
        modules = [FakeModule("model.embed_tokens")]
        for layer in range(self.config.num_hidden_layers):
            key = f"model.layers.{layer}"
            parts = [[f"{key}.self_attn.{name}_proj" for name in "qkvo"] + [f"{key}.input_layernorm"]]
            parts += [
                [f"{key}.mlp.{name}_proj" for name in ("gate", "up", "down")] + [f"{key}.post_attention_layernorm"]
            ]
            modules.append(FakeModule(f"{key}", [FakeModule(each) for each in parts[0]], layer_idx=layer))
            modules.append(FakeModule(f"{key}", [FakeModule(each) for each in parts[1]]))
        modules += [FakeModule("model.norm"), FakeModule("lm_head")]
        sizes: Counter[str] = Counter()
        for file in Path(str(self.config.model_dir)).glob("*.safetensors"):
            for name, tensor in read_header(file).items():
                sizes[name.rpartition(".")[0]] += tensor.stored_bytes
        for module in modules:
            module.size = sum(sizes[each.key] for each in module.submodules or [module])
        return modules


class FakeCache:
    """A cache of `bits`; 2 * kv_heads * head_dim elements per token and layer."""

    def __init__(
        self, model: FakeModel, batch_size: int = 1, max_seq_len: int = -1, lazy: bool = False, *, bits: int = 16
    ) -> None:
        self.model_config = model.config
        self.batch_size = batch_size
        self.max_seq_len = max_seq_len
        self.current_seq_len = 0
        self.bits = bits
        self._gpus = model.gpus
        self._taken: dict[int, tuple[int, int]] = {}
        weakref.finalize(self, _give_back, model.gpus, self._taken)
        if not lazy:
            for layer, device in model.cache_map.items():
                self.take_layer(layer, int(device.removeprefix("cuda:")))

    def take_layer(self, layer: int, number: int) -> None:
        """Allocate a layer on a GPU, giving up the one before."""
        config = self.model_config
        size = 2 * self.max_seq_len * config.num_key_value_heads * config.head_dim * self.bits // 8
        before = self._taken.pop(layer, None)
        if before is not None:
            self._gpus.used[before[0]] -= before[1]
        self._gpus.take(number, size)
        self._taken[layer] = (number, size)


def _give_back(gpus: FakeGpus, taken: dict[int, tuple[int, int]]) -> None:
    for number, size in taken.values():
        gpus.used[number] -= size


class FakeTensorParallelCache:
    """A cache over all GPUs."""

    def __init__(self, model: FakeModel, base: Any, batch_size: int = 1, max_seq_len: int = -1) -> None:
        assert model.tp_context is not None, "Cannot create TP cache unless model is loaded with load_tp()"
        self.base = base
        self.batch_size = batch_size
        self.max_seq_len = max_seq_len
        self.current_seq_len = 0


class FakeTokenizer:
    """The tokenizer: tokenizer.json, or an error."""

    def __init__(self, config: FakeConfig) -> None:
        json.loads((Path(str(config.model_dir)) / "tokenizer.json").read_text(encoding="utf-8"))


class FakeLora:
    """An adapter: its targets must be modules of the model."""

    def __init__(self, model: FakeModel, lora_config_path: str, lora_path: str, lora_scaling: float = 1.0) -> None:
        self.lora_path = lora_path
        self.unloaded = False
        for name in read_header(Path(lora_path)):
            target = name[name.index("model.layers.") :].rpartition(".lora_")[0]
            model.modules_dict[target]

    def unload(self) -> None:
        self.unloaded = True


class FakeDynamicGenerator:
    """The generator's constructor, with its assertions. arguments: what it was made with."""

    def __init__(self, **arguments: Any) -> None:
        model, cache, draft = arguments["model"], arguments["cache"], arguments["draft_model"]
        config = model.config
        assert arguments["max_batch_size"] * arguments["max_q_size"] <= config.max_batch_size * config.max_input_len
        assert cache.max_seq_len % PAGE == 0
        assert arguments["max_chunk_size"] % PAGE == 0
        assert not config.no_flash_attn, "Paged mode requires flash-attn, but flash-attn is disabled in model config."
        assert not (draft and arguments["use_ngram_draft"]), "Cannot use both draft model and ngram draft"
        if draft:
            assert arguments["draft_cache"].max_seq_len == cache.max_seq_len
            assert draft.config.max_seq_len >= config.max_seq_len, "Draft model seq len must be >= model seq len"
        self.arguments = arguments
        self.padded_vocab_size = -(-config.vocab_size // 32) * 32
        self.max_sampling_threads = 16
        self.sampling_pool, self.filter_pool = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.loras: list[FakeLora] = []

    def set_loras(self, loras: list[FakeLora] | None) -> None:
        self.loras = loras or []

    def iterate_draftmodel_gen(self, results: list[Any]) -> None:
        """Draft; not called."""

    def iterate_ngram_gen(self, results: list[Any]) -> None:
        """Draft; not called."""


def fake_library(gpus: FakeGpus, *, attention: str = "triton", **changes: Any) -> Library:
    """The library's classes over `gpus`; the attention is settled. changes: other fields of Library."""
    fields: dict[str, Any] = {
        "config": FakeConfig,
        "model": lambda config: FakeModel(config, gpus),
        "caches": {bits: partial(FakeCache, bits=bits) for bits in (16, 8, 6, 4)},
        "cache_tp": FakeTensorParallelCache,
        "tokenizer": FakeTokenizer,
        "generator": FakeDynamicGenerator,
        "job": None,
        "page_hash": None,
        "settings": None,
        "lora": FakeLora,
        "attention": attention,
        "attention_reason": "flash-attn is not installed",
    }
    return Library(**(fields | changes))
