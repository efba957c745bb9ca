"""Settings of a load applied to a model: context, RoPE, experts; refusals of those it cannot honour. No torch here."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from engine.backends.common.kv_format import refuse_format
from engine.backends.common.model_config import ModelConfig, context_length
from engine.config import MAX_STRETCH, ModelSpec
from engine.errors import InvalidRequest

_ON_CPU = "supports only native and gathered on a CPU"
_OF_FLOAT16 = "quantizes weights for bfloat16 and float32 only, not for float16"


def apply_settings(config: ModelConfig, spec: ModelSpec) -> ModelConfig:
    """`config` with the context length and RoPE settings of `spec`. Raises InvalidRequest naming the setting.

    alpha_value and compress_pos_emb each stretch the longest context by their value; max_model_len picks a length
    up to that, which is also what it is when not given.
    """
    stretch = 1.0
    for param in ("alpha_value", "compress_pos_emb"):
        value = getattr(spec, param)
        if value is not None and not 1.0 <= value <= MAX_STRETCH:
            raise InvalidRequest(
                f"{param} is {value:g}; it must be between 1 and {MAX_STRETCH:g}", param=param, value=value
            )
        stretch *= value or 1.0
    refuse_format(config.head_dim, spec.cache_bits)
    longest = int(config.max_model_len * stretch)
    if config.rope.kind == "dynamic":
        longest = int(longest * config.rope.factor)
    length = context_length(spec.max_model_len, int(config.max_model_len * stretch), longest)
    alpha, compress = spec.alpha_value or 1.0, spec.compress_pos_emb or 1.0
    rope = replace(config.rope, alpha=alpha, compress=compress, max_positions=int(length / (alpha * compress)))
    return with_num_experts(replace(config, rope=rope, max_model_len=length), spec.num_experts)


def with_num_experts(config: ModelConfig, number: int | None) -> ModelConfig:
    """Return `config` with `number` experts per token, its own where None. Raises InvalidRequest where it has fewer."""
    if number is None:
        return config
    experts = config.traits.experts
    if experts is None or not 1 <= number <= experts.count:
        has = "is not a mixture of experts" if experts is None else f"has {experts.count} experts in a layer"
        raise InvalidRequest(f"num_experts is {number}; this model {has}", param="num_experts", value=number)
    return replace(config, traits=replace(config.traits, experts=replace(experts, per_token=number)))


def refuse_settings(spec: ModelSpec, *, on_cpu: bool, simulated: bool = False) -> None:
    """Raise InvalidRequest for the first setting of `spec` that the torch backend cannot honour.

    on_cpu: the CPU computes.  simulated: it does so in place of other devices, over which a model may be spread.
    """
    one_device = on_cpu and not simulated
    guesses = spec.ngram_draft or spec.draft_model is not None
    refused: tuple[tuple[str, bool, str], ...] = (
        ("gpu_split", bool(spec.gpu_split_gb) and one_device, "runs on the CPU here, where there is nothing to split"),
        ("gpu_split", bool(spec.gpu_split_gb) and not spec.shares, "needs a placement for it, and there is none"),
        ("weights", spec.weights != "auto" and not one_device, "quantizes weights on a CPU only"),
        ("weights", spec.weights != "auto" and spec.dtype == "float16", _OF_FLOAT16),
        ("tensor_parallel", spec.tensor_parallel, "splits layers over as many GPUs as tensor_parallel_size says"),
        ("attention", on_cpu and spec.attention not in ("auto", "native", "gathered"), _ON_CPU),
        ("deterministic", spec.deterministic and not on_cpu, "is deterministic on a CPU only"),
        ("draft_tokens", spec.draft_tokens is not None and not guesses, "drafts only with draft_model or ngram_draft"),
        ("kv_dir", spec.kv_dir is not None and not spec.kv_disk_gib, "keeps nothing there without kv_disk_gib"),
        ("gpu_balance", spec.gpu_balance and one_device, "runs on the CPU here, where there is nothing to balance"),
    )
    for param, is_set, reason in (*refused, *(_with_ranks(spec) if spec.tensor_parallel_size > 1 else ())):
        if is_set:
            raise InvalidRequest(f"{param} is not supported: the torch backend {reason}", param=param)


def _with_ranks(spec: ModelSpec) -> tuple[tuple[str, bool, str], ...]:
    """Return the settings that tensor parallelism excludes, and why."""
    host, disk = spec.kv_host_gib > 0, spec.kv_disk_gib > 0
    return (
        ("gpu_split", bool(spec.gpu_split_gb), "splits each layer evenly with tensor_parallel_size"),
        ("gpu_balance", spec.gpu_balance, "places whole workers or splits layers, not both (tensor_parallel_size)"),
        ("weights", spec.weights != "auto", "quantizes whole weights only, not parts of them (tensor_parallel_size)"),
        ("deterministic", spec.deterministic, "adds up the parts of tensor_parallel_size in an order of gloo's"),
        ("draft_model", spec.draft_model is not None, "drafts with n-grams only where tensor_parallel_size is set"),
        ("kv_host_gib", host, "stores the KV pages of one rank only, not of several (tensor_parallel_size)"),
        ("kv_disk_gib", disk, "stores the KV pages of one rank only, not of several (tensor_parallel_size)"),
    )


def draft_spec(spec: ModelSpec) -> ModelSpec:
    """How the draft model of `spec` is loaded: of the same number formats, everything else as it comes. It only
    guesses, so whatever computes it will do, even where the model itself is deterministic."""
    return msgspec.structs.replace(
        spec,
        path=spec.draft_model or spec.path,
        max_model_len=None,
        alpha_value=None,
        compress_pos_emb=None,
        num_experts=None,
        lora=None,
        gpu_split_gb=(),
        tensor_parallel_size=1,
        draft_model=None,
        ngram_draft=False,
        draft_tokens=None,
        attention="auto",
        deterministic=False,
        gpu_balance=False,
        shares=(),
    )
