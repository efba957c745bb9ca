"""The model that a GGUF file's metadata describes, as the config.json of the same model has it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from engine.backends.common.config_values import SOURCE, ConfigSource, positive, refusal
from engine.config import quote_value
from engine.errors import UnsupportedModel
from engine.models.files import open_file
from engine.models.gguf.header import GgufHeader, GgufTensor, damaged

Config = dict[str, Any]

_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_ROPE = {
    "rope.dimension_count": "partial_rotary_factor",
    "rope.scale_linear": "factor",
    "rope.scaling.factor": "factor",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
"""Some of them by two names, the newer one last."""

_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_MAY_BE_NONE = (
    *("attention.sliding_window", "expert_count", "expert_used_count"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
)
"""Sizes of which 0 says that there is none."""

_MAX_WHOLE = 2**64

_SCALINGS = ("linear", "yarn")
_MAX_FACTORS = 1024
"""Of RoPE's frequencies: half as many as a head has dimensions."""


class Family(msgspec.Struct, frozen=True):
    """An architecture of GGUF: its name in config.json, what config.json says that the metadata does not, and whether
    rows of queries and keys are in the order of ggml's own RoPE.

    more: from the header and the config so far.
    """

    architecture: str
    more: Callable[[GgufHeader, Config], Config] = lambda header, config: {}
    permuted: bool = False


def _biases(header: GgufHeader, config: Config) -> Config:
    return {"attention_bias": _has(header, "attn_q.bias"), "mlp_bias": _has(header, "ffn_up.bias")}


def _llama(header: GgufHeader, config: Config) -> Config:
    return {"sliding_window": None, **_biases(header, config)}


def _mixtral(header: GgufHeader, config: Config) -> Config:
    return {"sliding_window": None}


def _mistral3(header: GgufHeader, config: Config) -> Config:
    _refuse(header, "attention.temperature_scale", "queries that are scaled by their position")
    return {"sliding_window": None}


def _qwen_moe(header: GgufHeader, config: Config) -> Config:
    usual = config["architectures"] == ["Qwen3MoeForCausalLM"]
    normalised = header.flag(_key(header, "expert_weights_norm"), usual)
    return {"norm_topk_prob": normalised, "qkv_bias": _has(header, "attn_q.bias"), **_biases(header, config)}


def _gemma2(header: GgufHeader, config: Config) -> Config:
    """Attention is scaled by the size of a head, but in the 27B model by that of its part of the hidden state."""
    return {"query_pre_attn_scalar": _scalar(config, 46)}


def _gemma3(header: GgufHeader, config: Config) -> Config:
    local = config.get("rope_local_base_freq", 10_000.0)
    return {"query_pre_attn_scalar": _scalar(config, 62), "rope_local_base_freq": local}


def _scalar(config: Config, large: int) -> int:
    if config.get("num_hidden_layers") == large:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


def _granite(header: GgufHeader, config: Config) -> Config:
    _refuse(header, "expert_count", "experts")
    found = {name: _number(header, key) for key, name in _GRANITE.items()}
    return {**_biases(header, config), **{name: value for name, value in found.items() if value is not None}}


def _olmo2(header: GgufHeader, config: Config) -> Config:
    _refuse(header, "attention.sliding_window", "the windows of OLMo 3")
    return {}


def _smollm3(header: GgufHeader, config: Config) -> Config:
    return {"no_rope_layer_interval": 4, **_biases(header, config)}


def _stablelm(header: GgufHeader, config: Config) -> Config:
    return {
        "use_parallel_residual": not _has(header, "ffn_norm.weight"),
        "use_qkv_bias": _has(header, "attn_q.bias"),
        "qk_layernorm": _has(header, "attn_q_norm.weight"),
    }


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, permuted=True),
    "llama with experts": Family("MixtralForCausalLM", _mixtral, permuted=True),
    "mistral3": Family("MistralForCausalLM", _mistral3, permuted=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen2moe": Family("Qwen2MoeForCausalLM", _qwen_moe),
    "qwen3": Family("Qwen3ForCausalLM", _biases),
    "qwen3moe": Family("Qwen3MoeForCausalLM", _qwen_moe),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2),
    "gemma3": Family("Gemma3ForCausalLM", _gemma3),
    "phi3": Family("Phi3ForCausalLM"),
    "granite": Family("GraniteForCausalLM", _granite, permuted=True),
    "olmo2": Family("Olmo2ForCausalLM", _olmo2),
    "smollm3": Family("SmolLM3ForCausalLM", _smollm3, permuted=True),
    "stablelm": Family("StableLmForCausalLM", _stablelm),
}
"""By general.architecture."""


