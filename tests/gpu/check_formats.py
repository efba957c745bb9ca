"""Weight formats, model families, KV codes, drafts and LoRA on CUDA, against plain answers of the CPU in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.config import AdapterSpec, BackendKind, DtypeName, ModelSpec, SamplingParams
from tests.fakes import quantised_folders
from tests.fakes.adapters import make_adapter
from tests.fakes.tiny_models import make_tiny_model
from tests.gpu.answers import Answers, agreement, ask, prompts
from tests.gpu.models import TINY, Method, exl2_model, exl3_model, packed_model, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, promise

TOKENS, PROMPTS = 40, 6
HALF_NATS, ROUTED_NATS, CODED_NATS = 0.15, 2.0, 0.5
"""How far log-probabilities may lie apart: in float16, in which a CPU is off by up to 0.06; where a rounding sends a
token to another expert, which is 0.9 there; and where it moves a code of the KV pages, 0.3 with 4 bits. Against 16
bits, 8 of ours are off by 0.1 and 4 by 0.7. Wrong weights or masks are off by more, from the first token."""

_WINDOW = 200
_SHAPE: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "dtype": "float16",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A folder as a backend loads it, and what is loaded on the CPU to compare.

    fields: of its spec.  same: those of them that the CPU's has too.  adapter: computes every request, on both.
    steps: tokens of which one answer at least must be equal.  drafts: whether tokens must have been drafted: n-grams
    draft only where a text repeats itself.
    """

    name: str
    folder: Callable[[Place], Path]
    backend: BackendKind = "torch"
    dtype: DtypeName = "float16"
    fields: Mapping[str, Any] = field(default_factory=dict)
    same: tuple[str, ...] = ()
    adapter: bool = False
    tolerance: float = HALF_NATS
    steps: int = TOKENS // 2
    drafts: bool = False


def _packed(method: Method) -> Callable[[Place], Path]:
    return lambda place: packed_model(place, TINY, method)


def _plain(place: Place) -> Path:
    return plain_model(place, TINY, "float16")


def _exl2(place: Place) -> Path:
    return exl2_model(place, TINY)


def _family(architecture: str, **config: Any) -> Callable[[Place], Path]:
    def made(place: Place) -> Path:
        folder = place.models / f"tiny-{architecture}"
        if not folder.exists():
            make_tiny_model(folder, architecture, **_SHAPE, **config)
        return folder

    return made


def gemma2(place: Place) -> Path:
    """A Gemma 2: soft-capped scores and logits, windows in every other layer, norms on both sides of the MLP."""
    folder = place.models / "tiny-gemma2"
    if folder.exists():
        return folder
    make_tiny_model(
        folder,
        "Gemma2ForCausalLM",
        **_SHAPE,
        model_type="gemma2",
        hidden_activation="gelu_pytorch_tanh",
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=_WINDOW,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=10.0,
    )
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(_SHAPE["num_hidden_layers"]):
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.full((_SHAPE["hidden_size"],), 0.1).half()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _coded_mixture(method: quantised_folders.Method) -> Callable[[Place], Path]:
    return lambda place: coded_mixture(place, method)


def coded_mixture(place: Place, method: quantised_folders.Method) -> Path:
    """A mixture whose experts are in codes, those of GPTQ in the order of activations."""
    folder = place.models / f"tiny-mixtral-{method}"
    if not folder.exists():
        quantised_folders.make_twins(
            folder, method, "MixtralForCausalLM", hidden_size=256, intermediate_size=512, max_position_embeddings=4096
        )
    return folder / method


_MIXTURES = (
    ("mixtral", _family("MixtralForCausalLM")),
    ("qwen3 moe", _family("Qwen3MoeForCausalLM", head_dim=64, moe_intermediate_size=128)),
)
CASES = (
    Case("GPTQ", _packed("gptq")),
    Case("GPTQ in the order of activations", _packed("gptq-act-order")),
    Case("AWQ", _packed("awq")),
    Case("FP8", _packed("fp8")),
    Case("EXL2", _exl2),
    Case("GPTQ", _packed("gptq"), backend="exllamav2"),
    Case("gemma 2", gemma2),
    Case("qwen 2", _family("Qwen2ForCausalLM")),
    Case("qwen 3", _family("Qwen3ForCausalLM", head_dim=64)),
    Case("mistral with a window", _family("MistralForCausalLM", sliding_window=_WINDOW)),
    *(Case(f"{name} in float32", folder, dtype="float32") for name, folder in _MIXTURES),
    *(Case(name, folder, tolerance=ROUTED_NATS, steps=4) for name, folder in _MIXTURES),
    *(
        Case(f"mixtral, {name}", _coded_mixture(method), tolerance=ROUTED_NATS, steps=4)
        for name, method in (("GPTQ", "gptq"), ("AWQ", "awq"), ("FP8", "fp8-channel"))
    ),
    Case("LoRA per request", _plain, adapter=True),
    Case("LoRA merged", _plain, fields={"lora": True}, same=("lora",)),
    Case("LoRA", _exl2, backend="exllamav2", fields={"lora": True}, same=("lora",)),
    Case("n-grams", _exl2, fields={"ngram_draft": True}, drafts=True),
    Case("draft model", _plain, fields={"draft_model": True}, drafts=True),
    Case("n-grams", _exl2, backend="exllamav2", fields={"ngram_draft": True}),
    Case("draft model", _exl2, backend="exllamav2", fields={"draft_model": True}, drafts=True),
    *(
        Case(
            f"KV of {bits} bits",
            _plain,
            fields={"cache_bits": bits},
            same=("cache_bits",),
            tolerance=CODED_NATS,
            steps=4,
        )
        for bits in (8, 4)
    ),
    *(
        Case(f"KV of {bits} bits", _exl2, backend="exllamav2", fields={"cache_bits": bits}, tolerance=nats, steps=2)
        for bits, nats in ((8, CODED_NATS), (6, 2 * CODED_NATS), (4, 4 * CODED_NATS))
    ),
)


