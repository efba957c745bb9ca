"""The library's config object as documented: defaults, what `prepare` reads and asserts, what the overrides do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.models.headers import read_header

_SPLITTABLE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_EXPERTS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
_NORMED_QUERIES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


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