def family_of(header: GgufHeader) -> Family:
    """The family of a file's model. Raises UnsupportedModel for one that is not computed here."""
    name = header.text("general.architecture")
    family = FAMILIES.get(f"{name} with experts" if name == "llama" and _whole(header, "expert_count") else name)
    if family is None:
        names = ", ".join(each for each in FAMILIES if " " not in each)
        raise UnsupportedModel(
            f"unsupported architecture: {quote_value(name) or 'none named'} (of GGUF: {names})", supported=names
        )
    return family


def config_of(header: GgufHeader) -> Config:
    """The model's config.json. Raises UnsupportedModel for an architecture that is not computed here, and for a field
    that is missing or of another kind; ModelLoadFailed for a damaged file."""
    kind = header.text("general.type")
    if kind not in ("", "model"):
        raise UnsupportedModel(f"{quote_value(header.file.name)} is of the type {quote_value(kind)}, and no model")
    family = family_of(header)
    if not header.flag(causal := _key(header, "attention.causal"), True):
        raise UnsupportedModel(
            f"{quote_value(header.file.name)} has tokens that see later ones ({causal}), which is not supported",
            field=causal,
        )
    config: Config = {
        SOURCE: _source(header),
        "architectures": [family.architecture],
        "model_type": header.text("general.architecture"),
    }
    for key, name in _SIZES.items():
        whole = _whole(header, key)
        if whole is not None and (whole or key not in _MAY_BE_NONE):
            config[name] = whole
    for key, name in _NUMBERS.items():
        if (number := _number(header, key)) is not None:
            config[name] = number
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise damaged(header.file, "it has no matrix token_embd.weight")
    for name in _SIZES.values():
        if name in config or name in _REQUIRED:
            positive(config, name, most=_MAX_WHOLE)  # they are computed with below; who takes them has a limit of each
    if embedding.shape[1] != config["hidden_size"]:
        raise damaged(
            header.file,
            f"its token_embd.weight has rows of {embedding.shape[1]}, and its {_key(header, 'embedding_length')} is "
            f"{config['hidden_size']}",
        )
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "head_dim" not in config and heads > hidden:
        raise refusal(config, "num_attention_heads", heads, f"its {_key(header, 'embedding_length')} is {hidden}")
    config.setdefault("head_dim", hidden // heads)
    config |= _rope(header, config)
    config |= family.more(header, config)
    config["torch_dtype"] = _dtype(header, config)
    if (end := header.whole("tokenizer.ggml.eos_token_id")) is not None:
        config["eos_token_id"] = end
    return config


def _source(header: GgufHeader) -> ConfigSource:
    """The file, and the names that values of the config have in it."""
    fields = {"vocab_size": "token_embd.weight's rows"}
    for key, name in (*_SIZES.items(), *_NUMBERS.items(), *_GRANITE.items(), *_ROPE.items()):
        if name not in fields or _key(header, key) in header:
            fields[name] = _key(header, key)
    for name in ("long", "short"):
        both = "rope_freqs.weight" in header.tensors
        fields[f"{name}_factor"] = "rope_freqs.weight" if both else f"rope_factors_{name}.weight"
    return ConfigSource(quote_value(header.file.name), fields)


def _rope(header: GgufHeader, config: Config) -> Config:
    found: Config = {}
    rotated, head_dim = _whole(header, "rope.dimension_count"), config["head_dim"]
    if rotated is not None:
        if not 0 < rotated <= head_dim or rotated % 2:
            why = f"it must be an even number up to the {head_dim} elements of a head"
            raise refusal(config, "partial_rotary_factor", rotated, why)
        found["partial_rotary_factor"] = rotated / head_dim
    kind = header.text(_key(header, "rope.scaling.type"), "linear")
    factor = _number(header, "rope.scaling.factor") or _number(header, "rope.scale_linear")
    attention_factor = _number(header, "rope.scaling.attn_factor")
    original = _whole(header, "rope.scaling.original_context_length")
    divisors = header.tensors.get("rope_freqs.weight")
    long, short = header.tensors.get("rope_factors_long.weight"), header.tensors.get("rope_factors_short.weight")
    if divisors is not None:  # of Llama 3's scaling: by what each frequency is divided
        if kind != "none":
            _refuse(header, "rope.scaling.factor", "a scaling beside rope_freqs", but=(0.0, 1.0))
        both = _floats(divisors)
        found["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": both,
            "long_factor": both,
            "attention_factor": attention_factor or 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": config.get("max_position_embeddings", 0),
        }
    elif long is not None and short is not None:
        found["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": _floats(short),
            "long_factor": _floats(long),
            "attention_factor": attention_factor,
        }
        found["original_max_position_embeddings"] = original or config.get("max_position_embeddings", 0)
    elif long is not None or short is not None:
        lacking = "rope_factors_long.weight" if long is None else "rope_factors_short.weight"
        raise UnsupportedModel(f"{quote_value(header.file.name)} has longrope without its tensor {lacking}")
    elif kind not in ("none", *_SCALINGS):
        problem = (
            "it lacks the factors" if kind == "longrope" else f"none, {', '.join(_SCALINGS)} and longrope are read"
        )
        raise UnsupportedModel(
            f"{quote_value(header.file.name)} has the RoPE scaling {quote_value(kind)} "
            f"({_key(header, 'rope.scaling.type')}); {problem}"
        )
    else:
        _refuse(header, "rope.scaling.attn_factor", "a factor of attention", but=(0.0, 1.0))
        if kind != "none" and factor:
            found["rope_scaling"] = {"rope_type": kind, "factor": factor} | (_yarn(header) if kind == "yarn" else {})
    if "rope_scaling" in found:
        found["rope_scaling"][SOURCE] = config[SOURCE]
    return found


def _yarn(header: GgufHeader) -> Config:
    """Constants of YaRN. The number that the metadata names a logarithm's multiplier is DeepSeek's mscale_all_dim, by
    which cos and sin are divided as mscale, here 1, multiplies them: llama-context.cpp (llama.cpp)."""
    if (_number(header, "rope.scaling.yarn_ext_factor") or 0.0) >= 0.0:  # below, none is named
        _refuse(header, "rope.scaling.yarn_ext_factor", "a share of extrapolation", but=(1.0,))
    multiplier = _number(header, "rope.scaling.yarn_log_multiplier")
    values = {
        "original_max_position_embeddings": _whole(header, "rope.scaling.original_context_length"),
        "beta_fast": _number(header, "rope.scaling.yarn_beta_fast"),
        "beta_slow": _number(header, "rope.scaling.yarn_beta_slow"),
        "attention_factor": _number(header, "rope.scaling.yarn_attn_factor"),
        "mscale": 1.0 if multiplier else None,
        "mscale_all_dim": multiplier,
    }
    return {name: value for name, value in values.items() if value}


def _dtype(header: GgufHeader, config: Config) -> str:
    """In which most of a matrix's numbers are made: float16 where they are quantised, but bfloat16 for Gemma, whose
    activations grow beyond float16's range."""
    formats = {tensor.format.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if formats <= {"F32"}:
        return "float32"
    is_gemma = str(config["architectures"][0]).startswith("Gemma")
    return "bfloat16" if is_gemma or formats <= {"F32", "BF16"} else "float16"


def _floats(tensor: GgufTensor) -> list[float]:
    """The numbers of a small tensor of 32-bit floats. Raises ModelLoadFailed for another."""
    if tensor.format.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        raise damaged(tensor.file, "its RoPE factors are no short list of 32-bit floats")
    with open_file(tensor.file) as stream:
        stream.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.num_bytes)))


def _refuse(header: GgufHeader, key: str, what: str, *, but: tuple[float, ...] = (0.0,)) -> None:
    """Raise UnsupportedModel for a file whose metadata has a number there that is none of `but`."""
    if _number(header, key) not in (None, *but):
        raise UnsupportedModel(
            f"{quote_value(header.file.name)} has {what} ({_key(header, key)}), which is not supported",
            field=_key(header, key),
        )


def _has(header: GgufHeader, part: str) -> bool:
    return f"blk.0.{part}" in header.tensors


def _key(header: GgufHeader, name: str) -> str:
    return f"{header.text('general.architecture')}.{name}"


def _whole(header: GgufHeader, name: str) -> int | None:
    return header.whole(_key(header, name))


def _number(header: GgufHeader, name: str) -> float | None:
    return header.number(_key(header, name))
