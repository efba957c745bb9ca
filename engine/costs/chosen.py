"""What a backend chooses where the settings leave it open."""

from __future__ import annotations

from engine.backends.torch.kv_size import TYPICAL_TOKENS
from engine.config import ModelSpec
from engine.costs.values import DeviceKind
from engine.facts import ModelFacts


def chosen_context(facts: ModelFacts, spec: ModelSpec) -> int:
    """As asked for, else the model's own, stretched as asked."""
    stretch = (spec.alpha_value or 1.0) * (spec.compress_pos_emb or 1.0)
    return spec.max_model_len or int(facts.shape.max_model_len * stretch) or TYPICAL_TOKENS


def chosen_dtype(facts: ModelFacts, spec: ModelSpec, kind: DeviceKind, bfloat16: bool) -> str:
    """As the backend chooses it: what is stored on CUDA, on a CPU bfloat16 or else float32."""
    if facts.backend == "exllamav2":
        return "float16"
    if spec.dtype != "auto":
        return spec.dtype
    if kind == "cuda":
        return facts.stored_dtype
    return "bfloat16" if bfloat16 else "float32"