def checks(place: Place) -> Iterator[Row]:
    """A row or two for each case."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in CASES:
        yield from attempt(title(case), partial(rows, case, place, "cuda:0"))
    yield from attempt(
        "exllamav2, CFG", lambda: guided(_spec(_exl2(place), "exllamav2", "cuda:0", "auto", {}), prompts(4, TINY.vocab))
    )
    if importlib.util.find_spec("exllamav3") is not None:
        exl3 = _spec(exl3_model(place, TINY), "exllamav3", "cuda:0", "auto", {})
        yield from attempt("exllamav3, CFG", lambda: guided(exl3, prompts(4, TINY.vocab)))


def title(case: Case) -> str:
    """Backend and case."""
    return f"{case.backend}, {case.name}"


def rows(case: Case, place: Place, device: str, *, count: int = PROMPTS, tokens: int = TOKENS) -> Iterator[Row]:
    """Whether its answers on `device` agree with plain ones of the CPU, and whether tokens were drafted."""
    folder = case.folder(place)
    fields = dict(case.fields)
    if "draft_model" in fields:
        fields["draft_model"] = folder
    adapter = make_adapter(place.folder / "adapter", folder).folder if case.adapter or "lora" in fields else None
    if "lora" in fields:
        fields["lora"] = adapter
    here = _spec(folder, case.backend, device, case.dtype, fields)
    asked = asked_by(here, count, TINY.vocab)
    common = {name: fields[name] for name in case.same}
    given = AdapterSpec(name="added", path=adapter) if adapter is not None and case.adapter else None
    expected = ask(_spec(folder, "torch", "cpu", "float32", common | {"native": False}), asked, tokens, adapter=given)
    got = ask(here, asked, tokens, adapter=given)
    yield agreed(case, expected, got)
    if case.drafts:
        yield promise(f"{title(case)}: drafts", got.drafted > 0, value=got.accepted / max(1, got.drafted))


def guided(spec: ModelSpec, asked: Sequence[Sequence[int]]) -> list[Row]:
    """Whether guidance against the prompt itself changes nothing, and against another prompt something."""

    def against(negative: Callable[[int], Sequence[int]]) -> Answers:
        params = [
            SamplingParams(temperature=0.0, seed=1, cfg_scale=1.5, negative_prompt_ids=tuple(negative(at)))
            for at in range(len(asked))
        ]
        return ask(spec, asked, TOKENS, params=params)

    plain, same = ask(spec, asked, TOKENS), against(lambda at: asked[at])
    other = against(lambda at: (*asked[at][:-1], asked[at][-1] + 1))
    found = agreement(plain, same)
    return [
        promise(f"{spec.backend}, CFG against the prompt itself", found.within(HALF_NATS, TOKENS // 2), str(found)),
        promise(f"{spec.backend}, CFG against another prompt", other.tokens != plain.tokens, "answers change"),
    ]


def asked_by(spec: ModelSpec, count: int, vocab: int) -> list[list[int]]:
    """Prompts of many lengths; of 1 token too, but for n-grams, which need 3 in exllamav2."""
    return prompts(count + 1, vocab)[1:] if spec.ngram_draft else prompts(count, vocab)


def agreed(case: Case, expected: Answers, got: Answers) -> Row:
    """Whether the answers agree within the case's tolerance."""
    found = agreement(expected, got)
    drafts = f"{got.accepted} of {got.drafted} drafted tokens accepted" if got.drafted else ""
    used = ", ".join(part for part in (got.model.attention, got.model.linear, drafts) if part)
    held = found.within(case.tolerance, case.steps)
    return promise(title(case), held, f"{found}; {used}", value=found.worst_difference, unit="nats")


def _spec(folder: Path, backend: BackendKind, device: str, dtype: DtypeName, fields: Mapping[str, Any]) -> ModelSpec:
    return ModelSpec(
        path=folder,
        name=folder.name,
        backend=backend,
        device=device,
        dtype=dtype,
        max_model_len=2048,
        kv_cache_tokens=8192,
        **fields,
    )
